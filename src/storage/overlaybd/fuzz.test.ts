import { expect, test } from "bun:test";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { AenvError } from "../../lib/errors.ts";
import { openStack } from "./index.ts";
import { scratchDirectory, testRandom } from "./test-support.ts";
import { fuzzDecoders } from "./testing/fuzz.ts";

const VECTORS = `${import.meta.dir}/../../../tests/vectors/overlaybd`;
const BUDGET_MS = Number(process.env.AENV_FUZZ_MS ?? 1000);
const INPUTS = Number(process.env.AENV_FUZZ_INPUTS ?? 1_000_000);

/** Damages a copy: bits, bytes, interesting numbers, cuts, moved and repeated pieces; mostly in the metadata. */
function damage(bytes: Buffer, random: (limit: number) => number): Buffer {
  let out: Buffer = Buffer.from(bytes);
  for (let round = 1 + random(4); round > 0; round--) {
    if (out.byteLength < 16) break;
    const zone = random(4);
    const span = Math.min(out.byteLength, zone === 3 ? out.byteLength : 600);
    const at = zone === 0 || zone === 3 ? random(span) : out.byteLength - 1 - random(span);
    switch (random(7)) {
      case 0:
        out[at] = out[at]! ^ (1 << random(8));
        break;
      case 1:
        out[at] = random(256);
        break;
      case 2: {
        const values = [0n, 1n, 0xffn, 0xffff_ffffn, 0x7fff_ffff_ffff_ffffn, 0xffff_ffff_ffff_ffffn];
        if (at + 8 <= out.byteLength) out.writeBigUInt64LE(values[random(values.length)]!, at);
        break;
      }
      case 3:
        if (at + 4 <= out.byteLength) out.writeUInt32LE((out.readUInt32LE(at) + random(9) - 4) >>> 0, at);
        break;
      case 4:
        out = out.subarray(0, random(out.byteLength));
        break;
      case 5: {
        const from = random(out.byteLength);
        out.copyWithin(at, from, from + random(64));
        break;
      }
      default:
        out = Buffer.concat([out.subarray(0, at), out.subarray(at, at + random(5000)), out.subarray(at)]);
    }
  }
  return out;
}

/**
 * In memory, so that there can be very many; `AENV_FUZZ_INPUTS` sets how many, `AENV_TEST_SEED` repeats a run. That
 * no access leaves its file is checked by the file system in memory, that none hangs by the slowest input.
 */
test("every decoder takes or refuses aimed damage", () => {
  const start = performance.now();
  const result = fuzzDecoders(testRandom(), VECTORS, INPUTS);
  const seconds = (performance.now() - start) / 1000;
  console.info(
    `fuzz: ${result.inputs} inputs in ${seconds.toFixed(1)} s: ${result.refused} refused, ${result.read} read, ` +
      `slowest ${result.slowestMs.toFixed(0)} ms`,
  );
  expect(result.inputs).toBe(INPUTS);
  // Neither is the damage so heavy that the first check stops it all, nor so light that nothing is refused.
  expect(result.refused).toBeGreaterThan(INPUTS / 4);
  expect(result.read).toBeGreaterThan(INPUTS / 4);
  // What takes microseconds may be held up by the machine, but not for ever.
  expect(result.slowestMs).toBeLessThan(10_000);
}, 600_000);

test("damaged layers are refused with a reason or read; nothing else happens", () => {
  using scratch = scratchDirectory("fuzz");
  const random = testRandom();
  const names = readdirSync(VECTORS).filter(
    (name) => /\.(lsmt|zfile|tar|data)$/.test(name) && !/huge|random/.test(name),
  );
  const inputs = names
    .map((name) => ({
      name,
      bytes: readFileSync(`${VECTORS}/${name}`),
      index:
        name.endsWith(".data") && !name.includes("sparse")
          ? readFileSync(`${VECTORS}/${name.replace(".data", ".index")}`)
          : undefined,
    }))
    .filter((input) => input.bytes.byteLength < 150_000);
  const counts = { refused: 0, read: 0 };
  const end = Date.now() + BUDGET_MS;
  const file = `${scratch.path}/layer`;
  const target = new Uint8Array(1 << 16);
  for (let round = 0; Date.now() < end; round++) {
    const input = inputs[random(inputs.length)]!;
    const writable = input.name.endsWith(".data");
    const damagedIndex = input.index !== undefined && random(2) === 0;
    writeFileSync(file, damagedIndex ? input.bytes : damage(input.bytes, random));
    if (input.index !== undefined) {
      writeFileSync(`${file}.index`, damagedIndex ? damage(input.index, random) : input.index);
    }
    try {
      using stack = openStack(
        writable ? { lowers: [], upper: { data: file, index: `${file}.index` } } : { lowers: [{ file }] },
      );
      let extents = 0;
      for (const extent of stack.mappedExtents("all")) {
        if (extents++ > 50) break;
        const length = Math.min(extent.lengthBytes, target.byteLength);
        stack.read(extent.offsetBytes, target.subarray(0, length));
      }
      if (writable) stack.write(0, target.subarray(0, Math.min(4096, stack.virtualSizeBytes)));
      counts.read++;
    } catch (error) {
      if (!(error instanceof AenvError)) {
        throw new Error(`round ${round}, ${input.name}: ${String(error)}`, { cause: error });
      }
      expect(error.message.length).toBeGreaterThan(10);
      counts.refused++;
    }
  }
  console.info(`fuzz: ${counts.refused} refused, ${counts.read} read`);
  expect(counts.refused).toBeGreaterThan(10);
  expect(counts.read).toBeGreaterThan(10);
}, 120_000);
