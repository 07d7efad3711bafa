import http from "node:http";
import { AenvError } from "../lib/errors.ts";
import type { AgentClient, CommandOutcome, GuestIdentity } from "./types.ts";
import { AGENT_PORT } from "./types.ts";

/**
 * Client of the guest agent. It uses node:http without an agent pool: every call is a connection of its
 * own (a pooled one could belong to an earlier life of the VM), proxy variables of the environment do
 * not apply, and there is no process-wide limit on requests in flight.
 */

const MAX_FRAME_BYTES = 8 << 20;
const OUTPUT_TAIL_BYTES = 256 << 10;
const MAX_UNARY_BYTES = 1 << 20;
const PROBE_TIMEOUT_MS = 1000;
/** A probe unanswered for so long gets a younger rival: a lost SYN is repeated only after a second. */
const PROBE_HEDGE_MS = 150;
const MAX_PROBES = 4;
const END_STREAM_FLAG = 0x02;
const COMPRESSED_FLAG = 0x01;

type Address = { readonly host: string; readonly port: number };

interface Reply {
  readonly status: number;
  readonly headers: http.IncomingHttpHeaders;
  readonly body: Buffer;
}

interface RequestOptions {
  readonly method: string;
  readonly path: string;
  readonly headers?: Record<string, string>;
  readonly body?: string | Uint8Array;
  readonly timeoutMs: number;
  readonly signal?: AbortSignal;
  readonly maxBytes?: number;
}

/** One finer than milliseconds and never the same twice: the agent ignores a time that is not newer. */
let lastMicros = 0;
export function monotonicTimestamp(): string {
  const micros = Math.max(Math.floor((performance.timeOrigin + performance.now()) * 1000), Date.now() * 1000);
  lastMicros = Math.max(lastMicros + 1, micros);
  const millis = Math.floor(lastMicros / 1000);
  const fraction = String(lastMicros % 1000).padStart(3, "0");
  return new Date(millis).toISOString().replace("Z", `${fraction}Z`);
}

function unreachable(address: Address, what: string, cause: unknown): AenvError {
  return new AenvError({
    code: "agent_unreachable",
    status: 502,
    message: `the guest agent at ${address.host}:${address.port} did not answer ${what}`,
    cause,
  });
}

function open(address: Address, options: RequestOptions): Promise<http.IncomingMessage> {
  return new Promise((resolve, reject) => {
    const request = http.request(
      {
        host: address.host,
        port: address.port,
        method: options.method,
        path: options.path,
        agent: false,
        headers: {
          Host: `localhost:${address.port}`,
          Connection: "close",
          ...options.headers,
          ...(options.body === undefined
            ? {}
            : { "Content-Length": String(Buffer.byteLength(options.body)) }),
        },
        ...(options.signal === undefined ? {} : { signal: options.signal }),
      },
      resolve,
    );
    request.on("error", reject);
    request.end(options.body);
  });
}

/** One request with a small answer, all within `timeoutMs`. */
async function call(address: Address, options: RequestOptions): Promise<Reply> {
  const limit = AbortSignal.timeout(options.timeoutMs);
  const signal = options.signal === undefined ? limit : AbortSignal.any([limit, options.signal]);
  const what = `${options.method} ${options.path}`;
  const maxBytes = options.maxBytes ?? MAX_UNARY_BYTES;
  let response: http.IncomingMessage | undefined;
  try {
    response = await open(address, { ...options, signal });
    const chunks: Buffer[] = [];
    let size = 0;
    for await (const chunk of response as AsyncIterable<Buffer>) {
      size += chunk.length;
      if (size > maxBytes) {
        throw new AenvError({
          code: "agent_answer_too_large",
          status: 502,
          message: `the guest agent's answer to ${what} is larger than ${maxBytes} bytes`,
        });
      }
      chunks.push(chunk);
    }
    return { status: response.statusCode ?? 0, headers: response.headers, body: Buffer.concat(chunks) };
  } catch (cause) {
    if (cause instanceof AenvError) throw cause;
    throw unreachable(
      address,
      what,
      limit.aborted ? new Error(`no answer within ${options.timeoutMs} ms`) : cause,
    );
  } finally {
    response?.destroy();
  }
}

