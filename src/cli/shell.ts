import { AgentError, type AgentTarget, exitStatus, processEvents, unary } from "./agent.ts";
import { type Api, ApiError, type SandboxJson, START_TIMEOUT_MS } from "./api.ts";
import { CliError } from "./command.ts";
import { DetachDetector } from "./detach.ts";
import { StatusLine, writeAll } from "./output.ts";
import {
  decodeProcesses,
  encodeConnect,
  encodeEmpty,
  encodePath,
  encodeResize,
  encodeStart,
  type ProcessEvent,
  type TerminalSize,
} from "./protocol.ts";
import { ShellInput } from "./shell-input.ts";
import { RawMode, ScreenModes } from "./terminal.ts";

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

/** Exit status of a session that did not end by its shell. */
const SESSION_ENDED = 130;
/** A session extends its sandbox's life by this much. */
const KEEP_SECONDS = 300;

const AGENT_WAIT_MS = 30_000;
const AGENT_PROBE_MS = 500;
const AGENT_PROBE_PAUSE_MS = 100;
const SHELL_START_MS = 30_000;
/** So long a detach waits for keys that are still under way. */
const LAST_KEYS_MS = 3_000;

const RESIZE_POLL_MS = 250;
/** How long a program that is taken over may take to draw itself in the size that makes it do so. */
const REDRAW_MS = 1_000;
const REATTACH_PAUSE_MS = 500;
const REATTACH_MS = 800;
/** How far the main output stream may be behind a second one. */
const COMPARE_MS = 750;
/** Printable keys without any output for so long make the output stream suspicious. */
const ECHO_MS = 500;
/** Pause between attempts to get a second output stream. */
const SUSPECT_PAUSE_MS = 5_000;
const WATCH_MS = 1_000;
const PROBE_MS = 200;
const MAX_PROBE_MS = 3_200;
const UNHEALTHY_MS = 10_000;
const STATE_CHECK_MS = 5_000;
const STATE_TIMEOUT_MS = 3_000;
/** A sandbox is shown as paused while a snapshot of it is taken, too. */
const PAUSE_CONFIRM_MS = 1_000;
const REFRESH_MS = 60_000;

type SessionEnd =
  | { readonly kind: "exit"; readonly code: number }
  | { readonly kind: "paused" | "deleted" | "lost" | "detached" };

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

/** Size of the local terminal now; a terminal that does not know its size has the usual one. */
function localSize(): TerminalSize {
  const [cols, rows] = process.stdout.getWindowSize();
  return { cols: cols > 0 ? cols : 80, rows: rows > 0 ? rows : 24 };
}

/** Resumes the sandbox when it is paused, lets it live for at least 300 s, and tells how its agent is reached. */
async function connectSandbox(api: Api, sandboxId: string): Promise<AgentTarget> {
  const { body } = await api.request<SandboxJson>(
    "POST",
    `/sandboxes/${encodeURIComponent(sandboxId)}/connect`,
    { body: { timeout: KEEP_SECONDS }, timeoutMs: START_TIMEOUT_MS },
  );
  return {
    url: api.credentials.url,
    sandboxId: body.sandboxID,
    ...(typeof body.envdAccessToken === "string" ? { accessToken: body.envdAccessToken } : {}),
  };
}

const probe = (target: AgentTarget, timeoutMs: number) =>
  unary(target, "process.Process/List", encodeEmpty(), timeoutMs);

/** Waits until the agent answers, at most 30 s. */
async function waitForAgent(target: AgentTarget): Promise<void> {
  const deadline = performance.now() + AGENT_WAIT_MS;
  for (;;) {
    try {
      await probe(target, AGENT_PROBE_MS);
      return;
    } catch (cause) {
      if (!(cause instanceof AgentError)) throw cause;
      // These do not get better by waiting.
      const final = cause.code === "gone" || cause.code === "unauthenticated";
      if (final || performance.now() >= deadline) {
        throw new CliError(`the agent of sandbox ${target.sandboxId} cannot be reached`, { cause });
      }
      await Bun.sleep(AGENT_PROBE_PAUSE_MS);
    }
  }
}

