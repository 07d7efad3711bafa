// /files: download, upload (multipart, raw, gzip), compose; signatures.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"
#include "flate.h"
#include "multipart.h"
#include "stage.h"

enum {
  GZIP_MAX = 4 << 20, // larger files go out as they are: compressing costs the guest more than it saves
  SIZELESS_MAX = 16 << 20, // content of files whose size says nothing
  COMPOSE_MAX = 1 << 20,
  META_MAX = 64,
};

// ---- authorisation -----------------------------------------------------------------------------

// NULL when allowed, else the message of the 401.
static const char *denied(const agent *ag, arena *a, const conn *c, bool write) {
  if (!ag->token) return NULL;
  const char *t = http_header(c, "x-access-token");
  if (t) return ct_equal(t, strlen(t), ag->token, strlen(ag->token)) ? NULL : "access token validation failed";
  bool bad = false;
  const char *sig = http_query(a, c, "signature", &bad);
  const char *exp = http_query(a, c, "signature_expiration", &bad);
  const char *path = http_query(a, c, "path", &bad), *user = http_query(a, c, "username", &bad);
  if (!sig || !*sig) return bad ? "malformed query" : "missing signature query parameter";
  uint64_t when = 0;
  if (exp && parse_u64(exp, strlen(exp), INT64_MAX, &when)) return "invalid signature expiration";
  char *text = arena_printf(a, "%s:%s:%s:%s%s%s", path ? path : "", write ? "write" : "read", user ? user : "",
                            ag->token, exp ? ":" : "", exp ? exp : "");
  if (!text) return "request too large";
  uint8_t digest[32];
  sha256(text, strlen(text), digest);
  buf b = {0};
  buf_puts(&b, "v1_");
  base64_put(&b, digest, sizeof digest, false);
  bool ok = !b.oom && ct_equal(sig, strlen(sig), (char *)b.p, buf_len(&b));
  buf_free(&b);
  if (!ok) return "invalid signature";
  if (exp && (int64_t)when < (int64_t)time(NULL)) return "signature is already expired";
  return NULL;
}

// Common start of a request: authorisation and user. False when answered.
static bool admit(conn *c, arena *a, bool write, userdb *db, account *u) {
  agent *ag = agent_of(c);
  const char *why = denied(ag, a, c, write);
  if (why) {
    http_error(c, 401, why);
    return false;
  }
  bool bad = false;
  char *name = http_query(a, c, "username", &bad);
  if (bad) {
    http_error(c, 400, "malformed percent-encoding in the query");
    return false;
  }
  users_load(db, ag->root);
  if (!agent_account(ag, a, db, name, u)) return true;
  char *t = arena_printf(a, "invalid username: '%s'", name ? name : ag->default_user);
  http_error(c, 401, t ? t : "invalid username");
  return false;
}

static void fail_path(conn *c, arena *a, int status, const char *what, const char *path, int rc) {
  char *t = rc ? arena_printf(a, "%s '%s': %s", what, path, strerror(-rc)) : arena_printf(a, "%s '%s'", what, path);
  http_error(c, status, t ? t : what);
}

static int status_of(int rc) {
  switch (-rc) {
  case ENOSPC:
  case EDQUOT: return 507;
  case EISDIR:
  case ENOTDIR:
  case ENAMETOOLONG:
  case ELOOP:
  case EINVAL: return 400;
  case ENOENT: return 404;
  default: return 500;
  }
}

// ---- download ----------------------------------------------------------------------------------

// Weight of a coding in Accept-Encoding: -1 not named, 0 refused, 1 wanted.
static int accepts(const char *h, const char *coding) {
  int star = -1;
  size_t cl = strlen(coding);
  while (h && *h) {
    while (*h == ' ' || *h == ',' || *h == '\t') h++;
    size_t n = strcspn(h, ",;  \t");
    size_t all = strcspn(h, ",");
    const char *q = memmem(h, all, "q=", 2);
    int w = q && strtod(q + 2, NULL) <= 0 ? 0 : 1;
    if (n == cl && !strncasecmp(h, coding, n)) return w;
    if (n == 1 && *h == '*') star = w;
    h += all;
  }
  return star;
}

