// `envd copy`: puts the files of a COPY step into the file system it runs in. Needs nothing of the image.
//
// The host connects over TCP (the port is printed on standard output), sends the token line it gave in the
// environment and then an op stream (c/ext4/opstream.h) that begins with a TARGET record. Entry paths are
// relative to the target; the empty path is the copied file or directory itself. One line is answered:
//   ok ENTRIES BYTES
//   error MESSAGE
// The rules are those of Dockerfile COPY: a directory's content merges into the target, a file goes into a
// directory that exists or has a trailing slash, links on the way to the target are followed inside the root,
// links below it are not, nothing is replaced by something of another kind except files and links by each other.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "../ext4/opstream.h"
#include "copy.h"

enum {
  ACCEPT_MS = 15 * 1000,
  IDLE_MS = 60 * 1000,
  MAX_LINKS = 40,
  TOKEN_MAX = 128,
  DATA_MAX = 4 << 20,
};

typedef struct dir_time {
  struct dir_time *next;
  struct timespec mtime;
  char path[]; // relative to the base directory
} dir_time;

typedef struct {
  int sock;
  int root; // of the file system
  int base; // target directory, once it is there
  int file; // being written, or -1
  struct op_target target;
  char goal[PATH_MAX];      // canonical path of the target below the root, without leading '/'
  char file_name[NAME_MAX + 1]; // of the single file in the base directory
  char path[PATH_MAX];      // of the entry at hand, for messages
  uint64_t entries, bytes;
  struct op_segment *segments;
  uint32_t segment_count, segment;
  uint64_t segment_done;
  struct op_entry open_entry;
  dir_time *times;
  char error[1024];
} copier;

__attribute__((format(printf, 2, 3))) static int fail(copier *c, const char *format, ...) {
  if (!c->error[0]) {
    va_list args;
    va_start(args, format);
    vsnprintf(c->error, sizeof c->error, format, args);
    va_end(args);
  }
  return -1;
}

static int fail_errno(copier *c, const char *what) {
  return fail(c, "%s: %s", what, strerror(errno));
}

// ---- input -------------------------------------------------------------------------------------

static int read_exactly(copier *c, void *into, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    struct pollfd p = {.fd = c->sock, .events = POLLIN};
    int ready = poll(&p, 1, IDLE_MS);
    if (ready < 0 && errno == EINTR) continue;
    if (ready < 0) return fail_errno(c, "poll");
    if (ready == 0) return fail(c, "the stream stopped for %d s", IDLE_MS / 1000);
    ssize_t n = recv(c->sock, (char *)into + done, bytes - done, 0);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n < 0) return fail_errno(c, "reading the stream");
    if (n == 0) return fail(c, "the stream ended early");
    done += (size_t)n;
  }
  return 0;
}

// ---- paths -------------------------------------------------------------------------------------

// Canonical form of a path below the root: links are followed, those to absolute places start at the root
// again; what does not exist is taken as it is written. Always inside the root.
static int locate(copier *c, const char *path, char out[PATH_MAX]) {
  char rest[PATH_MAX], link[PATH_MAX];
  int links = 0;
  if (strlen(path) >= sizeof rest) return errno = ENAMETOOLONG, fail_errno(c, path);
  strcpy(rest, path);
  out[0] = 0;
  for (char *p = rest; *p;) {
    size_t n = strcspn(p, "/");
    char name[NAME_MAX + 1];
    if (n > NAME_MAX) return errno = ENAMETOOLONG, fail_errno(c, path);
    memcpy(name, p, n);
    name[n] = 0;
    p += n;
    p += strspn(p, "/");
    if (n == 0 || !strcmp(name, ".")) continue;
    if (!strcmp(name, "..")) {
      char *slash = strrchr(out, '/');
      *(slash ? slash : out) = 0;
      continue;
    }
    size_t have = strlen(out);
    if (have + n + 2 > PATH_MAX) return errno = ENAMETOOLONG, fail_errno(c, path);
    snprintf(out + have, PATH_MAX - have, "%s%s", have ? "/" : "", name);
    ssize_t size = readlinkat(c->root, out, link, sizeof link - 1);
    if (size < 0) continue; // not a link, or nothing there
    link[size] = 0;
    if (++links > MAX_LINKS) return errno = ELOOP, fail_errno(c, path);
    char joined[PATH_MAX];
    int joined_bytes = snprintf(joined, sizeof joined, "%s/%s", link, p);
    if (joined_bytes < 0 || (size_t)joined_bytes >= sizeof joined) return errno = ENAMETOOLONG, fail_errno(c, path);
    strcpy(rest, joined);
    p = rest;
    if (link[0] == '/')
      out[0] = 0;
    else
      out[have] = 0;
  }
  return 0;
}

