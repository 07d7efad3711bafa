import { createHash } from "node:crypto";
import { closeSync, existsSync, openSync, readdirSync } from "node:fs";
import { release } from "node:os";
import { errnoName } from "../../../../ffi/errno.ts";
import {
  UBLK_COMMIT_AND_FETCH,
  UBLK_FETCH,
  UblkDescriptors,
  UblkRing,
  ublkCopyFrom,
  ublkCopyTo,
} from "../../../../ffi/ublk.ts";
import { AenvError, assert } from "../../../lib/errors.ts";
import { type BufferPool, nbdErrnoOf } from "../nbd/index.ts";
import type { ExportEvent, ExportTarget } from "../types.ts";
import {
  Control,
  DEV_INFO_BYTES,
  type DevInfo,
  decodeDevInfo,
  encodeDevInfo,
  encodeParams,
  Feature,
  type FeatureName,
  FUA,
  hasBit,
  maskOf,
  Op,
  PARAMS_BYTES,
  paramsSizeBytes,
  SECTOR_BYTES,
  State,
} from "./layout.ts";

const CONTROL_DEVICE = "/dev/ublk-control";
const CLASS_DIR = "/sys/class/ublk-char";
const RING_ENTRIES = 512;
const RING_RESULTS = 16_384;
const QUEUE_DEPTH = 64;
const MAX_IO_BYTES = 512 << 10;
/** Without these blockd could not be restarted under a running guest. */
const NEEDED: readonly FeatureName[] = ["userRecovery", "userRecoveryReissue", "ioctlEncode"];

/** Completion tags: bit 30 control commands; otherwise the device's slot above 12 bits of I/O tag. */
const CONTROL_BIT = 1 << 30;
const SLOT_SHIFT = 12;
const IO_TAG_MASK = (1 << SLOT_SHIFT) - 1;
const MAX_SLOTS = 1 << 16;

/** Results handled in one go before other work of the thread gets its turn. */
const ROUNDS_PER_TURN = 16;

/** Adding and asking are immediate in a kernel that works; starting reads the partition table through us. */
const QUICK_MS = 10_000;
const SLOW_MS = 30_000;
const POLL_MS = 10;
const NODE_WAIT_MS = 3_000;
const OWNER_GONE_MS = 10_000;

const ENODEV = -19;

/** Kernel's name of a device: what finds it again after this process is gone. */
export interface UblkIdentity {
  readonly id: number;
}

/** A number that marks the devices of one owner (its runtime directory) among all of the host, below 2^48. */
export function ublkStamp(owner: string): number {
  return createHash("sha256").update(owner).digest().readUIntBE(0, 6) || 1;
}

export interface UblkExportOptions {
  readonly target: ExportTarget;
  readonly stamp: number;
  /** The device this was before the last server ended; taken over where the kernel still has it. */
  readonly previous: UblkIdentity | undefined;
  readonly onEvent: (event: ExportEvent) => void;
}

export interface UblkExport {
  readonly id: number;
  /** `/dev/ublkbN`. */
  readonly devicePath: string;
  /** Whether an earlier server's device was taken over, with the I/O that waited in it. */
  readonly recovered: boolean;
  /**
   * Stops the device and removes it. Requests under way are answered first. Idempotent; one that failed may be
   * called again and goes on where it failed.
   */
  remove(): Promise<void>;
  /** Requests are answered: until it is detached, or stopped by `remove`. */
  readonly serving: boolean;
  /** Serves no further request and leaves the device to the next server: I/O waits for it. */
  detach(): void;
  /** Grows (or shrinks) a live device where the kernel can (6.16 and later). */
  resize(sizeBytes: number): Promise<void>;
}

function unsupported(message: string, remediation: string): AenvError {
  return new AenvError({ code: "ublk_unusable", status: 503, message, remediation });
}

function failed(what: string, result: number): AenvError {
  const name = errnoName(-result);
  return new AenvError({ code: `ublk_${name.toLowerCase()}`, message: `ublk: ${what}: ${name}` });
}

