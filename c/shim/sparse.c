#include "sparse.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

int32_t aenv_clone_file(int32_t from_fd, int32_t to_fd) {
  return ioctl(to_fd, FICLONE, from_fd) == 0 ? 0 : -errno;
}

/* For file systems where copy_file_range is refused. Returns bytes copied or -errno. */
static int64_t copy_by_hand(int from_fd, int to_fd, off_t offset, size_t length) {
  char buffer[65536];
  ssize_t got = pread(from_fd, buffer, length < sizeof buffer ? length : sizeof buffer, offset);
  if (got < 0) return -errno;
  for (ssize_t done = 0; done < got;) {
    ssize_t put = pwrite(to_fd, buffer + done, (size_t)(got - done), offset + done);
    if (put < 0 && errno != EINTR) return -errno;
    if (put > 0) done += put;
  }
  return got;
}

int32_t aenv_copy_sparse(int32_t from_fd, int32_t to_fd, double offset, double budget, double *next) {
  if (!(offset >= 0 && offset < 9e15 && budget > 0)) return -EINVAL;
  off_t at = (off_t)offset;
  double copied = 0;
  while (copied < budget) {
    off_t data = lseek(from_fd, at, SEEK_DATA);
    if (data < 0) return errno == ENXIO ? 0 : -errno;
    off_t hole = lseek(from_fd, data, SEEK_HOLE);
    if (hole < 0) return -errno;
    at = data;
    while (at < hole && copied < budget) {
      double left = budget - copied;
      size_t want = (double)(hole - at) < left ? (size_t)(hole - at) : (size_t)left;
      if (want == 0) want = 1;
      off_t in = at, out = at;
      int64_t got = copy_file_range(from_fd, &in, to_fd, &out, want, 0);
      if (got < 0) {
        if (errno == EINTR) continue;
        if (errno != EXDEV && errno != EINVAL && errno != EOPNOTSUPP && errno != ENOSYS) return -errno;
        got = copy_by_hand(from_fd, to_fd, at, want);
        if (got == -EINTR) continue;
        if (got < 0) return (int32_t)got;
      }
      if (got == 0) return -EIO; /* the source shrank under us */
      at += got;
      copied += (double)got;
    }
  }
  *next = (double)at;
  return 1;
}
