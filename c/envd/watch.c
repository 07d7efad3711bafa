// Directory watches on inotify: streamed (WatchDir) or queued (CreateWatcher).
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "agent.h"
#include "stage.h"

enum { EV_CREATE = 1, EV_WRITE, EV_REMOVE, EV_RENAME, EV_CHMOD };
enum { WATCHERS_MAX = 512, QUEUE_MAX = 100000, DEPTH_MAX = 128, UNSENT_MAX = 16 << 20 };

typedef struct {
  int wd;
  char *rel; // "" for the watched directory itself
} node;

typedef struct queued {
  struct queued *next;
  int type;
  char name[];
} queued;

// Names whose own event may still follow and would then be a repetition: those found by looking into a new directory.
typedef struct seen {
  struct seen *next;
  char rel[];
} seen;
enum { SEEN_SLOTS = 1024 };

typedef struct watcher {
  agent *ag;
  struct watcher *next;
  ev e;
  call *k; // WatchDir; NULL for a queued one
  char id[40];
  char *root;
  bool recursive, entry, failed, legacy, network;
  const char *why;
  node *nodes; // in the order of wd: the kernel counts upwards
  size_t n, cap;
  queued *first, **tail;
  size_t nqueued;
  seen *seen[SEEN_SLOTS];
  size_t nseen;
  char *moving; // directory that left its name; where to, the event with the same cookie tells
  uint32_t cookie;
} watcher;

#define MASK (IN_CREATE | IN_MOVED_TO | IN_MOVED_FROM | IN_ATTRIB | IN_MODIFY | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF)

static uint32_t slot_of(const char *s) {
  uint32_t h = 2166136261u;
  for (; *s; s++) h = (h ^ (uint8_t)*s) * 16777619u;
  return (h ^ h >> 15) % SEEN_SLOTS;
}

static void see(watcher *w, seen *s) {
  seen **p = &w->seen[slot_of(s->rel)];
  s->next = *p;
  *p = s;
  w->nseen++;
}

static void forget_seen(watcher *w) {
  for (size_t i = 0; w->nseen && i < SEEN_SLOTS; i++)
    for (seen *s; (s = w->seen[i]); w->nseen--) w->seen[i] = s->next, free(s);
}

static void watcher_free(watcher *w) {
  for (watcher **p = &w->ag->watchers; *p; p = &(*p)->next)
    if (*p == w) {
      *p = w->next;
      w->ag->nwatchers--;
      break;
    }
  if (w->k) {
    w->k->user_data = NULL;
    w->k->on_gone = w->k->on_drained = NULL;
  }
  // A send may find the client gone and end up here while an event is being worked on: `failed` stops that.
  w->failed = true;
  ev_del(&w->ag->loop, &w->e);
  close(w->e.fd);
  for (size_t i = 0; i < w->n; i++) free(w->nodes[i].rel);
  free(w->nodes);
  for (queued *q = w->first, *n; q; q = n) n = q->next, free(q);
  forget_seen(w);
  free(w->moving);
  w->moving = NULL;
  free(w->root);
  w->n = w->cap = 0;
  w->nodes = NULL;
  w->root = NULL;
  w->first = NULL;
  loop_free_later(&w->ag->loop, w);
}

static void give_up(watcher *w, const char *why) {
  if (w->failed) return;
  w->failed = true;
  w->why = why;
}

static char *full_path(const watcher *w, arena *a, const char *rel) {
  return arena_printf(a, "%s%s%s", w->root, *rel && strcmp(w->root, "/") ? "/" : "", rel);
}

static void fill_event(watcher *w, arena *a, const userdb *db, msg *ev, const char *name, int type) {
  msg_add_str(a, ev, 1, name);
  msg_add_int(a, ev, 2, type);
  if (!w->entry || (type != EV_CREATE && type != EV_WRITE && type != EV_CHMOD)) return;
  const fdesc *f = &ev->d->fields[2];
  msg *info = msg_new(a, f->sub);
  char *p = full_path(w, a, strcmp(name, ".") ? name : "");
  if (!info || !p || entry_info(a, db, p, w->legacy, info)) return;
  val *v = msg_add(a, ev, 3);
  if (v) v->m = info;
}

