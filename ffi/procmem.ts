import { assert } from "../src/lib/errors.ts";
import { check } from "./errno.ts";
import { bindShim } from "./lib.ts";

/** Bindings of c/shim/procmem.h: memory of another process. Addresses and lengths are bytes. */
const shim = bindShim({
  aenv_dirty_ranges: { args: ["i32", "f64", "f64", "u32", "ptr", "u32", "ptr"], returns: "i32" },
  aenv_read_process: { args: ["i32", "ptr", "u32", "ptr", "u32"], returns: "i32" },
  aenv_read_file_ranges: { args: ["i32", "ptr", "u32", "ptr", "u32"], returns: "i32" },
  aenv_compare_pages: { args: ["ptr", "ptr", "u32", "ptr"], returns: "i32" },
});

export const PAGE_BYTES = 4096;

/** Verdicts of {@link comparePages}. */
export const PAGE_SAME = 0;
export const PAGE_DATA = 1;
export const PAGE_ZERO = 2;

const DIRTY_NO_SCAN = 1;

/**
 * Pages of `[start, end)` that the process wrote (anonymous in a private file mapping). Fills `ranges` with
 * pairs {first byte, byte after the last} and returns their count and the address to go on from (`end`: done).
 * `pagemapFd` is an open `/proc/PID/pagemap`. `noScan` keeps to the old interface (kernels before 6.7).
 */
export function dirtyRanges(
  pagemapFd: number,
  start: number,
  end: number,
  ranges: Float64Array,
  noScan = false,
): { count: number; next: number } {
  const next = new Float64Array(new ArrayBuffer(8));
  const count = check(
    shim.aenv_dirty_ranges(
      pagemapFd,
      start,
      end,
      noScan ? DIRTY_NO_SCAN : 0,
      ranges,
      ranges.length >> 1,
      next,
    ),
    "looking for the pages a process wrote",
  );
  return { count, next: next[0]! };
}

/** Reads `count` {address, length} pairs of process `pid` one after the other into `out`; returns the bytes. */
export function readProcess(pid: number, ranges: Float64Array, count: number, out: Uint8Array): number {
  assert(count * 2 <= ranges.length, "more ranges than given");
  return check(
    shim.aenv_read_process(pid, ranges, count, out, out.length),
    `reading memory of process ${pid}`,
  );
}

/** Reads `count` {offset, length} pairs of a file; what lies behind its end reads as zeros. */
export function readFileRanges(fd: number, ranges: Float64Array, count: number, out: Uint8Array): number {
  assert(count * 2 <= ranges.length, "more ranges than given");
  return check(shim.aenv_read_file_ranges(fd, ranges, count, out, out.length), "reading a memory file");
}

/** Compares whole pages with their base (absent: zeros); one verdict per page. */
export function comparePages(
  current: Uint8Array,
  base: Uint8Array | undefined,
  pages: number,
  verdicts: Uint8Array,
): void {
  const bytes = pages * PAGE_BYTES;
  assert(current.length >= bytes && verdicts.length >= pages, "buffers too small");
  assert(base === undefined || base.length >= bytes, "base buffer too small");
  shim.aenv_compare_pages(current, base ?? null, pages, verdicts);
}