static const char *content_type(const char *name, const uint8_t *head, size_t n) {
  static const char *const types[][2] = {{"html", "text/html; charset=utf-8"},
                                         {"htm", "text/html; charset=utf-8"},
                                         {"css", "text/css; charset=utf-8"},
                                         {"js", "text/javascript; charset=utf-8"},
                                         {"mjs", "text/javascript; charset=utf-8"},
                                         {"json", "application/json"},
                                         {"xml", "text/xml; charset=utf-8"},
                                         {"txt", "text/plain; charset=utf-8"},
                                         {"csv", "text/csv; charset=utf-8"},
                                         {"md", "text/markdown; charset=utf-8"},
                                         {"png", "image/png"},
                                         {"jpg", "image/jpeg"},
                                         {"jpeg", "image/jpeg"},
                                         {"gif", "image/gif"},
                                         {"webp", "image/webp"},
                                         {"avif", "image/avif"},
                                         {"svg", "image/svg+xml"},
                                         {"pdf", "application/pdf"},
                                         {"wasm", "application/wasm"},
                                         {"zip", "application/zip"},
                                         {"gz", "application/gzip"},
                                         {"tar", "application/x-tar"},
                                         {"mp3", "audio/mpeg"},
                                         {"mp4", "video/mp4"},
                                         {"webm", "video/webm"}};
  const char *dot = strrchr(name, '.');
  for (size_t i = 0; dot && i < sizeof types / sizeof types[0]; i++)
    if (!strcasecmp(dot + 1, types[i][0])) return types[i][1];
  static const struct {
    const char *magic;
    size_t n;
    const char *type;
  } sniff[] = {{"\x89PNG\r\n\x1a\n", 8, "image/png"}, {"\xff\xd8\xff", 3, "image/jpeg"}, {"GIF8", 4, "image/gif"},
               {"%PDF-", 5, "application/pdf"},       {"PK\3\4", 4, "application/zip"},  {"\x1f\x8b\x08", 3, "application/x-gzip"}};
  for (size_t i = 0; i < sizeof sniff / sizeof sniff[0]; i++)
    if (n >= sniff[i].n && !memcmp(head, sniff[i].magic, sniff[i].n)) return sniff[i].type;
  for (size_t i = 0; i < n; i++) // binary data byte, as browsers decide (WHATWG MIME sniffing)
    if (head[i] <= 8 || head[i] == 0x0b || (head[i] >= 0x0e && head[i] <= 0x1a) || (head[i] >= 0x1c && head[i] < 0x20))
      return "application/octet-stream";
  return "text/plain; charset=utf-8";
}

static void put_disposition(buf *b, const char *path) {
  size_t n;
  const char *name = path_base(path, &n);
  bool token = n > 0, ascii = true;
  for (size_t i = 0; i < n; i++) {
    uint8_t ch = (uint8_t)name[i];
    if (ch < 0x20 || ch >= 0x7f) ascii = false;
    if (ch <= 0x20 || ch >= 0x7f || strchr("()<>@,;:\\\"/[]?={}", ch)) token = false;
  }
  if (token) {
    buf_printf(b, "Content-Disposition: inline; filename=%.*s\r\n", (int)n, name);
    return;
  }
  if (!ascii) {
    buf_puts(b, "Content-Disposition: inline; filename*=utf-8''");
    for (size_t i = 0; i < n; i++) {
      uint8_t ch = (uint8_t)name[i];
      bool plain = (ch >= '0' && ch <= '9') || (ch >= 'a' && ch <= 'z') || (ch >= 'A' && ch <= 'Z') || (ch && strchr("-._~", ch));
      if (plain)
        buf_putc(b, (char)ch);
      else
        buf_printf(b, "%%%02X", ch);
    }
    buf_puts(b, "\r\n");
    return;
  }
  buf_puts(b, "Content-Disposition: inline; filename=\"");
  for (size_t i = 0; i < n; i++) {
    if (name[i] == '"' || name[i] == '\\') buf_putc(b, '\\');
    buf_putc(b, name[i]);
  }
  buf_puts(b, "\"\r\n");
}

