#include "mapped.h"

#include "codec.h"
#include "io.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define AENV_EXPORT __attribute__((visibility("default")))

enum { PAGE_SHIFT = 12 };

struct mapped {
	const char *bytes;
	size_t size;
	int32_t fd;
	/*
	 * When each page was last seen in memory, in steps of EPOCH_SECONDS; 0: never. Nothing ages these, so they must
	 * not come round while a file is open: 32 bits last for centuries, at a thousandth of the file's size.
	 */
	uint32_t *seen;
	/* Seconds, in place of the clock; for tests. Negative: the clock. */
	double clock;
	double hits, reads;
};

/* What was used that short a time ago is not what the kernel takes first when it needs memory. */
enum { EPOCH_SECONDS = 2 };

static atomic_int open_mappings;
static pthread_once_t handler_once = PTHREAD_ONCE_INIT;
static bool handler_installed;
static struct sigaction previous;

/* Of the thread, while it reads from a mapping. */
static _Thread_local struct {
	sigjmp_buf back;
	const char *from, *to;
} guard;
static _Thread_local volatile sig_atomic_t guarded;

static void on_bus_error(int number, siginfo_t *info, void *context)
{
	const char *at = info->si_addr;
	if (guarded && info->si_code > 0 && at >= guard.from && at < guard.to) {
		guarded = 0;
		siglongjmp(guard.back, 1);
	}
	/* Not ours. */
	if ((previous.sa_flags & SA_SIGINFO) != 0) {
		previous.sa_sigaction(number, info, context);
	} else if (previous.sa_handler == SIG_DFL) {
		/* The access is made again when this returns, and ends the process as it would have. */
		(void)signal(number, SIG_DFL);
		if (info->si_code <= 0)
			(void)raise(number);
	} else if (previous.sa_handler != SIG_IGN) {
		previous.sa_handler(number);
	}
}

static void install_handler(void)
{
	struct sigaction action;
	memset(&action, 0, sizeof action);
	action.sa_sigaction = on_bus_error;
	/* NODEFER: leaving by siglongjmp has no mask to put back. */
	action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
	sigemptyset(&action.sa_mask);
	handler_installed = sigaction(SIGBUS, NULL, &previous) == 0 && sigaction(SIGBUS, &action, NULL) == 0;
}

AENV_EXPORT void aenv_mapped_close(void *handle)
{
	struct mapped *mapped = handle;
	if (mapped == NULL)
		return;
	if (mapped->bytes != NULL) {
		(void)munmap((void *)(uintptr_t)mapped->bytes, mapped->size);
		atomic_fetch_sub(&open_mappings, 1);
	}
	free(mapped->seen);
	free(mapped);
}

AENV_EXPORT void *aenv_mapped_open(int32_t fd, double length)
{
	if (!(length >= 1 && length < (double)((uint64_t)1 << 46)) || sysconf(_SC_PAGESIZE) != 1 << PAGE_SHIFT)
		return NULL;
	(void)pthread_once(&handler_once, install_handler);
	if (!handler_installed)
		return NULL;
	struct mapped *mapped = calloc(1, sizeof *mapped);
	if (mapped == NULL)
		return NULL;
	mapped->fd = fd;
	mapped->clock = -1;
	mapped->size = (size_t)length;
	mapped->seen = calloc((mapped->size >> PAGE_SHIFT) + 1, sizeof *mapped->seen);
	if (mapped->seen == NULL) {
		aenv_mapped_close(mapped);
		return NULL;
	}
	if (atomic_fetch_add(&open_mappings, 1) >= AENV_MAPPED_LIMIT) {
		atomic_fetch_sub(&open_mappings, 1);
		aenv_mapped_close(mapped);
		return NULL;
	}
	void *bytes = mmap(NULL, mapped->size, PROT_READ, MAP_SHARED, fd, 0);
	if (bytes == MAP_FAILED) {
		atomic_fetch_sub(&open_mappings, 1);
		aenv_mapped_close(mapped);
		return NULL;
	}
	/* What is not in memory is read by calls that say how much; the kernel has nothing to guess. */
	(void)madvise(bytes, mapped->size, MADV_RANDOM);
	mapped->bytes = bytes;
	return mapped;
}

