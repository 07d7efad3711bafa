import { createHash } from "node:crypto";
import { mkdir, readdir, statfs } from "node:fs/promises";
import { join } from "node:path";
import { errorCode, makeDirDurable, removeTree, syncPath, writeDurable } from "../lib/durable.ts";
import { AenvError, assert, errorChain } from "../lib/errors.ts";
import type { Logger } from "../lib/log.ts";
import type { MemoryImage, MemoryLease, MemoryService } from "../memory/types.ts";
import type { EgressPolicy } from "../network/index.ts";
import type { KeptSlot, NetworkService, NetworkSlot, SlotPolicyReport } from "../network/types.ts";
import type { BlockClient, DeviceInfo, DeviceSpec, ExportKind } from "../storage/blockd/protocol.ts";
import type { LayerRef, UpperRef } from "../storage/overlaybd/types.ts";
import { checkDriveCount, identityMismatch } from "../vmm/index.ts";
import type {
  DriveRateLimit,
  PreparedVm,
  VmDrive,
  VmExit,
  VmHandle,
  VmIdentity,
  VmLaunchSpec,
  VmmDriver,
  VmShape,
} from "../vmm/types.ts";
import {
  createAgentClient,
  freezeDisks,
  haltGuest,
  parseAgentAddress,
  probeHealth,
  requireFrozen,
  thawDisks,
  waitHealthy,
} from "./agent.ts";
import {
  createLayerMerger,
  type LayerMerger,
  layerSizes,
  MAX_CHAIN,
  planCompaction,
  Substitutes,
} from "./compaction.ts";
import { sumDeviceState, verifyDeviceState } from "./device-state.ts";
import { isPrivate, linkPrivateLayers, privateLayerName } from "./layers.ts";
import {
  findVmmProcesses,
  isProcess,
  killProcess,
  type LiveDrive,
  type LiveRecord,
  listSandboxDirs,
  processStartTicks,
  readLive,
  writeLive,
} from "./live.ts";
import {
  type AttachedDrive,
  type BootPlan,
  type BootSpec,
  type Capture,
  type CapturedDisks,
  type CapturedState,
  DISKS_VERSION,
  type DiskCapture,
  type DiskImage,
  type GuestIdentity,
  type PhaseTimings,
  type ResumeSpec,
  type RunningSandbox,
  type SandboxFactory,
  stateVersion,
} from "./types.ts";
import type { VmPool } from "./vm-pool.ts";

export interface SandboxFactoryOptions {
  readonly vmm: VmmDriver;
  /** Processes that wait for their VMs. Absent: each is started with its sandbox. */
  readonly warm?: VmPool;
  readonly memory: MemoryService;
  readonly network: NetworkService;
  readonly blockClient: BlockClient;
  /** How disks reach the VM; asked for each that is made. Absent: over NBD. */
  readonly exportKind?: () => Promise<ExportKind>;
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
  /**
   * Command line of the `merge-layers` program (see createLayerMerger), which keeps the chains of running
   * sandboxes short. Absent: chains grow with every capture.
   */
  readonly mergeCommand?: readonly string[];
  /** Lowers under a live disk from which on they are replaced by merged ones. Default 128; tests differ. */
  readonly maxLiveLowers?: number;
  /** For the root disk of every VM from its next start or resume on. Absent: none. */
  readonly diskRateLimit?: DriveRateLimit;
  /** Between SIGTERM and SIGKILL when a VM is ended, milliseconds. Default 2000. */
  readonly killGraceMs?: number;
  readonly log: Logger;
  /** Port of the agent behind a slot's host address. Default: the guest port; tests differ. */
  readonly agentPort?: number;
}

const DEVICE_PREFIX = "sbx-";
const ROOT_DRIVE_ID = "rootfs";
const KILL_GRACE_MS = 2000;
/** The least a capture takes. With less the VMM would fail, and not say why. */
const MIN_FREE_BYTES = 1 << 20;
/** Every checkpoint adds a lower; the format ends at 255. */
const MAX_LIVE_LOWERS = 128;
/** How long the adoption of a sandbox waits for its agent; one that is slower is told later. */
const ADOPTION_INIT_MS = 1000;
/** With the waits below under a minute, which is what others wait for a pause. Writing out may take a while. */
const FREEZE_MS = 20_000;
/** Far below the time after which a guest goes on by itself. */
const FROZEN_MAX_MS = 10_000;
const THAW_MS = 5000;
/** A guest's processes have two seconds for an orderly end, and five after SIGKILL. */
const HALT_MS = 15_000;
/** What the guest's init says at the end of an orderly shutdown. */
const LEFT_CLEAN = "aenv: init: file systems left clean";
const CONSOLE_LOG = "console.log";

/** What a guest can read of itself where the VMM has a metadata service. The token is there by its hash alone. */
export function guestMetadata(identity: GuestIdentity): Record<string, string> {
  return {
    instanceID: identity.sandboxId,
    envID: identity.templateId,
    address: "",
    accessTokenHash: createHash("sha512")
      .update(identity.accessToken ?? "")
      .digest("hex"),
  };
}

/**
 * What the guest's init mounts, parents before what lies in them: `vdb:ro:/mnt/data[:sub/path],vdc:rw:/srv`. The
 * root disk is `vda`.
 */
function driveWords(drives: BootPlan["drives"]): string[] {
  if (drives.length === 0) return [];
  const mounts = drives.map(({ readOnly, mountPath, subPath }, index) => {
    const device = `vd${String.fromCharCode("b".charCodeAt(0) + index)}`;
    const words = [device, readOnly ? "ro" : "rw", mountPath, ...(subPath === undefined ? [] : [subPath])];
    return { mountPath, words: words.join(":") };
  });
  mounts.sort((a, b) => a.mountPath.length - b.mountPath.length);
  return [`aenv.drives=${mounts.map(({ words }) => words).join(",")}`];
}

type SlotAddresses = Pick<NetworkSlot, "guestAddress" | "prefixLength" | "gatewayAddress" | "dnsServer">;

