import { createHash } from "node:crypto";
import {
  accessSync,
  closeSync,
  constants,
  existsSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
} from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { basename, dirname, join } from "node:path";
import { tryCommand } from "../../lib/command.ts";
import { publishDurable } from "../../lib/durable.ts";
import { AenvError, errorChain } from "../../lib/errors.ts";
import type { Logger } from "../../lib/log.ts";
import { endProcess, hostCpu, once, settled } from "../common.ts";
import { readKernelVersion } from "../kernel.ts";
import { adoptVmm, readTail, spawnVmm, type VmmProcess } from "../process.ts";
import type {
  VirtualizationMode,
  VmHandle,
  VmIdentity,
  VmLaunchSpec,
  VmmDriver,
  VmmProbe,
  VmReference,
  VmRestoreSpec,
} from "../types.ts";
import {
  cpuModel,
  effectiveVcpus,
  kernelCommandLine,
  MAX_DRIVES,
  type QemuInstallation,
  qemuCommand,
} from "./command.ts";
import { type ModeVerdict, probeKvm } from "./probe.ts";
import { connectQmp, type QmpClient, type QmpEvent } from "./qmp.ts";
import { tickMeter } from "./ticks.ts";
import { parseQemuVersion } from "./version.ts";

export interface QemuDriverOptions {
  readonly binary: string;
  /** Directories with QEMU's firmware (`-L`), where the binary does not find it by itself. */
  readonly dataDirs?: readonly string[];
  /** `QEMU_MODULE_DIR` of the process. */
  readonly moduleDir?: string;
  /** `LD_LIBRARY_PATH` of the process. */
  readonly libraryPath?: string;
  /**
   * The library that keeps memory files whole when guests give memory back (c/memshield). Absent, or where it cannot be
   * loaded into this QEMU: guests keep what they once used.
   */
  readonly shieldPath?: string;
  /** `auto`: KVM where a guest runs on it, else emulation. `kvm`: an error where none does. */
  readonly mode: "auto" | "kvm" | "tcg";
  /** Uncompressed guest kernel (ELF): part of the identity, and what the KVM probe boots. */
  readonly kernelPath: string;
  /** Absent: read from the kernel's banner. */
  readonly kernelVersion?: string;
  /** Base of the guest kernel's command line, below what the machine and the VM need. */
  readonly bootArgs?: string;
  /** Where the KVM probe's verdict is kept. Absent: each process probes once. */
  readonly probeCacheDir?: string;
  readonly log: Logger;
}

/** `sockaddr_un` holds 108 bytes with the final NUL. */
const MAX_SOCKET_PATH = 107;
const START_TIMEOUT_MS = 30_000;
/** Bits of open()'s flags: reading is 0. */
const ACCESS_MODE = 3;
const STDERR_LOG = "qemu.stderr.log";

export function createQemuDriver(options: QemuDriverOptions): VmmDriver {
  return new QemuDriver(options);
}

/**
 * Ends a VM that is only known by its reference, also one that does not answer on its control socket.
 * Resolves when its process is gone and its control socket removed; at once when it is gone already.
 */
export async function killVm(reference: VmReference, graceMs = 2000): Promise<void> {
  const vmm = adoptVmm(reference.pid, reference.startTimeTicks, join(reference.workDir, STDERR_LOG));
  if (vmm !== undefined) await endProcess(vmm, vmm.exited, graceMs);
  removeControlSocket(reference.controlSocketPath);
}

class QemuDriver implements VmmDriver {
  readonly maxDrives = MAX_DRIVES;
  readonly #options: QemuDriverOptions;
  readonly #installation: () => Promise<QemuInstallation>;
  readonly #verdict: () => Promise<{ mode: VirtualizationMode; reason: string }>;
  readonly #identity: () => Promise<VmIdentity>;
  readonly #tickKHz = tickMeter();

