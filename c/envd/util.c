#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// ---- buffer ------------------------------------------------------------------------------------

uint8_t *buf_reserve(buf *b, size_t n) {
  if (b->oom) return NULL;
  if (b->off == b->len) b->off = b->len = 0;
  if (b->cap - b->len >= n && b->p) return b->p + b->len;
  size_t used = b->len - b->off;
  if (b->p && b->cap - used >= n && b->off >= b->cap / 2) {
    memmove(b->p, b->p + b->off, used);
    b->off = 0;
    b->len = used;
    return b->p + b->len;
  }
  if (n > SIZE_MAX / 4 - used) {
    b->oom = true;
    return NULL;
  }
  size_t cap = b->cap ? b->cap : 512;
  while (cap < used + n) cap *= 2;
  uint8_t *p = malloc(cap);
  if (!p) {
    b->oom = true;
    return NULL;
  }
  if (used) memcpy(p, b->p + b->off, used);
  free(b->p);
  b->p = p;
  b->cap = cap;
  b->off = 0;
  b->len = used;
  return b->p + b->len;
}

void buf_put(buf *b, const void *data, size_t n) {
  if (!n) return;
  uint8_t *p = buf_reserve(b, n);
  if (!p) return;
  memcpy(p, data, n);
  b->len += n;
}

void buf_puts(buf *b, const char *s) {
  buf_put(b, s, strlen(s));
}

void buf_putc(buf *b, char c) {
  buf_put(b, &c, 1);
}

void buf_printf(buf *b, const char *fmt, ...) {
  char tmp[512];
  va_list ap;
  va_start(ap, fmt);
  int n = vsnprintf(tmp, sizeof tmp, fmt, ap);
  va_end(ap);
  if (n < 0) return;
  if ((size_t)n < sizeof tmp) {
    buf_put(b, tmp, (size_t)n);
    return;
  }
  uint8_t *p = buf_reserve(b, (size_t)n + 1);
  if (!p) return;
  va_start(ap, fmt);
  vsnprintf((char *)p, (size_t)n + 1, fmt, ap);
  va_end(ap);
  b->len += (size_t)n;
}

void buf_consume(buf *b, size_t n) {
  b->off += n;
  if (b->off < b->len) return;
  b->off = b->len = 0;
  // A burst must not keep its peak for the life of the connection.
  if (b->cap > 256 * 1024) {
    free(b->p);
    b->p = NULL;
    b->cap = 0;
  }
}

void buf_clear(buf *b) {
  buf_consume(b, buf_len(b));
}

void buf_free(buf *b) {
  free(b->p);
  memset(b, 0, sizeof *b);
}

// ---- arena -------------------------------------------------------------------------------------

struct ablock {
  struct ablock *next;
  size_t used, cap;
};
#define ABLOCK_HEAD ((sizeof(struct ablock) + 15) & ~(size_t)15)

void *arena_alloc(arena *a, size_t n) {
  if (n > a->limit || a->oom) {
    a->oom = true;
    return NULL;
  }
  n = n ? (n + 15) & ~(size_t)15 : 16;
  struct ablock *b = a->head;
  if (!b || b->cap - b->used < n) {
    size_t cap = n > 4096 ? n : 4096;
    if (a->total + cap > a->limit) {
      a->oom = true;
      return NULL;
    }
    b = malloc(ABLOCK_HEAD + cap);
    if (!b) {
      a->oom = true;
      return NULL;
    }
    b->used = 0;
    b->cap = cap;
    a->total += cap;
    if (a->head && n > 4096) { // keep filling the small block
      b->next = a->head->next;
      a->head->next = b;
    } else {
      b->next = a->head;
      a->head = b;
    }
  }
  void *p = (uint8_t *)b + ABLOCK_HEAD + b->used;
  b->used += n;
  return memset(p, 0, n);
}

