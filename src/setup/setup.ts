import { mkdir, rm, statfs } from "node:fs/promises";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { AenvError, errorChain } from "../lib/errors.ts";
import { FileLock, lockHolder } from "../lib/file-lock.ts";
import { createLogger } from "../lib/log.ts";
import type { ProgressSink } from "../lib/progress.ts";
import { usageProblem } from "../lib/usage.ts";
import { type AptHost, PrivateApt } from "./apt/apt.ts";
import { consoleProgress, reportError } from "./console.ts";
import { treeDamage } from "./files.ts";
import { setupHost, THIS_HOST } from "./host.ts";
import { modulesOutdated, provisionKernel, recordAsked } from "./kernel.ts";
import { type InstalledManifest, readManifest, writeManifest } from "./manifest.ts";
import { checkQemu, installedQemu, isModern, provisionQemu, recordInstalled } from "./qemu.ts";
import { configuredKernel, oldQemuWarning, resolveRuntime } from "./resolve.ts";
import { PRINTABLE, serviceFile } from "./service.ts";
import { readSettings, SETTINGS_FLAGS, SETTINGS_HELP } from "./settings.ts";
import type { RuntimeDeps } from "./types.ts";

export interface SetupOptions {
  readonly depsDir: string;
  /** Install afresh what is there already. */
  readonly force: boolean;
  readonly kernelImagePath?: string;
  readonly qemuBinaryPath?: string;
  /** How long to wait for another setup in the same directory. */
  readonly lockWaitMs?: number;
  /** Where packages come from. Default: this machine's apt sources. */
  readonly aptHost?: AptHost;
  /** The guest's `/init`. Default: the embedded guest agent. */
  readonly init?: Uint8Array;
  readonly progress: ProgressSink;
  readonly warn: (text: string) => void;
}

/**
 * Brings guest kernel, QEMU and initial file system into the dependency directory. What is there and
 * unchanged stays; what was interrupted goes on; two at once wait for each other.
 */
export async function provision(options: SetupOptions): Promise<RuntimeDeps> {
  try {
    return await provisionAll(options);
  } catch (error) {
    if (!errorChain(error).some((message) => /No space left on device|ENOSPC/.test(message))) throw error;
    throw diskFull(options.depsDir, error);
  }
}

/** Indexes, packages and their unpacked content at their peak; what stays is a third of it. */
const NEEDED_BYTES = 400 * 1024 * 1024;

function diskFull(depsDir: string, cause?: unknown): AenvError {
  return new AenvError({
    code: "disk_full",
    status: 507,
    message: `the disk is too full for the dependencies in ${depsDir}: setup works with up to ${NEEDED_BYTES / 1024 / 1024} MiB`,
    remediation:
      "free space there, or choose another directory with --deps (deps_path), then run agentenv setup again",
    cause,
  });
}

async function provisionAll(options: SetupOptions): Promise<RuntimeDeps> {
  const { depsDir, progress } = options;
  await makeDepsDir(depsDir);
  using _lock = await lockDeps(depsDir, options.lockWaitMs ?? 30 * 60_000, options.warn);
  await removeLeftStaging(depsDir);

  let manifest: InstalledManifest;
  try {
    manifest = await readManifest(depsDir);
  } catch (error) {
    if (!options.force) throw error;
    manifest = { schema: 1 };
  }
  let apt: PrivateApt | undefined;
  const openApt = async () => {
    if (apt === undefined) {
      const { bavail, bsize } = await statfs(depsDir);
      if (bavail * bsize < NEEDED_BYTES) throw diskFull(depsDir);
      apt = await PrivateApt.open({ dir: join(depsDir, "apt"), progress, host: options.aptHost });
    }
    return apt;
  };

  const installKernel = async () => {
    const kernel = await provisionKernel(await openApt(), depsDir, progress);
    manifest = { ...manifest, kernel };
    await writeManifest(depsDir, manifest);
    await recordAsked(depsDir, kernel.release);
  };

  if (options.kernelImagePath !== undefined) await configuredKernel(depsDir, options.kernelImagePath);
  else {
    const record = manifest.kernel;
    const damage =
      record === undefined ? "" : await treeDamage(depsDir, [record.vmlinux, ...record.modules], "content");
    if (damage !== undefined && damage !== "") options.warn(`installing the guest kernel again: ${damage}`);
    if (options.force || damage !== undefined) {
      await installKernel();
    } else if (record !== undefined && (await modulesOutdated(depsDir, record.release))) {
      try {
        await installKernel();
      } catch (error) {
        // Guests run on what is there.
        if (!(error instanceof AenvError)) throw error;
        options.warn(`the guest kernel lacks modules that this version wants: ${error.message}`);
      }
    }
  }

  if (options.qemuBinaryPath !== undefined) await checkQemu(options.qemuBinaryPath);
  else {
    const qemu = await chooseQemuSource(options, manifest, openApt);
    if (qemu !== manifest.qemu) {
      manifest = { ...manifest, qemu };
      await writeManifest(depsDir, manifest);
    }
  }

  const log = createLogger("setup");
  log.level = "error"; // Progress and warnings go to the caller.
  const runtime = await resolveRuntime({
    depsDir,
    kernelImagePath: options.kernelImagePath,
    qemuBinaryPath: options.qemuBinaryPath,
    init: options.init,
    log,
    progress,
  });
  if (apt !== undefined) await apt.discard();
  await removeLeftStaging(depsDir);
  return runtime;
}

