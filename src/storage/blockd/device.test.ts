import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import pino from "pino";
import { AenvError } from "../../lib/errors.ts";
import { Command, CommandFlag } from "../export/nbd/codec.ts";
import { BufferPool, NbdErrno } from "../export/nbd/index.ts";
import { RawClient, request } from "../export/nbd/testing.ts";
import type { LayerStack } from "../overlaybd/types.ts";
import { alignedAccess, openDevice } from "./device.ts";

const SIZE = 1 << 20;
const dir = mkdtempSync("/tmp/blockd-device-");
afterAll(() => rmSync(dir, { recursive: true, force: true }));

interface MemoryStack extends LayerStack {
  readonly memory: Uint8Array;
  readonly faults: { write?: Error; flush?: Error; read?: Error; restack?: Error };
  flushes: number;
}

/** A stack over memory that insists on whole sectors, as the real one may. */
function memoryStack(): MemoryStack {
  const memory = new Uint8Array(SIZE);
  const faults: MemoryStack["faults"] = {};
  const aligned = (offset: number, length: number) => {
    if (offset % 512 !== 0 || length % 512 !== 0 || offset + length > SIZE)
      throw new RangeError("not sectors");
  };
  return {
    memory,
    faults,
    flushes: 0,
    virtualSizeBytes: SIZE,
    readOnly: false,
    image: { lowers: [] },
    read(offset, target) {
      aligned(offset, target.length);
      if (faults.read !== undefined) throw faults.read;
      target.set(memory.subarray(offset, offset + target.length));
    },
    write(offset, source) {
      aligned(offset, source.length);
      if (faults.write !== undefined) throw faults.write;
      memory.set(source, offset);
    },
    discard(offset, length) {
      aligned(offset, length);
      memory.fill(0, offset, offset + length);
    },
    flush() {
      if (faults.flush !== undefined) throw faults.flush;
      this.flushes++;
    },
    *mappedExtents() {
      yield { offsetBytes: 0, lengthBytes: SIZE, zeroed: false };
    },
    restack(sealedPath) {
      if (faults.restack !== undefined) throw faults.restack;
      return { file: sealedPath };
    },
    seal(sealedPath) {
      return { file: sealedPath };
    },
    compactStep: () => ({ done: true, movedBytes: 0, flushNeeded: false }),
    beginFlush: () => undefined,
    pin: () => () => undefined,
    grow: () => undefined,
    swapLowers: () => [],
    stats: () => ({
      upperDataBytes: 1,
      upperLiveBytes: 2,
      upperIndexBytes: 0,
      compactionDue: false,
      lowerCount: 3,
      upperMappings: 4,
      lowerMappings: 5,
      warnings: [],
    }),
    [Symbol.dispose]: () => undefined,
  };
}

function open(stack: LayerStack, name: string) {
  const socketPath = join(dir, `${name}.sock`);
  const device = openDevice(
    {
      op: "open",
      deviceId: name,
      image: { lowers: [], upper: { data: join(dir, "absent") }, virtualSizeBytes: SIZE },
      readOnly: false,
      socketPath,
      upperMustExist: false,
    },
    () => stack,
    new BufferPool(),
    pino({ level: "silent" }),
  );
  return { device, socketPath };
}

test("any alignment reads, writes and drops the same bytes as plain memory", () => {
  const stack = memoryStack();
  const access = alignedAccess(stack);
  const model = new Uint8Array(SIZE);
  const seed = 4711;
  let x = seed;
  const random = (below: number) => {
    x = (Math.imul(x, 1664525) + 1013904223) >>> 0;
    return Math.floor((x / 2 ** 32) * below);
  };
  for (let round = 0; round < 500; round++) {
    const offset = random(SIZE - 5000);
    const length = 1 + random(5000);
    switch (random(3)) {
      case 0: {
        const data = Uint8Array.from({ length }, () => random(256));
        access.write(offset, data);
        model.set(data, offset);
        break;
      }
      case 1: {
        const edges = access.discard(offset, length);
        for (const edge of edges) access.write(edge.offsetBytes, new Uint8Array(edge.lengthBytes));
        model.fill(0, offset, offset + length);
        break;
      }
      default: {
        const got = new Uint8Array(length);
        access.read(offset, got);
        expect(Buffer.compare(got, model.subarray(offset, offset + length))).toBe(0);
      }
    }
  }
  expect(Buffer.compare(stack.memory, model)).toBe(0);
});

