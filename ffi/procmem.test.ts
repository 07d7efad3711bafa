import { dlopen, toArrayBuffer } from "bun:ffi";
import { afterAll, describe, expect, test } from "bun:test";
import { closeSync, mkdtempSync, openSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import {
  comparePages,
  dirtyRanges,
  PAGE_BYTES,
  PAGE_DATA,
  PAGE_SAME,
  PAGE_ZERO,
  readFileRanges,
  readProcess,
} from "./procmem.ts";

const dir = mkdtempSync(join(tmpdir(), "vmm-procmem-"));
afterAll(() => rmSync(dir, { recursive: true, force: true }));

const libc = dlopen("libc.so.6", {
  mmap: { args: ["ptr", "u64", "i32", "i32", "i32", "i64"], returns: "ptr" },
  munmap: { args: ["ptr", "u64"], returns: "i32" },
});

/** Maps a file of `pages` pages of 0xaa privately into this very process. */
function mapPrivately(pages: number): { file: string; address: number; memory: Uint8Array } & Disposable {
  const file = join(dir, `mapped-${pages}`);
  writeFileSync(file, Buffer.alloc(pages * PAGE_BYTES, 0xaa));
  const fd = openSync(file, "r");
  const PROT_READ_WRITE = 3;
  const MAP_PRIVATE = 2;
  const address = libc.symbols.mmap(null, pages * PAGE_BYTES, PROT_READ_WRITE, MAP_PRIVATE, fd, 0);
  closeSync(fd);
  if (address === null || Number(address) <= 0) throw new Error("mmap failed");
  return {
    file,
    address: Number(address),
    memory: new Uint8Array(toArrayBuffer(address, 0, pages * PAGE_BYTES)),
    [Symbol.dispose]: () => {
      libc.symbols.munmap(address, pages * PAGE_BYTES);
    },
  };
}

function dirtyPages(address: number, pages: number, noScan: boolean, room = 64): number[] {
  const fd = openSync("/proc/self/pagemap", "r");
  try {
    const ranges = new Float64Array(new ArrayBuffer(room * 16));
    const found: number[] = [];
    const end = address + pages * PAGE_BYTES;
    for (let at = address; at < end; ) {
      const { count, next } = dirtyRanges(fd, at, end, ranges, noScan);
      for (let i = 0; i < count; i++) {
        for (let page = ranges[2 * i]!; page < ranges[2 * i + 1]!; page += PAGE_BYTES)
          found.push((page - address) / PAGE_BYTES);
      }
      at = next;
    }
    return found;
  } finally {
    closeSync(fd);
  }
}

describe("written pages of a private mapping", () => {
  test("both interfaces find exactly the pages that were written", () => {
    const pages = 3000;
    using mapped = mapPrivately(pages);
    const written = new Set<number>([0, 1, 2, 500, 2999]);
    for (let page = 7; page < pages; page += 3) written.add(page);
    let sum = 0;
    for (let page = 0; page < 100; page++) sum += mapped.memory[page * PAGE_BYTES]!; // reading is not writing
    expect(sum).toBe(100 * 0xaa);
    for (const page of written) mapped.memory[page * PAGE_BYTES + 5] = 1;
    const expected = [...written].sort((a, b) => a - b);
    expect(dirtyPages(mapped.address, pages, false)).toEqual(expected);
    expect(dirtyPages(mapped.address, pages, true)).toEqual(expected);
    // A list with room for one range, and one longer than the kernel is asked for at a time.
    expect(dirtyPages(mapped.address, pages, false, 1)).toEqual(expected);
    expect(dirtyPages(mapped.address, pages, true, 1)).toEqual(expected);
    expect(dirtyPages(mapped.address, pages, false, 4096)).toEqual(expected);
  });

  test("reads scattered ranges of a process and of its file", () => {
    using mapped = mapPrivately(600);
    for (let page = 0; page < 600; page++) mapped.memory[page * PAGE_BYTES] = page % 150;
    const count = 300; // more than one call of process_vm_readv takes
    const ranges = new Float64Array(new ArrayBuffer(count * 16));
    const offsets = new Float64Array(new ArrayBuffer(count * 16));
    for (let i = 0; i < count; i++) {
      ranges[2 * i] = mapped.address + 2 * i * PAGE_BYTES;
      offsets[2 * i] = 2 * i * PAGE_BYTES;
      ranges[2 * i + 1] = PAGE_BYTES;
      offsets[2 * i + 1] = PAGE_BYTES;
    }
    const out = new Uint8Array(new ArrayBuffer(count * PAGE_BYTES));
    expect(readProcess(process.pid, ranges, count, out)).toBe(out.length);
    for (let i = 0; i < count; i++) expect(out[i * PAGE_BYTES]).toBe((2 * i) % 150);
    const fd = openSync(mapped.file, "r");
    const base = new Uint8Array(new ArrayBuffer(count * PAGE_BYTES));
    expect(readFileRanges(fd, offsets, count, base)).toBe(base.length);
    closeSync(fd);
    expect(base.every((byte) => byte === 0xaa)).toBe(true);
    const verdicts = new Uint8Array(new ArrayBuffer(count));
    comparePages(out, base, count, verdicts);
    expect([...verdicts].every((verdict) => verdict === PAGE_DATA)).toBe(true);
  });

  test("an unmapped address is an error, not silence", () => {
    const ranges = new Float64Array([4096, 4096]);
    expect(() => readProcess(process.pid, ranges, 1, new Uint8Array(4096))).toThrow("EFAULT");
    expect(() => readProcess(process.pid, new Float64Array([0, 8192]), 1, new Uint8Array(4096))).toThrow(
      "EINVAL",
    );
  });
});

test("pages are told apart: same, zeros, data", () => {
  const base = new Uint8Array(new ArrayBuffer(4 * PAGE_BYTES));
  const current = new Uint8Array(new ArrayBuffer(4 * PAGE_BYTES));
  base.fill(7, 0, 2 * PAGE_BYTES);
  current.fill(7, 0, PAGE_BYTES); // same, then zeroed, then zeros over zeros, then one byte at the very end
  current[4 * PAGE_BYTES - 1] = 1;
  const verdicts = new Uint8Array(new ArrayBuffer(4));
  comparePages(current, base, 4, verdicts);
  expect([...verdicts]).toEqual([PAGE_SAME, PAGE_ZERO, PAGE_SAME, PAGE_DATA]);
  comparePages(current, undefined, 4, verdicts);
  expect([...verdicts]).toEqual([PAGE_DATA, PAGE_SAME, PAGE_SAME, PAGE_DATA]);
});
