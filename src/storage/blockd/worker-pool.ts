import { Worker } from "node:worker_threads";
import { AenvError } from "../../lib/errors.ts";
import { fromBlockdError } from "./errors.ts";
import type {
  WorkerOptions,
  WorkerRequest,
  WorkerRequestMessage,
  WorkerResponseMessage,
  WorkerResults,
} from "./worker-protocol.ts";

/** Something that owns devices. */
export interface DeviceWorker {
  /** Devices assigned to it, opening ones included. */
  load: number;
  call<Op extends keyof WorkerResults>(
    request: Extract<WorkerRequest, { op: Op }>,
  ): Promise<WorkerResults[Op]>;
}

/** What one of several workers has of a whole number that is for all of them: the shares add up to it. */
export function shareOf(total: number, workers: number, index: number): number {
  return Math.floor(total / workers) + (index < total % workers ? 1 : 0);
}

/** The daemon's view of one worker thread. */
export class WorkerHandle implements DeviceWorker {
  readonly #worker: Worker;
  readonly #pending = new Map<
    number,
    { resolve: (value: never) => void; reject: (error: unknown) => void }
  >();
  readonly exited: Promise<number>;
  #nextId = 0;
  #dead: AenvError | undefined;
  load = 0;

  constructor(options: WorkerOptions, onDeath: (error: Error) => void) {
    this.#worker = new Worker(Bun.main, { workerData: { role: "blockd-worker", options } });
    let failure: unknown;
    this.#worker.on("message", (message: WorkerResponseMessage) => {
      const waiting = this.#pending.get(message.id);
      this.#pending.delete(message.id);
      if (message.ok) waiting?.resolve(message.result as never);
      else waiting?.reject(fromBlockdError(message.error));
    });
    this.#worker.on("error", (error) => {
      failure = error;
    });
    this.exited = new Promise((resolve) => {
      this.#worker.on("exit", (code) => {
        this.#dead = new AenvError({
          code: "blockd_worker_died",
          message: `a worker of the block daemon ended with code ${code}`,
          cause: failure,
        });
        for (const waiting of this.#pending.values()) waiting.reject(this.#dead);
        this.#pending.clear();
        resolve(code);
        onDeath(this.#dead);
      });
    });
  }

  call<Op extends keyof WorkerResults>(
    request: Extract<WorkerRequest, { op: Op }>,
  ): Promise<WorkerResults[Op]> {
    if (this.#dead !== undefined) return Promise.reject(this.#dead);
    const id = this.#nextId++;
    return new Promise((resolve, reject) => {
      this.#pending.set(id, { resolve, reject });
      this.#worker.postMessage({ id, request } satisfies WorkerRequestMessage);
    });
  }
}
