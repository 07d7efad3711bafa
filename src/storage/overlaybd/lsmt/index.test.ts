import { describe, expect, test } from "bun:test";
import { testRandom } from "../test-support.ts";
import { ChunkedIndex } from "./chunked-index.ts";
import {
  EMPTY_INDEX,
  type FlatIndex,
  FlatIndexBuilder,
  findFlat,
  mergeFlat,
  ZEROED_TAG,
} from "./flat-index.ts";
import {
  encodeInvalidMapping,
  encodeMapping,
  MAX_MAPPING_SECTORS,
  mappingIsPadding,
  mappingLength,
  mappingOffset,
  mappingTarget,
  mappingZeroed,
} from "./format.ts";
import { planRead, ReadPlan, visitFlat } from "./plan.ts";

const HUGE = 2 ** 49;

/** Per sector: undefined unmapped, -1 zeros, else layer * 2^40 + moffset. */
type Model = (number | undefined)[];
const cell = (layer: number, moffset: number) => layer * 2 ** 40 + moffset;

function modelOf(index: FlatIndex, size: number, base: number): Model {
  const model: Model = new Array(size).fill(undefined);
  let previousEnd = -1;
  for (let i = 0; i < index.count; i++) {
    const offset = index.offsets[i]!;
    const length = index.lengths[i]!;
    expect(length).toBeGreaterThan(0);
    expect(length).toBeLessThanOrEqual(MAX_MAPPING_SECTORS);
    expect(offset).toBeGreaterThanOrEqual(previousEnd);
    previousEnd = offset + length;
    const tag = index.tags[i]!;
    for (let k = 0; k < length; k++) {
      model[offset - base + k] = tag >= ZEROED_TAG ? -1 : cell(tag, index.moffsets[i]! + k);
    }
  }
  return model;
}

describe("mapping words", () => {
  test("offsets and targets beyond 32 bits survive", () => {
    const words = new Uint32Array(4);
    const cases: [number, number, number, boolean][] = [
      [0, 1, 8, false],
      [2 ** 32 + 5, 16383, 2 ** 32 + 9, true],
      [2 ** 50 - 2, 1, 2 ** 52, false],
      [2 ** 32 - 1, 8192, 2 ** 31, true],
    ];
    for (const [offset, length, moffset, zeroed] of cases) {
      encodeMapping(words, 0, offset, length, moffset, zeroed);
      expect(mappingOffset(words, 0)).toBe(offset);
      expect(mappingLength(words, 0)).toBe(length);
      expect(mappingTarget(words, 0)).toBe(moffset);
      expect(mappingZeroed(words, 0)).toBe(zeroed);
      expect(mappingIsPadding(words, 0)).toBe(false);
    }
    encodeInvalidMapping(words, 0);
    expect(Buffer.from(words.buffer).toString("hex")).toBe("ffffffffffff03000000000000000000");
    expect(mappingIsPadding(words, 0)).toBe(true);
  });
});

describe("the upper's index", () => {
  for (const base of [0, HUGE]) {
    test(`behaves like an array of sectors from sector ${base}`, () => {
      const random = testRandom();
      const SIZE = 20_000;
      const index = new ChunkedIndex();
      const model: Model = new Array(SIZE).fill(undefined);
      let moffset = 8;
      for (let step = 0; step < 20_000; step++) {
        const long = random(50) === 0;
        const length = 1 + random(long ? 3000 : 8);
        const offset = step % 7 === 0 ? Math.min(step % SIZE, SIZE - length) : random(SIZE - length);
        const zeroed = random(6) === 0;
        index.replace(base + offset, length, moffset, zeroed);
        for (let k = 0; k < length; k++) model[offset + k] = zeroed ? -1 : cell(0, moffset + k);
        moffset += length;
        if (step % 1000 === 0) index.checkInvariants();
        if (step % 100 === 0) {
          const from = random(SIZE - 200);
          const seen: Model = new Array(200).fill(undefined);
          index.visit(base + from, 200, (at, part, target, zero) => {
            for (let k = 0; k < part; k++) seen[at - base - from + k] = zero ? -1 : cell(0, target + k);
          });
          expect(seen).toEqual(model.slice(from, from + 200));
          const next = model.findIndex((value, i) => i >= from && value !== undefined);
          expect(index.nextMapped(base + from)).toBe(next < 0 ? undefined : base + next);
        }
      }
      index.checkInvariants();
      expect(modelOf(index.toFlat(0), SIZE, base)).toEqual(model);
      expect(index.dataSectors).toBe(model.filter((value) => value !== undefined && value >= 0).length);
    });
  }

  test("sequential writes fill leaves and join up to the longest mapping", () => {
    const index = new ChunkedIndex();
    for (let i = 0; i < 100_000; i++) index.replace(i * 8, 8, 8 + i * 8, false);
    expect(index.count).toBe(Math.ceil(800_000 / 16376));
    index.checkInvariants();
  });

  test("a range over everything leaves one mapping and no empty leaves", () => {
    const index = new ChunkedIndex();
    for (let i = 0; i < 8000; i++) index.replace(i * 2, 1, 8 + i * 5, false);
    expect(index.count).toBe(8000);
    index.replace(0, MAX_MAPPING_SECTORS, 8, true);
    index.checkInvariants();
    expect(index.toFlat(0).offsets[0]).toBe(0);
    expect(index.toFlat(0).lengths[0]).toBe(MAX_MAPPING_SECTORS);
    expect(() => index.replace(0, MAX_MAPPING_SECTORS + 1, 8, true)).toThrow(RangeError);
  });
});

