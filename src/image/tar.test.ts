import { describe, expect, test } from "bun:test";
import { makeTar, paxHeader, tarHeader } from "../../tests/support/oci.ts";
import { showBytes, type TarEntry, TarParser } from "./tar.ts";

interface Parsed {
  readonly entry: TarEntry;
  readonly data: string;
}

function parse(tar: Uint8Array, chunkBytes = tar.length): Parsed[] {
  const parsed: { entry: TarEntry; data: string }[] = [];
  const parser = new TarParser({
    entry: (entry) => parsed.push({ entry, data: "" }),
    data: (chunk) => {
      parsed.at(-1)!.data += Buffer.from(chunk).toString("latin1");
    },
  });
  for (let at = 0; at < tar.length; at += chunkBytes) parser.push(tar.subarray(at, at + chunkBytes));
  parser.finish();
  return parsed;
}

const block = (text: string) =>
  Buffer.concat([Buffer.from(text), Buffer.alloc((512 - (text.length % 512)) % 512)]);
const END = Buffer.alloc(1024);

describe("headers", () => {
  const tar = makeTar([
    { path: "dir/", type: "directory", mode: 0o700 },
    {
      path: `${"long/".repeat(40)}name`,
      content: "content",
      uid: 5_000_000,
      xattrs: { "user.a=b": "", "user.x": "\0\n" },
    },
    { path: "link", type: "symlink", link: "t".repeat(300), dialect: "gnu" },
    { path: "hard", type: "hardLink", link: "link" },
    { path: "neg", content: "x", mtime: -0.25 },
    { path: "gnu-neg", content: "x", mtime: -10, dialect: "gnu" },
    { path: "dev", type: "character", major: 10, minor: 200 },
  ]);

  test("are the same however the stream is cut", () => {
    const whole = parse(tar);
    for (const size of [1, 7, 511, 512, 513, 4000]) expect(parse(tar, size)).toEqual(whole);
    expect(whole.map(({ entry }) => entry.type)).toEqual([
      "directory",
      "file",
      "symlink",
      "hardLink",
      "file",
      "file",
      "character",
    ]);
    const [directory, long, link, hard, negative, gnuNegative, device] = whole.map(({ entry }) => entry);
    expect(directory).toMatchObject({ path: "dir/", mode: 0o700, sizeBytes: 0 });
    expect(long).toMatchObject({ path: `${"long/".repeat(40)}name`, uid: 5_000_000, sizeBytes: 7 });
    expect(long!.xattrs.map(({ name, value }) => [name, Buffer.from(value).toString("latin1")])).toEqual([
      ["user.a", "b="],
      ["user.x", "\0\n"],
    ]);
    expect(whole[1]!.data).toBe("content");
    expect(link!.linkTarget).toBe("t".repeat(300));
    expect(hard!.linkTarget).toBe("link");
    expect([negative!.mtimeSeconds, negative!.mtimeNanoseconds]).toEqual([-1, 750_000_000]);
    expect(gnuNegative!.mtimeSeconds).toBe(-10);
    expect(device).toMatchObject({ major: 10, minor: 200 });
  });

  test("ustar prefix, V7 directories, global pax records, other bytes than UTF-8", () => {
    const name = Buffer.from([0xff, 0x41]);
    const prefixed = tarHeader({
      name: Buffer.from("n"),
      typeFlag: "0",
      size: 0,
      patch: (b) => b.write("pre/fix", 345),
    });
    const old = tarHeader({
      name: Buffer.from("old/"),
      typeFlag: "\0",
      size: 0,
      patch: (b) => b.fill(0, 257, 265),
    });
    const global = Buffer.from(
      paxHeader([
        ["uid", "77"],
        ["comment", "x"],
      ]),
    );
    global.write("g", 156, "latin1");
    const sum = global
      .subarray(0, 512)
      .reduce((total, byte, at) => total + (at >= 148 && at < 156 ? 32 : byte), 0);
    global.write(`${sum.toString(8).padStart(6, "0")}\0 `, 148, "latin1");
    const parsed = parse(
      Buffer.concat([
        prefixed,
        old,
        global,
        tarHeader({ name, typeFlag: "0", size: 0 }),
        tarHeader({ name, typeFlag: "V", size: 0 }),
        END,
      ]),
    );
    expect(parsed.map(({ entry }) => [entry.path, entry.type, entry.uid])).toEqual([
      ["pre/fix/n", "file", 0],
      ["old/", "directory", 0],
      ["\u00ffA", "file", 77],
    ]);
    expect(showBytes("\u00c3\u00a4")).toBe("ä");
  });

  test("content of what is not a file is ignored; no end marker and missing padding are fine", () => {
    const link = tarHeader({ name: Buffer.from("l"), typeFlag: "1", size: 5, link: Buffer.from("t") });
    const last = tarHeader({ name: Buffer.from("f"), typeFlag: "0", size: 3 });
    const parsed = parse(Buffer.concat([link, last, Buffer.from("abc")]));
    expect(parsed.map(({ entry, data }) => [entry.path, entry.sizeBytes, data])).toEqual([
      ["l", 0, ""],
      ["f", 3, "abc"],
    ]);
    expect(parse(new Uint8Array(0))).toEqual([]);
    expect(parse(Buffer.concat([END, Buffer.from("trailing rubbish")]))).toEqual([]);
  });
});

