import { describe, expect, test } from "bun:test";
import { testDeps } from "../support/real-node.ts";
import { formatReport, runSoak } from "./soak.ts";

describe.skipIf(testDeps() === undefined)("soak", () => {
  test("25 random operations with faults: nothing is lost, nothing lies, nothing leaks", async () => {
    const said: string[] = [];
    // One known walk here; `make soak` takes others.
    const seed = Number(process.env.AENV_TEST_SEED ?? 913024);
    const report = await runSoak({ operations: 25, seed, log: (line) => said.push(line) });
    console.log(formatReport(report));
    if (report.violations.length + report.leaks.length > 0) console.log(said.join("\n"));
    expect(report.violations).toEqual([]);
    expect(report.leaks).toEqual([]);
  }, 240_000);
});
