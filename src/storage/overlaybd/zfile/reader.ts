import { CODEC_ALGORITHMS, Codec, type CodecAlgorithm, crc32cRaw } from "../../../../ffi/codec.ts";
import { MappedFile } from "../../../../ffi/mapped.ts";
import { invalidLayer } from "../errors.ts";
import { type FileRangeVisitor, type ReadSource, readUpTo } from "../source.ts";
import { type CachedBlocks, threadBlockCache } from "./block-cache.ts";
import {
  decodeZFileBlock,
  hasZFileMagic,
  ZFILE_BLOCK_BYTES,
  ZFILE_CHECKSUM_BYTES,
  ZFILE_GROUP_BYTES,
  ZFILE_MAX_BLOCK_SIZE,
  ZFILE_MIN_BLOCK_SIZE,
  type ZFileBlock,
  ZFLAG_DATA,
  ZFLAG_DIGEST,
  ZFLAG_HEADER,
  ZFLAG_OVERWRITTEN,
  ZFLAG_SEALED,
} from "./format.ts";

const MAX_BLOCKS = 1_000_000_000;
/** Blocks per absolute offset in memory: in between, 32-bit offsets relative to it. */
const SPAN_BITS = 10;
/** Compressed bytes read at once: more than the longest possible block takes. */
const READ_BYTES = 256 * 1024;
const TABLE_BATCH_BYTES = 1 << 20;
/** Blocks decoded by one call at most. */
const MAPPED_BLOCKS = 64;

/** True when the bytes begin like a ZFile. Not both magics, or no header bit: the bytes are used as they are. */
export function looksLikeZFile(source: ReadSource): boolean {
  const head = readUpTo(source, 0, ZFILE_BLOCK_BYTES);
  return hasZFileMagic(head) && (head[32]! & ZFLAG_HEADER) !== 0;
}

function algorithmOf(block: ZFileBlock, file: string): CodecAlgorithm {
  for (const [name, number] of Object.entries(CODEC_ALGORITHMS)) {
    if (number === block.algorithm && (name === "lz4" || name === "zstd")) return name;
  }
  throw invalidLayer(file, 76, `ZFile algorithm ${block.algorithm} is not known (1 lz4, 2 zstd)`);
}

function readFields(source: ReadSource): { fields: ZFileBlock; tableLimit: number } {
  const { name, sizeBytes } = source;
  const header = decodeZFileBlock(readUpTo(source, 0, ZFILE_BLOCK_BYTES), name, 0, true);
  if ((header.flags & ZFLAG_OVERWRITTEN) !== 0) return { fields: header, tableLimit: sizeBytes };
  const at = sizeBytes - ZFILE_BLOCK_BYTES;
  if (at < ZFILE_BLOCK_BYTES) throw invalidLayer(name, sizeBytes, "ZFile ends before its trailer");
  const bytes = readUpTo(source, at, ZFILE_BLOCK_BYTES);
  if (!hasZFileMagic(bytes)) throw invalidLayer(name, at, "ZFile trailer (last 512 bytes) has no magic");
  const trailer = decodeZFileBlock(bytes, name, at, false);
  const wanted = ZFLAG_DATA | ZFLAG_SEALED;
  if ((trailer.flags & ZFLAG_HEADER) !== 0 || (trailer.flags & wanted) !== wanted) {
    throw invalidLayer(
      name,
      at + 32,
      `ZFile trailer flags 0x${trailer.flags.toString(16)} are not those of a trailer`,
    );
  }
  return { fields: trailer, tableLimit: at };
}

/** What decompression needs, shared by all sources of the thread: no call of theirs is ever left half done. */
let shared:
  | { readonly codec: Codec; readonly compressed: Uint8Array; readonly stored: Uint32Array }
  | undefined;
function workspace() {
  shared ??= {
    codec: new Codec(),
    compressed: new Uint8Array(new ArrayBuffer(READ_BYTES)),
    stored: new Uint32Array(new ArrayBuffer(4 * MAPPED_BLOCKS)),
  };
  return shared;
}

/** What this thread has decompressed, by codec. */
export interface ZFileStats {
  blocks: number;
  /** Reads of compressed bytes. */
  readBatches: number;
  encodedBytes: number;
  outputBytes: number;
}

const stats: Readonly<Record<CodecAlgorithm, ZFileStats>> = {
  lz4: { blocks: 0, readBatches: 0, encodedBytes: 0, outputBytes: 0 },
  zstd: { blocks: 0, readBatches: 0, encodedBytes: 0, outputBytes: 0 },
};

