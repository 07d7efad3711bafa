/*
 * Commands of the kernel's ublk driver (linux/ublk_cmd.h, Documentation/block/ublk.rst): block devices that
 * a process serves. Control commands go to /dev/ublk-control, I/O commands to /dev/ublkcN, all as
 * IORING_OP_URING_CMD on a ring made by aenv_ring_new_commands and submitted like its other requests.
 * What is passed by address must stay valid and in place until the command's result was taken.
 * Functions return 0 or a count, -errno on failure; -EBUSY: no room in the ring, submit first.
 */
#ifndef AENV_UBLK_H
#define AENV_UBLK_H

#include <stdint.h>

/* Prepares a control command. `opcode` is the ioctl-encoded one. `queue` is 0xffff where none is meant. `tag`
 * comes back with the result. `payload` may be NULL. */
int32_t aenv_ublk_control(void *ring, int32_t control_fd, uint32_t opcode, uint32_t device, uint32_t queue,
                          void *payload, uint32_t payload_length, double data, uint32_t tag);

/* Prepares FETCH_REQ (opcode 0xc0107520) or COMMIT_AND_FETCH_REQ (0xc0107521) for one tag of a queue.
 * `result` is the outcome of the request that the tag carried: bytes done or -errno. `buffer` is NULL on a
 * device with user copy. Result 0 means that a request has arrived. */
int32_t aenv_ublk_io(void *ring, int32_t char_fd, uint32_t opcode, uint32_t queue, uint32_t io_tag,
                     int32_t result, void *buffer, double buffer_offset, uint32_t tag);

/* Maps the descriptors of a queue, 24 bytes a tag, read-only. NULL on failure, with -errno in *error. */
void *aenv_ublk_map(int32_t char_fd, uint32_t queue, uint32_t depth, int32_t *error);
int32_t aenv_ublk_unmap(void *descriptors, uint32_t depth);

/* User copy: moves `length` bytes between a buffer and the pages of the request that a tag carries, from the
 * request (a write's data) or into it (a read's answer). Returns the bytes moved. */
int32_t aenv_ublk_copy_from(int32_t char_fd, uint32_t queue, uint32_t io_tag, void *buffer,
                            double buffer_offset, uint32_t length);
int32_t aenv_ublk_copy_to(int32_t char_fd, uint32_t queue, uint32_t io_tag, const void *buffer,
                          double buffer_offset, uint32_t length);

#endif
