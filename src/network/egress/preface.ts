import { normaliseName } from "../egress-policy.ts";

/** What the first bytes of a connection say about the name it is for. */
export type Preface =
  | { readonly kind: "incomplete" }
  /** A name in normal form (lower case, no final dot). */
  | { readonly kind: "name"; readonly name: string }
  | { readonly kind: "refused"; readonly reason: string };

/** A connection that has not named its host by then is refused. */
export const MAX_PREFACE_BYTES = 64 * 1024;

const INCOMPLETE: Preface = { kind: "incomplete" };
const refused = (reason: string): Preface => ({ kind: "refused", reason });

function named(text: string, where: string): Preface {
  const name = normaliseName(text);
  return name === undefined ? refused(`${where} is not a domain name`) : { kind: "name", name };
}

/** Reads the TLS server name or the HTTP Host of what a client has sent so far. Keeps nothing. */
export function readPreface(received: Uint8Array): Preface {
  if (received.length === 0) return INCOMPLETE;
  const bytes = received.subarray(0, MAX_PREFACE_BYTES);
  const result = bytes[0] === TLS_HANDSHAKE ? readClientHello(bytes) : readHttpHost(bytes);
  if (result.kind === "incomplete" && bytes.length === MAX_PREFACE_BYTES) {
    return refused(`no host name within ${MAX_PREFACE_BYTES} bytes`);
  }
  return result;
}

// ---- TLS (RFC 8446 sections 4.1.2, 5.1; RFC 6066 section 3) ------------------------------------------

const TLS_HANDSHAKE = 22;
const CLIENT_HELLO = 1;
const MAX_RECORD_BYTES = 16384;
const EXTENSION_SERVER_NAME = 0;

/** Reads checked fields one after the other; past the end it throws. */
class Reader {
  readonly #bytes: Uint8Array;
  #at = 0;

  constructor(bytes: Uint8Array) {
    this.#bytes = bytes;
  }

  get left(): number {
    return this.#bytes.length - this.#at;
  }

  number(size: 1 | 2 | 3): number {
    let value = 0;
    for (const byte of this.take(size)) value = value * 256 + byte;
    return value;
  }

  take(length: number): Uint8Array {
    if (length > this.left) throw new RangeError("a field of the ClientHello is longer than what holds it");
    const start = this.#at;
    this.#at += length;
    return this.#bytes.subarray(start, this.#at);
  }

  vector(lengthSize: 1 | 2): Reader {
    return new Reader(this.take(this.number(lengthSize)));
  }
}

function readClientHello(bytes: Uint8Array): Preface {
  // The message may be cut into records at any place: join their contents.
  const pieces: Uint8Array[] = [];
  let joined = 0;
  let needed = 4;
  for (let at = 0; joined < needed; ) {
    if (at + 5 > bytes.length) return INCOMPLETE;
    const length = bytes[at + 3]! * 256 + bytes[at + 4]!;
    if (bytes[at] !== TLS_HANDSHAKE || bytes[at + 1] !== 3 || length === 0 || length > MAX_RECORD_BYTES) {
      return refused("not a TLS handshake");
    }
    const piece = bytes.subarray(at + 5, at + 5 + length);
    pieces.push(piece);
    joined += piece.length;
    at += 5 + length;
    if (joined >= 4 && needed === 4) {
      const head = Buffer.concat(pieces);
      if (head[0] !== CLIENT_HELLO) return refused("not a TLS ClientHello");
      needed = 4 + head[1]! * 65536 + head[2]! * 256 + head[3]!;
      if (needed > MAX_PREFACE_BYTES) return refused("the TLS ClientHello is too long");
    }
    if (at > bytes.length && joined < needed) return INCOMPLETE;
  }
  try {
    return serverName(Buffer.concat(pieces).subarray(4, needed));
  } catch (error) {
    if (error instanceof RangeError) return refused(error.message);
    throw error;
  }
}

function serverName(hello: Uint8Array): Preface {
  const body = new Reader(hello);
  body.take(2 + 32);
  body.vector(1);
  body.vector(2);
  body.vector(1);
  if (body.left === 0) return refused("the TLS ClientHello names no server");
  const extensions = body.vector(2);
  let found: string | undefined;
  while (extensions.left > 0) {
    const type = extensions.number(2);
    const data = extensions.vector(2);
    if (type !== EXTENSION_SERVER_NAME) continue;
    if (found !== undefined) return refused("the TLS ClientHello names its server twice");
    const list = data.vector(2);
    const isHostName = list.number(1) === 0;
    const size = list.number(2);
    const name = list.take(size);
    if (!isHostName || list.left > 0 || data.left > 0) return refused("the TLS server name cannot be read");
    found = Buffer.from(name).toString("latin1");
  }
  return found === undefined
    ? refused("the TLS ClientHello names no server")
    : named(found, "the TLS server name");
}

// ---- HTTP/1 (RFC 9112 sections 2.2, 3.2, 5) ----------------------------------------------------------

const METHOD = /^[A-Z][A-Z-]{0,31}$/;
const FIELD_NAME = /^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/;

/** Host without its port. */
function hostOf(authority: string): string | undefined {
  return /^([^:/@?#[\]\s]+)(?::\d{1,5})?$/.exec(authority)?.[1];
}

/**
 * Strict where a server might read it another way (bare line feeds, folded lines, a space before a colon, two
 * Hosts): then what we judge and what the server does could differ.
 */
function readHttpHost(bytes: Uint8Array): Preface {
  const buffer = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const end = buffer.indexOf("\r\n\r\n");
  if (end < 0) {
    // Something that is not HTTP need not wait for the time limit.
    const start = buffer.subarray(0, 33).toString("latin1");
    const word = start.split(" ", 1)[0]!;
    const complete = start.includes(" ") || start.length === 33;
    if (complete ? !METHOD.test(word) : !/^[A-Z-]*$/.test(word)) return refused("neither TLS nor HTTP");
    return INCOMPLETE;
  }
  const [requestLine = "", ...fields] = buffer.subarray(0, end).toString("latin1").split("\r\n");
  const parts = requestLine.split(" ");
  const [method = "", target = "", version = ""] = parts;
  if (parts.length !== 3 || !METHOD.test(method) || !/^HTTP\/1\.[01]$/.test(version)) {
    return refused("not an HTTP/1 request");
  }
  if (method === "CONNECT") return refused("CONNECT is not for this port");
  const hosts: string[] = [];
  for (const field of fields) {
    const colon = field.indexOf(":");
    const name = field.slice(0, Math.max(colon, 0));
    if (!FIELD_NAME.test(name) || /[\r\n\0]/.test(field)) return refused("a malformed HTTP header line");
    if (name.toLowerCase() === "host") hosts.push(field.slice(colon + 1).trim());
  }
  const host = hosts.length === 1 ? hostOf(hosts[0]!) : undefined;
  if (host === undefined) return refused("the HTTP request has no single readable Host");
  if (!target.startsWith("/") && target !== "*") {
    // The absolute form overrides Host at the server: both must say the same.
    const authority = /^https?:\/\/([^/?#]*)/i.exec(target)?.[1];
    if (authority === undefined || hostOf(authority)?.toLowerCase() !== host.toLowerCase()) {
      return refused("the HTTP request's target and Host differ");
    }
  }
  return named(host, "the HTTP Host");
}
