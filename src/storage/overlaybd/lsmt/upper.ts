import { closeSync, constants, existsSync } from "node:fs";
import {
  fdatasync,
  fileSize,
  fsync,
  lockFile,
  pread,
  punchHole,
  pwrite,
  seekData,
  seekHole,
  truncate,
} from "../../../../ffi/io.ts";
import { AenvError } from "../../../lib/errors.ts";
import { newId } from "../../../lib/ids.ts";
import { badRequest, invalidLayer } from "../errors.ts";
import { appendToFile, fsyncDirectoriesOf, openFile, replaceFile } from "../files.ts";
import type { ReadSource } from "../source.ts";
import type { UpperMode, UpperRef } from "../types.ts";
import { ChunkedIndex } from "./chunked-index.ts";
import { type FlatIndex, ZEROED_TAG } from "./flat-index.ts";
import {
  BLOCK_BYTES,
  BLOCK_SECTORS,
  decodeBlock,
  encodeBlock,
  encodeMapping,
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
import { readLayerIndex } from "./layer.ts";
import { encodeIndex } from "./writer.ts";

/** Longest piece of a write that gets one mapping (4 MiB). */
const WRITE_SECTORS = 8192;
const REPLAY_MAPPINGS = 1 << 16;

const MODE_FLAGS: Readonly<Record<UpperMode, number>> = {
  logStructured: 0,
  sparse: FLAG_SPARSE,
  hybridLogStructured: FLAG_HYBRID,
};

export interface CreateUpperOptions {
  /** 0: inherit when stacked. */
  readonly virtualSizeBytes: number;
  readonly parentUuid?: string | undefined;
  /** Absent: a new one. */
  readonly uuid?: string | undefined;
  /**
   * `unsynced`: the files are there for every process, but not yet for the next boot; the first `flush` of the
   * Upper sees to that. Saves the fresh upper of a starting sandbox several syncs.
   */
  readonly durability?: "synced" | "unsynced";
}

function indexPathOf(upper: UpperRef): string {
  if (upper.index === undefined) {
    throw badRequest(
      "invalid_upper",
      `upper ${upper.data}: an index path is needed unless the mode is sparse`,
    );
  }
  return upper.index;
}

/**
 * Creates an empty upper. A crash leaves nothing, or an index file without a data file, which the next
 * creation replaces.
 */
export function createUpperFiles(upper: UpperRef, options: CreateUpperOptions): void {
  const mode = upper.mode ?? "logStructured";
  const uuid = options.uuid ?? newId();
  const identity = {
    uuid,
    parentUuid: options.parentUuid,
    virtualSizeBytes: options.virtualSizeBytes,
    indexSize: 0,
  };
  if (existsSync(upper.data)) {
    throw badRequest("upper_exists", `upper ${upper.data} exists`, "open it, or choose another path");
  }
  const publish = (target: string, block: Uint8Array, sizeBytes: number) => {
    replaceFile(
      target,
      (fd, temporary) => {
        if (sizeBytes > 0) truncate(fd, sizeBytes, temporary);
        pwrite(fd, block, 0, block.byteLength, 0, temporary);
        if (
          mode === "sparse" &&
          sizeBytes > BLOCK_BYTES &&
          seekData(fd, BLOCK_BYTES, temporary) !== undefined
        ) {
          throw badRequest(
            "no_sparse_files",
            `upper ${target}: this file system does not keep holes, which the sparse mode needs`,
            "use the mode logStructured",
          );
        }
      },
      options.durability,
    );
  };
  const flags = MODE_FLAGS[mode];
  if (mode !== "sparse") {
    const index = indexPathOf(upper);
    if (existsSync(index) && hasMappings(index)) {
      throw badRequest(
        "upper_data_missing",
        `upper ${upper.data} is missing but its index ${index} has mappings`,
        "use the layer it was sealed as, restore the data file, or remove the index to start empty",
      );
    }
    const hybrid = flags & FLAG_HYBRID;
    publish(
      index,
      encodeBlock({ ...identity, flags: FLAG_HEADER | hybrid, indexOffsetBytes: BLOCK_BYTES }),
      0,
    );
  }
  publish(
    upper.data,
    encodeBlock({ ...identity, flags: FLAG_HEADER | FLAG_DATA | flags, indexOffsetBytes: 0 }),
    mode === "sparse" ? BLOCK_BYTES + options.virtualSizeBytes : 0,
  );
  if (options.durability !== "unsynced") {
    fsyncDirectoriesOf(upper.data, ...(mode === "sparse" ? [] : [indexPathOf(upper)]));
  }
}

function hasMappings(indexFile: string): boolean {
  const fd = openFile(indexFile, constants.O_RDONLY);
  try {
    return fileSize(fd, indexFile) >= BLOCK_BYTES + MAPPING_BYTES;
  } finally {
    closeSync(fd);
  }
}

/** Header of a data file, without opening it as an upper; undefined when there is no file. */
export function readDataHeader(file: string): LsmtBlock | undefined {
  if (!existsSync(file)) return undefined;
  const fd = openFile(file, constants.O_RDONLY);
  try {
    return decodeBlock(readBlock(fd, 0, file), file, 0, "header");
  } finally {
    closeSync(fd);
  }
}

function readBlock(fd: number, offset: number, file: string): Uint8Array {
  const bytes = new Uint8Array(new ArrayBuffer(BLOCK_BYTES));
  return bytes.subarray(0, pread(fd, bytes, 0, BLOCK_BYTES, offset, file));
}

export interface OpenUpperOptions {
  /** Nothing is changed on disk: a damaged tail is skipped, not cut off. */
  readonly readOnly: boolean;
  /** Size that an upper of size 0 takes. Undefined: it stays 0. */
  readonly inheritedSizeBytes?: number | undefined;
}

/**
 * A writable layer. `write` and `discard` have put data and mapping into the files when they return, `flush`
 * makes them safe against power loss, data before index. One owner: the data file is locked.
 */
export class Upper implements Disposable {
  readonly ref: UpperRef;
  readonly mode: UpperMode;
  readonly index = new ChunkedIndex();
  /** The data file as a source for reads of the stack; not owned by whoever reads. */
  readonly source: ReadSource;
  /** What was noticed and repaired when it was opened. */
  readonly warnings: string[] = [];
  readonly #dataFd: number;
  readonly #indexFd: number | undefined;
  readonly #readOnly: boolean;
  #header: LsmtBlock;
  #indexHeader: LsmtBlock | undefined;
  #dataEnd = 0;
  #indexEnd = 0;
  #dataDirty = false;
  #indexDirty = false;
  /** Whoever created the files may not have synced them, nor their names: the first flush does. */
  #unsynced = true;
  #open = true;
  #dataHandedOver = false;
  readonly #entry = new Uint8Array(new ArrayBuffer(MAPPING_BYTES));
  readonly #entryWords = new Uint32Array(this.#entry.buffer);

  constructor(ref: UpperRef, options: OpenUpperOptions) {
    this.ref = ref;
    this.#readOnly = options.readOnly;
    using cleanup = new DisposableStack();
    const flags = options.readOnly ? constants.O_RDONLY : constants.O_RDWR;
    const open = (file: string): number => {
      let fd: number;
      try {
        fd = openFile(file, flags);
      } catch (error) {
        throw badRequest(
          "upper_not_found",
          `cannot open upper ${file}: ${error instanceof Error ? error.message : String(error)}`,
        );
      }
      cleanup.defer(() => closeSync(fd));
      return fd;
    };
    const dataFd = open(ref.data);
    this.#dataFd = dataFd;
    if (!lockFile(dataFd, options.readOnly ? "shared" : "exclusive", ref.data)) {
      throw new AenvError({
        code: "upper_in_use",
        status: 409,
        message: `upper ${ref.data} is in use by another device or process`,
        remediation: "release the device that has it open",
      });
    }
    this.#header = this.#readDataHeader();
    this.mode = this.#modeOf(this.#header);
    this.#indexFd = this.mode === "sparse" ? undefined : this.#openIndex(open);
    const self = this;
    this.source = {
      name: ref.data,
      get sizeBytes() {
        return self.#dataEnd;
      },
      read: (offsetBytes, target, targetOffset, lengthBytes) => {
        const got = pread(dataFd, target, targetOffset, lengthBytes, offsetBytes, ref.data);
        if (got === lengthBytes) return;
        // The sparse file's last block may lie behind its end: what was never written are zeros there.
        if (this.mode === "sparse") target.fill(0, targetOffset + got, targetOffset + lengthBytes);
        else throw invalidLayer(ref.data, offsetBytes, `${lengthBytes} bytes wanted, ${got} read`);
      },
      direct: { fd: dataFd, baseBytes: 0 },
      [Symbol.dispose]: () => closeSync(dataFd),
    };
    this.#dataEnd = fileSize(dataFd, ref.data);
    this.#unseal();
    if (this.#indexFd !== undefined) this.#replay(this.#indexFd);
    this.#inheritSize(options.inheritedSizeBytes);
    if (this.mode === "sparse") this.#scanExtents();
    cleanup.move();
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

  /** Bytes of payload in the data file, garbage included. */
  get dataBytes(): number {
    if (this.mode === "sparse") return this.index.dataSectors * SECTOR_BYTES;
    return Math.max(0, this.#dataEnd - BLOCK_BYTES);
  }

  #readDataHeader(): LsmtBlock {
    const file = this.ref.data;
    const header = decodeBlock(readBlock(this.#dataFd, 0, file), file, 0, "header");
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

  #openIndex(open: (file: string) => number): number {
    const file = indexPathOf(this.ref);
    if (!existsSync(file)) {
      // Sealed data needs no index, and empty data needs no more than a new one.
      const sealed = this.#readTrailer() !== undefined;
      if (this.#readOnly || (!sealed && fileSize(this.#dataFd, this.ref.data) > BLOCK_BYTES)) {
        throw badRequest("upper_index_missing", `upper ${this.ref.data}: its index ${file} is missing`);
      }
      this.#writeIndexFile(file);
      this.warnings.push(`the index file ${file} was missing and has been made again`);
    }
    const fd = open(file);
    const header = decodeBlock(readBlock(fd, 0, file), file, 0, "index header");
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
    this.#indexHeader = header;
    return fd;
  }

  /** An empty index file that belongs to this data file. */
  #writeIndexFile(file: string): void {
    replaceFile(file, (fd, temporary) => {
      const block = encodeBlock({
        ...this.#header,
        flags: (this.#header.flags & ~FLAG_DATA) | FLAG_HEADER,
        indexOffsetBytes: BLOCK_BYTES,
        indexSize: 0,
      });
      pwrite(fd, block, 0, block.byteLength, 0, temporary);
    });
    fsyncDirectoriesOf(file);
  }

  /**
   * The trailer at the end of the data file, if sealing put one there. The last block may also be a guest's
   * data that looks like a trailer (a layer file written inside the guest), so it must carry this layer's
   * own uuid, which no guest knows, and fit the file exactly.
   */
  #readTrailer(): LsmtBlock | undefined {
    const file = this.ref.data;
    const size = fileSize(this.#dataFd, file);
    const at = size - BLOCK_BYTES;
    if (at < BLOCK_BYTES || size % SECTOR_BYTES !== 0) return undefined;
    const bytes = readBlock(this.#dataFd, at, file);
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
   * An upper whose sealing was not followed by a rename goes on as an upper: its index file is written anew
   * from the sealed index (complete and synced, so it is the truth), then index and trailer are cut off.
   */
  #unseal(): void {
    const trailer = this.#readTrailer();
    if (trailer === undefined) return;
    const index = readLayerIndex(this.source, trailer, 0);
    this.warnings.push(`${this.ref.data} was sealed but not published: it goes on as a writable layer`);
    if (this.#readOnly) {
      this.#dataEnd = trailer.indexOffsetBytes;
      return;
    }
    if (this.#indexFd !== undefined) {
      // Over the open file: its lock and descriptor stay valid. Until this is synced the trailer stays.
      const file = indexPathOf(this.ref);
      let position = BLOCK_BYTES;
      truncate(this.#indexFd, BLOCK_BYTES, file);
      for (const bytes of encodeIndex(index, 0)) {
        pwrite(this.#indexFd, bytes, 0, bytes.byteLength, position, file);
        position += bytes.byteLength;
      }
      fsync(this.#indexFd, file);
    }
    truncate(this.#dataFd, trailer.indexOffsetBytes, this.ref.data);
    fsync(this.#dataFd, this.ref.data);
    this.#dataEnd = trailer.indexOffsetBytes;
  }

  /** Replays the index file in order of time. */
  #replay(indexFd: number): void {
    const file = indexPathOf(this.ref);
    const size = fileSize(indexFd, file);
    const total = Math.floor((size - BLOCK_BYTES) / MAPPING_BYTES);
    if (total > MAX_MAPPINGS) {
      throw invalidLayer(file, BLOCK_BYTES, `${total} mappings, at most ${MAX_MAPPINGS} are allowed`);
    }
    // An append that power loss cut inside a sector leaves a size that is no multiple of it.
    this.#dataEnd = Math.ceil(this.#dataEnd / SECTOR_BYTES) * SECTOR_BYTES;
    const dataSectors = Math.floor(fileSize(this.#dataFd, this.ref.data) / SECTOR_BYTES);
    const bytes = new Uint8Array(
      new ArrayBuffer(Math.max(1, Math.min(total, REPLAY_MAPPINGS)) * MAPPING_BYTES),
    );
    const words = new Uint32Array(bytes.buffer);
    let kept = total;
    for (let done = 0; done < kept; ) {
      const batch = Math.min(total - done, REPLAY_MAPPINGS);
      const at = BLOCK_BYTES + done * MAPPING_BYTES;
      const got = pread(indexFd, bytes, 0, batch * MAPPING_BYTES, at, file);
      if (got !== batch * MAPPING_BYTES) throw invalidLayer(file, at, "the index file became shorter");
      for (let i = 0; i < batch; i++) {
        const word = i * 4;
        if (mappingIsPadding(words, word)) continue;
        const length = mappingLength(words, word);
        const moffset = mappingTarget(words, word);
        const zeroed = mappingZeroed(words, word);
        if (moffset < BLOCK_SECTORS) {
          throw invalidLayer(
            file,
            at + i * MAPPING_BYTES,
            `mapping points to sector ${moffset}, inside the header`,
          );
        }
        if (moffset + (zeroed ? 0 : length) > dataSectors) {
          // Data behind the end was never flushed, nor was anything logged after it.
          kept = done + i;
          break;
        }
        this.index.replace(mappingOffset(words, word), length, moffset, zeroed);
      }
      done += batch;
    }
    this.#indexEnd = BLOCK_BYTES + kept * MAPPING_BYTES;
    if (kept < total) {
      this.warnings.push(
        `${total - kept} mappings of ${file} from byte ${this.#indexEnd} on point behind the end of the data ` +
          "(power was lost before a flush) and were dropped",
      );
    }
    if (size > this.#indexEnd && !this.#readOnly) this.#cutIndex(indexFd, size, kept < total);
  }

  /** Cuts what is no valid tail, so that what is appended next follows valid mappings. */
  #cutIndex(indexFd: number, size: number, keepCopy: boolean): void {
    const file = indexPathOf(this.ref);
    if (keepCopy) {
      const tail = new Uint8Array(new ArrayBuffer(size - this.#indexEnd));
      pread(indexFd, tail, 0, tail.byteLength, this.#indexEnd, file);
      appendToFile(`${file}.dropped`, tail);
    }
    truncate(indexFd, this.#indexEnd, file);
    fsync(indexFd, file);
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
    const rewrite = (fd: number, header: LsmtBlock, file: string) => {
      const block = encodeBlock(header);
      pwrite(fd, block, 0, block.byteLength, 0, file);
      fdatasync(fd, file);
    };
    if (this.#indexFd !== undefined && this.#indexHeader !== undefined) {
      rewrite(this.#indexFd, this.#indexHeader, indexPathOf(this.ref));
    }
    rewrite(this.#dataFd, this.#header, this.ref.data);
    if (this.mode === "sparse" && fileSize(this.#dataFd, this.ref.data) < BLOCK_BYTES + size) {
      truncate(this.#dataFd, BLOCK_BYTES + size, this.ref.data);
    }
  }

  /** Sparse: byte X of the disk lies at 4096 + X of the file; what is allocated is data. */
  #scanExtents(): void {
    const file = this.ref.data;
    const end = BLOCK_BYTES + this.virtualSizeBytes;
    let position = BLOCK_BYTES;
    while (position < end) {
      const from = seekData(this.#dataFd, position, file);
      if (from === undefined || from >= end) break;
      const to = Math.min(seekHole(this.#dataFd, from, file), end);
      let sector = Math.floor(from / SECTOR_BYTES);
      const stop = Math.ceil(to / SECTOR_BYTES);
      while (sector < stop) {
        const length = Math.min(stop - sector, MAX_MAPPING_SECTORS);
        this.index.replace(sector - BLOCK_SECTORS, length, sector, false);
        sector += length;
      }
      position = to;
    }
    this.#dataEnd = end;
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

  #appendMapping(offset: number, length: number, moffset: number, zeroed: boolean): void {
    if (this.#indexFd !== undefined) {
      encodeMapping(this.#entryWords, 0, offset, length, moffset, zeroed);
      pwrite(this.#indexFd, this.#entry, 0, MAPPING_BYTES, this.#indexEnd, this.ref.index ?? this.ref.data);
      this.#indexEnd += MAPPING_BYTES;
      this.#indexDirty = true;
    }
    this.index.replace(offset, length, moffset, zeroed);
  }

  #append(offset: number, source: Uint8Array, sourceOffset: number, length: number): void {
    for (let done = 0; done < length; ) {
      const piece = Math.min(length - done, WRITE_SECTORS);
      const moffset = this.#dataEnd / SECTOR_BYTES;
      this.#dataDirty = true;
      pwrite(
        this.#dataFd,
        source,
        sourceOffset + done * SECTOR_BYTES,
        piece * SECTOR_BYTES,
        this.#dataEnd,
        this.ref.data,
      );
      this.#dataEnd += piece * SECTOR_BYTES;
      this.#appendMapping(offset + done, piece, moffset, false);
      done += piece;
    }
  }

  /** All in sectors. */
  write(offset: number, source: Uint8Array, sourceOffset: number, length: number): void {
    this.#checkWritable();
    if (this.mode === "logStructured") {
      this.#append(offset, source, sourceOffset, length);
      return;
    }
    if (this.mode === "sparse") {
      this.#dataDirty = true;
      pwrite(
        this.#dataFd,
        source,
        sourceOffset,
        length * SECTOR_BYTES,
        BLOCK_BYTES + offset * SECTOR_BYTES,
        this.ref.data,
      );
      for (let done = 0; done < length; ) {
        const piece = Math.min(length - done, MAX_MAPPING_SECTORS);
        this.index.replace(offset + done, piece, BLOCK_SECTORS + offset + done, false);
        done += piece;
      }
      return;
    }
    // Hybrid: what has data of this layer is overwritten in place, the rest is appended.
    const inPlace: [offset: number, length: number, moffset: number][] = [];
    this.index.visit(offset, length, (from, partLength, moffset, zeroed) => {
      if (!zeroed) inPlace.push([from, partLength, moffset]);
    });
    let position = offset;
    const at = (sector: number) => sourceOffset + (sector - offset) * SECTOR_BYTES;
    for (const [from, partLength, moffset] of inPlace) {
      if (from > position) this.#append(position, source, at(position), from - position);
      this.#dataDirty = true;
      pwrite(
        this.#dataFd,
        source,
        at(from),
        partLength * SECTOR_BYTES,
        moffset * SECTOR_BYTES,
        this.ref.data,
      );
      position = from + partLength;
    }
    if (position < offset + length) this.#append(position, source, at(position), offset + length - position);
  }

  /** The range reads as zeros. Sparse: only until it is opened again where a lower has data, see stack.ts. */
  discard(offset: number, length: number): void {
    this.#checkWritable();
    if (this.mode === "sparse") {
      this.#dataDirty = true;
      punchHole(this.#dataFd, BLOCK_BYTES + offset * SECTOR_BYTES, length * SECTOR_BYTES, this.ref.data);
    }
    const moffset = this.#dataEnd / SECTOR_BYTES;
    for (let done = 0; done < length; ) {
      const piece = Math.min(length - done, MAX_MAPPING_SECTORS);
      this.#appendMapping(offset + done, piece, moffset, true);
      done += piece;
    }
  }

  /** Everything written is on stable storage: data first, so that no durable mapping lacks its data. */
  flush(): void {
    if (this.#readOnly) return;
    if (this.#unsynced) {
      this.#dataDirty = true;
      this.#indexDirty = true;
      fsyncDirectoriesOf(this.ref.data, ...(this.#indexFd === undefined ? [] : [indexPathOf(this.ref)]));
      this.#unsynced = false;
    }
    if (this.#dataDirty) {
      fdatasync(this.#dataFd, this.ref.data);
      this.#dataDirty = false;
    }
    if (this.#indexDirty && this.#indexFd !== undefined) {
      fdatasync(this.#indexFd, this.ref.index ?? this.ref.data);
      this.#indexDirty = false;
    }
  }

  /**
   * Appends index and trailer, so that the data file is a finished layer, and syncs it. Returns the way back.
   * Its cost depends on the number of mappings and on what was not flushed yet, not on the amount of data.
   */
  sealInPlace(): { undo: () => void; index: (layer: number) => FlatIndex } {
    this.#checkWritable();
    this.flush();
    const file = this.ref.data;
    const start = Math.ceil(this.#dataEnd / SECTOR_BYTES) * SECTOR_BYTES;
    const index = this.index.toFlat(0);
    const undo = () => {
      truncate(this.#dataFd, start, file);
      fsync(this.#dataFd, file);
    };
    try {
      let position = start;
      for (const bytes of encodeIndex(index, 0)) {
        pwrite(this.#dataFd, bytes, 0, bytes.byteLength, position, file);
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
      pwrite(this.#dataFd, tail, 0, tail.byteLength, position, file);
      fsync(this.#dataFd, file);
    } catch (error) {
      undo();
      throw error;
    }
    return {
      undo,
      index: (layer) => ({ ...index, tags: index.tags.map((tag) => (tag & ZEROED_TAG) | layer) }),
    };
  }

  /** Size of the data file as it is now. */
  fileSizeBytes(): number {
    return fileSize(this.#dataFd, this.ref.data);
  }

  /** Gives up everything but the open data file, which lives on as the source of a read-only layer. */
  handOverData(): void {
    lockFile(this.#dataFd, "unlock", this.ref.data);
    this.#dataHandedOver = true;
    this[Symbol.dispose]();
  }

  [Symbol.dispose](): void {
    if (!this.#open) return;
    this.#open = false;
    if (this.#indexFd !== undefined) closeSync(this.#indexFd);
    if (!this.#dataHandedOver) closeSync(this.#dataFd);
  }
}
