import { posix } from "node:path";
import type { ImageService } from "../image/types.ts";
import { removeTree } from "../lib/durable.ts";
import { AenvError, assert, errorChain } from "../lib/errors.ts";
import { newId } from "../lib/ids.ts";
import type { Logger } from "../lib/log.ts";
import { createAgentClient } from "../sandbox/index.ts";
import type {
  CapturedState,
  CommandOutcome,
  GuestIdentity,
  RunningSandbox,
  SandboxFactory,
} from "../sandbox/types.ts";
import { contextOfImage, pinnedReference } from "../snapshot/index.ts";
import type { SnapshotRepository, StartupContext } from "../snapshot/types.ts";
import { extractIfTar, listArchive, selectSource } from "./archive.ts";
import { type CopyRequest, copyIntoGuest } from "./copy.ts";
import type { FileStore } from "./files.ts";
import { BuildGuest } from "./guest.ts";
import type { BuildLog } from "./log.ts";
import { chainKey, type StepCache } from "./step-cache.ts";
import { applyStep, type CopyStep, describeStep, type Step } from "./steps.ts";
import type { BuildStartRequest } from "./types.ts";

/** Every part of a build ends within its bound. Milliseconds. */
export interface BuildLimits {
  readonly buildMs: number;
  readonly readyMs: number;
  readonly readyPollMs: number;
  /** Wait after a start command that has no ready command. */
  readonly startDelayMs: number;
}

const READY_COMMAND_TIMEOUT_MS = 120_000;
/** Accounts that a COPY may name although the image lacks them: the SDK's default. */
const DEFAULT_ACCOUNT = "user";
const MAX_ARCHIVE_MEMBERS = 1_000_000;

/** A failure with the step the client is shown: `base`, `finalize` or the step's 1-based number. */
export class BuildFailure extends Error {
  readonly step: string;
  constructor(message: string, step: string, cause?: unknown) {
    super(message, cause === undefined ? undefined : { cause });
    this.step = step;
  }
}

export interface BuildParts {
  readonly repository: SnapshotRepository;
  readonly images: ImageService;
  readonly sandboxes: SandboxFactory;
  readonly files: FileStore;
  readonly cache: StepCache;
  /** Part of every cache key: what else a guest's content depends on. */
  readonly cacheEpoch: string;
  readonly defaultImage: string;
  readonly limits: BuildLimits;
  readonly log: Logger;
}

export interface BuildOrder {
  readonly buildId: string;
  readonly templateId: string;
  readonly shape: { readonly cpuCount: number; readonly memoryMiB: number };
  readonly steps: readonly Step[];
  readonly request: BuildStartRequest;
  readonly log: BuildLog;
  readonly cancelled: AbortSignal;
}

export interface BuiltSandbox {
  readonly running: RunningSandbox;
  readonly context: StartupContext;
  readonly resources: { readonly cpuCount: number; readonly memoryMiB: number };
  readonly imageReference?: string;
  readonly startCmd?: string;
  readonly readyCmd?: string;
}

interface Base {
  readonly context: StartupContext;
  readonly resources: { readonly cpuCount: number; readonly memoryMiB: number };
  readonly imageReference?: string;
  /** Names everything the first step builds on. */
  readonly key: string;
  start(identity: GuestIdentity): Promise<RunningSandbox>;
}

/** One build from its base to a sandbox that is ready to be captured. */
export class Build {
  readonly #parts: BuildParts;
  readonly #order: BuildOrder;
  readonly #limit: AbortSignal;
  readonly #signal: AbortSignal;
  readonly #deadline: number;

  constructor(parts: BuildParts, order: BuildOrder) {
    this.#parts = parts;
    this.#order = order;
    this.#limit = AbortSignal.timeout(parts.limits.buildMs);
    this.#signal = AbortSignal.any([this.#limit, order.cancelled]);
    this.#deadline = performance.now() + parts.limits.buildMs;
  }

