/**
 * Start-up, memory and lifecycle times of a node, with real VMs. Every lifecycle figure is split into
 * what the server spends itself, what the VMM takes and what the guest needs.
 */
import { readdir, readFile } from "node:fs/promises";
import { cpus } from "node:os";
import { join } from "node:path";
import { Sandbox } from "e2b";
import { startDebianRegistry } from "../support/debian.ts";
import { hostObjects, TestServer } from "../support/server.ts";

const ROUNDS = Number(process.env.AENV_BENCH_ROUNDS ?? 7);
const MEMORY_MIB = 256;

/** Which party each phase of the server's own report belongs to. */
const PARTY: Readonly<Record<string, "guest" | "vmm">> = {
  agent: "guest",
  init: "guest",
  vmm: "vmm",
  vmm_pause: "vmm",
  device_state: "vmm",
};

function median(values: readonly number[]): number {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)] ?? Number.NaN;
}

const ms = (value: number) => (value >= 100 ? value.toFixed(0) : value.toFixed(1));
const spread = (values: readonly number[]) =>
  `${ms(Math.min(...values))} / ${ms(median(values))} / ${ms(Math.max(...values))}`;

function row(name: string, value: string, note = ""): void {
  console.log(`| ${name.padEnd(44)} | ${value.padStart(24)} | ${note}`);
}

async function rssMiB(pid: number): Promise<number> {
  const status = await readFile(`/proc/${pid}/status`, "utf8");
  return Number(/VmRSS:\s+(\d+)/.exec(status)?.[1] ?? 0) / 1024;
}

/** Memory that only this process has, guest memory (its mapping of the memory file) apart. */
async function privateMiB(pid: number): Promise<{ guest: number; own: number }> {
  let guest = 0;
  let own = 0;
  let inGuest = false;
  for (const line of (await readFile(`/proc/${pid}/smaps`, "utf8")).split("\n")) {
    if (/^[0-9a-f]+-[0-9a-f]+ /.test(line)) inGuest = line.includes("/memory/");
    const kib = Number(/^Private_(?:Dirty|Clean):\s+(\d+)/.exec(line)?.[1] ?? 0);
    if (inGuest) guest += kib;
    else own += kib;
  }
  return { guest: guest / 1024, own: own / 1024 };
}

interface Phases {
  readonly total: number;
  readonly ours: number;
  readonly vmm: number;
  readonly guest: number;
}

/** From the Server-Timing header: phases by party; the rest of the total is ours. */
function split(header: string | null): Phases {
  const sums = { vmm: 0, guest: 0 };
  let total = 0;
  for (const entry of (header ?? "").split(",")) {
    const [name, duration] = entry.trim().split(";dur=");
    const value = Number(duration);
    if (name === "total") total = value;
    else if (PARTY[name!] !== undefined) sums[PARTY[name!]!] += value;
  }
  return { total, ...sums, ours: Math.max(0, total - sums.vmm - sums.guest) };
}

function phases(name: string, samples: readonly Phases[]): void {
  const part = (key: keyof Phases) => ms(median(samples.map((sample) => sample[key])));
  row(
    name,
    spread(samples.map((sample) => sample.total)),
    `ours ${part("ours")}, VMM ${part("vmm")}, guest ${part("guest")}`,
  );
}

await using server = await TestServer.create();
await using registry = await startDebianRegistry(join(server.home, "registry"));

console.log(
  `\n## Lifecycle (${cpus().length} x ${cpus()[0]?.model ?? "?"}, Linux ${(await readFile("/proc/sys/kernel/osrelease", "utf8")).trim()})\n`,
);
console.log("| what | min / median / max, ms | |");
console.log("| --- | --- | --- |");

// The first start makes keys and databases and probes the host; users meet the others.
const first = await server.start();
const starts: number[] = [];
for (let i = 0; i < ROUNDS; i++) {
  await server.stop();
  // The kernel takes the old server's namespaces down after it has ended, under the lock a start needs.
  await Bun.sleep(1500);
  starts.push(await server.start());
}
row("server start to /health", spread(starts), `first start ever: ${ms(first)}`);

const connection = await server.connection();
const call = (method: string, path: string, body?: unknown) =>
  fetch(`${server.url}${path}`, {
    method,
    headers: { "x-api-key": connection.apiKey },
    ...(body === undefined ? {} : { body: JSON.stringify(body) }),
  });
