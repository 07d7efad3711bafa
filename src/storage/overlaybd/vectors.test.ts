import { afterAll, describe, expect, test } from "bun:test";
import { copyFileSync, cpSync, mkdtempSync, readFileSync, rmSync, truncateSync } from "node:fs";
import { join } from "node:path";
import { AenvError } from "../../lib/errors.ts";
import { hostDisk } from "./disk.ts";
import { inspectLayer, openStack } from "./index.ts";
import { openUnwrapped } from "./open-layer.ts";
import type { LayerStack } from "./types.ts";

const DIR = join(import.meta.dir, "../../../tests/vectors/overlaybd");
const scratch = mkdtempSync("/tmp/overlaybd-vectors-");
afterAll(() => rmSync(scratch, { recursive: true }));

interface Range {
  offset: number;
  length: number;
  sha256: string;
}
interface FileEntry {
  kind: string;
  virtual_size?: number;
  disk_sha256?: string;
  ranges?: Range[];
  pair?: string;
  uuid?: string;
  parent_uuid?: string;
  index_size?: number;
  uncompressed_size?: number;
  uncompressed_sha256?: string;
  data_extents?: [number, number][];
  index?: [number, number, number, number, number][];
  mappings?: number;
}
interface Manifest {
  files: Record<string, FileEntry>;
  stacks: {
    id: string;
    lowers_bottom_to_top: string[];
    virtual_size: number;
    disk_sha256: string;
    ranges?: Range[];
    upper?: { data: string; index: string };
  }[];
  rejects: { files: Record<string, string>; open_as: string; fails_at: string; peer_reason: string }[];
  tolerated: { files: Record<string, string>; open_as: string; virtual_size: number; disk_sha256: string }[];
  order_checks: unknown[];
}
const manifest = JSON.parse(readFileSync(join(DIR, "manifest.json"), "utf8")) as Manifest;

/** Hash of the whole disk, read in pieces of odd sizes so that plans begin and end anywhere. */
function hashDisk(stack: LayerStack): string {
  const hash = new Bun.CryptoHasher("sha256");
  const buffer = new Uint8Array(new ArrayBuffer(1 << 20));
  for (let at = 0; at < stack.virtualSizeBytes; ) {
    const piece = Math.min(stack.virtualSizeBytes - at, (at / 512) % 3 === 0 ? 1 << 20 : 7 * 512 * 97);
    const view = buffer.subarray(0, piece);
    stack.read(at, view);
    hash.update(view);
    at += piece;
  }
  return hash.digest("hex");
}

function expectRanges(stack: LayerStack, ranges: readonly Range[] | undefined): void {
  for (const range of ranges ?? []) {
    const bytes = new Uint8Array(range.length);
    stack.read(range.offset, bytes);
    expect(new Bun.CryptoHasher("sha256").update(bytes).digest("hex")).toBe(range.sha256);
  }
}

/** Writable vectors are opened as copies: opening may repair them. */
function copyPair(data: string, index: string | undefined): { data: string; index?: string } {
  const directory = mkdtempSync(join(scratch, "pair-"));
  const to = { data: join(directory, "upper.data"), index: join(directory, "upper.index") };
  copyFileSync(join(DIR, data), to.data);
  if (index === undefined) return { data: to.data };
  copyFileSync(join(DIR, index), to.index);
  return to;
}

describe("finished layers of the reference implementation", () => {
  for (const [name, entry] of Object.entries(manifest.files)) {
    if (entry.disk_sha256 === undefined || entry.kind.startsWith("lsmt-rw")) continue;
    test(name, () => {
      using stack = openStack({ lowers: [{ file: join(DIR, name) }] });
      expect(stack.virtualSizeBytes).toBe(entry.virtual_size!);
      expect(hashDisk(stack)).toBe(entry.disk_sha256!);
      expectRanges(stack, entry.ranges);
      const found = inspectLayer(join(DIR, name));
      if (entry.uuid !== undefined && !/^0[0-]*$/.test(entry.uuid)) {
        expect(found.uuid).toBe(entry.uuid.toLowerCase());
      }
    });
  }

  test("huge offsets", () => {
    const entry = manifest.files["huge-offset.lsmt"]!;
    using stack = openStack({ lowers: [{ file: join(DIR, "huge-offset.lsmt") }] });
    expect(stack.virtualSizeBytes).toBe(entry.virtual_size!);
    expect(entry.ranges?.length).toBeGreaterThan(0);
    expectRanges(stack, entry.ranges);
    using upper = openStack({ lowers: [], upper: copyPair("huge-offset.data", "huge-offset.index") });
    expectRanges(upper, entry.ranges);
    expect([...stack.mappedExtents("all")]).toEqual([...upper.mappedExtents("all")]);
  }, 120_000);
});

