import {
  closeSync,
  constants,
  existsSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  utimesSync,
} from "node:fs";
import { mkdir, rename, rm } from "node:fs/promises";
import { join } from "node:path";
import { punchHole, pwrite, truncate } from "../../ffi/io.ts";
import { cloneFile, copySparse } from "../../ffi/sparse.ts";
import { AenvError } from "../lib/errors.ts";
import type { Logger } from "../lib/log.ts";
import { pacer } from "../lib/turn.ts";
import { openStack } from "../storage/overlaybd/index.ts";
import { chainKeys, flatName, keyOfFlatName } from "./chain.ts";
import type { MemoryImage, MemoryLease } from "./types.ts";

/**
 * Flat memory files: what VMs map, derived from layer chains.
 *
 * They are a cache and are never synced. What makes that safe: they live in a directory named after the
 * host's boot, and those of earlier boots are dropped, so a file that power loss left half written is
 * never seen; within a boot, a file that was killed in the making has a temporary name; a finished one
 * carries a modification time computed from its key, which any later write would change.
 */
export interface FlatCacheOptions {
  readonly cacheDir: string;
  readonly maxCacheBytes: number;
  readonly log: Logger;
}

export interface FlatCache {
  acquire(image: MemoryImage): Promise<MemoryLease>;
}

const COPY_STEP_BYTES = 16 << 20;
const READ_STEP_BYTES = 1 << 20;
const TEMPORARY = /\.tmp$/;
const BOOT_DIR = /^boot-[0-9a-f-]{36}$/;

function bootId(): string {
  return readFileSync("/proc/sys/kernel/random/boot_id", "utf8").trim();
}

/** Seconds between 1970 and 2004: no file gets such a time by being written today. */
function sealTime(key: string): number {
  return Number.parseInt(key.slice(0, 7), 16) * 4;
}

