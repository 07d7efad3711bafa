import type { ChunkedIndex } from "./chunked-index.ts";
import { type FlatIndex, findFlat, ZEROED_TAG } from "./flat-index.ts";

/**
 * Where the sectors of one request come from, in order and without gaps. Plans are made without I/O; an
 * executor (plain reads, a ring, memory in tests) runs them. One plan object serves many requests.
 */
export class ReadPlan {
  /** Number of segments. */
  count = 0;
  /** Sectors the segments cover. */
  sectors = 0;
  /** Layer number per segment (0 = bottom lower, number of lowers = upper), -1 for zeros. */
  layers = new Int16Array(16);
  /** First sector in the layer file per segment (0 for zeros). */
  moffsets = new Float64Array(16);
  lengths = new Float64Array(16);

  reset(): void {
    this.count = 0;
    this.sectors = 0;
  }

  add(layer: number, moffset: number, length: number): void {
    this.sectors += length;
    const last = this.count - 1;
    if (
      last >= 0 &&
      this.layers[last] === layer &&
      (layer < 0 || this.moffsets[last]! + this.lengths[last]! === moffset)
    ) {
      this.lengths[last] = this.lengths[last]! + length;
      return;
    }
    if (this.count === this.layers.length) {
      const size = this.count * 2;
      const layers = new Int16Array(size);
      const moffsets = new Float64Array(size);
      const lengths = new Float64Array(size);
      layers.set(this.layers);
      moffsets.set(this.moffsets);
      lengths.set(this.lengths);
      this.layers = layers;
      this.moffsets = moffsets;
      this.lengths = lengths;
    }
    const at = this.count++;
    this.layers[at] = layer;
    this.moffsets[at] = layer < 0 ? 0 : moffset;
    this.lengths[at] = length;
  }
}

/** What a mapping says about a range: data of a layer, explicit zeros, or (unmapped) nothing. */
export type RangeVisitor = (
  offset: number,
  length: number,
  layer: number,
  moffset: number,
  zeroed: boolean,
) => void;

/** Visits the mapped parts of [offset, offset + length) of one read-only index, in order. */
export function visitFlat(index: FlatIndex, offset: number, length: number, visit: RangeVisitor): void {
  const end = offset + length;
  for (let at = findFlat(index, offset); at < index.count; at++) {
    const start = index.offsets[at]!;
    if (start >= end) return;
    const from = Math.max(start, offset);
    const to = Math.min(start + index.lengths[at]!, end);
    const tag = index.tags[at]!;
    const moffset = index.moffsets[at]!;
    if (tag >= ZEROED_TAG) visit(from, to - from, tag - ZEROED_TAG, moffset, true);
    else visit(from, to - from, tag, moffset + (from - start), false);
  }
}

/** Visits the mapped parts of a range of a whole stack: the upper decides, gaps show the base. */
export function visitStack(
  upper: ChunkedIndex | undefined,
  upperLayer: number,
  base: FlatIndex,
  offset: number,
  length: number,
  visit: RangeVisitor,
): void {
  let position = offset;
  if (upper !== undefined && upper.count > 0) {
    upper.visit(offset, length, (from, partLength, moffset, zeroed) => {
      if (from > position) visitFlat(base, position, from - position, visit);
      visit(from, partLength, upperLayer, moffset, zeroed);
      position = from + partLength;
    });
  }
  if (position < offset + length) visitFlat(base, position, offset + length - position, visit);
}

/** Fills `plan` for a read of `length` sectors from `offset`. */
export function planRead(
  upper: ChunkedIndex | undefined,
  upperLayer: number,
  base: FlatIndex,
  offset: number,
  length: number,
  plan: ReadPlan,
): void {
  plan.reset();
  if (upper === undefined || upper.count === 0) {
    // Most reads of an image lie in one piece.
    const at = findFlat(base, offset);
    if (at < base.count) {
      const start = base.offsets[at]!;
      const tag = base.tags[at]!;
      if (start <= offset && offset + length <= start + base.lengths[at]! && tag < ZEROED_TAG) {
        plan.add(tag, base.moffsets[at]! + (offset - start), length);
        return;
      }
    }
  }
  let position = offset;
  visitStack(upper, upperLayer, base, offset, length, (from, partLength, layer, moffset, zeroed) => {
    if (from > position) plan.add(-1, 0, from - position);
    plan.add(zeroed ? -1 : layer, moffset, partLength);
    position = from + partLength;
  });
  if (position < offset + length) plan.add(-1, 0, offset + length - position);
}
