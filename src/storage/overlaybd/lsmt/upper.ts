import { AenvError } from "../../../lib/errors.ts";
import { type Disk, type DiskFile, readBytes, readCached, replaceFile } from "../disk.ts";
import { badRequest, invalidLayer } from "../errors.ts";
import type { ReadSource } from "../source.ts";
import type { CompactProgress, PendingFlush, SyncTarget, UpperMode, UpperRef } from "../types.ts";
import { ChunkedIndex } from "./chunked-index.ts";
import { Compactor, INDEX_SLACK } from "./compactor.ts";
import { isMarkedIndexHeader } from "./epochs.ts";
import { EMPTY_INDEX, type FlatIndex, ZEROED_TAG } from "./flat-index.ts";
import {
  BLOCK_BYTES,
  BLOCK_SECTORS,
  decodeBlock,
  encodeBlock,
  FLAG_DATA,
  FLAG_HEADER,
  FLAG_HYBRID,
  FLAG_SEALED,
  FLAG_SPARSE,
  hasLsmtMagic,
  type LsmtBlock,
  MAPPING_BYTES,
  MAX_MAPPING_SECTORS,
  MAX_MAPPINGS,
  mappingIsPadding,
  mappingLength,
  mappingOffset,
  mappingTarget,
  mappingZeroed,
  SECTOR_BYTES,
} from "./format.ts";
import { IndexLog, indexHeaderBlock, writeIndex, writeIndexFile } from "./index-log.ts";
import { readLayerIndex } from "./layer.ts";
import { SegmentTable } from "./segments.ts";
import { compactionPath, indexPathOf, isBlank } from "./upper-files.ts";
import { encodeIndex } from "./writer.ts";

/** Longest piece of a write that gets one mapping (4 MiB). */
const WRITE_SECTORS = 8192;
const REPLAY_MAPPINGS = 1 << 16;

/** Sizes that decide when compaction has something to do. */
export interface UpperTuning {
  readonly segmentSectors?: number;
  /** Entries an index file may have beyond twice the mappings. */
  readonly indexSlack?: number;
}

export interface OpenUpperOptions {
  /** Nothing is changed on disk: a damaged tail is skipped, not cut off. */
  readonly readOnly: boolean;
  /** Size that an upper of size 0 takes. Undefined: it stays 0. */
  readonly inheritedSizeBytes?: number | undefined;
  /** Smaller than usual, for tests. */
  readonly tuning?: UpperTuning | undefined;
}

/** A part of a write: `length` sectors of the disk from `offset`, kept at sector `moffset` of the data file. */
export interface WritePiece {
  readonly offset: number;
  readonly length: number;
  readonly moffset: number;
  /** The place is mapped already (a hybrid upper writes there in place): nothing is left to do behind it. */
  readonly inPlace: boolean;
}

/**
 * A writable layer. `write` and `discard` have put data and mapping into the files when they return, `flush`
 * makes them safe against power loss (see epochs.ts for what happens without). One owner: the data file is
 * locked.
 *
 * `write` in steps, for callers that move the bytes themselves: `reserve` a place, write there, then `map` each
 * piece (or `release` it when writing failed). Pieces may be in flight in any number; the order of `map` calls
 * decides which of two overlapping writes wins.
 */
export class Upper implements Disposable {
  #ref: UpperRef;
  readonly mode: UpperMode;
  readonly index = new ChunkedIndex();
  /** The data file as a source for reads of the stack; not owned by whoever reads. */
  readonly source: ReadSource;
  /** What was noticed and repaired when it was opened. */
  readonly warnings: string[] = [];
  readonly #disk: Disk;
  readonly #data: DiskFile;
  readonly #readOnly: boolean;
  readonly #tuning: UpperTuning;
  #log: IndexLog | undefined;
  /** The index header carries the mark of epochs.ts. */
  #marked = false;
  #header: LsmtBlock;
  #indexHeader: LsmtBlock | undefined;
  #segments: SegmentTable;
  readonly #compactor: Compactor | undefined;
  /**
   * What an earlier process wrote, or whoever created the files, may be in the page cache only, and so may
   * their names: the first flush syncs everything.
   */
  #dataDirty = true;
  #namesDirty = true;
  #flushing: PendingFlush | undefined;
  /** Files that were replaced while a flush was to sync them: it closes them. */
  #replaced: DiskFile[] = [];
  #flushFailure: unknown;
  /** Reads under way, oldest first, and what may be written over only when those before it have ended. */
  readonly #pins = new Set<number>();
  #nextPin = 0;
  #quarantine: { readonly before: number; readonly run: () => void }[] = [];
  #open = true;
  #touched = false;
  #dataHandedOver = false;

