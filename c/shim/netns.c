#include "netns.h"

#include "netfilter.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_link.h>
#include <linux/if_tun.h>
#include <linux/neighbour.h>
#include <linux/netlink.h>
#include <linux/pkt_sched.h>
#include <linux/rtnetlink.h>
#include <linux/veth.h>
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

#define PEER_IF "vpeer"
#define TAP_IF "tap0"
#define JOB_PATH_MAX 512
#define JOB_STACK_BYTES (256 * 1024)
/* How long to wait for one answer of the kernel; the rtnl lock may be held for a while under load. */
#define ANSWER_TIMEOUT_SECONDS 20

enum job_kind { JOB_CREATE, JOB_DESTROY, JOB_RULES, JOB_FORGET, JOB_RATES, JOB_PROBE_RATES, JOB_OWNER };

struct job {
  enum job_kind kind;
  int report_fd;
  struct aenv_net_slot slot;
  struct aenv_net_rates rates;
  char ns_path[JOB_PATH_MAX];
  char host_if[IFNAMSIZ];
  bool pair_made;
  uint32_t source;
  uint32_t mask;
  /* For netfilter. Opened by the job when it is -1, and then closed when the result has been told: see aenv_nf_open. */
  int socket;
  int second_socket;
  bool socket_is_ours;
  uint32_t batch_bytes;
  uint8_t batch[];
};

/* ---- netlink requests -------------------------------------------------------------------------- */

struct request {
  union {
    struct nlmsghdr header;
    uint8_t bytes[1024];
  };
};

static void *request_start(struct request *request, uint16_t type, uint16_t flags, size_t body_bytes) {
  memset(request, 0, sizeof *request);
  request->header.nlmsg_len = NLMSG_LENGTH(body_bytes);
  request->header.nlmsg_type = type;
  request->header.nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | flags;
  request->header.nlmsg_seq = 1;
  return NLMSG_DATA(&request->header);
}

/* The requests are built from constants and checked names: they always fit. */
static struct rtattr *attribute(struct request *request, uint16_t type, const void *data, size_t bytes) {
  size_t at = NLMSG_ALIGN(request->header.nlmsg_len);
  struct rtattr *attr = (struct rtattr *)(request->bytes + at);
  attr->rta_type = type;
  attr->rta_len = (uint16_t)RTA_LENGTH(bytes);
  if (bytes > 0) memcpy(RTA_DATA(attr), data, bytes);
  request->header.nlmsg_len = (uint32_t)(at + RTA_ALIGN(attr->rta_len));
  return attr;
}

static void attribute_u32(struct request *request, uint16_t type, uint32_t value) {
  attribute(request, type, &value, sizeof value);
}

static void attribute_text(struct request *request, uint16_t type, const char *text) {
  attribute(request, type, text, strlen(text) + 1);
}

static void attribute_address(struct request *request, uint16_t type, uint32_t address) {
  attribute_u32(request, type, htonl(address));
}

static void attribute_end(struct request *request, struct rtattr *nest) {
  nest->rta_len = (uint16_t)(request->bytes + request->header.nlmsg_len - (uint8_t *)nest);
}

static void mac_bytes(uint32_t low, uint8_t mac[6]) {
  mac[0] = 0x02;
  mac[1] = 0xfc;
  mac[2] = (uint8_t)(low >> 24);
  mac[3] = (uint8_t)(low >> 16);
  mac[4] = (uint8_t)(low >> 8);
  mac[5] = (uint8_t)low;
}

static void attribute_mac(struct request *request, uint16_t type, uint32_t low) {
  uint8_t mac[6];
  mac_bytes(low, mac);
  attribute(request, type, mac, sizeof mac);
}

static int netlink_open(void) {
  int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
  if (fd < 0) return -errno;
  struct timeval timeout = {.tv_sec = ANSWER_TIMEOUT_SECONDS};
  if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) < 0) {
    int error = -errno;
    close(fd);
    return error;
  }
  return fd;
}

