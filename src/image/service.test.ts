import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, lstatSync, readdirSync, readFileSync, readlinkSync } from "node:fs";
import { chmod, mkdir, readdir, rm, truncate } from "node:fs/promises";
import { join } from "node:path";
import { EXT4_HELPER, type ImageRig, serviceOptions, startImageRig } from "../../tests/support/image-rig.ts";
import {
  type BuiltImage,
  buildImage,
  buildIndex,
  compress,
  hostArchitecture,
  type LayerInput,
  makeTar,
  pushImage,
  sha256,
  type TarInput,
  tarHeader,
  writeLayout,
} from "../../tests/support/oci.ts";
import { startRegistry, type TestRegistry } from "../../tests/support/registry.ts";
import { runCommand, tryCommand } from "../lib/command.ts";
import type { AenvError } from "../lib/errors.ts";
import { createImageService } from "./service.ts";
import type { ResolvedImage } from "./types.ts";

let rig: ImageRig;
let registry: TestRegistry;
let tags = 0;

beforeAll(async () => {
  rig = await startImageRig();
  registry = await startRegistry();
});

afterAll(async () => {
  await rig?.[Symbol.asyncDispose]();
  await registry?.[Symbol.asyncDispose]();
});

async function push(image: BuiltImage): Promise<string> {
  const tag = `t${tags++}`;
  await pushImage(registry.url, "test/image", tag, image);
  return `${registry.host}/test/image:${tag}`;
}

function layers(...entries: (readonly TarInput[])[]): LayerInput[] {
  return entries.map((list) => ({ entries: list }));
}

const dir = (path: string, more: Partial<TarInput> = {}): TarInput => ({ path, type: "directory", ...more });
const file = (path: string, content: string | Uint8Array = path, more: Partial<TarInput> = {}): TarInput => ({
  path,
  content,
  ...more,
});

/** Converts the layers, has e2fsck look at the result, and mounts it. */
async function convert(
  input: readonly LayerInput[],
): Promise<{ root: string | undefined; raw: string; image: ResolvedImage }> {
  const image = await rig.service().resolve(await push(buildImage({ layers: input })));
  const raw = await rig.exportRaw(image.lowers);
  await runCommand(["e2fsck", "-fn", raw]);
  return { root: await rig.mount(raw), raw, image };
}

/** Paths below a directory, names as latin1 so that any byte shows. */
function tree(root: string, at = ""): string[] {
  return readdirSync(Buffer.from(join(root, at)), { encoding: "buffer" })
    .map((name) => name.toString("latin1"))
    .sort()
    .flatMap((name) => {
      const path = at === "" ? name : `${at}/${name}`;
      const info = lstatSync(Buffer.from(join(root, path), "latin1"));
      return info.isDirectory() ? [`${path}/`, ...tree(root, path)] : [path];
    });
}

function text(root: string, path: string): string {
  return readFileSync(join(root, path), "utf8");
}

async function rejection(work: Promise<unknown>): Promise<AenvError> {
  return work.then(
    () => {
      throw new Error("expected an error");
    },
    (error: AenvError) => error,
  );
}

async function cacheIsClean(cacheDir = join(rig.directory, "cache")): Promise<void> {
  expect(await readdir(join(cacheDir, "staging"))).toEqual([]);
  expect((await rig.blockClient.list()).map((device) => device.deviceId)).toEqual([]);
}

