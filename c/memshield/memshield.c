/*
 * Preloaded into QEMU: a guest that gives memory back must not tear the file its memory is mapped from.
 *
 * QEMU gives a page of file-backed memory back in two steps: it punches a hole into the file, then drops the page of
 * its mapping (ram_block_discard_range). Ours is mapped privately and shared by all clones of a guest, so the first
 * step would take their memory away, too; the second alone is all that is wanted: the page's memory is free, and
 * reads, whose result no guest may rely on, find what the file holds there.
 *
 * AENV_MEMORY_FILE names the file. It is opened read-only whatever is asked for, so nothing can be written to it, and
 * holes punched into it are reported as made. All other files are left alone. AENV_MEMSHIELD_PROBE=1: says that
 * it was loaded, on standard output; the programs on the way to QEMU are told nothing.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define PUNCH_HOLE 0x02

static const char *memory_file;
static struct stat memory;

__attribute__((constructor)) static void start(void) {
  static const char said[] = "aenv-memshield\n";
  const char *file = getenv("AENV_MEMORY_FILE"), *probe = getenv("AENV_MEMSHIELD_PROBE");
  if (file != NULL && stat(file, &memory) == 0) memory_file = file;
  if (probe != NULL && strcmp(probe, "1") == 0 && write(STDOUT_FILENO, said, sizeof said - 1) < 0) return;
}

/* By name, or through another name of the same file. */
static int is_memory(const char *path) {
  struct stat st;
  if (memory_file == NULL) return 0;
  if (strcmp(path, memory_file) == 0) return 1;
  return stat(path, &st) == 0 && st.st_dev == memory.st_dev && st.st_ino == memory.st_ino;
}

static int open_at(int dir, const char *path, int flags, mode_t mode) {
  if ((flags & O_ACCMODE) != O_RDONLY && path != NULL && is_memory(path))
    flags = (flags & ~(O_ACCMODE | O_TRUNC | O_CREAT)) | O_RDONLY;
  return (int)syscall(SYS_openat, dir, path, flags, mode);
}

static mode_t mode_of(int flags, va_list args) {
  return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(args, mode_t) : 0;
}

#define OPEN(name)                                 \
  EXPORT int name(const char *path, int flags, ...); \
  int name(const char *path, int flags, ...) {     \
    va_list args;                                  \
    va_start(args, flags);                         \
    mode_t mode = mode_of(flags, args);            \
    va_end(args);                                  \
    return open_at(AT_FDCWD, path, flags, mode);   \
  }
OPEN(open)
OPEN(open64)

/* What calls of open() become in fortified programs where the flags are not known beforehand. */
EXPORT int __open_2(const char *path, int flags);
EXPORT int __open64_2(const char *path, int flags);
int __open_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }

static int make_room(int fd, int mode, off_t offset, off_t length) {
  struct stat st;
  if ((mode & PUNCH_HOLE) != 0 && memory_file != NULL && fstat(fd, &st) == 0 && st.st_dev == memory.st_dev &&
      st.st_ino == memory.st_ino)
    return 0;
  return (int)syscall(SYS_fallocate, fd, mode, offset, length);
}

EXPORT int fallocate(int fd, int mode, off_t offset, off_t length);
EXPORT int fallocate64(int fd, int mode, off64_t offset, off64_t length);
int fallocate(int fd, int mode, off_t offset, off_t length) { return make_room(fd, mode, offset, length); }
int fallocate64(int fd, int mode, off64_t offset, off64_t length) { return make_room(fd, mode, offset, length); }
