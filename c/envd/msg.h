// Messages described by tables: one description serves JSON (proto3 mapping) and binary protobuf, both ways.
#ifndef AENV_MSG_H
#define AENV_MSG_H

#include "json.h"
#include "util.h"

enum kind {
  K_STRING,
  K_BYTES,
  K_BOOL,
  K_U32,
  K_SINT32, // zigzag
  K_INT64,  // a string in JSON
  K_ENUM,
  K_MSG,
  K_MAP,  // map<string, string>
  K_TIME, // google.protobuf.Timestamp
};

enum { F_REPEATED = 1, F_PRESENCE = 2, F_ONEOF = 4 }; // a message has at most one oneof here

typedef struct {
  const char *name;
  int32_t number;
} enumval;

typedef struct fdesc {
  uint32_t num;
  const char *name; // camelCase
  enum kind kind;
  unsigned flags;
  const struct mdesc *sub;
  const enumval *enums; // ends with a NULL name
} fdesc;

typedef struct mdesc {
  const char *name;
  const fdesc *fields;
  unsigned n;
} mdesc;

typedef struct val {
  struct val *next;
  const char *s; // STRING, BYTES; MAP: the value. Strings are NUL-terminated and hold no NUL
  size_t n;
  const char *key; // MAP
  size_t keylen;
  int64_t i; // numbers, BOOL, ENUM; TIME: seconds
  int32_t nsec;
  struct msg *m;
} val;

typedef struct msg {
  const mdesc *d;
  struct {
    val *first, *last;
  } f[];
} msg;

msg *msg_new(arena *a, const mdesc *d); // NULL when the arena is full

// Decoders. NULL when malformed; *err tells why (arena or static text). Unknown fields are skipped.
msg *msg_from_json(arena *a, const mdesc *d, const char *text, size_t n, const char **err);
msg *msg_from_pb(arena *a, const mdesc *d, const uint8_t *data, size_t n, const char **err);

// Encoders. Out of memory shows in out->oom.
void msg_to_json(buf *out, const msg *m);
void msg_to_pb(buf *out, const msg *m);

// Reading: field by number. The value (first one), or NULL when absent.
const val *msg_get(const msg *m, uint32_t num);
const char *msg_str(const msg *m, uint32_t num); // "" when absent
int64_t msg_int(const msg *m, uint32_t num);     // 0 when absent
const msg *msg_sub(const msg *m, uint32_t num);  // NULL when absent

// Building: NULL-tolerant; the new value or NULL when out of memory. Text is referenced, not copied.
val *msg_add(arena *a, msg *m, uint32_t num);
void msg_add_str(arena *a, msg *m, uint32_t num, const char *s);
void msg_add_bytes(arena *a, msg *m, uint32_t num, const void *p, size_t n);
void msg_add_int(arena *a, msg *m, uint32_t num, int64_t v);
void msg_add_map(arena *a, msg *m, uint32_t num, const char *key, const char *value);
msg *msg_add_sub(arena *a, msg *m, uint32_t num);

#endif
