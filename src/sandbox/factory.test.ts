import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { basename, join } from "node:path";
import { eventually } from "../../tests/support/eventually.ts";
import { type FakeAgent, startFakeAgent } from "../../tests/support/fake-agent.ts";
import { fakeReport } from "../../tests/support/fake-network.ts";
import { AenvError, assert } from "../lib/errors.ts";
import { newId } from "../lib/ids.ts";
import { createLogger } from "../lib/log.ts";
import type { MemoryImage, MemoryService } from "../memory/types.ts";
import { DEFAULT_POLICY, type EgressPolicy } from "../network/index.ts";
import type { NetworkService, NetworkSlot } from "../network/types.ts";
import { type SupervisedBlockd, superviseBlockd } from "../storage/blockd/index.ts";
import type { BlockClient } from "../storage/blockd/protocol.ts";
import { createLayerWriter, type LayerRef, openStack } from "../storage/overlaybd/index.ts";
import { checkKernelLine } from "../vmm/index.ts";
import type { VmExit, VmHandle, VmLaunchSpec, VmmDriver, VmRestoreSpec } from "../vmm/types.ts";
import { createSandboxFactory } from "./index.ts";
import { processStartTicks } from "./live.ts";
import type { BootSpec, SandboxFactory } from "./types.ts";

/*
 * The factory with the real block daemon and layer format. VM, memory and network are stand-ins that
 * count what is held and fail on demand; the real ones together are tested in tests/e2e.
 */

const log = createLogger("test");
log.level = "silent";
const MIB = 1 << 20;
const IDENTITY = {
  vmm: "qemu",
  vmmVersion: "10",
  mode: "tcg",
  cpuModel: "max",
  kernelVersion: "6.12",
} as const;

let base: string;
let home: string;
let blockd: SupervisedBlockd;
let blockClient: BlockClient;
let agent: FakeAgent;
let factory: SandboxFactory;
let world: World;

interface World {
  readonly held: string[];
  readonly launches: VmLaunchSpec[];
  readonly vms: FakeVm[];
  fail: Partial<
    Record<
      "slot" | "memory" | "launch" | "pause" | "resume" | "deviceState" | "capture" | "kill" | "restack",
      string
    >
  >;
  cutRestackAnswer: boolean;
  /** Layers of the base of each memory capture. */
  readonly bases: number[];
  adopted: number;
  /** Whether the VM ran when its network was cut. */
  readonly isolatedWhile: boolean[];
}

class FakeVm implements VmHandle {
  readonly reference;
  readonly exited: Promise<VmExit>;
  running = true;
  readonly #exit = Promise.withResolvers<VmExit>();

  constructor(spec: VmLaunchSpec, pid = process.pid) {
    this.reference = {
      vmId: spec.vmId,
      pid,
      startTimeTicks: processStartTicks(pid) ?? "0",
      controlSocketPath: join(spec.workDir, "qmp"),
      workDir: spec.workDir,
      memoryFile: spec.memoryFile,
    };
    this.exited = this.#exit.promise;
    world.held.push("vm");
  }
  async pause(): Promise<void> {
    this.running = false;
    failWhen("pause");
  }
  async resume(): Promise<void> {
    failWhen("resume");
    this.running = true;
  }
  async saveDeviceState(path: string): Promise<void> {
    failWhen("deviceState");
    writeFileSync(path, "device");
  }
  async kill(): Promise<void> {
    failWhen("kill");
    this.die();
  }
  die(how: Partial<VmExit> = {}): void {
    this.#exit.resolve({ exitCode: null, signal: "SIGKILL", stderrTail: "out of luck", ...how });
    drop("vm");
  }
  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
  }
}

function failWhen(what: keyof World["fail"]): void {
  if (world.fail[what] !== undefined) throw new Error(world.fail[what]);
}

function drop(what: string): void {
  const at = world.held.indexOf(what);
  if (at >= 0) world.held.splice(at, 1);
}

const slot = (index: number): NetworkSlot => {
  failWhen("slot");
  world.held.push("slot");
  let policy = DEFAULT_POLICY;
  return {
    index,
    get policy() {
      return policy;
    },
    applyPolicy: async (next) => {
      policy = next;
    },
    isolate: async () => {
      world.isolatedWhile.push(world.vms.at(-1)!.running);
    },
    policyReport: async () => fakeReport(),
    netnsPath: "/run/none",
    tapName: "tap0",
    hostAddress: "127.0.0.1",
    guestAddress: "169.254.0.21",
    gatewayAddress: "169.254.0.22",
    prefixLength: 30,
    dnsServer: "10.0.0.1",
    macAddress: "02:00:00:00:00:01",
    [Symbol.asyncDispose]: async () => drop("slot"),
  };
};

const network: NetworkService = {
  start: async () => undefined,
  adopt: async (index) => slot(index),
  acquire: async () => slot(7),
  [Symbol.asyncDispose]: async () => undefined,
};

