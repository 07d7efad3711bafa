import { readFileSync } from "node:fs";
import { AenvError } from "../lib/errors.ts";
import type { VmmProcess } from "./process.ts";

/** What the drivers of all VMMs do alike. */

/** Error `too_many_drives` 400, `max` and `count` being with the root disk. */
export function checkDriveCount(count: number, max: number): void {
  if (count <= max) return;
  throw new AenvError({
    code: "too_many_drives",
    status: 400,
    message: `a VM has room for its root disk and ${max - 1} attached drives, ${count - 1} were asked for`,
    remediation: "attach fewer drives",
  });
}

/** COMMAND_LINE_SIZE of x86 Linux, with the final NUL. */
const MAX_KERNEL_COMMAND_LINE = 2048;

/** Error `invalid_boot_args` 400 for a line that the guest's kernel would cut. */
export function checkKernelLine(line: string): void {
  const bytes = Buffer.byteLength(line);
  if (bytes < MAX_KERNEL_COMMAND_LINE) return;
  throw new AenvError({
    code: "invalid_boot_args",
    status: 400,
    message: `the kernel command line has ${bytes} bytes, at most ${MAX_KERNEL_COMMAND_LINE - 1} are possible; boot arguments and the paths of attached drives are on it`,
    remediation: "pass fewer or shorter boot arguments, attach fewer drives or at shorter paths",
  });
}

/** SIGTERM, after the grace SIGKILL, until it is gone. */
export async function endProcess(vmm: VmmProcess, exited: Promise<unknown>, graceMs: number): Promise<void> {
  if (graceMs > 0) {
    const deadline = performance.now() + graceMs;
    vmm.signal("SIGTERM");
    while (performance.now() < deadline) {
      if (await settled(exited, 20)) return;
      vmm.poke();
    }
  }
  vmm.signal("SIGKILL");
  while (!(await settled(exited, 20))) vmm.poke();
}

/** A promise made at first use; one that failed is made anew next time. */
export function once<T>(make: () => Promise<T>): () => Promise<T> {
  let made: Promise<T> | undefined;
  return () => {
    made ??= make().catch((error: unknown) => {
      made = undefined;
      throw error;
    });
    return made;
  };
}

/** Vendor, family, model, stepping: what a guest on `-cpu host` may not see changed. */
export function hostCpu(): string {
  const text = readFileSync("/proc/cpuinfo", "utf8");
  const field = (name: string): string =>
    new RegExp(`^${name}\\s*:\\s*(.*)$`, "m").exec(text)?.[1]?.trim() ?? "unknown";
  return `host:${field("vendor_id")}-${field("cpu family")}-${field("model")}-${field("stepping")}`;
}

/** `GenuineIntel`, `AuthenticAMD` …; empty where the kernel names none. */
export function hostCpuVendor(): string {
  return /^vendor_id\s*:\s*(\S+)/m.exec(readFileSync("/proc/cpuinfo", "utf8"))?.[1] ?? "";
}

/** Whether a promise settled within the time. */
export async function settled(promise: Promise<unknown>, timeoutMs: number): Promise<boolean> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<false>((resolve) => {
    timer = setTimeout(() => resolve(false), timeoutMs);
  });
  try {
    return await Promise.race([promise.then(() => true as const), late]);
  } finally {
    clearTimeout(timer);
  }
}
