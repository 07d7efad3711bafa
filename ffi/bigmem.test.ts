import { expect, test } from "bun:test";
import { allocateBig } from "./bigmem.ts";

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