/** Keeps the last bytes of a stream without copying at every chunk. */
class Tail {
  #chunks: Buffer[] = [];
  #size = 0;

  push(chunk: Buffer): void {
    this.#chunks.push(chunk);
    this.#size += chunk.length;
    while (this.#size - this.#chunks[0]!.length >= OUTPUT_TAIL_BYTES)
      this.#size -= this.#chunks.shift()!.length;
  }

  text(): string {
    return Buffer.concat(this.#chunks).subarray(-OUTPUT_TAIL_BYTES).toString("utf8");
  }
}

export interface Frame {
  readonly flags: number;
  readonly payload: Buffer;
}

/** Splits a byte stream into Connect envelopes: flag byte, 4-byte big-endian length, payload. */
export function createFrameParser(): (chunk: Buffer) => Frame[] {
  let pending: Buffer = Buffer.alloc(0);
  return (chunk) => {
    pending = pending.length === 0 ? chunk : Buffer.concat([pending, chunk]);
    const frames: Frame[] = [];
    while (pending.length >= 5) {
      const length = pending.readUInt32BE(1);
      if (length > MAX_FRAME_BYTES)
        throw new Error(`frame of ${length} bytes is over the limit of ${MAX_FRAME_BYTES}`);
      if (pending.length < 5 + length) break;
      frames.push({ flags: pending[0]!, payload: pending.subarray(5, 5 + length) });
      pending = pending.subarray(5 + length);
    }
    return frames;
  };
}

function envelope(message: unknown): Uint8Array {
  const payload = Buffer.from(JSON.stringify(message));
  const header = Buffer.alloc(5);
  header.writeUInt32BE(payload.length, 1);
  return Buffer.concat([header, payload]);
}

interface ProcessEvent {
  readonly start?: { readonly pid?: number };
  readonly data?: { readonly stdout?: string; readonly stderr?: string; readonly pty?: string };
  readonly end?: {
    readonly exitCode?: number;
    readonly exited?: boolean;
    readonly status?: string;
    readonly error?: string;
  };
}

interface EndOfStream {
  readonly error?: { readonly code?: string; readonly message?: string };
}

const STATUS_OF_CODE: Readonly<Record<string, number>> = {
  invalid_argument: 400,
  unauthenticated: 401,
  not_found: 404,
  deadline_exceeded: 504,
};

function connectError(code: string | undefined, message: string | undefined, what: string): AenvError {
  const name = code ?? "unknown";
  return new AenvError({
    code: name === "deadline_exceeded" ? "command_timeout" : `agent_${name}`,
    status: STATUS_OF_CODE[name] ?? 500,
    message: `${what}: ${message ?? name}`,
  });
}

type Command = Parameters<AgentClient["run"]>[0];

class Agent implements AgentClient {
  readonly #address: Address;
  readonly #token: string | undefined;

  constructor(address: Address, token: string | undefined) {
    this.#address = address;
    this.#token = token;
  }

  #headers(user?: string): Record<string, string> {
    return {
      ...(this.#token === undefined ? {} : { "X-Access-Token": this.#token }),
      ...(user === undefined ? {} : { Authorization: `Basic ${Buffer.from(`${user}:`).toString("base64")}` }),
    };
  }

  async waitHealthy(timeoutMs: number, signal?: AbortSignal): Promise<void> {
    return waitHealthy(this.#address, timeoutMs, 3, signal);
  }

  async init(identity: GuestIdentity, lifecycleId: string): Promise<string> {
    const deadline = performance.now() + 30_000;
    for (;;) {
      const reply = await call(this.#address, {
        method: "POST",
        path: "/init",
        headers: {
          "Content-Type": "application/json",
          ...(identity.accessToken === undefined ? {} : { "X-Access-Token": identity.accessToken }),
        },
        body: JSON.stringify({
          accessToken: identity.accessToken,
          envVars: identity.envVars,
          defaultUser: identity.defaultUser,
          defaultWorkdir: identity.defaultWorkdir,
          timestamp: monotonicTimestamp(),
          sandboxID: identity.sandboxId,
          templateID: identity.templateId,
          lifecycleID: lifecycleId,
          entropy: Buffer.from(crypto.getRandomValues(new Uint8Array(64))).toString("base64"),
        }),
        timeoutMs: 10_000,
      });
      if (reply.status === 204 || reply.status === 200) {
        const version = reply.headers["x-envd-version"];
        if (typeof version !== "string" || !/^\d+\.\d+\.\d+/.test(version)) {
          throw new AenvError({
            code: "agent_protocol",
            status: 502,
            message: `the guest agent answered /init without a usable X-Envd-Version (${String(version)})`,
          });
        }
        return version;
      }
      if (reply.status !== 503 || performance.now() > deadline) {
        throw new AenvError({
          code: "agent_init_failed",
          status: 502,
          message: `the guest agent refused /init with ${reply.status}: ${reply.body.toString("utf8").slice(0, 500)}`,
        });
      }
      await Bun.sleep(20);
    }
  }

  async run(command: Command): Promise<CommandOutcome> {
    const { exited } = await this.#start(command, true);
    return exited;
  }

  async startDetached(command: Command): Promise<{ pid: number; exited: Promise<CommandOutcome> }> {
    return this.#start(command, false);
  }

  /** Resolves with the `start` event; `exited` reads on to the end of the stream. */
  async #start(command: Command, wait: boolean): Promise<{ pid: number; exited: Promise<CommandOutcome> }> {
    const what = [command.cmd, ...command.args].join(" ").slice(0, 200);
    const abort = new AbortController();
    // The agent ends the process itself at its deadline; this is for an agent that does not.
    const watchdog =
      command.timeoutMs === undefined
        ? undefined
        : setTimeout(
            () => abort.abort(new Error("deadline of the command passed")),
            command.timeoutMs + 10_000,
          );
    const startWatchdog = setTimeout(
      () => abort.abort(new Error("the process did not start within 60 s")),
      60_000,
    );
    const stdout = new Tail();
    const stderr = new Tail();
    const started = Promise.withResolvers<number>();

    const read = async (): Promise<CommandOutcome> => {
      const response = await open(this.#address, {
        method: "POST",
        path: "/process.Process/Start",
        headers: {
          ...this.#headers(command.user),
          "Content-Type": "application/connect+json",
          "Connect-Protocol-Version": "1",
          ...(command.timeoutMs === undefined
            ? {}
            : { "Connect-Timeout-Ms": String(Math.ceil(command.timeoutMs)) }),
        },
        body: envelope({
          process: { cmd: command.cmd, args: command.args, envs: command.env ?? {}, cwd: command.cwd },
          stdin: false,
        }),
        timeoutMs: 0,
        signal: abort.signal,
      });
      try {
        if (response.statusCode !== 200) {
          throw connectError(undefined, `HTTP ${response.statusCode} from the guest agent`, what);
        }
        const parse = createFrameParser();
        let outcome: CommandOutcome | undefined;
        for await (const chunk of response as AsyncIterable<Buffer>) {
          for (const frame of parse(chunk)) {
            if ((frame.flags & COMPRESSED_FLAG) !== 0)
              throw new Error("compressed frame although none was offered");
            const message = JSON.parse(frame.payload.toString("utf8")) as unknown;
            if ((frame.flags & END_STREAM_FLAG) !== 0) {
              const { error } = message as EndOfStream;
              if (error !== undefined) throw connectError(error.code, error.message, what);
              if (outcome === undefined)
                throw connectError("unknown", "the process ended without a result", what);
              return outcome;
            }
            const event = (message as { event?: ProcessEvent }).event ?? {};
            if (event.start !== undefined) started.resolve(event.start.pid ?? 0);
            if (event.data?.stdout !== undefined) {
              const bytes = Buffer.from(event.data.stdout, "base64");
              stdout.push(bytes);
              command.onStdout?.(bytes);
            }
            if (event.data?.stderr !== undefined) {
              const bytes = Buffer.from(event.data.stderr, "base64");
              stderr.push(bytes);
              command.onStderr?.(bytes);
            }
            if (event.end !== undefined) {
              const signal = /^signal: (.+)$/.exec(event.end.status ?? "")?.[1];
              outcome = {
                exitCode: event.end.exitCode ?? 0,
                ...(signal === undefined ? {} : { signal }),
                stdout: stdout.text(),
                stderr: stderr.text(),
              };
            }
          }
        }
        throw unreachable(this.#address, `${what} to its end`, new Error("the stream broke off"));
      } finally {
        response.destroy();
      }
    };

    const exited = read()
      .catch((error: unknown) => {
        throw error instanceof AenvError ? error : unreachable(this.#address, what, error);
      })
      .finally(() => {
        clearTimeout(watchdog);
        clearTimeout(startWatchdog);
      });
    // A failure before the start event is the caller's; a later one belongs to `exited`.
    exited.catch((error: unknown) => started.reject(error));
    const pid = await started.promise;
    clearTimeout(startWatchdog);
    if (!wait) exited.catch(() => undefined);
    return { pid, exited };
  }

  async readFile(path: string, maxBytes = 4 << 20): Promise<Uint8Array | undefined> {
    const query = new URLSearchParams({ path, username: "root" });
    const reply = await call(this.#address, {
      method: "GET",
      path: `/files?${query}`,
      headers: { ...this.#headers(), "Accept-Encoding": "identity" },
      timeoutMs: 30_000,
      maxBytes,
    });
    if (reply.status === 404) return undefined;
    if (reply.status !== 200) {
      throw connectError(
        undefined,
        `HTTP ${reply.status} ${reply.body.toString("utf8").slice(0, 300)}`,
        `reading ${path}`,
      );
    }
    return reply.body;
  }

  async writeFile(path: string, content: Uint8Array | string): Promise<void> {
    const query = new URLSearchParams({ path, username: "root" });
    const reply = await call(this.#address, {
      method: "POST",
      path: `/files?${query}`,
      headers: { ...this.#headers(), "Content-Type": "application/octet-stream" },
      body: content,
      timeoutMs: 30_000,
    });
    if (reply.status !== 200) {
      const said = reply.body.toString("utf8").slice(0, 300);
      throw connectError(undefined, `HTTP ${reply.status} ${said}`, `writing ${path}`);
    }
  }

  async makeDir(path: string, user?: string): Promise<void> {
    const reply = await this.#unary("filesystem.Filesystem/MakeDir", { path }, user);
    if (reply.error !== undefined && reply.error.code !== "already_exists") {
      throw connectError(reply.error.code, reply.error.message, `making directory ${path}`);
    }
  }

  async exists(path: string): Promise<boolean> {
    const reply = await this.#unary("filesystem.Filesystem/Stat", { path }, "root");
    if (reply.error === undefined) return true;
    if (reply.error.code === "not_found") return false;
    throw connectError(reply.error.code, reply.error.message, `looking at ${path}`);
  }

  async #unary(
    method: string,
    message: unknown,
    user: string | undefined,
  ): Promise<{ readonly error?: { readonly code?: string; readonly message?: string } }> {
    const reply = await call(this.#address, {
      method: "POST",
      path: `/${method}`,
      headers: {
        ...this.#headers(user),
        "Content-Type": "application/json",
        "Connect-Protocol-Version": "1",
      },
      body: JSON.stringify(message),
      timeoutMs: 30_000,
    });
    if (reply.status === 200) return {};
    const text = reply.body.toString("utf8");
    try {
      return { error: JSON.parse(text) as { code?: string; message?: string } };
    } catch (cause) {
      throw unreachable(
        this.#address,
        `${method} in its protocol (HTTP ${reply.status}: ${text.slice(0, 200)})`,
        cause,
      );
    }
  }
}

