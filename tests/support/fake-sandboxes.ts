import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { AenvError } from "../../src/lib/errors.ts";
import type { EgressPolicy } from "../../src/network/index.ts";
import type { KeptSlot, SlotPolicyReport } from "../../src/network/types.ts";
import type {
  BootPlan,
  BootSpec,
  Capture,
  CapturedDisks,
  CapturedState,
  DiskCapture,
  GuestIdentity,
  ResumeSpec,
  RunningSandbox,
  SandboxFactory,
} from "../../src/sandbox/types.ts";
import type { VmExit } from "../../src/vmm/types.ts";
import { fakeReport } from "./fake-network.ts";

/**
 * A sandbox factory without VMs, for faults that real ones do not produce on demand. It keeps the
 * promises of the interface and counts what is alive; captures write real files.
 */
export interface Faults {
  checkBoot?: (plan: BootPlan) => Promise<void> | void;
  resume?: () => Promise<void> | void;
  capture?: () => Promise<void> | void;
  halt?: () => Promise<void> | void;
  resumeInPlace?: () => Promise<void> | void;
  stop?: () => Promise<void> | void;
  applyEgress?: () => Promise<void> | void;
  probe?: () => Promise<void> | void;
  adopt?: () => Promise<void> | void;
}

const IDENTITY = {
  vmm: "qemu",
  vmmVersion: "10",
  mode: "tcg",
  cpuModel: "max",
  kernelVersion: "6.12",
} as const;

export class FakeSandbox implements RunningSandbox {
  readonly sandboxId: string;
  readonly hostAddress: string;
  readonly envdVersion = "0.5.15";
  readonly shape = { vcpuCount: 1, memoryMiB: 128 };
  readonly diskSizeBytes = 1 << 30;
  readonly vm = {
    vmId: "x",
    pid: 0,
    startTimeTicks: "0",
    controlSocketPath: "",
    workDir: "",
    memoryFile: "",
  };
  readonly exited: Promise<VmExit>;
  readonly timings = { total: 1 };
  generation: number;
  identity: GuestIdentity;
  vcpusRun = true;
  alive = true;
  inits = 1;
  readonly #factory: FakeSandboxFactory;
  readonly #exit = Promise.withResolvers<VmExit>();

  constructor(factory: FakeSandboxFactory, identity: GuestIdentity, generation: number) {
    this.#factory = factory;
    this.sandboxId = identity.sandboxId;
    this.identity = identity;
    this.hostAddress = factory.hostAddress;
    this.generation = generation;
    this.exited = this.#exit.promise;
  }

  die(exit: Partial<VmExit> = {}): void {
    if (!this.alive) return;
    this.alive = false;
    this.vcpusRun = false;
    this.#exit.resolve({ exitCode: null, signal: "SIGKILL", stderrTail: "killed by the test", ...exit });
  }

