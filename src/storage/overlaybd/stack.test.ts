import { describe, expect, test } from "bun:test";
import {
  copyFileSync,
  existsSync,
  readdirSync,
  readFileSync,
  statSync,
  truncateSync,
  unlinkSync,
  writeFileSync,
} from "node:fs";
import { AenvError } from "../../lib/errors.ts";
import {
  commitUpper,
  createLayerWriter,
  createUpper,
  inspectLayer,
  mergeLayers,
  openStack,
} from "./index.ts";
import { BLOCK_BYTES, MAPPING_BYTES } from "./lsmt/format.ts";
import { expectEqualBytes, fillPattern, scratchDirectory, testRandom } from "./test-support.ts";
import type { CommitOptions, ImageConfig, LayerStack, UpperMode, UpperRef } from "./types.ts";

const MIB = 1 << 20;
const MODES: readonly UpperMode[] = ["logStructured", "hybridLogStructured", "sparse"];

function codeOf(action: () => unknown): string {
  try {
    action();
  } catch (error) {
    if (error instanceof AenvError) return error.code;
    throw error;
  }
  return "no error";
}

function readAll(stack: LayerStack): Uint8Array {
  const bytes = new Uint8Array(stack.virtualSizeBytes);
  stack.read(0, bytes);
  return bytes;
}

function expectDisk(config: ImageConfig, model: Uint8Array, what: string): void {
  using stack = openStack(config);
  expectEqualBytes(readAll(stack), model, what);
}

/** A lower with data, zeros and gaps, and the disk it makes. */
function makeLower(path: string, sizeBytes: number, salt: number, model: Uint8Array): { file: string } {
  const writer = createLayerWriter(path, { virtualSizeBytes: sizeBytes, uuid: crypto.randomUUID() });
  for (let at = (salt % 5) * 4096; at + 65536 <= sizeBytes; at += 65536 + (salt % 7) * 512) {
    const data = fillPattern(new Uint8Array(8192 + (salt % 3) * 512), salt * 1000 + at);
    writer.append(at, data);
    model.set(data, at);
    writer.zero(at + 16384, 4096);
    model.fill(0, at + 16384, at + 20480);
  }
  return writer.finish();
}

describe("random operations against a plain array", () => {
  for (const mode of MODES) {
    for (const withLowers of [false, true]) {
      test(`${mode}${withLowers ? " over lowers" : ""}`, () => {
        using scratch = scratchDirectory("model");
        const random = testRandom();
        const SIZE = 2 * MIB + 512 * 3;
        const model = new Uint8Array(SIZE);
        const lowers = withLowers
          ? [1, 2, 3].map((salt) =>
              makeLower(`${scratch.path}/lower${salt}`, SIZE - (SIZE % 512), salt, model),
            )
          : [];
        const upper: UpperRef = { data: `${scratch.path}/up.data`, index: `${scratch.path}/up.index`, mode };
        let stack = openStack({ lowers, upper, virtualSizeBytes: SIZE });
        let seals = 0;
        for (let step = 0; step < 400; step++) {
          const sectors = SIZE / 512;
          const length = (1 + random(random(20) === 0 ? 2000 : 40)) * 512;
          const offset = Math.min(random(sectors) * 512, SIZE - length);
          const what = random(100);
          if (what < 55) {
            const data = fillPattern(new Uint8Array(length), step);
            stack.write(offset, data);
            model.set(data, offset);
          } else if (what < 75) {
            stack.discard(offset, length);
            model.fill(0, offset, offset + length);
          } else if (what < 90) {
            const got = new Uint8Array(length);
            stack.read(offset, got);
            expectEqualBytes(got, model.subarray(offset, offset + length), `step ${step}`);
          } else if (what < 95) {
            stack.flush();
          } else if (what < 98) {
            const { image } = stack;
            stack[Symbol.dispose]();
            stack = openStack(image);
            expect(stack.stats().warnings).toEqual([]);
            expectEqualBytes(readAll(stack), model, `reopened at step ${step}`);
          } else {
            // In place, and onto other names.
            const fresh =
              random(2) === 0
                ? (stack.image.upper ?? upper)
                : { data: `${scratch.path}/f${step}.data`, index: `${scratch.path}/f${step}.index` };
            stack.restack(`${scratch.path}/sealed${seals++}`, fresh);
          }
        }
        expectEqualBytes(readAll(stack), model, "end");
        const covered = new Uint8Array(SIZE);
        for (const extent of stack.mappedExtents("all")) {
          covered.fill(extent.zeroed ? 1 : 2, extent.offsetBytes, extent.offsetBytes + extent.lengthBytes);
        }
        for (let at = 0; at < SIZE; at++) {
          if (model[at] !== 0 && covered[at] !== 2) throw new Error(`byte ${at} has data but no extent`);
        }
        const { image } = stack;
        stack.seal(`${scratch.path}/last`);
        expect(stack.readOnly).toBe(true);
        expect(codeOf(() => stack.write(0, new Uint8Array(512)))).toBe("read_only");
        expectEqualBytes(readAll(stack), model, "sealed");
        const refs = stack.image.lowers;
        expect(refs.length).toBe(image.lowers.length + 1);
        stack[Symbol.dispose]();
        expectDisk({ lowers: refs, virtualSizeBytes: SIZE }, model, "sealed, reopened");
        const merged = mergeLayers(refs, `${scratch.path}/merged`, {});
        expectDisk({ lowers: [merged] }, model, "merged");
        const left = readdirSync(scratch.path).filter((name) => /tmp|fresh/.test(name));
        expect(left).toEqual([]);
      }, 120_000);
    }
  }
});

