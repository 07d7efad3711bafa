import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { eventually } from "../../tests/support/eventually.ts";
import { createLogger } from "../lib/log.ts";
import { createLayerWriter, type LayerRef } from "../storage/overlaybd/index.ts";
import { createMemoryService, type MemoryImage, type MemoryService } from "./index.ts";

const PAGE = 4096;
const SIZE = 64 * PAGE;
const log = createLogger("test");
log.level = "silent";

let dir: string;
let made = 0;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), "vmm-flat-"));
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

/** Pages with a byte, `0` for an explicit zero. */
function layer(pages: Readonly<Record<number, number>>): LayerRef {
  const writer = createLayerWriter(join(dir, `layer-${made++}`), {
    virtualSizeBytes: SIZE,
    uuid: crypto.randomUUID(),
  });
  for (const [page, byte] of Object.entries(pages)) {
    if (byte === 0) writer.zero(Number(page) * PAGE, PAGE);
    else writer.append(Number(page) * PAGE, new Uint8Array(PAGE).fill(byte));
  }
  return writer.finish();
}

function image(...layers: LayerRef[]): MemoryImage {
  return { sizeBytes: SIZE, layers };
}

function service(maxCacheBytes = 1 << 30): MemoryService {
  return createMemoryService({ cacheDir: join(dir, "cache"), maxCacheBytes, log });
}

function flatFiles(): string[] {
  const root = join(dir, "cache");
  return readdirSync(root).flatMap((boot) => readdirSync(join(root, boot)));
}

/** First byte of each page. */
function pages(file: string): number[] {
  const bytes = readFileSync(file);
  expect(bytes.length).toBe(SIZE);
  return Array.from({ length: SIZE / PAGE }, (_, page) => {
    const slice = bytes.subarray(page * PAGE, (page + 1) * PAGE);
    expect(slice.every((byte) => byte === slice[0])).toBe(true);
    return slice[0]!;
  });
}

function expected(...maps: Readonly<Record<number, number>>[]): number[] {
  const result = new Array<number>(SIZE / PAGE).fill(0);
  for (const map of maps) for (const [page, byte] of Object.entries(map)) result[Number(page)] = byte;
  return result;
}

describe("flat memory files", () => {
  test("no layer: a sparse file of zeros", async () => {
    await using lease = await service().materialize(image());
    expect(pages(lease.file)).toEqual(expected());
    expect(statSync(lease.file).blocks).toBe(0);
  });

  test("layers over each other, zeros over data, holes stay holes", async () => {
    const a = { 1: 11, 2: 12, 40: 13 };
    const b = { 2: 22, 3: 23, 40: 0 };
    const [layerA, layerB] = [layer(a), layer(b)];
    await using lease = await service().materialize(image(layerA, layerB));
    expect(pages(lease.file)).toEqual(expected(a, b));
    expect(statSync(lease.file).blocks * 512).toBeLessThan(SIZE / 2);
  });

  test("a longer chain is derived from a cached shorter one", async () => {
    const a = { 1: 11, 2: 12, 40: 13 };
    const b = { 2: 22, 40: 0 };
    const c = { 5: 35 };
    const [layerA, layerB, layerC] = [layer(a), layer(b), layer(c)];
    const memory = service();
    await using short = await memory.materialize(image(layerA));
    // What the prefix holds is not read again from its layer, so that layer may be away.
    rmSync(layerA.file);
    await using long = await memory.materialize(image(layerA, layerB, layerC));
    expect(pages(long.file)).toEqual(expected(a, b, c));
    expect(pages(short.file)).toEqual(expected(a));
  });

  test("clones share one file, made once; a layer keeps its identity when it moves", async () => {
    const top = layer({ 1: 1 });
    const memory = service();
    const leases = await Promise.all([1, 2, 3].map(() => memory.materialize(image(top))));
    expect(new Set(leases.map((lease) => lease.file)).size).toBe(1);
    const inode = statSync(leases[0]!.file).ino;
    const moved = join(dir, "moved");
    writeFileSync(moved, readFileSync(top.file));
    await using again = await memory.materialize(image({ file: moved, digest: "sha256:00" }));
    expect(statSync(again.file).ino).toBe(inode);
    for (const lease of leases) await lease[Symbol.asyncDispose]();
  });

  test("short, long and overwritten files are made anew", async () => {
    const top = layer({ 1: 1, 9: 9 });
    const memory = service();
    for (const damage of [
      (file: string) => truncateSync(file, SIZE - PAGE),
      (file: string) => truncateSync(file, SIZE + PAGE),
      (file: string) => writeFileSync(file, Buffer.alloc(SIZE, 0x55)),
      (file: string) => writeFileSync(file, ""),
    ]) {
      const lease = await memory.materialize(image(top));
      await lease[Symbol.asyncDispose]();
      damage(lease.file);
      await using fresh = await memory.materialize(image(top));
      expect(pages(fresh.file)).toEqual(expected({ 1: 1, 9: 9 }));
    }
  });

  test("a new service goes on with the files there are, and drops leftovers and other boots' files", async () => {
    const top = layer({ 1: 1 });
    const first = await service().materialize(image(top));
    const inode = statSync(first.file).ino;
    const boot = join(first.file, "..");
    writeFileSync(join(boot, `${basename(first.file)}.1.tmp`), "half");
    const otherBoot = join(dir, "cache", "boot-00000000-0000-0000-0000-000000000000");
    mkdirSync(otherBoot);
    await using again = await service().materialize(image(top));
    expect(statSync(again.file).ino).toBe(inode);
    expect(flatFiles()).toEqual([basename(first.file)]);
    expect(existsSync(otherBoot)).toBe(false);
  });

  test("unused files go, oldest first, when there are too many; used ones stay", async () => {
    const chains = [1, 2, 3].map((byte) => image(layer({ 1: byte, 2: byte })));
    const memory = service(2 * PAGE * 2);
    const first = await memory.materialize(chains[0]!);
    const second = await memory.materialize(chains[1]!);
    await using third = await memory.materialize(chains[2]!);
    expect(flatFiles().length).toBe(3);
    await second[Symbol.asyncDispose]();
    await second[Symbol.asyncDispose](); // a lease ends once
    expect(existsSync(second.file)).toBe(false);
    expect(existsSync(first.file)).toBe(true);
    await first[Symbol.asyncDispose]();
    expect(existsSync(first.file)).toBe(true);
    expect(pages(third.file)).toEqual(expected({ 1: 3, 2: 3 }));
  });

  test("a missing or broken layer is an error and leaves nothing", async () => {
    const top = layer({ 1: 1 });
    const gone = layer({ 2: 2 });
    rmSync(gone.file);
    const memory = service();
    await expect(memory.materialize(image(top, gone))).rejects.toThrow(gone.file);
    truncateSync(top.file, 100);
    await expect(memory.materialize(image(top))).rejects.toThrow();
    await eventually("nothing is left", () => flatFiles().length === 0);
    await expect(memory.materialize({ sizeBytes: 1000, layers: [] })).rejects.toThrow("whole pages");
  });
});