char *arena_strndup(arena *a, const char *s, size_t n) {
  char *p = arena_alloc(a, n + 1);
  if (p && n) memcpy(p, s, n);
  return p;
}

char *arena_printf(arena *a, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  int n = vsnprintf(NULL, 0, fmt, ap);
  va_end(ap);
  char *p = n < 0 ? NULL : arena_alloc(a, (size_t)n + 1);
  if (!p) return NULL;
  va_start(ap, fmt);
  vsnprintf(p, (size_t)n + 1, fmt, ap);
  va_end(ap);
  return p;
}

void arena_free(arena *a) {
  for (struct ablock *b = a->head, *next; b; b = next) {
    next = b->next;
    free(b);
  }
  a->head = NULL;
  a->total = 0;
  a->oom = false;
}

// ---- encodings ---------------------------------------------------------------------------------

void base64_put(buf *out, const uint8_t *data, size_t n, bool pad) {
  static const char abc[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  uint8_t *start = buf_reserve(out, (n + 2) / 3 * 4), *p = start;
  if (!p) return;
  size_t i = 0;
  for (; i + 3 <= n; i += 3) {
    uint32_t v = (uint32_t)data[i] << 16 | (uint32_t)data[i + 1] << 8 | data[i + 2];
    *p++ = (uint8_t)abc[v >> 18];
    *p++ = (uint8_t)abc[v >> 12 & 63];
    *p++ = (uint8_t)abc[v >> 6 & 63];
    *p++ = (uint8_t)abc[v & 63];
  }
  if (n - i == 1) {
    *p++ = (uint8_t)abc[data[i] >> 2];
    *p++ = (uint8_t)abc[(data[i] & 3) << 4];
    if (pad) *p++ = '=', *p++ = '=';
  } else if (n - i == 2) {
    *p++ = (uint8_t)abc[data[i] >> 2];
    *p++ = (uint8_t)abc[(data[i] & 3) << 4 | data[i + 1] >> 4];
    *p++ = (uint8_t)abc[(data[i + 1] & 15) << 2];
    if (pad) *p++ = '=';
  }
  out->len += (size_t)(p - start);
}

static int base64_digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  if (c == '+' || c == '-') return 62;
  if (c == '/' || c == '_') return 63;
  return -1;
}

ssize_t base64_decode(uint8_t *out, const char *s, size_t n) {
  for (int i = 0; i < 2 && n && s[n - 1] == '='; i++) n--;
  if (n % 4 == 1) return -1;
  size_t o = 0;
  uint32_t acc = 0;
  int bits = 0;
  for (size_t i = 0; i < n; i++) {
    int d = base64_digit(s[i]);
    if (d < 0) return -1;
    acc = acc << 6 | (uint32_t)d;
    bits += 6;
    if (bits >= 8) {
      bits -= 8;
      out[o++] = (uint8_t)(acc >> bits);
      acc &= (1u << bits) - 1;
    }
  }
  return (ssize_t)o;
}

static int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

ssize_t url_decode(char *s, size_t n, bool plus_is_space) {
  size_t o = 0;
  for (size_t i = 0; i < n; i++) {
    char c = s[i];
    if (c == '%') {
      int hi = i + 2 < n ? hex_digit(s[i + 1]) : -1, lo = i + 2 < n ? hex_digit(s[i + 2]) : -1;
      if (hi < 0 || lo < 0) return -1;
      c = (char)(hi << 4 | lo);
      i += 2;
    } else if (c == '+' && plus_is_space) {
      c = ' ';
    }
    if (!c) return -1;
    s[o++] = c;
  }
  return (ssize_t)o;
}

