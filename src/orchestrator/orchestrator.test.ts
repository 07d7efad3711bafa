import { Database } from "bun:sqlite";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { eventually } from "../../tests/support/eventually.ts";
import { type FakeSandboxFactory, fakeState } from "../../tests/support/fake-sandboxes.ts";
import {
  createRequest,
  endAll,
  freshParts,
  generationsIn,
  testOptions,
} from "../../tests/support/orchestrator.ts";
import { AenvError } from "../lib/errors.ts";
import { newId } from "../lib/ids.ts";
import type { SnapshotRecord, SnapshotRepository } from "../snapshot/types.ts";
import { createOrchestrator, lockHome, lockRuntime } from "./index.ts";
import type { NodeOrchestrator } from "./types.ts";

let base: string;
let home: string;
let factory: FakeSandboxFactory;
let repository: SnapshotRepository;
let orchestrator: NodeOrchestrator;
let template: string;
let nowMs: number;
const opened: NodeOrchestrator[] = [];

beforeAll(() => {
  base = mkdtempSync("/tmp/orch-state-");
});
afterAll(() => rmSync(base, { recursive: true, force: true }));

function open(overrides: { transitionWaitMs?: number; evictIntervalMs?: number } = {}): NodeOrchestrator {
  const made = createOrchestrator({
    ...testOptions(home, { repository, sandboxes: factory }),
    now: () => nowMs,
    ...overrides,
  });
  opened.push(made);
  return made;
}

beforeEach(async () => {
  ({ home, factory, repository, template } = await freshParts(base));
  nowMs = Date.parse("2030-01-01T00:00:00Z");
  orchestrator = open();
  await orchestrator.start();
});

afterEach(async () => {
  await endAll(factory, opened);
});

const request = createRequest;

const generations = (id: string): string[] => generationsIn(home, id);

function persisted(): { id: string; lifecycle: string }[] {
  const db = new Database(join(home, "state.db"), { readonly: true });
  try {
    return db.query<{ id: string; lifecycle: string }, []>("SELECT id, lifecycle FROM sandboxes").all();
  } finally {
    db.close();
  }
}

const code = (error: unknown): string => (error instanceof AenvError ? error.code : String(error));
const codes = (outcomes: PromiseSettledResult<unknown>[]): string[] =>
  outcomes.map((outcome) => (outcome.status === "fulfilled" ? "ok" : code(outcome.reason)));

