#include "jail.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/mount.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include <grp.h>

/* <sys/mount.h> and <linux/mount.h> do not agree in every C library. */
extern int mount(const char *, const char *, const char *, unsigned long, const void *);
extern int umount2(const char *, int);
enum { DETACH = 2 };

const char *jail_step = "";
const char *jail_subject = "";

/* Runs a system call or a function; leaves with what it says when that is an error. */
#define STEP(name, subject, call)       \
  do {                                  \
    jail_step = name;                   \
    jail_subject = subject;             \
    if ((call) < 0) return -errno;      \
  } while (0)
#define TRY(call)                       \
  do {                                  \
    int tried_ = (call);                \
    if (tried_ < 0) return tried_;      \
  } while (0)

enum { MAX_FILES = 4096, PIPE_BYTES = 256 << 10 };

/* The directories above a path, below base. */
static int make_parents(const char *base, const char *path) {
  char buffer[PATH_MAX];
  int length = snprintf(buffer, sizeof buffer, "%s%s", base, path);
  jail_step = "make the directories of";
  jail_subject = path;
  if (length < 0 || (size_t)length >= sizeof buffer) return -ENAMETOOLONG;
  for (char *at = buffer + strlen(base) + 1; (at = strchr(at, '/')) != NULL; at++) {
    *at = '\0';
    if (mkdir(buffer, 0755) < 0 && errno != EEXIST) return -errno;
    *at = '/';
  }
  return 0;
}

static int make_file(const char *path) {
  int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return -errno;
  close(fd);
  return 0;
}

static unsigned long mount_flags(const struct jail_entry *entry) {
  unsigned long flags = MS_NOSUID | (entry->kind == JAIL_READ_ONLY ? MS_RDONLY : 0);
  return entry->kind == JAIL_NODE ? flags | MS_NOEXEC : flags | MS_NODEV;
}

/* A node of the jail's own, which belongs to its account and leaves the host's as it is. */
static int make_node(const char *target, dev_t device, mode_t type, uid_t uid, gid_t gid) {
  if (unlink(target) < 0 && errno != ENOENT) return -errno;
  if (mknod(target, type | 0600, device) < 0) return -errno;
  return chown(target, uid, gid) < 0 ? -errno : 0;
}

static int add_entry(const char *base, const struct jail_entry *entry, const struct jail *jail) {
  char target[PATH_MAX];
  TRY(make_parents(base, entry->target));
  if ((size_t)snprintf(target, sizeof target, "%s%s", base, entry->target) >= sizeof target) return -ENAMETOOLONG;
  struct stat stat;
  STEP("look at", entry->source, lstat(entry->source, &stat));
  if (S_ISLNK(stat.st_mode)) STEP("look at", entry->source, fstatat(AT_FDCWD, entry->source, &stat, 0));
  if (entry->kind == JAIL_NODE && jail->own_user) {
    jail_step = "make a device node for";
    return make_node(target, stat.st_rdev, stat.st_mode & S_IFMT, jail->uid, jail->gid);
  }
  jail_step = "make a place for";
  if (S_ISDIR(stat.st_mode)) {
    if (mkdir(target, 0755) < 0 && errno != EEXIST) return -errno;
  } else {
    TRY(make_file(target));
  }
  unsigned long recursive = S_ISDIR(stat.st_mode) && entry->kind == JAIL_READ_ONLY ? MS_REC : 0;
  STEP("mount", entry->source, mount(entry->source, target, NULL, MS_BIND | recursive, NULL));
  /* What is below a directory that was shared with all below it keeps its own flags. */
  STEP("remount", entry->source, mount(NULL, target, NULL, MS_BIND | MS_REMOUNT | mount_flags(entry), NULL));
  return 0;
}

/* Asked for by name, a device that is missing would be made. */
static int find_tap(const char *tap) {
  struct ifreq request = {.ifr_flags = 0};
  jail_step = "find the device";
  jail_subject = tap;
  if (strlen(tap) >= sizeof request.ifr_name) return -ENAMETOOLONG;
  memcpy(request.ifr_name, tap, strlen(tap));
  int query = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (query < 0) return -errno;
  int result = ioctl(query, SIOCGIFINDEX, &request) < 0 ? -errno : 0;
  close(query);
  return result;
}

static int enter_netns(const char *netns) {
  int fd = open(netns, O_RDONLY | O_CLOEXEC);
  STEP("open the network namespace", netns, fd);
  STEP("enter the network namespace", netns, setns(fd, CLONE_NEWNET));
  close(fd);
  return 0;
}

