import { describe, expect, test } from "bun:test";
import { existsSync, readdirSync, readFileSync, statSync, unlinkSync } from "node:fs";
import { AenvError } from "../../lib/errors.ts";
import { createLayerWriter, inspectLayer, mergeLayers, openStack, planMerge, startMerge } from "./index.ts";
import { BLOCK_BYTES, MAPPING_BYTES } from "./lsmt/format.ts";
import { expectEqualBytes, fillPattern, scratchDirectory, testRandom } from "./test-support.ts";
import type { LayerRef, LayerStack, UpperMode, UpperRef } from "./types.ts";

const MIB = 1 << 20;
const SEGMENT = 4 * MIB;

function readAll(stack: LayerStack): Uint8Array {
  const bytes = new Uint8Array(stack.virtualSizeBytes);
  stack.read(0, bytes);
  return bytes;
}

/** Bytes of data that the upper maps. */
function liveBytes(stack: LayerStack): number {
  return stack.stats().upperLiveBytes;
}

function allocated(file: string): number {
  return statSync(file).blocks * 512;
}

/** As a caller does it between requests: bounded steps, flushes when they are asked for. */
function compactAll(stack: LayerStack, budgetBytes: number): { steps: number; movedBytes: number } {
  let movedBytes = 0;
  for (let steps = 1; steps < 100_000; steps++) {
    const progress = stack.compactStep(budgetBytes);
    // One mapping more than the budget at most, in pieces of a MiB.
    expect(progress.movedBytes).toBeLessThanOrEqual(budgetBytes + 8 * MIB);
    movedBytes += progress.movedBytes;
    if (progress.done) return { steps, movedBytes };
    if (progress.flushNeeded) stack.flush();
  }
  throw new Error("compaction does not end");
}

/**
 * The disk as a reader of the format sees it that knows nothing of epochs or segments: entries in order of time,
 * the reserved offset and zero lengths skipped, everything else inside the data file.
 */
function naiveRead(upper: UpperRef, sizeBytes: number): Uint8Array {
  const data = readFileSync(upper.data);
  const index = readFileSync(upper.index!);
  const disk = new Uint8Array(sizeBytes);
  for (let at = BLOCK_BYTES; at + MAPPING_BYTES <= index.byteLength; at += MAPPING_BYTES) {
    const low = index.readBigUint64LE(at);
    const high = index.readBigUint64LE(at + 8);
    const offset = low & ((1n << 50n) - 1n);
    const length = Number(low >> 50n);
    if (offset === (1n << 50n) - 1n || length === 0) continue;
    const target = Number(high & ((1n << 55n) - 1n));
    expect(target).toBeGreaterThanOrEqual(8);
    expect(target * 512).toBeLessThanOrEqual(data.byteLength);
    const from = Number(offset) * 512;
    if ((high >> 55n) & 1n) {
      disk.fill(0, from, from + length * 512);
      continue;
    }
    expect((target + length) * 512).toBeLessThanOrEqual(data.byteLength);
    disk.set(data.subarray(target * 512, (target + length) * 512), from);
  }
  return disk;
}

