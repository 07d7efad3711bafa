import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { chmodSync, cpSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";

/* What stands between a mistake and the main branch, tried with mistakes in a small checkout of its own. */

const ROOT = join(import.meta.dir, "..");

let dir: string;

beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), "aenv-checks-"));
  mkdirSync(join(dir, ".tools/bin"), { recursive: true });
  symlinkSync(process.execPath, join(dir, ".tools/bin/bun"));
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

function copy(...names: readonly string[]): void {
  for (const name of names) cpSync(join(ROOT, name), join(dir, name));
}

function put(name: string, text: string, mode = 0o644): void {
  const path = join(dir, name);
  mkdirSync(dirname(path), { recursive: true });
  writeFileSync(path, text);
  chmodSync(path, mode);
}

function run(script: string, env: Readonly<Record<string, string>> = {}) {
  const { exitCode, stdout, stderr } = Bun.spawnSync([join(dir, script)], {
    env: { PATH: process.env.PATH, HOME: dir, TMPDIR: dir, ...env },
    stdin: "ignore",
  });
  return { exitCode, output: `${stdout}${stderr}`, last: stdout.toString().trimEnd().split("\n").at(-1) };
}

describe("scripts/lint.sh", () => {
  beforeEach(() => {
    copy(
      "scripts/lint.sh",
      ".gitignore",
      "biome.json",
      "tsconfig.json",
      ".dependency-cruiser.cjs",
      "package.json",
    );
    symlinkSync(join(ROOT, "node_modules"), join(dir, "node_modules"));
    put("ffi/index.ts", "export const library = 1;\n");
    put("src/lib/ground.ts", "export const ground = 1;\n");
    put("src/api/index.ts", 'import { ground } from "../lib/ground.ts";\n\nexport const api = ground;\n');
  });

  test("is content with sources as they should be", () => {
    const { exitCode, output } = run("scripts/lint.sh");
    expect(
      output
        .replaceAll(/\d+ ms/g, "N ms")
        .trimEnd()
        .split("\n"),
    ).toEqual([
      "  ok      format and lint (biome) (N ms)",
      "  ok      types (tsc) (N ms)",
      "  ok      import directions (dependency-cruiser) (N ms)",
      "  ok      shell scripts (N ms)",
    ]);
    expect(exitCode).toBe(0);
  }, 120_000);

  test("refuses each kind of mistake, and says where", () => {
    put("src/memory/index.ts", 'import { api } from "../api/index.ts";\n\nexport const memory = api;\n');
    put("src/lib/high.ts", 'import { api } from "../api/index.ts";\n\nexport const high = api;\n');
    put("src/api/hidden.ts", "export const hidden = 1;\n");
    put("src/proxy/index.ts", 'import { hidden } from "../api/hidden.ts";\n\nexport const proxy = hidden;\n');
    put("src/cli/index.ts", 'import { api } from "../api/index.ts";\n\nexport const cli = api;\n');
    put("src/vmm/index.ts", 'import { dlopen } from "bun:ffi";\n\nexport const vmm = dlopen;\n');
    put("src/image/one.ts", 'import { two } from "./two.ts";\n\nexport const one = (): number => two();\n');
    put("src/image/two.ts", 'import { one } from "./one.ts";\n\nexport const two = (): number => one();\n');
    put("src/network/types.ts", "export const port: number = '80'\n");
    put("scripts/broken.sh", "if true; then\n", 0o755);
    const { exitCode, output } = run("scripts/lint.sh");
    for (const said of [
      "  FAILED  format and lint (biome)",
      "src/network/types.ts format",
      "  FAILED  types (tsc)",
      "src/network/types.ts(1,14): error TS2322",
      "  FAILED  import directions (dependency-cruiser)",
      "error memory-not-up-to-api: src/memory/index.ts → src/api/index.ts",
      "error lib-is-the-ground: src/lib/high.ts → src/api/index.ts",
      "error through-the-front-door: src/proxy/index.ts → src/api/hidden.ts",
      "error cli-talks-http-only: src/cli/index.ts → src/api/index.ts",
      "error ffi-only-from-the-engine: src/vmm/index.ts → bun:ffi",
      "error no-circular: src/image/",
      "  FAILED  shell scripts",
      "scripts/broken.sh: line 2: syntax error",
    ]) {
      expect(output).toContain(said);
    }
    expect(exitCode).toBe(1);
  }, 120_000);
});

