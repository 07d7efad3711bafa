import { closeSync, constants, openSync, unlinkSync } from "node:fs";
import { dirname } from "node:path";
import { fsync } from "../../../ffi/io.ts";

/** Not among the constants of node:fs. */
export const O_CLOEXEC = 0o2000000;

/** Makes creations, renames and removals in the file's directory durable. */
export function fsyncDirectoryOf(file: string): void {
  const directory = dirname(file);
  const fd = openSync(directory, constants.O_RDONLY | constants.O_DIRECTORY | O_CLOEXEC);
  try {
    fsync(fd, directory);
  } finally {
    closeSync(fd);
  }
}

/** A name beside `target` for the file while it is being written. */
export function temporaryName(target: string): string {
  return `${target}.tmp-${process.pid}-${crypto.randomUUID().slice(0, 8)}`;
}

/** Removes a file if it is there. */
export function removeIfPresent(file: string): void {
  try {
    unlinkSync(file);
  } catch (error) {
    if (!(error instanceof Error && "code" in error && error.code === "ENOENT")) throw error;
  }
}
