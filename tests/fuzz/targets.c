// Targets for fuzzing the agent's decoders. All pure: bytes in, checks of what came out. Each target is
// `int NAME(const uint8_t *, size_t)`, as libFuzzer wants it, and aborts when a property does not hold.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../c/envd/agent.h"
#include "../../c/envd/flate.h"
#include "../../c/envd/multipart.h"
#include "targets.h"

#define CHECK(what)                                                   \
  do {                                                                \
    if (!(what)) {                                                    \
      fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #what);      \
      abort();                                                        \
    }                                                                 \
  } while (0)

// ---- HTTP --------------------------------------------------------------------------------------

static int fuzz_http(const uint8_t *p, size_t n) {
  char *text = malloc(n + 1); // its own block: a read beyond the end is seen
  CHECK(text);
  memcpy(text, p, n);
  static req r;
  ssize_t used = http_parse_head(text, n, &r);
  CHECK(used <= (ssize_t)n && used > -600);
  if (used > 0) {
    CHECK(r.method && r.path && r.query && r.nh <= HTTP_HEADERS_MAX);
    CHECK(!(r.chunked && r.has_length));
    size_t all = strlen(r.method) + strlen(r.path) + strlen(r.query);
    for (unsigned i = 0; i < r.nh; i++) all += strlen(r.h[i].name) + strlen(r.h[i].value);
    CHECK(all <= n);
    // What was left over is the beginning of the next thing, however much more comes.
    uint64_t size;
    const char *line = text + used;
    size_t left = n - (size_t)used;
    const char *eol = memchr(line, '\r', left);
    if (eol && !http_chunk_size(line, (size_t)(eol - line), &size)) CHECK(size <= INT64_MAX);
  }
  free(text);
  return 0;
}

// ---- messages ----------------------------------------------------------------------------------

static const rpc *pick(uint8_t b) {
  unsigned n = 0, k = 0;
  while (rpc_process[n].path) n++;
  while (rpc_filesystem[k].path) k++;
  b = (uint8_t)(b % (n + k));
  return b < n ? &rpc_process[b] : &rpc_filesystem[b - n];
}

// What was understood can be written and is understood again, to the same text.
static void round_trip(const msg *m) {
  arena a = {.limit = 16 << 20};
  buf json = {0}, again = {0}, pb = {0}, pb2 = {0};
  const char *err = NULL;
  msg_to_json(&json, m);
  msg_to_pb(&pb, m);
  CHECK(!json.oom && !pb.oom);
  msg *from_json = msg_from_json(&a, m->d, (char *)buf_data(&json), buf_len(&json), &err);
  msg *from_pb = msg_from_pb(&a, m->d, buf_data(&pb), buf_len(&pb), &err);
  if (!a.oom) {
    CHECK(from_pb);
    msg_to_pb(&pb2, from_pb);
    CHECK(buf_len(&pb) == buf_len(&pb2) && (!buf_len(&pb) || !memcmp(pb.p, pb2.p, buf_len(&pb))));
    // JSON cannot say everything that the wire can (a time out of range): when it is understood it is the same.
    if (from_json) {
      msg_to_json(&again, from_json);
      CHECK(buf_len(&json) == buf_len(&again) && !memcmp(json.p, again.p, buf_len(&json)));
    }
  }
  buf_free(&json);
  buf_free(&again);
  buf_free(&pb);
  buf_free(&pb2);
  arena_free(&a);
}

static int fuzz_json(const uint8_t *p, size_t n) {
  if (!n) return 0;
  arena a = {.limit = 4 << 20};
  const char *err = NULL;
  const rpc *r = pick(p[0]);
  msg *m = msg_from_json(&a, r->in, (const char *)p + 1, n - 1, &err);
  CHECK(m || err);
  if (m) round_trip(m);
  arena_free(&a);
  return 0;
}

static int fuzz_protobuf(const uint8_t *p, size_t n) {
  if (!n) return 0;
  arena a = {.limit = 4 << 20};
  const char *err = NULL;
  const rpc *r = pick(p[0]);
  msg *m = msg_from_pb(&a, p[0] & 0x80 ? r->out : r->in, p + 1, n - 1, &err);
  CHECK(m || err);
  if (m) round_trip(m);
  arena_free(&a);
  return 0;
}