describe("what survives", () => {
  test("an index file cut at any byte gives the disk as it was after the mappings before", () => {
    using scratch = scratchDirectory("cut");
    const random = testRandom();
    const SIZE = 64 * 1024;
    const upper = { data: `${scratch.path}/up.data`, index: `${scratch.path}/up.index` };
    const model = new Uint8Array(SIZE);
    const states = [model.slice()];
    {
      using stack = openStack({ lowers: [], upper, virtualSizeBytes: SIZE });
      for (let step = 0; step < 40; step++) {
        const length = (1 + random(12)) * 512;
        const offset = random((SIZE - length) / 512) * 512;
        if (random(4) === 0) {
          stack.discard(offset, length);
          model.fill(0, offset, offset + length);
        } else {
          const data = fillPattern(new Uint8Array(length), step);
          stack.write(offset, data);
          model.set(data, offset);
        }
        states.push(model.slice());
      }
    }
    const size = statSync(upper.index).size;
    // The first entry says under which boot the others were written.
    expect(size).toBe(BLOCK_BYTES + 41 * MAPPING_BYTES);
    const cut = { data: `${scratch.path}/cut.data`, index: `${scratch.path}/cut.index` };
    for (let at = BLOCK_BYTES; at <= size; at++) {
      copyFileSync(upper.data, cut.data);
      copyFileSync(upper.index, cut.index);
      truncateSync(cut.index, at);
      using stack = openStack({ lowers: [], upper: cut });
      const kept = Math.floor((at - BLOCK_BYTES) / MAPPING_BYTES);
      expectEqualBytes(readAll(stack), states[Math.max(0, kept - 1)]!, `index cut at ${at}`);
      // What is written next must come after the whole mappings that were kept.
      stack.write(0, fillPattern(new Uint8Array(512), 99));
      expect(stack.stats().upperIndexBytes).toBe(BLOCK_BYTES + (Math.max(1, kept) + 1) * MAPPING_BYTES);
    }
  });

  test("the index file has room for entries to come, which are none: after a kill, and after the upper is closed", () => {
    using scratch = scratchDirectory("room");
    const SIZE = 64 * 1024;
    const upper = { data: `${scratch.path}/up.data`, index: `${scratch.path}/up.index` };
    const killed = { data: `${scratch.path}/killed.data`, index: `${scratch.path}/killed.index` };
    const sizes = new Set<number>();
    const WRITES = 80;
    const data = fillPattern(new Uint8Array(512), 1);
    let before: Uint8Array;
    {
      using stack = openStack({ lowers: [], upper, virtualSizeBytes: SIZE });
      for (let i = 0; i < WRITES; i++) {
        stack.write(((i * 37) % 128) * 512, data);
        stack.flush();
        sizes.add(statSync(upper.index).size);
      }
      // Hardly a flush makes the file longer.
      expect(sizes.size).toBeLessThan(4);
      copyFileSync(upper.data, killed.data);
      copyFileSync(upper.index, killed.index);
      before = readAll(stack);
    }
    // To other readers the records and the room are padding: entries of no length at the last offset.
    const words = new Uint32Array(new Uint8Array(readFileSync(killed.index)).buffer, BLOCK_BYTES);
    let mappings = 0;
    for (let at = 0; at < words.length; at += 4) {
      const padding = words[at] === 0xffff_ffff && words[at + 1] === 0x3_ffff;
      if (padding) continue;
      expect(words[at + 1]! >>> 18).toBe(1);
      mappings++;
    }
    expect(mappings).toBe(WRITES);
    // The flushes' records and those of session and close are entries, too.
    expect(statSync(upper.index).size).toBe(BLOCK_BYTES + (2 * WRITES + 2) * MAPPING_BYTES);
    for (const pair of [upper, killed]) {
      using again = openStack({ lowers: [], upper: pair });
      expectEqualBytes(readAll(again), before, pair.data);
      again.write(0, fillPattern(new Uint8Array(512), 2));
      again.flush();
    }
    const committed = commitUpper(killed, `${scratch.path}/committed`, {});
    using last = openStack({ lowers: [committed] });
    before.set(fillPattern(new Uint8Array(512), 2));
    expectEqualBytes(readAll(last), before, "committed");
  });

  test("data lost behind the last flush drops exactly the mappings that need it, with a warning", () => {
    using scratch = scratchDirectory("tail");
    const SIZE = 64 * 1024;
    const upper = { data: `${scratch.path}/up.data`, index: `${scratch.path}/up.index` };
    const model = new Uint8Array(SIZE);
    {
      using stack = openStack({ lowers: [], upper, virtualSizeBytes: SIZE });
      const data = fillPattern(new Uint8Array(4096), 1);
      stack.write(8192, data);
      model.set(data, 8192);
      stack.flush();
      stack.write(4096, fillPattern(new Uint8Array(4096), 2));
      stack.discard(8192, 512);
    }
    const copy = { data: `${scratch.path}/copy.data`, index: `${scratch.path}/copy.index` };
    copyFileSync(upper.data, copy.data);
    copyFileSync(upper.index, copy.index);
    truncateSync(copy.data, BLOCK_BYTES + 4096 + 700);
    {
      using stack = openStack({ lowers: [], upper: copy });
      expect(stack.stats().warnings.length).toBe(1);
      expect(stack.stats().warnings[0]).toContain("2 mappings");
      expectEqualBytes(readAll(stack), model, "after the loss");
      const data = fillPattern(new Uint8Array(1024), 3);
      stack.write(0, data);
      model.set(data, 0);
    }
    expect(statSync(`${copy.index}.dropped`).size).toBe(2 * MAPPING_BYTES);
    using again = openStack({ lowers: [], upper: copy });
    expect(again.stats().warnings).toEqual([]);
    expectEqualBytes(readAll(again), model, "opened again");
  });

  test("the damaged pair of the vectors opens without its tail", () => {
    using scratch = scratchDirectory("vector");
    const vectors = `${import.meta.dir}/../../../tests/vectors/overlaybd`;
    const upper = { data: `${scratch.path}/d`, index: `${scratch.path}/i` };
    copyFileSync(`${vectors}/bad/rw-data-cut.data`, upper.data);
    copyFileSync(`${vectors}/bad/rw-data-cut.index`, upper.index);
    using stack = openStack({ lowers: [], upper });
    expect(stack.stats().warnings[0]).toContain("3 mappings");
    using whole = openStack({ lowers: [{ file: `${vectors}/tiny.lsmt` }] });
    const got = readAll(stack);
    const expected = readAll(whole);
    // inputs/tiny.ops: the last write, the discard and the write at 512000 are gone.
    expected.fill(0, 512000, 512000 + 2560);
    expected.fill(0, 1048064);
    expectEqualBytes(got, expected, "rest of the disk");
  });

  test("a kill -9 loses nothing that was acknowledged", async () => {
    using scratch = scratchDirectory("kill");
    const SIZE = 4 * MIB;
    const script = `
      import { openStack } from ${JSON.stringify(`${import.meta.dir}/index.ts`)};
      import { writeSync } from "node:fs";
      const [directory] = process.argv.slice(2);
      const upper = { data: directory + "/up.data", index: directory + "/up.index" };
      const stack = openStack({ lowers: [], upper, virtualSizeBytes: ${SIZE} });
      for (let n = 1; ; n++) {
        const data = new Uint8Array(4096).fill(n & 255);
        stack.write(((n * 7919) % 1024) * 4096, data);
        if (n % 97 === 0) stack.restack(directory + "/sealed" + n, upper);
        writeSync(1, n + "\\n");
      }`;
    writeFileSync(`${scratch.path}/child.ts`, script);
    const child = Bun.spawn([process.execPath, `${scratch.path}/child.ts`, scratch.path], {
      stdout: "pipe",
      stderr: "inherit",
    });
    let text = "";
    let killed = false;
    for await (const chunk of child.stdout) {
      text += new TextDecoder().decode(chunk);
      if (!killed && text.split("\n").length > 400) {
        killed = true;
        child.kill("SIGKILL");
      }
    }
    await child.exited;
    const acknowledged = Number(text.slice(0, text.lastIndexOf("\n")).split("\n").at(-1));
    expect(acknowledged).toBeGreaterThanOrEqual(399);
    const check = (stack: LayerStack, last: number): boolean => {
      const model = new Uint8Array(SIZE);
      for (let n = 1; n <= last; n++) {
        const at = ((n * 7919) % 1024) * 4096;
        model.fill(n & 255, at, at + 4096);
      }
      return Buffer.compare(readAll(stack), model) === 0;
    };
    // The child never stored its changed config: opening the first one must find every restack.
    using stack = openStack({
      lowers: [],
      upper: { data: `${scratch.path}/up.data`, index: `${scratch.path}/up.index` },
    });
    expect(stack.image.lowers.length).toBeGreaterThanOrEqual(Math.floor(acknowledged / 97));
    expect(check(stack, acknowledged) || check(stack, acknowledged + 1)).toBe(true);
    const { image } = stack;
    stack[Symbol.dispose]();
    using again = openStack(image);
    expect(again.image).toEqual(image);
    expect(check(again, acknowledged) || check(again, acknowledged + 1)).toBe(true);
    expect(existsSync(`${scratch.path}/up.data.restack`)).toBe(false);
  }, 120_000);
});

