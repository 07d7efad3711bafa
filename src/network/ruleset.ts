import { formatCidr, formatIpv4 } from "../lib/ipv4.ts";
import {
  type AddressPlan,
  GATEWAY_ADDRESS,
  GUEST_ADDRESS,
  PEER_NAME,
  type SlotAddresses,
  TAP_NAME,
  VM_LINK,
} from "./address-plan.ts";
import type { CompiledPolicy } from "./egress-policy.ts";
import {
  Batch,
  CT_ESTABLISHED_OR_RELATED,
  CT_INVALID,
  connectionState,
  decide,
  destination,
  destinationNat,
  destinationPort,
  diverted,
  icmpType,
  inDevice,
  ipv4Bytes,
  isIpv6,
  outDevice,
  protocol,
  reject,
  rejectTcp,
  source,
  sourceNat,
} from "./nft.ts";

/** A table's first lines: whatever was there is replaced in the same transaction. */
function replaceTable(name: string, body: string): string {
  return `table inet ${name}\ndelete table inet ${name}\ntable inet ${name} {\n${body}}\n`;
}

/** What one guest may take of things that all guests of a host share. */
export interface GuestLimits {
  /** Tracked connections past the host at a time (what is not TCP counts until the kernel forgets it). 0: no bound. */
  readonly connections: number;
  /** Packets to the node's name server, a second. */
  readonly namePacketsPerSecond: number;
  /** New connections to the egress proxy, a second. */
  readonly webConnectionsPerSecond: number;
}

export const GUEST_LIMITS: GuestLimits = {
  connections: 16_384,
  namePacketsPerSecond: 1000,
  webConnectionsPerSecond: 1000,
};

export interface HostRules {
  readonly plan: AddressPlan;
  readonly alwaysDeniedCidrs: readonly string[];
  readonly dnsServer: string;
  /** Ports of the egress proxy and of the name server for restricted guests, at the plan's egress address. */
  readonly proxyPort: number;
  readonly namePort: number;
  readonly limits: GuestLimits;
}

/** What no guest reaches, whatever its policy: this node's pools, the VM link and the configured blocks. */
export function deniedCidrs(plan: AddressPlan, alwaysDeniedCidrs: readonly string[]): string[] {
  return [formatCidr(plan.hostInteraction), formatCidr(plan.veth), formatCidr(VM_LINK), ...alwaysDeniedCidrs];
}

/** `allow-24` and the like hold (slot, destination cut to 24 bits). */
export const blockSet = (kind: "allow" | "deny", prefixLength: number): string => `${kind}-${prefixLength}`;

/** Every block of a policy has a prefix of one of these lengths: all of IPv4 is never a block of its own. */
const PREFIX_LENGTHS = Array.from({ length: 32 }, (_, i) => 32 - i);

function blockSets(kind: "allow" | "deny"): string {
  return PREFIX_LENGTHS.map(
    (length) => `  set ${blockSet(kind, length)} {
    type ipv4_addr . ipv4_addr
    counter
  }
`,
  ).join("");
}

function blockRules(kind: "allow" | "deny", verdict: string): string {
  return PREFIX_LENGTHS.map((length) => {
    const mask = length === 32 ? "" : ` & ${formatIpv4((0xffffffff << (32 - length)) >>> 0)}`;
    return `    ip saddr . ip daddr${mask} @${blockSet(kind, length)} ${verdict}\n`;
  }).join("");
}

/**
 * The host's table. Devices are told by their group, not by their name: nobody else's are touched.
 *
 * A policy is nothing but elements of hashed sets, found by the slot's address, see {@link changePolicy}. So
 * what a packet costs does not depend on the number of sandboxes, nor does what a change costs: no rule or
 * chain comes or goes. (With a chain per slot behind a verdict map the kernel walks them all at every change:
 * 1,000 of them made it five times slower.) A slot whose address is in no set is refused everything.
 *
 * Order: denied, allowed blocks, denied blocks, open. `restricted`: not open, and DNS is answered by the node.
 * `filtered`: by domain names, too. `refused` counts. `connections`, `names` and `webs` hold what each guest
 * takes of what they share; packets over the limits are refused or dropped.
 */
