// Port exposure: what listens on loopback only becomes reachable under the machine's own address.
//
// Once a second the listening sockets are looked at. For a port that is bound to loopback and to nothing wider a
// listener on the outer address is opened, and its connections are carried to loopback. It goes when the inner
// listener goes.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "agent.h"

enum { SCAN_MS = 1000, TUNNELS_MAX = 1024, HELD_MAX = 64 * 1024, PORTS_MAX = 512, TABLE_MAX = 4 << 20 };

typedef struct forward {
  struct forward *next;
  agent *ag;
  ev e;
  uint16_t port;
  bool v6, wanted;
} forward;

// Side 0 is the client, side 1 the service. held[i] waits to be written to side i.
typedef struct tunnel {
  struct tunnel *next;
  agent *ag;
  ev e[2];
  buf held[2];
  bool eof[2], shut[2], hup[2], connecting;
} tunnel;

struct ports {
  timer scan;
  struct in_addr addr;
  forward *forwards;
  tunnel *tunnels;
  unsigned ntunnels;
};

// ---- tunnels -----------------------------------------------------------------------------------

static void tunnel_free(tunnel *t) {
  struct ports *ps = t->ag->ports;
  for (tunnel **p = &ps->tunnels; *p; p = &(*p)->next)
    if (*p == t) {
      *p = t->next;
      ps->ntunnels--;
      break;
    }
  for (int i = 0; i < 2; i++) {
    ev_del(&t->ag->loop, &t->e[i]);
    if (t->e[i].fd >= 0) close(t->e[i].fd);
    t->e[i].fd = -1;
    buf_free(&t->held[i]);
  }
  loop_free_later(&t->ag->loop, t);
}

// What can be done is done; false when the tunnel is over.
static bool carry(tunnel *t, int from, bool readable) {
  int to = 1 - from;
  buf *b = &t->held[to];
  if (readable && !t->eof[from] && buf_len(b) < HELD_MAX) {
    uint8_t *p = buf_reserve(b, HELD_MAX);
    ssize_t n = p ? recv(t->e[from].fd, p, HELD_MAX, 0) : -1;
    if (n > 0) b->len += (size_t)n;
    if (n == 0) t->eof[from] = true;
    if (n < 0 && (!p || (errno != EAGAIN && errno != EINTR))) return false;
  }
  while (buf_len(b) && !t->connecting) {
    ssize_t n = send(t->e[to].fd, buf_data(b), buf_len(b), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) return false;
    buf_consume(b, (size_t)n);
  }
  if (t->eof[from] && !buf_len(b) && !t->connecting && !t->shut[to]) {
    shutdown(t->e[to].fd, SHUT_WR);
    t->shut[to] = true;
  }
  return !(t->shut[0] && t->shut[1]);
}

static void tunnel_watch(tunnel *t) {
  for (int i = 0; i < 2; i++) {
    uint32_t m = 0;
    if (!t->eof[i] && buf_len(&t->held[1 - i]) < HELD_MAX && !(i == 1 && t->connecting)) m |= EPOLLIN;
    if (buf_len(&t->held[i]) || (i == 1 && t->connecting)) m |= EPOLLOUT;
    if (!m && t->hup[i]) { // a hang-up is reported even when nothing is asked for: stop hearing it
      ev_del(&t->ag->loop, &t->e[i]);
      continue;
    }
    if (ev_set(&t->ag->loop, &t->e[i], m)) {
      tunnel_free(t);
      return;
    }
  }
}

static void on_tunnel(ev *e, uint32_t events) {
  tunnel *t = e->owner;
  int side = e == &t->e[1];
  bool ok = true;
  if (events & EPOLLHUP) t->hup[side] = true;
  if (side == 1 && t->connecting && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) {
    int err = 0;
    socklen_t n = sizeof err;
    getsockopt(e->fd, SOL_SOCKET, SO_ERROR, &err, &n);
    ok = !err;
    t->connecting = false;
  } else if (events & EPOLLERR) {
    ok = false;
  } else if ((events & EPOLLHUP) && !(events & EPOLLIN) && t->eof[side]) {
    ok = false; // both directions are closed: nothing can be written there any more
  }
  ok = ok && carry(t, side, events & (EPOLLIN | EPOLLHUP)) && carry(t, 1 - side, false);
  if (ok)
    tunnel_watch(t);
  else
    tunnel_free(t);
}

