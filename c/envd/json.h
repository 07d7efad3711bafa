// JSON text to a tree and back. The parser is a pure function over a buffer: bounded depth, bounded
// memory (the arena's limit), strict RFC 8259 grammar.
#ifndef AENV_JSON_H
#define AENV_JSON_H

#include "util.h"

enum jtype { J_NULL, J_BOOL, J_NUMBER, J_STRING, J_ARRAY, J_OBJECT };

typedef struct jval {
  enum jtype type;
  bool b;
  const char *s; // string text (decoded, NUL-terminated; may hold NULs), or the number's own text
  size_t n;
  const char *key; // when a member of an object
  size_t keylen;
  struct jval *child, *next;
} jval;

#define JSON_MAX_DEPTH 64

// NULL when malformed; *err then tells why (static text) and *at the byte offset.
jval *json_parse(arena *a, const char *text, size_t n, const char **err, size_t *at);
// Last member of that name, or NULL; JSON null counts as absent.
const jval *json_get(const jval *obj, const char *key);
// Appends a quoted string. Bytes that are not UTF-8 become U+FFFD.
void json_put_str(buf *out, const char *s, size_t n);
static inline bool json_is_cstr(const jval *v) {
  return v && v->type == J_STRING && !__builtin_memchr(v->s, 0, v->n);
}

#endif
