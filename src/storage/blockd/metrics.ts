import { chmodSync, rmSync } from "node:fs";
import { errorChain } from "../../lib/errors.ts";
import type { Logger } from "../../lib/log.ts";
import { DURATION_BOUNDS_SECONDS, type DurationSnapshot, mergeDurations } from "./histogram.ts";
import type { BlockdStats, ZFileStats } from "./protocol.ts";

type Labels = Readonly<Record<string, string>>;

/** Lines of the Prometheus text format (version 0.0.4). */
class Page {
  readonly #lines: string[] = [];

  family(name: string, type: "counter" | "gauge" | "histogram", help: string): void {
    this.#lines.push(`# HELP ${name} ${help}`, `# TYPE ${name} ${type}`);
  }

  sample(name: string, value: number, labels: Labels = {}): void {
    const quote = (text: string) =>
      text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll('"', '\\"');
    const parts = Object.entries(labels).map(([label, text]) => `${label}="${quote(text)}"`);
    this.#lines.push(`${name}${parts.length === 0 ? "" : `{${parts.join(",")}}`} ${value}`);
  }

  one(name: string, type: "counter" | "gauge", help: string, value: number): void {
    this.family(name, type, help);
    this.sample(name, value);
  }

  histogram(name: string, help: string, snapshot: DurationSnapshot): void {
    this.family(name, "histogram", help);
    this.buckets(name, snapshot, {});
  }

  buckets(name: string, { counts, sumSeconds }: DurationSnapshot, labels: Labels): void {
    let total = 0;
    for (const [i, count] of counts.entries()) {
      total += count;
      this.sample(`${name}_bucket`, total, { ...labels, le: String(DURATION_BOUNDS_SECONDS[i] ?? "+Inf") });
    }
    this.sample(`${name}_sum`, sumSeconds, labels);
    this.sample(`${name}_count`, total, labels);
  }

  toString(): string {
    return `${this.#lines.join("\n")}\n`;
  }
}

type Device = BlockdStats["devices"][number];
type Worker = BlockdStats["workers"][number];

const DEVICE_FIGURES: readonly [name: string, type: "counter" | "gauge", help: string, key: keyof Device][] =
  [
    ["read_ops_total", "counter", "Reads answered.", "readOps"],
    ["read_bytes_total", "counter", "Bytes read.", "readBytes"],
    ["late_read_ops_total", "counter", "Reads that waited for a disk.", "lateReadOps"],
    ["write_ops_total", "counter", "Writes answered.", "writeOps"],
    ["write_bytes_total", "counter", "Bytes written.", "writeBytes"],
    ["trim_ops_total", "counter", "Trims and writes of zeros.", "trimOps"],
    ["flush_ops_total", "counter", "Flushes asked for.", "flushOps"],
    ["error_ops_total", "counter", "Requests that failed.", "errorOps"],
    ["connections", "gauge", "Open NBD connections.", "connections"],
    ["upper_data_bytes", "gauge", "Space the writable layer takes.", "upperDataBytes"],
    ["upper_live_bytes", "gauge", "What of it is mapped.", "upperLiveBytes"],
    ["compacted_bytes_total", "counter", "Data moved by compaction.", "compactedBytes"],
    ["lowers", "gauge", "Read-only layers under the device.", "lowerCount"],
  ];

const WORKER_FIGURES: readonly [
  name: string,
  type: "counter" | "gauge",
  help: string,
  value: (worker: Worker) => number,
][] = [
  ["io_in_flight", "gauge", "Disk requests at the kernel.", (w) => w.inFlight],
  ["io_waiting", "gauge", "Disk requests waiting for room at the kernel.", (w) => w.waiting],
  ["io_requests_total", "counter", "Disk requests made.", (w) => w.requests],
  ["io_submits_total", "counter", "Calls that handed requests to the kernel.", (w) => w.submits],
  ["io_uring", "gauge", "1 where the worker has an io_uring.", (w) => (w.engine === "io_uring" ? 1 : 0)],
  ["block_cache_bytes", "gauge", "Decompressed blocks in memory.", (w) => w.blockCache.bytes],
  ["block_cache_limit_bytes", "gauge", "Room for them.", (w) => w.blockCache.limitBytes],
  ["block_cache_hits_total", "counter", "Blocks found decompressed.", (w) => w.blockCache.hits],
  ["block_cache_misses_total", "counter", "Blocks that had to be decompressed.", (w) => w.blockCache.misses],
  ["layers_used", "gauge", "Layer files under open devices.", (w) => w.layers.used],
  ["layers_warm", "gauge", "Layer files kept open for the next device.", (w) => w.layers.idle],
  ["layer_hits_total", "counter", "Layers that a device found open.", (w) => w.layers.hits],
  ["layer_misses_total", "counter", "Layers that had to be opened.", (w) => w.layers.misses],
];

