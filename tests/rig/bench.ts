/**
 * Figures of docs/performance.md, section "ublk", in one run of the rig: `make rig CMD="bun tests/rig/bench.ts"`.
 * The same image over ublk, over NBD (fio's own client on the export's socket) and as a raw file behind the kernel's
 * loop device, in alternating rounds; medians, and ratios to ublk. Everything is emulated there: only ratios mean
 * anything.
 */
import { join } from "node:path";
import { fio } from "../bench/storage/fio.ts";
import { Daemon, inRig, MiB, median, scratch, sh } from "./harness.ts";

if (!inRig) {
  console.error('there is no /dev/ublk-control here: make rig CMD="bun tests/rig/bench.ts"');
  process.exit(1);
}
const ROUNDS = Number(process.env.AENV_BENCH_ROUNDS ?? 3);
const SECONDS = Number(process.env.AENV_BENCH_SECONDS ?? 3);
const SIZE = 128 * MiB;

using place = scratch("bench");
await using daemon = await Daemon.start(place.dir, "--workers", "1");
const ublk = await daemon.blank("ublk", "ublk", SIZE);
const nbd = await daemon.blank("nbd", "nbd", SIZE);
const raw = join(place.dir, "raw");
const loop = (await sh(`fallocate -l ${SIZE} ${raw}; losetup --show -f --direct-io=off ${raw}`)).trim();
const kinds = {
  ublk: { filename: ublk.devicePath ?? "", ioengine: "libaio", direct: 1 },
  nbd: { ioengine: "nbd", uri: `nbd+unix:///${nbd.exportName}?socket=${nbd.socketPath}`, filename: "" },
  loop: { filename: loop, ioengine: "libaio", direct: 1 },
} as const;
type Kind = keyof typeof kinds;

function options(kind: Kind, more: Record<string, string | number>): Record<string, string | number> {
  const { filename, ...rest } = kinds[kind];
  return { ...rest, ...(filename === "" ? {} : { filename }), size: SIZE, ...more };
}

try {
  for (const kind of Object.keys(kinds) as Kind[])
    await fio(options(kind, { rw: "write", bs: "256k", iodepth: 8 }));
  console.log(
    "| | ublk | NBD | loop on a raw file | ublk / NBD | ublk / loop |\n| --- | --- | --- | --- | --- | --- |",
  );
  const cases = [
    { name: "random reads, 4 KiB, depth 16, IOPS", rw: "randread", bs: "4k", iodepth: 16, iops: true },
    { name: "random writes, 4 KiB, depth 16, IOPS", rw: "randwrite", bs: "4k", iodepth: 16, iops: true },
    { name: "random reads, 4 KiB, depth 1, IOPS", rw: "randread", bs: "4k", iodepth: 1, iops: true },
    { name: "reads, 512 KiB, depth 8, MiB/s", rw: "read", bs: "512k", iodepth: 8, iops: false },
    { name: "writes, 512 KiB, depth 8, MiB/s", rw: "write", bs: "512k", iodepth: 8, iops: false },
  ];
  for (const { name, iops, ...job } of cases) {
    const found: Record<Kind, number[]> = { ublk: [], nbd: [], loop: [] };
    for (let round = 0; round < ROUNDS; round++) {
      for (const kind of Object.keys(kinds) as Kind[]) {
        const result = await fio(options(kind, { ...job, time_based: 1, runtime: SECONDS }));
        found[kind].push(iops ? result.iops : result.mibPerSecond);
      }
    }
    const [u, n, l] = [median(found.ublk), median(found.nbd), median(found.loop)];
    const ratio = (other: number) => (u / other).toFixed(2);
    console.log(
      `| ${name} | ${u.toFixed(0)} | ${n.toFixed(0)} | ${l.toFixed(0)} | ${ratio(n)} | ${ratio(l)} |`,
    );
  }
} finally {
  await sh(`losetup -d ${loop}`);
}
