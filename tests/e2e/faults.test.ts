import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync } from "node:fs";
import {
  mkdir,
  mkdtemp,
  readdir,
  readFile,
  readlink,
  rm,
  symlink,
  truncate,
  utimes,
  writeFile,
} from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { Sandbox } from "e2b";
import { type LocalRegistry, startDebianRegistry } from "../support/debian.ts";
import { eventually } from "../support/eventually.ts";
import { buildImage, pushImage } from "../support/oci.ts";
import { hostObjects, TestServer } from "../support/server.ts";

/* What a user does wrong and what a host does to us, seen through the executable alone. */

const ROOT = resolve(import.meta.dir, "../..");
const EXECUTABLE = join(ROOT, "dist/agentenv");

let server: TestServer;
let registry: LocalRegistry;
let cacheDir: string;
/** The server's own, so that nothing of others is in it. */
let temporary: string;

const sh = (...argv: string[]) => {
  const result = Bun.spawnSync(argv);
  if (result.exitCode !== 0) throw new Error(`${argv.join(" ")}: ${result.stderr}`);
};

beforeAll(async () => {
  cacheDir = `/tmp/aenv-e2e-cache-${process.pid}`;
  await mkdir(cacheDir);
  sh("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", cacheDir);
  temporary = await mkdtemp(join(tmpdir(), "aenv-faults-"));
  // Without network slots in store, those that are there are in use.
  server = await TestServer.create({
    toml: `[image.cache]\nroot_dir = "${cacheDir}"\n[image.cache.gc]\ninterval_secs = 1\n[pool.network]\nenabled = false`,
    env: { TMPDIR: temporary },
  });
  registry = await startDebianRegistry(join(server.home, "registry"));
  await server.start();
  const auth = await server.run(["auth"], `${server.url}\n${await server.apiKey()}\n`);
  expect(auth.exitCode).toBe(0);
}, 300_000);

afterAll(async () => {
  await server?.[Symbol.asyncDispose]();
  await registry?.[Symbol.asyncDispose]();
  sh("umount", cacheDir);
  sh("rmdir", cacheDir);
  await rm(temporary, { recursive: true, force: true });
}, 180_000);