static int set_owner(copier *c, int fd, const char *path, uint32_t uid, uint32_t gid) {
  return fchown(fd, uid, gid) ? fail_errno(c, path) : 0;
}

// Opens the directory at a path of names below `from`, without following links; makes what is missing.
static int open_dirs(copier *c, int from, const char *path) {
  int dir = openat(from, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0) return fail_errno(c, path);
  for (const char *p = path; *p;) {
    size_t n = strcspn(p, "/");
    char name[NAME_MAX + 1];
    if (n > NAME_MAX) {
      close(dir);
      return errno = ENAMETOOLONG, fail_errno(c, path);
    }
    memcpy(name, p, n);
    name[n] = 0;
    p += n;
    p += strspn(p, "/");
    bool made = mkdirat(dir, name, 0755) == 0;
    int next = made || errno == EEXIST ? openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    if (next < 0) {
      if (errno == ELOOP || errno == ENOTDIR) fail(c, "cannot copy to non-directory: /%.*s", (int)(p - path), path);
      else fail_errno(c, path);
      close(dir);
      return -1;
    }
    close(dir);
    dir = next;
    if (made && (fchmod(dir, 0755) || fchown(dir, c->target.uid, c->target.gid))) {
      fail_errno(c, path);
      close(dir);
      return -1;
    }
  }
  return dir;
}

// ---- records -----------------------------------------------------------------------------------

static int start_target(copier *c, const char *payload, uint32_t bytes) {
  if (bytes < sizeof c->target) return fail(c, "malformed target record");
  memcpy(&c->target, payload, sizeof c->target);
  uint64_t total = sizeof c->target + (uint64_t)c->target.path_bytes + c->target.name_bytes;
  if (total != bytes || c->target.path_bytes >= PATH_MAX || c->target.name_bytes > NAME_MAX)
    return fail(c, "malformed target record");
  char path[PATH_MAX], name[NAME_MAX + 1];
  memcpy(path, payload + sizeof c->target, c->target.path_bytes);
  path[c->target.path_bytes] = 0;
  memcpy(name, payload + sizeof c->target + c->target.path_bytes, c->target.name_bytes);
  name[c->target.name_bytes] = 0;
  if (locate(c, path, c->goal)) return -1;

  struct stat st;
  bool there = !*c->goal || !fstatat(c->root, c->goal, &st, AT_SYMLINK_NOFOLLOW);
  bool is_dir = !*c->goal || (there && S_ISDIR(st.st_mode));
  if (c->target.flags & OP_TARGET_SOURCE_DIRECTORY) {
    if (there && !is_dir) return fail(c, "cannot copy to non-directory: /%s", c->goal);
    if (there) c->target.flags |= OP_TARGET_EXISTED;
    c->base = open_dirs(c, c->root, c->goal);
    return c->base < 0 ? -1 : 0;
  }
  if (is_dir || (c->target.flags & OP_TARGET_MUST_BE_DIRECTORY)) {
    if (there && !is_dir) return fail(c, "cannot copy to non-directory: /%s", c->goal);
    strcpy(c->file_name, name);
    c->base = open_dirs(c, c->root, c->goal);
    return c->base < 0 ? -1 : 0;
  }
  char *slash = strrchr(c->goal, '/');
  const char *last = slash ? slash + 1 : c->goal;
  if (strlen(last) > NAME_MAX) return errno = ENAMETOOLONG, fail_errno(c, path);
  strcpy(c->file_name, last);
  *(slash ? slash : c->goal) = 0;
  c->base = open_dirs(c, c->root, c->goal);
  return c->base < 0 ? -1 : 0;
}

