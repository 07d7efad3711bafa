#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "agent.h"

enum { JOBS_MAX = 64, JOBS_WAITING_MAX = 4096, JOB_OUT_MAX = 64 << 20 };

static void job_finish(job *j, bool ok) {
  ev_del(&j->ag->loop, &j->e);
  if (j->e.fd >= 0) close(j->e.fd);
  j->e.fd = -1;
  if (j->owner) j->done(j, ok);
  j->owner = NULL;
}

static void start_waiting(agent *ag);

static void job_unlink(job *j) {
  agent *ag = j->ag;
  for (job **p = &ag->jobs; *p; p = &(*p)->next)
    if (*p == j) {
      *p = j->next;
      ag->njobs--;
      break;
    }
  buf_free(&j->out);
  loop_free_later(&ag->loop, j);
  start_waiting(ag);
}

static void on_job(ev *e, uint32_t events) {
  (void)events;
  job *j = e->owner;
  uint8_t *p = buf_reserve(&j->out, 64 * 1024);
  ssize_t n = p ? read(e->fd, p, 64 * 1024) : -1;
  if (n < 0 && p && (errno == EINTR || errno == EAGAIN)) return;
  if (n > 0) {
    j->out.len += (size_t)n;
    if (j->out.len <= JOB_OUT_MAX) return;
    n = -1;
  }
  // A child that died half-way has not written its last byte: the receiver checks the form of the output.
  if (n < 0) kill(j->pid, SIGKILL);
  bool gone = j->pid < 0;
  job_finish(j, n == 0);
  if (gone) job_unlink(j);
}

static int launch(job *j) {
  agent *ag = j->ag;
  int fds[2];
  if (pipe2(fds, O_CLOEXEC)) return -errno;
  j->e = (ev){.fd = fds[0], .cb = on_job, .owner = j};
  j->pid = fork();
  if (!j->pid) {
    child_reset(ag);
    // Connections must not stay open in here when the loop closes them.
    dup2(fds[1], 3);
    syscall(SYS_close_range, 4, ~0u, 0); // no wrapper in every libc
    buf out = {0};
    j->fn(j->owner, &out);
    int rc = out.oom ? -ENOMEM : write_all(3, out.p, buf_len(&out));
    _exit(rc ? 1 : 0);
  }
  int rc = j->pid < 0 ? -errno : 0;
  close(fds[1]);
  if (!rc && fcntl(fds[0], F_SETFL, O_NONBLOCK)) rc = -errno;
  if (!rc) rc = ev_set(&ag->loop, &j->e, EPOLLIN);
  if (rc) {
    if (j->pid > 0) kill(j->pid, SIGKILL);
    close(fds[0]);
    return rc;
  }
  j->next = ag->jobs;
  ag->jobs = j;
  ag->njobs++;
  return 0;
}

// Each in its turn; one that cannot be started has failed.
static void start_waiting(agent *ag) {
  while (ag->njobs < JOBS_MAX && ag->jobs_waiting) {
    job *j = ag->jobs_waiting;
    ag->jobs_waiting = j->next;
    ag->nwaiting--;
    j->waiting = false;
    if (!launch(j)) continue;
    j->done(j, false);
    loop_free_later(&ag->loop, j);
  }
}

job *job_start(agent *ag, void *owner, void (*fn)(void *owner, buf *out), void (*done)(job *j, bool ok)) {
  job *j = ag->nwaiting < JOBS_WAITING_MAX ? calloc(1, sizeof *j) : NULL;
  if (!j) return NULL;
  *j = (job){.ag = ag, .owner = owner, .fn = fn, .done = done, .e = {.fd = -1}};
  if (ag->njobs < JOBS_MAX) {
    if (!launch(j)) return j;
    free(j);
    return NULL;
  }
  job **last = &ag->jobs_waiting;
  while (*last) last = &(*last)->next;
  *last = j;
  ag->nwaiting++;
  j->waiting = true;
  return j;
}

void job_cancel(job *j) {
  if (j->waiting) {
    for (job **p = &j->ag->jobs_waiting; *p; p = &(*p)->next)
      if (*p == j) {
        *p = j->next;
        break;
      }
    j->ag->nwaiting--;
    loop_free_later(&j->ag->loop, j);
    return;
  }
  j->owner = NULL;
  if (j->pid > 0) kill(j->pid, SIGKILL);
}

bool job_reaped(agent *ag, pid_t pid, int status) {
  (void)status;
  for (job *j = ag->jobs; j; j = j->next)
    if (j->pid == pid) {
      j->pid = -1;
      if (j->e.fd < 0) job_unlink(j); // else its output is read to the end first
      return true;
    }
  return false;
}