const memory: MemoryService = {
  async materialize(image: MemoryImage) {
    failWhen("memory");
    for (const layer of image.layers) expect(existsSync(layer.file)).toBeTrue();
    world.held.push("memory");
    return { file: join(home, "flat.mem"), [Symbol.asyncDispose]: async () => drop("memory") };
  },
  async capture(_vm, image, layerPath) {
    await Bun.sleep(5);
    failWhen("capture");
    writeFileSync(layerPath, `memory ${image.layers.length}`);
    world.bases.push(image.layers.length);
    const newLayer: LayerRef = { file: layerPath, uuid: newId() };
    const timing = { dirtyBytes: 1, storedBytes: 1, zeroedBytes: 0, scanMs: 1, writeMs: 1 };
    return { image: { ...image, layers: [...image.layers, newLayer] }, newLayer, ...timing };
  },
};

const launch = async (spec: VmLaunchSpec | VmRestoreSpec): Promise<VmHandle> => {
  world.launches.push(spec);
  failWhen("launch");
  const vm = new FakeVm(spec);
  world.vms.push(vm);
  return vm;
};
const vmm: VmmDriver = {
  identity: Promise.resolve(IDENTITY),
  maxDrives: 3,
  checkKernelArgs: async (args) => checkKernelLine(args.join(" ")),
  probe: async () => ({ vmm: "qemu", version: "10", binary: "", mode: "tcg", reason: "", warnings: [] }),
  launch,
  restore: launch,
  adopt: async (reference) => {
    const vm = world.vms.find((one) => one.reference.vmId === reference.vmId);
    if (vm !== undefined) world.adopted += 1;
    return vm;
  },
};

beforeAll(async () => {
  base = mkdtempSync("/tmp/orch-factory-");
  blockd = await superviseBlockd(
    {
      argv: [process.execPath, join(import.meta.dir, "../main.ts"), "blockd"],
      socketPath: join(base, "blockd.sock"),
      runtimeDir: join(base, "blockd"),
      logPath: join(base, "blockd.log"),
    },
    log,
  );
  const real = blockd.client;
  blockClient = new Proxy(real, {
    get(target, name) {
      if (name === "restack") {
        return async (...args: Parameters<BlockClient["restack"]>) => {
          if (world.fail.restack !== undefined) {
            throw new AenvError({ code: world.fail.restack, message: "restack failed" });
          }
          const layer = await real.restack(...args);
          if (world.cutRestackAnswer)
            throw new AenvError({ code: "blockd_timeout", message: "no answer in time" });
          return layer;
        };
      }
      const value = Reflect.get(target, name) as unknown;
      return typeof value === "function" ? value.bind(target) : value;
    },
  });
});
afterAll(async () => {
  await blockd.client.shutdown();
  await blockd[Symbol.asyncDispose]();
  rmSync(base, { recursive: true, force: true });
});

beforeEach(() => {
  home = mkdtempSync(join(base, "h-"));
  world = {
    held: [],
    launches: [],
    vms: [],
    fail: {},
    cutRestackAnswer: false,
    bases: [],
    adopted: 0,
    isolatedWhile: [],
  };
  agent = startFakeAgent(home);
  factory = open();
});

afterEach(async () => {
  await agent[Symbol.asyncDispose]();
  expect(world.held).toEqual([]);
  expect(await blockClient.list()).toEqual([]);
  for (const dir of ["sandboxes", "run/vm"]) {
    const path = join(home, dir);
    expect(existsSync(path) ? readdirSync(path) : []).toEqual([]);
  }
});

function open(overrides: { initTimeoutMs?: number } = {}): SandboxFactory {
  return createSandboxFactory({
    vmm,
    memory,
    network,
    blockClient,
    kernelPath: "/kernel",
    initrdPath: "/initrd",
    rootDir: join(home, "sandboxes"),
    runtimeDir: join(home, "run"),
    initTimeoutMs: overrides.initTimeoutMs ?? 20_000,
    pollMs: 3,
    log,
    agentPort: Number(agent.address.split(":")[1]),
  });
}

function baseLayer(): { file: string; digest: string } {
  const file = join(home, "base.lsmt");
  if (!existsSync(file)) {
    const writer = createLayerWriter(file, { virtualSizeBytes: 64 * MIB });
    writer.append(0, new Uint8Array(4096).fill(9));
    writer.finish();
  }
  return { file, digest: `sha256:${"a".repeat(64)}` };
}

function spec(): BootSpec {
  return {
    identity: { sandboxId: newId(), templateId: "t", envVars: {} },
    shape: { vcpuCount: 1, memoryMiB: 128 },
    rootfs: { lowers: [baseLayer()], virtualSizeBytes: 64 * MIB },
    extraBootArgs: ["extra=1"],
  };
}

