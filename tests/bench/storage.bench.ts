/**
 * The storage engine against fio, a bare decompression loop in C and qemu-nbd: always in the same run, over the
 * same bytes, in alternating rounds, so that a busy host slows both. `AENV_BENCH_ROUNDS` (default 5) rounds give
 * medians. Rates are by the clock; beside them stands processor time per operation, which other load changes
 * least. `AENV_BENCH_ONLY` runs the sections whose name contains it.
 */
import { dlopen } from "bun:ffi";
import {
  closeSync,
  fdatasyncSync,
  fsyncSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
  writeSync,
} from "node:fs";
import { join, resolve } from "node:path";
import { CODEC_ALGORITHMS } from "../../ffi/codec.ts";
import { createLogger } from "../../src/lib/log.ts";
import { alignedAccess } from "../../src/storage/blockd/aligned.ts";
import { DirectReader } from "../../src/storage/blockd/direct.ts";
import { Fetcher } from "../../src/storage/blockd/fetch.ts";
import { Flusher, syncAll } from "../../src/storage/blockd/flusher.ts";
import { superviseBlockd } from "../../src/storage/blockd/index.ts";
import { openIoEngine } from "../../src/storage/io/index.ts";
import { hostDisk } from "../../src/storage/overlaybd/disk.ts";
import { createLayerWriter, openStack, type StackOptions } from "../../src/storage/overlaybd/index.ts";
import { forgetSharedIndexes } from "../../src/storage/overlaybd/index-cache.ts";
import { LayerFileWriter } from "../../src/storage/overlaybd/layer-writer.ts";
import { openUnwrapped } from "../../src/storage/overlaybd/open-layer.ts";
import type { ImageConfig, LayerRef } from "../../src/storage/overlaybd/types.ts";
import { threadBlockCache } from "../../src/storage/overlaybd/zfile/block-cache.ts";
import type { ZFileSource } from "../../src/storage/overlaybd/zfile/reader.ts";
import { fio } from "./storage/fio.ts";

const ROUNDS = Number(process.env.AENV_BENCH_ROUNDS ?? 5);
const ONLY = process.env.AENV_BENCH_ONLY ?? "";
const MIB = 2 ** 20;
const BLOCK = 4096;
const DISK_BYTES = 512 * MIB;
const DISK_BLOCKS = DISK_BYTES / BLOCK;
const QUEUE_DEPTH = 32;

const root = mkdtempSync(join(process.env.AENV_BENCH_DIR ?? "/var/tmp", "aenv-bench-storage-"));
process.on("exit", () => rmSync(root, { recursive: true, force: true }));
const repository = resolve(import.meta.dir, "../..");
await using engine = openIoEngine();
const nowhere = new Uint8Array(new ArrayBuffer(256 << 10));

// ---- measuring ----------------------------------------------------------------------------------------

interface Sample {
  /** Operations (or MiB) per second. */
  readonly rate: number;
  readonly cpuUs: number;
}

function median(values: readonly number[]): number {
  return values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)] ?? Number.NaN;
}

const figure = (value: number) =>
  value >= 10_000 ? `${(value / 1000).toFixed(0)} k` : value >= 100 ? value.toFixed(0) : value.toPrecision(3);

function row(...cells: readonly string[]): void {
  console.log(`| ${cells.join(" | ")} |`);
}

function header(...cells: readonly string[]): void {
  console.log();
  row(...cells);
  row(...cells.map(() => "---"));
}

/** Ours and the reference in turns; one line with both medians, their ratio and that of processor time. */
async function compare(
  name: string,
  unit: string,
  target: number,
  ours: () => Promise<Sample>,
  reference: () => Promise<Sample>,
  rounds = ROUNDS,
): Promise<void> {
  const mine: Sample[] = [];
  const theirs: Sample[] = [];
  for (let round = 0; round < rounds; round++) {
    mine.push(await ours());
    theirs.push(await reference());
  }
  // Rounds side by side saw about the same load: the ratio of each pair is steadier than that of medians.
  const ratio = median(mine.map((sample, i) => sample.rate / theirs[i]!.rate));
  const rate = (samples: readonly Sample[]) => figure(median(samples.map((sample) => sample.rate)));
  const cpu = (samples: readonly Sample[]) => median(samples.map((sample) => sample.cpuUs));
  row(
    name,
    `${rate(mine)} ${unit}`,
    `${rate(theirs)} ${unit}`,
    ratio.toFixed(2),
    target === 0 ? "–" : `≥ ${target}`,
    `${cpu(mine).toFixed(2)} / ${cpu(theirs).toFixed(2)} µs`,
    (cpu(theirs) / cpu(mine)).toFixed(2),
  );
}

