/*
 * Guest init of the VM tests: loads the modules of /lib/modules/order, keeps checksummed random data in a
 * tmpfs, counts, and answers each TCP connection on port 7000 with one line:
 *
 *   COUNT <n> SUM <ok|bad> DISK <ok|bad|none> CPUS <n> BOOT <random word drawn at boot>\n
 *
 * A connection may send one byte first: `m` dirties 1 MiB of memory, `r` reboots, `c` floods the console, `k` keeps
 * 32 MiB of which `v` verifies the sum (SUM), `a` takes 128 MiB and fills them, `f` frees them, `p` reads
 * all of the disk through the page cache.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define DATA_BYTES (4u << 20)
#define SECTOR 4096

#define KEPT_WORDS (32u << 17)
#define TAKEN_BYTES (128u << 20)

static uint8_t data[DATA_BYTES];
static uint8_t scratch[1u << 20];

static uint64_t fnv(const uint8_t *p, size_t n) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3ull;
  return h;
}

static uint64_t *kept, kept_sum;
static uint8_t *taken;

/* Anonymous memory with words that no other page has. */
static uint64_t *filled(size_t words, uint64_t seed) {
  uint64_t *p = mmap(NULL, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return NULL;
  for (size_t i = 0; i < words; i++) p[i] = (seed + i) * 0x9e3779b97f4a7c15ull;
  return p;
}

static uint64_t sum_of_words(const uint64_t *p, size_t words) {
  uint64_t h = 0;
  for (size_t i = 0; i < words; i++) h = (h << 7 | h >> 57) ^ (p[i] + i);
  return h;
}

static void load_modules(void) {
  FILE *order = fopen("/lib/modules/order", "r");
  char name[256], path[300];
  if (order == NULL) return;
  while (fgets(name, sizeof name, order) != NULL) {
    name[strcspn(name, "\n")] = 0;
    if (name[0] == 0) continue;
    snprintf(path, sizeof path, "/lib/modules/%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || syscall(SYS_finit_module, fd, "", 0) != 0) printf("GUEST module %s: %s\n", name, strerror(errno));
    if (fd >= 0) close(fd);
  }
  fclose(order);
}

static void set_address(int s, unsigned long request, const char *interface, const char *address) {
  struct ifreq ifr;
  memset(&ifr, 0, sizeof ifr);
  snprintf(ifr.ifr_name, sizeof ifr.ifr_name, "%s", interface);
  struct sockaddr_in in = {.sin_family = AF_INET};
  inet_pton(AF_INET, address, &in.sin_addr);
  memcpy(&ifr.ifr_addr, &in, sizeof in);
  if (ioctl(s, request, &ifr) != 0) printf("GUEST %s %s: %s\n", interface, address, strerror(errno));
}

static void interface_up(int s, const char *interface) {
  struct ifreq ifr;
  memset(&ifr, 0, sizeof ifr);
  snprintf(ifr.ifr_name, sizeof ifr.ifr_name, "%s", interface);
  ifr.ifr_flags = IFF_UP | IFF_RUNNING;
  if (ioctl(s, SIOCSIFFLAGS, &ifr) != 0) printf("GUEST up %s: %s\n", interface, strerror(errno));
}

static const char *disk_round(int disk, uint64_t count) {
  if (disk < 0) return "none";
  static uint8_t sector[SECTOR] __attribute__((aligned(SECTOR)));
  for (size_t i = 0; i < SECTOR / 8; i++) ((uint64_t *)sector)[i] = count * 1000003u + i;
  uint64_t expected = fnv(sector, SECTOR);
  if (pwrite(disk, sector, SECTOR, (off_t)(count % 64) * SECTOR) != SECTOR) return "bad";
  memset(sector, 0, SECTOR);
  if (pread(disk, sector, SECTOR, (off_t)(count % 64) * SECTOR) != SECTOR) return "bad";
  return fnv(sector, SECTOR) == expected ? "ok" : "bad";
}

int main(void) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  mount("proc", "/proc", "proc", 0, "");
  mount("dev", "/dev", "devtmpfs", 0, "");
  mkdir("/mem", 0755);
  mount("mem", "/mem", "tmpfs", 0, "");
  load_modules();

  if (getrandom(data, DATA_BYTES, GRND_INSECURE) < 0) printf("GUEST getrandom: %s\n", strerror(errno));
  for (size_t have = 256; have < DATA_BYTES; have += 256) getrandom(data + have, 256, GRND_INSECURE);
  uint64_t sum = fnv(data, DATA_BYTES);
  uint64_t boot = sum ^ (uint64_t)time(NULL);
  int file = open("/mem/data", O_RDWR | O_CREAT, 0600);
  if (write(file, data, DATA_BYTES) != (ssize_t)DATA_BYTES) printf("GUEST tmpfs write failed\n");
  memset(data, 0, DATA_BYTES);

  int disk = open("/dev/vda", O_RDWR | O_DIRECT);
  int control = socket(AF_INET, SOCK_DGRAM, 0);
  interface_up(control, "lo");
  set_address(control, SIOCSIFADDR, "eth0", "169.254.0.21");
  set_address(control, SIOCSIFNETMASK, "eth0", "255.255.255.252");
  interface_up(control, "eth0");

  int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(7000)};
  if (bind(listener, (struct sockaddr *)&any, sizeof any) != 0 || listen(listener, 16) != 0)
    printf("GUEST listen: %s\n", strerror(errno));
  printf("GUEST ready disk=%s\n", disk >= 0 ? "yes" : "no");

  const char *disk_state = disk_round(disk, 0);
  for (uint64_t count = 1;; ) {
    struct pollfd p = {.fd = listener, .events = POLLIN};
    if (poll(&p, 1, 20) <= 0) {
      count++;
      if (count % 10 == 0) disk_state = disk_round(disk, count);
      if (count % 50 == 0) printf("GUEST count %llu\n", (unsigned long long)count);
      continue;
    }
    int c = accept(listener, NULL, NULL);
    if (c < 0) continue;
    char order = 0, line[160];
    struct pollfd q = {.fd = c, .events = POLLIN};
    if (poll(&q, 1, 300) > 0 && read(c, &order, 1) != 1) order = 0;
    if (order == 'm') for (size_t i = 0; i < sizeof scratch; i += 8) *(uint64_t *)(scratch + i) = count * 31 + i;
    if (order == 'r') reboot(RB_AUTOBOOT);
    if (order == 'c') for (int i = 0; i < 2000; i++) printf("GUEST flood %d ................................\n", i);
    if (order == 'k' && kept == NULL && (kept = filled(KEPT_WORDS, boot)) != NULL) kept_sum = sum_of_words(kept, KEPT_WORDS);
    if (order == 'a' && taken == NULL) taken = (uint8_t *)filled(TAKEN_BYTES / 8, count);
    if (order == 'f' && taken != NULL && munmap(taken, TAKEN_BYTES) == 0) taken = NULL;
    if (order == 'p') {
      int cached = open("/dev/vda", O_RDONLY);
      while (cached >= 0 && read(cached, scratch, sizeof scratch) > 0) continue;
      if (cached >= 0) close(cached);
    }
    uint64_t now = 0;
    if (order == 'v' && (kept == NULL || sum_of_words(kept, KEPT_WORDS) != kept_sum)) now = sum + 1;
    else if (pread(file, data, DATA_BYTES, 0) == (ssize_t)DATA_BYTES) now = fnv(data, DATA_BYTES);
    int n = snprintf(line, sizeof line, "COUNT %llu SUM %s DISK %s CPUS %ld BOOT %016llx\n", (unsigned long long)count,
                     now == sum ? "ok" : "bad", disk_state, sysconf(_SC_NPROCESSORS_ONLN), (unsigned long long)boot);
    if (write(c, line, (size_t)n) != n) printf("GUEST answer failed\n");
    close(c);
  }
}
