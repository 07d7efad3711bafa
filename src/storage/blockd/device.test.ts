import { dlopen } from "bun:ffi";
import { afterAll, expect, test } from "bun:test";
import { closeSync, lstatSync, mkdtempSync, openSync, readdirSync, readlinkSync, rmSync } from "node:fs";
import { join } from "node:path";
import pino from "pino";
import { AenvError } from "../../lib/errors.ts";
import { Command, CommandFlag } from "../export/nbd/codec.ts";
import { BufferPool, NbdErrno } from "../export/nbd/index.ts";
import { RawClient, request } from "../export/nbd/testing.ts";
import { type IoEngine, openIoEngine } from "../io/index.ts";
import { createLayerWriter, hostDisk, mergeLayers, openStack } from "../overlaybd/index.ts";
import { LayerFileWriter } from "../overlaybd/layer-writer.ts";
import type { LayerStack, UpperRef } from "../overlaybd/types.ts";
import { alignedAccess } from "./aligned.ts";
import { openDevice } from "./device.ts";

const SIZE = 1 << 20;
const dir = mkdtempSync("/tmp/blockd-device-");
const engine = openIoEngine();
afterAll(async () => {
  await engine[Symbol.asyncDispose]();
  rmSync(dir, { recursive: true, force: true });
});

interface MemoryStack extends LayerStack {
  readonly memory: Uint8Array;
  readonly faults: { write?: Error; flush?: Error; read?: Error; restack?: Error };
  flushes: number;
  dirty: boolean;
  closed: boolean;
  /** So many tries to read from memory fail. */
  cold: number;
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
    dirty: false,
    closed: false,
    cold: 0,
    virtualSizeBytes: SIZE,
    readOnly: false,
    image: { lowers: [] },
    read(offset, target) {
      aligned(offset, target.length);
      if (faults.read !== undefined) throw faults.read;
      target.set(memory.subarray(offset, offset + target.length));
    },
    tryRead(offset, target) {
      if (this.cold > 0) {
        this.cold--;
        return false;
      }
      this.read(offset, target);
      return true;
    },
    locate: (offset, length) => aligned(offset, length),
    rawRange: () => undefined,
    write(offset, source) {
      aligned(offset, source.length);
      if (faults.write !== undefined) throw faults.write;
      this.dirty = true;
      memory.set(source, offset);
    },
    discard(offset, length) {
      aligned(offset, length);
      memory.fill(0, offset, offset + length);
    },
    flush: () => undefined,
    beginFlush() {
      if (!this.dirty) return undefined;
      this.dirty = false;
      const datasync = () => {
        if (faults.flush !== undefined) throw faults.flush;
        this.flushes++;
      };
      const [data, index] = ["data", "index"].map((name) => ({ name, datasync }));
      return { first: [data!], afterFirst: () => [index!], done: () => undefined, failed: () => undefined };
    },
    *mappedExtents() {
      yield { offsetBytes: 0, lengthBytes: SIZE, zeroed: false };
    },
    restack: (sealedPath) => ({ file: sealedPath }),
    *restackSteps(sealedPath) {
      yield [{ name: "record", datasync: () => undefined }];
      if (faults.restack !== undefined) throw faults.restack;
      return { file: sealedPath };
    },
    seal(sealedPath) {
      return { file: sealedPath };
    },
    compactStep: () => ({ done: true, movedBytes: 0, flushNeeded: false }),
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
    [Symbol.dispose]() {
      this.closed = true;
    },
  };
}

async function open(stack: LayerStack, name: string, io: IoEngine = engine, directIo = false) {
  const socketPath = join(dir, `${name}.sock`);
  const device = await openDevice(
    {
      op: "open",
      deviceId: name,
      image: { lowers: [], upper: { data: join(dir, "absent") }, virtualSizeBytes: SIZE },
      readOnly: false,
      exportKind: "nbd",
      directIo,
      ublkId: undefined,
      socketPath,
      upperMustExist: false,
    },
    {
      openStack: () => stack,
      pool: new BufferPool(),
      ublk: () => {
        throw new Error("not here");
      },
      ublkStamp: 1,
      engine: io,
      nowhere: new Uint8Array(new ArrayBuffer(256 << 10)),
      log: pino({ level: "silent" }),
    },
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
  const { device, socketPath } = await open(stack, "full");
  await using _ = device;
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
  const { device, socketPath } = await open(stack, "lost");
  await using _ = device;
  using client = await RawClient.open(socketPath, "lost");
  client.send(request(Command.write, 1, 0, 512, 0, new Uint8Array(512).fill(1)));
  expect((await client.answer()).error).toBe(0);
  stack.faults.flush = new AenvError({ code: "os_eio", message: "write-back failed" });
  client.send(request(Command.flush, 2, 0, 0));
  expect((await client.answer()).error).toBe(NbdErrno.EIO);
  stack.faults.flush = undefined;
  client.send(request(Command.flush, 3, 0, 0));
  expect((await client.answer()).error).toBe(NbdErrno.EIO);
  await expect(device.restack(join(dir, "sealed"), { data: join(dir, "fresh") })).rejects.toThrow(
    "lost writes",
  );
  expect((await client.read(4, 0, 512))[0]).toBe(1);
});

