import { BLOCK_SECTORS } from "./format.ts";

/** Unit in which space of an upper's data file is accounted for and used again (4 MiB), unless tests say else. */
export const SEGMENT_SECTORS = 8192;

const USED = 0;
const FREE = 1;
const FREE_HOLE = 2;

/**
 * Space of an upper's data file, in segments: how many sectors of each are mapped, which have none and may be
 * written again, and where the next write goes. All numbers are sectors.
 *
 * A segment without mappings may still be needed: after power loss the disk is that of the last flush. So it
 * is a candidate first and free after a flush that began behind its last mapping's end (`beginFlush`,
 * `endFlush`). Sectors handed out by `reserve` count as mapped until they are mapped or released.
 */
export class SegmentTable {
  readonly segmentSectors: number;
  #live = new Uint32Array(16);
  #state = new Uint8Array(16);
  #fileEnd: number;
  /** Where the next write goes, and where it has to stop. */
  #head: number;
  #headLimit: number;
  /** Segments that have lost their last mapping, to be freed by a flush. */
  #candidates: number[] = [];
  #free: number[] = [];
  #freeUnpunched: number[] = [];
  #freeSectors = 0;
  #holeSectors = 0;

  /** `fileEnd`: where the data file ends; nothing is mapped yet. */
  constructor(fileEnd: number, segmentSectors = SEGMENT_SECTORS) {
    this.segmentSectors = segmentSectors;
    this.#fileEnd = fileEnd;
    this.#head = fileEnd;
    this.#headLimit = Number.POSITIVE_INFINITY;
    this.#reach(fileEnd);
  }

  /** End of what was ever handed out: the data file's end. */
  get fileEnd(): number {
    return this.#fileEnd;
  }