async function timed(
  operations: number,
  work: () => Promise<void> | void,
  unitsPerOperation = 1,
): Promise<Sample> {
  const cpu = process.cpuUsage();
  const started = performance.now();
  await work();
  const seconds = (performance.now() - started) / 1000;
  const { user, system } = process.cpuUsage(cpu);
  return { rate: (operations * unitsPerOperation) / seconds, cpuUs: (user + system) / operations };
}

/** A permutation of [0, count) without a table: odd multiplier modulo a power of two. */
function scattered(count: number): (i: number) => number {
  const salt = Math.floor(Math.random() * count);
  return (i) => (Math.imul(i, 0x9e3779b1 | 1) + salt) & (count - 1);
}

const libc = dlopen("libc.so.6", {
  posix_fadvise: { args: ["i32", "i64", "i64", "i32"], returns: "i32" },
});

function forget(...files: readonly string[]): void {
  const POSIX_FADV_DONTNEED = 4;
  for (const file of files) {
    const fd = openSync(file, "r");
    // Only clean pages can be dropped.
    fdatasyncSync(fd);
    libc.symbols.posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    closeSync(fd);
  }
}

// ---- what is measured ---------------------------------------------------------------------------------

/** Bytes that compress as software does: this host's own libraries. */
const realBytes = (() => {
  const directory = "/usr/lib/x86_64-linux-gnu";
  const files = readdirSync(directory).filter((name) => name.includes(".so"));
  const parts: Buffer[] = [];
  let total = 0;
  for (const name of files) {
    const file = join(directory, name);
    if (!statSync(file, { throwIfNoEntry: false })?.isFile()) continue;
    parts.push(readFileSync(file));
    total += parts.at(-1)!.length;
    if (total > 128 * MIB) break;
  }
  return total > 2 * MIB ? Buffer.concat(parts) : readFileSync(process.execPath);
})();
function realContent(offset: number, length: number): Uint8Array {
  const start = offset % (realBytes.length - length);
  return realBytes.subarray(start, start + length);
}

/** Eight raw layers: the bottom is full, each above it replaces an eighth of the 64 KiB pieces. */
function eightLayers(): LayerRef[] {
  const piece = 64 << 10;
  return Array.from({ length: 8 }, (_, layer) => {
    const file = join(root, `raw-${layer}`);
    using writer = createLayerWriter(file, { virtualSizeBytes: DISK_BYTES });
    for (let offset = 0; offset < DISK_BYTES; offset += piece) {
      const mine = layer === 0 || Math.imul(offset / piece, 0x9e3779b1) >>> 29 === layer;
      if (mine) writer.append(offset, realContent(offset + layer, piece));
    }
    return writer.finish();
  });
}

const section = async (name: string, run: () => Promise<void>) => {
  if (name.includes(ONLY)) await run();
};

const rates = ["what", "ours", "reference", "ratio", "target", "processor time per operation", "its ratio"];

console.log(`engine: ${engine.kind}; ${ROUNDS} rounds`);
let madeLayers: LayerRef[] | undefined;
/** Made for the first section that needs them. */
function rawLayers(): { lowers: LayerRef[]; flat: string } {
  madeLayers ??= eightLayers();
  return { lowers: madeLayers, flat: madeLayers[0]!.file };
}

