/** The little of the DNS wire format (RFC 1035 section 4) that answering address queries takes. */

export interface DnsQuery {
  readonly id: number;
  readonly recursionDesired: boolean;
  /** In lower case, no final dot; `""` is the root. */
  readonly name: string;
  readonly type: number;
  readonly class: number;
  /** The question section as it came: repeated in the answer, letter case and all. */
  readonly question: Uint8Array;
}

export const DNS_TYPE_A = 1;
export const DNS_CLASS_IN = 1;

export const DnsCode = { ok: 0, malformed: 1, serverFailure: 2, notImplemented: 4, refused: 5 } as const;
export type DnsCode = (typeof DnsCode)[keyof typeof DnsCode];

const HEADER_BYTES = 12;
const POINTER_TO_QUESTION = 0xc00c;
/** With the longest name this fits the 512 bytes that any resolver takes by UDP. */
export const MAX_UDP_ANSWERS = 15;

/** Undefined: not a query with exactly one question (anything else is not answered at all). */
export function readQuery(message: Uint8Array): DnsQuery | undefined {
  if (message.length < HEADER_BYTES) return undefined;
  const view = Buffer.from(message.buffer, message.byteOffset, message.byteLength);
  const flags = view.readUInt16BE(2);
  const isPlainQuery = (flags & 0xf800) === 0;
  if (!isPlainQuery || view.readUInt16BE(4) !== 1) return undefined;
  const labels: string[] = [];
  let at = HEADER_BYTES;
  for (;;) {
    const length = view[at];
    // A question has nothing before it that a pointer could lead to.
    if (length === undefined || length > 63 || at - HEADER_BYTES > 254) return undefined;
    at += 1;
    if (length === 0) break;
    if (at + length > view.length) return undefined;
    labels.push(view.subarray(at, at + length).toString("latin1"));
    at += length;
  }
  if (at + 4 > view.length) return undefined;
  return {
    id: view.readUInt16BE(0),
    recursionDesired: (flags & 0x0100) !== 0,
    name: labels.join(".").toLowerCase(),
    type: view.readUInt16BE(at),
    class: view.readUInt16BE(at + 2),
    question: Uint8Array.from(view.subarray(HEADER_BYTES, at + 4)),
  };
}

/** Addresses in host byte order, as IPv4 address records of the query's name. */
export function writeAnswer(
  query: DnsQuery,
  code: DnsCode,
  addresses: readonly number[] = [],
  ttlSeconds = 0,
): Buffer {
  const records = Buffer.alloc(addresses.length * 16);
  for (const [i, address] of addresses.entries()) {
    const at = i * 16;
    records.writeUInt16BE(POINTER_TO_QUESTION, at);
    records.writeUInt16BE(DNS_TYPE_A, at + 2);
    records.writeUInt16BE(DNS_CLASS_IN, at + 4);
    records.writeUInt32BE(ttlSeconds, at + 6);
    records.writeUInt16BE(4, at + 10);
    records.writeUInt32BE(address, at + 12);
  }
  const header = Buffer.alloc(HEADER_BYTES);
  header.writeUInt16BE(query.id, 0);
  header.writeUInt16BE(0x8080 | (query.recursionDesired ? 0x0100 : 0) | code, 2);
  header.writeUInt16BE(1, 4);
  header.writeUInt16BE(addresses.length, 6);
  return Buffer.concat([header, query.question, records]);
}
