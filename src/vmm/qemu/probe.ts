import { createHash } from "node:crypto";
import {
  accessSync,
  constants,
  existsSync,
  lstatSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
} from "node:fs";
import { mkdir, readFile, rename, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { VirtualizationMode } from "../types.ts";
import {
  acceleratorArgs,
  confinementArgs,
  cpuModel,
  kernelCommandLine,
  machineOption,
  type QemuInstallation,
} from "./command.ts";

/** Does a stock guest kernel run in this mode, and if not, what was seen. */
export interface ModeVerdict {
  readonly usable: boolean;
  /** End of a sentence that starts with the name of the device, e.g. `is missing`. */
  readonly reason: string;
}

export interface ProbeOptions {
  readonly installation: QemuInstallation;
  readonly env: Readonly<Record<string, string>>;
  readonly kernelPath: string;
  /** For emulation, see {@link kernelCommandLine}. */
  readonly tickKHz?: number;
  /** The verdict is kept here, for one boot of the host. Absent: it is found again by every process. */
  readonly cacheDir?: string;
}

const KVM_DEVICE = "/dev/kvm";
/** What the probe's init prints from user space. */
export const PROBE_WORDS = "AENV-PROBE-OK";

/**
 * An x86-64 ELF program without anything around it: writes {@link PROBE_WORDS} and restarts the machine,
 * so that the probe sees kernel and user space work, and ends at once.
 */
function probeInit(): Uint8Array {
  const words = Buffer.from(`${PROBE_WORDS}\n`);
  const code = Buffer.from([
    ...[0xb8, 1, 0, 0, 0], // mov eax, 1 (write)
    ...[0xbf, 1, 0, 0, 0], // mov edi, 1
    ...[0x48, 0x8d, 0x35, 31, 0, 0, 0], // lea rsi, [rip + 31]: the words behind the code
    ...[0xba, words.length, 0, 0, 0], // mov edx, length
    ...[0x0f, 0x05], // syscall
    ...[0xb8, 169, 0, 0, 0], // mov eax, 169 (reboot)
    ...[0xbf, 0xad, 0xde, 0xe1, 0xfe], // mov edi, LINUX_REBOOT_MAGIC1
    ...[0xbe, 0x69, 0x19, 0x12, 0x28], // mov esi, LINUX_REBOOT_MAGIC2
    ...[0xba, 0x67, 0x45, 0x23, 0x01], // mov edx, LINUX_REBOOT_CMD_RESTART
    ...[0x0f, 0x05], // syscall
    ...[0xeb, 0xfe], // jmp to itself
  ]);
  const load = 0x400000;
  const headers = 64 + 56;
  const total = headers + code.length + words.length;
  const elf = Buffer.alloc(total);
  elf.set([0x7f, 0x45, 0x4c, 0x46, 2, 1, 1], 0);
  elf.writeUInt16LE(2, 16); // executable
  elf.writeUInt16LE(62, 18); // x86-64
  elf.writeUInt32LE(1, 20);
  elf.writeBigUInt64LE(BigInt(load + headers), 24); // entry
  elf.writeBigUInt64LE(64n, 32); // program headers
  elf.writeUInt16LE(64, 52);
  elf.writeUInt16LE(56, 54);
  elf.writeUInt16LE(1, 56);
  elf.writeUInt32LE(1, 64); // loadable
  elf.writeUInt32LE(5, 68); // read, execute
  elf.writeBigUInt64LE(BigInt(load), 80);
  elf.writeBigUInt64LE(BigInt(load), 88);
  elf.writeBigUInt64LE(BigInt(total), 96);
  elf.writeBigUInt64LE(BigInt(total), 104);
  elf.writeBigUInt64LE(0x1000n, 112);
  elf.set(code, headers);
  elf.set(words, headers + code.length);
  return elf;
}

/** One entry of a cpio archive in the `newc` form (kernel: Documentation/driver-api/early-userspace/buffer-format). */
function cpioEntry(name: string, mode: number, data: Uint8Array, rdevMinor = 0, rdevMajor = 0): Buffer {
  const fields = [1, mode, 0, 0, 1, 0, data.length, 0, 0, rdevMajor, rdevMinor, name.length + 1, 0];
  const header = `070701${fields.map((field) => field.toString(16).padStart(8, "0")).join("")}${name}\0`;
  const padded = Buffer.alloc(Math.ceil(header.length / 4) * 4);
  padded.write(header, "latin1");
  const body = Buffer.alloc(Math.ceil(data.length / 4) * 4);
  body.set(data);
  return Buffer.concat([padded, body]);
}

export function probeInitrd(): Uint8Array {
  const none = new Uint8Array(0);
  return Buffer.concat([
    cpioEntry("dev", 0o040755, none),
    cpioEntry("dev/console", 0o020600, none, 1, 5),
    cpioEntry("init", 0o100755, probeInit()),
    cpioEntry("TRAILER!!!", 0, none),
  ]);
}

const PROBE_PREFIX = "aenv-probe-";
/** No probe takes that long. */
const PROBE_OVER_MS = 600_000;

/** Removes what probes left whose process was killed. */
export function sweepProbes(dir: string): void {
  for (const name of readdirSync(dir)) {
    if (!name.startsWith(PROBE_PREFIX)) continue;
    const path = join(dir, name);
    const stat = lstatSync(path, { throwIfNoEntry: false });
    if (stat === undefined || stat.mtimeMs > Date.now() - PROBE_OVER_MS) continue;
    // Another user's is theirs to remove.
    if (stat.isDirectory() && stat.uid === process.geteuid?.())
      rmSync(path, { recursive: true, force: true });
  }
}

/**
 * Boots the kernel in the given mode until its user space has spoken. Bounded: the first sign of life must
 * come within `silenceMs`, the end within `totalMs`. A working KVM host takes well under a second.
 */
export async function bootProbe(
  options: ProbeOptions,
  mode: VirtualizationMode,
  limits: { readonly silenceMs: number; readonly totalMs: number },
): Promise<ModeVerdict> {
  sweepProbes(tmpdir());
  const dir = mkdtempSync(join(tmpdir(), PROBE_PREFIX));
  let child: Bun.Subprocess<"ignore", "ignore", "pipe"> | undefined;
  const clear = () => {
    child?.kill("SIGKILL");
    rmSync(dir, { recursive: true, force: true });
  };
  // A server that is stopped does not wait for its probe.
  process.once("exit", clear);
  try {
    const consolePath = join(dir, "console");
    await writeFile(join(dir, "initrd"), probeInitrd());
    child = Bun.spawn(
      [
        // A guest that spins must not do so for ever when this process is killed.
        ...["/bin/sh", "-c", 'ulimit -t 30; exec "$@"', "sh"],
        options.installation.binary,
        ...confinementArgs(options.installation),
        "-M",
        machineOption(false),
        ...acceleratorArgs(mode),
        "-cpu",
        cpuModel(options.installation.version, mode),
        "-m",
        "128M",
        "-kernel",
        options.kernelPath,
        "-initrd",
        join(dir, "initrd"),
        "-append",
        kernelCommandLine(["earlyprintk=ttyS0", "init=/init"], mode, options.tickKHz),
        "-chardev",
        `file,id=console0,path=${consolePath}`,
        "-serial",
        "chardev:console0",
      ],
      { env: { ...options.env }, stdio: ["ignore", "ignore", "pipe"] },
    );
    const stderr = new Response(child.stderr).text();
    const started = performance.now();
    let running = true;
    const ended = child.exited.then(() => {
      running = false;
    });
    const consoleText = (): string => (existsSync(consolePath) ? readFileSync(consolePath, "latin1") : "");
    let verdict: ModeVerdict | undefined;
    while (verdict === undefined) {
      const seen = consoleText();
      const elapsed = performance.now() - started;
      if (seen.includes(PROBE_WORDS)) verdict = { usable: true, reason: "runs a stock guest kernel" };
      else if (!running) {
        const words = (await stderr).trim().split("\n").at(-1) ?? "";
        const last = seen.trim().split("\n").at(-1) ?? "";
        verdict = {
          usable: false,
          reason: `does not run a stock guest kernel (the test guest ended early${words !== "" ? `; QEMU: ${words}` : ""}${last !== "" ? `; console: ${last.trim()}` : ""})`,
        };
      } else if (seen === "" && elapsed > limits.silenceMs) {
        verdict = {
          usable: false,
          reason: `does not run a stock guest kernel (no sign of life from a test guest within ${limits.silenceMs / 1000} s)`,
        };
      } else if (elapsed > limits.totalMs) {
        verdict = {
          usable: false,
          reason: `does not run a stock guest kernel (a test guest did not reach user space within ${limits.totalMs / 1000} s)`,
        };
      } else await Promise.race([ended, Bun.sleep(20)]);
    }
    child.kill("SIGKILL");
    await ended;
    await stderr;
    return verdict;
  } finally {
    process.off("exit", clear);
    clear();
  }
}

/** Changes with the host's boot, its KVM device, QEMU and the kernel: everything a verdict depends on. */
function cacheKey(options: ProbeOptions): string {
  const identity = (path: string): unknown[] => {
    const stat = statSync(path);
    return [path, stat.size, stat.mtimeMs];
  };
  const bootId = readFileSync("/proc/sys/kernel/random/boot_id", "utf8").trim();
  return createHash("sha256")
    .update(
      JSON.stringify([
        bootId,
        statSync(KVM_DEVICE).ino,
        identity(options.installation.binary),
        options.installation.version.text,
        identity(options.kernelPath),
      ]),
    )
    .digest("hex");
}

function parseVerdict(text: string, key: string): ModeVerdict | undefined {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    return undefined; // a torn file: probe again
  }
  if (typeof value !== "object" || value === null) return undefined;
  const record = value as { key?: unknown; usable?: unknown; reason?: unknown };
  if (record.key !== key || typeof record.usable !== "boolean" || typeof record.reason !== "string")
    return undefined;
  return { usable: record.usable, reason: record.reason };
}