// One range of "bytes=…". 1 = serve it, 0 = ignore the header (several ranges, other unit), -1 = 416.
static int parse_range(const char *h, uint64_t size, uint64_t *off, uint64_t *len) {
  if (strncasecmp(h, "bytes=", 6) || strchr(h, ',')) return 0;
  h += 6;
  while (*h == ' ') h++;
  const char *dash = strchr(h, '-');
  if (!dash) return -1;
  uint64_t a = 0, b = 0;
  size_t an = (size_t)(dash - h), bn = strlen(dash + 1);
  if (!an) {
    if (parse_u64(dash + 1, bn, INT64_MAX, &b) || !b || !size) return -1;
    *len = b < size ? b : size;
    *off = size - *len;
    return 1;
  }
  if (parse_u64(h, an, INT64_MAX, &a) || a >= size) return -1;
  if (bn && (parse_u64(dash + 1, bn, INT64_MAX, &b) || b < a)) return -1;
  if (!bn || b >= size) b = size - 1;
  *off = a;
  *len = b - a + 1;
  return 1;
}

typedef struct {
  int fd;
  deflater z;
} zipping;

static void zip_drained(conn *c) {
  zipping *d = c->user;
  static const size_t CHUNK = 32 * 1024;
  while (!c->closed && c->user == d && http_may_write(c)) {
    uint8_t chunk[32 * 1024];
    ssize_t n = read(d->fd, chunk, CHUNK);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      http_abort(c);
      return;
    }
    buf b = {0};
    if (n)
      gzip_chunk(&d->z, chunk, (size_t)n, &b);
    else
      gzip_end(&d->z, &b);
    if (b.oom)
      http_abort(c);
    else
      http_write(c, b.p, buf_len(&b));
    buf_free(&b);
    if (!n) {
      http_end(c);
      return;
    }
  }
}

static void zip_gone(conn *c) {
  zipping *d = c->user;
  if (d) close(d->fd);
  free(d);
}

static const sink zip_sink = {.drained = zip_drained, .gone = zip_gone};

static void download(conn *c, arena *a, const char *path) {
  struct stat st;
  if (stat(path, &st)) {
    fail_path(c, a, status_of(-errno), "cannot read", path, -errno);
    return;
  }
  if (!S_ISREG(st.st_mode)) {
    fail_path(c, a, 400, S_ISDIR(st.st_mode) ? "path is a directory:" : "path is not a regular file:", path, 0);
    return;
  }
  const char *ae = http_header(c, "accept-encoding"), *range = http_header(c, "range");
  bool gzip = accepts(ae, "gzip") == 1, identity = accepts(ae, "identity") != 0;
  if (!identity && !gzip) {
    http_error(c, 406, "no acceptable encoding: the file can be sent as identity or gzip");
    return;
  }
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  uint8_t head[512];
  ssize_t n = -1;
  if (fd < 0 || fstat(fd, &st) || (n = pread(fd, head, sizeof head, 0)) < 0) {
    int rc = -errno;
    if (fd >= 0) close(fd);
    fail_path(c, a, status_of(rc), "cannot read", path, rc);
    return;
  }
  uint64_t size = (uint64_t)st.st_size, off = 0, len = size;
  char date[32];
  http_date(date, st.st_mtim.tv_sec);
  const char *type = content_type(path, head, (size_t)n);
  buf h = {0};
  put_disposition(&h, path);
  buf_printf(&h, "Last-Modified: %s\r\nVary: Accept-Encoding\r\nAccept-Ranges: bytes\r\n", date);
  int64_t since;
  const char *ims = http_header(c, "if-modified-since"), *ifr = http_header(c, "if-range");
  int status = 200;
  if (ims && !http_header(c, "if-none-match") && !http_date_parse(ims, &since) && st.st_mtim.tv_sec <= since) {
    status = 304;
  } else if (range && (!ifr || !strcmp(ifr, date))) {
    int r = parse_range(range, size, &off, &len);
    if (r < 0) {
      status = 416;
      buf_printf(&h, "Content-Range: bytes */%llu\r\n", (unsigned long long)size);
    } else if (r > 0) {
      status = 206;
      buf_printf(&h, "Content-Range: bytes %llu-%llu/%llu\r\n", (unsigned long long)off,
                 (unsigned long long)(off + len - 1), (unsigned long long)size);
    }
  }
  if (!size && n > 0 && status == 200) { // procfs and the like have content but no size
    char *whole;
    buf_putc(&h, 0);
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t len0 = h.oom ? -ENOMEM : read_whole(link, &whole, SIZELESS_MAX);
    if (len0 == -EAGAIN) { // a stream (/proc/kmsg) that has nothing more to tell now
      whole = calloc(1, 1);
      len0 = whole ? 0 : -ENOMEM;
    }
    if (len0 < 0)
      fail_path(c, a, status_of((int)len0), "cannot read", path, (int)len0);
    else
      http_reply(c, 200, type, whole, (size_t)len0, (char *)h.p);
    if (len0 >= 0) free(whole);
    close(fd);
    buf_free(&h);
    return;
  }
  bool text = strncmp(type, "image/", 6) && strncmp(type, "video/", 6) && strncmp(type, "audio/", 6) &&
              strcmp(type, "application/zip") && strcmp(type, "application/gzip") && strcmp(type, "application/x-gzip") &&
              strcmp(type, "application/octet-stream");
  bool zip = gzip && size && !range && status == 200 && (!identity || (text && size <= GZIP_MAX));
  zipping *d = zip ? calloc(1, sizeof *d) : NULL;
  if (d) buf_puts(&h, "Content-Encoding: gzip\r\n");
  buf_putc(&h, 0);
  if (h.oom || (zip && !d)) {
    close(fd);
    http_error(c, 503, "out of memory");
  } else if (status == 416 || status == 304) {
    close(fd);
    http_reply(c, status, NULL, NULL, 0, (char *)h.p);
  } else if (d) {
    buf first = {0};
    d->fd = fd;
    c->user = d;
    c->sink = &zip_sink;
    http_begin(c, 200, type, (char *)h.p, -1);
    gzip_begin(&d->z, &first);
    http_write(c, first.p, buf_len(&first));
    buf_free(&first);
    if (c->head_only)
      http_end(c);
    else
      zip_drained(c);
  } else {
    http_begin(c, status, type, (char *)h.p, (int64_t)len);
    http_send_file(c, fd, (off_t)off, len);
  }
  buf_free(&h);
}

