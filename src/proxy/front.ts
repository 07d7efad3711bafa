import type { Socket, SocketHandler, TCPSocketListener } from "bun";
import { constantTimeEqual } from "../lib/constant-time.ts";
import { AenvError } from "../lib/errors.ts";
import { newId } from "../lib/ids.ts";
import { type Logger, withLogContext } from "../lib/log.ts";
import type { Orchestrator } from "../orchestrator/types.ts";
import {
  AGENT_PORT,
  authorizeData,
  type DataRequest,
  forwardedRequestHeaders,
  forwardedResponseHeaders,
  isHostOnly,
} from "./access.ts";
import { type Classification, classify, type DataSource, pathOf, splitTarget } from "./classify.ts";
import {
  BodyScanner,
  formatHead,
  HttpParseError,
  headerTokens,
  headerValue,
  headerValues,
  parseRequestHead,
  parseResponseHead,
  type RequestHead,
  type ResponseHead,
  requestFraming,
  responseFraming,
} from "./http1.ts";
import { Outlet } from "./outlet.ts";
import {
  faults,
  formatFault,
  formatPlainError,
  formatReply,
  isNavigation,
  type ProxyFault,
  portClosed,
} from "./replies.ts";
import { SignedUrls } from "./signed.ts";

/*
 * The server's one listener. It reads HTTP/1.1 from raw sockets because a sandbox's traffic must pass
 * untouched: trailers, early hints, header spelling, half-closed tunnels, resets and backpressure in both
 * directions, none of which survive Request/Response objects. Control-plane requests are small JSON calls;
 * they are collected and handed to the API as ordinary Request objects.
 */

export interface FrontOptions {
  readonly hostname: string;
  readonly port: number;
  /** Sandbox host domains, lower case. */
  readonly domains: readonly string[];
  readonly apiKeys: readonly string[];
  readonly control: {
    handle(request: Request): Promise<Response>;
    hasPath(path: string): boolean;
    /** True when the answer to a request reads the body as it arrives. Absent: all bodies are collected. */
    streamsBody?(method: string, path: string): boolean;
  };
  readonly orchestrator: Pick<
    Orchestrator,
    "access" | "accessToken" | "trafficToken" | "route" | "autoResume" | "get" | "list"
  >;
  /** Told of every finished data-plane exchange. */
  readonly onExchange?: (exchange: ExchangeReport) => void;
  readonly log: Logger;
  readonly limits?: Partial<FrontLimits>;
}

export interface ExchangeReport {
  readonly source: DataSource;
  readonly method: string;
  /** What the client got; 499 when it went away before there was an answer. */
  readonly status: number;
  readonly seconds: number;
}

export interface FrontLimits {
  /** A client that does not finish its request head. */
  readonly headMs: number;
  /** An idle keep-alive connection. */
  readonly idleMs: number;
  /** A client that does not close after its last answer. */
  readonly lingerMs: number;
  readonly connectMs: number;
  /** Request body without a byte. */
  readonly bodyIdleMs: number;
  /** From the end of the request body to the response head. */
  readonly responseHeadMs: number;
  /** A peer that takes nothing of what waits for it: a service the request body, one end of a tunnel the last bytes. */
  readonly stallMs: number;
  readonly autoResumeMs: number;
  readonly maxConnections: number;
  /** Exchanges with one sandbox at a time. */
  readonly maxPerSandbox: number;
  readonly maxControlBodyBytes: number;
}

const DEFAULT_LIMITS: FrontLimits = {
  headMs: 30_000,
  idleMs: 75_000,
  lingerMs: 5_000,
  connectMs: 5_000,
  bodyIdleMs: 30_000,
  responseHeadMs: 30_000,
  stallMs: 300_000,
  autoResumeMs: 60_000,
  maxConnections: 20_000,
  maxPerSandbox: 4096,
  maxControlBodyBytes: 8 * 1024 * 1024,
};

export interface Front {
  readonly hostname: string;
  readonly port: number;
  readonly connections: number;
  /** Stops accepting, lets running requests end for `graceMs`, then cuts what is left. */
  stop(graceMs: number): Promise<void>;
}

