#include "netfilter.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/netfilter/nf_conntrack_common.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netfilter/nfnetlink_conntrack.h>
#include <linux/netfilter_ipv4.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

#define ANSWER_BYTES (64 * 1024)
#define ANSWER_TIMEOUT_SECONDS 20
/* A batch goes to the kernel in one piece. */
#define SEND_BUFFER_BYTES (8 * 1024 * 1024)
#define RECEIVE_BUFFER_BYTES (1024 * 1024)
/* Not in the headers of older systems: attribute and flag of linux/netfilter/nfnetlink_conntrack.h. */
#define ATTR_FILTER 25
#define ATTR_FILTER_ORIG_FLAGS 1
#define ATTR_FILTER_REPLY_FLAGS 2
#define FILTER_IP_SRC 1u

EXPORT int aenv_nf_open(void) {
  int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_NETFILTER);
  if (fd < 0) return -errno;
  struct timeval timeout = {.tv_sec = ANSWER_TIMEOUT_SECONDS};
  int send_bytes = SEND_BUFFER_BYTES, receive_bytes = RECEIVE_BUFFER_BYTES;
  int result = setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) < 0 ? -errno : 0;
  /* Beyond the system's limit with CAP_NET_ADMIN in the first namespace only: elsewhere as much as we get. */
  if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &send_bytes, sizeof send_bytes) < 0)
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_bytes, sizeof send_bytes);
  if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &receive_bytes, sizeof receive_bytes) < 0)
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof receive_bytes);
  if (result < 0) close(fd);
  return result < 0 ? result : fd;
}

static int send_all(int fd, const void *bytes, uint32_t length) {
  struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
  for (;;) {
    ssize_t sent = sendto(fd, bytes, length, 0, (struct sockaddr *)&kernel, sizeof kernel);
    if (sent >= 0) return 0;
    if (errno != EINTR) return -errno;
  }
}

static ssize_t receive(int fd, void *answer, int flags) {
  for (;;) {
    ssize_t got = recv(fd, answer, ANSWER_BYTES, flags);
    if (got >= 0) return got;
    if (errno != EINTR) return -errno;
  }
}

/* ---- transactions ------------------------------------------------------------------------------ */

int aenv_nf_transact(int fd, const void *batch, uint32_t length, uint32_t *message) {
  *message = UINT32_MAX;
  uint8_t *answer = malloc(ANSWER_BYTES);
  if (answer == NULL) return -ENOMEM;
  int result = send_all(fd, batch, length);
  bool acknowledged = false;
  /*
   * The kernel has done its work when the send returns, and has answered by then: an error for each message it
   * refused, or the acknowledgement that the last one asks for, so that silence is never taken for success.
   * All answers are read: the next batch comes by the same socket.
   */
  for (;;) {
    ssize_t got = receive(fd, answer, MSG_DONTWAIT);
    if (got == -EAGAIN) break;
    if (got < 0) {
      if (result == 0) result = (int)got;
      /* Answers were lost for want of room (then the others are still there), or the socket is of no use. */
      if (got == -ENOBUFS) continue;
      break;
    }
    int left = (int)got;
    for (const struct nlmsghdr *header = (const struct nlmsghdr *)answer; NLMSG_OK(header, left);
         header = NLMSG_NEXT(header, left)) {
      if (header->nlmsg_type != NLMSG_ERROR || header->nlmsg_len < NLMSG_LENGTH(sizeof(struct nlmsgerr))) continue;
      const struct nlmsgerr *error = NLMSG_DATA(header);
      acknowledged = true;
      if (error->error >= 0 || result < 0) continue;
      result = error->error;
      *message = error->msg.nlmsg_seq;
    }
  }
  free(answer);
  return result < 0 ? result : acknowledged ? 0 : -EPROTO;
}

/* ---- connection tracking ----------------------------------------------------------------------- */

struct ct_request {
  union {
    struct nlmsghdr header;
    uint8_t bytes[1024];
  };
};