describe("an upper that rewrites the same blocks", () => {
  const cases: { name: string; mode: UpperMode; unit: number; size: number; total: number }[] = [
    { name: "4 KiB blocks", mode: "logStructured", unit: 4096, size: 12 * MIB, total: 160 * MIB },
    { name: "single sectors", mode: "logStructured", unit: 512, size: MIB, total: 24 * MIB },
    { name: "hybrid with discards", mode: "hybridLogStructured", unit: 4096, size: 8 * MIB, total: 96 * MIB },
  ];
  for (const { name, mode, unit, size, total } of cases) {
    test(`${name}: takes at most twice what is mapped and a segment`, () => {
      using scratch = scratchDirectory("compact");
      const random = testRandom();
      const upper = { data: `${scratch.path}/up.data`, index: `${scratch.path}/up.index`, mode };
      const model = new Uint8Array(size);
      let stack = openStack({ lowers: [], upper, virtualSizeBytes: size });
      const pattern = fillPattern(new Uint8Array(64 * unit), 7);
      let worst = 0;
      for (let written = 0, n = 0; written < total; n++) {
        const length = unit * (1 + (random(8) === 0 ? random(60) : random(3)));
        const at = random((size - length) / unit) * unit;
        if (random(6) === 0) {
          stack.discard(at, length);
          model.fill(0, at, at + length);
        }
        const from = random(64 - length / unit + 1) * unit;
        stack.write(at, pattern.subarray(from, from + length));
        model.set(pattern.subarray(from, from + length), at);
        written += length;
        if (n % 500 === 0) stack.flush();
        // What a daemon does between requests keeps up with what is written.
        if (n % 16 === 0) {
          const progress = stack.compactStep(256 * 1024);
          if (progress.flushNeeded) stack.flush();
        }
        worst = Math.max(worst, allocated(upper.data));
      }
      // While it is written to, too, the files stay within reach of the bound.
      expect(worst).toBeLessThan(3 * size + 4 * SEGMENT);
      expectEqualBytes(readAll(stack), model, "before the last compaction");
      compactAll(stack, 100_000);
      expectEqualBytes(readAll(stack), model, "compacted");
      const live = liveBytes(stack);
      // The file system counts whole blocks of 4 KiB, and a hole must cover one to count.
      expect(allocated(upper.data)).toBeLessThanOrEqual(2 * live + SEGMENT + BLOCK_BYTES);
      const { upperMappings, upperIndexBytes, upperDataBytes, compactionDue } = stack.stats();
      expect(compactionDue).toBe(false);
      expect(upperDataBytes).toBeLessThanOrEqual(2 * live + SEGMENT);
      // Reserved entries are behind it.
      expect(statSync(upper.index).size).toBeLessThanOrEqual(2 * upperIndexBytes);
      expect(upperIndexBytes).toBeLessThanOrEqual(BLOCK_BYTES + (2 * upperMappings + 16384) * MAPPING_BYTES);
      expect(readdirSync(scratch.path).sort()).toEqual(["up.data", "up.index"]);
      stack.flush();
      expectEqualBytes(naiveRead(upper, size), model, "read without knowledge of epochs");
      const { image } = stack;
      stack[Symbol.dispose]();
      stack = openStack(image);
      expectEqualBytes(readAll(stack), model, "opened again");
      // Sealed, the file keeps its holes and is an ordinary layer.
      stack.seal(`${scratch.path}/sealed`);
      expectEqualBytes(readAll(stack), model, "sealed");
      expect(allocated(`${scratch.path}/sealed`)).toBeLessThan(2 * live + SEGMENT + 2 * MIB);
      stack[Symbol.dispose]();
      using layer = openStack({ lowers: [{ file: `${scratch.path}/sealed` }] });
      expectEqualBytes(readAll(layer), model, "the sealed layer");
    }, 120_000);
  }

  test("space is used again only behind the flush that makes it free, and not under a read", () => {
    using scratch = scratchDirectory("pins");
    const upper = { data: `${scratch.path}/up.data`, index: `${scratch.path}/up.index` };
    const tuning = { segmentSectors: 64 };
    using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB }, { tuning });
    const segment = new Uint8Array(64 * 512);
    for (let n = 0; n < 4; n++) stack.write(0, segment.fill(n + 1));
    const unpin = stack.pin();
    stack.flush();
    const end = statSync(upper.data).size;
    for (let n = 0; n < 4; n++) stack.write(0, segment.fill(n + 5));
    expect(statSync(upper.data).size).toBe(end + 4 * segment.byteLength);
    unpin();
    // The segment begun at the end of the file is filled first.
    stack.write(0, segment.fill(9));
    const grown = statSync(upper.data).size;
    for (let n = 0; n < 2; n++) stack.write(0, segment.fill(n + 10));
    expect(statSync(upper.data).size).toBe(grown);
    expect(readAll(stack)[0]).toBe(11);
  });
});

