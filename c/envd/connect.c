// Connect protocol (connectrpc.com/docs/protocol): unary, server and client streams, JSON and binary.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>

#include "agent.h"
#include "flate.h"

enum {
  MESSAGE_MAX = 16 << 20, // one request message
  CALL_MEMORY = 96 << 20, // arena of one call: a message decoded and its answer
  FLAG_COMPRESSED = 1,
  FLAG_END = 2,
};

static const struct {
  const char *name;
  int http;
} codes[] = {
    [OK] = {"ok", 200},
    [CANCELED] = {"canceled", 499},
    [UNKNOWN] = {"unknown", 500},
    [INVALID_ARGUMENT] = {"invalid_argument", 400},
    [DEADLINE_EXCEEDED] = {"deadline_exceeded", 504},
    [NOT_FOUND] = {"not_found", 404},
    [ALREADY_EXISTS] = {"already_exists", 409},
    [PERMISSION_DENIED] = {"permission_denied", 403},
    [RESOURCE_EXHAUSTED] = {"resource_exhausted", 429},
    [FAILED_PRECONDITION] = {"failed_precondition", 400},
    [ABORTED] = {"aborted", 409},
    [OUT_OF_RANGE] = {"out_of_range", 400},
    [UNIMPLEMENTED] = {"unimplemented", 501},
    [INTERNAL] = {"internal", 500},
    [UNAVAILABLE] = {"unavailable", 503},
    [DATA_LOSS] = {"data_loss", 500},
    [UNAUTHENTICATED] = {"unauthenticated", 401},
};

void rpc_fail(call *k, enum code code, const char *fmt, ...) {
  if (k->code) return; // the first cause counts
  k->code = code;
  va_list ap;
  va_start(ap, fmt);
  char tmp[1024];
  vsnprintf(tmp, sizeof tmp, fmt, ap);
  va_end(ap);
  k->error = arena_strndup(&k->a, tmp, strlen(tmp));
}

static void put_error(buf *b, const call *k) {
  const char *t = k->error ? k->error : "out of memory";
  buf_printf(b, "{\"code\":\"%s\",\"message\":", codes[k->code].name);
  json_put_str(b, t, strlen(t));
  buf_putc(b, '}');
}

static void encode(const call *k, buf *b, const msg *m) {
  if (k->json)
    msg_to_json(b, m);
  else
    msg_to_pb(b, m);
}

// ---- envelopes ---------------------------------------------------------------------------------

static void put_frame(buf *b, uint8_t flags, const buf *payload) {
  uint32_t n = (uint32_t)buf_len(payload);
  uint8_t h[5] = {flags, (uint8_t)(n >> 24), (uint8_t)(n >> 16), (uint8_t)(n >> 8), (uint8_t)n};
  buf_put(b, h, 5);
  buf_put(b, buf_data(payload), n);
}

ssize_t frame_parse(const uint8_t *p, size_t n, enum code *code, const char **why) {
  if (n < 5) return 0;
  uint32_t len = (uint32_t)p[1] << 24 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 8 | p[4];
  *code = INVALID_ARGUMENT;
  if (p[0] & FLAG_END) return *why = "a client must not send an end-of-stream frame", -1;
  if (p[0] & FLAG_COMPRESSED) return *why = "compressed frame without an agreed encoding", -1;
  if (p[0]) return *why = "unknown frame flags", -1;
  *code = RESOURCE_EXHAUSTED;
  if (len > MESSAGE_MAX) return *why = "message is larger than 16 MiB", -1;
  *code = OK;
  return n - 5 < len ? 0 : 5 + (ssize_t)len;
}

static void stream_begin(call *k) {
  if (k->c->resp_started) return;
  http_begin(k->c, 200, k->json ? "application/connect+json" : "application/connect+proto", NULL, -1);
}

