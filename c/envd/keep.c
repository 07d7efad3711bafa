#include "keep.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PATIENCE_MS = 2000 };

static int wait_for(int sock, short events, int ms) {
  struct pollfd p = {.fd = sock, .events = events};
  int n;
  while ((n = poll(&p, 1, ms)) < 0 && errno == EINTR) {
  }
  return n > 0 ? 0 : n ? -errno : -EAGAIN;
}

int keep_send(int sock, const keep_msg *m, const void *meta, size_t n, const int fds[3]) {
  union {
    char raw[CMSG_SPACE(3 * sizeof(int))];
    struct cmsghdr align;
  } cm;
  keep_msg out = *m;
  struct iovec iov[2] = {{&out, sizeof out}, {(void *)meta, n}};
  struct msghdr mh = {.msg_iov = iov, .msg_iovlen = n ? 2 : 1};
  int pass[3], count = 0;
  out.flags &= ~7u;
  for (int i = 0; fds && i < 3; i++)
    if (fds[i] >= 0) {
      out.flags |= 1u << i;
      pass[count++] = fds[i];
    }
  if (count) {
    memset(&cm, 0, sizeof cm);
    mh.msg_control = cm.raw;
    mh.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
    struct cmsghdr *h = CMSG_FIRSTHDR(&mh);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
    memcpy(CMSG_DATA(h), pass, (size_t)count * sizeof(int));
  }
  for (;;) {
    if (sendmsg(sock, &mh, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return 0;
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return -errno;
    int rc = wait_for(sock, POLLOUT, PATIENCE_MS);
    if (rc) return rc;
  }
}

ssize_t keep_recv(int sock, int wait_ms, keep_msg *m, uint8_t *meta, size_t cap, int fds[3]) {
  union {
    char raw[CMSG_SPACE(3 * sizeof(int))];
    struct cmsghdr align;
  } cm;
  struct iovec iov[2] = {{m, sizeof *m}, {meta, cap}};
  struct msghdr mh = {.msg_iov = iov, .msg_iovlen = 2, .msg_control = cm.raw, .msg_controllen = sizeof cm.raw};
  fds[0] = fds[1] = fds[2] = -1;
  ssize_t n;
  while ((n = recvmsg(sock, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return -errno;
    int rc = wait_ms ? wait_for(sock, POLLIN, wait_ms) : -EAGAIN;
    if (rc) return rc;
  }
  if (n == 0) return -ECONNRESET;
  int got[3], count = 0, used = 0;
  for (struct cmsghdr *h = CMSG_FIRSTHDR(&mh); h; h = CMSG_NXTHDR(&mh, h))
    if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS) {
      count = (int)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
      memcpy(got, CMSG_DATA(h), (size_t)count * sizeof(int));
    }
  for (int i = 0; i < 3; i++)
    if (n >= (ssize_t)sizeof *m && m->flags >> i & 1 && used < count) fds[i] = got[used++];
  while (used < count) close(got[used++]);
  return n < (ssize_t)sizeof *m ? -EPROTO : n - (ssize_t)sizeof *m;
}

static void kept_free(kept *k) {
  for (int i = 0; i < 3; i++)
    if (k->fds[i] >= 0) close(k->fds[i]);
  free(k);
}

static kept **find(kept **list, int32_t pid) {
  while (*list && (*list)->m.pid != pid) list = &(*list)->next;
  return list;
}

static void forget(kept **list, int32_t pid) {
  kept **at = find(list, pid), *k = *at;
  if (!k) return;
  *at = k->next;
  kept_free(k);
}

bool keeper_take(kept **list, int sock) {
  static const size_t cap = KEEP_META_MAX;
  uint8_t *meta = malloc(cap);
  keep_msg m;
  int fds[3];
  bool any = false;
  for (ssize_t n; meta && (n = keep_recv(sock, 0, &m, meta, cap, fds)) >= 0;) {
    any = true;
    if (m.kind == KEEP_PUT) {
      forget(list, m.pid); // an old one of that number
      kept *k = calloc(1, sizeof *k + (size_t)n);
      if (k) {
        k->m = m;
        k->n = (size_t)n;
        memcpy(k->fds, fds, sizeof k->fds);
        memcpy(k->meta, meta, (size_t)n);
        k->next = *list;
        *list = k;
        continue;
      }
    }
    for (int i = 0; i < 3; i++)
      if (fds[i] >= 0) close(fds[i]);
    kept *k = *find(list, m.pid);
    if (m.kind == KEEP_DROP) forget(list, m.pid);
    if (m.kind == KEEP_CLOSE_IN && k && k->fds[0] >= 0) {
      close(k->fds[0]);
      k->fds[0] = -1;
    }
    if (m.kind == KEEP_EXIT && k) {
      k->exited = true;
      k->m.status = m.status;
    }
  }
  free(meta);
  return any;
}

void keeper_exit(kept **list, int sock, int32_t pid, int32_t status) {
  kept *k = *find(list, pid);
  if (!k || k->exited) return;
  k->exited = true;
  k->m.status = status;
  keep_msg m = {.kind = KEEP_EXIT, .pid = pid, .status = status};
  if (sock >= 0 && keep_send(sock, &m, NULL, 0, NULL)) return; // it will be told when it starts again
}

void keeper_hand_over(kept **list, int sock) {
  for (kept *k = *list; k; k = k->next) {
    keep_msg m = k->m;
    m.kind = KEEP_PUT;
    if (keep_send(sock, &m, k->meta, k->n, k->fds)) return;
    m = (keep_msg){.kind = KEEP_EXIT, .pid = k->m.pid, .status = k->m.status};
    if (k->exited && keep_send(sock, &m, NULL, 0, NULL)) return;
  }
  keep_msg m = {.kind = KEEP_READY};
  keep_send(sock, &m, NULL, 0, NULL);
}
