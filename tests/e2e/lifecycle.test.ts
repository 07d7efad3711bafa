import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readdir, readFile, rm } from "node:fs/promises";
import { join } from "node:path";
import { CommandExitError, Sandbox } from "e2b";
import type { CapturedDisks } from "../../src/sandbox/types.ts";
import { type LocalRegistry, startDebianRegistry } from "../support/debian.ts";
import { eventually } from "../support/eventually.ts";
import { OutsideHost } from "../support/outside.ts";
import { writeRawDisk } from "../support/raw-disk.ts";
import { hostObjects, TestServer } from "../support/server.ts";

/*
 * The main job with real parts only: a registry, an image made from Debian packages, microVMs, the
 * unmodified SDK, the executable itself. The tests build on each other and run in this order.
 */

let server: TestServer;
let registry: LocalRegistry;
let connection: { apiKey: string; apiUrl: string; sandboxUrl: string };
let sandbox: Sandbox;
const TEMPLATE = "e2e";
/** More than any test but the one about too many needs at a time. */
const MAX_SANDBOXES = 6;

beforeAll(async () => {
  server = await TestServer.create({ toml: `[orchestrator]\nmax_sandboxes = ${MAX_SANDBOXES}` });
  registry = await startDebianRegistry(join(server.home, "registry"));
  await server.start();
  connection = await server.connection();
}, 300_000);

afterAll(async () => {
  await server?.[Symbol.asyncDispose]();
  await registry?.[Symbol.asyncDispose]();
}, 180_000);

const cli = async (...args: string[]) => {
  const result = await server.run(args);
  if (result.exitCode !== 0) throw new Error(`aenv ${args.join(" ")}: ${result.stderr}${result.stdout}`);
  return result.stdout.trim();
};

/** Files under a directory, without following links. */
async function files(dir: string): Promise<string[]> {
  return (await readdir(dir, { recursive: true, withFileTypes: true }).catch(() => []))
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name));
}

test("aenv pull makes a template from the registry's image", async () => {
  const auth = await server.run(["auth"], `${server.url}\n${connection.apiKey}\n`);
  expect(auth.stdout).toContain("Credentials saved.");
  const out = await cli("pull", registry.debian, "--name", TEMPLATE, "--cpu", "1", "--memory", "384");
  expect(out).toContain("Created template");
  expect(out).toContain("is ready");
  const [template] = JSON.parse(await cli("template", "list"));
  expect(template).toMatchObject({ names: [TEMPLATE], buildStatus: "ready", memoryMB: 384 });
}, 300_000);

test("a sandbox starts from the template and runs commands", async () => {
  sandbox = await Sandbox.create(TEMPLATE, { ...connection, timeoutMs: 600_000, envs: { COLOUR: "blue" } });
  const result = await sandbox.commands.run("echo out; echo err >&2; echo $COLOUR");
  expect(result).toMatchObject({ exitCode: 0, stdout: "out\nblue\n", stderr: "err\n" });
  const failed = sandbox.commands.run("echo partial; exit 7");
  await expect(failed).rejects.toBeInstanceOf(CommandExitError);
  await failed.catch((error: CommandExitError) =>
    expect(error).toMatchObject({ exitCode: 7, stdout: "partial\n" }),
  );
  const python = await sandbox.commands.run("python3 -c 'import sys; print(sys.version_info >= (3, 9))'");
  expect(python.stdout).toBe("True\n");
  expect(await sandbox.isRunning()).toBe(true);
}, 180_000);

test("a sandbox boots from an image without a template, and is one like any other", async () => {
  const post = (body: object) =>
    fetch(`${server.url}/sandboxes-cold`, {
      method: "POST",
      headers: { "x-api-key": connection.apiKey },
      body: JSON.stringify({ image: registry.debian, cpuCount: 1, memoryMB: 256, secure: true, ...body }),
    });
  const small = await post({ diskSizeMB: 1024 });
  expect([small.status, await small.json()]).toMatchObject([400, { error_code: "disk_shrink_refused" }]);
  const created = await post({ timeout: 600, allowInternetAccess: false, envVars: { COLOUR: "red" } });
  expect(created.status).toBe(201);
  const { sandboxID, templateID } = (await created.json()) as { sandboxID: string; templateID: string };
  expect(templateID).toBe(registry.debian);
  let cold = await Sandbox.connect(sandboxID, connection);
  expect((await cold.commands.run("echo $COLOUR; nproc", { user: "root" })).stdout).toBe("red\n1\n");
  await cold.files.write("/root/of-cold", "kept");
  await cold.pause();
  cold = await Sandbox.connect(sandboxID, connection);
  expect(await cold.files.read("/root/of-cold")).toBe("kept");
  const info = await Sandbox.getInfo(sandboxID, connection);
  expect(info).toMatchObject({ templateId: registry.debian, memoryMB: 256, state: "running" });
  expect(await cold.kill()).toBe(true);
}, 180_000);

