/** Asynchronous file I/O of one thread: an io_uring, or the runtime's thread pool where there is none. */
import { Ring } from "../../../ffi/ring.ts";
import { RingEngine } from "./ring.ts";
import { ThreadEngine } from "./threads.ts";
import type { IoEngine } from "./types.ts";

export type * from "./types.ts";

/** Requests in flight of one thread, over all its devices; further ones wait. */
const RING_ENTRIES = 512;

export interface IoEngineOptions {
  readonly entries?: number;
  /** Tests: take the thread pool although the host has io_uring. */
  readonly kind?: "auto" | "threads";
}

export function openIoEngine(options: IoEngineOptions = {}): IoEngine {
  if (options.kind === "threads") return new ThreadEngine("the thread pool was asked for");
  const ring = Ring.open(options.entries ?? RING_ENTRIES);
  return typeof ring === "string"
    ? new ThreadEngine(`io_uring is not available here (${ring})`)
    : new RingEngine(ring);
}
