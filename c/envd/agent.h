// The agent as a whole: its state, and what its parts offer to each other.
#ifndef AENV_AGENT_H
#define AENV_AGENT_H

#include <sys/resource.h>

#include "http.h"
#include "loop.h"
#include "msg.h"
#include "users.h"
#include "util.h"

// The protocol version that is served; clients decide by it what they may ask for.
#define ENVD_VERSION "0.6.13"
#define AGENT_PORT 49983
#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

typedef struct envvar {
  struct envvar *next;
  char *name, *value;
} envvar;

typedef struct agent {
  loop loop;
  http_server http;
  ev signals;
  struct rlimit nofile; // as inherited; children get it back
  // options
  const char *root;     // prefix of account files and /run/e2b; "" in a guest
  const char *trust_if; // interface whose peers may call /init, NULL: any but loopback
  const char *cgroup;   // cgroup v2 directory for user processes, NULL: none
  bool guest;           // may set clock, hostname, entropy
  int state_fd;         // memfd that outlives us: settings survive a restart of the agent. -1: none
  int keep_fd; // init, who keeps the processes' descriptors for our successor; -1: nobody
  ev keep;
  timer alive;
  int cgroup_fd;
  int oom_fd; // memory.events of that cgroup, -1: none
  int64_t stall_ms; // after so long without taking output a subscriber is cut off
  // settings of the last /init
  char *token; // NULL: open
  char *default_user, *default_workdir;
  char *lifecycle;
  envvar *user_env, *platform_env;
  bool has_ts;
  int64_t ts_sec;
  int32_t ts_nsec;
  // parts
  struct proc *procs;
  struct job *jobs, *jobs_waiting;
  struct watcher *watchers;
  struct ports *ports; // NULL: loopback services are not exposed
  struct hold *hold;   // NULL: no file system is frozen
  unsigned njobs, nwaiting, nprocs, nwatchers;
  uint64_t cpu_busy, cpu_total; // /proc/stat at the last /metrics
  buf frame; // room for the message being sent, kept: large blocks are costly to get and give back
} agent;

static inline agent *agent_of(const conn *c) {
  return c->srv->app;
}

#define CORS_HEADERS "Access-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: *\r\n"

// ---- api.c: routing, authorisation, /health /init /envs /metrics -------------------------------

void api_handle(conn *c);
bool api_exempt(const conn *c); // needs no disk: goes on while those are frozen
void api_restore(agent *ag); // settings from state_fd
void env_free(envvar **list);
int env_set(envvar **list, const char *name, const char *value); // 0 or -ENOMEM
const char *env_get(const envvar *list, const char *name);
// Account named by the request, or the default one. 0, or -errno.
int agent_account(agent *ag, arena *a, const userdb *db, const char *name, account *out);
// Path rules of the protocol: empty, "~", relative to the home. 0, or -EINVAL ("~name") / -ENOMEM.
int agent_path(const agent *ag, arena *a, const account *u, const char *path, char **out);
// mkdir -p with 0755; new directories belong to u. 0, or -errno; *created tells if the last one is new.
int make_dirs(const char *path, const account *u, bool *created);

// ---- connect.c: the RPC layer ------------------------------------------------------------------

enum code {
  OK = 0,
  CANCELED,
  UNKNOWN,
  INVALID_ARGUMENT,
  DEADLINE_EXCEEDED,
  NOT_FOUND,
  ALREADY_EXISTS,
  PERMISSION_DENIED,
  RESOURCE_EXHAUSTED,
  FAILED_PRECONDITION,
  ABORTED,
  OUT_OF_RANGE,
  UNIMPLEMENTED,
  INTERNAL,
  UNAVAILABLE,
  DATA_LOSS,
  UNAUTHENTICATED,
};

enum rpc_kind { UNARY, SERVER_STREAM, CLIENT_STREAM };

typedef struct call call;

typedef struct rpc {
  const char *path;
  enum rpc_kind kind;
  const mdesc *in, *out;
  // UNARY: fill k->out or rpc_fail, or set k->deferred and finish later. SERVER_STREAM: begin sending.
  // CLIENT_STREAM: one message; called with k->in == NULL when the client is done.
  void (*fn)(call *k);
  bool (*slow)(const call *k); // UNARY: true = run fn in a child process so that the loop stays free
} rpc;

struct call {
  agent *ag;
  conn *c;
  const rpc *m;
  bool json, ended, deferred, taking, gone, legacy;
  int64_t aux; // the method's own
  arena a; // lives as long as the call
  account user;
  userdb db;
  int64_t timeout_ms; // 0: none
  int64_t keepalive_ms;
  const msg *in;
  msg *out;
  enum code code;
  char *error;
  buf frames;
  unsigned nmsgs;
  timer keepalive, deadline;
  void (*on_keepalive)(call *k);
  void (*on_deadline)(call *k);
  void (*on_drained)(call *k);
  void (*on_gone)(call *k);
  void *user_data;
};

