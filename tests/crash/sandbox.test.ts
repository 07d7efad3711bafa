import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { runCommand } from "../../src/lib/command.ts";
import type { CreateSandboxRequest } from "../../src/orchestrator/index.ts";
import { eventually } from "../support/eventually.ts";
import { holdPool } from "../support/pool.ts";
import { busyboxTemplate, leftovers, type RealNode, startRealNode, testDeps } from "../support/real-node.ts";

/* Faults of the host under real VMs: a full disk, a killed server, a killed VM, damaged files. */

const deps = testDeps();
const { pool: POOL } = holdPool();
const REQUEST: CreateSandboxRequest = {
  template: "busybox",
  timeoutSeconds: 600,
  onTimeout: "pause",
  autoResume: false,
  secure: true,
  metadata: {},
  envVars: {},
};

describe.skipIf(deps === undefined)("sandbox faults", () => {
  let node: RealNode;
  let stateDir: string;

  beforeAll(async () => {
    stateDir = `/tmp/orch-small-${process.pid}`;
    mkdirSync(stateDir);
    await runCommand(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", stateDir]);
    node = await startRealNode({ deps: deps!, pool: POOL, stateDir });
    await busyboxTemplate(node);
  }, 120_000);

  afterAll(async () => {
    // In any case, also after a failed test: no VM, no daemon, no mount stays.
    await using stack = new AsyncDisposableStack();
    stack.defer(() => rmSync(stateDir, { recursive: true, force: true }));
    stack.defer(async () => void (await runCommand(["umount", stateDir])));
    if (node === undefined) return;
    stack.defer(() => {
      for (const dir of [node.home, node.runtimeDir]) rmSync(dir, { recursive: true, force: true });
    });
    stack.defer(async () => expect(await leftovers(node)).toEqual([]));
    stack.use(node);
    for (const { id } of node.orchestrator.list()) await node.orchestrator.kill(id);
  }, 120_000);

  test("files and memory survive pause after pause, and the clock is right", async () => {
    const { id } = await node.orchestrator.create(REQUEST);
    await node.sh(id, "mkdir -p /dev/shm; head -c 2000000 /dev/urandom > /dev/shm/m");
    const memory = await node.sh(id, "sha256sum < /dev/shm/m");
    const sums: string[] = [];
    for (let round = 0; round < 4; round++) {
      await node.sh(id, `head -c 1000000 /dev/urandom > /f${round}; echo ${round} >> /log`);
      sums.push(await node.sh(id, `sha256sum < /f${round}`));
      await node.orchestrator.pause(id);
      await node.orchestrator.resume(id, 600);
      const before = Date.now() / 1000;
      const seconds = Number(await node.sh(id, "date +%s"));
      expect(seconds).toBeWithin(before - 5, Date.now() / 1000 + 5);
      for (const [i, sum] of sums.entries()) expect(await node.sh(id, `sha256sum < /f${i}`)).toBe(sum);
      expect(await node.sh(id, "sha256sum < /dev/shm/m")).toBe(memory);
    }
    expect(await node.sh(id, "wc -l < /log")).toBe("4");
    await node.orchestrator.kill(id);
  }, 120_000);

  test("a disk that is full when a pause is stored: the error says so, the sandbox runs on, and pauses later", async () => {
    const { id } = await node.orchestrator.create(REQUEST);
    await node.sh(id, "head -c 60000000 /dev/urandom > /dev/shm/big");
    const error = await node.orchestrator.pause(id).catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: "disk_full", status: 507 });
    expect(node.orchestrator.get(id).state).toBe("running");
    expect(await node.sh(id, "echo alive > /after; cat /after")).toBe("alive");
    expect(readdirSync(join(stateDir, "artifacts", id))).toEqual([]);
    await node.sh(id, "echo > /dev/shm/big");
    await node.orchestrator.kill(id);
    const next = await node.orchestrator.create(REQUEST);
    await node.sh(next.id, "echo kept > /kept");
    await node.orchestrator.pause(next.id);
    await node.orchestrator.resume(next.id, 600);
    expect(await node.sh(next.id, "cat /kept")).toBe("kept");
    await node.orchestrator.kill(next.id);
    expect(await leftovers(node)).toEqual([]);
  }, 120_000);

  test("a state directory that has become read-only: the pause says so within seconds, the sandbox runs on", async () => {
    const { id } = await node.orchestrator.create(REQUEST);
    await runCommand(["mount", "-o", "remount,ro", stateDir]);
    try {
      const began = performance.now();
      const error = await node.orchestrator.pause(id).catch((thrown: unknown) => thrown);
      expect(error).toMatchObject({ code: "pause_failed", message: expect.stringContaining("EROFS") });
      expect(await node.sh(id, "echo alive")).toBe("alive");
      expect(performance.now() - began).toBeLessThan(20_000);
      expect(node.orchestrator.get(id).state).toBe("running");
    } finally {
      await runCommand(["mount", "-o", "remount,rw", stateDir]);
    }
    await node.orchestrator.pause(id);
    await node.orchestrator.kill(id);
  }, 120_000);

  test("a VM killed from outside: its sandbox is gone, and nothing of it is left", async () => {
    const { id } = await node.orchestrator.create(REQUEST);
    const live = await Bun.file(join(node.home, "sandboxes", id, "live.json")).json();
    process.kill(live.vm.pid, "SIGKILL");
    await eventually("it is gone", () => node.orchestrator.route(id).kind === "not_found");
    await eventually("nothing is left", async () => (await leftovers(node)).length === 0).catch(
      async (cause: unknown) => {
        throw new Error(`left: ${(await leftovers(node)).join(", ")}`, { cause });
      },
    );
    expect(await node.blockd.client.list()).toEqual([]);
  }, 120_000);

  test("a damaged file of a paused sandbox: a clear error, still paused, deletion works, others run", async () => {
    const { id } = await node.orchestrator.create(REQUEST);
    const other = await node.orchestrator.create(REQUEST);
    await node.orchestrator.pause(id);
    const root = join(stateDir, "artifacts", id);
    const [generation] = readdirSync(root);
    const stored = join(root, generation!);

    const deviceState = join(stored, "device.state");
    const written = readFileSync(deviceState);
    // Any bit of it: a VMM would take most of them, and the guest go on with something else than it had.
    for (const at of [0, written.length >> 1, written.length - 1]) {
      const flipped = Buffer.from(written);
      flipped[at]! ^= 1;
      writeFileSync(deviceState, flipped);
      await expect(node.orchestrator.resume(id, 60)).rejects.toMatchObject({
        code: "device_state_damaged",
        message: expect.stringMatching(/stays paused: the device state .*device\.state is damaged/),
        remediation: expect.stringContaining("delete the sandbox"),
      });
      expect(node.orchestrator.get(id).state).toBe("paused");
    }
    writeFileSync(deviceState, written);
    await node.orchestrator.resume(id, 60);
    await node.orchestrator.pause(id);

    const [again] = readdirSync(root);
    const disk = readdirSync(join(root, again!)).find((name) => name.startsWith("disk-"))!;
    await Bun.write(join(root, again!, disk), "not a layer");
    await expect(node.orchestrator.resume(id, 60)).rejects.toThrow(/stays paused.*layer|stays paused.*lsmt/i);
    expect(node.orchestrator.get(id).state).toBe("paused");
    await node.orchestrator.kill(id);
    expect(existsSync(root)).toBeFalse();
    expect(await node.sh(other.id, "echo fine")).toBe("fine");
    await node.orchestrator.kill(other.id);
  }, 120_000);

  test("a server killed while it starts sandboxes: the next one takes over what was ready and takes the rest away", async () => {
    const { id } = await node.orchestrator.create(REQUEST);
    await node.sh(id, "echo before > /before");
    await node.orchestrator.pause(id);
    const { home, runtimeDir } = node;
    await node[Symbol.asyncDispose]();
    const script = `
      const { startRealNode } = await import(${JSON.stringify(join(import.meta.dir, "../support/real-node.ts"))});
      const node = await startRealNode(${JSON.stringify({ deps, home, runtimeDir, stateDir, pool: POOL })});
      process.stdout.write("ready\\n");
      for (let i = 0; i < 4; i++) node.orchestrator.create(${JSON.stringify(REQUEST)}).then(() => process.stdout.write("one\\n"));
      await Bun.sleep(60_000);
    `;
    for (const delayMs of [60, 200, 500]) {
      const server = Bun.spawn([process.execPath, "-e", script], { stdout: "pipe", stderr: "inherit" });
      const reader = server.stdout.getReader();
      expect(new TextDecoder().decode((await reader.read()).value)).toStartWith("ready");
      await Bun.sleep(delayMs);
      server.kill("SIGKILL");
      await server.exited;
    }
    expect((await leftovers(node)).length).toBeGreaterThan(0);
    node = await startRealNode({ deps: deps!, home, runtimeDir, stateDir, pool: POOL });
    for (const record of node.orchestrator.list()) {
      if (record.id === id) continue;
      expect(await node.sh(record.id, "echo here")).toBe("here");
      await node.orchestrator.kill(record.id);
    }
    expect(await leftovers(node)).toEqual([]);
    expect(await node.blockd.client.list()).toEqual([]);
    expect(node.orchestrator.list().map((record) => [record.id, record.state])).toEqual([[id, "paused"]]);
    await node.orchestrator.resume(id, 600);
    expect(await node.sh(id, "cat /before")).toBe("before");
    await node.orchestrator.kill(id);
  }, 120_000);
});