await section("random-read", async () => {
  const { lowers, flat } = rawLayers();
  header(...rates);
  using stack = openStack({ lowers });
  const target = new Uint8Array(new ArrayBuffer(QUEUE_DEPTH * BLOCK));
  const slots = Array.from({ length: QUEUE_DEPTH }, (_, i) => target.subarray(i * BLOCK, (i + 1) * BLOCK));
  const warm = new Uint8Array(new ArrayBuffer(MIB));
  for (let offset = 0; offset < DISK_BYTES; offset += MIB) stack.read(offset, warm);
  const operations = 200_000;
  await compare(
    "4 KiB random read, 8 raw layers, page cache (fio)",
    "/s",
    0.7,
    () => {
      const block = scattered(DISK_BLOCKS);
      return timed(operations, () => {
        for (let i = 0; i < operations; i++) {
          if (!stack.tryRead(block(i) * BLOCK, slots[i % QUEUE_DEPTH]!))
            stack.read(block(i) * BLOCK, slots[0]!);
        }
      });
    },
    async () => {
      const size = { filename: flat, size: DISK_BYTES, io_size: operations * BLOCK };
      const { iops, cpuUs } = await fio({ ...size, rw: "randread", bs: "4k", direct: 0, invalidate: 0 });
      return { rate: iops, cpuUs };
    },
  );
  const access = alignedAccess(stack);
  const cold = 32_768;
  const fromDisk = () => {
    const block = scattered(DISK_BLOCKS);
    forget(...lowers.map((layer) => layer.file));
    let next = 0;
    return timed(cold, async () => {
      const reader = async (slot: Uint8Array) => {
        const fetcher = new Fetcher(access, DISK_BYTES, engine, nowhere);
        while (next < cold) {
          const offset = block(next++) * BLOCK;
          if (!access.tryRead(offset, slot)) await fetcher.read(offset, slot, () => undefined);
        }
      };
      await Promise.all(slots.map(reader));
    });
  };
  /** As a device with `directIo` reads. */
  const aroundCache = async () => {
    const block = scattered(DISK_BLOCKS);
    forget(...lowers.map((layer) => layer.file));
    await using reader = new DirectReader(stack, engine);
    let next = 0;
    return await timed(cold, async () => {
      const run = async (slot: Uint8Array) => {
        while (next < cold) {
          const offset = block(next++) * BLOCK;
          if ((await reader.read(offset, slot)) !== true) stack.read(offset, slot);
        }
      };
      await Promise.all(slots.map(run));
    });
  };
  for (const direct of [0, 1]) {
    await compare(
      `4 KiB random read, 8 raw layers, nothing cached${direct ? ", direct I/O (fio, direct)" : " (fio, buffered)"}`,
      "/s",
      0.7,
      direct ? aroundCache : fromDisk,
      async () => {
        forget(flat);
        const size = { filename: flat, size: DISK_BYTES, io_size: cold * BLOCK };
        const { iops, cpuUs } = await fio({ ...size, rw: "randread", bs: "4k", direct });
        return { rate: iops, cpuUs };
      },
    );
  }
});

