import { afterAll, describe, expect, test } from "bun:test";
import {
  closeSync,
  constants,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { preadCached } from "../../../ffi/io.ts";
import { Ring } from "../../../ffi/ring.ts";
import { eventually } from "../../../tests/support/eventually.ts";
import { openIoEngine } from "./index.ts";
import type { IoEngine } from "./types.ts";

const dir = mkdtempSync("/tmp/st2b-io-");
afterAll(() => rmSync(dir, { recursive: true, force: true }));

const bytes = (length: number, seed: number) => {
  const out = new Uint8Array(new ArrayBuffer(length));
  let state = seed;
  for (let i = 0; i < length; i++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    out[i] = state >>> 24;
  }
  return out;
};
const buffer = (length: number) => new Uint8Array(new ArrayBuffer(length));
/** Descriptors of the kinds an engine opens; other files of the same process come and go. */
const openFds = () =>
  readdirSync("/proc/self/fd").filter((fd) => {
    try {
      return /io_uring|eventfd|\/dev\/zero/.test(readlinkSync(`/proc/self/fd/${fd}`));
    } catch {
      return false; // closed since it was listed, as the listing's own
    }
  }).length;

const hasRing = (() => {
  const ring = Ring.open(8);
  if (typeof ring === "string") {
    console.log(`io_uring tests are skipped: ${ring}`);
    return false;
  }
  ring[Symbol.dispose]();
  return true;
})();

const kinds = hasRing ? (["auto", "threads"] as const) : (["threads"] as const);

describe.each(kinds)("engine %s", (kind) => {
  const open = (entries = 8): IoEngine => openIoEngine({ kind, entries });

  test("many reads at once, more than the ring holds, bring the right bytes each", async () => {
    await using engine = open();
    const content = bytes(1 << 20, 1);
    const file = join(dir, `read-${kind}`);
    writeFileSync(file, content);
    const fd = openSync(file, "r");
    try {
      const reads = Array.from({ length: 200 }, async (_, i) => {
        const offset = (i * 7919) % (content.length - 5000);
        const target = buffer(5000);
        expect(await engine.read(fd, target, 10, 4990, offset, file)).toBe(4990);
        expect(Buffer.compare(target.subarray(10), content.subarray(offset, offset + 4990))).toBe(0);
      });
      await Promise.all(reads);
      expect(await engine.read(fd, buffer(100), 0, 100, content.length - 30, file)).toBe(30);
      expect(await engine.read(fd, buffer(100), 0, 100, content.length + 30, file)).toBe(0);
      expect(engine.stats().inFlight).toBe(0);
      expect(engine.stats().requests).toBeGreaterThanOrEqual(202);
    } finally {
      closeSync(fd);
    }
  });

  test("writes and syncs; failures name the file and leave the engine usable", async () => {
    await using engine = open();
    const file = join(dir, `write-${kind}`);
    const content = bytes(300_000, 2);
    const fd = openSync(file, constants.O_RDWR | constants.O_CREAT);
    const readOnly = openSync(file, "r");
    try {
      await engine.write(fd, content, 5, content.length - 5, 5, file);
      await engine.write(fd, content, 0, 5, 0, file);
      await engine.datasync(fd, file);
      expect(Buffer.compare(readFileSync(file), content)).toBe(0);
      const failed = await engine
        .write(readOnly, content, 0, 10, 0, "the file")
        .catch((e: Error) => e.message);
      expect(failed).toContain("the file");
      expect(failed).toContain("EBADF");
      await engine.datasync(fd, file);
    } finally {
      closeSync(fd);
      closeSync(readOnly);
    }
  });

  test("results that come late wake the event loop", async () => {
    await using engine = open();
    const file = join(dir, `cold-${kind}`);
    writeFileSync(file, bytes(8 << 20, 3));
    const direct = openSync(file, constants.O_RDWR | constants.O_DIRECT);
    const pages = buffer(17 * 4096);
    try {
      for (let i = 0; i < 50; i++) {
        await engine.datasync(direct, file);
        await new Promise((resolve) => setTimeout(resolve, i % 5));
        expect(await engine.read(direct, pages, 0, 0, 0, file)).toBe(0);
      }
    } finally {
      closeSync(direct);
    }
  });

  test("opening and closing leaves no descriptors", async () => {
    {
      await using engine = open();
      expect(engine.stats().inFlight).toBe(0);
    }
    const before = openFds();
    for (let i = 0; i < 20; i++) {
      await using engine = open();
      const fd = openSync("/dev/zero", "r");
      expect(await engine.read(fd, buffer(10), 0, 10, 0, "zeros")).toBe(10);
      closeSync(fd);
    }
    // Their event descriptors are let go of by the runtime, in its own time.
    await eventually("they are let go of", () => openFds() <= before);
  });
});

test("a host that gives no ring is told by the name of the error, and gets the thread pool", async () => {
  expect(Ring.open(2 ** 31)).toBe("EINVAL");
  await using engine = openIoEngine({ entries: 2 ** 31 });
  expect(engine.kind).toBe("threads");
  expect(engine.reason).toContain("EINVAL");
});

test("preadCached tells what is not in memory", () => {
  const file = join(dir, "cached");
  writeFileSync(file, bytes(100_000, 4));
  const fd = openSync(file, "r");
  try {
    const target = buffer(200_000);
    expect(preadCached(fd, target, 0, 100_000, 0, file)).toBe(100_000);
    expect(preadCached(fd, target, 0, 4096, 99_000, file)).toBe(1000);
    expect(preadCached(fd, target, 0, 4096, 200_000, file)).toBe(0);
    expect(() => preadCached(-1, target, 0, 10, 0, "nothing")).toThrow("EBADF");
  } finally {
    closeSync(fd);
  }
});