const EMPTY = Buffer.alloc(0);
/** Control request body that is collected for a caller without a valid key. */
const UNKNOWN_BODY_BYTES = 64 * 1024;
const UNKNOWN_CALLER = "authentication failed: the X-API-Key header is missing, repeated or wrong";

function tooLarge(bytes: number): HttpParseError {
  return new HttpParseError(413, `the request body is larger than ${bytes} bytes`);
}
/** Interim responses to one request, all together: a few hints, or a sign of life now and then for hours. */
const MAX_INTERIM_BYTES = 128 * 1024;
/** Unread input kept while a request is being answered (pipelining); then the socket is paused. */
const MAX_PIPELINED_BYTES = 64 * 1024;
/** Of a streamed request body that its reader has not taken yet; then the socket is paused. */
const UPLOAD_BUFFER_BYTES = 1024 * 1024;

interface Shared {
  readonly options: FrontOptions;
  readonly limits: FrontLimits;
  readonly connections: Set<Connection>;
  readonly signedUrls: SignedUrls;
  /** Exchanges under way by sandbox. */
  readonly perSandbox: Map<string, number>;
  stopping: boolean;
}

/** A request body on its way to a handler that reads it as it arrives. */
interface Upload {
  readonly scanner: BodyScanner;
  readonly sink: ReadableStreamDefaultController<Uint8Array>;
  /** The handler does not want the rest. */
  unwanted: boolean;
}

interface ClientData {
  connection?: Connection;
}

interface UpstreamData {
  readonly exchange: Exchange;
}

/** One client connection: requests one after the other, or a tunnel. */
class Connection {
  readonly #shared: Shared;
  readonly #socket: Socket<ClientData>;
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