await section("sequential", async () => {
  const { lowers, flat } = rawLayers();
  header(...rates);
  using stack = openStack({ lowers });
  const buffer = new Uint8Array(new ArrayBuffer(MIB));
  for (let offset = 0; offset < DISK_BYTES; offset += MIB) stack.read(offset, buffer);
  const pieces = DISK_BYTES / MIB;
  await compare(
    "1 MiB sequential read, 8 raw layers, page cache (fio)",
    "MiB/s",
    0.9,
    () =>
      timed(pieces, () => {
        for (let i = 0; i < pieces; i++) if (!stack.tryRead(i * MIB, buffer)) stack.read(i * MIB, buffer);
      }),
    async () => {
      const size = { filename: flat, size: DISK_BYTES };
      const { mibPerSecond, cpuUs } = await fio({
        ...size,
        rw: "read",
        bs: "1m",
        iodepth: 4,
        direct: 0,
        invalidate: 0,
      });
      return { rate: mibPerSecond, cpuUs };
    },
  );
  const access = alignedAccess(stack);
  await compare(
    "1 MiB sequential read, 8 raw layers, nothing cached (fio, buffered)",
    "MiB/s",
    0.9,
    () => {
      forget(...lowers.map((layer) => layer.file));
      const fetcher = new Fetcher(access, DISK_BYTES, engine, nowhere);
      return timed(pieces, async () => {
        for (let i = 0; i < pieces; i++) {
          if (access.tryRead(i * MIB, buffer)) fetcher.noteRead(i * MIB, MIB);
          else await fetcher.read(i * MIB, buffer, () => undefined);
        }
      });
    },
    async () => {
      forget(flat);
      const size = { filename: flat, size: DISK_BYTES };
      const { mibPerSecond, cpuUs } = await fio({ ...size, rw: "read", bs: "1m", iodepth: 4, direct: 0 });
      return { rate: mibPerSecond, cpuUs };
    },
  );
  let serial = 0;
  await compare(
    "1 MiB sequential write into an upper, flushed at the end (fio, fresh file)",
    "MiB/s",
    0.9,
    async () => {
      const name = join(root, `sequential-${serial++}`);
      const upper = { data: `${name}.data`, index: `${name}.index` };
      using writable = openStack({ lowers: [], upper, virtualSizeBytes: DISK_BYTES });
      const flusher = new Flusher(() => writable.beginFlush(), engine);
      const sample = await timed(pieces, async () => {
        for (let i = 0; i < pieces; i++) writable.write(i * MIB, buffer);
        await flusher.flush();
      });
      for (const file of Object.values(upper)) rmSync(file);
      return sample;
    },
    async () => {
      const filename = join(root, "sequential-fio");
      const options = { filename, size: DISK_BYTES, rw: "write", bs: "1m", iodepth: 4, direct: 0 };
      const { mibPerSecond, cpuUs } = await fio({ ...options, end_fsync: 1, fallocate: "none" });
      rmSync(filename);
      return { rate: mibPerSecond, cpuUs };
    },
  );
});

await section("random-write", async () => {
  const { lowers } = rawLayers();
  header(...rates);
  const writes = 32_768;
  let serial = 0;
  const data = realContent(0, BLOCK);
  for (const every of [1, 32, 1024]) {
    await compare(
      `4 KiB random write into an upper, flush after each ${every} (fio, fdatasync=${every})`,
      "/s",
      every === 32 ? 0.6 : 0,
      async () => {
        const count = every === 1 ? writes / 128 : writes;
        const name = join(root, `random-${serial++}`);
        const upper = { data: `${name}.data`, index: `${name}.index` };
        using stack = openStack({ lowers, upper });
        const block = scattered(DISK_BLOCKS);
        const flusher = new Flusher(() => stack.beginFlush(), engine);
        // With many in flight, writes go on while a flush is under way and the next one is asked for, as in fio.
        const sample = await timed(count, async () => {
          const flushes: Promise<void>[] = [];
          for (let i = 1; i <= count; i++) {
            stack.write(block(i) * BLOCK, data);
            if (i % every !== 0) continue;
            flushes.push(flusher.flush());
            if (every === 1 || flushes.length === 2) await flushes.shift();
          }
          await Promise.all(flushes);
        });
        for (const file of Object.values(upper)) rmSync(file);
        return sample;
      },
      async () => {
        const count = every === 1 ? writes / 128 : writes;
        const filename = join(root, "random-fio");
        const options = { filename, size: DISK_BYTES, io_size: count * BLOCK, rw: "randwrite", bs: "4k" };
        // One after the other where each waits for its flush, as the guest that flushes does.
        const iodepth = every === 1 ? 1 : QUEUE_DEPTH;
        const { iops, cpuUs } = await fio({
          ...options,
          iodepth,
          direct: 0,
          fdatasync: every,
          fallocate: "none",
        });
        rmSync(filename);
        return { rate: iops, cpuUs };
      },
    );
  }
});