describe("create", () => {
  test("starts from an alias with the template's context, and says what it started", async () => {
    const record = await orchestrator.create(request());
    expect(record).toMatchObject({
      templateId: template,
      alias: "base",
      state: "running",
      timeoutSeconds: 300,
      startedAt: "2030-01-01T00:00:00.000Z",
      endAt: "2030-01-01T00:05:00.000Z",
      cpuCount: 1,
      diskSizeMiB: 1024,
      metadata: { who: "me" },
    });
    expect(factory.of(record.id)?.identity).toEqual({
      sandboxId: record.id,
      templateId: template,
      accessToken: orchestrator.accessToken(record.id),
      envVars: { A: "image", B: "request", C: "3" },
      defaultUser: "app",
      defaultWorkdir: "/srv",
    });
    expect(orchestrator.route(record.id)).toMatchObject({ kind: "ready", hostAddress: "127.0.0.1" });
    expect(orchestrator.access(record.id)).toEqual({ secure: true, allowPublicTraffic: true });
    expect(orchestrator.list()).toEqual([record]);
    expect(orchestrator.timings(record.id)).toEqual({ create: { total: 1 } });
  });

  test("unknown template 404, template without a ready build 400, bad timeouts 400, egress rules 400", async () => {
    await expect(orchestrator.create(request({ template: "nope" }))).rejects.toMatchObject({
      code: "template_not_found",
      status: 404,
    });
    const id = newId();
    const waiting: SnapshotRecord = {
      id,
      templateId: id,
      aliases: [],
      public: true,
      source: { kind: "template", build: { status: "building" } },
      resources: { cpuCount: 1, memoryMiB: 128, diskSizeMiB: 0 },
      createdAt: "x",
      updatedAt: "x",
    };
    await repository.put(waiting);
    await expect(orchestrator.create(request({ template: id }))).rejects.toMatchObject({
      code: "template_not_ready",
      status: 400,
    });
    for (const timeoutSeconds of [-1, 1.5, Number.NaN, 1e12]) {
      await expect(orchestrator.create(request({ timeoutSeconds }))).rejects.toMatchObject({
        code: "invalid_timeout",
        status: 400,
      });
    }
    for (const network of [
      { denyOut: ["example.com"] },
      { allowOut: ["example.com"] },
      { allowOut: ["1.2.3.4/40"] },
    ]) {
      await expect(orchestrator.create(request({ network }))).rejects.toMatchObject({
        code: "invalid_egress_policy",
        status: 400,
      });
    }
    expect(factory.starts).toBe(0);
  });

  test("egress rules are in force from the start, through pause, resume and fork, and are replaced whole", async () => {
    const rules = { base: "default", allowOut: ["1.2.3.4/32"], denyOut: ["0.0.0.0/0"] } as const;
    const { id } = await orchestrator.create(
      request({ network: { allowOut: ["1.2.3.4"], denyOut: ["0.0.0.0/0"], allowPublicTraffic: false } }),
    );
    expect(factory.of(id)?.egress).toEqual(rules);
    await orchestrator.pause(id);
    await orchestrator.resume(id, 300);
    expect(factory.of(id)?.egress).toEqual(rules);
    const [child] = await orchestrator.fork(id, { count: 1 });
    expect(factory.of("record" in child! ? child.record.id : "")?.egress).toEqual(rules);
    await orchestrator.updateNetwork(id, { allowInternetAccess: false });
    const closed = { base: "deny", allowOut: [], denyOut: [] } as const;
    expect(factory.of(id)?.egress).toEqual(closed);
    expect(orchestrator.get(id)).toMatchObject({
      network: { allowPublicTraffic: false },
      allowInternetAccess: false,
    });
    await orchestrator.pause(id);
    await expect(orchestrator.updateNetwork(id, {})).rejects.toMatchObject({ status: 409 });
    await orchestrator.resume(id, 300);
    expect(factory.of(id)?.egress).toEqual(closed);
    await expect(orchestrator.updateNetwork(id, { denyOut: ["x.y"] })).rejects.toMatchObject({ status: 400 });
    expect(factory.of(id)?.egress).toEqual(closed);
  });

  test("a failed start leaves nothing, names its cause and never appears in lists", async () => {
    factory.faults.resume = async () => {
      expect(orchestrator.list()).toEqual([]);
      throw new AenvError({
        code: "virtualization_mismatch",
        status: 409,
        message: "made under kvm",
        remediation: "use kvm",
      });
    };
    await expect(orchestrator.create(request())).rejects.toMatchObject({
      code: "virtualization_mismatch",
      status: 409,
      message: "no sandbox could be started from template base: made under kvm",
      remediation: "use kvm",
    });
    expect(orchestrator.list()).toEqual([]);
    expect(factory.live.size).toBe(0);
  });

  test("starts are limited, and the id of each is its own", async () => {
    const records = await Promise.all(Array.from({ length: 20 }, () => orchestrator.create(request())));
    expect(new Set(records.map((record) => record.id)).size).toBe(20);
    expect(factory.maxConcurrentStarts).toBe(4);
    expect(orchestrator.list()).toHaveLength(20);
  });
});

