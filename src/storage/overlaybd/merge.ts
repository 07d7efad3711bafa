import { type Disk, hostDisk } from "./disk.ts";
import { badRequest } from "./errors.ts";
import { LayerFileWriter } from "./layer-writer.ts";
import { type FlatIndex, ZEROED_TAG } from "./lsmt/flat-index.ts";
import { SECTOR_BYTES } from "./lsmt/format.ts";
import { Upper } from "./lsmt/upper.ts";
import type { ReadSource } from "./source.ts";
import { openLowers } from "./stack.ts";
import type { CommitOptions, LayerRef, LayerWriterOptions, UpperRef } from "./types.ts";
import { IncompressibleBlock, ZFILE_SAFE_BLOCK_SIZE } from "./zfile/writer.ts";

const COPY_SECTORS = (1 << 20) / SECTOR_BYTES;

/** Copies what an index maps, in order, through one buffer. */
function copyMapped(
  index: FlatIndex,
  sourceOf: (layer: number) => ReadSource,
  writer: LayerFileWriter,
): void {
  const buffer = new Uint8Array(new ArrayBuffer(COPY_SECTORS * SECTOR_BYTES));
  for (let i = 0; i < index.count; i++) {
    const offset = index.offsets[i]!;
    const length = index.lengths[i]!;
    const tag = index.tags[i]!;
    if (tag >= ZEROED_TAG) {
      writer.zero(offset * SECTOR_BYTES, length * SECTOR_BYTES);
      continue;
    }
    const source = sourceOf(tag);
    for (let done = 0; done < length; ) {
      const piece = Math.min(length - done, COPY_SECTORS);
      source.read((index.moffsets[i]! + done) * SECTOR_BYTES, buffer, 0, piece * SECTOR_BYTES);
      writer.append((offset + done) * SECTOR_BYTES, buffer.subarray(0, piece * SECTOR_BYTES));
      done += piece;
    }
  }
}

/** Writes a layer from what `index` maps; an existing `target` or any failure leaves nothing behind. */
function writeLayer(
  disk: Disk,
  index: FlatIndex,
  sourceOf: (layer: number) => ReadSource,
  target: string,
  options: LayerWriterOptions & CommitOptions,
): LayerRef {
  try {
    using writer = new LayerFileWriter(disk, target, { ...options, copy: true });
    copyMapped(index, sourceOf, writer);
    return writer.finish();
  } catch (error) {
    if (!(error instanceof IncompressibleBlock) || options.compression === undefined) throw error;
    const compression = { ...options.compression, blockSizeBytes: ZFILE_SAFE_BLOCK_SIZE };
    return writeLayer(disk, index, sourceOf, target, { ...options, compression });
  }
}

/** See OverlaybdRoom.commitUpper. */
export function commitUpper(
  upperRef: UpperRef,
  target: string,
  options: CommitOptions,
  disk: Disk = hostDisk,
): LayerRef {
  using upper = new Upper(disk, upperRef, { readOnly: true });
  return writeLayer(disk, upper.index.toFlat(0), () => upper.source, target, {
    ...options,
    virtualSizeBytes: upper.virtualSizeBytes,
    parentUuid: options.parentUuid ?? upper.parentUuid,
  });
}

/** See OverlaybdRoom.mergeLayers. */
export function mergeLayers(
  layers: readonly LayerRef[],
  target: string,
  options: CommitOptions,
  disk: Disk = hostDisk,
): LayerRef {
  if (layers.length === 0) throw badRequest("no_layers", "nothing to merge: no layer was given");
  using opened = openLowers(disk, layers);
  const sources = opened.lowers.map((lower) => lower.source);
  return writeLayer(disk, opened.base, (layer) => sources[layer]!, target, {
    ...options,
    virtualSizeBytes: opened.inheritedSizeBytes,
    parentUuid: options.parentUuid ?? opened.bottomParentUuid,
  });
}
