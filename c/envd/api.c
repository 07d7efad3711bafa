// Routes, authorisation, and the small endpoints: /health, /init, /envs, /metrics.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/random.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

enum { INIT_MAX = 8 << 20 };
static const char no_store[] = "Cache-Control: no-store\r\n";

// ---- variables ---------------------------------------------------------------------------------

void env_free(envvar **list) {
  for (envvar *e = *list, *next; e; e = next) {
    next = e->next;
    free(e->name);
    free(e->value);
    free(e);
  }
  *list = NULL;
}

const char *env_get(const envvar *list, const char *name) {
  for (; list; list = list->next)
    if (!strcmp(list->name, name)) return list->value;
  return NULL;
}

int env_set(envvar **list, const char *name, const char *value) {
  char *v = strdup(value);
  if (!v) return -ENOMEM;
  envvar **p = list;
  for (; *p; p = &(*p)->next)
    if (!strcmp((*p)->name, name)) {
      free((*p)->value);
      (*p)->value = v;
      return 0;
    }
  envvar *e = calloc(1, sizeof *e);
  if (e) e->name = strdup(name);
  if (!e || !e->name) {
    free(e);
    free(v);
    return -ENOMEM;
  }
  e->value = v;
  *p = e;
  return 0;
}

static int set_str(char **dst, const char *s) {
  char *n = strdup(s);
  if (!n) return -ENOMEM;
  free(*dst);
  *dst = n;
  return 0;
}

// ---- users and paths ---------------------------------------------------------------------------

int agent_account(agent *ag, arena *a, const userdb *db, const char *name, account *out) {
  return users_find(db, a, ag->root, name && *name ? name : ag->default_user, out);
}

int agent_path(const agent *ag, arena *a, const account *u, const char *path, char **out) {
  if (!*path) path = ag->default_workdir && *ag->default_workdir ? ag->default_workdir : "~";
  if (path[0] == '~') {
    if (path[1] && path[1] != '/') return -EINVAL;
    *out = path[1] ? path_join(a, u->home, path + 2) : arena_strndup(a, u->home, strlen(u->home));
  } else if (path[0] == '/') {
    *out = arena_strndup(a, path, strlen(path));
  } else {
    *out = path_join(a, u->home, path);
  }
  return *out ? 0 : -ENOMEM;
}

int make_dirs(const char *path, const account *u, bool *created) {
  char *p = strdup(path);
  if (!p) return -ENOMEM;
  int rc = 0;
  *created = false;
  for (char *s = p + (*p == '/'); !rc; s++) {
    if (*s && *s != '/') continue;
    bool last = !*s;
    *s = 0;
    if (s > p && s[-1] != '/') { // not an empty component
      if (!mkdir(p, 0755)) {
        *created = true;
        if (chown(p, u->uid, u->gid)) rc = -errno;
      } else if (errno == EEXIST) {
        struct stat st;
        *created = false;
        if (stat(p, &st))
          rc = -errno;
        else if (!S_ISDIR(st.st_mode))
          rc = -ENOTDIR;
      } else {
        rc = -errno;
      }
    }
    if (last) break;
    *s = '/';
  }
  free(p);
  return rc;
}

// ---- authorisation -----------------------------------------------------------------------------

static bool token_ok(const agent *ag, const conn *c) {
  if (!ag->token) return true;
  const char *t = http_header(c, "x-access-token");
  return ct_equal(t ? t : "", t ? strlen(t) : 0, ag->token, strlen(ag->token));
}

// A peer outside of this machine: the host, who alone reaches us that way (its proxy does not pass /init on).
static bool from_host(const agent *ag, const conn *c) {
  if (c->peer.sin_family != AF_INET || c->local.sin_family != AF_INET) return false;
  uint32_t ip = ntohl(c->peer.sin_addr.s_addr);
  if (ip >> 24 == 127 || c->peer.sin_addr.s_addr == c->local.sin_addr.s_addr) return false;
  // The interface is what cannot be chosen by a container inside the guest that has an address of its own.
  if (ag->trust_if && (!c->in_ifindex || (unsigned)c->in_ifindex != if_nametoindex(ag->trust_if))) return false;
  struct ifaddrs *list;
  if (getifaddrs(&list)) return false;
  bool own = false;
  for (struct ifaddrs *i = list; i; i = i->ifa_next)
    if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET &&
        ((struct sockaddr_in *)i->ifa_addr)->sin_addr.s_addr == c->peer.sin_addr.s_addr)
      own = true;
  freeifaddrs(list);
  return !own;
}

