import { IndexMerger, isWide } from "../../../../ffi/lsmt.ts";
import { invalidLayer } from "../errors.ts";
import { type ReadSource, readUpTo } from "../source.ts";
import { cutColumns, EMPTY_INDEX, type FlatIndex, newColumns } from "./flat-index.ts";
import {
  BLOCK_BYTES,
  BLOCK_SECTORS,
  decodeBlock,
  FLAG_DATA,
  FLAG_HEADER,
  FLAG_SEALED,
  INVALID_OFFSET,
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

/** Mappings read at once of all indexes that are merged: bounds the buffers. */
const READ_MAPPINGS = 1 << 16;
/** But so many of each at least. */
const LEAST_READ_MAPPINGS = 1 << 10;

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
  return readIndexes([{ source, trailer }], layer, options, READ_MAPPINGS);
}

/**
 * The merged index of layers, bottom to top, each tagged with its position. `atOnce`: mappings read of one layer at
 * once; for tests.
 */
export function readMergedIndex(
  layers: readonly { readonly source: ReadSource; readonly trailer: LsmtBlock }[],
  atOnce = Math.max(LEAST_READ_MAPPINGS, Math.floor(READ_MAPPINGS / layers.length)),
): FlatIndex {
  return readIndexes(layers, 0, { padding: "skipped" }, atOnce);
}

/** The same with tags from `firstTag` on. */
function readIndexes(
  layers: readonly { readonly source: ReadSource; readonly trailer: LsmtBlock }[],
  firstTag: number,
  options: IndexOptions,
  atOnce: number,
): FlatIndex {
  let total = 0;
  let most = 0;
  for (const { source, trailer } of layers) {
    total += trailer.indexSize;
    most = Math.max(most, trailer.indexSize);
    if (total > MAX_MAPPINGS) {
      throw invalidLayer(
        source.name,
        trailer.indexOffsetBytes,
        `${total} mappings with the layers below, at most ${MAX_MAPPINGS} are allowed`,
      );
    }
  }
  if (total === 0) return EMPTY_INDEX;
  const entries = Math.min(most, atOnce);
  using merger = new IndexMerger({
    layers: layers.length,
    firstTag,
    entries,
    // As many as there are mostly suffice, and are memory that is used.
    out: newColumns(total, false),
  });
  const done = layers.map(() => 0);
  const feed = (number: number) => {
    const { source, trailer } = layers[number]!;
    const { indexOffsetBytes, indexSize } = trailer;
    const first = done[number]!;
    const count = Math.min(indexSize - first, entries);
    const bytes = merger.bufferOf(number).subarray(0, count * MAPPING_BYTES);
    const at = indexOffsetBytes + first * MAPPING_BYTES;
    if (count > 0) source.read(at, bytes, 0, bytes.byteLength);
    done[number] = first + count;
    const fed = merger.feed(number, count, {
      dataEnd: indexOffsetBytes / SECTOR_BYTES,
      refusePadding: options.padding === "refused",
      last: first + count === indexSize,
    });
    if (!fed) refuseMappings(source, trailer, first + count, options);
  };
  for (;;) {
    const wanted = merger.run();
    if (wanted === "done") return cutColumns(merger.columns, merger.count);
    // Cutting mappings in two makes twice as many at most.
    if (wanted === "full") merger.moveTo(newColumns(2 * total, isWide(merger.columns)));
    else if (wanted === "too narrow") merger.moveTo(newColumns(merger.columns.offsets.length, true));
    else feed(wanted);
  }
}

/** Says what is wrong with the first `count` mappings of an index, one of which was refused. */
function refuseMappings(
  source: ReadSource,
  { indexOffsetBytes }: LsmtBlock,
  count: number,
  options: IndexOptions,
): never {
  const { name } = source;
  const dataEnd = indexOffsetBytes / SECTOR_BYTES;
  const bytes = new Uint8Array(new ArrayBuffer(Math.min(count, READ_MAPPINGS) * MAPPING_BYTES));
  const words = new Uint32Array(bytes.buffer);
  let previousEnd = 0;
  for (let done = 0; done < count; done += READ_MAPPINGS) {
    const batch = Math.min(count - done, READ_MAPPINGS);
    source.read(indexOffsetBytes + done * MAPPING_BYTES, bytes, 0, batch * MAPPING_BYTES);
    for (let i = 0; i < batch; i++) {
      const at = i * 4;
      const where = indexOffsetBytes + (done + i) * MAPPING_BYTES;
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
      if (offset + length > INVALID_OFFSET) {
        throw invalidLayer(
          name,
          where,
          `mapping of sector ${offset} has ${length} sectors, a disk ends at ${INVALID_OFFSET}`,
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
  }
  throw new Error(`internal error, please report: ${name}: an index was refused without a reason`);
}
