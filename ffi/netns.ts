import { close, read } from "node:fs";
import { promisify } from "node:util";
import { AenvError } from "../src/lib/errors.ts";
import { check, errnoName } from "./errno.ts";
import { bindShim } from "./lib.ts";

/** Bindings of c/shim/netns.h and c/shim/netfilter.h. */
const shim = bindShim({
  aenv_net_slot_create: { args: ["ptr", "ptr", "ptr", "ptr", "u32"], returns: "i32" },
  aenv_net_slot_destroy: { args: ["ptr", "ptr", "u32"], returns: "i32" },
  aenv_net_slot_rates: { args: ["ptr", "ptr", "ptr"], returns: "i32" },
  aenv_net_probe_rates: { args: [], returns: "i32" },
  aenv_net_tap_owner: { args: ["ptr", "u32"], returns: "i32" },
  aenv_net_rules: { args: ["ptr", "i32", "ptr", "u32"], returns: "i32" },
  aenv_net_forget_flows: { args: ["i32", "i32", "u32", "u32"], returns: "i32" },
  aenv_nf_open: { args: [], returns: "i32" },
  aenv_nf_original_destination: { args: ["i32", "ptr"], returns: "i32" },
  aenv_net_group_devices: { args: ["u32", "ptr", "u32"], returns: "i32" },
});

const readAsync = promisify(read);
const closeAsync = promisify(close);
const REPORT_BYTES = 128;

/** `struct aenv_net_slot`: addresses as numbers in host byte order, see there. */
export interface NetSlotParameters {
  readonly group: number;
  readonly hostVeth: number;
  readonly peerVeth: number;
  readonly hostAddress: number;
  readonly guestAddress: number;
  readonly gatewayAddress: number;
  readonly prefixLength: number;
  readonly guestMacLow: number;
  readonly gatewayMacLow: number;
  readonly hostMacLow: number;
  readonly peerMacLow: number;
  readonly tapOwner: number;
}

/** Bytes a second (0: no limit), and bytes at once on top of a second's worth. */
export interface NetRate {
  readonly bytesPerSec: number;
  readonly burstBytes: number;
}

function cString(text: string): Buffer {
  if (text.includes("\0")) throw new Error("a name for the kernel cannot hold a zero byte");
  return Buffer.from(`${text}\0`);
}

async function report(fd: number, what: string): Promise<number> {
  const bytes = Buffer.from(new ArrayBuffer(REPORT_BYTES));
  try {
    for (let filled = 0; filled < REPORT_BYTES; ) {
      const { bytesRead } = await readAsync(fd, bytes, filled, REPORT_BYTES - filled, null);
      if (bytesRead === 0) throw new Error(`${what}: the helper thread ended without a report`);
      filled += bytesRead;
    }
  } finally {
    await closeAsync(fd);
  }
  const result = bytes.readInt32LE(0);
  if (result >= 0) return result;
  const step = bytes.subarray(4, bytes.indexOf(0, 4)).toString();
  const name = errnoName(-result);
  throw new AenvError({
    code: `os_${name.toLowerCase()}`,
    message: `${what}: ${step === "" ? "" : `${step}: `}${name}`,
  });
}

/**
 * Makes a slot's namespace with the firewall rules of `rules` (a finished nf_tables batch), its veth pair and
 * tap; on an error nothing of it is left. Does not block.
 */
export async function netSlotCreate(
  netnsPath: string,
  hostDevice: string,
  slot: NetSlotParameters,
  rules: Uint8Array,
): Promise<void> {
  const packed = new Uint32Array(
    Uint32Array.of(
      slot.group,
      slot.hostVeth,
      slot.peerVeth,
      slot.hostAddress,
      slot.guestAddress,
      slot.gatewayAddress,
      slot.prefixLength,
      slot.guestMacLow,
      slot.gatewayMacLow,
      slot.hostMacLow,
      slot.peerMacLow,
      slot.tapOwner,
    ).buffer,
  );
  const what = `network slot ${hostDevice}`;
  const fd = check(
    shim.aenv_net_slot_create(cString(netnsPath), cString(hostDevice), packed, rules, rules.length),
    what,
  );
  await report(fd, what);
}

