/** Run by worker-pool.test.ts: a worker that dies of an uncaught error while a request waits for it. */
import { parentPort } from "node:worker_threads";
import { WorkerHandle } from "../worker-pool.ts";

if (Bun.isMainThread) {
  const deaths: string[] = [];
  const worker = new WorkerHandle(
    { blockCacheBytes: 0, warmLayers: 0, indexCacheDirectory: "/nonexistent", ublkStamp: 1 },
    (error) => deaths.push(error.message),
  );
  const outcome = (call: Promise<unknown>) =>
    call.then(
      () => "answered",
      (error: Error & { code?: string }) => error.code ?? error.message,
    );
  const waiting = outcome(worker.call<"stats">({ op: "stats" }));
  const code = await worker.exited;
  const afterwards = outcome(worker.call<"stats">({ op: "stats" }));
  console.log(JSON.stringify({ waiting: await waiting, afterwards: await afterwards, code, deaths }));
} else {
  parentPort?.on("message", () => {
    throw new Error("a bug in the worker");
  });
}
