import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  truncateSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import pino from "pino";
import { installAsset } from "../lib/assets.ts";
import { runCommand, tryCommand } from "../lib/command.ts";
import { kernelCommandLine } from "./firecracker/config.ts";
import { parseFirecrackerVersion } from "./firecracker/version.ts";
import {
  createFirecrackerDriver,
  type FirecrackerDriverOptions,
  identityMismatch,
  type VmHandle,
  type VmLaunchSpec,
  type VmReference,
} from "./index.ts";

/*
 * The driver against a process that speaks Firecracker's API (firecracker/testing). With a real Firecracker and a
 * guest it is tested in the rig, tests/rig/sandbox.test.ts.
 */

setDefaultTimeout(30_000);

const root = mkdtempSync(join(tmpdir(), "aenv-fc-test-"));
const namespace = `aenv-fc-${process.pid}`;
const log = pino({ level: "silent" });
const MiB = 2 ** 20;

beforeAll(async () => {
  await runCommand(["ip", "netns", "add", namespace]);
  await runCommand(["ip", "-n", namespace, "tuntap", "add", "tap0", "mode", "tap"]);
});
afterAll(async () => {
  await tryCommand(["ip", "netns", "del", namespace], {});
  rmSync(root, { recursive: true, force: true });
});

function fakeBinary(version: string): string {
  const path = join(root, `firecracker-${version}`);
  const script = join(import.meta.dir, "firecracker/testing/fake-firecracker.ts");
  writeFileSync(path, `#!/bin/sh\nFAKE_VERSION=${version} exec '${process.execPath}' '${script}' "$@"\n`);
  chmodSync(path, 0o755);
  return path;
}

const ROOT = resolve(import.meta.dir, "../..");
const HOST = { kernel: [6, 12], shadowStacks: false } as const;

function driverFor(version = "1.13.1", changes: Partial<FirecrackerDriverOptions> = {}) {
  const kernelPath = join(root, "vmlinux");
  writeFileSync(kernelPath, "kernel");
  return createFirecrackerDriver({
    binary: fakeBinary(version),
    kernelPath,
    kernelVersion: "6.12.0",
    workDir: join(root, "jails"),
    jailHelper: installAsset("aenv-jail", join(root, "bin")),
    users: { firstUid: 1_879_048_192, count: 1000, gid: 1_879_048_192 },
    socketTimeoutMs: 10_000,
    socketPollMs: 2,
    // What the fake needs to run: an interpreter and this checkout.
    alsoVisible: ["/bin", "/lib", "/lib64", "/usr", "/proc", ROOT],
    log,
    ...changes,
  });
}

function specFor(name: string, changes: Partial<VmLaunchSpec> = {}): VmLaunchSpec {
  const workDir = join(root, name);
  mkdirSync(workDir, { recursive: true });
  const file = (leaf: string, bytes = 0) => {
    const path = join(workDir, leaf);
    writeFileSync(path, leaf.startsWith("disk-") ? `${leaf}\n` : "");
    truncateSync(path, bytes);
    return path;
  };
  return {
    vmId: name,
    workDir,
    shape: { vcpuCount: 1, memoryMiB: 128 },
    kernelPath: join(root, "vmlinux"),
    initrdPath: file("initrd"),
    kernelArgs: ["quiet"],
    drives: [
      {
        driveId: "rootfs",
        readOnly: false,
        backend: { kind: "block", devicePath: file(`disk-${name}`, MiB) },
      },
    ],
    network: { netnsPath: `/run/netns/${namespace}`, tapName: "tap0", macAddress: "02:00:00:00:00:01" },
    memoryFile: file("memory", 128 * MiB),
    consoleLogPath: file("console.log"),
    ...changes,
  };
}

interface Seen {
  readonly method: string;
  readonly path: string;
  readonly body: Record<string, unknown>;
  readonly target?: string;
}

function requests(vm: VmHandle): Seen[] {
  const text = readFileSync(join(vm.reference.jailDir ?? "", "run/fake.requests"), "utf8");
  return text
    .trim()
    .split("\n")
    .map((line) => JSON.parse(line));
}

