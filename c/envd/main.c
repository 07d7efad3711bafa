// Entry: guest init when we are PID 1 of our initramfs, else the agent.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"
#include "copy.h"
#include "pack.h"

static const char usage[] =
    "usage: envd [--addr IPV4] [--port N] [--root DIR] [--cgroup DIR | --no-cgroup] [--trust-if NAME]\n"
    "            [--expose IPV4] [--stall SECONDS] [--state-fd N] [--keep-fd N] [--guest] [--version]\n"
    "  --addr      listen address (default 0.0.0.0)\n"
    "  --port      listen port (default 49983, 0 = any free one; printed when ready)\n"
    "  --root      prefix of /etc/passwd, /etc/group and /run/e2b (default none)\n"
    "  --cgroup    cgroup v2 directory that commands are put into\n"
    "  --trust-if  interface whose peers may call /init without the token (default: any but own addresses)\n"
    "  --expose    address under which services that listen on loopback only become reachable (default none)\n"
    "  --stall     seconds after which a client that takes no output is cut off (default 300)\n"
    "  --state-fd  inherited descriptor that keeps the settings when the agent restarts\n"
    "  --keep-fd   inherited socket to the one who keeps running processes for an agent that restarts\n"
    "  --guest     may set clock, hostname and entropy of this machine\n";

static void on_signal(ev *e, uint32_t events) {
  (void)events;
  agent *ag = e->owner;
  struct signalfd_siginfo si;
  while (read(e->fd, &si, sizeof si) == (ssize_t)sizeof si)
    if (si.ssi_signo == SIGTERM || si.ssi_signo == SIGINT) ag->loop.stop = true;
  int status;
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
    if (!proc_reaped(ag, pid, status)) job_reaped(ag, pid, status);
}

static int bad_usage(const char *what) {
  fprintf(stderr, "envd: %s\n%s", what, usage);
  return 2;
}

static int parse_args(agent *ag, int argc, char **argv, int *port, const char **addr, const char **expose, bool *cgroup) {
  for (int i = 1; i < argc; i++) {
    const char *o = argv[i];
    uint64_t v;
    if (!strcmp(o, "--guest")) {
      ag->guest = true;
    } else if (!strcmp(o, "--no-cgroup")) {
      *cgroup = false;
    } else if (!strcmp(o, "--version")) {
      printf("%s\n", ENVD_VERSION);
      exit(0);
    } else if (!strcmp(o, "--help")) {
      printf("%s", usage);
      exit(0);
    } else if (i + 1 == argc) {
      return bad_usage("unknown option, or its value is missing");
    } else if (!strcmp(o, "--port")) {
      if (parse_u64(argv[i + 1], strlen(argv[i + 1]), 65535, &v)) return bad_usage("--port must be 0…65535");
      *port = (int)v;
      i++;
    } else if (!strcmp(o, "--state-fd")) {
      if (parse_u64(argv[i + 1], strlen(argv[i + 1]), 65535, &v)) return bad_usage("--state-fd must be a number");
      ag->state_fd = (int)v;
      i++;
    } else if (!strcmp(o, "--keep-fd")) {
      if (parse_u64(argv[i + 1], strlen(argv[i + 1]), 65535, &v)) return bad_usage("--keep-fd must be a number");
      ag->keep_fd = (int)v;
      i++;
    } else if (!strcmp(o, "--stall")) {
      if (parse_u64(argv[i + 1], strlen(argv[i + 1]), 86400, &v) || !v) return bad_usage("--stall must be 1…86400");
      ag->stall_ms = (int64_t)v * 1000;
      i++;
    } else if (!strcmp(o, "--addr")) {
      *addr = argv[++i];
    } else if (!strcmp(o, "--expose")) {
      *expose = argv[++i];
    } else if (!strcmp(o, "--root")) {
      ag->root = argv[++i];
    } else if (!strcmp(o, "--cgroup")) {
      ag->cgroup = argv[++i];
    } else if (!strcmp(o, "--trust-if")) {
      ag->trust_if = argv[++i];
    } else {
      return bad_usage("unknown option");
    }
  }
  return 0;
}

// Commands get a cgroup of their own, so that they as a whole have the weight of one competitor of the agent.
static void open_cgroup(agent *ag) {
  if (!ag->cgroup) return;
  char path[4200];
  snprintf(path, sizeof path, "%s/cgroup.procs", ag->cgroup);
  if (mkdir(ag->cgroup, 0755) && errno != EEXIST)
    fprintf(stderr, "aenv: agent: cgroup %s: %s\n", ag->cgroup, strerror(errno));
  else if ((ag->cgroup_fd = open(path, O_WRONLY | O_CLOEXEC)) < 0)
    fprintf(stderr, "aenv: agent: %s: %s\n", path, strerror(errno));
  snprintf(path, sizeof path, "%s/memory.events", ag->cgroup);
  ag->oom_fd = open(path, O_RDONLY | O_CLOEXEC); // without the controller deaths by memory are not told apart
}