static int netlink_send(int fd, struct request *request) {
  struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
  for (;;) {
    ssize_t sent = sendto(fd, request, request->header.nlmsg_len, 0, (struct sockaddr *)&kernel, sizeof kernel);
    if (sent >= 0) return 0;
    if (errno != EINTR) return -errno;
  }
}

/* One request, one acknowledgement. */
static int netlink_ask(int fd, struct request *request) {
  int result = netlink_send(fd, request);
  if (result < 0) return result;
  union {
    struct nlmsghdr header;
    uint8_t bytes[4096];
  } answer;
  ssize_t got;
  do {
    got = recv(fd, &answer, sizeof answer, 0);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return errno == EAGAIN ? -ETIMEDOUT : -errno;
  if ((size_t)got < NLMSG_LENGTH(sizeof(struct nlmsgerr)) || answer.header.nlmsg_type != NLMSG_ERROR) return -EPROTO;
  const struct nlmsgerr *error = NLMSG_DATA(&answer.header);
  return error->error;
}

/* ---- single steps ------------------------------------------------------------------------------ */

static int add_pair(int fd, const struct job *job, int host_ns) {
  struct request request;
  struct ifinfomsg *link = request_start(&request, RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, sizeof *link);
  link->ifi_family = AF_UNSPEC;
  attribute_text(&request, IFLA_IFNAME, PEER_IF);
  attribute_mac(&request, IFLA_ADDRESS, job->slot.peer_mac_low);
  struct rtattr *info = attribute(&request, IFLA_LINKINFO, NULL, 0);
  attribute(&request, IFLA_INFO_KIND, "veth", 4);
  struct rtattr *data = attribute(&request, IFLA_INFO_DATA, NULL, 0);
  struct ifinfomsg none = {.ifi_family = AF_UNSPEC};
  struct rtattr *peer = attribute(&request, VETH_INFO_PEER, &none, sizeof none);
  attribute_text(&request, IFLA_IFNAME, job->host_if);
  attribute_mac(&request, IFLA_ADDRESS, job->slot.host_mac_low);
  attribute_u32(&request, IFLA_GROUP, job->slot.group);
  attribute_u32(&request, IFLA_NET_NS_FD, (uint32_t)host_ns);
  attribute_end(&request, peer);
  attribute_end(&request, data);
  attribute_end(&request, info);
  return netlink_ask(fd, &request);
}

static int link_up(int fd, uint32_t index) {
  struct request request;
  struct ifinfomsg *link = request_start(&request, RTM_NEWLINK, 0, sizeof *link);
  link->ifi_family = AF_UNSPEC;
  link->ifi_index = (int)index;
  link->ifi_flags = IFF_UP;
  link->ifi_change = IFF_UP;
  return netlink_ask(fd, &request);
}

static int link_set_mac(int fd, uint32_t index, uint32_t mac_low) {
  struct request request;
  struct ifinfomsg *link = request_start(&request, RTM_NEWLINK, 0, sizeof *link);
  link->ifi_family = AF_UNSPEC;
  link->ifi_index = (int)index;
  attribute_mac(&request, IFLA_ADDRESS, mac_low);
  return netlink_ask(fd, &request);
}

static int link_delete(int fd, const char *name) {
  struct request request;
  struct ifinfomsg *link = request_start(&request, RTM_DELLINK, 0, sizeof *link);
  link->ifi_family = AF_UNSPEC;
  attribute_text(&request, IFLA_IFNAME, name);
  return netlink_ask(fd, &request);
}

static int add_address(int fd, uint32_t index, uint32_t address, uint32_t prefix) {
  struct request request;
  struct ifaddrmsg *body = request_start(&request, RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, sizeof *body);
  body->ifa_family = AF_INET;
  body->ifa_prefixlen = (uint8_t)prefix;
  body->ifa_scope = RT_SCOPE_UNIVERSE;
  body->ifa_index = index;
  attribute_address(&request, IFA_LOCAL, address);
  attribute_address(&request, IFA_ADDRESS, address);
  return netlink_ask(fd, &request);
}

/* `destination` 0/0 is the default route; `source` 0: let the kernel choose. */
static int add_route(int fd, uint32_t index, uint32_t destination, uint32_t prefix, uint32_t gateway, uint32_t source) {
  struct request request;
  struct rtmsg *body = request_start(&request, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, sizeof *body);
  body->rtm_family = AF_INET;
  body->rtm_dst_len = (uint8_t)prefix;
  body->rtm_table = RT_TABLE_MAIN;
  body->rtm_protocol = RTPROT_STATIC;
  body->rtm_scope = RT_SCOPE_UNIVERSE;
  body->rtm_type = RTN_UNICAST;
  if (prefix > 0) attribute_address(&request, RTA_DST, destination);
  attribute_address(&request, RTA_GATEWAY, gateway);
  if (source != 0) attribute_address(&request, RTA_PREFSRC, source);
  attribute_u32(&request, RTA_OIF, index);
  return netlink_ask(fd, &request);
}

/* A permanent neighbour: no ARP delay on the first packet, nothing to expire or to spoof. */
static int add_neighbour(int fd, uint32_t index, uint32_t address, uint32_t mac_low) {
  struct request request;
  struct ndmsg *body = request_start(&request, RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, sizeof *body);
  body->ndm_family = AF_INET;
  body->ndm_ifindex = (int)index;
  body->ndm_state = NUD_PERMANENT;
  attribute_address(&request, NDA_DST, address);
  attribute_mac(&request, NDA_LLADDR, mac_low);
  return netlink_ask(fd, &request);
}

/* Makes the tap, or with `flags` 0 attaches to the one there is. */
static int own_tap(short flags, uint32_t owner) {
  /* A tap that is not there would be made. */
  if (flags == 0 && if_nametoindex(TAP_IF) == 0) return -ENODEV;
  int fd = open("/dev/net/tun", O_RDWR | O_CLOEXEC);
  if (fd < 0) return -errno;
  struct ifreq request = {.ifr_flags = (short)(IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | flags)};
  memcpy(request.ifr_name, TAP_IF, sizeof TAP_IF);
  int result = 0;
  if (ioctl(fd, TUNSETIFF, &request) < 0) result = -errno;
  /* Root's, too: some kernels (6.12.13 and others of early 2025 on) let nobody without CAP_NET_ADMIN attach to a tap
   * that has no owner, and a VMM runs without it. */
  if (result == 0 && ioctl(fd, TUNSETOWNER, owner) < 0) result = -errno;
  if (result == 0 && ioctl(fd, TUNSETPERSIST, 1) < 0) result = -errno;
  close(fd);
  return result;
}

static uint64_t at_least(uint64_t value, uint64_t least) { return value < least ? least : value; }
static uint64_t at_most(uint64_t value, uint64_t most) { return value > most ? most : value; }

/* A rate of 0 takes the limit away, if there is one. */
static int limit_rate(int fd, uint32_t index, uint64_t rate, uint64_t burst) {
  struct request request;
  uint16_t flags = rate == 0 ? 0 : NLM_F_CREATE | NLM_F_REPLACE;
  struct tcmsg *body = request_start(&request, rate == 0 ? RTM_DELQDISC : RTM_NEWQDISC, flags, sizeof *body);
  body->tcm_family = AF_UNSPEC;
  body->tcm_ifindex = (int)index;
  body->tcm_parent = TC_H_ROOT;
  if (rate == 0) {
    int result = netlink_ask(fd, &request);
    /* There is only the device's own, which cannot be deleted; or a kernel that has none at all. */
    return result == -ENOENT || result == -EOPNOTSUPP ? 0 : result;
  }
  attribute_text(&request, TCA_KIND, "tbf");
  struct rtattr *options = attribute(&request, TCA_OPTIONS, NULL, 0);
  struct tc_tbf_qopt limits = {
      .rate = {.linklayer = TC_LINKLAYER_ETHERNET, .rate = (uint32_t)at_most(rate, UINT32_MAX)},
      .limit = (uint32_t)at_most(at_least(rate / 5, 128 << 10), 16 << 20),
  };
  uint64_t bucket = burst > UINT64_MAX - rate ? UINT64_MAX : rate + burst;
  attribute(&request, TCA_TBF_PARMS, &limits, sizeof limits);
  attribute_u32(&request, TCA_TBF_BURST, (uint32_t)at_most(at_least(bucket, 64 << 10), UINT32_MAX));
  if (rate > UINT32_MAX) attribute(&request, TCA_TBF_RATE64, &rate, sizeof rate);
  attribute_end(&request, options);
  return netlink_ask(fd, &request);
}

/* /proc/sys/net shows the namespace of the thread that opens it. */
static int sysctl_write(const char *path, const char *value, bool optional) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return optional && errno == ENOENT ? 0 : -errno;
  int result = write(fd, value, strlen(value)) < 0 ? -errno : 0;
  close(fd);
  return result;
}

