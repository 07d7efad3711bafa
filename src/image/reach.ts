import { lookup } from "node:dns/promises";
import { BlockList, isIP } from "node:net";
import { AenvError } from "../lib/errors.ts";

/**
 * Where a registry may send this server. The registry itself is wherever the reference says, as far as the
 * configuration allows it; a redirect or a token server that it names must not be at an internal address,
 * since its answer would come from a network that whoever named the registry may not see.
 */
export interface ReachRules {
  /** `host` (any port) or `host:port`: these may be at internal addresses. */
  readonly internalHosts?: readonly string[];
  /** Further ranges that count as internal: CIDRs of IPv4. */
  readonly deniedCidrs?: readonly string[];
}

/** Not of the public internet: this host, private and shared networks, links, groups, reserved. */
const INTERNAL_IPV4 = [
  "0.0.0.0/8",
  "10.0.0.0/8",
  "100.64.0.0/10",
  "127.0.0.0/8",
  "169.254.0.0/16",
  "172.16.0.0/12",
  "192.168.0.0/16",
  "224.0.0.0/3",
];
const INTERNAL_IPV6 = ["::/127", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"];
/** Prefixes whose addresses stand for an IPv4 address: compatible, mapped, NAT64. */
const EMBEDDING = ["::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"];
const SIX_TO_FOUR = "2002::/16";

function block(cidrs: readonly string[], family: "ipv4" | "ipv6"): BlockList {
  const list = new BlockList();
  for (const cidr of cidrs) {
    const [base = "", bits = ""] = cidr.split("/");
    list.addSubnet(base, Number(bits), family);
  }
  return list;
}

const IPV6 = block(INTERNAL_IPV6, "ipv6");
const EMBEDDED = block(EMBEDDING, "ipv6");
const SIX = block([SIX_TO_FOUR], "ipv6");

/** The eight 16-bit groups of an IPv6 address. */
function groups(address: string): number[] {
  // The URL parser writes embedded IPv4 addresses as groups, too.
  const text = new URL(`http://[${address.replace(/%.*$/, "")}]/`).hostname.slice(1, -1);
  const [head = "", tail] = text.split("::");
  const left = head === "" ? [] : head.split(":");
  const right = tail === undefined || tail === "" ? [] : tail.split(":");
  const fill = tail === undefined ? 0 : 8 - left.length - right.length;
  return [...left, ...Array<string>(fill).fill("0"), ...right].map((group) => Number.parseInt(group, 16));
}

function ipv4Of(high: number, low: number): string {
  return [high >> 8, high & 255, low >> 8, low & 255].join(".");
}

export class Reach {
  readonly #ipv4: BlockList;
  readonly #hosts: ReadonlySet<string>;

  constructor(rules: ReachRules = {}) {
    this.#ipv4 = block([...INTERNAL_IPV4, ...(rules.deniedCidrs ?? [])], "ipv4");
    this.#hosts = new Set(rules.internalHosts?.map((host) => host.toLowerCase()) ?? []);
  }

  /** Whether an address in text form is internal. */
  isInternal(address: string): boolean {
    if (isIP(address) === 4) return this.#ipv4.check(address, "ipv4");
    const plain = address.replace(/%.*$/, "");
    if (IPV6.check(plain, "ipv6")) return true;
    const parts = groups(plain);
    if (EMBEDDED.check(plain, "ipv6")) return this.#ipv4.check(ipv4Of(parts[6]!, parts[7]!), "ipv4");
    return SIX.check(plain, "ipv6") && this.#ipv4.check(ipv4Of(parts[1]!, parts[2]!), "ipv4");
  }

  /**
   * The addresses a URL that a registry named may be asked at: the request goes to one of them, so that a
   * name which changes its mind leads nowhere else. Undefined: by its name, as the configuration trusts the
   * host or a proxy of the environment makes the connection. Error `image_redirect_refused` for an internal
   * address; errors of the resolver as they are.
   */
  async addresses(url: URL, image: string): Promise<readonly string[] | undefined> {
    if (this.#hosts.has(url.host) || this.#hosts.has(url.hostname)) return undefined;
    const name = url.hostname.replace(/^\[|\]$/g, "");
    if (isIP(name) !== 0) {
      if (this.isInternal(name)) throw this.#refusal(url, image);
      return undefined;
    }
    const proxied = hasProxy(url);
    let found: readonly { readonly address: string }[];
    try {
      found = await lookup(name, { all: true });
    } catch (error) {
      // Behind a proxy names of the world need not resolve here.
      if (proxied) return undefined;
      throw error;
    }
    if (found.some(({ address }) => this.isInternal(address))) throw this.#refusal(url, image);
    return proxied ? undefined : found.map(({ address }) => address);
  }

  #refusal(url: URL, image: string): AenvError {
    return new AenvError({
      code: "image_redirect_refused",
      status: 400,
      message: `${image}: the registry names ${url.host}, which is at an internal address: refused`,
      remediation: `if the registry may do so, add "${url.host}" to image.resolver.internal_hosts on the server`,
    });
  }
}

function hasProxy(url: URL): boolean {
  const name = url.protocol === "https:" ? "https_proxy" : "http_proxy";
  return Boolean(process.env[name] || process.env[name.toUpperCase()]);
}
