import type { Pointer } from "bun:ffi";
import { CODEC_ALGORITHMS, type Codec, type CodecAlgorithm } from "./codec.ts";
import { errnoName } from "./errno.ts";
import { bindShim } from "./lib.ts";

/** Compressed blocks straight from the page cache, see c/shim/mapped.h. */
const shim = bindShim({
  aenv_mapped_open: { args: ["i32", "f64"], returns: "ptr" },
  aenv_mapped_close: { args: ["ptr"], returns: "void" },
  aenv_mapped_set_clock: { args: ["ptr", "f64"], returns: "void" },
  aenv_mapped_counts: { args: ["ptr", "ptr"], returns: "void" },
  aenv_mapped_zfile_read: {
    args: ["ptr", "ptr", "u32", "u32", "f64", "ptr", "u32", "u32", "ptr", "f64", "u32", "u32", "ptr", "u32"],
    returns: "i32",
  },
});

/** `not_cached`: only without `wait`. `failed`: whoever reads the same bytes another way learns why. */
export type MappedRead = "done" | "not_cached" | "failed";

/** A file whose compressed blocks are decoded where they lie. */
export class MappedFile implements Disposable {
  #handle: Pointer | undefined;
  readonly #lengthBytes: number;

  private constructor(handle: Pointer, lengthBytes: number) {
    this.#handle = handle;
    this.#lengthBytes = lengthBytes;
  }

  /**
   * The first `lengthBytes` bytes of a file, which stays open as long; undefined where files cannot be mapped, or too
   * many are.
   */
  static open(fd: number, lengthBytes: number): MappedFile | undefined {
    const handle = shim.aenv_mapped_open(fd, lengthBytes);
    return handle === null || typeof handle === "bigint" ? undefined : new MappedFile(handle, lengthBytes);
  }

  /**
   * Decodes `count` blocks whose stored bytes lie one behind the other from `offsetBytes` of the file on, `stored[i]`
   * bytes each: to `blockBytes` each and `lastBytes` of the last, one behind the other from `targetOffset` on. Without
   * `wait` nothing is read that is not in memory; what was seen there within the last 2 to 4 s is decoded where it
   * lies, which waits for the disk if the kernel has dropped it since. `scratch`: memory for what has to be read first.
   */
  readBlocks(
    codec: Codec,
    algorithm: CodecAlgorithm,
    verify: boolean,
    offsetBytes: number,
    stored: Uint32Array,
    count: number,
    wait: boolean,
    target: Uint8Array,
    targetOffset: number,
    blockBytes: number,
    lastBytes: number,
    scratch: Uint8Array,
  ): MappedRead {
    if (this.#handle === undefined) throw new Error("mapped file: used after dispose");
    const end = targetOffset + (count - 1) * blockBytes + lastBytes;
    if (!(targetOffset >= 0 && count > 0 && count <= stored.length && end <= target.byteLength)) {
      throw new RangeError(`mapped file: ${count} blocks to ${targetOffset} of ${target.byteLength} bytes`);
    }
    const result = shim.aenv_mapped_zfile_read(
      this.#handle,
      codec.context,
      CODEC_ALGORITHMS[algorithm],
      verify ? 1 : 0,
      offsetBytes,
      stored,
      count,
      wait ? 1 : 0,
      target,
      targetOffset,
      blockBytes,
      lastBytes,
      scratch,
      scratch.byteLength,
    );
    if (result === 0) return "done";
    const name = errnoName(-result);
    const late = name === "EAGAIN" || name === "EWOULDBLOCK" || name === "EOPNOTSUPP" || name === "ENOTSUP";
    return late ? "not_cached" : "failed";
  }

  get lengthBytes(): number {
    return this.#lengthBytes;
  }

  /** Calls that decoded from the mapping, and calls that read first. */
  counts(): { readonly mapped: number; readonly read: number } {
    if (this.#handle === undefined) throw new Error("mapped file: used after dispose");
    const counts = new Float64Array(new ArrayBuffer(16));
    shim.aenv_mapped_counts(this.#handle, counts);
    return { mapped: counts[0]!, read: counts[1]! };
  }

  /** For tests: the time stands at so many seconds until it is set again; -1: the clock. */
  setClock(seconds: number): void {
    if (this.#handle === undefined) throw new Error("mapped file: used after dispose");
    shim.aenv_mapped_set_clock(this.#handle, seconds);
  }

  [Symbol.dispose](): void {
    if (this.#handle !== undefined) shim.aenv_mapped_close(this.#handle);
    this.#handle = undefined;
  }
}
