// DEFLATE (RFC 1951) in its gzip wrapping (RFC 1952), streaming both ways, without dependencies.
#ifndef AENV_FLATE_H
#define AENV_FLATE_H

#include <errno.h>

#include "util.h"

typedef struct inflater inflater;
inflater *inflate_new(void);
void inflate_free(inflater *z);
// Feeds compressed bytes; plain ones go to put in order. Several gzip members in a row are one stream.
// 0, -EINVAL when the data is malformed, or what put returned when that was not 0.
int inflate_feed(inflater *z, const uint8_t *p, size_t n, int (*put)(void *arg, const uint8_t *p, size_t n), void *arg);
bool inflate_finished(const inflater *z); // at the end of a member

// Whole buffer at once. 0, -EINVAL, -ENOMEM, or -EFBIG when the result is larger than max.
int gunzip_all(const uint8_t *p, size_t n, size_t max, buf *out);

typedef struct deflater {
  uint32_t crc;
  uint64_t total;
  uint64_t bits; // not yet written
  int nbits;
} deflater;

// gzip stream into out: begin, any number of chunks (each compressed by itself, at most 64 KiB), end.
void gzip_begin(deflater *z, buf *out);
void gzip_chunk(deflater *z, const uint8_t *p, size_t n, buf *out);
void gzip_end(deflater *z, buf *out);

#endif
