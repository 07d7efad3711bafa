// The host takes the disks of a running machine: /fsfreeze, /fsthaw, /halt.
//
// A child freezes, waits and thaws: it needs nothing of a file system in between, so that neither a request that is
// stuck on a frozen disk nor an agent that ends can keep the machine from going on. It is told by the end of a pipe.
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
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

static void thaw(const int *fds, int n) {
  while (n-- > 0)
    if (ioctl(fds[n], FITHAW, 0)) fprintf(stderr, "aenv: agent: thawing: %s\n", strerror(errno));
}

// Each writable file system on a disk once, written out and still. How many, or -errno with none frozen.
static int freeze(int *fds) {
  char *text;
  ssize_t len = read_whole("/proc/self/mountinfo", &text, 4 << 20);
  if (len < 0) return (int)len;
  sync(); // most of it while everything may still be written
  struct {
    unsigned major, minor;
  } seen[DISKS_MAX];
  int n = 0, rc = 0;
  static mounted m;
  for (const char *at = text; !rc && mount_next(&at, &m);) {
    bool known = !m.disk || !m.writable;
    for (int i = 0; i < n && !known; i++) known = seen[i].major == m.major && seen[i].minor == m.minor;
    if (known) continue;
    int fd = n == DISKS_MAX ? -1 : open(m.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
      rc = n == DISKS_MAX ? -E2BIG : -errno;
    } else if (ioctl(fd, FIFREEZE, 0)) {
      rc = -errno;
      close(fd);
    } else {
      seen[n].major = m.major;
      seen[n].minor = m.minor;
      fds[n++] = fd;
    }
  }
  free(text);
  if (!rc) return n;
  thaw(fds, n);
  return rc;
}

// Descriptors: 3 to report to, 4 whose end is the order to thaw.
static void __attribute__((noreturn)) hold_child(void) {
  int fds[DISKS_MAX];
  int n = freeze(fds);
  if (write(3, &n, sizeof n) != (ssize_t)sizeof n || n < 0) {
    if (n > 0) thaw(fds, n);
    _exit(1);
  }
  struct pollfd order = {.fd = 4, .events = POLLIN};
  int64_t until = mono_ms() + HOLD_LIMIT_MS;
  int left, got = 0;
  while ((left = (int)(until - mono_ms())) > 0 && (got = poll(&order, 1, left)) < 0 && errno == EINTR) {
  }
  thaw(fds, n);
  // Whether it held until it was told to end.
  if (got > 0) got = (int)write(3, &n, sizeof n);
  _exit(0);
}

// ---- requests ----------------------------------------------------------------------------------

struct hold {
  agent *ag;
  ev e;
  int order; // -1: told to thaw
  bool frozen, kept; // reported as such; held until it was told
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
}

static void on_hold(ev *e, uint32_t events) {
  (void)events;
  hold *h = e->owner;
  agent *ag = h->ag;
  int said;
  ssize_t n = read(e->fd, &said, sizeof said);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  conn *c = waiting(ag, h->freezing);
  if (n == (ssize_t)sizeof said && said >= 0) {
    if (h->frozen) {
      h->kept = true;
      return;
    }
    h->frozen = true;
    h->freezing = 0;
    if (c)
      http_reply(c, 204, NULL, NULL, 0, NULL);
    else
      let_go(h); // who asked has left
    return;
  }
  if (n == (ssize_t)sizeof said && c) {
    char line[160];
    snprintf(line, sizeof line, "the file systems could not be frozen: %s",
             said == -EBUSY ? "one is frozen already" : strerror(-said));
    http_error(c, 500, line);
    h->freezing = 0;
    c = NULL;
  }
  if (n == (ssize_t)sizeof said) return; // the end follows
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
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
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
  if (!freezes && !thaws && !halts) return false;
  hold *h = ag->hold;
  if (freezes) {
    int rc = h ? -EBUSY : hold_start(ag, c);
    if (rc) http_error(c, rc == -EBUSY ? 409 : 500, rc == -EBUSY ? "being frozen or thawed already" : strerror(-rc));
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
