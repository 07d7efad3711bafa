import { expect, test } from "bun:test";
import { crc32cLanes, crc32cRawPortable } from "../../../../ffi/codec.ts";
import { IndexMerger, isWide } from "../../../../ffi/lsmt.ts";
import type { ReadSource } from "../source.ts";
import { testRandom } from "../test-support.ts";
import {
  EMPTY_INDEX,
  type FlatIndex,
  FlatIndexBuilder,
  mergeFlat,
  newColumns,
  ZEROED_TAG,
} from "./flat-index.ts";
import {
  encodeInvalidMapping,
  encodeMapping,
  FLAG_DATA,
  type LsmtBlock,
  MAX_MAPPING_SECTORS,
  MAX_MAPPINGS,
} from "./format.ts";
import { readLayerIndex, readMergedIndex } from "./layer.ts";

const DATA_END = 2 ** 43;

/** A finished layer that consists of its index. */
function layerOf(words: Uint32Array, dataEnd: number): { source: ReadSource; trailer: LsmtBlock } {
  const bytes = new Uint8Array(words.buffer, words.byteOffset, words.byteLength);
  const indexOffsetBytes = dataEnd * 512;
  return {
    source: {
      name: "index",
      sizeBytes: indexOffsetBytes + bytes.byteLength + 4096,
      read: (offset, target, targetOffset, length) =>
        target.set(
          bytes.subarray(offset - indexOffsetBytes, offset - indexOffsetBytes + length),
          targetOffset,
        ),
      tryRead: () => false,
      locate: () => undefined,
      [Symbol.dispose]: () => undefined,
    },
    trailer: { flags: FLAG_DATA, virtualSizeBytes: 0, indexOffsetBytes, indexSize: words.length / 4 },
  };
}

/** Mappings, as they are encoded and as the builder has them. */
function randomMappings(
  random: (limit: number) => number,
  count: number,
  from: { readonly offset: number; readonly moffset: number },
  tag: number,
): { words: Uint32Array; expected: FlatIndex } {
  const words = new Uint32Array(new ArrayBuffer(count * 16));
  const expected = new FlatIndexBuilder();
  let { offset, moffset } = from;
  const most = random(3) === 0 ? MAX_MAPPING_SECTORS : 1 + random(60);
  for (let i = 0; i < count; i++) {
    if (random(12) === 0) {
      encodeInvalidMapping(words, 4 * i);
      continue;
    }
    const length = random(4) === 0 ? Math.max(1, most - random(3)) : 1 + random(40);
    const zeroed = random(5) === 0;
    // Most continue the one before.
    if (random(4) === 0) offset += random(90);
    if (random(4) === 0) moffset += random(9);
    encodeMapping(words, 4 * i, offset, length, moffset, zeroed);
    expected.add(offset, length, moffset, zeroed ? tag | ZEROED_TAG : tag);
    offset += length;
    if (!zeroed) moffset += length;
  }
  return { words, expected: expected.finish() };
}

/** Offsets and moffsets up to, across and behind what 32 bits hold. */
const STARTS = [
  { offset: 0, moffset: 8 },
  { offset: 2 ** 49, moffset: 8 },
  { offset: 5, moffset: 2 ** 32 - 2000 },
  { offset: 2 ** 32 - 3000, moffset: 2 ** 40 },
];

/** Pieces joined as far as they go, however they were cut. */
function joined(index: FlatIndex): [offset: number, length: number, moffset: number, tag: number][] {
  const out: [number, number, number, number][] = [];
  for (let i = 0; i < index.count; i++) {
    const [offset, length] = [index.offsets[i]!, index.lengths[i]!];
    const [moffset, tag] = [index.moffsets[i]!, index.tags[i]!];
    const last = out.at(-1);
    const zeroed = tag >= ZEROED_TAG;
    if (last !== undefined && last[0] + last[1] === offset && last[3] === tag) {
      if (zeroed || last[2] + last[1] === moffset) {
        last[1] += length;
        continue;
      }
    }
    out.push([offset, length, zeroed ? 0 : moffset, tag]);
  }
  return out;
}

