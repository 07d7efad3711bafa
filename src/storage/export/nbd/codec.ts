/**
 * The NBD wire format as functions over byte arrays, no I/O. All integers are big-endian.
 * Source: the NBD protocol document of the NetworkBlockDevice project (doc/proto.md), fixed newstyle
 * negotiation, simple and structured replies.
 */

/** First 16 bytes from the server: "NBDMAGIC" and "IHAVEOPT". */
const NBD_MAGIC_HI = 0x4e42444d;
const NBD_MAGIC_LO = 0x41474943;
const OPTION_MAGIC_HI = 0x49484156;
const OPTION_MAGIC_LO = 0x454f5054;
const OPTION_REPLY_MAGIC_HI = 0x0003e889;
const OPTION_REPLY_MAGIC_LO = 0x045565a9;
const REQUEST_MAGIC = 0x25609513;
const SIMPLE_REPLY_MAGIC = 0x67446698;
const STRUCTURED_REPLY_MAGIC = 0x668e33ef;

export const HandshakeFlag = { fixedNewstyle: 1, noZeroes: 2 } as const;

export const Option = {
  exportName: 1,
  abort: 2,
  list: 3,
  startTls: 5,
  info: 6,
  go: 7,
  structuredReply: 8,
  listMetaContext: 9,
  setMetaContext: 10,
} as const;

export const OptionReply = {
  ack: 1,
  server: 2,
  info: 3,
  metaContext: 4,
  errUnsupported: 0x80000001,
  errInvalid: 0x80000003,
  errUnknown: 0x80000006,
  errTooBig: 0x80000009,
} as const;

const InfoType = { export: 0, name: 1, blockSize: 3 } as const;

export const TransmissionFlag = {
  hasFlags: 1 << 0,
  readOnly: 1 << 1,
  sendFlush: 1 << 2,
  sendFua: 1 << 3,
  sendTrim: 1 << 5,
  sendWriteZeroes: 1 << 6,
  sendDf: 1 << 7,
  canMultiConn: 1 << 8,
} as const;

export const Command = {
  read: 0,
  write: 1,
  disconnect: 2,
  flush: 3,
  trim: 4,
  writeZeroes: 6,
  blockStatus: 7,
} as const;

export const CommandFlag = { fua: 1 << 0, noHole: 1 << 1, df: 1 << 2, reqOne: 1 << 3 } as const;

/** Error numbers of the protocol (they do not depend on the host's errno.h). */
export const NbdErrno = {
  none: 0,
  EPERM: 1,
  EIO: 5,
  ENOMEM: 12,
  EINVAL: 22,
  ENOSPC: 28,
  ENOTSUP: 95,
  ESHUTDOWN: 108,
} as const;
export type NbdErrno = (typeof NbdErrno)[keyof typeof NbdErrno];

const ReplyChunk = { offsetData: 1, blockStatus: 5, error: 0x8001 } as const;
/** The one metadata context there is: which parts of the device hold data. */
export const ALLOCATION_CONTEXT = "base:allocation";
const ALLOCATION_CONTEXT_ID = 1;
const STATE_HOLE_AND_ZERO = 3;
const REPLY_FLAG_DONE = 1;

/** Largest payload of one read or write, told to the client as its maximum block size. */
export const MAX_PAYLOAD_BYTES = 32 << 20;
/** Requests of any alignment are served; this is what clients are told to prefer. */
export const MIN_BLOCK_BYTES = 512;
export const PREFERRED_BLOCK_BYTES = 4096;
/** An option with more data than this cannot be meant seriously (names are at most 4096 bytes). */
export const MAX_OPTION_BYTES = 64 << 10;
const MAX_NAME_BYTES = 4096;

export const GREETING_BYTES = 18;
export const CLIENT_FLAGS_BYTES = 4;
export const OPTION_HEADER_BYTES = 16;
export const REQUEST_BYTES = 28;
export const SIMPLE_REPLY_BYTES = 16;
/** Header of a structured data chunk: chunk header and the data's offset. */
export const DATA_CHUNK_HEADER_BYTES = 28;

