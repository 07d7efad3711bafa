#include "msg.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

msg *msg_new(arena *a, const mdesc *d) {
  msg *m = arena_alloc(a, sizeof *m + d->n * sizeof m->f[0]);
  if (m) m->d = d;
  return m;
}

static int field_index(const mdesc *d, uint32_t num) {
  for (unsigned i = 0; i < d->n; i++)
    if (d->fields[i].num == num) return (int)i;
  return -1;
}

const val *msg_get(const msg *m, uint32_t num) {
  int i = m ? field_index(m->d, num) : -1;
  return i < 0 ? NULL : m->f[i].first;
}

const char *msg_str(const msg *m, uint32_t num) {
  const val *v = msg_get(m, num);
  return v && v->s ? v->s : "";
}

int64_t msg_int(const msg *m, uint32_t num) {
  const val *v = msg_get(m, num);
  return v ? v->i : 0;
}

const msg *msg_sub(const msg *m, uint32_t num) {
  const val *v = msg_get(m, num);
  return v ? v->m : NULL;
}

// Adds a value slot by field index: repeated fields and maps grow, single ones are replaced, a oneof keeps
// its last member.
static val *add_at(arena *a, msg *m, unsigned i) {
  const fdesc *f = &m->d->fields[i];
  val *v = arena_alloc(a, sizeof *v);
  if (!v) return NULL;
  if (f->flags & F_ONEOF)
    for (unsigned k = 0; k < m->d->n; k++)
      if (m->d->fields[k].flags & F_ONEOF) m->f[k].first = m->f[k].last = NULL;
  if (((f->flags & F_REPEATED) || f->kind == K_MAP) && m->f[i].last) {
    m->f[i].last->next = v;
    m->f[i].last = v;
  } else {
    m->f[i].first = m->f[i].last = v;
  }
  return v;
}

val *msg_add(arena *a, msg *m, uint32_t num) {
  int i = m ? field_index(m->d, num) : -1;
  return i < 0 ? NULL : add_at(a, m, (unsigned)i);
}

void msg_add_bytes(arena *a, msg *m, uint32_t num, const void *p, size_t n) {
  val *v = msg_add(a, m, num);
  if (!v) return;
  v->s = p;
  v->n = n;
}

void msg_add_str(arena *a, msg *m, uint32_t num, const char *s) {
  msg_add_bytes(a, m, num, s, strlen(s));
}

void msg_add_int(arena *a, msg *m, uint32_t num, int64_t n) {
  val *v = msg_add(a, m, num);
  if (v) v->i = n;
}

void msg_add_map(arena *a, msg *m, uint32_t num, const char *key, const char *value) {
  val *v = msg_add(a, m, num);
  if (!v) return;
  v->key = key;
  v->keylen = strlen(key);
  v->s = value;
  v->n = strlen(value);
}

msg *msg_add_sub(arena *a, msg *m, uint32_t num) {
  val *v = msg_add(a, m, num);
  if (!v) return NULL;
  return v->m = msg_new(a, m->d->fields[field_index(m->d, num)].sub);
}

// ---- JSON --------------------------------------------------------------------------------------

static bool name_is(const char *camel, const char *in, size_t n) {
  if (strlen(camel) == n && !memcmp(camel, in, n)) return true;
  size_t i = 0;
  for (const char *c = camel; *c; c++) { // the snake_case spelling
    if (*c >= 'A' && *c <= 'Z') {
      if (i + 1 >= n || in[i] != '_' || in[i + 1] != *c - 'A' + 'a') return false;
      i += 2;
    } else {
      if (i >= n || in[i] != *c) return false;
      i++;
    }
  }
  return i == n;
}

static bool json_bad(arena *a, const char **err, const fdesc *f, const char *what) {
  char *t = arena_printf(a, "field '%s': %s", f->name, what);
  *err = t ? t : "message too large";
  return false;
}

