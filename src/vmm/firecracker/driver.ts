import { accessSync, constants, existsSync, mkdirSync, rmSync, symlinkSync } from "node:fs";
import { rm } from "node:fs/promises";
import { join } from "node:path";
import { tryCommand } from "../../lib/command.ts";
import { publishDurable } from "../../lib/durable.ts";
import { AenvError, errorChain } from "../../lib/errors.ts";
import type { Logger } from "../../lib/log.ts";
import { endProcess, hostCpu, once, settled } from "../common.ts";
import { readKernelVersion } from "../kernel.ts";
import { adoptVmm, readTail, spawnVmm, type VmmProcess } from "../process.ts";
import type {
  VmHandle,
  VmIdentity,
  VmLaunchSpec,
  VmmDriver,
  VmmProbe,
  VmReference,
  VmRestoreSpec,
} from "../types.ts";
import { FirecrackerApi } from "./api.ts";
import {
  type ApiRequest,
  bootRequests,
  checkMemoryFile,
  driveFile,
  drivePath,
  INSIDE,
  restoreRequests,
} from "./config.ts";
import { type FirecrackerVersion, parseFirecrackerVersion } from "./version.ts";

export interface FirecrackerDriverOptions {
  readonly binary: string;
  readonly kernelPath: string;
  /** Absent: read from the kernel's banner. */
  readonly kernelVersion?: string;
  readonly log: Logger;
}

const STDERR_LOG = "firecracker.stderr.log";
const SOCKET_NAME = "api.sock";
const START_TIMEOUT_MS = 10_000;
const CONSOLE_MIB = 64;
const SAVE_TIMEOUT_MS = 60_000;
/** Metadata and requests with it; Firecracker's own default is 50 KiB. */
const PAYLOAD_BYTES = 1 << 20;

/**
 * Firecracker as upstream publishes it, one process a VM, configured over its API socket. Its guest memory is
 * anonymous at a first boot and a private mapping of the memory file after a restore, so written pages are found
 * by the process's page map in both cases, as with QEMU.
 */
export function createFirecrackerDriver(options: FirecrackerDriverOptions): VmmDriver {
  return new FirecrackerDriver(options);
}

class FirecrackerDriver implements VmmDriver {
  readonly #options: FirecrackerDriverOptions;
  readonly #version: () => Promise<FirecrackerVersion>;
  readonly #identity: () => Promise<VmIdentity>;

  constructor(options: FirecrackerDriverOptions) {
    this.#options = options;
    this.#version = once(() => this.#inspect());
    this.#identity = once(async () => ({
      vmm: "firecracker",
      vmmVersion: (await this.#version()).text,
      mode: "kvm",
      cpuModel: hostCpu(),
      kernelVersion: options.kernelVersion ?? (await readKernelVersion(options.kernelPath)),
    }));
  }

  get identity(): Promise<VmIdentity> {
    return this.#identity();
  }

  async probe(): Promise<VmmProbe> {
    const version = await this.#version();
    try {
      accessSync("/dev/kvm", constants.R_OK | constants.W_OK);
    } catch (cause) {
      throw new AenvError({
        code: "kvm_unusable",
        message: "Firecracker needs /dev/kvm, which is missing or may not be opened",
        remediation: "use a host with (nested) hardware virtualization, or set vmm to qemu",
        cause,
      });
    }
    return {
      vmm: "firecracker",
      version: version.text,
      binary: this.#options.binary,
      mode: "kvm",
      reason: "hardware virtualization: /dev/kvm can be opened",
      warnings: version.warnings,
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
    return parseFirecrackerVersion(printed.stdout, binary);
  }

  async launch(spec: VmLaunchSpec): Promise<VmHandle> {
    await this.#version();
    return await this.#start(spec, bootRequests(spec), false);
  }

  async restore(spec: VmRestoreSpec): Promise<VmHandle> {
    if (!existsSync(spec.deviceStatePath)) {
      throw new AenvError({
        code: "device_state_missing",
        message: `the device state ${spec.deviceStatePath} of VM ${spec.vmId} does not exist`,
      });
    }
    return await this.#start(spec, restoreRequests(spec, await this.#version()), true);
  }

  async #start(spec: VmLaunchSpec, requests: readonly ApiRequest[], restoring: boolean): Promise<VmHandle> {
    checkMemoryFile(spec);
    await using undo = new AsyncDisposableStack();
    for (const drive of spec.drives) {
      const link = join(spec.workDir, driveFile(drive));
      rmSync(link, { force: true });
      symlinkSync(drivePath(drive), link);
    }
    const controlSocketPath = join(spec.workDir, SOCKET_NAME);
    rmSync(controlSocketPath, { force: true });
    undo.defer(() => rmSync(controlSocketPath, { force: true }));
    mkdirSync(INSIDE, { recursive: true, mode: 0o700 });
    const stderrPath = join(spec.workDir, STDERR_LOG);
    const vmm = spawnVmm({
      argv: [
        this.#options.binary,
        ...["--id", vmName(spec.vmId), "--api-sock", `${INSIDE}/${SOCKET_NAME}`],
        ...["--http-api-max-payload-size", String(PAYLOAD_BYTES), "--mmds-size-limit", String(PAYLOAD_BYTES)],
        ...["--level", "Warning"],
      ],
      netnsPath: spec.network.netnsPath,
      tapName: spec.network.tapName,
      env: { PATH: "/usr/sbin:/usr/bin:/sbin:/bin", LANG: "C.UTF-8" },
      cwd: spec.workDir,
      stdoutPath: spec.consoleLogPath,
      stderrPath,
      // The file of pages that comes with a device state has the size of the memory. The console, which grows
      // beside it, ends the VM at that limit: Firecracker takes the kernel's signal as an order to exit.
      maxFileMiB: spec.shape.memoryMiB + CONSOLE_MIB,
      bind: { from: spec.workDir, at: INSIDE },
    });
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
      ...(restoring ? {} : { anonymousMemory: true }),
    };
    const handle = new FirecrackerHandle(vmm, reference, this.#options.log);
    try {
      await handle.answers(START_TIMEOUT_MS);
      for (const { method, path, body, timeoutMs } of requests)
        await handle.api.call(method, path, body, timeoutMs);
    } catch (cause) {
      vmm.signal("SIGKILL");
      const { stderrTail } = await vmm.exited;
      const consoleTail = readTail(spec.consoleLogPath, 1024);
      const reasons = [
        errorChain(cause).join(": "),
        ...(stderrTail === "" ? [] : [`Firecracker says: ${stderrTail}`]),
        ...(consoleTail === "" ? [] : [`the console ends with: ${consoleTail}`]),
      ];
      throw new AenvError({
        code: restoring ? "vm_restore_failed" : "vm_start_failed",
        message: `VM ${spec.vmId} could not be ${restoring ? "restored" : "started"}; ${reasons.join("; ")}`,
        cause,
      });
    }
    undo.move();
    return handle;
  }

  async adopt(reference: VmReference): Promise<VmHandle | undefined> {
    const vmm = adoptVmm(reference.pid, reference.startTimeTicks, join(reference.workDir, STDERR_LOG));
    if (vmm === undefined) {
      rmSync(reference.controlSocketPath, { force: true });
      return undefined;
    }
    const handle = new FirecrackerHandle(vmm, reference, this.#options.log);
    try {
      await handle.answers(5000);
    } catch (cause) {
      if (await settled(vmm.exited, 300)) return undefined;
      throw new AenvError({
        code: "vm_unreachable",
        message: `VM ${reference.vmId} (process ${reference.pid}) runs but does not answer on its API socket`,
        remediation: `kill process ${reference.pid} to give the VM up`,
        cause,
      });
    }
    return handle;
  }
}

