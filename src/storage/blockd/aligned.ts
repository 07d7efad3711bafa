import type { LayerStack } from "../overlaybd/types.ts";

const SECTOR_BYTES = 512;

/**
 * Serves a stack whatever the alignment of a request: the stack itself takes whole sectors. A write that
 * covers a sector in part reads the rest of it first; nothing can come between, the thread is ours.
 */
export function alignedAccess(stack: LayerStack) {
  const start = (offsetBytes: number) => offsetBytes - (offsetBytes % SECTOR_BYTES);
  const end = (offsetBytes: number, lengthBytes: number) =>
    Math.ceil((offsetBytes + lengthBytes) / SECTOR_BYTES) * SECTOR_BYTES;

  /** Runs `read` on whole sectors around the range and copies what was wanted, unless it returns false. */
  const around = (
    offsetBytes: number,
    target: Uint8Array,
    read: (offset: number, into: Uint8Array) => boolean,
  ): boolean => {
    const from = start(offsetBytes);
    const to = end(offsetBytes, target.length);
    if (from === offsetBytes && to === offsetBytes + target.length) return read(offsetBytes, target);
    const sectors = new Uint8Array(new ArrayBuffer(to - from));
    if (!read(from, sectors)) return false;
    target.set(sectors.subarray(offsetBytes - from, offsetBytes - from + target.length));
    return true;
  };

  return {
    read(offsetBytes: number, target: Uint8Array): void {
      around(offsetBytes, target, (offset, into) => {
        stack.read(offset, into);
        return true;
      });
    },

    /** False where that would wait for a disk. */
    tryRead(offsetBytes: number, target: Uint8Array): boolean {
      return around(offsetBytes, target, (offset, into) => stack.tryRead(offset, into));
    },

    /** See LayerStack.locate. */
    locate(offsetBytes: number, lengthBytes: number, visit: Parameters<LayerStack["locate"]>[2]): void {
      const from = start(offsetBytes);
      stack.locate(from, end(offsetBytes, lengthBytes) - from, visit);
    },

    write(offsetBytes: number, source: Uint8Array): void {
      const from = start(offsetBytes);
      const to = end(offsetBytes, source.length);
      if (from === offsetBytes && to === offsetBytes + source.length) {
        stack.write(offsetBytes, source);
        return;
      }
      const sectors = new Uint8Array(new ArrayBuffer(to - from));
      stack.read(from, sectors.subarray(0, SECTOR_BYTES));
      if (to - from > SECTOR_BYTES) stack.read(to - SECTOR_BYTES, sectors.subarray(-SECTOR_BYTES));
      sectors.set(source, offsetBytes - from);
      stack.write(from, sectors);
    },

    /** Whole sectors inside the range are dropped; what is left of it at the edges is returned. */
    discard(offsetBytes: number, lengthBytes: number): { offsetBytes: number; lengthBytes: number }[] {
      const to = offsetBytes + lengthBytes;
      const innerStart = Math.ceil(offsetBytes / SECTOR_BYTES) * SECTOR_BYTES;
      const innerEnd = start(to);
      if (innerEnd <= innerStart) return [{ offsetBytes, lengthBytes }];
      stack.discard(innerStart, innerEnd - innerStart);
      return [
        { offsetBytes, lengthBytes: innerStart - offsetBytes },
        { offsetBytes: innerEnd, lengthBytes: to - innerEnd },
      ].filter((edge) => edge.lengthBytes > 0);
    },
  };
}

export type AlignedAccess = ReturnType<typeof alignedAccess>;