await server.run(["auth"], `${server.url}\n${connection.apiKey}\n`);

const built = performance.now();
const pull = await server.run([
  "pull",
  registry.debian,
  "--name",
  "bench",
  "--cpu",
  "1",
  "--memory",
  String(MEMORY_MIB),
]);
if (pull.exitCode !== 0) throw new Error(pull.stderr);
row(
  "template from an image (pull to ready)",
  ms(performance.now() - built),
  "download, conversion, cold boot, snapshot",
);
const colds: Phases[] = [];
for (let i = 0; i < 3; i++) {
  const booted = await call("POST", "/sandboxes-cold", {
    image: registry.debian,
    cpuCount: 1,
    memoryMB: MEMORY_MIB,
    timeout: 600,
  });
  if (booted.status !== 201) throw new Error(await booted.text());
  colds.push(split(booted.headers.get("server-timing")));
  await call("DELETE", `/sandboxes/${((await booted.json()) as { sandboxID: string }).sandboxID}`);
}
phases("cold boot of the same image", colds);

const creates: Phases[] = [];
const wall: number[] = [];
const pauses: Phases[] = [];
const resumes: Phases[] = [];
const execs: number[] = [];
for (let i = 0; i < ROUNDS; i++) {
  const began = performance.now();
  const created = await call("POST", "/v2/sandboxes", { templateID: "bench", timeout: 600 });
  wall.push(performance.now() - began);
  if (created.status !== 201) throw new Error(await created.text());
  creates.push(split(created.headers.get("server-timing")));
  const { sandboxID } = (await created.json()) as { sandboxID: string };
  const sandbox = await Sandbox.connect(sandboxID, connection);
  await sandbox.commands.run("true");
  const ran = performance.now();
  await sandbox.commands.run("true");
  execs.push(performance.now() - ran);
  const paused = await call("POST", `/sandboxes/${sandboxID}/pause`);
  pauses.push(split(paused.headers.get("server-timing")));
  const resumed = await call("POST", `/sandboxes/${sandboxID}/resume`, { timeout: 600 });
  resumes.push(split(resumed.headers.get("server-timing")));
  await call("DELETE", `/sandboxes/${sandboxID}`);
}
phases("create from template", creates);
row("create, as the client sees it", spread(wall));
row("commands.run('true') through the SDK", spread(execs));
phases("pause (memory and disk stored)", pauses);
phases("resume", resumes);

const blockdPid = async () => {
  for (const line of await hostObjects(server)) {
    const match = /^process (\d+): .*agentenv blockd/.exec(line);
    if (match !== null) return Number(match[1]);
  }
  throw new Error("the block daemon does not run");
};
console.log("\n| memory, MiB | | |\n| --- | --- | --- |");
await server.stop();
await server.start();
await Bun.sleep(2000);
const idleServer = await rssMiB(server.pid);
const idleBlockd = await rssMiB(await blockdPid());
row("idle server RSS", ms(idleServer));
row("idle block daemon RSS", ms(idleBlockd));
const COUNT = 6;
const ids: string[] = [];
for (let i = 0; i < COUNT; i++) {
  const reply = (await (
    await call("POST", "/v2/sandboxes", { templateID: "bench", timeout: 600 })
  ).json()) as { sandboxID: string };
  ids.push(reply.sandboxID);
}
await Bun.sleep(2000);
row(
  "server growth per sandbox",
  ms(((await rssMiB(server.pid)) - idleServer) / COUNT),
  `over ${COUNT} sandboxes`,
);
row("block daemon growth per sandbox", ms(((await rssMiB(await blockdPid())) - idleBlockd) / COUNT));
const own: number[] = [];
const guest: number[] = [];
for (const line of await hostObjects(server)) {
  const match = /^process (\d+): .*qemu/.exec(line);
  if (match === null) continue;
  const memory = await privateMiB(Number(match[1]));
  own.push(memory.own);
  guest.push(memory.guest);
}
row(
  "VMM process, private, without guest memory",
  ms(median(own)),
  "under emulation most of it is translated code",
);
row("guest pages a fresh clone wrote", ms(median(guest)), `of ${MEMORY_MIB} MiB`);
for (const id of ids) await call("DELETE", `/sandboxes/${id}`);
const logs = (await readdir(server.home)).length;
console.log(`\nstate directory entries: ${logs}`);