static int finish_file(copier *c) {
  if (c->file < 0) return 0;
  const struct op_entry *e = &c->open_entry;
  if (c->segment < c->segment_count) return fail(c, "%s: content is missing", c->path);
  struct timespec times[2] = {{0, UTIME_OMIT}, {e->mtime_seconds, e->mtime_nanoseconds}};
  // After the content: a write would take set-id bits and capabilities away.
  if (fchmod(c->file, e->mode & 07777) || futimens(c->file, times)) return fail_errno(c, c->path);
  if (close(c->file)) return c->file = -1, fail_errno(c, c->path);
  c->file = -1;
  return 0;
}

// Whatever is no directory goes away for a file or link.
static int clear_place(copier *c, int dir, const char *name) {
  if (!unlinkat(dir, name, 0) || errno == ENOENT) return 0;
  struct stat st;
  if (!fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) && S_ISDIR(st.st_mode))
    return fail(c, "cannot replace to directory %s with file", c->path);
  return fail_errno(c, c->path);
}

static int put_xattrs(copier *c, int dir, const char *name, const struct op_entry *e, const char *p, const char *end) {
  if (!e->xattr_count) return 0;
  char place[64 + NAME_MAX];
  snprintf(place, sizeof place, "/proc/self/fd/%d/%s", dir, name);
  for (uint32_t i = 0; i < e->xattr_count; i++) {
    struct op_xattr x;
    if ((size_t)(end - p) < sizeof x) return fail(c, "%s: malformed attributes", c->path);
    memcpy(&x, p, sizeof x);
    p += sizeof x;
    char key[256];
    if ((uint64_t)(end - p) < (uint64_t)x.name_bytes + x.value_bytes || x.name_bytes >= sizeof key)
      return fail(c, "%s: malformed attributes", c->path);
    memcpy(key, p, x.name_bytes);
    key[x.name_bytes] = 0;
    if (lsetxattr(place, key, p + x.name_bytes, x.value_bytes, 0) && errno != ENOTSUP)
      return fail(c, "%s: attribute %s: %s", c->path, key, strerror(errno));
    p += x.name_bytes + x.value_bytes;
  }
  return 0;
}

static int remember_time(copier *c, const char *path, const struct op_entry *e) {
  size_t n = strlen(path) + 1;
  dir_time *t = malloc(sizeof *t + n);
  if (!t) return errno = ENOMEM, fail_errno(c, path);
  t->mtime = (struct timespec){e->mtime_seconds, e->mtime_nanoseconds};
  memcpy(t->path, path, n);
  t->next = c->times;
  c->times = t;
  return 0;
}

static int put_directory(copier *c, int dir, const char *name, const char *path, const struct op_entry *e, const char *x,
                         const char *end) {
  bool top = !*path;
  if (top && (c->target.flags & OP_TARGET_EXISTED)) return 0; // a directory that was there keeps its own
  if (!top && mkdirat(dir, name, 0700) && errno != EEXIST) return fail_errno(c, c->path);
  int fd = openat(dir, top ? "." : name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) {
    if (errno == ELOOP || errno == ENOTDIR) return fail(c, "cannot copy to non-directory: %s", c->path);
    return fail_errno(c, c->path);
  }
  int rc = set_owner(c, fd, c->path, e->uid, e->gid);
  if (!rc && fchmod(fd, e->mode & 07777)) rc = fail_errno(c, c->path);
  close(fd);
  if (!rc) rc = put_xattrs(c, dir, top ? "." : name, e, x, end);
  return rc ? rc : remember_time(c, path, e);
}

