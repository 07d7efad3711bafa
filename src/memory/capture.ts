import { closeSync, existsSync, openSync, readdirSync } from "node:fs";
import { open } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import {
  comparePages,
  dirtyRanges,
  PAGE_BYTES,
  PAGE_SAME,
  PAGE_ZERO,
  readFileRanges,
  readProcess,
} from "../../ffi/procmem.ts";
import { AenvError, assert } from "../lib/errors.ts";
import { newId } from "../lib/ids.ts";
import type { Logger } from "../lib/log.ts";
import { pacer } from "../lib/turn.ts";
import { createLayerWriter, type LayerWriter, openStack } from "../storage/overlaybd/index.ts";
import type { VmReference } from "../vmm/types.ts";
import { chainKeys, keyOfFlatName } from "./chain.ts";
import { findMemory, type MemoryMapping } from "./mappings.ts";
import type { CaptureResult, MemoryImage } from "./types.ts";

/** What is read, compared and written at a time. */
const BATCH_BYTES = 2 << 20;
const BATCH_RANGES = 512;
const SCAN_STEP_BYTES = 1 << 30;
/** From this much data on, it is worth syncing it without blocking before the layer is finished. */
const EARLY_SYNC_BYTES = 4 << 20;

/** Bytes of guest memory: where they are in the process, and in the image. */
interface DirtyRange {
  readonly address: number;
  readonly offset: number;
  readonly length: number;
}

/** Start time of the process, see VmReference. */
function checkAlive(vm: VmReference, startTimeTicks: string | undefined): void {
  if (startTimeTicks === vm.startTimeTicks) return;
  throw new AenvError({
    code: "vm_gone",
    status: 409,
    message: `the process ${vm.pid} of VM ${vm.vmId} is gone: its memory cannot be captured`,
  });
}

export interface CaptureOptions {
  readonly vm: VmReference;
  readonly startTimeTicks: string | undefined;
  readonly base: MemoryImage;
  readonly layerPath: string;
  readonly log: Logger;
  /** Use the interface of kernels before 6.7 (for tests). */
  readonly noScan?: boolean;
}

async function scan(
  pid: number,
  mappings: readonly MemoryMapping[],
  noScan: boolean,
  breathe: () => Promise<void> | undefined,
): Promise<DirtyRange[]> {
  const pagemap = openSync(`/proc/${pid}/pagemap`, "r");
  try {
    const found: DirtyRange[] = [];
    const ranges = new Float64Array(new ArrayBuffer(2 * 8192 * 8));
    for (const mapping of mappings) {
      const end = mapping.address + mapping.length;
      for (let at = mapping.address; at < end; ) {
        const { count, next } = dirtyRanges(pagemap, at, Math.min(end, at + SCAN_STEP_BYTES), ranges, noScan);
        for (let i = 0; i < count; i++) {
          const address = ranges[2 * i]!;
          found.push({
            address,
            offset: mapping.fileOffset + (address - mapping.address),
            length: ranges[2 * i + 1]! - address,
          });
        }
        assert(next > at, "the scan for written pages does not advance");
        at = next;
        await breathe();
      }
    }
    return found;
  } finally {
    closeSync(pagemap);
  }
}

/** The same ranges in groups that fit one batch; a long range is cut at page borders. */
function* batches(ranges: readonly DirtyRange[]): Generator<DirtyRange[]> {
  let batch: DirtyRange[] = [];
  let bytes = 0;
  for (const range of ranges) {
    for (let done = 0; done < range.length; ) {
      const length = Math.min(range.length - done, BATCH_BYTES - bytes);
      batch.push({ address: range.address + done, offset: range.offset + done, length });
      done += length;
      bytes += length;
      if (bytes === BATCH_BYTES || batch.length === BATCH_RANGES) {
        yield batch;
        batch = [];
        bytes = 0;
      }
    }
  }
  if (batch.length > 0) yield batch;
}

/** Fills a buffer with what the base holds in the ranges; undefined: the base is all zeros. */
type BaseReader = ((ranges: readonly DirtyRange[], target: Uint8Array) => void) | undefined;

function pairs(ranges: readonly DirtyRange[], first: "address" | "offset"): Float64Array {
  const flat = new Float64Array(new ArrayBuffer(ranges.length * 16));
  ranges.forEach((range, i) => {
    flat[2 * i] = range[first];
    flat[2 * i + 1] = range.length;
  });
  return flat;
}

/**
 * Reads the base from the file the VM maps when that is the base, else through the layers (after a capture
 * and a resume in place the base has layers the file has not).
 */
function openBase(
  vm: VmReference,
  base: MemoryImage,
  isMapped: boolean,
  cleanup: DisposableStack,
): BaseReader {
  if (base.layers.length === 0) return undefined;
  if (isMapped && existsSync(vm.memoryFile)) {
    const fd = openSync(vm.memoryFile, "r");
    cleanup.defer(() => closeSync(fd));
    return (ranges, target) => {
      readFileRanges(fd, pairs(ranges, "offset"), ranges.length, target);
    };
  }
  const stack = cleanup.use(openStack({ lowers: base.layers, virtualSizeBytes: base.sizeBytes }));
  return (ranges, target) => {
    let at = 0;
    for (const range of ranges) {
      stack.read(range.offset, target.subarray(at, at + range.length));
      at += range.length;
    }
  };
}

