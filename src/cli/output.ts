import type { Writable } from "node:stream";

/** Table on a terminal, JSON for a program, unless the user says which. */
export function wantsTable(output: string | undefined): boolean {
  return output === undefined ? process.stdout.isTTY === true : output === "table";
}

export function print(line: string): void {
  process.stdout.write(`${line}\n`);
}

export function printJson(items: readonly unknown[]): void {
  print(JSON.stringify(items, null, 2));
}

/** One line of foreign text without what would steer the terminal: control characters become spaces. */
export function plainText(text: string): string {
  return Bun.stripANSI(text)
    .replace(/[\p{Cc}\u2028\u2029]+/gu, " ")
    .trimEnd();
}

/** Foreign text of several lines, without control sequences. */
export function plainLines(text: string): string {
  return text.split(/\r?\n/).map(plainText).join("\n").trimEnd();
}

/** Columns two spaces apart under upper-case headers; a missing cell is `-`. */
export function formatTable(
  headers: readonly string[],
  rows: readonly (readonly (string | number | null | undefined)[])[],
): string {
  const cells = [headers, ...rows].map((row) =>
    headers.map((_, i) => {
      const cell = plainText(String(row[i] ?? ""));
      return cell === "" ? "-" : cell;
    }),
  );
  const widths = headers.map((_, i) => Math.max(...cells.map((row) => Bun.stringWidth(row[i]!))));
  const line = (row: readonly string[]) =>
    row.map((cell, i) => cell + " ".repeat(widths[i]! - Bun.stringWidth(cell))).join("  ");
  return cells.map((row) => `${line(row).trimEnd()}\n`).join("");
}

/** `2026-01-02T03:04:05.678Z` as local time, to the second, with its offset: `2026-01-02 04:04:05+01:00`, `…Z` in UTC. */
export function formatTime(iso: string | undefined): string | undefined {
  if (iso === undefined) return undefined;
  const date = new Date(iso);
  if (Number.isNaN(date.getTime())) return iso;
  const two = (value: number) => String(value).padStart(2, "0");
  const minutes = -date.getTimezoneOffset();
  const size = Math.abs(minutes);
  const zone =
    minutes === 0 ? "Z" : `${minutes < 0 ? "-" : "+"}${two(Math.floor(size / 60))}:${two(size % 60)}`;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}${zone}`;
}

/**
 * Hands bytes to a stream; resolves when it may take more, so a slow reader slows the sender. A
 * stream that is broken takes nothing and holds nobody up: what that means is for its error's listeners.
 */
export async function writeAll(stream: Writable, bytes: Uint8Array): Promise<void> {
  if (stream.destroyed || stream.errored != null || stream.write(bytes)) return;
  const { promise, resolve } = Promise.withResolvers<void>();
  const events = ["drain", "error", "close"] as const;
  for (const event of events) stream.once(event, resolve);
  await promise;
  for (const event of events) stream.off(event, resolve);
}

/**
 * One line that tells what long work is at: rewritten in place with the elapsed time on a terminal, plain
 * lines elsewhere (and on a terminal that cannot rewrite a line).
 */
export class StatusLine implements Disposable {
  readonly #stream: NodeJS.WriteStream;
  readonly #started = performance.now();
  readonly #timer: ReturnType<typeof setInterval> | undefined;
  readonly live: boolean;
  #text = "";
  #shown = false;

  /** `plain`: lines also on a terminal. */
  constructor(stream: NodeJS.WriteStream = process.stderr, options: { readonly plain?: boolean } = {}) {
    this.#stream = stream;
    this.live = stream.isTTY === true && process.env.TERM !== "dumb" && options.plain !== true;
    if (this.live) this.#timer = setInterval(() => this.#draw(), 200);
  }

  #seconds(): string {
    return `${((performance.now() - this.#started) / 1000).toFixed(1)} s`.padStart(8);
  }

  #draw(): void {
    if (this.#text === "") return;
    // Terminals that nobody looks at may say that they have no columns.
    const width = Math.max(20, (this.#stream.columns || 80) - 1);
    this.#stream.write(`\r\x1b[2K${`${this.#seconds()}  ${this.#text}`.slice(0, width)}`);
    this.#shown = true;
  }

  /** What is being done now. */
  set(text: string): void {
    const line = plainText(text);
    if (line === this.#text) return;
    this.#text = line;
    if (this.live) this.#draw();
    else this.#stream.write(`${this.#seconds()}  ${line}\n`);
  }

  /** A line that stays, above the status. */
  note(text: string): void {
    this.#clear();
    this.#stream.write(`${this.live ? "" : `${this.#seconds()}  `}${plainText(text)}\n`);
    if (this.live) this.#draw();
  }

  #clear(): void {
    if (this.#shown) this.#stream.write("\r\x1b[2K");
    this.#shown = false;
  }

  [Symbol.dispose](): void {
    clearInterval(this.#timer);
    this.#clear();
    this.#text = "";
  }
}
