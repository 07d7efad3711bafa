// File systems of the guest's disks: held still while the host takes the disks, and left clean at the machine's end.
#ifndef AENV_HOLD_H
#define AENV_HOLD_H

#include <stdbool.h>
#include <sys/types.h>

enum {
  DISKS_MAX = 64,        // file systems on disks; more are refused
  HOLD_LIMIT_MS = 30000, // of guest time from the first one's freezing on: what nobody thaws is thawed
  FREEZE_LIMIT_MS = 15000, // of it, for freezing
  REPORT_MAX_MS = 5000,  // an older report of having frozen is none
};

typedef struct {
  char path[4096];
  unsigned major, minor;
  bool disk;     // it lies on a disk of the machine (/dev/vd*)
  bool writable; // the file system, not just this mount of it
} mounted;

// Pure: the next mount in the text of a mountinfo; *text is moved on. False at the end. Lines without the expected form
// are passed over.
bool mount_next(const char **text, mounted *out);

#endif