static int interface_sysctl(const char *family, const char *kind, const char *name, const char *key, const char *value,
                            bool optional) {
  char path[160];
  int length = snprintf(path, sizeof path, "/proc/sys/net/%s/%s/%s/%s", family, kind, name, key);
  if (length < 0 || (size_t)length >= sizeof path) return -ENAMETOOLONG;
  return sysctl_write(path, value, optional);
}

static int mount_file(const char *path) {
  int fd = open(path, O_RDONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0400);
  if (fd < 0) return -errno;
  close(fd);
  if (mount("/proc/thread-self/ns/net", path, NULL, MS_BIND, NULL) < 0) {
    int error = -errno;
    unlink(path);
    return error;
  }
  return 0;
}

static int unmount_file(const char *path) {
  /* Not a mount point (EINVAL): an earlier process died between making and mounting it. */
  if (umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW) < 0 && errno != EINVAL && errno != ENOENT) return -errno;
  if (unlink(path) < 0 && errno != ENOENT) return -errno;
  return 0;
}

/* ---- jobs -------------------------------------------------------------------------------------- */

#define STEP(text, call)                                     \
  do {                                                       \
    int step_result = (call);                                \
    if (step_result < 0) {                                   \
      snprintf(report->step, sizeof report->step, "%s", text); \
      return step_result;                                    \
    }                                                        \
  } while (0)