test("drives from images: mounted as asked, written apart, and in pauses, forks, snapshots and a server's death", async () => {
  const source = { image: registry.debian };
  const post = async (...attachedDrives: object[]) => {
    const response = await fetch(`${server.url}/sandboxes-cold`, {
      method: "POST",
      headers: { "x-api-key": connection.apiKey },
      body: JSON.stringify({
        ...source,
        cpuCount: 1,
        memoryMB: 256,
        secure: true,
        timeout: 600,
        attachedDrives,
      }),
    });
    const body = (await response.json()) as { sandboxID: string; error_code?: string; message?: string };
    return { status: response.status, body };
  };
  // As many as a machine has room for: its guest has to find them all.
  const others = Array.from({ length: 18 }, (_, i) => ({ driveID: `other-${i}`, source }));
  const lost = await post({ driveID: "lost", source, subPath: "no/such/directory" }, ...others);
  expect([lost.status, lost.body]).toMatchObject([400, { error_code: "drive_mount_failed" }]);
  expect(lost.body.message).toContain("drive vdb:no/such/directory on /mnt/lost: No such file or directory");

  const created = await post(
    { driveID: "inner", source, readOnly: false, mountPath: "/srv/data/etc", subPath: "etc" },
    { driveID: "base", source },
    { driveID: "outer", source, readOnly: false, mountPath: "/srv/data" },
  );
  expect([created.status, created.body]).toMatchObject([201, {}]);
  let first = await Sandbox.connect(created.body.sandboxID, connection);
  const sh = async (of: Sandbox, script: string) =>
    (await of.commands.run(script, { user: "root" })).stdout.trim();
  const mounts =
    "grep -E ' (/mnt|/srv)' /proc/mounts | cut -d' ' -f1-3; grep -c ' /mnt/base ext4 ro' /proc/mounts";
  expect((await sh(first, mounts)).split("\n").sort()).toEqual(
    ["/dev/vdb /srv/data/etc ext4", "/dev/vdc /mnt/base ext4", "/dev/vdd /srv/data ext4", "1"].sort(),
  );
  expect(await sh(first, "touch /mnt/base/x 2>&1 || true")).toContain("Read-only file system");
  expect(
    await sh(first, "cmp /mnt/base/etc/passwd /srv/data/etc/passwd && ls -A /srv/data/etc | grep -c ."),
  ).not.toBe("0");
  expect(await sh(first, "ls -d /run/agentenv-drive 2>&1 || true")).toContain("No such file");
  await sh(first, "echo one > /srv/data/kept; echo one > /srv/data/etc/kept; echo root > /etc/kept");

  await first.pause();
  first = await Sandbox.connect(first.sandboxId, connection);
  expect(await sh(first, "cat /srv/data/kept /srv/data/etc/kept /etc/kept")).toBe("one\none\nroot");
  const { snapshotId } = await first.createSnapshot();
  await sh(first, "echo two > /srv/data/kept");
  const [child] = await first.fork();
  if (!(child instanceof Sandbox)) throw child;
  await first.kill();
  const second = await Sandbox.create(snapshotId, { ...connection, timeoutMs: 600_000 });
  await server.kill9();
  await server.start();
  // What one of them writes, with nothing of it in any cache, is not in the other's.
  await sh(child, "echo child > /srv/data/etc/kept; sync; echo 3 > /proc/sys/vm/drop_caches");
  await sh(second, "echo 3 > /proc/sys/vm/drop_caches");
  expect(await sh(child, "cat /srv/data/kept /srv/data/etc/kept /mnt/base/etc/debian_version")).toStartWith(
    "two\nchild\n",
  );
  expect(await sh(second, "cat /srv/data/kept /srv/data/etc/kept /etc/kept")).toBe("one\none\nroot");
  await Promise.all([child.kill(), second.kill()]);
  await Sandbox.deleteSnapshot(snapshotId, connection);
}, 240_000);