// Frames of a stream, each with a message in JSON.
static int fuzz_envelope(const uint8_t *p, size_t n) {
  if (!n) return 0;
  const rpc *r = pick(p[0]);
  p++, n--;
  while (n) {
    enum code code;
    const char *why = NULL, *err = NULL;
    ssize_t used = frame_parse(p, n, &code, &why);
    if (used < 0) CHECK(why && code != OK);
    if (used <= 0) break;
    CHECK(used >= 5 && (size_t)used <= n);
    arena a = {.limit = 4 << 20};
    msg_from_json(&a, r->in, (const char *)p + 5, (size_t)used - 5, &err);
    arena_free(&a);
    p += used;
    n -= (size_t)used;
  }
  return 0;
}

// ---- multipart ---------------------------------------------------------------------------------

typedef struct {
  uint64_t digest; // of the events, whatever pieces the bytes came in
  size_t open;
} events;

static void mix(events *e, const void *p, size_t n) {
  for (size_t i = 0; i < n; i++) e->digest = (e->digest ^ ((const uint8_t *)p)[i]) * 1099511628211u;
}

static int on_begin(void *arg, const char *name, const char *filename) {
  events *e = arg;
  CHECK(!e->open);
  e->open = 1;
  mix(e, "<", 1);
  mix(e, name, strlen(name));
  mix(e, filename ? filename : "-", filename ? strlen(filename) : 1);
  return 0;
}

static int on_data(void *arg, const uint8_t *p, size_t n) {
  events *e = arg;
  CHECK(e->open && n);
  mix(e, p, n);
  return 0;
}

static int on_end(void *arg) {
  events *e = arg;
  CHECK(e->open);
  e->open = 0;
  mix(e, ">", 1);
  return 0;
}

static int feed_parts(const uint8_t *p, size_t n, size_t step, events *e, bool *complete) {
  multipart m = {.arg = e, .begin = on_begin, .data = on_data, .end = on_end};
  e->digest = 14695981039346656037u;
  CHECK(!multipart_init(&m, "multipart/form-data; boundary=b"));
  int rc = 0;
  for (size_t i = 0; i < n && !rc; i += step) rc = multipart_feed(&m, p + i, n - i < step ? n - i : step);
  *complete = !rc && multipart_complete(&m);
  multipart_free(&m);
  return rc;
}

static int fuzz_multipart(const uint8_t *p, size_t n) {
  if (!n) return 0;
  char type[256];
  size_t k = n < sizeof type - 1 ? n : sizeof type - 1;
  memcpy(type, p, k);
  type[k] = 0;
  multipart any = {0};
  multipart_init(&any, type);
  multipart_free(&any);
  events whole = {0}, pieces = {0};
  bool c1, c2;
  int r1 = feed_parts(p + 1, n - 1, SIZE_MAX / 2, &whole, &c1);
  int r2 = feed_parts(p + 1, n - 1, (size_t)(p[0] & 31) + 1, &pieces, &c2);
  CHECK(!r1 == !r2 && c1 == c2);
  if (c1) CHECK(whole.digest == pieces.digest);
  return 0;
}

// ---- whole exchanges ---------------------------------------------------------------------------

// The server itself on one end of a socket pair, the bytes in pieces from the other: requests one after the other,
// bodies of every kind, handlers that stream, pause, refuse. In the end the connection is gone, whatever came.
enum { ROUNDS_MAX = 5000 };

typedef struct {
  conn *paused;
  multipart mp;
  bool in_form;
} exchange;
static exchange ex;
static unsigned answered, handled;

static size_t ex_echo(conn *c, const uint8_t *p, size_t n) {
  http_write(c, p, n);
  return n;
}

static void ex_echo_end(conn *c) {
  answered++;
  http_end(c);
}