/** A wrong pid: the right ones are said with it, as far as the sandbox tells them. */
async function noSuchShell(target: AgentTarget, pid: number, cause: AgentError): Promise<CliError> {
  const connect = `aenv cn ${target.sandboxId}`;
  let hint: string;
  try {
    // A process of ours that is interactive; `sh -c SCRIPT` is none.
    const shells = decodeProcesses(await probe(target, SHELL_START_MS)).filter(
      ({ cmd, args }) => /(?:^|\/)\w*sh$/.test(cmd) && args.every((arg) => /^-(?!c$)/.test(arg)),
    );
    hint =
      shells.length === 0
        ? `no shell runs in it; start one with: ${connect}`
        : `shells that run in it: ${shells.map((one) => `${one.pid} (${[one.cmd, ...one.args].join(" ")})`).join(", ")}; come back to one with: ${connect} --pid ${shells[0]!.pid}`;
  } catch (error) {
    if (!(error instanceof AgentError)) throw error;
    hint = `start a shell with: ${connect}`;
  }
  return new CliError(`no process ${pid} that was started through the server runs in ${target.sandboxId}`, {
    hint,
    cause,
  });
}

/** `/bin/bash` when the image has it, else `/bin/sh`. */
async function pickShell(target: AgentTarget): Promise<{ cmd: string; args: string[] }> {
  const bash = { cmd: "/bin/bash", args: ["-i", "-l"] };
  try {
    await unary(target, "filesystem.Filesystem/Stat", encodePath(bash.cmd), SHELL_START_MS);
    return bash;
  } catch (error) {
    if (error instanceof AgentError && error.code === "not_found") return { cmd: "/bin/sh", args: ["-l"] };
    throw error;
  }
}

/** What runs on the remote terminal. */
export interface TerminalCommand {
  readonly cmd: string;
  readonly args: readonly string[];
  readonly envs?: Readonly<Record<string, string>>;
  readonly cwd?: string;
}

export interface SessionOptions {
  /** Keys that leave the session and what runs in it as it is; empty: none do. */
  readonly detachKeys: Buffer;
}

/** An interactive shell in a sandbox on the local terminal; resolves with this program's exit status. */
export async function openShell(
  api: Api,
  sandboxId: string,
  options: SessionOptions & { readonly pid?: number },
): Promise<number> {
  let target: AgentTarget;
  let what: TerminalCommand | number;
  {
    using status = new StatusLine();
    if (status.live) status.set(`connecting to sandbox ${sandboxId}`);
    target = await connectSandbox(api, sandboxId);
    await waitForAgent(target);
    what = options.pid ?? (await pickShell(target));
  }
  return attach(api, target, what, options, "shell");
}

/** A command on a terminal of its own that the local one is attached to; resolves with the exit status. */
export async function runOnTerminal(
  api: Api,
  target: AgentTarget,
  command: TerminalCommand,
  options: SessionOptions,
): Promise<number> {
  return attach(api, target, command, options, "command");
}

async function attach(
  api: Api,
  target: AgentTarget,
  what: TerminalCommand | number,
  options: SessionOptions,
  name: "shell" | "command",
): Promise<number> {
  const id = target.sandboxId;
  const session = new Session(api, target, options);
  const end = await session.run(what).catch(async (error: unknown) => {
    const wrong = typeof what === "number" && session.pid === 0 && error instanceof AgentError;
    throw wrong && error.code === "not_found" ? await noSuchShell(target, what, error) : error;
  });
  const notice = (text: string) => process.stderr.write(`\r\x1b[2K${text}\n`);
  switch (end.kind) {
    case "exit":
      if (name === "shell") {
        notice(`The shell has ended, the sandbox has not. Come back with: aenv cn ${id}`);
      }
      return end.code;
    case "detached":
      notice(`Detached; the ${name} goes on. Come back to it with: aenv cn ${id} --pid ${session.pid}`);
      return 0;
    case "paused":
      notice(`The sandbox was paused. Resume it with: aenv resume ${id}`);
      return SESSION_ENDED;
    case "deleted":
      notice(`The sandbox ${id} was deleted.`);
      return SESSION_ENDED;
    case "lost":
      notice(`The connection to the sandbox was lost. Try again with: aenv cn ${id}`);
      return SESSION_ENDED;
  }
}

/** Events of the remote shell over one connection. */
class EventStream {
  readonly #abort = new AbortController();
  readonly #events: AsyncGenerator<ProcessEvent>;
  #unread: ProcessEvent | undefined;

  constructor(
    target: AgentTarget,
    method: "process.Process/Start" | "process.Process/Connect",
    message: Uint8Array,
  ) {
    this.#events = processEvents(target, method, message, this.#abort.signal);
  }

