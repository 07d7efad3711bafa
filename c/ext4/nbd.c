#include "nbd.h"

#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/time.h>
#include <unistd.h>

/* A server that says nothing for this long is taken for hung. */
#define NBD_PATIENCE_SECONDS 120

#define NBD_MAGIC 0x4e42444d41474943ull
#define NBD_OPTION_MAGIC 0x49484156454f5054ull
#define NBD_OPTION_REPLY_MAGIC 0x0003e889045565a9ull
#define NBD_REQUEST_MAGIC 0x25609513u
#define NBD_SIMPLE_REPLY_MAGIC 0x67446698u

#define NBD_FLAG_FIXED_NEWSTYLE 1u
#define NBD_FLAG_NO_ZEROES 2u
#define NBD_OPT_GO 7u
#define NBD_REP_ACK 1u
#define NBD_REP_INFO 3u
#define NBD_INFO_EXPORT 0u
#define NBD_INFO_BLOCK_SIZE 3u
#define NBD_TRANSMISSION_READ_ONLY 2u
#define NBD_TRANSMISSION_SEND_FLUSH 4u

#define NBD_CMD_READ 0u
#define NBD_CMD_WRITE 1u
#define NBD_CMD_DISC 2u
#define NBD_CMD_FLUSH 3u

#define NBD_EPERM 1u
#define NBD_ENOSPC 28u

/* Option replies are small by nature; a larger one means that the peer is not an NBD server. */
#define MAX_OPTION_REPLY 65536u

struct wire_request {
	uint32_t magic;
	uint16_t flags;
	uint16_t type;
	uint64_t cookie;
	uint64_t offset;
	uint32_t length;
} __attribute__((packed));

struct wire_reply {
	uint32_t magic;
	uint32_t error;
	uint64_t cookie;
} __attribute__((packed));