// ---- upload ------------------------------------------------------------------------------------

typedef struct {
  const char *key, *value; // key without the prefix, lower case
} meta;

typedef struct {
  conn *c;
  agent *ag;
  arena a;
  userdb db;
  account user;
  char *fixed; // `path` of the query
  bool is_multipart;
  multipart mp;
  inflater *z;
  stage s; // fd -1: the current part is ignored, or there is none
  char *path;
  char **done; // resolved paths of this request
  size_t ndone, capdone;
  uint32_t *slots; // of their hashes: number of a path + 1, 0: free. Twice capdone of them
  meta metas[META_MAX];
  unsigned nmeta;
  int status; // of the failure
  const char *error;
} upload;

static int fail(upload *u, int status, const char *what, const char *path, int rc) {
  u->status = status;
  if (path && rc)
    u->error = arena_printf(&u->a, "%s '%s': %s", what, path, strerror(-rc));
  else
    u->error = path ? arena_printf(&u->a, "%s '%s'", what, path) : what;
  if (!u->error) u->error = what;
  return -ECANCELED;
}

static int set_metadata(upload *u, int fd) {
  char names[8192];
  ssize_t n = flistxattr(fd, names, sizeof names);
  for (char *p = names; n > 0 && p < names + n; p += strlen(p) + 1)
    if (!strncmp(p, "user.e2b.", 9) && fremovexattr(fd, p) && errno != ENODATA) return -errno;
  for (unsigned i = 0; i < u->nmeta; i++) {
    char name[300];
    snprintf(name, sizeof name, "user.e2b.%s", u->metas[i].key);
    if (fsetxattr(fd, name, u->metas[i].value, strlen(u->metas[i].value), 0)) return -errno;
  }
  return 0;
}

// Where the path is among those done, or the free slot where it would be.
static uint32_t *slot_of(const upload *u, const char *path) {
  size_t mask = 2 * u->capdone - 1;
  uint32_t h = 2166136261u;
  for (const char *p = path; *p; p++) h = (h ^ (uint8_t)*p) * 16777619u;
  size_t i = (h ^ h >> 15) & mask;
  while (u->slots[i] && strcmp(u->done[u->slots[i] - 1], path)) i = (i + 1) & mask;
  return &u->slots[i];
}