const jailsLeft = () => {
  const dir = join(root, "jails");
  return existsSync(dir) ? readdirSync(dir) : [];
};

async function until(what: () => boolean): Promise<void> {
  while (!what()) await Bun.sleep(10);
}

const lives = (vm: VmHandle) => existsSync(`/proc/${vm.reference.pid}`);

describe("versions", () => {
  const printed = (version: string) => `Firecracker v${version}\n\n2026-01-01 [main] exiting\n`;
  test("current ones are taken", () => {
    for (const version of ["1.12.1", "1.13.0", "1.17.0", "1.17.0-dev", "2.0.0"])
      expect(parseFirecrackerVersion(printed(version), "fc", HOST).text).toBe(version);
  });
  test("old and known-bad ones are refused by name", () => {
    expect(() => parseFirecrackerVersion(printed("1.11.0"), "fc", HOST)).toThrow(
      "Firecracker 1.11.0 (fc) is not used: it is older than 1.12",
    );
    const bad = { "1.14.0": "it loses interrupts" };
    expect(() => parseFirecrackerVersion(printed("1.14.0"), "fc", HOST, bad)).toThrow("it loses interrupts");
    expect(() => parseFirecrackerVersion("hello", "fc", HOST)).toThrow(
      "does not say which Firecracker it is",
    );
  });
});

test("a known hole in a part that is not used is told", () => {
  const warnings = (version: string) =>
    parseFirecrackerVersion(`Firecracker v${version}`, "fc", HOST).warnings.length;
  expect(["1.12.1", "1.13.0", "1.14.3", "1.14.4", "1.15.0", "1.15.1", "1.17.0"].map(warnings)).toEqual([
    0, 1, 1, 0, 1, 0, 0,
  ]);
});

test("a disk over NBD is refused before anything is started", async () => {
  const spec = specFor("nbd", {
    drives: [
      { driveId: "rootfs", readOnly: false, backend: { kind: "nbd", socketPath: "/s", exportName: "e" } },
    ],
  });
  await expect(driverFor().launch(spec)).rejects.toMatchObject({ code: "drive_unsupported", status: 400 });
  expect(jailsLeft()).toEqual([]);
});

test("the kernel command line takes the caller's word over ours, and has an end", () => {
  expect(kernelCommandLine(["panic=-1", "x"])).toMatch(/^console=ttyS0 reboot=k i8042\S+ .* panic=-1 x$/);
  expect(() => kernelCommandLine(["y".repeat(2048)])).toThrow("at most 2047");
});

