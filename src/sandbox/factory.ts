import { mkdir, readdir } from "node:fs/promises";
import { join } from "node:path";
import { makeDirDurable, removeTree, syncPath, writeDurable } from "../lib/durable.ts";
import { AenvError, assert, errorChain } from "../lib/errors.ts";
import type { Logger } from "../lib/log.ts";
import type { MemoryImage, MemoryLease, MemoryService } from "../memory/types.ts";
import type { NetworkService, NetworkSlot } from "../network/types.ts";
import type { BlockClient, DeviceInfo } from "../storage/blockd/protocol.ts";
import type { LayerRef, UpperRef } from "../storage/overlaybd/types.ts";
import { identityMismatch } from "../vmm/index.ts";
import type {
  VmDrive,
  VmExit,
  VmHandle,
  VmIdentity,
  VmLaunchSpec,
  VmmDriver,
  VmShape,
} from "../vmm/types.ts";
import { createAgentClient, parseAgentAddress, waitHealthy } from "./agent.ts";
import { compactPrivateLayers, linkPrivateLayers, privateLayerName } from "./layers.ts";
import {
  findVmmProcesses,
  killProcess,
  type LiveRecord,
  listSandboxDirs,
  processStartTicks,
  readLive,
  writeLive,
} from "./live.ts";
import type {
  AgentClient,
  BootSpec,
  CapturedState,
  GuestIdentity,
  PhaseTimings,
  ResumeSpec,
  RunningSandbox,
  SandboxFactory,
} from "./types.ts";

export interface SandboxFactoryOptions {
  readonly vmm: VmmDriver;
  readonly memory: MemoryService;
  readonly network: NetworkService;
  readonly blockClient: BlockClient;
  readonly kernelPath: string;
  readonly initrdPath: string;
  /** Work directories `<id>/<generation>/` of running sandboxes; same file system as the artifacts. */
  readonly rootDir: string;
  /** Short-lived files with short paths: the VMM's sockets. */
  readonly runtimeDir: string;
  /** Bound on the wait for the agent after the VM was started. */
  readonly initTimeoutMs: number;
  /** Pause between two probes of the agent. */
  readonly pollMs: number;
  readonly log: Logger;
  /** Port of the agent behind a slot's host address. Default: the guest port; tests differ. */
  readonly agentPort?: number;
}

const DEVICE_PREFIX = "sbx-";
const ROOT_DRIVE_ID = "rootfs";
const KILL_GRACE_MS = 2000;

/** Words for the guest kernel and our init; the same for a boot and every restore of what it became. */
export function kernelArguments(slot: NetworkSlot, extra: readonly string[]): string[] {
  return [
    "console=ttyS0",
    "quiet",
    "loglevel=3",
    "panic=-1",
    "reboot=t",
    "mitigations=off",
    "aenv.root=/dev/vda",
    `aenv.ip=${slot.guestAddress}/${slot.prefixLength},${slot.gatewayAddress}`,
    `aenv.dns=${slot.dnsServer}`,
    // Not the sandbox's id: what boots here may be snapshotted and become many; the agent sets the name.
    "aenv.hostname=sandbox",
    ...extra,
  ];
}

/** Error 409 `virtualization_mismatch` unless the state was made by the VMM that would restore it. */
export function assertSameVmm(made: VmIdentity, here: VmIdentity): void {
  const difference = identityMismatch(made, here);
  if (difference === undefined) return;
  throw new AenvError({
    code: "virtualization_mismatch",
    status: 409,
    message: `the state cannot be resumed under ${here.vmm} ${here.vmmVersion} in mode ${here.mode}: ${difference}`,
    remediation: "use the VMM and mode it was made with, or build the template again on this node",
  });
}

/** Measures phases; a phase that runs twice adds up. */
class Stopwatch {
  readonly #phases: Record<string, number> = {};
  readonly #start = performance.now();

  async measure<T>(phase: string, work: () => Promise<T>): Promise<T> {
    const start = performance.now();
    try {
      return await work();
    } finally {
      this.#phases[phase] = (this.#phases[phase] ?? 0) + performance.now() - start;
    }
  }

