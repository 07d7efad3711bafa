#include "flate.h"

#include <stdlib.h>
#include <string.h>

// ---- inflate -----------------------------------------------------------------------------------
//
// Input arrives in arbitrary pieces. What is not used yet is kept; each step (a header, a symbol with its
// extra bits) either completes or is rolled back to be tried again with more input.

enum state { S_GZIP, S_BLOCK, S_STORED, S_CODES, S_TRAILER, S_DONE };
enum { WINDOW = 32768, MAXBITS = 15, MORE = 1 };

typedef struct {
  uint16_t count[MAXBITS + 1], symbol[288];
} huff;

struct inflater {
  enum state state;
  bool last;
  buf in;
  size_t bit; // position within in, in bits, always < 8 between calls
  size_t stored_left;
  huff lit, dist;
  uint8_t win[2 * WINDOW];
  size_t wpos, wsent;
  uint32_t crc, isize;
};

typedef struct {
  const uint8_t *p;
  size_t nbits, pos;
} bitreader;

inflater *inflate_new(void) {
  return calloc(1, sizeof(inflater));
}

void inflate_free(inflater *z) {
  if (!z) return;
  buf_free(&z->in);
  free(z);
}

bool inflate_finished(const inflater *z) {
  return z->state == S_DONE || (z->state == S_GZIP && !buf_len(&z->in));
}

static int take(bitreader *b, unsigned n, uint32_t *out) {
  if (b->nbits - b->pos < n) return MORE;
  uint32_t v = 0;
  for (unsigned i = 0; i < n;) {
    size_t at = b->pos + i;
    unsigned sh = at & 7, k = 8 - sh;
    if (k > n - i) k = n - i;
    v |= (uint32_t)(b->p[at >> 3] >> sh & ((1u << k) - 1)) << i;
    i += k;
  }
  b->pos += n;
  *out = v;
  return 0;
}

// Canonical code from code lengths. -EINVAL when over-subscribed; an incomplete one is allowed only for a
// single code (RFC 1951 3.2.7).
static int build(huff *h, const uint8_t *len, int n) {
  memset(h->count, 0, sizeof h->count);
  for (int i = 0; i < n; i++) h->count[len[i]]++;
  if (h->count[0] == n) return 0;
  int left = 1;
  for (int i = 1; i <= MAXBITS; i++) {
    left = left * 2 - h->count[i];
    if (left < 0) return -EINVAL;
  }
  if (left > 0 && n - h->count[0] != 1) return -EINVAL;
  uint16_t off[MAXBITS + 1];
  off[1] = 0;
  for (int i = 1; i < MAXBITS; i++) off[i + 1] = (uint16_t)(off[i] + h->count[i]);
  for (int i = 0; i < n; i++)
    if (len[i]) h->symbol[off[len[i]]++] = (uint16_t)i;
  return 0;
}

static int symbol(bitreader *b, const huff *h, uint32_t *out) {
  int code = 0, first = 0, index = 0;
  size_t pos = b->pos;
  for (int n = 1; n <= MAXBITS; n++) {
    if (pos >= b->nbits) return MORE;
    code |= b->p[pos >> 3] >> (pos & 7) & 1;
    pos++;
    int count = h->count[n];
    if (code - count < first) {
      b->pos = pos;
      *out = h->symbol[index + code - first];
      return 0;
    }
    index += count;
    first = (first + count) << 1;
    code <<= 1;
  }
  return -EINVAL;
}

