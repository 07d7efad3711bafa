import { existsSync } from "node:fs";
import { release } from "node:os";
import { z } from "zod";
import { AenvError } from "../../lib/errors.ts";
import type { ExportKind } from "./protocol.ts";

/** Whether disks can go over ublk on this host, why, and what would help where they cannot. */
export interface UblkVerdict {
  readonly usable: boolean;
  readonly reason: string;
  readonly cure?: string;
}

const verdictSchema = z.object({
  usable: z.boolean(),
  reason: z.string(),
  cure: z.string().optional(),
});

const CONTROL_DEVICE = "/dev/ublk-control";
const PROBE_TIMEOUT_MS = 25_000;
const MODULE_CURE = "modprobe ublk_drv (Linux 6.5 or later), as root; agentenv setup --host makes it last";

/**
 * Tries ublk in a process of its own (`argv` is the block daemon's command line): on some kernels the first
 * device that is added never comes back, and then that process alone is lost. Never throws.
 */
export async function probeUblk(
  argv: readonly string[],
  options: { readonly timeoutMs?: number; readonly controlDevice?: string } = {},
): Promise<UblkVerdict> {
  const { timeoutMs = PROBE_TIMEOUT_MS, controlDevice = CONTROL_DEVICE } = options;
  if (!existsSync(controlDevice))
    return { usable: false, reason: `there is no ${controlDevice}`, cure: MODULE_CURE };
  let child: Bun.Subprocess<"ignore", "pipe", "ignore">;
  try {
    child = Bun.spawn([...argv, "--probe-ublk"], { stdio: ["ignore", "pipe", "ignore"], detached: true });
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    return { usable: false, reason: `the probe cannot be started (${why})` };
  }
  // One that hangs in the kernel cannot be ended, and is nothing to wait for.
  child.unref();
  const answer = new Response(child.stdout).text();
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<undefined>((resolve) => {
    timer = setTimeout(() => resolve(undefined), timeoutMs);
  });
  const text = await Promise.race([answer.catch(() => ""), late]);
  clearTimeout(timer);
  if (text === undefined) {
    child.kill("SIGKILL");
    return {
      usable: false,
      reason: `Linux ${release()} does not finish adding a ublk device within ${timeoutMs / 1000} s`,
      cure: 'reboot into another kernel; until then disks go over NBD, or say so with ublk.export = "nbd"',
    };
  }
  try {
    return verdictSchema.parse(JSON.parse(text));
  } catch {
    return { usable: false, reason: `the probe ended (${await child.exited}) without an answer` };
  }
}

/**
 * How the disks of new sandboxes reach their VMs: as configured, or by what the host can do; `cure` would make `ublk`
 * of what `auto` found to be `nbd`. `ublk` where that does not work is an error (`ublk_unusable`) that says why and
 * what helps.
 */
export async function chooseExport(
  configured: "auto" | ExportKind,
  probe: () => Promise<UblkVerdict>,
): Promise<{ readonly kind: ExportKind; readonly reason: string; readonly cure?: string }> {
  if (configured === "nbd") return { kind: "nbd", reason: "as configured" };
  const verdict = await probe();
  if (verdict.usable) return { kind: "ublk", reason: verdict.reason };
  if (configured === "auto") {
    const { reason, cure } = verdict;
    const why = `ublk cannot be used: ${reason}`;
    return { kind: "nbd", reason: why, ...(cure === undefined ? {} : { cure }) };
  }
  throw new AenvError({
    code: "ublk_unusable",
    status: 503,
    message: `ublk.export is "ublk", which this host cannot do: ${verdict.reason}`,
    remediation: verdict.cure ?? 'set ublk.export to "auto" or "nbd"',
  });
}
