import * as ffi from "bun:ffi";
import { bindShim } from "./lib.ts";

/** Large array buffers that cost few page faults, see c/shim/bigmem.h. */
const shim = bindShim({
  aenv_bigmem_alloc: { args: ["f64"], returns: "ptr" },
  aenv_bigmem_free_address: { args: [], returns: "ptr" },
});

/** The deallocator is missing in the declarations: called with the address when the buffer is collected. */
const toArrayBuffer = ffi.toArrayBuffer as (
  bytes: ffi.Pointer,
  offset: number,
  length: number,
  deallocator: ffi.Pointer,
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