  /**
   * The next event; undefined after the last one. A connection that broke or was closed is an AgentError.
   * `timeoutMs` is a limit for this event.
   */
  async next(timeoutMs?: number): Promise<ProcessEvent | undefined> {
    const early = this.#unread;
    if (early !== undefined) {
      this.#unread = undefined;
      return early;
    }
    const timer =
      timeoutMs === undefined
        ? undefined
        : setTimeout(() => this.#abort.abort(new Error(`nothing came within ${timeoutMs} ms`)), timeoutMs);
    try {
      const { value, done } = await this.#events.next();
      return done === true ? undefined : value;
    } finally {
      clearTimeout(timer);
    }
  }

  /** Gives an event back: `next` returns it again. */
  unread(event: ProcessEvent): void {
    this.#unread = event;
  }

  close(): void {
    this.#abort.abort(new Error("closed"));
  }
}

/** One remote shell from its start to its end, over as many connections as it takes. */
class Session {
  readonly #api: Api;
  readonly #target: AgentTarget;
  readonly #options: SessionOptions;
  readonly #modes = new ScreenModes();
  readonly #outcome = Promise.withResolvers<SessionEnd>();
  readonly #cleanup = new DisposableStack();
  #over = false;
  #pid = 0;
  #input: ShellInput | undefined;
  #main: EventStream | undefined;
  /** A second stream that is compared with the main one. */
  #second: EventStream | undefined;
  #heardAt = performance.now();
  #unhealthyMs = 0;
  /** Told when something is shown. */
  #drawn: () => void = () => undefined;
  #active = false;
  /** Since when printable keys wait for any output. */
  #echoSince: number | undefined;
  #suspectedAt = Number.NEGATIVE_INFINITY;

  constructor(api: Api, target: AgentTarget, options: SessionOptions) {
    this.#api = api;
    this.#target = target;
    this.#options = options;
  }

  /** Of the remote process. */
  get pid(): number {
    return this.#pid;
  }

  /** Starts a command on a terminal, or attaches to the process with this pid that has one. */
  async run(what: TerminalCommand | number): Promise<SessionEnd> {
    const size = localSize();
    this.#main =
      typeof what === "number"
        ? new EventStream(this.#target, "process.Process/Connect", encodeConnect(what))
        : new EventStream(
            this.#target,
            "process.Process/Start",
            encodeStart({ ...what, envs: { ...sessionEnvironment(), ...what.envs }, pty: size }),
          );
    try {
      const first = await this.#main.next(SHELL_START_MS);
      if (first?.kind !== "start") throw new CliError("the shell did not start");
      this.#pid = first.pid;
      this.#follow().then(
        (end) => this.#outcome.resolve(end),
        (error: unknown) => this.#outcome.reject(error),
      );
      // Asked for below; what goes wrong before is told first.
      this.#outcome.promise.catch(() => undefined);
      if (typeof what === "number") await this.#takeOver(size);
      this.#begin(size);
      return await this.#outcome.promise;
    } finally {
      this.#over = true;
      this.#main?.close();
      this.#second?.close();
      this.#cleanup.dispose();
    }
  }

  /**
   * A terminal that was left: a change of its size makes programs draw themselves anew. The right size follows when
   * something was drawn: two changes at once look like none to a busy program.
   */
  async #takeOver(size: TerminalSize): Promise<void> {
    const tell = (next: TerminalSize) =>
      unary(this.#target, "process.Process/Update", encodeResize(this.#pid, next), 5_000);
    const drawn = Promise.withResolvers<void>();
    this.#drawn = drawn.resolve;
    try {
      await tell({ cols: size.cols, rows: size.rows + 1 });
      await Promise.race([drawn.promise, Bun.sleep(REDRAW_MS)]);
      await tell(size);
    } catch (error) {
      if (!(error instanceof AgentError) || error.code !== "internal") throw error;
      throw new CliError(`process ${this.#pid} has no terminal to attach to`, { cause: error });
    }
  }