static int receive(struct nbd *nbd, void *data, size_t length)
{
	char *p = data;

	while (length > 0) {
		ssize_t n = recv(nbd->fd, p, length, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return fail(nbd->failure, FAILURE_DEVICE, ETIMEDOUT, "block device: no answer within %d s",
				    NBD_PATIENCE_SECONDS);
		if (n < 0)
			return fail(nbd->failure, FAILURE_DEVICE, errno, "block device: receive failed: %s",
				    strerror(errno));
		if (n == 0)
			return fail(nbd->failure, FAILURE_DEVICE, EPIPE, "block device: the server closed the connection");
		p += n;
		length -= (size_t)n;
	}
	return 0;
}

static int transmit(struct nbd *nbd, const void *head, size_t head_length, const void *data, size_t length)
{
	struct iovec parts[2] = {
		{ .iov_base = (void *)head, .iov_len = head_length },
		{ .iov_base = (void *)data, .iov_len = length },
	};
	size_t first = 0;

	while (first < 2) {
		struct msghdr message = { .msg_iov = &parts[first], .msg_iovlen = 2 - first };
		ssize_t n;

		if (parts[first].iov_len == 0) {
			first++;
			continue;
		}
		n = sendmsg(nbd->fd, &message, MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return fail(nbd->failure, FAILURE_DEVICE, errno, "block device: send failed: %s", strerror(errno));
		while (n > 0) {
			size_t taken = (size_t)n < parts[first].iov_len ? (size_t)n : parts[first].iov_len;

			parts[first].iov_base = (char *)parts[first].iov_base + taken;
			parts[first].iov_len -= taken;
			n -= (ssize_t)taken;
			if (parts[first].iov_len == 0 && first < 1)
				first++;
		}
	}
	return 0;
}

static int protocol_error(struct nbd *nbd, const char *what)
{
	return fail(nbd->failure, FAILURE_DEVICE, EPROTO, "block device: %s", what);
}

static int negotiate(struct nbd *nbd, const char *export_name)
{
	struct {
		uint64_t magic;
		uint64_t option_magic;
		uint16_t flags;
	} __attribute__((packed)) hello;
	struct {
		uint64_t magic;
		uint32_t option;
		uint32_t length;
	} __attribute__((packed)) option;
	struct {
		uint64_t magic;
		uint32_t option;
		uint32_t type;
		uint32_t length;
	} __attribute__((packed)) reply;
	uint32_t client_flags;
	uint32_t name_length = (uint32_t)strlen(export_name);
	char body[4 + 256 + 4];
	bool have_export = false;
	int rc = receive(nbd, &hello, sizeof(hello));

	if (rc < 0)
		return rc;
	if (be64toh(hello.magic) != NBD_MAGIC || be64toh(hello.option_magic) != NBD_OPTION_MAGIC)
		return protocol_error(nbd, "the peer is not a newstyle NBD server");
	if (!(be16toh(hello.flags) & NBD_FLAG_FIXED_NEWSTYLE))
		return protocol_error(nbd, "the server does not speak fixed newstyle");
	client_flags = htobe32(be16toh(hello.flags) & (NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES));
	rc = transmit(nbd, &client_flags, sizeof(client_flags), NULL, 0);
	if (rc < 0)
		return rc;

	if (name_length > 256)
		return fail(nbd->failure, FAILURE_USAGE, EINVAL, "export name of %u bytes is too long", name_length);
	option.magic = htobe64(NBD_OPTION_MAGIC);
	option.option = htobe32(NBD_OPT_GO);
	option.length = htobe32(4 + name_length + 4);
	memcpy(body, &(uint32_t){ htobe32(name_length) }, 4);
	memcpy(body + 4, export_name, name_length);
	/* One information request: the block sizes. */
	memcpy(body + 4 + name_length, (const uint8_t[]){ 0, 1, 0, NBD_INFO_BLOCK_SIZE }, 4);
	rc = transmit(nbd, &option, sizeof(option), body, 4 + name_length + 4);
	if (rc < 0)
		return rc;

	for (;;) {
		uint8_t data[MAX_OPTION_REPLY];
		uint32_t length, type;

		rc = receive(nbd, &reply, sizeof(reply));
		if (rc < 0)
			return rc;
		length = be32toh(reply.length);
		type = be32toh(reply.type);
		if (be64toh(reply.magic) != NBD_OPTION_REPLY_MAGIC || length > sizeof(data))
			return protocol_error(nbd, "malformed option reply");
		rc = receive(nbd, data, length);
		if (rc < 0)
			return rc;
		if (type & 0x80000000u)
			return fail(nbd->failure, FAILURE_DEVICE, ENOENT, "block device: export '%s' refused (reply %#x%s%.*s)",
				    export_name, type, length > 0 ? ": " : "", (int)length, (const char *)data);
		if (type == NBD_REP_ACK)
			break;
		if (type == NBD_REP_INFO && length >= 12 && data[0] == 0 && data[1] == NBD_INFO_EXPORT) {
			uint64_t size;
			uint16_t flags;

			memcpy(&size, data + 2, 8);
			memcpy(&flags, data + 10, 2);
			nbd->size_bytes = be64toh(size);
			nbd->can_flush = be16toh(flags) & NBD_TRANSMISSION_SEND_FLUSH;
			if (be16toh(flags) & NBD_TRANSMISSION_READ_ONLY)
				return fail(nbd->failure, FAILURE_DEVICE, EROFS, "block device: export '%s' is read-only",
					    export_name);
			have_export = true;
		} else if (type == NBD_REP_INFO && length >= 14 && data[0] == 0 && data[1] == NBD_INFO_BLOCK_SIZE) {
			uint32_t maximum;

			memcpy(&maximum, data + 10, 4);
			maximum = be32toh(maximum) & ~4095u;
			if (maximum >= 4096 && maximum < nbd->max_request_bytes)
				nbd->max_request_bytes = maximum;
		}
	}
	return have_export ? 0 : protocol_error(nbd, "the server did not describe the export");
}

int nbd_open(struct nbd *nbd, const char *socket_path, const char *export_name, struct failure *failure)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	const struct timeval patience = { .tv_sec = NBD_PATIENCE_SECONDS };

	*nbd = (struct nbd){ .fd = -1, .max_request_bytes = NBD_MAX_REQUEST_BYTES, .failure = failure };
	if (strlen(socket_path) >= sizeof(address.sun_path))
		return fail(failure, FAILURE_USAGE, ENAMETOOLONG, "socket path %s is longer than %zu bytes", socket_path,
			    sizeof(address.sun_path) - 1);
	strcpy(address.sun_path, socket_path);
	nbd->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (nbd->fd < 0)
		return fail(failure, FAILURE_DEVICE, errno, "socket: %s", strerror(errno));
	if (connect(nbd->fd, (struct sockaddr *)&address, sizeof(address)) < 0)
		return fail(failure, FAILURE_DEVICE, errno, "block device: connect to %s: %s", socket_path,
			    strerror(errno));
	if (setsockopt(nbd->fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) < 0 ||
	    setsockopt(nbd->fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) < 0)
		return fail(failure, FAILURE_DEVICE, errno, "block device: setsockopt: %s", strerror(errno));
	return negotiate(nbd, export_name);
}

/* Takes one reply. For a read, the data goes to `target`; at most one read is ever in flight. */
static int collect(struct nbd *nbd, void *target)
{
	struct wire_reply reply;
	struct nbd_request *request;
	uint64_t cookie;
	uint32_t error;
	int rc = receive(nbd, &reply, sizeof(reply));

	if (rc < 0)
		return rc;
	cookie = be64toh(reply.cookie);
	error = be32toh(reply.error);
	if (be32toh(reply.magic) != NBD_SIMPLE_REPLY_MAGIC || cookie >= NBD_MAX_IN_FLIGHT ||
	    !nbd->requests[cookie].busy)
		return protocol_error(nbd, "malformed reply");
	request = &nbd->requests[cookie];
	if (error == NBD_ENOSPC)
		return fail(nbd->failure, FAILURE_DISK_FULL, ENOSPC, "block device: no space left on the host");
	if (error != 0)
		return fail(nbd->failure, FAILURE_DEVICE, EIO, "block device: %s of %u bytes at %llu failed with NBD error %u",
			    request->write ? "write" : "read", request->length, (unsigned long long)request->offset, error);
	if (!request->write && request->length > 0) {
		if (target == NULL)
			return protocol_error(nbd, "data for a request that was not a read");
		rc = receive(nbd, target, request->length);
		if (rc < 0)
			return rc;
	}
	request->busy = false;
	nbd->in_flight--;
	return 0;
}

int nbd_drain(struct nbd *nbd)
{
	while (nbd->in_flight > 0) {
		int rc = collect(nbd, NULL);

		if (rc < 0)
			return rc;
	}
	return 0;
}

/* Waits until nothing in flight overlaps the range and a slot is free; returns the slot. */
static int claim_slot(struct nbd *nbd, uint64_t offset, uint32_t length)
{
	for (;;) {
		int slot = -1;
		bool overlap = false;

		for (int i = 0; i < NBD_MAX_IN_FLIGHT; i++) {
			const struct nbd_request *request = &nbd->requests[i];

			if (!request->busy)
				slot = i;
			else if (request->offset < offset + length && offset < request->offset + request->length)
				overlap = true;
		}
		if (slot >= 0 && !overlap)
			return slot;
		int rc = collect(nbd, NULL);

		if (rc < 0)
			return rc;
	}
}

static int submit(struct nbd *nbd, uint16_t type, uint64_t offset, uint32_t length, const void *data)
{
	struct wire_request request;
	int slot = claim_slot(nbd, offset, length);
	int rc;

	if (slot < 0)
		return slot;
	request.magic = htobe32(NBD_REQUEST_MAGIC);
	request.flags = 0;
	request.type = htobe16(type);
	request.cookie = htobe64((uint64_t)slot);
	request.offset = htobe64(offset);
	request.length = htobe32(length);
	rc = transmit(nbd, &request, sizeof(request), data, type == NBD_CMD_WRITE ? length : 0);
	if (rc < 0)
		return rc;
	nbd->requests[slot] =
		(struct nbd_request){ .offset = offset, .length = length, .busy = true, .write = type != NBD_CMD_READ };
	nbd->in_flight++;
	return slot;
}

static int check_range(struct nbd *nbd, uint64_t offset, size_t length)
{
	if (offset > nbd->size_bytes || length > nbd->size_bytes - offset)
		return fail(nbd->failure, FAILURE_INTERNAL, EINVAL, "access to bytes %llu+%zu past the device's end %llu",
			    (unsigned long long)offset, length, (unsigned long long)nbd->size_bytes);
	return 0;
}

int nbd_read(struct nbd *nbd, uint64_t offset, void *data, size_t length)
{
	char *p = data;
	int rc = check_range(nbd, offset, length);

	while (rc >= 0 && length > 0) {
		uint32_t part = length < nbd->max_request_bytes ? (uint32_t)length : nbd->max_request_bytes;
		int slot = submit(nbd, NBD_CMD_READ, offset, part, NULL);

		if (slot < 0)
			return slot;
		while (nbd->requests[slot].busy) {
			rc = collect(nbd, p);
			if (rc < 0)
				return rc;
		}
		p += part;
		offset += part;
		length -= part;
	}
	return rc;
}

int nbd_write(struct nbd *nbd, uint64_t offset, const void *data, size_t length)
{
	const char *p = data;
	int rc = check_range(nbd, offset, length);

	while (rc >= 0 && length > 0) {
		uint32_t part = length < nbd->max_request_bytes ? (uint32_t)length : nbd->max_request_bytes;

		rc = submit(nbd, NBD_CMD_WRITE, offset, part, p);
		if (rc < 0)
			return rc;
		p += part;
		offset += part;
		length -= part;
	}
	return rc < 0 ? rc : 0;
}

int nbd_flush(struct nbd *nbd)
{
	int rc = nbd_drain(nbd);

	if (rc < 0 || !nbd->can_flush)
		return rc;
	rc = submit(nbd, NBD_CMD_FLUSH, 0, 0, NULL);
	return rc < 0 ? rc : nbd_drain(nbd);
}

void nbd_close(struct nbd *nbd)
{
	struct wire_request request = { .magic = htobe32(NBD_REQUEST_MAGIC), .type = htobe16(NBD_CMD_DISC) };

	if (nbd->fd < 0)
		return;
	if (nbd->size_bytes > 0)
		(void)send(nbd->fd, &request, sizeof(request), MSG_NOSIGNAL);
	close(nbd->fd);
	nbd->fd = -1;
}
