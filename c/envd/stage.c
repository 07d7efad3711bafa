#include "stage.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

// The kernel's `struct statx` (Linux 5.8 and newer, include/uapi/linux/stat.h) as far as it is read here: C libraries have
// none, a shorter one, or one that does not go with the kernel's header.
enum { MORE_MNT_ID = 0x1000, MORE_ATTR_MOUNT_ROOT = 0x2000 };
struct more {
  uint32_t mask, blksize;
  uint64_t attributes;
  uint64_t unused[16];
  uint64_t mnt_id;
  uint64_t spare[13];
};
_Static_assert(offsetof(struct more, mnt_id) == 0x90 && sizeof(struct more) == 0x100, "the kernel's layout");

static int stat_more(const char *path, unsigned mask, struct more *out) {
  return syscall(SYS_statx, AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, mask, out) ? -errno : 0;
}

// The top directory of the mount that dir is on: an unnamed file waiting there bothers no watch of the user's.
static void mount_top(char *dir) {
  struct more here, up;
  if (stat_more(dir, MORE_MNT_ID, &here) || !(here.mask & MORE_MNT_ID)) return;
  while (dir[1]) {
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", dir);
    char *slash = strrchr(parent, '/');
    if (!slash) return;
    slash[slash == parent] = 0;
    if (stat_more(parent, MORE_MNT_ID, &up) || up.mnt_id != here.mnt_id) return;
    strcpy(dir, parent);
  }
}

static int open_named(stage *s, arena *a) {
  uint64_t rnd;
  for (int tries = 0; tries < 8; tries++) {
    if (getrandom(&rnd, sizeof rnd, GRND_NONBLOCK) != (ssize_t)sizeof rnd) return -EAGAIN;
    char *name = arena_printf(a, "%s/" STAGE_PREFIX "%016llx", s->dir, (unsigned long long)rnd);
    if (!name) return -ENOMEM;
    s->fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (s->fd >= 0) {
      s->named = name;
      return 0;
    }
    if (errno != EEXIST) return -errno;
  }
  return -EEXIST;
}

// Best effort: what the old file had besides its content.
static void keep_xattrs(const char *from, int to) {
  char names[4096], value[4096];
  ssize_t n = listxattr(from, names, sizeof names);
  for (char *p = names; n > 0 && p < names + n; p += strlen(p) + 1) {
    if (!strncmp(p, "user.e2b.", 9) || !strcmp(p, "security.capability")) continue;
    ssize_t len = getxattr(from, p, value, sizeof value);
    if (len >= 0 && fsetxattr(to, p, value, (size_t)len, 0) && errno == ENOSPC) return;
  }
}