static void ct_start(struct ct_request *request, uint16_t message, uint16_t flags) {
  memset(request, 0, sizeof *request);
  request->header.nlmsg_len = NLMSG_LENGTH(sizeof(struct nfgenmsg));
  request->header.nlmsg_type = (uint16_t)((NFNL_SUBSYS_CTNETLINK << 8) | message);
  request->header.nlmsg_flags = NLM_F_REQUEST | flags;
  struct nfgenmsg *body = NLMSG_DATA(&request->header);
  body->nfgen_family = AF_INET;
  body->version = NFNETLINK_V0;
}

static struct nlattr *ct_attribute(struct ct_request *request, uint16_t type, const void *data, size_t bytes) {
  size_t at = NLMSG_ALIGN(request->header.nlmsg_len);
  if (at + NLA_HDRLEN + NLA_ALIGN(bytes) > sizeof request->bytes) return NULL;
  struct nlattr *attribute = (struct nlattr *)(request->bytes + at);
  attribute->nla_type = type;
  attribute->nla_len = (uint16_t)(NLA_HDRLEN + bytes);
  if (bytes > 0) memcpy((uint8_t *)attribute + NLA_HDRLEN, data, bytes);
  request->header.nlmsg_len = (uint32_t)(at + NLA_HDRLEN + NLA_ALIGN(bytes));
  return attribute;
}

static void ct_nest_end(struct ct_request *request, struct nlattr *nest) {
  nest->nla_len = (uint16_t)(request->bytes + request->header.nlmsg_len - (uint8_t *)nest);
}

static const struct nlattr *find_attribute(const void *from, size_t bytes, uint16_t type) {
  for (size_t at = 0; at + NLA_HDRLEN <= bytes;) {
    const struct nlattr *attribute = (const struct nlattr *)((const uint8_t *)from + at);
    if (attribute->nla_len < NLA_HDRLEN || at + attribute->nla_len > bytes) return NULL;
    if ((attribute->nla_type & NLA_TYPE_MASK) == type) return attribute;
    at += NLA_ALIGN(attribute->nla_len);
  }
  return NULL;
}

static const struct nlattr *nested(const struct nlattr *outer, uint16_t type) {
  if (outer == NULL) return NULL;
  return find_attribute((const uint8_t *)outer + NLA_HDRLEN, outer->nla_len - (size_t)NLA_HDRLEN, type);
}

/* Whether the entry was opened by `source`; *request is then the order to delete it. */
static bool deletion_of(const struct nlmsghdr *header, uint32_t source, uint32_t mask, struct ct_request *request) {
  if (header->nlmsg_len < NLMSG_LENGTH(sizeof(struct nfgenmsg))) return false;
  const uint8_t *attributes = (const uint8_t *)NLMSG_DATA(header) + NLMSG_ALIGN(sizeof(struct nfgenmsg));
  size_t bytes = header->nlmsg_len - NLMSG_LENGTH(sizeof(struct nfgenmsg));
  const struct nlattr *tuple = find_attribute(attributes, bytes, CTA_TUPLE_ORIG);
  const struct nlattr *address = nested(nested(tuple, CTA_TUPLE_IP), CTA_IP_V4_SRC);
  uint32_t value;
  if (address == NULL || address->nla_len < NLA_HDRLEN + sizeof value) return false;
  memcpy(&value, (const uint8_t *)address + NLA_HDRLEN, sizeof value);
  if ((ntohl(value) & mask) != source) return false;
  ct_start(request, IPCTNL_MSG_CT_DELETE, NLM_F_ACK);
  const uint16_t copied[] = {CTA_TUPLE_ORIG, CTA_ZONE, CTA_ID};
  for (size_t i = 0; i < sizeof copied / sizeof copied[0]; i++) {
    const struct nlattr *attribute = find_attribute(attributes, bytes, copied[i]);
    if (attribute == NULL) continue;
    const uint8_t *data = (const uint8_t *)attribute + NLA_HDRLEN;
    if (ct_attribute(request, attribute->nla_type, data, attribute->nla_len - (size_t)NLA_HDRLEN) == NULL) return false;
  }
  return true;
}

