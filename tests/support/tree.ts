import { lstatSync, readdirSync, readFileSync, readlinkSync } from "node:fs";
import { tryCommand } from "../../src/lib/command.ts";
import type { LayerInput } from "./oci.ts";

/* File trees with all that an image says about them, as this machine sees them, and how they are compared. */

export interface TreeEntry {
  /** `file`, `directory`, `symlink`, `fifo`, `block`, `character`, `socket`. */
  readonly type: string;
  /** Permission bits, set-id and sticky ones too. */
  readonly mode: number;
  /** `UID:GID` */
  readonly owner: string;
  readonly links: number;
  /** Nanoseconds since 1970. */
  readonly mtime: string;
  /** Files: size and SHA-256. Links: the target. Devices: the number. */
  readonly detail: string;
  /** `NAME=0xHEX`, sorted. */
  readonly xattrs: string;
  readonly inode: bigint;
}

/** By path below the root, as latin1: names are bytes. The root's is empty. Sorted by path. */
export type Tree = ReadonlyMap<string, TreeEntry>;

export function sortedTree(entries: Iterable<readonly [string, TreeEntry]>): Map<string, TreeEntry> {
  return new Map([...entries].sort(([a], [b]) => (a < b ? -1 : 1)));
}

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

/** The tree at a path, without `lost+found`. Needs root and getfattr. */
export async function readTree(at: string): Promise<Map<string, TreeEntry>> {
  const xattrs = await attributes(at);
  const tree = new Map<string, TreeEntry>();
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
      links: Number(info.nlink),
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
  return sortedTree(tree);
}

export interface CompareOptions {
  /** Names whose times the layers do not say: directories that were made, or changed without an entry. */
  readonly untimed: ReadonlySet<string>;
}

/**
 * A line per entry, for comparison. Names of one inode are known by the first of them; link counts of directories
 * are left out: file systems have rules of their own for them.
 */
export function describeTree(tree: Tree, options: CompareOptions): string[] {
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

/** Directories of a tree whose times the layers it was made of do not say. */
export function untimedDirectories(layers: readonly LayerInput[], tree: Tree): Set<string> {
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