// ---- /init -------------------------------------------------------------------------------------

// Paths below the root prefix. 0, or -errno.
static int put_file(const agent *ag, const char *path, const char *text, bool append) {
  char full[4200];
  snprintf(full, sizeof full, "%s%s", ag->root, path);
  int fd = open(full, O_WRONLY | O_CREAT | O_CLOEXEC | (append ? O_APPEND : O_TRUNC), 0644);
  if (fd < 0) return -errno;
  int rc = write_all(fd, text, strlen(text));
  if (close(fd) && !rc) rc = -errno;
  return rc;
}

static int make_root_dirs(const agent *ag, const char *path) {
  char full[4200];
  account root = {0};
  bool created;
  snprintf(full, sizeof full, "%s%s", ag->root, path);
  return make_dirs(full, &root, &created);
}

static void complain(const char *what, int rc) {
  if (rc < 0) fprintf(stderr, "aenv: agent: %s: %s\n", what, strerror(-rc));
}

static void set_identity(agent *ag, const char *var, const char *file, const char *value) {
  complain(var, env_set(&ag->platform_env, var, value));
  int rc = make_root_dirs(ag, "/run/e2b");
  complain("/run/e2b", rc ? rc : put_file(ag, file, value, false));
}

// "IP events.e2b.local" in /etc/hosts, replacing an earlier line of that name.
static void set_events_host(agent *ag, const char *ip) {
  char line[300];
  snprintf(line, sizeof line, "%s events.e2b.local", ip);
  complain("/etc/hosts", identity_host_line(ag->root, " events.e2b.local", line));
  snprintf(line, sizeof line, "http://%s", ip);
  complain("E2B_EVENTS_ADDRESS", env_set(&ag->platform_env, "E2B_EVENTS_ADDRESS", line));
}

// Where programs look for trusted certificates: Debian, Alpine, Arch; Fedora, RHEL; openSUSE; OpenSSL's own default.
static const char *const bundles[] = {"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt",
                                      "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"};

// Into every bundle the image has (the first one is made when it has none), and where Debian's tools take additions
// from, so that they keep it.
static int add_ca(agent *ag, const char *pem) {
  int rc = make_root_dirs(ag, "/usr/local/share/ca-certificates");
  if (!rc) rc = put_file(ag, "/usr/local/share/ca-certificates/aenv-ca.crt", pem, false);
  bool any = false;
  for (size_t i = 0; !rc && i <= sizeof bundles / sizeof bundles[0]; i++) {
    bool last = i == sizeof bundles / sizeof bundles[0];
    if (last && any) break;
    const char *path = bundles[last ? 0 : i];
    char full[4200], *text = NULL;
    snprintf(full, sizeof full, "%s%s", ag->root, path);
    ssize_t n = read_whole(full, &text, 16 << 20);
    if (n == -ENOENT && !last) continue;
    if (n == -ENOENT) rc = make_root_dirs(ag, "/etc/ssl/certs");
    if (n < 0 && n != -ENOENT) rc = (int)n;
    any = true;
    if (!rc && n >= 0 && strstr(text, pem)) {
      free(text); // also by another name of the same file
      continue;
    }
    if (!rc && n > 0 && text[n - 1] != '\n') rc = put_file(ag, path, "\n", true);
    if (!rc) rc = put_file(ag, path, pem, true);
    if (n >= 0) free(text);
  }
  return rc;
}

static void step_clock(int64_t sec, int32_t nsec) {
  struct timespec now, to = {.tv_sec = (time_t)sec, .tv_nsec = nsec};
  clock_gettime(CLOCK_REALTIME, &now);
  int64_t ahead_ms = ((int64_t)now.tv_sec - sec) * 1000 + (now.tv_nsec - nsec) / 1000000;
  if (ahead_ms >= -50 && ahead_ms <= 5000) return;
  if (clock_settime(CLOCK_REALTIME, &to)) complain("clock_settime", -errno);
}

