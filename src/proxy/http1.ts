/**
 * HTTP/1.1 message heads and body framing (RFC 9112), as pure functions over buffers. The proxy passes
 * bodies through byte for byte, so this finds where a message ends and never touches what is inside.
 */

/** Header fields in the order and spelling they came in. */
export type RawHeaders = ReadonlyArray<readonly [name: string, value: string]>;

export interface RequestHead {
  readonly method: string;
  readonly target: string;
  /** Minor version: 1 for HTTP/1.1, 0 for HTTP/1.0. */
  readonly minor: 0 | 1;
  readonly headers: RawHeaders;
  /** Bytes of the head, the empty line included. */
  readonly lengthBytes: number;
}

export interface ResponseHead {
  readonly minor: 0 | 1;
  readonly status: number;
  readonly reason: string;
  readonly headers: RawHeaders;
  readonly lengthBytes: number;
}

/** Malformed or oversized input; `status` is what a server answers. */
export class HttpParseError extends Error {
  readonly status: number;
  constructor(status: number, message: string) {
    super(message);
    this.name = "HttpParseError";
    this.status = status;
  }
}

export const MAX_HEAD_BYTES = 128 * 1024;
const MAX_HEADER_COUNT = 1000;
/** Registered methods have at most 17 (IANA's registry). */
const MAX_METHOD_BYTES = 32;

const TOKEN = /^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/;
// Field values: visible characters, blank, tab and obs-text; never CR, LF or NUL.
const VALUE = /^[\t\x20-\x7e\x80-\xff]*$/;

const END_OF_HEAD = Buffer.from("\r\n\r\n");

/** Index behind the empty line, or -1 when it has not come yet. */
function headEnd(buffer: Buffer): number {
  const at = buffer.indexOf(END_OF_HEAD);
  if (at < 0 ? buffer.length > MAX_HEAD_BYTES : at > MAX_HEAD_BYTES) {
    throw new HttpParseError(431, `the message head is larger than ${MAX_HEAD_BYTES} bytes`);
  }
  return at < 0 ? -1 : at + END_OF_HEAD.length;
}

/** Names in lower case of headers that were parsed here: one request's are looked at dozens of times. */
const lowerNames = new WeakMap<RawHeaders, readonly string[]>();

/** Field names in lower case, in order. */
export function lowerCaseNames(headers: RawHeaders): readonly string[] {
  return lowerNames.get(headers) ?? headers.map(([name]) => name.toLowerCase());
}

function parseHeaderLines(lines: readonly string[]): RawHeaders {
  if (lines.length > MAX_HEADER_COUNT) {
    throw new HttpParseError(431, `more than ${MAX_HEADER_COUNT} header fields`);
  }
  const lower: string[] = [];
  const headers = lines.map((line) => {
    const colon = line.indexOf(":");
    const name = line.slice(0, colon);
    if (colon <= 0 || !TOKEN.test(name)) throw new HttpParseError(400, "malformed header field");
    const value = line.slice(colon + 1).trim();
    if (!VALUE.test(value)) throw new HttpParseError(400, `malformed value of header field ${name}`);
    lower.push(name.toLowerCase());
    return [name, value] as const;
  });
  lowerNames.set(headers, lower);
  return headers;
}

/** Undefined while the head is incomplete. */
export function parseRequestHead(buffer: Buffer): RequestHead | undefined {
  const end = headEnd(buffer);
  if (end < 0) return undefined;
  const [first, ...rest] = buffer.toString("latin1", 0, end - 4).split("\r\n");
  const parts = first!.split(" ");
  const [method, target, version] = parts;
  if (parts.length !== 3 || !TOKEN.test(method!) || target === "" || !VALUE.test(target!)) {
    throw new HttpParseError(400, "malformed request line");
  }
  if (method!.length > MAX_METHOD_BYTES) {
    throw new HttpParseError(501, `the request method is longer than ${MAX_METHOD_BYTES} bytes`);
  }
  if (version !== "HTTP/1.1" && version !== "HTTP/1.0") {
    throw new HttpParseError(505, `unsupported protocol version ${version!.slice(0, 16)}`);
  }
  return {
    method: method!,
    target: target!,
    minor: version === "HTTP/1.1" ? 1 : 0,
    headers: parseHeaderLines(rest),
    lengthBytes: end,
  };
}