  constructor(options: QemuDriverOptions) {
    this.#options = options;
    this.#installation = once(() => this.#inspect());
    this.#verdict = once(() => this.#chooseMode());
    this.#identity = once(() => this.#describe());
  }

  get identity(): Promise<VmIdentity> {
    return this.#identity();
  }

  async checkKernelArgs(args: readonly string[]): Promise<void> {
    const { mode } = await this.#verdict();
    kernelCommandLine(args, mode, mode === "tcg" ? await this.#tickKHz() : undefined, this.#baseArgs());
  }

  #baseArgs(): string[] | undefined {
    return this.#options.bootArgs?.split(/\s+/).filter((word) => word !== "");
  }

  async probe(): Promise<VmmProbe> {
    const { version, binary, shielded } = await this.#installation();
    const { mode, reason } = await this.#verdict();
    const warnings =
      mode === "tcg" && version.major < 10
        ? [
            `QEMU ${version.text} is older than 10: guests get one vCPU and no cmpxchg16b, and a rare guest crash is possible; agentenv setup provides a newer one`,
          ]
        : [];
    if (shielded !== true && this.#options.shieldPath !== undefined) {
      warnings.push(
        `${this.#options.shieldPath} cannot be loaded into ${binary}: guests give no memory back; use a dynamically linked QEMU`,
      );
    }
    return { vmm: "qemu", version: version.text, binary, mode, reason, warnings };
  }

  async launch(spec: VmLaunchSpec): Promise<VmHandle> {
    return await this.#start(spec, undefined);
  }

  async restore(spec: VmRestoreSpec): Promise<VmHandle> {
    if (!existsSync(spec.deviceStatePath)) {
      throw new AenvError({
        code: "device_state_missing",
        message: `the device state ${spec.deviceStatePath} of VM ${spec.vmId} does not exist`,
      });
    }
    return await this.#start(spec, spec.deviceStatePath);
  }

  async adopt(reference: VmReference): Promise<VmHandle | undefined> {
    const process = adoptVmm(reference.pid, reference.startTimeTicks, join(reference.workDir, STDERR_LOG));
    if (process === undefined) {
      removeControlSocket(reference.controlSocketPath);
      return undefined;
    }
    const handle = new QemuHandle(process, reference, this.#options.log);
    try {
      await handle.connect(5000);
    } catch (cause) {
      if (!(await settled(process.exited, 300))) {
        throw new AenvError({
          code: "vm_unreachable",
          message: `VM ${reference.vmId} (process ${reference.pid}) runs but does not answer on its control socket`,
          remediation: `another program may hold ${reference.controlSocketPath}; kill process ${reference.pid} to give the VM up`,
          cause,
        });
      }
      removeControlSocket(reference.controlSocketPath);
      return undefined;
    }
    return handle;
  }

  async #inspect(): Promise<QemuInstallation> {
    const { binary, dataDirs = [] } = this.#options;
    const missing = (cause?: unknown): AenvError =>
      new AenvError({
        code: "qemu_not_found",
        message: `QEMU cannot be run: ${binary} does not exist or is not an executable`,
        remediation: "run agentenv setup, or set [qemu].binary_path",
        cause,
      });
    const path = binary.includes("/") ? binary : Bun.which(binary);
    if (path === null) throw missing();
    try {
      accessSync(path, constants.X_OK);
    } catch (cause) {
      throw missing(cause);
    }
    const env = this.#environment();
    const printed = await tryCommand([path, "--version"], { env });
    if (printed.exitCode !== 0) {
      throw new AenvError({
        code: "qemu_invalid",
        message: `${path} --version failed with exit code ${printed.exitCode}: ${printed.stderr.trim().slice(-1000)}`,
        remediation: "run agentenv setup (missing shared libraries are provided with it)",
      });
    }
    const version = parseQemuVersion(printed.stdout, path);
    // A build without seccomp refuses the option before it gets to print its version.
    const sandbox = (await tryCommand([path, "-sandbox", "on", "--version"], { env })).exitCode === 0;
    const shielded = await this.#isShielded(path);
    return { binary: path, version, dataDirs, sandbox, shielded };
  }

