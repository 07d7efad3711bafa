/*
 * An io_uring of one thread.
 *
 * The thread that made a ring is the only one that may use it. Requests are prepared, then handed to the
 * kernel together by aenv_ring_submit; each carries a tag that comes back with its result. Memory given to
 * a request must stay valid and in place until its result was taken. Offsets are doubles, exact below 2^53.
 * Functions return a count or 0 on success and -errno on failure.
 */
#ifndef AENV_RING_H
#define AENV_RING_H

#include <stdint.h>

/* A ring for up to `entries` requests in flight (a power of two). NULL on failure, with -errno in *error:
 * -EPERM or -ENOSYS where io_uring is switched off or missing. */
void *aenv_ring_new(uint32_t entries, int32_t *error);

/* The same with 128-byte entries, which device commands need (ublk.h), and room for `results` results. */
void *aenv_ring_new_commands(uint32_t entries, uint32_t results, int32_t *error);

/* Ends the ring. Requests in flight are cancelled or finished by the kernel: the caller waits for them first. */
void aenv_ring_free(void *ring);

/* The eventfd that becomes readable when a result arrives while the ring is armed. Owned by the ring. */
int32_t aenv_ring_event_fd(void *ring);

/* Prepare one request. -EBUSY: no room, submit first. */
int32_t aenv_ring_read(void *ring, int32_t fd, void *buffer, double buffer_offset, uint32_t length,
                       double offset, uint32_t tag);
int32_t aenv_ring_write(void *ring, int32_t fd, const void *buffer, double buffer_offset, uint32_t length,
                        double offset, uint32_t tag);
int32_t aenv_ring_fdatasync(void *ring, int32_t fd, uint32_t tag);
int32_t aenv_ring_fsync(void *ring, int32_t fd, uint32_t tag);

/* Hands prepared requests to the kernel, waits for at least `wait` results, and takes up to `capacity` of
 * them: (tag, result) pairs in `results`, the result as the system call would give it (count or -errno).
 * Returns the number taken. A signal ends the wait early. */
int32_t aenv_ring_submit(void *ring, uint32_t wait, int32_t *results, uint32_t capacity);

/* From now on a result makes the eventfd readable, until the next submit. Returns 1 when results are there
 * already, which may not be signalled: take them first. */
int32_t aenv_ring_arm(void *ring);

#endif
