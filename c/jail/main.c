/*
 * Starts a program in a jail, or gives files to one that runs:
 *
 *   aenv-jail run --root DIR --netns FILE [--tap NAME] [--cgroup DIR]... [ENTRY]... [ACCOUNT] [--max-file BYTES]
 *             -- PROGRAM ARGUMENT...
 *   aenv-jail add --pid PID [ENTRY]... [ACCOUNT] [--max-file BYTES]
 *   aenv-jail tap --netns FILE --tap NAME ACCOUNT
 *
 * ENTRY: --ro SOURCE TARGET, --rw SOURCE TARGET, --node DEVICE TARGET. ACCOUNT: --uid N --gid N; absent: the caller's.
 * The process that is started is the one that ran this. An error is one line on standard error and status 125.
 */
#include "jail.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FAILED = 125 };

static int usage(const char *what) {
  fprintf(stderr, "aenv-jail: %s\n", what);
  return FAILED;
}

static int failed(int error) {
  fprintf(stderr, "aenv-jail: cannot %s %s: %s\n", jail_step, jail_subject, strerror(-error));
  return FAILED;
}

static bool number(const char *text, uint64_t max, uint64_t *value) {
  char *end;
  errno = 0;
  unsigned long long parsed = strtoull(text, &end, 10);
  if (errno != 0 || end == text || *end != '\0' || text[0] == '-' || parsed > max) return false;
  *value = parsed;
  return true;
}

/* Takes the options up to `--` or the end; returns where they end, or -1 with a message. */
static int parse(int argc, char **argv, struct jail *jail, uint64_t *pid) {
  bool uid = false, gid = false;
  int at = 2;
  for (; at < argc && strcmp(argv[at], "--") != 0; at++) {
    const char *name = argv[at];
    bool entry = strcmp(name, "--ro") == 0 || strcmp(name, "--rw") == 0 || strcmp(name, "--node") == 0;
    if (at + (entry ? 2 : 1) >= argc) return usage("an option lacks its value"), -1;
    const char *value = argv[++at];
    uint64_t parsed = 0;
    if (entry) {
      if (jail->entry_count == JAIL_MAX_ENTRIES) return usage("too many entries"), -1;
      const char *target = argv[++at];
      if (target[0] != '/' || strstr(target, "..") != NULL) return usage("a target is not a plain absolute path"), -1;
      jail->entries[jail->entry_count++] = (struct jail_entry){
          .kind = name[2] == 'n' ? JAIL_NODE : name[3] == 'o' ? JAIL_READ_ONLY : JAIL_READ_WRITE,
          .source = value,
          .target = target,
      };
    } else if (strcmp(name, "--root") == 0) {
      jail->root = value;
    } else if (strcmp(name, "--netns") == 0) {
      jail->netns = value;
    } else if (strcmp(name, "--tap") == 0) {
      jail->tap = value;
    } else if (strcmp(name, "--cgroup") == 0) {
      if (jail->cgroup_count == sizeof jail->cgroups / sizeof *jail->cgroups) return usage("too many groups"), -1;
      jail->cgroups[jail->cgroup_count++] = value;
    } else if (strcmp(name, "--uid") == 0 && number(value, UINT32_MAX - 1, &parsed)) {
      jail->uid = (uid_t)parsed;
      uid = true;
    } else if (strcmp(name, "--gid") == 0 && number(value, UINT32_MAX - 1, &parsed)) {
      jail->gid = (gid_t)parsed;
      gid = true;
    } else if (strcmp(name, "--max-file") == 0 && number(value, INT64_MAX, &parsed)) {
      jail->max_file_bytes = parsed;
    } else if (strcmp(name, "--pid") == 0 && number(value, INT32_MAX, &parsed)) {
      *pid = parsed;
    } else {
      return usage("an option is unknown, or its value is not a number"), -1;
    }
  }
  if (uid != gid) return usage("--uid and --gid go together"), -1;
  jail->own_user = uid;
  return at;
}

int main(int argc, char **argv) {
  struct jail jail = {0};
  uint64_t pid = 0;
  if (argc < 2) return usage("run, add or tap?");
  int end = parse(argc, argv, &jail, &pid);
  if (end < 0) return FAILED;
  if (strcmp(argv[1], "add") == 0) {
    if (pid == 0) return usage("add needs --pid");
    int error = jail_add((pid_t)pid, &jail);
    return error < 0 ? failed(error) : 0;
  }
  if (strcmp(argv[1], "tap") == 0) {
    if (jail.netns == NULL || jail.tap == NULL || !jail.own_user) return usage("tap needs --netns, --tap and an account");
    int error = jail_own_tap(jail.netns, jail.tap, jail.uid);
    return error < 0 ? failed(error) : 0;
  }
  if (strcmp(argv[1], "run") != 0) return usage("run, add or tap?");
  if (jail.root == NULL || jail.netns == NULL || end + 1 >= argc) return usage("run needs --root, --netns and a program");
  int error = jail_enter(&jail);
  if (error < 0) return failed(error);
  jail_step = "run";
  jail_subject = argv[end + 1];
  execve(argv[end + 1], argv + end + 1, environ);
  return failed(-errno);
}
