/*
 * Large blocks of memory for typed arrays: backed by huge pages where the kernel has them, so that filling
 * some tens of megabytes does not take a page fault per 4 KiB.
 */
#ifndef AENV_BIGMEM_H
#define AENV_BIGMEM_H

#include <stdint.h>

/* A block of at least length bytes with undefined content, NULL when there is no memory. Freed with
 * aenv_bigmem_free. */
void *aenv_bigmem_alloc(double length);

/* Frees a block. In the form of a deallocator of array buffers; context is ignored. */
void aenv_bigmem_free(void *bytes, void *context);

/* Address of aenv_bigmem_free, for callers that hand it on. */
void *aenv_bigmem_free_address(void);

/*
 * Maps a file that nobody will ever make shorter, for reading, with all its pages in memory and locked there: no access
 * can fail later. NULL where that is not possible (the limit of locked memory, a read error).
 */
void *aenv_bigmem_map(int32_t fd, double length);

/* Gives it back; its address is what the runtime calls when the buffer is collected, with the length as context. */
void aenv_bigmem_unmap(void *bytes, void *length);
void *aenv_bigmem_unmap_address(void);

#endif