/** What the peer sent is not the protocol: the connection has to end. */
export class NbdProtocolError extends Error {
  constructor(message: string) {
    super(message);
    this.name = "NbdProtocolError";
  }
}

export function readU16(bytes: Uint8Array, at: number): number {
  return (bytes[at]! << 8) | bytes[at + 1]!;
}

export function readU32(bytes: Uint8Array, at: number): number {
  return ((bytes[at]! << 24) | (bytes[at + 1]! << 16) | (bytes[at + 2]! << 8) | bytes[at + 3]!) >>> 0;
}

function writeU16(bytes: Uint8Array, at: number, value: number): void {
  bytes[at] = value >>> 8;
  bytes[at + 1] = value;
}

function writeU32(bytes: Uint8Array, at: number, value: number): void {
  bytes[at] = value >>> 24;
  bytes[at + 1] = value >>> 16;
  bytes[at + 2] = value >>> 8;
  bytes[at + 3] = value;
}

function writeU64(bytes: Uint8Array, at: number, value: number): void {
  writeU32(bytes, at, Math.floor(value / 0x1_0000_0000));
  writeU32(bytes, at + 4, value % 0x1_0000_0000);
}

/** Server greeting, {@link GREETING_BYTES} long. */
export function encodeGreeting(): Uint8Array {
  const out = new Uint8Array(GREETING_BYTES);
  writeU32(out, 0, NBD_MAGIC_HI);
  writeU32(out, 4, NBD_MAGIC_LO);
  writeU32(out, 8, OPTION_MAGIC_HI);
  writeU32(out, 12, OPTION_MAGIC_LO);
  writeU16(out, 16, HandshakeFlag.fixedNewstyle | HandshakeFlag.noZeroes);
  return out;
}

/** Returns whether the client wants the 124 reserved bytes after an EXPORT_NAME answer left out. */
export function decodeClientFlags(bytes: Uint8Array, at: number): { noZeroes: boolean } {
  const flags = readU32(bytes, at);
  const known = HandshakeFlag.fixedNewstyle | HandshakeFlag.noZeroes;
  if ((flags & ~known) !== 0) throw new NbdProtocolError(`unknown client flags 0x${flags.toString(16)}`);
  if ((flags & HandshakeFlag.fixedNewstyle) === 0) {
    throw new NbdProtocolError("client does not speak the fixed newstyle handshake");
  }
  return { noZeroes: (flags & HandshakeFlag.noZeroes) !== 0 };
}

export interface OptionHeader {
  readonly option: number;
  readonly lengthBytes: number;
}

export function decodeOptionHeader(bytes: Uint8Array, at: number): OptionHeader {
  if (readU32(bytes, at) !== OPTION_MAGIC_HI || readU32(bytes, at + 4) !== OPTION_MAGIC_LO) {
    throw new NbdProtocolError("bad option magic");
  }
  const lengthBytes = readU32(bytes, at + 12);
  if (lengthBytes > MAX_OPTION_BYTES) {
    throw new NbdProtocolError(`option data of ${lengthBytes} bytes is over ${MAX_OPTION_BYTES}`);
  }
  return { option: readU32(bytes, at + 8), lengthBytes };
}

export function encodeOptionReply(option: number, type: number, data: Uint8Array = new Uint8Array(0)) {
  const out = new Uint8Array(20 + data.length);
  writeU32(out, 0, OPTION_REPLY_MAGIC_HI);
  writeU32(out, 4, OPTION_REPLY_MAGIC_LO);
  writeU32(out, 8, option);
  writeU32(out, 12, type);
  writeU32(out, 16, data.length);
  out.set(data, 20);
  return out;
}

/** An error answer may carry a sentence for people. */
export function encodeOptionError(option: number, type: number, message: string): Uint8Array {
  return encodeOptionReply(option, type, new TextEncoder().encode(message));
}

