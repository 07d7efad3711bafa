import { type IndexColumns, MappingDecoder } from "../../../../ffi/lsmt.ts";
import { invalidLayer } from "../errors.ts";
import { type ReadSource, readUpTo } from "../source.ts";
import { cutColumns, type FlatIndex, mergeInPlace, newColumns } from "./flat-index.ts";
import {
  BLOCK_BYTES,
  BLOCK_SECTORS,
  decodeBlock,
  FLAG_DATA,
  FLAG_HEADER,
  FLAG_SEALED,
  type LsmtBlock,
  MAPPING_BYTES,
  MAX_MAPPINGS,
  mappingIsPadding,
  mappingLength,
  mappingOffset,
  mappingTarget,
  mappingZeroed,
  SECTOR_BYTES,
} from "./format.ts";

/** Mappings decoded per read of an index: bounds the buffer. */
const READ_MAPPINGS = 1 << 16;

export interface LayerBlocks {
  readonly header: LsmtBlock;
  readonly trailer: LsmtBlock;
}

/** Reads and checks header and trailer of a finished layer. */
export function readLayerBlocks(source: ReadSource): LayerBlocks {
  const { name, sizeBytes } = source;
  const header = decodeBlock(readUpTo(source, 0, BLOCK_BYTES), name, 0, "header", "ignored");
  if ((header.flags & FLAG_HEADER) === 0) throw invalidLayer(name, 28, "header is marked as a trailer");
  if ((header.flags & FLAG_DATA) === 0) throw invalidLayer(name, 28, "header is that of an index file");
  const trailerOffset = sizeBytes - BLOCK_BYTES;
  if (trailerOffset < BLOCK_BYTES) {
    throw invalidLayer(name, sizeBytes, "the file ends before a trailer (an unfinished or writable layer?)");
  }
  const trailer = decodeBlock(
    readUpTo(source, trailerOffset, BLOCK_BYTES),
    name,
    trailerOffset,
    "trailer (last 4096 bytes)",
  );
  const flagsAt = trailerOffset + 28;
  if ((trailer.flags & FLAG_HEADER) !== 0) throw invalidLayer(name, flagsAt, "trailer is marked as a header");
  if ((trailer.flags & FLAG_DATA) === 0)
    throw invalidLayer(name, flagsAt, "trailer is that of an index file");
  if ((trailer.flags & FLAG_SEALED) === 0) throw invalidLayer(name, flagsAt, "trailer is not sealed");
  if (trailer.indexSize > MAX_MAPPINGS) {
    throw invalidLayer(
      name,
      trailerOffset + 40,
      `${trailer.indexSize} mappings, at most ${MAX_MAPPINGS} are allowed`,
    );
  }
  if (trailer.indexOffsetBytes < BLOCK_BYTES || trailer.indexOffsetBytes % SECTOR_BYTES !== 0) {
    throw invalidLayer(name, trailerOffset + 32, `index offset ${trailer.indexOffsetBytes} is not possible`);
  }
  const room = trailerOffset - trailer.indexOffsetBytes;
  if (room < 0 || trailer.indexSize * MAPPING_BYTES > room) {
    throw invalidLayer(
      name,
      trailerOffset + 40,
      `index of ${trailer.indexSize} mappings at ${trailer.indexOffsetBytes} does not end before the trailer`,
    );
  }
  return { header, trailer };
}

interface IndexOptions {
  readonly padding: "skipped" | "refused";
}

/**
 * Reads and checks the index of a finished layer; every mapping gets `layer` as its tag. `padding: "refused"`
 * is for an index that must not have any, so that what was never written back is noticed.
 */
export function readLayerIndex(
  source: ReadSource,
  trailer: LsmtBlock,
  layer: number,
  options: IndexOptions = { padding: "skipped" },
): FlatIndex {
  return readIndexes([{ source, trailer, layer }], options).finish();
}

/** The merged index of layers, bottom to top, each tagged with its position. */
export function readMergedIndex(
  layers: readonly { readonly source: ReadSource; readonly trailer: LsmtBlock }[],
): FlatIndex {
  const { columns, ends } = readIndexes(layers.map((layer, number) => ({ ...layer, layer: number })));
  return mergeInPlace(columns, ends);
}

/** Indexes one behind the other. */
function readIndexes(
  layers: readonly { readonly source: ReadSource; readonly trailer: LsmtBlock; readonly layer: number }[],
  options: IndexOptions = { padding: "skipped" },
): { columns: IndexColumns; ends: number[]; finish: () => FlatIndex } {
  let total = 0;
  let most = 0;
  for (const { trailer } of layers) {
    total += trailer.indexSize;
    most = Math.max(most, Math.min(trailer.indexSize, READ_MAPPINGS));
  }
  const columns = newColumns(total);
  const decoder = new MappingDecoder(columns);
  const bytes = new Uint8Array(new ArrayBuffer(most * MAPPING_BYTES));
  const ends: number[] = [];
  for (const { source, trailer, layer } of layers) {
    const { indexOffsetBytes, indexSize } = trailer;
    const dataEnd = indexOffsetBytes / SECTOR_BYTES;
    decoder.begin();
    for (let done = 0; done < indexSize; ) {
      const batch = Math.min(indexSize - done, READ_MAPPINGS);
      source.read(indexOffsetBytes + done * MAPPING_BYTES, bytes, 0, batch * MAPPING_BYTES);
      const previousEnd = decoder.end;
      if (!decoder.add(bytes, batch, { dataEnd, layer, refusePadding: options.padding === "refused" })) {
        refuseMappings(source.name, trailer, bytes, { first: done, count: batch, previousEnd }, options);
      }
      done += batch;
    }
    ends.push(decoder.count);
  }
  return { columns, ends, finish: () => cutColumns(columns, decoder.count) };
}

/** Says what is wrong with mappings that the decoder refused. */
function refuseMappings(
  name: string,
  { indexOffsetBytes }: LsmtBlock,
  bytes: Uint8Array,
  batch: { readonly first: number; readonly count: number; readonly previousEnd: number },
  options: IndexOptions,
): never {
  const words = new Uint32Array(bytes.buffer, bytes.byteOffset, batch.count * 4);
  const dataEnd = indexOffsetBytes / SECTOR_BYTES;
  let { previousEnd } = batch;
  for (let i = 0; i < batch.count; i++) {
    const at = i * 4;
    const where = indexOffsetBytes + (batch.first + i) * MAPPING_BYTES;
    if (mappingIsPadding(words, at)) {
      if (options.padding === "skipped") continue;
      throw invalidLayer(name, where, "a mapping is missing");
    }
    const offset = mappingOffset(words, at);
    const length = mappingLength(words, at);
    const moffset = mappingTarget(words, at);
    const sectors = mappingZeroed(words, at) ? 0 : length;
    if (offset < previousEnd) {
      throw invalidLayer(
        name,
        where,
        `mapping of sector ${offset} is out of order or overlaps (previous ends at ${previousEnd})`,
      );
    }
    if (moffset < BLOCK_SECTORS || moffset + sectors > dataEnd) {
      throw invalidLayer(
        name,
        where,
        `mapping of sector ${offset} points to sectors ${moffset}+${sectors}, data is ${BLOCK_SECTORS}..${dataEnd}`,
      );
    }
    previousEnd = offset + length;
  }
  throw new Error(`internal error, please report: ${name}: an index was refused without a reason`);
}
