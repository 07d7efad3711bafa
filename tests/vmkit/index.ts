/**
 * Real guests for tests: finds a QEMU and a guest kernel, builds a small initrd with guest.c as init, and
 * makes throw-away network namespaces. Needs root.
 */
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, dirname, join } from "node:path";
import { runCommand } from "../../src/lib/command.ts";
import type { VmDrive } from "../../src/vmm/types.ts";

const ROOT = dirname(dirname(import.meta.dir));
/** In load order; those the kernel has built in are not there as files. */
const MODULES = [
  "virtio_mmio",
  "failover",
  "net_failover",
  "virtio_blk",
  "virtio_net",
  "rng-core",
  "virtio-rng",
  "virtio_balloon",
];
export const GUEST_ADDRESS = "169.254.0.21";
export const TAP_ADDRESS = "169.254.0.22";
export const GUEST_MAC = "02:fc:00:00:00:05";

export interface TestGuest extends Disposable {
  readonly qemu: {
    readonly binary: string;
    readonly dataDirs: readonly string[];
    readonly moduleDir?: string;
    readonly libraryPath?: string;
    readonly shieldPath: string;
  };
  readonly kernelPath: string;
  readonly initrdPath: string;
  /** Removed when disposed; everything of the test goes below it. */
  readonly dir: string;
}

function find(dir: string, pattern: string): string[] {
  return existsSync(dir) ? [...new Bun.Glob(pattern).scanSync({ cwd: dir, absolute: true })].sort() : [];
}

function newest(paths: readonly string[]): string | undefined {
  return paths.toSorted((a, b) => Bun.semver.order(version(a), version(b))).at(-1);
}

function version(path: string): string {
  return /(\d+\.\d+\.\d+)/.exec(path)?.[1] ?? "0.0.0";
}

/**
 * Where the runtime dependencies are: `AENV_TEST_DEPS`, else what `agentenv setup` left in the tree.
 * `AENV_TEST_QEMU` overrides the QEMU. A sentence why there is nothing to test with otherwise.
 */
export async function prepareGuest(name: string): Promise<TestGuest | string> {
  if (process.getuid?.() !== 0) return "needs root (network namespaces, /dev/net/tun)";
  const places = [process.env.AENV_TEST_DEPS, join(ROOT, ".aenv/home/deps"), join(ROOT, ".aenv/deps")].filter(
    (place): place is string => place !== undefined && place !== "",
  );
  for (const place of places) {
    const kernelPath = newest(find(place, "**/vmlinux"));
    if (kernelPath === undefined) continue;
    const unpacked = newest(find(place, "**/usr/bin/qemu-system-x86_64"));
    const binary = (process.env.AENV_TEST_QEMU || unpacked) ?? Bun.which("qemu-system-x86_64");
    if (binary === null) continue;
    const dir = mkdtempSync(join(tmpdir(), `vmm-${name}-`));
    try {
      const initrdPath = await makeInitrd(dir, find(place, "**/*.ko"));
      return {
        qemu: { binary, ...surroundings(binary), shieldPath: join(ROOT, "build/memshield.so") },
        kernelPath,
        initrdPath,
        dir,
        [Symbol.dispose]: () => rmSync(dir, { recursive: true, force: true }),
      };
    } catch (error) {
      rmSync(dir, { recursive: true, force: true });
      throw error;
    }
  }
  return `no guest kernel and QEMU in ${places.join(", ")}: run agentenv setup or set AENV_TEST_DEPS`;
}

/** An unpacked QEMU has its firmware and libraries beside it. */
function surroundings(binary: string): { dataDirs: string[]; libraryPath?: string } {
  const usr = dirname(dirname(binary));
  if (usr === "/usr") return { dataDirs: [] };
  const libraries = join(usr, "lib/x86_64-linux-gnu");
  return {
    dataDirs: [join(usr, "share/qemu"), join(usr, "share/seabios")].filter((path) => existsSync(path)),
    ...(find(libraries, "*.so*").length > 0 ? { libraryPath: libraries } : {}),
  };
}