test("flushes that come while one is under way share the next; a flush with nothing written is free", async () => {
  const stack = memoryStack();
  const { device, socketPath } = await open(stack, "shared");
  await using _ = device;
  using client = await RawClient.open(socketPath, "shared");
  const write = (cookie: number) => request(Command.write, cookie, 0, 512, 0, new Uint8Array(512));
  const flush = (cookie: number) => request(Command.flush, cookie, 0, 0);
  client.send(Buffer.concat([write(1), flush(2), write(3), flush(4), flush(5), write(6), flush(7)]));
  const seen = new Set<number>();
  while (seen.size < 7) {
    const answer = await client.answer();
    expect(answer.error).toBe(0);
    seen.add(answer.cookie);
  }
  // Data and index each, for the first flush and for the one that serves the other three.
  expect(stack.flushes).toBe(4);
  await device.flush();
  expect(stack.flushes).toBe(4);
  expect(device.stats()).toMatchObject({ flushOps: 5 });
  expect(device.stats().flushSeconds.counts.reduce((sum, count) => sum + count, 0)).toBe(5);
});

test("a read that finds nothing in memory is answered all the same, and waits in the end", async () => {
  const stack = memoryStack();
  stack.memory.fill(9);
  const { device, socketPath } = await open(stack, "late");
  await using _ = device;
  using client = await RawClient.open(socketPath, "late");
  for (const cold of [1, 2, 4, 100]) {
    stack.cold = cold;
    expect(Buffer.from(await client.read(cold, 513, 5000)).equals(Buffer.alloc(5000, 9))).toBe(true);
  }
  expect(device.stats()).toMatchObject({ readOps: 4, lateReadOps: 4, readBytes: 20_000 });
  stack.cold = 1;
  stack.faults.read = new AenvError({ code: "os_eio", message: "the disk is broken" });
  await expect(client.read(200, 0, 512)).rejects.toThrow(`${NbdErrno.EIO}`);
  expect(device.stats().errorOps).toBe(1);
});

test("layers that were dropped from the page cache are read right, alone and as a stream", async () => {
  const size = 8 << 20;
  const content = new Uint8Array(size).map((_, i) => (i * 2654435761) >>> 13);
  const layer = join(dir, "layer");
  {
    using writer = createLayerWriter(layer, { virtualSizeBytes: size });
    writer.append(0, content);
    writer.finish();
  }
  const libc = dlopen("libc.so.6", {
    posix_fadvise: { args: ["i32", "i64", "i64", "i32"], returns: "i32" },
  });
  const forget = () => {
    const fd = openSync(layer, "r");
    const POSIX_FADV_DONTNEED = 4;
    libc.symbols.posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    closeSync(fd);
  };
  const { device, socketPath } = await open(openStack({ lowers: [{ file: layer }] }), "cold");
  await using _ = device;
  using client = await RawClient.open(socketPath, "cold");
  let cookie = 0;
  for (const [from, step, count] of [
    [4096, 1_234_567, 6],
    [0, 128 << 10, 64],
  ] as const) {
    forget();
    for (let i = 0; i < count; i++) {
      const offset = from + i * step;
      const length = Math.min(128 << 10, size - offset);
      const got = await client.read(++cookie, offset, length);
      expect(Buffer.compare(got, content.subarray(offset, offset + length))).toBe(0);
    }
  }
  expect(device.stats().readOps).toBe(70);
});

