/**
 * Every error that can reach a caller carries a stable code and an HTTP status from the place where it
 * was born. `message` names what happened to which thing; `remediation` says what the reader can do.
 */
export interface AenvErrorOptions {
  /** Stable machine-readable code, snake_case, e.g. `image_not_found`. */
  readonly code: string;
  /** HTTP status the API answers with. Defaults to 500. */
  readonly status?: number;
  readonly message: string;
  readonly remediation?: string;
  readonly cause?: unknown;
  /** Response headers that belong to the error, e.g. `Retry-After`. */
  readonly headers?: Readonly<Record<string, string>>;
}

export class AenvError extends Error {
  readonly code: string;
  readonly status: number;
  readonly remediation: string | undefined;
  readonly headers: Readonly<Record<string, string>> | undefined;

  constructor(options: AenvErrorOptions) {
    super(options.message, options.cause === undefined ? undefined : { cause: options.cause });
    this.name = "AenvError";
    this.code = options.code;
    this.status = options.status ?? 500;
    this.remediation = options.remediation;
    this.headers = options.headers;
  }
}

/** The chain of messages of an error and its causes, outermost first, without repeats. */
export function errorChain(error: unknown): string[] {
  const messages: string[] = [];
  let current: unknown = error;
  for (let depth = 0; current !== undefined && current !== null && depth < 16; depth++) {
    const message = current instanceof Error ? current.message : String(current);
    // A message that quotes its cause says it once.
    if (message !== "" && !messages.some((said) => said.includes(message))) messages.push(message);
    current = current instanceof Error ? current.cause : undefined;
  }
  return messages;
}

/** Whether a full file system or quota is somewhere among the causes. */
export function isDiskFull(error: unknown): boolean {
  let current = error;
  for (let depth = 0; current instanceof Error && depth < 16; depth++) {
    const code = "code" in current ? current.code : undefined;
    if (code === "disk_full" || code === "ENOSPC" || code === "EDQUOT" || code === "SQLITE_FULL") return true;
    if (/\bENOSPC\b|no space left/i.test(current.message)) return true;
    current = current.cause;
  }
  return false;
}

/** A broken invariant is a bug, never bad input: it says so and stops the operation. */
export function assert(condition: unknown, message: string): asserts condition {
  if (!condition) throw new Error(`internal error, please report: ${message}`);
}