static int install_rules(struct job *job, struct aenv_net_report *report) {
  uint32_t message;
  if (job->socket < 0) {
    job->socket = aenv_nf_open();
    STEP("open a netfilter socket", job->socket);
    job->socket_is_ours = true;
  }
  int result = aenv_nf_transact(job->socket, job->batch, job->batch_bytes, &message);
  if (result < 0) {
    if (message == UINT32_MAX) snprintf(report->step, sizeof report->step, "install firewall rules");
    else snprintf(report->step, sizeof report->step, "install firewall rules: message %u of the batch", message);
  }
  return result;
}

static int configure_inside(struct job *job, int fd, int host_ns, struct aenv_net_report *report) {
  const struct aenv_net_slot *slot = &job->slot;
  /* Before any device is there, so that none ever has an IPv6 address. Absent when the kernel has no IPv6. */
  STEP("turn IPv6 off", sysctl_write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1", true));
  STEP("turn IPv6 off", sysctl_write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1", true));
  int rules = install_rules(job, report);
  if (rules < 0) return rules;
  STEP("turn forwarding on", sysctl_write("/proc/sys/net/ipv4/ip_forward", "1", false));
  STEP("make the veth pair", add_pair(fd, job, host_ns));
  job->pair_made = true;
  STEP("make the tap", own_tap(IFF_TUN_EXCL, slot->tap_owner));
  uint32_t lo = if_nametoindex("lo"), peer = if_nametoindex(PEER_IF), tap = if_nametoindex(TAP_IF);
  if (lo == 0 || peer == 0 || tap == 0) STEP("find the new devices", -ENODEV);
  STEP("set the tap's MAC address", link_set_mac(fd, tap, slot->gateway_mac_low));
  STEP("set ARP timing", interface_sysctl("ipv4", "neigh", TAP_IF, "retrans_time_ms", "100", false));
  STEP("set ARP timing", interface_sysctl("ipv4", "neigh", PEER_IF, "retrans_time_ms", "100", false));
  /* ARP requests from addresses that are not behind the tap make no neighbours: all namespaces share one
   * table of them, and a guest could fill it. */
  STEP("filter what comes from the tap", interface_sysctl("ipv4", "conf", TAP_IF, "rp_filter", "1", false));
  STEP("bring lo up", link_up(fd, lo));
  STEP("bring vpeer up", link_up(fd, peer));
  STEP("bring tap0 up", link_up(fd, tap));
  STEP("address vpeer", add_address(fd, peer, slot->peer_veth, 31));
  STEP("address tap0", add_address(fd, tap, slot->gateway_address, slot->prefix));
  STEP("set the default route", add_route(fd, peer, 0, 0, slot->host_veth, 0));
  STEP("add the neighbours", add_neighbour(fd, peer, slot->host_veth, slot->host_mac_low));
  STEP("add the neighbours", add_neighbour(fd, tap, slot->guest_address, slot->guest_mac_low));
  return 0;
}

static int configure_outside(const struct job *job, int fd, struct aenv_net_report *report) {
  const struct aenv_net_slot *slot = &job->slot;
  uint32_t host = if_nametoindex(job->host_if);
  if (host == 0) STEP("find the host's veth", -ENODEV);
  STEP("turn IPv6 off", interface_sysctl("ipv6", "conf", job->host_if, "disable_ipv6", "1", true));
  STEP("set ARP timing", interface_sysctl("ipv4", "neigh", job->host_if, "retrans_time_ms", "100", false));
  STEP("bring the host's veth up", link_up(fd, host));
  STEP("address the host's veth", add_address(fd, host, slot->host_veth, 31));
  STEP("add the neighbours", add_neighbour(fd, host, slot->peer_veth, slot->peer_mac_low));
  STEP("route the guest", add_route(fd, host, slot->host_address, 32, slot->peer_veth, slot->host_veth));
  return 0;
}

/* Runs in the new namespace and returns in the host's. */
static int create_namespaced(struct job *job, int host_ns, struct aenv_net_report *report) {
  STEP("make a network namespace", unshare(CLONE_NEWNET) < 0 ? -errno : 0);
  int result = mount_file(job->ns_path);
  if (result < 0) snprintf(report->step, sizeof report->step, "keep the namespace in its file");
  if (result == 0) {
    int inside = netlink_open();
    result = inside < 0 ? inside : configure_inside(job, inside, host_ns, report);
    if (inside >= 0) close(inside);
    if (result < 0) unmount_file(job->ns_path);
  }
  if (setns(host_ns, CLONE_NEWNET) < 0 && result == 0) {
    result = -errno;
    snprintf(report->step, sizeof report->step, "return from the namespace");
    unmount_file(job->ns_path);
  }
  return result;
}

static int create(struct job *job, struct aenv_net_report *report) {
  int host_ns = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
  STEP("open the host's namespace", host_ns < 0 ? -errno : 0);
  int result = create_namespaced(job, host_ns, report);
  close(host_ns);
  if (result < 0 && !job->pair_made) return result;
  int outside = netlink_open();
  if (result == 0) {
    result = outside < 0 ? outside : configure_outside(job, outside, report);
    if (result < 0) unmount_file(job->ns_path);
  }
  /* The namespace's end takes the pair with it, but later: gone now means that the name is free again. */
  if (result < 0 && outside >= 0) link_delete(outside, job->host_if);
  if (outside >= 0) close(outside);
  return result;
}

static int device_group(int fd, const char *name, uint32_t *group);

static int destroy(const struct job *job, struct aenv_net_report *report) {
  int fd = netlink_open();
  STEP("open a netlink socket", fd < 0 ? fd : 0);
  uint32_t group = 0;
  int result = device_group(fd, job->host_if, &group);
  if (result == 0 && group == job->slot.group) result = link_delete(fd, job->host_if);
  close(fd);
  if (result == -ENODEV) result = 0;
  STEP("delete the host's veth", result);
  STEP("remove the namespace's file", unmount_file(job->ns_path));
  return 0;
}

static int enter(const struct job *job, struct aenv_net_report *report) {
  int ns = open(job->ns_path, O_RDONLY | O_CLOEXEC);
  STEP("open the namespace", ns < 0 ? -errno : 0);
  int entered = setns(ns, CLONE_NEWNET) < 0 ? -errno : 0;
  close(ns);
  STEP("enter the namespace", entered);
  return 0;
}

static int change_rules(struct job *job, struct aenv_net_report *report) {
  int result = job->ns_path[0] == '\0' ? 0 : enter(job, report);
  return result < 0 ? result : install_rules(job, report);
}

/* What a device (an end of the pair) sends, in the namespace where this is. */
static int limit_end(const char *name, uint64_t rate, uint64_t burst, struct aenv_net_report *report) {
  uint32_t index = if_nametoindex(name);
  if (index == 0) STEP("find the device to limit", -ENODEV);
  int fd = netlink_open();
  STEP("open a netlink socket", fd < 0 ? fd : 0);
  int result = limit_rate(fd, index, rate, burst);
  close(fd);
  STEP("limit the rate of a device", result);
  return 0;
}

static int change_rates(const struct job *job, struct aenv_net_report *report) {
  const struct aenv_net_rates *rates = &job->rates;
  int result = limit_end(job->host_if, rates->receive, rates->receive_burst, report);
  if (result == 0) result = enter(job, report);
  return result < 0 ? result : limit_end(PEER_IF, rates->send, rates->send_burst, report);
}

/* In a namespace that is gone with this thread. */
static int probe_rates(struct aenv_net_report *report) {
  STEP("make a network namespace", unshare(CLONE_NEWNET) < 0 ? -errno : 0);
  return limit_end("lo", 1 << 20, 0, report);
}

static int change_owner(const struct job *job, struct aenv_net_report *report) {
  int result = enter(job, report);
  if (result < 0) return result;
  STEP("give the tap another owner", own_tap(0, job->slot.tap_owner));
  return 0;
}

static int forget_flows(const struct job *job, struct aenv_net_report *report) {
  int result = aenv_nf_forget_flows(job->socket, job->second_socket, job->source, job->mask);
  STEP("forget tracked connections", result);
  return result;
}

static int work(struct job *job, struct aenv_net_report *report) {
  switch (job->kind) {
    case JOB_CREATE: return create(job, report);
    case JOB_DESTROY: return destroy(job, report);
    case JOB_RULES: return change_rules(job, report);
    case JOB_FORGET: return forget_flows(job, report);
    case JOB_RATES: return change_rates(job, report);
    case JOB_PROBE_RATES: return probe_rates(report);
    case JOB_OWNER: return change_owner(job, report);
  }
  return -EINVAL;
}

static void *run(void *argument) {
  struct job *job = argument;
  struct aenv_net_report report = {0};
  report.result = work(job, &report);
  /* A pipe takes this much at once. Nobody reads any more: nobody to tell (SIGPIPE is blocked here). */
  ssize_t written;
  do {
    written = write(job->report_fd, &report, sizeof report);
  } while (written < 0 && errno == EINTR);
  close(job->report_fd);
  if (job->socket_is_ours) close(job->socket);
  free(job);
  return NULL;
}

static int start(struct job *job, const char *ns_path, const char *host_if) {
  if (strlen(ns_path) >= sizeof job->ns_path || strlen(host_if) >= sizeof job->host_if) {
    free(job);
    return -ENAMETOOLONG;
  }
  strcpy(job->ns_path, ns_path);
  strcpy(job->host_if, host_if);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) < 0) {
    int error = -errno;
    free(job);
    return error;
  }
  job->report_fd = ends[1];
  pthread_attr_t attributes;
  pthread_t thread;
  sigset_t all, before;
  int error = pthread_attr_init(&attributes);
  if (error == 0) {
    pthread_attr_setstacksize(&attributes, JOB_STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&thread, &attributes, run, job);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
  }
  if (error != 0) {
    close(ends[0]);
    close(ends[1]);
    free(job);
    return -error;
  }
  return ends[0];
}

