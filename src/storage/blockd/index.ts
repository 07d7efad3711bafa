import { workerData } from "node:worker_threads";
import type { WorkerOptions } from "./worker-protocol.ts";

export { type BlockClientOptions, connectBlockd } from "./client.ts";
export { chooseExport, probeUblk, type UblkVerdict } from "./disk-export.ts";
export { exportLocally, type LocalExport } from "./local.ts";
export * from "./protocol.ts";
export { type StartingBlockd, type SupervisedBlockd, startBlockd, superviseBlockd } from "./supervisor.ts";

/** The program `agentenv blockd`, see USAGE in daemon.ts; does not return normally. */
export async function blockdMain(argv: string[]): Promise<number> {
  const { runDaemon } = await import("./daemon.ts");
  return runDaemon(argv);
}

/** Body of the daemon's worker threads. */
export async function workerMain(): Promise<void> {
  const [{ runWorker }, { openStack }] = await Promise.all([
    import("./worker.ts"),
    import("../overlaybd/index.ts"),
  ]);
  const { options } = workerData as { options: WorkerOptions };
  const indexCache = { directory: options.indexCacheDirectory };
  await runWorker((image) => openStack(image, { indexCache }), options);
}