// Integers may come as numbers (also 1.0, 1e3) or strings.
static bool json_int(const jval *j, int64_t min, int64_t max, int64_t *out) {
  if ((j->type != J_NUMBER && j->type != J_STRING) || !j->n || j->n > 40) return false;
  char *end;
  errno = 0;
  long long v = strtoll(j->s, &end, 10);
  if (errno || *end) {
    double d = strtod(j->s, &end);
    if (*end || !(d >= -9007199254740992.0 && d <= 9007199254740992.0) || d != (double)(int64_t)d) return false;
    v = (int64_t)d;
  }
  if (j->type == J_STRING && strchr(" \t\n\r+", j->s[0])) return false;
  if (v < min || v > max) return false;
  *out = v;
  return true;
}

static msg *from_jval(arena *a, const mdesc *d, const jval *j, const char **err, int depth);

static bool json_value(arena *a, const fdesc *f, const jval *j, val *v, const char **err, int depth) {
  switch (f->kind) {
  case K_STRING:
    if (j->type != J_STRING) return json_bad(a, err, f, "expected a string");
    if (!json_is_cstr(j)) return json_bad(a, err, f, "must not contain a NUL character");
    v->s = j->s;
    v->n = j->n;
    return true;
  case K_BYTES: {
    if (j->type != J_STRING) return json_bad(a, err, f, "expected a base64 string");
    uint8_t *p = arena_alloc(a, j->n / 4 * 3 + 4);
    if (!p) return *err = "message too large", false;
    ssize_t n = base64_decode(p, j->s, j->n);
    if (n < 0) return json_bad(a, err, f, "not valid base64");
    v->s = (char *)p;
    v->n = (size_t)n;
    return true;
  }
  case K_BOOL:
    if (j->type != J_BOOL) return json_bad(a, err, f, "expected true or false");
    v->i = j->b;
    return true;
  case K_U32: return json_int(j, 0, UINT32_MAX, &v->i) || json_bad(a, err, f, "expected an unsigned 32-bit integer");
  case K_SINT32: return json_int(j, INT32_MIN, INT32_MAX, &v->i) || json_bad(a, err, f, "expected a 32-bit integer");
  case K_INT64: return json_int(j, INT64_MIN, INT64_MAX, &v->i) || json_bad(a, err, f, "expected a 64-bit integer");
  case K_ENUM:
    if (j->type == J_STRING)
      for (const enumval *e = f->enums; e->name; e++)
        if (!strcmp(e->name, j->s)) return v->i = e->number, true;
    if (j->type == J_NUMBER && json_int(j, INT32_MIN, INT32_MAX, &v->i)) return true;
    return json_bad(a, err, f, "unknown enum value");
  case K_MSG: return (v->m = from_jval(a, f->sub, j, err, depth + 1)) != NULL;
  case K_TIME:
    if (j->type != J_STRING || rfc3339_parse(j->s, j->n, &v->i, &v->nsec))
      return json_bad(a, err, f, "expected an RFC 3339 time");
    return true;
  case K_MAP: break; // handled by the caller
  }
  return json_bad(a, err, f, "unexpected value");
}

