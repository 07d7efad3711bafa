import { CliError } from "./command.ts";
import { decodeEvent, type ProcessEnd, type ProcessEvent } from "./protocol.ts";

/** Where a sandbox's agent is reached, through the server's proxy. */
export interface AgentTarget {
  /** Base URL of the server. */
  readonly url: string;
  readonly sandboxId: string;
  readonly accessToken?: string;
  readonly user?: string;
}

const AGENT_PORT = "49983";
const END_OF_STREAM = 0x02;
const COMPRESSED = 0x01;
const MAX_FRAME_BYTES = 64 * 1024 * 1024;
/** The agent says that it is alive when it has said nothing else for so long. */
const KEEPALIVE_SECONDS = "50";
const MAX_ERROR_BYTES = 64 * 1024;

/**
 * An error of the agent, or of the way to it. `code` is the Connect protocol's (`not_found`, `unavailable` …),
 * or `gone` when the proxy knows no such sandbox, or `cut` when a connection broke with its request unanswered.
 */
export class AgentError extends CliError {
  readonly code: string;
  constructor(code: string, message: string, cause?: unknown) {
    super(message, cause === undefined ? {} : { cause });
    this.name = "AgentError";
    this.code = code;
  }
}

/** What leads a request through the server's proxy to the agent, and opens its door. */
export function routingHeaders(target: AgentTarget): Record<string, string> {
  return {
    "x-agentenv-sandbox-id": target.sandboxId,
    "x-agentenv-target-port": AGENT_PORT,
    ...(target.accessToken === undefined ? {} : { "x-access-token": target.accessToken }),
  };
}

function headers(target: AgentTarget, contentType: string): Record<string, string> {
  return {
    "content-type": contentType,
    "connect-protocol-version": "1",
    ...routingHeaders(target),
    ...(target.user === undefined
      ? {}
      : { authorization: `Basic ${Buffer.from(`${target.user}:`).toString("base64")}` }),
  };
}

/** Failures to connect: nothing was sent. After any other failure that is not known. */
const NOT_SENT: ReadonlySet<string> = new Set(["ECONNREFUSED", "ENOTFOUND", "EHOSTUNREACH", "ENETUNREACH"]);

/** What a status means when the answer is the proxy's and not the agent's. */
function codeOfStatus(status: number): string {
  if (status === 401) return "unauthenticated";
  if (status === 404) return "gone";
  return status >= 500 || status === 410 || status === 429 ? "unavailable" : "unknown";
}

/** Waits for the rest of an answer; a connection that breaks on the way is an AgentError `cut`. */
async function rest<Value>(reading: Promise<Value>): Promise<Value> {
  try {
    return await reading;
  } catch (cause) {
    if (cause instanceof AgentError) throw cause;
    throw new AgentError("cut", "the connection to the sandbox was cut", cause);
  }
}

/** The first bytes of a body, as text; what is beyond is not read. */
async function startOf(response: Response): Promise<string> {
  const parts: Uint8Array[] = [];
  let length = 0;
  for await (const chunk of response.body ?? []) {
    parts.push(chunk);
    length += chunk.length;
    if (length >= MAX_ERROR_BYTES) break;
  }
  return Buffer.concat(parts).subarray(0, MAX_ERROR_BYTES).toString();
}

/** An answer that is an error, as the agent or the proxy in front of it words it. */
export async function errorOf(response: Response): Promise<AgentError> {
  const text = (await rest(startOf(response))).trim();
  if (text.startsWith("{")) {
    try {
      const body = JSON.parse(text) as { code?: unknown; message?: unknown };
      const code = typeof body.code === "string" ? body.code : codeOfStatus(response.status);
      return new AgentError(code, typeof body.message === "string" ? body.message : text);
    } catch (cause) {
      return new AgentError(
        codeOfStatus(response.status),
        `the sandbox answered HTTP ${response.status}`,
        cause,
      );
    }
  }
  return new AgentError(
    codeOfStatus(response.status),
    `the sandbox answered HTTP ${response.status}${text === "" ? "" : `: ${text}`}`,
  );
}

interface Call {
  readonly body: Uint8Array | ReadableStream<Uint8Array>;
  readonly contentType: string;
  readonly signal: AbortSignal;
  readonly headers?: Readonly<Record<string, string>>;
}

/** Sends a request; anything but status 200 is an AgentError. */
async function post(target: AgentTarget, method: string, call: Call): Promise<Response> {
  // A process may be silent for hours: no time limit but the caller's. A connection that was used before
  // could be dead, and what is asked here must not be asked twice.
  const init: BunFetchRequestInit & { readonly timeout: false } = {
    method: "POST",
    headers: { ...headers(target, call.contentType), ...call.headers },
    body: call.body,
    redirect: "manual",
    keepalive: false,
    signal: call.signal,
    timeout: false,
  };
  let response: Response;
  try {
    response = await fetch(`${target.url}/${method}`, init);
  } catch (cause) {
    if (call.signal.aborted) {
      throw new AgentError("deadline_exceeded", `${method} got no answer in time`, call.signal.reason);
    }
    const { code } = cause as { readonly code?: unknown };
    throw new AgentError(
      typeof code === "string" && NOT_SENT.has(code) ? "unavailable" : "cut",
      `cannot reach the sandbox through ${target.url}`,
      cause,
    );
  }
  if (response.status !== 200) throw await errorOf(response);
  return response;
}

