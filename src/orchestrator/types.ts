import type { AenvError } from "../lib/errors.ts";
import type { SlotPolicyReport } from "../network/types.ts";
import type { PhaseTimings } from "../sandbox/types.ts";
import type { SnapshotRecord } from "../snapshot/types.ts";
import type { Seat } from "./capacity.ts";

export type SandboxState =
  | "creating"
  | "resuming"
  | "running"
  | "snapshotting"
  | "forking"
  | "pausing"
  | "paused"
  | "killing";

export const MAX_FORK_CHILDREN = 100;

export interface NetworkConfig {
  readonly allowPublicTraffic?: boolean;
  readonly allowOut?: readonly string[];
  readonly denyOut?: readonly string[];
  readonly maskRequestHost?: string;
}

export interface NetworkUpdate {
  readonly allowOut?: readonly string[];
  readonly denyOut?: readonly string[];
  readonly allowInternetAccess?: boolean;
}

/** Metadata record of one sandbox; what lists show and what is persisted. Times are ISO 8601 UTC. */
export interface SandboxRecord {
  readonly id: string;
  /** Template or snapshot it was started from; for a cold start the image reference. */
  readonly templateId: string;
  readonly alias?: string;
  readonly state: SandboxState;
  readonly startedAt: string;
  /** Deadline; only a running sandbox expires. */
  readonly endAt: string;
  readonly timeoutSeconds: number;
  readonly onTimeout: "kill" | "pause";
  /** A pause at the deadline keeps the disks alone. */
  readonly autoPauseMemory?: false;
  readonly autoResume: boolean;
  readonly secure: boolean;
  readonly metadata: Readonly<Record<string, string>>;
  readonly envVars: Readonly<Record<string, string>>;
  readonly network?: NetworkConfig;
  readonly allowInternetAccess?: boolean;
  readonly mcp?: unknown;
  readonly cpuCount: number;
  readonly memoryMiB: number;
  readonly diskSizeMiB: number;
  readonly envdVersion: string;
  readonly origin?: SandboxOrigin;
  /** Since when the guest's agent has not answered; absent while it does. ISO 8601. */
  readonly unresponsiveSince?: string;
}

/** The request a sandbox was made by, where that may be repeated. Kept with it, so that it outlives the server. */
export interface SandboxOrigin {
  /** What makes the request the same one. */
  readonly key: string;
  /** Of what it asked for. */
  readonly fingerprint: string;
}

interface SandboxWishes {
  readonly timeoutSeconds: number;
  readonly onTimeout: "kill" | "pause";
  readonly autoPauseMemory?: false;
  readonly autoResume: boolean;
  readonly secure: boolean;
  readonly metadata: Readonly<Record<string, string>>;
  readonly envVars: Readonly<Record<string, string>>;
  readonly network?: NetworkConfig;
  readonly allowInternetAccess?: boolean;
  readonly origin?: SandboxOrigin;
}

export interface CreateSandboxRequest extends SandboxWishes {
  /** Id, alias, `alias:tag`, `ns/alias`, or a snapshot's id or name. */
  readonly template: string;
  readonly mcp?: unknown;
}

/** A disk besides the root disk, made from an image; the guest mounts it before anything of the user runs. */
export interface AttachedDriveRequest {
  /** Unique in the request, no `/`. */
  readonly driveId: string;
  /** OCI reference. */
  readonly image: string;
  readonly readOnly: boolean;
  /** Absolute; absent: `/mnt/<driveId>`. */
  readonly mountPath?: string;
  /** Relative; only that directory of the drive is at the mount path. */
  readonly subPath?: string;
  /** Absent: the node's default. */
  readonly diskSizeMiB?: number;
}

/** A sandbox that boots from an image. */
export interface CreateColdSandboxRequest extends SandboxWishes {
  /** OCI reference. */
  readonly image: string;
  /** Absent, like the next two: the node's default. */
  readonly cpuCount?: number;
  readonly memoryMiB?: number;
  readonly diskSizeMiB?: number;
  /** Words for the kernel; those the node does not allow are left out. */
  readonly extraBootArgs?: string;
  readonly attachedDrives?: readonly AttachedDriveRequest[];
}

