import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { eventually } from "../../tests/support/eventually.ts";
import type { FakeSandbox, FakeSandboxFactory } from "../../tests/support/fake-sandboxes.ts";
import {
  createRequest,
  endAll,
  freshParts,
  generationsIn,
  testOptions,
} from "../../tests/support/orchestrator.ts";
import { AenvError } from "../lib/errors.ts";
import type { SnapshotRepository } from "../snapshot/types.ts";
import { createOrchestrator, type OrchestratorOptions } from "./index.ts";
import type { LifecycleEvent, NodeOrchestrator } from "./types.ts";

/* Sandboxes that are paused without their memory, with VMs that fail on demand. */

let base: string;
let home: string;
let factory: FakeSandboxFactory;
let repository: SnapshotRepository;
let orchestrator: NodeOrchestrator;
let nowMs: number;
let events: LifecycleEvent[];
const opened: NodeOrchestrator[] = [];

beforeAll(() => {
  base = mkdtempSync("/tmp/disks-orch-");
});
afterAll(() => rmSync(base, { recursive: true, force: true }));

function open(overrides: Partial<OrchestratorOptions> = {}): NodeOrchestrator {
  const made = createOrchestrator({
    ...testOptions(home, { repository, sandboxes: factory }),
    now: () => nowMs,
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
});

/** Another process on what the first one stored; that one is not asked any more. */
async function restarted(): Promise<NodeOrchestrator> {
  const next = open();
  await next.start();
  return next;
}

const generations = (id: string): string[] => generationsIn(home, id);
const booted = (id: string): string | undefined => factory.of(id)?.bootedFrom;
const code = (work: Promise<unknown>): Promise<unknown> =>
  work.then(
    () => "no error",
    (error: unknown) => (error instanceof AenvError ? `${error.status} ${error.code}` : error),
  );

describe("pause and resume without memory", () => {
  test("the disks of an orderly end are kept, and booted with everything the sandbox was given", async () => {
    const made = await orchestrator.create(
      createRequest({
        autoResume: true,
        metadata: { of: "disks" },
        network: { denyOut: ["10.0.0.0/8"], allowPublicTraffic: false },
      }),
    );
    const vm = factory.of(made.id)!;
    const route = orchestrator.route(made.id);
    await orchestrator.pause(made.id, { memory: false });
    expect(orchestrator.get(made.id)).toEqual({ ...made, state: "paused" });
    expect(route.kind === "ready" && route.gone.aborted).toBeTrue();
    expect(vm.alive).toBeFalse();
    expect(orchestrator.timings(made.id).pause).toEqual({ total: 2, shutdown: 1 });
    expect(events.at(-1)).toMatchObject({ kind: "paused", cold: true });
    await eventually("the first capture is gone", () => generations(made.id).length === 1);

    const next = await restarted();
    expect(next.get(made.id)).toEqual({ ...made, state: "paused" });
    // Layers it shares with others are kept for it, by either process.
    const shared = join(home, "artifacts", made.id, generations(made.id)[0]!, "shared.lsmt");
    expect([...orchestrator.pinnedFiles()]).toEqual([shared]);
    expect([...next.pinnedFiles()]).toEqual([shared]);
    const resumed = await next.resume(made.id, 77, { memory: false });
    expect(resumed).toEqual({
      ...made,
      timeoutSeconds: 77,
      endAt: new Date(nowMs + 77_000).toISOString(),
    });
    const again = factory.of(made.id)!;
    expect(again.boot).toMatchObject({
      shape: { vcpuCount: 1, memoryMiB: 128 },
      identity: {
        sandboxId: made.id,
        accessToken: orchestrator.accessToken(made.id),
        envVars: { A: "image", B: "request", C: "3" },
        defaultUser: "app",
        defaultWorkdir: "/srv",
      },
    });
    expect(again.egress).toMatchObject({ denyOut: ["10.0.0.0/8"] });
    expect(events.at(-1)).toMatchObject({ kind: "resumed", cold: true });
    // The capture is not needed any more, and a pause with memory is one as ever.
    await eventually("the capture is gone", () => generations(made.id).length === 0);
    await next.pause(made.id);
    expect(next.route(made.id)).toEqual({ kind: "paused", autoResume: true });
    await next.resume(made.id, 60);
    expect(factory.of(made.id)).toMatchObject({ generation: 1, boot: undefined });
  });

  test("a guest that does not end in order: what it had written out before is kept", async () => {
    const { id } = await orchestrator.create(createRequest());
    factory.faults.halt = () => {
      throw new Error("it did not end");
    };
    await orchestrator.pause(id, { memory: false });
    expect(factory.live.size).toBe(0);
    await orchestrator.connect(id, 60);
    expect(booted(id)).toBe("written 1");
    delete factory.faults.halt;
    await orchestrator.pause(id, { memory: false });
    await orchestrator.connect(id, 60);
    expect(booted(id)).toBe("halted");
  });

  test("killed while the guest ends: it is paused, with what was written out", async () => {
    const { id } = await orchestrator.create(createRequest());
    const halting = Promise.withResolvers<void>();
    const go = Promise.withResolvers<void>();
    factory.faults.halt = async () => {
      halting.resolve();
      await go.promise;
      throw new Error("killed");
    };
    const pausing = orchestrator.pause(id, { memory: false });
    await halting.promise;
    // The next process finds the record of a paused sandbox, and adopts nothing.
    factory.orphan();
    const next = await restarted();
    expect(next.get(id).state).toBe("paused");
    expect(factory.orphans.size).toBe(0);
    await next.connect(id, 60);
    expect(booted(id)).toBe("written 1");
    await next.kill(id);
    go.resolve();
    await pausing;
    // What the first process wrote after its death is no concern of the others.
    opened.splice(opened.indexOf(orchestrator), 1);
    await orchestrator.shutdown();
  });

  test("a capture that fails leaves it running, told in the words of its cause", async () => {
    const { id } = await orchestrator.create(createRequest());
    factory.faults.capture = () => {
      throw new AenvError({ code: "guest_too_old", status: 409, message: "too old", remediation: "build" });
    };
    const error = await orchestrator.pause(id, { memory: false }).catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: "guest_too_old", status: 409, remediation: "build" });
    expect(events.at(-1)).toMatchObject({ kind: "pause_failed", cold: true });
    expect(orchestrator.get(id).state).toBe("running");
    expect(factory.of(id)?.vcpusRun).toBeTrue();
    expect(generations(id)).toEqual([]);
    delete factory.faults.capture;
    await orchestrator.pause(id);
    expect(orchestrator.get(id).state).toBe("paused");
  });

  test("a boot that fails leaves it paused with its disks, and the next one has them", async () => {
    const { id } = await orchestrator.create(createRequest());
    await orchestrator.pause(id, { memory: false });
    factory.faults.resume = () => {
      throw new Error("the kernel panicked");
    };
    const error = await orchestrator.connect(id, 60).catch((thrown: unknown) => thrown);
    expect(error).toMatchObject({ code: "resume_failed", status: 500 });
    expect(String(error)).toContain("stays paused: the kernel panicked");
    expect(events.at(-1)).toMatchObject({ kind: "resume_failed", cold: true });
    expect(orchestrator.get(id).state).toBe("paused");
    delete factory.faults.resume;
    const next = await restarted();
    await next.connect(id, 60);
    expect(booted(id)).toBe("halted");
  });

  test("traffic does not wake it, not even when it came during the pause", async () => {
    const { id } = await orchestrator.create(createRequest({ autoResume: true }));
    const pausing = orchestrator.pause(id, { memory: false });
    const met = code(orchestrator.autoResume(id));
    await pausing;
    expect(await met).toBe("410 sandbox_paused");
    expect(orchestrator.route(id)).toEqual({ kind: "paused", autoResume: false });
    expect(await code(orchestrator.autoResume(id))).toBe("410 sandbox_paused");
    await orchestrator.resume(id, 60);
    await orchestrator.pause(id);
    await orchestrator.autoResume(id);
    expect(orchestrator.get(id).state).toBe("running");
  });

  test("what cannot be had is said: a boot of what has its memory, two kinds of pause at once, a fork", async () => {
    const { id } = await orchestrator.create(createRequest());
    expect(await code(orchestrator.resume(id, 60, { memory: false }))).toBe("no error");
    const pausing = orchestrator.pause(id);
    expect(await code(orchestrator.pause(id, { memory: false }))).toBe("409 sandbox_state_conflict");
    expect(await code(orchestrator.pause(id))).toBe("no error");
    await pausing;
    expect(await code(orchestrator.resume(id, 60, { memory: false }))).toBe("409 memory_kept");
    expect(await code(orchestrator.connect(id, 60, { memory: false }))).toBe("409 memory_kept");
    expect(orchestrator.get(id).state).toBe("paused");
    await orchestrator.connect(id, 60);
    const disks = orchestrator.pause(id, { memory: false });
    expect(await code(orchestrator.pause(id))).toBe("409 sandbox_state_conflict");
    expect(await code(orchestrator.pause(id, { memory: false }))).toBe("no error");
    await disks;
    expect(await code(orchestrator.pause(id, { memory: false }))).toBe("409 sandbox_state_conflict");
    expect(await code(orchestrator.fork(id, { count: 1 }))).toBe("409 sandbox_state_conflict");
    expect(await code(orchestrator.snapshot(id, {}))).toBe("409 sandbox_state_conflict");
    await orchestrator.kill(id);
    expect(generations(id)).toEqual([]);
    expect((await restarted()).list()).toEqual([]);
  });
});

