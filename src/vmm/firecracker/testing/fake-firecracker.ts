/**
 * Speaks Firecracker's API without a guest, for the driver's tests: the requests and states of upstream's
 * src/firecracker/swagger/firecracker.yaml, strict about unknown fields and about what is possible before and
 * after the boot, as the real one is. `FAKE_VERSION` is what it says it is; requests are appended as JSON lines to
 * `fake.requests` in its directory. Run as `bun fake-firecracker.ts ARGS…`.
 */
import {
  appendFileSync,
  constants,
  existsSync,
  mkdirSync,
  openSync,
  readFileSync,
  statSync,
  symlinkSync,
  writeFileSync,
  writeSync,
} from "node:fs";
import { dirname, join } from "node:path";
import { parseArgs } from "node:util";
import { z } from "zod";

const version = process.env.FAKE_VERSION ?? "1.13.1";
const argv = process.argv.slice(2);
if (argv.includes("--version")) {
  console.log(`Firecracker v${version}\n`);
  process.exit(0);
}
const { values } = parseArgs({
  args: argv,
  options: {
    id: { type: "string" },
    "api-sock": { type: "string" },
    "http-api-max-payload-size": { type: "string" },
    "mmds-size-limit": { type: "string" },
    level: { type: "string" },
    "log-path": { type: "string" },
    "metrics-path": { type: "string" },
    "show-level": { type: "boolean" },
    "show-log-origin": { type: "boolean" },
  },
});
const socket = values["api-sock"] ?? "/run/firecracker.socket";
const log = join(dirname(socket), "fake.requests");
const waitsFile = join(dirname(socket), "fake.waits");

const whole = z.number().int().nonnegative();
const schemas = {
  "/machine-config": z.strictObject({
    vcpu_count: whole.min(1).max(32),
    mem_size_mib: whole.min(1),
    smt: z.boolean().optional(),
    track_dirty_pages: z.boolean().optional(),
    cpu_template: z.enum(["C3", "T2", "T2S", "T2CL", "T2A", "V1N1", "None"]).optional(),
    huge_pages: z.string().optional(),
  }),
  "/cpu-config": z.strictObject({
    kvm_capabilities: z.array(z.string()).optional(),
    cpuid_modifiers: z.array(z.unknown()).optional(),
    msr_modifiers: z.array(z.unknown()).optional(),
  }),
  "/boot-source": z.strictObject({
    kernel_image_path: z.string(),
    initrd_path: z.string().optional(),
    boot_args: z.string().optional(),
  }),
  "/drives": z.strictObject({
    drive_id: z.string(),
    path_on_host: z.string(),
    is_root_device: z.boolean(),
    is_read_only: z.boolean(),
    cache_type: z.enum(["Unsafe", "Writeback"]),
    io_engine: z.enum(["Sync", "Async"]),
    rate_limiter: z.unknown().optional(),
  }),
  "/network-interfaces": z.strictObject({
    iface_id: z.string(),
    host_dev_name: z.string(),
    guest_mac: z.string().optional(),
    rx_rate_limiter: z.unknown().optional(),
    tx_rate_limiter: z.unknown().optional(),
  }),
  "/mmds/config": z.strictObject({
    version: z.enum(["V1", "V2"]),
    network_interfaces: z.array(z.string()).nonempty(),
    ipv4_address: z.string().optional(),
  }),
  "/mmds": z.record(z.string(), z.unknown()),
  "/entropy": z.strictObject({ rate_limiter: z.unknown().optional() }),
  "/balloon": z.strictObject({
    amount_mib: whole,
    deflate_on_oom: z.boolean(),
    stats_polling_interval_s: whole.optional(),
    ...(Number(version.split(".")[1]) >= 14
      ? { free_page_reporting: z.boolean().optional(), free_page_hinting: z.boolean().optional() }
      : {}),
  }),
  "/actions": z.strictObject({ action_type: z.enum(["InstanceStart", "FlushMetrics", "SendCtrlAltDel"]) }),
  "/vm": z.strictObject({ state: z.enum(["Paused", "Resumed"]) }),
  "/snapshot/create": z.strictObject({
    snapshot_type: z.enum(["Full", "Diff"]).optional(),
    snapshot_path: z.string(),
    mem_file_path: z.string(),
  }),
  "/snapshot/load": z.strictObject({
    snapshot_path: z.string(),
    mem_backend: z.strictObject({ backend_type: z.enum(["File", "Uffd"]), backend_path: z.string() }),
    enable_diff_snapshots: z.boolean().optional(),
    ...(Number(version.split(".")[1]) >= 13 ? { track_dirty_pages: z.boolean().optional() } : {}),
    resume_vm: z.boolean().optional(),
    network_overrides: z
      .array(z.strictObject({ iface_id: z.string(), host_dev_name: z.string() }))
      .optional(),
  }),
} as const;

