// `envd pack PATH NAME`: writes what is at PATH as a tar to standard output, its members named NAME and NAME/...
// The counterpart of `envd copy` for COPY --from: needs nothing of the image it runs in.
//
// Format: POSIX pax (IEEE 1003.1, pax interchange format), sparse files as GNU "1.0", attributes as SCHILY.xattr.
// A link at PATH is followed inside the root, links below it are kept. Other mounts below PATH are empty directories,
// sockets are left out. Names of one inode are hard links, with --copies files of their own.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "pack.h"

enum {
  BLOCK = 512,
  OUT_BYTES = 256 * 1024,
  MAX_SEGMENTS = 64 * 1024,
  MAX_XATTR_BYTES = 64 * 1024,
  // Two-digit numbers of ustar's octal fields.
  MAX_OCTAL_ID = 07777777,
};
#define MAX_OCTAL_SIZE 077777777777ULL

typedef struct {
  char *data;
  size_t bytes, room;
} text;

typedef struct {
  ino_t inode;
  char *name;
} seen;

typedef struct {
  int root;
  bool copies;
  dev_t device;
  char out[OUT_BYTES];
  size_t used;
  seen *links; // open addressing, a power of two
  size_t link_count, link_room;
  char name[PATH_MAX]; // of the member at hand
  char error[PATH_MAX + 256];
} packer;

typedef struct {
  uint64_t offset, length;
} segment;

__attribute__((format(printf, 2, 3))) static int fail(packer *p, const char *format, ...) {
  if (!p->error[0]) {
    va_list args;
    va_start(args, format);
    vsnprintf(p->error, sizeof p->error, format, args);
    va_end(args);
  }
  return -1;
}

static int fail_errno(packer *p, const char *what) { return fail(p, "%s: %s", what, strerror(errno)); }

// ---- output ------------------------------------------------------------------------------------

