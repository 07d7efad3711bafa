import { expect, test } from "bun:test";
import { join } from "node:path";
import { tryCommand } from "../../lib/command.ts";

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
