import { describe, expect, test } from "bun:test";
import { findMemory, parseMappings } from "./mappings.ts";

describe("the memory file in a list of mappings", () => {
  const maps = [
    "7f0000000000-7f0000010000 rw-p 00000000 fe:00 42                         /m/base.mem",
    "7f0000100000-7f0000110000 rw-p 00010000 fe:00 42                         /m/base.mem",
    "7f0000200000-7f0000210000 rw-s 00000000 fe:00 42                         /m/base.mem",
    "7f0000300000-7f0000310000 r--p 00000000 fe:00 43                         /m/base.mem.old",
    "7f0000400000-7f0000410000 rw-p 00000000 00:00 0 ",
    "7f0000500000-7f0000510000 rw-p 00020000 fe:00 42                         /m/base.mem (deleted)",
  ].join("\n");

  test("private pieces of that very file, in order", () => {
    expect(parseMappings(maps, "/m/base.mem").map((mapping) => mapping.fileOffset)).toEqual([
      0, 0x10000, 0x20000,
    ]);
    expect(parseMappings(maps, "/m/none")).toEqual([]);
  });

  test("a process that does not map it all is refused", () => {
    expect(() => findMemory(process.pid, process.execPath, 1 << 30)).toThrow("does not map");
    expect(() => findMemory(process.pid, "/nonexistent", 4096)).toThrow("does not map");
    expect(() => findMemory(0x7fffffff, process.execPath, 4096)).toThrow("gone");
  });
});