static int flush(packer *p) {
  for (size_t done = 0; done < p->used;) {
    ssize_t n = write(STDOUT_FILENO, p->out + done, p->used - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail_errno(p, "output");
    done += (size_t)n;
  }
  p->used = 0;
  return 0;
}

static int emit(packer *p, const void *data, size_t bytes) {
  const char *from = data;
  while (bytes > 0) {
    if (p->used == sizeof p->out && flush(p)) return -1;
    size_t n = sizeof p->out - p->used < bytes ? sizeof p->out - p->used : bytes;
    memcpy(p->out + p->used, from, n);
    p->used += n;
    from += n;
    bytes -= n;
  }
  return 0;
}

static int emit_zeros(packer *p, uint64_t bytes) {
  static const char zeros[4096];
  for (; bytes > 0;) {
    size_t n = bytes < sizeof zeros ? (size_t)bytes : sizeof zeros;
    if (emit(p, zeros, n)) return -1;
    bytes -= n;
  }
  return 0;
}

static int pad(packer *p, uint64_t bytes) { return emit_zeros(p, (BLOCK - bytes % BLOCK) % BLOCK); }

static int append(packer *p, text *t, const void *data, size_t bytes) {
  if (t->room - t->bytes < bytes) {
    size_t room = (t->bytes + bytes) * 2 + 256;
    char *more = realloc(t->data, room);
    if (!more) return errno = ENOMEM, fail_errno(p, p->name);
    t->data = more;
    t->room = room;
  }
  memcpy(t->data + t->bytes, data, bytes);
  t->bytes += bytes;
  return 0;
}

// `LENGTH KEY=VALUE\n`, the length counting itself.
static int record(packer *p, text *t, const char *key, const void *value, size_t value_bytes) {
  size_t rest = 1 + strlen(key) + 1 + value_bytes + 1, total = rest;
  char digits[24];
  for (;;) {
    int n = snprintf(digits, sizeof digits, "%zu", total);
    if (rest + (size_t)n == total) break;
    total = rest + (size_t)n;
  }
  return append(p, t, digits, strlen(digits)) || append(p, t, " ", 1) || append(p, t, key, strlen(key)) ||
         append(p, t, "=", 1) || append(p, t, value, value_bytes) || append(p, t, "\n", 1);
}

static int number_record(packer *p, text *t, const char *key, uint64_t value) {
  char digits[24];
  int n = snprintf(digits, sizeof digits, "%llu", (unsigned long long)value);
  return record(p, t, key, digits, (size_t)n);
}

// ---- headers -----------------------------------------------------------------------------------

static void octal(char *field, size_t bytes, uint64_t value) {
  char digits[32];
  snprintf(digits, sizeof digits, "%0*llo", (int)bytes - 1, (unsigned long long)value);
  memcpy(field, digits, bytes);
}

static int emit_header(packer *p, const char *name, char type, const struct stat *st, uint64_t size, const char *link) {
  char h[BLOCK] = {0};
  size_t name_bytes = strlen(name), link_bytes = strlen(link);
  memcpy(h, name, name_bytes < 100 ? name_bytes : 100);
  octal(h + 100, 8, st->st_mode & 07777);
  octal(h + 108, 8, st->st_uid > MAX_OCTAL_ID ? 0 : st->st_uid);
  octal(h + 116, 8, st->st_gid > MAX_OCTAL_ID ? 0 : st->st_gid);
  octal(h + 124, 12, size > MAX_OCTAL_SIZE ? 0 : size);
  octal(h + 136, 12, st->st_mtim.tv_sec < 0 || (uint64_t)st->st_mtim.tv_sec > MAX_OCTAL_SIZE ? 0 : (uint64_t)st->st_mtim.tv_sec);
  memset(h + 148, ' ', 8);
  h[156] = type;
  memcpy(h + 157, link, link_bytes < 100 ? link_bytes : 100);
  memcpy(h + 257, "ustar\0" "00", 8);
  if (type == '3' || type == '4') {
    octal(h + 329, 8, major(st->st_rdev));
    octal(h + 337, 8, minor(st->st_rdev));
  }
  unsigned sum = 0;
  for (size_t i = 0; i < sizeof h; i++) sum += (unsigned char)h[i];
  snprintf(h + 148, 8, "%06o", sum);
  h[155] = ' ';
  return emit(p, h, sizeof h);
}

// The extended header where one is needed, then the member's own.
static int emit_member(packer *p, char type, const struct stat *st, uint64_t size, const char *link, text *extra,
                       const char *shown_name) {
  int rc = 0;
  if (strlen(shown_name) > 100) rc = record(p, extra, "path", shown_name, strlen(shown_name));
  if (!rc && strlen(link) > 100) rc = record(p, extra, "linkpath", link, strlen(link));
  if (!rc && size > MAX_OCTAL_SIZE) rc = number_record(p, extra, "size", size);
  if (!rc && st->st_uid > MAX_OCTAL_ID) rc = number_record(p, extra, "uid", st->st_uid);
  if (!rc && st->st_gid > MAX_OCTAL_ID) rc = number_record(p, extra, "gid", st->st_gid);
  int64_t seconds = st->st_mtim.tv_sec;
  long nanoseconds = st->st_mtim.tv_nsec;
  if (!rc && (nanoseconds || seconds < 0 || (uint64_t)seconds > MAX_OCTAL_SIZE)) {
    // Before 1970 the fraction is written away from zero: -0.5 is half a second earlier than 0.
    bool negative = seconds < 0;
    if (negative && nanoseconds) seconds++, nanoseconds = 1000000000L - nanoseconds;
    char time[48];
    int n = snprintf(time, sizeof time, "%s%lld.%09ld", negative ? "-" : "", (long long)(negative ? -seconds : seconds), nanoseconds);
    rc = record(p, extra, "mtime", time, (size_t)n);
  }
  if (!rc && extra->bytes) {
    struct stat plain = {.st_mode = 0644};
    rc = emit_header(p, "pax", 'x', &plain, extra->bytes, "") || emit(p, extra->data, extra->bytes) || pad(p, extra->bytes);
  }
  return rc ? rc : emit_header(p, shown_name, type, st, size, link);
}

static int add_xattrs(packer *p, int dir, const char *name, text *extra) {
  char place[64 + NAME_MAX];
  snprintf(place, sizeof place, "/proc/self/fd/%d/%s", dir, name);
  char *names = malloc(MAX_XATTR_BYTES), *value = malloc(MAX_XATTR_BYTES);
  int rc = names && value ? 0 : (errno = ENOMEM, fail_errno(p, p->name));
  ssize_t bytes = rc ? 0 : llistxattr(place, names, MAX_XATTR_BYTES);
  if (bytes < 0 && errno != ENOTSUP) rc = fail_errno(p, p->name);
  for (ssize_t at = 0; !rc && at < bytes; at += (ssize_t)strlen(names + at) + 1) {
    ssize_t n = lgetxattr(place, names + at, value, MAX_XATTR_BYTES);
    if (n < 0 && (errno == ENODATA || errno == ENOTSUP)) continue;
    if (n < 0) {
      rc = fail_errno(p, p->name);
      break;
    }
    char key[300];
    snprintf(key, sizeof key, "SCHILY.xattr.%s", names + at);
    rc = record(p, extra, key, value, (size_t)n);
  }
  free(names);
  free(value);
  return rc;
}

// ---- links -------------------------------------------------------------------------------------

static size_t slot_of(const packer *p, ino_t inode) {
  size_t i = (size_t)(inode * 0x9e3779b97f4a7c15ULL) & (p->link_room - 1);
  while (p->links[i].name && p->links[i].inode != inode) i = (i + 1) & (p->link_room - 1);
  return i;
}

static int grow_links(packer *p) {
  if (p->link_room && p->link_count < p->link_room / 2) return 0;
  seen *old = p->links;
  size_t old_room = p->link_room, room = old_room ? old_room * 2 : 1024;
  seen *more = calloc(room, sizeof *more);
  if (!more) return errno = ENOMEM, fail_errno(p, p->name);
  p->links = more;
  p->link_room = room;
  for (size_t i = 0; i < old_room; i++)
    if (old[i].name) more[slot_of(p, old[i].inode)] = old[i];
  free(old);
  return 0;
}

// The earlier name of the same inode in `*earlier`, or NULL, and then this one is remembered.
static int known_link(packer *p, const struct stat *st, const char **earlier) {
  *earlier = NULL;
  if (st->st_nlink < 2 || p->copies) return 0;
  if (grow_links(p)) return -1;
  seen *s = &p->links[slot_of(p, st->st_ino)];
  if (s->name) {
    *earlier = s->name;
    return 0;
  }
  s->inode = st->st_ino;
  if (!(s->name = strdup(p->name))) return errno = ENOMEM, fail_errno(p, p->name);
  p->link_count++;
  return 0;
}

// ---- members -----------------------------------------------------------------------------------

static int emit_range(packer *p, int fd, uint64_t offset, uint64_t length) {
  while (length > 0) {
    if (p->used == sizeof p->out && flush(p)) return -1;
    size_t room = sizeof p->out - p->used, n = room < length ? room : (size_t)length;
    ssize_t got = pread(fd, p->out + p->used, n, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_errno(p, p->name);
    if (got == 0) return emit_zeros(p, length); // it became shorter meanwhile
    p->used += (size_t)got;
    offset += (uint64_t)got;
    length -= (uint64_t)got;
  }
  return 0;
}

// Where the file has data; -1 when that cannot be told or is not worth it.
static ssize_t data_segments(int fd, uint64_t size, segment *out) {
  size_t count = 0;
  for (off_t at = 0; (uint64_t)at < size;) {
    off_t from = lseek(fd, at, SEEK_DATA);
    if (from < 0 && errno == ENXIO) break;
    off_t to = from < 0 ? -1 : lseek(fd, from, SEEK_HOLE);
    if (to < 0 || count == MAX_SEGMENTS) return -1;
    uint64_t end = (uint64_t)to < size ? (uint64_t)to : size;
    if (end > (uint64_t)from) out[count++] = (segment){(uint64_t)from, end - (uint64_t)from};
    at = to;
  }
  return (ssize_t)count;
}

static int emit_sparse(packer *p, int fd, const struct stat *st, text *extra, const segment *segments, size_t count) {
  text map = {0};
  char line[64];
  uint64_t stored = 0;
  int rc = append(p, &map, line, (size_t)snprintf(line, sizeof line, "%zu\n", count + 1));
  for (size_t i = 0; !rc && i < count; i++) {
    int n = snprintf(line, sizeof line, "%llu\n%llu\n", (unsigned long long)segments[i].offset,
                     (unsigned long long)segments[i].length);
    rc = append(p, &map, line, (size_t)n);
    stored += segments[i].length;
  }
  // The last one tells where the file ends, should it end with a hole.
  if (!rc) {
    int n = snprintf(line, sizeof line, "%llu\n0\n", (unsigned long long)st->st_size);
    rc = append(p, &map, line, (size_t)n);
  }
  uint64_t map_bytes = (map.bytes + BLOCK - 1) / BLOCK * BLOCK;
  if (!rc)
    rc = record(p, extra, "GNU.sparse.major", "1", 1) || record(p, extra, "GNU.sparse.minor", "0", 1) ||
         record(p, extra, "GNU.sparse.name", p->name, strlen(p->name)) ||
         number_record(p, extra, "GNU.sparse.realsize", (uint64_t)st->st_size) ||
         emit_member(p, '0', st, map_bytes + stored, "", extra, p->name) || emit(p, map.data, map.bytes) ||
         pad(p, map.bytes);
  for (size_t i = 0; !rc && i < count; i++) rc = emit_range(p, fd, segments[i].offset, segments[i].length);
  free(map.data);
  return rc ? rc : pad(p, stored);
}

static int pack_file(packer *p, int dir, const char *name, const struct stat *st, text *extra) {
  int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return fail_errno(p, p->name);
  int rc = 0;
  bool done = false;
  if (st->st_size > 65536 && (uint64_t)st->st_blocks * 512 < (uint64_t)st->st_size) {
    segment *segments = malloc(MAX_SEGMENTS * sizeof *segments);
    if (!segments) rc = (errno = ENOMEM, fail_errno(p, p->name));
    ssize_t count = rc ? -1 : data_segments(fd, (uint64_t)st->st_size, segments);
    if (count >= 0) {
      rc = emit_sparse(p, fd, st, extra, segments, (size_t)count);
      done = true;
    }
    free(segments);
  }
  if (!rc && !done) {
    uint64_t size = (uint64_t)st->st_size;
    rc = emit_member(p, '0', st, size, "", extra, p->name) || emit_range(p, fd, 0, size) || pad(p, size);
  }
  close(fd);
  return rc;
}

static int pack_at(packer *p, int dir, const char *name);

// Names first, then the work: one descriptor per level, whatever the size of the directory.
static int pack_children(packer *p, int fd) {
  int again = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *d = again < 0 ? NULL : fdopendir(again);
  if (!d) {
    int rc = fail_errno(p, p->name);
    if (again >= 0) close(again);
    return rc;
  }
  text names = {0};
  int rc = 0;
  for (struct dirent *e; !rc;) {
    errno = 0;
    if (!(e = readdir(d))) {
      if (errno) rc = fail_errno(p, p->name);
      break;
    }
    if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) rc = append(p, &names, e->d_name, strlen(e->d_name) + 1);
  }
  closedir(d);
  size_t bytes = strlen(p->name);
  for (size_t at = 0; !rc && at < names.bytes; at += strlen(names.data + at) + 1) {
    const char *child = names.data + at;
    if (bytes + strlen(child) + 2 > sizeof p->name) {
      errno = ENAMETOOLONG;
      rc = fail_errno(p, p->name);
      break;
    }
    snprintf(p->name + bytes, sizeof p->name - bytes, "%s%s", bytes ? "/" : "", child);
    rc = pack_at(p, fd, child);
    p->name[bytes] = 0;
  }
  free(names.data);
  return rc;
}

static int pack_at(packer *p, int dir, const char *name) {
  struct stat st;
  if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW)) return errno == ENOENT ? 0 : fail_errno(p, p->name);
  if (S_ISSOCK(st.st_mode)) return 0;
  const char *earlier = NULL;
  if (!S_ISDIR(st.st_mode) && known_link(p, &st, &earlier)) return -1;
  text extra = {0};
  if (earlier) {
    int rc = emit_member(p, '1', &st, 0, earlier, &extra, p->name);
    free(extra.data);
    return rc;
  }
  char link[PATH_MAX] = "";
  int rc = add_xattrs(p, dir, name, &extra);
  if (rc) {
    free(extra.data);
    return rc;
  }
  switch (st.st_mode & S_IFMT) {
  case S_IFREG:
    rc = pack_file(p, dir, name, &st, &extra);
    break;
  case S_IFLNK: {
    ssize_t n = readlinkat(dir, name, link, sizeof link - 1);
    if (n < 0) rc = fail_errno(p, p->name);
    else link[n] = 0;
    if (!rc) rc = emit_member(p, '2', &st, 0, link, &extra, p->name);
    break;
  }
  case S_IFCHR:
    rc = emit_member(p, '3', &st, 0, "", &extra, p->name);
    break;
  case S_IFBLK:
    rc = emit_member(p, '4', &st, 0, "", &extra, p->name);
    break;
  case S_IFIFO:
    rc = emit_member(p, '6', &st, 0, "", &extra, p->name);
    break;
  default: {
    char shown[PATH_MAX + 2];
    snprintf(shown, sizeof shown, "%s/", *p->name ? p->name : ".");
    rc = emit_member(p, '5', &st, 0, "", &extra, shown);
    if (rc || st.st_dev != p->device) break; // another mount: what is in it is not the image's
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    rc = fd < 0 ? fail_errno(p, p->name) : pack_children(p, fd);
    if (fd >= 0) close(fd);
  }
  }
  free(extra.data);
  return rc;
}