/** What ADD_DEV's failure means. The kernel has a limit of devices, which shows in several ways. */
function addFailure(result: number): AenvError {
  const name = errnoName(-result);
  if (name === "EPERM") {
    return unsupported(
      "this user may not add ublk devices (EPERM)",
      "run as root, or with CAP_SYS_ADMIN as the packaged service does, after agentenv setup --host",
    );
  }
  if (!["EACCES", "ENOSPC", "EUSERS", "EMFILE"].includes(name))
    return failed("a device cannot be added", result);
  return new AenvError({
    code: "ublk_capacity",
    status: 507,
    message: `the kernel takes no further ublk device (${name})`,
    remediation:
      "end sandboxes on this node, or raise the limit: ublks_max of module ublk_drv, while no device is in use",
  });
}

/** Where the kernel's ublk is met. */
export interface UblkHost {
  readonly controlDevice: string;
  /** A ring, or the name of the error that says why this host gives none. */
  openRing(): UblkCommands | string;
  /** A device's character device. */
  nodePath(id: number): string;
}

export type UblkCommands = Pick<UblkRing, "eventFd" | "control" | "io" | "submit" | "arm"> & Disposable;

const thisHost: UblkHost = {
  controlDevice: CONTROL_DEVICE,
  openRing: () => UblkRing.open(RING_ENTRIES, RING_RESULTS),
  nodePath: (id) => `/dev/ublkc${id}`,
};

interface Slot {
  deliver(ioTag: number, result: number): void;
}

/**
 * All ublk devices of one thread, served through one ring: control commands and requests alike. The commands
 * that wait for a device's own I/O (start, stop, delete) therefore never hold the thread that answers it.
 */
export class UblkServer implements AsyncDisposable {
  readonly ring: UblkCommands;
  readonly controlFd: number;
  readonly pool: BufferPool;
  readonly host: UblkHost;
  /** For requests that are answered at once, one at a time. */
  readonly staging = new Uint8Array(new ArrayBuffer(MAX_IO_BYTES));
  readonly #events: { read(): Promise<{ readonly done: boolean }>; cancel(): Promise<void> };
  readonly #slots: (Slot | undefined)[] = [];
  readonly #freeSlots: number[] = [];
  readonly #controls = new Map<number, { settle(result: number): void; payload: Uint8Array | null }>();
  #nextControl = 0;
  #features: Promise<number> | undefined;
  #scheduled = false;
  #pumping = false;
  #closed = false;

  private constructor(ring: UblkCommands, controlFd: number, pool: BufferPool, host: UblkHost) {
    this.ring = ring;
    this.host = host;
    this.controlFd = controlFd;
    this.pool = pool;
    this.#events = Bun.file(ring.eventFd).stream().getReader();
    void this.#watch();
  }

  /** Throws `ublk_unusable` with the reason and the cure where this host has no ublk. */
  static open(pool: BufferPool, host: UblkHost = thisHost): UblkServer {
    const { controlDevice } = host;
    if (!existsSync(controlDevice)) {
      throw unsupported(`there is no ${controlDevice}`, "modprobe ublk_drv (Linux 6.1 or later), as root");
    }
    let controlFd: number;
    try {
      controlFd = openSync(controlDevice, "r+");
    } catch (cause) {
      throw unsupported(
        `${controlDevice} cannot be opened (${cause instanceof Error ? cause.message : String(cause)})`,
        "run as root, or agentenv setup --host (as root), whose udev rule gives the server's group access",
      );
    }
    const ring = host.openRing();
    if (typeof ring === "string") {
      closeSync(controlFd);
      throw unsupported(
        `io_uring cannot be used (${ring})`,
        "sysctl -w kernel.io_uring_disabled=0; ublk needs Linux 6.1 or later",
      );
    }
    return new UblkServer(ring, controlFd, pool, host);
  }

  async #watch(): Promise<void> {
    for (;;) {
      const { done } = await this.#events.read();
      if (done || this.#closed) return;
      this.#pump();
    }
  }

