import { readdir } from "node:fs/promises";
import { dirname, join } from "node:path";
import { errorCode, makeDirDurable, removeTree } from "../lib/durable.ts";
import { AenvError, assert, errorChain } from "../lib/errors.ts";
import { Gate } from "../lib/gate.ts";
import { newId } from "../lib/ids.ts";
import type { Logger } from "../lib/log.ts";
import { deriveEnvdToken, deriveTrafficToken } from "../lib/tokens.ts";
import { type EgressPolicy, parseEgressPolicy } from "../network/index.ts";
import type { SlotPolicyReport } from "../network/types.ts";
import {
  type Capture,
  type CapturedState,
  type DiskCapture,
  type GuestIdentity,
  hasMemory,
  type PausedState,
  type PhaseTimings,
  type RunningSandbox,
  type SandboxFactory,
} from "../sandbox/types.ts";
import { contextOfImage, pinnedReference } from "../snapshot/index.ts";
import type { SnapshotRecord, SnapshotRepository } from "../snapshot/types.ts";
import { Capacity, type CapacityLimits, type Seat } from "./capacity.ts";
import { allowedBootWords, type ColdStartOptions, coldDiskSize, coldDisks, coldStartOff } from "./cold.ts";
import { plannedDrives } from "./drives.ts";
import {
  autoResumes,
  type Entry,
  type Instance,
  isoTime,
  move,
  newEntry,
  operate,
  Patience,
  startupOf,
  track,
  viewOf,
} from "./entry.ts";
import { type HealthOptions, HealthWatch } from "./health.ts";
import { digestFiles, Pins } from "./pins.ts";
import { checkSnapshotName, getSnapshot, listSnapshots, publishSnapshot } from "./snapshots.ts";
import { conflict, failure, notFound, shuttingDown, wakeUp } from "./states.ts";
import { isNewDatabase, type RunningDocument, SandboxStore } from "./store.ts";
import type {
  CreateColdSandboxRequest,
  CreateSandboxRequest,
  ForkOutcome,
  ForkRequest,
  LifecycleEvent,
  LifecycleEventKind,
  NetworkUpdate,
  NodeOrchestrator,
  PauseOptions,
  ResumeOptions,
  RouteLookup,
  SandboxAccess,
  SandboxRecord,
  SandboxState,
  SnapshotFilter,
  SnapshotRequest,
  StartReport,
} from "./types.ts";
import { MAX_FORK_CHILDREN } from "./types.ts";

export interface OrchestratorOptions {
  readonly repository: SnapshotRepository;
  readonly sandboxes: SandboxFactory;
  /** Absent: sandboxes are started from templates only. */
  readonly cold?: ColdStartOptions;
  /** SQLite file with the sandboxes. */
  readonly statePath: string;
  /** Captures of paused sandboxes: `<id>/<generation>/`. */
  readonly artifactsDir: string;
  readonly tokenSeed: string;
  readonly defaultTimeoutSeconds: number;
  readonly autoResumeMinTimeoutSeconds: number;
  readonly evictIntervalMs: number;
  /** VMs that start at once; more wait. Default 8. */
  readonly maxConcurrentStarts?: number;
  /** Starts that may wait; more are refused with 429. Default 256. */
  readonly maxQueuedStarts?: number;
  readonly capacity?: CapacityLimits;
  /** How the guests' agents are watched. Absent: they are not. */
  readonly health?: HealthOptions;
  readonly log: Logger;
  /** Told of everything that happens to a sandbox, in order; must not block. */
  readonly onEvent?: (event: LifecycleEvent) => void;
  /** Milliseconds since the epoch; tests give their own clock. */
  readonly now?: () => number;
  /** Longest wait for another operation on the same sandbox. */
  readonly transitionWaitMs?: number;
}

/** States in which the guest's network leads to the sandbox. */
const ROUTED: ReadonlySet<SandboxState> = new Set(["running", "snapshotting", "forking"]);
const DEFAULT_QUEUED_STARTS = 256;
const TRANSITION_WAIT_MS = 60_000;
const CONCURRENT_EVICTIONS = 4;
const CONCURRENT_ADOPTIONS = 16;
const ADOPTION_TRIES = 3;
/** Captures that children start from, in the directory of the artifacts; none outlives the process. */
const CHECKPOINTS = "checkpoints";
const MAX_EVICTION_BACKOFF_MS = 60_000;
/** Pauses without memory that fail at a deadline; the next one keeps it, as nothing is to run for ever. */
const DISK_EVICTION_TRIES = 3;
const SHUTDOWN_PASSES = 3;
/** Ten years: past it a date is a mistake, not a wish. */
const MAX_TIMEOUT_SECONDS = 315_360_000;

/** How the VM of a new sandbox comes to be. */
interface LaunchPlan {
  /** Content-addressed files it needs, as far as they are known. */
  readonly files: readonly string[];
  readonly start: () => Promise<{ readonly running: RunningSandbox; readonly timings: PhaseTimings }>;
  readonly cold?: true;
}

/** How a start is told of. */
interface LaunchWords {
  readonly done: LifecycleEventKind;
  readonly failed: LifecycleEventKind;
  readonly code: string;
  readonly message: string;
}

/** How a capture that failed is told of. */
interface CaptureWords {
  readonly failed: LifecycleEventKind;
  /** `could not be paused` */
  readonly did: string;
  /** What it was captured into; nothing of it stays. */
  readonly dir: string;
  readonly startedAt: number;
  /** Of the disks alone. */
  readonly cold?: true;
}

class SandboxOrchestrator implements NodeOrchestrator {
  readonly #options: OrchestratorOptions;
  readonly #log: Logger;
  readonly #now: () => number;
  readonly #waitMs: number;
  readonly #entries = new Map<string, Entry>();
  readonly #starts: Gate;
  readonly #evictions = new Gate(CONCURRENT_EVICTIONS, "evictions", Number.MAX_SAFE_INTEGER);
  /** Of sandboxes that are paused without memory: these wait for what their guests do, and hold up one another alone. */
  readonly #diskEvictions = new Gate(CONCURRENT_EVICTIONS, "evictions", Number.MAX_SAFE_INTEGER);
  readonly #pins = new Pins();
  readonly #capacity: Capacity;
  readonly #background = new Set<Promise<void>>();
  #store: SandboxStore | undefined;
  #timer: ReturnType<typeof setInterval> | undefined;
  #health: HealthWatch | undefined;
  #closing: Promise<void> | undefined;
  /** Aborts with the shutdown: what a new sandbox waits for need not come any more. */
  readonly #ending = new AbortController();

