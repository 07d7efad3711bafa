import { checkDriveCount, checkKernelLine } from "../common.ts";
import type { DriveRateLimit, VirtualizationMode, VmDrive, VmLaunchSpec } from "../types.ts";
import type { QemuVersion } from "./version.ts";

/**
 * QEMU's command line. A pure function: the same spec gives the same devices in the same places, which is
 * what makes a device state loadable. Machine: `microvm` with virtio-mmio devices declared by ACPI (the
 * distribution kernels have no other way to learn of them), ELF kernel entered through its PVH note.
 */
export interface QemuInstallation {
  readonly binary: string;
  readonly version: QemuVersion;
  readonly dataDirs: readonly string[];
  readonly sandbox: boolean;
  /**
   * It runs with the library that keeps memory files from being torn (c/memshield): guests may give memory back.
   */
  readonly shielded?: boolean;
}

/**
 * The machine has 24 virtio-mmio transports. Number 0 is of no use: its interrupt (pin 0 of the second
 * IOAPIC) never reaches a Linux guest, and the first request to such a device hangs. Three are for network,
 * entropy and balloon. Linux finds the devices from the highest number down and names disks in that order, so the first
 * drive, `/dev/vda`, takes the highest.
 */
const TRANSPORTS = 24;
const NETWORK_TRANSPORT = 1;
const ENTROPY_TRANSPORT = 2;
const BALLOON_TRANSPORT = 3;
/** With the root disk. */
export const MAX_DRIVES = TRANSPORTS - 4;

function transport(number: number): string {
  return `virtio-mmio-bus.${number}`;
}

const MEMORY_ID = "ram0";

/** Commas separate QEMU's options; a doubled one is a comma. */
function escapeOption(value: string): string {
  return value.replaceAll(",", ",,");
}

export function cpuModel(version: QemuVersion, mode: VirtualizationMode): string {
  if (mode === "kvm") return "host";
  // Emulated cmpxchg16b of QEMU 7.2 corrupts guests (page faults with rubbish flags right behind it).
  return version.major >= 10 ? "max" : "max,-cx16";
}

/** vCPUs a guest really gets: with more than one, old QEMUs emulate code patching wrongly. */
export function effectiveVcpus(version: QemuVersion, mode: VirtualizationMode, wanted: number): number {
  return mode === "tcg" && version.major < 10 ? 1 : wanted;
}

export function acceleratorArgs(mode: VirtualizationMode): string[] {
  // 256 MiB of translated code is plenty for a sandbox and bounds what a VM takes beside its memory.
  return ["-accel", mode === "kvm" ? "kvm" : "tcg,thread=multi,tb-size=256"];
}

export function machineOption(withMemoryBackend: boolean): string {
  return [
    "microvm",
    "acpi=on",
    "x-option-roms=on",
    "rtc=on",
    "pcie=off",
    "suppress-vmdesc=on",
    "mem-merge=off",
    "dump-guest-core=off",
    ...(withMemoryBackend ? [`memory-backend=${MEMORY_ID}`] : []),
  ].join(",");
}

/** Options that keep the machine minimal and the process confined. */
export function confinementArgs(installation: QemuInstallation): string[] {
  return [
    ...installation.dataDirs.flatMap((dir) => ["-L", dir]),
    "-nodefaults",
    "-no-user-config",
    "-display",
    "none",
    // A reset would boot the guest afresh behind our back: it ends the VM instead.
    "-no-reboot",
    ...(installation.sandbox
      ? ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]
      : []),
  ];
}

/**
 * Settings of the kernel's search for memory that was not used for a while. An emulated guest would take some percent
 * of a processor for it all the time (docs/performance.md).
 */
const COLD_PAGES = "damon_reclaim.";

/**
 * The caller's words, preceded by those our machine needs and by the configured `base`; of words of one name the
 * caller's goes before the machine's, and that before the base's. An emulated guest is told the speed of its TSC
 * (`tickKHz`, see ticks.ts) and to believe it.
 */