static int ask(int fd, const struct ct_request *request, uint8_t *answer) {
  int result = send_all(fd, request, request->header.nlmsg_len);
  if (result < 0) return result;
  ssize_t got = receive(fd, answer, 0);
  if (got < 0) return (int)(got == -EAGAIN ? -ETIMEDOUT : got);
  const struct nlmsghdr *header = (const struct nlmsghdr *)answer;
  if (!NLMSG_OK(header, (size_t)got) || header->nlmsg_type != NLMSG_ERROR) return -EPROTO;
  return ((const struct nlmsgerr *)NLMSG_DATA(header))->error;
}

/* `filtered`: the kernel looks for the address itself (5.8 and later refuse or honour it, earlier ones ignore it). */
static int dump_request(int fd, uint32_t source, bool filtered) {
  struct ct_request request;
  ct_start(&request, IPCTNL_MSG_CT_GET, NLM_F_DUMP);
  if (filtered) {
    uint32_t address = htonl(source), flags = FILTER_IP_SRC, none = 0;
    struct nlattr *tuple = ct_attribute(&request, CTA_TUPLE_ORIG | NLA_F_NESTED, NULL, 0);
    struct nlattr *ip = ct_attribute(&request, CTA_TUPLE_IP | NLA_F_NESTED, NULL, 0);
    ct_attribute(&request, CTA_IP_V4_SRC, &address, sizeof address);
    ct_nest_end(&request, ip);
    ct_nest_end(&request, tuple);
    struct nlattr *filter = ct_attribute(&request, ATTR_FILTER | NLA_F_NESTED, NULL, 0);
    ct_attribute(&request, ATTR_FILTER_ORIG_FLAGS, &flags, sizeof flags);
    ct_attribute(&request, ATTR_FILTER_REPLY_FLAGS, &none, sizeof none);
    ct_nest_end(&request, filter);
  }
  return send_all(fd, &request, request.header.nlmsg_len);
}

static int forget(int dump_fd, int delete_fd, uint32_t source, uint32_t mask, bool filtered, uint8_t *answer,
                  uint8_t *reply) {
  int count = 0;
  int result = dump_request(dump_fd, source, filtered);
  while (result == 0) {
    ssize_t got = receive(dump_fd, answer, 0);
    if (got < 0) return (int)(got == -EAGAIN ? -ETIMEDOUT : got);
    int left = (int)got;
    for (const struct nlmsghdr *header = (const struct nlmsghdr *)answer; NLMSG_OK(header, left);
         header = NLMSG_NEXT(header, left)) {
      if (header->nlmsg_type == NLMSG_DONE) return count;
      if (header->nlmsg_type == NLMSG_ERROR) {
        int error = ((const struct nlmsgerr *)NLMSG_DATA(header))->error;
        return error < 0 ? error : -EPROTO;
      }
      struct ct_request deletion;
      if (!deletion_of(header, source, mask, &deletion)) continue;
      int deleted = ask(delete_fd, &deletion, reply);
      /* Gone by itself meanwhile: as wanted. */
      if (deleted < 0 && deleted != -ENOENT) return deleted;
      count++;
    }
  }
  return result;
}

int aenv_nf_forget_flows(int read_fd, int delete_fd, uint32_t source, uint32_t mask) {
  uint8_t *buffers = malloc(2 * ANSWER_BYTES);
  if (buffers == NULL) return -ENOMEM;
  bool single = mask == UINT32_MAX;
  int result = forget(read_fd, delete_fd, source, mask, single, buffers, buffers + ANSWER_BYTES);
  if (single && (result == -EINVAL || result == -EOPNOTSUPP || result == -ERANGE))
    result = forget(read_fd, delete_fd, source, mask, false, buffers, buffers + ANSWER_BYTES);
  free(buffers);
  return result;
}

/* ---- diverted connections ---------------------------------------------------------------------- */

EXPORT int aenv_nf_original_destination(int fd, uint32_t out[2]) {
  struct sockaddr_in address;
  socklen_t length = sizeof address;
  if (getsockopt(fd, IPPROTO_IP, SO_ORIGINAL_DST, &address, &length) < 0) return -errno;
  out[0] = ntohl(address.sin_addr.s_addr);
  out[1] = ntohs(address.sin_port);
  return 0;
}