/** One look at `/health`; error `agent_unreachable` when it does not answer 2xx within the time. */
export async function probeHealth(address: Address, timeoutMs: number): Promise<void> {
  const { status } = await call(address, { method: "GET", path: "/health", timeoutMs });
  if (status >= 200 && status < 300) return;
  throw unreachable(address, "GET /health", new Error(`it answered ${status}`));
}

/**
 * One of the agent's routes for the host alone. Errors: `guest_too_old` 409 for an agent without it,
 * `agent_unreachable` 502, `guest_refused` 500 with the agent's words.
 */
async function hostCall(address: Address, path: string, timeoutMs: number): Promise<void> {
  const { status, body } = await call(address, { method: "POST", path, timeoutMs });
  if (status === 204) return;
  if (status === 404) {
    throw new AenvError({
      code: "guest_too_old",
      status: 409,
      message:
        "the agent in the guest is of an earlier version, which cannot leave its disks whole without its memory",
      remediation:
        "pause it with its memory; sandboxes of templates that are built again with this version can be paused without",
    });
  }
  throw new AenvError({
    code: "guest_refused",
    message: `the guest agent answered POST ${path} with ${status}: ${body.toString("utf8").slice(0, 500)}`,
  });
}

/** Writes out the file systems on the guest's disks and holds them still: for 30 s, until `thawDisks` or an `/init`. */
export function freezeDisks(address: Address, timeoutMs: number): Promise<void> {
  return hostCall(address, "/fsfreeze", timeoutMs);
}