test("mappings come out of a layer's index as out of the builder, whatever the batches", () => {
  const random = testRandom();
  for (let round = 0; round < 200; round++) {
    const count = 1 + random(300);
    const start = STARTS[round % STARTS.length]!;
    const { words, expected } = randomMappings(random, count, start, 5);
    const { source, trailer } = layerOf(words, DATA_END);
    expect(readLayerIndex(source, trailer, 5)).toEqual(expected);
    // The same in batches; neighbours in two of them are joined all the same, but where they are cut may differ.
    const entries = 1 + random(20);
    using merger = new IndexMerger({ layers: 1, firstTag: 5, entries, out: newColumns(count, true) });
    const bytes = new Uint8Array(words.buffer);
    let done = 0;
    while (merger.run() === 0) {
      const batch = Math.min(entries, count - done);
      merger.bufferOf(0).set(bytes.subarray(done * 16, (done + batch) * 16));
      done += batch;
      const options = { dataEnd: DATA_END, refusePadding: false, last: done === count };
      expect(merger.feed(0, batch, options)).toBe(true);
    }
    expect(done).toBe(count);
    expect(joined({ count: merger.count, ...merger.columns })).toEqual(joined(expected));
  }
});

test("layers merged as they are read are the layers merged one by one", () => {
  const random = testRandom();
  let [wide, narrow] = [0, 0];
  for (let round = 0; round < 120; round++) {
    const count = round === 0 ? 255 : 1 + random(random(5) === 0 ? 70 : 9);
    const start = STARTS[round % STARTS.length]!;
    const layers = Array.from({ length: count }, (_, tag) => {
      const mappings = random(6) === 0 ? 0 : 1 + random(200);
      return randomMappings(random, mappings, { ...start, offset: start.offset + random(500) }, tag);
    });
    const expected = layers.reduce<FlatIndex>(
      (below, { expected: top }) => mergeFlat(top, below),
      EMPTY_INDEX,
    );
    const merged = readMergedIndex(
      layers.map(({ words }) => layerOf(words, DATA_END)),
      1 + random(40),
    );
    expect(joined(merged)).toEqual(joined(expected));
    for (let i = 1; i < merged.count; i++) {
      const end = merged.offsets[i - 1]! + merged.lengths[i - 1]!;
      if (merged.offsets[i]! < end) throw new Error(`entry ${i} overlaps the one before`);
    }
    if (merged.count === 0) continue;
    if (isWide(merged)) wide++;
    else narrow++;
  }
  expect(wide).toBeGreaterThan(20);
  expect(narrow).toBeGreaterThan(20);
});

test("a merge that cuts more mappings in two than there was room for goes on in more room", () => {
  const count = 2000;
  const bottom = new Uint32Array(new ArrayBuffer(16));
  encodeMapping(bottom, 0, 0, 4 * count, 8, false);
  const top = new Uint32Array(new ArrayBuffer(count * 16));
  for (let i = 0; i < count; i++) encodeMapping(top, 4 * i, 4 * i + 1, 1, 8 + 2 * i, false);
  const merged = readMergedIndex([layerOf(bottom, 10_000), layerOf(top, 10_000)]);
  expect(merged.count).toBe(2 * count + 1);
  for (const i of [0, 1, count - 1, count]) {
    expect([merged.offsets[2 * i]!, merged.moffsets[2 * i]!, merged.tags[2 * i]!]).toEqual(
      i === 0 ? [0, 8, 0] : [4 * i - 2, 8 + 4 * i - 2, 0],
    );
    if (i === count) break;
    expect([merged.offsets[2 * i + 1]!, merged.moffsets[2 * i + 1]!, merged.tags[2 * i + 1]!]).toEqual([
      4 * i + 1,
      8 + 2 * i,
      1,
    ]);
  }
});

