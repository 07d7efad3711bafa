import type { VmmFigure } from "../types.ts";
import type { Sink } from "./output.ts";

/**
 * What Firecracker counts: once a minute, and when it is told to, it writes a line of JSON with a group of figures for
 * each kind of device (upstream's docs/metrics.md). A figure is what came since the line before; of the groups below it
 * is what there was in all (upstream's SharedStoreMetric).
 */
const GROUPS = ["balloon", "block", "entropy", "logger", "mmds", "net", "uart", "vcpu"];
const STANDING_GROUPS = ["seccomp", "signals"];
const NAME = /^[a-z][a-z0-9_]{0,63}$/;
/** A line is some 10 KiB, and one more for each drive. */
const LINE_BYTES = 256 << 10;
/** Names there may be in all: a VMM that was taken over writes what it likes. */
const MAX_FIGURES = 500;

/** The figures of all VMs, ended ones included. */
export class Figures {
  readonly #totals = new Map<string, number>();

  add(key: string, count: number): void {
    const before = this.#totals.get(key);
    if (before === undefined && this.#totals.size >= MAX_FIGURES) return;
    this.#totals.set(key, Math.min((before ?? 0) + count, Number.MAX_SAFE_INTEGER));
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
    for (const group of GROUPS)
      for (const [key, count] of countsOf(groups, group)) {
        this.own.add(key, count);
        this.#all.add(key, count);
      }
    for (const group of STANDING_GROUPS)
      for (const [key, count] of countsOf(groups, group)) {
        const more = count - (this.#standing.get(key) ?? 0);
        if (more <= 0) continue;
        if (this.#standing.size < MAX_FIGURES) this.#standing.set(key, count);
        this.own.add(key, more);
        this.#all.add(key, more);
      }
  }
}

function countsOf(groups: unknown, group: string): [key: string, count: number][] {
  if (typeof groups !== "object" || groups === null || !Object.hasOwn(groups, group)) return [];
  const figures: unknown = (groups as Readonly<Record<string, unknown>>)[group];
  if (typeof figures !== "object" || figures === null) return [];
  return Object.entries(figures).flatMap(([name, count]: [string, unknown]) =>
    NAME.test(name) && typeof count === "number" && Number.isSafeInteger(count) && count > 0
      ? [[`${group}.${name}`, count] as [string, number]]
      : [],
  );
}
