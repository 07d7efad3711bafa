import type { VmmFigure } from "../types.ts";
import type { Sink } from "./output.ts";

/**
 * What Firecracker counts: once a minute, and when it is told to, it writes a line of JSON with a group of figures for
 * each kind of device (upstream's docs/metrics.md). A figure is what came since the line before; of the standing groups
 * it is what there was in all (upstream's SharedStoreMetric).
 *
 * A VMM that was taken over writes what it likes, so these names alone are taken: those of upstream's metrics up to
 * 1.17 (src/vmm, its structures of metrics) that are counts. Names it invents take no other VM's place.
 */
const NAMES: Readonly<Record<string, string>> = {
  balloon:
    "activate_fails deflate_count event_fails free_page_hint_count free_page_hint_fails free_page_hint_freed free_page_report_count free_page_report_fails free_page_report_freed inflate_count stats_update_fails stats_updates_count",
  block:
    "activate_fails cfg_fails event_fails execute_fails flush_count invalid_reqs_count io_engine_throttled_events no_avail_buffer queue_event_count rate_limiter_event_count rate_limiter_throttled_events read_bytes read_count remaining_reqs_count update_count update_fails write_bytes write_count",
  entropy:
    "activate_fails entropy_bytes entropy_event_count entropy_event_fails entropy_rate_limiter_throttled host_rng_fails rate_limiter_event_count",
  logger: "log_fails metrics_fails missed_log_count missed_metrics_count rate_limited_log_count",
  mmds: "connections_created connections_destroyed rx_accepted rx_accepted_err rx_accepted_unusual rx_bad_eth rx_count rx_invalid_token rx_no_token tx_bytes tx_count tx_errors tx_frames",
  net: "activate_fails cfg_fails event_fails mac_address_updates no_rx_avail_buffer no_tx_avail_buffer rx_bytes_count rx_count rx_event_rate_limiter_count rx_fails rx_packets_count rx_partial_writes rx_queue_event_count rx_rate_limiter_throttled rx_tap_event_count tap_read_fails tap_write_fails tx_bytes_count tx_count tx_fails tx_malformed_frames tx_packets_count tx_partial_reads tx_queue_event_count tx_rate_limiter_event_count tx_rate_limiter_throttled tx_remaining_reqs_count tx_spoofed_mac_count",
  uart: "error_count flush_count missed_read_count missed_write_count read_count write_count",
  vcpu: "exit_io_in exit_io_out exit_mmio_read exit_mmio_write failures kvmclock_ctrl_fails",
};
const STANDING_NAMES: Readonly<Record<string, string>> = {
  seccomp: "num_faults",
  signals: "sigbus sighup sigill sigpipe sigsegv sigxcpu sigxfsz",
};
/** A line is some 10 KiB, and one more for each drive. */
const LINE_BYTES = 256 << 10;
/** 16 TiB in a minute: what counts more is not believed. */
const MAX_COUNT = 2 ** 44;

/** The figures of all VMs, ended ones included. */
export class Figures {
  readonly #totals = new Map<string, number>();

  add(key: string, count: number): void {
    this.#totals.set(key, Math.min((this.#totals.get(key) ?? 0) + count, Number.MAX_SAFE_INTEGER));
  }

  /** By group and name, as Firecracker calls them; what never happened is not among them. */
  list(): VmmFigure[] {
    return [...this.#totals].map(([key, total]) => {
      const dot = key.indexOf(".");
      return { group: key.slice(0, dot), name: key.slice(dot + 1), total };
    });
  }

  toJSON(): Readonly<Record<string, number>> {
    return Object.fromEntries(this.#totals);
  }
}

/** Takes the lines of one VM. Never throws: what is no such line is passed over. */
export class FigureLines implements Sink {
  /** Of this VM. */
  readonly own = new Figures();
  readonly #all: Figures;
  readonly #standing = new Map<string, number>();
  #rest = "";
  #tooLong = false;

  constructor(all: Figures) {
    this.#all = all;
  }

  append(bytes: Uint8Array): void {
    // All of it is ASCII; what is not makes no figure.
    const lines = (this.#rest + Buffer.from(bytes).toString("latin1")).split("\n");
    this.#rest = lines.pop() ?? "";
    for (const line of lines) {
      if (!this.#tooLong) this.#take(line);
      this.#tooLong = false;
    }
    if (this.#rest.length <= LINE_BYTES) return;
    this.#rest = "";
    this.#tooLong = true;
  }

  [Symbol.dispose](): void {
    this.#rest = "";
  }

  #take(line: string): void {
    let groups: unknown;
    try {
      groups = JSON.parse(line);
    } catch {
      // Torn by a pipe that was full.
      return;
    }
    for (const [key, count] of countsOf(groups, NAMES)) {
      this.own.add(key, count);
      this.#all.add(key, count);
    }
    for (const [key, count] of countsOf(groups, STANDING_NAMES)) {
      const more = count - (this.#standing.get(key) ?? 0);
      if (more <= 0) continue;
      this.#standing.set(key, count);
      this.own.add(key, more);
      this.#all.add(key, more);
    }
  }
}

function field(of: unknown, name: string): unknown {
  if (typeof of !== "object" || of === null || !Object.hasOwn(of, name)) return undefined;
  return (of as Readonly<Record<string, unknown>>)[name];
}

function countsOf(line: unknown, names: Readonly<Record<string, string>>): [key: string, count: number][] {
  return Object.entries(names).flatMap(([group, known]) => {
    const figures = field(line, group);
    return known.split(" ").flatMap((name): [string, number][] => {
      const count = field(figures, name);
      const sound = typeof count === "number" && Number.isInteger(count) && count > 0 && count <= MAX_COUNT;
      return sound ? [[`${group}.${name}`, count]] : [];
    });
  });
}
