import { mkdir, readdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import type { ImageService } from "../image/types.ts";
import { errorCode, readJson, removeTree } from "../lib/durable.ts";
import { AenvError, assert, errorChain } from "../lib/errors.ts";
import { Gate } from "../lib/gate.ts";
import { isUuid, newId } from "../lib/ids.ts";
import type { Logger } from "../lib/log.ts";
import { createAgentClient } from "../sandbox/index.ts";
import type { CommandOutcome, RunningSandbox, SandboxFactory } from "../sandbox/types.ts";
import { DEFAULT_TAG, formatName, parseAlias, parseName } from "../snapshot/index.ts";
import type { BuildRecord, SnapshotRecord, SnapshotRepository, StartupContext } from "../snapshot/types.ts";
import { BuildGuest } from "./guest.ts";
import { BuildLog } from "./log.ts";
import { applyStep, describeStep, parseSteps, type Step } from "./steps.ts";
import type { BuildLogEntry, BuildStartRequest, TemplateCreateRequest, TemplateService } from "./types.ts";

export interface TemplateServiceOptions {
  readonly repository: SnapshotRepository;
  readonly images: ImageService;
  readonly sandboxes: SandboxFactory;
  readonly defaults: { readonly cpuCount: number; readonly memoryMiB: number; readonly defaultImage: string };
  readonly maxConcurrentBuilds: number;
  /** Captures of running builds and logs of ended ones. Default: the repository's staging directory. */
  readonly workDir?: string;
  readonly log: Logger;
  /** Called after a deletion: layers may have become unused. */
  readonly onDeleted?: () => void;
  readonly limits?: Partial<BuildLimits>;
}

/** Every part of a build ends within its bound. Milliseconds. */
export interface BuildLimits {
  readonly buildMs: number;
  readonly readyMs: number;
  readonly readyPollMs: number;
  /** Wait after a start command that has no ready command. */
  readonly startDelayMs: number;
}

const DEFAULT_LIMITS: BuildLimits = {
  buildMs: 3_600_000,
  readyMs: 600_000,
  readyPollMs: 2000,
  startDelayMs: 20_000,
};
const READY_COMMAND_TIMEOUT_MS = 120_000;
const MAX_QUEUED_BUILDS = 100;

/** A failure with the step the client is shown: `base`, `finalize` or the step's 1-based number. */
class BuildFailure extends Error {
  readonly step: string;
  constructor(message: string, step: string, cause?: unknown) {
    super(message, cause === undefined ? undefined : { cause });
    this.step = step;
  }
}

interface ActiveBuild {
  readonly log: BuildLog;
  readonly abort: AbortController;
  readonly done: Promise<void>;
}

function buildOf(record: SnapshotRecord): BuildRecord {
  assert(record.source.kind === "template", `record ${record.id} is a template build`);
  return record.source.build;
}

function withBuild(record: SnapshotRecord, build: BuildRecord): SnapshotRecord {
  assert(record.source.kind === "template", `record ${record.id} is a template build`);
  return { ...record, source: { ...record.source, build }, updatedAt: new Date().toISOString() };
}

function notFound(name: string): AenvError {
  return new AenvError({
    code: "template_not_found",
    status: 404,
    message: `template ${name} was not found`,
    remediation: "list the templates with `aenv template list`",
  });
}

class Templates implements TemplateService {
  readonly #options: TemplateServiceOptions;
  readonly #limits: BuildLimits;
  readonly #gate: Gate;
  readonly #logsDir: string;
  readonly #capturesDir: string;
  readonly #active = new Map<string, ActiveBuild>();
  /** Builds between their admission check and the durable mark: a second start must not slip in. */
  readonly #starting = new Set<string>();
  #closing = false;

  constructor(options: TemplateServiceOptions) {
    this.#options = options;
    this.#limits = { ...DEFAULT_LIMITS, ...options.limits };
    const workDir = options.workDir ?? options.repository.stagingDir;
    this.#logsDir = join(workDir, "logs");
    this.#capturesDir = join(workDir, "captures");
    this.#gate = new Gate(options.maxConcurrentBuilds, "template builds", MAX_QUEUED_BUILDS);
  }

  async start(): Promise<void> {
    const { repository, log } = this.#options;
    await removeTree(this.#capturesDir);
    await mkdir(this.#capturesDir, { recursive: true, mode: 0o700 });
    await mkdir(this.#logsDir, { recursive: true, mode: 0o700 });
    const known = new Set<string>();
    for (const record of await repository.list()) {
      known.add(record.id);
      if (record.source.kind !== "template") continue;
      const { build, names } = record.source;
      const unfinished =
        build.status === "building" || (build.status === "ready" && record.committed === undefined);
      if (unfinished) {
        log.warn({ templateId: record.templateId, buildId: record.id }, "build was interrupted by a restart");
        await repository.put(
          withBuild(record, {
            ...build,
            status: "error",
            finishedAt: new Date().toISOString(),
            reason: { message: "the server was restarted while the build ran; start a new build" },
          }),
        );
      } else if (build.status === "ready") {
        // Committed, but the process ended before the names followed.
        const newest = await repository.resolve(record.templateId);
        if (newest?.id === record.id) await this.#bind(names ?? [], record.id);
      }
    }
    for (const name of await readdir(this.#logsDir)) {
      if (!known.has(name.replace(/\.json$/, ""))) await removeTree(join(this.#logsDir, name));
    }
  }

  async #bind(names: readonly string[], id: string): Promise<void> {
    for (const name of names) await this.#options.repository.bindAlias(name, id);
  }

  // ---- names ------------------------------------------------------------------------------------

  async create(
    request: TemplateCreateRequest,
  ): Promise<{ templateId: string; buildId: string; alias: string; tags: string[] }> {
    const { repository, defaults } = this.#options;
    this.#refuseWhenClosing();
    const name = parseAlias(request.name);
    const explicit = request.name.includes(":") ? [name.tag] : [];
    const tags = [...new Set([...explicit, ...request.tags])];
    if (tags.length === 0) tags.push(name.tag);
    const names = tags.map((tag) => {
      const parsed = parseAlias(`${name.base}:${tag}`);
      return formatName(parsed.base, parsed.tag);
    });
    const resources = {
      cpuCount: request.cpuCount ?? defaults.cpuCount,
      memoryMiB: request.memoryMiB ?? defaults.memoryMiB,
      diskSizeMiB: 0,
    };
    if (!(Number.isInteger(resources.cpuCount) && resources.cpuCount >= 1 && resources.cpuCount <= 64)) {
      throw new AenvError({
        code: "invalid_request",
        status: 400,
        message: "cpuCount must be a whole number, 1 to 64",
      });
    }
    if (
      !(Number.isInteger(resources.memoryMiB) && resources.memoryMiB >= 128 && resources.memoryMiB <= 1 << 20)
    ) {
      throw new AenvError({
        code: "invalid_request",
        status: 400,
        message: "memoryMB must be a whole number of MiB, 128 to 1048576",
      });
    }
    // The loop: someone else may take the name between the look and the binding.
    for (let attempt = 0; ; attempt++) {
      const owner = await this.#owner(name.base);
      if (owner?.source.kind === "sandbox") {
        throw new AenvError({
          code: "alias_conflict",
          status: 400,
          message: `the name ${name.base} belongs to snapshot ${owner.id}`,
          remediation: "choose another name or delete that snapshot first",
        });
      }
      const id = newId();
      const now = new Date().toISOString();
      const record: SnapshotRecord = {
        id,
        templateId: owner?.templateId ?? id,
        aliases: [],
        public: true,
        source: { kind: "template", build: { status: "waiting" }, names },
        resources,
        createdAt: now,
        updatedAt: now,
      };
      await repository.put(record);
      if (owner === undefined) {
        // A new template owns its names at once; a rebuild gets them when it is ready.
        try {
          await this.#bind(names, id);
        } catch (error) {
          await repository.delete(id);
          if (error instanceof AenvError && error.code === "alias_conflict" && attempt < 5) continue;
          throw error;
        }
      }
      return { templateId: record.templateId, buildId: id, alias: name.base, tags };
    }
  }

  /** Some record of the template (or the snapshot) that has the alias under any tag. */
  async #owner(alias: string): Promise<SnapshotRecord | undefined> {
    const direct = await this.#options.repository.resolve(alias);
    if (direct !== undefined) return direct;
    const records = await this.#options.repository.list();
    return records.find((record) => record.aliases.some((text) => parseAlias(text).base === alias));
  }

  async list(): Promise<SnapshotRecord[]> {
    return (await this.#options.repository.list()).filter((record) => record.source.kind === "template");
  }

  async resolve(name: string): Promise<SnapshotRecord | undefined> {
    return this.#options.repository.resolve(name);
  }

  async delete(name: string): Promise<void> {
    const { repository, log, onDeleted } = this.#options;
    const record = await repository.resolve(name);
    if (record === undefined) throw notFound(name);
    const doomed =
      record.source.kind === "sandbox"
        ? [record]
        : (await repository.list()).filter((build) => build.templateId === record.templateId);
    this.#refuseWhileBuilding(doomed, `template ${name} cannot be deleted`);
    for (const build of doomed) {
      await repository.delete(build.id);
      await removeTree(join(this.#logsDir, `${build.id}.json`));
    }
    log.info({ templateId: record.templateId, builds: doomed.length }, "template deleted");
    onDeleted?.();
  }

  #refuseWhileBuilding(builds: readonly SnapshotRecord[], what: string): void {
    const busy = builds.find((build) => this.#active.has(build.id) || this.#starting.has(build.id));
    if (busy === undefined) return;
    throw new AenvError({
      code: "template_busy",
      status: 409,
      message: `${what} while its build ${busy.id} runs`,
      remediation: "wait until the build has ended",
    });
  }

  // ---- tags -------------------------------------------------------------------------------------

  async assignTags(target: string, tags: readonly string[]): Promise<{ buildId: string; tags: string[] }> {
    const { base } = parseAlias(target);
    const names = tags.map((tag) => parseAlias(`${base}:${tag}`));
    const record = await this.#options.repository.resolve(target);
    if (record === undefined || record.source.kind !== "template") throw notFound(target);
    await this.#bind(
      names.map((name) => formatName(name.base, name.tag)),
      record.id,
    );
    return { buildId: record.id, tags: [...new Set(names.map((name) => name.tag))] };
  }

  async removeTags(text: string, tags: readonly string[]): Promise<void> {
    const { base } = parseAlias(text);
    const names = tags.map((tag) => parseAlias(`${base}:${tag}`));
    if (names.some((name) => name.tag === DEFAULT_TAG)) {
      throw new AenvError({
        code: "invalid_request",
        status: 400,
        message: `the tag ${DEFAULT_TAG} of ${base} cannot be removed`,
        remediation: "point it at another build, or delete the template",
      });
    }
    const owner = await this.#owner(base);
    if (owner?.source.kind !== "template") throw notFound(base);
    for (const { tag } of names) {
      const name = formatName(base, tag);
      const record = await this.#options.repository.resolve(name);
      if (record !== undefined) await this.#options.repository.unbindAlias(name, record.id);
    }
  }

  async tags(name: string): Promise<{ tag: string; buildId: string; createdAt: string }[]> {
    const builds = await this.#builds(name);
    const entries = builds.flatMap((build) =>
      build.aliases.map((alias) => ({
        tag: parseAlias(alias).tag,
        buildId: build.id,
        createdAt: build.createdAt,
      })),
    );
    return entries.sort((a, b) => (a.createdAt === b.createdAt ? 0 : a.createdAt < b.createdAt ? 1 : -1));
  }

  async setPublic(name: string, isPublic: boolean): Promise<string[]> {
    const builds = await this.#builds(name);
    // A running build stores its own record: a change from here could undo it.
    this.#refuseWhileBuilding(builds, `template ${name} cannot be changed`);
    for (const build of builds) {
      if (build.public !== isPublic) await this.#options.repository.put({ ...build, public: isPublic });
    }
    return [...new Set(builds.flatMap((build) => build.aliases))];
  }

  /** All builds of a template that is there under an id or a name. */
  async #builds(name: string): Promise<SnapshotRecord[]> {
    const { repository } = this.#options;
    const parsed = parseName(name);
    const record =
      (await repository.resolve(name)) ??
      (parsed === undefined || parsed.isId ? undefined : await this.#owner(parsed.base));
    const templateId = record?.templateId ?? name.toLowerCase();
    const builds = (await this.list()).filter((build) => build.templateId === templateId);
    if (builds.length === 0) throw notFound(name);
    return builds;
  }

  // ---- builds -----------------------------------------------------------------------------------

  async #find(templateName: string, buildId: string): Promise<SnapshotRecord> {
    const { repository } = this.#options;
    const build = isUuid(buildId) ? await repository.get(buildId) : undefined;
    const owner = build?.templateId === templateName ? build : await repository.resolve(templateName);
    if (build === undefined || build.source.kind !== "template" || owner?.templateId !== build.templateId) {
      throw new AenvError({
        code: "build_not_found",
        status: 404,
        message: `template ${templateName} has no build ${buildId}`,
      });
    }
    return build;
  }

  async build(
    templateId: string,
    buildId: string,
  ): Promise<{ record: SnapshotRecord; build: BuildRecord; logs: readonly BuildLogEntry[] }> {
    const record = await this.#find(templateId, buildId);
    return { record, build: buildOf(record), logs: await this.#logs(record.id) };
  }

  async #logs(buildId: string): Promise<readonly BuildLogEntry[]> {
    const active = this.#active.get(buildId);
    if (active !== undefined) return active.log.entries;
    try {
      return (await readJson(join(this.#logsDir, `${buildId}.json`))) as BuildLogEntry[];
    } catch (error) {
      if (errorCode(error) === "ENOENT") return [];
      throw error;
    }
  }

  #refuseWhenClosing(): void {
    if (!this.#closing) return;
    throw new AenvError({ code: "shutting_down", status: 503, message: "the server is shutting down" });
  }

  async startBuild(templateId: string, buildId: string, request: BuildStartRequest): Promise<void> {
    const { repository, log } = this.#options;
    this.#refuseWhenClosing();
    if (request.fromImage !== undefined && request.fromTemplate !== undefined) {
      throw new AenvError({
        code: "invalid_request",
        status: 400,
        message: "fromImage and fromTemplate are both given",
        remediation: "give one of them",
      });
    }
    const steps = parseSteps(request.steps);
    const record = await this.#find(templateId, buildId);
    const { status } = buildOf(record);
    if (status !== "waiting" || this.#active.has(record.id) || this.#starting.has(record.id)) {
      throw new AenvError({
        code: "build_state_conflict",
        status: 409,
        message: `build ${record.id} was started before (${status === "waiting" ? "building" : status})`,
        remediation: "create a new build under the same name",
      });
    }
    if (this.#gate.full) {
      throw new AenvError({
        code: "build_capacity_unavailable",
        status: 429,
        message: `${MAX_QUEUED_BUILDS} builds wait already`,
        remediation: "retry later",
        headers: { "Retry-After": "30" },
      });
    }
    this.#starting.add(record.id);
    try {
      const building = withBuild(record, { status: "building", startedAt: new Date().toISOString() });
      await repository.put(building);
      const buildLog = new BuildLog([], (entry) => log.debug({ buildId: record.id, ...entry }, "build log"));
      const abort = new AbortController();
      const done = this.#gate
        .run(() => this.#execute(building, steps, request, buildLog, abort.signal))
        .catch((error: unknown) =>
          log.error({ err: error, buildId: record.id }, "the end of a build was not recorded"),
        )
        .finally(() => this.#active.delete(record.id));
      this.#active.set(record.id, { log: buildLog, abort, done });
    } finally {
      this.#starting.delete(record.id);
    }
  }

  /** Runs a build to its recorded end; throws only when that end could not be recorded. */
  async #execute(
    record: SnapshotRecord,
    steps: readonly Step[],
    request: BuildStartRequest,
    log: BuildLog,
    cancelled: AbortSignal,
  ): Promise<void> {
    const { repository } = this.#options;
    const captureDir = join(this.#capturesDir, record.id);
    try {
      await this.#build(record, steps, request, log, cancelled, captureDir);
    } catch (error) {
      const step = error instanceof BuildFailure ? error.step : undefined;
      const message = errorChain(error).join(": ");
      log.add("error", message, step);
      this.#options.log.warn({ err: error, buildId: record.id }, "template build failed");
      await repository.put(
        withBuild(record, {
          ...buildOf(record),
          status: "error",
          finishedAt: new Date().toISOString(),
          reason: { message, ...(step === undefined ? {} : { step }) },
        }),
      );
    } finally {
      await removeTree(captureDir);
      log.close();
      // Written before the build leaves the table of active ones: a reader finds its entries all along.
      await writeFile(join(this.#logsDir, `${record.id}.json`), JSON.stringify(log.entries), { mode: 0o600 });
    }
  }

  async #build(
    record: SnapshotRecord,
    steps: readonly Step[],
    request: BuildStartRequest,
    log: BuildLog,
    cancelled: AbortSignal,
    captureDir: string,
  ): Promise<void> {
    const { repository } = this.#options;
    const limit = AbortSignal.timeout(this.#limits.buildMs);
    const signal = AbortSignal.any([limit, cancelled]);
    const deadline = performance.now() + this.#limits.buildMs;
    const bounded = <T>(work: Promise<T>, step: string): Promise<T> =>
      abortable(work, signal, () =>
        limit.aborted
          ? new BuildFailure(`the build did not end within ${this.#limits.buildMs / 1000} s`, step)
          : new BuildFailure("the server is shutting down", step),
      );
    const remaining = (): number => Math.max(1, deadline - performance.now());

    if (signal.aborted) throw new BuildFailure("the server is shutting down", "base");
    await using resources = new AsyncDisposableStack();
    const base = await inStep("base", () => this.#base(record, request, log, signal, bounded, resources));
    const { running, resources: sizes } = base;
    let { context } = base;
    const guest = new BuildGuest(createAgentClient(running.hostAddress), log);
    const died = running.exited.then((exit) => {
      throw new Error(
        `the VM of the build ended (${exit.signal ?? `exit code ${exit.exitCode}`}): ${exit.stderrTail}`,
      );
    });
    died.catch(() => undefined);
    const alive = <T>(work: Promise<T>, step: string): Promise<T> =>
      bounded(Promise.race([work, died]), step);

    for (const [index, step] of steps.entries()) {
      const number = String(index + 1);
      log.add("info", `[${number}/${steps.length}] ${describeStep(step)}`, number);
      context = applyStep(context, step);
      const now = context;
      await inStep(number, () => alive(this.#guestStep(guest, step, now, number, remaining()), number));
    }

    const startCmd = nonEmpty(request.startCmd);
    const readyCmd = nonEmpty(request.readyCmd);
    await inStep("finalize", () =>
      alive(
        (async () => {
          if (context.user !== undefined && context.user !== "") await guest.ensureUser(context.user);
          await this.#startAndWait(guest, context, startCmd, readyCmd, log);
        })(),
        "finalize",
      ),
    );

    await inStep("finalize", async () => {
      log.add("info", "capturing the sandbox", "finalize");
      const { state, timings } = await bounded(running.capture(captureDir), "finalize");
      log.add("debug", `captured in ${Math.round(timings.total ?? 0)} ms`, "finalize");
      await running.stop();
      log.add("info", "publishing", "finalize");
      const finishedAt = new Date().toISOString();
      const ready = withBuild(record, { ...buildOf(record), status: "ready", finishedAt });
      await repository.commit(
        {
          ...ready,
          resources: { ...sizes, diskSizeMiB: Math.ceil(state.rootfs.virtualSizeBytes / 1048576) },
          committed: {
            state,
            context,
            ...(startCmd === undefined ? {} : { startCmd }),
            ...(readyCmd === undefined ? {} : { readyCmd }),
            ...(base.imageReference === undefined ? {} : { imageReference: base.imageReference }),
          },
        },
        state,
      );
      assert(record.source.kind === "template", "a build is a template's");
      await this.#bind(record.source.names ?? [], record.id);
    });
  }

  /** The running sandbox a build starts from. */
  async #base(
    record: SnapshotRecord,
    request: BuildStartRequest,
    log: BuildLog,
    signal: AbortSignal,
    bounded: <T>(work: Promise<T>, step: string) => Promise<T>,
    resources: AsyncDisposableStack,
  ): Promise<{
    running: RunningSandbox;
    context: StartupContext;
    resources: { cpuCount: number; memoryMiB: number };
    imageReference?: string;
  }> {
    const { repository, images, sandboxes, defaults } = this.#options;
    const sandboxId = newId();
    const keep = async (started: Promise<RunningSandbox>): Promise<RunningSandbox> => {
      // A start that outlives its bound still ends: whatever it makes is released.
      resources.defer(async () => {
        const [outcome] = await Promise.allSettled([started]);
        if (outcome.status === "fulfilled") await outcome.value.stop();
      });
      return bounded(started, "base");
    };

    if (request.fromTemplate !== undefined) {
      const lease = await repository.lease(request.fromTemplate);
      if (lease?.record.committed === undefined) {
        lease?.[Symbol.dispose]();
        throw new BuildFailure(
          `template ${request.fromTemplate} does not exist or has no ready build`,
          "base",
        );
      }
      resources.use(lease);
      const { committed, resources: sizes } = lease.record;
      log.add("info", `starting from template ${request.fromTemplate}`, "base");
      const identity = { sandboxId, templateId: record.templateId, envVars: committed.context.envVars };
      const running = await keep(sandboxes.resume({ identity, state: committed.state }));
      return {
        running,
        context: committed.context,
        resources: { cpuCount: sizes.cpuCount, memoryMiB: sizes.memoryMiB },
        ...(committed.imageReference === undefined ? {} : { imageReference: committed.imageReference }),
      };
    }

    const reference = request.fromImage ?? defaults.defaultImage;
    log.add("info", `resolving image ${reference}`, "base");
    const image = await bounded(
      images.resolve(reference, {
        ...(request.credentials === undefined ? {} : { credentials: request.credentials }),
        progress: log.progress("base"),
        signal,
      }),
      "base",
    );
    log.add("info", `booting ${image.reference}`, "base");
    const { cpuCount, memoryMiB } = record.resources;
    const running = await keep(
      sandboxes.boot({
        identity: { sandboxId, templateId: record.templateId, envVars: image.config.env },
        shape: { vcpuCount: cpuCount, memoryMiB },
        rootfs: { lowers: image.lowers, virtualSizeBytes: image.virtualSizeBytes },
      }),
    );
    log.add("info", `booted in ${((running.timings.total ?? 0) / 1000).toFixed(1)} s`, "base");
    const { config } = image;
    const context: StartupContext = {
      envVars: config.env,
      ...(config.workingDir === undefined || config.workingDir === "" ? {} : { workdir: config.workingDir }),
      ...(config.user === undefined || config.user === "" ? {} : { user: config.user }),
      exposedPorts: config.exposedPorts,
      ...(config.entrypoint === undefined ? {} : { entrypoint: config.entrypoint }),
      ...(config.cmd === undefined ? {} : { cmd: config.cmd }),
      volumes: config.volumes,
      labels: config.labels,
    };
    const pinned = image.reference.includes("@")
      ? image.reference
      : `${image.reference.replace(/:[^/:]+$/, "")}@${image.manifestDigest}`;
    return { running, context, resources: { cpuCount, memoryMiB }, imageReference: pinned };
  }

  async #guestStep(
    guest: BuildGuest,
    step: Step,
    context: StartupContext,
    number: string,
    timeoutMs: number,
  ): Promise<void> {
    switch (step.type) {
      case "RUN": {
        const options = { step: number, timeoutMs, ...(step.user === undefined ? {} : { user: step.user }) };
        const outcome = await guest.run(step.command, context, options);
        if (outcome.exitCode !== 0) throw new BuildFailure(failureText(describeStep(step), outcome), number);
        return;
      }
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

  async #startAndWait(
    guest: BuildGuest,
    context: StartupContext,
    startCmd: string | undefined,
    readyCmd: string | undefined,
    log: BuildLog,
  ): Promise<void> {
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
      if (startCmd !== undefined) await unlessFailed(Bun.sleep(this.#limits.startDelayMs));
      return;
    }
    log.add("info", `waiting for the ready command: ${readyCmd}`, "finalize");
    const deadline = performance.now() + this.#limits.readyMs;
    const command = await guest.command(readyCmd, context);
    for (let last = ""; ; ) {
      const left = deadline - performance.now();
      if (left <= 0) {
        const message = `the ready command did not succeed within ${this.#limits.readyMs / 1000} s${last}`;
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
      await unlessFailed(
        Bun.sleep(Math.min(this.#limits.readyPollMs, Math.max(1, deadline - performance.now()))),
      );
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#closing = true;
    const active = [...this.#active.values()];
    for (const build of active) build.abort.abort();
    await Promise.all(active.map((build) => build.done));
  }
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
async function inStep<T>(step: string, work: () => Promise<T>): Promise<T> {
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

export function createTemplateService(options: TemplateServiceOptions): TemplateService {
  return new Templates(options);
}
