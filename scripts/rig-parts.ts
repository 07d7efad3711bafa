/**
 * Brings what scripts/rig.sh boots its machine with: a distribution kernel with all its modules (the guest
 * kernel of `agentenv setup` is the small cloud flavour, without ublk or KVM) through the machine's own apt
 * sources, and the QEMU that setup chose. Prints `name=value` lines for the shell:
 *
 *   bun scripts/rig-parts.ts CACHE-DIR AENV-HOME
 *
 * The kernel is downloaded and unpacked once; later calls use no network.
 */
import { existsSync, mkdirSync, readdirSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { runCommand } from "../src/lib/command.ts";
import { PrivateApt } from "../src/setup/apt/apt.ts";
import { consoleProgress, reportError } from "../src/setup/console.ts";
import { chooseKernel } from "../src/setup/kernel.ts";
import { dependencyPins, readManifest } from "../src/setup/manifest.ts";
import { resolveQemu } from "../src/setup/resolve.ts";
import { extractVmlinux, kernelRelease } from "../src/setup/vmlinux.ts";
import { tickMeter } from "../src/vmm/qemu/ticks.ts";

const SERIES = dependencyPins.kernel.series;

/** `CACHE/kernel-RELEASE` with `vmlinux` and `modules/RELEASE`, all decompressed. */
async function kernel(cacheDir: string): Promise<string> {
  const present = readdirSync(cacheDir).find((name) => /^kernel-\d/.test(name));
  if (present !== undefined) return join(cacheDir, present);
  const progress = consoleProgress();
  try {
    const apt = await PrivateApt.open({ dir: join(cacheDir, "apt"), progress });
    await apt.update();
    // No flavour: the kernel with every driver. `linux-image-6.12.95+deb12-amd64`, not `-rt-` or `-unsigned`.
    const wanted = new RegExp(`^linux-image-[^-]+(-\\d+)?-${apt.architecture}$`);
    const names = (await apt.names(`linux-image-${SERIES}.`)).filter((name) => wanted.test(name));
    const offered = (await apt.versions(names)).map((found) => ({
      ...found,
      name: found.name.replace(new RegExp(`-${apt.architecture}$`), `-full-${apt.architecture}`),
    }));
    const pins = { ...dependencyPins.kernel, flavour: "full", pinned: [] };
    const chosen = chooseKernel(offered, pins, apt.architecture);
    if (chosen === undefined) throw apt.unavailable(`no linux-image-${SERIES}.*-${apt.architecture} package`);
    const source = { ...chosen, name: chosen.name.replace("-full-", "-") };
    const files = await apt.download("download rig kernel", [source]);
    const built = await unpack(cacheDir, files.get(source.name)!);
    rmSync(join(cacheDir, "apt"), { recursive: true, force: true });
    return built;
  } finally {
    progress.finish();
  }
}

async function unpack(cacheDir: string, deb: string): Promise<string> {
  const staging = join(cacheDir, `staging-${process.pid}`);
  rmSync(staging, { recursive: true, force: true });
  try {
    const root = join(staging, "package");
    mkdirSync(root, { recursive: true });
    await runCommand(["dpkg-deb", "-x", deb, root], { timeoutMs: 300_000 });
    const boot = join(root, "boot");
    const image = readdirSync(boot).find((name) => name.startsWith("vmlinuz-"));
    if (image === undefined) throw new Error(`${deb} holds no boot/vmlinuz-*`);
    const vmlinux = extractVmlinux(image, readFileSync(join(boot, image)));
    const release = kernelRelease(image, vmlinux);
    const modules = ["lib/modules", "usr/lib/modules"].find((dir) => existsSync(join(root, dir, release)));
    if (modules === undefined) throw new Error(`${deb} holds no lib/modules/${release}`);
    const tree = join(staging, "tree");
    mkdirSync(join(tree, "modules"), { recursive: true });
    writeFileSync(join(tree, "vmlinux"), vmlinux);
    const target = join(tree, "modules", release);
    renameSync(join(root, modules, release), target);
    // Plain files load quicker under emulation, and BusyBox's modprobe takes nothing else.
    await runCommand(["sh", "-c", `find '${target}' -name '*.ko.xz' -print0 | xargs -0r -P2 -n64 xz -d`], {
      timeoutMs: 300_000,
    });
    for (const link of ["build", "source"]) rmSync(join(target, link), { force: true });
    // depmod looks below lib/modules.
    mkdirSync(join(staging, "lib"), { recursive: true });
    renameSync(join(tree, "modules"), join(staging, "lib", "modules"));
    await runCommand(["busybox", "depmod", "-b", staging, release], { timeoutMs: 60_000 });
    renameSync(join(staging, "lib", "modules"), join(tree, "modules"));
    const final = join(cacheDir, `kernel-${release}`);
    renameSync(tree, final);
    return final;
  } finally {
    rmSync(staging, { recursive: true, force: true });
  }
}

const quoted = (text: string): string => `'${text.replaceAll("'", "'\\''")}'`;

try {
  const tickKHz = tickMeter();
  const [cache, home] = process.argv.slice(2);
  if (cache === undefined || home === undefined) throw new Error("usage: rig-parts.ts CACHE-DIR AENV-HOME");
  const cacheDir = resolve(cache);
  mkdirSync(cacheDir, { recursive: true });
  const depsDir = join(resolve(home), "deps");
  const qemu = await resolveQemu(depsDir, await readManifest(depsDir), undefined);
  const lines = {
    kernel: await kernel(cacheDir),
    qemu: qemu.binary,
    qemu_version: qemu.version,
    qemu_data: qemu.dataDirs.join(":"),
    qemu_modules: qemu.moduleDir ?? "",
    qemu_libraries: qemu.libraryPath ?? "",
    tick_khz: String(await tickKHz()),
  };
  for (const [name, value] of Object.entries(lines)) console.log(`${name}=${quoted(value)}`);
} catch (error) {
  reportError(error);
  process.exit(1);
}