describe("scripts/test.sh", () => {
  /** What they stand for is tried above and in tests of setup. */
  const STUBS = ["scripts/lint.sh", "scripts/bootstrap.sh", "dist/agentenv"];
  const GOOD = 'test("works", () => expect(1).toBe(1));\ntest.skip("left out", () => undefined);\n';
  const BAD = 'test("is wrong", () => expect(1).toBe(2));\n';
  /** Fails when it is run for the first time. */
  const flaky = () => `test("once", async () => {
    const seen = Bun.file(${JSON.stringify(join(dir, "seen"))});
    if (await seen.exists()) return;
    await seen.write("");
    throw new Error("the first time");
  });\n`;

  beforeEach(() => {
    copy("scripts/test.sh", "scripts/test-report.ts", "scripts/versions.sh");
    for (const name of STUBS) put(name, "#!/bin/sh\n", 0o755);
    for (const name of ["src", "ffi", "tests/e2e", "tests/agent", "tests/fuzz", "tests/rig"])
      mkdirSync(join(dir, name), { recursive: true });
    put("tests/timings.json", '{"version": 1, "files": {}}');
  });
  const file = (name: string, text: string) =>
    put(`tests/${name}.test.ts`, `import { expect, test } from "bun:test";\n${text}`);
  /** The last line, which is what people and machines read, what is told as failed, and the status. */
  function outcome(filter = "") {
    const { exitCode, output, last } = run("scripts/test.sh", { AENV_TEST_FILTER: filter });
    return { exitCode, last, end: output.slice(output.lastIndexOf("\n== the end")) };
  }

  test("counts lint, setup and tests, and ends with 0 where all passed", () => {
    file("good", GOOD);
    expect(outcome()).toMatchObject({ exitCode: 0, last: "3 passed, 0 failed, 1 skipped" });
    put("scripts/lint.sh", "#!/bin/sh\nexit 1\n", 0o755);
    put("dist/agentenv", "#!/bin/sh\nexit 1\n", 0o755);
    const { exitCode, end, last } = outcome();
    expect([exitCode, last]).toEqual([1, "1 passed, 2 failed, 1 skipped"]);
    expect(end).toContain("failed:\nlint\nsetup: ");
  });

  test("a failure is counted, named with its error, and ends with 1; the filter leaves files out", () => {
    file("good", GOOD);
    file("bad", BAD);
    const { exitCode, end, last } = outcome();
    expect([exitCode, last]).toEqual([1, "3 passed, 1 failed, 1 skipped"]);
    expect(end).toContain("failed:\nunit: is wrong\n    AssertionError: expect(received).toBe(expected)\n");
    expect(outcome("goo")).toMatchObject({ exitCode: 0, last: "3 passed, 0 failed, 1 skipped" });
    expect(outcome("bad")).toMatchObject({ exitCode: 1, last: "2 passed, 1 failed, 0 skipped" });
  });

  test("a file that dies, ends early or cannot be loaded is a failure, whatever its status", () => {
    file("good", GOOD);
    file("killed", 'test("dies", () => process.kill(process.pid, "SIGKILL"));\n');
    file("early", 'test("ends", () => process.exit(0));\n');
    file("unloadable", 'throw new Error("no");\n');
    const all = outcome();
    expect([all.exitCode, all.last]).toEqual([1, "3 passed, 3 failed, 1 skipped"]);
    for (const name of [
      "tests/killed.test.ts (worker crashed",
      "tests/early.test.ts (worker crashed",
      "tests/unloadable.test.ts (could not be loaded)",
    ])
      expect(all.end).toContain(`\nunit: ${name}`);
    // Alone there is no process above it that tells.
    for (const [name, status] of [
      ["killed", 137],
      ["early", 0],
    ]) {
      const alone = outcome(`${name}`);
      expect([alone.exitCode, alone.last]).toEqual([1, "2 passed, 1 failed, 0 skipped"]);
      expect(alone.end).toContain(`suite unit ended with status ${status} and without a complete report`);
    }
    file("fuzz/early", 'test("ends", () => process.exit(0));\n');
    expect(outcome("fuzz")).toMatchObject({ exitCode: 1, last: "2 passed, 1 failed, 0 skipped" });
  });

  test("what fails beside others and passes alone is told as that, and hides no other failure", () => {
    file("good", GOOD);
    file("flaky", flaky());
    const once = outcome();
    expect([once.exitCode, once.last]).toEqual([0, "4 passed, 0 failed, 1 skipped"]);
    expect(once.end).toContain(
      "failed beside other tests, passed alone:\nunit: once\n    Error: the first time",
    );
    for (const [name, text] of [
      ["bad", BAD],
      ["early", 'test("ends", () => process.exit(0));\n'],
      ["unloadable", 'throw new Error("no");\n'],
    ]) {
      rmSync(join(dir, "seen"));
      file(name!, text!);
      const both = outcome();
      expect([name, both.exitCode, both.last]).toEqual([name, 1, "3 passed, 2 failed, 1 skipped"]);
      expect(both.end).not.toContain("passed alone");
      rmSync(join(dir, `tests/${name}.test.ts`));
    }
  });
});
