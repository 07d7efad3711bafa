import { dlopen } from "bun:ffi";

/**
 * `flock(2)` of the C library. The kernel drops the lock when the last descriptor of the open file goes
 * away, a killed process included, so there are no stale locks to judge.
 */
const LOCK_EX = 2;
const LOCK_NB = 4;

let symbols: { flock: (fd: number, operation: number) => number } | undefined;

function libc(): { flock: (fd: number, operation: number) => number } {
  symbols ??= dlopen("libc.so.6", { flock: { args: ["i32", "i32"], returns: "i32" } }).symbols;
  return symbols;
}

/**
 * Tries to take the exclusive lock of an open file; false when another descriptor holds it. Never
 * blocks. On a valid descriptor the only other failures are EINTR and ENOLCK, both worth a retry.
 */
export function tryLockExclusive(fd: number): boolean {
  return libc().flock(fd, LOCK_EX | LOCK_NB) === 0;
}
