import type { MemoryImage } from "../memory/types.ts";
import type { EgressPolicy } from "../network/index.ts";
import type { KeptSlot, SlotPolicyReport } from "../network/types.ts";
import type { LayerRef } from "../storage/overlaybd/types.ts";
import type { VmExit, VmIdentity, VmReference, VmShape } from "../vmm/types.ts";

/** Port the guest agent listens on in every guest. */
export const AGENT_PORT = 49983;

/** Files below a running device, bottom first. */
export interface DiskImage {
  readonly lowers: readonly LayerRef[];
  readonly virtualSizeBytes: number;
}

/** A disk besides the root disk. The guest mounts it at its first boot; their order is that of the guest's devices. */
export interface AttachedDrive extends DiskImage {
  readonly driveId: string;
  readonly readOnly: boolean;
  /** Absolute. */
  readonly mountPath: string;
  /** Relative; only that directory of the drive is at the mount path. */
  readonly subPath?: string;
}

/** Of a boot, what is known before any image is. */
export interface BootPlan {
  readonly drives: readonly Pick<AttachedDrive, "readOnly" | "mountPath" | "subPath">[];
  readonly extraBootArgs: readonly string[];
}

/** What a device state was when it was written. */
export interface DeviceStateSum {
  readonly sizeBytes: number;
  /** `sha256:<hex>` */
  readonly digest: string;
}

/**
 * A VM that stands still: device state, memory chain and disk chain that belong together. JSON, file
 * paths absolute. Enough to start any number of VMs from; nothing in it is ever written again.
 */
export interface CapturedState {
  /** See {@link stateVersion}; a state with drives of version 1 is understood. */
  readonly version: StateVersion;
  readonly vm: VmIdentity;
  readonly shape: VmShape;
  readonly deviceStatePath: string;
  /** Absent in a state of a program that made none. */
  readonly deviceStateSum?: DeviceStateSum;
  readonly memory: MemoryImage;
  readonly rootfs: DiskImage;
  /** Absent: none. */
  readonly drives?: readonly AttachedDrive[];
  /** Version the agent in the guest reported. */
  readonly envdVersion: string;
}

/**
 * The disks of a sandbox that was paused without its memory. A VM is booted from them. Like a captured state it is
 * JSON, with absolute paths, and never written again.
 */
export interface CapturedDisks {
  /** A program that knows states with memory alone leaves it as it is. */
  readonly version: typeof DISKS_VERSION;
  readonly shape: VmShape;
  readonly rootfs: DiskImage;
  /** Absent: none. */
  readonly drives?: readonly AttachedDrive[];
  /** Version the agent in the guest reported. */
  readonly envdVersion: string;
}

export const DISKS_VERSION = 3;

/** What a paused sandbox is resumed from. */
export type PausedState = CapturedState | CapturedDisks;

/** Whether a VM goes on where it was stopped; else one is booted. */
export function hasMemory(state: PausedState): state is CapturedState {
  return state.version !== DISKS_VERSION;
}

export type StateVersion = 1 | 2;

/**
 * Version of a state to store, and of a record around it: 2 with attached drives. A program that knows of none would
 * lose them, and remove their layers: it must not take the state for one it understands.
 */
export function stateVersion(drives: readonly unknown[] | undefined): StateVersion {
  return drives === undefined || drives.length === 0 ? 1 : 2;
}

export function isStateVersion(version: unknown): version is StateVersion {
  return version === 1 || version === 2;
}

export function isPausedVersion(version: unknown): version is PausedState["version"] {
  return isStateVersion(version) || version === DISKS_VERSION;
}

/** Every layer of a state: of its disks and, if it has one, of its memory. */
export function stateLayers<Layer>(state: {
  readonly rootfs: { readonly lowers: readonly Layer[] };
  readonly drives?: readonly { readonly lowers: readonly Layer[] }[];
  readonly memory?: { readonly layers: readonly Layer[] };
}): Layer[] {
  const drives = (state.drives ?? []).flatMap(({ lowers }) => lowers);
  return [...state.rootfs.lowers, ...drives, ...(state.memory?.layers ?? [])];
}