test("an environment arrives byte for byte, and is added to by later starts", async () => {
  const odd = "line one\nA=B \"quoted\" 'single' $HOME `echo no` \\ 😀";
  const big = "0123456789".repeat(10_000);
  const envs = { ODD: odd, BIG: big, KEPT: "first", SET: "first" };
  const first = await Sandbox.create(TEMPLATE, { ...connection, timeoutMs: 600_000, envs });
  const said = await first.commands.run('printf %s "$ODD"; printf %s "$BIG" | sha256sum');
  expect(said.stdout).toBe(`${odd}${new Bun.CryptoHasher("sha256").update(big).digest("hex")}  -\n`);
  const { snapshotId } = await first.createSnapshot();
  const second = await Sandbox.create(snapshotId, {
    ...connection,
    timeoutMs: 600_000,
    envs: { SET: "second", NEW: "second" },
  });
  expect((await second.commands.run("echo $KEPT $SET $NEW")).stdout).toBe("first second second\n");
  await Promise.all([first.kill(), second.kill()]);
  await Sandbox.deleteSnapshot(snapshotId, connection);
}, 180_000);

test("FR-108: 300 creates at once on a node for a few: that many run, the others are told so at once", async () => {
  const room = MAX_SANDBOXES - 1;
  const began = performance.now();
  const answers = await Promise.all(
    Array.from({ length: 300 }, async () => {
      const response = await fetch(`${server.url}/v2/sandboxes`, {
        method: "POST",
        headers: { "x-api-key": connection.apiKey },
        body: JSON.stringify({ templateID: TEMPLATE, timeout: 600 }),
      });
      const body = (await response.json()) as {
        sandboxID: string;
        error_code?: string;
        remediation?: string;
      };
      return { status: response.status, retry: response.headers.get("retry-after"), body };
    }),
  );
  console.log(`300 creates, ${room} of them started: ${Math.round(performance.now() - began)} ms`);
  const refused = answers.filter(({ status }) => status !== 201);
  expect(refused).toHaveLength(300 - room);
  for (const { status, retry, body } of refused) {
    expect([status, body.error_code]).toEqual([429, "capacity_unavailable"]);
    expect(Number(retry)).toBeGreaterThan(0);
    expect(body.remediation).toBeString();
  }
  const listed = JSON.parse(await cli("list")) as unknown[];
  expect(listed).toHaveLength(MAX_SANDBOXES);
  const vms = async () => (await hostObjects(server)).filter((line) => line.includes("qemu"));
  expect(await vms()).toHaveLength(MAX_SANDBOXES);
  for (const { status, body } of answers) {
    if (status !== 201) continue;
    const started = await Sandbox.connect(body.sandboxID, connection);
    expect((await started.commands.run("echo ok")).stdout).toBe("ok\n");
    expect(await started.kill()).toBe(true);
  }
  expect(await vms()).toHaveLength(1);
}, 180_000);

test("files are written and read, text and bytes", async () => {
  await sandbox.files.write("/tmp/hello.txt", "hello world");
  expect(await sandbox.files.read("/tmp/hello.txt")).toBe("hello world");
  const bytes = new Uint8Array(Array.from({ length: 256 * 1024 }, (_, i) => (i * 7) & 255));
  await sandbox.files.write("/var/deep/er/bytes.bin", bytes.buffer as ArrayBuffer);
  expect(Buffer.from(await sandbox.files.read("/var/deep/er/bytes.bin", { format: "bytes" }))).toEqual(
    Buffer.from(bytes),
  );
  const sum = await sandbox.commands.run("sha256sum /var/deep/er/bytes.bin");
  expect(sum.stdout).toStartWith(new Bun.CryptoHasher("sha256").update(bytes).digest("hex"));
});

test("the guest reaches the outside through its own address and is told a name server", async () => {
  const route = await sandbox.commands.run("cat /proc/net/route | wc -l; cat /etc/resolv.conf");
  expect(route.stdout).toContain("nameserver");
});

