import { runCommand } from "../lib/command.ts";
import { formatIpv4 } from "../lib/ipv4.ts";
import type { CompiledPolicy } from "./egress-policy.ts";
import type { AddressRange } from "./nft.ts";
import { allowChainOf, outChainOf } from "./ruleset.ts";
import type { RuleCounter } from "./types.ts";

interface Counter {
  readonly packets: number;
  readonly bytes: number;
}

/** Counters of a chain's rules in their order, from `nft --json`. */
async function chainCounters(table: string, chain: string): Promise<Counter[]> {
  const output = await runCommand(["nft", "--json", "list", "chain", "inet", table, chain]);
  const listing = JSON.parse(output) as {
    nftables: { rule?: { expr: { counter?: Counter }[] } }[];
  };
  return listing.nftables.flatMap(({ rule }) => rule?.expr.flatMap(({ counter }) => counter ?? []) ?? []);
}

function describe(
  verdict: string,
  ranges: readonly AddressRange[],
  counters: readonly Counter[],
): RuleCounter[] {
  const text = ranges.map(({ first, last }) =>
    first === last ? formatIpv4(first) : `${formatIpv4(first)}-${formatIpv4(last)}`,
  );
  // Many ranges share one rule.
  const names = counters.length === text.length ? text : [text.join(" ")];
  return names.map((name, i) => ({
    rule: `${verdict} ${name}`,
    packets: counters[i]?.packets ?? 0,
    bytes: counters[i]?.bytes ?? 0,
  }));
}

/** The rules that a policy has in the host's table, with their counters. */
export async function readPolicyCounters(
  table: string,
  slotIndex: number,
  policy: CompiledPolicy,
): Promise<{ rules: RuleCounter[] }> {
  if (policy.deny.length === 0) return { rules: [] };
  const out = await chainCounters(table, outChainOf(slotIndex));
  const allow = policy.allow.length === 0 ? [] : await chainCounters(table, allowChainOf(slotIndex));
  const rest = out.at(-1) ?? { packets: 0, bytes: 0 };
  return {
    rules: [
      ...(policy.allow.length === 0 ? [] : describe("allow", policy.allow, allow)),
      ...describe("deny", policy.deny, out.slice(0, -1)),
      { rule: "allow the rest", packets: rest.packets, bytes: rest.bytes },
    ],
  };
}
