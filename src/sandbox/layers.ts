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

/** Above this many private layers in one chain a capture merges them into one. */
export const MAX_PRIVATE_LAYERS = 32;

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

/**
 * Merges the private layers on top of a chain into one file in `dir` when there are more than
 * {@link MAX_PRIVATE_LAYERS}: lookups, open files and the format's limit of 255 layers stay bounded over
 * any number of pauses. The merged layer replaces links that lie in `dir`, which the caller removes.
 */
export async function compactPrivateLayers(
  layers: readonly LayerRef[],
  dir: string,
  kind: "disk" | "memory",
  limit = MAX_PRIVATE_LAYERS,
): Promise<{ readonly layers: LayerRef[]; readonly replaced: readonly LayerRef[] }> {
  const firstPrivate = layers.findLastIndex((layer) => !isPrivate(layer)) + 1;
  const mergeable = layers.slice(firstPrivate);
  if (mergeable.length <= limit) return { layers: [...layers], replaced: [] };
  // Loaded on demand: the format core brings the native library along, which most captures do not need.
  const { mergeLayers } = await import("../storage/overlaybd/index.ts");
  const merged = mergeLayers(mergeable, join(dir, privateLayerName(kind)), { uuid: crypto.randomUUID() });
  const { digest: _, ...ref } = merged;
  return { layers: [...layers.slice(0, firstPrivate), ref], replaced: mergeable };
}
