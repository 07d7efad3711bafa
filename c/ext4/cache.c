#include "cache.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* 64 MiB of pages, enough for the metadata of some 100 000 files between two write-backs. */
#define MAX_PAGES 16384u
#define BUCKETS 32768u
/* A miss reads an aligned cluster: inode tables are walked in order. */
#define READ_CLUSTER_PAGES 16u
#define DATA_BUFFER_BYTES NBD_MAX_REQUEST_BYTES

struct page {
	uint64_t number;
	struct page *next;
	bool dirty;
	uint8_t data[CACHE_PAGE_BYTES];
};

struct cache {
	struct nbd *nbd;
	struct failure *failure;
	struct page **buckets;
	size_t page_count;
	uint64_t page_limit; /* first page number past the device */
	uint64_t data_offset;
	size_t data_length;
	uint8_t *data;
	uint8_t *gather; /* one request's worth of pages */
};

static size_t bucket_of(uint64_t number)
{
	return (size_t)((number * 0x9e3779b97f4a7c15ull) >> 40) % BUCKETS;
}

static struct page *find_page(struct cache *cache, uint64_t number)
{
	struct page *page = cache->buckets[bucket_of(number)];

	while (page != NULL && page->number != number)
		page = page->next;
	return page;
}

int cache_create(struct cache **result, struct nbd *nbd, struct failure *failure)
{
	struct cache *cache = calloc(1, sizeof(*cache));

	*result = NULL;
	if (cache != NULL) {
		cache->nbd = nbd;
		cache->failure = failure;
		cache->page_limit = nbd->size_bytes / CACHE_PAGE_BYTES;
		cache->buckets = calloc(BUCKETS, sizeof(*cache->buckets));
		cache->data = malloc(DATA_BUFFER_BYTES);
		cache->gather = malloc(DATA_BUFFER_BYTES);
	}
	if (cache == NULL || cache->buckets == NULL || cache->data == NULL || cache->gather == NULL) {
		cache_destroy(cache);
		return fail(failure, FAILURE_INTERNAL, ENOMEM, "out of memory");
	}
	*result = cache;
	return 0;
}

static void drop_all_pages(struct cache *cache)
{
	for (size_t i = 0; i < BUCKETS; i++) {
		struct page *page = cache->buckets[i];

		while (page != NULL) {
			struct page *next = page->next;

			free(page);
			page = next;
		}
		cache->buckets[i] = NULL;
	}
	cache->page_count = 0;
}

void cache_destroy(struct cache *cache)
{
	if (cache == NULL)
		return;
	if (cache->buckets != NULL)
		drop_all_pages(cache);
	free(cache->buckets);
	free(cache->data);
	free(cache->gather);
	free(cache);
}

static int compare_pages(const void *left, const void *right)
{
	const struct page *a = *(struct page *const *)left, *b = *(struct page *const *)right;

	return a->number < b->number ? -1 : a->number > b->number;
}

static int flush_data(struct cache *cache)
{
	int rc = 0;

	if (cache->data_length > 0)
		rc = nbd_write(cache->nbd, cache->data_offset, cache->data, cache->data_length);
	cache->data_length = 0;
	return rc;
}

/* Writes dirty pages in ascending order, runs of neighbours as one request. */
static int write_back(struct cache *cache)
{
	struct page **dirty = NULL;
	size_t count = 0, limit = DATA_BUFFER_BYTES / CACHE_PAGE_BYTES;
	int rc = flush_data(cache);

	if (rc < 0)
		return rc;
	dirty = malloc((cache->page_count + 1) * sizeof(*dirty));
	if (dirty == NULL)
		return fail(cache->failure, FAILURE_INTERNAL, ENOMEM, "out of memory");
	for (size_t i = 0; i < BUCKETS; i++)
		for (struct page *page = cache->buckets[i]; page != NULL; page = page->next)
			if (page->dirty)
				dirty[count++] = page;
	qsort(dirty, count, sizeof(*dirty), compare_pages);
	for (size_t i = 0; i < count && rc >= 0;) {
		size_t run = 0;

		while (i + run < count && run < limit && dirty[i + run]->number == dirty[i]->number + run) {
			memcpy(cache->gather + run * CACHE_PAGE_BYTES, dirty[i + run]->data, CACHE_PAGE_BYTES);
			dirty[i + run]->dirty = false;
			run++;
		}
		rc = nbd_write(cache->nbd, dirty[i]->number * CACHE_PAGE_BYTES, cache->gather, run * CACHE_PAGE_BYTES);
		i += run;
	}
	free(dirty);
	return rc;
}

