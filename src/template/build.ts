import { posix } from "node:path";
import type { ImageRuntimeConfig, ImageService } from "../image/types.ts";
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
import { matchSources, packFromGuest, stageSource } from "./pack.ts";
import { chainKey, type StepCache } from "./step-cache.ts";
import {
  applyStep,
  type CopyStep,
  DOCKER_SHELL,
  type DockerfileState,
  describeStep,
  expandStep,
  quoteWords,
  type StageState,
  type Step,
} from "./steps.ts";
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
const NO_LIMITS = { maxEntries: 1_000_000, maxContentBytes: Number.MAX_SAFE_INTEGER };

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
  readonly sandboxes: Pick<SandboxFactory, "boot" | "resume">;
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
  /** Of the request's other stages. */
  readonly stageSteps?: readonly (readonly Step[])[];
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
  /** Of an image, for Dockerfiles. */
  readonly image?: ImageRuntimeConfig;
  readonly resources: { readonly cpuCount: number; readonly memoryMiB: number };
  readonly imageReference?: string;
  /** Names everything the first step builds on. */
  readonly key: string;
  start(identity: GuestIdentity): Promise<RunningSandbox>;
}

/** A stage before it runs: what it starts from, and the names of its states. */
interface Plan {
  /** Empty: the last stage, which becomes the template. */
  readonly name: string;
  readonly steps: readonly Step[];
  readonly base: Base;
  /** After each step. */
  readonly keys: readonly string[];
  readonly finalKey: string;
  /** Steps before the first that must not come from the cache. */
  readonly reusable: number;
}

/** A stage all of whose steps are done. */
interface Stage {
  readonly guest: BuildGuest;
  readonly running: RunningSandbox;
  readonly state: StageState;
  /** The work, unless the stage's VM ends before. */
  alive<T>(work: Promise<T>, step: string): Promise<T>;
}

interface StepRun {
  readonly guest: BuildGuest;
  readonly running: RunningSandbox;
  readonly state: StageState;
  /** As the client is shown it. */
  readonly number: string;
  readonly archives: ReadonlyMap<string, string>;
  readonly stages: Stages;
}

/** The other stages of a build, each run when a COPY first needs it and stopped when none does any more. */
interface Stages {
  get(index: number): Promise<Stage>;
  /** A COPY of it is done, or came from the cache. */
  used(index: number): Promise<void>;
}

