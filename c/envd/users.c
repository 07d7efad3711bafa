#include "users.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { DB_MAX = 8 << 20, NGROUPS = 65536 };

static char *load(const char *root, const char *path) {
  char full[4200];
  snprintf(full, sizeof full, "%s%s", root, path);
  char *text;
  return read_whole(full, &text, DB_MAX) < 0 ? NULL : text;
}

void users_load(userdb *db, const char *root) {
  db->passwd = load(root, "/etc/passwd");
  db->group = load(root, "/etc/group");
}

void users_free(userdb *db) {
  free(db->passwd);
  free(db->group);
  db->passwd = db->group = NULL;
}

typedef struct {
  const char *f[7];
  size_t n[7];
  int count;
} line;

// Splits the line at p; returns the start of the next one, or NULL at the end.
static const char *split(const char *p, line *out) {
  if (!p || !*p) return NULL;
  size_t len = strcspn(p, "\n");
  const char *end = p + len, *next = *end ? end + 1 : end;
  out->count = 0;
  while (out->count < 7) {
    size_t k = 0;
    while (p + k < end && p[k] != ':') k++;
    out->f[out->count] = p;
    out->n[out->count++] = k;
    if (p + k >= end) break;
    p += k + 1;
  }
  return next;
}

static bool id_of(const line *l, int i, uint32_t *out) {
  uint64_t v;
  if (l->count <= i || parse_u64(l->f[i], l->n[i], UINT32_MAX - 1, &v)) return false;
  *out = (uint32_t)v;
  return true;
}

static bool field_is(const line *l, int i, const char *s, size_t n) {
  return l->count > i && l->n[i] == n && !memcmp(l->f[i], s, n);
}

static int fill(arena *a, const line *l, account *out) {
  out->name = arena_strndup(a, l->f[0], l->n[0]);
  out->home = l->count > 5 && l->n[5] ? arena_strndup(a, l->f[5], l->n[5]) : arena_strndup(a, "/", 1);
  return out->name && out->home ? 0 : -ENOMEM;
}

int users_find(const userdb *db, arena *a, const char *root, const char *name, account *out) {
  line l;
  size_t nl = strlen(name);
  if (!nl) return -ENOENT;
  for (const char *p = db->passwd; (p = split(p, &l));)
    if (field_is(&l, 0, name, nl) && id_of(&l, 2, &out->uid) && id_of(&l, 3, &out->gid)) return fill(a, &l, out);
  size_t un = strcspn(name, ":");
  uint64_t uid, gid = 0;
  bool numeric = !parse_u64(name, un, UINT32_MAX - 1, &uid);
  bool has_gid = numeric && name[un] == ':' && !parse_u64(name + un + 1, nl - un - 1, UINT32_MAX - 1, &gid);
  if (numeric && (!name[un] || has_gid)) {
    for (const char *p = db->passwd; (p = split(p, &l));)
      if (id_of(&l, 2, &out->uid) && out->uid == uid && id_of(&l, 3, &out->gid)) {
        if (has_gid) out->gid = (gid_t)gid;
        return fill(a, &l, out);
      }
    out->uid = (uid_t)uid;
    out->gid = (gid_t)gid;
    out->name = arena_strndup(a, uid ? name : "root", uid ? un : 4);
    out->home = arena_strndup(a, "/", 1);
    return out->name && out->home ? 0 : -ENOMEM;
  }
  if (!strcmp(name, "root")) { // an image with no account file at all
    char path[4200];
    struct stat st;
    snprintf(path, sizeof path, "%s/root", root);
    out->uid = 0;
    out->gid = 0;
    out->name = arena_strndup(a, "root", 4);
    out->home = arena_strndup(a, "/root", stat(path, &st) || !S_ISDIR(st.st_mode) ? 1 : 5);
    return out->name && out->home ? 0 : -ENOMEM;
  }
  return -ENOENT;
}

ssize_t users_groups(const userdb *db, arena *a, const account *u, gid_t **out) {
  size_t cap = 64, n = 0, un = strlen(u->name);
  gid_t *g = arena_alloc(a, cap * sizeof *g);
  if (!g) return -ENOMEM;
  g[n++] = u->gid;
  line l;
  for (const char *p = db->group; (p = split(p, &l));) {
    gid_t gid;
    if (l.count < 4 || !id_of(&l, 2, &gid)) continue;
    bool member = false;
    for (size_t i = 0; i < l.n[3] && !member;) {
      size_t k = 0;
      while (i + k < l.n[3] && l.f[3][i + k] != ',') k++;
      member = k == un && !memcmp(l.f[3] + i, u->name, un);
      i += k + 1;
    }
    for (size_t i = 0; member && i < n; i++)
      if (g[i] == gid) member = false;
    if (member && n == cap && cap < NGROUPS) {
      gid_t *more = arena_alloc(a, 2 * cap * sizeof *g);
      if (!more) return -ENOMEM;
      memcpy(more, g, n * sizeof *g);
      g = more;
      cap *= 2;
    }
    if (member && n < cap) g[n++] = gid;
  }
  *out = g;
  return (ssize_t)n;
}

static const char *name_of(const char *p, arena *a, uint32_t id) {
  line l;
  uint32_t v;
  while ((p = split(p, &l)))
    if (id_of(&l, 2, &v) && v == id && l.n[0]) return arena_strndup(a, l.f[0], l.n[0]);
  return NULL;
}

const char *users_name(const userdb *db, arena *a, uid_t uid) {
  const char *s = name_of(db->passwd, a, uid);
  return s ? s : arena_printf(a, "%u", uid);
}

const char *users_group_name(const userdb *db, arena *a, gid_t gid) {
  const char *s = name_of(db->group, a, gid);
  return s ? s : arena_printf(a, "%u", gid);
}
