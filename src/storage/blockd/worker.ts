import { type MessagePort, parentPort } from "node:worker_threads";
import { assert } from "../../lib/errors.ts";
import { createLogger } from "../../lib/log.ts";
import { BufferPool } from "../export/nbd/index.ts";
import { UblkServer } from "../export/ublk/index.ts";
import { openIoEngine } from "../io/index.ts";
import { threadLayers } from "../overlaybd/layer-pool.ts";
import type { OverlaybdRoom } from "../overlaybd/types.ts";
import { threadBlockCache } from "../overlaybd/zfile/block-cache.ts";
import { zfileStats } from "../overlaybd/zfile/reader.ts";
import { type Device, type DeviceContext, openDevice } from "./device.ts";
import { toBlockdError } from "./errors.ts";
import type { WorkerStats } from "./protocol.ts";
import type {
  WorkerOptions,
  WorkerRequest,
  WorkerRequestMessage,
  WorkerResponseMessage,
  WorkerResults,
} from "./worker-protocol.ts";

type Result = WorkerResults[keyof WorkerResults];

/** See DeviceContext.nowhere. */
const NOWHERE_BYTES = 256 << 10;

/** The devices of one thread. Whoever asks sees to it that requests for one device do not overlap. */
export class DeviceOwner implements AsyncDisposable {
  readonly #devices = new Map<string, Device>();
  /** Those that are to be closed and are not yet. */
  readonly #closing = new Map<string, Device>();
  readonly #context: DeviceContext;

  constructor(context: DeviceContext) {
    this.#context = context;
  }

  async handle(request: WorkerRequest): Promise<Result> {
    switch (request.op) {
      case "open": {
        const known = this.#devices.has(request.deviceId) || this.#closing.has(request.deviceId);
        assert(!known, `device ${request.deviceId} is open`);
        const device = await openDevice(request, this.#context);
        this.#devices.set(request.deviceId, device);
        return { virtualSizeBytes: device.virtualSizeBytes, image: device.image, ublk: device.ublk };
      }
      case "close": {
        const { deviceId } = request;
        const device = this.#closing.get(deviceId) ?? this.#device(deviceId);
        this.#devices.delete(deviceId);
        this.#closing.set(deviceId, device);
        if (request.keep) device.detach();
        // Closed whatever the flush says; its failure is the caller's to know.
        let failure: unknown;
        try {
          if (request.flush && !device.closed) await device.flush();
        } catch (error) {
          failure = error;
        }
        await device[Symbol.asyncDispose]();
        this.#closing.delete(deviceId);
        return { flushFailure: failure === undefined ? undefined : toBlockdError(failure) };
      }
      case "flush":
        await this.#device(request.deviceId).flush();
        return null;
      case "restack":
        return this.#device(request.deviceId).restack(request.sealedPath, request.freshUpper);
      case "swapLowers": {
        const device = this.#device(request.deviceId);
        try {
          await device.swapLowers(request.swaps);
        } catch (error) {
          return { image: device.image, failure: toBlockdError(error) };
        }
        return { image: device.image, failure: undefined };
      }
      case "stats":
        return {
          devices: [...this.#devices.values()].map((device) => device.stats()),
          worker: this.#stats(),
        };
      case "ublkOrphans": {
        const ublk = this.#context.ublk();
        return { removed: await ublk.removeOrphans(this.#context.ublkStamp, new Set(request.keep)) };
      }
      case "ublkRemove":
        await this.#context.ublk().discard(this.#context.ublkStamp, request.ublkId);
        return null;
      case "exit":
        return null;
    }
  }

  #stats(): WorkerStats {
    const { kind } = this.#context.engine;
    return {
      engine: kind,
      ...this.#context.engine.stats(),
      blockCache: threadBlockCache.stats(),
      layers: threadLayers.stats(),
      zfile: zfileStats(),
    };
  }

  #device(deviceId: string): Device {
    const device = this.#devices.get(deviceId);
    assert(device !== undefined, `device ${deviceId} is not open here`);
    return device;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const all = [...this.#devices.values(), ...this.#closing.values()];
    for (const device of all) await device[Symbol.asyncDispose]();
    this.#devices.clear();
    this.#closing.clear();
  }
}

/** Body of a worker thread: serves requests of the main thread until it is told to exit. */
export async function runWorker(
  openStack: OverlaybdRoom["openStack"],
  options: WorkerOptions,
): Promise<void> {
  assert(parentPort !== null, "the block daemon's worker runs in a worker thread");
  const port: MessagePort = parentPort;
  const log = createLogger("blockd-worker");
  threadBlockCache.setLimit(options.blockCacheBytes);
  threadLayers.setIdleLimit(options.warmLayers);
  await using engine = openIoEngine();
  if (engine.reason !== undefined)
    log.warn(`${engine.reason}: I/O goes through a thread pool, which is slower`);
  const pool = new BufferPool();
  // Made by the first device that needs it; it ends after the devices do.
  await using scope = new AsyncDisposableStack();
  let ublk: UblkServer | undefined;
  await using owner = new DeviceOwner({
    openStack,
    pool,
    ublk: () => {
      ublk ??= scope.use(UblkServer.open(pool));
      return ublk;
    },
    ublkStamp: options.ublkStamp,
    engine,
    nowhere: new Uint8Array(new ArrayBuffer(NOWHERE_BYTES)),
    log,
  });
  await new Promise<void>((resolve) => {
    port.on("message", async ({ id, request }: WorkerRequestMessage) => {
      let response: WorkerResponseMessage;
      try {
        response = { id, ok: true, result: await owner.handle(request) };
      } catch (error) {
        response = { id, ok: false, error: toBlockdError(error) };
      }
      port.postMessage(response);
      if (request.op === "exit") resolve();
    });
  });
  port.close();
}
