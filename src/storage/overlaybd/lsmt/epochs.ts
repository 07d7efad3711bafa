import { crc32cRaw } from "../../../../ffi/codec.ts";
import { invalidLayer } from "../errors.ts";
import { BLOCK_BYTES, MAPPING_BYTES } from "./format.ts";

/**
 * Epochs of a writable index: which of its mappings may be trusted after power was lost.
 *
 * A write puts data and mapping into the page cache. Until a flush the kernel writes both back in any order, so
 * after power loss a mapping may be there without its data: the disk would read neither old nor new content.
 * Holding mappings back until the data is synced would lose them when only the process dies. So mappings are
 * appended at once, and records among them say what they are worth. A record is an entry that every reader of
 * the format takes for padding (offset 2^50-1, length 0) and that carries its kind where a mapping has its tag:
 *
 * - session: from here on a process under the boot named by 54 bits of hash appended mappings.
 * - commit: the data of all entries before entry P was synced before this record was written. It carries the
 *   CRC-32C of the entries from the commit before (its P) up to P, because the sectors of the index itself
 *   are written back in any order, too, and the number of entries between P and itself.
 * - close: a commit after which no session is open. What follows without a session was appended by another
 *   tool, which has no epochs, and is taken as it is.
 *
 * Behind the entries the file holds reserved ones, also padding to every reader, which later ones replace: so a flush
 * writes into blocks that are there and needs no commit of the file system's journal. They are cut off when the
 * upper is closed; after a crash those at the end are no entries.
 *
 * Opened under the same boot, the page cache was never lost and every entry counts. Under another boot the
 * entries behind the last commit are dropped: that is the disk as of the last flush. Only index files whose
 * header is marked are judged so; the mark (8 bytes in the unused part of the header block, which readers
 * ignore) is durable before the first session is.
 */
const MARK = Uint8Array.fromHex("41454e5645503031");
const MARK_OFFSET = 400;

export const RECORD = { session: 0xa1, commit: 0xa2, close: 0xa3 } as const;
export type RecordKind = keyof typeof RECORD;
/** In the place of a record's kind: an entry that is not one yet. */
const RESERVED = 0xa0;

/** Entries that may be appended between the start of a flush and its record. */
export const MAX_UNCOVERED = 2 ** 23 - 1;

export function markIndexHeader(block: Uint8Array): Uint8Array {
  block.set(MARK, MARK_OFFSET);
  return block;
}

export function isMarkedIndexHeader(block: Uint8Array): boolean {
  return MARK.every((value, i) => block[MARK_OFFSET + i] === value);
}

export interface BootHash {
  readonly low: number;
  readonly high: number;
}

export function bootHash(bootId: string): BootHash {
  const digest = new Bun.CryptoHasher("sha256").update(bootId).digest();
  return { low: digest.readUInt32LE(0), high: digest.readUInt32LE(4) & 0x3f_ffff };
}

function encodeRecord(words: Uint32Array, at: number, kind: RecordKind, payload: number, high: number): void {
  words[at] = 0xffff_ffff;
  words[at + 1] = 0x3_ffff;
  words[at + 2] = payload;
  words[at + 3] = ((RECORD[kind] << 24) | high) >>> 0;
}

export function encodeSession(words: Uint32Array, at: number, boot: BootHash): void {
  encodeRecord(words, at, "session", boot.low, boot.high);
}

export function encodeCommit(
  words: Uint32Array,
  at: number,
  kind: "commit" | "close",
  crc: number,
  uncovered: number,
): void {
  if (uncovered > MAX_UNCOVERED) throw new RangeError(`${uncovered} entries appended during one flush`);
  encodeRecord(words, at, kind, crc, uncovered);
}

/** Fills `words` with reserved entries. */
export function encodeReserved(words: Uint32Array): void {
  for (let at = 0; at < words.length; at += 4) {
    words[at] = 0xffff_ffff;
    words[at + 1] = 0x3_ffff;
    words[at + 2] = 0;
    words[at + 3] = (RESERVED << 24) >>> 0;
  }
}

/** Nothing was written there, as far as the disk knows: zeros, or reserved. No mapping points to sector 0. */
function isBlankEntry(words: Uint32Array, at: number): boolean {
  if (words[at + 2] !== 0) return false;
  return words[at + 3] === (RESERVED << 24) >>> 0 || (words[at]! | words[at + 1]! | words[at + 3]!) === 0;
}

/** Entries up to the last that was written, of the `total` that a marked index file has room for. */
export function countWritten(total: number, read: ReadEntries): number {
  const bytes = new Uint8Array(new ArrayBuffer(Math.max(1, Math.min(total, BATCH)) * MAPPING_BYTES));
  const words = new Uint32Array(bytes.buffer);
  for (let end = total; end > 0; ) {
    const count = Math.min(end, BATCH);
    read(end - count, count, bytes);
    for (let i = count - 1; i >= 0; i--) if (!isBlankEntry(words, 4 * i)) return end - count + i + 1;
    end -= count;
  }
  return 0;
}

