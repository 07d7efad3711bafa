import { AenvError, errorChain, isDiskFull } from "../lib/errors.ts";
import type { SandboxState } from "./types.ts";

/** Every change of state there is. Anything else is a bug, not a request. */
export const TRANSITIONS: Readonly<Record<SandboxState, readonly SandboxState[]>> = {
  creating: ["running", "killing"],
  resuming: ["running", "paused"],
  running: ["pausing", "snapshotting", "forking", "killing"],
  snapshotting: ["running", "killing"],
  forking: ["running", "killing"],
  pausing: ["paused", "running", "killing"],
  paused: ["resuming", "killing"],
  // Back to where it came from when a stop failed.
  killing: ["running", "paused"],
};

export const TRANSITIONAL: ReadonlySet<SandboxState> = new Set([
  "creating",
  "resuming",
  "snapshotting",
  "forking",
  "pausing",
  "killing",
]);

export function notFound(id: string): AenvError {
  return new AenvError({
    code: "sandbox_not_found",
    status: 404,
    message: `sandbox ${id} was not found`,
    remediation: "it may have expired or been deleted; list the sandboxes there are",
  });
}

/** What to do about a sandbox that would have to run. */
export function wakeUp(id: string, state: SandboxState): string | undefined {
  return state === "paused" ? `resume it with: aenv resume ${id}` : undefined;
}

export function conflict(
  id: string,
  state: SandboxState,
  what: string,
  remediation: string | undefined = undefined,
): AenvError {
  return new AenvError({
    code: "sandbox_state_conflict",
    status: 409,
    message: `sandbox ${id} is ${state}: ${what}`,
    ...(remediation === undefined ? {} : { remediation }),
  });
}

export function shuttingDown(): AenvError {
  return new AenvError({ code: "shutting_down", status: 503, message: "the server is shutting down" });
}

/** Keeps the code, status and cure of the cause, and says what they did to which sandbox. */
export function failure(code: string, message: string, cause: unknown, remediation?: string): AenvError {
  const known = cause instanceof AenvError ? cause : undefined;
  const full = isDiskFull(cause);
  const cure =
    known?.remediation ?? (full ? "free space on the file system that holds $AENV_HOME_PATH" : remediation);
  return new AenvError({
    code: known?.code ?? (full ? "disk_full" : code),
    status: known?.status ?? (full ? 507 : 500),
    message: `${message}: ${errorChain(cause)[0] ?? "unknown cause"}`,
    ...(cure === undefined ? {} : { remediation: cure }),
    cause,
  });
}
