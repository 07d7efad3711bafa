// process.Process: starting, watching, feeding and signalling processes.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"
#include "keep.h"

enum {
  PIPE_CHUNK = 32 * 1024,
  PTY_CHUNK = 16 * 1024,
  EXIT_KEPT_MS = 30 * 1000,
  PROCS_MAX = 4096,
  INPUT_MAX = 64 << 20,    // waiting for a process that does not read
  LAUNCH_MS = 5000,        // from fork to exec
  DRAIN_MAX = 1 << 20, // what may lie in a pipe when its process is cut off
  STALL_LOOK_MS = 5000,
};

// ---- messages (protocol page §4) ---------------------------------------------------------------

#define MSG(ident, name, ...)                                   \
  static const fdesc ident##_fields[] = {__VA_ARGS__};          \
  static const mdesc ident = {name, ident##_fields, sizeof ident##_fields / sizeof(fdesc)}

static const mdesc empty_desc = {"Empty", NULL, 0};
MSG(pty_size, "Size", {1, "cols", K_U32, 0, NULL, NULL}, {2, "rows", K_U32, 0, NULL, NULL});
MSG(pty_desc, "PTY", {1, "size", K_MSG, 0, &pty_size, NULL});
MSG(config_desc, "ProcessConfig", {1, "cmd", K_STRING, 0, NULL, NULL}, {2, "args", K_STRING, F_REPEATED, NULL, NULL},
    {3, "envs", K_MAP, 0, NULL, NULL}, {4, "cwd", K_STRING, F_PRESENCE, NULL, NULL});
MSG(info_desc, "ProcessInfo", {1, "config", K_MSG, 0, &config_desc, NULL}, {2, "pid", K_U32, 0, NULL, NULL},
    {3, "tag", K_STRING, F_PRESENCE, NULL, NULL});
MSG(list_resp, "ListResponse", {1, "processes", K_MSG, F_REPEATED, &info_desc, NULL});
MSG(start_req, "StartRequest", {1, "process", K_MSG, 0, &config_desc, NULL}, {2, "pty", K_MSG, F_PRESENCE, &pty_desc, NULL},
    {3, "tag", K_STRING, F_PRESENCE, NULL, NULL}, {4, "stdin", K_BOOL, F_PRESENCE, NULL, NULL});
MSG(ev_start, "StartEvent", {1, "pid", K_U32, 0, NULL, NULL});
MSG(ev_data, "DataEvent", {1, "stdout", K_BYTES, F_ONEOF, NULL, NULL}, {2, "stderr", K_BYTES, F_ONEOF, NULL, NULL},
    {3, "pty", K_BYTES, F_ONEOF, NULL, NULL});
MSG(ev_end, "EndEvent", {1, "exitCode", K_SINT32, 0, NULL, NULL}, {2, "exited", K_BOOL, 0, NULL, NULL},
    {3, "status", K_STRING, 0, NULL, NULL}, {4, "error", K_STRING, F_PRESENCE, NULL, NULL});
MSG(event_desc, "ProcessEvent", {1, "start", K_MSG, F_ONEOF, &ev_start, NULL}, {2, "data", K_MSG, F_ONEOF, &ev_data, NULL},
    {3, "end", K_MSG, F_ONEOF, &ev_end, NULL}, {4, "keepalive", K_MSG, F_ONEOF, &empty_desc, NULL});
MSG(event_resp, "StartResponse", {1, "event", K_MSG, 0, &event_desc, NULL});
MSG(selector_desc, "ProcessSelector", {1, "pid", K_U32, F_ONEOF, NULL, NULL}, {2, "tag", K_STRING, F_ONEOF, NULL, NULL});
MSG(select_req, "ProcessRequest", {1, "process", K_MSG, 0, &selector_desc, NULL});
MSG(update_req, "UpdateRequest", {1, "process", K_MSG, 0, &selector_desc, NULL}, {2, "pty", K_MSG, F_PRESENCE, &pty_desc, NULL});
MSG(input_desc, "ProcessInput", {1, "stdin", K_BYTES, F_ONEOF, NULL, NULL}, {2, "pty", K_BYTES, F_ONEOF, NULL, NULL});
MSG(input_req, "SendInputRequest", {1, "process", K_MSG, 0, &selector_desc, NULL}, {2, "input", K_MSG, 0, &input_desc, NULL});
MSG(stream_data, "DataEvent", {2, "input", K_MSG, 0, &input_desc, NULL});
MSG(stream_req, "StreamInputRequest", {1, "start", K_MSG, F_ONEOF, &select_req, NULL},
    {2, "data", K_MSG, F_ONEOF, &stream_data, NULL}, {3, "keepalive", K_MSG, F_ONEOF, &empty_desc, NULL});
static const enumval signal_names[] = {
    {"SIGNAL_UNSPECIFIED", 0}, {"SIGNAL_SIGTERM", 15}, {"SIGNAL_SIGKILL", 9}, {NULL, 0}};
MSG(signal_req, "SendSignalRequest", {1, "process", K_MSG, 0, &selector_desc, NULL}, {2, "signal", K_ENUM, 0, NULL, signal_names});

// ---- state -------------------------------------------------------------------------------------

enum { OUT, ERR, NSTREAMS };

typedef struct proc proc;

// A piece of input on its way into a process; its call is answered when all of it is written.
typedef struct input {
  struct input *next;
  call *k; // NULL: the caller has gone, its bytes still go in
  buf b;
} input;

typedef struct sub {
  struct sub *next;
  proc *p;
  call *k;
  bool owner; // the Start call: its deadline is the process's
} sub;

struct proc {
  agent *ag;
  proc *next;
  pid_t pid;
  bool pty, reaped, ended, cut, killed, close_stdin, oom;
  int status;
  uint64_t oom_seen; // of the kernel's count when it started
  ev in, out[NSTREAMS]; // fd -1 when closed
  input *inq;
  sub *subs;
  timer kept, deadline, stalled;
  char *tag;
  arena a; // holds config
  msg *config;
};

static void pump(ev *e, uint32_t events);
static void watch_output(proc *p);

static const char *signal_text(int sig) {
  static const char *const t[] = {[SIGHUP] = "hangup",
                                  [SIGINT] = "interrupt",
                                  [SIGQUIT] = "quit",
                                  [SIGILL] = "illegal instruction",
                                  [SIGTRAP] = "trace/breakpoint trap",
                                  [SIGABRT] = "aborted",
                                  [SIGBUS] = "bus error",
                                  [SIGFPE] = "floating point exception",
                                  [SIGKILL] = "killed",
                                  [SIGUSR1] = "user defined signal 1",
                                  [SIGSEGV] = "segmentation fault",
                                  [SIGUSR2] = "user defined signal 2",
                                  [SIGPIPE] = "broken pipe",
                                  [SIGALRM] = "alarm clock",
                                  [SIGTERM] = "terminated",
                                  [16] = "stack fault",
                                  [SIGVTALRM] = "virtual timer expired",
                                  [SIGPROF] = "profiling timer expired",
                                  [SIGXCPU] = "CPU time limit exceeded",
                                  [SIGXFSZ] = "file size limit exceeded",
                                  [SIGIO] = "I/O possible",
                                  [SIGPWR] = "power failure",
                                  [SIGSYS] = "bad system call"};
  return sig > 0 && sig < (int)(sizeof t / sizeof t[0]) ? t[sig] : NULL;
}

// ---- events to subscribers ---------------------------------------------------------------------

// Each event is built in a throw-away arena: a stream's own lives as long as the stream.
static void send_event(call *k, uint32_t field, uint32_t sub_field, const void *p, size_t n, int64_t number) {
  arena tmp = {.limit = 64 * 1024};
  msg *resp = msg_new(&tmp, k->m->out);
  msg *event = msg_add_sub(&tmp, resp, 1);
  msg *inner = msg_add_sub(&tmp, event, field);
  if (field == 1) msg_add_int(&tmp, inner, 1, number);
  if (field == 2) msg_add_bytes(&tmp, inner, sub_field, p, n);
  if (tmp.oom)
    http_abort(k->c);
  else
    rpc_send(k, resp);
  arena_free(&tmp);
}

static void send_keepalive(call *k) {
  send_event(k, 4, 0, NULL, 0, 0);
}

static void send_end(call *k, const proc *p) {
  int status = p->status;
  arena tmp = {.limit = 64 * 1024};
  msg *resp = msg_new(&tmp, k->m->out);
  msg *event = msg_add_sub(&tmp, resp, 1);
  msg *end = msg_add_sub(&tmp, event, 3);
  char text[96], why[160];
  bool exited = WIFEXITED(status);
  int code = exited ? WEXITSTATUS(status) : -1;
  if (exited) {
    snprintf(text, sizeof text, "exit status %d", code);
  } else {
    int sig = WTERMSIG(status);
    const char *name = signal_text(sig);
    char num[24];
    snprintf(num, sizeof num, "signal %d", sig);
    snprintf(text, sizeof text, "signal: %s%s", name ? name : num, WCOREDUMP(status) ? " (core dumped)" : "");
  }
  snprintf(why, sizeof why, "%s%s", text, p->oom ? " (out of memory: the kernel's OOM killer ended it)" : "");
  msg_add_int(&tmp, end, 1, p->oom ? 128 + SIGKILL : code);
  msg_add_int(&tmp, end, 2, exited);
  msg_add_str(&tmp, end, 3, text);
  if (code) msg_add_str(&tmp, end, 4, why);
  rpc_send(k, resp);
  arena_free(&tmp);
}

static void sub_drop(sub *s) {
  proc *p = s->p;
  for (sub **q = &p->subs; *q; q = &(*q)->next)
    if (*q == s) {
      *q = s->next;
      break;
    }
  if (s->k) {
    s->k->on_gone = s->k->on_drained = NULL;
    s->k->user_data = NULL;
  }
  loop_free_later(&p->ag->loop, s);
}

static void on_sub_gone(call *k) {
  sub *s = k->user_data;
  if (!s) return;
  proc *p = s->p;
  s->k = NULL;
  sub_drop(s);
  watch_output(p); // nobody holds it back any more
}

static void on_sub_drained(call *k) {
  sub *s = k->user_data;
  if (s) watch_output(s->p);
}

static bool subscribe(proc *p, call *k, bool owner) {
  sub *s = calloc(1, sizeof *s);
  if (!s) {
    rpc_fail(k, RESOURCE_EXHAUSTED, "out of memory");
    return false;
  }
  s->p = p;
  s->k = k;
  s->owner = owner;
  s->next = p->subs;
  p->subs = s;
  k->user_data = s;
  k->on_gone = on_sub_gone;
  k->on_drained = on_sub_drained;
  k->on_keepalive = send_keepalive;
  return true;
}

// ---- life of a process -------------------------------------------------------------------------

// Without --keep-fd, or when init does not listen, processes are lost with the agent; nothing else depends on it.
static void keep_tell(const proc *p, enum keep_kind kind) {
  if (p->ag->keep_fd < 0) return;
  keep_msg m = {.kind = kind, .pid = p->pid, .status = p->status};
  int rc = keep_send(p->ag->keep_fd, &m, NULL, 0, NULL);
  if (rc) fprintf(stderr, "aenv: agent: process %d cannot be kept: %s\n", p->pid, strerror(-rc));
}

static void keep_put(const proc *p) {
  if (p->ag->keep_fd < 0) return;
  buf b = {0};
  for (int brief = 0; brief < 2; brief++) { // without arguments and variables when those are too large
    arena tmp = {.limit = 64 * 1024};
    msg *info = msg_new(&tmp, &info_desc), *small = msg_new(&tmp, &config_desc);
    msg_add_str(&tmp, small, 1, msg_str(p->config, 1));
    val *c = msg_add(&tmp, info, 1);
    if (c) c->m = brief ? small : p->config;
    msg_add_int(&tmp, info, 2, p->pid);
    if (p->tag) msg_add_str(&tmp, info, 3, p->tag);
    buf_clear(&b);
    if (!tmp.oom) msg_to_pb(&b, info);
    arena_free(&tmp);
    if (buf_len(&b) <= KEEP_META_MAX) break;
  }
  keep_msg m = {.kind = KEEP_PUT, .pid = p->pid, .flags = p->pty ? KEEP_PTY : 0, .deadline = p->deadline.pos ? p->deadline.at : 0};
  int fds[3] = {p->in.fd, p->pty ? -1 : p->out[OUT].fd, p->out[ERR].fd};
  int rc = b.oom || buf_len(&b) > KEEP_META_MAX ? -ENOMEM : keep_send(p->ag->keep_fd, &m, buf_data(&b), buf_len(&b), fds);
  if (rc) fprintf(stderr, "aenv: agent: process %d cannot be kept: %s\n", p->pid, strerror(-rc));
  buf_free(&b);
}

static void close_ev(proc *p, ev *e) {
  if (e->fd < 0) return;
  if (e == &p->in && !p->pty && !p->ended) keep_tell(p, KEEP_CLOSE_IN);
  ev_del(&p->ag->loop, e);
  close(e->fd);
  e->fd = -1;
}

static void answer_input(input *i, const char *error) {
  call *k = i->k;
  if (!k) return;
  i->k = NULL;
  k->user_data = NULL;
  k->on_gone = NULL;
  if (k->m->kind == CLIENT_STREAM && !error) {
    rpc_resume(k); // may run on into the next message
    return;
  }
  if (error)
    rpc_fail(k, INTERNAL, "%s", error);
  else
    k->out = msg_new(&k->a, k->m->out);
  rpc_finish(k);
}

static void fail_inputs(proc *p, const char *error) {
  input *i = p->inq, *next;
  p->inq = NULL;
  for (; i; i = next) {
    next = i->next;
    answer_input(i, error);
    buf_free(&i->b);
    loop_free_later(&p->ag->loop, i);
  }
}

static void proc_free(proc *p) {
  agent *ag = p->ag;
  for (proc **q = &ag->procs; *q; q = &(*q)->next)
    if (*q == p) {
      *q = p->next;
      ag->nprocs--;
      break;
    }
  timer_clear(&ag->loop, &p->kept);
  timer_clear(&ag->loop, &p->deadline);
  timer_clear(&ag->loop, &p->stalled);
  close_ev(p, &p->in);
  for (int i = 0; i < NSTREAMS; i++) close_ev(p, &p->out[i]);
  fail_inputs(p, "the process has ended");
  while (p->subs) {
    sub *s = p->subs;
    if (s->k) {
      call *k = s->k;
      sub_drop(s);
      rpc_fail(k, INTERNAL, "the process record was dropped");
      rpc_finish(k);
    } else {
      sub_drop(s);
    }
  }
  free(p->tag);
  arena_free(&p->a);
  loop_free_later(&ag->loop, p);
}

static void on_kept_over(timer *t) {
  proc_free(t->owner);
}

static void end_if_over(proc *p) {
  if (p->ended || !p->reaped) return;
  if (!p->cut && (p->out[OUT].fd >= 0 || p->out[ERR].fd >= 0)) return;
  p->ended = true;
  keep_tell(p, KEEP_DROP);
  close_ev(p, &p->in);
  for (int i = 0; i < NSTREAMS; i++) close_ev(p, &p->out[i]);
  fail_inputs(p, "the process has ended");
  timer_clear(&p->ag->loop, &p->deadline);
  timer_clear(&p->ag->loop, &p->stalled);
  while (p->subs) {
    call *k = p->subs->k;
    sub_drop(p->subs);
    if (!k) continue;
    send_end(k, p);
    rpc_finish(k);
  }
  p->kept = (timer){.cb = on_kept_over, .owner = p};
  timer_set(&p->ag->loop, &p->kept, EXIT_KEPT_MS);
}

static bool held_back(proc *p) {
  bool held = false;
  for (sub *s = p->subs; s; s = s->next)
    if (s->k && !rpc_may_send(s->k)) held = true; // asks each: the slow ones will call back
  return held;
}

// A subscriber that takes nothing for very long is cut off (it can connect again), so that a dead one does not
// hold the process, and with it every other subscriber, for ever.
static void on_stalled(timer *t) {
  proc *p = t->owner;
  int64_t now = mono_ms();
  for (sub *s = p->subs, *next; s; s = next) {
    next = s->next;
    if (s->k && !rpc_may_send(s->k) && now - s->k->c->sent_at >= p->ag->stall_ms) http_abort(s->k->c);
  }
  watch_output(p);
}

static void watch_output(proc *p) {
  if (p->ended) return;
  bool held = held_back(p);
  if (held && !p->stalled.pos) {
    p->stalled = (timer){.cb = on_stalled, .owner = p};
    timer_set(&p->ag->loop, &p->stalled, p->ag->stall_ms < STALL_LOOK_MS ? p->ag->stall_ms : STALL_LOOK_MS);
  }
  for (int i = 0; i < NSTREAMS; i++)
    if (p->out[i].fd >= 0) ev_set(&p->ag->loop, &p->out[i], held ? 0 : EPOLLIN);
}

// Reads one chunk and hands it on. False when there is nothing (more) to read now.
static bool pump_once(proc *p, int i) {
  uint8_t chunk[PIPE_CHUNK];
  ssize_t n = read(p->out[i].fd, chunk, p->pty ? PTY_CHUNK : PIPE_CHUNK);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (n <= 0) { // a terminal without open slave reads as EIO
    close_ev(p, &p->out[i]);
    return false;
  }
  for (sub *s = p->subs, *next; s; s = next) {
    next = s->next;
    if (s->k) send_event(s->k, 2, p->pty ? 3 : i == OUT ? 1 : 2, chunk, (size_t)n, 0);
  }
  return true;
}

static void pump(ev *e, uint32_t events) {
  proc *p = e->owner;
  int i = e == &p->out[OUT] ? OUT : ERR;
  if (!(events & EPOLLIN) && !(events & (EPOLLHUP | EPOLLERR))) return;
  if (held_back(p)) { // a hang-up is reported even when we asked for nothing: stop hearing it
    ev_del(&p->ag->loop, e);
    return;
  }
  pump_once(p, i);
  if (p->out[i].fd < 0) {
    end_if_over(p);
    return;
  }
  watch_output(p);
}

// What it wrote before it was cut off is still worth having, if someone can take it.
static void drain(proc *p) {
  for (int i = 0; i < NSTREAMS; i++)
    for (size_t n = 0; p->out[i].fd >= 0 && n < DRAIN_MAX && !held_back(p) && pump_once(p, i); n += PTY_CHUNK) {
    }
}

// How many processes of the commands' cgroup the kernel has killed for memory. 0 when it does not tell.
static uint64_t oom_count(const agent *ag) {
  char text[512];
  ssize_t n = ag->oom_fd < 0 ? -1 : pread(ag->oom_fd, text, sizeof text - 1, 0);
  if (n <= 0) return 0;
  text[n] = 0;
  const char *p = strstr(text, "oom_kill ");
  return p ? strtoull(p + 9, NULL, 10) : 0;
}

// A death by SIGKILL that nobody asked for here, or a shell's report of one, while the kernel has killed for
// memory. One kill explains one end.
static void blame_oom(proc *p) {
  bool killed = WIFSIGNALED(p->status) ? WTERMSIG(p->status) == SIGKILL
                                       : WIFEXITED(p->status) && WEXITSTATUS(p->status) == 128 + SIGKILL;
  uint64_t now = killed && !p->killed ? oom_count(p->ag) : 0;
  if (now <= p->oom_seen) return;
  p->oom = true;
  for (proc *o = p->ag->procs; o; o = o->next)
    if (o->oom_seen < now) o->oom_seen++;
}

// Sends SIGKILL to everything of p's session, as /proc shows it. How many it were.
static int kill_members(pid_t sid) {
  DIR *d = opendir("/proc");
  int n = 0;
  if (!d) return 0;
  for (struct dirent *e; (e = readdir(d));) {
    uint64_t pid;
    char path[64], text[512];
    if (parse_u64(e->d_name, strlen(e->d_name), INT32_MAX, &pid)) continue;
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t len = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (len <= 0) continue;
    text[len] = 0;
    const char *after = strrchr(text, ')'); // the name in front may hold anything
    char state;
    int ppid, pgrp, session;
    if (!after || sscanf(after + 1, " %c %d %d %d", &state, &ppid, &pgrp, &session) != 4) continue;
    if (session == sid && state != 'Z' && !kill((pid_t)pid, SIGKILL)) n++;
  }
  closedir(d);
  return n;
}

// Ends the process with all that belongs to it: its group, and its session, which holds the job groups of an
// interactive shell. What made a session of its own (setsid, daemons) has said that it wants to stay.
static void kill_all(proc *p) {
  p->killed = true;
  if (!p->reaped) {
    kill(-p->pid, SIGKILL);
  } else {
    char path[32]; // its number may be another's by now
    snprintf(path, sizeof path, "/proc/%d", p->pid);
    if (!access(path, F_OK)) return;
  }
  for (int pass = 0; pass < 3 && kill_members(p->pid); pass++) { // again for those born meanwhile
  }
}

bool proc_reaped(agent *ag, pid_t pid, int status) {
  for (proc *p = ag->procs; p; p = p->next) {
    if (p->pid != pid || p->reaped) continue;
    p->reaped = true;
    p->status = status;
    blame_oom(p);
    if (p->cut) drain(p);
    end_if_over(p);
    if (!p->ended) keep_tell(p, KEEP_EXIT);
    return true;
  }
  return false;
}

void procs_close(agent *ag) {
  bool stay = ag->keep_fd >= 0; // our successor takes them over
  if (stay) close(ag->keep_fd);
  ag->keep_fd = -1;
  while (ag->procs) {
    proc *p = ag->procs;
    if (!p->ended && !stay) kill_all(p);
    if (!p->reaped && !stay) waitpid(p->pid, &p->status, 0);
    proc_free(p);
  }
}

// ---- starting ----------------------------------------------------------------------------------

void child_reset(const agent *ag) {
  sigset_t none;
  sigemptyset(&none);
  struct sigaction dfl = {.sa_handler = SIG_DFL};
  for (int s = 1; s < NSIG; s++) sigaction(s, &dfl, NULL); // fails for KILL and STOP, which need none
  sigprocmask(SIG_SETMASK, &none, NULL);
  setrlimit(RLIMIT_NOFILE, &ag->nofile);
  setpriority(PRIO_PROCESS, 0, 0);
}

// Looks cmd up in path as execvp does, but never runs a shell of its own accord except for a file without
// "#!" line, as every shell does. Returns the errno that tells most.
static int exec_command(const char *cmd, char **argv, char **envp, const char *path) {
  int best = ENOENT;
  bool direct = strchr(cmd, '/') != NULL;
  for (const char *p = direct ? "" : path; p;) {
    size_t n = direct ? 0 : strcspn(p, ":");
    char full[4096];
    int len = direct ? snprintf(full, sizeof full, "%s", cmd)
                     : snprintf(full, sizeof full, "%.*s%s%s", (int)n, n ? p : ".", "/", cmd);
    if (!direct && !n) len = snprintf(full, sizeof full, "./%s", cmd);
    if (len < 0 || (size_t)len >= sizeof full)
      best = ENAMETOOLONG;
    else {
      execve(full, argv, envp);
      if (errno == ENOEXEC) {
        size_t argc = 0;
        while (argv[argc]) argc++;
        char **sh = calloc(argc + 2, sizeof *sh);
        if (sh) {
          sh[0] = (char *)"sh";
          sh[1] = full;
          for (size_t i = 1; i <= argc; i++) sh[i + 1] = argv[i];
          execve("/bin/sh", sh, envp);
        }
        return ENOEXEC;
      }
      if (errno != ENOENT && errno != ENOTDIR) best = errno;
    }
    p = direct || !p[n] ? NULL : p + n + 1;
  }
  return best;
}

// What the caller reads of a command that could not be started. It has exit code 127 or 126, as from a shell.
static const char *why_not(const char *cmd, int e) {
  const char *base = strrchr(cmd, '/');
  base = base ? base + 1 : cmd;
  if (e != ENOENT) return strerror(e);
  if ((!strcmp(base, "bash") || !strcmp(base, "sh")) && access("/bin/bash", F_OK) && access("/bin/sh", F_OK))
    return "no shell in image";
  // A file that is there: the kernel misses what it names, e.g. the loader of a program that is not static.
  if (strchr(cmd, '/') && !access(cmd, F_OK)) return "its interpreter or loader is not in the image";
  return "command not found";
}

typedef struct {
  char **argv, **envp;
  const char *cmd, *path, *cwd;
  const account *user;
  gid_t *groups;
  size_t ngroups;
  bool pty, cwd_optional;
  int io[3]; // for a terminal io[0] is the slave
  int report;
} launch;

enum { STAGE_SETUP = 1, STAGE_CWD = 2 };

static void child_main(const agent *ag, const launch *l) {
  int err[2] = {STAGE_SETUP, 0};
  int rc = 0;
  child_reset(ag);
  setsid(); // a group of its own: "kill 0" in there must not reach the agent
  umask(022);
  // Both are best effort: neither file exists everywhere (host runs, kernels without the controller).
  rc = write_control("/proc/self/oom_score_adj", "100");
  if (ag->cgroup_fd >= 0) rc = write_all(ag->cgroup_fd, "0", 1);
  if (l->pty) {
    rc = pty_attach(l->io[0]);
  } else {
    rc = 0;
    for (int i = 0; i < 3 && !rc; i++)
      if (dup2(l->io[i], i) < 0) rc = -errno;
  }
  if (!rc && geteuid() == 0) {
    if (setgroups(l->ngroups, l->groups) || setresgid(l->user->gid, l->user->gid, l->user->gid) ||
        setresuid(l->user->uid, l->user->uid, l->user->uid))
      rc = -errno;
  }
  if (!rc && chdir(l->cwd) && (!l->cwd_optional || chdir("/"))) {
    err[0] = STAGE_CWD;
    rc = -errno;
  }
  err[1] = -rc;
  if (rc) {
    rc = write_all(l->report, err, sizeof err);
    _exit(126);
  }
  // The caller is told "started" here; the command's own failure shows like a shell would show it.
  if (close(l->report)) _exit(126);
  int e = exec_command(l->cmd, l->argv, l->envp, l->path);
  const char *tried = l->cmd;
  // The SDKs start all that they start with bash: where the image has none, its sh has to do.
  if (e == ENOENT && !strcmp(l->cmd, "/bin/bash") && access(l->cmd, F_OK)) {
    tried = l->argv[0] = (char *)"/bin/sh";
    execve(l->argv[0], l->argv, l->envp);
    e = errno;
  }
  const char *why = why_not(tried, e);
  // Without any shell it is told of the one that was asked for.
  dprintf(2, "%s: %s\n", access(tried, F_OK) ? l->cmd : tried, why);
  _exit(e == ENOENT ? 127 : 126);
}

static bool env_add(arena *a, char ***list, size_t *n, size_t *cap, const char *name, const char *value) {
  size_t nl = strlen(name);
  char *kv = arena_printf(a, "%s=%s", name, value);
  if (!kv) return false;
  for (size_t i = 0; i < *n; i++)
    if (!strncmp((*list)[i], name, nl) && (*list)[i][nl] == '=') {
      (*list)[i] = kv;
      return true;
    }
  if (*n + 2 > *cap) {
    size_t c = *cap ? *cap * 2 : 32;
    char **l = arena_alloc(a, c * sizeof *l);
    if (!l) return false;
    if (*n) memcpy(l, *list, *n * sizeof *l);
    *list = l;
    *cap = c;
  }
  (*list)[(*n)++] = kv;
  (*list)[*n] = NULL;
  return true;
}

static char **build_env(agent *ag, arena *a, const account *u, const msg *config, const char **path) {
  char **list = NULL;
  size_t n = 0, cap = 0;
  const char *own = getenv("PATH");
  bool ok = env_add(a, &list, &n, &cap, "PATH", own && *own ? own : DEFAULT_PATH) &&
            env_add(a, &list, &n, &cap, "HOME", u->home) && env_add(a, &list, &n, &cap, "USER", u->name) &&
            env_add(a, &list, &n, &cap, "LOGNAME", u->name);
  for (envvar *e = ag->user_env; ok && e; e = e->next) ok = env_add(a, &list, &n, &cap, e->name, e->value);
  for (envvar *e = ag->platform_env; ok && e; e = e->next) ok = env_add(a, &list, &n, &cap, e->name, e->value);
  for (const val *v = msg_get(config, 3); ok && v; v = v->next) {
    const char *name = arena_strndup(a, v->key, v->keylen);
    ok = name && env_add(a, &list, &n, &cap, name, v->s);
  }
  if (!ok) return NULL;
  *path = DEFAULT_PATH;
  for (size_t i = 0; i < n; i++)
    if (!strncmp(list[i], "PATH=", 5)) *path = list[i] + 5;
  return list;
}

// Deep copy of the request's configuration: List shows it as it was asked for.
static bool keep_config(proc *p, const msg *in) {
  p->a.limit = 32 << 20;
  p->config = msg_new(&p->a, &config_desc);
  const char *cmd = msg_str(in, 1);
  msg_add_str(&p->a, p->config, 1, arena_strndup(&p->a, cmd, strlen(cmd)) ?: "");
  for (const val *v = msg_get(in, 2); v; v = v->next)
    msg_add_bytes(&p->a, p->config, 2, arena_strndup(&p->a, v->s, v->n), v->n);
  for (const val *v = msg_get(in, 3); v; v = v->next) {
    val *c = msg_add(&p->a, p->config, 3);
    if (!c) break;
    c->key = arena_strndup(&p->a, v->key, v->keylen);
    c->keylen = v->keylen;
    c->s = arena_strndup(&p->a, v->s, v->n);
    c->n = v->n;
  }
  const val *cwd = msg_get(in, 4);
  if (cwd) msg_add_bytes(&p->a, p->config, 4, arena_strndup(&p->a, cwd->s, cwd->n), cwd->n);
  return !p->a.oom;
}

static int set_nonblock(int fd) {
  return fcntl(fd, F_SETFL, O_NONBLOCK) ? -errno : 0;
}

static void on_deadline(call *k) {
  sub *s = k->user_data;
  rpc_fail(k, DEADLINE_EXCEEDED, "the process ran into its time limit and was killed");
  if (s) {
    proc *p = s->p;
    p->cut = true;
    kill_all(p);
    drain(p);
    if (!k->user_data) return; // the client left meanwhile
    sub_drop(s);
    watch_output(p);
    if (p->reaped) end_if_over(p);
  }
  rpc_finish(k);
}

// The owner's stream may be gone long before: the process's own timer keeps the limit.
static void on_proc_deadline(timer *t) {
  proc *p = t->owner;
  p->cut = true;
  for (sub *s = p->subs; s; s = s->next)
    if (s->owner && s->k) {
      on_deadline(s->k);
      return;
    }
  kill_all(p);
  if (p->reaped) end_if_over(p);
}

static void on_input_ready(ev *e, uint32_t events);

// A pid or tag that is used again makes the record of the old process worthless.
static void drop_old(agent *ag, pid_t pid, const char *tag) {
  for (proc *p = ag->procs, *next; p; p = next) {
    next = p->next;
    if (p->ended && (p->pid == pid || (tag && p->tag && !strcmp(tag, p->tag)))) proc_free(p);
  }
}

static void close_all(int *fds, int n) {
  for (int i = 0; i < n; i++)
    if (fds[i] >= 0) close(fds[i]);
}

static void rpc_start(call *k) {
  agent *ag = k->ag;
  const msg *config = msg_sub(k->in, 1);
  const msg *pty = msg_sub(k->in, 2);
  if (!config || !*msg_str(config, 1)) {
    rpc_fail(k, INVALID_ARGUMENT, "process.cmd is missing");
    return;
  }
  for (const val *v = msg_get(config, 3); v; v = v->next)
    if (!v->keylen || memchr(v->key, '=', v->keylen)) {
      rpc_fail(k, INVALID_ARGUMENT, "invalid environment variable name '%.*s'", (int)v->keylen, v->key);
      return;
    }
  if (ag->nprocs >= PROCS_MAX) {
    rpc_fail(k, RESOURCE_EXHAUSTED, "too many processes (%d)", PROCS_MAX);
    return;
  }
  launch l = {.user = &k->user, .cmd = msg_str(config, 1), .pty = pty != NULL, .io = {-1, -1, -1}};
  const char *cwd = msg_str(config, 4);
  char *dir;
  if (agent_path(ag, &k->a, &k->user, cwd, &dir)) {
    rpc_fail(k, INVALID_ARGUMENT, "cwd '%s' cannot be resolved: only '~' of the own user is known", cwd);
    return;
  }
  struct stat st;
  // Where nobody asked for a directory the command runs anyway: accounts without a home are common.
  for (int i = 0; !*cwd && i < 2 && (stat(dir, &st) || !S_ISDIR(st.st_mode)); i++) dir = i ? (char *)"/" : k->user.home;
  l.cwd_optional = !*cwd;
  int missing = stat(dir, &st) ? errno : 0;
  if (missing || !S_ISDIR(st.st_mode)) {
    rpc_fail(k, INVALID_ARGUMENT, "cwd '%s' %s", dir, missing ? "does not exist" : "is not a directory");
    return;
  }
  l.cwd = dir;
  ssize_t ng = users_groups(&k->db, &k->a, &k->user, &l.groups);
  size_t argc = 1;
  for (const val *v = msg_get(config, 2); v; v = v->next) argc++;
  l.argv = arena_alloc(&k->a, (argc + 1) * sizeof *l.argv);
  l.envp = build_env(ag, &k->a, &k->user, config, &l.path);
  proc *p = calloc(1, sizeof *p);
  const val *tag = msg_get(k->in, 3);
  if (ng < 0 || !l.argv || !l.envp || !p || !keep_config(p, config) || (tag && !(p->tag = strdup(tag->s)))) {
    rpc_fail(k, RESOURCE_EXHAUSTED, "out of memory");
    if (p) free(p->tag), arena_free(&p->a);
    free(p);
    return;
  }
  l.ngroups = (size_t)ng;
  argc = 0;
  l.argv[argc++] = (char *)l.cmd;
  for (const val *v = msg_get(config, 2); v; v = v->next) l.argv[argc++] = (char *)v->s;

  int mine[3] = {-1, -1, -1}, report[2] = {-1, -1}, rc = 0;
  if (l.pty) {
    const msg *size = msg_sub(pty, 1);
    int64_t cols = msg_int(size, 1), rows = msg_int(size, 2);
    if (cols > 65535 || rows > 65535) {
      rpc_fail(k, INVALID_ARGUMENT, "terminal size %lldx%lld is out of range", (long long)cols, (long long)rows);
      rc = -EINVAL;
    } else {
      rc = pty_open(&mine[0], &l.io[0], cols ? (unsigned)cols : 80, rows ? (unsigned)rows : 24, k->user.uid);
    }
    if (!rc && (mine[1] = fcntl(mine[0], F_DUPFD_CLOEXEC, 3)) < 0) rc = -errno;
  } else {
    const val *sin = msg_get(k->in, 4);
    int fd[2];
    if (sin && !sin->i) {
      if ((l.io[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0) rc = -errno;
    } else if (pipe2(fd, O_CLOEXEC)) {
      rc = -errno;
    } else {
      l.io[0] = fd[0];
      mine[0] = fd[1];
    }
    for (int i = 1; i < 3 && !rc; i++) {
      if (pipe2(fd, O_CLOEXEC)) {
        rc = -errno;
      } else {
        mine[i] = fd[0];
        l.io[i] = fd[1];
      }
    }
  }
  for (int i = 0; i < 3 && !rc; i++)
    if (mine[i] >= 0) rc = set_nonblock(mine[i]);
  if (!rc && pipe2(report, O_CLOEXEC)) rc = -errno;
  l.report = report[1];
  pid_t pid = -1;
  int err[2] = {0, 0};
  uint64_t oom_seen = oom_count(ag);
  if (!rc) {
    // A descriptor that is to become 0, 1 or 2 must not be overwritten on the way: the agent keeps those
    // three open, so pipes never get such low numbers.
    pid = fork();
    if (!pid) child_main(ag, &l);
    if (pid < 0) rc = -errno;
  }
  close_all(l.io, 3);
  if (report[1] >= 0) close(report[1]);
  if (!rc) {
    // A child that is stopped, or waits for a file system that does not answer, must not keep us.
    struct pollfd pf = {.fd = report[0], .events = POLLIN};
    int there;
    while ((there = poll(&pf, 1, LAUNCH_MS)) < 0 && errno == EINTR) {
    }
    ssize_t n;
    if (there < 1) {
      kill(pid, SIGKILL); // reaped when it has ended
      rc = -ETIMEDOUT;
    } else {
      while ((n = read(report[0], err, sizeof err)) < 0 && errno == EINTR) {
      }
      if (n == (ssize_t)sizeof err) {
        rc = -err[1];
        waitpid(pid, NULL, 0);
      }
    }
  }
  if (report[0] >= 0) close(report[0]);
  if (rc) {
    close_all(mine, 3);
    if (err[0] == STAGE_CWD)
      rpc_fail(k, INVALID_ARGUMENT, "cwd '%s': %s", dir, strerror(-rc));
    else
      rpc_fail(k, rc == -EMFILE || rc == -ENFILE || rc == -ENOMEM || rc == -EAGAIN ? RESOURCE_EXHAUSTED : INVALID_ARGUMENT,
               "cannot start the process%s: %s", l.pty ? " on a terminal" : "", strerror(-rc));
    free(p->tag);
    arena_free(&p->a);
    free(p);
    return;
  }

  drop_old(ag, pid, p->tag);
  p->ag = ag;
  p->pid = pid;
  p->pty = l.pty;
  p->oom_seen = oom_seen;
  p->in = (ev){.fd = mine[0], .cb = on_input_ready, .owner = p};
  p->out[OUT] = (ev){.fd = mine[1], .cb = pump, .owner = p};
  p->out[ERR] = (ev){.fd = mine[2], .cb = pump, .owner = p};
  p->next = ag->procs;
  ag->procs = p;
  ag->nprocs++;
  if (k->timeout_ms) {
    timer_clear(&ag->loop, &k->deadline);
    p->deadline = (timer){.cb = on_proc_deadline, .owner = p};
    timer_set(&ag->loop, &p->deadline, k->timeout_ms);
  }
  keep_put(p);
  if (!subscribe(p, k, true)) {
    // The caller was told that nothing runs.
    kill_all(p);
    watch_output(p);
    return;
  }
  send_event(k, 1, 0, NULL, 0, pid);
  watch_output(p);
}

// ---- processes of an earlier agent -------------------------------------------------------------

static void adopt(agent *ag, const keep_msg *m, const uint8_t *meta, size_t n, int fds[3]) {
  proc *p = calloc(1, sizeof *p);
  const char *err;
  if (p) p->a.limit = 32 << 20;
  msg *info = p ? msg_from_pb(&p->a, &info_desc, meta, n, &err) : NULL;
  const msg *config = msg_sub(info, 1);
  const val *tag = msg_get(info, 3);
  if (p && tag) p->tag = strdup(tag->s);
  if (!config || (tag && !p->tag)) {
    close_all(fds, 3);
    if (p) arena_free(&p->a);
    free(p);
    return;
  }
  p->ag = ag;
  p->pid = m->pid;
  p->pty = m->flags & KEEP_PTY;
  p->config = (msg *)config;
  p->oom_seen = oom_count(ag);
  if (p->pty && fds[0] >= 0) fds[1] = fcntl(fds[0], F_DUPFD_CLOEXEC, 3);
  p->in = (ev){.fd = fds[0], .cb = on_input_ready, .owner = p};
  p->out[OUT] = (ev){.fd = fds[1], .cb = pump, .owner = p};
  p->out[ERR] = (ev){.fd = fds[2], .cb = pump, .owner = p};
  p->next = ag->procs;
  ag->procs = p;
  ag->nprocs++;
  if (m->deadline) {
    p->deadline = (timer){.cb = on_proc_deadline, .owner = p};
    timer_set(&ag->loop, &p->deadline, m->deadline - mono_ms());
  }
  watch_output(p);
}

static void on_keep(ev *e, uint32_t events) {
  (void)events;
  agent *ag = e->owner;
  keep_msg m;
  int fds[3];
  ssize_t n;
  while ((n = keep_recv(e->fd, 0, &m, NULL, 0, fds)) >= 0) {
    close_all(fds, 3);
    if (m.kind == KEEP_EXIT) proc_reaped(ag, m.pid, m.status);
  }
  if (n != -EAGAIN) ev_del(&ag->loop, e); // init is gone, and we shall be
}

static void on_alive(timer *t) {
  agent *ag = t->owner;
  keep_msg m = {.kind = KEEP_ALIVE};
  if (ag->keep_fd < 0 || keep_send(ag->keep_fd, &m, NULL, 0, NULL)) return; // init is gone, and we shall be
  timer_set(&ag->loop, t, KEEP_ALIVE_MS);
}

int procs_recover(agent *ag) {
  uint8_t *meta = malloc(KEEP_META_MAX);
  keep_msg m = {0};
  int fds[3];
  ssize_t n = meta ? 0 : -ENOMEM;
  while (n >= 0 && m.kind != KEEP_READY) {
    n = keep_recv(ag->keep_fd, 5000, &m, meta, KEEP_META_MAX, fds);
    if (n >= 0 && m.kind == KEEP_PUT)
      adopt(ag, &m, meta, (size_t)n, fds);
    else
      close_all(fds, 3);
    if (n >= 0 && m.kind == KEEP_EXIT) proc_reaped(ag, m.pid, m.status);
  }
  free(meta);
  if (n < 0) fprintf(stderr, "aenv: agent: processes of an earlier agent are lost: %s\n", strerror((int)-n));
  ag->alive = (timer){.cb = on_alive, .owner = ag};
  on_alive(&ag->alive);
  ag->keep = (ev){.fd = ag->keep_fd, .cb = on_keep, .owner = ag};
  return ev_set(&ag->loop, &ag->keep, EPOLLIN);
}

// ---- finding -----------------------------------------------------------------------------------

// Running ones first: a finished one only answers Connect. Fails the call when there is none.
static proc *find(call *k, const msg *selector, bool ended_too) {
  const val *pid = msg_get(selector, 1), *tag = msg_get(selector, 2);
  if (!pid && !tag) {
    rpc_fail(k, INVALID_ARGUMENT, "process selector is missing: give pid or tag");
    return NULL;
  }
  proc *old = NULL;
  for (proc *p = k->ag->procs; p; p = p->next) {
    if (pid ? p->pid != pid->i : !p->tag || strcmp(p->tag, tag->s)) continue;
    if (!p->ended && !(p->reaped && !ended_too)) return p;
    if (p->ended && !old) old = p;
  }
  if (ended_too && old) return old;
  if (pid)
    rpc_fail(k, NOT_FOUND, "process with pid %lld not found", (long long)pid->i);
  else
    rpc_fail(k, NOT_FOUND, "process with tag '%s' not found", tag->s);
  return NULL;
}

static void rpc_connect(call *k) {
  proc *p = find(k, msg_sub(k->in, 1), true);
  if (!p) return;
  if (p->ended) {
    send_event(k, 1, 0, NULL, 0, p->pid);
    send_end(k, p);
    rpc_finish(k);
    return;
  }
  if (!subscribe(p, k, false)) return;
  send_event(k, 1, 0, NULL, 0, p->pid);
}

static void rpc_list(call *k) {
  k->out = msg_new(&k->a, &list_resp);
  for (proc *p = k->ag->procs; p; p = p->next) {
    if (p->reaped) continue;
    msg *info = msg_add_sub(&k->a, k->out, 1);
    val *c = msg_add(&k->a, info, 1);
    if (c) c->m = p->config;
    msg_add_int(&k->a, info, 2, p->pid);
    if (p->tag) msg_add_str(&k->a, info, 3, p->tag);
  }
}

static void rpc_signal(call *k) {
  proc *p = find(k, msg_sub(k->in, 1), false);
  if (!p) return;
  int64_t sig = msg_int(k->in, 2);
  if (sig != SIGTERM && sig != SIGKILL) {
    rpc_fail(k, UNIMPLEMENTED, "signal %lld is not supported: use SIGNAL_SIGTERM or SIGNAL_SIGKILL", (long long)sig);
    return;
  }
  if (kill(p->pid, (int)sig)) {
    rpc_fail(k, errno == ESRCH ? NOT_FOUND : INTERNAL, "cannot signal process %d: %s", p->pid, strerror(errno));
    return;
  }
  // A terminated process can end its children itself; a killed one cannot.
  if (sig == SIGKILL) kill_all(p);
  p->cut = true; // from here on the end follows the process, not its pipes
  k->out = msg_new(&k->a, &empty_desc);
}

static void rpc_update(call *k) {
  proc *p = find(k, msg_sub(k->in, 1), false);
  if (!p) return;
  const msg *size = msg_sub(msg_sub(k->in, 2), 1);
  k->out = msg_new(&k->a, &empty_desc);
  if (!size) return;
  if (!p->pty) {
    rpc_fail(k, INTERNAL, "process %d has no terminal", p->pid);
    return;
  }
  int64_t cols = msg_int(size, 1), rows = msg_int(size, 2);
  if (cols < 1 || rows < 1 || cols > 65535 || rows > 65535) {
    rpc_fail(k, INVALID_ARGUMENT, "terminal size %lldx%lld is out of range", (long long)cols, (long long)rows);
    return;
  }
  int fd = p->in.fd >= 0 ? p->in.fd : p->out[OUT].fd;
  int rc = fd < 0 ? -EIO : pty_resize(fd, (unsigned)cols, (unsigned)rows);
  if (rc) rpc_fail(k, INTERNAL, "cannot resize the terminal: %s", strerror(-rc));
}

// ---- input -------------------------------------------------------------------------------------

static void write_inputs(proc *p) {
  while (p->inq && p->in.fd >= 0) {
    input *i = p->inq;
    while (buf_len(&i->b)) {
      ssize_t n = write(p->in.fd, buf_data(&i->b), buf_len(&i->b));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) {
        ev_set(&p->ag->loop, &p->in, EPOLLOUT);
        return;
      }
      if (n < 0) {
        close_ev(p, &p->in);
        fail_inputs(p, errno == EPIPE ? "the process has closed its input" : strerror(errno));
        return;
      }
      buf_consume(&i->b, (size_t)n);
    }
    p->inq = i->next;
    answer_input(i, NULL);
    buf_free(&i->b);
    loop_free_later(&p->ag->loop, i);
  }
  if (p->in.fd < 0) return;
  if (p->close_stdin && !p->inq)
    close_ev(p, &p->in);
  else
    ev_del(&p->ag->loop, &p->in); // a closed reading side would be reported for ever
}

static void on_input_ready(ev *e, uint32_t events) {
  (void)events;
  write_inputs(e->owner);
}

static void on_input_gone(call *k) {
  input *i = k->user_data;
  if (i) i->k = NULL;
}

// Takes the input over. False after rpc_fail. The call is answered (or its body resumed) from write_inputs.
static bool give_input(call *k, proc *p, const msg *in) {
  const val *sin = msg_get(in, 1), *term = msg_get(in, 2);
  if (!sin && !term) {
    rpc_fail(k, UNIMPLEMENTED, "input is missing: give stdin or pty");
    return false;
  }
  if (!!term != p->pty) {
    rpc_fail(k, INTERNAL, p->pty ? "process %d has a terminal: send pty input" : "process %d has no terminal: send stdin",
             p->pid);
    return false;
  }
  if (p->in.fd < 0 || p->close_stdin) {
    rpc_fail(k, INTERNAL, "stdin of process %d is closed or was not enabled", p->pid);
    return false;
  }
  const val *v = sin ? sin : term;
  size_t waiting = v->n; // of callers that have gone as well
  for (const input *q = p->inq; q; q = q->next) waiting += buf_len(&q->b);
  if (waiting > INPUT_MAX) {
    rpc_fail(k, RESOURCE_EXHAUSTED, "process %d does not read its input: more than %d MiB of it are waiting", p->pid,
             INPUT_MAX >> 20);
    return false;
  }
  input *i = calloc(1, sizeof *i);
  if (i) buf_put(&i->b, v->s, v->n);
  if (!i || i->b.oom) {
    if (i) buf_free(&i->b);
    free(i);
    rpc_fail(k, RESOURCE_EXHAUSTED, "out of memory");
    return false;
  }
  i->k = k;
  k->user_data = i;
  k->on_gone = on_input_gone;
  k->deferred = true;
  input **q = &p->inq;
  while (*q) q = &(*q)->next;
  *q = i;
  return true;
}

static void rpc_input(call *k) {
  proc *p = find(k, msg_sub(k->in, 1), false);
  if (!p || !give_input(k, p, msg_sub(k->in, 2))) return;
  // It may take long until all of it is read: one copy is enough.
  k->in = NULL;
  k->user = (account){0};
  arena_free(&k->a);
  write_inputs(p);
}

static void rpc_close_stdin(call *k) {
  proc *p = find(k, msg_sub(k->in, 1), false);
  if (!p) return;
  if (p->pty) {
    rpc_fail(k, UNKNOWN, "a terminal's input cannot be closed: send the end-of-file character 0x04");
    return;
  }
  k->out = msg_new(&k->a, &empty_desc);
  if (p->in.fd < 0) return;
  p->close_stdin = true;
  write_inputs(p);
}

// One message of a StreamInput, or its end (k->in == NULL). k->aux keeps the pid, not a pointer: the process
// may be gone by the next message.
static void rpc_stream_input(call *k) {
  if (!k->in) {
    k->out = msg_new(&k->a, &empty_desc);
    rpc_finish(k);
    return;
  }
  const msg *start = msg_sub(k->in, 1), *data = msg_sub(k->in, 2);
  if (start) {
    proc *p = find(k, msg_sub(start, 1), false);
    if (p) k->aux = p->pid;
    return;
  }
  if (msg_get(k->in, 3)) return; // keepalive
  if (!data) {
    rpc_fail(k, UNIMPLEMENTED, "empty event: give start, data or keepalive");
    return;
  }
  if (!k->aux) {
    rpc_fail(k, INVALID_ARGUMENT, "the first message must be start");
    return;
  }
  proc *p = k->ag->procs;
  while (p && (p->pid != k->aux || p->ended)) p = p->next;
  if (!p) {
    rpc_fail(k, NOT_FOUND, "process with pid %lld has ended", (long long)k->aux);
    return;
  }
  http_pause_body(k->c); // until the process has taken it
  if (give_input(k, p, msg_sub(data, 2)))
    write_inputs(p);
  else
    k->c->body_paused = false;
}

const rpc rpc_process[] = {
    {"/process.Process/List", UNARY, &empty_desc, &list_resp, rpc_list, NULL},
    {"/process.Process/Start", SERVER_STREAM, &start_req, &event_resp, rpc_start, NULL},
    {"/process.Process/Connect", SERVER_STREAM, &select_req, &event_resp, rpc_connect, NULL},
    {"/process.Process/Update", UNARY, &update_req, &empty_desc, rpc_update, NULL},
    {"/process.Process/SendInput", UNARY, &input_req, &empty_desc, rpc_input, NULL},
    {"/process.Process/StreamInput", CLIENT_STREAM, &stream_req, &empty_desc, rpc_stream_input, NULL},
    {"/process.Process/SendSignal", UNARY, &signal_req, &empty_desc, rpc_signal, NULL},
    {"/process.Process/CloseStdin", UNARY, &select_req, &empty_desc, rpc_close_stdin, NULL},
    {NULL, UNARY, NULL, NULL, NULL, NULL},
};
