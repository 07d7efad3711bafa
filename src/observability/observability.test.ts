import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { appendFileSync, mkdtempSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type Agent, startAgent } from "../../tests/agent/harness.ts";
import { eventually } from "../../tests/support/eventually.ts";
import { AenvError } from "../lib/errors.ts";
import { newId } from "../lib/ids.ts";
import { createLogger } from "../lib/log.ts";
import type { SandboxRecord } from "../orchestrator/types.ts";
import { MetricHistory } from "./history.ts";
import { createObserver, type ObservedSandboxes } from "./index.ts";
import { Counter, Gauge, Histogram } from "./registry.ts";

const log = createLogger("observability-test");
log.level = "silent";

describe("registry", () => {
  test("families in the text format, buckets cumulative, labels escaped", () => {
    const counter = new Counter("c_total", "Things.", ["kind"]);
    counter.add({ kind: 'a"b\\c\nd' });
    counter.add({ kind: 'a"b\\c\nd' }, 2);
    expect(counter.render()).toBe(
      '# HELP c_total Things.\n# TYPE c_total counter\nc_total{kind="a\\"b\\\\c\\nd"} 3\n',
    );
    expect(new Counter("empty_total", "None yet.").render()).toEndWith("empty_total 0\n");
    const histogram = new Histogram("h_seconds", "Times.", [], [0.1, 1]);
    for (const value of [0.05, 0.5, 5]) histogram.observe({}, value);
    expect(histogram.render().split("\n").slice(2, 7)).toEqual([
      'h_seconds_bucket{le="0.1"} 1',
      'h_seconds_bucket{le="1"} 2',
      'h_seconds_bucket{le="+Inf"} 3',
      "h_seconds_sum 5.55",
      "h_seconds_count 3",
    ]);
  });

  test("labels of strangers do not grow memory without end", () => {
    const gauge = new Gauge("g", "Many.", ["who"]);
    for (let i = 0; i < 5000; i++) gauge.add({ who: `w${i}` }, 1);
    const lines = gauge.render().trim().split("\n");
    expect(lines.length).toBe(2 + 1001);
    expect(lines.at(-1)).toBe('g{who="other"} 4000');
  });
});

test("history keeps the last points, in order, within bounds", () => {
  const history = new MetricHistory(40);
  const point = (i: number) => ({
    atMs: i * 1000,
    cpuUsedPct: i,
    cpuCount: 2,
    memUsed: 2 ** 40 + i,
    memTotal: 2 ** 41,
    memCache: 3,
    diskUsed: 4,
    diskTotal: 5,
  });
  expect(history.latest()).toBeUndefined();
  for (let i = 0; i < 100; i++) history.push(point(i));
  expect(history.list()).toEqual(Array.from({ length: 40 }, (_, i) => point(60 + i)));
  expect(history.list(70_000, 72_000).map((entry) => entry.cpuUsedPct)).toEqual([70, 71, 72]);
  expect(history.latest()).toEqual(point(99));
});

