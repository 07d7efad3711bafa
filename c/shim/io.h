/*
 * Positioned file I/O for the storage rooms.
 *
 * Offsets and sizes are doubles: they come from JavaScript numbers and are exact below 2^53. Buffers are
 * given as base pointer plus byte offset, so that a caller needs no temporary view. Every function returns
 * a count (or 0) on success and -errno on failure; nothing here keeps state.
 */
#ifndef AENV_IO_H
#define AENV_IO_H

#include <stdint.h>

/* Reads length bytes at offset into buffer + buffer_offset. Returns the bytes read, fewer only at the end of
 * the file. */
int32_t aenv_io_pread(int32_t fd, void *buffer, double buffer_offset, uint32_t length, double offset);

/* The same from the page cache alone: -EAGAIN where a byte is not in memory (then with any content in the
 * buffer), -EOPNOTSUPP where the file system cannot tell. */
int32_t aenv_io_pread_cached(int32_t fd, void *buffer, double buffer_offset, uint32_t length, double offset);

/* Writes all length bytes at offset; returns length. A failure may leave a part written. */
int32_t aenv_io_pwrite(int32_t fd, const void *buffer, double buffer_offset, uint32_t length, double offset);

/* Data (and the size needed to find it) on stable storage. */
int32_t aenv_io_fdatasync(int32_t fd);

/* Data and all metadata on stable storage; for directories: their entries. */
int32_t aenv_io_fsync(int32_t fd);

/* Size of an open file in bytes. */
double aenv_io_size(int32_t fd);

int32_t aenv_io_truncate(int32_t fd, double length);

/* Frees the blocks of the range, which reads as zeros afterwards; the size stays. */
int32_t aenv_io_punch_hole(int32_t fd, double offset, double length);

/* First byte at or after offset that lies in a data extent; -ENXIO when there is none. */
double aenv_io_seek_data(int32_t fd, double offset);

/* First byte at or after offset that lies in a hole (the end of the file counts as one). */
double aenv_io_seek_hole(int32_t fd, double offset);

/* Takes a whole-file lock that ends with the open file: exclusive != 0 or shared; -EWOULDBLOCK when another
 * open file holds a conflicting one. mode: 0 unlock, 1 shared, 2 exclusive. */
int32_t aenv_io_lock(int32_t fd, uint32_t mode);

/* rename(2) that fails with -EEXIST instead of replacing an existing target. */
int32_t aenv_io_rename_noreplace(const char *from, const char *to);

#endif