describe("pause and resume", () => {
  test("30 rounds: each resume continues from the last pause, and only the current capture is kept", async () => {
    const { id } = await orchestrator.create(request());
    for (let round = 1; round <= 30; round++) {
      await orchestrator.pause(id);
      expect(orchestrator.get(id).state).toBe("paused");
      expect(orchestrator.route(id)).toEqual({ kind: "paused", autoResume: false });
      expect(persisted()).toEqual([{ id, lifecycle: "paused" }]);
      expect(factory.live.size).toBe(0);
      await orchestrator.resume(id, 60);
      expect(factory.of(id)?.generation).toBe(round);
      expect(persisted()).toEqual([]);
    }
    await orchestrator.pause(id);
    await eventually("only the current capture is there", () => generations(id).length === 1);
  });

  test("paused sandboxes survive a server that was killed, also in the middle of a resume", async () => {
    const made = await orchestrator.create(request({ metadata: { k: "v" } }));
    await orchestrator.pause(made.id);
    const db = new Database(join(home, "state.db"));
    db.run("UPDATE sandboxes SET lifecycle = 'resuming'");
    db.close();
    const second = open();
    await second.start();
    expect(second.get(made.id)).toEqual({ ...made, state: "paused" });
    expect((await second.resume(made.id, 60)).state).toBe("running");
    expect(factory.of(made.id)?.generation).toBe(1);
    expect(factory.of(made.id)?.identity.accessToken).toBe(orchestrator.accessToken(made.id));
    expect(factory.of(made.id)?.identity.envVars).toEqual({ A: "image", B: "request", C: "3" });
  });

  test("the start sweeps captures nobody refers to and keeps those of a row it cannot read", async () => {
    const made = await orchestrator.create(request());
    await orchestrator.pause(made.id);
    const stranger = newId();
    const db = new Database(join(home, "state.db"));
    db.query("INSERT INTO sandboxes VALUES (?, 'paused', 'garbage')").run(stranger);
    db.close();
    fakeState(join(home, "artifacts", stranger, "gen"), 1);
    fakeState(join(home, "artifacts", newId(), "gen"), 1);
    fakeState(join(home, "artifacts", made.id, "half"), 1);
    const second = open();
    await second.start();
    expect(second.list().map((record) => record.id)).toEqual([made.id]);
    expect(readdirSync(join(home, "artifacts")).sort()).toEqual([made.id, stranger].sort());
    expect(generations(made.id)).toHaveLength(1);
    expect(persisted()).toHaveLength(2);
  });

  test("a failing capture: the error names the cause, the sandbox runs on and can be paused later", async () => {
    const { id } = await orchestrator.create(request());
    const route = orchestrator.route(id);
    factory.faults.capture = () => {
      throw Object.assign(new Error("ENOSPC: no space left on device, write"), { code: "ENOSPC" });
    };
    await expect(orchestrator.pause(id)).rejects.toMatchObject({
      code: "disk_full",
      status: 507,
      message: expect.stringContaining("no space left on device"),
    });
    expect(orchestrator.get(id).state).toBe("running");
    expect(factory.of(id)?.vcpusRun).toBeTrue();
    expect(factory.of(id)?.inits).toBe(2);
    // Its connections stood still and go on.
    expect(route.kind === "ready" && route.gone.aborted).toBeFalse();
    expect(orchestrator.route(id)).toMatchObject({ kind: "ready", gone: { aborted: false } });
    expect(generations(id)).toEqual([]);
    delete factory.faults.capture;
    await orchestrator.pause(id);
    expect(orchestrator.get(id).state).toBe("paused");
  });

  test("a terminal capture removes the sandbox and everything of it", async () => {
    const { id } = await orchestrator.create(request());
    factory.faults.capture = () => {
      throw new AenvError({ code: "capture_terminal", message: "the stack is gone" });
    };
    await expect(orchestrator.pause(id)).rejects.toMatchObject({ code: "capture_terminal", status: 500 });
    expect(() => orchestrator.get(id)).toThrow("was not found");
    expect(factory.live.size).toBe(0);
    expect(existsSync(join(home, "artifacts", id))).toBeFalse();
  });

  test("a record that cannot be stored: resumed in place; if that fails, too, the sandbox is gone", async () => {
    const first = await orchestrator.create(request());
    const second = await orchestrator.create(request());
    const db = new Database(join(home, "state.db"));
    db.run("CREATE TRIGGER refuse BEFORE INSERT ON sandboxes BEGIN SELECT RAISE(ABORT, 'no more rows'); END");
    await expect(orchestrator.pause(first.id)).rejects.toMatchObject({ code: "persistence_failed" });
    expect(orchestrator.get(first.id).state).toBe("running");
    expect(factory.of(first.id)?.vcpusRun).toBeTrue();
    factory.faults.resumeInPlace = () => {
      throw new Error("the VMM does not answer");
    };
    await expect(orchestrator.pause(second.id)).rejects.toMatchObject({ code: "capture_terminal" });
    expect(() => orchestrator.get(second.id)).toThrow("was not found");
    expect(factory.of(second.id)).toBeUndefined();
    db.run("DROP TRIGGER refuse");
    db.close();
  });

  test("a failing resume leaves it paused with everything intact; deletion works, others are not touched", async () => {
    const { id } = await orchestrator.create(request());
    const other = await orchestrator.create(request());
    await orchestrator.pause(id);
    factory.faults.resume = () => {
      throw new Error("layer is damaged");
    };
    await expect(orchestrator.resume(id, 60)).rejects.toMatchObject({
      code: "resume_failed",
      message: expect.stringContaining("layer is damaged"),
      remediation: expect.stringContaining("delete"),
    });
    expect(orchestrator.get(id).state).toBe("paused");
    expect(persisted()).toEqual([{ id, lifecycle: "paused" }]);
    expect(factory.of(id)).toBeUndefined();
    delete factory.faults.resume;
    await orchestrator.resume(id, 60);
    expect(factory.of(id)?.generation).toBe(1);
    await orchestrator.kill(id);
    expect(orchestrator.list().map((record) => record.id)).toEqual([other.id]);
  });

  test("a paused sandbox is deleted with its record and its files", async () => {
    const { id } = await orchestrator.create(request());
    await orchestrator.pause(id);
    await Promise.all([orchestrator.kill(id), orchestrator.kill(id)]);
    await expect(orchestrator.kill(id)).rejects.toMatchObject({ status: 404 });
    expect(persisted()).toEqual([]);
    expect(existsSync(join(home, "artifacts", id))).toBeFalse();
  });

  test("the answer to a call in the wrong state", async () => {
    const { id } = await orchestrator.create(request());
    await orchestrator.pause(id);
    await expect(orchestrator.pause(id)).rejects.toMatchObject({ status: 409 });
    await expect(orchestrator.setTimeout(id, 5)).rejects.toMatchObject({ status: 409 });
    await expect(orchestrator.refresh(id)).rejects.toMatchObject({ status: 409 });
    for (const call of [
      () => orchestrator.pause(newId()),
      () => orchestrator.resume(newId(), 1),
      () => orchestrator.connect(newId(), 1),
      () => orchestrator.kill(newId()),
      () => orchestrator.setTimeout(newId(), 1),
      () => orchestrator.autoResume(newId()),
    ]) {
      await expect(call()).rejects.toMatchObject({ code: "sandbox_not_found", status: 404 });
    }
    expect(orchestrator.route(newId())).toEqual({ kind: "not_found" });
    expect(orchestrator.access(newId())).toBeUndefined();
  });
});

