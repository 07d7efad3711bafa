import { expect, test } from "bun:test";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { runCommand } from "../lib/command.ts";
import { writeCpio } from "./cpio.ts";
import { buildInitrd, ensureInitrd } from "./initrd.ts";

test("cpio lists and unpacks what was written, byte for byte", async () => {
  const sizes = [0, 1, 2, 3, 4, 5, 511, 4097];
  const contents = sizes.map((size) => Uint8Array.from({ length: size }, (_, i) => (i * 31) & 255));
  const archive = writeCpio([
    { kind: "directory", path: "d", mode: 0o755 },
    { kind: "character-device", path: "d/console", mode: 0o600, major: 5, minor: 1 },
    ...contents.map((content, i) => ({
      kind: "file" as const,
      path: `d/${"n".repeat(i + 1)}`,
      mode: 0o640,
      content,
    })),
  ]);
  const listed = await runCommand(["cpio", "-tv", "--quiet"], { stdin: archive });
  expect(listed).toMatch(/^crw------- .* 5, *1 .* d\/console$/m);
  expect(listed).toMatch(/^drwxr-xr-x .* d$/m);
  expect(listed.match(/^-rw-r----- .* d\/n+$/gm)).toHaveLength(sizes.length);

  const dir = await mkdtemp(join(tmpdir(), "setup-cpio-"));
  try {
    await runCommand(["cpio", "-id", "--quiet", "d/n*"], { stdin: archive, cwd: dir });
    for (const [i, content] of contents.entries()) {
      expect(Buffer.compare(await readFile(join(dir, "d", "n".repeat(i + 1))), content)).toBe(0);
    }
  } finally {
    await rm(dir, { recursive: true });
  }
});

test("absolute paths are refused", () => {
  expect(() => writeCpio([{ kind: "directory", path: "/x", mode: 0o755 }])).toThrow("must be relative");
});

test("the initial file system has init, modules in order and a console, and is the same every time", async () => {
  const init = Buffer.from("the agent");
  const modules = [
    { name: "b.ko", content: Buffer.from("module b") },
    { name: "a.ko", content: Buffer.from("module a") },
  ];
  const archive = buildInitrd(init, modules);
  expect(Buffer.compare(archive, buildInitrd(init, modules))).toBe(0);
  // What is less than a page at its end is what QEMU's ACPI tables have.
  for (const more of ["", "x", "y".repeat(3000)]) {
    expect(buildInitrd(Buffer.from(`the agent${more}`), modules).length % 4096).toBe(0);
  }
  const names = (await runCommand(["cpio", "-t", "--quiet"], { stdin: archive })).trim().split("\n");
  for (const name of ["init", "dev/console", "lib/modules/order", "lib/modules/a.ko", "lib/modules/b.ko"]) {
    expect(names).toContain(name);
  }
  expect(
    await runCommand(["cpio", "-i", "--quiet", "--to-stdout", "lib/modules/order"], { stdin: archive }),
  ).toBe("b.ko\na.ko\n");
});

test("it is built once per content, and old ones are cleared away", async () => {
  const dir = await mkdtemp(join(tmpdir(), "setup-initrd-"));
  try {
    const made: string[] = [];
    for (let i = 0; i < 6; i++) {
      const options = { dir, init: Buffer.from(`agent ${i}`), modules: [] };
      const first = await ensureInitrd(options);
      expect(first.built).toBe(true);
      expect(await ensureInitrd(options)).toEqual({ path: first.path, built: false });
      made.push(first.path);
    }
    expect(new Set(made).size).toBe(6);
    const left = (await runCommand(["ls", dir])).trim().split("\n");
    expect(left).toHaveLength(4);
    expect(left.map((name) => join(dir, name))).toContain(made.at(-1)!);
  } finally {
    await rm(dir, { recursive: true });
  }
});