export function kernelCommandLine(
  args: readonly string[],
  mode: VirtualizationMode,
  tickKHz: number | undefined,
  base: readonly string[] = [],
): string {
  const nameOf = (arg: string): string => arg.split("=", 1)[0]!;
  const names = new Set(args.map(nameOf));
  const machine = [
    "console=ttyS0",
    "panic=-1",
    "reboot=t",
    "pci=off",
    ...(mode === "tcg" && tickKHz !== undefined ? ["tsc=reliable", `tsc_early_khz=${tickKHz}`] : []),
  ];
  const machineNames = new Set(machine.map(nameOf));
  const wanted = base.filter(
    (arg) => !machineNames.has(nameOf(arg)) && !(mode === "tcg" && arg.startsWith(COLD_PAGES)),
  );
  const before = [...machine, ...wanted];
  const line = [...before.filter((arg) => !names.has(nameOf(arg))), ...args].join(" ");
  checkKernelLine(line);
  return line;
}

function blockdev(drive: VmDrive, index: number): Record<string, unknown> {
  const common = {
    "node-name": `disk${index}`,
    "read-only": drive.readOnly,
    // A guest's discard becomes a hole in its upper layer. Zeros it writes are its own business: looking
    // for them costs a pass over all data.
    discard: "unmap",
    "detect-zeroes": "off",
  };
  if (drive.backend.kind === "nbd") {
    return {
      driver: "nbd",
      ...common,
      server: { type: "unix", path: drive.backend.socketPath },
      export: drive.backend.exportName,
      // The block daemon may be restarted under a running guest: its I/O waits that long, then fails.
      "reconnect-delay": 60,
    };
  }
  return {
    driver: "host_device",
    ...common,
    filename: drive.backend.devicePath,
    // The page cache belongs to the layers behind the device, not to the device again.
    cache: { direct: true },
    aio: "native",
  };
}

/** QEMU takes no larger ones (THROTTLE_VALUE_MAX of include/qemu/throttle.h). */
const MAX_THROTTLE_VALUE = 1e15;

/**
 * A throttle group's limits. QEMU's bucket leaks at the average and holds `max` for a second: the capacity is
 * a second's worth and the burst, as the configuration has it, but for one thing: the burst comes back when
 * the guest has done less for a while.
 */
function throttleLimits(limit: DriveRateLimit): Record<string, number> | undefined {
  const limits: Record<string, number> = {};
  for (const [name, perSecond, burst] of [
    ["bps-total", limit.bandwidthBytesPerSec, limit.bandwidthBurstBytes],
    ["iops-total", limit.iops, limit.iopsBurst],
  ] as const) {
    if (perSecond === 0) continue;
    limits[name] = Math.min(perSecond, MAX_THROTTLE_VALUE);
    limits[`${name}-max`] = Math.min(perSecond + burst, MAX_THROTTLE_VALUE);
  }
  return Object.keys(limits).length === 0 ? undefined : limits;
}

/** The node a device is put on: the drive itself, or a throttle above it; and what makes the throttle. */
function limitedNode(drive: VmDrive, index: number): { readonly node: string; readonly args: string[] } {
  const limits = drive.rateLimit === undefined ? undefined : throttleLimits(drive.rateLimit);
  if (limits === undefined) return { node: `disk${index}`, args: [] };
  return {
    node: `limited${index}`,
    args: [
      "-object",
      JSON.stringify({ "qom-type": "throttle-group", id: `limits${index}`, limits }),
      "-blockdev",
      JSON.stringify({
        driver: "throttle",
        "node-name": `limited${index}`,
        "throttle-group": `limits${index}`,
        file: `disk${index}`,
        "read-only": drive.readOnly,
        discard: "unmap",
      }),
    ],
  };
}

function driveArgs(drives: readonly VmDrive[]): string[] {
  checkDriveCount(drives.length, MAX_DRIVES);
  return drives.flatMap((drive, index) => {
    const { node, args } = limitedNode(drive, index);
    return [
      "-blockdev",
      JSON.stringify(blockdev(drive, index)),
      ...args,
      "-device",
      JSON.stringify({
        driver: "virtio-blk-device",
        id: `drive${index}`,
        bus: transport(TRANSPORTS - 1 - index),
        drive: node,
        serial: drive.driveId.slice(0, 20),
        physical_block_size: 4096,
        // Errors go to the guest. QEMU's default would stop the whole VM when the host's disk is full.
        werror: "report",
        rerror: "report",
      }),
    ];
  });
}