static struct job *new_job(enum job_kind kind, const void *batch, uint32_t batch_bytes) {
  struct job *job = calloc(1, sizeof *job + batch_bytes);
  if (job == NULL) return NULL;
  job->kind = kind;
  job->socket = -1;
  job->batch_bytes = batch_bytes;
  if (batch_bytes > 0) memcpy(job->batch, batch, batch_bytes);
  return job;
}

EXPORT int aenv_net_slot_create(const char *ns_path, const char *host_if, const struct aenv_net_slot *slot,
                                const void *batch, uint32_t batch_bytes) {
  if (host_if[0] == '\0') return -EINVAL;
  struct job *job = new_job(JOB_CREATE, batch, batch_bytes);
  if (job == NULL) return -ENOMEM;
  job->slot = *slot;
  return start(job, ns_path, host_if);
}

EXPORT int aenv_net_slot_destroy(const char *ns_path, const char *host_if, uint32_t group) {
  if (host_if[0] == '\0') return -EINVAL;
  struct job *job = new_job(JOB_DESTROY, NULL, 0);
  if (job == NULL) return -ENOMEM;
  job->slot.group = group;
  return start(job, ns_path, host_if);
}

EXPORT int aenv_net_rules(const char *ns_path, int fd, const void *batch, uint32_t batch_bytes) {
  if (ns_path[0] == '\0' && fd < 0) return -EBADF;
  struct job *job = new_job(JOB_RULES, batch, batch_bytes);
  if (job == NULL) return -ENOMEM;
  if (ns_path[0] == '\0') job->socket = fd;
  return start(job, ns_path, "");
}