describe("pause, kill -9 of the server, resume", () => {
  let pid: number;
  let counted: number;
  const counter = async (target: Sandbox) => Number(await target.files.read("/tmp/counter"));

  test("a paused sandbox survives the server's death", async () => {
    const script =
      "n=0; while :; do n=$((n+1)); echo $n > /tmp/counter.new; mv /tmp/counter.new /tmp/counter; sleep 0.1; done";
    const process_ = await sandbox.commands.run(script, { background: true, timeoutMs: 0 });
    pid = process_.pid;
    await sandbox.files.write("/root/kept", "on disk");
    await eventually("it counts", () => sandbox.files.exists("/tmp/counter"));
    counted = await counter(sandbox);
    expect(await sandbox.pause()).toBe(true);
    expect(await sandbox.pause()).toBe(false);
    expect((await Sandbox.getInfo(sandbox.sandboxId, connection)).state).toBe("paused");
    // No VM is left while it is paused.
    expect((await hostObjects(server)).filter((line) => line.includes("qemu"))).toEqual([]);
    await server.kill9();
    await server.start();
    const [listed] = JSON.parse(await cli("list"));
    expect(listed).toMatchObject({ sandboxID: sandbox.sandboxId, state: "paused" });
  }, 180_000);

  test("it resumes with the same process and its files", async () => {
    const { envdAccessToken: token } = sandbox as unknown as { envdAccessToken: string };
    expect(token).toMatch(/^\S{20,}$/);
    const detail = async () => {
      const headers = { "x-api-key": connection.apiKey };
      const response = await fetch(`${server.url}/sandboxes/${sandbox.sandboxId}`, { headers });
      return (await response.json()) as { state: string; envdAccessToken: string };
    };
    expect(await detail()).toMatchObject({ state: "paused", envdAccessToken: token });
    const earlier = sandbox;
    sandbox = await Sandbox.connect(sandbox.sandboxId, { ...connection, timeoutMs: 600_000 });
    expect(await detail()).toMatchObject({ state: "running", envdAccessToken: token });
    // Who connected before the pause goes on, with the token of then.
    expect((await earlier.commands.run("echo same")).stdout).toBe("same\n");
    const processes = await sandbox.commands.list();
    expect(processes.map((process_) => process_.pid)).toContain(pid);
    expect(await sandbox.files.read("/root/kept")).toBe("on disk");
    await eventually("it counts on", async () => (await counter(sandbox)) > counted);
  }, 180_000);

  test("its clock is right with the first command", async () => {
    await sandbox.pause();
    await Bun.sleep(3000);
    sandbox = await Sandbox.connect(sandbox.sandboxId, { ...connection, timeoutMs: 600_000 });
    const before = Date.now() / 1000;
    const guest = Number((await sandbox.commands.run("date +%s.%N")).stdout);
    const after = Date.now() / 1000;
    expect(guest).toBeGreaterThan(before - 1);
    expect(guest).toBeLessThan(after + 1);
  }, 180_000);
});

