import { expect, test } from "bun:test";
import { closeSync, mkdtempSync, openSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { Codec, encodedBound } from "./codec.ts";
import { MappedFile } from "./mapped.ts";

const BLOCK = 4096;

/** Time of a mapping, and what its reads did: decoded in place, or read first. */
function withMapping(visit: (read: (atSeconds: number) => "in place" | "read first") => void): void {
  const dir = mkdtempSync("/tmp/aenv-mapped-");
  const file = join(dir, "blocks");
  using codec = new Codec();
  const original = new Uint8Array(BLOCK).map((_, i) => i % 251);
  const encoded = new Uint8Array(encodedBound("lz4", BLOCK));
  const stored = new Uint32Array([codec.encode("lz4", true, original, 0, BLOCK, encoded, 0)]);
  writeFileSync(file, encoded.subarray(0, stored[0]));
  const fd = openSync(file, "r");
  try {
    using mapped = MappedFile.open(fd, stored[0]!)!;
    const scratch = new Uint8Array(2 * BLOCK);
    visit((atSeconds) => {
      mapped.setClock(atSeconds);
      const before = mapped.counts();
      const target = new Uint8Array(BLOCK);
      expect(
        mapped.readBlocks(codec, "lz4", true, 0, stored, 1, true, target, 0, BLOCK, BLOCK, scratch),
      ).toBe("done");
      expect(target).toEqual(original);
      const after = mapped.counts();
      expect(after.mapped + after.read - before.mapped - before.read).toBe(1);
      return after.mapped > before.mapped ? "in place" : "read first";
    });
  } finally {
    closeSync(fd);
    rmSync(dir, { recursive: true, force: true });
  }
}

test("a page counts as in memory for 2 to 4 s after it was read, and is then read again", () => {
  withMapping((read) => {
    expect(read(0)).toBe("read first");
    expect(read(0)).toBe("in place");
    expect(read(3.9)).toBe("in place");
    expect(read(4)).toBe("read first");
    expect(read(5.9)).toBe("in place");
    expect(read(8)).toBe("read first");
  });
});

test("a page that was read once does not count as in memory again, however long ago that was", () => {
  // Counters of 8 and 16 bits that step every 2 s come round at these times, or one step beside them.
  for (const at of [508, 510, 512, 514, 131_068, 131_070, 131_072, 131_074, 2 ** 31]) {
    withMapping((read) => {
      expect(read(0)).toBe("read first");
      expect([at, read(at)]).toEqual([at, "read first"]);
    });
  }
});

test("time goes by the clock unless it is set", () => {
  withMapping((read) => {
    expect(read(-1)).toBe("read first");
    // The machine runs for more than 4 s.
    expect(read(0)).toBe("read first");
  });
});
