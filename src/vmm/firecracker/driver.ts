import {
  accessSync,
  closeSync,
  constants,
  copyFileSync,
  existsSync,
  mkdirSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
} from "node:fs";
import { rm, writeFile } from "node:fs/promises";
import { totalmem } from "node:os";
import { join } from "node:path";
import { tryCommand } from "../../lib/command.ts";
import { publishDurable, removeTree } from "../../lib/durable.ts";
import { AenvError, errorChain } from "../../lib/errors.ts";
import type { Logger } from "../../lib/log.ts";
import { holdDevice, letDeviceGo } from "../../network/index.ts";
import { endProcess, hostCpu, hostCpuVendor, once, settled } from "../common.ts";
import { readKernelVersion } from "../kernel.ts";
import { adoptVmm, readTail, type VmmProcess } from "../process.ts";
import type {
  MemoryRegion,
  PreparedVm,
  VmHandle,
  VmIdentity,
  VmLaunchSpec,
  VmmDriver,
  VmmFigure,
  VmmProbe,
  VmNetwork,
  VmReference,
  VmRestoreSpec,
} from "../types.ts";
import { FirecrackerApi } from "./api.ts";
import type { GroupLimits } from "./cgroup.ts";
import {
  type ApiRequest,
  bootRequests,
  checkMemoryFile,
  driveLink,
  jailEntries,
  kernelCommandLine,
  LIFTED_MS,
  limitRequest,
  MAX_DRIVES,
  type MachineSettings,
  MEMORY,
  PAGES_FILE,
  restoreRequests,
  STATE_FILE,
} from "./config.ts";
import { customTemplate, type StaticTemplate, staticTemplate } from "./cpu-template.ts";
import {
  groupMemory,
  INSIDE,
  type Jail,
  type JailEntry,
  Jails,
  type JailUsers,
  letRead,
  mayChangeUser,
  mayEquip,
  readShared,
} from "./jail.ts";
import { findGuestRegions } from "./memory.ts";
import { FigureLines, Figures } from "./metrics.ts";
import { openPipe, Pump, RotatingFile, type Sink } from "./output.ts";
import { type FirecrackerVersion, hostFacts, parseFirecrackerVersion } from "./version.ts";

export interface FirecrackerDriverOptions {
  readonly binary: string;
  readonly kernelPath: string;
  /** Absent: read from the kernel's banner. */
  readonly kernelVersion?: string;
  /** `pvm`: where the host's KVM is the kvm_pvm module, which needs no hardware. Default `kvm`. */
  readonly mode?: "kvm" | "pvm";
  /** Where the jails' directories are made: on a disk, states are written there. */
  readonly workDir: string;
  /** The aenv-jail program. */
  readonly jailHelper: string;
  /** Upstream's jailer, in place of ours. */
  readonly jailerPath?: string;
  /** Accounts for the processes, used where this process may give others an account. */
  readonly users: JailUsers;
  /** Parent of the VMMs' control groups below their mount. Absent: no groups. */
  readonly cgroup?: string;
  readonly cpuTemplate?: StaticTemplate;
  readonly cpuTemplatePath?: string;
  /** Base of guests' kernel command lines. */
  readonly bootArgs?: string;
  /** Whether Firecracker notes what guests write; our captures do not need it. Default true. */
  readonly trackDirtyPages?: boolean;
  /** Time for the API socket to appear. */
  readonly socketTimeoutMs: number;
  /** Between two looks at it. */
  readonly socketPollMs: number;
  /** Firecracker's own log and, once more, the console and standard error: where, and from which level on. */
  readonly capture?: { readonly dir: string; readonly level: string };
  /** Whether jails may be given things later on. Default: what this process may do; tests differ. */
  readonly equips?: boolean;
  /** More of the host that the process sees (tests). */
  readonly alsoVisible?: readonly string[];
  readonly log: Logger;
}

