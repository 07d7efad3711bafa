import { allocateBig } from "../../../../ffi/bigmem.ts";
import { type IndexColumns, mergeColumns } from "../../../../ffi/lsmt.ts";
import { MAX_MAPPING_SECTORS, MAX_MAPPINGS } from "./format.ts";

/**
 * A read-only index: sorted mappings without overlap as parallel arrays, 20 bytes each. `tags` holds the
 * number of the layer a mapping points into (0 = bottom), with ZEROED_TAG set for explicit zeros.
 */
export interface FlatIndex {
  readonly count: number;
  readonly offsets: Float64Array;
  readonly lengths: Uint16Array;
  readonly moffsets: Float64Array;
  readonly tags: Uint16Array;
}

export const ZEROED_TAG = 0x8000;

export const EMPTY_INDEX: FlatIndex = {
  count: 0,
  offsets: new Float64Array(0),
  lengths: new Uint16Array(0),
  moffsets: new Float64Array(0),
  tags: new Uint16Array(0),
};

/** Collects ascending mappings and joins neighbours that continue each other. */
export class FlatIndexBuilder {
  count = 0;
  #offsets: Float64Array;
  #lengths: Uint16Array;
  #moffsets: Float64Array;
  #tags: Uint16Array;

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
    return {
      count: n,
      offsets: exact ? this.#offsets : this.#offsets.slice(0, n),
      lengths: exact ? this.#lengths : this.#lengths.slice(0, n),
      moffsets: exact ? this.#moffsets : this.#moffsets.slice(0, n),
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

/** Bytes that a mapping takes in memory. */
export const FLAT_MAPPING_BYTES = 20;
const BIG_BYTES = 1 << 20;

/** Arrays of `size` entries with undefined content. */
export function newColumns(size: number): IndexColumns {
  const bytes = size * FLAT_MAPPING_BYTES;
  return columnsIn(bytes < BIG_BYTES ? new ArrayBuffer(bytes) : allocateBig(bytes), 0, size);
}

/** Arrays of `size` entries one behind the other in a buffer, from a multiple of 8 on. */
export function columnsIn(buffer: ArrayBuffer, offset: number, size: number): IndexColumns {
  return {
    offsets: new Float64Array(buffer, offset, size),
    moffsets: new Float64Array(buffer, offset + 8 * size, size),
    lengths: new Uint16Array(buffer, offset + 16 * size, size),
    tags: new Uint16Array(buffer, offset + 18 * size, size),
  };
}

/** Every top mapping may cut one of the bottom's in two. */
function mergedBound(topCount: number, bottomCount: number): number {
  return 2 * topCount + bottomCount;
}

/**
 * The first `count` entries, in not much more memory than they need. `touched`: entries that were ever written to;
 * what lies behind them in a big block is no memory yet, so such columns are kept as they are instead of copied.
 */
export function cutColumns(
  columns: IndexColumns,
  count: number,
  touched = columns.offsets.length,
): FlatIndex {
  const size = columns.offsets.length;
  if (count === size) return { count, ...columns };
  if (size * FLAT_MAPPING_BYTES >= BIG_BYTES && count >= 0.75 * touched) {
    return {
      count,
      offsets: columns.offsets.subarray(0, count),
      lengths: columns.lengths.subarray(0, count),
      moffsets: columns.moffsets.subarray(0, count),
      tags: columns.tags.subarray(0, count),
    };
  }
  const out = newColumns(count);
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
  const out = newColumns(mergedBound(top.count, bottom.count));
  const end = mergeColumns(top, 0, top.count, bottom, 0, bottom.count, out, 0);
  return cutColumns(out, end, end);
}

/** The stack's one index: `indexes` bottom to top, each with its own tags already set. */
export function mergeAll(indexes: readonly FlatIndex[]): FlatIndex {
  const used = indexes.filter((index) => index.count > 0);
  if (used.length === 0) return EMPTY_INDEX;
  if (used.length === 1) return used[0]!;
  let total = 0;
  for (const index of used) total += index.count;
  const columns = newColumns(total);
  const ends: number[] = [];
  let end = 0;
  for (const index of used) {
    columns.offsets.set(index.offsets, end);
    columns.lengths.set(index.lengths, end);
    columns.moffsets.set(index.moffsets, end);
    columns.tags.set(index.tags, end);
    end += index.count;
    ends.push(end);
  }
  return mergeInPlace(columns, ends);
}

/** The same with the indexes one behind the other in `columns`, which are used up; `ends[i]`: where index i ends. */
export function mergeInPlace(columns: IndexColumns, ends: readonly number[]): FlatIndex {
  // Neighbours are merged in rounds, from one set of arrays into the other.
  let from = columns;
  let rest = ends.filter((end, i) => end > (ends[i - 1] ?? 0));
  let end = rest.at(-1) ?? 0;
  let to = newColumns(0);
  let [fromTouched, toTouched] = [columns.offsets.length, 0];
  while (rest.length > 1) {
    // All but the cuts of bottom mappings in two fit into as much as there was; the bound is twice that.
    if (to.offsets.length < 2 * end) {
      to = newColumns(2 * end);
      toTouched = 0;
    }
    const merged: number[] = [];
    let at = 0;
    for (let i = 0; i < rest.length; i += 2) {
      const start = i === 0 ? 0 : rest[i - 1]!;
      const middle = rest[i]!;
      const stop = i + 1 < rest.length ? rest[i + 1]! : middle;
      at = mergeColumns(from, middle, stop, from, start, middle, to, at);
      merged.push(at);
    }
    rest = merged;
    end = at;
    [from, to] = [to, from];
    [fromTouched, toTouched] = [Math.max(toTouched, end), fromTouched];
  }
  return cutColumns(from, end, fromTouched);
}
