#include "json.h"

#include <string.h>

typedef struct {
  arena *a;
  const char *s;
  size_t n, i;
  const char *err;
} parser;

static void skip_ws(parser *p) {
  while (p->i < p->n && strchr(" \t\r\n", p->s[p->i]) && p->s[p->i]) p->i++;
}

static bool fail(parser *p, const char *why) {
  if (!p->err) p->err = why;
  return false;
}

static bool hex4(parser *p, uint32_t *out) {
  if (p->n - p->i < 4) return fail(p, "unfinished \\u escape");
  uint32_t v = 0;
  for (int k = 0; k < 4; k++) {
    char c = p->s[p->i++];
    uint32_t d;
    if (c >= '0' && c <= '9')
      d = (uint32_t)(c - '0');
    else if (c >= 'a' && c <= 'f')
      d = (uint32_t)(c - 'a' + 10);
    else if (c >= 'A' && c <= 'F')
      d = (uint32_t)(c - 'A' + 10);
    else
      return fail(p, "bad \\u escape");
    v = v << 4 | d;
  }
  *out = v;
  return true;
}

static size_t put_utf8(char *o, uint32_t c) {
  if (c < 0x80) return o[0] = (char)c, 1;
  if (c < 0x800) return o[0] = (char)(0xc0 | c >> 6), o[1] = (char)(0x80 | (c & 63)), 2;
  if (c < 0x10000)
    return o[0] = (char)(0xe0 | c >> 12), o[1] = (char)(0x80 | (c >> 6 & 63)), o[2] = (char)(0x80 | (c & 63)), 3;
  o[0] = (char)(0xf0 | c >> 18);
  o[1] = (char)(0x80 | (c >> 12 & 63));
  o[2] = (char)(0x80 | (c >> 6 & 63));
  o[3] = (char)(0x80 | (c & 63));
  return 4;
}

static bool parse_string(parser *p, const char **out, size_t *outn) {
  p->i++; // opening quote
  size_t end = p->i;
  while (end < p->n && p->s[end] != '"') end += p->s[end] == '\\' && end + 1 < p->n ? 2 : 1;
  if (end >= p->n) return fail(p, "unfinished string");
  char *o = arena_alloc(p->a, end - p->i + 1); // decoded text is never longer than its escaped form
  if (!o) return fail(p, "message too large");
  size_t k = 0;
  while (p->s[p->i] != '"') {
    uint8_t c = (uint8_t)p->s[p->i];
    if (c < 0x20) return fail(p, "control character in string");
    if (c != '\\') {
      size_t u = utf8_seq((const uint8_t *)p->s + p->i, end - p->i);
      if (!u) return fail(p, "string is not valid UTF-8");
      memcpy(o + k, p->s + p->i, u);
      k += u;
      p->i += u;
      continue;
    }
    p->i++;
    switch (p->s[p->i++]) {
    case '"': o[k++] = '"'; break;
    case '\\': o[k++] = '\\'; break;
    case '/': o[k++] = '/'; break;
    case 'b': o[k++] = '\b'; break;
    case 'f': o[k++] = '\f'; break;
    case 'n': o[k++] = '\n'; break;
    case 'r': o[k++] = '\r'; break;
    case 't': o[k++] = '\t'; break;
    case 'u': {
      uint32_t c1, c2;
      if (!hex4(p, &c1)) return false;
      if (c1 >= 0xd800 && c1 < 0xdc00) {
        if (p->n - p->i < 6 || p->s[p->i] != '\\' || p->s[p->i + 1] != 'u') return fail(p, "lone surrogate");
        p->i += 2;
        if (!hex4(p, &c2)) return false;
        if (c2 < 0xdc00 || c2 > 0xdfff) return fail(p, "lone surrogate");
        c1 = 0x10000 + ((c1 - 0xd800) << 10) + (c2 - 0xdc00);
      } else if (c1 >= 0xdc00 && c1 <= 0xdfff) {
        return fail(p, "lone surrogate");
      }
      k += put_utf8(o + k, c1);
      break;
    }
    default: return fail(p, "bad escape");
    }
  }
  p->i++; // closing quote
  *out = o;
  *outn = k;
  return true;
}

