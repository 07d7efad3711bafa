import { Api, ApiError, type SandboxJson, START_TIMEOUT_MS } from "./api.ts";
import { CliError, type Invocation } from "./command.ts";
import { formatTable, formatTime, print, printJson, StatusLine, wantsTable } from "./output.ts";
import { requireTerminal } from "./terminal.ts";

const MAX_SECONDS = 2_147_483_647;
const DEFAULT_TIMEOUT_SECONDS = 300;

const path = (id: string) => `/sandboxes/${encodeURIComponent(id)}`;

/** `aenv start`. */
export async function start({ args, flags }: Invocation): Promise<number> {
  const timeout = flags.integer("timeout", 1, MAX_SECONDS) ?? DEFAULT_TIMEOUT_SECONDS;
  const detach = flags.has("detach");
  if (!detach) requireTerminal("start it in the background with --detach");
  const api = await Api.open();
  const id = await createSandbox(api, args[0]!, timeout);
  if (detach) {
    print(id);
    return 0;
  }
  print(`Started sandbox ${id}`);
  const { openShell } = await import("./shell.ts");
  return openShell(api, id);
}

async function createSandbox(api: Api, template: string, timeout: number): Promise<string> {
  using status = new StatusLine();
  // Nothing but the id and errors for whoever is no person.
  if (status.live) status.set(`starting a sandbox from ${template}`);
  const { body } = await api.request<SandboxJson>("POST", "/sandboxes", {
    body: { templateID: template, timeout, secure: true },
    timeoutMs: START_TIMEOUT_MS,
  });
  return body.sandboxID;
}

/** `aenv connect`. */
export async function connect({ args }: Invocation): Promise<number> {
  requireTerminal(`run a command with: aenv exec ${args[0]} COMMAND`);
  const api = await Api.open();
  const { openShell } = await import("./shell.ts");
  return openShell(api, args[0]!);
}

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
  ]);
  process.stdout.write(
    formatTable(["SANDBOX ID", "TEMPLATE", "STATE", "CPU", "MEM (MiB)", "DISK (MiB)", "STARTED"], rows),
  );
  return 0;
}

/** `aenv pause`. */
export async function pause({ args }: Invocation): Promise<number> {
  const id = args[0]!;
  const api = await Api.open();
  try {
    await api.request("POST", `${path(id)}/pause`);
  } catch (error) {
    // Paused already is what was asked for; any other conflict is not.
    if (!(error instanceof ApiError) || error.status !== 409) throw error;
    const { body } = await api.request<SandboxJson>("GET", path(id));
    if (body.state !== "paused") throw error;
  }
  print(`Paused ${id}`);
  return 0;
}

/** `aenv resume`. */
export async function resume({ args, flags }: Invocation): Promise<number> {
  const timeout = flags.integer("timeout", 1, MAX_SECONDS) ?? DEFAULT_TIMEOUT_SECONDS;
  const api = await Api.open();
  await api.request("POST", `${path(args[0]!)}/connect`, { body: { timeout }, timeoutMs: START_TIMEOUT_MS });
  print(`Resumed ${args[0]}`);
  return 0;
}

/** `aenv timeout`. */
export async function setSandboxTimeout({ args }: Invocation): Promise<number> {
  const seconds = Number(args[1]);
  if (!/^\d+$/.test(args[1]!) || seconds < 1 || seconds > MAX_SECONDS) {
    throw new CliError(`<seconds> must be a whole number from 1 to ${MAX_SECONDS}, not "${args[1]}"`, {
      exitCode: 2,
      hint: "usage: aenv timeout <sandbox-id> <seconds>",
    });
  }
  const api = await Api.open();
  await api.request("POST", `${path(args[0]!)}/timeout`, { body: { timeout: seconds } });
  print(`Timeout for ${args[0]} set to ${seconds}s`);
  return 0;
}

/** `aenv delete`. */
export async function remove({ args }: Invocation): Promise<number> {
  const api = await Api.open();
  await api.request("DELETE", path(args[0]!));
  print(`Deleted sandbox ${args[0]}`);
  return 0;
}
