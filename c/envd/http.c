#include "http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include "json.h"

// ---- request head ------------------------------------------------------------------------------

static bool is_tchar(uint8_t c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         (c && strchr("!#$%&'*+-.^_`|~", c));
}

// RFC 9112. Strict where leniency invites request smuggling: CRLF only, no folding, no blank before ':',
// not both lengths.
ssize_t http_parse_head(char *text, size_t n, req *r) {
  memset(r, 0, sizeof *r);
  size_t skip = 0;
  while (n - skip >= 2 && text[skip] == '\r' && text[skip + 1] == '\n' && skip < 8) skip += 2;
  char *end = memmem(text + skip, n - skip, "\r\n\r\n", 4);
  if (!end) return n - skip > HTTP_HEAD_MAX ? -431 : 0;
  size_t total = (size_t)(end - text) + 4;
  if (total - skip > HTTP_HEAD_MAX) return -431;
  char *p = text + skip;
  char *eol = memmem(p, (size_t)(end + 2 - p), "\r\n", 2);
  *eol = 0;
  if (memchr(p, 0, (size_t)(eol - p))) return -400;
  char *sp1 = strchr(p, ' ');
  char *sp2 = sp1 ? strchr(sp1 + 1, ' ') : NULL;
  if (!sp2 || sp1 == p) return -400;
  *sp1 = *sp2 = 0;
  for (char *m = p; *m; m++)
    if (!is_tchar((uint8_t)*m)) return -400;
  char *target = sp1 + 1;
  for (char *t = target; *t; t++)
    if ((uint8_t)*t <= 0x20 || (uint8_t)*t == 0x7f) return -400;
  if (!strcmp(sp2 + 1, "HTTP/1.0"))
    r->http10 = true;
  else if (strcmp(sp2 + 1, "HTTP/1.1"))
    return strncmp(sp2 + 1, "HTTP/", 5) ? -400 : -505;
  if (!strncasecmp(target, "http://", 7)) { // absolute form: only the path counts
    char *slash = strchr(target + 7, '/');
    target = slash ? slash : (char *)"/";
  }
  if (target[0] != '/' && strcmp(target, "*")) return -400;
  r->method = p;
  r->path = target;
  char *hash = strchr(target, '#');
  if (hash) return -400;
  char *q = strchr(target, '?');
  r->query = (char *)"";
  if (q) {
    *q = 0;
    r->query = q + 1;
  }
  unsigned hosts = 0;
  r->close = r->http10;
  for (p = eol + 2; p < end + 2; p = eol + 2) {
    eol = memmem(p, (size_t)(end + 2 - p), "\r\n", 2);
    *eol = 0;
    char *colon = memchr(p, ':', (size_t)(eol - p));
    if (!colon || colon == p) return -400;
    for (char *k = p; k < colon; k++)
      if (!is_tchar((uint8_t)*k)) return -400;
    *colon = 0;
    char *v = colon + 1, *e = eol;
    while (*v == ' ' || *v == '\t') v++;
    while (e > v && (e[-1] == ' ' || e[-1] == '\t')) e--;
    *e = 0;
    for (char *k = v; k < e; k++)
      if (((uint8_t)*k < 0x20 && *k != '\t') || (uint8_t)*k == 0x7f) return -400;
    if (r->nh == HTTP_HEADERS_MAX) return -431;
    r->h[r->nh++] = (header){p, v};
    if (!strcasecmp(p, "content-length")) {
      uint64_t len;
      if (parse_u64(v, strlen(v), INT64_MAX, &len) || (r->has_length && len != r->length)) return -400;
      r->has_length = true;
      r->length = len;
    } else if (!strcasecmp(p, "transfer-encoding")) {
      if (r->chunked || r->http10) return -400;
      if (strcasecmp(v, "chunked")) return -501;
      r->chunked = true;
    } else if (!strcasecmp(p, "connection")) {
      if (strcasestr(v, "close")) r->close = true;
      if (r->http10 && strcasestr(v, "keep-alive")) r->close = false;
    } else if (!strcasecmp(p, "expect")) {
      if (strcasecmp(v, "100-continue")) return -417;
      r->expect = !r->http10;
    } else if (!strcasecmp(p, "host")) {
      hosts++;
    }
  }
  if (r->chunked && r->has_length) return -400;
  if (hosts > 1 || (!hosts && !r->http10)) return -400;
  return (ssize_t)total;
}