export function hostRuleset(rules: HostRules): string {
  const { plan, alwaysDeniedCidrs, dnsServer, proxyPort, namePort, limits } = rules;
  const group = plan.deviceGroup;
  const bound =
    limits.connections === 0
      ? ""
      : `    ct state new add @connections { ip saddr ct count over ${limits.connections} } goto guest_refuse\n`;
  const pool = formatCidr(plan.hostInteraction);
  const egress = formatIpv4(plan.egressAddress);
  return replaceTable(
    plan.tableName,
    `  set denied {
    type ipv4_addr
    flags interval
    auto-merge
    elements = { ${deniedCidrs(plan, alwaysDeniedCidrs).join(", ")} }
  }
  set restricted {
    type ipv4_addr
  }
  set filtered {
    type ipv4_addr
  }
  set allowing {
    type ipv4_addr
  }
  set denying {
    type ipv4_addr
  }
  set open {
    type ipv4_addr
  }
  set refused {
    type ipv4_addr
    counter
  }
  set connections {
    type ipv4_addr
    size 65536
    flags dynamic
  }
  set names {
    type ipv4_addr
    size 65536
    flags dynamic, timeout
    timeout 10s
  }
  set webs {
    type ipv4_addr
    size 65536
    flags dynamic, timeout
    timeout 10s
  }
${blockSets("allow")}${blockSets("deny")}  chain spoofed {
    type filter hook prerouting priority raw; policy accept;
    iifgroup ${group} meta nfproto ipv6 drop
    iifgroup ${group} fib saddr . iif oif missing drop
  }
  chain guest_refuse {
    ip saddr @refused counter
    meta l4proto tcp reject with tcp reset
    reject with icmp type admin-prohibited
  }
  chain guest_allow {
${blockRules("allow", "accept")}  }
  chain guest_deny {
${blockRules("deny", "goto guest_refuse")}  }
  chain divert_names {
    ip saddr != @filtered ip saddr @allowing jump guest_allow
    meta l4proto { tcp, udp } dnat ip to ${egress}:${namePort}
  }
  chain divert_restricted {
    ip daddr ${dnsServer} meta l4proto { tcp, udp } th dport 53 goto divert_names
    ip daddr @denied return
    fib daddr type local return
    ip saddr @allowing jump guest_allow
    ip saddr @filtered tcp dport { 80, 443 } dnat ip to ${egress}:${proxyPort}
  }
  chain divert {
    type nat hook prerouting priority dstnat; policy accept;
    iifgroup ${group} ip saddr @restricted goto divert_restricted
  }
  chain guest_judge {
    ip daddr @denied goto guest_refuse
${bound}    ip saddr @allowing jump guest_allow
    ip saddr @denying jump guest_deny
    ip saddr @open accept
    goto guest_refuse
  }
  chain guest_to_host {
    ip daddr ${egress} meta l4proto { tcp, udp } th dport ${namePort} update @names { ip saddr limit rate over ${limits.namePacketsPerSecond}/second burst ${2 * limits.namePacketsPerSecond} packets } drop
    ip daddr ${egress} tcp dport ${proxyPort} ct state new update @webs { ip saddr limit rate over ${limits.webConnectionsPerSecond}/second burst ${4 * limits.webConnectionsPerSecond} packets } drop
    ip saddr @restricted meta l4proto { tcp, udp } th dport { 53, 853 } goto guest_refuse
    ct state established,related accept
    ct status dnat ip daddr ${egress} tcp dport ${proxyPort} ip saddr @filtered accept
    ct status dnat ip daddr ${egress} meta l4proto { tcp, udp } th dport ${namePort} ip saddr @restricted accept
    ip daddr ${dnsServer} meta l4proto { tcp, udp } th dport 53 accept
    goto guest_refuse
  }
  chain guest_known {
    ip saddr @restricted meta l4proto { tcp, udp } th dport { 53, 853 } return
    ct state established,related accept
    ip daddr ${dnsServer} meta l4proto { tcp, udp } th dport 53 accept
  }
  chain guest_out {
    jump guest_known
    goto guest_judge
  }
  chain guest_in {
    ct state established,related accept
    drop
  }
  chain egress_out {
    ct state established,related accept
    ip daddr @denied goto guest_refuse
    fib daddr type local goto guest_refuse
    tcp dport { 80, 443 } accept
    goto guest_refuse
  }
  chain input {
    type filter hook input priority filter; policy accept;
    iifgroup ${group} goto guest_to_host
    ip daddr ${egress} ct state established,related accept
    ip daddr ${egress} goto guest_refuse
  }
  chain segments {
    type filter hook forward priority mangle; policy accept;
    iifgroup ${group} tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
    oifgroup ${group} tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
  }
  chain forward {
    type filter hook forward priority filter; policy accept;
    iifgroup ${group} goto guest_out
    oifgroup ${group} goto guest_in
  }
  chain output {
    type filter hook output priority filter; policy accept;
    ip saddr ${egress} goto egress_out
  }
  chain masquerade_guests {
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr ${pool} oifgroup != ${group} masquerade
  }
`,
  );
}

/** Table of a slot's namespace. */
const NAMESPACE_TABLE = "agentenv";
const TCP = 6;
const UDP = 17;
const ICMP_ECHO_REQUEST = 8;

/**
 * The table of one slot's namespace as one transaction: address translation, and nothing passes that is not
 * the guest's. In the words of `nft`:
 *
 *     chain spoofed    { type filter hook prerouting priority raw
 *                        meta nfproto ipv6 drop
 *                        iifname "tap0" ip saddr != GUEST drop }
 *     chain to_guest   { type nat hook prerouting priority dstnat
 *                        iifname "vpeer" ip saddr HOST_VETH ip daddr SLOT dnat ip to GUEST
 *                        iifname "tap0" ip daddr GATEWAY {tcp,udp} dport 53 dnat ip to DNS_SERVER }
 *     chain from_guest { type nat hook postrouting priority srcnat
 *                        oifname "vpeer" ip saddr GUEST snat ip to SLOT }
 *     chain input      { type filter hook input priority filter; policy drop
 *                        lo, established and echo requests are accepted; the rest is refused }
 *     chain forward    { type filter hook forward priority filter; policy drop
 *                        established accept; invalid drop
 *                        iifname "tap0" oifname "vpeer" accept
 *                        iifname "vpeer" oifname "tap0" ct status dnat accept }
 */
