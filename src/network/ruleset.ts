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

/** A table's first lines: whatever was there is replaced in the same transaction. */
function replaceTable(name: string, body: string): string {
  return `table inet ${name}\ndelete table inet ${name}\ntable inet ${name} {\n${body}}\n`;
}

export interface HostRules {
  readonly plan: AddressPlan;
  readonly alwaysDeniedCidrs: readonly string[];
  readonly dnsServer: string;
}

/**
 * The host's table. Devices are told by their group, not by their name: nobody else's are touched, and
 * the number of rules a packet meets does not depend on the number of sandboxes.
 */
export function hostRuleset({ plan, alwaysDeniedCidrs, dnsServer }: HostRules): string {
  const group = plan.deviceGroup;
  const pool = formatCidr(plan.hostInteraction);
  const denied = [pool, formatCidr(plan.veth), formatCidr(VM_LINK), ...alwaysDeniedCidrs];
  return replaceTable(
    plan.tableName,
    `  set denied {
    type ipv4_addr
    flags interval
    auto-merge
    elements = { ${denied.join(", ")} }
  }
  chain spoofed {
    type filter hook prerouting priority raw; policy accept;
    iifgroup ${group} meta nfproto ipv6 drop
    iifgroup ${group} fib saddr . iif oif missing drop
  }
  chain guest_refuse {
    meta l4proto tcp reject with tcp reset
    reject with icmp type admin-prohibited
  }
  chain guest_to_host {
    ct state established,related accept
    ip daddr ${dnsServer} meta l4proto { tcp, udp } th dport 53 accept
    goto guest_refuse
  }
  chain guest_out {
    ct state established,related accept
    ip daddr ${dnsServer} meta l4proto { tcp, udp } th dport 53 accept
    ip daddr @denied goto guest_refuse
    accept
  }
  chain guest_in {
    ct state established,related accept
    drop
  }
  chain input {
    type filter hook input priority filter; policy accept;
    iifgroup ${group} goto guest_to_host
  }
  chain forward {
    type filter hook forward priority filter; policy accept;
    iifgroup ${group} goto guest_out
    oifgroup ${group} goto guest_in
  }
  chain masquerade_guests {
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr ${pool} oifgroup != ${group} masquerade
  }
`,
  );
}

/** The table of one slot's namespace: address translation, and nothing passes that is not the guest's. */
export function namespaceRuleset(slot: SlotAddresses, dnsServer: string): string {
  const guest = formatIpv4(GUEST_ADDRESS);
  const host = formatIpv4(slot.hostAddress);
  return replaceTable(
    "agentenv",
    `  chain spoofed {
    type filter hook prerouting priority raw; policy accept;
    meta nfproto ipv6 drop
    iifname "${TAP_NAME}" ip saddr != ${guest} drop
  }
  chain to_guest {
    type nat hook prerouting priority dstnat; policy accept;
    iifname "${PEER_NAME}" ip saddr ${formatIpv4(slot.hostVeth)} ip daddr ${host} dnat ip to ${guest}
    iifname "${TAP_NAME}" ip daddr ${formatIpv4(GATEWAY_ADDRESS)} meta l4proto { tcp, udp } th dport 53 dnat ip to ${dnsServer}
  }
  chain from_guest {
    type nat hook postrouting priority srcnat; policy accept;
    oifname "${PEER_NAME}" ip saddr ${guest} snat ip to ${host}
  }
  chain input {
    type filter hook input priority filter; policy drop;
    iifname "lo" accept
    ct state established,related accept
    icmp type echo-request accept
    meta l4proto tcp reject with tcp reset
    reject
  }
  chain forward {
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
    ct state invalid drop
    iifname "${TAP_NAME}" oifname "${PEER_NAME}" accept
    iifname "${PEER_NAME}" oifname "${TAP_NAME}" ct status dnat accept
  }
`,
  );
}
