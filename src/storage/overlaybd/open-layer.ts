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
  const opened = openLayerBlocks(disk, file);
  try {
    const index = readLayerIndex(opened.source, opened.blocks.trailer, layer);
    return { ...opened, index };
  } catch (error) {
    opened[Symbol.dispose]();
    throw error;
  }
}

/** Like `openLayer`, with the index left to be read. */
export function openLayerBlocks(disk: Disk, file: string): Omit<OpenLayer, "index"> {
  const { source, container } = openUnwrapped(disk, file);
  try {
    return {
      source,
      blocks: readLayerBlocks(source),
      container: [...container, "lsmt"],
      [Symbol.dispose]: () => source[Symbol.dispose](),
    };
  } catch (error) {
    source[Symbol.dispose]();
    throw error;
  }
}