/** What is recorded and whole; else an installed QEMU that is new enough; else the archive's; else an older installed one. */
async function chooseQemuSource(
  options: SetupOptions,
  manifest: InstalledManifest,
  openApt: () => Promise<PrivateApt>,
): Promise<InstalledManifest["qemu"]> {
  const { depsDir } = options;
  const record = manifest.qemu;
  if (!options.force && record?.source === "unpacked") {
    const damage =
      (await treeDamage(depsDir, record.files, "content")) ?? (await unpackedProblem(depsDir, record));
    if (damage === undefined) return record;
    options.warn(`installing QEMU again: ${damage}`);
  }
  const installed = await installedQemu();
  if (installed.found !== undefined && isModern(installed.found.version)) {
    const now = recordInstalled(installed.found);
    return JSON.stringify(now) === JSON.stringify(record) ? record : now;
  }
  let failure: unknown;
  try {
    const unpacked = await provisionQemu(await openApt(), depsDir, options.progress);
    if (unpacked !== undefined) return unpacked;
  } catch (error) {
    if (installed.found === undefined) throw error;
    failure = error;
  }
  if (installed.found !== undefined) {
    if (failure instanceof Error) options.warn(`no newer QEMU from the archive: ${failure.message}`);
    options.warn(oldQemuWarning(installed.found.version));
    const now = recordInstalled(installed.found);
    return JSON.stringify(now) === JSON.stringify(record) ? record : now;
  }
  const apt = await openApt();
  throw apt.unavailable(
    `no QEMU 10 or later for Debian ${apt.codename}${installed.problem === undefined ? " and none is installed" : `, and ${installed.problem}`}`,
  );
}

/** Runs it: the libraries that were not unpacked because the host had them may be gone by now. */
async function unpackedProblem(
  depsDir: string,
  record: Extract<NonNullable<InstalledManifest["qemu"]>, { source: "unpacked" }>,
): Promise<string | undefined> {
  const under = (dir: string) => join(depsDir, record.directory, dir);
  try {
    await checkQemu(under(record.binary), record.libraryDirs.map(under).join(":"));
    return undefined;
  } catch (error) {
    if (error instanceof AenvError) return error.message;
    throw error;
  }
}

async function makeDepsDir(depsDir: string): Promise<void> {
  try {
    await mkdir(depsDir, { recursive: true });
  } catch (cause) {
    throw new AenvError({
      code: "deps_path_unusable",
      message: `cannot make ${depsDir}`,
      remediation: "run as root, or choose a directory you may write to with --home or --deps",
      cause,
    });
  }
}

async function lockDeps(depsDir: string, waitMs: number, warn: (text: string) => void): Promise<FileLock> {
  const path = join(depsDir, "setup.lock");
  try {
    const lock = FileLock.tryAcquire(path, "agentenv setup");
    if (lock !== undefined) return lock;
  } catch (cause) {
    throw new AenvError({
      code: "deps_path_unusable",
      message: `cannot write to ${depsDir}`,
      remediation: "run as the user it belongs to, or choose another directory with --home or --deps",
      cause,
    });
  }
  warn(`another setup works in ${depsDir} (pid ${lockHolder(path) ?? "unknown"}): waiting for it`);
  return FileLock.acquire(path, waitMs, "agentenv setup");
}

/**
 * What an interrupted setup left half made. Called under the lock. Trees of earlier versions stay: a
 * snapshot can only be resumed by the QEMU version that took it.
 */
async function removeLeftStaging(depsDir: string): Promise<void> {
  await rm(join(depsDir, "staging"), { recursive: true, force: true });
}

const USAGE = `Usage: agentenv setup [options]
       agentenv setup --host [--runtime-user NAME] [--runtime-group NAME] [--dry-run] [options]
       agentenv setup --print unit|environment [--runtime-user NAME] [--runtime-group NAME]

Brings the guest kernel, QEMU and the guest's initial file system into the dependency directory.
Installs nothing on the host and needs no root. Quick when everything is there.

With --host, once and as root: gives the server's account what it needs of the machine (devices, groups,
kernel settings, directories), so that the server runs without root. Done again, it changes nothing.

${SETTINGS_HELP}
  --host               prepare the machine instead of the dependencies
  --print WHAT         print the systemd unit of the server, or the environment file that belongs to it
  --runtime-user NAME  account the server runs as (default: aenv; with --host or --print)
  --runtime-group NAME its group (default: aenv; with --host or --print)
  --dry-run            say what --host would do
  --force              install afresh what is there already
  --json               print what was set up as JSON
  -h, --help           this text
`;