static size_t ex_slowly(conn *c, const uint8_t *p, size_t n) {
  (void)p;
  CHECK(n && !ex.paused);
  ex.paused = c;
  http_pause_body(c);
  return n < 3 ? n : 3;
}

static void ex_reply_end(conn *c) {
  answered++;
  http_reply(c, 200, "text/plain", "done", 4, NULL);
}

static void ex_slow_gone(conn *c) {
  if (ex.paused == c) ex.paused = NULL;
}

static size_t ex_form(conn *c, const uint8_t *p, size_t n) {
  if (multipart_feed(&ex.mp, p, n)) http_error(c, 400, "malformed");
  return n;
}

static void ex_form_gone(conn *c) {
  (void)c;
  CHECK(ex.in_form);
  ex.in_form = false;
  multipart_free(&ex.mp);
}

static void ex_collected(conn *c, const uint8_t *p, size_t n) {
  answered++;
  http_reply(c, 200, "text/plain", p, n, NULL);
}

static events ex_events;
static const sink ex_echo_sink = {.data = ex_echo, .end = ex_echo_end};
static const sink ex_slow_sink = {.data = ex_slowly, .end = ex_reply_end, .gone = ex_slow_gone};
static const sink ex_form_sink = {.data = ex_form, .end = ex_reply_end, .gone = ex_form_gone};

static void ex_handle(conn *c) {
  handled++;
  CHECK(!ex.paused && !ex.in_form);
  switch (c->r.path[0] ? c->r.path[1] : 0) {
  case 'c': http_collect(c, 200, ex_collected); return;
  case 's':
    c->sink = &ex_echo_sink;
    http_begin(c, 200, "text/plain", NULL, -1);
    return;
  case 'p': c->sink = &ex_slow_sink; return;
  case 'f': {
    const char *type = http_header(c, "content-type");
    ex_events = (events){0};
    ex.mp = (multipart){.arg = &ex_events, .begin = on_begin, .data = on_data, .end = on_end};
    if (!type || multipart_init(&ex.mp, type)) {
      multipart_free(&ex.mp);
      break;
    }
    ex.in_form = true;
    c->sink = &ex_form_sink;
    return;
  }
  case 'g': http_reply(c, 204, NULL, NULL, 0, NULL); return;
  default: break;
  }
  http_error(c, 404, "no such path");
}

static void ex_turn(http_server *s, int client) {
  CHECK(loop_turn(s->l, 0) >= 0);
  if (ex.paused) {
    conn *c = ex.paused;
    ex.paused = NULL;
    http_resume_body(c);
  }
  for (conn *c = s->conns; c; c = c->next) CHECK(buf_len(&c->in) <= HTTP_IN_MAX + 64 * 1024);
  char out[4096];
  while (recv(client, out, sizeof out, MSG_DONTWAIT) > 0) {
  }
}

static int fuzz_exchange(const uint8_t *p, size_t n) {
  static loop l;
  static http_server s;
  if (!s.l) {
    CHECK(!loop_init(&l));
    s = (http_server){.l = &l, .handle = ex_handle, .max_conns = 4};
  }
  if (!n) return 0;
  int pair[2];
  CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair));
  http_adopt(&s, pair[0]);
  CHECK(s.nconns == 1);
  answered = handled = 0;
  size_t piece = p[0] < 128 ? (size_t)p[0] + 1 : n;
  for (size_t i = 1; i < n; i += piece) {
    size_t k = n - i < piece ? n - i : piece;
    if (send(pair[1], p + i, k, MSG_NOSIGNAL) < 0) break; // closed on us
    ex_turn(&s, pair[1]);
  }
  shutdown(pair[1], SHUT_WR);
  unsigned rounds = 0;
  while (s.nconns && rounds++ < ROUNDS_MAX) ex_turn(&s, pair[1]);
  CHECK(!s.nconns && answered <= handled && !ex.paused && !ex.in_form && !l.ntimers);
  close(pair[1]);
  return 0;
}

// ---- DEFLATE -----------------------------------------------------------------------------------

enum { PLAIN_MAX = 1 << 16 };