static msg *from_jval(arena *a, const mdesc *d, const jval *j, const char **err, int depth) {
  if (depth > JSON_MAX_DEPTH) return *err = "nested too deeply", NULL;
  if (j->type != J_OBJECT) {
    char *t = arena_printf(a, "%s: expected an object", d->name);
    return *err = t ? t : "message too large", NULL;
  }
  msg *m = msg_new(a, d);
  if (!m) return *err = "message too large", NULL;
  bool oneof = false;
  for (const jval *c = j->child; c; c = c->next) {
    unsigned i = 0;
    while (i < d->n && !name_is(d->fields[i].name, c->key, c->keylen)) i++;
    if (i == d->n || c->type == J_NULL) continue;
    const fdesc *f = &d->fields[i];
    if (f->flags & F_ONEOF) {
      if (oneof) return json_bad(a, err, f, "only one member of a oneof may be set"), NULL;
      oneof = true;
    }
    if (f->kind == K_MAP) {
      if (c->type != J_OBJECT) return json_bad(a, err, f, "expected an object"), NULL;
      for (const jval *e = c->child; e; e = e->next) {
        if (!json_is_cstr(e) || memchr(e->key, 0, e->keylen))
          return json_bad(a, err, f, "expected string values without NUL characters"), NULL;
        val *v = add_at(a, m, i);
        if (!v) return *err = "message too large", NULL;
        v->key = e->key;
        v->keylen = e->keylen;
        v->s = e->s;
        v->n = e->n;
      }
      continue;
    }
    bool rep = f->flags & F_REPEATED;
    if (rep && c->type != J_ARRAY) return json_bad(a, err, f, "expected an array"), NULL;
    for (const jval *e = rep ? c->child : c; e; e = rep ? e->next : NULL) {
      val *v = add_at(a, m, i);
      if (!v) return *err = "message too large", NULL;
      if (!json_value(a, f, e, v, err, depth)) return NULL;
    }
  }
  return m;
}

msg *msg_from_json(arena *a, const mdesc *d, const char *text, size_t n, const char **err) {
  const char *why;
  size_t at;
  jval *j = json_parse(a, text, n, &why, &at);
  if (!j) {
    char *t = arena_printf(a, "invalid JSON at byte %zu: %s", at, why);
    return *err = t ? t : "message too large", NULL;
  }
  return from_jval(a, d, j, err, 0);
}

static bool is_default(const fdesc *f, const val *v) {
  if (f->flags & (F_PRESENCE | F_ONEOF)) return false;
  switch (f->kind) {
  case K_STRING:
  case K_BYTES: return v->n == 0;
  case K_MSG:
  case K_TIME:
  case K_MAP: return false;
  default: return v->i == 0;
  }
}

static void json_out(buf *out, const fdesc *f, const val *v) {
  switch (f->kind) {
  case K_STRING: json_put_str(out, v->s ? v->s : "", v->n); break;
  case K_BYTES:
    buf_putc(out, '"');
    base64_put(out, (const uint8_t *)v->s, v->n, true);
    buf_putc(out, '"');
    break;
  case K_BOOL: buf_puts(out, v->i ? "true" : "false"); break;
  case K_U32:
  case K_SINT32: buf_printf(out, "%lld", (long long)v->i); break;
  case K_INT64: buf_printf(out, "\"%lld\"", (long long)v->i); break;
  case K_ENUM: {
    const enumval *e = f->enums;
    while (e->name && e->number != v->i) e++;
    if (e->name)
      buf_printf(out, "\"%s\"", e->name);
    else
      buf_printf(out, "%lld", (long long)v->i);
    break;
  }
  case K_MSG: msg_to_json(out, v->m); break;
  case K_TIME:
    buf_putc(out, '"');
    rfc3339_put(out, v->i, v->nsec);
    buf_putc(out, '"');
    break;
  case K_MAP:
    json_put_str(out, v->key, v->keylen);
    buf_putc(out, ':');
    json_put_str(out, v->s, v->n);
    break;
  }
}

void msg_to_json(buf *out, const msg *m) {
  buf_putc(out, '{');
  bool comma = false;
  for (unsigned i = 0; m && i < m->d->n; i++) {
    const fdesc *f = &m->d->fields[i];
    const val *v = m->f[i].first;
    bool many = (f->flags & F_REPEATED) || f->kind == K_MAP;
    if (!v || (!many && is_default(f, v))) continue;
    if (comma) buf_putc(out, ',');
    comma = true;
    buf_printf(out, "\"%s\":", f->name);
    if (many) buf_putc(out, f->kind == K_MAP ? '{' : '[');
    for (; v; v = v->next) {
      json_out(out, f, v);
      if (v->next) buf_putc(out, ',');
    }
    if (many) buf_putc(out, f->kind == K_MAP ? '}' : ']');
  }
  buf_putc(out, '}');
}