  /** Whether the library is loaded into this QEMU, as it is not into a static one, and answers in it. */
  async #isShielded(binary: string): Promise<boolean> {
    if (this.#options.shieldPath === undefined) return false;
    const env = { ...this.#environment(), ...this.#shieldOver("/"), AENV_MEMSHIELD_PROBE: "1" };
    const { exitCode, stdout } = await tryCommand([binary, "--version"], { env });
    return exitCode === 0 && stdout.startsWith("aenv-memshield\n");
  }

  #shieldOver(memoryFile: string): Record<string, string> {
    const { shieldPath } = this.#options;
    return shieldPath === undefined ? {} : { LD_PRELOAD: shieldPath, AENV_MEMORY_FILE: memoryFile };
  }

  #environment(): Record<string, string> {
    const { moduleDir, libraryPath } = this.#options;
    return {
      PATH: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
      LANG: "C.UTF-8",
      ...(moduleDir === undefined ? {} : { QEMU_MODULE_DIR: moduleDir }),
      ...(libraryPath === undefined ? {} : { LD_LIBRARY_PATH: libraryPath }),
    };
  }

  async #chooseMode(): Promise<{ mode: VirtualizationMode; reason: string }> {
    const { mode, kernelPath, probeCacheDir } = this.#options;
    if (mode === "tcg") return { mode, reason: "emulation (TCG), as configured" };
    if (!existsSync(kernelPath)) {
      throw new AenvError({
        code: "kernel_not_found",
        message: `there is no guest kernel at ${kernelPath}`,
        remediation: "run agentenv setup, or set [kernel].image_path",
      });
    }
    const kvm: ModeVerdict = await probeKvm({
      installation: await this.#installation(),
      env: this.#environment(),
      kernelPath,
      cacheDir: probeCacheDir,
    });
    if (kvm.usable) return { mode: "kvm", reason: `hardware virtualization: /dev/kvm ${kvm.reason}` };
    if (mode === "kvm") {
      throw new AenvError({
        code: "kvm_unusable",
        message: `virtualization mode kvm is configured, but /dev/kvm ${kvm.reason}`,
        remediation:
          "use a host with (nested) hardware virtualization, or set virtualization_mode to auto or tcg",
      });
    }
    return { mode: "tcg", reason: `emulation (TCG): /dev/kvm ${kvm.reason}` };
  }

  async #describe(): Promise<VmIdentity> {
    const { version, shielded } = await this.#installation();
    const { mode } = await this.#verdict();
    return {
      vmm: "qemu",
      vmmVersion: version.text,
      mode,
      cpuModel: mode === "kvm" ? hostCpu() : cpuModel(version, mode),
      kernelVersion: this.#options.kernelVersion ?? (await readKernelVersion(this.#options.kernelPath)),
      ...(shielded === true ? { balloon: true as const } : {}),
      tscKHz: await this.#tickKHz(),
    };
  }

  async #start(spec: VmLaunchSpec, deviceStatePath: string | undefined): Promise<VmHandle> {
    const installation = await this.#installation();
    const { mode } = await this.#verdict();
    const { log } = this.#options;
    checkSpec(spec);
    const vcpus = effectiveVcpus(installation.version, mode, spec.shape.vcpuCount);
    if (vcpus !== spec.shape.vcpuCount) {
      log.warn(
        { vmId: spec.vmId, wanted: spec.shape.vcpuCount },
        `the guest gets one vCPU: QEMU ${installation.version.text} emulates more than one wrongly`,
      );
    }
    await using undo = new AsyncDisposableStack();
    const controlSocketPath = await controlSocket(spec);
    undo.defer(() => removeControlSocket(controlSocketPath));

    const tickKHz = mode === "tcg" ? await this.#tickKHz() : undefined;
    let incoming: string | undefined;
    let stateFd: number | undefined;
    if (deviceStatePath !== undefined) {
      // `file:` came with 8.2; before it a descriptor of a file serves (and `exec:` would need a shell that
      // the process may not start).
      if (installation.version.atLeast(8, 2)) incoming = `file:${deviceStatePath}`;
      else {
        stateFd = openSync(deviceStatePath, "r");
        incoming = "fd:3";
      }
    }
    const stderrPath = join(spec.workDir, STDERR_LOG);
    let vmm: VmmProcess;
    try {
      vmm = spawnVmm({
        argv: qemuCommand({
          installation,
          mode,
          spec,
          controlSocketPath,
          tickKHz,
          bootArgs: this.#baseArgs(),
          incoming,
        }),
        netnsPath: spec.network.netnsPath,
        tapName: spec.network.tapName,
        env: {
          ...this.#environment(),
          ...(installation.shielded === true ? this.#shieldOver(spec.memoryFile) : {}),
        },
        cwd: spec.workDir,
        stderrPath,
        ...(stateFd === undefined ? {} : { extraFd: stateFd }),
      });
    } finally {
      if (stateFd !== undefined) closeSync(stateFd);
    }
    undo.defer(async () => {
      vmm.signal("SIGKILL");
      await vmm.exited;
    });
    const reference: VmReference = {
      vmId: spec.vmId,
      pid: vmm.pid,
      startTimeTicks: vmm.startTimeTicks,
      controlSocketPath,
      workDir: spec.workDir,
      memoryFile: spec.memoryFile,
    };
    const handle = new QemuHandle(vmm, reference, log);
    try {
      await handle.connect(START_TIMEOUT_MS);
      if (installation.shielded === true) requireShield(vmm.pid, spec.memoryFile);
      if (deviceStatePath !== undefined) await handle.finishIncoming(START_TIMEOUT_MS);
    } catch (cause) {
      handle.disconnect();
      vmm.signal("SIGKILL");
      const exit = await vmm.exited;
      throw startError(spec, deviceStatePath !== undefined, exit.stderrTail, cause);
    }
    undo.move();
    return handle;
  }
}

