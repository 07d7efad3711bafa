import { expect, test } from "bun:test";
import { closeSync, mkdtempSync, openSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { allocateBig, mapLocked } from "./bigmem.ts";

test("big buffers hold what is put into them and are freed when nobody has them", async () => {
  const MIB = 1 << 20;
  const kept = new Uint8Array(allocateBig(3 * MIB + 1));
  expect(kept.byteLength).toBe(3 * MIB + 1);
  kept.fill(7);
  Bun.gc(true);
  const before = process.memoryUsage().rss;
  for (let n = 0; n < 50; n++) {
    new Uint8Array(allocateBig(16 * MIB)).fill(n);
    Bun.gc(true);
    if (n % 10 === 0) await Bun.sleep(0);
  }
  expect(process.memoryUsage().rss - before).toBeLessThan(400 * MIB);
  expect(kept.every((byte) => byte === 7)).toBe(true);
});

test("sizes that are none are refused", () => {
  for (const length of [0, -1, 1.5, Number.NaN]) expect(() => allocateBig(length)).toThrow(RangeError);
});

test("a mapped file is there without a copy, outlives its name, and goes with its last user", async () => {
  const dir = mkdtempSync("/tmp/aenv-bigmem-");
  const file = join(dir, "mapped");
  writeFileSync(file, Buffer.alloc(300_000, 5));
  const mappings = () => readFileSync("/proc/self/maps", "utf8").split(file).length - 1;
  const fd = openSync(file, "r");
  const look = () => {
    const content = mapLocked(fd, 300_000);
    if (content === undefined) return false;
    const bytes = new Uint8Array(content);
    expect(bytes.byteLength).toBe(300_000);
    expect(bytes.every((byte) => byte === 5)).toBe(true);
    expect(mappings()).toBe(1);
    return true;
  };
  try {
    if (!look()) {
      console.log("mapLocked: this host lets us lock no memory, callers read instead");
      return;
    }
    for (let n = 0; n < 50 && mappings() > 0; n++) {
      Bun.gc(true);
      await Bun.sleep(1);
    }
    expect(mappings()).toBe(0);
    const content = mapLocked(fd, 300_000);
    rmSync(file);
    expect(new Uint8Array(content!).every((byte) => byte === 5)).toBe(true);
    expect(mapLocked(-1, 10)).toBeUndefined();
    expect(() => mapLocked(fd, 0)).toThrow(RangeError);
  } finally {
    closeSync(fd);
    rmSync(dir, { recursive: true, force: true });
  }
});