const ZFILE_FIGURES: readonly [name: string, help: string, value: (stats: ZFileStats) => number][] = [
  ["blocks", "Blocks decompressed.", (s) => s.blocks],
  ["read_batches", "Reads of compressed bytes.", (s) => s.readBatches],
  ["encoded_bytes", "Compressed bytes read.", (s) => s.encodedBytes],
  ["output_bytes", "Bytes that came of them.", (s) => s.outputBytes],
];

/** One scrape. Durations are summed over the devices: a histogram per device would be most of the page. */
export function renderMetrics(stats: BlockdStats): string {
  const page = new Page();
  page.one("aenv_blockd_devices", "gauge", "Open devices.", stats.devices.length);
  page.one("aenv_blockd_resident_bytes", "gauge", "Memory of the daemon.", stats.rssBytes);
  page.one(
    "aenv_blockd_start_time_seconds",
    "gauge",
    "When the daemon started, in Unix time.",
    Date.parse(stats.startedAt) / 1000,
  );
  for (const [name, type, help, value] of WORKER_FIGURES) {
    page.family(`aenv_blockd_${name}`, type, help);
    for (const [i, worker] of stats.workers.entries()) {
      page.sample(`aenv_blockd_${name}`, value(worker), { worker: String(i) });
    }
  }
  for (const [name, type, help, key] of DEVICE_FIGURES) {
    page.family(`aenv_blockd_device_${name}`, type, help);
    for (const device of stats.devices) {
      page.sample(`aenv_blockd_device_${name}`, Number(device[key]), { device: device.deviceId });
    }
  }
  page.family(
    "agentenv_ublk_operation_duration_seconds",
    "histogram",
    "How long operations on devices took.",
  );
  for (const { operation, status, seconds } of stats.operations) {
    page.buckets("agentenv_ublk_operation_duration_seconds", seconds, { operation, status });
  }
  for (const [name, help, value] of ZFILE_FIGURES) {
    page.family(`agentenv_overlaybd_zfile_${name}_total`, "counter", help);
    for (const codec of ["lz4", "zstd"] as const) {
      const total = stats.workers.reduce((sum, worker) => sum + value(worker.zfile[codec]), 0);
      page.sample(`agentenv_overlaybd_zfile_${name}_total`, total, { codec });
    }
  }
  page.histogram(
    "aenv_blockd_flush_seconds",
    "How long flushes took.",
    mergeDurations(stats.devices.map((device) => device.flushSeconds)),
  );
  page.histogram(
    "aenv_blockd_late_read_seconds",
    "How long reads took that waited for a disk.",
    mergeDurations(stats.devices.map((device) => device.lateReadSeconds)),
  );
  return page.toString();
}

type Address = { readonly unix: string } | { readonly hostname: string; readonly port: number };

/**
 * Serves `GET /metrics`. A unix socket is for its owner alone; a stale file in its place is removed. An address
 * that cannot be had costs the metrics, not the devices.
 */
export function serveMetrics(address: Address, stats: () => Promise<BlockdStats>, log: Logger): Disposable {
  try {
    return listen(address, stats, log);
  } catch (error) {
    const where = "unix" in address ? address.unix : `${address.hostname}:${address.port}`;
    const reason =
      error instanceof Error && "code" in error ? String(error.code) : errorChain(error).join(": ");
    log.warn(
      { address },
      `the block daemon's metrics are not served: ${where} cannot be had (${reason}), perhaps another server of this host has it; ` +
        'set ublk.daemon_metrics_listen_addr (or AENV_UBLK_DAEMON_METRICS_LISTEN_ADDR) to a free HOST:PORT, or to "" for none, and restart the server',
    );
    return { [Symbol.dispose]: () => undefined };
  }
}

function listen(address: Address, stats: () => Promise<BlockdStats>, log: Logger): Disposable {
  if ("unix" in address) rmSync(address.unix, { force: true });
  const server = Bun.serve({
    ...address,
    development: false,
    async fetch(request) {
      if (new URL(request.url).pathname !== "/metrics") return new Response("not found\n", { status: 404 });
      if (request.method !== "GET" && request.method !== "HEAD") {
        return new Response("method not allowed\n", { status: 405 });
      }
      const headers = { "content-type": "text/plain; version=0.0.4; charset=utf-8" };
      return new Response(renderMetrics(await stats()), { headers });
    },
    error(error) {
      log.error({ err: error }, "metrics could not be rendered");
      return new Response(`${errorChain(error).join(": ")}\n`, { status: 500 });
    },
  });
  if ("unix" in address) chmodSync(address.unix, 0o600);
  else log.info({ url: `http://${address.hostname}:${server.port}/metrics` }, "metrics are served");
  return { [Symbol.dispose]: () => void server.stop(true) };
}
