import { readdirSync, statSync } from "node:fs";
import { mkdir, readFile } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { writeDurable } from "../lib/durable.ts";
import { AenvError } from "../lib/errors.ts";
import type { Logger } from "../lib/log.ts";
import type { ProgressSink } from "../lib/progress.ts";
import { regularFileSize, sha256File, treeDamage } from "./files.ts";
import { ensureInitrd, type InitrdModule } from "./initrd.ts";
import { dependencyPins, type InstalledManifest, readManifest } from "./manifest.ts";
import { checkQemu, installedQemu, isModern, QEMU_PROGRAM } from "./qemu.ts";
import type { QemuDeps, RuntimeDeps } from "./types.ts";
import { extractVmlinux, isElfKernel, kernelRelease } from "./vmlinux.ts";

export interface ResolveRuntimeOptions {
  /** `deps_path`: where `agentenv setup` put things. */
  readonly depsDir: string;
  /** `[kernel].image_path`. */
  readonly kernelImagePath?: string;
  /** `[qemu].binary_path`. */
  readonly qemuBinaryPath?: string;
  /** The guest's `/init`. Default: the embedded guest agent. */
  readonly init?: Uint8Array;
  readonly log: Logger;
  readonly progress: ProgressSink;
}

function setupCommand(depsDir: string): string {
  return `run: agentenv setup --deps ${depsDir}`;
}

/**
 * The guest kernel, initial file system and QEMU that guests are started with. Downloads nothing: what is
 * missing is an error (`runtime_missing`) that names it and the command that brings it. Only the small
 * initial file system is made here when the embedded agent or the modules are other than last time.
 */
export async function resolveRuntime(options: ResolveRuntimeOptions): Promise<RuntimeDeps> {
  const manifest = await readManifest(options.depsDir);
  const kernel =
    options.kernelImagePath === undefined
      ? await installedKernel(options.depsDir, manifest)
      : await configuredKernel(options.depsDir, options.kernelImagePath);
  const qemu = await resolveQemu(options.depsDir, manifest, options.qemuBinaryPath);
  if (!isModern(qemu.version))
    options.log.warn({ qemu: qemu.binary, version: qemu.version }, oldQemuWarning(qemu.version));
  const init = options.init ?? (await import("../lib/assets.ts")).readAsset("envd");
  const initrd = await ensureInitrd({
    dir: kernel.initrdDir,
    init,
    modules: kernel.modules,
  });
  if (initrd.built) {
    options.progress({ phase: "initial file system", item: basename(initrd.path), message: "done" });
    options.log.info({ initrd: initrd.path }, "made the guest's initial file system");
  }
  return { kernelPath: kernel.path, kernelVersion: kernel.release, initrdPath: initrd.path, qemu };
}

export function oldQemuWarning(version: string): string {
  return `QEMU ${version} is older than ${dependencyPins.qemu.minimum_version}: guests run with one vCPU and without cmpxchg16b, and under emulation one in some dozens of boots may crash; agentenv setup brings a newer one where the archive has it`;
}

export interface ResolvedKernel {
  readonly path: string;
  readonly release: string;
  readonly modules: readonly (InitrdModule & { readonly sha256: string })[];
  /** Where the initial file system for it is kept. */
  readonly initrdDir: string;
}

export async function installedKernel(depsDir: string, manifest: InstalledManifest): Promise<ResolvedKernel> {
  const record = manifest.kernel;
  if (record === undefined) {
    throw new AenvError({
      code: "runtime_missing",
      message: `there is no guest kernel under ${depsDir}`,
      remediation: `${setupCommand(depsDir)} (or set [kernel].image_path)`,
    });
  }
  const damage = await treeDamage(depsDir, [record.vmlinux, ...record.modules], "size");
  if (damage !== undefined) {
    throw new AenvError({
      code: "runtime_missing",
      message: `the guest kernel is incomplete: ${damage}`,
      remediation: setupCommand(depsDir),
    });
  }
  return {
    path: join(depsDir, record.vmlinux.path),
    release: record.release,
    modules: record.modules.map((file) => ({
      name: basename(file.path),
      path: join(depsDir, file.path),
      sha256: file.sha256,
    })),
    initrdDir: join(depsDir, dirname(record.vmlinux.path)),
  };
}

/**
 * A kernel of the user's own. An ELF vmlinux is used where it lies; a bzImage is unpacked once into the
 * dependency directory. Modules are taken from a directory `modules` beside it (`*.ko` with an `order`
 * file), where there is one; a kernel without needs virtio built in.
 */
