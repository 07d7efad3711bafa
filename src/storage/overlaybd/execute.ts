import { SECTOR_BYTES } from "./lsmt/format.ts";
import type { ReadPlan } from "./lsmt/plan.ts";
import type { ReadSource } from "./source.ts";

/**
 * Runs a read plan one segment after the other. A ring executor takes the same plan and, where a source is
 * `direct`, submits its segments at once.
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
