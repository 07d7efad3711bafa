import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { runCommand } from "../../src/lib/command.ts";
import { createAgentClient } from "../../src/sandbox/index.ts";
import type { LayerRef } from "../../src/storage/overlaybd/index.ts";
import { listArchive, selectSource } from "../../src/template/archive.ts";
import { copyIntoGuest } from "../../src/template/copy.ts";
import { MAX_DRIVES } from "../../src/vmm/qemu/command.ts";
import type { VmDrive, VmmDriver } from "../../src/vmm/types.ts";
import { bootGuest } from "./guest-vm.ts";
import { makeTar } from "./oci.ts";
import { holdPool } from "./pool.ts";
import { type RealNode, startRealNode } from "./real-node.ts";
import { sortedTree, type Tree, type TreeEntry } from "./tree.ts";

/*
 * Images as a process in a guest sees them. The first image of a guest is its root file system, others are disks of
 * their own: a real machine, its kernel's ext4 driver, and a static program that reads all there is to know about
 * every entry (treelist.c), put there by the same means as the files of a COPY step.
 */

export const IMAGES_PER_GUEST = MAX_DRIVES;

export interface GuestImage {
  readonly lowers: readonly LayerRef[];
  readonly virtualSizeBytes: number;
}

export interface GuestTree {
  readonly tree: Tree;
  /** The guest was started from it; else it was a second disk. */
  readonly asRoot: boolean;
}

/** What a guest's first program makes in the root file system where the image lacks it (docs/agent.md). */
const MADE_AT_BOOT = ["dev", "etc", "etc/hosts", "etc/resolv.conf", "proc", "run", "sys", "tmp"];
const PROGRAM = "/run/treelist/program";

export interface TreeGuests extends AsyncDisposable {
  /** A guest is booted with the images, at most `IMAGES_PER_GUEST`; their trees in the same order. */
  list(images: readonly GuestImage[]): Promise<GuestTree[]>;
}

/** A node for such guests. `deps`: of `testDeps()`. Needs root, musl-gcc, QEMU and a guest kernel. */
export async function startTreeGuests(deps: string, workDir: string): Promise<TreeGuests> {
  const archive = join(workDir, "treelist.tar");
  const program = join(workDir, "treelist");
  const source = join(import.meta.dir, "treelist.c");
  await runCommand(["musl-gcc", "-std=c11", "-O2", "-static", "-s", "-D_GNU_SOURCE", "-o", program, source], {
    timeoutMs: 60_000,
  });
  const content = new Uint8Array(await Bun.file(program).arrayBuffer());
  writeFileSync(archive, makeTar([{ path: "program", content, mode: 0o755 }]));
  let extra: readonly VmDrive[] = [];
  const { pool, held } = holdPool();
  const node = await startRealNode({
    deps,
    pool,
    vmm: (driver) => withDrives(driver, () => extra),
  });
  let guests = 0;
  return {
    async list(images) {
      const [first, ...others] = images;
      if (first === undefined) return [];
      const guest = `tree-guest-${guests++}`;
      await using stack = new AsyncDisposableStack();
      const drives: VmDrive[] = [];
      for (const [index, { lowers, virtualSizeBytes }] of others.entries()) {
        const deviceId = `${guest}-image${index}`;
        stack.defer(() => node.blockd.client.release(deviceId));
        const { socketPath, exportName } = await node.blockd.client.create({
          deviceId,
          image: { lowers, virtualSizeBytes },
          readOnly: true,
          exportKind: "nbd",
        });
        if (socketPath === undefined || exportName === undefined)
          throw new Error("a device without a socket");
        drives.push({
          driveId: `image${index}`,
          readOnly: true,
          backend: { kind: "nbd", socketPath, exportName },
        });
      }
      extra = drives;
      const vm = stack.use(await bootGuest(node, guest, first));
      const agent = createAgentClient(vm.hostAddress);
      const never = new AbortController().signal;
      const { members } = await listArchive(archive, { maxEntries: 10, maxContentBytes: 1 << 24 }, never);
      const request = { archive, source: selectSource(members, "program"), target: PROGRAM };
      await copyIntoGuest(
        agent,
        vm.hostAddress,
        { ...request, mustBeDirectory: false, uid: 0, gid: 0 },
        { timeoutMs: 60_000, signal: never },
      );
      const chunks: Uint8Array[] = [];
      const outcome = await agent.run({
        cmd: PROGRAM,
        args: ["/run/treelist/tree", "/", ...drives.map(({ driveId }) => driveId)],
        cwd: "/",
        user: "root",
        timeoutMs: 240_000,
        onStdout: (chunk) => void chunks.push(chunk.slice()),
      });
      if (outcome.exitCode !== 0) throw new Error(`treelist: ${outcome.exitCode}: ${outcome.stderr}`);
      const trees = parseListing(Buffer.concat(chunks).toString("latin1"));
      return ["/", ...drives.map(({ driveId }) => driveId)].map((name, index) => {
        const tree = trees.get(name);
        if (tree === undefined) throw new Error(`the guest has not listed ${name}`);
        return { tree, asRoot: index === 0 };
      });
    },
    [Symbol.asyncDispose]: async () => {
      await endNode(node);
      held[Symbol.dispose]();
    },
  };
}