describe("start", () => {
  test("boot puts everything together, tells the guest who it is, and releases it all", async () => {
    const wanted = spec();
    const running = await factory.boot(wanted);
    expect(running).toMatchObject({
      sandboxId: wanted.identity.sandboxId,
      hostAddress: agent.address,
      envdVersion: "0.5.15",
      diskSizeBytes: 64 * MIB,
    });
    const [launched] = world.launches;
    expect(launched?.kernelArgs.join(" ")).toBe(
      "console=ttyS0 quiet loglevel=3 panic=-1 reboot=t mitigations=off aenv.root=/dev/vda " +
        "aenv.ip=169.254.0.21/30,169.254.0.22 aenv.dns=10.0.0.1 aenv.hostname=sandbox aenv.timer_hz=62500000 extra=1",
    );
    const [drive] = launched!.drives;
    expect(drive).toMatchObject({ driveId: "rootfs", readOnly: false, backend: { kind: "nbd" } });
    expect(drive?.backend.kind === "nbd" && existsSync(drive.backend.socketPath)).toBeTrue();
    expect(agent.inits).toHaveLength(1);
    expect(Object.keys(running.timings).sort()).toEqual(
      ["agent", "device", "init", "layers", "memory", "slot", "total", "vmm"].sort(),
    );
    const live = JSON.parse(readFileSync(join(home, "sandboxes", running.sandboxId, "live.json"), "utf8"));
    expect(live).toMatchObject({ sandboxId: running.sandboxId, slotIndex: 7, vm: { pid: process.pid } });
    await expect(factory.boot(wanted)).rejects.toMatchObject({ code: "sandbox_state_conflict" });
    await Promise.all([running.stop(), running.stop()]);
    await running[Symbol.asyncDispose]();
    await (await factory.boot(wanted)).stop();
  });

  test("a guest whose kernel measured its timer wrongly is booted again, and taken as it is at last", async () => {
    agent.refuseHealth = 1_000_000;
    const booting = factory.boot(spec());
    for (let attempt = 1; attempt <= 4; attempt += 1) {
      await eventually("it is launched", () => world.vms.length === attempt);
      const { kernelArgs, consoleLogPath } = world.launches.at(-1)!;
      expect(kernelArgs).toContain(`aenv.timer_hz=${attempt === 4 ? 0 : 62500000}`);
      if (attempt === 4) break;
      const rate = "aenv: init: fatal: processor timer measured as 108968313 Hz, not 62500000";
      writeFileSync(consoleLogPath, `${rate}: Numerical result out of range\n`);
      world.vms.at(-1)!.die({ exitCode: 0, signal: null });
    }
    agent.refuseHealth = 0;
    await (await booting).stop();
    expect(world.launches).toHaveLength(4);
  });

  for (const step of ["slot", "memory", "launch"] as const) {
    test(`a failing ${step} releases everything else and is what the caller hears of`, async () => {
      world.fail[step] = `${step} failed`;
      await expect(factory.boot(spec())).rejects.toThrow(`${step} failed`);
    });
  }

  test("a missing layer is named", async () => {
    const wanted = spec();
    const missing = { file: join(home, "gone.lsmt"), digest: `sha256:${"b".repeat(64)}` };
    await expect(
      factory.boot({ ...wanted, rootfs: { ...wanted.rootfs, lowers: [missing] } }),
    ).rejects.toThrow("gone.lsmt");
    const { digest: _, ...local } = missing;
    await expect(factory.boot({ ...wanted, rootfs: { ...wanted.rootfs, lowers: [local] } })).rejects.toThrow(
      "gone.lsmt",
    );
  });

  test("an agent that never answers, and a VM that dies instead", async () => {
    agent.refuseHealth = 1_000_000;
    factory = open({ initTimeoutMs: 80 });
    await expect(factory.boot(spec())).rejects.toMatchObject({ code: "agent_not_ready" });
    // Longer than a test may take.
    factory = open({ initTimeoutMs: 600_000 });
    const left = agent.refuseHealth;
    const booting = factory.boot(spec());
    await eventually("the agent is asked", () => agent.refuseHealth < left);
    world.vms.at(-1)?.die();
    await expect(booting).rejects.toMatchObject({
      code: "vm_died",
      message: expect.stringContaining("out of luck"),
    });
  });
});

describe("the record of what runs", () => {
  const rules = (port: number): EgressPolicy => ({ ...DEFAULT_POLICY, allowOut: [`10.0.0.${port}/32`] });

  test("many at once write it: none fails, and the newest stays", async () => {
    const running = await factory.boot(spec());
    const path = join(home, "sandboxes", running.sandboxId, "live.json");
    const writes = Array.from({ length: 60 }, (_, i) => running.applyEgress(rules(i)));
    await Promise.all([...writes, running.checkpoint(join(home, "one"))]);
    expect(JSON.parse(readFileSync(path, "utf8"))).toMatchObject({
      policy: rules(59),
      adoptable: { base: { layers: [{}] } },
    });
    await running.stop();
  });

  test("who writes it while the sandbox ends leaves nothing behind", async () => {
    const running = await factory.boot(spec());
    const writes = Array.from({ length: 20 }, (_, i) => running.applyEgress(rules(i)));
    await Promise.all([running.stop(), ...writes]);
    await running.applyEgress(rules(1));
    expect(existsSync(join(home, "sandboxes", running.sandboxId))).toBeFalse();
  });
});

