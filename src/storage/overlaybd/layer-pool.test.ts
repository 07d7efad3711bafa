import { expect, test } from "bun:test";
import {
  mkdirSync,
  readdirSync,
  readlinkSync,
  renameSync,
  rmSync,
  truncateSync,
  writeFileSync,
} from "node:fs";
import { errorCode } from "../../lib/durable.ts";
import { LayerPool, threadLayers } from "./layer-pool.ts";
import { createLayerWriter } from "./layer-writer.ts";
import { openStack } from "./stack.ts";
import { scratchDirectory } from "./test-support.ts";

function layer(file: string, fill: number): string {
  using writer = createLayerWriter(file, { virtualSizeBytes: 1 << 20 });
  writer.append(0, new Uint8Array(new ArrayBuffer(4096)).fill(fill));
  writer.finish();
  return file;
}

/** Open descriptors of files below a directory. */
function openBelow(directory: string): number {
  let open = 0;
  for (const fd of readdirSync("/proc/self/fd")) {
    try {
      if (readlinkSync(`/proc/self/fd/${fd}`).startsWith(directory)) open++;
    } catch (error) {
      // The descriptor of this very listing.
      if (!(error instanceof Error && "code" in error && error.code === "ENOENT")) throw error;
    }
  }
  return open;
}

test("stacks over the same layers share them; with no limit they close with the last", () => {
  using scratch = scratchDirectory("pool");
  const lowers = ["a", "b", "c"].map((name, i) => ({ file: layer(`${scratch.path}/${name}`, i + 1) }));
  const before = threadLayers.stats();
  const first = openStack({ lowers });
  const second = openStack({ lowers });
  expect(openBelow(scratch.path)).toBe(3);
  expect(threadLayers.stats().hits - before.hits).toBe(3);
  expect(threadLayers.stats().misses - before.misses).toBe(3);
  const got = new Uint8Array(new ArrayBuffer(4096));
  first[Symbol.dispose]();
  first[Symbol.dispose]();
  second.read(0, got);
  expect(got[0]).toBe(3);
  second[Symbol.dispose]();
  expect(openBelow(scratch.path)).toBe(0);
});

test("a layer that is swapped out of one stack stays with the other", () => {
  using scratch = scratchDirectory("pool");
  const lowers = ["a", "b"].map((name, i) => ({ file: layer(`${scratch.path}/${name}`, i + 1) }));
  const merged = { file: layer(`${scratch.path}/merged`, 9) };
  using first = openStack({ lowers });
  using second = openStack({ lowers });
  first.swapLowers({ first: 0, count: 2, merged });
  const got = new Uint8Array(new ArrayBuffer(4096));
  second.read(0, got);
  expect(got[0]).toBe(2);
  first.read(0, got);
  expect(got[0]).toBe(9);
});

test("so many unused layers stay open as the limit says, the last used ones, for a minute", () => {
  using scratch = scratchDirectory("pool");
  const files = Array.from({ length: 5 }, (_, i) => layer(`${scratch.path}/${i}`, i));
  using pool = new LayerPool(3);
  for (const file of files) pool.open(file)[Symbol.dispose]();
  expect(pool.stats()).toEqual({ used: 0, idle: 3, hits: 0, misses: 5 });
  expect(openBelow(scratch.path)).toBe(3);
  using _again = pool.open(files[4]!);
  expect(pool.stats()).toEqual({ used: 1, idle: 2, hits: 1, misses: 5 });
  pool.sweep(performance.now() + 59_000);
  expect(pool.stats().idle).toBe(2);
  pool.sweep(performance.now() + 61_000);
  expect(pool.stats()).toEqual({ used: 1, idle: 0, hits: 1, misses: 5 });
  pool.setIdleLimit(0);
  pool.open(files[0]!)[Symbol.dispose]();
  expect(openBelow(scratch.path)).toBe(1);
});

test("a file that was removed, replaced or changed is not served from what was open", () => {
  using scratch = scratchDirectory("pool");
  const file = layer(`${scratch.path}/a`, 1);
  using pool = new LayerPool(8);
  pool.open(file)[Symbol.dispose]();
  renameSync(layer(`${scratch.path}/b`, 2), file);
  {
    using replaced = pool.open(file);
    const got = new Uint8Array(new ArrayBuffer(512));
    replaced.source.read(4096, got, 0, 512);
    expect(got[0]).toBe(2);
  }
  expect(pool.stats().misses).toBe(2);
  // The one that has no name any more gives its space back at once.
  pool.sweep();
  expect(openBelow(scratch.path)).toBe(1);
  truncateSync(file, 5000);
  expect(() => pool.open(file)).toThrow(/layer/);
  rmSync(file);
  expect(() => pool.open(file)).toThrow(/cannot open layer/);
  pool.sweep();
  expect(pool.stats().idle).toBe(0);
  expect(openBelow(scratch.path)).toBe(0);
});

test("an unused layer that cannot be looked at any more is closed, and keeps no other from its sweep", () => {
  using scratch = scratchDirectory("pool");
  mkdirSync(`${scratch.path}/image`);
  const hidden = layer(`${scratch.path}/image/a`, 1);
  const gone = layer(`${scratch.path}/b`, 2);
  const kept = layer(`${scratch.path}/c`, 3);
  const unexpected: string[] = [];
  using pool = new LayerPool(8, (file, error) => unexpected.push(`${file}: ${errorCode(error)}`));
  for (const file of [hidden, gone, kept]) pool.open(file)[Symbol.dispose]();
  renameSync(`${scratch.path}/image`, `${scratch.path}/moved`);
  writeFileSync(`${scratch.path}/image`, "no directory");
  rmSync(gone);
  pool.sweep();
  expect(unexpected).toEqual([`${hidden}: ENOTDIR`]);
  expect(pool.stats().idle).toBe(1);
  expect(openBelow(scratch.path)).toBe(1);
  // Whoever wants it learns what is wrong.
  expect(() => pool.open(hidden)).toThrow(/cannot open layer/);
  pool.open(kept)[Symbol.dispose]();
  expect(pool.stats().hits).toBe(1);
});
