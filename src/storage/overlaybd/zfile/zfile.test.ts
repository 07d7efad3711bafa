import { describe, expect, test } from "bun:test";
import { readFileSync, truncateSync, writeFileSync } from "node:fs";
import { Codec, crc32cRaw, crc32cRawPortable, encodedBound } from "../../../../ffi/codec.ts";
import { hostDisk } from "../disk.ts";
import { invalidLayer } from "../errors.ts";
import type { ByteSink } from "../lsmt/writer.ts";
import { openUnwrapped } from "../open-layer.ts";
import type { ReadSource } from "../source.ts";
import { openFileSource } from "../source.ts";
import { encodeTarHead, findTarPayload, TAR_HEAD_BYTES, tarTailBytes } from "../tar.ts";
import { expectEqualBytes, fillPattern, scratchDirectory, testRandom } from "../test-support.ts";
import { threadBlockCache } from "./block-cache.ts";
import { looksLikeZFile, ZFileSource } from "./reader.ts";
import { ZFILE_BLOCK_SIZES, ZFileWriter } from "./writer.ts";

const VECTORS = `${import.meta.dir}/../../../../tests/vectors/overlaybd`;

class MemorySink implements ByteSink {
  bytes = new Uint8Array(0);
  append(source: Uint8Array, offset: number, length: number): void {
    const grown = new Uint8Array(this.bytes.byteLength + length);
    grown.set(this.bytes);
    grown.set(source.subarray(offset, offset + length), this.bytes.byteLength);
    this.bytes = grown;
  }
}

function memorySource(bytes: Uint8Array): ReadSource {
  return {
    name: "memory",
    sizeBytes: bytes.byteLength,
    read: (offset, target, targetOffset, length) => {
      if (offset + length > bytes.byteLength) throw invalidLayer("memory", offset, "cut");
      target.set(bytes.subarray(offset, offset + length), targetOffset);
    },
    tryRead(offset, target, targetOffset, length) {
      this.read(offset, target, targetOffset, length);
      return true;
    },
    locate: () => undefined,
    [Symbol.dispose]: () => undefined,
  };
}

describe("checksum", () => {
  test("is the raw register, with and without SSE4.2", () => {
    const digits = new TextEncoder().encode("123456789");
    // The standard CRC-32C check value is 0xe3069283: inverted before and after.
    expect(~crc32cRaw(0xffff_ffff, digits) >>> 0).toBe(0xe306_9283);
    const random = testRandom();
    for (const length of [0, 1, 7, 8, 9, 63, 4096, 4099]) {
      const bytes = new Uint8Array(length).map(() => random(256));
      const seed = random(2 ** 31);
      expect(crc32cRaw(seed, bytes)).toBe(crc32cRawPortable(seed, bytes));
      const middle = length >> 1;
      expect(crc32cRaw(crc32cRaw(seed, bytes.subarray(0, middle)), bytes.subarray(middle))).toBe(
        crc32cRaw(seed, bytes),
      );
    }
  });
});

describe("codec", () => {
  test("never writes outside the target range, whatever the input", () => {
    using codec = new Codec();
    const random = testRandom();
    const source = new Uint8Array(encodedBound("zstd", 4096));
    const target = new Uint8Array(3 * 4096);
    for (let round = 0; round < 3000; round++) {
      const algorithm = random(2) === 0 ? "lz4" : "zstd";
      let stored = 1 + random(4096);
      if (random(3) === 0) {
        for (let i = 0; i < stored; i++) source[i] = random(256);
      } else {
        stored = codec.encode(algorithm, false, fillPattern(new Uint8Array(4096), round), 0, 4096, source, 0);
        source[random(stored)] = random(256);
      }
      target.fill(0xa5);
      codec.decode(algorithm, false, source, 0, stored, target, 4096, 4096);
      if (!target.subarray(0, 4096).every((byte) => byte === 0xa5)) throw new Error("wrote before the range");
      if (!target.subarray(8192).every((byte) => byte === 0xa5)) throw new Error("wrote behind the range");
    }
    expect(() => codec.decode("lz4", false, source, 0, source.byteLength + 1, target, 0, 16)).toThrow(
      RangeError,
    );
    expect(() => codec.decode("lz4", false, source, 0, 16, target, target.byteLength - 8, 16)).toThrow(
      RangeError,
    );
    codec[Symbol.dispose]();
    expect(() => codec.encode("lz4", false, source, 0, 16, target, 0)).toThrow("after dispose");
  });
});

