/** What the node's two egress servers did for one guest since its slot was given to it. */
export interface GuestLedger {
  /** Connections joined to a named host, and connections cut. */
  readonly connections: { readonly relayed: number; readonly refused: number };
  /** Questions: answered (also "no such name"), refused by policy, not answered by the DNS server. */
  readonly names: { readonly answered: number; readonly refused: number; readonly failed: number };
  /** The last refusals, oldest first: when (milliseconds since the epoch) and what. */
  readonly recent: readonly { readonly atMs: number; readonly what: string }[];
}

type Count = "relayed" | "connectionRefused" | "nameAnswered" | "nameRefused" | "nameFailed";

const MAX_RECENT = 16;
/** A guest chooses the names it asks for: they are cut. */
const MAX_TEXT = 200;

interface Entry {
  readonly counts: Record<Count, number>;
  readonly recent: { atMs: number; what: string }[];
}

/** Ledgers by slot address (host byte order); one is begun with its first line and ends with the slot. */
export class Ledgers {
  readonly #entries = new Map<number, Entry>();

  count(guest: number, what: Count): void {
    this.#of(guest).counts[what]++;
  }

  refusal(guest: number, kind: "connectionRefused" | "nameRefused", what: string): void {
    const { counts, recent } = this.#of(guest);
    counts[kind]++;
    recent.push({ atMs: Date.now(), what: what.slice(0, MAX_TEXT) });
    if (recent.length > MAX_RECENT) recent.shift();
  }

  read(guest: number): GuestLedger {
    const counts = this.#entries.get(guest)?.counts;
    const recent = this.#entries.get(guest)?.recent ?? [];
    return {
      connections: { relayed: counts?.relayed ?? 0, refused: counts?.connectionRefused ?? 0 },
      names: {
        answered: counts?.nameAnswered ?? 0,
        refused: counts?.nameRefused ?? 0,
        failed: counts?.nameFailed ?? 0,
      },
      recent: recent.map((entry) => ({ ...entry })),
    };
  }

  forget(guest: number): void {
    this.#entries.delete(guest);
  }

  #of(guest: number): Entry {
    let entry = this.#entries.get(guest);
    if (entry === undefined) {
      entry = {
        counts: { relayed: 0, connectionRefused: 0, nameAnswered: 0, nameRefused: 0, nameFailed: 0 },
        recent: [],
      };
      this.#entries.set(guest, entry);
    }
    return entry;
  }
}
