import { afterAll, beforeAll, beforeEach, describe, expect, setDefaultTimeout, test } from "bun:test";
import {
  chmodSync,
  existsSync,
  linkSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  statSync,
  symlinkSync,
  utimesSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { CliRig, noGuest } from "../../tests/support/cli-rig.ts";
import { eventually } from "../../tests/support/eventually.ts";
import { fit, formatBytes, formatDuration, progressLine } from "./progress.ts";

// Processes and terminals: a busy machine takes its time.
setDefaultTimeout(60_000);

if (noGuest !== undefined) console.warn(`skipped: aenv upload and download: ${noGuest}`);

/** Names that something on the way could take for something else. */
const NAMES = [
  "plain",
  ".hidden",
  "with space",
  "日本語",
  "a&b=c#d%20e+f",
  "q\"uo'te",
  "new\nline",
  "-dash",
  "ü",
];

describe.skipIf(noGuest !== undefined)("aenv upload and download", () => {
  let rig: CliRig;
  let id: string;
  /** The guest's side; the agent runs on this machine. */
  let far: string;
  let near: string;

  beforeAll(async () => {
    rig = await CliRig.start();
    await rig.guest();
    id = rig.sandbox();
  });
  beforeEach(() => {
    far = join(rig.dir, "far");
    near = join(rig.dir, "near");
    for (const dir of [far, near]) {
      rmSync(dir, { recursive: true, force: true });
      mkdirSync(dir);
    }
  });
  afterAll(() => rig[Symbol.asyncDispose]());

  const bytes = Buffer.from(Array.from({ length: 1_500_000 }, (_, i) => (i * 7 + (i >> 9)) & 255));

  /** Relative paths of all that is below, directories with a slash. */
  const tree = (dir: string): string[] =>
    readdirSync(dir, { withFileTypes: true })
      .flatMap((entry) =>
        entry.isDirectory()
          ? [`${entry.name}/`, ...tree(join(dir, entry.name)).map((below) => `${entry.name}/${below}`)]
          : [entry.name],
      )
      .sort();

  const makeTree = (dir: string) => {
    mkdirSync(join(dir, "empty/inner"), { recursive: true });
    mkdirSync(join(dir, "sub dir"));
    for (const name of NAMES) writeFileSync(join(dir, name), `content of ${name}`);
    writeFileSync(join(dir, "sub dir/big"), bytes);
    writeFileSync(join(dir, "sub dir/nothing"), "");
  };

  test("- is standard output and standard input", async () => {
    writeFileSync(join(far, "data.bin"), bytes);
    const child = rig.spawn(["download", id, `${far}/data.bin`, "-"]);
    expect(Buffer.from(await new Response(child.stdout).arrayBuffer()).equals(bytes)).toBe(true);
    expect([await new Response(child.stderr).text(), await child.exited]).toEqual(["", 0]);
    for (const args of [
      [far, "-"],
      [`${far}/data.bin`, "-", "--preserve"],
    ]) {
      const run = await rig.aenv(["download", id, ...args]);
      expect([run.code, run.out]).toEqual([2, ""]);
      expect(run.err).toContain("- is for the bytes of a single one");
    }
    expect(existsSync(join(rig.dir, "-"))).toBe(false);

    const text = "über\n".repeat(100_000);
    for (const [name, stdin] of [
      ["text", text],
      ["empty", ""],
    ] as const) {
      expect(await rig.aenv(["upload", id, "-", `${far}/made/${name}`], { stdin })).toEqual({
        code: 0,
        out: `Uploaded standard input to ${id}:${far}/made/${name}\n`,
        err: "",
      });
      expect(readFileSync(join(far, "made", name), "utf8")).toBe(stdin);
    }
    for (const args of [[`${far}/`], [`${far}/x`, "--preserve"]]) {
      const run = await rig.aenv(["upload", id, "-", ...args], { stdin: "a" });
      expect([run.code, run.out]).toEqual([2, ""]);
    }
    // A file of that name is named with its directory.
    expect((await rig.aenv(["download", id, `${far}/made/text`, "./-"])).code).toBe(0);
    expect((await rig.aenv(["upload", id, "./-", `${far}/back`])).code).toBe(0);
    expect(readFileSync(join(far, "back"), "utf8")).toBe(text);
    rmSync(join(rig.dir, "-"));
  });

  test("a file: bytes, names, where it goes", async () => {
    writeFileSync(join(near, "data.bin"), bytes);
    expect(await rig.aenv(["upload", id, "near/data.bin", `${far}/`])).toEqual({
      code: 0,
      out: `Uploaded near/data.bin to ${id}:${far}/data.bin\n`,
      err: "",
    });
    expect(readFileSync(join(far, "data.bin")).equals(bytes)).toBe(true);
    expect((await rig.aenv(["upload", id, "near/data.bin", `${far}/new/dirs/other`])).code).toBe(0);
    expect(readFileSync(join(far, "new/dirs/other")).equals(bytes)).toBe(true);
    const odd = NAMES.filter((name) => /[&"\n]/.test(name));
    for (const name of odd) {
      writeFileSync(join(near, name), name);
      expect((await rig.aenv(["upload", id, join(near, name), `${far}/names/`])).code).toBe(0);
      const back = await rig.aenv(["download", id, `${far}/names/${name}`, `back-${NAMES.indexOf(name)}`]);
      expect(back.code).toBe(0);
      expect(readFileSync(join(rig.dir, `back-${NAMES.indexOf(name)}`), "utf8")).toBe(name);
    }
    expect(readdirSync(join(far, "names")).sort()).toEqual(odd.sort());
    writeFileSync(join(near, "plain"), "plain");
    // One directory that is named as one is made, for a file and for a tree.
    expect((await rig.aenv(["download", id, `${far}/names/${odd[0]}`, "made/"])).code).toBe(0);
    expect(readdirSync(join(rig.dir, "made"))).toEqual([odd[0]!]);
    expect((await rig.aenv(["download", id, `${far}/names`, "made-too/"])).code).toBe(0);
    expect(readdirSync(join(rig.dir, "made-too", "names")).sort()).toEqual(odd.sort());
    // The kernel's own files have no size before they are read.
    expect((await rig.aenv(["upload", id, "/proc/version", `${far}/`])).code).toBe(0);
    expect(readFileSync(join(far, "version"), "utf8")).toBe(readFileSync("/proc/version", "utf8"));
    // Relative paths start from the home of whoever is asked for.
    expect((await rig.aenv(["upload", "-u", "root", id, "near/plain", "in-home"])).code).toBe(0);
    expect(readFileSync(join(rig.dir, "home/in-home"), "utf8")).toBe("plain");
    expect((await rig.aenv(["download", "-u", "root", id, "in-home", "near/x"])).code).toBe(0);
    expect((await rig.aenv(["upload", "-u", "nobody-such", id, "near/plain", "y"])).err).toContain(
      "nobody-such",
    );
  });

  test("a directory: all of it, into one that is there or as a new one", async () => {
    makeTree(near);
    const all = tree(near);
    expect((await rig.aenv(["upload", id, "near", `${far}/copy`])).out).toBe(
      `Uploaded directory near to ${id}:${far}/copy\n`,
    );
    expect(tree(join(far, "copy"))).toEqual(all);
    expect(readFileSync(join(far, "copy/sub dir/big")).equals(bytes)).toBe(true);
    expect((await rig.aenv(["upload", "-j", "1", id, near, far])).out).toContain(`:${far}/near\n`);
    expect(tree(join(far, "near"))).toEqual(all);
    // From inside it, the directory has a name all the same.
    const inside = Bun.spawn(rig.command(["upload", id, ".", `${far}/dot/`]), {
      env: rig.env(),
      cwd: near,
      stdout: "ignore",
    });
    expect(await inside.exited).toBe(0);
    expect(tree(join(far, "dot/near"))).toEqual(all);

    const down = await rig.aenv(["download", id, `${far}/copy`]);
    expect(down).toEqual({ code: 0, out: `Downloaded directory ${id}:${far}/copy to copy\n`, err: "" });
    expect(tree(join(rig.dir, "copy"))).toEqual(all);
    expect(readFileSync(join(rig.dir, "copy/sub dir/big")).equals(bytes)).toBe(true);
    // Merging asks for leave first, about every file, and leaves the rest alone.
    writeFileSync(join(rig.dir, "copy/own"), "mine");
    writeFileSync(join(rig.dir, "copy/plain"), "old");
    const twice = await rig.aenv(["download", id, `${far}/copy`]);
    expect(twice.code).toBe(1);
    expect(twice.err).toContain("is there already\n  replace it with --force");
    expect(readFileSync(join(rig.dir, "copy/plain"), "utf8")).toBe("old");
    expect((await rig.aenv(["download", "--force", id, `${far}/copy`])).code).toBe(0);
    expect(readFileSync(join(rig.dir, "copy/plain"), "utf8")).toBe("content of plain");
    expect(tree(join(rig.dir, "copy"))).toEqual([...all, "own"].sort());
    rmSync(join(rig.dir, "copy"), { recursive: true });
  });

  test("what is refused, before anything is sent or written", async () => {
    makeTree(near);
    writeFileSync(join(far, "file"), "kept");
    symlinkSync("plain", join(near, "link"));
    Bun.spawnSync(["mkfifo", join(far, "pipe")]);
    mkdirSync(join(far, "dir"));
    for (const [args, said, code] of [
      [["upload", id, "near/nothing-there", far], "there is no near/nothing-there", 1],
      [["upload", id, "near/link", `${far}/`], "is a symbolic link", 1],
      [["upload", id, "near", `${far}/x`], "near/link is a symbolic link", 1],
      [["upload", id, "/dev/null", `${far}/`], "neither a file nor a directory", 1],
      [["upload", id, "near/sub dir", `${far}/file`], "is in the sandbox and not a directory", 1],
      [["upload", id, "near/sub dir", "relative"], "must be absolute", 2],
      [["upload", id, "near/sub dir", `${far}/../y`], "must not have ..", 2],
      [["upload", "-u", "root", id, "near/sub dir", far], "--user is for a single file", 2],
      [["upload", "-j", "0", id, "near/plain", far], "--jobs must be", 2],
      [["upload", id, "near/plain", ""], "must not be empty", 2],
      [["upload", id, "near/plain", far], "", 1],
      [["download", id, `${far}/none`], "is not in sandbox", 1],
      [["download", id, `${far}/pipe`], "neither a file nor a directory", 1],
      [["download", id, far, "near/link"], "near/link is there and not a directory", 1],
      [["download", id, `${far}/file`, "near/link"], "is a symbolic link, which is not replaced", 1],
      [["download", id, `${far}/file`, "near/plain"], "is there already", 1],
      [["download", "--force", id, `${far}/dir`, "near/plain"], "is there and not a directory", 1],
      [["download", id, `${far}/file`, "near/no/such"], "there is no directory near/no", 1],
      [["download", id, `${far}/file`, "near/no/such/"], "there is no directory near/no", 1],
      [["download", id, `${far}/file`, "near/plain/x"], "near/plain is not a directory", 1],
      [["download", id, "relative-dir"], "is not in sandbox", 1],
    ] as const) {
      const run = await rig.aenv(args);
      expect([args.slice(1), run.code]).toEqual([args.slice(1), code]);
      expect(run.err).toContain(said);
      expect(run.out).toBe("");
    }
    expect(tree(far)).toEqual(["dir/", "file", "pipe"]);
    expect(readFileSync(join(near, "plain"), "utf8")).toBe("content of plain");
    expect(readFileSync(join(far, "file"), "utf8")).toBe("kept");
    symlinkSync(near, join(rig.dir, "way"));
    const through = await rig.aenv(["download", id, `${far}/file`, "way/file"]);
    expect(through.err).toContain("way is a symbolic link");
    rmSync(join(rig.dir, "way"));
    writeFileSync(Buffer.from(`${near}/sub dir/bad\xff`, "latin1"), "x");
    const name = await rig.aenv(["upload", id, "near/sub dir", `${far}/z`]);
    expect(name.err).toContain("not UTF-8");
    expect(existsSync(join(far, "z"))).toBe(false);
    // A link in a sandbox's directory could lead anywhere.
    symlinkSync("/etc/passwd", join(far, "dir/evil"));
    const evil = await rig.aenv(["download", id, `${far}/dir`, "got"]);
    expect(evil.err).toContain("is a symbolic link\n  nothing was downloaded; --preserve keeps links");
    expect(existsSync(join(rig.dir, "got"))).toBe(false);
  });

  test("--preserve keeps modes, times, symbolic and hard links, both ways", async () => {
    makeTree(near);
    chmodSync(join(near, "plain"), 0o750);
    chmodSync(join(near, "empty"), 0o700);
    utimesSync(join(near, "ü"), 1_000_000_000, 1_000_000_000);
    symlinkSync("../elsewhere/日本", join(near, "link"));
    linkSync(join(near, "plain"), join(near, "hard"));
    writeFileSync(Buffer.from(`${near}/sub dir/bad\xff`, "latin1"), "x");
    utimesSync(join(near, "sub dir"), 1_100_000_000, 1_100_000_000);
    const check = (dir: string) => {
      expect(statSync(join(dir, "plain")).mode & 0o7777).toBe(0o750);
      expect(statSync(join(dir, "empty")).mode & 0o7777).toBe(0o700);
      expect(statSync(join(dir, "ü")).mtimeMs).toBe(1_000_000_000_000);
      expect(statSync(join(dir, "sub dir")).mtimeMs).toBe(1_100_000_000_000);
      expect(readlinkSync(join(dir, "link"))).toBe("../elsewhere/日本");
      expect(statSync(join(dir, "hard")).ino).toBe(statSync(join(dir, "plain")).ino);
      expect(readFileSync(join(dir, "sub dir/big")).equals(bytes)).toBe(true);
      expect(readdirSync(join(dir, "sub dir"), { encoding: "buffer" }).length).toBe(3);
    };
    const up = await rig.aenv(["upload", "-p", id, "near", `${far}/kept`]);
    expect(up).toEqual({ code: 0, out: `Uploaded directory near to ${id}:${far}/kept\n`, err: "" });
    check(join(far, "kept"));
    const silent = { code: 0, err: "" };
    const down = await rig.aenv(["download", "-p", id, `${far}/kept`, "near/back"]);
    expect(down).toMatchObject(silent);
    check(join(near, "back"));
    // Into what is there only when asked; a link itself can be sent.
    const twice = await rig.aenv(["download", "-p", id, `${far}/kept`, "near/"]);
    expect(twice).toMatchObject(silent);
    const merged = await rig.aenv(["download", "-p", id, `${far}/kept`, "near"]);
    expect(merged.err).toContain("merge into it with --force");
    rmSync(join(near, "kept/plain"));
    expect(await rig.aenv(["download", "-p", "--force", id, `${far}/kept`, "near"])).toMatchObject(silent);
    check(join(near, "kept"));
    expect(await rig.aenv(["upload", "-p", id, "near/link", `${far}/`])).toMatchObject(silent);
    expect(readlinkSync(join(far, "link"))).toBe("../elsewhere/日本");
    // Into a directory that is there: merged.
    writeFileSync(join(far, "kept/own"), "own");
    expect(await rig.aenv(["upload", "-p", id, "near/sub dir", `${far}/kept/`])).toMatchObject(silent);
    expect(readFileSync(join(far, "kept/own"), "utf8")).toBe("own");
    expect(lstatSync(join(far, "kept/sub dir")).isDirectory()).toBe(true);
    for (const dir of [far, near]) {
      expect(readdirSync(dir).filter((name) => name.startsWith(".aenv"))).toEqual([]);
    }
    const missing = await rig.aenv(["upload", "-p", id, "near/none", far]);
    expect(missing.err).toContain("there is no near/none");
  });

  /** A big file, sparse on disk, whose transfer takes a while. */
  const big = (path: string, size = 3_000_000_000) => Bun.spawnSync(["truncate", "-s", String(size), path]);

  test("interrupted, an upload leaves nothing under its name and ends with 130", async () => {
    big(join(near, "big"));
    writeFileSync(join(far, "there"), "old content");
    for (const to of ["new", "there"]) {
      const terminal = rig.terminal(`aenv upload ${id} near/big ${far}/${to}; echo "[rc $?]"`);
      await terminal.shows(/Uploading {2}\[#*-+\] {2}[\d.]+ .iB\/2\.8 GiB {2}.*ETA/);
      terminal.type("\x03");
      await terminal.shows("[rc 130]");
      expect(terminal.screen()).toContain("Error: transfer cancelled");
      await terminal.exited;
    }
    await eventually("the agent lets go of what was cancelled", () => rig.unnamedFiles() === 0);
    const child = rig.spawn(["upload", "-p", id, "near/big", `${far}/archived`]);
    await eventually("the archive is on its way", () => rig.unnamedFiles() > 0);
    child.kill("SIGTERM");
    expect(await child.exited).toBe(143);
    await eventually("nothing of it is left", () => readdirSync(far).length === 1);
    expect(readdirSync(far)).toEqual(["there"]);
    expect(readFileSync(join(far, "there"), "utf8")).toBe("old content");
  });

  test("interrupted, a download leaves nothing behind", async () => {
    big(join(far, "big"));
    for (const option of ["", "-p"]) {
      const terminal = rig.terminal(`aenv download ${option} ${id} ${far}/big near/got; echo "[rc $?]"`);
      await terminal.shows(/Downloading {2}\[/);
      terminal.type("\x03");
      await terminal.shows("[rc 130]");
      await terminal.exited;
      expect(readdirSync(near)).toEqual([]);
    }
  });

  test("the sandbox or the server goes away in the middle", async () => {
    big(join(near, "big"));
    big(join(far, "source"));
    const other = rig.sandbox();
    const up = rig.spawn(["upload", other, "near/big", `${far}/gone`]);
    const down = rig.spawn(["download", other, `${far}/source`, "near/got"]);
    await eventually(
      "both are under way",
      () => rig.unnamedFiles() > 0 && readdirSync(near).some((name) => name.startsWith(".aenv-")),
    );
    rig.records.delete(other);
    rig.cut(other);
    for (const child of [up, down]) {
      expect(await child.exited).toBe(1);
      expect(await new Response(child.stderr).text()).toMatch(/^Error: .*\n/);
    }
    expect(readdirSync(near)).toEqual(["big"]);
    await eventually("nothing of it is left", () => readdirSync(far).length === 1);
    expect(readdirSync(far)).toEqual(["source"]);
  });

  test("a bar on a terminal, cleared at the end; none elsewhere or when not wanted", async () => {
    big(join(near, "some"), 150_000_000);
    const terminal = rig.terminal(
      `stty cols 40; aenv upload ${id} near/some ${far}/a; aenv upload --no-progress ${id} near/some ${far}/b; echo "[rc $?]"`,
    );
    await terminal.shows("[rc 0]");
    const lines = terminal
      .screen()
      .split(/[\r\n]+/)
      .map((line) => Bun.stripANSI(line));
    const bars = lines.filter((line) => line.startsWith("Uploading  "));
    expect(bars.length).toBeGreaterThan(0);
    for (const line of bars) expect(Bun.stringWidth(line)).toBeLessThan(40);
    expect(terminal.screen()).toContain(`\x1b[2KUploaded near/some to`);
    expect(terminal.screen().split("Uploaded near/some to").length).toBe(3);
  });
});

describe("progress", () => {
  test("sizes, times, lines that fit", () => {
    expect([0, 1023, 1024, 1_048_575, 1_048_576, 5_368_709_120].map(formatBytes)).toEqual([
      "0 B",
      "1023 B",
      "1.0 KiB",
      "1.0 MiB",
      "1.0 MiB",
      "5.0 GiB",
    ]);
    expect([0, 1.2, 61, 3_723, Number.NaN, Number.POSITIVE_INFINITY].map(formatDuration)).toEqual([
      "0:00",
      "0:02",
      "1:01",
      "1:02:03",
      "-:--",
      "-:--",
    ]);
    expect(fit("日本語", 5)).toBe("日本…");
    expect(fit("日本語", 6)).toBe("日本語");
    expect(fit("abc", 0)).toBe("");
    const state = { prefix: "Uploading", done: 512, total: 1024, rate: 256, name: "日本\x1b[2Jname.bin" };
    expect(progressLine(state, 100)).toBe(
      "Uploading  [##########----------]  512 B/1.0 KiB  256 B/s  ETA 0:02  日本name.bin",
    );
    for (let columns = 0; columns < 120; columns++) {
      expect(Bun.stringWidth(progressLine(state, columns))).toBeLessThanOrEqual(columns);
    }
  });
});
