import { type FlatIndex, FlatIndexBuilder, ZEROED_TAG } from "./flat-index.ts";
import { MAX_MAPPING_SECTORS, MAX_MAPPINGS } from "./format.ts";

const LEAF_ENTRIES = 256;
/** Most leaves per allocation (72 KiB); the first allocations are smaller, an upper may stay empty. */
const SLAB_LEAVES = 16;
/** In `lengths`: bit 15 marks explicit zeros, the rest is the length. */
const ZEROED = 0x8000;
const LENGTH_MASK = 0x3fff;

interface Leaf {
  count: number;
  readonly offsets: Float64Array;
  readonly moffsets: Float64Array;
  readonly lengths: Uint16Array;
}

/** Leaves are cut from big buffers and used again: small typed arrays of their own would cost twice the memory. */
class LeafPool {
  readonly #free: Leaf[] = [];
  #nextLeaves = 1;

  take(): Leaf {
    if (this.#free.length === 0) this.#grow();
    const leaf = this.#free.pop()!;
    leaf.count = 0;
    return leaf;
  }

  give(leaf: Leaf): void {
    this.#free.push(leaf);
  }

  #grow(): void {
    const leaves = this.#nextLeaves;
    this.#nextLeaves = Math.min(SLAB_LEAVES, 2 * leaves);
    const total = leaves * LEAF_ENTRIES;
    const offsets = new Float64Array(total);
    const moffsets = new Float64Array(total);
    const lengths = new Uint16Array(total);
    for (let i = leaves - 1; i >= 0; i--) {
      const from = i * LEAF_ENTRIES;
      const to = from + LEAF_ENTRIES;
      this.#free.push({
        count: 0,
        offsets: offsets.subarray(from, to),
        moffsets: moffsets.subarray(from, to),
        lengths: lengths.subarray(from, to),
      });
    }
  }
}

/**
 * The writable layer's index: mappings sorted by offset, without overlap, in leaves of 256 entries under one
 * sorted array of leaf starts. 18 bytes an entry, 26 with the usual fill of leaves under random inserts; an
 * insert moves at most one leaf's entries. `replace` is the only way to change it.
 */
export class ChunkedIndex {
  count = 0;
  /** Sum of the lengths of data mappings, in sectors. */
  dataSectors = 0;
  /** Told of every range of the data file that loses its mapping. */
  onUnmap: ((moffset: number, length: number) => void) | undefined;
  readonly #pool = new LeafPool();
  #leaves: Leaf[] = [];
  #firsts: number[] = [];

