/*
 * Firewall transactions and connection tracking over netlink, and sockets of diverted connections.
 *
 * A transaction is a finished nf_tables batch (built in TypeScript): the kernel takes all of it or none.
 * The aenv_nf_* functions work in the calling thread's network namespace and wait for the kernel; callers
 * run them on a thread of their own (see netns.h).
 */
#ifndef AENV_NETFILTER_H
#define AENV_NETFILTER_H

#include <stdint.h>

/*
 * A socket for the functions below, in the caller's network namespace; or -errno. Whoever makes many changes
 * keeps one: closing it makes the kernel clean up after earlier transactions with the firewall locked, which
 * takes ten times longer than a transaction.
 */
int aenv_nf_open(void);

/*
 * Applies one batch by the socket fd (one user at a time). Returns 0, or the -errno of the first message that was refused; its number within the
 * batch (0: the one that begins it) is then in *message, UINT32_MAX when the failure belongs to none.
 */
int aenv_nf_transact(int fd, const void *batch, uint32_t length, uint32_t *message);

/*
 * Forgets the tracked IPv4 connections that addresses opened which are `source` (host byte order) under `mask`
 * (all ones: that one address), so that no later packet counts as part of one. By two sockets, to read and to delete (one user at a time; not to be used again after an
 * error). Returns their number or -errno.
 */
int aenv_nf_forget_flows(int read_fd, int delete_fd, uint32_t source, uint32_t mask);

/*
 * Where a connection diverted to the local socket fd was meant to go: address and port in host byte order in
 * out[0] and out[1]. Does not block. Returns 0 or -errno (-ENOENT: it was not diverted).
 */
int aenv_nf_original_destination(int fd, uint32_t out[2]);

#endif
