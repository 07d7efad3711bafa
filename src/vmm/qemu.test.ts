import { afterAll, describe, expect, test } from "bun:test";
import {
  chmodSync,
  closeSync,
  existsSync,
  ftruncateSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { eventually } from "../../tests/support/eventually.ts";
import { nbdDisk, prepareGuest, type TestNetwork, testNetwork } from "../../tests/vmkit/index.ts";
import type { LaunchRequest } from "../../tests/vmkit/launch.ts";
import { runCommand } from "../lib/command.ts";
import { AenvError } from "../lib/errors.ts";
import { createLogger } from "../lib/log.ts";
import { createQemuDriver, identityMismatch, killVm, type VmLaunchSpec, type VmReference } from "./index.ts";
import { processLives } from "./process.ts";
import { bootProbe } from "./qemu/probe.ts";
import { tickMeter } from "./qemu/ticks.ts";
import { parseQemuVersion } from "./qemu/version.ts";

const guest = await prepareGuest("qemu");
if (typeof guest === "string") console.log(`skipped: real VMs: ${guest}`);

const log = createLogger("test");
log.level = "silent";
const MEMORY_MIB = 128;

async function errorOf(promise: Promise<unknown>): Promise<AenvError> {
  try {
    await promise;
  } catch (error) {
    if (error instanceof AenvError) return error;
    throw error;
  }
  throw new Error("there was no error");
}

describe("a QEMU that is not usable", () => {
  const dir = mkdtempSync(join(tmpdir(), "vmm-bad-"));
  afterAll(() => rmSync(dir, { recursive: true, force: true }));
  const driver = (binary: string, kernelPath = "/nonexistent/vmlinux") =>
    createQemuDriver({ binary, mode: "tcg", kernelPath, log });
  const program = (name: string, text: string): string => {
    const path = join(dir, name);
    writeFileSync(path, `#!/bin/sh\n${text}\n`);
    chmodSync(path, 0o755);
    return path;
  };

  test("missing, not executable, something else, too old: each says what and how to cure it", async () => {
    for (const binary of ["/nonexistent/qemu", "no-such-qemu-anywhere", `${dir}/plain`]) {
      writeFileSync(`${dir}/plain`, "");
      const error = await errorOf(driver(binary).probe());
      expect(error.code).toBe("qemu_not_found");
      expect(error.message).toContain(binary);
      expect(error.remediation).toContain("agentenv setup");
    }
    expect((await errorOf(driver(program("other", "echo hello")).probe())).code).toBe("qemu_invalid");
    const broken = program("broken", "echo libfoo.so.1 is missing >&2; exit 127");
    expect((await errorOf(driver(broken).probe())).message).toContain("libfoo.so.1");
    const old = program("old", "echo QEMU emulator version 5.2.0");
    expect((await errorOf(driver(old).probe())).code).toBe("qemu_too_old");
  });

  test("an old one works with a warning, a kernel that is none is refused", async () => {
    const seven = program("seven", "echo 'QEMU emulator version 7.2.22 (Debian 1:7.2)'");
    const probe = await driver(seven).probe();
    expect(probe.mode).toBe("tcg");
    expect(probe.warnings.join()).toContain("one vCPU");
    expect((await errorOf(driver(seven).identity)).code).toBe("kernel_not_found");
    expect((await errorOf(driver(seven, seven).identity)).code).toBe("kernel_invalid");
  });
});

test("a state is refused elsewhere with what differs", () => {
  const here = {
    vmm: "qemu",
    vmmVersion: "10.0.2",
    mode: "tcg",
    cpuModel: "max",
    kernelVersion: "6.12",
  } as const;
  expect(identityMismatch(here, { ...here, kernelVersion: "6.13" })).toBeUndefined();
  expect(identityMismatch({ ...here, mode: "kvm", vmmVersion: "9.2.0" }, here)).toBe(
    "it was made with VMM version 9.2.0 (here: 10.0.2), virtualization mode kvm (here: tcg)",
  );
  expect(identityMismatch({ ...here, cpuModel: "host:GenuineIntel-6-85-7" }, here)).toBe(
    "it was made with CPU model host:GenuineIntel-6-85-7 (here: max)",
  );
  // What was made with the device needs it; what is older is loaded with it, too.
  const giving = { ...here, balloon: true } as const;
  expect(identityMismatch(here, giving)).toBeUndefined();
  expect(identityMismatch(giving, giving)).toBeUndefined();
  expect(identityMismatch(giving, here)).toBe(
    "it was made with a balloon device for memory given back (here: none)",
  );
  // Measured, so never quite the same; a guest's clock would run wrong with any other.
  const ticking = { ...here, tscKHz: 2_400_000 };
  expect(identityMismatch({ ...here, tscKHz: 2_401_900 }, ticking)).toBeUndefined();
  expect(identityMismatch(here, ticking)).toBeUndefined();
  expect(identityMismatch({ ...here, tscKHz: 2_450_000 }, ticking)).toBe(
    "it was made with TSC frequency 2450.0 MHz (here: 2400.0 MHz)",
  );
});

describe.skipIf(typeof guest === "string")("a real VM", () => {
  if (typeof guest === "string") return;
  afterAll(() => guest[Symbol.dispose]());
  const settings = { ...guest.qemu, mode: "tcg" as const, kernelPath: guest.kernelPath };
  const driver = createQemuDriver({ ...settings, log });
  const version = parseQemuVersion(
    Bun.spawnSync([guest.qemu.binary, "--version"], {
      env: guest.qemu.libraryPath === undefined ? {} : { LD_LIBRARY_PATH: guest.qemu.libraryPath },
    }).stdout.toString(),
    guest.qemu.binary,
  );
  const memoryFile = join(guest.dir, "zeros");
  const fd = openSync(memoryFile, "w");
  ftruncateSync(fd, MEMORY_MIB << 20);
  closeSync(fd);

  let made = 0;
  const spec = (network: TestNetwork, change: Partial<VmLaunchSpec> = {}): VmLaunchSpec => {
    const vmId = `vm${made++}`;
    const workDir = change.workDir ?? join(guest.dir, vmId);
    mkdirSync(workDir, { recursive: true });
    return {
      vmId,
      workDir,
      shape: { vcpuCount: 2, memoryMiB: MEMORY_MIB },
      kernelPath: guest.kernelPath,
      initrdPath: guest.initrdPath,
      kernelArgs: ["quiet"],
      drives: [],
      network: { netnsPath: network.netnsPath, tapName: network.tapName, macAddress: network.macAddress },
      memoryFile,
      consoleLogPath: join(workDir, "console.log"),
      ...change,
    };
  };

  test("probe and identity tell what would be used", async () => {
    const probe = await driver.probe();
    expect(probe).toMatchObject({ vmm: "qemu", version: version.text, mode: "tcg" });
    expect(probe.warnings.length).toBe(version.major < 10 ? 1 : 0);
    // With the speed of the host's clock where it has a steady one.
    expect(await driver.identity).toMatchObject({
      vmm: "qemu",
      vmmVersion: version.text,
      mode: "tcg",
      cpuModel: version.major < 10 ? "max,-cx16" : "max",
      kernelVersion: expect.stringMatching(/^\d+\.\d+\.\d+/),
      balloon: true,
    });
    const { shieldPath: _, ...unshielded } = settings;
    expect((await createQemuDriver({ ...unshielded, log }).identity).balloon).toBeUndefined();
  });

  test("a QEMU whose shield is loaded but guards nothing gets no guest", async () => {
    const [source, shieldPath] = [join(guest.dir, "unarmed.c"), join(guest.dir, "unarmed.so")];
    writeFileSync(
      source,
      `#include <stdlib.h>
      #include <unistd.h>
      __attribute__((constructor)) static void start(void) {
        if (getenv("AENV_MEMSHIELD_PROBE") != NULL && write(1, "aenv-memshield\\n", 15) < 0) _exit(1);
      }`,
    );
    await runCommand(["gcc", "-shared", "-fPIC", "-o", shieldPath, source]);
    const unarmed = createQemuDriver({ ...settings, shieldPath, log });
    expect((await unarmed.identity).balloon).toBe(true);
    await using network = await testNetwork();
    const error = await errorOf(unarmed.launch(spec(network)));
    expect(error.code).toBe("vm_start_failed");
    expect(error.cause).toMatchObject({
      code: "memory_shield_missing",
      message: expect.stringContaining(`${memoryFile} whole: it has it open for writing`),
    });
  }, 120_000);

  test("the probe's guest reaches user space where guests run, and a mute one is given up", async () => {
    const installation = { ...guest.qemu, version, sandbox: true };
    // A directory of its own: other tests probe at the same time.
    const before = process.env.TMPDIR;
    const temporary = mkdtempSync(join(tmpdir(), "aenv-qemu-test-"));
    process.env.TMPDIR = temporary;
    using _restore = {
      [Symbol.dispose]: () => {
        if (before === undefined) delete process.env.TMPDIR;
        else process.env.TMPDIR = before;
        rmSync(temporary, { recursive: true, force: true });
      },
    };
    const env: Record<string, string> =
      guest.qemu.libraryPath === undefined ? {} : { LD_LIBRARY_PATH: guest.qemu.libraryPath };
    const options = { installation, env, kernelPath: guest.kernelPath, tickKHz: await tickMeter()() };
    const good = await bootProbe(options, "tcg", { silenceMs: 60_000, totalMs: 60_000 });
    expect(good).toEqual({ usable: true, reason: "runs a stock guest kernel" });
    const mute = await bootProbe(options, "tcg", { silenceMs: 1, totalMs: 30_000 });
    expect(mute.usable).toBe(false);
    expect(mute.reason).toContain("no sign of life");
    const wrong = await bootProbe({ ...options, kernelPath: guest.initrdPath }, "tcg", {
      silenceMs: 60_000,
      totalMs: 60_000,
    });
    expect(wrong.usable).toBe(false);
    expect(wrong.reason).toContain("QEMU: ");
    expect(readdirSync(temporary)).toEqual([]);
  }, 120_000);

  test("KVM is used only where a guest runs on it, and the verdict is kept", async () => {
    const probeCacheDir = join(guest.dir, "probe");
    const auto = createQemuDriver({ ...settings, mode: "auto", probeCacheDir, log });
    const probe = await auto.probe();
    expect(probe.reason).toContain("/dev/kvm");
    console.log(`probe: ${probe.mode}: ${probe.reason}`);
    const forced = createQemuDriver({ ...settings, mode: "kvm", probeCacheDir, log });
    const kept = () =>
      existsSync(probeCacheDir)
        ? readdirSync(probeCacheDir).map((name) => [name, statSync(join(probeCacheDir, name)).mtimeMs])
        : [];
    const before = kept();
    if (probe.mode === "kvm") {
      expect(probe.reason).toBe("hardware virtualization: /dev/kvm runs a stock guest kernel");
      expect((await forced.identity).mode).toBe("kvm");
    } else {
      const why = existsSync("/dev/kvm")
        ? /^\/dev\/kvm does not run a stock guest kernel \(.+\)$/
        : /^\/dev\/kvm is missing$/;
      expect(probe.mode).toBe("tcg");
      expect(probe.reason).toStartWith("emulation (TCG): ");
      const reason = probe.reason.replace("emulation (TCG): ", "");
      expect(reason).toMatch(why);
      const error = await errorOf(forced.probe());
      expect(error.code).toBe("kvm_unusable");
      expect(error.message).toBe(`virtualization mode kvm is configured, but ${reason}`);
      expect(error.remediation).toContain("auto");
    }
    expect(kept()).toEqual(before);
  }, 120_000);

  test("outlives the server that started it; adopted, paused, saved, refused with a wrong state; a reset ends it", async () => {
    await using scope = new AsyncDisposableStack();
    const network = scope.use(await testNetwork());
    const clonesNetwork = scope.use(await testNetwork());
    // The guest writes to /dev/vda: that must be the first drive.
    const drives = [
      scope.use(await nbdDisk(guest.dir, "first")),
      scope.use(await nbdDisk(guest.dir, "second", true)),
    ];
    const vmSpec = spec(network, { drives });
    const request: LaunchRequest = { driver: settings, spec: vmSpec };
    const server = Bun.spawn([process.execPath, join(import.meta.dir, "../../tests/vmkit/launch.ts")], {
      stdin: Buffer.from(JSON.stringify(request)),
      stdout: "pipe",
      stderr: "inherit",
    });
    let printed = "";
    for await (const chunk of server.stdout) {
      printed += Buffer.from(chunk).toString();
      if (printed.includes("\n")) break;
    }
    const reference = JSON.parse(printed) as VmReference;
    scope.defer(() => {
      if (processLives(reference.pid, reference.startTimeTicks)) process.kill(reference.pid, "SIGKILL");
    });
    server.kill("SIGKILL");
    await server.exited;
    expect(reference).toMatchObject({ vmId: vmSpec.vmId, workDir: vmSpec.workDir, memoryFile });
    expect(readFileSync(`/proc/${reference.pid}/oom_score_adj`, "utf8").trim()).toBe("1000");
    expect(readFileSync(`/proc/${reference.pid}/limits`, "utf8")).toMatch(/Max core file size +0 /);
    expect(statSync(reference.controlSocketPath).mode & 0o077).toBe(0);
    const session = readFileSync(`/proc/${reference.pid}/stat`, "latin1").replace(/.*\) /, "").split(" ")[3];
    expect(session).toBe(String(reference.pid));
    expect(statSync(`/proc/${reference.pid}/ns/net`).ino).toBe(statSync(network.netnsPath).ino);

    const adopted = await driver.adopt(reference);
    if (adopted === undefined) throw new Error("the VM did not outlive its server");
    scope.use(adopted);
    const first = await network.ask();
    expect(first).toMatchObject({ sum: "ok", disk: "ok", cpus: version.major < 10 ? 1 : 2 });

    const state = join(guest.dir, "state");
    expect((await errorOf(adopted.saveDeviceState(state))).code).toBe("vm_not_paused");
    await adopted.pause();
    await adopted.pause(); // again is no error
    await adopted.saveDeviceState(state);
    expect(statSync(state).size).toBeGreaterThan(1000);
    expect((await errorOf(adopted.saveDeviceState("/nonexistent/dir/state"))).code).toBe(
      "device_state_not_saved",
    );
    await Bun.sleep(200);
    await adopted.resume();
    await eventually("it counts on", async () => (await network.ask()).count > first.count);

    // Another device state than the machine's is refused with QEMU's words, and nothing stays behind.
    writeFileSync(join(guest.dir, "nonsense"), "this is no device state");
    const clonesDrives = [
      scope.use(await nbdDisk(guest.dir, "clone-first")),
      scope.use(await nbdDisk(guest.dir, "clone-second", true)),
    ];
    const bad = spec(clonesNetwork, { drives: clonesDrives });
    const refused = await errorOf(driver.restore({ ...bad, deviceStatePath: join(guest.dir, "nonsense") }));
    expect(refused.code).toBe("vm_restore_failed");
    expect(refused.message).toContain("QEMU says");
    expect(existsSync(join(bad.workDir, "qmp.sock"))).toBe(false);

    await network.ask("c");
    expect(readFileSync(vmSpec.consoleLogPath, "utf8")).toContain("GUEST flood 1999");

    // With -no-reboot a reset of the guest is the end of the VM, also seen on a process not our child.
    network.ask("r", 0).catch(() => undefined);
    const exit = await adopted.exited;
    expect(exit).toEqual({ exitCode: null, signal: null, stderrTail: expect.any(String) });
    expect((await errorOf(adopted.pause())).code).toBe("vm_gone");
    expect(await driver.adopt(reference)).toBeUndefined();
    expect(existsSync(reference.controlSocketPath)).toBe(false);
    await adopted.kill();
  }, 120_000);

  test("killed from outside: exited resolves with the signal, the socket is removed", async () => {
    await using network = await testNetwork();
    await using handle = await driver.launch(spec(network));
    const status = readFileSync(`/proc/${handle.reference.pid}/status`, "utf8");
    // Nothing of what the server may do, and no way to get it.
    for (const set of ["Inh", "Prm", "Eff", "Amb"])
      expect(status).toMatch(new RegExp(`^Cap${set}:\\s+0+$`, "m"));
    expect(status).toMatch(/^NoNewPrivs:\s+1$/m);
    process.kill(handle.reference.pid, "SIGKILL");
    expect(await handle.exited).toMatchObject({ exitCode: null, signal: "SIGKILL" });
    expect(existsSync(handle.reference.controlSocketPath)).toBe(false);
    await Promise.all([handle.kill(), handle.kill(0)]);
    expect(await driver.adopt(handle.reference)).toBeUndefined();
    const second = await driver.launch(spec(network));
    // Held by the first connection, the control socket answers nobody else; the VM can be ended all the same.
    await killVm(second.reference);
    expect((await second.exited).exitCode).toBe(0);
    await killVm(second.reference);
  });

  test("a work directory with a long path: the control socket lies elsewhere and goes, too", async () => {
    await using network = await testNetwork();
    const workDir = join(guest.dir, "x".repeat(120));
    const handle = await driver.launch(spec(network, { workDir }));
    const socketDir = dirname(handle.reference.controlSocketPath);
    expect(socketDir).not.toBe(workDir);
    expect(statSync(socketDir).mode & 0o077).toBe(0);
    await handle.pause();
    await handle.kill();
    expect((await handle.exited).exitCode).toBe(0);
    expect(existsSync(socketDir)).toBe(false);
  });

  test("what cannot start says why and leaves no process", async () => {
    await using network = await testNetwork();
    const cases: readonly [Partial<VmLaunchSpec>, string][] = [
      [
        { network: { netnsPath: "/run/netns/none", tapName: "tap0", macAddress: "02:00:00:00:00:01" } },
        "/run/netns/none",
      ],
      [{ network: { ...spec(network).network, tapName: "tap7" } }, "no device tap7"],
      [{ memoryFile: guest.initrdPath }, "has"],
      [{ memoryFile: "/nonexistent/memory" }, "memory file"],
      [{ kernelPath: guest.initrdPath }, "QEMU says"],
      [{ shape: { vcpuCount: 0, memoryMiB: 128 } }, "vCPUs"],
      [{ kernelArgs: ["x".repeat(3000)] }, "command line"],
      [
        {
          drives: [
            {
              driveId: "rootfs",
              readOnly: true,
              backend: { kind: "nbd", socketPath: "/nonexistent/nbd.sock", exportName: "x" },
            },
          ],
        },
        "/nonexistent/nbd.sock",
      ],
    ];
    for (const [change, words] of cases) {
      const bad = spec(network, change);
      const error = await errorOf(driver.launch(bad));
      expect(error.message).toContain(words);
      const left = readdirSync("/proc").filter(
        (pid) =>
          /^\d+$/.test(pid) &&
          existsSync(`/proc/${pid}/cmdline`) &&
          readFileSync(`/proc/${pid}/cmdline`, "utf8").includes(bad.workDir),
      );
      expect(left).toEqual([]);
      expect(existsSync(join(bad.workDir, "qmp.sock"))).toBe(false);
    }
  }, 120_000);
});
