import { existsSync } from "node:fs";
import { AenvError } from "../../lib/errors.ts";
import type { Logger } from "../../lib/log.ts";
import {
  type BufferPool,
  type NbdEvent,
  type NbdExtent,
  type NbdTarget,
  serveNbd,
} from "../export/nbd/index.ts";
import type { UblkExport, UblkServer } from "../export/ublk/index.ts";
import type { IoEngine } from "../io/index.ts";
import type {
  ImageConfig,
  LayerRef,
  LayerStack,
  OverlaybdRoom,
  RestackSteps,
  UpperRef,
} from "../overlaybd/types.ts";
import { alignedAccess } from "./aligned.ts";
import { Compaction } from "./compaction.ts";
import { DirectReader } from "./direct.ts";
import { Fetcher } from "./fetch.ts";
import { Flusher, syncAll } from "./flusher.ts";
import { DurationHistogram } from "./histogram.ts";
import type { BlockdStats, LowerSwap } from "./protocol.ts";
import type { OpenRequest } from "./worker-protocol.ts";

type DeviceStats = BlockdStats["devices"][number];

/**
 * One open device and its export, owned by the thread that opened it. Where the kernel does not let go of a ublk
 * device its disposal fails and may be tried again; until the device is stopped it is served as before.
 */
export interface Device extends AsyncDisposable {
  readonly deviceId: string;
  readonly virtualSizeBytes: number;
  /** What is under it now. */
  readonly image: ImageConfig;
  /** Where the kernel has it, for a device exported over ublk. */
  readonly ublk:
    | { readonly id: number; readonly devicePath: string; readonly recovered: boolean }
    | undefined;
  /** Its files are: nothing is left to flush. */
  readonly closed: boolean;
  /** No request is served from now on; those that a ublk device holds wait for the next server. */
  detach(): void;
  flush(): Promise<void>;
  restack(sealedPath: string, freshUpper: UpperRef): Promise<LayerRef>;
  /** Those before one that fails stay done. */
  swapLowers(swaps: readonly LowerSwap[]): Promise<void>;
  stats(): DeviceStats;
}

interface Counters {
  readOps: number;
  readBytes: number;
  /** Reads that had to wait for a disk. */
  lateReadOps: number;
  writeOps: number;
  writeBytes: number;
  trimOps: number;
  flushOps: number;
  errorOps: number;
}

/** What the devices of one thread share. */
export interface DeviceContext {
  readonly openStack: OverlaybdRoom["openStack"];
  readonly pool: BufferPool;
  /** The thread's server of ublk devices; throws `ublk_unusable` where the host has none. */
  readonly ublk: () => UblkServer;
  readonly ublkStamp: number;
  readonly engine: IoEngine;
  /** Memory that fetches read into and nobody looks at, see Fetcher. */
  readonly nowhere: Uint8Array;
  readonly log: Logger;
}

/** How much of the device one answer about its extents looks at. */
const EXTENT_WINDOW_BYTES = 64 << 20;

/** Logs at most one failure per second and says how many it left out: a guest may retry without end. */
function eventLogger(log: Logger): (event: NbdEvent) => void {
  let lastMs = Number.NEGATIVE_INFINITY;
  let suppressed = 0;
  return (event) => {
    const nowMs = performance.now();
    if (nowMs - lastMs < 1000) {
      suppressed++;
      return;
    }
    const more = suppressed === 0 ? {} : { suppressed };
    lastMs = nowMs;
    suppressed = 0;
    if (event.kind === "io_error") {
      const { operation, offsetBytes, error } = event;
      log.error({ operation, offsetBytes, err: error, ...more }, `${operation} failed, the guest was told`);
    } else {
      log.warn({ ...more }, `export: ${event.message}`);
    }
  };
}

function checkUpperExists(image: ImageConfig): void {
  const { upper } = image;
  if (upper === undefined || existsSync(upper.data)) return;
  throw new AenvError({
    code: "device_upper_missing",
    status: 409,
    message: `the device's writable layer ${upper.data} is gone`,
    remediation: "release the device; what was written to it is lost unless the file can be put back",
  });
}

/** Carries out a restack with its syncs on the engine. */
async function drive(steps: RestackSteps, engine: IoEngine): Promise<LayerRef> {
  let step = steps.next();
  while (step.done !== true) {
    try {
      await syncAll(step.value, engine);
    } catch (error) {
      step = steps.throw(error);
      continue;
    }
    step = steps.next();
  }
  return step.value;
}