/** Blocks of a ZFile as the loop in C wants them. */
function blockTable(file: string): { table: string; blocks: number } {
  const { source } = openUnwrapped(hostDisk, file);
  using zfile = source as ZFileSource;
  const { blocks, blockSizeBytes } = zfile.layout;
  const bytes = new DataView(new ArrayBuffer(blocks * 16));
  for (let i = 0; i < blocks; i++) {
    zfile.locateBlock(i, (offset, stored) => {
      bytes.setBigUint64(i * 16, BigInt(offset), true);
      bytes.setUint32(i * 16 + 8, stored, true);
      bytes.setUint32(i * 16 + 12, Math.min(blockSizeBytes, zfile.sizeBytes - i * blockSizeBytes), true);
    });
  }
  const table = `${file}.table`;
  writeFileSync(table, new Uint8Array(bytes.buffer));
  return { table, blocks };
}

await section("zfile", async () => {
  header(...rates);
  const program = join(root, "decode");
  const library = resolve(repository, "build/libaenv.so");
  const source = resolve(import.meta.dir, "storage/decode.c");
  const built = Bun.spawnSync([
    "gcc",
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-o",
    program,
    source,
    library,
  ]);
  if (built.exitCode !== 0) throw new Error(built.stderr.toString());
  for (const algorithm of ["zstd", "lz4"] as const) {
    for (const blockSizeBytes of [4096, 16384, 32768]) {
      const file = join(root, `${algorithm}-${blockSizeBytes}`);
      const size = 128 * MIB;
      {
        using writer = new LayerFileWriter(hostDisk, file, {
          virtualSizeBytes: size,
          compression: { algorithm, blockSizeBytes },
        });
        for (let offset = 0; offset < size; offset += MIB) writer.append(offset, realContent(offset, MIB));
        writer.finish();
      }
      const { table, blocks } = blockTable(file);
      using stack = openStack({ lowers: [{ file }] });
      // Every read has to decompress: what the cache saves is measured below.
      threadBlockCache.setLimit(0);
      const target = new Uint8Array(new ArrayBuffer(blockSizeBytes));
      // Many short turns: other load comes and goes within less than a second.
      const turns = 5 * ROUNDS;
      const operations = Math.floor(40_000 / (blockSizeBytes / 2048));
      const places = size / blockSizeBytes;
      // The layer's header takes a block: reads of its own blocks are shifted by it.
      const shift = blockSizeBytes === BLOCK ? 0 : blockSizeBytes - BLOCK;
      const read = (i: number, place: (i: number) => number) =>
        stack.read(Math.min(place(i) * blockSizeBytes + shift, size - blockSizeBytes), target);
      await compare(
        `${algorithm}, blocks of ${blockSizeBytes >> 10} KiB, one random block per read (bare decompression in C)`,
        "/s",
        0.8,
        () => {
          const place = scattered(places);
          return timed(operations, () => {
            for (let i = 0; i < operations; i++) read(i, place);
          });
        },
        async () => {
          const argv = [program, file, table, String(CODEC_ALGORITHMS[algorithm]), "1", String(operations)];
          const child = Bun.spawn(argv, { stdio: ["ignore", "pipe", "inherit"], env: { ...process.env } });
          const [wall, cpu] = (await new Response(child.stdout).text()).trim().split(" ").map(Number);
          if ((await child.exited) !== 0) throw new Error(`decode loop failed over ${blocks} blocks`);
          return { rate: 1e9 / wall!, cpuUs: cpu! / 1000 };
        },
        turns,
      );
    }
  }
  threadBlockCache.setLimit(64 * MIB);
});

/** Processor time a process has used, in hundredths of a second as the kernel counts it. */
function processorMs(pid: number): number {
  const fields = readFileSync(`/proc/${pid}/stat`, "latin1").split(") ")[1]!.split(" ");
  return (Number(fields[11]) + Number(fields[12])) * 10;
}

