import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import {
  chmodSync,
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";

/* The Makefile's own rules, and what they made of the C parts. */

const ROOT = join(import.meta.dir, "..");
/** Not those of the make that runs the tests. */
const ENV = { PATH: process.env.PATH, HOME: process.env.HOME, LC_ALL: "C" };

function make(dir: string, ...args: string[]) {
  const { exitCode, stdout, stderr } = Bun.spawnSync(["make", "-C", dir, "--no-print-directory", ...args], {
    env: ENV,
    stdin: "ignore",
  });
  return { exitCode, out: stdout.toString(), err: stderr.toString() };
}

interface Elf {
  readonly interpreter: boolean;
  readonly needed: number;
}

/** What an ELF file asks of the machine that runs it (System V ABI, chapter 5: program headers, dynamic section). */
function readElf(path: string): Elf {
  const file = readFileSync(path);
  expect(file.subarray(0, 6)).toEqual(Buffer.from([0x7f, 0x45, 0x4c, 0x46, 2, 1])); // 64 bits, little endian
  const [PT_DYNAMIC, PT_INTERP, DT_NEEDED] = [2, 3, 1n];
  const start = Number(file.readBigUInt64LE(32));
  const headers = Array.from({ length: file.readUInt16LE(56) }, (_, i) => start + i * file.readUInt16LE(54));
  expect(headers.length).toBeGreaterThan(0);
  const dynamic = headers.filter((at) => file.readUInt32LE(at) === PT_DYNAMIC);
  const tags = dynamic.flatMap((at) => {
    const [offset, size] = [Number(file.readBigUInt64LE(at + 8)), Number(file.readBigUInt64LE(at + 32))];
    return Array.from({ length: size / 16 }, (_, i) => file.readBigUInt64LE(offset + i * 16));
  });
  return {
    interpreter: headers.some((at) => file.readUInt32LE(at) === PT_INTERP),
    needed: tags.filter((tag) => tag === DT_NEEDED).length,
  };
}

test("what runs in guests and jails is static, and the agent a few hundred KiB", () => {
  for (const name of ["envd", "aenv-ext4", "aenv-jail"]) {
    expect([name, readElf(join(ROOT, "build", name))]).toEqual([name, { interpreter: false, needed: 0 }]);
  }
  // The reader sees those of a file that has them.
  const here = readElf(process.execPath);
  expect(here.interpreter).toBe(true);
  expect(here.needed).toBeGreaterThan(0);
  const size = statSync(join(ROOT, "build/envd")).size;
  console.log(`the guest agent: ${(size / 1024).toFixed(0)} KiB`);
  expect(size).toBeLessThan(400 * 1024);
});

test("every C file is compiled, with warnings as errors", () => {
  const { exitCode, out } = make(ROOT, "-n", "-B", "native", "sanitize");
  expect(exitCode).toBe(0);
  const commands = out
    .replaceAll("\\\n", " ")
    .split("\n")
    .filter((line) => /^\S*gcc /.test(line));
  expect(commands).toHaveLength(8);
  for (const command of commands) {
    const words = command.split(/\s+/);
    expect(words).toEqual(expect.arrayContaining(["-std=c11", "-Wall", "-Wextra", "-Werror"]));
    expect(words.filter((word) => /^-(w$|Wno-)/.test(word))).toEqual([]);
  }
  const sources = readdirSync(join(ROOT, "c"), { recursive: true, encoding: "utf8" })
    .filter((name) => name.endsWith(".c"))
    .map((name) => `c/${name}`);
  expect(sources.length).toBeGreaterThan(40);
  const compiled = new Set(commands.flatMap((command) => command.split(/\s+/)));
  expect(sources.filter((name) => !compiled.has(name))).toEqual([]);
});

test("only tests and benchmarks ask for their packages", () => {
  const asked = (target: string) => {
    const { exitCode, out } = make(ROOT, "-n", target);
    expect([target, exitCode]).toEqual([target, 0]);
    return [...out.matchAll(/scripts\/bootstrap\.sh +(\w+)/g)].map(([, what]) => what);
  };
  for (const target of ["build", "start", "quickstart", "deb", "release", "lint"])
    expect([target, asked(target)]).toEqual([target, []]);
  for (const target of ["test", "bench", "bench-envd", "soak", "try-fresh", "try-image", "rig"])
    expect([target, asked(target)]).toEqual([target, ["test"]]);
});

const isRoot = process.geteuid?.() === 0;
if (!isRoot) console.log("skipped: targets that need root, as another user: that takes root to become one");
test.skipIf(!isRoot)("without root: told before anything is made or downloaded", () => {
  for (const target of ["quickstart", "start"]) {
    const line = ["setpriv", "--reuid=64321", "--regid=64321", "--clear-groups", "make", "-C", ROOT, target];
    const { exitCode, stdout, stderr } = Bun.spawnSync(line, { env: ENV, stdin: "ignore" });
    expect([exitCode, stdout.toString().match(/CC|bun|setup|download/)]).toEqual([2, null]);
    expect(stderr.toString()).toContain(`network namespaces and taps need root: sudo make ${target}`);
  }
});

describe("in a checkout with next to nothing in it", () => {
  const PARTS = {
    "build/libaenv.so": "c/shim/unit.c",
    "build/envd": "c/envd/unit.c",
    "build/aenv-ext4": "c/ext4/unit.c",
    "build/aenv-jail": "c/jail/unit.c",
    "build/memshield.so": "c/memshield/memshield.c",
  };
  let dir: string;

  const put = (name: string, text: string, mode = 0o644) => {
    mkdirSync(dirname(join(dir, name)), { recursive: true });
    writeFileSync(join(dir, name), text);
    chmodSync(join(dir, name), mode);
  };
  /** Newer than all that was made, by the file system's clock, which has steps. */
  const change = (name: string, text: string) => {
    const made = [".tools/ready", "dist/agentenv"].map((path) => statSync(join(dir, path)).mtimeMs);
    do put(name, text);
    while (statSync(join(dir, name)).mtimeMs <= Math.max(...made));
  };

  beforeEach(() => {
    dir = mkdtempSync(join(tmpdir(), "aenv-make-"));
    for (const name of ["Makefile", "package.json", "bun.lock"]) cpSync(join(ROOT, name), join(dir, name));
    for (const name of ["src/main.ts", "scripts/build.ts", "scripts/packages.txt", "scripts/versions.sh"])
      put(name, "");
    put("scripts/bootstrap.sh", "#!/bin/sh\necho bootstrap\n", 0o755);
    // Says what it was asked for, and makes what the compiler would.
    const bun =
      'echo "bun $*"\n[ "$1" = install ] && mkdir -p node_modules || { mkdir -p dist; echo > dist/agentenv; }';
    put(".tools/bin/bun", `#!/bin/sh\n${bun}\n`, 0o755);
    for (const name of Object.values(PARTS)) put(name, "int main(void);\nint main(void) { return 0; }\n");
  });
  afterEach(() => rmSync(dir, { recursive: true, force: true }));

  test("a warning in any C part fails the build with its place, and leaves no part behind", () => {
    expect(make(dir, ".tools/ready").exitCode).toBe(0);
    for (const name of Object.values(PARTS)) put(name, "int main(void) {\n  int never;\n  return 0;\n}\n");
    const targets = [...Object.keys(PARTS), "build/san/libaenv.so", "build/san/envd", "build/san/aenv-ext4"];
    const { exitCode, err } = make(dir, "-k", ...targets);
    expect(exitCode).not.toBe(0);
    for (const [target, source] of Object.entries(PARTS)) {
      expect(err).toContain(`${source}:2:7: error: unused variable 'never' [-Werror=unused-variable]`);
      expect([target, existsSync(join(dir, target))]).toEqual([target, false]);
    }
    for (const target of targets) expect(err).toMatch(new RegExp(`${target}\\] Error 1$`, "m"));
  }, 120_000);

  test("make does its own set-up, then nothing that is done, then what a change needs", () => {
    const first = make(dir);
    expect([first.exitCode, first.err]).toEqual([0, ""]);
    const lines = first.out.trimEnd().split("\n");
    expect(lines.toSorted()).toEqual(
      [
        "bootstrap",
        "bun install --frozen-lockfile --silent",
        "bun run scripts/build.ts",
        ...Object.keys(PARTS).map((part) => `  CC      ${part}`),
      ].toSorted(),
    );
    expect([lines[0], lines.at(-1)]).toEqual(["bootstrap", "bun run scripts/build.ts"]);
    expect(make(dir).out).toBe("make: Nothing to be done for 'build'.\n");
    change("c/envd/another.c", "int another(void);\nint another(void) { return 1; }\n");
    expect(make(dir).out).toBe("  CC      build/envd\nbun run scripts/build.ts\n");
    change("src/main.ts", "// changed");
    expect(make(dir).out).toBe("bun run scripts/build.ts\n");
    change("scripts/packages.txt", "# changed");
    expect(make(dir, "deps").out).toBe("bootstrap\n");
    expect(make(dir, "clean").exitCode).toBe(0);
    expect([existsSync(join(dir, "build")), existsSync(join(dir, "dist"))]).toEqual([false, false]);
  }, 120_000);
});
