import {
  accessSync,
  closeSync,
  constants,
  existsSync,
  openSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  statfsSync,
  statSync,
} from "node:fs";
import { dirname, join } from "node:path";
import { parseArgs } from "node:util";
import { checkoutHome, type Environment, parseListenAddress } from "../config/index.ts";
import { tryCommand } from "../lib/command.ts";
import { errorCode } from "../lib/durable.ts";
import { AenvError, assert } from "../lib/errors.ts";
import { createLogger } from "../lib/log.ts";
import { selfCommand } from "../lib/self.ts";
import { usageProblem } from "../lib/usage.ts";
import { formatBytes } from "./console.ts";
import { isContainer, KERNEL_SETTINGS, nearestExisting, readSysctl } from "./host.ts";
import { type InstalledManifest, readManifest } from "./manifest.ts";
import { isModern } from "./qemu.ts";
import {
  configuredKernel,
  findInitrd,
  installedKernel,
  oldQemuWarning,
  type ResolvedKernel,
  resolveQemu,
} from "./resolve.ts";
import {
  readSettings,
  SETTINGS_FLAGS,
  SETTINGS_HELP,
  type Settings,
  type SettingsFlags,
} from "./settings.ts";
import type { QemuDeps } from "./types.ts";

export type CheckStatus = "ok" | "warn" | "missing";

/** One prerequisite. `missing` means that sandboxes cannot run without it. */
export interface Check {
  readonly name: string;
  readonly status: CheckStatus;
  readonly detail: string;
  readonly cure?: string;
}

/** Looks at everything a server needs. Changes nothing. */
export async function examine(options: Settings): Promise<Check[]> {
  const manifest = await readManifestCheck(options.depsDir);
  const kernel = await kernelCheck(options, manifest);
  const qemu = await qemuCheck(options, manifest);
  return [
    systemCheck(),
    privilegeCheck(),
    kvmCheck(),
    tunCheck(),
    ...["ip", "nft", "nsenter"].map(commandCheck),
    await nfTablesCheck(),
    forwardingCheck(),
    ...kernelSettingsCheck(),
    ...(options.networkRates ? [await networkRatesCheck()] : []),
    await exportCheck(options.diskExport),
    ioUringCheck(),
    cgroupCheck(options.vmm),
    memoryCheck(),
    diskCheck(options.home),
    ...[options.home, options.runtimePath].flatMap(directoryCheck),
    fileLimitCheck(),
    ...manifest.checks,
    ...kernel.checks,
    qemu.check,
    await vmmCheck(kernel.kernel, qemu.qemu, options.mode),
    ...(await serverChecks(options.apiAddress, options.home)),
    ...poolCheck(options.pools, options.home),
  ];
}

/**
 * Refuses to start a server on a host that cannot run sandboxes, naming all that is missing and the cure of
 * each: called before anything is made or changed. Error: `host_not_ready`.
 */
export function requireHost(options: { readonly home: string; readonly runtimePath: string }): void {
  const missing = [
    systemCheck(),
    privilegeCheck(),
    tunCheck(),
    ...["ip", "nft", "nsenter"].map(commandCheck),
    forwardingCheck(),
    ...[options.home, options.runtimePath].flatMap(directoryCheck),
  ].filter((check) => check.status === "missing");
  if (missing.length === 0) return;
  throw new AenvError({
    code: "host_not_ready",
    status: 503,
    message: `this host is not ready for sandboxes:\n${missing
      .map(({ name, detail, cure }) => `  ${name}: ${detail}${cure === undefined ? "" : `  → ${cure}`}`)
      .join("\n")}`,
    remediation:
      "as root, agentenv setup --host does what a machine needs once; agentenv doctor looks at everything",
  });
}

function readText(path: string): string | undefined {
  try {
    return readFileSync(path, "utf8");
  } catch (error) {
    if (["ENOENT", "EACCES", "EPERM"].includes(errorCode(error) ?? "")) return undefined;
    throw error;
  }
}

