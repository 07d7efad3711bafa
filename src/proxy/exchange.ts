import type { Socket, SocketHandler } from "bun";
import { AenvError } from "../lib/errors.ts";
import {
  AGENT_PORT,
  authorizeData,
  type DataRequest,
  forwardedRequestHeaders,
  forwardedResponseHeaders,
  isHostOnly,
} from "./access.ts";
import { type Classification, pathOf } from "./classify.ts";
import {
  BodyScanner,
  formatHead,
  HttpParseError,
  headerTokens,
  headerValue,
  parseResponseHead,
  type RequestHead,
  type ResponseHead,
  requestFraming,
  responseFraming,
  wantsKeepAlive,
} from "./http1.ts";
import type { Shared } from "./options.ts";
import { Outlet } from "./outlet.ts";
import { faults, formatFault, isNavigation, type ProxyFault, portClosed } from "./replies.ts";

const EMPTY = Buffer.alloc(0);
/** Interim responses to one request, all together: a few hints, or a sign of life now and then for hours. */
const MAX_INTERIM_BYTES = 128 * 1024;

/** The connection of the client that asks, as its exchange sees it. */
export interface ExchangeClient {
  readonly outlet: Pick<Outlet<unknown>, "write" | "blocked">;
  /** `undefined`: none. One that passes without an action of its own cuts the connection. */
  setDeadline(ms: number | undefined, action?: () => void): void;
  pause(): void;
  resume(): void;
  /** What came and was not read yet, and what of it is not this request's. */
  takeInput(): Buffer;
  giveBack(rest: Buffer): void;
  /** Says that nothing more comes once everything is with the kernel. */
  endWrites(): void;
  /** Sends the last bytes and ends. */
  finish(bytes: Uint8Array): void;
  /** The answer is complete. */
  exchangeDone(keepAlive: boolean): void;
  /** Cuts the connection so that the client cannot take it for a regular end. */
  destroy(): void;
}

interface UpstreamData {
  readonly exchange: Exchange;
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
export class Exchange {
  readonly #shared: Shared;
  readonly #client: ExchangeClient;
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
    client: ExchangeClient,
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
            // Its pause, which was waited for, was one without memory.
            if (error instanceof AenvError && error.code === "sandbox_paused") return fault(faults.paused);
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
