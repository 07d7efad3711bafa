import { expect, test } from "bun:test";
import { Writable } from "node:stream";
import pino from "pino";
import type { NetworkService, NetworkSlot } from "../network/types.ts";
import type { PreparedVm, VmmDriver, VmNetwork } from "../vmm/types.ts";
import { createVmPool } from "./vm-pool.ts";

const log = pino({ level: "silent" });

/** Slots and processes that are counted. `fail` is asked before each process. */
function parts(fail: () => boolean = () => false) {
  const slots = new Set<number>();
  const vms = new Map<number, { ended: boolean }>();
  let made = 0;
  const acquire = async () => {
    const index = ++made;
    slots.add(index);
    return {
      index,
      netnsPath: `/run/netns/${index}`,
      tapName: "tap0",
      macAddress: "02:00:00:00:00:01",
      [Symbol.asyncDispose]: async () => void slots.delete(index),
    } as unknown as NetworkSlot;
  };
  const prepare = async (network: VmNetwork): Promise<PreparedVm> => {
    if (fail()) throw new Error("no process can be started");
    const index = Number(network.netnsPath.split("/").at(-1));
    const vm = { ended: false };
    vms.set(index, vm);
    return {
      network,
      get usable() {
        return !vm.ended;
      },
      [Symbol.asyncDispose]: async () => void vms.delete(index),
    };
  };
  const network = { acquire } as unknown as NetworkService;
  const vmm = { prepare } as unknown as VmmDriver;
  return { slots, vms, network, vmm };
}

async function until(what: () => boolean): Promise<void> {
  while (!what()) await Bun.sleep(2);
}

test("processes wait in slots of their own, and are replaced when they are taken", async () => {
  const { slots, vms, network, vmm } = parts();
  const pool = createVmPool({
    vmm,
    network,
    log,
    pool: { lowWatermark: 2, highWatermark: 3, concurrency: 2 },
  });
  expect(await pool?.take()).toBeUndefined();
  await pool?.start(5000);
  const taken = await pool?.take();
  expect(taken?.vm.network.netnsPath).toBe(taken?.slot.netnsPath ?? "");
  expect(vms.size).toBeGreaterThanOrEqual(2);
  // One was taken and left fewer than the low watermark: more are kept from now on.
  await until(() => pool?.idle === 3);
  await pool?.[Symbol.asyncDispose]();
  expect([...vms.keys()]).toEqual([taken?.slot.index ?? -1]);
  expect([...slots]).toEqual([taken?.slot.index ?? -1]);
});

test("one that ended meanwhile is removed, and its slot with it", async () => {
  const { slots, vms, network, vmm } = parts();
  await using pool = createVmPool({
    ...{ vmm, network, log },
    pool: { lowWatermark: 2, highWatermark: 2, maintenance: true },
  });
  await pool?.start(5000);
  const [first] = vms.keys();
  vms.get(first!)!.ended = true;
  const taken = await pool?.take();
  expect(taken?.slot.index).not.toBe(first);
  expect(taken?.vm.usable).toBe(true);
  expect(slots.has(first!)).toBe(false);
  expect(vms.has(first!)).toBe(false);
});

/** The same parts whose disposals fail once the work is done, and what is logged. */
function unruly(fails: { vm?: boolean; slot?: boolean; prepare?: boolean }) {
  const { slots, vms, network, vmm } = parts(() => fails.prepare === true);
  const failing = <T extends AsyncDisposable>(one: T, wrong: () => boolean, what: string): T => {
    const dispose = one[Symbol.asyncDispose].bind(one);
    return Object.defineProperty(one, Symbol.asyncDispose, {
      value: async () => {
        if (wrong() && what !== "slot") throw new Error(`${what} stays`);
        await dispose();
        if (wrong()) throw new Error(`${what} stays`);
      },
    });
  };
  const lines: string[] = [];
  const sink = new Writable({
    write: (chunk, _, done) => {
      lines.push(String(chunk));
      done();
    },
  });
  return {
    ...{ slots, vms, lines },
    network: {
      acquire: async () => failing(await network.acquire(), () => fails.slot === true, "slot"),
    } as unknown as NetworkService,
    vmm: {
      prepare: async (at: VmNetwork) => failing(await vmm.prepare!(at), () => fails.vm === true, "process"),
    } as unknown as VmmDriver,
    log: pino({ base: null }, sink),
  };
}

test("a process that cannot be removed takes neither its slot with it nor the caller's start", async () => {
  const fails = { vm: false, slot: false };
  const { slots, vms, lines, ...made } = unruly(fails);
  await using pool = createVmPool({ ...made, pool: { lowWatermark: 1, highWatermark: 1 } });
  await pool?.start(5000);
  const [first] = vms.keys();
  vms.get(first!)!.ended = true;
  fails.vm = true;
  const taken = await pool?.take();
  expect(taken?.slot.index).not.toBe(first);
  expect(slots.has(first!)).toBe(false);
  expect(lines.filter((line) => line.includes("process stays"))).toHaveLength(1);
  fails.vm = false;
});

test("a slot that cannot be removed hides not why its process did not start", async () => {
  const { lines, ...made } = unruly({ prepare: true, slot: true });
  await using pool = createVmPool({ ...made, pool: { lowWatermark: 1, highWatermark: 1 } });
  await pool?.start(50);
  expect(await pool?.take()).toBeUndefined();
  expect(lines.some((line) => line.includes("no process can be started"))).toBe(true);
  expect(lines.some((line) => line.includes("slot stays"))).toBe(true);
});

test("what cannot be started costs nobody anything, and is tried again", async () => {
  let failing = true;
  let tried = 0;
  const { slots, network, vmm } = parts(() => {
    tried++;
    return failing;
  });
  await using pool = createVmPool({ vmm, network, log, pool: { lowWatermark: 1, highWatermark: 1 } });
  await pool?.start(50);
  expect(await pool?.take()).toBeUndefined();
  expect(tried).toBe(1);
  expect(slots.size).toBe(0);
  failing = false;
  await until(() => pool?.idle === 1);
  expect(tried).toBe(2);
});

test("nobody waits for a pool that is not filled, or that cannot be", async () => {
  const never = 2 ** 31 - 1;
  const options = { lowWatermark: 1, highWatermark: 1 };
  const { network, vmm } = parts();
  await using unkept = createVmPool({ vmm, network, log, pool: { ...options, maintenance: false } });
  await unkept?.start(never);
  expect(unkept?.idle).toBe(0);
  const failing = parts(() => true);
  await using unfilled = createVmPool({ ...failing, log, pool: options });
  await unfilled?.start(never);
  expect(unfilled?.idle).toBe(0);
});

test("a VMM without such processes has no pool", () => {
  const { network } = parts();
  const vmm = {} as unknown as VmmDriver;
  expect(createVmPool({ vmm, network, log, pool: { lowWatermark: 1, highWatermark: 1 } })).toBeUndefined();
});