static bool is_done(const upload *u, const char *path) {
  return u->capdone && *slot_of(u, path);
}

static void add_done(upload *u, char *path) {
  uint32_t *slot = slot_of(u, path);
  u->done[u->ndone++] = path;
  *slot = (uint32_t)u->ndone;
}

static int make_room(upload *u) {
  size_t cap = u->capdone ? u->capdone * 2 : 16, n = u->ndone;
  char **old = u->done, **d = arena_alloc(&u->a, cap * sizeof *d);
  uint32_t *slots = arena_alloc(&u->a, 2 * cap * sizeof *slots);
  if (!d || !slots) return -ENOMEM;
  u->done = d;
  u->slots = slots;
  u->capdone = cap;
  u->ndone = 0;
  for (size_t i = 0; i < n; i++) add_done(u, old[i]);
  return 0;
}

static int open_target(upload *u, const char *raw) {
  char *path;
  int rc = agent_path(u->ag, &u->a, &u->user, raw, &path);
  if (rc) return fail(u, rc == -EINVAL ? 400 : 503, "cannot resolve path", raw, 0);
  char *clean = path_clean(&u->a, path);
  if (!clean) return fail(u, 503, "out of memory", NULL, 0);
  if (is_done(u, clean)) return fail(u, 400, "you cannot upload twice to", path, 0);
  struct stat st;
  if (!stat(path, &st) && !S_ISREG(st.st_mode))
    return fail(u, 400, S_ISDIR(st.st_mode) ? "path is a directory:" : "path is not a regular file:", path, 0);
  if (raw[0] && raw[strlen(raw) - 1] == '/') return fail(u, 400, "path is a directory:", path, 0);
  char *parent = path_join(&u->a, clean, "..");
  bool created;
  rc = parent ? make_dirs(parent, &u->user, &created) : -ENOMEM;
  if (rc) return fail(u, status_of(rc), "cannot create the parents of", path, rc);
  if (u->ndone == u->capdone && make_room(u)) return fail(u, 503, "out of memory: too many files in one request", NULL, 0);
  rc = stage_open(&u->s, &u->a, path, &u->user);
  if (rc) return fail(u, status_of(rc), "cannot write", path, rc);
  u->path = path;
  add_done(u, clean);
  rc = set_metadata(u, u->s.fd);
  // Without a set to store, a file system that knows no xattrs is fine.
  if (rc && (u->nmeta || (rc != -EOPNOTSUPP && rc != -ENOTSUP)))
    return fail(u, status_of(rc), "cannot store metadata of", path, rc);
  return 0;
}

static int part_begin(void *arg, const char *name, const char *filename) {
  upload *u = arg;
  if (strcmp(name, "file")) return 0;
  const char *to = u->fixed ? u->fixed : filename ? filename : "";
  if (!*to) return fail(u, 400, "a file part needs a file name, or the request a path", NULL, 0);
  return open_target(u, arena_strndup(&u->a, to, strlen(to)) ?: "");
}

static int part_data(void *arg, const uint8_t *p, size_t n) {
  upload *u = arg;
  if (u->s.fd < 0) return 0;
  int rc = stage_write(&u->s, p, n);
  return rc ? fail(u, status_of(rc), "cannot write", u->path, rc) : 0;
}

static int part_end(void *arg) {
  upload *u = arg;
  if (u->s.fd < 0) return 0;
  int rc = stage_commit(&u->s, watchers_expect, u->ag);
  return rc ? fail(u, status_of(rc), "cannot write", u->path, rc) : 0;
}

static int plain_bytes(void *arg, const uint8_t *p, size_t n) {
  upload *u = arg;
  if (!u->is_multipart) return part_data(u, p, n);
  int rc = multipart_feed(&u->mp, p, n);
  if (rc && rc != -ECANCELED) return fail(u, rc == -ENOMEM ? 503 : 400, "malformed multipart body", NULL, 0);
  return rc;
}

static void upload_fail(upload *u) {
  http_error(u->c, u->status, u->error);
}

