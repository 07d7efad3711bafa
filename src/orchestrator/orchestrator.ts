import { mkdir, readdir } from "node:fs/promises";
import { join } from "node:path";
import { errorCode, removeTree } from "../lib/durable.ts";
import { AenvError, assert, errorChain } from "../lib/errors.ts";
import { Gate } from "../lib/gate.ts";
import { newId } from "../lib/ids.ts";
import type { Logger } from "../lib/log.ts";
import { deriveEnvdToken, deriveTrafficToken } from "../lib/tokens.ts";
import type {
  CapturedState,
  GuestIdentity,
  PhaseTimings,
  RunningSandbox,
  SandboxFactory,
} from "../sandbox/types.ts";
import type { SnapshotRepository } from "../snapshot/types.ts";
import type { VmExit } from "../vmm/types.ts";
import { PausedStore, type Startup } from "./store.ts";
import type {
  CreateSandboxRequest,
  LifecycleEvent,
  LifecycleEventKind,
  NodeOrchestrator,
  RouteLookup,
  SandboxAccess,
  SandboxRecord,
  SandboxState,
} from "./types.ts";

export interface OrchestratorOptions {
  readonly repository: SnapshotRepository;
  readonly sandboxes: SandboxFactory;
  /** SQLite file with the paused sandboxes. */
  readonly statePath: string;
  /** Captures of paused sandboxes: `<id>/<generation>/`. */
  readonly artifactsDir: string;
  readonly tokenSeed: string;
  readonly defaultTimeoutSeconds: number;
  readonly autoResumeMinTimeoutSeconds: number;
  readonly evictIntervalMs: number;
  /** VMs that start at once; more wait. Default 8. */
  readonly maxConcurrentStarts?: number;
  readonly log: Logger;
  /** Told of everything that happens to a sandbox, in order; must not block. */
  readonly onEvent?: (event: LifecycleEvent) => void;
  /** Milliseconds since the epoch; tests give their own clock. */
  readonly now?: () => number;
  /** Longest wait for another operation on the same sandbox. */
  readonly transitionWaitMs?: number;
}