void rpc_send(call *k, const msg *m) {
  if (k->ended || k->c->closed) return;
  agent *ag = k->ag;
  buf frame = ag->frame; // out of reach of whoever is called from the write
  ag->frame = (buf){0};
  buf_put(&frame, "\0\0\0\0", 5);
  encode(k, &frame, m);
  if (frame.oom || k->a.oom) {
    buf_free(&frame);
    http_abort(k->c);
    return;
  }
  uint32_t n = (uint32_t)buf_len(&frame) - 5;
  for (int i = 0; i < 4; i++) buf_data(&frame)[1 + i] = (uint8_t)(n >> (24 - 8 * i));
  stream_begin(k);
  conn *c = k->c; // the write may end the call
  if (k->on_keepalive) timer_set(&k->ag->loop, &k->keepalive, k->keepalive_ms);
  http_write(c, buf_data(&frame), buf_len(&frame));
  buf_clear(&frame);
  if (ag->frame.p)
    buf_free(&frame);
  else
    ag->frame = frame;
}

bool rpc_may_send(call *k) {
  return k->ended || k->c->closed || http_may_write(k->c);
}

static void unary_reply(call *k) {
  buf b = {0};
  if (!k->code && (!k->out || k->a.oom)) rpc_fail(k, RESOURCE_EXHAUSTED, "message too large");
  if (!k->code) encode(k, &b, k->out);
  if (b.oom) {
    buf_free(&b);
    rpc_fail(k, RESOURCE_EXHAUSTED, "message too large");
  }
  if (k->code) {
    put_error(&b, k);
    http_reply(k->c, codes[k->code].http, "application/json", b.p, buf_len(&b), NULL);
  } else {
    http_reply(k->c, 200, k->json ? "application/json" : "application/proto", b.p, buf_len(&b), NULL);
  }
  buf_free(&b);
}

void rpc_finish(call *k) {
  if (k->ended || k->c->closed) return;
  k->ended = true;
  timer_clear(&k->ag->loop, &k->keepalive);
  timer_clear(&k->ag->loop, &k->deadline);
  if (k->m->kind == UNARY) {
    unary_reply(k);
    return;
  }
  conn *c = k->c;
  buf b = {0}, frame = {0};
  stream_begin(k);
  if (k->m->kind == CLIENT_STREAM && !k->code) {
    encode(k, &b, k->out);
    put_frame(&frame, 0, &b);
    buf_clear(&b);
  }
  if (k->code) {
    buf_puts(&b, "{\"error\":");
    put_error(&b, k);
    buf_putc(&b, '}');
  } else {
    buf_puts(&b, "{}");
  }
  put_frame(&frame, FLAG_END, &b);
  bool oom = b.oom || frame.oom;
  if (!oom) http_write(c, frame.p, buf_len(&frame));
  buf_free(&b);
  buf_free(&frame);
  if (oom)
    http_abort(c);
  else
    http_end(c);
}

static void on_keepalive_timer(timer *t) {
  call *k = t->owner;
  if (k->on_keepalive) k->on_keepalive(k);
}

static void on_deadline_timer(timer *t) {
  call *k = t->owner;
  if (k->on_deadline) {
    k->on_deadline(k);
    return;
  }
  rpc_fail(k, DEADLINE_EXCEEDED, "the request's deadline is over");
  rpc_finish(k);
}

// ---- request side ------------------------------------------------------------------------------

static bool decode(call *k, const uint8_t *p, size_t n) {
  const char *err = "malformed message";
  k->in = k->json ? msg_from_json(&k->a, k->m->in, (const char *)p, n, &err) : msg_from_pb(&k->a, k->m->in, p, n, &err);
  if (!k->in) rpc_fail(k, k->a.oom ? RESOURCE_EXHAUSTED : INVALID_ARGUMENT, "%s", err);
  return k->in != NULL;
}

// Child process: one byte of code, then the body that goes to the client.
static void slow_child(void *owner, buf *out) {
  call *k = owner;
  k->m->fn(k);
  if (!k->code && (!k->out || k->a.oom)) rpc_fail(k, RESOURCE_EXHAUSTED, "message too large");
  buf_putc(out, (char)k->code);
  if (k->code)
    put_error(out, k);
  else
    encode(k, out, k->out);
  buf_putc(out, '.'); // complete
}

