// Small building blocks of the guest agent: byte buffer, arena, encodings, digests, time, paths.
// Everything here is a function over its arguments; nothing keeps state of its own.
#ifndef AENV_UTIL_H
#define AENV_UTIL_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

// ---- growable byte buffer with a consumed head -------------------------------------------------

// `oom` is sticky: after a failed allocation nothing more is added and the owner must give up.
typedef struct buf {
  uint8_t *p;
  size_t off; // bytes already consumed at the front
  size_t len; // end of the data, counted from p
  size_t cap;
  bool oom;
} buf;

static inline size_t buf_len(const buf *b) {
  return b->len - b->off;
}
static inline uint8_t *buf_data(const buf *b) {
  return b->off ? b->p + b->off : b->p; // no arithmetic on NULL
}
// Room for n more bytes at the end; NULL (and oom set) when there is no memory.
uint8_t *buf_reserve(buf *b, size_t n);
void buf_put(buf *b, const void *data, size_t n);
void buf_puts(buf *b, const char *s);
void buf_putc(buf *b, char c);
void buf_printf(buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void buf_consume(buf *b, size_t n);
void buf_clear(buf *b);
void buf_free(buf *b);

// ---- arena -------------------------------------------------------------------------------------

// Bump allocator that is freed as a whole; bounded by `limit` bytes. After a refusal `oom` is set.
typedef struct arena {
  struct ablock *head;
  size_t total, limit;
  bool oom;
} arena;

void *arena_alloc(arena *a, size_t n); // zeroed, 16-byte aligned; NULL when over the limit
char *arena_strndup(arena *a, const char *s, size_t n);
char *arena_printf(arena *a, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void arena_free(arena *a);

// ---- encodings ---------------------------------------------------------------------------------

// Appends standard base64, padded unless `pad` is false.
void base64_put(buf *out, const uint8_t *data, size_t n, bool pad);
// Decodes standard or URL-safe, padded or not, into out (room for n*3/4+3). Length, or -1 if malformed.
ssize_t base64_decode(uint8_t *out, const char *s, size_t n);
// Percent-decodes in place; '+' stays (a query of ours carries paths and base64). -1 on a bad escape or NUL.
ssize_t url_decode(char *s, size_t n, bool plus_is_space);
// Length of the valid UTF-8 sequence at s, 0 if it is not one.
size_t utf8_seq(const uint8_t *s, size_t n);

// ---- digests and comparison --------------------------------------------------------------------

void sha256(const void *data, size_t n, uint8_t out[32]);
// True when equal; time depends on the lengths only.
bool ct_equal(const char *a, size_t an, const char *b, size_t bn);
uint32_t crc32_update(uint32_t crc, const uint8_t *data, size_t n);

// ---- time --------------------------------------------------------------------------------------

int64_t mono_ms(void); // CLOCK_MONOTONIC in milliseconds
// RFC 3339 with up to 9 fractional digits. 0, or -EINVAL.
int rfc3339_parse(const char *s, size_t n, int64_t *sec, int32_t *nsec);
void rfc3339_put(buf *out, int64_t sec, int32_t nsec);
void http_date(char out[32], int64_t sec);
// IMF-fixdate only. 0, or -EINVAL.
int http_date_parse(const char *s, int64_t *sec);

// ---- files and paths ---------------------------------------------------------------------------

// Whole file, NUL-terminated, at most max bytes. Length, or -errno. Never waits: of a stream, what is there now
// (-EAGAIN if nothing). Caller frees *out.
ssize_t read_whole(const char *path, char **out, size_t max);
// Writes a short control file (no creation). 0, or -errno.
int write_control(const char *path, const char *text);
int write_all(int fd, const void *data, size_t n); // 0, or -errno
// Lexical clean-up of a path: double slashes, ".", "..", trailing slash.
char *path_clean(arena *a, const char *path);
char *path_join(arena *a, const char *dir, const char *name); // cleaned
const char *path_base(const char *path, size_t *len);         // last component; "/" for the root

// ---- parsing -----------------------------------------------------------------------------------

// Decimal digits only. 0, or -EINVAL (empty, sign, other characters, more than max).
int parse_u64(const char *s, size_t n, uint64_t max, uint64_t *out);

#endif