  /** The work, ended by the build's bound or its cancellation with a reason. */
  bounded<T>(work: Promise<T>, step: string): Promise<T> {
    return abortable(work, this.#signal, () => this.#interruption(step));
  }

  #interruption(step: string): BuildFailure {
    if (this.#limit.aborted) {
      const seconds = this.#parts.limits.buildMs / 1000;
      return new BuildFailure(`the build did not end within ${seconds} s`, step);
    }
    const { reason } = this.#order.cancelled;
    return new BuildFailure(reason instanceof Error ? reason.message : "the build was cancelled", step);
  }

  /** Resources of the build are released with the stack, also those of a start that outlived its bound. */
  async run(stack: AsyncDisposableStack): Promise<BuiltSandbox> {
    const { request, steps, log } = this.#order;
    if (this.#signal.aborted) throw this.#interruption("base");
    const base = await inStep("base", () => this.#base(stack));
    const archives = await this.#archives(stack);
    const keys = this.#keys(base.key);
    const identity: GuestIdentity = {
      sandboxId: newId(),
      templateId: this.#order.templateId,
      envVars: base.context.envVars,
    };
    const { running, done, died } = await inStep("base", () => this.#start(base, identity, keys, stack));
    const guest = new BuildGuest(createAgentClient(running.hostAddress), log);
    const alive = <T>(work: Promise<T>, step: string): Promise<T> =>
      this.bounded(Promise.race([work, died]), step);

    let { context } = base;
    for (const [index, step] of steps.entries()) {
      const number = String(index + 1);
      context = applyStep(context, step);
      const title = `[${number}/${steps.length}] ${describeStep(step)}`;
      if (index < done) {
        log.add("info", `CACHED ${title}`, number);
        continue;
      }
      log.add("info", title, number);
      const now = context;
      await inStep(number, async () => {
        await alive(this.#guestStep(guest, running, step, now, number, archives), number);
        if (changesGuest(step)) await alive(this.#remember(running, identity, keys[index]!, number), number);
      });
    }

    const startCmd = nonEmpty(request.startCmd);
    const readyCmd = nonEmpty(request.readyCmd);
    await inStep("finalize", () =>
      alive(
        (async () => {
          if (context.user !== undefined && context.user !== "") await guest.ensureUser(context.user);
          await this.#startAndWait(guest, context, startCmd, readyCmd);
        })(),
        "finalize",
      ),
    );
    return {
      running,
      context,
      resources: base.resources,
      ...(base.imageReference === undefined ? {} : { imageReference: base.imageReference }),
      ...(startCmd === undefined ? {} : { startCmd }),
      ...(readyCmd === undefined ? {} : { readyCmd }),
    };
  }

  // ---- base -------------------------------------------------------------------------------------

  async #base(stack: AsyncDisposableStack): Promise<Base> {
    const { request } = this.#order;
    return request.fromTemplate === undefined
      ? this.#imageBase(stack)
      : this.#templateBase(request.fromTemplate, stack);
  }

  async #templateBase(name: string, stack: AsyncDisposableStack): Promise<Base> {
    const { log } = this.#order;
    const lease = await this.#parts.repository.lease(name);
    if (lease?.record.committed === undefined) {
      lease?.[Symbol.dispose]();
      throw new BuildFailure(`template ${name} does not exist or has no ready build`, "base");
    }
    stack.use(lease);
    const { committed, resources, id } = lease.record;
    log.add("info", `starting from template ${name}`, "base");
    return {
      context: committed.context,
      resources: { cpuCount: resources.cpuCount, memoryMiB: resources.memoryMiB },
      key: chainKey(this.#parts.cacheEpoch, ["template", id]),
      start: (identity) => this.#parts.sandboxes.resume({ identity, state: committed.state }),
      ...(committed.imageReference === undefined ? {} : { imageReference: committed.imageReference }),
    };
  }

  async #imageBase(stack: AsyncDisposableStack): Promise<Base> {
    const { images, sandboxes, defaultImage, cacheEpoch } = this.#parts;
    const { request, log, shape } = this.#order;
    const reference = request.fromImage ?? defaultImage;
    log.add("info", `resolving image ${reference}`, "base");
    const image = await this.bounded(
      images.resolve(reference, {
        ...(request.credentials === undefined ? {} : { credentials: request.credentials }),
        progress: log.progress("base"),
        signal: this.#signal,
      }),
      "base",
    );
    // The layers must be there until they are part of a snapshot.
    stack.use(images.hold(image.lowers.map(({ file }) => file)));
    const { config, lowers, virtualSizeBytes } = image;
    return {
      resources: shape,
      imageReference: pinnedReference(image),
      key: chainKey(cacheEpoch, [
        "image",
        image.manifestDigest,
        lowers.map(({ digest, file }) => digest ?? file),
        virtualSizeBytes,
        shape,
      ]),
      context: contextOfImage(config),
      start: (identity) => {
        log.add("info", `booting ${image.reference}`, "base");
        return sandboxes.boot({
          identity,
          shape: { vcpuCount: shape.cpuCount, memoryMiB: shape.memoryMiB },
          rootfs: { lowers, virtualSizeBytes },
        });
      },
    };
  }

  /** The archives of all COPY steps, kept for the build; a missing one fails it at its step. */
  async #archives(stack: AsyncDisposableStack): Promise<ReadonlyMap<string, string>> {
    const files = new Map<string, string>();
    for (const [index, step] of this.#order.steps.entries()) {
      if ((step.type !== "COPY" && step.type !== "ADD") || files.has(step.filesHash)) continue;
      const archive = await this.#parts.files.lease(this.#order.templateId, step.filesHash);
      if (archive === undefined) {
        const message = `${describeStep(step)}: its files were not uploaded, or not whole (${step.filesHash})`;
        throw new BuildFailure(message, String(index + 1));
      }
      stack.use(archive);
      files.set(step.filesHash, archive.file);
    }
    return files;
  }

  // ---- cache ------------------------------------------------------------------------------------

  /** Key of the state after each step. */
  #keys(baseKey: string): string[] {
    const keys: string[] = [];
    for (const step of this.#order.steps) keys.push(chainKey(keys.at(-1) ?? baseKey, step));
    return keys;
  }

  /** Steps before the first that must not come from the cache. */
  #reusable(): number {
    const { request, steps } = this.#order;
    if (request.force === true) return 0;
    const forced = request.steps.findIndex((step) => step.force === true);
    return forced < 0 ? steps.length : forced;
  }

  /** The sandbox, with as many steps done as the cache has. */
  async #start(
    base: Base,
    identity: GuestIdentity,
    keys: readonly string[],
    stack: AsyncDisposableStack,
  ): Promise<{ running: RunningSandbox; done: number; died: Promise<never> }> {
    const { cache, sandboxes, log: serverLog } = this.#parts;
    const { log } = this.#order;
    const keep = async (started: Promise<RunningSandbox>): Promise<RunningSandbox> => {
      // A start that outlives its bound still ends: whatever it makes is released.
      stack.defer(async () => {
        const [outcome] = await Promise.allSettled([started]);
        if (outcome.status === "fulfilled") await outcome.value.stop();
      });
      return this.bounded(started, "base");
    };
    const began = (running: RunningSandbox, done: number) => {
      const died = running.exited.then((exit): never => {
        const how = exit.signal ?? `exit code ${exit.exitCode}`;
        throw new Error(`the VM of the build ended (${how}): ${exit.stderrTail}`);
      });
      died.catch(() => undefined);
      return { running, done, died };
    };

    for (let done = this.#reusable(); done > 0; done--) {
      const key = keys[done - 1]!;
      const state = await cache.find(key);
      if (state === undefined) continue;
      try {
        const running = await keep(sandboxes.resume({ identity, state }));
        log.add("debug", `${done} steps from the cache`, "base");
        return began(running, done);
      } catch (error) {
        if (this.#signal.aborted) throw error;
        // Made by another VMM, damaged …: the steps are run, as without a cache.
        serverLog.warn({ err: error, key }, "cached build steps could not be used");
        await cache.drop(key);
      }
    }
    const running = await keep(base.start(identity));
    log.add("info", `booted in ${((running.timings.total ?? 0) / 1000).toFixed(1)} s`, "base");
    return began(running, 0);
  }

  /** Stores the state after a step. A full disk costs the cache entry, not the build. */
  async #remember(
    running: RunningSandbox,
    identity: GuestIdentity,
    key: string,
    number: string,
  ): Promise<void> {
    const { cache, log: serverLog } = this.#parts;
    if (!cache.enabled) return;
    const dir = cache.newDirectory(key);
    let state: CapturedState;
    try {
      ({ state } = await running.checkpoint(dir));
    } catch (error) {
      if (error instanceof AenvError && error.code === "capture_terminal") throw error;
      serverLog.warn({ err: error, key }, "a build step is not cached");
      this.#order.log.add("debug", `the step is not cached: ${errorChain(error).join(": ")}`, number);
      return;
    }
    try {
      await cache.complete(key, dir, state);
    } catch (error) {
      await removeTree(dir);
      serverLog.warn({ err: error, key }, "a build step is not cached");
    }
    // The guest's clock stood still for the moment.
    await running.reinit(identity);
  }

