import { describe, expect, test } from "bun:test";
import { copyFileSync, existsSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { scratchDirectory } from "../test-support.ts";
import { layerMain } from "./index.ts";

const VECTORS = `${import.meta.dir}/../../../../tests/vectors/overlaybd`;
const manifest = JSON.parse(readFileSync(`${VECTORS}/manifest.json`, "utf8")) as {
  files: Record<string, { virtual_size?: number; disk_sha256?: string; uuid?: string; user_tag?: string }>;
  stacks: {
    id: string;
    lowers_bottom_to_top: string[];
    virtual_size: number;
    disk_sha256: string;
    upper?: unknown;
  }[];
};

interface Ran {
  code: number;
  text: string;
  json: unknown;
  errors: string;
  bytes: Uint8Array;
}

/** One command line, as the executable runs it. */
async function layer(...argv: string[]): Promise<Ran> {
  const lines: string[] = [];
  const errors: string[] = [];
  const chunks: Uint8Array[] = [];
  let json: unknown;
  const code = await layerMain(
    argv,
    {
      text: (line) => lines.push(line),
      json: (value) => {
        // What JSON makes of it.
        json = JSON.parse(JSON.stringify(value));
      },
      bytes: async (bytes) => {
        chunks.push(bytes.slice());
      },
    },
    (text) => errors.push(text),
  );
  return { code, text: lines.join("\n"), json, errors: errors.join("\n"), bytes: Buffer.concat(chunks) };
}

async function ok(...argv: string[]): Promise<Ran> {
  const ran = await layer(...argv);
  expect(ran.errors).toBe("");
  expect(ran.code).toBe(0);
  return ran;
}

const sha256 = (bytes: Uint8Array) => new Bun.CryptoHasher("sha256").update(bytes).digest("hex");
const same = (a: string, b: string) => expect(readFileSync(a).equals(readFileSync(b))).toBe(true);

/** Of the library that the build took in: what it compresses to is its version's, what the vectors hold is 1.5.4's. */
const zstdHeader = readFileSync("/usr/include/zstd.h", "utf8");
const zstdVersion = ["MAJOR", "MINOR", "RELEASE"]
  .map((part) => new RegExp(`^#define ZSTD_VERSION_${part} +(\\d+)$`, "m").exec(zstdHeader)?.[1])
  .join(".");
const sameZstd = zstdVersion === "1.5.4";
if (!sameZstd)
  console.log(`zstd is ${zstdVersion}, the vectors' is 1.5.4: contents are compared, not compressed bytes`);

describe("against files of the original tools", () => {
  test("what they compress and wrap, we make to the same byte", async () => {
    using scratch = scratchDirectory("tool");
    const cases: [target: string, source: string, ...flags: string[]][] = [
      ["commit-lz4.zfile", "commit.lsmt", "--to", "lz4"],
      ["commit-zstd.zfile", "commit.lsmt", "--to", "zstd"],
      ["commit-zstd-16k.zfile", "commit.lsmt", "--to", "zstd", "--block-size", "16K"],
      ["tool-lz4.zfile", "commit.lsmt", "--to", "lz4", "--header-at-end"],
      ["nocrc-lz4.zfile", "commit.lsmt", "--to", "lz4", "--no-checksums", "--header-at-end"],
      ["nocrc-zstd.zfile", "commit.lsmt", "--to", "zstd", "--no-checksums"],
      ["layer-lz4.tar", "commit.lsmt", "--to", "lz4", "--tar"],
      ["layer-zstd.tar", "commit.lsmt", "--to", "zstd", "--tar"],
      ["tool-lz4.tar", "commit.lsmt", "--to", "lz4", "--tar", "--header-at-end"],
      ["tiny-lz4.zfile", "tiny.lsmt", "--to", "lz4"],
      ["tiny-lz4.tar", "tiny.lsmt", "--to", "lz4", "--tar"],
      ["tiny-tool-lz4.zfile", "tiny.lsmt", "--to", "lz4", "--header-at-end"],
      // And back, and from one form into another.
      ["commit.lsmt", "layer-lz4.tar", "--to", "lsmt"],
      ["commit.lsmt", "commit-zstd-16k.zfile", "--to", "lsmt"],
      ["tiny.lsmt", "tiny-ustar.tar", "--to", "lsmt"],
      ["layer-lz4.tar", "commit-zstd.zfile", "--to", "lz4", "--tar"],
      ["merged-tool.lsmt", "merged-tool.zfile", "--to", "lsmt"],
    ];
    for (const [n, [expected, source, ...flags]] of cases.entries()) {
      const target = `${scratch.path}/${n}`;
      await ok("convert", `${VECTORS}/${source}`, target, ...flags);
      if (flags.includes("zstd")) {
        await ok("convert", target, `${target}.back`, "--to", "lsmt");
        same(`${target}.back`, `${VECTORS}/commit.lsmt`);
        if (!sameZstd) continue;
      }
      if (!readFileSync(target).equals(readFileSync(`${VECTORS}/${expected}`))) {
        throw new Error(`${source} ${flags.join(" ")} is not ${expected} to the byte`);
      }
    }
  });

  test("commit writes what theirs does, but for the case of uuids; a sealed layer commits to the same", async () => {
    using scratch = scratchDirectory("tool");
    const at = (name: string) => `${scratch.path}/${name}`;
    for (const name of ["tiny", "rw-basic"]) {
      copyFileSync(`${VECTORS}/${name}.data`, at(`${name}.data`));
      copyFileSync(`${VECTORS}/${name}.index`, at(`${name}.index`));
    }
    const upperCase = (bytes: Buffer) => {
      for (const block of [0, bytes.byteLength - 4096]) {
        for (const field of [56, 93]) {
          const text = bytes.toString("latin1", block + field, block + field + 36);
          bytes.write(text.toUpperCase(), block + field, "latin1");
        }
      }
      return bytes;
    };
    const flags = (uuid: string, parent: string) => ["--uuid", uuid, "--parent-uuid", parent];
    const ids = flags("11111111-2222-4333-8444-000000000b01", "11111111-2222-4333-8444-000000000b00");
    await ok("commit", at("rw-basic.data"), at("commit"), ...ids, "--tag", "committed vector");
    expect(upperCase(readFileSync(at("commit"))).equals(readFileSync(`${VECTORS}/commit.lsmt`))).toBe(true);
    const tinyIds = flags("11111111-2222-4333-8444-000000000902", "11111111-2222-4333-8444-000000000900");
    await ok("commit", at("tiny.data"), at("tiny-commit"), ...tinyIds);
    expect(upperCase(readFileSync(at("tiny-commit"))).equals(readFileSync(`${VECTORS}/tiny.lsmt`))).toBe(
      true,
    );
    // The manifest says so of the original: committing the sealed layer gives what committing the pair gave.
    await ok("seal", at("rw-basic.data"), at("sealed"));
    await ok("merge", at("sealed"), "--into", at("again"), ...ids, "--tag", "committed vector");
    same(at("again"), at("commit"));
    await ok("merge", `${VECTORS}/sealed.lsmt`, "--into", at("theirs"), ...ids, "--tag", "committed vector");
    same(at("theirs"), at("commit"));
  });

  test("merge and cat give the content that theirs give", async () => {
    using scratch = scratchDirectory("tool");
    for (const stack of manifest.stacks) {
      // The big ones are read in vectors.test.ts.
      if (stack.upper !== undefined || stack.virtual_size > 64 << 20) continue;
      const files = stack.lowers_bottom_to_top.map((name) => `${VECTORS}/${name}`);
      expect(sha256((await ok("cat", ...files)).bytes)).toBe(stack.disk_sha256);
      const target = `${scratch.path}/${stack.id}`;
      await ok("merge", ...files, "--into", target);
      const compared = await ok("diff", files.join(","), target);
      expect(compared.text).toBe("the same");
    }
  }, 120_000);

  test("inspect and verify agree with the manifest", async () => {
    for (const name of [
      "commit.lsmt",
      "layer-lz4.tar",
      "sealed.lsmt",
      "merged-tool.zfile",
      "rust-commit.lsmt",
    ]) {
      const entry = manifest.files[name]!;
      const file = `${VECTORS}/${name}`;
      const [report] = (await ok("inspect", file, "--json", "--mappings")).json as Record<string, unknown>[];
      expect(report?.virtualSizeBytes).toBe(entry.virtual_size);
      if (entry.uuid !== undefined && !/^0[0-]*$/.test(entry.uuid)) {
        expect(report?.uuid).toBe(entry.uuid.toLowerCase());
      }
      if (entry.user_tag !== undefined && entry.user_tag !== "") expect(report?.userTag).toBe(entry.user_tag);
      expect(report?.mappings).toBe((report?.index as unknown[] | undefined)?.length);
      const digest = `sha256:${sha256(readFileSync(file))}`;
      const verified = await ok("verify", file, "--digest", digest, "--json");
      expect(verified.json).toMatchObject([{ file, valid: true, digest }]);
    }
    const shown = await ok("inspect", `${VECTORS}/layer-zstd.tar`);
    expect(shown.text).toContain("tar > zfile > lsmt");
    expect(shown.text).toMatch(/algorithm +zstd/);
    const upper = await ok("inspect", `${VECTORS}/rw-basic.data`, "--json");
    expect(upper.json).toMatchObject([{ kind: "writable layer", mode: "logStructured", flushEpochs: false }]);
  });

  test("verify refuses what is damaged and says where", async () => {
    const bad = ["zfile-block-crc.zfile", "lsmt-index-overlap.lsmt", "lsmt-trailer-magic0.lsmt"];
    for (const name of bad.map((name) => `${VECTORS}/bad/${name}`).filter((name) => existsSync(name))) {
      const ran = await layer("verify", name);
      expect(ran.code).toBe(1);
      expect(ran.text).toMatch(/NOT VALID: .*at byte \d+/);
    }
    const wrong = await layer("verify", `${VECTORS}/tiny.lsmt`, "--digest", "sha256:00");
    expect(wrong.code).toBe(1);
    expect(wrong.text).toContain("digest is sha256:");
    const two = await layer(
      "verify",
      `${VECTORS}/tiny.lsmt`,
      `${VECTORS}/bad/zfile-block-crc.zfile`,
      "--json",
    );
    expect(two.code).toBe(1);
    expect(two.json).toMatchObject([{ valid: true }, { valid: false }]);
  });
});

describe("a layer by hand", () => {
  test("create, write, look, seal, compare", async () => {
    using scratch = scratchDirectory("tool");
    const at = (name: string) => `${scratch.path}/${name}`;
    for (const mode of ["log", "hybrid", "sparse"]) {
      const data = at(`${mode}.data`);
      await ok("create", data, "--size", "4M", "--mode", mode);
      expect(existsSync(at(`${mode}.index`))).toBe(mode !== "sparse");
      const input = crypto.getRandomValues(new Uint8Array(40_000));
      writeFileSync(at("input"), input);
      const partial = await layer("write", data, "--offset", "1M", "--from", at("input"));
      expect(partial.code).toBe(1);
      expect(partial.errors).toContain("--pad");
      await ok("write", data, "--offset", "1M", "--from", at("input"), "--pad");
      const zeroed = await ok("write", data, "--offset", "1M", "--zero", "4K", "--json");
      expect(zeroed.json).toEqual({ offsetBytes: 1 << 20, lengthBytes: 4096 });
      const [report] = (await ok("inspect", data, "--json")).json as Record<string, unknown>[];
      expect(report).toMatchObject({ kind: "writable layer", virtualSizeBytes: 4 << 20 });
      await ok("commit", data, at(`${mode}.tar`), "--compress", "zstd", "--block-size", "16K", "--tar");
      await ok("seal", data, at(`${mode}.sealed`));
      const content = await ok(
        "cat",
        at(`${mode}.sealed`),
        "--offset",
        String((1 << 20) + 4000),
        "--length",
        "36100",
      );
      const expected = new Uint8Array(36_100);
      expected.set(input.subarray(4096, 40_000), 96);
      expect(Buffer.compare(content.bytes, expected)).toBe(0);
      expect((await ok("diff", at(`${mode}.sealed`), at(`${mode}.tar`))).text).toBe("the same");
    }
    const differ = await layer("diff", at("log.sealed"), `${VECTORS}/tiny.lsmt`, "--json");
    expect(differ.code).toBe(1);
    const found = differ.json as {
      equal: boolean;
      differences: { offsetBytes: number; lengthBytes: number }[];
    };
    expect(found.equal).toBe(false);
    expect(found.differences.length).toBeGreaterThan(0);
  });

  test("writing over layers below", async () => {
    using scratch = scratchDirectory("tool");
    const data = `${scratch.path}/up.data`;
    const below = `${VECTORS}/commit.lsmt`;
    await ok("create", data, "--size", "0");
    await ok("write", data, "--offset", "0", "--zero", "16M", "--lower", below);
    await ok("seal", data, `${scratch.path}/zeros`);
    const { bytes } = await ok("cat", below, `${scratch.path}/zeros`);
    expect(bytes.byteLength).toBe(16 << 20);
    expect(bytes.every((byte) => byte === 0)).toBe(true);
  });
});

describe("mistakes", () => {
  test("are told with a way out, and change nothing", async () => {
    using scratch = scratchDirectory("tool");
    const existing = `${scratch.path}/there`;
    writeFileSync(existing, "precious");
    const tiny = `${VECTORS}/tiny.lsmt`;
    const cases: [code: number, message: RegExp, ...argv: string[]][] = [
      [2, /no command "frobnicate"/, "frobnicate"],
      [2, /wanted: DATA TARGET/, "commit", "x"],
      [2, /--nonsense/, "inspect", tiny, "--nonsense"],
      [2, /is no size/, "create", `${scratch.path}/u`, "--size", "many"],
      [2, /--mode/, "create", `${scratch.path}/u`, "--mode", "magic"],
      [2, /there is no upper/, "seal", `${scratch.path}/nothing`, `${scratch.path}/t`],
      [2, /lz4 or zstd/, "convert", tiny, `${scratch.path}/t`, "--to", "gzip"],
      [2, /--to says/, "convert", tiny, `${scratch.path}/t`],
      [2, /--into/, "merge", tiny],
      [2, /goes with --compress/, "merge", tiny, "--into", `${scratch.path}/t`, "--block-size", "4K"],
      [1, /exists/, "merge", tiny, "--into", existing],
      [1, /exists/, "convert", tiny, existing, "--to", "lz4"],
      [1, /cannot open .*nothing/, "inspect", `${scratch.path}/nothing`],
      [1, /block size/, "convert", tiny, `${scratch.path}/t`, "--to", "lz4", "--block-size", "5000"],
      [1, /is no uuid/, "merge", tiny, "--into", `${scratch.path}/t`, "--uuid", "me"],
      [1, /user tag of 300 bytes/, "merge", tiny, "--into", `${scratch.path}/t`, "--tag", "x".repeat(300)],
      [1, /behind the disk/, "cat", tiny, "--offset", "1G", "--length", "1"],
      [1, /multiple of 512/, "create", `${scratch.path}/u`, "--size", "1000"],
    ];
    for (const [code, message, ...argv] of cases) {
      const ran = await layer(...argv);
      expect([argv.join(" "), ran.code]).toEqual([argv.join(" "), code]);
      expect(ran.errors).toMatch(message);
    }
    expect(readFileSync(existing, "utf8")).toBe("precious");
    expect(existsSync(`${scratch.path}/t`)).toBe(false);
    expect(existsSync(`${scratch.path}/u`)).toBe(false);
  });

  test("help is there for every command", async () => {
    const overview = await ok("--help");
    for (const name of [
      "create",
      "write",
      "commit",
      "apply",
      "seal",
      "merge",
      "inspect",
      "verify",
      "convert",
      "diff",
      "cat",
      "bench",
    ]) {
      expect(overview.text).toContain(`  ${name} `);
      const help = await ok(name, "--help");
      expect(help.text).toStartWith(`Usage: agentenv layer ${name}`);
      expect(help.text).toContain("Examples:");
      expect((await ok("help", name)).text).toBe(help.text);
    }
    expect((await layer()).code).toBe(2);
  });
});

test("bench measures reading, and with a place for it writing, and leaves nothing behind", async () => {
  using scratch = scratchDirectory("tool-bench");
  const { path } = scratch;
  const layerFile = `${VECTORS}/commit-lz4.zfile`;
  const { json } = await ok("bench", layerFile, "--seconds", "0.02", "--scratch", path, "--json");
  const report = json as {
    layers: number;
    figures: { what: string; operations: number; mibPerSecond: number }[];
  };
  expect(report.layers).toBe(1);
  expect(report.figures.map(({ what }) => what)).toEqual([
    expect.stringContaining("sequential read"),
    expect.stringContaining("random read, 4096"),
    expect.stringContaining("random write, 4096"),
    expect.stringContaining("random write with flush"),
  ]);
  for (const { operations, mibPerSecond } of report.figures) {
    expect(operations).toBeGreaterThan(0);
    expect(mibPerSecond).toBeGreaterThan(0);
  }
  expect(readdirSync(path)).toEqual([]);
  expect((await ok("bench", layerFile, "--seconds", "0.01", "--block", "512")).text).toContain(
    "random read, 512",
  );
  for (const wrong of [
    ["--block", "1000"],
    ["--seconds", "0"],
    ["--seconds", "x"],
  ]) {
    expect((await layer("bench", layerFile, ...wrong)).code).toBe(2);
  }
});