/** Where the proxy sends a request, or why it cannot. */
export type RouteLookup =
  | {
      readonly kind: "ready";
      readonly hostAddress: string;
      /** New at every start: connections of another instance must not be reused. */
      readonly instanceId: string;
      /** Aborts when the sandbox stops, pauses or dies: all its connections are cut. */
      readonly gone: AbortSignal;
    }
  | { readonly kind: "not_found" }
  | { readonly kind: "paused"; readonly autoResume: boolean }
  | { readonly kind: "transitional"; readonly state: SandboxState }
  | { readonly kind: "route_missing" };

/** What the data plane must check before it looks for a route. */
export interface SandboxAccess {
  readonly secure: boolean;
  readonly allowPublicTraffic: boolean;
}

export type LifecycleEventKind =
  | "creating"
  | "created"
  | "create_failed"
  | "paused"
  | "pause_failed"
  | "resumed"
  | "resume_failed"
  | "snapshotted"
  | "snapshot_failed"
  | "forked"
  | "fork_failed"
  | "copied"
  | "adopted"
  | "unresponsive"
  | "responsive"
  | "expired"
  | "vm_ended"
  | "lost"
  | "deleted";

/**
 * What happened to a sandbox, told right after it became true. `forked` and `fork_failed` are told once
 * per child, under the child's id; `copied`, once they have all ended, and `snapshotted` under the source's.
 */
export interface LifecycleEvent {
  readonly kind: LifecycleEventKind;
  readonly sandboxId: string;
  /** Milliseconds since the epoch. */
  readonly atMs: number;
  /** Of the whole operation, where there is one. */
  readonly durationMs?: number;
  readonly phases?: PhaseTimings;
  /** Why, for failures and ends. */
  readonly reason?: string;
  /** It boots and does not go on from a captured state; of a pause: no memory is kept, so that a boot will follow. */
  readonly cold?: true;
}

export interface ForkRequest {
  /** 1 to {@link MAX_FORK_CHILDREN}. */
  readonly count: number;
  /** Of the children; absent: the source's. */
  readonly timeoutSeconds?: number;
}

/** One child of a fork: it runs, or why not. */
export type ForkOutcome = { readonly record: SandboxRecord } | { readonly error: AenvError };

export interface PauseOptions {
  /** Absent: true. */
  readonly memory?: boolean;
}

export interface ResumeOptions {
  /** Absent: true, which is what there is: a sandbox without memory is booted. */
  readonly memory?: boolean;
}

export interface SnapshotRequest {
  /** `alias` or `alias:tag` that shall point at the snapshot. */
  readonly name?: string;
}

export interface SnapshotFilter {
  /** Sandbox they were made of; need not exist any more. */
  readonly sandboxId?: string;
  /** Id or name. */
  readonly name?: string;
}

/** What a start of the server found of the one before it. */
export interface StartReport {
  readonly paused: number;
  readonly adopted: number;
  /** Sandboxes that ran and could not be taken over. */
  readonly lost: readonly { readonly id: string; readonly reason: string }[];
}

/**
 * Sandbox lifecycle. Every started operation finishes even if its caller goes away. Errors carry the
 * status of the REST contract: `sandbox_not_found` 404, `sandbox_state_conflict` 409,
 * `template_not_found` 404, `shutting_down` 503.
 */