/** Kind of the record at `at`, 0 for mappings and padding. */
function recordAt(words: Uint32Array, at: number): number {
  if (words[at] !== 0xffff_ffff || words[at + 1] !== 0x3_ffff) return 0;
  const tag = words[at + 3]! >>> 24;
  return tag >= RECORD.session && tag <= RECORD.close ? tag : 0;
}

/** What an index file is worth under the present boot. Counts are entries from the start of the entry area. */
export interface IndexVerdict {
  /** Entries that count; those behind are dropped. */
  readonly kept: number;
  /** Entries before the last flush: durable with their data. */
  readonly committed: number;
  /** A session of this boot is open: entries may be appended without a new session record. */
  readonly sessionOpen: boolean;
  /** CRC-32C of the entries from `committed` to `kept`. */
  readonly crc: number;
  /**
   * The record of the last flush stands behind entries that are dropped: before they are cut off it must be
   * written again at entry `committed` (which then is the last that is kept) with this CRC.
   */
  readonly moveCommit?: { readonly crc: number };
}

/** Reads entries [from, from + count) into the start of `bytes`. */
export type ReadEntries = (from: number, count: number, bytes: Uint8Array) => void;

const BATCH = 1 << 15;

/**
 * Judges the `total` entries of a marked index file. Throws when entries of a flushed epoch are damaged though
 * a later epoch is whole: no loss of power does that.
 */
export function judgeIndex(file: string, total: number, boot: BootHash, read: ReadEntries): IndexVerdict {
  const buffer = () => new Uint8Array(new ArrayBuffer(Math.max(1, Math.min(total, BATCH)) * MAPPING_BYTES));
  const bytes = buffer();
  const words = new Uint32Array(bytes.buffer);
  const damaged = (entry: number, reason: string) =>
    invalidLayer(file, BLOCK_BYTES + entry * MAPPING_BYTES, reason);
  /** No session is open: what stands here was put there whole, or appended by a tool without epochs. */
  let plain = true;
  let sameBoot = false;
  let stop = total;
  /** Entry where the next commit begins to cover. */
  let from = 0;
  /** Commits of the sessions since the entries were last plain. */
  let commits: { from: number; to: number; crc: number; at: number }[] = [];
  let plainEnd = 0;
  scan: for (let done = 0; done < total; ) {
    const count = Math.min(total - done, BATCH);
    read(done, count, bytes);
    for (let i = 0; i < count; i++) {
      const word = i * 4;
      const kind = recordAt(words, word);
      const at = done + i;
      if (kind === 0) {
        // A sector of the file that was never written back, perhaps with the session record in it.
        if (plain && isBlankEntry(words, word)) {
          stop = at;
          break scan;
        }
      } else if (kind === RECORD.session) {
        sameBoot = words[word + 2] === boot.low && (words[word + 3]! & 0x3f_ffff) === boot.high;
        if (plain) {
          plain = false;
          plainEnd = at;
          from = at;
        }
      } else {
        const to = at - (words[word + 3]! & 0x7f_ffff);
        if (plain || to < from)
          throw damaged(at, "record of a flush that does not fit the entries before it");
        if (kind === RECORD.close) {
          plain = true;
          commits = [];
        } else {
          commits.push({ from, to, crc: words[word + 2]!, at });
          from = to;
        }
      }
    }
    done += count;
  }
  if (plain) return { kept: stop, committed: stop, sessionOpen: false, crc: 0 };

  const scratch = buffer();
  const crcOf = (start: number, end: number): number => {
    let crc = 0;
    for (let at = start; at < end; ) {
      const count = Math.min(end - at, BATCH);
      read(at, count, scratch);
      crc = crc32cRaw(crc, scratch.subarray(0, count * MAPPING_BYTES));
      at += count;
    }
    return crc;
  };
  if (sameBoot) return { kept: total, committed: from, sessionOpen: true, crc: crcOf(from, total) };
  let last: (typeof commits)[number] | undefined;
  let bad: (typeof commits)[number] | undefined;
  for (const commit of commits) {
    // Covers nothing: what is left of a record that was moved, see `moveCommit`.
    if (commit.from === commit.to) continue;
    if (crcOf(commit.from, commit.to) !== commit.crc) {
      bad ??= commit;
      continue;
    }
    if (bad !== undefined) {
      throw damaged(
        bad.from,
        `mappings that were flushed are damaged (their record is entry ${bad.at}), later ones are whole`,
      );
    }
    last = commit;
  }
  if (last === undefined) return { kept: plainEnd, committed: plainEnd, sessionOpen: false, crc: 0 };
  const { to, at, crc } = last;
  if (at !== to) return { kept: to, committed: to, sessionOpen: false, crc: 0, moveCommit: { crc } };
  return { kept: to + 1, committed: to, sessionOpen: false, crc: crcOf(to, to + 1) };
}
