import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import {
  appendFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { basename, join } from "node:path";
import pino from "pino";
import { eventually } from "../../../tests/support/eventually.ts";
import { fillDisk } from "../../../tests/support/full-disk.ts";
import { tryCommand } from "../../lib/command.ts";
import { AenvError } from "../../lib/errors.ts";
import { lockHolder } from "../../lib/file-lock.ts";
import { Command, CommandFlag } from "../export/nbd/codec.ts";
import { RawClient, request } from "../export/nbd/testing.ts";
import { createLayerWriter, mergeLayers } from "../overlaybd/index.ts";
import type { LayerRef } from "../overlaybd/types.ts";
import { BlockdConnection } from "./client.ts";
import { encodeFrame } from "./framing.ts";
import {
  type BlockClient,
  type BlockdSupervisorOptions,
  connectBlockd,
  type DeviceInfo,
  type SupervisedBlockd,
  startBlockd,
  superviseBlockd,
} from "./index.ts";
import { BLOCKD_RUNNING_STATUS } from "./protocol.ts";
import { fileStem } from "./table.ts";

setDefaultTimeout(60_000);

const MAIN = join(import.meta.dir, "../../main.ts");
const DAEMON = [process.execPath, MAIN, "blockd"];
const MiB = 1 << 20;
const root = mkdtempSync("/tmp/blockd-test-");
const silent = pino({ level: "silent" });
/** No daemon outlives the tests, whatever state one that failed left it in. */
afterAll(() => {
  for (const name of readdirSync(root)) {
    const lock = join(root, name, "run", "lock");
    const pid = existsSync(lock) ? lockHolder(lock) : undefined;
    if (pid !== undefined && isBlockd(pid)) process.kill(pid, "SIGKILL");
  }
  rmSync(root, { recursive: true, force: true });
});

function isBlockd(pid: number): boolean {
  const path = `/proc/${pid}/cmdline`;
  return existsSync(path) && readFileSync(path, "utf8").includes(root);
}

function optionsFor(name: string): BlockdSupervisorOptions {
  const dir = join(root, name);
  mkdirSync(dir, { recursive: true });
  return {
    argv: DAEMON,
    socketPath: join(dir, "c.sock"),
    runtimeDir: join(dir, "run"),
    logPath: join(dir, "log"),
  };
}

function supervise(options: BlockdSupervisorOptions): Promise<SupervisedBlockd> {
  return superviseBlockd(options, silent);
}

/** Ends the daemon for good, whatever state the test left it in. */
async function end(supervised: SupervisedBlockd): Promise<void> {
  await supervised.client.shutdown();
  await supervised[Symbol.asyncDispose]();
}

let serial = 0;
function upperIn(dir: string) {
  mkdirSync(dir, { recursive: true });
  const name = `upper-${serial++}`;
  return { data: join(dir, `${name}.data`), index: join(dir, `${name}.index`) };
}

function createBlank(client: BlockClient, deviceId: string, sizeBytes = 64 * MiB, dir = join(root, "disks")) {
  return client.create({
    deviceId,
    image: { lowers: [], upper: upperIn(dir), virtualSizeBytes: sizeBytes },
    readOnly: false,
    exportKind: "nbd",
  });
}

function url(info: DeviceInfo): string {
  return `nbd+unix:///${info.exportName}?socket=${info.socketPath}`;
}

async function qemuIo(
  info: DeviceInfo,
  ...commands: string[]
): Promise<{ exitCode: number; output: string }> {
  const args = commands.flatMap((command) => ["-c", command]);
  const flags = info.readOnly ? ["-r"] : [];
  const result = await tryCommand(["qemu-io", "-f", "raw", ...flags, ...args, url(info)], {
    timeoutMs: 30_000,
  });
  const output = result.stdout + result.stderr;
  return { exitCode: /failed|error|can't/i.test(output) ? 1 : result.exitCode, output };
}

async function expectIo(info: DeviceInfo, ...commands: string[]): Promise<void> {
  const { exitCode, output } = await qemuIo(info, ...commands);
  expect(exitCode, output).toBe(0);
}

describe("one daemon", () => {
  const options = optionsFor("shared");
  let supervised: SupervisedBlockd;
  let client: BlockClient;

  beforeAll(async () => {
    supervised = await supervise(options);
    client = supervised.client;
  });
  afterAll(() => end(supervised));

  test("the control socket is for its owner alone", () => {
    expect(statSync(options.socketPath).mode & 0o777).toBe(0o600);
  });

  test("QEMU writes, reads, flushes, trims and zeroes", async () => {
    const info = await createBlank(client, "basic");
    expect(info).toMatchObject({ virtualSizeBytes: 64 * MiB, readOnly: false, exportName: "basic" });
    expect(statSync(info.socketPath!).mode & 0o777).toBe(0o600);
    await expectIo(
      info,
      "read -P 0 0 1M",
      "write -P 0xab 1M 3M",
      "write -P 0xcd 100 300",
      "write -f -P 0xef 8k 4k",
      "read -P 0xab 1M 3M",
      "read -P 0xcd 100 300",
      "read -P 0 0 100",
      "read -P 0xef 8k 4k",
      "write -z 2M 1M",
      "discard 3M 64k",
      "flush",
      "read -P 0 2M 1M",
      "read -P 0 3M 64k",
      "read -P 0xab 1M 1M",
      "write -P 0x11 63M 1M",
      "read -P 0x11 63M 1M",
      "write -P 0x22 16M 32M",
      "read -P 0x22 16M 32M",
    );
    const { devices } = await client.stats();
    const stats = devices.find((device) => device.deviceId === "basic");
    expect(stats?.writeBytes).toBeGreaterThan(36 * MiB);
    expect(stats?.flushOps).toBeGreaterThan(0);
    await client.flush("basic");
    await client.release("basic");
    expect(existsSync(info.socketPath!)).toBe(false);
  });

  test("two devices at once do not see each other's data", async () => {
    const [a, b] = await Promise.all([createBlank(client, "two-a"), createBlank(client, "two-b")]);
    await Promise.all([
      expectIo(a, "write -P 1 0 16M", "flush", "read -P 1 0 16M"),
      expectIo(b, "write -P 2 0 16M", "flush", "read -P 2 0 16M"),
    ]);
    await Promise.all([expectIo(a, "read -P 1 0 16M"), expectIo(b, "read -P 2 0 16M")]);
    await Promise.all([client.release("two-a"), client.release("two-b")]);
  });

  test("a read-only device on top of a sealed layer: same data, writes refused", async () => {
    const info = await createBlank(client, "base");
    await expectIo(info, "write -P 7 1M 1M");
    const layer = await client.restack(
      "base",
      join(root, "disks", "base.layer"),
      upperIn(join(root, "disks")),
    );
    const readOnly = await client.create({
      deviceId: "frozen",
      image: { lowers: [layer], upper: upperIn(join(root, "disks")) },
      readOnly: true,
      exportKind: "nbd",
    });
    expect(readOnly.virtualSizeBytes).toBe(64 * MiB);
    await expectIo(readOnly, "read -P 7 1M 1M", "read -P 0 0 1M");
    using raw = await RawClient.open(readOnly.socketPath!, "frozen");
    raw.send(request(Command.write, 1, 0, 512, 0, new Uint8Array(512)));
    expect(await raw.answer()).toMatchObject({ error: 1 });
    expect((await client.get("frozen"))?.image.upper?.data).toBeDefined();
    await client.release("frozen");
    await client.release("base");
  });

  test("requests behind the end are refused", async () => {
    const info = await createBlank(client, "small", MiB);
    using raw = await RawClient.open(info.socketPath!, "small");
    raw.send(request(Command.read, 1, MiB, 512));
    expect(await raw.answer()).toMatchObject({ error: 22 });
    raw.send(request(Command.write, 2, MiB - 512, 1024, 0, new Uint8Array(1024)));
    expect(await raw.answer()).toMatchObject({ error: 28 });
    expect((await raw.read(3, MiB - 512, 512)).length).toBe(512);
    await client.release("small");
    await raw.untilClosed();
  });

  test("qemu-img converts a random image through the device and finds it equal", async () => {
    const image = join(root, "random.img");
    const bytes = Buffer.alloc(24 * MiB);
    for (let at = 0; at < bytes.length; at += 2 * MiB) crypto.getRandomValues(bytes.subarray(at, at + 65536));
    writeFileSync(image, bytes);
    const info = await createBlank(client, "convert", bytes.length);
    for (const args of [
      ["convert", "-n", "-f", "raw", "-O", "raw", image, url(info)],
      ["compare", "-f", "raw", "-F", "raw", image, url(info)],
    ]) {
      const result = await tryCommand(["qemu-img", ...args]);
      expect(result.exitCode, result.stdout + result.stderr).toBe(0);
    }
    await client.release("convert");
  });

  test("creating twice is one device, another spec under the same id is refused", async () => {
    const spec = {
      deviceId: "same",
      image: { lowers: [], upper: upperIn(join(root, "disks")), virtualSizeBytes: MiB },
      readOnly: false,
      exportKind: "nbd" as const,
    };
    const [first, second] = await Promise.all([client.create(spec), client.create(spec)]);
    expect(second).toEqual(first);
    await expect(client.create({ ...spec, readOnly: true })).rejects.toMatchObject({
      code: "device_exists",
      status: 409,
    });
    await expect(client.create({ ...spec, deviceId: "thief" })).rejects.toMatchObject({
      code: "upper_in_use",
    });
    expect((await client.list()).filter((device) => device.deviceId === "same")).toHaveLength(1);
    await client.release("same");
    await client.release("same");
    expect(await client.get("same")).toBeUndefined();
    await expect(client.flush("same")).rejects.toMatchObject({ code: "device_not_found", status: 404 });
  });

  test("what cannot be a device is refused with a reason, and leaves nothing", async () => {
    const upper = upperIn(join(root, "disks"));
    const spec = {
      deviceId: "bad",
      image: { lowers: [], upper, virtualSizeBytes: MiB },
      readOnly: false,
      exportKind: "nbd" as const,
    };
    const cases: [object, string][] = [
      [{ deviceId: "a/b" }, "bad_request"],
      [{ image: { lowers: [] } }, "device_without_upper"],
      [{ image: { lowers: [], upper } }, "device_without_size"],
      [{ image: { lowers: [], upper, virtualSizeBytes: 1000 } }, "bad_request"],
      [{ image: { lowers: [{ file: "relative" }], upper } }, "bad_request"],
    ];
    for (const [change, code] of cases) {
      await expect(client.create({ ...spec, ...change })).rejects.toMatchObject({ code, status: 400 });
    }
    if (!existsSync("/dev/ublk-control")) {
      const refused = client.create({ ...spec, exportKind: "ublk" });
      await expect(refused).rejects.toMatchObject({ code: "ublk_unusable", status: 503 });
    }
    const missing = { ...spec, image: { lowers: [{ file: join(root, "no-such-layer") }], upper } };
    await expect(client.create(missing)).rejects.toThrow("no-such-layer");
    expect(existsSync(upper.data)).toBe(false);
    expect(await client.get("bad")).toBeUndefined();
    const info = await client.create(spec);
    await expectIo(info, "write -P 3 0 64k", "read -P 3 0 64k");
    await client.release("bad");
  });

  test("lowers are replaced by merged ones under a client that notices nothing, and the next daemon knows", async () => {
    const dir = join(root, "disks");
    const info = await createBlank(client, "swapped", 8 * MiB);
    using raw = await RawClient.open(info.socketPath!, "swapped");
    const layers: LayerRef[] = [];
    for (let i = 0; i < 4; i++) {
      raw.send(request(Command.write, 100 + i, i * MiB, 4096, 0, new Uint8Array(4096).fill(i + 1)));
      expect(await raw.answer()).toMatchObject({ error: 0 });
      layers.push(await client.restack("swapped", join(dir, `swapped-${i}`), upperIn(dir)));
    }
    const merge = (name: string, ...parts: LayerRef[]) => mergeLayers(parts, join(dir, name), {});
    const early = merge("swapped-m01", layers[0]!, layers[1]!);
    const swaps = [
      { first: 0, count: 2, files: layers.slice(0, 2).map(({ file }) => file), merged: early },
      {
        first: 0,
        count: 2,
        files: [early.file, layers[2]!.file],
        merged: merge("swapped-m012", early, layers[2]!),
      },
    ];
    const files = async () => (await client.get("swapped"))?.image.lowers.map(({ file }) => basename(file));
    const record = join(options.runtimeDir, "devices", `${fileStem("swapped")}.json`);
    // The record cannot be written: not told as done, but what is under the device is known.
    mkdirSync(`${record}.tmp`);
    await expect(client.swapLowers("swapped", swaps)).rejects.toThrow("EISDIR");
    expect(await files()).toEqual(["swapped-m012", "swapped-3"]);
    expect(readFileSync(record, "utf8")).not.toContain("swapped-m012");
    rmSync(`${record}.tmp`, { recursive: true });
    // A plan for what was there before, in layers that would fit by their number.
    const stale = { first: 0, count: 2, files: layers.slice(0, 2).map(({ file }) => file) };
    await expect(
      client.swapLowers("swapped", [{ ...stale, merged: merge("swapped-stale", ...layers) }]),
    ).rejects.toMatchObject({ code: "layers_differ", status: 409 });
    expect(await files()).toEqual(["swapped-m012", "swapped-3"]);
    // The same again, as after an answer that got lost: now it is on disk.
    await client.swapLowers("swapped", swaps);
    expect(readFileSync(record, "utf8")).toContain("swapped-m012");
    await client.swapLowers("swapped", swaps);
    for (const { file } of [...layers.slice(0, 3), early]) rmSync(file);
    const verify = async (reader: RawClient) => {
      for (let i = 0; i < 4; i++)
        expect(Buffer.from(await reader.read(200 + i, i * MiB, 4096)).every((byte) => byte === i + 1)).toBe(
          true,
        );
    };
    await verify(raw);
    const present = swaps[1]!.merged.file;
    const gone = { first: 0, count: 1, files: [present], merged: { file: join(dir, "no-such-layer") } };
    await expect(client.swapLowers("swapped", [gone])).rejects.toThrow("no-such-layer");
    await verify(raw);
    expect(await files()).toEqual(["swapped-m012", "swapped-3"]);
    expect(readFileSync(record, "utf8")).toContain("swapped-m012");
    await client.release("swapped");
  });

  test("restacks between writes lose none of them", async () => {
    const info = await createBlank(client, "stacked", 32 * MiB);
    using raw = await RawClient.open(info.socketPath!, "stacked");
    const block = 16384;
    const count = (32 * MiB) / block;
    const model = new Map<number, number>();
    let stop = false;
    const writer = async () => {
      let cookie = 1;
      for (let i = 0; !stop; i++) {
        const slot = (i * 37) % count;
        const value = i % 251;
        raw.send(
          request(
            Command.write,
            cookie++,
            slot * block,
            block,
            i % 16 === 0 ? CommandFlag.fua : 0,
            Buffer.alloc(block, value),
          ),
        );
        expect((await raw.answer()).error).toBe(0);
        model.set(slot, value);
      }
    };
    const writing = writer();
    const dir = join(root, "disks");
    for (let i = 0; i < 6; i++) {
      await Bun.sleep(30);
      const sealedPath = join(dir, `stacked-${i}.layer`);
      const fresh = upperIn(dir);
      const layer = await client.restack("stacked", sealedPath, fresh);
      expect(layer.file).toBe(sealedPath);
      // The answer may have been lost: asking again gives the same.
      expect(await client.restack("stacked", sealedPath, fresh)).toEqual(layer);
    }
    await Bun.sleep(30);
    stop = true;
    await writing;
    const verify = async (socketPath: string) => {
      using reader = await RawClient.open(socketPath, "stacked");
      for (const [slot, value] of model) {
        const data = await reader.read(slot + 1, slot * block, block);
        expect(Buffer.from(data).equals(Buffer.alloc(block, value))).toBe(true);
      }
    };
    await verify(info.socketPath!);
    const now = (await client.get("stacked"))!;
    expect(now.image.lowers).toHaveLength(6);
    await expect(client.restack("stacked", now.image.lowers[0]!.file, upperIn(dir))).rejects.toMatchObject({
      code: "restack_target_exists",
    });
    await client.release("stacked");
    const again = await client.create({
      deviceId: "stacked",
      image: now.image,
      readOnly: false,
      exportKind: "nbd",
    });
    await verify(again.socketPath!);
    await client.release("stacked");
  });

  test("garbage on an NBD socket ends that connection alone", async () => {
    const info = await createBlank(client, "noise", MiB);
    using good = await RawClient.open(info.socketPath!, "noise");
    for (let i = 0; i < 20; i++) {
      using bad = await RawClient.connect(info.socketPath!);
      bad.send(crypto.getRandomValues(new Uint8Array(4096)));
      await bad.untilClosed();
      using late = await RawClient.open(info.socketPath!, "noise");
      late.send(crypto.getRandomValues(new Uint8Array(300)));
      await late.untilClosed();
    }
    expect((await good.read(1, 0, 4096)).length).toBe(4096);
    expect((await client.stats()).devices.find((d) => d.deviceId === "noise")?.connections).toBe(1);
    await client.release("noise");
  });

  test("garbage on the control socket ends that connection alone", async () => {
    const raw = async (bytes: Uint8Array): Promise<string> => {
      const { promise, resolve } = Promise.withResolvers<string>();
      let answer = "";
      await Bun.connect({
        unix: options.socketPath,
        socket: {
          open: (socket) => void socket.write(bytes),
          data: (_, chunk) => {
            answer += chunk.toString();
          },
          close: () => resolve(answer),
        },
      });
      return promise;
    };
    const frame = (length: number, body = "") => {
      const head = Buffer.alloc(4);
      head.writeUInt32LE(length);
      return Buffer.concat([head, Buffer.from(body)]);
    };
    expect(await raw(frame(0xffffffff))).toContain("message length");
    expect(await raw(frame(0))).toContain("message length");
    expect(await raw(frame(5, "{bad}"))).toContain("not JSON");
    expect(await raw(encodeFrame([]))).toContain("bad_message");
    expect(await raw(encodeFrame({ id: 1, op: "list" }))).toContain("hello_expected");
    expect(await raw(encodeFrame({ id: 1, op: "hello", version: 99 }))).toContain("blockd_version_mismatch");
    expect(await raw(Buffer.from("GET / HTTP/1.1\r\n\r\n"))).toContain("message length");
    expect((await client.stats()).pid).toBeGreaterThan(0);
  });

  test("an unreadable request on a good connection is answered, the connection lives", async () => {
    const connection = await BlockdConnection.open(options.socketPath, 5000);
    const odd = { op: "get", deviceId: "../x" } as const;
    await expect(connection.call<"get">(odd, 5000)).rejects.toMatchObject({ code: "bad_request" });
    expect(await connection.call<"get">({ op: "get", deviceId: "x" }, 5000)).toBeNull();
    connection.close();
  });

  test("a list of any length comes in pages", async () => {
    const layers = Array.from({ length: 200 }, (_, i) => ({
      file: join(root, "x".repeat(200), `layer-${i}`),
      digest: `sha256:${"0".repeat(64)}`,
    }));
    const ids: string[] = [];
    // Unopenable, so that no layer has to exist: the daemon's own limit is what is looked at.
    await Promise.allSettled(
      Array.from({ length: 4 }, (_, i) =>
        client.create({
          deviceId: `page-${i}`,
          image: { lowers: layers, upper: upperIn(join(root, "disks")) },
          readOnly: false,
          exportKind: "nbd",
        }),
      ),
    );
    for (let i = 0; i < 30; i++) {
      const id = `${"p".repeat(100)}-${String(i).padStart(3, "0")}`;
      await createBlank(client, id, MiB);
      ids.push(id);
    }
    const listed = (await client.list()).map((device) => device.deviceId);
    expect(listed).toEqual(ids);
    expect((await client.stats()).devices.map((device) => device.deviceId)).toEqual(ids);
    await Promise.all(ids.map((id) => client.release(id)));
    expect(await client.list()).toEqual([]);
  });

  test("1,000 times create, connect, write and release leave descriptors and memory as they were", async () => {
    const cycle = async (i: number) => {
      const info = await createBlank(client, `cycle-${i}`, 4 * MiB);
      using raw = await RawClient.open(info.socketPath!, info.deviceId);
      raw.send(request(Command.write, 1, 0, 65536, 0, Buffer.alloc(65536, i & 255)));
      expect((await raw.answer()).error).toBe(0);
      await client.release(info.deviceId);
      rmSync(info.image.upper!.data, { force: true });
      rmSync(info.image.upper!.index!, { force: true });
    };
    // The runtime's own caches fill up first.
    for (let i = 0; i < 100; i++) await cycle(i);
    const before = await client.stats();
    const descriptors = () => readdirSync(`/proc/${before.pid}/fd`).length;
    const fdsBefore = descriptors();
    for (let i = 100; i < 1100; i++) await cycle(i);
    await eventually("descriptors are closed", () => descriptors() <= fdsBefore);
    const after = await client.stats();
    expect(after.devices).toEqual([]);
    expect(after.rssBytes - before.rssBytes).toBeLessThan(24 * MiB);
    expect(readdirSync(join(options.runtimeDir, "nbd"))).toEqual([]);
    expect(readdirSync(join(options.runtimeDir, "devices"))).toEqual([]);
  });

  test("clients that never read their answers cost little memory and nobody else's time", async () => {
    const info = await createBlank(client, "slow", 64 * MiB);
    await expectIo(info, "write -P 9 0 64M");
    const before = (await client.stats()).rssBytes;
    const slow: RawClient[] = [];
    for (let i = 0; i < 8; i++) {
      const raw = await RawClient.open(info.socketPath!, "slow");
      raw.pause();
      raw.send(Buffer.concat(Array.from({ length: 500 }, (_, n) => request(Command.read, n, 0, 32 * MiB))));
      slow.push(raw);
    }
    await Bun.sleep(300);
    await expectIo(info, "read -P 9 0 8M");
    const grown = (await client.stats()).rssBytes - before;
    expect(grown).toBeLessThan(48 * MiB);
    // One of them wakes up and finds its answer whole.
    slow[0]!.resume();
    const answer = await slow[0]!.answer(20_000);
    expect(answer.chunks.reduce((sum, chunk) => sum + chunk.data.length, 0)).toBe(32 * MiB);
    expect(answer.chunks.every((chunk) => chunk.data[0] === 9 && chunk.data.at(-1) === 9)).toBe(true);
    for (const raw of slow) raw[Symbol.dispose]();
    await client.release("slow");
  });

  test("a full disk is ENOSPC for the guest, the device and the daemon go on", async () => {
    const dir = join(root, "tiny");
    mkdirSync(dir);
    const mounted = await tryCommand(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", dir]);
    if (mounted.exitCode !== 0) {
      console.log(`skipped: a tmpfs cannot be mounted here: ${mounted.stderr.trim()}`);
      return;
    }
    try {
      const info = await createBlank(client, "tiny", 64 * MiB, dir);
      await expectIo(info, "write -P 4 0 1M");
      using raw = await RawClient.open(info.socketPath!, "tiny");
      let error = 0;
      for (let i = 1; i < 32 && error === 0; i++) {
        raw.send(request(Command.write, i, i * MiB, MiB, 0, Buffer.alloc(MiB, i)));
        error = (await raw.answer()).error;
      }
      expect(error).toBe(28);
      await expectIo(info, "read -P 4 0 1M", "read -P 1 1M 1M");
      expect(readFileSync(options.logPath, "utf8")).toContain("write failed, the guest was told");
      await client.release("tiny");
    } finally {
      await tryCommand(["umount", dir]);
    }
  });
});

test("a full disk that holds the log as well is ENOSPC for the guest, and the daemon goes on", async () => {
  const options = optionsFor("full-log");
  const dir = join(root, "full-log-disk");
  mkdirSync(dir);
  const mounted = await tryCommand(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", dir]);
  if (mounted.exitCode !== 0) {
    console.log(`skipped: a tmpfs cannot be mounted here: ${mounted.stderr.trim()}`);
    return;
  }
  const logPath = join(dir, "log");
  const supervised = await supervise({ ...options, logPath });
  try {
    const { client } = supervised;
    const info = await createBlank(client, "full", 64 * MiB, dir);
    using raw = await RawClient.open(info.socketPath!, "full");
    // No room in the log's last page either.
    appendFileSync(logPath, "-".repeat(4096 - (statSync(logPath).size % 4096)));
    fillDisk(dir);
    const before = lockHolder(join(options.runtimeDir, "lock"));
    for (const cookie of [1, 2]) {
      raw.send(request(Command.write, cookie, MiB, MiB, 0, Buffer.alloc(MiB, cookie)));
      expect((await raw.answer()).error).toBe(28);
    }
    expect((await client.stats()).devices).toMatchObject([{ deviceId: "full", errorOps: 2 }]);
    expect(lockHolder(join(options.runtimeDir, "lock"))).toBe(before!);
    raw[Symbol.dispose]();
    await client.release("full");
  } finally {
    await end(supervised);
    await tryCommand(["umount", "-l", dir]);
  }
});

test("warm layers are a number for all workers together", async () => {
  const options = optionsFor("warm");
  const flags = ["--workers", "2", "--warm-layers", "1"];
  const supervised = await supervise({ ...options, argv: [...DAEMON, ...flags] });
  try {
    const { client } = supervised;
    const ids = ["first", "second"];
    for (const id of ids) {
      using layer = createLayerWriter(join(root, "warm", id), { virtualSizeBytes: 4 * MiB });
      const lowers = [layer.finish()];
      const upper = upperIn(join(root, "disks"));
      const image = { lowers, upper, virtualSizeBytes: 4 * MiB };
      await client.create({ deviceId: id, image, readOnly: false, exportKind: "nbd" });
    }
    const layers = async () => (await client.stats()).workers.map((worker) => worker.layers);
    expect(await layers()).toMatchObject([{ used: 1 }, { used: 1 }]);
    for (const id of ids) await client.release(id);
    const idle = (await layers()).reduce((sum, worker) => sum + worker.idle, 0);
    expect(idle).toBe(1);
  } finally {
    await end(supervised);
  }
});

describe("one worker, several devices", () => {
  const options = optionsFor("one-worker");
  const metrics = join(root, "one-worker", "metrics.sock");
  let supervised: SupervisedBlockd;
  beforeAll(async () => {
    const flags = ["--workers", "1", "--block-cache-mib", "8", "--warm-layers", "4", "--metrics", metrics];
    supervised = await supervise({ ...options, argv: [...DAEMON, ...flags] });
  });
  afterAll(() => end(supervised));

  test("a flush under way on one device stalls neither its reads nor another device", async () => {
    const { client } = supervised;
    const dirty = await createBlank(client, "dirty", 256 * MiB);
    const other = await createBlank(client, "other", 4 * MiB);
    using writer = await RawClient.open(dirty.socketPath!, "dirty");
    using reader = await RawClient.open(other.socketPath!, "other");
    using sameDevice = await RawClient.open(dirty.socketPath!, "dirty");
    for (let i = 0; i < 128; i++) {
      writer.send(request(Command.write, i, i * MiB, MiB, 0, Buffer.alloc(MiB, i + 1)));
      expect((await writer.answer()).error).toBe(0);
    }
    let flushed = false;
    writer.send(request(Command.flush, 1000, 0, 0));
    const flush = writer.answer(60_000).then((answer) => {
      flushed = true;
      return answer;
    });
    let reads = 0;
    while (!flushed) {
      expect((await sameDevice.read(reads, MiB, 512))[0]).toBe(2);
      expect((await reader.read(reads, 0, 512))[0]).toBe(0);
      reads++;
    }
    expect((await flush).error).toBe(0);
    // 128 MiB take much longer to write than a read takes; with the thread held there would be one at most.
    expect(reads).toBeGreaterThan(3);
    await Promise.all(["dirty", "other"].map((id) => client.release(id)));
  });

  test("a device that is read as fast as it goes leaves others their turn", async () => {
    const { client } = supervised;
    const busy = await createBlank(client, "busy", 64 * MiB);
    const quiet = await createBlank(client, "quiet", 4 * MiB);
    await expectIo(busy, "write -P 5 0 64M");
    const inFlight = 16;
    const depth = String(inFlight);
    const load = Bun.spawn(
      ["qemu-img", "bench", "-f", "raw", "-c", "200000", "-d", depth, "-s", "1M", "-S", "1M", url(busy)],
      { stdio: ["ignore", "ignore", "ignore"] },
    );
    try {
      await eventually("the load runs", async () => {
        const { devices } = await client.stats();
        return devices.some((device) => device.deviceId === "busy" && device.readOps > 100);
      });
      using raw = await RawClient.open(quiet.socketPath!, "quiet");
      const busyReads = async () => {
        const { devices } = await client.stats();
        return devices.find((device) => device.deviceId === "busy")!.readOps;
      };
      const reads = 50;
      const before = await busyReads();
      for (let i = 0; i < reads; i++) expect((await raw.read(i, i * 4096, 4096)).length).toBe(4096);
      const passed = (await busyReads()) - before;
      expect(load.exitCode).toBeNull();
      // What the load has in flight may go first each time, and again while the next read is on its way.
      expect(passed).toBeLessThan(2 * inFlight * (reads + 1));
    } finally {
      load.kill();
      await load.exited;
    }
    await Promise.all(["busy", "quiet"].map((id) => client.release(id)));
  });

  test("devices of one image share its open layers, and the next one finds them warm", async () => {
    const { client } = supervised;
    const lowers = Array.from({ length: 6 }, (_, i) => {
      using layer = createLayerWriter(join(root, "one-worker", `lower-${i}`), { virtualSizeBytes: 4 * MiB });
      layer.append(i * 4096, new Uint8Array(new ArrayBuffer(4096)).fill(i + 1));
      return layer.finish();
    });
    const { pid } = await client.stats();
    const openLayers = () =>
      readdirSync(`/proc/${pid}/fd`).filter((fd) => {
        const path = `/proc/${pid}/fd/${fd}`;
        return existsSync(path) && readlinkSync(path).includes("/lower-");
      }).length;
    const layers = async () => (await client.stats()).workers[0]!.layers;
    const create = (deviceId: string) =>
      client.create({
        deviceId,
        image: { lowers, upper: upperIn(join(root, "disks")), virtualSizeBytes: 4 * MiB },
        readOnly: false,
        exportKind: "nbd",
      });
    await create("warm-1");
    const second = await create("warm-2");
    expect(await layers()).toEqual({ used: 6, idle: 0, hits: 6, misses: 6 });
    expect(openLayers()).toBe(6);
    await client.release("warm-1");
    await expectIo(second, "read -P 6 20k 4k");
    await client.release("warm-2");
    // As many as it was told to keep.
    expect(await layers()).toEqual({ used: 0, idle: 4, hits: 6, misses: 6 });
    expect(openLayers()).toBe(4);
    const third = await create("warm-3");
    expect(await layers()).toEqual({ used: 6, idle: 0, hits: 10, misses: 8 });
    await expectIo(third, "read -P 1 0 4k", "read -P 6 20k 4k");
    await client.release("warm-3");
  });

  test("metrics in Prometheus' text form, for the owner alone", async () => {
    const { client } = supervised;
    const info = await createBlank(client, "disk.1", 4 * MiB);
    await expectIo(info, "write -P 3 0 64k", "read 0 4k", "flush");
    expect(statSync(metrics).mode & 0o777).toBe(0o600);
    const response = await fetch("http://localhost/metrics", { unix: metrics });
    expect(response.headers.get("content-type")).toStartWith("text/plain; version=0.0.4");
    const page = await response.text();
    const samples = new Map<string, number>();
    for (const line of page.trimEnd().split("\n")) {
      if (line.startsWith("# HELP ") || line.startsWith("# TYPE ")) continue;
      const [, name, value] = /^([a-z_]+(?:\{(?:,?[a-z]+="[^"]*")+\})?) (\S+)$/.exec(line) ?? [];
      expect(name, line).toBeDefined();
      samples.set(name!, Number(value));
    }
    expect(samples.get("aenv_blockd_devices")).toBe(1);
    expect(samples.get('aenv_blockd_device_write_bytes_total{device="disk.1"}')).toBe(65536);
    expect(samples.get('aenv_blockd_device_read_ops_total{device="disk.1"}')).toBeGreaterThan(0);
    expect(samples.get('aenv_blockd_block_cache_limit_bytes{worker="0"}')).toBe(8 * MiB);
    expect(samples.get('aenv_blockd_layers_used{worker="0"}')).toBe(0);
    expect(samples.get("aenv_blockd_flush_seconds_count")).toBe(
      samples.get('aenv_blockd_device_flush_ops_total{device="disk.1"}')!,
    );
    expect(samples.get('aenv_blockd_flush_seconds_bucket{le="+Inf"}')).toBe(
      samples.get("aenv_blockd_flush_seconds_count")!,
    );
    const created = 'operation="create_runtime_overlaybd",status="success"';
    expect(samples.get(`agentenv_ublk_operation_duration_seconds_count{${created}}`)).toBeGreaterThan(0);
    expect(samples.get('agentenv_overlaybd_zfile_blocks_total{codec="lz4"}')).toBe(0);
    expect((await fetch("http://localhost/other", { unix: metrics })).status).toBe(404);
    expect((await fetch("http://localhost/metrics", { unix: metrics, method: "POST" })).status).toBe(405);
    await client.release("disk.1");
  });

  test("qemu-img sees which parts hold data and copies no more", async () => {
    const { client } = supervised;
    const info = await createBlank(client, "sparse", 512 * MiB);
    await expectIo(info, "write -P 1 1M 64k", "write -P 2 300M 1M", "write -z 300M 64k");
    const result = await tryCommand(["qemu-img", "map", "--output=json", "-f", "raw", url(info)]);
    const map = JSON.parse(result.stdout) as { start: number; length: number; data: boolean }[];
    expect(map.filter((extent) => extent.data).map(({ start, length }) => [start, length])).toEqual([
      [MiB, 64 << 10],
      [300 * MiB + (64 << 10), MiB - (64 << 10)],
    ]);
    expect(map.reduce((sum, extent) => sum + extent.length, 0)).toBe(512 * MiB);
    await client.release("sparse");
  });

  test("an upper that is rewritten again and again stays small", async () => {
    const { client } = supervised;
    const info = await createBlank(client, "rewritten", 8 * MiB);
    using raw = await RawClient.open(info.socketPath!, "rewritten");
    const size = () => Number(statSync(info.image.upper!.data).blocks) * 512;
    for (let round = 0; round < 24; round++) {
      for (let i = 0; i < 8; i++) {
        raw.send(request(Command.write, i, i * MiB, MiB, 0, Buffer.alloc(MiB, round + i)));
        expect((await raw.answer()).error).toBe(0);
      }
      raw.send(request(Command.flush, 100, 0, 0));
      expect((await raw.answer()).error).toBe(0);
    }
    await eventually("compaction took the garbage back", () => size() <= 2 * 8 * MiB + 5 * MiB, 30_000);
    for (let i = 0; i < 8; i++)
      expect((await raw.read(i, i * MiB, MiB)).every((b) => b === 23 + i)).toBe(true);
    await client.release("rewritten");
  });
});

describe("life and death", () => {
  test("kill -9: what was acknowledged is there again, at the same socket, also for a connected QEMU", async () => {
    const supervised = await supervise(optionsFor("killed"));
    const { client } = supervised;
    const info = await createBlank(client, "victim");
    const sealed = join(root, "disks", "victim.layer");
    await expectIo(info, "write -P 1 0 1M");
    await client.restack("victim", sealed, upperIn(join(root, "disks")));
    const { pid } = await client.stats();
    const image = `driver=nbd,server.type=unix,server.path=${info.socketPath},export=victim,reconnect-delay=20`;
    const qemu = Bun.spawn(
      [
        "qemu-io",
        "--image-opts",
        image,
        "-c",
        "write -P 2 1M 1M",
        "-c",
        "sleep 1500",
        "-c",
        "write -P 3 2M 1M",
        "-c",
        "read -P 2 1M 1M",
        "-c",
        "read -P 3 2M 1M",
      ],
      { stdout: "pipe", stderr: "pipe", timeout: 30_000 },
    );
    using raw = await RawClient.open(info.socketPath!, "victim");
    let written = 0;
    const writer = (async () => {
      for (let i = 0; !raw.closed; i++) {
        raw.send(request(Command.write, i, 8 * MiB + i * 4096, 4096, 0, Buffer.alloc(4096, (i % 255) + 1)));
        await raw.answer();
        written = i + 1;
      }
    })().catch((error: unknown) => error);
    {
      using look = await RawClient.open(info.socketPath!, "victim");
      let cookie = 0;
      // QEMU has written its first part, and so it is connected.
      await eventually(
        "both have written",
        async () => written > 0 && (await look.read(++cookie, 2 * MiB - 512, 512))[0] === 2,
      );
    }
    process.kill(pid, "SIGKILL");
    await writer;
    // Waits for the new daemon by itself.
    const [again] = await client.list();
    const next = (await client.stats()).pid;
    expect(next).not.toBe(pid);
    expect(again?.socketPath).toBe(info.socketPath);
    expect(again?.failure).toBeUndefined();
    expect(again?.image.lowers.map((lower) => lower.file)).toEqual([sealed]);
    using reader = await RawClient.open(info.socketPath!, "victim");
    for (let i = 0; i < Math.min(written, 4000); i++) {
      const data = await reader.read(i, 8 * MiB + i * 4096, 4096);
      expect(data[0]).toBe((i % 255) + 1);
    }
    const output = (await new Response(qemu.stdout).text()) + (await new Response(qemu.stderr).text());
    expect(await qemu.exited, output).toBe(0);
    expect(output).not.toMatch(/fail|error/i);
    await expectIo(info, "read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 2M 1M");
    await end(supervised);
    await eventually("the daemon has ended", () => !isBlockd(next));
  });

  test("kill -9 at any moment of a restack loses no acknowledged write and leaves one answer", async () => {
    const supervised = await supervise(optionsFor("chaos"));
    const { client } = supervised;
    const dir = join(root, "disks");
    const info = await createBlank(client, "chaos", 16 * MiB);
    const block = 4096;
    const count = (16 * MiB) / block;
    /** What each block may hold: the last acknowledged value, and one that was under way at the kill. */
    const model = new Map<number, Set<number>>();
    let value = 0;
    let acknowledged = 0;
    let stop = false;
    const write = async () => {
      try {
        using raw = await RawClient.open(info.socketPath!, "chaos");
        while (!stop) {
          const slot = (value * 61) % count;
          value++;
          const byte = (value % 250) + 1;
          model.set(slot, new Set([...(model.get(slot) ?? [0]), byte]));
          raw.send(request(Command.write, value, slot * block, block, 0, Buffer.alloc(block, byte)));
          expect((await raw.answer()).error).toBe(0);
          model.set(slot, new Set([byte]));
          acknowledged++;
        }
      } catch (error) {
        // The daemon was killed: the loop of rounds goes on with the next one.
        expect(String(error)).toMatch(/closed the connection|Failed to connect|ENOENT|ECONNREFUSED/);
      }
    };
    const seed = Number(process.env.AENV_TEST_SEED ?? Date.now() % 100_000);
    let x = seed;
    const random = () => {
      x = (Math.imul(x, 1664525) + 1013904223) >>> 0;
      return x / 2 ** 32;
    };
    for (let round = 0; round < 6; round++) {
      const { pid } = await client.stats();
      const before = acknowledged;
      stop = false;
      const writing = write();
      await eventually("some are written", () => acknowledged > before + 3);
      const sealedPath = join(dir, `chaos-${round}.layer`);
      const restacking = client.restack("chaos", sealedPath, upperIn(dir));
      await Bun.sleep(random() * 12);
      process.kill(pid, "SIGKILL");
      stop = true;
      await writing;
      // The client finds the next daemon and asks again: done once, whichever daemon did it.
      expect((await restacking).file, `seed ${seed}`).toBe(sealedPath);
      const now = await client.get("chaos");
      expect(now?.image.lowers.map((lower) => lower.file)).toEqual(
        Array.from({ length: round + 1 }, (_, i) => join(dir, `chaos-${i}.layer`)),
      );
    }
    using reader = await RawClient.open(info.socketPath!, "chaos");
    for (const [slot, allowed] of model) {
      const data = await reader.read(slot, slot * block, block);
      expect(allowed.has(data[0]!), `seed ${seed}, block ${slot}`).toBe(true);
      expect(Buffer.from(data).equals(Buffer.alloc(block, data[0]!)), `seed ${seed}, block ${slot}`).toBe(
        true,
      );
    }
    await end(supervised);
  });

  test("calls under way fail clearly when the daemon dies; without a supervisor the next ones, too", async () => {
    const options = optionsFor("alone");
    const supervised = await supervise(options);
    await supervised[Symbol.asyncDispose]();
    // The daemon outlived its supervisor.
    const client = await connectBlockd(options.socketPath);
    const { pid } = await client.stats();
    process.kill(pid, "SIGSTOP");
    const hanging = client.list();
    await expect(connectBlockd(options.socketPath, { timeoutMs: 200 })).rejects.toMatchObject({
      code: "blockd_timeout",
      status: 504,
    });
    process.kill(pid, "SIGKILL");
    await expect(hanging).rejects.toMatchObject({ code: "blockd_unavailable", status: 503 });
    await expect(client.list()).rejects.toMatchObject({ code: "blockd_unavailable", status: 503 });
    // The dead one's socket file is no obstacle, and the old client finds the new daemon.
    const revived = await supervise(options);
    expect(await client.list()).toEqual([]);
    await end(revived);
    await expect(client.list()).rejects.toMatchObject({ code: "blockd_unavailable" });
    await client[Symbol.asyncDispose]();
  });

  test("SIGTERM closes everything, exit code 0; the next daemon exports the devices again", async () => {
    const options = optionsFor("term");
    const run = () => {
      const child = Bun.spawn(
        [...DAEMON, "--socket", options.socketPath, "--runtime-dir", options.runtimeDir],
        {
          stdio: ["ignore", "ignore", "ignore"],
        },
      );
      return child;
    };
    const first = run();
    await eventually("daemon listens", () => existsSync(options.socketPath));
    const client = await connectBlockd(options.socketPath, { connectPatienceMs: 20_000 });
    const info = await createBlank(client, "kept");
    await expectIo(info, "write -P 5 0 1M");
    first.kill("SIGTERM");
    expect(await first.exited).toBe(0);
    expect(existsSync(options.socketPath)).toBe(false);
    expect(existsSync(info.socketPath!)).toBe(false);
    const second = run();
    expect((await client.list()).map((device) => device.socketPath)).toEqual([info.socketPath]);
    await expectIo(info, "read -P 5 0 1M");
    // Another one for the same place is refused and harms nothing.
    const third = run();
    expect(await third.exited).toBe(BLOCKD_RUNNING_STATUS);
    expect((await client.stats()).pid).toBe(second.pid);
    await client.shutdown();
    expect(await second.exited).toBe(0);
    expect(readdirSync(join(options.runtimeDir, "devices"))).toEqual([]);
    await client[Symbol.asyncDispose]();
  });

  test("bad usage and bad places are told apart by exit code and words", async () => {
    const run = (...args: string[]) => tryCommand([...DAEMON, ...args], { timeoutMs: 30_000 });
    const usage = await run("--socket", "/tmp/x");
    expect(usage.exitCode).toBe(2);
    expect(usage.stderr).toContain("usage:");
    expect((await run("--socket", "/tmp/x", "--runtime-dir", "/tmp/y", "--workers", "0")).exitCode).toBe(2);
    const deep = join(root, "d".repeat(100));
    const long = await run("--socket", join(root, "s"), "--runtime-dir", deep);
    expect(long.exitCode).toBe(1);
    expect(long.stderr).toContain("shorter");
    const file = join(root, "precious");
    writeFileSync(file, "not a socket");
    const taken = await run("--socket", file, "--runtime-dir", join(root, "taken"));
    expect(taken.exitCode).toBe(1);
    expect(readFileSync(file, "utf8")).toBe("not a socket");
  });

  test("a daemon that cannot start is an error with its own last words", async () => {
    const options = { ...optionsFor("broken"), argv: ["/bin/sh", "-c", "echo 'no luck today' >&2; exit 3"] };
    const failed = superviseBlockd(options, silent);
    await expect(failed).rejects.toMatchObject({ code: "blockd_unavailable", status: 503 });
    await expect(failed).rejects.toThrow("no luck today");
    const absent = superviseBlockd({ ...options, argv: ["/nonexistent/agentenv"] }, silent);
    await expect(absent).rejects.toMatchObject({ code: "blockd_unavailable" });
  });

  test("a daemon that lives and does not answer holds up nobody who leaves", async () => {
    const options = optionsFor("mute");
    const pidFile = join(root, "mute-pid");
    const argv = ["/bin/sh", "-c", `echo $$ > ${pidFile}; exec sleep 600`];
    const starting = startBlockd({ ...options, argv }, silent);
    const pid = await eventually("it lives", () =>
      existsSync(pidFile) ? Number(readFileSync(pidFile, "utf8")) : 0,
    );
    try {
      const call = starting.client.list();
      await starting[Symbol.asyncDispose]();
      await expect(starting.ready).rejects.toThrow("is not waited for any more");
      await expect(call).rejects.toMatchObject({ code: "blockd_unavailable" });
    } finally {
      process.kill(pid, "SIGKILL");
    }
  });

  test("a running daemon is found, not replaced; two supervisors at once end up with one", async () => {
    const options = optionsFor("found");
    const [a, b] = await Promise.all([supervise(options), supervise(options)]);
    const pids = [(await a.client.stats()).pid, (await b.client.stats()).pid];
    expect(pids[0]).toBe(pids[1]!);
    await b[Symbol.asyncDispose]();
    expect(isBlockd(pids[0]!)).toBe(true);
    await end(a);
    await eventually("the daemon has ended", () => !isBlockd(pids[0]!));
  });

  test("a restack cut off before its record was written is completed, one cut off before it began is dropped", async () => {
    const options = optionsFor("cut");
    const dir = join(root, "disks");
    const first = await supervise(options);
    const info = await createBlank(first.client, "cut");
    await expectIo(info, "write -P 6 0 1M");
    const recordPath = join(options.runtimeDir, "devices", `${fileStem("cut")}.json`);
    const before = JSON.parse(readFileSync(recordPath, "utf8")) as Record<string, unknown>;
    const [sealedPath, fresh] = [join(dir, "cut.layer"), upperIn(dir)];
    await first.client.restack("cut", sealedPath, fresh);
    await expectIo(info, "write -P 8 1M 1M");
    await first[Symbol.asyncDispose]();
    const killed = await connectBlockd(options.socketPath);
    process.kill((await killed.stats()).pid, "SIGKILL");
    // As if it had died between the restack and the update of its table.
    writeFileSync(recordPath, JSON.stringify({ ...before, restacking: { sealedPath, freshUpper: fresh } }));
    const second = await supervise(options);
    const device = (await second.client.get("cut"))!;
    expect(device.failure).toBeUndefined();
    expect(device.image.lowers.map((lower) => lower.file)).toEqual([sealedPath]);
    expect(device.image.upper).toEqual(fresh);
    await expectIo(device, "read -P 6 0 1M", "read -P 8 1M 1M");
    // The caller who lost the answer asks again.
    expect((await second.client.restack("cut", sealedPath, fresh)).file).toBe(sealedPath);

    // And as if it had died after noting its intent, before anything was done.
    const now = JSON.parse(readFileSync(recordPath, "utf8")) as Record<string, unknown>;
    await second[Symbol.asyncDispose]();
    process.kill((await killed.stats()).pid, "SIGKILL");
    const next = { sealedPath: join(dir, "cut-2.layer"), freshUpper: upperIn(dir) };
    writeFileSync(recordPath, JSON.stringify({ ...now, restacking: next }));
    const third = await supervise(options);
    expect((await third.client.get("cut"))?.image).toEqual(device.image);
    await expectIo(device, "read -P 6 0 1M", "read -P 8 1M 1M");
    expect((await third.client.restack("cut", next.sealedPath, next.freshUpper)).file).toBe(next.sealedPath);
    await expectIo(device, "read -P 6 0 1M", "read -P 8 1M 1M");
    await killed[Symbol.asyncDispose]();
    await end(third);
  });

  test("a device made with the image of before its restack is told and keeps that of after", async () => {
    const options = optionsFor("stale");
    const dir = join(root, "disks");
    const daemon = await supervise(options);
    const { client } = daemon;
    const info = await createBlank(client, "stale");
    await expectIo(info, "write -P 6 0 1M");
    const [sealed, fresh] = [join(dir, "stale.layer"), upperIn(dir)];
    await client.restack("stale", sealed, fresh);
    await client.release("stale");
    const again = await client.create({
      deviceId: "stale",
      image: info.image,
      readOnly: false,
      exportKind: "nbd",
    });
    expect(again.image.lowers.map((lower) => lower.file)).toEqual([sealed]);
    expect(again.image.upper).toMatchObject(fresh);
    await expectIo(again, "read -P 6 0 1M", "write -P 7 1M 1M");
    const next = { sealed: join(dir, "stale-2.layer"), fresh: upperIn(dir) };
    await client.restack("stale", next.sealed, next.fresh);
    const { image } = (await client.get("stale"))!;
    expect(image.lowers.map((lower) => lower.file)).toEqual([sealed, next.sealed]);
    await client.release("stale");
    const last = await client.create({ deviceId: "stale", image, readOnly: false, exportKind: "nbd" });
    await expectIo(last, "read -P 6 0 1M", "read -P 7 1M 1M");
    await end(daemon);
  });

  test("a lost upper is reported and never replaced by an empty one; a torn record harms no other device", async () => {
    const options = optionsFor("lost");
    const first = await supervise(options);
    const [lost, fine] = [await createBlank(first.client, "lost"), await createBlank(first.client, "fine")];
    await expectIo(fine, "write -P 2 0 64k");
    const { pid } = await first.client.stats();
    await first[Symbol.asyncDispose]();
    process.kill(pid, "SIGKILL");
    rmSync(lost.image.upper!.data);
    writeFileSync(join(options.runtimeDir, "devices", "torn.json"), '{"version":1,');
    const second = await supervise(options);
    const devices = await second.client.list();
    expect(devices.map((device) => [device.deviceId, device.failure === undefined])).toEqual([
      ["fine", true],
      ["lost", false],
    ]);
    expect(devices[1]!.failure).toContain(lost.image.upper!.data);
    expect(existsSync(lost.image.upper!.data)).toBe(false);
    await expect(second.client.flush("lost")).rejects.toMatchObject({ code: "device_unavailable" });
    await expectIo(fine, "read -P 2 0 64k");
    expect(readdirSync(join(options.runtimeDir, "devices"))).toContain("torn.json.corrupt");
    await second.client.release("lost");
    expect((await second.client.list()).map((device) => device.deviceId)).toEqual(["fine"]);
    await end(second);
  });

  test("a client that was disposed says so", async () => {
    const options = optionsFor("disposed");
    const supervised = await supervise(options);
    const client = await connectBlockd(options.socketPath);
    await client[Symbol.asyncDispose]();
    await expect(client.list()).rejects.toBeInstanceOf(AenvError);
    await end(supervised);
  });
});
