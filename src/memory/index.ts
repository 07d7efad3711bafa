import { readFileSync } from "node:fs";
import type { Logger } from "../lib/log.ts";
import { captureMemory } from "./capture.ts";
import { createFlatCache } from "./flat.ts";
import type { MemoryService } from "./types.ts";

export type * from "./types.ts";

export interface MemoryServiceOptions {
  /** Flat memory files are made here. Nothing in it is needed after the service ends. */
  readonly cacheDir: string;
  /** Disk space for flat files; those in use are never dropped and may exceed it. */
  readonly maxCacheBytes: number;
  readonly log: Logger;
}

/** Field 22 of /proc/PID/stat; undefined when there is no such process. */
function startTimeTicks(pid: number): string | undefined {
  try {
    const text = readFileSync(`/proc/${pid}/stat`, "latin1");
    return text.slice(text.lastIndexOf(")") + 2).split(" ")[19];
  } catch {
    return undefined;
  }
}

export function createMemoryService(options: MemoryServiceOptions): MemoryService {
  const flat = createFlatCache(options);
  return {
    materialize: (image) => flat.acquire(image),
    capture: (vm, base, layerPath) =>
      captureMemory({
        vm,
        startTimeTicks: startTimeTicks(vm.pid),
        base,
        layerPath,
        log: options.log,
      }),
  };
}
