import { type AgentTarget, exitStatus, processEvents, unary } from "./agent.ts";
import { Api, type SandboxJson } from "./api.ts";
import { CliError, type Invocation } from "./command.ts";
import { writeAll } from "./output.ts";
import { encodeSignal, encodeStart } from "./protocol.ts";
import { SignalHandler, signalStatus } from "./signals.ts";

const START_LIMIT_MS = 60_000;
const SIGNAL_LIMIT_MS = 2_000;

/**
 * `aenv exec`: the command's output goes to the streams of the same name as it comes, its exit status
 * becomes ours. Whoever interrupts this program, or stops reading its output, wants the command ended.
 */
export async function exec({ args, flags }: Invocation): Promise<number> {
  const [id, cmd, ...rest] = args;
  const api = await Api.open();
  const { body } = await api.request<SandboxJson>("GET", `/sandboxes/${encodeURIComponent(id!)}`);
  if (body.state === "paused") {
    throw new CliError(`sandbox ${id} is paused`, { hint: `resume it with: aenv resume ${id}` });
  }
  const user = flags.text("user");
  const cwd = flags.text("cwd");
  const token = body.envdAccessToken;
  const target: AgentTarget = {
    url: api.credentials.url,
    sandboxId: body.sandboxID,
    ...(typeof token === "string" ? { accessToken: token } : {}),
    ...(user === undefined ? {} : { user }),
  };

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
    unary(target, "process.Process/SendSignal", encodeSignal(pid, "SIGTERM"), SIGNAL_LIMIT_MS).then(
      leave,
      leave,
    );
  };
  using _signals = new SignalHandler(["SIGINT", "SIGTERM"], (signal) => stop(signalStatus(signal)));
  const onBrokenPipe = (error: NodeJS.ErrnoException) => {
    if (error.code === "EPIPE") stop(signalStatus("SIGPIPE"));
  };
  process.stdout.on("error", onBrokenPipe);
  process.stderr.on("error", onBrokenPipe);

  try {
    const start = encodeStart({ cmd: cmd!, args: rest, stdin: false, ...(cwd === undefined ? {} : { cwd }) });
    for await (const event of processEvents(target, "process.Process/Start", start, abort.signal)) {
      switch (event.kind) {
        case "start":
          pid = event.pid;
          clearTimeout(started);
          break;
        case "stdout":
          await writeAll(process.stdout, event.bytes);
          break;
        case "stderr":
          await writeAll(process.stderr, event.bytes);
          break;
        case "end":
          return stopping ?? exitStatus(event.end);
      }
    }
  } finally {
    clearTimeout(started);
    process.stdout.off("error", onBrokenPipe);
    process.stderr.off("error", onBrokenPipe);
  }
  throw new CliError("the stream ended without the command's exit status");
}