describe("writing and reading", () => {
  for (const algorithm of ["lz4", "zstd"] as const) {
    for (const blockSizeBytes of ZFILE_BLOCK_SIZES) {
      test(`${algorithm}, blocks of ${blockSizeBytes}`, () => {
        const random = testRandom();
        for (const size of [0, 1, 511, blockSizeBytes - 1, blockSizeBytes, blockSizeBytes + 1, 700_001]) {
          for (const verify of [true, false]) {
            for (const overwritten of [true, false]) {
              const original = fillPattern(new Uint8Array(size), size + 1);
              const sink = new MemorySink();
              using writer = new ZFileWriter(sink, { algorithm, blockSizeBytes, verify });
              for (let at = 0; at < size; ) {
                const part = Math.min(size - at, 1 + random(3 * blockSizeBytes));
                writer.append(original, at, part);
                at += part;
              }
              writer.finish(overwritten ? (header) => sink.bytes.set(header, 0) : undefined);
              expect(looksLikeZFile(memorySource(sink.bytes))).toBe(true);
              using source = new ZFileSource(memorySource(sink.bytes));
              expect(source.sizeBytes).toBe(size);
              const got = new Uint8Array(size);
              source.read(0, got, 0, size);
              expectEqualBytes(got, original, `${size} bytes`);
              for (let round = 0; round < 20 && size > 0; round++) {
                const from = random(size);
                const length = Math.min(size - from, 1 + random(2 * blockSizeBytes));
                const part = new Uint8Array(length + 16).fill(0xee);
                source.read(from, part, 8, length);
                expectEqualBytes(
                  part.subarray(8, 8 + length),
                  original.subarray(from, from + length),
                  "part",
                );
                expect(part[7]).toBe(0xee);
                expect(part[8 + length]).toBe(0xee);
              }
            }
          }
        }
      });
    }
  }

  test("gives the bytes the reference tools give", () => {
    const cases = [
      ["plain-10001.bin", "plain-10001-lz4.zfile", 4096],
      ["plain-1.bin", "plain-1-lz4.zfile", 4096],
      ["plain-64k.bin", "plain-64k-lz4.zfile", 65536],
      ["plain-random.bin", "plain-random-lz4.zfile", 4096],
    ] as const;
    for (const [input, output, blockSizeBytes] of cases) {
      const expected = readFileSync(`${VECTORS}/${output}`);
      const sink = new MemorySink();
      using writer = new ZFileWriter(sink, { algorithm: "lz4", blockSizeBytes });
      const bytes = readFileSync(`${VECTORS}/inputs/${input}`);
      writer.append(bytes, 0, bytes.byteLength);
      writer.finish();
      expectEqualBytes(sink.bytes, expected, output);
    }
  });

  test("the cache of a partly read block never serves stale bytes after an error", () => {
    const sink = new MemorySink();
    const original = fillPattern(new Uint8Array(16384), 5);
    using writer = new ZFileWriter(sink, { algorithm: "lz4", blockSizeBytes: 4096 });
    writer.append(original, 0, original.byteLength);
    writer.finish();
    const lengths = new Uint32Array(
      sink.bytes.buffer.slice(sink.bytes.byteLength - 512 - 16, sink.bytes.byteLength - 512),
    );
    const second = 512 + lengths[0]!;
    sink.bytes[second + 3] = sink.bytes[second + 3]! ^ 0xff;
    using source = new ZFileSource(memorySource(sink.bytes));
    const part = new Uint8Array(100);
    source.read(100, part, 0, 100);
    expectEqualBytes(part, original.subarray(100, 200), "block 0");
    for (let round = 0; round < 2; round++) {
      expect(() => source.read(4196, part, 0, 100)).toThrow(/at byte \d+: ZFile block 1: checksum/);
    }
    source.read(100, part, 0, 100);
    expectEqualBytes(part, original.subarray(100, 200), "block 0 again");
  });
});