function systemCheck(): Check {
  const release = readText("/proc/sys/kernel/osrelease")?.trim() ?? "unknown";
  const name = /^PRETTY_NAME="?([^"\n]*)/m.exec(readText("/etc/os-release") ?? "")?.[1] ?? "unknown system";
  const detail = `${name}, Linux ${release}, ${process.arch}`;
  if (process.platform !== "linux" || process.arch !== "x64") {
    return { name: "system", status: "missing", detail, cure: "the server runs on x86_64 Linux" };
  }
  return { name: "system", status: "ok", detail };
}

const CAP_NET_ADMIN = 12n;
const CAP_SYS_ADMIN = 21n;

function privilegeCheck(): Check {
  const effective = BigInt(
    `0x${/^CapEff:\s*([0-9a-f]+)/m.exec(readText("/proc/self/status") ?? "")?.[1] ?? "0"}`,
  );
  const lacking = [
    ...((effective >> CAP_NET_ADMIN) & 1n ? [] : ["CAP_NET_ADMIN"]),
    ...((effective >> CAP_SYS_ADMIN) & 1n ? [] : ["CAP_SYS_ADMIN"]),
  ];
  const user = process.geteuid?.() === 0 ? "root" : `uid ${process.geteuid?.()}`;
  return lacking.length === 0
    ? { name: "privileges", status: "ok", detail: `${user} with CAP_NET_ADMIN and CAP_SYS_ADMIN` }
    : {
        name: "privileges",
        status: "missing",
        detail: `${user} without ${lacking.join(" and ")}`,
        cure: "run the server as root, or give its service both (AmbientCapabilities= in its unit)",
      };
}

/** How a device node can be used: opened for reading and writing, which changes nothing. */
function deviceState(path: string): "usable" | "absent" | "denied" | "dead" {
  try {
    closeSync(openSync(path, constants.O_RDWR | constants.O_NONBLOCK));
    return "usable";
  } catch (error) {
    const code = errorCode(error);
    if (code === "ENOENT") return "absent";
    return code === "EACCES" || code === "EPERM" ? "denied" : "dead";
  }
}

function kvmCheck(): Check {
  const name = "/dev/kvm";
  switch (deviceState(name)) {
    case "usable":
      return { name, status: "ok", detail: "can be opened" };
    case "denied":
      return {
        name,
        status: "warn",
        detail: "exists, but this user may not open it: guests would be emulated",
        cure: "run as root or add the user to the group kvm",
      };
    case "dead":
      return {
        name,
        status: "warn",
        detail: "exists, but the kernel refuses to open it: guests are emulated (TCG), which is much slower",
        cure: "turn virtualization on in the firmware, and load kvm_intel or kvm_amd",
      };
    case "absent":
      return {
        name,
        status: "warn",
        detail: "not there: guests are emulated (TCG), which is much slower",
        cure: "use a machine with hardware virtualization, or turn nested virtualization on",
      };
  }
}

function tunCheck(): Check {
  const name = "/dev/net/tun";
  return deviceState(name) === "usable"
    ? { name, status: "ok", detail: "can be opened" }
    : {
        name,
        status: "missing",
        detail: `${deviceState(name) === "denied" ? "may not be opened by this user" : "cannot be opened"}: guests have no network`,
        cure:
          deviceState(name) === "denied"
            ? "agentenv setup --host (as root); in a container pass the device through"
            : "modprobe tun (as root); in a container pass the device through",
      };
}

/** Whether the kernel takes nftables' rules: the question needs privileges, and changes nothing. */
async function nfTablesCheck(): Promise<Check> {
  const name = "nf_tables";
  if (Bun.which("nft") === null || privilegeCheck().status !== "ok") {
    return { name, status: "ok", detail: "not asked: needs nft and privileges" };
  }
  const { exitCode, stderr } = await tryCommand(["nft", "list", "tables"]);
  return exitCode === 0
    ? { name, status: "ok", detail: "the kernel takes rules" }
    : {
        name,
        status: "missing",
        detail: `the kernel takes no rules: ${stderr.trim().split("\n")[0]}`,
        cure: "modprobe nf_tables (as root), or a kernel that has it",
      };
}