/** All that the server has on this host, as lines; nothing in it changes while nothing happens. */
async function traces(): Promise<string[]> {
  const found = await hostObjects(server);
  for (const dir of [server.runtime, join(server.home, "sandboxes"), temporary]) {
    for (const entry of await readdir(dir, { recursive: true, withFileTypes: true }))
      found.push(`${entry.isSocket() ? "socket" : "path"} ${join(entry.parentPath, entry.name)}`);
  }
  for (const line of (await readFile("/proc/net/unix", "utf8")).split("\n")) {
    const path = line.split(/\s+/)[7];
    // Bound ones only: of a connection one side has the path of the listener.
    if (path !== undefined && [server.home, server.runtime, temporary].some((dir) => path.includes(dir)))
      found.push(`unix ${path}`);
  }
  const config = await readFile(join(server.home, "config.toml"), "utf8");
  const pools = [...config.matchAll(/_cidr = "(10\.\d+\.)/g)].map(([, prefix]) => prefix!);
  const tables = Bun.spawnSync(["nft", "list", "ruleset"]).stdout.toString();
  const addresses = Bun.spawnSync(["ip", "-o", "-4", "addr"]).stdout.toString();
  for (const line of `${tables}\n${addresses}`.split("\n")) {
    if (pools.some((prefix) => line.includes(prefix)))
      found.push(line.trim().replaceAll(/(packets|bytes) \d+/g, "$1"));
  }
  const metrics = await fetch(`${server.url}/metrics`, { headers: { "x-api-key": await server.apiKey() } });
  found.push(`${/^agentenv_block_devices\S* .*$/m.exec(await metrics.text())}`);
  return [...new Set(found)].toSorted();
}

describe("keys", () => {
  test("a wrong key and no key end with 1 and say what to do", async () => {
    const wrong = await server.run(["auth"], `${server.url}\n${"x".repeat(40)}\n`);
    expect(wrong.exitCode).toBe(0);
    const list = await server.run(["list"]);
    expect(list.exitCode).toBe(1);
    expect(list.stderr).toContain("authentication failed");
    expect(list.stderr).toContain("aenv auth");
    await server.run(["auth"], `${server.url}\n${await server.apiKey()}\n`);
    expect((await fetch(`${server.url}/v2/sandboxes`)).status).toBe(401);
  });

  test("the unmodified SDK says that the key is wrong", async () => {
    const connection = { ...(await server.connection()), apiKey: `e2b_${"0".repeat(64)}` };
    await expect(Sandbox.create("any", connection)).rejects.toThrow(/authentication|API key|401/i);
  });
});

describe("images", () => {
  /** Pulls and gives the error; the template it was for is listed as failed. */
  async function failedPull(reference: string): Promise<string> {
    const result = await server.run(["pull", reference, "--name", "broken"]);
    expect(result.exitCode).toBe(1);
    expect(result.stderr).toContain("Build failed");
    const templates = JSON.parse((await server.run(["template", "list"])).stdout);
    expect(templates[0]).toMatchObject({ names: [expect.any(String)], buildStatus: "error" });
    expect((await server.run(["template", "delete", templates[0].templateID])).exitCode).toBe(0);
    return result.stderr;
  }

  test("an image that does not exist", async () => {
    expect(await failedPull(`${registry.host}/no/such:image`)).toMatch(/not found/i);
  }, 180_000);

  test("a registry that is not there, a reference that is none", async () => {
    expect(await failedPull("127.0.0.1:1/a/b:c")).toMatch(/127\.0\.0\.1:1/);
    const before = (await server.run(["template", "list"])).stdout;
    const none = await server.run(["pull", "UPPER/case:image", "--name", "broken"]);
    expect([none.exitCode, none.stderr]).toEqual([2, expect.stringMatching(/reference/i)]);
    expect((await server.run(["template", "list"])).stdout).toBe(before);
  }, 180_000);

  test("no image for this machine: the error names what there is", async () => {
    const other = buildImage({ layers: [{ entries: [{ path: "a", content: "b" }] }], architecture: "s390x" });
    await pushImage(`http://${registry.host}`, "test/other", "latest", other);
    expect(await failedPull(`${registry.host}/test/other:latest`)).toMatch(/s390x/);
  }, 180_000);

  test("a damaged layer in the registry is never used: truncated, then altered", async () => {
    const content = Buffer.from(crypto.getRandomValues(new Uint8Array(60_000)));
    const image = buildImage({ layers: [{ entries: [{ path: "data", content }], compression: "none" }] });
    await pushImage(`http://${registry.host}`, "test/damaged", "latest", image);
    const hex = image.layers[0]!.digest.slice("sha256:".length);
    const blob = join(
      server.home,
      "registry/data/docker/registry/v2/blobs/sha256",
      hex.slice(0, 2),
      hex,
      "data",
    );
    const original = new Uint8Array(await Bun.file(blob).arrayBuffer());
    await truncate(blob, 30_000);
    const short = await failedPull(`${registry.host}/test/damaged:latest`);
    expect(short).toContain(`is cut off: 30000 of ${original.length} bytes arrived`);
    expect(short).toContain("pull again; when it stays, the image was pushed incomplete");
    const altered = original.slice();
    altered[40_000]! ^= 1;
    await writeFile(blob, altered);
    const found = new Bun.CryptoHasher("sha256").update(altered).digest("hex");
    const wrong = await failedPull(`${registry.host}/test/damaged:latest`);
    expect(wrong).toContain(`does not have its digest: expected sha256:${hex}, found sha256:${found}`);
    expect(wrong).toContain(
      "pull again; when it stays, the registry (or a proxy before it) serves damaged content",
    );
  }, 180_000);

  test("a layer that no image names goes by itself, at the interval that is configured", async () => {
    const layer = async (digit: string, at: Date): Promise<string> => {
      const dir = join(cacheDir, "commits", `sha256-${digit.repeat(64)}`);
      await mkdir(dir);
      const file = join(dir, "overlaybd.commit");
      await writeFile(file, "a layer");
      await utimes(file, at, at);
      return file;
    };
    const young = await layer("1", new Date());
    const old = await layer("2", new Date(Date.now() - 3_600_000));
    await eventually("the old one is gone", () => !existsSync(old));
    expect(existsSync(young)).toBeTrue();
    await rm(dirname(young), { recursive: true });
  }, 30_000);

  test("a full disk while pulling: the reason is told, nothing half-made stays, and it works with space", async () => {
    const message = await failedPull(registry.debian);
    expect(message).toMatch(/disk|space|ENOSPC/i);
    const left: string[] = [];
    for (const entry of await readdir(cacheDir, { recursive: true, withFileTypes: true })) {
      if (entry.isFile() && /overlaybd\.commit|upper|\.tmp/.test(entry.name)) left.push(entry.name);
    }
    expect(left).toEqual([]);
    sh("mount", "-o", "remount,size=1g", cacheDir);
    const pulled = await server.run([
      "pull",
      registry.debian,
      "--name",
      "works",
      "--cpu",
      "1",
      "--memory",
      "384",
    ]);
    expect(pulled.stderr).not.toContain("Error");
    expect(pulled.exitCode).toBe(0);
  }, 180_000);
});

test("an unknown template, sandbox and command", async () => {
  const start = await server.run(["start", "nothing", "-d"]);
  expect(start.exitCode).toBe(1);
  expect(start.stderr).toMatch(/template nothing/);
  const exec = await server.run(["exec", "01936f8e-72f5-7000-8000-000000000001", "true"]);
  expect(exec.exitCode).toBe(1);
  expect(exec.stderr).toContain("HTTP 404");
  const id = (await server.run(["start", "works", "-d"])).stdout.trim();
  const missing = await server.run(["exec", id, "/no/such/program"]);
  expect(missing.exitCode).not.toBe(0);
  expect(missing.stderr).toMatch(/no such|not found|does not exist/i);
  expect((await server.run(["delete", id])).exitCode).toBe(0);
}, 180_000);

describe("the host", () => {
  const serve = async (env: Record<string, string>, prefix: readonly string[] = []) => {
    const child = Bun.spawn([...prefix, EXECUTABLE, "serve"], {
      env: { ...server.environment, ...env },
      cwd: "/tmp",
      stdin: "ignore",
      stdout: "pipe",
      stderr: "pipe",
      timeout: 30_000,
    });
    const stderr = await new Response(child.stderr).text();
    return { exitCode: await child.exited, stderr };
  };

  test("a second server on one home is told who has it", async () => {
    const { exitCode, stderr } = await serve({ API_ADDR: "127.0.0.1:1" });
    expect(exitCode).toBe(1);
    expect(stderr).toContain(server.home);
    expect(stderr).toContain(String(server.pid));
  }, 180_000);

  let before: string[];
  let id: string;

  test("a second server in one runtime directory is told who has it, and takes nothing of the first's", async () => {
    before = await traces();
    id = (await server.run(["start", "works", "-d"])).stdout.trim();
    const running = await hostObjects(server);
    await using other = await TestServer.create();
    const { exitCode, stderr } = await serve({ ...other.environment, AENV_RUNTIME_PATH: server.runtime });
    expect(exitCode).toBe(1);
    expect(stderr).toContain(server.runtime);
    expect(stderr).toContain(String(server.pid));
    expect(stderr).toContain("AENV_RUNTIME_PATH");
    expect((await hostObjects(server)).toSorted()).toEqual(running.toSorted());
    expect((await server.run(["exec", id, "echo", "here"])).stdout).toBe("here\n");
  }, 180_000);

  test("a VMM that is killed from outside leaves nothing: process, namespace, tap, sockets, disk, directories", async () => {
    const running = await traces();
    const own = running.filter((line) => !before.includes(line));
    for (const kind of [
      /^process \d+: \S*qemu/,
      /^mount .*netns/,
      /^route /,
      /^socket /,
      /^unix /,
      /^path .*sandboxes/,
    ]) {
      expect(own).toContainEqual(expect.stringMatching(kind));
    }
    expect(own.some((line) => line.includes(id))).toBe(true);
    const vm = own
      .map((line) => /^process (\d+): \S*qemu/.exec(line)?.[1])
      .filter((pid) => pid !== undefined);
    expect(vm).toHaveLength(1);
    process.kill(Number(vm[0]), "SIGKILL");
    await eventually("the server knows it no more", async () =>
      (await server.run(["exec", id, "true"])).stderr.includes("HTTP 404"),
    );
    // Each of them is awaited: what is told here is what stays.
    await eventually("nothing is left", async () => Bun.deepEquals(await traces(), before)).catch(
      () => undefined,
    );
    expect(await traces()).toEqual(before);
  }, 180_000);

  test.each([
    ["made an API key", "SIGTERM"],
    ["block daemon started", "SIGINT"],
    ["block daemon started", "SIGHUP"],
  ] as const)(
    "a server that is told to end while it starts leaves nothing (after: %s, by %s)",
    async (line, signal) => {
      await using other = await TestServer.create();
      const child = Bun.spawn([EXECUTABLE, "serve"], {
        env: other.environment,
        cwd: "/tmp",
        stdin: "ignore",
        stdout: "ignore",
        stderr: "pipe",
        timeout: 60_000,
      });
      let log = "";
      for await (const bytes of child.stderr) {
        const told = log.includes(line);
        log += new TextDecoder().decode(bytes);
        if (!told && log.includes(line)) child.kill(signal);
      }
      expect(await child.exited, log).toBe(0);
      await eventually("nothing is left", async () => (await hostObjects(other)).length === 0);
    },
    90_000,
  );

  test("a port in use is named with the cure, and nothing is left of the attempt", async () => {
    await using other = await TestServer.create();
    const { exitCode, stderr } = await serve({
      ...other.environment,
      API_ADDR: server.environment.API_ADDR!,
    });
    expect(exitCode).toBe(1);
    expect(stderr).toContain(server.environment.API_ADDR!);
    expect(stderr).toContain("in use");
    expect(stderr).toContain("API_ADDR");
    expect(await hostObjects(other)).toEqual([]);
    expect(await readdir(other.runtime)).toEqual(["server.lock"]);
  }, 180_000);

  test("a start that fails late leaves no block daemon", async () => {
    const other = await TestServer.create();
    const pools = /host_interaction_cidr = .*\nveth_cidr = .*/.exec(
      await Bun.file(join(server.home, "config.toml")).text(),
    )![0];
    const config = join(other.home, "config.toml");
    await writeFile(
      config,
      (await Bun.file(config).text()).replace(/host_interaction_cidr = .*\nveth_cidr = .*/, pools),
    );
    const { exitCode, stderr } = await serve(other.environment);
    expect(exitCode).toBe(1);
    expect(stderr).toContain("is in use by another server");
    // It has been told; that it is gone may take it a moment.
    const daemons = async () => (await hostObjects(other)).filter((line) => line.startsWith("process"));
    await eventually("the daemon is gone", async () => (await daemons()).length === 0);
    await other[Symbol.asyncDispose]();
  }, 180_000);

  test("without root: what is missing and how to get it", async () => {
    const other = await TestServer.create();
    sh("chown", "-R", "65534:65534", other.home, other.runtime);
    const drop = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps", "-all"];
    const { exitCode, stderr } = await serve({ ...other.environment }, drop);
    expect(exitCode).toBe(1);
    expect(stderr).toMatch(/root|CAP_NET_ADMIN|capabilit/);
    await other[Symbol.asyncDispose]();
  }, 180_000);

  /** A /dev of one's own, with what a server needs; `$1` is an empty directory. */
  const ownDev =
    'mount -t tmpfs -o dev none "$1" && mkdir "$1/net" && cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom "$1" && cp -a /dev/net/tun "$1/net"';
  const withoutKvm: [string, string, { status: string; detail: string }, RegExp][] = [
    [
      "a /dev/kvm that is no KVM",
      `${ownDev} && cp -a /dev/null "$1/kvm" && mount --bind "$1" /dev`,
      { status: "ok", detail: "can be opened" },
      /^emulation \(TCG\): \/dev\/kvm does not run a stock guest kernel \(the test guest ended early; QEMU: .*kvm.*\)$/i,
    ],
    [
      "no /dev/kvm",
      `${ownDev} && mount --bind "$1" /dev`,
      { status: "warn", detail: "not there: guests are emulated (TCG), which is much slower" },
      /^emulation \(TCG\): \/dev\/kvm is missing$/,
    ],
  ];
  interface Check {
    readonly name: string;
    readonly status: string;
    readonly detail: string;
  }
  /** What a server's log says about its virtual machines, once it says it. */
  const probed = (log: () => Promise<string>) =>
    eventually("the server has probed", async () => {
      const line = / virtual machine monitor vmm=qemu .* mode=(\w+) reason=("(?:[^"\\]|\\.)*")/.exec(
        await log(),
      );
      return line === null ? undefined : { mode: line[1]!, reason: JSON.parse(line[2]!) as string };
    });

  test.each(withoutKvm)(
    "%s: doctor says so, that emulation is used, and why",
    async (_, hide, device, reason) => {
      const dir = await mkdtemp(join(server.home, "dev-"));
      const child = Bun.spawn(
        ["unshare", "--mount", "sh", "-c", `${hide}; exec "$0" doctor --json`, EXECUTABLE, dir],
        { env: { ...server.environment }, stdout: "pipe", stderr: "pipe" },
      );
      const { checks } = JSON.parse(await new Response(child.stdout).text()) as { checks: Check[] };
      await child.exited;
      expect(checks.find(({ name }) => name === "/dev/kvm")).toMatchObject(device);
      const machines = checks.find(({ name }) => name === "virtual machines")!;
      expect(machines.status).toBe("warn");
      expect(machines.detail).toMatch(/^qemu \d+\.\d+\.\d+.*, mode tcg: /);
      expect(machines.detail.replace(/^.*, mode tcg: /, "")).toMatch(reason);
    },
    60_000,
  );

  test("this machine's /dev/kvm: server and doctor say the same, and it is what guests run on", async () => {
    const { mode, reason } = await probed(() => server.log());
    console.log(`${mode}: ${reason}`);
    if (mode === "kvm") expect(reason).toBe("hardware virtualization: /dev/kvm runs a stock guest kernel");
    else if (!existsSync("/dev/kvm")) expect(reason).toBe("emulation (TCG): /dev/kvm is missing");
    else expect(reason).toMatch(/^emulation \(TCG\): \/dev\/kvm does not run a stock guest kernel \(.+\)$/);
    const { checks } = JSON.parse((await server.run(["doctor", "--json"])).stdout) as { checks: Check[] };
    const machines = checks.find(({ name }) => name === "virtual machines")!;
    expect(machines.status).toBe(mode === "kvm" ? "ok" : "warn");
    expect(machines.detail).toContain(`, mode ${mode}: ${reason.split(" kernel")[0]}`);
    const made = (await server.run(["start", "works", "-d"])).stdout.trim();
    const vm = (await hostObjects(server)).find((line) => /^process \d+: \S*qemu/.test(line))!;
    const command = await readFile(`/proc/${/\d+/.exec(vm)![0]}/cmdline`, "utf8");
    expect(command.includes("\0-accel\0kvm") || /accel=kvm/.test(command)).toBe(mode === "kvm");
    expect((await server.run(["delete", made])).exitCode).toBe(0);
  }, 180_000);

  test("a configuration that is wrong names key, value and rule", async () => {
    const file = join(server.home, "wrong.toml");
    await writeFile(file, "[machine]\nvcpu_count = 0\n[orchestrator]\nauto_evict_intervall_ms = 5\n");
    const { exitCode, stderr } = await serve({ AENV_CONFIG_PATH: file });
    expect(exitCode).toBe(1);
    expect(stderr).toContain("machine.vcpu_count");
    expect(stderr).toContain("auto_evict_intervall_ms");
    const missing = await serve({ AENV_CONFIG_PATH: "/no/such/file.toml" });
    expect(missing.exitCode).toBe(1);
    expect(missing.stderr).toContain("/no/such/file.toml");
  }, 180_000);

  test("the executable alone in an empty directory answers", async () => {
    const dir = join(server.home, "alone");
    await mkdir(dir);
    sh("cp", EXECUTABLE, dir);
    const run = (...args: string[]) =>
      Bun.spawnSync([join(dir, "agentenv"), ...args], {
        cwd: dir,
        env: { PATH: "/usr/bin:/bin:/usr/sbin:/sbin" },
      });
    expect(run("--version").stdout.toString()).toMatch(/^agentenv \d+\.\d+\.\d+/);
    expect(run("--help").stdout.toString()).toContain("serve");
    expect(run("serve", "--help").stdout.toString()).toContain("Usage");
    expect(run("nonsense").exitCode).toBe(2);
  });

  test("the executable alone starts a server: no checkout, no Bun, no Node, a /dev/kvm that is none", async () => {
    const dir = await mkdtemp(join(tmpdir(), "aenv-alone-"));
    await using _ = { [Symbol.asyncDispose]: () => rm(dir, { recursive: true }) };
    const bin = join(dir, "bin");
    for (const name of ["alone", "bin", "dev"]) await mkdir(join(dir, name));
    for (const name of ["sh", "ip", "nft", "nsenter", "qemu-system-x86_64"]) {
      const path = Bun.which(name);
      if (path !== null) await symlink(path, join(bin, name));
    }
    const script = `
      set -e
      mount --make-rprivate /
      cp "$executable" "$alone/agentenv"
      mkdir "$home/deps"
      mount --bind "$AENV_DEPS_PATH" "$home/deps"
      mount -t tmpfs none "$checkout"
      { ${withoutKvm[0]![1]}; }
      cd "$alone"
      unset AENV_DEPS_PATH
      PATH=$bin exec ./agentenv "$2"`;
    const variables = { executable: EXECUTABLE, checkout: ROOT, alone: join(dir, "alone"), bin };
    await using other = await TestServer.create({
      launch: ([, ...args], { home }) => [
        "env",
        ...Object.entries({ ...variables, home }).map(([name, value]) => `${name}=${value}`),
        ...["unshare", "--mount", "/bin/sh", "-c", script, "sh", join(dir, "dev"), ...args],
      ],
    });
    await other.start();
    const root = `/proc/${other.pid}/root`;
    expect(await readdir(join(root, ROOT))).toEqual([]);
    // Where the tests run in a chroot these links have what is above it, too.
    expect(await readlink(`/proc/${other.pid}/exe`)).toEndWith(join(dir, "alone/agentenv"));
    expect(await readlink(`/proc/${other.pid}/cwd`)).toEndWith(join(dir, "alone"));
    const environment = await readFile(`/proc/${other.pid}/environ`, "utf8");
    expect(environment).toContain(`PATH=${bin}\0`);
    expect((await readdir(bin)).filter((name) => /^(bun|node|npm)/.test(name))).toEqual([]);
    expect((await fetch(`${other.url}/health`)).status).toBe(204);
    const document = (await (await fetch(`${other.url}/openapi.json`)).json()) as {
      openapi: string;
      paths: object;
    };
    expect(document.openapi).toStartWith("3.1");
    expect(Object.keys(document.paths)).toContain("/v2/sandboxes");
    const page = await fetch(`${other.url}/docs`);
    expect([page.status, page.headers.get("content-type")]).toEqual([200, "text/html; charset=utf-8"]);
    expect(await page.text()).toContain("<!doctype html");
    const listed = await fetch(`${other.url}/v2/sandboxes`, {
      headers: { "x-api-key": await other.apiKey() },
    });
    expect([listed.status, await listed.json()]).toEqual([200, []]);
    // It has found what its guests would run on, which has its kernel and its parts of C in it.
    expect(await probed(() => other.log())).toMatchObject({
      mode: "tcg",
      reason: expect.stringMatching(withoutKvm[0]![3]),
    });
    // Nothing is written beside it.
    expect(await readdir(join(dir, "alone"))).toEqual(["agentenv"]);
    expect(await other.stop()).toBe(0);
    expect(await hostObjects(other)).toEqual([]);
    expect(await readFile(other.logPath, "utf8")).not.toMatch(/ (ERROR|FATAL) /);
  }, 180_000);
});
