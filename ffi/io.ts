import { linkSync, unlinkSync } from "node:fs";
import { AenvError } from "../src/lib/errors.ts";
import { check, errnoName } from "./errno.ts";
import { bindShim } from "./lib.ts";

/**
 * Positioned file I/O, see c/shim/io.h. Buffers are a view plus an offset into it, so that no temporary
 * view is made per call. Every function throws an AenvError that names `what` it was done to.
 */
const shim = bindShim({
  aenv_io_pread: { args: ["i32", "ptr", "f64", "u32", "f64"], returns: "i32" },
  aenv_io_pread_cached: { args: ["i32", "ptr", "f64", "u32", "f64"], returns: "i32" },
  aenv_io_pwrite: { args: ["i32", "ptr", "f64", "u32", "f64"], returns: "i32" },
  aenv_io_fdatasync: { args: ["i32"], returns: "i32" },
  aenv_io_fsync: { args: ["i32"], returns: "i32" },
  aenv_io_size: { args: ["i32"], returns: "f64" },
  aenv_io_truncate: { args: ["i32", "f64"], returns: "i32" },
  aenv_io_punch_hole: { args: ["i32", "f64", "f64"], returns: "i32" },
  aenv_io_seek_data: { args: ["i32", "f64"], returns: "f64" },
  aenv_io_seek_hole: { args: ["i32", "f64"], returns: "f64" },
  aenv_io_lock: { args: ["i32", "u32"], returns: "i32" },
  aenv_io_rename_noreplace: { args: ["ptr", "ptr"], returns: "i32" },
});

/** Longest single transfer; callers with more loop. */
export const MAX_TRANSFER_BYTES = 1 << 30;

function checkRange(target: Uint8Array, targetOffset: number, length: number, what: string): void {
  if (!(targetOffset >= 0 && length >= 0 && length <= MAX_TRANSFER_BYTES)) {
    throw new RangeError(`${what}: bad buffer range ${targetOffset}+${length}`);
  }
  if (targetOffset + length > target.byteLength) {
    throw new RangeError(`${what}: buffer of ${target.byteLength} bytes, range ${targetOffset}+${length}`);
  }
}

/** Fills `target[targetOffset, +length)` from `offset`; returns the bytes read, fewer only at the end of the file. */
export function pread(
  fd: number,
  target: Uint8Array,
  targetOffset: number,
  length: number,
  offset: number,
  what: string,
): number {
  checkRange(target, targetOffset, length, what);
  const result = shim.aenv_io_pread(fd, target, targetOffset, length, offset);
  return result >= 0 ? result : check(result, `read of ${length} bytes at ${offset} of ${what}`);
}

/**
 * Like {@link pread}, but never waits for a disk: -1 when some of the bytes are not in the page cache (or the
 * file system cannot tell). The buffer's content is arbitrary then. May start reading ahead.
 */
export function preadCached(
  fd: number,
  target: Uint8Array,
  targetOffset: number,
  length: number,
  offset: number,
  what: string,
): number {
  checkRange(target, targetOffset, length, what);
  const result = shim.aenv_io_pread_cached(fd, target, targetOffset, length, offset);
  if (result >= 0) return result;
  const name = errnoName(-result);
  if (name === "EAGAIN" || name === "EWOULDBLOCK" || name === "EOPNOTSUPP" || name === "ENOTSUP") return -1;
  return check(result, `read of ${length} bytes at ${offset} of ${what}`);
}

/** Writes the whole of `source[sourceOffset, +length)` at `offset`. */
export function pwrite(
  fd: number,
  source: Uint8Array,
  sourceOffset: number,
  length: number,
  offset: number,
  what: string,
): void {
  checkRange(source, sourceOffset, length, what);
  const result = shim.aenv_io_pwrite(fd, source, sourceOffset, length, offset);
  if (result < 0) check(result, `write of ${length} bytes at ${offset} of ${what}`);
}

export function fdatasync(fd: number, what: string): void {
  check(shim.aenv_io_fdatasync(fd), `fdatasync of ${what}`);
}

export function fsync(fd: number, what: string): void {
  check(shim.aenv_io_fsync(fd), `fsync of ${what}`);
}

export function fileSize(fd: number, what: string): number {
  return check(shim.aenv_io_size(fd), `size of ${what}`);
}

export function truncate(fd: number, length: number, what: string): void {
  check(shim.aenv_io_truncate(fd, length), `truncate of ${what} to ${length} bytes`);
}

export function punchHole(fd: number, offset: number, length: number, what: string): void {
  check(shim.aenv_io_punch_hole(fd, offset, length), `punch hole ${offset}+${length} in ${what}`);
}

/** First data byte at or after `offset`, undefined when only holes follow. */
export function seekData(fd: number, offset: number, what: string): number | undefined {
  const result = shim.aenv_io_seek_data(fd, offset);
  if (result < 0 && errnoName(-result) === "ENXIO") return undefined;
  return check(result, `seek for data from ${offset} in ${what}`);
}

/** First hole at or after `offset`; the end of the file counts as one. */
export function seekHole(fd: number, offset: number, what: string): number {
  return check(shim.aenv_io_seek_hole(fd, offset), `seek for a hole from ${offset} in ${what}`);
}

const LOCK_MODES = { unlock: 0, shared: 1, exclusive: 2 } as const;

/** False when another open file holds a conflicting lock. */
export function lockFile(fd: number, mode: keyof typeof LOCK_MODES, what: string): boolean {
  const result = shim.aenv_io_lock(fd, LOCK_MODES[mode]);
  // One number with two names.
  if (result < 0 && ["EAGAIN", "EWOULDBLOCK"].includes(errnoName(-result))) return false;
  check(result, `${mode} lock of ${what}`);
  return true;
}

/**
 * Renames without ever replacing an existing `to`: that is an error of code `file_exists`. File systems
 * without such a rename get a link and an unlink, which a crash can leave half done (both names exist).
 */
export function renameNoReplace(from: string, to: string): void {
  const result = shim.aenv_io_rename_noreplace(Buffer.from(`${from}\0`), Buffer.from(`${to}\0`));
  const name = result < 0 ? errnoName(-result) : "";
  if (name === "EEXIST") {
    throw new AenvError({ code: "file_exists", status: 409, message: `rename of ${from}: ${to} exists` });
  }
  if (name === "EINVAL" || name === "ENOSYS") {
    linkSync(from, to);
    unlinkSync(from);
    return;
  }
  check(result, `rename of ${from} to ${to}`);
}