// Clones of one snapshot hold the same generator state: mix the host's seed in and use it at once.
static void reseed(const uint8_t *seed, size_t n) {
  struct {
    int bits, size;
    uint8_t b[512];
  } r;
  int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    complain("/dev/urandom", -errno);
    return;
  }
  if (n > sizeof r.b) n = sizeof r.b;
  r.bits = (int)n * 8;
  r.size = (int)n;
  memcpy(r.b, seed, n);
  if (n && ioctl(fd, RNDADDENTROPY, &r)) complain("RNDADDENTROPY", -errno);
  if (ioctl(fd, RNDRESEEDCRNG)) complain("RNDRESEEDCRNG", -errno);
  close(fd);
}

// Settings as one JSON text in the memfd that our supervisor keeps.
static void save_state(agent *ag) {
  if (ag->state_fd < 0) return;
  buf b = {0};
  buf_putc(&b, '{');
  const struct {
    const char *name, *value;
  } f[] = {{"accessToken", ag->token},
           {"defaultUser", ag->default_user},
           {"defaultWorkdir", ag->default_workdir},
           {"lifecycleID", ag->lifecycle},
           {"sandboxID", env_get(ag->platform_env, "E2B_SANDBOX_ID")},
           {"templateID", env_get(ag->platform_env, "E2B_TEMPLATE_ID")}};
  for (size_t i = 0; i < sizeof f / sizeof f[0]; i++)
    if (f[i].value && *f[i].value) {
      buf_printf(&b, "\"%s\":", f[i].name);
      json_put_str(&b, f[i].value, strlen(f[i].value));
      buf_putc(&b, ',');
    }
  if (ag->has_ts) {
    buf_puts(&b, "\"timestamp\":\"");
    rfc3339_put(&b, ag->ts_sec, ag->ts_nsec);
    buf_puts(&b, "\",");
  }
  buf_puts(&b, "\"envVars\":{");
  for (envvar *e = ag->user_env; e; e = e->next) {
    json_put_str(&b, e->name, strlen(e->name));
    buf_putc(&b, ':');
    json_put_str(&b, e->value, strlen(e->value));
    if (e->next) buf_putc(&b, ',');
  }
  buf_puts(&b, "}}");
  int rc = b.oom ? -ENOMEM : 0;
  if (!rc && (pwrite(ag->state_fd, b.p, buf_len(&b), 0) != (ssize_t)buf_len(&b) ||
              ftruncate(ag->state_fd, (off_t)buf_len(&b))))
    rc = -EIO;
  complain("saving the settings", rc);
  buf_free(&b);
}