test("what is no valid mapping is refused", () => {
  const cases: [string, number, number, number, boolean, boolean][] = [
    ["fine", 100, 10, 8, false, true],
    ["before the end of the one before", 49, 10, 8, false, false],
    ["inside the header", 100, 10, 7, false, false],
    ["behind the data", 100, 10, 91, false, false],
    ["up to the end of the data", 100, 10, 90, false, true],
    ["zeros need no data", 100, 10, 100, true, true],
    ["zeros behind the data", 100, 10, 101, true, false],
    ["padding", 100, 0, 8, false, true],
    ["up to the end of the largest disk", 2 ** 50 - 11, 10, 8, false, true],
    ["over the end of the largest disk", 2 ** 50 - 10, 10, 8, false, false],
    ["zeros over the end of the largest disk", 2 ** 50 - 2, 16383, 8, true, false],
  ];
  const words = new Uint32Array(new ArrayBuffer(32));
  for (const [what, offset, length, moffset, zeroed, fine] of cases) {
    encodeMapping(words, 0, 40, 10, 8, false);
    encodeMapping(words, 4, offset, length, moffset, zeroed);
    const { source, trailer } = layerOf(words, 100);
    const read = (padding: "skipped" | "refused") => () => readLayerIndex(source, trailer, 0, { padding });
    for (const padding of ["skipped", "refused"] as const) {
      if (fine && !(what === "padding" && padding === "refused")) expect(read(padding), what).not.toThrow();
      else expect(read(padding), what).toThrow(`at byte ${100 * 512 + 16}`);
    }
  }
});

test("layers with too many mappings together are refused, and nothing is taken for them", () => {
  const { source, trailer } = layerOf(new Uint32Array(0), 100);
  const large = { source, trailer: { ...trailer, indexSize: MAX_MAPPINGS / 2 + 1 } };
  expect(() => readMergedIndex([large, large])).toThrow(`at most ${MAX_MAPPINGS}`);
});

test("a mapping that is refused far into an index is named by its place", () => {
  const count = 70_000;
  const words = new Uint32Array(new ArrayBuffer(count * 16));
  for (let i = 0; i < count; i++) encodeMapping(words, 4 * i, 2 * i, 1, 8, false);
  encodeMapping(words, 4 * (count - 1), 7, 1, 8, false);
  const { source, trailer } = layerOf(words, 100);
  const where = 100 * 512 + (count - 1) * 16;
  expect(() => readLayerIndex(source, trailer, 0)).toThrow(`at byte ${where}`);
  expect(() => readMergedIndex([layerOf(new Uint32Array(0), 100), { source, trailer }])).toThrow(
    `at byte ${where}: mapping of sector 7 is out of order`,
  );
});

test("a merger is fed in turn, and within its buffers", () => {
  using merger = new IndexMerger({ layers: 2, firstTag: 0, entries: 4, out: newColumns(8, false) });
  const options = { dataEnd: 100, refusePadding: false, last: true };
  expect(() => merger.feed(2, 0, options)).toThrow("out of turn");
  expect(() => merger.feed(1, 5, options)).toThrow("out of turn");
  expect(merger.feed(1, 0, options)).toBe(true);
  expect(() => merger.feed(1, 0, options)).toThrow("out of turn");
  expect(merger.run()).toBe(0);
  expect(() => merger.moveTo(newColumns(0, false))).not.toThrow();
  expect(() => new IndexMerger({ layers: 200, firstTag: 57, entries: 1, out: newColumns(1, false) })).toThrow(
    "cannot merge 200 indexes",
  );
});

test("checksums of four parts are those of the parts", () => {
  const random = testRandom();
  for (const length of [0, 1, 7, 31, 32, 33, 1000, 4096, 100_003]) {
    const bytes = Uint8Array.from({ length }, () => random(256));
    const lane = Math.floor(length / 32) * 8;
    const parts = [0, 1, 2, 3].map((i) => bytes.subarray(i * lane, i < 3 ? (i + 1) * lane : length));
    expect([...crc32cLanes(bytes)]).toEqual(parts.map((part) => crc32cRawPortable(0, part)));
  }
});
