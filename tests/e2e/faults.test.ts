import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdir, mkdtemp, readdir, truncate, writeFile } from "node:fs/promises";
import { join, resolve } from "node:path";
import { Sandbox } from "e2b";
import { type LocalRegistry, startDebianRegistry } from "../support/debian.ts";
import { eventually } from "../support/eventually.ts";
import { buildImage, pushImage } from "../support/oci.ts";
import { hostObjects, TestServer } from "../support/server.ts";

/* What a user does wrong and what a host does to us, seen through the executable alone. */

const EXECUTABLE = resolve(import.meta.dir, "../../dist/agentenv");

let server: TestServer;
let registry: LocalRegistry;
let cacheDir: string;

const sh = (...argv: string[]) => {
  const result = Bun.spawnSync(argv);
  if (result.exitCode !== 0) throw new Error(`${argv.join(" ")}: ${result.stderr}`);
};

beforeAll(async () => {
  cacheDir = `/tmp/aenv-e2e-cache-${process.pid}`;
  await mkdir(cacheDir);
  sh("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", cacheDir);
  server = await TestServer.create({ toml: `[image.cache]\nroot_dir = "${cacheDir}"` });
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
}, 60_000);

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
  }, 60_000);

  test("a registry that is not there, a reference that is none", async () => {
    expect(await failedPull("127.0.0.1:1/a/b:c")).toMatch(/127\.0\.0\.1:1/);
    expect(await failedPull("UPPER/case:image")).toMatch(/reference/i);
  }, 60_000);

  test("no image for this machine: the error names what there is", async () => {
    const other = buildImage({ layers: [{ entries: [{ path: "a", content: "b" }] }], architecture: "s390x" });
    await pushImage(`http://${registry.host}`, "test/other", "latest", other);
    expect(await failedPull(`${registry.host}/test/other:latest`)).toMatch(/s390x/);
  }, 60_000);

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
    expect(await failedPull(`${registry.host}/test/damaged:latest`)).toMatch(
      /truncated|short|ended|bytes|size/i,
    );
    const altered = original.slice();
    altered[40_000]! ^= 1;
    await writeFile(blob, altered);
    expect(await failedPull(`${registry.host}/test/damaged:latest`)).toMatch(/digest/i);
  }, 120_000);

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
}, 60_000);

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
  }, 60_000);

  test("a second server in one runtime directory is told who has it, and takes nothing of the first's", async () => {
    const before = await hostObjects(server);
    const other = await TestServer.create();
    const { exitCode, stderr } = await serve({ ...other.environment, AENV_RUNTIME_PATH: server.runtime });
    expect(exitCode).toBe(1);
    expect(stderr).toContain(server.runtime);
    expect(stderr).toContain(String(server.pid));
    expect(stderr).toContain("AENV_RUNTIME_PATH");
    expect((await hostObjects(server)).toSorted()).toEqual(before.toSorted());
    await other[Symbol.asyncDispose]();
  }, 60_000);

  test.each(["made an API key", "block daemon started"])(
    "a server that is told to end while it starts leaves nothing (after: %s)",
    async (line) => {
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
        if (!told && log.includes(line)) child.kill("SIGTERM");
      }
      expect(await child.exited, log).toBe(0);
      await eventually("nothing is left", async () => (await hostObjects(other)).length === 0);
    },
    90_000,
  );

  test("a port in use is named with the cure, and nothing is left of the attempt", async () => {
    const other = await TestServer.create();
    const { exitCode, stderr } = await serve({
      ...other.environment,
      API_ADDR: server.environment.API_ADDR!,
    });
    expect(exitCode).toBe(1);
    expect(stderr).toContain(server.environment.API_ADDR!);
    expect(stderr).toContain("in use");
    expect(stderr).toContain("API_ADDR");
    expect(await hostObjects(other)).toEqual([]);
    await other[Symbol.asyncDispose]();
    expect(await hostObjects(other).catch(() => [])).toEqual([]);
  }, 60_000);

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
  }, 60_000);

  test("without root: what is missing and how to get it", async () => {
    const other = await TestServer.create();
    sh("chown", "-R", "65534:65534", other.home, other.runtime);
    const drop = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps", "-all"];
    const { exitCode, stderr } = await serve({ ...other.environment }, drop);
    expect(exitCode).toBe(1);
    expect(stderr).toMatch(/root|CAP_NET_ADMIN|capabilit/);
    await other[Symbol.asyncDispose]();
  }, 60_000);

  const withoutKvm = {
    "a /dev/kvm that is no KVM": "[ ! -e /dev/kvm ] || mount --bind /dev/null /dev/kvm",
    "no /dev/kvm":
      'mount -t tmpfs -o dev none "$1" && mkdir "$1/net" && cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom "$1" && cp -a /dev/net/tun "$1/net" && mount --bind "$1" /dev',
  };
  test.each(Object.entries(withoutKvm))(
    "%s: doctor says so and that emulation is used",
    async (_, hide) => {
      const dir = await mkdtemp(join(server.home, "dev-"));
      const child = Bun.spawn(
        ["unshare", "--mount", "sh", "-c", `${hide}; exec "$0" doctor --json`, EXECUTABLE, dir],
        { env: { ...server.environment }, stdout: "pipe", stderr: "pipe" },
      );
      const text = await new Response(child.stdout).text();
      await child.exited;
      const report = JSON.stringify(JSON.parse(text));
      expect(report).toContain("/dev/kvm");
      expect(report).toMatch(/tcg/i);
    },
    60_000,
  );

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
  }, 60_000);

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
});
