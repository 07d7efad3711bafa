import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { readTrace, straceArguments } from "../support/sync-trace.ts";

/* What a caller was told is done is on stable storage at the moment it is told: power may go right then. */

let dir: string;
beforeAll(() => {
  dir = mkdtempSync("/tmp/life-power-");
});
afterAll(() => rmSync(dir, { recursive: true, force: true }));

/** Marks of locks and of files on their way need not outlive anything, nor does what SQLite rebuilds. */
const passing = /\.tmp$|\.db-shm$|\/locks(\/|$)/;

describe("power loss", () => {
  test("the model: bytes, names, renames, links and removals count until they are synced", () => {
    const trace = [
      '7 mkdir("/h/d", 0700) = 0',
      '7 openat(AT_FDCWD</h>, "/h/d/f.tmp", O_WRONLY|O_CREAT|O_EXCL, 0600) = 3</h/d/f.tmp>',
      '7 write(3</h/d/f.tmp>, "x", 1 <unfinished ...>',
      "8 fsync(4</h/other>) = 0",
      "7 <... write resumed>) = 1",
      '7 write(1</dev/null>, "MARK one\\n", 9) = 9',
      "7 fdatasync(3</h/d/f.tmp>) = 0",
      '7 rename("/h/d/f.tmp", "/h/d/f") = 0',
      '7 write(1</dev/null>, "MARK two\\n", 9) = 9',
      "7 fsync(5</h/d>) = 0",
      "7 fsync(6</h>) = 0",
      '7 unlink("/h/d/gone") = -1 ENOENT (No such file or directory)',
      '7 write(1</dev/null>, "MARK three\\n", 11) = 11',
      '7 unlink("/h/d/f") = 0',
      '7 write(1</dev/null>, "MARK four\\n", 10) = 10',
    ].join("\n");
    const { moments } = readTrace(trace, (path) => path.startsWith("/h"));
    expect(moments).toEqual([
      { mark: "one", unsafe: ["bytes of /h/d/f.tmp", "name /h/d (made)", "name /h/d/f.tmp (made)"] },
      { mark: "two", unsafe: ["name /h/d (made)", "name /h/d/f (made)", "name /h/d/f.tmp (removed)"] },
      { mark: "three", unsafe: [] },
      { mark: "four", unsafe: ["name /h/d/f (removed)"] },
    ]);
  });

  const noTrace = Bun.which("strace") === null;
  if (noTrace) console.warn("skipped, no strace: what is on stable storage when it is told");
  test.skipIf(noTrace)(
    "templates, names, snapshots, pauses and deletions are on stable storage when they are told",
    async () => {
      const home = join(dir, "home");
      const output = join(dir, "trace");
      const child = Bun.spawn(
        [...straceArguments(output), process.execPath, join(import.meta.dir, "lifecycle-power.ts"), home],
        { stdout: "pipe", stderr: "pipe", env: { ...process.env, AENV_LOG_LEVEL: "silent" } },
      );
      const [out, err, code] = await Promise.all([
        new Response(child.stdout).text(),
        new Response(child.stderr).text(),
        child.exited,
      ]);
      expect([code, err]).toEqual([0, ""]);
      const counts = (path: string, what: "bytes" | "made" | "removed"): boolean => {
        if (!path.startsWith(`${home}/`) || passing.test(path)) return false;
        const inside = path.slice(home.length);
        // Files that no record names are swept at the next start.
        if (what === "removed") return /\/catalog\/(records|aliases)\//.test(inside);
        // Made by the stand-in for real sandboxes: their captures are synced by who makes them.
        const fake = /^\/(made|persisted\/artifacts\/.)|\/managed-layers\/.|\/vm_state\.bin$/;
        return !(what === "bytes" ? fake : /^\/(made|persisted\/artifacts\/.)/).test(inside);
      };
      const model = readTrace(readFileSync(output, "utf8"), counts);
      expect(model.moments.map(({ mark }) => mark)).toEqual(
        [...out.matchAll(/^MARK (.*)$/gm)].map((match) => match[1]!),
      );
      expect(model.moments).toHaveLength(7);
      expect(model.seen).toBeGreaterThan(100);
      expect(model.moments.filter(({ unsafe }) => unsafe.length > 0)).toEqual([]);
    },
    120_000,
  );
});
if (Bun.which("strace") === null) console.log("skipped: strace is not installed, so no trace could be taken");
