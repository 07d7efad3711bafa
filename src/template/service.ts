import { mkdir, readdir } from "node:fs/promises";
import { join } from "node:path";
import type { ImageService } from "../image/types.ts";
import { removeTree } from "../lib/durable.ts";
import { AenvError, assert, errorChain } from "../lib/errors.ts";
import { Gate } from "../lib/gate.ts";
import { isUuid, newId } from "../lib/ids.ts";
import type { Logger } from "../lib/log.ts";
import type { SandboxFactory } from "../sandbox/types.ts";
import { DEFAULT_TAG, formatName, parseAlias, parseName } from "../snapshot/index.ts";
import type { BuildRecord, SnapshotRecord, SnapshotRepository } from "../snapshot/types.ts";
import { Build, BuildFailure, type BuildLimits, type BuildOrder, inStep } from "./build.ts";
import { FileStore, HASH } from "./files.ts";
import { BuildLog, endLogLine, LogFile } from "./log.ts";
import { LogReader, logOf } from "./log-reader.ts";
import { StepCache } from "./step-cache.ts";
import { parseSteps } from "./steps.ts";
import type { BuildLogs, BuildStartRequest, TemplateCreateRequest, TemplateService } from "./types.ts";

export interface TemplateServiceOptions {
  readonly repository: SnapshotRepository;
  readonly images: ImageService;
  readonly sandboxes: Pick<SandboxFactory, "boot" | "resume">;
  readonly defaults: {
    readonly cpuCount: number;
    readonly memoryMiB: number;
    readonly defaultImage: string;
    /** Of every disk that is made from an image. */
    readonly diskSizeMiB: number;
  };
  readonly maxConcurrentBuilds: number;
  /** Captures of running builds and logs of ended ones. Default: the repository's staging directory. */
  readonly workDir?: string;
  readonly log: Logger;
  /** Called after a deletion: layers may have become unused. */
  readonly onDeleted?: () => void;
  readonly limits?: Partial<BuildLimits>;
  /** Bytes of cached build steps and of uploaded archives. Defaults: 20 GiB each; 0 steps: no step cache. */
  readonly maxStepCacheBytes?: number;
  readonly maxUploadCacheBytes?: number;
  /** Of one uploaded archive, as sent. Default 5 GiB. */
  readonly maxUploadBytes?: number;
  /** What besides image and steps decides what a guest is, e.g. the name of the initrd: part of cache keys. */
  readonly cacheEpoch?: string;
}

const GIB = 1024 ** 3;
/** Bounds of one archive: what a virtual disk of the default size could hold. */
const ARCHIVE_LIMITS = { maxEntries: 1_000_000, maxContentBytes: 64 * GIB };

