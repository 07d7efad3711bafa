/*
 * A jail for a program that a guest may have taken over: a root of its own with nothing in it but what it was given, a
 * network namespace, limits, an account, and no way to more privileges. Functions return 0 or -errno.
 */
#ifndef AENV_JAIL_H
#define AENV_JAIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { JAIL_MAX_ENTRIES = 48 };

/* What a jail is given of the host: a file or directory, or a device node of its own. */
struct jail_entry {
  enum { JAIL_READ_ONLY, JAIL_READ_WRITE, JAIL_NODE } kind;
  const char *source; /* path on the host */
  const char *target; /* absolute path inside */
};

struct jail {
  const char *root; /* an empty directory of the host, over which the jail's own file system is mounted */
  const char *netns;
  const char *tap; /* a tap in that namespace, which becomes the account's */
  const char *cgroups[8];
  size_t cgroup_count;
  struct jail_entry entries[JAIL_MAX_ENTRIES];
  size_t entry_count;
  bool own_user; /* false: the caller's account stays */
  uid_t uid;
  gid_t gid;
  uint64_t max_file_bytes; /* 0: no limit */
};

/* What failed last, for people. */
extern const char *jail_step;
extern const char *jail_subject;

/* Makes this process the jailed one. On success only an exec of a program inside is left to do. */
int jail_enter(const struct jail *jail);

/* Gives entries to the jail that a process lives in, and a new limit to its files (0: as it is). */
int jail_add(pid_t pid, const struct jail *jail);

/* Makes a tap of a network namespace the account's. Leaves this process in that namespace. */
int jail_own_tap(const char *netns, const char *tap, uid_t uid);

#endif
