import { fstatSync } from "node:fs";
import { basename } from "node:path";
import { AgentError, type AgentTarget, exitStatus, processEvents, sendStream, unary } from "./agent.ts";
import { Api } from "./api.ts";
import { CliError, type Invocation } from "./command.ts";
import { detachKeys } from "./detach.ts";
import { writeAll } from "./output.ts";
import {
  encodeCloseStdin,
  encodeInputKeepalive,
  encodeInputStart,
  encodeSignal,
  encodeStart,
  encodeStdinData,
} from "./protocol.ts";
import { SignalHandler, signalStatus } from "./signals.ts";
import { runningTarget } from "./target.ts";
import { requireTerminal } from "./terminal.ts";

const START_LIMIT_MS = 60_000;
const SIGNAL_LIMIT_MS = 2_000;
const CLOSE_LIMIT_MS = 10_000;
/** The proxy ends a request body that is idle for 30 s. */
const KEEPALIVE_MS = 10_000;
/** Programs that read what they shall do from standard input when they have no arguments. */
const INTERPRETER = /^((ba|da|a|k|z|fi)?sh|python[\d.]*|node|bun|irb|lua|psql|sqlite3|cat)$/;
const INPUT_BYTES = 64 * 1024;
/** As timeout(1) has it. */
const TIMED_OUT = 124;

/** True when standard input is a pipe, a file or a socket: something that somebody put there. */
function hasInput(): boolean {
  try {
    const stats = fstatSync(0);
    return stats.isFIFO() || stats.isFile() || stats.isSocket();
  } catch {
    return false; // Closed: there is none.
  }
}

/** `-e NAME=VALUE`, or `-e NAME` for the value it has here. */
function environment(words: readonly string[], fail: (message: string) => CliError): Record<string, string> {
  const env: Record<string, string> = {};
  for (const word of words) {
    const sign = word.indexOf("=");
    const name = sign < 0 ? word : word.slice(0, sign);
    if (name === "") throw fail(`--env needs NAME=VALUE, not "${word}"`);
    const value = sign < 0 ? process.env[name] : word.slice(sign + 1);
    if (value !== undefined) env[name] = value;
  }
  return env;
}

/**
 * Ends a command and what it has started: by a signal to its process group, as Ctrl-C would, or to itself
 * alone where there is no shell to send that. Best effort, within two seconds.
 */
async function terminate(target: AgentTarget, pid: number): Promise<void> {
  const limit = AbortSignal.timeout(SIGNAL_LIMIT_MS);
  try {
    const script = encodeStart({ cmd: "/bin/sh", args: ["-c", `kill -TERM -${pid}`], stdin: false });
    for await (const event of processEvents(target, "process.Process/Start", script, limit)) {
      if (event.kind === "end" && exitStatus(event.end) === 0) return;
    }
    await unary(target, "process.Process/SendSignal", encodeSignal(pid, "SIGTERM"), SIGNAL_LIMIT_MS);
  } catch (error) {
    // It has ended meanwhile, or cannot be reached any more.
    if (!(error instanceof AgentError)) throw error;
  }
}

/**
 * Passes standard input on until it ends, no faster than it is taken; then the process reads its end. Resolves
 * early when the process does not want any (more); rejects when the way to it broke: what had arrived is not
 * known then.
 */
async function forwardInput(target: AgentTarget, pid: number, signal: AbortSignal): Promise<void> {
  const chunks = process.stdin[Symbol.asyncIterator]() as AsyncIterator<Buffer>;
  let rest: Buffer = Buffer.alloc(0);
  let begun = false;
  let reading: Promise<IteratorResult<Buffer>> | undefined;
  const next = async (): Promise<Uint8Array | undefined> => {
    if (!begun) {
      begun = true;
      return encodeInputStart(pid);
    }
    while (rest.length === 0) {
      // Asked once more after the end: a read would keep this process.
      if (signal.aborted) return undefined;
      reading ??= chunks.next();
      const { promise, resolve } = Promise.withResolvers<"quiet">();
      const timer = setTimeout(() => resolve("quiet"), KEEPALIVE_MS);
      const got = await Promise.race([reading, promise]);
      clearTimeout(timer);
      if (got === "quiet") return encodeInputKeepalive();
      reading = undefined;
      if (got.done === true) return undefined;
      rest = Buffer.from(got.value);
    }
    const bytes = rest.subarray(0, INPUT_BYTES);
    rest = rest.subarray(bytes.length);
    return encodeStdinData(bytes);
  };
  try {
    await sendStream(target, "process.Process/StreamInput", next, signal);
    await unary(target, "process.Process/CloseStdin", encodeCloseStdin(pid), CLOSE_LIMIT_MS);
  } catch (error) {
    if (signal.aborted) return;
    if (!(error instanceof AgentError)) throw error;
    // It has ended, or closed its input: as with any pipe that is the writer's to accept.
    if (error.code === "not_found" || error.code === "internal" || error.code === "unknown") return;
    throw new CliError("the connection that carried standard input was cut", { cause: error });
  } finally {
    // A read that waits would keep this process.
    process.stdin.destroy();
  }
}

