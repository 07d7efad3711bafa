/**
 * Transactions for the kernel's packet filter, in its own wire format (netlink, nf_tables: the numbers are
 * those of linux/netfilter/nf_tables.h and nfnetlink.h). Changes go this way instead of through the `nft`
 * program because that reads the whole ruleset first: with 1,000 slots present it takes six times longer.
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
  newSet: 9,
  newElement: 12,
  delElement: 14,
} as const;

const SET_ANONYMOUS = 1;
const SET_CONSTANT = 2;
const SET_INTERVAL = 4;
const ELEMENT_INTERVAL_END = 1;
/** nft's own number for "IPv4 address", so that it lists our sets readably. */
const KEY_TYPE_IPV4 = 7;

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

export type Verdict = "accept" | "drop" | { readonly goto: string } | { readonly jump: string };

function verdictData(verdict: Verdict): Attribute {
  if (verdict === "drop") return [2, [[1, 0]]];
  if (verdict === "accept") return [2, [[1, 1]]];
  const [code, chain] = "goto" in verdict ? [-4, verdict.goto] : [-3, verdict.jump];
  return [
    2,
    [
      [1, code],
      [2, chain],
    ],
  ];
}

export const decide = (verdict: Verdict): Expression =>
  expression("immediate", [
    [1, 0],
    [2, [verdictData(verdict)]],
  ]);

export const counter: Expression = expression("counter", [
  [1, Buffer.alloc(8)],
  [2, Buffer.alloc(8)],
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

/** Inclusive block of IPv4 addresses, host byte order. */
export interface AddressRange {
  readonly first: number;
  readonly last: number;
}

export interface BaseChain {
  readonly type: "filter" | "nat";
  readonly hook: "prerouting" | "input" | "forward" | "output" | "postrouting";
  readonly priority: number;
  readonly policy: "accept" | "drop";
}

const HOOKS = ["prerouting", "input", "forward", "output", "postrouting"];
/** Fewer ranges than this are compared one by one; more go into a set (a search tree). */
const SET_FROM_RANGES = 6;

/** Builds one transaction on one table of family inet. Methods append; `finish` gives the bytes to send. */
export class Batch {
  readonly #table: string;
  readonly #parts: Buffer[] = [];
  #setId = 0;

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

  /** The chain must have no rule and no user left at this point of the transaction. */
  deleteChain(name: string): void {
    this.#add(Message.delChain, 0, [
      [1, this.#table],
      [3, name],
    ]);
  }

  /** Removes the chain's rules. */
  flush(chain: string): void {
    this.#add(Message.delRule, 0, [
      [1, this.#table],
      [2, chain],
    ]);
  }

  rule(chain: string, ...steps: readonly (Expression | readonly Expression[])[]): void {
    const expressions = steps.flatMap((step) => (typeof step[0] === "number" ? [step as Expression] : step));
    this.#add(Message.newRule, NLM_F_CREATE | NLM_F_APPEND, [
      [1, this.#table],
      [2, chain],
      [4, expressions as Expression[]],
    ]);
  }

  /**
   * Rules that give `verdict` to packets to any of the ranges (disjoint, ascending). Each packet is compared
   * with a few ranges or looked up in a tree: the cost grows with the logarithm of their number at most.
   */
  destinations(chain: string, ranges: readonly AddressRange[], verdict: Verdict): void {
    if (ranges.length < SET_FROM_RANGES) {
      for (const range of ranges) this.rule(chain, [...isIpv4, ...inRange(range)], counter, decide(verdict));
      return;
    }
    const id = ++this.#setId;
    this.#add(Message.newSet, NLM_F_CREATE, [
      [1, this.#table],
      [2, "__set%d"],
      [3, SET_ANONYMOUS | SET_CONSTANT | SET_INTERVAL],
      [4, KEY_TYPE_IPV4],
      [5, 4],
      [10, id],
    ]);
    // An interval tree holds where ranges begin and where (behind their last address) they end; one that
    // ends with the address space has no end in the tree.
    const elements: Attribute[] = [];
    if (ranges[0]!.first > 0) elements.push(element(0, [[3, ELEMENT_INTERVAL_END]]));
    for (const { first, last } of ranges) {
      elements.push(element(first, []));
      if (last < 0xffffffff) elements.push(element(last + 1, [[3, ELEMENT_INTERVAL_END]]));
    }
    for (let at = 0; at < elements.length; at += 1000) {
      this.#add(Message.newElement, NLM_F_CREATE, [
        [1, this.#table],
        [2, "__set%d"],
        [4, id],
        [3, elements.slice(at, at + 1000)],
      ]);
    }
    this.rule(
      chain,
      isIpv4,
      payload(1, 16, 4),
      expression("lookup", [
        [1, "__set%d"],
        [2, REGISTER],
        [4, id],
      ]),
      counter,
      decide(verdict),
    );
  }

  /** Adds an address to a named set (no verdict) or verdict map of the table; no error when it is in a set. */
  addAddress(set: string, address: number, verdict?: Verdict): void {
    this.#element(Message.newElement, NLM_F_CREATE, set, [
      element(address, verdict === undefined ? [] : [[2, [verdictData(verdict)]]]),
    ]);
  }

  /** The address must be in the set or map. */
  deleteAddress(set: string, address: number): void {
    this.#element(Message.delElement, 0, set, [element(address, [])]);
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

  #element(message: number, flags: number, set: string, elements: readonly Attribute[]): void {
    this.#add(message, flags, [
      [1, this.#table],
      [2, set],
      [3, elements],
    ]);
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

function element(address: number, more: readonly Attribute[]): Attribute {
  return [1, [[1, [[1, ipv4Bytes(address)]]], ...more]];
}

function inRange({ first, last }: AddressRange): readonly Expression[] {
  if (first === 0 && last === 0xffffffff) return [];
  if (first === last) return [payload(1, 16, 4), compare(ipv4Bytes(first))];
  return [
    payload(1, 16, 4),
    expression("range", [
      [1, REGISTER],
      [2, 0],
      [3, [[1, ipv4Bytes(first)]]],
      [4, [[1, ipv4Bytes(last)]]],
    ]),
  ];
}