/** What the guest is told at every start (agent `POST /init`). */
export interface GuestIdentity {
  readonly sandboxId: string;
  readonly templateId: string;
  /** Absent: the sandbox is not secured. */
  readonly accessToken?: string;
  readonly envVars: Readonly<Record<string, string>>;
  readonly defaultUser?: string;
  readonly defaultWorkdir?: string;
}

export interface BootSpec {
  readonly identity: GuestIdentity;
  readonly shape: VmShape;
  readonly rootfs: DiskImage;
  /** Error `drive_mount_failed` 400 when the guest cannot mount one. */
  readonly drives?: readonly AttachedDrive[];
  /** Extra kernel command line words. */
  readonly extraBootArgs?: readonly string[];
  /** What the guest may reach, in force before its first packet. Absent: the node's default. */
  readonly egress?: EgressPolicy;
}

export interface ResumeSpec {
  readonly identity: GuestIdentity;
  readonly state: CapturedState;
  /** What the guest may reach, in force before its first packet. Absent: the node's default. */
  readonly egress?: EgressPolicy;
}

/** Time spent in each part of a start, pause or resume, in milliseconds. */
export type PhaseTimings = Readonly<Record<string, number>>;

export interface Capture {
  readonly state: CapturedState;
  readonly timings: PhaseTimings;
}

export interface DiskCapture {
  readonly state: CapturedDisks;
  readonly timings: PhaseTimings;
}

/** One running sandbox put together: VM, network slot, block device, memory lease, agent. */
export interface RunningSandbox extends AsyncDisposable {
  readonly sandboxId: string;
  /** Every port of the guest is reached here. */
  readonly hostAddress: string;
  readonly envdVersion: string;
  readonly shape: VmShape;
  readonly diskSizeBytes: number;
  readonly vm: VmReference;
  readonly exited: Promise<VmExit>;
  readonly timings: PhaseTimings;
  /**
   * Stops the vCPUs and captures everything into `dir` (made by this call). The VM stands still when it
   * resolves; follow with `resumeInPlace()` or dispose. Error code `capture_terminal`: the live stack
   * changed and the sandbox cannot go on; any other error: the VM runs again as before.
   */
  capture(dir: string): Promise<Capture>;
  /**
   * Captures in place: the VM stands still only while its state is taken (`stopped` in the timings) and
   * runs when this resolves, with a clock that is behind by that time until `reinit`. What is captured holds
   * what was written since the last checkpoint and refers to the rest. Errors as for `capture`.
   */
  checkpoint(dir: string): Promise<Capture>;
  /** The VM runs again after `capture` or `captureDisks`, and may write again. */
  resumeInPlace(): Promise<void>;
  /**
   * Captures the disks alone into `dir` (made by this call). The guest writes out its file systems and holds them
   * still first, so that what is captured is whole without its memory. The VM stands still when it resolves; follow
   * with `resumeInPlace()`, `halt()` or dispose. Errors: `guest_too_old` 409 when the guest's agent knows nothing
   * of this, `disks_not_still` 503 when they did not stay still; else as for `capture`.
   */
  captureDisks(dir: string): Promise<DiskCapture>;
  /**
   * After `captureDisks`: the guest is cut off from the network, ends its processes and leaves its file systems as
   * after a shutdown, marked clean; the VM ends, and its disks are captured again. Error: it did not end in time, or
   * not in order. The sandbox is of no use afterwards, either way: dispose it.
   */
  halt(dir: string): Promise<DiskCapture>;
  /** Runs agent `/init` again (token, clock, entropy). Connections to the guest stay. */
  reinit(identity: GuestIdentity): Promise<void>;
  /** Replaces what the guest may reach in one step; established flows that are still allowed go on. */
  applyEgress(policy: EgressPolicy): Promise<void>;
  /** The policy in force and what it has let through and refused. */
  egressReport(): Promise<SlotPolicyReport>;
  /** One look at the agent's `/health`; `agent_unreachable` when it does not answer within the time. */
  probe(timeoutMs: number): Promise<void>;
  /** Kills the VM and releases all it held. Idempotent; the same as disposing. */
  stop(): Promise<void>;
}

