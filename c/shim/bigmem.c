#include "bigmem.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define AENV_EXPORT __attribute__((visibility("default")))

static const size_t huge_page = (size_t)2 << 20;

AENV_EXPORT void *aenv_bigmem_alloc(double length)
{
	if (!(length > 0 && length < (double)((uint64_t)1 << 48)))
		return NULL;
	size_t size = ((size_t)length + huge_page - 1) / huge_page * huge_page;
	void *bytes = aligned_alloc(huge_page, size);
	/* Only a hint: without huge pages the memory is there all the same. */
	if (bytes != NULL)
		(void)madvise(bytes, size, MADV_HUGEPAGE);
	return bytes;
}

AENV_EXPORT void aenv_bigmem_free(void *bytes, void *context)
{
	(void)context;
	free(bytes);
}

/* ISO C has no cast from a function to an object pointer; POSIX says that they are alike. */
static void *address_of(void (*function)(void *, void *))
{
	union {
		void (*function)(void *, void *);
		void *address;
	} pointer = {.function = function};
	return pointer.address;
}

AENV_EXPORT void *aenv_bigmem_free_address(void)
{
	return address_of(aenv_bigmem_free);
}

AENV_EXPORT void *aenv_bigmem_map(int32_t fd, double length)
{
	if (!(length > 0 && length < (double)((uint64_t)1 << 48)))
		return NULL;
	size_t size = (size_t)length;
	void *bytes = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	if (bytes == MAP_FAILED)
		return NULL;
	if (mlock(bytes, size) < 0) {
		(void)munmap(bytes, size);
		return NULL;
	}
	return bytes;
}

AENV_EXPORT void aenv_bigmem_unmap(void *bytes, void *length)
{
	(void)munmap(bytes, (size_t)(uintptr_t)length);
}

AENV_EXPORT void *aenv_bigmem_unmap_address(void)
{
	return address_of(aenv_bigmem_unmap);
}
