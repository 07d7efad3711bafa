import { closeSync, constants, ftruncateSync, openSync, readFileSync, writeSync } from "node:fs";
import { tryLockExclusive } from "../../ffi/flock.ts";
import { AenvError } from "./errors.ts";

/**
 * Exclusive lock on a file of its own, held by an open descriptor: the kernel releases it when the
 * process dies, however it dies. The file names its owner and is never removed (removing a lock file
 * while others wait on it is how two owners come to be).
 */
export class FileLock implements Disposable {
  readonly #fd: number;
  #held = true;

  private constructor(fd: number) {
    this.#fd = fd;
  }

  /** Undefined when someone else holds it. The directory must exist. */
  static tryAcquire(path: string, note = ""): FileLock | undefined {
    // Opened close-on-exec (the runtime always does): a child must not keep its parent's lock.
    const fd = openSync(path, constants.O_RDWR | constants.O_CREAT, 0o600);
    if (!tryLockExclusive(fd)) {
      closeSync(fd);
      return undefined;
    }
    ftruncateSync(fd, 0);
    writeSync(fd, `${process.pid} ${note}\n`, 0);
    return new FileLock(fd);
  }

  /** Waits for the lock at most `waitMs`; error `lock_timeout` names the holder. */
  static async acquire(path: string, waitMs: number, note = ""): Promise<FileLock> {
    const deadline = performance.now() + waitMs;
    for (let pauseMs = 1; ; pauseMs = Math.min(pauseMs * 2, 50)) {
      const lock = FileLock.tryAcquire(path, note);
      if (lock !== undefined) return lock;
      if (performance.now() >= deadline) {
        throw new AenvError({
          code: "lock_timeout",
          status: 503,
          message: `${path} stayed locked for ${waitMs} ms by process ${lockHolder(path) ?? "unknown"}`,
          remediation: "retry; if the process hangs, end it: its lock goes with it",
        });
      }
      await Bun.sleep(pauseMs);
    }
  }

  [Symbol.dispose](): void {
    if (!this.#held) return;
    this.#held = false;
    closeSync(this.#fd);
  }
}

/** Pid that the lock file names; only a hint, for messages. */
export function lockHolder(path: string): number | undefined {
  const pid = Number.parseInt(readFileSync(path, "utf8"), 10);
  return Number.isInteger(pid) && pid > 0 ? pid : undefined;
}
