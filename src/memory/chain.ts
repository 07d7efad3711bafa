import { createHash } from "node:crypto";
import { statSync } from "node:fs";
import { inspectLayer, type LayerRef } from "../storage/overlaybd/index.ts";
import type { MemoryImage } from "./types.ts";

/**
 * Name of the content of one layer. The UUID that the writer drew comes first because it stays when a layer
 * is moved, copied or published (and then gets a digest): the chain keeps its key, the flat file its use.
 */
function layerIdentity(layer: LayerRef): string {
  const uuid = layer.uuid ?? inspectLayer(layer.file).uuid;
  if (uuid !== undefined) return `uuid:${uuid}`;
  if (layer.digest !== undefined) return `digest:${layer.digest}`;
  const stat = statSync(layer.file);
  return `file:${layer.file}:${stat.size}:${stat.mtimeMs}`;
}

/** Keys of all prefixes of a chain: the first is of no layer at all, the last of the whole image. */
export function chainKeys(image: MemoryImage): string[] {
  const hash = (text: string): string => createHash("sha256").update(text).digest("hex").slice(0, 40);
  const keys = [hash(`memory ${image.sizeBytes}`)];
  for (const layer of image.layers) keys.push(hash(`${keys.at(-1)} ${layerIdentity(layer)}`));
  return keys;
}

const FLAT_NAME = /^m1-([0-9a-f]{40})\.mem$/;

/** File name of the flat file of a chain. */
export function flatName(key: string): string {
  return `m1-${key}.mem`;
}

/** The key in a flat file's name; undefined for any other file. */
export function keyOfFlatName(name: string): string | undefined {
  return FLAT_NAME.exec(name)?.[1];
}