function randomFlat(random: (limit: number) => number, layer: number, size: number, base: number): FlatIndex {
  const out = new FlatIndexBuilder();
  let moffset = 8;
  for (let at = random(30); at < size; ) {
    const length = Math.min(size - at, 1 + random(random(10) === 0 ? 400 : 12));
    const zeroed = random(5) === 0;
    out.add(base + at, length, moffset, zeroed ? layer | ZEROED_TAG : layer);
    if (!zeroed) moffset += length + random(2);
    at += length + (random(3) === 0 ? 0 : random(20));
  }
  return out.finish();
}

function mergeAll(indexes: readonly FlatIndex[]): FlatIndex {
  return indexes.reduce((below, top) => mergeFlat(top, below), EMPTY_INDEX);
}

describe("merged indexes", () => {
  test("the topmost mapping of each sector wins, as in a model", () => {
    const random = testRandom();
    const SIZE = 3000;
    for (let round = 0; round < 60; round++) {
      const base = round % 2 === 0 ? 0 : HUGE;
      const layers = Array.from({ length: 1 + random(6) }, (_, layer) =>
        randomFlat(random, layer, SIZE, base),
      );
      const model: Model = new Array(SIZE).fill(undefined);
      for (const layer of layers) {
        for (const [i, value] of modelOf(layer, SIZE, base).entries())
          if (value !== undefined) model[i] = value;
      }
      const merged = mergeAll(layers);
      expect(modelOf(merged, SIZE, base)).toEqual(model);
      const from = random(SIZE - 500);
      const found = findFlat(merged, base + from);
      expect(found === merged.count || merged.offsets[found]! + merged.lengths[found]! > base + from).toBe(
        true,
      );
      const seen: Model = new Array(500).fill(undefined);
      visitFlat(merged, base + from, 500, (at, part, layer, moffset, zeroed) => {
        for (let k = 0; k < part; k++) seen[at - base - from + k] = zeroed ? -1 : cell(layer, moffset + k);
      });
      expect(seen).toEqual(model.slice(from, from + 500));
    }
  });

  test("merging with nothing changes nothing", () => {
    const random = testRandom();
    const index = randomFlat(random, 3, 1000, 0);
    const empty = new FlatIndexBuilder().finish();
    expect(mergeFlat(index, empty)).toBe(index);
    expect(mergeFlat(empty, index)).toBe(index);
    expect(mergeAll([]).count).toBe(0);
  });

  test("big indexes merge to all their entries, and to no memory they do not need", () => {
    const per = 60_000;
    const layers = Array.from({ length: 5 }, (_, layer) => {
      const builder = new FlatIndexBuilder();
      for (let i = 0; i < per; i++) builder.add((i * 5 + layer) * 2, 1, 8 + i, layer);
      return builder.finish();
    });
    const merged = mergeAll(layers);
    expect(merged.count).toBe(5 * per);
    for (const i of [0, 1, 4, 5, 149_999, 299_999]) {
      expect(merged.offsets[i]).toBe(2 * i);
      expect(merged.lengths[i]).toBe(1);
      expect(merged.moffsets[i]).toBe(8 + Math.floor(i / 5));
      expect(merged.tags[i]).toBe(i % 5);
    }
    for (const column of [merged.offsets, merged.lengths, merged.moffsets, merged.tags])
      expect(column.length).toBe(merged.count);
    // One mapping over all of it: what is left does not keep the memory of the rest.
    const cover = new FlatIndexBuilder();
    for (let at = 0; at < 10 * per; at += 16_000) cover.add(at, 16_000, 8, ZEROED_TAG | 9);
    const hidden = mergeAll([...layers, cover.finish()]);
    expect(hidden.count).toBeLessThan(50);
    expect(hidden.offsets.buffer.byteLength).toBeLessThan(1 << 20);
  });

  test("a plan covers the request exactly, upper over base", () => {
    const random = testRandom();
    const SIZE = 2000;
    const base = mergeAll([randomFlat(random, 0, SIZE, 0), randomFlat(random, 1, SIZE, 0)]);
    const upper = new ChunkedIndex();
    let moffset = 8;
    for (let i = 0; i < 120; i++) {
      const length = 1 + random(20);
      upper.replace(random(SIZE - length), length, moffset, random(4) === 0);
      moffset += length;
    }
    const model: Model = modelOf(mergeFlat(upper.toFlat(2), base), SIZE, 0);
    const plan = new ReadPlan();
    for (let round = 0; round < 300; round++) {
      const offset = random(SIZE - 1);
      const length = 1 + random(SIZE - offset);
      planRead(upper, 2, base, offset, length, plan);
      expect(plan.sectors).toBe(length);
      let at = offset;
      for (let i = 0; i < plan.count; i++) {
        for (let k = 0; k < plan.lengths[i]!; k++, at++) {
          const expected = model[at] ?? -1;
          const layer = plan.layers[i]!;
          const got = layer < 0 ? -1 : cell(layer, plan.moffsets[i]! + k);
          if (got !== expected) throw new Error(`sector ${at}: ${got} instead of ${expected}`);
        }
      }
      expect(at).toBe(offset + length);
    }
  });
});
