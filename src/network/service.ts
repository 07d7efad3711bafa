import { lstat, mkdir, readdir, readlink, rm, symlink } from "node:fs/promises";
import { join } from "node:path";
import {
  netGroupDevices,
  netNamespaceRules,
  netSlotCreate,
  netSlotDestroy,
  netSlotRates,
  netTapOwner,
} from "../../ffi/netns.ts";
import { outputOf, runCommand, tryCommand } from "../lib/command.ts";
import { AenvError, assert } from "../lib/errors.ts";
import { Gate } from "../lib/gate.ts";
import { newId } from "../lib/ids.ts";
import { formatCidr, formatIpv4, parseCidr, parseIpv4 } from "../lib/ipv4.ts";
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
import { type Egress, type GuestView, startEgress } from "./egress/index.ts";
import {
  type CompiledPolicy,
  compilePolicy,
  DEFAULT_POLICY,
  type EgressPolicy,
  parseEgressPolicy,
} from "./egress-policy.ts";
import {
  chooseDnsServer,
  enableForwarding,
  hostDevices,
  ownLocalAddress,
  requireHostSupport,
  requireRateLimits,
} from "./host.ts";
import { adviseOnPools } from "./host-check.ts";
import { closeHostFirewall, openHostFirewall } from "./host-firewall.ts";
import type { Batch } from "./nft.ts";
import { WarmPool } from "./pool.ts";
import { lockPool } from "./pool-lock.ts";
import { readPolicyCounters } from "./report.ts";
import { FlowTable, RuleWriter } from "./rule-writer.ts";
import {
  changePolicy,
  deniedCidrs,
  GUEST_LIMITS,
  type GuestLimits,
  hostRuleset,
  namespaceRules,
} from "./ruleset.ts";
import { letDeviceGo } from "./stillness.ts";
import type {
  KeptSlot,
  NetworkService,
  NetworkServiceOptions,
  NetworkSlot,
  SlotPolicyReport,
} from "./types.ts";

/** Exit status of a program that SIGSEGV ended. */
const SEGMENTATION_FAULT = 139;
const NETNS_PREFIX = "agentenv-ns-";
/**
 * `slot-<pool>-<index>` is a symbolic link to the slot's namespace file: made before it, removed after it.
 * The pool's first address tells servers apart that share the directory.
 */
const SLOT_LINK = /^slot-([\d.]+)-(\d{1,5})$/;
/** Slot work is kernel work under one lock: more at once only waits there. */
const MAX_CONCURRENT_JOBS = 4;
/**
 * A device name or route of ours that somebody else has makes us take the next index, up to this often; indices whose
 * device names are seen on the host do not count.
 */
const MAX_TAKEN_INDICES = 64;
/** Namespaces of veth pairs: 02:fc + these offsets keep both ends' MAC addresses apart. */
const HOST_MAC_BASE = 0x01000000;
const PEER_MAC_BASE = 0x02000000;

function errorCode(error: unknown): string | undefined {
  return error instanceof Error && "code" in error && typeof error.code === "string" ? error.code : undefined;
}

/** A slot as the service knows it, whoever holds it. */
interface SlotState {
  readonly addresses: SlotAddresses;
  readonly netnsPath: string;
  /** What the host's rules say; undefined: the slot has no entry there and is refused everything. */
  current: CompiledPolicy | undefined;
  /** What they are about to say. */
  next: CompiledPolicy | undefined;
  /** The last change of policy; the next one waits for it. */
  change: Promise<unknown>;
}

const DEFAULT_COMPILED = compilePolicy(DEFAULT_POLICY);

