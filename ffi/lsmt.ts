import { type Pointer, ptr } from "bun:ffi";
import { bindShim } from "./lib.ts";

/** Inner loops over indexes, see c/shim/lsmt.h. */
const shim = bindShim({
  aenv_lsmt_merge: { args: ["ptr", "ptr", "ptr", "ptr"], returns: "f64" },
  aenv_lsmt_merger_open: { args: ["u32", "u32", "ptr", "u32", "ptr", "f64"], returns: "ptr" },
  aenv_lsmt_merger_feed: { args: ["ptr", "u32", "u32", "f64", "u32", "u32"], returns: "i32" },
  aenv_lsmt_merger_run: { args: ["ptr"], returns: "i32" },
  aenv_lsmt_merger_move: { args: ["ptr", "ptr", "f64"], returns: "void" },
  aenv_lsmt_merger_count: { args: ["ptr"], returns: "f64" },
  aenv_lsmt_merger_close: { args: ["ptr"], returns: "void" },
});

/** Sectors of offsets: 32 bits each where that is enough, see c/shim/lsmt.h. */
export type SectorColumn = Uint32Array | Float64Array;

/** The four arrays of an index, each of the same length; the sectors' of the same kind. */
export interface IndexColumns {
  readonly offsets: SectorColumn;
  readonly moffsets: SectorColumn;
  readonly lengths: Uint16Array;
  readonly tags: Uint16Array;
}

/** Whether columns hold sectors from 2^32 on. */
export function isWide({ offsets }: IndexColumns): boolean {
  return offsets instanceof Float64Array;
}

function describe(columns: IndexColumns): BigUint64Array {
  const { offsets, moffsets, lengths, tags } = columns;
  const words = new BigUint64Array(new ArrayBuffer(40));
  for (const [i, column] of [offsets, moffsets, lengths, tags].entries()) {
    words[i] = column.byteLength === 0 ? 0n : BigInt(ptr(column));
  }
  words[4] = isWide(columns) ? 1n : 0n;
  return words;
}

function roomIn(columns: IndexColumns, what: string): number {
  const { offsets, moffsets, lengths, tags } = columns;
  if (offsets.BYTES_PER_ELEMENT !== moffsets.BYTES_PER_ELEMENT)
    throw new RangeError(`${what}: mixed columns`);
  return Math.min(offsets.length, moffsets.length, lengths.length, tags.length);
}

function checkRoom(columns: IndexColumns, entries: number, what: string): void {
  const room = roomIn(columns, what);
  if (!(Number.isInteger(entries) && entries >= 0 && entries <= room)) {
    throw new RangeError(`${what}: ${entries} entries, room for ${room}`);
  }
}

const EINVAL = 22;
const ENOSPC = 28;
const EOVERFLOW = 75;

/** Merges the indexes of many finished layers into columns as they are read, see c/shim/lsmt.h. */
export class IndexMerger implements Disposable {
  readonly #layers: number;
  readonly #entries: number;
  /** The other side has the addresses only: here they are kept. */
  readonly #buffers: Uint8Array;
  #out: IndexColumns;
  #handle: Pointer | undefined;

  /** `entries`: mappings that a layer is fed at once. Twice the mappings of all layers always fit into `out`. */
  constructor(options: {
    readonly layers: number;
    readonly firstTag: number;
    readonly entries: number;
    readonly out: IndexColumns;
  }) {
    const { layers, firstTag, entries, out } = options;
    if (!(Number.isInteger(entries) && entries > 0)) throw new RangeError(`${entries} mappings at once`);
    this.#layers = layers;
    this.#entries = entries;
    this.#out = out;
    this.#buffers = new Uint8Array(new ArrayBuffer(layers * entries * 16));
    const capacity = roomIn(out, "merging indexes");
    const handle = shim.aenv_lsmt_merger_open(
      layers,
      firstTag,
      this.#buffers,
      entries,
      describe(out),
      capacity,
    );
    if (handle === null || typeof handle === "bigint") {
      throw new RangeError(`cannot merge ${layers} indexes with tags from ${firstTag} on`);
    }
    this.#handle = handle;
  }

  get #open(): Pointer {
    if (this.#handle === undefined) throw new Error("index merger: used after close");
    return this.#handle;
  }

  /** Where the next mappings of a layer are put before it is fed. */
  bufferOf(layer: number): Uint8Array {
    const bytes = this.#entries * 16;
    return this.#buffers.subarray(layer * bytes, (layer + 1) * bytes);
  }

  /**
   * Takes `count` mappings from the layer's buffer, which must have been asked for (or never been fed). False: one of
   * them is not valid, and the merger is of no more use.
   */
  feed(
    layer: number,
    count: number,
    options: { readonly dataEnd: number; readonly refusePadding: boolean; readonly last: boolean },
  ): boolean {
    const { dataEnd, refusePadding, last } = options;
    const refuse = refusePadding ? 1 : 0;
    const result = shim.aenv_lsmt_merger_feed(this.#open, layer, count, dataEnd, refuse, last ? 1 : 0);
    if (result === -EINVAL)
      throw new RangeError(`index merger: layer ${layer} fed ${count} mappings out of turn`);
    return result === 0;
  }

  /** The layer to feed next; or `too narrow` or `full`: the columns are, see `moveTo`. */
  run(): number | "done" | "too narrow" | "full" {
    const result = shim.aenv_lsmt_merger_run(this.#open);
    if (result === -EOVERFLOW) return "too narrow";
    if (result === -ENOSPC) return "full";
    return result === this.#layers ? "done" : result;
  }

  /** Goes on in other columns, which get what is merged already. */
  moveTo(out: IndexColumns): void {
    const { count } = this;
    checkRoom(out, count, "merging indexes");
    out.offsets.set(this.#out.offsets.subarray(0, count));
    out.moffsets.set(this.#out.moffsets.subarray(0, count));
    out.lengths.set(this.#out.lengths.subarray(0, count));
    out.tags.set(this.#out.tags.subarray(0, count));
    shim.aenv_lsmt_merger_move(this.#open, describe(out), roomIn(out, "merging indexes"));
    this.#out = out;
  }

  /** What is merged so far is in the first `count` entries of these. */
  get columns(): IndexColumns {
    return this.#out;
  }

  /** Entries in the columns. */
  get count(): number {
    return shim.aenv_lsmt_merger_count(this.#open);
  }

  [Symbol.dispose](): void {
    if (this.#handle === undefined) return;
    shim.aenv_lsmt_merger_close(this.#open);
    this.#handle = undefined;
  }
}

/**
 * Lays entries [topFrom, topTo) of `top` over [bottomFrom, bottomTo) of `bottom` into `out` from entry `at` on and
 * returns where they end. `out` must have room for twice the first and once the second: a mapping of the top may cut
 * one of the bottom's in two. It must be wide if one of them is.
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
  if (!isWide(out) && (isWide(top) || isWide(bottom)))
    throw new RangeError("merging wide indexes into narrow ones");
  checkRoom(top, topTo, "merging indexes");
  checkRoom(bottom, bottomTo, "merging indexes");
  checkRoom(out, at + 2 * (topTo - topFrom) + (bottomTo - bottomFrom), "merging indexes");
  const range = new Float64Array(new ArrayBuffer(40));
  range.set([topFrom, topTo, bottomFrom, bottomTo, at]);
  return shim.aenv_lsmt_merge(describe(top), describe(bottom), describe(out), range);
}
