import { appendFile, type FileHandle, open } from "node:fs/promises";
import { errorCode } from "../lib/durable.ts";
import type { ProgressEvent, ProgressSink } from "../lib/progress.ts";
import type { BuildLogEntry } from "./types.ts";

const MAX_ENTRIES = 50_000;
const TAIL_ENTRIES = 500;
/** As lines of JSON, of all entries together; the end of a longer log is kept beside, at most this much. */
const MAX_LOG_BYTES = 15 << 20;
const MAX_TAIL_BYTES = 1 << 20;
const MAX_MESSAGE_CHARS = 8192;
const PROGRESS_INTERVAL_MS = 2000;
const WRITE_INTERVAL_MS = 500;

/**
 * Log of one build. Readers page by offset, so entries never move: past the limit a marker is written
 * once and only the last entries are kept aside, to be added when the build ends.
 */
export class BuildLog {
  readonly #entries: BuildLogEntry[];
  #tail: BuildLogEntry[] = [];
  #dropped = 0;
  #bytes = 0;
  #tailBytes = 0;
  #full = false;
  readonly #onEntry: ((entry: BuildLogEntry) => void) | undefined;
  /** Entries that readers see and that `take` has not given out. */
  #taken = 0;

  constructor(entries: readonly BuildLogEntry[] = [], onEntry?: (entry: BuildLogEntry) => void) {
    this.#entries = [...entries];
    for (const entry of entries) this.#bytes += sizeOf(entry);
    this.#onEntry = onEntry;
  }

  /** Entries since the last call, as lines of JSON. */
  take(): string {
    const text = this.#entries
      .slice(this.#taken)
      .map((entry) => `${JSON.stringify(entry)}\n`)
      .join("");
    this.#taken = this.#entries.length;
    return text;
  }

  get entries(): readonly BuildLogEntry[] {
    return this.#entries;
  }

  add(level: BuildLogEntry["level"], message: string, step?: string): void {
    const entry: BuildLogEntry = {
      timestamp: new Date().toISOString(),
      level,
      message:
        message.length > MAX_MESSAGE_CHARS
          ? `${message.slice(0, MAX_MESSAGE_CHARS)}… (${message.length - MAX_MESSAGE_CHARS} more characters)`
          : message,
      ...(step === undefined ? {} : { step }),
    };
    this.#onEntry?.(entry);
    const size = sizeOf(entry);
    if (!this.#full && this.#entries.length < MAX_ENTRIES && this.#bytes + size <= MAX_LOG_BYTES) {
      this.#bytes += size;
      this.#entries.push(entry);
      return;
    }
    if (!this.#full) {
      this.#full = true;
      const limit = `${MAX_ENTRIES} entries or ${MAX_LOG_BYTES >> 20} MiB`;
      const message = `the log reached its limit of ${limit}: the rest is left out, but for its end`;
      this.#entries.push({ timestamp: entry.timestamp, level: "warn", message });
    }
    this.#tail.push(entry);
    this.#tailBytes += size;
    while (this.#tail.length > TAIL_ENTRIES || this.#tailBytes > MAX_TAIL_BYTES) {
      this.#tailBytes -= sizeOf(this.#tail.shift()!);
      this.#dropped += 1;
    }
  }

  /** Adds what was kept aside. Nothing may be added after. */
  close(): void {
    if (this.#tail.length === 0) return;
    if (this.#dropped > 0) {
      const message = `… ${this.#dropped} entries left out …`;
      this.#entries.push({ timestamp: this.#tail[0]!.timestamp, level: "warn", message });
    }
    this.#entries.push(...this.#tail);
    this.#tail = [];
  }

  /** Splits a byte stream into lines; call the returned `flush` at its end. */
  lines(
    level: BuildLogEntry["level"],
    step: string,
  ): { write: (chunk: Uint8Array) => void; flush: () => void } {
    const decoder = new TextDecoder();
    let rest = "";
    const emit = (line: string): void => {
      const text = line.replace(/\r$/, "").trimEnd();
      if (text !== "") this.add(level, text, step);
    };
    return {
      write: (chunk) => {
        const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
        rest = lines.pop()!;
        if (rest.length > MAX_MESSAGE_CHARS) {
          emit(rest);
          rest = "";
        }
        for (const line of lines) emit(line);
      },
      flush: () => {
        emit(rest + decoder.decode());
        rest = "";
      },
    };
  }

  /** Progress as log entries: each phase and item at its start, then at most every two seconds, and at its end. */
  progress(step: string): ProgressSink {
    const lastAt = new Map<string, number>();
    /** Phases whose end was told: parallel work may report it many times. */
    const ended = new Set<string>();
    return (event) => {
      const key = `${event.phase}\0${event.item ?? ""}`;
      const now = performance.now();
      const done = event.totalBytes !== undefined && event.doneBytes === event.totalBytes;
      if (event.message === undefined && ended.has(key)) return;
      if (done) ended.add(key);
      const last = lastAt.get(key);
      if (last !== undefined && !done && event.message === undefined && now - last < PROGRESS_INTERVAL_MS)
        return;
      lastAt.set(key, now);
      this.add("info", describe(event), step);
    };
  }
}

function sizeOf(entry: BuildLogEntry): number {
  return Buffer.byteLength(JSON.stringify(entry)) + 1;
}

/** Keeps a build's log on disk while it grows: what a reader saw is there after a crash, too. */
export class LogFile implements AsyncDisposable {
  readonly #path: string;
  readonly #log: BuildLog;
  readonly #onError: (error: unknown) => void;
  readonly #timer: NodeJS.Timeout;
  #writing: Promise<void> = Promise.resolve();

  constructor(path: string, log: BuildLog, onError: (error: unknown) => void) {
    this.#path = path;
    this.#log = log;
    this.#onError = onError;
    this.#timer = setInterval(() => void this.flush(), WRITE_INTERVAL_MS);
    this.#timer.unref();
  }

  flush(): Promise<void> {
    this.#writing = this.#writing.then(async () => {
      const text = this.#log.take();
      if (text !== "") await appendFile(this.#path, text, { mode: 0o600 }).catch(this.#onError);
    });
    return this.#writing;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    clearInterval(this.#timer);
    await this.flush();
  }
}

/** Ends a line that a crash cut off, so that what is written next is a line of its own. No file: nothing. */
export async function endLogLine(path: string): Promise<void> {
  let opened: FileHandle;
  try {
    opened = await open(path, "r+");
  } catch (error) {
    if (errorCode(error) === "ENOENT") return;
    throw error;
  }
  await using file = opened;
  const { size } = await file.stat();
  if (size === 0) return;
  const { buffer } = await file.read(Buffer.alloc(1), 0, 1, size - 1);
  if (buffer[0] !== 10) await file.write("\n", size);
}

function describe(event: ProgressEvent): string {
  const mebibytes = (bytes: number): string => (bytes / 1048576).toFixed(1);
  // The first twelve digits of a digest tell layers apart, as everywhere in this field.
  const item = event.item?.replace(/^(sha256:[0-9a-f]{12})[0-9a-f]{52}$/, "$1");
  const what = item === undefined ? event.phase : `${event.phase} ${item}`;
  const parts = [what];
  if (event.doneBytes !== undefined) {
    parts.push(
      event.totalBytes === undefined
        ? `${mebibytes(event.doneBytes)} MiB`
        : `${mebibytes(event.doneBytes)} / ${mebibytes(event.totalBytes)} MiB`,
    );
  }
  if (event.message !== undefined) parts.push(event.message);
  return parts.join(": ");
}
