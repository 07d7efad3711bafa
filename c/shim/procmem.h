/*
 * Memory of another process: which pages of a private file mapping it wrote, and their bytes.
 *
 * Ranges travel as pairs of doubles (start, end or start, length): exact below 2^53, and cheap to read
 * from JavaScript. Every function returns a count or -errno and keeps no state.
 */
#ifndef AENV_PROCMEM_H
#define AENV_PROCMEM_H

#include <stdint.h>

#define AENV_EXPORT __attribute__((visibility("default")))

/* Flags of aenv_dirty_ranges. */
#define AENV_DIRTY_NO_SCAN 1u /* do not try PAGEMAP_SCAN, read /proc/PID/pagemap entries */

/*
 * Finds the pages in [start, end) of the process behind `pagemap_fd` (an open /proc/PID/pagemap) that are
 * its own: present or swapped, and not pages of the mapped file. Writes at most `max_ranges` ascending,
 * non-touching pairs {first byte, byte after the last} to `ranges`; *next is the address to go on from, `end`
 * when all was seen. start and end are multiples of 4096. Returns the number of pairs.
 */
AENV_EXPORT int32_t aenv_dirty_ranges(int32_t pagemap_fd, double start, double end, uint32_t flags, double *ranges,
                                      uint32_t max_ranges, double *next);

/*
 * Reads `count` ranges {address, length} of process `pid` one after the other into `out` (`capacity` bytes).
 * Returns the number of bytes, which is always the sum of the lengths; -EFAULT when a range is not mapped.
 */
AENV_EXPORT int32_t aenv_read_process(int32_t pid, const double *ranges, uint32_t count, uint8_t *out,
                                      uint32_t capacity);

/* The same for a file: ranges are {offset, length}; what lies behind its end reads as zeros. */
AENV_EXPORT int32_t aenv_read_file_ranges(int32_t fd, const double *ranges, uint32_t count, uint8_t *out,
                                          uint32_t capacity);

/* What aenv_compare_pages says of a page. */
#define AENV_PAGE_SAME 0 /* equal to the base */
#define AENV_PAGE_DATA 1 /* differs from the base, is not all zeros */
#define AENV_PAGE_ZERO 2 /* differs from the base, is all zeros */

/* Compares `pages` pages of 4096 bytes with their base (NULL: zeros) and writes one verdict per page. */
AENV_EXPORT int32_t aenv_compare_pages(const uint8_t *current, const uint8_t *base, uint32_t pages, uint8_t *verdict);

#endif
