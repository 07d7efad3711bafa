/** What the tests of this folder share. They run inside the rig (docs/rig.md): a kernel with ublk, as root. */
import { closeSync, existsSync, mkdtempSync, openSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { tryCommand } from "../../src/lib/command.ts";
import {
  type BlockClient,
  type BlockdSupervisorOptions,
  connectBlockd,
  type DeviceInfo,
  type ExportKind,
} from "../../src/storage/blockd/index.ts";
import type { ImageConfig, UpperRef } from "../../src/storage/overlaybd/types.ts";

export const ROOT = resolve(import.meta.dir, "../..");
export const MiB = 1 << 20;
export const inRig = existsSync("/dev/ublk-control");

export function scratch(name: string): { readonly dir: string } & Disposable {
  const dir = mkdtempSync(join(tmpdir(), `aenv-rig-${name}-`));
  return { dir, [Symbol.dispose]: () => rmSync(dir, { recursive: true, force: true }) };
}

export function blockdOptions(dir: string, ...flags: string[]): BlockdSupervisorOptions {
  return {
    argv: [join(ROOT, "dist/agentenv"), "blockd", ...flags],
    socketPath: join(dir, "c.sock"),
    runtimeDir: join(dir, "run"),
    logPath: join(dir, "blockd.log"),
  };
}

/** A daemon and what the tests do with it. One that ends is started again at once. */
export class Daemon implements AsyncDisposable {
  readonly options: BlockdSupervisorOptions;
  readonly client: BlockClient;
  #child: Bun.Subprocess;
  #serial = 0;
  #ending = false;

  private constructor(options: BlockdSupervisorOptions, child: Bun.Subprocess, client: BlockClient) {
    this.options = options;
    this.client = client;
    this.#child = child;
    this.#watch();
  }

  static async start(dir: string, ...flags: string[]): Promise<Daemon> {
    return await Daemon.startUnder([], dir, ...flags);
  }

  /** `prefix`: a command that runs the daemon's. */
  static async startUnder(prefix: readonly string[], dir: string, ...flags: string[]): Promise<Daemon> {
    const plain = blockdOptions(dir, ...flags);
    const options = { ...plain, argv: [...prefix, ...plain.argv] };
    const child = spawnDaemon(options);
    const client = await connectBlockd(options.socketPath, { connectPatienceMs: 30_000, timeoutMs: 60_000 });
    return new Daemon(options, child, client);
  }

  #watch(): void {
    void this.#child.exited.then(() => {
      if (this.#ending) return;
      this.#child = spawnDaemon(this.options);
      this.#watch();
    });
  }

  upper(): UpperRef {
    const stem = join(this.options.runtimeDir, "..", `upper-${this.#serial++}`);
    return { data: `${stem}.data`, index: `${stem}.index` };
  }

  create(deviceId: string, exportKind: ExportKind, image: Partial<ImageConfig>): Promise<DeviceInfo> {
    const full = { lowers: [], upper: this.upper(), ...image };
    return this.client.create({ deviceId, image: full, readOnly: full.upper === undefined, exportKind });
  }

  blank(deviceId: string, exportKind: ExportKind, sizeBytes: number): Promise<DeviceInfo> {
    return this.create(deviceId, exportKind, { virtualSizeBytes: sizeBytes });
  }

  /** kill -9, and the time until the next one has its devices again. */
  async crash(): Promise<{ readonly downMs: number }> {
    const startedMs = performance.now();
    this.#child.kill("SIGKILL");
    await this.#child.exited;
    await this.client.list();
    return { downMs: performance.now() - startedMs };
  }

  log(): string {
    return readFileSync(this.options.logPath, "utf8");
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#ending = true;
    await this.client.shutdown();
    await this.client[Symbol.asyncDispose]();
    await this.#child.exited;
  }
}

