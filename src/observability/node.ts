import { readFileSync } from "node:fs";
import { readFile, statfs } from "node:fs/promises";
import { cpus } from "node:os";
import type { DiskUse, NodeSnapshot } from "./types.ts";

const DEVICE_FILESYSTEMS = new Set(["ext2", "ext3", "ext4", "xfs", "btrfs", "overlay"]);
const MAX_DISKS = 64;
const FIRST_SAMPLE_MS = 100;

/** Text of a file of the kernel's; undefined where this kernel or container does not have it. */
async function kernelText(path: string): Promise<string | undefined> {
  try {
    return await readFile(path, "utf8");
  } catch (error) {
    if (error instanceof Error && "code" in error) return undefined;
    throw error;
  }
}

function kibibytes(text: string, name: string): number {
  return Number(new RegExp(`^${name}:\\s+(\\d+)`, "m").exec(text)?.[1] ?? 0) * 1024;
}

export function machineInfo(): NodeSnapshot["machineInfo"] {
  let text = "";
  try {
    text = readFileSync("/proc/cpuinfo", "utf8");
  } catch (error) {
    if (!(error instanceof Error && "code" in error)) throw error;
  }
  const field = (name: string) => new RegExp(`^${name}\\s*:\\s*(.*)$`, "m").exec(text)?.[1]?.trim() ?? "";
  return {
    cpuFamily: field("cpu family"),
    cpuModel: field("model"),
    cpuModelName: field("model name") || (cpus()[0]?.model ?? ""),
    cpuArchitecture: process.arch === "x64" ? "x86_64" : process.arch === "arm64" ? "aarch64" : process.arch,
  };
}

interface CpuTimes {
  readonly busy: number;
  readonly total: number;
}

function parseCpuTimes(text: string): CpuTimes {
  const fields = (/^cpu\s+(.*)$/m.exec(text)?.[1] ?? "").split(/\s+/).map(Number);
  // user nice system idle iowait irq softirq steal; guest times are in user and nice.
  const total = fields.slice(0, 8).reduce((sum, value) => sum + value, 0);
  return { busy: total - (fields[3] ?? 0) - (fields[4] ?? 0), total };
}

/** CPU of the host in whole percent between two looks; the first one waits for its second. */
export class CpuMeter {
  #last: CpuTimes | undefined;
  #percent = 0;

  async percent(): Promise<number> {
    const before = this.#last ?? (await this.#look());
    if (this.#last === undefined) await Bun.sleep(FIRST_SAMPLE_MS);
    const now = await this.#look();
    // Looks in quick succession would divide by next to nothing.
    if (now.total - before.total >= 5) {
      this.#percent = Math.round((100 * (now.busy - before.busy)) / (now.total - before.total));
      this.#last = now;
    } else this.#last ??= before;
    return this.#percent;
  }

  async #look(): Promise<CpuTimes> {
    return parseCpuTimes((await kernelText("/proc/stat")) ?? "");
  }
}

/** CPUs this process may use: the host's, or the quota of its control group when that is less. */
export async function cpuCount(): Promise<number> {
  const [quota, period] = ((await kernelText("/sys/fs/cgroup/cpu.max")) ?? "max").trim().split(" ");
  const host = cpus().length;
  if (quota === "max" || !(Number(quota) > 0)) return host;
  return Math.max(1, Math.min(host, Math.ceil(Number(quota) / Number(period ?? 100_000))));
}

/** Bytes of memory used and there, of the host or of the control group when that has a limit. */
export async function memory(): Promise<{ readonly usedBytes: number; readonly totalBytes: number }> {
  const info = (await kernelText("/proc/meminfo")) ?? "";
  const total = kibibytes(info, "MemTotal");
  const used = total - kibibytes(info, "MemAvailable");
  const limit = Number(((await kernelText("/sys/fs/cgroup/memory.max")) ?? "max").trim());
  if (!(limit > 0 && limit < total)) return { usedBytes: used, totalBytes: total };
  const current = Number(((await kernelText("/sys/fs/cgroup/memory.current")) ?? "0").trim());
  return { usedBytes: Math.min(current, limit), totalBytes: limit };
}

/** Octal escapes of mount tables. */
const unescapeMount = (text: string) =>
  text.replace(/\\([0-7]{3})/g, (_, digits: string) => String.fromCharCode(Number.parseInt(digits, 8)));

/** File systems on devices, and tmpfs, one entry per mount point. */
export async function disks(): Promise<DiskUse[]> {
  const found = new Map<string, DiskUse>();
  for (const line of ((await kernelText("/proc/self/mounts")) ?? "").split("\n")) {
    const [device = "", point = "", type = ""] = line.split(" ").map(unescapeMount);
    const wanted = type === "tmpfs" || (DEVICE_FILESYSTEMS.has(type) && device.startsWith("/"));
    if (!wanted || found.size >= MAX_DISKS) continue;
    try {
      const info = await statfs(point);
      found.set(point, {
        mountPoint: point,
        device,
        filesystemType: type,
        usedBytes: (info.blocks - info.bfree) * info.bsize,
        totalBytes: info.blocks * info.bsize,
      });
    } catch (error) {
      // Unmounted since, or not ours to look at.
      if (!(error instanceof Error && "code" in error)) throw error;
    }
  }
  return [...found.values()];
}
