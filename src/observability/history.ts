import type { SandboxMetric } from "./types.ts";

/** atMs, cpuUsedPct, cpuCount, memUsed, memTotal, memCache, diskUsed, diskTotal. */
const COLUMNS = 8;
const FIRST_ROWS = 16;

/** The last points of one sandbox in one block of numbers; it grows as they come, up to a bound. */
export class MetricHistory {
  readonly #capacity: number;
  #rows = new Float64Array(FIRST_ROWS * COLUMNS);
  /** Points ever pushed; the last `capacity` of them are kept. */
  #pushed = 0;

  constructor(capacity: number) {
    this.#capacity = capacity;
  }

  get #space(): number {
    return this.#rows.length / COLUMNS;
  }

  get #kept(): number {
    return Math.min(this.#pushed, this.#space);
  }

  push(point: SandboxMetric): void {
    if (this.#pushed === this.#space && this.#space < this.#capacity) {
      const larger = new Float64Array(Math.min(this.#capacity, this.#space * 2) * COLUMNS);
      larger.set(this.#rows);
      this.#rows = larger;
    }
    this.#rows.set(
      [
        point.atMs,
        point.cpuUsedPct,
        point.cpuCount,
        point.memUsed,
        point.memTotal,
        point.memCache,
        point.diskUsed,
        point.diskTotal,
      ],
      (this.#pushed % this.#space) * COLUMNS,
    );
    this.#pushed++;
  }

  /** Oldest first, within inclusive bounds. */
  list(startMs = Number.NEGATIVE_INFINITY, endMs = Number.POSITIVE_INFINITY): SandboxMetric[] {
    const points: SandboxMetric[] = [];
    for (let i = this.#pushed - this.#kept; i < this.#pushed; i++) {
      const point = this.#at(i);
      if (point.atMs >= startMs && point.atMs <= endMs) points.push(point);
    }
    return points;
  }

  latest(): SandboxMetric | undefined {
    return this.#pushed === 0 ? undefined : this.#at(this.#pushed - 1);
  }

  #at(index: number): SandboxMetric {
    const from = (index % this.#space) * COLUMNS;
    const row = this.#rows.subarray(from, from + COLUMNS);
    return {
      atMs: row[0]!,
      cpuUsedPct: row[1]!,
      cpuCount: row[2]!,
      memUsed: row[3]!,
      memTotal: row[4]!,
      memCache: row[5]!,
      diskUsed: row[6]!,
      diskTotal: row[7]!,
    };
  }
}
