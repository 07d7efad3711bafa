import { closeSync, openSync, readFileSync, readSync, statSync } from "node:fs";
import { exitEvents, openPidfd, signalPidfd, watchExit } from "../../ffi/process.ts";
import { AenvError, errorChain } from "../lib/errors.ts";
import type { VmExit } from "./types.ts";

/**
 * One VMM process. It has its own session and is not tied to our life; our own children are watched by
 * the runtime, adopted ones by a pidfd.
 */
export interface VmmProcess {
  readonly pid: number;
  readonly startTimeTicks: string;
  readonly exited: Promise<VmExit>;
  /** False when the process is gone. Never signals another process that has the same number. */
  signal(signal: "SIGTERM" | "SIGKILL"): boolean;
  /** Looks whether an adopted process is gone, before that is told (the control socket closed). */
  poke(): void;
}

const TAIL_BYTES = 4096;

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
}

/**
 * What a VMM may use, set before it exists: files it makes are ours alone; no core dumps of guest memory; no
 * file grows over a limit (a guest could fill the disk through its console; writes beyond fail, and the signal
 * for it is ignored so that the VM lives on); few descriptors; first to go when memory is short.
 * Limits that are lower already stay. Runs inside the namespace; `exec` all the way: the pid is QEMU's.
 */
const PRELUDE = [
  'tap="$1"; shift; found=',
  'while read -r name rest; do if [ "$name" = "$tap:" ]; then found=1; fi; done < /proc/self/net/dev',
  'if [ -z "$found" ]; then echo "there is no device $tap in the network namespace" >&2; exit 1; fi',
  "umask 077",
  'trap "" XFSZ',
  "ulimit -c 0",
  // In blocks of 512 bytes: 64 MiB, the console.
  "ulimit -f 131072 2>/dev/null || :",
  "ulimit -n 4096 2>/dev/null || :",
  "echo 1000 2>/dev/null > /proc/self/oom_score_adj || :",
  'exec "$@"',
].join("; ");

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
  const { netnsPath, tapName, argv, cwd, env, stderrPath, extraFd } = options;
  const stderr = openSync(stderrPath, "a", 0o600);
  try {
    return spawnDetached({
      command: [
        ...["nsenter", `--net=${netnsPath}`, "--", "/bin/sh", "-c", PRELUDE, "sh", tapName],
        ...withoutPrivileges(),
        ...argv,
      ],
      program: "nsenter",
      remediation: "install nsenter (package util-linux)",
      cwd,
      env,
      stdio: [stderr, extraFd],
      stderrPath,
    });
  } finally {
    closeSync(stderr);
  }
}

/** Starts a program in a session of its own, which neither keeps this process alive nor ends with it. */
export function spawnDetached(options: {
  readonly command: readonly string[];
  /** What is missing when it cannot be run at all, and what to do then. */
  readonly program: string;
  readonly remediation: string;
  readonly cwd: string;
  readonly env: Readonly<Record<string, string>>;
  /** Standard error, the descriptors from 3 on if any, and standard output (absent: nowhere). */
  readonly stdio: readonly [stderr: number, extra: number | undefined, stdout?: number];
  /** Where standard error goes to: its end is part of the exit. */
  readonly stderrPath: string;
}): VmmProcess {
  const [stderr, extra, stdout] = options.stdio;
  let child: Bun.Subprocess;
  try {
    child = Bun.spawn([...options.command], {
      cwd: options.cwd,
      env: options.env,
      detached: true,
      stdio:
        extra === undefined
          ? ["ignore", stdout ?? "ignore", stderr]
          : ["ignore", stdout ?? "ignore", stderr, extra],
    });
  } catch (cause) {
    throw new AenvError({
      code: "vm_start_failed",
      message: `cannot run ${options.program}, which starts the VMM`,
      remediation: options.remediation,
      cause,
    });
  }
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

/** Tells when a process may have ended. `done`: tells nothing any more. */
export interface ExitEvents {
  read(): Promise<{ readonly done: boolean }>;
  cancel(): Promise<void>;
}

/** Before events that failed are asked for again. */
const AGAIN_MS = 1000;

/**
 * Has all processes of others looked at whenever one of them ends. While there are any, this process does not end by
 * itself. Events that fail are told and asked for again, as long as anybody waits for them; each time all are looked at
 * once, as one may have ended meanwhile.
 */
export class ExitWatch {
  readonly #looks = new Set<() => void>();
  readonly #open: () => ExitEvents;
  readonly #failed: (error: unknown) => void;
  readonly #againMs: number;
  /** Undefined, too, when they have been cancelled. */
  #events: ExitEvents | undefined;
  #follows = false;

  constructor(open: () => ExitEvents, failed: (error: unknown) => void, againMs = AGAIN_MS) {
    this.#open = open;
    this.#failed = failed;
    this.#againMs = againMs;
  }

  has(look: () => void): boolean {
    return this.#looks.has(look);
  }

  add(look: () => void): void {
    this.#looks.add(look);
  }

  /** After `add`, when the events tell of that process, too. */
  start(): void {
    if (!this.#follows) void this.#follow();
  }

  delete(look: () => void): void {
    this.#looks.delete(look);
    if (this.#looks.size === 0) this.#cancel();
  }

  #cancel(): void {
    const events = this.#events;
    this.#events = undefined;
    // Of events that failed it fails, too; that has been told.
    events?.cancel().catch(() => undefined);
  }

  async #follow(): Promise<void> {
    this.#follows = true;
    while (this.#looks.size > 0) {
      try {
        await this.#read();
      } catch (error) {
        this.#cancel();
        this.#failed(error);
        await Bun.sleep(this.#againMs);
      }
    }
    this.#follows = false;
  }

  async #read(): Promise<void> {
    const events = this.#open();
    this.#events = events;
    for (;;) {
      for (const look of [...this.#looks]) look();
      if (this.#events !== events) return;
      const { done } = await events.read();
      if (this.#events !== events) return;
      if (done) throw new Error("the events have an end");
    }
  }
}

const exits = new ExitWatch(
  () => Bun.file(exitEvents()).stream().getReader(),
  (error) =>
    process.emitWarning(`ends of processes are not seen for a moment: ${errorChain(error).join(": ")}`),
);

/** Watches a process that is not our child. Undefined when it is gone. */
export function adoptVmm(pid: number, startTimeTicks: string, stderrPath: string): VmmProcess | undefined {
  const pidfd = openPidfd(pid);
  if (pidfd === undefined) return undefined;
  // Only now does the comparison say anything about what is watched.
  if (!processLives(pid, startTimeTicks)) {
    closeSync(pidfd);
    return undefined;
  }
  const { promise, resolve } = Promise.withResolvers<VmExit>();
  const look = (): void => {
    if (!exits.has(look) || processLives(pid, startTimeTicks)) return;
    exits.delete(look);
    closeSync(pidfd);
    // Only the parent is told the exit status.
    resolve({ exitCode: null, signal: null, stderrTail: readTail(stderrPath) });
  };
  exits.add(look);
  try {
    watchExit(pidfd);
  } catch (error) {
    exits.delete(look);
    closeSync(pidfd);
    throw error;
  }
  exits.start();
  return {
    pid,
    startTimeTicks,
    exited: promise,
    signal: (signal) => signalProcess(pid, startTimeTicks, signal),
    poke: look,
  };
}
