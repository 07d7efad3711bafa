// What makes one sandbox tell itself from another one of the same snapshot: name, machine id, SSH host keys.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"

static void complain(const char *what, int rc) {
  if (rc < 0) fprintf(stderr, "aenv: agent: %s: %s\n", what, strerror(-rc));
}

// Replaces the content of a file where it is: it may be a mount point.
static int rewrite(const char *path, const char *text, bool create) {
  int fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC | (create ? O_CREAT : 0), 0644);
  if (fd < 0) return -errno;
  int rc = write_all(fd, text, strlen(text));
  if (close(fd) && !rc) rc = -errno;
  return rc;
}

int identity_host_line(const char *root, const char *mark, const char *line) {
  char path[4200], *text;
  snprintf(path, sizeof path, "%s/etc/hosts", root);
  ssize_t have = read_whole(path, &text, 4 << 20);
  if (have < 0 && have != -ENOENT) return (int)have;
  buf b = {0};
  for (char *p = have < 0 ? (char *)"" : text; *p;) {
    size_t n = strcspn(p, "\n");
    n += p[n] == '\n';
    if (!memmem(p, n, mark, strlen(mark))) buf_put(&b, p, n);
    p += n;
  }
  if (have >= 0) free(text);
  if (buf_len(&b) && buf_data(&b)[buf_len(&b) - 1] != '\n') buf_putc(&b, '\n');
  buf_printf(&b, "%s\n", line);
  buf_putc(&b, 0);
  int rc = b.oom ? -ENOMEM : rewrite(path, (char *)b.p, true);
  buf_free(&b);
  return rc;
}

static void machine_id(const agent *ag, const char *id) {
  char text[40], salted[300];
  uint8_t d[32];
  snprintf(salted, sizeof salted, "machine-id:%s", id);
  sha256(salted, strlen(salted), d);
  d[6] = (d[6] & 0x0f) | 0x40; // the form of a random UUID
  d[8] = (d[8] & 0x3f) | 0x80;
  for (int i = 0; i < 16; i++) snprintf(text + 2 * i, 3, "%02x", d[i]);
  strcpy(text + 32, "\n");
  static const char *const files[] = {"/etc/machine-id", "/var/lib/dbus/machine-id"};
  for (int i = 0; i < 2; i++) {
    char path[4200];
    struct stat st;
    snprintf(path, sizeof path, "%s%s", ag->root, files[i]);
    // An image without one, or with one to be made at its first boot, stays as it is.
    if (!lstat(path, &st) && S_ISREG(st.st_mode) && st.st_size == 33) complain(files[i], rewrite(path, text, false));
  }
}

// ---- SSH host keys -----------------------------------------------------------------------------

static const char *const key_types[] = {"ed25519", "ecdsa", "rsa"};
enum { KEY_TYPES = 3 };

static void key_path(const agent *ag, char *out, size_t cap, const char *type, const char *suffix) {
  snprintf(out, cap, "%s/etc/ssh/ssh_host_%s_key%s", ag->root, type, suffix);
}

// Which sandbox the keys were made for: one that is booted again from its own disk keeps them.
static const char keys_owner[] = "/etc/ssh/.aenv-sandbox";

static bool keys_are_of(const agent *ag, const char *id) {
  char path[4200], *text;
  snprintf(path, sizeof path, "%s%s", ag->root, keys_owner);
  ssize_t n = read_whole(path, &text, 256);
  if (n < 0) return false;
  bool own = (size_t)n == strlen(id) && !memcmp(text, id, (size_t)n);
  free(text);
  return own;
}

static bool has_keys(const agent *ag) {
  char path[4200];
  for (int i = 0; i < KEY_TYPES; i++) {
    key_path(ag, path, sizeof path, key_types[i], "");
    if (!access(path, F_OK)) return true;
  }
  return false;
}

