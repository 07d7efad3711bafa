import { promises as dns } from "node:dns";
import { parseIpv4 } from "../../lib/ipv4.ts";

/** Addresses a name has now. None: it has no (permitted) IPv4 address, or there is no such name. */
export interface NameAnswer {
  readonly addresses: readonly number[];
  readonly ttlSeconds: number;
}

export interface NamesOptions {
  /** Server to ask, `ADDRESS` or `ADDRESS:PORT`. */
  readonly server: string;
  /** Addresses that are never handed out, whatever the name's owner says. */
  readonly isDenied: (address: number) => boolean;
}

const MAX_NAMES = 10_000;
const MAX_ADDRESSES_PER_NAME = 256;
const MAX_LOOKUPS = 4096;
/** Of one guest: names of a server that does not answer must not keep others from being asked for. */
const MAX_LOOKUPS_PER_GUEST = 64;
const MIN_TTL_SECONDS = 1;
const MAX_TTL_SECONDS = 300;
const NO_ADDRESS_TTL_SECONDS = 5;
/** An address stays a name's own this long after the last answer that held it: guests keep answers, too. */
const PIN_SECONDS = 3600;
const QUERY_TIMEOUT_MS = 2000;
const QUERY_TRIES = 2;
const NO_SUCH_NAME = new Set(["ENOTFOUND", "ENODATA", "NXDOMAIN"]);

interface Entry {
  answer: NameAnswer;
  /** Milliseconds of the monotonic clock. */
  freshUntil: number;
  /** Address to the time until which it counts as the name's. */
  readonly pins: Map<number, number>;
}

/**
 * Names and the addresses they were found to have. A guest is told addresses by this table only, so a
 * connection that names a host and goes to an address the host never had is a lie.
 */
export class Names {
  readonly #resolver: dns.Resolver;
  readonly #isDenied: (address: number) => boolean;
  /** In order of last use: the first goes when there are too many. */
  readonly #entries = new Map<string, Entry>();
  readonly #lookups = new Map<string, Promise<NameAnswer>>();
  readonly #lookupsOf = new Map<number, number>();

  constructor({ server, isDenied }: NamesOptions) {
    this.#resolver = new dns.Resolver({ timeout: QUERY_TIMEOUT_MS, tries: QUERY_TRIES });
    this.#resolver.setServers([server]);
    this.#isDenied = isDenied;
  }

  get size(): number {
    return this.#entries.size;
  }

  /**
   * From the table while the answer lasts, else asked anew. Rejects when the server does not answer, or too
   * many questions of the guest wait for it.
   */
  async resolve(name: string, guest: number): Promise<NameAnswer> {
    const entry = this.#entries.get(name);
    const now = performance.now();
    if (entry !== undefined && entry.freshUntil > now) {
      this.#touch(name, entry);
      const ttlSeconds = Math.ceil((entry.freshUntil - now) / 1000);
      return { addresses: entry.answer.addresses, ttlSeconds };
    }
    let lookup = this.#lookups.get(name);
    if (lookup === undefined) {
      const own = this.#lookupsOf.get(guest) ?? 0;
      if (own >= MAX_LOOKUPS_PER_GUEST || this.#lookups.size >= MAX_LOOKUPS) {
        throw new Error(`${Math.min(own, this.#lookups.size)} names are being looked up already`);
      }
      this.#lookupsOf.set(guest, own + 1);
      lookup = this.#lookup(name).finally(() => this.#ended(name, guest));
      this.#lookups.set(name, lookup);
    }
    return lookup;
  }

  /** Whether the name has the address, or had it lately. Asks anew when it is not known to. */
  async owns(name: string, address: number, guest: number): Promise<boolean> {
    const entry = this.#entries.get(name);
    const pinned = entry?.pins.get(address);
    if (entry !== undefined && pinned !== undefined && pinned > performance.now()) {
      this.#touch(name, entry);
      return true;
    }
    return (await this.resolve(name, guest)).addresses.includes(address);
  }

  #ended(name: string, guest: number): void {
    this.#lookups.delete(name);
    const left = (this.#lookupsOf.get(guest) ?? 1) - 1;
    if (left === 0) this.#lookupsOf.delete(guest);
    else this.#lookupsOf.set(guest, left);
  }

  async #lookup(name: string): Promise<NameAnswer> {
    const answer = await this.#ask(name);
    const now = performance.now();
    const pins = this.#entries.get(name)?.pins ?? new Map<number, number>();
    for (const [address, until] of pins) if (until <= now) pins.delete(address);
    for (const address of answer.addresses) {
      pins.delete(address);
      pins.set(address, now + PIN_SECONDS * 1000);
      if (pins.size > MAX_ADDRESSES_PER_NAME) pins.delete(pins.keys().next().value!);
    }
    this.#touch(name, { answer, freshUntil: now + answer.ttlSeconds * 1000, pins });
    if (this.#entries.size > MAX_NAMES) this.#entries.delete(this.#entries.keys().next().value!);
    return answer;
  }

  async #ask(name: string): Promise<NameAnswer> {
    try {
      const records = await this.#resolver.resolve4(name, { ttl: true });
      const addresses = records
        .map((record) => parseIpv4(record.address))
        .filter((address) => address !== undefined && !this.#isDenied(address)) as number[];
      const ttl = Math.min(...records.map((record) => record.ttl), MAX_TTL_SECONDS);
      return { addresses: [...new Set(addresses)], ttlSeconds: Math.max(ttl, MIN_TTL_SECONDS) };
    } catch (error) {
      const code = error instanceof Error && "code" in error ? String(error.code) : "";
      if (NO_SUCH_NAME.has(code)) return { addresses: [], ttlSeconds: NO_ADDRESS_TTL_SECONDS };
      throw error;
    }
  }

  #touch(name: string, entry: Entry): void {
    this.#entries.delete(name);
    this.#entries.set(name, entry);
  }
}