/** One call with one answer, whose bytes are returned. */
export async function unary(
  target: AgentTarget,
  method: string,
  message: Uint8Array,
  timeoutMs: number,
): Promise<Uint8Array> {
  const signal = AbortSignal.timeout(timeoutMs);
  const response = await post(target, method, { body: message, contentType: "application/proto", signal });
  return new Uint8Array(await rest(response.arrayBuffer()));
}

/** A message in its envelope: flag byte, big-endian length, payload. */
function frame(payload: Uint8Array): Uint8Array {
  const bytes = new Uint8Array(5 + payload.length);
  new DataView(bytes.buffer).setUint32(1, payload.length);
  bytes.set(payload, 5);
  return bytes;
}

interface EndOfStream {
  readonly error?: { readonly code?: string; readonly message?: string };
}

/** Takes envelopes apart. Yields the payloads of messages, returns at the end frame; errors of the agent throw. */
async function* payloads(body: AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array> {
  let pending: Buffer = Buffer.alloc(0);
  for await (const chunk of body) {
    pending = pending.length === 0 ? Buffer.from(chunk) : Buffer.concat([pending, chunk]);
    let at = 0;
    while (pending.length - at >= 5) {
      const flags = pending[at]!;
      const length = pending.readUInt32BE(at + 1);
      if (length > MAX_FRAME_BYTES)
        throw new AgentError("internal", `a message of ${length} bytes is too large`);
      if (pending.length - at < 5 + length) break;
      const payload = pending.subarray(at + 5, at + 5 + length);
      at += 5 + length;
      if ((flags & COMPRESSED) !== 0)
        throw new AgentError("internal", "a compressed message was not asked for");
      if ((flags & END_OF_STREAM) !== 0) {
        const { error } = JSON.parse(payload.toString("utf8") || "{}") as EndOfStream;
        if (error !== undefined) {
          throw new AgentError(error.code ?? "unknown", error.message ?? "the stream failed");
        }
        return;
      }
      yield payload;
    }
    pending = pending.subarray(at);
  }
  throw new AgentError("unavailable", "the connection to the sandbox was cut");
}

/**
 * Events of a process: `process.Process/Start` or `/Connect`. Ends after the agent's end frame; a stream
 * that is cut short is an AgentError `unavailable`. Reading slowly slows the process.
 */
export async function* processEvents(
  target: AgentTarget,
  method: "process.Process/Start" | "process.Process/Connect",
  message: Uint8Array,
  signal: AbortSignal,
  /** The agent kills a process that it starts with this after so long, and ends the stream with `deadline_exceeded`. */
  lifetimeMs?: number,
): AsyncGenerator<ProcessEvent> {
  const response = await post(target, method, {
    body: frame(message),
    contentType: "application/connect+proto",
    headers: {
      "keepalive-ping-interval": KEEPALIVE_SECONDS,
      ...(lifetimeMs === undefined ? {} : { "connect-timeout-ms": String(lifetimeMs) }),
    },
    signal,
  });
  if (response.body === null) throw new AgentError("internal", "the sandbox answered without a stream");
  try {
    for await (const payload of payloads(response.body)) {
      const event = decodeEvent(payload);
      if (event !== undefined) yield event;
    }
  } catch (cause) {
    if (cause instanceof CliError) throw cause;
    throw new AgentError("unavailable", "the connection to the sandbox was cut", cause);
  }
}

/**
 * A client stream. Messages are asked for when the connection takes them: what `next` has not been asked
 * for is still the caller's when the stream breaks. Resolves when the agent has answered; rejects with an
 * AgentError when the stream broke.
 */
export async function sendStream(
  target: AgentTarget,
  method: string,
  next: () => Promise<Uint8Array | undefined>,
  signal: AbortSignal,
): Promise<void> {
  const body = new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        const message = await next();
        if (message === undefined) controller.close();
        else controller.enqueue(frame(message));
      },
    },
    { highWaterMark: 0 },
  );
  const response = await post(target, method, { body, contentType: "application/connect+proto", signal });
  // The answer itself is empty; its end frame tells whether all was taken.
  if (response.body !== null) await rest(Array.fromAsync(payloads(response.body)));
}

/** Numbers (Linux on x86 and ARM) of the names that the agent gives signals in an end event's `status`. */
const SIGNALS: Readonly<Record<string, number>> = {
  hangup: 1,
  interrupt: 2,
  quit: 3,
  "illegal instruction": 4,
  "trace/breakpoint trap": 5,
  aborted: 6,
  "bus error": 7,
  "floating point exception": 8,
  killed: 9,
  "user defined signal 1": 10,
  "segmentation fault": 11,
  "user defined signal 2": 12,
  "broken pipe": 13,
  "alarm clock": 14,
  terminated: 15,
  "stack fault": 16,
  "CPU time limit exceeded": 24,
  "file size limit exceeded": 25,
  "virtual timer expired": 26,
  "profiling timer expired": 27,
  "I/O possible": 29,
  "power failure": 30,
  "bad system call": 31,
};

/** Exit status as a shell gives it: 128 + signal for a process that was killed. */
export function exitStatus(end: ProcessEnd): number {
  if (end.exited) return end.exitCode & 255;
  const name = /^signal: (.+?)(?: \(core dumped\))?$/.exec(end.status)?.[1] ?? "";
  const number = SIGNALS[name] ?? Number(/^signal (\d+)$/.exec(name)?.[1]);
  return number > 0 && number < 128 ? 128 + number : 255;
}