test("a full disk reaches the guest as ENOSPC, and the device works on", async () => {
  const stack = memoryStack();
  const { device, socketPath } = open(stack, "full");
  using _ = device;
  using client = await RawClient.open(socketPath, "full");
  const data = new Uint8Array(4096).fill(7);
  stack.faults.write = new AenvError({ code: "disk_full", status: 507, message: "no space left" });
  client.send(request(Command.write, 1, 0, 4096, CommandFlag.fua, data));
  expect(await client.answer()).toMatchObject({ cookie: 1, error: NbdErrno.ENOSPC });
  stack.faults.write = undefined;
  client.send(request(Command.write, 2, 0, 4096, CommandFlag.fua, data));
  expect(await client.answer()).toMatchObject({ cookie: 2, error: 0 });
  expect(Buffer.from(await client.read(3, 0, 4096)).equals(data)).toBe(true);
  expect(device.stats()).toMatchObject({
    writeOps: 1,
    writeBytes: 4096,
    readOps: 1,
    connections: 1,
    lowerCount: 3,
  });
});

test("after a failed flush no later one claims success, and no layer is sealed; reads go on", async () => {
  const stack = memoryStack();
  const { device, socketPath } = open(stack, "lost");
  using _ = device;
  using client = await RawClient.open(socketPath, "lost");
  client.send(request(Command.write, 1, 0, 512, 0, new Uint8Array(512).fill(1)));
  expect((await client.answer()).error).toBe(0);
  stack.faults.flush = new AenvError({ code: "os_eio", message: "write-back failed" });
  client.send(request(Command.flush, 2, 0, 0));
  expect((await client.answer()).error).toBe(NbdErrno.EIO);
  stack.faults.flush = undefined;
  client.send(request(Command.flush, 3, 0, 0));
  expect((await client.answer()).error).toBe(NbdErrno.EIO);
  expect(() => device.restack(join(dir, "sealed"), { data: join(dir, "fresh") })).toThrow("lost writes");
  expect((await client.read(4, 0, 512))[0]).toBe(1);
});

test("the first flush covers what an earlier process left in the page cache, a later one with nothing written is free", () => {
  const files = { data: join(dir, "inherited.data"), index: join(dir, "inherited.index") };
  const stack: MemoryStack = { ...memoryStack(), image: { lowers: [], upper: files } };
  const { device } = open(stack, "inherited");
  using _ = device;
  // It opens the files to sync them: seen by their absence.
  expect(() => device.flush()).toThrow("inherited.data");
  device[Symbol.dispose]();

  for (const file of Object.values(files)) writeFileSync(file, "");
  const again = open(stack, "inherited");
  using __ = again.device;
  again.device.flush();
  expect(stack.flushes).toBe(1);
  again.device.flush();
  expect(stack.flushes).toBe(1);
});

test("a restack that fails half-way makes the device refuse everything, any other failure does not", async () => {
  const stack = memoryStack();
  const { device, socketPath } = open(stack, "terminal");
  using _ = device;
  using client = await RawClient.open(socketPath, "terminal");
  const restack = () => device.restack(join(dir, "sealed2"), { data: join(dir, "fresh2") });
  stack.faults.restack = new AenvError({ code: "disk_full", message: "no space" });
  expect(restack).toThrow("no space");
  expect((await client.read(1, 0, 512)).length).toBe(512);
  stack.faults.restack = new AenvError({ code: "restack_terminal", message: "half-way" });
  expect(restack).toThrow("half-way");
  await expect(client.read(2, 0, 512)).rejects.toThrow(`${NbdErrno.EIO}`);
  expect(restack).toThrow("cannot be used any more");
});

test("a seventeenth connection is turned away", async () => {
  const { device, socketPath } = open(memoryStack(), "limit");
  using _ = device;
  const clients: RawClient[] = [];
  for (let i = 0; i < 16; i++) clients.push(await RawClient.open(socketPath, "limit"));
  const extra = await RawClient.connect(socketPath);
  await extra.untilClosed();
  expect(device.stats().connections).toBe(16);
  for (const client of clients) client[Symbol.dispose]();
});
