import {
  Api,
  ApiError,
  type ForkResultJson,
  type SandboxDetailJson,
  type SandboxJson,
  START_TIMEOUT_MS,
} from "./api.ts";
import type { CliError, Invocation } from "./command.ts";
import { detachKeys } from "./detach.ts";
import { formatTable, formatTime, plainText, print, printJson, StatusLine, wantsTable } from "./output.ts";
import { hasTerminal, requireTerminal } from "./terminal.ts";

const MAX_SECONDS = 2_147_483_647;
const DEFAULT_TIMEOUT_SECONDS = 300;

const path = (id: string) => `/sandboxes/${encodeURIComponent(id)}`;

/** `NAME=VALUE` words as a table; a usage error for a word without a name or a sign. */
export function pairs(words: readonly string[], flag: string, fail: (message: string) => CliError) {
  return Object.fromEntries(
    words.map((word): [string, string] => {
      const sign = word.indexOf("=");
      if (sign < 1) throw fail(`--${flag} needs NAME=VALUE, not "${word}"`);
      return [word.slice(0, sign), word.slice(sign + 1)];
    }),
  );
}

/** `PATH=VOLUME` words; what the server would refuse is refused here. */
function volumeMounts(words: readonly string[], fail: (message: string) => CliError) {
  const mounts = words.map((word) => {
    const sign = word.indexOf("=");
    const at = word.slice(0, sign).replace(/\/+$/, "");
    const name = word.slice(sign + 1);
    if (sign < 1 || name === "") throw fail(`--volume needs PATH=VOLUME, not "${word}"`);
    if (!word.startsWith("/") || at === "") throw fail(`"${word}" needs an absolute path other than /`);
    return { name, path: at };
  });
  for (const [i, one] of mounts.entries()) {
    const other = mounts.find((mount, j) => i !== j && `${mount.path}/`.startsWith(`${one.path}/`));
    if (other !== undefined) throw fail(`the mounts ${one.path} and ${other.path} overlap`);
  }
  return mounts;
}

/** `aenv start`. */
export async function start({ args, flags, usageError }: Invocation): Promise<number> {
  const [target = ""] = args;
  const timeout = flags.integer("timeout", 1, MAX_SECONDS) ?? DEFAULT_TIMEOUT_SECONDS;
  const cold = flags.has("cold");
  const cpuCount = flags.integer("cpu", 1, 1024);
  const memoryMB = flags.integer("memory", 128, 4_194_304);
  const diskSizeMB = flags.integer("disk-size-mb", 1024, 1_073_741_824);
  for (const flag of cold ? [] : ["cpu", "memory", "disk-size-mb"]) {
    if (flags.has(flag)) throw usageError(`--${flag} goes with --cold: a template has its own`);
  }
  if (diskSizeMB !== undefined && diskSizeMB % 1024 !== 0) {
    throw usageError(`--disk-size-mb must be a multiple of 1024, not ${diskSizeMB}`);
  }
  const envVars = pairs(flags.list("env"), "env", usageError);
  const metadata = pairs(flags.list("metadata"), "metadata", usageError);
  const mounts = volumeMounts(flags.list("volume"), usageError);
  const keys = detachKeys(flags.text("detach-keys"), usageError);
  const detach = flags.has("detach");
  const api = await Api.open();
  if (!detach && !hasTerminal()) {
    // A wrong name is the more useful thing to hear of.
    if (!cold) await api.templateId(target);
    requireTerminal("start it in the background with --detach");
  }
  const body = {
    ...(cold ? { image: target } : { templateID: target }),
    timeout,
    secure: true,
    ...(cpuCount === undefined ? {} : { cpuCount }),
    ...(memoryMB === undefined ? {} : { memoryMB }),
    ...(diskSizeMB === undefined ? {} : { diskSizeMB }),
    ...(flags.has("env") ? { envVars } : {}),
    ...(flags.has("metadata") ? { metadata } : {}),
    ...(mounts.length === 0 ? {} : { volumeMounts: mounts }),
  };
  const id = await createSandbox(api, cold ? "/sandboxes-cold" : "/sandboxes", body, target);
  if (detach) {
    print(id);
    return 0;
  }
  print(`Started sandbox ${id}`);
  const { openShell } = await import("./shell.ts");
  return openShell(api, id, { detachKeys: keys });
}