  timings(): PhaseTimings {
    const round = (ms: number): number => Math.round(ms * 100) / 100;
    const phases = Object.fromEntries(Object.entries(this.#phases).map(([name, ms]) => [name, round(ms)]));
    return { ...phases, total: round(performance.now() - this.#start) };
  }
}

/** Runs all to their end, then fails with the first failure: nobody acquires anything after the return. */
async function settleAll<T extends readonly unknown[]>(tasks: { [K in keyof T]: Promise<T[K]> }): Promise<T> {
  const results = await Promise.allSettled(tasks);
  const failed = results.find((result) => result.status === "rejected");
  if (failed !== undefined) throw failed.reason;
  return results.map((result) => (result as PromiseFulfilledResult<unknown>).value) as unknown as T;
}

function rootDrive(device: DeviceInfo): VmDrive {
  if (device.exportKind === "nbd") {
    assert(
      device.socketPath !== undefined && device.exportName !== undefined,
      "an nbd device has socket and name",
    );
    const backend = { kind: "nbd" as const, socketPath: device.socketPath, exportName: device.exportName };
    return { driveId: ROOT_DRIVE_ID, readOnly: device.readOnly, backend };
  }
  assert(device.devicePath !== undefined, "a ublk device has a path");
  return {
    driveId: ROOT_DRIVE_ID,
    readOnly: device.readOnly,
    backend: { kind: "block", devicePath: device.devicePath },
  };
}

function upperRef(dir: string, number: number): UpperRef {
  return {
    data: join(dir, `upper-${number}.data`),
    index: join(dir, `upper-${number}.index`),
    mode: "logStructured",
  };
}

interface StartSpec {
  readonly identity: GuestIdentity;
  readonly shape: VmShape;
  readonly rootfs: { readonly lowers: readonly LayerRef[]; readonly virtualSizeBytes: number };
  readonly memory: MemoryImage;
  readonly extraBootArgs: readonly string[];
  readonly deviceStatePath?: string;
}

class Factory implements SandboxFactory {
  readonly #options: SandboxFactoryOptions;
  readonly #active = new Set<string>();

  constructor(options: SandboxFactoryOptions) {
    this.#options = options;
  }

  async boot(spec: BootSpec): Promise<RunningSandbox> {
    return this.#start({
      identity: spec.identity,
      shape: spec.shape,
      rootfs: spec.rootfs,
      memory: { sizeBytes: spec.shape.memoryMiB * 1024 * 1024, layers: [] },
      extraBootArgs: spec.extraBootArgs ?? [],
    });
  }

  async resume(spec: ResumeSpec): Promise<RunningSandbox> {
    const { state } = spec;
    assertSameVmm(state.vm, await this.#options.vmm.identity);
    return this.#start({
      identity: spec.identity,
      shape: state.shape,
      rootfs: state.rootfs,
      memory: state.memory,
      extraBootArgs: [],
      deviceStatePath: state.deviceStatePath,
    });
  }

  async #start(spec: StartSpec): Promise<RunningSandbox> {
    const { vmm, memory, network, blockClient, rootDir, runtimeDir, log } = this.#options;
    const { sandboxId } = spec.identity;
    const generation = crypto.randomUUID().slice(0, 8);
    const watch = new Stopwatch();
    if (this.#active.has(sandboxId)) {
      throw new AenvError({
        code: "sandbox_state_conflict",
        status: 409,
        message: `sandbox ${sandboxId} runs already`,
      });
    }
    this.#active.add(sandboxId);
    await using stack = new AsyncDisposableStack();
    stack.defer(() => void this.#active.delete(sandboxId));

    const sandboxDir = join(rootDir, sandboxId);
    const workDir = join(sandboxDir, generation);
    const layerDir = join(workDir, "layers");
    const vmDir = join(runtimeDir, "vm", `${sandboxId}-${generation}`);
    const deviceId = `${DEVICE_PREFIX}${sandboxId}-${generation}`;
    stack.defer(() => removeTree(sandboxDir));
    await mkdir(layerDir, { recursive: true, mode: 0o700 });
    stack.defer(() => removeTree(vmDir));
    await mkdir(vmDir, { recursive: true, mode: 0o700 });
    const live: LiveRecord = {
      version: 1,
      sandboxId,
      generation,
      deviceId,
      startedAt: new Date().toISOString(),
    };
    await writeLive(rootDir, live);

    // The sandbox holds links of its own to what it runs on: the state it came from may be removed.
    const [lowers, memoryLayers] = await watch.measure("layers", async () => [
      await linkPrivateLayers(spec.rootfs.lowers, layerDir),
      await linkPrivateLayers(spec.memory.layers, layerDir),
    ]);
    const memoryImage: MemoryImage = { sizeBytes: spec.memory.sizeBytes, layers: memoryLayers };

    const [slot, device, lease] = await settleAll<[NetworkSlot, DeviceInfo, MemoryLease]>([
      watch.measure("slot", async () => stack.use(await network.acquire())),
      watch.measure("device", async () => {
        // Registered first: a create whose answer got lost may still have made the device.
        stack.defer(() => blockClient.release(deviceId));
        return blockClient.create({
          deviceId,
          image: { lowers, upper: upperRef(workDir, 0), virtualSizeBytes: spec.rootfs.virtualSizeBytes },
          readOnly: false,
          exportKind: "nbd",
        });
      }),
      watch.measure("memory", async () => stack.use(await memory.materialize(memoryImage))),
    ]);
    await writeLive(rootDir, { ...live, slotIndex: slot.index });

    const launch: VmLaunchSpec = {
      vmId: sandboxId,
      workDir: vmDir,
      shape: spec.shape,
      kernelPath: this.#options.kernelPath,
      initrdPath: this.#options.initrdPath,
      kernelArgs: kernelArguments(slot, spec.extraBootArgs),
      drives: [rootDrive(device)],
      network: { netnsPath: slot.netnsPath, tapName: slot.tapName, macAddress: slot.macAddress },
      memoryFile: lease.file,
      consoleLogPath: join(workDir, "console.log"),
    };
    const vm = await watch.measure("vmm", async () =>
      stack.use(
        spec.deviceStatePath === undefined
          ? await vmm.launch(launch)
          : await vmm.restore({ ...launch, deviceStatePath: spec.deviceStatePath }),
      ),
    );
    await writeLive(rootDir, { ...live, slotIndex: slot.index, vm: vm.reference });

    const agentAddress =
      this.#options.agentPort === undefined
        ? slot.hostAddress
        : `${slot.hostAddress}:${this.#options.agentPort}`;
    const agent = createAgentClient(agentAddress, spec.identity.accessToken);
    const died = new AbortController();
    vm.exited.then((exit) => died.abort(vmDied(sandboxId, exit)));
    await watch.measure("agent", () =>
      waitHealthy(
        parseAgentAddress(agentAddress),
        this.#options.initTimeoutMs,
        this.#options.pollMs,
        died.signal,
      ),
    );
    const envdVersion = await watch.measure("init", () => agent.init(spec.identity));
    died.signal.throwIfAborted();

    const timings = watch.timings();
    log.info(
      { sandboxId, generation, timings, resumed: spec.deviceStatePath !== undefined },
      "sandbox started",
    );
    return new Running({
      factory: this.#options,
      spec,
      vm,
      agentAddress,
      slot,
      device,
      memoryImage,
      envdVersion,
      timings,
      workDir,
      layerDir,
      resources: stack.move(),
    });
  }

  async cleanUp(): Promise<{ vms: number; devices: number; workDirs: number }> {
    const { rootDir, runtimeDir, blockClient, log } = this.#options;
    let vms = 0;
    let devices = 0;
    let workDirs = 0;
    const vmRoot = join(runtimeDir, "vm");
    const leftovers = (await listSandboxDirs(rootDir)).filter((id) => !this.#active.has(id));
    const vmDirs = (await listNames(vmRoot)).filter((name) => !this.#active.has(name.slice(0, 36)));

    const orphans = new Map<number, string>();
    for (const id of leftovers) {
      const live = await readLive(rootDir, id, log);
      if (live?.vm !== undefined) orphans.set(live.vm.pid, live.vm.startTimeTicks);
    }
    const dirs = [...leftovers.map((id) => join(rootDir, id)), ...vmDirs.map((name) => join(vmRoot, name))];
    if (dirs.length > 0) {
      for (const { pid, startTimeTicks } of findVmmProcesses(dirs)) orphans.set(pid, startTimeTicks);
    }
    for (const [pid, ticks] of orphans) {
      if (processStartTicks(pid) !== ticks) continue;
      if (await killProcess(pid, ticks)) vms += 1;
      else log.error({ pid }, "an orphaned VM does not end");
    }
    for (const device of await blockClient.list()) {
      const id = device.deviceId.slice(DEVICE_PREFIX.length, DEVICE_PREFIX.length + 36);
      if (!device.deviceId.startsWith(DEVICE_PREFIX) || this.#active.has(id)) continue;
      await blockClient.release(device.deviceId);
      devices += 1;
    }
    for (const dir of dirs) {
      await removeTree(dir);
      workDirs += 1;
    }
    if (vms + devices + workDirs > 0)
      log.info({ vms, devices, workDirs }, "leftovers of an earlier process removed");
    return { vms, devices, workDirs };
  }
}

async function listNames(dir: string): Promise<string[]> {
  try {
    return await readdir(dir);
  } catch (error) {
    if (error instanceof Error && "code" in error && error.code === "ENOENT") return [];
    throw error;
  }
}

function vmDied(sandboxId: string, exit: VmExit): AenvError {
  const how = exit.signal === null ? `exit code ${exit.exitCode}` : `signal ${exit.signal}`;
  const said = exit.stderrTail.trim();
  return new AenvError({
    code: "vm_died",
    message: `the VM of sandbox ${sandboxId} ended (${how})${said === "" ? "" : `: ${said.slice(-1000)}`}`,
  });
}

interface RunningParts {
  readonly factory: SandboxFactoryOptions;
  readonly spec: StartSpec;
  readonly vm: VmHandle;
  readonly agentAddress: string;
  readonly slot: NetworkSlot;
  readonly device: DeviceInfo;
  /** What the VM's memory file holds. A capture is always relative to it: the mapping does not change. */
  readonly memoryImage: MemoryImage;
  readonly envdVersion: string;
  readonly timings: PhaseTimings;
  readonly workDir: string;
  readonly layerDir: string;
  readonly resources: AsyncDisposableStack;
}

class Running implements RunningSandbox {
  readonly #parts: RunningParts;
  #envdVersion: string;
  #uppers = 1;
  #stopping: Promise<void> | undefined;
  #released = false;

  constructor(parts: RunningParts) {
    this.#parts = parts;
    this.#envdVersion = parts.envdVersion;
  }

  get sandboxId(): string {
    return this.#parts.spec.identity.sandboxId;
  }
  get hostAddress(): string {
    return this.#parts.agentAddress;
  }
  get envdVersion(): string {
    return this.#envdVersion;
  }
  get shape(): VmShape {
    return this.#parts.spec.shape;
  }
  get diskSizeBytes(): number {
    return this.#parts.device.virtualSizeBytes;
  }
  get vm(): VmHandle["reference"] {
    return this.#parts.vm.reference;
  }
  get exited(): Promise<VmExit> {
    return this.#parts.vm.exited;
  }
  get timings(): PhaseTimings {
    return this.#parts.timings;
  }

  async capture(dir: string): Promise<{ state: CapturedState; timings: PhaseTimings }> {
    const { vm, factory } = this.#parts;
    const watch = new Stopwatch();
    let paused = false;
    try {
      await makeDirDurable(dir);
      await watch.measure("vmm_pause", () => vm.pause());
      paused = true;
      const state = await this.#capturePaused(dir, watch);
      return { state, timings: watch.timings() };
    } catch (error) {
      await removeTree(dir).catch((cleanup: unknown) =>
        factory.log.warn({ err: cleanup, dir }, "an incomplete capture could not be removed"),
      );
      throw await this.#recover(error, paused);
    }
  }

  /** Puts a half-paused VM back to work; the error to throw says whether that succeeded. */
  async #recover(error: unknown, paused: boolean): Promise<unknown> {
    const terminal = (cause: unknown, why: string): AenvError =>
      new AenvError({
        code: "capture_terminal",
        message: `sandbox ${this.sandboxId} could not be captured and cannot go on: ${why}`,
        cause,
      });
    if (isTerminal(error)) return terminal(error, errorChain(error).join(": "));
    try {
      // Also when the pause itself failed: it may have stopped the vCPUs before its answer got lost.
      await this.#parts.vm.resume();
    } catch (resumeError) {
      if (!paused)
        this.#parts.factory.log.error({ err: resumeError }, "VM does not answer after a failed pause");
      return terminal(error, `it does not run again (${errorChain(resumeError).join(": ")})`);
    }
    return error;
  }

  async #capturePaused(dir: string, watch: Stopwatch): Promise<CapturedState> {
    const { vm, factory, memoryImage, device, spec } = this.#parts;
    const deviceStatePath = join(dir, "device.state");
    await watch.measure("device_state", async () => {
      await vm.saveDeviceState(deviceStatePath);
      await syncPath(deviceStatePath);
    });
    const [memoryLayer, diskLowers] = await settleAll<[LayerRef | undefined, readonly LayerRef[]]>([
      watch.measure("memory_capture", async () => {
        const path = join(dir, privateLayerName("memory"));
        return (await factory.memory.capture(vm.reference, memoryImage, path)).newLayer;
      }),
      watch.measure("disk_seal", () => this.#sealDisk()),
    ]);
    return watch.measure("commit", async () => {
      const memoryLayers = await linkPrivateLayers(memoryImage.layers, dir);
      if (memoryLayer !== undefined) {
        const { digest: _, ...ref } = memoryLayer;
        memoryLayers.push(ref);
      }
      const lowers = await linkPrivateLayers(diskLowers, dir);
      const memory = await compactPrivateLayers(memoryLayers, dir, "memory");
      const disk = await compactPrivateLayers(lowers, dir, "disk");
      for (const layer of [...memory.replaced, ...disk.replaced]) await removeTree(layer.file);
      const state: CapturedState = {
        version: 1,
        vm: await factory.vmm.identity,
        shape: spec.shape,
        deviceStatePath,
        memory: { sizeBytes: memoryImage.sizeBytes, layers: memory.layers },
        rootfs: { lowers: disk.layers, virtualSizeBytes: device.virtualSizeBytes },
        envdVersion: this.#envdVersion,
      };
      // Last: a directory with this file is complete, and it syncs the names of all the others.
      await writeDurable(join(dir, "state.json"), `${JSON.stringify(state, null, 2)}\n`);
      return state;
    });
  }

  /**
   * Seals the live upper into a layer of the sandbox's own directory and continues on a fresh one; the
   * captured state gets a link. So a capture that fails after this point has not harmed the sandbox.
   */
  async #sealDisk(): Promise<readonly LayerRef[]> {
    const { factory, device, layerDir, workDir } = this.#parts;
    const { blockClient, log } = factory;
    const sealedPath = join(layerDir, privateLayerName("disk"));
    await blockClient.flush(device.deviceId);
    try {
      await blockClient.restack(device.deviceId, sealedPath, upperRef(workDir, this.#uppers++));
    } catch (error) {
      if (isTerminal(error)) throw error;
      // The answer may be what got lost: the daemon's table knows what happened.
      const now = await blockClient.get(device.deviceId);
      if (now?.image.lowers.at(-1)?.file !== sealedPath) throw error;
      log.warn({ err: error, deviceId: device.deviceId }, "restack reported an error but was done");
    }
    const info = await blockClient.get(device.deviceId);
    assert(info !== undefined, `block device ${device.deviceId} of a running sandbox exists`);
    assert(info.image.lowers.at(-1)?.file === sealedPath, "the sealed upper is the topmost lower");
    return info.image.lowers;
  }

  async resumeInPlace(): Promise<void> {
    await this.#parts.vm.resume();
  }

  async reinit(identity: GuestIdentity): Promise<void> {
    const agent: AgentClient = createAgentClient(this.#parts.agentAddress, identity.accessToken);
    this.#envdVersion = await agent.init(identity);
  }

  stop(): Promise<void> {
    this.#stopping ??= this.#stop().finally(() => {
      // A failed stop may be tried again.
      if (!this.#released) this.#stopping = undefined;
    });
    return this.#stopping;
  }

  async #stop(): Promise<void> {
    const { vm, resources, factory } = this.#parts;
    await vm.kill(KILL_GRACE_MS);
    this.#released = true;
    try {
      await resources.disposeAsync();
    } catch (error) {
      // The VM is gone, so the sandbox is. What could not be released is found by the next clean-up.
      factory.log.error(
        { err: error, sandboxId: this.sandboxId },
        "not everything of a sandbox could be released",
      );
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
  }
}

/** The block daemon could neither finish nor undo a restack: the device is of no use any more. */
function isTerminal(error: unknown): boolean {
  return (
    error instanceof AenvError && (error.code === "restack_terminal" || error.code === "capture_terminal")
  );
}

export function createSandboxFactory(options: SandboxFactoryOptions): SandboxFactory {
  return new Factory(options);
}
