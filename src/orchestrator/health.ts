import { errorChain } from "../lib/errors.ts";
import { Gate } from "../lib/gate.ts";
import type { Logger } from "../lib/log.ts";
import { type Entry, isoTime } from "./entry.ts";
import type { LifecycleEvent, LifecycleEventKind } from "./types.ts";

export interface HealthOptions {
  /** Between two looks at the same guest. */
  readonly intervalMs: number;
  readonly timeoutMs: number;
  /** Looks in a row without an answer after which a sandbox counts as unresponsive. */
  readonly failures: number;
}

const CONCURRENT_PROBES = 16;

/**
 * Looks at the agents of running guests. A guest can hang while its VM runs: that is told, not judged, as what it
 * holds may be worth saving.
 */
export class HealthWatch implements Disposable {
  readonly #entries: { values(): Iterable<Entry> };
  readonly #options: HealthOptions;
  readonly #log: Logger;
  readonly #now: () => number;
  readonly #emit: (kind: LifecycleEventKind, sandboxId: string, more?: Partial<LifecycleEvent>) => void;
  readonly #probes = new Gate(CONCURRENT_PROBES, "health probes", Number.MAX_SAFE_INTEGER);
  readonly #timer: ReturnType<typeof setInterval>;

  constructor(parts: {
    readonly entries: { values(): Iterable<Entry> };
    readonly options: HealthOptions;
    readonly log: Logger;
    readonly now: () => number;
    readonly emit: (kind: LifecycleEventKind, sandboxId: string, more?: Partial<LifecycleEvent>) => void;
  }) {
    this.#entries = parts.entries;
    this.#options = parts.options;
    this.#log = parts.log;
    this.#now = parts.now;
    this.#emit = parts.emit;
    this.#timer = setInterval(() => this.#probeAll(), parts.options.intervalMs);
  }

  [Symbol.dispose](): void {
    clearInterval(this.#timer);
  }

  #probeAll(): void {
    for (const entry of this.#entries.values()) {
      if (entry.state !== "running" || entry.probing === true) continue;
      entry.probing = true;
      void this.#probes
        .run(() => this.#probe(entry))
        .finally(() => {
          entry.probing = false;
        });
    }
  }

  async #probe(entry: Entry): Promise<void> {
    const { timeoutMs, failures } = this.#options;
    const { instance } = entry;
    if (entry.state !== "running" || instance === undefined) return;
    const silence = await instance.running.probe(timeoutMs).then(
      () => undefined,
      (error: unknown) => error,
    );
    // It says nothing about what another operation has made of the sandbox meanwhile.
    if (entry.state !== "running" || entry.instance !== instance) return;
    if (silence === undefined) {
      entry.silentProbes = 0;
      const { unresponsiveSince, ...record } = entry.record;
      if (unresponsiveSince === undefined) return;
      entry.record = record;
      this.#log.info({ sandboxId: entry.id, unresponsiveSince }, "the guest agent answers again");
      this.#emit("responsive", entry.id);
      return;
    }
    entry.silentProbes += 1;
    if (entry.silentProbes !== failures) return;
    entry.record = { ...entry.record, unresponsiveSince: isoTime(this.#now()) };
    this.#log.warn({ err: silence, sandboxId: entry.id, failures }, "the guest agent does not answer");
    this.#emit("unresponsive", entry.id, { reason: errorChain(silence).join(": ") });
  }
}
