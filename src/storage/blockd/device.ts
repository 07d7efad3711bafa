import { closeSync, existsSync, fdatasyncSync, openSync } from "node:fs";
import { AenvError } from "../../lib/errors.ts";
import type { Logger } from "../../lib/log.ts";
import { type BufferPool, type NbdEvent, type NbdTarget, serveNbd } from "../export/nbd/index.ts";
import type { ImageConfig, LayerRef, LayerStack, OverlaybdRoom, UpperRef } from "../overlaybd/types.ts";
import type { BlockdStats } from "./protocol.ts";
import type { OpenRequest } from "./worker-protocol.ts";

type DeviceStats = BlockdStats["devices"][number];

/** One open device and its export, owned by the thread that opened it. All calls are synchronous. */
export interface Device extends Disposable {
  readonly deviceId: string;
  readonly virtualSizeBytes: number;
  /** What is under it now. */
  readonly image: ImageConfig;
  flush(): void;
  restack(sealedPath: string, freshUpper: UpperRef): LayerRef;
  stats(): DeviceStats;
}

const SECTOR_BYTES = 512;

interface Counters {
  readOps: number;
  readBytes: number;
  writeOps: number;
  writeBytes: number;
  flushOps: number;
}

/**
 * Serves a stack whatever the alignment of a request: the stack itself takes whole sectors. A write that
 * covers a sector in part reads the rest of it first; nothing can come between, the thread is ours.
 */
export function alignedAccess(stack: LayerStack) {
  return {
    read(offsetBytes: number, target: Uint8Array): void {
      const start = offsetBytes - (offsetBytes % SECTOR_BYTES);
      const end = Math.ceil((offsetBytes + target.length) / SECTOR_BYTES) * SECTOR_BYTES;
      if (start === offsetBytes && end === offsetBytes + target.length) {
        stack.read(offsetBytes, target);
        return;
      }
      const sectors = new Uint8Array(new ArrayBuffer(end - start));
      stack.read(start, sectors);
      target.set(sectors.subarray(offsetBytes - start, offsetBytes - start + target.length));
    },

    write(offsetBytes: number, source: Uint8Array): void {
      const start = offsetBytes - (offsetBytes % SECTOR_BYTES);
      const end = Math.ceil((offsetBytes + source.length) / SECTOR_BYTES) * SECTOR_BYTES;
      if (start === offsetBytes && end === offsetBytes + source.length) {
        stack.write(offsetBytes, source);
        return;
      }
      const sectors = new Uint8Array(new ArrayBuffer(end - start));
      stack.read(start, sectors.subarray(0, SECTOR_BYTES));
      if (end - start > SECTOR_BYTES) stack.read(end - SECTOR_BYTES, sectors.subarray(-SECTOR_BYTES));
      sectors.set(source, offsetBytes - start);
      stack.write(start, sectors);
    },

    /** Whole sectors inside the range are dropped; what is left of it at the edges is returned. */
    discard(offsetBytes: number, lengthBytes: number): { offsetBytes: number; lengthBytes: number }[] {
      const end = offsetBytes + lengthBytes;
      const innerStart = Math.ceil(offsetBytes / SECTOR_BYTES) * SECTOR_BYTES;
      const innerEnd = end - (end % SECTOR_BYTES);
      if (innerEnd <= innerStart) return [{ offsetBytes, lengthBytes }];
      stack.discard(innerStart, innerEnd - innerStart);
      return [
        { offsetBytes, lengthBytes: innerStart - offsetBytes },
        { offsetBytes: innerEnd, lengthBytes: end - innerEnd },
      ].filter((edge) => edge.lengthBytes > 0);
    },
  };
}

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
      log.warn({ ...more }, `nbd client: ${event.message}`);
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