describe("sparse files", () => {
  const name = Buffer.from("s");
  const segments = [
    { offsetBytes: 0, lengthBytes: 2 },
    { offsetBytes: 8192, lengthBytes: 3 },
  ];
  const content = block("abcde");

  test.each([
    [
      "0.0",
      paxHeader([
        ["GNU.sparse.size", "9000"],
        ["GNU.sparse.numblocks", "2"],
        ["GNU.sparse.offset", "0"],
        ["GNU.sparse.numbytes", "2"],
        ["GNU.sparse.offset", "8192"],
        ["GNU.sparse.numbytes", "3"],
      ]),
      Buffer.alloc(0),
    ],
    [
      "0.1",
      paxHeader([
        ["GNU.sparse.size", "9000"],
        ["GNU.sparse.map", "0,2,8192,3"],
        ["GNU.sparse.name", "s"],
      ]),
      Buffer.alloc(0),
    ],
    [
      "1.0",
      paxHeader([
        ["GNU.sparse.major", "1"],
        ["GNU.sparse.minor", "0"],
        ["GNU.sparse.realsize", "9000"],
        ["GNU.sparse.name", "s"],
      ]),
      block("2\n0\n2\n8192\n3\n"),
    ],
  ])("pax %s", (_version, pax, map) => {
    const header = tarHeader({ name: Buffer.from("GNUSparseFile.0/s"), typeFlag: "0", size: map.length + 5 });
    const tar = Buffer.concat([pax, header, map, content, END]);
    for (const size of [1, 100, tar.length]) {
      const [only] = parse(tar, size);
      expect(only!.entry).toMatchObject({ sizeBytes: 9000, segments });
      expect(only!.data).toBe("abcde");
    }
  });

  test("old GNU with an extension block", () => {
    const pair = (b: Buffer, at: number, offset: number, length: number) => {
      b.write(
        `${offset.toString(8).padStart(11, "0")}\0${length.toString(8).padStart(11, "0")}\0`,
        at,
        "latin1",
      );
    };
    const header = tarHeader({
      name,
      typeFlag: "S",
      size: 5,
      gnu: true,
      patch: (b) => {
        pair(b, 386, 0, 2);
        b[482] = 1;
        b.write("00000021450\0", 483, "latin1");
      },
    });
    const extension = Buffer.alloc(512);
    pair(extension, 0, 8192, 3);
    const [only] = parse(Buffer.concat([header, extension, content, END]));
    expect(only!.entry).toMatchObject({ sizeBytes: 0o21450, segments });
    expect(only!.data).toBe("abcde");
  });
});

describe("broken streams", () => {
  const header = (patch: (b: Buffer) => void, size = 0) =>
    tarHeader({ name: Buffer.from("f"), typeFlag: "0", size, patch });
  const pax = (body: string) =>
    Buffer.concat([tarHeader({ name: Buffer.from("p"), typeFlag: "x", size: body.length }), block(body)]);
  const badSum = header(() => undefined);
  badSum[0] = 0x67;

  test.each([
    ["a wrong checksum", badSum, "checksum"],
    ["a size that is not octal", header((b) => b.write("zzz", 124)), "octal"],
    ["a negative size", header((b) => b.fill(0xff, 124, 136)), "negative"],
    [
      "a huge size",
      header((b) => {
        b.fill(0, 124, 136);
        b[124] = 0x80;
        b[126] = 0xff;
      }),
      "out of range",
    ],
    ["a pax record without length", pax("x path=a\n"), "malformed"],
    ["a pax record that is too long", pax("99 path=a\n"), "malformed"],
    ["a pax record without =", pax("9 pathab\n"), "without ="],
    [
      "a pax size that is no number",
      Buffer.concat([paxHeader([["size", "-5"]]), header(() => undefined)]),
      "not a number",
    ],
    [
      "a pax time that is no number",
      Buffer.concat([paxHeader([["mtime", "soon"]]), header(() => undefined)]),
      "time",
    ],
    ["a name with NUL", Buffer.concat([paxHeader([["path", "a\0b"]]), header(() => undefined)]), "NUL"],
    [
      "an owner out of range",
      Buffer.concat([paxHeader([["uid", "4294967295"]]), header(() => undefined)]),
      "out of range",
    ],
    [
      "an entry after an empty block",
      Buffer.concat([Buffer.alloc(512), header(() => undefined)]),
      "empty block",
    ],
    ["an unknown type", tarHeader({ name: Buffer.from("f"), typeFlag: "?", size: 0 }), "not supported"],
    ["a huge extended header", tarHeader({ name: Buffer.from("f"), typeFlag: "x", size: 1 << 30 }), "limit"],
    [
      "a sparse map out of order",
      Buffer.concat([
        paxHeader([
          ["GNU.sparse.size", "10"],
          ["GNU.sparse.map", "5,1,0,1"],
        ]),
        header(() => undefined, 2),
      ]),
      "out of order",
    ],
    [
      "a sparse map beyond its file",
      Buffer.concat([
        paxHeader([
          ["GNU.sparse.size", "3"],
          ["GNU.sparse.map", "2,2"],
        ]),
        header(() => undefined, 2),
      ]),
      "beyond",
    ],
    [
      "a sparse map with other content",
      Buffer.concat([
        paxHeader([
          ["GNU.sparse.size", "9"],
          ["GNU.sparse.map", "2,2"],
        ]),
        header(() => undefined, 3),
      ]),
      "does not fit",
    ],
  ])("%s is refused", (_name, tar, words) => {
    expect(() => parse(tar)).toThrow(words);
  });

  test.each([
    ["a header", makeTar([{ path: "f" }]).subarray(0, 300)],
    ["content", makeTar([{ path: "f", content: "0123456789" }]).subarray(0, 515)],
    ["an extended header", paxHeader([["path", "x"]]).subarray(0, 600)],
    ["between an extended header and its entry", paxHeader([["path", "x"]])],
  ])("an end within %s is truncation", (_name, tar) => {
    expect(() => parse(tar)).toThrow("ends within an entry");
  });
});

