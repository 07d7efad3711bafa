import { crc32cRaw } from "../../../../ffi/codec.ts";
import { type Disk, type DiskFile, readBytes, replaceFile } from "../disk.ts";
import {
  type BootHash,
  bootHash,
  countWritten,
  encodeCommit,
  encodeReserved,
  encodeSession,
  judgeIndex,
  MAX_UNCOVERED,
  markIndexHeader,
  type ReadEntries,
} from "./epochs.ts";
import type { FlatIndex } from "./flat-index.ts";
import {
  BLOCK_BYTES,
  encodeBlock,
  encodeMapping,
  FLAG_DATA,
  type LsmtBlock,
  MAPPING_BYTES,
  mappingIsPadding,
} from "./format.ts";
import { encodeIndex } from "./writer.ts";

/** The header block of a marked index file that goes with a data header. */
export function indexHeaderBlock(dataHeader: LsmtBlock): Uint8Array {
  return markIndexHeader(
    encodeBlock({
      ...dataHeader,
      flags: (dataHeader.flags & ~FLAG_DATA) | 1,
      indexOffsetBytes: BLOCK_BYTES,
      indexSize: 0,
    }),
  );
}

/** Writes a whole marked index into an empty file. */
export function writeIndex(out: DiskFile, dataHeader: LsmtBlock, index: FlatIndex): void {
  const block = indexHeaderBlock(dataHeader);
  out.write(0, block, 0, block.byteLength);
  let position = BLOCK_BYTES;
  for (const bytes of encodeIndex(index, 0)) {
    out.write(position, bytes, 0, bytes.byteLength);
    position += bytes.byteLength;
  }
}

/** Writes a whole marked index file, durable, in place of whatever stands there. */
export function writeIndexFile(disk: Disk, file: string, dataHeader: LsmtBlock, index: FlatIndex): void {
  replaceFile(disk, file, (out) => writeIndex(out, dataHeader, index));
  disk.syncDirectoriesOf(file);
}

/** Reserved entries come in blocks of the file system, and not more than 1 MiB at once. */
const RESERVE_UNIT = 256;
const MOST_RESERVED = 1 << 16;

/** A state of the log that a flush makes durable. */
export interface Epoch {
  /** Entries it covers. */
  readonly entries: number;
  readonly crc: number;
}

/**
 * The entry area of a writable index file being appended to: mappings and the records of epochs.ts. Each call
 * has put its entry into the file when it returns; syncing is the caller's.
 */
export class IndexLog {
  readonly #boot: BootHash;
  #file: DiskFile;
  #entries: number;
  #committed: number;
  #crc: number;
  #sessionOpen: boolean;
  readonly #entry = new Uint8Array(new ArrayBuffer(2 * MAPPING_BYTES));
  readonly #words = new Uint32Array(this.#entry.buffer);
  /** Entries the file has room for; from `#entries` on they are reserved ones. */
  #room: number;

  private constructor(
    file: DiskFile,
    boot: BootHash,
    state: { entries: number; committed: number; crc: number; sessionOpen: boolean },
  ) {
    this.#file = file;
    this.#boot = boot;
    this.#entries = state.entries;
    this.#room = state.entries;
    this.#committed = state.committed;
    this.#crc = state.crc;
    this.#sessionOpen = state.sessionOpen;
  }

  /**
   * Opens the entry area of a marked (or, `marked: false`, any) index file. Drops what does not count; with
   * `readOnly` only in memory. `total` is the number of entries the file has, `dropped` how many do not count.
   */
  static open(
    disk: Disk,
    file: DiskFile,
    options: { readonly marked: boolean; readonly readOnly: boolean },
  ): { log: IndexLog; dropped: number } {
    const boot = bootHash(disk.bootId());
    const size = file.size();
    const room = Math.max(0, Math.floor((size - BLOCK_BYTES) / MAPPING_BYTES));
    if (!options.marked) {
      const state = { entries: room, committed: room, crc: 0, sessionOpen: false };
      return { log: new IndexLog(file, boot, state), dropped: 0 };
    }
    const read: ReadEntries = (from, count, bytes) => {
      const length = count * MAPPING_BYTES;
      if (file.read(BLOCK_BYTES + from * MAPPING_BYTES, bytes, 0, length) !== length) {
        throw new Error(`${file.name}: the index file became shorter while it was read`);
      }
    };
    const total = countWritten(room, read);
    const verdict = judgeIndex(file.name, total, boot, read);
    const { kept, committed, crc, sessionOpen, moveCommit } = verdict;
    const log = new IndexLog(file, boot, { entries: kept, committed, crc, sessionOpen });
    if (!options.readOnly) {
      if (moveCommit !== undefined) {
        log.#appendCommit("commit", { entries: committed, crc: moveCommit.crc });
        file.sync();
      }
      if (size > log.endBytes) {
        file.truncate(log.endBytes);
        file.sync();
      }
    }
    return { log, dropped: total - kept };
  }

  get file(): DiskFile {
    return this.#file;
  }

