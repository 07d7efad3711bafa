import { statSync } from "node:fs";
import { AenvError } from "../../lib/errors.ts";
import { checkDriveCount, checkKernelLine } from "../common.ts";
import type { DriveRateLimit, VmDrive, VmLaunchSpec, VmRestoreSpec } from "../types.ts";
import type { CpuTemplate } from "./cpu-template.ts";
import { FILES, INSIDE, type JailEntry } from "./jail.ts";
import type { FirecrackerVersion } from "./version.ts";

/** One request of the configuration, in the order they are sent. */
export interface ApiRequest {
  readonly method: "PUT" | "PATCH";
  readonly path: string;
  readonly body: Readonly<Record<string, unknown>>;
  readonly timeoutMs?: number;
}

export const INTERFACE_ID = "eth0";
/** Where the guest reads metadata (the address is Firecracker's default). */
export const MMDS_ADDRESS = "169.254.169.254";
/**
 * With the root disk. On x86-64 devices share the interrupts 5 to 23 (GSI_LEGACY_START and GSI_LEGACY_END of its
 * layout); network, entropy, balloon, VM generation and, in later releases, the VM clock take one each.
 */
export const MAX_DRIVES = 14;
const START_MS = 30_000;
/** What Firecracker's machine wants on the kernel's command line, whatever the base is. */
const OWN_ARGS = ["i8042.noaux", "i8042.nomux", "i8042.dumbkbd"];
const DEFAULT_BASE = ["console=ttyS0", "reboot=k", "panic=1"];

/** What is the same for all VMs of a server. */
export interface MachineSettings {
  readonly cpuTemplate?: CpuTemplate;
  /** Off in pvm mode. */
  readonly trackDirtyPages: boolean;
  /** Base of the kernel's command line. */
  readonly bootArgs?: readonly string[];
}

/**
 * A device state names the files it was made with. Every VM therefore finds its own under the same names, its drives
 * under those of their ids: a restore finds other devices there. These are links to nodes, which lie in the jail alone.
 */
export function driveLink(drive: VmDrive): { readonly name: string; readonly target: string } {
  return { name: `drive-${drive.driveId}`, target: `/dev/drive-${drive.driveId}` };
}

const KERNEL = `${FILES}/kernel`;
const INITRD = `${FILES}/initrd`;
export const MEMORY = `${FILES}/memory`;
/** Of the shared directory: the state to load, and what a save makes. */
export const STATE_FILE = "state";
export const PAGES_FILE = "pages";

/** What the process needs to see of the host for a VM. Throws on a spec that Firecracker cannot take. */
export function jailEntries(spec: VmLaunchSpec, restoring: boolean): JailEntry[] {
  const files = restoring
    ? [{ source: spec.memoryFile, target: MEMORY }]
    : [
        { source: spec.kernelPath, target: KERNEL },
        { source: spec.initrdPath, target: INITRD },
      ];
  return [
    ...spec.drives.map(
      (drive): JailEntry => ({
        kind: statSync(drivePath(drive)).isBlockDevice() ? "node" : "rw",
        source: drivePath(drive),
        target: driveLink(drive).target,
      }),
    ),
    ...files.map((file): JailEntry => ({ kind: "ro", ...file })),
  ];
}

/** Path of a drive's device on the host. Firecracker takes block devices and files, no sockets. */
export function drivePath(drive: VmDrive): string {
  if (drive.backend.kind === "block") return drive.backend.devicePath;
  throw new AenvError({
    code: "drive_unsupported",
    status: 400,
    message: `drive ${drive.driveId} is served over NBD, which Firecracker has no client for`,
    remediation: 'serve disks over ublk (ublk.export = "ublk"), or set vmm to qemu',
  });
}

/** A word of the VM's goes before one of the same name of the base. */
export function kernelCommandLine(args: readonly string[], base: readonly string[] = DEFAULT_BASE): string {
  const names = new Set(args.map((arg) => arg.split("=", 1)[0]));
  const before = [...base, ...OWN_ARGS].filter((arg) => !names.has(arg.split("=", 1)[0]!));
  const line = [...before, ...args].join(" ");
  checkKernelLine(line);
  return line;
}

function metadataRequests(spec: VmLaunchSpec, configure: boolean): ApiRequest[] {
  if (spec.metadata === undefined) return [];
  const config: ApiRequest = {
    method: "PUT",
    path: "/mmds/config",
    body: { version: "V2", network_interfaces: [INTERFACE_ID], ipv4_address: MMDS_ADDRESS },
  };
  return [...(configure ? [config] : []), { method: "PUT", path: "/mmds", body: spec.metadata }];
}

/** More than a Linux guest asks of a disk at once (BLK_DEF_MAX_SECTORS_CAP: 1.25 MiB, 4 MiB from 6.16 on). */
const LARGEST_REQUEST_BYTES = 4 * 2 ** 20;
/**
 * A limiter that has let nothing through looks again after so long (REFILL_TIMER_INTERVAL_MS of its rate_limiter).
 * Only after a request larger than its bucket it is longer: none is, see {@link rateLimiter}.
 */
const LIMITER_TIMER_MS = 100;
/** From when limits are taken away until nothing waits for them any more, with room for a busy host. */
export const LIFTED_MS = LIMITER_TIMER_MS + 20;

/**
 * A bucket holds a second's worth, but no less than one request, and the burst once; of size 0 it limits nothing and
 * takes an earlier limit away.
 */
