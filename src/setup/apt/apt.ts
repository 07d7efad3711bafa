import { readdirSync, statSync } from "node:fs";
import { mkdir, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { type CommandResult, runCommand, tryCommand } from "../../lib/command.ts";
import { errorCode } from "../../lib/durable.ts";
import { AenvError } from "../../lib/errors.ts";
import type { ProgressSink } from "../../lib/progress.ts";
import { compareDebianVersions } from "../debian-version.ts";
import { sha256File } from "../files.ts";
import { type AptSource, deriveSources, parseSources, renderSources, withoutBackports } from "./sources.ts";

/** One package file of the archive. */
export interface AptPackage {
  readonly name: string;
  readonly version: string;
  readonly architecture: string;
  readonly sizeBytes: number;
  readonly sha256: string;
  /** Names of the Depends and Pre-Depends fields, alternatives and all. */
  readonly depends: readonly string[];
  readonly provides: readonly string[];
}

export interface AptOptions {
  /** Private state: `apt.conf`, sources, indexes and downloaded packages. */
  readonly dir: string;
  readonly progress: ProgressSink;
  /** Default: this machine's. */
  readonly host?: AptHost;
}

/** Release and sources packages are looked for in. */
export interface AptHost {
  readonly architecture: string;
  readonly codename: string;
  readonly sources: readonly AptSource[];
}

/** Part of apt: downloads and decompresses with what apt itself uses. */
export const APT_HELPER = "/usr/lib/apt/apt-helper";

const INDEX_MAX_AGE_MS = 60 * 60 * 1000;
const CONFIGURE_BY_HAND =
  "or set [kernel].image_path and [qemu].binary_path (agentenv setup --kernel-image PATH --qemu-binary PATH) to use your own";

/** Hooks of the machine's own apt that act on the machine: not for an apt that leaves it alone. */
const CLEARED_HOOKS = [
  "APT::Update::Pre-Invoke",
  "APT::Update::Post-Invoke",
  "APT::Update::Post-Invoke-Success",
  "DPkg::Pre-Invoke",
  "DPkg::Post-Invoke",
  "DPkg::Pre-Install-Pkgs",
];

/**
 * The machine's apt with state of its own: it reads the machine's sources, keys, proxies and package
 * status, and writes only below `dir`. Needs no root.
 */
export class PrivateApt {
  readonly #dir: string;
  readonly #progress: ProgressSink;
  readonly architecture: string;
  readonly codename: string;
  readonly #sources: readonly AptSource[];
  /** What `apt-get update` complained about, told when something is not found later. */
  #updateComplaints = "";

  private constructor(options: AptOptions, host: AptHost) {
    this.#dir = options.dir;
    this.#progress = options.progress;
    this.architecture = host.architecture;
    this.codename = host.codename;
    this.#sources = host.sources;
  }

  static async open(options: AptOptions): Promise<PrivateApt> {
    const host = options.host ?? (await readHost());
    await mkdir(join(options.dir, "lists", "partial"), { recursive: true });
    await mkdir(join(options.dir, "cache", "archives", "partial"), { recursive: true });
    await mkdir(join(options.dir, "packages"), { recursive: true });
    const apt = new PrivateApt(options, host);
    await apt.#configure();
    return apt;
  }

  async #configure(): Promise<void> {
    if (/["\\\n]/.test(this.#dir)) {
      throw new AenvError({
        code: "deps_path_unusable",
        message: `apt cannot work in ${JSON.stringify(this.#dir)}: quotes, backslashes and line ends are not possible`,
        remediation: "choose another deps_path",
      });
    }
    const set: Record<string, string> = {
      "Dir::Etc::sourcelist": join(this.#dir, "derived.sources"),
      "Dir::Etc::sourceparts": "/dev/null",
      "Dir::Etc::preferences": "/dev/null",
      "Dir::Etc::preferencesparts": "/dev/null",
      "Dir::State::lists": join(this.#dir, "lists"),
      "Dir::Cache": join(this.#dir, "cache"),
      // Some machines (container images) turn these off, which makes every call parse all indexes anew.
      "Dir::Cache::pkgcache": "pkgcache.bin",
      "Dir::Cache::srcpkgcache": "srcpkgcache.bin",
      "APT::Sandbox::User": "root",
      "APT::Install-Recommends": "false",
      "Acquire::Languages": "none",
      "Acquire::Retries": "2",
      "Acquire::http::Timeout": "30",
      "Acquire::https::Timeout": "30",
      "Acquire::http::Proxy::127.0.0.1": "DIRECT",
      // Nothing is locked that the machine's own apt uses; setup holds a lock of its own.
      "Debug::NoLocking": "true",
    };
    const text = [
      ...CLEARED_HOOKS.map((name) => `#clear ${name};`),
      ...Object.entries(set).map(([name, value]) => `${name} "${value}";`),
      "",
    ].join("\n");
    await writeFile(join(this.#dir, "apt.conf"), text);
    const sources = renderSources(this.#sources, this.architecture);
    const path = join(this.#dir, "derived.sources");
    const before = await readTextOrEmpty(path);
    if (before !== sources) {
      // Indexes of other sources are not this machine's any more.
      await rm(join(this.#dir, "updated"), { force: true });
      await writeFile(path, sources);
    }
  }

  async #run(argv: string[], options: { timeoutMs?: number; lock?: string } = {}): Promise<CommandResult> {
    const [program, ...rest] = argv;
    const locked = options.lock === undefined ? [] : ["flock", "--no-fork", "-w", "60", options.lock];
    return tryCommand([...locked, program!, "-c", join(this.#dir, "apt.conf"), ...rest], {
      timeoutMs: options.timeoutMs ?? 60_000,
      env: {
        ...(process.env as Record<string, string>),
        LC_ALL: "C.UTF-8",
        DEBIAN_FRONTEND: "noninteractive",
      },
    });
  }

  /** Fetches the package indexes unless that was done within the hour. */
  async update(force = false): Promise<void> {
    const stamp = join(this.#dir, "updated");
    const stat = statSync(stamp, { throwIfNoEntry: false });
    const ageMs = stat === undefined ? Number.POSITIVE_INFINITY : Date.now() - stat.mtimeMs;
    if (!force && ageMs >= 0 && ageMs < INDEX_MAX_AGE_MS) return;
    const phase = "package indexes";
    const lists = join(this.#dir, "lists");
    const measure = () => {
      this.#progress({ phase, item: this.codename, doneBytes: directorySize(lists) });
    };
    measure();
    const timer = setInterval(measure, 200);
    let result: CommandResult;
    try {
      result = await this.#run(["apt-get", "-q", "update"], { timeoutMs: 10 * 60_000 });
    } finally {
      clearInterval(timer);
    }
    this.#updateComplaints = complaints(result);
    if (result.exitCode !== 0 && !this.#hasIndexes())
      throw this.#unavailable("apt-get update fetched no package index");
    measure();
    this.#progress({ phase, item: this.codename, message: "done" });
    if (this.#updateComplaints === "") await writeFile(stamp, "");
  }

  #hasIndexes(): boolean {
    return readdirSync(join(this.#dir, "lists")).some((name) => /_Packages(\.|$)/.test(name));
  }

  /** An error about something the archive did not give, with apt's own words and the cures. */
  #unavailable(what: string): AenvError {
    const network =
      /Temporary failure|Could not (resolve|connect)|Connection|Unable to connect|timed out/i.test(
        this.#updateComplaints,
      );
    const said = this.#updateComplaints === "" ? "" : `; apt says:\n${this.#updateComplaints}`;
    return new AenvError({
      code: network ? "archive_unreachable" : "package_unavailable",
      message: `${what}${said}`,
      remediation: network
        ? `check the network and the mirrors in the apt sources (proxies: Acquire::http::Proxy in apt.conf), then run agentenv setup again; ${CONFIGURE_BY_HAND}`
        : `check that the machine's apt sources name a mirror that carries ${this.codename} and ${this.codename}-backports; ${CONFIGURE_BY_HAND}`,
    });
  }

  unavailable(what: string): AenvError {
    return this.#unavailable(what);
  }

  /** Names of packages that start with `prefix`, as the indexes have them. */
  async names(prefix: string): Promise<string[]> {
    const result = await this.#run(["apt-cache", "pkgnames", prefix]);
    if (result.exitCode !== 0)
      throw this.#unavailable(`apt-cache cannot read the package indexes: ${result.stderr.trim()}`);
    return result.stdout.split("\n").filter((name) => name !== "");
  }

  /** Every version of these packages that the archive offers, newest first. */
  async versions(names: readonly string[]): Promise<AptPackage[]> {
    if (names.length === 0) return [];
    // A name that exists only as a dependency makes apt-cache fail although others were shown.
    const result = await this.#run(["apt-cache", "show", ...names]);
    return parsePackages(result.stdout).sort((a, b) => compareDebianVersions(b.version, a.version));
  }

  /**
   * What would have to be installed for these packages (given with versions) beyond what the machine has:
   * the packages themselves and the missing part of their dependencies, without `without` and what only
   * those need. Nothing is installed.
   */
  async missingClosure(roots: readonly AptPackage[], without: ReadonlySet<string>): Promise<AptPackage[]> {
    const rootArguments = roots.map((root) => `${root.name}=${root.version}`);
    const base = ["apt-get", "-q", "-y", "--no-install-recommends", "--print-uris", "--reinstall"];
    const attempts = [base, [...base, "-t", `${this.codename}-backports`]];
    let said = "";
    for (const attempt of attempts) {
      const result = await this.#run([...attempt, "install", ...rootArguments]);
      if (result.exitCode !== 0) {
        said = result.stderr.trim();
        continue;
      }
      const wanted = new Map<string, string>();
      for (const match of result.stdout.matchAll(/^'[^']*' ([^_\s]+)_([^_\s]+)_[^_\s]+\.deb \d+/gm)) {
        wanted.set(match[1]!, decodeURIComponent(match[2]!.replaceAll("%3a", ":")));
      }
      for (const root of roots) wanted.set(root.name, root.version);
      const offered = (await this.versions([...wanted.keys()])).filter(
        (p) => wanted.get(p.name) === p.version,
      );
      return reachable(roots, offered, without);
    }
    throw new AenvError({
      code: "dependencies_unresolvable",
      message: `apt cannot resolve the dependencies of ${rootArguments.join(", ")}: ${said.slice(0, 1500)}`,
      remediation: `repair the machine's package state (apt-get -f install) and run agentenv setup again; ${CONFIGURE_BY_HAND}`,
    });
  }

  /**
   * Downloads package files, going on where an earlier try stopped; what is there complete is not fetched
   * again. Returns their paths. A file whose SHA-256 is not the index's is deleted and refused.
   */
  async download(phase: string, packages: readonly AptPackage[]): Promise<Map<string, string>> {
    const dir = join(this.#dir, "packages");
    const path = (p: AptPackage) => join(dir, packageFileName(p));
    const totalBytes = packages.reduce((sum, p) => sum + p.sizeBytes, 0);
    const measure = () => {
      const doneBytes = packages.reduce((sum, p) => {
        const size = statSync(path(p), { throwIfNoEntry: false })?.size ?? 0;
        return sum + Math.min(size, p.sizeBytes);
      }, 0);
      this.#progress({ phase, doneBytes, totalBytes });
    };
    // A killed setup's download may still run on its own: two writers of one file make rubbish of it.
    await runCommand(["flock", "-w", "1800", this.#downloadLock, "true"], { timeoutMs: 1_810_000 });
    const incomplete: AptPackage[] = [];
    for (const p of packages) {
      const size = statSync(path(p), { throwIfNoEntry: false })?.size ?? 0;
      if (size === p.sizeBytes && (await sha256File(path(p))) === p.sha256) continue;
      if (size >= p.sizeBytes) await rm(path(p), { force: true });
      incomplete.push(p);
    }
    measure();
    for (let attempt = 1; incomplete.length > 0; attempt++) {
      const timer = setInterval(measure, 200);
      let said: string | undefined;
      try {
        said = await this.#fetch(incomplete, path);
      } finally {
        clearInterval(timer);
      }
      if (said === undefined) break;
      if (attempt === 2) {
        throw new AenvError({
          code: "download_failed",
          message: `${phase} failed: ${said}`,
          remediation: `check network and disk space, then run agentenv setup again: it goes on where it stopped; ${CONFIGURE_BY_HAND}`,
        });
      }
      // The archive may have moved on since the indexes were fetched.
      await this.update(true);
    }
    measure();
    const files = new Map<string, string>();
    for (const p of packages) {
      const found = await sha256File(path(p));
      if (found !== p.sha256) {
        await rm(path(p), { force: true });
        throw new AenvError({
          code: "checksum_mismatch",
          message: `${packageFileName(p)} has SHA-256 ${found} instead of ${p.sha256}; the file was deleted`,
          remediation: "run agentenv setup again; if it stays so, the mirror or a proxy alters files",
        });
      }
      files.set(p.name, path(p));
    }
    this.#progress({ phase, doneBytes: totalBytes, totalBytes, message: "done" });
    return files;
  }

  get #downloadLock(): string {
    return join(this.#dir, "download.lock");
  }

  /** Fetches what is not complete; goes on with a part that is there. Returns what went wrong, in apt's words. */
  async #fetch(
    packages: readonly AptPackage[],
    path: (p: AptPackage) => string,
  ): Promise<string | undefined> {
    const names = packages.map((p) => `${p.name}=${p.version}`);
    const printed = await this.#run(["apt-get", "-q", "download", "--print-uris", ...names]);
    const uris = new Map<string, string>();
    for (const match of printed.stdout.matchAll(/^'([^']+)' ([^_\s]+)_\S+ \d+/gm))
      uris.set(match[2]!, match[1]!);
    for (const p of packages) {
      const uri = uris.get(p.name);
      if (uri === undefined)
        return `the archive does not offer ${p.name} ${p.version} any more: ${complaints(printed)}`;
      if (statSync(path(p), { throwIfNoEntry: false })?.size === p.sizeBytes) continue;
      // flock's descriptor is 3 and goes on to apt's transport processes, which hold the lock while they live.
      const result = await this.#run(
        [APT_HELPER, "-o", "APT::Keep-Fds::=3", "download-file", uri, path(p), `SHA256:${p.sha256}`],
        { timeoutMs: 60 * 60_000, lock: this.#downloadLock },
      );
      if (result.exitCode !== 0) {
        const said = complaints(result);
        // What does not fit is no beginning to go on from.
        if (/Hash Sum mismatch|unexpected size|File has/i.test(said)) await rm(path(p), { force: true });
        await rm(`${path(p)}.FAILED`, { force: true });
        return said;
      }
    }
    return undefined;
  }

  /** Removes indexes, caches and downloaded packages: everything wanted from them is installed. */
  async discard(): Promise<void> {
    await rm(this.#dir, { recursive: true, force: true });
  }
}

/** apt writes the epoch's colon as %3a in file names. */
function packageFileName(p: AptPackage): string {
  return `${p.name}_${p.version.replaceAll(":", "%3a")}_${p.architecture}.deb`;
}

/** Errors and warnings of an apt program, without the rest of what it says. */
function complaints(result: CommandResult): string {
  const lines = withoutCredentials(`${result.stdout}\n${result.stderr}`).split("\n");
  return lines
    .filter((line, i) => /^(E:|W:|Err:)/.test(line) || (/^ /.test(line) && /^Err:/.test(lines[i - 1] ?? "")))
    .join("\n")
    .slice(0, 2000);
}

function withoutCredentials(text: string): string {
  return text.replace(/:\/\/[^/@\s]+@/g, "://");
}

async function readTextOrEmpty(path: string): Promise<string> {
  try {
    return await Bun.file(path).text();
  } catch (error) {
    if (errorCode(error) === "ENOENT") return "";
    throw error;
  }
}

function directorySize(dir: string): number {
  let bytes = 0;
  for (const entry of readdirSync(dir, { withFileTypes: true })) {
    const path = join(dir, entry.name);
    if (entry.isDirectory()) bytes += directorySize(path);
    // Files come and go while apt works.
    else bytes += statSync(path, { throwIfNoEntry: false })?.size ?? 0;
  }
  return bytes;
}

/** `apt-cache show` output: stanzas of `Field: value`. */
export function parsePackages(text: string): AptPackage[] {
  const packages: AptPackage[] = [];
  for (const stanza of text.split(/\n\s*\n/)) {
    const fields = new Map<string, string>();
    for (const match of stanza.matchAll(/^([A-Za-z0-9-]+): (.*)$/gm))
      fields.set(match[1]!.toLowerCase(), match[2]!);
    const [name, version, architecture] = [
      fields.get("package"),
      fields.get("version"),
      fields.get("architecture"),
    ];
    const [size, sha256] = [Number(fields.get("size")), fields.get("sha256")];
    // An installed package that the archive does not offer any more has neither size nor checksum.
    if (name === undefined || version === undefined || architecture === undefined) continue;
    if (!Number.isSafeInteger(size) || sha256 === undefined) continue;
    const relation = (field: string) =>
      (fields.get(field) ?? "")
        .split(/[,|]/)
        .map((item) => /^\s*([a-z0-9][a-z0-9+.-]+)/.exec(item)?.[1])
        .filter((item) => item !== undefined);
    packages.push({
      name,
      version,
      architecture,
      sizeBytes: size,
      sha256,
      depends: [...relation("pre-depends"), ...relation("depends")],
      provides: relation("provides"),
    });
  }
  return packages;
}

/** Packages of `offered` that the roots need, directly or not, without those in `without`. */
export function reachable(
  roots: readonly AptPackage[],
  offered: readonly AptPackage[],
  without: ReadonlySet<string>,
): AptPackage[] {
  const byName = new Map<string, AptPackage[]>();
  for (const p of offered) {
    for (const name of [p.name, ...p.provides]) byName.set(name, [...(byName.get(name) ?? []), p]);
  }
  const found = new Map<string, AptPackage>();
  const queue = [...roots];
  for (let next = queue.pop(); next !== undefined; next = queue.pop()) {
    if (found.has(next.name)) continue;
    found.set(next.name, next);
    for (const name of next.depends) {
      for (const p of byName.get(name) ?? []) if (!without.has(p.name)) queue.push(p);
    }
  }
  return [...found.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
}

async function readHost(): Promise<AptHost> {
  const osRelease = await readTextOrEmpty("/etc/os-release");
  const field = (name: string) => new RegExp(`^${name}="?([^"\\n]*)"?$`, "m").exec(osRelease)?.[1];
  const system = field("PRETTY_NAME") ?? "this system";
  const unsupported = (why: string) =>
    new AenvError({
      code: "host_not_debian",
      message: `guest kernel and QEMU cannot be provisioned on ${system}: ${why}`,
      remediation:
        "set [kernel].image_path (an uncompressed x86_64 vmlinux with virtio-mmio, virtio-blk and virtio-net built in) and [qemu].binary_path (QEMU 10 or later) in the configuration, or pass --kernel-image and --qemu-binary to agentenv setup",
    });
  if (field("ID") !== "debian")
    throw unsupported("they come from the Debian archive through the machine's own apt");
  let architecture: CommandResult;
  let config: CommandResult;
  try {
    architecture = await tryCommand(["dpkg", "--print-architecture"]);
    config = await tryCommand([
      "apt-config",
      "shell",
      "list",
      "Dir::Etc::sourcelist/f",
      "parts",
      "Dir::Etc::sourceparts/d",
    ]);
  } catch (cause) {
    if (cause instanceof AenvError && cause.code === "command_not_found") throw unsupported("it has no apt");
    throw cause;
  }
  const codename = field("VERSION_CODENAME");
  if (codename === undefined) throw unsupported("/etc/os-release has no VERSION_CODENAME");
  if (architecture.stdout.trim() !== "amd64")
    throw unsupported(`its architecture is ${architecture.stdout.trim()}, not amd64`);
  const list = /^list='(.*)'$/m.exec(config.stdout)?.[1];
  const parts = /^parts='(.*)'$/m.exec(config.stdout)?.[1];
  const files = [
    ...(list !== undefined && statSync(list, { throwIfNoEntry: false })?.isFile() ? [list] : []),
    ...(parts !== undefined && statSync(parts, { throwIfNoEntry: false })?.isDirectory()
      ? readdirSync(parts)
          .filter((name) => /^[A-Za-z0-9_.-]+\.(list|sources)$/.test(name))
          .sort()
          .map((name) => join(parts, name))
      : []),
  ];
  const all: AptSource[] = [];
  for (const file of files) all.push(...parseSources(file, await Bun.file(file).text()));
  const sources = deriveSources(all, codename);
  if (sources.length === 0) {
    throw new AenvError({
      code: "apt_sources_missing",
      message: `no apt source of this machine carries Debian ${codename} main (looked into ${files.join(", ") || "no file"})`,
      remediation: `add a Debian mirror for ${codename} to the apt sources and run agentenv setup again; ${CONFIGURE_BY_HAND}`,
    });
  }
  return { architecture: "amd64", codename, sources };
}

/** This machine's own Debian release as a deb822 source file, e.g. to make a root file system from. */
export async function hostReleaseSources(): Promise<{ codename: string; text: string }> {
  const { architecture, codename, sources } = await readHost();
  return { codename, text: renderSources(withoutBackports(sources), architecture) };
}
