import type { Pointer } from "bun:ffi";
import { errnoName } from "./errno.ts";
import { bindShim } from "./lib.ts";

/** Block codecs and checksum of the ZFile format, see c/shim/codec.h. */
const shim = bindShim({
  aenv_codec_new: { args: [], returns: "ptr" },
  aenv_codec_free: { args: ["ptr"], returns: "void" },
  aenv_crc32c_raw: { args: ["u32", "ptr", "f64", "f64"], returns: "u32" },
  aenv_crc32c_raw_portable: { args: ["u32", "ptr", "f64", "f64"], returns: "u32" },
  aenv_crc32c_lanes: { args: ["ptr", "f64", "f64", "ptr"], returns: "void" },
  aenv_zfile_bound: { args: ["u32", "u32"], returns: "i32" },
  aenv_zfile_encode: {
    args: ["ptr", "u32", "u32", "ptr", "f64", "u32", "ptr", "f64", "u32"],
    returns: "i32",
  },
  aenv_zfile_decode: {
    args: ["ptr", "u32", "u32", "ptr", "f64", "u32", "ptr", "f64", "u32"],
    returns: "i32",
  },
});

/** Algorithm numbers as in the ZFile header. */
export const CODEC_ALGORITHMS = { lz4: 1, zstd: 2 } as const;
export type CodecAlgorithm = keyof typeof CODEC_ALGORITHMS;

function checkRange(view: Uint8Array, offset: number, length: number): void {
  if (!(offset >= 0 && length >= 0 && offset + length <= view.byteLength)) {
    throw new RangeError(`codec: buffer of ${view.byteLength} bytes, range ${offset}+${length}`);
  }
}

/** The raw CRC-32C register (no inversion before or after) over `bytes`, continued from `seed`. */
export function crc32cRaw(seed: number, bytes: Uint8Array): number {
  if (bytes.byteLength === 0) return seed >>> 0;
  return shim.aenv_crc32c_raw(seed, bytes, 0, bytes.byteLength);
}

/** Checksums of four parts of `bytes`, for what is long and only checked as a whole. See aenv_crc32c_lanes. */
export function crc32cLanes(bytes: Uint8Array): Uint32Array {
  const sums = new Uint32Array(new ArrayBuffer(16));
  if (bytes.byteLength > 0) shim.aenv_crc32c_lanes(bytes, 0, bytes.byteLength, sums);
  return sums;
}

/** What processors without SSE4.2 run; for tests. */
export function crc32cRawPortable(seed: number, bytes: Uint8Array): number {
  if (bytes.byteLength === 0) return seed >>> 0;
  return shim.aenv_crc32c_raw_portable(seed, bytes, 0, bytes.byteLength);
}

/** Room that one encoded block of `length` bytes may need, checksum included. */
export function encodedBound(algorithm: CodecAlgorithm, length: number): number {
  const bound = shim.aenv_zfile_bound(CODEC_ALGORITHMS[algorithm], length);
  if (bound < 0) throw new RangeError(`codec: block of ${length} bytes`);
  return bound;
}

/** Reusable zstd and lz4 state of one thread. */
export class Codec implements Disposable {
  #context: Pointer | null;

  constructor() {
    const context = shim.aenv_codec_new();
    if (typeof context === "bigint") throw new Error("codec: pointer out of range");
    this.#context = context;
    if (context === null) throw new Error("codec: out of memory");
  }

  /** For other bindings of the shim. */
  get context(): Pointer {
    if (this.#context === null) throw new Error("codec: used after dispose");
    return this.#context;
  }

  /** Compresses one block (checksum appended when `verify`) and returns the stored length. */
  encode(
    algorithm: CodecAlgorithm,
    verify: boolean,
    source: Uint8Array,
    sourceOffset: number,
    length: number,
    target: Uint8Array,
    targetOffset: number,
  ): number {
    if (this.#context === null) throw new Error("codec: used after dispose");
    checkRange(source, sourceOffset, length);
    checkRange(target, targetOffset, 0);
    const result = shim.aenv_zfile_encode(
      this.#context,
      CODEC_ALGORITHMS[algorithm],
      verify ? 1 : 0,
      source,
      sourceOffset,
      length,
      target,
      targetOffset,
      target.byteLength - targetOffset,
    );
    if (result < 0) throw new Error(`codec: ${algorithm} block of ${length} bytes: ${errnoName(-result)}`);
    return result;
  }

  /**
   * Decodes one stored block to exactly `length` bytes. Returns undefined on success, else the reason
   * (wrong checksum, does not decompress): corrupt input is data for the caller, not a failure of the call.
   */
  decode(
    algorithm: CodecAlgorithm,
    verify: boolean,
    source: Uint8Array,
    sourceOffset: number,
    stored: number,
    target: Uint8Array,
    targetOffset: number,
    length: number,
  ): string | undefined {
    if (this.#context === null) throw new Error("codec: used after dispose");
    checkRange(source, sourceOffset, stored);
    checkRange(target, targetOffset, length);
    const result = shim.aenv_zfile_decode(
      this.#context,
      CODEC_ALGORITHMS[algorithm],
      verify ? 1 : 0,
      source,
      sourceOffset,
      stored,
      target,
      targetOffset,
      length,
    );
    if (result >= 0) return undefined;
    const name = errnoName(-result);
    if (name === "EBADMSG") return "checksum does not match";
    if (name === "EILSEQ") return `${algorithm} data does not decompress to ${length} bytes`;
    return `stored length ${stored} is not possible (${name})`;
  }

  [Symbol.dispose](): void {
    if (this.#context !== null) shim.aenv_codec_free(this.#context);
    this.#context = null;
  }
}
