import { allocateBig } from "../../../../ffi/bigmem.ts";
import { type IndexColumns, isWide, mergeColumns, type SectorColumn } from "../../../../ffi/lsmt.ts";
import { MAX_MAPPING_SECTORS, MAX_MAPPINGS } from "./format.ts";

/**
 * A read-only index: sorted mappings without overlap as parallel arrays, 12 bytes each, or 20 where the disk or a
 * layer goes on behind 2 TiB. `tags` holds the number of the layer a mapping points into (0 = bottom), with ZEROED_TAG
 * set for explicit zeros.
 */
export interface FlatIndex {
  readonly count: number;
  readonly offsets: SectorColumn;
  readonly lengths: Uint16Array;
  readonly moffsets: SectorColumn;
  readonly tags: Uint16Array;
}

export const ZEROED_TAG = 0x8000;

export const EMPTY_INDEX: FlatIndex = {
  count: 0,
  offsets: new Uint32Array(0),
  lengths: new Uint16Array(0),
  moffsets: new Uint32Array(0),
  tags: new Uint16Array(0),
};

/** Where 32 bits no longer hold every sector that a mapping covers or points to. */
const NARROW_END = 2 ** 32;

/** Collects ascending mappings and joins neighbours that continue each other. */
export class FlatIndexBuilder {
  count = 0;
  #offsets: Float64Array;
  #lengths: Uint16Array;
  #moffsets: Float64Array;
  #tags: Uint16Array;
  /** Where the last of all that was added ends. */
  #end = 0;

  constructor(capacity = 64) {
    const size = Math.max(16, capacity);
    this.#offsets = new Float64Array(size);
    this.#lengths = new Uint16Array(size);
    this.#moffsets = new Float64Array(size);
    this.#tags = new Uint16Array(size);
  }

  /** `length` may exceed one mapping; `offset` must be at or behind the end of what was added before. */
  add(offset: number, length: number, moffset: number, tag: number): void {
    const zeroed = tag >= ZEROED_TAG;
    this.#end = Math.max(this.#end, offset + length, moffset + length);
    let done = 0;
    const last = this.count - 1;
    if (
      last >= 0 &&
      this.#tags[last] === tag &&
      this.#offsets[last]! + this.#lengths[last]! === offset &&
      (zeroed || this.#moffsets[last]! + this.#lengths[last]! === moffset)
    ) {
      done = Math.min(length, MAX_MAPPING_SECTORS - this.#lengths[last]!);
      this.#lengths[last] = this.#lengths[last]! + done;
    }
    for (; done < length; ) {
      const piece = Math.min(length - done, MAX_MAPPING_SECTORS);
      if (this.count === this.#offsets.length) this.#grow();
      const at = this.count++;
      this.#offsets[at] = offset + done;
      this.#lengths[at] = piece;
      this.#moffsets[at] = zeroed ? moffset : moffset + done;
      this.#tags[at] = tag;
      done += piece;
    }
  }

  #grow(): void {
    if (this.count >= MAX_MAPPINGS) throw new RangeError(`index of more than ${MAX_MAPPINGS} mappings`);
    const size = this.#offsets.length * 2;
    const copy = <T extends Float64Array | Uint16Array>(to: T, from: T): T => {
      to.set(from);
      return to;
    };
    this.#offsets = copy(new Float64Array(size), this.#offsets);
    this.#lengths = copy(new Uint16Array(size), this.#lengths);
    this.#moffsets = copy(new Float64Array(size), this.#moffsets);
    this.#tags = copy(new Uint16Array(size), this.#tags);
  }

  finish(): FlatIndex {
    const n = this.count;
    const exact = n === this.#offsets.length;
    const sectors = (column: Float64Array): SectorColumn => {
      if (this.#end <= NARROW_END) return new Uint32Array(column.subarray(0, n));
      return exact ? column : column.slice(0, n);
    };
    return {
      count: n,
      offsets: sectors(this.#offsets),
      lengths: exact ? this.#lengths : this.#lengths.slice(0, n),
      moffsets: sectors(this.#moffsets),
      tags: exact ? this.#tags : this.#tags.slice(0, n),
    };
  }
}

/** Number of the first mapping that ends behind `sector`; `count` when there is none. */
export function findFlat(index: FlatIndex, sector: number): number {
  const { offsets } = index;
  let low = 0;
  let high = index.count;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (offsets[middle]! <= sector) low = middle + 1;
    else high = middle;
  }
  if (low > 0 && offsets[low - 1]! + index.lengths[low - 1]! > sector) return low - 1;
  return low;
}

const BIG_BYTES = 1 << 20;

/** Bytes that a mapping takes in memory. */
export function mappingBytes(wide: boolean): number {
  return wide ? 20 : 12;
}

/** Arrays of `size` entries with undefined content; `wide`: for sectors from 2^32 on. */
export function newColumns(size: number, wide: boolean): IndexColumns {
  const bytes = size * mappingBytes(wide);
  return columnsIn(bytes < BIG_BYTES ? new ArrayBuffer(bytes) : allocateBig(bytes), 0, size, wide);
}

/** Arrays of `size` entries one behind the other in a buffer, from a multiple of 8 on. */
export function columnsIn(buffer: ArrayBuffer, offset: number, size: number, wide: boolean): IndexColumns {
  const sectors = (at: number) =>
    wide ? new Float64Array(buffer, offset + 8 * at, size) : new Uint32Array(buffer, offset + 4 * at, size);
  const rest = offset + 2 * size * (wide ? 8 : 4);
  return {
    offsets: sectors(0),
    moffsets: sectors(size),
    lengths: new Uint16Array(buffer, rest, size),
    tags: new Uint16Array(buffer, rest + 2 * size, size),
  };
}

/** The first `count` entries, in not much more memory than they need. */
export function cutColumns(columns: IndexColumns, count: number): FlatIndex {
  const size = columns.offsets.length;
  if (count === size) return { count, ...columns };
  const wide = isWide(columns);
  // Entries of a big block that were never written to are no memory yet.
  if (count * mappingBytes(wide) >= BIG_BYTES && count >= size / 3) {
    return {
      count,
      offsets: columns.offsets.subarray(0, count),
      lengths: columns.lengths.subarray(0, count),
      moffsets: columns.moffsets.subarray(0, count),
      tags: columns.tags.subarray(0, count),
    };
  }
  const out = newColumns(count, wide);
  out.offsets.set(columns.offsets.subarray(0, count));
  out.lengths.set(columns.lengths.subarray(0, count));
  out.moffsets.set(columns.moffsets.subarray(0, count));
  out.tags.set(columns.tags.subarray(0, count));
  return { count, ...out };
}

/** Lays `top` over `bottom`: where both have a mapping, the top's is kept. Tags are kept. */
export function mergeFlat(top: FlatIndex, bottom: FlatIndex): FlatIndex {
  if (top.count === 0) return bottom;
  if (bottom.count === 0) return top;
  // Every top mapping may cut one of the bottom's in two.
  const out = newColumns(2 * top.count + bottom.count, isWide(top) || isWide(bottom));
  const end = mergeColumns(top, 0, top.count, bottom, 0, bottom.count, out, 0);
  return cutColumns(out, end);
}