  // ---- steps ------------------------------------------------------------------------------------

  #remaining(): number {
    return Math.max(1, this.#deadline - performance.now());
  }

  async #guestStep(
    guest: BuildGuest,
    running: RunningSandbox,
    step: Step,
    context: StartupContext,
    number: string,
    archives: ReadonlyMap<string, string>,
  ): Promise<void> {
    switch (step.type) {
      case "RUN": {
        const timeoutMs = this.#remaining();
        const options = { step: number, timeoutMs, ...(step.user === undefined ? {} : { user: step.user }) };
        const outcome = await guest.run(step.command, context, options);
        if (outcome.exitCode !== 0) throw new BuildFailure(failureText(describeStep(step), outcome), number);
        return;
      }
      case "COPY":
      case "ADD":
        return this.#copy(guest, running, step, context, number, archives.get(step.filesHash)!);
      case "WORKDIR":
        assert(context.workdir !== undefined, "a WORKDIR step sets the directory");
        return guest.agent.makeDir(
          context.workdir,
          context.user === undefined ? "root" : context.user.split(":")[0],
        );
      case "USER":
        return guest.ensureUser(step.name);
      case "ENV":
      case "EXPOSE":
      case "VOLUME":
      case "LABEL":
        return;
    }
  }

  async #copy(
    guest: BuildGuest,
    running: RunningSandbox,
    step: CopyStep,
    context: StartupContext,
    number: string,
    archive: string,
  ): Promise<void> {
    const limits = { maxEntries: MAX_ARCHIVE_MEMBERS, maxContentBytes: Number.MAX_SAFE_INTEGER };
    const { members } = await listArchive(archive, limits, this.#signal);
    const source = selectSource(members, step.source);
    const current = context.user || "root";
    const owner = step.owner ?? current;
    if (owner.split(":")[0] === DEFAULT_ACCOUNT) await guest.ensureUser(owner);
    const { uid, gid } = await guest.account(owner);
    const from = context.workdir ?? (await guest.account(current)).home;
    const request: CopyRequest = {
      archive,
      source,
      target: posix.resolve("/", from, step.target),
      mustBeDirectory: /(^|\/)\.{0,2}$/.test(step.target),
      uid,
      gid,
      ...(step.mode === undefined ? {} : { mode: step.mode }),
    };
    await using scratch = new AsyncDisposableStack();
    const options = { timeoutMs: this.#remaining(), signal: this.#signal };
    let unpacked: CopyRequest | undefined;
    if (step.type === "ADD" && source.kind === "file") {
      const inner = this.#parts.files.scratchPath();
      scratch.defer(() => removeTree(inner));
      if (await extractIfTar(archive, source.path, inner, limits, this.#signal)) {
        unpacked = {
          ...request,
          archive: inner,
          source: { kind: "directory", prefix: "" },
          mustBeDirectory: true,
          keepOwners: step.owner === undefined,
        };
      }
    }
    const report = await copyIntoGuest(guest.agent, running.hostAddress, unpacked ?? request, options);
    const mebibytes = (report.bytes / 1048576).toFixed(1);
    this.#order.log.add("info", `copied ${report.entries} entries, ${mebibytes} MiB`, number);
  }

  // ---- start and ready --------------------------------------------------------------------------

  async #startAndWait(
    guest: BuildGuest,
    context: StartupContext,
    startCmd: string | undefined,
    readyCmd: string | undefined,
  ): Promise<void> {
    const { limits } = this.#parts;
    const { log } = this.#order;
    let failed: Promise<never> | undefined;
    if (startCmd !== undefined) {
      log.add("info", `start command: ${startCmd}`, "finalize");
      const { exited } = await guest.agent.startDetached(await guest.command(startCmd, context));
      failed = new Promise((_, reject) => {
        exited.then(
          (outcome) => {
            if (outcome.exitCode !== 0)
              reject(new BuildFailure(failureText("start command", outcome), "finalize"));
          },
          // The stream of its events broke off; whether the command still runs is the ready command's matter.
          (error: unknown) => log.add("warn", `start command: ${errorChain(error).join(": ")}`, "finalize"),
        );
      });
      failed.catch(() => undefined);
    }
    const unlessFailed = <T>(work: Promise<T>): Promise<T> =>
      failed === undefined ? work : Promise.race([work, failed]);
    if (readyCmd === undefined) {
      if (startCmd !== undefined) await unlessFailed(Bun.sleep(limits.startDelayMs));
      return;
    }
    log.add("info", `waiting for the ready command: ${readyCmd}`, "finalize");
    const deadline = performance.now() + limits.readyMs;
    const command = await guest.command(readyCmd, context);
    for (let last = ""; ; ) {
      const left = deadline - performance.now();
      if (left <= 0) {
        const message = `the ready command did not succeed within ${limits.readyMs / 1000} s${last}`;
        throw new BuildFailure(message, "finalize");
      }
      try {
        const timeoutMs = Math.min(left, READY_COMMAND_TIMEOUT_MS);
        const outcome = await unlessFailed(guest.agent.run({ ...command, timeoutMs }));
        if (outcome.exitCode === 0) return;
        last = `: ${failureText("ready command", outcome)}`;
      } catch (error) {
        if (!(error instanceof AenvError) || error.code !== "command_timeout") throw error;
        if (last === "") last = ": it did not end in time";
      }
      await unlessFailed(Bun.sleep(Math.min(limits.readyPollMs, Math.max(1, deadline - performance.now()))));
    }
  }
}

/** Steps worth a cache entry; the others are context, or done again in no time. */
function changesGuest(step: Step): boolean {
  return step.type === "RUN" || step.type === "COPY" || step.type === "ADD";
}

function nonEmpty(text: string | undefined): string | undefined {
  return text === undefined || text.trim() === "" ? undefined : text;
}

function failureText(what: string, outcome: CommandOutcome): string {
  const how = outcome.signal === undefined ? `exit status ${outcome.exitCode}` : `signal: ${outcome.signal}`;
  const said = (outcome.stderr.trim() || outcome.stdout.trim()).slice(-2000);
  return `${what}: ${how}${said === "" ? "" : `: ${said}`}`;
}

/** Names the step an error came from, unless it knows better. */
export async function inStep<T>(step: string, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (error instanceof BuildFailure) throw error;
    const [message, ...causes] = errorChain(error);
    throw new BuildFailure([message ?? "failed", ...causes].join(": "), step, error);
  }
}

/** The work, or an error as soon as the signal fires; the work itself goes on to its end unobserved. */
async function abortable<T>(work: Promise<T>, signal: AbortSignal, reason: () => Error): Promise<T> {
  work.catch(() => undefined);
  if (signal.aborted) throw reason();
  const aborted = Promise.withResolvers<never>();
  const onAbort = (): void => aborted.reject(reason());
  signal.addEventListener("abort", onAbort, { once: true });
  try {
    return await Promise.race([work, aborted.promise]);
  } finally {
    signal.removeEventListener("abort", onAbort);
  }
}