describe("conversion", () => {
  test("FR-75: kinds, owners, times, long and odd names", async () => {
    const long = `${"d".repeat(120)}/${"f".repeat(250)}`;
    const odd = Buffer.from([0x6f, 0xff, 0xfe, 0x0a, 0x20, 0x64]);
    const { root } = await convert(
      layers([
        dir("./", { mode: 0o711, mtime: 1_600_000_000 }),
        file("plain", "hello", {
          mode: 0o4755,
          uid: 3_000_000_000,
          gid: 4_294_967_294,
          mtime: 1_234_567_890.123456,
        }),
        file("before-epoch", "x", { mtime: -1.5 }),
        file("far", "x", { mtime: 2 ** 33 }),
        file(long, "long"),
        file(`gnu-${"g".repeat(200)}`, "gnu", { dialect: "gnu", uid: 70_000_000 }),
        file("empty", ""),
        { path: odd, content: "odd" },
        dir("sticky", { mode: 0o1777 }),
        { path: "fast", type: "symlink", link: "plain" },
        { path: "slow", type: "symlink", link: `/${"t".repeat(900)}` },
        { path: "null", type: "character", major: 1, minor: 3, mode: 0o666 },
        { path: "big-minor", type: "block", major: 259, minor: 70_000 },
        { path: "pipe", type: "fifo", mode: 0o600 },
        file("a/b/c/deep", "deep", { mtime: 1_500_000_000 }),
      ]),
    );
    if (root === undefined) return;
    const stat = (path: string) => lstatSync(join(root, path), { bigint: true });
    expect(stat(".").mode & 0o7777n).toBe(0o711n);
    expect(stat(".").mtimeMs).toBe(1_600_000_000_000n);
    const plain = stat("plain");
    expect([plain.mode & 0o7777n, plain.uid, plain.gid]).toEqual([0o4755n, 3_000_000_000n, 4_294_967_294n]);
    expect(Number(plain.mtimeNs / 1_000_000_000n)).toBe(1_234_567_890);
    expect(Number(plain.mtimeNs % 1_000_000_000n)).toBeGreaterThan(123_000_000);
    expect(stat("before-epoch").mtimeNs).toBe(-1_500_000_000n);
    expect(stat("far").mtimeMs).toBe(2n ** 33n * 1000n);
    expect(text(root, long)).toBe("long");
    expect(stat(`gnu-${"g".repeat(200)}`).uid).toBe(70_000_000n);
    expect(stat("empty").size).toBe(0n);
    expect(readFileSync(Buffer.concat([Buffer.from(`${root}/`), odd]), "utf8")).toBe("odd");
    expect(stat("sticky").mode & 0o7777n).toBe(0o1777n);
    expect(readlinkSync(join(root, "fast"))).toBe("plain");
    expect(readlinkSync(join(root, "slow"))).toBe(`/${"t".repeat(900)}`);
    expect(stat("null").isCharacterDevice()).toBe(true);
    expect(stat("null").rdev).toBe(0x103n);
    // makedev(259, 70000) of the kernel's 64-bit form.
    expect(stat("big-minor").rdev).toBe((70_000n & 0xffn) | (259n << 8n) | ((70_000n & ~0xffn) << 12n));
    expect(stat("pipe").isFIFO()).toBe(true);
    expect(stat("a/b").mode & 0o7777n).toBe(0o755n);
    expect(stat("a/b").mtimeMs).toBe(1_500_000_000_000n);
    expect(stat(".").nlink).toBe(5n);
  });

  test("FR-75: extended attributes, access control lists, file capabilities", async () => {
    const binary = Buffer.from([0, 1, 2, 0x0a, 0x3d, 0xff]);
    const acl = Buffer.alloc(4 + 5 * 8);
    acl.writeUInt32LE(2, 0);
    // user::rw-, user:1000:r--, group::r--, mask::r--, other::---
    const entries = [
      [1, 6, -1],
      [2, 4, 1000],
      [4, 4, -1],
      [16, 4, -1],
      [32, 0, -1],
    ] as const;
    entries.forEach(([tag, permission, id], index) => {
      acl.writeUInt16LE(tag, 4 + index * 8);
      acl.writeUInt16LE(permission, 6 + index * 8);
      acl.writeInt32LE(id, 8 + index * 8);
    });
    const capability = Buffer.from("0100000200040000000000000000000000000000", "hex");
    const { raw, root } = await convert(
      layers(
        [
          file("f", "x", {
            xattrs: { "user.binary": binary, "user.empty": "", "security.capability": capability },
          }),
          file("acl", "x", { mode: 0o640, xattrs: { "system.posix_acl_access": acl } }),
          dir("d", { xattrs: { "user.one": "1", "user.big": Buffer.alloc(2000, 7) } }),
          file("unknown", "x", { xattrs: { "btrfs.compression": "zstd" } }),
        ],
        [dir("d", { xattrs: { "user.two": "2" } })],
      ),
    );
    const value = async (path: string, name: string) => {
      const out = join(rig.directory, "xattr.bin");
      await rm(out, { force: true });
      await runCommand(["debugfs", "-R", `ea_get -f ${out} ${path} ${name}`, raw]);
      return Buffer.from(await Bun.file(out).arrayBuffer());
    };
    expect(await value("/f", "user.binary")).toEqual(binary);
    expect(await value("/f", "security.capability")).toEqual(capability);
    const list = await runCommand(["debugfs", "-R", "ea_list /d", raw]);
    expect(list).toContain("user.two");
    expect(list).not.toContain("user.one");
    expect(list).not.toContain("user.big");
    expect(await runCommand(["debugfs", "-R", "ea_list /unknown", raw])).not.toContain("btrfs");
    if (root === undefined) return;
    // The kernel's own reading of the list: user 1000 is named in it, 1001 is not.
    await chmod(rig.directory, 0o711);
    const readAs = (uid: string) =>
      tryCommand(["setpriv", `--reuid=${uid}`, `--regid=${uid}`, "--clear-groups", "cat", join(root, "acl")]);
    expect((await readAs("1000")).exitCode).toBe(0);
    expect((await readAs("1001")).stderr).toContain("Permission denied");
  });

  test("FR-70: whiteouts and opaque directories concern lower layers only, in any order", async () => {
    const base = [
      dir("keep"),
      file("keep/a"),
      dir("gone"),
      file("gone/x"),
      dir("gone/deep"),
      file("gone/deep/y"),
      dir("opaque"),
      file("opaque/old"),
      dir("opaque/sub"),
      file("opaque/sub/old"),
      dir("again"),
      file("again/old"),
      file("replaced", "old"),
      { path: "link", type: "symlink", link: "keep" } as TarInput,
      file("file"),
    ];
    const { root } = await convert(
      layers(base, [
        file(".wh.gone", ""),
        file("opaque/new"),
        file("opaque/sub/new"),
        file("opaque/.wh..wh..opq", ""),
        file("opaque/later"),
        file("again/new"),
        file(".wh.again", ""),
        file("replaced", "new"),
        file(".wh.replaced", ""),
        file(".wh.link", ""),
        file(".wh.never-there", ""),
        file("nowhere/.wh.x", ""),
        file(".wh..wh.plnk/1.2", "aufs"),
        file("keep/.wh.a", ""),
      ]),
    );
    if (root === undefined) return;
    expect(tree(root)).toEqual([
      "again/",
      "again/new",
      "file",
      "keep/",
      "opaque/",
      "opaque/later",
      "opaque/new",
      "opaque/sub/",
      "opaque/sub/new",
      "replaced",
    ]);
    expect(text(root, "replaced")).toBe("new");
  });

  test("replacing: file by directory, directory by file, hard-linked file; root opaque", async () => {
    const { root } = await convert(
      layers(
        [
          file("a", "old"),
          { path: "b", type: "hardLink", link: "a" },
          dir("d"),
          file("d/inner"),
          file("f"),
          { path: "s", type: "symlink", link: "d" },
          file("parent"),
        ],
        [
          file("a", "new"),
          dir("f", { mode: 0o700 }),
          file("f/x"),
          file("d", "now a file"),
          dir("s"),
          file("s/y"),
          file("parent/child"),
        ],
        [dir("d"), { path: "f", type: "fifo" }],
      ),
    );
    if (root === undefined) return;
    expect(text(root, "a")).toBe("new");
    expect(text(root, "b")).toBe("old");
    expect(lstatSync(join(root, "b")).nlink).toBe(1);
    expect(tree(root)).toEqual(["a", "b", "d/", "f", "parent/", "parent/child", "s/", "s/y"]);
    expect(lstatSync(join(root, "f")).isFIFO()).toBe(true);

    const wiped = await convert(
      layers([file("a"), dir("b"), file("b/c")], [file(".wh..wh..opq", ""), file("only")]),
    );
    expect(tree(wiped.root!)).toEqual(["only"]);
  });

  test("FR-69: hard links: within and across layers, before their target, to symlinks, onto themselves", async () => {
    const { root } = await convert(
      layers(
        [
          { path: "early", type: "hardLink", link: "late" },
          { path: "earlier", type: "hardLink", link: "./early" },
          file("late", "late"),
          { path: "sym", type: "symlink", link: "late" },
          { path: "sym2", type: "hardLink", link: "sym" },
          { path: "late", type: "hardLink", link: "late" },
        ],
        [
          dir("sub"),
          { path: "sub/from-below", type: "hardLink", link: "/late" },
          file("x"),
          { path: "x", type: "hardLink", link: "sub/from-below" },
        ],
      ),
    );
    if (root === undefined) return;
    const info = lstatSync(join(root, "late"));
    expect(info.nlink).toBe(5);
    for (const name of ["early", "earlier", "sub/from-below", "x"])
      expect(lstatSync(join(root, name)).ino).toBe(info.ino);
    expect(lstatSync(join(root, "sym2")).ino).toBe(lstatSync(join(root, "sym")).ino);
    expect(lstatSync(join(root, "sym")).nlink).toBe(2);
    expect(text(root, "x")).toBe("late");
  });

  test("entries under symlinked directories go where the link points, inside the root", async () => {
    const { root } = await convert(
      layers(
        [
          dir("usr/bin"),
          { path: "bin", type: "symlink", link: "usr/bin" },
          { path: "abs", type: "symlink", link: "/usr" },
          { path: "up", type: "symlink", link: "../../../../usr/lib" },
        ],
        [
          file("bin/tool", "1"),
          file("abs/bin/other", "2"),
          file("up/made", "3"),
          { path: "hard", type: "hardLink", link: "bin/tool" },
        ],
        [file("bin/.wh.tool", "")],
      ),
    );
    if (root === undefined) return;
    expect(tree(root)).toEqual([
      "abs",
      "bin",
      "hard",
      "up",
      "usr/",
      "usr/bin/",
      "usr/bin/other",
      "usr/lib/",
      "usr/lib/made",
    ]);
    expect(text(root, "usr/lib/made")).toBe("3");
  });

  test("many files in one directory, large and sparse files", async () => {
    const many = Array.from({ length: 3000 }, (_, index) =>
      file(`dir/${"n".repeat(index % 60)}${index}`, String(index)),
    );
    const large = Buffer.alloc(9_000_001, "0123456789abcdef");
    const sparse = join(rig.directory, "sparse");
    await runCommand([
      "sh",
      "-c",
      `truncate -s 40M ${sparse} && printf abc | dd of=${sparse} bs=1 seek=5000 conv=notrunc 2>/dev/null && printf xyz | dd of=${sparse} bs=1 seek=30000000 conv=notrunc 2>/dev/null`,
    ]);
    const inputs: LayerInput[] = [{ entries: [...many, file("large", large)], compression: "zstd" }];
    for (const format of [
      "gnu --sparse",
      "pax --sparse --sparse-version=0.0",
      "pax --sparse --sparse-version=0.1",
      "pax --sparse --sparse-version=1.0",
    ]) {
      const out = join(rig.directory, "sparse.tar");
      await runCommand([
        "sh",
        "-c",
        `tar -C ${rig.directory} -c --format=${format} -f ${out} --transform=s/sparse/sparse-${inputs.length}/ sparse`,
      ]);
      inputs.push({ tar: readFileSync(out), compression: "none" });
    }
    const { root } = await convert(inputs);
    if (root === undefined) return;
    expect(readdirSync(join(root, "dir")).length).toBe(3000);
    expect(text(root, `dir/${"n".repeat(2999 % 60)}2999`)).toBe("2999");
    expect(readFileSync(join(root, "large")).equals(large)).toBe(true);
    for (let version = 1; version <= 4; version++) {
      await runCommand(["cmp", sparse, join(root, `sparse-${version}`)]);
      expect(lstatSync(join(root, `sparse-${version}`)).blocks).toBeLessThan(200);
    }
    await rm(sparse);
  });

  test("many extents: a fragmented free space takes a large file", async () => {
    const filler = Array.from({ length: 400 }, (_, index) =>
      file(`fill/${index}`, Buffer.alloc(64 * 1024, index)),
    );
    const holes = filler.flatMap((_, index) => (index % 2 === 0 ? [file(`fill/.wh.${index}`, "")] : []));
    const image = buildImage({
      layers: layers(filler, holes, [file("big", Buffer.alloc(24 << 20, "fragment"))]),
    });
    const service = rig.service({ virtualSizeBytes: 44 << 20, cacheDir: join(rig.directory, "cache-small") });
    const resolved = await service.resolve(await push(image));
    const raw = await rig.exportRaw(resolved.lowers);
    await runCommand(["e2fsck", "-fn", raw]);
    const root = await rig.mount(raw);
    if (root === undefined) return;
    expect(readFileSync(join(root, "big")).equals(Buffer.alloc(24 << 20, "fragment"))).toBe(true);
    expect(readdirSync(join(root, "fill")).length).toBe(200);

    const tooBig = buildImage({ layers: layers([file("big", Buffer.alloc(60 << 20))]) });
    const error = await rejection(service.resolve(await push(tooBig)));
    expect(error).toMatchObject({ code: "image_unsupported", status: 400 });
    expect(error.message).toContain("does not fit on a virtual disk of 44 MiB");
    await cacheIsClean(join(rig.directory, "cache-small"));
  });

  test("one image for disks of different sizes: each is a conversion, each is found again", async () => {
    const service = rig.service({ virtualSizeBytes: 64 << 20, cacheDir: join(rig.directory, "cache-sizes") });
    const reference = await push(buildImage({ layers: layers([file("a", "a")]) }));
    const [usual, small] = await Promise.all([
      service.resolve(reference),
      service.resolve(reference, { virtualSizeBytes: 32 << 20 }),
    ]);
    expect([usual.virtualSizeBytes, small.virtualSizeBytes]).toEqual([64 << 20, 32 << 20]);
    expect(usual.lowers[0]!.digest).not.toBe(small.lowers[0]!.digest);
    const again = await service.resolve(reference);
    expect(again.lowers.map(({ digest }) => digest)).toEqual(usual.lowers.map(({ digest }) => digest));
    const raw = await rig.exportRaw(small.lowers);
    await runCommand(["e2fsck", "-fn", raw]);
    expect(Bun.file(raw).size).toBe(32 << 20);
  });

  test("every compression gives the same layer content; the same input gives the same bytes", async () => {
    const entries = [file("a", Buffer.alloc(300_000, "a")), dir("b"), file("b/c")];
    const digests = new Set<string>();
    for (const compression of ["none", "gzip", "gzip-members", "zstd", "zstd-frames"] as const) {
      const { root } = await convert([{ entries, compression }]);
      if (root !== undefined) expect(tree(root)).toEqual(["a", "b/", "b/c"]);
    }
    const reference = await push(buildImage({ layers: layers(entries, [file("b/d"), file(".wh.a", "")]) }));
    for (const cache of ["one", "two"]) {
      const image = await rig.service({ cacheDir: join(rig.directory, cache) }).resolve(reference);
      digests.add(image.lowers.map((lower) => lower.digest).join());
    }
    expect(digests.size).toBe(1);
  });

  test("an image without layers is an empty file system", async () => {
    const { root, image } = await convert([]);
    expect(image.lowers.length).toBe(1);
    if (root !== undefined) expect(tree(root)).toEqual([]);
  });

  test("hostile and broken layers are refused with a reason, and leave nothing", async () => {
    const cases: [string, LayerInput, string][] = [
      ["image_unsupported", { entries: [file("../escape")] }, "leaves the root"],
      ["image_unsupported", { entries: [file("a/../../escape")] }, "leaves the root"],
      [
        "image_unsupported",
        { entries: [{ path: "l", type: "hardLink", link: "../../etc/passwd" }] },
        "leaves the root",
      ],
      [
        "image_unsupported",
        { entries: [{ path: "l", type: "hardLink", link: "missing" }] },
        "hard link to missing",
      ],
      [
        "image_unsupported",
        { entries: [dir("d"), { path: "l", type: "hardLink", link: "d" }] },
        "the directory d",
      ],
      ["image_unsupported", { entries: [file("x".repeat(256))] }, "longer than"],
      ["image_unsupported", { entries: [file("f"), file("f/under")] }, "not a directory"],
      [
        "image_unsupported",
        {
          entries: [
            { path: "a", type: "symlink", link: "b" },
            { path: "b", type: "symlink", link: "a" },
            file("a/x"),
          ],
        },
        "too many symbolic links",
      ],
      ["image_unsupported", { entries: [file(".wh.", "")] }, "whiteout of nothing"],
      [
        "image_unsupported",
        { entries: [file("f", "x", { xattrs: { "user.huge": Buffer.alloc(9000) } })] },
        "extended attributes",
      ],
      ["image_unsupported", { tar: Buffer.from("not a tar".repeat(100)) }, "checksum"],
      [
        "image_truncated",
        { tar: makeTar([file("f", Buffer.alloc(5000))]).subarray(0, 2000), compression: "none" },
        "ends within",
      ],
      ["image_digest_mismatch", { entries: [file("f")], diffId: `sha256:${"0".repeat(64)}` }, "uncompressed"],
      [
        "image_unsupported",
        { tar: tarHeader({ name: Buffer.from("f"), typeFlag: "Z", size: 0 }) },
        "entry type",
      ],
    ];
    // A small blob that unpacks without end: 4 GiB of zeros behind the archive's, for a disk of 1 GiB.
    const zeros = Bun.zstdCompressSync(Buffer.alloc(64 << 20));
    const bomb = Buffer.concat([Bun.zstdCompressSync(makeTar([file("f")])), ...Array(64).fill(zeros)]);
    cases.push(["image_unsupported", { tar: bomb, compression: "none" }, "unpacks to more than"]);
    for (const [code, layer, words] of cases) {
      const error = await rejection(rig.service().resolve(await push(buildImage({ layers: [layer] }))));
      expect({ code: error.code, words: error.message }).toEqual({
        code,
        words: expect.stringContaining(words),
      });
    }
    await cacheIsClean();
  });
});

