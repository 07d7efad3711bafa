/**
 * Rules of the format that no other test states by name; tests/vectors/overlaybd/README.md lists all of them with the
 * tests that hold us to each. Numbers are those of its table.
 */
import { afterAll, describe, expect, test } from "bun:test";
import { readFileSync, statSync, truncateSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { Glob } from "bun";
import { AenvError } from "../../lib/errors.ts";
import { hostDisk } from "./disk.ts";
import {
  commitUpper,
  createLayerWriter,
  createUpper,
  inspectLayer,
  mergeLayers,
  openStack,
} from "./index.ts";
import {
  mappingIsPadding,
  mappingLength,
  mappingOffset,
  mappingTarget,
  mappingZeroed,
} from "./lsmt/format.ts";
import { openUnwrapped } from "./open-layer.ts";
import { scratchDirectory } from "./test-support.ts";
import type { UpperMode, UpperRef } from "./types.ts";

const MIB = 1 << 20;
const VECTORS = join(import.meta.dir, "../../../tests/vectors/overlaybd");
const scratch = scratchDirectory("rules");
afterAll(() => scratch[Symbol.dispose]());
let serial = 0;

function upperRef(mode?: UpperMode): UpperRef {
  const name = `${scratch.path}/u${serial++}`;
  const index = mode === "sparse" ? {} : { index: `${name}.index` };
  return { data: `${name}.data`, ...index, ...(mode === undefined ? {} : { mode }) };
}

function failure(action: () => unknown): AenvError {
  try {
    action();
  } catch (error) {
    if (error instanceof AenvError) return error;
    throw error;
  }
  throw new Error("it did not fail");
}

interface Mapping {
  readonly offset: number;
  readonly length: number;
  readonly moffset: number;
  readonly zeroed: boolean;
  readonly tag: number;
}

/** Mappings as they lie in a file, padding left out. */
function mappingsAt(bytes: Buffer, from: number, to: number): Mapping[] {
  const found: Mapping[] = [];
  const words = new Uint32Array(Uint8Array.from(bytes.subarray(from, to - ((to - from) % 16))).buffer);
  for (let at = 0; at < words.length; at += 4) {
    if (mappingIsPadding(words, at)) continue;
    found.push({
      offset: mappingOffset(words, at),
      length: mappingLength(words, at),
      moffset: mappingTarget(words, at),
      zeroed: mappingZeroed(words, at),
      tag: words[at + 3]! >>> 24,
    });
  }
  return found;
}

const layerMappings = (file: string): Mapping[] => {
  const bytes = readFileSync(file);
  const trailer = bytes.subarray(-4096);
  const from = trailer.readUInt32LE(32);
  return mappingsAt(bytes, from, from + 16 * trailer.readUInt32LE(40));
};
const indexMappings = (file: string): Mapping[] => {
  const bytes = readFileSync(file);
  return mappingsAt(bytes, 4096, bytes.byteLength);
};

test("2: a user tag of 256 bytes is kept, through a seal as well, and one of 257 is refused", () => {
  const upper = upperRef();
  {
    using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB });
    stack.write(0, new Uint8Array(512).fill(1));
  }
  const userTag = "é".repeat(128);
  const { file } = commitUpper(upper, `${scratch.path}/tagged`, { userTag });
  const bytes = readFileSync(file);
  for (const block of [bytes.subarray(0, 4096), bytes.subarray(-4096)]) {
    expect(block.subarray(134, 390).toString("utf8")).toBe(userTag);
    expect(block[390]).toBe(0);
    expect([block[132], block[133]]).toEqual([1, 1]);
    expect(block.readUInt32LE(24)).toBe(390);
  }
  const tagged = upperRef();
  createUpper(tagged, MIB);
  const header = readFileSync(tagged.data);
  header.write(userTag, 134);
  writeFileSync(tagged.data, header);
  using sealable = openStack({ lowers: [], upper: tagged });
  sealable.seal(`${scratch.path}/tagged-seal`);
  const trailer = readFileSync(`${scratch.path}/tagged-seal`).subarray(-4096);
  expect(trailer.subarray(134, 390).toString("utf8")).toBe(userTag);
  const refused = failure(() => commitUpper(upper, `${scratch.path}/x`, { userTag: `${userTag}a` }));
  expect(refused.message).toContain("256");
});

