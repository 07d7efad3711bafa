import {
  appendFileSync,
  closeSync,
  constants,
  existsSync,
  openSync,
  renameSync,
  statSync,
  unlinkSync,
} from "node:fs";
import { dirname } from "node:path";
import { fsync } from "../../../ffi/io.ts";

/** Not among the constants of node:fs. */
export const O_CLOEXEC = 0o2000000;

/** Opens or (with O_CREAT) creates a file, private to the owner. */
export function openFile(file: string, flags: number): number {
  return openSync(file, flags | O_CLOEXEC, 0o600);
}

export function createFile(file: string): number {
  return openFile(file, constants.O_RDWR | constants.O_CREAT | constants.O_EXCL);
}

/** Makes creations, renames and removals in the directories of these files durable. */
export function fsyncDirectoriesOf(...files: readonly string[]): void {
  for (const directory of new Set(files.map((file) => dirname(file)))) {
    const fd = openFile(directory, constants.O_RDONLY | constants.O_DIRECTORY);
    try {
      fsync(fd, directory);
    } finally {
      closeSync(fd);
    }
  }
}

/** A name beside `target` for the file while it is being written. */
export function temporaryName(target: string): string {
  return `${target}.tmp-${process.pid}-${crypto.randomUUID().slice(0, 8)}`;
}

/**
 * Writes a whole file under a temporary name, syncs it and renames it over `target`, so that a crash leaves
 * the old or the new one. The directory is the caller's to sync. For files of one owner: the temporary name
 * is always the same, so that what a crash left goes away with the next try.
 */
export function replaceFile(
  target: string,
  write: (fd: number, name: string) => void,
  durability: "synced" | "unsynced" = "synced",
): void {
  const temporary = `${target}.tmp`;
  removeIfPresent(temporary);
  const fd = createFile(temporary);
  try {
    write(fd, temporary);
    if (durability === "synced") fsync(fd, temporary);
    renameFile(temporary, target);
  } catch (error) {
    removeIfPresent(temporary);
    throw error;
  } finally {
    closeSync(fd);
  }
}

export function renameFile(from: string, to: string): void {
  renameSync(from, to);
}

/** Removes a file if it is there. */
export function removeIfPresent(file: string): void {
  try {
    unlinkSync(file);
  } catch (error) {
    if (!(error instanceof Error && "code" in error && error.code === "ENOENT")) throw error;
  }
}

export function appendToFile(file: string, bytes: Uint8Array): void {
  appendFileSync(file, bytes, { mode: 0o600 });
}

/** True when both names are links to one file. */
export function sameFile(a: string, b: string): boolean {
  if (!existsSync(a) || !existsSync(b)) return false;
  const left = statSync(a, { bigint: true });
  const right = statSync(b, { bigint: true });
  return left.dev === right.dev && left.ino === right.ino;
}
