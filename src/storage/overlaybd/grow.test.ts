import { describe, expect, test } from "bun:test";
import { readFileSync, statSync } from "node:fs";
import { AenvError } from "../../lib/errors.ts";
import { createLayerWriter, createUpper, inspectLayer, mergeLayers, openStack } from "./index.ts";
import { expectEqualBytes, fillPattern, scratchDirectory } from "./test-support.ts";
import type { LayerStack, UpperMode } from "./types.ts";

const MIB = 1 << 20;
const TIB = 2 ** 40;

function at(stack: LayerStack, offset: number, length = 512): Uint8Array {
  const bytes = new Uint8Array(length);
  stack.read(offset, bytes);
  return bytes;
}

describe("growing a disk", () => {
  for (const mode of ["logStructured", "hybridLogStructured", "sparse"] as const satisfies UpperMode[]) {
    test(mode, () => {
      using scratch = scratchDirectory("grow");
      const upper = { data: `${scratch.path}/u.data`, index: `${scratch.path}/u.index`, mode };
      const writer = createLayerWriter(`${scratch.path}/l`, { virtualSizeBytes: MIB });
      writer.append(0, fillPattern(new Uint8Array(4096), 1));
      const lower = writer.finish();
      const stack = openStack({ lowers: [lower], upper });
      const data = fillPattern(new Uint8Array(8192), 2);
      stack.write(MIB - 8192, data);
      expect(() => stack.write(MIB, data)).toThrow("behind the disk");
      expect(() => stack.grow(MIB / 2)).toThrow("cannot shrink");
      expect(() => stack.grow(MIB + 100)).toThrow(AenvError);
      stack.grow(MIB);
      stack.grow(3 * MIB + 512);
      expect(stack.virtualSizeBytes).toBe(3 * MIB + 512);
      expect(stack.image.virtualSizeBytes).toBe(3 * MIB + 512);
      expectEqualBytes(at(stack, MIB, 2 * MIB), new Uint8Array(2 * MIB), "what is new");
      stack.write(3 * MIB, data.subarray(0, 512));
      expect(readFileSync(upper.data).readBigUint64LE(48)).toBe(BigInt(3 * MIB + 512));
      if (mode !== "sparse")
        expect(readFileSync(upper.index).readBigUint64LE(48)).toBe(BigInt(3 * MIB + 512));
      else expect(statSync(upper.data).size).toBe(4096 + 3 * MIB + 512);
      const { image } = stack;
      stack[Symbol.dispose]();
      // A config with a bigger size completes or begins growing.
      const again = openStack({ ...image, virtualSizeBytes: 4 * MIB });
      expect(again.virtualSizeBytes).toBe(4 * MIB);
      expectEqualBytes(at(again, MIB - 8192, 8192), data, "before the old end");
      expectEqualBytes(at(again, 3 * MIB), data.subarray(0, 512), "behind the old end");
      again.restack(`${scratch.path}/s`, upper);
      expect(inspectLayer(`${scratch.path}/s`).virtualSizeBytes).toBe(4 * MIB);
      again[Symbol.dispose]();
      using last = openStack(again.image);
      expect(last.virtualSizeBytes).toBe(4 * MIB);
      expectEqualBytes(at(last, 3 * MIB), data.subarray(0, 512), "restacked");
    });
  }

  test("a stack without an upper cannot grow", () => {
    using scratch = scratchDirectory("grow");
    using writer = createLayerWriter(`${scratch.path}/l`, { virtualSizeBytes: MIB });
    using stack = openStack({ lowers: [writer.finish()] });
    expect(() => stack.grow(2 * MIB)).toThrow("read-only");
  });
});

describe("disks beyond 2 TiB", () => {
  const offsets = [0, 4096, 2 * TIB - 4096, 2 * TIB, 2 * TIB + 50 * 512, 17 * TIB, 2 ** 58 - 512];

  test("layers, stacks and merges keep every bit of an offset, with a mapping at sector 0, too", () => {
    using scratch = scratchDirectory("huge");
    const size = 2 ** 58;
    const lowers = offsets.map((offset, n) => {
      using writer = createLayerWriter(`${scratch.path}/l${n}`, { virtualSizeBytes: size });
      if (offset > 0) writer.append(0, new Uint8Array(512).fill(100 + n));
      writer.append(offset, new Uint8Array(512).fill(n + 1));
      return writer.finish();
    });
    const check = (stack: LayerStack, first: number) => {
      expect(at(stack, 0)[0]).toBe(first);
      for (const [n, offset] of offsets.entries()) {
        if (offset > 0) expect(at(stack, offset)[511]).toBe(n + 1);
      }
      expect(at(stack, 2 * TIB + 512)[0]).toBe(0);
      expect(at(stack, 100 * 512)[0]).toBe(0);
    };
    const upper = { data: `${scratch.path}/u.data`, index: `${scratch.path}/u.index` };
    using stack = openStack({ lowers, upper });
    check(stack, 106);
    stack.write(3 * TIB, new Uint8Array(512).fill(77));
    stack.discard(0, 512);
    stack.discard(TIB, 2 * TIB);
    expect(at(stack, 3 * TIB)[0]).toBe(77);
    expect(at(stack, 2 * TIB)[0]).toBe(0);
    expect(at(stack, 17 * TIB)[0]).toBe(6);
    stack.restack(`${scratch.path}/sealed`, upper);
    using merged = openStack({ lowers: [mergeLayers(lowers, `${scratch.path}/m`, {})] });
    check(merged, 106);
    using all = openStack({ lowers: [mergeLayers(stack.image.lowers, `${scratch.path}/all`, {})] });
    expect(at(all, 3 * TIB)[0]).toBe(77);
    expect(at(all, 0)[0]).toBe(0);
    expect(at(all, 2 * TIB)[0]).toBe(0);
    expect(at(all, 17 * TIB)[0]).toBe(6);
  });

  test("the biggest disk, and one sector more", () => {
    using scratch = scratchDirectory("huge");
    const most = (2 ** 50 - 1) * 512;
    // Beyond 2^53 bytes the last sectors are still whole numbers.
    expect(Number.isSafeInteger(most)).toBe(false);
    createUpper({ data: `${scratch.path}/a`, index: `${scratch.path}/ai` }, most);
    using stack = openStack({
      lowers: [],
      upper: { data: `${scratch.path}/a`, index: `${scratch.path}/ai` },
    });
    stack.write(most - 512, new Uint8Array(512).fill(3));
    expect(at(stack, most - 512)[0]).toBe(3);
    expect(() => createUpper({ data: `${scratch.path}/b`, index: `${scratch.path}/bi` }, most + 512)).toThrow(
      AenvError,
    );
  });
});