EXPORT int aenv_net_slot_rates(const char *ns_path, const char *host_if, const struct aenv_net_rates *rates) {
  if (ns_path[0] == '\0' || host_if[0] == '\0') return -EINVAL;
  struct job *job = new_job(JOB_RATES, NULL, 0);
  if (job == NULL) return -ENOMEM;
  job->rates = *rates;
  return start(job, ns_path, host_if);
}

EXPORT int aenv_net_probe_rates(void) {
  struct job *job = new_job(JOB_PROBE_RATES, NULL, 0);
  if (job == NULL) return -ENOMEM;
  return start(job, "", "");
}

EXPORT int aenv_net_tap_owner(const char *ns_path, uint32_t owner) {
  if (ns_path[0] == '\0') return -EINVAL;
  struct job *job = new_job(JOB_OWNER, NULL, 0);
  if (job == NULL) return -ENOMEM;
  job->slot.tap_owner = owner;
  return start(job, ns_path, "");
}

EXPORT int aenv_net_forget_flows(int read_fd, int delete_fd, uint32_t source, uint32_t mask) {
  struct job *job = new_job(JOB_FORGET, NULL, 0);
  if (job == NULL) return -ENOMEM;
  job->socket = read_fd;
  job->second_socket = delete_fd;
  job->source = source;
  job->mask = mask;
  return start(job, "", "");
}

