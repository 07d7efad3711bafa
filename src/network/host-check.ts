import { tryCommand } from "../lib/command.ts";
import { cidrsOverlap, type Ipv4Cidr, parseCidr } from "../lib/ipv4.ts";
import type { Logger } from "../lib/log.ts";

/** What a line says at most in the log, and how many lines. */
const MAX_LINES = 5;
const MAX_LINE_LENGTH = 200;
/** An address or block; 0.0.0.0/0 overlaps all and says nothing. */
const BLOCK = /\b\d{1,3}(?:\.\d{1,3}){3}(?:\/\d{1,2})?\b/g;

function touches(line: string, pools: readonly Ipv4Cidr[]): boolean {
  return [...line.matchAll(BLOCK)].some(([text]) => {
    const cidr = parseCidr(text.includes("/") ? text : `${text}/32`);
    return cidr !== undefined && cidr.prefixLength > 0 && pools.some((pool) => cidrsOverlap(cidr, pool));
  });
}

/** Routes (of `ip -4 route show table all`) to parts of the pools that are not slots' nor the egress address. */
export function foreignRoutes(listing: string, pools: readonly Ipv4Cidr[], egressAddress: string): string[] {
  return listing
    .split("\n")
    .map((line) => line.trim())
    .filter((line) => {
      if (/ dev veth-\d+\b/.test(line) || line.startsWith(`local ${egressAddress} `)) return false;
      const destination = /^(?:(?:local|broadcast|unreachable|blackhole|prohibit) )?([\d./]+)/.exec(
        line,
      )?.[1];
      return destination !== undefined && touches(destination, pools);
    });
}

/** Rules (of `nft list ruleset`) of other tables than ours that name parts of the pools. */
export function foreignRules(listing: string, pools: readonly Ipv4Cidr[]): string[] {
  const found: string[] = [];
  let table = "";
  for (const line of listing.split("\n")) {
    const opened = /^table (\S+ \S+) \{/.exec(line)?.[1];
    if (opened !== undefined) table = opened;
    // Ours: a table of this or another server, or a rule for our devices in somebody else's chain (nft does
    // not show iptables' comments).
    if (/^inet agentenv-/.test(table) || line.includes('"veth-*"')) continue;
    if (opened === undefined && touches(line, pools)) found.push(`table ${table}: ${line.trim()}`);
  }
  return found;
}

/**
 * Tells the log of what on this host uses our address pools, too: a network that is routed there is cut off
 * from guests or takes their packets, a rule may refuse them. Never rejects: it is advice.
 */
export async function adviseOnPools(
  pools: readonly Ipv4Cidr[],
  egressAddress: string,
  log: Logger,
): Promise<void> {
  const [routes, rules] = await Promise.all([
    tryCommand(["ip", "-4", "route", "show", "table", "all"]),
    tryCommand(["nft", "list", "ruleset"]),
  ]);
  const cut = (lines: readonly string[]) =>
    lines.slice(0, MAX_LINES).map((line) => line.slice(0, MAX_LINE_LENGTH));
  const overlapping = foreignRoutes(routes.stdout, pools, egressAddress);
  if (overlapping.length > 0) {
    log.warn(
      { routes: cut(overlapping) },
      "this host has routes into the address pools of its sandboxes: choose other pools in [network.internal]",
    );
  }
  const naming = foreignRules(rules.stdout, pools);
  if (naming.length > 0) {
    log.warn({ rules: cut(naming) }, "firewall rules of others name the address pools of our sandboxes");
  }
}
