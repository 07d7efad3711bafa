// Runs the fuzz targets without libFuzzer: mutates what it has, keeps what reaches new code (edges as told by
// -fsanitize-coverage=trace-pc). With libFuzzer at hand, libfuzzer.c takes the place of this file.
//   driver CORPUS TARGET EXECUTIONS [SEED]          fuzz, print "TARGET: N executions …"
//   driver CORPUS TARGET SECONDSs [SEED]            the same for a time, e.g. 60s
//   driver CORPUS all EXECUTIONS [SEED]             the same for every target, each with its share of them
//   driver --run TARGET FILE                        one input, to look at a failure
// An input on which a target aborts is left as CRASH_DIR/crash-TARGET (environment, default ".").
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "targets.h"

#define NO_COVERAGE __attribute__((no_sanitize_coverage))
enum { MAP = 1 << 14, INPUT_MAX = 1024, KEPT_MAX = 4096 };

typedef struct {
  uint8_t *p;
  size_t n;
} input;

static uint8_t edges[MAP], known[MAP];
static uintptr_t before;
static input kept[KEPT_MAX];
static size_t nkept;
static uint8_t current[INPUT_MAX];
static size_t current_len;
static const char *current_target = "";
static uint64_t state;

void __sanitizer_cov_trace_pc(void);
NO_COVERAGE void __sanitizer_cov_trace_pc(void) {
  uintptr_t pc = (uintptr_t)__builtin_return_address(0);
  uintptr_t h = (pc ^ pc >> 13) * 0x9e3779b97f4a7c15u;
  uint8_t *e = &edges[(h >> 40 ^ before) & (MAP - 1)];
  if (*e < 255) ++*e;
  before = h >> 41;
}

static NO_COVERAGE uint32_t below(uint32_t n) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return n ? (uint32_t)((state >> 11) % n) : 0;
}

static NO_COVERAGE void save_crash(int sig) {
  char path[512];
  const char *dir = getenv("CRASH_DIR");
  snprintf(path, sizeof path, "%s/crash-%s", dir ? dir : ".", current_target);
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd >= 0 && write(fd, current, current_len) == (ssize_t)current_len) dprintf(2, "input left in %s\n", path);
  signal(sig, SIG_DFL);
  raise(sig);
}

// ASan ends a process by exit or abort; both come by here.
void __asan_on_error(void);
NO_COVERAGE void __asan_on_error(void) {
  save_crash(SIGABRT);
}

// How often an edge was passed counts only roughly.
static NO_COVERAGE uint8_t bucket(uint8_t n) {
  return n < 4 ? (uint8_t)(n ? 1 << (n - 1) : 0) : n < 8 ? 8 : n < 16 ? 16 : n < 32 ? 32 : n < 128 ? 64 : 128;
}

static NO_COVERAGE int anything_new(void) {
  int found = 0;
  uint64_t *words = (uint64_t *)(void *)edges;
  for (size_t w = 0; w < MAP / 8; w++) {
    if (!words[w]) continue;
    for (size_t i = w * 8; i < w * 8 + 8; i++) {
      uint8_t b = edges[i] ? bucket(edges[i]) : 0;
      if (b & (uint8_t)~known[i]) {
        known[i] |= b;
        found = 1;
      }
    }
    words[w] = 0;
  }
  before = 0;
  return found;
}

static NO_COVERAGE void keep(const uint8_t *p, size_t n) {
  size_t slot = nkept < KEPT_MAX ? nkept++ : below(KEPT_MAX);
  free(kept[slot].p);
  kept[slot].p = malloc(n + 1);
  if (!kept[slot].p) exit(1);
  if (n) memcpy(kept[slot].p, p, n);
  kept[slot].n = n;
}

// Words of the formats, so that their structure need not be guessed byte by byte.
static const char *const words[] = {
    "\r\n", "\r\n\r\n", "--b", "--b--", "HTTP/1.1", "Host: x\r\n", "Content-Length: ", "Transfer-Encoding: chunked\r\n",
    "Connection: close\r\n", "Expect: 100-continue\r\n", "Content-Disposition: form-data; name=\"file\"", "; filename=\"a\"",
    "; filename*=utf-8''%41", "{", "}", "[", "]", "null", "true", "\"", "\\u0041", "\\ud83d\\ude00", "\"process\":", "\"pid\":",
    "\"tag\":", "\"cmd\":", "\"args\":", "\"envs\":", "\"pty\":", "\"size\":", "\"cols\":", "\"stdin\":", "\"path\":", "1e9", "-1",
    "\x1f\x8b\x08", "2026-01-02T03:04:05.678Z", "/../", "user:x:1000:1000::/:/bin/sh\n", "%2f", "\xf0\x9f\x98\x80",
    "GET /g HTTP/1.1\r\nHost: x\r\n\r\n", "POST /s HTTP/1.1\r\nHost: x\r\n", "POST /c HTTP/1.1\r\nHost: x\r\n",
    "POST /p HTTP/1.1\r\nHost: x\r\n", "5\r\nabcde\r\n", "0\r\n\r\n",
    "POST /f HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"};

