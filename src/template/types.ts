import type { BuildRecord, SnapshotRecord } from "../snapshot/types.ts";

export interface BuildLogEntry {
  readonly timestamp: string;
  readonly level: "debug" | "info" | "warn" | "error";
  readonly message: string;
  readonly step?: string;
}

/** Which entries of a log. */
export interface BuildLogQuery {
  /** Of at least this level. Absent: all. */
  readonly level?: BuildLogEntry["level"];
  /** Those not earlier than it, with `backward` those not later. Milliseconds since the epoch. */
  readonly cursorMs?: number;
  /** The last one first. */
  readonly backward?: boolean;
  /** So many of these are left out at first. Absent: none. */
  readonly offset?: number;
  readonly limit: number;
}

/** A build's log as far as it is written. */
export interface BuildLogs {
  /** Costs what it gives, not what there is. */
  select(query: BuildLogQuery): Promise<readonly BuildLogEntry[]>;
}

export interface TemplateCreateRequest {
  /** `alias` or `alias:tag`. */
  readonly name: string;
  readonly tags: readonly string[];
  readonly cpuCount?: number;
  readonly memoryMiB?: number;
  /**
   * Free space wanted on the disk once the build is done. Best effort: `invalid_request` 400 for more than disks
   * have, otherwise free is what the build leaves.
   */
  readonly minFreeDiskMiB?: number;
}

export interface BuildStepRequest {
  readonly type: string;
  readonly args: readonly string[];
  readonly filesHash?: string;
  /** Not from the cache, and so nothing after it. */
  readonly force?: boolean;
  /** COPY: the files come from that stage (an index of `stages`), not from an upload. */
  readonly from?: number;
  /** RUN, CMD, ENTRYPOINT, HEALTHCHECK of a Dockerfile: `args` are a program and its arguments, not a shell's text. */
  readonly exec?: boolean;
}

export interface BuildStageRequest {
  readonly name?: string;
  /** Absent: the server's default image. `scratch` is an empty file system. */
  readonly fromImage?: string;
  readonly steps: readonly BuildStepRequest[];
}

export interface BuildStartRequest {
  readonly fromImage?: string;
  readonly fromTemplate?: string;
  readonly credentials?: { readonly username: string; readonly password: string };
  readonly steps: readonly BuildStepRequest[];
  /** Other stages of a Dockerfile; only those are built that a COPY still needs. */
  readonly stages?: readonly BuildStageRequest[];
  /**
   * The steps are a Dockerfile's: words are raw (variables and quotes as written), ARG is for the build alone, RUN
   * is given to the image's shell, COPY makes root's files, ENTRYPOINT with CMD is the start command and
   * HEALTHCHECK the ready command unless the request has its own (an empty one is none at all).
   */
  readonly dockerfile?: { readonly escape: "\\" | "`" };
  /** Nothing from the step cache. */
  readonly force?: boolean;
  readonly startCmd?: string;
  readonly readyCmd?: string;
}

/** Template builds: image -> build sandbox -> start/ready commands -> capture -> committed snapshot. */
export interface TemplateService extends AsyncDisposable {
  /** Marks builds that an earlier process left unfinished as failed. */
  start(): Promise<void>;
  create(
    request: TemplateCreateRequest,
  ): Promise<{ templateId: string; buildId: string; alias: string; tags: string[] }>;
  /** Returns once the build is admitted; it runs on its own. */
  startBuild(templateId: string, buildId: string, request: BuildStartRequest): Promise<void>;
  build(
    templateId: string,
    buildId: string,
  ): Promise<{
    record: SnapshotRecord;
    build: BuildRecord;
    logs: BuildLogs;
  }>;
  /** Ends a running or queued build in `error`; resolves when it has ended. 409 when it does not run. */
  cancel(templateId: string, buildId: string): Promise<void>;
  /**
   * Whether the archive of a COPY step is here, whole and verified. Errors: `template_not_found` 404,
   * `invalid_request` 400 for a hash that is not 64 lower-case hexadecimal digits.
   */
  hasFiles(templateId: string, hash: string): Promise<boolean>;
  /**
   * Stores the archive of COPY steps with that hash, for builds of this template. It counts once this resolves;
   * on any error nothing of it stays. Errors as above and `invalid_archive` 400, `upload_too_large` 413,
   * `disk_full` 507.
   */
  putFiles(
    templateId: string,
    hash: string,
    body: AsyncIterable<Uint8Array>,
    options: { readonly signal: AbortSignal; readonly declaredBytes?: number },
  ): Promise<void>;
  /** Files outside this room that its caches need (image layers under cached steps). */
  pinnedFiles(): Promise<ReadonlySet<string>>;
  list(): Promise<SnapshotRecord[]>;
  /** By template id or alias. */
  resolve(name: string): Promise<SnapshotRecord | undefined>;
  delete(name: string): Promise<void>;
  /** Points `name:tag` at the build that `target` (`name[:tag]`) names, for every tag. 404 without one. */
  assignTags(target: string, tags: readonly string[]): Promise<{ buildId: string; tags: string[] }>;
  /** Unknown tags are ignored; the tag `default` cannot be removed (400); unknown name: 404. */
  removeTags(name: string, tags: readonly string[]): Promise<void>;
  /** One entry per tag, the newest build's first. `createdAt` is the build's. */
  tags(name: string): Promise<{ tag: string; buildId: string; createdAt: string }[]>;
  /** Marks all builds of a template; returns its names. */
  setPublic(name: string, isPublic: boolean): Promise<string[]>;
}
