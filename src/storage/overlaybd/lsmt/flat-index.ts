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

/** Lays `top` over `bottom`: where both have a mapping, the top's is kept. Tags are kept. */
export function mergeFlat(top: FlatIndex, bottom: FlatIndex): FlatIndex {
  if (top.count === 0) return bottom;
  if (bottom.count === 0) return top;
  const out = new FlatIndexBuilder(top.count + bottom.count);
  let low = 0;
  // First sector not yet put out of bottom mapping `low`; its start when that is further.
  let covered = 0;
  const addBottomUntil = (limit: number): void => {
    while (low < bottom.count) {
      const offset = bottom.offsets[low]!;
      const end = offset + bottom.lengths[low]!;
      const from = Math.max(offset, covered);
      if (from >= limit) return;
      const to = Math.min(end, limit);
      if (to > from) {
        const tag = bottom.tags[low]!;
        const moffset = bottom.moffsets[low]!;
        out.add(from, to - from, tag >= ZEROED_TAG ? moffset : moffset + (from - offset), tag);
      }
      if (end > limit) {
        covered = limit;
        return;
      }
      low++;
    }
  };
  for (let i = 0; i < top.count; i++) {
    const offset = top.offsets[i]!;
    const length = top.lengths[i]!;
    addBottomUntil(offset);
    out.add(offset, length, top.moffsets[i]!, top.tags[i]!);
    covered = offset + length;
    while (low < bottom.count && bottom.offsets[low]! + bottom.lengths[low]! <= covered) low++;
  }
  addBottomUntil(Number.POSITIVE_INFINITY);
  return out.finish();
}

/** The stack's one index: `indexes` bottom to top, each with its own tags already set. */
export function mergeAll(indexes: readonly FlatIndex[]): FlatIndex {
  if (indexes.length === 0) return EMPTY_INDEX;
  if (indexes.length === 1) return indexes[0]!;
  const middle = indexes.length >>> 1;
  return mergeFlat(mergeAll(indexes.slice(middle)), mergeAll(indexes.slice(0, middle)));
}
