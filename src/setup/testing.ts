/**
 * A small Debian archive on a loopback port for tests: real packages made by dpkg-deb, read by the real
 * apt, with a server that can corrupt, delay and count.
 */
import { chmod, mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { runCommand } from "../lib/command.ts";
import type { AptHost } from "./apt/apt.ts";

/** ELF64 x86-64 header, `sections` and a string table for their names. */
export function makeElf(
  sections: Readonly<Record<string, Uint8Array>>,
  tail: Uint8Array = new Uint8Array(),
): Buffer {
  const all = Object.entries({ ...sections, ".shstrtab": new Uint8Array() });
  const names = Buffer.from(`\0${all.map(([name]) => `${name}\0`).join("")}`);
  all[all.length - 1]![1] = names;
  const header = Buffer.alloc(64);
  Buffer.from([0x7f, 0x45, 0x4c, 0x46, 2, 1, 1]).copy(header);
  header.writeUInt16LE(62, 18);
  const table = Buffer.alloc(64 * (all.length + 1));
  const bodies: Buffer[] = [];
  let offset = 64;
  for (const [i, [name, body]] of all.entries()) {
    const at = 64 * (i + 1);
    table.writeUInt32LE(names.indexOf(`\0${name}\0`) + 1, at);
    table.writeBigUInt64LE(BigInt(offset), at + 24);
    table.writeBigUInt64LE(BigInt(body.length), at + 32);
    bodies.push(Buffer.from(body));
    offset += body.length;
  }
  header.writeBigUInt64LE(BigInt(offset), 40);
  header.writeUInt16LE(64, 58);
  header.writeUInt16LE(all.length + 1, 60);
  header.writeUInt16LE(all.length, 62);
  return Buffer.concat([header, ...bodies, table, tail]);
}

export function makeModule(name: string, depends: readonly string[], release: string): Buffer {
  const info = [
    `license=GPL`,
    `depends=${depends.join(",")}`,
    `name=${name}`,
    `vermagic=${release} SMP mod_unload `,
  ];
  return makeElf({ ".text": Buffer.from("code"), ".modinfo": Buffer.from(`${info.join("\0")}\0`) });
}

export function makeVmlinux(release: string): Buffer {
  return makeElf({ ".text": Buffer.from(`\0Linux version ${release} (someone@somewhere) #1 SMP\n\0`) });
}

/** A bzImage as the boot protocol describes it around a kernel. */
export function makeBzImage(vmlinux: Uint8Array, compression: "zstd" | "gzip" | "none" = "zstd"): Buffer {
  const plain = new Uint8Array(vmlinux);
  const size = Buffer.alloc(4);
  size.writeUInt32LE(plain.length);
  const payload = {
    zstd: () => Buffer.concat([Bun.zstdCompressSync(plain), size]),
    // gzip's own trailer ends with the size.
    gzip: () => Buffer.from(Bun.gzipSync(plain)),
    none: () => Buffer.concat([plain, size]),
  }[compression]();
  const setup = Buffer.alloc(1024);
  setup.writeUInt8(1, 0x1f1);
  setup.writeUInt16LE(0xaa55, 0x1fe);
  setup.writeUInt32LE(0x53726448, 0x202);
  setup.writeUInt16LE(0x20f, 0x206);
  const stub = Buffer.alloc(333, 0x90);
  setup.writeUInt32LE(stub.length, 0x248);
  setup.writeUInt32LE(payload.length, 0x24c);
  return Buffer.concat([setup, stub, payload, Buffer.from("the rest")]);
}

export interface TestPackage {
  readonly name: string;
  readonly version: string;
  readonly depends?: string;
  readonly files: Readonly<Record<string, string | Uint8Array>>;
}

export interface TestArchive extends AsyncDisposable {
  readonly host: AptHost;
  /** Paths asked for, with the Range header where there was one. */
  readonly requests: { readonly path: string; readonly range: string | null }[];
  /** Package files whose content is altered on the way. */
  readonly corrupt: Set<string>;
  /** Bytes per second of package files. */
  bytesPerSecond: number;
  /** Lets nobody connect any more. */
  stop(): void;
}

export async function makeArchive(packages: readonly TestPackage[]): Promise<TestArchive> {
  const dir = await mkdtemp(join(tmpdir(), "setup-archive-"));
  const pool = join(dir, "pool");
  await mkdir(pool);
  const stanzas: string[] = [];
  for (const p of packages) {
    const root = join(dir, "build");
    const control = [
      `Package: ${p.name}`,
      `Version: ${p.version}`,
      "Architecture: amd64",
      "Maintainer: Nobody <nobody@example.org>",
      ...(p.depends === undefined ? [] : [`Depends: ${p.depends}`]),
      "Description: test package",
      "",
    ].join("\n");
    for (const [name, content] of Object.entries({ "DEBIAN/control": control, ...p.files })) {
      await mkdir(dirname(join(root, name)), { recursive: true });
      await writeFile(join(root, name), content);
      if (name.includes("bin/")) await chmod(join(root, name), 0o755);
    }
    const file = `${p.name}_${p.version.replace(/^\d+:/, "")}_amd64.deb`;
    await runCommand(["dpkg-deb", "--root-owner-group", "-Znone", "-b", root, join(pool, file)]);
    await rm(root, { recursive: true });
    const bytes = await Bun.file(join(pool, file)).bytes();
    const sha256 = new Bun.CryptoHasher("sha256").update(bytes).digest("hex");
    stanzas.push(`${control}Filename: pool/${file}\nSize: ${bytes.length}\nSHA256: ${sha256}\n`);
  }
  const index = stanzas.join("\n");
  const dist = join(dir, "dists", "test");
  await mkdir(join(dist, "main", "binary-amd64"), { recursive: true });
  await writeFile(join(dist, "main", "binary-amd64", "Packages"), index);
  const indexHash = new Bun.CryptoHasher("sha256").update(index).digest("hex");
  const date = new Date().toUTCString().replace("GMT", "UTC");
  await writeFile(
    join(dist, "Release"),
    `Origin: Test\nSuite: test\nCodename: test\nDate: ${date}\nArchitectures: amd64\nComponents: main\nSHA256:\n ${indexHash} ${Buffer.byteLength(index)} main/binary-amd64/Packages\n`,
  );

  const requests: { path: string; range: string | null }[] = [];
  const corrupt = new Set<string>();
  const state = { bytesPerSecond: Number.POSITIVE_INFINITY };
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    idleTimeout: 0,
    fetch: async (request) => {
      const path = decodeURIComponent(new URL(request.url).pathname);
      const file = Bun.file(join(dir, path));
      const range = request.headers.get("range");
      requests.push({ path, range });
      if (!(await file.exists())) return new Response("not found", { status: 404 });
      let bytes = await file.bytes();
      if (corrupt.has(path)) bytes[bytes.length - 1]! ^= 0xff;
      const total = bytes.length;
      const from = Number(/^bytes=(\d+)-$/.exec(range ?? "")?.[1] ?? 0);
      if (from >= total && from > 0) return new Response(null, { status: 416 });
      bytes = bytes.subarray(from);
      const headers: Record<string, string> = {
        "content-length": String(bytes.length),
        "last-modified": "Mon, 01 Jan 2024 00:00:00 GMT",
        "accept-ranges": "bytes",
        ...(from > 0 ? { "content-range": `bytes ${from}-${total - 1}/${total}` } : {}),
      };
      const slow = path.startsWith("/pool/") && Number.isFinite(state.bytesPerSecond);
      const step = Math.ceil(state.bytesPerSecond / 20);
      const body = slow
        ? async function* () {
            for (let at = 0; at < bytes.length; at += step) {
              yield bytes.subarray(at, at + step);
              await Bun.sleep(50);
            }
          }
        : undefined;
      const status = from > 0 ? 206 : 200;
      return new Response(body === undefined ? bytes : streamOf(body()), {
        status,
        headers,
      });
    },
  });
  return {
    host: {
      architecture: "amd64",
      codename: "test",
      sources: [
        {
          types: ["deb"],
          uris: [`http://127.0.0.1:${server.port}`],
          suites: ["test"],
          components: ["main"],
          options: new Map([["Trusted", "yes"]]),
          origin: "test archive",
        },
      ],
    },
    requests,
    corrupt,
    get bytesPerSecond() {
      return state.bytesPerSecond;
    },
    set bytesPerSecond(value: number) {
      state.bytesPerSecond = value;
    },
    stop: () => void server.stop(true),
    [Symbol.asyncDispose]: async () => {
      await server.stop(true);
      await rm(dir, { recursive: true, force: true });
    },
  };
}

