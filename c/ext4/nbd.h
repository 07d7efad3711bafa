/*
 * NBD client over a unix socket, fixed newstyle handshake (NBD protocol document, "Newstyle negotiation"
 * and "Transmission phase"). Writes are pipelined: a write returns when it has been sent, and its reply is
 * collected by a later call. A request never overlaps one in flight, since the server may reorder them.
 */
#ifndef AENV_EXT4_NBD_H
#define AENV_EXT4_NBD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "failure.h"

#define NBD_MAX_IN_FLIGHT 16
/* Longest request sent; a server that asks for less gets less. */
#define NBD_MAX_REQUEST_BYTES (1u << 20)

struct nbd_request {
	uint64_t offset;
	uint32_t length;
	bool busy;
	bool write;
};

struct nbd {
	int fd;
	uint64_t size_bytes;
	uint32_t max_request_bytes;
	bool can_flush;
	unsigned in_flight;
	struct nbd_request requests[NBD_MAX_IN_FLIGHT];
	struct failure *failure;
};

/* Connects to `socket_path` and opens the export. */
int nbd_open(struct nbd *nbd, const char *socket_path, const char *export_name, struct failure *failure);
/* `length` bytes at `offset`, in order behind overlapping writes in flight. */
int nbd_read(struct nbd *nbd, uint64_t offset, void *data, size_t length);
/* Sends the write and returns; `data` may be reused at once. */
int nbd_write(struct nbd *nbd, uint64_t offset, const void *data, size_t length);
/* Waits for every write in flight. */
int nbd_drain(struct nbd *nbd);
/* Drains, then makes everything durable. */
int nbd_flush(struct nbd *nbd);
/* Says goodbye and closes; safe to call twice. */
void nbd_close(struct nbd *nbd);

#endif