async function makeInitrd(dir: string, kos: readonly string[]): Promise<string> {
  const tree = join(dir, "initrd.d");
  mkdirSync(join(tree, "lib/modules"), { recursive: true });
  for (const empty of ["proc", "dev", "sys"]) mkdirSync(join(tree, empty));
  const order: string[] = [];
  for (const module of MODULES) {
    const file = kos.find(
      (path) => basename(path).replaceAll("_", "-") === `${module.replaceAll("_", "-")}.ko`,
    );
    if (file === undefined) continue;
    writeFileSync(join(tree, `lib/modules/${module}.ko`), readFileSync(file));
    order.push(`${module}.ko`);
  }
  writeFileSync(join(tree, "lib/modules/order"), `${order.join("\n")}\n`);
  const multiarch = (await runCommand(["gcc", "-print-multiarch"])).trim();
  await runCommand(
    [
      ...["musl-gcc", "-std=c11", "-O2", "-static", "-s", "-D_GNU_SOURCE"],
      ...["-idirafter", "/usr/include", "-idirafter", `/usr/include/${multiarch}`],
      ...["-o", join(tree, "init"), join(import.meta.dir, "guest.c")],
    ],
    { timeoutMs: 60_000 },
  );
  const path = join(dir, "initrd.img");
  await runCommand([
    "sh",
    "-c",
    'cd "$1" && find . | cpio -o -H newc --quiet -C 4096 > "$2"',
    "sh",
    tree,
    path,
  ]);
  return path;
}

export interface GuestAnswer {
  readonly count: number;
  readonly sum: string;
  readonly disk: string;
  readonly cpus: number;
  readonly boot: string;
}

export interface TestNetwork extends AsyncDisposable {
  readonly netnsPath: string;
  readonly tapName: string;
  readonly macAddress: string;
  /** One round with the guest program (see guest.c for the orders); retried until `timeoutMs`. */
  ask(order?: "q" | "m" | "r" | "c" | "a" | "f" | "k" | "v" | "p", timeoutMs?: number): Promise<GuestAnswer>;
}

let networks = 0;

/** A namespace with a tap on which a guest can be reached. */
export async function testNetwork(): Promise<TestNetwork> {
  const name = `vmm-test-${process.pid}-${networks++}`;
  await runCommand(["ip", "netns", "add", name]);
  const netnsPath = `/run/netns/${name}`;
  try {
    await runCommand(
      [
        "ip",
        "netns",
        "exec",
        name,
        "sh",
        "-ec",
        `ip link set lo up; ip tuntap add tap0 mode tap; ip addr add ${TAP_ADDRESS}/30 dev tap0; ip link set tap0 up`,
      ],
      { timeoutMs: 20_000 },
    );
  } catch (error) {
    await runCommand(["ip", "netns", "del", name]);
    throw error;
  }
  const script = `exec 3<>/dev/tcp/${GUEST_ADDRESS}/7000 && printf "$1" >&3 && IFS= read -r -t "$2" line <&3 && echo "$line"`;
  const ask = async (order = "q", timeoutMs = 60_000): Promise<GuestAnswer> => {
    const deadline = performance.now() + timeoutMs;
    const seconds = "akvp".includes(order) ? 20 : 3;
    for (;;) {
      const child = Bun.spawn(
        ["nsenter", `--net=${netnsPath}`, "bash", "-c", script, "bash", order, String(seconds)],
        {
          stdio: ["ignore", "pipe", "ignore"],
          timeout: seconds * 1000,
          killSignal: "SIGKILL",
        },
      );
      const text = await new Response(child.stdout).text();
      await child.exited;
      const match = /^COUNT (\d+) SUM (\w+) DISK (\w+) CPUS (\d+) BOOT (\w+)/.exec(text);
      if (match !== null) {
        return {
          count: Number(match[1]),
          sum: match[2]!,
          disk: match[3]!,
          cpus: Number(match[4]),
          boot: match[5]!,
        };
      }
      if (performance.now() > deadline) throw new Error(`the guest did not answer within ${timeoutMs} ms`);
      await Bun.sleep(50);
    }
  };
  return {
    netnsPath,
    tapName: "tap0",
    macAddress: GUEST_MAC,
    ask,
    [Symbol.asyncDispose]: async () => {
      await runCommand(["ip", "netns", "del", name]);
    },
  };
}

/** A disk of 1 MiB of zeros (or a copy of `from`), served over NBD by another program. */
export async function nbdDisk(
  dir: string,
  name: string,
  readOnly = false,
  from?: string,
): Promise<VmDrive & { readonly image: string } & AsyncDisposable> {
  const image = join(dir, `${name}.img`);
  writeFileSync(image, from === undefined ? Buffer.alloc(1 << 20) : readFileSync(from));
  const socketPath = join(dir, `${name}.sock`);
  const server = Bun.spawn(["qemu-nbd", "-f", "raw", "-k", socketPath, "-x", "disk", "-t", image], {
    stdio: ["ignore", "ignore", "ignore"],
  });
  for (let i = 0; !existsSync(socketPath) && i < 1000; i++) await Bun.sleep(10);
  return {
    driveId: name,
    readOnly,
    backend: { kind: "nbd", socketPath, exportName: "disk" },
    image,
    [Symbol.asyncDispose]: async () => {
      server.kill();
      await server.exited;
    },
  };
}