/* ---- devices of a group ------------------------------------------------------------------------ */

struct device {
  const char *name;
  uint32_t group;
};

static bool parse_device(const struct nlmsghdr *header, struct device *device) {
  *device = (struct device){0};
  if (header->nlmsg_type != RTM_NEWLINK || header->nlmsg_len < NLMSG_LENGTH(sizeof(struct ifinfomsg))) return false;
  const struct ifinfomsg *link = NLMSG_DATA(header);
  int left = (int)IFLA_PAYLOAD(header);
  for (const struct rtattr *attr = IFLA_RTA(link); RTA_OK(attr, left); attr = RTA_NEXT(attr, left)) {
    if (attr->rta_type == IFLA_IFNAME) device->name = RTA_DATA(attr);
    if (attr->rta_type == IFLA_GROUP && RTA_PAYLOAD(attr) >= 4) memcpy(&device->group, RTA_DATA(attr), 4);
  }
  return device->name != NULL;
}

static int device_group(int fd, const char *name, uint32_t *group) {
  struct request request;
  struct ifinfomsg *link = request_start(&request, RTM_GETLINK, 0, sizeof *link);
  request.header.nlmsg_flags = NLM_F_REQUEST;
  link->ifi_family = AF_UNSPEC;
  attribute_text(&request, IFLA_IFNAME, name);
  int result = netlink_send(fd, &request);
  if (result < 0) return result;
  union {
    struct nlmsghdr header;
    uint8_t bytes[16384];
  } answer;
  ssize_t got;
  do {
    got = recv(fd, &answer, sizeof answer, 0);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return errno == EAGAIN ? -ETIMEDOUT : -errno;
  if (!NLMSG_OK(&answer.header, (size_t)got)) return -EPROTO;
  if (answer.header.nlmsg_type == NLMSG_ERROR) {
    const struct nlmsgerr *error = NLMSG_DATA(&answer.header);
    return error->error < 0 ? error->error : -EPROTO;
  }
  struct device device;
  if (!parse_device(&answer.header, &device)) return -EPROTO;
  *group = device.group;
  return 0;
}

EXPORT int aenv_net_group_devices(uint32_t group, char *buf, uint32_t capacity) {
  int fd = netlink_open();
  if (fd < 0) return fd;
  struct request request;
  struct ifinfomsg *link = request_start(&request, RTM_GETLINK, 0, sizeof *link);
  request.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  link->ifi_family = AF_UNSPEC;
  int result = netlink_send(fd, &request);
  uint32_t used = 0;
  /* The kernel fills at most 32 KiB per answer of a dump. */
  size_t answer_bytes = 64 * 1024;
  uint8_t *answer = malloc(answer_bytes);
  if (answer == NULL) result = -ENOMEM;
  while (result == 0) {
    ssize_t got = recv(fd, answer, answer_bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      result = errno == EAGAIN ? -ETIMEDOUT : -errno;
      break;
    }
    unsigned left = (unsigned)got;
    bool done = false;
    for (const struct nlmsghdr *header = (const struct nlmsghdr *)answer; NLMSG_OK(header, left);
         header = NLMSG_NEXT(header, left)) {
      if (header->nlmsg_type == NLMSG_DONE) done = true;
      if (header->nlmsg_type == NLMSG_ERROR) result = ((const struct nlmsgerr *)NLMSG_DATA(header))->error;
      struct device device;
      if (result < 0 || done || !parse_device(header, &device) || device.group != group) continue;
      size_t length = strnlen(device.name, IFNAMSIZ);
      if (used + length + 1 > capacity) {
        result = -ENOSPC;
        break;
      }
      memcpy(buf + used, device.name, length);
      buf[used + length] = '\n';
      used += (uint32_t)length + 1;
    }
    if (done) break;
  }
  free(answer);
  close(fd);
  return result < 0 ? result : (int)used;
}
