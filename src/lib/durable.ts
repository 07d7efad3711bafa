import { constants } from "node:fs";
import { copyFile, link, mkdir, open, rename, rm } from "node:fs/promises";
import { dirname } from "node:path";

/**
 * File operations whose result is on stable storage when they resolve: the file's bytes are synced
 * before its name appears, and the directory after it.
 */

export function errorCode(error: unknown): string | undefined {
  return error instanceof Error && "code" in error && typeof error.code === "string" ? error.code : undefined;
}

/** Syncs a directory (its names) or a file (its bytes). */
export async function syncPath(path: string): Promise<void> {
  const handle = await open(path, constants.O_RDONLY);
  try {
    await handle.sync();
  } finally {
    await handle.close();
  }
}

/** Gives a whole file its name: its bytes are on stable storage before, the name after. */
export async function publishDurable(temporary: string, path: string): Promise<void> {
  await syncPath(temporary);
  await rename(temporary, path);
  await syncPath(dirname(path));
}

/** Replaces `path` atomically; a reader sees the old bytes or the new ones, also after a crash. */
export async function writeDurable(path: string, bytes: string | Uint8Array, mode = 0o600): Promise<void> {
  const temporary = `${path}.${process.pid}.${Bun.randomUUIDv7()}.tmp`;
  try {
    const handle = await open(temporary, "wx", mode);
    try {
      await handle.writeFile(bytes);
      await handle.sync();
    } finally {
      await handle.close();
    }
    await rename(temporary, path);
  } catch (error) {
    await rm(temporary, { force: true });
    throw error;
  }
  await syncPath(dirname(path));
}

/**
 * Gives the file a second name; copies where the file system cannot link (another device, too many
 * links). Existing target: left alone, false. The caller syncs the directory when all names are there.
 */
export async function linkOrCopy(source: string, target: string): Promise<boolean> {
  try {
    await link(source, target);
    return true;
  } catch (error) {
    const code = errorCode(error);
    if (code === "EEXIST") return false;
    if (code !== "EXDEV" && code !== "EMLINK" && code !== "EPERM" && code !== "ENOTSUP") throw error;
  }
  const temporary = `${target}.${process.pid}.${Bun.randomUUIDv7()}.tmp`;
  try {
    await copyFile(source, temporary, constants.COPYFILE_EXCL | constants.COPYFILE_FICLONE);
    await syncPath(temporary);
    await link(temporary, target);
    return true;
  } catch (error) {
    if (errorCode(error) === "EEXIST") return false;
    throw error;
  } finally {
    await rm(temporary, { force: true });
  }
}

/** Makes a directory and syncs the parents that gained a name. */
export async function makeDirDurable(path: string, mode?: number): Promise<void> {
  const first = await mkdir(path, { recursive: true, ...(mode === undefined ? {} : { mode }) });
  if (first === undefined) return;
  for (let dir = path; dir.length >= first.length; dir = dirname(dir)) await syncPath(dirname(dir));
}

export async function removeTree(path: string): Promise<void> {
  await rm(path, { recursive: true, force: true });
}

/** Parses JSON with the file's name in the error. */
export async function readJson(path: string): Promise<unknown> {
  const text = await Bun.file(path).text();
  try {
    return JSON.parse(text) as unknown;
  } catch (cause) {
    throw new Error(`${path} is not valid JSON`, { cause });
  }
}