static void emit(watcher *w, const char *name, int type) {
  if (w->failed) return;
  if (w->k) {
    if (http_pending(w->k->c) > UNSENT_MAX) { // a large tree that appeared at once, and a client that does not read
      give_up(w, "the client reads too slowly: events were lost");
      return;
    }
    arena a = {.limit = 1 << 20};
    msg *resp = msg_new(&a, w->k->m->out);
    msg *ev = msg_add_sub(&a, resp, 2);
    if (ev) {
      fill_event(w, &a, &w->k->db, ev, name, type);
      rpc_send(w->k, resp);
    }
    arena_free(&a);
    return;
  }
  queued *q = w->nqueued < QUEUE_MAX ? malloc(sizeof *q + strlen(name) + 1) : NULL;
  if (!q) {
    give_up(w, "too many unfetched events");
    return;
  }
  q->next = NULL;
  q->type = type;
  strcpy(q->name, name);
  *w->tail = q;
  w->tail = &q->next;
  w->nqueued++;
}

static node *node_of(watcher *w, int wd) {
  size_t lo = 0, hi = w->n;
  while (lo < hi) {
    size_t mid = (lo + hi) / 2;
    if (w->nodes[mid].wd < wd)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo < w->n && w->nodes[lo].wd == wd ? &w->nodes[lo] : NULL;
}

static void forget(watcher *w, size_t i) {
  free(w->nodes[i].rel);
  memmove(w->nodes + i, w->nodes + i + 1, (w->n - i - 1) * sizeof *w->nodes);
  w->n--;
}

// A directory that was moved away is no longer ours, nor is what lies below it.
static void forget_tree(watcher *w, const char *rel) {
  size_t len = strlen(rel), kept = 0;
  for (size_t i = 0; i < w->n; i++) {
    const char *r = w->nodes[i].rel;
    if (!strncmp(r, rel, len) && (!r[len] || r[len] == '/')) {
      inotify_rm_watch(w->e.fd, w->nodes[i].wd);
      free(w->nodes[i].rel);
    } else {
      w->nodes[kept++] = w->nodes[i];
    }
  }
  w->n = kept;
}

// Uploads of ours on the way to their name: a name for a moment, or "#" and the number of an unnamed file.
static bool is_staging(const char *name) {
  if (!strncmp(name, STAGE_PREFIX, strlen(STAGE_PREFIX))) return true;
  return name[0] == '#' && name[1] && !name[1 + strspn(name + 1, "0123456789")];
}

// Where a directory left to is known by now, or it left the tree.
static void settle_move(watcher *w) {
  if (!w->moving) return;
  forget_tree(w, w->moving);
  free(w->moving);
  w->moving = NULL;
}

// A directory moved within the tree takes its watches along; what happens inside must not fall between two watches.
static int rename_tree(watcher *w, const char *from, const char *to) {
  size_t len = strlen(from);
  for (size_t i = 0; i < w->n; i++) {
    const char *r = w->nodes[i].rel;
    if (strncmp(r, from, len) || (r[len] && r[len] != '/')) continue;
    size_t cap = strlen(to) + strlen(r + len) + 1;
    char *now = malloc(cap);
    if (!now) return -ENOMEM;
    snprintf(now, cap, "%s%s", to, r + len);
    free(w->nodes[i].rel);
    w->nodes[i].rel = now;
  }
  return 0;
}

// What lies on a network does not tell of changes, and may not answer at all.
static bool network_fs(const struct statfs *s) {
  switch ((uint32_t)s->f_type) {
  case 0x6969:      // NFS
  case 0xff534d42u: // CIFS
  case 0x517b:      // SMB
  case 0xfe534d42u: // SMB2
  case 0x65735546:  // FUSE
    return true;
  default: return false;
  }
}

// The kernel's own views of itself: no events, and thousands of directories. (Numbers: linux/magic.h.)
static bool kernel_fs(const struct statfs *s) {
  switch ((uint32_t)s->f_type) {
  case 0x9fa0:     // proc
  case 0x62656572: // sysfs
  case 0x64626720: // debugfs
  case 0x74726163: // tracefs
  case 0x73636673: // securityfs
  case 0x63677270: // cgroup2
  case 0x27e0eb:   // cgroup
  case 0xcafe4a11: // bpf
    return true;
  default: return false;
  }
}

// Whether a watch of the tree goes on into a directory where another file system is mounted.
static bool follows(const watcher *w, int parent, const char *name) {
  int fd = openat(parent, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct statfs s;
  bool yes = fd >= 0 && !fstatfs(fd, &s) && !kernel_fs(&s) && (w->network || !network_fs(&s));
  if (fd >= 0) close(fd);
  return yes;
}

static int add_dir(watcher *w, const char *rel, bool report, int depth) {
  if (w->failed) return 0;
  arena a = {.limit = 64 * 1024};
  char *path = full_path(w, &a, rel);
  int wd = path ? inotify_add_watch(w->e.fd, path, MASK | IN_ONLYDIR) : -1;
  if (wd < 0) {
    int rc = path ? -errno : -ENOMEM;
    arena_free(&a);
    // What vanished or turned into something else in the meantime is no failure of the watch.
    return rc == -ENOENT || rc == -ENOTDIR ? (depth ? 0 : rc) : rc;
  }
  node *old = node_of(w, wd);
  char *r = strdup(rel);
  int rc = r ? 0 : -ENOMEM;
  if (!rc && old) {
    free(old->rel);
    old->rel = r;
  } else if (!rc) {
    if (w->n == w->cap) {
      size_t cap = w->cap ? w->cap * 2 : 16;
      node *n = realloc(w->nodes, cap * sizeof *n);
      if (n) {
        w->nodes = n;
        w->cap = cap;
      }
    }
    if (w->n < w->cap) {
      size_t at = w->n;
      while (at && w->nodes[at - 1].wd > wd) at--; // only after the kernel's counter has wrapped
      memmove(w->nodes + at + 1, w->nodes + at, (w->n - at) * sizeof *w->nodes);
      w->nodes[at] = (node){wd, r};
      w->n++;
    } else {
      free(r);
      rc = -ENOMEM;
    }
  }
  DIR *d = !rc && (w->recursive || report) && depth < DEPTH_MAX ? opendir(path) : NULL;
  arena_free(&a);
  if (!d) return rc;
  struct stat here;
  if (fstat(dirfd(d), &here)) here.st_dev = 0;
  for (struct dirent *e; !rc && !w->failed && (e = readdir(d));) {
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
    if (e->d_name[0] == '.' && is_staging(e->d_name)) continue;
    struct stat st;
    if (fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW)) continue;
    size_t len = strlen(rel) + strlen(e->d_name) + 2;
    seen *s = malloc(sizeof *s + len);
    if (!s) {
      rc = -ENOMEM;
      break;
    }
    snprintf(s->rel, len, "%s%s%s", rel, *rel ? "/" : "", e->d_name);
    if (report) {
      emit(w, s->rel, EV_CREATE);
      if (S_ISREG(st.st_mode) && st.st_size) emit(w, s->rel, EV_WRITE);
    }
    if (w->recursive && S_ISDIR(st.st_mode) && (st.st_dev == here.st_dev || follows(w, dirfd(d), e->d_name)))
      rc = add_dir(w, s->rel, report, depth + 1);
    if (report && !w->failed)
      see(w, s);
    else
      free(s);
  }
  closedir(d);
  return rc;
}

static bool was_seen(watcher *w, const char *rel) {
  if (!w->nseen) return false;
  for (seen **p = &w->seen[slot_of(rel)]; *p; p = &(*p)->next)
    if (!strcmp((*p)->rel, rel)) {
      seen *s = *p;
      *p = s->next;
      w->nseen--;
      free(s);
      return true;
    }
  return false;
}

void watchers_expect(void *ag, const char *path) {
  for (watcher *w = ((agent *)ag)->watchers; w; w = w->next) {
    size_t n = strlen(w->root);
    if (!strcmp(w->root, "/")) n = 0;
    if (strncmp(path, w->root, n) || path[n] != '/') continue;
    const char *rel = path + n + 1;
    seen *s = w->recursive || !strchr(rel, '/') ? malloc(sizeof *s + strlen(rel) + 1) : NULL;
    if (!s) continue;
    strcpy(s->rel, rel);
    see(w, s);
  }
}

static void one_event(watcher *w, const struct inotify_event *e) {
  if (e->mask & IN_Q_OVERFLOW) {
    give_up(w, "the kernel's event queue overflowed: events were lost");
    return;
  }
  node *n = node_of(w, e->wd);
  if (!n) return;
  if (e->mask & IN_IGNORED) {
    bool root = !*n->rel;
    forget(w, (size_t)(n - w->nodes));
    if (root) give_up(w, "the watched directory is gone");
    return;
  }
  char rel[8192];
  if (e->len) {
    int len = snprintf(rel, sizeof rel, "%s%s%s", n->rel, *n->rel ? "/" : "", e->name);
    if (len < 0 || (size_t)len >= sizeof rel) return;
    if (is_staging(e->name)) {
      struct stat st;
      char full[PATH_MAX];
      if (e->name[0] == '.') return;
      len = snprintf(full, sizeof full, "%s/%s", w->root, rel);
      if (!(e->mask & IN_DELETE) && len < (int)sizeof full && lstat(full, &st)) return; // no file has that name
    }
  } else {
    if (*n->rel) return; // the parent's watch reports it by name
    strcpy(rel, ".");
  }
  bool dir = (e->mask & IN_ISDIR) && e->len;
  bool create = e->mask & (IN_CREATE | IN_MOVED_TO);
  // A name found by looking is reported, watched and looked into already.
  bool known = create && was_seen(w, rel);
  if (create && !known) emit(w, rel, EV_CREATE);
  if (e->mask & (IN_MOVED_FROM | IN_MOVE_SELF)) emit(w, rel, EV_RENAME);
  if (e->mask & IN_ATTRIB) emit(w, rel, EV_CHMOD);
  if (e->mask & IN_MODIFY) emit(w, rel, EV_WRITE);
  if (e->mask & (IN_DELETE | IN_DELETE_SELF)) emit(w, rel, EV_REMOVE);
  if (!dir || !w->recursive) return;
  if (e->mask & IN_DELETE) forget_tree(w, rel);
  if (e->mask & IN_MOVED_FROM) {
    settle_move(w);
    w->moving = strdup(rel);
    w->cookie = e->cookie;
    if (!w->moving) forget_tree(w, rel);
  }
  bool moved = (e->mask & IN_MOVED_TO) && w->moving && w->cookie == e->cookie;
  if (create && (moved || !known)) {
    int rc = moved ? rename_tree(w, w->moving, rel) : add_dir(w, rel, true, 1);
    if (moved) {
      free(w->moving);
      w->moving = NULL;
    }
    if (rc) give_up(w, rc == -ENOSPC ? "out of inotify watches (fs.inotify.max_user_watches)" : strerror(-rc));
  }
}

static void watch_on(watcher *w) {
  ev_set(&w->ag->loop, &w->e, w->failed || (w->k && !rpc_may_send(w->k)) ? 0 : EPOLLIN);
}

static void end_stream(watcher *w) {
  call *k = w->k;
  const char *why = w->why;
  watcher_free(w);
  rpc_fail(k, INTERNAL, "watch failed: %s", why);
  rpc_finish(k);
}

static void on_inotify(ev *e, uint32_t events) {
  (void)events;
  watcher *w = e->owner;
  _Alignas(struct inotify_event) char chunk[16 * 1024];
  for (int turns = 0; turns < 16 && !w->failed && (!w->k || rpc_may_send(w->k)); turns++) {
    ssize_t n = read(e->fd, chunk, sizeof chunk);
    if (n < 0 && errno == EAGAIN) {
      // Whatever was queued before a directory was looked into has been read now.
      forget_seen(w);
      settle_move(w);
      break;
    }
    if (n < 0 && errno != EINTR) give_up(w, strerror(errno));
    for (ssize_t i = 0; i < n && !w->failed;) {
      const struct inotify_event *ie = (const struct inotify_event *)(chunk + i);
      one_event(w, ie);
      i += (ssize_t)(sizeof *ie + ie->len);
    }
  }
  if (!e->added) return; // the client left while we were sending
  if (w->failed && w->k)
    end_stream(w);
  else
    watch_on(w);
}

// A new armed watch for the request, or NULL after rpc_fail.
static watcher *watch_new(call *k, bool stream) {
  char *path;
  const char *arg = msg_str(k->in, 1);
  if (agent_path(k->ag, &k->a, &k->user, arg, &path)) {
    rpc_fail(k, INVALID_ARGUMENT, "cannot resolve path '%s'", arg);
    return NULL;
  }
  struct stat st;
  if (stat(path, &st)) {
    rpc_fail(k, errno == ENOENT || errno == ENOTDIR ? NOT_FOUND : INTERNAL, "cannot watch '%s': %s", path, strerror(errno));
    return NULL;
  }
  if (!S_ISDIR(st.st_mode)) {
    rpc_fail(k, INVALID_ARGUMENT, "path is not a directory: %s", path);
    return NULL;
  }
  struct statfs sf;
  if (!msg_int(k->in, 4) && !statfs(path, &sf) && network_fs(&sf)) {
    rpc_fail(k, INVALID_ARGUMENT, "cannot watch a path on a network mount: %s", path);
    return NULL;
  }
  if (k->ag->nwatchers >= WATCHERS_MAX) {
    rpc_fail(k, RESOURCE_EXHAUSTED, "too many watchers (%d)", WATCHERS_MAX);
    return NULL;
  }
  watcher *w = calloc(1, sizeof *w);
  int fd = w ? inotify_init1(IN_NONBLOCK | IN_CLOEXEC) : -1;
  if (fd < 0) {
    rpc_fail(k, INTERNAL, "cannot watch: %s", strerror(w ? errno : ENOMEM));
    free(w);
    return NULL;
  }
  w->ag = k->ag;
  w->e = (ev){.fd = fd, .cb = on_inotify, .owner = w};
  w->recursive = msg_int(k->in, 2);
  w->entry = msg_int(k->in, 3);
  w->network = msg_int(k->in, 4);
  w->legacy = k->legacy;
  w->tail = &w->first;
  w->next = k->ag->watchers;
  k->ag->watchers = w;
  k->ag->nwatchers++;
  size_t n = strlen(path);
  while (n > 1 && path[n - 1] == '/') n--;
  w->root = strndup(path, n);
  int rc = w->root ? add_dir(w, "", false, 0) : -ENOMEM;
  if (!rc && ev_set(&k->ag->loop, &w->e, EPOLLIN)) rc = -ENOMEM;
  if (rc) {
    rpc_fail(k, INTERNAL, "cannot watch '%s': %s", path,
             rc == -ENOSPC ? "out of inotify watches (fs.inotify.max_user_watches)" : strerror(-rc));
    watcher_free(w);
    return NULL;
  }
  if (stream) w->k = k;
  return w;
}

static void on_stream_gone(call *k) {
  watcher *w = k->user_data;
  if (w) watcher_free(w);
}

static void on_stream_drained(call *k) {
  if (k->user_data) watch_on(k->user_data);
}

static void send_plain(call *k, uint32_t field) {
  arena a = {.limit = 16 * 1024};
  msg *resp = msg_new(&a, k->m->out);
  if (msg_add_sub(&a, resp, field)) rpc_send(k, resp);
  arena_free(&a);
}

static void send_keepalive(call *k) {
  send_plain(k, 3);
}

void rpc_watch_dir(call *k) {
  watcher *w = watch_new(k, true);
  if (!w) return;
  k->user_data = w;
  k->on_gone = on_stream_gone;
  k->on_drained = on_stream_drained;
  k->on_keepalive = send_keepalive;
  send_plain(k, 1);
}

void rpc_create_watcher(call *k) {
  watcher *w = watch_new(k, false);
  if (!w) return;
  uint8_t rnd[16];
  if (getrandom(rnd, sizeof rnd, GRND_NONBLOCK) != (ssize_t)sizeof rnd) memcpy(rnd, &w, sizeof w);
  for (int i = 0; i < 16; i++) snprintf(w->id + 2 * i, 3, "%02x", rnd[i]);
  k->out = msg_new(&k->a, k->m->out);
  msg_add_str(&k->a, k->out, 1, w->id);
}

static watcher *find_watcher(call *k) {
  const char *id = msg_str(k->in, 1);
  for (watcher *w = k->ag->watchers; w; w = w->next)
    if (!w->k && *w->id && !strcmp(w->id, id)) return w;
  rpc_fail(k, NOT_FOUND, "watcher '%s' not found", id);
  return NULL;
}

void rpc_get_watcher_events(call *k) {
  watcher *w = find_watcher(k);
  if (!w) return;
  if (w->failed && !w->first) {
    rpc_fail(k, INTERNAL, "watch failed: %s", w->why);
    return;
  }
  k->out = msg_new(&k->a, k->m->out);
  while (w->first) {
    queued *q = w->first;
    msg *ev = msg_add_sub(&k->a, k->out, 1);
    const char *name = ev ? arena_strndup(&k->a, q->name, strlen(q->name)) : NULL;
    if (!name) break; // the call fails as too large; what is left stays queued
    fill_event(w, &k->a, &k->db, ev, name, q->type);
    w->first = q->next;
    w->nqueued--;
    free(q);
  }
  if (!w->first) w->tail = &w->first;
}

void rpc_remove_watcher(call *k) {
  watcher *w = find_watcher(k);
  if (!w) return;
  watcher_free(w);
  k->out = msg_new(&k->a, k->m->out);
}

void watchers_close(agent *ag) {
  while (ag->watchers) watcher_free(ag->watchers);
}
