import { readFileSync } from "node:fs";
import type { VmmProcess } from "./process.ts";

/** What the drivers of all VMMs do alike. */

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
