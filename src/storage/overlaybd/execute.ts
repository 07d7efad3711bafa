import { SECTOR_BYTES } from "./lsmt/format.ts";
import type { ReadPlan } from "./lsmt/plan.ts";
import type { FileRangeVisitor, ReadSource } from "./source.ts";

/** Runs a read plan from memory alone; false where that would wait for a disk, the target is arbitrary then. */
export function tryExecuteRead(
  plan: ReadPlan,
  sourceOf: (layer: number) => ReadSource,
  target: Uint8Array,
): boolean {
  let at = 0;
  for (let i = 0; i < plan.count; i++) {
    const length = plan.lengths[i]! * SECTOR_BYTES;
    const layer = plan.layers[i]!;
    if (layer < 0) target.fill(0, at, at + length);
    else if (!sourceOf(layer).tryRead(plan.moffsets[i]! * SECTOR_BYTES, target, at, length)) return false;
    at += length;
  }
  return true;
}

/** Tells what of which files a plan takes its bytes from. */
export function locateRead(
  plan: ReadPlan,
  sourceOf: (layer: number) => ReadSource,
  visit: FileRangeVisitor,
): void {
  for (let i = 0; i < plan.count; i++) {
    const layer = plan.layers[i]!;
    if (layer < 0) continue;
    sourceOf(layer).locate(plan.moffsets[i]! * SECTOR_BYTES, plan.lengths[i]! * SECTOR_BYTES, visit);
  }
}

/**
 * Runs a read plan one segment after the other, waiting for the disk where it must. Who must not wait tries
 * {@link tryExecuteRead}, brings what {@link locateRead} tells into memory and tries again: so the state of the
 * stack that a read sees is always that of one moment.
 */
export function executeRead(
  plan: ReadPlan,
  sourceOf: (layer: number) => ReadSource,
  target: Uint8Array,
): void {
  let at = 0;
  for (let i = 0; i < plan.count; i++) {
    const length = plan.lengths[i]! * SECTOR_BYTES;
    const layer = plan.layers[i]!;
    if (layer < 0) target.fill(0, at, at + length);
    else sourceOf(layer).read(plan.moffsets[i]! * SECTOR_BYTES, target, at, length);
    at += length;
  }
}
