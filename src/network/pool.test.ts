import { expect, test } from "bun:test";
import { eventually } from "../../tests/support/eventually.ts";
import { createLogger } from "../lib/log.ts";
import { type PoolOptions, WarmPool } from "./pool.ts";

const log = createLogger("pool-test");
log.level = "silent";

/** A pool of numbers; `fail` makes the next creations fail. */
function numbers(options: PoolOptions) {
  const state = { made: 0, removed: [] as number[], fail: 0, triedAt: [] as number[] };
  const pool = new WarmPool<number>(
    options,
    async () => {
      state.triedAt.push(performance.now());
      await Bun.sleep(1);
      if (state.fail > 0) {
        state.fail--;
        throw new Error("cannot be made");
      }
      return ++state.made;
    },
    async (entry) => {
      state.removed.push(entry);
    },
    log,
  );
  return Object.assign(state, { pool });
}

test("fills to the low watermark at start, or not when told so", async () => {
  const warm = numbers({ lowWatermark: 2, highWatermark: 8 });
  await eventually("warm.pool.idle === 2", () => warm.pool.idle === 2);
  await warm.pool[Symbol.asyncDispose]();
  expect(warm.removed).toEqual([1, 2]);
  const cold = numbers({ lowWatermark: 2, highWatermark: 8, prewarm: false });
  await Bun.sleep(20);
  expect(cold.made).toBe(0);
  expect(cold.pool.take()).toBeUndefined();
  await eventually("cold.pool.idle === 4", () => cold.pool.idle === 4);
  await cold.pool[Symbol.asyncDispose]();
});

test("the target doubles whenever a take leaves fewer than the low watermark, up to the high one", async () => {
  const { pool } = numbers({ lowWatermark: 2, highWatermark: 10 });
  await eventually("pool.idle === 2", () => pool.idle === 2);
  const targets: number[] = [];
  for (let i = 0; i < 4; i++) {
    while (pool.take() !== undefined && pool.idle >= 2);
    targets.push(pool.target);
    await eventually("pool.idle === pool.target", () => pool.idle === pool.target);
  }
  expect(targets).toEqual([4, 8, 10, 10]);
  pool.take();
  expect(pool.target).toBe(10);
  await pool[Symbol.asyncDispose]();
});

test("a low watermark of 0 still learns from misses", async () => {
  const { pool } = numbers({ lowWatermark: 0, highWatermark: 4 });
  expect(pool.take()).toBeUndefined();
  expect(pool.target).toBe(2);
  await eventually("pool.idle === 2", () => pool.idle === 2);
  await pool[Symbol.asyncDispose]();
});

test("what comes back is kept; above the high watermark the surplus goes", async () => {
  const state = numbers({ lowWatermark: 1, highWatermark: 3, prewarm: false });
  for (const entry of [100, 101, 102, 103, 104]) expect(state.pool.put(entry)).toBe(true);
  await eventually("state.pool.idle === 3", () => state.pool.idle === 3);
  expect(state.removed.toSorted()).toEqual([103, 104]);
  await state.pool[Symbol.asyncDispose]();
  expect(state.removed).toHaveLength(5);
  expect(state.pool.put(1)).toBe(false);
});

test("without maintenance nothing is made, and what is too many is not taken back", async () => {
  const state = numbers({ lowWatermark: 2, highWatermark: 2, maintenance: false });
  expect(state.pool.take()).toBeUndefined();
  expect([1, 2, 3].map((entry) => state.pool.put(entry))).toEqual([true, true, false]);
  await Bun.sleep(20);
  expect(state.made).toBe(0);
  expect(state.pool.take()).toBe(1);
  await state.pool[Symbol.asyncDispose]();
  expect(state.removed).toEqual([2]);
});

test("a target that is not needed any more goes back to the low watermark, and the surplus with it", async () => {
  const state = numbers({ lowWatermark: 1, highWatermark: 8, shrinkAfterMs: 60 });
  await eventually("state.pool.idle === 1", () => state.pool.idle === 1);
  for (let i = 0; i < 3; i++) {
    while (state.pool.take() !== undefined);
  }
  expect(state.pool.target).toBe(8);
  await eventually(
    "state.pool.target === 1 && state.pool.idle === 1",
    () => state.pool.target === 1 && state.pool.idle === 1,
  );
  await state.pool[Symbol.asyncDispose]();
});

test("a failing creation is tried again later and troubles nobody", async () => {
  const state = numbers({ lowWatermark: 1, highWatermark: 2, prewarm: false });
  state.fail = 1;
  expect(state.pool.take()).toBeUndefined();
  await eventually("the creation fails", () => state.fail === 0);
  expect(state.pool.idle).toBe(0);
  expect(state.pool.take()).toBeUndefined();
  await eventually("state.pool.idle > 0", () => state.pool.idle > 0);
  // Not at once: timers come late, never early.
  expect(state.triedAt[1]! - state.triedAt[0]!).toBeGreaterThan(900);
  await state.pool[Symbol.asyncDispose]();
});