export function namespaceRules(slot: SlotAddresses, dnsServer: number): Uint8Array {
  const batch = new Batch(NAMESPACE_TABLE);
  batch.replaceTable();
  batch.chain("spoofed", { type: "filter", hook: "prerouting", priority: -300, policy: "accept" });
  batch.rule("spoofed", isIpv6, decide("drop"));
  batch.rule("spoofed", inDevice(TAP_NAME), source(GUEST_ADDRESS, false), decide("drop"));
  batch.chain("to_guest", { type: "nat", hook: "prerouting", priority: -100, policy: "accept" });
  batch.rule(
    "to_guest",
    inDevice(PEER_NAME),
    source(slot.hostVeth),
    destination(slot.hostAddress),
    destinationNat(GUEST_ADDRESS),
  );
  for (const transport of [TCP, UDP]) {
    batch.rule(
      "to_guest",
      inDevice(TAP_NAME),
      destination(GATEWAY_ADDRESS),
      protocol(transport),
      destinationPort(53),
      destinationNat(dnsServer),
    );
  }
  batch.chain("from_guest", { type: "nat", hook: "postrouting", priority: 100, policy: "accept" });
  batch.rule("from_guest", outDevice(PEER_NAME), source(GUEST_ADDRESS), sourceNat(slot.hostAddress));
  batch.chain("input", { type: "filter", hook: "input", priority: 0, policy: "drop" });
  batch.rule("input", inDevice("lo"), decide("accept"));
  batch.rule("input", connectionState(CT_ESTABLISHED_OR_RELATED), decide("accept"));
  batch.rule("input", icmpType(ICMP_ECHO_REQUEST), decide("accept"));
  batch.rule("input", protocol(TCP), rejectTcp);
  batch.rule("input", reject);
  batch.chain("forward", { type: "filter", hook: "forward", priority: 0, policy: "drop" });
  batch.rule("forward", connectionState(CT_ESTABLISHED_OR_RELATED), decide("accept"));
  batch.rule("forward", connectionState(CT_INVALID), decide("drop"));
  batch.rule("forward", inDevice(TAP_NAME), outDevice(PEER_NAME), decide("accept"));
  batch.rule("forward", inDevice(PEER_NAME), outDevice(TAP_NAME), diverted, decide("accept"));
  return batch.finish();
}

type Elements = Map<string, Uint8Array[]>;

/** The sets that a slot with the policy is in, with its elements there. */
function elementsOf(slot: SlotAddresses, policy: CompiledPolicy | undefined): Elements {
  const elements: Elements = new Map();
  if (policy === undefined) return elements;
  const own = ipv4Bytes(slot.hostAddress);
  if (policy.allow.length > 0) elements.set("allowing", [own]);
  if (policy.deny.length > 0) elements.set("denying", [own]);
  elements.set(policy.restricted ? "restricted" : "open", [own]);
  if (policy.filtered) elements.set("filtered", [own]);
  for (const kind of ["allow", "deny"] as const) {
    for (const { base, prefixLength } of policy[kind]) {
      const set = blockSet(kind, prefixLength);
      const keys = elements.get(set) ?? [];
      keys.push(Buffer.concat([own, ipv4Bytes(base)]));
      elements.set(set, keys);
    }
  }
  return elements;
}

/** What `from` has and `to` has not. */
function without(from: Elements, to: Elements): Elements {
  const left: Elements = new Map();
  for (const [set, keys] of from) {
    const kept = new Set((to.get(set) ?? []).map((key) => Buffer.from(key).toString("hex")));
    const gone = keys.filter((key) => !kept.has(Buffer.from(key).toString("hex")));
    if (gone.length > 0) left.set(set, gone);
  }
  return left;
}

/**
 * Appends what takes a slot's elements in the host's table from one policy to another; undefined: it has none
 * (and is refused everything). Rules that stay keep their counters; that of refused packets starts anew.
 */
export function changePolicy(
  batch: Batch,
  slot: SlotAddresses,
  from: CompiledPolicy | undefined,
  to: CompiledPolicy | undefined,
): void {
  const [old, now] = [elementsOf(slot, from), elementsOf(slot, to)];
  for (const [set, keys] of without(old, now)) batch.deleteElements(set, keys);
  for (const [set, keys] of without(now, old)) batch.addElements(set, keys);
  const own = ipv4Bytes(slot.hostAddress);
  if (from !== undefined) batch.deleteElements("refused", [own]);
  if (to !== undefined) batch.addElements("refused", [own]);
}
