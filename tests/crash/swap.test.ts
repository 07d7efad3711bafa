import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
  existsSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { runCommand } from "../../src/lib/command.ts";
import type { CreateSandboxRequest } from "../../src/orchestrator/index.ts";
import { holdPool } from "../support/pool.ts";
import { busyboxTemplate, leftovers, type RealNode, startRealNode, testDeps } from "../support/real-node.ts";

/*
 * FR-24: what the guest wrote and the host has swapped out since is written all the same, and a capture holds that
 * alone. The swap is a compressed RAM disk made for the test, and it is the VMM's guest memory that goes there.
 */

const MIB = 1 << 20;
const BUFFER_MIB = 48;
const SWAP_MIB = 256;
const { pool: POOL } = holdPool();
const ZRAM = "/sys/class/zram-control";
const REQUEST: CreateSandboxRequest = {
  template: "busybox",
  timeoutSeconds: 600,
  onTimeout: "pause",
  autoResume: false,
  secure: true,
  metadata: {},
  envVars: {},
};

/** Swap on a RAM disk, taken away again; undefined, with the reason printed, where there can be none. */
async function makeSwap(): Promise<AsyncDisposable | undefined> {
  const lacking = !existsSync(ZRAM)
    ? "the kernel has no zram"
    : ["mkswap", "swapon", "swapoff", "gcc"].find((tool) => Bun.which(tool) === null);
  if (lacking !== undefined) {
    console.warn(`skipped, no swap to test with: ${lacking}`);
    return undefined;
  }
  await using stack = new AsyncDisposableStack();
  const number = readFileSync(`${ZRAM}/hot_add`, "utf8").trim();
  stack.defer(() => writeFileSync(`${ZRAM}/hot_remove`, number));
  const device = `/dev/zram${number}`;
  writeFileSync(`/sys/block/zram${number}/disksize`, String(SWAP_MIB * MIB));
  await runCommand(["mkswap", device]);
  await runCommand(["swapon", device]);
  stack.defer(async () => void (await runCommand(["swapoff", device])));
  const owned = stack.move();
  return { [Symbol.asyncDispose]: () => owned.disposeAsync() };
}

const deps = testDeps();
const swap = deps === undefined ? undefined : await makeSwap();

describe.skipIf(deps === undefined || swap === undefined)("guest memory in the host's swap", () => {
  let node: RealNode;
  let dir: string;

  beforeAll(async () => {
    dir = mkdtempSync("/tmp/life-swap-");
    const source = join(import.meta.dir, "../support/pageout.c");
    await runCommand(["gcc", "-std=c11", "-O1", "-Wall", "-Werror", "-o", join(dir, "pageout"), source]);
    node = await startRealNode({ deps: deps!, pool: POOL });
    await busyboxTemplate(node);
  }, 120_000);

  afterAll(async () => {
    await using stack = new AsyncDisposableStack();
    if (swap !== undefined) stack.use(swap);
    stack.defer(() => rmSync(dir, { recursive: true, force: true }));
    if (node === undefined) return;
    stack.defer(() => {
      for (const own of [node.home, node.runtimeDir]) rmSync(own, { recursive: true, force: true });
    });
    stack.defer(async () => expect(await leftovers(node)).toEqual([]));
    stack.use(node);
    for (const { id } of node.orchestrator.list()) await node.orchestrator.kill(id);
  }, 120_000);

  /** Process of a sandbox's VM. */
  const vmPid = (id: string): number => {
    const pid = readdirSync("/proc").find((entry) => {
      if (!/^\d+$/.test(entry)) return false;
      try {
        const words = readFileSync(`/proc/${entry}/cmdline`, "utf8");
        return words.includes(id) && readlinkSync(`/proc/${entry}/exe`).includes("qemu-system");
      } catch {
        return false; // ended meanwhile
      }
    });
    if (pid === undefined) throw new Error(`no VM of ${id}`);
    return Number(pid);
  };
  const swappedMiB = (pid: number): number =>
    Number(/^VmSwap:\s+(\d+) kB/m.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1]) / 1024;
  /** Sends what the guest wrote out to the swap. */
  const swapOut = async (id: string): Promise<void> => {
    const pid = vmPid(id);
    await runCommand([join(dir, "pageout"), String(pid), `${node.home}/memory/`]);
    // A page that a vCPU uses just then may stay.
    expect(swappedMiB(pid)).toBeGreaterThan(BUFFER_MIB * 0.9);
  };
  const hash = (id: string) => node.sh(id, "sha256sum < /dev/shm/buffer");
  /** Bytes of the memory layer that a snapshot added. */
  const storedBytes = async (id: string): Promise<number> => {
    const layer = (await node.repository.get(id))!.committed!.state.memory.layers.at(-1)!;
    return Bun.file(layer.file).size;
  };

  test("FR-24: it is in the snapshot and after the resume; the next snapshot stores what changed alone", async () => {
    const { id } = await node.orchestrator.create(REQUEST);
    const fill = (mib: number, seek: number) =>
      node.sh(id, `dd if=/dev/urandom of=/dev/shm/buffer bs=1M count=${mib} seek=${seek} conv=notrunc 2>&1`);
    await fill(BUFFER_MIB, 0);
    const first = await hash(id);

    await swapOut(id);
    const whole = await node.orchestrator.snapshot(id, {});
    expect(await storedBytes(whole.id)).toBeGreaterThan(BUFFER_MIB * MIB);

    await fill(16, 8);
    const second = await hash(id);
    await swapOut(id);
    const change = await node.orchestrator.snapshot(id, {});
    const stored = await storedBytes(change.id);
    expect(stored).toBeGreaterThan(16 * MIB);
    // The case allows 64 MiB; the whole buffer would be less.
    expect(stored).toBeLessThan(40 * MIB);

    await swapOut(id);
    await node.orchestrator.pause(id);
    await node.orchestrator.resume(id, 600);
    expect(await hash(id)).toBe(second);
    const copy = await node.orchestrator.create({ ...REQUEST, template: whole.id });
    expect(await hash(copy.id)).toBe(first);
  }, 120_000);
});
