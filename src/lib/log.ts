import { AsyncLocalStorage } from "node:async_hooks";
import { writeSync } from "node:fs";
import pino from "pino";
import { formatRecord, type LogFormat } from "./log-format.ts";

export type Logger = pino.Logger;

const REDACTED = [
  "apiKey",
  "accessToken",
  "envdAccessToken",
  "trafficAccessToken",
  "password",
  "*.apiKey",
  "*.accessToken",
  "*.envdAccessToken",
  "*.trafficAccessToken",
  "*.password",
  'headers["x-api-key"]',
  'headers["x-access-token"]',
  "headers.authorization",
];

/** What a piece of work is about; in every line that is logged while it runs. */
export interface LogContext {
  readonly requestId?: string;
  readonly sandboxId?: string;
}

const context = new AsyncLocalStorage<LogContext>();

/** Runs `work`, and all it starts, with these ids in its log lines, beside those of the work around it. */
export function withLogContext<T>(ids: LogContext, work: () => T): T {
  return context.run({ ...context.getStore(), ...ids }, work);
}

const LEVELS = new Set(["trace", "debug", "info", "warn", "error", "fatal", "silent"]);

/**
 * `AENV_LOG_LEVEL`, else the level that `RUST_LOG` names for us (`agentenv=debug`, or a bare `debug`),
 * else info. What is not a level counts as unset.
 */
export function logLevel(env: Readonly<Record<string, string | undefined>>): string {
  const own = env.AENV_LOG_LEVEL?.trim().toLowerCase();
  if (own !== undefined && LEVELS.has(own)) return own;
  let general: string | undefined;
  let ours: string | undefined;
  for (const directive of (env.RUST_LOG ?? "").toLowerCase().split(",")) {
    const [target, level] = directive.trim().split("=");
    const word = (level ?? target ?? "") === "off" ? "silent" : (level ?? target ?? "");
    if (!LEVELS.has(word)) continue;
    if (level === undefined) general = word;
    else if (target === "agentenv") ours = word;
  }
  return ours ?? general ?? "info";
}

/** `AENV_LOG_FORMAT`: compact (also for anything unknown), pretty or json. */
export function logFormat(env: Readonly<Record<string, string | undefined>>): LogFormat {
  const format = env.AENV_LOG_FORMAT?.trim().toLowerCase();
  return format === "json" || format === "pretty" ? format : "compact";
}

/** Bytes of lines that could not be written yet; with more of them, new lines are left out. */
const MAX_UNWRITTEN_BYTES = 1 << 20;
/** A pipe whose reader is slow is given so long before its lines wait for the next one. */
const PIPE_PATIENCE_MS = 200;
const PIPE_PAUSE_MS = 5;

/**
 * Writes lines synchronously and never throws: a full disk must not end the work that is logged. What cannot be
 * written stays, in order, for the next line.
 */
class LineWriter {
  readonly #fd: number;
  readonly #onLost: (lines: number) => void;
  #waiting: Uint8Array[] = [];
  #waitingBytes = 0;
  #lost = 0;

  constructor(fd: number, onLost: (lines: number) => void) {
    this.#fd = fd;
    this.#onLost = onLost;
  }

  write(line: string): void {
    const bytes = Buffer.from(line);
    this.#flush();
    if (this.#waitingBytes + bytes.length > MAX_UNWRITTEN_BYTES) {
      this.#lost++;
      return;
    }
    const wasEmpty = this.#waiting.length === 0;
    this.#waiting.push(bytes);
    this.#waitingBytes += bytes.length;
    if (wasEmpty) this.#flush();
    if (this.#lost === 0 || this.#waiting.length > 0) return;
    const lost = this.#lost;
    this.#lost = 0;
    this.#onLost(lost);
  }

  #flush(): void {
    let patienceMs = PIPE_PATIENCE_MS;
    for (let bytes = this.#waiting[0]; bytes !== undefined; bytes = this.#waiting[0]) {
      let written: number;
      try {
        written = writeSync(this.#fd, bytes);
      } catch (error) {
        const busy = error instanceof Error && "code" in error && error.code === "EAGAIN";
        // There is no place to tell of it: the line waits.
        if (!busy || patienceMs <= 0) return;
        patienceMs -= PIPE_PAUSE_MS;
        Bun.sleepSync(PIPE_PAUSE_MS);
        continue;
      }
      this.#waitingBytes -= written;
      if (written < bytes.length) this.#waiting[0] = bytes.subarray(written);
      else this.#waiting.shift();
    }
  }
}

/**
 * Log lines on standard error (file descriptor 2), written synchronously so that the last line before
 * a crash is there. Level and format: see {@link logLevel} and {@link logFormat}. Logging never throws: lines that
 * cannot be written (a full disk) wait for a later one that can, up to 1 MiB; how many were left out is said then.
 */
export function createLogger(name: string, fd = 2): Logger {
  const format = logFormat(process.env);
  const writer = new LineWriter(fd, (lost) =>
    log.warn({ lost }, "log lines were lost: the log could not be written"),
  );
  const log = pino(
    {
      name,
      level: logLevel(process.env),
      base: { pid: process.pid },
      timestamp: pino.stdTimeFunctions.isoTime,
      redact: { paths: REDACTED, censor: "[redacted]" },
      serializers: { err: pino.stdSerializers.err },
      // A copy: pino writes the line's own fields into it.
      mixin: () => ({ ...context.getStore() }),
    },
    format === "json" ? writer : { write: (line: string) => writer.write(formatRecord(line, format)) },
  );
  return log;
}
