import { expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { join, resolve } from "node:path";

/*
 * The decoders of the agent under sanitizers, each with its corpus and mutations of it. Here a part of what `make fuzz`
 * does (10 million executions); the seed is new every time and printed, so that a failure can be met again.
 */

const ROOT = resolve(import.meta.dir, "../..");
const EXECUTIONS = Number(process.env.AENV_FUZZ_EXECUTIONS ?? 300_000);
const SEED = Number(process.env.AENV_FUZZ_SEED ?? Math.floor(Math.random() * 1e9));

test(`${EXECUTIONS} mutated inputs for the agent's decoders, seed ${SEED}`, async () => {
  const crashes = mkdtempSync("/tmp/fuzz-");
  const run = async (...argv: string[]) => {
    const child = Bun.spawn(argv, {
      cwd: ROOT,
      env: { ...process.env, CRASH_DIR: crashes },
      stdin: "ignore",
      stdout: "pipe",
      stderr: "pipe",
    });
    const [stdout, stderr, code] = await Promise.all([
      new Response(child.stdout).text(),
      new Response(child.stderr).text(),
      child.exited,
    ]);
    if (code !== 0) throw new Error(`${argv.join(" ")} (${code}), input in ${crashes}: ${stdout}${stderr}`);
    return stdout;
  };
  await run("tests/fuzz/build.sh", "build/fuzz");
  const said = await run(
    join(ROOT, "build/fuzz/driver"),
    "tests/fuzz/corpus",
    "all",
    String(EXECUTIONS),
    String(SEED),
  );
  console.log(said);
  const counts = [...said.matchAll(/^(\w+): (\d+) executions/gm)].map((m) => [m[1], Number(m[2])] as const);
  expect(counts.length).toBe(7);
  expect(counts.reduce((sum, [, n]) => sum + n, 0)).toBe(EXECUTIONS);
  rmSync(crashes, { recursive: true });
}, 300_000);