static int insert_page(struct cache *cache, uint64_t number, const uint8_t *data, struct page **result)
{
	struct page *page = malloc(sizeof(*page));
	size_t bucket = bucket_of(number);

	if (page == NULL)
		return fail(cache->failure, FAILURE_INTERNAL, ENOMEM, "out of memory");
	page->number = number;
	page->dirty = false;
	if (data != NULL)
		memcpy(page->data, data, CACHE_PAGE_BYTES);
	page->next = cache->buckets[bucket];
	cache->buckets[bucket] = page;
	cache->page_count++;
	*result = page;
	return 0;
}

/* The page, read from the device unless `whole` says that the caller overwrites all of it. */
static int get_page(struct cache *cache, uint64_t number, bool whole, struct page **result)
{
	uint64_t first = number - number % READ_CLUSTER_PAGES;
	uint64_t count = READ_CLUSTER_PAGES;
	int rc;

	*result = find_page(cache, number);
	if (*result != NULL)
		return 0;
	if (cache->page_count + READ_CLUSTER_PAGES > MAX_PAGES) {
		rc = write_back(cache);
		if (rc < 0)
			return rc;
		drop_all_pages(cache);
	}
	if (whole)
		return insert_page(cache, number, NULL, result);
	if (cache->data_length > 0 && cache->data_offset < (first + count) * CACHE_PAGE_BYTES &&
	    first * CACHE_PAGE_BYTES < cache->data_offset + cache->data_length) {
		rc = flush_data(cache);
		if (rc < 0)
			return rc;
	}
	if (first + count > cache->page_limit)
		count = cache->page_limit > first ? cache->page_limit - first : 0;
	if (number >= first + count)
		return fail(cache->failure, FAILURE_INTERNAL, EINVAL, "page %" PRIu64 " is past the device's end", number);
	rc = nbd_read(cache->nbd, first * CACHE_PAGE_BYTES, cache->gather, count * CACHE_PAGE_BYTES);
	for (uint64_t i = 0; i < count && rc >= 0; i++) {
		struct page *page = find_page(cache, first + i);

		/* A page that is cached already may be newer than the device's. */
		if (page == NULL)
			rc = insert_page(cache, first + i, cache->gather + i * CACHE_PAGE_BYTES, &page);
		if (first + i == number)
			*result = page;
	}
	return rc;
}

int cache_read(struct cache *cache, uint64_t offset, void *data, size_t length)
{
	uint8_t *target = data;

	while (length > 0) {
		size_t within = (size_t)(offset % CACHE_PAGE_BYTES);
		size_t part = CACHE_PAGE_BYTES - within < length ? CACHE_PAGE_BYTES - within : length;
		struct page *page;
		int rc = get_page(cache, offset / CACHE_PAGE_BYTES, false, &page);

		if (rc < 0)
			return rc;
		memcpy(target, page->data + within, part);
		target += part;
		offset += part;
		length -= part;
	}
	return 0;
}

int cache_write(struct cache *cache, uint64_t offset, const void *data, size_t length)
{
	const uint8_t *source = data;

	while (length > 0) {
		size_t within = (size_t)(offset % CACHE_PAGE_BYTES);
		size_t part = CACHE_PAGE_BYTES - within < length ? CACHE_PAGE_BYTES - within : length;
		bool known = find_page(cache, offset / CACHE_PAGE_BYTES) != NULL;
		struct page *page;
		int rc = get_page(cache, offset / CACHE_PAGE_BYTES, part == CACHE_PAGE_BYTES, &page);

		if (rc < 0)
			return rc;
		/* What does not change stays out of the layer: libext2fs writes every bitmap it has read. */
		if (page->dirty || (part == CACHE_PAGE_BYTES && !known) || memcmp(page->data + within, source, part) != 0) {
			memcpy(page->data + within, source, part);
			page->dirty = true;
		}
		source += part;
		offset += part;
		length -= part;
	}
	return 0;
}

/* Drops cached pages that file content replaces: blocks freed by a directory, say. */
static void forget_pages(struct cache *cache, uint64_t first, uint64_t count)
{
	for (uint64_t number = first; number < first + count; number++) {
		struct page **link = &cache->buckets[bucket_of(number)];

		while (*link != NULL && (*link)->number != number)
			link = &(*link)->next;
		if (*link != NULL) {
			struct page *page = *link;

			*link = page->next;
			free(page);
			cache->page_count--;
		}
	}
}

