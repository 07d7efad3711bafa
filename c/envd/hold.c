// The host takes the disks of a running machine: /fsfreeze, /fsfrozen, /fsthaw, /halt.
//
// A child freezes, waits and thaws: it needs nothing of a file system in between, so that neither a request that is
// stuck on a frozen disk nor an agent that ends can keep the machine from going on. It is told by the end of a pipe.
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "agent.h"
#include "hold.h"

// ---- what is mounted ---------------------------------------------------------------------------

// The word at *p, with the kernel's octal escapes undone; cut to cap.
static bool next_word(const char **p, const char *end, char *out, size_t cap) {
  const char *s = *p;
  size_t n = 0;
  while (s < end && *s == ' ') s++;
  if (s == end) return false;
  while (s < end && *s != ' ') {
    char c = *s++;
    if (c == '\\' && end - s >= 3 && s[0] >= '0' && s[0] <= '3' && s[1] >= '0' && s[1] <= '7' && s[2] >= '0' && s[2] <= '7') {
      c = (char)((s[0] - '0') << 6 | (s[1] - '0') << 3 | (s[2] - '0'));
      s += 3;
    }
    if (n + 1 < cap) out[n++] = c;
  }
  out[n] = 0;
  *p = s;
  return true;
}

// proc_pid_mountinfo(5): ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [FIELD]... - TYPE SOURCE SUPEROPTIONS
bool mount_next(const char **text, mounted *out) {
  while (**text) {
    const char *p = *text, *end = strchr(p, '\n');
    if (!end) end = p + strlen(p);
    *text = *end ? end + 1 : end;
    char word[4096], dev[32], source[64], super[256];
    bool ok = next_word(&p, end, word, sizeof word) && next_word(&p, end, word, sizeof word) &&
              next_word(&p, end, dev, sizeof dev) && next_word(&p, end, word, sizeof word) &&
              next_word(&p, end, out->path, sizeof out->path) && next_word(&p, end, word, sizeof word);
    while (ok && (ok = next_word(&p, end, word, sizeof word)) && strcmp(word, "-")) {
    }
    ok = ok && next_word(&p, end, word, sizeof word) && next_word(&p, end, source, sizeof source) &&
         next_word(&p, end, super, sizeof super);
    if (!ok || sscanf(dev, "%u:%u", &out->major, &out->minor) != 2) continue;
    out->disk = !strncmp(source, "/dev/vd", 7);
    out->writable = strncmp(super, "ro", 2) || (super[2] && super[2] != ',');
    return true;
  }
  return false;
}

// ---- the child ---------------------------------------------------------------------------------

// What the child tells: how many file systems, or -errno, and when (mono_ms).
typedef struct {
  int n;
  int64_t at;
} report;

typedef struct {
  unsigned major, minor;
  int fd, why; // fd -1: -errno of the last attempt to open it
} disk;

static void thaw(const disk *disks, int n) {
  while (n-- > 0)
    // EINVAL: it is not frozen.
    if (disks[n].fd >= 0 && ioctl(disks[n].fd, FITHAW, 0) && errno != EINVAL)
      fprintf(stderr, "aenv: agent: thawing: %s\n", strerror(errno));
}

