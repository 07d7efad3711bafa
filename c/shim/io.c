#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define AENV_EXPORT __attribute__((visibility("default")))

AENV_EXPORT int32_t aenv_io_pread(int32_t fd, void *buffer, double buffer_offset, uint32_t length,
                                  double offset)
{
	if (length > INT32_MAX || buffer_offset < 0 || offset < 0)
		return -EINVAL;
	char *at = (char *)buffer + (size_t)buffer_offset;
	uint32_t done = 0;
	while (done < length) {
		ssize_t n = pread(fd, at + done, length - done, (off_t)offset + done);
		if (n == 0)
			break;
		if (n < 0) {
			if (errno == EINTR)
				continue;
			return -errno;
		}
		done += (uint32_t)n;
	}
	return (int32_t)done;
}

AENV_EXPORT int32_t aenv_io_pread_cached(int32_t fd, void *buffer, double buffer_offset, uint32_t length,
                                         double offset)
{
	if (length > INT32_MAX || buffer_offset < 0 || offset < 0)
		return -EINVAL;
	char *at = (char *)buffer + (size_t)buffer_offset;
	uint32_t done = 0;
	/* A short count is the end of the cached part or of the file: the next call tells which. */
	while (done < length) {
		struct iovec part = {.iov_base = at + done, .iov_len = length - done};
		ssize_t n = preadv2(fd, &part, 1, (off_t)offset + done, RWF_NOWAIT);
		if (n == 0)
			break;
		if (n < 0) {
			if (errno == EINTR)
				continue;
			return -errno;
		}
		done += (uint32_t)n;
	}
	return (int32_t)done;
}

AENV_EXPORT int32_t aenv_io_pwrite(int32_t fd, const void *buffer, double buffer_offset, uint32_t length,
                                   double offset)
{
	if (length > INT32_MAX || buffer_offset < 0 || offset < 0)
		return -EINVAL;
	const char *at = (const char *)buffer + (size_t)buffer_offset;
	uint32_t done = 0;
	while (done < length) {
		ssize_t n = pwrite(fd, at + done, length - done, (off_t)offset + done);
		if (n < 0) {
			if (errno == EINTR)
				continue;
			return -errno;
		}
		if (n == 0)
			return -EIO;
		done += (uint32_t)n;
	}
	return (int32_t)done;
}

AENV_EXPORT int32_t aenv_io_fdatasync(int32_t fd)
{
	return fdatasync(fd) < 0 ? -errno : 0;
}

AENV_EXPORT int32_t aenv_io_fsync(int32_t fd)
{
	return fsync(fd) < 0 ? -errno : 0;
}

AENV_EXPORT double aenv_io_size(int32_t fd)
{
	struct stat st;
	if (fstat(fd, &st) < 0)
		return -errno;
	return (double)st.st_size;
}

AENV_EXPORT int32_t aenv_io_truncate(int32_t fd, double length)
{
	if (length < 0)
		return -EINVAL;
	return ftruncate(fd, (off_t)length) < 0 ? -errno : 0;
}

AENV_EXPORT int32_t aenv_io_punch_hole(int32_t fd, double offset, double length)
{
	if (offset < 0 || length < 0)
		return -EINVAL;
	int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
	return fallocate(fd, mode, (off_t)offset, (off_t)length) < 0 ? -errno : 0;
}

static double seek_extent(int32_t fd, double offset, int whence)
{
	if (offset < 0)
		return -EINVAL;
	off_t found = lseek(fd, (off_t)offset, whence);
	return found < 0 ? -errno : (double)found;
}

AENV_EXPORT double aenv_io_seek_data(int32_t fd, double offset)
{
	return seek_extent(fd, offset, SEEK_DATA);
}

AENV_EXPORT double aenv_io_seek_hole(int32_t fd, double offset)
{
	return seek_extent(fd, offset, SEEK_HOLE);
}

AENV_EXPORT int32_t aenv_io_lock(int32_t fd, uint32_t mode)
{
	static const int operations[] = {LOCK_UN, LOCK_SH | LOCK_NB, LOCK_EX | LOCK_NB};
	if (mode >= sizeof operations / sizeof *operations)
		return -EINVAL;
	return flock(fd, operations[mode]) < 0 ? -errno : 0;
}

AENV_EXPORT int32_t aenv_io_rename_noreplace(const char *from, const char *to)
{
	return renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) < 0 ? -errno : 0;
}