export function zfileStats(): Readonly<Record<CodecAlgorithm, ZFileStats>> {
  return { lz4: { ...stats.lz4 }, zstd: { ...stats.zstd } };
}

/** Random access to the bytes inside a ZFile. Owns `source`. */
export class ZFileSource implements ReadSource {
  readonly name: string;
  readonly sizeBytes: number;
  readonly #source: ReadSource;
  readonly #algorithm: CodecAlgorithm;
  readonly #verify: boolean;
  readonly #blockSize: number;
  readonly #blocks: number;
  /** Start of block i: spans[i >> SPAN_BITS] + relative[i]; entry `blocks` is the end of the last block. */
  readonly #spans: Float64Array;
  readonly #relative: Uint32Array;
  readonly #cache: CachedBlocks;
  /** Absent until the first read; undefined where there is none. */
  #mapped: { readonly file: MappedFile | undefined; readonly baseBytes: number } | undefined;

  /** `contentKey`: the same for sources with the same bytes, which then share decompressed blocks. */
  constructor(source: ReadSource, contentKey: string = crypto.randomUUID()) {
    const { fields, tableLimit } = readFields(source);
    this.name = `${source.name} (zfile)`;
    this.#source = source;
    this.#algorithm = algorithmOf(fields, source.name);
    this.#verify = fields.verify;
    this.#blockSize = fields.blockSizeBytes;
    this.sizeBytes = fields.originalSizeBytes;
    const size = this.#blockSize;
    if (size < ZFILE_MIN_BLOCK_SIZE || size > ZFILE_MAX_BLOCK_SIZE || (size & (size - 1)) !== 0) {
      throw invalidLayer(
        source.name,
        72,
        `ZFile block size ${size} is no power of two up to ${ZFILE_MAX_BLOCK_SIZE}`,
      );
    }
    if (fields.indexSize > MAX_BLOCKS) {
      throw invalidLayer(
        source.name,
        48,
        `ZFile of ${fields.indexSize} blocks, at most ${MAX_BLOCKS} are allowed`,
      );
    }
    if (fields.indexSize !== Math.ceil(this.sizeBytes / size)) {
      throw invalidLayer(
        source.name,
        48,
        `ZFile of ${fields.indexSize} blocks of ${size} bytes cannot hold ${this.sizeBytes} bytes`,
      );
    }
    this.#blocks = fields.indexSize;
    if (fields.indexOffsetBytes + this.#blocks * 4 > tableLimit) {
      throw invalidLayer(
        source.name,
        40,
        `ZFile jump table of ${this.#blocks} blocks at ${fields.indexOffsetBytes} does not end before the trailer`,
      );
    }
    this.#spans = new Float64Array((this.#blocks >>> SPAN_BITS) + 1);
    this.#relative = new Uint32Array(this.#blocks + 1);
    this.#readTable(fields);
    this.#cache = threadBlockCache.open(contentKey);
  }

