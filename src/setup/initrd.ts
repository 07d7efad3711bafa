import { mkdir, readdir, readFile, rm, stat } from "node:fs/promises";
import { join } from "node:path";
import { writeDurable } from "../lib/durable.ts";
import { type CpioEntry, writeCpio } from "./cpio.ts";
import { regularFileSize, sha256Bytes } from "./files.ts";

export interface InitrdModule {
  /** File name, e.g. `virtio_mmio.ko`. */
  readonly name: string;
  readonly path: string;
}

/** How many superseded archives stay: a VMM that is being started may still be about to open one. */
const KEPT = 3;

/**
 * QEMU's microvm loads the archive below the end of memory, from a page's start, and its firmware puts the ACPI tables
 * at that end: what lies between is 4096 bytes less the rest of the archive's size. A full page has room for the
 * tables of all devices there can be; less is overwritten without a word, and a guest finds no device.
 */
const PAGE = 4096;

/**
 * The initial file system: the guest agent as `/init`, modules flat in `/lib/modules` with their load
 * order, and `/dev/console`. Uncompressed: it is some hundred KiB, and unpacking costs more than reading. Its size is
 * a multiple of 4096 bytes.
 */
export function buildInitrd(
  init: Uint8Array,
  modules: readonly { name: string; content: Uint8Array }[],
): Uint8Array {
  const directory = (path: string): CpioEntry => ({ kind: "directory", path, mode: 0o755 });
  const archive = writeCpio([
    directory("dev"),
    { kind: "character-device", path: "dev/console", mode: 0o600, major: 5, minor: 1 },
    { kind: "character-device", path: "dev/null", mode: 0o666, major: 1, minor: 3 },
    directory("proc"),
    directory("sys"),
    directory("run"),
    directory("mnt"),
    directory("lib"),
    directory("lib/modules"),
    {
      kind: "file",
      path: "lib/modules/order",
      mode: 0o644,
      content: Buffer.from(modules.map((module) => `${module.name}\n`).join("")),
    },
    ...modules.map(
      (module): CpioEntry => ({
        kind: "file",
        path: `lib/modules/${module.name}`,
        mode: 0o644,
        content: module.content,
      }),
    ),
    { kind: "file", path: "init", mode: 0o755, content: init },
  ]);
  const padded = new Uint8Array(Math.ceil(archive.length / PAGE) * PAGE);
  padded.set(archive); // zeros after the end of a cpio archive are left out by the kernel
  return padded;
}

/** Name of the archive these parts make, without building it: sizes and hashes are of the parts. */
export function initrdName(initSha256: string, moduleSha256s: readonly string[]): string {
  const key = ["layout 2", initSha256, ...moduleSha256s].join("\n");
  return `initrd-${sha256Bytes(Buffer.from(key)).slice(0, 16)}.img`;
}

/** Path of the archive in `dir` for this agent and these modules; built when it is not there. */
export async function ensureInitrd(options: {
  readonly dir: string;
  readonly init: Uint8Array;
  readonly modules: readonly (InitrdModule & { readonly sha256: string })[];
}): Promise<{ readonly path: string; readonly built: boolean }> {
  const name = initrdName(
    sha256Bytes(options.init),
    options.modules.map((module) => module.sha256),
  );
  const path = join(options.dir, name);
  if (regularFileSize(path) !== undefined) return { path, built: false };
  const modules = await Promise.all(
    options.modules.map(async (module) => ({ name: module.name, content: await readFile(module.path) })),
  );
  await mkdir(options.dir, { recursive: true });
  await writeDurable(path, buildInitrd(options.init, modules), 0o644);
  await removeSuperseded(options.dir, name);
  return { path, built: true };
}

async function removeSuperseded(dir: string, current: string): Promise<void> {
  const others: { path: string; mtimeMs: number }[] = [];
  for (const name of await readdir(dir)) {
    if (!/^initrd-[0-9a-f]{16}\.img$/.test(name) || name === current) continue;
    const path = join(dir, name);
    others.push({ path, mtimeMs: (await stat(path)).mtimeMs });
  }
  others.sort((a, b) => b.mtimeMs - a.mtimeMs);
  for (const { path } of others.slice(KEPT)) await rm(path, { force: true });
}