static void slow_done(job *j, bool ok) {
  call *k = j->owner;
  size_t n = buf_len(&j->out);
  const uint8_t *p = buf_data(&j->out);
  k->user_data = NULL;
  if (!ok || n < 2 || p[n - 1] != '.' || p[0] > UNAUTHENTICATED) {
    rpc_fail(k, INTERNAL, "the operation was interrupted (out of memory?)");
    rpc_finish(k);
    return;
  }
  k->ended = true;
  timer_clear(&k->ag->loop, &k->deadline);
  const char *type = p[0] || k->json ? "application/json" : "application/proto";
  http_reply(k->c, codes[p[0]].http, type, p + 1, n - 2, NULL);
}

static void slow_gone(call *k) {
  if (k->user_data) job_cancel(k->user_data);
}

static void unary_run(call *k) {
  if (k->m->slow && k->m->slow(k)) {
    k->user_data = job_start(k->ag, k, slow_child, slow_done);
    if (k->user_data) {
      k->on_gone = slow_gone;
      k->deferred = true;
      return;
    }
    rpc_fail(k, UNAVAILABLE, "too many file operations at once, try again");
  } else {
    k->m->fn(k);
  }
  if (!k->deferred) rpc_finish(k);
}

static void on_unary_body(conn *c, const uint8_t *p, size_t n) {
  call *k = c->user;
  if (!k->code) {
    const char *enc = http_header(c, "content-encoding");
    buf plain = {0};
    if (enc && !strcasecmp(enc, "gzip")) {
      int rc = gunzip_all(p, n, MESSAGE_MAX, &plain);
      if (rc) rpc_fail(k, rc == -EFBIG ? RESOURCE_EXHAUSTED : INVALID_ARGUMENT, "cannot decompress the request body");
      p = plain.p;
      n = buf_len(&plain);
    } else if (enc && strcasecmp(enc, "identity") && *enc) {
      rpc_fail(k, UNIMPLEMENTED, "unknown compression '%s': supported encodings are gzip", enc);
    }
    if (!k->code) decode(k, p, n);
    buf_free(&plain);
    buf_free(&c->collect); // decoded is copied: the call may last
  }
  if (k->code)
    rpc_finish(k);
  else
    unary_run(k);
}

// Takes the frames that are complete. The stream protocol is in force: errors go into the end frame.
static void take_frames(call *k) {
  conn *c = k->c;
  k->taking = true;
  while (!k->code && !k->ended && !c->closed && !c->body_paused) {
    const uint8_t *p = buf_data(&k->frames);
    const char *why;
    enum code bad;
    ssize_t used = frame_parse(p, buf_len(&k->frames), &bad, &why);
    if (used < 0) rpc_fail(k, bad, "%s", why);
    if (!used && buf_len(&k->frames) >= 5) // room for the rest of it at once
      buf_reserve(&k->frames, 5 + ((size_t)p[1] << 24 | (size_t)p[2] << 16 | (size_t)p[3] << 8 | p[4]) - buf_len(&k->frames));
    if (used <= 0) break;
    size_t len = (size_t)used - 5;
    if (k->m->kind == SERVER_STREAM) {
      if (k->nmsgs++) {
        rpc_fail(k, UNIMPLEMENTED, "more than one request message");
        break;
      }
      decode(k, p + 5, len);
      buf_consume(&k->frames, 5 + len);
      continue;
    }
    // Messages of a client stream come without end: each has its memory to itself, except that the call's
    // account stays. fn copies what it keeps.
    arena keep = k->a;
    k->a = (arena){.limit = CALL_MEMORY};
    k->nmsgs++;
    if (decode(k, p + 5, len)) k->m->fn(k);
    arena mine = k->a;
    k->a = keep;
    if (k->code && k->error) k->error = arena_strndup(&k->a, k->error, strlen(k->error));
    k->in = NULL;
    arena_free(&mine);
    if (k->gone) arena_free(&k->a); // the client left in the middle of it
    if (!k->gone) buf_consume(&k->frames, 5 + len);
  }
  k->taking = false;
}

