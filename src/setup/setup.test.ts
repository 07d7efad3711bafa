import { afterEach, beforeEach, expect, setDefaultTimeout, test } from "bun:test";
import { existsSync, readdirSync, statSync } from "node:fs";
import { chmod, mkdtemp, readFile, rm, truncate, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eventually } from "../../tests/support/eventually.ts";
import { runCommand } from "../lib/command.ts";
import { createLogger } from "../lib/log.ts";
import type { ProgressEvent } from "../lib/progress.ts";
import { type AptPackage, PrivateApt, parsePackages, reachable } from "./apt/apt.ts";
import { chooseKernel, modulesOutdated } from "./kernel.ts";
import { dependencyPins, readManifest, writeManifest } from "./manifest.ts";
import { checkQemu, chooseQemu, provisionQemu } from "./qemu.ts";
import { resolveRuntime } from "./resolve.ts";
import { provision, type SetupOptions } from "./setup.ts";
import {
  kernelPackage,
  makeArchive,
  makeBzImage,
  makeVmlinux,
  qemuScript,
  type TestArchive,
} from "./testing.ts";

setDefaultTimeout(60_000);

const RELEASE = "6.12.1000+test-cloud-amd64";
const INIT = Buffer.from("the guest agent");

let dir = "";
let depsDir = "";
let qemu = "";

beforeEach(async () => {
  dir = await mkdtemp(join(tmpdir(), "setup-test-"));
  depsDir = join(dir, "deps");
  qemu = join(dir, "qemu");
  await writeFile(qemu, qemuScript("10.1.2"));
  await chmod(qemu, 0o755);
});
afterEach(() => rm(dir, { recursive: true, force: true }));

function setup(archive: TestArchive, more: Partial<SetupOptions> = {}) {
  const warnings: string[] = [];
  const events: ProgressEvent[] = [];
  const run = provision({
    depsDir,
    force: false,
    qemuBinaryPath: qemu,
    aptHost: archive.host,
    init: INIT,
    progress: (event) => events.push(event),
    warn: (text) => warnings.push(text),
    ...more,
  });
  return run.then((runtime) => ({ runtime, warnings, events }));
}

function resolve() {
  return resolveRuntime({
    depsDir,
    qemuBinaryPath: qemu,
    init: INIT,
    log,
    progress: () => undefined,
  });
}

const log = createLogger("test");
log.level = "error";

const kernels = (archive: TestArchive) => archive.requests.filter(({ path }) => path.endsWith(".deb"));

test("kernel, modules and initial file system from packages; the second time nothing is fetched", async () => {
  await using archive = await makeArchive([
    await kernelPackage("6.12.999+test-cloud-amd64", "6.12.999-1"),
    await kernelPackage(RELEASE, "6.12.1000-1"),
    await kernelPackage("6.12.2000+test-rt-amd64", "6.12.2000-1"),
    await kernelPackage("6.13.1+test-cloud-amd64", "6.13.1-1"),
  ]);
  const { runtime, events, warnings } = await setup(archive);
  expect(warnings).toEqual([]);
  expect(runtime.kernelVersion).toBe(RELEASE);
  expect(Buffer.compare(await readFile(runtime.kernelPath), makeVmlinux(RELEASE))).toBe(0);
  expect(runtime.qemu).toEqual({ binary: qemu, version: "10.1.2", dataDirs: [] });
  const order = await runCommand(["cpio", "-i", "--quiet", "--to-stdout", "lib/modules/order"], {
    stdin: await readFile(runtime.initrdPath),
  });
  expect(order.split("\n")).toEqual([
    "virtio_mmio.ko",
    "virtio_blk.ko",
    "failover.ko",
    "net_failover.ko",
    "virtio_net.ko",
    "virtio_balloon.ko",
    "",
  ]);
  const downloads = events.filter(({ phase }) => phase === "download kernel");
  expect(downloads.at(-1)!.doneBytes).toBe(downloads.at(-1)!.totalBytes!);
  expect(readdirSync(join(depsDir, "kernel"))).toEqual([RELEASE]);
  expect(existsSync(join(depsDir, "staging"))).toBe(false);
  expect(existsSync(join(depsDir, "apt"))).toBe(false);
  const manifest = await readManifest(depsDir);
  expect(manifest.kernel!.packages[0]!.version).toBe("6.12.1000-1");

  const before = archive.requests.length;
  const again = await setup(archive);
  expect(again.runtime).toEqual(runtime);
  expect(archive.requests.length).toBe(before);
  expect(await resolve()).toEqual(runtime);
});

