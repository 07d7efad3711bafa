import { expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readdirSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { layerMain } from "../storage/overlaybd/index.ts";
import { applyLayer } from "./layer-apply.ts";

function run(...argv: string[]): string {
  const child = Bun.spawnSync(argv);
  const said = `${child.stdout}${child.stderr}`;
  if (child.exitCode !== 0) throw new Error(`${argv.join(" ")}: ${said}`);
  return said;
}

test("agentenv layer apply: two layers, one with a whiteout, make the file system that their tars describe", async () => {
  const dir = mkdtempSync("/tmp/aenv-layer-apply-");
  const at = (name: string) => join(dir, name);
  const errors: string[] = [];
  const layer = async (...argv: string[]) => {
    const chunks: Uint8Array[] = [];
    let json: unknown;
    const output = {
      text: () => undefined,
      json: (value: unknown) => {
        json = value;
      },
      bytes: async (bytes: Uint8Array) => void chunks.push(bytes.slice()),
    };
    const code = await layerMain(argv, output, (text) => errors.push(text), { applyLayer });
    return { code, json, bytes: Buffer.concat(chunks) };
  };
  const ok = async (...argv: string[]) => {
    const ran = await layer(...argv);
    expect(errors).toEqual([]);
    expect(ran.code).toBe(0);
    return ran;
  };
  const leftovers = () => readdirSync(tmpdir()).filter((name) => name.startsWith("aenv-apply-"));
  const before = leftovers();
  try {
    const content = Buffer.from(Array.from({ length: 300_000 }, (_, i) => (i * 7) & 255));
    mkdirSync(at("one/etc"), { recursive: true });
    writeFileSync(at("one/etc/kept"), content);
    writeFileSync(at("one/etc/gone"), "x");
    symlinkSync("etc/kept", at("one/link"));
    mkdirSync(at("two/etc"), { recursive: true });
    writeFileSync(at("two/etc/.wh.gone"), "");
    writeFileSync(at("two/new"), "new\n");
    run("tar", "-C", at("one"), "-czf", at("one.tar.gz"), ".");
    run("tar", "-C", at("two"), "-cf", at("two.tar"), ".");

    await ok("create", at("a.data"), "--size", "64M");
    const uuid = "0190c0de-0000-7000-8000-000000000001";
    const first = await ok(
      "apply",
      at("a.data"),
      at("one.tar.gz"),
      ...["--mkfs", "--fs-uuid", uuid, "--json"],
    );
    expect(first.json).toMatchObject({ entries: 5, dataBytes: 300_001, skippedXattrs: 0 });
    await ok("commit", at("a.data"), at("a.lsmt"));
    await ok("create", at("b.data"), "--size", "0");
    await ok("apply", at("b.data"), at("two.tar"), "--lower", at("a.lsmt"));
    await ok("commit", at("b.data"), at("b.lsmt"));
    const disk = await ok("cat", at("a.lsmt"), at("b.lsmt"));
    writeFileSync(at("disk"), disk.bytes);
    run("e2fsck", "-fn", at("disk"));
    const debugfs = (command: string) => run("debugfs", "-R", command, at("disk"));
    expect(debugfs("stats")).toContain(uuid);
    run("debugfs", "-R", `dump /etc/kept ${at("kept")}`, at("disk"));
    expect(Buffer.from(await Bun.file(at("kept")).arrayBuffer()).equals(content)).toBe(true);
    expect(debugfs("cat /new")).toContain("new");
    expect(debugfs("stat /link")).toContain('Fast link dest: "etc/kept"');
    const names = debugfs("ls /etc");
    expect(names).toContain("kept");
    expect(names).not.toContain("gone");

    // What cannot be done says why, and exits with 1; what was not asked for rightly with 2.
    await ok("create", at("c.data"), "--size", "64M");
    expect((await layer("apply", at("c.data"), at("two.tar"))).code).toBe(1);
    expect(errors.splice(0).join()).toContain("file system");
    writeFileSync(at("torn.tar"), Buffer.alloc(700, 1));
    expect((await layer("apply", at("c.data"), at("torn.tar"), "--mkfs")).code).toBe(1);
    expect(errors.splice(0).join()).toContain("tar");
    await ok("create", at("huge.data"), "--size", String(2 ** 44));
    expect((await layer("apply", at("huge.data"), at("two.tar"), "--mkfs")).code).toBe(1);
    expect(errors.splice(0).join()).toContain("must be below 16 TiB");
    expect((await layer("apply", at("c.data"), at("absent.tar"), "--mkfs")).code).toBe(2);
    expect((await layer("apply", at("absent.data"), at("two.tar"))).code).toBe(2);
    expect((await layer("apply", at("c.data"), at("two.tar"), "--fs-uuid", uuid)).code).toBe(2);
    expect((await layer("apply", at("c.data"), at("two.tar"), "--mkfs", "--fs-uuid", "x")).code).toBe(2);
    expect(leftovers()).toEqual(before);
  } finally {
    rmSync(dir, { recursive: true, force: true });
  }
}, 120_000);
