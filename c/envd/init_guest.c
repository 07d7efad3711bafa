// PID 1 of the guest: brings the machine from a bare initramfs to the user's image with the agent running.
//
// The initramfs holds /init (this program), /lib/modules/order and the modules it names. Nothing of the user's
// image is executed here, and the image needs to hold nothing. Kernel command line words understood:
//   aenv.root=/dev/vda  aenv.ip=169.254.0.21/30,169.254.0.22  aenv.dns=10.0.0.1[,…]  aenv.hostname=name
//   aenv.drives=vdb:ro:/mnt/data[:sub/path],vdc:rw:/srv
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <net/if.h>
#include <net/route.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/sysmacros.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <termios.h>
#include <unistd.h>

#include "agent.h"
#include "hold.h"
#include "keep.h"

static const char newroot[] = "/newroot";
static const char user_cgroup[] = "/sys/fs/cgroup/user";

typedef struct {
  char root[64], hostname[65], ip[64], dns[256], drives[2048], timer_hz[16];
} bootwords;

bool is_guest_init(const char *argv0) {
  return getpid() == 1 && !strcmp(argv0, "/init");
}

static void say(const char *text) {
  ssize_t n = write(1, text, strlen(text));
  (void)n; // no console, nobody to tell
}

static void warn(const char *what, int rc) {
  char line[512];
  snprintf(line, sizeof line, "aenv: init: %s: %s\n", what, strerror(-rc));
  say(line);
}

static void machine_off(void) {
  sync();
  reboot(RB_POWER_OFF);
  // Reached only without a way to power off: a reset ends a VMM that was told not to reboot.
  reboot(RB_AUTOBOOT);
  for (;;) pause();
}

static void __attribute__((noreturn)) fatal(const char *what, int rc) {
  char line[512];
  snprintf(line, sizeof line, "aenv: init: fatal: %s: %s\n", what, strerror(-rc));
  say(line);
  tcdrain(1);
  sync();
  // Not by powering off: a machine that lacks so much may lack the way to that, and would stand still.
  reboot(RB_AUTOBOOT);
  machine_off();
  _exit(1);
}

static void read_words(bootwords *w) {
  char *text;
  strcpy(w->root, "/dev/vda");
  ssize_t n = read_whole("/proc/cmdline", &text, 65536);
  if (n < 0) fatal("/proc/cmdline", (int)n);
  const struct {
    const char *name;
    char *dst;
    size_t cap;
  } f[] = {{"aenv.root=", w->root, sizeof w->root},
           {"aenv.ip=", w->ip, sizeof w->ip},
           {"aenv.dns=", w->dns, sizeof w->dns},
           {"aenv.drives=", w->drives, sizeof w->drives},
           {"aenv.hostname=", w->hostname, sizeof w->hostname},
           {"aenv.timer_hz=", w->timer_hz, sizeof w->timer_hz}};
  for (char *p = strtok(text, " \n"); p; p = strtok(NULL, " \n"))
    for (size_t i = 0; i < sizeof f / sizeof f[0]; i++) {
      size_t k = strlen(f[i].name);
      if (!strncmp(p, f[i].name, k)) snprintf(f[i].dst, f[i].cap, "%s", p + k);
    }
  free(text);
}

// The kernel measures its processors' timer against their counter within a tenth of a second. An emulator that is not
// scheduled just then makes the timer look faster than it is, and whatever sleeps sleeps too long from then on, in
// every copy of this guest, too. Who knows the true rate says it; a machine that is over a tenth above, or
// below half, ends here, before it has touched a disk. (A little below, it is woken too early and waits again: that
// costs a little.) The host reads the line.
static void check_timer(const char *true_hz) {
  double want = strtod(true_hz, NULL);
  char *list;
  if (want <= 0 || read_whole("/proc/timer_list", &list, 1 << 20) < 0) return;
  const char *device = strstr(list, "Clock Event Device: lapic\n");
  const char *mult = device ? strstr(device, "mult:") : NULL, *shift = mult ? strstr(mult, "shift:") : NULL;
  if (shift) {
    // Ticks a nanosecond: mult / 2^shift (kernel/time/clockevents.c).
    double hz = 1e9 * strtod(mult + 5, NULL) / (double)(1ull << (strtoul(shift + 6, NULL, 10) & 63));
    if (hz < want * 0.5 || hz > want * 1.1) {
      char line[128];
      snprintf(line, sizeof line, "processor timer measured as %.0f Hz, not %.0f", hz, want);
      fatal(line, -ERANGE);
    }
  }
  free(list);
}