static size_t upload_data(conn *c, const uint8_t *p, size_t n) {
  upload *u = c->user;
  int rc = u->z ? inflate_feed(u->z, p, n, plain_bytes, u) : plain_bytes(u, p, n);
  if (rc && rc != -ECANCELED) rc = fail(u, rc == -ENOMEM ? 503 : 400, "malformed gzip body", NULL, 0);
  if (rc) upload_fail(u);
  return n;
}

static void upload_end(conn *c) {
  upload *u = c->user;
  int rc = 0;
  if (u->z && !inflate_finished(u->z))
    rc = fail(u, 400, "unfinished gzip body", NULL, 0);
  else if (u->is_multipart && !multipart_complete(&u->mp))
    rc = fail(u, 400, "unfinished multipart body", NULL, 0);
  else if (!u->is_multipart)
    rc = part_end(u);
  if (rc) {
    upload_fail(u);
    return;
  }
  buf b = {0};
  buf_putc(&b, '[');
  for (size_t i = 0; i < u->ndone; i++) {
    size_t n;
    const char *base = path_base(u->done[i], &n);
    if (i) buf_putc(&b, ',');
    buf_puts(&b, "{\"name\":");
    json_put_str(&b, base, n);
    buf_puts(&b, ",\"type\":\"file\",\"path\":");
    json_put_str(&b, u->done[i], strlen(u->done[i]));
    for (unsigned k = 0; k < u->nmeta; k++) {
      buf_puts(&b, k ? "," : ",\"metadata\":{");
      json_put_str(&b, u->metas[k].key, strlen(u->metas[k].key));
      buf_putc(&b, ':');
      json_put_str(&b, u->metas[k].value, strlen(u->metas[k].value));
    }
    if (u->nmeta) buf_putc(&b, '}');
    buf_putc(&b, '}');
  }
  buf_puts(&b, "]\n");
  if (b.oom)
    http_error(c, 503, "out of memory");
  else
    http_reply(c, 200, "application/json", b.p, buf_len(&b), NULL);
  buf_free(&b);
}

static void upload_gone(conn *c) {
  upload *u = c->user;
  if (!u) return;
  stage_drop(&u->s);
  multipart_free(&u->mp);
  inflate_free(u->z);
  users_free(&u->db);
  arena_free(&u->a);
  free(u);
}

static const sink upload_sink = {.data = upload_data, .end = upload_end, .gone = upload_gone};

// X-Metadata-* headers; the first of a repeated one counts. False after an error in u.
static bool read_metadata(upload *u) {
  size_t total = 0;
  for (unsigned i = 0; i < u->c->r.nh; i++) {
    const header *h = &u->c->r.h[i];
    if (strncasecmp(h->name, "x-metadata-", 11)) continue;
    char *key = arena_strndup(&u->a, h->name + 11, strlen(h->name + 11));
    if (!key) return fail(u, 503, "out of memory", NULL, 0), false;
    for (char *p = key; *p; p++)
      if (*p >= 'A' && *p <= 'Z') *p = (char)(*p - 'A' + 'a');
    bool again = false;
    for (unsigned k = 0; k < u->nmeta; k++) again |= !strcmp(u->metas[k].key, key);
    if (again) continue;
    if (!*key || strlen(key) > 246) return fail(u, 400, "metadata key must have 1 to 246 bytes:", key, 0), false;
    for (const char *p = h->value; *p; p++)
      if (*p < 0x20 || *p > 0x7e) return fail(u, 400, "metadata value must be printable ASCII:", key, 0), false;
    total += 9 + strlen(key) + strlen(h->value);
    if (total > 4096 || u->nmeta == META_MAX) return fail(u, 400, "metadata is larger than 4096 bytes", NULL, 0), false;
    u->metas[u->nmeta++] = (meta){key, h->value};
  }
  return true;
}

