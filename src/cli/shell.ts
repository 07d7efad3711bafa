import {
  AgentError,
  type AgentTarget,
  ClientStream,
  exitStatus,
  type ProcessEvent,
  serverStream,
  unary,
} from "./agent.ts";
import { type Api, ApiError, type SandboxJson } from "./api.ts";
import { CliError } from "./command.ts";

const KNOWN_TERMINALS = new Set([
  "xterm",
  "xterm-256color",
  "screen",
  "screen-256color",
  "tmux",
  "tmux-256color",
  "linux",
  "vt100",
  "vt220",
  "dumb",
]);

const SESSION_ENDED = 130;
const INPUT_KEEPALIVE_MS = 10_000;
const REATTACH_DELAY_MS = 500;
const REATTACH_TRIES = 20;
const STATE_CHECK_MS = 5_000;
const REFRESH_MS = 60_000;

function sessionEnvironment(): Record<string, string> {
  const env: Record<string, string> = {};
  for (const name of ["COLORTERM", "LANG", "LC_ALL", "LC_CTYPE"]) {
    const value = process.env[name];
    if (value !== undefined && value !== "") env[name] = value;
  }
  const terminal = process.env.TERM ?? "";
  env.TERM = KNOWN_TERMINALS.has(terminal) ? terminal : "xterm-256color";
  return env;
}

function windowSize(): { cols: number; rows: number } {
  return { cols: process.stdout.columns ?? 80, rows: process.stdout.rows ?? 24 };
}

/** Resumes the sandbox when it is paused, and gives what is needed to reach its agent. */
export async function connectSandbox(api: Api, sandboxId: string): Promise<AgentTarget> {
  const { body } = await api.request<SandboxJson>(
    "POST",
    `/sandboxes/${encodeURIComponent(sandboxId)}/connect`,
    {
      body: { timeout: 300 },
    },
  );
  return {
    url: api.credentials.url,
    sandboxId: body.sandboxID,
    ...(body.envdAccessToken === undefined ? {} : { accessToken: body.envdAccessToken }),
  };
}

/** Waits until the agent answers, at most 30 s. */
export async function waitForAgent(target: AgentTarget): Promise<void> {
  const deadline = performance.now() + 30_000;
  for (;;) {
    try {
      await unary(target, "process.Process/List", {}, 2_000);
      return;
    } catch (cause) {
      if (performance.now() >= deadline) {
        throw new CliError(`the sandbox ${target.sandboxId} does not answer`, { cause });
      }
      await Bun.sleep(100);
    }
  }
}

/** Keys to the shell: an open stream that is made again when it breaks; nothing typed is lost. */
class InputSender {
  readonly #target: AgentTarget;
  readonly #pid: number;
  readonly #abort = new AbortController();
  readonly #queue: Uint8Array[] = [];
  #stream: ClientStream | undefined;
  readonly #keepalive: ReturnType<typeof setInterval>;

  constructor(target: AgentTarget, pid: number) {
    this.#target = target;
    this.#pid = pid;
    this.#open();
    this.#keepalive = setInterval(() => this.#stream?.send({ keepalive: {} }), INPUT_KEEPALIVE_MS);
  }

