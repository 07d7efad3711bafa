/*
 * Compressed blocks straight from the page cache: a file is mapped, and blocks whose pages were seen in memory a
 * moment ago are decoded where they lie, without a system call and a copy. Pages that were not are read as ever,
 * which can be told not to wait for a disk. A page that the kernel dropped within the 2 to 4 seconds since it was seen
 * is waited for all the same: nothing tells beforehand that it is gone. A file that became shorter, or a page that
 * cannot be read, is an error of the call: the signal that the kernel sends for it is caught where the bytes are used.
 */
#ifndef AENV_MAPPED_H
#define AENV_MAPPED_H

#include <stdint.h>

/*
 * Maps the first length bytes of a file for reading. The descriptor stays the caller's, and open as long as the
 * mapping. NULL where that is not possible, or when the process has AENV_MAPPED_LIMIT mappings: the kernel has a limit
 * for all of them, which other memory needs, too.
 */
enum { AENV_MAPPED_LIMIT = 4096 };
void *aenv_mapped_open(int32_t fd, double length);
void aenv_mapped_close(void *mapped);

/*
 * Decodes count blocks (see aenv_zfile_decode) that lie one behind the other from offset on, lengths[i] stored bytes
 * each, to block_size bytes each, the last to last_length; all of them one behind the other to target. What has to be
 * read first is read to scratch; -E2BIG when that has not the capacity. wait == 0: -EAGAIN instead of waiting for a
 * disk to read it (see above for what is decoded in place). -ENODATA: the file ends before. Returns 0; after an error
 * the target's content is undefined.
 */
int32_t aenv_mapped_zfile_read(void *mapped, void *codec, uint32_t algorithm, uint32_t verify, double offset,
                               const uint32_t *lengths, uint32_t count, uint32_t wait, void *target,
                               double target_offset, uint32_t block_size, uint32_t last_length,
                               void *scratch, uint32_t capacity);

/* Calls that decoded from the mapping, and calls that read first; for measurements and tests. */
void aenv_mapped_counts(const void *mapped, double *counts);

/* For tests: this mapping's time stands at so many seconds, 0 or more, until it is set again. Negative: the clock. */
void aenv_mapped_set_clock(void *mapped, double seconds);

#endif