describe("races", () => {
  test("20 pauses at once: one capture, everyone succeeds; a later one is told it is paused", async () => {
    const { id } = await orchestrator.create(request());
    const outcomes = await Promise.allSettled(Array.from({ length: 20 }, () => orchestrator.pause(id)));
    expect(codes(outcomes)).toEqual(Array.from({ length: 20 }, () => "ok"));
    expect(generations(id)).toHaveLength(1);
    await expect(orchestrator.pause(id)).rejects.toMatchObject({ code: "sandbox_state_conflict" });
  });

  test("20 connects at once to a paused sandbox: one VM, all succeed, one of them resumed it", async () => {
    const { id } = await orchestrator.create(request());
    await orchestrator.pause(id);
    const starts = factory.starts;
    const answers = await Promise.all(
      Array.from({ length: 20 }, (_, i) => orchestrator.connect(id, 100 + i)),
    );
    expect(factory.starts - starts).toBe(1);
    expect(answers.filter((answer) => answer.resumed)).toHaveLength(1);
    expect(orchestrator.get(id).endAt).toBe(new Date(nowMs + 119_000).toISOString());
  });

  test("20 resumes and auto-resumes at once share one start, and share its failure", async () => {
    const { id } = await orchestrator.create(request({ autoResume: true }));
    await orchestrator.pause(id);
    factory.faults.resume = () => {
      throw new Error("broken");
    };
    const all = (): Promise<unknown>[] => [
      ...Array.from({ length: 10 }, () => orchestrator.resume(id, 60)),
      ...Array.from({ length: 10 }, () => orchestrator.autoResume(id)),
    ];
    const failed = await Promise.allSettled(all());
    expect(new Set(codes(failed))).toEqual(new Set(["resume_failed", "auto_resume_failed"]));
    delete factory.faults.resume;
    const starts = factory.starts;
    expect(new Set(codes(await Promise.allSettled(all())))).toEqual(new Set(["ok"]));
    expect(factory.starts - starts).toBe(1);
  });

  test("kill during pause, resume and pause+connect storms: it ends gone, with nothing left, 30 times", async () => {
    for (let round = 0; round < 30; round++) {
      const { id } = await orchestrator.create(request());
      const calls: Promise<unknown>[] = [orchestrator.pause(id)];
      await Bun.sleep(round % 6);
      calls.push(orchestrator.connect(id, 60), orchestrator.resume(id, 60));
      await Bun.sleep(round % 4);
      calls.push(orchestrator.kill(id), orchestrator.kill(id), orchestrator.pause(id), orchestrator.kill(id));
      const outcomes = codes(await Promise.allSettled(calls));
      expect(outcomes.slice(3).filter((_, i) => i !== 2)).toEqual(["ok", "ok", "ok"]);
      for (const outcome of outcomes) {
        expect(["ok", "sandbox_not_found", "sandbox_state_conflict"]).toContain(outcome);
      }
      expect(() => orchestrator.get(id)).toThrow("was not found");
      expect(factory.live.size).toBe(0);
      expect(existsSync(join(home, "artifacts", id))).toBeFalse();
    }
    expect(persisted()).toEqual([]);
  });

  test("a random storm on 5 sandboxes never has two VMs, never hangs and never lies", async () => {
    const ids = await Promise.all(
      Array.from({ length: 5 }, async () => (await orchestrator.create(request())).id),
    );
    let seed = 12345;
    const random = (n: number): number => {
      seed = (seed * 1103515245 + 12345) & 0x7fffffff;
      return (seed >> 8) % n;
    };
    factory.faults.capture = () => {
      if (random(5) === 0) throw new Error("capture failed");
    };
    factory.faults.resume = () => {
      if (random(5) === 0) throw new Error("resume failed");
    };
    const calls: Promise<string>[] = [];
    for (let i = 0; i < 400; i++) {
      const id = ids[random(ids.length)]!;
      const call = [
        () => orchestrator.pause(id),
        () => orchestrator.resume(id, 60),
        () => orchestrator.connect(id, 60),
        () => orchestrator.setTimeout(id, 60),
      ][random(4)]!;
      calls.push(call().then(() => "ok", code));
      if (random(8) === 0) await Bun.sleep(1);
      for (const check of ids) factory.of(check);
    }
    const outcomes = new Set(await Promise.all(calls));
    for (const outcome of outcomes) {
      expect(["ok", "sandbox_state_conflict", "pause_failed", "resume_failed"]).toContain(outcome);
    }
    for (const id of ids) {
      const running = factory.of(id) !== undefined;
      expect(orchestrator.get(id).state).toBe(running ? "running" : "paused");
      expect(orchestrator.route(id).kind).toBe(running ? "ready" : "paused");
      expect(persisted().some((row) => row.id === id)).toBe(!running);
    }
  });

  test("a transition that does not end in time: waiting callers get 409, the work goes on", async () => {
    const slow = open({ transitionWaitMs: 30 });
    await slow.start();
    const { id } = await slow.create(request());
    const go = Promise.withResolvers<void>();
    factory.faults.capture = () => go.promise;
    const pause = slow.pause(id);
    const waiting = await Promise.allSettled([slow.kill(id), slow.connect(id, 10), slow.resume(id, 10)]);
    expect(codes(waiting)).toEqual(Array.from({ length: 3 }, () => "sandbox_state_conflict"));
    expect(slow.get(id).state).toBe("pausing");
    go.resolve();
    await pause;
    expect(slow.get(id).state).toBe("paused");
  });
});