test("random damage never does anything but throw or parse", () => {
  const good = makeTar([
    { path: "a".repeat(150), content: "x".repeat(700), xattrs: { "user.a": "b" } },
    { path: "b", type: "symlink", link: "l".repeat(120), dialect: "gnu" },
  ]);
  let seed = 12345;
  const random = (limit: number) => {
    seed = (seed * 1103515245 + 12345) & 0x7fffffff;
    return seed % limit;
  };
  let refused = 0;
  for (let round = 0; round < 2000; round++) {
    const tar = Buffer.from(good);
    for (let change = 0; change <= random(4); change++) tar[random(tar.length)] = random(256);
    try {
      parse(tar.subarray(0, random(tar.length)), 1 + random(600));
    } catch (error) {
      refused++;
      expect(error).toMatchObject({ code: expect.stringMatching(/^image_(unsupported|truncated)$/) });
    }
  }
  expect(refused).toBeGreaterThan(500);
});

describe("what a stream may cost", () => {
  const file = (size: number) => tarHeader({ name: Buffer.from("f"), typeFlag: "0", size });

  test("the largest sparse map is read once, not once per block; its lines are short", () => {
    const pairs = 1 << 18;
    const map = block(`${pairs}\n${"0\n".repeat(2 * pairs)}`);
    const head = paxHeader([
      ["GNU.sparse.major", "1"],
      ["GNU.sparse.minor", "0"],
      ["GNU.sparse.realsize", "5"],
    ]);
    const [parsed] = parse(Buffer.concat([head, file(map.length), map, END]), 65_536);
    expect(parsed!.entry).toMatchObject({ sizeBytes: 5, segments: [] });
    // Refused at its first block, with nothing of it kept.
    const parser = new TarParser({ entry: () => undefined, data: () => undefined });
    parser.push(Buffer.concat([head, file(1 << 20)]));
    expect(() => parser.push(Buffer.alloc(512, "1"))).toThrow("a sparse map's line is not a number");
  });

  test("global headers are bounded together, and what replaces or removes counts once", () => {
    const header = (key: string, bytes: number) => {
      const body = paxHeader([[key, "v".repeat(bytes)]]);
      const size = Number.parseInt(body.toString("latin1", 124, 135), 8);
      body.set(tarHeader({ name: Buffer.from("PaxHeader"), typeFlag: "g", size }));
      return body;
    };
    const parser = new TarParser({ entry: () => undefined, data: () => undefined });
    for (let i = 0; i < 20; i++) parser.push(header("comment", 500_000));
    for (let i = 0; i < 20; i++) parser.push(Buffer.concat([header(`k${i}`, 500_000), header(`k${i}`, 0)]));
    parser.push(header("other", 500_000));
    expect(() => parser.push(header("third", 500_000))).toThrow("global headers of more than 1048576 bytes");
  });

  test("names and link targets end at PATH_MAX, and the error names the member", () => {
    const name = `start/${"n".repeat(4090)}`;
    expect(parse(makeTar([{ path: name, content: "" }]))[0]!.entry.path).toBe(name);
    for (const dialect of ["gnu", "pax"] as const) {
      expect(() => parse(makeTar([{ path: `${name}+`, content: "", dialect }]))).toThrow(
        /start\/nn.*more than 4096 bytes/,
      );
      expect(() => parse(makeTar([{ path: "it", type: "symlink", link: `${name}+`, dialect }]))).toThrow(
        /it: a name or link of more than 4096 bytes/,
      );
    }
  });
});