  /** Number of the leaf that holds the last mapping starting at or before `sector` (0 when there is none). */
  #findLeaf(sector: number): number {
    const firsts = this.#firsts;
    let low = 0;
    let high = firsts.length;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (firsts[middle]! <= sector) low = middle + 1;
      else high = middle;
    }
    return low === 0 ? 0 : low - 1;
  }

  /** Subscript within the leaf of its first entry that ends behind `sector`; the leaf's count when none does. */
  #findEntry(leaf: Leaf, sector: number): number {
    const { offsets } = leaf;
    let low = 0;
    let high = leaf.count;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (offsets[middle]! <= sector) low = middle + 1;
      else high = middle;
    }
    if (low > 0 && offsets[low - 1]! + (leaf.lengths[low - 1]! & LENGTH_MASK) > sector) return low - 1;
    return low;
  }

  /** First mapped sector at or behind `sector`, undefined when none follows. */
  nextMapped(sector: number): number | undefined {
    const number = this.#findLeaf(sector);
    const leaf = this.#leaves[number];
    if (leaf === undefined) return undefined;
    const at = this.#findEntry(leaf, sector);
    if (at < leaf.count) return Math.max(sector, leaf.offsets[at]!);
    return this.#firsts[number + 1];
  }

  /**
   * Calls `visit` for the parts of mappings inside [offset, offset + length), in order. `visit` must not
   * change the index.
   */
  visit(
    offset: number,
    length: number,
    visit: (offset: number, length: number, moffset: number, zeroed: boolean) => void,
  ): void {
    const end = offset + length;
    let leafNumber = this.#findLeaf(offset);
    let leaf = this.#leaves[leafNumber];
    if (leaf === undefined) return;
    let at = this.#findEntry(leaf, offset);
    for (;;) {
      if (at === leaf.count) {
        leaf = this.#leaves[++leafNumber];
        if (leaf === undefined) return;
        at = 0;
      }
      const start = leaf.offsets[at]!;
      if (start >= end) return;
      const word = leaf.lengths[at]!;
      const from = Math.max(start, offset);
      const to = Math.min(start + (word & LENGTH_MASK), end);
      const zeroed = word >= ZEROED;
      const moffset = leaf.moffsets[at]!;
      visit(from, to - from, zeroed ? moffset : moffset + (from - start), zeroed);
      at++;
    }
  }

  /** Maps [offset, offset + length) to `moffset` (or to zeros), over whatever was there. */
  replace(offset: number, length: number, moffset: number, zeroed: boolean): void {
    if (!(length > 0 && length <= MAX_MAPPING_SECTORS)) throw new RangeError(`mapping of ${length} sectors`);
    const end = offset + length;
    const word = zeroed ? length | ZEROED : length;
    if (!zeroed) this.dataSectors += length;
    let leafNumber = this.#findLeaf(offset);
    let leaf = this.#leaves[leafNumber];
    if (leaf === undefined) {
      this.#insert(0, 0, offset, word, moffset);
      return;
    }
    let at = this.#findEntry(leaf, offset);
    if (at < leaf.count && leaf.offsets[at]! < offset) {
      const start = leaf.offsets[at]!;
      const oldWord = leaf.lengths[at]!;
      const oldEnd = start + (oldWord & LENGTH_MASK);
      const oldZeroed = oldWord & ZEROED;
      if (!oldZeroed) this.#lose(leaf.moffsets[at]! + (offset - start), Math.min(oldEnd, end) - offset);
      leaf.lengths[at] = (offset - start) | oldZeroed;
      if (oldEnd > end) {
        const oldMoffset = leaf.moffsets[at]!;
        this.#insert(
          leafNumber,
          at + 1,
          end,
          (oldEnd - end) | oldZeroed,
          oldZeroed ? oldMoffset : oldMoffset + (end - start),
        );
        // The insert may have split the leaf: find the place again.
        leafNumber = this.#findLeaf(offset);
        leaf = this.#leaves[leafNumber]!;
        at = this.#findEntry(leaf, offset);
        this.#insert(leafNumber, at, offset, word, moffset);
        return;
      }
      at++;
    }
    // From here on every overlapped entry starts at or behind `offset`. The first one covered is reused.
    let reused: { leaf: Leaf; leafNumber: number; at: number } | undefined;
    let scanLeaf = leafNumber;
    let scanAt = at;
    for (;;) {
      const current = this.#leaves[scanLeaf];
      if (current === undefined) break;
      let stop = scanAt;
      while (stop < current.count && current.offsets[stop]! + (current.lengths[stop]! & LENGTH_MASK) <= end) {
        if (current.lengths[stop]! < ZEROED) this.#lose(current.moffsets[stop]!, current.lengths[stop]!);
        stop++;
      }
      if (stop > scanAt && reused === undefined) {
        reused = { leaf: current, leafNumber: scanLeaf, at: scanAt };
        scanAt++;
      }
      const reachedEnd = stop === current.count;
      if (stop > scanAt) this.#remove(current, scanAt, stop);
      if (scanAt === 0 && current.count > 0) this.#firsts[scanLeaf] = current.offsets[0]!;
      if (!reachedEnd) {
        // `current.offsets[scanAt]` is the first entry that ends behind the range.
        this.#cutHead(current, scanLeaf, scanAt, end);
        break;
      }
      if (current.count === 0) {
        this.#pool.give(current);
        this.#leaves.splice(scanLeaf, 1);
        this.#firsts.splice(scanLeaf, 1);
      } else {
        scanLeaf++;
      }
      scanAt = 0;
    }
    if (reused !== undefined) {
      reused.leaf.offsets[reused.at] = offset;
      reused.leaf.lengths[reused.at] = word;
      reused.leaf.moffsets[reused.at] = moffset;
      if (reused.at === 0) this.#firsts[reused.leafNumber] = offset;
      this.#join(reused.leaf, reused.at);
      this.#shrink(reused.leafNumber);
      return;
    }
    this.#insert(leafNumber, at, offset, word, moffset);
  }

  #lose(moffset: number, length: number): void {
    this.dataSectors -= length;
    this.onUnmap?.(moffset, length);
  }

  #cutHead(leaf: Leaf, leafNumber: number, at: number, end: number): void {
    const start = leaf.offsets[at]!;
    if (start >= end) return;
    const word = leaf.lengths[at]!;
    const cut = end - start;
    leaf.offsets[at] = end;
    leaf.lengths[at] = word - cut;
    if (word < ZEROED) {
      const moffset = leaf.moffsets[at]!;
      leaf.moffsets[at] = moffset + cut;
      this.#lose(moffset, cut);
    }
    if (at === 0) this.#firsts[leafNumber] = end;
  }

  #remove(leaf: Leaf, from: number, to: number): void {
    leaf.offsets.copyWithin(from, to, leaf.count);
    leaf.moffsets.copyWithin(from, to, leaf.count);
    leaf.lengths.copyWithin(from, to, leaf.count);
    leaf.count -= to - from;
    this.count -= to - from;
  }

  /** Joins two leaves that have become small, so that memory follows the number of mappings. */
  #shrink(leafNumber: number): void {
    const leaf = this.#leaves[leafNumber]!;
    if (leaf.count >= LEAF_ENTRIES / 4) return;
    const right = this.#leaves[leafNumber + 1];
    if (right === undefined || leaf.count + right.count > LEAF_ENTRIES / 2) return;
    leaf.offsets.set(right.offsets.subarray(0, right.count), leaf.count);
    leaf.moffsets.set(right.moffsets.subarray(0, right.count), leaf.count);
    leaf.lengths.set(right.lengths.subarray(0, right.count), leaf.count);
    leaf.count += right.count;
    this.#pool.give(right);
    this.#leaves.splice(leafNumber + 1, 1);
    this.#firsts.splice(leafNumber + 1, 1);
  }

  /** Joins entry `at` with its neighbours in the leaf where ranges and targets continue. */
  #join(leaf: Leaf, at: number): void {
    const continues = (left: number): boolean => {
      const word = leaf.lengths[left]!;
      const next = leaf.lengths[left + 1]!;
      const length = word & LENGTH_MASK;
      return (
        word >= ZEROED === next >= ZEROED &&
        leaf.offsets[left]! + length === leaf.offsets[left + 1]! &&
        length + (next & LENGTH_MASK) <= MAX_MAPPING_SECTORS &&
        (word >= ZEROED || leaf.moffsets[left]! + length === leaf.moffsets[left + 1]!)
      );
    };
    if (at + 1 < leaf.count && continues(at)) {
      leaf.lengths[at] = leaf.lengths[at]! + (leaf.lengths[at + 1]! & LENGTH_MASK);
      this.#remove(leaf, at + 1, at + 2);
    }
    if (at > 0 && continues(at - 1)) {
      leaf.lengths[at - 1] = leaf.lengths[at - 1]! + (leaf.lengths[at]! & LENGTH_MASK);
      this.#remove(leaf, at, at + 1);
    }
  }

  #insert(leafNumber: number, at: number, offset: number, word: number, moffset: number): void {
    if (this.count >= MAX_MAPPINGS) throw new RangeError(`index of more than ${MAX_MAPPINGS} mappings`);
    let leaf = this.#leaves[leafNumber];
    let number = leafNumber;
    let entry = at;
    if (leaf === undefined) {
      leaf = this.#pool.take();
      this.#leaves.push(leaf);
      this.#firsts.push(offset);
      number = this.#leaves.length - 1;
      entry = 0;
    } else if (leaf.count === LEAF_ENTRIES) {
      const right = this.#pool.take();
      // Appending at the very end leaves the full leaf full, so that sequential writes waste nothing.
      const keep =
        entry === LEAF_ENTRIES && number === this.#leaves.length - 1 ? LEAF_ENTRIES : LEAF_ENTRIES / 2;
      right.offsets.set(leaf.offsets.subarray(keep));
      right.moffsets.set(leaf.moffsets.subarray(keep));
      right.lengths.set(leaf.lengths.subarray(keep));
      right.count = LEAF_ENTRIES - keep;
      leaf.count = keep;
      this.#leaves.splice(number + 1, 0, right);
      this.#firsts.splice(number + 1, 0, right.count > 0 ? right.offsets[0]! : offset);
      if (entry > keep || keep === LEAF_ENTRIES) {
        leaf = right;
        number++;
        entry -= keep;
      }
    }
    if (entry < leaf.count) {
      leaf.offsets.copyWithin(entry + 1, entry, leaf.count);
      leaf.moffsets.copyWithin(entry + 1, entry, leaf.count);
      leaf.lengths.copyWithin(entry + 1, entry, leaf.count);
    }
    leaf.offsets[entry] = offset;
    leaf.moffsets[entry] = moffset;
    leaf.lengths[entry] = word;
    leaf.count++;
    this.count++;
    if (entry === 0) this.#firsts[number] = offset;
    this.#join(leaf, entry);
  }

  /**
   * Calls `visit` for up to `limit` whole mappings from the first that ends behind `sector` on, in order.
   * Returns where to go on, undefined at the end. `visit` must not change the index.
   */
  scan(
    sector: number,
    limit: number,
    visit: (offset: number, length: number, moffset: number, zeroed: boolean) => void,
  ): number | undefined {
    let leafNumber = this.#findLeaf(sector);
    let leaf = this.#leaves[leafNumber];
    if (leaf === undefined) return undefined;
    let at = this.#findEntry(leaf, sector);
    for (let left = limit; ; left--) {
      if (at === leaf.count) {
        leaf = this.#leaves[++leafNumber];
        if (leaf === undefined) return undefined;
        at = 0;
      }
      if (left === 0) return leaf.offsets[at]!;
      const word = leaf.lengths[at]!;
      visit(leaf.offsets[at]!, word & LENGTH_MASK, leaf.moffsets[at]!, word >= ZEROED);
      at++;
    }
  }

  /** A copy as a read-only index whose mappings all point into layer `layer`. */
  toFlat(layer: number): FlatIndex {
    const out = new FlatIndexBuilder(this.count);
    for (const leaf of this.#leaves) {
      for (let i = 0; i < leaf.count; i++) {
        const word = leaf.lengths[i]!;
        const tag = word >= ZEROED ? layer | ZEROED_TAG : layer;
        out.add(leaf.offsets[i]!, word & LENGTH_MASK, leaf.moffsets[i]!, tag);
      }
    }
    return out.finish();
  }

  /** Throws when the structure contradicts itself; for tests. */
  checkInvariants(): void {
    let previousEnd = -1;
    let count = 0;
    let data = 0;
    for (const [number, leaf] of this.#leaves.entries()) {
      if (leaf.count === 0 || leaf.count > LEAF_ENTRIES)
        throw new Error(`leaf ${number} has ${leaf.count} entries`);
      if (this.#firsts[number] !== leaf.offsets[0]) throw new Error(`first of leaf ${number} is stale`);
      for (let i = 0; i < leaf.count; i++) {
        const length = leaf.lengths[i]! & LENGTH_MASK;
        if (length === 0 || leaf.offsets[i]! < previousEnd)
          throw new Error(`leaf ${number} entry ${i} overlaps`);
        previousEnd = leaf.offsets[i]! + length;
        if (leaf.lengths[i]! < ZEROED) data += length;
      }
      count += leaf.count;
    }
    if (count !== this.count || data !== this.dataSectors || this.#firsts.length !== this.#leaves.length) {
      throw new Error(`counts differ: ${count}/${this.count} mappings, ${data}/${this.dataSectors} sectors`);
    }
  }
}