test("another agent gets an initial file system of its own without a download", async () => {
  await using archive = await makeArchive([await kernelPackage(RELEASE, "6.12.1000-1")]);
  const { runtime } = await setup(archive);
  archive.stop();
  const other = await setup(archive, { init: Buffer.from("a newer agent") });
  expect(other.runtime.initrdPath).not.toBe(runtime.initrdPath);
  expect(existsSync(other.runtime.initrdPath)).toBe(true);
});

test("modules that an earlier version did not ask for are brought; without the archive guests run as before", async () => {
  await using archive = await makeArchive([await kernelPackage(RELEASE, "6.12.1000-1")]);
  const { initrdPath, kernelPath } = (await setup(archive)).runtime;
  const initrd = statSync(initrdPath).ino;
  const modules = join(depsDir, "kernel", RELEASE, "modules");
  await writeFile(join(modules, "asked"), "virtio_mmio\nvirtio_blk\n");
  const deb = `/pool/linux-image-${RELEASE}_6.12.1000-1_amd64.deb`;
  archive.corrupt.add(deb);
  const kept = await setup(archive);
  expect(kept.warnings.join()).toContain("lacks modules that this version wants");
  expect(kept.runtime.kernelVersion).toBe(RELEASE);
  archive.corrupt.clear();

  // Interrupted before the manifest names them, it brings them the next time.
  const interrupted = setup(archive, {
    progress: ({ phase, message }) => {
      if (phase === "unpack kernel" && message === "done") throw new Error("interrupted");
    },
  });
  expect(await interrupted.then(() => "done", String)).toContain("interrupted");
  expect(await modulesOutdated(depsDir, RELEASE)).toBe(true);

  // A server that runs starts guests from what it found when it started, all the time.
  let looks = 0;
  const missed: string[] = [];
  const server = setInterval(() => {
    looks++;
    for (const path of [initrdPath, kernelPath]) if (!existsSync(path)) missed.push(path);
  }, 1);
  using _server = { [Symbol.dispose]: () => clearInterval(server) };
  const renewed = await setup(archive);
  expect(missed).toEqual([]);
  expect(looks).toBeGreaterThan(0);
  expect(statSync(initrdPath).ino).toBe(initrd);
  expect(renewed.warnings).toEqual([]);
  expect(existsSync(join(modules, "virtio_balloon.ko"))).toBe(true);
  const before = archive.requests.length;
  await setup(archive);
  expect(archive.requests.length).toBe(before);
});

test("a package altered on the way is refused and leaves nothing; afterwards setup goes through", async () => {
  await using archive = await makeArchive([await kernelPackage(RELEASE, "6.12.1000-1")]);
  const deb = `/pool/linux-image-${RELEASE}_6.12.1000-1_amd64.deb`;
  archive.corrupt.add(deb);
  await expect(setup(archive)).rejects.toMatchObject({ code: "download_failed" });
  expect(kernels(archive).length).toBeGreaterThan(0);
  expect(existsSync(join(depsDir, "kernel"))).toBe(false);
  expect(existsSync(join(depsDir, "manifest.json"))).toBe(false);
  archive.corrupt.clear();
  expect((await setup(archive)).runtime.kernelVersion).toBe(RELEASE);
});

/** Starts a setup as a process of its own and kills it when a part of the download is there. */
async function killDuringDownload(archive: TestArchive, whom: "alone" | "with its children"): Promise<void> {
  archive.bytesPerSecond = 800_000;
  const host = {
    ...archive.host,
    sources: archive.host.sources.map((s) => ({ ...s, options: [...s.options] })),
  };
  const script = `
    const { provision } = await import(${JSON.stringify(join(import.meta.dir, "setup.ts"))});
    const host = ${JSON.stringify(host)};
    for (const source of host.sources) source.options = new Map(source.options);
    await provision({ depsDir: ${JSON.stringify(depsDir)}, force: false, qemuBinaryPath: ${JSON.stringify(qemu)},
      aptHost: host, init: Buffer.from("x"), progress: () => {}, warn: () => {} });`;
  const child = Bun.spawn([process.execPath, "-e", script], {
    detached: true,
    stdout: "ignore",
    stderr: "inherit",
  });
  const packages = join(depsDir, "apt", "packages");
  const partial = () => {
    const [name] = existsSync(packages) ? readdirSync(packages) : [];
    return name === undefined ? 0 : Bun.file(join(packages, name)).size;
  };
  await eventually("a part is there", () => partial() >= 400_000);
  process.kill(whom === "alone" ? child.pid : -child.pid, "SIGKILL");
  await child.exited;
  archive.bytesPerSecond = Number.POSITIVE_INFINITY;
}