describe("capture", () => {
  test("the captured state outlives the sandbox, and two sandboxes resume from it", async () => {
    const running = await factory.boot(spec());
    const dir = join(home, "artifacts", "one");
    const { state, timings } = await running.capture(dir);
    expect(world.vms[0]?.running).toBeFalse();
    expect(Object.keys(timings)).toContain("memory_capture");
    await running.stop();
    expect(JSON.parse(readFileSync(join(dir, "state.json"), "utf8"))).toEqual(state);
    expect(state).toMatchObject({
      vm: IDENTITY,
      envdVersion: "0.5.15",
      deviceStatePath: join(dir, "device.state"),
    });
    expect(state.rootfs.lowers).toHaveLength(2);
    expect(state.rootfs.lowers[0]).toEqual(baseLayer());
    for (const layer of [state.rootfs.lowers[1]!, state.memory.layers[0]!]) {
      expect(layer.file).toStartWith(`${dir}/`);
      expect(layer.digest).toBeUndefined();
    }
    const identity = () => ({ sandboxId: newId(), templateId: "t", accessToken: "x", envVars: {} });
    const clones = await Promise.all([1, 2].map(() => factory.resume({ identity: identity(), state })));
    expect(world.launches.slice(1)).toEqual([
      expect.objectContaining({ deviceStatePath: state.deviceStatePath }),
      expect.objectContaining({ deviceStatePath: state.deviceStatePath }),
    ]);
    // What they run on is theirs: the capture may go.
    rmSync(dir, { recursive: true });
    const again = await clones[0]!.capture(join(home, "artifacts", "two"));
    expect(again.state.rootfs.lowers).toHaveLength(3);
    expect(again.state.memory.layers).toHaveLength(2);
    await clones[0]!.stop();
    await clones[1]!.stop();
    for (const layer of [...again.state.rootfs.lowers, ...again.state.memory.layers]) {
      expect(existsSync(layer.file)).toBeTrue();
    }
    using stack = openStack(again.state.rootfs);
    const block = new Uint8Array(4096);
    stack.read(0, block);
    expect(block.every((byte) => byte === 9)).toBeTrue();
  });

  test("a device state that is not what was written never reaches a VM; one of before there were sums does", async () => {
    const running = await factory.boot(spec());
    const { state } = await running.capture(join(home, "artifacts", "flipped"));
    await running.stop();
    const path = state.deviceStatePath;
    const written = readFileSync(path);
    expect(state.deviceStateSum).toMatchObject({ sizeBytes: written.length });
    const identity = () => ({ sandboxId: newId(), templateId: "t", accessToken: "x", envVars: {} });
    const launched = world.launches.length;
    const flipped = Buffer.from(written);
    flipped[3]! ^= 0x10;
    const damages: readonly [damage: () => void, says: string][] = [
      [() => writeFileSync(path, flipped), "is damaged: sha256:"],
      [() => writeFileSync(path, written.subarray(1)), `${written.length - 1} bytes where ${written.length}`],
      [() => rmSync(path), "cannot be read"],
    ];
    for (const [damage, says] of damages) {
      damage();
      const error = await factory.resume({ identity: identity(), state }).catch((thrown: unknown) => thrown);
      assert(error instanceof AenvError, "it fails for a reason");
      expect(error.code).toBe("device_state_damaged");
      expect(error.message).toStartWith(`the device state ${path} `);
      expect(error.message).toContain(says);
      expect(error.remediation).toContain("restore that file from a backup");
    }
    expect(world.launches).toHaveLength(launched);
    expect(world.held).toEqual([]);

    writeFileSync(path, flipped);
    const { deviceStateSum: _, ...before } = state;
    await (await factory.resume({ identity: identity(), state: before })).stop();
    writeFileSync(path, written);
    await (await factory.resume({ identity: identity(), state })).stop();
  });

  test("what no VM has room for is refused by what is known before there are disks", async () => {
    const drive = (mountPath: string) => ({ readOnly: true, mountPath });
    const two = [drive("/a"), drive("/b")];
    await factory.checkBoot({ drives: two, extraBootArgs: ["debug"] });
    await expect(
      factory.checkBoot({ drives: [...two, drive("/c")], extraBootArgs: [] }),
    ).rejects.toMatchObject({
      code: "too_many_drives",
      status: 400,
      message: expect.stringContaining("2 attached drives, 3 were asked for"),
    });
    const long = { drives: [drive(`/${"a".repeat(2000)}`)], extraBootArgs: [] };
    await expect(factory.checkBoot(long)).rejects.toMatchObject({
      code: "invalid_boot_args",
      status: 400,
      message: expect.stringContaining("paths of attached drives"),
    });
    await expect(
      factory.checkBoot({ drives: [], extraBootArgs: [`a=${"b".repeat(2000)}`] }),
    ).rejects.toMatchObject({ code: "invalid_boot_args" });
    expect(world.launches).toEqual([]);
  });

  test("disks alone: captured while they stand still, again after an orderly end, and booted", async () => {
    const disk = { lowers: [baseLayer()], virtualSizeBytes: 64 * MIB };
    const drives = [
      { driveId: "in", readOnly: false, mountPath: "/srv", ...disk },
      { driveId: "ro", readOnly: true, mountPath: "/opt", ...disk },
    ];
    const boot = { ...spec(), drives };
    const running = await factory.boot(boot);
    const [vm] = world.vms;
    const still: boolean[] = [];
    agent.onHold.set("/fsfreeze", () => still.push(vm!.running));
    agent.onHold.set("/fsfrozen", () => still.push(vm!.running));
    agent.onHold.set("/fsthaw", () => still.push(vm!.running));
    agent.onHold.set("/halt", () => {
      // Of a VM that an earlier process started nothing else is known.
      writeFileSync(world.launches[0]!.consoleLogPath, "…\naenv: init: file systems left clean\n");
      vm!.die({ exitCode: null, signal: null });
    });
    const first = (await running.captureDisks(join(home, "first"))).state;
    expect(vm!.running).toBeFalse();
    const { state: last, timings } = await running.halt(join(home, "last"));
    expect(agent.holds).toEqual(["/fsfreeze", "/fsfrozen", "/fsthaw", "/halt"]);
    expect(still).toEqual([true, true, true]);
    expect(world.isolatedWhile).toEqual([false]);
    expect(Object.keys(timings)).toContain("shutdown");
    await running.stop();

    for (const [state, dir, lowers] of [
      [first, "first", 2],
      [last, "last", 3],
    ] as const) {
      expect(state).toMatchObject({ version: 3, shape: boot.shape, envdVersion: "0.5.15" });
      expect(state.rootfs.lowers).toHaveLength(lowers);
      expect(state.rootfs.lowers.at(-1)?.file).toStartWith(join(home, dir));
      expect(state.drives?.map((drive) => [drive.driveId, drive.lowers.length])).toEqual([
        ["in", lowers],
        ["ro", 1],
      ]);
      expect(JSON.parse(readFileSync(join(home, dir, "state.json"), "utf8"))).toEqual(state);
      expect(readdirSync(join(home, dir)).filter((name) => /memory|device/.test(name))).toEqual([]);
      const { shape, rootfs } = state;
      const identity = { sandboxId: newId(), templateId: "t", envVars: {} };
      const again = await factory.boot({
        identity,
        shape,
        rootfs,
        ...(state.drives === undefined ? {} : { drives: state.drives }),
      });
      expect(world.launches.at(-1)?.kernelArgs).toContain("aenv.drives=vdb:rw:/srv,vdc:ro:/opt");
      expect(world.launches.at(-1)).not.toHaveProperty("deviceStatePath");
      await again.stop();
    }
  });

  test("disks alone: what fails before they are stored leaves a guest that runs and may write", async () => {
    const running = await factory.boot(spec());
    const [vm] = world.vms;
    const attempt = (): Promise<unknown> =>
      running.captureDisks(join(home, "attempt")).then(
        () => "done",
        (error: unknown) => error,
      );
    const runsOn = (holds: string[]): void => {
      expect(vm!.running).toBeTrue();
      expect(agent.holds.splice(0)).toEqual(holds);
      expect(existsSync(join(home, "attempt"))).toBeFalse();
    };
    agent.onHold.set("/fsfreeze", 404);
    expect(await attempt()).toMatchObject({ code: "guest_too_old", status: 409 });
    runsOn(["/fsfreeze"]);
    agent.onHold.set("/fsfreeze", 500);
    expect(await attempt()).toMatchObject({ code: "guest_refused" });
    runsOn(["/fsfreeze"]);
    agent.onHold.delete("/fsfreeze");
    for (const what of ["pause", "restack"] as const) {
      world.fail[what] = "no luck";
      expect(String(await attempt())).toContain(what === "pause" ? "no luck" : "restack failed");
      delete world.fail[what];
      runsOn(["/fsfreeze", "/fsthaw"]);
    }
    // Taken while they were not still any more: of no use.
    agent.onHold.set("/fsfrozen", 409);
    expect(await attempt()).toMatchObject({ code: "disks_not_still", status: 503 });
    agent.onHold.delete("/fsfrozen");
    runsOn(["/fsfreeze", "/fsfrozen", "/fsthaw"]);
    world.fail.restack = "restack_terminal";
    expect(await attempt()).toMatchObject({ code: "capture_terminal" });
    delete world.fail.restack;
    expect(agent.holds).toEqual(["/fsfreeze"]);
    // Taken, and then not wanted: it goes on as after any capture.
    agent.holds.splice(0);
    await running.captureDisks(join(home, "taken"));
    await running.resumeInPlace();
    runsOn(["/fsfreeze", "/fsfrozen", "/fsthaw"]);
    // A guest that cannot end, and one that ends by a crash.
    await running.captureDisks(join(home, "again"));
    agent.onHold.set("/halt", 500);
    await expect(running.halt(join(home, "attempt"))).rejects.toMatchObject({ code: "guest_refused" });
    expect(existsSync(join(home, "attempt"))).toBeFalse();
    await running.stop();
    const crashing = await factory.boot(spec());
    await crashing.captureDisks(join(home, "third"));
    agent.onHold.set("/halt", () => {
      writeFileSync(world.launches.at(-1)!.consoleLogPath, "aenv: init: remounting / read-only: busy\n");
      world.vms.at(-1)!.die({ exitCode: 0, signal: null });
    });
    const crash = await crashing.halt(join(home, "attempt")).catch((error: unknown) => error);
    expect(crash).toMatchObject({ code: "vm_died", message: expect.stringContaining("read-only: busy") });
    await crashing.stop();
  });

  test("drives: devices of their own, captured, resumed from, adopted and released with the rest", async () => {
    const disk = { lowers: [baseLayer()], virtualSizeBytes: 64 * MIB };
    const boot = {
      ...spec(),
      drives: [
        { driveId: "in", readOnly: false, mountPath: "/srv/in", subPath: "a/b", ...disk },
        { driveId: "ro", readOnly: true, mountPath: "/srv", ...disk },
      ],
    };
    const running = await factory.boot(boot);
    expect(world.launches[0]?.kernelArgs).toContain("aenv.drives=vdc:ro:/srv,vdb:rw:/srv/in:a/b");
    const shown = [
      ["rootfs", false],
      ["drive1", false],
      ["drive2", true],
    ];
    expect(world.launches[0]?.drives.map(({ driveId, readOnly }) => [driveId, readOnly])).toEqual(shown);
    const sockets = world.launches[0]!.drives.map(({ backend }) => JSON.stringify(backend));
    expect(new Set(sockets).size).toBe(3);
    const point = (await running.checkpoint(join(home, "point"))).state;
    expect(point.drives?.map(({ lowers: _, ...drive }) => drive)).toEqual(
      boot.drives.map(({ lowers: _, ...drive }) => drive),
    );
    expect(point.drives?.map(({ lowers }) => lowers.length)).toEqual([2, 1]);
    expect(point.version).toBe(2);
    expect(point.drives?.[0]?.lowers[1]?.file).toStartWith(join(home, "point"));

    const next = open();
    await next.survivors();
    const adopted = await next.adopt(boot.identity);
    const { state } = await adopted.capture(join(home, "after"));
    expect(state.drives?.map(({ lowers }) => lowers.length)).toEqual([3, 1]);
    const identity = { sandboxId: newId(), templateId: "t", envVars: {} };
    const clone = await factory.resume({ identity, state: point });
    expect(world.launches[1]?.drives.map(({ driveId, readOnly }) => [driveId, readOnly])).toEqual(shown);
    await Promise.all([adopted.stop(), clone.stop()]);
    world.held.splice(0);
  });

  test("another VMM, version, mode or CPU is refused by name before anything is taken", async () => {
    const running = await factory.boot(spec());
    const { state } = await running.capture(join(home, "one"));
    await running.stop();
    const identity = { sandboxId: newId(), templateId: "t", envVars: {} };
    const foreign = { ...state, vm: { ...state.vm, mode: "kvm" as const } };
    await expect(factory.resume({ identity, state: foreign })).rejects.toMatchObject({
      code: "virtualization_mismatch",
      status: 409,
      message: expect.stringMatching(/tcg.*kvm/),
    });
    expect(world.launches).toHaveLength(1);
  });

  test("resumed in place it can be captured again; each capture is complete by itself", async () => {
    const running = await factory.boot(spec());
    const first = await running.capture(join(home, "one"));
    await running.resumeInPlace();
    const second = await running.capture(join(home, "two"));
    expect(second.state.rootfs.lowers).toHaveLength(3);
    expect(second.state.memory.layers).toHaveLength(1);
    expect(basename(second.state.rootfs.lowers[1]!.file)).toBe(basename(first.state.rootfs.lowers[1]!.file));
    const inode = (file: string): number => statSync(file).ino;
    expect(inode(second.state.rootfs.lowers[1]!.file)).toBe(inode(first.state.rootfs.lowers[1]!.file));
    await running.reinit({ sandboxId: running.sandboxId, templateId: "t", envVars: { NEW: "1" } });
    expect(agent.inits.at(-1)).toMatchObject({ envVars: { NEW: "1" } });
    await running.stop();
  });

  const recoverable: [string, () => void][] = [
    ["the pause fails", () => (world.fail.pause = "qmp timeout")],
    ["the device state cannot be written", () => (world.fail.deviceState = "ENOSPC")],
    ["the memory cannot be written", () => (world.fail.capture = "ENOSPC")],
    ["the disk cannot be sealed", () => (world.fail.restack = "disk_full")],
  ];
  for (const [what, fail] of recoverable) {
    test(`${what}: the VM runs on, nothing is left, and the next capture works`, async () => {
      const running = await factory.boot(spec());
      fail();
      const dir = join(home, "broken");
      const error = await running.capture(dir).catch((thrown: unknown) => thrown);
      expect(error).toBeInstanceOf(Error);
      expect(error).not.toMatchObject({ code: "capture_terminal" });
      expect(world.vms[0]?.running).toBeTrue();
      expect(existsSync(dir)).toBeFalse();
      world.fail = {};
      const { state } = await running.capture(join(home, "whole"));
      for (const layer of state.rootfs.lowers) expect(existsSync(layer.file)).toBeTrue();
      using stack = openStack(state.rootfs);
      expect(stack.virtualSizeBytes).toBe(64 * MIB);
      await running.stop();
    });
  }

  test("a directory that cannot be made stops nothing", async () => {
    const running = await factory.boot(spec());
    writeFileSync(join(home, "file"), "");
    await expect(running.capture(join(home, "file", "x"))).rejects.toThrow();
    expect(world.vms[0]?.running).toBeTrue();
    await running.stop();
  });

  test("only the answer of the seal got lost: the capture goes on", async () => {
    const running = await factory.boot(spec());
    world.cutRestackAnswer = true;
    const { state } = await running.capture(join(home, "one"));
    expect(state.rootfs.lowers).toHaveLength(2);
    await running.stop();
  });

  test("terminal: the block daemon lost the stack, or the VM does not run again", async () => {
    const running = await factory.boot(spec());
    world.fail.restack = "restack_terminal";
    await expect(running.capture(join(home, "one"))).rejects.toMatchObject({ code: "capture_terminal" });
    world.fail = { capture: "ENOSPC", resume: "no answer" };
    await expect(running.capture(join(home, "two"))).rejects.toMatchObject({
      code: "capture_terminal",
      message: expect.stringContaining("no answer"),
    });
    world.fail = {};
    await running.stop();
  });

  test("a VM that cannot be killed keeps everything, and the stop can be tried again", async () => {
    const running = await factory.boot(spec());
    world.fail.kill = "stuck in the kernel";
    await expect(running.stop()).rejects.toThrow("stuck");
    expect(world.held.sort()).toEqual(["memory", "slot", "vm"]);
    world.fail = {};
    await running.stop();
  });

  test("checkpoints: the VM runs on, each is complete by itself and relative to the one before", async () => {
    const running = await factory.boot(spec());
    const states = [];
    for (let i = 0; i < 3; i++) states.push((await running.checkpoint(join(home, `point-${i}`))).state);
    expect(world.bases).toEqual([0, 1, 2]);
    expect(world.vms[0]!.running).toBeTrue();
    const { timings } = await running.checkpoint(join(home, "point-3"));
    expect(timings.stopped).toBeNumber();
    expect(timings.stopped!).toBeLessThan(timings.total!);
    expect(states.map((state) => state.memory.layers.length)).toEqual([1, 2, 3]);
    expect(states.map((state) => state.rootfs.lowers.length)).toEqual([2, 3, 4]);
    await running.stop();
    for (const [i, state] of states.entries()) {
      const resumed = await factory.resume({ identity: spec().identity, state });
      expect(
        state.memory.layers.every((layer) => layer.file.startsWith(join(home, `point-${i}/`))),
      ).toBeTrue();
      await resumed.stop();
    }
  });

  for (const step of ["capture", "restack", "resume"] as const) {
    test(`a checkpoint with a failing ${step}`, async () => {
      const running = await factory.boot(spec());
      world.fail[step] = "restack_failed";
      const error = await running.checkpoint(join(home, "point")).catch((thrown: unknown) => thrown);
      const fatal = step === "resume";
      expect(error instanceof AenvError && error.code === "capture_terminal").toBe(fatal);
      expect(existsSync(join(home, "point"))).toBeFalse();
      world.fail = {};
      if (!fatal) {
        expect(world.vms[0]!.running).toBeTrue();
        await running.checkpoint(join(home, "point"));
      }
      await running.stop();
    });
  }
});