static void start_upload(conn *c) {
  upload *u = calloc(1, sizeof *u);
  if (!u) {
    http_error(c, 503, "out of memory");
    return;
  }
  u->c = c;
  u->ag = agent_of(c);
  u->a.limit = 32 << 20;
  u->s.fd = -1;
  c->user = u;
  c->sink = &upload_sink;
  if (!admit(c, &u->a, true, &u->db, &u->user)) return;
  bool bad = false;
  u->fixed = http_query(&u->a, c, "path", &bad);
  if (u->fixed && !*u->fixed) u->fixed = NULL;
  int rc = bad ? fail(u, 400, "malformed percent-encoding in path", NULL, 0) : 0;
  if (!rc && !read_metadata(u)) rc = -ECANCELED;
  const char *enc = http_header(c, "content-encoding");
  if (!rc && enc && !strcasecmp(enc, "gzip")) {
    u->z = inflate_new();
    if (!u->z) rc = fail(u, 503, "out of memory", NULL, 0);
  } else if (!rc && enc && *enc && strcasecmp(enc, "identity")) {
    rc = fail(u, 400, "unsupported content encoding:", enc, 0);
  }
  if (!rc && http_type_is(c, "multipart/form-data")) {
    u->is_multipart = true;
    u->mp.arg = u;
    u->mp.begin = part_begin;
    u->mp.data = part_data;
    u->mp.end = part_end;
    if (multipart_init(&u->mp, http_header(c, "content-type"))) rc = fail(u, 400, "multipart boundary is missing", NULL, 0);
  } else if (!rc && http_type_is(c, "application/octet-stream")) {
    rc = u->fixed ? open_target(u, u->fixed) : fail(u, 400, "path is required for an octet-stream upload", NULL, 0);
  } else if (!rc) {
    rc = fail(u, 400, "content type must be multipart/form-data or application/octet-stream", NULL, 0);
  }
  if (rc) upload_fail(u);
}

void files_handle(conn *c) {
  if (!strcmp(c->r.method, "POST")) {
    start_upload(c);
    return;
  }
  arena a = {.limit = 1 << 20};
  userdb db = {0};
  account u;
  if (admit(c, &a, false, &db, &u)) {
    bool bad = false;
    char *path = http_query(&a, c, "path", &bad), *full;
    int rc = bad ? -EINVAL : agent_path(agent_of(c), &a, &u, path ? path : "", &full);
    if (rc)
      http_error(c, 400, bad ? "malformed percent-encoding in path" : "cannot resolve path: only '~' of the own user is known");
    else
      download(c, &a, full);
  }
  users_free(&db);
  arena_free(&a);
}

// ---- compose -----------------------------------------------------------------------------------

typedef struct {
  conn *c;
  agent *ag;
  arena a;
  userdb db;
  account user;
  char **src, *dst;
  size_t n;
  job *j;
} compose;

// In a child: concatenates, then removes the sources. Answer: HTTP status in three digits, then the body.
static void compose_child(void *owner, buf *out) {
  compose *m = owner;
  int status = 200, rc = 0;
  char *what = NULL;
  char *parent = path_join(&m->a, m->dst, "..");
  bool created;
  struct stat st, ds;
  for (size_t i = 0; i < m->n && !what; i++) {
    rc = stat(m->src[i], &st) ? -errno : S_ISREG(st.st_mode) ? 0 : -EINVAL;
    if (rc) what = m->src[i];
  }
  if (!what && !stat(m->dst, &ds)) {
    rc = S_ISREG(ds.st_mode) ? 0 : -EISDIR;
    for (size_t i = 0; i < m->n && !rc; i++)
      if (!stat(m->src[i], &st) && st.st_dev == ds.st_dev && st.st_ino == ds.st_ino) rc = -EINVAL; // would eat itself
    if (rc) what = m->dst;
  }
  if (!what && (rc = parent ? make_dirs(parent, &m->user, &created) : -ENOMEM)) what = m->dst;
  // A failure leaves the old one and the sources as they were.
  stage s = {.fd = -1};
  if (!what && (rc = stage_open(&s, &m->a, m->dst, &m->user))) what = m->dst;
  for (size_t i = 0; i < m->n && !what; i++) {
    int in = open(m->src[i], O_RDONLY | O_CLOEXEC);
    if (in < 0) rc = -errno;
    static const size_t CHUNK = 256 * 1024;
    uint8_t *chunk = malloc(CHUNK);
    if (!chunk) rc = -ENOMEM;
    while (!rc) {
      ssize_t n = read(in, chunk, CHUNK);
      if (n < 0) rc = -errno;
      if (n <= 0) break;
      rc = stage_write(&s, chunk, (size_t)n);
    }
    free(chunk);
    if (in >= 0) close(in);
    if (rc) what = m->src[i];
  }
  if (!what && (rc = stage_commit(&s, NULL, NULL))) what = m->dst;
  stage_drop(&s);
  for (size_t i = 0; i < m->n && !what; i++)
    if (unlink(m->src[i]) && errno != ENOENT) {
      rc = -errno;
      what = m->src[i];
    }
  if (what) status = status_of(rc);
  buf_printf(out, "%03d", status);
  if (what) {
    buf msg = {0};
    buf_printf(&msg, "cannot compose '%s': %s", what, strerror(-rc));
    buf_printf(out, "{\"code\":%d,\"message\":", status);
    json_put_str(out, (char *)msg.p, buf_len(&msg));
    buf_puts(out, "}\n");
  } else {
    size_t n;
    const char *base = path_base(m->dst, &n);
    buf_puts(out, "{\"name\":");
    json_put_str(out, base, n);
    buf_puts(out, ",\"type\":\"file\",\"path\":");
    json_put_str(out, m->dst, strlen(m->dst));
    buf_puts(out, "}\n");
  }
}