const patchDrive = z.strictObject({
  drive_id: z.string(),
  path_on_host: z.string().optional(),
  rate_limiter: z.unknown().optional(),
});

type Resource = keyof typeof schemas;

let state: "Not started" | "Running" | "Paused" = "Not started";
const configured = new Map<string, unknown>();

/**
 * A guest's request to its disk that is not carried out yet (`fake.waits` of the kernel's command line), and what it
 * waits for: `round`, for the second round of the event loop from the pause on; `limiter`, for a round that comes when
 * the limiter's timer has run out once more after the limit was taken away. `fake.waits` in the directory, and a saved
 * state, say what it waited for last.
 */
let waits = "nothing";
let rounds = 0;
let liftedMs: number | undefined;
/** REFILL_TIMER_INTERVAL_MS of upstream's rate limiter. */
const LIMITER_TIMER_MS = 100;

function setWaits(what: string): void {
  waits = what;
  writeFileSync(waitsFile, what);
}

/** Each request is a round of the loop; it begins with what was ready before the request came. */
function round(): void {
  const due = liftedMs !== undefined && performance.now() - liftedMs >= LIMITER_TIMER_MS;
  if (state === "Paused") rounds++;
  if ((waits === "limiter" && due) || (waits === "round" && rounds >= 2)) setWaits("nothing");
}

class Fault extends Error {}

/** As many MiB, as fast as a guest can; what a full pipe does not take is lost, as with the real one. */
async function floodConsole(mib: number): Promise<void> {
  const line = Buffer.from(`${"x".repeat(63)}\n`.repeat(1024));
  for (let i = 0; i < mib * 16; i++) {
    try {
      writeSync(1, line);
    } catch (error) {
      if (!(error instanceof Error && "code" in error && error.code === "EAGAIN")) throw error;
      await Bun.sleep(50);
      i--;
    }
  }
  // What was last in the pipe is read before this is written.
  await Bun.sleep(300);
  writeSync(1, "flood is over\n");
}

/** As it is since the line before, but for what was in all. */
function metricsLine(): string {
  const block = {
    read_bytes: 4096,
    write_bytes: 0,
    read_count: 1,
    read_agg: { min_us: 1, max_us: 2, sum_us: 3 },
  };
  const groups = { api_server: { process_startup_time_us: 5 }, block, block_rootfs: block };
  return `${JSON.stringify({ utc_timestamp_ms: Date.now(), ...groups, seccomp: { num_faults: 2 } })}\n`;
}

function mustExist(path: string): void {
  if (!existsSync(path)) throw new Fault(`No such file or directory (os error 2): ${path}`);
}

