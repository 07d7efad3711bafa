import { rm } from "node:fs/promises";
import { join } from "node:path";
import { Gate } from "../lib/gate.ts";
import type { ProgressSink } from "../lib/progress.ts";
import type { Descriptor } from "./manifest.ts";
import type { ImageSource } from "./source.ts";

/** Downloads at once, over all images. */
const PARALLEL_DOWNLOADS = 3;
const PROGRESS_INTERVAL_MS = 200;

/** Reports at most every 200 ms, and always the last state. */
export function throttled(
  progress: ProgressSink,
  event: { phase: string; item: string; totalBytes?: number },
) {
  let last = 0;
  return (doneBytes: number): void => {
    const now = performance.now();
    if (now - last < PROGRESS_INTERVAL_MS && doneBytes !== event.totalBytes) return;
    last = now;
    progress({ ...event, doneBytes });
  };
}

/** Download slots shared by everything a service does. Who asks is bounded elsewhere. */
export function createDownloadLimiter(): Gate {
  return new Gate(PARALLEL_DOWNLOADS, "downloads", Number.POSITIVE_INFINITY);
}

export type DownloadLimiter = Gate;

/**
 * The blobs one image needs, downloaded ahead into a staging directory while earlier layers are converted.
 * Disposal stops what is still running; the staging directory is the caller's.
 */
export class BlobPrefetch implements AsyncDisposable {
  readonly #controller = new AbortController();
  readonly #blobs = new Map<string, Promise<string>>();
  readonly #source: ImageSource;
  readonly #directory: string;
  readonly #limiter: DownloadLimiter;
  readonly #progress: ProgressSink;
  readonly #signal: AbortSignal;

  constructor(options: {
    readonly source: ImageSource;
    readonly directory: string;
    readonly limiter: DownloadLimiter;
    readonly progress: ProgressSink;
    readonly signal: AbortSignal;
  }) {
    this.#source = options.source;
    this.#directory = options.directory;
    this.#limiter = options.limiter;
    this.#progress = options.progress;
    this.#signal = AbortSignal.any([options.signal, this.#controller.signal]);
  }

  /** Starts (once) and gives the path of the verified blob. */
  get(descriptor: Descriptor): Promise<string> {
    const known = this.#blobs.get(descriptor.digest);
    if (known !== undefined) return known;
    const target = join(this.#directory, descriptor.digest.replace(":", "-"));
    const started = this.#limiter.run(async () => {
      const report = throttled(this.#progress, {
        phase: "download layer",
        item: descriptor.digest,
        totalBytes: descriptor.size,
      });
      await this.#source.blob(descriptor, target, this.#signal, report);
      return target;
    }, this.#signal);
    this.#blobs.set(descriptor.digest, started);
    // A failure belongs to whoever asks for the blob, which may be later than the failure.
    started.catch(() => undefined);
    return started;
  }

  /** The blob is not needed again. */
  async drop(descriptor: Descriptor): Promise<void> {
    const path = this.#blobs.get(descriptor.digest);
    if (path === undefined) return;
    this.#blobs.delete(descriptor.digest);
    await rm(await path, { force: true });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#controller.abort(new Error("the download is not needed any more"));
    await Promise.allSettled(this.#blobs.values());
  }
}
