/** How log records look to people; machines read the JSON lines as they are. */

export type LogFormat = "compact" | "pretty" | "json";

const LEVELS: Readonly<Record<number, string>> = {
  10: "TRACE",
  20: "DEBUG",
  30: "INFO",
  40: "WARN",
  50: "ERROR",
  60: "FATAL",
};
/** Said elsewhere on the line, or of no use to a person. */
const SHOWN = new Set(["level", "time", "pid", "name", "room", "msg", "err"]);

interface LogError {
  readonly type?: string;
  readonly message?: string;
  readonly stack?: string;
}

function plain(value: unknown): string {
  if (typeof value !== "string") return JSON.stringify(value);
  return /^[\w./:@+\-[\]]+$/.test(value) ? value : JSON.stringify(value);
}

/** One record, a JSON line of the logger, as text that ends with a line break. */
export function formatRecord(line: string, format: Exclude<LogFormat, "json">): string {
  let record: Record<string, unknown>;
  try {
    record = JSON.parse(line);
  } catch {
    // Not ours, but a line all the same.
    return line;
  }
  const level = (LEVELS[Number(record.level)] ?? String(record.level)).padEnd(5);
  const error = record.err as LogError | undefined;
  const fields = Object.entries(record).filter(([key]) => !SHOWN.has(key));
  const title = `${record.time} ${level} ${record.room ?? record.name}: ${record.msg ?? ""}`;
  if (format === "compact") {
    const texts = fields.map(([key, value]) => `${key}=${plain(value)}`);
    if (error !== undefined) texts.push(`err=${JSON.stringify(error.message ?? "")}`);
    const rest = texts.length === 0 ? "" : ` ${texts.join(" ")}`;
    // A stack is worth its lines only where something went wrong.
    const stack = error?.stack !== undefined && Number(record.level) >= 50 ? `\n${error.stack}` : "";
    return `${title}${rest}${stack}\n`;
  }
  const lines = fields.map(([key, value]) => `    ${key}: ${plain(value)}`);
  if (error !== undefined)
    lines.push(...(error.stack ?? error.message ?? "").split("\n").map((text) => `    ${text}`));
  return `${[title, ...lines].join("\n")}\n`;
}