  /** Entries in the file, records included. */
  get entries(): number {
    return this.#entries;
  }

  /** Entries that the last flush (or the one that opened it) covers. */
  get committed(): number {
    return this.#committed;
  }

  get endBytes(): number {
    return BLOCK_BYTES + this.#entries * MAPPING_BYTES;
  }

  get sessionOpen(): boolean {
    return this.#sessionOpen;
  }

  #append(entries: number): void {
    const length = entries * MAPPING_BYTES;
    if (this.#entries + entries > this.#room) this.#extend(length);
    else this.#file.write(this.endBytes, this.#entry, 0, length);
    this.#entries += entries;
    this.#crc = crc32cRaw(this.#crc, entries === 2 ? this.#entry : this.#entry.subarray(0, length));
  }

  /** Writes the entry with reserved ones behind it: as many as there are already, within bounds. */
  #extend(length: number): void {
    const units = Math.ceil(Math.min(this.#entries, MOST_RESERVED) / RESERVE_UNIT);
    const room = Math.ceil((this.#entries + 2) / RESERVE_UNIT + units) * RESERVE_UNIT;
    const bytes = new Uint8Array(new ArrayBuffer((room - this.#entries) * MAPPING_BYTES));
    encodeReserved(new Uint32Array(bytes.buffer));
    bytes.set(this.#entry.subarray(0, length));
    this.#file.write(this.endBytes, bytes, 0, bytes.byteLength);
    this.#room = room;
  }

  /** All in sectors. */
  append(offset: number, length: number, moffset: number, zeroed: boolean): void {
    if (this.#sessionOpen) {
      encodeMapping(this.#words, 0, offset, length, moffset, zeroed);
      this.#append(1);
      return;
    }
    if (this.#committed >= this.#entries) this.#crc = 0;
    encodeSession(this.#words, 0, this.#boot);
    encodeMapping(this.#words, 4, offset, length, moffset, zeroed);
    this.#append(2);
    this.#sessionOpen = true;
  }

  /** What has been appended so far. The next epoch begins behind it. */
  beginEpoch(): Epoch {
    const epoch = { entries: this.#entries, crc: this.#crc };
    this.#crc = 0;
    return epoch;
  }

  #appendCommit(kind: "commit" | "close", epoch: Epoch): void {
    encodeCommit(this.#words, 0, kind, epoch.crc, this.#entries - epoch.entries);
    this.#append(1);
    this.#committed = epoch.entries;
  }

  /** The data of the epoch is synced: says so in the file, which the caller syncs then. */
  commit(epoch: Epoch): void {
    if (!this.#sessionOpen) return;
    this.#appendCommit("commit", epoch);
  }

  /** Entries were appended that no flush covers. */
  get uncommitted(): boolean {
    return this.#sessionOpen && this.#entries > this.#committed + 1;
  }

  /** More entries than a record can span would follow a flush that takes for ever. */
  get epochFull(): boolean {
    return this.#entries - this.#committed >= MAX_UNCOVERED;
  }

  /** Everything is synced and nothing of ours follows. */
  closeSession(): void {
    if (!this.#sessionOpen) return;
    this.#appendCommit("close", { entries: this.#entries, crc: this.#crc });
    this.#sessionOpen = false;
    this.#committed = this.#entries;
    this.#crc = 0;
  }

  /** Cuts reserved entries off: nothing is appended any more. */
  trim(): void {
    if (this.#room === this.#entries) return;
    this.#file.truncate(this.endBytes);
    this.#room = this.#entries;
  }

  /** The mappings among entries [from, from + count), without the records: their bytes and how many they are. */
  mappings(from: number, count: number): { bytes: Uint8Array; count: number } {
    const bytes = readBytes(this.#file, BLOCK_BYTES + from * MAPPING_BYTES, count * MAPPING_BYTES);
    const words = new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 4);
    let kept = 0;
    for (let word = 0; word < words.length; word += 4) {
      if (mappingIsPadding(words, word)) continue;
      words.copyWithin(4 * kept++, word, word + 4);
    }
    return { bytes, count: kept };
  }

  /** Keeps the first `entries` only: those behind were never flushed. */
  cut(entries: number): void {
    this.#file.truncate(BLOCK_BYTES + entries * MAPPING_BYTES);
    this.#file.sync();
    this.#entries = entries;
    this.#room = entries;
    this.#committed = Math.min(this.#committed, entries);
    this.#crc = 0;
    if (!this.#sessionOpen) return;
    const bytes = readBytes(
      this.#file,
      BLOCK_BYTES + this.#committed * MAPPING_BYTES,
      (entries - this.#committed) * MAPPING_BYTES,
    );
    this.#crc = crc32cRaw(0, bytes);
  }

  /** The same log goes on in another file that holds all of it and is all durable. */
  moveTo(file: DiskFile, entries: number): void {
    this.#file = file;
    this.#entries = entries;
    this.#room = entries;
    this.#committed = entries;
    this.#crc = 0;
    this.#sessionOpen = false;
  }
}
