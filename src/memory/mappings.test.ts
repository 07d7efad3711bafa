import { describe, expect, test } from "bun:test";
import { coverMemory, findMemory, parseAnonymous, parseMappings } from "./mappings.ts";

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

describe("memory of which a VMM gave pieces back", () => {
  const GIB = 2 ** 30;
  /** Lines of a list of mappings: of the file at an offset, or anonymous. */
  const list = (...entries: [at: number, length: number, offset?: number][]): string =>
    entries
      .map(([at, length, offset]) => {
        const range = `${at.toString(16)}-${(at + length).toString(16)}`;
        return offset === undefined
          ? `${range} rw-p 00000000 00:00 0 `
          : `${range} rw-p ${offset.toString(16).padStart(8, "0")} fe:00 42                  /m/base.mem`;
      })
      .join("\n");
  const cover = (size: number, ...entries: Parameters<typeof list>) =>
    coverMemory(list(...entries), "/m/base.mem", size)?.map(({ address, fileOffset, length }) => [
      address,
      fileOffset,
      length,
    ]);
  const AT = 0x7f0000000000;

  test("is the file's pieces and what replaced the others, at the beginning and the end, too", () => {
    expect(cover(0x6000, [AT, 0x1000, 0], [AT + 0x1000, 0x2000], [AT + 0x3000, 0x3000, 0x3000])).toEqual([
      [AT, 0, 0x1000],
      [AT + 0x1000, 0x1000, 0x2000],
      [AT + 0x3000, 0x3000, 0x3000],
    ]);
    // Anonymous memory that touches the guest's is one mapping with it: what is beyond is not the guest's.
    expect(
      cover(0x6000, [AT - 0x5000, 0x6000], [AT + 0x1000, 0x1000, 0x1000], [AT + 0x2000, 0x9000]),
    ).toEqual([
      [AT, 0, 0x1000],
      [AT + 0x1000, 0x1000, 0x1000],
      [AT + 0x2000, 0x2000, 0x4000],
    ]);
    // Pieces of different rights are several mappings.
    expect(cover(0x3000, [AT, 0x1000, 0], [AT + 0x1000, 0x1000], [AT + 0x2000, 0x1000])).toEqual([
      [AT, 0, 0x1000],
      [AT + 0x1000, 0x1000, 0x2000],
    ]);
  });

  test("in two mappings is told apart at the border between them", () => {
    const UP = AT + 0x1000000000;
    const size = 4 * GIB;
    const expected = [
      [AT, 0, 2 * GIB],
      [AT + 2 * GIB, 2 * GIB, GIB],
      [UP, 3 * GIB, GIB / 2],
      [UP + GIB / 2, 3.5 * GIB, GIB / 2],
    ];
    expect(
      cover(size, [AT, 2 * GIB, 0], [AT + 2 * GIB, GIB], [UP, GIB / 2], [UP + GIB / 2, GIB / 2, 3.5 * GIB]),
    ).toEqual(expected);
    // It cannot be told: both borders are possible, or none is.
    expect(
      cover(
        size,
        [AT, 2 * GIB, 0],
        [AT + 2 * GIB, 2 * GIB],
        [UP - GIB, 1.5 * GIB],
        [UP + GIB / 2, GIB / 2, 3.5 * GIB],
      ),
    ).toBeUndefined();
    expect(cover(size, [AT, 2 * GIB, 0], [AT + 2 * GIB, 2 * GIB])).toBeUndefined();
  });

  test("is refused where a piece is missing, shared, mapped twice or too large", () => {
    const [first, last] = [
      [AT, 0x1000, 0] as [number, number, number],
      [AT + 0x2000, 0x1000, 0x2000] as [number, number, number],
    ];
    expect(cover(0x3000, first, last)).toBeUndefined();
    expect(cover(0x3000, first, [AT + 0x1000, 0x800], last)).toBeUndefined();
    expect(cover(0x3000, first, [AT + 0x9000, 0x1000], last)).toBeUndefined();
    expect(cover(0x2000, first, [AT + 0x1000, 0x1000], last)).toBeUndefined();
    expect(cover(0x3000, first, first, [AT + 0x1000, 0x1000], last)).toBeUndefined();
    expect(cover(0x3000, [AT, 0x3000])).toBeUndefined();
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