await section("nbd", async () => {
  const { lowers, flat } = rawLayers();
  header(...rates);
  // AENV_BENCH_SOURCE=1: the sources instead of the executable.
  const fromSource = process.env.AENV_BENCH_SOURCE === "1";
  const program = fromSource
    ? [process.execPath, resolve(repository, "src/main.ts")]
    : [resolve(repository, "dist/agentenv")];
  const log = createLogger("bench");
  log.level = "error";
  await using daemon = await superviseBlockd(
    {
      argv: [...program, "blockd"],
      socketPath: join(root, "b.sock"),
      runtimeDir: join(root, "run"),
      logPath: join(root, "blockd.log"),
    },
    log,
  );
  const qemuSocket = join(root, "qemu.sock");
  const raw = join(root, "qemu.raw");
  writeFileSync(raw, "");
  const flatCopy = Bun.spawnSync(["cp", "--sparse=never", flat, raw]);
  if (flatCopy.exitCode !== 0) throw new Error(flatCopy.stderr.toString());
  const qemu = Bun.spawn(
    ["qemu-nbd", "--persistent", "--shared=4", "-f", "raw", "--cache=writeback", "-k", qemuSocket, raw],
    {
      stdio: ["ignore", "ignore", "inherit"],
    },
  );
  await Bun.sleep(300);
  const upper = { data: join(root, "nbd.data"), index: join(root, "nbd.index") };
  const device = await daemon.client.create({
    deviceId: "bench",
    image: { lowers, upper, virtualSizeBytes: DISK_BYTES },
    readOnly: false,
    exportKind: "nbd",
  });
  const { pid: blockdPid } = await daemon.client.stats();
  const ours = `nbd+unix:///bench?socket=${device.socketPath}`;
  const theirs = `nbd+unix:///?socket=${qemuSocket}`;
  /** The server's processor time per operation, not the client's: that is the same for both. */
  const run = async (uri: string, pid: number, options: Record<string, string | number>): Promise<Sample> => {
    const before = processorMs(pid);
    const { iops, mibPerSecond, operations } = await fio({
      ioengine: "nbd",
      uri,
      size: 480 * MIB,
      ...options,
    });
    const cpuUs = ((processorMs(pid) - before) * 1000) / operations;
    return { rate: options.bs === "1m" ? mibPerSecond : iops, cpuUs };
  };
  const jobs: [string, string, Record<string, string | number>][] = [
    ["4 KiB random read, 1 at a time", "/s", { rw: "randread", bs: "4k", iodepth: 1, io_size: 40 * MIB }],
    ["4 KiB random read, 32 at a time", "/s", { rw: "randread", bs: "4k", iodepth: 32, io_size: 160 * MIB }],
    ["1 MiB sequential read, 4 at a time", "MiB/s", { rw: "read", bs: "1m", iodepth: 4, io_size: 480 * MIB }],
    ["4 KiB random write, 32 at a time", "/s", { rw: "randwrite", bs: "4k", iodepth: 32, io_size: 80 * MIB }],
    [
      "1 MiB sequential write, 4 at a time",
      "MiB/s",
      { rw: "write", bs: "1m", iodepth: 4, io_size: 480 * MIB },
    ],
  ];
  try {
    for (const [name, unit, options] of jobs) {
      await compare(
        `NBD: ${name} (qemu-nbd on a raw file)`,
        unit,
        0,
        () => run(ours, blockdPid, options),
        () => {
          // As new as what an upper appends: pages and blocks that are there already cost less.
          if (options.rw !== "read" && options.rw !== "randread") {
            truncateSync(raw, 0);
            truncateSync(raw, DISK_BYTES);
          }
          return run(theirs, qemu.pid, options);
        },
      );
    }
  } finally {
    qemu.kill();
    await qemu.exited;
    await daemon.client.shutdown();
  }
});

