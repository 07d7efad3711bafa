import type { Logger } from "./lib/log.ts";

/** What looks for files that nothing needs any more; each may be run at any time. */
export interface CollectionOptions {
  readonly intervalMs: number;
  /** Of the repository of templates and snapshots. */
  readonly layers: () => Promise<unknown>;
  /** Of the image cache. Absent: it is left alone. */
  readonly images?: () => Promise<unknown>;
  readonly log: Logger;
}

/**
 * Collects every `intervalMs`: what a deletion left because it was young still, or in use, goes later. One round at a
 * time; what fails is logged and tried again with the next. Disposal waits for the round that runs.
 */
export function startCollection({ intervalMs, layers, images, log }: CollectionOptions): AsyncDisposable {
  const attempt = async (what: string, work: () => Promise<unknown>): Promise<void> => {
    try {
      await work();
    } catch (error) {
      log.error({ err: error }, `collecting ${what} failed`);
    }
  };
  const round = async (): Promise<void> => {
    await attempt("unused layers", layers);
    if (images !== undefined) await attempt("images", images);
  };
  let running: Promise<void> | undefined;
  const timer = setInterval(() => {
    running ??= round().finally(() => {
      running = undefined;
    });
  }, intervalMs);
  return {
    async [Symbol.asyncDispose]() {
      clearInterval(timer);
      await running;
    },
  };
}
