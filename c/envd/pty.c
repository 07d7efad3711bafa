#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

enum { TTY_GID = 5 }; // the group that devpts is mounted with

int pty_resize(int master, unsigned cols, unsigned rows) {
  struct winsize ws = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
  return ioctl(master, TIOCSWINSZ, &ws) ? -errno : 0;
}

int pty_open(int *master, int *slave, unsigned cols, unsigned rows, uid_t uid) {
  int m = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
  if (m < 0) return -errno;
  int rc = 0, s = -1;
  if (unlockpt(m))
    rc = -errno;
  else if ((s = ioctl(m, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0) // no path: mounts do not matter
    rc = -errno;
  else if (fchown(s, uid, TTY_GID) || fchmod(s, 0620))
    rc = errno == EPERM ? 0 : -errno; // not root: it is ours already
  if (!rc) rc = pty_resize(m, cols, rows);
  if (rc) {
    if (s >= 0) close(s);
    close(m);
    return rc;
  }
  *master = m;
  *slave = s;
  return 0;
}

int pty_attach(int slave) {
  if (ioctl(slave, TIOCSCTTY, 0)) return -errno; // the caller has made a session
  for (int i = 0; i < 3; i++)
    if (dup2(slave, i) < 0) return -errno;
  return 0;
}