  constructor(disk: Disk, ref: UpperRef, options: OpenUpperOptions) {
    this.#ref = ref;
    this.#disk = disk;
    this.#readOnly = options.readOnly;
    this.#tuning = options.tuning ?? {};
    using cleanup = new DisposableStack();
    const open = (name: string): DiskFile => {
      let file: DiskFile;
      try {
        file = disk.open(name, options.readOnly ? "read" : "write");
      } catch (error) {
        throw badRequest(
          "upper_not_found",
          `cannot open upper ${name}: ${error instanceof Error ? error.message : String(error)}`,
        );
      }
      return file;
    };
    const data = open(ref.data);
    cleanup.defer(() => data.close());
    this.#data = data;
    if (!data.lock(options.readOnly ? "shared" : "exclusive")) {
      throw new AenvError({
        code: "upper_in_use",
        status: 409,
        message: `upper ${ref.data} is in use by another device or process`,
        remediation: "release the device that has it open",
      });
    }
    this.#header = this.#readDataHeader();
    this.mode = this.#modeOf(this.#header);
    this.#segments = this.#newSegments(Math.ceil(data.size() / SECTOR_BYTES));
    const self = this;
    this.source = {
      get name() {
        return self.ref.data;
      },
      get sizeBytes() {
        return self.#segments.fileEnd * SECTOR_BYTES;
      },
      read: (offsetBytes, target, targetOffset, lengthBytes) => {
        const got = data.read(offsetBytes, target, targetOffset, lengthBytes);
        if (got === lengthBytes) return;
        // The sparse file's last block may lie behind its end: what was never written are zeros there.
        if (this.mode === "sparse") target.fill(0, targetOffset + got, targetOffset + lengthBytes);
        else throw invalidLayer(ref.data, offsetBytes, `${lengthBytes} bytes wanted, ${got} read`);
      },
      tryRead: (offsetBytes, target, targetOffset, lengthBytes) => {
        const got = readCached(data, offsetBytes, target, targetOffset, lengthBytes);
        if (got < 0) return false;
        if (got === lengthBytes) return true;
        if (this.mode !== "sparse")
          throw invalidLayer(ref.data, offsetBytes, `${lengthBytes} bytes wanted, ${got} read`);
        target.fill(0, targetOffset + got, targetOffset + lengthBytes);
        return true;
      },
      locate: (offsetBytes, lengthBytes, visit) => {
        if (data.fd !== undefined) visit(data.fd, offsetBytes, lengthBytes, ref.data);
      },
      ...(data.fd === undefined ? {} : { direct: { fd: data.fd, baseBytes: 0 } }),
      [Symbol.dispose]: () => data.close(),
    };
    if (this.mode === "sparse") {
      this.#unseal(this.#readTrailer());
    } else {
      this.#openIndex(open);
      cleanup.defer(() => this.#log?.file.close());
      if (!options.readOnly) disk.removeIfPresent(compactionPath(indexPathOf(ref)));
    }
    this.#inheritSize(options.inheritedSizeBytes);
    if (this.mode === "sparse") this.#scanExtents();
    else this.#countSegments();
    if (this.mode !== "sparse" && !options.readOnly) this.#compactor = this.#makeCompactor();
    cleanup.move();
  }

  #newSegments(fileEnd: number): SegmentTable {
    return new SegmentTable(fileEnd, this.#tuning.segmentSectors);
  }

  /** Where its files are now. */
  get ref(): UpperRef {
    return this.#ref;
  }

  get uuid(): string | undefined {
    return this.#header.uuid;
  }

  get parentUuid(): string | undefined {
    return this.#header.parentUuid;
  }

  /** 0 when it has none of its own. A log-structured upper's index header decides (as in C++). */
  get virtualSizeBytes(): number {
    return (this.#indexHeader?.virtualSizeBytes || undefined) ?? this.#header.virtualSizeBytes;
  }

  /** Bytes of payload that take space in the data file, garbage included. */
  get dataBytes(): number {
    if (this.mode === "sparse") return this.index.dataSectors * SECTOR_BYTES;
    return this.#segments.hostSectors * SECTOR_BYTES;
  }

  /** Bytes of the index file. */
  get indexBytes(): number {
    return this.#log === undefined ? 0 : this.#log.endBytes;
  }

  #readDataHeader(): LsmtBlock {
    const file = this.ref.data;
    const header = decodeBlock(readBytes(this.#data, 0, BLOCK_BYTES), file, 0, "header");
    if ((header.flags & FLAG_HEADER) === 0) throw invalidLayer(file, 28, "header is marked as a trailer");
    if ((header.flags & FLAG_DATA) === 0) throw invalidLayer(file, 28, "header is that of an index file");
    if ((header.flags & FLAG_SEALED) !== 0) {
      throw invalidLayer(file, 28, "this is a finished layer, which cannot be written: use it as a lower");
    }
    return header;
  }

  #modeOf(header: LsmtBlock): UpperMode {
    const special = header.flags & (FLAG_SPARSE | FLAG_HYBRID);
    if (special === (FLAG_SPARSE | FLAG_HYBRID)) {
      throw invalidLayer(this.ref.data, 28, "header is marked both sparse and hybrid");
    }
    if (special === FLAG_SPARSE) return "sparse";
    return special === FLAG_HYBRID ? "hybridLogStructured" : "logStructured";
  }

  /** Opens, judges and replays the index file; makes it again where that loses nothing. */
  #openIndex(open: (name: string) => DiskFile): void {
    const name = indexPathOf(this.ref);
    const trailer = this.#readTrailer();
    if (!this.#disk.exists(name)) this.#restoreIndex(name, trailer);
    let file = open(name);
    try {
      let block = readBytes(file, 0, BLOCK_BYTES);
      if (isBlank(block) && !this.#readOnly) {
        // A flush makes the header durable before any mapping.
        file.close();
        writeIndexFile(this.#disk, name, this.#header, EMPTY_INDEX);
        this.warnings.push(
          `the index file ${name} was lost with power before its first flush: it starts empty`,
        );
        file = open(name);
        block = readBytes(file, 0, BLOCK_BYTES);
      }
      this.#indexHeader = this.#checkIndexHeader(name, block);
      this.#marked = isMarkedIndexHeader(block);
      const readOnly = this.#readOnly;
      const { log, dropped } = IndexLog.open(this.#disk, file, { marked: this.#marked, readOnly });
      if (dropped > 0) {
        this.warnings.push(
          `${dropped} entries of ${name} from byte ${log.endBytes} on were never flushed before the host went ` +
            "down and were dropped: the disk is as of the last flush",
        );
      }
      this.#log = log;
      const end = this.#replay(log);
      // Data was put behind it: an earlier sealing was given up, and its remains happen to end the file.
      this.#unseal(
        trailer !== undefined && trailer.indexOffsetBytes < end * SECTOR_BYTES ? undefined : trailer,
      );
    } catch (error) {
      file.close();
      throw error;
    }
  }

  #checkIndexHeader(file: string, block: Uint8Array): LsmtBlock {
    const header = decodeBlock(block, file, 0, "index header");
    if ((header.flags & FLAG_HEADER) === 0)
      throw invalidLayer(file, 28, "index header is marked as a trailer");
    if ((header.flags & FLAG_DATA) !== 0) throw invalidLayer(file, 28, "index header is that of a data file");
    if ((header.flags & FLAG_SEALED) !== 0) throw invalidLayer(file, 28, "index header is sealed");
    if (header.indexOffsetBytes !== BLOCK_BYTES) {
      throw invalidLayer(file, 32, `index offset ${header.indexOffsetBytes}, must be ${BLOCK_BYTES}`);
    }
    if (header.uuid !== undefined && this.#header.uuid !== undefined && header.uuid !== this.#header.uuid) {
      throw invalidLayer(
        file,
        56,
        `index of layer ${header.uuid}, but the data file ${this.ref.data} is layer ${this.#header.uuid}`,
      );
    }
    return header;
  }

  /** Sealed data has its index in itself, and empty data needs no more than a new one. */
  #restoreIndex(name: string, sealed: LsmtBlock | undefined): void {
    if (this.#readOnly || (sealed === undefined && this.#data.size() > BLOCK_BYTES)) {
      throw badRequest("upper_index_missing", `upper ${this.ref.data}: its index ${name} is missing`);
    }
    // Strict: with power lost while the trailer was written, the index before it may be holes.
    const index =
      sealed === undefined ? EMPTY_INDEX : readLayerIndex(this.source, sealed, 0, { padding: "refused" });
    writeIndexFile(this.#disk, name, this.#header, index);
    this.warnings.push(`the index file ${name} was missing and has been made again`);
  }

  /**
   * The trailer at the end of the data file, if sealing put one there. The last block may also be a guest's
   * data that looks like a trailer (a layer file written inside the guest), so it must carry this layer's
   * own uuid, which no guest knows, and fit the file exactly.
   */
  #readTrailer(): LsmtBlock | undefined {
    const file = this.ref.data;
    const size = this.#data.size();
    const at = size - BLOCK_BYTES;
    if (at < BLOCK_BYTES || size % SECTOR_BYTES !== 0) return undefined;
    const bytes = readBytes(this.#data, at, BLOCK_BYTES);
    if (!hasLsmtMagic(bytes)) return undefined;
    const trailer = decodeBlock(bytes, file, at, "trailer");
    const kind = FLAG_DATA | FLAG_SEALED;
    if ((trailer.flags & (kind | FLAG_HEADER)) !== kind) return undefined;
    if (trailer.uuid === undefined || trailer.uuid !== this.#header.uuid) return undefined;
    if (trailer.indexOffsetBytes < BLOCK_BYTES || trailer.indexOffsetBytes % SECTOR_BYTES !== 0)
      return undefined;
    if (trailer.indexOffsetBytes + trailer.indexSize * MAPPING_BYTES > at) return undefined;
    return trailer;
  }

  /**
   * An upper whose sealing was not followed by a rename goes on as an upper. Every mapping of the sealed index is in
   * its index file as well, as far as it was flushed; index and trailer are left out and cut off.
   */
  #unseal(trailer: LsmtBlock | undefined): void {
    if (trailer === undefined) return;
    this.warnings.push(`${this.ref.data} was sealed but not published: it goes on as a writable layer`);
    this.#segments = this.#newSegments(trailer.indexOffsetBytes / SECTOR_BYTES);
    if (this.#readOnly) return;
    this.#data.truncate(this.#segments.fileEnd * SECTOR_BYTES);
    this.#data.sync();
  }

  /** Replays the entries that count, in order of time. Returns the end of what they point to, in sectors. */
  #replay(log: IndexLog): number {
    const { file } = log;
    const total = log.entries;
    if (total > MAX_MAPPINGS) {
      throw invalidLayer(file.name, BLOCK_BYTES, `${total} mappings, at most ${MAX_MAPPINGS} are allowed`);
    }
    const dataSectors = Math.floor(this.#data.size() / SECTOR_BYTES);
    let end = 0;
    const bytes = new Uint8Array(
      new ArrayBuffer(Math.max(1, Math.min(total, REPLAY_MAPPINGS)) * MAPPING_BYTES),
    );
    const words = new Uint32Array(bytes.buffer);
    let kept = total;
    for (let done = 0; done < kept; ) {
      const batch = Math.min(total - done, REPLAY_MAPPINGS);
      const at = BLOCK_BYTES + done * MAPPING_BYTES;
      const got = file.read(at, bytes, 0, batch * MAPPING_BYTES);
      if (got !== batch * MAPPING_BYTES) throw invalidLayer(file.name, at, "the index file became shorter");
      for (let i = 0; i < batch; i++) {
        const word = i * 4;
        if (mappingIsPadding(words, word)) continue;
        const length = mappingLength(words, word);
        const moffset = mappingTarget(words, word);
        const zeroed = mappingZeroed(words, word);
        const where = at + i * MAPPING_BYTES;
        if (moffset < BLOCK_SECTORS) {
          throw invalidLayer(file.name, where, `mapping points to sector ${moffset}, inside the header`);
        }
        if (moffset + (zeroed ? 0 : length) > dataSectors) {
          if (this.#marked && done + i < log.committed) {
            throw invalidLayer(
              file.name,
              where,
              `mapping points to sectors ${moffset}+${length}, the data file ${this.ref.data} ends at ${dataSectors}`,
            );
          }
          // Data behind the end was never flushed, nor was anything logged after it.
          kept = done + i;
          break;
        }
        end = Math.max(end, moffset + (zeroed ? 0 : length));
        this.index.replace(mappingOffset(words, word), length, moffset, zeroed);
      }
      done += batch;
    }
    if (kept === total && (this.#marked || file.size() === log.endBytes)) return end;
    if (kept < total) {
      this.warnings.push(
        `${total - kept} mappings of ${file.name} from byte ${BLOCK_BYTES + kept * MAPPING_BYTES} on point behind ` +
          "the end of the data (power was lost before a flush) and were dropped",
      );
    }
    if (this.#readOnly) return end;
    if (kept < total) this.#keepDropped(file, kept);
    // What is appended next must follow valid mappings.
    log.cut(kept);
    return end;
  }

  #keepDropped(file: DiskFile, kept: number): void {
    const from = BLOCK_BYTES + kept * MAPPING_BYTES;
    const tail = readBytes(file, from, file.size() - from);
    let name = `${file.name}.dropped`;
    for (let n = 1; this.#disk.exists(name); n++) name = `${file.name}.dropped.${n}`;
    replaceFile(this.#disk, name, (out) => out.write(0, tail, 0, tail.byteLength));
  }

  #countSegments(): void {
    const segments = this.#segments;
    let sector: number | undefined = 0;
    while (sector !== undefined) {
      sector = this.index.scan(sector, REPLAY_MAPPINGS, (_offset, length, moffset, zeroed) => {
        if (!zeroed) segments.add(moffset, length);
      });
    }
    segments.findCandidates();
    this.index.onUnmap = (moffset, length) => segments.remove(moffset, length);
  }

  #inheritSize(inheritedSizeBytes: number | undefined): void {
    const own = this.virtualSizeBytes;
    const size = own === 0 ? (inheritedSizeBytes ?? 0) : own;
    if (size === 0) return;
    const stale = (header: LsmtBlock | undefined) => header !== undefined && header.virtualSizeBytes !== size;
    if (!stale(this.#header) && !stale(this.#indexHeader)) return;
    // Both headers say the same before anything else happens to the layer.
    this.#header = { ...this.#header, virtualSizeBytes: size };
    if (this.#indexHeader !== undefined) this.#indexHeader = { ...this.#indexHeader, virtualSizeBytes: size };
    if (this.#readOnly) return;
    this.#rewriteHeaders();
  }

  /** Index header first: where both differ it decides. */
  #rewriteHeaders(): void {
    const rewrite = (file: DiskFile, block: Uint8Array) => {
      file.write(0, block, 0, block.byteLength);
      this.#syncNow(file);
    };
    if (this.#log !== undefined && this.#indexHeader !== undefined) {
      const marked = indexHeaderBlock(this.#header);
      rewrite(this.#log.file, this.#marked ? marked : encodeBlock(this.#indexHeader));
    }
    rewrite(this.#data, encodeBlock(this.#header));
    const end = BLOCK_BYTES + this.virtualSizeBytes;
    if (this.mode === "sparse" && this.#data.size() < end) {
      this.#data.truncate(end);
      this.#syncNow(this.#data);
    }
  }

  /**
   * Syncs beside a flush. Whoever is told of a failure is the only one: what the kernel has dropped then, the next
   * sync does not miss. So it counts as a failed flush.
   */
  #syncNow(file: DiskFile): void {
    try {
      file.datasync();
    } catch (error) {
      this.syncFailed(error);
      throw error;
    }
  }

  /** A sync of its data failed elsewhere: see {@link PendingFlush}. */
  syncFailed(error: unknown): void {
    this.#flushFailure ??= error;
  }

  /** Makes the disk bigger, durable when it returns. */
  grow(virtualSizeBytes: number): void {
    this.#checkWritable();
    // The index file it writes anew has the old size in its header, which would decide.
    this.#compactor?.dropRewrite();
    this.#header = { ...this.#header, virtualSizeBytes };
    if (this.#indexHeader !== undefined) this.#indexHeader = { ...this.#indexHeader, virtualSizeBytes };
    this.#rewriteHeaders();
    if (this.mode === "sparse")
      this.#segments = this.#newSegments((BLOCK_BYTES + virtualSizeBytes) / SECTOR_BYTES);
  }

  /** Names the layer below, which another has taken the place of. Durable with the next flush. */
  setParent(parentUuid: string | undefined): void {
    this.#checkWritable();
    this.#header = { ...this.#header, parentUuid };
    const block = encodeBlock(this.#header);
    // The used part of the header is within one sector: old or new.
    this.#data.write(0, block, 0, block.byteLength);
    this.#dataDirty = true;
  }

  /** Sparse: byte X of the disk lies at 4096 + X of the file; what is allocated is data. */
  #scanExtents(): void {
    const end = BLOCK_BYTES + this.virtualSizeBytes;
    if (!this.#readOnly && this.#data.size() > end) {
      // What an interrupted sealing left behind the disk; growing it would bring that to light.
      this.#data.truncate(end);
      this.#data.sync();
    }
    let position = BLOCK_BYTES;
    while (position < end) {
      const from = this.#data.seekData(position);
      if (from === undefined || from >= end) break;
      const to = Math.min(this.#data.seekHole(from), end);
      let sector = Math.floor(from / SECTOR_BYTES);
      const stop = Math.ceil(to / SECTOR_BYTES);
      while (sector < stop) {
        const length = Math.min(stop - sector, MAX_MAPPING_SECTORS);
        this.index.replace(sector - BLOCK_SECTORS, length, sector, false);
        sector += length;
      }
      position = to;
    }
    this.#segments = this.#newSegments(end / SECTOR_BYTES);
  }

  #checkWritable(): void {
    if (!this.#open) throw new Error(`upper ${this.ref.data}: used after close`);
    if (this.#readOnly) throw badRequest("read_only", `upper ${this.ref.data} is open for reading only`);
    if (this.index.count + 4 > MAX_MAPPINGS) {
      throw new AenvError({
        code: "upper_full",
        status: 507,
        message: `upper ${this.ref.data} has ${this.index.count} mappings, the most a layer can have`,
        remediation: "take a snapshot, which starts a fresh upper",
      });
    }
  }

  /** Appends to the index file, which gets the mark of epochs.ts first where it was made without. */
  #appendMapping(offset: number, length: number, moffset: number, zeroed: boolean): void {
    if (this.#log !== undefined) {
      if (!this.#marked) this.#adoptIndex(this.#log);
      this.#log.append(offset, length, moffset, zeroed);
    }
    this.index.replace(offset, length, moffset, zeroed);
  }

  #adoptIndex(log: IndexLog): void {
    this.#syncNow(this.#data);
    // It counts in entries of the file that is replaced, and has the name that is needed now.
    this.#compactor?.dropRewrite();
    const name = compactionPath(indexPathOf(this.ref));
    this.#disk.removeIfPresent(name);
    const file = this.#disk.create(name);
    let taken = false;
    try {
      writeIndex(file, this.#header, this.index.toFlat(0));
      file.sync();
      this.#switchIndex(log, file, this.index.count, () => {
        taken = true;
      });
    } catch (error) {
      if (!taken) {
        file.close();
        this.#disk.removeIfPresent(name);
      }
      throw error;
    }
  }

  /**
   * Puts another file, durable and of so many entries, in the index file's place. The log goes on in it as soon as it
   * has the name (then `taken` is called): what is appended to the old one from then on nobody would find. What can
   * fail is done before; when the name cannot be made durable, the next flush has to, and this throws.
   */
  #switchIndex(log: IndexLog, file: DiskFile, entries: number, taken: () => void): void {
    const name = indexPathOf(this.ref);
    using directories = new DisposableStack();
    const names = this.#disk.directoriesOf(name).map((directory) => directories.use(directory));
    this.#disk.rename(file.name, name);
    file.name = name;
    const old = log.file;
    log.moveTo(file, entries);
    this.#marked = true;
    taken();
    if (this.#flushing === undefined) directories.defer(() => old.close());
    else this.#replaced.push(old);
    const before = this.#namesDirty;
    this.#namesDirty = true;
    for (const directory of names) directory.datasync();
    this.#namesDirty = before;
  }

  /** Places for a write of `length` sectors at `offset`, counted as in use until they are mapped or released. */
  reserve(offset: number, length: number): WritePiece[] {
    this.#checkWritable();
    this.#touched = true;
    const pieces: WritePiece[] = [];
    if (this.mode === "sparse") {
      for (let done = 0; done < length; ) {
        const piece = Math.min(length - done, MAX_MAPPING_SECTORS);
        const moffset = BLOCK_SECTORS + offset + done;
        pieces.push({ offset: offset + done, length: piece, moffset, inPlace: false });
        done += piece;
      }
      return pieces;
    }
    const append = (from: number, to: number) => {
      for (let at = from; at < to; ) {
        const place = this.#segments.reserve(to - at, WRITE_SECTORS);
        pieces.push({ offset: at, length: place.length, moffset: place.offset, inPlace: false });
        at += place.length;
      }
    };
    let position = offset;
    if (this.mode === "hybridLogStructured") {
      // What has data of this layer is overwritten in place, the rest is appended.
      const inPlace: WritePiece[] = [];
      this.index.visit(offset, length, (from, partLength, moffset, zeroed) => {
        if (!zeroed) inPlace.push({ offset: from, length: partLength, moffset, inPlace: true });
      });
      for (const piece of inPlace) {
        append(position, piece.offset);
        pieces.push(piece);
        position = piece.offset + piece.length;
      }
    }
    append(position, offset + length);
    return pieces;
  }

  /** The piece's data is in the file: from now on reads find it. */
  map(piece: WritePiece): void {
    this.#dataDirty = true;
    if (!piece.inPlace) this.#appendMapping(piece.offset, piece.length, piece.moffset, false);
  }

  /** The piece was not written: its place is nobody's. */
  release(piece: WritePiece): void {
    this.#dataDirty = true;
    if (!piece.inPlace && this.mode !== "sparse") this.#segments.remove(piece.moffset, piece.length);
  }

  /** All in sectors. */
  write(offset: number, source: Uint8Array, sourceOffset: number, length: number): void {
    const pieces = this.reserve(offset, length);
    this.#dataDirty = true;
    for (const [number, piece] of pieces.entries()) {
      try {
        this.#data.write(
          piece.moffset * SECTOR_BYTES,
          source,
          sourceOffset + (piece.offset - offset) * SECTOR_BYTES,
          piece.length * SECTOR_BYTES,
        );
        this.map(piece);
      } catch (error) {
        for (const rest of pieces.slice(number)) this.release(rest);
        throw error;
      }
    }
  }

  /** The range reads as zeros. Sparse: only until it is opened again where a lower has data, see stack.ts. */
  discard(offset: number, length: number): void {
    this.#checkWritable();
    this.#touched = true;
    if (this.mode === "sparse") {
      this.#dataDirty = true;
      this.#data.punchHole(BLOCK_BYTES + offset * SECTOR_BYTES, length * SECTOR_BYTES);
    }
    // Readers want it inside the file, which may be shorter than what was handed out (writes under way, failed).
    const moffset = Math.max(
      BLOCK_SECTORS,
      Math.min(this.#segments.fileEnd, Math.floor(this.#data.size() / SECTOR_BYTES)),
    );
    for (let done = 0; done < length; ) {
      const piece = Math.min(length - done, MAX_MAPPING_SECTORS);
      this.#appendMapping(offset + done, piece, moffset, true);
      done += piece;
    }
  }

  /** Everything written is on stable storage: data, then the record that says so, then the index. */
  flush(): void {
    const pending = this.beginFlush();
    if (pending === undefined) return;
    try {
      for (const file of pending.first) file.datasync();
      for (const file of pending.afterFirst()) file.datasync();
    } catch (error) {
      pending.failed(error);
      throw error;
    }
    pending.done();
  }

  /** A flush in steps, see PendingFlush; undefined when there is nothing to do. One at a time. */
  beginFlush(): PendingFlush | undefined {
    if (!this.#open) throw new Error(`upper ${this.ref.data}: used after close`);
    if (this.#readOnly) return undefined;
    this.#checkFlushable();
    const log = this.#log;
    if (!this.#dataDirty && !this.#namesDirty && log?.uncommitted !== true) return undefined;
    const names = this.#namesDirty
      ? this.#disk.directoriesOf(this.ref.data, ...(log === undefined ? [] : [indexPathOf(this.ref)]))
      : undefined;
    // What is renamed from now on is the next flush's.
    this.#namesDirty = false;
    const epoch = log?.uncommitted === true ? log.beginEpoch() : undefined;
    const taken = this.#segments.beginFlush();
    this.#dataDirty = false;
    const end = () => {
      this.#flushing = undefined;
      for (const directory of names ?? []) directory[Symbol.dispose]();
      for (const file of this.#replaced.splice(0)) file.close();
    };
    this.#flushing = {
      first: [this.#data, ...(names === undefined || log === undefined ? [] : [log.file]), ...(names ?? [])],
      afterFirst: () => {
        if (log === undefined || epoch === undefined) return [];
        log.commit(epoch);
        return [log.file];
      },
      done: () => {
        end();
        this.#whenReadsEnd(() => this.#segments.endFlush(taken));
      },
      failed: (error) => {
        this.syncFailed(error);
        end();
        this.#segments.abortFlush(taken);
      },
    };
    return this.#flushing;
  }

  #checkFlushable(): void {
    if (this.#flushing !== undefined) throw new Error(`upper ${this.ref.data}: two flushes at once`);
    if (this.#flushFailure === undefined) return;
    throw new AenvError({
      code: "upper_flush_failed",
      message: `upper ${this.ref.data} lost writes: an earlier flush failed`,
      remediation: "check the host's disk and log; open the image again to go on with what is there",
      cause: this.#flushFailure,
    });
  }

  /**
   * A read that is under way while other calls are made: space it may read from is not used again before the
   * returned function is called. Reads made in one go need none.
   */
  pin(): () => void {
    const pin = this.#nextPin++;
    this.#pins.add(pin);
    return () => {
      this.#pins.delete(pin);
      this.#endReads();
    };
  }

  /** Runs `action` when the reads that are under way now have ended. */
  #whenReadsEnd(action: () => void): void {
    this.#quarantine.push({ before: this.#nextPin, run: action });
    this.#endReads();
  }

  #endReads(): void {
    // Pins are kept in the order they were taken.
    const oldest = this.#pins.values().next().value ?? Number.POSITIVE_INFINITY;
    while (this.#quarantine.length > 0 && this.#quarantine[0]!.before <= oldest) {
      this.#quarantine.shift()?.run();
    }
  }

  /** See LayerStack.compactStep. */
  compactStep(budgetBytes: number): CompactProgress {
    this.#checkWritable();
    return this.#compactor?.step(budgetBytes) ?? { done: true, movedBytes: 0, flushNeeded: false };
  }

  get compactionDue(): boolean {
    return this.#compactor?.due ?? false;
  }

  #makeCompactor(): Compactor {
    const { index } = this;
    return new Compactor({
      index,
      segments: () => this.#segments,
      log: () => {
        const log = this.#log;
        if (log === undefined)
          throw new Error("internal error, please report: compaction without an index file");
        return log;
      },
      indexSlack: this.#tuning.indexSlack ?? INDEX_SLACK,
      flushing: () => this.#flushing !== undefined,
      header: () => indexHeaderBlock(this.#header),
      flush: () => this.flush(),
      readData: (sector, target, sectors) =>
        this.source.read(sector * SECTOR_BYTES, target, 0, sectors * SECTOR_BYTES),
      punch: (sector, sectors) => this.#data.punchHole(sector * SECTOR_BYTES, sectors * SECTOR_BYTES),
      relocate: (offset, source, sectors) => {
        for (let done = 0; done < sectors; ) {
          const place = this.#segments.reserve(sectors - done, WRITE_SECTORS);
          const piece = {
            offset: offset + done,
            length: place.length,
            moffset: place.offset,
            inPlace: false,
          };
          try {
            this.#data.write(
              place.offset * SECTOR_BYTES,
              source,
              done * SECTOR_BYTES,
              place.length * SECTOR_BYTES,
            );
            this.map(piece);
          } catch (error) {
            this.release(piece);
            throw error;
          }
          done += place.length;
        }
      },
      disk: this.#disk,
      compactionPath: () => compactionPath(indexPathOf(this.ref)),
      switchIndex: (file, entries, taken) => this.#switchIndex(this.#log!, file, entries, taken),
    });
  }

  /**
   * Appends index and trailer: with the data file synced, which is the caller's to do before it gets its name, it is
   * a finished layer. Returns the way back. The cost depends on the number of mappings, not on the amount of data.
   */
  sealInPlace(): { undo: () => void; index: (layer: number) => FlatIndex; file: SyncTarget } {
    this.#checkWritable();
    this.#checkFlushable();
    this.#compactor?.abort();
    // In a sparse file's last block the index would make that block data, should the sealing be interrupted.
    const unit = this.mode === "sparse" ? BLOCK_SECTORS : 1;
    const start = Math.ceil(this.#segments.fileEnd / unit) * unit * SECTOR_BYTES;
    const index = this.index.toFlat(0);
    const undo = () => {
      this.#data.truncate(start);
      try {
        this.#data.sync();
      } catch (error) {
        this.syncFailed(error);
        throw error;
      }
    };
    try {
      let position = start;
      for (const bytes of encodeIndex(index, 0)) {
        this.#data.write(position, bytes, 0, bytes.byteLength);
        position += bytes.byteLength;
      }
      const end = Math.ceil((position + BLOCK_BYTES) / BLOCK_BYTES) * BLOCK_BYTES;
      const tail = new Uint8Array(new ArrayBuffer(end - position));
      tail.set(
        encodeBlock({
          ...this.#header,
          flags: (this.#header.flags & ~FLAG_HEADER) | FLAG_DATA | FLAG_SEALED,
          virtualSizeBytes: this.virtualSizeBytes,
          indexOffsetBytes: start,
          indexSize: index.count,
        }),
        tail.byteLength - BLOCK_BYTES,
      );
      this.#data.write(position, tail, 0, tail.byteLength);
    } catch (error) {
      undo();
      throw error;
    }
    return {
      undo,
      file: this.#data,
      index: (layer) => ({ ...index, tags: index.tags.map((tag) => (tag & ZEROED_TAG) | layer) }),
    };
  }

  /** Nothing was written to it since it was opened. */
  get untouched(): boolean {
    return !this.#touched;
  }

  /** Its files have got other names. */
  moved(ref: UpperRef): void {
    this.#ref = ref;
    this.#namesDirty = true;
  }

  /** Size of the data file as it is now. */
  fileSizeBytes(): number {
    return this.#data.size();
  }

  /** Throws when what is in memory contradicts itself; for tests. */
  checkInvariants(): void {
    this.index.checkInvariants();
    this.#segments.checkInvariants();
  }

  /** Gives up everything but the open data file, which lives on as the source of a read-only layer. */
  handOverData(): void {
    this.#data.lock("unlock");
    this.#dataHandedOver = true;
    this[Symbol.dispose]();
  }

  [Symbol.dispose](): void {
    if (!this.#open) return;
    this.#open = false;
    try {
      this.#compactor?.abort();
      const clean = !this.#dataDirty && this.#flushing === undefined && this.#flushFailure === undefined;
      if (clean && !this.#readOnly && !this.#dataHandedOver && this.#log?.uncommitted === false) {
        this.#log.closeSession();
      }
      if (!this.#readOnly && !this.#dataHandedOver) this.#log?.trim();
    } finally {
      this.#log?.file.close();
      for (const file of this.#replaced.splice(0)) file.close();
      if (!this.#dataHandedOver) this.#data.close();
    }
  }
}