AENV_EXPORT void aenv_mapped_counts(const void *handle, double *counts)
{
	const struct mapped *mapped = handle;
	counts[0] = mapped->hits;
	counts[1] = mapped->reads;
}

struct run {
	void *codec;
	uint32_t algorithm, verify;
	const uint32_t *lengths;
	uint32_t count;
	char *target;
	uint32_t block_size, last_length;
};

static int32_t decode_run(const struct run *run, const char *from)
{
	char *to = run->target;
	for (uint32_t i = 0; i < run->count; i++) {
		uint32_t length = i + 1 == run->count ? run->last_length : run->block_size;
		int32_t got = aenv_zfile_decode(run->codec, run->algorithm, run->verify, from, 0, run->lengths[i], to,
		                                0, length);
		if (got < 0)
			return got;
		from += run->lengths[i];
		to += length;
	}
	return 0;
}

/* 1: a page could not be had. */
static int32_t decode_mapped(const struct mapped *mapped, const struct run *run, size_t offset)
{
	guard.from = mapped->bytes;
	guard.to = mapped->bytes + ((mapped->size + (1 << PAGE_SHIFT) - 1) >> PAGE_SHIFT << PAGE_SHIFT);
	if (sigsetjmp(guard.back, 0) != 0)
		return 1;
	guarded = 1;
	atomic_signal_fence(memory_order_seq_cst);
	int32_t result = decode_run(run, mapped->bytes + offset);
	atomic_signal_fence(memory_order_seq_cst);
	guarded = 0;
	return result;
}

AENV_EXPORT void aenv_mapped_set_clock(void *handle, double seconds)
{
	struct mapped *mapped = handle;
	mapped->clock = seconds;
}

/* Steps of time since the machine started, from 1. */
static uint32_t epoch_now(const struct mapped *mapped)
{
	if (mapped->clock >= 0)
		return (uint32_t)(mapped->clock / EPOCH_SECONDS) + 1;
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (uint32_t)(now.tv_sec / EPOCH_SECONDS) + 1;
}

static void set_seen(struct mapped *mapped, size_t first, size_t last, uint32_t epoch)
{
	for (size_t page = first; page <= last; page++)
		mapped->seen[page] = epoch;
}

AENV_EXPORT int32_t aenv_mapped_zfile_read(void *handle, void *codec, uint32_t algorithm, uint32_t verify,
                                           double offset, const uint32_t *lengths, uint32_t count, uint32_t wait,
                                           void *target, double target_offset, uint32_t block_size,
                                           uint32_t last_length, void *scratch, uint32_t capacity)
{
	struct mapped *mapped = handle;
	const struct run run = {codec, algorithm, verify, lengths, count, (char *)target + (size_t)target_offset,
	                        block_size, last_length};
	uint64_t stored = 0;
	for (uint32_t i = 0; i < count; i++)
		stored += lengths[i];
	if (!(offset >= 0) || offset + (double)stored > (double)mapped->size || stored == 0)
		return -EINVAL;
	const size_t start = (size_t)offset;
	const size_t first = start >> PAGE_SHIFT, last = (start + stored - 1) >> PAGE_SHIFT;
	const uint32_t now = epoch_now(mapped);
	bool fresh = true;
	for (size_t page = first; page <= last && fresh; page++)
		fresh = mapped->seen[page] != 0 && now - mapped->seen[page] <= 1;
	if (fresh) {
		int32_t result = decode_mapped(mapped, &run, start);
		if (result != 1) {
			mapped->hits++;
			return result;
		}
		set_seen(mapped, first, last, 0);
	}
	if (stored > capacity)
		return -E2BIG;
	int32_t got = wait ? aenv_io_pread(mapped->fd, scratch, 0, (uint32_t)stored, offset)
	                   : aenv_io_pread_cached(mapped->fd, scratch, 0, (uint32_t)stored, offset);
	if (got < 0)
		return got;
	if ((uint64_t)got < stored)
		return -ENODATA;
	mapped->reads++;
	set_seen(mapped, first, last, now);
	return decode_run(&run, scratch);
}
