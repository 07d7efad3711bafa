import type { Logger } from "../../lib/log.ts";
import type { LayerStack } from "../overlaybd/types.ts";

/** Copied per step: a guest's request never waits longer than this takes (about a millisecond). */
const STEP_BYTES = 512 << 10;
/** Between steps: at most about a tenth of the thread goes into compaction. */
const PAUSE_MS = 10;
/** The stack is asked whether there is something to do after so many bytes written. */
const LOOK_AFTER_BYTES = 4 << 20;
/** After a failure (a full disk, mostly). */
const RETRY_MS = 60_000;

export interface CompactionStats {
  readonly steps: number;
  readonly movedBytes: number;
}

/** Takes back space of a device's upper in the background, in steps between the guest's requests. */
export class Compaction implements Disposable {
  readonly #stack: LayerStack;
  readonly #flush: () => Promise<void>;
  readonly #log: Logger;
  #written = 0;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #running = false;
  #disposed = false;
  #steps = 0;
  #movedBytes = 0;

  constructor(stack: LayerStack, flush: () => Promise<void>, log: Logger) {
    this.#stack = stack;
    this.#flush = flush;
    this.#log = log;
  }

  /** The guest changed so many bytes. */
  noteChange(bytes: number): void {
    this.#written += bytes;
    if (this.#written < LOOK_AFTER_BYTES || this.#running) return;
    this.#written = 0;
    if (this.#stack.stats().compactionDue) this.#begin(PAUSE_MS);
  }

  stats(): CompactionStats {
    return { steps: this.#steps, movedBytes: this.#movedBytes };
  }

  #begin(delayMs: number): void {
    if (this.#disposed) return;
    this.#running = true;
    this.#timer = setTimeout(() => void this.#step(), delayMs);
  }

  async #step(): Promise<void> {
    try {
      const progress = this.#stack.compactStep(STEP_BYTES);
      this.#steps++;
      this.#movedBytes += progress.movedBytes;
      if (progress.flushNeeded) await this.#flush();
      this.#running = !progress.done;
      if (!progress.done) this.#begin(PAUSE_MS);
    } catch (error) {
      if (this.#disposed) return;
      this.#log.warn({ err: error }, `compaction stopped, next try in ${RETRY_MS / 1000} s`);
      this.#begin(RETRY_MS);
    }
  }

  [Symbol.dispose](): void {
    this.#disposed = true;
    clearTimeout(this.#timer);
  }
}