describe("2.1: flags on disk", () => {
  for (const [mode, data, index, trailer] of [
    ["logStructured", 0x03, 0x01, 0x06],
    ["hybridLogStructured", 0x23, 0x21, 0x26],
    ["sparse", 0x13, undefined, 0x16],
  ] as const) {
    test(`${mode}: writable and sealed`, () => {
      const upper = upperRef(mode);
      using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB });
      stack.write(8192, new Uint8Array(4096).fill(5));
      expect(readFileSync(upper.data).readUInt32LE(28)).toBe(data);
      if (index !== undefined) expect(readFileSync(upper.index!).readUInt32LE(28)).toBe(index);
      const sealed = `${scratch.path}/sealed-${mode}`;
      stack.seal(sealed);
      const bytes = readFileSync(sealed);
      // The header stays as it was: only the trailer decides.
      expect(bytes.readUInt32LE(28)).toBe(data);
      expect(bytes.subarray(-4096).readUInt32LE(28)).toBe(trailer);
      const got = new Uint8Array(4096);
      using again = openStack({ lowers: [{ file: sealed }] });
      again.read(8192, got);
      expect(got[9]).toBe(5);
    });
  }

  test("committed: 7 and 6, with nothing about positions in the header", () => {
    using writer = createLayerWriter(`${scratch.path}/committed`, { virtualSizeBytes: MIB });
    writer.append(0, new Uint8Array(512).fill(1));
    const bytes = readFileSync(writer.finish().file);
    expect(bytes.readUInt32LE(28)).toBe(0x07);
    expect(bytes.readBigUint64LE(32)).toBe(0n);
    expect(bytes.readBigUint64LE(40)).toBe(0n);
    expect(bytes.subarray(-4096).readUInt32LE(28)).toBe(0x06);
  });

  test("4.3: sparse and hybrid at once is an error", () => {
    const upper = upperRef("hybridLogStructured");
    createUpper(upper, MIB);
    for (const file of [upper.data, upper.index!]) {
      const bytes = readFileSync(file);
      bytes[28] = bytes[28]! | 0x30;
      writeFileSync(file, bytes);
    }
    const { code, message } = failure(() => openStack({ lowers: [], upper }));
    expect(code).toBe("layer_invalid");
    expect(message).toContain("sparse");
  });
});

test("2.2: a writable layer that is not sparse has the size its index header says", () => {
  const upper = upperRef();
  createUpper(upper, MIB);
  const bytes = readFileSync(upper.data);
  bytes.writeBigUInt64LE(BigInt(8 * MIB), 48);
  writeFileSync(upper.data, bytes);
  using stack = openStack({ lowers: [], upper });
  expect(stack.virtualSizeBytes).toBe(MIB);
});

test("3: no mapping is longer than 16383 sectors, discards included; 4.1: a discard takes no data", () => {
  const upper = upperRef();
  {
    using stack = openStack({ lowers: [], upper, virtualSizeBytes: 64 * MIB });
    stack.write(0, new Uint8Array(9 * MIB).fill(1));
    stack.discard(16 * MIB, 20 * MIB);
    expect(stack.stats().upperDataBytes).toBe(9 * MIB);
  }
  const mappings = indexMappings(upper.index!);
  expect(mappings.every(({ length }) => length <= 16383)).toBe(true);
  const data = mappings.filter(({ zeroed }) => !zeroed);
  const zeros = mappings.filter(({ zeroed }) => zeroed);
  // In order of time, one behind the other from the first sector behind the header.
  let sector = 0;
  for (const mapping of data) {
    expect(mapping).toMatchObject({ offset: sector, moffset: 8 + sector, tag: 0 });
    sector += mapping.length;
  }
  expect(sector).toBe((9 * MIB) / 512);
  expect(zeros.reduce((sum, { length }) => sum + length, 0)).toBe((20 * MIB) / 512);
  expect(zeros.map(({ moffset }) => moffset)).toEqual(zeros.map(() => statSync(upper.data).size / 512));
});

test("3.2: tags on disk mean nothing to a reader", () => {
  const upper = upperRef();
  {
    using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB });
    stack.write(0, new Uint8Array(4096).fill(4));
  }
  const { file } = commitUpper(upper, `${scratch.path}/untagged`, {});
  const bytes = readFileSync(file);
  const at = bytes.subarray(-4096).readUInt32LE(32);
  bytes[at + 15] = 0x77;
  writeFileSync(`${scratch.path}/retagged`, bytes);
  using stack = openStack({ lowers: [{ file }, { file: `${scratch.path}/retagged` }] });
  const got = new Uint8Array(4096);
  stack.read(0, got);
  expect(got[5]).toBe(4);
});