/**
 * Without the library this QEMU would tear the memory file of all clones. It is in force when the file is open for
 * reading alone: QEMU, which wants to write here, would have it open for both. No guest has given memory back so early.
 */
function requireShield(pid: number, memoryFile: string): void {
  const modes = openModes(pid, memoryFile);
  if (modes.length > 0 && modes.every((mode) => mode === constants.O_RDONLY)) return;
  throw new AenvError({
    code: "memory_shield_missing",
    message: `QEMU runs without the library that keeps its memory file ${memoryFile} whole: it has it open ${modes.length === 0 ? "nowhere" : "for writing"}`,
    remediation: "restart the server, which puts the library into its cache directory again",
  });
}

/** How a process has a file open, by whatever name: the access mode of each descriptor. */
function openModes(pid: number, path: string): number[] {
  const { dev, ino } = statSync(path, { bigint: true });
  return readdirSync(`/proc/${pid}/fd`).flatMap((fd) => {
    const open = statSync(`/proc/${pid}/fd/${fd}`, { bigint: true, throwIfNoEntry: false });
    if (open?.dev !== dev || open.ino !== ino) return [];
    const flags = /^flags:\s*([0-7]+)$/m.exec(readFileSync(`/proc/${pid}/fdinfo/${fd}`, "utf8"))?.[1];
    return [Number.parseInt(flags ?? "", 8) & ACCESS_MODE];
  });
}

