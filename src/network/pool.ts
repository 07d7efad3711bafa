import type { Logger } from "../lib/log.ts";

export interface PoolOptions {
  /** Idle entries to hold ready, at least. */
  readonly lowWatermark: number;
  /** Idle entries to hold at most. */
  readonly highWatermark: number;
  /** Fills up and drains in the background; off: only what is released is kept, up to the high watermark. */
  readonly maintenance?: boolean;
  /** Fill to the low watermark at start. */
  readonly prewarm?: boolean;
  /** Entries made at once. Default 1: those who wait for an entry of their own come first. */
  readonly concurrency?: number;
  /** A target that has not been needed for so long is halved, down to the low watermark. Default 10 min. */
  readonly shrinkAfterMs?: number;
}

const DEFAULT_SHRINK_AFTER_MS = 600_000;
const FIRST_PAUSE_MS = 1000;
const LAST_PAUSE_MS = 60_000;

/**
 * Keeps entries that are costly to make ready for use. The number to hold starts at the low watermark and
 * doubles, up to the high one, whenever a take finds nothing or leaves fewer than the low watermark; after a
 * calm time it is halved again.
 */
export class WarmPool<T> implements AsyncDisposable {
  readonly #idle: T[] = [];
  readonly #create: () => Promise<T>;
  readonly #destroy: (entry: T) => Promise<void>;
  readonly #low: number;
  readonly #high: number;
  readonly #maintenance: boolean;
  readonly #shrinkAfterMs: number;
  readonly #concurrency: number;
  readonly #log: Logger;
  #target: number;
  /** More idle ones than this are removed: the high watermark, or after a calm time the target. */
  #ceiling: number;
  #neededAt = performance.now();
  #working: Promise<void> | undefined;
  #pauseMs = 0;
  #timer: Timer | undefined;
  #shrinkTimer: Timer | undefined;
  #closed = false;

  constructor(
    options: PoolOptions,
    create: () => Promise<T>,
    destroy: (entry: T) => Promise<void>,
    log: Logger,
  ) {
    this.#low = options.lowWatermark;
    this.#high = options.highWatermark;
    this.#maintenance = options.maintenance ?? true;
    this.#shrinkAfterMs = options.shrinkAfterMs ?? DEFAULT_SHRINK_AFTER_MS;
    this.#concurrency = options.concurrency ?? 1;
    this.#create = create;
    this.#destroy = destroy;
    this.#log = log;
    this.#target = options.lowWatermark;
    this.#ceiling = options.highWatermark;
    if (!this.#maintenance) return;
    this.#shrinkTimer = setInterval(() => this.#shrink(), Math.max(this.#shrinkAfterMs / 4, 10));
    this.#shrinkTimer.unref();
    if (options.prewarm ?? true) this.#maintain();
  }

  get idle(): number {
    return this.#idle.length;
  }

  get target(): number {
    return this.#target;
  }

  /** The last attempt to fill or drain failed; the next one is some time away, or runs. */
  get failing(): boolean {
    return this.#pauseMs > 0;
  }

  /** An entry that is ready, if any; the caller makes one itself otherwise. */
  take(): T | undefined {
    const entry = this.#idle.shift();
    if (entry === undefined || this.#idle.length < this.#low) {
      this.#target = Math.min(this.#high, 2 * Math.max(this.#target, this.#low, 1));
      this.#ceiling = this.#high;
      this.#neededAt = performance.now();
    }
    this.#maintain();
    return entry;
  }

  /** False: not wanted, the caller removes it. */
  put(entry: T): boolean {
    if (this.#closed || (!this.#maintenance && this.#idle.length >= this.#high)) return false;
    this.#idle.push(entry);
    this.#maintain();
    return true;
  }

  /** Removes all idle entries, also those in the making. Every one is tried; errors come together. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#closed = true;
    clearTimeout(this.#timer);
    clearInterval(this.#shrinkTimer);
    await this.#working;
    const results = await Promise.allSettled(this.#idle.splice(0).map(this.#destroy));
    const errors = results.flatMap((result) => (result.status === "rejected" ? [result.reason] : []));
    if (errors.length > 0) throw new AggregateError(errors, "idle pool entries could not be removed");
  }

  #shrink(): void {
    if (performance.now() - this.#neededAt < this.#shrinkAfterMs) return;
    this.#target = Math.max(this.#low, Math.floor(this.#target / 2));
    this.#ceiling = this.#target;
    this.#neededAt = performance.now();
    this.#maintain();
  }

  #maintain(): void {
    if (!this.#maintenance || this.#closed || this.#working !== undefined || this.#timer !== undefined)
      return;
    if (this.#idle.length >= this.#target && this.#idle.length <= this.#ceiling) return;
    this.#working = this.#work().finally(() => {
      this.#working = undefined;
      if (this.#closed) return;
      if (this.#pauseMs === 0) this.#maintain();
      else {
        this.#timer = setTimeout(() => {
          this.#timer = undefined;
          this.#maintain();
        }, this.#pauseMs);
        this.#timer.unref();
      }
    });
  }

  async #work(): Promise<void> {
    try {
      while (!this.#closed && this.#idle.length < this.#target) await this.#fill();
      while (!this.#closed && this.#idle.length > this.#ceiling) await this.#destroy(this.#idle.pop()!);
      this.#pauseMs = 0;
    } catch (error) {
      this.#pauseMs = Math.min(Math.max(2 * this.#pauseMs, FIRST_PAUSE_MS), LAST_PAUSE_MS);
      this.#log.warn({ err: error, retryInMs: this.#pauseMs }, "filling a warm pool failed");
    }
  }

  /** One batch; fails, when it is through, with the first failure in it. */
  async #fill(): Promise<void> {
    const size = Math.min(this.#concurrency, this.#target - this.#idle.length);
    const results = await Promise.allSettled(Array.from({ length: size }, () => this.#create()));
    for (const result of results) if (result.status === "fulfilled") this.#idle.push(result.value);
    const failed = results.find((result) => result.status === "rejected");
    if (failed !== undefined) throw failed.reason;
  }
}