/** Resolves when they have been still ever since `freezeDisks`; error `guest_refused` when they are not any more. */
export function requireFrozen(address: Address, timeoutMs: number): Promise<void> {
  return hostCall(address, "/fsfrozen", timeoutMs);
}

/** Error `guest_refused` also when they were not still any more. */
export function thawDisks(address: Address, timeoutMs: number): Promise<void> {
  return hostCall(address, "/fsthaw", timeoutMs);
}

/** The guest begins to end: its processes, then its file systems, then itself. */
export function haltGuest(address: Address, timeoutMs: number): Promise<void> {
  return hostCall(address, "/halt", timeoutMs);
}

/** Polls `/health` every `pollMs` until it answers 2xx; `agent_not_ready` after `timeoutMs`. */
export async function waitHealthy(
  address: Address,
  timeoutMs: number,
  pollMs: number,
  signal?: AbortSignal,
): Promise<void> {
  const deadline = performance.now() + timeoutMs;
  const stop = new AbortController();
  const stopSignal = signal === undefined ? stop.signal : AbortSignal.any([stop.signal, signal]);
  let lastError: unknown;
  let healthy = false;
  let inFlight = 0;

  const probe = async (): Promise<void> => {
    inFlight += 1;
    try {
      const reply = await call(address, {
        method: "GET",
        path: "/health",
        timeoutMs: PROBE_TIMEOUT_MS,
        signal: stopSignal,
      });
      if (reply.status >= 200 && reply.status < 300) healthy = true;
      else lastError = new Error(`/health answered ${reply.status}`);
    } catch (error) {
      lastError = error;
    } finally {
      inFlight -= 1;
    }
  };

  try {
    while (!healthy) {
      signal?.throwIfAborted();
      if (performance.now() >= deadline) {
        throw new AenvError({
          code: "agent_not_ready",
          status: 504,
          message: `the guest agent at ${address.host}:${address.port} was not ready within ${timeoutMs} ms`,
          remediation:
            "look at the sandbox's console log; a slow host may need a longer [envd].init_timeout_secs",
          cause: lastError,
        });
      }
      if (inFlight < MAX_PROBES) await Promise.race([probe(), Bun.sleep(PROBE_HEDGE_MS)]);
      else await Bun.sleep(PROBE_HEDGE_MS);
      if (!healthy) await Bun.sleep(pollMs);
    }
  } finally {
    stop.abort();
  }
}

export function parseAgentAddress(hostAddress: string): Address {
  const match = /^(.+):(\d+)$/.exec(hostAddress);
  return match === null
    ? { host: hostAddress, port: AGENT_PORT }
    : { host: match[1]!, port: Number(match[2]) };
}

/**
 * `hostAddress`: IPv4 address of the sandbox on the host, optionally with `:port` (default
 * {@link AGENT_PORT}). `token`: the agent's access token, for a secured sandbox.
 */
export function createAgentClient(hostAddress: string, token?: string): AgentClient {
  return new Agent(parseAgentAddress(hostAddress), token);
}