  constructor(shared: Shared, socket: Socket<ClientData>) {
    this.#shared = shared;
    this.#socket = socket;
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
    this.#shared.connections.delete(this);
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
    if (headerValues(head.headers, "host").length > 1) {
      throw new HttpParseError(400, "more than one Host header field");
    }
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

function wantsKeepAlive(head: RequestHead): boolean {
  const tokens = headerTokens(head.headers, "connection");
  return head.minor === 1 ? !tokens.includes("close") : tokens.includes("keep-alive");
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

/** Exchanges by the signal that ends them all: one listener per sandbox, not one per request. */
const byGone = new WeakMap<AbortSignal, Set<Exchange>>();

function watchGone(gone: AbortSignal, exchange: Exchange): () => void {
  let exchanges = byGone.get(gone);
  if (exchanges === undefined) {
    const all = new Set<Exchange>();
    exchanges = all;
    byGone.set(gone, all);
    gone.addEventListener("abort", () => {
      for (const one of [...all]) one.onSandboxGone();
    });
  }
  exchanges.add(exchange);
  return () => exchanges.delete(exchange);
}

/** One set of handlers for all connections to services; each knows its exchange. */
const UPSTREAM_EVENTS: SocketHandler<UpstreamData> = {
  data: (socket, chunk) => socket.data.exchange.onResponseBytes(chunk),
  drain: (socket) => socket.data.exchange.onUpstreamDrain(),
  end: (socket) => socket.data.exchange.onUpstreamEnd(),
  close: (socket, error) => socket.data.exchange.onUpstreamClose(error !== undefined && error !== null),
  error: (socket) => socket.data.exchange.onUpstreamClose(true),
  // Told by the promise as well, which is where it is dealt with.
  connectError: () => undefined,
};

/** One request to a service in a sandbox over a connection of its own. */
class Exchange {
  readonly #shared: Shared;
  readonly #client: Connection;
  readonly #head: RequestHead;
  readonly #which: Extract<Classification, { plane: "data" }>;
  readonly #request: DataRequest;
  readonly #requestBody: BodyScanner;
  readonly #upgrade: string | undefined;
  #upstream: Socket<UpstreamData> | undefined;
  #upstreamOutlet: Outlet<UpstreamData> | undefined;
  #upstreamPaused = false;
  #upstreamEnded = false;
  #responseInput: Buffer = EMPTY;
  #interimBytes = 0;
  #responseBody: BodyScanner | undefined;
  #keepAlive = false;
  #phase: "starting" | "request" | "response" | "tunnel" | "done" = "starting";
  #clientEnded = false;
  #detachGone: () => void = () => undefined;
  readonly #startedAt = performance.now();
  /** Sent to the client; 0 before there is an answer. */
  #status = 0;
  #counted = false;

  constructor(
    shared: Shared,
    client: Connection,
    head: RequestHead,
    which: Extract<Classification, { plane: "data" }>,
  ) {
    this.#shared = shared;
    this.#client = client;
    this.#head = head;
    this.#which = which;
    this.#request = {
      method: head.method,
      target: which.target,
      path: pathOf(which.target),
      port: which.port,
      sandboxId: which.sandboxId,
      headers: head.headers,
    };
    const framing = requestFraming(head);
    // A request with a body is never an upgrade: its body must not be taken for the next request.
    this.#upgrade = framing.kind === "none" ? upgradeProtocol(head) : undefined;
    this.#requestBody = new BodyScanner(framing, 400);
  }

  /** The client's bytes are wanted here (body or tunnel). */
  get takesRequestBytes(): boolean {
    return (
      this.#phase === "tunnel" ||
      ((this.#phase === "request" || this.#phase === "response") && !this.#requestBody.done)
    );
  }

  async start(): Promise<void> {
    if (isHostOnly(this.#request)) {
      this.#fail({ agentenv: [404, "not found"], e2b: [404, "not found"] });
      return;
    }
    const refused = authorizeData(this.#request, this.#shared.options.orchestrator);
    if (refused !== undefined) {
      this.#fail(refused);
      return;
    }
    const { perSandbox, limits } = this.#shared;
    const open = perSandbox.get(this.#which.sandboxId) ?? 0;
    if (open >= limits.maxPerSandbox) {
      this.#fail(faults.tooManyConnections);
      return;
    }
    perSandbox.set(this.#which.sandboxId, open + 1);
    this.#counted = true;
    const ready = await this.#route();
    if (this.#phase === "done") return;
    if (ready.kind === "fault") {
      this.#fail(ready.fault);
      return;
    }
    if (ready.gone.aborted) {
      this.onSandboxGone();
      return;
    }
    this.#detachGone = watchGone(ready.gone, this);
    await this.#connect(ready.hostAddress);
  }

  /** The place to send to, after waking the sandbox at most once. */
  async #route(): Promise<
    | { readonly kind: "ready"; readonly hostAddress: string; readonly gone: AbortSignal }
    | { readonly kind: "fault"; readonly fault: ProxyFault }
  > {
    const { orchestrator, log } = this.#shared.options;
    const { sandboxId } = this.#which;
    const fault = (value: ProxyFault) => ({ kind: "fault", fault: value }) as const;
    for (let attempt = 0; ; attempt++) {
      const found = orchestrator.route(sandboxId);
      switch (found.kind) {
        case "ready":
          return found;
        case "not_found":
          return fault(faults.notFound);
        case "route_missing":
          return fault(faults.routeMissing);
        case "transitional":
        case "paused": {
          // On its way down it is woken, on its way up waited for: requests at once share one resume.
          const wakes =
            found.kind === "paused"
              ? found.autoResume
              : (found.state === "pausing" || found.state === "resuming") && this.#autoResumes();
          if (!wakes) return fault(found.kind === "paused" ? faults.paused : faults.transitional);
          if (attempt > 0) return fault(faults.resumeFailed);
          const { autoResumeMs } = this.#shared.limits;
          const timeout = Symbol("timeout");
          const { promise: late, resolve } = Promise.withResolvers<typeof timeout>();
          const timer = setTimeout(() => resolve(timeout), autoResumeMs);
          try {
            if ((await Promise.race([orchestrator.autoResume(sandboxId), late])) === timeout) {
              return fault(faults.resumeTimedOut);
            }
          } catch (error) {
            log.warn({ err: error, sandboxId }, "auto-resume failed");
            return fault(faults.resumeFailed);
          } finally {
            clearTimeout(timer);
          }
        }
      }
    }
  }

  #autoResumes(): boolean {
    try {
      return this.#shared.options.orchestrator.get(this.#which.sandboxId).autoResume;
    } catch (error) {
      if (error instanceof AenvError) return false;
      throw error;
    }
  }

  async #connect(hostAddress: string): Promise<void> {
    let settled = false;
    this.#client.setDeadline(this.#shared.limits.connectMs, () => {
      if (settled) return;
      settled = true;
      this.#fail(portClosed(this.#which.port));
    });
    try {
      const socket = await Bun.connect<UpstreamData>({
        hostname: hostAddress,
        port: this.#which.port,
        allowHalfOpen: true,
        data: { exchange: this },
        socket: UPSTREAM_EVENTS,
      });
      if (settled || this.#phase === "done") {
        socket.terminate();
        return;
      }
      settled = true;
      // No setNoDelay: Bun has set it, and a system call per request counts here.
      this.#upstream = socket;
      this.#upstreamOutlet = new Outlet(socket);
    } catch {
      // Refused, unreachable or reset: all mean that nobody listens there.
      if (settled || this.#phase === "done") return;
      settled = true;
      this.#fail(portClosed(this.#which.port));
      return;
    }
    this.#sendRequestHead(`${hostAddress}:${this.#which.port}`);
  }

  #sendRequestHead(authority: string): void {
    const { orchestrator, apiKeys } = this.#shared.options;
    const secure = orchestrator.access(this.#which.sandboxId)?.secure ?? false;
    let host = authority;
    if (this.#which.port !== AGENT_PORT) {
      try {
        const mask = orchestrator.get(this.#which.sandboxId).network?.maskRequestHost;
        if (mask !== undefined) host = mask.replaceAll("$" + "{PORT}", String(this.#which.port));
      } catch (error) {
        if (!(error instanceof AenvError)) throw error;
      }
    }
    const headers = forwardedRequestHeaders(this.#request, {
      upstreamAuthority: host,
      apiKeys,
      passAccessToken: this.#which.port === AGENT_PORT && secure,
      ...(this.#upgrade === undefined ? {} : { upgrade: this.#upgrade }),
    });
    this.#phase = "request";
    this.#upstreamOutlet!.write(
      formatHead(`${this.#head.method} ${this.#which.target} HTTP/1.${this.#head.minor}`, headers),
    );
    if (headerTokens(this.#head.headers, "expect").includes("100-continue") && !this.#requestBody.done) {
      this.#client.outlet.write(Buffer.from("HTTP/1.1 100 Continue\r\n\r\n"));
    }
    if (this.#requestBody.done) this.#requestSent();
    else {
      this.#awaitBody();
      const rest = this.onRequestBytes(this.#client.takeInput());
      this.#client.giveBack(Buffer.from(rest));
    }
    if (!this.#upstreamOutlet!.blocked) this.#client.resume();
  }

  #requestSent(): void {
    this.#phase = this.#responseBody === undefined ? "response" : this.#phase;
    if (this.#responseBody === undefined) {
      this.#client.setDeadline(this.#shared.limits.responseHeadMs, () => this.#fail(faults.timeout));
    }
  }

  /** Returns what is behind this request's body: the beginning of the next request. */
  onRequestBytes(chunk: Buffer): Buffer {
    const outlet = this.#upstreamOutlet!;
    if (this.#phase === "tunnel") {
      if (!outlet.write(chunk)) this.#client.pause();
      this.#watchTunnel();
      return EMPTY;
    }
    let end: number;
    try {
      end = this.#requestBody.scan(chunk, 0);
    } catch (error) {
      if (!(error instanceof HttpParseError)) throw error;
      this.#fail({ agentenv: [400, error.message], e2b: [400, error.message] });
      return EMPTY;
    }
    if (!outlet.write(chunk.subarray(0, end))) this.#client.pause();
    if (this.#requestBody.done) this.#requestSent();
    else this.#awaitBody();
    return chunk.subarray(end);
  }

  /** The client has its time when we listen to it; when the service does not take what came it has its own. */
  #awaitBody(): void {
    if (this.#responseBody !== undefined) return;
    const { bodyIdleMs, stallMs } = this.#shared.limits;
    const ms = this.#upstreamOutlet!.blocked ? stallMs : bodyIdleMs;
    this.#client.setDeadline(ms, () => this.#fail(faults.timeout));
  }

  /** Of a tunnel with one end closed, what waits for the other has a limit: nobody may ever come for it. */
  #watchTunnel(): void {
    if (!this.#upstreamEnded && !this.#clientEnded) return;
    const waits = this.#upstreamOutlet!.blocked || this.#client.outlet.blocked;
    this.#client.setDeadline(waits ? this.#shared.limits.stallMs : undefined, () => this.#cut());
  }

  onUpstreamDrain(): void {
    if (this.#phase === "done" || this.#upstreamOutlet === undefined) return;
    if (this.#upstreamOutlet.drain()) this.#client.resume();
    if (this.#phase === "tunnel") this.#watchTunnel();
    else if (!this.#requestBody.done) this.#awaitBody();
  }

  onClientDrained(): void {
    if (this.#phase === "tunnel") this.#watchTunnel();
    if (this.#upstreamPaused && this.#phase !== "done") {
      this.#upstreamPaused = false;
      this.#upstream!.resume();
    }
  }

  #toClient(bytes: Uint8Array): void {
    if (this.#client.outlet.write(bytes) || this.#upstreamPaused || this.#upstream === undefined) return;
    this.#upstreamPaused = true;
    this.#upstream.pause();
  }

  onResponseBytes(chunk: Buffer): void {
    if (this.#phase === "done") return;
    try {
      if (this.#phase === "tunnel") this.#toClient(chunk);
      else if (this.#responseBody !== undefined) this.#onResponseBody(chunk);
      else {
        this.#responseInput =
          this.#responseInput.length === 0 ? chunk : Buffer.concat([this.#responseInput, chunk]);
        this.#readResponseHeads();
        // The chunk is only ours during this call.
        if (this.#responseInput.length > 0) this.#responseInput = Buffer.from(this.#responseInput);
      }
    } catch (error) {
      if (!(error instanceof HttpParseError)) throw error;
      this.#shared.options.log.debug({ err: error, sandboxId: this.#which.sandboxId }, "malformed response");
      if (this.#responseBody === undefined) this.#fail(faults.badGateway);
      else this.#cut();
    }
  }

  #readResponseHeads(): void {
    for (;;) {
      const head = parseResponseHead(this.#responseInput);
      if (head === undefined) return;
      const rest = this.#responseInput.subarray(head.lengthBytes);
      this.#responseInput = EMPTY;
      if (head.status === 101) {
        // Nobody asked to speak another protocol: who passed that on would take its bytes for answers.
        if (this.#upgrade === undefined) this.#fail(faults.badGateway);
        else this.#startTunnel(head, rest);
        return;
      }
      if (head.status < 200) {
        this.#interimBytes += head.lengthBytes;
        if (this.#interimBytes > MAX_INTERIM_BYTES) {
          this.#fail(faults.badGateway);
          return;
        }
        // The proxy has answered an expectation itself; other interim answers pass.
        if (head.status !== 100 && this.#head.minor === 1) {
          this.#toClient(formatHead(`HTTP/1.1 ${head.status} ${head.reason}`, head.headers));
        }
        this.#responseInput = rest;
        continue;
      }
      this.#startResponse(head, rest);
      return;
    }
  }

  #startResponse(head: ResponseHead, rest: Buffer): void {
    const framing = responseFraming(head, this.#head.method);
    this.#responseBody = new BodyScanner(framing, 502);
    this.#phase = "response";
    this.#status = head.status;
    this.#client.setDeadline(undefined);
    this.#keepAlive =
      wantsKeepAlive(this.#head) &&
      framing.kind !== "close" &&
      this.#requestBody.done &&
      this.#upgrade === undefined &&
      !this.#shared.stopping;
    const headers = forwardedResponseHeaders(head.headers, { close: !this.#keepAlive });
    const bytes = formatHead(`HTTP/1.1 ${head.status} ${head.reason}`, headers);
    // What came with the head goes out with it: one system call, one packet.
    const end = this.#responseBody.scan(rest, 0);
    this.#toClient(end === 0 ? bytes : Buffer.concat([bytes, rest.subarray(0, end)]));
    if (this.#responseBody.done) this.#finish();
  }

  #onResponseBody(chunk: Buffer): void {
    const body = this.#responseBody!;
    const end = body.scan(chunk, 0);
    this.#toClient(end === chunk.length ? chunk : chunk.subarray(0, end));
    if (body.done) this.#finish();
  }

  #startTunnel(head: ResponseHead, rest: Buffer): void {
    this.#phase = "tunnel";
    this.#status = head.status;
    this.#client.setDeadline(undefined);
    const headers = forwardedResponseHeaders(head.headers, { close: false, upgrade: this.#upgrade! });
    this.#toClient(formatHead(`HTTP/1.1 101 ${head.reason}`, headers));
    if (rest.length > 0) this.#toClient(rest);
    const early = this.#client.takeInput();
    if (early.length > 0 && !this.#upstreamOutlet!.write(early)) this.#client.pause();
  }

  onUpstreamEnd(): void {
    if (this.#phase === "done") return;
    this.#upstreamEnded = true;
    if (this.#phase === "tunnel") {
      this.#client.endWrites();
      if (this.#clientEnded) this.#closeTunnel();
      else this.#watchTunnel();
      return;
    }
    this.#upstreamOver();
  }

  onUpstreamClose(failed: boolean): void {
    if (this.#phase === "done" || this.#phase === "starting") return;
    if (this.#phase === "tunnel") {
      // A FIN that answers ours is reported as a close alone.
      if (this.#upstreamEnded || (this.#clientEnded && !failed)) this.#closeTunnel();
      else this.#cut();
      return;
    }
    this.#upstreamOver();
  }

  #upstreamOver(): void {
    if (this.#responseBody === undefined) this.#fail(faults.badGateway);
    // A clean end is the end of a body without a length; a reset never is.
    else if (this.#responseBody.endsWithConnection && this.#upstreamEnded) this.#finish();
    else this.#cut();
  }

  onClientEnd(): void {
    this.#clientEnded = true;
    if (this.#phase === "tunnel") {
      this.#upstreamOutlet!.flushed(() => this.#upstream!.shutdown());
      if (this.#upstreamEnded) this.#closeTunnel();
      else this.#watchTunnel();
      return;
    }
    // Outside a tunnel a client that stops sending has gone.
    this.#client.destroy();
  }

  onClientGone(): void {
    this.#release(true);
  }

  onSandboxGone(): void {
    if (this.#phase === "done") return;
    if (this.#responseBody === undefined && this.#phase !== "tunnel") this.#fail(faults.gone);
    else this.#cut();
  }

  /** Answers with an error of the proxy's own; only before a response has begun. */
  #fail(fault: ProxyFault): void {
    if (this.#phase === "done") return;
    // With part of the request body unread the connection cannot be used again.
    const keepAlive = this.#requestBody.done && wantsKeepAlive(this.#head) && !this.#shared.stopping;
    this.#status = fault[this.#which.style][0];
    this.#release(true);
    const bytes = formatFault(fault, this.#which.style, this.#which.sandboxId, {
      close: !keepAlive,
      head: this.#head.method === "HEAD",
      navigation: isNavigation(this.#head.method, this.#head.headers),
    });
    if (keepAlive) {
      this.#client.outlet.write(bytes);
      this.#client.exchangeDone(true);
    } else this.#client.finish(bytes);
  }

  /** A response that cannot be completed must not look complete. */
  #cut(): void {
    if (this.#phase === "done") return;
    this.#release(true);
    this.#client.destroy();
  }

  #finish(): void {
    this.#release(true);
    this.#client.exchangeDone(this.#keepAlive);
  }

  #closeTunnel(): void {
    this.#release(false);
    this.#client.exchangeDone(false);
  }

  #report(): void {
    const { options, perSandbox } = this.#shared;
    const { sandboxId, port, source } = this.#which;
    if (this.#counted) {
      const open = (perSandbox.get(sandboxId) ?? 1) - 1;
      if (open > 0) perSandbox.set(sandboxId, open);
      else perSandbox.delete(sandboxId);
    }
    const seconds = (performance.now() - this.#startedAt) / 1000;
    const status = this.#status === 0 ? 499 : this.#status;
    options.onExchange?.({ source, method: this.#head.method, status, seconds });
    if (options.log.isLevelEnabled("debug")) {
      // The query may hold a signature or an application's own secrets.
      const { method } = this.#head;
      const ms = Math.round(seconds * 10_000) / 10;
      options.log.debug({ sandboxId, port, source, method, path: this.#request.path, status, ms }, "proxied");
    }
  }

  #release(abort: boolean): void {
    if (this.#phase === "done") return;
    this.#phase = "done";
    this.#detachGone();
    this.#report();
    const upstream = this.#upstream;
    const outlet = this.#upstreamOutlet;
    if (upstream === undefined || outlet === undefined) return;
    if (abort) {
      outlet.close();
      upstream.terminate();
    } else outlet.flushed(() => upstream.end());
  }
}

function upgradeProtocol(head: RequestHead): string | undefined {
  if (head.minor !== 1 || !headerTokens(head.headers, "connection").includes("upgrade")) return undefined;
  const protocol = headerValue(head.headers, "upgrade");
  if (protocol === undefined || protocol === "") return undefined;
  if (
    protocol.toLowerCase() === "websocket" &&
    headerValue(head.headers, "sec-websocket-key") === undefined
  ) {
    throw new HttpParseError(400, "malformed WebSocket upgrade: Sec-WebSocket-Key is missing");
  }
  return protocol;
}

function listen(options: FrontOptions, shared: Shared): TCPSocketListener<ClientData> {
  try {
    return Bun.listen<ClientData>({
      hostname: options.hostname,
      port: options.port,
      allowHalfOpen: true,
      data: {},
      socket: {
        open(socket) {
          if (shared.connections.size >= shared.limits.maxConnections) {
            socket.end(
              formatPlainError(429, "too many connections", {
                close: true,
                head: false,
                headers: [["Retry-After", "1"]],
              }),
            );
            return;
          }
          const connection = new Connection(shared, socket);
          socket.data = { connection };
          shared.connections.add(connection);
        },
        data: (socket, chunk) => socket.data.connection?.onData(chunk),
        drain: (socket) => socket.data.connection?.onDrain(),
        end: (socket) => socket.data.connection?.onEnd(),
        close: (socket) => socket.data.connection?.onClose(),
        error: (socket) => socket.data.connection?.destroy(),
      },
    });
  } catch (cause) {
    throw listenError(options.hostname, options.port, cause);
  }
}

function listenError(hostname: string, port: number, cause: unknown): AenvError {
  const inUse = (cause as { code?: string }).code === "EADDRINUSE";
  return new AenvError({
    code: inUse ? "port_in_use" : "listen_failed",
    message: inUse
      ? `${hostname}:${port} is in use by another process`
      : `cannot listen on ${hostname}:${port}`,
    remediation: inUse
      ? `stop the process that listens there (ss -ltnp 'sport = :${port}' names it) or set API_ADDR to a free address, e.g. API_ADDR=127.0.0.1:8001`
      : "set API_ADDR to an address of this machine",
    cause,
  });
}

/**
 * Throws what `startFront` would for an address that cannot be listened at (`port_in_use`, `listen_failed`).
 * Asked before anything is taken over or changed: a server that cannot be reached must not touch sandboxes.
 */
export function requireFreeAddress(hostname: string, port: number): void {
  try {
    Bun.listen({ hostname, port, socket: { data: () => undefined } }).stop(true);
  } catch (cause) {
    throw listenError(hostname, port, cause);
  }
}

/** Opens the listener; requests are answered from now on. Errors: `port_in_use`, `listen_failed`. */
export function startFront(options: FrontOptions): Front {
  const shared: Shared = {
    options,
    limits: { ...DEFAULT_LIMITS, ...options.limits },
    connections: new Set(),
    signedUrls: new SignedUrls(options.orchestrator),
    perSandbox: new Map(),
    stopping: false,
  };
  const listener = listen(options, shared);
  const sweeper = setInterval(() => {
    const now = performance.now();
    for (const connection of shared.connections) connection.sweep(now);
  }, 250);

  return {
    hostname: listener.hostname,
    port: listener.port,
    get connections() {
      return shared.connections.size;
    },
    async stop(graceMs) {
      shared.stopping = true;
      listener.stop(false);
      const deadline = performance.now() + graceMs;
      for (;;) {
        for (const connection of [...shared.connections]) if (connection.idle) connection.destroy();
        if (shared.connections.size === 0 || performance.now() >= deadline) break;
        await Bun.sleep(20);
      }
      for (const connection of [...shared.connections]) connection.destroy();
      clearInterval(sweeper);
      listener.stop(true);
    },
  };
}
