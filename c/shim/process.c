#include "process.h"

#include <errno.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int32_t aenv_pidfd_open(int32_t pid) {
  long fd = syscall(SYS_pidfd_open, pid, 0);
  return fd < 0 ? -errno : (int32_t)fd;
}

int32_t aenv_pidfd_signal(int32_t pidfd, int32_t signal) {
  return syscall(SYS_pidfd_send_signal, pidfd, signal, NULL, 0) == 0 ? 0 : -errno;
}

int32_t aenv_mkfifo(const char *path, uint32_t mode) {
  return mkfifo(path, (mode_t)mode) == 0 ? 0 : -errno;
}