function checkSpec(spec: VmLaunchSpec): void {
  const { vcpuCount, memoryMiB } = spec.shape;
  if (!Number.isInteger(vcpuCount) || vcpuCount < 1 || vcpuCount > 255) {
    throw new AenvError({
      code: "invalid_shape",
      status: 400,
      message: `${vcpuCount} is not a possible number of vCPUs (1 to 255)`,
    });
  }
  if (!Number.isInteger(memoryMiB) || memoryMiB < 64) {
    throw new AenvError({
      code: "invalid_shape",
      status: 400,
      message: `${memoryMiB} MiB is not a possible memory size (64 or more)`,
    });
  }
  for (const [what, path] of [
    ["guest kernel", spec.kernelPath],
    ["guest initrd", spec.initrdPath],
    ["memory file", spec.memoryFile],
    ["network namespace", spec.network.netnsPath],
    ["work directory", spec.workDir],
  ] as const) {
    if (!existsSync(path)) {
      throw new AenvError({
        code: "vm_start_failed",
        message: `VM ${spec.vmId} cannot start: the ${what} ${path} does not exist`,
      });
    }
  }
  // QEMU would make a short file longer: it must never write to one that clones share.
  const stat = statSync(spec.memoryFile);
  if (stat.isFile() && stat.size !== memoryMiB * 1024 * 1024) {
    throw new AenvError({
      code: "memory_size_mismatch",
      message: `the memory file ${spec.memoryFile} has ${stat.size} bytes, the VM has ${memoryMiB} MiB of memory`,
    });
  }
}

function startError(spec: VmLaunchSpec, restoring: boolean, stderrTail: string, cause: unknown): AenvError {
  const consoleTail = readTail(spec.consoleLogPath, 1024);
  const reasons = [
    stderrTail === "" ? errorChain(cause).join(": ") : `QEMU says: ${stderrTail}`,
    ...(consoleTail === "" ? [] : [`the console ends with: ${consoleTail}`]),
  ];
  return new AenvError({
    code: restoring ? "vm_restore_failed" : "vm_start_failed",
    message: `VM ${spec.vmId} could not be ${restoring ? "restored" : "started"}; ${reasons.join("; ")}`,
    cause,
  });
}

/** The socket in the work directory, or in a short private directory when that path is too long for one. */
async function controlSocket(spec: VmLaunchSpec): Promise<string> {
  const near = join(spec.workDir, "qmp.sock");
  if (Buffer.byteLength(near) <= MAX_SOCKET_PATH) return near;
  const tag = createHash("sha256").update(spec.vmId).digest("hex").slice(0, 12);
  const base = Buffer.byteLength(tmpdir()) < 60 ? tmpdir() : "/tmp";
  return join(await mkdtemp(join(base, `aenv-qmp-${tag}-`)), "qmp.sock");
}

function removeControlSocket(path: string): void {
  rmSync(path, { force: true });
  const dir = dirname(path);
  if (basename(dir).startsWith("aenv-qmp-")) rmSync(dir, { recursive: true, force: true });
}

class QemuHandle implements VmHandle {
  readonly reference: VmReference;
  readonly exited: VmHandle["exited"];
  readonly #process: VmmProcess;
  readonly #log: Logger;
  #qmp: QmpClient | undefined;
  #connecting: Promise<QmpClient> | undefined;
  #gone = false;
  #killing: Promise<void> | undefined;