function deviceTerminal(deviceId: string, cause: unknown): AenvError {
  return new AenvError({
    code: "device_terminal",
    message: `device ${deviceId} cannot be used any more: an earlier restack failed half-way`,
    remediation: "release the device and create it again",
    cause,
  });
}

/** Opens the stack and exports it. On error nothing stays open. */
export async function openDevice(request: OpenRequest, context: DeviceContext): Promise<Device> {
  const { deviceId, readOnly } = request;
  const { pool, engine } = context;
  const log = context.log.child({ deviceId });
  const { upper, ...withoutUpper } = request.image;
  if (request.upperMustExist && !readOnly) checkUpperExists(request.image);
  // Asked first: a host without it must not get an empty upper for nothing.
  const server = request.exportKind === "ublk" ? context.ublk() : undefined;
  const stack = context.openStack(
    readOnly || upper === undefined ? withoutUpper : { ...withoutUpper, upper },
  );
  const access = alignedAccess(stack);
  const fetcher = new Fetcher(access, stack.virtualSizeBytes, engine, context.nowhere);
  const direct = request.directIo === true ? new DirectReader(stack, engine) : undefined;
  const counters: Counters = {
    readOps: 0,
    readBytes: 0,
    lateReadOps: 0,
    writeOps: 0,
    writeBytes: 0,
    trimOps: 0,
    flushOps: 0,
    errorOps: 0,
  };
  const flushTimes = new DurationHistogram();
  const lateReadTimes = new DurationHistogram();
  let flushFailure: unknown;
  let terminal: unknown;
  let closed = false;
  let detached = false;

  const usable = () => {
    if (terminal !== undefined) throw deviceTerminal(deviceId, terminal);
    if (closed) throw new AenvError({ code: "device_closed", message: `device ${deviceId} was closed` });
  };

  const flusher = new Flusher(() => {
    usable();
    if (flushFailure === undefined) return stack.beginFlush();
    throw new AenvError({
      code: "device_flush_failed",
      message: `device ${deviceId} lost writes: an earlier flush failed`,
      remediation: "check the host's disk and log; the device can be released and created again",
      cause: flushFailure,
    });
  }, engine);

  const flush = async () => {
    usable();
    counters.flushOps++;
    const startedMs = performance.now();
    try {
      await flusher.flush();
    } catch (error) {
      // The kernel reports a failed write-back once and may then call the lost pages clean: a later
      // flush that succeeds would be a lie, so there is none until the device is opened again.
      flushFailure ??= error;
      throw error;
    }
    flushTimes.add(performance.now() - startedMs);
  };
  const compaction = new Compaction(stack, flush, log);

  const write = (offsetBytes: number, source: Uint8Array) => {
    usable();
    access.write(offsetBytes, source);
    counters.writeOps++;
    counters.writeBytes += source.length;
    compaction.noteChange(source.length);
  };

  const target: NbdTarget = {
    exportName: deviceId,
    sizeBytes: stack.virtualSizeBytes,
    readOnly,
    tryRead(offsetBytes, into) {
      usable();
      // Looking into the page cache would fill it.
      if (direct?.wants(offsetBytes, into.length) === true) return false;
      if (!access.tryRead(offsetBytes, into)) return false;
      fetcher.noteRead(offsetBytes, into.length);
      counters.readOps++;
      counters.readBytes += into.length;
      return true;
    },
    async read(offsetBytes, into) {
      const startedMs = performance.now();
      if ((await direct?.read(offsetBytes, into)) !== true) await fetcher.read(offsetBytes, into, usable);
      lateReadTimes.add(performance.now() - startedMs);
      counters.readOps++;
      counters.lateReadOps++;
      counters.readBytes += into.length;
    },
    write,
    trim(offsetBytes, lengthBytes) {
      usable();
      access.discard(offsetBytes, lengthBytes);
      counters.trimOps++;
      compaction.noteChange(lengthBytes);
    },
    writeZeroes(offsetBytes, lengthBytes) {
      usable();
      for (const edge of access.discard(offsetBytes, lengthBytes)) {
        write(edge.offsetBytes, new Uint8Array(edge.lengthBytes));
      }
      counters.trimOps++;
      compaction.noteChange(lengthBytes);
    },
    flush,
    extents(offsetBytes, lengthBytes, limit) {
      usable();
      return describeExtents(stack, offsetBytes, Math.min(lengthBytes, EXTENT_WINDOW_BYTES), limit);
    },
  };

  const logEvent = eventLogger(log);
  const onEvent = (event: NbdEvent) => {
    if (event.kind === "io_error") counters.errorOps++;
    logEvent(event);
  };
  let nbd: ReturnType<typeof serveNbd> | undefined;
  let ublk: UblkExport | undefined;
  try {
    if (server === undefined) {
      nbd = serveNbd({ socketPath: request.socketPath, target, pool, onEvent });
    } else {
      const previous = request.ublkId === undefined ? undefined : { id: request.ublkId };
      ublk = await server.export({ target, stamp: context.ublkStamp, previous, onEvent });
    }
  } catch (error) {
    stack[Symbol.dispose]();
    throw error;
  }

  const closeFiles = async () => {
    if (closed) return;
    compaction[Symbol.dispose]();
    await direct?.[Symbol.asyncDispose]();
    await flusher.exclusive(() => {
      closed = true;
      stack[Symbol.dispose]();
    });
  };

  for (const warning of stack.stats().warnings) log.warn(warning);
  return {
    deviceId,
    virtualSizeBytes: stack.virtualSizeBytes,
    get image() {
      return stack.image;
    },
    ublk:
      ublk === undefined
        ? undefined
        : { id: ublk.id, devicePath: ublk.devicePath, recovered: ublk.recovered },
    get closed() {
      return closed;
    },
    detach() {
      nbd?.[Symbol.dispose]();
      ublk?.detach();
      detached = true;
    },
    flush,
    async restack(sealedPath, freshUpper) {
      // What the sealed layer promises is durable, so a device that lost writes must not make one. The guest's
      // reads and writes go on during what follows; its flushes wait.
      await flush();
      return flusher.exclusive(async () => {
        usable();
        try {
          return await drive(stack.restackSteps(sealedPath, freshUpper), engine);
        } catch (error) {
          if (error instanceof AenvError && error.code === "restack_terminal") terminal = error;
          throw error;
        }
      });
    },
    swapLowers: (swaps) =>
      flusher.exclusive(() => {
        usable();
        try {
          for (const swap of swaps) stack.swapLowers(swap);
        } finally {
          direct?.dropFiles();
        }
      }),
    stats() {
      const { upperDataBytes, upperLiveBytes, lowerCount } = stack.stats();
      return {
        deviceId,
        ...counters,
        connections: nbd?.connections ?? 1,
        upperDataBytes,
        upperLiveBytes,
        lowerCount,
        compactedBytes: compaction.stats().movedBytes,
        flushSeconds: flushTimes.snapshot(),
        lateReadSeconds: lateReadTimes.snapshot(),
      };
    },
    async [Symbol.asyncDispose]() {
      nbd?.[Symbol.dispose]();
      try {
        if (!detached) await ublk?.remove();
      } finally {
        // The kernel flushes what it holds before it lets go, so the stack has to be there until then, also where
        // that takes longer than anyone waits for it.
        if (ublk?.serving !== true) await closeFiles();
      }
    },
  };
}

/** What the range from `offsetBytes` on is made of, for NbdTarget.extents. */
function describeExtents(
  stack: LayerStack,
  offsetBytes: number,
  lengthBytes: number,
  limit: number,
): NbdExtent[] {
  const end = offsetBytes + lengthBytes;
  const extents: { lengthBytes: number; kind: NbdExtent["kind"] }[] = [];
  let at = offsetBytes;
  const add = (to: number, kind: NbdExtent["kind"]) => {
    const last = extents.at(-1);
    if (to <= at) return;
    if (last?.kind === kind) last.lengthBytes += to - at;
    else extents.push({ lengthBytes: to - at, kind });
    at = to;
  };
  for (const extent of stack.mappedExtents("all", offsetBytes, end)) {
    if (extents.length > limit) break;
    if (extent.zeroed) continue;
    add(Math.min(end, extent.offsetBytes), "hole");
    add(Math.min(end, extent.offsetBytes + extent.lengthBytes), "data");
  }
  add(end, "hole");
  return extents.slice(0, limit);
}
