import { afterAll, beforeAll, expect, test } from "bun:test";
import { appendFileSync, existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { BuildLog, endLogLine, LogFile } from "./log.ts";
import { LogReader, logOf } from "./log-reader.ts";
import type { BuildLogEntry, BuildLogQuery } from "./types.ts";

let dir: string;
beforeAll(() => {
  dir = mkdtempSync("/tmp/template-log-");
});
afterAll(() => rmSync(dir, { recursive: true, force: true }));

const LEVELS = ["debug", "info", "warn", "error"] as const;
const BEGIN = Date.parse("2026-01-01T00:00:00Z");

/** The same numbers each time. */
function numbers(seed: number): (below: number) => number {
  let state = seed;
  return (below) => {
    state = (Math.imul(state, 1_103_515_245) + 12_345) >>> 0;
    return (state >>> 8) % below;
  };
}

/** Mostly of low levels and of all lengths; the clock jumps back now and then. */
function entries(count: number, random: (below: number) => number): BuildLogEntry[] {
  let at = BEGIN;
  return Array.from({ length: count }, (_, index) => {
    at += random(40) === 0 ? -5000 : random(300);
    return {
      timestamp: new Date(at).toISOString(),
      level: LEVELS[random(60) === 0 ? 3 : random(3)]!,
      message: `${index} ${"ä".repeat(random(30) === 0 ? 8000 : random(60))}`,
      ...(random(2) === 0 ? {} : { step: String(random(9)) }),
    };
  });
}

function store(name: string, log: readonly BuildLogEntry[]): string {
  const path = join(dir, `${name}.jsonl`);
  writeFileSync(path, log.map((entry) => `${JSON.stringify(entry)}\n`).join(""));
  return path;
}

/** What this process has read so far, from the page cache or not. */
const bytesRead = (): number => Number(/^rchar: (\d+)$/m.exec(readFileSync("/proc/self/io", "utf8"))![1]);

test("pages of a log on disk are those of the whole of it: by offset, level, time, in both directions", async () => {
  const random = numbers(7);
  const all = entries(3000, random);
  const [path, reader] = [store("random", all), new LogReader()];
  const times = all.map(({ timestamp }) => Date.parse(timestamp));
  for (let round = 0; round < 400; round++) {
    const level = [undefined, ...LEVELS][random(5)];
    const cursorMs = random(3) === 0 ? times[random(times.length)]! + random(3) - 1 : undefined;
    const backward = random(2) === 0;
    const [offset, limit] = [random(3) === 0 ? 0 : random(3200), 1 + random(100)];
    const matching = all.filter(({ level: has, timestamp }) => {
      const at = Date.parse(timestamp);
      if (level !== undefined && LEVELS.indexOf(has) < LEVELS.indexOf(level)) return false;
      return cursorMs === undefined || (backward ? at <= cursorMs : at >= cursorMs);
    });
    if (backward) matching.reverse();
    const query: BuildLogQuery = {
      ...(level === undefined ? {} : { level }),
      ...(cursorMs === undefined ? {} : { cursorMs }),
      ...{ backward, offset, limit },
    };
    const expected = matching.slice(offset, offset + limit);
    expect(await reader.select(path, query)).toEqual(expected);
    expect([...(await logOf(() => all).select(query))]).toEqual(expected);
  }
});

test("the largest log there is, polled as an SDK does: what is read is what is asked for", async () => {
  const log = new BuildLog();
  const line = Buffer.from(`${"a".repeat(400)}\n`);
  const lines = log.lines("info", "1");
  for (let i = 0; i < 40_000; i++) lines.write(line);
  log.close();
  const path = join(dir, "large.jsonl");
  writeFileSync(path, log.take());
  const { size } = Bun.file(path);
  expect(size).toBeGreaterThan(14 << 20);

  const reader = new LogReader();
  const end = log.entries.length;
  // Two at once for the first time: it is read through once.
  const beforeFirst = bytesRead();
  await Promise.all([reader.select(path, { limit: 1 }), reader.select(path, { limit: 1 })]);
  expect(bytesRead() - beforeFirst).toBeLessThan(size + (1 << 20));

  const before = bytesRead();
  for (let poll = 0; poll < 20; poll++) {
    const offset = Math.floor((end / 20) * poll);
    expect(await reader.select(path, { offset, limit: 100 })).toEqual(
      log.entries.slice(offset, offset + 100),
    );
    expect(await reader.select(path, { offset: end, limit: 100 })).toEqual([]);
    expect(await reader.select(path, { level: "error", limit: 100 })).toEqual([]);
  }
  expect((await reader.select(path, { backward: true, limit: 50 })).toReversed()).toEqual(
    log.entries.slice(-50),
  );
  expect(bytesRead() - before).toBeLessThan(size / 4);
});

test("no file, one that grew, one that went; what a crash cut off is left out and swallows nothing", async () => {
  const path = join(dir, "torn.jsonl");
  const reader = new LogReader();
  const shown = async (): Promise<string[]> =>
    (await reader.select(path, { limit: 10 })).map(({ message }) => message);
  expect(await shown()).toEqual([]);
  const whole = { timestamp: new Date(BEGIN).toISOString(), level: "info", message: "one" };
  writeFileSync(path, `${JSON.stringify(whole)}\n`);
  expect(await shown()).toEqual(["one"]);
  appendFileSync(path, JSON.stringify({ ...whole, message: "two" }).slice(0, 40));
  expect(await shown()).toEqual(["one"]);

  await endLogLine(path);
  const log = new BuildLog();
  log.add("error", "the server was restarted");
  {
    await using _ = new LogFile(path, log, (error) => {
      throw error;
    });
  }
  expect(await shown()).toEqual(["one", "the server was restarted"]);
  await endLogLine(path);
  expect(readFileSync(path, "utf8")).not.toContain("\n\n");
  // JSON, but no entries.
  appendFileSync(path, `null\n7\n"text"\n[]\n{}\n${JSON.stringify({ ...whole, message: "last" })}\n`);
  expect(await shown()).toEqual(["one", "the server was restarted", "last"]);
  rmSync(path);
  expect(await shown()).toEqual([]);
  await endLogLine(path);
  expect(existsSync(path)).toBeFalse();
});
