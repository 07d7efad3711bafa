import { expect, test } from "bun:test";
import { linkSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { tryCommand } from "../lib/command.ts";

const SHIELD = resolve(import.meta.dir, "../../build/memshield.so");

test("under the shield the memory file alone keeps its bytes, whatever name it is opened by", async () => {
  const dir = mkdtempSync(join(tmpdir(), "memshield-"));
  using _dir = { [Symbol.dispose]: () => rmSync(dir, { recursive: true, force: true }) };
  const [memory, alias, other] = ["memory", "alias", "other"].map((name) => join(dir, name)) as [
    string,
    string,
    string,
  ];
  const full = Buffer.alloc(65_536, 7);
  writeFileSync(memory, full);
  linkSync(memory, alias);
  writeFileSync(other, full);
  const env = { PATH: process.env.PATH ?? "", LD_PRELOAD: SHIELD, AENV_MEMORY_FILE: memory };
  const under = (...argv: string[]) => tryCommand(argv, { env });

  for (const file of [memory, alias, other])
    expect(
      (await under("fallocate", "--punch-hole", "--offset", "4096", "--length", "8192", file)).exitCode,
    ).toBe(0);
  for (const file of [memory, alias, other]) {
    const { exitCode } = await under(
      "dd",
      "if=/dev/zero",
      `of=${file}`,
      "bs=4096",
      "count=1",
      "conv=notrunc",
    );
    expect(exitCode === 0).toBe(file === other);
  }
  expect(readFileSync(memory).equals(full)).toBe(true);
  const torn = Buffer.concat([Buffer.alloc(12_288), full.subarray(12_288)]);
  expect(readFileSync(other).equals(torn)).toBe(true);

  // Programs on the way to QEMU say nothing; asked, it answers.
  expect((await under("true")).stdout).toBe("");
  const probed = await tryCommand(["true"], { env: { ...env, AENV_MEMSHIELD_PROBE: "1" } });
  expect(probed.stdout).toBe("aenv-memshield\n");
});
