/*
 * Does with its memory what a VMM does whose guest gives some back: maps FILE privately (16 MiB), writes every eighth
 * page, maps anonymous memory over 4 MiB from 2 MiB on and over the last MiB, writes one page in each (and zeros into
 * one more), drops 1 MiB of the rest from 8 MiB on. Prints a line, then waits to be killed.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB (1u << 20)
#define PAGE 4096u
#define SIZE (16 * MIB)

static int replace(unsigned char *at, size_t length) {
  return mmap(at, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == at;
}

int main(int argc, char **argv) {
  int fd = argc < 2 ? -1 : open(argv[1], O_RDONLY);
  unsigned char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
  if (fd < 0 || memory == MAP_FAILED) return perror("memory"), 1;
  for (size_t at = 0; at < SIZE; at += 8 * PAGE) memset(memory + at, 0xa0, PAGE);
  if (!replace(memory + 2 * MIB, 4 * MIB) || !replace(memory + 15 * MIB, MIB)) return perror("replace"), 1;
  memset(memory + 3 * MIB, 0xb0, PAGE);
  memset(memory + 4 * MIB, 0, PAGE);
  memset(memory + SIZE - PAGE, 0xb1, PAGE);
  if (madvise(memory + 8 * MIB, MIB, MADV_DONTNEED) != 0) return perror("drop"), 1;
  puts("ready");
  fflush(stdout);
  for (;;) pause();
}