// 0, 1 and 2 must be open: children get pipes at those numbers, and ours must not be mistaken for them.
static int keep_stdio(void) {
  for (int fd; (fd = open("/dev/null", O_RDWR)) >= 0;)
    if (fd > 2) return close(fd), 0;
  return -errno;
}

static int run_agent(int argc, char **argv) {
  agent *ag = calloc(1, sizeof *ag);
  if (!ag) return 1;
  ag->root = "";
  ag->state_fd = ag->keep_fd = ag->cgroup_fd = ag->oom_fd = ag->signals.fd = -1;
  ag->stall_ms = 300 * 1000;
  int port = AGENT_PORT;
  const char *addr = "0.0.0.0", *expose = NULL;
  bool cgroup = true;
  int rc = parse_args(ag, argc, argv, &port, &addr, &expose, &cgroup);
  if (rc) {
    free(ag);
    return rc;
  }
  if (!cgroup) ag->cgroup = NULL;
  prctl(PR_SET_NAME, "envd"); // started through a descriptor, the kernel would call it "init"
  umask(022);
  getrlimit(RLIMIT_NOFILE, &ag->nofile);
  struct rlimit most = {ag->nofile.rlim_max, ag->nofile.rlim_max};
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  signal(SIGPIPE, SIG_IGN);
  rc = keep_stdio();
  if (!rc && (setrlimit(RLIMIT_NOFILE, &most) || sigprocmask(SIG_BLOCK, &set, NULL))) rc = -errno;
  if (ag->state_fd >= 0) fcntl(ag->state_fd, F_SETFD, FD_CLOEXEC);
  if (ag->keep_fd >= 0) fcntl(ag->keep_fd, F_SETFD, FD_CLOEXEC);
  ag->default_user = strdup("root");
  if (!rc) rc = loop_init(&ag->loop);
  if (!rc && (ag->signals.fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC)) < 0) rc = -errno;
  ag->signals.cb = on_signal;
  ag->signals.owner = ag;
  if (!rc) rc = ev_set(&ag->loop, &ag->signals, EPOLLIN);
  if (!rc && ag->guest) hold_thaw_left(); // before anything is written
  open_cgroup(ag);
  api_restore(ag);
  if (!rc && ag->keep_fd >= 0) rc = procs_recover(ag);
  ag->http.app = ag;
  ag->http.handle = api_handle;
  ag->http.exempt = api_exempt;
  if (!rc) {
    rc = http_listen(&ag->http, &ag->loop, addr, port);
    if (rc) fprintf(stderr, "aenv: agent: cannot listen on %s:%d: %s\n", addr, port, strerror(-rc));
  }
  if (!rc && expose) rc = ports_start(ag, expose);
  if (!rc) {
    struct timespec up;
    clock_gettime(CLOCK_BOOTTIME, &up);
    printf("aenv: agent listening on port %d, uptime %lld.%03ld s\n", ag->http.port, (long long)up.tv_sec,
           up.tv_nsec / 1000000);
    fflush(stdout);
    rc = loop_run(&ag->loop);
    procs_close(ag);
    watchers_close(ag);
    ports_close(ag);
    hold_close(ag);
    http_close(&ag->http);
  }
  if (rc) fprintf(stderr, "aenv: agent: %s\n", strerror(-rc));
  while (ag->jobs) { // cancelled above with their calls
    job *j = ag->jobs;
    if (j->pid > 0 && !kill(j->pid, SIGKILL)) waitpid(j->pid, NULL, 0);
    ev_del(&ag->loop, &j->e);
    if (j->e.fd >= 0) close(j->e.fd);
    ag->jobs = j->next;
    buf_free(&j->out);
    free(j);
  }
  if (ag->signals.fd >= 0) close(ag->signals.fd);
  if (ag->cgroup_fd >= 0) close(ag->cgroup_fd);
  if (ag->oom_fd >= 0) close(ag->oom_fd);
  if (ag->keep_fd >= 0) close(ag->keep_fd);
  loop_close(&ag->loop);
  env_free(&ag->user_env);
  env_free(&ag->platform_env);
  free(ag->token);
  free(ag->default_user);
  free(ag->default_workdir);
  free(ag->lifecycle);
  buf_free(&ag->frame);
  free(ag);
  return rc ? 1 : 0;
}

int main(int argc, char **argv) {
  if (argc > 0 && is_guest_init(argv[0])) return guest_init();
  if (argc > 1 && !strcmp(argv[1], "copy")) return copy_main(argc - 1, argv + 1);
  if (argc > 1 && !strcmp(argv[1], "pack")) return pack_main(argc - 1, argv + 1);
  return run_agent(argc, argv);
}
