import { errorCode } from "../../../lib/durable.ts";
import type { Disk, DiskFile } from "../disk.ts";
import type { CompactProgress } from "../types.ts";
import type { ChunkedIndex } from "./chunked-index.ts";
import { BLOCK_BYTES, encodeMapping, MAPPING_BYTES, SECTOR_BYTES } from "./format.ts";
import type { IndexLog } from "./index-log.ts";
import type { SegmentTable } from "./segments.ts";

/**
 * Keeps an upper that rewrites the same blocks from growing. In the order of cost:
 *
 * 1. Segments without any mapping are used for new writes; what that leaves is punched out of the file.
 * 2. When still more than TRIGGER times the mapped data is in use, segments that are mostly garbage are emptied:
 *    what is mapped there is appended again like a write of the guest, so that every state on disk is an ordinary
 *    one. They are free after the next flush.
 * 3. When the index file has more than twice the entries that are needed, it is written anew, step by step, and
 *    put in place of the old one.
 *
 * When it says `done`, data file and index file take at most twice what is mapped, plus a segment. Readers of the
 * format see an append-only pair with holes and an order of data that means nothing to them.
 */
const TRIGGER = 1.75;
/** A segment less full than this is worth emptying; below 1 / TRIGGER there is always one, above none is left. */
const MOSTLY_GARBAGE = 0.6;
const SCAN_MAPPINGS = 1024;
const COPY_SECTORS = 2048;
/** What looking at one mapping counts in the budget, in bytes. */
const SCAN_BYTES = 16;
/** What giving back one segment's blocks counts. */
const PUNCH_BYTES = 64 * 1024;
/** Entries an index file may have beyond twice the mappings (256 KiB). */
export const INDEX_SLACK = 16384;
const INDEX_BATCH = 8192;
/** What a file system that has no holes says to punching one, from the shim and from the runtime. */
const NO_HOLES: ReadonlySet<string | undefined> = new Set([
  "os_eopnotsupp",
  "os_enotsup",
  "EOPNOTSUPP",
  "ENOTSUP",
]);

export interface CompactorHost {
  readonly index: ChunkedIndex;
  readonly segments: () => SegmentTable;
  readonly log: () => IndexLog;
  readonly indexSlack: number;
  readonly flushing: () => boolean;
  /** Header block of a new index file. */
  readonly header: () => Uint8Array;
  readonly flush: () => void;
  readonly readData: (sector: number, target: Uint8Array, sectors: number) => void;
  readonly punch: (sector: number, sectors: number) => void;
  /** Appends data that stays what it is and maps it. */
  readonly relocate: (offset: number, source: Uint8Array, sectors: number) => void;
  readonly disk: Disk;
  readonly compactionPath: () => string;
  /**
   * Puts the finished file, which is durable, in place of the index file. `taken` is called when it is: from then
   * on it is the host's, whatever fails; as long as it is not, the file is the caller's to drop.
   */
  readonly switchIndex: (file: DiskFile, entries: number, taken: () => void) => void;
}

interface Rewrite {
  readonly file: DiskFile;
  entries: number;
  /** Where to go on with the mappings in memory; undefined when all are written. */
  cursor: number | undefined;
  /** Entry of the old file from which on they may be newer than what was written from memory. */
  copied: number;
  flushAsked: boolean;
}

export class Compactor {
  readonly #host: CompactorHost;
  /** Segments being emptied, and where in the disk to go on looking for what is mapped there. */
  #victims: Set<number> | undefined;
  #cursor: number | undefined = 0;
  #rewrite: Rewrite | undefined;
  #copyBuffer: Uint8Array | undefined;
  /** The file system gives nothing back: free space can only be used again. */
  #noHoles = false;

  constructor(host: CompactorHost) {
    this.#host = host;
  }

