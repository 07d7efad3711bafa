/**
 * Transactions for the kernel's packet filter, in its own wire format (netlink, nf_tables: the numbers are
 * those of linux/netfilter/nf_tables.h and nfnetlink.h). Changes go this way instead of through the `nft`
 * program because that starts a process and reads much of the ruleset first: 17 ms, and 100 with 1,000 slots.
 * What is written here is listed by `nft list table` like any other rule.
 */

const NFNL_SUBSYS_NFTABLES = 10;
const BATCH_BEGIN = 0x10;
const BATCH_END = 0x11;
const NFPROTO_INET = 1;
const NFPROTO_IPV4 = 2;
const NLM_F_REQUEST = 0x1;
const NLM_F_ACK = 0x4;
const NLM_F_CREATE = 0x400;
const NLM_F_APPEND = 0x800;
const NESTED = 0x8000;

const Message = {
  newTable: 0,
  delTable: 2,
  newChain: 3,
  delChain: 5,
  newRule: 6,
  delRule: 8,
  newElement: 12,
  delElement: 14,
} as const;

/** One attribute: its number and content (a number is 32 bits, big-endian; a list is nested). */
type Attribute = readonly [type: number, value: number | string | Uint8Array | readonly Attribute[]];

function pad(bytes: number): number {
  return (bytes + 3) & ~3;
}

function attributeBytes([type, value]: Attribute): Buffer {
  let payload: Uint8Array;
  let flags = 0;
  if (typeof value === "number") {
    payload = Buffer.alloc(4);
    (payload as Buffer).writeUInt32BE(value >>> 0);
  } else if (typeof value === "string") {
    payload = Buffer.from(`${value}\0`);
  } else if (value instanceof Uint8Array) {
    payload = value;
  } else {
    flags = NESTED;
    payload = Buffer.concat((value as readonly Attribute[]).map(attributeBytes));
  }
  const length = 4 + payload.length;
  if (length > 0xffff) throw new Error("internal error, please report: a netlink attribute is too long");
  const out = Buffer.alloc(pad(length));
  out.writeUInt16LE(length, 0);
  out.writeUInt16LE(type | flags, 2);
  out.set(payload, 4);
  return out;
}

// ---- expressions ------------------------------------------------------------------------------------

/** One step of a rule. Matches leave the rule when they fail; a verdict ends it. */
export type Expression = Attribute;

const REGISTER = 1;
const REGISTER_2 = 2;

function expression(name: string, data: readonly Attribute[]): Expression {
  return [
    1,
    [
      [1, name],
      [2, data],
    ],
  ];
}

export function ipv4Bytes(address: number): Buffer {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32BE(address);
  return bytes;
}

function hostU32(value: number): Buffer {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(value);
  return bytes;
}

function portBytes(port: number): Buffer {
  const bytes = Buffer.alloc(2);
  bytes.writeUInt16BE(port);
  return bytes;
}

function compare(value: Uint8Array, equal = true): Expression {
  return expression("cmp", [
    [1, REGISTER],
    [2, equal ? 0 : 1],
    [3, [[1, value]]],
  ]);
}

function meta(key: number): Expression {
  return expression("meta", [
    [1, REGISTER],
    [2, key],
  ]);
}

function payload(base: 1 | 2, offset: number, length: number): Expression {
  return expression("payload", [
    [1, REGISTER],
    [2, base],
    [3, offset],
    [4, length],
  ]);
}

function deviceName(name: string): Buffer {
  const bytes = Buffer.alloc(16);
  bytes.write(name);
  return bytes;
}

export const isIpv6: readonly Expression[] = [meta(15), compare(Buffer.of(10))];
const isIpv4: readonly Expression[] = [meta(15), compare(Buffer.of(NFPROTO_IPV4))];
export const inDevice = (name: string): readonly Expression[] => [meta(6), compare(deviceName(name))];
export const outDevice = (name: string): readonly Expression[] => [meta(7), compare(deviceName(name))];
export const protocol = (number: number): readonly Expression[] => [meta(16), compare(Buffer.of(number))];
export const destinationPort = (port: number): readonly Expression[] => [
  payload(2, 2, 2),
  compare(portBytes(port)),
];
export const source = (address: number, equal = true): readonly Expression[] => [
  ...isIpv4,
  payload(1, 12, 4),
  compare(ipv4Bytes(address), equal),
];
export const destination = (address: number): readonly Expression[] => [
  ...isIpv4,
  payload(1, 16, 4),
  compare(ipv4Bytes(address)),
];
export const icmpType = (type: number): readonly Expression[] => [
  ...isIpv4,
  ...protocol(1),
  payload(2, 0, 1),
  compare(Buffer.of(type)),
];

export const CT_INVALID = 1;
export const CT_ESTABLISHED_OR_RELATED = 2 | 4;
const CT_STATUS_DNAT = 1 << 5;

function connection(key: 0 | 2, bits: number): readonly Expression[] {
  return [
    expression("ct", [
      [2, key],
      [1, REGISTER],
    ]),
    expression("bitwise", [
      [1, REGISTER],
      [2, REGISTER],
      [3, 4],
      [4, [[1, hostU32(bits)]]],
      [5, [[1, hostU32(0)]]],
    ]),
    compare(hostU32(0), false),
  ];
}

export const connectionState = (bits: number): readonly Expression[] => connection(0, bits);
export const diverted: readonly Expression[] = connection(2, CT_STATUS_DNAT);

export type Verdict = "accept" | "drop";

export const decide = (verdict: Verdict): Expression =>
  expression("immediate", [
    [1, 0],
    [2, [[2, [[1, verdict === "accept" ? 1 : 0]]]]],
  ]);

