import { type MessagePort, parentPort } from "node:worker_threads";
import { assert } from "../../lib/errors.ts";
import { createLogger, type Logger } from "../../lib/log.ts";
import { BufferPool } from "../export/nbd/index.ts";
import type { OverlaybdRoom } from "../overlaybd/types.ts";
import { type Device, openDevice } from "./device.ts";
import { toBlockdError } from "./errors.ts";
import type {
  WorkerRequest,
  WorkerRequestMessage,
  WorkerResponseMessage,
  WorkerResults,
} from "./worker-protocol.ts";

type Result = WorkerResults[keyof WorkerResults];

/**
 * The devices of one worker. Requests of the main thread run to their end between those of the guests:
 * both are turns of the same event loop and neither ever waits.
 */
class DeviceOwner implements Disposable {
  readonly #devices = new Map<string, Device>();
  readonly #pool = new BufferPool();
  readonly #openStack: OverlaybdRoom["openStack"];
  readonly #log: Logger;

  constructor(openStack: OverlaybdRoom["openStack"], log: Logger) {
    this.#openStack = openStack;
    this.#log = log;
  }

  handle(request: WorkerRequest): Result {
    switch (request.op) {
      case "open": {
        assert(!this.#devices.has(request.deviceId), `device ${request.deviceId} is open`);
        const device = openDevice(request, this.#openStack, this.#pool, this.#log);
        this.#devices.set(request.deviceId, device);
        return { virtualSizeBytes: device.virtualSizeBytes, image: device.image };
      }
      case "close": {
        const device = this.#device(request.deviceId);
        this.#devices.delete(request.deviceId);
        // Closed whatever the flush says; its failure is the caller's to know.
        try {
          if (request.flush) device.flush();
        } finally {
          device[Symbol.dispose]();
        }
        return null;
      }
      case "flush":
        this.#device(request.deviceId).flush();
        return null;
      case "restack":
        return this.#device(request.deviceId).restack(request.sealedPath, request.freshUpper);
      case "stats":
        return [...this.#devices.values()].map((device) => device.stats());
      case "exit":
        return null;
    }
  }

  #device(deviceId: string): Device {
    const device = this.#devices.get(deviceId);
    assert(device !== undefined, `device ${deviceId} is not open here`);
    return device;
  }

  [Symbol.dispose](): void {
    for (const device of this.#devices.values()) device[Symbol.dispose]();
    this.#devices.clear();
  }
}

/** Body of a worker thread: serves requests of the main thread until it is told to exit. */
export async function runWorker(openStack: OverlaybdRoom["openStack"]): Promise<void> {
  assert(parentPort !== null, "the block daemon's worker runs in a worker thread");
  const port: MessagePort = parentPort;
  const log = createLogger("blockd-worker");
  using owner = new DeviceOwner(openStack, log);
  await new Promise<void>((resolve) => {
    port.on("message", ({ id, request }: WorkerRequestMessage) => {
      let response: WorkerResponseMessage;
      try {
        response = { id, ok: true, result: owner.handle(request) };
      } catch (error) {
        response = { id, ok: false, error: toBlockdError(error) };
      }
      port.postMessage(response);
      if (request.op === "exit") resolve();
    });
  });
  port.close();
}
