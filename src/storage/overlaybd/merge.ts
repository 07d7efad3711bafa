import { badRequest } from "./errors.ts";
import { LayerFileWriter } from "./layer-writer.ts";
import { type FlatIndex, ZEROED_TAG } from "./lsmt/flat-index.ts";
import { SECTOR_BYTES } from "./lsmt/format.ts";
import { Upper } from "./lsmt/upper.ts";
import type { ReadSource } from "./source.ts";
import { openLowers } from "./stack.ts";
import type { CommitOptions, LayerRef, UpperRef } from "./types.ts";

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

/** See OverlaybdRoom.commitUpper. */
export function commitUpper(upperRef: UpperRef, target: string, options: CommitOptions): LayerRef {
  using upper = new Upper(upperRef, { readOnly: true });
  using writer = new LayerFileWriter(target, {
    ...options,
    virtualSizeBytes: upper.virtualSizeBytes,
    ...(options.parentUuid === undefined && upper.parentUuid !== undefined
      ? { parentUuid: upper.parentUuid }
      : {}),
  });
  copyMapped(upper.index.toFlat(0), () => upper.source, writer);
  return writer.finish();
}

/** See OverlaybdRoom.mergeLayers. */
export function mergeLayers(layers: readonly LayerRef[], target: string, options: CommitOptions): LayerRef {
  if (layers.length === 0) throw badRequest("no_layers", "nothing to merge: no layer was given");
  using opened = openLowers(layers);
  const parentUuid = options.parentUuid ?? opened.bottomParentUuid;
  using writer = new LayerFileWriter(target, {
    ...options,
    virtualSizeBytes: opened.inheritedSizeBytes,
    ...(parentUuid === undefined ? {} : { parentUuid }),
  });
  const sources = opened.lowers.map((lower) => lower.source);
  copyMapped(opened.base, (layer) => sources[layer]!, writer);
  return writer.finish();
}
