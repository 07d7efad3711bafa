#include "multipart.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { PART_HEAD_MAX = 16 * 1024, NAME_MAX_BYTES = 8 * 1024 };

ssize_t header_param(const char *value, const char *name, char *out, size_t cap) {
  size_t nl = strlen(name);
  const char *p = value + strcspn(value, ";");
  while (*p == ';') {
    p++;
    while (*p == ' ' || *p == '\t') p++;
    size_t k = strcspn(p, "=; \t");
    bool hit = k == nl && !strncasecmp(p, name, nl);
    p += k;
    while (*p == ' ' || *p == '\t') p++;
    if (*p == '=') {
      p++;
      while (*p == ' ' || *p == '\t') p++;
      size_t n = 0;
      bool quoted = *p == '"';
      if (quoted) p++;
      while (*p && (quoted ? *p != '"' : *p != ';' && *p != ' ' && *p != '\t')) {
        if (quoted && *p == '\\' && (p[1] == '"' || p[1] == '\\')) p++;
        if (hit) {
          if (n + 1 >= cap) return -1;
          out[n++] = *p;
        }
        p++;
      }
      if (quoted && *p == '"') p++;
      if (hit) {
        out[n] = 0;
        return (ssize_t)n;
      }
    } else if (hit) {
      return -1;
    }
    p += strcspn(p, ";");
  }
  return -1;
}

int multipart_init(multipart *m, const char *content_type) {
  char b[75];
  ssize_t n = header_param(content_type, "boundary", b, sizeof b);
  if (n < 1 || n > 70) return -EINVAL;
  memcpy(m->delim, "\r\n--", 4);
  memcpy(m->delim + 4, b, (size_t)n);
  m->dlen = (size_t)n + 4;
  m->state = MP_PREAMBLE;
  buf_put(&m->pending, "\r\n", 2); // the first delimiter may stand at the very start
  return 0;
}

void multipart_free(multipart *m) {
  buf_free(&m->pending);
}

bool multipart_complete(const multipart *m) {
  return m->state == MP_EPILOGUE;
}

// Browsers and fetch write '"', CR and LF in names as %22, %0D, %0A and leave '%' alone.
static void unescape_form(char *s) {
  char *o = s;
  for (; *s; s++) {
    if (s[0] == '%' && s[1] == '2' && s[2] == '2')
      *o++ = '"', s += 2;
    else if (s[0] == '%' && s[1] == '0' && (s[2] == 'A' || s[2] == 'a'))
      *o++ = '\n', s += 2;
    else if (s[0] == '%' && s[1] == '0' && (s[2] == 'D' || s[2] == 'd'))
      *o++ = '\r', s += 2;
    else
      *o++ = *s;
  }
  *o = 0;
}

// The head of a part, NUL-terminated, each line ending in CRLF.
static int part_head(multipart *m, char *head) {
  char *name = malloc(2 * NAME_MAX_BYTES);
  if (!name) return -ENOMEM;
  char *file = name + NAME_MAX_BYTES;
  bool has_file = false;
  name[0] = 0;
  for (char *p = head, *eol; *p; p = eol) {
    eol = strstr(p, "\r\n");
    if (eol) {
      *eol = 0;
      eol += 2;
    } else {
      eol = p + strlen(p);
    }
    if (strncasecmp(p, "content-disposition:", 20)) continue;
    if (header_param(p, "name", name, NAME_MAX_BYTES) < 0) name[0] = 0;
    char star[NAME_MAX_BYTES];
    if (header_param(p, "filename*", star, sizeof star) > 7 && !strncasecmp(star, "utf-8'", 6) && strchr(star + 6, '\'')) {
      char *t = strchr(star + 6, '\'') + 1;
      ssize_t n = url_decode(t, strlen(t), false);
      if (n >= 0) {
        memcpy(file, t, (size_t)n);
        file[n] = 0;
        has_file = true;
      }
    } else if (header_param(p, "filename", file, NAME_MAX_BYTES) >= 0) {
      has_file = true;
      unescape_form(file);
    }
  }
  int rc = m->begin(m->arg, name, has_file ? file : NULL);
  free(name);
  return rc;
}

static int step(multipart *m, bool *more) {
  uint8_t *p = buf_data(&m->pending);
  size_t n = buf_len(&m->pending);
  int rc = 0;
  *more = false;
  switch (m->state) {
  case MP_PREAMBLE:
  case MP_BODY: {
    uint8_t *hit = memmem(p, n, m->delim, m->dlen);
    size_t take = hit ? (size_t)(hit - p) : n >= m->dlen ? n - (m->dlen - 1) : 0;
    if (take && m->state == MP_BODY) rc = m->data(m->arg, p, take);
    if (rc) return rc;
    if (hit && m->state == MP_BODY) rc = m->end(m->arg);
    buf_consume(&m->pending, take + (hit ? m->dlen : 0));
    if (hit) m->state = MP_AFTER;
    *more = hit != NULL;
    return rc;
  }
  case MP_AFTER: { // "--" ends it all, else optional blanks and CRLF
    if (n >= 2 && p[0] == '-' && p[1] == '-') {
      m->state = MP_EPILOGUE;
      *more = true;
      return 0;
    }
    size_t i = 0;
    while (i < n && (p[i] == ' ' || p[i] == '\t')) i++;
    if (i > 256) return -EINVAL;
    if (n - i < 2) return 0;
    if (p[i] != '\r' || p[i + 1] != '\n') return -EINVAL;
    buf_consume(&m->pending, i); // CRLF stays: a part without headers has it twice
    m->state = MP_HEADERS;
    *more = true;
    return 0;
  }
  case MP_HEADERS: {
    uint8_t *end = memmem(p, n, "\r\n\r\n", 4);
    if (!end) return n > PART_HEAD_MAX + 3 ? -EINVAL : 0; // three bytes of its end may be there
    size_t len = (size_t)(end - p);
    if (len > PART_HEAD_MAX || memchr(p, 0, len)) return -EINVAL;
    char *head = malloc(len + 3);
    if (!head) return -ENOMEM;
    memcpy(head, p, len + 2);
    head[len + 2] = 0;
    rc = part_head(m, head + 2);
    free(head);
    buf_consume(&m->pending, len + 4);
    m->state = MP_BODY;
    *more = true;
    return rc;
  }
  case MP_EPILOGUE: buf_clear(&m->pending); return 0;
  }
  return -EINVAL;
}

int multipart_feed(multipart *m, const uint8_t *p, size_t n) {
  buf_put(&m->pending, p, n);
  if (m->pending.oom) return -ENOMEM;
  bool more = true;
  int rc = 0;
  while (more && !rc) rc = step(m, &more);
  return rc;
}
