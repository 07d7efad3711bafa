import { expect, test } from "bun:test";
import { crc32cLanes, crc32cRawPortable } from "../../../../ffi/codec.ts";
import { MappingDecoder } from "../../../../ffi/lsmt.ts";
import { testRandom } from "../test-support.ts";
import { cutColumns, FlatIndexBuilder, newColumns, ZEROED_TAG } from "./flat-index.ts";
import { encodeInvalidMapping, encodeMapping, MAX_MAPPING_SECTORS } from "./format.ts";

test("mappings come out of the decoder as out of the builder, whatever the batches", () => {
  const random = testRandom();
  for (let round = 0; round < 200; round++) {
    const count = 1 + random(300);
    const words = new Uint32Array(new ArrayBuffer(count * 16));
    const expected = new FlatIndexBuilder();
    const base = round % 2 === 0 ? 0 : 2 ** 49;
    let offset = base;
    let moffset = 8;
    for (let i = 0; i < count; i++) {
      if (random(12) === 0) {
        encodeInvalidMapping(words, 4 * i);
        continue;
      }
      const length = random(4) === 0 ? MAX_MAPPING_SECTORS - random(3) : 1 + random(40);
      const zeroed = random(5) === 0;
      // Most continue the one before.
      if (random(4) === 0) offset += random(9);
      if (random(4) === 0) moffset += random(9);
      encodeMapping(words, 4 * i, offset, length, moffset, zeroed);
      expected.add(offset, length, moffset, zeroed ? 5 | ZEROED_TAG : 5);
      offset += length;
      if (!zeroed) moffset += length;
    }
    const columns = newColumns(count);
    const decoder = new MappingDecoder(columns);
    const options = { dataEnd: moffset, layer: 5, refusePadding: false };
    for (let done = 0; done < count; ) {
      const batch = Math.min(count - done, 1 + random(100));
      expect(decoder.add(new Uint8Array(words.buffer, done * 16), batch, options)).toBe(true);
      done += batch;
    }
    expect(cutColumns(columns, decoder.count)).toEqual(expected.finish());
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
  ];
  const words = new Uint32Array(new ArrayBuffer(32));
  const bytes = new Uint8Array(words.buffer);
  for (const [what, offset, length, moffset, zeroed, fine] of cases) {
    encodeMapping(words, 0, 40, 10, 8, false);
    encodeMapping(words, 4, offset, length, moffset, zeroed);
    const add = (refusePadding: boolean) =>
      new MappingDecoder(newColumns(2)).add(bytes, 2, { dataEnd: 100, layer: 0, refusePadding });
    expect(add(false), what).toBe(fine);
    expect(add(true), what).toBe(fine && what !== "padding");
  }
  const small = new MappingDecoder(newColumns(1));
  expect(() => small.add(bytes, 2, { dataEnd: 100, layer: 0, refusePadding: false })).toThrow("room for 1");
  expect(() => small.add(bytes, 3, { dataEnd: 100, layer: 0, refusePadding: false })).toThrow("too small");
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
