import { expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readdirSync, rmSync, symlinkSync, utimesSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { sweepProbes } from "./qemu/probe.ts";

test("what killed probes left is removed once no probe can be in it; nothing else is", () => {
  const dir = mkdtempSync(join(tmpdir(), "probe-sweep-"));
  try {
    for (const name of ["aenv-probe-old", "aenv-probe-new", "other-old"]) mkdirSync(join(dir, name));
    symlinkSync("/nowhere", join(dir, "aenv-probe-link"));
    const hourAgo = Date.now() / 1000 - 3600;
    for (const name of ["aenv-probe-old", "other-old"]) utimesSync(join(dir, name), hourAgo, hourAgo);
    sweepProbes(dir);
    expect(readdirSync(dir).sort()).toEqual(["aenv-probe-link", "aenv-probe-new", "other-old"]);
  } finally {
    rmSync(dir, { recursive: true, force: true });
  }
});
