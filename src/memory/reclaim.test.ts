import { afterAll, describe, expect, test } from "bun:test";
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { prepareGuest, type TestNetwork, testNetwork } from "../../tests/vmkit/index.ts";
import { createLogger } from "../lib/log.ts";
import { createQemuDriver, type VmLaunchSpec } from "../vmm/index.ts";
import { createMemoryService, type MemoryImage } from "./index.ts";

const guest = await prepareGuest("reclaim");
if (typeof guest === "string") console.log(`skipped: memory given back by real VMs: ${guest}`);

const log = createLogger("test");
log.level = "silent";
const MEMORY_MIB = 256;
const SIZE = MEMORY_MIB << 20;
const MIB = 2 ** 20;

/** What the file holds and how much of it is there: a hole punched into zeros changes only the latter. */
function content(file: string): { sha256: string; blocks: number } {
  return {
    sha256: createHash("sha256").update(readFileSync(file)).digest("hex"),
    blocks: statSync(file).blocks,
  };
}

/** Memory of a VMM that is its own, in MiB: what its guest wrote. */
function ownMiB(pid: number): number {
  return Number(/^RssAnon:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1]) / 1024;
}

/** The guest tells what is free after two seconds, in rounds. */
async function settledMiB(pid: number, below: number): Promise<number> {
  const deadline = performance.now() + 30_000;
  let now = ownMiB(pid);
  while (now > below && performance.now() < deadline) {
    await Bun.sleep(100);
    now = ownMiB(pid);
  }
  return now;
}

describe.skipIf(typeof guest === "string")("memory that a guest frees", () => {
  if (typeof guest === "string") return;
  afterAll(() => guest[Symbol.dispose]());
  const driver = createQemuDriver({ ...guest.qemu, mode: "tcg", kernelPath: guest.kernelPath, log });
  let made = 0;
  const spec = (network: TestNetwork, memoryFile: string): VmLaunchSpec => {
    const vmId = `vm${made++}`;
    const workDir = join(guest.dir, vmId);
    mkdirSync(workDir);
    return {
      vmId,
      workDir,
      shape: { vcpuCount: 1, memoryMiB: MEMORY_MIB },
      kernelPath: guest.kernelPath,
      initrdPath: guest.initrdPath,
      kernelArgs: ["quiet"],
      drives: [],
      network,
      memoryFile,
      consoleLogPath: join(workDir, "console.log"),
    };
  };

  test("goes back to the host; what is captured then, clones and the shared file are whole", async () => {
    const memory = createMemoryService({ cacheDir: join(guest.dir, "memory"), maxCacheBytes: 2 ** 31, log });
    const empty: MemoryImage = { sizeBytes: SIZE, layers: [] };
    await using scope = new AsyncDisposableStack();
    const networks = [scope.use(await testNetwork()), scope.use(await testNetwork())] as const;
    const zeros = scope.use(await memory.materialize(empty));
    const zerosBefore = content(zeros.file);
    const source = scope.use(await driver.launch(spec(networks[0], zeros.file)));
    const { boot } = await networks[0].ask("k");
    const { pid } = source.reference;
    const booted = ownMiB(pid);
    await networks[0].ask("a");
    const full = ownMiB(pid);
    expect(full).toBeGreaterThan(booted + 100);
    await source.pause();
    const unfreed = await memory.capture(source.reference, empty, join(guest.dir, "unfreed"));
    await source.resume();
    await networks[0].ask("f");
    const freed = await settledMiB(pid, booted + 25);
    expect(freed).toBeLessThan(booted + 25);

    await source.pause();
    const first = await memory.capture(source.reference, empty, join(guest.dir, "first"));
    const state = join(guest.dir, "state");
    await source.saveDeviceState(state);
    expect(first.storedBytes).toBeLessThan(unfreed.storedBytes - 100 * MIB);
    // Resumed in place, over a base with more layers than the mapped file.
    await source.resume();
    expect(await networks[0].ask("v")).toMatchObject({ boot, sum: "ok" });
    expect(content(zeros.file)).toEqual(zerosBefore);
    await source.kill();

    // Two clones on one file; one takes memory and gives it back, from under the file's own pages, too.
    const base = scope.use(await memory.materialize(first.image));
    const before = content(base.file);
    const clones = await Promise.all(
      networks.map((network) => driver.restore({ ...spec(network, base.file), deviceStatePath: state })),
    );
    for (const clone of clones) scope.use(clone);
    const restored = ownMiB(clones[0]!.reference.pid);
    await networks[0].ask("a");
    const cloneFull = ownMiB(clones[0]!.reference.pid);
    await networks[0].ask("f");
    const cloneFreed = await settledMiB(clones[0]!.reference.pid, cloneFull - 90);
    expect(cloneFreed).toBeLessThan(cloneFull - 90);
    expect(content(base.file)).toEqual(before);
    for (const network of networks) expect(await network.ask("v")).toMatchObject({ boot, sum: "ok" });

    // And what is captured of it then becomes a guest that is whole as well.
    await clones[0]!.pause();
    const second = await memory.capture(clones[0]!.reference, first.image, join(guest.dir, "second"));
    const secondState = join(guest.dir, "second.state");
    await clones[0]!.saveDeviceState(secondState);
    await clones[0]!.kill();
    const next = scope.use(await memory.materialize(second.image));
    const grandchild = scope.use(
      await driver.restore({ ...spec(networks[0], next.file), deviceStatePath: secondState }),
    );
    expect(await networks[0].ask("v")).toMatchObject({ boot, sum: "ok" });
    await networks[0].ask("a");
    expect(await networks[0].ask("v")).toMatchObject({ boot, sum: "ok" });
    expect(await networks[1].ask("v")).toMatchObject({ boot, sum: "ok" });
    await grandchild.kill();
    expect(content(base.file)).toEqual(before);
    const shown = (numbers: Record<string, number>): string =>
      Object.entries(numbers)
        .map(([what, mib]) => `${what} ${mib.toFixed(0)}`)
        .join(", ");
    console.log(
      `given back, MiB: ${shown({ booted, full, freed, restored, "clone full": cloneFull, "clone freed": cloneFreed })}; captured: ${shown({ unfreed: unfreed.storedBytes / MIB, freed: first.storedBytes / MIB, "clone's": second.storedBytes / MIB })}`,
    );
  }, 180_000);

  test("a state from before there was a balloon is restored with one, and saved with it", async () => {
    const memory = createMemoryService({ cacheDir: join(guest.dir, "older"), maxCacheBytes: 2 ** 31, log });
    const { shieldPath: _, ...qemu } = guest.qemu;
    const older = createQemuDriver({ ...qemu, mode: "tcg", kernelPath: guest.kernelPath, log });
    await using scope = new AsyncDisposableStack();
    const network = scope.use(await testNetwork());
    let image: MemoryImage = { sizeBytes: SIZE, layers: [] };
    let answer = { boot: "" };
    for (const [round, made] of [older, driver, driver].entries()) {
      const lease = scope.use(await memory.materialize(image));
      const plain = spec(network, lease.file);
      await using vm =
        round === 0
          ? await made.launch(plain)
          : await made.restore({ ...plain, deviceStatePath: join(guest.dir, `state-${round - 1}`) });
      const { boot, sum } = await network.ask();
      expect({ boot, sum }).toEqual({ boot: round === 0 ? boot : answer.boot, sum: "ok" });
      answer = { boot };
      await vm.pause();
      await vm.saveDeviceState(join(guest.dir, `state-${round}`));
      ({ image } = await memory.capture(vm.reference, image, join(guest.dir, `older-${round}`)));
    }
  }, 120_000);
});