static int put_node(copier *c, int dir, const char *name, const struct op_entry *e, const char *link, const char *x,
                    const char *end) {
  if (clear_place(c, dir, name)) return -1;
  struct timespec times[2] = {{0, UTIME_OMIT}, {e->mtime_seconds, e->mtime_nanoseconds}};
  switch (e->type) {
  case OP_TYPE_FILE:
    c->file = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (c->file < 0) return fail_errno(c, c->path);
    if (set_owner(c, c->file, c->path, e->uid, e->gid)) return -1;
    if (ftruncate(c->file, (off_t)e->size)) return fail_errno(c, c->path);
    c->open_entry = *e;
    return put_xattrs(c, dir, name, e, x, end);
  case OP_TYPE_HARD_LINK: {
    char goal[PATH_MAX];
    snprintf(goal, sizeof goal, "%s", link);
    if (linkat(c->base, goal, dir, name, 0)) return fail(c, "%s: link to %s: %s", c->path, goal, strerror(errno));
    return 0;
  }
  case OP_TYPE_SYMLINK:
    if (symlinkat(link, dir, name)) return fail_errno(c, c->path);
    break;
  case OP_TYPE_FIFO:
    if (mkfifoat(dir, name, 0600)) return fail_errno(c, c->path);
    break;
  case OP_TYPE_CHARACTER_DEVICE:
  case OP_TYPE_BLOCK_DEVICE: {
    mode_t kind = e->type == OP_TYPE_BLOCK_DEVICE ? S_IFBLK : S_IFCHR;
    if (mknodat(dir, name, kind | 0600, makedev(e->major, e->minor))) return fail_errno(c, c->path);
    break;
  }
  default:
    return fail(c, "%s: unknown kind of entry", c->path);
  }
  if (fchownat(dir, name, e->uid, e->gid, AT_SYMLINK_NOFOLLOW)) return fail_errno(c, c->path);
  if (e->type != OP_TYPE_SYMLINK && fchmodat(dir, name, e->mode & 07777, 0)) return fail_errno(c, c->path);
  if (put_xattrs(c, dir, name, e, x, end)) return -1;
  return utimensat(dir, name, times, AT_SYMLINK_NOFOLLOW) ? fail_errno(c, c->path) : 0;
}

static bool is_plain_path(const char *path, size_t bytes) {
  if (memchr(path, 0, bytes)) return false;
  for (const char *p = path, *end = path + bytes; p < end;) {
    const char *slash = memchr(p, '/', (size_t)(end - p));
    size_t n = slash ? (size_t)(slash - p) : (size_t)(end - p);
    if (n == 0 || n > NAME_MAX || (n == 1 && p[0] == '.') || (n == 2 && p[0] == '.' && p[1] == '.')) return false;
    p += n + (slash != NULL);
    if (slash && p == end) return false;
  }
  return true;
}

static int put_entry(copier *c, const char *payload, uint32_t bytes) {
  if (finish_file(c)) return -1;
  struct op_entry e;
  if (c->base < 0 || bytes < sizeof e) return fail(c, "malformed entry record");
  memcpy(&e, payload, sizeof e);
  const char *p = payload + sizeof e, *end = payload + bytes;
  uint64_t fixed = (uint64_t)e.path_bytes + e.link_bytes + (uint64_t)e.segment_count * sizeof(struct op_segment);
  if (fixed > (uint64_t)(end - p) || e.path_bytes >= PATH_MAX || e.link_bytes >= PATH_MAX)
    return fail(c, "malformed entry record");
  char path[PATH_MAX], link[PATH_MAX];
  memcpy(path, p, e.path_bytes);
  path[e.path_bytes] = 0;
  if (!is_plain_path(path, e.path_bytes)) return fail(c, "malformed path in an entry record");
  p += e.path_bytes;
  memcpy(link, p, e.link_bytes);
  link[e.link_bytes] = 0;
  if (memchr(link, 0, e.link_bytes) || (e.type == OP_TYPE_HARD_LINK && !is_plain_path(link, e.link_bytes)))
    return fail(c, "malformed link in an entry record");
  p += e.link_bytes;

  bool single = !(c->target.flags & OP_TARGET_SOURCE_DIRECTORY);
  if (single && (*path || c->entries > 0 || e.type == OP_TYPE_DIRECTORY || e.type == OP_TYPE_HARD_LINK))
    return fail(c, "more than one file for a single target");
  if (!single && !*path && e.type != OP_TYPE_DIRECTORY) return fail(c, "the source is not a directory");
  int shown = snprintf(c->path, sizeof c->path, "/%s%s%s", c->goal, *c->goal ? "/" : "", single ? c->file_name : path);
  if (shown < 0) return fail(c, "malformed path in an entry record");

  free(c->segments);
  c->segments = NULL;
  c->segment = 0;
  c->segment_done = 0;
  c->segment_count = e.type == OP_TYPE_FILE ? e.segment_count : 0;
  if (c->segment_count) {
    size_t n = c->segment_count * sizeof *c->segments;
    if (!(c->segments = malloc(n))) return errno = ENOMEM, fail_errno(c, c->path);
    memcpy(c->segments, p, n);
  }
  p += e.segment_count * sizeof(struct op_segment);

  char parent[PATH_MAX], name[NAME_MAX + 1];
  strcpy(parent, single ? "" : path);
  char *slash = strrchr(parent, '/');
  const char *last = single ? c->file_name : slash ? slash + 1 : path;
  memcpy(name, last, strlen(last) + 1); // at most NAME_MAX: checked above
  *(slash ? slash : parent) = 0;
  int dir = open_dirs(c, c->base, parent);
  if (dir < 0) return -1;
  int rc = e.type == OP_TYPE_DIRECTORY ? put_directory(c, dir, name, path, &e, p, end)
                                       : put_node(c, dir, name, &e, link, p, end);
  close(dir);
  c->entries++;
  return rc;
}

