import { ptr } from "bun:ffi";
import { bindShim } from "./lib.ts";

/** Inner loops over indexes, see c/shim/lsmt.h. */
const shim = bindShim({
  aenv_lsmt_decode: { args: ["ptr", "u32", "f64", "u32", "u32", "ptr", "ptr"], returns: "i32" },
  aenv_lsmt_merge: { args: ["ptr", "ptr", "ptr", "ptr"], returns: "f64" },
});

/** The four arrays of an index, each of the same length. */
export interface IndexColumns {
  readonly offsets: Float64Array;
  readonly moffsets: Float64Array;
  readonly lengths: Uint16Array;
  readonly tags: Uint16Array;
}

function describe({ offsets, moffsets, lengths, tags }: IndexColumns): BigUint64Array {
  const pointers = new BigUint64Array(new ArrayBuffer(32));
  for (const [i, column] of [offsets, moffsets, lengths, tags].entries()) {
    pointers[i] = column.byteLength === 0 ? 0n : BigInt(ptr(column));
  }
  return pointers;
}

function checkRoom(columns: IndexColumns, entries: number, what: string): void {
  const room = Math.min(
    columns.offsets.length,
    columns.moffsets.length,
    columns.lengths.length,
    columns.tags.length,
  );
  if (!(Number.isInteger(entries) && entries >= 0 && entries <= room)) {
    throw new RangeError(`${what}: ${entries} entries, room for ${room}`);
  }
}

/** Appends decoded mappings to columns; see aenv_lsmt_decode. */
export class MappingDecoder {
  readonly #out: IndexColumns;
  readonly #pointers: BigUint64Array;
  readonly #state = new Float64Array(new ArrayBuffer(16));

  /** `out` needs room for one entry per mapping. */
  constructor(out: IndexColumns) {
    this.#out = out;
    this.#pointers = describe(out);
  }

  /** Entries so far. */
  get count(): number {
    return this.#state[0]!;
  }

  /** Sector that the last mapping ends at. */
  get end(): number {
    return this.#state[1]!;
  }

  /** What follows belongs to another layer: its mappings begin anew. */
  begin(): void {
    this.#state[1] = 0;
  }

  /** False: some mapping is not valid, and the decoder is of no more use. */
  add(
    mappings: Uint8Array,
    count: number,
    options: { readonly dataEnd: number; readonly layer: number; readonly refusePadding: boolean },
  ): boolean {
    if (count * 16 > mappings.byteLength) throw new RangeError(`${count} mappings in too small a buffer`);
    checkRoom(this.#out, this.count + count, "decoding an index");
    const { dataEnd, layer, refusePadding } = options;
    const refuse = refusePadding ? 1 : 0;
    return shim.aenv_lsmt_decode(mappings, count, dataEnd, layer, refuse, this.#pointers, this.#state) === 0;
  }
}

/**
 * Lays entries [topFrom, topTo) of `top` over [bottomFrom, bottomTo) of `bottom` into `out` from entry `at` on and
 * returns where they end. `out` must have room for twice the first and once the second: a mapping of the top may cut
 * one of the bottom's in two.
 */
export function mergeColumns(
  top: IndexColumns,
  topFrom: number,
  topTo: number,
  bottom: IndexColumns,
  bottomFrom: number,
  bottomTo: number,
  out: IndexColumns,
  at: number,
): number {
  if (!(topFrom >= 0 && topFrom <= topTo && bottomFrom >= 0 && bottomFrom <= bottomTo)) {
    throw new RangeError(`merging ${topFrom}..${topTo} over ${bottomFrom}..${bottomTo}`);
  }
  checkRoom(top, topTo, "merging indexes");
  checkRoom(bottom, bottomTo, "merging indexes");
  checkRoom(out, at + 2 * (topTo - topFrom) + (bottomTo - bottomFrom), "merging indexes");
  const range = new Float64Array(new ArrayBuffer(40));
  range.set([topFrom, topTo, bottomFrom, bottomTo, at]);
  return shim.aenv_lsmt_merge(describe(top), describe(bottom), describe(out), range);
}