describe("pause without memory", () => {
  let plain: Sandbox;
  const sh = async (script: string) => (await plain.commands.run(script, { user: "root" })).stdout.trim();
  const state = async () => (await Sandbox.getInfo(plain.sandboxId, connection)).state;
  /** What is stored of it: one capture, once older ones are gone and it is complete. */
  const storedDisk = async (): Promise<CapturedDisks> => {
    const dir = join(server.home, "persisted-sandboxes/artifacts", plain.sandboxId);
    let path = "";
    await eventually("one capture is left", async () => {
      const [one, ...others] = await readdir(dir);
      path = join(dir, one ?? "none", "state.json");
      return others.length === 0 && (await Bun.file(path).exists());
    });
    return Bun.file(path).json();
  };

  test("the server's death in the middle of one: it runs on, and may write", async () => {
    plain = await Sandbox.create(TEMPLATE, {
      ...connection,
      timeoutMs: 600_000,
      metadata: { of: "disks" },
      envs: { COLOUR: "green" },
      lifecycle: { onTimeout: { action: "pause", keepMemory: false } },
    });
    const service =
      "trap 'echo orderly > /srv/end; exit' TERM; while :; do date >> /srv/log; sleep 0.1; done";
    const { pid } = await plain.commands.run(service, { background: true, timeoutMs: 0, user: "root" });
    await sh("head -c 16M /dev/urandom > /srv/big; sha256sum /srv/big > /srv/sum");
    // Its file system is being written out, or is held still.
    const pausing = plain.pause({ keepMemory: false }).catch((error: unknown) => error);
    await Bun.sleep(200);
    await server.kill9();
    expect(await pausing).toBeInstanceOf(Error);
    await server.start();
    expect(await state()).toBe("running");
    await plain.files.write("/srv/after", "written");
    expect((await plain.commands.list()).map((process_) => process_.pid)).toContain(pid);
  }, 120_000);

  test("what was written is there after it, in a file system that is clean, and nothing else is", async () => {
    const deleted =
      "exec 3> /srv/deleted; rm /srv/deleted; head -c 4M /dev/zero >&3; echo > /tmp/open; sleep 999";
    await plain.commands.run(deleted, { background: true, timeoutMs: 0, user: "root" });
    await eventually("a deleted file is open", () => plain.files.exists("/tmp/open"));
    await plain.files.write("/srv/uploaded", "acknowledged");
    expect(await plain.pause({ keepMemory: false })).toBe(true);
    expect(await state()).toBe("paused");
    const disks = await storedDisk();
    expect(disks.version).toBe(3);
    const raw = join(server.home, "root.raw");
    writeRawDisk(disks.rootfs.lowers, raw);
    const fsck = (option: string) => Bun.spawnSync(["e2fsck", option, raw]);
    expect(String(fsck("-n").stdout)).toContain(": clean, ");
    const whole = fsck("-fn");
    expect([whole.exitCode, String(whole.stdout)]).toEqual([0, expect.not.stringContaining("?")]);
    await rm(raw);
    await server.kill9();
    await server.start();
    const traffic = { "x-agentenv-sandbox-id": plain.sandboxId, "x-agentenv-target-port": "80" };
    const answer = await fetch(server.url, { headers: { ...traffic, "x-api-key": connection.apiKey } });
    expect([answer.status, await answer.text()]).toEqual([410, expect.stringContaining("not proxyable")]);
    expect(await state()).toBe("paused");
  }, 120_000);

  test("it is booted as what it was", async () => {
    plain = await Sandbox.connect(plain.sandboxId, { ...connection, timeoutMs: 600_000 });
    expect(await sh("cat /srv/end /srv/after /srv/uploaded; echo; sha256sum -c /srv/sum; echo $COLOUR")).toBe(
      "orderly\nwrittenacknowledged\n/srv/big: OK\ngreen",
    );
    expect(await sh("ls /srv; pgrep -c sleep || true")).toBe("after\nbig\nend\nlog\nsum\nuploaded\n0");
    expect((await Sandbox.getInfo(plain.sandboxId, connection)).metadata).toEqual({ of: "disks" });
    // With its memory it is paused as any; at its deadline as was asked for.
    await sh("echo in memory > /run/kept");
    await plain.pause();
    plain = await Sandbox.connect(plain.sandboxId, connection);
    expect(await sh("cat /run/kept")).toBe("in memory");
    await plain.setTimeout(1000);
    await eventually("its deadline is over", async () => (await state()) === "paused");
    expect((await storedDisk()).version).toBe(3);
    await plain.kill();
  }, 120_000);
});

