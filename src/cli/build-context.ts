import { createReadStream } from "node:fs";
import { lstat, readdir, readFile, readlink, realpath, stat } from "node:fs/promises";
import { join, posix, relative, sep } from "node:path";
import { createGzip } from "node:zlib";
import ignoring, { type Ignore } from "@balena/dockerignore";
import { Header, Pax } from "tar";
import { Glob } from "../lib/glob.ts";
import { CliError } from "./command.ts";
import type { ContextFiles } from "./dockerfile.ts";

/** The directory that COPY and ADD take files from, without what .dockerignore leaves out. */

interface Entry {
  /** In the archive. */
  readonly path: string;
  readonly type: "file" | "directory" | "symlink";
  readonly mode: number;
  readonly mtimeMs: number;
  readonly size: number;
  /** Of a link. */
  readonly target?: string;
  /** File on disk, or the content itself. */
  readonly source?: string | Uint8Array;
}

/** What one COPY step sends: an archive laid out as it shall lie below the target. */
export interface ContextArchive {
  /** The step's source within the archive. */
  readonly source: string;
  readonly entries: readonly Entry[];
  /** Of everything but times: the server keeps archives and finished steps under it. */
  readonly hash: string;
  readonly bytes: number;
}

/** A source's path in the context, and where that leads. */
interface Found {
  readonly path: string;
  readonly real: string;
  readonly directory: boolean;
}

const BLOCK = 512;
const TOP = "content";

function has(path: string): Promise<string | undefined> {
  return readFile(path, "utf8").catch((error: NodeJS.ErrnoException) => {
    if (error.code === "ENOENT" || error.code === "ENOTDIR") return undefined;
    throw new CliError(`cannot read ${path}`, { cause: error });
  });
}

/** gzip, bzip2, xz, zstd; a skippable frame of zstd may be numbered. */
const COMPRESSED = ["1f8b", "425a68", "fd377a585a", "28b52ffd"];
const SKIPPABLE = /^5[0-9a-f]2a4d18/;

/** Whether a file begins like a tar or something compressed; whether it is a tar the server finds out. */
async function mayBeArchive(file: string): Promise<boolean> {
  if (!(await stat(file)).isFile()) return false;
  const head = Buffer.from(await Bun.file(file).slice(0, BLOCK).arrayBuffer());
  const hex = head.toString("hex");
  if (COMPRESSED.some((magic) => hex.startsWith(magic)) || SKIPPABLE.test(hex)) return true;
  return head.length === BLOCK && new Header(head).cksumValid;
}

