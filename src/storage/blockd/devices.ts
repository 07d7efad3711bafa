import { existsSync, rmSync } from "node:fs";
import { join, resolve } from "node:path";
import { AenvError, assert } from "../../lib/errors.ts";
import type { Logger } from "../../lib/log.ts";
import type { ImageConfig, LayerRef, UpperRef } from "../overlaybd/types.ts";
import { fromBlockdError, toBlockdError } from "./errors.ts";
import { OperationTimes } from "./operations.ts";
import type { BlockdStats, DeviceInfo, DeviceSpec, LowerSwap, WorkerStats } from "./protocol.ts";
import type { DeviceRecord } from "./schema.ts";
import { type DeviceTable, fileStem } from "./table.ts";
import type { DeviceWorker } from "./worker-pool.ts";

interface Entry {
  record: DeviceRecord;
  /** The owner; absent when the device is not open. */
  worker: DeviceWorker | undefined;
  failure: string | undefined;
  /** ublk: where the device is in the host. */
  devicePath?: string;
}

interface Restack {
  readonly sealedPath: string;
  readonly freshUpper: UpperRef;
}

function invalid(code: string, message: string, status = 400, remediation?: string): AenvError {
  return new AenvError({ code, status, message, remediation });
}

/** Same value whatever the order of keys. */
function sameValue(a: unknown, b: unknown): boolean {
  return Bun.deepEquals(a, b);
}

function upperPaths(image: ImageConfig): string[] {
  const { upper } = image;
  if (upper === undefined) return [];
  return [upper.data, ...(upper.index === undefined ? [] : [upper.index])].map((path) => resolve(path));
}

/** The image after a restack that succeeded. */
function restackedImage(image: ImageConfig, layer: LayerRef, freshUpper: UpperRef): ImageConfig {
  return { ...image, lowers: [...image.lowers, layer], upper: freshUpper };
}

/**
 * Every device of the daemon: which worker owns it, what is on disk about it, and the order of what is
 * done to it. Calls for one device run one after the other, those for different devices side by side.
 */
export class Devices {
  readonly #entries = new Map<string, Entry>();
  /** Files of writable layers in use, with the device that uses them: two writers would destroy one. */
  readonly #uppers = new Map<string, string>();
  readonly #turns = new Map<string, Promise<unknown>>();
  readonly #operations = new OperationTimes();
  readonly #table: DeviceTable;
  readonly #workers: readonly DeviceWorker[];
  readonly #exportDir: string;
  readonly #maxUblkDevices: number;
  /** Devices that are being made and not in `#entries` yet. */
  readonly #creating = new Set<Entry>();
  readonly #log: Logger;

  constructor(
    table: DeviceTable,
    workers: readonly DeviceWorker[],
    exportDir: string,
    log: Logger,
    maxUblkDevices = Number.POSITIVE_INFINITY,
  ) {
    assert(workers.length > 0, "the block daemon has no workers");
    this.#table = table;
    this.#workers = workers;
    this.#exportDir = exportDir;
    this.#maxUblkDevices = maxUblkDevices;
    this.#log = log;
  }

  /** Opens everything in the table again. A device that cannot be opened stays listed with the reason. */
  async restore(): Promise<void> {
    const records = this.#table.load(this.#log);
    for (const record of records) {
      this.#entries.set(record.spec.deviceId, { record, worker: undefined, failure: "not opened yet" });
      if (!record.spec.readOnly) this.#claim(record.spec.deviceId, upperPaths(record.image));
    }
    await Promise.all(
      records.map(({ spec }) => this.#inTurn(spec.deviceId, () => this.#restoreOne(spec.deviceId))),
    );
    await this.#removeUblkOrphans();
  }

  /** A daemon that died between the kernel's device and the table's record leaves the device behind. */
  async #removeUblkOrphans(): Promise<void> {
    if (!existsSync("/dev/ublk-control")) return;
    const keep = [...this.#entries.values()].flatMap(({ record }) => record.ublkId ?? []);
    try {
      const { removed } = await this.#workers[0]!.call<"ublkOrphans">({ op: "ublkOrphans", keep });
      if (removed.length > 0) this.#log.warn({ removed }, "removed ublk devices that a daemon left behind");
    } catch (error) {
      // Without ublk there is nothing of ours, and a device that resists is not in anyone's way.
      this.#log.info({ err: error }, "ublk devices left behind cannot be looked for");
    }
  }

  async #restoreOne(deviceId: string): Promise<void> {
    const entry = this.#entries.get(deviceId);
    if (entry === undefined) return;
    try {
      await this.#reopen(entry);
      this.#log.info({ deviceId }, "device exported again");
    } catch (error) {
      this.#log.error({ deviceId, err: error }, "device could not be opened again");
    }
  }