/** Settings with which a few sandboxes run and many do not; empty in a container, which cannot set them. */
function kernelSettingsCheck(): Check[] {
  if (isContainer()) return [];
  const low = KERNEL_SETTINGS.filter(({ key, minimum }) => {
    const now = key === "net.ipv4.ip_forward" ? undefined : readSysctl("", key);
    return now !== undefined && now < minimum;
  });
  const name = "kernel settings";
  if (low.length === 0) return [{ name, status: "ok", detail: "enough for many sandboxes" }];
  return [
    {
      name,
      status: "warn",
      detail: `low for many sandboxes: ${low.map(({ key }) => `${key} ${readSysctl("", key)}`).join(", ")}`,
      cure: `agentenv setup --host, or sysctl -w ${low.map(({ key, minimum }) => `${key}=${minimum}`).join(" ")}`,
    },
  ];
}

function ioUringCheck(): Check {
  const name = "io_uring";
  const disabled = readSysctl("", "kernel.io_uring_disabled") ?? 0;
  const root = process.geteuid?.() === 0;
  if (disabled === 0 || (disabled === 1 && root)) return { name, status: "ok", detail: "allowed" };
  return {
    name,
    status: "warn",
    detail: `turned off (kernel.io_uring_disabled = ${disabled}): disks are served with plain reads and writes, which is slower`,
    cure: "sysctl -w kernel.io_uring_disabled=0",
  };
}

/** What Firecracker's processes are limited with, as `src/vmm/firecracker/cgroup.ts` uses it; QEMU's have no groups. */
export function cgroupCheck(vmm: Settings["vmm"], mount = "/sys/fs/cgroup"): Check {
  const name = "cgroups";
  if (existsSync(join(mount, "cgroup.controllers"))) return { name, status: "ok", detail: "version 2" };
  const lacking = ["cpu", "memory", "pids"].filter((one) => !existsSync(join(mount, one, "cgroup.procs")));
  if (lacking.length === 0) return { name, status: "ok", detail: "version 1" };
  const found = lacking.length === 3 ? "none" : `version 1 without ${lacking.join(" and ")}`;
  if (vmm === "qemu") return { name, status: "ok", detail: `${found}, which QEMU's processes need not` };
  return {
    name,
    status: "warn",
    detail: `${found}: Firecracker's processes run without limits`,
    cure: `mount -t cgroup2 none ${mount}, or boot with systemd.unified_cgroup_hierarchy=1`,
  };
}

/** State or runtime directory: there and ours, or one we may make. Silent when all is well. */
function directoryCheck(path: string): Check[] {
  const dir = nearestExisting(path);
  const uid = process.geteuid?.() ?? 0;
  const stat = statSync(dir);
  const cure = `agentenv setup --host (as root), or choose another place with home_path or runtime_path`;
  if (!stat.isDirectory()) return [{ name: path, status: "missing", detail: `${dir} is no directory`, cure }];
  try {
    accessSync(dir, constants.W_OK | constants.X_OK);
    return [];
  } catch (error) {
    const what = dir === path ? "cannot be written" : `cannot be made: ${dir} is not writable`;
    return [{ name: path, status: "missing", detail: `${what} by uid ${uid} (${errorCode(error)})`, cure }];
  }
}

const PACKAGES: Readonly<Record<string, string>> = { ip: "iproute2", nft: "nftables", nsenter: "util-linux" };

function commandCheck(name: string): Check {
  const path = Bun.which(name, { PATH: `${process.env.PATH ?? ""}:/usr/sbin:/sbin:/usr/bin:/bin` });
  return path === null
    ? { name, status: "missing", detail: "not installed", cure: `install the package ${PACKAGES[name]}` }
    : { name, status: "ok", detail: path };
}