/** How many times longer a probe may take: for hosts that are emulated themselves (`AENV_KVM_PROBE_PATIENCE`, 1 to 30). */
function probePatience(): number {
  const wanted = Number(process.env.AENV_KVM_PROBE_PATIENCE ?? 1);
  return wanted >= 1 && wanted <= 30 ? wanted : 1;
}

/**
 * Whether KVM runs a stock guest kernel here. `/dev/kvm` alone says little: under some hypervisors it
 * exists and a guest never executes its first instruction, so a guest is started.
 */
export async function probeKvm(options: ProbeOptions): Promise<ModeVerdict> {
  if (!existsSync(KVM_DEVICE)) return { usable: false, reason: "is missing" };
  try {
    accessSync(KVM_DEVICE, constants.R_OK | constants.W_OK);
  } catch {
    return { usable: false, reason: "exists but may not be opened by this user" };
  }
  const key = cacheKey(options);
  const cached = options.cacheDir === undefined ? undefined : join(options.cacheDir, "kvm-probe.json");
  if (cached !== undefined && existsSync(cached)) {
    const known = parseVerdict(await readFile(cached, "utf8"), key);
    if (known !== undefined) return known;
  }
  const patience = probePatience();
  const verdict = await bootProbe(options, "kvm", { silenceMs: 4000 * patience, totalMs: 10_000 * patience });
  if (cached !== undefined && options.cacheDir !== undefined) {
    await mkdir(options.cacheDir, { recursive: true });
    const temporary = `${cached}.${process.pid}.tmp`;
    await writeFile(temporary, `${JSON.stringify({ key, ...verdict })}\n`);
    await rename(temporary, cached);
  }
  return verdict;
}
