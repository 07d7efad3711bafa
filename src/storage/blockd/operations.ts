import { DurationHistogram } from "./histogram.ts";
import type { OperationStats } from "./protocol.ts";

type Operation = OperationStats["operation"];

/** How long operations on devices took, by kind and outcome. */
export class OperationTimes {
  readonly #times = new Map<string, { operation: Operation; ok: boolean; times: DurationHistogram }>();

  /** Does `work` and counts it; its failure is the caller's. */
  async time<T>(operation: Operation, work: () => Promise<T>): Promise<T> {
    const startedMs = performance.now();
    let ok = false;
    try {
      const result = await work();
      ok = true;
      return result;
    } finally {
      const key = `${operation} ${ok}`;
      let entry = this.#times.get(key);
      if (entry === undefined) {
        entry = { operation, ok, times: new DurationHistogram() };
        this.#times.set(key, entry);
      }
      entry.times.add(performance.now() - startedMs);
    }
  }

  snapshot(): OperationStats[] {
    return [...this.#times.values()].map(({ operation, ok, times }) => ({
      operation,
      status: ok ? "success" : "error",
      seconds: times.snapshot(),
    }));
  }
}
