// pageout PID PATH: has the kernel write out what process PID holds of mappings of files whose path contains PATH.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif

int main(int argc, char **argv) {
  if (argc != 3) return fprintf(stderr, "usage: pageout PID PATH\n"), 2;
  char path[64], line[4096];
  snprintf(path, sizeof path, "/proc/%s/maps", argv[1]);
  FILE *maps = fopen(path, "re");
  int process = (int)syscall(SYS_pidfd_open, atoi(argv[1]), 0);
  if (!maps || process < 0) return perror(path), 1;
  long long done = 0;
  while (fgets(line, sizeof line, maps)) {
    unsigned long long from, to;
    if (sscanf(line, "%llx-%llx", &from, &to) != 2 || !strstr(line, argv[2])) continue;
    while (from < to) {
      struct iovec range = {(void *)(uintptr_t)from, to - from};
      ssize_t n = syscall(SYS_process_madvise, process, &range, 1, MADV_PAGEOUT, 0);
      if (n <= 0) return perror("process_madvise"), 1;
      from += (unsigned long long)n;
      done += n;
    }
  }
  fclose(maps);
  printf("%lld\n", done);
  return done ? 0 : 1;
}