static bool parse_number(parser *p, jval *v) {
  size_t st = p->i;
  if (p->i < p->n && p->s[p->i] == '-') p->i++;
  size_t d = p->i;
  while (p->i < p->n && p->s[p->i] >= '0' && p->s[p->i] <= '9') p->i++;
  if (p->i == d || (p->s[d] == '0' && p->i - d > 1)) return fail(p, "bad number");
  if (p->i < p->n && p->s[p->i] == '.') {
    d = ++p->i;
    while (p->i < p->n && p->s[p->i] >= '0' && p->s[p->i] <= '9') p->i++;
    if (p->i == d) return fail(p, "bad number");
  }
  if (p->i < p->n && (p->s[p->i] == 'e' || p->s[p->i] == 'E')) {
    p->i++;
    if (p->i < p->n && (p->s[p->i] == '+' || p->s[p->i] == '-')) p->i++;
    d = p->i;
    while (p->i < p->n && p->s[p->i] >= '0' && p->s[p->i] <= '9') p->i++;
    if (p->i == d) return fail(p, "bad number");
  }
  v->type = J_NUMBER;
  v->n = p->i - st;
  v->s = arena_strndup(p->a, p->s + st, v->n);
  return v->s ? true : fail(p, "message too large");
}

static bool literal(parser *p, const char *word) {
  size_t n = strlen(word);
  if (p->n - p->i < n || memcmp(p->s + p->i, word, n)) return fail(p, "unexpected character");
  p->i += n;
  return true;
}

static jval *parse_value(parser *p, int depth) {
  if (depth > JSON_MAX_DEPTH) return fail(p, "nested too deeply"), NULL;
  skip_ws(p);
  if (p->i >= p->n) return fail(p, "unexpected end"), NULL;
  jval *v = arena_alloc(p->a, sizeof *v);
  if (!v) return fail(p, "message too large"), NULL;
  char c = p->s[p->i];
  if (c == '"') {
    v->type = J_STRING;
    return parse_string(p, &v->s, &v->n) ? v : NULL;
  }
  if (c == '{' || c == '[') {
    char close = c == '{' ? '}' : ']';
    v->type = c == '{' ? J_OBJECT : J_ARRAY;
    p->i++;
    skip_ws(p);
    if (p->i < p->n && p->s[p->i] == close) return p->i++, v;
    jval **tail = &v->child;
    for (;;) {
      const char *key = NULL;
      size_t keylen = 0;
      if (c == '{') {
        skip_ws(p);
        if (p->i >= p->n || p->s[p->i] != '"') return fail(p, "expected a member name"), NULL;
        if (!parse_string(p, &key, &keylen)) return NULL;
        skip_ws(p);
        if (p->i >= p->n || p->s[p->i] != ':') return fail(p, "expected ':'"), NULL;
        p->i++;
      }
      jval *m = parse_value(p, depth + 1);
      if (!m) return NULL;
      m->key = key;
      m->keylen = keylen;
      *tail = m;
      tail = &m->next;
      skip_ws(p);
      if (p->i < p->n && p->s[p->i] == ',') {
        p->i++;
        continue;
      }
      if (p->i < p->n && p->s[p->i] == close) return p->i++, v;
      return fail(p, c == '{' ? "expected ',' or '}'" : "expected ',' or ']'"), NULL;
    }
  }
  if (c == 't' || c == 'f') {
    v->type = J_BOOL;
    v->b = c == 't';
    return literal(p, v->b ? "true" : "false") ? v : NULL;
  }
  if (c == 'n') return literal(p, "null") ? v : NULL;
  return parse_number(p, v) ? v : NULL;
}

jval *json_parse(arena *a, const char *text, size_t n, const char **err, size_t *at) {
  parser p = {.a = a, .s = text, .n = n};
  jval *v = parse_value(&p, 0);
  if (v) {
    skip_ws(&p);
    if (p.i < n) fail(&p, "text after the value"), v = NULL;
  }
  *err = p.err;
  *at = p.i;
  return v;
}

const jval *json_get(const jval *obj, const char *key) {
  const jval *hit = NULL;
  if (!obj || obj->type != J_OBJECT) return NULL;
  size_t n = strlen(key);
  for (const jval *m = obj->child; m; m = m->next)
    if (m->keylen == n && !memcmp(m->key, key, n)) hit = m;
  return hit && hit->type != J_NULL ? hit : NULL;
}

void json_put_str(buf *out, const char *s, size_t n) {
  buf_putc(out, '"');
  size_t run = 0; // start of the text not yet copied
  for (size_t i = 0; i < n;) {
    uint8_t c = (uint8_t)s[i];
    size_t u = c < 0x80 ? 1 : utf8_seq((const uint8_t *)s + i, n - i);
    if (u && c >= 0x20 && c != '"' && c != '\\') {
      i += u;
      continue;
    }
    buf_put(out, s + run, i - run);
    if (!u)
      buf_puts(out, "\xef\xbf\xbd");
    else if (c == '\n')
      buf_puts(out, "\\n");
    else if (c < 0x20)
      buf_printf(out, "\\u%04x", c);
    else
      buf_put(out, (char[]){'\\', (char)c}, 2);
    run = ++i;
  }
  buf_put(out, s + run, n - run);
  buf_putc(out, '"');
}
