import { expect } from "bun:test";
import type { Compression, LayerInput, TarInput } from "../support/oci.ts";
import type { Tree } from "../support/tree.ts";

/* The torture images: layers that are hard to get right, and what is known about other tools' way with them. */

export interface TortureCase {
  readonly name: string;
  readonly layers: readonly (readonly TarInput[] | LayerInput)[];
  /** Comparisons that mean nothing here, with the reason. */
  readonly without?: Readonly<Partial<Record<Comparison, string>>>;
  /** Directories that a tool changes after it has set their times: by its whiteouts. */
  readonly timedBefore?: Readonly<Partial<Record<Comparison, readonly string[]>>>;
  /** What the tree must have besides, e.g. where no other tool is right. */
  readonly check?: (tree: Tree) => void;
}

export type Comparison = "umoci" | "overlay" | "archive";
export const COMPARISONS: readonly Comparison[] = ["umoci", "overlay", "archive"];

const T = 1_600_000_000;
export const file = (
  path: string,
  content: string | Uint8Array = path,
  more: Partial<TarInput> = {},
): TarInput => ({
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
export const link = (path: string, to: string): TarInput => ({ path, type: "hardLink", link: to, mtime: T });
const symlink = (path: string, to: string): TarInput => ({
  path,
  type: "symlink",
  link: to,
  mtime: T,
  mode: 0o777,
});
const whiteout = (path: string): TarInput => file(path, "");
export const root = dir("./", { mode: 0o755, mtime: T - 9 });
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

export const CASES: readonly TortureCase[] = [
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
        dir("inherited", { mode: 0o755, xattrs: { "system.posix_acl_default": ACL } }),
        file("inherited/not", "x", { mode: 0o640 }),
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
    name: "gzip, several members, zstd, several and skippable frames, plain",
    layers: [
      compressed([root, file("gzip", "x".repeat(70_000))], "gzip"),
      compressed([file("members", "y".repeat(70_000))], "gzip-members"),
      compressed([file("zstd", "z".repeat(70_000))], "zstd"),
      compressed([file("frames", "w".repeat(70_000))], "zstd-frames"),
      compressed([file("chunked", "u".repeat(70_000))], "zstd-chunked"),
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