describe("resolve", () => {
  test("FR-77: keeps the runtime config and tolerates nulls", async () => {
    const config = {
      Env: ["PATH=/bin", "EMPTY=", "A=b=c", "invalid"],
      WorkingDir: "/work",
      User: "1000:1000",
      Entrypoint: ["/entry"],
      Cmd: ["a", "b"],
      ExposedPorts: { "80/tcp": {} },
      Volumes: { "/data": {} },
      Labels: { key: "value" },
      Healthcheck: { Test: ["CMD-SHELL", "true"], Interval: 5 },
      Shell: ["/bin/bash", "-c"],
      OnBuild: ["RUN x"],
    };
    const full = await rig.service().resolve(await push(buildImage({ layers: layers([file("x")]), config })));
    expect(full.config).toEqual({
      env: { PATH: "/bin", EMPTY: "", A: "b=c" },
      workingDir: "/work",
      user: "1000:1000",
      entrypoint: ["/entry"],
      cmd: ["a", "b"],
      exposedPorts: ["80/tcp"],
      volumes: ["/data"],
      labels: { key: "value" },
      healthcheck: ["CMD-SHELL", "true"],
      shell: ["/bin/bash", "-c"],
      onBuild: ["RUN x"],
    });
    const nulls = {
      Env: null,
      Entrypoint: null,
      Cmd: null,
      ExposedPorts: null,
      Volumes: null,
      Labels: null,
      Healthcheck: null,
      Shell: null,
      OnBuild: null,
      User: "",
    };
    for (const empty of [nulls, null]) {
      const image = await rig
        .service()
        .resolve(await push(buildImage({ layers: layers([file("x")]), config: empty })));
      expect(image.config).toEqual({ env: {}, exposedPorts: [], volumes: [], labels: {} });
    }
  });

  test("a second pull and shared layers come from the cache; damaged commits are made again", async () => {
    const base = [file("base", Buffer.alloc(100_000, "b"))];
    const first = await push(buildImage({ layers: layers(base, [file("one")]) }));
    const second = await push(buildImage({ layers: layers(base, [file("two")]) }));
    const cacheDir = join(rig.directory, "cache-hits");
    const events: string[] = [];
    const progress = (event: { phase: string; item?: string }) => events.push(event.phase);
    const made = await rig.service({ cacheDir }).resolve(first, { progress });
    expect(events).toContain("download layer");
    expect(events).toContain("convert layer");

    events.length = 0;
    const again = await rig.service({ cacheDir }).resolve(first, { progress });
    expect(again).toEqual(made);
    expect(events.filter((phase) => phase !== "resolve image")).toEqual([]);

    const downloads: string[] = [];
    const shared = await rig.service({ cacheDir }).resolve(second, {
      progress: (event) => {
        if (event.phase === "download layer" && event.item !== undefined) downloads.push(event.item);
      },
    });
    expect(shared.lowers[0]).toEqual(made.lowers[0]!);
    expect(new Set(downloads).size).toBe(1);

    await truncate(made.lowers[1]!.file, made.lowers[1]!.size! - 512);
    const repaired = await rig.service({ cacheDir }).resolve(first);
    expect(repaired.lowers).toEqual(made.lowers);
    expect(Bun.file(made.lowers[1]!.file).size).toBe(made.lowers[1]!.size!);
  });

  test("by digest, without the registry once it is there", async () => {
    const image = buildImage({ layers: layers([file("pinned")]) });
    await push(image);
    await using other = await startRegistry();
    await pushImage(other.url, "some/where", "x", image);
    const reference = `${other.host}/some/where@${image.descriptor.digest}`;
    const resolved = await rig.service().resolve(reference);
    expect(resolved).toMatchObject({ reference, manifestDigest: image.descriptor.digest });
    await other[Symbol.asyncDispose]();
    expect(await rig.service().resolve(reference)).toEqual(resolved);
  });

  test("concurrent resolves share the work", async () => {
    const reference = await push(
      buildImage({ layers: layers([file("s", Buffer.alloc(2 << 20, "s"))], [file("t")]) }),
    );
    const service = rig.service({ cacheDir: join(rig.directory, "cache-shared") });
    let downloads = 0;
    const progress = (event: { phase: string; doneBytes?: number; totalBytes?: number }) => {
      if (event.phase === "convert layer" && event.doneBytes === event.totalBytes) downloads++;
    };
    const leaving = new AbortController();
    const all = [1, 2, 3].map(() => service.resolve(reference, { progress }));
    const left = rejection(service.resolve(reference, { signal: leaving.signal }));
    leaving.abort(new Error("changed my mind"));
    const images = await Promise.all(all);
    expect(images[1]).toEqual(images[0]!);
    expect(images[2]).toEqual(images[0]!);
    expect(downloads).toBeGreaterThan(0);
    expect((await left).message).toBe("changed my mind");
  });

  test("an abort ends the work and leaves nothing", async () => {
    const content = Buffer.alloc(24 << 20, "abort");
    const reference = await push(
      buildImage({ layers: [{ entries: [file("s", content)], compression: "none" }] }),
    );
    const cacheDir = join(rig.directory, "cache-abort");
    for (const phase of ["download layer", "convert layer"]) {
      const controller = new AbortController();
      const work = rig.service({ cacheDir }).resolve(reference, {
        signal: controller.signal,
        progress: (event) => {
          if (event.phase === phase) controller.abort(new Error("enough"));
        },
      });
      expect((await rejection(work)).message).toBe("enough");
      await cacheIsClean(cacheDir);
      expect(await readdir(join(cacheDir, "commits"))).toEqual([]);
    }
  });

  test("FR-71: indexes: platform picked, attestations skipped, nesting followed", async () => {
    const mine = buildImage({ layers: layers([file("mine")]) });
    const other = buildImage({ layers: layers([file("other")]), architecture: "s390x" });
    const attestation = buildImage({
      layers: layers([file("attestation")]),
      architecture: "unknown",
      os: "unknown",
    });
    const index = buildIndex([attestation, other, mine]);
    const image = await rig.service().resolve(await push(index));
    expect(image.manifestDigest).toBe(mine.descriptor.digest);
    const nested = buildIndex([buildIndex([other]), buildIndex([buildIndex([mine])])]);
    expect((await rig.service().resolve(await push(nested))).manifestDigest).toBe(mine.descriptor.digest);

    const none = await rejection(rig.service().resolve(await push(buildIndex([other, attestation]))));
    expect(none).toMatchObject({ code: "image_no_platform", status: 400 });
    expect(none.message).toContain(`no linux/${hostArchitecture()} in the image; found: linux/s390x`);
    const single = await rejection(rig.service().resolve(await push(other)));
    expect(single).toMatchObject({ code: "image_no_platform" });

    let deep = buildIndex([mine]);
    for (let level = 0; level < 4; level++) deep = buildIndex([deep]);
    expect(await rejection(rig.service().resolve(await push(deep)))).toMatchObject({
      code: "image_unsupported",
    });
  });

  test("not found, unreachable, unsupported layer types, conversion off", async () => {
    const service = rig.service();
    expect(await rejection(service.resolve(`${registry.host}/test/image:nope`))).toMatchObject({
      code: "image_not_found",
      status: 404,
    });
    expect(await rejection(service.resolve(`${registry.host}/no/such:x`))).toMatchObject({
      code: "image_not_found",
    });
    const unreachable = await rejection(
      rig.service({ retry: { attempts: 2, baseDelayMs: 1 } }).resolve("127.0.0.1:1/a/b:c"),
    );
    expect(unreachable).toMatchObject({ code: "image_registry_unreachable", status: 502 });
    const odd = buildImage({ layers: [{ entries: [], mediaType: "application/vnd.example.layer" }] });
    expect(await rejection(service.resolve(await push(odd)))).toMatchObject({ code: "image_unsupported" });
    const turbo = buildImage({
      layers: [
        { entries: [], annotations: { "containerd.io/snapshot/overlaybd/version": "0.1.0-turbo.ociv1" } },
      ],
    });
    expect((await rejection(service.resolve(await push(turbo)))).message).toContain("turboOCI");
    const plain = await push(buildImage({ layers: layers([file("x")]) }));
    expect(await rejection(rig.service({ convertStandardOci: false }).resolve(plain))).toMatchObject({
      code: "image_invalid_reference",
    });
  });

  test("overlaybd layers are used as they are", async () => {
    const made = await rig
      .service()
      .resolve(await push(buildImage({ layers: layers([file("native", "n")], [file("two")]) })));
    const native = buildImage({
      layers: made.lowers.map((lower) => {
        const annotations = { "containerd.io/snapshot/overlaybd/blob-digest": lower.digest! };
        return { tar: readFileSync(lower.file), compression: "none", annotations } as const;
      }),
    });
    const cacheDir = join(rig.directory, "cache-native");
    const image = await rig.service({ cacheDir, convertStandardOci: false }).resolve(await push(native));
    expect(image.lowers.map(({ digest, uuid }) => [digest, uuid])).toEqual(
      made.lowers.map(({ digest, uuid }) => [digest, uuid]),
    );
    expect(image.virtualSizeBytes).toBe(made.virtualSizeBytes);
    const root = await rig.mount(await rig.exportRaw(image.lowers));
    if (root !== undefined) expect(tree(root)).toEqual(["native", "two"]);

    const mixed = buildImage({
      layers: [
        { entries: [file("x")] },
        {
          tar: readFileSync(made.lowers[0]!.file),
          compression: "none",
          mediaType: "application/vnd.x.overlaybd",
        },
      ],
    });
    expect((await rejection(rig.service().resolve(await push(mixed)))).message).toContain("mixes");
  });

  test("overlaybd images that are attached to an ordinary one are taken where the configuration says so", async () => {
    const made = await rig
      .service()
      .resolve(await push(buildImage({ layers: layers([file("attached", "a")]) })));
    const native = buildImage({
      config: { Env: ["ATTACHED=yes"] },
      layers: made.lowers.map(({ file: path, digest }) => ({
        tar: readFileSync(path),
        compression: "none" as const,
        annotations: { "containerd.io/snapshot/overlaybd/blob-digest": digest! },
      })),
    });
    const nativeReference = await push(native);
    const manifestDigest = async (reference: string) => {
      const at = `${registry.url}/v2/test/image/manifests/${reference.split(":").at(-1)}`;
      const accept = "application/vnd.oci.image.manifest.v1+json";
      const reply = await fetch(at, { headers: { accept } });
      const bytes = new Uint8Array(await reply.arrayBuffer());
      return { digest: sha256(bytes), size: bytes.length, mediaType: accept };
    };
    /** Attaches manifests by the tag schema, as registries without the referrers endpoint have it. */
    const attach = async (
      subject: string,
      entries: readonly { reference: string; artifactType: string }[],
    ): Promise<void> => {
      const { digest } = await manifestDigest(subject);
      const manifests = await Promise.all(
        entries.map(async ({ reference, artifactType }) => ({
          ...(await manifestDigest(reference)),
          artifactType,
        })),
      );
      const type = "application/vnd.oci.image.index.v1+json";
      const reply = await fetch(`${registry.url}/v2/test/image/manifests/${digest.replace(":", "-")}`, {
        method: "PUT",
        headers: { "content-type": type },
        body: JSON.stringify({ schemaVersion: 2, mediaType: type, manifests }),
      });
      expect(reply.status).toBe(201);
    };
    const plain = () => push(buildImage({ layers: layers([file(`plain ${tags}`)]) }));
    const cacheDir = join(rig.directory, "cache-referrers");
    const service = (prefix: string) =>
      rig.service({ cacheDir, convertStandardOci: false, referrerPrefixes: ["nowhere/", prefix] });

    for (const artifactType of [
      "application/vnd.containerd.overlaybd.native.v1+json",
      "application/vnd.azure.artifact.streaming.v1",
    ]) {
      const subject = await plain();
      const other = { reference: await plain(), artifactType: "application/vnd.example.sbom" };
      await attach(subject, [other, { reference: nativeReference, artifactType }]);
      const image = await service(`${registry.host}/test/`).resolve(subject);
      expect(image.config.env).toEqual({ ATTACHED: "yes" });
      expect(image.lowers.map(({ digest }) => digest)).toEqual(made.lowers.map(({ digest }) => digest));
      // Elsewhere nobody looks.
      expect((await rejection(service("other.example/").resolve(subject))).code).toBe(
        "image_invalid_reference",
      );
    }
    // What is attached and is no overlaybd image, or is not there, leaves the image as it is.
    const subject = await plain();
    const wrong = {
      reference: await plain(),
      artifactType: "application/vnd.containerd.overlaybd.native.v1+json",
    };
    await attach(subject, [wrong]);
    const converted = rig.service({ cacheDir, referrerPrefixes: [registry.host] });
    expect((await converted.resolve(subject)).config.env).toEqual({});
    expect((await converted.resolve(await plain())).config.env).toEqual({});
  });

  test("search registries: the next is asked when one does not have the image", async () => {
    await using empty = await startRegistry();
    await pushImage(registry.url, "team/found", "v1", buildImage({ layers: layers([file("found")]) }));
    const searchRegistries = [empty.host, `${registry.host}/team`];
    const image = await rig.service({ searchRegistries }).resolve("found:v1");
    expect(image.reference).toBe(`${registry.host}/team/found:v1`);
    const missing = await rejection(rig.service({ searchRegistries }).resolve("lost:v1"));
    expect(missing).toMatchObject({ code: "image_not_found", status: 404 });
    expect(missing.message).toContain(`${empty.host}/lost:v1`);
    // No network is no word about the image; one registry that speaks is.
    const retry = { attempts: 1, baseDelayMs: 1 };
    const away = { searchRegistries: ["127.0.0.1:1", "127.0.0.2:1/team"], retry };
    const unreached = await rejection(rig.service(away).resolve("lost:v1"));
    expect(unreached).toMatchObject({ code: "image_registry_unreachable", status: 502 });
    expect(unreached.message).toContain("lost:v1: its registries cannot be reached: 127.0.0.1:1/lost:v1");
    expect(unreached).toMatchObject({ remediation: expect.stringMatching(/DNS and network .*HTTPS_PROXY/) });
    const half = { searchRegistries: ["127.0.0.1:1", empty.host], retry };
    expect((await rejection(rig.service(half).resolve("lost:v1"))).message).toContain("no registry has it");
    const refused = rig.service({ searchRegistries, allowedRegistries: ["docker.io"] }).resolve("found:v1");
    expect(await rejection(refused)).toMatchObject({ code: "image_invalid_reference", status: 400 });
  });

  test("logins: from the request and from a docker credential file; wrong ones are refused", async () => {
    await using locked = await startRegistry({ users: { user: "p:ä ss" } });
    const header = { authorization: `Basic ${Buffer.from("user:p:ä ss").toString("base64")}` };
    await pushImage(
      locked.url,
      "private/image",
      "v1",
      buildImage({ layers: layers([file("secret")]) }),
      header,
    );
    const reference = `${locked.host}/private/image:v1`;
    const anonymous = await rejection(rig.service().resolve(reference));
    expect(anonymous).toMatchObject({ code: "image_unauthorized", status: 400 });
    const wrong = rig.service().resolve(reference, { credentials: { username: "user", password: "no" } });
    expect(await rejection(wrong)).toMatchObject({ code: "image_unauthorized" });
    const dockerConfigPath = join(rig.directory, "docker.json");
    const auth = Buffer.from("user:p:ä ss").toString("base64");
    await Bun.write(dockerConfigPath, JSON.stringify({ auths: { [`http://${locked.host}/v1/`]: { auth } } }));
    const fromFile = await rig.service({ dockerConfigPath }).resolve(reference);
    const credentials = { username: "user", password: "p:ä ss" };
    expect(await rig.service().resolve(reference, { credentials })).toEqual(fromFile);
  });

  test("credential helpers: by host, the store, tokens; a helper that fails means no login", async () => {
    await using locked = await startRegistry({ users: { user: "helped" } });
    const header = { authorization: `Basic ${Buffer.from("user:helped").toString("base64")}` };
    await pushImage(locked.url, "helped", "v1", buildImage({ layers: layers([file("helped")]) }), header);
    const bin = join(rig.directory, "bin");
    await mkdir(bin);
    const helper = async (name: string, script: string) => {
      await Bun.write(join(bin, `docker-credential-${name}`), `#!/bin/sh\n${script}\n`);
      await chmod(join(bin, `docker-credential-${name}`), 0o755);
    };
    const seen = join(rig.directory, "helper-input");
    await helper("good", `cat > ${seen}; echo '{"ServerURL":"x","Username":"user","Secret":"helped"}'`);
    await helper("none", "echo 'credentials not found in native keychain'; exit 1");
    await helper("noise", "echo not-json");
    const before = process.env.PATH;
    process.env.PATH = `${bin}:${before}`;
    try {
      const dockerConfigPath = join(rig.directory, "helpers.json");
      const resolve = async (config: unknown) => {
        await Bun.write(dockerConfigPath, JSON.stringify(config));
        return rig.service({ dockerConfigPath }).resolve(`${locked.host}/helped:v1`);
      };
      const image = await resolve({ credHelpers: { [locked.host]: "good" }, credsStore: "noise" });
      expect(await Bun.file(seen).text()).toBe(locked.host);
      expect(await resolve({ credsStore: "good" })).toEqual(image);
      const auth = Buffer.from("user:helped").toString("base64");
      expect(await resolve({ credsStore: "none", auths: { [locked.host]: { auth } } })).toEqual(image);
      for (const name of ["none", "noise", "absent", "../escape"])
        expect(await rejection(resolve({ credsStore: name }))).toMatchObject({ code: "image_unauthorized" });
    } finally {
      process.env.PATH = before;
    }
  });

  test("docker archives on the server's disk: names, links between layers, damage", async () => {
    const tar = (layer: string) => makeTar([file(layer, layer)]);
    const [one, two] = [tar("one"), tar("two")];
    const config = (...diffs: Uint8Array[]) =>
      JSON.stringify({
        architecture: hostArchitecture(),
        os: "linux",
        config: { Cmd: ["/x"] },
        rootfs: { type: "layers", diff_ids: diffs.map(sha256) },
      });
    const archive = join(rig.directory, "saved.tar");
    const members = [
      file("a/layer.tar", one),
      file("b/layer.tar", two),
      { path: "c/layer.tar", type: "symlink" as const, link: "../a/layer.tar" },
      file("c1.json", config(one, two)),
      file("c2.json", config(two, one)),
      file(
        "manifest.json",
        JSON.stringify([
          { Config: "c1.json", RepoTags: ["app:1"], Layers: ["a/layer.tar", "b/layer.tar"] },
          {
            Config: "c2.json",
            RepoTags: ["docker.io/library/app:latest"],
            Layers: ["b/layer.tar", "c/layer.tar"],
          },
        ]),
      ),
    ];
    await Bun.write(archive, makeTar(members));
    const service = rig.service();
    const first = await service.resolve(`docker-archive:${archive}:app:1`);
    expect(first.config.cmd).toEqual(["/x"]);
    expect(first.lowers).toHaveLength(2);
    const latest = await service.resolve(`docker-archive:${archive}:app`);
    expect(latest.manifestDigest).not.toBe(first.manifestDigest);
    expect(await service.resolve(`docker-archive:${archive}:app:1@${first.manifestDigest}`)).toMatchObject({
      manifestDigest: first.manifestDigest,
    });
    const refused = async (reference: string) => (await rejection(service.resolve(reference))).message;
    expect(await refused(`docker-archive:${archive}`)).toContain("app:1");
    expect(await refused(`docker-archive:${archive}:other`)).toContain("no image other");
    expect(await refused("docker-archive:/nowhere.tar")).toContain("cannot read");
    expect(await refused("docker-archive:relative.tar")).toContain("absolute");
    const forbidden = rig.service({ allowLocalPaths: false }).resolve(`docker-archive:${archive}:app`);
    expect(await rejection(forbidden)).toMatchObject({ code: "image_invalid_reference" });
    const broken = makeTar([...members.slice(1, 5), members[5]!]);
    await Bun.write(join(rig.directory, "broken.tar"), broken);
    expect(await refused(`docker-archive:${join(rig.directory, "broken.tar")}:app:1`)).toContain(
      "a/layer.tar",
    );
    await Bun.write(join(rig.directory, "zipped.tar"), compress(makeTar(members), "gzip"));
    expect(await refused(`docker-archive:${join(rig.directory, "zipped.tar")}`)).toContain("compressed");
  });

  test("collection: unused layers and old images go; held, pinned and exported ones stay", async () => {
    const cacheDir = join(rig.directory, "collected");
    const gc = { capacityBytes: 1, highWatermark: 0.9, lowWatermark: 0.5, minAgeMs: 0 };
    const service = rig.service({ cacheDir, gc });
    const layout = join(rig.directory, "collected-layout");
    const shared = [file("base", "b")];
    const image = (name: string) => buildImage({ layers: layers(shared, [file(name, name)]) });
    await writeLayout(layout, { one: image("one"), two: image("two"), three: image("three") });
    const resolve = (name: string) => service.resolve(`oci-layout:${layout}:${name}`);
    const [one, two, three] = [await resolve("one"), await resolve("two"), await resolve("three")];
    const there = (image_: { lowers: readonly { file: string }[] }) =>
      image_.lowers.map(({ file: path }) => existsSync(path));
    using hold = service.hold([one.lowers[1]!.file]);
    const deviceId = "image-test-holder";
    await rig.blockClient.create({
      deviceId,
      image: { lowers: two.lowers, virtualSizeBytes: two.virtualSizeBytes },
      readOnly: true,
      exportKind: "nbd",
    });
    expect(await service.collect(new Set([three.lowers[1]!.file]))).toMatchObject({ images: 3, layers: 0 });
    expect([there(one), there(two), there(three)].flat()).not.toContain(false);
    await rig.blockClient.release(deviceId);
    hold[Symbol.dispose]();
    const freed = await service.collect(new Set([three.lowers[1]!.file]));
    expect(freed.layers).toBe(3);
    expect([there(one), there(two), there(three)]).toEqual([
      [false, false],
      [false, false],
      [false, true],
    ]);
    // What is gone is made again, from the same bytes to the same digests.
    expect(await resolve("one")).toEqual(one);
    expect(there(one)).toEqual([true, true]);
  });

  test("a layer whose bytes changed is not served", async () => {
    const cacheDir = join(rig.directory, "rotten");
    const layout = join(rig.directory, "rotten-layout");
    await writeLayout(layout, { image: buildImage({ layers: layers([file("rot", "content")]) }) });
    const resolve = () => rig.service({ cacheDir }).resolve(`oci-layout:${layout}:image`);
    const image = await resolve();
    const path = image.lowers[0]!.file;
    const bytes = readFileSync(path);
    const good = Buffer.from(bytes);
    bytes[bytes.length >> 1] = bytes[bytes.length >> 1]! ^ 0xff;
    await Bun.write(path, bytes);
    expect(await resolve()).toEqual(image);
    expect(readFileSync(path).equals(good)).toBe(true);
  });

  test("OCI layouts on the server's disk, only when allowed", async () => {
    const layout = join(rig.directory, "layout");
    const image = buildImage({ layers: layers([file("layout")]), config: { Cmd: ["/x"] } });
    await writeLayout(layout, { one: image, two: buildImage({ layers: layers([file("two")]) }) });
    const service = rig.service();
    const resolved = await service.resolve(`oci-layout:${layout}:one`);
    expect(resolved).toMatchObject({ manifestDigest: image.descriptor.digest, config: { cmd: ["/x"] } });
    const missing = await rejection(service.resolve(`oci-layout:${layout}:three`));
    expect(missing).toMatchObject({ code: "image_not_found" });
    expect(missing.message).toContain("one, two");
    expect(await rejection(service.resolve("oci-layout:/nowhere"))).toMatchObject({
      code: "image_not_found",
    });
    expect(await rejection(service.resolve("oci-layout:relative"))).toMatchObject({
      code: "image_invalid_reference",
    });
    const forbidden = rig.service({ allowLocalPaths: false }).resolve(`oci-layout:${layout}:one`);
    expect(await rejection(forbidden)).toMatchObject({ code: "image_invalid_reference" });

    const damaged = buildImage({ layers: layers([file("damaged", "content")]) });
    await writeLayout(layout, { damaged });
    const blob = join(layout, "blobs/sha256", damaged.layers[0]!.digest.slice(7));
    const bytes = readFileSync(blob);
    bytes[20] = bytes[20]! ^ 1;
    await Bun.write(blob, bytes);
    expect(await rejection(service.resolve(`oci-layout:${layout}:damaged`))).toMatchObject({
      code: "image_digest_mismatch",
      status: 502,
    });
    await truncate(blob, 20);
    expect(await rejection(service.resolve(`oci-layout:${layout}:damaged`))).toMatchObject({
      code: "image_truncated",
    });
    await cacheIsClean();
  });

  test("a full disk ends the pull with its own error and frees what was used", async () => {
    const small = join(rig.directory, "small");
    await mkdir(small);
    const mounted = await tryCommand(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small]);
    if (mounted.exitCode !== 0) {
      console.warn(`tmpfs cannot be mounted here, the full disk is not tried: ${mounted.stderr.trim()}`);
      return;
    }
    try {
      const content = crypto.getRandomValues(new Uint8Array(65_536));
      // While downloading: incompressible. While converting: the blob is small, its content is not.
      const random = Buffer.concat(Array.from({ length: 180 }, () => content));
      const big = { entries: [file("r", random)], compression: "none" } as const;
      const bomb = { entries: [file("z", Buffer.alloc(60 << 20))] };
      for (const layer of [big, bomb]) {
        const cacheDir = join(small, "cache");
        const error = await rejection(
          rig.service({ cacheDir }).resolve(await push(buildImage({ layers: [layer] }))),
        );
        expect({ code: error.code, status: error.status, message: error.message }).toMatchObject({
          code: "disk_full",
          status: 507,
        });
        await cacheIsClean(cacheDir);
        expect(await readdir(join(cacheDir, "commits"))).toEqual([]);
      }
    } finally {
      await runCommand(["umount", small]);
    }
  });

  test("leftovers of a killed process are removed at start: files and block devices", async () => {
    const cacheDir = join(rig.directory, "cache-left");
    await Bun.write(join(cacheDir, "staging/dead/upper.data"), "x");
    const made: string[] = [];
    const client = rig.blockClient;
    const interrupted = createImageService(serviceOptions(cacheDir), {
      ext4Helper: EXT4_HELPER,
      log: rig.log,
      blockClient: {
        create: (device) => {
          made.push(device.deviceId);
          return client.create(device);
        },
        // As if killed before it could let go.
        release: async () => undefined,
        get: (id) => client.get(id),
        list: () => client.list(),
        flush: (id) => client.flush(id),
        restack: (id, sealed, fresh) => client.restack(id, sealed, fresh),
        swapLowers: (id, swaps) => client.swapLowers(id, swaps),
        stats: () => client.stats(),
        shutdown: () => client.shutdown(),
        [Symbol.asyncDispose]: async () => undefined,
      },
    });
    expect(await readdir(join(cacheDir, "staging"))).toEqual([]);
    // The device still holds the upper, so the conversion ends there.
    const reference = await push(buildImage({ layers: layers([file("left")]) }));
    expect(await rejection(interrupted.resolve(reference))).toMatchObject({ code: "upper_in_use" });
    const left = async () =>
      (await client.list()).map(({ deviceId }) => deviceId).filter((id) => made.includes(id));
    expect(await left()).toEqual(made);
    const next = createImageService(serviceOptions(cacheDir), {
      blockClient: client,
      ext4Helper: EXT4_HELPER,
      log: rig.log,
    });
    await next[Symbol.asyncDispose]();
    expect(await left()).toEqual([]);
  });

  test("a helper that cannot run or dies is reported", async () => {
    const reference = await push(buildImage({ layers: layers([file("h", Buffer.alloc(1 << 20))]) }));
    for (const [ext4Helper, words] of [
      ["/nonexistent/aenv-ext4", "cannot run"],
      ["/bin/false", "cannot be applied"],
    ] as const) {
      const cacheDir = join(rig.directory, "cache-helper");
      await using service = createImageService(serviceOptions(cacheDir), {
        blockClient: rig.blockClient,
        ext4Helper,
        log: rig.log,
      });
      expect((await rejection(service.resolve(reference))).message).toContain(words);
      await cacheIsClean(cacheDir);
    }
  });
});
