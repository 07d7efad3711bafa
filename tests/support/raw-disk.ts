import { closeSync, ftruncateSync, openSync, writeSync } from "node:fs";
import { type LayerRef, openStack } from "../../src/storage/overlaybd/index.ts";

/** Writes what a chain of layers holds to a new sparse file, as a disk of its size. */
export function writeRawDisk(lowers: readonly LayerRef[], path: string): void {
  using stack = openStack({ lowers });
  const fd = openSync(path, "wx");
  try {
    ftruncateSync(fd, stack.virtualSizeBytes);
    const buffer = new Uint8Array(new ArrayBuffer(1 << 20));
    for (const extent of stack.mappedExtents("all")) {
      if (extent.zeroed) continue;
      for (let done = 0; done < extent.lengthBytes; ) {
        const piece = buffer.subarray(0, Math.min(buffer.length, extent.lengthBytes - done));
        stack.read(extent.offsetBytes + done, piece);
        writeSync(fd, piece, 0, piece.length, extent.offsetBytes + done);
        done += piece.length;
      }
    }
  } finally {
    closeSync(fd);
  }
}