size_t utf8_seq(const uint8_t *s, size_t n) {
  if (!n) return 0;
  if (s[0] < 0x80) return 1;
  size_t k = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
  if (s[0] < 0xc2 || s[0] > 0xf4 || n < k) return 0;
  for (size_t i = 1; i < k; i++)
    if ((s[i] & 0xc0) != 0x80) return 0;
  if (s[0] == 0xe0 && s[1] < 0xa0) return 0;
  if (s[0] == 0xed && s[1] > 0x9f) return 0;
  if (s[0] == 0xf0 && s[1] < 0x90) return 0;
  if (s[0] == 0xf4 && s[1] > 0x8f) return 0;
  return k;
}

// ---- digests -----------------------------------------------------------------------------------

// FIPS 180-4.
static uint32_t ror32(uint32_t v, int n) {
  return v >> n | v << (32 - n);
}

static void sha256_block(uint32_t h[8], const uint8_t *p) {
  static const uint32_t k[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  uint32_t w[64];
  for (int i = 0; i < 16; i++)
    w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
  for (int i = 16; i < 64; i++) {
    uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (ror32(a, 7) ^ ror32(a, 18) ^ a >> 3) + w[i - 7] + (ror32(b, 17) ^ ror32(b, 19) ^ b >> 10);
  }
  uint32_t v[8];
  memcpy(v, h, sizeof v);
  for (int i = 0; i < 64; i++) {
    uint32_t s1 = ror32(v[4], 6) ^ ror32(v[4], 11) ^ ror32(v[4], 25);
    uint32_t t1 = v[7] + s1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
    uint32_t s0 = ror32(v[0], 2) ^ ror32(v[0], 13) ^ ror32(v[0], 22);
    uint32_t t2 = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
    memmove(v + 1, v, 7 * sizeof v[0]);
    v[4] += t1;
    v[0] = t1 + t2;
  }
  for (int i = 0; i < 8; i++) h[i] += v[i];
}

void sha256(const void *data, size_t n, uint8_t out[32]) {
  uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const uint8_t *p = data;
  size_t left = n;
  for (; left >= 64; left -= 64, p += 64) sha256_block(h, p);
  uint8_t tail[128] = {0};
  if (left) memcpy(tail, p, left);
  tail[left] = 0x80;
  size_t size = left < 56 ? 64 : 128;
  uint64_t bits = (uint64_t)n * 8;
  for (int i = 0; i < 8; i++) tail[size - 1 - (size_t)i] = (uint8_t)(bits >> 8 * i);
  for (size_t i = 0; i < size; i += 64) sha256_block(h, tail + i);
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 4; j++) out[4 * i + j] = (uint8_t)(h[i] >> (24 - 8 * j));
}

bool ct_equal(const char *a, size_t an, const char *b, size_t bn) {
  size_t n = an > bn ? an : bn;
  volatile uint8_t diff = an != bn;
  for (size_t i = 0; i < n; i++)
    diff |= (uint8_t)((i < an ? (uint8_t)a[i] : 0) ^ (i < bn ? (uint8_t)b[i] : 0));
  return !diff;
}