const char *http_header(const conn *c, const char *name) {
  for (unsigned i = 0; i < c->r.nh; i++)
    if (!strcasecmp(c->r.h[i].name, name)) return c->r.h[i].value;
  return NULL;
}

char *http_query(arena *a, const conn *c, const char *name, bool *bad) {
  size_t nl = strlen(name);
  for (const char *p = c->r.query; *p;) {
    size_t n = strcspn(p, "&");
    size_t k = 0;
    while (k < n && p[k] != '=') k++;
    if (k == nl && !memcmp(p, name, nl)) {
      char *v = arena_strndup(a, k < n ? p + k + 1 : "", k < n ? n - k - 1 : 0);
      // '+' stays: signatures are base64 and some clients leave it bare.
      ssize_t len = v ? url_decode(v, strlen(v), false) : -1;
      if (len < 0) {
        *bad = true;
        return NULL;
      }
      v[len] = 0;
      return v;
    }
    p += n + (p[n] == '&');
  }
  return NULL;
}

bool http_type_is(const conn *c, const char *type) {
  const char *v = http_header(c, "content-type");
  size_t n = strlen(type);
  return v && !strncasecmp(v, type, n) && (!v[n] || v[n] == ';' || v[n] == ' ');
}

// ---- connection --------------------------------------------------------------------------------

static void conn_process(conn *c);
static void conn_watch(conn *c);

static void end_exchange(conn *c) {
  const sink *s = c->sink;
  c->sink = NULL;
  if (s && s->gone) s->gone(c);
  c->user = NULL;
  buf_free(&c->collect);
  c->collected = NULL;
  if (c->file_fd >= 0) close(c->file_fd);
  c->file_fd = -1;
}

static void conn_close(conn *c) {
  if (c->closed) return;
  c->closed = true;
  loop *l = c->srv->l;
  ev_del(l, &c->e);
  timer_clear(l, &c->t);
  close(c->e.fd);
  c->e.fd = -1;
  if (c->prev)
    c->prev->next = c->next;
  else
    c->srv->conns = c->next;
  if (c->next) c->next->prev = c->prev;
  c->srv->nconns--;
  end_exchange(c);
  buf_free(&c->in);
  buf_free(&c->out);
  free(c->head);
  c->head = NULL;
  loop_free_later(l, c);
}

void http_abort(conn *c) {
  if (c->closed) return;
  struct linger lg = {1, 0}; // a reset, so that the client cannot take the cut answer for a whole one
  setsockopt(c->e.fd, SOL_SOCKET, SO_LINGER, &lg, sizeof lg);
  conn_close(c);
}

size_t http_pending(const conn *c) {
  return buf_len(&c->out);
}

bool http_may_write(conn *c) {
  if (buf_len(&c->out) < HTTP_OUT_HIGH) return true;
  c->want_drain = true;
  return false;
}