  /** Hands over what was prepared, soon. */
  kick(): void {
    if (this.#scheduled || this.#pumping || this.#closed) return;
    this.#scheduled = true;
    queueMicrotask(() => {
      this.#scheduled = false;
      this.#pump();
    });
  }

  /** Hands over what was prepared, now. Not for use in a delivery. */
  handOver(): void {
    this.#pump();
  }

  #pump(): void {
    if (this.#closed || this.#pumping) return;
    this.#pumping = true;
    try {
      for (let round = 0; round < ROUNDS_PER_TURN; round++) {
        const taken = this.ring.submit(0, this.#deliver);
        if (taken === 0 && !this.ring.arm()) return;
      }
      setImmediate(() => this.#pump());
    } finally {
      this.#pumping = false;
    }
  }

  readonly #deliver = (tag: number, result: number): void => {
    if ((tag & CONTROL_BIT) === 0) {
      this.#slots[tag >>> SLOT_SHIFT]?.deliver(tag & IO_TAG_MASK, result);
      return;
    }
    const waiting = this.#controls.get(tag);
    this.#controls.delete(tag);
    waiting?.settle(result);
  };

  claimSlot(slot: Slot): number {
    const number = this.#freeSlots.pop() ?? this.#slots.length;
    assert(number < MAX_SLOTS, "too many ublk devices on one thread");
    this.#slots[number] = slot;
    return number;
  }

  freeSlot(number: number): void {
    this.#slots[number] = undefined;
    this.#freeSlots.push(number);
  }

  /**
   * One control command; resolves to the kernel's answer, 0 or `-errno`. A command without an answer in time
   * is an error (`ublk_timeout`); it cannot be taken back and may still be carried out.
   */
  async control(
    what: string,
    opcode: number,
    device: number,
    options: { readonly payload?: Uint8Array; readonly data?: number; readonly timeoutMs?: number } = {},
  ): Promise<number> {
    const { payload = null, data = 0, timeoutMs = QUICK_MS } = options;
    const tag = CONTROL_BIT | (this.#nextControl++ & (CONTROL_BIT - 1));
    const answer = new Promise<number>((settle) => {
      this.#controls.set(tag, { settle, payload });
      this.ring.control(this.controlFd, opcode, device, payload, data, tag);
    });
    this.kick();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<never>((_, reject) => {
      timer = setTimeout(() => {
        reject(
          new AenvError({
            code: "ublk_timeout",
            status: 503,
            message: `ublk: the kernel (Linux ${release()}) did not ${what} within ${timeoutMs / 1000} s`,
            remediation:
              'a kernel that hangs here needs a reboot or another version; disks go over NBD with ublk.export = "nbd"',
          }),
        );
      }, timeoutMs);
    });
    try {
      return await Promise.race([answer, late]);
    } finally {
      clearTimeout(timer);
    }
  }

  /** The kernel's feature mask. Throws `ublk_unusable` where one that we need is missing. */
  features(): Promise<number> {
    this.#features ??= (async () => {
      const payload = new Uint8Array(new ArrayBuffer(8));
      const result = await this.control("tell its features", Control.getFeatures, 0xffffffff, { payload });
      const cure = "use Linux 6.5 or later, or disks over NBD";
      if (result < 0) throw unsupported(`the kernel's ublk is too old (${errnoName(-result)})`, cure);
      const mask = Number(new DataView(payload.buffer).getBigUint64(0, true));
      const lacking = NEEDED.filter((name) => !hasBit(mask, Feature[name]));
      if (lacking.length > 0) throw unsupported(`the kernel's ublk lacks ${lacking.join(", ")}`, cure);
      return mask;
    })();
    return this.#features;
  }

  /** Undefined: there is no such device. */
  async info(id: number): Promise<DevInfo | undefined> {
    const payload = new Uint8Array(new ArrayBuffer(DEV_INFO_BYTES));
    const result = await this.control(`describe device ${id}`, Control.getDevInfo, id, { payload });
    if (result === ENODEV) return undefined;
    if (result < 0) throw failed(`device ${id} cannot be looked at`, result);
    return decodeDevInfo(payload);
  }

  /** Adds a device that is not started. */
  async add(stamp: number, id: number): Promise<DevInfo> {
    const offered = await this.features();
    const wanted: FeatureName[] = [...NEEDED];
    if (hasBit(offered, Feature.userCopy)) wanted.push("userCopy");
    const payload = encodeDevInfo({
      queueDepth: QUEUE_DEPTH,
      maxIoBytes: MAX_IO_BYTES,
      id,
      flags: maskOf(wanted),
      stamp,
    });
    const result = await this.control("add a device", Control.addDev, id < 0 ? 0xffffffff : id, { payload });
    if (result < 0) throw addFailure(result);
    const info = decodeDevInfo(payload);
    // A flag that the kernel does not know is dropped without a word.
    const dropped = wanted.filter((name) => !hasBit(info.flags, Feature[name]));
    if (dropped.length > 0) {
      await this.remove(info.id);
      throw unsupported(`the kernel gave a ublk device without ${dropped.join(", ")}`, "use disks over NBD");
    }
    return info;
  }

  /** Deletes a device that nobody serves. Its number may be in use until the last program closes it. */
  async remove(id: number): Promise<void> {
    let result = await this.control(`delete device ${id}`, Control.delDevAsync, id, { timeoutMs: SLOW_MS });
    // Before 6.9 there is only the one that waits for the last user.
    if (["EOPNOTSUPP", "ENOTSUP"].includes(errnoName(-result)))
      result = await this.control(`delete device ${id}`, Control.delDev, id, { timeoutMs: SLOW_MS });
    if (result < 0 && result !== ENODEV) throw failed(`device ${id} cannot be deleted`, result);
  }

  /** Kernel numbers of the devices of this owner, whatever their state. */
  async list(stamp: number): Promise<number[]> {
    if (!existsSync(CLASS_DIR)) return [];
    const ids = readdirSync(CLASS_DIR).flatMap((name) => /^ublkc(\d+)$/.exec(name)?.[1] ?? []);
    const own: number[] = [];
    for (const id of ids.map(Number)) {
      // Others' devices may be such as only their owner may look at.
      const info = await this.info(id).catch(() => undefined);
      if (info?.stamp === stamp) own.push(id);
    }
    return own.sort((a, b) => a - b);
  }

  /** Stops and deletes devices of this owner that are in no table: left by a server that died in between. */
  async removeOrphans(stamp: number, keep: ReadonlySet<number>): Promise<number[]> {
    const removed: number[] = [];
    for (const id of await this.list(stamp)) {
      if (keep.has(id)) continue;
      await this.#stopAndRemove(id);
      removed.push(id);
    }
    return removed;
  }

  /** Stops and deletes a device that nobody serves, if it is this owner's. */
  async discard(stamp: number, id: number): Promise<void> {
    if ((await this.info(id))?.stamp === stamp) await this.#stopAndRemove(id);
  }

  async #stopAndRemove(id: number): Promise<void> {
    await this.control(`stop device ${id}`, Control.stopDev, id, { timeoutMs: SLOW_MS });
    await this.remove(id);
  }

