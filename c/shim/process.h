/* Processes by handle instead of by number, so that a reused pid is never signalled; and pipes to them by name. */
#ifndef AENV_PROCESS_H
#define AENV_PROCESS_H

#include <stdint.h>

/* A descriptor for the process, close-on-exec; -ESRCH when there is none. */
__attribute__((visibility("default"))) int32_t aenv_pidfd_open(int32_t pid);

/* Sends a signal (0 only asks); -ESRCH when the process has ended. */
__attribute__((visibility("default"))) int32_t aenv_pidfd_signal(int32_t pidfd, int32_t signal);

/*
 * The eventfd that becomes readable whenever a process of aenv_exit_watch has ended: one for all of them, this process's
 * own for good (do not close it). The first call starts the thread that waits for them.
 */
__attribute__((visibility("default"))) int32_t aenv_exit_events(void);

/* Tells once when the process behind a pidfd ends, at once if it has already; closing the pidfd ends the watch. */
__attribute__((visibility("default"))) int32_t aenv_exit_watch(int32_t pidfd);

/* Makes a named pipe; -EEXIST when the name is taken. */
__attribute__((visibility("default"))) int32_t aenv_mkfifo(const char *path, uint32_t mode);

#endif
