// The binary protobuf side of msg.h (wire format: protobuf.dev/programming-guides/encoding).
#include <string.h>

#include "msg.h"

#define PB_MAX_DEPTH 64

enum { W_VARINT = 0, W_64 = 1, W_LEN = 2, W_32 = 5 };

typedef struct {
  const uint8_t *p, *end;
} reader;

static bool get_varint(reader *r, uint64_t *out) {
  uint64_t v = 0;
  for (int s = 0; s < 64; s += 7) {
    if (r->p == r->end) return false;
    uint8_t b = *r->p++;
    v |= (uint64_t)(b & 0x7f) << s;
    if (!(b & 0x80)) return *out = v, true;
  }
  return false;
}

static bool get_len(reader *r, const uint8_t **p, size_t *n) {
  uint64_t v;
  if (!get_varint(r, &v) || v > (uint64_t)(r->end - r->p)) return false;
  *p = r->p;
  *n = (size_t)v;
  r->p += v;
  return true;
}

static bool skip_field(reader *r, unsigned wire) {
  uint64_t v;
  const uint8_t *p;
  size_t n;
  switch (wire) {
  case W_VARINT: return get_varint(r, &v);
  case W_64: return r->end - r->p >= 8 ? (r->p += 8, true) : false;
  case W_LEN: return get_len(r, &p, &n);
  case W_32: return r->end - r->p >= 4 ? (r->p += 4, true) : false;
  default: return false;
  }
}

static bool get_text(arena *a, const uint8_t *p, size_t n, const char **s, size_t *len, const char **err) {
  if (memchr(p, 0, n)) return *err = "a string must not contain a NUL character", false;
  for (size_t i = 0; i < n;) {
    size_t u = utf8_seq(p + i, n - i);
    if (!u) return *err = "a string is not valid UTF-8", false;
    i += u;
  }
  *s = arena_strndup(a, (const char *)p, n);
  *len = n;
  return *s ? true : (*err = "message too large", false);
}

static msg *decode(arena *a, const mdesc *d, reader r, const char **err, int depth);

static bool decode_entry(arena *a, reader r, val *v, const char **err) {
  v->key = v->s = "";
  while (r.p < r.end) {
    uint64_t tag;
    const uint8_t *p;
    size_t n;
    if (!get_varint(&r, &tag)) return false;
    if (tag == (1 << 3 | W_LEN)) {
      if (!get_len(&r, &p, &n) || !get_text(a, p, n, &v->key, &v->keylen, err)) return false;
    } else if (tag == (2 << 3 | W_LEN)) {
      if (!get_len(&r, &p, &n) || !get_text(a, p, n, &v->s, &v->n, err)) return false;
    } else if (!skip_field(&r, tag & 7)) {
      return false;
    }
  }
  return true;
}

static bool decode_time(reader r, val *v) {
  while (r.p < r.end) {
    uint64_t tag, n;
    if (!get_varint(&r, &tag)) return false;
    if (tag == (1 << 3 | W_VARINT) || tag == (2 << 3 | W_VARINT)) {
      if (!get_varint(&r, &n)) return false;
      if (tag >> 3 == 1)
        v->i = (int64_t)n;
      else
        v->nsec = (int32_t)n;
    } else if (!skip_field(&r, tag & 7)) {
      return false;
    }
  }
  return v->nsec >= 0 && v->nsec < 1000000000; // google/protobuf/timestamp.proto
}

static msg *decode(arena *a, const mdesc *d, reader r, const char **err, int depth) {
  static const char bad[] = "malformed protobuf message";
  if (depth > PB_MAX_DEPTH) return *err = "nested too deeply", NULL;
  msg *m = msg_new(a, d);
  if (!m) return *err = "message too large", NULL;
  while (r.p < r.end) {
    uint64_t tag;
    if (!get_varint(&r, &tag) || tag >> 3 == 0 || tag >> 3 > 0x1fffffff) return *err = bad, NULL;
    unsigned wire = tag & 7;
    const fdesc *f = NULL;
    for (unsigned i = 0; i < d->n; i++)
      if (d->fields[i].num == tag >> 3) f = &d->fields[i];
    bool scalar = f && f->kind != K_STRING && f->kind != K_BYTES && f->kind != K_MSG && f->kind != K_MAP &&
                  f->kind != K_TIME;
    if (!f || wire != (scalar ? W_VARINT : W_LEN)) { // unknown, or of another type: skipped like unknown
      if (!skip_field(&r, wire)) return *err = bad, NULL;
      continue;
    }
    val *v = msg_add(a, m, f->num);
    if (!v) return *err = "message too large", NULL;
    uint64_t u = 0;
    const uint8_t *p = NULL;
    size_t n = 0;
    if (scalar ? !get_varint(&r, &u) : !get_len(&r, &p, &n)) return *err = bad, NULL;
    switch (f->kind) {
    case K_STRING:
      if (!get_text(a, p, n, &v->s, &v->n, err)) return NULL;
      break;
    case K_BYTES:
      v->s = arena_strndup(a, (const char *)p, n);
      v->n = n;
      if (!v->s) return *err = "message too large", NULL;
      break;
    case K_BOOL: v->i = u != 0; break;
    case K_U32: v->i = (uint32_t)u; break;
    case K_SINT32: v->i = (int32_t)((uint32_t)u >> 1 ^ (0u - ((uint32_t)u & 1))); break;
    case K_INT64: v->i = (int64_t)u; break;
    case K_ENUM: v->i = (int32_t)u; break;
    case K_MSG:
      v->m = decode(a, f->sub, (reader){p, p + n}, err, depth + 1);
      if (!v->m) return NULL;
      break;
    case K_MAP:
    case K_TIME:
      *err = bad;
      if (f->kind == K_MAP ? !decode_entry(a, (reader){p, p + n}, v, err) : !decode_time((reader){p, p + n}, v))
        return NULL;
      break;
    }
  }
  return m;
}

