import { describe, expect, test } from "bun:test";
import {
  chmodSync,
  closeSync,
  openSync,
  readdirSync,
  readFileSync,
  statSync,
  truncateSync,
  utimesSync,
  writeFileSync,
  writeSync,
} from "node:fs";
import { createLayerWriter, openStack } from "./index.ts";
import { cachedIndex, forgetSharedIndexes, indexKey } from "./index-cache.ts";
import { EMPTY_INDEX, FlatIndexBuilder } from "./lsmt/flat-index.ts";
import { expectEqualBytes, fillPattern, scratchDirectory } from "./test-support.ts";
import type { LayerRef, LayerStack } from "./types.ts";

const SIZE = 64 << 20;

/** A layer with a mapping in every second block. */
function makeLayer(file: string, salt: number, uuid?: string): LayerRef {
  using writer = createLayerWriter(file, { virtualSizeBytes: SIZE, ...(uuid === undefined ? {} : { uuid }) });
  const data = fillPattern(new Uint8Array(512 * 64), salt);
  for (let n = 0; n < 4000; n++) {
    writer.append(n * 8192 + (salt % 4) * 2048, data.subarray((n % 64) * 512, ((n % 64) + 1) * 512));
  }
  return writer.finish();
}

function readAll(stack: LayerStack): Uint8Array {
  const bytes = new Uint8Array(SIZE);
  stack.read(0, bytes);
  return bytes;
}

/** Damages the index of a layer without a trace in its times: only a reader of the index notices. */
function spoilIndex(file: string): void {
  const { size, atime, mtime } = statSync(file);
  const trailer = readFileSync(file).subarray(-4096);
  const at = Number(trailer.readBigUint64LE(32));
  expect(at).toBeLessThan(size - 4096);
  const fd = openSync(file, "r+");
  writeSync(fd, Buffer.alloc(4096, 0x11), 0, 4096, at);
  closeSync(fd);
  utimesSync(file, atime, mtime);
}

