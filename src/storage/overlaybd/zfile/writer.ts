import {
  CODEC_ALGORITHMS,
  Codec,
  type CodecAlgorithm,
  crc32cRaw,
  encodedBound,
} from "../../../../ffi/codec.ts";
import { badRequest } from "../errors.ts";
import type { ByteSink } from "../lsmt/writer.ts";
import {
  encodeZFileBlock,
  ZFILE_BLOCK_BYTES,
  ZFILE_MAX_BLOCK_SIZE,
  type ZFileBlock,
  ZFLAG_DATA,
  ZFLAG_DIGEST,
  ZFLAG_HEADER,
  ZFLAG_OVERWRITTEN,
  ZFLAG_SEALED,
} from "./format.ts";

export const ZFILE_BLOCK_SIZES: readonly number[] = [4096, 8192, 16384, 32768, 65536];

/** Biggest block size that takes any data. */
export const ZFILE_SAFE_BLOCK_SIZE = 32768;

export interface ZFileOptions {
  readonly algorithm: CodecAlgorithm;
  readonly blockSizeBytes: number;
  /** A checksum behind every block; default true. */
  readonly verify?: boolean;
}

/**
 * A 64 KiB block that does not shrink: the reference reader's buffer is too small for it, and the format has
 * no mark for stored blocks. Blocks of 32 KiB or less always fit.
 */
export class IncompressibleBlock extends Error {}

/** Compresses a stream of bytes into a ZFile, block by block. */
export class ZFileWriter implements ByteSink, Disposable {
  readonly #sink: ByteSink;
  readonly #options: ZFileOptions;
  readonly #codec = new Codec();
  readonly #block: Uint8Array;
  readonly #encoded: Uint8Array;
  #filled = 0;
  #lengths = new Uint32Array(1024);
  #blocks = 0;
  #originalBytes = 0;
  #position = ZFILE_BLOCK_BYTES;

  constructor(sink: ByteSink, options: ZFileOptions) {
    if (!ZFILE_BLOCK_SIZES.includes(options.blockSizeBytes)) {
      throw badRequest(
        "invalid_compression",
        `ZFile block size ${options.blockSizeBytes}: must be one of ${ZFILE_BLOCK_SIZES.join(", ")}`,
      );
    }
    if (!(options.algorithm in CODEC_ALGORITHMS)) {
      throw badRequest(
        "invalid_compression",
        `ZFile algorithm ${JSON.stringify(options.algorithm)}: lz4 or zstd`,
      );
    }
    this.#sink = sink;
    this.#options = options;
    this.#block = new Uint8Array(new ArrayBuffer(options.blockSizeBytes));
    this.#encoded = new Uint8Array(new ArrayBuffer(encodedBound(options.algorithm, options.blockSizeBytes)));
    const header = encodeZFileBlock({ ...this.#fields(), flags: ZFLAG_HEADER | ZFLAG_DATA | ZFLAG_DIGEST });
    sink.append(header, 0, header.byteLength);
  }

  #fields(): Omit<ZFileBlock, "flags"> {
    return {
      indexOffsetBytes: 0,
      indexSize: 0,
      originalSizeBytes: 0,
      indexCrc: 0,
      blockSizeBytes: this.#options.blockSizeBytes,
      algorithm: CODEC_ALGORITHMS[this.#options.algorithm],
      dictSizeBytes: 0,
      verify: this.#options.verify ?? true,
    };
  }

  #encode(source: Uint8Array, offset: number, length: number): void {
    const { algorithm, verify } = this.#options;
    const stored = this.#codec.encode(algorithm, verify ?? true, source, offset, length, this.#encoded, 0);
    if (length === ZFILE_MAX_BLOCK_SIZE && stored > ZFILE_MAX_BLOCK_SIZE) {
      throw new IncompressibleBlock(`ZFile block ${this.#blocks} of ${length} bytes does not shrink`);
    }
    if (this.#blocks === this.#lengths.length) {
      const grown = new Uint32Array(this.#lengths.length * 2);
      grown.set(this.#lengths);
      this.#lengths = grown;
    }
    this.#lengths[this.#blocks++] = stored;
    this.#originalBytes += length;
    this.#position += stored;
    this.#sink.append(this.#encoded, 0, stored);
  }

  append(source: Uint8Array, sourceOffset: number, lengthBytes: number): void {
    const size = this.#options.blockSizeBytes;
    let from = sourceOffset;
    let left = lengthBytes;
    while (left > 0) {
      if (this.#filled === 0 && left >= size) {
        this.#encode(source, from, size);
        from += size;
        left -= size;
        continue;
      }
      const part = Math.min(left, size - this.#filled);
      this.#block.set(source.subarray(from, from + part), this.#filled);
      this.#filled += part;
      from += part;
      left -= part;
      if (this.#filled === size) {
        this.#filled = 0;
        this.#encode(this.#block, 0, size);
      }
    }
  }

  /**
   * Writes the last block, jump table and trailer. `overwriteHeader` gets the final header for offset 0 of
   * the file; without it readers use the trailer.
   */
  finish(overwriteHeader?: (header: Uint8Array) => void): void {
    if (this.#filled > 0) this.#encode(this.#block, 0, this.#filled);
    this.#filled = 0;
    const table = new Uint8Array(this.#lengths.buffer, 0, this.#blocks * 4);
    const fields = {
      ...this.#fields(),
      indexOffsetBytes: this.#position,
      indexSize: this.#blocks,
      originalSizeBytes: this.#originalBytes,
      indexCrc: crc32cRaw(0, table),
    };
    this.#sink.append(table, 0, table.byteLength);
    const trailer = encodeZFileBlock({ ...fields, flags: ZFLAG_DATA | ZFLAG_SEALED | ZFLAG_DIGEST });
    this.#sink.append(trailer, 0, trailer.byteLength);
    overwriteHeader?.(
      encodeZFileBlock({
        ...fields,
        flags: ZFLAG_HEADER | ZFLAG_DATA | ZFLAG_OVERWRITTEN | ZFLAG_DIGEST,
      }),
    );
  }

  [Symbol.dispose](): void {
    this.#codec[Symbol.dispose]();
  }
}