describe("death of a VM", () => {
  test("under a running sandbox: gone, connections cut, nothing left", async () => {
    const { id } = await orchestrator.create(request());
    const route = orchestrator.route(id);
    factory.of(id)!.die();
    await eventually("gone", () => orchestrator.route(id).kind === "not_found");
    expect(() => orchestrator.get(id)).toThrow("was not found");
    expect(route.kind === "ready" && route.gone.aborted).toBeTrue();
    await eventually("nothing left", () => factory.live.size === 0);
  });

  test("during a pause: the pause fails, the sandbox is gone", async () => {
    const { id } = await orchestrator.create(request());
    factory.faults.capture = () => factory.of(id)?.die();
    await expect(orchestrator.pause(id)).rejects.toMatchObject({ code: "capture_terminal" });
    expect(() => orchestrator.get(id)).toThrow("was not found");
  });

  test("a stop that fails: the sandbox runs on, is routed, and can be deleted later", async () => {
    const { id } = await orchestrator.create(request());
    factory.faults.stop = () => {
      throw new Error("SIGKILL has no effect");
    };
    await expect(orchestrator.kill(id)).rejects.toMatchObject({ code: "sandbox_stop_failed" });
    expect(orchestrator.route(id)).toMatchObject({ kind: "ready", gone: { aborted: false } });
    delete factory.faults.stop;
    await orchestrator.kill(id);
    expect(orchestrator.list()).toEqual([]);
  });
});

