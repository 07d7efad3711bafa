// A file that is seen under its name only when it is whole.
#ifndef AENV_STAGE_H
#define AENV_STAGE_H

#include "users.h"
#include "util.h"

// Prefix of the names that exist for the moment of a replacement; watches of ours leave them out.
#define STAGE_PREFIX ".aenv-upload-"

typedef struct stage {
  int fd;      // open for writing; -1: none
  char *path;  // where it goes to
  char *dir;   // where it waits
  char *named; // its name while waiting on a file system without unnamed files, else NULL
  bool in_place;
  off_t size; // written so far
  bool holes;
} stage;

// Begins a new file for path (its parent exists) that will belong to u. An existing regular file keeps mode,
// extended attributes but "user.e2b.*", and, until stage_commit, its content. What can only be written in place is:
// a file with several names, one that is a mount point, the missing target of a link. 0, or -errno.
int stage_open(stage *s, arena *a, const char *path, const account *u);
// Appends. Whole blocks of zeros become holes: they read the same and take no disk. 0, or -errno.
int stage_write(stage *s, const uint8_t *p, size_t n);
// Gives the file its name; the event a watch sees last is a write. Always ends the stage. `replacing` is called before
// the name of an existing file changes hands, NULL: nobody cares. 0, or -errno (nothing changed).
int stage_commit(stage *s, void (*replacing)(void *arg, const char *path), void *arg);
void stage_drop(stage *s); // forgets it; nothing of it remains, but for files written in place

#endif