/** Data of INFO and GO: the export's name and the kinds of information asked for; undefined if malformed. */
export function decodeInfoRequest(data: Uint8Array): { name: string; wants: number[] } | undefined {
  if (data.length < 6) return undefined;
  const nameBytes = readU32(data, 0);
  if (nameBytes > MAX_NAME_BYTES || data.length < 6 + nameBytes) return undefined;
  const count = readU16(data, 4 + nameBytes);
  if (data.length !== 6 + nameBytes + 2 * count) return undefined;
  const wants = Array.from({ length: count }, (_, i) => readU16(data, 6 + nameBytes + 2 * i));
  return { name: new TextDecoder().decode(data.subarray(4, 4 + nameBytes)), wants };
}

/** Data of LIST_META_CONTEXT and SET_META_CONTEXT; undefined if malformed. */
export function decodeMetaContexts(data: Uint8Array): { name: string; queries: string[] } | undefined {
  if (data.length < 8) return undefined;
  const nameBytes = readU32(data, 0);
  if (nameBytes > MAX_NAME_BYTES || data.length < 8 + nameBytes) return undefined;
  const name = new TextDecoder().decode(data.subarray(4, 4 + nameBytes));
  const count = readU32(data, 4 + nameBytes);
  const queries: string[] = [];
  let at = 8 + nameBytes;
  for (let i = 0; i < count; i++) {
    if (at + 4 > data.length) return undefined;
    const length = readU32(data, at);
    at += 4;
    if (length > MAX_NAME_BYTES || at + length > data.length) return undefined;
    queries.push(new TextDecoder().decode(data.subarray(at, at + length)));
    at += length;
  }
  return at === data.length ? { name, queries } : undefined;
}

/** One answer to either option: the context is there, under this number. */
export function encodeMetaContext(option: number): Uint8Array {
  const text = new TextEncoder().encode(ALLOCATION_CONTEXT);
  const data = new Uint8Array(4 + text.length);
  writeU32(data, 0, option === Option.setMetaContext ? ALLOCATION_CONTEXT_ID : 0);
  data.set(text, 4);
  return encodeOptionReply(option, OptionReply.metaContext, data);
}

export interface ExportDescription {
  readonly name: string;
  readonly sizeBytes: number;
  readonly flags: number;
}

/** The answers to INFO and GO before the final acknowledgement. */
export function encodeInfoReplies(option: number, description: ExportDescription, wants: readonly number[]) {
  const general = new Uint8Array(12);
  writeU16(general, 0, InfoType.export);
  writeU64(general, 2, description.sizeBytes);
  writeU16(general, 10, description.flags);
  const blockSize = new Uint8Array(14);
  writeU16(blockSize, 0, InfoType.blockSize);
  writeU32(blockSize, 2, MIN_BLOCK_BYTES);
  writeU32(blockSize, 6, PREFERRED_BLOCK_BYTES);
  writeU32(blockSize, 10, MAX_PAYLOAD_BYTES);
  const replies = [
    encodeOptionReply(option, OptionReply.info, general),
    encodeOptionReply(option, OptionReply.info, blockSize),
  ];
  if (wants.includes(InfoType.name)) {
    const text = new TextEncoder().encode(description.name);
    const name = new Uint8Array(2 + text.length);
    writeU16(name, 0, InfoType.name);
    name.set(text, 2);
    replies.push(encodeOptionReply(option, OptionReply.info, name));
  }
  return replies;
}

/** One answer to LIST. */
export function encodeListEntry(name: string): Uint8Array {
  const text = new TextEncoder().encode(name);
  const data = new Uint8Array(4 + text.length);
  writeU32(data, 0, text.length);
  data.set(text, 4);
  return encodeOptionReply(Option.list, OptionReply.server, data);
}

/** Answer to EXPORT_NAME: it has no reply header and no way to say no. */
export function encodeExportNameReply(description: ExportDescription, noZeroes: boolean): Uint8Array {
  const out = new Uint8Array(noZeroes ? 10 : 134);
  writeU64(out, 0, description.sizeBytes);
  writeU16(out, 8, description.flags);
  return out;
}

/** A request of the transmission phase. Reused between calls: copy what must outlive the next decode. */
export interface NbdRequest {
  flags: number;
  command: number;
  cookieHi: number;
  cookieLo: number;
  /** Exact up to 2^53; larger values stay larger than any export. */
  offsetBytes: number;
  lengthBytes: number;
}