  /** More space is taken than it should be. */
  #over(): boolean {
    const { dataSectors } = this.#host.index;
    const segments = this.#host.segments();
    const taken = this.#noHoles ? segments.usedSectors : segments.hostSectors;
    return taken > dataSectors * TRIGGER + segments.segmentSectors;
  }

  #indexOver(): boolean {
    return this.#host.log().entries > 2 * this.#host.index.count + this.#host.indexSlack;
  }

  get due(): boolean {
    return this.#victims !== undefined || this.#rewrite !== undefined || this.#over() || this.#indexOver();
  }

  step(budgetBytes: number): CompactProgress {
    try {
      return this.#step(budgetBytes);
    } catch (error) {
      // How much of the new index file got where is not known: after a failed sync the kernel may take pages for
      // clean that it has lost. The next try makes a new one.
      this.dropRewrite(error);
      throw error;
    }
  }

  #step(budgetBytes: number): CompactProgress {
    const spent = { work: 0, moved: 0 };
    while (this.#over() && spent.work < budgetBytes && this.#punchOne()) spent.work += PUNCH_BYTES;
    if (this.#victims === undefined && this.#over()) this.#chooseVictims();
    while (this.#victims !== undefined && spent.work < budgetBytes) this.#empty(budgetBytes, spent);
    const progress = (done: boolean, flushNeeded = false): CompactProgress => ({
      done,
      movedBytes: spent.moved,
      flushNeeded,
    });
    if (this.#victims !== undefined || spent.work >= budgetBytes) return progress(false);
    const indexState = this.#compactIndex(budgetBytes, spent);
    if (indexState !== "done") return progress(false, indexState === "flush");
    if (!this.#over()) return progress(true);
    const segments = this.#host.segments();
    if (segments.candidateCount > 0) return progress(false, !this.#host.flushing());
    // A flush in this step may have freed more.
    return progress(this.#noHoles || segments.nextToPunch() === undefined);
  }

  #punchOne(): boolean {
    if (this.#noHoles) return false;
    const range = this.#host.segments().nextToPunch();
    if (range === undefined) return false;
    try {
      this.#host.punch(range.offset, range.length);
    } catch (error) {
      if (!NO_HOLES.has(errorCode(error))) throw error;
      this.#noHoles = true;
      return false;
    }
    this.#host.segments().punched(range.segment);
    return true;
  }

  #chooseVictims(): void {
    const segments = this.#host.segments();
    const victims = new Set<number>();
    for (let segment = 0; segment < segments.segmentCount; segment++) {
      if (!segments.isUsed(segment) || segments.isHead(segment)) continue;
      const mapped = segments.live(segment);
      if (mapped > 0 && mapped < segments.size(segment) * MOSTLY_GARBAGE) victims.add(segment);
    }
    if (victims.size === 0) return;
    this.#victims = victims;
    this.#cursor = 0;
  }

  /** Moves what the next mappings have in segments that are being emptied. */
  #empty(budgetBytes: number, spent: { work: number; moved: number }): void {
    const victims = this.#victims!;
    const { segmentSectors } = this.#host.segments();
    const found: { offset: number; length: number; moffset: number }[] = [];
    let foundBytes = 0;
    let scanned = 0;
    const from = this.#cursor ?? 0;
    let stoppedAt: number | undefined;
    const next = this.#host.index.scan(from, SCAN_MAPPINGS, (offset, length, moffset, zeroed) => {
      scanned++;
      if (zeroed || stoppedAt !== undefined) return;
      if (spent.work + foundBytes >= budgetBytes && foundBytes > 0) {
        stoppedAt = offset;
        return;
      }
      for (let at = moffset; at < moffset + length; ) {
        const segment = Math.floor(at / segmentSectors);
        const end = Math.min(moffset + length, (segment + 1) * segmentSectors);
        if (victims.has(segment)) {
          const last = found.at(-1);
          const virtual = offset + (at - moffset);
          if (
            last !== undefined &&
            last.offset + last.length === virtual &&
            last.moffset + last.length === at
          ) {
            last.length += end - at;
          } else {
            found.push({ offset: virtual, length: end - at, moffset: at });
          }
          foundBytes += (end - at) * SECTOR_BYTES;
        }
        at = end;
      }
    });
    spent.work += scanned * SCAN_BYTES;
    this.#copyBuffer ??= new Uint8Array(new ArrayBuffer(COPY_SECTORS * SECTOR_BYTES));
    for (const range of found) {
      for (let done = 0; done < range.length; ) {
        const sectors = Math.min(range.length - done, COPY_SECTORS);
        this.#host.readData(range.moffset + done, this.#copyBuffer, sectors);
        this.#host.relocate(range.offset + done, this.#copyBuffer, sectors);
        done += sectors;
      }
      spent.moved += range.length * SECTOR_BYTES;
      spent.work += range.length * SECTOR_BYTES;
    }
    this.#cursor = stoppedAt ?? next;
    if (this.#cursor === undefined) {
      this.#victims = undefined;
      this.#copyBuffer = undefined;
    }
  }

  #compactIndex(budgetBytes: number, spent: { work: number; moved: number }): "done" | "more" | "flush" {
    const log = this.#host.log();
    if (this.#rewrite === undefined) {
      if (!this.#indexOver()) return "done";
      this.#begin(log);
    }
    const rewrite = this.#rewrite!;
    while (rewrite.cursor !== undefined) {
      if (spent.work >= budgetBytes) return this.#pause(rewrite);
      this.#writeMappings(rewrite, spent);
    }
    // What was appended since the start is newer than, or the same as, what was written from memory.
    while (rewrite.copied < log.entries) {
      if (spent.work >= budgetBytes && log.entries - rewrite.copied > INDEX_BATCH)
        return this.#pause(rewrite);
      this.#copyTail(rewrite, log, spent);
    }
    if (this.#host.flushing()) return "more";
    if (log.uncommitted) {
      // A flush by whoever calls does not hold up the others; when writes come without end it is done here.
      if (!rewrite.flushAsked) {
        rewrite.file.datasync();
        rewrite.flushAsked = true;
        return "flush";
      }
      this.#host.flush();
      this.#copyTail(rewrite, log, spent);
    }
    this.#finish(rewrite);
    return this.#indexOver() ? "more" : "done";
  }

  #begin(log: IndexLog): void {
    this.#host.disk.removeIfPresent(this.#host.compactionPath());
    const file = this.#host.disk.create(this.#host.compactionPath());
    this.#rewrite = { file, entries: 0, cursor: 0, copied: log.entries, flushAsked: false };
    const header = this.#host.header();
    file.write(0, header, 0, header.byteLength);
  }

  /** The part of a call is on its way to the disk before the next adds to it. */
  #pause(rewrite: Rewrite): "more" {
    rewrite.file.datasync();
    return "more";
  }

  #writeMappings(rewrite: Rewrite, spent: { work: number }): void {
    const words = new Uint32Array(INDEX_BATCH * 4);
    let count = 0;
    const next = this.#host.index.scan(rewrite.cursor!, INDEX_BATCH, (offset, length, moffset, zeroed) =>
      encodeMapping(words, 4 * count++, offset, length, moffset, zeroed),
    );
    this.#append(rewrite, new Uint8Array(words.buffer), count, spent);
    rewrite.cursor = next;
  }

  /** Entries of the old file; the records of its epochs say nothing about the new one. */
  #copyTail(rewrite: Rewrite, log: IndexLog, spent: { work: number }): void {
    const count = Math.min(log.entries - rewrite.copied, INDEX_BATCH);
    if (count === 0) return;
    const mappings = log.mappings(rewrite.copied, count);
    this.#append(rewrite, mappings.bytes, mappings.count, spent);
    rewrite.copied += count;
  }

  #append(rewrite: Rewrite, bytes: Uint8Array, count: number, spent: { work: number }): void {
    rewrite.file.write(BLOCK_BYTES + rewrite.entries * MAPPING_BYTES, bytes, 0, count * MAPPING_BYTES);
    rewrite.entries += count;
    spent.work += count * MAPPING_BYTES;
  }

  #finish(rewrite: Rewrite): void {
    rewrite.file.sync();
    this.#host.switchIndex(rewrite.file, rewrite.entries, () => {
      this.#rewrite = undefined;
    });
  }

  /** Drops what is under way; nothing of it counts. */
  abort(): void {
    this.#victims = undefined;
    this.dropRewrite();
  }

  /**
   * Drops the new index file. `reason`: the error that it is dropped for, which is the one to tell; a file that
   * cannot be removed now is when the next one is made, or the upper is opened.
   */
  dropRewrite(reason?: unknown): void {
    const rewrite = this.#rewrite;
    if (rewrite === undefined) return;
    this.#rewrite = undefined;
    try {
      try {
        rewrite.file.close();
      } finally {
        this.#host.disk.removeIfPresent(this.#host.compactionPath());
      }
    } catch (error) {
      if (reason === undefined) throw error;
    }
  }
}
