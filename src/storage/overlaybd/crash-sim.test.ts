import { expect, test } from "bun:test";
import { simulate } from "./testing/run-sim.ts";

/** `AENV_TEST_SEED` repeats a run, `AENV_CRASH_SEEDS` sets its length; `scripts/crash-sim.ts` runs longer. */
const SEEDS = Number(process.env.AENV_CRASH_SEEDS ?? 2500);
const LEAST = Math.min(SEEDS, 500);
const BUDGET_MS = 25_000;

test("random lives with crashes: no acknowledged write is lost, nothing but old or new content is read", () => {
  const first = Number(process.env.AENV_TEST_SEED ?? Math.floor(Math.random() * 2 ** 31));
  const total = simulate(first, LEAST);
  const rest = simulate(first + LEAST, SEEDS - LEAST, performance.now() + BUDGET_MS);
  const sum = (name: keyof typeof total) => total[name] + rest[name];
  console.info(
    `crash-sim: ${sum("seeds")} seeds from ${first}: ${sum("kills")} kills, ${sum("powerLosses")} power losses, ` +
      `${sum("images")} disk images, ${sum("failures")} failures in compaction, ${sum("indexRewrites")} indexes rewritten`,
  );
  expect(sum("seeds")).toBeGreaterThanOrEqual(LEAST);
  if (SEEDS < 500) return;
  // The lives are worth something: all kinds of trouble were met.
  expect(sum("kills")).toBeGreaterThan(100);
  expect(sum("powerLosses")).toBeGreaterThan(300);
  expect(sum("failures")).toBeGreaterThan(100);
  expect(sum("indexRewrites")).toBeGreaterThan(10);
  expect(sum("movedBytes")).toBeGreaterThan(100_000);
}, 300_000);
