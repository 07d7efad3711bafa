/** IPv4 addresses as numbers in host byte order, and blocks of them. */
export interface Ipv4Cidr {
  /** First address of the block. */
  readonly base: number;
  readonly prefixLength: number;
  readonly addressCount: number;
}

const OCTET = /^(?:0|[1-9]\d{0,2})$/;

/** Undefined when `text` is not four decimal octets without leading zeros. */
export function parseIpv4(text: string): number | undefined {
  const parts = text.split(".");
  if (parts.length !== 4) return undefined;
  let value = 0;
  for (const part of parts) {
    const octet = Number(part);
    if (!OCTET.test(part) || octet > 255) return undefined;
    value = value * 256 + octet;
  }
  return value;
}

export function formatIpv4(address: number): string {
  return [24, 16, 8, 0].map((shift) => (address >>> shift) & 255).join(".");
}

/** `a.b.c.d/n`; bits below the prefix are cleared. Undefined when malformed (a plain address is, too). */
export function parseCidr(text: string): Ipv4Cidr | undefined {
  const [addressText, prefixText, ...rest] = text.split("/");
  const address = parseIpv4(addressText ?? "");
  if (address === undefined || prefixText === undefined || rest.length > 0) return undefined;
  if (!OCTET.test(prefixText) || Number(prefixText) > 32) return undefined;
  const prefixLength = Number(prefixText);
  const addressCount = 2 ** (32 - prefixLength);
  return { base: address - (address % addressCount), prefixLength, addressCount };
}

export function formatCidr(cidr: Ipv4Cidr): string {
  return `${formatIpv4(cidr.base)}/${cidr.prefixLength}`;
}

export function cidrsOverlap(a: Ipv4Cidr, b: Ipv4Cidr): boolean {
  return a.base < b.base + b.addressCount && b.base < a.base + a.addressCount;
}

export function cidrContains(cidr: Ipv4Cidr, address: number): boolean {
  return address >= cidr.base && address < cidr.base + cidr.addressCount;
}