export interface SandboxFactory {
  /**
   * What a boot would be refused for, before its disks are here. Errors `too_many_drives` and `invalid_boot_args`, 400.
   */
  checkBoot(spec: BootPlan): Promise<void>;
  /** Cold boot; resolves when the agent answered and was initialised. On error nothing is left behind. */
  boot(spec: BootSpec): Promise<RunningSandbox>;
  /** From a captured state, same guarantee. */
  resume(spec: ResumeSpec): Promise<RunningSandbox>;
  /**
   * Network slots of VMs that an earlier process started and that still run: the network service has to
   * keep them when it starts, so that they can be adopted.
   */
  survivors(): Promise<KeptSlot[]>;
  /**
   * Takes over a sandbox that an earlier process started: its VM (set running if it stood still), slot, block
   * device and memory file. Error `sandbox_not_adoptable` says what of it is gone; `cleanUp` removes the rest.
   */
  adopt(identity: GuestIdentity): Promise<RunningSandbox>;
  /** Kills VMs and removes devices, slots and work dirs of an earlier process that nobody adopted. */
  cleanUp(): Promise<{ readonly vms: number; readonly devices: number; readonly workDirs: number }>;
}

/** `stdout` and `stderr` hold the last 256 KiB each. A process ended by a signal has exit code -1. */
export interface CommandOutcome {
  readonly exitCode: number;
  readonly signal?: string;
  readonly stdout: string;
  readonly stderr: string;
}

/** Host-side client of the guest agent (HTTP and Connect JSON), see spec envd. */
export interface AgentClient {
  /** Polls `/health` until it answers; throws `agent_not_ready` after `timeoutMs`. */
  waitHealthy(timeoutMs: number, signal?: AbortSignal): Promise<void>;
  /**
   * Returns the agent's version. `lifecycleId` names one start of the VM: with a new one the agent drops the
   * connections it has, whose peers belong to an earlier start.
   */
  init(identity: GuestIdentity, lifecycleId: string): Promise<string>;
  run(command: {
    readonly cmd: string;
    readonly args: readonly string[];
    readonly env?: Readonly<Record<string, string>>;
    readonly cwd?: string;
    readonly user?: string;
    readonly timeoutMs?: number;
    readonly onStdout?: (chunk: Uint8Array) => void;
    readonly onStderr?: (chunk: Uint8Array) => void;
  }): Promise<CommandOutcome>;
  /** Whole file, read as root; undefined when there is none. Refuses more than `maxBytes` (default 4 MiB). */
  readFile(path: string, maxBytes?: number): Promise<Uint8Array | undefined>;
  /** Writes a whole file as root; an existing one keeps its mode. */
  writeFile(path: string, content: Uint8Array | string): Promise<void>;
  /** Like `mkdir -p`; new directories belong to `user` (default: the guest's default user). */
  makeDir(path: string, user?: string): Promise<void>;
  /** Whether anything is at the path (symlinks not followed). */
  exists(path: string): Promise<boolean>;
  /** Starts a process and returns when it has its pid; only the tail of its output is kept. */
  startDetached(command: {
    readonly cmd: string;
    readonly args: readonly string[];
    readonly env?: Readonly<Record<string, string>>;
    readonly cwd?: string;
    readonly user?: string;
  }): Promise<{ readonly pid: number; readonly exited: Promise<CommandOutcome> }>;
}