// The directory and the last name of what is at `path`, links followed inside the root.
static int locate(packer *p, const char *path, int *dir, char last[PATH_MAX]) {
  struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT};
  int fd = (int)syscall(SYS_openat2, p->root, path, &how, sizeof how);
  if (fd < 0) {
    bool missing = errno == ENOENT || errno == ENOTDIR;
    fail_errno(p, path);
    return missing ? 3 : 1;
  }
  struct stat st;
  if (fstat(fd, &st)) {
    fail_errno(p, path);
    close(fd);
    return 1;
  }
  p->device = st.st_dev;
  if (S_ISDIR(st.st_mode)) {
    *dir = fd;
    strcpy(last, ".");
    return 0;
  }
  // A file: by its real name, which the kernel tells.
  char place[64];
  snprintf(place, sizeof place, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(place, last, PATH_MAX - 1);
  close(fd);
  if (n <= 0) {
    fail_errno(p, path);
    return 1;
  }
  last[n] = 0;
  char *slash = strrchr(last, '/');
  *slash = 0;
  *dir = open(*last ? last : "/", O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (*dir < 0) {
    fail_errno(p, path);
    return 1;
  }
  memmove(last, slash + 1, strlen(slash + 1) + 1);
  return 0;
}

int pack_main(int argc, char **argv) {
  const char *root = "/", *words[2] = {NULL, NULL};
  packer *p = calloc(1, sizeof *p);
  if (!p) return 1;
  int given = 0;
  bool options = true, bad = false;
  for (int i = 1; i < argc; i++) {
    if (options && !strcmp(argv[i], "--")) options = false;
    else if (options && i + 1 < argc && !strcmp(argv[i], "--root")) root = argv[++i];
    else if (options && !strcmp(argv[i], "--copies")) p->copies = true;
    else if ((options && argv[i][0] == '-') || given == 2) bad = true;
    else words[given++] = argv[i];
  }
  if (bad || given != 2 || strlen(words[1]) >= sizeof p->name) {
    fprintf(stderr, "usage: envd pack [--root DIR] [--copies] [--] PATH NAME\n");
    free(p);
    return 2;
  }
  struct rlimit files;
  if (!getrlimit(RLIMIT_NOFILE, &files)) {
    files.rlim_cur = files.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &files); // with fewer, very deep trees fail with the reason
  }
  strcpy(p->name, words[1]);
  int dir = -1, rc;
  char last[PATH_MAX];
  p->root = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (p->root < 0) {
    fail_errno(p, root);
    rc = 1;
  } else {
    rc = locate(p, words[0], &dir, last);
  }
  if (!rc) rc = pack_at(p, dir, last) || emit_zeros(p, 2 * BLOCK) || flush(p) ? 1 : 0;
  if (rc) fprintf(stderr, "envd pack: %s\n", p->error);
  for (size_t i = 0; i < p->link_room; i++) free(p->links[i].name);
  free(p->links);
  if (dir >= 0) close(dir);
  if (p->root >= 0) close(p->root);
  free(p);
  return rc;
}