test("two sandboxes of one snapshot differ in disk, memory, identity and randomness, and share the memory file", async () => {
  const [one, two] = await Promise.all([
    Sandbox.create(TEMPLATE, { ...connection, timeoutMs: 600_000 }),
    Sandbox.create(TEMPLATE, { ...connection, timeoutMs: 600_000 }),
  ]);
  expect(one.sandboxId).not.toBe(two.sandboxId);
  const random = "head -c 16 /dev/urandom | od -An -tx1";
  const values = await Promise.all(
    [one, two].map(async (clone, i) => {
      await clone.files.write("/root/mine", `clone ${i}`);
      await clone.files.write("/dev/shm/mine", `memory ${i}`);
      return (await clone.commands.run(`${random}; echo $E2B_SANDBOX_ID; hostname`)).stdout.split("\n");
    }),
  );
  expect(values[0]![0]).not.toBe(values[1]![0]);
  expect(values.map((lines) => lines[1])).toEqual([one.sandboxId, two.sandboxId]);
  expect(values[0]![2]).not.toBe(values[1]![2]);
  for (const [i, clone] of [one, two].entries()) {
    expect(await clone.files.read("/root/mine")).toBe(`clone ${i}`);
    expect(await clone.files.read("/dev/shm/mine")).toBe(`memory ${i}`);
  }
  const vms = (await hostObjects(server)).filter(
    (line) => line.startsWith("process") && line.includes("qemu"),
  );
  expect(vms.length).toBe(3);
  const memoryFiles = new Set<string>();
  for (const line of vms) {
    const pid = /process (\d+)/.exec(line)![1];
    const command = await readFile(`/proc/${pid}/cmdline`, "utf8");
    memoryFiles.add(/mem-path"?[=:]"?([^,"\0]+)/.exec(command)![1]!);
  }
  // The resumed one has a chain of its own; the two fresh ones have one file between them.
  expect(memoryFiles.size).toBe(2);
  await Promise.all([one.kill(), two.kill()]);
}, 180_000);

test("egress rules hold from the first packet, through pause and resume, and change while it runs", async () => {
  await using outside = await OutsideHost.create();
  const program = `import socket; s = socket.create_connection(('${outside.address}', ${outside.port}), 3); print(s.recv(9).decode())`;
  const reach = (target: Sandbox) =>
    target.commands.run(`python3 -c "${program}"`).then(
      (result) => result.stdout.trim(),
      () => "denied",
    );
  const open = await Sandbox.create(TEMPLATE, { ...connection, timeoutMs: 600_000 });
  expect(await reach(open)).toBe("welcome");
  await open.updateNetwork({ denyOut: [outside.address] });
  expect(await reach(open)).toBe("denied");
  const shown = JSON.parse(await cli("network", "show", open.sandboxId));
  expect(shown).toMatchObject({ base: "default", denyOut: [`${outside.address}/32`], restricted: false });
  expect(shown.rules).toMatchObject([{ rule: `deny ${outside.address}/32`, packets: expect.any(Number) }]);
  expect(shown.refused.packets).toBeGreaterThan(0);
  await open.pause();
  const resumed = await Sandbox.connect(open.sandboxId, { ...connection, timeoutMs: 600_000 });
  expect(await reach(resumed)).toBe("denied");
  await resumed.updateNetwork({});
  expect(await reach(resumed)).toBe("welcome");
  await resumed.kill();

  const closed = await Sandbox.create(TEMPLATE, {
    ...connection,
    timeoutMs: 600_000,
    allowInternetAccess: false,
  });
  expect(await reach(closed)).toBe("denied");
  await closed.updateNetwork({ allowOut: [`${outside.address}/32`], denyOut: ["0.0.0.0/0"] });
  expect(await reach(closed)).toBe("welcome");
  await closed.kill();
}, 180_000);

test("a VMM that is killed is noticed; the sandbox is gone and clients are told", async () => {
  const victim = await Sandbox.create(TEMPLATE, { ...connection, timeoutMs: 600_000 });
  const running = victim.commands.run("sleep 600", { timeoutMs: 0 });
  const outcome = running.then(
    () => "ended",
    () => "failed",
  );
  await eventually("it runs", async () =>
    (await victim.commands.list()).some(({ args }) => args.join(" ").includes("sleep 600")),
  );
  const live = (await hostObjects(server)).filter((line) => line.includes("qemu"));
  let pid: number | undefined;
  for (const line of live) {
    const candidate = Number(/process (\d+)/.exec(line)![1]);
    const command = await readFile(`/proc/${candidate}/cmdline`, "utf8");
    if (command.includes(victim.sandboxId)) pid = candidate;
  }
  expect(pid).toBeDefined();
  process.kill(pid!, "SIGKILL");
  expect(await outcome).toBe("failed");
  await eventually("the server knows it no more", async () => {
    const state = await fetch(`${server.url}/sandboxes/${victim.sandboxId}`, {
      headers: { "x-api-key": connection.apiKey },
    });
    return state.status === 404;
  });
  expect(await victim.isRunning()).toBe(false);
  // A deletion that meets the clean-up joins it; after that the sandbox is unknown.
  await eventually("it is unknown", async () => !(await victim.kill()));
}, 180_000);

test("the command line runs commands with their output and status", async () => {
  const id = await cli("start", TEMPLATE, "-d");
  const run = await server.run(["exec", id, "--", "sh", "-c", "echo to-out; echo to-err >&2; exit 3"]);
  expect(run).toEqual({ exitCode: 3, stdout: "to-out\n", stderr: "to-err\n" });
  expect(await cli("pause", id)).toBe(`Paused ${id}`);
  expect(await cli("pause", id)).toBe(`Paused ${id}`);
  expect((await server.run(["exec", id, "true"])).stderr).toContain("is paused");
  expect(await cli("resume", id, "--timeout", "600")).toBe(`Resumed ${id}`);
  expect(await cli("timeout", id, "900")).toBe(`Timeout for ${id} set to 900s`);
  expect(await cli("delete", id)).toBe(`Deleted sandbox ${id}`);
  const gone = await server.run(["delete", id]);
  expect(gone.exitCode).toBe(1);
  expect(gone.stderr).toContain("HTTP 404");
}, 180_000);

test("ten rounds of pause and resume keep every file", async () => {
  const id = sandbox.sandboxId;
  for (let round = 0; round < 10; round++) {
    await sandbox.files.write(`/root/round-${round}`, `${round}`.repeat(10_000));
    await sandbox.commands.run(`echo ${round} >> /root/log`);
    await sandbox.pause();
    sandbox = await Sandbox.connect(id, { ...connection, timeoutMs: 600_000 });
    for (let earlier = 0; earlier <= round; earlier++) {
      expect(await sandbox.files.read(`/root/round-${earlier}`)).toBe(`${earlier}`.repeat(10_000));
    }
  }
  expect((await sandbox.files.read("/root/log")).split("\n")).toHaveLength(11);
}, 240_000);

test("a database that is written all the time stays whole over pauses and in forks", async () => {
  let source = await Sandbox.create(TEMPLATE, { ...connection, timeoutMs: 600_000 });
  const writer = [
    "import sqlite3, time",
    "db = sqlite3.connect('/root/w.db')",
    "db.execute('pragma journal_mode=wal')",
    "db.execute('create table t(n, b)')",
    "n = 0",
    "while True:",
    "    n += 1",
    "    db.execute('insert into t values(?, randomblob(2000))', (n,))",
    "    db.commit()",
    "    time.sleep(0.005)",
  ];
  const check = [
    "import sqlite3",
    "db = sqlite3.connect('/root/w.db', timeout=30)",
    "print(db.execute('pragma integrity_check').fetchone()[0])",
    "print(*db.execute('select count(*) = max(n), count(*) from t').fetchone())",
  ];
  await source.files.write("/root/write.py", writer.join("\n"));
  await source.files.write("/root/check.py", check.join("\n"));
  await source.commands.run("python3 /root/write.py", { background: true, timeoutMs: 0 });
  await eventually("it writes", () => source.files.exists("/root/w.db-wal"));
  const whole = async (target: Sandbox): Promise<number> => {
    const said = (await target.commands.run("python3 /root/check.py; dmesg | grep -ci 'ext4.*error'; true"))
      .stdout;
    const [verdict, rows, errors] = said.split("\n");
    expect([verdict, rows?.split(" ")[0], errors]).toEqual(["ok", "1", "0"]);
    return Number(rows?.split(" ")[1]);
  };
  for (let round = 0; round < 4; round++) {
    await source.pause();
    source = await Sandbox.connect(source.sandboxId, { ...connection, timeoutMs: 600_000 });
  }
  const rows = await whole(source);
  const children = (await source.fork({ count: 2 })).map((fork) => {
    if (!(fork instanceof Sandbox)) throw fork;
    return fork;
  });
  for (const one of [...children, source]) {
    const now = await whole(one);
    expect(now).toBeGreaterThanOrEqual(rows);
    await one.kill();
  }
}, 180_000);

test("an orderly stop pauses what runs, and the next start has it", async () => {
  expect(await server.stop()).toBe(0);
  expect(await hostObjects(server)).toEqual([]);
  await server.start();
  expect((await Sandbox.getInfo(sandbox.sandboxId, connection)).state).toBe("paused");
  sandbox = await Sandbox.connect(sandbox.sandboxId, { ...connection, timeoutMs: 600_000 });
  expect(await sandbox.files.read("/root/kept")).toBe("on disk");
}, 180_000);

describe("fork and snapshot through the SDK", () => {
  test("a fork continues from the source's memory, as a sandbox of its own", async () => {
    await sandbox.files.write("/dev/shm/forked", "the source's");
    const forks = await sandbox.fork({ count: 2 });
    const children = forks.map((fork) => {
      if (!(fork instanceof Sandbox)) throw fork;
      return fork;
    });
    expect(children).toHaveLength(2);
    for (const [i, child] of children.entries()) {
      expect(child.sandboxId).not.toBe(sandbox.sandboxId);
      expect(await child.files.read("/dev/shm/forked")).toBe("the source's");
      const said = await child.commands.run("hostname; echo $E2B_SANDBOX_ID");
      expect(said.stdout.split("\n").slice(0, 2)).toEqual([child.sandboxId, child.sandboxId]);
      await child.files.write("/dev/shm/forked", `child ${i}`);
    }
    expect(await sandbox.files.read("/dev/shm/forked")).toBe("the source's");
    for (const child of children) await child.kill();
  }, 180_000);

  test("a snapshot is made under a running command, found by name, started from and deleted", async () => {
    const ticks: string[] = [];
    const running = await sandbox.commands.run("for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.2; done", {
      background: true,
      onStdout: (text) => void ticks.push(text),
    });
    await sandbox.files.write("/root/point", "in time");
    const { snapshotId } = await sandbox.createSnapshot({ name: "point" });
    await sandbox.files.write("/root/point", "later");
    // Its stream went on over the moment in which the guest stood still.
    expect((await running.wait()).stdout.split("\n").filter((line) => line !== "")).toHaveLength(8);
    expect(await sandbox.files.read("/root/point")).toBe("later");
    for (const template of [snapshotId, "point"]) {
      const copy = await Sandbox.create(template, { ...connection, timeoutMs: 600_000 });
      expect(await copy.files.read("/root/point")).toBe("in time");
      await copy.kill();
    }
    const listed = [];
    const pages = Sandbox.listSnapshots({ ...connection, sandboxId: sandbox.sandboxId });
    while (pages.hasNext) listed.push(...(await pages.nextItems()));
    expect(listed.map((snapshot) => snapshot.snapshotId)).toEqual([snapshotId]);
    expect(await Sandbox.deleteSnapshot(snapshotId, connection)).toBe(true);
    expect(await Sandbox.deleteSnapshot(snapshotId, connection)).toBe(false);
  }, 180_000);
});

test("a server killed under running sandboxes: the next one has them, with their processes", async () => {
  const id = sandbox.sandboxId;
  const script = "n=0; while :; do n=$((n+1)); echo $n > /tmp/n.new; mv /tmp/n.new /tmp/n; sleep 0.1; done";
  const { pid } = await sandbox.commands.run(script, { background: true, timeoutMs: 0 });
  await eventually("it counts", () => sandbox.files.exists("/tmp/n"));
  const before = await Sandbox.getInfo(id, connection);
  const vms = (await hostObjects(server)).filter((line) => line.includes("qemu"));
  await server.kill9();
  // A server that finds its port taken says so before it takes anything over.
  const { hostname, port } = new URL(server.url);
  const squatter = Bun.listen({ hostname, port: Number(port), socket: { data: () => undefined } });
  const refused = await server.run(["serve"]);
  squatter.stop(true);
  expect(refused).toMatchObject({
    exitCode: 1,
    stderr: expect.stringContaining("in use by another process"),
  });
  await server.start();
  const after = await Sandbox.getInfo(id, connection);
  expect(after).toEqual(before);
  expect((await hostObjects(server)).filter((line) => line.includes("qemu"))).toEqual(vms);
  expect((await sandbox.commands.list()).map((process_) => process_.pid)).toContain(pid);
  const counted = Number(await sandbox.files.read("/tmp/n"));
  await eventually("it counts on", async () => Number(await sandbox.files.read("/tmp/n")) > counted);
  expect(await sandbox.files.read("/root/kept")).toBe("on disk");
  // It is this server's as any other: it pauses, resumes, and is deleted.
  await sandbox.pause();
  sandbox = await Sandbox.connect(id, { ...connection, timeoutMs: 600_000 });
  expect((await sandbox.commands.list()).map((process_) => process_.pid)).toContain(pid);
  for (const entry of JSON.parse(await cli("list"))) await cli("delete", entry.sandboxID);
}, 180_000);

test("after the last delete nothing is left: processes, namespaces, routes, mounts, files", async () => {
  await cli("template", "delete", TEMPLATE);
  expect(JSON.parse(await cli("list"))).toEqual([]);
  expect(JSON.parse(await cli("template", "list"))).toEqual([]);
  // The server, its block daemon and the network slots it keeps ready are there until it stops.
  const objects = (await hostObjects(server)).filter(
    (line) => line.startsWith("process") && !line.includes("agentenv serve") && !line.includes("blockd"),
  );
  expect(objects).toEqual([]);
  expect(await files(join(server.home, "sandboxes"))).toEqual([]);
  expect(await files(join(server.home, "persisted-sandboxes/artifacts"))).toEqual([]);
  expect(await server.stop()).toBe(0);
  expect(await hostObjects(server)).toEqual([]);
}, 180_000);