  /** What was done to devices, how often and how long it took. */
  operations(): BlockdStats["operations"] {
    return this.#operations.snapshot();
  }

  create(spec: DeviceSpec): Promise<DeviceInfo> {
    const kind = spec.readOnly ? "create_raw_overlaybd" : "create_runtime_overlaybd";
    return this.#operations.time(kind, () => this.#create(spec));
  }

  async #create(spec: DeviceSpec): Promise<DeviceInfo> {
    const { deviceId } = spec;
    if (!spec.readOnly && spec.image.upper === undefined) {
      throw invalid("device_without_upper", `device ${deviceId} is writable but its image has no upper`);
    }
    if (spec.image.lowers.length === 0 && spec.image.virtualSizeBytes === undefined) {
      throw invalid("device_without_size", `device ${deviceId} has no lower layer and no virtualSizeBytes`);
    }
    return this.#inTurn(deviceId, async () => {
      const known = this.#entries.get(deviceId);
      if (known !== undefined) {
        const { record } = known;
        const asNow = { ...record.spec, image: record.image };
        if (!sameValue(spec, record.spec) && !sameValue(spec, asNow)) {
          throw invalid("device_exists", `device ${deviceId} exists with another spec`, 409);
        }
        if (known.failure !== undefined) await this.#reopen(known, true);
        return this.#info(known);
      }
      if (spec.exportKind === "ublk") this.#checkUblkRoom();
      const uppers = spec.readOnly ? [] : upperPaths(spec.image);
      this.#claim(deviceId, uppers);
      const entry: Entry = {
        record: { version: 1, spec, image: spec.image, virtualSizeBytes: 0 },
        worker: undefined,
        failure: undefined,
      };
      this.#creating.add(entry);
      try {
        const { lowers, upper } = await this.#open(entry, false);
        if (
          !spec.readOnly &&
          !sameValue({ lowers, upper }, { lowers: spec.image.lowers, upper: spec.image.upper })
        ) {
          // The caller's image is from before a restack that the files have behind them.
          const image = { ...spec.image, lowers, ...(upper === undefined ? {} : { upper }) };
          entry.record = { ...entry.record, image };
          this.#reclaim(deviceId, upperPaths(image));
        }
        await this.#table.save(entry.record);
      } catch (error) {
        await this.#abandon(entry);
        throw error;
      } finally {
        this.#creating.delete(entry);
      }
      this.#entries.set(deviceId, entry);
      return this.#info(entry);
    });
  }

  /** The kernel has a limit of its own, which it tells late and in several ways. */
  #checkUblkRoom(): void {
    const open = [...this.#entries.values(), ...this.#creating].filter(
      ({ record }) => record.spec.exportKind === "ublk",
    ).length;
    if (open < this.#maxUblkDevices) return;
    throw invalid(
      "ublk_capacity",
      `this node serves ${open} ublk devices, which is its limit`,
      507,
      "end or pause sandboxes on this node, or raise ublk.max_devices",
    );
  }

  get(deviceId: string): Promise<DeviceInfo | null> {
    return this.#inTurn(deviceId, async () => {
      const entry = this.#entries.get(deviceId);
      return entry === undefined ? null : this.#info(entry);
    });
  }

  /** In order of ids, those after `after`. */
  list(after = ""): DeviceInfo[] {
    const ids = [...this.#entries.keys()].filter((id) => id > after).sort();
    return ids.map((id) => this.#info(this.#entries.get(id)!));
  }

  release(deviceId: string): Promise<void> {
    return this.#operations.time("release", () =>
      this.#inTurn(deviceId, () => this.#release(deviceId, false)),
    );
  }

  async #release(deviceId: string, flush: boolean): Promise<void> {
    const entry = this.#entries.get(deviceId);
    if (entry === undefined) return;
    const { ublkId } = entry.record;
    const open = entry.worker !== undefined;
    let lost: unknown;
    try {
      await this.#close(entry, flush).catch((error: unknown) => {
        if (entry.worker !== undefined) throw error;
        lost = error;
      });
      // One that could not be opened again still is in the kernel, with the I/O that waits in it.
      if (!open && ublkId !== undefined) await this.#removeUblk(deviceId, ublkId);
      await this.#table.remove(deviceId);
    } catch (error) {
      // The kernel may write to its files still: they stay claimed, and the next call goes on here.
      entry.failure = `it could not be released: ${toBlockdError(error).message}`;
      throw error;
    }
    this.#entries.delete(deviceId);
    this.#reclaim(deviceId, []);
    if (lost !== undefined) throw lost;
  }

  async #removeUblk(deviceId: string, ublkId: number): Promise<void> {
    try {
      await this.#workers[0]!.call<"ublkRemove">({ op: "ublkRemove", ublkId });
    } catch (error) {
      if (!(error instanceof AenvError && error.code === "ublk_unusable")) throw error;
      // Without ublk there is no device. One that only we cannot reach is removed by the next daemon that can.
      this.#log.warn({ deviceId, ublkId, err: error }, "a ublk device was not looked for");
    }
  }

  flush(deviceId: string): Promise<void> {
    return this.#inTurn(deviceId, async () => {
      const { worker } = this.#usable(deviceId);
      await worker.call<"flush">({ op: "flush", deviceId });
    });
  }

  restack(deviceId: string, restack: Restack): Promise<LayerRef> {
    return this.#operations.time("restack_snapshot", () => this.#restack(deviceId, restack));
  }

  #restack(deviceId: string, restack: Restack): Promise<LayerRef> {
    return this.#inTurn(deviceId, async () => {
      const { entry, worker } = this.#usable(deviceId);
      const { restacked, spec } = entry.record;
      if (restacked !== undefined) {
        const { layer, ...done } = restacked;
        if (sameValue(done, restack)) return layer;
      }
      if (spec.readOnly) throw invalid("device_read_only", `device ${deviceId} is read-only`);
      const old = upperPaths(entry.record.image);
      const fresh = upperPaths({ lowers: [], upper: restack.freshUpper });
      // After a crash the existence of the sealed file tells that the restack happened: it must not be
      // there before.
      for (const path of [restack.sealedPath, ...fresh.filter((file) => !old.includes(file))]) {
        if (existsSync(path)) throw invalid("restack_target_exists", `${path} exists already`, 409);
      }
      this.#claim(deviceId, fresh);
      try {
        await this.#save(entry, { ...entry.record, restacking: restack });
        const layer = await worker.call<"restack">({ op: "restack", deviceId, ...restack });
        const { restacking: _, ...rest } = entry.record;
        const image = restackedImage(rest.image, layer, restack.freshUpper);
        entry.record = { ...rest, image, restacked: { ...restack, layer } };
        this.#reclaim(deviceId, upperPaths(image));
        await this.#table.save(entry.record);
        return layer;
      } catch (error) {
        if (entry.record.restacked?.sealedPath === restack.sealedPath) throw error;
        if (toBlockdError(error).kind === "terminal") {
          entry.failure = toBlockdError(error).message;
          throw error;
        }
        this.#reclaim(deviceId, old);
        await this.#forgetRestack(entry);
        throw error;
      }
    });
  }

  swapLowers(deviceId: string, swaps: readonly LowerSwap[]): Promise<void> {
    return this.#inTurn(deviceId, async () => {
      const { entry, worker } = this.#usable(deviceId);
      const last = swaps.at(-1)?.merged.file;
      if (last === undefined) return;
      // Asked again because the answer got lost, or the record could not be written: a layer is made once, so it
      // is there or not.
      if (entry.record.image.lowers.some(({ file }) => file === last)) {
        await this.#table.save(entry.record);
        return;
      }
      const { image, failure } = await worker.call<"swapLowers">({ op: "swapLowers", deviceId, swaps });
      // Whether or not it can be written: this is what the device has now, and what the next swap counts in.
      entry.record = { ...entry.record, image: { ...entry.record.image, lowers: image.lowers } };
      await this.#table.save(entry.record);
      if (failure !== undefined) throw fromBlockdError(failure);
    });
  }

  /** The stack is as before; a record that cannot be written now is replaced by the next change. */
  async #forgetRestack(entry: Entry): Promise<void> {
    const { restacking: _, ...rest } = entry.record;
    entry.record = rest;
    try {
      await this.#table.save(rest);
    } catch (error) {
      this.#log.error({ deviceId: rest.spec.deviceId, err: error }, "device record could not be written");
    }
  }

  async stats(): Promise<{ devices: BlockdStats["devices"][number][]; workers: WorkerStats[] }> {
    const answers = await Promise.all(this.#workers.map((worker) => worker.call<"stats">({ op: "stats" })));
    return {
      devices: answers.flatMap(({ devices }) => devices).sort((a, b) => (a.deviceId < b.deviceId ? -1 : 1)),
      workers: answers.map(({ worker }) => worker),
    };
  }

  /**
   * Flushes and closes every device; with `forget` they leave the table as well, else the next daemon
   * exports them again. Returns what failed, by device.
   */
  async closeAll(forget: boolean): Promise<Map<string, unknown>> {
    const failures = new Map<string, unknown>();
    const closeOne = async (deviceId: string) => {
      try {
        if (forget) await this.#release(deviceId, true);
        else {
          const entry = this.#entries.get(deviceId);
          if (entry !== undefined) await this.#close(entry, true, true);
        }
      } catch (error) {
        failures.set(deviceId, error);
      }
    };
    await Promise.all([...this.#entries.keys()].map((id) => this.#inTurn(id, () => closeOne(id))));
    return failures;
  }

  // ---- one device -------------------------------------------------------------------------------

  #info({ record, failure, devicePath }: Entry): DeviceInfo {
    const { deviceId, readOnly, exportKind } = record.spec;
    const where =
      exportKind === "nbd"
        ? { socketPath: this.#socketPath(deviceId), exportName: deviceId }
        : { devicePath };
    return {
      deviceId,
      virtualSizeBytes: record.virtualSizeBytes,
      readOnly,
      exportKind,
      ...where,
      image: record.image,
      ...(failure === undefined ? {} : { failure }),
    };
  }

  /** The same for the same device in every daemon: its clients come back to it after a restart. */
  #socketPath(deviceId: string): string {
    return join(this.#exportDir, `${fileStem(deviceId)}.sock`);
  }

  #usable(deviceId: string): { entry: Entry; worker: DeviceWorker } {
    const entry = this.#entries.get(deviceId);
    if (entry === undefined) throw invalid("device_not_found", `there is no device ${deviceId}`, 404);
    if (entry.failure !== undefined || entry.worker === undefined) {
      throw invalid(
        "device_unavailable",
        `device ${deviceId} cannot be used: ${entry.failure ?? "not open"}`,
        409,
        "create it again with the same spec, or release it",
      );
    }
    return { entry, worker: entry.worker };
  }

  async #save(entry: Entry, record: DeviceRecord): Promise<void> {
    await this.#table.save(record);
    entry.record = record;
  }

  async #open(entry: Entry, upperMustExist: boolean): Promise<ImageConfig> {
    const { spec, image } = entry.record;
    const worker = this.#workers.reduce((least, other) => (other.load < least.load ? other : least));
    worker.load++;
    try {
      const opened = await worker.call<"open">({
        op: "open",
        deviceId: spec.deviceId,
        image,
        readOnly: spec.readOnly,
        exportKind: spec.exportKind,
        directIo: spec.directIo,
        socketPath: this.#socketPath(spec.deviceId),
        ublkId: entry.record.ublkId,
        upperMustExist,
      });
      entry.record = { ...entry.record, virtualSizeBytes: opened.virtualSizeBytes };
      if (opened.ublk !== undefined) {
        entry.record = { ...entry.record, ublkId: opened.ublk.id };
        entry.devicePath = opened.ublk.devicePath;
      }
      entry.worker = worker;
      entry.failure = undefined;
      return opened.image;
    } catch (error) {
      worker.load--;
      throw error;
    }
  }

  /**
   * `keep`: the next daemon goes on with it. After an error it is open still and keeps its worker, unless it was
   * the flush alone that failed.
   */
  async #close(entry: Entry, flush: boolean, keep = false): Promise<void> {
    const { worker } = entry;
    if (worker === undefined) return;
    const { deviceId } = entry.record.spec;
    const { flushFailure } = await worker.call<"close">({ op: "close", deviceId, flush, keep });
    entry.worker = undefined;
    worker.load--;
    if (flushFailure !== undefined) throw fromBlockdError(flushFailure);
  }

  /** Undoes an open whose creation failed afterwards; the first error is the one to report. */
  async #abandon(entry: Entry): Promise<void> {
    const { deviceId } = entry.record.spec;
    try {
      await this.#close(entry, false);
      await this.#table.remove(deviceId);
    } catch (error) {
      this.#log.error({ deviceId, err: error }, "device could not be closed after its creation failed");
    }
    if (entry.worker === undefined) {
      this.#reclaim(deviceId, []);
      return;
    }
    // It is listed, so that a release or the same creation tries again, and nobody else uses its files.
    entry.failure = "its creation failed, and it could not be closed";
    this.#entries.set(deviceId, entry);
  }

  /**
   * Opens a device of the table. Opening completes or undoes a restack that was cut off (see openStack): the
   * image it reports is the one there is now. `save`: whether or not that changed the record.
   */
  async #reopen(entry: Entry, save = false): Promise<void> {
    const { restacking, ...before } = entry.record;
    const { deviceId } = before.spec;
    try {
      await this.#close(entry, false);
      // The old upper has moved there, so it is not missed at its old place.
      const moved = restacking !== undefined && existsSync(restacking.sealedPath);
      const image = await this.#open(entry, !moved);
      const { virtualSizeBytes, ublkId } = entry.record;
      const rest = ublkId === undefined ? before : { ...before, ublkId };
      const layer = image.lowers.at(-1);
      if (restacking !== undefined && layer?.file === restacking.sealedPath) {
        const next = restackedImage(rest.image, layer, restacking.freshUpper);
        entry.record = { ...rest, virtualSizeBytes, image: next, restacked: { ...restacking, layer } };
        this.#reclaim(deviceId, upperPaths(next));
      } else if (moved) {
        await this.#close(entry, false);
        entry.record = { ...rest, restacking };
        throw new AenvError({
          code: "device_inconsistent",
          message: `a restack of device ${deviceId} was cut off and cannot be completed`,
          remediation: `look at ${restacking.sealedPath}: it holds what was written before`,
        });
      } else {
        entry.record = { ...rest, virtualSizeBytes };
        // They were not there when the restack was noted: what is there now is what it began.
        const used = upperPaths(rest.image);
        const begun = upperPaths({ lowers: [], upper: restacking?.freshUpper });
        for (const path of begun) if (!used.includes(path)) rmSync(path, { force: true });
      }
      if (save || restacking !== undefined || ublkId !== before.ublkId) await this.#table.save(entry.record);
    } catch (error) {
      entry.failure = toBlockdError(error).message;
      throw error;
    }
  }

  #claim(deviceId: string, paths: readonly string[]): void {
    for (const path of paths) {
      const owner = this.#uppers.get(path);
      if (owner !== undefined && owner !== deviceId) {
        throw invalid("upper_in_use", `${path} is the writable layer of device ${owner}`, 409);
      }
    }
    for (const path of paths) this.#uppers.set(path, deviceId);
  }

  /** The device uses exactly these from now on. */
  #reclaim(deviceId: string, paths: readonly string[]): void {
    for (const [path, owner] of this.#uppers) if (owner === deviceId) this.#uppers.delete(path);
    for (const path of paths) this.#uppers.set(path, deviceId);
  }

  async #inTurn<T>(deviceId: string, action: () => Promise<T>): Promise<T> {
    const before = this.#turns.get(deviceId) ?? Promise.resolve();
    const turn = before.then(action, action);
    this.#turns.set(deviceId, turn);
    try {
      return await turn;
    } finally {
      if (this.#turns.get(deviceId) === turn) this.#turns.delete(deviceId);
    }
  }
}