test("with direct I/O lower layers are read around the page cache, and everything reads the same", async () => {
  const size = 4 << 20;
  const content = new Uint8Array(size).map((_, i) => (i * 31 + (i >>> 9)) & 255);
  const make = (name: string, compressed: boolean) => {
    const file = join(dir, name);
    using writer = new LayerFileWriter(hostDisk, file, {
      virtualSizeBytes: size,
      ...(compressed ? { compression: { algorithm: "lz4", blockSizeBytes: 4096 } } : {}),
    });
    // Holes in between, and pieces that begin in the middle of a page.
    for (let at = 0; at + 65_536 <= size; at += 65_536) {
      writer.append(at + 512, content.subarray(at + 512, at + 61_440));
      content.fill(0, at, at + 512).fill(0, at + 61_440, at + 65_536);
    }
    return writer.finish();
  };
  for (const compressed of [false, true]) {
    const lower = make(`direct-${compressed}`, compressed);
    const name = (what: string) => join(dir, `direct-${compressed}-${what}`);
    const upper: UpperRef = { data: name("data"), index: name("index") };
    const stack = openStack({ lowers: [lower], upper });
    const { device, socketPath } = await open(stack, `direct-${compressed}`, engine, true);
    await using _ = device;
    using client = await RawClient.open(socketPath, `direct-${compressed}`);
    let cookie = 0;
    const read = async (offset: number, length: number) => {
      const got = await client.read(++cookie, offset, length);
      expect(Buffer.compare(got, content.subarray(offset, offset + length)), `${offset}+${length}`).toBe(0);
    };
    const before = engine.stats().requests;
    for (let i = 0; i < 200; i++) {
      const offset = (i * 7919 * 512) % (size - 70_144);
      await read(offset - (i % 7 === 0 ? offset % 3 : 0), [512, 4096, 4096, 60_000, 69_000, 1000][i % 6]!);
      if (i % 10 === 0) {
        const data = new Uint8Array(1024).fill(i);
        client.send(request(Command.write, ++cookie, offset, 1024, 0, data));
        expect((await client.answer()).error).toBe(0);
        content.set(data, offset);
        await read(offset - (offset % 4096), 8192);
      }
    }
    // What is in the page cache is read from the disk all the same, and only where the layer is not compressed.
    const asked = engine.stats().requests - before;
    if (compressed) expect(asked).toBe(0);
    else expect(asked).toBeGreaterThan(50);
    await device.restack(name("sealed"), { data: name("data2"), index: name("index2") });
    for (let i = 0; i < 50; i++) await read((i * 104_729 * 512) % (size - 4096), 4096);
  }
});

test("with direct I/O layers that were replaced are let go of, reads under way included", async () => {
  const lowers = [0, 1, 2].map((i) => {
    using writer = new LayerFileWriter(hostDisk, join(dir, `replaced-${i}`), { virtualSizeBytes: SIZE });
    writer.append(i * 65_536, new Uint8Array(65_536).fill(i + 1));
    return writer.finish();
  });
  const { device, socketPath } = await open(openStack({ lowers }), "replaced", engine, true);
  await using _ = device;
  using client = await RawClient.open(socketPath, "replaced");
  const opened = () =>
    readdirSync("/proc/self/fd").flatMap((fd) => {
      const path = `/proc/self/fd/${fd}`;
      // The directory's own descriptor is gone by now.
      return lstatSync(path, { throwIfNoEntry: false }) ? [readlinkSync(path)] : [];
    });
  const held = () => opened().filter((path) => path.startsWith(join(dir, "replaced-")));
  let cookie = 0;
  const readAll = async () => {
    for (let i = 0; i < 3; i++)
      expect(Buffer.from(await client.read(++cookie, i * 65_536, 4096))).toEqual(Buffer.alloc(4096, i + 1));
  };
  const asked = engine.stats().requests;
  await readAll();
  expect(engine.stats().requests - asked).toBe(3);
  // One by the stack and one for O_DIRECT each.
  expect(held().length).toBe(6);
  const merged = mergeLayers(lowers.slice(0, 2), join(dir, "replaced-merged"), {});
  const files = lowers.slice(0, 2).map(({ file }) => file);
  const reads = readAll();
  await device.swapLowers([{ first: 0, count: 2, files, merged }]);
  await reads;
  for (const file of files) rmSync(file);
  await readAll();
  expect(engine.stats().requests - asked).toBe(9);
  expect(held().sort()).toEqual([merged.file, merged.file, lowers[2]!.file, lowers[2]!.file].sort());
});

test("closing waits for a flush under way", async () => {
  const stack = memoryStack();
  const { device } = await open(stack, "closing");
  stack.dirty = true;
  const flushed = device.flush();
  const closed = device[Symbol.asyncDispose]();
  expect(stack.closed).toBe(false);
  await flushed;
  await closed;
  expect(stack.closed).toBe(true);
  await expect(device.flush()).rejects.toThrow("was closed");
});