int cache_write_data(struct cache *cache, uint64_t offset, const void *data, size_t length)
{
	const uint8_t *source = data;

	while (length > 0) {
		size_t part;
		uint64_t first = offset / CACHE_PAGE_BYTES;

		if (cache->data_length > 0 &&
		    (cache->data_offset + cache->data_length != offset || cache->data_length == DATA_BUFFER_BYTES)) {
			int rc = flush_data(cache);

			if (rc < 0)
				return rc;
		}
		if (cache->data_length == 0)
			cache->data_offset = offset;
		part = DATA_BUFFER_BYTES - cache->data_length < length ? DATA_BUFFER_BYTES - cache->data_length : length;
		memcpy(cache->data + cache->data_length, source, part);
		forget_pages(cache, first, (offset + part - 1) / CACHE_PAGE_BYTES - first + 1);
		cache->data_length += part;
		source += part;
		offset += part;
		length -= part;
	}
	return 0;
}

int cache_flush(struct cache *cache)
{
	int rc = write_back(cache);

	return rc < 0 ? rc : nbd_flush(cache->nbd);
}

/* ---- io_manager -------------------------------------------------------------------------------------- */

void cache_io_name(const struct cache *cache, char name[CACHE_IO_NAME_BYTES])
{
	snprintf(name, CACHE_IO_NAME_BYTES, "cache:%" PRIxPTR, (uintptr_t)cache);
}

static struct cache *channel_cache(io_channel channel)
{
	return channel->private_data;
}

static errcode_t io_open(const char *name, int flags, io_channel *result)
{
	uintptr_t address;
	io_channel channel;

	(void)flags;
	if (sscanf(name, "cache:%" SCNxPTR, &address) != 1)
		return EXT2_ET_BAD_DEVICE_NAME;
	channel = calloc(1, sizeof(*channel));
	if (channel == NULL)
		return EXT2_ET_NO_MEMORY;
	channel->magic = EXT2_ET_MAGIC_IO_CHANNEL;
	channel->manager = &cache_io_manager;
	channel->name = strdup(name);
	channel->block_size = 1024;
	channel->refcount = 1;
	channel->flags = CHANNEL_FLAGS_DISCARD_ZEROES;
	channel->private_data = (struct cache *)address;
	if (channel->name == NULL) {
		free(channel);
		return EXT2_ET_NO_MEMORY;
	}
	*result = channel;
	return 0;
}

static errcode_t io_close(io_channel channel)
{
	if (--channel->refcount > 0)
		return 0;
	free(channel->name);
	free(channel);
	return 0;
}

static errcode_t io_set_blksize(io_channel channel, int blksize)
{
	channel->block_size = blksize;
	return 0;
}

/* A negative count is a number of bytes. */
static size_t span(io_channel channel, int count)
{
	return count < 0 ? (size_t)-count : (size_t)count * (size_t)channel->block_size;
}

static errcode_t io_read_blk64(io_channel channel, unsigned long long block, int count, void *data)
{
	int rc = cache_read(channel_cache(channel), block * (uint64_t)channel->block_size, data, span(channel, count));

	return rc < 0 ? EXT2_ET_SHORT_READ : 0;
}

static errcode_t io_write_blk64(io_channel channel, unsigned long long block, int count, const void *data)
{
	int rc = cache_write(channel_cache(channel), block * (uint64_t)channel->block_size, data, span(channel, count));

	return rc < 0 ? EXT2_ET_SHORT_WRITE : 0;
}

static errcode_t io_read_blk(io_channel channel, unsigned long block, int count, void *data)
{
	return io_read_blk64(channel, block, count, data);
}

static errcode_t io_write_blk(io_channel channel, unsigned long block, int count, const void *data)
{
	return io_write_blk64(channel, block, count, data);
}

static errcode_t io_write_byte(io_channel channel, unsigned long offset, int count, const void *data)
{
	return cache_write(channel_cache(channel), offset, data, (size_t)count) < 0 ? EXT2_ET_SHORT_WRITE : 0;
}

/* libext2fs flushes on its own; the durable flush is cache_flush() at the end of a layer. */
static errcode_t io_flush(io_channel channel)
{
	(void)channel;
	return 0;
}

struct struct_io_manager cache_io_manager = {
	.magic = EXT2_ET_MAGIC_IO_MANAGER,
	.name = "aenv cache",
	.open = io_open,
	.close = io_close,
	.set_blksize = io_set_blksize,
	.read_blk = io_read_blk,
	.write_blk = io_write_blk,
	.flush = io_flush,
	.write_byte = io_write_byte,
	.read_blk64 = io_read_blk64,
	.write_blk64 = io_write_blk64,
};
