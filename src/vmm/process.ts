import { closeSync, openSync, readFileSync, readSync, statSync } from "node:fs";
import { openPidfd, signalPidfd } from "../../ffi/process.ts";
import { AenvError } from "../lib/errors.ts";
import type { VmExit } from "./types.ts";

/**
 * One VMM process. It has its own session and is not tied to our life; our own children are watched by
 * the runtime, adopted ones through /proc.
 */
export interface VmmProcess {
  readonly pid: number;
  readonly startTimeTicks: string;
  readonly exited: Promise<VmExit>;
  /** False when the process is gone. Never signals another process that has the same number. */
  signal(signal: "SIGTERM" | "SIGKILL"): boolean;
  /** Looks at once whether an adopted process is gone (the control socket closed). */
  poke(): void;
}

const TAIL_BYTES = 4096;
const DEFAULT_MAX_FILE_MIB = 64;
const POLL_MS = 250;

/** At most the last 4 KiB of a log, whole lines; empty when there is none. */
export function readTail(path: string, bytes = TAIL_BYTES): string {
  let fd: number;
  try {
    fd = openSync(path, "r");
  } catch {
    return "";
  }
  try {
    const size = statSync(path).size;
    const from = Math.max(0, size - bytes);
    const buffer = Buffer.alloc(size - from);
    const text = buffer.subarray(0, readSync(fd, buffer, 0, buffer.length, from)).toString("utf8");
    return (from === 0 ? text : text.slice(text.indexOf("\n") + 1)).trim();
  } finally {
    closeSync(fd);
  }
}

/**
 * State letter and start time of a process, from /proc/PID/stat (the command name in field 2 may hold
 * spaces and brackets, so fields are counted behind its last bracket). Undefined when it does not exist.
 */
export function readProcessStat(pid: number): { state: string; startTimeTicks: string } | undefined {
  let text: string;
  try {
    text = readFileSync(`/proc/${pid}/stat`, "latin1");
  } catch {
    return undefined;
  }
  const fields = text.slice(text.lastIndexOf(")") + 2).split(" ");
  const state = fields[0];
  const startTimeTicks = fields[19];
  return state === undefined || startTimeTicks === undefined ? undefined : { state, startTimeTicks };
}

/** Whether that very process still runs (a zombie does not). */
export function processLives(pid: number, startTimeTicks: string): boolean {
  const stat = readProcessStat(pid);
  return (
    stat !== undefined && stat.startTimeTicks === startTimeTicks && stat.state !== "Z" && stat.state !== "X"
  );
}

function signalProcess(pid: number, startTimeTicks: string, signal: "SIGTERM" | "SIGKILL"): boolean {
  const pidfd = openPidfd(pid);
  if (pidfd === undefined) return false;
  try {
    // Only after the handle is held does the comparison say anything about what will be signalled.
    return processLives(pid, startTimeTicks) && signalPidfd(pidfd, signal);
  } finally {
    closeSync(pidfd);
  }
}

export interface SpawnOptions {
  readonly argv: readonly string[];
  readonly netnsPath: string;
  /** Must exist in the namespace: QEMU would make one of its own, with no address and no way out. */
  readonly tapName: string;
  readonly env: Readonly<Record<string, string>>;
  readonly cwd: string;
  readonly stderrPath: string;
  /** Becomes descriptor 3 of the process. */
  readonly extraFd?: number;
  /** Standard output is appended here. Absent: nowhere. */
  readonly stdoutPath?: string;
  /** How big a file of its may grow, in MiB. Default 64: the console. */
  readonly maxFileMiB?: number;
  /** A directory that the process alone sees under another name, in a mount namespace of its own. */
  readonly bind?: { readonly from: string; readonly at: string };
}

/**
 * What a VMM may use, set before it exists: files it makes are ours alone; no core dumps of guest memory; no
 * file grows over a limit (a guest could fill the disk through its console; writes beyond fail, and the signal
 * for it is ignored so that the VM lives on); few descriptors; first to go when memory is short.
 * Limits that are lower already stay. Runs inside the namespace; `exec` all the way: the pid is QEMU's.
 */