const SAVE_TIMEOUT_MS = 60_000;
/** To write down what it counted, before it is ended. */
const FLUSH_MS = 1000;
/** A process that runs already answers at once. */
const ADOPT_MS = 5000;
/** Metadata and requests with it; Firecracker's own default is 50 KiB. */
const PAYLOAD_BYTES = 1 << 20;
/** Of a console, and as much again for what came before. */
const CONSOLE_BYTES = 16 << 20;
const LOG_BYTES = 16 << 20;
/** A device state and the rest of what is written beside the file of the guest's pages. */
const STATE_BYTES = 64 * 2 ** 20;
/** Memory up to here is one mapping. */
const ONE_REGION_BYTES = 3 * 2 ** 30;
/** Threads of Firecracker that are no vCPUs, with room. */
const THREADS = 32;

/**
 * Firecracker as upstream publishes it, one process a VM in a jail of its own, configured over its API socket. Its
 * guest memory is anonymous at a first boot and a private mapping of the memory file after a restore, so written pages
 * are found by the process's page map in both cases, as with QEMU.
 */
export function createFirecrackerDriver(options: FirecrackerDriverOptions): VmmDriver & AsyncDisposable {
  return new FirecrackerDriver(options);
}

/** A process in its jail whose API answers. */
class Prepared implements PreparedVm {
  readonly network: VmNetwork;
  readonly jail: Jail;
  readonly maxFileBytes: number;
  #ended = false;

  constructor(jail: Jail, network: VmNetwork, maxFileBytes: number) {
    this.jail = jail;
    this.network = network;
    this.maxFileBytes = maxFileBytes;
    jail.process.exited.then(() => {
      this.#ended = true;
    });
  }

  get usable(): boolean {
    return !this.#ended;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.jail[Symbol.asyncDispose]();
  }
}

class FirecrackerDriver implements VmmDriver, AsyncDisposable {
  readonly maxDrives = MAX_DRIVES;
  readonly #options: FirecrackerDriverOptions;
  readonly #jails: Jails;
  readonly #figures = new Figures();
  readonly #version: () => Promise<FirecrackerVersion>;
  readonly #identity: () => Promise<VmIdentity>;
  readonly #settings: () => MachineSettings;
  /** False: a jail has to be given everything when it is made, so no process can wait for its VM. */
  readonly #equips: boolean;
  readonly prepare?: (network: VmNetwork) => Promise<PreparedVm>;