function perform(method: string, resource: Resource, path: string, body: Record<string, unknown>): void {
  const booted = state !== "Not started";
  if (resource === "/vm") {
    if (!booted) throw new Fault("The requested operation is not supported before starting the microVM.");
    state = body.state === "Paused" ? "Paused" : "Running";
    rounds = 0;
    return;
  }
  if (resource === "/snapshot/create") {
    if (state !== "Paused") throw new Fault("Create snapshot error: the microVM must be paused");
    const drives = [...configured].filter(([key]) => key.startsWith("/drives/")).map(([, value]) => value);
    // One that a guest has taken over.
    const link = /fake\.state=([^\s"]+)/.exec(JSON.stringify(configured.get("/boot-source")))?.[1];
    if (link === undefined)
      writeFileSync(String(body.snapshot_path), JSON.stringify({ version, drives, waits }));
    else symlinkSync(link, String(body.snapshot_path));
    writeFileSync(String(body.mem_file_path), "pages");
    return;
  }
  if (resource === "/mmds" && method === "PUT") {
    if (!booted && !configured.has("/mmds/config")) throw new Fault("The MMDS is not configured.");
    configured.set(path, body);
    return;
  }
  if (resource === "/drives" && method === "PATCH") {
    if (!booted) throw new Fault("The requested operation is not supported before starting the microVM.");
    const { bandwidth, ops } = body.rate_limiter as Record<"bandwidth" | "ops", { size: number }>;
    liftedMs = bandwidth.size === 0 && ops.size === 0 ? performance.now() : undefined;
    return;
  }
  if (body.action_type === "FlushMetrics") {
    if (!booted) throw new Fault("The requested operation is not supported before starting the microVM.");
    writeSync(metrics!, metricsLine());
    return;
  }
  if (booted) throw new Fault("The requested operation is not supported after starting the microVM.");
  if (resource === "/snapshot/load") {
    if (configured.size > 0)
      throw new Fault("Loading a microVM snapshot not allowed after configuring boot-specific resources.");
    const saved = JSON.parse(readFileSync(String(body.snapshot_path), "utf8"));
    mustExist((body.mem_backend as { backend_path: string }).backend_path);
    for (const drive of saved.drives) mustExist(drive.path_on_host);
    state = "Paused";
    return;
  }
  if (resource === "/actions") {
    const boot = configured.get("/boot-source") as { kernel_image_path: string } | undefined;
    if (boot === undefined) throw new Fault("Cannot start microvm without kernel configuration.");
    mustExist(boot.kernel_image_path);
    state = "Running";
    console.log("guest boots");
    setWaits(/fake\.waits=(\w+)/.exec(JSON.stringify(boot))?.[1] ?? "nothing");
    const flood = Number(/fake\.flood=(\d+)/.exec(JSON.stringify(boot))?.[1] ?? 0);
    if (flood > 0) void floodConsole(flood);
    return;
  }
  if (resource === "/drives") mustExist(String(body.path_on_host));
  configured.set(path, body);
}

function resourceOf(path: string): Resource | undefined {
  const known = Object.keys(schemas) as Resource[];
  return (
    known.find((one) => one === path) ?? known.find((one) => path.startsWith(`${one}/`) && one !== "/vm")
  );
}

const metricsPath = values["metrics-path"];
const metrics =
  metricsPath === undefined ? undefined : openSync(metricsPath, constants.O_RDWR | constants.O_NONBLOCK);
const logPath = values["log-path"];
if (logPath !== undefined) writeFileSync(logPath, `logging with level ${values.level}\n`, { flag: "a" });
mkdirSync(dirname(socket), { recursive: true });
Bun.serve({
  unix: socket,
  async fetch(request) {
    round();
    const path = new URL(request.url).pathname;
    const text = await request.text();
    const refuse = (message: string) => Response.json({ fault_message: message }, { status: 400 });
    if (request.method === "GET") {
      if (path === "/version") return Response.json({ firecracker_version: version });
      return Response.json({ id: values.id, state, vmm_version: version, app_name: "Firecracker" });
    }
    const resource = resourceOf(path);
    if (resource === undefined)
      return refuse(`Invalid request method and/or path: ${request.method} ${path}.`);
    const schema = resource === "/drives" && request.method === "PATCH" ? patchDrive : schemas[resource];
    const parsed = schema.safeParse(text === "" ? undefined : JSON.parse(text));
    if (!parsed.success)
      return refuse(
        `An error occurred when deserializing the json body of a request: ${parsed.error.issues[0]?.message}`,
      );
    // Which file a name leads to shows that each VM sees its own.
    const drive = (parsed.data as { path_on_host?: string }).path_on_host;
    const target =
      drive !== undefined && existsSync(drive) ? readFileSync(drive, "utf8").split("\n")[0] : undefined;
    appendFileSync(log, `${JSON.stringify({ method: request.method, path, body: parsed.data, target })}\n`);
    try {
      perform(request.method, resource, path, parsed.data as Record<string, unknown>);
    } catch (error) {
      if (error instanceof Fault) return refuse(error.message);
      throw error;
    }
    return new Response(null, { status: 204 });
  },
});
if (!statSync(socket).isSocket()) process.exit(1);