function ownUser(): number {
  return process.geteuid?.() ?? 0;
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
  /** Slots with an entry in the host's rules or about to have one, by their address. */
  readonly #states = new Map<number, SlotState>();
  /** Indices whose address may have connections in the host's table; all: see `start`. */
  readonly #used = new Set<number>();
  #allUsed = true;
  readonly #pending = new Set<Promise<unknown>>();
  #state: "new" | "running" | "closed" = "new";
  /** Pool locks, sockets and the egress servers. */
  #locks: AsyncDisposableStack | undefined;
  #dnsServer = "";
  #hostRules: { readonly writer: RuleWriter; readonly flows: FlowTable } | undefined;
  #egress: Egress | undefined;
  #pool: WarmPool<SlotState> | undefined;
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

  async start(keep: readonly KeptSlot[]): Promise<void> {
    if (this.#state !== "new") throw new Error(`the network service is ${this.#state}`);
    const kept = new Map(keep.map((slot) => [slot.index, this.#keptPolicy(slot)]));
    await requireHostSupport();
    const { rates } = this.#options;
    if (rates !== undefined && (rates.receiveBytesPerSec > 0 || rates.sendBytesPerSec > 0))
      await requireRateLimits();
    await using undo = new AsyncDisposableStack();
    for (const cidr of [this.#plan.hostInteraction, this.#plan.veth]) {
      undo.use(await lockPool(formatIpv4(cidr.base)));
    }
    this.#dnsServer = this.#options.dnsServer ?? (await chooseDnsServer());
    if (await enableForwarding()) this.#log.info("turned IPv4 forwarding on (net.ipv4.ip_forward=1)");
    await mkdir(this.#netnsDir, { recursive: true, mode: 0o755 });
    // Each is a program to start: they need not wait for each other.
    const firewall = openHostFirewall(this.#options.hostInteractionCidr, this.#plan.tableName, this.#log);
    undo.defer(async () => void (await firewall.catch(() => undefined)));
    await ownLocalAddress(this.#plan.egressAddress, true);
    const egress = undo.use(
      await startEgress({
        address: this.#plan.egressAddress,
        dnsServer: this.#dnsServer,
        deniedCidrs: deniedCidrs(this.#plan, this.#options.alwaysDeniedCidrs),
        findGuest: (address) => this.#guestView(address),
        log: this.#log,
        ...(this.#options.proxyLimits === undefined ? {} : { proxyLimits: this.#options.proxyLimits }),
      }),
    );
    this.#egress = egress;
    await this.#installHostRules(egress);
    this.#hostRules = {
      writer: undo.use(new RuleWriter(this.#plan.tableName)),
      flows: undo.use(new FlowTable()),
    };
    await firewall;
    await Promise.all([this.#removeLeftovers(new Set(kept.keys())), this.#forgetPool(kept.size > 0)]);
    await this.#restorePolicies(kept);
    this.#locks = undo.move();
    this.#state = "running";
    // Nobody waits for it: it is advice.
    const { hostInteraction, veth, egressAddress } = this.#plan;
    void this.#track(
      adviseOnPools([hostInteraction, veth], formatIpv4(egressAddress), this.#log).catch((error: unknown) =>
        this.#log.debug({ err: error }, "the host's routes and rules could not be looked at"),
      ),
    );
    if (this.#options.pool !== undefined) {
      this.#pool = new WarmPool(
        this.#options.pool,
        () => this.#gate.run(() => this.#createSlot()),
        (state) => this.#gate.run(() => this.#destroySlot(state)),
        this.#log.child({ pool: "network" }),
      );
    }
  }

  acquire(policy?: EgressPolicy): Promise<NetworkSlot> {
    return this.#track(this.#acquire(policy));
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
      await this.#pool?.[Symbol.asyncDispose]();
      if (this.#slots.size > 0) {
        this.#log.info({ slots: this.#slots.size }, "network slots are still in use: host rules stay");
        return;
      }
      await removeTable(this.#plan.tableName);
      await closeHostFirewall(this.#plan.tableName);
      await ownLocalAddress(this.#plan.egressAddress, false);
    } finally {
      await this.#locks?.disposeAsync();
    }
  }

  #track<T>(work: Promise<T>): Promise<T> {
    this.#pending.add(work);
    const forget = () => this.#pending.delete(work);
    work.then(forget, forget);
    return work;
  }

  get #host() {
    assert(this.#hostRules !== undefined, "the network service has not been started");
    return this.#hostRules;
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

  async #installHostRules(egress: Egress): Promise<void> {
    const limits = { ...GUEST_LIMITS, ...this.#options.guestLimits };
    const install = async (applied: GuestLimits) => {
      const rules = hostRuleset({
        plan: this.#plan,
        alwaysDeniedCidrs: this.#options.alwaysDeniedCidrs,
        dnsServer: this.#dnsServer,
        proxyPort: egress.proxyPort,
        namePort: egress.namePort,
        limits: applied,
      });
      // The first rules of a host load a dozen kernel modules.
      const argv = ["nft", "-f", "-"];
      const result = await tryCommand(argv, { stdin: rules, timeoutMs: 120_000 });
      if (result.exitCode === SEGMENTATION_FAULT)
        throw new AenvError({
          code: "network_tool_crashed",
          message: "the host's nft crashed before it could install the firewall rules",
          remediation:
            "tables that a newer nft made here, such as that of a container in the host's network, crash older ones: see whether `nft list ruleset` crashes, too; upgrade nftables, or remove those tables",
        });
      outputOf(argv, result);
    };
    try {
      await install(limits);
    } catch (refused) {
      if (errorCode(refused) === "network_tool_crashed") throw refused;
      try {
        await install({ ...limits, connections: 0 });
      } catch (cause) {
        throw new AenvError({
          code: "network_rules_refused",
          message: "the host's firewall rules could not be installed",
          remediation:
            "the kernel needs nf_tables with nat, reject, ct, fib, limit and masquerade (modules nft_*), and nft 1.0 or later",
          cause,
        });
      }
      this.#log.warn(
        { err: refused },
        "guests' connections are not bounded: the kernel cannot count them (module nft_connlimit)",
      );
    }
  }

  /**
   * Connections that an earlier process's guests left. Where some of those live on, theirs must stay, and each
   * address is looked after when it is given out.
   */
  async #forgetPool(someLive: boolean): Promise<void> {
    if (someLive) return;
    const { base, prefixLength } = this.#plan.hostInteraction;
    await this.#host.flows.forget(base, (0xffffffff << (32 - prefixLength)) >>> 0);
    this.#allUsed = false;
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
    await closeHostFirewall(tableNameOf(base));
    await ownLocalAddress(base, false);
    return indices.size;
  }

  // ---- slots ---------------------------------------------------------------------------------------

  /** Round robin: an address just freed is used again as late as possible, when its connections are gone. */
  #reserveIndex(taken: ReadonlySet<string>): number {
    for (let tried = FIRST_SLOT; tried <= LAST_SLOT; tried++) {
      const index = this.#cursor;
      this.#cursor = index === LAST_SLOT ? FIRST_SLOT : index + 1;
      if (this.#slots.has(index) || taken.has(this.#plan.slot(index).hostDevice)) continue;
      this.#slots.set(index, "in_use");
      return index;
    }
    throw new AenvError({
      code: "network_slots_exhausted",
      status: 503,
      message: `all ${LAST_SLOT} network slots of this host are in use`,
    });
  }

  async #acquire(policy: EgressPolicy | undefined): Promise<NetworkSlot> {
    this.#requireRunning();
    const wanted = compilePolicy(policy ?? DEFAULT_POLICY);
    const state = this.#pool?.take() ?? (await this.#gate.run(() => this.#createSlot()));
    try {
      await this.#applyPolicy(state, wanted);
    } catch (error) {
      await this.#gate.run(() => this.#destroySlot(state));
      throw error;
    }
    return this.#slotObject(state);
  }

  /** A new slot that nobody holds yet, with the default policy. */
  async #createSlot(): Promise<SlotState> {
    this.#requireRunning();
    // Device names are the whole host's: another server with another pool has some of them.
    let taken: ReadonlySet<string> = new Set();
    for (let attempt = 1; ; attempt++) {
      const index = this.#reserveIndex(taken);
      try {
        return await this.#createAt(this.#plan.slot(index));
      } catch (error) {
        this.#slots.delete(index);
        if (errorCode(error) !== "os_eexist") throw error;
        if (attempt === MAX_TAKEN_INDICES) {
          throw new AenvError({
            code: "network_slots_taken",
            status: 503,
            message: `${attempt} network slots in a row have names or addresses that somebody else on this host uses`,
            remediation: `see what uses ${formatCidr(this.#plan.hostInteraction)}: ip route; or set network.internal.host_interaction_cidr and veth_cidr to free ranges`,
            cause: error,
          });
        }
        this.#log.debug({ index, err: error }, "network slot is taken by somebody else, trying the next");
        taken = await hostDevices();
      }
    }
  }

  async #createAt(addresses: SlotAddresses): Promise<SlotState> {
    const netnsName = `${NETNS_PREFIX}${newId()}`;
    const netnsPath = join(this.#netnsDir, netnsName);
    await using undo = new AsyncDisposableStack();
    undo.defer(() => this.#destroyParts(addresses, netnsPath));
    await symlink(netnsName, this.#linkPath(addresses.index));
    const parameters = {
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
      tapOwner: ownUser(),
    };
    const used = this.#allUsed || this.#used.has(addresses.index);
    await Promise.all([
      netSlotCreate(netnsPath, addresses.hostDevice, parameters, this.#namespaceRules(addresses)),
      // The address was another sandbox's: its connections must mean nothing for this one.
      used ? this.#host.flows.forget(addresses.hostAddress) : undefined,
    ]);
    this.#used.add(addresses.index);
    if (this.#options.rates !== undefined) await this.#limit(addresses, netnsPath);
    const state = this.#newState(addresses, netnsPath);
    undo.defer(() => this.#dropState(state));
    await this.#applyPolicy(state, DEFAULT_COMPILED);
    undo.move();
    return state;
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
    const state = this.#states.get(addresses.hostAddress);
    const device = netGroupDevices(this.#plan.deviceGroup).includes(addresses.hostDevice);
    if (!device || state === undefined || !(await lstat(state.netnsPath).catch(() => undefined))) {
      throw new AenvError({
        code: "network_slot_gone",
        message: `network slot ${index} has lost its ${device ? "namespace" : "device"}: it cannot be taken over`,
      });
    }
    this.#slots.set(index, "in_use");
    try {
      await netNamespaceRules(state.netnsPath, this.#namespaceRules(addresses));
      // The server before may have been killed in the midst of a capture.
      await letDeviceGo(state.netnsPath);
    } catch (error) {
      this.#slots.set(index, "adoptable");
      throw error;
    }
    // They share a link out fairly and fence nothing in: no reason to end a guest that runs.
    await this.#limit(addresses, state.netnsPath).catch((error: unknown) =>
      this.#log.error(
        { err: error, slot: index },
        "the rates of a network slot that was taken over could not be set: the sandbox runs on, with those it had or none",
      ),
    );
    return this.#slotObject(state);
  }

  async #limit({ hostDevice }: SlotAddresses, netnsPath: string): Promise<void> {
    const { rates } = this.#options;
    await netSlotRates(
      netnsPath,
      hostDevice,
      { bytesPerSec: rates?.receiveBytesPerSec ?? 0, burstBytes: rates?.receiveBurstBytes ?? 0 },
      { bytesPerSec: rates?.sendBytesPerSec ?? 0, burstBytes: rates?.sendBurstBytes ?? 0 },
    );
  }

  #namespaceRules(addresses: SlotAddresses): Uint8Array {
    const dnsServer = parseIpv4(this.#dnsServer);
    assert(dnsServer !== undefined, "the DNS server is no IPv4 address");
    return namespaceRules(addresses, dnsServer);
  }

  #newState(addresses: SlotAddresses, netnsPath: string): SlotState {
    const state: SlotState = {
      addresses,
      netnsPath,
      current: undefined,
      next: undefined,
      change: Promise.resolve(),
    };
    this.#states.set(addresses.hostAddress, state);
    return state;
  }

  // ---- policies ------------------------------------------------------------------------------------

  /** A stored policy that is not in order must not keep the server from starting, nor open anything. */
  #keptPolicy({ index, policy }: KeptSlot): CompiledPolicy {
    try {
      return compilePolicy(policy ?? DEFAULT_POLICY);
    } catch (error) {
      this.#log.error(
        { err: error, slot: index },
        "a kept slot's policy cannot be read: it is denied everything",
      );
      return compilePolicy({ base: "deny", allowOut: [], denyOut: [] });
    }
  }

  /** Kept slots have their policies back before anybody asks; until then the new table refuses them all. */
  async #restorePolicies(kept: ReadonlyMap<number, CompiledPolicy>): Promise<void> {
    for (const [index, policy] of kept) {
      if (this.#slots.get(index) !== "adoptable") continue;
      const netnsPath = join(this.#netnsDir, await readlink(this.#linkPath(index)));
      await this.#applyPolicy(this.#newState(this.#plan.slot(index), netnsPath), policy);
    }
  }

  /**
   * One transaction. Meanwhile a name must be allowed by both policies; when the kernel refuses the change,
   * the old policy stays as it was.
   */
  #applyPolicy(state: SlotState, policy: CompiledPolicy): Promise<void> {
    const work = state.change.then(async () => {
      if (state.current === policy) return;
      state.next = policy;
      try {
        await this.#host.writer.apply((batch: Batch) =>
          changePolicy(batch, state.addresses, state.current, policy),
        );
        state.current = policy;
      } finally {
        state.next = undefined;
      }
    });
    state.change = work.catch(() => undefined);
    return work;
  }

  /** What the egress servers ask of a guest; undefined for an address without a slot. */
  #guestView(address: number): GuestView | undefined {
    const state = this.#states.get(address);
    if (state === undefined) return undefined;
    const inForce = (kind: "restricted" | "filtered") =>
      [state.current, state.next].filter((policy) => policy?.[kind]) as CompiledPolicy[];
    const allows = (kind: "restricted" | "filtered", judge: (policy: CompiledPolicy) => boolean) => {
      const policies = inForce(kind);
      return policies.length > 0 && policies.every(judge);
    };
    return {
      slotIndex: state.addresses.index,
      allowsWeb: (name) => allows("filtered", (policy) => policy.allowsName(name)),
      allowsAddress: (to) => allows("filtered", (policy) => policy.allowsAddress(to)),
      allowsQuery: (name) => allows("restricted", (policy) => policy.allowsName(name)),
    };
  }

  async #report(state: SlotState): Promise<SlotPolicyReport> {
    const policy = state.current ?? DEFAULT_COMPILED;
    return {
      slot: {
        index: state.addresses.index,
        hostAddress: formatIpv4(state.addresses.hostAddress),
        hostDevice: state.addresses.hostDevice,
        netnsPath: state.netnsPath,
      },
      node: {
        deniedCidrs: deniedCidrs(this.#plan, this.#options.alwaysDeniedCidrs),
        dnsServer: this.#dnsServer,
      },
      policy: policy.policy,
      restricted: policy.restricted,
      filtered: policy.filtered,
      ...(await readPolicyCounters(this.#plan.tableName, state.addresses, policy)),
      proxiedConnections: this.#requireEgress().openConnections(state.addresses.hostAddress),
      byName: this.#requireEgress().ledger(state.addresses.hostAddress),
    };
  }

  #requireEgress(): Egress {
    assert(this.#egress !== undefined, "the network service has not been started");
    return this.#egress;
  }

  // ---- release -------------------------------------------------------------------------------------

  /** Back to the pool when there is one and all traces of the guest can be removed; else away altogether. */
  async #release(state: SlotState): Promise<void> {
    if (this.#state === "running" && this.#pool !== undefined) {
      try {
        await this.#clean(state);
        if (this.#pool.put(state)) return;
      } catch (error) {
        this.#log.warn({ err: error, slot: state.addresses.index }, "a network slot cannot be used again");
      }
    }
    await this.#gate.run(() => this.#destroySlot(state));
  }

  async #clean(state: SlotState): Promise<void> {
    // A VMM's own account may have got the tap; the next VMM may run under another, or the server's.
    await netTapOwner(state.netnsPath, ownUser());
    this.#egress?.closeGuest(state.addresses.hostAddress);
    await this.#applyPolicy(state, DEFAULT_COMPILED);
    await this.#host.flows.forget(state.addresses.hostAddress);
  }

  /** What is established passes whatever the policy says, as long as the kernel knows it. */
  async #isolate(state: SlotState): Promise<void> {
    await this.#applyPolicy(state, compilePolicy(parseEgressPolicy({ allowInternetAccess: false })));
    this.#egress?.closeGuest(state.addresses.hostAddress);
    await this.#host.flows.forget(state.addresses.hostAddress);
  }

  async #destroySlot(state: SlotState): Promise<void> {
    await this.#destroyParts(state.addresses, state.netnsPath);
    await this.#dropState(state);
    this.#slots.delete(state.addresses.index);
  }

  /** After the namespace is gone: there is nobody left for the rules to refuse. */
  async #dropState(state: SlotState): Promise<void> {
    this.#egress?.closeGuest(state.addresses.hostAddress);
    await state.change;
    // After the service's end there is nobody to change its table; the next start makes it anew.
    if (state.current !== undefined && this.#state !== "closed") {
      await this.#host.writer.apply((batch: Batch) =>
        changePolicy(batch, state.addresses, state.current, undefined),
      );
      state.current = undefined;
    }
    this.#states.delete(state.addresses.hostAddress);
  }

  #slotObject(state: SlotState): NetworkSlot {
    const { addresses, netnsPath } = state;
    let disposal: Promise<void> | undefined;
    const requireHeld = () => {
      if (disposal === undefined) return;
      throw new AenvError({
        code: "network_slot_released",
        status: 409,
        message: `network slot ${addresses.index} has been given back: its policy cannot be changed or read`,
      });
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
      get policy() {
        return (state.current ?? DEFAULT_COMPILED).policy;
      },
      applyPolicy: async (policy) => {
        requireHeld();
        await this.#track(this.#applyPolicy(state, compilePolicy(policy)));
      },
      isolate: async () => {
        requireHeld();
        await this.#track(this.#isolate(state));
      },
      policyReport: async () => {
        requireHeld();
        return await this.#report(state);
      },
      [Symbol.asyncDispose]: () => {
        disposal ??= this.#track(this.#release(state));
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
