#include "ublk.h"

#include "ring-private.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define AENV_EXPORT __attribute__((visibility("default")))

/* linux/ublk_cmd.h, spelled out: the header of the build machine may be older than the kernel that runs. */
struct control_command {
	uint32_t device;
	uint16_t queue;
	uint16_t length;
	uint64_t address;
	uint64_t data;
	uint16_t path_length;
	uint16_t pad;
	uint32_t reserved;
};

struct io_command {
	uint16_t queue;
	uint16_t tag;
	int32_t result;
	uint64_t address;
};

enum {
	OP_URING_CMD = 46,
	DESCRIPTOR_BYTES = 24,
	MAX_QUEUE_DEPTH = 4096,
};

static const uint64_t COPY_BASE = 0x80000000;

/* A cleared entry whose command bytes begin where the 48 bytes of the common part end. */
static void *prepare(struct io_uring_sqe *sqe, int32_t fd, uint32_t opcode, uint32_t tag)
{
	memset(sqe, 0, 2 * sizeof *sqe);
	sqe->opcode = OP_URING_CMD;
	sqe->fd = fd;
	sqe->off = opcode;
	sqe->user_data = tag;
	return (char *)sqe + 48;
}

AENV_EXPORT int32_t aenv_ublk_control(void *handle, int32_t control_fd, uint32_t opcode, uint32_t device,
                                      uint32_t queue, void *payload, uint32_t payload_length, double data,
                                      uint32_t tag)
{
	struct ring *ring = handle;
	struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
	if (sqe == NULL)
		return -EBUSY;
	struct control_command command = {
		.device = device,
		.queue = (uint16_t)queue,
		.length = (uint16_t)payload_length,
		.address = (uint64_t)(uintptr_t)payload,
		.data = (uint64_t)data,
	};
	memcpy(prepare(sqe, control_fd, opcode, tag), &command, sizeof command);
	return 0;
}

AENV_EXPORT int32_t aenv_ublk_io(void *handle, int32_t char_fd, uint32_t opcode, uint32_t queue,
                                 uint32_t io_tag, int32_t result, void *buffer, double buffer_offset,
                                 uint32_t tag)
{
	struct ring *ring = handle;
	struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
	if (sqe == NULL)
		return -EBUSY;
	struct io_command command = {
		.queue = (uint16_t)queue,
		.tag = (uint16_t)io_tag,
		.result = result,
		.address = buffer == NULL ? 0 : (uint64_t)(uintptr_t)buffer + (uint64_t)buffer_offset,
	};
	memcpy(prepare(sqe, char_fd, opcode, tag), &command, sizeof command);
	return 0;
}

static size_t descriptor_bytes(uint32_t depth)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	return ((size_t)depth * DESCRIPTOR_BYTES + page - 1) / page * page;
}

AENV_EXPORT void *aenv_ublk_map(int32_t char_fd, uint32_t queue, uint32_t depth, int32_t *error)
{
	off_t offset = (off_t)queue * MAX_QUEUE_DEPTH * DESCRIPTOR_BYTES;
	void *mapped = mmap(NULL, descriptor_bytes(depth), PROT_READ, MAP_SHARED | MAP_POPULATE, char_fd, offset);
	*error = mapped == MAP_FAILED ? -errno : 0;
	return mapped == MAP_FAILED ? NULL : mapped;
}

AENV_EXPORT int32_t aenv_ublk_unmap(void *descriptors, uint32_t depth)
{
	return munmap(descriptors, descriptor_bytes(depth)) == 0 ? 0 : -errno;
}

static off_t copy_offset(uint32_t queue, uint32_t io_tag, uint32_t done)
{
	return (off_t)(COPY_BASE + ((uint64_t)queue << 41) + ((uint64_t)io_tag << 25) + done);
}

AENV_EXPORT int32_t aenv_ublk_copy_from(int32_t char_fd, uint32_t queue, uint32_t io_tag, void *buffer,
                                        double buffer_offset, uint32_t length)
{
	char *at = (char *)buffer + (size_t)buffer_offset;
	uint32_t done = 0;
	while (done < length) {
		ssize_t n = pread(char_fd, at + done, length - done, copy_offset(queue, io_tag, done));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		done += (uint32_t)n;
	}
	return (int32_t)done;
}

AENV_EXPORT int32_t aenv_ublk_copy_to(int32_t char_fd, uint32_t queue, uint32_t io_tag, const void *buffer,
                                      double buffer_offset, uint32_t length)
{
	const char *at = (const char *)buffer + (size_t)buffer_offset;
	uint32_t done = 0;
	while (done < length) {
		ssize_t n = pwrite(char_fd, at + done, length - done, copy_offset(queue, io_tag, done));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		done += (uint32_t)n;
	}
	return (int32_t)done;
}