static size_t stream_data(conn *c, const uint8_t *p, size_t n) {
  call *k = c->user;
  if (!k->code) {
    buf_put(&k->frames, p, n);
    if (k->frames.oom) rpc_fail(k, RESOURCE_EXHAUSTED, "out of memory");
    take_frames(k);
  }
  // A server stream answers when the body is over; a client stream at once.
  if (k->code && k->m->kind == CLIENT_STREAM) rpc_finish(k);
  return n;
}

static void stream_end(conn *c) {
  call *k = c->user;
  take_frames(k);
  if (k->gone || k->ended) return;
  if (!k->code && !c->body_paused && buf_len(&k->frames)) rpc_fail(k, INVALID_ARGUMENT, "unfinished frame");
  if (k->m->kind == CLIENT_STREAM) {
    if (k->code) {
      rpc_finish(k);
      return;
    }
    k->in = NULL;
    if (!c->body_paused) k->m->fn(k); // else when the pending input has gone
    return;
  }
  if (!k->code && !k->nmsgs) rpc_fail(k, INVALID_ARGUMENT, "the request message is missing");
  if (k->code) {
    rpc_finish(k);
    return;
  }
  c->streaming = true;
  k->m->fn(k);
  if (k->code) rpc_finish(k);
}

void rpc_resume(call *k) {
  conn *c = k->c;
  c->body_paused = false;
  if (k->taking) return; // the loop that called us goes on by itself
  if (c->body_done) {
    stream_end(c);
    return;
  }
  take_frames(k);
  if (k->gone || k->ended) return;
  if (k->code)
    rpc_finish(k);
  else if (!c->body_paused)
    http_resume_body(c);
}

static void stream_drained(conn *c) {
  call *k = c->user;
  if (k && k->on_drained) k->on_drained(k);
}

static void call_gone(conn *c) {
  call *k = c->user;
  if (!k) return;
  c->user = NULL;
  timer_clear(&k->ag->loop, &k->keepalive);
  timer_clear(&k->ag->loop, &k->deadline);
  k->ended = k->gone = true;
  if (k->on_gone) k->on_gone(k);
  users_free(&k->db);
  buf_free(&k->frames);
  arena_free(&k->a);
  loop_free_later(&k->ag->loop, k);
}

// http_collect installs its own sink; calls need `gone` as well.
static size_t unary_data(conn *c, const uint8_t *p, size_t n) {
  call *k = c->user;
  if (buf_len(&c->collect) + n > MESSAGE_MAX) {
    rpc_fail(k, RESOURCE_EXHAUSTED, "message is larger than %d bytes", MESSAGE_MAX);
    rpc_finish(k);
    return n;
  }
  buf_put(&c->collect, p, n);
  return n;
}

static void unary_end(conn *c) {
  on_unary_body(c, buf_data(&c->collect), buf_len(&c->collect));
}

static const sink unary_sink = {.data = unary_data, .end = unary_end, .gone = call_gone};
static const sink stream_sink = {.data = stream_data, .end = stream_end, .drained = stream_drained, .gone = call_gone};

const rpc *connect_find(const char *path) {
  for (const rpc *m = rpc_process; m->path; m++)
    if (!strcmp(m->path, path)) return m;
  for (const rpc *m = rpc_filesystem; m->path; m++)
    if (!strcmp(m->path, path)) return m;
  return NULL;
}

