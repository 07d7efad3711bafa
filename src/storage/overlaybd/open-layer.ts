import type { Disk } from "./disk.ts";
import type { FlatIndex } from "./lsmt/flat-index.ts";
import { type LayerBlocks, readLayerBlocks, readLayerIndex } from "./lsmt/layer.ts";
import { openFileSource, type ReadSource } from "./source.ts";
import { findTarPayload, TarSource } from "./tar.ts";
import { looksLikeZFile, ZFileSource } from "./zfile/reader.ts";

export type Container = "tar" | "zfile" | "lsmt";

/** A file with its wrappings peeled off, always in the order tar, ZFile. */
export function openUnwrapped(disk: Disk, file: string): { source: ReadSource; container: Container[] } {
  const container: Container[] = [];
  let source: ReadSource = openFileSource(disk, file);
  try {
    const payload = findTarPayload(source);
    if (payload !== undefined) {
      source = new TarSource(source, payload);
      container.push("tar");
    }
    if (looksLikeZFile(source)) {
      source = new ZFileSource(source, disk.identityOf(file));
      container.push("zfile");
    }
    return { source, container };
  } catch (error) {
    source[Symbol.dispose]();
    throw error;
  }
}

/** A finished layer opened for reading: `index` points into `source`, all its mappings tagged `layer`. */
export interface OpenLayer extends Disposable {
  readonly source: ReadSource;
  readonly blocks: LayerBlocks;
  readonly container: readonly Container[];
  readonly index: FlatIndex;
}

export function openLayer(disk: Disk, file: string, layer: number): OpenLayer {
  const { source, container } = openUnwrapped(disk, file);
  try {
    const blocks = readLayerBlocks(source);
    const index = readLayerIndex(source, blocks.trailer, layer);
    return {
      source,
      blocks,
      index,
      container: [...container, "lsmt"],
      [Symbol.dispose]: () => source[Symbol.dispose](),
    };
  } catch (error) {
    source[Symbol.dispose]();
    throw error;
  }
}
