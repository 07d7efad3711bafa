import * as ffi from "bun:ffi";
import { bindShim } from "./lib.ts";

/** Large array buffers that cost few page faults, see c/shim/bigmem.h. */
const shim = bindShim({
  aenv_bigmem_alloc: { args: ["f64"], returns: "ptr" },
  aenv_bigmem_free_address: { args: [], returns: "ptr" },
  aenv_bigmem_map: { args: ["i32", "f64"], returns: "ptr" },
  aenv_bigmem_unmap_address: { args: [], returns: "ptr" },
});

/** The deallocator is missing in the declarations: called with address and context when the buffer is collected. */
const toArrayBuffer = ffi.toArrayBuffer as (
  bytes: ffi.Pointer,
  offset: number,
  length: number,
  contextOrDeallocator: ffi.Pointer,
  deallocator?: ffi.Pointer,
) => ArrayBuffer;

/**
 * A buffer of exactly `length` bytes with undefined content, freed with the last view of it. Meant for a megabyte
 * and more: space is taken in units of 2 MiB.
 */
export function allocateBig(length: number): ArrayBuffer {
  if (!(Number.isInteger(length) && length > 0)) throw new RangeError(`buffer of ${length} bytes`);
  const bytes = shim.aenv_bigmem_alloc(length);
  const release = shim.aenv_bigmem_free_address();
  if (bytes === null || release === null || typeof bytes === "bigint" || typeof release === "bigint") {
    throw new RangeError(`out of memory: ${length} bytes`);
  }
  return toArrayBuffer(bytes, 0, length, release);
}

/**
 * The content of a file of `length` bytes, for reading only, without a copy: its pages are in memory and stay there.
 * Undefined where that is not possible. The file must never be made shorter, even when it has been removed.
 */
export function mapLocked(fd: number, length: number): ArrayBuffer | undefined {
  if (!(Number.isInteger(length) && length > 0)) throw new RangeError(`mapping of ${length} bytes`);
  const bytes = shim.aenv_bigmem_map(fd, length);
  const release = shim.aenv_bigmem_unmap_address();
  if (bytes === null || release === null || typeof bytes === "bigint" || typeof release === "bigint")
    return undefined;
  return toArrayBuffer(bytes, 0, length, length as ffi.Pointer, release);
}

/** Whether a buffer's memory begins at a multiple of `unit` bytes, as direct I/O wants it. Buffers never move. */
export function beginsAtMultiple(buffer: ArrayBufferLike, unit: number): boolean {
  return ffi.ptr(new Uint8Array(buffer)) % unit === 0;
}
