/**
 * The VMM interface. A driver knows its binary and nothing about sandboxes, storage or networks: it is
 * handed a namespace, drives, a memory file and a work directory, and gives back a running process.
 */
export type VirtualizationMode = "kvm" | "pvm" | "tcg";

export interface VmmProbe {
  readonly vmm: "qemu" | "firecracker";
  readonly version: string;
  readonly binary: string;
  /** The mode that would be used. */
  readonly mode: VirtualizationMode;
  /** Why that mode, in a sentence a user understands. */
  readonly reason: string;
  /** What works with limits, e.g. an old QEMU. */
  readonly warnings: readonly string[];
}

/**
 * What a guest may do to a drive, reads and writes together. 0: no limit; a burst is what may be done at once
 * on top of a second's worth, after a time of less.
 */
export interface DriveRateLimit {
  readonly bandwidthBytesPerSec: number;
  readonly bandwidthBurstBytes: number;
  readonly iops: number;
  readonly iopsBurst: number;
}

export interface VmDrive {
  /** Stable over save and restore: `rootfs`, or the drive's id. */
  readonly driveId: string;
  readonly readOnly: boolean;
  readonly backend:
    | { readonly kind: "nbd"; readonly socketPath: string; readonly exportName: string }
    | { readonly kind: "block"; readonly devicePath: string };
  /** Holds from this start on, whatever one before it had. */
  readonly rateLimit?: DriveRateLimit;
}

export interface VmNetwork {
  /** Path of the network namespace the VMM process is started in. */
  readonly netnsPath: string;
  readonly tapName: string;
  readonly macAddress: string;
}

/** What stays the same from the first boot over every restore. Stored with a snapshot. */
export interface VmShape {
  readonly vcpuCount: number;
  readonly memoryMiB: number;
}

/** Which VMM made a snapshot: a restore elsewhere is refused by name when one of these differs. */
export interface VmIdentity {
  readonly vmm: "qemu" | "firecracker";
  readonly vmmVersion: string;
  readonly mode: VirtualizationMode;
  readonly cpuModel: string;
  readonly kernelVersion: string;
  /** What of the CPU guests are shown, where that is chosen. */
  readonly cpuTemplate?: string;
  /** The machine has a device by which guests give memory back. Absent: it has none, and its states load with either. */
  readonly balloon?: true;
  /** Frequency of the host's counter, which guests keep their time by. Absent in older states. */
  readonly tscKHz?: number;
}

export interface VmLaunchSpec {
  readonly vmId: string;
  readonly workDir: string;
  readonly shape: VmShape;
  readonly kernelPath: string;
  readonly initrdPath: string;
  readonly kernelArgs: readonly string[];
  readonly drives: readonly VmDrive[];
  readonly network: VmNetwork;
  /** Sparse file of the memory's size, mapped privately; never written by the VMM. */
  readonly memoryFile: string;
  /** Guest console is appended here. */
  readonly consoleLogPath: string;
  /** What the guest reads from the metadata service, where the VMM has one. JSON. */
  readonly metadata?: Readonly<Record<string, unknown>>;
  /** A process made ready in the same network namespace. The driver takes it over, whatever becomes of the start. */
  readonly prepared?: PreparedVm;
}

/** A VMM process that waits for its VM. Disposing ends it. */
export interface PreparedVm extends AsyncDisposable {
  readonly network: VmNetwork;
  /** False when it has ended meanwhile. */
  readonly usable: boolean;
}

export interface VmRestoreSpec extends VmLaunchSpec {
  readonly deviceStatePath: string;
}

export interface VmExit {
  readonly exitCode: number | null;
  readonly signal: string | null;
  /** Last lines the VMM wrote to its standard error. */
  readonly stderrTail: string;
}

/** A piece of the guest's memory in the VMM's address space; all numbers bytes. */
export interface MemoryRegion {
  readonly address: number;
  /** Where it is in the memory's file. */
  readonly fileOffset: number;
  readonly length: number;
}

/** What the VMs that a driver had to do with have counted, in the VMM's own words. */
export interface VmmFigure {
  readonly group: string;
  readonly name: string;
  readonly total: number;
}

/** Enough to find a VM again after a restart of the server. JSON. */
export interface VmReference {
  readonly vmId: string;
  readonly pid: number;
  /** Start time of the process from /proc/PID/stat field 22: guards against a reused pid. */
  readonly startTimeTicks: string;
  readonly controlSocketPath: string;
  readonly workDir: string;
  readonly memoryFile: string;
  /** The memory is no mapping of the file but anonymous: a first boot where the VMM cannot map one. */
  readonly anonymousMemory?: true;
  /** Where that is, if the driver knows: the pieces of all of it, in the order of the file. */
  readonly memoryRegions?: readonly MemoryRegion[];
  /** The memory file's name as the VMM sees it, where that is another one than the host's. */
  readonly memoryMappedAs?: string;
  /** Where the console goes, for VMMs whose server carries it there. */
  readonly consoleLogPath?: string;
  /** Directory on the host of what the VMM is shut in with. Absent: it is not. */
  readonly jailDir?: string;
  /** Limits of its drives by their ids, where the driver has to lift them for a capture. */
  readonly driveLimits?: Readonly<Record<string, DriveRateLimit>>;
  /** Its network, where the driver has to hold that still for a capture. */
  readonly network?: Pick<VmNetwork, "netnsPath" | "tapName">;
}

export interface VmHandle extends AsyncDisposable {
  readonly reference: VmReference;
  /** Resolves when the process is gone; never rejects. */
  readonly exited: Promise<VmExit>;
  /** Stops the vCPUs; drives are drained and flushed when it returns. */
  pause(): Promise<void>;
  resume(): Promise<void>;
  /** VM must be paused. Writes everything but memory and disks. */
  saveDeviceState(path: string): Promise<void>;
  /** SIGTERM, then SIGKILL after `graceMs`; resolves when the process is gone. Idempotent. */
  kill(graceMs?: number): Promise<void>;
}

export interface VmmDriver {
  readonly identity: Promise<VmIdentity>;
  /** Drives a VM has room for, the root disk among them; `launch` refuses more with `too_many_drives` 400. */
  readonly maxDrives: number;
  /** What `launch` would say to these words: error `invalid_boot_args` 400 when the kernel's line gets too long. */
  checkKernelArgs(args: readonly string[]): Promise<void>;
  probe(): Promise<VmmProbe>;
  /** Cold boot; the vCPUs run when it resolves. On error nothing is left behind. */
  launch(spec: VmLaunchSpec): Promise<VmHandle>;
  /** From device state and memory file; the vCPUs run when it resolves. */
  restore(spec: VmRestoreSpec): Promise<VmHandle>;
  /** Takes over a VM started by an earlier process; undefined when it is gone. */
  adopt(reference: VmReference): Promise<VmHandle | undefined>;
  /** Starts a process for a VM that comes later. Absent: this VMM has none to wait. On error nothing is left. */
  prepare?(network: VmNetwork): Promise<PreparedVm>;
  /** What its VMs have counted since this process began, ended ones included. Absent: this VMM counts nothing. */
  figures?(): readonly VmmFigure[];
  /** Ends and removes what an earlier process left behind and nobody adopted; returns how many VMs' worth. */
  sweep?(): Promise<number>;
}
