// Accounts of the image, read from its /etc/passwd and /etc/group by ourselves: a static program must not
// load the image's name-service modules, and the image may have neither file.
#ifndef AENV_USERS_H
#define AENV_USERS_H

#include "util.h"

typedef struct account {
  char *name, *home;
  uid_t uid;
  gid_t gid;
} account;

// Both files in memory; text stays valid until users_free.
typedef struct userdb {
  char *passwd, *group;
} userdb;

void users_load(userdb *db, const char *root); // absent files are empty ones
void users_free(userdb *db);

// By name, or by number ("1000", "1000:1000"): a number without an entry is an account too (image configs name
// such users), with home "/" and, unless given, group 0. root always exists. 0, -ENOENT or -ENOMEM.
int users_find(const userdb *db, arena *a, const char *root, const char *name, account *out);
// Supplementary groups, the primary one included. Count, or -ENOMEM.
ssize_t users_groups(const userdb *db, arena *a, const account *u, gid_t **out);
// Names for a listing; decimal ids when unknown.
const char *users_name(const userdb *db, arena *a, uid_t uid);
const char *users_group_name(const userdb *db, arena *a, gid_t gid);

#endif