  async export(options: UblkExportOptions): Promise<UblkExport> {
    const { previous, stamp } = options;
    await this.features();
    const known = previous === undefined ? undefined : await this.info(previous.id);
    if (known !== undefined && known.stamp === stamp) {
      const device = await Device.recover(this, options, known);
      if (device !== undefined) return device;
    }
    return Device.create(this, options);
  }

  /** Requests that are not answered by now stay with their devices for the next server. */
  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    await this.#events.cancel();
    this.ring[Symbol.dispose]();
    closeSync(this.controlFd);
  }
}

/** Opens the node once it is there: where udev makes it, that may take a moment after the device exists. */
async function openNode(path: string): Promise<number> {
  const giveUpAt = performance.now() + NODE_WAIT_MS;
  for (;;) {
    try {
      return openSync(path, "r+");
    } catch (cause) {
      if (performance.now() > giveUpAt) {
        throw new AenvError({
          code: "ublk_node_missing",
          message: `ublk: ${path} cannot be opened`,
          remediation: "in a container, share the host's /dev; elsewhere look at the udev rules",
          cause,
        });
      }
    }
    await Bun.sleep(POLL_MS);
  }
}

/** `closed`: nothing of the device is open here; commands may still be in the kernel. */
type Phase = "serving" | "detached" | "closed";