static void compose_done(job *j, bool ok) {
  compose *m = j->owner;
  m->j = NULL;
  const uint8_t *p = buf_data(&j->out);
  size_t n = buf_len(&j->out);
  uint64_t status;
  if (!ok || n < 4 || parse_u64((const char *)p, 3, 599, &status))
    http_error(m->c, 500, "the operation was interrupted (out of memory?)");
  else
    http_reply(m->c, (int)status, "application/json", p + 3, n - 3, NULL);
}

static size_t compose_data(conn *c, const uint8_t *p, size_t n) {
  if (buf_len(&c->collect) + n > COMPOSE_MAX)
    http_error(c, 413, "request body too large");
  else
    buf_put(&c->collect, p, n);
  return n;
}

static void compose_end(conn *c) {
  compose *m = c->user;
  const char *err = NULL;
  size_t at;
  jval *j = json_parse(&m->a, (char *)buf_data(&c->collect), buf_len(&c->collect), &err, &at);
  const jval *src = json_get(j, "source_paths"), *dst = json_get(j, "destination"), *user = json_get(j, "username");
  if (!json_is_cstr(dst) || !dst->n || !src || src->type != J_ARRAY || !src->child || (user && !json_is_cstr(user))) {
    http_error(c, 400, j ? "source_paths (array of paths) and destination are required" : "invalid JSON");
    return;
  }
  users_load(&m->db, m->ag->root);
  if (agent_account(m->ag, &m->a, &m->db, user ? user->s : NULL, &m->user)) {
    char *t = arena_printf(&m->a, "invalid username: '%s'", user ? user->s : m->ag->default_user);
    http_error(c, 401, t ? t : "invalid username");
    return;
  }
  for (const jval *e = src->child; e; e = e->next) m->n++;
  m->src = arena_alloc(&m->a, m->n * sizeof *m->src);
  bool ok = m->src && !agent_path(m->ag, &m->a, &m->user, dst->s, &m->dst);
  size_t i = 0;
  for (const jval *e = src->child; ok && e; e = e->next)
    ok = json_is_cstr(e) && e->n && !agent_path(m->ag, &m->a, &m->user, e->s, &m->src[i++]);
  if (!ok) {
    http_error(c, 400, "a path is empty or cannot be resolved");
    return;
  }
  m->j = job_start(m->ag, m, compose_child, compose_done);
  if (!m->j) http_error(c, 503, "too many file operations at once, try again");
}

static void compose_gone(conn *c) {
  compose *m = c->user;
  if (!m) return;
  if (m->j) job_cancel(m->j);
  users_free(&m->db);
  arena_free(&m->a);
  free(m);
}

static const sink compose_sink = {.data = compose_data, .end = compose_end, .gone = compose_gone};

void files_compose(conn *c) {
  compose *m = calloc(1, sizeof *m);
  if (!m) {
    http_error(c, 503, "out of memory");
    return;
  }
  m->c = c;
  m->ag = agent_of(c);
  m->a.limit = 8 << 20;
  c->user = m;
  c->sink = &compose_sink;
}