msg *msg_from_pb(arena *a, const mdesc *d, const uint8_t *data, size_t n, const char **err) {
  if (!n) data = (const uint8_t *)""; // no arithmetic on NULL
  return decode(a, d, (reader){data, data + n}, err, 0);
}

// ---- encoding ----------------------------------------------------------------------------------

static void put_varint(buf *out, uint64_t v) {
  uint8_t tmp[10];
  size_t n = 0;
  do {
    tmp[n] = v & 0x7f;
    v >>= 7;
    if (v) tmp[n] |= 0x80;
    n++;
  } while (v);
  buf_put(out, tmp, n);
}

static size_t varint_size(uint64_t v) {
  size_t n = 1;
  while (v >>= 7) n++;
  return n;
}

// Text that is not UTF-8 (a file name) cannot be a protobuf string: such bytes become U+FFFD.
static size_t text_size(const char *s, size_t n) {
  size_t len = 0;
  for (size_t i = 0; i < n;) {
    size_t u = utf8_seq((const uint8_t *)s + i, n - i);
    len += u ? u : 3;
    i += u ? u : 1;
  }
  return len;
}

static size_t with_length(size_t n) {
  return varint_size(n) + n;
}

static void put_text(buf *out, const char *s, size_t n) {
  size_t len = text_size(s, n);
  put_varint(out, len);
  if (len == n) {
    buf_put(out, s, n); // cannot hold a replaced byte: each adds two
    return;
  }
  for (size_t i = 0; i < n;) {
    size_t u = utf8_seq((const uint8_t *)s + i, n - i);
    buf_put(out, u ? s + i : "\xef\xbf\xbd", u ? u : 3);
    i += u ? u : 1;
  }
}

static uint64_t scalar_bits(const fdesc *f, const val *v) {
  if (f->kind == K_SINT32) {
    uint32_t z = (uint32_t)v->i << 1 ^ (v->i < 0 ? UINT32_MAX : 0);
    return z;
  }
  return (uint64_t)v->i; // negative int32/enum values are sign-extended to 64 bits on the wire
}

static size_t time_size(const val *v) {
  return (v->i ? 1 + varint_size((uint64_t)v->i) : 0) + (v->nsec ? 1 + varint_size((uint64_t)v->nsec) : 0);
}

static size_t map_size(const val *v) {
  return 2 + with_length(text_size(v->key, v->keylen)) + with_length(text_size(v->s, v->n));
}

static bool left_out(const fdesc *f, const val *v) {
  if ((f->flags & (F_REPEATED | F_PRESENCE | F_ONEOF)) || f->kind == K_MSG || f->kind == K_TIME || f->kind == K_MAP) return false;
  return f->kind == K_STRING || f->kind == K_BYTES ? v->n == 0 : v->i == 0;
}

static bool has_length(const fdesc *f) {
  return f->kind == K_STRING || f->kind == K_BYTES || f->kind == K_MSG || f->kind == K_MAP || f->kind == K_TIME;
}

// Sizes come before contents on the wire. Nothing here is nested deeply: to count again at each level is cheaper than to
// build every message in memory of its own.
static size_t msg_size(const msg *m) {
  size_t n = 0;
  for (unsigned i = 0; m && i < m->d->n; i++) {
    const fdesc *f = &m->d->fields[i];
    for (const val *v = m->f[i].first; v; v = v->next) {
      if (left_out(f, v)) continue;
      n += varint_size((uint64_t)f->num << 3);
      switch (f->kind) {
      case K_STRING: n += with_length(text_size(v->s, v->n)); break;
      case K_BYTES: n += with_length(v->n); break;
      case K_MSG: n += with_length(msg_size(v->m)); break;
      case K_MAP: n += with_length(map_size(v)); break;
      case K_TIME: n += with_length(time_size(v)); break;
      default: n += varint_size(scalar_bits(f, v));
      }
    }
  }
  return n;
}

void msg_to_pb(buf *out, const msg *m) {
  for (unsigned i = 0; m && i < m->d->n; i++) {
    const fdesc *f = &m->d->fields[i];
    for (const val *v = m->f[i].first; v; v = v->next) {
      if (left_out(f, v)) continue;
      put_varint(out, (uint64_t)f->num << 3 | (has_length(f) ? W_LEN : W_VARINT));
      switch (f->kind) {
      case K_STRING: put_text(out, v->s ? v->s : "", v->n); break;
      case K_BYTES:
        put_varint(out, v->n);
        buf_put(out, v->s, v->n);
        break;
      case K_MSG:
        put_varint(out, msg_size(v->m));
        msg_to_pb(out, v->m);
        break;
      case K_MAP:
        put_varint(out, map_size(v));
        put_varint(out, 1 << 3 | W_LEN);
        put_text(out, v->key, v->keylen);
        put_varint(out, 2 << 3 | W_LEN);
        put_text(out, v->s, v->n);
        break;
      case K_TIME:
        put_varint(out, time_size(v));
        if (v->i) put_varint(out, 1 << 3), put_varint(out, (uint64_t)v->i);
        if (v->nsec) put_varint(out, 2 << 3), put_varint(out, (uint64_t)v->nsec);
        break;
      default: put_varint(out, scalar_bits(f, v));
      }
    }
  }
}