describe("layers we write", () => {
  const forms: [string, CommitOptions][] = [
    ["plain", {}],
    ["tar", { tar: true }],
    ...(["lz4", "zstd"] as const).flatMap((algorithm) =>
      [4096, 8192, 16384, 32768, 65536].map((blockSizeBytes): [string, CommitOptions] => [
        `${algorithm} ${blockSizeBytes}`,
        { compression: { algorithm, blockSizeBytes }, tar: blockSizeBytes === 4096 },
      ]),
    ),
  ];

  test("read the same in every form", () => {
    using scratch = scratchDirectory("forms");
    const SIZE = 3 * MIB;
    const model = new Uint8Array(SIZE);
    const upper = { data: `${scratch.path}/up.data`, index: `${scratch.path}/up.index` };
    const parent = crypto.randomUUID();
    {
      using stack = openStack({ lowers: [], upper, virtualSizeBytes: SIZE });
      for (let i = 0; i < 60; i++) {
        const data = fillPattern(new Uint8Array(512 * (1 + ((i * 37) % 90))), i);
        const at = ((i * 7919) % 4000) * 512;
        stack.write(at, data);
        model.set(data, at);
      }
      stack.discard(MIB, 70_000 - (70_000 % 512));
      model.fill(0, MIB, MIB + 70_000 - (70_000 % 512));
      // A long run: more than one mapping can hold.
      const run = new Uint8Array(512 * 900).fill(5);
      stack.write(2 * MIB, run);
      model.set(run, 2 * MIB);
    }
    for (const [name, options] of forms) {
      const uuid = crypto.randomUUID();
      const target = `${scratch.path}/${name.replace(" ", "-")}`;
      const ref = commitUpper(upper, target, { ...options, uuid, parentUuid: parent });
      expect(ref.uuid).toBe(uuid);
      expect(ref.size).toBe(statSync(target).size);
      const found = inspectLayer(target);
      expect(found.uuid).toBe(uuid);
      expect(found.parentUuid).toBe(parent);
      expect(found.virtualSizeBytes).toBe(SIZE);
      expect(found.container).toEqual([
        ...(options.tar === true ? (["tar"] as const) : []),
        ...(options.compression === undefined ? [] : (["zfile"] as const)),
        "lsmt",
      ]);
      expectDisk({ lowers: [ref] }, model, name);
      // Merging one layer is copying it: same content again, from every form.
      const merged = mergeLayers([ref], `${target}.merged`, {});
      expectDisk({ lowers: [merged] }, model, `${name}, merged`);
    }
    expect(codeOf(() => commitUpper(upper, `${scratch.path}/plain`, {}))).toBe("layer_exists");
    expect(
      codeOf(() =>
        commitUpper(upper, `${scratch.path}/x`, { compression: { algorithm: "lz4", blockSizeBytes: 5000 } }),
      ),
    ).toBe("invalid_compression");
    expect(codeOf(() => commitUpper(upper, `${scratch.path}/x`, { uuid: "no" }))).toBe("invalid_uuid");
    expect(readdirSync(scratch.path).filter((name) => name.includes("tmp"))).toEqual([]);
  }, 120_000);

  test("a layer that does not compress never has 64 KiB blocks", () => {
    using scratch = scratchDirectory("random");
    const upper = { data: `${scratch.path}/up.data`, index: `${scratch.path}/up.index` };
    const data = crypto.getRandomValues(new Uint8Array(65536)).slice();
    {
      using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB });
      for (let at = 0; at < MIB; at += 65536) stack.write(at, data);
    }
    for (const algorithm of ["lz4", "zstd"] as const) {
      const target = `${scratch.path}/${algorithm}`;
      const ref = commitUpper(upper, target, { compression: { algorithm, blockSizeBytes: 65536 } });
      expect(readFileSync(target).readUInt32LE(72)).toBe(32768);
      using stack = openStack({ lowers: [ref] });
      const got = new Uint8Array(65536);
      stack.read(MIB - 65536, got);
      expectEqualBytes(got, data, algorithm);
    }
  });

  test("the layer writer takes ascending ranges only and publishes whole files only", () => {
    using scratch = scratchDirectory("writer");
    const target = `${scratch.path}/layer`;
    const writer = createLayerWriter(target, { virtualSizeBytes: MIB });
    writer.append(4096, new Uint8Array(4096).fill(1));
    writer.zero(8192, 4096);
    expect(codeOf(() => writer.append(8192, new Uint8Array(512)))).toBe("invalid_range");
    expect(codeOf(() => writer.append(MIB - 512, new Uint8Array(1024)))).toBe("invalid_range");
    expect(codeOf(() => writer.append(20_000, new Uint8Array(512)))).toBe("invalid_range");
    expect(codeOf(() => writer.zero(16384, 100))).toBe("invalid_range");
    expect(existsSync(target)).toBe(false);
    writer.abort();
    expect(readdirSync(scratch.path)).toEqual([]);
    using second = createLayerWriter(target, { virtualSizeBytes: MIB });
    for (let page = 0; page < 256; page += 2) second.append(page * 4096, new Uint8Array(4096).fill(page));
    expect(second.mappingCount).toBe(128);
    expect(second.finish()).toEqual({ file: target, size: statSync(target).size });
    expect(codeOf(() => createLayerWriter(target, { virtualSizeBytes: MIB }))).toBe("layer_exists");
    expect(codeOf(() => createLayerWriter(`${scratch.path}/y`, { virtualSizeBytes: 100 }))).toBe(
      "invalid_virtual_size",
    );
    using stack = openStack({ lowers: [{ file: target }] });
    expect([...stack.mappedExtents("all")].length).toBe(128);
  });

  test("an empty layer and mappings that fill index pages exactly", () => {
    using scratch = scratchDirectory("pages");
    for (const count of [0, 1, 255, 256, 257]) {
      const target = `${scratch.path}/${count}`;
      using writer = createLayerWriter(target, { virtualSizeBytes: MIB });
      for (let i = 0; i < count; i++) writer.append(i * 1024, new Uint8Array(512).fill(i));
      writer.finish();
      const trailer = readFileSync(target).subarray(-4096);
      expect(trailer.readUInt32LE(40)).toBe(Math.ceil(count / 256) * 256);
      expect(inspectLayer(target).mappingCount).toBe(count);
      expect(statSync(target).size % 4096).toBe(0);
    }
  });
});

