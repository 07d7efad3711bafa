// HTTP/1.1 server on the event loop: keep-alive, chunked both ways, Expect, bounded buffers.
// One request at a time per connection; pipelined ones wait in the socket.
#ifndef AENV_HTTP_H
#define AENV_HTTP_H

#include <netinet/in.h>

#include "loop.h"
#include "util.h"

enum {
  HTTP_HEAD_MAX = 64 * 1024,      // request line and headers; beyond: 431
  HTTP_HEADERS_MAX = 200,         // header lines; beyond: 431
  HTTP_IN_MAX = 128 * 1024,       // unread request bytes held per connection
  HTTP_OUT_HIGH = 128 * 1024,     // producers stop above this much unsent output …
  HTTP_OUT_LOW = 64 * 1024,       // … and are called again below this
  HTTP_CONNS_MAX = 8192,          // or half of the descriptors; beyond: the one idle for longest goes
  HTTP_DISCARD_MAX = 16 << 20,    // unread body swallowed after an early answer, to keep the connection
  HTTP_IDLE_MS = 640 * 1000,
  HTTP_HEAD_MS = 60 * 1000,       // from the first to the last byte of a head
  HTTP_LINGER_MS = 2000,          // silence of a client that still sent when it was answered for good
  HTTP_RELEASE_MS = 5,            // from the end of a hold to the first request that had waited
  HTTP_LINGER_MAX_MS = 30 * 1000, // and all in all
};

typedef struct {
  char *name, *value; // NUL-terminated in the head's own bytes
} header;

typedef struct req {
  char *method, *path, *query; // path still percent-encoded, query without '?', "" when absent
  header h[HTTP_HEADERS_MAX];
  unsigned nh;
  bool http10, chunked, expect, close;
  bool has_length;
  uint64_t length;
} req;

// Pure: parses the head in text[0..n) in place. Bytes used, 0 when incomplete, or -(HTTP status) to answer.
ssize_t http_parse_head(char *text, size_t n, req *r);
// Pure: the size line of a chunk, without its CRLF. 0, or -EINVAL.
int http_chunk_size(const char *line, size_t n, uint64_t *out);

typedef struct conn conn;
typedef struct http_server http_server;

// What a handler wants to hear about. Every member may be NULL.
typedef struct sink {
  // Body bytes; returns how many were taken. Fewer than n only after http_pause_body or an answer.
  size_t (*data)(conn *c, const uint8_t *p, size_t n);
  void (*end)(conn *c);     // the body is complete
  void (*drained)(conn *c); // unsent output fell below HTTP_OUT_LOW after it had been above HTTP_OUT_HIGH
  void (*gone)(conn *c);    // the exchange is over: answered and sent, or the client left. Always the last call
} sink;

enum chunk_state { CH_SIZE, CH_DATA, CH_DATA_END, CH_TRAILER };

struct conn {
  http_server *srv;
  conn *prev, *next;
  ev e;
  timer t;
  uint64_t id;
  struct sockaddr_in peer, local;
  int in_ifindex; // interface the connection came in by, 0 if unknown
  buf in, out;
  char *head; // bytes that r points into
  req r;
  const sink *sink;
  void *user; // the handler's own
  buf collect;
  size_t collect_max;
  void (*collected)(conn *c, const uint8_t *p, size_t n);
  uint64_t body_left, discarded;
  int64_t sent_at; // when the peer last took something
  int64_t heard_at; // when it last sent something
  int64_t linger_until;
  enum chunk_state chunk;
  unsigned trailer_bytes;
  int file_fd; // being sent after `out`, -1 if none
  off_t file_off;
  uint64_t file_left;
  const char *common; // header lines added to every answer of this request
  bool busy, closed, eof, rdhup, lingering, head_timed;
  bool in_request, body_done, body_paused;
  bool resp_started, resp_done, resp_chunked, head_only, keep_alive, want_drain;
  bool exempt;    // of a hold
  bool unhandled; // its head has arrived while requests were held
  bool lost;      // and then its client left
  bool streaming; // an open-ended answer: the client's half-close ends it
};

struct http_server {
  loop *l;
  ev listener;
  timer accept_again;
  conn *conns;
  unsigned nconns, max_conns;
  uint64_t next_id;
  int port;
  void *app;
  void (*handle)(conn *c); // a head has arrived: set a sink or answer
  bool held;
  timer release;
  bool (*exempt)(const conn *c); // requests that go on during a hold; NULL: none
};

// Listens on addr:port (0 = any, then srv->port tells which). 0, or -errno.
int http_listen(http_server *s, loop *l, const char *addr, int port);
void http_close(http_server *s);
// Serves a connected, non-blocking socket, which is its from now on.
void http_adopt(http_server *s, int fd);
// Held: but for exempt ones no request is given to a handler, nor its body, nor the loss of its client, until the end.
// What is being answered goes on.
void http_hold(http_server *s, bool held);
// Drops all connections but one (NULL: all), at once and without ceremony.
void http_drop_others(http_server *s, conn *keep);

const char *http_header(const conn *c, const char *name); // NULL when absent
// Percent-decoded query value into the arena; NULL when absent. *bad is set on a malformed escape.
char *http_query(arena *a, const conn *c, const char *name, bool *bad);
// Content type without parameters equals `type` (case-insensitively).
bool http_type_is(const conn *c, const char *type);

// Gathers the whole body, then calls cb. Larger than max: 413.
void http_collect(conn *c, size_t max, void (*cb)(conn *c, const uint8_t *p, size_t n));
void http_pause_body(conn *c);
void http_resume_body(conn *c);

// Complete answer. `extra` = more header lines, each ending in CRLF, or NULL.
void http_reply(conn *c, int status, const char *type, const void *body, size_t n, const char *extra);
// {"code": status, "message": …}
void http_error(conn *c, int status, const char *message);
// Head of an answer; length < 0 = chunked. Then http_write/http_send_file, then http_end.
void http_begin(conn *c, int status, const char *type, const char *extra, int64_t length);
void http_write(conn *c, const void *p, size_t n);
void http_send_file(conn *c, int fd, off_t off, uint64_t len); // takes fd; implies http_end
void http_end(conn *c);
void http_abort(conn *c); // cut the connection: the answer cannot be completed
size_t http_pending(const conn *c);
// True when a producer may go on; otherwise sink->drained will be called.
bool http_may_write(conn *c);

#endif