const SPECIAL = /[*?[\\]/;

export class BuildContext {
  readonly #root: string;
  readonly #ignore: Ignore;
  /** A directory that is left out may hold something that is not. */
  readonly #hasExceptions: boolean;

  private constructor(root: string, ignore: Ignore, hasExceptions: boolean) {
    this.#root = root;
    this.#ignore = ignore;
    this.#hasExceptions = hasExceptions;
  }

  /** `DOCKERFILE.dockerignore` beside the Dockerfile counts, else `.dockerignore` in the directory. */
  static async open(directory: string, dockerfile: string): Promise<BuildContext> {
    if (/^(?:https?|git|ssh):\/\/|^git@/.test(directory) || directory === "-")
      throw new CliError("the context must be a local directory", { exitCode: 2 });
    const found = await stat(directory).catch(() => undefined);
    if (found?.isDirectory() !== true)
      throw new CliError(`the context ${directory} is not a directory`, { exitCode: 2 });
    const root = await realpath(directory);
    const text = (await has(`${dockerfile}.dockerignore`)) ?? (await has(join(root, ".dockerignore"))) ?? "";
    const ignore = ignoring().add(text.replace(/^\uFEFF/, "").split(/\r?\n/));
    return new BuildContext(root, ignore, /^\s*!/m.test(text));
  }

  #ignored(path: string): boolean {
    return path !== "" && this.#ignore.ignores(path);
  }

  async #names(path: string): Promise<string[]> {
    const names = await readdir(join(this.#root, path));
    return names.sort().map((name) => {
      if (name.includes("\uFFFD"))
        throw new CliError(`the name of ${posix.join(path, name)} is not UTF-8`, {
          hint: "leave it out with .dockerignore",
        });
      return path === "" ? name : `${path}/${name}`;
    });
  }

  /** Paths of the context that a source pattern means. */
  async #matches(pattern: string, where: string): Promise<string[]> {
    // As docker: a leading slash and `..` stay within the context.
    const parts = posix
      .resolve("/", pattern)
      .split("/")
      .slice(1)
      .filter((part) => part !== "");
    let paths = [""];
    for (const part of parts) {
      const next: string[] = [];
      for (const path of paths) {
        if (!SPECIAL.test(part)) {
          next.push(path === "" ? part : `${path}/${part}`);
          continue;
        }
        const shape = Glob.go(part);
        if (shape === undefined) throw new CliError(`${where}: ${pattern} is not a pattern`);
        const directory = await stat(join(this.#root, path)).catch(() => undefined);
        if (directory?.isDirectory() !== true) continue;
        next.push(...(await this.#names(path)).filter((name) => shape.matches(posix.basename(name))));
      }
      paths = next;
    }
    return paths;
  }

  /** Where a source really is: links are followed, within the context. */
  async #resolved(path: string, where: string): Promise<string | undefined> {
    try {
      const real = relative(this.#root, await realpath(join(this.#root, path)))
        .split(sep)
        .join("/");
      if (real === ".." || real.startsWith("../"))
        throw new CliError(`${where}: ${path} is a link that leads out of the context`);
      return real;
    } catch (error) {
      if (error instanceof CliError) throw error;
      return undefined;
    }
  }

  async #entry(path: string, as: string): Promise<Entry | undefined> {
    const source = join(this.#root, path);
    const found = await lstat(source);
    const base = { path: as, mode: found.mode & 0o7777, mtimeMs: found.mtimeMs };
    if (found.isFile()) return { ...base, type: "file", size: found.size, source };
    if (found.isDirectory()) return { ...base, type: "directory", size: 0 };
    if (found.isSymbolicLink()) return { ...base, type: "symlink", size: 0, target: await readlink(source) };
    return undefined; // sockets, pipes and devices are no files to copy
  }

  /** Everything below a directory, parents first. */
  async #below(path: string, as: string, skip: (path: string) => boolean): Promise<Entry[]> {
    const entries: Entry[] = [];
    for (const child of await this.#names(path)) {
      const ignored = this.#ignored(child) || skip(child);
      if (ignored && !this.#hasExceptions) continue;
      const inside = as === "" ? posix.basename(child) : `${as}/${posix.basename(child)}`;
      const entry = await this.#entry(child, inside);
      if (entry === undefined) continue;
      if (entry.type !== "directory") {
        if (!ignored) entries.push(entry);
        continue;
      }
      const nested = await this.#below(child, inside, skip);
      if (!ignored || nested.length > 0) entries.push(entry, ...nested);
    }
    return entries;
  }

  /**
   * Lays the files of one step out. Errors (CliError, beginning with `where`): a source that is not there or is
   * left out by .dockerignore, a link out of the context.
   */
  async archive(files: ContextFiles, where: string): Promise<ContextArchive> {
    return this.#lay(await this.#find(files, where), files.inline, this.#skip(files), where);
  }

  /**
   * The files of an ADD in their order: each one that may be an archive for itself, as the server unpacks only
   * what is alone; those between together. Errors as of `archive`.
   */
  async addArchives(files: ContextFiles, where: string): Promise<ContextArchive[]> {
    const skip = this.#skip(files);
    const groups: Found[][] = [[]];
    for (const found of await this.#find(files, where)) {
      const alone = !found.directory && (await mayBeArchive(join(this.#root, found.real)));
      if (!alone) groups.at(-1)!.push(found);
      else groups.push([found], []);
    }
    const last = groups.at(-1);
    const archives: ContextArchive[] = [];
    for (const group of groups) {
      const inline = group === last ? files.inline : [];
      if (group.length + inline.length > 0) archives.push(await this.#lay(group, inline, skip, where));
    }
    return archives;
  }

  #skip(files: ContextFiles): (path: string) => boolean {
    const excludes = ignoring().add([...files.exclude]);
    return (path) => files.exclude.length > 0 && excludes.ignores(path);
  }

  /** What the sources of a step mean. */
  async #find(files: ContextFiles, where: string): Promise<Found[]> {
    const skip = this.#skip(files);
    const found: Found[] = [];
    for (const source of files.sources) {
      let count = 0;
      for (const path of await this.#matches(source, where)) {
        const real = await this.#resolved(path, where);
        if (real === undefined) continue;
        const { isDirectory } = await stat(join(this.#root, real)).then((at) => ({
          isDirectory: at.isDirectory(),
        }));
        if (!isDirectory && (this.#ignored(path) || skip(path))) continue;
        if (isDirectory && this.#ignored(path) && !this.#hasExceptions) continue;
        found.push({ path, real, directory: isDirectory });
        count += 1;
      }
      if (count > 0) continue;
      throw new CliError(`${where}: the context has no ${source}`, {
        hint: "sources are relative to the context directory, and .dockerignore may leave them out",
      });
    }
    return found;
  }

  async #lay(
    found: readonly Found[],
    documents: ContextFiles["inline"],
    skip: (path: string) => boolean,
    where: string,
  ): Promise<ContextArchive> {
    const inline = documents.map(({ name, content }): Entry => {
      const bytes = new TextEncoder().encode(content);
      return { path: name, type: "file", mode: 0o644, mtimeMs: 0, size: bytes.length, source: bytes };
    });
    const [only] = found;
    if (found.length === 1 && only !== undefined && inline.length === 0) {
      if (!only.directory) {
        const entry = await this.#entry(only.real, posix.basename(only.path));
        if (entry === undefined) throw new CliError(`${where}: ${only.path} is not a file or a directory`);
        return pack(entry.path, [entry]);
      }
      if (only.real !== "") {
        const top = await this.#entry(only.real, TOP);
        return pack(TOP, [...(top === undefined ? [] : [top]), ...(await this.#below(only.real, TOP, skip))]);
      }
    }
    if (found.length === 0 && inline.length === 1) return pack(inline[0]!.path, inline);
    const laid = new Map<string, Entry>();
    for (const { path, real, directory } of found) {
      const file = directory ? undefined : await this.#entry(real, posix.basename(path));
      const entries = directory ? await this.#below(real, "", skip) : file === undefined ? [] : [file];
      for (const entry of entries) put(laid, entry, where);
    }
    for (const entry of inline) put(laid, entry, where);
    const top: Entry = { path: ".", type: "directory", mode: 0o755, mtimeMs: 0, size: 0 };
    return pack(".", [top, ...laid.values()]);
  }
}

/** The later of two of one name counts, unless only one of them is a directory. */
function put(laid: Map<string, Entry>, entry: Entry, where: string): void {
  const before = laid.get(entry.path);
  if (before !== undefined && (before.type === "directory") !== (entry.type === "directory"))
    throw new CliError(`${where}: ${entry.path} is a directory in one source and a file in another`);
  laid.set(entry.path, entry);
}

async function digest(source: string | Uint8Array): Promise<string> {
  const hasher = new Bun.CryptoHasher("sha256");
  if (typeof source !== "string") return hasher.update(source).digest("hex");
  for await (const chunk of createReadStream(source)) hasher.update(chunk as Buffer);
  return hasher.digest("hex");
}

async function pack(source: string, entries: readonly Entry[]): Promise<ContextArchive> {
  const hasher = new Bun.CryptoHasher("sha256").update("dockerfile context 1\n");
  let bytes = 0;
  for (const entry of entries) {
    const { path, type, mode, size, target = "" } = entry;
    const content = entry.source === undefined ? "" : await digest(entry.source);
    hasher.update(`${JSON.stringify([path, type, mode, size, target, content])}\n`);
    bytes += size;
  }
  return { source, entries, hash: hasher.digest("hex"), bytes };
}

function header(entry: Entry): Buffer {
  const { path, mode, size, target } = entry;
  const type = entry.type === "file" ? "File" : entry.type === "directory" ? "Directory" : "SymbolicLink";
  const data = {
    path: entry.type === "directory" ? `${path}/` : path,
    mode,
    size,
    uid: 0,
    gid: 0,
    type,
    mtime: new Date(Math.max(0, entry.mtimeMs)),
    ...(target === undefined ? {} : { linkpath: target }),
  } as const;
  const block = Buffer.alloc(BLOCK);
  const own = new Header(data);
  const needsPax = own.encode(block, 0);
  if (!needsPax) return block;
  const pax = new Pax({
    path: data.path,
    ...(target === undefined ? {} : { linkpath: target }),
    ...(size > 0o77777777777 ? { size } : {}),
  });
  return Buffer.concat([pax.encode(), block]);
}

async function* tar(entries: readonly Entry[]): AsyncGenerator<Uint8Array> {
  for (const entry of entries) {
    yield header(entry);
    if (entry.source === undefined) continue;
    let sent = 0;
    const chunks =
      typeof entry.source === "string"
        ? createReadStream(entry.source, { highWaterMark: 1 << 18 })
        : [entry.source];
    for await (const chunk of chunks) {
      sent += (chunk as Uint8Array).length;
      yield chunk as Uint8Array;
    }
    if (sent !== entry.size)
      throw new CliError(`${entry.path} changed while it was read`, { hint: "start the build again" });
    if (sent % BLOCK !== 0) yield new Uint8Array(BLOCK - (sent % BLOCK));
  }
  yield new Uint8Array(2 * BLOCK);
}

/** The archive as it is uploaded: a gzipped tar. */
export async function* compressed(archive: ContextArchive): AsyncGenerator<Uint8Array> {
  const gzip = createGzip({ level: 1 });
  const feeding = (async () => {
    for await (const chunk of tar(archive.entries)) {
      if (!gzip.write(chunk)) await new Promise((resolve) => gzip.once("drain", resolve));
    }
    gzip.end();
  })();
  feeding.catch((error: Error) => gzip.destroy(error));
  for await (const chunk of gzip) yield chunk as Uint8Array;
  await feeding;
}
