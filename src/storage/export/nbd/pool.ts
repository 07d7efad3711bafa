import { assert } from "../../../lib/errors.ts";

/**
 * Room for a reply header in front of a payload whose size is a power of two. A payload behind it lies as a disk's
 * direct reads want it: buffers begin at a page.
 */
export const HEADROOM_BYTES = 512;
const SMALLEST = 16; // 64 KiB
const LARGEST = 25; // 32 MiB

/**
 * Buffers of one worker, shared by all its connections and handed from one to the next. Sizes are powers
 * of two from 64 KiB to 32 MiB plus a header's room. At most `retainBytes` of free buffers are kept.
 */
export class BufferPool {
  readonly #free: Uint8Array[][] = Array.from({ length: LARGEST + 1 }, () => []);
  readonly #retainBytes: number;
  #retained = 0;

  constructor(retainBytes = 8 << 20) {
    this.#retainBytes = retainBytes;
  }

  /** A buffer of at least `sizeBytes` with arbitrary content. */
  take(sizeBytes: number): Uint8Array {
    let order = SMALLEST;
    while (2 ** order + HEADROOM_BYTES < sizeBytes) order++;
    assert(order <= LARGEST, `a buffer of ${sizeBytes} bytes was asked for`);
    const reused = this.#free[order]!.pop();
    if (reused !== undefined) {
      this.#retained -= reused.length;
      return reused;
    }
    return new Uint8Array(new ArrayBuffer(2 ** order + HEADROOM_BYTES));
  }

  /** Only buffers that came from {@link take}; the caller forgets it. */
  give(buffer: Uint8Array): void {
    if (this.#retained + buffer.length > this.#retainBytes) return;
    const order = Math.log2(buffer.length - HEADROOM_BYTES);
    this.#free[order]!.push(buffer);
    this.#retained += buffer.length;
  }
}
