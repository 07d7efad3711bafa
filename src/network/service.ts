import { lstat, mkdir, readdir, readlink, rm, symlink } from "node:fs/promises";
import { join } from "node:path";
import { netGroupDevices, netSlotCreate, netSlotDestroy } from "../../ffi/netns.ts";
import { runCommand, tryCommand } from "../lib/command.ts";
import { AenvError } from "../lib/errors.ts";
import { Gate } from "../lib/gate.ts";
import { newId } from "../lib/ids.ts";
import { formatIpv4, parseCidr, parseIpv4 } from "../lib/ipv4.ts";
import type { Logger } from "../lib/log.ts";
import {
  type AddressPlan,
  createAddressPlan,
  FIRST_SLOT,
  formatMac,
  GATEWAY_ADDRESS,
  GATEWAY_MAC_LOW,
  GUEST_ADDRESS,
  GUEST_MAC_LOW,
  LAST_SLOT,
  type SlotAddresses,
  TAP_NAME,
  tableNameOf,
  VM_LINK,
} from "./address-plan.ts";
import { chooseDnsServer, enableForwarding, requireHostSupport } from "./host.ts";
import { lockPool } from "./pool-lock.ts";
import { hostRuleset, namespaceRuleset } from "./ruleset.ts";
import type { NetworkService, NetworkServiceOptions, NetworkSlot } from "./types.ts";

const NETNS_PREFIX = "agentenv-ns-";
/**
 * `slot-<pool>-<index>` is a symbolic link to the slot's namespace file: made before it, removed after it.
 * The pool's first address tells servers apart that share the directory.
 */
const SLOT_LINK = /^slot-([\d.]+)-(\d{1,5})$/;
/** Slot work is kernel work under one lock: more at once only waits there. */
const MAX_CONCURRENT_JOBS = 4;
/** A device name or route of ours that somebody else has makes us take the next index, up to this often. */
const MAX_TAKEN_INDICES = 64;
/** Namespaces of veth pairs: 02:fc + these offsets keep both ends' MAC addresses apart. */
const HOST_MAC_BASE = 0x01000000;
const PEER_MAC_BASE = 0x02000000;

function errorCode(error: unknown): string | undefined {
  return error instanceof Error && "code" in error && typeof error.code === "string" ? error.code : undefined;
}

async function removeTable(name: string): Promise<void> {
  await runCommand(["nft", "-f", "-"], { stdin: `table inet ${name}\ndelete table inet ${name}\n` });
}

class Service implements NetworkService {
  readonly #options: NetworkServiceOptions;
  readonly #log: Logger;
  readonly #plan: AddressPlan;
  readonly #netnsDir: string;
  readonly #gate = new Gate(MAX_CONCURRENT_JOBS, "network slots", Number.POSITIVE_INFINITY);
  /** Slots that exist, are being made or removed; `adoptable`: kept from an earlier process. */
  readonly #slots = new Map<number, "in_use" | "adoptable">();
  readonly #pending = new Set<Promise<unknown>>();
  #state: "new" | "running" | "closed" = "new";
  #locks: DisposableStack | undefined;
  #dnsServer = "";
  #cursor = FIRST_SLOT;

  constructor(options: NetworkServiceOptions, log: Logger) {
    this.#options = options;
    this.#log = log;
    this.#plan = createAddressPlan(options.hostInteractionCidr, options.vethCidr);
    this.#netnsDir = join(options.runtimeDir, "netns");
    for (const cidr of options.alwaysDeniedCidrs) {
      if (parseCidr(cidr) === undefined) {
        throw new AenvError({
          code: "invalid_denied_cidr",
          message: `always_denied_cidrs: "${cidr}" is not an IPv4 CIDR`,
        });
      }
    }
    if (options.dnsServer !== undefined && parseIpv4(options.dnsServer) === undefined) {
      throw new AenvError({
        code: "invalid_dns_server",
        message: `network.dns_server "${options.dnsServer}" is not an IPv4 address`,
      });
    }
  }