extern const rpc rpc_process[], rpc_filesystem[]; // end with a NULL path

void connect_handle(conn *c, const rpc *m);
// Pure: the envelope at p. Bytes of it (5 and the payload), 0 when incomplete, or -1 with *code and *why.
ssize_t frame_parse(const uint8_t *p, size_t n, enum code *code, const char **why);
const rpc *connect_find(const char *path);
void rpc_fail(call *k, enum code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void rpc_send(call *k, const msg *m); // a stream's message; restarts the keepalive timer
void rpc_finish(call *k);             // ends a deferred unary call, or a stream, with k->code
bool rpc_may_send(call *k);           // false: wait for on_drained
void rpc_resume(call *k);             // a client stream paused by http_pause_body may go on

// ---- job.c: work in a child process ------------------------------------------------------------

// Runs fn in a forked child; its output (bytes it puts into out) comes back to done, in the loop. The child
// sees a copy of everything and may block. Where too many run it waits for its turn. Cancelling kills it. NULL when
// it can neither run nor wait.
typedef struct job job;
struct job {
  agent *ag;
  job *next;
  pid_t pid;
  ev e;
  buf out;
  bool waiting;
  void (*fn)(void *owner, buf *out);
  void (*done)(job *j, bool ok);
  void *owner; // NULL after job_cancel
};
job *job_start(agent *ag, void *owner, void (*fn)(void *owner, buf *out), void (*done)(job *j, bool ok));
void job_cancel(job *j);
bool job_reaped(agent *ag, pid_t pid, int status); // true when pid was one of them

// ---- proc.c ------------------------------------------------------------------------------------

bool proc_reaped(agent *ag, pid_t pid, int status);
void procs_close(agent *ag); // kills what still runs, unless somebody keeps it
int procs_recover(agent *ag); // takes over those of the agent before us, from keep_fd. 0, or -errno
void child_reset(const agent *ag); // in a fresh child: signals, limits, priority, descriptors

// ---- pty.c -------------------------------------------------------------------------------------

// A pseudo terminal of that size; the slave belongs to uid. 0, or -errno.
int pty_open(int *master, int *slave, unsigned cols, unsigned rows, uid_t uid);
int pty_resize(int master, unsigned cols, unsigned rows);
// In the child: new session with the slave as controlling terminal and stdio. 0, or -errno.
int pty_attach(int slave);

// ---- fs.c, watch.c, files.c --------------------------------------------------------------------

extern const mdesc entry_info_desc;
// Fills an EntryInfo from lstat of path; `brief`: name, type and path only. 0, or -errno.
int entry_info(arena *a, const userdb *db, const char *path, bool brief, msg *out);
void rpc_watch_dir(call *k);
void rpc_create_watcher(call *k);
void rpc_get_watcher_events(call *k);
void rpc_remove_watcher(call *k);
void watchers_close(agent *ag);
// The agent itself is about to replace the file at path: no watch takes that for a new one.
void watchers_expect(void *ag, const char *path);
void files_handle(conn *c);   // GET, HEAD and POST /files
void files_compose(conn *c);  // POST /files/compose

// ---- port.c ------------------------------------------------------------------------------------

// Exposes loopback-only services under addr. 0, -EINVAL (no IPv4 address) or -ENOMEM.
int ports_start(agent *ag, const char *addr);
void ports_drop(agent *ag); // cuts the connections carried now
void ports_close(agent *ag);

// ---- hold.c ------------------------------------------------------------------------------------

typedef struct hold hold;
// /fsfreeze, /fsfrozen, /fsthaw and /halt. False: another path. While file systems are held, or about to be, requests
// for others wait.
bool hold_handle(conn *c, const char *path);
void hold_release(agent *ag); // has what is frozen thawed
void hold_close(agent *ag);
void hold_thaw_left(void); // thaws whatever disk is frozen: for one that whoever froze it left behind

// ---- identity.c --------------------------------------------------------------------------------

#define IDENTITY_MARK "# this sandbox"
// This machine is now the sandbox of that id: host name, name resolution, machine id, SSH host keys. Does nothing
// to the machine of a run without --guest or --root.
void identity_apply(agent *ag, const char *id);
// Puts line into ROOT/etc/hosts in the place of the one that contains mark. 0, or -errno.
int identity_host_line(const char *root, const char *mark, const char *line);

// ---- init_guest.c ------------------------------------------------------------------------------

// PID 1 of the guest. Returns only by switching the machine off.
int guest_init(void);
// Whether this process is the kernel's first one in our initramfs.
bool is_guest_init(const char *argv0);

#endif
