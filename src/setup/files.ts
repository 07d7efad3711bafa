import { statSync } from "node:fs";
import { mkdir, mkdtemp, rename, rm } from "node:fs/promises";
import { dirname, join } from "node:path";
import { syncPath } from "../lib/durable.ts";
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