// Each file system on a disk once, through a mount of it that nothing else is mounted over. How many, or -errno.
static int find_disks(disk *disks, bool frozen_too) {
  char *text;
  ssize_t len = read_whole("/proc/self/mountinfo", &text, 4 << 20);
  if (len < 0) return (int)len;
  int n = 0, rc = 0;
  static mounted m;
  for (const char *at = text; !rc && mount_next(&at, &m);) {
    if (!m.disk || !(m.writable || frozen_too)) continue;
    int i = 0;
    while (i < n && (disks[i].major != m.major || disks[i].minor != m.minor)) i++;
    if (i == DISKS_MAX) {
      rc = -E2BIG;
    } else {
      if (i == n) disks[n++] = (disk){.major = m.major, .minor = m.minor, .fd = -1};
      struct stat st;
      if (disks[i].fd >= 0) continue;
      int fd = open(m.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      if (fd >= 0 && (fstat(fd, &st) || major(st.st_dev) != m.major || minor(st.st_dev) != m.minor)) {
        close(fd);
        fd = -1;
        errno = EXDEV;
      }
      disks[i].why = fd < 0 ? -errno : 0;
      disks[i].fd = fd;
    }
  }
  free(text);
  return rc ? rc : n;
}

void hold_thaw_left(void) {
  disk disks[DISKS_MAX];
  int n = find_disks(disks, true);
  if (n < 0) fprintf(stderr, "aenv: agent: what is mounted: %s\n", strerror(-n));
  thaw(disks, n);
  for (int i = 0; i < n; i++)
    if (disks[i].fd >= 0) close(disks[i].fd);
}

// Shared by the child and its own child, who may be stuck in the kernel.
typedef struct {
  atomic_bool stop;
  atomic_int done; // so many are frozen
} freezing;

// Freezes all, one after the other; rc to `to`.
static void __attribute__((noreturn)) freezer(const disk *disks, int n, freezing *f, int to) {
  int rc = 0;
  for (int i = 0; i < n && !rc; i++) {
    rc = atomic_load(&f->stop) ? -ETIMEDOUT : ioctl(disks[i].fd, FIFREEZE, 0) ? -errno : 0;
    if (!rc) atomic_store(&f->done, i + 1);
  }
  _exit(write(to, &rc, sizeof rc) != (ssize_t)sizeof rc);
}

// Whether there is something to read on fd, or its end, before `until`.
static bool wait_for(int fd, int64_t until) {
  struct pollfd p = {.fd = fd, .events = POLLIN};
  for (int64_t left; (left = until - mono_ms()) > 0;) {
    int got = poll(&p, 1, (int)left);
    if (got > 0) return true;
    if (got < 0 && errno != EINTR) return false;
  }
  return false;
}

static bool tell(int n) {
  report r = {.n = n, .at = mono_ms()};
  return write(3, &r, sizeof r) == (ssize_t)sizeof r;
}

// 0 with all of them written out and still, or -errno with none. Ends this process where one takes too long.
static int freeze(const disk *disks, int n, int64_t until) {
  int pair[2], rc = -EINTR;
  freezing *f = mmap(NULL, sizeof *f, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (f == MAP_FAILED || pipe2(pair, O_CLOEXEC)) return -errno;
  pid_t pid = fork();
  // It has 3 as well: that ends when nobody freezes any more.
  if (!pid) freezer(disks, n, f, pair[1]);
  if (pid < 0) rc = -errno;
  close(pair[1]);
  if (pid > 0) {
    bool late = !wait_for(pair[0], until);
    if (late) {
      // What is frozen may be what the next one waits for, and who thawed that one would wait, too.
      atomic_store(&f->stop, true);
      thaw(disks, atomic_load(&f->done));
      (void)tell(-ETIMEDOUT);
    }
    if (read(pair[0], &rc, sizeof rc) != (ssize_t)sizeof rc) rc = -EINTR; // it was killed
    if (late || rc) thaw(disks, n);
    if (late) _exit(1);
  }
  close(pair[0]);
  return rc;
}

// Descriptors: 3 to report to, 4 whose end is the order to thaw.
static void __attribute__((noreturn)) hold_child(void) {
  disk disks[DISKS_MAX];
  int n = find_disks(disks, false);
  for (int i = 0; i < n; i++)
    if (disks[i].fd < 0) n = disks[i].why;
  int64_t began = 0;
  if (n >= 0) {
    sync(); // most of it while everything may still be written
    began = mono_ms();
    int rc = freeze(disks, n, began + FREEZE_LIMIT_MS);
    if (rc) n = rc;
  }
  if (!tell(n) || n < 0) {
    if (n > 0) thaw(disks, n);
    _exit(1);
  }
  bool told = wait_for(4, began + HOLD_LIMIT_MS);
  thaw(disks, n);
  // Whether it held until it was told to end.
  _exit(told && !tell(n));
}

// ---- requests ----------------------------------------------------------------------------------

struct hold {
  agent *ag;
  ev e;
  int order; // -1: told to thaw
  bool frozen, kept, failed; // reported as such; held until it was told; not frozen
  uint64_t freezing, thawing; // connections that wait, 0: none
};

static conn *waiting(agent *ag, uint64_t id) {
  for (conn *c = id ? ag->http.conns : NULL; c; c = c->next)
    if (c->id == id && !c->closed && !c->eof && !c->rdhup) return c;
  return NULL;
}

static void let_go(hold *h) {
  if (h->order >= 0) close(h->order);
  h->order = -1;
  http_hold(&h->ag->http, false);
}

// Whether the child holds what it said it does: it has not ended, nor told of an end.
static bool holds(const hold *h) {
  struct pollfd p = {.fd = h->e.fd, .events = POLLIN};
  return h->frozen && h->order >= 0 && poll(&p, 1, 0) == 0;
}

static const char *why_not(int rc) {
  switch (-rc) {
  case EBUSY: return "one is frozen already";
  case EXDEV: return "something else is mounted over one";
  default: return strerror(-rc);
  }
}

static void on_hold(ev *e, uint32_t events) {
  (void)events;
  hold *h = e->owner;
  agent *ag = h->ag;
  report said;
  ssize_t n = read(e->fd, &said, sizeof said);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  conn *c = waiting(ag, h->freezing);
  if (n == (ssize_t)sizeof said && said.n >= 0) {
    if (h->frozen) {
      h->kept = true;
      return;
    }
    h->frozen = true;
    h->freezing = 0;
    // A report that was not read at once says nothing of now, and even less of when the host reads the answer.
    if (c && (mono_ms() - said.at > REPORT_MAX_MS || !holds(h))) {
      http_error(c, 500, "the file systems were not held still: the agent was stuck meanwhile, or told to thaw them");
      c = NULL;
    }
    if (c)
      http_reply(c, 204, NULL, NULL, 0, NULL);
    else
      let_go(h); // who asked has left, or was refused
    return;
  }
  if (n == (ssize_t)sizeof said) {
    h->failed = true;
    let_go(h);
    h->freezing = 0;
    char line[160];
    snprintf(line, sizeof line, "the file systems could not be frozen: %s", why_not(said.n));
    if (c) http_error(c, 500, line);
    return; // the end follows
  }
  // It was killed, or its time was over: what it froze may still be.
  if (!h->kept && !h->failed) hold_thaw_left();
  if (c) http_error(c, 500, "the file systems could not be frozen: interrupted");
  if ((c = waiting(ag, h->thawing))) {
    if (h->kept)
      http_reply(c, 204, NULL, NULL, 0, NULL);
    else
      http_error(c, 409, "the file systems had been thawed before");
  }
  let_go(h);
  ev_del(&ag->loop, &h->e);
  close(h->e.fd);
  ag->hold = NULL;
  loop_free_later(&ag->loop, h);
}

static int hold_start(agent *ag, conn *c) {
  int report[2], order[2];
  hold *h = calloc(1, sizeof *h);
  if (!h) return -ENOMEM;
  int rc = pipe2(report, O_CLOEXEC) ? -errno : 0;
  if (!rc && pipe2(order, O_CLOEXEC)) {
    rc = -errno;
    close(report[0]);
    close(report[1]);
  }
  if (rc) {
    free(h);
    return rc;
  }
  *h = (hold){.ag = ag, .e = {.fd = report[0], .cb = on_hold, .owner = h}, .order = order[1], .freezing = c->id};
  pid_t pid = fork();
  if (!pid) {
    child_reset(ag);
    prctl(PR_SET_NAME, "envd-hold");
    // Nobody ends what has to thaw, and an agent that has ended is no reason to.
    for (int s = 1; s < NSIG; s++)
      if (s != SIGCHLD) signal(s, SIG_IGN); // fails for KILL and STOP
    int from = fcntl(order[0], F_DUPFD, 10);
    if (dup2(report[1], 3) < 0 || dup2(from, 4) < 0) _exit(1);
    syscall(SYS_close_range, 5, ~0u, 0);
    hold_child();
  }
  if (pid < 0) rc = -errno;
  close(report[1]);
  close(order[0]);
  if (!rc && fcntl(report[0], F_SETFL, O_NONBLOCK)) rc = -errno;
  if (!rc) rc = ev_set(&ag->loop, &h->e, EPOLLIN);
  if (rc) {
    close(report[0]);
    close(order[1]); // a child there is thaws at once
    free(h);
    return rc;
  }
  ag->hold = h;
  http_hold(&ag->http, true);
  return 0;
}

void hold_release(agent *ag) {
  if (ag->hold) let_go(ag->hold);
}

void hold_close(agent *ag) {
  hold *h = ag->hold;
  if (!h) return;
  let_go(h);
  ev_del(&ag->loop, &h->e);
  close(h->e.fd);
  ag->hold = NULL;
  free(h);
}

static void halted(conn *c) {
  (void)c;
  // Init ends everything in order, this agent too.
  if (kill(1, SIGINT)) fprintf(stderr, "aenv: agent: init: %s\n", strerror(errno));
}

static const sink halting = {.gone = halted};

bool hold_handle(conn *c, const char *path) {
  agent *ag = agent_of(c);
  bool freezes = !strcmp(path, "/fsfreeze"), thaws = !strcmp(path, "/fsthaw"), halts = !strcmp(path, "/halt");
  bool asks = !strcmp(path, "/fsfrozen");
  if (!freezes && !thaws && !halts && !asks) return false;
  hold *h = ag->hold;
  if (freezes) {
    int rc = h ? -EBUSY : hold_start(ag, c);
    if (rc) http_error(c, rc == -EBUSY ? 409 : 500, rc == -EBUSY ? "being frozen or thawed already" : strerror(-rc));
  } else if (asks) {
    if (h && holds(h))
      http_reply(c, 204, NULL, NULL, 0, NULL);
    else
      http_error(c, 409, "the file systems are not held still");
  } else if (thaws) {
    if (!h || h->thawing) {
      http_error(c, 409, "the file systems are not frozen");
    } else {
      h->thawing = c->id;
      let_go(h);
    }
  } else {
    if (h) let_go(h);
    c->sink = &halting;
    http_reply(c, 204, NULL, NULL, 0, NULL);
  }
  return true;
}