describe("deadlines", () => {
  const ends = (id: string): number => (Date.parse(orchestrator.get(id).endAt) - nowMs) / 1000;

  test("connect and refresh only extend, set-timeout and resume set", async () => {
    const { id } = await orchestrator.create(request({ timeoutSeconds: 1800 }));
    await orchestrator.connect(id, 60);
    expect(ends(id)).toBe(1800);
    await orchestrator.connect(id, 3600);
    expect(ends(id)).toBe(3600);
    await orchestrator.setTimeout(id, 60);
    expect(ends(id)).toBe(60);
    await orchestrator.refresh(id, 30);
    expect(ends(id)).toBe(60);
    await orchestrator.refresh(id, 90);
    expect(ends(id)).toBe(90);
    await orchestrator.resume(id, 20);
    expect(ends(id)).toBe(20);
    await orchestrator.refresh(id);
    expect(ends(id)).toBe(20);
  });

  test("time spent paused and resuming does not count", async () => {
    const { id } = await orchestrator.create(request({ timeoutSeconds: 120 }));
    await orchestrator.pause(id);
    nowMs += 180_000;
    factory.faults.resume = () => {
      nowMs += 40_000;
    };
    await orchestrator.resume(id, 300);
    expect(ends(id)).toBe(300);
  });

  test("an expired sandbox is paused or deleted as it was asked for; paused ones never expire", async () => {
    const paused = await orchestrator.create(request({ timeoutSeconds: 10 }));
    const killed = await orchestrator.create(request({ timeoutSeconds: 10, onTimeout: "kill" }));
    const kept = await orchestrator.create(request({ timeoutSeconds: 100 }));
    nowMs += 11_000;
    await eventually(
      "one is paused, one is gone",
      () => orchestrator.get(paused.id).state === "paused" && orchestrator.list().length === 2,
    );
    expect(orchestrator.list().map((record) => [record.id, record.state])).toEqual([
      [paused.id, "paused"],
      [kept.id, "running"],
    ]);
    expect(() => orchestrator.get(killed.id)).toThrow("was not found");
    nowMs += 50_000;
    await Bun.sleep(30);
    expect(orchestrator.get(paused.id).state).toBe("paused");
  });

  test("timeout 0 expires at once; a failing eviction is tried again after a pause", async () => {
    let attempts = 0;
    factory.faults.capture = () => {
      attempts += 1;
      if (attempts < 3) throw new Error("not now");
    };
    const { id } = await orchestrator.create(request({ timeoutSeconds: 0 }));
    await eventually("paused", () => {
      nowMs += 10;
      return orchestrator.get(id).state === "paused";
    });
    expect(attempts).toBe(3);
  });

  test("auto-resume only where it was asked for, with its minimum time to live", async () => {
    const plain = await orchestrator.create(request());
    const waking = await orchestrator.create(request({ autoResume: true, timeoutSeconds: 20 }));
    await orchestrator.pause(plain.id);
    await orchestrator.pause(waking.id);
    await expect(orchestrator.autoResume(plain.id)).rejects.toMatchObject({
      code: "sandbox_paused",
      status: 410,
    });
    expect(orchestrator.route(waking.id)).toEqual({ kind: "paused", autoResume: true });
    await orchestrator.autoResume(waking.id);
    expect(ends(waking.id)).toBe(60);
    expect(orchestrator.route(waking.id).kind).toBe("ready");
    expect(orchestrator.get(plain.id).state).toBe("paused");
  });
});

