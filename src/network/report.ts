import { runCommand } from "../lib/command.ts";
import { formatCidr, formatIpv4, type Ipv4Cidr } from "../lib/ipv4.ts";
import type { SlotAddresses } from "./address-plan.ts";
import type { CompiledPolicy } from "./egress-policy.ts";
import { blockSet } from "./ruleset.ts";
import type { RuleCounter } from "./types.ts";

interface Counter {
  readonly packets: number;
  readonly bytes: number;
}

/** Counters of a set's elements, as `nft get element` prints them (this command knows no JSON output). */
async function elementCounters(
  table: string,
  set: string,
  keys: readonly string[],
): Promise<Map<string, Counter>> {
  const output = await runCommand(["nft", "get", "element", "inet", table, set, `{ ${keys.join(", ")} }`]);
  const counters = new Map<string, Counter>();
  for (const [, key = "", packets, bytes] of output.matchAll(
    /([\d.]+(?: \. [\d.]+)?) counter packets (\d+) bytes (\d+)/g,
  )) {
    counters.set(key, { packets: Number(packets), bytes: Number(bytes) });
  }
  return counters;
}

async function blockCounters(
  table: string,
  slot: SlotAddresses,
  kind: "allow" | "deny",
  blocks: readonly Ipv4Cidr[],
): Promise<RuleCounter[]> {
  const rules: RuleCounter[] = [];
  for (const [prefixLength, group] of Map.groupBy(blocks, (block) => block.prefixLength)) {
    const keyOf = (block: Ipv4Cidr) => `${formatIpv4(slot.hostAddress)} . ${formatIpv4(block.base)}`;
    const counters = await elementCounters(table, blockSet(kind, prefixLength), group.map(keyOf));
    for (const block of group) {
      const counter = counters.get(keyOf(block)) ?? { packets: 0, bytes: 0 };
      rules.push({ rule: `${kind} ${formatCidr(block)}`, ...counter });
    }
  }
  return rules;
}

/** What the host's table has counted for a slot with the policy. */
export async function readPolicyCounters(
  table: string,
  slot: SlotAddresses,
  policy: CompiledPolicy,
): Promise<{ rules: RuleCounter[]; refused: Counter }> {
  const own = formatIpv4(slot.hostAddress);
  return {
    rules: [
      ...(await blockCounters(table, slot, "allow", policy.allow)),
      ...(await blockCounters(table, slot, "deny", policy.deny)),
    ],
    refused: (await elementCounters(table, "refused", [own])).get(own) ?? { packets: 0, bytes: 0 },
  };
}