describe("a chain of snapshots", () => {
  test("is kept short by merges in the background, in place of the layers they stand for", () => {
    using scratch = scratchDirectory("chain");
    const random = testRandom();
    const size = 4 * MIB;
    const model = new Uint8Array(size);
    const uuid = crypto.randomUUID();
    const writer = createLayerWriter(`${scratch.path}/image`, { virtualSizeBytes: size, uuid });
    const base = fillPattern(new Uint8Array(MIB), 1);
    writer.append(0, base);
    model.set(base);
    const upper = { data: `${scratch.path}/up.data`, index: `${scratch.path}/up.index` };
    let stack = openStack({ lowers: [writer.finish()], upper });
    let longest = 0;
    const snapshots = 40;
    for (let n = 0; n < snapshots; n++) {
      for (let i = 0; i < 20; i++) {
        const length = 4096 * (1 + random(8));
        const at = random((size - length) / 4096) * 4096;
        const data = fillPattern(new Uint8Array(length), n * 100 + i);
        stack.write(at, data);
        model.set(data, at);
        if (random(5) === 0) {
          stack.discard(at, 4096);
          model.fill(0, at, at + 4096);
        }
      }
      stack.restack(`${scratch.path}/snap${n}`, upper);
      const plan = planMerge(stack.image.lowers, { first: 1 });
      if (plan !== undefined) {
        const layers = stack.image.lowers.slice(plan.first, plan.first + plan.count);
        using job = startMerge(layers, `${scratch.path}/merged${n}`, { uuid: crypto.randomUUID() });
        while (!job.step(50_000).done) {
          // The guest goes on meanwhile.
          const data = fillPattern(new Uint8Array(4096), n);
          stack.write(8192, data);
          model.set(data, 8192);
        }
        const merged = job.finish();
        const unpin = stack.pin();
        const replaced = stack.swapLowers({ ...plan, merged });
        expect(replaced).toEqual(layers);
        expectEqualBytes(readAll(stack), model, `swapped after snapshot ${n}`);
        // Until the new config is stored the old files are needed; then nobody does.
        for (const layer of replaced) unlinkSync(layer.file);
        unpin();
      }
      longest = Math.max(longest, stack.image.lowers.length);
      if (n % 10 === 9) {
        const { image } = stack;
        stack[Symbol.dispose]();
        stack = openStack(image);
        expect(stack.stats().warnings).toEqual([]);
        expectEqualBytes(readAll(stack), model, `opened after snapshot ${n}`);
      }
    }
    expect(longest).toBeLessThan(14);
    expect(stack.image.lowers.every((layer) => existsSync(layer.file))).toBe(true);
    stack[Symbol.dispose]();
  });

  test("layers that do not have what they are to stand for are refused", () => {
    using scratch = scratchDirectory("swap");
    const layer = (name: string, salt: number, at: number): LayerRef => {
      using writer = createLayerWriter(`${scratch.path}/${name}`, { virtualSizeBytes: MIB });
      writer.append(at, fillPattern(new Uint8Array(4096), salt));
      return writer.finish();
    };
    const lowers = [layer("a", 1, 0), layer("b", 2, 8192)];
    using stack = openStack({ lowers });
    const before = readAll(stack);
    expect(() => stack.swapLowers({ first: 0, count: 2, merged: layer("c", 3, 0) })).toThrow("differs");
    expect(() => stack.swapLowers({ first: 1, count: 2, merged: lowers[0]! })).toThrow(AenvError);
    // A plan for other layers than those that are there, however well the new one would fit.
    const fits = mergeLayers([lowers[0]!], `${scratch.path}/fits`, {});
    for (const files of [[lowers[1]!.file], [], lowers.map(({ file }) => file)]) {
      expect(() => stack.swapLowers({ first: 0, count: 1, files, merged: fits })).toThrow("not ");
    }
    expect(stack.image.lowers).toEqual(lowers);
    expectEqualBytes(readAll(stack), before, "unchanged");
    stack.swapLowers({ first: 0, count: 1, files: [lowers[0]!.file], merged: fits });
    expect(stack.image.lowers).toEqual([fits, lowers[1]!]);
  });

  test("layers without a size of their own, and bigger than the one on top, merge whole", () => {
    using scratch = scratchDirectory("sizes");
    const make = (name: string, virtualSizeBytes: number, at: number): LayerRef => {
      const writer = createLayerWriter(`${scratch.path}/${name}`, { virtualSizeBytes: 4 * MIB });
      writer.append(at, fillPattern(new Uint8Array(4096), at));
      const ref = writer.finish();
      const bytes = readFileSync(ref.file);
      bytes.writeBigUint64LE(BigInt(virtualSizeBytes), bytes.byteLength - 4096 + 48);
      Bun.write(ref.file, bytes);
      return ref;
    };
    const lowers = [make("big", 4 * MIB, 3 * MIB), make("none", 0, 8192), make("small", MIB, 0)];
    using job = startMerge(lowers.slice(0, 2), `${scratch.path}/m`, {});
    while (!job.step(1).done);
    const merged = job.finish();
    expect(inspectLayer(merged.file)).toMatchObject({ virtualSizeBytes: 4 * MIB, mappingCount: 2 });
    using stack = openStack({ lowers });
    const before = readAll(stack);
    stack.swapLowers({ first: 0, count: 2, merged });
    expectEqualBytes(readAll(stack), before, "swapped");
    using all = startMerge(lowers, `${scratch.path}/all`, {});
    while (!all.step(1).done);
    expect(inspectLayer(all.finish().file)).toMatchObject({ virtualSizeBytes: MIB, mappingCount: 3 });
  });
});
