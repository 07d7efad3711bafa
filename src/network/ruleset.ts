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
  counter,
  decide,
  destination,
  destinationNat,
  destinationPort,
  diverted,
  icmpType,
  inDevice,
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

export interface HostRules {
  readonly plan: AddressPlan;
  readonly alwaysDeniedCidrs: readonly string[];
  readonly dnsServer: string;
  /** Ports of the egress proxy and of the name server for restricted guests, at the plan's egress address. */
  readonly proxyPort: number;
  readonly namePort: number;
}

/** What no guest reaches, whatever its policy: this node's pools, the VM link and the configured blocks. */
export function deniedCidrs(plan: AddressPlan, alwaysDeniedCidrs: readonly string[]): string[] {
  return [formatCidr(plan.hostInteraction), formatCidr(plan.veth), formatCidr(VM_LINK), ...alwaysDeniedCidrs];
}

/**
 * The host's table. Devices are told by their group, not by their name: nobody else's are touched. A slot's
 * policy is found by its address in hashed maps, so what a packet costs does not depend on the number of
 * sandboxes; an address that is in no map is refused.
 *
 * `allowed` and `policies` lead to the slot's chains, see {@link changePolicy}. Order: denied, allowed,
 * policy. `restricted`: refused unless named. `filtered`: by domain names, too.
 */
export function hostRuleset(rules: HostRules): string {
  const { plan, alwaysDeniedCidrs, dnsServer, proxyPort, namePort } = rules;
  const group = plan.deviceGroup;
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
  map allowed {
    type ipv4_addr : verdict
  }
  map policies {
    type ipv4_addr : verdict
  }
  chain spoofed {
    type filter hook prerouting priority raw; policy accept;
    iifgroup ${group} meta nfproto ipv6 drop
    iifgroup ${group} fib saddr . iif oif missing drop
  }
  chain guest_refuse {
    counter
    meta l4proto tcp reject with tcp reset
    reject with icmp type admin-prohibited
  }
  chain divert_names {
    ip saddr != @filtered ip saddr vmap @allowed
    meta l4proto { tcp, udp } dnat ip to ${egress}:${namePort}
  }
  chain divert_restricted {
    ip daddr ${dnsServer} meta l4proto { tcp, udp } th dport 53 goto divert_names
    ip daddr @denied return
    fib daddr type local return
    ip saddr vmap @allowed
    ip saddr @filtered tcp dport { 80, 443 } dnat ip to ${egress}:${proxyPort}
  }
  chain divert {
    type nat hook prerouting priority dstnat; policy accept;
    iifgroup ${group} ip saddr @restricted goto divert_restricted
  }
  chain guest_judge {
    ip daddr @denied goto guest_refuse
    ip saddr vmap @allowed
    ip saddr vmap @policies
    goto guest_refuse
  }
  chain guest_to_host {
    ip saddr @restricted meta l4proto { tcp, udp } th dport { 53, 853 } goto guest_refuse
    ct state established,related accept
    ct status dnat ip daddr ${egress} tcp dport ${proxyPort} ip saddr @filtered accept
    ct status dnat ip daddr ${egress} meta l4proto { tcp, udp } th dport ${namePort} ip saddr @restricted accept
    ip daddr ${dnsServer} meta l4proto { tcp, udp } th dport 53 accept
    goto guest_refuse
  }
  chain guest_out {
    ip saddr @restricted meta l4proto { tcp, udp } th dport { 53, 853 } goto guest_judge
    ct state established,related accept
    ip daddr ${dnsServer} meta l4proto { tcp, udp } th dport 53 accept
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

export const allowChainOf = (index: number): string => `allow-${index}`;
export const outChainOf = (index: number): string => `out-${index}`;

/** Which of the slot's parts a policy has in the host's table. */
function partsOf(policy: CompiledPolicy | undefined) {
  const judged = policy !== undefined && policy.deny.length > 0;
  return {
    present: policy !== undefined,
    out: judged,
    allow: judged && policy.allow.length > 0,
    restricted: judged && policy.restricted,
    filtered: judged && policy.restricted && policy.filtered,
  };
}

/**
 * Appends what takes a slot's entry in the host's table from one policy to another; undefined: it has no
 * entry (and is refused everything). The slot's chains, in the words of `nft`:
 *
 *     chain allow-<slot> { ip daddr RANGE counter accept … }               reached by vmap @allowed
 *     chain out-<slot>   { ip daddr RANGE counter goto guest_refuse …      reached by vmap @policies
 *                          counter accept }
 */
export function changePolicy(
  batch: Batch,
  slot: SlotAddresses,
  from: CompiledPolicy | undefined,
  to: CompiledPolicy | undefined,
): void {
  const [old, now] = [partsOf(from), partsOf(to)];
  const address = slot.hostAddress;
  const allowChain = allowChainOf(slot.index);
  const outChain = outChainOf(slot.index);
  const replaced = old.present && (!now.present || old.out !== now.out);

  if (old.allow && !now.allow) batch.deleteAddress("allowed", address);
  if (replaced) batch.deleteAddress("policies", address);
  if (old.allow) batch.flush(allowChain);
  if (old.out) batch.flush(outChain);
  if (old.allow && !now.allow) batch.deleteChain(allowChain);
  if (old.out && !now.out) batch.deleteChain(outChain);

  if (to !== undefined && now.allow) {
    batch.chain(allowChain);
    batch.destinations(allowChain, to.allow, "accept");
    if (!old.allow) batch.addAddress("allowed", address, { jump: allowChain });
  }
  if (to !== undefined && now.out) {
    batch.chain(outChain);
    batch.destinations(outChain, to.deny, { goto: "guest_refuse" });
    batch.rule(outChain, counter, decide("accept"));
  }
  if (now.present && (!old.present || replaced)) {
    batch.addAddress("policies", address, now.out ? { goto: outChain } : "accept");
  }
  for (const set of ["restricted", "filtered"] as const) {
    if (old[set] && !now[set]) batch.deleteAddress(set, address);
    if (!old[set] && now[set]) batch.addAddress(set, address);
  }
}