export function newRequest(): NbdRequest {
  return { flags: 0, command: 0, cookieHi: 0, cookieLo: 0, offsetBytes: 0, lengthBytes: 0 };
}

/** Decodes the {@link REQUEST_BYTES} bytes at `at` into `into`. */
export function decodeRequest(bytes: Uint8Array, at: number, into: NbdRequest): void {
  const magic = readU32(bytes, at);
  if (magic !== REQUEST_MAGIC) throw new NbdProtocolError(`bad request magic 0x${magic.toString(16)}`);
  into.flags = readU16(bytes, at + 4);
  into.command = readU16(bytes, at + 6);
  into.cookieHi = readU32(bytes, at + 8);
  into.cookieLo = readU32(bytes, at + 12);
  into.offsetBytes = readU32(bytes, at + 16) * 0x1_0000_0000 + readU32(bytes, at + 20);
  into.lengthBytes = readU32(bytes, at + 24);
}

export type Cookie = Pick<NbdRequest, "cookieHi" | "cookieLo">;

/** Writes a simple reply's header at `at`; returns its size. */
export function encodeSimpleReply(out: Uint8Array, at: number, cookie: Cookie, error: NbdErrno): number {
  writeU32(out, at, SIMPLE_REPLY_MAGIC);
  writeU32(out, at + 4, error);
  writeU32(out, at + 8, cookie.cookieHi);
  writeU32(out, at + 12, cookie.cookieLo);
  return SIMPLE_REPLY_BYTES;
}

function encodeChunkHeader(
  out: Uint8Array,
  at: number,
  cookie: Cookie,
  type: number,
  done: boolean,
  lengthBytes: number,
): void {
  writeU32(out, at, STRUCTURED_REPLY_MAGIC);
  writeU16(out, at + 4, done ? REPLY_FLAG_DONE : 0);
  writeU16(out, at + 6, type);
  writeU32(out, at + 8, cookie.cookieHi);
  writeU32(out, at + 12, cookie.cookieLo);
  writeU32(out, at + 16, lengthBytes);
}

/** Header of a chunk with `dataBytes` of the device's content at `offsetBytes`; the data follows it. */
export function encodeDataChunkHeader(
  out: Uint8Array,
  at: number,
  cookie: Cookie,
  offsetBytes: number,
  dataBytes: number,
  done: boolean,
): number {
  encodeChunkHeader(out, at, cookie, ReplyChunk.offsetData, done, 8 + dataBytes);
  writeU64(out, at + 20, offsetBytes);
  return DATA_CHUNK_HEADER_BYTES;
}

/** Pieces of one answer to BLOCK_STATUS. */
export const MAX_STATUS_EXTENTS = 1024;

export function statusChunkBytes(extents: number): number {
  return 24 + 8 * extents;
}

/** The whole answer to BLOCK_STATUS; returns its size, see {@link statusChunkBytes}. */
export function encodeStatusChunk(
  out: Uint8Array,
  at: number,
  cookie: Cookie,
  extents: readonly { readonly lengthBytes: number; readonly kind: "data" | "hole" }[],
): number {
  encodeChunkHeader(out, at, cookie, ReplyChunk.blockStatus, true, 4 + 8 * extents.length);
  writeU32(out, at + 20, ALLOCATION_CONTEXT_ID);
  for (const [i, { lengthBytes, kind }] of extents.entries()) {
    writeU32(out, at + 24 + 8 * i, lengthBytes);
    writeU32(out, at + 28 + 8 * i, kind === "hole" ? STATE_HOLE_AND_ZERO : 0);
  }
  return statusChunkBytes(extents.length);
}

export const ERROR_CHUNK_BYTES = 26;

/** The last chunk of a structured reply that failed, without a text. {@link ERROR_CHUNK_BYTES} long. */
export function encodeErrorChunk(out: Uint8Array, at: number, cookie: Cookie, error: NbdErrno): number {
  encodeChunkHeader(out, at, cookie, ReplyChunk.error, true, 6);
  writeU32(out, at + 20, error);
  writeU16(out, at + 24, 0);
  return ERROR_CHUNK_BYTES;
}