/** Removes what {@link netSlotCreate} made; parts that are gone already are no error. Does not block. */
export async function netSlotDestroy(netnsPath: string, hostDevice: string, group: number): Promise<void> {
  const what = `remove network slot ${hostDevice}`;
  const fd = check(shim.aenv_net_slot_destroy(cString(netnsPath), cString(hostDevice), group), what);
  await report(fd, what);
}

/** Limits what a slot's guest receives and sends from now on, in place of earlier limits. Does not block. */
export async function netSlotRates(
  netnsPath: string,
  hostDevice: string,
  receive: NetRate,
  send: NetRate,
): Promise<void> {
  const packed = new BigUint64Array(
    [receive.bytesPerSec, receive.burstBytes, send.bytesPerSec, send.burstBytes].map(BigInt),
  );
  const what = `limit network slot ${hostDevice}`;
  await report(check(shim.aenv_net_slot_rates(cString(netnsPath), cString(hostDevice), packed), what), what);
}

/** Throws where this kernel cannot limit a device as {@link netSlotRates} does; changes nothing. Does not block. */
export async function netProbeRates(): Promise<void> {
  const what = "limit a network device";
  await report(check(shim.aenv_net_probe_rates(), what), what);
}

/** Makes a slot's tap that of another user; `os_ebusy` while a process is attached to it, `os_enodev` without it. Does not block. */
export async function netTapOwner(netnsPath: string, uid: number): Promise<void> {
  const what = `give the tap of ${netnsPath} to user ${uid}`;
  await report(check(shim.aenv_net_tap_owner(cString(netnsPath), uid), what), what);
}

/** Applies an nf_tables batch, all of it or none, in the namespace at `netnsPath`. Does not block. */
export async function netNamespaceRules(netnsPath: string, batch: Uint8Array): Promise<void> {
  const what = `change the rules of ${netnsPath}`;
  await report(check(shim.aenv_net_rules(cString(netnsPath), -1, batch, batch.length), what), what);
}

/**
 * A netfilter socket of this process's namespace. To be kept: closing one is what takes long. Used by one call
 * at a time, and not again after one of them failed to forget.
 */
export class NetfilterSocket implements Disposable {
  #fd: number;

  constructor() {
    this.#fd = check(shim.aenv_nf_open(), "open a netfilter socket");
  }

  /** Applies an nf_tables batch, all of it or none. Does not block. */
  async apply(batch: Uint8Array): Promise<void> {
    const what = "change the host's rules";
    await report(check(shim.aenv_net_rules(cString(""), this.#fd, batch, batch.length), what), what);
  }

  /**
   * Forgets the tracked connections that an IPv4 address (host byte order) opened, or with a mask all addresses
   * that are `source` under it; resolves with their number. `reader`: a second socket.
   */
  async forget(reader: NetfilterSocket, source: number, mask = 0xffffffff): Promise<number> {
    const what = "forget connections";
    return await report(check(shim.aenv_net_forget_flows(reader.#fd, this.#fd, source, mask), what), what);
  }

  [Symbol.dispose](): void {
    if (this.#fd < 0) return;
    const fd = this.#fd;
    this.#fd = -1;
    // Off the event loop: it takes a while.
    close(fd, () => undefined);
  }
}

/** Where a diverted connection was meant to go (host byte order); undefined when `fd` was not diverted. */
export function originalDestination(fd: number): { address: number; port: number } | undefined {
  const out = new Uint32Array(new ArrayBuffer(8));
  if (shim.aenv_nf_original_destination(fd, out) < 0) return undefined;
  return { address: out[0]!, port: out[1]! };
}

/** Names of the network devices of a device group. */
export function netGroupDevices(group: number): string[] {
  for (let capacity = 64 * 1024; ; capacity *= 2) {
    const buffer = new Uint8Array(new ArrayBuffer(capacity));
    const result = shim.aenv_net_group_devices(group, buffer, capacity);
    if (result < 0 && errnoName(-result) === "ENOSPC" && capacity < 64 * 1024 * 1024) continue;
    const length = check(result, "list network devices");
    return Buffer.from(buffer.subarray(0, length)).toString().split("\n").filter(Boolean);
  }
}