async function createSandbox(api: Api, route: string, body: object, from: string): Promise<string> {
  using status = new StatusLine();
  // Nothing but the id and errors for whoever is no person.
  if (status.live) status.set(`starting a sandbox from ${from}`);
  const reply = await api.request<SandboxJson>("POST", route, { body, timeoutMs: START_TIMEOUT_MS });
  return reply.body.sandboxID;
}

/** `aenv connect`. */
export async function connect({ args, flags, usageError }: Invocation): Promise<number> {
  const keys = detachKeys(flags.text("detach-keys"), usageError);
  const pid = flags.integer("pid", 1, 4_194_304);
  const api = await Api.open();
  if (!hasTerminal()) {
    await api.request<SandboxJson>("GET", path(args[0]!));
    requireTerminal(`run a command with: aenv exec ${args[0]} COMMAND`);
  }
  const { openShell } = await import("./shell.ts");
  return openShell(api, args[0]!, { detachKeys: keys, ...(pid === undefined ? {} : { pid }) });
}

/** When a sandbox ends; a paused one has no end before it is resumed. */
const ends = (item: SandboxJson) => (item.state === "paused" ? undefined : formatTime(item.endAt));

/** `aenv list`. */
export async function list({ flags }: Invocation): Promise<number> {
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
    item.cpuCount,
    item.memoryMB,
    item.diskSizeMB,
    formatTime(item.startedAt),
    ends(item),
  ]);
  process.stdout.write(
    formatTable(
      ["SANDBOX ID", "TEMPLATE", "STATE", "CPU", "MEM (MiB)", "DISK (MiB)", "STARTED", "ENDS"],
      rows,
    ),
  );
  return 0;
}

/**
 * Does something with each sandbox, one after the other: a failure keeps nothing from the ones behind it, and is
 * told with its id. A single one fails as any command does.
 */
async function forEach(ids: readonly string[], work: (id: string) => Promise<void>): Promise<number> {
  if (ids.length === 1) {
    await work(ids[0]!);
    return 0;
  }
  let failures = 0;
  for (const id of new Set(ids)) {
    try {
      await work(id);
    } catch (error) {
      // Nobody there, or a key that is wrong, is so for all of them.
      if (!(error instanceof ApiError) || error.status === 401) throw error;
      failures++;
      const hint = error.hint === undefined ? "" : `  ${plainText(error.hint)}\n`;
      process.stderr.write(`Error: ${id}: ${plainText(error.message)}\n${hint}`);
    }
  }
  return failures > 0 ? 1 : 0;
}

/** `aenv pause`. */
export async function pause({ args, flags }: Invocation): Promise<number> {
  const memory = !flags.has("no-memory");
  const api = await Api.open();
  return forEach(args, (id) => pauseOne(api, id, memory));
}

async function pauseOne(api: Api, id: string, memory: boolean): Promise<void> {
  try {
    await api.request(
      "POST",
      `${path(id)}/pause`,
      memory ? {} : { body: { memory }, timeoutMs: START_TIMEOUT_MS },
    );
  } catch (error) {
    // Paused already is what was asked for, unless it may have been with its memory; any other conflict is not.
    if (!(error instanceof ApiError) || error.status !== 409 || !memory) throw error;
    const { body } = await api.request<SandboxJson>("GET", path(id));
    if (body.state !== "paused") throw error;
  }
  print(`Paused ${id}`);
}

/** `aenv resume`. */
export async function resume({ args, flags }: Invocation): Promise<number> {
  const timeout = flags.integer("timeout", 1, MAX_SECONDS) ?? DEFAULT_TIMEOUT_SECONDS;
  const api = await Api.open();
  return forEach(args, async (id) => {
    await api.request("POST", `${path(id)}/connect`, { body: { timeout }, timeoutMs: START_TIMEOUT_MS });
    print(`Resumed ${id}`);
  });
}

