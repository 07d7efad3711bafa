import { expect, test } from "bun:test";
import { adoptVmm, readProcessStat } from "./process.ts";

/** A process that is nobody's here. */
async function stranger(): Promise<number> {
  const child = Bun.spawn(["setsid", "-f", "sh", "-c", "echo $$; exec sleep 100"], { stdout: "pipe" });
  const { value } = await child.stdout.getReader().read();
  return Number(Buffer.from(value ?? []).toString());
}

function adopt(pid: number) {
  const vmm = adoptVmm(pid, readProcessStat(pid)?.startTimeTicks ?? "", "/dev/null");
  if (vmm === undefined) throw new Error(`process ${pid} is gone`);
  return vmm;
}

test("processes of others are watched: each is told when it ends, and not before", async () => {
  const pids = await Promise.all(Array.from({ length: 8 }, stranger));
  const vmms = pids.map(adopt);
  const ended = new Set<number>();
  for (const { pid, exited } of vmms) exited.then(() => ended.add(pid));
  for (const [i, vmm] of vmms.entries()) {
    // All but the first are watched twice.
    const again = i === 0 ? undefined : adopt(vmm.pid);
    process.kill(vmm.pid, "SIGKILL");
    expect(await vmm.exited).toEqual({ exitCode: null, signal: null, stderrTail: "" });
    await again?.exited;
    expect(ended.size).toBe(i + 1);
    expect(vmm.signal("SIGKILL")).toBe(false);
  }
  // With nobody to watch any more, and one that comes then.
  const late = adopt(await stranger());
  late.poke();
  expect(late.signal("SIGTERM")).toBe(true);
  await late.exited;
  expect(adoptVmm(late.pid, late.startTimeTicks, "/dev/null")).toBeUndefined();
});

test("a number that another process has by now is nobody's", async () => {
  const pid = await stranger();
  try {
    expect(adoptVmm(pid, "1", "/dev/null")).toBeUndefined();
  } finally {
    process.kill(pid, "SIGKILL");
  }
});