  /** Takes the terminal over and starts whatever runs beside the output. */
  #begin(size: TerminalSize): void {
    const { stdin } = process;
    const cleanup = this.#cleanup;
    cleanup.use(new RawMode(this.#modes));
    const input = new ShellInput(this.#target, this.#pid, {
      pause: () => stdin.pause(),
      resume: () => {
        if (!this.#over) stdin.resume();
      },
    });
    this.#input = input;
    cleanup.defer(() => input.close());
    const detach = new DetachDetector(
      this.#options.detachKeys,
      (bytes) => this.#onKeys(bytes),
      // What was typed before it is the shell's.
      () => void input.finish(LAST_KEYS_MS).then(() => this.#outcome.resolve({ kind: "detached" })),
    );
    cleanup.use(detach);
    const onKeys = (bytes: Buffer) => detach.typed(bytes);
    // The local terminal is gone; so will we be.
    const onEnd = () => this.#outcome.resolve({ kind: "lost" });
    stdin.on("data", onKeys);
    stdin.on("end", onEnd);
    stdin.resume();
    cleanup.defer(() => {
      stdin.off("data", onKeys);
      stdin.off("end", onEnd);
      stdin.pause();
    });
    const every = (ms: number, action: () => void) => {
      const timer = setInterval(action, ms);
      cleanup.defer(() => clearInterval(timer));
    };
    this.#followSize(size, every);
    every(ECHO_MS / 2, () => this.#checkEcho());
    let watching = false;
    every(WATCH_MS, () => {
      if (watching) return;
      watching = true;
      this.#watchAgent().then(
        () => {
          watching = false;
        },
        (error: unknown) => this.#outcome.reject(error),
      );
    });
    every(STATE_CHECK_MS, () => {
      this.#ended().then(
        (end) => {
          if (end !== undefined) this.#outcome.resolve(end);
        },
        (error: unknown) => this.#outcome.reject(error),
      );
    });
    every(REFRESH_MS, () => this.#refresh());
  }

  #onKeys(bytes: Buffer): void {
    this.#active = true;
    this.#input?.send(Buffer.from(bytes));
    // Control keys and escape sequences need not show anything.
    if (bytes[0]! >= 0x20 && bytes[0] !== 0x7f) this.#echoSince ??= performance.now();
  }

  #followSize(started: TerminalSize, every: (ms: number, action: () => void) => void): void {
    let told = started;
    let telling = false;
    every(RESIZE_POLL_MS, () => {
      const size = localSize();
      if (telling || (size.cols === told.cols && size.rows === told.rows)) return;
      telling = true;
      const done = (): void => {
        telling = false;
      };
      // One that fails is tried again with the next look at the size.
      unary(this.#target, "process.Process/Update", encodeResize(this.#pid, size), 2_000)
        .then(() => {
          told = size;
        })
        .then(done, done);
    });
  }

  #refresh(): void {
    if (!this.#active) return;
    this.#active = false;
    this.#api
      .request("POST", `/sandboxes/${this.#target.sandboxId}/refreshes`, { body: { duration: KEEP_SECONDS } })
      .catch(() => {
        this.#active = true; // Tried again in a minute; the state check tells when something is wrong.
      });
  }

  // ---- output ----

  async #follow(): Promise<SessionEnd> {
    for (;;) {
      const end = await this.#read(this.#main!);
      if (end !== undefined || this.#over) return end ?? { kind: "lost" };
      if (this.#second !== undefined) {
        this.#main = this.#second;
        this.#second = undefined;
        continue;
      }
      const failed = await this.#reattach();
      if (failed !== undefined) return failed;
    }
  }

  /** Shows what a stream brings until it ends; undefined when it broke. */
  async #read(stream: EventStream): Promise<SessionEnd | undefined> {
    for (;;) {
      let event: ProcessEvent | undefined;
      try {
        event = await stream.next();
      } catch (error) {
        if (!(error instanceof AgentError)) throw error;
      }
      if (event === undefined) return undefined;
      this.#heard();
      if (event.kind === "end") return { kind: "exit", code: exitStatus(event.end) };
      if (event.kind !== "pty") continue;
      // The main stream works: what the second one brings is the same again.
      this.#dropSecond();
      await this.#show(event.bytes);
    }
  }

  async #show(bytes: Uint8Array): Promise<void> {
    this.#active = true;
    this.#drawn();
    this.#echoSince = undefined;
    this.#modes.observe(bytes);
    await writeAll(process.stdout, bytes);
  }

