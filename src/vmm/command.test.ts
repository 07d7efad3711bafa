import { describe, expect, test } from "bun:test";
import { kernelCommandLine, MAX_DRIVES, type QemuCommandOptions, qemuCommand } from "./qemu/command.ts";
import { lineSplitter } from "./qemu/qmp.ts";
import { parseQemuVersion } from "./qemu/version.ts";
import type { VmDrive } from "./types.ts";

function options(version: string, change: Partial<QemuCommandOptions> = {}): QemuCommandOptions {
  return {
    installation: {
      binary: "/usr/bin/qemu-system-x86_64",
      version: parseQemuVersion(`QEMU emulator version ${version} (Debian)`, "qemu"),
      dataDirs: ["/data"],
      sandbox: true,
    },
    mode: "tcg",
    controlSocketPath: "/w/qmp.sock",
    tickKHz: 2_300_000,
    spec: {
      vmId: "vm",
      workDir: "/w",
      shape: { vcpuCount: 4, memoryMiB: 512 },
      kernelPath: "/k",
      initrdPath: "/i,j",
      kernelArgs: ["quiet"],
      drives: [],
      network: { netnsPath: "/run/netns/a", tapName: "tap0", macAddress: "02:00:00:00:00:01" },
      memoryFile: "/m,1",
      consoleLogPath: "/c,d",
    },
    ...change,
  };
}

function valueAfter(argv: readonly string[], option: string): string[] {
  return argv.flatMap((arg, i) => (arg === option ? [argv[i + 1]!] : []));
}

function drive(n: number): VmDrive {
  return {
    driveId: `d${n}`,
    readOnly: false,
    backend: { kind: "nbd", socketPath: `/s${n},x`, exportName: "e" },
  };
}