static NO_COVERAGE void mutate(void) {
  const input *from = &kept[below((uint32_t)nkept)];
  current_len = from->n;
  memcpy(current, from->p, from->n);
  for (uint32_t times = 1 + below(4); times; times--) {
    uint32_t at = below((uint32_t)current_len + 1);
    const uint8_t *add = NULL;
    size_t n = 0;
    uint8_t one = (uint8_t)below(256);
    switch (below(8)) {
    case 0:
      if (current_len) current[at % current_len] ^= (uint8_t)(1u << below(8));
      break;
    case 1:
      if (current_len) current[at % current_len] = one;
      break;
    case 2: // take some out
      n = 1 + below(8);
      if (at + n <= current_len) {
        memmove(current + at, current + at + n, current_len - at - n);
        current_len -= n;
      }
      n = 0;
      break;
    case 3: add = &one, n = 1; break;
    case 4: {
      const char *w = words[below(sizeof words / sizeof words[0])];
      add = (const uint8_t *)w, n = strlen(w);
      break;
    }
    case 5: // part of another one
    case 6: {
      const input *other = &kept[below((uint32_t)nkept)];
      uint32_t start = below((uint32_t)other->n + 1);
      add = other->p + start;
      n = below((uint32_t)(other->n - start) + 1);
      break;
    }
    default: current_len = at; // cut off
    }
    if (!n || current_len + n > INPUT_MAX) continue;
    memmove(current + at + n, current + at, current_len - at);
    memcpy(current + at, add, n);
    current_len += n;
  }
}

static NO_COVERAGE void read_corpus(const char *dir, const char *target) {
  char path[1024];
  snprintf(path, sizeof path, "%s/%s", dir, target);
  DIR *d = opendir(path);
  if (!d) {
    fprintf(stderr, "no corpus at %s\n", path);
    exit(2);
  }
  for (struct dirent *e; (e = readdir(d));) {
    if (e->d_name[0] == '.') continue;
    snprintf(path, sizeof path, "%s/%s/%s", dir, target, e->d_name);
    FILE *f = fopen(path, "rb");
    if (!f) continue;
    uint8_t b[INPUT_MAX];
    keep(b, fread(b, 1, sizeof b, f));
    fclose(f);
  }
  closedir(d);
}

static NO_COVERAGE double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

// Until `executions` are done, or, with 0, for `seconds`.
static NO_COVERAGE void fuzz(const fuzz_target *t, const char *corpus, uint64_t executions, double seconds, uint64_t seed) {
  double from = now();
  current_target = t->name;
  state = seed * 0x9e3779b97f4a7c15u + 1;
  memset(known, 0, sizeof known);
  for (size_t i = 0; i < nkept; i++) free(kept[i].p), kept[i].p = NULL;
  nkept = 0;
  read_corpus(corpus, t->name);
  size_t seeds = nkept;
  uint64_t i = 0;
  for (; executions ? i < executions : i % 256 || now() - from < seconds; i++) {
    if (i < seeds) {
      current_len = kept[i].n;
      memcpy(current, kept[i].p, current_len);
    } else {
      mutate();
    }
    t->run(current, current_len);
    if (anything_new() && i >= seeds) keep(current, current_len);
  }
  size_t covered = 0;
  for (size_t e = 0; e < MAP; e++) covered += known[e] != 0;
  printf("%s: %llu executions, %zu inputs kept, %zu edges, %.1f s\n", t->name, (unsigned long long)i, nkept, covered,
         now() - from);
  fflush(stdout);
}

NO_COVERAGE int main(int argc, char **argv) {
  if (argc == 4 && !strcmp(argv[1], "--run")) {
    for (const fuzz_target *t = fuzz_targets; t->name; t++) {
      if (strcmp(t->name, argv[2])) continue;
      FILE *f = fopen(argv[3], "rb");
      if (!f) return perror(argv[3]), 2;
      current_len = fread(current, 1, sizeof current, f);
      fclose(f);
      t->run(current, current_len);
      return 0;
    }
  }
  if (argc < 4) {
    fprintf(stderr, "usage: %s CORPUS TARGET|all EXECUTIONS|SECONDSs [SEED] | --run TARGET FILE\n", argv[0]);
    return 2;
  }
  signal(SIGABRT, save_crash);
  char *unit;
  uint64_t limit = strtoull(argv[3], &unit, 10), seed = argc > 4 ? strtoull(argv[4], NULL, 10) : 1;
  if (!limit || (*unit && strcmp(unit, "s"))) return fprintf(stderr, "not a number of executions or seconds: %s\n", argv[3]), 2;
  uint64_t executions = *unit ? 0 : limit;
  int found = 0;
  for (const fuzz_target *t = fuzz_targets; t->name; t++)
    if (!strcmp(argv[2], "all"))
      fuzz(t, argv[1], executions * t->share / 100, (double)limit, seed), found = 1;
    else if (!strcmp(argv[2], t->name))
      fuzz(t, argv[1], executions, (double)limit, seed), found = 1;
  if (!found) fprintf(stderr, "no target %s\n", argv[2]);
  return found ? 0 : 2;
}
