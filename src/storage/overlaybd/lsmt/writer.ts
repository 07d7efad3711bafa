import type { FlatIndex } from "./flat-index.ts";
import { FlatIndexBuilder, ZEROED_TAG } from "./flat-index.ts";
import {
  BLOCK_BYTES,
  encodeBlock,
  encodeInvalidMapping,
  encodeMapping,
  FLAG_DATA,
  FLAG_HEADER,
  FLAG_SEALED,
  MAPPING_BYTES,
  SECTOR_BYTES,
} from "./format.ts";

/** Where a layer being written goes: a file or a compressor, strictly one byte after the other. */
export interface ByteSink {
  /** Takes all bytes; they may be reused by the caller afterwards. */
  append(source: Uint8Array, sourceOffset: number, lengthBytes: number): void;
}

export interface LayerIdentity {
  readonly virtualSizeBytes: number;
  readonly uuid?: string | undefined;
  readonly parentUuid?: string | undefined;
  readonly userTag?: Uint8Array | undefined;
}

/** Entries per index page; a committed index is padded to whole pages. */
const PAGE_MAPPINGS = BLOCK_BYTES / MAPPING_BYTES;

/** The mappings of an index as they stand on disk, `padding` invalid mappings behind them. */
export function* encodeIndex(index: FlatIndex, padding: number): Generator<Uint8Array> {
  const BATCH = 1 << 14;
  const total = index.count + padding;
  const words = new Uint32Array(Math.min(total, BATCH) * 4);
  const bytes = new Uint8Array(words.buffer);
  for (let done = 0; done < total; ) {
    const batch = Math.min(total - done, BATCH);
    for (let i = 0; i < batch; i++) {
      const at = done + i;
      if (at >= index.count) {
        encodeInvalidMapping(words, i * 4);
        continue;
      }
      const zeroed = index.tags[at]! >= ZEROED_TAG;
      encodeMapping(words, i * 4, index.offsets[at]!, index.lengths[at]!, index.moffsets[at]!, zeroed);
    }
    yield bytes.subarray(0, batch * MAPPING_BYTES);
    done += batch;
  }
}

/**
 * Writes the committed form into a sink: header, live data in order of offset, index padded to whole 4096-byte
 * pages, zeros up to a multiple of 4096, trailer. Sectors must come in ascending order.
 */
export class CommittedWriter {
  readonly #sink: ByteSink;
  readonly #identity: LayerIdentity;
  readonly #index = new FlatIndexBuilder();
  #position = 0;
  #nextSector = 0;

  constructor(sink: ByteSink, identity: LayerIdentity) {
    this.#sink = sink;
    this.#identity = identity;
    this.#append(
      encodeBlock({
        ...identity,
        flags: FLAG_HEADER | FLAG_DATA | FLAG_SEALED,
        indexOffsetBytes: 0,
        indexSize: 0,
      }),
    );
  }

  get mappingCount(): number {
    return this.#index.count;
  }

  /** First sector that may still be added. */
  get nextSector(): number {
    return this.#nextSector;
  }

  #append(bytes: Uint8Array, offset = 0, length = bytes.byteLength): void {
    this.#sink.append(bytes, offset, length);
    this.#position += length;
  }

  #advance(sector: number, sectors: number): void {
    if (sector < this.#nextSector) {
      throw new RangeError(`sector ${sector} was added after ${this.#nextSector}: offsets must ascend`);
    }
    this.#nextSector = sector + sectors;
  }

  data(sector: number, source: Uint8Array, sourceOffset: number, sectors: number): void {
    this.#advance(sector, sectors);
    this.#index.add(sector, sectors, this.#position / SECTOR_BYTES, 0);
    this.#append(source, sourceOffset, sectors * SECTOR_BYTES);
  }

  zero(sector: number, sectors: number): void {
    this.#advance(sector, sectors);
    this.#index.add(sector, sectors, this.#position / SECTOR_BYTES, ZEROED_TAG);
  }

  finish(): void {
    const index = this.#index.finish();
    const indexOffsetBytes = this.#position;
    const padding = (PAGE_MAPPINGS - (index.count % PAGE_MAPPINGS)) % PAGE_MAPPINGS;
    for (const bytes of encodeIndex(index, padding)) this.#append(bytes);
    const gap = (BLOCK_BYTES - (this.#position % BLOCK_BYTES)) % BLOCK_BYTES;
    if (gap > 0) this.#append(new Uint8Array(gap));
    this.#append(
      encodeBlock({
        ...this.#identity,
        flags: FLAG_DATA | FLAG_SEALED,
        indexOffsetBytes,
        indexSize: index.count + padding,
      }),
    );
  }
}
