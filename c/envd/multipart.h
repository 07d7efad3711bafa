// multipart/form-data (RFC 7578) as a push parser: pure over its input, bounded memory.
#ifndef AENV_MULTIPART_H
#define AENV_MULTIPART_H

#include "util.h"

typedef struct multipart {
  char delim[80]; // CRLF, "--", boundary
  size_t dlen;
  enum { MP_PREAMBLE, MP_AFTER, MP_HEADERS, MP_BODY, MP_EPILOGUE } state;
  buf pending;
  void *arg;
  // Each returns 0 to go on; anything else stops the parser and is returned from feed.
  int (*begin)(void *arg, const char *name, const char *filename); // filename NULL when absent
  int (*data)(void *arg, const uint8_t *p, size_t n);
  int (*end)(void *arg);
} multipart;

// From a Content-Type value. 0, or -EINVAL when there is no usable boundary.
int multipart_init(multipart *m, const char *content_type);
// 0, -EINVAL when malformed, -ENOMEM, or a callback's value.
int multipart_feed(multipart *m, const uint8_t *p, size_t n);
bool multipart_complete(const multipart *m);
void multipart_free(multipart *m);

// Parameter of a header value such as `form-data; name="x"`, unquoted, into out (NUL-terminated).
// Length, or -1 when absent or too long.
ssize_t header_param(const char *value, const char *name, char *out, size_t cap);

#endif