int jail_own_tap(const char *netns, const char *tap, uid_t uid) {
  TRY(enter_netns(netns));
  TRY(find_tap(tap));
  int tun = open("/dev/net/tun", O_RDWR | O_CLOEXEC);
  STEP("open", "/dev/net/tun", tun);
  struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
  memcpy(request.ifr_name, tap, strlen(tap));
  STEP("attach to the device", tap, ioctl(tun, TUNSETIFF, &request));
  STEP("give away the device", tap, ioctl(tun, TUNSETOWNER, (unsigned long)uid));
  close(tun);
  return 0;
}

static int join_cgroup(const char *dir) {
  char path[PATH_MAX];
  if ((size_t)snprintf(path, sizeof path, "%s/cgroup.procs", dir) >= sizeof path) return -ENAMETOOLONG;
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return -errno;
  int result = write(fd, "0", 1) < 0 ? -errno : 0;
  close(fd);
  return result;
}

static int limit(int resource, uint64_t value) {
  struct rlimit now;
  if (getrlimit(resource, &now) < 0) return -errno;
  if (now.rlim_max != RLIM_INFINITY && now.rlim_max < value) value = now.rlim_max;
  now = (struct rlimit){.rlim_cur = value, .rlim_max = value};
  return setrlimit(resource, &now) < 0 ? -errno : 0;
}

/* Lower limits than these stay. A core would be the guest's memory. */
static int set_limits(const struct jail *jail) {
  jail_step = "set the limits";
  jail_subject = "of the process";
  TRY(limit(RLIMIT_CORE, 0));
  TRY(limit(RLIMIT_NOFILE, MAX_FILES));
  if (jail->max_file_bytes > 0) TRY(limit(RLIMIT_FSIZE, jail->max_file_bytes));
  /* The first to go when memory is short. */
  int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (fd >= 0) {
    ssize_t written = write(fd, "1000", 4);
    (void)written; /* not everybody may */
    close(fd);
  }
  /* The console is read now and then. A smaller pipe only loses more of a fast one. */
  (void)fcntl(STDOUT_FILENO, F_SETPIPE_SZ, PIPE_BYTES);
  return 0;
}

/* A service's system call filter may refuse what is no part of the wall, with the error that it was set up with. */
static bool is_refused(void) { return errno == EPERM || errno == ENOSYS || errno == EACCES || errno == EINVAL; }

/* Message queues, shared memory and a host name of its own: nothing that is given to the process depends on them. */
static int leave_rest(void) {
  static const int spaces[] = {CLONE_NEWIPC, CLONE_NEWUTS};
  bool own_name = false;
  for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++) {
    if (unshare(spaces[i]) == 0) own_name = spaces[i] == CLONE_NEWUTS;
    else if (!is_refused()) return -errno;
  }
  /* In the host's name space it would be the host's name. */
  if (own_name && sethostname("jail", 4) < 0 && !is_refused()) return -errno;
  return 0;
}

static int build_root(const struct jail *jail) {
  STEP("unshare", "mounts", unshare(CLONE_NEWNS));
  jail_step = "unshare";
  jail_subject = "IPC and host name";
  TRY(leave_rest());
  STEP("make private", "mounts", mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
  /* For nodes and mount points; what is written lies in the directories that were given. */
  STEP("mount a file system on", jail->root,
       mount("jail", jail->root, "tmpfs", MS_NOSUID | MS_NOEXEC, "size=256k,mode=755"));
  for (size_t i = 0; i < jail->entry_count; i++) TRY(add_entry(jail->root, &jail->entries[i], jail));
  STEP("go to", jail->root, chdir(jail->root));
  /* The old root comes to lie on the new one, from where it is taken away. */
  STEP("change the root to", jail->root, (int)syscall(SYS_pivot_root, ".", "."));
  STEP("take away", "the old root", umount2(".", DETACH));
  STEP("go to", "/", chdir("/"));
  return 0;
}

static int drop_privileges(const struct jail *jail) {
  jail_step = "drop privileges";
  jail_subject = "";
  /* Fails where the set could not be used anyway: without CAP_SETPCAP. */
  for (unsigned long cap = 0; prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; cap++) {
    if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0 && errno != EPERM) return -errno;
  }
  STEP("drop", "ambient capabilities", prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0));
  if (jail->own_user) {
    STEP("leave", "all groups", setgroups(0, NULL));
    STEP("become", "the group", setresgid(jail->gid, jail->gid, jail->gid));
    STEP("become", "the user", setresuid(jail->uid, jail->uid, jail->uid));
  }
  struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
  struct __user_cap_data_struct none[2] = {{0}, {0}};
  STEP("drop", "capabilities", (int)syscall(SYS_capset, &header, none));
  STEP("forbid", "new privileges", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
  return 0;
}

