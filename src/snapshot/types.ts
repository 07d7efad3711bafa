import type { CapturedState } from "../sandbox/types.ts";

/** Image and build results a sandbox is started with. */
export interface StartupContext {
  readonly envVars: Readonly<Record<string, string>>;
  readonly workdir?: string;
  readonly user?: string;
  readonly exposedPorts: readonly string[];
  readonly entrypoint?: readonly string[];
  readonly cmd?: readonly string[];
  readonly volumes: readonly string[];
  readonly labels: Readonly<Record<string, string>>;
  /** Words for the kernel besides ours, at every boot from its disks; absent: none. */
  readonly bootArgs?: readonly string[];
}

export type BuildStatus = "waiting" | "building" | "ready" | "error";

export interface BuildRecord {
  readonly status: BuildStatus;
  readonly startedAt?: string;
  readonly finishedAt?: string;
  readonly reason?: { readonly message: string; readonly step?: string };
}

export type SnapshotSource =
  | {
      readonly kind: "template";
      readonly build: BuildRecord;
      /** Names (`alias` or `alias:tag`) that shall point at this build once it is ready. */
      readonly names?: readonly string[];
    }
  | { readonly kind: "sandbox"; readonly sourceSandboxId: string };

export interface SnapshotResources {
  readonly cpuCount: number;
  readonly memoryMiB: number;
  readonly diskSizeMiB: number;
}

/** A template build or a sandbox snapshot. `committed` appears when it can be started from. */
export interface SnapshotRecord {
  readonly id: string;
  /** Template this build belongs to; equals `id` for a first build and for snapshots. */
  readonly templateId: string;
  /** Names that point at this very record now: `alias` for the tag `default`, else `alias:tag`. */
  readonly aliases: readonly string[];
  readonly public: boolean;
  readonly source: SnapshotSource;
  readonly resources: SnapshotResources;
  readonly createdAt: string;
  readonly updatedAt: string;
  readonly committed?: {
    readonly state: CapturedState;
    readonly context: StartupContext;
    readonly startCmd?: string;
    readonly readyCmd?: string;
    /** Pinned reference the template came from, e.g. `host/repo@sha256:…`. */
    readonly imageReference?: string;
  };
}

/** A committed snapshot in use: while it is open, none of its layers is removed by this process. */
export interface SnapshotLease extends Disposable {
  readonly record: SnapshotRecord;
}

/**
 * Committed snapshots on disk; the only durable truth about templates and snapshots. Everything that
 * resolved is durable. Layers are content-addressed and shared.
 */
export interface SnapshotRepository {
  /** For files on their way into the repository: on its file system, so that `commit` links them. */
  readonly stagingDir: string;
  list(): Promise<SnapshotRecord[]>;
  get(id: string): Promise<SnapshotRecord | undefined>;
  /** Id, alias, `alias:tag` or `ns/alias`; undefined when there is none. */
  resolve(name: string): Promise<SnapshotRecord | undefined>;
  /** Like `resolve`, and keeps what the snapshot is made of until the lease is disposed. */
  lease(name: string): Promise<SnapshotLease | undefined>;
  /** Creates or updates a record. What `commit` stored stays when the given record has no `committed`. */
  put(record: SnapshotRecord): Promise<void>;
  /**
   * Points `alias` or `alias:tag` at the record. Errors: `alias_conflict` 409 when another template has
   * it (a snapshot's name may be taken over by another snapshot), `invalid_alias` 400.
   */
  bindAlias(alias: string, id: string): Promise<void>;
  /** Takes the name from the record; nothing happens when it points elsewhere or nowhere. */
  unbindAlias(alias: string, id: string): Promise<void>;
  /**
   * Takes a captured state's files into the repository (content-addressed, by hard link where the file
   * system allows) and commits the record in one step. The given state's own files may be removed after.
   */
  commit(record: SnapshotRecord, state: CapturedState): Promise<SnapshotRecord>;
  /** Record, aliases and own files; layers nobody refers to are removed by `collect`. Idempotent. */
  delete(id: string): Promise<void>;
  /** Removes layers that no committed snapshot and none of `pinned` (absolute files) uses. */
  collect(
    pinned: ReadonlySet<string>,
  ): Promise<{ readonly removedFiles: number; readonly removedBytes: number }>;
}