function forwardingCheck(): Check {
  const name = "ip_forward";
  const on = readText("/proc/sys/net/ipv4/ip_forward")?.trim() === "1";
  if (on) return { name, status: "ok", detail: "IPv4 forwarding is on" };
  const path = "/proc/sys/net/ipv4/ip_forward";
  try {
    accessSync(path, constants.W_OK);
    return { name, status: "ok", detail: "IPv4 forwarding is off; the server turns it on when it starts" };
  } catch (error) {
    return {
      name,
      status: "missing",
      detail: `IPv4 forwarding is off and cannot be turned on from here (${errorCode(error)})`,
      cure: "sysctl -w net.ipv4.ip_forward=1 (as root)",
    };
  }
}

/** How disks would reach VMs, and why: the server's own choice, which adds a device and deletes it. */
async function exportCheck(configured: Settings["diskExport"]): Promise<Check> {
  const name = "disk export";
  // Loaded here: setup, which shares this room's front door, has no use for it.
  const { chooseExport, probeUblk } = await import("../storage/blockd/index.ts");
  try {
    const { kind, reason, cure } = await chooseExport(configured, () => probeUblk(selfCommand("blockd")));
    const how = kind === "ublk" ? "block devices over ublk" : "NBD over unix sockets";
    // NBD is a way as good as any; what would make it ublk is worth a word.
    return { name, status: "ok", detail: `${how} (${reason})`, ...(cure === undefined ? {} : { cure }) };
  } catch (error) {
    return failed(name, error);
  }
}

/** Asked in a namespace of its own, which is gone afterwards. */
async function networkRatesCheck(): Promise<Check> {
  const name = "network rates";
  if (privilegeCheck().status !== "ok") return { name, status: "ok", detail: "not asked: needs privileges" };
  const { requireRateLimits } = await import("../network/index.ts");
  try {
    await requireRateLimits();
    return { name, status: "ok", detail: "the kernel has token buckets (sch_tbf)" };
  } catch (error) {
    return failed(name, error);
  }
}

const MIN_MEMORY = 1 * 2 ** 30;
const MIN_DISK = 2 * 2 ** 30;
const GOOD_DISK = 10 * 2 ** 30;

function memoryCheck(): Check {
  const name = "memory";
  const text = readText("/proc/meminfo") ?? "";
  const kiB = (key: string) => Number(new RegExp(`^${key}:\\s+(\\d+)`, "m").exec(text)?.[1] ?? 0) * 1024;
  const detail = `${formatBytes(kiB("MemAvailable"))} of ${formatBytes(kiB("MemTotal"))} available`;
  return kiB("MemAvailable") < MIN_MEMORY
    ? {
        name,
        status: "warn",
        detail,
        cure: "a guest takes 512 MiB by default: free memory or use a larger machine",
      }
    : { name, status: "ok", detail };
}

function diskCheck(home: string): Check {
  const name = "disk space";
  let dir = home;
  while (!existsSync(dir)) dir = dirname(dir);
  const stat = statfsSync(dir);
  const free = stat.bavail * stat.bsize;
  const detail = `${formatBytes(free)} free for ${home}`;
  const cure = `free space on the file system of ${dir}, or move home_path`;
  if (free < MIN_DISK) return { name, status: "missing", detail, cure };
  return free < GOOD_DISK ? { name, status: "warn", detail, cure } : { name, status: "ok", detail };
}

function fileLimitCheck(): Check {
  const name = "open files";
  const hard = /^Max open files\s+\S+\s+(\S+)/m.exec(readText("/proc/self/limits") ?? "")?.[1] ?? "0";
  const enough = hard === "unlimited" || Number(hard) >= 65536;
  return enough
    ? { name, status: "ok", detail: `limit ${hard}` }
    : {
        name,
        status: "warn",
        detail: `limit ${hard}`,
        cure: "LimitNOFILE=1048576 in the service, or ulimit -Hn 65536",
      };
}

async function readManifestCheck(depsDir: string): Promise<{ manifest: InstalledManifest; checks: Check[] }> {
  try {
    return { manifest: await readManifest(depsDir), checks: [] };
  } catch (error) {
    return { manifest: { schema: 1 }, checks: [failed("dependencies", error)] };
  }
}

function failed(name: string, error: unknown): Check {
  if (!(error instanceof AenvError)) throw error;
  return {
    name,
    status: "missing",
    detail: error.message,
    ...(error.remediation === undefined ? {} : { cure: error.remediation }),
  };
}

