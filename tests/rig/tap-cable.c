/*
 * Joins a tap of the current network namespace to a new one in another namespace, so that a namespace can
 * play the guest behind a slot's tap. Usage: tap-cable TAP NETNS_FILE DEVICE MAC
 * Prints "ready" and copies frames until its standard input ends.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static void fail(const char *what) {
  fprintf(stderr, "tap-cable: %s: %s\n", what, strerror(errno));
  exit(1);
}

static int open_tap(const char *name) {
  int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) fail("/dev/net/tun");
  struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI};
  snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
  if (ioctl(fd, TUNSETIFF, &request) < 0) fail(name);
  return fd;
}

static void set_mac(const char *name, const char *text) {
  struct ifreq request = {.ifr_hwaddr.sa_family = ARPHRD_ETHER};
  snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
  unsigned char *mac = (unsigned char *)request.ifr_hwaddr.sa_data;
  if (sscanf(text, "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", mac, mac + 1, mac + 2, mac + 3, mac + 4, mac + 5) != 6) exit(2);
  int fd = socket(AF_INET, SOCK_DGRAM, 0);
  if (fd < 0 || ioctl(fd, SIOCSIFHWADDR, &request) < 0) fail("set the MAC address");
  close(fd);
}

static void copy(int from, int to) {
  unsigned char frame[65536];
  ssize_t length;
  while ((length = read(from, frame, sizeof frame)) > 0) {
    /* A device that is down takes no frames: they are lost, as on a real cable. */
    if (write(to, frame, (size_t)length) < 0 && errno != EIO && errno != EAGAIN) fail("write a frame");
  }
}

int main(int argc, char **argv) {
  if (argc != 5) return 2;
  int near = open_tap(argv[1]);
  int ns = open(argv[2], O_RDONLY | O_CLOEXEC);
  if (ns < 0 || setns(ns, CLONE_NEWNET) < 0) fail(argv[2]);
  int far = open_tap(argv[3]);
  set_mac(argv[3], argv[4]);
  printf("ready\n");
  fflush(stdout);
  struct pollfd fds[] = {{.fd = near, .events = POLLIN}, {.fd = far, .events = POLLIN}, {.fd = 0, .events = POLLIN}};
  for (;;) {
    if (poll(fds, 3, -1) < 0 && errno != EINTR) fail("poll");
    if (fds[2].revents != 0) return 0;
    copy(near, far);
    copy(far, near);
  }
}
