import { afterAll, expect, test } from "bun:test";
import {
  closeSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readFileSync,
  rmdirSync,
  rmSync,
  writeSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openPipe, Pump, RotatingFile } from "./firecracker/output.ts";

const root = mkdtempSync(join(tmpdir(), "aenv-output-"));
afterAll(() => rmSync(root, { recursive: true, force: true }));

test("a file that cannot be begun anew goes on in the old one, and touches no descriptor of others", () => {
  const path = join(root, "console.log");
  using file = new RotatingFile(path, 8);
  file.append(Buffer.from("1234567"));
  // A directory in the way of the rename.
  mkdirSync(`${path}.1/x`, { recursive: true });
  expect(() => file.append(Buffer.from("abc"))).toThrow();
  const other = join(root, "other");
  const fd = openSync(other, "w");
  expect(() => file.append(Buffer.from("def"))).toThrow();
  expect(readFileSync(other, "utf8")).toBe("");
  expect(readFileSync(path, "utf8")).toBe("1234567abcdef");
  // Not without end.
  expect(() => file.append(Buffer.from("ghijk"))).toThrow();
  expect(readFileSync(path, "utf8")).toBe("1234567abcdef");
  rmdirSync(`${path}.1/x`);
  rmdirSync(`${path}.1`);
  file.append(Buffer.from("ghijk"));
  expect(readFileSync(path, "utf8")).toBe("ghijk");
  expect(readFileSync(`${path}.1`, "utf8")).toBe("1234567abcdef");
  file[Symbol.dispose]();
  file[Symbol.dispose]();
  file.append(Buffer.from("late"));
  writeSync(fd, "mine");
  closeSync(fd);
  expect(readFileSync(other, "utf8")).toBe("mine");
});

test("a disk that stays full is told once, and again when it was not meanwhile", () => {
  const path = join(root, "pipe");
  const told: unknown[] = [];
  const writer = openPipe(path);
  const full = new RotatingFile("/dev/full", 1 << 20);
  const kept = join(root, "kept");
  {
    using pump = new Pump(openPipe(path), [full, new RotatingFile(kept, 1 << 20)], (error) =>
      told.push(error),
    );
    for (const text of ["a", "b", "c"]) {
      writeSync(writer, text);
      pump.run();
    }
  }
  closeSync(writer);
  expect(told).toHaveLength(1);
  // The file beside it has everything.
  expect(readFileSync(kept, "utf8")).toBe("abc");
});