describe("shutdown and home", () => {
  test("pauses everything, waits for what is under way, refuses new work, and the next server has it all", async () => {
    const records = await Promise.all(Array.from({ length: 6 }, () => orchestrator.create(request())));
    const pausing = orchestrator.pause(records[0]!.id);
    const creating = orchestrator.create(request()).catch((error: unknown) => code(error));
    const done = Promise.all([orchestrator.shutdown(), orchestrator.shutdown()]);
    await expect(orchestrator.create(request())).rejects.toMatchObject({
      code: "shutting_down",
      status: 503,
    });
    await expect(orchestrator.kill(records[0]!.id)).rejects.toMatchObject({ status: 503 });
    await done;
    await pausing;
    expect(await creating).toBe("shutting_down");
    expect(factory.live.size).toBe(0);
    const second = open();
    await second.start();
    expect(
      second
        .list()
        .map((record) => [record.id, record.state])
        .sort(),
    ).toEqual(records.map((record) => [record.id, "paused"]).sort());
  });

  test("a sandbox that cannot be paused is named at the end, after all others were", async () => {
    const stuck = await orchestrator.create(request());
    const fine = await orchestrator.create(request());
    factory.faults.capture = () => {
      if (factory.of(stuck.id)?.vcpusRun === false) throw new Error("no");
    };
    await expect(orchestrator.shutdown()).rejects.toThrow(stuck.id);
    expect(persisted().map((row) => row.id)).toEqual([fine.id]);
    await factory.of(stuck.id)?.stop();
    opened.splice(opened.indexOf(orchestrator), 1);
  });

  test("garbage collection keeps what running and paused sandboxes use", async () => {
    const running = await orchestrator.create(request());
    await repository.delete(template);
    expect((await orchestrator.collectGarbage()).removedFiles).toBe(0);
    await orchestrator.kill(running.id);
    expect((await orchestrator.collectGarbage()).removedFiles).toBe(2);
  });

  test("one home, one server: the second is told who has it; a dead owner's lock is free", async () => {
    const lock = lockHome(home);
    expect(() => lockHome(home)).toThrow(`process ${process.pid}`);
    lock[Symbol.dispose]();
    const script = `import { lockHome } from ${JSON.stringify(join(import.meta.dir, "home.ts"))};
      lockHome(${JSON.stringify(home)}); console.log("locked"); await Bun.sleep(30_000);`;
    const child = Bun.spawn([process.execPath, "-e", script], { stdout: "pipe" });
    await child.stdout.getReader().read();
    expect(() => lockHome(home)).toThrow(`process ${child.pid}`);
    child.kill("SIGKILL");
    await child.exited;
    lockHome(home)[Symbol.dispose]();
    using _ = lockRuntime(home);
    expect(() => lockRuntime(home)).toThrow(`${home} is in use by another server (process ${process.pid})`);
  });
});
