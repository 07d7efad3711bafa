import { describe, expect, test } from "bun:test";
import { alignSegments, normalizePath, OpStreamWriter } from "./opstream.ts";
import type { TarEntry } from "./tar.ts";

interface Record {
  readonly op: number;
  readonly payload: Buffer;
}

function records(writer: OpStreamWriter): Record[] {
  const bytes = Buffer.concat(writer.take());
  expect(bytes.toString("latin1", 0, 8)).toBe("AENVOPS1");
  const list: Record[] = [];
  for (let at = 8; at < bytes.length; ) {
    const length = bytes.readUInt32LE(at + 4);
    list.push({ op: bytes.readUInt32LE(at), payload: bytes.subarray(at + 8, at + 8 + length) });
    at += 8 + length;
  }
  return list;
}

function entry(more: Partial<TarEntry>): TarEntry {
  return {
    type: "file",
    path: "f",
    linkTarget: "",
    mode: 0o644,
    uid: 0,
    gid: 0,
    mtimeSeconds: 0,
    mtimeNanoseconds: 0,
    major: 0,
    minor: 0,
    sizeBytes: 0,
    xattrs: [],
    ...more,
  };
}

describe("paths", () => {
  test.each([
    ["./", ""],
    ["/", ""],
    ["/etc//passwd", "etc/passwd"],
    ["./a/./b/", "a/b"],
    ["a/../b", "b"],
  ])("%s", (path, normal) => {
    expect(normalizePath(path)).toBe(normal);
  });

  test.each(["..", "../x", "a/../../x", "/..", "a/b/../../../c"])("%s leaves the root", (path) => {
    expect(() => normalizePath(path)).toThrow("leaves the root");
  });
});

test("whiteouts and bookkeeping become records of their own, without content", () => {
  const writer = new OpStreamWriter();
  for (const path of ["a/.wh.b", "a/.wh..wh..opq", ".wh..wh.plnk/x", ".wh..wh.aufs", ".wh.c"]) {
    writer.entry(entry({ path, sizeBytes: 3 }));
    writer.data(Buffer.from("xyz"));
  }
  writer.end();
  expect(records(writer).map(({ op, payload }) => [op, payload.toString()])).toEqual([
    [3, "a/b"],
    [4, "a"],
    [3, "c"],
    [5, ""],
  ]);
  for (const path of [".wh.", "a/.wh..", "a/.wh...."]) {
    const refused = () => new OpStreamWriter().entry(entry({ path }));
    if (path === "a/.wh....") expect(refused).not.toThrow();
    else expect(refused).toThrow("whiteout of nothing");
  }
});

test("sparse segments are rounded out to blocks, with zeros around their data", () => {
  const segments = [
    { offsetBytes: 100, lengthBytes: 3 },
    { offsetBytes: 5000, lengthBytes: 2 },
    { offsetBytes: 40_000, lengthBytes: 1 },
  ];
  expect(alignSegments(segments, 40_002)).toEqual([
    { offsetBytes: 0, lengthBytes: 8192 },
    { offsetBytes: 36_864, lengthBytes: 40_002 - 36_864 },
  ]);
  const writer = new OpStreamWriter();
  writer.entry(entry({ sizeBytes: 40_002, segments }));
  for (const byte of Buffer.from("abcdeZ")) writer.data(Buffer.from([byte]));
  writer.end();
  const content = Buffer.concat(records(writer).flatMap(({ op, payload }) => (op === 2 ? [payload] : [])));
  expect(content.length).toBe(8192 + 40_002 - 36_864);
  const expected = Buffer.alloc(content.length);
  expected.write("abc", 100);
  expected.write("de", 5000);
  expected.write("Z", 8192 + 40_000 - 36_864);
  expect(content.equals(expected)).toBe(true);
});