// Name from "Authorization: Basic …"; NULL when there is none. *bad when it cannot be decoded.
static char *basic_user(arena *a, const conn *c, bool *bad) {
  const char *h = http_header(c, "authorization");
  if (!h || strncasecmp(h, "basic ", 6)) return NULL;
  h += 6;
  while (*h == ' ') h++;
  size_t n = strlen(h);
  char *s = arena_alloc(a, n + 4);
  ssize_t len = s ? base64_decode((uint8_t *)s, h, n) : -1;
  if (len < 0 || memchr(s, 0, (size_t)len)) {
    *bad = true;
    return NULL;
  }
  s[len] = 0;
  // "1000:1000" is a user and a group by number, not a name and a password.
  size_t un = strcspn(s, ":"), gn = s[un] ? strcspn(s + un + 1, ":") : 0;
  uint64_t id;
  bool pair = gn && !parse_u64(s, un, UINT32_MAX, &id) && !parse_u64(s + un + 1, gn, UINT32_MAX, &id);
  s[pair ? un + 1 + gn : un] = 0;
  return s;
}

void connect_handle(conn *c, const rpc *m) {
  if (strcmp(c->r.method, "POST")) {
    http_reply(c, 405, NULL, NULL, 0, "Allow: POST\r\n");
    return;
  }
  bool stream = m->kind != UNARY;
  bool json = http_type_is(c, stream ? "application/connect+json" : "application/json");
  if (!json && !http_type_is(c, stream ? "application/connect+proto" : "application/proto")) {
    http_reply(c, 415, NULL, NULL, 0,
               stream ? "Accept-Post: application/connect+json, application/connect+proto\r\n"
                      : "Accept-Post: application/json, application/proto\r\n");
    return;
  }
  call *k = calloc(1, sizeof *k);
  if (!k) {
    http_error(c, 503, "out of memory");
    return;
  }
  k->ag = agent_of(c);
  k->c = c;
  k->m = m;
  k->json = json;
  k->a.limit = CALL_MEMORY;
  k->keepalive_ms = 90 * 1000;
  k->keepalive = (timer){.cb = on_keepalive_timer, .owner = k};
  k->deadline = (timer){.cb = on_deadline_timer, .owner = k};
  c->user = k;
  c->sink = stream ? &stream_sink : &unary_sink;
  const char *h = http_header(c, "connect-timeout-ms");
  uint64_t v;
  if (h) {
    if (strlen(h) > 10 || parse_u64(h, strlen(h), 9999999999, &v))
      rpc_fail(k, INVALID_ARGUMENT, "Connect-Timeout-Ms: '%.40s' is not a number of at most 10 digits", h);
    else
      k->timeout_ms = (int64_t)v;
  }
  h = http_header(c, "connect-protocol-version");
  if (h && strcmp(h, "1")) rpc_fail(k, INVALID_ARGUMENT, "Connect-Protocol-Version must be 1, not '%.40s'", h);
  h = http_header(c, "keepalive-ping-interval");
  if (h && !parse_u64(h, strlen(h), 86400, &v) && v) k->keepalive_ms = (int64_t)v * 1000;
  h = http_header(c, "user-agent");
  if (h && !strcmp(h, "connect-python")) { // the first Python client; it breaks on fields that it does not know
    k->legacy = true;
    c->common = c->common ? "X-E2B-Legacy-SDK: true\r\n" CORS_HEADERS : "X-E2B-Legacy-SDK: true\r\n";
  }
  h = stream ? http_header(c, "connect-content-encoding") : NULL;
  if (h && *h && strcasecmp(h, "identity"))
    rpc_fail(k, UNIMPLEMENTED, "unknown compression '%.40s': streams are not compressed", h);
  bool bad = false;
  char *name = basic_user(&k->a, c, &bad);
  users_load(&k->db, k->ag->root);
  if (bad)
    rpc_fail(k, UNAUTHENTICATED, "malformed Authorization header");
  else if (agent_account(k->ag, &k->a, &k->db, name, &k->user))
    rpc_fail(k, UNAUTHENTICATED, "invalid username: '%s'", name ? name : k->ag->default_user);
  if (k->code && !stream) rpc_finish(k);
  if (!k->code && k->timeout_ms && m->kind != CLIENT_STREAM) timer_set(&k->ag->loop, &k->deadline, k->timeout_ms);
}
