import { afterAll, beforeAll, expect, test } from "bun:test";
import { lstatSync, mkdirSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { runCommand, tryCommand } from "../../src/lib/command.ts";
import { asInTheImage, type GuestImage, IMAGES_PER_GUEST, startTreeGuests } from "../support/guest-trees.ts";
import { type ImageRig, startImageRig } from "../support/image-rig.ts";
import {
  buildImage,
  type LayerInput,
  makeTar,
  type TarInput,
  tarHeader,
  writeLayout,
} from "../support/oci.ts";
import { testDeps } from "../support/real-node.ts";
import { describeTree, readTree, type Tree, type TreeEntry, untimedDirectories } from "../support/tree.ts";
import { CASES, COMPARISONS, type Comparison, file, link, root, type TortureCase } from "./torture-cases.ts";

/*
 * Images that are hard to get right. Each is converted, and its tree compared, entry by entry, with what others make
 * of the same layers:
 *   umoci    `umoci unpack` as root
 *   overlay  GNU tar unpacks each layer by itself, whiteouts become those of overlayfs, the kernel merges them
 *   archive  skopeo rewrites the image as a docker archive, which is converted in turn
 * It is read twice: mounted on this machine, and by a program in a guest, which sees it as its root file system or as
 * a second disk. Compared: type, permission bits, owner, size, content, link target, device, modification time, link
 * count and which names share an inode, extended attributes. The outcome is printed as a table.
 * With AENV_TEST_LONG=1 every image is the root file system of a guest of its own (`make torture`).
 */

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

/** What a converted image is compared with in guests. */
interface Reference {
  readonly by: Comparison | "this machine";
  readonly tree: Tree;
  /** Names whose times mean nothing. */
  readonly untimed: ReadonlySet<string>;
  readonly withoutRoot: boolean;
}

interface Converted {
  readonly torture: TortureCase;
  readonly layers: number;
  readonly image: GuestImage;
  readonly references: readonly Reference[];
}

let rig: ImageRig;
const missing = ["umoci", "skopeo", "getfattr", "e2fsck"].filter((name) => Bun.which(name) === null);
const able = missing.length === 0 && process.getuid?.() === 0;
if (!able) console.warn(`skipped: the torture images need root and: ${missing.join(", ") || "nothing else"}`);
const deps = able ? testDeps() : undefined;
const long = process.env.AENV_TEST_LONG === "1";
const converted: Converted[] = [];
const seen = new Map<TortureCase, string>();
const refusals: string[] = [];
let images = 0;

beforeAll(async () => {
  if (able) rig = await startImageRig();
}, 120_000);

function printTable(): void {
  if (converted.length === 0) return;
  const cell = (text: string | undefined) => (text ?? "-").padEnd(8);
  const head = `${"image".padEnd(66)} layers entries  ${[...COMPARISONS, "mounted", "guest"].map(cell).join(" ")} e2fsck`;
  const rows = converted.map(({ torture, layers, references }) => {
    const same = COMPARISONS.map((name) =>
      cell(references.some(({ by }) => by === name) ? "same" : undefined),
    );
    const entries = references[0]!.tree.size;
    return [
      torture.name.padEnd(66),
      String(layers).padStart(6),
      `${String(entries).padStart(7)} `,
      ...same,
      cell("same"),
      cell(seen.get(torture)),
      "clean",
    ].join(" ");
  });
  console.log(["", head, "-".repeat(head.length), ...rows, ...refusals, ""].join("\n"));
  console.log(
    "guest: root = as a root file system, disk = as a second disk; each the same as all others in the row",
  );
}

afterAll(async () => {
  printTable();
  await rig?.[Symbol.asyncDispose]();
}, 120_000);

async function umociTree(layout: string, at: string): Promise<Map<string, TreeEntry>> {
  await runCommand(["umoci", "unpack", "--image", `${layout}:image`, at], { timeoutMs: 120_000 });
  return readTree(join(at, "rootfs"));
}

async function overlayTree(layers: readonly LayerInput[], at: string): Promise<Map<string, TreeEntry>> {
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
  // A merged directory shows the topmost layer's metadata, also where that layer says nothing about it.
  const rootSaid = layers.at(-1)!.entries?.some(({ path }) => path === "./") ?? false;
  const references: Reference[] = [
    { by: "this machine", tree: ours, untimed: new Set(), withoutRoot: false },
  ];
  for (const by of COMPARISONS) {
    if (torture.without?.[by] !== undefined) continue;
    let tree: Tree;
    if (by === "umoci") tree = await umociTree(layout, join(at, "umoci"));
    else if (by === "overlay") tree = await overlayTree(layers, join(at, "overlay"));
    else tree = await archiveTree(layout, join(at, "image.tar"));
    const more = torture.timedBefore?.[by] ?? [];
    const reference = {
      by,
      tree,
      untimed: new Set([...untimed, ...more]),
      withoutRoot: by === "overlay" && !rootSaid,
    };
    expectSame(torture, "mounted here", ours, reference);
    references.push(reference);
  }
  converted.push({ torture, layers: layers.length, image: resolved, references });
}

async function archiveTree(layout: string, archive: string): Promise<Tree> {
  const to = `docker-archive:${archive}:torture:v1`;
  await runCommand(["skopeo", "--insecure-policy", "copy", "-q", `oci:${layout}:image`, to], {
    timeoutMs: 60_000,
  });
  const again = await rig.service().resolve(to);
  const mounted = await rig.mount(await rig.exportRaw(again.lowers));
  return await readTree(mounted!);
}

function expectSame(
  torture: TortureCase,
  where: string,
  tree: Tree,
  reference: Reference,
  touched: readonly string[] = [],
): void {
  const options = { untimed: new Set([...reference.untimed, ...touched]) };
  const described = (from: Tree) =>
    describeTree(reference.withoutRoot ? new Map([...from].filter(([name]) => name !== "")) : from, options);
  const what = { image: torture.name, where, by: reference.by };
  expect({ ...what, tree: described(tree) }).toEqual({ ...what, tree: described(reference.tree) });
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
  120_000,
);

test.skipIf(!able)("hostile layers are refused with the reason, and leave nothing", async () => {
  const service = rig.service();
  const refused = async (entries: readonly TarInput[] | Uint8Array, reason: RegExp): Promise<void> => {
    const layout = join(rig.directory, `hostile-${images++}`);
    const layer: LayerInput =
      entries instanceof Uint8Array ? { tar: entries } : { entries: entries as TarInput[] };
    await writeLayout(layout, { image: buildImage({ layers: [layer] }) });
    await expect(service.resolve(`oci-layout:${layout}:image`)).rejects.toThrow(reason);
    refusals.push(`refused: ${reason.source}`);
  };
  await refused([file("../../etc/passwd")], /leaves the root/);
  await refused([link("x", "missing")], /missing|target/);
  await refused([file(".wh.")], /whiteout of nothing/);
  await refused(tarHeader({ name: Buffer.from("cut"), typeFlag: "0", size: 5000 }), /ends within an entry/);
  await refused([file("n".repeat(256))], /too long|name/i);
  expect(readdirSync(join(rig.directory, "cache/staging"))).toEqual([]);
});

test.skipIf(deps === undefined)(
  "a guest sees of every image what the others see",
  async () => {
    expect(converted.length).toBe(CASES.length + 4);
    await using guests = await startTreeGuests(deps!, rig.directory);
    const perGuest = long ? 1 : Math.ceil(converted.length / Math.ceil(converted.length / IMAGES_PER_GUEST));
    for (let at = 0; at < converted.length; at += perGuest) {
      const batch = converted.slice(at, at + perGuest);
      const trees = await guests.list(batch.map(({ image }) => image));
      for (const [index, { tree, asRoot }] of trees.entries()) {
        const { torture, references } = batch[index]!;
        const image = asRoot ? asInTheImage(tree, references[0]!.tree) : { tree, touched: [] };
        torture.check?.(image.tree);
        for (const reference of references)
          expectSame(torture, "in a guest", image.tree, reference, image.touched);
        seen.set(torture, asRoot ? "root" : "disk");
      }
    }
    expect(seen.size).toBe(converted.length);
  },
  long ? 900_000 : 240_000,
);
