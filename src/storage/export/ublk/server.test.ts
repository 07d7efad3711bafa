import { expect, test } from "bun:test";
import { rmSync, symlinkSync } from "node:fs";
import { BufferPool } from "../nbd/index.ts";
import type { ExportTarget } from "../types.ts";
import { Control, encodeParams, State } from "./layout.ts";
import { UblkServer } from "./server.ts";
import { FakeUblk } from "./testing.ts";

const STAMP = 7;
const SIZE = 1 << 20;
const EIO = -5;
const params = encodeParams({ sizeBytes: SIZE, readOnly: false, maxIoBytes: 512 << 10 });

function refuse(): never {
  throw new Error("no I/O here");
}
const target: ExportTarget = {
  exportName: "test",
  extents: refuse,
  sizeBytes: SIZE,
  readOnly: false,
  tryRead: refuse,
  read: refuse,
  write: refuse,
  trim: refuse,
  writeZeroes: refuse,
  flush: refuse,
};

function exportIn(server: UblkServer, previous?: number) {
  const onEvent = (event: unknown) => {
    throw new Error(`an event: ${JSON.stringify(event)}`);
  };
  return server.export({
    target,
    stamp: STAMP,
    previous: previous === undefined ? undefined : { id: previous },
    onEvent,
  });
}

test("a device is made, left to the next server, taken over and removed", async () => {
  const kernel = new FakeUblk();
  await using server = UblkServer.open(new BufferPool(), kernel);
  const id = kernel.leftBehind(STAMP, params);
  const device = await exportIn(server, id);
  expect(device).toMatchObject({ id, recovered: true, serving: true });
  expect(kernel.devices.get(id)).toMatchObject({ state: State.live });
  const other = await exportIn(server);
  expect(other).toMatchObject({ id: 1, recovered: false, serving: true });
  await device.remove();
  await device.remove();
  await other.remove();
  expect([...kernel.devices.keys()]).toEqual([]);
});

test("a takeover that fails before the kernel has commands leaves nothing open, and the next succeeds", async () => {
  const kernel = new FakeUblk();
  await using server = UblkServer.open(new BufferPool(), kernel);
  const id = kernel.leftBehind(STAMP, params);
  // What can be opened and not be mapped.
  rmSync(kernel.nodePath(id));
  symlinkSync("/dev/null", kernel.nodePath(id));
  const before = kernel.opened("/dev/null");
  await expect(exportIn(server, id)).rejects.toThrow("ENODEV");
  expect(kernel.opened("/dev/null")).toBe(before);
  rmSync(kernel.nodePath(id));
  kernel.makeNode(id);
  const device = await exportIn(server, id);
  expect(device).toMatchObject({ id, recovered: true });
  await device.remove();
});

test("a takeover that fails at its end closes the device; its commands never reach another one", async () => {
  const kernel = new FakeUblk();
  await using server = UblkServer.open(new BufferPool(), kernel);
  const id = kernel.leftBehind(STAMP, params);
  kernel.refusals.set(Control.endUserRecovery, [EIO]);
  await expect(exportIn(server, id)).rejects.toThrow("EIO");
  expect(kernel.opened(kernel.nodePath(id))).toBe(0);
  const kept = kernel.devices.get(id)!.commands;
  expect(kept.length).toBe(64);
  const other = await exportIn(server);
  // They tell by their tags whose they are.
  const tags = new Set(kept);
  expect(kernel.devices.get(other.id)!.commands.filter((tag) => tags.has(tag))).toEqual([]);
  await server.discard(STAMP, id);
  expect(kernel.devices.has(id)).toBe(false);
  // Given back with the commands: the next device is marked as that one was.
  const next = await exportIn(server);
  expect(new Set(kernel.devices.get(next.id)!.commands)).toEqual(tags);
  await other.remove();
  await next.remove();
  // The server that ends takes its commands along: the next one takes the device over.
  const again = kernel.leftBehind(STAMP, params);
  kernel.refusals.set(Control.endUserRecovery, [EIO]);
  await expect(exportIn(server, again)).rejects.toThrow("EIO");
  kernel.serverEnds();
  expect(await exportIn(server, again)).toMatchObject({ id: again, recovered: true });
});

test("a removal that failed goes on where it failed", async () => {
  const kernel = new FakeUblk();
  await using server = UblkServer.open(new BufferPool(), kernel);
  const device = await exportIn(server);
  const node = kernel.nodePath(device.id);
  kernel.refusals.set(Control.stopDev, [EIO]);
  await expect(device.remove()).rejects.toThrow("cannot be stopped");
  expect(device.serving).toBe(true);
  expect(kernel.opened(node)).toBe(1);
  kernel.refusals.set(Control.delDevAsync, [EIO]);
  await expect(device.remove()).rejects.toThrow("cannot be deleted");
  expect(device.serving).toBe(false);
  expect(kernel.opened(node)).toBe(0);
  await device.remove();
  expect([...kernel.devices.keys()]).toEqual([]);
});
