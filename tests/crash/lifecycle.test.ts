import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { readdirSync, readFileSync, rmSync, truncateSync } from "node:fs";
import { join } from "node:path";
import type { CreateSandboxRequest } from "../../src/orchestrator/index.ts";
import { eventually } from "../support/eventually.ts";
import { holdPool } from "../support/pool.ts";
import { busyboxTemplate, leftovers, type RealNode, startRealNode, testDeps } from "../support/real-node.ts";

/* Fork, snapshot, adoption and what can go wrong with a running sandbox, with real VMs. */

const deps = testDeps();
const { pool: POOL } = holdPool();
const REQUEST: CreateSandboxRequest = {
  template: "busybox",
  timeoutSeconds: 600,
  onTimeout: "pause",
  autoResume: false,
  secure: true,
  metadata: { of: "lifecycle" },
  envVars: { COLOUR: "blue" },
};
const COUNTER =
  "n=0; while true; do n=$((n+1)); echo $n > /counter.new; mv /counter.new /counter; sleep 0.05; done";

describe.skipIf(deps === undefined)("lifecycle of real VMs", () => {
  let node: RealNode;
  let home: string;
  let runtimeDir: string;

  const start = async (): Promise<void> => {
    node = await startRealNode({
      deps: deps!,
      pool: POOL,
      ...(home === undefined ? {} : { home, runtimeDir }),
      // So that 25 snapshots do what otherwise takes hundreds.
      maxLiveLowers: 12,
      orchestrator: { health: { intervalMs: 200, timeoutMs: 2000, failures: 2 } },
    });
    ({ home, runtimeDir } = node);
  };

  beforeAll(async () => {
    await start();
    await busyboxTemplate(node);
  }, 120_000);

  afterAll(async () => {
    await using stack = new AsyncDisposableStack();
    if (node === undefined) return;
    stack.defer(() => {
      for (const dir of [home, runtimeDir]) rmSync(dir, { recursive: true, force: true });
    });
    stack.defer(async () => expect(await leftovers(node)).toEqual([]));
    stack.use(node);
    for (const { id } of node.orchestrator.list()) await node.orchestrator.kill(id);
  }, 120_000);

  afterEach(async () => {
    for (const { id } of node.orchestrator.list()) await node.orchestrator.kill(id);
  });

  /** Runs `actions` in a server process of its own on this home, and kills it at `atLine` or after `afterMs`. */
  async function serverKilled(
    actions: string,
    killAt: { line: string; afterMs?: number },
  ): Promise<string[]> {
    await node[Symbol.asyncDispose]();
    const script = `
      const { startRealNode } = await import(${JSON.stringify(join(import.meta.dir, "../support/real-node.ts"))});
      const node = await startRealNode(${JSON.stringify({ deps, home, runtimeDir, pool: POOL })});
      const request = ${JSON.stringify(REQUEST)};
      const say = (text) => process.stdout.write(text + "\\n");
      ${actions}
      await Bun.sleep(60_000);
    `;
    const server = Bun.spawn([process.execPath, "-e", script], { stdout: "pipe", stderr: "inherit" });
    const said: string[] = [];
    let text = "";
    for await (const chunk of server.stdout) {
      text += new TextDecoder().decode(chunk);
      said.splice(0, said.length, ...text.split("\n").slice(0, -1));
      if (said.includes(killAt.line)) break;
    }
    if (killAt.afterMs !== undefined) await Bun.sleep(killAt.afterMs);
    server.kill("SIGKILL");
    await server.exited;
    await start();
    return said;
  }

  const counter = async (id: string): Promise<number> => Number(await node.sh(id, "cat /counter"));

  test("a server killed under running sandboxes: the next one has them, their processes and all they were given", async () => {
    const said = await serverKilled(
      `
      const plain = await node.orchestrator.create(request);
      await node.sh(plain.id, ${JSON.stringify(`(${COUNTER}) > /dev/null 2>&1 & echo $! > /pid; echo kept > /kept`)});
      const moved = await node.orchestrator.create({ ...request, metadata: { n: "2" } });
      await node.sh(moved.id, "echo before > /dev/shm/m || { mkdir -p /dev/shm; echo before > /dev/shm/m; }");
      await node.orchestrator.snapshot(moved.id, { name: "point" });
      await node.orchestrator.setTimeout(moved.id, 1234);
      await node.orchestrator.pause(plain.id);
      await node.orchestrator.resume(plain.id, 900);
      const paused = await node.orchestrator.create(request);
      await node.orchestrator.pause(paused.id);
      say(JSON.stringify(node.orchestrator.list()));
      say("done");
      `,
      { line: "done" },
    );
    const before = JSON.parse(said[0]!) as { id: string; endAt: string; metadata: object }[];
    expect(node.report).toEqual({ paused: 1, adopted: 2, lost: [] });
    const byId = (a: { id: string }, b: { id: string }) => (a.id < b.id ? -1 : 1);
    expect(node.orchestrator.list().toSorted(byId)).toEqual(before.toSorted(byId) as never);
    const [plain, moved, paused] = before.map(({ id }) => id) as [string, string, string];
    const count = await counter(plain);
    expect(await node.sh(plain, "cat /kept")).toBe("kept");
    expect(await node.sh(plain, "kill -0 $(cat /pid) && echo alive")).toBe("alive");
    await eventually("it counts on", async () => (await counter(plain)) > count);
    // It goes on as one that this server started.
    const [child] = await node.orchestrator.fork(moved, { count: 1 });
    if (!("record" in child!)) throw child!.error;
    expect(await node.sh(child.record.id, "cat /dev/shm/m")).toBe("before");
    await node.orchestrator.snapshot(moved, {});
    await node.orchestrator.pause(moved);
    await node.orchestrator.resume(moved, 600);
    expect(await node.sh(moved, "cat /dev/shm/m")).toBe("before");
    for (const id of [plain, moved, paused, child.record.id]) await node.orchestrator.kill(id);
    expect(await leftovers(node)).toEqual([]);
    expect(await node.blockd.client.list()).toEqual([]);
  }, 120_000);

  test("a server killed in the middle of pauses, snapshots and forks: every sandbox is there, with its process", async () => {
    const said = await serverKilled(
      `
      for (let i = 0; i < 3; i++) {
        const { id } = await node.orchestrator.create(request);
        await node.sh(id, ${JSON.stringify(`(${COUNTER}) > /dev/null 2>&1 &`)});
        say(id);
      }
      say("ready");
      `,
      { line: "ready" },
    );
    const ids = said.slice(0, 3);
    expect(node.report.adopted).toBe(3);
    for (const afterMs of [40, 120, 250]) {
      await serverKilled(
        `
        const [a, b, c] = ${JSON.stringify(ids)};
        for (const id of [a, b, c]) if (node.orchestrator.get(id).state === "paused") await node.orchestrator.resume(id, 600);
        say("go");
        node.orchestrator.pause(a).catch(() => {});
        node.orchestrator.snapshot(b, {}).catch(() => {});
        node.orchestrator.fork(c, { count: 2 }).catch(() => {});
        `,
        { line: "go", afterMs },
      );
      expect(node.report.lost).toEqual([]);
      const known = node.orchestrator.list();
      for (const id of ids) {
        const state = known.find((record) => record.id === id)?.state;
        expect(state).toBeOneOf(["running", "paused"]);
        if (state === "paused") await node.orchestrator.resume(id, 600);
        const count = await counter(id);
        await eventually("it counts on", async () => (await counter(id)) > count);
        const before = Date.now() / 1000;
        const seconds = Number(await node.sh(id, "date +%s"));
        expect(seconds).toBeWithin(before - 5, Date.now() / 1000 + 5);
      }
      // Children that were ready are ours now.
      for (const { id } of known) if (!ids.includes(id)) await node.orchestrator.kill(id);
    }
    for (const id of ids) await node.orchestrator.kill(id);
    expect(await leftovers(node)).toEqual([]);
    expect(readdirSync(join(home, "state/artifacts"))).toEqual([]);
  }, 240_000);

  test("a VM that ended while no server was there is reported as lost, and nothing of it stays", async () => {
    const said = await serverKilled(
      `say((await node.orchestrator.create(request)).id); say("ready");
       say(JSON.parse(await Bun.file(${JSON.stringify(`${home}/sandboxes/`)} + node.orchestrator.list()[0].id + "/live.json").text()).vm.pid + "");
       process.kill(JSON.parse(await Bun.file(${JSON.stringify(`${home}/sandboxes/`)} + node.orchestrator.list()[0].id + "/live.json").text()).vm.pid, "SIGKILL");
       process.kill(process.pid, "SIGKILL");`,
      { line: "never" },
    );
    expect(node.report).toEqual({
      paused: 0,
      adopted: 0,
      lost: [{ id: said[0]!, reason: expect.stringContaining("VM has ended") }],
    });
    expect(node.orchestrator.list()).toEqual([]);
    expect(await leftovers(node)).toEqual([]);
    expect(await node.blockd.client.list()).toEqual([]);
  }, 120_000);

  test("fork: ten children with the source's memory and disk, each with its own identity, randomness and clock", async () => {
    const { id } = await node.orchestrator.create(REQUEST);
    await node.sh(id, "mkdir -p /dev/shm; echo shared > /dev/shm/m; echo disk > /d");
    const outcomes = await node.orchestrator.fork(id, { count: 10 });
    const ids = outcomes.map((outcome) => {
      if ("error" in outcome) throw outcome.error;
      return outcome.record.id;
    });
    const before = Date.now() / 1000;
    const seen = await Promise.all(
      ids.map(async (child) => {
        const text = await node.sh(
          child,
          "cat /dev/shm/m /d; cat /proc/sys/kernel/hostname; echo $E2B_SANDBOX_ID $COLOUR; head -c 16 /dev/urandom | sha256sum; date +%s; echo mine > /dev/shm/m; echo mine > /d",
        );
        return text.split("\n");
      }),
    );
    for (const [i, lines] of seen.entries()) {
      expect(lines.slice(0, 4)).toEqual(["shared", "disk", ids[i]!, `${ids[i]} blue`]);
      expect(Number(lines[5])).toBeWithin(before - 10, Date.now() / 1000 + 10);
    }
    expect(new Set(seen.map((lines) => lines[4])).size).toBe(10);
    expect(await node.sh(id, "cat /dev/shm/m /d")).toBe("shared\ndisk");
    // One memory file between them.
    const files = new Set(
      ids.map(
        (child) =>
          JSON.parse(readFileSync(join(home, "sandboxes", child, "live.json"), "utf8")).vm.memoryFile,
      ),
    );
    expect(files.size).toBe(1);
    for (const child of ids) await node.orchestrator.kill(child);
    expect(readdirSync(join(home, "state/artifacts/checkpoints"))).toEqual([]);
    await node.orchestrator.kill(id);
  }, 120_000);

  test("25 snapshots of one source, with 8 MiB written in between, are no more work at the end", async () => {
    const { id } = await node.orchestrator.create(REQUEST);
    await node.sh(id, "mkdir -p /dev/shm; head -c 8500000 /dev/urandom > /r");
    const stopped: number[] = [];
    const totals: number[] = [];
    const moved: number[] = [];
    const snapshots: string[] = [];
    // What the server and the block daemon read and write, in bytes: unlike a time it is nobody else's.
    const io = async () =>
      [process.pid, (await node.blockd.client.stats()).pid]
        .flatMap((pid) => readFileSync(`/proc/${pid}/io`, "utf8").match(/(?<=^[rw]char: )\d+/gm) ?? [])
        .reduce((sum, bytes) => sum + Number(bytes), 0);
    for (let i = 0; i < 25; i++) {
      await node.sh(
        id,
        `dd if=/r of=/dev/shm/w bs=4099 skip=${i} count=2047 2>/dev/null; echo ${i} >> /log; sha256sum < /dev/shm/w > /sum`,
      );
      const before = await io();
      snapshots.push((await node.orchestrator.snapshot(id, {})).id);
      moved.push((await io()) - before);
      const timings = node.orchestrator.timings(id).snapshot!;
      stopped.push(timings.stopped!);
      totals.push(timings.total!);
    }
    console.log(
      `snapshots: stopped ${stopped.map(Math.round).join(" ")} ms; in all ${totals.map(Math.round).join(" ")} ms; ` +
        `moved ${moved.map((bytes) => (bytes / 2 ** 20).toFixed(1)).join(" ")} MiB`,
    );
    // Merging runs beside some of them: the least is a snapshot's own.
    expect(Math.min(...moved.slice(-5))).toBeLessThan(Math.min(...moved.slice(0, 5)) * 1.5 + (4 << 20));
    const devices = await node.blockd.client.list();
    expect(devices).toHaveLength(1);
    expect(devices[0]!.image.lowers.length).toBeLessThan(24);
    for (const [i, template] of [...snapshots.entries()].filter(([n]) => n % 8 === 0)) {
      const copy = await node.orchestrator.create({ ...REQUEST, template });
      expect(await node.sh(copy.id, "wc -l < /log")).toBe(String(i + 1));
      expect(await node.sh(copy.id, "sha256sum < /dev/shm/w")).toBe(await node.sh(copy.id, "cat /sum"));
      await node.orchestrator.kill(copy.id);
    }
    await node.orchestrator.kill(id);
    for (const snapshot of snapshots) await node.repository.delete(snapshot);
  }, 240_000);

  test("a chain of 12 restored snapshots keeps everything, with few layers", async () => {
    let { id } = await node.orchestrator.create(REQUEST);
    await node.sh(id, "mkdir -p /dev/shm; head -c 1000000 /dev/urandom > /dev/shm/first");
    const sum = await node.sh(id, "sha256sum < /dev/shm/first");
    const made: string[] = [];
    let layers = 0;
    for (let i = 0; i < 12; i++) {
      await node.sh(id, `echo ${i} >> /log; head -c 200000 /dev/urandom > /f${i}`);
      const snapshot = await node.orchestrator.snapshot(id, { name: "tip" });
      made.push(snapshot.id);
      const { memory, rootfs } = snapshot.committed!.state;
      layers = Math.max(layers, memory.layers.length, rootfs.lowers.length);
      await node.orchestrator.kill(id);
      ({ id } = await node.orchestrator.create({ ...REQUEST, template: "tip" }));
    }
    expect(await node.sh(id, "wc -l < /log")).toBe("12");
    expect((await node.sh(id, "ls /")).match(/^f\d+$/gm)).toHaveLength(12);
    expect(await node.sh(id, "sha256sum < /dev/shm/first")).toBe(sum);
    // Merging runs beside the sandboxes: how far it is at the end depends on the machine.
    expect(layers).toBeLessThan(24);
    await node.orchestrator.kill(id);
    for (const snapshot of made) await node.repository.delete(snapshot);
    const { removedFiles } = await node.orchestrator.collectGarbage();
    expect(removedFiles).toBe(0); // Younger than the grace time.
  }, 240_000);

  test("the block daemon killed under running sandboxes: their I/O stands still and goes on", async () => {
    const made = await Promise.all([node.orchestrator.create(REQUEST), node.orchestrator.create(REQUEST)]);
    const writer =
      "i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo $i >> /w; dd if=/dev/urandom of=/data bs=64k count=4 conv=fsync 2>/dev/null; done; echo ended > /ended";
    for (const { id } of made) await node.sh(id, `(${writer}) > /dev/null 2>&1 &`);
    for (let i = 0; i < 3; i++) {
      await Bun.sleep(400);
      process.kill((await node.blockd.client.stats()).pid, "SIGKILL");
    }
    for (const { id } of made) {
      await eventually("all is written", () => node.sh(id, "test -e /ended && cat /ended || true"), 60_000);
      expect(await node.sh(id, "wc -l < /w; cat /w | head -n 1")).toBe("60\n1");
      // What is on the disk is whole: it is there after a pause, too.
      const sum = await node.sh(id, "sync; sha256sum < /data");
      await node.orchestrator.pause(id);
      await node.orchestrator.resume(id, 600);
      expect(await node.sh(id, "sha256sum < /data")).toBe(sum);
      await node.orchestrator.kill(id);
    }
    expect(await leftovers(node)).toEqual([]);
  }, 120_000);

  test("a guest that hangs is told as unresponsive, and can still be paused; when it answers, that is told", async () => {
    const { id } = await node.orchestrator.create(REQUEST);
    const { pid } = JSON.parse(readFileSync(join(home, "sandboxes", id, "live.json"), "utf8")).vm;
    const until = (silent: boolean) =>
      eventually(
        silent ? "unresponsive" : "responsive",
        () => (node.orchestrator.get(id).unresponsiveSince !== undefined) === silent,
      );
    process.kill(pid, "SIGSTOP");
    try {
      await until(true);
      expect(node.orchestrator.get(id).state).toBe("running");
    } finally {
      process.kill(pid, "SIGCONT");
    }
    await until(false);
    expect(await node.sh(id, "echo back")).toBe("back");
    await node.orchestrator.kill(id);
  }, 120_000);

  for (const [what, damage] of [
    ["a device state that is cut off", (dir: string) => truncateSync(join(dir, "device.state"), 100)],
    ["a device state that is missing", (dir: string) => rmSync(join(dir, "device.state"))],
    [
      "a memory layer that is cut off",
      (dir: string) =>
        truncateSync(join(dir, readdirSync(dir).find((name) => name.startsWith("memory-"))!), 8192),
    ],
  ] as const) {
    test(`${what}: the resume says so soon, the sandbox stays paused and can be deleted`, async () => {
      const { id } = await node.orchestrator.create(REQUEST);
      await node.orchestrator.pause(id);
      const root = join(home, "state/artifacts", id);
      damage(join(root, readdirSync(root)[0]!));
      const began = performance.now();
      const error = await node.orchestrator.resume(id, 60).catch((thrown: unknown) => thrown);
      expect(performance.now() - began).toBeLessThan(20_000);
      expect(error).toMatchObject({
        message: expect.stringContaining("stays paused"),
        remediation: expect.any(String),
      });
      expect(node.orchestrator.get(id).state).toBe("paused");
      await node.orchestrator.kill(id);
      expect(await leftovers(node)).toEqual([]);
      expect(await node.blockd.client.list()).toEqual([]);
    }, 120_000);
  }

  test("20 pauses, connects and kills at once: one wins, the others join or are told", async () => {
    for (let round = 0; round < 3; round++) {
      const { id } = await node.orchestrator.create(REQUEST);
      const twenty = <T>(work: () => Promise<T>) => Promise.allSettled(Array.from({ length: 20 }, work));
      const pauses = await twenty(() => node.orchestrator.pause(id));
      for (const outcome of pauses) {
        if (outcome.status === "rejected") expect(outcome.reason).toMatchObject({ status: 409 });
      }
      expect(node.orchestrator.get(id).state).toBe("paused");
      const connects = await twenty(() => node.orchestrator.connect(id, 300));
      expect(connects.every(({ status }) => status === "fulfilled")).toBeTrue();
      expect(await node.sh(id, "echo one")).toBe("one");
      const pausing = node.orchestrator.pause(id).catch((error: unknown) => error);
      const kills = await twenty(() => node.orchestrator.kill(id));
      expect(kills.every(({ status }) => status === "fulfilled")).toBeTrue();
      await pausing;
      expect(() => node.orchestrator.get(id)).toThrow("was not found");
      expect(await leftovers(node)).toEqual([]);
      expect(readdirSync(join(home, "state/artifacts")).filter((name) => name !== "checkpoints")).toEqual([]);
    }
  }, 120_000);
});