describe("4.2: sparse layers", () => {
  test("a byte lies at 4096 plus its place, and the file is as long as header and disk, grown or not", () => {
    const upper = upperRef("sparse");
    using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB });
    expect(statSync(upper.data).size).toBe(4096 + MIB);
    stack.write(12 * 4096, new Uint8Array(4096).fill(6));
    expect(readFileSync(upper.data)[4096 + 12 * 4096]).toBe(6);
    stack.grow(2 * MIB);
    expect(statSync(upper.data).size).toBe(4096 + 2 * MIB);
  });

  test("reopened, it neither forgets a discard over a lower nor hides the lower around a short write", () => {
    using writer = createLayerWriter(`${scratch.path}/below-sparse`, { virtualSizeBytes: MIB });
    writer.append(0, new Uint8Array(64 * 1024).fill(9));
    const image = { lowers: [writer.finish()], upper: upperRef("sparse") };
    {
      using stack = openStack(image);
      stack.discard(0, 8192);
      stack.write(20 * 1024, new Uint8Array(512).fill(1));
      stack.flush();
    }
    using stack = openStack(image);
    const got = new Uint8Array(64 * 1024);
    stack.read(0, got);
    const expected = new Uint8Array(64 * 1024).fill(9);
    expected.fill(0, 0, 8192);
    expected.fill(1, 20 * 1024, 20 * 1024 + 512);
    expect(Buffer.compare(got, expected)).toBe(0);
  });
});

test("5.1: live data in the order of the disk from sector 8; zeros written stay data; zeroed ranges take no space", () => {
  const upper = upperRef();
  {
    using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB });
    stack.write(64 * 512, new Uint8Array(512 * 4).fill(3));
    stack.write(0, new Uint8Array(512 * 2).fill(1));
    stack.write(16 * 512, new Uint8Array(512 * 8));
    stack.write(0, new Uint8Array(512).fill(2));
    stack.discard(32 * 512, 512 * 10);
  }
  const { file } = commitUpper(upper, `${scratch.path}/order`, {});
  const mappings = layerMappings(file).map(({ offset, length, moffset, zeroed }) => ({
    offset,
    length,
    moffset,
    zeroed,
  }));
  expect(mappings).toEqual([
    { offset: 0, length: 2, moffset: 8, zeroed: false },
    { offset: 16, length: 8, moffset: 10, zeroed: false },
    { offset: 32, length: 10, moffset: 18, zeroed: true },
    { offset: 64, length: 4, moffset: 18, zeroed: false },
  ]);
  expect(readFileSync(file)[4096]).toBe(2);
  // Merging it gives the same once more.
  const merged = mergeLayers([{ file }], `${scratch.path}/order-merged`, {});
  expect(layerMappings(merged.file).map(({ moffset }) => moffset)).toEqual([8, 10, 18, 18]);
});

test("5.3: header and trailer are two blocks, and zeroed mappings point into the file, too", () => {
  using writer = createLayerWriter(`${scratch.path}/zeroed`, { virtualSizeBytes: MIB });
  writer.append(0, new Uint8Array(512).fill(1));
  writer.zero(4096, 4096);
  const { file } = writer.finish();
  const bytes = readFileSync(file);
  const at = bytes.subarray(-4096).readUInt32LE(32);
  const damaged = (change: (copy: Buffer) => Buffer) => {
    const to = `${scratch.path}/damaged-${serial++}`;
    writeFileSync(to, change(Buffer.from(bytes)));
    return failure(() => openStack({ lowers: [{ file: to }] }));
  };
  // The zeroed mapping is the second: its target beyond the index, and in the header.
  for (const moffset of [at / 512 + 1, 7]) {
    const { code, message } = damaged((copy) => {
      copy.writeUInt32LE(moffset, at + 16 + 8);
      return copy;
    });
    expect(code).toBe("layer_invalid");
    expect(message).toContain(`at byte ${at + 16}`);
  }
  expect(damaged((copy) => copy.subarray(0, 4096)).message).toContain("ends before a trailer");
});

test("6.1: a layer file that ends early is an error, never zeros", () => {
  using writer = createLayerWriter(`${scratch.path}/shortened`, { virtualSizeBytes: MIB });
  writer.append(0, new Uint8Array(MIB).fill(8));
  const { file } = writer.finish();
  using stack = openStack({ lowers: [{ file }] });
  truncateSync(file, 300_000);
  expect(failure(() => stack.read(512 * 1024, new Uint8Array(4096))).message).toContain("became shorter");
  const got = new Uint8Array(4096);
  stack.read(0, got);
  expect(got[0]).toBe(8);
});