describe("sizes", () => {
  test("the topmost layer with a size decides; none is an error", () => {
    using scratch = scratchDirectory("sizes");
    const layer = (name: string, virtualSizeBytes: number) => {
      using writer = createLayerWriter(`${scratch.path}/${name}`, { virtualSizeBytes });
      return writer.finish();
    };
    const big = layer("big", 4 * MIB);
    const small = layer("small", MIB);
    const none = layer("none", 0);
    const sizeOf = (config: ImageConfig) => {
      using stack = openStack(config);
      return stack.virtualSizeBytes;
    };
    expect(sizeOf({ lowers: [big, small] })).toBe(MIB);
    expect(sizeOf({ lowers: [small, big, none] })).toBe(4 * MIB);
    expect(sizeOf({ lowers: [big, none], virtualSizeBytes: 2 * MIB })).toBe(2 * MIB);
    expect(codeOf(() => openStack({ lowers: [none] }))).toBe("virtual_size_missing");
    expect(codeOf(() => openStack({ lowers: [] }))).toBe("virtual_size_missing");
    const upper = { data: `${scratch.path}/u.d`, index: `${scratch.path}/u.i` };
    expect(codeOf(() => openStack({ lowers: [none], upper }))).toBe("virtual_size_missing");
    expect(existsSync(upper.data)).toBe(false);
    createUpper(upper, 0);
    expect(sizeOf({ lowers: [big], upper })).toBe(4 * MIB);
    expect(sizeOf({ lowers: [], upper })).toBe(4 * MIB);
    expect(codeOf(() => openStack({ lowers: [big], upper, virtualSizeBytes: MIB }))).toBe(
      "virtual_size_mismatch",
    );
    expect(codeOf(() => createUpper(upper, 0))).toBe("upper_exists");
    expect(inspectLayer(mergeLayers([big, none], `${scratch.path}/m`, {}).file).virtualSizeBytes).toBe(
      4 * MIB,
    );
  });

  test("requests outside the disk or not in whole sectors are refused and change nothing", () => {
    using scratch = scratchDirectory("range");
    const upper = { data: `${scratch.path}/u.d`, index: `${scratch.path}/u.i` };
    using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB });
    for (const [offset, length] of [
      [MIB - 512, 1024],
      [MIB, 512],
      [2 ** 60, 512],
    ] as const) {
      expect(codeOf(() => stack.read(offset, new Uint8Array(length)))).toBe("out_of_range");
      expect(codeOf(() => stack.write(offset, new Uint8Array(length)))).toBe("out_of_range");
      expect(codeOf(() => stack.discard(offset, length))).toBe("out_of_range");
    }
    for (const offset of [-512, 1, 100.5, Number.NaN]) {
      expect(codeOf(() => stack.write(offset, new Uint8Array(512)))).toBe("invalid_range");
    }
    expect(codeOf(() => stack.write(0, new Uint8Array(513)))).toBe("invalid_range");
    expect(stack.stats().upperMappings).toBe(0);
    stack.write(MIB - 512, new Uint8Array(512).fill(1));
    stack.read(MIB, new Uint8Array(0));
  });

  test("a disk beyond 2 TiB", () => {
    using scratch = scratchDirectory("huge");
    const size = 2 ** 54;
    const offsets = [0, 2 ** 41 - 512, 2 ** 41, 2 ** 53, size - 512];
    const upper = { data: `${scratch.path}/u.d`, index: `${scratch.path}/u.i` };
    const check = (stack: LayerStack) => {
      for (const [i, offset] of offsets.entries()) {
        const got = new Uint8Array(512);
        stack.read(offset, got);
        expect(got[100]).toBe(i + 1);
      }
      const extents = [...stack.mappedExtents("all")];
      expect(extents.map((extent) => extent.offsetBytes)).toEqual([0, 2 ** 41 - 512, 2 ** 53, size - 512]);
    };
    using stack = openStack({ lowers: [], upper, virtualSizeBytes: size });
    for (const [i, offset] of offsets.entries()) stack.write(offset, new Uint8Array(512).fill(i + 1));
    check(stack);
    stack.restack(`${scratch.path}/s`, upper);
    check(stack);
    const { image } = stack;
    stack[Symbol.dispose]();
    using again = openStack(image);
    check(again);
    using merged = openStack({ lowers: [mergeLayers(image.lowers, `${scratch.path}/m`, {})] });
    check(merged);
  });
});

