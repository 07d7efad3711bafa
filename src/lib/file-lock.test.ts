import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { FileLock, lockHolder } from "./file-lock.ts";

let dir: string;
beforeAll(() => {
  dir = mkdtempSync("/tmp/orch-lock-");
});
afterAll(() => rmSync(dir, { recursive: true, force: true }));

test("only one holder at a time, within a process, too", async () => {
  const path = join(dir, "a.lock");
  const first = FileLock.tryAcquire(path);
  expect(first).toBeDefined();
  expect(FileLock.tryAcquire(path)).toBeUndefined();
  expect(lockHolder(path)).toBe(process.pid);
  await expect(FileLock.acquire(path, 20)).rejects.toThrow(`process ${process.pid}`);
  first?.[Symbol.dispose]();
  using second = await FileLock.acquire(path, 20);
  expect(second).toBeDefined();
});

test("a killed holder's lock is free at once, and a child of the holder does not keep it", async () => {
  const path = join(dir, "b.lock");
  const script = `
    import { FileLock } from ${JSON.stringify(join(import.meta.dir, "file-lock.ts"))};
    const lock = FileLock.tryAcquire(${JSON.stringify(path)});
    const child = Bun.spawn(["sleep", "30"], { stdio: ["ignore", "ignore", "ignore"] });
    console.log(lock === undefined ? "busy" : "held", child.pid);
    await Bun.sleep(30_000);
  `;
  const holder = Bun.spawn([process.execPath, "-e", script], { stdout: "pipe" });
  const reader = holder.stdout.getReader();
  const line = new TextDecoder().decode((await reader.read()).value);
  const [state, sleeper] = line.trim().split(" ");
  try {
    expect(state).toBe("held");
    expect(FileLock.tryAcquire(path)).toBeUndefined();
    holder.kill("SIGKILL");
    await holder.exited;
    expect(readFileSync(`/proc/${sleeper}/comm`, "utf8").trim()).toBe("sleep");
    using lock = FileLock.tryAcquire(path);
    expect(lock).toBeDefined();
  } finally {
    process.kill(Number(sleeper), "SIGKILL");
  }
});
