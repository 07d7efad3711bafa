import { isIPv6 } from "node:net";
import { AenvError } from "../lib/errors.ts";
import { formatIpv4, type Ipv4Cidr, parseCidr } from "../lib/ipv4.ts";

/**
 * Where a sandbox may connect to. Entries are in normal form (see {@link parseEgressPolicy}): `a.b.c.d/n`,
 * IPv6 `…/n`, and in `allowOut` also `name` and `*.name`.
 *
 * Order per connection: the node's own denials, then `allowOut`, then `denyOut`, then `base` (`default` is the
 * node's default, which allows).
 */
export interface EgressPolicy {
  readonly base: "default" | "allow" | "deny";
  readonly allowOut: readonly string[];
  readonly denyOut: readonly string[];
}

export const DEFAULT_POLICY: EgressPolicy = Object.freeze({ base: "default", allowOut: [], denyOut: [] });

export interface EgressInput {
  readonly allowOut?: readonly string[] | null | undefined;
  readonly denyOut?: readonly string[] | null | undefined;
  readonly allowInternetAccess?: boolean | null | undefined;
}

/** Entries of one list; more are refused. */
export const MAX_POLICY_ENTRIES = 1000;
const EVERYTHING = "0.0.0.0/0";
const LABEL = /^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$/;
const MAX_NAME_LENGTH = 253;
const LAST_ADDRESS = 0xffffffff;

/** A DNS name in lower case, no final dot; undefined when it is none. */
export function normaliseName(text: string): string | undefined {
  const name = text.toLowerCase().replace(/\.$/, "");
  if (name.length === 0 || name.length > MAX_NAME_LENGTH) return undefined;
  const labels = name.split(".");
  // A name whose last label is a number is an address that somebody mistyped.
  return labels.every((label) => LABEL.test(label)) && !/^\d+$/.test(labels.at(-1)!) ? name : undefined;
}

/** The eight groups of an IPv6 address; the text has been checked. */
function ipv6Groups(text: string): number[] {
  const withoutIpv4 = text.replace(/(\d+)\.(\d+)\.(\d+)\.(\d+)$/, (_, a, b, c, d) => {
    const word = (high: string, low: string) => (Number(high) * 256 + Number(low)).toString(16);
    return `${word(a, b)}:${word(c, d)}`;
  });
  const [head = "", tail] = withoutIpv4.split("::");
  const groups = (part: string) =>
    part === "" ? [] : part.split(":").map((group) => Number.parseInt(group, 16));
  if (tail === undefined) return groups(head);
  const [first, last] = [groups(head), groups(tail)];
  return [...first, ...Array<number>(8 - first.length - last.length).fill(0), ...last];
}

function formatIpv6(groups: readonly number[]): string {
  let best = { start: 0, length: 1 };
  for (let start = 0; start < 8; start++) {
    let length = 0;
    while (start + length < 8 && groups[start + length] === 0) length++;
    if (length > best.length) best = { start, length };
  }
  const hex = (part: readonly number[]) => part.map((group) => group.toString(16)).join(":");
  if (best.length < 2) return hex(groups);
  return `${hex(groups.slice(0, best.start))}::${hex(groups.slice(best.start + best.length))}`;
}

/** `a.b.c.d/n` or IPv6 `…/n` with the bits below the prefix cleared; undefined when `text` is neither. */
function normaliseAddress(text: string): string | undefined {
  const [addressText = "", prefixText, ...rest] = text.split("/");
  if (rest.length > 0) return undefined;
  if (!addressText.includes(":")) {
    const cidr = parseCidr(prefixText === undefined ? `${text}/32` : text);
    return cidr === undefined ? undefined : `${formatIpv4(cidr.base)}/${cidr.prefixLength}`;
  }
  if (!isIPv6(addressText) || addressText.includes("%")) return undefined;
  if (prefixText !== undefined && !/^(?:0|[1-9]\d{0,2})$/.test(prefixText)) return undefined;
  const prefix = prefixText === undefined ? 128 : Number(prefixText);
  if (prefix > 128) return undefined;
  const groups = ipv6Groups(addressText).map((group, i) => {
    const kept = Math.min(16, Math.max(0, prefix - 16 * i));
    return group & (0xffff << (16 - kept)) & 0xffff;
  });
  // An IPv4 address in IPv6 clothes means the IPv4 address: the guest's packets to it are IPv4.
  if (prefix >= 96 && groups.slice(0, 5).every((group) => group === 0) && groups[5] === 0xffff) {
    return `${formatIpv4(groups[6]! * 65536 + groups[7]!)}/${prefix - 96}`;
  }
  return `${formatIpv6(groups)}/${prefix}`;
}

function invalid(field: string, value: string, why: string, remediation: string): AenvError {
  return new AenvError({
    code: "invalid_egress_policy",
    status: 400,
    message: `network.${field}: "${value.slice(0, 300)}" ${why}`,
    remediation,
  });
}

const LOOKS_LIKE_ADDRESS = /[:/]|^[\d.]+$/;

