import { expect, test } from "bun:test";
import type { IoEngine } from "../io/index.ts";
import type { AlignedAccess } from "./aligned.ts";
import { Fetcher } from "./fetch.ts";

const MIB = 1 << 20;
const SIZE = 64 * MIB;
const PAGE = 4096;

/** A disk of one file whose pages are in memory once the engine has read them; `evict` makes that in vain. */
function rig(options: { evict?: boolean; failing?: boolean } = {}) {
  const present = new Set<number>();
  const fetched: [offset: number, length: number][] = [];
  const waited: number[] = [];
  const inMemory = (offset: number, length: number) => {
    for (let at = offset; at < offset + length; at += PAGE) if (!present.has(at / PAGE)) return false;
    return true;
  };
  const access: AlignedAccess = {
    read: (offset) => void waited.push(offset),
    tryRead: (offset, into) => inMemory(offset, into.length),
    locate: (offset, length, visit) => visit(3, offset, length, "file"),
    write: () => undefined,
    discard: () => [],
  };
  const engine: IoEngine = {
    kind: "threads",
    reason: "a test",
    startRead(_fd, target, _targetOffset, length, offset, _what, done) {
      expect(length).toBeLessThanOrEqual(target.length);
      fetched.push([offset, length]);
      queueMicrotask(() => {
        if (options.failing) {
          done(0, new Error("the disk is broken"));
          return;
        }
        if (!options.evict) for (let at = offset; at < offset + length; at += PAGE) present.add(at / PAGE);
        done(length, undefined);
      });
    },
    read: () => Promise.reject(new Error("not here")),
    write: () => Promise.reject(new Error("not here")),
    datasync: () => Promise.reject(new Error("not here")),
    sync: () => Promise.reject(new Error("not here")),
    stats: () => ({ inFlight: 0, waiting: 0, requests: 0, submits: 0 }),
    [Symbol.asyncDispose]: async () => undefined,
  };
  const fetcher = new Fetcher(access, SIZE, engine, new Uint8Array(new ArrayBuffer(256 << 10)));
  const read = (offset: number, length: number) =>
    fetcher.read(offset, new Uint8Array(new ArrayBuffer(length)), () => undefined);
  return { fetcher, fetched, waited, read, inMemory };
}

test("large reads are fetched in pieces, scattered ones bring nothing else", async () => {
  const { read, fetched, waited } = rig();
  await read(8 * MIB, 2 * MIB);
  expect(fetched).toEqual(Array.from({ length: 8 }, (_, i) => [8 * MIB + i * (256 << 10), 256 << 10]));
  fetched.length = 0;
  for (const page of [900, 17, 4000, 123]) await read(page * PAGE, PAGE);
  expect(fetched).toEqual([900, 17, 4000, 123].map((page) => [page * PAGE, PAGE]));
  expect(waited).toEqual([]);
});

test("a stream is kept ahead, also when some of it was in memory, and never over the end", async () => {
  const { read, fetched, fetcher, inMemory } = rig();
  await read(0, 64 << 10);
  await read(64 << 10, 64 << 10);
  await Bun.sleep(1);
  expect(inMemory(128 << 10, MIB)).toBe(true);
  fetcher.noteRead(128 << 10, MIB);
  fetched.length = 0;
  await read((128 << 10) + MIB, 64 << 10);
  await Bun.sleep(1);
  expect(fetched.length).toBeGreaterThan(1);
  await read(SIZE - 2 * MIB, MIB);
  await read(SIZE - MIB, MIB);
  await Bun.sleep(1);
  expect(Math.max(...fetched.map(([offset, length]) => offset + length))).toBe(SIZE);
});

test("pages that do not stay and fetches that fail end in a read that waits and tells", async () => {
  for (const options of [{ evict: true }, { failing: true }]) {
    const { read, waited } = rig(options);
    await read(PAGE, PAGE);
    expect(waited).toEqual([PAGE]);
  }
});

test("a device that became unusable meanwhile says so", async () => {
  const { fetcher } = rig({ evict: true });
  const check = () => {
    throw new Error("the device was closed");
  };
  await expect(fetcher.read(0, new Uint8Array(new ArrayBuffer(PAGE)), check)).rejects.toThrow("was closed");
});
