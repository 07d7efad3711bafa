import { expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { tryCommand, withSystemDirectories } from "./command.ts";

test("the host's own directories come behind those of a PATH, each once, none that means the current one", () => {
  expect(withSystemDirectories("/opt/bin:/usr/bin:/bin")).toBe(
    "/opt/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
  );
  const root = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
  expect(withSystemDirectories(root)).toBe(root);
  for (const none of [undefined, "", ":"]) {
    expect(withSystemDirectories(none)).toBe("/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin");
  }
});

test("a program started with a user's PATH runs what only administrators have in theirs", async () => {
  const empty = mkdtempSync(join(tmpdir(), "aenv-command-"));
  try {
    await expect(tryCommand(["nft", "--version"], { env: { PATH: empty } })).rejects.toMatchObject({
      code: "command_not_found",
    });
    const { exitCode, stdout } = await tryCommand(["nft", "--version"], {
      env: { PATH: withSystemDirectories(empty) },
    });
    expect([exitCode, stdout]).toEqual([0, expect.stringMatching(/^nftables v/)]);
  } finally {
    rmSync(empty, { recursive: true, force: true });
  }
});
