import type { Socket } from "bun";
import { constantTimeEqual } from "../lib/constant-time.ts";
import { newId } from "../lib/ids.ts";
import { withLogContext } from "../lib/log.ts";
import { AGENT_PORT } from "./access.ts";
import { type Classification, classify, pathOf, splitTarget } from "./classify.ts";
import { Exchange, type ExchangeClient } from "./exchange.ts";
import {
  BodyScanner,
  HttpParseError,
  headerTokens,
  headerValue,
  headerValues,
  parseRequestHead,
  type RequestHead,
  requestFraming,
  wantsKeepAlive,
} from "./http1.ts";
import type { Shared } from "./options.ts";
import { Outlet } from "./outlet.ts";
import { formatPlainError, formatReply } from "./replies.ts";

const EMPTY = Buffer.alloc(0);
/** Control request body that is collected for a caller without a valid key. */
const UNKNOWN_BODY_BYTES = 64 * 1024;
const UNKNOWN_CALLER = "authentication failed: the X-API-Key header is missing, repeated or wrong";

function tooLarge(bytes: number): HttpParseError {
  return new HttpParseError(413, `the request body is larger than ${bytes} bytes`);
}
/** Unread input kept while a request is being answered (pipelining); then the socket is paused. */
const MAX_PIPELINED_BYTES = 64 * 1024;
/** Of a streamed request body that its reader has not taken yet; then the socket is paused. */
const UPLOAD_BUFFER_BYTES = 1024 * 1024;

/** A request body on its way to a handler that reads it as it arrives. */
interface Upload {
  readonly scanner: BodyScanner;
  readonly sink: ReadableStreamDefaultController<Uint8Array>;
  /** The handler does not want the rest. */
  unwanted: boolean;
}

export interface ClientData {
  connection?: Connection;
}

/** One client connection: requests one after the other, or a tunnel. */
export class Connection implements ExchangeClient {
  readonly #shared: Shared;
  readonly #socket: Socket<ClientData>;
  readonly #gone: (connection: Connection) => void;
  readonly outlet: Outlet<ClientData>;
  #input: Buffer = EMPTY;
  #state: "head" | "control-body" | "control-stream" | "busy" | "exchange" | "closing" | "closed" = "head";
  #paused = false;
  #processing = false;
  #exchange: Exchange | undefined;
  #control:
    | {
        head: RequestHead;
        scanner: BodyScanner;
        parts: Buffer[];
        bytes: number;
        maxBytes: number;
        known: boolean;
      }
    | undefined;
  #upload: Upload | undefined;
  /** The request at hand was answered with an error by the connection itself. */
  #refused = false;
  #deadline: number;
  #onDeadline: () => void;

  /** `gone` is told once, when the connection has ended. */
  constructor(shared: Shared, socket: Socket<ClientData>, gone: (connection: Connection) => void) {
    this.#shared = shared;
    this.#socket = socket;
    this.#gone = gone;
    this.outlet = new Outlet(socket);
    this.#deadline = performance.now() + shared.limits.headMs;
    this.#onDeadline = () => this.destroy();
  }

  get idle(): boolean {
    return this.#state === "head";
  }

  /** One timer for all connections: each knows when it is late and what that means. */
  setDeadline(ms: number | undefined, action: () => void = () => this.destroy()): void {
    this.#deadline = ms === undefined ? Number.POSITIVE_INFINITY : performance.now() + ms;
    this.#onDeadline = action;
  }