class Device implements UblkExport, Slot {
  readonly id: number;
  readonly recovered: boolean;
  readonly #server: UblkServer;
  readonly #target: ExportTarget;
  readonly #onEvent: (event: ExportEvent) => void;
  readonly #charFd: number;
  readonly #slot: number;
  readonly #descriptors: UblkDescriptors;
  /** Without user copy: the kernel's copy of each tag's data. */
  readonly #buffers: Uint8Array | undefined;
  /** Tags whose command the kernel or we hold; the rest were given back when the device stopped. */
  #live = 0;
  #phase: Phase = "serving";
  #allBack: (() => void) | undefined;
  #removing: Promise<void> | undefined;

  private constructor(
    server: UblkServer,
    options: UblkExportOptions,
    info: DevInfo,
    charFd: number,
    recovered: boolean,
  ) {
    this.#server = server;
    this.#target = options.target;
    this.#onEvent = options.onEvent;
    this.id = info.id;
    this.recovered = recovered;
    this.#charFd = charFd;
    this.#buffers = hasBit(info.flags, Feature.userCopy)
      ? undefined
      : new Uint8Array(new ArrayBuffer(info.queueDepth * MAX_IO_BYTES));
    this.#slot = server.claimSlot(this);
    try {
      this.#descriptors = new UblkDescriptors(charFd, info.queueDepth);
    } catch (error) {
      server.freeSlot(this.#slot);
      throw error;
    }
  }

  get serving(): boolean {
    return this.#phase === "serving";
  }

  /** Opens the device and asks for its first requests. On error it is not open here. */
  static async #attach(
    server: UblkServer,
    options: UblkExportOptions,
    info: DevInfo,
    recovered: boolean,
  ): Promise<Device> {
    const charFd = await openNode(server.host.nodePath(info.id));
    let device: Device | undefined;
    try {
      device = new Device(server, options, info, charFd, recovered);
      for (let tag = 0; tag < info.queueDepth; tag++) {
        device.#command(UBLK_FETCH, tag, -1);
        device.#live++;
      }
      server.kick();
      return device;
    } catch (error) {
      if (device === undefined) closeSync(charFd);
      else device.#close();
      throw error;
    }
  }

  get devicePath(): string {
    return `/dev/ublkb${this.id}`;
  }

  static async create(server: UblkServer, options: UblkExportOptions): Promise<Device> {
    const { sizeBytes, readOnly } = options.target;
    assert(sizeBytes % SECTOR_BYTES === 0, `ublk: a device of ${sizeBytes} bytes`);
    const info = await server.add(options.stamp, -1);
    const { id } = info;
    let device: Device | undefined;
    try {
      const payload = encodeParams({ sizeBytes, readOnly, maxIoBytes: info.maxIoBytes });
      const set = await server.control(`set up device ${id}`, Control.setParams, id, { payload });
      if (set < 0) throw failed(`device ${id} cannot be set up`, set);
      device = await Device.#attach(server, options, info, false);
      const started = await server.control(`start device ${id}`, Control.startDev, id, {
        data: process.pid,
        timeoutMs: SLOW_MS,
      });
      if (started < 0) throw failed(`device ${id} cannot be started`, started);
      return device;
    } catch (error) {
      // The first error is the one to report; what is left is an orphan that the next start removes.
      const cleanup = device === undefined ? server.remove(id) : device.remove();
      await cleanup.catch((second: unknown) => {
        if (device !== undefined) device.#close();
        options.onEvent({
          kind: "protocol_error",
          message: `ublk device ${id} stays behind: ${second instanceof Error ? second.message : String(second)}`,
        });
      });
      throw error;
    }
  }