int stage_open(stage *s, arena *a, const char *path, const account *u) {
  struct stat st;
  struct more sx;
  char real[PATH_MAX];
  mode_t mode = 0644;
  bool exists = !stat(path, &st);
  *s = (stage){.fd = -1};
  if (exists) {
    if (!realpath(path, real)) return -errno;
    s->path = arena_strndup(a, real, strlen(real));
    mode = st.st_mode & 0777;
    s->in_place = st.st_nlink > 1 || (!stat_more(real, 0, &sx) && sx.attributes & MORE_ATTR_MOUNT_ROOT);
  } else {
    s->path = arena_strndup(a, path, strlen(path));
    s->in_place = !lstat(path, &st); // a link to nothing
  }
  if (!s->path) return -ENOMEM;
  int rc = 0;
  if (s->in_place) {
    s->fd = open(s->path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0666);
    if (s->fd < 0) return -errno;
  } else {
    char *parent = path_join(a, s->path, "..");
    if (!parent) return -ENOMEM;
    if (!realpath(parent, real)) return -errno;
    parent = arena_strndup(a, real, strlen(real));
    mount_top(real);
    s->dir = arena_strndup(a, real, strlen(real));
    if (!parent || !s->dir) return -ENOMEM;
    s->fd = open(s->dir, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (s->fd < 0) {
      s->dir = parent;
      s->fd = open(s->dir, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    }
    if (s->fd < 0) rc = open_named(s, a); // tells also why nothing can be made there at all
    // Where no new file can be there can be one to write to: /proc/sys, /sys, a mounted device file.
    if (rc && exists && rc != -ENOSPC && rc != -EDQUOT) {
      s->fd = open(s->path, O_WRONLY | O_TRUNC | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
      if (s->fd < 0) return rc;
      s->in_place = true;
      rc = 0;
    }
  }
  // Files of the kernel have the owner they have.
  if (!rc && fchown(s->fd, u->uid, u->gid) && !(exists && s->in_place && errno == EPERM)) rc = -errno;
  if (!rc && !s->in_place && exists) keep_xattrs(s->path, s->fd);
  if (!rc && !s->in_place && fchmod(s->fd, mode)) rc = -errno;
  if (rc) stage_drop(s);
  return rc;
}

int stage_write(stage *s, const uint8_t *p, size_t n) {
  enum { BLOCK = 4096 };
  while (n) {
    // As many bytes as are of one kind: zeros up to the block's end, or anything else.
    size_t run = 0;
    bool zero = false;
    while (run < n) {
      size_t k = BLOCK - (size_t)((uint64_t)(s->size + (off_t)run) % BLOCK);
      if (k > n - run) k = n - run;
      bool z = !p[run] && !memcmp(p + run, p + run + 1, k - 1);
      if (run && z != zero) break;
      zero = z;
      run += k;
    }
    for (size_t done = 0; !zero && done < run;) {
      ssize_t w = pwrite(s->fd, p + done, run - done, s->size + (off_t)done);
      if (w < 0 && errno == EINTR) continue;
      if (w < 0) return -errno;
      done += (size_t)w;
    }
    s->holes |= zero;
    s->size += (off_t)run;
    p += run;
    n -= run;
  }
  return 0;
}

// A name for the unnamed file. 0, or -errno.
static int link_as(int fd, const char *path) {
  if (!linkat(fd, "", AT_FDCWD, path, AT_EMPTY_PATH)) return 0;
  if (errno == EEXIST) return -EEXIST;
  char self[64];
  snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
  return linkat(AT_FDCWD, self, AT_FDCWD, path, AT_SYMLINK_FOLLOW) ? -errno : 0;
}

int stage_commit(stage *s, void (*replacing)(void *arg, const char *path), void *arg) {
  int rc = s->holes && ftruncate(s->fd, s->size) ? -errno : 0; // the last one has no end yet
  if (!rc && !s->in_place) {
    rc = s->named ? -EEXIST : link_as(s->fd, s->path);
    if (rc == -EEXIST) { // there is one already: a second name takes its place in one step
      char tmp[PATH_MAX];
      rc = 0;
      if (s->named)
        snprintf(tmp, sizeof tmp, "%s", s->named);
      else
        for (int tries = 0; tries < 8; tries++) {
          uint64_t rnd;
          if (getrandom(&rnd, sizeof rnd, GRND_NONBLOCK) != (ssize_t)sizeof rnd) rnd = (uint64_t)mono_ms() + (uint64_t)tries;
          snprintf(tmp, sizeof tmp, "%s/" STAGE_PREFIX "%016llx", s->dir, (unsigned long long)rnd);
          if ((rc = link_as(s->fd, tmp)) != -EEXIST) break;
        }
      if (!rc && replacing) replacing(arg, s->path);
      if (!rc && rename(tmp, s->path)) {
        rc = -errno;
        if (!s->named) unlink(tmp);
      }
      if (!rc) s->named = NULL;
    }
    // Whoever watches the directory has seen the name appear, but no write under it. The time of change alone
    // raises that event and touches nothing that a quick other writer could have done meanwhile.
    struct timespec now[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_NOW}};
    if (!rc && utimensat(AT_FDCWD, s->path, now, AT_SYMLINK_NOFOLLOW) && errno != ENOENT) rc = -errno;
  }
  if (s->fd >= 0 && close(s->fd) && !rc) rc = -errno;
  s->fd = -1;
  stage_drop(s);
  return rc;
}

void stage_drop(stage *s) {
  if (s->fd >= 0) close(s->fd);
  if (s->named) unlink(s->named);
  *s = (stage){.fd = -1};
}