const STATUS_LINE = /^HTTP\/1\.([01]) (\d{3})(?: ([\t\x20-\x7e\x80-\xff]*))?$/;

export function parseResponseHead(buffer: Buffer): ResponseHead | undefined {
  const end = headEnd(buffer);
  if (end < 0) return undefined;
  const [first, ...rest] = buffer.toString("latin1", 0, end - 4).split("\r\n");
  const match = STATUS_LINE.exec(first!);
  if (match === null) throw new HttpParseError(502, "malformed status line");
  return {
    minor: match[1] === "1" ? 1 : 0,
    status: Number(match[2]),
    reason: match[3] ?? "",
    headers: parseHeaderLines(rest),
    lengthBytes: end,
  };
}

/** All values of a field, in order. `name` in lower case. */
export function headerValues(headers: RawHeaders, name: string): string[] {
  const values: string[] = [];
  const names = lowerCaseNames(headers);
  for (let i = 0; i < names.length; i++) if (names[i] === name) values.push(headers[i]![1]);
  return values;
}

/** The field's only value; undefined when absent or repeated with different values. */
export function headerValue(headers: RawHeaders, name: string): string | undefined {
  const values = headerValues(headers, name);
  return values.length > 0 && values.every((value) => value === values[0]) ? values[0] : undefined;
}

/** Comma-separated tokens of all fields of that name, in lower case. */
export function headerTokens(headers: RawHeaders, name: string): string[] {
  const values = headerValues(headers, name);
  if (values.length === 0) return values;
  return values
    .flatMap((value) => value.split(","))
    .map((token) => token.trim().toLowerCase())
    .filter((token) => token !== "");
}

/** Whether the client wants to send another request on the same connection. */
export function wantsKeepAlive(head: RequestHead): boolean {
  const tokens = headerTokens(head.headers, "connection");
  return head.minor === 1 ? !tokens.includes("close") : tokens.includes("keep-alive");
}

export type Framing =
  | { readonly kind: "none" }
  | { readonly kind: "length"; readonly bytes: number }
  | { readonly kind: "chunked" }
  /** Response only: the body ends with the connection. */
  | { readonly kind: "close" };

function declaredFraming(headers: RawHeaders, status: number): Framing | undefined {
  const codings = headerTokens(headers, "transfer-encoding");
  const lengths = headerValues(headers, "content-length").flatMap((value) => value.split(","));
  if (codings.length > 0) {
    // Both together is how requests are smuggled: refuse instead of guessing.
    if (lengths.length > 0) throw new HttpParseError(status, "both Transfer-Encoding and Content-Length");
    if (codings.at(-1) !== "chunked" || codings.length > 1) {
      throw new HttpParseError(
        status === 400 ? 501 : status,
        `unsupported transfer coding ${codings.join(", ")}`,
      );
    }
    return { kind: "chunked" };
  }
  if (lengths.length === 0) return undefined;
  const distinct = new Set(lengths.map((value) => value.trim()));
  const [only] = distinct;
  if (distinct.size !== 1 || !/^\d{1,15}$/.test(only!)) {
    throw new HttpParseError(status, "malformed Content-Length");
  }
  return { kind: "length", bytes: Number(only) };
}

export function requestFraming(head: RequestHead): Framing {
  const framing = declaredFraming(head.headers, 400) ?? { kind: "none" };
  return framing.kind === "length" && framing.bytes === 0 ? { kind: "none" } : framing;
}

export function responseFraming(head: ResponseHead, requestMethod: string): Framing {
  if (requestMethod === "HEAD" || head.status === 204 || head.status === 304) return { kind: "none" };
  const framing = declaredFraming(head.headers, 502) ?? { kind: "close" };
  return framing.kind === "length" && framing.bytes === 0 ? { kind: "none" } : framing;
}

