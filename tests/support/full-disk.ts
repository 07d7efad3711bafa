import { closeSync, openSync, writeSync } from "node:fs";
import { join } from "node:path";

/** Fills the (small) file system of `directory` to the last byte; the file that does it, to be removed. */
export function fillDisk(directory: string): string {
  const path = join(directory, "filler");
  const fd = openSync(path, "wx");
  try {
    for (let size = 1 << 20; size >= 1; ) {
      try {
        writeSync(fd, new Uint8Array(size));
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code !== "ENOSPC") throw error;
        size >>= 1;
      }
    }
  } finally {
    closeSync(fd);
  }
  return path;
}