/**
 * `aenv exec`: the command's output goes to the streams of the same name as it comes, its exit status
 * becomes ours. Whoever interrupts this program, or stops reading its output, wants the command ended.
 */
export async function exec({ args, flags, usageError }: Invocation): Promise<number> {
  const [id = "", cmd = "", ...rest] = args;
  const envs = environment(flags.list("env"), usageError);
  const seconds = flags.integer("timeout", 1, 2_147_483);
  const cwd = flags.text("workdir");
  const keys = detachKeys(flags.text("detach-keys"), usageError);
  const tty = flags.has("tty");
  if (tty && seconds !== undefined) throw usageError("--timeout does not go with --tty");
  if (tty) requireTerminal(`leave out --tty, as in: aenv exec ${id} ${cmd}`);
  const api = await Api.open();
  const target = await runningTarget(api, id, flags.text("user"));
  const process_ = { cmd, args: rest, envs, ...(cwd === undefined ? {} : { cwd }) };
  if (tty) {
    const { runOnTerminal } = await import("./shell.ts");
    return runOnTerminal(api, target, process_, { detachKeys: keys });
  }
  const stdin = !flags.has("no-stdin") && (flags.has("interactive") || hasInput());
  const { stdin: ours, stdout } = process;
  if (!stdin && !flags.has("no-stdin") && ours.isTTY === true && stdout.isTTY === true) {
    // Its input is empty: it would end at once, without a word.
    if (rest.length === 0 && INTERPRETER.test(basename(cmd)))
      process.stderr.write("note: standard input is not passed on; use -it\n");
  }
  return runPiped(target, { ...process_, stdin }, seconds);
}

async function runPiped(
  target: AgentTarget,
  start: {
    readonly cmd: string;
    readonly args: readonly string[];
    readonly envs: Readonly<Record<string, string>>;
    readonly cwd?: string;
    readonly stdin: boolean;
  },
  seconds: number | undefined,
): Promise<number> {
  const abort = new AbortController();
  const started = setTimeout(
    () => abort.abort(new Error(`the command did not start within ${START_LIMIT_MS / 1000} s`)),
    START_LIMIT_MS,
  );
  let pid: number | undefined;
  let stopping: number | undefined;
  const stop = (status: number) => {
    const again = stopping !== undefined;
    stopping ??= status;
    if (pid === undefined || again) process.exit(stopping);
    const leave = () => process.exit(stopping);
    terminate(target, pid).then(leave, leave);
  };
  using _signals = new SignalHandler(["SIGINT", "SIGTERM", "SIGHUP"], (signal) => stop(signalStatus(signal)));
  const onBrokenPipe = (error: NodeJS.ErrnoException) => {
    if (error.code === "EPIPE") stop(signalStatus("SIGPIPE"));
  };
  process.stdout.on("error", onBrokenPipe);
  process.stderr.on("error", onBrokenPipe);
  const ended = new AbortController();
  let inputFailed: CliError | undefined;

  try {
    const events = processEvents(
      target,
      "process.Process/Start",
      encodeStart(start),
      abort.signal,
      seconds === undefined ? undefined : seconds * 1000,
    );
    for await (const event of events) {
      switch (event.kind) {
        case "start":
          pid = event.pid;
          clearTimeout(started);
          if (start.stdin) {
            forwardInput(target, pid, ended.signal).catch((error: unknown) => {
              if (!(error instanceof CliError)) throw error;
              inputFailed = error;
              const end = () => abort.abort(error);
              terminate(target, event.pid).then(end, end);
            });
          }
          break;
        case "stdout":
          await writeAll(process.stdout, event.bytes);
          break;
        case "stderr":
          await writeAll(process.stderr, event.bytes);
          break;
        case "end":
          if (inputFailed !== undefined) throw inputFailed;
          return stopping ?? exitStatus(event.end);
      }
    }
  } catch (error) {
    if (inputFailed !== undefined) throw inputFailed;
    if (error instanceof AgentError && error.code === "deadline_exceeded" && pid !== undefined) {
      throw new CliError(`the command did not end within ${seconds} s and was killed`, {
        exitCode: TIMED_OUT,
      });
    }
    throw error;
  } finally {
    clearTimeout(started);
    ended.abort();
    process.stdout.off("error", onBrokenPipe);
    process.stderr.off("error", onBrokenPipe);
  }
  throw new CliError("the stream ended without the command's exit status");
}
