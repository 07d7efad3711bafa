import type { IoEngine } from "../io/index.ts";
import type { PendingFlush, SyncTarget } from "../overlaybd/types.ts";

/**
 * Flushes of one device: one at a time, off the thread, and however many ask while one is under way, one more
 * serves them all.
 */
export class Flusher {
  readonly #begin: () => PendingFlush | undefined;
  readonly #engine: IoEngine;
  #running: Promise<void> | undefined;
  #next: Promise<void> | undefined;

  /** `begin` as LayerStack.beginFlush; what it throws is the flush's failure. */
  constructor(begin: () => PendingFlush | undefined, engine: IoEngine) {
    this.#begin = begin;
    this.#engine = engine;
  }

  /** Everything written before the call is on stable storage when the promise resolves. */
  flush(): Promise<void> {
    if (this.#running === undefined) return this.#start();
    const start = () => {
      this.#next = undefined;
      // One that somebody else began in between began after this call, too.
      return this.#running ?? this.#start();
    };
    this.#next ??= this.#running.then(start, start);
    return this.#next;
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
      await this.#sync(pending.first);
      await this.#sync(pending.afterFirst());
    } catch (error) {
      pending.failed(error);
      throw error;
    }
    pending.done();
  }

  async #sync(targets: readonly SyncTarget[]): Promise<void> {
    await Promise.all(
      targets.map((target) =>
        target.fd === undefined ? target.datasync() : this.#engine.datasync(target.fd, target.name),
      ),
    );
  }

  /** Runs `action` at a moment when no flush is under way. */
  async exclusive<T>(action: () => T): Promise<T> {
    while (this.#running !== undefined) await Promise.allSettled([this.#next ?? this.#running]);
    return action();
  }
}
