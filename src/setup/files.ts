import { lstatSync, statSync } from "node:fs";
import { mkdir, mkdtemp, readdir, rename, rm } from "node:fs/promises";
import { dirname, join } from "node:path";
import { makeDirDurable, syncPath } from "../lib/durable.ts";
import type { InstalledFile } from "./manifest.ts";

export async function sha256File(path: string): Promise<string> {
  const hasher = new Bun.CryptoHasher("sha256");
  for await (const chunk of Bun.file(path).stream()) hasher.update(chunk);
  return hasher.digest("hex");
}

export function sha256Bytes(bytes: Uint8Array): string {
  return new Bun.CryptoHasher("sha256").update(bytes).digest("hex");
}

/** Size in bytes when the path is a regular, non-empty file. */
export function regularFileSize(path: string): number | undefined {
  const stat = statSync(path, { throwIfNoEntry: false });
  return stat?.isFile() && stat.size > 0 ? stat.size : undefined;
}

/** Describes a file of a tree that will lie at `finalDir` under the dependency directory. */
export async function describeFile(
  stagedDir: string,
  finalDir: string,
  name: string,
): Promise<InstalledFile> {
  const path = join(stagedDir, name);
  return { path: join(finalDir, name), sizeBytes: Bun.file(path).size, sha256: await sha256File(path) };
}

/** What differs from the record, as a sentence; undefined when the file is as installed. */
export async function fileDamage(
  depsDir: string,
  file: InstalledFile,
  depth: "size" | "content",
): Promise<string | undefined> {
  const path = join(depsDir, file.path);
  const size = regularFileSize(path);
  if (size === undefined) return `${path} is missing`;
  if (size !== file.sizeBytes) return `${path} has ${size} bytes instead of ${file.sizeBytes}`;
  if (depth === "content" && (await sha256File(path)) !== file.sha256)
    return `${path} was changed after installation`;
  return undefined;
}

export async function treeDamage(
  depsDir: string,
  files: readonly InstalledFile[],
  depth: "size" | "content",
): Promise<string | undefined> {
  for (const file of files) {
    const damage = await fileDamage(depsDir, file, depth);
    if (damage !== undefined) return damage;
  }
  return undefined;
}

/** A scratch directory on the same file system as what will be made of it; gone when the scope ends. */
export async function stagingDir(depsDir: string): Promise<AsyncDisposable & { readonly path: string }> {
  const parent = join(depsDir, "staging");
  await mkdir(parent, { recursive: true });
  const path = await mkdtemp(join(parent, "setup-"));
  return {
    path,
    [Symbol.asyncDispose]: () => rm(path, { recursive: true, force: true }),
  };
}

/** Moves a finished tree to its place. One that is there already is replaced. */
export async function publishTree(depsDir: string, staged: string, final: string): Promise<void> {
  await mkdir(dirname(final), { recursive: true });
  const old = join(depsDir, "staging", `old-${Bun.randomUUIDv7()}`);
  let replaced = true;
  try {
    await rename(final, old);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== "ENOENT") throw error;
    replaced = false;
  }
  await rename(staged, final);
  await syncPath(dirname(final));
  if (replaced) await rm(old, { recursive: true, force: true });
}

/**
 * Moves the files of a finished tree to their places in a directory that may be in use: each is replaced in one step,
 * and what the tree does not hold stays as it is. On stable storage when it resolves.
 */
export async function publishFiles(staged: string, final: string): Promise<void> {
  await makeDirDurable(final);
  for (const entry of await readdir(staged, { withFileTypes: true })) {
    const [from, to] = [join(staged, entry.name), join(final, entry.name)];
    // What the user put in the way of a name of ours.
    const there = lstatSync(to, { throwIfNoEntry: false });
    if (there !== undefined && there.isDirectory() !== entry.isDirectory())
      await rm(to, { recursive: true, force: true });
    if (entry.isDirectory()) await publishFiles(from, to);
    else {
      await syncPath(from);
      await rename(from, to);
    }
  }
  await syncPath(final);
}
