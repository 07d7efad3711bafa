/*
 * What a Firecracker process costs until it waits for its VM, jail and all, which is what one that waits already saves;
 * and what it then takes to give it the VM's files. Needs no KVM: no guest is started. `scripts/firecracker.sh` brings
 * the executables.
 */
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import pino from "pino";
import { installAsset } from "../../src/lib/assets.ts";
import { runCommand, tryCommand } from "../../src/lib/command.ts";
import { Jails } from "../../src/vmm/firecracker/jail.ts";
import { createFirecrackerDriver } from "../../src/vmm/index.ts";

const ROUNDS = 41;
const tools = resolve(import.meta.dir, "../../.tools/firecracker");
const binary = join(tools, "firecracker");
if (!existsSync(binary)) {
  console.log(`left out: there is no ${binary} (scripts/firecracker.sh brings it)`);
  process.exit(0);
}

const dir = mkdtempSync(join(tmpdir(), "aenv-bench-fc-"));
const namespace = `aenv-bench-fc-${process.pid}`;
const users = { firstUid: 1_879_048_192, count: 1000, gid: 1_879_048_192 };
const log = pino({ level: "warn" });
const limits = { memoryBytes: 2 ** 30, cpus: 2, processes: 40 };
const entries = [
  { kind: "ro", source: "/etc/passwd", target: "/files/kernel" },
  { kind: "ro", source: "/etc/group", target: "/files/initrd" },
  { kind: "node", source: "/dev/null", target: "/dev/drive-rootfs" },
] as const;

function spread(values: readonly number[]): string {
  const sorted = values.toSorted((a, b) => a - b);
  const at = (part: number) => (sorted[Math.floor((sorted.length - 1) * part)] ?? Number.NaN).toFixed(1);
  return `${at(0)} / ${at(0.5)} / ${at(0.9)}`;
}

await runCommand(["ip", "netns", "add", namespace]);
try {
  await runCommand(["ip", "-n", namespace, "tuntap", "add", "tap0", "mode", "tap"]);
  const network = { netnsPath: `/run/netns/${namespace}`, tapName: "tap0", macAddress: "02:00:00:00:00:01" };
  const common = { binary, workDir: join(dir, "jails"), users, log };
  const helper = installAsset("aenv-jail", join(dir, "bin"));
  console.log("| ms, min / median / 90th percentile | our jail | upstream's jailer |\n| --- | ---: | ---: |");
  const ready: string[] = [];
  const equipped: string[] = [];
  let memory = "";
  for (const jailer of [undefined, join(tools, "jailer")]) {
    const driver = createFirecrackerDriver({
      ...common,
      kernelPath: "/nonexistent",
      kernelVersion: "none",
      jailHelper: helper,
      ...(jailer === undefined ? {} : { jailerPath: jailer }),
      socketTimeoutMs: 10_000,
      socketPollMs: 1,
    });
    const times: number[] = [];
    for (let i = 0; i < ROUNDS; i++) {
      const startedMs = performance.now();
      await using _ = await driver.prepare?.(network);
      times.push(performance.now() - startedMs);
    }
    ready.push(spread(times));
    const jails = new Jails({ ...common, helper, ...(jailer === undefined ? {} : { jailer }) });
    const added: number[] = [];
    for (let i = 0; i < ROUNDS; i++) {
      await using jail = await jails.start(network, [], limits, 2 ** 30);
      while (!existsSync(jail.socketPath)) await Bun.sleep(1);
      const startedMs = performance.now();
      await jail.equip(entries, limits, 2 ** 30);
      added.push(performance.now() - startedMs);
      memory =
        /^VmRSS:\s+(\d+) kB/m.exec(readFileSync(`/proc/${jail.process.pid}/status`, "utf8"))?.[1] ?? "";
    }
    equipped.push(spread(added));
  }
  console.log(`| a process is started and its API answers | ${ready.join(" | ")} |`);
  console.log(`| it is given the files and the disk of a VM | ${equipped.join(" | ")} |`);
  console.log(`\na process that waits has ${memory} KiB of memory`);
} finally {
  await tryCommand(["ip", "netns", "del", namespace]);
  rmSync(dir, { recursive: true, force: true });
}
