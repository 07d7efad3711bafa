import {
  chmodSync,
  chownSync,
  closeSync,
  constants,
  existsSync,
  fchownSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { open } from "node:fs/promises";
import { basename, join } from "node:path";
import { tryCommand } from "../../lib/command.ts";
import { errorCode, removeTree } from "../../lib/durable.ts";
import { AenvError } from "../../lib/errors.ts";
import type { Logger } from "../../lib/log.ts";
import { adoptVmm, processLives, readProcessStat, spawnDetached, type VmmProcess } from "../process.ts";
import type { VmNetwork } from "../types.ts";
import { O_PATH } from "./api.ts";
import { type GroupLimits, Groups } from "./cgroup.ts";
import { openPipe } from "./output.ts";

/** Accounts of jailed processes: a user each out of a range that nobody else uses, and one group for all. */
export interface JailUsers {
  readonly firstUid: number;
  readonly count: number;
  readonly gid: number;
}

export interface JailsOptions {
  /** Firecracker's executable on the host. */
  readonly binary: string;
  /** The aenv-jail program (c/jail). */
  readonly helper: string;
  /** Upstream's jailer, in place of ours. */
  readonly jailer?: string;
  /** Parent of the jails' directories, on a disk: the VMM writes its states there. */
  readonly workDir: string;
  /** Absent: processes keep the server's account, which is no choice for root. */
  readonly users?: JailUsers;
  /** Path of the control groups' parent below their mount. Absent: no groups. */
  readonly cgroup?: string;
  /** More of the host that the process sees, read-only, under the same names (for tests: an interpreter). */
  readonly alsoVisible?: readonly string[];
  readonly log: Logger;
}

/** The directory that Firecracker and the server share, as the former sees it. States name paths in it. */
export const INSIDE = "/run/agentenv-vm";
/** Where it sees what it is given to read. */
export const FILES = "/files";
const SOCKET = `${INSIDE}/api.sock`;
const LOG_PIPE = "log";
const METRICS_PIPE = "metrics";
const PROGRAM = "/firecracker";
const PREFIX = "agentenv-fc-";
const DEVICES = ["/dev/kvm", "/dev/net/tun", "/dev/urandom"];
/** What Firecracker itself takes beside the guest's memory, with room: threads, buffers, page cache of its files. */
const OVERHEAD_BYTES = 256 * 2 ** 20;

/** Of a guest's memory and what the host keeps beside it: page tables (a 512th), twice with the hypervisor's, bitmaps. */
export function groupMemory(guestBytes: number): number {
  return guestBytes + OVERHEAD_BYTES + Math.ceil(guestBytes / 128);
}
/** Linux' capabilities by number: to give files and processes to another account, and to make device nodes. */
const ACCOUNT_CAPABILITIES = [0n, 6n, 7n, 27n];

/** To enter another process's mounts: CAP_SYS_CHROOT, besides CAP_SYS_ADMIN which every server has. */
const ENTER_CAPABILITIES = [18n, 21n];

function hasCapabilities(
  bits: readonly bigint[],
  status = readFileSync("/proc/self/status", "utf8"),
): boolean {
  const effective = BigInt(`0x${/^CapEff:\s*([0-9a-f]+)/m.exec(status)?.[1] ?? "0"}`);
  return bits.every((bit) => ((effective >> bit) & 1n) === 1n);
}

/** Whether this process may start others under other accounts. */
export function mayChangeUser(status?: string): boolean {
  return hasCapabilities(ACCOUNT_CAPABILITIES, status);
}

/** Whether this process may give a jail something when it is there already. */
export function mayEquip(status?: string): boolean {
  return hasCapabilities(ENTER_CAPABILITIES, status);
}

/**
 * Removes what Firecracker's driver left in `workDir` when the server runs another one now: its VMs cannot be taken
 * over, and would stay for ever. Cheap where there is none.
 */
export async function sweepJails(options: Pick<JailsOptions, "workDir" | "cgroup" | "log">): Promise<number> {
  let names: string[];
  try {
    names = readdirSync(options.workDir);
  } catch (error) {
    if (errorCode(error) === "ENOENT") return 0;
    throw error;
  }
  if (!names.some((name) => name.startsWith(PREFIX))) return 0;
  const jails = new Jails({ ...options, binary: "", helper: "" });
  try {
    return await jails.sweep();
  } finally {
    jails.close();
  }
}

/** One thing a jail is given of the host. */
export interface JailEntry {
  readonly kind: "ro" | "rw" | "node";
  readonly source: string;
  readonly target: string;
}

/** A running process in its jail. Disposing ends it, if it runs, and removes what it had. */
export interface Jail extends AsyncDisposable {
  readonly name: string;
  readonly dir: string;
  readonly process: VmmProcess;
  /** The shared directory, as the server sees it. What lies there is the jailed process's word. */
  readonly sharedDir: string;
  /** The API's socket, as anybody on the host can name it as long as the process runs, and as this server reaches it. */
  readonly socketPath: string;
  readonly apiPath: string;
  /** Pipes with the console, with Firecracker's log and with what it counts. */
  readonly consolePipe: string;
  readonly logPipe: string;
  readonly metricsPipe: string;
  readonly stderrPath: string;
  readonly gid: number | undefined;
  /** Gives it what it needs for one VM, and the VM's limits. */
  equip(entries: readonly JailEntry[], limits: GroupLimits, maxFileBytes: number): Promise<void>;
  /** Makes a file of the shared directory that is the process's own. Throws where the name is taken. */
  give(file: string, bytes: Uint8Array): void;
  /** Leaves it to the next sweep, in place of disposing. */
  abandon(): void;
}

/** Where VMMs have no accounts of their own. */
export function accountWarning(root: boolean): string {
  return root
    ? "VMMs run as root: to give each an account of its own the server needs CAP_CHOWN, CAP_SETGID, CAP_SETUID and CAP_MKNOD"
    : "VMMs run under the server's own account: to give each one of its own the server has to run as root";
}

/** A directory held by a descriptor: its path leads there whatever becomes of its name. */
interface HeldDirectory extends Disposable {
  readonly path: string;
}

const FOLLOW_NOTHING = O_PATH | constants.O_DIRECTORY | constants.O_NOFOLLOW;

/**
 * `inside` below `base`. The directories of `inside` are of the jailed process's account, so that it may put links in
 * their place: none is followed. Throws (ENOTDIR, ELOOP) where one is there.
 */
export function holdDirectory(base: string, inside: string): HeldDirectory {
  let fd = openSync(base, FOLLOW_NOTHING);
  for (const part of inside.split("/").filter((part) => part !== "")) {
    const above = fd;
    try {
      fd = openSync(`/proc/self/fd/${above}/${part}`, FOLLOW_NOTHING);
    } finally {
      closeSync(above);
    }
  }
  let open = true;
  return {
    path: `/proc/self/fd/${fd}`,
    [Symbol.dispose]: () => {
      if (open) closeSync(fd);
      open = false;
    },
  };
}

export class Jails {
  readonly #options: JailsOptions;
  readonly #own = new Set<string>();
  readonly #uids = new Set<number>();
  #groups: Groups | undefined;
  #groupsAsked = false;

  constructor(options: JailsOptions) {
    this.#options = options;
  }

  /** What is not as strict as it could be, in words for the operator. */
  warnings(): string[] {
    const { users, cgroup } = this.#options;
    return [
      ...(users === undefined ? [accountWarning(process.geteuid?.() === 0)] : []),
      ...(cgroup !== undefined && this.#openGroups() === undefined
        ? [`VMMs run without limits of CPU and memory: no control groups can be made below ${cgroup}`]
        : []),
    ];
  }

  /**
   * Starts Firecracker, which then waits for its API's first request. Throws when it cannot be started. `entries`: what
   * it is given at once; the jailer knows none.
   */
  async start(
    network: VmNetwork,
    args: readonly string[],
    limits: GroupLimits,
    maxFileBytes: number,
    entries: readonly JailEntry[] = [],
  ): Promise<Jail> {
    const { binary, helper, jailer, workDir } = this.#options;
    const name = `${PREFIX}${crypto.randomUUID().replaceAll("-", "").slice(0, 20)}`;
    const dir = join(workDir, name);
    await using undo = new AsyncDisposableStack();
    const uid = this.#takeUid();
    undo.defer(() => this.#forget(name, uid));
    this.#own.add(name);
    mkdirSync(dir, { recursive: true, mode: 0o700 });
    undo.defer(() => removeTree(dir));
    const upstreamRoot = jailer === undefined ? undefined : join(dir, basename(binary), name, "root");
    mkdirSync(upstreamRoot === undefined ? join(dir, "run") : join(upstreamRoot, INSIDE), {
      recursive: true,
      mode: upstreamRoot === undefined ? 0o700 : 0o755,
    });
    const shared = undo.use(holdShared(dir, upstreamRoot));
    const sharedDir = shared.path;
    const user = uid === undefined ? undefined : { uid, gid: this.#options.users!.gid };
    if (user !== undefined) chownSync(sharedDir, user.uid, user.gid);
    const groups = this.#openGroups()?.make(name, limits) ?? [];
    undo.defer(() => this.#removeGroup(name));
    const stderrPath = join(dir, "stderr.log");
    const fds = [openSync(stderrPath, "a", 0o600)];
    using closing = new DisposableStack();
    closing.defer(() => {
      for (const fd of fds) closeSync(fd);
    });
    for (const path of [join(dir, "console"), join(sharedDir, LOG_PIPE), join(sharedDir, METRICS_PIPE)])
      fds.push(openPipe(path));
    for (const pipe of [LOG_PIPE, METRICS_PIPE])
      if (user !== undefined) chownSync(join(sharedDir, pipe), user.uid, user.gid);
    const ids = user === undefined ? [] : ["--uid", String(user.uid), "--gid", String(user.gid)];
    const firecracker = ["--api-sock", SOCKET, ...args];
    let command: string[];
    if (jailer === undefined) {
      const root = join(dir, "root");
      mkdirSync(root, { mode: 0o700 });
      const devices = DEVICES.filter((path) => existsSync(path));
      command = [
        ...[helper, "run", "--root", root, "--netns", network.netnsPath, "--tap", network.tapName],
        ...groups.flatMap((group) => ["--cgroup", group]),
        ...["--ro", binary, PROGRAM, "--rw", join(dir, "run"), INSIDE],
        ...(this.#options.alsoVisible ?? []).flatMap((path) => ["--ro", path, path]),
        ...devices.flatMap((path) => ["--node", path, path]),
        ...entryArgs(entries),
        ...[...ids, "--max-file", String(maxFileBytes), "--", PROGRAM, "--id", name, ...firecracker],
      ];
    } else {
      if (user === undefined) {
        throw new AenvError({
          code: "jailer_needs_root",
          message: `Firecracker's jailer (${jailer}) only works as root`,
          remediation: "run the server as root, or leave [firecracker].jailer_path unset",
        });
      }
      const { netnsPath, tapName } = network;
      await this.#help(["tap", "--netns", netnsPath, "--tap", tapName, ...ids]);
      command = [
        ...[jailer, "--id", name, "--exec-file", binary, ...ids],
        ...["--chroot-base-dir", dir, "--netns", netnsPath],
        ...["--resource-limit", `fsize=${maxFileBytes}`, "--resource-limit", "no-file=4096"],
        ...["--", ...firecracker],
      ];
    }
    const vmm = spawnDetached({
      command,
      program: command[0]!,
      remediation: "reinstall agentenv, or mend [firecracker].jailer_path",
      cwd: dir,
      env: {},
      stdio: [fds[0]!, fds[2], fds[1]],
      stderrPath,
    });
    undo.defer(async () => {
      vmm.signal("SIGKILL");
      await vmm.exited;
    });
    if (jailer !== undefined) this.#joinLater(name, vmm);
    const jail = this.#jail(dir, name, shared, vmm, user, uid);
    undo.move();
    return jail;
  }

  /**
   * The jail of a process that an earlier server started; undefined when that is gone. Its rest is swept then, and so it
   * is after an error.
   */
  adopt(dir: string, pid: number, startTimeTicks: string): Jail | undefined {
    const vmm = adoptVmm(pid, startTimeTicks, join(dir, "stderr.log"));
    if (vmm === undefined) return undefined;
    const name = basename(dir);
    const { users } = this.#options;
    const status = /^Uid:\s+(\d+)/m.exec(readFileSync(`/proc/${pid}/status`, "utf8"))?.[1];
    const uid = status === undefined || users === undefined ? undefined : Number(status);
    const upstream = readdirSync(dir).find((entry) => existsSync(join(dir, entry, name, "root")));
    const shared = holdShared(dir, upstream === undefined ? undefined : join(dir, upstream, name, "root"));
    const user = uid === undefined ? undefined : { uid, gid: users!.gid };
    this.#own.add(name);
    if (uid !== undefined) this.#uids.add(uid);
    return this.#jail(dir, name, shared, vmm, user, uid);
  }

  /** Ends processes and removes directories and groups of jails that no one here started or took over. */
  async sweep(): Promise<number> {
    const { workDir, log } = this.#options;
    let names: string[] = [];
    try {
      names = readdirSync(workDir);
    } catch (error) {
      if (errorCode(error) !== "ENOENT") throw error;
    }
    const groups = this.#openGroups();
    const left = new Set(
      [...names, ...(groups?.list() ?? [])].filter((name) => name.startsWith(PREFIX) && !this.#own.has(name)),
    );
    if (left.size === 0) return 0;
    let removed = 0;
    for (const { pid, startTimeTicks, name } of jailedProcesses(left)) {
      const vmm = adoptVmm(pid, startTimeTicks, "/dev/null");
      vmm?.signal("SIGKILL");
      for (let i = 0; i < 100 && processLives(pid, startTimeTicks); i++) await Bun.sleep(20);
      if (processLives(pid, startTimeTicks)) {
        log.error({ pid, jail: name }, "a VMM of an earlier process does not end");
        left.delete(name);
      }
    }
    for (const name of left) {
      // Threads of a process that has ended may take a moment longer to leave its group.
      let emptied = groups?.remove(name);
      for (let i = 0; i < 250 && emptied === false; i++) {
        await Bun.sleep(20);
        emptied = groups?.remove(name);
      }
      if (emptied === false) {
        log.error({ jail: name }, "a VMM's control group of an earlier process stays in use");
        continue;
      }
      await removeTree(join(workDir, name));
      removed += 1;
    }
    if (removed > 0) log.info({ jails: removed }, "jails of an earlier process removed");
    return removed;
  }

  /** Nothing is started any more. */
  close(): void {
    this.#groups?.close();
  }

  #openGroups(): Groups | undefined {
    const { cgroup, log } = this.#options;
    if (this.#groupsAsked || cgroup === undefined) return this.#groups;
    this.#groupsAsked = true;
    try {
      // Below a parent for each server: what lies in it is its own.
      this.#groups = Groups.open(join(cgroup, Bun.hash(this.#options.workDir).toString(16)));
    } catch (error) {
      log.debug({ err: error, cgroup }, "no control groups");
    }
    return this.#groups;
  }

  #removeGroup(name: string): void {
    if (this.#groups?.remove(name) === false)
      this.#options.log.warn({ name }, "a VMM's control group is still in use");
  }

  #joinLater(name: string, vmm: VmmProcess): void {
    try {
      this.#groups?.join(name, vmm.pid);
    } catch (error) {
      // It ended at once, which is told where it is waited for.
      if (errorCode(error) !== "ESRCH") throw error;
    }
  }

  #takeUid(): number | undefined {
    const { users } = this.#options;
    if (users === undefined) return undefined;
    const start = Math.floor(Math.random() * users.count);
    for (let i = 0; i < users.count; i++) {
      const uid = users.firstUid + ((start + i) % users.count);
      if (this.#uids.has(uid)) continue;
      this.#uids.add(uid);
      return uid;
    }
    throw new AenvError({
      code: "no_jail_user",
      status: 503,
      message: `all ${users.count} accounts for VMMs are in use`,
      remediation: "raise [firecracker].jail_uid_count",
    });
  }

  #forget(name: string, uid: number | undefined): void {
    this.#own.delete(name);
    if (uid !== undefined) this.#uids.delete(uid);
  }

  async #help(args: readonly string[]): Promise<void> {
    const { exitCode, stderr } = await tryCommand([this.#options.helper, ...args]);
    if (exitCode === 0) return;
    throw new AenvError({
      code: "jail_failed",
      message: stderr.trim() || `aenv-jail ended with ${exitCode}`,
    });
  }

  #jail(
    dir: string,
    name: string,
    shared: HeldDirectory,
    vmm: VmmProcess,
    user: { readonly uid: number; readonly gid: number } | undefined,
    uid: number | undefined,
  ): Jail {
    const sharedDir = shared.path;
    let ending: Promise<void> | undefined;
    const end = async (): Promise<void> => {
      vmm.signal("SIGKILL");
      await vmm.exited;
      shared[Symbol.dispose]();
      this.#removeGroup(name);
      await removeTree(dir);
      this.#forget(name, uid);
    };
    return {
      name,
      dir,
      process: vmm,
      sharedDir,
      socketPath: `/proc/${vmm.pid}/root${SOCKET}`,
      apiPath: join(sharedDir, basename(SOCKET)),
      consolePipe: join(dir, "console"),
      logPipe: join(sharedDir, LOG_PIPE),
      metricsPipe: join(sharedDir, METRICS_PIPE),
      stderrPath: join(dir, "stderr.log"),
      gid: user?.gid,
      equip: async (entries, limits, maxFileBytes) => {
        this.#groups?.limit(name, limits);
        const ids = user === undefined ? [] : ["--uid", String(user.uid), "--gid", String(user.gid)];
        await this.#help([
          ...["add", "--pid", String(vmm.pid), ...ids, "--max-file", String(maxFileBytes)],
          ...entryArgs(entries),
        ]);
      },
      give: (file, bytes) => {
        const { O_WRONLY, O_CREAT, O_EXCL, O_NOFOLLOW } = constants;
        const fd = openSync(join(sharedDir, file), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0o600);
        try {
          writeFileSync(fd, bytes);
          if (user !== undefined) fchownSync(fd, user.uid, user.gid);
        } finally {
          closeSync(fd);
        }
      },
      abandon: () => {
        shared[Symbol.dispose]();
        this.#forget(name, uid);
      },
      [Symbol.asyncDispose]: () => {
        ending ??= end();
        return ending;
      },
    };
  }
}

/** The shared directory: with our jail beside its root, with upstream's below it. */
function holdShared(dir: string, upstreamRoot: string | undefined): HeldDirectory {
  return upstreamRoot === undefined
    ? holdDirectory(join(dir, "run"), "")
    : holdDirectory(upstreamRoot, INSIDE);
}

function entryArgs(entries: readonly JailEntry[]): string[] {
  return entries.flatMap(({ kind, source, target }) => [`--${kind}`, source, target]);
}

/** Processes that are being put or live in one of the jails. */
function jailedProcesses(
  names: ReadonlySet<string>,
): { readonly pid: number; readonly startTimeTicks: string; readonly name: string }[] {
  const found: { pid: number; startTimeTicks: string; name: string }[] = [];
  for (const entry of readdirSync("/proc")) {
    const pid = Number(entry);
    if (!Number.isInteger(pid)) continue;
    let argv: string[];
    try {
      argv = readFileSync(`/proc/${pid}/cmdline`, "utf8").split("\0");
    } catch (error) {
      const code = errorCode(error);
      if (code === "ENOENT" || code === "ESRCH" || code === "EACCES") continue;
      throw error;
    }
    const id = argv.indexOf("--id");
    const name = id >= 0 ? argv[id + 1] : argv.find((arg) => arg.startsWith("--id="))?.slice("--id=".length);
    const startTimeTicks = readProcessStat(pid)?.startTimeTicks;
    if (name !== undefined && names.has(name) && startTimeTicks !== undefined)
      found.push({ pid, startTimeTicks, name });
  }
  return found;
}

/**
 * Lets the group of jailed processes read a file that is the server's. What else lies on the host they do not see, so
 * this opens it to those alone that are given it.
 */
export function letRead(path: string, gid: number | undefined): void {
  if (gid === undefined) return;
  const stat = statSync(path);
  if ((stat.mode & 0o004) !== 0 || (stat.gid === gid && (stat.mode & 0o040) !== 0)) return;
  chownSync(path, stat.uid, gid);
  chmodSync(path, (stat.mode & 0o7777) | 0o040);
}

/**
 * What the jailed process wrote, as long as it is a plain file of the shared directory: it may be hostile by now, and
 * this process may read what that one may not. At most `maxBytes`.
 */
export async function readShared(path: string, maxBytes: number): Promise<Uint8Array> {
  const file = await open(path, constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
  try {
    const stat = await file.stat();
    if (stat.isFile() && stat.nlink === 1 && stat.size <= maxBytes) {
      // No more than there was: it may grow while this reads.
      const bytes = new Uint8Array(stat.size);
      let filled = 0;
      while (filled < bytes.length) {
        const { bytesRead } = await file.read(bytes, filled, bytes.length - filled, filled);
        if (bytesRead === 0) break;
        filled += bytesRead;
      }
      return bytes.subarray(0, filled);
    }
  } finally {
    await file.close();
  }
  throw new AenvError({
    code: "vmm_untrusted",
    message: `${path} is not a plain file of at most ${maxBytes} bytes`,
  });
}