test("a restack that fails half-way makes the device refuse everything, any other failure does not", async () => {
  const stack = memoryStack();
  const { device, socketPath } = await open(stack, "terminal");
  await using _ = device;
  using client = await RawClient.open(socketPath, "terminal");
  const restack = () => device.restack(join(dir, "sealed2"), { data: join(dir, "fresh2") });
  stack.faults.restack = new AenvError({ code: "disk_full", message: "no space" });
  await expect(restack()).rejects.toThrow("no space");
  expect((await client.read(1, 0, 512)).length).toBe(512);
  stack.faults.restack = new AenvError({ code: "restack_terminal", message: "half-way" });
  await expect(restack()).rejects.toThrow("half-way");
  await expect(client.read(2, 0, 512)).rejects.toThrow(`${NbdErrno.EIO}`);
  await expect(restack()).rejects.toThrow("cannot be used any more");
});

test("while a restack waits for the disk reads and writes go on, flushes wait, and nothing is lost", async () => {
  const name = (what: string) => join(dir, `busy-${what}`);
  const upper: UpperRef = { data: name("data"), index: name("index") };
  const stack = openStack({ lowers: [], upper, virtualSizeBytes: SIZE });
  const held: (() => void)[] = [];
  let hold = false;
  const slow =
    <T>(sync: (fd: number, what: string) => Promise<T>) =>
    async (fd: number, what: string): Promise<T> => {
      if (hold) await new Promise<void>((resolve) => held.push(resolve));
      return sync.call(engine, fd, what);
    };
  const slowEngine: IoEngine = {
    kind: engine.kind,
    reason: engine.reason,
    read: (...args) => engine.read(...args),
    startRead: (...args) => engine.startRead(...args),
    write: (...args) => engine.write(...args),
    datasync: slow(engine.datasync),
    sync: slow(engine.sync),
    stats: () => engine.stats(),
    [Symbol.asyncDispose]: async () => undefined,
  };
  const { device, socketPath } = await open(stack, "busy", slowEngine);
  await using _ = device;
  using client = await RawClient.open(socketPath, "busy");
  let cookie = 0;
  const write = async (offset: number, value: number) => {
    client.send(request(Command.write, ++cookie, offset, 512, 0, new Uint8Array(512).fill(value)));
    expect(await client.answer()).toMatchObject({ cookie, error: 0 });
  };
  await write(0, 1);
  await write(512, 2);
  hold = true;
  const sealed = name("sealed");
  const fresh: UpperRef = { data: name("data2"), index: name("index2") };
  const restacked = device.restack(sealed, fresh);
  let flushed: Promise<void> | undefined;
  let waits = 0;
  const done = restacked.then(() => true);
  for (;;) {
    const state = await Promise.race([done, Bun.sleep(1).then(() => (held.length > 0 ? "held" : "idle"))]);
    if (state === true) break;
    if (state === "idle") continue;
    waits++;
    await write(1024 * waits, 10 + waits);
    expect((await client.read(++cookie, 0, 512))[0]).toBe(1);
    expect((await client.read(++cookie, 1024 * waits, 512))[0]).toBe(10 + waits);
    for (const go of held.splice(0)) go();
    if (waits < 3) continue;
    flushed ??= device.flush();
  }
  expect(waits).toBeGreaterThanOrEqual(4);
  hold = false;
  for (const go of held.splice(0)) go();
  await flushed;
  expect(device.image.lowers.map((layer) => layer.file)).toEqual([sealed]);
  for (let i = 1; i <= waits; i++) {
    expect((await client.read(++cookie, 1024 * i, 512))[0]).toBe(10 + i);
  }
  await device[Symbol.asyncDispose]();
  using again = openStack({ lowers: [{ file: sealed }], upper: fresh });
  const got = new Uint8Array(512);
  for (let i = 1; i <= waits; i++) {
    again.read(1024 * i, got);
    expect(got[0]).toBe(10 + i);
  }
});

test("a seventeenth connection is turned away", async () => {
  const { device, socketPath } = await open(memoryStack(), "limit");
  await using _ = device;
  const clients: RawClient[] = [];
  for (let i = 0; i < 16; i++) clients.push(await RawClient.open(socketPath, "limit"));
  const extra = await RawClient.connect(socketPath);
  await extra.untilClosed();
  expect(device.stats().connections).toBe(16);
  for (const client of clients) client[Symbol.dispose]();
});
