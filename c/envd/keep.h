// Running processes outlive the agent: init keeps their descriptors and hands them to the next one. One
// SOCK_SEQPACKET pair between the two; each message is a keep_msg, for KEEP_PUT followed by a protobuf
// ProcessInfo, with the descriptors that its flags tell.
#ifndef AENV_KEEP_H
#define AENV_KEEP_H

#include "util.h"

enum keep_kind {
  KEEP_PUT = 1,  // a process and its descriptors
  KEEP_CLOSE_IN, // its stdin is closed: whoever else holds the pipe must let go as well
  KEEP_EXIT,     // it has ended with status
  KEEP_DROP,     // nobody asks for it any more
  KEEP_READY,    // init to agent: that was all
  KEEP_ALIVE,    // every KEEP_ALIVE_MS: the agent's loop goes round
};
// After so many rounds without a word the agent hangs (in a file system that does not answer, say) and is replaced.
enum { KEEP_ALIVE_MS = 10 * 1000, KEEP_SILENT_MAX = 6 };
enum { KEEP_PTY = 8, KEEP_META_MAX = 64 * 1024 }; // flags 1, 2, 4: stdin (or the terminal), stdout, stderr follow

typedef struct keep_msg {
  uint32_t kind, flags;
  int32_t pid, status;
  int64_t deadline; // CLOCK_MONOTONIC in ms, 0: none
} keep_msg;

// 0, or -errno.
int keep_send(int sock, const keep_msg *m, const void *meta, size_t n, const int fds[3]);
// Length of meta, or -errno (-EAGAIN after wait_ms, -ECONNRESET at the end). fds[i] is -1 where none came.
ssize_t keep_recv(int sock, int wait_ms, keep_msg *m, uint8_t *meta, size_t cap, int fds[3]);

// ---- the keeping side --------------------------------------------------------------------------

typedef struct kept {
  struct kept *next;
  keep_msg m;
  bool exited;
  int fds[3];
  size_t n;
  uint8_t meta[];
} kept;

bool keeper_take(kept **list, int sock); // what the agent has told; false: nothing
void keeper_exit(kept **list, int sock, int32_t pid, int32_t status); // tells the agent, if it is one of those kept
void keeper_hand_over(kept **list, int sock);

#endif