  constructor(options: FirecrackerDriverOptions) {
    this.#options = options;
    this.#equips = options.equips ?? mayEquip();
    if (this.#equips) this.prepare = (network) => this.#prepare(network);
    this.#jails = new Jails({
      binary: options.binary,
      helper: options.jailHelper,
      workDir: options.workDir,
      ...(options.jailerPath === undefined ? {} : { jailer: options.jailerPath }),
      ...(mayChangeUser() ? { users: options.users } : {}),
      ...(options.cgroup === undefined ? {} : { cgroup: options.cgroup }),
      ...(options.alsoVisible === undefined ? {} : { alsoVisible: options.alsoVisible }),
      log: options.log,
    });
    this.#version = once(() => this.#inspect());
    let settings: MachineSettings | undefined;
    this.#settings = () => {
      settings ??= this.#readSettings();
      return settings;
    };
    this.#identity = once(async () => {
      const { cpuTemplate } = this.#settings();
      return {
        vmm: "firecracker",
        vmmVersion: (await this.#version()).text,
        mode: options.mode ?? "kvm",
        cpuModel: hostCpu(),
        kernelVersion: options.kernelVersion ?? (await readKernelVersion(options.kernelPath)),
        ...(cpuTemplate === undefined ? {} : { cpuTemplate: cpuTemplate.identity }),
      };
    });
  }

  get identity(): Promise<VmIdentity> {
    return this.#identity();
  }

  #readSettings(): MachineSettings {
    const { cpuTemplate, cpuTemplatePath, mode, bootArgs, trackDirtyPages } = this.#options;
    const host = { arch: process.arch, vendor: hostCpuVendor() };
    const template =
      cpuTemplatePath !== undefined
        ? customTemplate(cpuTemplatePath)
        : cpuTemplate === undefined
          ? undefined
          : staticTemplate(cpuTemplate, host);
    return {
      ...(template === undefined ? {} : { cpuTemplate: template }),
      trackDirtyPages: mode !== "pvm" && trackDirtyPages !== false,
      ...(bootArgs === undefined ? {} : { bootArgs: bootArgs.split(/\s+/).filter((word) => word !== "") }),
    };
  }

  async checkKernelArgs(args: readonly string[]): Promise<void> {
    kernelCommandLine(args, this.#settings().bootArgs);
  }

  async probe(): Promise<VmmProbe> {
    const version = await this.#version();
    this.#settings();
    const { mode = "kvm", jailerPath } = this.#options;
    checkMode(mode);
    if (jailerPath !== undefined) {
      const printed = await tryCommand([jailerPath, "--version"]);
      if (printed.exitCode !== 0 || !/^Jailer v/m.test(printed.stdout)) {
        throw new AenvError({
          code: "jailer_invalid",
          message: `${jailerPath} is not Firecracker's jailer`,
          remediation: "set [firecracker].jailer_path to it, or leave it unset",
        });
      }
    }
    return {
      vmm: "firecracker",
      version: version.text,
      binary: this.#options.binary,
      mode,
      reason:
        mode === "pvm"
          ? "the kvm_pvm module runs guests without hardware virtualization"
          : "hardware virtualization: /dev/kvm can be opened",
      warnings: [
        ...version.warnings,
        ...this.#jails.warnings(),
        ...(this.#equips ? [] : ["no process waits for its VM: that needs CAP_SYS_CHROOT"]),
      ],
    };
  }

  async #inspect(): Promise<FirecrackerVersion> {
    const { binary } = this.#options;
    const printed = existsSync(binary) ? await tryCommand([binary, "--version"], {}) : undefined;
    if (printed === undefined || printed.exitCode !== 0) {
      throw new AenvError({
        code: "firecracker_not_found",
        message: `Firecracker cannot be run: ${binary} ${printed === undefined ? "does not exist" : `--version failed: ${printed.stderr.trim().slice(-500)}`}`,
        remediation: "set [firecracker].binary_path to a Firecracker executable, or vmm to qemu",
      });
    }
    if ((statSync(binary).mode & 0o005) !== 0o005 && mayChangeUser()) {
      throw new AenvError({
        code: "firecracker_not_executable",
        message: `${binary} may not be run by everybody, and VMs run under accounts of their own`,
        remediation: `chmod 755 ${binary}`,
      });
    }
    return parseFirecrackerVersion(printed.stdout, binary, hostFacts());
  }

  async launch(spec: VmLaunchSpec): Promise<VmHandle> {
    const version = await this.#version();
    return await this.#start(spec, () => bootRequests(spec, version, this.#settings()));
  }

  async restore(spec: VmRestoreSpec): Promise<VmHandle> {
    const version = await this.#version();
    return await this.#start(
      spec,
      () => restoreRequests(spec, version, this.#settings()),
      spec.deviceStatePath,
    );
  }

  async #prepare(network: VmNetwork): Promise<PreparedVm> {
    await this.#version();
    // No VM is bigger than the host; one that is gets a process of its own.
    const maxFileBytes = totalmem() + STATE_BYTES;
    const jail = await this.#startJail(network, maxFileBytes);
    return new Prepared(jail, network, maxFileBytes);
  }

  figures(): readonly VmmFigure[] {
    return this.#figures.list();
  }

  async sweep(): Promise<number> {
    return await this.#jails.sweep();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#jails.close();
  }

  /** Before 1.13 Firecracker writes the pages that were written only where it noted them. */
  #snapshotType(version: FirecrackerVersion): "Diff" | "Full" {
    return this.#settings().trackDirtyPages || version.atLeast(1, 13) ? "Diff" : "Full";
  }

  /** A process whose API answers. */
  async #startJail(
    network: VmNetwork,
    maxFileBytes: number,
    limits: GroupLimits = { memoryBytes: groupMemory(0), cpus: 1, processes: THREADS },
    entries: readonly JailEntry[] = [],
  ): Promise<Jail> {
    const { capture, socketTimeoutMs, socketPollMs } = this.#options;
    const args = [
      ...["--http-api-max-payload-size", String(PAYLOAD_BYTES), "--mmds-size-limit", String(PAYLOAD_BYTES)],
      ...["--metrics-path", `${INSIDE}/metrics`],
      ...(capture === undefined
        ? ["--level", "Warning"]
        : ["--level", capture.level, "--log-path", `${INSIDE}/log`, "--show-level", "--show-log-origin"]),
    ];
    const jail = await this.#jails.start(network, args, limits, maxFileBytes, entries);
    try {
      const api = new FirecrackerApi(jail.apiPath, jail.name);
      await answers(jail.process, api, jail.apiPath, jail.name, socketTimeoutMs, socketPollMs);
    } catch (error) {
      jail.process.signal("SIGKILL");
      const { stderrTail } = await jail.process.exited;
      await jail[Symbol.asyncDispose]();
      throw withWords(error, stderrTail);
    }
    return jail;
  }

  /** A jail with what the VM needs in it. */
  async #equippedJail(
    spec: VmLaunchSpec,
    entries: readonly JailEntry[],
    limits: GroupLimits,
    maxFileBytes: number,
  ): Promise<Jail> {
    const { prepared, network } = spec;
    const waiting =
      prepared instanceof Prepared && prepared.usable && prepared.maxFileBytes >= maxFileBytes
        ? prepared.jail
        : undefined;
    if (waiting === undefined) await prepared?.[Symbol.asyncDispose]();
    if (!this.#equips) return await this.#startJail(network, maxFileBytes, limits, entries);
    const jail = waiting ?? (await this.#startJail(network, maxFileBytes));
    try {
      for (const { source, kind } of entries) if (kind === "ro") letRead(source, jail.gid);
      await jail.equip(entries, limits, maxFileBytes);
    } catch (error) {
      await jail[Symbol.asyncDispose]();
      throw error;
    }
    return jail;
  }

  async #start(
    spec: VmLaunchSpec,
    makeRequests: () => readonly ApiRequest[],
    deviceStatePath?: string,
  ): Promise<VmHandle> {
    const restoring = deviceStatePath !== undefined;
    await using undo = new AsyncDisposableStack();
    if (spec.prepared !== undefined) undo.use(spec.prepared);
    if (restoring && !existsSync(deviceStatePath)) {
      throw new AenvError({
        code: "device_state_missing",
        message: `the device state ${deviceStatePath} of VM ${spec.vmId} does not exist`,
      });
    }
    checkMemoryFile(spec);
    const requests = makeRequests();
    const entries = jailEntries(spec, restoring);
    const { vcpuCount, memoryMiB } = spec.shape;
    const memoryBytes = memoryMiB * 2 ** 20;
    const maxFileBytes = memoryBytes + STATE_BYTES;
    const limits = {
      memoryBytes: groupMemory(memoryBytes),
      cpus: vcpuCount + 1,
      processes: vcpuCount + THREADS,
    };
    let jail: Jail;
    try {
      jail = await this.#equippedJail(spec, entries, limits, maxFileBytes);
    } catch (cause) {
      throw startError(spec, restoring, cause, "", "");
    }
    undo.use(jail);
    const output = this.#capture(jail, spec.vmId, spec.consoleLogPath);
    undo.use(output);
    const api = new FirecrackerApi(jail.apiPath, spec.vmId);
    let regions: readonly MemoryRegion[] | undefined;
    try {
      for (const drive of spec.drives) {
        const { name, target } = driveLink(drive);
        symlinkSync(target, join(jail.sharedDir, name));
      }
      if (restoring) jail.give(STATE_FILE, readFileSync(deviceStatePath));
      for (const { method, path, body, timeoutMs } of requests) await api.call(method, path, body, timeoutMs);
      if (!restoring && memoryBytes > ONE_REGION_BYTES)
        regions = findGuestRegions(jail.process.pid, memoryMiB);
      if (restoring) rmSync(join(jail.sharedDir, STATE_FILE), { force: true });
    } catch (cause) {
      jail.process.signal("SIGKILL");
      const { stderrTail } = await jail.process.exited;
      output.run();
      throw startError(spec, restoring, cause, stderrTail, readTail(spec.consoleLogPath, 1024));
    }
    const limited = spec.drives.flatMap(({ driveId, rateLimit }) =>
      rateLimit === undefined ? [] : [[driveId, rateLimit] as const],
    );
    const reference: VmReference = {
      vmId: spec.vmId,
      pid: jail.process.pid,
      startTimeTicks: jail.process.startTimeTicks,
      controlSocketPath: jail.socketPath,
      workDir: spec.workDir,
      memoryFile: spec.memoryFile,
      jailDir: jail.dir,
      consoleLogPath: spec.consoleLogPath,
      network: { netnsPath: spec.network.netnsPath, tapName: spec.network.tapName },
      ...(restoring ? { memoryMappedAs: MEMORY } : { anonymousMemory: true }),
      ...(regions === undefined ? {} : { memoryRegions: regions }),
      ...(limited.length === 0 ? {} : { driveLimits: Object.fromEntries(limited) }),
    };
    const snapshotType = this.#snapshotType(await this.#version());
    undo.move();
    return new FirecrackerHandle(jail.process, reference, this.#options.log, jail, output, snapshotType);
  }

  /** What the process writes from here on, and wrote before, goes to the VM's files. */
  #capture(jail: Jail, vmId: string, consolePath: string): Output {
    const { capture, log } = this.#options;
    const failed = (error: unknown) => log.warn({ err: error, vmId }, "a VM's output cannot be kept");
    using opened = new DisposableStack();
    const file = (path: string, bytes: number) => opened.use(new RotatingFile(path, bytes));
    const pipe = (path: string) => opened.adopt(openPipe(path), closeSync);
    const consoles = [file(consolePath, CONSOLE_BYTES)];
    const wanted: [number, Sink[]][] = [];
    if (capture !== undefined) {
      const dir = join(capture.dir, vmId);
      mkdirSync(dir, { recursive: true, mode: 0o750 });
      consoles.push(file(join(dir, "console.log"), CONSOLE_BYTES));
      wanted.push([pipe(jail.logPipe), [file(join(dir, "firecracker.log"), LOG_BYTES)]]);
    }
    const figures = new FigureLines(this.#figures);
    wanted.push([pipe(jail.consolePipe), consoles], [pipe(jail.metricsPipe), [figures]]);
    // Nothing fails any more: they take over what was opened.
    opened.move();
    const pumps = wanted.map(([fd, files]) => new Pump(fd, files, failed));
    return new Output(pumps, () => {
      log.debug({ vmId, figures: figures.own }, "what the VM's process counted");
      if (capture === undefined || !existsSync(jail.stderrPath)) return;
      copyFileSync(jail.stderrPath, join(capture.dir, vmId, "stderr.log"));
    });
  }

  async adopt(reference: VmReference): Promise<VmHandle | undefined> {
    const { pid, startTimeTicks, jailDir, vmId } = reference;
    const { socketTimeoutMs, socketPollMs, log } = this.#options;
    let jail: Jail | undefined;
    let output: Output | undefined;
    let vmm: VmmProcess | undefined;
    if (jailDir === undefined) {
      // Of a version without jails.
      vmm = adoptVmm(pid, startTimeTicks, join(reference.workDir, "firecracker.stderr.log"));
    } else {
      jail = this.#jails.adopt(jailDir, pid, startTimeTicks);
      vmm = jail?.process;
    }
    if (vmm === undefined) return undefined;
    try {
      const apiPath = jail?.apiPath ?? reference.controlSocketPath;
      const api = new FirecrackerApi(apiPath, vmId);
      await answers(vmm, api, apiPath, vmId, Math.min(ADOPT_MS, socketTimeoutMs), socketPollMs);
      const snapshotType = this.#snapshotType(await this.#version());
      if (jail !== undefined && reference.consoleLogPath !== undefined)
        output = this.#capture(jail, vmId, reference.consoleLogPath);
      return new FirecrackerHandle(vmm, reference, log, jail, output, snapshotType, true);
    } catch (cause) {
      // Whoever ends the process sweeps the rest.
      jail?.abandon();
      if (await settled(vmm.exited, 300)) return undefined;
      if (!(cause instanceof AenvError && ["vm_unreachable", "vm_gone"].includes(cause.code))) throw cause;
      throw new AenvError({
        code: "vm_unreachable",
        message: `VM ${vmId} (process ${pid}) runs but does not answer on its API socket`,
        remediation: `kill process ${pid} to give the VM up`,
        cause,
      });
    }
  }
}

/** Error: what a host lacks for a mode, by name, with the cure. */
export function checkMode(
  mode: "kvm" | "pvm",
  host: { readonly arch: string; readonly modules: string; readonly kvm: string } = {
    arch: process.arch,
    modules: "/sys/module",
    kvm: "/dev/kvm",
  },
): void {
  const pvm = existsSync(join(host.modules, "kvm_pvm"));
  const refuse = (message: string, remediation: string, cause?: unknown): never => {
    throw new AenvError({
      code: mode === "pvm" ? "pvm_unusable" : "kvm_unusable",
      message,
      remediation,
      ...(cause === undefined ? {} : { cause }),
    });
  };
  if (mode === "pvm" && host.arch !== "x64")
    refuse(
      `the mode pvm needs an x86_64 host, this one is ${host.arch}`,
      'set virtualization_mode to "kvm" on a host with hardware virtualization',
    );
  if (mode === "pvm" && !pvm)
    refuse(
      "the mode pvm needs the kernel module kvm_pvm, which is not loaded",
      'load it (modprobe kvm_pvm, on a kernel with PVM), or set virtualization_mode to "kvm"',
    );
  if (mode === "kvm" && pvm)
    refuse(
      "the kernel module kvm_pvm is loaded: guests would run under PVM, not in the mode kvm",
      'set virtualization_mode to "pvm", or unload the module (modprobe -r kvm_pvm)',
    );
  try {
    accessSync(host.kvm, constants.R_OK | constants.W_OK);
  } catch (cause) {
    refuse(
      `Firecracker needs ${host.kvm}, which is missing or may not be opened`,
      "use a host with (nested) hardware virtualization, or set vmm to qemu",
      cause,
    );
  }
}

function withWords(cause: unknown, stderrTail: string): unknown {
  return stderrTail === "" ? cause : new AenvError({ code: "vm_start_failed", message: stderrTail, cause });
}

function startError(
  spec: VmLaunchSpec,
  restoring: boolean,
  cause: unknown,
  stderrTail: string,
  consoleTail: string,
): AenvError {
  const reasons = [
    errorChain(cause).join(": "),
    ...(stderrTail === "" ? [] : [`Firecracker says: ${stderrTail}`]),
    ...(consoleTail === "" ? [] : [`the console ends with: ${consoleTail}`]),
  ];
  return new AenvError({
    code: restoring ? "vm_restore_failed" : "vm_start_failed",
    message: `VM ${spec.vmId} could not be ${restoring ? "restored" : "started"}; ${reasons.join("; ")}`,
    cause,
  });
}

/** Resolves when the API answers. */
async function answers(
  vmm: VmmProcess,
  api: FirecrackerApi,
  socketPath: string,
  vmId: string,
  timeoutMs: number,
  pollMs: number,
): Promise<void> {
  const deadline = performance.now() + timeoutMs;
  let gone = false;
  vmm.exited.then(() => {
    gone = true;
  });
  let lastError: unknown;
  while (!gone && performance.now() < deadline) {
    if (existsSync(socketPath)) {
      try {
        await api.call("GET", "/version", undefined, Math.max(1, deadline - performance.now()));
        return;
      } catch (error) {
        lastError = error;
      }
    }
    await Bun.sleep(pollMs);
    vmm.poke();
  }
  throw new AenvError({
    code: gone ? "vm_gone" : "vm_unreachable",
    message: gone
      ? `the process of VM ${vmId} ended`
      : `VM ${vmId} did not answer on its API socket within ${timeoutMs} ms`,
    ...(gone ? {} : { remediation: "raise [firecracker].socket_timeout_secs if the host is only slow" }),
    cause: lastError,
  });
}

/** The pipes of one VM on their way into files. */
class Output implements Disposable {
  readonly #pumps: readonly Pump[];
  readonly #last: () => void;

  constructor(pumps: readonly Pump[], last: () => void) {
    this.#pumps = pumps;
    this.#last = last;
  }

  run(): void {
    for (const pump of this.#pumps) pump.run();
  }

  [Symbol.dispose](): void {
    for (const pump of this.#pumps) pump[Symbol.dispose]();
    this.#last();
  }
}

class FirecrackerHandle implements VmHandle {
  readonly reference: VmReference;
  readonly exited: VmHandle["exited"];
  readonly api: FirecrackerApi;
  readonly #process: VmmProcess;
  readonly #jail: Jail | undefined;
  readonly #ended: Promise<unknown>;
  readonly #snapshotType: "Diff" | "Full";
  readonly #log: Logger;
  #gone = false;
  #killing: Promise<void> | undefined;
  /** Also when an earlier server may have: its capture has no end. */
  #held: boolean;

  constructor(
    process: VmmProcess,
    reference: VmReference,
    log: Logger,
    jail: Jail | undefined,
    output: Output | undefined,
    snapshotType: "Diff" | "Full",
    held = false,
  ) {
    this.#held = held;
    this.#log = log;
    this.reference = reference;
    this.#snapshotType = snapshotType;
    this.#process = process;
    this.#jail = jail;
    this.api = new FirecrackerApi(jail?.apiPath ?? reference.controlSocketPath, reference.vmId);
    this.exited = process.exited.then((exit) => {
      this.#gone = true;
      output?.[Symbol.dispose]();
      const { exitCode, signal } = exit;
      log.info({ vmId: reference.vmId, pid: reference.pid, exitCode, signal }, "VM process ended");
      return exit;
    });
    this.#ended = this.exited.then(async () => {
      try {
        await jail?.[Symbol.asyncDispose]();
      } catch (error) {
        log.error({ err: error, vmId: reference.vmId }, "the jail of a VM could not be removed");
      }
      try {
        // The namespace may be another VM's next.
        await this.#letNetworkGo();
      } catch (error) {
        log.error({ err: error, vmId: reference.vmId }, "the network of an ended VM is still held");
      }
    });
  }

  /**
   * Firecracker goes on putting what comes through the tap into a paused guest's memory, which is read after the
   * device state: what came between would be in the one and not in the other, and a restored guest's network card
   * would use buffers again that the guest has back. So nothing reaches the tap while the VM stands still, and what was
   * on its way is done with before the state is saved: see `#settle`.
   */
  async #holdNetwork(): Promise<void> {
    const { network } = this.reference;
    // References of older versions do not name it.
    if (network === undefined) return;
    this.#held = true;
    await holdDevice(network.netnsPath, network.tapName);
  }

  /**
   * A round of Firecracker's event loop for what waits, one for answers to that, and as each request may come in the
   * midst of a round, one more. Requests to disks are carried out within a round.
   */
  async #settle(): Promise<void> {
    for (let i = 0; i < 3; i++) await this.api.call("GET", "/version");
  }

  /**
   * What a limiter holds back it carries out by a timer of its own, whether the vCPUs run or not: a disk might be
   * written when it is sealed, and the guest's memory be told so when the device state, by which the request is carried
   * out once more after a restore, is saved. So limits are away while the VM stands still, and what waited for them is
   * done when this resolves; they come back before the vCPUs run, see `resume`.
   */
  async #liftLimits(): Promise<void> {
    const limited = Object.keys(this.reference.driveLimits ?? {});
    if (limited.length === 0) return;
    for (const driveId of limited) await this.#request(limitRequest(driveId, undefined));
    await Bun.sleep(LIFTED_MS);
  }

  async #request({ method, path, body, timeoutMs }: ApiRequest): Promise<void> {
    await this.api.call(method, path, body, timeoutMs);
  }

  async #letNetworkGo(): Promise<void> {
    const { network } = this.reference;
    if (network === undefined || !this.#held) return;
    await letDeviceGo(network.netnsPath);
    this.#held = false;
  }

  #usable(): void {
    if (!this.#gone) return;
    throw new AenvError({
      code: "vm_gone",
      status: 409,
      message: `the process of VM ${this.reference.vmId} has ended`,
    });
  }

  async pause(): Promise<void> {
    this.#usable();
    // At once, as a rule of the packet filter takes some milliseconds. Neither is under way any more when this fails.
    const done = await Promise.allSettled([
      this.#holdNetwork(),
      this.api.call("PATCH", "/vm", { state: "Paused" }),
    ]);
    for (const one of done) if (one.status === "rejected") throw one.reason;
    await this.#liftLimits();
    await this.#settle();
  }

  async resume(): Promise<void> {
    this.#usable();
    for (const [driveId, limit] of Object.entries(this.reference.driveLimits ?? {}))
      await this.#request(limitRequest(driveId, limit));
    await this.api.call("PATCH", "/vm", { state: "Resumed" });
    await this.#letNetworkGo();
  }

  /**
   * Upstream saves device state and memory together: the pages go to a sparse file that is dropped, ours are
   * taken from the process.
   */
  async saveDeviceState(path: string): Promise<void> {
    this.#usable();
    const temporary = `${path}.tmp`;
    // Where the process can write, and as it sees that.
    const at = (file: string): { here: string; there: string } =>
      this.#jail === undefined
        ? { here: `${path}.${file}`, there: `${path}.${file}` }
        : { here: join(this.#jail.sharedDir, file), there: `${INSIDE}/${file}` };
    const [state, pages] = [at(STATE_FILE), at(PAGES_FILE)];
    const clear = async () => {
      // What is no file is none of ours: it stays, and the save fails.
      for (const file of [state.here, pages.here]) await rm(file, { force: true });
    };
    try {
      await clear();
      await this.#settle();
      await this.api.call(
        "PUT",
        "/snapshot/create",
        { snapshot_type: this.#snapshotType, snapshot_path: state.there, mem_file_path: pages.there },
        SAVE_TIMEOUT_MS,
      );
      await writeFile(temporary, await readShared(state.here, STATE_BYTES), { mode: 0o600 });
      await publishDurable(temporary, path);
      await clear();
    } catch (cause) {
      // An error of these says no more than the one there is.
      await Promise.allSettled([removeTree(temporary), clear()]);
      throw new AenvError({
        code:
          cause instanceof AenvError && /pause/i.test(cause.message)
            ? "vm_not_paused"
            : "device_state_not_saved",
        message: `the device state of VM ${this.reference.vmId} could not be saved to ${path}`,
        cause,
      });
    }
  }

  async kill(graceMs = 2000): Promise<void> {
    this.#killing ??= this.#end(graceMs);
    await this.#killing;
    await this.#ended;
  }

  async #end(graceMs: number): Promise<void> {
    if (!this.#gone && graceMs > 0 && this.#jail !== undefined) {
      // One that does not answer, or has not booted, has nothing more to tell.
      await this.api
        .call("PUT", "/actions", { action_type: "FlushMetrics" }, FLUSH_MS)
        .catch((error: unknown) => this.#log.debug({ err: error }, "a VM's last counts are not known"));
    }
    await endProcess(this.#process, this.exited, this.#gone ? 0 : graceMs);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
  }
}