function streamOf(source: AsyncGenerator<Uint8Array>): ReadableStream<Uint8Array> {
  return new ReadableStream<Uint8Array>({
    pull: async (controller) => {
      const { done, value } = await source.next();
      if (done) controller.close();
      else controller.enqueue(value);
    },
    cancel: async () => {
      await source.return(undefined);
    },
  });
}

/** A kernel package with the modules the pins name, failover being needed by virtio_net. */
export async function kernelPackage(release: string, version: string, fillerBytes = 0): Promise<TestPackage> {
  const root = `lib/modules/${release}/kernel`;
  const xz = async (bytes: Uint8Array) => {
    const child = Bun.spawn(["xz", "-0", "-c"], { stdin: new Uint8Array(bytes), stdout: "pipe" });
    return new Uint8Array(await new Response(child.stdout).arrayBuffer());
  };
  const module = (name: string, ...depends: string[]) => xz(makeModule(name, depends, release));
  return {
    name: `linux-image-${release}`,
    version,
    depends: "kmod, linux-base (>= 4.12~)",
    files: {
      [`boot/vmlinuz-${release}`]: makeBzImage(makeVmlinux(release)),
      [`boot/filler-${release}`]: crypto.getRandomValues(new Uint8Array(fillerBytes)),
      [`${root}/drivers/virtio/virtio_mmio.ko.xz`]: await module("virtio_mmio"),
      [`${root}/drivers/block/virtio_blk.ko.xz`]: await module("virtio_blk"),
      [`${root}/drivers/virtio/virtio_balloon.ko.xz`]: await module("virtio_balloon"),
      [`${root}/drivers/net/virtio_net.ko.xz`]: await module("virtio_net", "net_failover"),
      [`${root}/drivers/net/net_failover.ko.xz`]: await module("net_failover", "failover"),
      [`${root}/net/core/failover.ko.xz`]: await module("failover"),
      [`${root}/drivers/unused.ko.xz`]: await module("unused"),
      // virtio_rng is built in here.
      [`lib/modules/${release}/modules.builtin`]: "kernel/drivers/char/hw_random/virtio-rng.ko\n",
    },
  };
}

/** A program that answers as QEMU does; with `library` it runs only when that file is on the library path. */
export function qemuScript(version: string, library?: string): string {
  return `#!/bin/sh
${library === undefined ? "" : `[ -e "\${LD_LIBRARY_PATH%%:*}/${library}" ] || { echo "error while loading shared libraries: ${library}" >&2; exit 127; }`}
case "$1" in
  --version) echo "QEMU emulator version ${version} (Test)";;
  -M) echo "microvm              microvm (i386)";;
esac
`;
}