static int put_data(copier *c, const char *data, uint32_t bytes) {
  while (bytes > 0) {
    if (c->file < 0 || c->segment >= c->segment_count) return fail(c, "content without a file");
    const struct op_segment *s = &c->segments[c->segment];
    uint64_t left = s->length - c->segment_done;
    size_t n = bytes < left ? bytes : (size_t)left;
    for (size_t done = 0; done < n;) {
      ssize_t wrote = pwrite(c->file, data + done, n - done, (off_t)(s->offset + c->segment_done + done));
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) return fail_errno(c, c->path);
      done += (size_t)wrote;
    }
    data += n;
    bytes -= (uint32_t)n;
    c->bytes += n;
    c->segment_done += n;
    if (c->segment_done == s->length) {
      c->segment++;
      c->segment_done = 0;
    }
  }
  return 0;
}

// Directory times last: every entry made in one changes its time.
static int put_times(copier *c) {
  for (dir_time *t = c->times; t; t = t->next) {
    struct timespec times[2] = {{0, UTIME_OMIT}, t->mtime};
    if (utimensat(c->base, *t->path ? t->path : ".", times, AT_SYMLINK_NOFOLLOW)) return fail_errno(c, t->path);
  }
  return 0;
}

static int run_stream(copier *c) {
  char magic[OP_STREAM_MAGIC_BYTES];
  if (read_exactly(c, magic, sizeof magic)) return -1;
  if (memcmp(magic, OP_STREAM_MAGIC, sizeof magic)) return fail(c, "not an op stream");
  char *payload = NULL;
  uint32_t room = 0;
  int rc = 0;
  for (bool first = true;; first = false) {
    uint32_t head[2];
    if ((rc = read_exactly(c, head, sizeof head))) break;
    if (head[1] > OP_MAX_PAYLOAD_BYTES) {
      rc = fail(c, "a record is too large");
      break;
    }
    if (head[1] > room) {
      char *more = realloc(payload, head[1]);
      if (!more) {
        errno = ENOMEM;
        rc = fail_errno(c, "record");
        break;
      }
      payload = more;
      room = head[1];
    }
    if ((rc = read_exactly(c, payload, head[1]))) break;
    if (first != (head[0] == OP_TARGET)) rc = fail(c, "a stream begins with its target, and has one");
    else if (head[0] == OP_TARGET) rc = start_target(c, payload, head[1]);
    else if (head[0] == OP_ENTRY) rc = put_entry(c, payload, head[1]);
    else if (head[0] == OP_DATA) rc = put_data(c, payload, head[1]);
    else if (head[0] == OP_END) {
      rc = finish_file(c);
      if (!rc) rc = put_times(c);
      break;
    } else rc = fail(c, "unknown record %u", head[0]);
    if (rc) break;
  }
  free(payload);
  return rc;
}

// ---- connection --------------------------------------------------------------------------------

