#include "ring.h"

#include "ring-private.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define AENV_EXPORT __attribute__((visibility("default")))

/* Completion work runs when this thread asks for results, not in the middle of JavaScript. Kernels before
 * 6.1 do not know these flags. */
static int init_uring(struct io_uring *uring, unsigned entries, unsigned results, unsigned flags)
{
	struct io_uring_params params;
	if (results != 0)
		flags |= IORING_SETUP_CQSIZE;
	memset(&params, 0, sizeof params);
	params.cq_entries = results;
	params.flags = flags | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
	int error = io_uring_queue_init_params(entries, uring, &params);
	if (error != -EINVAL)
		return error;
	memset(&params, 0, sizeof params);
	params.cq_entries = results;
	params.flags = flags;
	return io_uring_queue_init_params(entries, uring, &params);
}

static void *new_ring(unsigned entries, unsigned results, unsigned flags, int32_t *error)
{
	struct ring *ring = calloc(1, sizeof *ring);
	if (ring == NULL) {
		*error = -ENOMEM;
		return NULL;
	}
	*error = init_uring(&ring->uring, entries, results, flags);
	if (*error < 0) {
		free(ring);
		return NULL;
	}
	ring->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	*error = ring->event_fd < 0 ? -errno : io_uring_register_eventfd(&ring->uring, ring->event_fd);
	if (*error == 0)
		*error = io_uring_cq_eventfd_toggle(&ring->uring, false);
	if (*error < 0) {
		aenv_ring_free(ring);
		return NULL;
	}
	return ring;
}

AENV_EXPORT void *aenv_ring_new(uint32_t entries, int32_t *error)
{
	return new_ring(entries, 0, 0, error);
}

AENV_EXPORT void *aenv_ring_new_commands(uint32_t entries, uint32_t results, int32_t *error)
{
	return new_ring(entries, results, IORING_SETUP_SQE128, error);
}

AENV_EXPORT void aenv_ring_free(void *handle)
{
	struct ring *ring = handle;
	if (ring == NULL)
		return;
	io_uring_queue_exit(&ring->uring);
	if (ring->event_fd >= 0)
		close(ring->event_fd);
	free(ring);
}

AENV_EXPORT int32_t aenv_ring_event_fd(void *handle)
{
	struct ring *ring = handle;
	return ring->event_fd;
}

AENV_EXPORT int32_t aenv_ring_read(void *handle, int32_t fd, void *buffer, double buffer_offset,
                                   uint32_t length, double offset, uint32_t tag)
{
	struct ring *ring = handle;
	struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
	if (sqe == NULL)
		return -EBUSY;
	io_uring_prep_read(sqe, fd, (char *)buffer + (size_t)buffer_offset, length, (uint64_t)offset);
	io_uring_sqe_set_data64(sqe, tag);
	return 0;
}

AENV_EXPORT int32_t aenv_ring_write(void *handle, int32_t fd, const void *buffer, double buffer_offset,
                                    uint32_t length, double offset, uint32_t tag)
{
	struct ring *ring = handle;
	struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
	if (sqe == NULL)
		return -EBUSY;
	io_uring_prep_write(sqe, fd, (const char *)buffer + (size_t)buffer_offset, length, (uint64_t)offset);
	io_uring_sqe_set_data64(sqe, tag);
	return 0;
}

static int32_t prepare_sync(struct ring *ring, int32_t fd, unsigned flags, uint32_t tag)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
	if (sqe == NULL)
		return -EBUSY;
	io_uring_prep_fsync(sqe, fd, flags);
	io_uring_sqe_set_data64(sqe, tag);
	return 0;
}

AENV_EXPORT int32_t aenv_ring_fdatasync(void *handle, int32_t fd, uint32_t tag)
{
	return prepare_sync(handle, fd, IORING_FSYNC_DATASYNC, tag);
}

AENV_EXPORT int32_t aenv_ring_fsync(void *handle, int32_t fd, uint32_t tag)
{
	return prepare_sync(handle, fd, 0, tag);
}

AENV_EXPORT int32_t aenv_ring_submit(void *handle, uint32_t wait, int32_t *results, uint32_t capacity)
{
	struct ring *ring = handle;
	io_uring_cq_eventfd_toggle(&ring->uring, false);
	int submitted = io_uring_submit_and_wait(&ring->uring, wait);
	/* EAGAIN and EBUSY: the kernel is short of memory or of room for results; what was prepared stays. */
	if (submitted < 0 && submitted != -EINTR && submitted != -EAGAIN && submitted != -EBUSY)
		return submitted;
	struct io_uring_cqe *cqes[64];
	uint32_t taken = 0;
	while (taken < capacity) {
		uint32_t rest = capacity - taken;
		unsigned n = io_uring_peek_batch_cqe(&ring->uring, cqes, rest < 64 ? rest : 64);
		if (n == 0)
			break;
		for (unsigned i = 0; i < n; i++, taken++) {
			results[2 * taken] = (int32_t)cqes[i]->user_data;
			results[2 * taken + 1] = cqes[i]->res;
		}
		io_uring_cq_advance(&ring->uring, n);
	}
	return (int32_t)taken;
}

AENV_EXPORT int32_t aenv_ring_arm(void *handle)
{
	struct ring *ring = handle;
	io_uring_cq_eventfd_toggle(&ring->uring, true);
	/* A result between the last take and here was not signalled. */
	atomic_thread_fence(memory_order_seq_cst);
	return io_uring_cq_ready(&ring->uring) > 0 || io_uring_sq_ready(&ring->uring) > 0 ||
	       (IO_URING_READ_ONCE(*ring->uring.sq.kflags) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW)) != 0;
}