export interface Orchestrator extends AsyncDisposable {
  /**
   * Loads paused sandboxes, takes over running ones, cleans up what else an earlier process left, starts
   * eviction.
   */
  start(): Promise<unknown>;
  create(request: CreateSandboxRequest): Promise<SandboxRecord>;
  /**
   * Boots a sandbox from an image, which is downloaded and converted when it is not here. Errors:
   * those of the image service, `disk_shrink_refused`, `disk_size_fixed`, `invalid_boot_args`, `invalid_drive`,
   * `too_many_drives`, `drive_mount_failed` 400.
   */
  createCold(request: CreateColdSandboxRequest): Promise<SandboxRecord>;
  get(id: string): SandboxRecord;
  /** All sandboxes that a list may show, in no particular order. */
  list(): SandboxRecord[];
  kill(id: string): Promise<void>;
  /**
   * With `memory: false` the disks alone are kept, written out and clean; what runs ends, and a resume boots.
   * Error `guest_too_old` 409 when the agent in the guest cannot do that.
   */
  pause(id: string, options?: PauseOptions): Promise<void>;
  /**
   * One capture of a running sandbox, which stands still for a moment and goes on, and `count` new sandboxes
   * from it. Each child starts or fails by itself; the outcomes are in order. Rejects when there is no capture.
   */
  fork(id: string, request: ForkRequest): Promise<ForkOutcome[]>;
  /**
   * Captures a running sandbox, which stands still for a moment and goes on, and publishes that as a snapshot.
   * Errors: `invalid_alias` 400, `alias_conflict` 400 when a template has the name.
   */
  snapshot(id: string, request: SnapshotRequest): Promise<SnapshotRecord>;
  /** Snapshots made of sandboxes, newest first. */
  listSnapshots(filter: SnapshotFilter): Promise<SnapshotRecord[]>;
  /** By id or name; `snapshot_not_found` 404 also for templates. */
  getSnapshot(name: string): Promise<SnapshotRecord>;
  /**
   * Sets the deadline to now + timeout, resuming when paused: with its memory, or by a boot where it was paused
   * without. `memory: false` asks for a boot; error `memory_kept` 409 where it was paused with its memory.
   */
  resume(id: string, timeoutSeconds: number, options?: ResumeOptions): Promise<SandboxRecord>;
  /** Like resume for a paused sandbox; a running one's deadline is only ever extended. */
  connect(
    id: string,
    timeoutSeconds: number,
    options?: ResumeOptions,
  ): Promise<{ record: SandboxRecord; resumed: boolean }>;
  setTimeout(id: string, timeoutSeconds: number): Promise<void>;
  /** Never shortens; absent: the server's default timeout. */
  refresh(id: string, durationSeconds?: number): Promise<void>;
  /**
   * Replaces all egress rules of a running sandbox in one step; what is left out is cleared. Ingress
   * settings stay. Survives pause and restart. Error `invalid_egress_policy` 400.
   */
  updateNetwork(id: string, update: NetworkUpdate): Promise<void>;
  /** What a running sandbox may reach and what that has let through and refused. */
  networkReport(id: string): Promise<SlotPolicyReport>;
  /** Undefined when the id is unknown. */
  access(id: string): SandboxAccess | undefined;
  route(id: string): RouteLookup;
  /** Resume on traffic; shared by concurrent requests. Resolves when a route is there. */
  autoResume(id: string): Promise<void>;
  /** envd access token of a secured sandbox, derived, never stored. */
  accessToken(id: string): string;
  trafficToken(id: string): string;
  /** Timings of the last create, pause, resume, fork and snapshot of a running or paused sandbox, by operation. */
  timings(id: string): Readonly<Record<string, PhaseTimings>>;
  /** Pauses and persists every running sandbox, then refuses further work. */
  shutdown(): Promise<void>;
}

/** What the server needs beyond what requests need. */
export interface NodeOrchestrator extends Orchestrator {
  start(): Promise<StartReport>;
  /** Layer files that sandboxes, running or paused, are made of and share with others. */
  pinnedFiles(): ReadonlySet<string>;
  /** A part of the node for a VM that is no sandbox's. Error `capacity_unavailable` 429. */
  reserve(memoryMiB: number): Seat;
  /** Removes stored layers that no template, snapshot, running or paused sandbox uses. */
  collectGarbage(): Promise<{ readonly removedFiles: number; readonly removedBytes: number }>;
}