export interface QemuCommandOptions {
  readonly installation: QemuInstallation;
  readonly mode: VirtualizationMode;
  readonly spec: VmLaunchSpec;
  readonly controlSocketPath: string;
  /** Frequency of the host's counter, for emulation. */
  readonly tickKHz?: number;
  /** Base of the kernel's command line. */
  readonly bootArgs?: readonly string[];
  /** Value of `-incoming`; absent: cold boot. */
  readonly incoming?: string;
}

/**
 * Memory the guest has free is told to QEMU, which drops it. A device state that was made with this device can be
 * loaded only where it is there, one made without it everywhere. A kernel that zeroes pages as it frees them would
 * take for granted that they stay so (`page-poison`): not offered the feature, it reports none.
 */
function balloonArgs(installation: QemuInstallation): string[] {
  if (installation.shielded !== true) return [];
  return [
    "-device",
    JSON.stringify({
      driver: "virtio-balloon-device",
      id: "balloon0",
      bus: transport(BALLOON_TRANSPORT),
      "deflate-on-oom": true,
      "free-page-reporting": true,
      "page-poison": false,
    }),
  ];
}

/** The whole command line, for a first boot or a restore. Throws on a spec that QEMU could not take. */
export function qemuCommand(options: QemuCommandOptions): string[] {
  const { installation, mode, spec } = options;
  const { version } = installation;
  const vcpus = effectiveVcpus(version, mode, spec.shape.vcpuCount);
  const backend = {
    "qom-type": "memory-backend-file",
    id: MEMORY_ID,
    size: spec.shape.memoryMiB * 1024 * 1024,
    "mem-path": spec.memoryFile,
    share: false,
    // Since 8.2 the file can be opened read-only under a private writable mapping. QEMU gives no memory of such a
    // one back; the library sees to it that the file is opened read-only all the same.
    ...(installation.shielded !== true && version.atLeast(8, 2) ? { readonly: true, rom: "off" } : {}),
  };
  return [
    installation.binary,
    ...confinementArgs(installation),
    "-name",
    escapeOption(spec.vmId),
    "-M",
    machineOption(true),
    ...acceleratorArgs(mode),
    "-cpu",
    cpuModel(version, mode),
    "-smp",
    String(vcpus),
    "-m",
    `${spec.shape.memoryMiB}M`,
    "-object",
    JSON.stringify(backend),
    // The state then depends on the devices alone, not on the name of the machine type.
    "-global",
    "migration.send-configuration=off",
    "-kernel",
    spec.kernelPath,
    "-initrd",
    // -initrd takes a comma-separated list.
    escapeOption(spec.initrdPath),
    "-append",
    kernelCommandLine(spec.kernelArgs, mode, options.tickKHz, options.bootArgs),
    "-chardev",
    `file,id=console0,path=${escapeOption(spec.consoleLogPath)},append=on`,
    "-serial",
    "chardev:console0",
    "-chardev",
    `socket,id=qmp0,path=${escapeOption(options.controlSocketPath)},server=on,wait=off`,
    "-mon",
    "chardev=qmp0,mode=control",
    ...driveArgs(spec.drives),
    "-netdev",
    JSON.stringify({
      type: "tap",
      id: "net0",
      ifname: spec.network.tapName,
      script: "no",
      downscript: "no",
      vhost: false,
    }),
    "-device",
    JSON.stringify({
      driver: "virtio-net-device",
      id: "nic0",
      bus: transport(NETWORK_TRANSPORT),
      netdev: "net0",
      mac: spec.network.macAddress,
    }),
    "-object",
    JSON.stringify({ "qom-type": "rng-builtin", id: "rng0" }),
    "-device",
    JSON.stringify({
      driver: "virtio-rng-device",
      id: "entropy0",
      bus: transport(ENTROPY_TRANSPORT),
      rng: "rng0",
    }),
    ...balloonArgs(installation),
    ...(options.incoming === undefined ? [] : ["-S", "-incoming", options.incoming]),
  ];
}
