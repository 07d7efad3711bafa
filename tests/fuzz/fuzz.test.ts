import { afterAll, beforeAll, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readdirSync, rmSync } from "node:fs";
import { join, resolve } from "node:path";

/*
 * The decoders of the agent under ASan and UBSan, each for a time with its corpus and mutations of it: by libFuzzer
 * where that is installed, else by the driver of this directory. The seed is the same every time, so that a change
 * is judged by what it changed; AENV_FUZZ_SEED sets another. `make fuzz` looks for what is new: it takes a new seed
 * every time, prints it, and runs ten million inputs and more.
 */

const ROOT = resolve(import.meta.dir, "../..");
const OUT = join(ROOT, "build/fuzz");
const SECONDS = Number(process.env.AENV_FUZZ_SECONDS ?? 60);
const SEED = Number(process.env.AENV_FUZZ_SEED ?? 20261);
const SHORT = Math.max(1, Math.round(SECONDS / 4));
/** Seconds for each: what reads the network first, the rest a quarter of it. */
const TARGETS: readonly (readonly [string, number])[] = [
  ["http", SECONDS],
  ["json", SECONDS],
  ["protobuf", SECONDS],
  ["envelope", SECONDS],
  ["multipart", SECONDS],
  ["exchange", SHORT],
  ["gzip", SHORT],
  ["text", SHORT],
];

interface Outcome {
  readonly code: number;
  readonly out: string;
  readonly err: string;
}

async function run(argv: string[]): Promise<Outcome> {
  const child = Bun.spawn(argv, {
    cwd: ROOT,
    env: { ...process.env, CRASH_DIR: crashes },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
  const [out, err, code] = await Promise.all([
    new Response(child.stdout).text(),
    new Response(child.stderr).text(),
    child.exited,
  ]);
  return { code, out, err };
}

let crashes: string;
let total = 0;
const outcomes = new Map<string, PromiseWithResolvers<Outcome>>(
  TARGETS.map(([name]) => [name, Promise.withResolvers<Outcome>()]),
);

beforeAll(async () => {
  crashes = mkdtempSync("/tmp/fuzz-");
  const built = await run(["tests/fuzz/build.sh", OUT]);
  if (built.code !== 0) throw new Error(`the fuzz targets could not be built: ${built.out}${built.err}`);
  const libfuzzer = existsSync(join(OUT, "fuzz-text"));
  console.log(`seed ${SEED}, ${libfuzzer ? "libFuzzer" : "own driver: libFuzzer is not installed here"}`);
  const waiting = [...TARGETS];
  // As many at a time as the machine has processors, two at least.
  for (let lane = 0; lane < Math.max(2, navigator.hardwareConcurrency); lane++)
    void (async () => {
      for (let next = waiting.shift(); next !== undefined; next = waiting.shift()) {
        const [name, seconds] = next;
        const argv = libfuzzer
          ? ["tests/fuzz/libfuzzer.sh", OUT, String(seconds), String(SEED), name]
          : [join(OUT, "driver"), "tests/fuzz/corpus", name, `${seconds}s`, String(SEED)];
        await run(argv).then(outcomes.get(name)?.resolve, outcomes.get(name)?.reject);
      }
    })();
}, 900_000);

afterAll(() => {
  console.log(`fuzzing: ${total} executions in all`);
  if (readdirSync(crashes).length === 0) rmSync(crashes, { recursive: true });
});

test.each(TARGETS)(
  "%s: mutated inputs for %d s",
  async (name) => {
    const outcome = await outcomes.get(name)?.promise;
    if (outcome?.code !== 0)
      throw new Error(`seed ${SEED}, inputs in ${crashes}: ${outcome?.out}${outcome?.err}`);
    const count = Number(new RegExp(`^${name}: (\\d+) executions`, "m").exec(outcome.out)?.[1]);
    console.log(outcome.out.trim());
    total += count;
    expect(count).toBeGreaterThan(100);
  },
  (SECONDS * TARGETS.length + 120) * 1000,
);
