import { assert } from "../lib/errors.ts";
import { hasMemory, type PausedState, type PhaseTimings, type RunningSandbox } from "../sandbox/types.ts";
import type { SnapshotRecord } from "../snapshot/types.ts";
import type { VmExit } from "../vmm/types.ts";
import type { Seat } from "./capacity.ts";
import { conflict, TRANSITIONAL, TRANSITIONS } from "./states.ts";
import type { Startup } from "./store.ts";
import type { SandboxRecord, SandboxState } from "./types.ts";

/* One sandbox in the node's table: what is known of it, its state, and the operation under way. */

/** One start of a sandbox, from the VM's start to its end. */
export interface Instance {
  readonly id: string;
  readonly running: RunningSandbox;
  /** Replaced when a failed pause puts the instance back to work. */
  gone: AbortController;
  exit?: VmExit;
}

export interface Entry {
  readonly id: string;
  state: SandboxState;
  record: Omit<SandboxRecord, "state" | "id">;
  deadlineMs: number;
  startup: Startup;
  instance?: Instance;
  paused?: { readonly artifactDir: string; readonly state: PausedState };
  /** Of the pause under way, whether it keeps the memory. */
  pausesMemory?: boolean;
  /** The VM of before the pause, which could not be stopped: it has to end before another one starts. */
  lingering?: RunningSandbox;
  /** Changes of its network under way; never fails. A pause waits for them, as it stores the record. */
  networkUpdates?: Promise<void>;
  /** The operation under way, set exactly while the state is a transitional one. */
  operation?: Promise<unknown>;
  /** Content-addressed files this sandbox needs as long as it exists. */
  pins: readonly string[];
  timings: Record<string, PhaseTimings>;
  /** The last view of it and what that was made from. */
  seen?: {
    readonly record: Entry["record"];
    readonly state: SandboxState;
    readonly deadlineMs: number;
    readonly view: SandboxRecord;
  };
  evicting: boolean;
  evictFailures: number;
  nextEvictMs: number;
  /** Its part of the node while it is not paused. */
  seat?: Seat;
  probing?: boolean;
  /** Looks at the agent without an answer since the last one with. */
  silentProbes: number;
}

/** An entry in a state of its own making. */
export function newEntry(
  fields: Pick<Entry, "id" | "state" | "record" | "deadlineMs" | "startup"> & Partial<Entry>,
): Entry {
  return {
    pins: [],
    timings: {},
    evicting: false,
    evictFailures: 0,
    nextEvictMs: 0,
    silentProbes: 0,
    ...fields,
  };
}

/** Whether traffic may wake it: what has to be booted answers too late, and with nothing that ran before. */
export function autoResumes({ record, paused }: Entry): boolean {
  return record.autoResume && (paused === undefined || hasMemory(paused.state));
}

export function isoTime(ms: number): string {
  return new Date(ms).toISOString();
}

/** Lists of thousands are read far more often than one of them changes. */
export function viewOf(entry: Entry): SandboxRecord {
  const { record, state, deadlineMs, seen } = entry;
  if (seen?.record === record && seen.state === state && seen.deadlineMs === deadlineMs) return seen.view;
  const view = { id: entry.id, ...record, state, endAt: isoTime(deadlineMs) };
  entry.seen = { record, state, deadlineMs, view };
  return view;
}

/** What sandboxes of a template or snapshot are started with, the request's variables on top. */
export function startupOf(
  committed: Pick<NonNullable<SnapshotRecord["committed"]>, "context" | "imageReference">,
  envVars: Readonly<Record<string, string>>,
): Startup {
  const { envVars: own, user, workdir, bootArgs, ...image } = committed.context;
  return {
    envVars: { ...own, ...envVars },
    ...(user === undefined || user === "" ? {} : { defaultUser: user }),
    ...(workdir === undefined || workdir === "" ? {} : { defaultWorkdir: workdir }),
    image,
    ...(committed.imageReference === undefined ? {} : { imageReference: committed.imageReference }),
    ...(bootArgs === undefined ? {} : { bootArgs }),
  };
}

// ---- state --------------------------------------------------------------------------------------

export function move(entry: Entry, to: SandboxState): void {
  assert(TRANSITIONS[entry.state].includes(to), `sandbox ${entry.id} may go from ${entry.state} to ${to}`);
  entry.state = to;
  // In the same turn: whoever sees a resting state may begin the next operation.
  if (!TRANSITIONAL.has(to)) entry.operation = undefined;
}

/**
 * Moves to a transitional state and works there. The check and the move happen in one turn of the
 * event loop, so two callers cannot both begin. The work goes on when its caller does not wait.
 */
export function operate<T>(entry: Entry, to: SandboxState, work: () => Promise<T>): Promise<T> {
  move(entry, to);
  return track(entry, work);
}

/** The same for an entry that is in a transitional state already. The work has to end in a resting one. */
export function track<T>(entry: Entry, work: () => Promise<T>): Promise<T> {
  assert(entry.operation === undefined, `sandbox ${entry.id} has one operation at a time`);
  // Work that needs no await would be over before it is known as the operation under way.
  const operation = Promise.resolve()
    .then(work)
    .finally(() => {
      assert(entry.operation !== operation, `sandbox ${entry.id} rests after an operation (${entry.state})`);
    });
  entry.operation = operation;
  operation.catch(() => undefined);
  return operation;
}

/** How long somebody waits for the end of operations: from one start on, whatever their number. */
export class Patience {
  readonly #waitMs: number;
  readonly #deadline: number;

  constructor(waitMs: number) {
    this.#waitMs = waitMs;
    this.#deadline = performance.now() + waitMs;
  }

  /** Waits until the operation under way, if any, has ended; 409 after the bound. Never fails with it. */
  async settled({ id, operation, state }: Entry): Promise<void> {
    if (operation === undefined) return;
    const timeout = Promise.withResolvers<"timeout">();
    const leftMs = Math.max(0, this.#deadline - performance.now());
    const timer = setTimeout(() => timeout.resolve("timeout"), leftMs);
    try {
      const outcome = await Promise.race([
        operation.then(
          () => "ended" as const,
          () => "ended" as const,
        ),
        timeout.promise,
      ]);
      if (outcome === "timeout") {
        throw conflict(id, state, `that did not end within ${this.#waitMs / 1000} s`);
      }
    } finally {
      clearTimeout(timer);
    }
  }
}