async function kernelCheck(
  options: Settings,
  { manifest }: { manifest: InstalledManifest },
): Promise<{ kernel?: ResolvedKernel; checks: Check[] }> {
  const name = "guest kernel";
  try {
    const kernel =
      options.kernelImagePath === undefined
        ? await installedKernel(options.depsDir, manifest)
        : await configuredKernel(options.depsDir, options.kernelImagePath, { readOnly: true });
    const initrd = findInitrd(kernel);
    return {
      kernel,
      checks: [
        { name, status: "ok", detail: `${kernel.release} (${kernel.path})` },
        {
          name: "initial file system",
          status: "ok",
          detail: initrd ?? "made by the server when it starts",
        },
      ],
    };
  } catch (error) {
    return { checks: [failed(name, error)] };
  }
}

async function qemuCheck(
  options: Settings,
  { manifest }: { manifest: InstalledManifest },
): Promise<{ qemu?: QemuDeps; check: Check }> {
  const name = "QEMU";
  try {
    const qemu = await resolveQemu(options.depsDir, manifest, options.qemuBinaryPath);
    const detail = `${qemu.version} (${qemu.binary})`;
    return isModern(qemu.version)
      ? { qemu, check: { name, status: "ok", detail } }
      : { qemu, check: { name, status: "warn", detail, cure: oldQemuWarning(qemu.version) } };
  } catch (error) {
    return { check: failed(name, error) };
  }
}

/** Which VMM and mode a server would use, and why: the server's own probe, which boots a guest for a moment. */
async function vmmCheck(
  kernel: ResolvedKernel | undefined,
  qemu: QemuDeps | undefined,
  mode: string,
): Promise<Check> {
  const name = "virtual machines";
  if (mode === "pvm") {
    try {
      (await import("../vmm/index.ts")).checkMode("pvm");
      return { name, status: "ok", detail: "mode pvm: the module kvm_pvm is loaded" };
    } catch (error) {
      return failed(name, error);
    }
  }
  if (mode !== "auto" && mode !== "kvm" && mode !== "tcg") {
    return {
      name,
      status: "missing",
      detail: `mode ${mode} is not one QEMU has`,
      cure: "set virtualization_mode (AENV_VIRTUALIZATION_MODE) to auto, kvm or tcg",
    };
  }
  if (kernel === undefined || qemu === undefined) {
    return {
      name,
      status: "missing",
      detail: "none can be started without guest kernel and QEMU",
      cure: "agentenv setup",
    };
  }
  try {
    const log = createLogger("doctor");
    log.level = "error";
    // Loaded here: setup, which shares this room's front door, has no use for it.
    const { createQemuDriver } = await import("../vmm/index.ts");
    // Without a cache directory: a verdict is found, none is kept.
    const driver = createQemuDriver({
      ...qemu,
      mode,
      kernelPath: kernel.path,
      kernelVersion: kernel.release,
      log,
    });
    const probe = await driver.probe();
    const detail = `${probe.vmm} ${probe.version}, mode ${probe.mode}: ${probe.reason}`;
    const warnings = probe.warnings.filter((warning) => !detail.includes(warning));
    return { name, status: probe.mode === "tcg" ? "warn" : "ok", detail: [detail, ...warnings].join("; ") };
  } catch (error) {
    return failed(name, error);
  }
}

/** Who listens on a TCP port of this machine: from /proc/net/tcp, the process where /proc lets us see it. */
export function portOwner(port: number): { listening: boolean; pid?: number; command?: string } {
  const inodes = new Set<string>();
  const LISTEN = "0A";
  for (const file of ["/proc/net/tcp", "/proc/net/tcp6"]) {
    for (const line of (readText(file) ?? "").split("\n").slice(1)) {
      const fields = line.trim().split(/\s+/);
      if (fields[3] !== LISTEN || Number.parseInt(fields[1]!.split(":")[1]!, 16) !== port) continue;
      inodes.add(`socket:[${fields[9]}]`);
    }
  }
  if (inodes.size === 0) return { listening: false };
  for (const pid of readdirSync("/proc").filter((name) => /^\d+$/.test(name))) {
    for (const link of fileDescriptors(pid)) {
      if (inodes.has(link)) {
        return { listening: true, pid: Number(pid), command: readText(`/proc/${pid}/comm`)?.trim() ?? "?" };
      }
    }
  }
  return { listening: true };
}