/** `aenv timeout`. */
export async function setSandboxTimeout({ args, usageError }: Invocation): Promise<number> {
  const seconds = Number(args[1]);
  if (!/^\d+$/.test(args[1]!) || seconds < 1 || seconds > MAX_SECONDS) {
    throw usageError(`<seconds> must be a whole number from 1 to ${MAX_SECONDS}, not "${args[1]}"`);
  }
  const api = await Api.open();
  await api.request("POST", `${path(args[0]!)}/timeout`, { body: { timeout: seconds } });
  print(`Timeout for ${args[0]} set to ${seconds}s`);
  return 0;
}

/** What a sandbox is told of in `aenv info`, secrets left out. */
function facts(detail: SandboxDetailJson): [string, string | number | undefined][] {
  const table = (values: Readonly<Record<string, string>> | undefined) =>
    Object.entries(values ?? {}).map(([name, value]) => `${name}=${value}`);
  const mounts = (detail.volumeMounts ?? []).map((mount) => `${mount.path}=${mount.name}`);
  return [
    ["SANDBOX ID", detail.sandboxID],
    ["TEMPLATE", detail.alias],
    ["TEMPLATE ID", detail.templateID],
    ["STATE", detail.state],
    ["CPU", detail.cpuCount],
    ["MEM (MiB)", detail.memoryMB],
    ["DISK (MiB)", detail.diskSizeMB],
    ["STARTED", formatTime(detail.startedAt)],
    ["ENDS", ends(detail)],
    ["AT ITS END", detail.lifecycle?.onTimeout],
    ["AUTO RESUME", detail.lifecycle === undefined ? undefined : String(detail.lifecycle.autoResume)],
    ["INTERNET", detail.allowInternetAccess === false ? "denied" : "allowed"],
    ["AGENT", detail.envdVersion],
    ["DOMAIN", detail.domain ?? undefined],
    ["METADATA", table(detail.metadata).join(", ")],
    ["VOLUMES", mounts.join(", ")],
    ["NETWORK", detail.network === undefined ? undefined : JSON.stringify(detail.network)],
  ];
}

/** `aenv info`. */
export async function info({ args, flags }: Invocation): Promise<number> {
  const api = await Api.open();
  const { body } = await api.request<SandboxDetailJson>("GET", path(args[0]!));
  if (wantsTable(flags.text("output"))) {
    const rows = facts(body).map(([name, value]) => [name, plainText(String(value ?? "")) || "-"] as const);
    const width = Math.max(...rows.map(([name]) => name.length));
    for (const [name, value] of rows) print(`${name.padEnd(width)}  ${value}`);
    return 0;
  }
  // Whoever has the API key can ask for the tokens; they need not stand in every log of this output.
  const { envdAccessToken, trafficAccessToken, ...rest } = body;
  void envdAccessToken;
  void trafficAccessToken;
  print(JSON.stringify(rest, null, 2));
  return 0;
}

/** `aenv fork`. */
export async function fork({ args, flags }: Invocation): Promise<number> {
  const count = flags.integer("count", 1, 100) ?? 1;
  const timeout = flags.integer("timeout", 1, MAX_SECONDS);
  const api = await Api.open();
  const { body } = await api.request<readonly ForkResultJson[]>("POST", `${path(args[0]!)}/fork`, {
    body: { count, ...(timeout === undefined ? {} : { timeout }) },
    timeoutMs: START_TIMEOUT_MS,
  });
  let failures = 0;
  for (const [i, { sandbox, error }] of body.entries()) {
    if (sandbox !== undefined) {
      print(sandbox.sandboxID);
      continue;
    }
    failures++;
    process.stderr.write(
      `Error: copy ${i + 1} of ${body.length}: ${plainText(error?.message ?? "no reason given")}\n`,
    );
  }
  return failures > 0 ? 1 : 0;
}

/** `aenv delete`. */
export async function remove({ args }: Invocation): Promise<number> {
  const api = await Api.open();
  return forEach(args, async (id) => {
    await api.request("DELETE", path(id));
    print(`Deleted sandbox ${id}`);
  });
}
