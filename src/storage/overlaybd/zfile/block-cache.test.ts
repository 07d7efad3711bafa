import { expect, test } from "bun:test";
import { BlockCache } from "./block-cache.ts";

const MIB = 1 << 20;
const BLOCK = 64 << 10;

function fill(cache: BlockCache, key: string, from: number, to: number): void {
  using file = cache.open(key);
  for (let block = from; block < to; block++) file.add(block, file.room(BLOCK).fill(block));
}

test("stays within its limit; what was used survives what was not", () => {
  const cache = new BlockCache(2 * MIB);
  using file = cache.open("a");
  fill(cache, "a", 0, 16);
  for (let block = 0; block < 8; block++) expect(file.get(block)?.[5]).toBe(block);
  fill(cache, "b", 0, 20);
  expect(cache.stats().bytes).toBeLessThanOrEqual(2 * MIB);
  for (let block = 0; block < 8; block++) expect(file.get(block)?.[BLOCK - 1]).toBe(block);
  expect(file.has(8)).toBe(false);
  fill(cache, "c", 0, 10_000);
  expect(cache.stats().bytes).toBeLessThanOrEqual(2 * MIB);
  expect(file.has(0)).toBe(false);
});

test("handles of one content share blocks, others do not; a smaller limit takes effect at once", () => {
  const cache = new BlockCache(4 * MIB);
  fill(cache, "a", 0, 32);
  using again = cache.open("a");
  using other = cache.open("b");
  expect(again.get(3)?.[0]).toBe(3);
  expect(other.get(3)).toBeUndefined();
  cache.setLimit(MIB);
  expect(cache.stats().bytes).toBeLessThanOrEqual(MIB);
  cache.setLimit(0);
  expect(cache.stats().limitBytes).toBe(MIB);
  expect(cache.stats().hits).toBe(1);
  expect(cache.stats().misses).toBe(1);
});

test("a block that comes twice counts once", () => {
  const cache = new BlockCache(4 * MIB);
  fill(cache, "a", 0, 4);
  fill(cache, "a", 0, 4);
  expect(cache.stats().bytes).toBe(4 * BLOCK);
});