function parseFlags(argv: string[]) {
  const flags = parseArgs({
    args: argv,
    options: {
      ...SETTINGS_FLAGS,
      host: { type: "boolean" },
      "runtime-user": { type: "string" },
      "runtime-group": { type: "string" },
      "dry-run": { type: "boolean" },
      print: { type: "string" },
      force: { type: "boolean" },
      json: { type: "boolean" },
      help: { type: "boolean", short: "h" },
    },
  }).values;
  const given = (names: readonly (keyof typeof flags)[]) => names.find((name) => flags[name] !== undefined);
  const mode = flags.host ? "--host" : flags.print !== undefined ? "--print" : undefined;
  if (flags.host && flags.print !== undefined) throw new Error("--print does not go with --host");
  if (flags.print !== undefined && !isPrintable(flags.print)) {
    throw new Error(`--print ${flags.print}: must be ${PRINTABLE.join(" or ")}`);
  }
  const account = given(["runtime-user", "runtime-group"]);
  if (mode === undefined && account !== undefined) throw new Error(`--${account} needs --host or --print`);
  if (!flags.host && flags["dry-run"]) throw new Error("--dry-run needs --host");
  const depsOnly = given(["force", "json", "deps", "kernel-image", "qemu-binary"]);
  if (mode !== undefined && depsOnly !== undefined) throw new Error(`--${depsOnly} does not go with ${mode}`);
  return flags;
}

function isPrintable(word: string): word is (typeof PRINTABLE)[number] {
  return (PRINTABLE as readonly string[]).includes(word);
}

const TRUE_WORDS = ["1", "true", "yes", "on"];

/** `agentenv setup --host`: a line per step on standard output. */
async function hostMain(flags: ReturnType<typeof parseFlags>): Promise<number> {
  const { home, runtimePath } = readSettings(flags, process.env);
  const dryRun = flags["dry-run"] === true;
  const changes = await setupHost({
    user: flags["runtime-user"] ?? "aenv",
    group: flags["runtime-group"] ?? "aenv",
    homePath: home,
    runtimePath,
    dryRun,
    forceSysctl: TRUE_WORDS.includes(process.env.AENV_FORCE_SYSCTL_TUNING?.trim().toLowerCase() ?? ""),
    host: THIS_HOST,
    report: ({ title, state, remark }) =>
      process.stdout.write(`${state.padEnd(14)}${title}${remark === undefined ? "" : ` (${remark})`}\n`),
  });
  const verdict = dryRun ? "to be done; nothing was changed" : "done";
  process.stdout.write(changes === 0 ? "the host is ready\n" : `${changes} ${verdict}\n`);
  return 0;
}

/** `agentenv setup`. Exit codes: 0 done, 1 failed, 2 wrong usage. */
export async function setupMain(argv: string[]): Promise<number> {
  let flags: ReturnType<typeof parseFlags>;
  try {
    flags = parseFlags(argv);
  } catch (error) {
    process.stderr.write(`Error: ${usageProblem(error)}\n\n${USAGE}`);
    return 2;
  }
  if (flags.help) {
    process.stdout.write(USAGE);
    return 0;
  }
  const startedMs = performance.now();
  const progress = consoleProgress();
  try {
    if (flags.host) return await hostMain(flags);
    if (flags.print !== undefined && isPrintable(flags.print)) {
      const account = { user: flags["runtime-user"] ?? "aenv", group: flags["runtime-group"] ?? "aenv" };
      process.stdout.write(serviceFile(flags.print, { executable: process.execPath, ...account }));
      return 0;
    }
    const { depsDir, kernelImagePath, qemuBinaryPath } = readSettings(flags, process.env);
    const runtime = await provision({
      depsDir,
      force: flags.force === true,
      kernelImagePath,
      qemuBinaryPath,
      progress,
      warn: (text) => {
        progress.finish();
        process.stderr.write(`Warning: ${text}\n`);
      },
    });
    progress.finish();
    if (flags.json) process.stdout.write(`${JSON.stringify(runtime, null, 2)}\n`);
    else {
      const seconds = ((performance.now() - startedMs) / 1000).toFixed(1);
      process.stdout.write(
        `guest kernel ${runtime.kernelVersion}, QEMU ${runtime.qemu.version} (${runtime.qemu.binary}): ready in ${depsDir} (${seconds} s)\n`,
      );
    }
    return 0;
  } catch (error) {
    progress.finish();
    reportError(error);
    return 1;
  }
}