describe("adoption by another process", () => {
  test("a running sandbox is taken over with all it has, goes on and is released as ever", async () => {
    const boot = spec();
    const first = await factory.boot(boot);
    await first.checkpoint(join(home, "point"));
    const lives = agent.inits.length;
    const next = open();
    const ticks = (world.vms[0]!.reference as { startTimeTicks: string }).startTimeTicks;
    expect(ticks).toBe(processStartTicks(process.pid)!);
    expect(await next.survivors()).toEqual([{ index: 7, policy: DEFAULT_POLICY }]);
    const adopted = await next.adopt(boot.identity);
    expect(adopted).toMatchObject({
      sandboxId: boot.identity.sandboxId,
      shape: boot.shape,
      envdVersion: "0.5.15",
    });
    // The same life: connections of the guest are kept.
    expect(new Set(agent.inits.slice(lives - 1).map((init) => init.lifecycleID)).size).toBe(1);
    expect(await next.cleanUp()).toEqual({ vms: 0, devices: 0, workDirs: 0 });
    expect((await adopted.checkpoint(join(home, "after"))).state.memory.layers).toHaveLength(2);
    await adopted.stop();
    world.held.splice(0);
  });

  test("what cannot be adopted says why, and the clean-up takes it away", async () => {
    const boot = spec();
    await expect(factory.adopt(boot.identity)).rejects.toMatchObject({ code: "sandbox_not_adoptable" });
    const first = await factory.boot(boot);
    const next = open();
    const device = (await blockClient.list())[0]!;
    await next.survivors();
    world.fail.slot = "rules: EPERM";
    await expect(next.adopt(boot.identity)).rejects.toThrow(
      "its network slot cannot be taken over: rules: EPERM",
    );
    world.fail = {};
    await blockClient.release(device.deviceId);
    await expect(next.adopt(boot.identity)).rejects.toThrow("the block daemon has no device");
    world.vms.splice(0);
    await expect(next.adopt(boot.identity)).rejects.toThrow("its VM has ended");
    // Not the test's own process, which stands for the VM.
    rmSync(join(home, "sandboxes", boot.identity.sandboxId, "live.json"));
    expect(await next.cleanUp()).toMatchObject({ devices: 0, workDirs: 2 });
    await first.stop();
    world.held.splice(0);
  });
});