// Checks everything first, then applies everything. NULL, or what is wrong with the request.
static const char *apply_init(agent *ag, const jval *j, conn *c, bool restoring) {
  static const char *const strings[] = {"accessToken", "timestamp",  "defaultUser", "defaultWorkdir", "hyperloopIP",
                                        "lifecycleID", "caBundle",   "sandboxID",   "templateID",     "entropy"};
  const jval *v[10];
  for (int i = 0; i < 10; i++) {
    v[i] = json_get(j, strings[i]);
    if (v[i] && !json_is_cstr(v[i])) return "a field that must be a string is not one";
  }
  const jval *token = v[0], *ts = v[1], *env = json_get(j, "envVars"), *mounts = json_get(j, "volumeMounts");
  int64_t sec = 0;
  int32_t nsec = 0;
  if (ts && rfc3339_parse(ts->s, ts->n, &sec, &nsec)) return "timestamp must be an RFC 3339 time";
  if (token) {
    if (!token->n) return "accessToken must not be empty";
    for (size_t i = 0; i < token->n; i++)
      if ((uint8_t)token->s[i] < 0x20 || token->s[i] == '"' || token->s[i] == '\\' || token->s[i] == 0x7f)
        return "accessToken must not contain characters that need escaping";
  }
  if (env && env->type != J_OBJECT) return "envVars must be an object";
  for (const jval *e = env ? env->child : NULL; e; e = e->next)
    if (!json_is_cstr(e) || !e->keylen || memchr(e->key, '=', e->keylen) || memchr(e->key, 0, e->keylen))
      return "envVars must map variable names to strings";
  if (mounts && (mounts->type != J_ARRAY || mounts->child)) return "volumeMounts: NFS mounts are not supported";
  if (v[6] && v[6]->n && (!strstr(v[6]->s, "-----BEGIN CERTIFICATE-----") || !strstr(v[6]->s, "-----END CERTIFICATE-----")))
    return "caBundle must be PEM certificates";
  struct in_addr ip;
  if (v[4] && v[4]->n && inet_pton(AF_INET, v[4]->s, &ip) != 1) return "hyperloopIP must be an IPv4 address";
  uint8_t seed[512];
  ssize_t seed_len = 0;
  if (v[9] && (v[9]->n > 680 || (seed_len = base64_decode(seed, v[9]->s, v[9]->n)) < 0))
    return "entropy must be base64 of at most 510 bytes";

  if (ts && !restoring && ag->has_ts &&
      (sec < ag->ts_sec || (sec == ag->ts_sec && nsec <= ag->ts_nsec)))
    return NULL; // an older or repeated request changes nothing
  if (ts) {
    ag->has_ts = true;
    ag->ts_sec = sec;
    ag->ts_nsec = nsec;
    if (ag->guest && !restoring) step_clock(sec, nsec);
  }
  if (ag->guest && !restoring && (ts || seed_len)) reseed(seed, (size_t)seed_len);
  int rc = 0;
  if (token) {
    rc = set_str(&ag->token, token->s);
  } else {
    free(ag->token);
    ag->token = NULL;
  }
  if (env) {
    env_free(&ag->user_env);
    for (const jval *e = env->child; e && !rc; e = e->next) rc = env_set(&ag->user_env, e->key, e->s);
  }
  if (!rc && v[2] && v[2]->n) rc = set_str(&ag->default_user, v[2]->s);
  if (!rc && v[3] && v[3]->n) rc = set_str(&ag->default_workdir, v[3]->s);
  complain("/init", rc);
  if (v[7] && v[7]->n) {
    const char *old = env_get(ag->platform_env, "E2B_SANDBOX_ID");
    bool other = !old || strcmp(old, v[7]->s);
    set_identity(ag, "E2B_SANDBOX_ID", "/run/e2b/.E2B_SANDBOX_ID", v[7]->s);
    if (other && !restoring) identity_apply(ag, v[7]->s);
  }
  if (v[8] && v[8]->n) set_identity(ag, "E2B_TEMPLATE_ID", "/run/e2b/.E2B_TEMPLATE_ID", v[8]->s);
  if (v[4] && v[4]->n && !restoring) set_events_host(ag, v[4]->s);
  if (v[6] && v[6]->n && !restoring) complain("caBundle", add_ca(ag, v[6]->s));
  if (v[5] && v[5]->n) {
    bool changed = ag->lifecycle && strcmp(ag->lifecycle, v[5]->s);
    complain("lifecycleID", set_str(&ag->lifecycle, v[5]->s));
    // Peers of an earlier life of this VM will never speak again.
    if (changed && c) {
      http_drop_others(&ag->http, c);
      ports_drop(ag);
    }
  }
  if (!restoring) save_state(ag);
  return NULL;
}

static void on_init(conn *c, const uint8_t *p, size_t n) {
  agent *ag = agent_of(c);
  arena a = {.limit = 4 * INIT_MAX};
  const char *err = NULL;
  size_t at = 0;
  while (n && strchr(" \t\r\n", p[n - 1]) && p[n - 1]) n--;
  jval empty = {.type = J_OBJECT};
  const jval *j = n ? json_parse(&a, (const char *)p, n, &err, &at) : &empty;
  const jval *given = json_get(j, "accessToken");
  bool allowed = !ag->token || token_ok(ag, c) ||
                 (given && given->type == J_STRING && ct_equal(given->s, given->n, ag->token, strlen(ag->token))) ||
                 from_host(ag, c);
  // Whoever had the disks frozen has ended, and even a directory that is there already is not made on a frozen one.
  if (allowed) hold_release(ag);
  if (!allowed) {
    http_error(c, 401, "access token validation failed");
  } else if (!j || j->type != J_OBJECT) {
    char *t = arena_printf(&a, "invalid JSON at byte %zu: %s", at, err ? err : "expected an object");
    http_error(c, 400, t ? t : "request too large");
  } else if ((err = apply_init(ag, j, c, false))) {
    http_error(c, 400, err);
  } else {
    http_reply(c, 204, NULL, NULL, 0, "X-Envd-Version: " ENVD_VERSION "\r\nCache-Control: no-store\r\n");
  }
  arena_free(&a);
}

