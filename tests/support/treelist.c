/*
 * Lists file trees of a guest as a process in it sees them: one JSON object per line, nothing of the image needed.
 *
 *   treelist WORKDIR TREE…
 *
 * WORKDIR is made where it is missing. A TREE is `/`, the root file system without what is mounted over it, or the
 * serial number of a disk, which is mounted read-only as ext4. Each begins with {"tree": …}, has a line per entry and
 * ends with {"end": …, "entries": …}. Names, link targets and attributes are in hexadecimal: they may be any bytes.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

// ---- SHA-256 (FIPS 180-4) ----------------------------------------------------------------------

static const uint32_t rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

typedef struct {
  uint32_t h[8];
  uint64_t bytes;
  uint8_t block[64];
} sha256;

static uint32_t rotate(uint32_t x, int n) {
  return x >> n | x << (32 - n);
}

static void sha256_block(sha256 *s, const uint8_t *p) {
  uint32_t w[64], v[8];
  for (int i = 0; i < 16; i++) w[i] = (uint32_t)p[4 * i] << 24 | p[4 * i + 1] << 16 | p[4 * i + 2] << 8 | p[4 * i + 3];
  for (int i = 16; i < 64; i++) {
    uint32_t a = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
    uint32_t b = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + a + w[i - 7] + b;
  }
  memcpy(v, s->h, sizeof v);
  for (int i = 0; i < 64; i++) {
    uint32_t e = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
    uint32_t t = v[7] + e + ((v[4] & v[5]) ^ (~v[4] & v[6])) + rounds[i] + w[i];
    uint32_t a = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
    uint32_t u = a + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
    memmove(v + 1, v, 7 * sizeof *v);
    v[4] += t;
    v[0] = t + u;
  }
  for (int i = 0; i < 8; i++) s->h[i] += v[i];
}

static void sha256_add(sha256 *s, const uint8_t *p, size_t n) {
  while (n) {
    size_t at = s->bytes % 64, k = 64 - at < n ? 64 - at : n;
    memcpy(s->block + at, p, k);
    s->bytes += k;
    p += k;
    n -= k;
    if (at + k == 64) sha256_block(s, s->block);
  }
}

static void sha256_end(sha256 *s, uint8_t out[32]) {
  uint64_t bits = s->bytes * 8;
  uint8_t end[72] = {0x80};
  size_t pad = (s->bytes % 64 < 56 ? 56 : 120) - s->bytes % 64;
  for (int i = 0; i < 8; i++) end[pad + i] = (uint8_t)(bits >> (56 - 8 * i));
  sha256_add(s, end, pad + 8);
  for (int i = 0; i < 32; i++) out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}

// ---- listing -----------------------------------------------------------------------------------

static uint64_t entries;
static uint8_t data[1 << 16];

static void __attribute__((noreturn)) fail(const char *what) {
  fprintf(stderr, "treelist: %s: %s\n", what, strerror(errno));
  exit(1);
}

static void put_hex(const void *bytes, size_t n) {
  for (size_t i = 0; i < n; i++) printf("%02x", ((const uint8_t *)bytes)[i]);
}

static const char *kind(mode_t mode) {
  return S_ISREG(mode)    ? "file"
         : S_ISDIR(mode)  ? "directory"
         : S_ISLNK(mode)  ? "symlink"
         : S_ISFIFO(mode) ? "fifo"
         : S_ISBLK(mode)  ? "block"
         : S_ISCHR(mode)  ? "character"
                          : "socket";
}

static void put_content(int dir, const char *name) {
  sha256 s = {.h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
  int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NOATIME | O_CLOEXEC);
  if (fd < 0) fail(name);
  ssize_t n;
  while ((n = read(fd, data, sizeof data)) > 0) sha256_add(&s, data, (size_t)n);
  if (n < 0) fail(name);
  close(fd);
  uint8_t sum[32];
  sha256_end(&s, sum);
  printf(",\"sha256\":\"");
  put_hex(sum, sizeof sum);
  putchar('"');
}

// Of the entry itself, also where it is a link.
static void put_xattrs(int dir, const char *name) {
  static char names[1 << 16];
  char path[64 + NAME_MAX];
  snprintf(path, sizeof path, "/proc/self/fd/%d/%s", dir, name);
  ssize_t n = llistxattr(path, names, sizeof names);
  if (n < 0) fail(name);
  printf(",\"xattrs\":{");
  for (char *p = names; p < names + n; p += strlen(p) + 1) {
    ssize_t k = lgetxattr(path, p, data, sizeof data);
    if (k < 0) fail(p);
    printf("%s\"", p == names ? "" : ",");
    put_hex(p, strlen(p));
    printf("\":\"");
    put_hex(data, (size_t)k);
    putchar('"');
  }
  putchar('}');
}

// The entry `name` of `dir`, then all below it. `path` (of `n` bytes) is where it is below the tree's root.
static void list(int dir, const char *name, char *path, size_t n) {
  struct stat st;
  if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW)) fail(path);
  printf("{\"name\":\"");
  put_hex(path, n);
  printf("\",\"type\":\"%s\",\"mode\":%u,\"uid\":%u,\"gid\":%u,\"links\":%lu,\"size\":%lld,\"device\":%llu", kind(st.st_mode),
         st.st_mode & 07777, st.st_uid, st.st_gid, (unsigned long)st.st_nlink, (long long)st.st_size,
         (unsigned long long)st.st_rdev);
  printf(",\"inode\":\"%llu\",\"mtime\":[\"%lld\",%ld]", (unsigned long long)st.st_ino, (long long)st.st_mtim.tv_sec,
         st.st_mtim.tv_nsec);
  if (S_ISREG(st.st_mode)) put_content(dir, name);
  if (S_ISLNK(st.st_mode)) {
    ssize_t k = readlinkat(dir, name, (char *)data, sizeof data);
    if (k < 0) fail(path);
    printf(",\"target\":\"");
    put_hex(data, (size_t)k);
    putchar('"');
  }
  put_xattrs(dir, name);
  puts("}");
  entries++;
  if (!S_ISDIR(st.st_mode)) return;
  int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  DIR *d = fd < 0 ? NULL : fdopendir(fd);
  if (!d) fail(path);
  for (;;) {
    errno = 0;
    struct dirent *e = readdir(d);
    if (!e && errno) fail(path);
    if (!e) break;
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
    size_t k = strlen(e->d_name);
    if (n + 1 + k >= PATH_MAX) {
      errno = ENAMETOOLONG;
      fail(path);
    }
    size_t at = n;
    if (n) path[at++] = '/';
    memcpy(path + at, e->d_name, k + 1);
    list(fd, e->d_name, path, at + k);
    path[n] = 0;
  }
  closedir(d);
}

// Path of the disk with that serial number.
static void find_disk(const char *serial, char *path, size_t cap) {
  DIR *d = opendir("/sys/block");
  if (!d) fail("/sys/block");
  for (struct dirent *e; (e = readdir(d));) {
    char file[64 + NAME_MAX], have[64] = "";
    snprintf(file, sizeof file, "/sys/block/%s/serial", e->d_name);
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue; // `.`, a disk without one
    ssize_t n = read(fd, have, sizeof have - 1);
    close(fd);
    if (n > 0 && have[n - 1] == '\n') have[n - 1] = 0;
    if (strcmp(have, serial)) continue;
    snprintf(path, cap, "/dev/%s", e->d_name);
    closedir(d);
    return;
  }
  errno = ENODEV;
  fail(serial);
}

int main(int argc, char **argv) {
  static char path[PATH_MAX];
  if (argc < 3) {
    fputs("usage: treelist WORKDIR TREE…\n", stderr);
    return 2;
  }
  if (mkdir(argv[1], 0700) && errno != EEXIST) fail(argv[1]);
  for (int i = 2; i < argc; i++) {
    if (!strcmp(argv[i], "/")) {
      if (mount("/", argv[1], NULL, MS_BIND, NULL)) fail("mounting the root once more");
    } else {
      char disk[NAME_MAX + 8];
      find_disk(argv[i], disk, sizeof disk);
      if (mount(disk, argv[1], "ext4", MS_RDONLY | MS_NOATIME, NULL)) fail(disk);
    }
    int root = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) fail(argv[1]);
    printf("{\"tree\":\"%s\"}\n", argv[i]);
    entries = 0;
    path[0] = 0;
    list(root, ".", path, 0);
    printf("{\"end\":\"%s\",\"entries\":%llu}\n", argv[i], (unsigned long long)entries);
    close(root);
    if (umount(argv[1])) fail(argv[1]);
  }
  if (fflush(stdout) || ferror(stdout)) fail("standard output");
  return 0;
}
