#include "loop.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "util.h"

int loop_init(loop *l) {
  memset(l, 0, sizeof *l);
  l->epfd = epoll_create1(EPOLL_CLOEXEC);
  return l->epfd < 0 ? -errno : 0;
}

static void free_later_now(loop *l) {
  for (unsigned i = 0; i < l->nlater; i++) free(l->later[i]);
  l->nlater = 0;
}

void loop_close(loop *l) {
  free_later_now(l);
  free(l->later);
  free(l->heap);
  if (l->epfd >= 0) close(l->epfd);
  memset(l, 0, sizeof *l);
  l->epfd = -1;
}

int ev_set(loop *l, ev *e, uint32_t mask) {
  if (e->added && e->mask == mask) return 0;
  struct epoll_event ee = {.events = mask, .data.ptr = e};
  if (epoll_ctl(l->epfd, e->added ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, e->fd, &ee)) return -errno;
  e->added = true;
  e->mask = mask;
  return 0;
}

void ev_del(loop *l, ev *e) {
  if (e->added) epoll_ctl(l->epfd, EPOLL_CTL_DEL, e->fd, NULL);
  e->added = false;
  e->mask = 0;
}

void loop_free_later(loop *l, void *p) {
  if (!p) return;
  if (l->nlater == l->caplater) {
    unsigned cap = l->caplater ? l->caplater * 2 : 32;
    void **n = realloc(l->later, cap * sizeof *n);
    if (!n) return; // no memory: leak this one rather than free it under a pending event
    l->later = n;
    l->caplater = cap;
  }
  l->later[l->nlater++] = p;
}

static void heap_place(loop *l, timer *t, unsigned i) {
  l->heap[i] = t;
  t->pos = i;
}

static void heap_fix(loop *l, unsigned i) {
  timer *t = l->heap[i];
  while (i > 1 && l->heap[i / 2]->at > t->at) {
    heap_place(l, l->heap[i / 2], i);
    i /= 2;
  }
  for (;;) {
    unsigned c = 2 * i;
    if (c > l->ntimers) break;
    if (c + 1 <= l->ntimers && l->heap[c + 1]->at < l->heap[c]->at) c++;
    if (l->heap[c]->at >= t->at) break;
    heap_place(l, l->heap[c], i);
    i = c;
  }
  heap_place(l, t, i);
}

int timer_set(loop *l, timer *t, int64_t in_ms) {
  t->at = mono_ms() + (in_ms > 0 ? in_ms : 0);
  if (!t->pos) {
    if (l->ntimers + 1 >= l->captimers) {
      unsigned cap = l->captimers ? l->captimers * 2 : 64;
      timer **n = realloc(l->heap, cap * sizeof *n);
      if (!n) return -ENOMEM;
      l->heap = n;
      l->captimers = cap;
    }
    heap_place(l, t, ++l->ntimers);
  }
  heap_fix(l, t->pos);
  return 0;
}

void timer_clear(loop *l, timer *t) {
  if (!t->pos) return;
  unsigned i = t->pos;
  t->pos = 0;
  timer *last = l->heap[l->ntimers--];
  if (last != t) {
    heap_place(l, last, i);
    heap_fix(l, i);
  }
}

int loop_turn(loop *l, int wait_ms) {
  int wait = wait_ms;
  if (l->ntimers) {
    int64_t d = l->heap[1]->at - mono_ms();
    int due = d < 0 ? 0 : d > INT_MAX ? INT_MAX : (int)d;
    if (wait < 0 || due < wait) wait = due;
  }
  struct epoll_event events[64];
  int n = epoll_wait(l->epfd, events, 64, wait);
  if (n < 0 && errno != EINTR) return -errno;
  for (int i = 0; i < n; i++) {
    ev *e = events[i].data.ptr;
    if (e->added) e->cb(e, events[i].events);
  }
  int64_t now = mono_ms();
  // Bounded: a timer that re-arms itself for "now" must not keep the descriptors waiting.
  for (unsigned k = l->ntimers; k && l->ntimers && l->heap[1]->at <= now; k--) {
    timer *t = l->heap[1];
    timer_clear(l, t);
    t->cb(t);
  }
  free_later_now(l);
  return n < 0 ? 0 : n;
}

int loop_run(loop *l) {
  while (!l->stop) {
    int rc = loop_turn(l, -1);
    if (rc < 0) return rc;
  }
  return 0;
}
