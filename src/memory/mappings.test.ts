import { describe, expect, test } from "bun:test";
import { findMemory, parseAnonymous, parseMappings } from "./mappings.ts";

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

test("memory without a file is the one anonymous mapping of its size", () => {
  const size = 0x800_0000;
  const maps = [
    "7f0000000000-7f0008000000 rw-p 00000000 00:00 0 ",
    "7f0010000000-7f0018000000 rw-p 00000000 00:00 0                          [heap]",
    "7f0020000000-7f0028000000 r--p 00000000 00:00 0 ",
    "7f0030000000-7f0034000000 rw-p 00000000 00:00 0 ",
    "7f0040000000-7f0048000000 rw-p 00000000 fe:00 12 /memory",
  ];
  expect(parseAnonymous(maps.join("\n"), size)).toEqual({
    address: 0x7f0000000000,
    fileOffset: 0,
    length: size,
  });
  expect(() => parseAnonymous([...maps, maps[0]!].join("\n"), size)).toThrow("2 anonymous mappings");
  expect(() => parseAnonymous("", size)).toThrow("0 anonymous mappings");
});
