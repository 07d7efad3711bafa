/** Table on a terminal, JSON for a program, unless the user says which. */
export function wantsTable(output: string | undefined): boolean {
  return output === undefined ? process.stdout.isTTY === true : output === "table";
}

export function printJson(items: readonly unknown[]): void {
  process.stdout.write(`${JSON.stringify(items, null, 2)}\n`);
}

export function formatTable(
  headers: readonly string[],
  rows: readonly (readonly (string | undefined)[])[],
): string {
  const cells = [headers, ...rows].map((row) =>
    headers.map((_, i) => {
      const cell = row[i];
      return cell === undefined || cell === "" ? "-" : cell;
    }),
  );
  const widths = headers.map((_, i) => Math.max(...cells.map((row) => row[i]!.length)));
  return cells
    .map(
      (row) =>
        `${row
          .map((cell, i) => cell.padEnd(widths[i]!))
          .join("  ")
          .trimEnd()}\n`,
    )
    .join("");
}

/** `2026-01-02T03:04:05.678Z` as local time, to the second. */
export function formatTime(iso: string): string {
  const date = new Date(iso);
  if (Number.isNaN(date.getTime())) return iso;
  const two = (value: number) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/**
 * One line that tells what long work is at: rewritten in place with the elapsed time on a terminal, a
 * plain line per change elsewhere.
 */
export class StatusLine implements Disposable {
  readonly #stream: NodeJS.WriteStream;
  readonly #started = performance.now();
  readonly #timer: ReturnType<typeof setInterval> | undefined;
  #text = "";
  #shown = false;

  constructor(stream: NodeJS.WriteStream = process.stderr) {
    this.#stream = stream;
    if (stream.isTTY) this.#timer = setInterval(() => this.#draw(), 200);
  }

  #seconds(): string {
    return `${((performance.now() - this.#started) / 1000).toFixed(1)} s`;
  }

  #draw(): void {
    if (this.#text === "") return;
    const width = Math.max(20, (this.#stream.columns ?? 80) - 1);
    const line = `${this.#seconds().padStart(8)}  ${this.#text}`.slice(0, width);
    this.#stream.write(`\r\x1b[2K${line}`);
    this.#shown = true;
  }

  /** What is being done now. */
  set(text: string): void {
    if (text === this.#text) return;
    this.#text = text;
    if (this.#timer !== undefined) this.#draw();
    else this.#stream.write(`${this.#seconds().padStart(8)}  ${text}\n`);
  }

  /** A line that stays, above the status. */
  note(text: string): void {
    this.#clear();
    this.#stream.write(`${text}\n`);
    if (this.#timer !== undefined) this.#draw();
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
