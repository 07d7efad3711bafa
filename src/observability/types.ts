/** One look at a sandbox's resources, as its guest agent sees them. Bytes; CPU in percent of all vCPUs. */
export interface SandboxMetric {
  /** Milliseconds since the epoch, by the host's clock. */
  readonly atMs: number;
  readonly cpuUsedPct: number;
  readonly cpuCount: number;
  readonly memUsed: number;
  readonly memTotal: number;
  readonly memCache: number;
  readonly diskUsed: number;
  readonly diskTotal: number;
}

export type LogLevel = "debug" | "info" | "warn" | "error";

/** One line of a sandbox's log: what the server did with it, or what its VM's console printed. */
export interface SandboxLogEntry {
  readonly atMs: number;
  readonly level: LogLevel;
  readonly message: string;
  /** `source` is `lifecycle` or `console`; lifecycle lines name their `event`. */
  readonly fields: Readonly<Record<string, string>>;
}

export interface DiskUse {
  readonly mountPoint: string;
  readonly device: string;
  readonly filesystemType: string;
  readonly usedBytes: number;
  readonly totalBytes: number;
}

/** The node as schedulers and people see it; field names are those of the REST contract. */
export interface NodeSnapshot {
  readonly id: string;
  readonly serviceInstanceID: string;
  readonly clusterID: string;
  readonly version: string;
  readonly commit: string;
  readonly machineInfo: {
    readonly cpuFamily: string;
    readonly cpuModel: string;
    readonly cpuModelName: string;
    readonly cpuArchitecture: string;
  };
  readonly status: "ready" | "draining" | "connecting" | "unhealthy";
  readonly sandboxCount: number;
  readonly sandboxStartingCount: number;
  readonly sandboxPausedCount: number;
  readonly createSuccesses: number;
  readonly createFails: number;
  readonly metrics: {
    readonly allocatedCPU: number;
    readonly allocatedMemoryBytes: number;
    readonly cpuPercent: number;
    readonly cpuCount: number;
    readonly memoryUsedBytes: number;
    readonly memoryTotalBytes: number;
    readonly pausedAllocatedCPU: number;
    readonly pausedAllocatedMemoryBytes: number;
    readonly disks: readonly DiskUse[];
  };
}

/** How a request found its way: to the control plane, or into a sandbox by host name, headers or prefix. */
export type RouteSource = "control_plane" | "proxy_host" | "proxy_header" | "proxy_prefix";

export interface SpawnCount {
  readonly count: number;
  readonly lastAtMs?: number;
}

/** What the API shows of the sandboxes and the node, and what is told to it. */
export interface Observer {
  /** Oldest first; bounds are inclusive. Empty for unknown sandboxes. */
  metrics(sandboxId: string, range?: { readonly startMs?: number; readonly endMs?: number }): SandboxMetric[];
  latestMetric(sandboxId: string): SandboxMetric | undefined;
  /** Oldest first; console output up to now is in it. */
  logs(sandboxId: string): Promise<readonly SandboxLogEntry[]>;
  /** Sandboxes started from the template since this server's start, and when the last one was. */
  spawns(templateId: string): SpawnCount;
  /** Undefined when the node is configured not to show itself. */
  node(): Promise<NodeSnapshot | undefined>;
  /** Counts one finished HTTP exchange. `route` must not hold ids. */
  request(source: RouteSource, method: string, route: string, status: number, seconds: number): void;
  /** All metrics in the Prometheus text format. */
  render(): Promise<string>;
}
