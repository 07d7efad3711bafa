import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { createLayerWriter, type LayerRef, openStack } from "../storage/overlaybd/index.ts";
import { createLayerMerger, MAX_CHAIN, planCompaction, Substitutes } from "./compaction.ts";

const MIB = 1 << 20;
let dir: string;
beforeAll(() => {
  dir = mkdtempSync("/tmp/life-merge-");
});
afterAll(() => rmSync(dir, { recursive: true, force: true }));

test("a big layer below small ones is left alone, a run of like ones is merged", () => {
  expect(planCompaction([])).toBeUndefined();
  expect(planCompaction([500 * MIB, ...Array<number>(7).fill(MIB)])).toBeUndefined();
  expect(planCompaction([500 * MIB, ...Array<number>(8).fill(MIB)])).toBe(1);
  // Empty layers cost nothing.
  expect(planCompaction([500 * MIB, ...Array<number>(8).fill(0)])).toBe(1);
  // What was merged before is merged again when as much has come on top of it.
  expect(planCompaction([500 * MIB, 8 * MIB, ...Array<number>(7).fill(MIB)])).toBeUndefined();
  expect(planCompaction([500 * MIB, 8 * MIB, ...Array<number>(8).fill(MIB)])).toBe(1);
});

test("over 1,000 captures the chain stays short and each byte is copied a few times", () => {
  let chain = [400 * MIB];
  let copied = 0;
  let longest = 0;
  for (let i = 0; i < 1000; i++) {
    chain.push(MIB);
    longest = Math.max(longest, chain.length);
    const from = planCompaction(chain);
    if (from === undefined) continue;
    const total = chain.slice(from).reduce((sum, size) => sum + size, 0);
    copied += total;
    chain = [...chain.slice(0, from), total];
  }
  expect(longest).toBeLessThan(40);
  expect(copied).toBeLessThan(1000 * MIB * 10);
});

test("a chain over the bound is merged whatever it costs", () => {
  const falling = Array.from({ length: MAX_CHAIN + 1 }, (_, i) => 2 ** (200 - i) * MIB);
  const from = planCompaction(falling);
  expect(from).toBeDefined();
  expect(from!).toBeLessThan(MAX_CHAIN / 2);
});

test("substitutes replace exactly the run they were made of, also one that holds an earlier one", () => {
  const layer = (file: string): LayerRef => ({ file });
  const chain = ["a", "b", "c", "d"].map(layer);
  const substitutes = new Substitutes();
  substitutes.add([layer("b"), layer("c")], layer("bc"));
  expect(substitutes.apply(chain).map(({ file }) => file)).toEqual(["a", "bc", "d"]);
  expect(substitutes.apply([layer("b"), layer("x"), layer("c")])).toHaveLength(3);
  substitutes.add([layer("bc"), layer("d")], layer("bcd"));
  expect(substitutes.apply([...chain, layer("e")]).map(({ file }) => file)).toEqual(["a", "bcd", "e"]);
});

test("the merge program: same content in one layer, and its error is told", async () => {
  const merge = createLayerMerger([process.execPath, join(import.meta.dir, "../main.ts"), "merge-layers"]);
  const expected = new Uint8Array(40 * 4096);
  const layers = Array.from({ length: 9 }, (_, i) => {
    const writer = createLayerWriter(join(dir, `disk-${i}.lsmt`), { virtualSizeBytes: MIB });
    writer.append(i * 4096, new Uint8Array(8192).fill(i + 1));
    expected.fill(i + 1, i * 4096, i * 4096 + 8192);
    return writer.finish();
  });
  const merged = await merge(layers, dir, "disk");
  expect(merged.digest).toBeUndefined();
  using stack = openStack({ lowers: [merged], virtualSizeBytes: MIB });
  const content = new Uint8Array(expected.length);
  stack.read(0, content);
  expect(content).toEqual(expected);
  await expect(merge([{ file: join(dir, "none") }], dir, "disk")).rejects.toMatchObject({
    code: "layer_merge_failed",
    message: expect.stringContaining("none"),
  });
  await expect(merge(layers, dir, "disk", AbortSignal.timeout(1))).rejects.toThrow();
  expect(readdirSync(dir).filter((name) => name.endsWith(".lsmt"))).toHaveLength(10);
});