static void on_forward(ev *e, uint32_t events) {
  (void)events;
  forward *f = e->owner;
  agent *ag = f->ag;
  int client = accept4(e->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (client < 0) {
    // Out of descriptors: with the next scan again, instead of spinning.
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) ev_set(&ag->loop, e, 0);
    return;
  }
  tunnel *t = ag->ports->ntunnels < TUNNELS_MAX ? calloc(1, sizeof *t) : NULL;
  int server = t ? socket(f->v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0) : -1;
  struct sockaddr_in a4 = {.sin_family = AF_INET, .sin_port = htons(f->port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  struct sockaddr_in6 a6 = {.sin6_family = AF_INET6, .sin6_port = htons(f->port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
  int one = 1;
  if (server >= 0) {
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  }
  if (server < 0 ||
      (connect(server, f->v6 ? (struct sockaddr *)&a6 : (struct sockaddr *)&a4, f->v6 ? sizeof a6 : sizeof a4) &&
       errno != EINPROGRESS)) {
    if (server >= 0) close(server);
    close(client);
    free(t);
    return;
  }
  t->ag = ag;
  t->connecting = true;
  t->e[0] = (ev){.fd = client, .cb = on_tunnel, .owner = t};
  t->e[1] = (ev){.fd = server, .cb = on_tunnel, .owner = t};
  t->next = ag->ports->tunnels;
  ag->ports->tunnels = t;
  ag->ports->ntunnels++;
  tunnel_watch(t);
}

// ---- scan --------------------------------------------------------------------------------------

enum { INNER4 = 1, INNER6 = 2, OUTER = 4 };

typedef struct {
  uint16_t port;
  uint8_t where;
} listening;

static void note(listening *l, size_t *n, uint16_t port, uint8_t where) {
  for (size_t i = 0; i < *n; i++)
    if (l[i].port == port) {
      l[i].where |= where;
      return;
    }
  if (*n < PORTS_MAX) l[(*n)++] = (listening){port, where};
}

// Lines of /proc/net/tcp and tcp6 (Documentation/networking/proc_net_tcp.rst): the address is hexadecimal in
// host-order words; state 0A is LISTEN. Listening sockets come first.
static void read_table(const char *path, bool v6, uint32_t own, listening *l, size_t *n) {
  char *text;
  if (read_whole(path, &text, TABLE_MAX) < 0) return;
  size_t width = v6 ? 32 : 8;
  for (char *p = strchr(text, '\n'); p && p[1]; p = strchr(p + 1, '\n')) {
    char *a = strchr(p + 1, ':');
    if (!a || strlen(a) < width + 30) break;
    a += 2;
    char *state = strchr(a + width + 6, ' ');
    if (a[width] != ':' || !state) break;
    if (strncmp(state, " 0A ", 4)) continue;
    uint16_t port = (uint16_t)strtoul(a + width + 1, NULL, 16);
    bool mapped = v6 && !strncmp(a, "0000000000000000FFFF0000", 24);
    if (v6 && !mapped) {
      if (!strncmp(a, "00000000000000000000000000000000", 32))
        note(l, n, port, OUTER);
      else if (!strncmp(a, "00000000000000000000000001000000", 32))
        note(l, n, port, INNER6);
      continue;
    }
    char word[9] = {0};
    memcpy(word, a + (mapped ? 24 : 0), 8);
    uint32_t ip = (uint32_t)strtoul(word, NULL, 16); // network order as it lies in memory
    if (!ip || ip == own)
      note(l, n, port, OUTER);
    else if (ntohl(ip) == INADDR_LOOPBACK)
      note(l, n, port, INNER4);
  }
  free(text);
}

static void open_forward(agent *ag, uint16_t port, bool v6) {
  forward *f = calloc(1, sizeof *f);
  int fd = f ? socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0) : -1;
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = ag->ports->addr};
  int one = 1;
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 128)) {
    if (fd >= 0) close(fd);
    free(f);
    return; // tried again with the next scan
  }
  f->ag = ag;
  f->port = port;
  f->v6 = v6;
  f->wanted = true;
  f->e = (ev){.fd = fd, .cb = on_forward, .owner = f};
  f->next = ag->ports->forwards;
  ag->ports->forwards = f;
  ev_set(&ag->loop, &f->e, EPOLLIN);
}

static void close_forward(forward **p) {
  forward *f = *p;
  *p = f->next;
  ev_del(&f->ag->loop, &f->e);
  close(f->e.fd);
  loop_free_later(&f->ag->loop, f);
}

static void scan(agent *ag) {
  struct ports *ps = ag->ports;
  listening l[PORTS_MAX];
  size_t n = 0;
  read_table("/proc/net/tcp", false, ps->addr.s_addr, l, &n);
  read_table("/proc/net/tcp6", true, ps->addr.s_addr, l, &n);
  for (forward *f = ps->forwards; f; f = f->next) {
    f->wanted = false;
    ev_set(&ag->loop, &f->e, EPOLLIN);
  }
  for (size_t i = 0; i < n; i++) {
    forward *have = ps->forwards;
    while (have && have->port != l[i].port) have = have->next;
    uint8_t inner = l[i].where & (INNER4 | INNER6);
    if (!inner || l[i].port == ag->http.port) continue;
    if (have) {
      have->wanted = true; // the outer listener seen is this one
      have->v6 = !(inner & INNER4);
    } else if (!(l[i].where & OUTER)) {
      open_forward(ag, l[i].port, !(inner & INNER4));
    }
  }
  for (forward **p = &ps->forwards; *p;)
    if ((*p)->wanted)
      p = &(*p)->next;
    else
      close_forward(p);
}

static void on_scan(timer *t) {
  agent *ag = t->owner;
  scan(ag);
  timer_set(&ag->loop, t, SCAN_MS);
}

int ports_start(agent *ag, const char *addr) {
  struct ports *ps = calloc(1, sizeof *ps);
  if (!ps) return -ENOMEM;
  if (inet_pton(AF_INET, addr, &ps->addr) != 1) {
    free(ps);
    return -EINVAL;
  }
  ps->scan = (timer){.cb = on_scan, .owner = ag};
  ag->ports = ps;
  return timer_set(&ag->loop, &ps->scan, SCAN_MS);
}

void ports_drop(agent *ag) {
  while (ag->ports && ag->ports->tunnels) tunnel_free(ag->ports->tunnels);
}

void ports_close(agent *ag) {
  if (!ag->ports) return;
  ports_drop(ag);
  while (ag->ports->forwards) close_forward(&ag->ports->forwards);
  timer_clear(&ag->loop, &ag->ports->scan);
  free(ag->ports);
  ag->ports = NULL;
}