  #open(): void {
    if (this.#abort.signal.aborted) return;
    const stream = new ClientStream(this.#target, "process.Process/StreamInput", this.#abort.signal);
    this.#stream = stream;
    stream.send({ start: { process: { pid: this.#pid } } });
    for (const bytes of this.#queue.splice(0)) this.#sendOn(stream, bytes);
    const again = () => {
      if (this.#stream !== stream) return;
      this.#stream = undefined;
      setTimeout(() => this.#open(), 100);
    };
    stream.done.then(again, again);
  }

  #sendOn(stream: ClientStream, bytes: Uint8Array): void {
    stream.send({ data: { input: { pty: Buffer.from(bytes).toString("base64") } } });
  }

  send(bytes: Uint8Array): void {
    if (this.#stream === undefined) this.#queue.push(bytes);
    else this.#sendOn(this.#stream, bytes);
  }

  close(): void {
    clearInterval(this.#keepalive);
    this.#abort.abort();
  }
}

type SessionEnd =
  | { readonly kind: "exit"; readonly code: number }
  | { readonly kind: "paused" | "deleted" | "lost" };

/** An interactive shell on the local terminal; resolves with the exit status for this process. */
export async function attachShell(api: Api, target: AgentTarget): Promise<number> {
  if (process.stdin.isTTY !== true || process.stdout.isTTY !== true) {
    throw new CliError("a shell needs a terminal on standard input and output", {
      hint: `run a command with: aenv exec ${target.sandboxId} COMMAND`,
    });
  }
  const end = await runSession(api, target);
  const notice = (text: string) => process.stderr.write(`\r\x1b[2K${text}\n`);
  switch (end.kind) {
    case "exit":
      notice(`Shell ended. The sandbox still runs; come back with: aenv cn ${target.sandboxId}`);
      return end.code;
    case "paused":
      notice(`The sandbox was paused. Resume it with: aenv resume ${target.sandboxId}`);
      return SESSION_ENDED;
    case "deleted":
      notice("The sandbox was deleted.");
      return SESSION_ENDED;
    case "lost":
      notice(`The connection to the sandbox was lost. Try: aenv cn ${target.sandboxId}`);
      return SESSION_ENDED;
  }
}

async function sandboxState(
  api: Api,
  sandboxId: string,
): Promise<"running" | "paused" | "deleted" | "unknown"> {
  try {
    return (await api.request<SandboxJson>("GET", `/sandboxes/${sandboxId}`, { timeoutMs: 3_000 })).body
      .state;
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return "deleted";
    return "unknown";
  }
}

async function runSession(api: Api, target: AgentTarget): Promise<SessionEnd> {
  const abort = new AbortController();
  let pid: number | undefined;
  let input: InputSender | undefined;
  let active = true;
  let over: SessionEnd | undefined;

  const onKeys = (bytes: Buffer) => {
    active = true;
    input?.send(bytes);
  };
  const onResize = () => {
    if (pid === undefined) return;
    const update = { process: { pid }, pty: { size: windowSize() } };
    // A resize that fails is made up for by the next one.
    unary(target, "process.Process/Update", update, 2_000).catch(() => undefined);
  };
  const check = setInterval(async () => {
    const state = await sandboxState(api, target.sandboxId);
    if (state !== "paused" && state !== "deleted") return;
    over = { kind: state };
    abort.abort();
  }, STATE_CHECK_MS);
  const refresh = setInterval(() => {
    if (!active) return;
    active = false;
    api
      .request("POST", `/sandboxes/${target.sandboxId}/refreshes`, { body: { duration: 300 } })
      .catch(() => undefined); // The state check tells what is wrong.
  }, REFRESH_MS);

  const consume = async (events: AsyncGenerator<ProcessEvent>): Promise<SessionEnd | undefined> => {
    for await (const { event } of events) {
      if (event?.start !== undefined && pid === undefined) {
        pid = event.start.pid;
        process.stdin.setRawMode(true);
        process.stdin.resume();
        process.stdin.on("data", onKeys);
        process.stdout.on("resize", onResize);
        input = new InputSender(target, pid);
      }
      if (event?.data?.pty !== undefined) {
        active = true;
        const bytes = Buffer.from(event.data.pty, "base64");
        if (!process.stdout.write(bytes))
          await new Promise((resolve) => process.stdout.once("drain", resolve));
      }
      if (event?.end !== undefined) return { kind: "exit", code: exitStatus(event.end) };
    }
    return undefined;
  };

  try {
    let lastError: unknown;
    for (const shell of ["/bin/bash", "/bin/sh"]) {
      try {
        const started = serverStream<ProcessEvent>(
          target,
          "process.Process/Start",
          {
            process: {
              cmd: shell,
              args: shell === "/bin/bash" ? ["-i", "-l"] : ["-l"],
              envs: sessionEnvironment(),
            },
            pty: { size: windowSize() },
          },
          abort.signal,
        );
        const result = await consume(started);
        // A shell that is not in the image ends at once with 126 or 127.
        if (
          result?.kind === "exit" &&
          (result.code === 126 || result.code === 127) &&
          shell === "/bin/bash"
        ) {
          if (pid !== undefined) {
            process.stdin.off("data", onKeys);
            input?.close();
            pid = undefined;
          }
          continue;
        }
        if (result !== undefined) return result;
        break;
      } catch (error) {
        lastError = error;
        if (pid !== undefined || abort.signal.aborted) break;
        const noShell = error instanceof AgentError && error.code === "invalid_argument";
        if (!noShell) throw error;
      }
    }
    if (pid === undefined) {
      if (over !== undefined) return over;
      throw new CliError("there is no shell in this sandbox's image", { cause: lastError });
    }
    // The output stream broke: attach again to the same shell.
    for (let attempt = 0; attempt < REATTACH_TRIES && over === undefined; attempt++) {
      await Bun.sleep(REATTACH_DELAY_MS);
      const state = await sandboxState(api, target.sandboxId);
      if (state === "paused" || state === "deleted") return { kind: state };
      try {
        const again = serverStream<ProcessEvent>(
          target,
          "process.Process/Connect",
          { process: { pid } },
          abort.signal,
        );
        const result = await consume(again);
        if (result !== undefined) return result;
        attempt = 0;
      } catch (error) {
        if (error instanceof AgentError && error.code === "not_found") return { kind: "lost" };
      }
    }
    return over ?? { kind: "lost" };
  } finally {
    clearInterval(check);
    clearInterval(refresh);
    abort.abort();
    input?.close();
    process.stdin.off("data", onKeys);
    process.stdout.off("resize", onResize);
    if (process.stdin.isTTY) process.stdin.setRawMode(false);
    process.stdin.pause();
  }
}