describe("ZFiles", () => {
  for (const [name, entry] of Object.entries(manifest.files)) {
    if (entry.uncompressed_sha256 === undefined) continue;
    test(name, () => {
      const { source } = openUnwrapped(hostDisk, join(DIR, name));
      using _ = source;
      expect(source.sizeBytes).toBe(entry.uncompressed_size!);
      const bytes = new Uint8Array(source.sizeBytes);
      source.read(0, bytes, 0, bytes.byteLength);
      expect(new Bun.CryptoHasher("sha256").update(bytes).digest("hex")).toBe(entry.uncompressed_sha256!);
      for (let at = 0; at < bytes.byteLength; at += 3001) {
        const part = new Uint8Array(Math.min(517, bytes.byteLength - at));
        source.read(at, part, 0, part.byteLength);
        expect(Buffer.compare(part, bytes.subarray(at, at + part.byteLength))).toBe(0);
      }
    });
  }
});

describe("writable layers", () => {
  for (const [name, entry] of Object.entries(manifest.files)) {
    if (entry.kind !== "lsmt-rw-data" || entry.disk_sha256 === undefined) continue;
    test(name, () => {
      using stack = openStack({ lowers: [], upper: copyPair(name, entry.pair) });
      expect(stack.virtualSizeBytes).toBe(entry.virtual_size!);
      expect(hashDisk(stack)).toBe(entry.disk_sha256!);
      expect(stack.stats().warnings).toEqual([]);
    });
  }

  test("sparse", async () => {
    const entry = manifest.files["rw-sparse.data"]!;
    const upper = { data: join(scratch, "sparse.data"), mode: "sparse" as const };
    // The vector lost its holes on the way: only what was data is copied.
    const dense = readFileSync(join(DIR, "rw-sparse.data"));
    const file = Bun.file(upper.data);
    await file.write("");
    truncateSync(upper.data, dense.byteLength);
    const { openSync, writeSync, closeSync } = await import("node:fs");
    const fd = openSync(upper.data, "r+");
    for (const [at, length] of entry.data_extents!) writeSync(fd, dense, at, length, at);
    closeSync(fd);
    using stack = openStack({ lowers: [], upper });
    expect(hashDisk(stack)).toBe(entry.disk_sha256!);
  });

  test("an upper of size 0 takes the size of the stack, on disk, too", () => {
    const upper = copyPair("create-0.data", "create-0.index");
    using stack = openStack({ lowers: [{ file: join(DIR, "stack3.lsmt") }], upper });
    expect(stack.virtualSizeBytes).toBe(50331648);
    for (const file of [upper.data, upper.index!]) {
      expect(readFileSync(file).readBigUint64LE(48)).toBe(50331648n);
    }
  });
});

describe("stacks", () => {
  for (const entry of manifest.stacks) {
    test(entry.id, () => {
      using stack = openStack({
        lowers: entry.lowers_bottom_to_top.map((name) => ({ file: join(DIR, name) })),
        ...(entry.upper === undefined ? {} : { upper: copyPair(entry.upper.data, entry.upper.index) }),
      });
      expect(stack.virtualSizeBytes).toBe(entry.virtual_size);
      expect(hashDisk(stack)).toBe(entry.disk_sha256);
      expectRanges(stack, entry.ranges);
    }, 120_000);
  }
});

describe("refused files", () => {
  for (const entry of manifest.rejects) {
    const names = Object.keys(entry.files);
    // Opened with the tail of its index dropped, see upper.test.ts.
    if (names[0] === "bad/rw-data-cut.data") continue;
    test(`${names[0]}: ${entry.peer_reason}`, () => {
      let thrown: unknown;
      try {
        using stack = openStack(
          entry.open_as === "lsmt-rw"
            ? { lowers: [], upper: copyPair(names[0]!, names[1]) }
            : { lowers: [{ file: join(DIR, names[0]!) }] },
        );
        hashDisk(stack);
      } catch (error) {
        thrown = error;
      }
      expect(thrown).toBeInstanceOf(AenvError);
      expect((thrown as AenvError).code).toBe("layer_invalid");
      expect((thrown as AenvError).message).toMatch(/at byte \d+: \S/);
    });
  }
});

describe("tolerated files", () => {
  for (const entry of manifest.tolerated) {
    const names = Object.keys(entry.files);
    test(names[0]!, () => {
      using stack = openStack(
        entry.open_as === "lsmt-rw"
          ? { lowers: [], upper: copyPair(names[0]!, names[1]) }
          : { lowers: [{ file: join(DIR, names[0]!) }] },
      );
      expect(stack.virtualSizeBytes).toBe(entry.virtual_size);
      expect(hashDisk(stack)).toBe(entry.disk_sha256);
    });
  }
});

test("the vectors are those the manifest describes", () => {
  const copy = mkdtempSync(join(scratch, "copy-"));
  cpSync(join(DIR, "tiny.lsmt"), join(copy, "tiny.lsmt"));
  expect(manifest.rejects.length).toBe(36);
  expect(manifest.tolerated.length).toBe(15);
  expect(manifest.stacks.length).toBe(8);
});
