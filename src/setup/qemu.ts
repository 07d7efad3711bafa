import { accessSync, constants, readdirSync, realpathSync, statSync } from "node:fs";
import { copyFile, mkdir, readlink, rename, symlink } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { runCommand, tryCommand } from "../lib/command.ts";
import { syncPath } from "../lib/durable.ts";
import { AenvError } from "../lib/errors.ts";
import type { ProgressSink } from "../lib/progress.ts";
import type { AptPackage, PrivateApt } from "./apt/apt.ts";
import { compareDebianVersions, upstreamVersion } from "./debian-version.ts";
import { describeFile, publishTree, stagingDir } from "./files.ts";
import { checkPin } from "./kernel.ts";
import { type DependencyPins, dependencyPins, type InstalledQemu } from "./manifest.ts";

export const QEMU_PROGRAM = "qemu-system-x86_64";

export interface QemuCheck {
  readonly binary: string;
  readonly version: string;
}

/** Asks a QEMU for its version and for the microvm machine; an error says what is wrong with it. */
export async function checkQemu(binary: string, libraryPath?: string): Promise<QemuCheck> {
  const cure = `set [qemu].binary_path to a QEMU ${dependencyPins.qemu.minimum_version} or later for x86_64, or run agentenv setup`;
  const unusable = (why: string, cause?: unknown) =>
    new AenvError({ code: "qemu_unusable", message: `${binary} ${why}`, remediation: cure, cause });
  const stat = statSync(binary, { throwIfNoEntry: false });
  if (stat === undefined) throw unusable("does not exist");
  if (!stat.isFile()) throw unusable("is not a regular file");
  try {
    accessSync(binary, constants.R_OK | constants.X_OK);
  } catch (cause) {
    throw unusable("is not readable and executable", cause);
  }
  const env = qemuEnvironment(libraryPath);
  const told = await tryCommand([binary, "--version"], { env, timeoutMs: 20_000 });
  const version = /QEMU emulator version (\d+(?:\.\d+)+)/.exec(told.stdout)?.[1];
  if (told.exitCode !== 0 || version === undefined) {
    throw unusable(
      `does not run: ${(told.stderr.trim() || told.stdout.trim()).slice(0, 500) || `exit code ${told.exitCode}`}`,
    );
  }
  if (compareDebianVersions(version, dependencyPins.qemu.oldest_version) < 0) {
    throw unusable(
      `is QEMU ${version}; the oldest that can run a guest is ${dependencyPins.qemu.oldest_version}`,
    );
  }
  const machines = await tryCommand([binary, "-M", "help"], { env, timeoutMs: 20_000 });
  if (!/^microvm\s/m.test(machines.stdout)) throw unusable("has no microvm machine");
  return { binary, version };
}

/** Environment a QEMU is started with: nothing of ours but what it needs. */
export function qemuEnvironment(libraryPath?: string): Record<string, string> {
  return {
    PATH: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    LC_ALL: "C.UTF-8",
    ...(libraryPath === undefined || libraryPath === "" ? {} : { LD_LIBRARY_PATH: libraryPath }),
  };
}

export function isModern(version: string): boolean {
  return compareDebianVersions(version, dependencyPins.qemu.minimum_version) >= 0;
}

/** The QEMU on the machine's PATH, checked; undefined when there is none or it is unusable. */
export async function installedQemu(): Promise<{ found?: QemuCheck; problem?: string }> {
  const path = Bun.which(QEMU_PROGRAM);
  if (path === null) return {};
  try {
    return { found: await checkQemu(path) };
  } catch (error) {
    if (error instanceof AenvError) return { problem: error.message };
    throw error;
  }
}

export function recordInstalled(check: QemuCheck): InstalledQemu {
  const stat = statSync(check.binary);
  return {
    source: "installed",
    version: check.version,
    binary: check.binary,
    sizeBytes: stat.size,
    mtimeMs: Math.trunc(stat.mtimeMs),
  };
}

/**
 * QEMU's packages in a version of at least the wanted one, or undefined when the archive has none. Pinned
 * versions come first (and must have the pinned checksum), then the preferred major version, then the newest.
 */
export function chooseQemu(
  offered: readonly AptPackage[],
  names: readonly string[],
  rule: Pick<DependencyPins["qemu"], "minimum_version" | "preferred_major" | "pinned">,
): AptPackage[] | undefined {
  const { minimum_version, preferred_major, pinned: pins } = rule;
  const [main] = names;
  const mains = offered.filter(
    (p) => p.name === main && compareDebianVersions(upstreamVersion(p.version), minimum_version) >= 0,
  );
  mains.sort((a, b) => compareDebianVersions(b.version, a.version));
  const isPinned = (p: AptPackage) => pins.some((pin) => pin.package === p.name && pin.version === p.version);
  const isPreferred = (p: AptPackage) => upstreamVersion(p.version).split(".")[0] === preferred_major;
  const chosen = mains.find(isPinned) ?? mains.find(isPreferred) ?? mains[0];
  if (chosen === undefined) return undefined;
  const roots: AptPackage[] = [];
  for (const name of names) {
    const versions = offered.filter((p) => p.name === name);
    // QEMU's own packages come in one version, firmware in its newest.
    const match =
      versions.find((p) => p.version === chosen.version) ??
      versions.find(isPinned) ??
      versions.sort((a, b) => compareDebianVersions(b.version, a.version))[0];
    if (match === undefined) return undefined;
    roots.push(checkPin(match, pins));
  }
  return roots;
}