/** A command of the template, as it is run and as it is told. */
interface Command {
  readonly words: readonly string[] | undefined;
  readonly text: string;
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
    const { request, steps, stageSteps = [] } = this.#order;
    if (this.#signal.aborted) throw this.#interruption("base");
    const plans: Plan[] = [];
    for (const [index, stage] of (request.stages ?? []).entries()) {
      const name = stage.name ?? `stage ${index}`;
      const base = await inStep(`${name} base`, () => this.#imageBase(stage.fromImage, stack));
      plans.push(this.#plan(name, base, stageSteps[index] ?? [], stage.steps, plans));
    }
    const base = await inStep("base", () => this.#base(stack));
    const last = this.#plan("", base, steps, request.steps, plans);
    const archives = await this.#archives([...plans, last], stack);
    const built = new Map<number, Promise<Stage>>();
    const copies = new Map<number, number>();
    for (const step of [...plans, last].flatMap((plan) => plan.steps)) {
      const from = sourceStage(step);
      if (from !== undefined) copies.set(from, (copies.get(from) ?? 0) + 1);
    }
    const stages: Stages = {
      get: (index) => {
        const plan = plans[index];
        assert(plan !== undefined, `stage ${index} is one of the build`);
        const stage = built.get(index) ?? this.#stage(plan, archives, stages, stack);
        built.set(index, stage);
        return stage;
      },
      used: async (index) => {
        const left = (copies.get(index) ?? 1) - 1;
        copies.set(index, left);
        if (left === 0) await (await built.get(index))?.running.stop();
      },
    };
    const { guest, running, state, alive } = await this.#stage(last, archives, stages, stack);

    const { context } = state;
    const { start, ready } = this.#commands(state);
    await inStep("finalize", () =>
      alive(
        (async () => {
          if (context.user !== undefined && context.user !== "") await guest.ensureUser(context.user);
          await this.#startAndWait(guest, state, start, ready);
        })(),
        "finalize",
      ),
    );
    return {
      running,
      context,
      resources: base.resources,
      ...(base.imageReference === undefined ? {} : { imageReference: base.imageReference }),
      ...(start === undefined ? {} : { startCmd: start.text }),
      ...(ready === undefined ? {} : { readyCmd: ready.text }),
    };
  }

  /** Runs a stage, as much of it as the cache does not have. */
  async #stage(
    plan: Plan,
    archives: ReadonlyMap<string, string>,
    stages: Stages,
    stack: AsyncDisposableStack,
  ): Promise<Stage> {
    const { log, templateId } = this.#order;
    const { base, keys, steps } = plan;
    const prefix = plan.name === "" ? "" : `${plan.name} `;
    const identity: GuestIdentity = { sandboxId: newId(), templateId, envVars: base.context.envVars };
    const { running, done, died } = await inStep(`${prefix}base`, () => this.#start(plan, identity, stack));
    const guest = new BuildGuest(createAgentClient(running.hostAddress), log);
    const alive = <T>(work: Promise<T>, step: string): Promise<T> =>
      this.bounded(Promise.race([work, died]), step);

    let state = this.#initialState(base);
    for (const [index, raw] of steps.entries()) {
      const number = `${prefix}${index + 1}`;
      const step = await inStep(number, async () => expandStep(raw, state));
      state = applyStep(state, step);
      const title = `[${number}/${steps.length}] ${describeStep(step)}`;
      if (index < done) {
        log.add("info", `CACHED ${title}`, number);
        const from = sourceStage(step);
        if (from !== undefined) await stages.used(from);
        continue;
      }
      log.add("info", title, number);
      const run: StepRun = { guest, running, state, number, archives, stages };
      await inStep(number, async () => {
        await alive(this.#guestStep(step, run), number);
        if (changesGuest(step)) await alive(this.#remember(running, identity, keys[index]!, number), number);
      });
    }
    return { guest, running, state, alive };
  }

  #initialState(base: Base): StageState {
    const { dockerfile } = this.#order.request;
    if (dockerfile === undefined) return { context: base.context };
    const { shell = DOCKER_SHELL, healthcheck } = base.image ?? {};
    const check = imageHealthcheck(healthcheck, shell);
    const state: DockerfileState = {
      escape: dockerfile.escape,
      args: {},
      shell,
      ownCmd: false,
      ...(check === undefined ? {} : { healthcheck: check }),
    };
    return { context: base.context, dockerfile: state };
  }

  /** Those of the request; a Dockerfile's ENTRYPOINT with CMD, and HEALTHCHECK, where the request has none. */
  #commands({ context, dockerfile }: StageState): { start?: Command; ready?: Command } {
    const { request } = this.#order;
    const given = (text: string | undefined): Command | undefined => {
      const command = nonEmpty(text);
      if (command === undefined) return undefined;
      return { text: command, words: dockerfile === undefined ? undefined : [...DOCKER_SHELL, command] };
    };
    const told = (words: readonly string[] | undefined): Command | undefined =>
      words === undefined || words.length === 0 ? undefined : { words, text: quoteWords(words) };
    const start =
      dockerfile !== undefined && request.startCmd === undefined
        ? told([...(context.entrypoint ?? []), ...(context.cmd ?? [])])
        : given(request.startCmd);
    // Without a start command nothing becomes healthy.
    const ready =
      dockerfile !== undefined && request.readyCmd === undefined
        ? start && told(dockerfile.healthcheck)
        : given(request.readyCmd);
    return { ...(start === undefined ? {} : { start }), ...(ready === undefined ? {} : { ready }) };
  }

  // ---- base -------------------------------------------------------------------------------------

  async #base(stack: AsyncDisposableStack): Promise<Base> {
    const { request } = this.#order;
    return request.fromTemplate === undefined
      ? this.#imageBase(request.fromImage, stack)
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

  async #imageBase(fromImage: string | undefined, stack: AsyncDisposableStack): Promise<Base> {
    const { images, sandboxes, defaultImage, cacheEpoch } = this.#parts;
    const { request, log, shape } = this.#order;
    const reference = fromImage ?? defaultImage;
    log.add("info", `resolving image ${reference}`, "base");
    const image = await this.bounded(
      images.resolve(reference, {
        ...(request.credentials === undefined ? {} : { credentials: request.credentials }),
        progress: log.progress("base"),
        signal: this.#signal,
      }),
      "base",
    ).catch(async (error: unknown) => {
      if (this.#signal.aborted) throw error;
      // A template may well have an image's name, the one being built above all.
      const template = await this.#parts.repository.resolve(reference);
      if (template?.committed === undefined || template.templateId === this.#order.templateId) throw error;
      const message = `${reference} is a template of this server, not an image; FROM takes image references`;
      throw new BuildFailure(`${message} (as an image: ${errorChain(error).join(": ")})`, "base");
    });
    // The layers must be there until they are part of a snapshot.
    stack.use(images.hold(image.lowers.map(({ file }) => file)));
    const { config, lowers, virtualSizeBytes } = image;
    if (request.dockerfile !== undefined && config.onBuild !== undefined) {
      const message = `the image ${image.reference} has ONBUILD instructions, which are not run: ${config.onBuild.join("; ")}`;
      throw new BuildFailure(message, "base");
    }
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
      image: config,
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
  async #archives(plans: readonly Plan[], stack: AsyncDisposableStack): Promise<ReadonlyMap<string, string>> {
    const files = new Map<string, string>();
    for (const { name, steps } of plans) {
      for (const [index, step] of steps.entries()) {
        if (step.type !== "COPY" && step.type !== "ADD") continue;
        const { filesHash } = step;
        if (filesHash === undefined || files.has(filesHash)) continue;
        const archive = await this.#parts.files.lease(this.#order.templateId, filesHash);
        if (archive === undefined) {
          const message = `${describeStep(step)}: its files were not uploaded, or not whole (${filesHash})`;
          throw new BuildFailure(message, `${name === "" ? "" : `${name} `}${index + 1}`);
        }
        stack.use(archive);
        files.set(filesHash, archive.file);
      }
    }
    return files;
  }

  // ---- cache ------------------------------------------------------------------------------------

  /** `requested` are the steps as they came, with their wishes about the cache. */
  #plan(
    name: string,
    base: Base,
    steps: readonly Step[],
    requested: BuildStartRequest["steps"],
    earlier: readonly Plan[],
  ): Plan {
    const { request } = this.#order;
    // A Dockerfile's steps do other things than the same words from elsewhere.
    const start =
      request.dockerfile === undefined
        ? base.key
        : chainKey(base.key, ["dockerfile", request.dockerfile.escape]);
    const keys: string[] = [];
    for (const step of steps) {
      const from = sourceStage(step);
      const source = from === undefined ? undefined : earlier[from]?.finalKey;
      keys.push(chainKey(keys.at(-1) ?? start, source === undefined ? step : [step, source]));
    }
    const forced = requested.findIndex((step) => step.force === true);
    const reusable = request.force === true ? 0 : forced < 0 ? steps.length : forced;
    return { name, steps, base, keys, finalKey: keys.at(-1) ?? start, reusable };
  }

  /** The sandbox, with as many steps done as the cache has. */
  async #start(
    { base, keys, reusable }: Plan,
    identity: GuestIdentity,
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

    for (let done = reusable; done > 0; done--) {
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

  async #guestStep(step: Step, run: StepRun): Promise<void> {
    const { guest, state, number } = run;
    const { context } = state;
    switch (step.type) {
      case "RUN": {
        const timeoutMs = this.#remaining();
        const options = { step: number, timeoutMs, ...(step.user === undefined ? {} : { user: step.user }) };
        const outcome = await guest.run(step.exec ?? step.command, state, options);
        if (outcome.exitCode !== 0) throw new BuildFailure(failureText(describeStep(step), outcome), number);
        return;
      }
      case "COPY":
      case "ADD":
        return step.from === undefined ? this.#copy(step, run) : this.#copyFromStage(step, step.from, run);
      case "WORKDIR":
        assert(context.workdir !== undefined, "a WORKDIR step sets the directory");
        return guest.agent.makeDir(
          context.workdir,
          context.user === undefined ? "root" : context.user.split(":")[0],
        );
      case "USER":
        return guest.ensureUser(step.name);
      default:
        return; // the context alone
    }
  }

  /** Where the files of a COPY go, and whose they become. */
  async #target(step: CopyStep, { guest, state }: StepRun) {
    const { context, dockerfile } = state;
    const current = context.user || "root";
    const owner = step.owner ?? (dockerfile === undefined ? current : "0:0");
    if (dockerfile === undefined && owner.split(":")[0] === DEFAULT_ACCOUNT) await guest.ensureUser(owner);
    const { uid, gid } = await guest.account(owner);
    const home = async () => (dockerfile === undefined ? (await guest.account(current)).home : "/");
    return {
      target: posix.resolve("/", context.workdir ?? (await home()), step.target),
      mustBeDirectory: /(^|\/)\.{0,2}$/.test(step.target),
      uid,
      gid,
      ...(step.mode === undefined ? {} : { mode: step.mode }),
    };
  }

  /** Each of the sources as docker copies it; with their owners, unless the step has one. */
  async #copyFromStage(step: CopyStep, from: number, run: StepRun): Promise<void> {
    const { guest, running, number } = run;
    const target = await this.#target(step, run);
    const stage = await run.stages.get(from);
    await using scratch = new AsyncDisposableStack();
    const archive = this.#parts.files.scratchPath();
    scratch.defer(() => removeTree(archive));
    const source = stageSource(step.source);
    const options = { timeoutMs: this.#remaining(), signal: this.#signal };
    await stage.alive(packFromGuest(stage.guest.agent, source, archive, options), number);
    await run.stages.used(from);
    const { members } = await listArchive(archive, NO_LIMITS, this.#signal);
    const sources = matchSources(members, source);
    let [entries, bytes] = [0, 0];
    for (const part of sources) {
      const request: CopyRequest = {
        ...target,
        archive,
        source: part,
        mustBeDirectory: target.mustBeDirectory || sources.length > 1,
        keepOwners: step.owner === undefined,
      };
      const report = await copyIntoGuest(guest.agent, running.hostAddress, request, options);
      entries += report.entries;
      bytes += report.bytes;
    }
    this.#order.log.add("info", copied(entries, bytes), number);
  }

  async #copy(step: CopyStep, run: StepRun): Promise<void> {
    const { guest, running, number } = run;
    const archive = step.filesHash === undefined ? undefined : run.archives.get(step.filesHash);
    assert(archive !== undefined, "the archives of all steps are there");
    const { members } = await listArchive(archive, NO_LIMITS, this.#signal);
    const source = selectSource(members, step.source);
    const request: CopyRequest = { ...(await this.#target(step, run)), archive, source };
    await using scratch = new AsyncDisposableStack();
    const options = { timeoutMs: this.#remaining(), signal: this.#signal };
    let unpacked: CopyRequest | undefined;
    if (step.type === "ADD" && source.kind === "file") {
      const inner = this.#parts.files.scratchPath();
      scratch.defer(() => removeTree(inner));
      if (await extractIfTar(archive, source.path, inner, NO_LIMITS, this.#signal)) {
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
    this.#order.log.add("info", copied(report.entries, report.bytes), number);
  }

  // ---- start and ready --------------------------------------------------------------------------

  async #startAndWait(
    guest: BuildGuest,
    state: StageState,
    start: Command | undefined,
    ready: Command | undefined,
  ): Promise<void> {
    const { limits } = this.#parts;
    const { log } = this.#order;
    let failed: Promise<never> | undefined;
    let over: Promise<unknown> = new Promise(() => undefined);
    if (start !== undefined) {
      log.add("info", `start command: ${start.text}`, "finalize");
      const { exited } = await guest.agent.startDetached(
        await guest.command(start.words ?? start.text, state),
      );
      // An image's default command, a shell for instance, may end at once: then there is nothing to wait for.
      if (state.dockerfile !== undefined) over = exited.catch(() => undefined);
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
    if (ready === undefined) {
      if (start === undefined) return;
      log.add(
        "info",
        `no readiness check: the start command gets ${limits.startDelayMs / 1000} s (HEALTHCHECK or --ready-cmd ends the wait sooner)`,
        "finalize",
      );
      await unlessFailed(Promise.race([Bun.sleep(limits.startDelayMs), over]));
      return;
    }
    log.add("info", `waiting for the ready command: ${ready.text}`, "finalize");
    const deadline = performance.now() + limits.readyMs;
    const command = await guest.command(ready.words ?? ready.text, state);
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
        const why = `: ${failureText("ready command", outcome)}`;
        // Once for each way of failing: one that lacks its tools would wait in silence until the limit.
        if (outcome.stderr.trim() !== "" && why !== last) log.add("warn", `not ready yet${why}`, "finalize");
        last = why;
      } catch (error) {
        if (!(error instanceof AenvError) || error.code !== "command_timeout") throw error;
        if (last === "") last = ": it did not end in time";
      }
      await unlessFailed(Bun.sleep(Math.min(limits.readyPollMs, Math.max(1, deadline - performance.now()))));
    }
  }
}

function sourceStage(step: Step): number | undefined {
  return step.type === "COPY" || step.type === "ADD" ? step.from : undefined;
}

/** Steps worth a cache entry; the others are context, or done again in no time. */
function changesGuest(step: Step): boolean {
  return step.type === "RUN" || step.type === "COPY" || step.type === "ADD";
}

function copied(entries: number, bytes: number): string {
  return `copied ${entries} entries, ${(bytes / 1048576).toFixed(1)} MiB`;
}

/** The words of an image's HEALTHCHECK as docker stores it. */
function imageHealthcheck(
  test: readonly string[] | undefined,
  shell: readonly string[],
): readonly string[] | undefined {
  if (test === undefined || test[0] === "NONE") return undefined;
  if (test[0] === "CMD") return test.slice(1);
  return test[0] === "CMD-SHELL" && test[1] !== undefined ? [...shell, test[1]] : undefined;
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