/** Base addresses of the pools that servers of this network namespace hold, with their sockets' inodes. */
function heldPools(): Map<string, string> {
  const held = new Map<string, string>();
  for (const line of (readText("/proc/net/unix") ?? "").split("\n")) {
    // The lock of src/network/pool-lock.ts: an abstract socket, "@" for the leading NUL.
    const [, inode, base] = /^\S+ \S+ \S+ \S+ \S+ \S+ +(\d+) @agentenv-network-([\d.]+)$/.exec(line) ?? [];
    if (inode !== undefined && base !== undefined) held.set(base, inode);
  }
  return held;
}

/** A server that has our pools: only one can, whatever their homes and ports. Silent when nobody or our server does. */
function poolCheck(pools: readonly string[], home: string): Check[] {
  const held = heldPools();
  const taken = pools.filter((base) => held.has(base));
  if (taken.length === 0) return [];
  const wanted = `socket:[${held.get(taken[0]!)}]`;
  const pid = readdirSync("/proc").find((one) => /^\d+$/.test(one) && fileDescriptors(one).includes(wanted));
  if (pid !== undefined && Number(pid) === Number.parseInt(readText(join(home, "server.lock")) ?? "", 10))
    return [];
  const free = (octet: number) =>
    !held.has(`10.${octet}.0.0`) &&
    !(readText("/proc/net/route") ?? "").includes(
      `\t${octet.toString(16).toUpperCase().padStart(2, "0")}0A\t`,
    );
  const octet = [...Array(100).keys()].map((i) => 13 + 2 * i).find((one) => free(one) && free(one + 1)) ?? 13;
  return [
    {
      name: "network pools",
      status: "warn",
      detail: `${taken.join(" and ")} in use by another server${pid === undefined ? "" : ` (pid ${pid})`}: one on ${home} would not start beside it`,
      cure: `stop that server, or give this one pools of its own in its configuration file:
[network.internal]
host_interaction_cidr = "10.${octet}.0.0/16"
veth_cidr = "10.${octet + 1}.0.0/16"`,
    },
  ];
}

/** Targets of a process's descriptors; none when it is gone or not ours to look at. */
function fileDescriptors(pid: string): string[] {
  const gone = (error: unknown) => ["ENOENT", "EACCES", "EPERM", "ESRCH"].includes(errorCode(error) ?? "");
  const targets: string[] = [];
  try {
    for (const fd of readdirSync(`/proc/${pid}/fd`)) {
      try {
        targets.push(readlinkSync(`/proc/${pid}/fd/${fd}`));
      } catch (error) {
        if (!gone(error)) throw error;
      }
    }
  } catch (error) {
    if (!gone(error)) throw error;
  }
  return targets;
}

function nextFreePort(taken: number): number {
  for (let port = taken + 1; port < 65_536; port++) if (!portOwner(port).listening) return port;
  return 0; // The kernel chooses.
}