const MAX_CHUNK_LINE_BYTES = 4096;
const MAX_TRAILER_BYTES = 64 * 1024;
const CR = 13;
const LF = 10;

/** Follows a body over any number of buffers and says where it ends. */
export class BodyScanner {
  readonly #status: number;
  #state: "length" | "close" | "size" | "data" | "data-end" | "trailer" | "done";
  #left: number;
  /** The chunk-size or trailer line seen so far. */
  #line = "";
  #trailerBytes = 0;

  /** `status` is the one a malformed body is reported with. */
  constructor(framing: Framing, status: number) {
    this.#status = status;
    this.#left = framing.kind === "length" ? framing.bytes : 0;
    this.#state =
      framing.kind === "none"
        ? "done"
        : framing.kind === "length"
          ? "length"
          : framing.kind === "close"
            ? "close"
            : "size";
  }

  get done(): boolean {
    return this.#state === "done";
  }

  /** True when the end of the connection is the regular end of the body. */
  get endsWithConnection(): boolean {
    return this.#state === "close";
  }

  /**
   * Looks at `buffer` from `from` on; returns the index behind the last byte that belongs to this body.
   * `onData(start, end)` is told the ranges that are content (chunk sizes and trailers are not).
   */
  scan(buffer: Buffer, from: number, onData?: (start: number, end: number) => void): number {
    let at = from;
    while (at < buffer.length && this.#state !== "done") {
      switch (this.#state) {
        case "close":
          onData?.(at, buffer.length);
          return buffer.length;
        case "length":
        case "data": {
          const take = Math.min(this.#left, buffer.length - at);
          onData?.(at, at + take);
          at += take;
          this.#left -= take;
          if (this.#left === 0) this.#state = this.#state === "length" ? "done" : "data-end";
          break;
        }
        case "data-end": {
          this.#line += String.fromCharCode(buffer[at++]!);
          if (this.#line === "\r\n") {
            this.#line = "";
            this.#state = "size";
          } else if (this.#line !== "\r") this.#fail("chunk is longer than its size says");
          break;
        }
        case "size":
        case "trailer": {
          const limit = this.#state === "size" ? MAX_CHUNK_LINE_BYTES : MAX_TRAILER_BYTES;
          const newline = buffer.indexOf(LF, at);
          const stop = newline < 0 ? buffer.length : newline + 1;
          if (this.#line.length + (stop - at) > limit) this.#fail("chunk size line or trailer is too long");
          this.#line += buffer.toString("latin1", at, stop);
          at = stop;
          if (newline >= 0) this.#endOfLine();
          break;
        }
      }
    }
    return at;
  }

  #endOfLine(): void {
    const line = this.#line;
    this.#line = "";
    if (line.charCodeAt(line.length - 2) !== CR) this.#fail("line does not end with CR LF");
    if (this.#state === "trailer") {
      this.#trailerBytes += line.length;
      if (this.#trailerBytes > MAX_TRAILER_BYTES) this.#fail("trailers are too long");
      if (line === "\r\n") this.#state = "done";
      return;
    }
    const match = /^([0-9a-fA-F]{1,13})[\t ]*(?:;.*)?\r\n$/.exec(line);
    if (match === null) this.#fail("malformed chunk size");
    this.#left = Number.parseInt(match![1]!, 16);
    this.#state = this.#left === 0 ? "trailer" : "data";
  }

  #fail(reason: string): never {
    throw new HttpParseError(this.#status, `malformed chunked body: ${reason}`);
  }
}

/** Writes a head back to bytes, the empty line included. */
export function formatHead(startLine: string, headers: RawHeaders): Buffer {
  let text = `${startLine}\r\n`;
  for (const [name, value] of headers) text += `${name}: ${value}\r\n`;
  return Buffer.from(`${text}\r\n`, "latin1");
}