test("a download cut off by kill -9 goes on where it stopped", async () => {
  await using archive = await makeArchive([await kernelPackage(RELEASE, "6.12.1000-1", 2_000_000)]);
  await killDuringDownload(archive, "with its children");
  const { runtime, warnings } = await setup(archive);
  expect(runtime.kernelVersion).toBe(RELEASE);
  expect(warnings).toEqual([]);
  const last = kernels(archive).at(-1)!;
  expect(Number(/^bytes=(\d+)-$/.exec(last.range ?? "")?.[1])).toBeGreaterThanOrEqual(400_000);
});

test("apt that outlives a killed setup is waited for, not written over", async () => {
  await using archive = await makeArchive([await kernelPackage(RELEASE, "6.12.1000-1", 1_500_000)]);
  await killDuringDownload(archive, "alone");
  expect((await setup(archive)).runtime.kernelVersion).toBe(RELEASE);
  expect((await setup(archive)).warnings).toEqual([]);
});

test("two at once: one works, the other waits and finds it done", async () => {
  await using archive = await makeArchive([await kernelPackage(RELEASE, "6.12.1000-1", 300_000)]);
  archive.bytesPerSecond = 600_000;
  const [a, b] = await Promise.all([setup(archive), setup(archive)]);
  expect(a.runtime).toEqual(b.runtime);
  expect(kernels(archive)).toHaveLength(1);
  expect([...a.warnings, ...b.warnings].join()).toContain(`another setup works in ${depsDir}`);
});

test("damage is found, told and repaired", async () => {
  await using archive = await makeArchive([await kernelPackage(RELEASE, "6.12.1000-1")]);
  const { runtime } = await setup(archive);
  const module = join(depsDir, "kernel", RELEASE, "modules", "virtio_blk.ko");
  const bytes = await readFile(module);
  bytes[70]! ^= 1;
  await writeFile(module, bytes);
  expect((await setup(archive)).warnings.join()).toContain(`${module} was changed after installation`);
  expect((await setup(archive)).warnings).toEqual([]);

  await truncate(runtime.kernelPath, 10);
  await expect(resolve()).rejects.toMatchObject({ code: "runtime_missing" });
  await expect(resolve()).rejects.toThrow("has 10 bytes instead of");
  expect((await setup(archive)).warnings).toHaveLength(1);
  expect(await resolve()).toEqual(runtime);

  await writeFile(join(depsDir, "manifest.json"), "{ rubbish");
  await expect(setup(archive)).rejects.toMatchObject({ code: "deps_manifest_damaged" });
  expect((await setup(archive, { force: true })).runtime).toEqual(runtime);
});

test("nothing set up: the error names what is missing and the command", async () => {
  await expect(resolve()).rejects.toMatchObject({
    code: "runtime_missing",
    message: `there is no guest kernel under ${depsDir}`,
    remediation: `run: agentenv setup --deps ${depsDir} (or set [kernel].image_path)`,
  });
});

test("no archive: the error says so and names both keys", async () => {
  await using archive = await makeArchive([]);
  archive.stop();
  const error = await setup(archive).then(
    () => undefined,
    (reason: unknown) => reason,
  );
  expect(error).toMatchObject({ code: "archive_unreachable" });
  expect(String((error as { remediation: string }).remediation)).toMatch(
    /\[kernel\]\.image_path.*\[qemu\]\.binary_path/,
  );
});

test("no kernel of the series in the archive", async () => {
  await using archive = await makeArchive([await kernelPackage("6.13.1+test-cloud-amd64", "6.13.1-1")]);
  await expect(setup(archive)).rejects.toMatchObject({ code: "package_unavailable" });
});

test("a kernel of one's own: ELF as it lies, bzImage unpacked once, modules beside it", async () => {
  await using archive = await makeArchive([]);
  archive.stop();
  const elf = join(dir, "vmlinux");
  await writeFile(elf, makeVmlinux("6.1.2-own"));
  const first = await setup(archive, { kernelImagePath: elf });
  expect(first.runtime).toMatchObject({ kernelPath: elf, kernelVersion: "6.1.2-own" });

  const image = join(dir, "vmlinuz");
  await writeFile(image, makeBzImage(makeVmlinux("6.1.3-own")));
  const second = await setup(archive, { kernelImagePath: image });
  expect(second.runtime.kernelVersion).toBe("6.1.3-own");
  expect(Buffer.compare(await readFile(second.runtime.kernelPath), makeVmlinux("6.1.3-own"))).toBe(0);

  await writeFile(image, "not a kernel");
  await expect(setup(archive, { kernelImagePath: image })).rejects.toMatchObject({
    code: "kernel_image_invalid",
  });
  await expect(setup(archive, { kernelImagePath: dir })).rejects.toThrow("not a regular, non-empty file");
});