function spawnDaemon(options: BlockdSupervisorOptions): Bun.Subprocess {
  const { argv, socketPath, runtimeDir, logPath } = options;
  const log = openSync(logPath, "a");
  try {
    return Bun.spawn([...argv, "--socket", socketPath, "--runtime-dir", runtimeDir], {
      stdio: ["ignore", log, log],
    });
  } finally {
    closeSync(log);
  }
}

/** Output of a command that has to succeed. */
export async function run(argv: string[], timeoutMs = 120_000): Promise<string> {
  const result = await tryCommand(argv, { timeoutMs });
  const output = result.stdout + result.stderr;
  if (result.exitCode !== 0)
    throw new Error(`${argv.join(" ")}: exit ${result.exitCode}\n${output.slice(-4000)}`);
  return output;
}

export function sh(script: string, timeoutMs = 120_000): Promise<string> {
  return run(["bash", "-euc", script], timeoutMs);
}

export function fioArgs(path: string, options: Readonly<Record<string, string | number>>): string[] {
  const all: Record<string, string | number> = {
    name: "verify",
    filename: path,
    ioengine: "libaio",
    direct: 1,
    iodepth: 16,
    rw: "randwrite",
    bsrange: "4k-64k",
    randrepeat: 0,
    verify: "crc32c",
    do_verify: 1,
    verify_fatal: 1,
    ...options,
  };
  return ["fio", ...Object.entries(all).map(([key, value]) => `--${key}=${value}`)];
}

/** QEMU's own client on an export, whichever it is. */
export async function qemuIo(info: DeviceInfo, ...commands: string[]): Promise<string> {
  const where =
    info.devicePath === undefined
      ? [`nbd+unix:///${info.exportName}?socket=${info.socketPath}`]
      : ["-t", "none", info.devicePath];
  const args = commands.flatMap((command) => ["-c", command]);
  const flags = ["-f", "raw", ...(info.readOnly ? ["-r"] : [])];
  const output = await run(["qemu-io", ...flags, ...args, ...where]);
  if (/failed|error|can't/i.test(output)) throw new Error(output);
  return output;
}

/** Kernel's number of a ublk device. */
export function ublkNumber(info: DeviceInfo): number {
  return Number(/^\/dev\/ublkb(\d+)$/.exec(info.devicePath ?? "")?.[1] ?? Number.NaN);
}

export function ublkNodes(): string[] {
  return readdirSync("/dev").filter((name) => /^ublk[bc]\d+$/.test(name));
}

/** Threads that hang in the kernel, and what the kernel complained about since `since` (lines of its log). */
export async function complaints(since = 0): Promise<string[]> {
  let stuck = waitingProcesses();
  // A kernel worker that clears up after a killed daemon waits for a moment: what goes on waiting is stuck.
  for (let i = 0; i < 100 && stuck.size > 0; i++) {
    await Bun.sleep(100);
    const still = waitingProcesses();
    stuck = new Map([...stuck].filter(([pid]) => still.has(pid)));
  }
  const bad = /blocked for more than|BUG:|WARNING:|Oops|Call Trace|soft lockup|general protection/;
  return [...stuck.values(), ...(await kernelLog()).slice(since).filter((line) => bad.test(line))];
}

/** Processes in uninterruptible sleep now, by their ids. */
function waitingProcesses(): Map<string, string> {
  const waiting = new Map<string, string>();
  for (const pid of readdirSync("/proc").filter((name) => /^\d+$/.test(name))) {
    try {
      const text = readFileSync(`/proc/${pid}/stat`, "latin1");
      if (text.slice(text.lastIndexOf(")") + 2)[0] === "D")
        waiting.set(pid, `process in D state: ${text.slice(0, 60)}`);
    } catch (error) {
      // Gone meanwhile.
      if (!(error instanceof Error)) throw error;
    }
  }
  return waiting;
}

export async function kernelLog(): Promise<string[]> {
  return (await run(["dmesg"])).split("\n");
}

export function median(values: readonly number[]): number {
  return values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)] ?? Number.NaN;
}