  constructor(process: VmmProcess, reference: VmReference, log: Logger) {
    this.reference = reference;
    this.#process = process;
    this.#log = log.child({ vmId: reference.vmId });
    this.exited = process.exited.then((exit) => {
      this.#gone = true;
      this.disconnect();
      removeControlSocket(reference.controlSocketPath);
      this.#log.info(
        { pid: reference.pid, exitCode: exit.exitCode, signal: exit.signal },
        "VM process ended",
      );
      return exit;
    });
  }

  /** Connects to the control socket, which a starting QEMU makes after some milliseconds. */
  async connect(timeoutMs: number): Promise<QmpClient> {
    this.#connecting ??= this.#connect(timeoutMs).finally(() => {
      this.#connecting = undefined;
    });
    return await this.#connecting;
  }

  async #connect(timeoutMs: number): Promise<QmpClient> {
    const deadline = performance.now() + timeoutMs;
    const socketPath = this.reference.controlSocketPath;
    let lastError: unknown;
    while (!this.#gone) {
      const left = deadline - performance.now();
      if (left <= 0) break;
      if (existsSync(socketPath)) {
        try {
          const qmp = await connectQmp({
            socketPath,
            timeoutMs: left,
            onEvent: (event) => this.#onEvent(event),
          });
          // The kernel tells us of a process that is not our child only when we ask.
          void qmp.closed.then(() => this.#process.poke());
          this.#qmp = qmp;
          return qmp;
        } catch (error) {
          lastError = error;
        }
      }
      await Bun.sleep(2);
      this.#process.poke();
    }
    throw new AenvError({
      code: this.#gone ? "vm_gone" : "vm_unreachable",
      message: this.#gone
        ? `the process of VM ${this.reference.vmId} ended`
        : `VM ${this.reference.vmId} did not answer on its control socket within ${timeoutMs} ms`,
      cause: lastError,
    });
  }

  disconnect(): void {
    this.#qmp?.[Symbol.dispose]();
    this.#qmp = undefined;
  }

  /** Waits until the device state is loaded, then lets the vCPUs run. */
  async finishIncoming(timeoutMs: number): Promise<void> {
    const qmp = await this.#client();
    const deadline = performance.now() + timeoutMs;
    while ((await this.#status(qmp)) === "inmigrate") {
      if (performance.now() > deadline) {
        throw new AenvError({
          code: "qmp_timeout",
          message: `the device state was not loaded within ${timeoutMs} ms`,
        });
      }
      await Bun.sleep(1);
    }
    await qmp.execute("cont");
  }

  async pause(): Promise<void> {
    const qmp = await this.#client();
    await qmp.execute("stop");
  }

  async resume(): Promise<void> {
    const qmp = await this.#client();
    await qmp.execute("cont");
  }

  async saveDeviceState(path: string): Promise<void> {
    const qmp = await this.#client();
    const status = await this.#status(qmp);
    if (status === "running") {
      throw new AenvError({
        code: "vm_not_paused",
        status: 409,
        message: `VM ${this.reference.vmId} runs: its device state can be saved only while it is paused`,
      });
    }
    const temporary = `${path}.tmp`;
    try {
      await qmp.execute("xen-save-devices-state", { filename: temporary, live: false });
      await publishDurable(temporary, path);
    } catch (cause) {
      await rm(temporary, { force: true });
      throw new AenvError({
        code: "device_state_not_saved",
        message: `the device state of VM ${this.reference.vmId} could not be saved to ${path}`,
        cause,
      });
    }
  }

  async kill(graceMs = 2000): Promise<void> {
    this.#killing ??= endProcess(this.#process, this.exited, this.#gone ? 0 : graceMs);
    await this.#killing;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
  }

  async #client(): Promise<QmpClient> {
    if (this.#gone) {
      throw new AenvError({
        code: "vm_gone",
        status: 409,
        message: `the process of VM ${this.reference.vmId} has ended`,
      });
    }
    return this.#qmp !== undefined && !this.#qmp.isClosed ? this.#qmp : await this.connect(5000);
  }

  async #status(qmp: QmpClient): Promise<string> {
    const answer = await qmp.execute("query-status");
    const status = (answer as { status?: unknown } | null)?.status;
    if (typeof status !== "string") {
      throw new AenvError({ code: "qmp_failed", message: "QEMU answered query-status without a status" });
    }
    return status;
  }

  #onEvent(event: QmpEvent): void {
    if (event.event === "BLOCK_IO_ERROR" || event.event === "GUEST_PANICKED") {
      this.#log.warn({ event: event.event, data: event.data }, "QEMU reports a fault");
    } else this.#log.debug({ event: event.event, data: event.data }, "QEMU event");
  }
}
