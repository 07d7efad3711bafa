import { closeSync, mkdtempSync, openSync, readdirSync, readlinkSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { UBLK_FETCH } from "../../../../ffi/ublk.ts";
import { Control, encodeDevInfo, maskOf, State } from "./layout.ts";
import type { UblkCommands, UblkHost } from "./server.ts";

const ENODEV = -19;
const EBUSY = -16;

interface KernelDevice {
  state: number;
  readonly info: Uint8Array;
  params: Uint8Array;
  /** Tags of the commands that it has, as the server marked them. */
  readonly commands: number[];
}

/**
 * The kernel's side of ublk as far as the life of devices goes, without any I/O: for hosts without ublk, and for
 * failures that a kernel does not give on demand. Nodes are files in a directory.
 */
export class FakeUblk implements UblkHost, UblkCommands {
  readonly directory = mkdtempSync("/tmp/ublk-fake-");
  readonly controlDevice = join(this.directory, "control");
  readonly devices = new Map<number, KernelDevice>();
  /** Answers to the next commands of a kind, instead of carrying them out. */
  readonly refusals = new Map<number, number[]>();
  readonly eventFd: number;
  readonly #prepared: (() => void)[] = [];
  readonly #results: [tag: number, result: number][] = [];

  constructor() {
    writeFileSync(this.controlDevice, "");
    const events = join(this.directory, "events");
    Bun.spawnSync(["mkfifo", events]);
    this.eventFd = openSync(events, "r+");
  }

  openRing(): UblkCommands {
    return this;
  }

  nodePath(id: number): string {
    return join(this.directory, `ublkc${id}`);
  }

  /** How many descriptors this process has of a file. */
  opened(path: string): number {
    const target = (fd: string) => {
      try {
        return readlinkSync(`/proc/self/fd/${fd}`);
      } catch {
        return undefined; // The directory's own, closed by now.
      }
    };
    return readdirSync("/proc/self/fd").filter((fd) => target(fd) === path).length;
  }

  /** The server of every device ends: what it had is given up. */
  serverEnds(): void {
    for (const device of this.devices.values()) {
      device.commands.length = 0;
      if (device.state === State.live) device.state = State.quiesced;
    }
  }

  makeNode(id: number): void {
    writeFileSync(this.nodePath(id), new Uint8Array(64 << 10));
  }

  control(
    _fd: number,
    opcode: number,
    id: number,
    payload: Uint8Array | null,
    _data: number,
    tag: number,
  ): void {
    this.#prepared.push(() => {
      const refusal = this.refusals.get(opcode)?.shift();
      this.#results.push([tag, refusal ?? this.#perform(opcode, id, payload)]);
    });
  }

  #perform(opcode: number, id: number, payload: Uint8Array | null): number {
    if (opcode === Control.getFeatures) {
      const mask = maskOf(["userRecovery", "userRecoveryReissue", "ioctlEncode", "userCopy"]);
      new DataView(payload!.buffer).setBigUint64(0, BigInt(mask), true);
      return 0;
    }
    if (opcode === Control.addDev) {
      let free = 0;
      while (this.devices.has(free)) free++;
      const view = new DataView(payload!.buffer);
      view.setInt32(12, free, true);
      const info = payload!.slice();
      this.devices.set(free, { state: State.dead, info, params: new Uint8Array(0), commands: [] });
      this.makeNode(free);
      return 0;
    }
    const device = this.devices.get(id);
    if (device === undefined) return ENODEV;
    switch (opcode) {
      case Control.getDevInfo:
        payload!.set(device.info);
        new DataView(payload!.buffer).setUint16(4, device.state, true);
        return 0;
      case Control.setParams:
        device.params = payload!.slice();
        return 0;
      case Control.getParams:
        payload!.set(device.params);
        return 0;
      case Control.startUserRecovery:
        return this.opened(this.nodePath(id)) > 0 || device.commands.length > 0 ? EBUSY : 0;
      case Control.startDev:
      case Control.endUserRecovery:
        device.state = State.live;
        return 0;
      case Control.stopDev:
        device.state = State.dead;
        for (const tag of device.commands.splice(0)) this.#results.push([tag, ENODEV]);
        return 0;
      case Control.delDevAsync:
        this.devices.delete(id);
        rmSync(this.nodePath(id), { force: true });
        return 0;
      default:
        throw new Error(`control command ${opcode.toString(16)}`);
    }
  }

  io(
    charFd: number,
    opcode: number,
    _tag: number,
    _result: number,
    _b: unknown,
    _o: number,
    tag: number,
  ): void {
    this.#prepared.push(() => {
      const node = readlinkSync(`/proc/self/fd/${charFd}`);
      const device = [...this.devices].find(([id]) => this.nodePath(id) === node)?.[1];
      if (device === undefined || opcode !== UBLK_FETCH) throw new Error(`I/O command ${opcode} for ${node}`);
      device.commands.push(tag);
    });
  }

  submit(_wait: number, each: (tag: number, result: number) => void): number {
    for (const carryOut of this.#prepared.splice(0)) carryOut();
    const results = this.#results.splice(0);
    for (const [tag, result] of results) each(tag, result);
    return results.length;
  }

  arm(): boolean {
    return this.#results.length > 0;
  }

  /** A device of this owner whose server has ended. */
  leftBehind(stamp: number, params: Uint8Array): number {
    let id = 0;
    while (this.devices.has(id)) id++;
    const flags = maskOf(["userRecovery", "userRecoveryReissue", "ioctlEncode", "userCopy"]);
    const info = encodeDevInfo({ queueDepth: 64, maxIoBytes: 512 << 10, id, flags, stamp });
    this.devices.set(id, { state: State.quiesced, info, params, commands: [] });
    this.makeNode(id);
    return id;
  }

  [Symbol.dispose](): void {
    closeSync(this.eventFd);
    rmSync(this.directory, { recursive: true, force: true });
  }
}
