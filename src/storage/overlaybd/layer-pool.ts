import { errorCode } from "../../lib/durable.ts";
import { createLogger } from "../../lib/log.ts";
import { type Disk, hostDisk } from "./disk.ts";
import type { LayerBlocks } from "./lsmt/layer.ts";
import { type OpenLayer, openLayerBlocks } from "./open-layer.ts";
import type { ReadSource } from "./source.ts";

/** A finished layer for one of its users; disposing lets go of this use. */
export interface PooledLayer extends Disposable {
  readonly source: ReadSource;
  readonly blocks: LayerBlocks;
  /** See Disk.identityOf. */
  readonly identity: string;
}

export interface LayerPoolStats {
  /** Layers that stacks of the thread use. */
  readonly used: number;
  /** Layers kept open for the next stack. */
  readonly idle: number;
  /** Uses that found their layer open, and those that opened it. */
  readonly hits: number;
  readonly misses: number;
}

interface Entry {
  readonly key: string;
  readonly file: string;
  readonly identity: string;
  readonly layer: Omit<OpenLayer, "index">;
  users: number;
  idleSinceMs: number;
}

const IDLE_MS = 60_000;
/** A layer that was removed takes space on the disk as long as it is open. */
const SWEEP_MS = 5_000;

/**
 * Open layers of the thread. Stacks over the same file share it, opened and checked once: a host full of sandboxes of
 * one image has its layers open once, not once each. With a limit above 0 so many layers that no stack uses any more
 * stay open for a minute, so that the next device of an image finds them warm.
 */
export class LayerPool implements Disposable {
  readonly #entries = new Map<string, Entry>();
  /** Longest unused first. */
  readonly #idle = new Set<Entry>();
  readonly #onUnexpected: (file: string, error: unknown) => void;
  #limit: number;
  #sweeper: ReturnType<typeof setInterval> | undefined;
  #hits = 0;
  #misses = 0;

  /** `onUnexpected`: told what went wrong with a layer that nobody uses, which is closed then. */
  constructor(idleLimit = 0, onUnexpected: (file: string, error: unknown) => void = logUnexpected) {
    this.#limit = idleLimit;
    this.#onUnexpected = onUnexpected;
  }

  /** How many layers are kept that no stack uses; takes effect at once. */
  setIdleLimit(layers: number): void {
    this.#limit = layers;
    this.#trim();
  }

  /**
   * Opens a layer, or shares it. Whoever replaced the file under its name gets the new one.
   * Errors as of openLayerBlocks.
   */
  open(file: string): PooledLayer {
    let before: string | undefined;
    try {
      before = hostDisk.identityOf(file);
    } catch (error) {
      // Opening it says what is wrong.
      if (!(error instanceof Error)) throw error;
    }
    const known = before === undefined ? undefined : this.#entries.get(`${file}\n${before}`);
    if (known !== undefined) {
      this.#hits++;
      this.#idle.delete(known);
      return this.#use(known);
    }
    const layer = openLayerBlocks(hostDisk, file);
    this.#misses++;
    try {
      const identity = hostDisk.identityOf(file);
      const key = `${file}\n${identity}`;
      const entry: Entry = { key, file, identity, layer, users: 0, idleSinceMs: 0 };
      // Replaced while it was opened: nobody can tell which of the two this is.
      if (identity === before) this.#entries.set(key, entry);
      return this.#use(entry);
    } catch (error) {
      layer[Symbol.dispose]();
      throw error;
    }
  }

  #use(entry: Entry): PooledLayer {
    entry.users++;
    let open = true;
    return {
      source: entry.layer.source,
      blocks: entry.layer.blocks,
      identity: entry.identity,
      [Symbol.dispose]: () => {
        if (!open) return;
        open = false;
        entry.users--;
        if (entry.users === 0) this.#unused(entry);
      },
    };
  }

  #unused(entry: Entry): void {
    if (this.#limit === 0 || this.#entries.get(entry.key) !== entry) {
      this.#close(entry);
      return;
    }
    entry.idleSinceMs = performance.now();
    this.#idle.add(entry);
    this.#trim();
    if (this.#idle.size === 0 || this.#sweeper !== undefined) return;
    this.#sweeper = setInterval(() => this.sweep(), SWEEP_MS);
    this.#sweeper.unref();
  }

  #trim(): void {
    for (const entry of this.#idle) {
      if (this.#idle.size <= this.#limit) return;
      this.#close(entry);
    }
  }

  /**
   * Closes what nobody used for a minute, and what is gone from the disk or was replaced there. Never throws: nobody
   * waits for the layers it looks at, and no layer's trouble is another's.
   */
  sweep(nowMs = performance.now()): void {
    for (const entry of this.#idle) {
      try {
        if (nowMs - entry.idleSinceMs >= IDLE_MS || !this.#isThere(entry)) this.#close(entry);
      } catch (error) {
        this.#onUnexpected(entry.file, error);
      }
    }
    if (this.#idle.size > 0) return;
    clearInterval(this.#sweeper);
    this.#sweeper = undefined;
  }

  /** What cannot be looked at counts as gone: who wants the layer again opens it again, or learns what is wrong. */
  #isThere({ file, identity }: Entry): boolean {
    try {
      return hostDisk.identityOf(file) === identity;
    } catch (error) {
      if (errorCode(error) !== "ENOENT") this.#onUnexpected(file, error);
      return false;
    }
  }

  #close(entry: Entry): void {
    this.#idle.delete(entry);
    if (this.#entries.get(entry.key) === entry) this.#entries.delete(entry.key);
    entry.layer[Symbol.dispose]();
  }

  stats(): LayerPoolStats {
    const idle = this.#idle.size;
    return { used: this.#entries.size - idle, idle, hits: this.#hits, misses: this.#misses };
  }

  /** Closes what is not used. */
  [Symbol.dispose](): void {
    this.setIdleLimit(0);
    this.sweep();
  }
}

function logUnexpected(file: string, error: unknown): void {
  createLogger("layers").warn(
    { file, err: error },
    "a layer that nobody uses cannot be looked at, it is closed",
  );
}

/** The calling thread's: stacks belong to one thread, and so do the layers they share. */
export const threadLayers = new LayerPool();

/** A layer for one stack: shared where it is a file of the host's. */
export function openPooled(disk: Disk, file: string): PooledLayer {
  if (disk === hostDisk) return threadLayers.open(file);
  const layer = openLayerBlocks(disk, file);
  try {
    return { ...layer, identity: disk.identityOf(file) };
  } catch (error) {
    layer[Symbol.dispose]();
    throw error;
  }
}
