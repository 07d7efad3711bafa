/**
 * The overlaybd room: read-only layers (LSMT, ZFile, tar around either), the writable upper, the stack of
 * both, and what makes layers out of uppers and other layers.
 */

export { type Disk, type DiskFile, hostDisk } from "./disk.ts";
export type { IndexCacheOptions } from "./index-cache.ts";
export { inspectLayer } from "./inspect.ts";
export { createLayerWriter } from "./layer-writer.ts";
export { commitUpper, mergeLayers } from "./merge.ts";
export { planMerge, startMerge } from "./merge-job.ts";
export { createUpper, openStack, type StackOptions } from "./stack.ts";
export type { LayerHelpers } from "./tool/command.ts";
export { layerMain } from "./tool/index.ts";
export type * from "./types.ts";