describe("clean-up after a server that died", () => {
  test("VMs, known and not yet written down, devices and directories go; live ones stay", async () => {
    const mine = await factory.boot(spec());
    const dead = newId();
    const unknown = newId();
    const program = join(home, "qemu-system-fake");
    copyFileSync(Bun.which("tail")!, program);
    const start = (id: string): Bun.Subprocess => {
      const dir = join(home, "sandboxes", id, "g");
      mkdirSync(dir, { recursive: true });
      writeFileSync(join(dir, "console.log"), "");
      return Bun.spawn([program, "-f", join(dir, "console.log")], { stdio: ["ignore", "ignore", "ignore"] });
    };
    const [known, young] = [start(dead), start(unknown)];
    // Someone who only looks at a console is left alone.
    const reader = Bun.spawn(["tail", "-f", join(home, "sandboxes", dead, "g", "console.log")], {
      stdout: "ignore",
    });
    const deviceId = `sbx-${dead}-g`;
    const upper = {
      data: join(home, "sandboxes", dead, "g", "u.data"),
      index: join(home, "sandboxes", dead, "g", "u.index"),
    };
    const image = { lowers: [baseLayer()], upper, virtualSizeBytes: 64 * MIB };
    await blockClient.create({ deviceId, image, readOnly: false, exportKind: "nbd" });
    await blockClient.create({
      ...{ deviceId: "other", image: { lowers: [baseLayer()] } },
      readOnly: true,
      exportKind: "nbd",
    });
    mkdirSync(join(home, "run/vm", `${dead}-g`), { recursive: true });
    const vm = { vmId: dead, pid: known.pid, startTimeTicks: processStartTicks(known.pid) };
    const live = { version: 1, sandboxId: dead, generation: "g", deviceId, vm, startedAt: "x" };
    writeFileSync(join(home, "sandboxes", dead, "live.json"), JSON.stringify(live));
    writeFileSync(join(home, "sandboxes", unknown, "live.json"), "{ torn");

    expect(await factory.cleanUp()).toEqual({ vms: 2, devices: 1, workDirs: 3 });
    expect(await known.exited).not.toBe(0);
    expect(await young.exited).not.toBe(0);
    expect(reader.exitCode).toBeNull();
    reader.kill();
    const left = (await blockClient.list()).map((device) => device.deviceId).sort();
    expect(left).toEqual(["other", expect.stringContaining(mine.sandboxId)]);
    await blockClient.release("other");
    expect(await factory.cleanUp()).toEqual({ vms: 0, devices: 0, workDirs: 0 });
    await mine.stop();
  });

  test("a pid that belongs to another process by now is not touched", async () => {
    const id = newId();
    mkdirSync(join(home, "sandboxes", id), { recursive: true });
    const bystander = Bun.spawn(["sleep", "20"]);
    const vm = { vmId: id, pid: bystander.pid, startTimeTicks: "1" };
    const live = { version: 1, sandboxId: id, generation: "g", deviceId: "sbx-x", vm, startedAt: "x" };
    writeFileSync(join(home, "sandboxes", id, "live.json"), JSON.stringify(live));
    expect(await factory.cleanUp()).toEqual({ vms: 0, devices: 0, workDirs: 1 });
    expect(bystander.exitCode).toBeNull();
    bystander.kill();
    await bystander.exited;
  });
});