// Sends what there is. False when the connection is gone.
static bool conn_flush(conn *c) {
  while (buf_len(&c->out)) {
    ssize_t n = send(c->e.fd, buf_data(&c->out), buf_len(&c->out), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return true;
    if (n < 0) return conn_close(c), false;
    c->sent_at = mono_ms();
    buf_consume(&c->out, (size_t)n);
  }
  for (int turns = 0; c->file_fd >= 0 && c->file_left && turns < 4; turns++) { // then others have their turn
    size_t want = c->file_left < 256 * 1024 ? (size_t)c->file_left : 256 * 1024;
    ssize_t n = sendfile(c->e.fd, c->file_fd, &c->file_off, want);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return true;
    if (n <= 0) return http_abort(c), false; // read error, or the file shrank under us
    c->file_left -= (uint64_t)n;
  }
  if (c->file_fd >= 0 && !c->file_left) {
    close(c->file_fd);
    c->file_fd = -1;
  }
  return true;
}

static bool sent_all(const conn *c) {
  return !buf_len(&c->out) && c->file_fd < 0;
}

static void next_request(conn *c) {
  end_exchange(c);
  free(c->head);
  c->head = NULL;
  c->in_request = c->body_done = c->body_paused = false;
  c->exempt = c->unhandled = false;
  c->resp_started = c->resp_done = c->resp_chunked = c->head_only = c->want_drain = c->streaming = false;
  c->head_timed = false;
  c->common = NULL;
  c->discarded = 0;
  timer_set(c->srv->l, &c->t, HTTP_IDLE_MS);
}

// The answer is out but the client still sends: closing now would reset it before it has read the answer.
static void start_linger(conn *c) {
  end_exchange(c);
  buf_clear(&c->in); // full, it would keep us from reading on
  c->lingering = true;
  c->linger_until = mono_ms() + HTTP_LINGER_MAX_MS;
  shutdown(c->e.fd, SHUT_WR);
  timer_set(c->srv->l, &c->t, HTTP_LINGER_MS);
}

static void feed_sink(conn *c, bool last) {
  c->body_done = last;
  if (last && !c->resp_done && c->sink && c->sink->end) c->sink->end(c);
}

static size_t give(conn *c, const uint8_t *p, size_t n) {
  if (c->resp_done || !c->sink || !c->sink->data) {
    c->discarded += n;
    return n;
  }
  return c->sink->data(c, p, n);
}

int http_chunk_size(const char *line, size_t n, uint64_t *out) {
  uint64_t v = 0;
  size_t i = 0;
  for (; i < n && i < 16; i++) {
    char ch = line[i];
    int d = ch >= '0' && ch <= '9' ? ch - '0' : ch >= 'a' && ch <= 'f' ? ch - 'a' + 10
                                            : ch >= 'A' && ch <= 'F' ? ch - 'A' + 10
                                                                     : -1;
    if (d < 0) break;
    v = v << 4 | (uint64_t)d;
  }
  if (!i || v > INT64_MAX || (i < n && line[i] != ';' && line[i] != ' ' && line[i] != '\t')) return -EINVAL;
  *out = v;
  return 0;
}

enum { CHUNK_LINE_MAX = 16 * 1024 }; // a trailer line may carry something

// Where the body ends is unknown: nothing more can be understood on this connection.
static void bad_chunk(conn *c) {
  c->keep_alive = false;
  if (!c->resp_started)
    http_error(c, 400, "malformed chunked body");
  else if (!c->resp_done)
    http_abort(c);
  c->body_done = true;
}

// Moves body bytes from `in` to the sink. True when something moved.
static bool feed_body(conn *c) {
  size_t have = buf_len(&c->in);
  if (!c->r.chunked) {
    if (!c->body_left) return feed_sink(c, true), true;
    if (!have) return false;
    size_t n = have < c->body_left ? have : (size_t)c->body_left;
    size_t used = give(c, buf_data(&c->in), n);
    if (c->closed) return false;
    buf_consume(&c->in, used);
    c->body_left -= used;
    if (!c->body_left) feed_sink(c, true);
    return used > 0;
  }
  if (!have) return false;
  char *p = (char *)buf_data(&c->in);
  if (c->chunk == CH_DATA) {
    size_t n = have < c->body_left ? have : (size_t)c->body_left;
    size_t used = give(c, (uint8_t *)p, n);
    if (c->closed) return false;
    buf_consume(&c->in, used);
    c->body_left -= used;
    if (!c->body_left) c->chunk = CH_DATA_END;
    return used > 0;
  }
  char *eol = memmem(p, have, "\r\n", 2);
  if (!eol) {
    if (have > CHUNK_LINE_MAX) bad_chunk(c);
    return false;
  }
  size_t line = (size_t)(eol - p);
  bool bad = line > CHUNK_LINE_MAX;
  if (bad) {
    // below
  } else if (c->chunk == CH_DATA_END) {
    bad = line != 0;
    c->chunk = CH_SIZE;
  } else if (c->chunk == CH_SIZE) {
    bad = http_chunk_size(p, line, &c->body_left) != 0;
    c->chunk = c->body_left ? CH_DATA : CH_TRAILER;
  } else {
    c->trailer_bytes += (unsigned)line + 2;
    bad = c->trailer_bytes > 16 * 1024;
    if (!line && !bad) {
      buf_consume(&c->in, 2);
      feed_sink(c, true);
      return true;
    }
  }
  if (bad) {
    bad_chunk(c);
    return false;
  }
  buf_consume(&c->in, line + 2);
  return true;
}

// Nothing of its request is looked at for now.
static bool held(const conn *c) {
  return c->srv->held && !c->exempt;
}

static void hand_over(conn *c);

static void begin_request(conn *c, size_t used) {
  c->in_request = true;
  c->keep_alive = !c->r.close;
  c->head_only = !strcmp(c->r.method, "HEAD");
  c->body_left = c->r.length;
  c->chunk = CH_SIZE;
  c->trailer_bytes = 0;
  c->body_done = !c->r.chunked && !c->r.length;
  buf_consume(&c->in, used);
  timer_clear(c->srv->l, &c->t);
  hand_over(c);
}

static void hand_over(conn *c) {
  c->exempt = c->srv->exempt && c->srv->exempt(c);
  c->unhandled = held(c);
  if (c->unhandled) return;
  c->srv->handle(c);
  if (c->closed) return;
  if (c->body_done) {
    c->body_done = false;
    feed_sink(c, true);
  } else if (c->r.expect && !c->resp_started) {
    buf_puts(&c->out, "HTTP/1.1 100 Continue\r\n\r\n");
  }
}

static void conn_process(conn *c) {
  if (c->busy || c->closed || c->lost) return;
  if (c->lingering) { // a client that goes on sending is heard for a while, not for ever
    int64_t left = c->linger_until - mono_ms();
    timer_set(c->srv->l, &c->t, left < HTTP_LINGER_MS ? left : HTTP_LINGER_MS);
    return;
  }
  c->busy = true;
again:
  while (!c->closed) {
    if (c->out.oom || c->in.oom || c->collect.oom) {
      http_abort(c);
      break;
    }
    if (!c->in_request) {
      // Empty lines in front are left out (RFC 9112 2.2): some clients end a body with one too many.
      while (buf_len(&c->in) >= 2 && !memcmp(buf_data(&c->in), "\r\n", 2)) buf_consume(&c->in, 2);
      if (!buf_len(&c->in)) break;
      // The head is copied out so that the body can move through `in` while the request lasts.
      const uint8_t *end = memmem(buf_data(&c->in), buf_len(&c->in), "\r\n\r\n", 4);
      size_t hn = end ? (size_t)(end - buf_data(&c->in)) + 4 : buf_len(&c->in);
      char *head = NULL;
      ssize_t used = 0;
      if (end || hn > HTTP_HEAD_MAX) {
        head = malloc(hn);
        if (!head) {
          http_abort(c);
          break;
        }
        memcpy(head, buf_data(&c->in), hn);
        used = http_parse_head(head, hn, &c->r);
      }
      if (!used) {
        free(head);
        if (!c->head_timed) {
          c->head_timed = true;
          timer_set(c->srv->l, &c->t, HTTP_HEAD_MS);
        }
        break;
      }
      c->head = head;
      if (used < 0) {
        c->in_request = true;
        c->keep_alive = false;
        c->body_done = true;
        c->r.nh = 0;
        c->r.method = c->r.path = c->r.query = (char *)"";
        buf_clear(&c->in);
        http_error(c, (int)-used, used == -431 ? "request header fields too large" : "malformed request");
        continue;
      }
      begin_request(c, (size_t)used);
      continue;
    }
    if (c->unhandled) {
      if (held(c)) break;
      hand_over(c);
      continue;
    }
    if (!c->body_done && (!c->body_paused || c->resp_done)) {
      if (held(c)) break;
      if (c->resp_done && (!c->keep_alive || c->discarded > HTTP_DISCARD_MAX)) {
        if (!conn_flush(c)) break;
        if (!sent_all(c)) break;
        start_linger(c);
        break;
      }
      if (feed_body(c)) continue;
      if (c->closed) break;
      if (!c->body_done) break;
      continue;
    }
    if (c->resp_done && c->body_done) {
      if (!conn_flush(c) || !sent_all(c)) break;
      if (!c->keep_alive || c->eof) {
        if (c->eof)
          conn_close(c);
        else
          start_linger(c);
        break;
      }
      next_request(c);
      continue;
    }
    break;
  }
  if (!c->closed && !sent_all(c)) {
    conn_flush(c);
    // The last of an answer left just now: no event would tell, and the exchange would never end.
    if (!c->closed && sent_all(c) && c->in_request && c->resp_done) goto again;
  }
  if (!c->closed && c->eof && !c->lingering && !held(c)) {
    bool reading = !c->in_request || (!c->body_done && !c->body_paused);
    if (c->streaming || reading) conn_close(c); // nobody left to answer, or a body that will never end
  }
  c->busy = false;
  if (!c->closed) conn_watch(c);
}

static void conn_watch(conn *c) {
  uint32_t m = 0;
  bool want_in = c->lingering || !c->in_request || (!c->body_done && (!c->body_paused || c->resp_done));
  if (want_in && !c->eof && buf_len(&c->in) < HTTP_IN_MAX) m |= EPOLLIN;
  if (!sent_all(c)) m |= EPOLLOUT;
  if (!c->rdhup && !(m & EPOLLIN)) m |= EPOLLRDHUP;
  if (ev_set(c->srv->l, &c->e, m)) conn_close(c);
}

// The client is gone. Its handler hears of it when it may act.
static void conn_lost(conn *c) {
  if (!c->in_request || !held(c)) {
    conn_close(c);
    return;
  }
  c->lost = true;
  ev_del(c->srv->l, &c->e);
}

static void on_conn(ev *e, uint32_t events) {
  conn *c = e->owner;
  if (events & (EPOLLERR | EPOLLHUP)) {
    conn_lost(c);
    return;
  }
  if (events & EPOLLOUT) {
    if (!conn_flush(c)) return;
    if (c->want_drain && buf_len(&c->out) < HTTP_OUT_LOW) {
      c->want_drain = false;
      if (c->sink && c->sink->drained) c->sink->drained(c);
      if (c->closed) return;
    }
  }
  if (events & EPOLLIN) {
    uint8_t *p = buf_reserve(&c->in, 64 * 1024);
    if (!p) {
      http_abort(c);
      return;
    }
    ssize_t n = recv(e->fd, p, 64 * 1024, 0);
    if (n < 0 && errno != EAGAIN && errno != EINTR) {
      conn_lost(c);
      return;
    }
    if (n == 0) {
      if (c->lingering) {
        conn_close(c);
        return;
      }
      c->eof = true;
    }
    if (n > 0 && c->lingering) n = 0;
    if (n > 0) c->in.len += (size_t)n, c->heard_at = mono_ms();
  } else if (events & EPOLLRDHUP) {
    c->rdhup = true;
    if (c->streaming) {
      conn_close(c);
      return;
    }
    // A client that closes its sending side still gets the answer to a complete request.
    if (c->body_done) c->eof = true;
  }
  conn_process(c);
}

static void on_conn_timer(timer *t) {
  conn_close(t->owner);
}

static const sink collect_sink;

static size_t collect_data(conn *c, const uint8_t *p, size_t n) {
  if (buf_len(&c->collect) + n > c->collect_max) {
    http_error(c, 413, "request body too large");
    return n;
  }
  buf_put(&c->collect, p, n);
  return n;
}

static void collect_end(conn *c) {
  c->collected(c, buf_data(&c->collect), buf_len(&c->collect));
}

static const sink collect_sink = {.data = collect_data, .end = collect_end};

void http_collect(conn *c, size_t max, void (*cb)(conn *c, const uint8_t *p, size_t n)) {
  c->collect_max = max;
  c->collected = cb;
  c->sink = &collect_sink;
  if (c->r.has_length && c->r.length > max) http_error(c, 413, "request body too large");
}

void http_pause_body(conn *c) {
  c->body_paused = true;
}

void http_resume_body(conn *c) {
  c->body_paused = false;
  conn_process(c);
}

// ---- answers -----------------------------------------------------------------------------------

static const char *reason(int status) {
  static const struct {
    int code;
    const char *text;
  } t[] = {{200, "OK"},
           {204, "No Content"},
           {206, "Partial Content"},
           {304, "Not Modified"},
           {400, "Bad Request"},
           {401, "Unauthorized"},
           {403, "Forbidden"},
           {404, "Not Found"},
           {405, "Method Not Allowed"},
           {406, "Not Acceptable"},
           {409, "Conflict"},
           {413, "Content Too Large"},
           {415, "Unsupported Media Type"},
           {416, "Range Not Satisfiable"},
           {417, "Expectation Failed"},
           {429, "Too Many Requests"},
           {431, "Request Header Fields Too Large"},
           {499, "Client Closed Request"},
           {500, "Internal Server Error"},
           {501, "Not Implemented"},
           {503, "Service Unavailable"},
           {504, "Gateway Timeout"},
           {505, "HTTP Version Not Supported"},
           {507, "Insufficient Storage"}};
  for (size_t i = 0; i < sizeof t / sizeof t[0]; i++)
    if (t[i].code == status) return t[i].text;
  return "Status";
}

void http_begin(conn *c, int status, const char *type, const char *extra, int64_t length) {
  if (c->closed || c->resp_started) return;
  c->resp_started = true;
  bool bodyless = status == 204 || status == 304;
  // Too much unread body: the connection cannot be used again.
  if (!c->body_done && !c->r.chunked && c->body_left > HTTP_DISCARD_MAX) c->keep_alive = c->keep_alive && c->sink;
  buf_printf(&c->out, "HTTP/1.1 %d %s\r\n", status, reason(status));
  if (type) buf_printf(&c->out, "Content-Type: %s\r\n", type);
  if (length >= 0) {
    if (!bodyless) buf_printf(&c->out, "Content-Length: %lld\r\n", (long long)length);
  } else if (!c->r.http10) {
    c->resp_chunked = true;
    buf_puts(&c->out, "Transfer-Encoding: chunked\r\n");
  } else {
    c->keep_alive = false;
  }
  if (!c->keep_alive)
    buf_puts(&c->out, "Connection: close\r\n");
  else if (c->r.http10)
    buf_puts(&c->out, "Connection: keep-alive\r\n");
  if (c->common) buf_puts(&c->out, c->common);
  if (extra) buf_puts(&c->out, extra);
  buf_puts(&c->out, "\r\n");
}

void http_write(conn *c, const void *p, size_t n) {
  if (c->closed || c->resp_done || !n || c->head_only) return;
  bool idle = !buf_len(&c->out);
  if (c->resp_chunked) buf_printf(&c->out, "%zx\r\n", n);
  buf_put(&c->out, p, n);
  if (c->resp_chunked) buf_puts(&c->out, "\r\n");
  if (c->busy) return; // flushed at the end of the turn
  if (c->out.oom) {
    http_abort(c);
    return;
  }
  // With output already waiting the socket is full: EPOLLOUT will carry on.
  if ((idle || !(c->e.mask & EPOLLOUT)) && !conn_flush(c)) return;
  conn_watch(c);
}

void http_end(conn *c) {
  if (c->closed || c->resp_done) return;
  if (c->resp_chunked && !c->head_only) buf_puts(&c->out, "0\r\n\r\n");
  c->resp_done = true;
  c->streaming = false;
  conn_process(c);
}

void http_send_file(conn *c, int fd, off_t off, uint64_t len) {
  if (c->closed || c->head_only || !len) {
    close(fd);
  } else {
    c->file_fd = fd;
    c->file_off = off;
    c->file_left = len;
  }
  http_end(c);
}

void http_reply(conn *c, int status, const char *type, const void *body, size_t n, const char *extra) {
  if (c->resp_started) return;
  http_begin(c, status, type, extra, (int64_t)n);
  http_write(c, body, n);
  http_end(c);
}

void http_error(conn *c, int status, const char *message) {
  buf b = {0};
  buf_printf(&b, "{\"code\":%d,\"message\":", status);
  json_put_str(&b, message, strlen(message));
  buf_puts(&b, "}\n");
  http_reply(c, status, "application/json", b.p, buf_len(&b), NULL);
  buf_free(&b);
}

// ---- listener ----------------------------------------------------------------------------------

enum { ACCEPT_AGAIN_MS = 100 };

static void on_accept_again(timer *t) {
  http_server *s = t->owner;
  if (ev_set(s->l, &s->listener, EPOLLIN)) timer_set(s->l, t, ACCEPT_AGAIN_MS);
}

// The connection that has been idle for longest, between two requests or before the first: not one of them is owed an
// answer, so that a crowd of silent ones keeps nobody out.
static bool close_idlest(http_server *s) {
  conn *idlest = NULL;
  for (conn *c = s->conns; c; c = c->next)
    if (!c->in_request && !c->lingering && !c->busy && (!idlest || c->heard_at <= idlest->heard_at)) idlest = c;
  if (idlest) conn_close(idlest);
  return idlest;
}

void http_adopt(http_server *s, int fd) {
  conn *c = s->nconns < s->max_conns || close_idlest(s) ? calloc(1, sizeof *c) : NULL;
  if (!c) {
    close(fd);
    return;
  }
  int one = 1, idle = 60, intvl = 15, cnt = 4;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &intvl, sizeof intvl);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &cnt, sizeof cnt);
  socklen_t sl = sizeof c->peer;
  if (getpeername(fd, (struct sockaddr *)&c->peer, &sl)) c->peer.sin_family = AF_UNSPEC;
  sl = sizeof c->local;
  if (getsockname(fd, (struct sockaddr *)&c->local, &sl)) c->local.sin_family = AF_UNSPEC;
  // For TCP the kernel tells here the interface the SYN came in by.
  union {
    char raw[256];
    struct cmsghdr align;
  } cm;
  socklen_t cl = sizeof cm.raw;
  if (!getsockopt(fd, IPPROTO_IP, IP_PKTOPTIONS, cm.raw, &cl)) {
    struct msghdr mh = {.msg_control = cm.raw, .msg_controllen = cl};
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&mh); h; h = CMSG_NXTHDR(&mh, h))
      if (h->cmsg_level == IPPROTO_IP && h->cmsg_type == IP_PKTINFO) {
        struct in_pktinfo pi;
        memcpy(&pi, CMSG_DATA(h), sizeof pi);
        c->in_ifindex = pi.ipi_ifindex;
      }
  }
  c->srv = s;
  c->id = ++s->next_id;
  c->e = (ev){.fd = fd, .cb = on_conn, .owner = c};
  c->t = (timer){.cb = on_conn_timer, .owner = c};
  c->file_fd = -1;
  c->next = s->conns;
  if (s->conns) s->conns->prev = c;
  s->conns = c;
  s->nconns++;
  c->sent_at = c->heard_at = mono_ms();
  timer_set(s->l, &c->t, HTTP_IDLE_MS);
  conn_watch(c);
}