export function createFlatCache(options: FlatCacheOptions): FlatCache {
  const { log } = options;
  const dir = join(options.cacheDir, `boot-${bootId()}`);
  const leases = new Map<string, number>();
  const building = new Map<string, Promise<void>>();
  let prepared: Promise<void> | undefined;

  const prepare = async (): Promise<void> => {
    await mkdir(dir, { recursive: true, mode: 0o700 });
    for (const name of readdirSync(options.cacheDir)) {
      const path = join(options.cacheDir, name);
      if (BOOT_DIR.test(name) && path !== dir) await rm(path, { recursive: true, force: true });
    }
    for (const name of readdirSync(dir)) {
      if (TEMPORARY.test(name)) await rm(join(dir, name), { force: true });
    }
  };

  const pathOf = (key: string): string => join(dir, flatName(key));

  /** Whole, and as it was when it was made. */
  const isSound = (key: string, sizeBytes: number): boolean => {
    const stat = statSync(pathOf(key), { throwIfNoEntry: false });
    return stat?.isFile() === true && stat.size === sizeBytes && stat.mtimeMs === sealTime(key) * 1000;
  };

  /** The access time is the cache's own: the last time a lease was taken. */
  const touch = (key: string): void => utimesSync(pathOf(key), Date.now() / 1000, sealTime(key));

  const retain = (key: string): void => {
    leases.set(key, (leases.get(key) ?? 0) + 1);
  };

  const release = (key: string): void => {
    const left = (leases.get(key) ?? 1) - 1;
    if (left > 0) leases.set(key, left);
    else leases.delete(key);
  };

  /** Removes files nobody leases, oldest first, until all together take at most `limitBytes` on disk. */
  const evict = (limitBytes: number): void => {
    const files = readdirSync(dir)
      .map((name) => ({
        key: keyOfFlatName(name),
        stat: statSync(join(dir, name), { throwIfNoEntry: false }),
      }))
      .flatMap(({ key, stat }) =>
        key === undefined || stat === undefined
          ? []
          : [{ key, bytes: stat.blocks * 512, usedMs: stat.atimeMs }],
      )
      .sort((a, b) => a.usedMs - b.usedMs);
    let total = files.reduce((sum, file) => sum + file.bytes, 0);
    for (const file of files) {
      if (total <= limitBytes) return;
      if (leases.has(file.key) || building.has(file.key)) continue;
      rmSync(pathOf(file.key), { force: true });
      total -= file.bytes;
      log.debug({ key: file.key, bytes: file.bytes }, "memory file dropped from the cache");
    }
  };

  const build = async (image: MemoryImage, keys: readonly string[]): Promise<void> => {
    const key = keys.at(-1)!;
    const started = performance.now();
    const breathe = pacer();
    const temporary = join(dir, `${flatName(key)}.${process.pid}.tmp`);
    let prefix = image.layers.length - 1;
    while (prefix > 0 && !isSound(keys[prefix]!, image.sizeBytes)) prefix--;
    const from = Math.max(0, prefix);
    if (from > 0) retain(keys[from]!);
    try {
      const fd = openSync(temporary, constants.O_RDWR | constants.O_CREAT | constants.O_TRUNC, 0o600);
      try {
        if (from > 0) {
          const source = openSync(pathOf(keys[from]!), "r");
          try {
            if (!cloneFile(source, fd)) {
              for (let at: number | undefined = 0; at !== undefined; ) {
                at = copySparse(source, fd, at, COPY_STEP_BYTES);
                await breathe();
              }
            }
          } finally {
            closeSync(source);
          }
        }
        truncate(fd, image.sizeBytes, temporary);
        await applyLayers(fd, temporary, image, from, breathe);
      } finally {
        closeSync(fd);
      }
      utimesSync(temporary, Date.now() / 1000, sealTime(key));
      await rename(temporary, pathOf(key));
    } catch (error) {
      await rm(temporary, { force: true });
      throw error;
    } finally {
      if (from > 0) release(keys[from]!);
    }
    log.debug(
      { key, layers: image.layers.length, fromPrefix: from, ms: Math.round(performance.now() - started) },
      "memory file made",
    );
  };

  const ensure = async (image: MemoryImage, keys: readonly string[]): Promise<void> => {
    const key = keys.at(-1)!;
    if (isSound(key, image.sizeBytes)) return;
    let job = building.get(key);
    if (job === undefined) {
      if (existsSync(pathOf(key))) log.warn({ file: pathOf(key) }, "damaged memory file, made anew");
      job = build(image, keys)
        .catch(async (error: unknown) => {
          if (!(error instanceof AenvError && error.code === "disk_full")) throw error;
          log.warn("disk full while making a memory file: dropping unused ones and trying again");
          evict(0);
          await build(image, keys);
        })
        .finally(() => building.delete(key));
      building.set(key, job);
    }
    await job;
  };

  return {
    async acquire(image) {
      if (!Number.isInteger(image.sizeBytes) || image.sizeBytes <= 0 || image.sizeBytes % 4096 !== 0) {
        throw new AenvError({
          code: "invalid_memory_image",
          message: `a memory image of ${image.sizeBytes} bytes is impossible: sizes are whole pages`,
        });
      }
      prepared ??= prepare().catch((error: unknown) => {
        prepared = undefined;
        throw error;
      });
      await prepared;
      const keys = chainKeys(image);
      const key = keys.at(-1)!;
      retain(key);
      try {
        await ensure(image, keys);
        touch(key);
        evict(options.maxCacheBytes);
      } catch (error) {
        release(key);
        throw error;
      }
      let open = true;
      return {
        file: pathOf(key),
        async [Symbol.asyncDispose]() {
          if (!open) return;
          open = false;
          release(key);
          evict(options.maxCacheBytes);
        },
      };
    },
  };
}

/** Writes what the layers from index `from` on hold into the file, over what is there. */
async function applyLayers(
  fd: number,
  name: string,
  image: MemoryImage,
  from: number,
  breathe: () => Promise<void> | undefined,
): Promise<void> {
  const lowers = image.layers.slice(from);
  if (lowers.length === 0) return;
  using stack = openStack({ lowers, virtualSizeBytes: image.sizeBytes });
  const buffer = new Uint8Array(new ArrayBuffer(READ_STEP_BYTES));
  for (const extent of stack.mappedExtents("all")) {
    if (extent.zeroed) {
      // Below the first layer everything is a hole already.
      if (from > 0) punchHole(fd, extent.offsetBytes, extent.lengthBytes, name);
      await breathe();
      continue;
    }
    const end = extent.offsetBytes + extent.lengthBytes;
    for (let at = extent.offsetBytes; at < end; at += READ_STEP_BYTES) {
      const length = Math.min(READ_STEP_BYTES, end - at);
      stack.read(at, buffer.subarray(0, length));
      pwrite(fd, buffer, 0, length, at, name);
      await breathe();
    }
  }
}