static int listen_any(const char *address, int *port) {
  struct sockaddr_in a = {.sin_family = AF_INET};
  socklen_t n = sizeof a;
  if (inet_pton(AF_INET, address, &a.sin_addr) != 1) return -EINVAL;
  int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (s < 0) return -errno;
  if (bind(s, (struct sockaddr *)&a, sizeof a) || listen(s, 4) || getsockname(s, (struct sockaddr *)&a, &n)) {
    int rc = -errno;
    close(s);
    return rc;
  }
  *port = ntohs(a.sin_port);
  return s;
}

// The first connection that knows the token; others are cut.
static int accept_host(copier *c, int listener, const char *token) {
  size_t n = strlen(token);
  for (;;) {
    struct pollfd p = {.fd = listener, .events = POLLIN};
    int ready = poll(&p, 1, ACCEPT_MS);
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return fail(c, "nobody connected within %d s", ACCEPT_MS / 1000);
    c->sock = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (c->sock < 0) continue;
    char said[TOKEN_MAX + 1];
    if (!read_exactly(c, said, n + 1) && said[n] == '\n') {
      unsigned char difference = 0;
      for (size_t i = 0; i < n; i++) difference |= (unsigned char)(said[i] ^ token[i]);
      if (!difference) return 0;
    }
    c->error[0] = 0;
    close(c->sock);
    c->sock = -1;
  }
}

static void answer(copier *c, int rc) {
  char line[1200];
  if (rc) {
    for (char *p = c->error; *p; p++)
      if (*p == '\n' || *p == '\r') *p = ' ';
    snprintf(line, sizeof line, "error %s\n", c->error);
  } else {
    snprintf(line, sizeof line, "ok %llu %llu\n", (unsigned long long)c->entries, (unsigned long long)c->bytes);
  }
  size_t bytes = strlen(line), done = 0;
  while (done < bytes) {
    ssize_t n = send(c->sock, line + done, bytes - done, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break; // the host is gone: nobody to tell
    done += (size_t)n;
  }
  shutdown(c->sock, SHUT_WR);
  // What the host still sends after an error is read and dropped, so that the answer is not lost in a reset.
  char drop[65536];
  struct pollfd p = {.fd = c->sock, .events = POLLIN};
  while (poll(&p, 1, 5000) > 0 && recv(c->sock, drop, sizeof drop, 0) > 0) {
  }
}

int copy_main(int argc, char **argv) {
  const char *root = "/", *address = "0.0.0.0";
  for (int i = 1; i < argc; i++) {
    if (i + 1 < argc && !strcmp(argv[i], "--root")) root = argv[++i];
    else if (i + 1 < argc && !strcmp(argv[i], "--address")) address = argv[++i];
    else {
      fprintf(stderr, "usage: envd copy [--root DIR] [--address ADDRESS]\n");
      return 2;
    }
  }
  const char *token = getenv("AENV_COPY_TOKEN");
  if (!token || strlen(token) < 16 || strlen(token) > TOKEN_MAX) {
    fprintf(stderr, "envd copy: AENV_COPY_TOKEN is missing\n");
    return 2;
  }
  umask(0);
  copier *c = calloc(1, sizeof *c);
  if (!c) return 1;
  c->sock = c->base = c->file = -1;
  int port = 0, rc = 0;
  c->root = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
  int listener = c->root < 0 ? -errno : listen_any(address, &port);
  if (listener < 0) {
    fprintf(stderr, "envd copy: %s\n", strerror(-listener));
    rc = 1;
  } else {
    printf("port %d\n", port);
    fflush(stdout);
    rc = accept_host(c, listener, token);
    close(listener);
    if (!rc) {
      rc = run_stream(c);
      answer(c, rc);
    }
    if (rc) fprintf(stderr, "envd copy: %s\n", c->error);
  }
  for (dir_time *t = c->times; t;) {
    dir_time *next = t->next;
    free(t);
    t = next;
  }
  free(c->segments);
  for (int *fd = (int[]){c->sock, c->root, c->base, c->file, -2}; *fd != -2; fd++)
    if (*fd >= 0) close(*fd);
  free(c);
  return rc ? 1 : 0;
}