describe("a VM", () => {
  test("boots with its configuration in the order upstream asks for", async () => {
    const spec = specFor("boot", { metadata: { instanceID: "i-1" } });
    await using vm = await driverFor("1.14.1").launch(spec);
    const seen = requests(vm);
    expect(seen.map(({ method, path }) => `${method} ${path}`)).toEqual([
      "PUT /machine-config",
      "PUT /boot-source",
      "PUT /drives/rootfs",
      "PUT /network-interfaces/eth0",
      "PUT /mmds/config",
      "PUT /mmds",
      "PUT /entropy",
      "PUT /balloon",
      "PUT /actions",
    ]);
    expect(seen[2]).toMatchObject({
      body: { path_on_host: "/run/agentenv-vm/drive-rootfs", cache_type: "Writeback", is_root_device: false },
      target: "disk-boot",
    });
    expect(seen[4]?.body).toMatchObject({ version: "V2", network_interfaces: ["eth0"] });
    expect(vm.reference).toMatchObject({ vmId: "boot", anonymousMemory: true });
    await until(() => readFileSync(spec.consoleLogPath, "utf8").includes("guest boots"));
    await vm.kill();
    expect(lives(vm)).toBe(false);
    expect(existsSync(vm.reference.controlSocketPath)).toBe(false);
    expect(jailsLeft()).toEqual([]);
  });

  test("has the limits of its disks, a second's worth and a burst", async () => {
    const plain = specFor("limits");
    const rateLimit = { bandwidthBytesPerSec: 10 * MiB, bandwidthBurstBytes: MiB, iops: 0, iopsBurst: 5 };
    const spec = { ...plain, drives: plain.drives.map((drive) => ({ ...drive, rateLimit })) };
    await using vm = await driverFor().launch(spec);
    expect(requests(vm).find(({ path }) => path === "/drives/rootfs")?.body.rate_limiter).toEqual({
      bandwidth: { size: 10 * MiB, refill_time: 1000, one_time_burst: MiB },
      ops: { size: 0, refill_time: 0 },
    });
    expect(lives(vm)).toBe(true);
  });

  test("saves its state only while it is paused, and leaves no pages behind", async () => {
    const spec = specFor("save");
    await using vm = await driverFor().launch(spec);
    const path = join(root, "save.state");
    await expect(vm.saveDeviceState(path)).rejects.toMatchObject({ code: "vm_not_paused" });
    await vm.pause();
    await vm.saveDeviceState(path);
    expect(existsSync(path)).toBe(true);
    for (const rest of [`${path}.tmp`, `${path}.pages`]) expect(existsSync(rest)).toBe(false);
    await vm.resume();
    expect(requests(vm).at(-1)).toMatchObject({ method: "PATCH", path: "/vm", body: { state: "Resumed" } });
  });

  test("is restored twice at once, each with disks, memory and metadata of its own", async () => {
    const driver = driverFor("1.12.1");
    const source = specFor("source", { metadata: { instanceID: "source" } });
    const deviceStatePath = join(root, "source.state");
    {
      await using vm = await driver.launch(source);
      await vm.pause();
      await vm.saveDeviceState(deviceStatePath);
    }
    const specs = ["clone-a", "clone-b"].map((name) => specFor(name, { metadata: { instanceID: name } }));
    const vms = await Promise.all(specs.map((spec) => driver.restore({ ...spec, deviceStatePath })));
    for (const [i, spec] of specs.entries()) {
      expect(requests(vms[i]!)).toMatchObject([
        {
          path: "/snapshot/load",
          body: {
            mem_backend: { backend_type: "File", backend_path: "/files/memory" },
            network_overrides: [{ iface_id: "eth0", host_dev_name: "tap0" }],
            resume_vm: false,
          },
        },
        {
          method: "PATCH",
          path: "/drives/rootfs",
          body: {
            rate_limiter: { bandwidth: { size: 0, refill_time: 0 }, ops: { size: 0, refill_time: 0 } },
          },
        },
        { path: "/mmds", body: { instanceID: spec.vmId } },
        { method: "PATCH", path: "/vm", body: { state: "Resumed" } },
      ]);
      expect(vms[i]?.reference.anonymousMemory).toBeUndefined();
    }
    await Promise.all(vms.map((vm) => vm.kill()));
  });

  test("that Firecracker refuses fails with its words and leaves no process", async () => {
    const spec = specFor("refused", { shape: { vcpuCount: 99, memoryMiB: 128 } });
    const error = await driverFor()
      .launch(spec)
      .catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: "vm_start_failed" });
    expect(String(error)).toContain("PUT /machine-config");
    expect(jailsLeft()).toEqual([]);
  });

  test("is found again by its reference, and not when it is gone", async () => {
    const driver = driverFor();
    await using vm = await driver.launch(specFor("adopted"));
    const reference: VmReference = JSON.parse(JSON.stringify(vm.reference));
    const again = await driver.adopt(reference);
    await again?.pause();
    await again?.resume();
    await again?.kill();
    expect((await vm.exited).signal ?? (await vm.exited).exitCode).not.toBeNull();
    expect(await driver.adopt(reference)).toBeUndefined();
  });

  test("its state is refused by name on another VMM", async () => {
    const here = await driverFor("1.13.1").identity;
    const there = await driverFor("1.14.1").identity;
    expect(identityMismatch(here, there)).toContain("VMM version 1.13.1 (here: 1.14.1)");
    expect(identityMismatch(here, { ...here, vmm: "qemu" })).toContain("VMM firecracker (here: qemu)");
  });
});