describe("a file on the host", () => {
  function compressed(
    path: string,
    algorithm: "lz4" | "zstd",
    blockSizeBytes: 4096 | 16384 | 65536,
    size: number,
  ) {
    const original = fillPattern(new Uint8Array(size), size);
    const sink = new MemorySink();
    using writer = new ZFileWriter(sink, { algorithm, blockSizeBytes });
    writer.append(original, 0, size);
    writer.finish();
    writeFileSync(path, sink.bytes);
    return original;
  }

  /** With so little cache that blocks are decoded again and again. */
  function littleCache(): Disposable {
    const { limitBytes } = threadBlockCache.stats();
    threadBlockCache.setLimit(0);
    return { [Symbol.dispose]: () => threadBlockCache.setLimit(limitBytes) };
  }

  for (const [algorithm, blockSizeBytes] of [
    ["lz4", 4096],
    ["zstd", 16384],
    ["lz4", 65536],
  ] as const) {
    test(`${algorithm}, blocks of ${blockSizeBytes}, behind a tar's head: decoded where it lies in memory`, () => {
      using scratch = scratchDirectory("mapped");
      using _cache = littleCache();
      const random = testRandom();
      const size = 3_000_001;
      const file = `${scratch.path}/z`;
      const original = compressed(file, algorithm, blockSizeBytes, size);
      const payload = readFileSync(file);
      const tail = new Uint8Array(tarTailBytes(payload.byteLength));
      writeFileSync(file, Buffer.concat([encodeTarHead(payload.byteLength), payload, tail]));
      const { source, container } = openUnwrapped(hostDisk, file);
      using zfile = source as ZFileSource;
      expect(container).toEqual(["tar", "zfile"]);
      for (let round = 0; round < 400; round++) {
        const from = random(size);
        const length = Math.min(size - from, 1 + random(round % 4 === 0 ? 400_000 : 2 * blockSizeBytes));
        const part = new Uint8Array(length + 16).fill(0xee);
        if (round % 2 === 0) zfile.read(from, part, 8, length);
        else expect(zfile.tryRead(from, part, 8, length)).toBe(true);
        expectEqualBytes(part.subarray(8, 8 + length), original.subarray(from, from + length), "part");
        expect(part[7]).toBe(0xee);
        expect(part[8 + length]).toBe(0xee);
      }
      expect(zfile.mappedCounts?.mapped).toBeGreaterThan(100);
    });
  }

  test("one that is cut off while it is used fails its reads, and nothing else", () => {
    using scratch = scratchDirectory("mapped");
    using _cache = littleCache();
    const size = 4 << 20;
    const file = `${scratch.path}/z`;
    const original = compressed(file, "lz4", 4096, size);
    using source = new ZFileSource(openFileSource(hostDisk, file));
    const got = new Uint8Array(size);
    for (let round = 0; round < 2; round++) source.read(0, got, 0, size);
    expectEqualBytes(got, original, "before");
    expect(source.mappedCounts?.mapped).toBeGreaterThan(0);
    truncateSync(file, 8192);
    const part = new Uint8Array(4096);
    // Twice: the first finds out by the signal, the second knows.
    for (let round = 0; round < 2; round++) {
      expect(() => source.read(size / 4, part, 0, 4096)).toThrow(/the file became shorter/);
      expect(() => source.tryRead(size / 2, part, 0, 4096)).toThrow(/the file became shorter/);
    }
    source.read(0, part, 0, 4096);
    expectEqualBytes(part, original.subarray(0, 4096), "what is left");
  });

  test("a block that is damaged is named, decoded in place or not", () => {
    using scratch = scratchDirectory("mapped");
    using _cache = littleCache();
    const size = 4 << 20;
    const file = `${scratch.path}/z`;
    compressed(file, "zstd", 4096, size);
    using source = new ZFileSource(openFileSource(hostDisk, file));
    const got = new Uint8Array(size);
    for (let round = 0; round < 2; round++) source.read(0, got, 0, size);
    let at = 0;
    source.locateBlock(700, (offset) => {
      at = offset;
    });
    const bytes = readFileSync(file);
    bytes[at + 5] = bytes[at + 5]! ^ 0x10;
    writeFileSync(file, bytes);
    for (let round = 0; round < 2; round++) {
      expect(() => source.read(700 * 4096, got, 0, 4096)).toThrow(`at byte ${at}: ZFile block 700: checksum`);
    }
    source.read(701 * 4096, got, 0, 4096);
  });
});

describe("tar", () => {
  test("headers are those of the reference writer", () => {
    const expected = readFileSync(`${VECTORS}/layer-lz4.tar`);
    const payload = findTarPayload(memorySource(expected))!;
    expect(payload.offsetBytes).toBe(TAR_HEAD_BYTES);
    expectEqualBytes(encodeTarHead(payload.sizeBytes), expected.subarray(0, TAR_HEAD_BYTES), "headers");
    expect(TAR_HEAD_BYTES + payload.sizeBytes + tarTailBytes(payload.sizeBytes)).toBe(expected.byteLength);
  });

  test("sizes of all digit counts, and other tars", () => {
    for (let size = 1; size < 2 ** 50; size = size * 7 + 3) {
      const head = encodeTarHead(size);
      expect(() => findTarPayload(memorySource(head))).toThrow("cut");
      const text = Buffer.from(head.subarray(512, 1024)).toString("latin1");
      expect(Number(text.split(" ")[0])).toBe(text.indexOf("\n") + 1);
    }
    expect(findTarPayload(memorySource(new Uint8Array(2000)))).toBeUndefined();
    expect(findTarPayload(memorySource(new Uint8Array(10)))).toBeUndefined();
    const unfinished = encodeTarHead(0);
    unfinished.set(new TextEncoder().encode("xxtar"), 1024 + 257);
    expect(() => findTarPayload(memorySource(unfinished))).toThrow("unfinished");
  });

  test("a tar made by tar", async () => {
    using scratch = scratchDirectory("tar");
    const payload = readFileSync(`${VECTORS}/tiny.lsmt`);
    writeFileSync(`${scratch.path}/overlaybd.commit`, payload);
    const command = [
      "tar",
      "--format=ustar",
      "-C",
      scratch.path,
      "-cf",
      `${scratch.path}/t.tar`,
      "overlaybd.commit",
    ];
    const made = Bun.spawnSync(command);
    expect(made.exitCode).toBe(0);
    const { source, container } = openUnwrapped(hostDisk, `${scratch.path}/t.tar`);
    using _ = source;
    expect(container).toEqual(["tar"]);
    const got = new Uint8Array(payload.byteLength);
    source.read(0, got, 0, got.byteLength);
    expectEqualBytes(got, payload, "payload");
  });
});