const DEFAULT_LIMITS: BuildLimits = {
  buildMs: 3_600_000,
  readyMs: 600_000,
  readyPollMs: 2000,
  startDelayMs: 20_000,
};
const MAX_QUEUED_BUILDS = 100;

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
  readonly #files: FileStore;
  readonly #cache: StepCache;
  readonly #logReader = new LogReader();
  readonly #active = new Map<string, ActiveBuild>();
  /** Builds between their admission check and the durable mark: a second start must not slip in. */
  readonly #starting = new Set<string>();
  /** Builds that are committed and do not have their names yet: not ready for who waits for them. */
  readonly #publishing = new Set<string>();
  /** The last work that was asked for per template, see {@link #inTurn}. */
  readonly #turns = new Map<string, Promise<unknown>>();
  #closing = false;

  constructor(options: TemplateServiceOptions) {
    this.#options = options;
    this.#limits = { ...DEFAULT_LIMITS, ...options.limits };
    const workDir = options.workDir ?? options.repository.stagingDir;
    this.#logsDir = join(workDir, "logs");
    this.#capturesDir = join(workDir, "captures");
    const { log } = options;
    this.#files = new FileStore({
      root: join(workDir, "files"),
      maxUploadBytes: options.maxUploadBytes ?? 5 * GIB,
      maxTotalBytes: options.maxUploadCacheBytes ?? 20 * GIB,
      archive: ARCHIVE_LIMITS,
      log,
    });
    this.#cache = new StepCache({
      root: join(workDir, "steps"),
      maxBytes: options.maxStepCacheBytes ?? 20 * GIB,
      log,
    });
    // Who may wait in it is decided where a build is accepted.
    this.#gate = new Gate(options.maxConcurrentBuilds, "template builds", Number.MAX_SAFE_INTEGER);
  }

  async start(): Promise<void> {
    const { repository, log } = this.#options;
    await removeTree(this.#capturesDir);
    await mkdir(this.#capturesDir, { recursive: true, mode: 0o700 });
    await mkdir(this.#logsDir, { recursive: true, mode: 0o700 });
    await this.#files.start();
    await this.#cache.start();
    const known = new Set<string>();
    const templates = new Set<string>();
    for (const record of await repository.list()) {
      known.add(record.id);
      if (record.source.kind !== "template") continue;
      templates.add(record.templateId);
      const { build, names } = record.source;
      const unfinished =
        build.status === "building" || (build.status === "ready" && record.committed === undefined);
      if (unfinished) {
        log.warn({ templateId: record.templateId, buildId: record.id }, "build was interrupted by a restart");
        const message = "the server was restarted while the build ran; start a new build";
        const buildLog = new BuildLog();
        buildLog.add("error", message);
        await endLogLine(this.#logPath(record.id));
        await using _file = new LogFile(this.#logPath(record.id), buildLog, (error) =>
          log.error({ err: error }, "build log not written"),
        );
        await repository.put(
          withBuild(record, {
            ...build,
            status: "error",
            finishedAt: new Date().toISOString(),
            reason: { message },
          }),
        );
      } else if (build.status === "ready") {
        // Committed, but the process ended before the names followed.
        const newest = await repository.resolve(record.templateId);
        if (newest?.id === record.id) await this.#bind(names ?? [], record.id);
      }
    }
    for (const name of await readdir(this.#logsDir)) {
      if (!known.has(name.replace(/\.jsonl?$/, ""))) await removeTree(join(this.#logsDir, name));
    }
    await this.#files.sweep(templates);
  }

  async #bind(names: readonly string[], id: string): Promise<void> {
    for (const name of names) await this.#options.repository.bindAlias(name, id);
  }

  /**
   * What changes the records of a template, one after the other: a build that is accepted is there for a deletion, and
   * what comes after a deletion finds nothing. What a build does once it was accepted needs no turn: it is in the table
   * of active ones.
   */
  async #inTurn<T>(templateId: string, action: () => Promise<T>): Promise<T> {
    const before = this.#turns.get(templateId) ?? Promise.resolve();
    const turn = before.then(action, action);
    this.#turns.set(templateId, turn);
    try {
      return await turn;
    } finally {
      if (this.#turns.get(templateId) === turn) this.#turns.delete(templateId);
    }
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
    const { minFreeDiskMiB = 0 } = request;
    if (minFreeDiskMiB >= defaults.diskSizeMiB) {
      throw new AenvError({
        code: "invalid_request",
        status: 400,
        message: `minFreeDiskMb: ${minFreeDiskMiB} MiB cannot be free on this server's disks of ${defaults.diskSizeMiB} MiB`,
        remediation: "ask for less, or set image.cache.virtual_size_gib to more",
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
      if (owner === undefined) {
        // A new template owns its names at once; a rebuild gets them when it is ready.
        await repository.put(record);
        try {
          await this.#bind(names, id);
        } catch (error) {
          await repository.delete(id);
          if (error instanceof AenvError && error.code === "alias_conflict" && attempt < 5) continue;
          throw error;
        }
      } else {
        const added = await this.#inTurn(owner.templateId, async () => {
          // Deleted since it was looked up: the name is free, or another one's.
          if ((await this.#owner(name.base))?.templateId !== owner.templateId) return false;
          await repository.put(record);
          return true;
        });
        if (!added) continue;
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
    await this.#inTurn(record.templateId, async () => {
      const doomed = await this.#recordsWith(record);
      // Another deletion was faster: it is as wished.
      if (doomed.length === 0) return;
      await this.#settle(doomed);
      this.#refuseWhileBuilding(doomed, `template ${name} cannot be deleted`);
      for (const build of doomed) {
        await repository.delete(build.id);
        await removeTree(this.#logPath(build.id));
        this.#logReader.forget(this.#logPath(build.id));
      }
      await this.#files.remove(record.templateId);
      log.info({ templateId: record.templateId, builds: doomed.length }, "template deleted");
      onDeleted?.();
    });
  }

  /** All builds of a record's template, or the snapshot by itself; none when it is gone. */
  async #recordsWith(record: SnapshotRecord): Promise<SnapshotRecord[]> {
    const { repository } = this.#options;
    if (record.source.kind === "template") {
      return (await this.list()).filter((build) => build.templateId === record.templateId);
    }
    const snapshot = await repository.get(record.id);
    return snapshot === undefined ? [] : [snapshot];
  }

  /** Waits for builds that have ended by their record and are still being cleared away. */
  async #settle(builds: readonly SnapshotRecord[]): Promise<void> {
    for (const build of builds) {
      if (build.source.kind !== "template") continue;
      const { status } = build.source.build;
      if (status === "ready" || status === "error") await this.#active.get(build.id)?.done;
    }
  }

  #refuseWhileBuilding(builds: readonly SnapshotRecord[], what: string): void {
    const busy = builds.find((build) => this.#active.has(build.id) || this.#starting.has(build.id));
    if (busy === undefined) return;
    throw new AenvError({
      code: "template_busy",
      status: 409,
      message: `${what} while its build ${busy.id} runs`,
      remediation: "wait until the build has ended, or end it with: aenv template cancel TEMPLATE",
    });
  }

  // ---- tags -------------------------------------------------------------------------------------

  async assignTags(target: string, tags: readonly string[]): Promise<{ buildId: string; tags: string[] }> {
    const { base } = parseAlias(target);
    const names = tags.map((tag) => parseAlias(`${base}:${tag}`));
    const record = await this.#options.repository.resolve(target);
    if (record === undefined || record.source.kind !== "template") throw notFound(target);
    await this.#inTurn(record.templateId, async () => {
      if ((await this.#options.repository.get(record.id)) === undefined) throw notFound(target);
      await this.#bind(
        names.map((name) => formatName(name.base, name.tag)),
        record.id,
      );
    });
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
    const [{ templateId }] = await this.#builds(name);
    return await this.#inTurn(templateId, async () => {
      const builds = await this.#builds(templateId);
      // A running build stores its own record: a change from here could undo it.
      await this.#settle(builds);
      this.#refuseWhileBuilding(builds, `template ${name} cannot be changed`);
      for (const build of builds) {
        if (build.public !== isPublic) await this.#options.repository.put({ ...build, public: isPublic });
      }
      return [...new Set(builds.flatMap((build) => build.aliases))];
    });
  }

  /** All builds of a template that is there under an id or a name. */
  async #builds(name: string): Promise<[SnapshotRecord, ...SnapshotRecord[]]> {
    const { repository } = this.#options;
    const parsed = parseName(name);
    const record =
      (await repository.resolve(name)) ??
      (parsed === undefined || parsed.isId ? undefined : await this.#owner(parsed.base));
    const templateId = record?.templateId ?? name.toLowerCase();
    const builds = (await this.list()).filter((build) => build.templateId === templateId);
    const [first, ...others] = builds;
    if (first === undefined) throw notFound(name);
    return [first, ...others];
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
  ): Promise<{ record: SnapshotRecord; build: BuildRecord; logs: BuildLogs }> {
    const { id } = await this.#find(templateId, buildId);
    const unnamed = this.#publishing.has(id);
    // Read after the look: what is ready by now has its names.
    const record = await this.#find(templateId, id);
    const build = buildOf(record);
    const shown: BuildRecord = unnamed && build.status === "ready" ? { ...build, status: "building" } : build;
    return { record, build: shown, logs: this.#logs(id) };
  }

  #logs(buildId: string): BuildLogs {
    return {
      select: async (query) => {
        const active = this.#active.get(buildId);
        if (active !== undefined) return await logOf(() => active.log.entries).select(query);
        return await this.#logReader.select(this.#logPath(buildId), query);
      },
    };
  }

  #logPath(buildId: string): string {
    return join(this.#logsDir, `${buildId}.jsonl`);
  }

  async cancel(templateId: string, buildId: string): Promise<void> {
    const record = await this.#find(templateId, buildId);
    const active = this.#active.get(record.id);
    if (active === undefined) {
      throw new AenvError({
        code: "build_state_conflict",
        status: 409,
        message: `build ${record.id} does not run (${buildOf(record).status})`,
      });
    }
    active.abort.abort(new Error("the build was cancelled"));
    await active.done;
  }

  // ---- files ------------------------------------------------------------------------------------

  /** The template's own id: uploads belong to it, whatever it is called. */
  async #filesOwner(templateName: string, hash: string): Promise<string> {
    if (!HASH.test(hash)) {
      throw new AenvError({
        code: "invalid_request",
        status: 400,
        message: "the files hash must be 64 lower-case hexadecimal digits",
      });
    }
    const direct = await this.#options.repository.resolve(templateName);
    const record =
      direct ?? (await this.list()).find((build) => build.templateId === templateName.toLowerCase());
    if (record === undefined || record.source.kind !== "template") throw notFound(templateName);
    return record.templateId;
  }

  async hasFiles(templateId: string, hash: string): Promise<boolean> {
    return this.#files.has(await this.#filesOwner(templateId, hash), hash);
  }

  async putFiles(
    templateId: string,
    hash: string,
    body: AsyncIterable<Uint8Array>,
    options: { readonly signal: AbortSignal; readonly declaredBytes?: number },
  ): Promise<void> {
    this.#refuseWhenClosing();
    const owner = await this.#filesOwner(templateId, hash);
    const admit = (publish: () => Promise<void>): Promise<void> =>
      this.#inTurn(owner, async () => {
        // It may have been deleted during the upload.
        await this.#filesOwner(owner, hash);
        await publish();
      });
    await this.#files.put(owner, hash, body, { ...options, admit });
  }

  async pinnedFiles(): Promise<ReadonlySet<string>> {
    return this.#cache.files();
  }

  #refuseWhenClosing(): void {
    if (!this.#closing) return;
    throw new AenvError({ code: "shutting_down", status: 503, message: "the server is shutting down" });
  }

  async startBuild(templateId: string, buildId: string, request: BuildStartRequest): Promise<void> {
    this.#refuseWhenClosing();
    if (request.fromImage !== undefined && request.fromTemplate !== undefined) {
      throw new AenvError({
        code: "invalid_request",
        status: 400,
        message: "fromImage and fromTemplate are both given",
        remediation: "give one of them",
      });
    }
    const { stages = [] } = request;
    const dockerfile = request.dockerfile !== undefined;
    if (stages.length > 0 && !dockerfile) {
      throw new AenvError({
        code: "invalid_request",
        status: 400,
        message: "stages are for the steps of a Dockerfile",
        remediation: 'add "dockerfile": {} to the request',
      });
    }
    const stageSteps = stages.map(({ name, steps }, index) =>
      parseSteps(steps, { dockerfile, stage: name ?? `stage ${index}`, stages: index }),
    );
    const steps = parseSteps(request.steps, { dockerfile, stages: stages.length });
    const { templateId: owner } = await this.#find(templateId, buildId);
    await this.#inTurn(owner, async () =>
      this.#accept(await this.#find(templateId, buildId), { steps, stageSteps }, request),
    );
  }

  /** Its turn. On return the build is durably marked as one that runs, and is active. */
  async #accept(
    record: SnapshotRecord,
    parsed: Pick<BuildOrder, "steps" | "stageSteps">,
    request: BuildStartRequest,
  ): Promise<void> {
    const { repository, log } = this.#options;
    const { status } = buildOf(record);
    if (status !== "waiting" || this.#active.has(record.id) || this.#starting.has(record.id)) {
      throw new AenvError({
        code: "build_state_conflict",
        status: 409,
        message: `build ${record.id} was started before (${status === "waiting" ? "building" : status})`,
        remediation: "create a new build under the same name",
      });
    }
    // Those that are just being accepted count: between this look and their place in the queue they wait for the disk.
    const accepted = this.#active.size + this.#starting.size;
    if (accepted >= this.#options.maxConcurrentBuilds + MAX_QUEUED_BUILDS) {
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
      // The look above was waited for: a stop that began meanwhile must find every build.
      this.#refuseWhenClosing();
      const building = withBuild(record, { status: "building", startedAt: new Date().toISOString() });
      await repository.put(building);
      const buildLog = new BuildLog([], (entry) => log.debug({ buildId: record.id, ...entry }, "build log"));
      const abort = new AbortController();
      const done = this.#gate
        .run(() => this.#execute(building, parsed, request, buildLog, abort.signal), abort.signal)
        .catch(async (error: unknown) => {
          // Cancelled while it waited: it is recorded as any build that ends early.
          if (error !== abort.signal.reason || !abort.signal.aborted) throw error;
          await this.#execute(building, parsed, request, buildLog, abort.signal);
        })
        .catch((error: unknown) =>
          log.error({ err: error, buildId: record.id }, "the end of a build was not recorded"),
        )
        .finally(() => {
          this.#active.delete(record.id);
          this.#publishing.delete(record.id);
        });
      this.#active.set(record.id, { log: buildLog, abort, done });
    } finally {
      this.#starting.delete(record.id);
    }
  }

  /** Runs a build to its recorded end; throws only when that end could not be recorded. */
  async #execute(
    record: SnapshotRecord,
    parsed: Pick<BuildOrder, "steps" | "stageSteps">,
    request: BuildStartRequest,
    log: BuildLog,
    cancelled: AbortSignal,
  ): Promise<void> {
    const { repository } = this.#options;
    const captureDir = join(this.#capturesDir, record.id);
    await using file = new LogFile(this.#logPath(record.id), log, (error) =>
      this.#options.log.error({ err: error, buildId: record.id }, "build log not written"),
    );
    try {
      cancelled.throwIfAborted();
      await this.#build(record, parsed, request, log, cancelled, captureDir);
    } catch (error) {
      const step = error instanceof BuildFailure ? error.step : undefined;
      const cure = imageRemedy(error);
      const message = `${errorChain(error).join(": ")}${cure === undefined ? "" : `; ${cure}`}`;
      log.add("error", message, step);
      log.close();
      await file.flush();
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
      // On disk before the build leaves the table of active ones: a reader finds its entries all along.
      await file.flush();
    }
  }

  async #build(
    record: SnapshotRecord,
    parsed: Pick<BuildOrder, "steps" | "stageSteps">,
    request: BuildStartRequest,
    log: BuildLog,
    cancelled: AbortSignal,
    captureDir: string,
  ): Promise<void> {
    const { repository, images, sandboxes, defaults, cacheEpoch = "" } = this.#options;
    await using resources = new AsyncDisposableStack();
    const build = new Build(
      {
        repository,
        images,
        sandboxes,
        files: this.#files,
        cache: this.#cache,
        cacheEpoch,
        defaultImage: defaults.defaultImage,
        limits: this.#limits,
        log: this.#options.log,
      },
      {
        buildId: record.id,
        templateId: record.templateId,
        shape: { cpuCount: record.resources.cpuCount, memoryMiB: record.resources.memoryMiB },
        ...parsed,
        request,
        log,
        cancelled,
      },
    );
    const built = await build.run(resources);
    await inStep("finalize", async () => {
      log.add("info", "capturing the sandbox", "finalize");
      const { state, timings } = await build.bounded(built.running.capture(captureDir), "finalize");
      log.add("debug", `captured in ${Math.round(timings.total ?? 0)} ms`, "finalize");
      await built.running.stop();
      log.add("info", "publishing", "finalize");
      const finishedAt = new Date().toISOString();
      const ready = withBuild(record, { ...buildOf(record), status: "ready", finishedAt });
      const { context, startCmd, readyCmd, imageReference } = built;
      this.#publishing.add(record.id);
      await repository.commit(
        {
          ...ready,
          resources: { ...built.resources, diskSizeMiB: Math.ceil(state.rootfs.virtualSizeBytes / 1048576) },
          committed: {
            state,
            context,
            ...(startCmd === undefined ? {} : { startCmd }),
            ...(readyCmd === undefined ? {} : { readyCmd }),
            ...(imageReference === undefined ? {} : { imageReference }),
          },
        },
        state,
      );
      assert(record.source.kind === "template", "a build is a template's");
      await this.#bind(record.source.names ?? [], record.id);
      this.#publishing.delete(record.id);
    });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#closing = true;
    const end = (): Promise<void>[] =>
      [...this.#active.values()].map(({ abort, done }) => {
        abort.abort(new Error("the server is shutting down"));
        return done;
      });
    const ended = end();
    // One that was being accepted is active after its turn.
    await Promise.allSettled(this.#turns.values());
    await Promise.all([...ended, ...end()]);
  }
}

/** What to do about an image that cannot be had, from the error at the bottom of a build's failure. */
function imageRemedy(error: unknown): string | undefined {
  for (let at = error; at instanceof Error; at = at.cause) {
    if (at instanceof AenvError && at.code.startsWith("image_")) return at.remediation;
  }
  return undefined;
}

export function createTemplateService(options: TemplateServiceOptions): TemplateService {
  return new Templates(options);
}