describe("cache of merged indexes", () => {
  test("an image opens from the file, without the indexes of its layers; a damaged file is a miss", () => {
    using scratch = scratchDirectory("index-cache");
    const indexCache = { directory: `${scratch.path}/cache` };
    // Whole seconds, which utimes can put back.
    const settle = (ref: LayerRef) => {
      utimesSync(ref.file, 1_700_000_000, 1_700_000_000);
      return ref;
    };
    const lowers = [1, 2, 3].map((salt) => settle(makeLayer(`${scratch.path}/l${salt}`, salt)));
    let expected: Uint8Array;
    {
      using stack = openStack({ lowers });
      expected = readAll(stack);
    }
    {
      forgetSharedIndexes();
      using stack = openStack({ lowers }, { indexCache });
      expectEqualBytes(readAll(stack), expected, "made");
    }
    const files = () => readdirSync(indexCache.directory);
    expect(files().length).toBe(1);
    const cached = `${indexCache.directory}/${files()[0]}`;
    expect(statSync(cached).mode & 0o777).toBe(0o600);
    const original = readFileSync(lowers[1]!.file);
    spoilIndex(lowers[1]!.file);
    {
      forgetSharedIndexes();
      using stack = openStack({ lowers }, { indexCache });
      expect(stack.stats().warnings).toEqual([]);
      expectEqualBytes(readAll(stack), expected, "from the file");
    }
    const good = readFileSync(cached);
    const set = (bytes: Buffer, at: number, value: number) => {
      bytes[at] = value;
      return bytes;
    };
    const damages: [string, (bytes: Buffer) => Buffer][] = [
      ["a bit of the body", (bytes) => set(bytes, 5000, bytes[5000]! ^ 1)],
      ["the count", (bytes) => set(bytes, 23, 0x42)],
      ["the key", (bytes) => set(bytes, 70, bytes[70]! ^ 1)],
      ["the version", (bytes) => set(bytes, 8, 1)],
      ["its end", (bytes) => bytes.subarray(0, bytes.byteLength - 1)],
      ["everything", () => Buffer.alloc(0)],
    ];
    for (const [what, damage] of damages) {
      writeFileSync(cached, damage(Buffer.from(good)));
      forgetSharedIndexes();
      // A miss reads the layers, whose damage shows then.
      expect(() => openStack({ lowers }, { indexCache }), what).toThrow("not a valid layer");
    }
    writeFileSync(lowers[1]!.file, original);
    {
      forgetSharedIndexes();
      using stack = openStack({ lowers }, { indexCache });
      expectEqualBytes(readAll(stack), expected, "made again");
    }
  }, 120_000);

  test("another file, order or list of layers is another entry", () => {
    using scratch = scratchDirectory("index-cache");
    const indexCache = { directory: `${scratch.path}/cache` };
    const uuid = crypto.randomUUID();
    const a = makeLayer(`${scratch.path}/a`, 1, uuid);
    const b = makeLayer(`${scratch.path}/b`, 2);
    // The same uuid, size and form, other content.
    const c = makeLayer(`${scratch.path}/c`, 5, uuid);
    for (const lowers of [[a], [b], [a, b], [b, a], [c], [c, b]]) {
      using cold = openStack({ lowers });
      const expected = readAll(cold);
      forgetSharedIndexes();
      for (let n = 0; n < 2; n++) {
        using stack = openStack({ lowers }, { indexCache });
        expectEqualBytes(readAll(stack), expected, lowers.map((layer) => layer.file).join(" "));
      }
    }
    expect(readdirSync(indexCache.directory).length).toBe(6);
    const now = readFileSync(a.file);
    writeFileSync(a.file, readFileSync(c.file));
    using stack = openStack({ lowers: [a] }, { indexCache });
    using direct = openStack({ lowers: [c] });
    expectEqualBytes(readAll(stack), readAll(direct), "a file that was replaced");
    writeFileSync(a.file, now);
  }, 120_000);

  test("stacks of one thread share the index, what is made of it is their own", () => {
    using scratch = scratchDirectory("index-cache");
    const lowers = [makeLayer(`${scratch.path}/a`, 1), makeLayer(`${scratch.path}/b`, 2)];
    const upper = (n: number) => ({ data: `${scratch.path}/${n}.data`, index: `${scratch.path}/${n}.index` });
    using one = openStack({ lowers, upper: upper(1) });
    using two = openStack({ lowers, upper: upper(2) });
    const before = readAll(two);
    one.write(0, new Uint8Array(65536).fill(9));
    one.restack(`${scratch.path}/sealed`, upper(1));
    expectEqualBytes(readAll(two), before, "the other stack");
    using three = openStack({ lowers });
    expectEqualBytes(readAll(three), before, "a third stack");
  });

  test("an index of sectors behind 2 TiB comes back from its file", () => {
    using scratch = scratchDirectory("index-cache");
    const cache = { directory: `${scratch.path}/cache` };
    const warn = (message: string) => {
      throw new Error(message);
    };
    for (const [key, from, bytes] of [
      ["1".repeat(64), 2 ** 32 - 6000, 12],
      ["2".repeat(64), 2 ** 32 - 5999, 20],
      ["3".repeat(64), 2 ** 49, 20],
    ] as const) {
      const builder = new FlatIndexBuilder();
      for (let n = 0; n < 3000; n++) builder.add(from + 2 * n, 2, 8 + n * 3, n % 7);
      const made = builder.finish();
      expect(cachedIndex(cache, key, 7, () => made, warn)).toBe(made);
      expect(statSync(`${cache.directory}/${key}.aidx`).size).toBe(4096 + 3000 * bytes);
      forgetSharedIndexes();
      const again = cachedIndex(cache, key, 7, () => EMPTY_INDEX, warn);
      expect(again).not.toBe(made);
      expect(again).toEqual(made);
    }
  });

  test("the directory keeps to its limit and loses the least recently used", () => {
    using scratch = scratchDirectory("index-cache");
    const cache = { directory: `${scratch.path}/cache`, limitBytes: 3 * 40_096 + 10_000 };
    const make = () => {
      const builder = new FlatIndexBuilder();
      for (let n = 0; n < 3000; n++) builder.add(n * 2, 1, 8 + n * 3, 0);
      return builder.finish();
    };
    const warnings: string[] = [];
    const keys = [1, 2, 3, 4, 5].map((sizeBytes) =>
      indexKey([
        { file: "", uuid: undefined, sizeBytes, virtualSizeBytes: 0, indexOffsetBytes: 0, indexSize: 0 },
      ]),
    );
    for (const [n, key] of keys.entries()) {
      cachedIndex(cache, key, 1, make, (message) => warnings.push(message));
      const file = `${cache.directory}/${key}.aidx`;
      expect(statSync(file).size).toBe(4096 + 3000 * 12);
      utimesSync(file, 1000 + n, 1000 + n);
    }
    expect(readdirSync(cache.directory).sort()).toEqual(
      keys
        .slice(2)
        .map((key) => `${key}.aidx`)
        .sort(),
    );
    // What a killed process left is removed once it is old.
    writeFileSync(`${cache.directory}/x.aidx.1.abc`, "half");
    utimesSync(`${cache.directory}/x.aidx.1.abc`, 1000, 1000);
    const last = indexKey([]);
    cachedIndex(cache, last, 0, make, (message) => warnings.push(message));
    expect(readdirSync(cache.directory)).not.toContain("x.aidx.1.abc");
    expect(warnings).toEqual([]);
    // A small index is not worth a file.
    const small = "ab".repeat(32);
    cachedIndex(
      cache,
      small,
      0,
      () => EMPTY_INDEX,
      (message) => warnings.push(message),
    );
    expect(readdirSync(cache.directory)).not.toContain(`${small}.aidx`);
  });

  test("a cache that cannot be used is a warning, not an error", () => {
    using scratch = scratchDirectory("index-cache");
    const file = `${scratch.path}/file`;
    writeFileSync(file, "");
    const lowers = [makeLayer(`${scratch.path}/a`, 1)];
    using stack = openStack({ lowers }, { indexCache: { directory: `${file}/no-directory` } });
    expect(stack.stats().warnings.length).toBeGreaterThan(0);
    expect(stack.stats().warnings.join()).toContain("index cache: cannot");
    expect(stack.stats().lowerMappings).toBe(4000);
    chmodSync(file, 0o600);
    truncateSync(file, 0);
  });
});