/** No slot's addresses are longer. */
const LONGEST_SLOT: SlotAddresses = {
  guestAddress: "255.255.255.255",
  prefixLength: 32,
  gatewayAddress: "255.255.255.255",
  dnsServer: "255.255.255.255",
};

/** Words for the guest kernel and our init; the same for a boot and every restore of what it became. */
export function kernelArguments(
  slot: SlotAddresses,
  extra: readonly string[],
  drives: BootPlan["drives"] = [],
): string[] {
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
    ...driveWords(drives),
    ...extra,
  ];
}

/**
 * What our init compares the timer's measured rate with, where the true one is known: QEMU's emulated local APIC counts
 * nanoseconds, of which Linux takes every 16th (QEMU's hw/intc/apic_common.c, Linux's arch/x86/kernel/apic/apic.c).
 */
const EMULATED_TIMER_HZ = 1_000_000_000 / 16;

/** A busy host has the kernel measure wrongly in up to every third boot; the last one is taken as it is. */
const BOOT_ATTEMPTS = 4;

function timerWord({ mode }: VmIdentity, attempt = 1): string[] {
  if (mode !== "tcg" || process.arch !== "x64") return [];
  return [`aenv.timer_hz=${attempt < BOOT_ATTEMPTS ? EMULATED_TIMER_HZ : 0}`];
}