/** Appends the pages of one batch that differ from the base; returns bytes stored and bytes zeroed. */
function writeBatch(
  writer: LayerWriter,
  ranges: readonly DirtyRange[],
  current: Uint8Array,
  verdicts: Uint8Array,
): { stored: number; zeroed: number } {
  let stored = 0;
  let zeroed = 0;
  let page = 0;
  for (const range of ranges) {
    const end = page + range.length / PAGE_BYTES;
    for (const first = page; page < end; ) {
      const verdict = verdicts[page]!;
      const start = page;
      while (page < end && verdicts[page] === verdict) page++;
      if (verdict === PAGE_SAME) continue;
      const offset = range.offset + (start - first) * PAGE_BYTES;
      const length = (page - start) * PAGE_BYTES;
      if (verdict === PAGE_ZERO) {
        writer.zero(offset, length);
        zeroed += length;
      } else {
        writer.append(offset, current.subarray(start * PAGE_BYTES, page * PAGE_BYTES));
        stored += length;
      }
    }
  }
  return { stored, zeroed };
}

/**
 * Most of the time of a capture is the disk's. The writer's own sync blocks the thread, so what it has
 * written so far is synced in the background first, which leaves it little to do.
 */
async function syncEarly(layerPath: string): Promise<void> {
  const dir = dirname(layerPath);
  for (const name of readdirSync(dir)) {
    if (!name.startsWith(`${basename(layerPath)}.tmp`)) continue;
    const file = await open(join(dir, name), "r");
    try {
      await file.datasync();
    } finally {
      await file.close();
    }
  }
}

export async function captureMemory(options: CaptureOptions): Promise<CaptureResult> {
  const { vm, base, layerPath, log } = options;
  const started = performance.now();
  checkAlive(vm, options.startTimeTicks);
  const breathe = pacer();
  const mappings =
    vm.memoryRegions ??
    findMemory(vm.pid, vm.memoryMappedAs ?? vm.memoryFile, base.sizeBytes, vm.anonymousMemory === true);
  // Pages the guest did not write are those of the mapped file. They are the base's, too, when the file was
  // made from the base or from layers at its bottom; of any other file nothing is known, and all is compared.
  const keys = chainKeys(base);
  const mappedKey = keyOfFlatName(basename(vm.memoryFile));
  const related = mappedKey !== undefined && keys.includes(mappedKey);
  if (!related) {
    log.warn(
      { vmId: vm.vmId, memoryFile: vm.memoryFile },
      "the memory file is not known to stem from the base of this capture: comparing all memory",
    );
  }
  const dirty = related
    ? await scan(vm.pid, mappings, options.noScan ?? false, breathe)
    : mappings.map((mapping) => ({
        address: mapping.address,
        offset: mapping.fileOffset,
        length: mapping.length,
      }));
  const dirtyBytes = dirty.reduce((sum, range) => sum + range.length, 0);
  const scanned = performance.now();

  using cleanup = new DisposableStack();
  const readBase = openBase(vm, base, mappedKey === keys.at(-1), cleanup);
  const uuid = newId();
  const parentUuid = base.layers.at(-1)?.uuid;
  const writer = cleanup.use(
    createLayerWriter(layerPath, {
      virtualSizeBytes: base.sizeBytes,
      uuid,
      ...(parentUuid === undefined ? {} : { parentUuid }),
    }),
  );
  const current = new Uint8Array(new ArrayBuffer(BATCH_BYTES));
  const before = readBase === undefined ? undefined : new Uint8Array(new ArrayBuffer(BATCH_BYTES));
  const verdicts = new Uint8Array(new ArrayBuffer(BATCH_BYTES / PAGE_BYTES));
  let storedBytes = 0;
  let zeroedBytes = 0;
  for (const batch of batches(dirty)) {
    const bytes = readProcess(vm.pid, pairs(batch, "address"), batch.length, current);
    if (before !== undefined) readBase?.(batch, before.subarray(0, bytes));
    comparePages(current, before, bytes / PAGE_BYTES, verdicts);
    const { stored, zeroed } = writeBatch(writer, batch, current, verdicts);
    storedBytes += stored;
    zeroedBytes += zeroed;
    await breathe();
  }
  const result = { dirtyBytes, storedBytes, zeroedBytes, scanMs: scanned - started };
  if (storedBytes === 0 && zeroedBytes === 0) {
    writer.abort();
    return { image: base, ...result, writeMs: performance.now() - scanned };
  }
  if (storedBytes >= EARLY_SYNC_BYTES) await syncEarly(layerPath);
  const newLayer = writer.finish();
  return {
    image: { sizeBytes: base.sizeBytes, layers: [...base.layers, newLayer] },
    newLayer,
    ...result,
    writeMs: performance.now() - scanned,
  };
}