/** Data before index: no mapping may be durable without what it points to. */
function syncUpper(upper: UpperRef): void {
  for (const path of [upper.data, upper.index]) {
    if (path === undefined) continue;
    const fd = openSync(path, "r");
    try {
      fdatasyncSync(fd);
    } finally {
      closeSync(fd);
    }
  }
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
export function openDevice(
  request: OpenRequest,
  openStack: OverlaybdRoom["openStack"],
  pool: BufferPool,
  log: Logger,
): Device {
  const { deviceId, readOnly } = request;
  const { upper, ...withoutUpper } = request.image;
  if (request.upperMustExist && !readOnly) checkUpperExists(request.image);
  const stack = openStack(readOnly || upper === undefined ? withoutUpper : { ...withoutUpper, upper });
  const access = alignedAccess(stack);
  const counters: Counters = { readOps: 0, readBytes: 0, writeOps: 0, writeBytes: 0, flushOps: 0 };
  /** Something was written since the last flush. */
  let dirty = false;
  /**
   * A daemon that was killed may have left writes of this device in the page cache, acknowledged and not
   * flushed. The guest's next flush speaks of those, too, and the stack does not know of them.
   */
  let inherited = !readOnly;
  let flushFailure: unknown;
  let terminal: unknown;

  const usable = () => {
    if (terminal !== undefined) throw deviceTerminal(deviceId, terminal);
  };

  const flush = () => {
    usable();
    counters.flushOps++;
    if (flushFailure !== undefined) {
      throw new AenvError({
        code: "device_flush_failed",
        message: `device ${deviceId} lost writes: an earlier flush failed`,
        remediation: "check the host's disk and log; the device can be released and created again",
        cause: flushFailure,
      });
    }
    if (!dirty && !inherited) return;
    try {
      if (inherited && stack.image.upper !== undefined) syncUpper(stack.image.upper);
      stack.flush();
    } catch (error) {
      // The kernel reports a failed write-back once and may then call the lost pages clean: a later
      // flush that succeeds would be a lie, so there is none until the device is opened again.
      flushFailure = error;
      throw error;
    }
    dirty = false;
    inherited = false;
  };

  const write = (offsetBytes: number, source: Uint8Array) => {
    usable();
    dirty = true;
    access.write(offsetBytes, source);
    counters.writeOps++;
    counters.writeBytes += source.length;
  };

  const target: NbdTarget = {
    exportName: deviceId,
    sizeBytes: stack.virtualSizeBytes,
    readOnly,
    read(offsetBytes, into) {
      usable();
      access.read(offsetBytes, into);
      counters.readOps++;
      counters.readBytes += into.length;
    },
    write,
    trim(offsetBytes, lengthBytes) {
      usable();
      dirty = true;
      access.discard(offsetBytes, lengthBytes);
    },
    writeZeroes(offsetBytes, lengthBytes) {
      usable();
      dirty = true;
      for (const edge of access.discard(offsetBytes, lengthBytes)) {
        write(edge.offsetBytes, new Uint8Array(edge.lengthBytes));
      }
    },
    flush,
  };

  let nbd: ReturnType<typeof serveNbd>;
  try {
    nbd = serveNbd({
      socketPath: request.socketPath,
      target,
      pool,
      onEvent: eventLogger(log.child({ deviceId })),
    });
  } catch (error) {
    stack[Symbol.dispose]();
    throw error;
  }

  for (const warning of stack.stats().warnings) log.warn({ deviceId }, warning);
  return {
    deviceId,
    virtualSizeBytes: stack.virtualSizeBytes,
    get image() {
      return stack.image;
    },
    flush,
    restack(sealedPath, freshUpper) {
      // What the sealed layer promises is durable, so a device that lost writes must not make one.
      flush();
      try {
        const layer = stack.restack(sealedPath, freshUpper);
        dirty = false;
        return layer;
      } catch (error) {
        if (error instanceof AenvError && error.code === "restack_terminal") terminal = error;
        throw error;
      }
    },
    stats() {
      const { upperDataBytes, upperLiveBytes, lowerCount } = stack.stats();
      const { connections } = nbd;
      return { deviceId, ...counters, connections, upperDataBytes, upperLiveBytes, lowerCount };
    },
    [Symbol.dispose]() {
      nbd[Symbol.dispose]();
      stack[Symbol.dispose]();
    },
  };
}