/** Error 409 `virtualization_mismatch` unless the state was made by the VMM that would restore it. */
export function assertSameVmm(made: VmIdentity, here: VmIdentity): void {
  const difference = identityMismatch(made, here);
  if (difference === undefined) return;
  throw new AenvError({
    code: "virtualization_mismatch",
    status: 409,
    message: `the state cannot be resumed under ${here.vmm} ${here.vmmVersion} in mode ${here.mode}: ${difference}`,
    remediation:
      "use it on a host with the CPU, VMM and mode it was made with; a template can be built again on this node",
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

/** A device as the VM gets it; the id is the same over save and restore. */
function vmDrive(driveId: string, device: DeviceInfo): VmDrive {
  if (device.exportKind === "nbd") {
    assert(
      device.socketPath !== undefined && device.exportName !== undefined,
      "an nbd device has socket and name",
    );
    const backend = { kind: "nbd" as const, socketPath: device.socketPath, exportName: device.exportName };
    return { driveId, readOnly: device.readOnly, backend };
  }
  assert(device.devicePath !== undefined, "a ublk device has a path");
  return {
    driveId,
    readOnly: device.readOnly,
    backend: { kind: "block", devicePath: device.devicePath },
  };
}

/** Names are never used twice, whichever process gives them. */
function freshUpper(dir: string): UpperRef {
  const stem = join(dir, `upper-${Bun.randomUUIDv7()}`);
  return { data: `${stem}.data`, index: `${stem}.index`, mode: "logStructured" };
}

interface StartSpec {
  readonly identity: GuestIdentity;
  readonly shape: VmShape;
  readonly rootfs: DiskImage;
  readonly drives: readonly AttachedDrive[];
  readonly memory: MemoryImage;
  readonly extraBootArgs: readonly string[];
  readonly deviceStatePath?: string;
  readonly egress?: EgressPolicy;
}

class Factory implements SandboxFactory {
  readonly #options: SandboxFactoryOptions;
  readonly #merge: LayerMerger | undefined;
  readonly #active = new Set<string>();
  /** Slots of an earlier process that the network service kept and nobody has adopted yet, by sandbox. */
  readonly #kept = new Map<string, number>();

  constructor(options: SandboxFactoryOptions) {
    this.#options = options;
    this.#merge = options.mergeCommand === undefined ? undefined : createLayerMerger(options.mergeCommand);
  }

  async checkBoot({ drives, extraBootArgs }: BootPlan): Promise<void> {
    const { vmm } = this.#options;
    checkDriveCount(1 + drives.length, vmm.maxDrives);
    const words = [...timerWord(await vmm.identity), ...extraBootArgs];
    await vmm.checkKernelArgs(kernelArguments(LONGEST_SLOT, words, drives));
  }

  async boot(spec: BootSpec): Promise<RunningSandbox> {
    const identity = await this.#options.vmm.identity;
    for (let attempt = 1; ; attempt += 1) {
      try {
        return await this.#start({
          identity: spec.identity,
          shape: spec.shape,
          rootfs: spec.rootfs,
          drives: spec.drives ?? [],
          memory: { sizeBytes: spec.shape.memoryMiB * 1024 * 1024, layers: [] },
          extraBootArgs: [...timerWord(identity, attempt), ...(spec.extraBootArgs ?? [])],
          ...(spec.egress === undefined ? {} : { egress: spec.egress }),
        });
      } catch (error) {
        if (attempt >= BOOT_ATTEMPTS || !(error instanceof AenvError && error.code === TIMER_WRONG))
          throw error;
        const { sandboxId } = spec.identity;
        this.#options.log.warn(
          { err: error, sandboxId, attempt },
          "the guest's kernel measured its timer wrongly, as happens on a busy host without KVM; it is booted again",
        );
      }
    }
  }

  async resume(spec: ResumeSpec): Promise<RunningSandbox> {
    const { state } = spec;
    assertSameVmm(state.vm, await this.#options.vmm.identity);
    await verifyDeviceState(state.deviceStatePath, state.deviceStateSum);
    return this.#start({
      identity: spec.identity,
      shape: state.shape,
      rootfs: state.rootfs,
      drives: state.drives ?? [],
      memory: state.memory,
      extraBootArgs: [],
      deviceStatePath: state.deviceStatePath,
      ...(spec.egress === undefined ? {} : { egress: spec.egress }),
    });
  }

  async #start(spec: StartSpec): Promise<RunningSandbox> {
    const { vmm, memory, network, blockClient, rootDir, log } = this.#options;
    const { sandboxId } = spec.identity;
    const generation = crypto.randomUUID().slice(0, 8);
    const watch = new Stopwatch();
    await using stack = this.#claim(sandboxId);

    const { sandboxDir, workDir, layerDir, vmDir } = this.#dirs(sandboxId, generation);
    const deviceId = `${DEVICE_PREFIX}${sandboxId}-${generation}`;
    const liveDrives = spec.drives.map(({ lowers: _, virtualSizeBytes: __, ...drive }, index): LiveDrive => {
      return { ...drive, deviceId: `${deviceId}-drive${index + 1}` };
    });
    stack.defer(() => removeTree(sandboxDir));
    await mkdir(layerDir, { recursive: true, mode: 0o700 });
    stack.defer(() => removeTree(vmDir));
    await mkdir(vmDir, { recursive: true, mode: 0o700 });
    let live: LiveRecord = {
      version: 2,
      sandboxId,
      generation,
      deviceId,
      lifecycleId: crypto.randomUUID(),
      startedAt: new Date().toISOString(),
      ...(liveDrives.length === 0 ? {} : { drives: liveDrives }),
    };
    await writeLive(rootDir, live);

    // The sandbox holds links of its own to what it runs on: the state it came from may be removed.
    const disks: DiskImage[] = [];
    let memoryImage = spec.memory;
    await watch.measure("layers", async () => {
      for (const disk of [spec.rootfs, ...spec.drives]) {
        disks.push({ ...disk, lowers: await linkPrivateLayers(disk.lowers, layerDir) });
      }
      memoryImage = { ...spec.memory, layers: await linkPrivateLayers(spec.memory.layers, layerDir) };
    });

    let prepared: PreparedVm | undefined;
    const [slot, devices, lease] = await settleAll<[NetworkSlot, DeviceInfo[], MemoryLease]>([
      watch.measure("slot", async () => {
        const warm = await this.#options.warm?.take();
        if (warm === undefined) return stack.use(await network.acquire(spec.egress));
        stack.use(warm.slot);
        prepared = stack.use(warm.vm);
        if (spec.egress !== undefined) await warm.slot.applyPolicy(spec.egress);
        return warm.slot;
      }),
      watch.measure("device", async () => {
        const made: DeviceInfo[] = [];
        for (const [index, { lowers, virtualSizeBytes }] of disks.entries()) {
          const drive = liveDrives[index - 1];
          const id = drive?.deviceId ?? deviceId;
          const readOnly = drive?.readOnly ?? false;
          // Registered first: a create whose answer got lost may still have made the device.
          stack.defer(() => blockClient.release(id));
          made.push(
            await blockClient.create({
              deviceId: id,
              image: { lowers, virtualSizeBytes, ...(readOnly ? {} : { upper: freshUpper(workDir) }) },
              readOnly,
              exportKind: (await this.#options.exportKind?.()) ?? "nbd",
            }),
          );
        }
        return made;
      }),
      watch.measure("memory", async () => stack.use(await memory.materialize(memoryImage))),
    ]);
    live = { ...live, slotIndex: slot.index, policy: slot.policy };
    await writeLive(rootDir, live);

    const launch: VmLaunchSpec = {
      vmId: sandboxId,
      workDir: vmDir,
      shape: spec.shape,
      kernelPath: this.#options.kernelPath,
      initrdPath: this.#options.initrdPath,
      kernelArgs: kernelArguments(slot, spec.extraBootArgs, spec.drives),
      drives: devices.map((device, index) => ({
        ...vmDrive(index === 0 ? ROOT_DRIVE_ID : `drive${index}`, device),
        ...(index > 0 || this.#options.diskRateLimit === undefined
          ? {}
          : { rateLimit: this.#options.diskRateLimit }),
      })),
      network: { netnsPath: slot.netnsPath, tapName: slot.tapName, macAddress: slot.macAddress },
      memoryFile: lease.file,
      consoleLogPath: join(workDir, CONSOLE_LOG),
      metadata: guestMetadata(spec.identity),
      ...(prepared === undefined ? {} : { prepared }),
    };
    const vm = await watch.measure("vmm", async () =>
      stack.use(
        spec.deviceStatePath === undefined
          ? await vmm.launch(launch)
          : await vmm.restore({ ...launch, deviceStatePath: spec.deviceStatePath }),
      ),
    );
    live = { ...live, vm: vm.reference };
    await writeLive(rootDir, live);

    const agentAddress = this.#agentAddress(slot);
    const agent = createAgentClient(agentAddress, spec.identity.accessToken);
    const died = new AbortController();
    vm.exited.then(async (exit) => died.abort(vmDied(sandboxId, exit, await tailOf(launch.consoleLogPath))));
    await watch.measure("agent", () =>
      waitHealthy(
        parseAgentAddress(agentAddress),
        this.#options.initTimeoutMs,
        this.#options.pollMs,
        died.signal,
      ),
    );
    const envdVersion = await watch.measure("init", () => agent.init(spec.identity, live.lifecycleId));
    died.signal.throwIfAborted();
    live = {
      ...live,
      adoptable: { shape: spec.shape, envdVersion, memory: memoryImage, base: memoryImage },
    };
    await writeLive(rootDir, live);

    const timings = watch.timings();
    log.info(
      { sandboxId, generation, timings, resumed: spec.deviceStatePath !== undefined },
      "sandbox started",
    );
    return new Running({
      factory: this.#options,
      merge: this.#merge,
      live,
      vm,
      slot,
      agentAddress,
      disks: attachedDisks(live, devices),
      timings,
      workDir,
      layerDir,
      resources: stack.move(),
    });
  }

  /** One VM per sandbox id at a time; the stack's disposal ends the claim. */
  #claim(sandboxId: string): AsyncDisposableStack {
    if (this.#active.has(sandboxId)) {
      throw new AenvError({
        code: "sandbox_state_conflict",
        status: 409,
        message: `sandbox ${sandboxId} runs already`,
      });
    }
    this.#active.add(sandboxId);
    const stack = new AsyncDisposableStack();
    stack.defer(() => void this.#active.delete(sandboxId));
    return stack;
  }

  #dirs(sandboxId: string, generation: string) {
    const sandboxDir = join(this.#options.rootDir, sandboxId);
    const workDir = join(sandboxDir, generation);
    return {
      sandboxDir,
      workDir,
      layerDir: join(workDir, "layers"),
      vmDir: join(this.#options.runtimeDir, "vm", `${sandboxId}-${generation}`),
    };
  }

  #agentAddress(slot: NetworkSlot): string {
    const { agentPort } = this.#options;
    return agentPort === undefined ? slot.hostAddress : `${slot.hostAddress}:${agentPort}`;
  }

  async survivors(): Promise<KeptSlot[]> {
    const { rootDir, log } = this.#options;
    const kept: KeptSlot[] = [];
    for (const id of await listSandboxDirs(rootDir)) {
      if (this.#active.has(id)) continue;
      const live = await readLive(rootDir, id, log);
      if (live?.adoptable === undefined || live.vm === undefined || live.slotIndex === undefined) continue;
      if (!isProcess(live.vm.pid, live.vm.startTimeTicks)) continue;
      this.#kept.set(id, live.slotIndex);
      kept.push({ index: live.slotIndex, ...(live.policy === undefined ? {} : { policy: live.policy }) });
    }
    return kept;
  }

  async adopt(identity: GuestIdentity): Promise<RunningSandbox> {
    const { vmm, memory, network, blockClient, rootDir, log } = this.#options;
    const { sandboxId } = identity;
    const lost = (why: string, cause?: unknown): AenvError =>
      new AenvError({
        code: "sandbox_not_adoptable",
        status: 410,
        message: `sandbox ${sandboxId} was not found as it was left: ${why}`,
        cause,
      });
    const live = await readLive(rootDir, sandboxId, log);
    if (live?.adoptable === undefined || live.vm === undefined || live.slotIndex === undefined) {
      throw lost("there is no record of a running VM");
    }
    const { slotIndex, deviceId, adoptable, vm: reference } = live;
    const watch = new Stopwatch();
    await using stack = this.#claim(sandboxId);
    const vm = await watch.measure("vmm", () => vmm.adopt(reference));
    if (vm === undefined) throw lost("its VM has ended");
    // Not in the stack yet: one that cannot be adopted is left for `cleanUp`, which knows all that it held.
    // Absent in the moment in which its lowers were being replaced.
    const deviceIds = [deviceId, ...(live.drives ?? []).map((drive) => drive.deviceId)];
    const devices: DeviceInfo[] = [];
    for (const id of deviceIds) {
      const device =
        (await blockClient.get(id)) ??
        (live.device?.deviceId === id ? await blockClient.create(live.device) : undefined);
      if (device === undefined) throw lost(`the block daemon has no device ${id}`);
      if (device.failure !== undefined) throw lost(`its disk cannot be used (${device.failure})`);
      devices.push(device);
    }
    const slot = await network.adopt(slotIndex).catch((error: unknown) => {
      throw lost(`its network slot cannot be taken over: ${errorChain(error).join(": ")}`, error);
    });
    this.#kept.delete(sandboxId);
    const undo = new AsyncDisposableStack();
    undo.use(slot);
    let lease: MemoryLease;
    try {
      lease = undo.use(await memory.materialize(adoptable.memory));
      // It may have stood still for a capture that ended with the process that made it.
      await vm.resume();
    } catch (error) {
      await undo.disposeAsync();
      throw lost("it could not be set running again", error);
    }
    undo.move();

    const { sandboxDir, workDir, layerDir, vmDir } = this.#dirs(sandboxId, live.generation);
    // In the order in which a start acquires them; the claim is the first.
    stack.defer(() => removeTree(sandboxDir));
    stack.defer(() => removeTree(vmDir));
    stack.use(slot);
    for (const id of deviceIds) stack.defer(() => blockClient.release(id));
    stack.use(lease);
    stack.use(vm);
    const agentAddress = this.#agentAddress(slot);
    const running = new Running({
      factory: this.#options,
      merge: this.#merge,
      live,
      vm,
      slot,
      agentAddress,
      disks: attachedDisks(live, devices),
      timings: watch.timings(),
      workDir,
      layerDir,
      resources: stack.move(),
    });
    // A guest that has not stood still needs no new clock, and a slow one must not hold up the start.
    const told = running.reinit(identity).catch((error: unknown) => {
      log.warn({ err: error, sandboxId }, "the agent of an adopted sandbox does not answer");
    });
    await Promise.race([told, Bun.sleep(ADOPTION_INIT_MS)]);
    log.info({ sandboxId, pid: reference.pid, slotIndex }, "running sandbox of an earlier process adopted");
    return running;
  }

  async cleanUp(): Promise<{ vms: number; devices: number; workDirs: number }> {
    const { vmm, rootDir, runtimeDir, blockClient, network, log } = this.#options;
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
    vms += (await vmm.sweep?.()) ?? 0;
    for (const device of await blockClient.list()) {
      const id = device.deviceId.slice(DEVICE_PREFIX.length, DEVICE_PREFIX.length + 36);
      if (!device.deviceId.startsWith(DEVICE_PREFIX) || this.#active.has(id)) continue;
      await blockClient.release(device.deviceId);
      devices += 1;
    }
    for (const [id, index] of this.#kept) {
      try {
        await (await network.adopt(index))[Symbol.asyncDispose]();
      } catch (error) {
        log.warn({ err: error, sandboxId: id, slotIndex: index }, "a kept network slot was not released");
      }
      this.#kept.delete(id);
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

/** What the guest's init says when it cannot go on for want of a drive. */
const DRIVE_NOT_MOUNTED = /aenv: init: fatal: (drive .*)/;

/** What it says when processes of the guest would sleep too long. */
const TIMER_OFF = /aenv: init: fatal: (processor timer .*?):/;
const TIMER_WRONG = "guest_timer_wrong";

const CONSOLE_TAIL_BYTES = 2048;

/** The end of a text file; empty when there is none. */
async function tailOf(path: string): Promise<string> {
  try {
    const file = Bun.file(path);
    return await file.slice(Math.max(0, file.size - CONSOLE_TAIL_BYTES)).text();
  } catch (error) {
    if (errorCode(error) === "ENOENT") return "";
    return `(${path} cannot be read: ${errorCode(error) ?? error})`;
  }
}

/** A VM that ended during its start. */
function vmDied(sandboxId: string, exit: VmExit, consoleTail: string): AenvError {
  const drive = DRIVE_NOT_MOUNTED.exec(consoleTail)?.[1]?.trim();
  if (drive !== undefined) {
    return new AenvError({
      code: "drive_mount_failed",
      status: 400,
      message: `the guest could not mount an attached drive: ${drive}`,
      remediation: "check mountPath against the image of the sandbox and subPath against that of the drive",
    });
  }
  const timer = TIMER_OFF.exec(consoleTail)?.[1];
  if (timer !== undefined) return new AenvError({ code: TIMER_WRONG, message: timer });
  const how =
    exit.signal === null
      ? `exit code ${exit.exitCode}${exit.exitCode === 0 ? ", as when its guest shuts down or resets" : ""}`
      : `signal ${exit.signal}`;
  const said = [exit.stderrTail, consoleTail]
    .map((text) => text.trim())
    .filter((text) => text !== "")
    .join("; ");
  return new AenvError({
    code: "vm_died",
    message: `the VM of sandbox ${sandboxId} ended (${how})${said === "" ? "" : `: ${said.slice(-1000)}`}`,
  });
}

/** A disk of a running sandbox: its root disk, which comes first, or an attached drive. */
interface Disk {
  readonly device: DeviceInfo;
  readonly drive?: LiveDrive;
}

function attachedDisks(live: LiveRecord, devices: readonly DeviceInfo[]): Disk[] {
  return devices.map((device, index) => {
    const drive = live.drives?.[index - 1];
    return { device, ...(drive === undefined ? {} : { drive }) };
  });
}

interface RunningParts {
  readonly factory: SandboxFactoryOptions;
  readonly merge: LayerMerger | undefined;
  readonly live: LiveRecord;
  readonly vm: VmHandle;
  readonly slot: NetworkSlot;
  readonly agentAddress: string;
  readonly disks: readonly Disk[];
  readonly timings: PhaseTimings;
  readonly workDir: string;
  readonly layerDir: string;
  readonly resources: AsyncDisposableStack;
}

/** What is taken from a VM that stands still, before it is made into a directory of its own. */
interface Taken {
  readonly deviceStatePath: string;
  readonly memory: MemoryImage;
  /** Of each disk, in their order. */
  readonly chains: readonly (readonly LayerRef[])[];
}

class Running implements RunningSandbox {
  readonly #parts: RunningParts;
  readonly #shape: VmShape;
  /** What the VM's memory file holds: the mapping does not change. */
  readonly #mapped: MemoryImage;
  /** What a capture is relative to: the mapped image with the layers of the checkpoints since. */
  #base: MemoryImage;
  #envdVersion: string;
  #stopping: Promise<void> | undefined;
  #released = false;
  readonly #substitutes = { disk: new Substitutes(), memory: new Substitutes() };
  #compacting: Promise<void> | undefined;
  readonly #unused: LayerRef[] = [];
  readonly #ending = new AbortController();
  /** Set while a capture reads the chains. */
  #capturing = false;
  /** A disk that is just made anew, as it will be: known to another process, should this one end meanwhile. */
  #remade: DeviceSpec | undefined;
  /** The guest's file systems are held still. */
  #frozen = false;
  /** The last write of the live record; never fails. */
  #writing: Promise<void> = Promise.resolve();

  constructor(parts: RunningParts) {
    const { adoptable } = parts.live;
    assert(adoptable !== undefined, "a sandbox that runs can be adopted");
    this.#parts = parts;
    this.#shape = adoptable.shape;
    this.#mapped = adoptable.memory;
    this.#base = adoptable.base;
    this.#envdVersion = adoptable.envdVersion;
    this.#compactSoon(parts.disks.map(({ device }) => device.image.lowers));
  }

  get sandboxId(): string {
    return this.#parts.live.sandboxId;
  }
  get #address(): ReturnType<typeof parseAgentAddress> {
    return parseAgentAddress(this.#parts.agentAddress);
  }
  get hostAddress(): string {
    return this.#parts.agentAddress;
  }
  get envdVersion(): string {
    return this.#envdVersion;
  }
  get shape(): VmShape {
    return this.#shape;
  }
  get diskSizeBytes(): number {
    return this.#parts.disks[0]!.device.virtualSizeBytes;
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

  async capture(dir: string): Promise<Capture> {
    const watch = new Stopwatch();
    return this.#capture(dir, watch, async () => {
      const taken = await this.#takeStopped(dir, dir, watch);
      try {
        return await watch.measure("commit", () => this.#commit(dir, taken));
      } catch (error) {
        throw await this.#recover(error, true);
      }
    });
  }

  async checkpoint(dir: string): Promise<Capture> {
    const watch = new Stopwatch();
    return this.#capture(dir, watch, async () => {
      const taken = await watch.measure("stopped", async () => {
        const stillness = await this.#takeStopped(dir, this.#parts.layerDir, watch);
        try {
          for (const [index, disk] of this.#parts.disks.entries()) {
            if (!disk.device.readOnly) await this.#swapLowers(disk, stillness.chains[index]!);
          }
          await watch.measure("vmm_resume", () => this.#parts.vm.resume());
        } catch (error) {
          throw this.#terminal(error, `it does not run again (${errorChain(error).join(": ")})`);
        }
        return stillness;
      });
      // The next checkpoint stores only what is written from here on.
      this.#base = taken.memory;
      const state = await watch.measure("commit", () => this.#commit(dir, taken));
      await this.#writeLive();
      await this.#removeUnused();
      this.#compactSoon(taken.chains);
      return state;
    });
  }

  async captureDisks(dir: string): Promise<DiskCapture> {
    const watch = new Stopwatch();
    const { vm } = this.#parts;
    return this.#capture(dir, watch, async () => {
      await watch.measure("freeze", () => freezeDisks(this.#address, FREEZE_MS));
      this.#frozen = true;
      const frozenAt = performance.now();
      let paused = false;
      try {
        await watch.measure("vmm_pause", () => vm.pause());
        paused = true;
        const stillMs = performance.now() - frozenAt;
        if (stillMs > FROZEN_MAX_MS) {
          throw new Error(`the VM stood still only ${Math.round(stillMs)} ms after its file systems did`);
        }
        const chains = await watch.measure("disk_seal", () => this.#sealDisks());
        await watch.measure("proof", () => this.#proveFrozen());
        return await watch.measure("commit", () => this.#commitDisks(dir, chains));
      } catch (error) {
        const outcome = await this.#recover(error, paused);
        // One that cannot go on does not answer either.
        if (!isTerminal(outcome)) await this.#thaw();
        throw outcome;
      }
    });
  }

  async halt(dir: string): Promise<DiskCapture> {
    const watch = new Stopwatch();
    const { vm } = this.#parts;
    return this.#capture(dir, watch, async () => {
      await watch.measure("shutdown", async () => {
        // It is paused for good already: what it promised outside now, a kill of this process would take back.
        await this.#parts.slot.isolate();
        await this.resumeInPlace();
        await haltGuest(this.#address, THAW_MS);
        const exit = await Promise.race([vm.exited, Bun.sleep(HALT_MS)]);
        if (exit === undefined) throw new Error(`the guest did not end within ${HALT_MS / 1000} s`);
        // How a VM of an earlier process ended is not known; that its guest got to the end is.
        const said = await tailOf(join(this.#parts.workDir, CONSOLE_LOG));
        if (!said.includes(LEFT_CLEAN)) throw vmDied(this.sandboxId, exit, said);
      });
      const chains = await watch.measure("disk_seal", () => this.#sealDisks());
      return await watch.measure("commit", () => this.#commitDisks(dir, chains));
    });
  }

  /**
   * After the disks were taken from the stopped VM, which stands still again afterwards: only its guest knows
   * whether it still held them still. What runs meanwhile cannot write to them.
   */
  async #proveFrozen(): Promise<void> {
    const { vm } = this.#parts;
    await vm.resume();
    try {
      await requireFrozen(this.#address, THAW_MS);
    } catch (cause) {
      if (cause instanceof AenvError && cause.code === "guest_too_old") throw cause;
      throw new AenvError({
        code: "disks_not_still",
        status: 503,
        message: "the guest's file systems did not stand still until its disks were taken",
        remediation: "try again when the guest or the host is less busy, or pause it with its memory",
        cause,
      });
    } finally {
      await vm.pause();
    }
  }

  /** A guest that nobody thaws does so by itself, and at the next `/init`. */
  async #thaw(): Promise<void> {
    if (!this.#frozen) return;
    this.#frozen = false;
    try {
      await thawDisks(this.#address, THAW_MS);
    } catch (error) {
      this.#parts.factory.log.warn(
        { err: error, sandboxId: this.sandboxId },
        "the file systems of a guest were not thawed",
      );
    }
  }

  /** A failure leaves nothing in `dir`. */
  async #capture<State>(
    dir: string,
    watch: Stopwatch,
    work: () => Promise<State>,
  ): Promise<{ readonly state: State; readonly timings: PhaseTimings }> {
    this.#capturing = true;
    try {
      await this.#prepare(dir, watch);
      const state = await work();
      return { state, timings: watch.timings() };
    } catch (error) {
      await removeTree(dir).catch((cleanup: unknown) =>
        this.#parts.factory.log.warn({ err: cleanup, dir }, "an incomplete capture could not be removed"),
      );
      throw error;
    } finally {
      this.#capturing = false;
    }
  }

  /**
   * What can be done before the guest has to stand still: it waits for less, and a disk that does not answer
   * or is full is noticed while it still runs.
   */
  async #prepare(dir: string, watch: Stopwatch): Promise<void> {
    const { factory, disks } = this.#parts;
    await makeDirDurable(dir);
    const { bavail, bsize } = await statfs(dir);
    if (bavail * bsize < MIN_FREE_BYTES) {
      throw new AenvError({
        code: "disk_full",
        status: 507,
        message: `no space left on the file system of ${dir}`,
        remediation: "free space on the file system that holds $AENV_HOME_PATH",
      });
    }
    await watch.measure("flush", async () => {
      for (const { device } of disks) if (!device.readOnly) await factory.blockClient.flush(device.deviceId);
    });
  }

  #terminal(cause: unknown, why: string): AenvError {
    return new AenvError({
      code: "capture_terminal",
      message: `sandbox ${this.sandboxId} could not be captured and cannot go on: ${why}`,
      cause,
    });
  }

  /** Puts a half-paused VM back to work; the error to throw says whether that succeeded. */
  async #recover(error: unknown, paused: boolean): Promise<unknown> {
    if (isTerminal(error)) return this.#terminal(error, errorChain(error).join(": "));
    try {
      // Also when the pause itself failed: it may have stopped the vCPUs before its answer got lost.
      await this.#parts.vm.resume();
    } catch (resumeError) {
      if (!paused)
        this.#parts.factory.log.error({ err: resumeError }, "VM does not answer after a failed pause");
      return this.#terminal(error, `it does not run again (${errorChain(resumeError).join(": ")})`);
    }
    return error;
  }

  /** Stops the VM and takes its state; it stands still afterwards. On error it runs again, or is terminal. */
  async #takeStopped(dir: string, memoryDir: string, watch: Stopwatch): Promise<Taken> {
    let paused = false;
    try {
      await watch.measure("vmm_pause", () => this.#parts.vm.pause());
      paused = true;
      return await this.#take(dir, memoryDir, watch);
    } catch (error) {
      throw await this.#recover(error, paused);
    }
  }

  /**
   * The VM stands still. The device state goes to `dir`, the memory layer to `memoryDir`, the sealed layers of
   * the disks to the sandbox's own layers. A failure before the seal leaves the sandbox as it was.
   */
  async #take(dir: string, memoryDir: string, watch: Stopwatch): Promise<Taken> {
    const { vm, factory } = this.#parts;
    const base = this.#base;
    const deviceStatePath = join(dir, "device.state");
    await watch.measure("device_state", async () => {
      await vm.saveDeviceState(deviceStatePath);
      await syncPath(deviceStatePath);
    });
    const memoryPath = join(memoryDir, privateLayerName("memory"));
    const [memoryLayer, chains] = await settleAll<[LayerRef | undefined, (readonly LayerRef[])[]]>([
      watch.measure("memory_capture", async () => {
        return (await factory.memory.capture(vm.reference, base, memoryPath)).newLayer;
      }),
      watch.measure("disk_seal", () => this.#sealDisks()),
    ]).catch(async (error: unknown) => {
      await removeTree(memoryPath);
      throw error;
    });
    const layers = [...base.layers];
    if (memoryLayer !== undefined) {
      const { digest: _, ...ref } = memoryLayer;
      layers.push(ref);
    }
    return { deviceStatePath, memory: { sizeBytes: base.sizeBytes, layers }, chains };
  }

  /** The chains of all disks, what was written sealed into them. */
  async #sealDisks(): Promise<(readonly LayerRef[])[]> {
    const sealed: (readonly LayerRef[])[] = [];
    for (const { device } of this.#parts.disks) {
      sealed.push(device.readOnly ? device.image.lowers : await this.#sealDisk(device));
    }
    return sealed;
  }

  /** The disks over those chains, with links of their own in `dir`. */
  async #linkDisks(
    dir: string,
    chains: Taken["chains"],
  ): Promise<{ readonly rootfs: DiskImage; readonly drives: readonly AttachedDrive[] }> {
    const images: DiskImage[] = [];
    const drives: AttachedDrive[] = [];
    for (const [index, { device, drive }] of this.#parts.disks.entries()) {
      const chain = await this.#shortened(chains[index]!, "disk");
      const lowers = await linkPrivateLayers(chain, dir);
      const image: DiskImage = { lowers, virtualSizeBytes: device.virtualSizeBytes };
      if (drive === undefined) {
        images.push(image);
      } else {
        const { deviceId: _, ...described } = drive;
        drives.push({ ...described, ...image });
      }
    }
    const [rootfs] = images;
    assert(rootfs !== undefined, "a sandbox has a root disk");
    return { rootfs, drives };
  }

  /** Makes the directory complete in itself; the VM may run meanwhile. */
  async #commit(dir: string, taken: Taken): Promise<CapturedState> {
    const { factory } = this.#parts;
    const memory = await this.#shortened(taken.memory.layers, "memory");
    const { rootfs, drives } = await this.#linkDisks(dir, taken.chains);
    const state: CapturedState = {
      version: stateVersion(drives),
      vm: await factory.vmm.identity,
      shape: this.#shape,
      deviceStatePath: taken.deviceStatePath,
      deviceStateSum: await sumDeviceState(taken.deviceStatePath),
      memory: { sizeBytes: taken.memory.sizeBytes, layers: await linkPrivateLayers(memory, dir) },
      rootfs,
      ...(drives.length === 0 ? {} : { drives }),
      envdVersion: this.#envdVersion,
    };
    await writeState(dir, state);
    return state;
  }

  async #commitDisks(dir: string, chains: Taken["chains"]): Promise<CapturedDisks> {
    const { rootfs, drives } = await this.#linkDisks(dir, chains);
    const state: CapturedDisks = {
      version: DISKS_VERSION,
      shape: this.#shape,
      rootfs,
      ...(drives.length === 0 ? {} : { drives }),
      envdVersion: this.#envdVersion,
    };
    await writeState(dir, state);
    return state;
  }

  // ---- chains -----------------------------------------------------------------------------------

  /** The chain with what has been merged; one that is too long nevertheless is merged now. */
  async #shortened(layers: readonly LayerRef[], kind: "disk" | "memory"): Promise<LayerRef[]> {
    const chain = this.#substitutes[kind].apply(layers);
    if (chain.length <= MAX_CHAIN || this.#parts.merge === undefined) return chain;
    await this.#mergeTop(chain, kind);
    return this.#substitutes[kind].apply(layers);
  }

  /** Merges what is worth it in the background. What comes of it is used by later captures. */
  #compactSoon(chains: readonly (readonly LayerRef[])[]): void {
    const { merge, factory } = this.#parts;
    if (merge === undefined || this.#compacting !== undefined || this.#ending.signal.aborted) return;
    const base = this.#base;
    const compact = async (): Promise<void> => {
      for (const [index, chain] of chains.entries()) {
        // One that is not written does not grow.
        if (this.#parts.disks[index]!.device.readOnly) continue;
        await this.#mergeTop(this.#substitutes.disk.apply(chain), "disk");
      }
      await this.#mergeTop(this.#substitutes.memory.apply(base.layers), "memory");
      await this.#shortenBase();
    };
    this.#compacting = compact()
      .catch((error: unknown) => {
        // The sandbox was stopped, and its files with it.
        if (this.#ending.signal.aborted) return;
        factory.log.warn({ err: error, sandboxId: this.sandboxId }, "layers could not be merged");
      })
      .finally(() => {
        this.#compacting = undefined;
      });
  }

  async #mergeTop(chain: readonly LayerRef[], kind: "disk" | "memory"): Promise<void> {
    const { merge, factory, layerDir } = this.#parts;
    const from = planCompaction(layerSizes(chain));
    if (from === undefined || merge === undefined) return;
    const run = chain.slice(from);
    const startedAt = performance.now();
    const layer = await merge(run, layerDir, kind, this.#ending.signal);
    this.#substitutes[kind].add(run, layer);
    const ms = Math.round(performance.now() - startedAt);
    factory.log.info(
      { sandboxId: this.sandboxId, kind, merged: run.length, of: chain.length, ms },
      "layers merged",
    );
  }

  /**
   * Layers of checkpoints that were merged with nothing of the mapped image among them are replaced in the
   * base itself, and their files go. (The bottom of the base has to stay what is mapped.)
   */
  async #shortenBase(): Promise<void> {
    if (this.#capturing) return;
    const { layers, sizeBytes } = this.#base;
    const bottom = this.#mapped.layers.length;
    const above = layers.slice(bottom);
    const shorter = this.#substitutes.memory.apply(above);
    if (shorter.length === above.length) return;
    this.#base = { sizeBytes, layers: [...this.#mapped.layers, ...shorter] };
    await this.#writeLive();
    const kept = new Set(shorter.map(({ file }) => file));
    for (const layer of above) {
      if (isPrivate(layer) && !kept.has(layer.file)) await removeTree(layer.file);
    }
  }

  egressReport(): Promise<SlotPolicyReport> {
    return this.#parts.slot.policyReport();
  }

  async applyEgress(policy: EgressPolicy): Promise<void> {
    await this.#parts.slot.applyPolicy(policy);
    // A server that takes over must not fall back to the policy of the start.
    await this.#writeLive();
  }

  /**
   * The VM stands still after a checkpoint. A live disk over many lowers is made anew over what they were
   * merged into: its client comes back to the same socket, as it does to a restarted daemon. Where that
   * fails the disk is as it was; rejects when there is none any more.
   */
  async #swapLowers({ device }: Disk, lowers: readonly LayerRef[]): Promise<void> {
    const { factory } = this.#parts;
    const { blockClient, maxLiveLowers = MAX_LIVE_LOWERS, log } = factory;
    if (lowers.length <= maxLiveLowers) return;
    const { layers: merged, swaps } = this.#substitutes.disk.plan(lowers);
    if (merged.length > lowers.length / 2) return;
    const { deviceId, exportKind } = device;
    const replaced = () => {
      log.info({ deviceId, lowers: lowers.length, merged: merged.length }, "lowers replaced");
      const kept = new Set(merged.map(({ file }) => file));
      this.#unused.push(...lowers.filter((layer) => isPrivate(layer) && !kept.has(layer.file)));
    };
    if (exportKind === "ublk") {
      // The kernel's device that the VM has open stays: what is under it is changed in place.
      try {
        await blockClient.swapLowers(deviceId, swaps);
      } catch (error) {
        log.warn({ err: error, deviceId }, "lowers were not replaced");
        return;
      }
      replaced();
      return;
    }
    const spec = (image: DeviceSpec["image"]): DeviceSpec => ({
      deviceId,
      image,
      readOnly: false,
      exportKind,
    });
    let before: DeviceSpec;
    let after: DeviceSpec;
    try {
      const now = await blockClient.get(deviceId);
      assert(now !== undefined, `block device ${deviceId} of a running sandbox exists`);
      const image = { ...now.image, virtualSizeBytes: now.virtualSizeBytes };
      before = spec(image);
      after = spec({ ...image, lowers: merged });
      this.#remade = after;
      await this.#writeLive();
    } catch (error) {
      this.#remade = undefined;
      log.warn({ err: error, deviceId }, "lowers were not replaced");
      return;
    }
    await blockClient.release(deviceId);
    try {
      await blockClient.create(after);
    } catch (error) {
      log.error({ err: error, deviceId }, "a disk was not made over its merged lowers");
      await blockClient.create(before);
      return;
    } finally {
      this.#remade = undefined;
    }
    replaced();
  }

  /** After the commit, which links from them: layers that nothing here refers to any more. */
  async #removeUnused(): Promise<void> {
    for (const layer of this.#unused.splice(0)) await removeTree(layer.file);
  }

  /** One after the other, each with what holds when its turn comes: the last one written is the newest. */
  #writeLive(): Promise<void> {
    const turn = this.#writing.then(async () => {
      // Its directory is about to go, or has gone.
      if (this.#released) return;
      await writeLive(this.#parts.factory.rootDir, this.#liveRecord());
    });
    this.#writing = turn.catch(() => undefined);
    return turn;
  }

  #liveRecord(): LiveRecord {
    const { live, slot } = this.#parts;
    return {
      ...live,
      policy: slot.policy,
      adoptable: {
        shape: this.#shape,
        envdVersion: this.#envdVersion,
        memory: this.#mapped,
        base: this.#base,
      },
      ...(this.#remade === undefined ? {} : { device: this.#remade }),
    };
  }

  /**
   * Seals the live upper into a layer of the sandbox's own directory and continues on a fresh one; the
   * captured state gets a link. So a capture that fails after this point has not harmed the sandbox.
   */
  async #sealDisk(device: DeviceInfo): Promise<readonly LayerRef[]> {
    const { factory, layerDir, workDir } = this.#parts;
    const { blockClient, log } = factory;
    const sealedPath = join(layerDir, privateLayerName("disk"));
    await blockClient.flush(device.deviceId);
    try {
      await blockClient.restack(device.deviceId, sealedPath, freshUpper(workDir));
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
    await this.#thaw();
  }

  async reinit(identity: GuestIdentity): Promise<void> {
    const { agentAddress, live } = this.#parts;
    const agent = createAgentClient(agentAddress, identity.accessToken);
    this.#envdVersion = await agent.init(identity, live.lifecycleId);
  }

  async probe(timeoutMs: number): Promise<void> {
    await probeHealth(this.#address, timeoutMs);
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
    await vm.kill(factory.killGraceMs ?? KILL_GRACE_MS);
    this.#released = true;
    // A merge writes into the directory that is about to go, and so does who tells what runs.
    this.#ending.abort();
    await this.#compacting;
    await this.#writing;
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

/** Last: a directory with this file is complete, and it syncs the names of all the others. */
async function writeState(dir: string, state: CapturedState | CapturedDisks): Promise<void> {
  await writeDurable(join(dir, "state.json"), `${JSON.stringify(state, null, 2)}\n`);
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