uint32_t crc32_update(uint32_t crc, const uint8_t *data, size_t n) {
  // Nibble table: 64 bytes instead of 1 KiB of table, fast enough for a gzip trailer.
  static const uint32_t t[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
                                 0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
  crc = ~crc;
  for (size_t i = 0; i < n; i++) {
    crc ^= data[i];
    crc = crc >> 4 ^ t[crc & 15];
    crc = crc >> 4 ^ t[crc & 15];
  }
  return ~crc;
}

// ---- time --------------------------------------------------------------------------------------

int64_t mono_ms(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

static int digits(const char *s, int n, int *out) {
  int v = 0;
  for (int i = 0; i < n; i++) {
    if (s[i] < '0' || s[i] > '9') return -EINVAL;
    v = v * 10 + (s[i] - '0');
  }
  *out = v;
  return 0;
}

// Days since 1970-01-01 of a proleptic Gregorian date.
static int64_t days_from_civil(int64_t y, int m, int d) {
  y -= m <= 2;
  int64_t era = (y >= 0 ? y : y - 399) / 400, yoe = y - era * 400;
  int64_t doy = (153 * (m + (m > 2 ? -3 : 9)) + 2) / 5 + d - 1;
  return era * 146097 + yoe * 365 + yoe / 4 - yoe / 100 + doy - 719468;
}

int rfc3339_parse(const char *s, size_t n, int64_t *sec, int32_t *nsec) {
  int y, mo, d, h, mi, se;
  if (n < 20 || digits(s, 4, &y) || s[4] != '-' || digits(s + 5, 2, &mo) || s[7] != '-' || digits(s + 8, 2, &d) ||
      (s[10] != 'T' && s[10] != 't') || digits(s + 11, 2, &h) || s[13] != ':' || digits(s + 14, 2, &mi) ||
      s[16] != ':' || digits(s + 17, 2, &se))
    return -EINVAL;
  if (mo < 1 || mo > 12 || d < 1 || d > 31 || h > 23 || mi > 59 || se > 60) return -EINVAL;
  size_t i = 19;
  int32_t frac = 0;
  if (s[i] == '.') {
    int k = 0;
    for (i++; i < n && s[i] >= '0' && s[i] <= '9'; i++, k++)
      if (k < 9) frac = frac * 10 + (s[i] - '0');
    if (!k) return -EINVAL;
    for (; k < 9; k++) frac *= 10;
  }
  int off = 0;
  if (i < n && (s[i] == 'Z' || s[i] == 'z') && i + 1 == n) {
    off = 0;
  } else if (i + 6 == n && (s[i] == '+' || s[i] == '-') && s[i + 3] == ':') {
    int oh, om;
    if (digits(s + i + 1, 2, &oh) || digits(s + i + 4, 2, &om) || oh > 23 || om > 59) return -EINVAL;
    off = (oh * 60 + om) * (s[i] == '-' ? -60 : 60);
  } else {
    return -EINVAL;
  }
  *sec = days_from_civil(y, mo, d) * 86400 + h * 3600 + mi * 60 + se - off;
  *nsec = frac;
  return 0;
}

// Some file systems keep times that have no date of four digits: the nearest one that has.
static struct tm date_of(int64_t sec) {
  static const int64_t first = -62135596800, last = 253402300799; // years 1 to 9999
  time_t t = (time_t)(sec < first ? first : sec > last ? last : sec);
  struct tm tm = {0};
  gmtime_r(&t, &tm);
  return tm;
}

void rfc3339_put(buf *out, int64_t sec, int32_t nsec) {
  struct tm tm = date_of(sec);
  buf_printf(out, "%04d-%02d-%02dT%02d:%02d:%02d", tm.tm_year + 1900, tm.tm_mon + 1, tm.tm_mday, tm.tm_hour,
             tm.tm_min, tm.tm_sec);
  if (nsec) {
    if (nsec % 1000000 == 0)
      buf_printf(out, ".%03d", nsec / 1000000);
    else if (nsec % 1000 == 0)
      buf_printf(out, ".%06d", nsec / 1000);
    else
      buf_printf(out, ".%09d", nsec);
  }
  buf_putc(out, 'Z');
}

static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";

void http_date(char out[32], int64_t sec) {
  static const char wdays[] = "SunMonTueWedThuFriSat";
  struct tm tm = date_of(sec);
  snprintf(out, 32, "%.3s, %02d %.3s %04d %02d:%02d:%02d GMT", wdays + 3 * tm.tm_wday, tm.tm_mday,
           months + 3 * tm.tm_mon, (tm.tm_year + 1900) % 10000, tm.tm_hour, tm.tm_min, tm.tm_sec);
}

int http_date_parse(const char *s, int64_t *sec) {
  int d, y, h, mi, se;
  if (strlen(s) != 29 || digits(s + 5, 2, &d) || digits(s + 12, 4, &y) || digits(s + 17, 2, &h) ||
      digits(s + 20, 2, &mi) || digits(s + 23, 2, &se) || strcmp(s + 25, " GMT"))
    return -EINVAL;
  for (int m = 0; m < 12; m++)
    if (!strncmp(months + 3 * m, s + 8, 3)) {
      *sec = days_from_civil(y, m + 1, d) * 86400 + h * 3600 + mi * 60 + se;
      return 0;
    }
  return -EINVAL;
}

// ---- files and paths ---------------------------------------------------------------------------

ssize_t read_whole(const char *path, char **out, size_t max) {
  *out = NULL;
  // What never ends (/proc/kmsg, a pipe in the place of a file) must not make us wait.
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (fd < 0) return -errno;
  buf b = {0};
  ssize_t rc = 0;
  for (;;) {
    uint8_t *p = buf_reserve(&b, 4097);
    if (!p) {
      rc = -ENOMEM;
      break;
    }
    ssize_t n = read(fd, p, 4096);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && !(errno == EAGAIN && b.len)) rc = -errno;
    if (n <= 0) break;
    b.len += (size_t)n;
    if (b.len > max) {
      rc = -EFBIG;
      break;
    }
  }
  close(fd);
  if (rc < 0) {
    buf_free(&b);
    return rc;
  }
  b.p[b.len] = 0;
  *out = (char *)b.p;
  return (ssize_t)b.len;
}

int write_all(int fd, const void *data, size_t n) {
  const uint8_t *p = data;
  while (n) {
    ssize_t w = write(fd, p, n);
    if (w < 0 && errno == EINTR) continue;
    if (w < 0) return -errno;
    p += w;
    n -= (size_t)w;
  }
  return 0;
}

int write_control(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC | O_NOCTTY);
  if (fd < 0) return -errno;
  int rc = write_all(fd, text, strlen(text));
  close(fd);
  return rc;
}

