import { constants } from "node:fs";
import { type FileHandle, open } from "node:fs/promises";
import { errorCode } from "../lib/durable.ts";
import type { LifecycleEvent } from "../orchestrator/types.ts";
import type { LogLevel, SandboxLogEntry } from "./types.ts";

const MAX_LINE = 4096;
/** Console bytes read at one look; what a flood prints beyond it is skipped, and said so. */
const MAX_CONSOLE_READ = 64 * 1024;

const LEVELS: Readonly<Record<string, LogLevel>> = {
  create_failed: "error",
  pause_failed: "error",
  resume_failed: "error",
  snapshot_failed: "error",
  fork_failed: "error",
  vm_ended: "error",
  lost: "error",
  unresponsive: "warn",
};

const TEXTS: Readonly<Record<string, string>> = {
  creating: "sandbox is being created",
  created: "sandbox runs",
  create_failed: "sandbox could not be created",
  paused: "sandbox paused and stored",
  pause_failed: "pause failed",
  resumed: "sandbox resumed",
  resume_failed: "resume failed, the sandbox stays paused",
  snapshotted: "snapshot taken",
  snapshot_failed: "snapshot failed",
  forked: "sandbox forked",
  fork_failed: "fork failed",
  copied: "sandbox was the source of a fork",
  adopted: "running sandbox found again after a restart of the server",
  expired: "deadline reached",
  vm_ended: "the virtual machine ended by itself",
  lost: "sandbox is gone",
  unresponsive: "the guest's agent does not answer",
  responsive: "the guest's agent answers again",
  deleted: "sandbox deleted",
};

/** Of those that are told as cold. */
const COLD_TEXTS: Readonly<Record<string, string>> = {
  paused: "sandbox paused without its memory, its disks are stored",
  pause_failed: "pause without memory failed",
  resumed: "sandbox booted from its stored disks",
  resume_failed: "boot from the stored disks failed, the sandbox stays paused",
};

function describe(event: LifecycleEvent): SandboxLogEntry {
  const fields: Record<string, string> = { source: "lifecycle", event: event.kind };
  if (event.durationMs !== undefined) fields.durationMs = event.durationMs.toFixed(1);
  for (const [phase, ms] of Object.entries(event.phases ?? {})) fields[`phase.${phase}`] = String(ms);
  const cold = event.cold === true ? COLD_TEXTS[event.kind] : undefined;
  const text = cold ?? TEXTS[event.kind] ?? event.kind.replaceAll("_", " ");
  return {
    atMs: event.atMs,
    level: LEVELS[event.kind] ?? "info",
    message: event.reason === undefined ? text : `${text}: ${event.reason.slice(0, MAX_LINE)}`,
    fields,
  };
}

interface Console {
  /** One VM has one file; the next start of the sandbox has another. */
  readonly path: string;
  /** Which file had that name; undefined before the first look. */
  identity: string | undefined;
  offset: number;
  /** The line whose end has not come yet. */
  rest: string;
}

interface Book {
  entries: SandboxLogEntry[];
  console?: Console;
  /** Looks at a console do not overlap. */
  reading?: Promise<void>;
}

// biome-ignore lint/suspicious/noControlCharactersInRegex: terminal control sequences are what it removes
const CONTROL = /\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]/g;

/**
 * The log of each sandbox: what the server did with it and what its VM's console printed. In memory,
 * bounded per sandbox, from the server's start (or the sandbox's creation) to the sandbox's end. Console
 * lines carry no time of their own; they get that of the look that found them.
 */
export class Journal {
  readonly #books = new Map<string, Book>();
  readonly #maxEntries: number;

  constructor(maxEntries: number) {
    this.#maxEntries = maxEntries;
  }

  #book(sandboxId: string): Book {
    let book = this.#books.get(sandboxId);
    if (book === undefined) {
      book = { entries: [] };
      this.#books.set(sandboxId, book);
    }
    return book;
  }

  #add(book: Book, entry: SandboxLogEntry): void {
    book.entries.push(entry);
    // Cut in steps: a shift per line of a flood would copy the whole book each time.
    if (book.entries.length > this.#maxEntries * 1.25) book.entries = book.entries.slice(-this.#maxEntries);
  }

  record(event: LifecycleEvent): void {
    this.#add(this.#book(event.sandboxId), describe(event));
  }

  get sandboxIds(): string[] {
    return [...this.#books.keys()];
  }

  forget(sandboxId: string): void {
    this.#books.delete(sandboxId);
  }

  /** Takes in what the console printed since the last look. A file that is not there has nothing to say. */
  async readConsole(sandboxId: string, path: string): Promise<void> {
    const book = this.#book(sandboxId);
    const earlier = book.reading;
    const work = (async () => {
      await earlier;
      await this.#readConsole(book, path);
    })();
    book.reading = work;
    try {
      await work;
    } finally {
      if (book.reading === work) book.reading = undefined;
    }
  }

  async #readConsole(book: Book, path: string): Promise<void> {
    if (book.console?.path !== path) book.console = { path, identity: undefined, offset: 0, rest: "" };
    const { console } = book;
    let opened: FileHandle;
    try {
      // Whatever has the name, opening it waits for nobody.
      opened = await open(path, constants.O_RDONLY | constants.O_NONBLOCK);
    } catch (error) {
      if (errorCode(error) === "ENOENT") return;
      throw error;
    }
    await using file = opened;
    // Of the open file: the name may be another's a moment later.
    const { dev, ino, birthtimeNs, size: bigSize } = await file.stat({ bigint: true });
    const size = Number(bigSize);
    // A number can be given again to a new file, with another time of birth.
    const identity = `${dev}:${ino}:${birthtimeNs}`;
    const another = console.identity !== undefined && console.identity !== identity;
    console.identity = identity;
    if (another || size < console.offset) {
      // Begun anew, what was there before is full.
      console.offset = 0;
      console.rest = "";
    }
    if (size === console.offset) return;
    const skipped = size - console.offset - MAX_CONSOLE_READ;
    const now = Date.now();
    if (skipped > 0) {
      this.#add(book, {
        atMs: now,
        level: "warn",
        message: `${skipped} bytes of console output left out`,
        fields: { source: "console" },
      });
      console.offset += skipped;
      console.rest = "";
    }
    const buffer = Buffer.alloc(Math.min(size - console.offset, MAX_CONSOLE_READ));
    const { bytesRead } = await file.read(buffer, 0, buffer.length, console.offset);
    console.offset += bytesRead;
    const lines = (console.rest + buffer.toString("utf8", 0, bytesRead)).split("\n");
    console.rest = lines.pop()!.slice(-MAX_LINE);
    for (const line of lines) {
      const message = line.replace(CONTROL, "").trimEnd().slice(0, MAX_LINE);
      if (message !== "")
        this.#add(book, { atMs: now, level: "info", message, fields: { source: "console" } });
    }
  }

  /** Oldest first. */
  entries(sandboxId: string): readonly SandboxLogEntry[] {
    return (this.#books.get(sandboxId)?.entries ?? []).slice(-this.#maxEntries);
  }
}
