import type { Orchestrator } from "../orchestrator/types.ts";

export const HTTP_BUCKETS_SECONDS = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60];

interface Histogram {
  readonly counts: number[];
  sum: number;
  count: number;
}

/** Request durations by method, route (with ids hidden) and status, in Prometheus text format. */
export class HttpMetrics {
  readonly #series = new Map<string, Histogram>();

  observe(method: string, route: string, status: number, seconds: number): void {
    const labels = `method="${method}",route="${route}",status="${status}"`;
    let series = this.#series.get(labels);
    if (series === undefined) {
      series = { counts: HTTP_BUCKETS_SECONDS.map(() => 0), sum: 0, count: 0 };
      this.#series.set(labels, series);
    }
    series.sum += seconds;
    series.count++;
    for (const [i, bound] of HTTP_BUCKETS_SECONDS.entries()) if (seconds <= bound) series.counts[i]!++;
  }

  render(): string {
    const lines = ["# TYPE agentenv_http_request_duration_seconds histogram"];
    for (const [labels, series] of this.#series) {
      for (const [i, bound] of HTTP_BUCKETS_SECONDS.entries()) {
        lines.push(
          `agentenv_http_request_duration_seconds_bucket{${labels},le="${bound}"} ${series.counts[i]}`,
        );
      }
      lines.push(`agentenv_http_request_duration_seconds_bucket{${labels},le="+Inf"} ${series.count}`);
      lines.push(`agentenv_http_request_duration_seconds_sum{${labels}} ${series.sum}`);
      lines.push(`agentenv_http_request_duration_seconds_count{${labels}} ${series.count}`);
    }
    return `${lines.join("\n")}\n`;
  }
}

export function renderProcessMetrics(orchestrator: Orchestrator): string {
  const byState = new Map<string, number>();
  for (const record of orchestrator.list()) byState.set(record.state, (byState.get(record.state) ?? 0) + 1);
  const memory = process.memoryUsage();
  const lines = [
    "# TYPE process_resident_memory_bytes gauge",
    `process_resident_memory_bytes ${memory.rss}`,
    "# TYPE process_uptime_seconds gauge",
    `process_uptime_seconds ${process.uptime()}`,
    "# TYPE agentenv_sandboxes gauge",
    ...[...byState].map(([state, count]) => `agentenv_sandboxes{state="${state}"} ${count}`),
  ];
  return `${lines.join("\n")}\n`;
}
