import { afterAll, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, readdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import pino from "pino";
import { AenvError } from "../../lib/errors.ts";
import { BufferPool } from "../export/nbd/index.ts";
import { UblkServer } from "../export/ublk/index.ts";
import { Control } from "../export/ublk/layout.ts";
import { FakeUblk } from "../export/ublk/testing.ts";
import { openIoEngine } from "../io/index.ts";
import { openStack } from "../overlaybd/index.ts";
import { Devices } from "./devices.ts";
import { fromBlockdError, toBlockdError } from "./errors.ts";
import type { DeviceSpec } from "./protocol.ts";
import { DeviceTable } from "./table.ts";
import { DeviceOwner } from "./worker.ts";
import type { DeviceWorker } from "./worker-pool.ts";
import type { WorkerResults } from "./worker-protocol.ts";

const SIZE = 1 << 20;
const EIO = -5;
const root = mkdtempSync("/tmp/blockd-devices-");
const engine = openIoEngine();
const log = pino({ level: "silent" });
afterAll(async () => {
  await engine[Symbol.asyncDispose]();
  rmSync(root, { recursive: true, force: true });
});

/** The devices of a daemon with one worker in this thread. `ublk` throws where the host has none. */
function daemonIn(dir: string, ublk: () => UblkServer) {
  const owner = new DeviceOwner({
    openStack,
    pool: new BufferPool(),
    ublk,
    ublkStamp: 7,
    engine,
    nowhere: new Uint8Array(new ArrayBuffer(256 << 10)),
    log,
  });
  const worker: DeviceWorker = {
    load: 0,
    call: async <Op extends keyof WorkerResults>(request: Parameters<DeviceOwner["handle"]>[0]) => {
      try {
        return structuredClone(await owner.handle(structuredClone(request))) as WorkerResults[Op];
      } catch (error) {
        throw fromBlockdError(toBlockdError(error));
      }
    },
  };
  return { owner, worker, devices: new Devices(new DeviceTable(dir), [worker], dir, log) };
}

function place(name: string) {
  const dir = join(root, name);
  mkdirSync(dir);
  const spec = (deviceId: string): DeviceSpec => ({
    deviceId,
    image: {
      lowers: [],
      upper: { data: join(dir, "upper.data"), index: join(dir, "upper.index") },
      virtualSizeBytes: SIZE,
    },
    readOnly: false,
    exportKind: "ublk",
  });
  return { dir, spec, records: () => readdirSync(join(dir, "devices")) };
}

test("a device that the kernel does not let go of stays listed with its files, and its release can be tried again", async () => {
  const kernel = new FakeUblk();
  const { dir, spec, records } = place("stop");
  await using server = UblkServer.open(new BufferPool(), kernel);
  const { devices, owner, worker } = daemonIn(dir, () => server);
  await using _ = owner;
  const upper = () => kernel.opened(join(dir, "upper.data"));
  for (const [command, held] of [
    // Until it is stopped the kernel writes to it; after that nobody does.
    [Control.stopDev, 1],
    [Control.delDevAsync, 0],
  ] as const) {
    await devices.create(spec("one"));
    expect(upper()).toBe(1);
    kernel.refusals.set(command, [EIO, EIO]);
    for (let i = 0; i < 2; i++) {
      await expect(devices.release("one")).rejects.toMatchObject({ code: "ublk_eio" });
      expect(devices.list()).toMatchObject([
        { deviceId: "one", failure: expect.stringContaining("could not be released") },
      ]);
      expect(upper()).toBe(held);
      expect(records().length).toBe(1);
      await expect(devices.flush("one")).rejects.toMatchObject({ code: "device_unavailable" });
      await expect(devices.create(spec("two"))).rejects.toMatchObject({ code: "upper_in_use" });
    }
    await devices.release("one");
    expect(devices.list()).toEqual([]);
    expect([kernel.devices.size, upper(), records().length, worker.load]).toEqual([0, 0, 0, 0]);
  }
  // Made again after a release that failed: open and known to the next daemon.
  await devices.create(spec("one"));
  kernel.refusals.set(Control.stopDev, [EIO]);
  await expect(devices.release("one")).rejects.toThrow("cannot be stopped");
  expect((await devices.create(spec("one"))).failure).toBeUndefined();
  await devices.flush("one");
  expect([kernel.devices.size, upper(), records().length, worker.load]).toEqual([1, 1, 1, 1]);
  await devices.release("one");
});

test("a creation that fails half-way with a device the kernel keeps: nobody else gets its files", async () => {
  const kernel = new FakeUblk();
  const { dir, spec, records } = place("creation");
  await using server = UblkServer.open(new BufferPool(), kernel);
  const { devices, owner } = daemonIn(dir, () => server);
  await using _ = owner;
  kernel.refusals.set(Control.stopDev, [EIO]);
  rmSync(join(dir, "devices"), { recursive: true });
  await expect(devices.create(spec("one"))).rejects.toThrow("ENOENT");
  mkdirSync(join(dir, "devices"));
  await expect(devices.create(spec("two"))).rejects.toMatchObject({ code: "upper_in_use" });
  expect(devices.list()).toMatchObject([{ deviceId: "one", failure: expect.any(String) }]);
  expect((await devices.create(spec("one"))).failure).toBeUndefined();
  expect(records().length).toBe(1);
  await devices.release("one");
  await devices.create(spec("two"));
  await devices.release("two");
  expect(kernel.devices.size).toBe(0);
});

test("on a host without ublk the release of a device of an earlier daemon is done", async () => {
  const kernel = new FakeUblk();
  const { dir, spec, records } = place("without");
  await using server = UblkServer.open(new BufferPool(), kernel);
  const before = daemonIn(dir, () => server);
  await before.devices.create(spec("one"));
  expect((await before.devices.closeAll(false)).size).toBe(0);
  let code = "ublk_unusable";
  const after = daemonIn(dir, () => {
    throw new AenvError({ code, status: 503, message: "there is no ublk" });
  });
  await after.devices.restore();
  expect(after.devices.list()).toMatchObject([{ deviceId: "one", failure: "there is no ublk" }]);
  // Any other failure says nothing about the device.
  code = "ublk_timeout";
  await expect(after.devices.release("one")).rejects.toMatchObject({ code });
  expect([after.devices.list().length, records().length]).toEqual([1, 1]);
  code = "ublk_unusable";
  await after.devices.release("one");
  expect([after.devices.list().length, records().length]).toEqual([0, 0]);
});
