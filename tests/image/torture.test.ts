import { afterAll, beforeAll, expect, test } from "bun:test";
import { lstatSync, mkdirSync, readdirSync, readFileSync, readlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { runCommand, tryCommand } from "../../src/lib/command.ts";
import { type ImageRig, startImageRig } from "../support/image-rig.ts";
import {
  buildImage,
  type Compression,
  type LayerInput,
  makeTar,
  type TarInput,
  tarHeader,
  writeLayout,
} from "../support/oci.ts";

/*
 * Images that are hard to get right. Each is converted and mounted, and its tree compared, entry by entry, with
 * what others make of the same layers:
 *   umoci    `umoci unpack` as root
 *   overlay  GNU tar unpacks each layer by itself, whiteouts become those of overlayfs, the kernel merges them
 *   archive  skopeo rewrites the image as a docker archive, which is converted in turn
 * Compared: type, permission bits, owner, size, content, link target, device, modification time, link count and
 * which names share an inode, extended attributes. The outcome is printed as a table.
 */

interface TortureCase {
  readonly name: string;
  readonly layers: readonly (readonly TarInput[] | LayerInput)[];
  /** Comparisons that mean nothing here, with the reason. */
  readonly without?: Readonly<Partial<Record<Comparison, string>>>;
  /** Directories that a tool changes after it has set their times: by its whiteouts. */
  readonly timedBefore?: Readonly<Partial<Record<Comparison, readonly string[]>>>;
  /** What the tree must have besides, e.g. where no other tool is right. */
  readonly check?: (tree: ReadonlyMap<string, Node>) => void;
}

type Comparison = "umoci" | "overlay" | "archive";
const COMPARISONS: readonly Comparison[] = ["umoci", "overlay", "archive"];

interface Node {
  readonly type: string;
  readonly mode: number;
  readonly owner: string;
  readonly links: number;
  readonly mtime: string;
  readonly detail: string;
  readonly xattrs: string;
  readonly inode: bigint;
}

const T = 1_600_000_000;
const file = (path: string, content: string | Uint8Array = path, more: Partial<TarInput> = {}): TarInput => ({
  path,
  content,
  mtime: T,
  ...more,
});
const dir = (path: string, more: Partial<TarInput> = {}): TarInput => ({
  path,
  type: "directory",
  mtime: T - 5,
  ...more,
});
const link = (path: string, to: string): TarInput => ({ path, type: "hardLink", link: to, mtime: T });
const symlink = (path: string, to: string): TarInput => ({
  path,
  type: "symlink",
  link: to,
  mtime: T,
  mode: 0o777,
});
const whiteout = (path: string): TarInput => file(path, "");
const root = dir("./", { mode: 0o755, mtime: T - 9 });
const bytes = (...values: number[]): Uint8Array => new Uint8Array(values);

/** vfs_cap_data of version 2 with cap_net_raw+ep, and an ACL that gives uid 1000 read access. */
const CAPABILITY = bytes(1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
const ACL = (() => {
  const entry = (tag: number, perm: number, id = 0xffffffff) => {
    const buffer = Buffer.alloc(8);
    buffer.writeUInt16LE(tag, 0);
    buffer.writeUInt16LE(perm, 2);
    buffer.writeUInt32LE(id, 4);
    return buffer;
  };
  const version = Buffer.from([2, 0, 0, 0]);
  return Buffer.concat([
    version,
    entry(1, 6),
    entry(2, 4, 1000),
    entry(4, 4),
    entry(0x10, 4),
    entry(0x20, 4),
  ]);
})();

const KINDS: Readonly<Record<string, (path: string) => TarInput>> = {
  file: (path) => file(path, "new"),
  directory: (path) => dir(path),
  symlink: (path) => symlink(path, "elsewhere"),
  fifo: (path) => ({ path, type: "fifo", mode: 0o600, mtime: T }),
  device: (path) => ({ path, type: "character", major: 1, minor: 3, mode: 0o666, mtime: T }),
};
const PAIRS = Object.keys(KINDS).flatMap((from) => Object.keys(KINDS).map((to) => [from, to] as const));

function compressed(entries: readonly TarInput[], compression: Compression): LayerInput {
  return { entries, compression };
}

const NO_ZSTD = "this umoci cannot read zstd";

const CASES: readonly TortureCase[] = [
  {
    name: "kinds and permission bits",
    layers: [
      [
        root,
        file("plain"),
        file("setuid", "x", { mode: 0o4755 }),
        file("setgid", "x", { mode: 0o2750 }),
        dir("sticky", { mode: 0o1777 }),
        file("none", "x", { mode: 0 }),
        symlink("fast", "plain"),
        symlink("slow", `/${"t".repeat(900)}`),
        symlink("dangling", "../../../../nowhere"),
        KINDS.device!("null"),
        { path: "block", type: "block", major: 259, minor: 70_000, mode: 0o660, mtime: T },
        KINDS.fifo!("pipe"),
        file("empty", ""),
      ],
    ],
  },
  {
    name: "long names, pax and GNU",
    layers: [
      [
        root,
        file(`${"p".repeat(140)}`, "pax name over 100"),
        file(`gnu-${"g".repeat(180)}`, "gnu", { dialect: "gnu" }),
        { ...symlink(`l-${"n".repeat(150)}`, "t".repeat(400)), dialect: "gnu" },
        dir("d"),
        ...Array.from({ length: 12 }, (_, i) =>
          dir(
            `d/${Array(i + 1)
              .fill("x".repeat(90))
              .join("/")}`,
          ),
        ),
        file(`d/${Array(12).fill("x".repeat(90)).join("/")}/${"f".repeat(255)}`, "deep"),
      ],
    ],
  },
  {
    name: "names that are not UTF-8, spaces, newlines, quotes",
    layers: [
      [
        root,
        { path: bytes(0x6f, 0xff, 0xfe, 0x64), content: "latin", mtime: T },
        file("with space"),
        file("with\nnewline"),
        file("quote\"and'"),
        file("日本語"),
        file("-dash"),
        file("back\\slash"),
        file("%41#?&"),
      ],
    ],
  },
  {
    name: "times: before 1970, after 2038, fractions",
    layers: [
      [
        root,
        file("negative", "x", { mtime: -86_400 }),
        file("zero", "x", { mtime: 0 }),
        file("far", "x", { mtime: 2 ** 33 }),
        file("fraction", "x", { mtime: T + 0.25 }),
        dir("old", { mtime: 1 }),
        symlink("link", "zero"),
      ],
    ],
  },
  {
    name: "big user and group ids",
    layers: [
      [
        root,
        file("pax", "x", { uid: 4_000_000_000, gid: 4_294_967_294 }),
        file("gnu", "x", { uid: 70_000_000, gid: 3_000_000, dialect: "gnu" }),
        dir("home", { uid: 100_000, gid: 100_001 }),
        { ...symlink("link", "pax"), uid: 12, gid: 34 },
      ],
    ],
  },
  {
    name: "xattrs, capabilities, ACLs",
    layers: [
      [
        root,
        file("ping", "x", { mode: 0o755, xattrs: { "security.capability": CAPABILITY } }),
        file("acl", "x", { mode: 0o644, xattrs: { "system.posix_acl_access": ACL } }),
        file("user", "x", {
          xattrs: { "user.text": "value", "user.binary": bytes(0, 10, 61, 255), "user.empty": "" },
        }),
        dir("dir", { xattrs: { "user.dir": "on a directory" } }),
        file("large", "x", { xattrs: { "user.large": "v".repeat(3000) } }),
      ],
      [file("user", "again", { xattrs: { "user.other": "replaced" } })],
    ],
    check(tree) {
      expect(tree.get("user")!.xattrs).toBe("user.other=0x7265706c61636564");
      expect(tree.get("ping")!.xattrs).toBe(
        `security.capability=0x${Buffer.from(CAPABILITY).toString("hex")}`,
      );
      expect(tree.get("acl")!.xattrs).toContain("system.posix_acl_access=0x02000000");
      expect(tree.get("dir")!.xattrs).toContain("user.dir=");
    },
  },
  {
    name: "hard links in a layer; one name removed, another written",
    layers: [
      [
        root,
        dir("d"),
        file("a", "shared"),
        link("d/b", "a"),
        link("c", "d/b"),
        symlink("s", "a"),
        file("other", "o"),
      ],
      [whiteout(".wh.a")],
      [file("c", "written"), dir("d", { mtime: T })],
    ],
    without: { overlay: "it counts the names of the layer below, removed ones too" },
  },
  {
    name: "hard links across layers and before their target",
    layers: [
      [root, link("early", "late"), link("earlier", "./early"), file("late", "late")],
      [dir("sub"), link("sub/below", "/late"), file("x"), link("x", "sub/below")],
    ],
    without: {
      umoci: "needs the target first",
      overlay: "a layer alone does not have the target",
      archive: "",
    },
    check(tree) {
      const { inode } = tree.get("late")!;
      for (const name of ["early", "earlier", "sub/below", "x"]) expect(tree.get(name)!.inode).toBe(inode);
      expect(tree.get("late")!.links).toBe(5);
    },
  },
  {
    name: "whiteouts of files, directories, links, nothing",
    layers: [
      [
        root,
        file("f"),
        dir("d"),
        file("d/x"),
        dir("d/deep"),
        file("d/deep/y"),
        symlink("l", "f"),
        file("kept"),
        dir("e"),
        file("e/1"),
        file("e/2"),
      ],
      [
        dir("e", { mtime: T }),
        whiteout(".wh.f"),
        whiteout(".wh.d"),
        whiteout(".wh.l"),
        whiteout("e/.wh.1"),
        whiteout(".wh.never-there"),
      ],
    ],
  },
  {
    name: "whiteout and new entry of one name, in both orders",
    layers: [
      [root, dir("a"), file("a/old"), dir("b"), file("b/old"), file("f", "old"), file("g", "old")],
      [
        whiteout(".wh.a"),
        dir("a"),
        file("a/new"),
        dir("b"),
        file("b/new"),
        whiteout(".wh.b"),
        whiteout(".wh.f"),
        file("f", "new"),
        file("g", "new"),
        whiteout(".wh.g"),
      ],
    ],
    timedBefore: { umoci: ["b"] },
    check(tree) {
      expect([...tree.keys()].sort()).toEqual(["", "a", "a/new", "b", "b/new", "f", "g"]);
    },
  },
  {
    name: "opaque directories, marker first and last",
    layers: [
      [
        root,
        dir("d"),
        file("d/a"),
        file("d/b"),
        dir("e"),
        file("e/a"),
        dir("e/sub"),
        file("e/sub/x"),
        dir("kept"),
        file("kept/a"),
      ],
      [
        dir("d", { mtime: T }),
        whiteout("d/.wh..wh..opq"),
        file("d/c"),
        dir("e", { mtime: T }),
        file("e/new"),
        dir("e/sub", { mtime: T }),
        file("e/sub/y"),
        whiteout("e/.wh..wh..opq"),
      ],
    ],
    timedBefore: { umoci: ["e/sub"] },
    check(tree) {
      expect([...tree.keys()].filter((name) => name.startsWith("d/"))).toEqual(["d/c"]);
      expect(tree.has("e/sub/x")).toBe(false);
      expect(tree.has("e/sub/y")).toBe(true);
    },
  },
  {
    name: "every kind replaced by every other",
    layers: [
      [
        root,
        ...PAIRS.flatMap(([from, to]) => [
          KINDS[from]!(`${from}-${to}`),
          ...(from === "directory" ? [file(`${from}-${to}/inside`)] : []),
        ]),
      ],
      PAIRS.map(([from, to]) => KINDS[to]!(`${from}-${to}`)),
    ],
  },
  {
    name: "entries below symlinked directories",
    layers: [
      [
        root,
        dir("usr"),
        dir("usr/bin"),
        dir("usr/lib"),
        symlink("bin", "usr/bin"),
        symlink("lib", "/usr/lib"),
      ],
      [
        dir("usr/bin", { mtime: T }),
        file("bin/tool", "1"),
        dir("usr/lib", { mtime: T }),
        file("lib/so", "2"),
      ],
      [dir("usr/bin", { mtime: T }), whiteout("bin/.wh.tool"), file("bin/other", "3")],
    ],
    without: { overlay: "a layer alone does not have the link" },
    check(tree) {
      expect([...tree.keys()].filter((name) => name.startsWith("usr/"))).toEqual([
        "usr/bin",
        "usr/bin/other",
        "usr/lib",
        "usr/lib/so",
      ]);
    },
  },
  {
    name: "sixty layers",
    layers: Array.from({ length: 60 }, (_, i) => [
      ...(i === 0 ? [root] : []),
      dir("d", { mtime: T + i }),
      file(`d/${i}`, String(i)),
      file("d/last", String(i), { mode: i % 2 === 0 ? 0o600 : 0o644 }),
      ...(i % 3 === 2 ? [whiteout(`d/.wh.${i - 1}`)] : []),
    ]),
  },
  {
    name: "gzip, several members, zstd, several frames, plain",
    layers: [
      compressed([root, file("gzip", "x".repeat(70_000))], "gzip"),
      compressed([file("members", "y".repeat(70_000))], "gzip-members"),
      compressed([file("zstd", "z".repeat(70_000))], "zstd"),
      compressed([file("frames", "w".repeat(70_000))], "zstd-frames"),
      compressed([file("plain", "v".repeat(70_000))], "none"),
      compressed([], "none"),
    ],
    without: { umoci: NO_ZSTD, archive: "this skopeo writes no archive of a zstd layer" },
  },
  {
    name: "five thousand files, an entry twice, no directory entries",
    layers: [
      [
        root,
        ...Array.from({ length: 5000 }, (_, i) => file(`many/${"n".repeat(i % 40)}${i}`, String(i))),
        file("twice", "first", { mode: 0o600 }),
        file("twice", "second"),
        file("made/on/the/way", "x"),
      ],
    ],
  },
  {
    name: "contents of every size at the block edges",
    layers: [
      [
        root,
        ...[1, 511, 512, 513, 4095, 4096, 4097, 65_536, 1_048_577, 9_000_001].map((n) =>
          file(`s${n}`, Buffer.alloc(n, `${n} `)),
        ),
      ],
      [file("s4096", Buffer.alloc(12_289, "longer")), file("s9000001", "short")],
    ],
  },
  {
    name: "leading slashes, dots, trailing slashes in names",
    layers: [
      [
        root,
        file("/absolute"),
        file("./dotted"),
        dir("./dir//"),
        file("dir/./inner"),
        dir("dir/x/../y"),
        file("dir/y/z"),
      ],
    ],
    without: { overlay: "GNU tar makes the directory before a '..'" },
  },
  {
    name: "directory metadata changes, content stays",
    layers: [
      [root, dir("d", { mode: 0o755 }), file("d/f"), dir("d/e"), file("d/e/g")],
      [dir("d", { mode: 0o700, uid: 5, gid: 6, mtime: T + 7 })],
      [dir("./", { mode: 0o711, mtime: T + 9 })],
    ],
  },
  {
    name: "eStargz: landmarks and table of contents are files like any other",
    layers: [[root, file(".prefetch.landmark", bytes(0x0f)), file("bin"), file("stargz.index.json", "{}")]],
  },
];

function sparseTar(rig: ImageRig, format: string): LayerInput {
  const at = join(rig.directory, `sparse-${format}`);
  mkdirSync(at);
  const fd = join(at, "holes");
  writeFileSync(fd, "");
  Bun.spawnSync(["truncate", "-s", "5000000", fd]);
  Bun.spawnSync([
    "dd",
    `of=${fd}`,
    "bs=1000",
    "seek=1234",
    "count=9",
    "if=/dev/urandom",
    "conv=notrunc",
    "status=none",
  ]);
  Bun.spawnSync([
    "dd",
    `of=${fd}`,
    "bs=1000",
    "seek=3000",
    "count=1",
    "if=/dev/urandom",
    "conv=notrunc",
    "status=none",
  ]);
  const args = format === "gnu" ? ["--format=gnu"] : ["--format=pax", `--sparse-version=${format}`];
  const made = Bun.spawnSync([
    "tar",
    "-S",
    ...args,
    "--mtime=@1600000000",
    "--owner=0",
    "--group=0",
    "-cf",
    "-",
    "-C",
    at,
    "holes",
  ]);
  if (made.exitCode !== 0) throw new Error(made.stderr.toString());
  return { tar: new Uint8Array(made.stdout) };
}

let rig: ImageRig;
const missing = ["umoci", "skopeo", "getfattr", "e2fsck"].filter((name) => Bun.which(name) === null);
const able = missing.length === 0 && process.getuid?.() === 0;
if (!able) console.warn(`skipped: the torture images need root and: ${missing.join(", ") || "nothing else"}`);
const rows: string[] = [];
let images = 0;

beforeAll(async () => {
  if (able) rig = await startImageRig();
});
afterAll(async () => {
  await rig?.[Symbol.asyncDispose]();
  if (rows.length > 0) {
    const head = `${"image".padEnd(62)} layers entries  umoci    overlay  archive  e2fsck`;
    console.log(["", head, "-".repeat(head.length), ...rows, ""].join("\n"));
  }
});

/** Attributes of every path below, by one pass of getfattr. */
async function attributes(at: string): Promise<Map<string, string>> {
  const { stdout } = await tryCommand(["getfattr", "-R", "-P", "-h", "-d", "-m", "-", "-e", "hex", "."], {
    cwd: at,
    timeoutMs: 60_000,
  });
  const found = new Map<string, string>();
  for (const block of stdout.split("\n\n")) {
    const [first, ...lines] = block.split("\n");
    if (first === undefined || !first.startsWith("# file: ")) continue;
    // getfattr writes odd bytes as \ooo.
    const name = first
      .slice("# file: ".length)
      .replace(/\\(\d{3})/g, (_, octal: string) => String.fromCharCode(Number.parseInt(octal, 8)))
      .replace(/^\.\/?/, "");
    const kept = lines.filter(
      (line) => line !== "" && !/^trusted\.overlay\.|^user\.rootlesscontainers|^user\.umoci/.test(line),
    );
    if (kept.length > 0) found.set(name, kept.sort().join(" "));
  }
  return found;
}

async function readTree(at: string): Promise<Map<string, Node>> {
  const xattrs = await attributes(at);
  const tree = new Map<string, Node>();
  const visit = (relative: Buffer): void => {
    const path = Buffer.concat([Buffer.from(`${at}/`), relative]);
    const info = lstatSync(path, { bigint: true });
    const name = relative.toString("latin1");
    const kind = info.isFile()
      ? "file"
      : info.isDirectory()
        ? "directory"
        : info.isSymbolicLink()
          ? "symlink"
          : info.isFIFO()
            ? "fifo"
            : info.isBlockDevice()
              ? "block"
              : "character";
    const detail =
      kind === "file"
        ? `${info.size} ${new Bun.CryptoHasher("sha256").update(readFileSync(path)).digest("hex")}`
        : kind === "symlink"
          ? readlinkSync(path, { encoding: "buffer" }).toString("latin1")
          : kind === "block" || kind === "character"
            ? String(info.rdev)
            : "";
    tree.set(name, {
      type: kind,
      mode: Number(info.mode & 0o7777n),
      owner: `${info.uid}:${info.gid}`,
      links: kind === "directory" ? 0 : Number(info.nlink),
      mtime: String(info.mtimeNs),
      detail,
      xattrs: xattrs.get(name) ?? "",
      inode: info.ino,
    });
    if (kind !== "directory") return;
    for (const child of readdirSync(path, { encoding: "buffer" })) {
      if (name === "" && child.toString() === "lost+found") continue;
      visit(name === "" ? child : Buffer.concat([relative, Buffer.from("/"), child]));
    }
  };
  visit(Buffer.alloc(0));
  return new Map([...tree].sort(([a], [b]) => (a < b ? -1 : 1)));
}

interface CompareOptions {
  /** Names whose times the layers do not say: directories that were made, or changed without an entry. */
  readonly untimed: ReadonlySet<string>;
}

function describe_(tree: ReadonlyMap<string, Node>, options: CompareOptions): string[] {
  const groups = new Map<bigint, string>();
  return [...tree].map(([name, node]) => {
    if (!groups.has(node.inode)) groups.set(node.inode, name);
    const time = options.untimed.has(name) ? "-" : node.mtime;
    const linked = node.type !== "directory" ? `${node.links} ${groups.get(node.inode)}` : "";
    return [
      JSON.stringify(name),
      node.type,
      node.mode.toString(8),
      node.owner,
      time,
      node.detail,
      node.xattrs,
      linked,
    ].join(" ");
  });
}

function untimedDirectories(layers: readonly LayerInput[], tree: ReadonlyMap<string, Node>): Set<string> {
  const normal = (path: string | Uint8Array) =>
    Buffer.from(path as string)
      .toString("latin1")
      .split("/")
      .reduce<string[]>((parts, part) => {
        if (part === "..") parts.pop();
        else if (part !== "" && part !== ".") parts.push(part);
        return parts;
      }, [])
      .join("/");
  const listed = new Map<string, number>();
  const touched = new Map<string, number>();
  layers.forEach((layer, index) => {
    for (const entry of layer.entries ?? []) {
      const path = normal(entry.path);
      if (entry.type === "directory") listed.set(path, index);
      if (path === "") continue;
      const slash = path.lastIndexOf("/");
      touched.set(slash < 0 ? "" : path.slice(0, slash), index);
    }
  });
  const untimed = new Set<string>();
  // A directory that no layer lists is made on the way, which changes the one it is in.
  for (const [name, node] of tree) {
    const slash = name.lastIndexOf("/");
    if (name !== "" && node.type === "directory" && !listed.has(name))
      untimed.add(slash < 0 ? "" : name.slice(0, slash));
  }
  for (const [name, node] of tree) {
    if (node.type !== "directory") continue;
    if ((listed.get(name) ?? -1) < (touched.get(name) ?? 0) || !listed.has(name)) untimed.add(name);
  }
  return untimed;
}

async function umociTree(layout: string, at: string): Promise<Map<string, Node>> {
  await runCommand(["umoci", "unpack", "--image", `${layout}:image`, at], { timeoutMs: 120_000 });
  return readTree(join(at, "rootfs"));
}

async function overlayTree(layers: readonly LayerInput[], at: string): Promise<Map<string, Node>> {
  const names: string[] = [];
  mkdirSync(at);
  // A tmpfs keeps every time and device, and the layers of one test die with it.
  await runCommand(["mount", "-t", "tmpfs", "tmpfs", at]);
  await using stack = new AsyncDisposableStack();
  stack.defer(async () => void (await runCommand(["umount", at])));
  for (const [index, layer] of layers.entries()) {
    const name = `l${index}`;
    names.unshift(name);
    const target = join(at, name);
    mkdirSync(target);
    const tar = join(at, `${name}.tar`);
    writeFileSync(tar, layer.tar ?? makeTar(layer.entries ?? []));
    const options = [
      "-xpf",
      tar,
      "-C",
      target,
      "--numeric-owner",
      "--xattrs",
      "--xattrs-include=*",
      "--overwrite-dir",
    ];
    await runCommand(["tar", ...options, "--exclude=.wh.*", "-P", "--transform=flags=r;s,^/,,"], {
      timeoutMs: 60_000,
    });
    for (const { path } of layer.entries ?? []) {
      const text = typeof path === "string" ? path : "";
      const slash = text.lastIndexOf("/");
      const base = text.slice(slash + 1);
      const parent = join(target, text.slice(0, Math.max(slash, 0)));
      if (base === ".wh..wh..opq") {
        await runCommand(["setfattr", "-n", "trusted.overlay.opaque", "-v", "y", parent]);
      } else if (base.startsWith(".wh.")) {
        const hidden = join(parent, base.slice(4));
        const there = lstatSync(hidden, { throwIfNoEntry: false });
        mkdirSync(parent, { recursive: true });
        if (there === undefined) await runCommand(["mknod", hidden, "c", "0", "0"]);
        else if (there.isDirectory())
          await runCommand(["setfattr", "-n", "trusted.overlay.opaque", "-v", "y", hidden]);
      }
    }
    // The marks changed directories' times.
    for (const entry of (layer.entries ?? []).filter(({ type }) => type === "directory"))
      await runCommand(["touch", "-h", "-d", `@${entry.mtime}`, join(target, String(entry.path))]);
  }
  mkdirSync(join(at, "empty"));
  mkdirSync(join(at, "m"));
  const mounted = await tryCommand(
    ["mount", "-t", "overlay", "overlay", "-o", `lowerdir=${[...names, "empty"].join(":")}`, "m"],
    { cwd: at },
  );
  if (mounted.exitCode !== 0) throw new Error(`overlay: ${mounted.stderr}`);
  stack.defer(async () => void (await runCommand(["umount", join(at, "m")])));
  // Awaited here: the mounts end with this function.
  return await readTree(join(at, "m"));
}

async function runCase(torture: TortureCase): Promise<void> {
  const at = join(rig.directory, `torture-${images++}`);
  mkdirSync(at);
  const layers: LayerInput[] = torture.layers.map(
    (layer) => (Array.isArray(layer) ? { entries: layer } : layer) as LayerInput,
  );
  const layout = join(at, "layout");
  await writeLayout(layout, { image: buildImage({ layers }) });
  const service = rig.service();
  const resolved = await service.resolve(`oci-layout:${layout}:image`);
  const raw = await rig.exportRaw(resolved.lowers);
  const checked = await tryCommand(["e2fsck", "-fn", raw], { timeoutMs: 60_000 });
  expect(`${torture.name}: e2fsck ${checked.exitCode}\n${checked.exitCode === 0 ? "" : checked.stdout}`).toBe(
    `${torture.name}: e2fsck 0\n`,
  );
  const mounted = await rig.mount(raw);
  if (mounted === undefined) throw new Error("loop mounts are needed here");
  const ours = await readTree(mounted);
  torture.check?.(ours);

  const untimed = untimedDirectories(layers, ours);
  const outcome: Record<string, string> = {};
  for (const comparison of COMPARISONS) {
    if (torture.without?.[comparison] !== undefined && torture.without[comparison] !== "") {
      outcome[comparison] = "-";
      continue;
    }
    const more = torture.timedBefore?.[comparison] ?? [];
    const options = { untimed: new Set([...untimed, ...more]) };
    let theirs: Map<string, Node>;
    if (comparison === "umoci") theirs = await umociTree(layout, join(at, "umoci"));
    else if (comparison === "overlay") theirs = await overlayTree(layers, join(at, "overlay"));
    else {
      const archive = join(at, "image.tar");
      await runCommand(
        [
          "skopeo",
          "--insecure-policy",
          "copy",
          "-q",
          `oci:${layout}:image`,
          `docker-archive:${archive}:torture:v1`,
        ],
        {
          timeoutMs: 60_000,
        },
      );
      const again = await service.resolve(`docker-archive:${archive}:torture:v1`);
      const mountedAgain = await rig.mount(await rig.exportRaw(again.lowers));
      theirs = await readTree(mountedAgain!);
    }
    // A merged directory shows the topmost layer's metadata, also where that layer says nothing about it.
    const rootSaid = layers.at(-1)!.entries?.some(({ path }) => path === "./") ?? false;
    const mine = new Map(ours);
    if (comparison === "overlay" && !rootSaid) for (const side of [mine, theirs]) side.delete("");
    expect({ image: torture.name, by: comparison, tree: describe_(mine, options) }).toEqual({
      image: torture.name,
      by: comparison,
      tree: describe_(theirs, options),
    });
    outcome[comparison] = "same";
  }
  const cells = COMPARISONS.map((name) => outcome[name]!.padEnd(8));
  rows.push(
    `${torture.name.padEnd(62)} ${String(layers.length).padStart(6)} ${String(ours.size).padStart(7)}  ${cells.join(" ")} clean`,
  );
}

for (const torture of CASES) test.skipIf(!able)(torture.name, () => runCase(torture), 120_000);

test.skipIf(!able)(
  "sparse files in every format",
  async () => {
    const sparse = (format: string) => [{ entries: [root] }, sparseTar(rig, format)];
    await runCase({
      name: "sparse files: old GNU",
      layers: sparse("gnu"),
      without: { umoci: "it does not know the entry type" },
    });
    for (const format of ["0.0", "0.1", "1.0"])
      await runCase({ name: `sparse files: pax ${format}`, layers: sparse(format) });
  },
  60_000,
);

test.skipIf(!able)("hostile layers are refused with the reason, and leave nothing", async () => {
  const service = rig.service();
  const refused = async (entries: readonly TarInput[] | Uint8Array, reason: RegExp): Promise<void> => {
    const layout = join(rig.directory, `hostile-${images++}`);
    const layer: LayerInput =
      entries instanceof Uint8Array ? { tar: entries } : { entries: entries as TarInput[] };
    await writeLayout(layout, { image: buildImage({ layers: [layer] }) });
    await expect(service.resolve(`oci-layout:${layout}:image`)).rejects.toThrow(reason);
    rows.push(`refused: ${reason.source}`.padEnd(62));
  };
  await refused([file("../../etc/passwd")], /leaves the root/);
  await refused([link("x", "missing")], /missing|target/);
  await refused([file(".wh.")], /whiteout of nothing/);
  await refused(tarHeader({ name: Buffer.from("cut"), typeFlag: "0", size: 5000 }), /ends within an entry/);
  await refused([file("n".repeat(256))], /too long|name/i);
  expect(readdirSync(join(rig.directory, "cache/staging"))).toEqual([]);
});