describe("a sandbox with a real agent", () => {
  let agent: Agent;
  let dir: string;
  const id = newId();
  let template = newId();
  let state: SandboxRecord["state"] = "running";
  let known = true;
  /** Looks at the guest that were begun. */
  let looks = 0;
  const token = "";
  const record = () =>
    ({ id, state, secure: token !== "", templateId: template, cpuCount: 2, memoryMiB: 512 }) as SandboxRecord;
  const sandboxes: ObservedSandboxes = {
    list: () => (known ? [record()] : []),
    get: () => {
      if (known) return record();
      throw new AenvError({ code: "sandbox_not_found", status: 404, message: "gone" });
    },
    route: () => {
      if (!known) return { kind: "not_found" };
      if (state !== "running") return { kind: "paused", autoResume: false };
      looks++;
      return {
        kind: "ready",
        hostAddress: new URL(agent.url).host,
        instanceId: "one",
        gone: new AbortController().signal,
      };
    },
    accessToken: () => token,
  };
  beforeAll(async () => {
    agent = await startAgent();
    dir = mkdtempSync(join(tmpdir(), "aenv-observer-"));
    writeFileSync(join(dir, "console.log"), "booting\r\n\x1b[31mred\x1b[0m alert\n\nhalf a li");
  });
  afterAll(async () => {
    await agent?.[Symbol.asyncDispose]();
    rmSync(dir, { recursive: true, force: true });
  });
  const observe = () =>
    createObserver({
      identity: { nodeId: "n", clusterId: newId(), serviceInstanceId: newId() },
      version: "1",
      commit: "c",
      nodeVisible: true,
      consolePath: async () => join(dir, "console.log"),
      blockUse: async () => ({ devices: 3, upperBytes: 4096 }),
      sampleIntervalMs: 50,
      log,
    });

  test("figures come from the start on, stop with a pause, stay readable, and go with it", async () => {
    await using observer = observe();
    looks = 0;
    observer.start(sandboxes);
    observer.onEvent({ kind: "creating", sandboxId: id, atMs: 1 });
    expect((await observer.node())?.sandboxStartingCount).toBe(1);
    observer.onEvent({
      kind: "created",
      sandboxId: id,
      atMs: 2,
      durationMs: 300,
      phases: { vmm: 200, total: 300 },
    });
    await eventually("three points", () => observer.metrics(id).length >= 3);
    const points = observer.metrics(id);
    expect(points.length).toBeGreaterThanOrEqual(3);
    expect(points[0]!.memTotal).toBeGreaterThan(2 ** 28);
    expect(points.every((point, i) => i === 0 || point.atMs >= points[i - 1]!.atMs)).toBe(true);
    expect(points.at(-1)!.cpuUsedPct).toBeLessThanOrEqual(100);
    expect(observer.spawns(template)).toEqual({ count: 1, lastAtMs: 2 });
    const before = template;
    template = "debian:12";
    observer.onEvent({ kind: "created", sandboxId: id, atMs: 3, cold: true });
    expect(observer.spawns("debian:12").count).toBe(0);
    template = before;
    state = "paused";
    await eventually("what was begun is over", async () => {
      const counts = (await observer.render()).matchAll(
        /^agentenv_sandbox_metric_samples_total\{.*\} (\d+)$/gm,
      );
      return [...counts].reduce((sum, count) => sum + Number(count[1]), 0) === looks;
    });
    const kept = observer.metrics(id).length;
    await Bun.sleep(150);
    expect(observer.metrics(id).length).toBe(kept);
    expect(kept).toBeGreaterThan(0);
    state = "running";
    observer.onEvent({ kind: "deleted", sandboxId: id, atMs: 3 });
    known = false;
    // Told late, of a sandbox that is not there any more.
    observer.onEvent({ kind: "pause_failed", sandboxId: id, atMs: 4, reason: "late" });
    await eventually("nothing is known of it", async () => (await observer.logs(id)).length === 0);
    await Bun.sleep(150);
    expect(observer.metrics(id)).toEqual([]);
    expect(await observer.logs(id)).toEqual([]);
    known = true;
  });

  test("the log is what happened and what the console printed, line by line", async () => {
    await using observer = observe();
    observer.start(sandboxes);
    observer.onEvent({ kind: "created", sandboxId: id, atMs: 5 });
    const lines = async () =>
      (await observer.logs(id)).map((entry) => `${entry.fields.source} ${entry.message}`);
    expect(await lines()).toEqual(["lifecycle sandbox runs", "console booting", "console red alert"]);
    observer.onEvent({ kind: "copied", sandboxId: id, atMs: 6, reason: "1 of 1 children run: c" });
    expect((await lines()).at(-1)).toBe("lifecycle sandbox was the source of a fork: 1 of 1 children run: c");
    appendFileSync(join(dir, "console.log"), "ne\n");
    expect((await lines()).at(-1)).toBe("console half a line");
    appendFileSync(join(dir, "console.log"), `${"x".repeat(100)}\n`.repeat(5000));
    const flooded = await lines();
    expect(flooded.length).toBeLessThanOrEqual(1000);
    expect(flooded.some((line) => line.includes("bytes of console output left out"))).toBe(true);
    writeFileSync(join(dir, "console.log"), "begun anew\n");
    expect((await lines()).at(-1)).toBe("console begun anew");
    // Rotated: another file has the name, and is longer already than what was read of the one before.
    renameSync(join(dir, "console.log"), join(dir, "console.log.1"));
    writeFileSync(join(dir, "console.log"), "first of the next file\nsecond\n");
    expect((await lines()).slice(-2)).toEqual(["console first of the next file", "console second"]);
    renameSync(join(dir, "console.log"), join(dir, "console.log.1"));
    writeFileSync(join(dir, "console.log"), "\n\n\nas long as the file before\n");
    expect((await lines()).at(-1)).toBe("console as long as the file before");
    appendFileSync(join(dir, "console.log"), "more\n");
    expect((await lines()).slice(-2)).toEqual(["console as long as the file before", "console more"]);
    observer.onEvent({ kind: "pause_failed", sandboxId: id, atMs: 9, reason: "disk full" });
    expect((await observer.logs(id)).at(-1)).toMatchObject({
      level: "error",
      message: "pause failed: disk full",
    });
  });

  test("a client that makes up methods does not make the page large", async () => {
    await using observer = observe();
    for (let i = 0; i < 2000; i++) {
      observer.request("proxy_host", `M${i}`, `/${"x".repeat(10_000)}${i}`, 200, 0.02);
    }
    observer.request("proxy_host", "POST", "/*", 200, 0.02);
    const text = await observer.render();
    expect(text).toContain('method="POST",route="/*"');
    expect(text).toContain('method="other"');
    expect(text.length).toBeLessThan(100_000);
  });

  test("the metrics page has every family, and numbers that add up", async () => {
    await using observer = observe();
    observer.start(sandboxes);
    observer.gauge("agentenv_proxy_connections", "Open.", () => 7);
    let faults = 2;
    observer.counters("agentenv_firecracker_total", "Counts.", ["group", "name"], () => [
      { labels: { group: "seccomp", name: "num_faults" }, total: faults++ },
    ]);
    observer.onEvent({ kind: "creating", sandboxId: id, atMs: 1 });
    observer.onEvent({
      kind: "created",
      sandboxId: id,
      atMs: 2,
      durationMs: 300,
      phases: { vmm: 200, total: 300 },
    });
    observer.onEvent({ kind: "create_failed", sandboxId: newId(), atMs: 2, durationMs: 10, reason: "no" });
    for (const kind of ["paused", "resumed"] as const) {
      observer.onEvent({ kind, sandboxId: id, atMs: 3, durationMs: 200, cold: true });
    }
    expect((await observer.logs(id)).map(({ message }) => message)).toEqual(
      expect.arrayContaining([
        "sandbox paused without its memory, its disks are stored",
        "sandbox booted from its stored disks",
      ]),
    );
    observer.request("proxy_host", "GET", "/*", 200, 0.02);
    const text = await observer.render();
    for (const line of [
      'agentenv_http_request_duration_seconds_count{method="GET",route="/*",route_source="proxy_host",status="200"} 1',
      'agentenv_sandbox_stage_duration_seconds_bucket{operation="create_warm",stage="vmm",status="ok",le="0.25"} 1',
      'agentenv_sandbox_stage_duration_seconds_sum{operation="create_warm",stage="total",status="ok"} 0.3',
      'agentenv_sandbox_stage_duration_seconds_count{operation="create_warm",stage="total",status="error"} 1',
      'agentenv_sandbox_stage_duration_seconds_sum{operation="pause_disks",stage="total",status="ok"} 0.2',
      'agentenv_sandbox_stage_duration_seconds_sum{operation="resume_cold",stage="total",status="ok"} 0.2',
      'agentenv_sandbox_stage_inflight{operation="create_warm",stage="total"} 0',
      'agentenv_sandboxes{state="running"} 1',
      'agentenv_allocated{resource="cpu"} 2',
      "agentenv_overlaybd_data_bytes 4096",
      "agentenv_block_devices 3",
      "agentenv_proxy_connections 7",
      'agentenv_firecracker_total{group="seccomp",name="num_faults"} 2',
    ]) {
      expect(text).toContain(`${line}\n`);
    }
    expect(await observer.render()).toContain(`name="num_faults"} 3\n`);
    for (const line of text.trim().split("\n")) {
      expect(line).toMatch(/^(# (HELP|TYPE) \w+ .+|\w+(\{[^}]*\})? -?[\d.e+]+)$/);
    }
    expect(await observer.node()).toMatchObject({ createSuccesses: 1, createFails: 1, sandboxCount: 1 });
  });

  test("a hidden node shows nothing", async () => {
    await using observer = createObserver({
      identity: { nodeId: "n", clusterId: newId(), serviceInstanceId: newId() },
      version: "1",
      commit: "c",
      nodeVisible: false,
      consolePath: async () => undefined,
      log,
    });
    expect(await observer.node()).toBeUndefined();
  });
});