static int must_mount(const char *src, const char *dst, const char *type, unsigned long flags, const char *data) {
  if (mkdir(dst, 0755) && errno != EEXIST && errno != EROFS) return -errno;
  return mount(src, dst, type, flags, data) ? -errno : 0;
}

static void open_console(void) {
  int fd = open("/dev/console", O_RDWR | O_NOCTTY);
  if (fd < 0) fd = open("/dev/null", O_RDWR);
  for (int i = 0; i < 3 && fd >= 0; i++)
    if (i != fd) dup2(fd, i);
  if (fd > 2) close(fd);
}

// A module that does not load is told and passed over: whether it was needed shows at the device it drives.
static void load_modules(void) {
  char *order;
  ssize_t n = read_whole("/lib/modules/order", &order, 1 << 20);
  if (n == -ENOENT) return; // all built in
  if (n < 0) {
    warn("/lib/modules/order", (int)n);
    return;
  }
  for (char *name = strtok(order, "\r\n"); name; name = strtok(NULL, "\r\n")) {
    char path[300];
    snprintf(path, sizeof path, "/lib/modules/%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST)) warn(path, -errno);
    if (fd >= 0) close(fd);
  }
  free(order);
}

// Disks usually exist once their driver is loaded; a probe in the background may take a little longer.
static bool device_appears(const char *dev) {
  struct timespec step = {0, 1000 * 1000};
  for (int waited = 0; access(dev, F_OK); waited += (int)(step.tv_nsec / 1000000)) {
    if (waited >= 10000) return false;
    nanosleep(&step, NULL);
    if (waited > 50) step.tv_nsec = 10 * 1000 * 1000;
  }
  return true;
}

static void mount_root(const char *dev) {
  char what[160];
  if (!device_appears(dev)) {
    snprintf(what, sizeof what, "root device %s did not appear within 10 s (aenv.root, or its driver module)", dev);
    fatal(what, -ENODEV);
  }
  if (mkdir(newroot, 0755) && errno != EEXIST) fatal(newroot, -errno);
  if (mount(dev, newroot, "ext4", MS_NOATIME, "noinit_itable")) {
    snprintf(what, sizeof what, "mounting %s as ext4", dev);
    fatal(what, -errno);
  }
}

// Frees the memory of the initramfs. Only ever called on its own file system.
static void empty_initramfs(int fd, dev_t dev) {
  DIR *d = fdopendir(fd);
  if (!d) {
    close(fd);
    return;
  }
  for (struct dirent *e; (e = readdir(d));) {
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
    struct stat st;
    if (fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) || st.st_dev != dev) continue;
    if (S_ISDIR(st.st_mode)) {
      int sub = openat(dirfd(d), e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
      if (sub >= 0) empty_initramfs(sub, dev);
      unlinkat(dirfd(d), e->d_name, AT_REMOVEDIR);
    } else {
      unlinkat(dirfd(d), e->d_name, 0);
    }
  }
  closedir(d);
}

static void switch_root(void) {
  struct stat st;
  int old = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (old < 0 || fstat(old, &st)) fatal("/", -errno);
  // Mounted anew inside: there the image's own links decide where these places are, and cannot lead outside.
  umount2("/proc", MNT_DETACH);
  umount2("/sys", MNT_DETACH);
  umount2("/dev", MNT_DETACH);
  if (chdir(newroot) || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/"))
    fatal("switching to the root file system", -errno);
  empty_initramfs(old, st.st_dev);
}

// A directory at path, whatever the image has there: a link that leads nowhere or a file is replaced.
static void ensure_dir(const char *path, mode_t mode) {
  struct stat st;
  if (!stat(path, &st) && S_ISDIR(st.st_mode)) return;
  if (!lstat(path, &st)) {
    if (unlink(path)) warn(path, -errno);
  }
  if (mkdir(path, mode))
    warn(path, -errno);
  else if (chmod(path, mode))
    warn(path, -errno);
}

static void mount_in(const char *src, const char *dst, const char *type, unsigned long flags, const char *data, bool needed) {
  ensure_dir(dst, 0755);
  if (!mount(src, dst, type, flags, data)) return;
  char what[128];
  snprintf(what, sizeof what, "mounting %s on %s", type, dst);
  if (needed) fatal(what, -errno);
  warn(what, -errno);
}

static void link_to(const char *target, const char *path) {
  if (symlink(target, path) && errno != EEXIST) warn(path, -errno);
}

static void prepare_image(void) {
  const unsigned long quiet = MS_NOSUID | MS_NODEV | MS_NOEXEC;
  mount_in("proc", "/proc", "proc", quiet, NULL, true);
  mount_in("sysfs", "/sys", "sysfs", quiet, NULL, true);
  mount_in("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=0755", true);
  mount_in("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "gid=5,mode=620,ptmxmode=666", false);
  mount_in("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777", false);
  mount_in("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755", false);
  ensure_dir("/tmp", 01777);
  if (chmod("/dev/ptmx", 0666)) warn("/dev/ptmx", -errno);
  link_to("/proc/self/fd", "/dev/fd");
  link_to("/proc/self/fd/0", "/dev/stdin");
  link_to("/proc/self/fd/1", "/dev/stdout");
  link_to("/proc/self/fd/2", "/dev/stderr");
  mount_in("cgroup2", "/sys/fs/cgroup", "cgroup2", quiet, NULL, false);
  static const char *const controllers[] = {"+cpu", "+cpuset", "+memory", "+io", "+pids"};
  for (size_t i = 0; i < sizeof controllers / sizeof controllers[0]; i++) {
    int rc = write_control("/sys/fs/cgroup/cgroup.subtree_control", controllers[i]);
    if (rc && rc != -ENOENT && rc != -EINVAL) warn(controllers[i], rc); // this kernel has it or not
  }
}

// ---- drives ------------------------------------------------------------------------------------

static const char drive_stage[] = "/run/agentenv-drive";

// A directory of the drive mounted at root, as a link of the drive itself may name it; no link leads out of it.
static int open_sub_path(const char *root, const char *sub) {
  int dir = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0) return -errno;
  struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
  int fd = (int)syscall(SYS_openat2, dir, sub, &how, sizeof how);
  int rc = fd < 0 ? -errno : fd;
  close(dir);
  return rc;
}

static int mount_drive(const char *dev, bool writable, const char *path, const char *sub) {
  const account root = {0};
  bool created;
  unsigned long flags = MS_NOATIME | (writable ? 0 : MS_RDONLY);
  const char *at = sub ? drive_stage : path;
  int rc = make_dirs(at, &root, &created);
  if (rc) return rc;
  if (mount(dev, at, "ext4", flags, writable ? "noinit_itable" : NULL)) return -errno;
  if (!sub) return 0;
  int fd = open_sub_path(drive_stage, sub);
  rc = fd < 0 ? fd : make_dirs(path, &root, &created);
  if (!rc) {
    char from[64];
    snprintf(from, sizeof from, "/proc/self/fd/%d", fd);
    if (mount(from, path, NULL, MS_BIND, NULL)) rc = -errno;
  }
  if (fd >= 0) close(fd);
  if (umount2(drive_stage, MNT_DETACH)) warn(drive_stage, -errno);
  if (rmdir(drive_stage)) warn(drive_stage, -errno);
  return rc;
}

// Who asked for a drive relies on it: a machine without it does not start.
static void mount_drives(char *spec) {
  char *outer;
  for (char *one = strtok_r(spec, ",", &outer); one; one = strtok_r(NULL, ",", &outer)) {
    char *inner, dev[80], what[400];
    const char *name = strtok_r(one, ":", &inner), *mode = strtok_r(NULL, ":", &inner);
    const char *path = strtok_r(NULL, ":", &inner), *sub = strtok_r(NULL, ":", &inner);
    if (!path || *path != '/') fatal("aenv.drives must be DEVICE:ro|rw:PATH[:SUBPATH],…", -EINVAL);
    snprintf(dev, sizeof dev, "/dev/%s", name);
    int rc = device_appears(dev) ? mount_drive(dev, !strcmp(mode, "rw"), path, sub) : -ENODEV;
    if (!rc) continue;
    snprintf(what, sizeof what, "drive %s%s%s on %s", name, sub ? ":" : "", sub ? sub : "", path);
    fatal(what, rc);
  }
}

// ---- network -----------------------------------------------------------------------------------

static int if_up(int s, const char *name) {
  struct ifreq r = {0};
  snprintf(r.ifr_name, sizeof r.ifr_name, "%s", name);
  if (ioctl(s, SIOCGIFFLAGS, &r)) return -errno;
  r.ifr_flags |= IFF_UP;
  return ioctl(s, SIOCSIFFLAGS, &r) ? -errno : 0;
}

static int set_addr(int s, unsigned long req, const char *name, struct in_addr a) {
  struct ifreq r = {0};
  struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr = a};
  snprintf(r.ifr_name, sizeof r.ifr_name, "%s", name);
  memcpy(&r.ifr_addr, &sa, sizeof sa);
  return ioctl(s, req, &r) ? -errno : 0;
}

// "ADDRESS/PREFIX[,GATEWAY]" onto eth0; leaves the bare address in spec. 0, or -errno; -EINVAL when malformed.
static int configure_eth0(int s, char *spec) {
  struct in_addr addr, gw = {0}, mask;
  char *comma = strchr(spec, ','), *slash = strchr(spec, '/');
  if (comma) *comma = 0;
  uint64_t prefix;
  if (!slash || parse_u64(slash + 1, strlen(slash + 1), 32, &prefix)) return -EINVAL;
  *slash = 0;
  if (inet_pton(AF_INET, spec, &addr) != 1 || (comma && inet_pton(AF_INET, comma + 1, &gw) != 1)) return -EINVAL;
  mask.s_addr = prefix ? htonl(~0u << (32 - prefix)) : 0;
  int rc = write_control("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1");
  if (rc && rc != -ENOENT) warn("disabling IPv6 on eth0", rc);
  rc = set_addr(s, SIOCSIFADDR, "eth0", addr);
  if (!rc) rc = set_addr(s, SIOCSIFNETMASK, "eth0", mask);
  if (!rc) rc = if_up(s, "eth0");
  if (rc || !comma) return rc;
  struct rtentry rt = {0};
  struct sockaddr_in any = {.sin_family = AF_INET}, to = {.sin_family = AF_INET, .sin_addr = gw};
  memcpy(&rt.rt_dst, &any, sizeof any);
  memcpy(&rt.rt_genmask, &any, sizeof any);
  memcpy(&rt.rt_gateway, &to, sizeof to);
  rt.rt_flags = RTF_UP | RTF_GATEWAY;
  return ioctl(s, SIOCADDRT, &rt) ? -errno : 0;
}

static void set_network(bootwords *w) {
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (s < 0) fatal("socket", -errno);
  int rc = if_up(s, "lo");
  if (rc) warn("loopback", rc);
  if (*w->ip) {
    rc = configure_eth0(s, w->ip);
    // Without it nobody could ever reach the agent.
    if (rc) fatal(rc == -EINVAL ? "aenv.ip must be ADDRESS/PREFIX[,GATEWAY]" : "configuring eth0", rc);
  }
  close(s);
}

// ---- files of the image ------------------------------------------------------------------------

static const char own_dir[] = "/run/agentenv";

// Whatever path leads to exists afterwards, so that something can be mounted there. Where a link of the image leads
// into a directory that is not there (/run is new at every boot) the directory is made.
static int make_mount_point(const char *path) {
  char target[512];
  snprintf(target, sizeof target, "%s", path);
  for (int hops = 0; hops < 8; hops++) {
    int fd = open(path, O_RDONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0644);
    if (fd >= 0) return close(fd), 0;
    if (errno != ENOENT) return -errno;
    char link[256];
    ssize_t n = readlink(target, link, sizeof link - 1);
    if (n < 0) return -ENOENT;
    link[n] = 0;
    char *slash = strrchr(target, '/');
    if (link[0] == '/')
      snprintf(target, sizeof target, "%s", link);
    else
      snprintf(slash + 1, sizeof target - (size_t)(slash + 1 - target), "%s", link);
    char dir[512];
    snprintf(dir, sizeof dir, "%s", target);
    slash = strrchr(dir, '/');
    if (slash == dir) continue;
    *slash = 0;
    const account root = {0};
    bool created;
    int rc = make_dirs(dir, &root, &created);
    if (rc) return rc;
  }
  return -ELOOP;
}

// Lays a file of ours over one of the image, as container engines do: the image's own stays what it is.
static void lay_over(const char *path, const char *text) {
  char own[128];
  snprintf(own, sizeof own, "%s%s", own_dir, strrchr(path, '/'));
  int fd = open(own, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  int rc = fd < 0 ? -errno : write_all(fd, text, strlen(text));
  if (fd >= 0) close(fd);
  if (!rc) rc = make_mount_point(path);
  if (!rc && mount(own, path, NULL, MS_BIND, NULL)) rc = -errno;
  if (rc) warn(path, rc);
}

static void lay_over_etc(bootwords *w) {
  const char *name = *w->hostname ? w->hostname : "sandbox";
  if (sethostname(name, strlen(name))) warn("sethostname", -errno);
  ensure_dir("/etc", 0755);
  ensure_dir(own_dir, 0755);
  buf b = {0};
  if (*w->dns) {
    for (char *p = strtok(w->dns, ","); p; p = strtok(NULL, ",")) buf_printf(&b, "nameserver %s\n", p);
    buf_putc(&b, 0);
    if (!b.oom) lay_over("/etc/resolv.conf", (char *)b.p);
    buf_clear(&b);
  }
  char *have = NULL;
  ssize_t n = read_whole("/etc/hosts", &have, 1 << 20);
  if (n < 0) have = NULL;
  if (have) buf_puts(&b, have);
  if (n > 0 && have[n - 1] != '\n') buf_putc(&b, '\n');
  if (!have || !strstr(have, "localhost")) buf_puts(&b, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
  buf_printf(&b, "127.0.1.1\t%s\t" IDENTITY_MARK "\n", name);
  buf_putc(&b, 0);
  if (!b.oom) lay_over("/etc/hosts", (char *)b.p);
  free(have);
  buf_clear(&b);
  buf_printf(&b, "%s\n", name);
  buf_putc(&b, 0);
  if (!b.oom && !access("/etc/hostname", F_OK)) lay_over("/etc/hostname", (char *)b.p);
  buf_free(&b);
}

// ---- supervision -------------------------------------------------------------------------------

typedef struct {
  int self, state; // the program; the settings that outlive an agent
  const char *ip;
  pid_t pid; // -1: none runs
  int sock;  // to it, -1: none
  kept *processes;
} supervisor;

static void start_agent(supervisor *s) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) {
    warn("socketpair", -errno);
    return;
  }
  s->pid = fork();
  if (s->pid) {
    close(pair[1]);
    if (s->pid < 0)
      close(pair[0]);
    else
      keeper_hand_over(&s->processes, s->sock = pair[0]);
    return;
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  setsid();
  int rc = write_control("/proc/self/oom_score_adj", "-1000");
  if (rc) warn("oom_score_adj", rc);
  if (setpriority(PRIO_PROCESS, 0, -10)) warn("setpriority", -errno);
  struct rlimit files = {1024, 1048576}; // what commands inherit
  if (setrlimit(RLIMIT_NOFILE, &files)) warn("RLIMIT_NOFILE", -errno);
  char port[16], fd[16], keep[16];
  snprintf(port, sizeof port, "%d", AGENT_PORT);
  snprintf(fd, sizeof fd, "%d", s->state);
  snprintf(keep, sizeof keep, "%d", pair[1]);
  if (fcntl(s->state, F_SETFD, 0) || fcntl(pair[1], F_SETFD, 0)) warn("state", -errno);
  char *argv[] = {"envd", "--port", port, "--guest", "--trust-if", "eth0", "--state-fd", fd, "--keep-fd", keep,
                  "--cgroup", (char *)user_cgroup, *s->ip ? "--expose" : NULL, (char *)s->ip, NULL};
  char *envp[] = {"PATH=" DEFAULT_PATH, "HOME=/", NULL};
  syscall(SYS_execveat, s->self, "", argv, envp, AT_EMPTY_PATH);
  warn("starting the agent", -errno);
  _exit(127);
}

// Waits until nobody is left, at most that long: PID 1 gets every orphan, so "no child" means just that.
static bool all_gone(int limit_ms) {
  struct timespec step = {0, 10 * 1000 * 1000};
  for (int waited = 0;; waited += 10) {
    pid_t pid;
    while ((pid = waitpid(-1, NULL, WNOHANG)) > 0) {
    }
    if (pid < 0 && errno == ECHILD) return true;
    if (waited >= limit_ms) return false;
    nanosleep(&step, NULL);
  }
}

static void end_swap(void) {
  char *text, *rest;
  if (read_whole("/proc/swaps", &text, 1 << 20) < 0) return;
  for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
    line[strcspn(line, " \t")] = 0;
    if (*line == '/' && swapoff(line)) warn(line, -errno);
  }
  free(text);
}

// What lies on disks is left as after an orderly end, marked clean: what is mounted last goes first.
static bool leave_disks(void) {
  char *text;
  ssize_t n = read_whole("/proc/self/mountinfo", &text, 4 << 20);
  if (n < 0) {
    warn("/proc/self/mountinfo", (int)n);
    return false;
  }
  bool clean = true;
  end_swap();
  sync();
  static mounted m;
  for (char *line = text + n; line > text;) {
    do line--;
    while (line > text && line[-1] != '\n');
    const char *at = line;
    if (!mount_next(&at, &m)) continue;
    if (strcmp(m.path, "/") && !umount2(m.path, 0)) continue;
    if (!m.disk || !m.writable || !mount(NULL, m.path, NULL, MS_REMOUNT | MS_RDONLY, NULL)) continue;
    char what[300];
    snprintf(what, sizeof what, "remounting %.200s read-only", m.path);
    warn(what, -errno);
    clean = false;
  }
  free(text);
  return clean;
}

static void stop_machine(bool restart) {
  say(restart ? "aenv: init: restarting\n" : "aenv: init: powering off\n");
  kill(-1, SIGTERM);
  if (!all_gone(2000)) { // an orderly end is worth that
    kill(-1, SIGKILL);
    if (!all_gone(5000)) say("aenv: init: processes are left that do not end\n");
  }
  // The host looks for these words.
  if (leave_disks()) say("aenv: init: file systems left clean\n");
  tcdrain(1);
  if (restart) {
    sync();
    reboot(RB_AUTOBOOT);
  }
  machine_off();
}

int guest_init(void) {
  bootwords w = {0};
  umask(022);
  int rc = must_mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=0755");
  open_console();
  if (rc) fatal("mounting devtmpfs", rc);
  if ((rc = must_mount("proc", "/proc", "proc", 0, NULL))) fatal("mounting proc", rc);
  // The program outlives its file: agents are started from this descriptor.
  int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  if (self < 0) fatal("/proc/self/exe", -errno);
  read_words(&w);
  check_timer(w.timer_hz);
  load_modules();
  mount_root(w.root);
  switch_root();
  prepare_image();
  mount_drives(w.drives);
  set_network(&w);
  lay_over_etc(&w);
  umask(022);

  int state = (int)syscall(SYS_memfd_create, "aenv-state", 1u /* MFD_CLOEXEC */);
  if (state < 0) fatal("memfd", -errno);
  struct rlimit files = {1048576, 1048576}; // descriptors of processes are kept here
  if (setrlimit(RLIMIT_NOFILE, &files)) warn("RLIMIT_NOFILE", -errno);
  reboot(RB_DISABLE_CAD); // Ctrl-Alt-Del becomes SIGINT
  sigset_t set;
  sigfillset(&set);
  sigprocmask(SIG_SETMASK, &set, NULL);
  int signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals < 0) fatal("signalfd", -errno);
  supervisor s = {.self = self, .state = state, .ip = w.ip, .pid = -1, .sock = -1};
  int64_t started = mono_ms(), round = started;
  int silent = 0;
  start_agent(&s);
  for (;;) {
    // A new agent not more often than once a second.
    int64_t left = started + 1000 - mono_ms();
    struct pollfd fds[2] = {{.fd = signals, .events = POLLIN}, {.fd = s.sock, .events = POLLIN}};
    poll(fds, 2, s.pid > 0 ? KEEP_ALIVE_MS : left > 0 ? (int)left : 0);
    if (s.pid < 0 && mono_ms() >= started + 1000) {
      started = round = mono_ms();
      silent = 0;
      start_agent(&s);
    }
    if (s.sock >= 0 && keeper_take(&s.processes, s.sock)) {
      silent = 0;
      round = mono_ms();
    }
    // Rounds are counted, not time: a clock that jumps (the whole machine stood still) is one round.
    if (s.pid > 0 && mono_ms() >= round + KEEP_ALIVE_MS) {
      round = mono_ms();
      if (++silent > KEEP_SILENT_MAX) {
        say("aenv: init: the agent does not answer, ending it\n");
        kill(s.pid, SIGKILL);
      }
    }
    struct signalfd_siginfo si;
    while (read(signals, &si, sizeof si) == (ssize_t)sizeof si) {
      uint32_t sig = si.ssi_signo;
      if (sig == SIGTERM || sig == SIGPWR || sig == SIGUSR1 || sig == SIGUSR2) stop_machine(false);
      if (sig == SIGINT) stop_machine(true);
    }
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
      if (pid != s.pid) {
        keeper_exit(&s.processes, s.sock, pid, status);
        continue;
      }
      char line[128];
      snprintf(line, sizeof line, "aenv: init: the agent ended (%s %d), starting it again\n",
               WIFSIGNALED(status) ? "signal" : "status", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
      say(line);
      keeper_take(&s.processes, s.sock); // its last words
      close(s.sock);
      s.pid = s.sock = -1;
    }
  }
}