test("6.3: a parent that is not the layer below is a warning, never a refusal", () => {
  const uuid = crypto.randomUUID();
  const lower = (name: string, id: string) => {
    using writer = createLayerWriter(`${scratch.path}/${name}`, { virtualSizeBytes: MIB, uuid: id });
    return writer.finish();
  };
  const right = lower("parent", uuid);
  const other = lower("no-parent", crypto.randomUUID());
  const upper = upperRef();
  const warnings = (lowers: { file: string }[]) => {
    using stack = openStack({ lowers, upper });
    return stack.stats().warnings;
  };
  expect(warnings([right])).toEqual([]);
  expect(warnings([right, other]).join()).toContain(`made over layer ${uuid}`);
  expect(warnings([right])).toEqual([]);
});

describe("7.3: entries of a jump table", () => {
  /** A ZFile of the reference tools without digests, so that nothing but the entry is wrong. */
  function withEntry(block: number, value: number): string {
    const bytes = readFileSync(`${VECTORS}/ok/zfile-nodigest.zfile`);
    const fields = (bytes.readUInt32LE(32) & 8) !== 0 ? bytes : bytes.subarray(-512);
    bytes.writeUInt32LE(value, Number(fields.readBigUint64LE(40)) + 4 * block);
    const file = `${scratch.path}/entry-${serial++}`;
    writeFileSync(file, bytes);
    return file;
  }

  test("one with nothing but room for a checksum, or less, is refused", () => {
    for (const value of [0, 3, 4]) {
      const { code, message } = failure(() => openUnwrapped(hostDisk, withEntry(0, value)));
      expect(code).toBe("layer_invalid");
      expect(message).toContain(`ZFile block 0 has stored length ${value}`);
    }
  });

  test("one longer than any codec makes is refused", () => {
    expect(failure(() => openUnwrapped(hostDisk, withEntry(0, 0x7fff_ffff))).message).toContain(
      "stored length",
    );
  });
});

test("7.6: a block that is damaged in a local file is an error at once and each time, and no other block's", () => {
  const bytes = readFileSync(`${VECTORS}/plain-10001-lz4.zfile`);
  const original = readFileSync(`${VECTORS}/inputs/plain-10001.bin`);
  bytes[512 + 10] = bytes[512 + 10]! ^ 1;
  const file = `${scratch.path}/damaged-block`;
  writeFileSync(file, bytes);
  using source = openUnwrapped(hostDisk, file).source;
  const got = new Uint8Array(10_001);
  for (let round = 0; round < 2; round++) {
    expect(failure(() => source.read(0, got, 0, 100)).message).toContain("ZFile block 0: checksum");
  }
  source.read(4096, got, 4096, 10_001 - 4096);
  expect(Buffer.compare(got.subarray(4096), original.subarray(4096))).toBe(0);
});

test("14.3: what crashes the reference tools is refused with a reason", () => {
  for (const [name, words] of [
    ["zfile-algo-0.zfile", "algorithm 0"],
    ["zfile-block-size-128k.zfile", "block size 131072"],
  ] as const) {
    expect(failure(() => inspectLayer(`${VECTORS}/bad/${name}`)).message).toContain(words);
  }
});

test("14.4: what a sealed layer has between index and trailer is never memory that was left over", () => {
  const upper = upperRef();
  using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB });
  stack.write(0, new Uint8Array(512).fill(1));
  const sealed = `${scratch.path}/padding`;
  stack.seal(sealed);
  const bytes = readFileSync(sealed);
  const trailer = bytes.subarray(-4096);
  const end = trailer.readUInt32LE(32) + 16 * trailer.readUInt32LE(40);
  const gap = bytes.subarray(end, bytes.byteLength - 4096);
  expect(gap.every((byte) => byte === 0 || byte === 0xff)).toBe(true);
});

test("every test that the table of rules names is there", async () => {
  const page = readFileSync(`${VECTORS}/README.md`, "utf8");
  const sources = new Map<string, string>();
  for await (const file of new Glob("**/*.test.ts").scan(import.meta.dir)) {
    sources.set(file, readFileSync(join(import.meta.dir, file), "utf8"));
  }
  const rows = page.split("\n").filter((line) => /^\| \d/.test(line));
  expect(rows.length).toBeGreaterThan(40);
  for (const row of rows) {
    const named = [...row.split(" | ")[2]!.matchAll(/`([\w/-]+\.test\.ts)`: ([^;|]+)/g)];
    expect(named.length, row).toBeGreaterThan(0);
    for (const [, file, title] of named) {
      const source = sources.get(file!);
      expect(source, `${file} of: ${row}`).toBeDefined();
      expect(source!.includes(title!.trim()), `${file} has no test "${title!.trim()}"`).toBe(true);
    }
  }
});
