import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import {
  existsSync,
  mkdtempSync,
  readdirSync,
  renameSync,
  rmSync,
  truncateSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { eventually } from "../../tests/support/eventually.ts";
import { type FakeSandboxFactory, fakeState } from "../../tests/support/fake-sandboxes.ts";
import {
  addTemplate,
  createRequest,
  endAll,
  freshParts,
  testOptions,
} from "../../tests/support/orchestrator.ts";
import { AenvError } from "../lib/errors.ts";
import { newId } from "../lib/ids.ts";
import type { SnapshotRepository } from "../snapshot/types.ts";
import {
  admitted,
  createOrchestrator,
  hasTokenProtectedSandboxes,
  type OrchestratorOptions,
} from "./index.ts";
import type { CreateSandboxRequest, LifecycleEvent, NodeOrchestrator } from "./types.ts";

/* Fork, snapshot, adoption, capacity and health, with VMs that fail on demand. */

let base: string;
let home: string;
let factory: FakeSandboxFactory;
let repository: SnapshotRepository;
let orchestrator: NodeOrchestrator;
let nowMs: number;
let events: LifecycleEvent[];
const opened: NodeOrchestrator[] = [];
/** Killed servers: their clocks stand still. */
const dead = new Set<NodeOrchestrator>();

beforeAll(() => {
  base = mkdtempSync("/tmp/life-orch-");
});
afterAll(() => rmSync(base, { recursive: true, force: true }));

function open(overrides: Partial<OrchestratorOptions> = {}): NodeOrchestrator {
  const made: NodeOrchestrator = createOrchestrator({
    ...testOptions(home, { repository, sandboxes: factory }),
    now: () => (dead.has(made) ? 0 : nowMs),
    onEvent: (event) => events.push(event),
    ...overrides,
  });
  opened.push(made);
  return made;
}

beforeEach(async () => {
  ({ home, factory, repository } = await freshParts(base));
  nowMs = Date.parse("2030-01-01T00:00:00Z");
  events = [];
  orchestrator = open();
  await orchestrator.start();
});

afterEach(async () => {
  await endAll(factory, opened);
  expect(checkpoints()).toEqual([]);
});

const request = (changes: Partial<CreateSandboxRequest> = {}): CreateSandboxRequest =>
  createRequest({ autoResume: true, ...changes });

function checkpoints(): string[] {
  const dir = join(home, "artifacts", "checkpoints");
  return existsSync(dir) ? readdirSync(dir) : [];
}

/** As kill -9 does: nothing of it runs on but its VMs. */
function abandon(made: NodeOrchestrator): void {
  opened.splice(opened.indexOf(made), 1);
  dead.add(made);
  factory.orphan();
}

const code = (error: unknown): string => (error instanceof AenvError ? error.code : String(error));

describe("fork", () => {
  test("children continue from the source's moment with an identity of their own; the source goes on", async () => {
    const source = await orchestrator.create(request());
    const route = orchestrator.route(source.id);
    const outcomes = await orchestrator.fork(source.id, { count: 10 });
    const children = outcomes.map((outcome) => {
      if ("error" in outcome) throw outcome.error;
      return outcome.record;
    });
    expect(new Set([source.id, ...children.map(({ id }) => id)]).size).toBe(11);
    expect(factory.maxConcurrentStarts).toBe(4);
    for (const child of children) {
      expect(child).toEqual({ ...source, id: child.id, state: "running" });
      const vm = factory.of(child.id)!;
      expect(vm.generation).toBe(1);
      expect(vm.identity).toMatchObject({
        sandboxId: child.id,
        accessToken: orchestrator.accessToken(child.id),
        envVars: { A: "image", B: "request", C: "3" },
      });
    }
    expect(orchestrator.get(source.id)).toEqual(source);
    // Its clock was set and its connections stay.
    expect(factory.of(source.id)!.inits).toBe(2);
    expect(route.kind === "ready" && route.gone.aborted).toBeFalse();
    expect(orchestrator.timings(source.id).fork).toMatchObject({ stopped: 1 });
    expect(events.filter(({ kind }) => kind === "forked")).toHaveLength(10);
    const ids = children.map(({ id }) => id).join(" ");
    expect(events.at(-1)).toMatchObject({
      ...{ kind: "copied", sandboxId: source.id, durationMs: expect.any(Number) },
      reason: `10 of 10 children run: ${ids}`,
    });
  });

  test("the children's time to live is the request's, else the source's, from now", async () => {
    const { id } = await orchestrator.create(request({ timeoutSeconds: 120 }));
    nowMs += 100_000;
    const ends = async (timeoutSeconds?: number): Promise<number> => {
      const [outcome] = await orchestrator.fork(id, {
        count: 1,
        ...(timeoutSeconds === undefined ? {} : { timeoutSeconds }),
      });
      return "record" in outcome! ? (Date.parse(outcome.record.endAt) - nowMs) / 1000 : Number.NaN;
    };
    expect(await ends()).toBe(120);
    expect(await ends(7)).toBe(7);
    expect(orchestrator.get(id).endAt).toBe("2030-01-01T00:02:00.000Z");
  });

  test("each child fails by itself, with a typed error, and leaves nothing", async () => {
    orchestrator = open({ capacity: { memoryMiB: 128 * 7 } });
    await orchestrator.start();
    const { id } = await orchestrator.create(request());
    const outcomes = await orchestrator.fork(id, { count: 10 });
    expect(outcomes.map((outcome) => ("record" in outcome ? "ok" : code(outcome.error)))).toEqual([
      ...Array<string>(6).fill("ok"),
      ...Array<string>(4).fill("capacity_unavailable"),
    ]);
    expect(orchestrator.list()).toHaveLength(7);
    expect(events.at(-1)!.reason).toStartWith("6 of 10 children run: ");
    let starts = 0;
    factory.faults.resume = () => {
      if (++starts === 2) throw new Error("no luck");
    };
    for (const { id: other } of orchestrator.list()) if (other !== id) await orchestrator.kill(other);
    const next = await orchestrator.fork(id, { count: 3 });
    expect(next.filter((outcome) => "record" in outcome)).toHaveLength(2);
    expect(orchestrator.get(id).state).toBe("running");
  });

  test("bad counts and states are refused; a failed capture leaves the source running", async () => {
    const { id } = await orchestrator.create(request());
    for (const count of [0, -1, 101, 1.5, Number.NaN]) {
      await expect(orchestrator.fork(id, { count })).rejects.toMatchObject({
        code: "invalid_count",
        status: 400,
      });
    }
    await expect(orchestrator.fork(newId(), { count: 1 })).rejects.toMatchObject({ status: 404 });
    factory.faults.capture = () => {
      throw new Error("ENOSPC: no space left on device");
    };
    await expect(orchestrator.fork(id, { count: 2 })).rejects.toMatchObject({
      code: "disk_full",
      status: 507,
    });
    expect(orchestrator.get(id).state).toBe("running");
    expect(orchestrator.list()).toHaveLength(1);
    delete factory.faults.capture;
    const forking = orchestrator.fork(id, { count: 1 });
    expect(orchestrator.get(id).state).toBe("forking");
    await expect(orchestrator.pause(id)).rejects.toMatchObject({ status: 409 });
    await expect(orchestrator.fork(id, { count: 1 })).rejects.toMatchObject({ status: 409 });
    expect(orchestrator.route(id).kind).toBe("ready");
    await forking;
    await orchestrator.pause(id);
    await expect(orchestrator.fork(id, { count: 1 })).rejects.toMatchObject({
      status: 409,
      remediation: `resume it with: aenv resume ${id}`,
    });
  });

  test("a source that does not run again is gone, and says so", async () => {
    const { id } = await orchestrator.create(request());
    factory.faults.resumeInPlace = () => {
      throw new Error("the VMM does not answer");
    };
    await expect(orchestrator.fork(id, { count: 2 })).rejects.toMatchObject({ code: "capture_terminal" });
    expect(orchestrator.list()).toEqual([]);
  });

  test("the source may be killed while its children start", async () => {
    const { id } = await orchestrator.create(request());
    let killed: Promise<void> | undefined;
    factory.faults.resume = () => {
      killed ??= orchestrator.kill(id);
    };
    const outcomes = await orchestrator.fork(id, { count: 3 });
    await killed;
    expect(outcomes.every((outcome) => "record" in outcome)).toBeTrue();
    expect(orchestrator.list()).toHaveLength(3);
    // Its log ended with it.
    expect(events.filter(({ sandboxId }) => sandboxId === id).at(-1)?.kind).toBe("deleted");
  });
});

describe("snapshot", () => {
  test("a snapshot starts sandboxes that continue from it, with what the source was given", async () => {
    const source = await orchestrator.create(request());
    const made = await orchestrator.snapshot(source.id, { name: "point" });
    expect(made).toMatchObject({
      templateId: made.id,
      aliases: ["point"],
      source: { kind: "sandbox", sourceSandboxId: source.id },
      resources: { cpuCount: 1, memoryMiB: 128 },
      committed: {
        context: {
          envVars: { A: "image", B: "request", C: "3" },
          workdir: "/srv",
          user: "app",
          entrypoint: ["/entry"],
          exposedPorts: ["80/tcp"],
          labels: { of: "image" },
        },
        imageReference: "host/repo@sha256:0",
      },
    });
    expect(orchestrator.get(source.id)).toEqual(source);
    expect(orchestrator.timings(source.id).snapshot).toMatchObject({ stopped: 1 });
    await orchestrator.kill(source.id);
    for (const template of [made.id, `${made.id}:default`, "point", "ns/point", "point:default"]) {
      const record = await orchestrator.create(request({ template, envVars: { B: "again" } }));
      expect(record).toMatchObject({ templateId: made.id, alias: "point" });
      expect(factory.of(record.id)).toMatchObject({
        generation: 1,
        identity: { envVars: { A: "image", B: "again", C: "3" } },
      });
    }
    expect(events.map(({ kind }) => kind)).toContain("snapshotted");
  });

  test("listed newest first, by source and by name; templates are no snapshots", async () => {
    const one = await orchestrator.create(request());
    const two = await orchestrator.create(request());
    const made = [];
    for (const [id, name] of [
      [one.id, "first"],
      [two.id, undefined],
      [one.id, undefined],
    ] as const) {
      nowMs += 1000;
      made.push((await orchestrator.snapshot(id, name === undefined ? {} : { name })).id);
    }
    const ids = async (filter: Parameters<NodeOrchestrator["listSnapshots"]>[0]): Promise<string[]> =>
      (await orchestrator.listSnapshots(filter)).map(({ id }) => id);
    expect(await ids({})).toEqual(made.toReversed());
    await orchestrator.kill(one.id);
    expect(await ids({ sandboxId: one.id })).toEqual([made[2]!, made[0]!]);
    expect(await ids({ name: "ns/first:default" })).toEqual([made[0]!]);
    expect(await ids({ name: made[1]! })).toEqual([made[1]!]);
    expect(await ids({ name: "base" })).toEqual([]);
    expect(await ids({ name: "no/such/name" })).toEqual([]);
    expect((await orchestrator.getSnapshot("first")).id).toBe(made[0]!);
    for (const name of ["base", newId(), "nothing"]) {
      await expect(orchestrator.getSnapshot(name)).rejects.toMatchObject({
        code: "snapshot_not_found",
        status: 404,
      });
    }
  });

  test("names: invalid and a template's are refused before the guest stands still; a snapshot's is taken over", async () => {
    const { id } = await orchestrator.create(request());
    let captures = 0;
    factory.faults.capture = () => {
      captures += 1;
    };
    await expect(orchestrator.snapshot(id, { name: "a b" })).rejects.toMatchObject({
      code: "invalid_alias",
      status: 400,
    });
    await expect(orchestrator.snapshot(id, { name: "base" })).rejects.toMatchObject({
      code: "alias_conflict",
      status: 400,
    });
    expect(captures).toBe(0);
    const first = await orchestrator.snapshot(id, { name: "mine" });
    const second = await orchestrator.snapshot(id, { name: "mine" });
    expect((await orchestrator.getSnapshot("mine")).id).toBe(second.id);
    expect((await orchestrator.getSnapshot(first.id)).aliases).toEqual([]);
    // Taken by a template while the capture was under way: nothing stays of the snapshot.
    factory.faults.capture = async () => void (await addTemplate(repository, home, "late"));
    await expect(orchestrator.snapshot(id, { name: "late" })).rejects.toMatchObject({ status: 400 });
    expect(await orchestrator.listSnapshots({})).toHaveLength(2);
    expect(orchestrator.get(id).state).toBe("running");
  });

  test("chains of restored snapshots, and several of one source, keep apart", async () => {
    let { id } = await orchestrator.create(request());
    for (let generation = 1; generation <= 12; generation++) {
      const made = await orchestrator.snapshot(id, {});
      await orchestrator.kill(id);
      ({ id } = await orchestrator.create(request({ template: made.id })));
      expect(factory.of(id)?.generation).toBe(generation);
    }
    const again = await Promise.allSettled([orchestrator.snapshot(id, {}), orchestrator.snapshot(id, {})]);
    expect(again.map(({ status }) => status).sort()).toEqual(["fulfilled", "rejected"]);
  });

  test("a deleted snapshot is unknown, and its layers go when nobody uses them", async () => {
    const { id } = await orchestrator.create(request());
    const made = await orchestrator.snapshot(id, { name: "gone" });
    const child = await orchestrator.create(request({ template: made.id }));
    await repository.delete(made.id);
    expect((await orchestrator.collectGarbage()).removedFiles).toBe(0);
    await expect(orchestrator.getSnapshot("gone")).rejects.toMatchObject({ status: 404 });
    await orchestrator.kill(child.id);
    expect((await orchestrator.collectGarbage()).removedFiles).toBe(2);
  });
});

describe("adoption", () => {
  test("running sandboxes of a killed server are found with deadline, metadata and tokens, and go on", async () => {
    const origin = { key: "POST /x 1", fingerprint: "f" };
    const plain = await orchestrator.create(request({ metadata: { n: "1" }, origin }));
    const moved = await orchestrator.create(request());
    await orchestrator.setTimeout(moved.id, 50);
    await orchestrator.connect(moved.id, 40);
    const cycled = await orchestrator.create(request({ secure: false }));
    await orchestrator.pause(cycled.id);
    await orchestrator.resume(cycled.id, 77);
    const paused = await orchestrator.create(request());
    await orchestrator.pause(paused.id);
    const killed = await orchestrator.create(request());
    await orchestrator.kill(killed.id);
    const [fork] = await orchestrator.fork(plain.id, { count: 1 });
    if (!("record" in fork!)) throw new Error("no child");
    // Its request was another one.
    expect(fork.record.origin).toBeUndefined();
    const before = orchestrator.list();
    abandon(orchestrator);
    expect(hasTokenProtectedSandboxes(join(home, "state.db"))).toBeTrue();
    const next = open();
    expect(await next.start()).toEqual({ paused: 1, adopted: 4, lost: [] });
    const sorted = (records: typeof before) => records.toSorted((a, b) => (a.id < b.id ? -1 : 1));
    expect(sorted(next.list())).toEqual(sorted(before));
    expect(next.get(plain.id).origin).toEqual(origin);
    expect(next.get(moved.id).endAt).toBe(new Date(nowMs + 50_000).toISOString());
    expect(factory.of(plain.id)?.identity.accessToken).toBe(next.accessToken(plain.id));
    expect(next.route(plain.id).kind).toBe("ready");
    await next.pause(plain.id);
    await next.resume(plain.id, 60);
    expect(factory.of(plain.id)?.generation).toBe(2);
    await next.kill(fork.record.id);
    await repository.delete("base");
    expect((await next.collectGarbage()).removedFiles).toBe(0);
  });

  test("what ended meanwhile is reported, and its record is gone for good", async () => {
    const alive = await orchestrator.create(request());
    const dead = await orchestrator.create(request());
    factory.of(dead.id)!.die();
    // The server was killed before it noticed.
    abandon(orchestrator);
    await Bun.sleep(1);
    const next = open();
    const report = await next.start();
    expect(report).toMatchObject({ adopted: 1 });
    expect(next.list().map(({ id }) => id)).toEqual([alive.id]);
    expect(
      events.filter(({ kind, sandboxId }) => kind === "lost" && sandboxId === dead.id).length,
    ).toBeGreaterThan(0);
    abandon(next);
    expect(await open().start()).toMatchObject({ adopted: 1, lost: [] });
  });

  test("a VM that does not answer at first is tried again; an adopted one expires as it would have", async () => {
    const made = await orchestrator.create(request({ onTimeout: "kill" }));
    abandon(orchestrator);
    let tries = 0;
    factory.faults.adopt = () => {
      if (++tries < 3) throw new AenvError({ code: "vm_unreachable", message: "busy" });
    };
    const next = open();
    expect(await next.start()).toMatchObject({ adopted: 1 });
    expect(tries).toBe(3);
    nowMs += 301_000;
    await eventually("expired", () => factory.of(made.id) === undefined && next.list().length === 0);
  });

  test("a killed server's checkpoints are swept", async () => {
    const { id } = await orchestrator.create(request());
    fakeState(join(home, "artifacts", "checkpoints", newId()), 1);
    abandon(orchestrator);
    const next = open();
    await next.start();
    expect(checkpoints()).toEqual([]);
    expect(next.get(id).state).toBe("running");
  });

  test("a record that cannot be written fails the create and the new deadline, and nothing else", async () => {
    const made = await orchestrator.create(request());
    const { Database } = await import("bun:sqlite");
    using db = new Database(join(home, "state.db"));
    db.run("CREATE TRIGGER refuse BEFORE INSERT ON running BEGIN SELECT RAISE(ABORT, 'no more rows'); END");
    await expect(orchestrator.create(request())).rejects.toMatchObject({ code: "persistence_failed" });
    await expect(orchestrator.setTimeout(made.id, 10)).rejects.toMatchObject({ code: "persistence_failed" });
    expect(orchestrator.list()).toEqual([made]);
    await orchestrator.pause(made.id);
    await expect(orchestrator.resume(made.id, 10)).rejects.toMatchObject({ code: "persistence_failed" });
    expect(orchestrator.get(made.id)).toEqual({ ...made, state: "paused" });
    db.run("DROP TRIGGER refuse");
    expect(await orchestrator.resume(made.id, 300)).toEqual(made);
    expect(factory.of(made.id)?.generation).toBe(1);
  });
});

describe("what each state answers", () => {
  const calls = {
    get: (id: string) => orchestrator.get(id),
    pause: (id: string) => orchestrator.pause(id),
    resume: (id: string) => orchestrator.resume(id, 60),
    connect: (id: string) => orchestrator.connect(id, 60),
    timeout: (id: string) => orchestrator.setTimeout(id, 60),
    refresh: (id: string) => orchestrator.refresh(id, 60),
    network: (id: string) => orchestrator.updateNetwork(id, {}),
    snapshot: (id: string) => orchestrator.snapshot(id, {}),
    fork: (id: string) => orchestrator.fork(id, { count: 1 }),
  };
  type Call = keyof typeof calls;

  /** Status of every call that answers at once; 200 for any success. */
  async function answers(id: string, which: readonly Call[]): Promise<Partial<Record<Call, number>>> {
    const result: Partial<Record<Call, number>> = {};
    for (const name of which) {
      result[name] = await (async () => calls[name](id))().then(
        () => 200,
        (error: unknown) => (error instanceof AenvError ? error.status : 500),
      );
    }
    return result;
  }

  /** Stops the operation that `begin` starts in its middle, asks, and lets it end. */
  async function during(
    part: "resume" | "capture" | "stop",
    begin: () => Promise<unknown>,
    ask: () => Promise<void>,
  ): Promise<void> {
    const { promise: go, resolve: release } = Promise.withResolvers<void>();
    const { promise: reached, resolve: arrived } = Promise.withResolvers<void>();
    factory.faults[part] = () => {
      arrived();
      return go;
    };
    const operation = begin();
    await reached;
    try {
      await ask();
    } finally {
      delete factory.faults[part];
      release();
    }
    await operation;
  }

  test("the calls that do not wait, in every state", async () => {
    const changes = { network: 409, snapshot: 409, fork: 409 } as const;
    const asked: Call[] = ["get", "pause", "resume", "network", "snapshot", "fork"];
    await during(
      "resume",
      () => orchestrator.create(request()),
      async () => {
        const id = events.findLast(({ kind }) => kind === "creating")!.sandboxId;
        expect(await answers(id, asked)).toEqual({ get: 200, pause: 409, resume: 409, ...changes });
        expect(orchestrator.list()).toEqual([]);
      },
    );
    const { id } = orchestrator.list()[0]!;
    for (const begin of [
      () => orchestrator.snapshot(id, {}),
      () =>
        orchestrator
          .fork(id, { count: 1 })
          .then(([child]) => orchestrator.kill((child as { record: { id: string } }).record.id)),
    ]) {
      await during("capture", begin, async () => {
        expect(await answers(id, asked)).toEqual({ get: 200, pause: 409, resume: 409, ...changes });
      });
    }
    await during(
      "capture",
      () => orchestrator.pause(id),
      async () => {
        expect(await answers(id, ["get", "timeout", "refresh", "network", "snapshot", "fork"])).toEqual({
          ...{ get: 200, timeout: 409, refresh: 409 },
          ...changes,
        });
      },
    );
    expect(await answers(id, ["get", "pause", "timeout", "refresh", "network", "snapshot", "fork"])).toEqual({
      ...{ get: 200, pause: 409, timeout: 409, refresh: 409 },
      ...changes,
    });
    await during(
      "resume",
      () => orchestrator.resume(id, 60),
      async () => {
        expect(await answers(id, ["get", "pause", "network", "snapshot", "fork"])).toEqual({
          ...{ get: 200, pause: 409 },
          ...changes,
        });
      },
    );
    const all = Object.keys(calls) as Call[];
    const gone = Object.fromEntries(all.map((name) => [name, 404]));
    await during(
      "stop",
      () => orchestrator.kill(id),
      async () => {
        // A change of what it is doing meets a sandbox on its way out; everything else meets none.
        expect(await answers(id, all)).toEqual({ ...gone, network: 409, fork: 409 });
        expect(orchestrator.list()).toEqual([]);
      },
    );
    expect(await answers(id, all)).toEqual(gone);
  });
});

describe("a network that is changed while something else happens", () => {
  const CLOSED = { base: "default", allowOut: [], denyOut: ["0.0.0.0/0"] } as const;
  let entered: PromiseWithResolvers<void>;
  let applied: PromiseWithResolvers<void>;

  beforeEach(() => {
    entered = Promise.withResolvers();
    applied = Promise.withResolvers();
    factory.faults.applyEgress = () => {
      entered.resolve();
      return applied.promise;
    };
  });

  test("a snapshot of it: told, in force and recorded are the same", async () => {
    const { id } = await orchestrator.create(createRequest());
    const updated = orchestrator.updateNetwork(id, { denyOut: ["0.0.0.0/0"] });
    await entered.promise;
    const made = orchestrator.snapshot(id, {});
    applied.resolve();
    await updated;
    await made;
    expect(factory.of(id)?.egress).toEqual(CLOSED);
    expect(orchestrator.get(id).network).toEqual({ denyOut: ["0.0.0.0/0"] });
  });

  test("a pause waits for it and keeps it", async () => {
    const { id } = await orchestrator.create(createRequest());
    const updated = orchestrator.updateNetwork(id, { denyOut: ["0.0.0.0/0"] });
    await entered.promise;
    const paused = orchestrator.pause(id);
    await Bun.sleep(5);
    expect(orchestrator.get(id).state).toBe("pausing");
    applied.resolve();
    await updated;
    await paused;
    await orchestrator.resume(id, 60);
    expect(factory.of(id)?.egress).toEqual(CLOSED);
  });

  test("two changes at once: one after the other, the later one stays", async () => {
    const { id } = await orchestrator.create(createRequest());
    const first = orchestrator.updateNetwork(id, { denyOut: ["1.1.1.1"] });
    const second = orchestrator.updateNetwork(id, { denyOut: ["0.0.0.0/0"] });
    await entered.promise;
    applied.resolve();
    await Promise.all([first, second]);
    expect(factory.of(id)?.egress).toEqual(CLOSED);
    expect(orchestrator.get(id).network).toEqual({ denyOut: ["0.0.0.0/0"] });
  });

  test("what cannot be stored is not in force", async () => {
    const { id } = await orchestrator.create(createRequest());
    applied.resolve();
    factory.faults.applyEgress = () => {
      delete factory.faults.applyEgress;
      factory.of(id)!.egress = CLOSED;
      throw Object.assign(new Error("ENOSPC: no space left on device"), { code: "ENOSPC" });
    };
    const updated = orchestrator.updateNetwork(id, { denyOut: ["0.0.0.0/0"] });
    await expect(updated).rejects.toMatchObject({ code: "disk_full", status: 507 });
    expect(factory.of(id)?.egress).toEqual({ base: "default", allowOut: [], denyOut: [] });
    expect(orchestrator.get(id).network).toBeUndefined();
  });

  test("a deletion meanwhile: the change says so", async () => {
    const { id } = await orchestrator.create(createRequest());
    const updated = orchestrator.updateNetwork(id, { denyOut: ["0.0.0.0/0"] });
    await entered.promise;
    const killed = orchestrator.kill(id);
    applied.resolve();
    await expect(updated).rejects.toThrow();
    await killed;
  });
});

test("a VM that cannot be stopped after its pause ends before the sandbox is resumed or deleted", async () => {
  const [first, second] = [
    await orchestrator.create(createRequest()),
    await orchestrator.create(createRequest()),
  ];
  factory.faults.stop = () => {
    throw new Error("it does not end");
  };
  await orchestrator.pause(first.id);
  await orchestrator.pause(second.id);
  expect(factory.live.size).toBe(2);
  await expect(orchestrator.resume(first.id, 60)).rejects.toThrow("it does not end");
  await expect(orchestrator.kill(second.id)).rejects.toThrow("it does not end");
  expect(orchestrator.get(second.id).state).toBe("paused");
  delete factory.faults.stop;
  await orchestrator.resume(first.id, 60);
  expect(factory.live.size).toBe(2);
  await orchestrator.kill(first.id);
  await orchestrator.kill(second.id);
  expect(factory.live.size).toBe(0);
});

describe("records that got lost", () => {
  let artifacts: string;

  beforeEach(async () => {
    const { id } = await orchestrator.create(createRequest());
    await orchestrator.pause(id);
    await orchestrator.shutdown();
    opened.splice(0);
    artifacts = testOptions(home, { repository, sandboxes: factory }).artifactsDir;
    expect(readdirSync(artifacts)).toContain(id);
  });

  const lose = (how: (path: string) => void): string => {
    const { statePath } = testOptions(home, { repository, sandboxes: factory });
    for (const extra of ["-wal", "-shm"]) rmSync(statePath + extra, { force: true });
    how(statePath);
    return statePath;
  };

  test.each(["no file", "an empty file"])("%s: nothing starts and nothing is swept, twice", async (what) => {
    const before = readdirSync(artifacts);
    const path = lose((file) => (what === "no file" ? rmSync(file) : truncateSync(file)));
    for (let i = 0; i < 2; i++) {
      const next = createOrchestrator(testOptions(home, { repository, sandboxes: factory }));
      await expect(next.start()).rejects.toMatchObject({
        code: "records_missing",
        message: expect.stringContaining(path),
        remediation: expect.stringContaining(artifacts),
      });
    }
    expect(readdirSync(artifacts)).toEqual(before);
    // The cure that is told.
    renameSync(artifacts, `${artifacts}.lost`);
    await open().start();
  });

  test("a damaged file: told by name, also by who looks before", async () => {
    const path = lose((file) => writeFileSync(file, "no database".repeat(1000)));
    const next = createOrchestrator(testOptions(home, { repository, sandboxes: factory }));
    const told = { code: "records_unreadable", message: expect.stringContaining(path) };
    await expect(next.start()).rejects.toMatchObject(told);
    expect(() => hasTokenProtectedSandboxes(path)).toThrow(path);
    expect(readdirSync(artifacts)).toHaveLength(1);
  });
});

describe("capacity", () => {
  test("VMs of builds have seats as sandboxes have, until they end", async () => {
    const node = open({ statePath: join(home, "seats.db"), capacity: { sandboxes: 2 } });
    await node.start();
    const starter = admitted(factory, (memoryMiB) => node.reserve(memoryMiB));
    const identity = { sandboxId: newId(), templateId: "t", envVars: {} };
    const spec = { identity, state: fakeState(join(home, "built"), 1) };
    const built = await starter.resume(spec);
    const { id } = await node.create(createRequest());
    const full = { status: 429, code: "capacity_unavailable" };
    await expect(node.create(createRequest())).rejects.toMatchObject(full);
    await expect(starter.resume(spec)).rejects.toMatchObject(full);
    await built.stop();
    await eventually("its seat is free", () => node.reserve(1)[Symbol.dispose]() === undefined);
    factory.faults.resume = () => {
      throw new Error("no VM");
    };
    await expect(starter.resume(spec)).rejects.toThrow("no VM");
    delete factory.faults.resume;
    await (await starter.resume(spec)).stop();
    await node.kill(id);
  });

  test("50 creates over the node's memory: those that fit run, the others are refused at once", async () => {
    orchestrator = open({ capacity: { memoryMiB: 128 * 6 } });
    await orchestrator.start();
    // The others are told while the ones that fit still start.
    const start = Promise.withResolvers<void>();
    factory.faults.resume = () => start.promise;
    let refusals = 0;
    const creates = Array.from({ length: 50 }, () =>
      orchestrator.create(request()).catch((error: unknown) => {
        refusals += 1;
        if (refusals === 44) start.resolve();
        throw error;
      }),
    );
    const outcomes = await Promise.allSettled(creates);
    delete factory.faults.resume;
    expect(outcomes.filter(({ status }) => status === "fulfilled")).toHaveLength(6);
    const [refused] = outcomes.filter((outcome) => outcome.status === "rejected");
    expect(refused!.reason).toMatchObject({
      code: "capacity_unavailable",
      status: 429,
      headers: { "Retry-After": "5" },
    });
    // Room again: paused sandboxes take none, and need some to come back.
    const [first, ...others] = orchestrator.list();
    await orchestrator.pause(first!.id);
    const newcomer = await orchestrator.create(request());
    await expect(orchestrator.resume(first!.id, 60)).rejects.toMatchObject({ status: 429 });
    expect(orchestrator.get(first!.id).state).toBe("paused");
    await orchestrator.kill(newcomer.id);
    await orchestrator.resume(first!.id, 60);
    await orchestrator.kill(others[0]!.id);
    factory.of(others[1]!.id)!.die();
    await eventually("lost", () => events.some(({ kind }) => kind === "lost"));
    await Promise.all([orchestrator.create(request()), orchestrator.create(request())]);
    await expect(orchestrator.create(request())).rejects.toMatchObject({ status: 429 });
  });

  /** Creates `count` at once; none is ready before `refused` of them were refused. */
  const createTogether = async (on: NodeOrchestrator, count: number, refused: number) => {
    const go = Promise.withResolvers<void>();
    factory.faults.resume = () => go.promise;
    let seen = 0;
    const creates = Array.from({ length: count }, () => on.create(request()));
    for (const create of creates) create.catch(() => seen++);
    await eventually(`${refused} are refused`, () => seen === refused);
    go.resolve();
    delete factory.faults.resume;
    return Promise.allSettled(creates);
  };

  test("a host short of memory, a limit of sandboxes and a full queue refuse, too", async () => {
    let availableMiB = 1000;
    const short = open({ capacity: { minAvailableMiB: 960, availableMiB: () => availableMiB } });
    await short.start();
    // Guests that start now will touch memory they have not touched yet.
    const two = await createTogether(short, 2, 1);
    // Either of the two may be the first to be counted.
    expect(two.map(({ status }) => status).sort()).toEqual(["fulfilled", "rejected"]);
    availableMiB = 980;
    await expect(short.create(request())).rejects.toThrow("memory left");
    const few = open({ capacity: { sandboxes: 1 } });
    await few.start();
    await few.create(request());
    await expect(few.create(request())).rejects.toThrow("limit is 1");
    const busy = open({ maxConcurrentStarts: 1, maxQueuedStarts: 2 });
    await busy.start();
    // Longer than all of them take to ask.
    const rush = await createTogether(busy, 8, 5);
    expect(rush.filter(({ status }) => status === "fulfilled")).toHaveLength(3);
    expect(rush.find((outcome) => outcome.status === "rejected")!.reason).toMatchObject({ status: 429 });
  });
});

test("a guest that hangs is told after some silent looks, and again when it answers", async () => {
  orchestrator = open({ health: { intervalMs: 5, timeoutMs: 5, failures: 3 } });
  await orchestrator.start();
  const { id } = await orchestrator.create(request());
  let probes = 0;
  factory.faults.probe = () => {
    probes += 1;
    throw new AenvError({ code: "agent_unreachable", message: "no answer within 5 ms" });
  };
  await eventually("it is told", () => orchestrator.get(id).unresponsiveSince !== undefined);
  expect(probes).toBeGreaterThanOrEqual(3);
  expect(orchestrator.get(id)).toMatchObject({
    state: "running",
    unresponsiveSince: new Date(nowMs).toISOString(),
  });
  delete factory.faults.probe;
  await eventually("it answers", () => orchestrator.get(id).unresponsiveSince === undefined);
  const told = events.filter(({ kind }) => kind === "unresponsive" || kind === "responsive");
  expect(told.map(({ kind, reason }) => [kind, reason])).toEqual([
    ["unresponsive", "no answer within 5 ms"],
    ["responsive", undefined],
  ]);
});