  constructor(options: OrchestratorOptions) {
    this.#options = options;
    this.#log = options.log;
    this.#now = options.now ?? Date.now;
    this.#waitMs = options.transitionWaitMs ?? TRANSITION_WAIT_MS;
    this.#starts = new Gate(
      options.maxConcurrentStarts ?? 8,
      "sandbox starts",
      options.maxQueuedStarts ?? DEFAULT_QUEUED_STARTS,
    );
    this.#capacity = new Capacity(options.capacity ?? {});
  }

  get #db(): SandboxStore {
    assert(this.#store !== undefined, "the orchestrator was started");
    return this.#store;
  }

  // ---- start and end ----------------------------------------------------------------------------

  async start(): Promise<StartReport> {
    const { statePath, artifactsDir, sandboxes, evictIntervalMs, health } = this.#options;
    await makeDirDurable(dirname(statePath), 0o700);
    await makeDirDurable(artifactsDir, 0o700);
    if (isNewDatabase(statePath)) await refuseForgotten(statePath, artifactsDir);
    this.#store = new SandboxStore(statePath, this.#log);
    const { documents, ids } = this.#store.load();
    for (const document of documents) {
      const { id, ...record } = document.record;
      const entry = newEntry({
        id,
        state: "paused",
        record,
        deadlineMs: Date.parse(record.endAt),
        startup: document.startup,
        paused: { artifactDir: document.artifactDir, state: document.state },
      });
      this.#pin(entry, digestFiles(document.state));
      this.#entries.set(id, entry);
    }
    // Before the clean-up, which takes away every VM that nobody adopted.
    const { adopted, lost } = await this.#adoptAll();
    await sandboxes.cleanUp();
    // What no record refers to was being written, or being removed, when an earlier process ended.
    for (const name of await readdir(artifactsDir)) {
      const entry = this.#entries.get(name);
      if (entry?.paused !== undefined) await this.#removeOldGenerations(entry);
      else if (!ids.has(name)) await removeTree(join(artifactsDir, name));
    }
    const report: StartReport = { paused: documents.length, adopted, lost };
    if (documents.length + adopted + lost.length > 0) this.#log.info(report, "sandboxes restored");
    this.#timer = setInterval(() => this.#evictExpired(), evictIntervalMs);
    if (health !== undefined) {
      this.#health = new HealthWatch({
        entries: this.#entries,
        options: health,
        log: this.#log,
        now: this.#now,
        emit: (kind, sandboxId, more) => this.#emit(kind, sandboxId, more),
      });
    }
    return report;
  }

  // ---- adoption ---------------------------------------------------------------------------------

  async #adoptAll(): Promise<{ adopted: number; lost: { id: string; reason: string }[] }> {
    const gate = new Gate(CONCURRENT_ADOPTIONS, "adoptions", Number.MAX_SAFE_INTEGER);
    const lost: { id: string; reason: string }[] = [];
    let adopted = 0;
    // A paused record is the newer one: it was written in the same step that removes the other.
    const documents = this.#db.loadRunning().filter(({ record }) => !this.#entries.has(record.id));
    await Promise.all(
      documents.map((document) =>
        gate.run(async () => {
          const { id } = document.record;
          try {
            await this.#adopt(document);
            adopted += 1;
          } catch (error) {
            const reason = errorChain(error).join(": ");
            this.#log.error({ err: error, sandboxId: id }, "a running sandbox could not be taken over");
            this.#db.deleteRunning(id);
            this.#emit("lost", id, { reason });
            lost.push({ id, reason });
          }
        }),
      ),
    );
    return { adopted, lost };
  }

  async #adopt(document: RunningDocument): Promise<void> {
    const { id, ...record } = document.record;
    const entry = newEntry({
      id,
      state: "running",
      record,
      deadlineMs: Date.parse(record.endAt),
      startup: document.startup,
    });
    for (let attempt = 1; ; attempt++) {
      try {
        const running = await this.#options.sandboxes.adopt(this.#identity(entry));
        entry.seat = this.#capacity.take(record.memoryMiB, "force");
        this.#pin(entry, document.pins);
        this.#entries.set(id, entry);
        this.#attach(entry, running);
        this.#emit("adopted", id);
        return;
      } catch (error) {
        // That something is gone is final; that something did not answer need not be.
        const gone = error instanceof AenvError && error.code === "sandbox_not_adoptable";
        if (gone || attempt === ADOPTION_TRIES) throw error;
        this.#log.warn({ err: error, sandboxId: id, attempt }, "adoption failed, trying again");
      }
    }
  }

  shutdown(): Promise<void> {
    this.#closing ??= this.#shutdown();
    return this.#closing;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.shutdown();
  }

  async #shutdown(): Promise<void> {
    this.#ending.abort(shuttingDown());
    clearInterval(this.#timer);
    this.#health?.[Symbol.dispose]();
    const failures = new Map<string, unknown>();
    for (let pass = 0; pass < SHUTDOWN_PASSES; pass++) {
      const open = [...this.#entries.values()].filter((entry) => entry.state !== "paused");
      if (open.length === 0) break;
      await Promise.all(
        open.map(async (entry) => {
          try {
            if (entry.state === "running") await this.#evictions.run(() => this.#pauseIfRunning(entry));
            else await new Patience(this.#waitMs).settled(entry);
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

  async #pauseIfRunning(entry: Entry, memory = true): Promise<void> {
    if (entry.state === "running") await this.#beginPause(entry, memory);
  }

  async #beginPause(entry: Entry, memory: boolean): Promise<void> {
    entry.pausesMemory = memory;
    await operate(entry, "pausing", () => this.#pause(entry, memory));
  }

  #refuseWhenClosing(): void {
    if (this.#closing !== undefined) throw shuttingDown();
  }

  // ---- state ------------------------------------------------------------------------------------

  /** Error 404 for unknown ids and those on their way out. */
  #find(id: string): Entry {
    const entry = this.#entries.get(id);
    if (entry === undefined || entry.state === "killing") throw notFound(id);
    return entry;
  }

  #setDeadline(entry: Entry, timeoutSeconds: number, mode: "exact" | "extend"): void {
    const wanted = this.#now() + timeoutSeconds * 1000;
    if (mode === "extend" && wanted <= entry.deadlineMs) return;
    entry.deadlineMs = wanted;
    entry.record = { ...entry.record, timeoutSeconds };
    entry.evictFailures = 0;
    entry.nextEvictMs = 0;
  }

  /** The deadline of a running sandbox; what the caller is told outlives this process. */
  #moveDeadline(entry: Entry, timeoutSeconds: number, mode: "exact" | "extend"): void {
    const { deadlineMs, record } = entry;
    this.#setDeadline(entry, timeoutSeconds, mode);
    if (entry.deadlineMs === deadlineMs) return;
    try {
      this.#db.putRunning(this.#runningDocument(entry));
    } catch (error) {
      entry.deadlineMs = deadlineMs;
      entry.record = record;
      throw error;
    }
  }

  #runningDocument(entry: Entry): RunningDocument {
    const { state: _, ...record } = viewOf(entry);
    return { version: 1, record, startup: entry.startup, pins: entry.pins };
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
    this.#pins.add(files);
    this.#pins.remove(entry.pins);
    entry.pins = files;
  }

  /** Gives its part of the node back. */
  #leave(entry: Entry): void {
    entry.seat?.[Symbol.dispose]();
    entry.seat = undefined;
  }

  /** The record of a running sandbox goes; failing that, the next start finds that there is no VM. */
  #forgetRunning(entry: Entry): void {
    try {
      this.#db.deleteRunning(entry.id);
    } catch (error) {
      this.#log.error({ err: error, sandboxId: entry.id }, "record of an ended sandbox was not removed");
    }
  }

  #remove(entry: Entry): void {
    this.#entries.delete(entry.id);
    entry.operation = undefined;
    this.#pins.remove(entry.pins);
    entry.pins = [];
    this.#leave(entry);
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
    entry.silentProbes = 0;
    const { unresponsiveSince: _, ...record } = entry.record;
    entry.record = {
      ...record,
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
    move(entry, "running");
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
    const ended = operate(entry, "killing", () => this.#discard(entry, instance, "its VM ended"));
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
    this.#forgetRunning(entry);
    this.#remove(entry);
    this.#emit("lost", entry.id, { reason: why });
    await removeTree(join(this.#options.artifactsDir, entry.id));
  }

  // ---- create -----------------------------------------------------------------------------------

  async create(request: CreateSandboxRequest): Promise<SandboxRecord> {
    this.#refuseWhenClosing();
    this.#checkTimeout(request.timeoutSeconds);
    // Checked before anything is started: an unknown kind of rule is an error, never a weaker rule.
    egressOf(request);
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
          status === "error"
            ? `\`aenv template watch ${request.template}\` tells why; then make it again, with \`aenv pull IMAGE --name ${request.template}\` or \`aenv build DIRECTORY --name ${request.template}\``
            : `wait for it with \`aenv template watch ${request.template}\``,
      });
    }
    this.#refuseWhenClosing();
    const now = this.#now();
    const { template: _, ...wishes } = request;
    const alias = snapshot.aliases[0];
    const entry = newEntry({
      id: newId(),
      state: "creating",
      record: {
        ...wishes,
        templateId: snapshot.templateId,
        ...(alias === undefined ? {} : { alias }),
        startedAt: isoTime(now),
        endAt: isoTime(now + request.timeoutSeconds * 1000),
        ...snapshot.resources,
        envdVersion: committed.state.envdVersion,
      },
      deadlineMs: now + request.timeoutSeconds * 1000,
      startup: startupOf(committed, request.envVars),
    });
    return this.#launch(entry, this.#fromState(entry, committed.state), {
      done: "created",
      failed: "create_failed",
      code: "sandbox_create_failed",
      message: `no sandbox could be started from template ${request.template}`,
    });
  }

  async createCold(request: CreateColdSandboxRequest): Promise<SandboxRecord> {
    this.#refuseWhenClosing();
    this.#checkTimeout(request.timeoutSeconds);
    egressOf(request);
    const { cold } = this.#options;
    if (cold === undefined) throw coldStartOff();
    const { image, extraBootArgs = "", diskSizeMiB: wantedSize, attachedDrives = [], ...wishes } = request;
    const bootWords = allowedBootWords(extraBootArgs, cold.allowedBootArgsPrefixes);
    const diskSizeMiB = coldDiskSize(wantedSize, cold);
    const planned = plannedDrives(attachedDrives);
    // A size that is refused is so before anything is made.
    for (const drive of planned) coldDiskSize(drive.diskSizeMiB, cold);
    const now = this.#now();
    const { cpuCount = cold.cpuCount, memoryMiB = cold.memoryMiB } = wishes;
    const entry = newEntry({
      id: newId(),
      state: "creating",
      record: {
        ...wishes,
        templateId: image,
        startedAt: isoTime(now),
        endAt: isoTime(now + request.timeoutSeconds * 1000),
        cpuCount,
        memoryMiB,
        diskSizeMiB,
        // Until its agent has told: what is listed has been asked.
        envdVersion: "0.0.0",
      },
      deadlineMs: now + request.timeoutSeconds * 1000,
      startup: { envVars: request.envVars },
    });
    const start = async () => {
      const began = performance.now();
      // Before anything is downloaded.
      await this.#options.sandboxes.checkBoot({ drives: planned, extraBootArgs: bootWords });
      this.#refuseWhenClosing();
      const disks = await coldDisks(
        { image, diskSizeMiB: wantedSize, drives: planned },
        cold,
        this.#ending.signal,
      );
      using _ = disks;
      const { root, drives, files } = disks;
      const resolveMs = Math.round((performance.now() - began) * 100) / 100;
      this.#pin(entry, files);
      entry.startup = {
        ...startupOf(
          { context: contextOfImage(root.config), imageReference: pinnedReference(root) },
          request.envVars,
        ),
        ...(bootWords.length === 0 ? {} : { bootArgs: bootWords }),
      };
      const running = await this.#startInstance(entry, () =>
        this.#options.sandboxes.boot({
          identity: this.#identity(entry),
          shape: { vcpuCount: cpuCount, memoryMiB },
          rootfs: { lowers: root.lowers, virtualSizeBytes: root.virtualSizeBytes },
          ...(drives.length === 0 ? {} : { drives }),
          extraBootArgs: bootWords,
          egress: egressOf(entry.record),
        }),
      );
      const { total = 0, ...phases } = running.timings;
      return { running, timings: { resolve_rootfs: resolveMs, ...phases, total: total + resolveMs } };
    };
    return this.#launch(
      entry,
      { files: [], start, cold: true },
      {
        done: "created",
        failed: "create_failed",
        code: "sandbox_create_failed",
        message: `no sandbox could be started from image ${image}`,
      },
    );
  }

  #fromState(entry: Entry, state: CapturedState): LaunchPlan {
    const start = async () => {
      const running = await this.#resumeInstance(entry, state);
      return { running, timings: running.timings };
    };
    return { files: digestFiles(state), start };
  }

  /** A new sandbox. On an error nothing of it is left and it was in no list. */
  async #launch(entry: Entry, plan: LaunchPlan, words: LaunchWords): Promise<SandboxRecord> {
    entry.seat = this.#capacity.take(entry.record.memoryMiB);
    this.#entries.set(entry.id, entry);
    this.#pin(entry, plan.files);
    const cold = plan.cold === undefined ? {} : { cold: plan.cold };
    this.#emit("creating", entry.id, cold);
    const began = performance.now();
    return track(entry, async () => {
      let running: RunningSandbox | undefined;
      try {
        const started = await plan.start();
        running = started.running;
        const { timings } = started;
        this.#attach(entry, running);
        entry.timings.create = timings;
        this.#setDeadline(entry, entry.record.timeoutSeconds, "exact");
        this.#db.putRunning(this.#runningDocument(entry));
        this.#rest(entry);
        this.#emit(words.done, entry.id, {
          durationMs: performance.now() - began,
          phases: timings,
          ...cold,
        });
        return viewOf(entry);
      } catch (error) {
        entry.instance = undefined;
        this.#remove(entry);
        await this.#stopFailed(entry, running);
        this.#emit(words.failed, entry.id, {
          durationMs: performance.now() - began,
          reason: errorChain(error)[0] ?? "unknown cause",
          ...cold,
        });
        if (error instanceof AenvError && error.code === "shutting_down") throw error;
        this.#log.error({ err: error, sandboxId: entry.id }, words.message);
        throw failure(words.code, words.message, error);
      }
    });
  }

  /** Ends the VM of a start that failed after it. */
  async #stopFailed(entry: Entry, running: RunningSandbox | undefined): Promise<void> {
    try {
      await running?.stop();
    } catch (error) {
      this.#log.error(
        { err: error, sandboxId: entry.id },
        "the VM of a failed start could not be stopped; the next start of the server cleans up",
      );
    }
  }

  #resumeInstance(entry: Entry, state: CapturedState): Promise<RunningSandbox> {
    return this.#startInstance(entry, () =>
      this.#options.sandboxes.resume({
        identity: this.#identity(entry),
        state,
        egress: egressOf(entry.record),
      }),
    );
  }

  /** A VM that goes on where it was stopped, or one that boots from the disks of one that was ended. */
  #restart(entry: Entry, state: PausedState): Promise<RunningSandbox> {
    if (hasMemory(state)) return this.#resumeInstance(entry, state);
    const { shape, rootfs, drives } = state;
    return this.#startInstance(entry, () =>
      this.#options.sandboxes.boot({
        identity: this.#identity(entry),
        shape,
        rootfs,
        ...(drives === undefined ? {} : { drives }),
        ...(entry.startup.bootArgs === undefined ? {} : { extraBootArgs: entry.startup.bootArgs }),
        egress: egressOf(entry.record),
      }),
    );
  }

  /** Starts a VM when it is its turn; on return it runs and the server is not shutting down. */
  async #startInstance(entry: Entry, start: () => Promise<RunningSandbox>): Promise<RunningSandbox> {
    const running = await this.#starts.run(async () => {
      // It may have waited for its turn.
      this.#refuseWhenClosing();
      return start();
    });
    entry.seat?.started();
    if (this.#closing === undefined) return running;
    await running.stop();
    throw shuttingDown();
  }

  // ---- looking ----------------------------------------------------------------------------------

  get(id: string): SandboxRecord {
    return viewOf(this.#find(id));
  }

  list(): SandboxRecord[] {
    return [...this.#entries.values()]
      .filter((entry) => entry.state !== "creating" && entry.state !== "killing")
      .map((entry) => viewOf(entry));
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
    if (entry.state === "paused") return { kind: "paused", autoResume: autoResumes(entry) };
    // In place: the guest stands still for a moment and then answers whatever came meanwhile.
    if (!ROUTED.has(entry.state)) return { kind: "transitional", state: entry.state };
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
    const patience = new Patience(this.#waitMs);
    for (;;) {
      const entry = this.#entries.get(id);
      // Gone while we waited: someone else's deletion, and ours all the same.
      if (entry === undefined) return;
      if (entry.state === "running" || entry.state === "paused") {
        return operate(entry, "killing", () => this.#end(entry));
      }
      await patience.settled(entry);
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
      this.#forgetRunning(entry);
    }
    if (paused !== undefined) {
      try {
        await this.#stopLingering(entry);
        this.#db.delete(entry.id);
      } catch (error) {
        move(entry, "paused");
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

  async #stopLingering(entry: Entry): Promise<void> {
    await entry.lingering?.stop();
    entry.lingering = undefined;
  }

  // ---- pause ------------------------------------------------------------------------------------

  async pause(id: string, { memory = true }: PauseOptions = {}): Promise<void> {
    this.#refuseWhenClosing();
    const entry = this.#find(id);
    if (entry.state === "pausing") {
      if (entry.pausesMemory !== memory) {
        throw conflict(id, entry.state, `it is being paused ${memory ? "without" : "with"} its memory`);
      }
      await entry.operation;
      return;
    }
    if (entry.state === "paused") throw conflict(id, entry.state, "it is paused already");
    if (entry.state !== "running") throw conflict(id, entry.state, "only a running sandbox can be paused");
    await this.#beginPause(entry, memory);
  }

  /** State is `pausing`; ends in `paused`, in `running` as before, or without the sandbox. */
  async #pause(entry: Entry, memory: boolean): Promise<void> {
    const { instance } = entry;
    assert(instance !== undefined, `running sandbox ${entry.id} has an instance`);
    const { running } = instance;
    await entry.networkUpdates;
    const startedAt = performance.now();
    const artifactDir = join(this.#options.artifactsDir, entry.id, newId());
    const words: CaptureWords = {
      failed: "pause_failed",
      did: "could not be paused",
      dir: artifactDir,
      startedAt,
      ...(memory ? {} : { cold: true }),
    };

    let state: PausedState;
    try {
      const captured: Capture | DiskCapture = memory
        ? await running.capture(artifactDir)
        : await running.captureDisks(artifactDir);
      state = captured.state;
      entry.timings.pause = captured.timings;
    } catch (error) {
      throw await this.#captureFailed(entry, instance, error, words);
    }

    try {
      this.#storePaused(entry, { artifactDir, state });
    } catch (error) {
      let outcome: unknown = error;
      try {
        await running.resumeInPlace();
      } catch (resumeError) {
        outcome = new AenvError({
          code: "capture_terminal",
          message: `${errorChain(error).join(": ")}; and it does not run again`,
          cause: new AggregateError([error, resumeError]),
        });
      }
      throw await this.#captureFailed(entry, instance, outcome, words);
    }

    // Durable from here on. The stop comes before the state: a resume must not meet the old VM.
    this.#cut(instance, "the sandbox was paused");
    entry.instance = undefined;
    if (!memory) await this.#haltGuest(entry, running);
    try {
      await running.stop();
    } catch (error) {
      entry.lingering = running;
      this.#log.error(
        { err: error, sandboxId: entry.id },
        "the VM of a paused sandbox could not be stopped; a resume or a deletion tries again",
      );
    }
    this.#leave(entry);
    move(entry, "paused");
    const totalMs = performance.now() - startedAt;
    this.#log.info({ sandboxId: entry.id, memory, timings: entry.timings.pause, totalMs }, "sandbox paused");
    this.#emit("paused", entry.id, {
      durationMs: totalMs,
      ...(memory ? {} : { cold: true }),
      ...(entry.timings.pause === undefined ? {} : { phases: entry.timings.pause }),
    });
    this.#inBackground("old captures were not removed", this.#removeOldGenerations(entry));
  }

  /** From here on, whatever happens to this process, the sandbox is paused with this. */
  #storePaused(entry: Entry, paused: NonNullable<Entry["paused"]>): void {
    const { state: _, ...record } = viewOf(entry);
    this.#db.setPaused({ version: 1, record, startup: entry.startup, ...paused });
    entry.paused = paused;
    this.#pin(entry, digestFiles(paused.state));
  }

  /**
   * What was captured is whole, and all that is promised. An orderly end of the guest makes it better: processes
   * store what they have, files that were deleted while open go, and the file systems are marked clean.
   */
  async #haltGuest(entry: Entry, running: RunningSandbox): Promise<void> {
    const artifactDir = join(this.#options.artifactsDir, entry.id, newId());
    try {
      const { state, timings } = await running.halt(artifactDir);
      this.#storePaused(entry, { artifactDir, state });
      entry.timings.pause = addTimings(entry.timings.pause ?? {}, timings);
    } catch (error) {
      this.#log.warn(
        { err: error, sandboxId: entry.id },
        "a guest was not shut down in order; its disks are kept as they were written out before",
      );
    }
  }

  /** After a capture that failed: the sandbox runs as before, or is gone. Returns the error for the caller. */
  async #captureFailed(
    entry: Entry,
    instance: Instance,
    error: unknown,
    words: CaptureWords,
  ): Promise<AenvError> {
    await removeTree(words.dir).catch((cleanup: unknown) =>
      this.#log.warn({ err: cleanup, dir: words.dir }, "a capture of no use was not removed"),
    );
    this.#emit(words.failed, entry.id, {
      ...(words.cold === undefined ? {} : { cold: words.cold }),
      durationMs: performance.now() - words.startedAt,
      reason: errorChain(error)[0] ?? "unknown cause",
    });
    if (error instanceof AenvError && error.code === "capture_terminal") {
      this.#log.error({ err: error, sandboxId: entry.id }, `sandbox ${words.did} and cannot go on`);
      move(entry, "killing");
      await this.#discard(entry, instance, "the sandbox was lost");
      return failure("capture_terminal", `sandbox ${entry.id} ${words.did} and was lost`, error);
    }
    this.#log.error({ err: error, sandboxId: entry.id }, `sandbox ${words.did} and runs on`);
    await this.#retell(entry, instance);
    this.#rest(entry);
    return failure(words.failed, `sandbox ${entry.id} ${words.did} and runs on`, error);
  }

  /** Tells a guest that stood still for a moment what time it is. */
  async #retell(entry: Entry, instance: Instance): Promise<void> {
    if (instance.exit !== undefined) return;
    try {
      await instance.running.reinit(this.#identity(entry));
    } catch (error) {
      this.#log.warn({ err: error, sandboxId: entry.id }, "guest clock was not set after a capture");
    }
  }

  // ---- fork and snapshot ------------------------------------------------------------------------

  /** State is `snapshotting` or `forking`; ends in `running`, or without the sandbox. */
  async #checkpoint(entry: Entry, words: CaptureWords): Promise<Capture> {
    const { instance } = entry;
    assert(instance !== undefined, `running sandbox ${entry.id} has an instance`);
    try {
      const captured = await instance.running.checkpoint(words.dir);
      await this.#retell(entry, instance);
      this.#rest(entry);
      return captured;
    } catch (error) {
      throw await this.#captureFailed(entry, instance, error, words);
    }
  }

  #checkpointDir(): string {
    return join(this.#options.artifactsDir, CHECKPOINTS, newId());
  }

  /** Error 409 in every other state, also on the way out; 404 for unknown ids. */
  #runningOnly(id: string, what: string): Entry {
    const entry = this.#entries.get(id);
    if (entry === undefined) throw notFound(id);
    if (entry.state !== "running") {
      throw conflict(id, entry.state, `only a running sandbox can be ${what}`, wakeUp(id, entry.state));
    }
    return entry;
  }

  async fork(id: string, request: ForkRequest): Promise<ForkOutcome[]> {
    this.#refuseWhenClosing();
    const { count, timeoutSeconds } = request;
    if (!Number.isInteger(count) || count < 1 || count > MAX_FORK_CHILDREN) {
      throw new AenvError({
        code: "invalid_count",
        status: 400,
        message: `${count} is not a number of children from 1 to ${MAX_FORK_CHILDREN}`,
      });
    }
    if (timeoutSeconds !== undefined) this.#checkTimeout(timeoutSeconds);
    const source = this.#runningOnly(id, "forked");
    const dir = this.#checkpointDir();
    const words: CaptureWords = {
      failed: "fork_failed",
      did: "could not be forked",
      dir,
      startedAt: performance.now(),
    };
    const { state, timings } = await operate(source, "forking", () => this.#checkpoint(source, words));
    source.timings.fork = timings;
    using _ = this.#pins.hold(digestFiles(state));
    try {
      const children = Array.from({ length: count }, (_, index) =>
        this.#forkChild(source, state, timeoutSeconds ?? source.record.timeoutSeconds, index),
      );
      const outcomes = await Promise.all(children);
      const failed = outcomes.filter((outcome) => "error" in outcome).length;
      this.#log.info({ sandboxId: id, children: count, failed, timings }, "sandbox forked");
      const started = outcomes.flatMap((outcome) => ("record" in outcome ? [outcome.record.id] : []));
      const reason = `${started.length} of ${count} children run${started.length === 0 ? "" : ": "}${started.join(" ")}`;
      // It may have ended meanwhile, and its log with it.
      if (this.#entries.get(id) === source)
        this.#emit("copied", id, { durationMs: timings.total ?? 0, reason });
      return outcomes;
    } finally {
      // Each child has links of its own to what it runs on.
      this.#inBackground("the checkpoint of a fork was not removed", removeTree(dir));
    }
  }

  async #forkChild(
    source: Entry,
    state: CapturedState,
    timeoutSeconds: number,
    index: number,
  ): Promise<ForkOutcome> {
    const now = this.#now();
    const { unresponsiveSince: _, origin: __, ...inherited } = source.record;
    const deadlineMs = now + timeoutSeconds * 1000;
    const child = newEntry({
      id: newId(),
      state: "creating",
      record: { ...inherited, startedAt: isoTime(now), endAt: isoTime(deadlineMs), timeoutSeconds },
      deadlineMs,
      startup: source.startup,
    });
    try {
      const record = await this.#launch(child, this.#fromState(child, state), {
        done: "forked",
        failed: "fork_failed",
        code: "sandbox_fork_failed",
        message: `child ${index + 1} of sandbox ${source.id} could not be started`,
      });
      return { record };
    } catch (error) {
      return { error: failure("sandbox_fork_failed", `child ${index + 1} was not started`, error) };
    }
  }

  async snapshot(id: string, request: SnapshotRequest): Promise<SnapshotRecord> {
    this.#refuseWhenClosing();
    const { repository } = this.#options;
    const { name } = request;
    this.#runningOnly(this.#find(id).id, "snapshotted");
    // Before the guest has to stand still for a name that cannot be had.
    if (name !== undefined) await checkSnapshotName(repository, name);
    this.#refuseWhenClosing();
    const source = this.#runningOnly(this.#find(id).id, "snapshotted");
    const dir = this.#checkpointDir();
    const startedAt = performance.now();
    const words: CaptureWords = {
      failed: "snapshot_failed",
      did: "could not be snapshotted",
      dir,
      startedAt,
    };
    const { state, timings } = await operate(source, "snapshotting", () => this.#checkpoint(source, words));
    using _ = this.#pins.hold(digestFiles(state));
    try {
      const publishing = performance.now();
      const committed = await publishSnapshot(repository, source, state, name, this.#now());
      const publish = Math.round((performance.now() - publishing) * 100) / 100;
      const total = Math.round((performance.now() - startedAt) * 100) / 100;
      const phases = { ...timings, publish, total };
      source.timings.snapshot = phases;
      this.#emit("snapshotted", id, { durationMs: total, phases });
      this.#log.info({ sandboxId: id, snapshotId: committed.id, name, timings: phases }, "snapshot made");
      return committed;
    } catch (error) {
      this.#emit("snapshot_failed", id, {
        durationMs: performance.now() - startedAt,
        reason: errorChain(error)[0] ?? "unknown cause",
      });
      throw failure("snapshot_failed", `the snapshot of sandbox ${id} could not be stored`, error);
    } finally {
      this.#inBackground("the capture of a snapshot was not removed", removeTree(dir));
    }
  }

  listSnapshots(filter: SnapshotFilter): Promise<SnapshotRecord[]> {
    return listSnapshots(this.#options.repository, filter);
  }

  getSnapshot(name: string): Promise<SnapshotRecord> {
    return getSnapshot(this.#options.repository, name);
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

  async resume(
    id: string,
    timeoutSeconds: number,
    { memory = true }: ResumeOptions = {},
  ): Promise<SandboxRecord> {
    this.#refuseWhenClosing();
    this.#checkTimeout(timeoutSeconds);
    const patience = new Patience(this.#waitMs);
    for (;;) {
      const entry = this.#find(id);
      switch (entry.state) {
        case "running":
          this.#moveDeadline(entry, timeoutSeconds, "exact");
          return viewOf(entry);
        case "paused":
          refuseMemoryKept(entry, memory);
          await operate(entry, "resuming", () => this.#resume(entry, timeoutSeconds));
          return viewOf(entry);
        case "resuming":
          await entry.operation;
          continue;
        case "pausing":
          await patience.settled(entry);
          continue;
        default:
          throw conflict(id, entry.state, "it cannot be resumed now");
      }
    }
  }

  async connect(
    id: string,
    timeoutSeconds: number,
    { memory = true }: ResumeOptions = {},
  ): Promise<{ record: SandboxRecord; resumed: boolean }> {
    this.#refuseWhenClosing();
    this.#checkTimeout(timeoutSeconds);
    const patience = new Patience(this.#waitMs);
    for (;;) {
      const entry = this.#find(id);
      switch (entry.state) {
        case "running":
          this.#moveDeadline(entry, timeoutSeconds, "extend");
          return { record: viewOf(entry), resumed: false };
        case "paused":
          refuseMemoryKept(entry, memory);
          await operate(entry, "resuming", () => this.#resume(entry, timeoutSeconds));
          return { record: viewOf(entry), resumed: true };
        case "resuming":
          await entry.operation;
          continue;
        default:
          await patience.settled(entry);
      }
    }
  }

  /** State is `resuming`; ends in `running`, or in `paused` with everything intact. */
  async #resume(entry: Entry, timeoutSeconds: number): Promise<void> {
    const { paused, deadlineMs, record } = entry;
    assert(paused !== undefined, `paused sandbox ${entry.id} has a captured state`);
    const cold = hasMemory(paused.state) ? {} : { cold: true as const };
    const startedAt = performance.now();
    let running: RunningSandbox | undefined;
    try {
      entry.seat = this.#capacity.take(record.memoryMiB);
      this.#db.setLifecycle(entry.id, "resuming");
      await this.#stopLingering(entry);
      running = await this.#restart(entry, paused.state);
      this.#attach(entry, running);
      this.#setDeadline(entry, timeoutSeconds, "exact");
      this.#db.setResumed(this.#runningDocument(entry));
    } catch (error) {
      entry.instance = undefined;
      entry.deadlineMs = deadlineMs;
      entry.record = record;
      await this.#stopFailed(entry, running);
      this.#leave(entry);
      try {
        this.#db.setLifecycle(entry.id, "paused");
      } catch (storeError) {
        // `resuming` means the same to the next start.
        this.#log.error({ err: storeError, sandboxId: entry.id }, "lifecycle mark could not be reset");
      }
      move(entry, "paused");
      this.#emit("resume_failed", entry.id, {
        ...cold,
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
    entry.timings.resume = running.timings;
    this.#rest(entry);
    this.#emit("resumed", entry.id, {
      durationMs: performance.now() - startedAt,
      phases: running.timings,
      ...cold,
    });
    // The running sandbox holds links of its own to the layers it needs.
    this.#inBackground("a used capture was not removed", removeTree(paused.artifactDir));
  }

  /** Waits for a state in which deadlines can be set. */
  async #forDeadline(id: string): Promise<Entry> {
    const patience = new Patience(this.#waitMs);
    for (;;) {
      const entry = this.#find(id);
      if (entry.state === "running") return entry;
      if (entry.state === "paused" || entry.state === "pausing") {
        throw conflict(id, entry.state, "only a running sandbox has a deadline", wakeUp(id, entry.state));
      }
      await patience.settled(entry);
    }
  }

  async setTimeout(id: string, timeoutSeconds: number): Promise<void> {
    this.#refuseWhenClosing();
    this.#checkTimeout(timeoutSeconds);
    this.#moveDeadline(await this.#forDeadline(id), timeoutSeconds, "exact");
  }

  async refresh(id: string, durationSeconds?: number): Promise<void> {
    this.#refuseWhenClosing();
    const seconds = durationSeconds ?? this.#options.defaultTimeoutSeconds;
    this.#checkTimeout(seconds);
    this.#moveDeadline(await this.#forDeadline(id), seconds, "extend");
  }

  async updateNetwork(id: string, fields: NetworkUpdate): Promise<void> {
    this.#refuseWhenClosing();
    const { allowInternetAccess } = fields;
    const policy = egressOf({
      network: fields,
      ...(allowInternetAccess === undefined ? {} : { allowInternetAccess }),
    });
    const entry = this.#runningOnly(id, "given other rules");
    const { instance } = entry;
    assert(instance !== undefined, `running sandbox ${id} has an instance`);
    const update = (entry.networkUpdates ?? Promise.resolve()).then(() =>
      this.#updateNetwork(entry, instance, policy, fields),
    );
    // One after the other, so that the rules in force and the record are of the same request.
    entry.networkUpdates = update.catch(() => undefined);
    await update;
  }

  async #updateNetwork(
    entry: Entry,
    instance: Instance,
    policy: EgressPolicy,
    { allowOut, denyOut, allowInternetAccess }: NetworkUpdate,
  ): Promise<void> {
    const checkInstance = (): void => {
      if (entry.instance === instance && entry.state !== "killing") return;
      throw conflict(entry.id, entry.state, "it stopped running while its network was changed");
    };
    const before = egressOf(entry.record);
    checkInstance();
    try {
      await instance.running.applyEgress(policy);
      // Operations in place leave the instance as it is, and a pause waits for us.
      checkInstance();
      const { record } = entry;
      const { allowOut: _out, denyOut: _deny, ...ingress } = record.network ?? {};
      const { allowInternetAccess: _access, ...rest } = record;
      entry.record = {
        ...rest,
        network: {
          ...ingress,
          ...(allowOut === undefined ? {} : { allowOut }),
          ...(denyOut === undefined ? {} : { denyOut }),
        },
        ...(allowInternetAccess === undefined ? {} : { allowInternetAccess }),
      };
      try {
        this.#db.putRunning(this.#runningDocument(entry));
      } catch (error) {
        entry.record = record;
        throw error;
      }
    } catch (error) {
      // Where it failed after they were in force: told of an error, nobody has other rules than before.
      if (entry.instance === instance) {
        await instance.running.applyEgress(before).catch((undo: unknown) => {
          this.#log.error({ err: undo, sandboxId: entry.id }, "the rules of before were not stored again");
        });
      }
      throw failure("network_update_failed", `the network of sandbox ${entry.id} was not changed`, error);
    }
  }

  async networkReport(id: string): Promise<SlotPolicyReport> {
    const { state, instance } = this.#find(id);
    if (instance === undefined) {
      throw conflict(id, state, "only a running sandbox has a network", wakeUp(id, state));
    }
    return await instance.running.egressReport();
  }

  async autoResume(id: string): Promise<void> {
    this.#refuseWhenClosing();
    const patience = new Patience(this.#waitMs);
    for (;;) {
      const entry = this.#find(id);
      if (entry.state === "running") return;
      if (entry.state === "paused") {
        if (!autoResumes(entry)) {
          throw new AenvError({
            code: "sandbox_paused",
            status: 410,
            message: `sandbox ${id} is paused and traffic does not resume it`,
            remediation: "resume it through the API",
          });
        }
        const seconds = Math.max(entry.record.timeoutSeconds, this.#options.autoResumeMinTimeoutSeconds);
        operate(entry, "resuming", () => this.#resume(entry, seconds)).catch(() => undefined);
      } else if (entry.state !== "resuming" && !(entry.state === "pausing" && entry.record.autoResume)) {
        throw new AenvError({
          code: "sandbox_not_running",
          status: 410,
          message: `sandbox ${id} is ${entry.state}`,
        });
      }
      const { operation, state } = entry;
      try {
        await patience.settled(entry);
      } catch (cause) {
        throw new AenvError({
          code: "auto_resume_timeout",
          status: 504,
          message: `sandbox ${id} was not resumed within ${this.#waitMs / 1000} s`,
          cause,
        });
      }
      // The pause that traffic met has ended: well, and it is to be resumed, or badly, and it runs.
      if (state === "pausing") continue;
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
      const gate = entry.record.autoPauseMemory === false ? this.#diskEvictions : this.#evictions;
      this.#inBackground(
        "eviction failed",
        gate
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
      if (entry.record.onTimeout === "pause") await this.#evictByPause(entry);
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

  async #evictByPause(entry: Entry): Promise<void> {
    const disksOnly = entry.record.autoPauseMemory === false;
    const memory = !disksOnly || entry.evictFailures >= DISK_EVICTION_TRIES;
    if (disksOnly && memory) {
      this.#log.warn(
        { sandboxId: entry.id, tries: entry.evictFailures },
        "its disks could not be kept alone at its deadline: it is paused with its memory",
      );
    }
    await this.#pauseIfRunning(entry, memory);
  }

  // ---- garbage ----------------------------------------------------------------------------------

  reserve(memoryMiB: number): Seat {
    return this.#capacity.take(memoryMiB);
  }

  pinnedFiles(): ReadonlySet<string> {
    return this.#pins.files;
  }

  async collectGarbage(): Promise<{ readonly removedFiles: number; readonly removedBytes: number }> {
    return this.#options.repository.collect(this.#pins.files);
  }
}

/**
 * Captures without a database of records are those of paused sandboxes whose records got lost: they must not be taken
 * for leftovers. Error `records_missing` 500.
 */
async function refuseForgotten(statePath: string, artifactsDir: string): Promise<void> {
  const captures = new Bun.Glob("*/*/state.json");
  const found = await Array.fromAsync(captures.scan({ cwd: artifactsDir, onlyFiles: true }));
  const forgotten = new Set(found.map((path) => path.slice(0, path.indexOf("/"))));
  forgotten.delete(CHECKPOINTS);
  if (forgotten.size === 0) return;
  throw new AenvError({
    code: "records_missing",
    message: `${statePath} is missing or empty, but ${artifactsDir} holds ${forgotten.size} paused sandboxes`,
    remediation: `restore ${statePath} from a backup; to give those sandboxes up, move ${artifactsDir} away`,
  });
}

/** Error 409 `memory_kept` for a boot from the disk of a sandbox that has its memory: the two belong together. */
function refuseMemoryKept({ id, paused }: Entry, memory: boolean): void {
  if (memory || paused === undefined || !hasMemory(paused.state)) return;
  throw new AenvError({
    code: "memory_kept",
    status: 409,
    message: `sandbox ${id} was paused with its memory, which holds a part of what is on its disk: it cannot be booted without`,
    remediation: "resume it with its memory; to boot it, pause it with memory: false and resume it again",
  });
}

/** Phases of two parts of one operation. */
function addTimings(one: PhaseTimings, other: PhaseTimings): PhaseTimings {
  const sum: Record<string, number> = { ...one };
  for (const [phase, ms] of Object.entries(other))
    sum[phase] = Math.round(((sum[phase] ?? 0) + ms) * 100) / 100;
  return sum;
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

/** What a sandbox may reach, from the fields of its request. Error `invalid_egress_policy` 400. */
function egressOf(fields: Pick<CreateSandboxRequest, "network" | "allowInternetAccess">): EgressPolicy {
  return parseEgressPolicy({
    ...(fields.network?.allowOut === undefined ? {} : { allowOut: fields.network.allowOut }),
    ...(fields.network?.denyOut === undefined ? {} : { denyOut: fields.network.denyOut }),
    ...(fields.allowInternetAccess === undefined ? {} : { allowInternetAccess: fields.allowInternetAccess }),
  });
}

export function createOrchestrator(options: OrchestratorOptions): NodeOrchestrator {
  return new SandboxOrchestrator(options);
}