const PRELUDE = [
  'tap="$1"; blocks="$2"; shift 2; found=',
  'while read -r name rest; do if [ "$name" = "$tap:" ]; then found=1; fi; done < /proc/self/net/dev',
  'if [ -z "$found" ]; then echo "there is no device $tap in the network namespace" >&2; exit 1; fi',
  "umask 077",
  'trap "" XFSZ',
  "ulimit -c 0",
  'ulimit -f "$blocks" 2>/dev/null || :',
  "ulimit -n 4096 2>/dev/null || :",
  "echo 1000 2>/dev/null > /proc/self/oom_score_adj || :",
  'exec "$@"',
].join("; ");

const BIND = 'mount --bind "$1" "$2" || exit 1; shift 2; exec "$@"';

/**
 * A VMM needs none of the server's capabilities: its tap is its user's, its files are open to it. What escapes from a
 * guest into the VMM then holds no more than a plain process of that user, root's included.
 */
function withoutPrivileges(): string[] {
  // Only root may narrow the bounding set; others lose what they had by having it nowhere to come from.
  const bound = process.geteuid?.() === 0 ? ["--bounding-set=-all"] : [];
  return ["setpriv", "--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", ...bound, "--"];
}

/** Starts a VMM in a network namespace, in its own session. The process may end at any time after it. */
export function spawnVmm(options: SpawnOptions): VmmProcess {
  const { bind } = options;
  const apart =
    bind === undefined
      ? []
      : [
          ...["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", BIND, "sh"],
          ...[bind.from, bind.at],
        ];
  const command = [
    ...["nsenter", `--net=${options.netnsPath}`, "--", ...apart, "/bin/sh", "-c", PRELUDE, "sh"],
    options.tapName,
    // The shell counts in blocks of 512 bytes.
    String((options.maxFileMiB ?? DEFAULT_MAX_FILE_MIB) * 2048),
    ...withoutPrivileges(),
    ...options.argv,
  ];
  const stderr = openSync(options.stderrPath, "a", 0o600);
  const stdout = options.stdoutPath === undefined ? undefined : openSync(options.stdoutPath, "a", 0o600);
  let child: Bun.Subprocess;
  try {
    child = Bun.spawn(command, {
      cwd: options.cwd,
      env: options.env,
      detached: true,
      stdio:
        options.extraFd === undefined
          ? ["ignore", stdout ?? "ignore", stderr]
          : ["ignore", stdout ?? "ignore", stderr, options.extraFd],
    });
  } catch (cause) {
    throw new AenvError({
      code: "vm_start_failed",
      message: "cannot run nsenter, which starts QEMU in its network namespace",
      remediation: "install nsenter (package util-linux)",
      cause,
    });
  } finally {
    closeSync(stderr);
    if (stdout !== undefined) closeSync(stdout);
  }
  // A VM must not keep the server from exiting, nor end with it.
  child.unref();
  // The runtime reaps the child, so until then the number is its own and /proc has its start time.
  const startTimeTicks = readProcessStat(child.pid)?.startTimeTicks ?? "0";
  const exited = child.exited.then((): VmExit => {
    const signal = child.signalCode === null ? null : String(child.signalCode);
    return {
      exitCode: signal === null ? child.exitCode : null,
      signal,
      stderrTail: readTail(options.stderrPath),
    };
  });
  return {
    pid: child.pid,
    startTimeTicks,
    exited,
    signal: (signal) => signalProcess(child.pid, startTimeTicks, signal),
    poke: () => undefined,
  };
}

/** Watches a process that is not our child: every 250 ms, and when poked. Undefined when it is gone. */
export function adoptVmm(pid: number, startTimeTicks: string, stderrPath: string): VmmProcess | undefined {
  if (!processLives(pid, startTimeTicks)) return undefined;
  const { promise, resolve } = Promise.withResolvers<VmExit>();
  const look = (): void => {
    if (processLives(pid, startTimeTicks)) return;
    clearInterval(timer);
    // Only the parent is told the exit status.
    resolve({ exitCode: null, signal: null, stderrTail: readTail(stderrPath) });
  };
  const timer = setInterval(look, POLL_MS);
  timer.unref();
  return {
    pid,
    startTimeTicks,
    exited: promise,
    signal: (signal) => signalProcess(pid, startTimeTicks, signal),
    poke: look,
  };
}
