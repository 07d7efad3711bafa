/*
 * Network slots: a namespace with a tap, joined to the caller's namespace by a veth pair.
 *
 * Everything runs on a short-lived thread of its own (unshare and setns change the calling thread for
 * good, and the caller's threads must stay where they are), so no call here blocks on the kernel's
 * network lock. Completion is told through a pipe.
 */
#ifndef AENV_NETNS_H
#define AENV_NETNS_H

#include <stdint.h>

/* What a finished job wrote to its pipe: exactly this many bytes, then end of file. */
#define AENV_NET_REPORT_BYTES 128

/* A count or -errno in host byte order, then the step that failed as zero-terminated text. */
struct aenv_net_report {
  int32_t result;
  char step[AENV_NET_REPORT_BYTES - 4];
};

/* Addresses in host byte order. All of a slot that the kernel has to know. */
struct aenv_net_slot {
  uint32_t group;            /* device group of the host end: marks the devices that are ours */
  uint32_t host_veth;        /* address of the host end, /31 with peer_veth */
  uint32_t peer_veth;
  uint32_t host_address;     /* where the host reaches the guest: routed to the pair */
  uint32_t guest_address;    /* behind the tap, /prefix with gateway_address */
  uint32_t gateway_address;  /* address of the tap */
  uint32_t prefix;
  uint32_t guest_mac_low;    /* MAC addresses: 02:fc and these four bytes */
  uint32_t gateway_mac_low;
  uint32_t host_mac_low;
  uint32_t peer_mac_low;
  uint32_t tap_owner;        /* user who may attach to the tap without CAP_NET_ADMIN */
};

/*
 * Makes the namespace, bind-mounts it on ns_path (created here; its directory must exist), makes the
 * pair (host_if in the caller's namespace, `vpeer` in the new one) and the tap `tap0`, with addresses,
 * routes and permanent neighbours, IPv6 off. Before any device is there the namespace gets the firewall
 * rules of `batch` (an nf_tables batch, see netfilter.h; copied), so that no packet ever passes without.
 * Undoes all of it when a step fails.
 * Returns the read end of the pipe, or -errno when the job could not be started.
 */
int aenv_net_slot_create(const char *ns_path, const char *host_if, const struct aenv_net_slot *slot, const void *batch,
                         uint32_t batch_bytes);

/*
 * Removes the pair (if host_if is there and in `group`) and the namespace's mount and file. What is gone
 * already is no error. Returns like aenv_net_slot_create.
 */
int aenv_net_slot_destroy(const char *ns_path, const char *host_if, uint32_t group);

/* Bytes a second and bytes at once on top of a second's worth, as seen from the guest. A rate of 0: no limit. */
struct aenv_net_rates {
  uint64_t receive;
  uint64_t receive_burst;
  uint64_t send;
  uint64_t send_burst;
};

/*
 * Limits what goes through a slot's pair, from the next packet on, in place of what limited it before: a token bucket
 * (sch_tbf) on each end for what that sends. A bucket has at least 64 KiB; what it has no room for waits, a fifth of a
 * second's worth (128 KiB to 16 MiB), the rest is dropped. Returns like aenv_net_slot_create.
 */
int aenv_net_slot_rates(const char *ns_path, const char *host_if, const struct aenv_net_rates *rates);

/* Limits a device in a namespace of its own, to see whether this kernel can. Returns like aenv_net_slot_create. */
int aenv_net_probe_rates(void);

/*
 * Makes the slot's tap that of another user; -EBUSY while a process is attached to it, -ENODEV without it. Returns like
 * aenv_net_slot_create.
 */
int aenv_net_tap_owner(const char *ns_path, uint32_t owner);

/*
 * Applies an nf_tables batch (copied), all of it or none: in the namespace at ns_path, or when that is empty by
 * the socket fd (aenv_nf_open), which must stay open and unused until the report. Returns like
 * aenv_net_slot_create.
 */
int aenv_net_rules(const char *ns_path, int fd, const void *batch, uint32_t batch_bytes);

/*
 * Forgets the connections opened by addresses that are `source` under `mask` (host byte order), by two sockets of aenv_nf_open under the
 * same condition; the report's result is their number. Returns like aenv_net_slot_create.
 */
int aenv_net_forget_flows(int read_fd, int delete_fd, uint32_t source, uint32_t mask);

/*
 * Names of the caller's network devices in `group`, one a line, into buf.
 * Returns the number of bytes, or -errno (-ENOSPC: does not fit).
 */
int aenv_net_group_devices(uint32_t group, char *buf, uint32_t capacity);

#endif