function translate(type: 0 | 1, address: number): readonly Expression[] {
  return [
    expression("immediate", [
      [1, REGISTER_2],
      [2, [[1, ipv4Bytes(address)]]],
    ]),
    expression("nat", [
      [1, type],
      [2, NFPROTO_IPV4],
      [3, REGISTER_2],
      [4, REGISTER_2],
    ]),
  ];
}

export const sourceNat = (address: number): readonly Expression[] => translate(0, address);
export const destinationNat = (address: number): readonly Expression[] => translate(1, address);

export const rejectTcp: Expression = expression("reject", [
  [1, 1],
  [2, Buffer.of(0)],
]);
/** Answers with "port unreachable" in the packet's own family. */
export const reject: Expression = expression("reject", [
  [1, 2],
  [2, Buffer.of(1)],
]);

export interface BaseChain {
  readonly type: "filter" | "nat";
  readonly hook: "prerouting" | "input" | "forward" | "output" | "postrouting";
  readonly priority: number;
  readonly policy: "accept" | "drop";
}

const HOOKS = ["prerouting", "input", "forward", "output", "postrouting"];
/** Elements of one message: an attribute cannot be longer than 64 KiB. */
const MAX_ELEMENTS = 1000;

/** Builds one transaction on one table of family inet. Methods append; `finish` gives the bytes to send. */
export class Batch {
  readonly #table: string;
  readonly #parts: Buffer[] = [];

  constructor(table: string) {
    this.#table = table;
    this.#message(BATCH_BEGIN, 0, 0, NFNL_SUBSYS_NFTABLES, []);
  }

  get isEmpty(): boolean {
    return this.#parts.length === 1;
  }

  /** Makes the table anew: whatever was in it goes in the same transaction. */
  replaceTable(): void {
    this.#add(Message.newTable, NLM_F_CREATE, [[1, this.#table]]);
    this.#add(Message.delTable, 0, [[1, this.#table]]);
    this.#add(Message.newTable, NLM_F_CREATE, [[1, this.#table]]);
  }

  /** No error where there is none. */
  removeTable(): void {
    this.#add(Message.newTable, NLM_F_CREATE, [[1, this.#table]]);
    this.#add(Message.delTable, 0, [[1, this.#table]]);
  }

  /** Makes the chain unless it is there. */
  chain(name: string, base?: BaseChain): void {
    const attributes: Attribute[] = [
      [1, this.#table],
      [3, name],
    ];
    if (base !== undefined) {
      attributes.push(
        [
          4,
          [
            [1, HOOKS.indexOf(base.hook)],
            [2, base.priority],
          ],
        ],
        [5, base.policy === "accept" ? 1 : 0],
        [7, base.type],
      );
    }
    this.#add(Message.newChain, NLM_F_CREATE, attributes);
  }

  rule(chain: string, ...steps: readonly (Expression | readonly Expression[])[]): void {
    const expressions = steps.flatMap((step) => (typeof step[0] === "number" ? [step as Expression] : step));
    this.#add(Message.newRule, NLM_F_CREATE | NLM_F_APPEND, [
      [1, this.#table],
      [2, chain],
      [4, expressions as Expression[]],
    ]);
  }

  /** Adds keys to a named set of the table; no error for those that are in it. */
  addElements(set: string, keys: readonly Uint8Array[]): void {
    this.#elements(Message.newElement, NLM_F_CREATE, set, keys);
  }

  /** Every key must be in the set. */
  deleteElements(set: string, keys: readonly Uint8Array[]): void {
    this.#elements(Message.delElement, 0, set, keys);
  }

  /** The whole transaction; the last message asks the kernel for its answer. */
  finish(): Uint8Array {
    const last = this.#parts[this.#parts.length - 1]!;
    last.writeUInt16LE(last.readUInt16LE(6) | NLM_F_ACK, 6);
    this.#message(BATCH_END, 0, 0, NFNL_SUBSYS_NFTABLES, []);
    const total = this.#parts.reduce((sum, part) => sum + part.length, 0);
    const bytes = new Uint8Array(new ArrayBuffer(total));
    let at = 0;
    for (const part of this.#parts) {
      bytes.set(part, at);
      at += part.length;
    }
    return bytes;
  }

  #elements(message: number, flags: number, set: string, keys: readonly Uint8Array[]): void {
    for (let at = 0; at < keys.length; at += MAX_ELEMENTS) {
      const elements = keys.slice(at, at + MAX_ELEMENTS).map((key): Attribute => [1, [[1, [[1, key]]]]]);
      this.#add(message, flags, [
        [1, this.#table],
        [2, set],
        [3, elements],
      ]);
    }
  }

  #add(message: number, flags: number, attributes: readonly Attribute[]): void {
    this.#message((NFNL_SUBSYS_NFTABLES << 8) | message, flags, NFPROTO_INET, 0, attributes);
  }

  /** nlmsghdr (host byte order), nfgenmsg, attributes. The sequence number is the message's place. */
  #message(
    type: number,
    flags: number,
    family: number,
    resource: number,
    attributes: readonly Attribute[],
  ): void {
    const body = Buffer.concat(attributes.map(attributeBytes));
    const message = Buffer.alloc(20 + body.length);
    message.writeUInt32LE(message.length, 0);
    message.writeUInt16LE(type, 4);
    message.writeUInt16LE(NLM_F_REQUEST | flags, 6);
    message.writeUInt32LE(this.#parts.length, 8);
    message.writeUInt8(family, 16);
    message.writeUInt16BE(resource, 18);
    message.set(body, 20);
    this.#parts.push(message);
  }
}