async function endNode(node: RealNode): Promise<void> {
  await node[Symbol.asyncDispose]();
  for (const dir of [node.home, node.runtimeDir]) await runCommand(["rm", "-rf", dir]);
}

/** The driver, with more drives for what it starts. */
function withDrives(driver: VmmDriver, extra: () => readonly VmDrive[]): VmmDriver {
  return {
    get identity() {
      return driver.identity;
    },
    maxDrives: driver.maxDrives,
    checkKernelArgs: (args) => driver.checkKernelArgs(args),
    probe: () => driver.probe(),
    launch: (spec) => driver.launch({ ...spec, drives: [...spec.drives, ...extra()] }),
    restore: (spec) => driver.restore({ ...spec, drives: [...spec.drives, ...extra()] }),
    adopt: (reference) => driver.adopt(reference),
  };
}

interface Line {
  readonly tree?: string;
  readonly end?: string;
  readonly entries?: number;
  readonly name: string;
  readonly type: string;
  readonly mode: number;
  readonly uid: number;
  readonly gid: number;
  readonly links: number;
  readonly size: number;
  readonly device: number;
  readonly inode: string;
  readonly mtime: readonly [seconds: string, nanoseconds: number];
  readonly sha256?: string;
  readonly target?: string;
  readonly xattrs: Readonly<Record<string, string>>;
}

const text = (hex: string): string => Buffer.from(hex, "hex").toString("latin1");

function entryOf(line: Line): TreeEntry {
  const [seconds, nanoseconds] = line.mtime;
  return {
    type: line.type,
    mode: line.mode,
    owner: `${line.uid}:${line.gid}`,
    links: line.links,
    mtime: String(BigInt(seconds) * 1_000_000_000n + BigInt(nanoseconds)),
    detail:
      line.type === "file"
        ? `${line.size} ${line.sha256}`
        : line.type === "symlink"
          ? text(line.target ?? "")
          : line.type === "block" || line.type === "character"
            ? String(line.device)
            : "",
    xattrs: Object.entries(line.xattrs)
      .map(([name, value]) => `${text(name)}=0x${value}`)
      .sort()
      .join(" "),
    inode: BigInt(line.inode),
  };
}

/** The program's output as trees by their names, whole ones only, without `lost+found`. */
function parseListing(listing: string): Map<string, Tree> {
  const trees = new Map<string, Tree>();
  let entries: [string, TreeEntry][] = [];
  for (const row of listing.split("\n")) {
    if (row === "") continue;
    const line = JSON.parse(row) as Line;
    if (line.tree !== undefined) entries = [];
    else if (line.end === undefined) entries.push([text(line.name), entryOf(line)]);
    else {
      if (line.entries !== entries.length)
        throw new Error(`${line.end}: ${entries.length} of ${line.entries}`);
      assertLinkCounts(entries);
      trees.set(line.end, sortedTree(entries.filter(([name]) => name !== "lost+found")));
    }
  }
  return trees;
}

/** A directory of ext4 has a link for itself, one from above and one from each directory in it. */
function assertLinkCounts(entries: readonly (readonly [string, TreeEntry])[]): void {
  const within = new Map<string, number>();
  for (const [name, { type }] of entries) {
    if (type !== "directory" || name === "") continue;
    const parent = name.slice(0, Math.max(name.lastIndexOf("/"), 0));
    within.set(parent, (within.get(parent) ?? 0) + 1);
  }
  for (const [name, { type, links }] of entries) {
    if (type !== "directory") continue;
    const expected = 2 + (within.get(name) ?? 0);
    if (links !== expected)
      throw new Error(`${JSON.stringify(name)} has ${links} links instead of ${expected}`);
  }
}

/** A guest's root file system without what its start added; names of directories whose time that changed. */
export function asInTheImage(guest: Tree, image: Tree): { readonly tree: Tree; readonly touched: string[] } {
  const tree = new Map(guest);
  const touched = new Set<string>();
  for (const name of MADE_AT_BOOT) {
    if (image.has(name) || !tree.delete(name)) continue;
    touched.add(name.slice(0, Math.max(name.lastIndexOf("/"), 0)));
  }
  return { tree, touched: [...touched] };
}