static int run_keygen(const char *type, const char *file) {
  pid_t pid = fork();
  if (!pid) {
    char *argv[] = {"ssh-keygen", "-q", "-t", (char *)type, "-N", "", "-C", "", "-f", (char *)file, NULL};
    char *envp[] = {"PATH=" DEFAULT_PATH, "HOME=/", NULL};
    int null = open("/dev/null", O_RDWR);
    for (int i = 0; i < 3; i++) dup2(null, i);
    execve("/usr/bin/ssh-keygen", argv, envp);
    _exit(127);
  }
  int status = -1;
  while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return pid > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// A running server reads its keys again.
static void hup_sshd(const agent *ag) {
  char path[4200], *text;
  uint64_t pid;
  snprintf(path, sizeof path, "%s/run/sshd.pid", ag->root);
  if (read_whole(path, &text, 64) < 0) return;
  bool ok = !parse_u64(text, strspn(text, "0123456789"), INT32_MAX, &pid) && pid > 1;
  free(text);
  if (!ok) return;
  snprintf(path, sizeof path, "/proc/%llu/comm", (unsigned long long)pid);
  if (read_whole(path, &text, 64) < 0) return;
  if (!strcmp(text, "sshd\n")) kill((pid_t)pid, SIGHUP);
  free(text);
}

// In a child. The old keys go as soon as there is one new key: two sandboxes never show the same one for long,
// and a server always has one. The image's own ssh-keygen makes them: keys are no work for hand-made code.
static void renew_keys(void *owner, buf *out) {
  const agent *ag = owner;
  char fresh[4200], fresh_pub[4300], path[4200];
  bool present[KEY_TYPES], any = false;
  setpriority(PRIO_PROCESS, 0, 10);
  if (ag->cgroup) {
    snprintf(path, sizeof path, "%s/cgroup.procs", ag->cgroup);
    if (write_control(path, "0")) buf_puts(out, "cgroup; ");
  }
  for (int i = 0; i < KEY_TYPES; i++) {
    key_path(ag, path, sizeof path, key_types[i], "");
    present[i] = !access(path, F_OK);
  }
  for (int i = 0; i < KEY_TYPES; i++) {
    if (!present[i]) continue;
    snprintf(fresh, sizeof fresh, "%s/etc/ssh/.aenv-new-key", ag->root);
    snprintf(fresh_pub, sizeof fresh_pub, "%s.pub", fresh);
    unlink(fresh);
    unlink(fresh_pub);
    int rc = run_keygen(key_types[i], fresh);
    key_path(ag, path, sizeof path, key_types[i], "");
    if (rc || rename(fresh, path)) {
      buf_printf(out, "%s: ssh-keygen ended with %d; ", key_types[i], rc);
      continue;
    }
    key_path(ag, path, sizeof path, key_types[i], ".pub");
    if (rename(fresh_pub, path)) buf_printf(out, "%s: %s; ", path, strerror(errno));
    if (!any)
      for (int k = 0; k < KEY_TYPES; k++) {
        if (k == i || !present[k]) continue;
        key_path(ag, path, sizeof path, key_types[k], "");
        unlink(path);
        key_path(ag, path, sizeof path, key_types[k], ".pub");
        unlink(path);
      }
    any = true;
    hup_sshd(ag);
  }
  const char *id = env_get(ag->platform_env, "E2B_SANDBOX_ID");
  if (!any || !id) return;
  snprintf(path, sizeof path, "%s%s", ag->root, keys_owner);
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
  int rc = fd < 0 ? -errno : write_all(fd, id, strlen(id));
  if (fd >= 0) close(fd);
  if (rc) buf_printf(out, "%s: %s; ", path, strerror(-rc));
}

static void keys_done(job *j, bool ok) {
  if (!ok || buf_len(&j->out))
    fprintf(stderr, "aenv: agent: SSH host keys are not all new: %.*s\n", (int)buf_len(&j->out),
            ok ? (char *)buf_data(&j->out) : "interrupted");
}

void identity_apply(agent *ag, const char *id) {
  if (!ag->guest && !*ag->root) return; // the machine is not ours
  size_t n = strlen(id) < 64 ? strlen(id) : 64;
  if (ag->guest && sethostname(id, n)) complain("sethostname", -errno);
  char line[160], path[4200];
  snprintf(line, sizeof line, "127.0.1.1\t%.*s\t" IDENTITY_MARK, (int)n, id);
  complain("/etc/hosts", identity_host_line(ag->root, IDENTITY_MARK, line));
  snprintf(path, sizeof path, "%s/etc/hostname", ag->root);
  snprintf(line, sizeof line, "%.*s\n", (int)n, id);
  if (!access(path, F_OK)) complain("/etc/hostname", rewrite(path, line, false));
  machine_id(ag, id);
  if (has_keys(ag) && !keys_are_of(ag, id) && !job_start(ag, ag, renew_keys, keys_done)) complain("SSH host keys", -EAGAIN);
}