await section("attach", async () => {
  header("what", "each layer opened", "layers warm");
  const log = createLogger("bench");
  log.level = "error";
  // As shipped: sockets and records on a tmpfs.
  const run = mkdtempSync("/dev/shm/aenv-bench-storage-");
  await using scope = new AsyncDisposableStack();
  scope.defer(() => rmSync(run, { recursive: true, force: true }));
  const fromSource = process.env.AENV_BENCH_SOURCE === "1";
  const program = fromSource
    ? [process.execPath, resolve(repository, "src/main.ts")]
    : [resolve(repository, "dist/agentenv")];
  const start = async (name: string, warmLayers: number) => {
    const daemon = scope.use(
      await superviseBlockd(
        {
          argv: [...program, "blockd", "--workers", "1", "--warm-layers", String(warmLayers)],
          socketPath: join(run, `${name}.sock`),
          runtimeDir: join(run, name),
          logPath: join(run, `${name}.log`),
        },
        log,
      ),
    );
    scope.defer(() => daemon.client.shutdown());
    return daemon.client;
  };
  const cold = await start("cold", 0);
  const warm = await start("warm", 256);
  const block = realContent(0, BLOCK);
  let serial = 0;
  for (const layers of [1, 8, 64]) {
    const image = Array.from({ length: layers }, (_, layer) => {
      using writer = createLayerWriter(join(root, `attach-${layers}-${layer}`), {
        virtualSizeBytes: DISK_BYTES,
      });
      for (let i = 0; i < 4096 / layers; i++) writer.append((i * layers + layer) * 2 * BLOCK, block);
      return writer.finish();
    });
    const once = async (client: typeof cold): Promise<number> => {
      const deviceId = `attach-${serial++}`;
      const upper = { data: join(root, `${deviceId}.data`), index: join(root, `${deviceId}.index`) };
      const spec = { deviceId, image: { lowers: image, upper }, readOnly: false, exportKind: "nbd" } as const;
      const started = performance.now();
      await client.create(spec);
      const took = performance.now() - started;
      await client.release(deviceId);
      for (const file of Object.values(upper)) rmSync(file);
      return took;
    };
    for (const client of [cold, warm]) await once(client);
    const times: [number[], number[]] = [[], []];
    for (let i = 0; i < 10 * ROUNDS; i++) {
      times[0].push(await once(cold));
      times[1].push(await once(warm));
    }
    const spread = (values: readonly number[]) =>
      `${Math.min(...values).toFixed(2)} / ${median(values).toFixed(2)} ms`;
    row(`create a device of ${layers} layers, min / median`, spread(times[0]), spread(times[1]));
  }
});

/** 64 layers with about a million mappings together, all of one sector with gaps, so that none can be joined. */
function manyMappings(): LayerRef[] {
  const layers = 64;
  const perLayer = Math.ceil(1_000_000 / layers);
  const sector = new Uint8Array(new ArrayBuffer(512)).fill(1);
  return Array.from({ length: layers }, (_, layer) => {
    using writer = createLayerWriter(join(root, `map-${layer}`), { virtualSizeBytes: 64 * 2 ** 30 });
    for (let i = 0; i < perLayer; i++) writer.append((i * layers + layer) * 2 * 512, sector);
    return writer.finish();
  });
}

/** The least that a disk takes for syncs like those of a restack; milliseconds. */
function bareSyncs(): { rewrite: () => number; appendAndRename: () => number } {
  const names = [join(root, "bare-a"), join(root, "bare-b")];
  const block = realContent(0, BLOCK);
  let end = 16 * BLOCK;
  const fd = openSync(names[0]!, "w+");
  writeSync(fd, new Uint8Array(end), 0, end, 0);
  fsyncSync(fd);
  const directory = openSync(root, "r");
  const time = (work: () => void) => {
    const started = performance.now();
    work();
    return performance.now() - started;
  };
  return {
    rewrite: () =>
      time(() => {
        writeSync(fd, block, 0, BLOCK, 0);
        fdatasyncSync(fd);
      }),
    appendAndRename: () =>
      time(() => {
        writeSync(fd, block, 0, BLOCK, end);
        end += BLOCK;
        fdatasyncSync(fd);
        names.reverse();
        renameSync(names[1]!, names[0]!);
        fsyncSync(directory);
      }),
  };
}