async function serverChecks(address: string, home: string): Promise<Check[]> {
  const parsed = parseListenAddress(address);
  assert(parsed !== undefined, `the configuration let ${address} pass`);
  const { hostname, port } = parsed;
  const name = `port ${port}`;
  const owner = portOwner(port);
  if (!owner.listening) {
    return [
      { name, status: "ok", detail: "free" },
      { name: "server", status: "ok", detail: "not running" },
    ];
  }
  const who = owner.pid === undefined ? "another process" : `${owner.command} (pid ${owner.pid})`;
  const host = hostname === "0.0.0.0" || hostname === "::" ? "localhost" : hostname;
  const health = await probeHealth(`http://${host.includes(":") ? `[${host}]` : host}:${port}/health`);
  // The lock of a home names its server.
  const ours = Number.parseInt(readText(join(home, "server.lock")) ?? "", 10);
  if (health.healthy && owner.pid !== undefined && owner.pid !== ours) {
    return [
      {
        name,
        status: "warn",
        detail: `in use by ${who}, a server that has not ${home} for its home: one on ${home} would not start beside it`,
        cure: `name its home with AENV_HOME_PATH if it is meant, else choose another port, e.g. API_ADDR=${hostname.includes(":") ? `[${hostname}]` : hostname}:${nextFreePort(port)}`,
      },
      { name: "server", status: "ok", detail: `none runs on ${home}` },
    ];
  }
  if (health.healthy) {
    return [
      { name, status: "ok", detail: `in use by ${who}` },
      { name: "server", status: "ok", detail: `running, ${health.detail}` },
    ];
  }
  return [
    {
      name,
      status: "missing",
      detail: `in use by ${who}, which is no healthy agentenv server (${health.detail})`,
      cure: `stop that process or choose another port, e.g. API_ADDR=${hostname.includes(":") ? `[${hostname}]` : hostname}:${nextFreePort(port)}`,
    },
  ];
}

async function probeHealth(url: string): Promise<{ healthy: boolean; detail: string }> {
  const started = performance.now();
  try {
    const response = await fetch(url, { signal: AbortSignal.timeout(2000), redirect: "manual" });
    await response.body?.cancel();
    const ms = Math.round(performance.now() - started);
    return { healthy: response.ok, detail: `GET /health answered ${response.status} in ${ms} ms` };
  } catch (error) {
    return { healthy: false, detail: error instanceof Error ? error.message : String(error) };
  }
}

const USAGE = `Usage: agentenv doctor [options]

Says per prerequisite whether it is there, and what to do when it is not. Changes nothing.
Exit code 1 when something that sandboxes need is missing.

${SETTINGS_HELP}
  --json               JSON instead of lines
  -h, --help           this text
`;

export function formatChecks(checks: readonly Check[]): string {
  const width = Math.max(...checks.map((check) => check.name.length));
  return checks
    .map((check) => {
      // Lines of a file stand below, as they are.
      const cure = check.cure === undefined ? "" : `  → ${check.cure.replaceAll("\n", "\n            ")}`;
      return `${check.status.padEnd(8)}${check.name.padEnd(width + 2)}${check.detail}${cure}\n`;
    })
    .join("");
}

function parseFlags(argv: string[]) {
  return parseArgs({
    args: argv,
    options: { ...SETTINGS_FLAGS, json: { type: "boolean" }, help: { type: "boolean", short: "h" } },
  }).values;
}

/**
 * The settings to look at: without a word about a home, and with none at the default place, those of the
 * checkout this executable was built in, which `make start` and `make quickstart` use.
 */
export function chosenSettings(flags: SettingsFlags, env: Environment, executable: string): Settings {
  const settings = readSettings(flags, env);
  const beside = checkoutHome(settings.home, flags.home ?? env.AENV_HOME_PATH, executable);
  return beside === undefined ? settings : readSettings({ ...flags, home: beside }, env);
}

/** `agentenv doctor`. Exit codes: 0 all there, 1 something required is missing, 2 wrong usage. */
export async function doctorMain(argv: string[]): Promise<number> {
  let flags: ReturnType<typeof parseFlags>;
  try {
    flags = parseFlags(argv);
  } catch (error) {
    process.stderr.write(`Error: ${usageProblem(error)}\n\n${USAGE}`);
    return 2;
  }
  if (flags.help) {
    process.stdout.write(USAGE);
    return 0;
  }
  let checks: Check[];
  try {
    checks = await examine(chosenSettings(flags, process.env, process.execPath));
  } catch (error) {
    // Without a valid configuration there is nothing to look for.
    checks = [failed("configuration", error)];
  }
  process.stdout.write(flags.json ? `${JSON.stringify({ checks }, null, 2)}\n` : formatChecks(checks));
  return checks.some((check) => check.status === "missing") ? 1 : 0;
}
