import { type Disk, hostDisk } from "./disk.ts";
import { badRequest } from "./errors.ts";
import { LayerFileWriter } from "./layer-writer.ts";
import { ZEROED_TAG } from "./lsmt/flat-index.ts";
import { SECTOR_BYTES } from "./lsmt/format.ts";
import { openLowers } from "./stack.ts";
import type { CommitOptions, LayerRef, MergeJob } from "./types.ts";

const COPY_SECTORS = (1 << 20) / SECTOR_BYTES;
/** What a mapping counts in a step's budget beside its data. */
const MAPPING_COST = 64;

/**
 * Flattens consecutive layers like `mergeLayers`, in steps of bounded work, so that a thread that serves devices
 * can do it in between. Nothing is at `target` before `finish`; disposing drops what is not finished.
 */
export function startMerge(
  layers: readonly LayerRef[],
  target: string,
  options: Omit<CommitOptions, "compression">,
  disk: Disk = hostDisk,
): MergeJob {
  if (layers.length === 0) throw badRequest("no_layers", "nothing to merge: no layer was given");
  using cleanup = new DisposableStack();
  const opened = cleanup.use(openLowers(disk, layers));
  const writer = cleanup.use(
    new LayerFileWriter(disk, target, {
      ...options,
      copy: true,
      virtualSizeBytes: opened.inheritedSizeBytes,
      parentUuid: options.parentUuid ?? opened.bottomParentUuid,
    }),
  );
  const { base, lowers } = opened;
  const owned = cleanup.move();
  const buffer = new Uint8Array(new ArrayBuffer(COPY_SECTORS * SECTOR_BYTES));
  let at = 0;
  /** Sectors of mapping `at` that are done. */
  let part = 0;
  let finished = false;
  return {
    step(budgetBytes) {
      let spent = 0;
      let movedBytes = 0;
      while (at < base.count && spent < budgetBytes) {
        const offset = base.offsets[at]!;
        const length = base.lengths[at]!;
        const tag = base.tags[at]!;
        spent += MAPPING_COST;
        if (tag >= ZEROED_TAG) {
          writer.zero(offset * SECTOR_BYTES, length * SECTOR_BYTES);
          at++;
          continue;
        }
        const left = Math.max(1, Math.floor((budgetBytes - spent) / SECTOR_BYTES));
        const sectors = Math.min(length - part, COPY_SECTORS, left);
        const bytes = sectors * SECTOR_BYTES;
        lowers[tag]!.source.read((base.moffsets[at]! + part) * SECTOR_BYTES, buffer, 0, bytes);
        writer.append((offset + part) * SECTOR_BYTES, buffer.subarray(0, bytes));
        spent += bytes;
        movedBytes += bytes;
        part += sectors;
        if (part === length) {
          at++;
          part = 0;
        }
      }
      return { done: at >= base.count, movedBytes };
    },
    finish() {
      if (finished) throw new Error(`merge into ${target}: finished twice`);
      if (at < base.count) throw new Error(`merge into ${target}: finished before all steps were done`);
      finished = true;
      try {
        return writer.finish();
      } finally {
        owned[Symbol.dispose]();
      }
    },
    [Symbol.dispose]() {
      if (!finished) owned[Symbol.dispose]();
      finished = true;
    },
  };
}

/**
 * Which of a stack's lowers to merge, so that a chain of snapshots stays short at a cost that grows with the
 * logarithm of its length: the newest layers of about the same size, once there are `fanout` of them. Layers below
 * `first` (of the image, shared with others) are left alone. Sizes must be known. Undefined: none.
 */
export function planMerge(
  lowers: readonly LayerRef[],
  options: { readonly first: number; readonly fanout?: number },
): { readonly first: number; readonly count: number } | undefined {
  const fanout = options.fanout ?? 4;
  let from = lowers.length;
  let total = 0;
  while (from > options.first) {
    const size = lowers[from - 1]?.size;
    if (size === undefined) break;
    // A layer that is bigger than all above it together is merged when those have grown to its size.
    if (total > 0 && size > total) break;
    total += size;
    from--;
  }
  const count = lowers.length - from;
  return count >= Math.max(2, fanout) ? { first: from, count } : undefined;
}
