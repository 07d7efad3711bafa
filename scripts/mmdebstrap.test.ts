import { afterEach, beforeEach, expect, test } from "bun:test";
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const SCRIPT = join(import.meta.dir, "mmdebstrap.sh");

let dir: string;

beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), "aenv-mmdebstrap-"));
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

const HELD = [3, 4, 5, 6, 7, 8, 9, 12];

/** Stands in for the program: tells its arguments, and which of the caller's descriptors it has. */
function standIn(): void {
  writeFileSync(
    join(dir, "mmdebstrap"),
    `#!/bin/sh
echo "$# $*"
for fd in ${HELD.join(" ")}; do [ ! -e /proc/$$/fd/$fd ] || echo "has $fd"; done
cat
echo told >&2
exit 7
`,
  );
  chmodSync(join(dir, "mmdebstrap"), 0o755);
}

test("what the caller has open is not handed on, its arguments, streams and status are", () => {
  standIn();
  // As many as a make with jobs, a lock and a supervisor have open.
  const held = HELD.map((fd) => `${fd}</dev/null`).join(" ");
  const { exitCode, stdout, stderr } = Bun.spawnSync(
    ["bash", "-c", `exec ${held}; exec '${SCRIPT}' "$@"`, "_", "--include=a b", "-"],
    { env: { PATH: `${dir}:${process.env.PATH}` }, stdin: Buffer.from("the sources\n") },
  );
  expect({ exitCode, out: stdout.toString(), err: stderr.toString() }).toEqual({
    exitCode: 7,
    out: "2 --include=a b -\nthe sources\n",
    err: "told\n",
  });
});

test("a machine without it is told what to install", () => {
  const { exitCode, stderr } = Bun.spawnSync(["/bin/bash", SCRIPT], { env: { PATH: dir } });
  expect([exitCode, stderr.toString()]).toEqual([
    1,
    "error: mmdebstrap is not installed: apt-get install mmdebstrap\n",
  ]);
});