static void on_accept(ev *e, uint32_t events) {
  (void)events;
  http_server *s = e->owner;
  for (int i = 0; i < 32; i++) {
    int fd = accept4(e->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      http_adopt(s, fd);
      continue;
    }
    int why = errno;
    if (why == EMFILE || why == ENFILE || why == ENOBUFS || why == ENOMEM) {
      close_idlest(s);
      // Out of descriptors: look again soon instead of spinning.
      if (!timer_set(s->l, &s->accept_again, ACCEPT_AGAIN_MS)) ev_set(s->l, e, 0);
    }
    if (why != EINTR && why != ECONNABORTED) return;
  }
}

int http_listen(http_server *s, loop *l, const char *addr, int port) {
  s->l = l;
  struct rlimit files;
  s->max_conns = HTTP_CONNS_MAX;
  // Processes and files need descriptors as well.
  if (!getrlimit(RLIMIT_NOFILE, &files) && files.rlim_cur / 2 < HTTP_CONNS_MAX) s->max_conns = (unsigned)(files.rlim_cur / 2);
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -errno;
  int one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  setsockopt(fd, IPPROTO_IP, IP_PKTINFO, &one, sizeof one);
  struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  socklen_t sl = sizeof sa;
  int rc = 0;
  if (inet_pton(AF_INET, addr, &sa.sin_addr) != 1)
    rc = -EINVAL;
  else if (bind(fd, (struct sockaddr *)&sa, sizeof sa) || listen(fd, 1024) ||
           getsockname(fd, (struct sockaddr *)&sa, &sl))
    rc = -errno;
  if (!rc) {
    s->port = ntohs(sa.sin_port);
    s->listener = (ev){.fd = fd, .cb = on_accept, .owner = s};
    s->accept_again = (timer){.cb = on_accept_again, .owner = s};
    rc = ev_set(l, &s->listener, EPOLLIN);
  }
  if (rc) close(fd);
  return rc;
}

static void on_release(timer *t) {
  http_server *s = t->owner;
  if (s->held) return;
  for (conn *c = s->conns, *next; c; c = next) {
    next = c->next; // as below
    if (c->lost)
      conn_close(c);
    else
      conn_process(c);
  }
}

void http_hold(http_server *s, bool held) {
  s->held = held;
  s->release = (timer){.at = s->release.at, .pos = s->release.pos, .cb = on_release, .owner = s};
  if (held || timer_set(s->l, &s->release, HTTP_RELEASE_MS)) timer_clear(s->l, &s->release);
}

void http_drop_others(http_server *s, conn *keep) {
  for (conn *c = s->conns, *next; c; c = next) {
    next = c->next; // a closing handler may end other exchanges but closes no other connection
    if (c != keep) http_abort(c);
  }
}

void http_close(http_server *s) {
  http_drop_others(s, NULL);
  timer_clear(s->l, &s->accept_again);
  timer_clear(s->l, &s->release);
  ev_del(s->l, &s->listener);
  if (s->listener.fd >= 0) close(s->listener.fd);
}
