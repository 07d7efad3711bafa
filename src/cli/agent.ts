import { CliError } from "./command.ts";

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

/** An error of the agent in the Connect protocol; `code` is the protocol's, e.g. `not_found`. */
export class AgentError extends CliError {
  readonly code: string;
  constructor(code: string, message: string) {
    super(message);
    this.name = "AgentError";
    this.code = code;
  }
}

function headers(target: AgentTarget, contentType: string): Record<string, string> {
  return {
    "content-type": contentType,
    "connect-protocol-version": "1",
    "x-agentenv-sandbox-id": target.sandboxId,
    "x-agentenv-target-port": AGENT_PORT,
    ...(target.accessToken === undefined ? {} : { "x-access-token": target.accessToken }),
    ...(target.user === undefined ? {} : { authorization: `Basic ${btoa(`${target.user}:`)}` }),
  };
}

async function errorOf(response: Response): Promise<AgentError> {
  const text = await response.text();
  try {
    const body = JSON.parse(text) as { code?: string | number; message?: string };
    return new AgentError(String(body.code ?? response.status), body.message ?? text);
  } catch {
    const said = text.trim();
    return new AgentError(
      String(response.status),
      `the sandbox answered HTTP ${response.status}${said === "" ? "" : `: ${said}`}`,
    );
  }
}

export async function unary<Reply>(
  target: AgentTarget,
  method: string,
  message: unknown,
  timeoutMs = 30_000,
): Promise<Reply> {
  const response = await fetch(`${target.url}/${method}`, {
    method: "POST",
    headers: headers(target, "application/json"),
    body: JSON.stringify(message),
    redirect: "manual",
    signal: AbortSignal.timeout(timeoutMs),
  });
  if (response.status !== 200) throw await errorOf(response);
  return (await response.json()) as Reply;
}

export function frame(message: unknown): Uint8Array {
  const payload = Buffer.from(JSON.stringify(message));
  const bytes = new Uint8Array(5 + payload.length);
  new DataView(bytes.buffer).setUint32(1, payload.length);
  bytes.set(payload, 5);
  return bytes;
}

/** Messages of a server stream. Ends after the end frame; a stream cut short is an error. */
export async function* serverStream<Reply>(
  target: AgentTarget,
  method: string,
  message: unknown,
  signal?: AbortSignal,
): AsyncGenerator<Reply> {
  const response = await fetch(`${target.url}/${method}`, {
    method: "POST",
    headers: { ...headers(target, "application/connect+json"), "keepalive-ping-interval": "50" },
    body: frame(message),
    redirect: "manual",
    ...(signal === undefined ? {} : { signal }),
    // A process may be silent for hours.
    timeout: false,
  } as RequestInit);
  if (response.status !== 200) throw await errorOf(response);
  let pending: Buffer = Buffer.alloc(0);
  for await (const chunk of response.body ?? []) {
    pending = pending.length === 0 ? Buffer.from(chunk) : Buffer.concat([pending, chunk]);
    while (pending.length >= 5) {
      const flags = pending[0]!;
      const length = pending.readUInt32BE(1);
      if (length > MAX_FRAME_BYTES)
        throw new AgentError("internal", `a message of ${length} bytes is too large`);
      if (pending.length < 5 + length) break;
      const text = pending.toString("utf8", 5, 5 + length);
      pending = pending.subarray(5 + length);
      if ((flags & COMPRESSED) !== 0)
        throw new AgentError("internal", "a compressed message was not asked for");
      const json = JSON.parse(text === "" ? "{}" : text) as Reply & {
        error?: { code?: string; message?: string };
      };
      if ((flags & END_OF_STREAM) !== 0) {
        if (json.error !== undefined) {
          throw new AgentError(json.error.code ?? "unknown", json.error.message ?? "the stream failed");
        }
        return;
      }
      yield json as Awaited<Reply>;
    }
  }
  throw new AgentError("unavailable", "the connection to the sandbox was cut");
}

/** A client stream that stays open: messages go out as they are sent. */
export class ClientStream {
  #controller: ReadableStreamDefaultController<Uint8Array> | undefined;
  /** Resolves when the agent has answered, rejects when the stream broke. */
  readonly done: Promise<void>;

  constructor(target: AgentTarget, method: string, signal: AbortSignal) {
    const body = new ReadableStream<Uint8Array>({
      start: (controller) => {
        this.#controller = controller;
      },
    });
    this.done = fetch(`${target.url}/${method}`, {
      method: "POST",
      headers: headers(target, "application/connect+json"),
      body,
      redirect: "manual",
      signal,
      timeout: false,
    } as RequestInit).then(async (response) => {
      if (response.status !== 200) throw await errorOf(response);
      await response.arrayBuffer();
    });
  }

  send(message: unknown): void {
    this.#controller?.enqueue(frame(message));
  }

  close(): void {
    this.#controller?.close();
    this.#controller = undefined;
  }
}

export interface ProcessEvent {
  readonly event?: {
    readonly start?: { readonly pid: number };
    readonly data?: { readonly stdout?: string; readonly stderr?: string; readonly pty?: string };
    readonly end?: {
      readonly exitCode?: number;
      readonly exited?: boolean;
      readonly status?: string;
      readonly error?: string;
    };
    readonly keepalive?: Record<string, never>;
  };
}

const SIGNALS: Readonly<Record<string, number>> = {
  hangup: 1,
  interrupt: 2,
  quit: 3,
  "illegal instruction": 4,
  aborted: 6,
  "bus error": 7,
  "floating point exception": 8,
  killed: 9,
  "segmentation fault": 11,
  "broken pipe": 13,
  "alarm clock": 14,
  terminated: 15,
};

/** Exit status as a shell gives it: 128 + signal for a process that was killed. */
export function exitStatus(end: NonNullable<NonNullable<ProcessEvent["event"]>["end"]>): number {
  if (end.exited === true) return (end.exitCode ?? 0) & 255;
  const name = /^signal: ([a-z ]+?)(?: \(core dumped\))?$/.exec(end.status ?? "")?.[1];
  return name !== undefined && SIGNALS[name] !== undefined ? 128 + SIGNALS[name] : 255;
}
