/** What the proxy and the name server know of a guest, found by its slot's address. */
export interface GuestView {
  readonly slotIndex: number;
  /** Whether HTTP and TLS to this name is allowed, by every policy in force at this moment. */
  allowsWeb(name: string): boolean;
  /** Whether the address is allowed by address rules (a connection to it needs no name). */
  allowsAddress(address: number): boolean;
  /** Whether this name's addresses may be told. */
  allowsQuery(name: string): boolean;
}

/** Address in host byte order. Undefined: no guest of ours has it; nothing is answered. */
export type FindGuest = (slotAddress: number) => GuestView | undefined;