/** Firecracker takes letters, digits and dashes, 1 to 64 of them. */
function vmName(vmId: string): string {
  return vmId.replace(/[^A-Za-z0-9-]/g, "-").slice(0, 64) || "vm";
}

class FirecrackerHandle implements VmHandle {
  readonly reference: VmReference;
  readonly exited: VmHandle["exited"];
  readonly api: FirecrackerApi;
  readonly #process: VmmProcess;
  #gone = false;
  #killing: Promise<void> | undefined;

  constructor(process: VmmProcess, reference: VmReference, log: Logger) {
    this.reference = reference;
    this.#process = process;
    this.api = new FirecrackerApi(reference.controlSocketPath, reference.vmId);
    this.exited = process.exited.then((exit) => {
      this.#gone = true;
      rmSync(reference.controlSocketPath, { force: true });
      const { exitCode, signal } = exit;
      log.info({ vmId: reference.vmId, pid: reference.pid, exitCode, signal }, "VM process ended");
      return exit;
    });
  }

  /** Resolves when the API answers. */
  async answers(timeoutMs: number): Promise<void> {
    const deadline = performance.now() + timeoutMs;
    let lastError: unknown;
    while (!this.#gone && performance.now() < deadline) {
      if (existsSync(this.reference.controlSocketPath)) {
        try {
          await this.api.call("GET", "/version", undefined, Math.max(1, deadline - performance.now()));
          return;
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
        : `VM ${this.reference.vmId} did not answer on its API socket within ${timeoutMs} ms`,
      cause: lastError,
    });
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
    await this.api.call("PATCH", "/vm", { state: "Paused" });
  }

  async resume(): Promise<void> {
    this.#usable();
    await this.api.call("PATCH", "/vm", { state: "Resumed" });
  }

  /**
   * Upstream saves device state and memory together: the pages go to a sparse file that is dropped, ours are
   * taken from the process.
   */
  async saveDeviceState(path: string): Promise<void> {
    this.#usable();
    const temporary = `${path}.tmp`;
    const pages = `${path}.pages`;
    try {
      await this.api.call(
        "PUT",
        "/snapshot/create",
        { snapshot_type: "Diff", snapshot_path: temporary, mem_file_path: pages },
        SAVE_TIMEOUT_MS,
      );
      await rm(pages, { force: true });
      await publishDurable(temporary, path);
    } catch (cause) {
      await Promise.all([rm(temporary, { force: true }), rm(pages, { force: true })]);
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
    this.#killing ??= endProcess(this.#process, this.exited, this.#gone ? 0 : graceMs);
    await this.#killing;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
  }
}