/** Downloads and unpacks QEMU with the shared libraries the host lacks; undefined when the archive has no new enough one. */
export async function provisionQemu(
  apt: PrivateApt,
  depsDir: string,
  progress: ProgressSink,
): Promise<InstalledQemu | undefined> {
  const { packages, without } = dependencyPins.qemu;
  await apt.update();
  const roots = chooseQemu(await apt.versions(packages), packages, dependencyPins.qemu);
  if (roots === undefined) return undefined;
  const closure = await apt.missingClosure(roots, new Set(without));
  // The C library cannot be mixed with the host's loader; a host that lacks the version needs an upgrade.
  const wanted = closure.filter((p) => p.name !== "libc6");
  const files = await apt.download("download QEMU", wanted);
  return unpackQemu(wanted, files, depsDir, progress);
}

async function unpackQemu(
  packages: readonly AptPackage[],
  debs: ReadonlyMap<string, string>,
  depsDir: string,
  progress: ProgressSink,
): Promise<InstalledQemu> {
  const phase = "unpack QEMU";
  const main = packages.find((p) => p.name === dependencyPins.qemu.packages[0])!;
  progress({ phase, item: main.version });
  await using staging = await stagingDir(depsDir);
  const root = join(staging.path, "packages");
  for (const p of packages) {
    await runCommand(["dpkg-deb", "-x", debs.get(p.name)!, root], { timeoutMs: 300_000 });
  }
  const tree = join(staging.path, "qemu");
  const kept = await pickFiles(root, tree);
  const libraryDirs = [
    ...new Set(kept.filter((name) => /\.so(\.|$)/.test(name)).map((name) => dirname(name))),
  ].sort();
  const dataDirs = ["usr/share/qemu", "usr/share/seabios"].filter((dir) =>
    kept.some((name) => dirname(name) === dir),
  );
  const binary = `usr/bin/${QEMU_PROGRAM}`;
  if (!kept.includes(binary)) {
    throw new AenvError({
      code: "qemu_package_invalid",
      message: `${main.name} ${main.version} holds no ${binary}`,
    });
  }
  const check = await checkQemu(join(tree, binary), libraryDirs.map((dir) => join(tree, dir)).join(":"));

  const directory = join("qemu", main.version.replace(/^\d+:/, "").replaceAll(":", "_"));
  const files = [];
  for (const name of kept) {
    if (name.startsWith("usr/share/doc/")) continue;
    await syncPath(join(tree, name));
    files.push(await describeFile(tree, directory, name));
  }
  await publishTree(depsDir, tree, join(depsDir, directory));
  progress({ phase, item: check.version, message: "done" });
  return {
    source: "unpacked",
    version: check.version,
    packages: packages.map(({ name, version, sha256 }) => ({ name, version, sha256 })),
    directory,
    files,
    binary,
    dataDirs,
    libraryDirs,
  };
}

/** Moves what is kept from the unpacked packages to `tree`; returns relative paths. Links become files. */
async function pickFiles(root: string, tree: string): Promise<string[]> {
  const keep = new Set(dependencyPins.qemu.keep);
  const kept: string[] = [];
  const entries = readdirSync(root, { recursive: true, withFileTypes: true });
  // Links first: what they point at is still there.
  entries.sort((a, b) => Number(b.isSymbolicLink()) - Number(a.isSymbolicLink()));
  for (const entry of entries) {
    const path = join(entry.parentPath, entry.name);
    const name = path.slice(root.length + 1);
    const library = /^(usr\/)?lib\/([^/]+\/)?[^/]+\.so(\.[^/]+)*$/.test(name);
    const notice = /^usr\/share\/doc\/[^/]+\/copyright$/.test(name);
    if (!entry.isFile() && !entry.isSymbolicLink()) continue;
    if (!keep.has(name) && !library && !notice) continue;
    await mkdir(join(tree, dirname(name)), { recursive: true });
    if (entry.isSymbolicLink()) {
      // A library's soname link points at its neighbour; anything else becomes what it points at.
      const target = await readlink(path);
      if (library && target === basename(target)) await symlink(target, join(tree, name));
      else if (notice) continue;
      else await copyFile(realpathSync(path), join(tree, name));
    } else {
      await rename(path, join(tree, name));
    }
    kept.push(name);
  }
  return kept.sort();
}
