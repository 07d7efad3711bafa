import { expect, test } from "bun:test";
import { join } from "node:path";

test("the documentation and the product name the same things", () => {
  const { exitCode, stdout, stderr } = Bun.spawnSync([
    process.execPath,
    join(import.meta.dir, "docs-check.ts"),
  ]);
  expect(stderr.toString()).toBe("");
  expect(stdout.toString()).toStartWith("documentation: ");
  expect(exitCode).toBe(0);
}, 120_000);