  #heard(): void {
    this.#heardAt = performance.now();
    this.#unhealthyMs = 0;
  }

  /** The output stream broke: attach to the same shell again. Resolves with undefined when that is done. */
  async #reattach(): Promise<SessionEnd | undefined> {
    this.#input?.hold();
    while (!this.#over) {
      const end = await this.#ended();
      if (end !== undefined) return end;
      await Bun.sleep(REATTACH_PAUSE_MS);
      try {
        this.#main = await this.#connect();
        this.#input?.release();
        return undefined;
      } catch (error) {
        if (!(error instanceof AgentError)) throw error;
        // Nobody knows the shell any more: the sandbox was started anew, or it ended long ago.
        if (error.code === "not_found") return { kind: "lost" };
      }
    }
    return { kind: "lost" };
  }

  /** Another stream of the same shell's events. */
  async #connect(): Promise<EventStream> {
    const stream = new EventStream(this.#target, "process.Process/Connect", encodeConnect(this.#pid));
    const first = await stream.next(REATTACH_MS);
    if (first?.kind !== "start")
      throw new AgentError("unavailable", "no answer from the shell's event stream");
    this.#heard();
    return stream;
  }

  /** Keys that show nothing: either nothing is to be shown, or the output goes nowhere. */
  #checkEcho(): void {
    const now = performance.now();
    if (this.#echoSince === undefined || now - this.#echoSince < ECHO_MS) return;
    if (this.#second !== undefined || now - this.#suspectedAt < SUSPECT_PAUSE_MS) return;
    this.#echoSince = undefined;
    this.#suspectedAt = now;
    this.#compare().catch((error: unknown) => {
      // No second stream to be had: the watch over the agent decides what that means.
      if (!(error instanceof AgentError)) this.#outcome.reject(error);
    });
  }

  /**
   * Opens a second stream and keeps it until the main one brings something. If only the second one does,
   * for a while, the main one is dead, and the second takes its place with all it brought: nothing is shown
   * twice, and nothing lost that came after it was there.
   */
  async #compare(): Promise<void> {
    const main = this.#main;
    const second = await this.#connect();
    if (this.#over || this.#main !== main || this.#second !== undefined) {
      second.close();
      return;
    }
    this.#second = second;
    try {
      let event: ProcessEvent | undefined;
      do event = await second.next();
      while (event?.kind === "keepalive");
      if (event === undefined) throw new AgentError("unavailable", "the second stream ended");
      second.unread(event);
    } catch (error) {
      if (this.#second === second) this.#dropSecond();
      throw error;
    }
    setTimeout(() => {
      // Closing it sends the reader of the main stream to the second one.
      if (this.#second === second) main?.close();
    }, COMPARE_MS).unref();
  }

  #dropSecond(): void {
    this.#second?.close();
    this.#second = undefined;
  }

  // ---- the sandbox's health ----

  /** How the session has ended when its sandbox is paused or gone; undefined while it runs. */
  async #ended(): Promise<SessionEnd | undefined> {
    const state = await this.#state();
    if (state === "deleted") return { kind: "deleted" };
    if (state !== "paused") return undefined;
    await Bun.sleep(PAUSE_CONFIRM_MS);
    const again = await this.#state();
    return again === "paused" || again === "deleted" ? { kind: again } : undefined;
  }

  async #state(): Promise<"running" | "paused" | "deleted" | "unknown"> {
    try {
      const { body } = await this.#api.request<SandboxJson>("GET", `/sandboxes/${this.#target.sandboxId}`, {
        timeoutMs: STATE_TIMEOUT_MS,
      });
      return body.state ?? "unknown";
    } catch (error) {
      if (!(error instanceof CliError)) throw error;
      return error instanceof ApiError && error.status === 404 ? "deleted" : "unknown";
    }
  }

  /** Every second without a sign of life the agent is asked for one; ten seconds in vain end the session. */
  async #watchAgent(): Promise<void> {
    if (performance.now() - this.#heardAt < WATCH_MS) return;
    const asked = performance.now();
    try {
      // A far server may need longer than a near one: the patience grows while there is no answer.
      await probe(this.#target, Math.min(MAX_PROBE_MS, Math.max(PROBE_MS, this.#unhealthyMs)));
      this.#heard();
    } catch (error) {
      if (!(error instanceof AgentError)) throw error;
      if (this.#heardAt > asked) return;
      // Counted from probe to probe: time in which this process was stopped is nobody's fault.
      this.#unhealthyMs += Math.min(WATCH_MS + MAX_PROBE_MS, performance.now() - asked + WATCH_MS);
      if (this.#unhealthyMs >= UNHEALTHY_MS) this.#outcome.resolve({ kind: "lost" });
    }
  }
}
