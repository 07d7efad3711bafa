import type { IoEngine } from "../io/index.ts";
import type { PendingFlush, SyncTarget } from "../overlaybd/types.ts";

/** Everything that the targets stand for is on stable storage when the promise resolves. */
export async function syncAll(targets: readonly SyncTarget[], engine: IoEngine): Promise<void> {
  const syncs = targets.map(async ({ fd, name, names, datasync }) => {
    if (fd === undefined) datasync();
    else if (names === true) await engine.sync(fd, name);
    else await engine.datasync(fd, name);
  });
  // Descriptors may be closed when this returns: none may be left in flight by another's failure.
  const failed = (await Promise.allSettled(syncs)).find((result) => result.status === "rejected");
  if (failed !== undefined) throw failed.reason;
}

/**
 * Flushes of one device: one at a time, off the thread, and however many ask while one is under way, one more
 * serves them all.
 */
export class Flusher {
  readonly #begin: () => PendingFlush | undefined;
  readonly #engine: IoEngine;
  #running: Promise<void> | undefined;
  #next: Promise<void> | undefined;
  /** What `exclusive` runs. */
  #section: Promise<unknown> | undefined;

  /** `begin` as LayerStack.beginFlush; what it throws is the flush's failure. */
  constructor(begin: () => PendingFlush | undefined, engine: IoEngine) {
    this.#begin = begin;
    this.#engine = engine;
  }

  /** Everything written before the call is on stable storage when the promise resolves. */
  flush(): Promise<void> {
    if (this.#running === undefined && this.#section === undefined) return this.#start();
    this.#next ??= this.#startLater();
    return this.#next;
  }

  async #startLater(): Promise<void> {
    // Looked at again after each wait: whoever waits as well may have been first.
    for (let busy = this.#busy; busy !== undefined; busy = this.#busy) await Promise.allSettled([busy]);
    this.#next = undefined;
    return this.#start();
  }

  get #busy(): Promise<unknown> | undefined {
    return this.#section ?? this.#running;
  }

  #start(): Promise<void> {
    const running = this.#run().finally(() => {
      if (this.#running === running) this.#running = undefined;
    });
    this.#running = running;
    return running;
  }

  async #run(): Promise<void> {
    const pending = this.#begin();
    if (pending === undefined) return;
    try {
      await syncAll(pending.first, this.#engine);
      await syncAll(pending.afterFirst(), this.#engine);
    } catch (error) {
      pending.failed(error);
      throw error;
    }
    pending.done();
  }

  /** Runs `action` when no flush is under way; those that come meanwhile begin when it has ended. */
  async exclusive<T>(action: () => T | Promise<T>): Promise<T> {
    for (let busy = this.#busy; busy !== undefined; busy = this.#busy) await Promise.allSettled([busy]);
    const section = (async () => action())();
    this.#section = section;
    try {
      return await section;
    } finally {
      this.#section = undefined;
    }
  }
}
