/*
 * Write-back cache of 4 KiB pages between libext2fs and the block device, and the io_manager on top.
 *
 * Metadata (superblock, descriptors, bitmaps, inode tables, directories, extent nodes) goes through pages:
 * every page is read at most once and written at most once per write-back, neighbours in one request. File
 * content bypasses them through one append buffer, since it is allocated in ascending order and never read.
 */
#ifndef AENV_EXT4_CACHE_H
#define AENV_EXT4_CACHE_H

#include <ext2fs/ext2fs.h>

#include "nbd.h"

#define CACHE_PAGE_BYTES 4096u

struct cache;

/* Takes the connection over; `*cache` is NULL on failure. */
int cache_create(struct cache **cache, struct nbd *nbd, struct failure *failure);
void cache_destroy(struct cache *cache);

/* Any byte range; partial pages are completed from the device. */
int cache_read(struct cache *cache, uint64_t offset, void *data, size_t length);
int cache_write(struct cache *cache, uint64_t offset, const void *data, size_t length);
/* File content; both `offset` and the sum of consecutive lengths are whole pages when the run ends. */
int cache_write_data(struct cache *cache, uint64_t offset, const void *data, size_t length);
/* Everything written goes to the device and becomes durable. */
int cache_flush(struct cache *cache);

/*
 * libext2fs opens an io channel by name and has no argument for a context, so the name carries the cache's
 * address: use cache_io_name() as the file system's device name with cache_io_manager.
 */
#define CACHE_IO_NAME_BYTES 32
void cache_io_name(const struct cache *cache, char name[CACHE_IO_NAME_BYTES]);
extern struct struct_io_manager cache_io_manager;

#endif