static int keep(void *arg, const uint8_t *p, size_t n) {
  buf *b = arg;
  if (buf_len(b) + n > PLAIN_MAX) return -EFBIG;
  buf_put(b, p, n);
  return 0;
}

static int fuzz_gzip(const uint8_t *p, size_t n) {
  if (!n) return 0;
  buf plain = {0}, pieces = {0}, packed = {0}, back = {0};
  // Hostile input, at once and in pieces.
  int rc = gunzip_all(p + 1, n - 1, PLAIN_MAX, &plain), rc2 = 0;
  inflater *z = inflate_new();
  CHECK(z);
  for (size_t i = 1, step = (size_t)(p[0] & 31) + 1; i < n && !rc2; i += step)
    rc2 = inflate_feed(z, p + i, n - i < step ? n - i : step, keep, &pieces);
  if (!rc) CHECK(!rc2 && buf_len(&plain) == buf_len(&pieces) && (!buf_len(&plain) || !memcmp(plain.p, pieces.p, buf_len(&plain))));
  inflate_free(z);
  // What we pack ourselves unpacks to the same.
  deflater d;
  gzip_begin(&d, &packed);
  gzip_chunk(&d, p, n, &packed);
  gzip_end(&d, &packed);
  CHECK(!gunzip_all(packed.p, buf_len(&packed), n, &back) && buf_len(&back) == n && !memcmp(back.p, p, n));
  buf_free(&plain);
  buf_free(&pieces);
  buf_free(&packed);
  buf_free(&back);
  return 0;
}

// ---- small ones --------------------------------------------------------------------------------

static int fuzz_text(const uint8_t *p, size_t n) {
  char *s = malloc(n + 1), *out = malloc(n + 8);
  CHECK(s && out);
  memcpy(s, p, n);
  s[n] = 0;
  ssize_t len = base64_decode((uint8_t *)out, s, n);
  CHECK(len <= (ssize_t)(n * 3 / 4 + 3));
  if (len >= 0) {
    buf b = {0};
    base64_put(&b, (uint8_t *)out, (size_t)len, true);
    uint8_t *again = malloc(n + 8);
    CHECK(again && base64_decode(again, (char *)b.p, buf_len(&b)) == len && (!len || !memcmp(again, out, (size_t)len)));
    free(again);
    buf_free(&b);
  }
  int64_t sec;
  int32_t nsec;
  if (!rfc3339_parse(s, n, &sec, &nsec)) {
    buf b = {0};
    int64_t sec2;
    int32_t nsec2;
    rfc3339_put(&b, sec, nsec);
    CHECK(!rfc3339_parse((char *)buf_data(&b), buf_len(&b), &sec2, &nsec2) && sec == sec2 && nsec == nsec2);
    buf_free(&b);
  }
  http_date_parse(s, &sec);
  char param[64];
  header_param(s, "name", param, sizeof param);
  arena a = {.limit = 1 << 20};
  char *clean = path_clean(&a, s);
  if (clean) {
    CHECK(*clean && !strstr(clean, "//"));
    char *twice = path_clean(&a, clean);
    CHECK(twice && !strcmp(twice, clean));
    if (s[0] == '/') CHECK(clean[0] == '/' && !strstr(clean, "/../") && strcmp(clean, "/.."));
  }
  userdb db = {.passwd = s, .group = s};
  account u;
  gid_t *groups;
  if (!users_find(&db, &a, "", "user", &u)) CHECK(u.name && u.home && users_groups(&db, &a, &u, &groups) > 0);
  arena_free(&a);
  len = url_decode(s, n, p && n && p[0] & 1);
  CHECK(len <= (ssize_t)n);
  free(s);
  free(out);
  return 0;
}

const fuzz_target fuzz_targets[] = {
    {"http", fuzz_http, 25},          {"json", fuzz_json, 20}, {"protobuf", fuzz_protobuf, 20}, {"envelope", fuzz_envelope, 20},
    {"multipart", fuzz_multipart, 3}, {"gzip", fuzz_gzip, 1},  {"text", fuzz_text, 10},         {"exchange", fuzz_exchange, 1},
    {NULL, NULL, 0},
};
