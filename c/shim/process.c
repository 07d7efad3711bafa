#include "process.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int32_t aenv_pidfd_open(int32_t pid) {
  long fd = syscall(SYS_pidfd_open, pid, 0);
  return fd < 0 ? -errno : (int32_t)fd;
}

int32_t aenv_pidfd_signal(int32_t pidfd, int32_t signal) {
  return syscall(SYS_pidfd_send_signal, pidfd, signal, NULL, 0) == 0 ? 0 : -errno;
}

#define EXITS_STACK_BYTES (64 * 1024)

/* Made at the first use, under the lock, and never closed. */
static pthread_mutex_t exits_lock = PTHREAD_MUTEX_INITIALIZER;
static int exits_epoll = -1;
static int exits_event = -1;

static void *exits_run(void *unused) {
  (void)unused;
  for (;;) {
    struct epoll_event events[32];
    int count = epoll_wait(exits_epoll, events, 32, -1);
    if (count < 0 && errno != EINTR) return NULL;
    uint64_t one = 1;
    /* Full after 2^64 - 2 exits that nobody looked at: then it is readable anyway. */
    if (count > 0 && write(exits_event, &one, sizeof one) < 0 && errno != EAGAIN) return NULL;
  }
}

static int exits_start(void) {
  pthread_attr_t attributes;
  pthread_t thread;
  sigset_t all, before;
  int error = pthread_attr_init(&attributes);
  if (error != 0) return -error;
  pthread_attr_setstacksize(&attributes, EXITS_STACK_BYTES);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  error = pthread_create(&thread, &attributes, exits_run, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return -error;
}

static int exits_open(void) {
  exits_epoll = epoll_create1(EPOLL_CLOEXEC);
  if (exits_epoll < 0) return -errno;
  exits_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  int error = exits_event < 0 ? -errno : exits_start();
  if (error == 0) return 0;
  close(exits_epoll);
  if (exits_event >= 0) close(exits_event);
  exits_epoll = exits_event = -1;
  return error;
}

int32_t aenv_exit_events(void) {
  pthread_mutex_lock(&exits_lock);
  int error = exits_epoll < 0 ? exits_open() : 0;
  pthread_mutex_unlock(&exits_lock);
  return error < 0 ? error : exits_event;
}

int32_t aenv_exit_watch(int32_t pidfd) {
  int32_t opened = aenv_exit_events();
  if (opened < 0) return opened;
  struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.fd = pidfd};
  return epoll_ctl(exits_epoll, EPOLL_CTL_ADD, pidfd, &event) == 0 ? 0 : -errno;
}

int32_t aenv_mkfifo(const char *path, uint32_t mode) {
  return mkfifo(path, (mode_t)mode) == 0 ? 0 : -errno;
}
