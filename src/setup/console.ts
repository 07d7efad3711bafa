import { AenvError, errorChain } from "../lib/errors.ts";
import type { ProgressEvent, ProgressSink } from "../lib/progress.ts";

export function formatBytes(bytes: number): string {
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

/**
 * Shows phases on standard error: on a terminal one line that is rewritten while the phase lasts, else a
 * line when a phase begins and one when it ends. Every line carries the time since the phase began.
 */
export function consoleProgress(
  stream: NodeJS.WriteStream = process.stderr,
): ProgressSink & { finish(): void } {
  let phase: string | undefined;
  let startedMs = 0;
  let open = false;
  const line = (event: ProgressEvent, elapsedMs: number) => {
    const amount =
      event.doneBytes === undefined
        ? ""
        : event.totalBytes === undefined
          ? formatBytes(event.doneBytes)
          : `${formatBytes(event.doneBytes)} of ${formatBytes(event.totalBytes)}`;
    const seconds = `${(elapsedMs / 1000).toFixed(1)} s`;
    const rest = [event.item, event.message === "done" ? undefined : event.message, amount, seconds];
    return `  ${event.phase.padEnd(22)} ${rest.filter((part) => part !== undefined && part !== "").join("  ")}`;
  };
  const sink = (event: ProgressEvent) => {
    const now = performance.now();
    const begins = phase !== event.phase;
    if (begins) {
      if (open) stream.write("\n");
      phase = event.phase;
      startedMs = now;
      open = false;
    }
    const text = line(event, now - startedMs);
    const ends = event.message === "done";
    if (stream.isTTY) {
      stream.write(`\r\x1b[K${text}${ends ? "\n" : ""}`);
      open = !ends;
    } else if (begins || ends || (event.message !== undefined && event.message !== "")) {
      stream.write(`${text}${ends ? "" : " …"}\n`);
    }
    if (ends) phase = undefined;
  };
  return Object.assign(sink, {
    finish: () => {
      if (open) stream.write("\n");
      open = false;
      phase = undefined;
    },
  });
}

/** The error, what lay behind it and what to do, on standard error. */
export function reportError(error: unknown): void {
  const [first, ...causes] = errorChain(error);
  process.stderr.write(`Error: ${first ?? "unknown error"}\n`);
  for (const cause of causes) process.stderr.write(`  caused by: ${cause}\n`);
  if (error instanceof AenvError && error.remediation !== undefined)
    process.stderr.write(`  cure: ${error.remediation}\n`);
}