void api_restore(agent *ag) {
  set_identity(ag, "E2B_SANDBOX", "/run/e2b/.E2B_SANDBOX", "true");
  if (ag->state_fd < 0) return;
  char path[64], *text;
  snprintf(path, sizeof path, "/proc/self/fd/%d", ag->state_fd);
  ssize_t n = read_whole(path, &text, 4 * INIT_MAX);
  if (n == 0) {
    free(text);
    return;
  }
  arena a = {.limit = 4 * INIT_MAX};
  const char *err = n < 0 ? strerror((int)-n) : NULL;
  size_t at;
  jval *j = n > 0 ? json_parse(&a, text, (size_t)n, &err, &at) : NULL;
  if (j && j->type == J_OBJECT) err = apply_init(ag, j, NULL, true);
  if (!j || err) {
    // Fail closed: the settings held a token that we no longer know.
    uint8_t rnd[24] = {0};
    buf b = {0};
    if (getrandom(rnd, sizeof rnd, 0) == (ssize_t)sizeof rnd) base64_put(&b, rnd, sizeof rnd, false);
    buf_putc(&b, 0);
    if (!b.oom) complain("token", set_str(&ag->token, (char *)b.p));
    buf_free(&b);
    fprintf(stderr, "aenv: agent: settings of the last run are unreadable (%s): closed until the host sends them again\n",
            err ? err : "malformed");
  }
  arena_free(&a);
  free(text);
}

// ---- /envs, /metrics ---------------------------------------------------------------------------

static void get_envs(conn *c) {
  agent *ag = agent_of(c);
  buf b = {0};
  buf_putc(&b, '{');
  bool comma = false;
  for (int pass = 0; pass < 2; pass++)
    for (envvar *e = pass ? ag->platform_env : ag->user_env; e; e = e->next) {
      if (!pass && env_get(ag->platform_env, e->name)) continue;
      if (comma) buf_putc(&b, ',');
      comma = true;
      json_put_str(&b, e->name, strlen(e->name));
      buf_putc(&b, ':');
      json_put_str(&b, e->value, strlen(e->value));
    }
  buf_puts(&b, "}\n");
  if (b.oom)
    http_error(c, 503, "out of memory");
  else
    http_reply(c, 200, "application/json", b.p, buf_len(&b), no_store);
  buf_free(&b);
}

static uint64_t meminfo(const char *text, const char *key) {
  const char *p = text ? strstr(text, key) : NULL;
  return p ? strtoull(p + strlen(key), NULL, 10) * 1024 : 0;
}

static void get_metrics(conn *c) {
  agent *ag = agent_of(c);
  char *text = NULL;
  uint64_t busy = 0, total = 0;
  unsigned cpus = 0;
  if (read_whole("/proc/stat", &text, 1 << 20) > 0) {
    uint64_t f[8] = {0};
    char *p = text + 4;
    for (int i = 0; i < 8; i++) f[i] = strtoull(p, &p, 10);
    for (int i = 0; i < 8; i++) total += f[i];
    busy = total - f[3] - f[4]; // idle, iowait
    for (p = text; (p = strstr(p, "\ncpu")); p += 4) cpus++;
  }
  free(text);
  double pct = 0;
  if (total > ag->cpu_total && ag->cpu_total)
    pct = 100.0 * (double)(busy - ag->cpu_busy) / (double)(total - ag->cpu_total);
  ag->cpu_busy = busy;
  ag->cpu_total = total;
  text = NULL;
  ssize_t n = read_whole("/proc/meminfo", &text, 1 << 20);
  if (n < 0) text = NULL;
  uint64_t mem = meminfo(text, "MemTotal:"), avail = meminfo(text, "MemAvailable:");
  uint64_t cache = meminfo(text, "\nCached:") + meminfo(text, "\nBuffers:") + meminfo(text, "SReclaimable:");
  free(text);
  struct statvfs sv = {0};
  if (statvfs("/", &sv)) sv.f_frsize = 0;
  uint64_t disk = (uint64_t)sv.f_blocks * sv.f_frsize, left = (uint64_t)sv.f_bavail * sv.f_frsize;
  buf b = {0};
  buf_printf(&b,
             "{\"ts\":%lld,\"cpu_count\":%u,\"cpu_used_pct\":%.2f,\"mem_total_mib\":%llu,\"mem_used_mib\":%llu,"
             "\"mem_total\":%llu,\"mem_used\":%llu,\"mem_cache\":%llu,\"disk_used\":%llu,\"disk_total\":%llu}\n",
             (long long)time(NULL), cpus, pct, (unsigned long long)(mem >> 20), (unsigned long long)((mem - avail) >> 20),
             (unsigned long long)mem, (unsigned long long)(mem - avail), (unsigned long long)cache,
             (unsigned long long)(disk - left), (unsigned long long)disk);
  http_reply(c, 200, "application/json", b.p, buf_len(&b), no_store);
  buf_free(&b);
}