  /** Reads, checks and sums up the jump table. */
  #readTable(fields: ZFileBlock): void {
    const { name } = this.#source;
    const minimum = this.#verify ? ZFILE_CHECKSUM_BYTES : 0;
    const longestPossible = 2 * this.#blockSize + 1024;
    const groupBlocks = ZFILE_GROUP_BYTES / this.#blockSize;
    const bytes = new Uint8Array(new ArrayBuffer(Math.min(this.#blocks * 4, TABLE_BATCH_BYTES)));
    const entries = new Uint32Array(bytes.buffer);
    let position = ZFILE_BLOCK_BYTES + fields.dictSizeBytes;
    let groupSum = 0;
    let crc = 0;
    for (let block = 0; block < this.#blocks; ) {
      const batch = Math.min(this.#blocks - block, entries.length);
      this.#source.read(fields.indexOffsetBytes + block * 4, bytes, 0, batch * 4);
      if ((fields.flags & ZFLAG_DIGEST) !== 0) crc = crc32cRaw(crc, bytes.subarray(0, batch * 4));
      for (let i = 0; i < batch; i++, block++) {
        const stored = entries[i]!;
        const where = fields.indexOffsetBytes + block * 4;
        if (stored > longestPossible) {
          throw invalidLayer(
            name,
            where,
            `ZFile block ${block} has stored length ${stored}, no codec needs that`,
          );
        }
        if (stored <= minimum)
          throw invalidLayer(name, where, `ZFile block ${block} has stored length ${stored}`);
        if (block % groupBlocks === 0) groupSum = 0;
        else if (groupSum >= 65535) {
          throw invalidLayer(
            name,
            where,
            `stored lengths before ZFile block ${block} add up to ${groupSum} in its group`,
          );
        }
        groupSum += stored;
        if (block % (1 << SPAN_BITS) === 0) this.#spans[block >>> SPAN_BITS] = position;
        this.#relative[block] = position - this.#spans[block >>> SPAN_BITS]!;
        position += stored;
        if (position > fields.indexOffsetBytes) {
          throw invalidLayer(
            name,
            where,
            `ZFile block ${block} ends at ${position}, behind the start of the jump table`,
          );
        }
      }
    }
    if (this.#blocks % (1 << SPAN_BITS) === 0) this.#spans[this.#blocks >>> SPAN_BITS] = position;
    this.#relative[this.#blocks] = position - this.#spans[this.#blocks >>> SPAN_BITS]!;
    if ((fields.flags & ZFLAG_DIGEST) !== 0 && crc !== fields.indexCrc) {
      throw invalidLayer(name, fields.indexOffsetBytes, "ZFile jump table checksum does not match");
    }
  }

  #start(block: number): number {
    return this.#spans[block >>> SPAN_BITS]! + this.#relative[block]!;
  }

  #decode(block: number, compressedOffset: number, target: Uint8Array, targetOffset: number): void {
    const start = this.#start(block);
    const length = Math.min(this.#blockSize, this.sizeBytes - block * this.#blockSize);
    const { codec, compressed } = workspace();
    const reason = codec.decode(
      this.#algorithm,
      this.#verify,
      compressed,
      compressedOffset,
      this.#start(block + 1) - start,
      target,
      targetOffset,
      length,
    );
    if (reason !== undefined) throw invalidLayer(this.#source.name, start, `ZFile block ${block}: ${reason}`);
  }

  #check(offsetBytes: number, lengthBytes: number): void {
    if (offsetBytes < 0 || offsetBytes + lengthBytes > this.sizeBytes) {
      throw invalidLayer(
        this.name,
        offsetBytes,
        `${lengthBytes} bytes wanted, the data ends at ${this.sizeBytes}`,
      );
    }
  }

  read(offsetBytes: number, target: Uint8Array, targetOffset: number, lengthBytes: number): void {
    this.#read(offsetBytes, target, targetOffset, lengthBytes, false);
  }

  tryRead(offsetBytes: number, target: Uint8Array, targetOffset: number, lengthBytes: number): boolean {
    return this.#read(offsetBytes, target, targetOffset, lengthBytes, true);
  }

  /** False only with `inMemory`, when compressed bytes are not. */
  #read(
    offsetBytes: number,
    target: Uint8Array,
    targetOffset: number,
    lengthBytes: number,
    inMemory: boolean,
  ): boolean {
    this.#check(offsetBytes, lengthBytes);
    const size = this.#blockSize;
    const end = offsetBytes + lengthBytes;
    let block = Math.floor(offsetBytes / size);
    const stop = Math.ceil(end / size);
    const { compressed } = workspace();
    while (block < stop) {
      const cached = this.#cache.get(block);
      if (cached !== undefined) {
        this.#copyPart(block, cached, offsetBytes, end, target, targetOffset);
        block++;
        continue;
      }
      const from = this.#start(block);
      this.#mapped ??= this.#map();
      const mapped = this.#mapped;
      if (mapped.file !== undefined) {
        const done = this.#readMapped(
          mapped.file,
          mapped.baseBytes,
          block,
          stop,
          offsetBytes,
          end,
          target,
          targetOffset,
          inMemory,
        );
        if (done < 0) return false;
        if (done > 0) {
          block += done;
          continue;
        }
      }
      // As many blocks as one read of compressed bytes can hold.
      let last = block + 1;
      while (last < stop && this.#start(last + 1) - from <= compressed.byteLength && !this.#cache.has(last)) {
        last++;
      }
      const stored = this.#start(last) - from;
      if (!inMemory) this.#source.read(from, compressed, 0, stored);
      else if (!this.#source.tryRead(from, compressed, 0, stored)) return false;
      const counted = stats[this.#algorithm];
      counted.readBatches++;
      counted.encodedBytes += stored;
      counted.blocks += last - block;
      for (; block < last; block++) {
        const decoded = this.#cache.room(Math.min(size, this.sizeBytes - block * size));
        this.#decode(block, this.#start(block) - from, decoded, 0);
        counted.outputBytes += decoded.byteLength;
        this.#cache.add(block, decoded);
        this.#copyPart(block, decoded, offsetBytes, end, target, targetOffset);
      }
    }
    return true;
  }

  #map(): { readonly file: MappedFile | undefined; readonly baseBytes: number } {
    const { direct } = this.#source;
    if (direct === undefined) return { file: undefined, baseBytes: 0 };
    const { fd, baseBytes } = direct;
    return { file: MappedFile.open(fd, baseBytes + this.#start(this.#blocks)), baseBytes };
  }

  /**
   * Blocks from `block` on by one call that reads and decodes. Returns their number; -1: not in memory; 0: something
   * is wrong with one of them, for the other way of reading to say what.
   */
  #readMapped(
    file: MappedFile,
    baseBytes: number,
    block: number,
    stop: number,
    offsetBytes: number,
    end: number,
    target: Uint8Array,
    targetOffset: number,
    inMemory: boolean,
  ): number {
    const size = this.#blockSize;
    const blockStart = block * size;
    const { codec, compressed, stored } = workspace();
    // Whole blocks go to where they are wanted, one that is wanted in part to the cache first.
    const direct =
      offsetBytes <= blockStart && blockStart + Math.min(size, this.sizeBytes - blockStart) <= end;
    let last = block;
    const from = this.#start(block);
    let position = from;
    do {
      const next = this.#start(last + 1);
      stored[last - block] = next - position;
      position = next;
      last++;
    } while (
      direct &&
      last < stop &&
      last - block < MAPPED_BLOCKS &&
      Math.min((last + 1) * size, this.sizeBytes) <= end &&
      this.#start(last + 1) - from <= compressed.byteLength &&
      !this.#cache.has(last)
    );
    const count = last - block;
    const lastLength = Math.min(size, this.sizeBytes - (last - 1) * size);
    const into = direct ? target : this.#cache.room(lastLength);
    const at = direct ? targetOffset + (blockStart - offsetBytes) : 0;
    const result = file.readBlocks(
      codec,
      this.#algorithm,
      this.#verify,
      baseBytes + from,
      stored,
      count,
      !inMemory,
      into,
      at,
      size,
      lastLength,
      compressed,
    );
    if (result !== "done") return result === "not_cached" && inMemory ? -1 : 0;
    const counted = stats[this.#algorithm];
    counted.readBatches++;
    counted.encodedBytes += position - from;
    counted.blocks += count;
    counted.outputBytes += (count - 1) * size + lastLength;
    if (!direct) {
      this.#cache.add(block, into);
      this.#copyPart(block, into, offsetBytes, end, target, targetOffset);
      return 1;
    }
    for (let i = 0; i < count; i++) {
      const length = i + 1 === count ? lastLength : size;
      const room = this.#cache.room(length);
      // One block is what most requests want: a view of all there is would only cost time.
      const all = at === 0 && length === target.byteLength;
      room.set(all ? target : target.subarray(at + i * size, at + i * size + length));
      this.#cache.add(block + i, room);
    }
    return count;
  }

  /** For measurements: calls that decoded in place and calls that read first; undefined while nothing is mapped. */
  get mappedCounts(): { readonly mapped: number; readonly read: number } | undefined {
    return this.#mapped?.file?.counts();
  }

  /** For tools and measurements. */
  get layout(): { readonly blocks: number; readonly blockSizeBytes: number } {
    return { blocks: this.#blocks, blockSizeBytes: this.#blockSize };
  }

  /** Where in the file a block lies, checksum included. */
  locateBlock(block: number, visit: (offsetBytes: number, storedBytes: number) => void): void {
    visit(this.#start(block), this.#start(block + 1) - this.#start(block));
  }

  locate(offsetBytes: number, lengthBytes: number, visit: FileRangeVisitor): void {
    this.#check(offsetBytes, lengthBytes);
    const stop = Math.ceil((offsetBytes + lengthBytes) / this.#blockSize);
    let block = Math.floor(offsetBytes / this.#blockSize);
    while (block < stop) {
      const first = block;
      while (block < stop && !this.#cache.has(block)) block++;
      if (block > first) {
        this.#source.locate(this.#start(first), this.#start(block) - this.#start(first), visit);
      } else {
        block++;
      }
    }
  }

  #copyPart(
    block: number,
    decoded: Uint8Array,
    offset: number,
    end: number,
    target: Uint8Array,
    targetOffset: number,
  ): void {
    const blockStart = block * this.#blockSize;
    const from = Math.max(offset, blockStart);
    const to = Math.min(end, blockStart + this.#blockSize);
    target.set(decoded.subarray(from - blockStart, to - blockStart), targetOffset + (from - offset));
  }

  [Symbol.dispose](): void {
    this.#cache[Symbol.dispose]();
    this.#mapped?.file?.[Symbol.dispose]();
    this.#mapped = { file: undefined, baseBytes: 0 };
    this.#source[Symbol.dispose]();
  }
}
