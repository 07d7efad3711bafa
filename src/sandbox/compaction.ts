import { statSync } from "node:fs";
import { join } from "node:path";
import { AenvError } from "../lib/errors.ts";
import { Gate } from "../lib/gate.ts";
import type { LowerSwap } from "../storage/blockd/protocol.ts";
import type { LayerRef } from "../storage/overlaybd/types.ts";
import { privateLayerName } from "./layers.ts";

/**
 * Keeps layer chains short. Every capture adds a layer; without an end to that, lookups get slower, each
 * start opens more files, and the format ends at 255. Layers are merged like levels of a log-structured
 * tree: a run at the top of the chain whose layers are not much smaller than the one below it becomes one
 * layer. So a chain has some layers per power of two, each byte is copied once per level, and a
 * big image at the bottom is never copied for a small change on top.
 */

/** A run is worth a merge from this many layers on. */
const MIN_RUN = 8;
/** A layer belongs to the run above it while it is at most so many times as large as that run. */
const GROWTH = 1;
/** Longer chains are merged whatever it costs. The format allows 255, and the live device adds to it. */
export const MAX_CHAIN = 128;
/** What a forced merge leaves at most. */
const FORCED_CHAIN = 64;
/** Layers smaller than this count as equal: merging them costs nothing. */
const SMALL_LAYER_BYTES = 256 << 10;

/** Where the run to merge begins (it reaches to the top); undefined when there is none worth it. */
export function planCompaction(sizes: readonly number[], limits = { run: MIN_RUN, chain: MAX_CHAIN }) {
  let from = sizes.length;
  let total = 0;
  while (from > 0) {
    const size = Math.max(sizes[from - 1]!, SMALL_LAYER_BYTES);
    if (total > 0 && size > total * GROWTH) break;
    total += size;
    from--;
  }
  if (sizes.length - from >= limits.run) return from;
  if (sizes.length > limits.chain) return Math.min(from, FORCED_CHAIN - 1);
  return undefined;
}

interface Substitute {
  readonly files: readonly string[];
  readonly layer: LayerRef;
}

/** What has been merged so far: chains that contain the merged layers are told with the result instead. */
export class Substitutes {
  readonly #all: Substitute[] = [];

  add(replaced: readonly LayerRef[], layer: LayerRef): void {
    this.#all.push({ files: replaced.map(({ file }) => file), layer });
  }

  /** Same content, fewer layers. In the order in which they were made: a later one may replace an earlier. */
  apply(layers: readonly LayerRef[]): LayerRef[] {
    return this.plan(layers).layers;
  }

  /** The same, with the steps that lead there. */
  plan(layers: readonly LayerRef[]): { readonly layers: LayerRef[]; readonly swaps: LowerSwap[] } {
    const result = [...layers];
    const swaps: LowerSwap[] = [];
    for (const { files, layer } of this.#all) {
      const at = result.findIndex(({ file }) => file === files[0]);
      if (at >= 0 && files.every((file, i) => result[at + i]?.file === file)) {
        result.splice(at, files.length, layer);
        swaps.push({ first: at, count: files.length, files, merged: layer });
      }
    }
    return { layers: result, swaps };
  }
}

export function layerSizes(layers: readonly LayerRef[]): number[] {
  return layers.map((layer) => layer.size ?? statSync(layer.file).size);
}

export interface MergeRequest {
  readonly layers: readonly LayerRef[];
  readonly target: string;
}

/** Merges layers into one private layer in `dir`; neither the server's thread nor its memory is used. */
export type LayerMerger = (
  layers: readonly LayerRef[],
  dir: string,
  kind: "disk" | "memory",
  /** Ends the work, which then fails. */
  signal?: AbortSignal,
) => Promise<LayerRef>;

const LOW_PRIORITY = ["nice", "-n", "10"];
const MERGE_TIMEOUT_MS = 300_000;

/** A merger that runs `command`, the `merge-layers` program of the executable; one merge at a time. */
export function createLayerMerger(command: readonly string[]): LayerMerger {
  const gate = new Gate(1, "layer merges");
  return (layers, dir, kind, signal) =>
    gate.run(async () => {
      signal?.throwIfAborted();
      const request: MergeRequest = { layers, target: join(dir, privateLayerName(kind)) };
      const child = Bun.spawn([...LOW_PRIORITY, ...command], {
        stdin: new Blob([JSON.stringify(request)]),
        stdout: "pipe",
        stderr: "pipe",
        timeout: MERGE_TIMEOUT_MS,
        killSignal: "SIGKILL",
        ...(signal === undefined ? {} : { signal }),
      });
      const [stdout, stderr, exitCode] = await Promise.all([
        new Response(child.stdout).text(),
        new Response(child.stderr).text(),
        child.exited,
      ]);
      if (exitCode !== 0) {
        throw new AenvError({
          code: "layer_merge_failed",
          message: `merging ${layers.length} layers failed (${child.signalCode ?? exitCode}): ${stderr.trim().slice(-1000)}`,
        });
      }
      return JSON.parse(stdout) as LayerRef;
    });
}
