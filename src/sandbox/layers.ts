import { basename, join } from "node:path";
import { linkOrCopy } from "../lib/durable.ts";
import type { LayerRef } from "../storage/overlaybd/types.ts";

/**
 * Who owns a layer file. A layer with a digest lies in a content-addressed store (image cache, snapshot
 * repository) and is named by its path there. A layer without one is private: made by a capture, and
 * whoever needs it, a running sandbox or a captured state, holds a hard link of its own. So a directory
 * of private layers can be removed whenever its owner ends, with nothing to count.
 */
export function isPrivate(layer: LayerRef): boolean {
  return layer.digest === undefined;
}

/**
 * The same chain with every private layer linked into `dir` (which exists). File names stay: they are
 * unique. A layer that is there already is left alone.
 */
export async function linkPrivateLayers(layers: readonly LayerRef[], dir: string): Promise<LayerRef[]> {
  const linked: LayerRef[] = [];
  for (const layer of layers) {
    if (!isPrivate(layer)) {
      linked.push(layer);
      continue;
    }
    const file = join(dir, basename(layer.file));
    if (file !== layer.file) await linkOrCopy(layer.file, file);
    linked.push({ ...layer, file });
  }
  return linked;
}

/** Name of a private layer file; the kind is for the reader of a directory listing. */
export function privateLayerName(kind: "disk" | "memory"): string {
  return `${kind}-${Bun.randomUUIDv7()}.lsmt`;
}
