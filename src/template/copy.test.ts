import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { spawn } from "node:child_process";
import {
  existsSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { connect } from "node:net";
import { join } from "node:path";
import { compress, makeTar, type TarInput } from "../../tests/support/oci.ts";
import { AenvError } from "../lib/errors.ts";
import type { AgentClient } from "../sandbox/types.ts";
import { listArchive, selectSource } from "./archive.ts";
import { type CopyRequest, copyIntoGuest } from "./copy.ts";

/* The guest's copy program, run on this machine below a directory, with the host's side of it. */

const ENVD = process.env.AENV_TEST_ENVD ?? join(import.meta.dir, "../../build/envd");
const LIMITS = { maxEntries: 1000, maxContentBytes: 1 << 30 };
const never = new AbortController().signal;
const isRoot = process.getuid?.() === 0;
if (!isRoot) console.warn("skipped: copying with owners needs root");

let base: string;
let count = 0;
beforeAll(() => {
  base = mkdtempSync("/tmp/image6-copy-");
});
afterAll(() => rmSync(base, { recursive: true, force: true }));

/** An agent of which only `run` is used, and that runs the copy program alone. */
function agentAt(root: string): AgentClient {
  const run: AgentClient["run"] = (command) =>
    new Promise((resolve, reject) => {
      expect(command.cmd).toBe("/proc/1/exe");
      const child = spawn(ENVD, [...command.args, "--root", root, "--address", "127.0.0.1"], {
        env: { ...command.env },
        stdio: ["ignore", "pipe", "pipe"],
      });
      let stderr = "";
      child.stdout.on("data", (chunk: Buffer) => command.onStdout?.(chunk));
      child.stderr.on("data", (chunk: Buffer) => {
        stderr += chunk.toString();
      });
      child.on("error", reject);
      child.on("close", (code) => resolve({ exitCode: code ?? -1, stdout: "", stderr }));
    });
  return { run } as AgentClient;
}

const file = (path: string, content = path, more: Partial<TarInput> = {}): TarInput => ({
  path,
  content,
  ...more,
});
const dir = (path: string, more: Partial<TarInput> = {}): TarInput => ({ path, type: "directory", ...more });

interface Case {
  readonly source: string;
  readonly target: string;
  readonly mode?: number;
  readonly owner?: readonly [number, number];
  readonly compression?: Parameters<typeof compress>[1];
}

function newRoot(prepare: (root: string) => void = () => undefined): string {
  const root = join(base, `root-${count++}`);
  mkdirSync(root);
  prepare(root);
  return root;
}

async function copy(root: string, entries: readonly TarInput[], step: Case): Promise<void> {
  const archive = join(base, `archive-${count++}.tar`);
  writeFileSync(archive, compress(makeTar(entries), step.compression ?? "gzip"));
  const { members } = await listArchive(archive, LIMITS, never);
  const [uid, gid] = step.owner ?? [0, 0];
  const request: CopyRequest = {
    archive,
    source: selectSource(members, step.source),
    target: step.target,
    mustBeDirectory: /(^|\/)\.{0,2}$/.test(step.target),
    uid,
    gid,
    ...(step.mode === undefined ? {} : { mode: step.mode }),
  };
  await copyIntoGuest(agentAt(root), "127.0.0.1", request, { timeoutMs: 20_000, signal: never });
}

function tree(root: string, below = ""): string[] {
  return readdirSync(join(root, below), { withFileTypes: true })
    .flatMap((entry) => {
      const name = below === "" ? entry.name : `${below}/${entry.name}`;
      const path = join(root, name);
      if (entry.isSymbolicLink()) return [`${name} -> ${readlinkSync(path)}`];
      if (entry.isDirectory()) return [`${name}/`, ...tree(root, name)];
      return [`${name}=${readFileSync(path, "utf8").slice(0, 40)}`];
    })
    .sort();
}

const refusal = async (work: Promise<unknown>): Promise<string> => {
  const error = await work.then(
    () => undefined,
    (thrown: unknown) => thrown,
  );
  expect(error).toBeInstanceOf(AenvError);
  return (error as AenvError).message;
};

const APP = [dir("app"), file("app/a", "A"), dir("app/sub"), file("app/sub/b", "B")];

describe.skipIf(!isRoot)("COPY as docker does it", () => {
  test.each([
    // source, target, before, after
    ["a file to a new name", [file("f")], "f", "/x/y/name", [], ["x/", "x/y/", "x/y/name=f"]],
    ["a file to a name with a slash", [file("f")], "f", "/x/", [], ["x/", "x/f=f"]],
    ["a file into a directory that is there", [file("p/f", "F")], "p/f", "/x", ["x/"], ["x/", "x/f=F"]],
    ["a file to the current directory", [file("f")], "f", "/w/.", ["w/"], ["w/", "w/f=f"]],
    ["a file over a file", [file("f", "new")], "f", "/x", ["x=old"], ["x=new"]],
    ["a directory's content into a new one", APP, "app", "/x", [], ["x/", "x/a=A", "x/sub/", "x/sub/b=B"]],
    ["the same with slashes", APP, "./app/", "/x/", [], ["x/", "x/a=A", "x/sub/", "x/sub/b=B"]],
    [
      "a directory's content merges into one that is there",
      APP,
      "app",
      "/x",
      ["x/", "x/kept=k", "x/a=old", "x/sub/", "x/sub/kept=k"],
      ["x/", "x/a=A", "x/kept=k", "x/sub/", "x/sub/b=B", "x/sub/kept=k"],
    ],
    [
      "the whole context",
      [dir("./"), ...APP],
      ".",
      "/x",
      [],
      ["x/", "x/app/", "x/app/a=A", "x/app/sub/", "x/app/sub/b=B"],
    ],
    [
      "a pattern with several files",
      [file("d/a"), file("d/b")],
      "d/*",
      "/x",
      [],
      ["x/", "x/a=d/a", "x/b=d/b"],
    ],
    ["a pattern with one file", [file("d/a.conf", "c")], "d/*.conf", "/x/y", [], ["x/", "x/y=c"]],
    [
      "a pattern with one file and a slash",
      [file("d/a.conf", "c")],
      "d/*.conf",
      "/x/",
      [],
      ["x/", "x/a.conf=c"],
    ],
    ["a name that looks like a pattern", [file("a[1].txt", "c")], "a[1].txt", "/x", [], ["x=c"]],
    [
      "names that mean something in image layers",
      [dir("d"), file("d/.wh.f", "w"), file("d/.wh..wh..opq", "o")],
      "d",
      "/x",
      ["x/", "x/f=f"],
      ["x/", "x/.wh..wh..opq=o", "x/.wh.f=w", "x/f=f"],
    ],
    [
      "through a link to a directory",
      [file("f")],
      "f",
      "/link/",
      ["real/", "link -> /real"],
      ["link -> /real", "real/", "real/f=f"],
    ],
    [
      "onto a link to a directory",
      APP,
      "app",
      "/link",
      ["real/", "link -> real"],
      ["link -> real", "real/", "real/a=A", "real/sub/", "real/sub/b=B"],
    ],
    [
      "onto a link to a file: the file is meant",
      [file("f", "new")],
      "f",
      "/link",
      ["real=old", "link -> real"],
      ["link -> real", "real=new"],
    ],
    [
      "onto a link to nowhere",
      [file("f")],
      "f",
      "/link",
      ["link -> /made/there"],
      ["link -> /made/there", "made/", "made/there=f"],
    ],
    [
      "a link that would leave the root stays inside",
      [file("f")],
      "f",
      "/link/",
      ["link -> ../../../up"],
      ["link -> ../../../up", "up/", "up/f=f"],
    ],
    [
      "below the target links are replaced, not followed",
      APP,
      "app",
      "/x",
      ["real=old", "x/", "x/a -> ../real"],
      ["real=old", "x/", "x/a=A", "x/sub/", "x/sub/b=B"],
    ],
    [
      "links are copied as links",
      [dir("d"), { path: "d/l", type: "symlink", link: "/etc/passwd" }],
      "d",
      "/x",
      [],
      ["x/", "x/l -> /etc/passwd"],
    ],
    [
      "hard links",
      [dir("d"), file("d/a", "A"), { path: "d/b", type: "hardLink", link: "d/a" }],
      "d",
      "/x",
      [],
      ["x/", "x/a=A", "x/b=A"],
    ],
  ] as [string, TarInput[], string, string, string[], string[]][])(
    "%s",
    async (_, entries, source, target, before, after) => {
      const root = newRoot((at) => {
        for (const line of before) {
          const [name, content] = line.split("=");
          const [link, goal] = line.split(" -> ");
          if (goal !== undefined) symlinkSync(goal, join(at, link!));
          else if (line.endsWith("/")) mkdirSync(join(at, line));
          else writeFileSync(join(at, name!), content!);
        }
      });
      await copy(root, entries, { source, target });
      expect(tree(root)).toEqual(after.sort());
    },
  );

  test("what does not fit is refused with the path", async () => {
    const over = newRoot((root) => writeFileSync(join(root, "x"), "file"));
    expect(await refusal(copy(over, APP, { source: "app", target: "/x" }))).toBe(
      "cannot copy to non-directory: /x",
    );
    expect(await refusal(copy(over, [file("f")], { source: "f", target: "/x/" }))).toContain(
      "non-directory: /x",
    );
    expect(await refusal(copy(over, [file("f")], { source: "f", target: "/x/y" }))).toContain(
      "non-directory: /x",
    );
    const inner = newRoot((root) => {
      mkdirSync(join(root, "x/a"), { recursive: true });
      mkdirSync(join(root, "real"));
    });
    expect(await refusal(copy(inner, APP, { source: "app", target: "/x" }))).toBe(
      "cannot replace to directory /x/a with file",
    );
    rmSync(join(inner, "x/a"), { recursive: true });
    symlinkSync("../real", join(inner, "x/sub"));
    expect(await refusal(copy(inner, APP, { source: "app", target: "/x" }))).toContain(
      "non-directory: /x/sub",
    );
    expect(readdirSync(join(inner, "real"))).toEqual([]);
    const loop = newRoot((root) => symlinkSync("loop", join(root, "loop")));
    expect(await refusal(copy(loop, [file("f")], { source: "f", target: "/loop/x" }))).toContain("loop/x: ");
    expect(await refusal(copy(loop, [file("f")], { source: "g", target: "/x" }))).toContain(
      "does not hold g",
    );
  });

  test("owners, modes and times", async () => {
    const entries = [
      dir("d", { mode: 0o700, mtime: 1_000_000_000 }),
      file("d/f", "x", { mode: 0o4755, uid: 7, gid: 8, mtime: 1_500_000_000.5 }),
      dir("d/s", { mode: 0o711, mtime: 1_100_000_000 }),
      { path: "d/l", type: "symlink", link: "f" },
    ] as TarInput[];
    const root = newRoot((at) => mkdirSync(join(at, "there"), { mode: 0o751 }));
    await copy(root, entries, { source: "d", target: "/made/deep", owner: [1234, 5678] });
    const at = (path: string) => lstatSync(join(root, path));
    const show = (path: string) => {
      const { mode, uid, gid } = at(path);
      return [(mode & 0o7777).toString(8), uid, gid];
    };
    expect(show("made")).toEqual(["755", 1234, 5678]);
    expect(show("made/deep")).toEqual(["700", 1234, 5678]);
    expect(show("made/deep/f")).toEqual(["4755", 1234, 5678]);
    expect(show("made/deep/s")).toEqual(["711", 1234, 5678]);
    expect(show("made/deep/l").slice(1)).toEqual([1234, 5678]);
    expect(at("made/deep/f").mtimeMs).toBe(1_500_000_000_500);
    expect(at("made/deep/s").mtimeMs).toBe(1_100_000_000_000);
    expect(at("made/deep").mtimeMs).toBe(1_000_000_000_000);
    // A mode for all of it; what was there before keeps its own.
    await copy(root, entries, { source: "d", target: "/there", mode: 0o640, owner: [1, 2] });
    expect(show("there")).toEqual(["751", 0, 0]);
    expect(show("there/f")).toEqual(["640", 1, 2]);
    expect(show("there/s")).toEqual(["640", 1, 2]);
  });

  test("attributes, devices, sparse and large files, odd names, every compression", async () => {
    const odd = Buffer.from([0x6f, 0xff, 0xfe, 0x0a, 0x20]);
    const large = Buffer.alloc(3_000_001, "0123456789abcdef");
    const deep = `${"d/".repeat(30)}${"n".repeat(250)}`;
    for (const compression of ["none", "gzip", "gzip-members", "zstd"] as const) {
      const root = newRoot();
      await copy(
        root,
        [
          dir("c"),
          { path: Buffer.concat([Buffer.from("c/"), odd]), content: "odd" },
          { path: "c/large", content: large, xattrs: { "user.note": "kept" } },
          file(`c/${deep}`, "deep"),
          { path: "c/null", type: "character", major: 1, minor: 3, mode: 0o666 },
          { path: "c/pipe", type: "fifo", mode: 0o600 },
          file("c/empty", ""),
        ],
        { source: "c", target: "/out", compression },
      );
      expect(readFileSync(join(root, "out/large")).equals(large)).toBe(true);
      const oddPath = Buffer.concat([Buffer.from(`${root}/out/`), odd]);
      expect(readFileSync(oddPath, "utf8")).toBe("odd");
      expect(readFileSync(join(root, "out", deep), "utf8")).toBe("deep");
      expect(lstatSync(join(root, "out/null")).rdev).toBe(0x103);
      expect(lstatSync(join(root, "out/pipe")).isFIFO()).toBe(true);
      expect(statSync(join(root, "out/empty")).size).toBe(0);
      const note = Bun.spawnSync(["getfattr", "--only-values", "-n", "user.note", join(root, "out/large")]);
      expect(note.stdout.toString()).toBe("kept");
    }
  });

  test("a full disk ends it with the file that did not fit, also early in a long stream", async () => {
    const root = newRoot();
    const mounted = Bun.spawnSync(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", root]);
    expect(mounted.exitCode).toBe(0);
    try {
      const entries = Array.from({ length: 40 }, (_, i) => file(`d/f${i}`, "x".repeat(500_000)));
      const message = await refusal(copy(root, entries, { source: "d", target: "/", compression: "none" }));
      expect(message).toMatch(/^\/f\d: No space left on device$/);
    } finally {
      Bun.spawnSync(["umount", root]);
    }
  });

  test("a caller without the token changes nothing; an aborted copy ends the program", async () => {
    const root = newRoot();
    const archive = join(base, "abort.tar");
    writeFileSync(archive, makeTar([file("f")]));
    const agent = agentAt(root);
    let intruded: Promise<void> | undefined;
    const spy: AgentClient = {
      ...agent,
      run: (command) =>
        agent.run({
          ...command,
          onStdout(chunk) {
            const port = Number(/port (\d+)/.exec(Buffer.from(chunk).toString())?.[1]);
            // First in line, and with the wrong token.
            const socket = connect(port, "127.0.0.1", () => socket.write(`${"0".repeat(48)}\n`));
            intruded = new Promise((resolve) =>
              socket.on("close", () => resolve()).on("error", () => resolve()),
            );
            setTimeout(() => command.onStdout?.(chunk), 30);
          },
        }),
    };
    const request = {
      archive,
      source: { kind: "file", path: "f" } as const,
      target: "/x",
      mustBeDirectory: false,
      uid: 0,
      gid: 0,
    };
    await copyIntoGuest(spy, "127.0.0.1", request, { timeoutMs: 20_000, signal: never });
    await intruded;
    expect(tree(root)).toEqual(["x=f"]);
    const cut = AbortSignal.abort(new Error("stop"));
    await expect(
      copyIntoGuest(agent, "127.0.0.1", { ...request, target: "/y" }, { timeoutMs: 20_000, signal: cut }),
    ).rejects.toThrow("stop");
    expect(existsSync(join(root, "y"))).toBe(false);
  });
});

describe("archives", () => {
  const list = async (bytes: Uint8Array, limits = LIMITS) => {
    const path = join(base, `list-${count++}`);
    writeFileSync(path, bytes);
    return listArchive(path, limits, never);
  };

  test("members that are absolute or leave the context are refused, as are broken archives", async () => {
    for (const path of ["/etc/passwd", "../up", "a/../../b", "a/.."])
      expect(await refusal(list(makeTar([file(path)])))).toMatch(/absolute path|leaves the build context/);
    const link: TarInput = { path: "l", type: "hardLink", link: "../x" };
    expect(await refusal(list(makeTar([link])))).toContain("leaves the build context");
    const tar = makeTar([file("a", "x".repeat(5000)), file("b", "y".repeat(5000))]);
    const zipped = compress(tar, "gzip");
    for (const cut of [0, 1, 600, 6144, tar.length - 1024])
      expect(await refusal(list(tar.subarray(0, cut)))).toMatch(/cut off|ends within|truncated/);
    for (const cut of [5, 30, zipped.length - 9])
      expect(await refusal(list(zipped.subarray(0, cut)))).toContain("not usable");
    const flipped = Buffer.from(tar);
    flipped[3] = 0x58;
    expect(await refusal(list(flipped))).toContain("not a valid tar");
    expect(await refusal(list(Buffer.from("<html>not a tar</html>")))).toContain("not usable");
  });

  test("limits on members and content", async () => {
    const tar = makeTar([file("a", "xx"), file("b", "yy")]);
    expect(await refusal(list(tar, { maxEntries: 1, maxContentBytes: 100 }))).toContain(
      "more than 1 members",
    );
    expect(await refusal(list(tar, { maxEntries: 9, maxContentBytes: 3 }))).toContain("larger than 3 bytes");
    expect((await list(tar)).contentBytes).toBe(4);
  });
});