describe("command line", () => {
  test("old QEMU under emulation: no cmpxchg16b, one vCPU, file not opened read-only", () => {
    const argv = qemuCommand(options("7.2.22"));
    expect(valueAfter(argv, "-cpu")).toEqual(["max,-cx16"]);
    expect(valueAfter(argv, "-smp")).toEqual(["1"]);
    expect(JSON.parse(valueAfter(argv, "-object")[0]!)).not.toHaveProperty("readonly");
    const kvm = qemuCommand(options("7.2.22", { mode: "kvm" }));
    expect(valueAfter(kvm, "-cpu")).toEqual(["host"]);
    expect(valueAfter(kvm, "-smp")).toEqual(["4"]);
  });

  test("memory is mapped privately from a file opened read-only", () => {
    const argv = qemuCommand(options("10.0.2"));
    expect(JSON.parse(valueAfter(argv, "-object")[0]!)).toMatchObject({
      "mem-path": "/m,1",
      size: 512 << 20,
      share: false,
      readonly: true,
      rom: "off",
    });
    expect(valueAfter(argv, "-smp")).toEqual(["4"]);
    expect(argv).not.toContain("-incoming");
  });

  test("a balloon only where the memory file is shielded from it, which opens it read-only by itself", () => {
    const balloon = (argv: readonly string[]) =>
      valueAfter(argv, "-device")
        .map((text) => JSON.parse(text))
        .find(({ driver }) => driver === "virtio-balloon-device");
    const { installation } = options("10.0.2");
    expect(balloon(qemuCommand(options("10.0.2")))).toBeUndefined();
    const shielded = qemuCommand(options("10.0.2", { installation: { ...installation, shielded: true } }));
    // Without poison: a guest that zeroes what it frees must not take for granted that it stays so.
    expect(balloon(shielded)).toMatchObject({
      "free-page-reporting": true,
      "deflate-on-oom": true,
      "page-poison": false,
    });
    const [backend, ...others] = valueAfter(shielded, "-object").map((text) => JSON.parse(text));
    expect(backend).toMatchObject({ "mem-path": "/m,1", share: false });
    expect(backend).not.toHaveProperty("readonly");
    expect(others.map((object) => object["qom-type"])).toEqual(["rng-builtin"]);
    const buses = valueAfter(shielded, "-device").map((text) => JSON.parse(text).bus);
    expect(new Set(buses).size).toBe(buses.length);
  });

  test("a restore has the same devices and only adds the incoming state", () => {
    const cold = qemuCommand(options("10.0.2"));
    const warm = qemuCommand(options("10.0.2", { incoming: "file:/state" }));
    expect(warm).toEqual([...cold, "-S", "-incoming", "file:/state"]);
  });

  test("drives keep their order and names; commas in paths are no options", () => {
    const base = options("10.0.2");
    const argv = qemuCommand({ ...base, spec: { ...base.spec, drives: [drive(0), drive(1)] } });
    const devices = valueAfter(argv, "-device").map((json) => JSON.parse(json));
    expect(devices.slice(0, 2)).toMatchObject([
      { drive: "disk0", bus: "virtio-mmio-bus.23", serial: "d0", werror: "report" },
      { drive: "disk1", bus: "virtio-mmio-bus.22", serial: "d1" },
    ]);
    expect(new Set(devices.map((device) => device.bus)).size).toBe(devices.length);
    expect(valueAfter(argv, "-blockdev").map((json) => JSON.parse(json))).toMatchObject([
      { "node-name": "disk0", server: { path: "/s0,x" }, discard: "unmap" },
      { "node-name": "disk1", server: { path: "/s1,x" } },
    ]);
    expect(valueAfter(argv, "-initrd")).toEqual(["/i,,j"]);
    expect(valueAfter(argv, "-chardev")[0]).toBe("file,id=console0,path=/c,,d,append=on");
    const many = Array.from({ length: MAX_DRIVES + 1 }, (_, n) => drive(n));
    expect(() => qemuCommand({ ...base, spec: { ...base.spec, drives: many } })).toThrow(
      expect.objectContaining({
        code: "too_many_drives",
        message: expect.stringContaining("19 attached drives"),
      }),
    );
  });

  test("a drive with a rate limit is put on a throttle above it; without numbers there is none", () => {
    const limited = (
      bandwidthBytesPerSec: number,
      bandwidthBurstBytes: number,
      iops: number,
      iopsBurst: number,
    ) => {
      const { spec } = options("10.0.0");
      const rateLimit = { bandwidthBytesPerSec, bandwidthBurstBytes, iops, iopsBurst };
      const argv = qemuCommand(
        options("10.0.0", { spec: { ...spec, drives: [drive(0), { ...drive(1), rateLimit }] } }),
      );
      const json = (option: string) =>
        valueAfter(argv, option).flatMap((text) => (text.startsWith("{") ? [JSON.parse(text)] : []));
      const groups = json("-object").filter((object) => object["qom-type"] === "throttle-group");
      const disks = json("-device").flatMap((device) => ("drive" in device ? [device.drive] : []));
      return { groups, disks, nodes: json("-blockdev").map((node) => node["node-name"]) };
    };
    expect(limited(1_000_000, 5_000_000, 200, 0)).toEqual({
      groups: [
        {
          "qom-type": "throttle-group",
          id: "limits1",
          limits: {
            "bps-total": 1_000_000,
            "bps-total-max": 6_000_000,
            "iops-total": 200,
            "iops-total-max": 200,
          },
        },
      ],
      disks: ["disk0", "limited1"],
      nodes: ["disk0", "disk1", "limited1"],
    });
    expect(limited(0, 0, 7, 2).groups[0].limits).toEqual({ "iops-total": 7, "iops-total-max": 9 });
    expect(limited(2 ** 63, 0, 0, 0).groups[0].limits).toEqual({ "bps-total": 1e15, "bps-total-max": 1e15 });
    expect(limited(0, 0, 0, 0)).toMatchObject({ groups: [], disks: ["disk0", "disk1"] });
  });

  test("kernel words of ours give way to the caller's", () => {
    expect(kernelCommandLine(["panic=5", "quiet"], "kvm", 1)).toBe(
      "console=ttyS0 reboot=t pci=off panic=5 quiet",
    );
    const base = ["console=ttyS1", "panic=1", "damon_reclaim.enabled=Y", "quiet=1", "nosmt"];
    expect(kernelCommandLine(["panic=5", "quiet"], "kvm", 1, base)).toBe(
      "console=ttyS0 reboot=t pci=off damon_reclaim.enabled=Y nosmt panic=5 quiet",
    );
    expect(kernelCommandLine([], "tcg", 1, base)).not.toContain("damon");
    expect(kernelCommandLine([], "tcg", 2_300_000)).toContain("tsc=reliable tsc_early_khz=2300000");
    expect(() => kernelCommandLine(["x".repeat(2048)], "kvm", 1)).toThrow("at most 2047");
  });
});

test("versions", () => {
  expect(parseQemuVersion("QEMU emulator version 10.0.2 (Debian 1:10.0.2)\n", "q").text).toBe("10.0.2");
  expect(parseQemuVersion("QEMU emulator version 8.2.90", "q").atLeast(8, 3)).toBe(false);
  expect(() => parseQemuVersion("QEMU emulator version 7.1.0", "q")).toThrow("oldest");
  expect(() => parseQemuVersion("", "q")).toThrow("does not say");
});

test("lines are cut right wherever the chunks end", () => {
  const text = '{"a":1}\r\n{"b":"\u00e4\u{1f600}"}\n\n{"c":3}\n';
  const bytes = Buffer.from(text);
  for (let size = 1; size <= bytes.length; size++) {
    const lines: string[] = [];
    const push = lineSplitter((line) => lines.push(line));
    const shared = new Uint8Array(size);
    for (let at = 0; at < bytes.length; at += size) {
      const part = bytes.subarray(at, at + size);
      shared.set(part);
      push(shared.subarray(0, part.length));
    }
    expect(lines).toEqual(['{"a":1}', '{"b":"\u00e4\u{1f600}"}', '{"c":3}']);
  }
  const endless = lineSplitter(() => undefined);
  expect(() => {
    for (let i = 0; i < 20; i++) endless(new Uint8Array(65536).fill(65));
  }).toThrow("more than 1 MiB");
});
