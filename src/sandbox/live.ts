import { readdirSync, readFileSync, readlinkSync } from "node:fs";
import { mkdir, readdir, rename, writeFile } from "node:fs/promises";
import { basename, join } from "node:path";
import { errorCode, readJson } from "../lib/durable.ts";
import { isUuid } from "../lib/ids.ts";
import type { Logger } from "../lib/log.ts";
import type { MemoryImage } from "../memory/types.ts";
import type { EgressPolicy } from "../network/index.ts";
import type { DeviceSpec } from "../storage/blockd/protocol.ts";
import type { VmReference, VmShape } from "../vmm/types.ts";
import type { AttachedDrive } from "./types.ts";

/**
 * Register of what a running sandbox holds, one `live.json` per sandbox, so that a later process can
 * take it over, or away. Written before the VM is started, when it has a process and when it runs. It is
 * not synced: after a crash of the host there is no VM left to find.
 */
export interface LiveRecord {
  readonly version: 2;
  readonly sandboxId: string;
  readonly generation: string;
  readonly deviceId: string;
  /** Of this start, see AgentClient.init. */
  readonly lifecycleId: string;
  readonly startedAt: string;
  readonly slotIndex?: number;
  readonly policy?: EgressPolicy;
  readonly vm?: VmReference;
  /** A block device, for the moment in which it is made anew. */
  readonly device?: DeviceSpec;
  /** Disks besides the root disk, in the order in which the VM has them; absent: none. */
  readonly drives?: readonly LiveDrive[];
  /** There once the guest was told who it is: what another process needs to go on. */
  readonly adoptable?: {
    readonly shape: VmShape;
    readonly envdVersion: string;
    /** What the mapped memory file holds. */
    readonly memory: MemoryImage;
    /** What the last checkpoint captured; the mapped image is at its bottom. */
    readonly base: MemoryImage;
  };
}

/** What is under its device is known to the block daemon. */
export interface LiveDrive extends Omit<AttachedDrive, "lowers" | "virtualSizeBytes"> {
  readonly deviceId: string;
}

export async function writeLive(rootDir: string, record: LiveRecord): Promise<void> {
  const dir = join(rootDir, record.sandboxId);
  await mkdir(dir, { recursive: true, mode: 0o700 });
  const temporary = join(dir, "live.json.tmp");
  await writeFile(temporary, JSON.stringify(record), { mode: 0o600 });
  await rename(temporary, join(dir, "live.json"));
}

/** Undefined: none, or not readable as one (logged; the sweep by directory still applies). */
export async function readLive(
  rootDir: string,
  sandboxId: string,
  log: Logger,
): Promise<LiveRecord | undefined> {
  const path = join(rootDir, sandboxId, "live.json");
  try {
    const value = (await readJson(path)) as Partial<LiveRecord>;
    if (value.version === 2 && typeof value.deviceId === "string") return value as LiveRecord;
    log.warn({ path }, "live record of another version is ignored");
  } catch (error) {
    if (errorCode(error) !== "ENOENT") log.warn({ err: error, path }, "live record cannot be read");
  }
  return undefined;
}

export async function listSandboxDirs(dir: string): Promise<string[]> {
  try {
    return (await readdir(dir)).filter(isUuid);
  } catch (error) {
    if (errorCode(error) === "ENOENT") return [];
    throw error;
  }
}

/** Start time of a process (field 22 of its stat), undefined when it is gone. */
export function processStartTicks(pid: number): string | undefined {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, "utf8");
    // The command name may hold spaces and parentheses: count fields after the last one.
    return stat.slice(stat.lastIndexOf(")") + 2).split(" ")[19];
  } catch (error) {
    if (errorCode(error) === "ENOENT" || errorCode(error) === "ESRCH") return undefined;
    throw error;
  }
}

const VMM_PROGRAMS = /^(qemu|firecracker|nsenter|setpriv)/;

/**
 * VMM processes whose command line names a path in one of the directories, or that stand in one. Finds those,
 * too, whose server died between starting them and writing down their pid.
 */
export function findVmmProcesses(
  dirs: readonly string[],
): { readonly pid: number; readonly startTimeTicks: string }[] {
  const found: { pid: number; startTimeTicks: string }[] = [];
  for (const entry of readdirSync("/proc")) {
    const pid = Number(entry);
    if (!Number.isInteger(pid) || pid === process.pid) continue;
    try {
      const commandLine = readFileSync(`/proc/${pid}/cmdline`, "utf8");
      // Firecracker knows its directory by another name; it stands in it.
      const cwd = readlinkSync(`/proc/${pid}/cwd`);
      if (!dirs.some((dir) => commandLine.includes(`${dir}/`) || `${cwd}/`.startsWith(`${dir}/`))) continue;
      const program = basename(readlinkSync(`/proc/${pid}/exe`));
      const ticks = processStartTicks(pid);
      if (ticks !== undefined && VMM_PROGRAMS.test(program)) found.push({ pid, startTimeTicks: ticks });
    } catch (error) {
      const code = errorCode(error);
      // Gone meanwhile, or another user's: not ours.
      if (code !== "ENOENT" && code !== "ESRCH" && code !== "EACCES" && code !== "EPERM") throw error;
    }
  }
  return found;
}

/** SIGKILL, and waits until the process is gone; false if that took longer than `timeoutMs`. */
export async function killProcess(pid: number, startTimeTicks: string, timeoutMs = 5000): Promise<boolean> {
  const deadline = performance.now() + timeoutMs;
  while (isProcess(pid, startTimeTicks)) {
    if (performance.now() > deadline) return false;
    try {
      process.kill(pid, "SIGKILL");
    } catch (error) {
      if (errorCode(error) !== "ESRCH") throw error;
    }
    await Bun.sleep(10);
  }
  return true;
}

/** Whether that very process still runs. */
export function isProcess(pid: number, startTimeTicks: string): boolean {
  return processStartTicks(pid) === startTimeTicks && !isZombie(pid);
}

function isZombie(pid: number): boolean {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, "utf8");
    return stat.slice(stat.lastIndexOf(")") + 2).startsWith("Z");
  } catch (error) {
    if (errorCode(error) === "ENOENT" || errorCode(error) === "ESRCH") return true;
    throw error;
  }
}
