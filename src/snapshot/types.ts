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
}

export type BuildStatus = "waiting" | "building" | "ready" | "error";

export interface BuildRecord {
  readonly status: BuildStatus;
  readonly startedAt?: string;
  readonly finishedAt?: string;
  readonly reason?: { readonly message: string; readonly step?: string };
}

export type SnapshotSource =
  | { readonly kind: "template"; readonly build: BuildRecord }
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

/**
 * Committed snapshots on disk; the only durable truth about templates and snapshots. Everything that
 * resolved is durable. Layers are content-addressed and shared.
 */
export interface SnapshotRepository {
  list(): Promise<SnapshotRecord[]>;
  get(id: string): Promise<SnapshotRecord | undefined>;
  /** Id, alias, `alias:tag` or `ns/alias`; undefined when there is none. */
  resolve(name: string): Promise<SnapshotRecord | undefined>;
  put(record: SnapshotRecord): Promise<void>;
  /** Points the alias at the record; error `alias_conflict` 409 when it is another template's. */
  bindAlias(alias: string, id: string): Promise<void>;
  /**
   * Moves a captured state's files into the repository (layers content-addressed, no copy where a
   * rename or link does) and commits the record in one step.
   */
  commit(record: SnapshotRecord, state: CapturedState): Promise<SnapshotRecord>;
  /** Record, aliases and own files; layers nobody refers to are removed by `collect`. Idempotent. */
  delete(id: string): Promise<void>;
  /** Removes layers that no committed snapshot and none of `pinned` (absolute files) uses. */
  collect(
    pinned: ReadonlySet<string>,
  ): Promise<{ readonly removedFiles: number; readonly removedBytes: number }>;
}
