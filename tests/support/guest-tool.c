// A program for guests without any other: says what it was started as, takes memory, asks the kernel for randomness,
// waits, stops the agent.
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

// Every start leaves its mark, whoever asked for it.
static void leave_mark(char **argv) {
  int fd = open("/started", O_WRONLY | O_CREAT | O_APPEND, 0666);
  if (fd < 0) return;
  dprintf(fd, "%s %s\n", argv[0], argv[1] ? argv[1] : "");
  close(fd);
}

// Stops the agent where it stands, as a file system that does not answer would.
static int freeze_agent(void) {
  DIR *d = opendir("/proc");
  if (!d) return 1;
  for (struct dirent *e; (e = readdir(d));) {
    char path[300], name[32] = "";
    snprintf(path, sizeof path, "/proc/%s/comm", e->d_name);
    FILE *f = fopen(path, "r");
    if (!f) continue;
    if (fgets(name, sizeof name, f) && !strcmp(name, "envd\n") && atoi(e->d_name) > 1) kill(atoi(e->d_name), SIGSTOP);
    fclose(f);
  }
  closedir(d);
  return 0;
}

int main(int argc, char **argv) {
  leave_mark(argv);
  const char *what = argc > 1 ? argv[1] : "";
  if (!strcmp(what, "hog")) {
    for (;;) {
      char *p = malloc(1 << 20);
      if (p) memset(p, 1, 1 << 20);
    }
  }
  if (!strcmp(what, "wait")) pause();
  if (!strcmp(what, "freeze-agent")) return freeze_agent();
  if (!strcmp(what, "random")) {
    unsigned char b[16];
    if (getrandom(b, sizeof b, 0) != (ssize_t)sizeof b) return 1;
    for (unsigned i = 0; i < sizeof b; i++) printf("%02x", b[i]);
    putchar('\n');
    return 0;
  }
  printf("%d:%d", (int)getuid(), (int)getgid());
  for (int i = 1; i < argc; i++) printf(" %s", argv[i]);
  putchar('\n');
  return 0;
}
