import { constants } from "node:os";
import { check } from "./errno.ts";
import { bindShim } from "./lib.ts";

/** Bindings of c/shim/process.h: processes by handle, named pipes. */
const shim = bindShim({
  aenv_pidfd_open: { args: ["i32"], returns: "i32" },
  aenv_pidfd_signal: { args: ["i32", "i32"], returns: "i32" },
  aenv_exit_events: { args: [], returns: "i32" },
  aenv_exit_watch: { args: ["i32"], returns: "i32" },
  aenv_mkfifo: { args: ["ptr", "u32"], returns: "i32" },
});

/** A descriptor for a process (close it); undefined when there is no such process. */
export function openPidfd(pid: number): number | undefined {
  const fd = shim.aenv_pidfd_open(pid);
  return fd === -constants.errno.ESRCH ? undefined : check(fd, `opening process ${pid}`);
}

/** Signals the process behind a pidfd; false when it has ended. */
export function signalPidfd(pidfd: number, signal: "SIGTERM" | "SIGKILL"): boolean {
  const result = shim.aenv_pidfd_signal(pidfd, constants.signals[signal]);
  if (result === -constants.errno.ESRCH) return false;
  check(result, `sending ${signal}`);
  return true;
}

/** The eventfd that becomes readable whenever a process of {@link watchExit} has ended; do not close it. */
export function exitEvents(): number {
  return check(shim.aenv_exit_events(), "watching processes");
}

/** Has {@link exitEvents} tell once when the process behind a pidfd ends; closing the pidfd ends the watch. */
export function watchExit(pidfd: number): void {
  check(shim.aenv_exit_watch(pidfd), "watching a process");
}

/** Makes a named pipe; false when the name is taken. */
export function makeFifo(path: string, mode = 0o600): boolean {
  const result = shim.aenv_mkfifo(Buffer.from(`${path}\0`), mode);
  if (result === -constants.errno.EEXIST) return false;
  check(result, `making the pipe ${path}`);
  return true;
}
