import { type AgentTarget, exitStatus, type ProcessEvent, serverStream } from "./agent.ts";
import { Api, ApiError, type BuildInfoJson, type SandboxJson, type TemplateJson } from "./api.ts";
import { CliError, type Command, type Flag, type Invocation, OUTPUT_FLAG } from "./command.ts";
import { credentialsPath, saveCredentials } from "./credentials.ts";
import { formatTable, formatTime, printJson, StatusLine, wantsTable } from "./output.ts";
import { attachShell, connectSandbox, waitForAgent } from "./shell.ts";

const SANDBOX = { name: "sandbox-id", help: "id of the sandbox, as `aenv list` shows it" };
const MAX_SECONDS = 2_147_483_647;

const print = (line: string) => process.stdout.write(`${line}\n`);
const path = (id: string) => `/sandboxes/${encodeURIComponent(id)}`;

// ---- auth ---------------------------------------------------------------------------------------

/** Reads lines of standard input one by one, also when they all come at once. */
class LineReader implements Disposable {
  #buffer = "";
  #ended = false;
  readonly #waiting: (() => void)[] = [];
  readonly #onData = (chunk: Buffer) => {
    this.#buffer += chunk.toString("utf8");
    this.#waiting.shift()?.();
  };
  readonly #onEnd = () => {
    this.#ended = true;
    this.#waiting.shift()?.();
  };

  constructor() {
    process.stdin.on("data", this.#onData);
    process.stdin.on("end", this.#onEnd);
    process.stdin.resume();
  }

  /** Without echo on a terminal when `hidden`. */
  async read(prompt: string, hidden: boolean): Promise<string> {
    process.stderr.write(prompt);
    const raw = hidden && process.stdin.isTTY === true;
    if (raw) process.stdin.setRawMode(true);
    try {
      for (;;) {
        const interrupted = raw && this.#buffer.includes("\x03");
        if (interrupted) throw new CliError("cancelled", { exitCode: 130 });
        const end = this.#buffer.search(/[\r\n]/);
        if (end >= 0 || this.#ended) {
          const line = end < 0 ? this.#buffer : this.#buffer.slice(0, end);
          this.#buffer = end < 0 ? "" : this.#buffer.slice(end + 1).replace(/^\n/, "");
          // Raw mode delivers the erase key as it is.
          return raw ? applyErases(line) : line;
        }
        await new Promise<void>((resolve) => this.#waiting.push(resolve));
      }
    } finally {
      if (raw) {
        process.stdin.setRawMode(false);
        process.stderr.write("\n");
      }
    }
  }

  [Symbol.dispose](): void {
    process.stdin.off("data", this.#onData);
    process.stdin.off("end", this.#onEnd);
    process.stdin.pause();
  }
}

function applyErases(text: string): string {
  const kept: string[] = [];
  for (const character of text) {
    if (character === "\x7f" || character === "\b") kept.pop();
    else kept.push(character);
  }
  return kept.join("");
}

const DEFAULT_URL = "http://localhost:8000";

async function auth(): Promise<number> {
  using input = new LineReader();
  const url = (await input.read(`AENV server URL [${DEFAULT_URL}]: `, false)).trim() || DEFAULT_URL;
  if (!URL.canParse(url) || !/^https?:\/\//.test(url)) {
    throw new CliError(`"${url}" is not an http or https URL`);
  }
  const apiKey = (await input.read("API key: ", true)).trim();
  if (apiKey === "") {
    throw new CliError("the API key is empty", {
      hint: "the server keeps it in $AENV_HOME/secrets/api-key unless AENV_API_KEY is set",
    });
  }
  await saveCredentials({ url: url.replace(/\/+$/, ""), apiKey });
  print("Credentials saved.");
  return 0;
}

// ---- builds -------------------------------------------------------------------------------------

const POLL_MS = 500;

/** Follows a build to its end: the log above, the state and elapsed time on one line. */
async function followBuild(
  api: Api,
  templateId: string,
  buildId: string,
  timeoutSeconds: number | undefined,
): Promise<number> {
  const deadline = timeoutSeconds === undefined ? undefined : performance.now() + timeoutSeconds * 1000;
  using status = new StatusLine();
  let offset = 0;
  let shown = "";
  for (;;) {
    const { body } = await api.request<BuildInfoJson>(
      "GET",
      `/templates/${encodeURIComponent(templateId)}/builds/${encodeURIComponent(buildId)}/status?logsOffset=${offset}`,
    );
    if (body.templateID !== templateId || body.buildID !== buildId) {
      throw new CliError(`the server answered for build ${body.buildID} of template ${body.templateID}`);
    }
    offset += body.logEntries.length;
    for (const entry of body.logEntries) {
      if (entry.level === "warn" || entry.level === "error") status.note(`${entry.level}: ${entry.message}`);
      else if (entry.level === "info") shown = entry.message;
    }
    status.set(`Build status: ${body.status}${shown === "" ? "" : ` - ${shown}`}`);
    // The last window may be full: read on before believing the end.
    const more = body.logEntries.length >= 100;
    if (!more && body.status === "ready") {
      status[Symbol.dispose]();
      print(`Template ${templateId} is ready.`);
      return 0;
    }
    if (!more && body.status === "error") {
      const step = body.reason?.step === undefined ? "" : ` (step: ${body.reason.step})`;
      throw new CliError(`Build failed: ${body.reason?.message ?? "no reason given"}${step}`);
    }
    if (deadline !== undefined && performance.now() > deadline) {
      throw new CliError(`the build did not end within ${timeoutSeconds} s; it goes on`, {
        hint: `watch it with: aenv template watch ${templateId}`,
      });
    }
    if (!more) await Bun.sleep(POLL_MS);
  }
}

function templateNameOf(image: string): string {
  const last = image.split("/").at(-1)!;
  return last.split("@")[0]!.split(":")[0]!;
}

const CPU_FLAG: Flag = { name: "cpu", hiddenAliases: ["cpu-count"], value: "N", help: "virtual CPUs" };
const MEMORY_FLAG: Flag = {
  name: "memory",
  hiddenAliases: ["memory-mb", "mem"],
  value: "MIB",
  help: "memory in MiB",
};

async function pull({ args, flags }: Invocation): Promise<number> {
  const image = args[0]!;
  const probe = flags.integer("probe", 1, 65_535);
  if (probe !== undefined && flags.has("ready-cmd")) {
    throw new CliError("--probe and --ready-cmd exclude each other", { exitCode: 2 });
  }
  if (flags.has("detach") && flags.has("timeout")) {
    throw new CliError("--detach and --timeout exclude each other", { exitCode: 2 });
  }
  const cpuCount = flags.integer("cpu", 1, 1024);
  const memoryMB = flags.integer("memory", 128, 4_194_304);
  const readyCmd = probe === undefined ? flags.text("ready-cmd") : `exec 3<>/dev/tcp/127.0.0.1/${probe}`;
  const startCmd = flags.text("start-cmd");
  const timeout = flags.integer("timeout", 1, MAX_SECONDS);
  const api = await Api.open();
  const { body } = await api.request<{ templateID: string; buildID: string }>("POST", "/v3/templates", {
    body: {
      name: flags.text("name") ?? templateNameOf(image),
      ...(cpuCount === undefined ? {} : { cpuCount }),
      ...(memoryMB === undefined ? {} : { memoryMB }),
    },
  });
  await api.request("POST", `/v2/templates/${body.templateID}/builds/${body.buildID}`, {
    body: {
      fromImage: image,
      ...(startCmd === undefined ? {} : { startCmd }),
      ...(readyCmd === undefined ? {} : { readyCmd }),
    },
  });
  print(`Created template ${body.templateID} (build ${body.buildID})`);
  if (flags.has("detach")) {
    print("Build started.");
    print(`Watch it with: aenv template watch ${body.templateID}`);
    return 0;
  }
  return followBuild(api, body.templateID, body.buildID, timeout);
}

async function watchTemplate({ args }: Invocation): Promise<number> {
  const api = await Api.open();
  const templateId = await api.templateId(args[0]!);
  const { body } = await api.request<{ builds: { buildID: string }[] }>("GET", `/templates/${templateId}`);
  const newest = body.builds[0];
  if (newest === undefined) throw new CliError(`template ${templateId} has no build`);
  return followBuild(api, templateId, newest.buildID, undefined);
}

// ---- sandboxes ----------------------------------------------------------------------------------

async function start({ args, flags }: Invocation): Promise<number> {
  const timeout = flags.integer("timeout", 1, MAX_SECONDS) ?? 300;
  const api = await Api.open();
  if (!flags.has("detach") && (process.stdin.isTTY !== true || process.stdout.isTTY !== true)) {
    throw new CliError("a shell needs a terminal on standard input and output", {
      exitCode: 2,
      hint: "start it in the background with --detach",
    });
  }
  using status = new StatusLine();
  if (process.stderr.isTTY) status.set(`starting a sandbox from ${args[0]}`);
  const { body } = await api.request<SandboxJson>("POST", "/sandboxes", {
    body: { templateID: args[0], timeout, secure: true },
    // A cold host may take its time; the server bounds every part of a start.
    timeoutMs: 300_000,
  });
  status[Symbol.dispose]();
  if (flags.has("detach")) {
    print(body.sandboxID);
    return 0;
  }
  print(`Started sandbox ${body.sandboxID}`);
  const target = await connectSandbox(api, body.sandboxID);
  await waitForAgent(target);
  return attachShell(api, target);
}

async function connect({ args }: Invocation): Promise<number> {
  const api = await Api.open();
  const target = await connectSandbox(api, args[0]!);
  await waitForAgent(target);
  return attachShell(api, target);
}

async function writeAll(stream: NodeJS.WriteStream, bytes: Uint8Array): Promise<void> {
  if (!stream.write(bytes)) await new Promise((resolve) => stream.once("drain", resolve));
}

async function exec({ args, flags }: Invocation): Promise<number> {
  const [id, cmd, ...rest] = args;
  const api = await Api.open();
  const { body } = await api.request<SandboxJson>("GET", path(id!));
  if (body.state === "paused") {
    throw new CliError(`sandbox ${id} is paused`, { hint: `resume it with: aenv resume ${id}` });
  }
  const user = flags.text("user");
  const target: AgentTarget = {
    url: api.credentials.url,
    sandboxId: body.sandboxID,
    ...(body.envdAccessToken === undefined ? {} : { accessToken: body.envdAccessToken }),
    ...(user === undefined ? {} : { user }),
  };
  const cwd = flags.text("cwd");
  const events = serverStream<ProcessEvent>(target, "process.Process/Start", {
    process: { cmd, args: rest, ...(cwd === undefined ? {} : { cwd }) },
    stdin: false,
  });
  for await (const { event } of events) {
    if (event?.data?.stdout !== undefined)
      await writeAll(process.stdout, Buffer.from(event.data.stdout, "base64"));
    if (event?.data?.stderr !== undefined)
      await writeAll(process.stderr, Buffer.from(event.data.stderr, "base64"));
    if (event?.end !== undefined) return exitStatus(event.end);
  }
  throw new CliError("the stream ended without the command's exit status");
}

async function list({ flags }: Invocation): Promise<number> {
  const api = await Api.open();
  const items = await api.list<SandboxJson>("/v2/sandboxes");
  if (!wantsTable(flags.text("output"))) {
    printJson(items);
    return 0;
  }
  const rows = items.map((item) => [
    item.sandboxID,
    item.alias ?? item.templateID,
    item.state,
    String(item.cpuCount),
    String(item.memoryMB),
    String(item.diskSizeMB),
    formatTime(item.startedAt),
  ]);
  process.stdout.write(
    formatTable(["SANDBOX ID", "TEMPLATE", "STATE", "CPU", "MEM (MiB)", "DISK (MiB)", "STARTED"], rows),
  );
  return 0;
}

async function pause({ args }: Invocation): Promise<number> {
  const api = await Api.open();
  try {
    await api.request("POST", `${path(args[0]!)}/pause`);
  } catch (error) {
    // Paused already is what was asked for; any other conflict is not.
    if (!(error instanceof ApiError) || error.status !== 409) throw error;
    const { body } = await api.request<SandboxJson>("GET", path(args[0]!));
    if (body.state !== "paused") throw error;
  }
  print(`Paused ${args[0]}`);
  return 0;
}

async function resume({ args, flags }: Invocation): Promise<number> {
  const timeout = flags.integer("timeout", 1, MAX_SECONDS) ?? 300;
  const api = await Api.open();
  await api.request("POST", `${path(args[0]!)}/connect`, { body: { timeout }, timeoutMs: 300_000 });
  print(`Resumed ${args[0]}`);
  return 0;
}

async function setTimeoutCommand({ args }: Invocation): Promise<number> {
  const seconds = Number(args[1]);
  if (!/^\d+$/.test(args[1]!) || seconds < 1 || seconds > MAX_SECONDS) {
    throw new CliError(`<seconds> must be a whole number from 1 to ${MAX_SECONDS}, not "${args[1]}"`, {
      exitCode: 2,
    });
  }
  const api = await Api.open();
  await api.request("POST", `${path(args[0]!)}/timeout`, { body: { timeout: seconds } });
  print(`Timeout for ${args[0]} set to ${seconds}s`);
  return 0;
}

async function remove({ args }: Invocation): Promise<number> {
  const api = await Api.open();
  await api.request("DELETE", path(args[0]!));
  print(`Deleted sandbox ${args[0]}`);
  return 0;
}

async function templateList({ flags }: Invocation): Promise<number> {
  const api = await Api.open();
  const items = await api.list<TemplateJson>("/v2/templates");
  if (!wantsTable(flags.text("output"))) {
    printJson(items);
    return 0;
  }
  const rows = items.map((item) => [
    item.names.join(", "),
    item.templateID,
    item.buildStatus,
    String(item.cpuCount),
    String(item.memoryMB),
    String(item.diskSizeMB),
    formatTime(item.updatedAt),
  ]);
  process.stdout.write(
    formatTable(["NAME", "TEMPLATE ID", "STATUS", "CPU", "MEM (MiB)", "DISK (MiB)", "UPDATED"], rows),
  );
  return 0;
}

async function templateDelete({ args }: Invocation): Promise<number> {
  const api = await Api.open();
  await api.request("DELETE", `/templates/${encodeURIComponent(args[0]!)}`);
  print(`Deleted template ${args[0]}`);
  return 0;
}

// ---- the table ----------------------------------------------------------------------------------

const DETACH: Flag = { name: "detach", short: "d", help: "do not wait; print what was started" };

export const COMMANDS: readonly Command[] = [
  {
    name: "auth",
    summary: "Store the server's URL and API key",
    details: `Asks for both and writes them to ${credentialsPath()} (mode 0600). The key is never taken from the command line.`,
    arguments: [],
    flags: [],
    examples: ["aenv auth", "printf '%s\\n%s\\n' URL \"$(cat KEYFILE)\" | aenv auth"],
    run: auth,
  },
  {
    name: "pull",
    summary: "Make a template from an OCI image",
    arguments: [{ name: "image", help: "image reference, e.g. debian:12 or host:5000/repo@sha256:..." }],
    flags: [
      { name: "name", value: "NAME", help: "template name (default: last part of the image's name)" },
      CPU_FLAG,
      MEMORY_FLAG,
      {
        name: "start-cmd",
        value: "CMD",
        help: "command that runs in the template, kept running in the snapshot",
      },
      {
        name: "ready-cmd",
        value: "CMD",
        help: "command polled until it succeeds before the snapshot is taken",
      },
      { name: "probe", value: "PORT", help: "ready when something listens on this port" },
      DETACH,
      { name: "timeout", value: "SECS", help: "stop waiting after this time; the build goes on" },
    ],
    examples: [
      "aenv pull debian:12",
      "aenv pull ghcr.io/org/app:1 --name app --start-cmd ./serve --probe 8080",
    ],
    run: pull,
  },
  {
    name: "start",
    summary: "Start a sandbox and open a shell in it",
    arguments: [{ name: "target", help: "template name or id, or snapshot id" }],
    flags: [
      { name: "timeout", value: "SECS", default: "300", help: "time to live" },
      DETACH,
      { name: "secure", help: "accepted for compatibility: sandboxes are always secured" },
    ],
    examples: ["aenv start debian", "id=$(aenv start debian -d) && aenv exec $id uname -a"],
    run: start,
  },
  {
    name: "exec",
    summary: "Run a command in a sandbox",
    details:
      "Standard output and error stay apart, the exit status is the command's own. Put -- before a command that begins with a dash.",
    arguments: [SANDBOX, { name: "command", help: "program and its arguments", rest: true }],
    flags: [
      { name: "user", value: "USER", help: "account to run as (default: the template's)" },
      { name: "cwd", value: "DIR", help: "working directory" },
    ],
    examples: ["aenv exec ID uname -a", "aenv exec ID -- sh -c 'echo hello; exit 3'"],
    run: exec,
  },
  {
    name: "connect",
    aliases: ["cn"],
    summary: "Open a shell in a sandbox, resuming it when paused",
    arguments: [SANDBOX],
    flags: [],
    examples: ["aenv connect ID"],
    run: connect,
  },
  {
    name: "list",
    aliases: ["ls"],
    summary: "List sandboxes",
    arguments: [],
    flags: [OUTPUT_FLAG],
    examples: ["aenv list", "aenv list --output json | jq -r .[].sandboxID"],
    run: list,
  },
  {
    name: "pause",
    summary: "Pause a sandbox with its memory",
    arguments: [SANDBOX],
    flags: [],
    examples: ["aenv pause ID"],
    run: pause,
  },
  {
    name: "resume",
    summary: "Resume a paused sandbox",
    arguments: [SANDBOX],
    flags: [{ name: "timeout", value: "SECS", default: "300", help: "time to live from now" }],
    examples: ["aenv resume ID --timeout 3600"],
    run: resume,
  },
  {
    name: "timeout",
    summary: "Set when a sandbox ends, counted from now",
    arguments: [SANDBOX, { name: "seconds", help: "time to live; may shorten it" }],
    flags: [],
    examples: ["aenv timeout ID 600"],
    run: setTimeoutCommand,
  },
  {
    name: "delete",
    aliases: ["rm"],
    summary: "Delete a sandbox, running or paused",
    arguments: [SANDBOX],
    flags: [],
    examples: ["aenv delete ID"],
    run: remove,
  },
  {
    name: "template list",
    aliases: ["template ls", "templates list", "templates ls"],
    summary: "List templates",
    arguments: [],
    flags: [OUTPUT_FLAG],
    examples: ["aenv template list"],
    run: templateList,
  },
  {
    name: "template watch",
    aliases: ["templates watch"],
    summary: "Follow a template's newest build to its end",
    arguments: [{ name: "template", help: "template name or id" }],
    flags: [],
    examples: ["aenv template watch debian"],
    run: watchTemplate,
  },
  {
    name: "template delete",
    aliases: ["template rm", "templates delete", "templates rm"],
    summary: "Delete a template or snapshot",
    arguments: [{ name: "template", help: "template name or id, or snapshot id" }],
    flags: [],
    examples: ["aenv template delete debian"],
    run: templateDelete,
  },
];