describe("at the deadline", () => {
  const expiring = { timeoutSeconds: 10, onTimeout: "pause", autoPauseMemory: false } as const;

  test("the disks alone are kept where that was asked for, also by a fork's child", async () => {
    const { id } = await orchestrator.create(createRequest(expiring));
    const [child] = await orchestrator.fork(id, { count: 1 });
    if (child === undefined || "error" in child) throw new Error("no child");
    nowMs += 11_000;
    for (const one of [id, child.record.id]) {
      await eventually("it is paused", () => orchestrator.get(one).state === "paused");
      await orchestrator.connect(one, 60);
      expect(booted(one)).toBe("halted");
    }
  });

  test("where that fails again and again it is paused with its memory: nothing runs for ever", async () => {
    const { id } = await orchestrator.create(createRequest(expiring));
    const guest = factory.of(id) as FakeSandbox;
    let tries = 0;
    guest.captureDisks = () => {
      tries += 1;
      return Promise.reject(new Error("the guest does not answer"));
    };
    await eventually("it is paused", () => {
      nowMs += 10_000;
      return orchestrator.get(id).state === "paused";
    });
    expect(tries).toBe(3);
    await orchestrator.connect(id, 60);
    expect(factory.of(id)).toMatchObject({ generation: 1, boot: undefined });
  });

  test("guests that take their time hold up no deadlines but those of their kind", async () => {
    const held = Promise.withResolvers<void>();
    let waiting = 0;
    const slow: string[] = [];
    for (let made = 0; made < 6; made++) {
      const { id } = await orchestrator.create(createRequest(expiring));
      slow.push(id);
      const guest = factory.of(id) as FakeSandbox;
      const capture = guest.captureDisks.bind(guest);
      guest.captureDisks = async (dir) => {
        waiting += 1;
        await held.promise;
        return capture(dir);
      };
    }
    const kept = await orchestrator.create(createRequest({ timeoutSeconds: 10, onTimeout: "pause" }));
    const ended = await orchestrator.create(createRequest({ timeoutSeconds: 10, onTimeout: "kill" }));
    nowMs += 11_000;
    await eventually("four of them are waited for", () => waiting === 4);
    await eventually("the one is paused", () => orchestrator.get(kept.id).state === "paused");
    await eventually("the other is gone", () => !orchestrator.list().some(({ id }) => id === ended.id));
    expect(waiting).toBe(4);
    expect(slow.filter((id) => orchestrator.get(id).state === "paused")).toEqual([]);
    held.resolve();
    await eventually("all are paused", () => slow.every((id) => orchestrator.get(id).state === "paused"));
    expect(waiting).toBe(6);
  });
});