export async function configuredKernel(
  depsDir: string,
  imagePath: string,
  { readOnly = false }: { readonly readOnly?: boolean } = {},
): Promise<ResolvedKernel> {
  const size = regularFileSize(imagePath);
  if (size === undefined) {
    throw new AenvError({
      code: "kernel_image_invalid",
      message: `[kernel].image_path ${imagePath} is not a regular, non-empty file`,
      remediation: "correct [kernel].image_path, or remove it and run agentenv setup",
    });
  }
  const digest = (await sha256File(imagePath)).slice(0, 16);
  const own = join(depsDir, "kernel", `image-${digest}`);
  let path = imagePath;
  let vmlinux = await readFile(imagePath);
  if (!isElfKernel(vmlinux)) {
    path = join(own, "vmlinux");
    if (regularFileSize(path) !== undefined) vmlinux = await readFile(path);
    else {
      vmlinux = Buffer.from(extractVmlinux(imagePath, vmlinux));
      if (!readOnly) {
        await mkdir(own, { recursive: true });
        await writeDurable(path, vmlinux, 0o644);
      }
    }
  }
  const release = kernelRelease(imagePath, vmlinux);
  const modulesDir = join(dirname(imagePath), "modules");
  const modules: (InitrdModule & { sha256: string })[] = [];
  if (statSync(join(modulesDir, "order"), { throwIfNoEntry: false })?.isFile()) {
    for (const name of (await readFile(join(modulesDir, "order"), "utf8")).split("\n")) {
      if (name === "") continue;
      const file = join(modulesDir, name);
      if (name.includes("/") || regularFileSize(file) === undefined) {
        throw new AenvError({
          code: "kernel_module_missing",
          message: `${modulesDir}/order names ${name}, which is not a file beside it`,
          remediation: "put the module there or take its line out of the order file",
        });
      }
      modules.push({ name, path: file, sha256: await sha256File(file) });
    }
  }
  return { path, release, modules, initrdDir: own };
}

export async function resolveQemu(
  depsDir: string,
  manifest: InstalledManifest,
  configuredPath: string | undefined,
): Promise<QemuDeps> {
  if (configuredPath !== undefined) {
    const check = await checkQemu(configuredPath);
    return { binary: check.binary, version: check.version, dataDirs: [] };
  }
  const record = manifest.qemu;
  if (record?.source === "unpacked") {
    const binary = join(depsDir, record.directory, record.binary);
    const damage = await treeDamage(depsDir, record.files, "size");
    if (damage !== undefined) {
      throw new AenvError({
        code: "runtime_missing",
        message: `the unpacked QEMU is incomplete: ${damage}`,
        remediation: setupCommand(depsDir),
      });
    }
    const under = (dir: string) => join(depsDir, record.directory, dir);
    return {
      binary,
      version: record.version,
      dataDirs: record.dataDirs.map(under),
      ...(record.libraryDirs.length === 0 ? {} : { libraryPath: record.libraryDirs.map(under).join(":") }),
    };
  }
  if (record?.source === "installed") {
    const stat = statSync(record.binary, { throwIfNoEntry: false });
    if (stat?.isFile() && stat.size === record.sizeBytes && Math.trunc(stat.mtimeMs) === record.mtimeMs) {
      return { binary: record.binary, version: record.version, dataDirs: [] };
    }
  }
  // Upgraded or never recorded: what is on the PATH now.
  const installed = await installedQemu();
  if (installed.found === undefined) {
    throw new AenvError({
      code: "runtime_missing",
      message:
        installed.problem === undefined
          ? `there is no QEMU: none under ${depsDir}, no ${QEMU_PROGRAM} on the PATH`
          : `there is no usable QEMU: ${installed.problem}`,
      remediation: `${setupCommand(depsDir)} (or set [qemu].binary_path)`,
    });
  }
  return { ...installed.found, dataDirs: [] };
}

/** Newest initial file system that was made for this kernel; undefined when none was. Makes none. */
export function findInitrd(kernel: ResolvedKernel): string | undefined {
  const made = regularFiles(kernel.initrdDir, /^initrd-[0-9a-f]{16}\.img$/);
  return made.sort((a, b) => statSync(b).mtimeMs - statSync(a).mtimeMs)[0];
}

function regularFiles(dir: string, pattern: RegExp): string[] {
  if (statSync(dir, { throwIfNoEntry: false })?.isDirectory() !== true) return [];
  return readdirSync(dir)
    .filter((name) => pattern.test(name))
    .map((name) => join(dir, name));
}