  /** Undefined: the device cannot be used any more and was deleted. */
  static async recover(
    server: UblkServer,
    options: UblkExportOptions,
    known: DevInfo,
  ): Promise<Device | undefined> {
    const { id } = known;
    const info = await quiesced(server, id);
    if (info === undefined) return undefined;
    const dropDevice = async () => {
      await server.discard(options.stamp, id);
      return undefined;
    };
    if (info.state !== State.quiesced) return dropDevice();
    const payload = new Uint8Array(new ArrayBuffer(PARAMS_BYTES));
    new DataView(payload.buffer).setUint32(0, PARAMS_BYTES, true);
    const got = await server.control(`describe device ${id}`, Control.getParams, id, { payload });
    if (got < 0) throw failed(`device ${id} cannot be looked at`, got);
    if (paramsSizeBytes(payload) !== options.target.sizeBytes) return dropDevice();

    // Refused while the last server's descriptor is not closed, which its end does a moment later.
    const giveUpAt = performance.now() + OWNER_GONE_MS;
    for (;;) {
      const begun = await server.control(`recover device ${id}`, Control.startUserRecovery, id);
      if (begun === 0) break;
      if (errnoName(-begun) !== "EBUSY" || performance.now() > giveUpAt)
        throw failed(`device ${id} cannot be taken over`, begun);
      await Bun.sleep(POLL_MS);
    }
    const device = await Device.#attach(server, options, info, true);
    try {
      const ended = await server.control(`recover device ${id}`, Control.endUserRecovery, id, {
        data: process.pid,
        timeoutMs: SLOW_MS,
      });
      if (ended < 0) throw failed(`device ${id} cannot be taken over`, ended);
      return device;
    } catch (error) {
      // The kernel takes no second server while it sees this one. It sees it for as long as it has commands of its
      // own, which nothing but a stop or the end of the ring takes back from it.
      device.#close();
      throw error;
    }
  }

  // ---- requests ---------------------------------------------------------------------------------

  #command(opcode: number, tag: number, result: number): void {
    const buffers = this.#buffers;
    const tagAndSlot = (this.#slot << SLOT_SHIFT) | tag;
    if (buffers === undefined) this.#server.ring.io(this.#charFd, opcode, tag, result, null, 0, tagAndSlot);
    else this.#server.ring.io(this.#charFd, opcode, tag, result, buffers, tag * MAX_IO_BYTES, tagAndSlot);
  }

  #answer(tag: number, result: number): void {
    if (this.#phase !== "serving") return;
    this.#command(UBLK_COMMIT_AND_FETCH, tag, result);
    this.#server.kick();
  }

  deliver(tag: number, result: number): void {
    if (result === 0) {
      if (this.#phase === "serving") this.#request(tag);
      return;
    }
    if (result !== ENODEV) {
      this.#onEvent({
        kind: "protocol_error",
        message: `ublk device ${this.id}: the kernel refused an I/O command (${errnoName(-result)})`,
      });
    }
    this.#live--;
    if (this.#live > 0) return;
    this.#allBack?.();
    if (this.#phase === "closed") this.#server.freeSlot(this.#slot);
  }

  #request(tag: number): void {
    const { words } = this.#descriptors;
    const at = tag * 6;
    const flags = words[at]!;
    const length = words[at + 1]! * SECTOR_BYTES;
    const offset = (words[at + 2]! + words[at + 3]! * 2 ** 32) * SECTOR_BYTES;
    const op = flags & 0xff;
    try {
      switch (op) {
        case Op.read:
          this.#read(tag, offset, length);
          return;
        case Op.write:
          this.#target.write(offset, this.#writtenData(tag, length));
          if ((flags & FUA) === 0) this.#answer(tag, length);
          else this.#later(tag, "write", offset, this.#target.flush(), length);
          return;
        case Op.flush:
          this.#later(tag, "flush", 0, this.#target.flush(), 0);
          return;
        case Op.discard:
          this.#target.trim(offset, length);
          this.#answer(tag, 0);
          return;
        case Op.writeZeroes:
          this.#target.writeZeroes(offset, length);
          if ((flags & FUA) === 0) this.#answer(tag, 0);
          else this.#later(tag, "write of zeros", offset, this.#target.flush(), 0);
          return;
        default:
          this.#fail(tag, `operation ${op}`, offset, new Error(`ublk: unknown operation ${op}`));
      }
    } catch (error) {
      const names: Record<number, string> = {
        0: "read",
        1: "write",
        2: "flush",
        3: "trim",
        5: "write of zeros",
      };
      this.#fail(tag, names[op] ?? `operation ${op}`, offset, error);
    }
  }

  #writtenData(tag: number, length: number): Uint8Array {
    const buffers = this.#buffers;
    if (buffers !== undefined) return buffers.subarray(tag * MAX_IO_BYTES, tag * MAX_IO_BYTES + length);
    const { staging } = this.#server;
    ublkCopyFrom(this.#charFd, tag, staging, 0, length);
    return staging.subarray(0, length);
  }