// ---- routes ------------------------------------------------------------------------------------

static void preflight(conn *c) {
  buf b = {0};
  const char *want = http_header(c, "access-control-request-headers");
  buf_printf(&b,
             "Access-Control-Allow-Methods: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n"
             "Access-Control-Allow-Headers: %s\r\nAccess-Control-Max-Age: 7200\r\n"
             "Vary: Access-Control-Request-Headers\r\n",
             want && strlen(want) < 4096 ? want : "*"); // "*" alone would not cover Authorization
  buf_putc(&b, 0);
  http_reply(c, 204, NULL, NULL, 0, b.oom ? NULL : (char *)b.p);
  buf_free(&b);
}

static void wrong_method(conn *c, const char *allow) {
  char h[64];
  snprintf(h, sizeof h, "Allow: %s\r\n", allow);
  static const char body[] = "{\"code\":405,\"message\":\"method not allowed\"}\n";
  http_reply(c, 405, "application/json", body, sizeof body - 1, h);
}

bool api_exempt(const conn *c) {
  static const char *const paths[] = {"/health", "/init", "/fsfreeze", "/fsfrozen", "/fsthaw", "/halt"};
  for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
    if (!strcmp(c->r.path, paths[i])) return true;
  return false;
}

void api_handle(conn *c) {
  agent *ag = agent_of(c);
  const char *m = c->r.method, *path = c->r.path;
  bool get = !strcmp(m, "GET") || !strcmp(m, "HEAD"), post = !strcmp(m, "POST");
  if (http_header(c, "origin"))
    c->common = CORS_HEADERS;
  if (!strcmp(m, "OPTIONS")) {
    preflight(c);
    return;
  }
  if (!strcmp(path, "/health")) {
    if (get)
      http_reply(c, 204, NULL, NULL, 0, no_store);
    else
      wrong_method(c, "GET");
    return;
  }
  if (!strcmp(path, "/init")) {
    if (post)
      http_collect(c, INIT_MAX, on_init);
    else
      wrong_method(c, "POST");
    return;
  }
  // The host alone, and of a machine that is all ours.
  if (post && ag->guest && from_host(ag, c) && hold_handle(c, path)) return;
  if (!strcmp(path, "/files")) {
    if (get || post)
      files_handle(c);
    else
      wrong_method(c, "GET, POST");
    return;
  }
  if (!token_ok(ag, c)) {
    http_error(c, 401, "unauthorized access, please provide a valid access token or method signing if supported");
    return;
  }
  const rpc *r = connect_find(path);
  if (r) {
    connect_handle(c, r);
  } else if (!strcmp(path, "/files/compose")) {
    if (post)
      files_compose(c);
    else
      wrong_method(c, "POST");
  } else if (!strcmp(path, "/metrics") || !strcmp(path, "/envs")) {
    if (!get)
      wrong_method(c, "GET");
    else if (path[1] == 'm')
      get_metrics(c);
    else
      get_envs(c);
  } else {
    http_error(c, 404, "no such path");
  }
}
