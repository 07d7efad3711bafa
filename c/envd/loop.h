// Single-threaded epoll loop with timers. All of the agent runs on it.
#ifndef AENV_LOOP_H
#define AENV_LOOP_H

#include <stdbool.h>
#include <stdint.h>

typedef struct loop loop;

// One watched descriptor. Embedded in its owner, which must outlive the current batch of events:
// after ev_del free the owner with loop_free_later only.
typedef struct ev {
  int fd;
  uint32_t mask;
  bool added;
  void (*cb)(struct ev *e, uint32_t events);
  void *owner;
} ev;

// One-shot timer, embedded in its owner. Not set when pos is 0.
typedef struct timer {
  int64_t at; // CLOCK_MONOTONIC, ms
  unsigned pos;
  void (*cb)(struct timer *t);
  void *owner;
} timer;

struct loop {
  int epfd;
  bool stop;
  timer **heap; // heap[1..ntimers]
  unsigned ntimers, captimers;
  void **later;
  unsigned nlater, caplater;
};

int loop_init(loop *l); // 0, or -errno
void loop_close(loop *l);
int loop_run(loop *l); // until l->stop; 0, or -errno
// One round: waits for events, at most wait_ms (-1: for ever) and not beyond the next timer. How many, or -errno.
int loop_turn(loop *l, int wait_ms);

// Watches fd for mask (0 = only errors). 0, or -errno.
int ev_set(loop *l, ev *e, uint32_t mask);
void ev_del(loop *l, ev *e); // forgets the descriptor, does not close it

int timer_set(loop *l, timer *t, int64_t in_ms); // (re)arms; 0, or -ENOMEM
void timer_clear(loop *l, timer *t);

// free() once no event of the current batch can refer to p any more.
void loop_free_later(loop *l, void *p);

#endif
