import { expect, test } from "bun:test";
import { join } from "node:path";

/* Lines that mean nothing, to every program of the executable. */

const MAIN = join(import.meta.dir, "main.ts");

function run(...argv: string[]) {
  const { exitCode, stdout, stderr } = Bun.spawnSync([process.execPath, MAIN, ...argv], { stdin: "ignore" });
  return { exitCode, out: stdout.toString(), err: stderr.toString() };
}

test.each([
  "serve --nope",
  "serve extra",
  "blockd --nope",
  "setup --nope",
  "setup extra",
  "doctor --nope",
  "doctor extra",
  "config --nope",
  "config nope",
  "layer --nope",
  "layer nope",
  "completion --nope",
  "auth extra",
])("%s: names it, status 2, no stack", (line) => {
  const argv = line.split(" ");
  const { exitCode, out, err } = run(...argv);
  expect([exitCode, out]).toEqual([2, ""]);
  expect(err).toContain(argv.at(-1)!);
  expect(err).not.toMatch(/^\s+at |ERR_PARSE|To specify a positional/m);
});

test("serve: where the settings are that others have as flags", () => {
  expect(run("serve", "--port", "8100").err).toStartWith(
    "Error: Unknown option '--port'\n  the address is API_ADDR=HOST:PORT in the environment, or ",
  );
  expect(run("serve", "--api-key=sesame").err).toContain("the key is AENV_API_KEY in the environment");
  expect(run("serve", "--api-key=sesame").err).not.toContain("sesame");
  expect(run("serve", "extra").err).toContain("agentenv config default prints and explains them");
});
