import { CliError } from "./command.ts";
import { plainText } from "./output.ts";
import { SignalHandler, signalStatus } from "./signals.ts";

const DRAW_MS = 100;
const STALL_MS = 60_000;
const BAR = 20;
/** Rate over this time. */
const WINDOW_MS = 5_000;

/** `1.4 MiB` */
export function formatBytes(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = bytes;
  let unit = 0;
  while (value >= 1023.95 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return unit === 0 ? `${value} B` : `${value.toFixed(1)} ${units[unit]}`;
}

/** `0:42`, `1:02:03` */
export function formatDuration(seconds: number): string {
  if (!Number.isFinite(seconds) || seconds > 359_999) return "-:--";
  const whole = Math.ceil(seconds);
  const two = (value: number) => String(value).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  return hours > 0 ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** As many columns of a text as fit, with `…` where it was cut. */
export function fit(text: string, columns: number): string {
  if (Bun.stringWidth(text) <= columns) return text;
  let out = "";
  let width = 0;
  for (const { segment } of new Intl.Segmenter().segment(text)) {
    const next = Bun.stringWidth(segment);
    if (width + next > columns - 1) break;
    out += segment;
    width += next;
  }
  return columns > 0 ? `${out}…` : "";
}

/** One line of progress for a terminal of so many columns. What fits least goes first: name, bar, times. */
export function progressLine(
  state: { prefix: string; done: number; total: number; rate: number; name: string },
  columns: number,
): string {
  const { prefix, done, total, rate } = state;
  const share = total === 0 ? 1 : Math.min(1, done / total);
  const filled = Math.round(share * BAR);
  const bar = `[${"#".repeat(filled)}${"-".repeat(BAR - filled)}]`;
  const bytes = `${formatBytes(done)}/${formatBytes(total)}`;
  const eta = `ETA ${rate > 0 ? formatDuration((total - done) / rate) : "-:--"}`;
  const percent = `${Math.floor(share * 100)}%`;
  const speed = `${formatBytes(Math.round(rate))}/s`;
  for (const parts of [
    [prefix, bar, bytes, speed, eta],
    [prefix, percent, bytes, speed],
    [prefix, percent],
    [percent],
  ]) {
    const line = parts.join("  ");
    const left = columns - Bun.stringWidth(line);
    if (left < 0) continue;
    const name = plainText(state.name);
    return left >= 10 && name !== "" ? `${line}  ${fit(name, left - 2)}` : line;
  }
  return "";
}

/**
 * A transfer from its begin to its end: counts bytes, shows a bar on a terminal, gives up when nothing moves
 * for a minute, and ends when a signal says so. `signal` is aborted then with what is to be told.
 */
export class Transfer implements Disposable {
  readonly #abort = new AbortController();
  readonly #signals: SignalHandler;
  readonly #timer: ReturnType<typeof setInterval>;
  readonly #live: boolean;
  readonly #prefix: string;
  readonly #samples: { readonly at: number; readonly done: number }[] = [];
  #total = 0;
  #done = 0;
  #name = "";
  #movedAt = performance.now();
  #shown = false;
  #interrupted: number | undefined;

  constructor(prefix: string, options: { readonly bar: boolean }) {
    this.#prefix = prefix;
    this.#live = options.bar && process.stderr.isTTY === true && process.env.TERM !== "dumb";
    this.#signals = new SignalHandler(["SIGINT", "SIGTERM", "SIGHUP"], (signal) => {
      // Asked twice, the answer is at once.
      if (this.#interrupted !== undefined) process.exit(this.#interrupted);
      this.#interrupted = signalStatus(signal);
      this.#abort.abort(new CliError("transfer cancelled", { exitCode: this.#interrupted }));
    });
    this.#timer = setInterval(() => {
      if (performance.now() - this.#movedAt > STALL_MS) {
        this.#abort.abort(new CliError(`transfer failed: nothing moved for ${STALL_MS / 1000} s`));
      }
      this.#draw();
    }, DRAW_MS);
  }

  get signal(): AbortSignal {
    return this.#abort.signal;
  }

  /** Bytes there are to move. */
  set total(bytes: number) {
    this.#total = bytes;
  }

  /** What is being moved. */
  name(name: string): void {
    this.#name = name;
  }

  /** So many more bytes have moved. */
  moved(bytes: number): void {
    this.#done += bytes;
    this.#movedAt = performance.now();
  }

  #rate(): number {
    const now = performance.now();
    this.#samples.push({ at: now, done: this.#done });
    while (this.#samples.length > 2 && now - this.#samples[0]!.at > WINDOW_MS) this.#samples.shift();
    const first = this.#samples[0]!;
    return now - first.at < DRAW_MS ? 0 : ((this.#done - first.done) * 1000) / (now - first.at);
  }

  #draw(): void {
    if (!this.#live || this.#total === 0) return;
    const line = progressLine(
      {
        prefix: this.#prefix,
        done: this.#done,
        total: this.#total,
        rate: this.#rate(),
        name: this.#name,
      },
      (process.stderr.columns || 80) - 1,
    );
    process.stderr.write(`\r\x1b[2K${line}`);
    this.#shown = true;
  }

  /** Runs the transfer. The bar is cleared after success and stays, with the outcome, otherwise. */
  async run<Value>(work: (transfer: Transfer) => Promise<Value>): Promise<Value> {
    try {
      const value = await work(this);
      if (this.#shown) process.stderr.write("\r\x1b[2K");
      return value;
    } catch (error) {
      // Whatever broke because it was told to end: the reason is what counts.
      const cause: unknown = this.#abort.signal.aborted ? this.#abort.signal.reason : error;
      if (this.#shown) {
        this.#draw();
        process.stderr.write("\n");
      }
      if (this.#interrupted === undefined && this.#shown && cause instanceof Error) {
        throw new CliError("transfer failed", { cause });
      }
      throw cause;
    } finally {
      this[Symbol.dispose]();
    }
  }

  [Symbol.dispose](): void {
    clearInterval(this.#timer);
    this.#signals[Symbol.dispose]();
  }
}

/** Does something with every item, `jobs` at a time. The first failure ends the others through `abort`. */
export async function inParallel<Item>(
  items: readonly Item[],
  jobs: number,
  signal: AbortSignal,
  work: (item: Item, signal: AbortSignal) => Promise<void>,
): Promise<void> {
  const failed = new AbortController();
  const both = AbortSignal.any([signal, failed.signal]);
  let next = 0;
  const worker = async () => {
    while (next < items.length && !both.aborted) {
      const item = items[next++]!;
      try {
        await work(item, both);
      } catch (error) {
        failed.abort(error);
        throw error;
      }
    }
  };
  const results = await Promise.allSettled(Array.from({ length: Math.min(jobs, items.length) }, worker));
  if (failed.signal.aborted) throw failed.signal.reason;
  for (const result of results) if (result.status === "rejected") throw result.reason;
  signal.throwIfAborted();
}
