import type { ProgressEvent, ProgressSink } from "../lib/progress.ts";

interface Entry<T> {
  readonly promise: Promise<T>;
  readonly controller: AbortController;
  readonly sinks: Set<ProgressSink>;
  waiters: number;
}

/**
 * Work that several callers may want at once, done once per key. Each caller has its own signal and progress
 * sink; the work itself is aborted when the last caller has left, and that caller waits for its clean-up.
 */
export class SharedWork<T> implements AsyncDisposable {
  readonly #entries = new Map<string, Entry<T>>();
  readonly #running = new Set<Promise<unknown>>();

  /**
   * Joins the work of that key or starts it. When work that another caller started fails for a reason of
   * that caller's own (`isOwnReason`: its login, its leaving), this caller does it itself.
   */
  async run(
    key: string,
    caller: { readonly signal: AbortSignal; readonly progress?: ProgressSink },
    work: (signal: AbortSignal, progress: ProgressSink) => Promise<T>,
    isOwnReason: (error: unknown) => boolean = () => false,
  ): Promise<T> {
    for (;;) {
      let started = false;
      try {
        return await this.#join(key, caller, (signal, progress) => {
          started = true;
          return work(signal, progress);
        });
      } catch (error) {
        if (started || caller.signal.aborted || !isOwnReason(error)) throw error;
      }
    }
  }

  async #join(
    key: string,
    caller: { readonly signal: AbortSignal; readonly progress?: ProgressSink },
    work: (signal: AbortSignal, progress: ProgressSink) => Promise<T>,
  ): Promise<T> {
    const { signal, progress } = caller;
    signal.throwIfAborted();
    const entry = this.#entries.get(key) ?? this.#start(key, work);
    entry.waiters++;
    if (progress !== undefined) entry.sinks.add(progress);
    const left = Promise.withResolvers<never>();
    const leave = () => left.reject(signal.reason);
    signal.addEventListener("abort", leave, { once: true });
    try {
      return await Promise.race([entry.promise, left.promise]);
    } finally {
      signal.removeEventListener("abort", leave);
      if (progress !== undefined) entry.sinks.delete(progress);
      entry.waiters--;
      if (entry.waiters === 0 && this.#entries.get(key) === entry) {
        this.#entries.delete(key);
        entry.controller.abort(new Error("nobody waits for this any more"));
        await Promise.allSettled([entry.promise]);
      }
    }
  }

  #start(key: string, work: (signal: AbortSignal, progress: ProgressSink) => Promise<T>): Entry<T> {
    const controller = new AbortController();
    const sinks = new Set<ProgressSink>();
    const publish = (event: ProgressEvent) => {
      for (const sink of sinks) sink(event);
    };
    const promise = work(controller.signal, publish);
    const entry: Entry<T> = { promise, controller, sinks, waiters: 0 };
    this.#entries.set(key, entry);
    this.#running.add(promise);
    const settled = () => {
      this.#running.delete(promise);
      if (this.#entries.get(key) === entry) this.#entries.delete(key);
    };
    promise.then(settled, settled);
    return entry;
  }

  /** Aborts everything and waits for its clean-up. */
  async [Symbol.asyncDispose](): Promise<void> {
    for (const { controller } of this.#entries.values())
      controller.abort(new Error("the image service is closing"));
    await Promise.allSettled([...this.#running]);
  }
}