test("a QEMU of one's own is checked", async () => {
  const script = async (text: string, mode = 0o755) => {
    const path = join(dir, "other-qemu");
    await writeFile(path, text);
    await chmod(path, mode);
    return path;
  };
  await expect(checkQemu(join(dir, "none"))).rejects.toThrow("does not exist");
  await expect(checkQemu(dir)).rejects.toThrow("not a regular file");
  await expect(checkQemu(await script("#!/bin/sh\necho broken >&2; exit 3\n"))).rejects.toThrow(
    "does not run: broken",
  );
  await expect(checkQemu(await script(qemuScript("5.2.0")))).rejects.toThrow("is QEMU 5.2.0");
  await expect(checkQemu(await script("#!/bin/sh\necho QEMU emulator version 10.0.0\n"))).rejects.toThrow(
    "no microvm",
  );
  expect(await checkQemu(await script(qemuScript("7.2.22")))).toMatchObject({ version: "7.2.22" });
});

test("QEMU is unpacked with the libraries the machine lacks, without the parts a guest does not need", async () => {
  await using archive = await makeArchive([
    {
      name: "qemu-system-x86",
      version: "1:10.5.0+test-1",
      depends:
        "libaenv-needed9 (>= 1), libc6, qemu-system-common (= 1:10.5.0+test-1), qemu-system-data, seabios",
      files: {
        "usr/bin/qemu-system-x86_64": qemuScript("10.5.0", "libaenv-needed.so.9"),
        "usr/bin/qemu-system-i386": "not kept",
        "usr/share/doc/qemu-system-x86/copyright": "notice",
      },
    },
    { name: "qemu-system-common", version: "1:10.5.0+test-1", depends: "libaenv-sound9", files: {} },
    { name: "qemu-system-data", version: "1:10.5.0+test-1", files: { "usr/share/qemu/pvh.bin": "rom" } },
    { name: "seabios", version: "1.99-1", files: { "usr/share/seabios/bios-microvm.bin": "bios" } },
    {
      name: "libaenv-needed9",
      version: "1.2-3",
      files: { "usr/lib/x86_64-linux-gnu/libaenv-needed.so.9": "lib" },
    },
    {
      name: "libaenv-sound9",
      version: "1.2-3",
      files: { "usr/lib/x86_64-linux-gnu/libaenv-sound.so.9": "lib" },
    },
  ]);
  const apt = await PrivateApt.open({
    dir: join(depsDir, "apt"),
    progress: () => undefined,
    host: archive.host,
  });
  const record = await provisionQemu(apt, depsDir, () => undefined);
  if (record?.source !== "unpacked") throw new Error("QEMU was not unpacked");
  expect(record.version).toBe("10.5.0");
  expect(record.packages.map(({ name }) => name)).toEqual([
    "libaenv-needed9",
    "qemu-system-data",
    "qemu-system-x86",
    "seabios",
  ]);
  const names = record.files.map(({ path }) => path.slice(record.directory.length + 1));
  expect(names).toEqual([
    "usr/bin/qemu-system-x86_64",
    "usr/lib/x86_64-linux-gnu/libaenv-needed.so.9",
    "usr/share/qemu/pvh.bin",
    "usr/share/seabios/bios-microvm.bin",
  ]);
  // Without its library directory it does not run: the directory is what the server hands on.
  const binary = join(depsDir, record.directory, record.binary);
  await expect(checkQemu(binary)).rejects.toThrow("libaenv-needed.so.9");
  await writeManifest(depsDir, { schema: 1, qemu: record });
  const kernelImagePath = join(dir, "vmlinux");
  await writeFile(kernelImagePath, makeVmlinux("6.1.2-own"));
  const runtime = await resolveRuntime({
    depsDir,
    kernelImagePath,
    init: INIT,
    log,
    progress: () => undefined,
  });
  expect(runtime.qemu.version).toBe("10.5.0");
  expect(await checkQemu(runtime.qemu.binary, runtime.qemu.libraryPath)).toMatchObject({ version: "10.5.0" });
  expect(runtime.qemu.dataDirs.map((path) => path.slice(depsDir.length))).toEqual([
    `/${record.directory}/usr/share/qemu`,
    `/${record.directory}/usr/share/seabios`,
  ]);
});

