import { readdirSync } from "node:fs";
import { AenvError, errorChain } from "../lib/errors.ts";
import { Gate } from "../lib/gate.ts";
import { isUuid } from "../lib/ids.ts";
import type { Logger } from "../lib/log.ts";
import type { LifecycleEvent, Orchestrator, SandboxRecord } from "../orchestrator/types.ts";
import { readAgentMetrics } from "./agent-metrics.ts";
import { MetricHistory } from "./history.ts";
import { Journal } from "./journal.ts";
import { CpuMeter, cpuCount, disks, machineInfo, memory } from "./node.ts";
import { Counter, Gauge, Histogram, type Labels } from "./registry.ts";
import type {
  NodeSnapshot,
  Observer,
  RouteSource,
  SandboxLogEntry,
  SandboxMetric,
  SpawnCount,
} from "./types.ts";

/** Others come from clients in any number: they are one label. */
const METHODS = new Set(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"]);
/** Bounds of every duration histogram, seconds. */
const DURATION_BOUNDS = [
  0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 900, 1200,
  1800,
];
const SAMPLE_INTERVAL_MS = 5000;
/** The first point comes early, but not in the way of the client's first command. */
const FIRST_SAMPLE_DELAY_MS = 1000;
const SAMPLE_TIMEOUT_MS = 3000;
const CONCURRENT_SAMPLES = 8;
/** An hour of points. */
const HISTORY_POINTS = 720;
const LOG_ENTRIES = 1000;
const BLOCK_STATS_TIMEOUT_MS = 1000;
const MIB = 1024 * 1024;

export interface ObserverOptions {
  readonly identity: {
    readonly nodeId: string;
    readonly clusterId: string;
    readonly serviceInstanceId: string;
  };
  readonly version: string;
  readonly commit: string;
  /** false: the node does not show itself under /nodes. */
  readonly nodeVisible: boolean;
  /** File with the VM's console output; undefined while there is none. */
  readonly consolePath: (sandboxId: string) => Promise<string | undefined>;
  /** Bytes in the writable layers of all devices. */
  readonly blockUse?: () => Promise<{ readonly devices: number; readonly upperBytes: number }>;
  readonly sampleIntervalMs?: number;
  readonly log: Logger;
}

/** The observer with the parts that the server drives. */
export interface NodeObserver extends Observer, AsyncDisposable {
  onEvent(event: LifecycleEvent): void;
  /** Begins to look at the sandboxes every few seconds. */
  start(orchestrator: ObservedSandboxes): void;
  /** Adds a gauge that is read when metrics are asked for. */
  gauge(name: string, help: string, read: () => number): void;
  /** Adds counters of something that counts by itself, read when metrics are asked for. */
  counters(
    name: string,
    help: string,
    labels: readonly string[],
    read: () => readonly CounterReading[],
  ): void;
}

export interface CounterReading {
  readonly labels: Labels;
  readonly total: number;
}

export type ObservedSandboxes = Pick<Orchestrator, "list" | "get" | "route" | "accessToken">;

/** Operation of each event that ends one, and whether it succeeded. */
const OPERATIONS: Readonly<
  Partial<Record<LifecycleEvent["kind"], readonly [operation: string, status: "ok" | "error"]>>
> = {
  created: ["create_warm", "ok"],
  create_failed: ["create_warm", "error"],
  paused: ["pause", "ok"],
  pause_failed: ["pause", "error"],
  resumed: ["resume", "ok"],
  resume_failed: ["resume", "error"],
  snapshotted: ["snapshot", "ok"],
  snapshot_failed: ["snapshot", "error"],
  forked: ["fork", "ok"],
  fork_failed: ["fork", "error"],
};

/** Names of those that are told as cold: with a boot, or for one. */
const COLD_OPERATIONS: Readonly<Record<string, string>> = {
  create_warm: "create_cold",
  pause: "pause_disks",
  resume: "resume_cold",
};

const INFLIGHT: Readonly<Partial<Record<SandboxRecord["state"], string>>> = {
  resuming: "resume",
  pausing: "pause",
  snapshotting: "snapshot",
  forking: "fork",
};

interface Watched {
  readonly history: MetricHistory;
  /** Instance whose console path is known. */
  console?: { readonly instanceId: string; readonly path: string };
  sampling: boolean;
  failures: number;
}

class ServerObserver implements NodeObserver {
  readonly #options: ObserverOptions;
  readonly #journal = new Journal(LOG_ENTRIES);
  readonly #watched = new Map<string, Watched>();
  readonly #creating = new Map<string, "create_cold" | "create_warm">();
  readonly #spawns = new Map<string, SpawnCount>();
  readonly #samples = new Gate(CONCURRENT_SAMPLES, "metric samples", 100_000);
  readonly #running = new Set<Promise<void>>();
  readonly #firstLooks = new Set<ReturnType<typeof setTimeout>>();
  readonly #cpu = new CpuMeter();
  readonly #counters: { readonly counter: Counter; readonly read: () => readonly CounterReading[] }[] = [];
  readonly #gauges: { readonly gauge: Gauge; readonly read: () => number }[] = [];
  readonly #machine = machineInfo();
  #sandboxes: ObservedSandboxes | undefined;
  #timer: ReturnType<typeof setInterval> | undefined;
  #closed = false;
  #creates = { successes: 0, fails: 0 };

  readonly #requests = new Histogram(
    "agentenv_http_request_duration_seconds",
    "HTTP requests by method, route, how they were routed, and status.",
    ["method", "route", "route_source", "status"],
    DURATION_BOUNDS,
  );
  readonly #stages = new Histogram(
    "agentenv_sandbox_stage_duration_seconds",
    "Parts of sandbox operations; the stage total is the whole operation.",
    ["operation", "stage", "status"],
    DURATION_BOUNDS,
  );
  readonly #inflight = new Gauge("agentenv_sandbox_stage_inflight", "Sandbox operations under way.", [
    "operation",
    "stage",
  ]);
  readonly #events = new Counter("agentenv_sandbox_events_total", "Lifecycle events by kind.", ["event"]);
  readonly #samplesTaken = new Counter(
    "agentenv_sandbox_metric_samples_total",
    "Looks at guests' resource use by outcome.",
    ["status"],
  );
  readonly #byState = new Gauge("agentenv_sandboxes", "Sandboxes by state.", ["state"]);
  readonly #allocated = new Gauge(
    "agentenv_allocated",
    "What sandboxes that are not paused were given: CPUs and bytes of memory.",
    ["resource"],
  );
  readonly #upper = new Gauge(
    "agentenv_overlaybd_data_bytes",
    "Bytes in the writable layers of all devices.",
  );
  readonly #ext4 = new Gauge("agentenv_ext4_used_bytes", "Bytes used in the guests' root file systems.");
  readonly #devices = new Gauge("agentenv_block_devices", "Block devices of running sandboxes and builds.");
  readonly #process = {
    rss: new Gauge("process_resident_memory_bytes", "Resident memory of the server."),
    cpu: new Counter("process_cpu_seconds_total", "CPU time of the server."),
    start: new Gauge("process_start_time_seconds", "Start of the server, seconds since the epoch."),
    fds: new Gauge("process_open_fds", "Open file descriptors of the server."),
  };
  #cpuSeconds = 0;

  constructor(options: ObserverOptions) {
    this.#options = options;
    this.#process.start.set({}, Math.round(performance.timeOrigin / 1000));
  }

  // ---- what happens -----------------------------------------------------------------------------

  onEvent(event: LifecycleEvent): void {
    const { kind, sandboxId } = event;
    this.#events.add({ event: kind });
    this.#journal.record(event);
    this.#measure(event);
    switch (kind) {
      case "creating":
        this.#creating.set(sandboxId, event.cold === true ? "create_cold" : "create_warm");
        break;
      case "created":
      case "forked":
        this.#creating.delete(sandboxId);
        this.#creates.successes++;
        this.#countSpawn(sandboxId, event.atMs);
        this.#lookSoon(sandboxId);
        break;
      case "resumed":
      case "adopted":
        this.#lookSoon(sandboxId);
        break;
      case "create_failed":
      case "fork_failed":
        this.#creates.fails++;
        this.#creating.delete(sandboxId);
        if (kind === "create_failed") this.#forget(sandboxId);
        break;
      case "deleted":
      case "lost":
        this.#forget(sandboxId);
        break;
    }
  }

  #measure(event: LifecycleEvent): void {
    const [usual, status] = OPERATIONS[event.kind] ?? [];
    if (usual === undefined || status === undefined) return;
    const operation = event.cold === true ? (COLD_OPERATIONS[usual] ?? usual) : usual;
    for (const [stage, ms] of Object.entries(event.phases ?? {})) {
      if (stage !== "total") this.#stages.observe({ operation, stage, status }, ms / 1000);
    }
    if (event.durationMs !== undefined) {
      this.#stages.observe({ operation, stage: "total", status }, event.durationMs / 1000);
    }
  }

  #countSpawn(sandboxId: string, atMs: number): void {
    const record = this.#record(sandboxId);
    // An image reference is no template.
    if (record === undefined || !isUuid(record.templateId)) return;
    const count = (this.#spawns.get(record.templateId)?.count ?? 0) + 1;
    this.#spawns.set(record.templateId, { count, lastAtMs: atMs });
  }

  /** Undefined for a sandbox that has gone. */
  #record(sandboxId: string): SandboxRecord | undefined {
    try {
      return this.#sandboxes?.get(sandboxId);
    } catch (error) {
      if (error instanceof AenvError && error.status === 404) return undefined;
      throw error;
    }
  }

  #forget(sandboxId: string): void {
    this.#watched.delete(sandboxId);
    this.#journal.forget(sandboxId);
  }

  request(source: RouteSource, method: string, route: string, status: number, seconds: number): void {
    const label = METHODS.has(method) ? method : "other";
    this.#requests.observe({ method: label, route, route_source: source, status: String(status) }, seconds);
  }

  gauge(name: string, help: string, read: () => number): void {
    this.#gauges.push({ gauge: new Gauge(name, help), read });
  }

  counters(
    name: string,
    help: string,
    labels: readonly string[],
    read: () => readonly CounterReading[],
  ): void {
    this.#counters.push({ counter: new Counter(name, help, labels), read });
  }

  // ---- looking at sandboxes ---------------------------------------------------------------------

  start(sandboxes: ObservedSandboxes): void {
    this.#sandboxes = sandboxes;
    const look = () => {
      const records = sandboxes.list();
      const known = new Set(records.map((record) => record.id));
      // What was still told of a sandbox after its end.
      for (const id of [...this.#journal.sandboxIds, ...this.#watched.keys()]) {
        if (!known.has(id) && !this.#creating.has(id)) this.#forget(id);
      }
      for (const record of records) if (record.state === "running") this.#look(record.id);
    };
    this.#timer = setInterval(look, this.#options.sampleIntervalMs ?? SAMPLE_INTERVAL_MS);
  }

  #lookSoon(sandboxId: string): void {
    if (this.#closed) return;
    const timer = setTimeout(() => {
      this.#firstLooks.delete(timer);
      this.#look(sandboxId);
    }, FIRST_SAMPLE_DELAY_MS);
    this.#firstLooks.add(timer);
  }

  /** One look, unless the last one still lasts. */
  #look(sandboxId: string): void {
    const watched = this.#watch(sandboxId);
    if (watched.sampling || this.#closed) return;
    watched.sampling = true;
    const work = this.#samples
      .run(() => this.#sample(sandboxId, watched))
      .catch((error: unknown) => {
        // A guest that is busy or on its way out answers late or never: that is for other parts to judge.
        const log = this.#options.log;
        const level = ++watched.failures === 3 ? "warn" : "debug";
        log[level]({ sandboxId, reason: errorChain(error).join(": ") }, "no resource figures from a guest");
        this.#samplesTaken.add({ status: "error" });
      })
      .finally(() => {
        watched.sampling = false;
        this.#running.delete(work);
      });
    this.#running.add(work);
  }

  #watch(sandboxId: string): Watched {
    let watched = this.#watched.get(sandboxId);
    if (watched === undefined) {
      watched = { history: new MetricHistory(HISTORY_POINTS), sampling: false, failures: 0 };
      this.#watched.set(sandboxId, watched);
    }
    return watched;
  }

  async #sample(sandboxId: string, watched: Watched): Promise<void> {
    const sandboxes = this.#sandboxes;
    const record = this.#record(sandboxId);
    if (sandboxes === undefined || record === undefined) {
      this.#forget(sandboxId);
      return;
    }
    const route = sandboxes.route(sandboxId);
    if (route.kind !== "ready") return;
    await this.#readConsole(sandboxId, watched, route.instanceId);
    const token = record.secure ? { token: sandboxes.accessToken(sandboxId) } : {};
    const point = await readAgentMetrics({ address: route.hostAddress, ...token }, SAMPLE_TIMEOUT_MS);
    watched.history.push(point);
    watched.failures = 0;
    this.#samplesTaken.add({ status: "ok" });
  }

  async #readConsole(sandboxId: string, watched: Watched, instanceId: string): Promise<void> {
    if (watched.console?.instanceId !== instanceId) {
      const path = await this.#options.consolePath(sandboxId);
      if (path === undefined) return;
      watched.console = { instanceId, path };
    }
    await this.#journal.readConsole(sandboxId, watched.console.path);
  }

  metrics(
    sandboxId: string,
    range: { readonly startMs?: number; readonly endMs?: number } = {},
  ): SandboxMetric[] {
    return this.#watched.get(sandboxId)?.history.list(range.startMs, range.endMs) ?? [];
  }

  latestMetric(sandboxId: string): SandboxMetric | undefined {
    return this.#watched.get(sandboxId)?.history.latest();
  }

  async logs(sandboxId: string): Promise<readonly SandboxLogEntry[]> {
    const route = this.#sandboxes?.route(sandboxId);
    if (route?.kind === "ready") {
      try {
        await this.#readConsole(sandboxId, this.#watch(sandboxId), route.instanceId);
      } catch (error) {
        // What was read so far is still worth showing.
        this.#options.log.warn({ err: error, sandboxId }, "console output cannot be read");
      }
    }
    return this.#journal.entries(sandboxId);
  }

  spawns(templateId: string): SpawnCount {
    return this.#spawns.get(templateId) ?? { count: 0 };
  }

  // ---- the node ---------------------------------------------------------------------------------

  #totals(): {
    readonly byState: ReadonlyMap<string, number>;
    readonly cpu: number;
    readonly memoryBytes: number;
    readonly pausedCpu: number;
    readonly pausedMemoryBytes: number;
  } {
    const byState = new Map<string, number>();
    const sums = { cpu: 0, memoryBytes: 0, pausedCpu: 0, pausedMemoryBytes: 0 };
    for (const record of this.#sandboxes?.list() ?? []) {
      byState.set(record.state, (byState.get(record.state) ?? 0) + 1);
      const paused = record.state === "paused";
      sums[paused ? "pausedCpu" : "cpu"] += record.cpuCount;
      sums[paused ? "pausedMemoryBytes" : "memoryBytes"] += record.memoryMiB * MIB;
    }
    return { byState, ...sums };
  }

  async node(): Promise<NodeSnapshot | undefined> {
    if (!this.#options.nodeVisible) return undefined;
    const { identity, version, commit } = this.#options;
    const totals = this.#totals();
    const count = (...states: SandboxRecord["state"][]) =>
      states.reduce((sum, state) => sum + (totals.byState.get(state) ?? 0), 0);
    const [cpuPercent, cores, ram, diskUses] = await Promise.all([
      this.#cpu.percent(),
      cpuCount(),
      memory(),
      disks(),
    ]);
    return {
      id: identity.nodeId,
      serviceInstanceID: identity.serviceInstanceId,
      clusterID: identity.clusterId,
      version,
      commit,
      machineInfo: this.#machine,
      status: this.#closed ? "draining" : "ready",
      sandboxCount: count("running", "pausing", "snapshotting", "forking", "killing"),
      sandboxStartingCount: this.#creating.size + count("resuming"),
      sandboxPausedCount: count("paused"),
      createSuccesses: this.#creates.successes,
      createFails: this.#creates.fails,
      metrics: {
        allocatedCPU: totals.cpu,
        allocatedMemoryBytes: totals.memoryBytes,
        cpuPercent,
        cpuCount: cores,
        memoryUsedBytes: ram.usedBytes,
        memoryTotalBytes: ram.totalBytes,
        pausedAllocatedCPU: totals.pausedCpu,
        pausedAllocatedMemoryBytes: totals.pausedMemoryBytes,
        disks: diskUses,
      },
    };
  }

  // ---- Prometheus -------------------------------------------------------------------------------

  async render(): Promise<string> {
    const totals = this.#totals();
    this.#byState.clear();
    this.#inflight.clear();
    for (const [state, count] of totals.byState) {
      this.#byState.set({ state }, count);
      const operation = INFLIGHT[state as SandboxRecord["state"]];
      if (operation !== undefined) this.#inflight.set({ operation, stage: "total" }, count);
    }
    this.#byState.set({ state: "creating" }, this.#creating.size);
    for (const operation of ["create_warm", "create_cold"]) {
      const count = [...this.#creating.values()].filter((each) => each === operation).length;
      this.#inflight.set({ operation, stage: "total" }, count);
    }
    this.#allocated.set({ resource: "cpu" }, totals.cpu);
    this.#allocated.set({ resource: "memory_bytes" }, totals.memoryBytes);
    let used = 0;
    for (const watched of this.#watched.values()) used += watched.history.latest()?.diskUsed ?? 0;
    this.#ext4.set({}, used);
    await this.#readBlockUse();
    const usage = process.cpuUsage();
    const seconds = (usage.user + usage.system) / 1e6;
    this.#process.cpu.add({}, seconds - this.#cpuSeconds);
    this.#cpuSeconds = seconds;
    this.#process.rss.set({}, process.memoryUsage.rss());
    this.#process.fds.set({}, readdirSync("/proc/self/fd").length);
    for (const { gauge, read } of this.#gauges) gauge.set({}, read());
    for (const { counter, read } of this.#counters)
      for (const { labels, total } of read()) counter.set(labels, total);
    return [
      ...Object.values(this.#process),
      this.#requests,
      this.#stages,
      this.#inflight,
      this.#events,
      this.#samplesTaken,
      this.#byState,
      this.#allocated,
      this.#ext4,
      this.#upper,
      this.#devices,
      ...this.#gauges.map((entry) => entry.gauge),
      ...this.#counters.map((entry) => entry.counter),
    ]
      .map((family) => family.render())
      .join("");
  }

  /** A block daemon that does not answer now leaves its last figures out, not the page. */
  async #readBlockUse(): Promise<void> {
    const { blockUse, log } = this.#options;
    if (blockUse === undefined) return;
    const late = Promise.withResolvers<undefined>();
    const timer = setTimeout(() => late.resolve(undefined), BLOCK_STATS_TIMEOUT_MS);
    try {
      const use = await Promise.race([blockUse(), late.promise]);
      this.#upper.clear();
      this.#devices.clear();
      if (use === undefined) return;
      this.#upper.set({}, use.upperBytes);
      this.#devices.set({}, use.devices);
    } catch (error) {
      log.debug({ err: error }, "no figures from the block daemon");
    } finally {
      clearTimeout(timer);
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#closed = true;
    clearInterval(this.#timer);
    for (const timer of this.#firstLooks) clearTimeout(timer);
    await Promise.allSettled(this.#running);
  }
}

export function createObserver(options: ObserverOptions): NodeObserver {
  return new ServerObserver(options);
}