  #mustLive(what: string): void {
    if (!this.alive) throw new AenvError({ code: "vm_died", message: `${what}: the VM has ended` });
  }

  async capture(dir: string): Promise<Capture> {
    this.#mustLive("capture");
    this.vcpusRun = false;
    try {
      mkdirSync(dir, { recursive: true });
      await Bun.sleep(this.#factory.delayMs);
      await this.#factory.faults.capture?.();
      this.#mustLive("capture");
      const state = fakeState(dir, this.generation + 1);
      return { state, timings: { total: 1 } };
    } catch (error) {
      if (!this.alive)
        throw new AenvError({ code: "capture_terminal", message: "the VM has ended", cause: error });
      if (!(error instanceof AenvError && error.code === "capture_terminal")) this.vcpusRun = true;
      throw error;
    }
  }

  captured = 0;

  async captureDisks(dir: string): Promise<DiskCapture> {
    const { timings } = await this.capture(dir);
    this.captured += 1;
    return { state: fakeDisks(dir, `written ${this.captured}`), timings };
  }

  async halt(dir: string): Promise<DiskCapture> {
    this.#mustLive("halt");
    this.vcpusRun = true;
    await Bun.sleep(this.#factory.delayMs);
    await this.#factory.faults.halt?.();
    this.die({ exitCode: 0, signal: null });
    return { state: fakeDisks(dir, "halted"), timings: { shutdown: 1, total: 1 } };
  }

  async checkpoint(dir: string): Promise<Capture> {
    const { state } = await this.capture(dir);
    try {
      await this.resumeInPlace();
    } catch (error) {
      throw new AenvError({ code: "capture_terminal", message: "it does not run again", cause: error });
    }
    this.generation += 1;
    return { state, timings: { stopped: 1, total: 2 } };
  }

  async probe(): Promise<void> {
    await this.#factory.faults.probe?.();
    this.#mustLive("probe");
  }

  async resumeInPlace(): Promise<void> {
    await this.#factory.faults.resumeInPlace?.();
    this.#mustLive("resume");
    this.vcpusRun = true;
  }

  async reinit(identity: GuestIdentity): Promise<void> {
    this.#mustLive("init");
    this.identity = identity;
    this.inits += 1;
  }

  /** What it was booted from, when it was. */
  boot: BootSpec | undefined;
  /** What its disk held then. */
  bootedFrom: string | undefined;
  egress: EgressPolicy | undefined;
  async applyEgress(policy: EgressPolicy): Promise<void> {
    await this.#factory.faults.applyEgress?.();
    this.#mustLive("egress policy");
    this.egress = policy;
  }
  async egressReport(): Promise<SlotPolicyReport> {
    this.#mustLive("egress report");
    return fakeReport(this.egress);
  }

  async stop(): Promise<void> {
    await this.#factory.faults.stop?.();
    await Bun.sleep(this.#factory.delayMs / 2);
    this.die({ signal: "SIGTERM" });
    this.#factory.live.delete(this);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
  }
}

/** Captured disks with a real file, which says what was on them. */
export function fakeDisks(dir: string, text: string): CapturedDisks {
  rmSync(dir, { recursive: true, force: true });
  mkdirSync(dir, { recursive: true });
  const file = join(dir, "disk.lsmt");
  writeFileSync(file, text);
  const state: CapturedDisks = {
    version: 3,
    shape: { vcpuCount: 1, memoryMiB: 128 },
    rootfs: {
      virtualSizeBytes: 1 << 30,
      lowers: [{ file: join(dir, "shared.lsmt"), digest: "sha256:00" }, { file }],
    },
    envdVersion: "0.5.15",
  };
  writeFileSync(join(dir, "state.json"), JSON.stringify(state));
  return state;
}

/** A captured state with real files; its memory layer holds the generation number. */
export function fakeState(dir: string, generation: number): CapturedState {
  mkdirSync(dir, { recursive: true });
  const file = (name: string, text: string): string => {
    writeFileSync(join(dir, name), text);
    return join(dir, name);
  };
  const state: CapturedState = {
    version: 1,
    vm: IDENTITY,
    shape: { vcpuCount: 1, memoryMiB: 128 },
    deviceStatePath: file("device.state", "device"),
    memory: {
      sizeBytes: 128 << 20,
      layers: [{ file: file(`memory-${generation}.lsmt`, String(generation)) }],
    },
    rootfs: {
      virtualSizeBytes: 1 << 30,
      lowers: [{ file: file(`disk-${generation}.lsmt`, `disk ${generation}`) }],
    },
    envdVersion: "0.5.15",
  };
  file("state.json", JSON.stringify(state));
  return state;
}

export class FakeSandboxFactory implements SandboxFactory {
  readonly live = new Set<FakeSandbox>();
  /** VMs of an earlier server. */
  readonly orphans = new Map<string, FakeSandbox>();
  readonly faults: Faults = {};
  hostAddress = "127.0.0.1";
  delayMs = 4;
  starts = 0;
  cleanUps = 0;
  concurrentStarts = 0;
  maxConcurrentStarts = 0;

  /** The only live VM of a sandbox; a second one is the worst of bugs. */
  of(id: string): FakeSandbox | undefined {
    const found = [...this.live].filter((sandbox) => sandbox.sandboxId === id);
    if (found.length > 1) throw new Error(`${found.length} VMs of sandbox ${id}`);
    return found[0];
  }

  async checkBoot(plan: BootPlan): Promise<void> {
    await this.faults.checkBoot?.(plan);
  }

  async boot(spec: BootSpec): Promise<RunningSandbox> {
    const top = spec.rootfs.lowers.at(-1);
    const disk = top === undefined ? "" : await Bun.file(top.file).text();
    const sandbox = await this.#start(spec.identity, 0);
    sandbox.bootedFrom = disk;
    sandbox.boot = spec;
    sandbox.egress = spec.egress;
    return sandbox;
  }

  async resume(spec: ResumeSpec): Promise<RunningSandbox> {
    const memory = spec.state.memory.layers.at(-1);
    const text = await Bun.file(memory!.file).text();
    const sandbox = await this.#start(spec.identity, Number(text));
    sandbox.egress = spec.egress;
    return sandbox;
  }

  async #start(identity: GuestIdentity, generation: number): Promise<FakeSandbox> {
    if (this.of(identity.sandboxId) !== undefined)
      throw new Error(`sandbox ${identity.sandboxId} runs already`);
    this.starts += 1;
    this.concurrentStarts += 1;
    this.maxConcurrentStarts = Math.max(this.maxConcurrentStarts, this.concurrentStarts);
    const sandbox = this.#add(identity, generation);
    try {
      await Bun.sleep(this.delayMs);
      await this.faults.resume?.();
      return sandbox;
    } catch (error) {
      this.live.delete(sandbox);
      throw error;
    } finally {
      this.concurrentStarts -= 1;
    }
  }

  async survivors(): Promise<KeptSlot[]> {
    return [...this.orphans.keys()].map((_, i) => ({ index: i + 1 }));
  }

  async adopt(identity: GuestIdentity): Promise<RunningSandbox> {
    await this.faults.adopt?.();
    const sandbox = this.orphans.get(identity.sandboxId);
    if (sandbox?.alive !== true) {
      throw new AenvError({ code: "sandbox_not_adoptable", message: "its VM has ended" });
    }
    this.orphans.delete(identity.sandboxId);
    const adopted = this.#add(identity, sandbox.generation);
    return adopted;
  }

  /** As if the server had been killed: its VMs run on, and belong to nobody. */
  orphan(): void {
    for (const sandbox of this.live) this.orphans.set(sandbox.sandboxId, sandbox);
    this.live.clear();
  }

  #add(identity: GuestIdentity, generation: number): FakeSandbox {
    const sandbox = new FakeSandbox(this, identity, generation);
    this.live.add(sandbox);
    return sandbox;
  }

  async cleanUp(): Promise<{ vms: number; devices: number; workDirs: number }> {
    this.cleanUps += 1;
    this.orphans.clear();
    return { vms: 0, devices: 0, workDirs: 0 };
  }
}