const offer = (name: string, version: string, more: Partial<AptPackage> = {}): AptPackage => ({
  name,
  version,
  architecture: "amd64",
  sizeBytes: 1,
  sha256: "0".repeat(64),
  depends: [],
  provides: [],
  ...more,
});

test("a pinned kernel is preferred, and refused with another checksum", () => {
  const pin = dependencyPins.kernel.pinned[0]!;
  const newer = offer("linux-image-6.12.9999+deb12-cloud-amd64", "6.12.9999-1");
  const good = offer(pin.package, pin.version, { sha256: pin.sha256 });
  expect(chooseKernel([newer, good], dependencyPins.kernel, "amd64")).toBe(good);
  expect(chooseKernel([newer], dependencyPins.kernel, "amd64")).toBe(newer);
  expect(() => chooseKernel([offer(pin.package, pin.version)], dependencyPins.kernel, "amd64")).toThrow(
    pin.sha256,
  );
  const others = [
    "linux-image-6.12.5-cloud-arm64",
    "linux-image-6.12.5-rt-amd64",
    "linux-image-6.12.5-cloud-amd64-dbg",
  ];
  expect(
    chooseKernel(
      others.map((name) => offer(name, "6.12.5-1")),
      dependencyPins.kernel,
      "amd64",
    ),
  ).toBeUndefined();
});

test("QEMU: newest of at least the wanted version, its own packages in one version", () => {
  const names = ["qemu-system-x86", "qemu-system-data", "seabios"];
  const offered = [
    offer("qemu-system-x86", "1:7.2+dfsg-7"),
    offer("qemu-system-x86", "1:10.0.2-1"),
    offer("qemu-system-x86", "1:10.1.0-1"),
    offer("qemu-system-x86", "1:11.0.0-1"),
    offer("qemu-system-data", "1:11.0.0-1"),
    offer("qemu-system-data", "1:10.0.2-1"),
    offer("qemu-system-data", "1:10.1.0-1"),
    offer("seabios", "1.16.2-1"),
    offer("seabios", "1.16.3-1"),
  ];
  const rule = { minimum_version: "10", preferred_major: "10", pinned: [] };
  const versions = (list: AptPackage[] | undefined) => list?.map(({ version }) => version);
  expect(versions(chooseQemu(offered, names, rule))).toEqual(["1:10.1.0-1", "1:10.1.0-1", "1.16.3-1"]);
  const pin = {
    package: "qemu-system-x86",
    version: "1:10.0.2-1",
    architecture: "amd64",
    sha256: "0".repeat(64),
  };
  expect(versions(chooseQemu(offered, names, { ...rule, pinned: [pin] }))).toEqual([
    "1:10.0.2-1",
    "1:10.0.2-1",
    "1.16.3-1",
  ]);
  expect(() => chooseQemu(offered, names, { ...rule, pinned: [{ ...pin, sha256: "1".repeat(64) }] })).toThrow(
    "SHA-256",
  );
  expect(versions(chooseQemu(offered, names, { ...rule, minimum_version: "11" }))).toEqual([
    "1:11.0.0-1",
    "1:11.0.0-1",
    "1.16.3-1",
  ]);
  expect(chooseQemu(offered, names, { ...rule, minimum_version: "12" })).toBeUndefined();
});

test("the needed part of what apt would install, virtual packages included", () => {
  const root = offer("root", "1", { depends: ["virtual", "unwanted", "present"] });
  const all = [
    root,
    offer("real", "1", { provides: ["virtual"], depends: ["root"] }),
    offer("unwanted", "1", { depends: ["only-for-unwanted"] }),
    offer("only-for-unwanted", "1"),
    offer("upgraded-by-the-way", "1"),
  ];
  expect(reachable([root], all, new Set(["unwanted"])).map(({ name }) => name)).toEqual(["real", "root"]);
});

test("apt-cache output: relations with versions and alternatives; entries without a file are skipped", () => {
  const hash = "a".repeat(64);
  const text = `Package: pp\nVersion: 1:2-3\nArchitecture: amd64\nPre-Depends: linux-base (>= 4)\nDepends: aa (>= 1) | bb, cc:any\nProvides: vv (= 1)\nSize: 7\nSHA256: ${hash}\nDescription: text\n Depends: not this\n\nPackage: gone\nVersion: 1\nArchitecture: amd64\nStatus: install ok installed\n`;
  expect(parsePackages(text)).toEqual([
    {
      name: "pp",
      version: "1:2-3",
      architecture: "amd64",
      sizeBytes: 7,
      sha256: hash,
      depends: ["linux-base", "aa", "bb", "cc"],
      provides: ["vv"],
    },
  ]);
});
