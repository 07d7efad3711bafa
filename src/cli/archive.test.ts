import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import {
  chmodSync,
  existsSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { Writable } from "node:stream";
import { Writer } from "protobufjs/minimal.js";
import { downloadArchive, treeBytes } from "./archive.ts";
import { writeAll } from "./output.ts";
import { Transfer } from "./progress.ts";
import type { RemoteEntry } from "./protocol.ts";
import { badName } from "./transfers.ts";

let dir: string;
beforeEach(() => {
  dir = mkdtempSync("/tmp/cli-archive-");
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

interface Member {
  readonly name: string;
  readonly type: "file" | "hardlink" | "symlink" | "directory";
  readonly link?: string;
  readonly content?: string;
}

const TYPE_FLAGS = { file: "0", hardlink: "1", symlink: "2", directory: "5" } as const;

/** An archive as no tar would write it. */
function archive(members: readonly Member[]): Buffer {
  const parts = members.flatMap(({ name, type, link = "", content = "" }) => {
    const header = Buffer.alloc(512);
    header.write(name, 0);
    header.write(type === "directory" ? "0000755" : "0000644", 100);
    header.write("0000000", 108);
    header.write("0000000", 116);
    header.write(content.length.toString(8).padStart(11, "0"), 124);
    header.write("00000000000", 136);
    header.write("        ", 148);
    header.write(TYPE_FLAGS[type], 156);
    header.write(link, 157);
    header.write("ustar\x0000", 257);
    const sum = header.reduce((total, byte) => total + byte, 0);
    header.write(`${sum.toString(8).padStart(6, "0")}\0 `, 148);
    return [header, Buffer.from(content), Buffer.alloc((512 - (content.length % 512)) % 512)];
  });
  return Buffer.concat([...parts, Buffer.alloc(1024)]);
}

/** The agent of a sandbox that sends what it likes, whatever it is asked to run; `files` answers uploads. */
function hostile(stdout: Buffer, files: (body: Buffer) => Response = () => new Response()) {
  const frame = (payload: Uint8Array, flags = 0) => {
    const head = Buffer.alloc(5);
    head[0] = flags;
    head.writeUInt32BE(payload.length, 1);
    return Buffer.concat([head, payload]);
  };
  const event = (field: number, write: (writer: Writer) => void) => {
    const writer = Writer.create();
    writer.uint32(10).fork();
    writer.uint32((field << 3) | 2).fork();
    write(writer);
    return frame(writer.ldelim().ldelim().finish());
  };
  const chunks: Buffer[] = [event(1, (start) => start.uint32(8).uint32(7))];
  for (let at = 0; at < stdout.length; at += 65_536) {
    chunks.push(event(2, (data) => data.uint32(10).bytes(stdout.subarray(at, at + 65_536))));
  }
  chunks.push(
    event(3, (end) => end.uint32(8).sint32(0).uint32(16).bool(true)),
    frame(Buffer.from("{}"), 2),
  );
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    fetch: async (request) => {
      const { pathname } = new URL(request.url);
      if (pathname === "/held") await Bun.sleep(300);
      if (pathname === "/files") return files(Buffer.from(await request.arrayBuffer()));
      return new Response(Buffer.concat(chunks), {
        headers: { "content-type": "application/connect+proto" },
      });
    },
  });
  return {
    target: { url: `http://127.0.0.1:${server.port}`, sandboxId: "x" },
    [Symbol.asyncDispose]: () => server.stop(true),
  };
}

const directory: RemoteEntry = {
  name: "d",
  type: "directory",
  path: "/data/d",
  size: 0,
  symlinkTarget: undefined,
};

async function download(
  stdout: Buffer,
  options: { entry?: RemoteEntry; local?: string; force?: boolean } = {},
) {
  await using agent = hostile(stdout);
  using transfer = new Transfer("Downloading", { bar: false });
  const { entry = directory, local = "near/got", force = false } = options;
  const plan = { target: agent.target, remote: entry.path, local: join(dir, local), force };
  return await transfer
    .run((running) => downloadArchive(plan, entry, running))
    .catch((error: Error) => error);
}

/** What an error says, its causes included. */
function words(error: unknown): string {
  return error instanceof Error ? `${error.message}\n${words(error.cause)}` : "";
}

describe("aenv download --preserve from a hostile sandbox", () => {
  beforeEach(() => {
    mkdirSync(join(dir, "near"));
    mkdirSync(join(dir, "victim"));
    writeFileSync(join(dir, "victim/file"), "mine");
  });

  test("a name that leads elsewhere moves nothing", async () => {
    for (const name of ["../victim", "..", ".", "", "a/b", "/etc"]) {
      expect(badName(name)).toBe(true);
      const error = await download(archive([{ name: "./d/", type: "directory" }]), {
        entry: { ...directory, name },
      });
      expect(words(error)).toContain("which is no file's name");
    }
    expect(readdirSync(dir).sort()).toEqual(["near", "victim"]);
    expect(readdirSync(join(dir, "near"))).toEqual([]);
    expect(readFileSync(join(dir, "victim/file"), "utf8")).toBe("mine");
  });

  test("an archive with absolute names, with .., with ways through links writes nothing outside", async () => {
    const victim = join(dir, "victim");
    const start = { name: "./d/", type: "directory" } as const;
    const streams: Member[][] = [
      [start, { name: `${victim}/file`, type: "file", content: "theirs" }],
      [start, { name: "d/../../../victim/file", type: "file", content: "theirs" }],
      [start, { name: "../../victim/new", type: "file", content: "theirs" }],
      [
        start,
        { name: "d/way", type: "symlink", link: victim },
        { name: "d/way/new", type: "file", content: "theirs" },
      ],
      [
        start,
        { name: "d/way", type: "symlink", link: "../../../victim" },
        { name: "d/way/file", type: "file", content: "theirs" },
      ],
      [
        start,
        { name: "d/way", type: "symlink", link: `${victim}/file` },
        { name: "d/way", type: "file", content: "theirs" },
      ],
      [
        start,
        { name: "d/hard", type: "hardlink", link: `${victim}/file` },
        { name: "d/hard", type: "file", content: "theirs" },
      ],
      [
        start,
        { name: "d/way", type: "symlink", link: victim },
        { name: "d/hard", type: "hardlink", link: "d/way/file" },
        { name: "d/hard", type: "file", content: "theirs" },
      ],
    ];
    for (const members of streams) {
      await download(archive(members));
      expect(readdirSync(victim)).toEqual(["file"]);
      expect(readFileSync(join(victim, "file"), "utf8")).toBe("mine");
      expect(lstatSync(join(victim, "file")).nlink).toBe(1);
      expect(readdirSync(dir).sort()).toEqual(["near", "victim"]);
      expect(readdirSync(join(dir, "near")).filter((name) => name !== "got")).toEqual([]);
      rmSync(join(dir, "near/got"), { recursive: true, force: true });
    }
  });

  test("something else than what it told of is not put in place", async () => {
    const link = archive([{ name: "./d", type: "symlink", link: "../victim" }]);
    mkdirSync(join(dir, "near/there"));
    for (const options of [{}, { local: "near/there", force: true }]) {
      expect(words(await download(link, options))).toContain("something else than the directory it told of");
    }
    expect(words(await download(archive([])))).toContain("the sandbox sent no d");
    expect(readdirSync(join(dir, "near"))).toEqual(["there"]);
    expect(readdirSync(join(dir, "near/there"))).toEqual([]);
  });

  test("merging writes through no link that an earlier download left", async () => {
    const start = { name: "./d/", type: "directory" } as const;
    const links = archive([
      start,
      { name: "./d/rc", type: "symlink", link: "../../victim/file" },
      { name: "./d/sub/", type: "directory" },
      { name: "./d/sub/way", type: "symlink", link: "../../../victim" },
    ]);
    expect(await download(links)).toBeUndefined();
    // The same links again: replaced by themselves.
    expect(await download(links, { force: true })).toBeUndefined();
    for (const members of [
      [start, { name: "./d/rc", type: "file", content: "theirs" }],
      [
        start,
        { name: "./d/sub/", type: "directory" },
        { name: "./d/sub/way/", type: "directory" },
        { name: "./d/sub/way/file", type: "file", content: "theirs" },
      ],
    ] as const) {
      const error = await download(archive(members), { force: true });
      expect(words(error)).toContain("is a symbolic link, which is not replaced");
    }
    expect(readFileSync(join(dir, "victim/file"), "utf8")).toBe("mine");
    const more = archive([start, { name: "./d/more", type: "file", content: "new" }]);
    expect(await download(more, { force: true })).toBeUndefined();
    expect(readFileSync(join(dir, "near/got/more"), "utf8")).toBe("new");
    expect(existsSync(join(dir, "near/got/sub/way/file"))).toBe(true);
  });

  test("a tar that ends early is told in its own words", async () => {
    const error = await download(Buffer.alloc(4_000_000, "no archive"));
    expect(words(error)).toContain("tar failed");
    expect(words(error)).toContain("tar archive");
    expect(readdirSync(join(dir, "near"))).toEqual([]);
  });
});

describe("aenv upload --preserve", () => {
  /** Uploads a link, in a process that may have one connection alone and keeps it until tar has ended. */
  async function upload(answer: (archive: Buffer) => Response): Promise<string> {
    await using agent = hostile(Buffer.alloc(0), answer);
    symlinkSync("elsewhere", join(dir, "link"));
    const plan = { target: agent.target, local: join(dir, "link"), remote: "/far/link" };
    const script = `import { uploadArchive } from ${JSON.stringify(join(import.meta.dir, "archive.ts"))};
      import { Transfer } from ${JSON.stringify(join(import.meta.dir, "progress.ts"))};
      using transfer = new Transfer("Uploading", { bar: false });
      void fetch(${JSON.stringify(`${plan.target.url}/held`)});
      await transfer.run((running) => uploadArchive(${JSON.stringify(plan)}, running))
        .catch((error) => console.log(error.message));`;
    await using child = Bun.spawn([process.execPath, "-e", script], {
      env: { ...process.env, BUN_CONFIG_MAX_HTTP_REQUESTS: "1" },
      stdout: "pipe",
      stderr: "inherit",
    });
    return await new Response(child.stdout).text();
  }

  test("all of the archive arrives, though tar ends before it is asked for it", async () => {
    let got = new Uint8Array();
    const said = await upload((archive) => {
      got = Uint8Array.from(archive);
      return new Response();
    });
    expect(said).toBe("");
    const listed = Bun.spawnSync(["tar", "-tvf", "-"], { stdin: got, stdout: "pipe", stderr: "pipe" });
    expect(listed.stderr.toString()).toBe("");
    expect(listed.stdout.toString()).toContain("./link -> elsewhere");
  });

  test("a refusal is told, whatever of the archive was not read", async () => {
    const said = await upload(() => Response.json({ code: "x", message: "no space there" }, { status: 507 }));
    expect(said).toBe("no space there\n");
  });
});

test("a tree's size counts files whatever their names are", async () => {
  const odd = [Buffer.from("日本語"), Buffer.from("ü"), Buffer.from("plain"), Buffer.from([0x62, 0xff])];
  for (const name of odd) {
    const sub = Buffer.concat([Buffer.from(`${dir}/`), name]);
    mkdirSync(sub);
    writeFileSync(Buffer.concat([sub, Buffer.from("/"), name]), "12345");
  }
  symlinkSync("plain", join(dir, "link"));
  chmodSync(join(dir, "plain"), 0o700);
  expect(await treeBytes(dir)).toBe(20);
});

test("writing at a reader's pace leaves no listeners, and a broken stream holds nobody up", async () => {
  const taken: number[] = [];
  const slow = new Writable({
    highWaterMark: 1,
    write: (chunk: Buffer, _encoding, done) => {
      taken.push(chunk.length);
      setImmediate(done);
    },
  });
  for (let i = 0; i < 30; i++) await writeAll(slow, new Uint8Array(10));
  expect(taken).toHaveLength(30);
  const left = () => ["drain", "close", "error"].map((event) => slow.listenerCount(event));
  expect(left()).toEqual([0, 0, 0]);
  const broken = new Writable({
    highWaterMark: 1,
    write: (_chunk, _encoding, done) => setImmediate(() => done(new Error("EPIPE"))),
  });
  broken.on("error", () => undefined);
  await writeAll(broken, new Uint8Array(10));
  await writeAll(broken, new Uint8Array(10));
  expect(broken.destroyed).toBe(true);
});