function rateLimiter(limit: DriveRateLimit | undefined): Record<string, unknown> {
  const bucket = (perSecond: number, burst: number, least: number) => {
    if (perSecond === 0) return { size: 0, refill_time: 0 };
    const size = Math.max(perSecond, least);
    return { size, refill_time: Math.round((1000 * size) / perSecond), one_time_burst: burst };
  };
  return {
    bandwidth: bucket(
      limit?.bandwidthBytesPerSec ?? 0,
      limit?.bandwidthBurstBytes ?? 0,
      LARGEST_REQUEST_BYTES,
    ),
    ops: bucket(limit?.iops ?? 0, limit?.iopsBurst ?? 0, 1),
  };
}

/** Gives a drive of a VM that is there another limit; undefined: none. */
export function limitRequest(driveId: string, limit: DriveRateLimit | undefined): ApiRequest {
  return {
    method: "PATCH",
    path: `/drives/${encodeURIComponent(driveId)}`,
    body: { drive_id: driveId, rate_limiter: rateLimiter(limit) },
  };
}

/** Every request of a first boot, the start included. Throws on a spec that Firecracker cannot take. */
export function bootRequests(
  spec: VmLaunchSpec,
  version: FirecrackerVersion,
  settings: MachineSettings,
): ApiRequest[] {
  const { cpuTemplate, trackDirtyPages } = settings;
  checkDriveCount(spec.drives.length, MAX_DRIVES);
  return [
    {
      method: "PUT",
      path: "/machine-config",
      body: {
        vcpu_count: spec.shape.vcpuCount,
        mem_size_mib: spec.shape.memoryMiB,
        smt: false,
        // Lets a later state be saved with the written pages alone; ours come from the process's page map.
        track_dirty_pages: trackDirtyPages,
        ...(cpuTemplate?.kind === "static" ? { cpu_template: cpuTemplate.name } : {}),
      },
    },
    // After the machine, whose template it replaces.
    ...(cpuTemplate?.kind === "custom"
      ? [{ method: "PUT", path: "/cpu-config", body: cpuTemplate.body } as const]
      : []),
    {
      method: "PUT",
      path: "/boot-source",
      body: {
        kernel_image_path: KERNEL,
        initrd_path: INITRD,
        boot_args: kernelCommandLine(spec.kernelArgs, settings.bootArgs),
      },
    },
    ...spec.drives.map((drive): ApiRequest => {
      drivePath(drive);
      return {
        method: "PUT",
        path: `/drives/${encodeURIComponent(drive.driveId)}`,
        body: {
          drive_id: drive.driveId,
          path_on_host: `${INSIDE}/${driveLink(drive).name}`,
          // The initrd mounts it.
          is_root_device: false,
          is_read_only: drive.readOnly,
          // The guest's flushes reach the device.
          cache_type: "Writeback",
          io_engine: "Sync",
          ...(drive.rateLimit === undefined ? {} : { rate_limiter: rateLimiter(drive.rateLimit) }),
        },
      };
    }),
    {
      method: "PUT",
      path: `/network-interfaces/${INTERFACE_ID}`,
      body: {
        iface_id: INTERFACE_ID,
        host_dev_name: spec.network.tapName,
        guest_mac: spec.network.macAddress,
      },
    },
    ...metadataRequests(spec, true),
    { method: "PUT", path: "/entropy", body: {} },
    {
      method: "PUT",
      path: "/balloon",
      body: {
        amount_mib: 0,
        deflate_on_oom: true,
        // No statistics: their timer writes to the guest's memory while a capture reads it.
        // Memory the guest has free goes back to the host by itself. After a restore Firecracker maps anonymous memory
        // over it, where captures look, too.
        ...(version.atLeast(1, 14) ? { free_page_reporting: true } : {}),
      },
    },
    { method: "PUT", path: "/actions", body: { action_type: "InstanceStart" }, timeoutMs: START_MS },
  ];
}

/** Every request of a restore, up to the running guest. */
export function restoreRequests(
  spec: VmRestoreSpec,
  version: FirecrackerVersion,
  settings: MachineSettings,
): ApiRequest[] {
  return [
    {
      method: "PUT",
      path: "/snapshot/load",
      body: {
        snapshot_path: `${INSIDE}/${STATE_FILE}`,
        mem_backend: { backend_type: "File", backend_path: MEMORY },
        // 1.13 renamed it, and understands the old name as long as the major version is 1.
        [version.atLeast(1, 13) ? "track_dirty_pages" : "enable_diff_snapshots"]: settings.trackDirtyPages,
        resume_vm: false,
        network_overrides: [{ iface_id: INTERFACE_ID, host_dev_name: spec.network.tapName }],
      },
      timeoutMs: START_MS,
    },
    // The state brings the limits it was made with.
    ...spec.drives.map((drive) => limitRequest(drive.driveId, drive.rateLimit)),
    // Configured by the state, the content is this sandbox's own.
    ...metadataRequests(spec, false),
    { method: "PATCH", path: "/vm", body: { state: "Resumed" } },
  ];
}

/** Firecracker would grow nothing, but load whatever is there. */
export function checkMemoryFile(spec: VmLaunchSpec): void {
  const stat = statSync(spec.memoryFile);
  const bytes = spec.shape.memoryMiB * 2 ** 20;
  if (!stat.isFile() || stat.size === bytes) return;
  throw new AenvError({
    code: "memory_size_mismatch",
    message: `the memory file ${spec.memoryFile} has ${stat.size} bytes, the VM has ${spec.shape.memoryMiB} MiB of memory`,
  });
}
