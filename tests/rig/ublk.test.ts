import { afterAll, afterEach, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { randomBytes } from "node:crypto";
import { chmodSync, chownSync, existsSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import type { DeviceInfo, ExportKind } from "../../src/storage/blockd/index.ts";
import { BufferPool } from "../../src/storage/export/nbd/index.ts";
import { probeUblkHere, UblkServer, ublkStamp } from "../../src/storage/export/ublk/index.ts";
import { commitUpper, createLayerWriter, mergeLayers } from "../../src/storage/overlaybd/index.ts";
import type { LayerRef, UpperRef } from "../../src/storage/overlaybd/types.ts";
import {
  blockdOptions,
  complaints,
  Daemon,
  fioArgs,
  kernelLog,
  MiB,
  median,
  qemuIo,
  run,
  scratch,
  sh,
  ublkNodes,
  ublkNumber,
} from "./harness.ts";

/*
 * Disks over ublk with a real kernel, inside the rig. One daemon with one worker serves them all: one thread,
 * one ring.
 */

setDefaultTimeout(240_000);

const place = scratch("ublk");
let daemon: Daemon;
let firstLine = 0;

beforeAll(async () => {
  firstLine = (await kernelLog()).length;
  daemon = await Daemon.start(place.dir, "--workers", "1");
});
afterAll(async () => {
  await daemon[Symbol.asyncDispose]();
  place[Symbol.dispose]();
});
afterEach(async () => {
  // What a failed test left is not the next one's business.
  for (const { deviceId } of await daemon.client.list()) await daemon.client.release(deviceId);
  expect(await complaints(firstLine)).toEqual([]);
});

const figure = (text: string) => console.log(`figure: ${text}`);

/** A layer of random data over the first `sizeBytes` of a disk. */
function randomLayer(name: string, virtualSizeBytes: number, pieces: readonly [number, number][]): LayerRef {
  using writer = createLayerWriter(join(place.dir, name), { virtualSizeBytes });
  for (const [offset, length] of pieces) writer.append(offset, randomBytes(length));
  return writer.finish();
}

/** Three layers over each other and the topmost compressed, all partly hidden by the next. */
async function layeredImage(): Promise<LayerRef[]> {
  const size = 64 * MiB;
  const base = randomLayer("base", size, [[0, 24 * MiB]]);
  const middle = randomLayer("middle", size, [
    [4 * MiB, 2 * MiB],
    [40 * MiB, 4 * MiB],
  ]);
  const upper: UpperRef = { data: join(place.dir, "zu.data"), index: join(place.dir, "zu.index") };
  const info = await daemon.create("make-zstd", "nbd", {
    lowers: [base, middle],
    upper,
    virtualSizeBytes: size,
  });
  await qemuIo(info, "write -P 7 1M 2M", "write -P 9 50M 3M", "flush");
  await daemon.client.release("make-zstd");
  const top = commitUpper(upper, join(place.dir, "top.zstd"), {
    compression: { algorithm: "zstd", blockSizeBytes: 65_536 },
  });
  return [base, middle, top];
}

test("the host is found usable, and nothing is left of the probe", async () => {
  expect(await probeUblkHere()).toMatchObject({ usable: true });
  expect(ublkNodes()).toEqual([]);
  const text = await run([join(import.meta.dir, "../../dist/agentenv"), "blockd", "--probe-ublk"]);
  expect(JSON.parse(text)).toMatchObject({ usable: true });
});

describe.each(["nbd", "ublk"] as const)("the same over %s:", (kind: ExportKind) => {
  test("QEMU writes, reads, flushes, trims and zeroes", async () => {
    const id = `basic-${kind}`;
    const info = await daemon.blank(id, kind, 64 * MiB);
    expect(info).toMatchObject({ virtualSizeBytes: 64 * MiB, readOnly: false, exportKind: kind });
    await qemuIo(
      info,
      "read -P 0 0 1M",
      "write -P 0xab 1M 3M",
      "write -P 0xcd 100 300",
      "write -f -P 0xef 8k 4k",
      "read -P 0xab 1M 3M",
      "read -P 0xcd 100 300",
      "read -P 0xef 8k 4k",
      "write -z 2M 1M",
      "discard 3M 64k",
      "flush",
      "read -P 0 2M 1M",
      "read -P 0 3M 64k",
      "write -P 0x11 63M 1M",
      "read -P 0x11 63M 1M",
    );
    const stats = (await daemon.client.stats()).devices.find(({ deviceId }) => deviceId === id);
    expect(stats).toMatchObject({ errorOps: 0 });
    expect(stats?.flushOps).toBeGreaterThan(0);
    expect(stats?.trimOps).toBeGreaterThan(0);
    await daemon.client.release(id);
    expect(existsSync(info.devicePath ?? info.socketPath ?? "")).toBe(false);
  });

  test("a read-only device refuses writes", async () => {
    const id = `ro-${kind}`;
    const layer = randomLayer(`ro-layer-${kind}`, 16 * MiB, [[0, MiB]]);
    const info = await daemon.client.create({
      deviceId: id,
      image: { lowers: [layer] },
      readOnly: true,
      exportKind: kind,
    });
    await qemuIo(info, "read 0 2M");
    await expect(qemuIo({ ...info, readOnly: false }, "write 0 4k")).rejects.toThrow(
      /read.?only|not writable|permission denied/i,
    );
    await daemon.client.release(id);
  });

  test("a snapshot taken between writes keeps what was there, and the disk goes on", async () => {
    const id = `restack-${kind}`;
    const info = await daemon.blank(id, kind, 32 * MiB);
    await qemuIo(info, "write -P 1 0 4M", "flush");
    const sealedPath = join(place.dir, `${id}.sealed`);
    const layer = await daemon.client.restack(id, sealedPath, daemon.upper());
    await qemuIo(info, "read -P 1 0 4M", "write -P 2 1M 1M", "read -P 2 1M 1M", "read -P 1 2M 2M");
    const old = await daemon.client.create({
      deviceId: `${id}-old`,
      image: { lowers: [layer] },
      readOnly: true,
      exportKind: kind,
    });
    await qemuIo(old, "read -P 1 0 4M");
    await daemon.client.release(`${id}-old`);
    // The layers below are replaced by one, under the device that stays.
    const second = await daemon.client.restack(id, `${sealedPath}-2`, daemon.upper());
    const merged = mergeLayers([layer, second], `${sealedPath}-merged`, {});
    await daemon.client.swapLowers(id, [{ first: 0, count: 2, files: [layer.file, second.file], merged }]);
    expect((await daemon.client.get(id))?.image.lowers).toHaveLength(1);
    await qemuIo(
      info,
      "read -P 1 0 1M",
      "read -P 2 1M 1M",
      "read -P 1 2M 2M",
      "write -P 3 0 64k",
      "read -P 3 0 64k",
    );
    await daemon.client.release(id);
  });

  test("a daemon that is killed comes back with its devices where they were", async () => {
    const id = `killed-${kind}`;
    const info = await daemon.blank(id, kind, 32 * MiB);
    await qemuIo(info, "write -P 5 0 4M", "flush");
    await daemon.crash();
    const back = await daemon.client.get(id);
    expect(back).toMatchObject({ ...info, image: back?.image });
    await qemuIo(info, "read -P 5 0 4M", "write -P 6 1M 1M", "read -P 6 1M 1M");
    await daemon.client.release(id);
  });
});

test("fio verifies raw, compressed and layered images", async () => {
  const lowers = await layeredImage();
  const cases: [string, Promise<DeviceInfo>][] = [
    ["raw", daemon.blank("fio-raw", "ublk", 64 * MiB)],
    ["zstd", daemon.create("fio-zstd", "ublk", { lowers: lowers.slice(2), virtualSizeBytes: 64 * MiB })],
    ["layered", daemon.create("fio-layered", "ublk", { lowers, virtualSizeBytes: 64 * MiB })],
  ];
  for (const [name, made] of cases) {
    const { devicePath = "" } = await made;
    await run(fioArgs(devicePath, { size: "12M" }));
    await daemon.client.release(`fio-${name}`);
  }
});

test("layers are read through ublk as they were written", async () => {
  const pieces = randomBytes(3 * MiB);
  const file = join(place.dir, "exact");
  {
    using writer = createLayerWriter(file, { virtualSizeBytes: 16 * MiB });
    writer.append(5 * MiB, pieces);
    writer.finish();
  }
  const { devicePath = "" } = await daemon.create("exact", "ublk", { lowers: [{ file }] });
  const expected = join(place.dir, "exact.raw");
  writeFileSync(expected, Buffer.concat([Buffer.alloc(5 * MiB), pieces, Buffer.alloc(8 * MiB)]));
  await run(["cmp", expected, devicePath]);
  await daemon.client.release("exact");
});

test("a file system survives that its disk is pulled while it is written", async () => {
  const upper = daemon.upper();
  const spec = { upper, virtualSizeBytes: 128 * MiB };
  const { devicePath = "" } = await daemon.create("plug", "ublk", spec);
  const at = join(place.dir, "mnt");
  await sh(`mkfs.ext4 -q ${devicePath}; mkdir -p ${at}; mount ${devicePath} ${at}
    head -c 24M /dev/urandom > ${at}/kept; sync ${at}/kept; sync ${at}
    sha256sum < ${at}/kept > ${place.dir}/kept.sum
    (for i in $(seq 400); do head -c 200k /dev/zero > ${at}/f$i || exit 0; done) > /dev/null 2>&1 & sleep 0.3`);
  const pulledMs = performance.now();
  await daemon.client.release("plug");
  figure(
    `release of a disk in use by a mounted file system: ${(performance.now() - pulledMs).toFixed(0)} ms`,
  );
  await sh(`umount -l ${at}`);
  const again = await daemon.create("plug", "ublk", spec);
  await sh(`rc=0; e2fsck -fy ${again.devicePath} || rc=$?; [ $rc -le 1 ]
    e2fsck -fn ${again.devicePath}; mount ${again.devicePath} ${at}
    sha256sum < ${at}/kept | cmp - ${place.dir}/kept.sum; umount ${at}`);
  await daemon.client.release("plug");
});

test("64 devices on one worker, all written and verified at once", async () => {
  const names = Array.from({ length: 64 }, (_, i) => `many-${i}`);
  const startedMs = performance.now();
  const infos = await Promise.all(names.map((name) => daemon.blank(name, "ublk", MiB)));
  const upMs = performance.now() - startedMs;
  expect(new Set(infos.map(ublkNumber)).size).toBe(64);
  const { workers, devices } = await daemon.client.stats();
  expect([workers.length, devices.length]).toEqual([1, 64]);
  const paths = infos.map(({ devicePath }) => devicePath).join(":");
  await run(
    fioArgs(paths, {
      size: "24M",
      bs: "16k",
      bsrange: "16k-16k",
      iodepth: 64,
      file_service_type: "roundrobin",
    }),
  );
  const touched = (await daemon.client.stats()).devices.filter(
    ({ writeOps, readOps }) => writeOps > 0 && readOps > 0,
  );
  expect(touched.length).toBe(64);
  const downMs = performance.now();
  await Promise.all(names.map((name) => daemon.client.release(name)));
  figure(`64 devices: up in ${upMs.toFixed(0)} ms, down in ${(performance.now() - downMs).toFixed(0)} ms`);
  expect(ublkNodes()).toEqual([]);
});

test("killed 20 times under fio, with no error and nothing lost", async () => {
  const info = await daemon.blank("storm", "ublk", 64 * MiB);
  const downs: number[] = [];
  let over = false;
  const killing = (async () => {
    try {
      for (let i = 0; i < 20; i++) {
        await Bun.sleep(100 + Math.random() * 300);
        downs.push((await daemon.crash()).downMs);
      }
    } finally {
      over = true;
    }
  })();
  // Writes all, reads all back and compares, again and again for as long as the daemon is killed.
  let rounds = 0;
  for (; !over; rounds++) {
    const output = await run(fioArgs(info.devicePath ?? "", { size: "24M", verify_backlog: 64 }), 200_000);
    expect(output).toMatch(/err= 0/);
  }
  await killing;
  expect(downs.length).toBe(20);
  expect(ublkNumber((await daemon.client.get("storm"))!)).toBe(ublkNumber(info));
  figure(
    `daemon killed 20 times during ${rounds} rounds of fio: back after ${median(downs).toFixed(0)} ms (median), ${Math.max(...downs).toFixed(0)} ms at most`,
  );
  await daemon.client.release("storm");
});

test("a daemon told to end leaves its devices to the next", async () => {
  const info = await daemon.blank("kept", "ublk", 32 * MiB);
  await qemuIo(info, "write -P 3 0 2M", "flush");
  const { pid } = await daemon.client.stats();
  const reading = qemuIo(info, "sleep 500", "write -P 4 2M 2M", "read -P 3 0 2M");
  process.kill(pid, "SIGTERM");
  await reading;
  await qemuIo(info, "read -P 4 2M 2M");
  expect((await daemon.client.stats()).pid).not.toBe(pid);
  await daemon.client.release("kept");
});

test("adding and deleting", async () => {
  const adds: number[] = [];
  const deletes: number[] = [];
  for (let i = 0; i < 15; i++) {
    const name = `cycle-${i}`;
    const startedMs = performance.now();
    await daemon.blank(name, "ublk", 16 * MiB);
    const addedMs = performance.now();
    await daemon.client.release(name);
    adds.push(addedMs - startedMs);
    deletes.push(performance.now() - addedMs);
  }
  figure(`add ${median(adds).toFixed(1)} ms, delete ${median(deletes).toFixed(1)} ms (medians of 15)`);
  expect(ublkNodes()).toEqual([]);
});

test("devices that a dead daemon left behind go at the next start, those of others stay", async () => {
  using own = scratch("orphans");
  const { runtimeDir } = blockdOptions(own.dir);
  const left: number[] = [];
  let foreign: number;
  {
    await using server = UblkServer.open(new BufferPool());
    for (let i = 0; i < 3; i++) left.push((await server.add(ublkStamp(runtimeDir), -1)).id);
    foreign = (await server.add(ublkStamp("/somewhere/else"), -1)).id;
  }
  {
    await using second = await Daemon.start(own.dir, "--workers", "1");
    expect(await second.client.list()).toEqual([]);
    for (const id of left) expect(existsSync(`/dev/ublkc${id}`)).toBe(false);
    expect(existsSync(`/dev/ublkc${foreign}`)).toBe(true);
    expect(second.log()).toContain("left behind");
  }
  await using server = UblkServer.open(new BufferPool());
  await server.discard(ublkStamp("/somewhere/else"), foreign);
  expect(ublkNodes()).toEqual([]);
});

test("a service's user serves devices with CAP_SYS_ADMIN and the rule of setup --host, and is told without", async () => {
  const USER = 65_534;
  using own = scratch("user");
  chownSync(own.dir, USER, USER);
  // There is no udev here: this does what the rule says.
  const ruled = setInterval(() => {
    for (const name of ["ublk-control", ...ublkNodes()]) {
      const node = `/dev/${name}`;
      if (statSync(node, { throwIfNoEntry: false })?.gid === 0) {
        chownSync(node, 0, USER);
        chmodSync(node, 0o660);
      }
    }
  }, 5);
  using _ruled = { [Symbol.dispose]: () => clearInterval(ruled) };
  // The checkout may lie where only root looks: reading is not what is tried here.
  const as = (...more: string[]) => {
    const capabilities = ["-all", "+dac_read_search", ...more].join(",");
    return [
      ...["setpriv", `--reuid=${USER}`, `--regid=${USER}`, "--clear-groups"],
      ...[`--inh-caps=${capabilities}`, `--ambient-caps=${capabilities}`, "--no-new-privs", "--"],
    ];
  };
  await using theirs = await Daemon.startUnder(as("+sys_admin"), own.dir, "--workers", "1");
  const disk = await theirs.blank("theirs", "ublk", 16 * MiB);
  await qemuIo(disk, "write -P 5 1M 1M", "flush", "read -P 5 1M 1M");
  await theirs.client.release("theirs");
  const probe = [join(import.meta.dir, "../../dist/agentenv"), "blockd", "--probe-ublk"];
  expect(JSON.parse(await run([...as(), ...probe]))).toMatchObject({
    usable: false,
    cure: expect.stringContaining("CAP_SYS_ADMIN"),
  });
});

test("FR-94: at the limit of devices further ones are refused at once, and the log stays small", async () => {
  using own = scratch("limit");
  await using small = await Daemon.start(own.dir, "--workers", "1", "--max-ublk-devices", "8");
  const results = await Promise.allSettled(
    Array.from({ length: 20 }, (_, i) => small.blank(`limit-${i}`, "ublk", 16 * MiB)),
  );
  const refused = results.filter((result) => result.status === "rejected");
  expect(results.length - refused.length).toBe(8);
  for (const { reason } of refused) expect(reason).toMatchObject({ code: "ublk_capacity", status: 507 });
  const before = statSync(small.options.logPath).size;
  await Bun.sleep(1000);
  expect(statSync(small.options.logPath).size).toBe(before);
  const running = await small.client.list();
  await small.client.release(running[0]!.deviceId);
  await small.blank("once-more", "ublk", 16 * MiB);
});