/** Every change of state there is. Anything else is a bug, not a request. */
const TRANSITIONS: Readonly<Record<SandboxState, readonly SandboxState[]>> = {
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

const TRANSITIONAL: ReadonlySet<SandboxState> = new Set([
  "creating",
  "resuming",
  "snapshotting",
  "forking",
  "pausing",
  "killing",
]);

const TRANSITION_WAIT_MS = 60_000;
const CONCURRENT_EVICTIONS = 4;
const MAX_EVICTION_BACKOFF_MS = 60_000;
const SHUTDOWN_PASSES = 3;
/** Ten years: past it a date is a mistake, not a wish. */
const MAX_TIMEOUT_SECONDS = 315_360_000;

/** One start of a sandbox, from the VM's start to its end. */
interface Instance {
  readonly id: string;
  readonly running: RunningSandbox;
  /** Replaced when a failed pause puts the instance back to work. */
  gone: AbortController;
  exit?: VmExit;
}

interface Entry {
  readonly id: string;
  state: SandboxState;
  record: Omit<SandboxRecord, "state" | "id">;
  deadlineMs: number;
  startup: Startup;
  instance?: Instance;
  paused?: { readonly artifactDir: string; readonly state: CapturedState };
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
}

function notFound(id: string): AenvError {
  return new AenvError({
    code: "sandbox_not_found",
    status: 404,
    message: `sandbox ${id} was not found`,
    remediation: "it may have expired or been deleted; list the sandboxes there are",
  });
}

function conflict(id: string, state: SandboxState, what: string): AenvError {
  return new AenvError({
    code: "sandbox_state_conflict",
    status: 409,
    message: `sandbox ${id} is ${state}: ${what}`,
  });
}

function shuttingDown(): AenvError {
  return new AenvError({ code: "shutting_down", status: 503, message: "the server is shutting down" });
}

/** Keeps the code, status and cure of the cause, and says what they did to which sandbox. */
function failure(code: string, message: string, cause: unknown, remediation?: string): AenvError {
  const known = cause instanceof AenvError ? cause : undefined;
  const full = errorChain(cause).some((text) => text.includes("ENOSPC"));
  const cure =
    known?.remediation ?? (full ? "free space on the file system that holds $AENV_HOME" : remediation);
  return new AenvError({
    code: known?.code ?? (full ? "disk_full" : code),
    status: known?.status ?? (full ? 507 : 500),
    message: `${message}: ${errorChain(cause)[0] ?? "unknown cause"}`,
    ...(cure === undefined ? {} : { remediation: cure }),
    cause,
  });
}

function digestFiles(state: CapturedState): string[] {
  return [...state.rootfs.lowers, ...state.memory.layers]
    .filter((layer) => layer.digest !== undefined)
    .map((layer) => layer.file);
}

class SandboxOrchestrator implements NodeOrchestrator {
  readonly #options: OrchestratorOptions;
  readonly #log: Logger;
  readonly #now: () => number;
  readonly #waitMs: number;
  readonly #entries = new Map<string, Entry>();
  readonly #starts: Gate;
  readonly #evictions = new Gate(CONCURRENT_EVICTIONS, "evictions");
  readonly #pinned = new Set<string>();
  readonly #pinCounts = new Map<string, number>();
  readonly #background = new Set<Promise<void>>();
  #store: PausedStore | undefined;
  #timer: ReturnType<typeof setInterval> | undefined;
  #closing: Promise<void> | undefined;

  constructor(options: OrchestratorOptions) {
    this.#options = options;
    this.#log = options.log;
    this.#now = options.now ?? Date.now;
    this.#waitMs = options.transitionWaitMs ?? TRANSITION_WAIT_MS;
    this.#starts = new Gate(options.maxConcurrentStarts ?? 8, "sandbox starts");
  }

  get #db(): PausedStore {
    assert(this.#store !== undefined, "the orchestrator was started");
    return this.#store;
  }

  // ---- start and end ----------------------------------------------------------------------------

  async start(): Promise<void> {
    const { statePath, artifactsDir, sandboxes, evictIntervalMs } = this.#options;
    await mkdir(artifactsDir, { recursive: true, mode: 0o700 });
    this.#store = new PausedStore(statePath, this.#log);
    await sandboxes.cleanUp();
    const { documents, ids } = this.#store.load();
    for (const document of documents) {
      const { id, ...record } = document.record;
      const entry: Entry = {
        id,
        state: "paused",
        record,
        deadlineMs: Date.parse(record.endAt),
        startup: document.startup,
        paused: { artifactDir: document.artifactDir, state: document.state },
        pins: [],
        timings: {},
        evicting: false,
        evictFailures: 0,
        nextEvictMs: 0,
      };
      this.#pin(entry, digestFiles(document.state));
      this.#entries.set(id, entry);
    }
    // What no record refers to was being written, or being removed, when an earlier process ended.
    for (const name of await readdir(artifactsDir)) {
      const entry = this.#entries.get(name);
      if (entry !== undefined) await this.#removeOldGenerations(entry);
      else if (!ids.has(name)) await removeTree(join(artifactsDir, name));
    }
    if (documents.length > 0) this.#log.info({ paused: documents.length }, "paused sandboxes restored");
    this.#timer = setInterval(() => this.#evictExpired(), evictIntervalMs);
  }

  shutdown(): Promise<void> {
    this.#closing ??= this.#shutdown();
    return this.#closing;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.shutdown();
  }

  async #shutdown(): Promise<void> {
    clearInterval(this.#timer);
    const failures = new Map<string, unknown>();
    for (let pass = 0; pass < SHUTDOWN_PASSES; pass++) {
      const open = [...this.#entries.values()].filter((entry) => entry.state !== "paused");
      if (open.length === 0) break;
      await Promise.all(
        open.map(async (entry) => {
          try {
            if (entry.state === "running") await this.#evictions.run(() => this.#pauseIfRunning(entry));
            else await this.#settled(entry);
          } catch (error) {
            failures.set(entry.id, error);
            this.#log.error({ err: error, sandboxId: entry.id }, "sandbox was not paused at shutdown");
          }
        }),
      );
    }
    await Promise.all(this.#background);
    const left = [...this.#entries.values()]
      .filter((entry) => entry.state !== "paused")
      .map((entry) => entry.id);
    this.#store?.[Symbol.dispose]();
    if (left.length > 0) {
      throw new AenvError({
        code: "shutdown_incomplete",
        message: `sandboxes that could not be paused: ${left.join(", ")}`,
        cause: failures.get(left[0]!),
      });
    }
  }

  async #pauseIfRunning(entry: Entry): Promise<void> {
    if (entry.state === "running") await this.#operate(entry, "pausing", () => this.#pause(entry));
  }

  #refuseWhenClosing(): void {
    if (this.#closing !== undefined) throw shuttingDown();
  }

  // ---- state ------------------------------------------------------------------------------------

  #move(entry: Entry, to: SandboxState): void {
    assert(TRANSITIONS[entry.state].includes(to), `sandbox ${entry.id} may go from ${entry.state} to ${to}`);
    entry.state = to;
    // In the same turn: whoever sees a resting state may begin the next operation.
    if (!TRANSITIONAL.has(to)) entry.operation = undefined;
  }

  /**
   * Moves to a transitional state and works there. The check and the move happen in one turn of the
   * event loop, so two callers cannot both begin. The work goes on when its caller does not wait.
   */
  #operate<T>(entry: Entry, to: SandboxState, work: () => Promise<T>): Promise<T> {
    this.#move(entry, to);
    return this.#track(entry, work);
  }

  #track<T>(entry: Entry, work: () => Promise<T>): Promise<T> {
    assert(entry.operation === undefined, `sandbox ${entry.id} has one operation at a time`);
    // Work that needs no await would be over before it is known as the operation under way.
    const operation = Promise.resolve()
      .then(work)
      .finally(() => {
        assert(
          entry.operation !== operation,
          `sandbox ${entry.id} rests after an operation (${entry.state})`,
        );
      });
    entry.operation = operation;
    operation.catch(() => undefined);
    return operation;
  }

  /** Waits until the operation under way, if any, has ended; 409 after the bound. Never fails with it. */
  async #settled(entry: Entry, deadline = performance.now() + this.#waitMs): Promise<void> {
    const { operation, state } = entry;
    if (operation === undefined) return;
    const timeout = Promise.withResolvers<"timeout">();
    const timer = setTimeout(() => timeout.resolve("timeout"), Math.max(0, deadline - performance.now()));
    try {
      const outcome = await Promise.race([
        operation.then(
          () => "ended" as const,
          () => "ended" as const,
        ),
        timeout.promise,
      ]);
      if (outcome === "timeout")
        throw conflict(entry.id, state, `that did not end within ${this.#waitMs / 1000} s`);
    } finally {
      clearTimeout(timer);
    }
  }

  /** Error 404 for unknown ids and those on their way out. */
  #find(id: string): Entry {
    const entry = this.#entries.get(id);
    if (entry === undefined || entry.state === "killing") throw notFound(id);
    return entry;
  }

  /** Lists of thousands are read far more often than one of them changes. */
  #view(entry: Entry): SandboxRecord {
    const { record, state, deadlineMs, seen } = entry;
    if (seen?.record === record && seen.state === state && seen.deadlineMs === deadlineMs) return seen.view;
    const view = { id: entry.id, ...record, state, endAt: new Date(deadlineMs).toISOString() };
    entry.seen = { record, state, deadlineMs, view };
    return view;
  }

  #setDeadline(entry: Entry, timeoutSeconds: number, mode: "exact" | "extend"): void {
    const wanted = this.#now() + timeoutSeconds * 1000;
    if (mode === "extend" && wanted <= entry.deadlineMs) return;
    entry.deadlineMs = wanted;
    entry.record = { ...entry.record, timeoutSeconds };
    entry.evictFailures = 0;
    entry.nextEvictMs = 0;
  }

  #checkTimeout(seconds: number): void {
    if (Number.isInteger(seconds) && seconds >= 0 && seconds <= MAX_TIMEOUT_SECONDS) return;
    throw new AenvError({
      code: "invalid_timeout",
      status: 400,
      message: `timeout ${seconds} is not a whole number of seconds from 0 to ${MAX_TIMEOUT_SECONDS}`,
    });
  }

  #pin(entry: Entry, files: readonly string[]): void {
    for (const file of files) {
      this.#pinCounts.set(file, (this.#pinCounts.get(file) ?? 0) + 1);
      this.#pinned.add(file);
    }
    const before = entry.pins;
    entry.pins = files;
    this.#unpin(before);
  }

  #unpin(files: readonly string[]): void {
    for (const file of files) {
      const users = (this.#pinCounts.get(file) ?? 0) - 1;
      if (users > 0) {
        this.#pinCounts.set(file, users);
        continue;
      }
      this.#pinCounts.delete(file);
      this.#pinned.delete(file);
    }
  }

  #remove(entry: Entry): void {
    this.#entries.delete(entry.id);
    entry.operation = undefined;
    this.#unpin(entry.pins);
    entry.pins = [];
  }

  #emit(kind: LifecycleEventKind, sandboxId: string, more: Partial<LifecycleEvent> = {}): void {
    try {
      this.#options.onEvent?.({ kind, sandboxId, atMs: this.#now(), ...more });
    } catch (error) {
      this.#log.error({ err: error, sandboxId, event: kind }, "an observer of lifecycle events failed");
    }
  }

  #inBackground(what: string, work: Promise<unknown>): void {
    const task: Promise<void> = work
      .then(
        () => undefined,
        (error: unknown) => this.#log.error({ err: error }, what),
      )
      .finally(() => this.#background.delete(task));
    this.#background.add(task);
  }

  // ---- instances --------------------------------------------------------------------------------

  #identity(entry: Entry): GuestIdentity {
    return {
      sandboxId: entry.id,
      templateId: entry.record.templateId,
      ...(entry.record.secure ? { accessToken: this.accessToken(entry.id) } : {}),
      envVars: entry.startup.envVars,
      ...(entry.startup.defaultUser === undefined ? {} : { defaultUser: entry.startup.defaultUser }),
      ...(entry.startup.defaultWorkdir === undefined ? {} : { defaultWorkdir: entry.startup.defaultWorkdir }),
    };
  }

  /** Makes the started VM this sandbox's instance. From here on its end is noticed. */
  #attach(entry: Entry, running: RunningSandbox): void {
    const instance: Instance = { id: newId(), running, gone: new AbortController() };
    entry.instance = instance;
    entry.record = {
      ...entry.record,
      envdVersion: running.envdVersion,
      cpuCount: running.shape.vcpuCount,
      memoryMiB: running.shape.memoryMiB,
      diskSizeMiB: Math.ceil(running.diskSizeBytes / 1048576),
    };
    running.exited.then((exit) => {
      instance.exit = exit;
      // During an operation the operation notices; it ends in #rest.
      if (entry.instance === instance && entry.state === "running") this.#reap(entry, instance);
    });
  }

  /**
   * Back to running: the last thing an operation does. A death that happened meanwhile is dealt with
   * right after.
   */
  #rest(entry: Entry): void {
    this.#move(entry, "running");
    const { instance } = entry;
    if (instance?.exit === undefined) return;
    queueMicrotask(() => {
      if (entry.instance === instance && entry.state === "running") this.#reap(entry, instance);
    });
  }

  #reap(entry: Entry, instance: Instance): void {
    this.#log.error(
      { sandboxId: entry.id, exit: instance.exit },
      "the VM of a running sandbox ended; the sandbox is gone",
    );
    this.#emit("vm_ended", entry.id, { reason: JSON.stringify(instance.exit) });
    const ended = this.#operate(entry, "killing", () => this.#discard(entry, instance, "its VM ended"));
    this.#inBackground("a dead sandbox was not cleaned up", ended);
  }

  #cut(instance: Instance, why: string): void {
    instance.gone.abort(new Error(why));
  }

  /** Ends a sandbox for good, whatever its VM says to it. State must be `killing`. */
  async #discard(entry: Entry, instance: Instance, why: string): Promise<void> {
    this.#cut(instance, why);
    try {
      await instance.running.stop();
    } catch (error) {
      this.#log.error(
        { err: error, sandboxId: entry.id },
        "a VM could not be stopped; the next start cleans up",
      );
    }
    entry.instance = undefined;
    this.#remove(entry);
    this.#emit("lost", entry.id, { reason: why });
    await removeTree(join(this.#options.artifactsDir, entry.id));
  }

  // ---- create -----------------------------------------------------------------------------------

  async create(request: CreateSandboxRequest): Promise<SandboxRecord> {
    this.#refuseWhenClosing();
    this.#checkTimeout(request.timeoutSeconds);
    refuseEgressRules(request);
    using lease = await this.#options.repository.lease(request.template);
    if (lease === undefined) {
      throw new AenvError({
        code: "template_not_found",
        status: 404,
        message: `template ${request.template} was not found`,
        remediation: "list the templates with `aenv template list`, or make one with `aenv pull`",
      });
    }
    const { record: snapshot } = lease;
    const { committed } = snapshot;
    if (committed === undefined) {
      const status = snapshot.source.kind === "template" ? snapshot.source.build.status : "not committed";
      throw new AenvError({
        code: "template_not_ready",
        status: 400,
        message: `template ${request.template} has no ready build (its build is: ${status})`,
        remediation:
          status === "error" ? "look at the build's log and build it again" : "wait until the build is ready",
      });
    }
    this.#refuseWhenClosing();
    const { context } = committed;
    const now = this.#now();
    const { template: _, ...wishes } = request;
    const alias = snapshot.aliases[0];
    const entry: Entry = {
      id: newId(),
      state: "creating",
      record: {
        ...wishes,
        templateId: snapshot.templateId,
        ...(alias === undefined ? {} : { alias }),
        startedAt: new Date(now).toISOString(),
        endAt: new Date(now + request.timeoutSeconds * 1000).toISOString(),
        ...snapshot.resources,
        envdVersion: committed.state.envdVersion,
      },
      deadlineMs: now + request.timeoutSeconds * 1000,
      startup: {
        envVars: { ...context.envVars, ...request.envVars },
        ...(context.user === undefined || context.user === "" ? {} : { defaultUser: context.user }),
        ...(context.workdir === undefined || context.workdir === ""
          ? {}
          : { defaultWorkdir: context.workdir }),
      },
      pins: [],
      timings: {},
      evicting: false,
      evictFailures: 0,
      nextEvictMs: 0,
    };
    this.#entries.set(entry.id, entry);
    this.#pin(entry, digestFiles(committed.state));
    this.#emit("creating", entry.id);
    const began = performance.now();
    return this.#track(entry, async () => {
      try {
        const running = await this.#startInstance(entry, committed.state);
        this.#attach(entry, running);
        entry.timings.create = running.timings;
        this.#setDeadline(entry, request.timeoutSeconds, "exact");
        this.#rest(entry);
        this.#emit("created", entry.id, { durationMs: performance.now() - began, phases: running.timings });
        return this.#view(entry);
      } catch (error) {
        this.#remove(entry);
        this.#emit("create_failed", entry.id, {
          durationMs: performance.now() - began,
          reason: errorChain(error)[0] ?? "unknown cause",
        });
        if (error instanceof AenvError && error.code === "shutting_down") throw error;
        this.#log.error(
          { err: error, sandboxId: entry.id, template: request.template },
          "sandbox was not created",
        );
        throw failure(
          "sandbox_create_failed",
          `no sandbox could be started from template ${request.template}`,
          error,
        );
      }
    });
  }

  /** Starts a VM from a captured state; on return it runs and the server is not shutting down. */
  async #startInstance(entry: Entry, state: CapturedState): Promise<RunningSandbox> {
    const running = await this.#starts.run(async () => {
      // It may have waited for its turn.
      this.#refuseWhenClosing();
      return this.#options.sandboxes.resume({ identity: this.#identity(entry), state });
    });
    if (this.#closing === undefined) return running;
    await running.stop();
    throw shuttingDown();
  }

  // ---- looking ----------------------------------------------------------------------------------

  get(id: string): SandboxRecord {
    return this.#view(this.#find(id));
  }

  list(): SandboxRecord[] {
    return [...this.#entries.values()]
      .filter((entry) => entry.state !== "creating" && entry.state !== "killing")
      .map((entry) => this.#view(entry));
  }

  access(id: string): SandboxAccess | undefined {
    const entry = this.#entries.get(id);
    if (entry === undefined) return undefined;
    return {
      secure: entry.record.secure,
      allowPublicTraffic: entry.record.network?.allowPublicTraffic ?? true,
    };
  }

  route(id: string): RouteLookup {
    const entry = this.#entries.get(id);
    // On its way out is gone, for traffic as for every other request.
    if (entry === undefined || entry.state === "killing") return { kind: "not_found" };
    if (entry.state === "paused") return { kind: "paused", autoResume: entry.record.autoResume };
    if (entry.state !== "running") return { kind: "transitional", state: entry.state };
    const { instance } = entry;
    if (instance === undefined || instance.exit !== undefined) return { kind: "route_missing" };
    return {
      kind: "ready",
      hostAddress: instance.running.hostAddress,
      instanceId: instance.id,
      gone: instance.gone.signal,
    };
  }

  accessToken(id: string): string {
    return deriveEnvdToken(this.#options.tokenSeed, id);
  }

  trafficToken(id: string): string {
    return deriveTrafficToken(this.#options.tokenSeed, id);
  }

  timings(id: string): Readonly<Record<string, PhaseTimings>> {
    return this.#find(id).timings;
  }

  // ---- kill -------------------------------------------------------------------------------------

  async kill(id: string): Promise<void> {
    this.#refuseWhenClosing();
    if (!this.#entries.has(id)) throw notFound(id);
    await this.#kill(id);
  }

  async #kill(id: string): Promise<void> {
    const deadline = performance.now() + this.#waitMs;
    for (;;) {
      const entry = this.#entries.get(id);
      // Gone while we waited: someone else's deletion, and ours all the same.
      if (entry === undefined) return;
      if (entry.state === "running" || entry.state === "paused") {
        return this.#operate(entry, "killing", () => this.#end(entry));
      }
      await this.#settled(entry, deadline);
    }
  }

  async #end(entry: Entry): Promise<void> {
    const { instance, paused } = entry;
    if (instance !== undefined) {
      this.#cut(instance, "the sandbox was deleted");
      try {
        await instance.running.stop();
      } catch (error) {
        instance.gone = new AbortController();
        this.#rest(entry);
        throw failure("sandbox_stop_failed", `sandbox ${entry.id} could not be stopped and runs on`, error);
      }
      entry.instance = undefined;
    }
    if (paused !== undefined) {
      try {
        this.#db.delete(entry.id);
      } catch (error) {
        this.#move(entry, "paused");
        throw failure("persistence_failed", `paused sandbox ${entry.id} could not be deleted`, error);
      }
    }
    this.#remove(entry);
    // The record is gone: what cannot be removed now is swept at the next start.
    try {
      await removeTree(join(this.#options.artifactsDir, entry.id));
    } catch (error) {
      this.#log.error({ err: error, sandboxId: entry.id }, "files of a deleted sandbox were not removed");
    }
    this.#log.info({ sandboxId: entry.id }, "sandbox deleted");
    this.#emit("deleted", entry.id);
  }

  // ---- pause ------------------------------------------------------------------------------------

  async pause(id: string): Promise<void> {
    this.#refuseWhenClosing();
    const entry = this.#find(id);
    if (entry.state === "pausing") {
      await entry.operation;
      return;
    }
    if (entry.state === "paused") throw conflict(id, entry.state, "it is paused already");
    if (entry.state !== "running") throw conflict(id, entry.state, "only a running sandbox can be paused");
    await this.#operate(entry, "pausing", () => this.#pause(entry));
  }

  /** State is `pausing`; ends in `paused`, in `running` as before, or without the sandbox. */
  async #pause(entry: Entry): Promise<void> {
    const { instance } = entry;
    assert(instance !== undefined, `running sandbox ${entry.id} has an instance`);
    const { running } = instance;
    const startedAt = performance.now();
    const artifactDir = join(this.#options.artifactsDir, entry.id, newId());
    this.#cut(instance, "the sandbox is being paused");
    const failed = (error: unknown): void =>
      this.#emit("pause_failed", entry.id, {
        durationMs: performance.now() - startedAt,
        reason: errorChain(error)[0] ?? "unknown cause",
      });

    const backToWork = async (): Promise<void> => {
      if (instance.exit === undefined) {
        try {
          // Its clock stood still.
          await running.reinit(this.#identity(entry));
        } catch (error) {
          this.#log.warn({ err: error, sandboxId: entry.id }, "guest clock was not set after a failed pause");
        }
      }
      instance.gone = new AbortController();
      this.#rest(entry);
    };
    const lost = async (error: unknown): Promise<never> => {
      failed(error);
      this.#log.error({ err: error, sandboxId: entry.id }, "sandbox could not be paused and cannot go on");
      this.#move(entry, "killing");
      await this.#discard(entry, instance, "the sandbox was lost");
      throw failure("capture_terminal", `sandbox ${entry.id} could not be paused and was lost`, error);
    };

    let state: CapturedState;
    try {
      const captured = await running.capture(artifactDir);
      state = captured.state;
      entry.timings.pause = captured.timings;
    } catch (error) {
      if (error instanceof AenvError && error.code === "capture_terminal") return lost(error);
      await removeTree(artifactDir).catch((cleanup: unknown) =>
        this.#log.warn({ err: cleanup, artifactDir }, "an incomplete capture was not removed"),
      );
      this.#log.error({ err: error, sandboxId: entry.id }, "pause failed; the sandbox runs on");
      await backToWork();
      failed(error);
      throw failure("pause_failed", `sandbox ${entry.id} could not be paused and runs on`, error);
    }

    try {
      const { id, state: _, ...record } = this.#view(entry);
      this.#db.put({ version: 1, record: { id, ...record }, startup: entry.startup, artifactDir, state });
    } catch (error) {
      try {
        await running.resumeInPlace();
      } catch (resumeError) {
        return lost(new AggregateError([error, resumeError], errorChain(error).join(": ")));
      }
      await removeTree(artifactDir).catch((cleanup: unknown) =>
        this.#log.warn({ err: cleanup, artifactDir }, "an unused capture was not removed"),
      );
      await backToWork();
      failed(error);
      throw failure("pause_failed", `sandbox ${entry.id} could not be paused and runs on`, error);
    }

    // Durable from here on. The stop comes before the state: a resume must not meet the old VM.
    entry.paused = { artifactDir, state };
    entry.instance = undefined;
    this.#pin(entry, digestFiles(state));
    try {
      await running.stop();
    } catch (error) {
      this.#log.error({ err: error, sandboxId: entry.id }, "the VM of a paused sandbox could not be stopped");
    }
    this.#move(entry, "paused");
    const totalMs = performance.now() - startedAt;
    this.#log.info({ sandboxId: entry.id, timings: entry.timings.pause, totalMs }, "sandbox paused");
    this.#emit("paused", entry.id, {
      durationMs: totalMs,
      ...(entry.timings.pause === undefined ? {} : { phases: entry.timings.pause }),
    });
    this.#inBackground("old captures were not removed", this.#removeOldGenerations(entry));
  }

  /** Captures other than the current one. Layers they share with it have a link of their own there. */
  async #removeOldGenerations(entry: Entry): Promise<void> {
    const root = join(this.#options.artifactsDir, entry.id);
    const keep = entry.paused?.artifactDir;
    for (const name of await namesIn(root)) {
      const dir = join(root, name);
      if (dir !== keep) await removeTree(dir);
    }
  }

  // ---- resume, connect, deadlines ---------------------------------------------------------------

  async resume(id: string, timeoutSeconds: number): Promise<SandboxRecord> {
    this.#refuseWhenClosing();
    this.#checkTimeout(timeoutSeconds);
    const deadline = performance.now() + this.#waitMs;
    for (;;) {
      const entry = this.#find(id);
      switch (entry.state) {
        case "running":
          this.#setDeadline(entry, timeoutSeconds, "exact");
          return this.#view(entry);
        case "paused":
          await this.#operate(entry, "resuming", () => this.#resume(entry, timeoutSeconds));
          return this.#view(entry);
        case "resuming":
          await entry.operation;
          continue;
        case "pausing":
          await this.#settled(entry, deadline);
          continue;
        default:
          throw conflict(id, entry.state, "it cannot be resumed now");
      }
    }
  }

  async connect(id: string, timeoutSeconds: number): Promise<{ record: SandboxRecord; resumed: boolean }> {
    this.#refuseWhenClosing();
    this.#checkTimeout(timeoutSeconds);
    const deadline = performance.now() + this.#waitMs;
    for (;;) {
      const entry = this.#find(id);
      switch (entry.state) {
        case "running":
          this.#setDeadline(entry, timeoutSeconds, "extend");
          return { record: this.#view(entry), resumed: false };
        case "paused":
          await this.#operate(entry, "resuming", () => this.#resume(entry, timeoutSeconds));
          return { record: this.#view(entry), resumed: true };
        case "resuming":
          await entry.operation;
          continue;
        default:
          await this.#settled(entry, deadline);
      }
    }
  }

  /** State is `resuming`; ends in `running`, or in `paused` with everything intact. */
  async #resume(entry: Entry, timeoutSeconds: number): Promise<void> {
    const { paused } = entry;
    assert(paused !== undefined, `paused sandbox ${entry.id} has a captured state`);
    const startedAt = performance.now();
    let running: RunningSandbox | undefined;
    try {
      this.#db.setLifecycle(entry.id, "resuming");
      running = await this.#startInstance(entry, paused.state);
      this.#db.delete(entry.id);
    } catch (error) {
      try {
        await running?.stop();
      } catch (stopError) {
        this.#log.error(
          { err: stopError, sandboxId: entry.id },
          "the VM of a failed resume could not be stopped",
        );
      }
      try {
        this.#db.setLifecycle(entry.id, "paused");
      } catch (storeError) {
        // `resuming` means the same to the next start.
        this.#log.error({ err: storeError, sandboxId: entry.id }, "lifecycle mark could not be reset");
      }
      this.#move(entry, "paused");
      this.#emit("resume_failed", entry.id, {
        durationMs: performance.now() - startedAt,
        reason: errorChain(error)[0] ?? "unknown cause",
      });
      if (error instanceof AenvError && error.code === "shutting_down") throw error;
      this.#log.error({ err: error, sandboxId: entry.id }, "resume failed; the sandbox stays paused");
      throw failure(
        "resume_failed",
        `sandbox ${entry.id} could not be resumed and stays paused`,
        error,
        "retry; when the cause cannot be removed, delete the sandbox",
      );
    }
    entry.paused = undefined;
    this.#attach(entry, running);
    entry.timings.resume = running.timings;
    this.#setDeadline(entry, timeoutSeconds, "exact");
    this.#rest(entry);
    this.#emit("resumed", entry.id, { durationMs: performance.now() - startedAt, phases: running.timings });
    // The running sandbox holds links of its own to the layers it needs.
    this.#inBackground("a used capture was not removed", removeTree(paused.artifactDir));
  }

  /** Waits for a state in which deadlines can be set. */
  async #forDeadline(id: string): Promise<Entry> {
    const deadline = performance.now() + this.#waitMs;
    for (;;) {
      const entry = this.#find(id);
      if (entry.state === "running") return entry;
      if (entry.state === "paused" || entry.state === "pausing") {
        throw conflict(id, entry.state, "only a running sandbox has a deadline");
      }
      await this.#settled(entry, deadline);
    }
  }

  async setTimeout(id: string, timeoutSeconds: number): Promise<void> {
    this.#refuseWhenClosing();
    this.#checkTimeout(timeoutSeconds);
    this.#setDeadline(await this.#forDeadline(id), timeoutSeconds, "exact");
  }

  async refresh(id: string, durationSeconds?: number): Promise<void> {
    this.#refuseWhenClosing();
    const seconds = durationSeconds ?? this.#options.defaultTimeoutSeconds;
    this.#checkTimeout(seconds);
    this.#setDeadline(await this.#forDeadline(id), seconds, "extend");
  }

  async autoResume(id: string): Promise<void> {
    this.#refuseWhenClosing();
    const deadline = performance.now() + this.#waitMs;
    for (;;) {
      const entry = this.#find(id);
      if (entry.state === "running") return;
      if (entry.state === "paused") {
        if (!entry.record.autoResume) {
          throw new AenvError({
            code: "sandbox_paused",
            status: 410,
            message: `sandbox ${id} is paused and traffic does not resume it`,
            remediation: "resume it through the API",
          });
        }
        const seconds = Math.max(entry.record.timeoutSeconds, this.#options.autoResumeMinTimeoutSeconds);
        this.#operate(entry, "resuming", () => this.#resume(entry, seconds)).catch(() => undefined);
      } else if (entry.state !== "resuming") {
        throw new AenvError({
          code: "sandbox_not_running",
          status: 410,
          message: `sandbox ${id} is ${entry.state}`,
        });
      }
      const { operation } = entry;
      try {
        await this.#settled(entry, deadline);
      } catch (cause) {
        throw new AenvError({
          code: "auto_resume_timeout",
          status: 504,
          message: `sandbox ${id} was not resumed within ${this.#waitMs / 1000} s`,
          cause,
        });
      }
      try {
        await operation;
      } catch (cause) {
        throw new AenvError({
          code: "auto_resume_failed",
          status: 502,
          message: `sandbox ${id} could not be resumed`,
          cause,
        });
      }
    }
  }

  // ---- eviction ---------------------------------------------------------------------------------

  #evictExpired(): void {
    if (this.#closing !== undefined) return;
    const now = this.#now();
    for (const entry of this.#entries.values()) {
      if (entry.state !== "running" || entry.evicting || entry.deadlineMs > now || entry.nextEvictMs > now)
        continue;
      entry.evicting = true;
      this.#inBackground(
        "eviction failed",
        this.#evictions
          .run(() => this.#evict(entry))
          .finally(() => {
            entry.evicting = false;
          }),
      );
    }
  }

  async #evict(entry: Entry): Promise<void> {
    // It waited for its turn: the deadline may have moved, another operation may have begun.
    if (this.#closing !== undefined || entry.state !== "running" || entry.deadlineMs > this.#now()) return;
    this.#emit("expired", entry.id, { reason: `its action at the deadline is: ${entry.record.onTimeout}` });
    try {
      if (entry.record.onTimeout === "pause") await this.#pauseIfRunning(entry);
      else await this.#kill(entry.id);
      this.#log.info(
        { sandboxId: entry.id, onTimeout: entry.record.onTimeout },
        "sandbox reached its deadline",
      );
    } catch (error) {
      // Each failed pause stops the guest for a moment: do not try every second.
      entry.evictFailures += 1;
      const backoff = Math.min(
        this.#options.evictIntervalMs * 2 ** entry.evictFailures,
        MAX_EVICTION_BACKOFF_MS,
      );
      entry.nextEvictMs = this.#now() + backoff;
      this.#log.error(
        { err: error, sandboxId: entry.id, backoffMs: backoff },
        "expired sandbox was not evicted",
      );
    }
  }

  // ---- garbage ----------------------------------------------------------------------------------

  async collectGarbage(): Promise<{ readonly removedFiles: number; readonly removedBytes: number }> {
    return this.#options.repository.collect(this.#pinned);
  }
}

async function namesIn(dir: string): Promise<string[]> {
  try {
    return await readdir(dir);
  } catch (error) {
    // The sandbox was deleted meanwhile.
    if (errorCode(error) === "ENOENT") return [];
    throw error;
  }
}

/** Egress rules are not enforced yet: a sandbox must not run under rules that nobody applies. */
function refuseEgressRules(request: CreateSandboxRequest): void {
  const asked = [
    ...(request.allowInternetAccess === false ? ["allow_internet_access: false"] : []),
    ...((request.network?.allowOut?.length ?? 0) > 0 ? ["network.allowOut"] : []),
    ...((request.network?.denyOut?.length ?? 0) > 0 ? ["network.denyOut"] : []),
  ];
  if (asked.length === 0) return;
  throw new AenvError({
    code: "unsupported_field",
    status: 400,
    message: `not supported by this server yet: ${asked.join(", ")}`,
    remediation: "leave egress rules out; sandboxes never reach the host or each other in any case",
  });
}

export function createOrchestrator(options: OrchestratorOptions): NodeOrchestrator {
  return new SandboxOrchestrator(options);
}