int jail_enter(const struct jail *jail) {
  umask(0077);
  for (size_t i = 0; i < jail->cgroup_count; i++) {
    jail_step = "join the control group";
    jail_subject = jail->cgroups[i];
    TRY(join_cgroup(jail->cgroups[i]));
  }
  /* The caller's own account has the tap already. */
  if (jail->own_user && jail->tap != NULL) {
    TRY(jail_own_tap(jail->netns, jail->tap, jail->uid));
  } else {
    TRY(enter_netns(jail->netns));
    if (jail->tap != NULL) TRY(find_tap(jail->tap));
  }
  TRY(set_limits(jail));
  umask(0022);
  TRY(build_root(jail));
  umask(0077);
  return drop_privileges(jail);
}

/* mount_flags in the words of mount_setattr. */
static uint64_t attach_flags(const struct jail_entry *entry) {
  uint64_t flags = MOUNT_ATTR_NOSUID | (entry->kind == JAIL_READ_ONLY ? MOUNT_ATTR_RDONLY : 0);
  return flags | (entry->kind == JAIL_NODE ? MOUNT_ATTR_NOEXEC : MOUNT_ATTR_NODEV);
}

/* Attaches what was taken from the host's tree at a place of the jail, which this process is in. */
static int attach(int tree, const struct jail_entry *entry, mode_t mode) {
  TRY(make_parents("", entry->target));
  jail_step = "make a place for";
  jail_subject = entry->source;
  if (S_ISDIR(mode)) {
    if (mkdir(entry->target, 0755) < 0 && errno != EEXIST) return -errno;
  } else {
    TRY(make_file(entry->target));
  }
  /* Before the process can see it. The call is of Linux 5.12: on older ones it is writable for a moment. */
  struct mount_attr attributes = {.attr_set = attach_flags(entry)};
  bool set = syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attributes, sizeof attributes) == 0;
  jail_step = "restrict";
  if (!set && errno != ENOSYS && errno != EPERM) return -errno;
  STEP("attach", entry->source,
       (int)syscall(SYS_move_mount, tree, "", AT_FDCWD, entry->target, MOVE_MOUNT_F_EMPTY_PATH));
  if (!set) STEP("remount", entry->source,
                 mount(NULL, entry->target, NULL, MS_BIND | MS_REMOUNT | mount_flags(entry), NULL));
  return 0;
}

int jail_add(pid_t pid, const struct jail *jail) {
  /* Static: what was looked at is told after the return. */
  static char path[64], root_path[64];
  snprintf(path, sizeof path, "/proc/%d/ns/mnt", (int)pid);
  int space = open(path, O_RDONLY | O_CLOEXEC);
  STEP("find the jail of process", path, space);
  /* Where the namespace's own root lies elsewhere, as in a change of root, entering it would lead out of the jail. */
  snprintf(root_path, sizeof root_path, "/proc/%d/root", (int)pid);
  int root = open(root_path, O_PATH | O_DIRECTORY | O_CLOEXEC);
  STEP("find the root of process", root_path, root);
  int trees[JAIL_MAX_ENTRIES];
  struct stat stats[JAIL_MAX_ENTRIES];
  for (size_t i = 0; i < jail->entry_count; i++) {
    const struct jail_entry *entry = &jail->entries[i];
    STEP("look at", entry->source, fstatat(AT_FDCWD, entry->source, &stats[i], 0));
    trees[i] = -1;
    if (entry->kind == JAIL_NODE && jail->own_user) continue;
    trees[i] = (int)syscall(SYS_open_tree, AT_FDCWD, entry->source, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    STEP("take", entry->source, trees[i]);
  }
  if (jail->max_file_bytes > 0) {
    struct rlimit files = {.rlim_cur = jail->max_file_bytes, .rlim_max = jail->max_file_bytes};
    jail_step = "limit";
    jail_subject = "the size of files";
    /* Another account's limits are CAP_SYS_RESOURCE's to change; without it the process keeps what it started with. */
    if (prlimit(pid, RLIMIT_FSIZE, &files, NULL) < 0 && errno != EPERM) return -errno;
  }
  STEP("unshare", "the file system's state", unshare(CLONE_FS));
  STEP("enter the jail of", path, setns(space, CLONE_NEWNS));
  STEP("go to", root_path, fchdir(root));
  STEP("change the root to", root_path, chroot("."));
  umask(0022);
  for (size_t i = 0; i < jail->entry_count; i++) {
    const struct jail_entry *entry = &jail->entries[i];
    if (trees[i] >= 0) {
      TRY(attach(trees[i], entry, stats[i].st_mode));
      continue;
    }
    TRY(make_parents("", entry->target));
    jail_step = "make a device node for";
    jail_subject = entry->source;
    TRY(make_node(entry->target, stats[i].st_rdev, stats[i].st_mode & S_IFMT, jail->uid, jail->gid));
  }
  return 0;
}
