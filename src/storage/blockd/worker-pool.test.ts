import { expect, test } from "bun:test";
import { join } from "node:path";
import { tryCommand } from "../../lib/command.ts";
import { shareOf } from "./worker-pool.ts";

test("shares of a number add up to it, whatever the number of workers", () => {
  const shares = (total: number, workers: number) =>
    Array.from({ length: workers }, (_, index) => shareOf(total, workers, index));
  expect(shares(1, 4)).toEqual([1, 0, 0, 0]);
  expect(shares(10, 4)).toEqual([3, 3, 2, 2]);
  expect(shares(0, 2)).toEqual([0, 0]);
  for (let workers = 1; workers <= 64; workers++) {
    for (const total of [1, 63, 64, 65, 256]) {
      const all = shares(total, workers);
      expect(all.reduce((sum, share) => sum + share)).toBe(total);
      expect(Math.max(...all) - Math.min(...all)).toBeLessThanOrEqual(1);
    }
  }
});

test("a worker's death fails what waits for it and what comes after, and is told once", async () => {
  const script = join(import.meta.dir, "testing/dying-worker.ts");
  const { stdout, exitCode } = await tryCommand([process.execPath, script], { timeoutMs: 20_000 });
  expect(exitCode).toBe(0);
  expect(JSON.parse(stdout)).toEqual({
    waiting: "blockd_worker_died",
    afterwards: "blockd_worker_died",
    code: 1,
    deaths: ["a worker of the block daemon ended with code 1"],
  });
});