await section("open", async () => {
  header("what", "min / median / max", "target");
  const image: ImageConfig = { lowers: manyMappings() };
  const spread = (values: readonly number[]) =>
    `${Math.min(...values).toFixed(1)} / ${median(values).toFixed(1)} / ${Math.max(...values).toFixed(1)} ms`;
  const indexCache = { directory: join(root, "index-cache") };
  const open = (options: StackOptions, prepare: () => void) => {
    const times: number[] = [];
    const processor: number[] = [];
    for (let round = 0; round < ROUNDS; round++) {
      prepare();
      const started = performance.now();
      const cpu = process.cpuUsage();
      using stack = openStack(image, options);
      times.push(performance.now() - started);
      const { user, system } = process.cpuUsage(cpu);
      processor.push((user + system) / 1000);
      if (stack.stats().lowerMappings < 990_000)
        throw new Error("the image has fewer mappings than it should");
    }
    return `${spread(times)} (processor time ${spread(processor)})`;
  };
  row(
    "open an image of 64 layers with 1 M mappings, no index kept",
    open({}, forgetSharedIndexes),
    "< 150 ms",
  );
  // The file is made outside of what is measured.
  forgetSharedIndexes();
  openStack(image, { indexCache })[Symbol.dispose]();
  row("the same, from the index cache", open({ indexCache }, forgetSharedIndexes), "< 10 ms");
  row(
    "the same, already open on the thread",
    open({ indexCache }, () => undefined),
    "–",
  );
  const list = join(root, "layers");
  writeFileSync(list, image.lowers.map(({ file }) => `${file}\n`).join(""));
  for (const cache of [undefined, indexCache.directory]) {
    const script = resolve(import.meta.dir, "storage/open-memory.ts");
    const child = Bun.spawnSync([process.execPath, script, list, ...(cache === undefined ? [] : [cache])]);
    const perMapping = Number(child.stdout.toString());
    if (!child.success || !(perMapping > 0)) throw new Error(`open-memory: ${child.stderr.toString()}`);
    row(
      `memory of 1 M mappings of lowers, ${cache === undefined ? "no index kept" : "from the index cache"}`,
      `${((perMapping * 1e6) / MIB).toFixed(1)} MiB`,
      "< 40 MiB",
    );
  }

  const { lowers } = rawLayers();
  const data = new Uint8Array(new ArrayBuffer(MIB)).fill(7);
  const floor = bareSyncs();
  // Writing a gigabyte leaves the disk, the kernel and this thread's share of the processors behind for a while.
  for (const [mib, settleMs, rounds] of [
    [16, 0, 2 * ROUNDS],
    [1024, 300, ROUNDS],
    [1024, 0, ROUNDS],
  ] as const) {
    const restacks: number[] = [];
    const held: number[] = [];
    const rewritten: number[] = [];
    const twice: number[] = [];
    for (let round = 0; round < rounds; round++) {
      const name = (what: string) => join(root, `restack-${round}-${what}`);
      const upper = { data: name("data"), index: name("index") };
      using stack = openStack({ lowers, upper, virtualSizeBytes: 2 * 2 ** 30 });
      for (let i = 0; i < mib; i++) stack.write(i * MIB, data);
      stack.flush();
      await Bun.sleep(settleMs);
      // What the disk does then, without us.
      rewritten.push(floor.rewrite());
      twice.push(floor.appendAndRename());
      // As a device does it: the syncs on the ring, the thread is held between them only.
      const started = performance.now();
      let longest = 0;
      const steps = stack.restackSteps(name("sealed"), { data: name("data2"), index: name("index2") });
      for (;;) {
        const from = performance.now();
        const step = steps.next();
        longest = Math.max(longest, performance.now() - from);
        if (step.done === true) break;
        await syncAll(step.value, engine);
      }
      restacks.push(performance.now() - started);
      held.push(longest);
      for (const file of ["sealed", "data2", "index2"]) rmSync(name(file));
    }
    const written = mib === 1024 ? "1 GiB" : `${mib} MiB`;
    const when = settleMs === 0 ? "right after its flush" : `${settleMs} ms after its flush`;
    row(`seal and restack of an upper with ${written} written, ${when}`, spread(restacks), "< 10 ms");
    row("of that the longest time the thread's other devices wait", spread(held), "–");
    row("bare: 4 KiB rewritten and synced", spread(rewritten), "–");
    row("bare: 4 KiB appended and synced, the file renamed and its directory synced", spread(twice), "–");
    const ratio = median(restacks.map((time, i) => time / twice[i]!));
    row("restack to that, by rounds", ratio.toFixed(2), "–");
  }
});
