/**
 * Memory that guests give back: what a VMM holds before and after, what is captured then, and what it costs. Real VMs;
 * emulated ones, so the processor time is far above that of a machine with KVM.
 */
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { DEFAULT_BOOT_ARGS } from "../../src/config/schema.ts";
import { createLogger } from "../../src/lib/log.ts";
import { createMemoryService } from "../../src/memory/index.ts";
import { createQemuDriver, type VmDrive } from "../../src/vmm/index.ts";
import { nbdDisk, prepareGuest, testNetwork } from "../vmkit/index.ts";

const MEMORY_MIB = 384;
const DISK_MIB = 96;
const MIB = 2 ** 20;
const TICKS_PER_SECOND = 100;
const IDLE_SECONDS = 10;

const guest = await prepareGuest("bench-memory");
if (typeof guest === "string") throw new Error(guest);
using _guest = guest;
const log = createLogger("bench");
log.level = "silent";

function processorSeconds(pid: number): number {
  const text = readFileSync(`/proc/${pid}/stat`, "latin1");
  const fields = text.slice(text.lastIndexOf(")") + 2).split(" ");
  return (Number(fields[11]) + Number(fields[12])) / TICKS_PER_SECOND;
}

function ownMiB(pid: number): number {
  return Number(/^RssAnon:\s+(\d+)/m.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1]) / 1024;
}

const memory = createMemoryService({ cacheDir: join(guest.dir, "memory"), maxCacheBytes: 2 ** 32, log });
const sized = join(guest.dir, "sized.img");
writeFileSync(sized, Buffer.alloc(DISK_MIB * MIB, "content "));
// Memory is cold after 5 s instead of a minute, so that the run is short. Given with the VM's own words: emulated
// guests are not given those of the configuration's.
const cold = DEFAULT_BOOT_ARGS.split(" ")
  .filter((word) => word.startsWith("damon_reclaim."))
  .map((word) => word.replace(/min_age=\d+/, "min_age=5000000"));

console.log(
  "| MiB of the VMM that its guest wrote | nothing given back | free pages | and cold ones (DAMON) |",
);
console.log("| --- | ---: | ---: | ---: |");
const rows = new Map<string, string[]>();
const note = (name: string, value: string): void => void rows.set(name, [...(rows.get(name) ?? []), value]);
for (const [name, shieldPath, words] of [
  ["plain", undefined, []],
  ["reported", guest.qemu.shieldPath, []],
  ["damon", guest.qemu.shieldPath, cold],
] as const) {
  await using scope = new AsyncDisposableStack();
  const { shieldPath: _, ...qemu } = guest.qemu;
  const driver = createQemuDriver({
    ...qemu,
    ...(shieldPath === undefined ? {} : { shieldPath }),
    mode: "tcg",
    kernelPath: guest.kernelPath,
    log,
  });
  const network = scope.use(await testNetwork());
  const disk: VmDrive = scope.use(await nbdDisk(guest.dir, name, false, sized));
  const image = { sizeBytes: MEMORY_MIB * MIB, layers: [] };
  const lease = scope.use(await memory.materialize(image));
  const workDir = join(guest.dir, name);
  mkdirSync(workDir);
  const vm = scope.use(
    await driver.launch({
      vmId: name,
      workDir,
      shape: { vcpuCount: 1, memoryMiB: MEMORY_MIB },
      kernelPath: guest.kernelPath,
      initrdPath: guest.initrdPath,
      kernelArgs: ["quiet", ...words],
      drives: [disk],
      network,
      memoryFile: lease.file,
      consoleLogPath: join(workDir, "console.log"),
    }),
  );
  const { pid } = vm.reference;
  await network.ask();
  await network.ask("p");
  note(`booted, ${DISK_MIB} MiB of a disk read`, ownMiB(pid).toFixed(0));
  await network.ask("a");
  note("128 MiB more in use", ownMiB(pid).toFixed(0));
  const freeing = processorSeconds(pid);
  await network.ask("f");
  await Bun.sleep(6000);
  note("6 s after these were freed", ownMiB(pid).toFixed(0));
  note("processor time of these 6 s", `${(processorSeconds(pid) - freeing).toFixed(2)} s`);
  await Bun.sleep(10_000);
  note("10 s later", ownMiB(pid).toFixed(0));
  const idle = processorSeconds(pid);
  await Bun.sleep(IDLE_SECONDS * 1000);
  note("idle, of a processor", `${(((processorSeconds(pid) - idle) / IDLE_SECONDS) * 100).toFixed(1)} %`);
  await vm.pause();
  const captured = await memory.capture(vm.reference, image, join(guest.dir, `${name}.layer`));
  note("captured layer", (captured.storedBytes / MIB).toFixed(0));
  note("scan and write", `${(captured.scanMs + captured.writeMs).toFixed(0)} ms`);
}
for (const [name, values] of rows) console.log(`| ${name} | ${values.join(" | ")} |`);