function parseList(
  field: "allowOut" | "denyOut",
  entries: readonly string[],
): { addresses: string[]; domains: string[] } {
  if (entries.length > MAX_POLICY_ENTRIES) {
    throw invalid(
      field,
      `${entries.length} entries`,
      `are more than ${MAX_POLICY_ENTRIES}`,
      "join neighbours to CIDRs",
    );
  }
  const addresses = new Set<string>();
  const domains = new Set<string>();
  for (const entry of entries) {
    const address = normaliseAddress(entry);
    if (address !== undefined) {
      addresses.add(address);
      continue;
    }
    const wildcard = entry.startsWith("*.");
    const name = normaliseName(wildcard ? entry.slice(2) : entry);
    if (name === undefined || LOOKS_LIKE_ADDRESS.test(entry)) {
      throw invalid(
        field,
        entry,
        `is not an IPv4 or IPv6 address or CIDR${field === "allowOut" ? " nor a domain name" : ""}`,
        field === "allowOut"
          ? "write 192.0.2.7, 192.0.2.0/24, 2001:db8::/32, example.com or *.example.com; no scheme, port or path"
          : "write 192.0.2.7, 192.0.2.0/24 or 2001:db8::/32",
      );
    }
    if (field === "denyOut") {
      throw invalid(
        field,
        entry,
        "is a domain name, and domains cannot be denied: an address may have any number of names",
        `deny ${EVERYTHING} and list in allowOut what is wanted`,
      );
    }
    domains.add(wildcard ? `*.${name}` : name);
  }
  return { addresses: [...addresses], domains: [...domains] };
}

/**
 * Checks and normalises a request's egress fields: single addresses become /32 or /128, bits below a prefix
 * are cleared, names are in lower case, duplicates go. `allowInternetAccess` undefined or null: the node's
 * default. IPv6 entries are kept; guests have IPv4 only, so they have nothing to act on.
 * Throws `invalid_egress_policy` (400) with field, value and cure.
 */
export function parseEgressPolicy(input: EgressInput): EgressPolicy {
  const allow = parseList("allowOut", input.allowOut ?? []);
  const deny = parseList("denyOut", input.denyOut ?? []);
  if (allow.domains.length > 0 && !deny.addresses.includes(EVERYTHING)) {
    throw invalid(
      "allowOut",
      allow.domains[0]!,
      `is a domain name, which needs denyOut to contain ${EVERYTHING}: it would allow nothing that is not allowed anyway`,
      `add "${EVERYTHING}" to denyOut`,
    );
  }
  const access = input.allowInternetAccess ?? undefined;
  return {
    base: access === undefined ? "default" : access ? "allow" : "deny",
    allowOut: [...allow.addresses, ...allow.domains],
    denyOut: deny.addresses,
  };
}

/** Inclusive block of IPv4 addresses, host byte order. */
export interface AddressRange {
  readonly first: number;
  readonly last: number;
}

/** Blocks of IPv4 addresses, joined and ascending. */
export function mergeRanges(cidrs: readonly string[]): AddressRange[] {
  const ranges = cidrs
    .map(parseCidr)
    .filter((cidr) => cidr !== undefined)
    .map(({ base, addressCount }) => ({ first: base, last: base + addressCount - 1 }))
    .sort((a, b) => a.first - b.first);
  const merged: { first: number; last: number }[] = [];
  for (const range of ranges) {
    const previous = merged.at(-1);
    if (previous !== undefined && range.first <= previous.last + 1) {
      previous.last = Math.max(previous.last, range.last);
    } else {
      merged.push({ ...range });
    }
  }
  return merged;
}

export function inRanges(ranges: readonly AddressRange[], address: number): boolean {
  return ranges.some(({ first, last }) => address >= first && address <= last);
}

/** A policy in the form that is enforced. */
export interface CompiledPolicy {
  readonly policy: EgressPolicy;
  /** IPv4 that is allowed whatever is denied. */
  readonly allow: readonly Ipv4Cidr[];
  /** IPv4 that is refused when it is not in `allow`. Empty when nothing is denied, or everything. */
  readonly deny: readonly Ipv4Cidr[];
  /** What is not named is refused: then DNS is answered for allowed names only. */
  readonly restricted: boolean;
  /** HTTP and TLS go through the proxy, which reads the name. Implies `restricted`. */
  readonly filtered: boolean;
  allowsAddress(address: number): boolean;
  allowsName(name: string): boolean;
}

/**
 * Checks once more what it is given (a stored policy may have been changed): an entry that is not understood
 * is an error and never a rule less.
 */
export function compilePolicy(input: EgressPolicy): CompiledPolicy {
  const access = { default: undefined, allow: true, deny: false }[input.base];
  const policy = parseEgressPolicy({ ...input, allowInternetAccess: access });
  const names = new Set<string>();
  const suffixes = new Set<string>();
  const addresses: string[] = [];
  for (const entry of policy.allowOut) {
    if (normaliseAddress(entry) !== undefined) addresses.push(entry);
    else if (entry.startsWith("*.")) suffixes.add(entry.slice(2));
    else names.add(entry);
  }
  const ipv4 = (cidrs: readonly string[]) => cidrs.map(parseCidr).filter((cidr) => cidr !== undefined);
  const coversAll = (ranges: readonly AddressRange[]) =>
    ranges[0]?.first === 0 && ranges[0].last === LAST_ADDRESS;
  const allowed = mergeRanges(addresses);
  // Allowed goes before denied: with everything allowed, nothing else matters.
  const open = coversAll(allowed);
  const restricted = !open && (policy.base === "deny" || coversAll(mergeRanges(policy.denyOut)));
  const deny = open || restricted ? [] : ipv4(policy.denyOut);
  return {
    policy,
    allow: restricted || deny.length > 0 ? ipv4(addresses) : [],
    deny,
    restricted,
    filtered: restricted && names.size + suffixes.size > 0,
    allowsAddress: (address) => inRanges(allowed, address),
    allowsName(name) {
      if (names.has(name)) return true;
      if (suffixes.size === 0) return false;
      for (let dot = name.indexOf("."); dot >= 0; dot = name.indexOf(".", dot + 1)) {
        if (suffixes.has(name.slice(dot + 1))) return true;
      }
      return false;
    },
  };
}
