import { allocateBig } from "../../../../ffi/bigmem.ts";
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

/** The arrays of indexes, several one behind the other. */
export interface Columns {
  readonly offsets: Float64Array;
  readonly lengths: Uint16Array;
  readonly moffsets: Float64Array;
  readonly tags: Uint16Array;
}

/** Bytes that a mapping takes in memory. */
export const FLAT_MAPPING_BYTES = 20;
const BIG_BYTES = 1 << 20;

/** Arrays of `size` entries with undefined content. */
export function newColumns(size: number): Columns {
  const bytes = size * FLAT_MAPPING_BYTES;
  const buffer = bytes < BIG_BYTES ? new ArrayBuffer(bytes) : allocateBig(bytes);
  return {
    offsets: new Float64Array(buffer, 0, size),
    moffsets: new Float64Array(buffer, 8 * size, size),
    lengths: new Uint16Array(buffer, 16 * size, size),
    tags: new Uint16Array(buffer, 18 * size, size),
  };
}

/** Every top mapping may cut one of the bottom's in two. */
function mergedBound(topCount: number, bottomCount: number): number {
  return 2 * topCount + bottomCount;
}

/**
 * Lays entries [topFrom, topTo) of `top` over entries [bottomFrom, bottomTo) of `bottom` into `out` from entry `at`
 * on (which has room, see mergedBound) and returns where they end. The inner loop of opening an image: it runs a
 * few times for every mapping of every layer, so it is one flat function over typed arrays.
 */
function mergeColumns(
  top: Columns,
  topFrom: number,
  topTo: number,
  bottom: Columns,
  bottomFrom: number,
  bottomTo: number,
  out: Columns,
  at: number,
): number {
  const { offsets: topOffsets, lengths: topLengths, moffsets: topMoffsets, tags: topTags } = top;
  const {
    offsets: bottomOffsets,
    lengths: bottomLengths,
    moffsets: bottomMoffsets,
    tags: bottomTags,
  } = bottom;
  const { offsets, lengths, moffsets, tags } = out;
  let next = at;
  let t = topFrom;
  let b = bottomFrom;
  // First sector that is not put out yet.
  let covered = 0;
  let topOffset = t < topTo ? topOffsets[t]! : Number.POSITIVE_INFINITY;
  // What the last entry put out is continued by.
  let lastEnd = -1;
  let lastTarget = -1;
  let lastTag = -1;
  let lastLength = 0;
  while (t < topTo || b < bottomTo) {
    let offset: number;
    let length: number;
    let moffset: number;
    let tag: number;
    if (b < bottomTo) {
      const start = bottomOffsets[b]!;
      const end = start + bottomLengths[b]!;
      if (end <= covered) {
        b++;
        continue;
      }
      offset = Math.max(start, covered);
      if (offset < topOffset) {
        tag = bottomTags[b]!;
        moffset = bottomMoffsets[b]!;
        if (tag < ZEROED_TAG) moffset += offset - start;
        if (end <= topOffset) {
          length = end - offset;
          b++;
        } else {
          length = topOffset - offset;
          covered = topOffset;
        }
      } else {
        offset = topOffset;
        length = topLengths[t]!;
        moffset = topMoffsets[t]!;
        tag = topTags[t]!;
        covered = offset + length;
        t++;
        topOffset = t < topTo ? topOffsets[t]! : Number.POSITIVE_INFINITY;
      }
    } else {
      offset = topOffset;
      length = topLengths[t]!;
      moffset = topMoffsets[t]!;
      tag = topTags[t]!;
      t++;
      topOffset = t < topTo ? topOffsets[t]! : Number.POSITIVE_INFINITY;
    }
    if (
      lastEnd === offset &&
      lastTag === tag &&
      lastLength + length <= MAX_MAPPING_SECTORS &&
      (tag >= ZEROED_TAG || lastTarget === moffset)
    ) {
      lastLength += length;
      lengths[next - 1] = lastLength;
    } else {
      offsets[next] = offset;
      lengths[next] = length;
      moffsets[next] = moffset;
      tags[next] = tag;
      next++;
      lastTag = tag;
      lastLength = length;
    }
    lastEnd = offset + length;
    lastTarget = moffset + length;
  }
  return next;
}

function slice(columns: Columns, from: number, to: number): FlatIndex {
  const out = newColumns(to - from);
  out.offsets.set(columns.offsets.subarray(from, to));
  out.lengths.set(columns.lengths.subarray(from, to));
  out.moffsets.set(columns.moffsets.subarray(from, to));
  out.tags.set(columns.tags.subarray(from, to));
  return { count: to - from, ...out };
}

/** Lays `top` over `bottom`: where both have a mapping, the top's is kept. Tags are kept. */
export function mergeFlat(top: FlatIndex, bottom: FlatIndex): FlatIndex {
  if (top.count === 0) return bottom;
  if (bottom.count === 0) return top;
  const out = newColumns(mergedBound(top.count, bottom.count));
  const end = mergeColumns(top, 0, top.count, bottom, 0, bottom.count, out, 0);
  return slice(out, 0, end);
}

/** The stack's one index: `indexes` bottom to top, each with its own tags already set. */
export function mergeAll(indexes: readonly FlatIndex[]): FlatIndex {
  const used = indexes.filter((index) => index.count > 0);
  if (used.length === 0) return EMPTY_INDEX;
  if (used.length === 1) return used[0]!;
  // Neighbours are merged in rounds, from one set of arrays into the other.
  let total = 0;
  for (const index of used) total += index.count;
  let from = newColumns(total);
  let ends: number[] = [];
  let end = 0;
  for (const index of used) {
    from.offsets.set(index.offsets, end);
    from.lengths.set(index.lengths, end);
    from.moffsets.set(index.moffsets, end);
    from.tags.set(index.tags, end);
    end += index.count;
    ends.push(end);
  }
  let to = newColumns(0);
  while (ends.length > 1) {
    // All but the cuts of bottom mappings in two fit into as much as there was; the bound is twice that.
    if (to.offsets.length < 2 * end) to = newColumns(2 * end);
    const merged: number[] = [];
    let at = 0;
    for (let i = 0; i < ends.length; i += 2) {
      const start = i === 0 ? 0 : ends[i - 1]!;
      const middle = ends[i]!;
      const stop = i + 1 < ends.length ? ends[i + 1]! : middle;
      at = mergeColumns(from, middle, stop, from, start, middle, to, at);
      merged.push(at);
    }
    ends = merged;
    end = at;
    [from, to] = [to, from];
  }
  return slice(from, 0, end);
}
