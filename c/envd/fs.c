// filesystem.Filesystem: entries, listing, making, moving, removing. All with the agent's own rights.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "agent.h"

#define MSG(ident, name, ...)                          \
  static const fdesc ident##_fields[] = {__VA_ARGS__}; \
  static const mdesc ident = {name, ident##_fields, sizeof ident##_fields / sizeof(fdesc)}

enum { TYPE_NONE, TYPE_FILE, TYPE_DIR };
static const enumval file_types[] = {
    {"FILE_TYPE_UNSPECIFIED", 0}, {"FILE_TYPE_FILE", 1}, {"FILE_TYPE_DIRECTORY", 2}, {"FILE_TYPE_SYMLINK", 3}, {NULL, 0}};
static const fdesc entry_fields[] = {{1, "name", K_STRING, 0, NULL, NULL},
                                     {2, "type", K_ENUM, 0, NULL, file_types},
                                     {3, "path", K_STRING, 0, NULL, NULL},
                                     {4, "size", K_INT64, 0, NULL, NULL},
                                     {5, "mode", K_U32, 0, NULL, NULL},
                                     {6, "permissions", K_STRING, 0, NULL, NULL},
                                     {7, "owner", K_STRING, 0, NULL, NULL},
                                     {8, "group", K_STRING, 0, NULL, NULL},
                                     {9, "modifiedTime", K_TIME, 0, NULL, NULL},
                                     {10, "symlinkTarget", K_STRING, F_PRESENCE, NULL, NULL},
                                     {11, "metadata", K_MAP, 0, NULL, NULL}};
const mdesc entry_info_desc = {"EntryInfo", entry_fields, sizeof entry_fields / sizeof(fdesc)};

static const mdesc empty_desc = {"Empty", NULL, 0};
MSG(path_req, "PathRequest", {1, "path", K_STRING, 0, NULL, NULL});
MSG(entry_resp, "EntryResponse", {1, "entry", K_MSG, 0, &entry_info_desc, NULL});
MSG(move_req, "MoveRequest", {1, "source", K_STRING, 0, NULL, NULL}, {2, "destination", K_STRING, 0, NULL, NULL});
MSG(list_req, "ListDirRequest", {1, "path", K_STRING, 0, NULL, NULL}, {2, "depth", K_U32, 0, NULL, NULL});
MSG(list_resp, "ListDirResponse", {1, "entries", K_MSG, F_REPEATED, &entry_info_desc, NULL});
MSG(watch_req, "WatchDirRequest", {1, "path", K_STRING, 0, NULL, NULL}, {2, "recursive", K_BOOL, 0, NULL, NULL},
    {3, "includeEntry", K_BOOL, 0, NULL, NULL}, {4, "allowNetworkMounts", K_BOOL, 0, NULL, NULL});
static const enumval event_types[] = {{"EVENT_TYPE_UNSPECIFIED", 0}, {"EVENT_TYPE_CREATE", 1}, {"EVENT_TYPE_WRITE", 2},
                                      {"EVENT_TYPE_REMOVE", 3},      {"EVENT_TYPE_RENAME", 4}, {"EVENT_TYPE_CHMOD", 5},
                                      {NULL, 0}};
MSG(fs_event, "FilesystemEvent", {1, "name", K_STRING, 0, NULL, NULL}, {2, "type", K_ENUM, 0, NULL, event_types},
    {3, "entry", K_MSG, 0, &entry_info_desc, NULL});
MSG(watch_resp, "WatchDirResponse", {1, "start", K_MSG, F_ONEOF, &empty_desc, NULL},
    {2, "filesystem", K_MSG, F_ONEOF, &fs_event, NULL}, {3, "keepalive", K_MSG, F_ONEOF, &empty_desc, NULL});
MSG(watcher_id, "WatcherId", {1, "watcherId", K_STRING, 0, NULL, NULL});
MSG(events_resp, "GetWatcherEventsResponse", {1, "events", K_MSG, F_REPEATED, &fs_event, NULL});

// ---- entries -----------------------------------------------------------------------------------

static int type_of(mode_t m) {
  return S_ISREG(m) ? TYPE_FILE : S_ISDIR(m) ? TYPE_DIR : TYPE_NONE;
}

// Go's FileMode.String(): letters for special bits, then rwx.
static char *permissions(arena *a, mode_t m) {
  char s[24];
  size_t n = 0;
  if (S_ISDIR(m)) s[n++] = 'd';
  if (S_ISLNK(m)) s[n++] = 'L';
  if (S_ISBLK(m) || S_ISCHR(m)) s[n++] = 'D';
  if (S_ISFIFO(m)) s[n++] = 'p';
  if (S_ISSOCK(m)) s[n++] = 'S';
  if (m & S_ISUID) s[n++] = 'u';
  if (m & S_ISGID) s[n++] = 'g';
  if (S_ISCHR(m)) s[n++] = 'c';
  if (m & S_ISVTX) s[n++] = 't';
  if (!n) s[n++] = '-';
  for (int i = 8; i >= 0; i--) s[n++] = m >> i & 1 ? "xwr"[i % 3] : '-';
  return arena_strndup(a, s, n);
}

// xattrs user.e2b.*, best effort: a file system without them has none.
static void metadata(arena *a, const char *path, msg *out) {
  char names[4096];
  ssize_t n = llistxattr(path, names, sizeof names);
  for (char *p = names; n > 0 && p < names + n; p += strlen(p) + 1) {
    if (strncmp(p, "user.e2b.", 9)) continue;
    char v[4097];
    ssize_t len = lgetxattr(path, p, v, sizeof v - 1);
    if (len < 0) continue;
    v[len] = 0;
    const char *key = arena_strndup(a, p + 9, strlen(p + 9)), *val = arena_strndup(a, v, strlen(v));
    if (key && val) msg_add_map(a, out, 11, key, val);
  }
}

int entry_info(arena *a, const userdb *db, const char *path, bool brief, msg *out) {
  struct stat st, target;
  if (lstat(path, &st)) return -errno;
  size_t n;
  const char *base = path_base(path, &n);
  mode_t mode = st.st_mode;
  const char *link = NULL;
  if (S_ISLNK(st.st_mode)) {
    char real[PATH_MAX];
    bool ok = !stat(path, &target) && realpath(path, real);
    mode = ok ? target.st_mode : 0;
    link = ok ? arena_strndup(a, real, strlen(real)) : path;
  }
  msg_add_bytes(a, out, 1, arena_strndup(a, base, n), n);
  msg_add_int(a, out, 2, type_of(mode));
  msg_add_str(a, out, 3, path);
  if (brief) return a->oom ? -ENOMEM : 0;
  msg_add_int(a, out, 4, st.st_size);
  msg_add_int(a, out, 5, mode & 0777);
  char *perm = permissions(a, st.st_mode);
  const char *owner = users_name(db, a, st.st_uid), *group = users_group_name(db, a, st.st_gid);
  if (!perm || !owner || !group || !base || (S_ISLNK(st.st_mode) && !link)) return -ENOMEM;
  msg_add_str(a, out, 6, perm);
  msg_add_str(a, out, 7, owner);
  msg_add_str(a, out, 8, group);
  val *t = msg_add(a, out, 9);
  if (t) {
    t->i = st.st_mtim.tv_sec;
    t->nsec = (int32_t)st.st_mtim.tv_nsec;
  }
  if (link) msg_add_str(a, out, 10, link);
  metadata(a, path, out);
  return a->oom ? -ENOMEM : 0;
}

// ---- helpers -----------------------------------------------------------------------------------

// Path of a request field, resolved. NULL after rpc_fail.
static char *path_arg(call *k, const msg *m, uint32_t field) {
  char *out;
  int rc = agent_path(k->ag, &k->a, &k->user, msg_str(m, field), &out);
  if (!rc) return out;
  rpc_fail(k, rc == -EINVAL ? INVALID_ARGUMENT : RESOURCE_EXHAUSTED, "cannot resolve path '%s': %s", msg_str(m, field),
           rc == -EINVAL ? "only '~' of the own user is known" : "out of memory");
  return NULL;
}

static void fail_errno(call *k, int rc, const char *what, const char *path) {
  enum code c = INTERNAL;
  if (rc == -ENOENT) c = NOT_FOUND;
  if (rc == -ENAMETOOLONG) c = INVALID_ARGUMENT;
  if (rc == -ELOOP) c = FAILED_PRECONDITION;
  if (rc == -EACCES || rc == -EPERM) c = PERMISSION_DENIED;
  if (rc == -ENOMEM) c = RESOURCE_EXHAUSTED;
  rpc_fail(k, c, "%s '%s': %s", what, path, strerror(-rc));
}

static void reply_entry(call *k, const char *path) {
  k->out = msg_new(&k->a, k->m->out);
  msg *e = msg_add_sub(&k->a, k->out, 1);
  int rc = e ? entry_info(&k->a, &k->db, path, k->legacy, e) : -ENOMEM;
  if (rc) fail_errno(k, rc, "cannot read", path);
}

// ---- methods -----------------------------------------------------------------------------------

static void rpc_stat(call *k) {
  char *p = path_arg(k, k->in, 1);
  if (p) reply_entry(k, p);
}

static void rpc_make_dir(call *k) {
  char *p = path_arg(k, k->in, 1);
  if (!p) return;
  struct stat st;
  if (!stat(p, &st)) {
    if (S_ISDIR(st.st_mode))
      rpc_fail(k, ALREADY_EXISTS, "directory already exists: %s", p);
    else
      rpc_fail(k, INVALID_ARGUMENT, "path already exists but is not a directory: %s", p);
    return;
  }
  bool created;
  int rc = make_dirs(p, &k->user, &created);
  if (rc)
    rpc_fail(k, rc == -ENAMETOOLONG ? INVALID_ARGUMENT : INTERNAL, "cannot create directory '%s': %s", p, strerror(-rc));
  else
    reply_entry(k, p);
}

static void rpc_move(call *k) {
  char *src = path_arg(k, k->in, 1), *dst = src ? path_arg(k, k->in, 2) : NULL;
  if (!dst) return;
  struct stat st;
  if (lstat(src, &st)) {
    fail_errno(k, -errno, "cannot move", src);
    return;
  }
  char *parent = path_join(&k->a, dst, "..");
  bool created;
  int rc = parent ? make_dirs(parent, &k->user, &created) : -ENOMEM;
  if (!rc && rename(src, dst)) rc = -errno;
  if (rc)
    rpc_fail(k, INTERNAL, "cannot move '%s' to '%s': %s", src, dst, strerror(-rc));
  else
    reply_entry(k, dst);
}

// Removes what fd (a directory, consumed) holds. First error wins; the rest is still tried.
static int remove_below(int fd) {
  DIR *d = fdopendir(fd);
  if (!d) {
    int rc = -errno;
    close(fd);
    return rc;
  }
  int rc = 0;
  for (struct dirent *e; (e = readdir(d));) {
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
    if (!unlinkat(dirfd(d), e->d_name, 0) || errno == ENOENT) continue;
    int one = -errno;
    if (errno == EISDIR || errno == EPERM) {
      int sub = openat(dirfd(d), e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
      if (sub >= 0) one = remove_below(sub);
      if (unlinkat(dirfd(d), e->d_name, AT_REMOVEDIR) == 0 || errno == ENOENT)
        one = 0;
      else if (sub >= 0 && !one)
        one = -errno;
    }
    if (one && !rc) rc = one;
  }
  closedir(d);
  return rc;
}

static bool remove_slow(const call *k) {
  struct stat st;
  char *p;
  arena a = {.limit = 64 * 1024};
  bool slow = !agent_path(k->ag, &a, &k->user, msg_str(k->in, 1), &p) && !lstat(p, &st) && S_ISDIR(st.st_mode);
  arena_free(&a);
  return slow;
}

static void rpc_remove(call *k) {
  char *p = path_arg(k, k->in, 1);
  if (!p) return;
  char *clean = path_clean(&k->a, p);
  if (!clean || !strcmp(clean, "/")) {
    rpc_fail(k, INVALID_ARGUMENT, "refusing to remove '/'");
    return;
  }
  k->out = msg_new(&k->a, &empty_desc);
  // Without the trailing slash: a link to a directory is removed itself, not followed.
  size_t n = strlen(p);
  while (n > 1 && p[n - 1] == '/') p[--n] = 0;
  if (!unlink(p) || errno == ENOENT || errno == ENOTDIR) return;
  int rc = -errno;
  int fd = open(p, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd >= 0) rc = remove_below(fd);
  if (fd >= 0 && !rmdir(p)) rc = 0;
  if (rc) rpc_fail(k, INTERNAL, "cannot remove '%s': %s", p, strerror(-rc));
}

static int by_name(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

// Names in path, sorted bytewise, in the arena. 0, or -errno.
static int names_in(arena *a, const char *path, char ***out, size_t *count) {
  DIR *d = opendir(path);
  if (!d) return -errno;
  size_t n = 0, cap = 0;
  char **list = NULL;
  int rc = 0;
  for (struct dirent *e; !rc && (errno = 0, e = readdir(d));) {
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
    if (n == cap) {
      cap = cap ? cap * 2 : 64;
      char **l = arena_alloc(a, cap * sizeof *l);
      if (l && n) memcpy(l, list, n * sizeof *l);
      list = l;
    }
    if (!list || !(list[n++] = arena_strndup(a, e->d_name, strlen(e->d_name)))) rc = -ENOMEM;
  }
  if (!rc && errno) rc = -errno;
  closedir(d);
  if (n) qsort(list, n, sizeof *list, by_name);
  *out = list;
  *count = n;
  return rc;
}

static int list_into(call *k, const char *dir, uint32_t depth) {
  char **names = NULL;
  size_t n = 0;
  int rc = names_in(&k->a, dir, &names, &n);
  size_t dl = strlen(dir);
  while (dl > 1 && dir[dl - 1] == '/') dl--;
  for (size_t i = 0; !rc && i < n; i++) {
    char *p = arena_printf(&k->a, "%.*s%s%s", (int)dl, dir, dl == 1 && *dir == '/' ? "" : "/", names[i]);
    struct stat st;
    if (!p) return -ENOMEM;
    if (lstat(p, &st)) continue; // gone meanwhile
    msg *e = msg_new(&k->a, &entry_info_desc);
    rc = e ? entry_info(&k->a, &k->db, p, k->legacy, e) : -ENOMEM;
    if (rc == -ENOENT) { // gone just now
      rc = 0;
      continue;
    }
    val *v = rc ? NULL : msg_add(&k->a, k->out, 1);
    if (v) v->m = e;
    if (!rc && depth > 1 && S_ISDIR(st.st_mode)) {
      rc = list_into(k, p, depth - 1);
      if (rc == -ENOENT) rc = 0;
    }
  }
  return rc;
}

// A tree, or a directory whose own size tells of thousands of entries.
static bool list_slow(const call *k) {
  if (msg_int(k->in, 2) > 1) return true;
  struct stat st;
  char *p;
  arena a = {.limit = 64 * 1024};
  bool slow = !agent_path(k->ag, &a, &k->user, msg_str(k->in, 1), &p) && !stat(p, &st) && st.st_size > 64 * 1024;
  arena_free(&a);
  return slow;
}

static void rpc_list_dir(call *k) {
  char *p = path_arg(k, k->in, 1);
  if (!p) return;
  struct stat st;
  if (stat(p, &st)) {
    fail_errno(k, -errno, "cannot list", p);
    return;
  }
  if (!S_ISDIR(st.st_mode)) {
    rpc_fail(k, INVALID_ARGUMENT, "path is not a directory: %s", p);
    return;
  }
  int64_t depth = msg_int(k->in, 2);
  k->out = msg_new(&k->a, &list_resp);
  int rc = list_into(k, p, depth ? (uint32_t)depth : 1);
  if (rc) fail_errno(k, rc, "cannot list", p);
}

const rpc rpc_filesystem[] = {
    {"/filesystem.Filesystem/Stat", UNARY, &path_req, &entry_resp, rpc_stat, NULL},
    {"/filesystem.Filesystem/MakeDir", UNARY, &path_req, &entry_resp, rpc_make_dir, NULL},
    {"/filesystem.Filesystem/Move", UNARY, &move_req, &entry_resp, rpc_move, NULL},
    {"/filesystem.Filesystem/ListDir", UNARY, &list_req, &list_resp, rpc_list_dir, list_slow},
    {"/filesystem.Filesystem/Remove", UNARY, &path_req, &empty_desc, rpc_remove, remove_slow},
    {"/filesystem.Filesystem/WatchDir", SERVER_STREAM, &watch_req, &watch_resp, rpc_watch_dir, NULL},
    {"/filesystem.Filesystem/CreateWatcher", UNARY, &watch_req, &watcher_id, rpc_create_watcher, NULL},
    {"/filesystem.Filesystem/GetWatcherEvents", UNARY, &watcher_id, &events_resp, rpc_get_watcher_events, NULL},
    {"/filesystem.Filesystem/RemoveWatcher", UNARY, &watcher_id, &empty_desc, rpc_remove_watcher, NULL},
    {NULL, UNARY, NULL, NULL, NULL, NULL},
};
