import { readdirSync } from "node:fs";
import { mkdir, readFile, rename, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { runCommand } from "../lib/command.ts";
import { writeDurable } from "../lib/durable.ts";
import { AenvError } from "../lib/errors.ts";
import type { ProgressSink } from "../lib/progress.ts";
import { APT_HELPER, type AptPackage, type PrivateApt } from "./apt/apt.ts";
import { compareDebianVersions } from "./debian-version.ts";
import { describeFile, publishFiles, stagingDir } from "./files.ts";
import { type DependencyPins, dependencyPins, type InstalledKernel, type PinnedPackage } from "./manifest.ts";
import { moduleName, orderModules, readModuleInfo } from "./modules.ts";
import { extractVmlinux, kernelRelease } from "./vmlinux.ts";

/**
 * The package to take: a pinned version where the archive still offers one (its checksum must be the
 * pinned one), else the newest of the series.
 */
export function chooseKernel(
  offered: readonly AptPackage[],
  pins: DependencyPins["kernel"],
  architecture: string,
): AptPackage | undefined {
  const series = pins.series.replaceAll(".", "\\.");
  const pattern = new RegExp(`^linux-image-${series}\\.\\d+[^-]*(?:-\\d+)?-${pins.flavour}-${architecture}$`);
  const candidates = offered.filter((p) => pattern.test(p.name));
  const pinned = candidates.find((p) => findPin(p, pins.pinned) !== undefined);
  if (pinned !== undefined) return checkPin(pinned, pins.pinned);
  return candidates.sort((a, b) => compareDebianVersions(b.version, a.version))[0];
}

export function findPin(p: AptPackage, pins: readonly PinnedPackage[]): PinnedPackage | undefined {
  return pins.find(
    (pin) => pin.package === p.name && pin.version === p.version && pin.architecture === p.architecture,
  );
}

export function checkPin(p: AptPackage, pins: readonly PinnedPackage[]): AptPackage {
  const pin = findPin(p, pins);
  if (pin !== undefined && pin.sha256 !== p.sha256) {
    throw new AenvError({
      code: "checksum_mismatch",
      message: `the archive offers ${p.name} ${p.version} with SHA-256 ${p.sha256}, this release knows it as ${pin.sha256}`,
      remediation: "a file of a published version never changes: do not use this mirror",
    });
  }
  return p;
}

/** Downloads and unpacks the guest kernel; nothing of it is installed on the host. */
export async function provisionKernel(
  apt: PrivateApt,
  depsDir: string,
  progress: ProgressSink,
): Promise<InstalledKernel> {
  const pins = dependencyPins.kernel;
  await apt.update();
  const names = (await apt.names(`linux-image-${pins.series}.`)).filter((name) =>
    name.includes(`-${pins.flavour}-`),
  );
  const chosen = chooseKernel(await apt.versions(names), pins, apt.architecture);
  if (chosen === undefined) {
    throw apt.unavailable(
      `no linux-image-${pins.series}.*-${pins.flavour}-${apt.architecture} package for Debian ${apt.codename}`,
    );
  }
  const files = await apt.download("download kernel", [chosen]);
  return unpackKernel(chosen, files.get(chosen.name)!, depsDir, progress);
}

/** Beside the modules: what was asked for. Of these, some may be built in, and others bring more. */
const ASKED = "asked";

function asked(): string {
  return dependencyPins.kernel.modules.map((name) => `${name}\n`).join("");
}

function askedPath(depsDir: string, release: string): string {
  return join(depsDir, "kernel", release, "modules", ASKED);
}

/** Whether an installed kernel was unpacked by a version that asked for other modules. */
export async function modulesOutdated(depsDir: string, release: string): Promise<boolean> {
  const file = Bun.file(askedPath(depsDir, release));
  return !(await file.exists()) || (await file.text()) !== asked();
}

/** Called when the manifest names the modules: setup that ends before brings them again. */
export async function recordAsked(depsDir: string, release: string): Promise<void> {
  await writeDurable(askedPath(depsDir, release), asked(), 0o644);
}

/**
 * Takes vmlinux and the needed modules out of a kernel package into `kernel/<release>/`. Whatever else is there stays:
 * servers that run may start guests from it at any time.
 */
export async function unpackKernel(
  source: AptPackage,
  debPath: string,
  depsDir: string,
  progress: ProgressSink,
): Promise<InstalledKernel> {
  const phase = "unpack kernel";
  progress({ phase, item: source.name });
  await using staging = await stagingDir(depsDir);
  const root = join(staging.path, "package");
  await runCommand(["dpkg-deb", "-x", debPath, root], { timeoutMs: 300_000 });

  const boot = join(root, "boot");
  const imageName = readdirSync(boot).find((name) => name.startsWith("vmlinuz-"));
  if (imageName === undefined)
    throw new AenvError({ code: "kernel_package_invalid", message: `${debPath} holds no boot/vmlinuz-*` });
  const vmlinux = extractVmlinux(imageName, await readFile(join(boot, imageName)));
  const release = kernelRelease(imageName, vmlinux);

  const tree = join(staging.path, "kernel");
  await mkdir(join(tree, "modules"), { recursive: true });
  await writeFile(join(tree, "vmlinux"), vmlinux);
  const modulesRoot = await findModules(root, release);
  const order = await collectModules(
    modulesRoot,
    release,
    dependencyPins.kernel.modules,
    join(tree, "modules"),
  );
  await writeFile(join(tree, "modules", "order"), order.map((name) => `${name}\n`).join(""));

  const finalDir = join("kernel", release);
  const record: InstalledKernel = {
    release,
    packages: [{ name: source.name, version: source.version, sha256: source.sha256 }],
    vmlinux: await describeFile(tree, finalDir, "vmlinux"),
    modules: [],
  };
  for (const name of order) record.modules.push(await describeFile(tree, finalDir, join("modules", name)));
  await publishFiles(tree, join(depsDir, finalDir));
  progress({ phase, item: release, message: "done" });
  return record;
}

async function findModules(root: string, release: string): Promise<string> {
  for (const prefix of ["usr/lib/modules", "lib/modules"]) {
    const dir = join(root, prefix, release);
    if (await Bun.file(join(dir, "modules.builtin")).exists()) return dir;
  }
  throw new AenvError({
    code: "kernel_package_invalid",
    message: `the kernel package holds no lib/modules/${release}`,
  });
}

/** Decompresses wanted modules and what they need into `target`; returns their file names in load order. */
export async function collectModules(
  modulesRoot: string,
  release: string,
  wanted: readonly string[],
  target: string,
): Promise<string[]> {
  const paths = new Map<string, string>();
  for (const entry of readdirSync(modulesRoot, { recursive: true, withFileTypes: true })) {
    if (entry.isFile() && /\.ko(\.xz)?$/.test(entry.name)) {
      paths.set(moduleName(entry.name), join(entry.parentPath, entry.name));
    }
  }
  const builtinText = await Bun.file(join(modulesRoot, "modules.builtin")).text();
  const builtin = new Set(
    builtinText
      .split("\n")
      .filter((line) => line !== "")
      .map(moduleName),
  );
  const order = await orderModules(
    wanted,
    async (name) => {
      const path = paths.get(name);
      if (path === undefined) return undefined;
      const file = join(target, `${name}.ko`);
      if (path.endsWith(".xz")) await decompressXz(path, file);
      else await rename(path, file);
      const info = readModuleInfo(file, await readFile(file));
      if (info.vermagic.split(" ")[0] !== release) {
        await rm(file);
        throw new AenvError({
          code: "kernel_module_mismatch",
          message: `module ${name} is for kernel ${info.vermagic.split(" ")[0]}, the image is ${release}`,
        });
      }
      return info.depends;
    },
    builtin,
  );
  return order.map((name) => `${name}.ko`);
}

/** apt brings the decompressor for what it downloads; a machine without xz has it, too. */
async function decompressXz(source: string, target: string): Promise<void> {
  const child = Bun.spawn([APT_HELPER, "cat-file", source], { stdout: Bun.file(target), stderr: "pipe" });
  const [exitCode, said] = await Promise.all([child.exited, new Response(child.stderr).text()]);
  if (exitCode !== 0) {
    throw new AenvError({
      code: "kernel_package_invalid",
      message: `cannot decompress ${source}: ${said.trim()}`,
    });
  }
}
