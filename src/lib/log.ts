import { AsyncLocalStorage } from "node:async_hooks";
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

/**
 * Log lines on standard error (file descriptor 2), written synchronously so that the last line before
 * a crash is there. Level and format: see {@link logLevel} and {@link logFormat}.
 */
export function createLogger(name: string, fd = 2): Logger {
  const destination = pino.destination({ fd, sync: true });
  const format = logFormat(process.env);
  return pino(
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
    format === "json"
      ? destination
      : { write: (line: string) => void destination.write(formatRecord(line, format)) },
  );
}