describe("uppers", () => {
  test("one owner at a time", () => {
    using scratch = scratchDirectory("lock");
    const upper = { data: `${scratch.path}/u.d`, index: `${scratch.path}/u.i` };
    const config = { lowers: [], upper, virtualSizeBytes: MIB };
    {
      using _ = openStack(config);
      expect(codeOf(() => openStack(config))).toBe("upper_in_use");
      expect(codeOf(() => commitUpper(upper, `${scratch.path}/c`, {}))).toBe("upper_in_use");
    }
    using again = openStack(config);
    again.restack(`${scratch.path}/sealed`, upper);
    // A sealed layer is free to be shared.
    using reader = openStack({ lowers: [{ file: `${scratch.path}/sealed` }] });
    expect(reader.readOnly).toBe(true);
  });

  test("files that do not belong together or are finished layers are refused", () => {
    using scratch = scratchDirectory("mixed");
    const a = { data: `${scratch.path}/a.d`, index: `${scratch.path}/a.i` };
    const b = { data: `${scratch.path}/b.d`, index: `${scratch.path}/b.i` };
    createUpper(a, MIB);
    createUpper(b, MIB);
    expect(codeOf(() => openStack({ lowers: [], upper: { data: a.data, index: b.index } }))).toBe(
      "layer_invalid",
    );
    expect(codeOf(() => openStack({ lowers: [], upper: { data: a.data } }))).toBe("invalid_upper");
    using writer = createLayerWriter(`${scratch.path}/layer`, { virtualSizeBytes: MIB });
    const layer = writer.finish();
    expect(codeOf(() => openStack({ lowers: [], upper: { data: layer.file, index: a.index } }))).toBe(
      "layer_invalid",
    );
    expect(codeOf(() => openStack({ lowers: [{ file: a.data }] }))).toBe("layer_invalid");
    expect(codeOf(() => openStack({ lowers: [{ file: `${scratch.path}/nothing` }] }))).toBe(
      "layer_not_found",
    );
    expect(codeOf(() => openStack({ lowers: new Array(256).fill(layer) }))).toBe("too_many_layers");
    using many = openStack({ lowers: new Array(255).fill(layer) });
    expect(many.stats().lowerCount).toBe(255);
  });

  test("an index with mappings but no data file is never started over", () => {
    using scratch = scratchDirectory("nodata");
    const upper = { data: `${scratch.path}/u.d`, index: `${scratch.path}/u.i` };
    {
      using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB });
      stack.write(0, new Uint8Array(512));
    }
    unlinkSync(upper.data);
    expect(codeOf(() => openStack({ lowers: [], upper, virtualSizeBytes: MIB }))).toBe("upper_data_missing");
  });

  test("hybrid overwrites in place and appends the rest", () => {
    using scratch = scratchDirectory("hybrid");
    const upper: UpperRef = {
      data: `${scratch.path}/u.d`,
      index: `${scratch.path}/u.i`,
      mode: "hybridLogStructured",
    };
    using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB });
    stack.write(4096, new Uint8Array(4096).fill(1));
    for (let i = 0; i < 50; i++) stack.write(4096, new Uint8Array(4096).fill(i));
    expect(stack.stats().upperDataBytes).toBe(4096);
    stack.write(0, new Uint8Array(16384).fill(7));
    expect(stack.stats().upperDataBytes).toBe(16384);
    stack.discard(4096, 512);
    stack.write(4096, new Uint8Array(512).fill(8));
    expect(stack.stats().upperDataBytes).toBe(16384 + 512);
    expect(readFileSync(upper.data).readUInt32LE(28)).toBe(0x23);
    expect(readFileSync(upper.index!).readUInt32LE(28)).toBe(0x21);
  });

  test("discarding blank ranges over lowers costs no mapping", () => {
    using scratch = scratchDirectory("discard");
    const model = new Uint8Array(MIB);
    const lower = makeLower(`${scratch.path}/l`, MIB, 1, model);
    const upper = { data: `${scratch.path}/u.d`, index: `${scratch.path}/u.i` };
    using stack = openStack({ lowers: [lower], upper, virtualSizeBytes: 64 * 1024 * MIB });
    stack.discard(MIB, 64 * 1024 * MIB - MIB);
    expect(stack.stats().upperMappings).toBe(0);
    stack.discard(0, MIB);
    expect(stack.stats().upperMappings).toBe(1);
    expect(stack.stats().upperLiveBytes).toBe(0);
    expect([...stack.mappedExtents("upper")]).toEqual([{ offsetBytes: 0, lengthBytes: MIB, zeroed: true }]);
  });

  test("a guest's data that looks like a trailer is data", () => {
    using scratch = scratchDirectory("trailer");
    const upper = { data: `${scratch.path}/u.d`, index: `${scratch.path}/u.i` };
    using writer = createLayerWriter(`${scratch.path}/layer`, {
      virtualSizeBytes: MIB,
      uuid: crypto.randomUUID(),
    });
    writer.append(0, new Uint8Array(4096).fill(3));
    const layer = readFileSync(writer.finish().file);
    {
      using stack = openStack({ lowers: [], upper, virtualSizeBytes: MIB });
      stack.write(8192, layer);
    }
    using stack = openStack({ lowers: [], upper });
    expect(stack.stats().warnings).toEqual([]);
    const got = new Uint8Array(layer.byteLength);
    stack.read(8192, got);
    expectEqualBytes(got, layer, "the guest's layer file");
  });
});