  #read(tag: number, offset: number, length: number): void {
    const buffers = this.#buffers;
    if (buffers !== undefined) {
      const into = buffers.subarray(tag * MAX_IO_BYTES, tag * MAX_IO_BYTES + length);
      if (this.#target.tryRead(offset, into)) this.#answer(tag, length);
      else this.#later(tag, "read", offset, this.#target.read(offset, into), length);
      return;
    }
    const { staging, pool } = this.#server;
    if (this.#target.tryRead(offset, staging.subarray(0, length))) {
      ublkCopyTo(this.#charFd, tag, staging, 0, length);
      this.#answer(tag, length);
      return;
    }
    const buffer = pool.take(length);
    const read = this.#target.read(offset, buffer.subarray(0, length)).then(() => {
      if (this.#phase === "serving") ublkCopyTo(this.#charFd, tag, buffer, 0, length);
    });
    this.#later(
      tag,
      "read",
      offset,
      read.finally(() => pool.give(buffer)),
      length,
    );
  }

  #later(tag: number, operation: string, offset: number, work: Promise<void>, result: number): void {
    work.then(
      () => this.#answer(tag, result),
      (error: unknown) => this.#fail(tag, operation, offset, error),
    );
  }

  #fail(tag: number, operation: string, offsetBytes: number, error: unknown): void {
    this.#onEvent({ kind: "io_error", operation, offsetBytes, error });
    this.#answer(tag, -nbdErrnoOf(error));
  }

  // ---- end --------------------------------------------------------------------------------------

  async resize(sizeBytes: number): Promise<void> {
    const mask = await this.#server.features();
    if (!hasBit(mask, Feature.updateSize)) {
      throw unsupported(
        `Linux ${release()} cannot change the size of a ublk device in use`,
        "use Linux 6.16 or later, or resize while the sandbox is paused",
      );
    }
    const data = sizeBytes / SECTOR_BYTES;
    const result = await this.#server.control(`resize device ${this.id}`, Control.updateSize, this.id, {
      data,
    });
    if (result < 0) throw failed(`device ${this.id} cannot be resized`, result);
  }

  detach(): void {
    if (this.#phase !== "serving") return;
    this.#phase = "detached";
  }

  remove(): Promise<void> {
    this.#removing ??= this.#remove().catch((error: unknown) => {
      this.#removing = undefined;
      throw error;
    });
    return this.#removing;
  }

  async #remove(): Promise<void> {
    const server = this.#server;
    if (this.#phase !== "closed") {
      const allBack = new Promise<void>((resolve) => {
        this.#allBack = resolve;
      });
      if (this.#live === 0) this.#allBack?.();
      const stopped = await server.control(`stop device ${this.id}`, Control.stopDev, this.id, {
        timeoutMs: SLOW_MS,
      });
      if (stopped < 0 && stopped !== ENODEV) throw failed(`device ${this.id} cannot be stopped`, stopped);
      // A device that was never started gives its commands back when its last descriptor is closed, only.
      await Promise.race([allBack, Bun.sleep(QUICK_MS)]);
      this.#close();
    }
    await server.remove(this.id);
  }

  /**
   * Lets go of the device. While the kernel has commands of it the slot is not given to another, which would get
   * their results, and what they point to stays.
   */
  #close(): void {
    if (this.#phase === "closed") return;
    this.#phase = "detached";
    // Prepared commands name the descriptor, whose number may be another file's after it is closed.
    this.#server.handOver();
    this.#descriptors[Symbol.dispose]();
    closeSync(this.#charFd);
    this.#phase = "closed";
    if (this.#live === 0) this.#server.freeSlot(this.#slot);
  }
}

/** The device once the kernel has noticed that its server is gone; undefined: there is none any more. */
async function quiesced(server: UblkServer, id: number): Promise<DevInfo | undefined> {
  const giveUpAt = performance.now() + OWNER_GONE_MS;
  for (;;) {
    const info = await server.info(id);
    if (info === undefined || info.state !== State.live || performance.now() > giveUpAt) return info;
    await Bun.sleep(POLL_MS);
  }
}