  /** Sectors that take space: all but those of free segments whose blocks were given back. */
  get hostSectors(): number {
    return Math.max(0, this.#fileEnd - BLOCK_SECTORS - this.#holeSectors);
  }

  /** Sectors neither mapped nor free for use again. */
  get usedSectors(): number {
    return Math.max(0, this.#fileEnd - BLOCK_SECTORS - this.#freeSectors - this.#holeSectors);
  }

  get candidateCount(): number {
    return this.#candidates.length;
  }

  get segmentCount(): number {
    return Math.ceil(this.#fileEnd / this.segmentSectors);
  }

  isUsed(segment: number): boolean {
    return this.#state[segment] === USED;
  }

  /** The next write goes there. It is left with its last sectors just written, so it never is left empty. */
  isHead(segment: number): boolean {
    return this.#head < this.#headLimit && segment === Math.floor(this.#head / this.segmentSectors);
  }

  live(segment: number): number {
    return this.#live[segment] ?? 0;
  }

  start(segment: number): number {
    return segment === 0 ? BLOCK_SECTORS : segment * this.segmentSectors;
  }

  /** Sectors of the segment that exist. */
  size(segment: number): number {
    return Math.max(0, Math.min((segment + 1) * this.segmentSectors, this.#fileEnd) - this.start(segment));
  }

  #reach(end: number): void {
    const count = Math.ceil(end / this.segmentSectors) + 1;
    if (count <= this.#live.length) return;
    const live = new Uint32Array(count * 2);
    const state = new Uint8Array(count * 2);
    live.set(this.#live);
    state.set(this.#state);
    this.#live = live;
    this.#state = state;
  }

  /** Counts sectors as mapped. */
  add(offset: number, length: number): void {
    for (let at = offset; at < offset + length; ) {
      const segment = Math.floor(at / this.segmentSectors);
      const part = Math.min(offset + length, (segment + 1) * this.segmentSectors) - at;
      this.#live[segment] = this.#live[segment]! + part;
      at += part;
    }
  }

  /** The sectors are mapped no more. */
  remove(offset: number, length: number): void {
    for (let at = offset; at < offset + length; ) {
      const segment = Math.floor(at / this.segmentSectors);
      const part = Math.min(offset + length, (segment + 1) * this.segmentSectors) - at;
      const left = this.#live[segment]! - part;
      if (left < 0)
        throw new Error(`internal error, please report: segment ${segment} counts ${left} sectors`);
      this.#live[segment] = left;
      if (left === 0 && !this.isHead(segment)) this.#candidates.push(segment);
      at += part;
    }
  }

  /** After counting what an opened upper maps: everything else becomes a candidate. */
  findCandidates(): void {
    for (let segment = 0; segment < this.segmentCount; segment++) {
      if (this.#live[segment] === 0 && !this.isHead(segment)) this.#candidates.push(segment);
    }
  }

  /** Hands out up to `sectors` contiguous sectors, at most `most`; they count as mapped. */
  reserve(sectors: number, most: number): { offset: number; length: number } {
    if (this.#head >= this.#headLimit || this.#atFreshSegment()) this.#moveHead();
    let room = this.#headLimit - this.#head;
    if (room === Number.POSITIVE_INFINITY && this.#free.length > 0) {
      room = (Math.floor(this.#head / this.segmentSectors) + 1) * this.segmentSectors - this.#head;
    }
    const offset = this.#head;
    const length = Math.min(sectors, most, room);
    this.#reach(offset + length);
    this.add(offset, length);
    this.#head = offset + length;
    this.#fileEnd = Math.max(this.#fileEnd, this.#head);
    return { offset, length };
  }

  /** Appending at the end has just filled a segment, and others are free. */
  #atFreshSegment(): boolean {
    return (
      this.#headLimit === Number.POSITIVE_INFINITY &&
      this.#free.length > 0 &&
      this.#head % this.segmentSectors === 0
    );
  }

  #moveHead(): void {
    const next = this.#free.pop();
    if (next === undefined) {
      this.#head = this.#fileEnd;
      this.#headLimit = Number.POSITIVE_INFINITY;
    } else {
      const size = this.size(next);
      if (this.#state[next] === FREE_HOLE) this.#holeSectors -= size;
      else this.#freeSectors -= size;
      this.#state[next] = USED;
      this.#head = this.start(next);
      this.#headLimit = (next + 1) * this.segmentSectors;
    }
  }

  /** Candidates whose end of use the flush that begins now makes durable. */
  beginFlush(): number[] {
    const taken = this.#candidates;
    this.#candidates = [];
    return taken;
  }

  /** The flush failed or did not happen: they wait for the next. */
  abortFlush(taken: readonly number[]): void {
    this.#candidates.push(...taken);
  }

  /** Frees what `beginFlush` returned, except what is in use again. */
  endFlush(taken: readonly number[]): void {
    for (const segment of taken) {
      if (this.#live[segment] !== 0 || this.#state[segment] !== USED || this.isHead(segment)) continue;
      this.#state[segment] = FREE;
      this.#freeSectors += this.size(segment);
      this.#free.push(segment);
      this.#freeUnpunched.push(segment);
    }
  }

  /** A free segment whose blocks are still there, as a range to punch: once it is, `punched` is to be called. */
  nextToPunch(): { segment: number; offset: number; length: number } | undefined {
    for (;;) {
      const segment = this.#freeUnpunched.at(-1);
      if (segment === undefined) return undefined;
      if (this.#state[segment] === FREE)
        return { segment, offset: this.start(segment), length: this.size(segment) };
      this.#freeUnpunched.pop();
    }
  }

  /** The blocks of the segment that `nextToPunch` named were given back: it is a hole. */
  punched(segment: number): void {
    const length = this.size(segment);
    this.#state[segment] = FREE_HOLE;
    this.#freeSectors -= length;
    this.#holeSectors += length;
  }

  /** Throws when the counts contradict each other; for tests. */
  checkInvariants(): void {
    let free = 0;
    let holes = 0;
    for (let segment = 0; segment < this.segmentCount; segment++) {
      const state = this.#state[segment];
      if (state !== USED && this.#live[segment] !== 0) throw new Error(`free segment ${segment} is mapped`);
      if (state === FREE) free += this.size(segment);
      if (state === FREE_HOLE) holes += this.size(segment);
    }
    if (free !== this.#freeSectors || holes !== this.#holeSectors)
      throw new Error("free space is miscounted");
  }
}
