import { afterAll, describe, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { eventually } from "../../tests/support/eventually.ts";
import { nbdDisk, prepareGuest, type TestNetwork, testNetwork } from "../../tests/vmkit/index.ts";
import { createLogger } from "../lib/log.ts";
import { inspectLayer, openStack } from "../storage/overlaybd/index.ts";
import { createQemuDriver, type VmDrive, type VmLaunchSpec } from "../vmm/index.ts";
import { captureMemory } from "./capture.ts";
import { createMemoryService, type MemoryImage } from "./index.ts";

const guest = await prepareGuest("capture");
if (typeof guest === "string") console.log(`skipped: memory of real VMs: ${guest}`);

const log = createLogger("test");
log.level = "silent";
const MEMORY_MIB = 192;
const SIZE = MEMORY_MIB << 20;

function sha256(file: string): string {
  return createHash("sha256").update(readFileSync(file)).digest("hex");
}

describe.skipIf(typeof guest === "string")("memory of a real VM", () => {
  if (typeof guest === "string") return;
  afterAll(() => guest[Symbol.dispose]());
  const driver = createQemuDriver({
    ...guest.qemu,
    mode: "tcg",
    kernelPath: guest.kernelPath,
    log,
  });
  let made = 0;
  const spec = (network: TestNetwork, memoryFile: string, drives: VmDrive[]): VmLaunchSpec => {
    const vmId = `vm${made++}`;
    const workDir = join(guest.dir, vmId);
    mkdirSync(workDir);
    return {
      vmId,
      workDir,
      shape: { vcpuCount: 2, memoryMiB: MEMORY_MIB },
      kernelPath: guest.kernelPath,
      initrdPath: guest.initrdPath,
      kernelArgs: ["quiet"],
      drives,
      network,
      memoryFile,
      consoleLogPath: join(workDir, "console.log"),
    };
  };

  test("pause, capture, kill, two clones with own disks that go on; second captures are small", async () => {
    const memory = createMemoryService({
      cacheDir: join(guest.dir, "memory"),
      maxCacheBytes: 1 << 30,
      log,
    });
    const empty: MemoryImage = { sizeBytes: SIZE, layers: [] };
    await using scope = new AsyncDisposableStack();
    const networks = [scope.use(await testNetwork()), scope.use(await testNetwork())] as const;
    const zeros = scope.use(await memory.materialize(empty));
    const disk = scope.use(await nbdDisk(guest.dir, "source"));
    const source = scope.use(await driver.launch(spec(networks[0], zeros.file, [disk])));
    const booted = await networks[0].ask();
    expect(booted).toMatchObject({ sum: "ok", disk: "ok" });

    await source.pause();
    const state1 = join(guest.dir, "state1");
    await source.saveDeviceState(state1);
    const layer1 = join(guest.dir, "layer1");
    let longestStall = 0;
    let last = performance.now();
    const heartbeat = setInterval(() => {
      longestStall = Math.max(longestStall, performance.now() - last);
      last = performance.now();
    }, 5);
    const first = await memory.capture(source.reference, empty, layer1);
    clearInterval(heartbeat);
    expect(first.newLayer?.file).toBe(layer1);
    expect(first.image.layers).toEqual([first.newLayer!]);
    expect(first.storedBytes).toBeGreaterThan(8 << 20);
    expect(first.dirtyBytes).toBeGreaterThanOrEqual(first.storedBytes);
    expect(inspectLayer(layer1).virtualSizeBytes).toBe(SIZE);
    // The other way to find written pages says the same.
    const twin = await captureMemory({
      vm: source.reference,
      startTimeTicks: source.reference.startTimeTicks,
      base: empty,
      layerPath: join(guest.dir, "twin"),
      log,
      noScan: true,
    });
    expect(twin.storedBytes).toBe(first.storedBytes);
    // And so does comparing all memory, which is what happens without a known base file.
    const whole = await captureMemory({
      vm: source.reference,
      startTimeTicks: source.reference.startTimeTicks,
      base: first.image,
      layerPath: join(guest.dir, "whole"),
      log,
    });
    expect(whole.newLayer).toBeUndefined();
    expect(existsSync(join(guest.dir, "whole"))).toBe(false);

    // Resumed in place, little changes, and only that is in the next layer.
    const atPause = await (async () => {
      await source.resume();
      return await networks[0].ask("m");
    })();
    expect(atPause.boot).toBe(booted.boot);
    await source.pause();
    const state2 = join(guest.dir, "state2");
    await source.saveDeviceState(state2);
    const second = await memory.capture(source.reference, first.image, join(guest.dir, "layer2"));
    expect(second.storedBytes).toBeGreaterThan(1 << 20);
    expect(second.storedBytes).toBeLessThan(first.storedBytes / 2);
    expect(second.image.layers.length).toBe(2);
    await source.kill();
    expect((await source.exited).signal ?? (await source.exited).exitCode).toBe(0);
    await expect(memory.capture(source.reference, first.image, join(guest.dir, "late"))).rejects.toThrow(
      "is gone",
    );

    // What was captured is what the chain says.
    const base = scope.use(await memory.materialize(second.image));
    expect(statSync(base.file).size).toBe(SIZE);
    {
      using stack = openStack({ lowers: second.image.layers, virtualSizeBytes: SIZE });
      const all = Buffer.alloc(SIZE);
      stack.read(0, all);
      expect(createHash("sha256").update(all).digest("hex")).toBe(sha256(base.file));
    }
    const digest = sha256(base.file);

    // Two clones at once, in two namespaces with the same tap name, address and MAC.
    const disks = [
      scope.use(await nbdDisk(guest.dir, "clone0", false, disk.image)),
      scope.use(await nbdDisk(guest.dir, "clone1", false, disk.image)),
    ];
    const restoring = performance.now();
    const clones = await Promise.all(
      networks.map((network, i) =>
        driver.restore({ ...spec(network, base.file, [disks[i]!]), deviceStatePath: state2 }),
      ),
    );
    const restoreMs = performance.now() - restoring;
    for (const clone of clones) scope.use(clone);
    const answers = await Promise.all(networks.map((network) => network.ask("m")));
    for (const answer of answers) {
      expect(answer.boot).toBe(booted.boot);
      expect(answer.sum).toBe("ok");
      expect(answer.count).toBeGreaterThanOrEqual(atPause.count);
    }
    for (const [i, network] of networks.entries()) {
      const later = await eventually("the clone counts on", async () => {
        const answer = await network.ask();
        return answer.count > answers[i]!.count ? answer : undefined;
      });
      expect(later).toMatchObject({ sum: "ok", disk: "ok" });
    }

    // A clone's own changes make one small layer on top; the shared file never changed.
    await clones[1]!.pause();
    const third = await memory.capture(clones[1]!.reference, second.image, join(guest.dir, "layer3"));
    expect(third.image.layers.length).toBe(3);
    expect(third.storedBytes).toBeGreaterThan(64 << 10);
    expect(third.storedBytes).toBeLessThan(first.storedBytes / 2);
    expect(sha256(base.file)).toBe(digest);
    console.log(
      `capture: first ${(first.storedBytes / 2 ** 20).toFixed(1)} MiB in ${first.scanMs.toFixed(1)}+${first.writeMs.toFixed(0)} ms (longest stall of the event loop ${longestStall.toFixed(0)} ms), second ${(second.storedBytes / 2 ** 20).toFixed(1)} MiB in ${second.scanMs.toFixed(1)}+${second.writeMs.toFixed(0)} ms, clone's ${(third.storedBytes / 2 ** 20).toFixed(1)} MiB in ${third.scanMs.toFixed(1)}+${third.writeMs.toFixed(0)} ms; two restores at once: ${restoreMs.toFixed(0)} ms`,
    );
  }, 180_000);
});