static int dynamic_header(inflater *z, bitreader *b) {
  static const uint8_t order[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
  uint32_t hlit, hdist, hclen, v;
  if (take(b, 5, &hlit) || take(b, 5, &hdist) || take(b, 4, &hclen)) return MORE;
  hlit += 257;
  hdist += 1;
  hclen += 4;
  if (hlit > 286 || hdist > 30) return -EINVAL;
  uint8_t len[320] = {0};
  for (uint32_t i = 0; i < hclen; i++) {
    if (take(b, 3, &v)) return MORE;
    len[order[i]] = (uint8_t)v;
  }
  huff cl;
  if (build(&cl, len, 19)) return -EINVAL;
  memset(len, 0, sizeof len);
  for (uint32_t i = 0; i < hlit + hdist;) {
    uint32_t sym, rep;
    int rc = symbol(b, &cl, &sym);
    if (rc) return rc;
    if (sym < 16) {
      len[i++] = (uint8_t)sym;
      continue;
    }
    uint8_t fill = 0;
    if (sym == 16) {
      if (!i) return -EINVAL;
      fill = len[i - 1];
      if (take(b, 2, &rep)) return MORE;
      rep += 3;
    } else if (sym == 17) {
      if (take(b, 3, &rep)) return MORE;
      rep += 3;
    } else {
      if (take(b, 7, &rep)) return MORE;
      rep += 11;
    }
    if (i + rep > hlit + hdist) return -EINVAL;
    while (rep--) len[i++] = fill;
  }
  if (!len[256]) return -EINVAL; // no end of block
  if (build(&z->lit, len, (int)hlit) || build(&z->dist, len + hlit, (int)hdist)) return -EINVAL;
  return 0;
}

static int fixed_codes(inflater *z) {
  uint8_t len[288];
  for (int i = 0; i < 288; i++) len[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
  int rc = build(&z->lit, len, 288);
  // 30 of 32 codes: incomplete by design, so built by hand.
  memset(z->dist.count, 0, sizeof z->dist.count);
  z->dist.count[5] = 30;
  for (int i = 0; i < 30; i++) z->dist.symbol[i] = (uint16_t)i;
  return rc;
}

static int block_header(inflater *z, bitreader *b) {
  uint32_t last, type;
  if (take(b, 1, &last) || take(b, 2, &type)) return MORE;
  int rc = 0;
  if (type == 0) {
    uint32_t len, inv;
    b->pos = (b->pos + 7) & ~(size_t)7;
    if (take(b, 16, &len) || take(b, 16, &inv)) return MORE;
    if (len != (~inv & 0xffff)) return -EINVAL;
    z->stored_left = len;
    z->state = S_STORED;
  } else if (type == 1 || type == 2) {
    rc = type == 1 ? fixed_codes(z) : dynamic_header(z, b);
    if (rc) return rc;
    z->state = S_CODES;
  } else {
    return -EINVAL;
  }
  z->last = last;
  return 0;
}

// gzip member header. All of it must be there; it is short but for an optional name and comment.
static int gzip_header(bitreader *b) {
  size_t at = b->pos >> 3, n = b->nbits >> 3;
  const uint8_t *p = b->p;
  if (n - at < 10) return MORE;
  if (p[at] != 0x1f || p[at + 1] != 0x8b || p[at + 2] != 8 || p[at + 3] & 0xe0) return -EINVAL;
  uint8_t flags = p[at + 3];
  size_t i = at + 10;
  if (flags & 4) {
    if (n - i < 2) return MORE;
    i += 2 + (size_t)(p[i] | p[i + 1] << 8);
    if (i > n) return MORE;
  }
  for (int k = 8; k <= 16; k *= 2)
    if (flags & k) {
      const uint8_t *e = i < n ? memchr(p + i, 0, n - i) : NULL;
      if (!e) return n - at > 65536 + 1024 ? -EINVAL : MORE;
      i = (size_t)(e - p) + 1;
    }
  if (flags & 2) i += 2;
  if (i > n) return MORE;
  b->pos = i << 3;
  return 0;
}

typedef int (*putfn)(void *arg, const uint8_t *p, size_t n);

static int flush_window(inflater *z, putfn put, void *arg) {
  size_t n = z->wpos - z->wsent;
  if (!n) return 0;
  z->crc = crc32_update(z->crc, z->win + z->wsent, n);
  z->isize += (uint32_t)n;
  int rc = put(arg, z->win + z->wsent, n);
  z->wsent = z->wpos;
  return rc;
}

static int room(inflater *z, size_t n, putfn put, void *arg) {
  if (z->wpos + n <= sizeof z->win) return 0;
  int rc = flush_window(z, put, arg);
  memmove(z->win, z->win + z->wpos - WINDOW, WINDOW);
  z->wpos = z->wsent = WINDOW;
  return rc;
}

static int one_symbol(inflater *z, bitreader *b, putfn put, void *arg) {
  static const uint16_t lbase[29] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                     31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
  static const uint8_t lext[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
  static const uint16_t dbase[30] = {1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
                                     193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
  static const uint8_t dext[30] = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                   6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};
  uint32_t sym, ext, dsym, dx;
  int rc = symbol(b, &z->lit, &sym);
  if (rc) return rc;
  if (sym < 256) {
    if ((rc = room(z, 1, put, arg))) return rc;
    z->win[z->wpos++] = (uint8_t)sym;
    return 0;
  }
  if (sym == 256) {
    z->state = z->last ? S_TRAILER : S_BLOCK;
    return 0;
  }
  sym -= 257;
  if (sym >= 29) return -EINVAL;
  if (take(b, lext[sym], &ext)) return MORE;
  if ((rc = symbol(b, &z->dist, &dsym))) return rc;
  if (dsym >= 30) return -EINVAL;
  if (take(b, dext[dsym], &dx)) return MORE;
  size_t len = lbase[sym] + ext, dist = dbase[dsym] + dx;
  if ((rc = room(z, len, put, arg))) return rc;
  if (dist > z->wpos) return -EINVAL;
  for (size_t i = 0; i < len; i++, z->wpos++) z->win[z->wpos] = z->win[z->wpos - dist];
  return 0;
}

static int step(inflater *z, bitreader *b, putfn put, void *arg) {
  uint32_t v;
  switch (z->state) {
  case S_DONE: // another member, or the end
    if (b->pos >= b->nbits) return MORE;
    z->state = S_GZIP;
    return 0;
  case S_GZIP: {
    int rc = gzip_header(b);
    if (rc) return rc;
    z->state = S_BLOCK;
    z->crc = z->isize = 0;
    z->wpos = z->wsent = 0;
    return 0;
  }
  case S_BLOCK: return block_header(z, b);
  case S_STORED: {
    size_t have = (b->nbits - b->pos) >> 3, n = have < z->stored_left ? have : z->stored_left;
    if (!n && z->stored_left) return MORE;
    if (n > 16384) n = 16384;
    int rc = room(z, n, put, arg);
    if (rc) return rc;
    if (n) memcpy(z->win + z->wpos, b->p + (b->pos >> 3), n);
    z->wpos += n;
    b->pos += n << 3;
    z->stored_left -= n;
    if (!z->stored_left) z->state = z->last ? S_TRAILER : S_BLOCK;
    return 0;
  }
  case S_CODES: return one_symbol(z, b, put, arg);
  case S_TRAILER: {
    uint32_t crc, len;
    b->pos = (b->pos + 7) & ~(size_t)7;
    if (take(b, 32, &crc) || take(b, 32, &len)) return MORE;
    int rc = flush_window(z, put, arg);
    if (rc) return rc;
    v = z->crc;
    if (v != crc || z->isize != len) return -EINVAL;
    z->state = S_DONE;
    return 0;
  }
  }
  return -EINVAL;
}

int inflate_feed(inflater *z, const uint8_t *p, size_t n, putfn put, void *arg) {
  buf_put(&z->in, p, n);
  if (z->in.oom) return -ENOMEM;
  bitreader b = {buf_data(&z->in), buf_len(&z->in) * 8, z->bit};
  int rc;
  for (;;) {
    size_t pos = b.pos;
    enum state st = z->state;
    rc = step(z, &b, put, arg);
    if (!rc) continue;
    b.pos = pos;
    z->state = st;
    break;
  }
  if (rc == MORE) rc = flush_window(z, put, arg);
  buf_consume(&z->in, b.pos >> 3);
  z->bit = b.pos & 7;
  return rc;
}

struct sinkbuf {
  buf *out;
  size_t max;
};

static int put_buf(void *arg, const uint8_t *p, size_t n) {
  struct sinkbuf *s = arg;
  if (buf_len(s->out) + n > s->max) return -EFBIG;
  buf_put(s->out, p, n);
  return s->out->oom ? -ENOMEM : 0;
}

int gunzip_all(const uint8_t *p, size_t n, size_t max, buf *out) {
  inflater *z = inflate_new();
  if (!z) return -ENOMEM;
  struct sinkbuf s = {out, max};
  int rc = inflate_feed(z, p, n, put_buf, &s);
  if (!rc && z->state != S_DONE) rc = -EINVAL;
  inflate_free(z);
  return rc;
}

// ---- deflate -----------------------------------------------------------------------------------
//
// One greedy pass with a hash of four bytes and the fixed code: the aim is to save transfer cheaply, not the
// best ratio.

static void put_bits(deflater *z, buf *out, uint32_t v, int n) {
  z->bits |= (uint64_t)v << z->nbits;
  z->nbits += n;
  while (z->nbits >= 8) {
    buf_putc(out, (char)z->bits);
    z->bits >>= 8;
    z->nbits -= 8;
  }
}

static uint32_t reversed(uint32_t v, int n) {
  uint32_t r = 0;
  for (int i = 0; i < n; i++) r = r << 1 | (v >> i & 1);
  return r;
}

static void put_symbol(deflater *z, buf *out, uint32_t s) {
  if (s < 144)
    put_bits(z, out, reversed(0x30 + s, 8), 8);
  else if (s < 256)
    put_bits(z, out, reversed(0x190 + s - 144, 9), 9);
  else if (s < 280)
    put_bits(z, out, reversed(s - 256, 7), 7);
  else
    put_bits(z, out, reversed(0xc0 + s - 280, 8), 8);
}

void gzip_begin(deflater *z, buf *out) {
  *z = (deflater){0};
  buf_put(out, "\x1f\x8b\x08\0\0\0\0\0\0\xff", 10);
}

static void put_match(deflater *z, buf *out, unsigned len, unsigned dist) {
  unsigned l = len - 3, sym, ext = 0, bits = 0;
  if (len == 258) {
    sym = 285;
  } else if (l < 8) {
    sym = 257 + l;
  } else {
    int hb = 31 - __builtin_clz(l);
    bits = (unsigned)hb - 2;
    sym = 257 + (bits << 2) + (l >> bits);
    ext = l & ((1u << bits) - 1);
  }
  put_symbol(z, out, sym);
  if (bits) put_bits(z, out, ext, (int)bits);
  unsigned d = dist - 1;
  bits = ext = 0;
  if (d < 4) {
    sym = d;
  } else {
    int hb = 31 - __builtin_clz(d);
    bits = (unsigned)hb - 1;
    sym = (bits << 1) + (d >> bits);
    ext = d & ((1u << bits) - 1);
  }
  put_bits(z, out, reversed(sym, 5), 5);
  if (bits) put_bits(z, out, ext, (int)bits);
}

void gzip_chunk(deflater *z, const uint8_t *p, size_t n, buf *out) {
  z->crc = crc32_update(z->crc, p, n);
  z->total += n;
  uint16_t head[4096]; // position + 1 of the last place with that hash
  memset(head, 0, sizeof head);
  put_bits(z, out, 0, 1); // not the last block
  put_bits(z, out, 1, 2); // fixed code
  for (size_t i = 0; i < n;) {
    unsigned len = 0;
    size_t cand = 0;
    if (i + 4 <= n) {
      uint32_t w;
      memcpy(&w, p + i, 4);
      uint32_t h = w * 2654435761u >> 20;
      cand = head[h];
      head[h] = (uint16_t)(i + 1);
      if (cand && i - (cand - 1) <= WINDOW && !memcmp(p + cand - 1, p + i, 4)) {
        const uint8_t *q = p + cand - 1;
        size_t max = n - i < 258 ? n - i : 258;
        for (len = 4; len < max && q[len] == p[i + len];) len++;
      }
    }
    if (len) {
      put_match(z, out, len, (unsigned)(i - (cand - 1)));
      i += len;
    } else {
      put_symbol(z, out, p[i++]);
    }
  }
  put_symbol(z, out, 256);
}

void gzip_end(deflater *z, buf *out) {
  put_bits(z, out, 1, 1);
  put_bits(z, out, 1, 2);
  put_symbol(z, out, 256);
  if (z->nbits) put_bits(z, out, 0, 8 - z->nbits);
  uint32_t t[2] = {z->crc, (uint32_t)z->total};
  for (int i = 0; i < 2; i++)
    for (int k = 0; k < 4; k++) buf_putc(out, (char)(t[i] >> 8 * k));
}