char *path_clean(arena *a, const char *path) {
  bool abs = path[0] == '/';
  char *out = arena_alloc(a, strlen(path) + 2);
  if (!out) return NULL;
  size_t o = 0;
  if (abs) out[o++] = '/';
  size_t floor = o; // ".." cannot climb above this
  const char *p = path;
  while (*p) {
    while (*p == '/') p++;
    size_t n = strcspn(p, "/");
    if (!n) break;
    if (n == 2 && p[0] == '.' && p[1] == '.') {
      if (o > floor) {
        while (o > floor && out[o - 1] != '/') o--;
        if (o > floor) o--;
      } else if (!abs) {
        if (o) out[o++] = '/';
        out[o++] = '.';
        out[o++] = '.';
        floor = o;
      }
    } else if (!(n == 1 && p[0] == '.')) {
      if (o && out[o - 1] != '/') out[o++] = '/';
      memcpy(out + o, p, n);
      o += n;
    }
    p += n;
  }
  if (!o) out[o++] = '.';
  out[o] = 0;
  return out;
}

char *path_join(arena *a, const char *dir, const char *name) {
  char *j = arena_printf(a, "%s/%s", dir, name);
  return j ? path_clean(a, j) : NULL;
}

const char *path_base(const char *path, size_t *len) {
  size_t n = strlen(path);
  while (n > 1 && path[n - 1] == '/') n--;
  size_t s = n;
  while (s > 0 && path[s - 1] != '/') s--;
  if (s == n && n) s = n - 1; // the root itself
  *len = n - s;
  return path + s;
}

int parse_u64(const char *s, size_t n, uint64_t max, uint64_t *out) {
  if (!n || n > 20) return -EINVAL;
  uint64_t v = 0;
  for (size_t i = 0; i < n; i++) {
    if (s[i] < '0' || s[i] > '9') return -EINVAL;
    unsigned d = (unsigned)(s[i] - '0');
    if (v > (UINT64_MAX - d) / 10) return -EINVAL;
    v = v * 10 + d;
  }
  if (v > max) return -EINVAL;
  *out = v;
  return 0;
}