  sweep(now: number): void {
    if (now < this.#deadline) return;
    this.#deadline = Number.POSITIVE_INFINITY;
    this.#onDeadline();
  }

  pause(): void {
    if (this.#paused || this.#state === "closed") return;
    this.#paused = true;
    this.#socket.pause();
  }

  resume(): void {
    if (!this.#paused || this.#state === "closed") return;
    this.#paused = false;
    this.#socket.resume();
  }

  onData(chunk: Buffer): void {
    if (this.#state === "closing" || this.#state === "closed") return;
    if (this.#state === "exchange" && this.#input.length === 0 && this.#exchange!.takesRequestBytes) {
      const rest = this.#exchange!.onRequestBytes(chunk);
      if (rest.length > 0) this.#input = Buffer.from(rest);
      return;
    }
    this.#input = this.#input.length === 0 ? Buffer.from(chunk) : Buffer.concat([this.#input, chunk]);
    if (this.#state === "head" || this.#state === "control-body" || this.#state === "control-stream")
      this.#process();
    else if (this.#input.length > MAX_PIPELINED_BYTES) this.pause();
  }

  onDrain(): void {
    // It takes what it gets: the time of a client that does not starts anew.
    if (this.#state === "closing" || this.#state === "busy") this.setDeadline(this.#shared.limits.idleMs);
    if (this.outlet.drain()) this.#exchange?.onClientDrained();
  }

  /** The client sent FIN. */
  onEnd(): void {
    if (this.#state === "exchange") this.#exchange!.onClientEnd();
    else if (this.#state === "busy") this.#state = "closing";
    else if (this.#state !== "closing") this.destroy();
  }

  onClose(): void {
    if (this.#state === "closed") return;
    this.#state = "closed";
    this.outlet.close();
    this.#gone(this);
    this.#exchange?.onClientGone();
    this.#endUpload(new Error("the client ended the connection within the request body"));
  }

  #endUpload(reason: Error): void {
    if (this.#upload?.unwanted === false) this.#upload.sink.error(reason);
    this.#upload = undefined;
  }

  /** Cuts the connection so that the client cannot take it for a regular end. */
  destroy(): void {
    if (this.#state === "closed") return;
    this.#socket.terminate();
    this.onClose();
  }

  /** Sends the last bytes and ends. */
  finish(bytes: Uint8Array): void {
    if (this.#state === "closed") return;
    this.#state = "closing";
    this.outlet.write(bytes);
    // Closing with unread input would reset the connection and could take the answer with it: say that
    // nothing more comes, read on and forget what arrives, and close when the client does. A client that
    // takes nothing for a while is cut; one that has everything is let go.
    this.setDeadline(this.#shared.limits.idleMs);
    this.outlet.flushed(() => {
      this.#socket.shutdown();
      this.setDeadline(this.#shared.limits.lingerMs, () => {
        this.#socket.end();
        this.onClose();
      });
    });
    this.resume();
  }

  /** The next request begins when this answer is with the kernel: answers do not pile up for a slow reader. */
  #afterAnswer(): void {
    this.#state = "busy";
    this.setDeadline(this.#shared.limits.idleMs);
    this.outlet.flushed(() => {
      if (this.#state === "busy") this.#nextRequest();
      else if (this.#state === "closing") this.finish(EMPTY);
    });
  }

  endWrites(): void {
    this.outlet.flushed(() => this.#socket.shutdown());
  }

  /** After an exchange: unread bytes it got go back, the next request may begin. */
  exchangeDone(keepAlive: boolean): void {
    this.#exchange = undefined;
    if (this.#state === "closed") return;
    if (!keepAlive || this.#shared.stopping) {
      this.finish(EMPTY);
      return;
    }
    this.#afterAnswer();
  }

  takeInput(): Buffer {
    const input = this.#input;
    this.#input = EMPTY;
    return input;
  }

  giveBack(rest: Buffer): void {
    this.#input = rest;
  }

  #nextRequest(): void {
    this.#state = "head";
    this.setDeadline(this.#shared.limits.idleMs);
    this.resume();
    this.#process();
  }

  /** Works through the unread input as far as it goes. */
  #process(): void {
    if (this.#processing) return;
    this.#processing = true;
    try {
      for (;;) {
        const before = this.#state;
        if (before === "head") {
          if (!this.#readHead()) return;
        } else if (before === "control-body") {
          if (!this.#readControlBody()) return;
        } else if (before === "control-stream") {
          if (!this.#readUpload()) return;
        } else return;
      }
    } catch (error) {
      const status = error instanceof HttpParseError ? error.status : 500;
      const message = error instanceof HttpParseError ? error.message : "internal error";
      if (!(error instanceof HttpParseError)) this.#shared.options.log.error({ err: error }, "front failed");
      this.#refused = true;
      this.#endUpload(new Error(message));
      this.finish(formatPlainError(status, message, { close: true, head: false }));
    } finally {
      this.#processing = false;
    }
  }

  /** Returns false when more input is needed. */
  #readHead(): boolean {
    // Empty lines before a request are allowed and mean nothing.
    while (this.#input[0] === 13 && this.#input[1] === 10) this.#input = this.#input.subarray(2);
    if (this.#input.length === 0) return false;
    const head = parseRequestHead(this.#input);
    if (head === undefined) {
      // From its first byte on a head has a limited time.
      if (this.#deadline > performance.now() + this.#shared.limits.headMs) {
        this.setDeadline(this.#shared.limits.headMs);
      }
      return false;
    }
    // RFC 9112 §3.2. HTTP/1.0 has requests without one.
    const hosts = headerValues(head.headers, "host").length;
    if (hosts > 1) throw new HttpParseError(400, "more than one Host header field");
    if (hosts === 0 && head.minor === 1) throw new HttpParseError(400, "no Host header field");
    this.#input = this.#input.subarray(head.lengthBytes);
    this.setDeadline(undefined);
    const { options } = this.#shared;
    const which = classify(head.target, head.headers, {
      domains: options.domains,
      isControlPath: options.control.hasPath,
    });
    if (which.plane === "data") this.#startExchange(head, which);
    else if (which.plane === "control") this.#startControl(head);
    else if (which.plane === "signed") this.#startSigned(head, which);
    else this.#refuse(head, which);
    return true;
  }

  #hasKey(head: RequestHead): boolean {
    const key = headerValue(head.headers, "x-api-key");
    return key !== undefined && this.#shared.options.apiKeys.some((apiKey) => constantTimeEqual(key, apiKey));
  }

  #refuse(head: RequestHead, which: Extract<Classification, { plane: "invalid" }>): void {
    const isHead = head.method === "HEAD";
    if (which.needsApiKey && !this.#hasKey(head)) {
      this.finish(formatPlainError(401, UNKNOWN_CALLER, { close: true, head: isHead }));
      return;
    }
    const headers = [
      ["Content-Type", "text/plain; charset=utf-8"],
      ["Access-Control-Allow-Origin", "*"],
    ] as const;
    this.finish(formatReply(400, headers, Buffer.from(which.message), { close: true, head: isHead }));
  }

  #startSigned(head: RequestHead, which: Extract<Classification, { plane: "signed" }>): void {
    if (head.method === "OPTIONS") {
      this.#startControl(head);
      return;
    }
    const found = this.#shared.signedUrls.find({ method: head.method, query: which.query });
    if (found.kind === "found") {
      this.#startExchange(head, {
        plane: "data",
        style: "e2b",
        sandboxId: found.sandboxId,
        port: AGENT_PORT,
        target: which.target,
        source: "proxy_header",
      });
      return;
    }
    const isHead = head.method === "HEAD";
    this.finish(
      found.kind === "busy"
        ? formatPlainError(
            429,
            "too many signed URLs at a time; name the sandbox by its host or by headers",
            {
              close: true,
              head: isHead,
              headers: [["Retry-After", "1"]],
            },
          )
        : formatPlainError(401, found.reason, { close: true, head: isHead }),
    );
  }

  // ---- control plane ----

  #startControl(head: RequestHead): void {
    const framing = requestFraming(head);
    const { maxControlBodyBytes } = this.#shared.limits;
    if (
      framing.kind !== "none" &&
      this.#shared.options.control.streamsBody?.(head.method, pathOf(head.target))
    ) {
      this.#startUpload(head, framing);
      return;
    }
    // Without a key nothing that is kept in memory may be large.
    const known = this.#hasKey(head);
    const maxBytes = known ? maxControlBodyBytes : Math.min(UNKNOWN_BODY_BYTES, maxControlBodyBytes);
    if (framing.kind === "length" && framing.bytes > maxBytes) {
      throw known ? tooLarge(maxBytes) : new HttpParseError(401, UNKNOWN_CALLER);
    }
    if (headerTokens(head.headers, "expect").includes("100-continue") && framing.kind !== "none") {
      this.outlet.write(Buffer.from("HTTP/1.1 100 Continue\r\n\r\n"));
    }
    this.#control = { head, scanner: new BodyScanner(framing, 400), parts: [], bytes: 0, maxBytes, known };
    this.#state = "control-body";
    this.setDeadline(this.#shared.limits.bodyIdleMs);
  }

  /** The answer begins at once and reads the body as it arrives; a slow reader stops the client. */
  #startUpload(head: RequestHead, framing: ReturnType<typeof requestFraming>): void {
    if (headerTokens(head.headers, "expect").includes("100-continue")) {
      this.outlet.write(Buffer.from("HTTP/1.1 100 Continue\r\n\r\n"));
    }
    let sink: ReadableStreamDefaultController<Uint8Array> | undefined;
    const body = new ReadableStream<Uint8Array>(
      {
        start: (controller) => {
          sink = controller;
        },
        pull: () => {
          if (this.#state !== "control-stream") return;
          this.setDeadline(this.#shared.limits.bodyIdleMs);
          this.resume();
        },
        cancel: () => {
          if (this.#upload !== undefined) this.#upload.unwanted = true;
        },
      },
      { highWaterMark: UPLOAD_BUFFER_BYTES, size: (chunk) => chunk?.length ?? 0 },
    );
    this.#upload = { scanner: new BodyScanner(framing, 400), sink: sink!, unwanted: false };
    this.#state = "control-stream";
    this.setDeadline(this.#shared.limits.bodyIdleMs);
    void this.#answerControl(head, body);
  }

  #readUpload(): boolean {
    const upload = this.#upload!;
    const { scanner, sink } = upload;
    const input = this.#input;
    const end = scanner.scan(input, 0, (from, to) => {
      if (!upload.unwanted) sink.enqueue(new Uint8Array(input.subarray(from, to)));
    });
    this.#input = input.subarray(end);
    if (!scanner.done) {
      const full = !upload.unwanted && (sink.desiredSize ?? 0) <= 0;
      if (full) this.pause();
      this.setDeadline(full ? undefined : this.#shared.limits.bodyIdleMs);
      return false;
    }
    if (!upload.unwanted) sink.close();
    this.#upload = undefined;
    this.setDeadline(undefined);
    this.#state = "busy";
    return true;
  }

  #readControlBody(): boolean {
    const control = this.#control!;
    const input = this.#input;
    const end = control.scanner.scan(input, 0, (from, to) => {
      control.bytes += to - from;
      if (control.bytes > control.maxBytes) {
        throw control.known ? tooLarge(control.maxBytes) : new HttpParseError(401, UNKNOWN_CALLER);
      }
      control.parts.push(Buffer.from(input.subarray(from, to)));
    });
    this.#input = input.subarray(end);
    if (!control.scanner.done) {
      this.setDeadline(this.#shared.limits.bodyIdleMs);
      return false;
    }
    this.#control = undefined;
    this.setDeadline(undefined);
    this.#state = "busy";
    void this.#answerControl(control.head, Buffer.concat(control.parts));
    return true;
  }

  async #answerControl(head: RequestHead, body: Buffer | ReadableStream<Uint8Array>): Promise<void> {
    const isHead = head.method === "HEAD";
    let bytes: Buffer;
    let close = this.#shared.stopping || !wantsKeepAlive(head);
    try {
      const request = toRequest(head, body);
      const response = await this.#shared.options.control.handle(request);
      const payload = new Uint8Array(await response.arrayBuffer());
      // An answer before the end of the body: what is left of it is not a next request.
      close = close || this.#state === "closing" || this.#upload !== undefined || this.#shared.stopping;
      const headers = [...response.headers].filter(
        ([name]) => name !== "content-length" && name !== "connection",
      );
      bytes = formatReply(response.status, headers, payload, { close, head: isHead });
    } catch (error) {
      const invalid = error instanceof HttpParseError;
      if (!invalid) this.#shared.options.log.error({ err: error }, "control request failed");
      close = true;
      bytes = formatPlainError(invalid ? error.status : 500, invalid ? error.message : "internal error", {
        close,
        head: isHead,
      });
    }
    // The client may have gone meanwhile; what it asked for is done all the same.
    this.#upload = undefined;
    if (this.#isClosed() || this.#refused) return;
    if (close) {
      this.finish(bytes);
      return;
    }
    this.outlet.write(bytes);
    this.#afterAnswer();
  }

  #isClosed(): boolean {
    return this.#state === "closed";
  }

  // ---- data plane ----

  #startExchange(head: RequestHead, which: Extract<Classification, { plane: "data" }>): void {
    // Nothing is paused yet: what comes before the service is reached is kept, up to a bound.
    this.#state = "exchange";
    const exchange = new Exchange(this.#shared, this, head, which);
    this.#exchange = exchange;
    withLogContext({ requestId: newId(), sandboxId: which.sandboxId }, () => exchange.start()).catch(
      (error: unknown) => {
        this.#shared.options.log.error({ err: error }, "proxy exchange failed");
        this.destroy();
      },
    );
  }
}

function toRequest(head: RequestHead, body: Buffer | ReadableStream<Uint8Array>): Request {
  const { target } = splitTarget(head.target);
  const headers = new Headers();
  for (const [name, value] of head.headers) headers.append(name, value);
  if (!target.startsWith("/")) throw new HttpParseError(400, "malformed request target");
  const bodiless = head.method === "GET" || head.method === "HEAD";
  if (["CONNECT", "TRACE", "TRACK"].includes(head.method.toUpperCase())) {
    throw new HttpParseError(405, `method ${head.method} is not allowed`);
  }
  return new Request(`http://localhost${target}`, {
    method: head.method,
    headers,
    ...(body instanceof ReadableStream
      ? { body }
      : bodiless || body.length === 0
        ? {}
        : { body: new Uint8Array(body) }),
  });
}
