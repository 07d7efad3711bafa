import { invalidLayer } from "../errors.ts";
import { type ReadSource, readUpTo } from "../source.ts";
import { type FlatIndex, FlatIndexBuilder, ZEROED_TAG } from "./flat-index.ts";
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

/**
 * Reads and checks the index of a finished layer; every mapping gets `layer` as its tag. `padding: "refused"`
 * is for an index that must not have any, so that what was never written back is noticed.
 */
export function readLayerIndex(
  source: ReadSource,
  trailer: LsmtBlock,
  layer: number,
  options: { readonly padding: "skipped" | "refused" } = { padding: "skipped" },
): FlatIndex {
  const { name } = source;
  const { indexOffsetBytes, indexSize } = trailer;
  const dataEnd = indexOffsetBytes / SECTOR_BYTES;
  const out = new FlatIndexBuilder(Math.min(indexSize, READ_MAPPINGS));
  const bytes = new Uint8Array(new ArrayBuffer(Math.min(indexSize, READ_MAPPINGS) * MAPPING_BYTES));
  const words = new Uint32Array(bytes.buffer);
  let previousEnd = 0;
  for (let done = 0; done < indexSize; ) {
    const batch = Math.min(indexSize - done, READ_MAPPINGS);
    source.read(indexOffsetBytes + done * MAPPING_BYTES, bytes, 0, batch * MAPPING_BYTES);
    for (let i = 0; i < batch; i++) {
      const at = i * 4;
      if (mappingIsPadding(words, at)) {
        if (options.padding === "skipped") continue;
        throw invalidLayer(name, indexOffsetBytes + (done + i) * MAPPING_BYTES, "a mapping is missing");
      }
      const offset = mappingOffset(words, at);
      const length = mappingLength(words, at);
      const moffset = mappingTarget(words, at);
      const zeroed = mappingZeroed(words, at);
      const where = () => indexOffsetBytes + (done + i) * MAPPING_BYTES;
      if (offset < previousEnd) {
        throw invalidLayer(
          name,
          where(),
          `mapping of sector ${offset} is out of order or overlaps (previous ends at ${previousEnd})`,
        );
      }
      if (moffset < BLOCK_SECTORS || moffset + (zeroed ? 0 : length) > dataEnd) {
        throw invalidLayer(
          name,
          where(),
          `mapping of sector ${offset} points to sectors ${moffset}+${zeroed ? 0 : length}, data is ${BLOCK_SECTORS}..${dataEnd}`,
        );
      }
      out.add(offset, length, moffset, zeroed ? layer | ZEROED_TAG : layer);
      previousEnd = offset + length;
    }
    done += batch;
  }
  return out.finish();
}