  async start(keep: readonly number[]): Promise<void> {
    if (this.#state !== "new") throw new Error(`the network service is ${this.#state}`);
    await requireHostSupport();
    await using undo = new AsyncDisposableStack();
    const locks = undo.use(new DisposableStack());
    for (const cidr of [this.#plan.hostInteraction, this.#plan.veth]) {
      locks.use(await lockPool(formatIpv4(cidr.base)));
    }
    this.#dnsServer = this.#options.dnsServer ?? (await chooseDnsServer());
    if (await enableForwarding()) this.#log.info("turned IPv4 forwarding on (net.ipv4.ip_forward=1)");
    await mkdir(this.#netnsDir, { recursive: true, mode: 0o755 });
    await this.#installHostRules();
    await this.#warnOfForeignForwardPolicy();
    await this.#removeLeftovers(new Set(keep));
    undo.move();
    this.#locks = locks;
    this.#state = "running";
  }

  acquire(): Promise<NetworkSlot> {
    return this.#track(this.#gate.run(() => this.#createSlot()));
  }

  adopt(index: number): Promise<NetworkSlot> {
    return this.#track(this.#gate.run(() => this.#adoptSlot(index)));
  }

  /**
   * Slots belong to their holders. While one is left (a VM that outlives this process), so do the host's
   * rules: without them its guest would be cut off, or worse, unfenced.
   */
  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#state === "closed") return;
    const wasRunning = this.#state === "running";
    this.#state = "closed";
    await Promise.allSettled(this.#pending);
    try {
      if (!wasRunning) return;
      if (this.#slots.size > 0) {
        this.#log.info({ slots: this.#slots.size }, "network slots are still in use: host rules stay");
        return;
      }
      await removeTable(this.#plan.tableName);
    } finally {
      this.#locks?.dispose();
    }
  }

  #track<T>(work: Promise<T>): Promise<T> {
    this.#pending.add(work);
    const forget = () => this.#pending.delete(work);
    work.then(forget, forget);
    return work;
  }

  #requireRunning(): void {
    if (this.#state === "running") return;
    throw new AenvError({
      code: "network_not_running",
      status: 503,
      message: `no network slot can be made: the network service is ${this.#state}`,
    });
  }

  // ---- host ----------------------------------------------------------------------------------------

  async #installHostRules(): Promise<void> {
    const rules = hostRuleset({
      plan: this.#plan,
      alwaysDeniedCidrs: this.#options.alwaysDeniedCidrs,
      dnsServer: this.#dnsServer,
    });
    try {
      await runCommand(["nft", "-f", "-"], { stdin: rules });
    } catch (cause) {
      throw new AenvError({
        code: "network_rules_refused",
        message: "the host's firewall rules could not be installed",
        remediation:
          "the kernel needs nf_tables with nat, reject, ct, fib and masquerade (modules nft_*), and nft 1.0 or later",
        cause,
      });
    }
  }

  /** Another table's drop is final in nftables: ours cannot let a packet through that it refuses. */
  async #warnOfForeignForwardPolicy(): Promise<void> {
    const chain = await tryCommand(["nft", "list", "chain", "ip", "filter", "FORWARD"]);
    if (chain.exitCode !== 0 || !/policy drop/.test(chain.stdout)) return;
    this.#log.warn(
      { group: this.#plan.deviceGroup },
      "the host's FORWARD chain drops by default (docker does that): guests have no internet until it accepts " +
        `our pool, e.g. iptables -I FORWARD -s ${this.#options.hostInteractionCidr} -j ACCEPT and ` +
        `iptables -I FORWARD -d ${this.#options.hostInteractionCidr} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT`,
    );
  }

  async #removeLeftovers(keep: ReadonlySet<number>): Promise<void> {
    const names = await readdir(this.#netnsDir);
    const linkedFiles = new Set<string>();
    const foreignPools = new Map<string, Set<number>>();
    const ownPool = formatIpv4(this.#plan.deviceGroup);
    let removed = 0;
    for (const name of names) {
      const [, pool, indexText] = SLOT_LINK.exec(name) ?? [];
      if (pool === undefined) continue;
      const index = Number(indexText);
      linkedFiles.add(await readlink(join(this.#netnsDir, name)));
      if (pool !== ownPool) {
        foreignPools.set(pool, (foreignPools.get(pool) ?? new Set()).add(index));
      } else if (keep.has(index)) {
        this.#slots.set(index, "adoptable");
      } else {
        await this.#removeLinkedSlot(name, index, this.#plan.deviceGroup);
        removed++;
      }
    }
    for (const [pool, indices] of foreignPools) removed += await this.#removeForeignPool(pool, indices);
    for (const name of names) {
      if (!name.startsWith(NETNS_PREFIX) || linkedFiles.has(name)) continue;
      await netSlotDestroy(join(this.#netnsDir, name), "-", this.#plan.deviceGroup);
      removed++;
    }
    // Devices whose runtime directory went away (another runtime_path, a cleared /run).
    const kept = new Set([...this.#slots.keys()].map((index) => this.#plan.slot(index).hostDevice));
    for (const device of netGroupDevices(this.#plan.deviceGroup)) {
      if (kept.has(device)) continue;
      await netSlotDestroy(join(this.#netnsDir, `${NETNS_PREFIX}none`), device, this.#plan.deviceGroup);
      removed++;
    }
    if (removed > 0) this.#log.info({ removed }, "removed network slots an earlier process left");
  }

  async #removeLinkedSlot(linkName: string, index: number, group: number): Promise<void> {
    const link = join(this.#netnsDir, linkName);
    await netSlotDestroy(join(this.#netnsDir, await readlink(link)), `veth-${index}`, group);
    await rm(link, { force: true });
  }

  /** Slots of a pool that no live server has: this server's, before its configuration changed. */
  async #removeForeignPool(pool: string, indices: ReadonlySet<number>): Promise<number> {
    const base = parseIpv4(pool);
    if (base === undefined) return 0;
    let lock: Disposable;
    try {
      lock = await lockPool(pool);
    } catch (error) {
      if (errorCode(error) === "network_pool_in_use") return 0;
      throw error;
    }
    using _held = lock;
    for (const index of indices) await this.#removeLinkedSlot(`slot-${pool}-${index}`, index, base);
    await removeTable(tableNameOf(base));
    return indices.size;
  }

  // ---- slots ---------------------------------------------------------------------------------------

  /** Round robin: an address just freed is used again as late as possible, when its connections are gone. */
  #reserveIndex(): number {
    for (let tried = FIRST_SLOT; tried <= LAST_SLOT; tried++) {
      const index = this.#cursor;
      this.#cursor = index === LAST_SLOT ? FIRST_SLOT : index + 1;
      if (this.#slots.has(index)) continue;
      this.#slots.set(index, "in_use");
      return index;
    }
    throw new AenvError({
      code: "network_slots_exhausted",
      status: 503,
      message: `all ${LAST_SLOT} network slots of this host are in use`,
    });
  }

  async #createSlot(): Promise<NetworkSlot> {
    this.#requireRunning();
    for (let attempt = 1; ; attempt++) {
      const index = this.#reserveIndex();
      try {
        return await this.#createAt(this.#plan.slot(index));
      } catch (error) {
        this.#slots.delete(index);
        if (errorCode(error) !== "os_eexist" || attempt === MAX_TAKEN_INDICES) throw error;
        this.#log.debug({ index, err: error }, "network slot is taken by somebody else, trying the next");
      }
    }
  }

  async #createAt(addresses: SlotAddresses): Promise<NetworkSlot> {
    const netnsName = `${NETNS_PREFIX}${newId()}`;
    const netnsPath = join(this.#netnsDir, netnsName);
    await using undo = new AsyncDisposableStack();
    undo.defer(() => this.#destroyParts(addresses, netnsPath));
    await symlink(netnsName, this.#linkPath(addresses.index));
    await netSlotCreate(netnsPath, addresses.hostDevice, {
      group: this.#plan.deviceGroup,
      hostVeth: addresses.hostVeth,
      peerVeth: addresses.peerVeth,
      hostAddress: addresses.hostAddress,
      guestAddress: GUEST_ADDRESS,
      gatewayAddress: GATEWAY_ADDRESS,
      prefixLength: VM_LINK.prefixLength,
      guestMacLow: GUEST_MAC_LOW,
      gatewayMacLow: GATEWAY_MAC_LOW,
      hostMacLow: HOST_MAC_BASE + addresses.index,
      peerMacLow: PEER_MAC_BASE + addresses.index,
      tapOwner: process.geteuid?.() ?? 0,
    });
    await this.#installNamespaceRules(addresses, netnsPath);
    undo.move();
    return this.#slotObject(addresses, netnsPath);
  }

  async #adoptSlot(index: number): Promise<NetworkSlot> {
    this.#requireRunning();
    if (this.#slots.get(index) !== "adoptable") {
      throw new AenvError({
        code: "network_slot_gone",
        message: `network slot ${index} is ${this.#slots.has(index) ? "in use" : "not there"}: it cannot be taken over`,
      });
    }
    const addresses = this.#plan.slot(index);
    const netnsPath = join(this.#netnsDir, await readlink(this.#linkPath(index)));
    const device = netGroupDevices(this.#plan.deviceGroup).includes(addresses.hostDevice);
    if (!device || !(await lstat(netnsPath).catch(() => undefined))) {
      throw new AenvError({
        code: "network_slot_gone",
        message: `network slot ${index} has lost its ${device ? "namespace" : "device"}: it cannot be taken over`,
      });
    }
    this.#slots.set(index, "in_use");
    try {
      await this.#installNamespaceRules(addresses, netnsPath);
    } catch (error) {
      this.#slots.set(index, "adoptable");
      throw error;
    }
    return this.#slotObject(addresses, netnsPath);
  }

  async #installNamespaceRules(addresses: SlotAddresses, netnsPath: string): Promise<void> {
    await runCommand(["nsenter", `--net=${netnsPath}`, "nft", "-f", "-"], {
      stdin: namespaceRuleset(addresses, this.#dnsServer),
    });
  }

  #slotObject(addresses: SlotAddresses, netnsPath: string): NetworkSlot {
    let disposal: Promise<void> | undefined;
    const release = async () => {
      await this.#gate.run(() => this.#destroyParts(addresses, netnsPath));
      this.#slots.delete(addresses.index);
    };
    return {
      index: addresses.index,
      netnsPath,
      tapName: TAP_NAME,
      hostAddress: formatIpv4(addresses.hostAddress),
      guestAddress: formatIpv4(GUEST_ADDRESS),
      gatewayAddress: formatIpv4(GATEWAY_ADDRESS),
      prefixLength: VM_LINK.prefixLength,
      dnsServer: formatIpv4(GATEWAY_ADDRESS),
      macAddress: formatMac(GUEST_MAC_LOW),
      [Symbol.asyncDispose]: () => {
        disposal ??= this.#track(release());
        return disposal;
      },
    };
  }

  #linkPath(index: number): string {
    return join(this.#netnsDir, `slot-${formatIpv4(this.#plan.deviceGroup)}-${index}`);
  }

  async #destroyParts(addresses: SlotAddresses, netnsPath: string): Promise<void> {
    await netSlotDestroy(netnsPath, addresses.hostDevice, this.#plan.deviceGroup);
    await rm(this.#linkPath(addresses.index), { force: true });
  }
}

/** Network slots of this host; call `start` first. Options are checked here. */
export function createNetworkService(options: NetworkServiceOptions, log: Logger): NetworkService {
  return new Service(options, log);
}
