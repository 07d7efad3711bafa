import { afterAll, afterEach, beforeEach, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { FakeSandboxFactory } from "../../tests/support/fake-sandboxes.ts";
import { silent, testOptions } from "../../tests/support/orchestrator.ts";
import type { ResolvedImage, ResolveOptions } from "../image/types.ts";
import { AenvError } from "../lib/errors.ts";
import type { BootPlan } from "../sandbox/types.ts";
import { createPosixRepository } from "../snapshot/index.ts";
import { createOrchestrator, type OrchestratorOptions } from "./index.ts";
import type { CreateColdSandboxRequest, LifecycleEvent, NodeOrchestrator } from "./types.ts";

/* Sandboxes that boot from an image: what is asked of the image service and what becomes of its answer. */

const base = mkdtempSync("/tmp/life-cold-");
afterAll(() => rmSync(base, { recursive: true, force: true }));

const GIB = 1 << 30;
let home: string;
let factory: FakeSandboxFactory;
let orchestrator: NodeOrchestrator;
let events: LifecycleEvent[];
let resolved: { reference: string; options: ResolveOptions }[];
let resolving: () => Promise<void>;
/** Disk size of images that keep their own. */
let ownSize: number | undefined;
const holds = { now: 0, most: 0 };

function options(): OrchestratorOptions {
  const layer = join(home, "layer");
  writeFileSync(layer, "x");
  return {
    ...testOptions(home, {
      repository: createPosixRepository({ root: join(home, "repository"), log: silent, collectGraceMs: 0 }),
      sandboxes: factory,
    }),
    onEvent: (event) => events.push(event),
    cold: {
      images: {
        resolve: async (reference, options = {}): Promise<ResolvedImage> => {
          resolved.push({ reference, options });
          await Promise.race([
            resolving(),
            new Promise((_, reject) =>
              options.signal?.addEventListener("abort", () => reject(options.signal?.reason)),
            ),
          ]);
          return {
            reference: `docker.io/library/${reference}`,
            manifestDigest: "sha256:1234",
            lowers: [{ file: layer, digest: "sha256:00", size: 1 }],
            virtualSizeBytes: ownSize ?? options.virtualSizeBytes ?? 0,
            config: {
              env: { PATH: "/bin", A: "image" },
              workingDir: "/srv",
              user: "app",
              exposedPorts: [],
              volumes: [],
              labels: {},
            },
          };
        },
        hold: () => {
          holds.now += 1;
          holds.most = Math.max(holds.most, holds.now);
          return {
            [Symbol.dispose]: () => {
              holds.now -= 1;
            },
          };
        },
      },
      cpuCount: 2,
      memoryMiB: 1024,
      diskSizeMiB: 4096,
      allowShrink: false,
      allowedBootArgsPrefixes: ["debug", "aenv."],
    },
  };
}

const open = (more: Partial<OrchestratorOptions> = {}): NodeOrchestrator =>
  createOrchestrator({ ...options(), ...more });

beforeEach(async () => {
  home = mkdtempSync(join(base, "h-"));
  factory = new FakeSandboxFactory();
  events = [];
  resolved = [];
  resolving = async () => undefined;
  ownSize = undefined;
  holds.now = 0;
  holds.most = 0;
  orchestrator = open();
  await orchestrator.start();
});

afterEach(async () => {
  await orchestrator.shutdown();
  expect([...factory.live]).toEqual([]);
  expect(holds.now).toBe(0);
});

const request = (changes: Partial<CreateColdSandboxRequest> = {}): CreateColdSandboxRequest => ({
  image: "debian:12",
  timeoutSeconds: 300,
  onTimeout: "pause",
  autoResume: false,
  secure: false,
  metadata: {},
  envVars: { A: "request" },
  ...changes,
});

const failing = (work: Promise<unknown>): Promise<AenvError> =>
  work.then(
    () => Promise.reject(new Error("expected an error")),
    (error: unknown) => {
      if (!(error instanceof AenvError)) throw error;
      return error;
    },
  );

describe("cold start", () => {
  test("the node's defaults, the image's settings, the request's own on top", async () => {
    const record = await orchestrator.createCold(request({ allowInternetAccess: false }));
    expect(record).toMatchObject({ templateId: "debian:12", state: "running", envdVersion: "0.5.15" });
    expect(resolved[0]?.options.virtualSizeBytes).toBe(4 * GIB);
    const { boot, identity, egress } = factory.of(record.id)!;
    expect(boot?.shape).toEqual({ vcpuCount: 2, memoryMiB: 1024 });
    expect(boot?.rootfs.virtualSizeBytes).toBe(4 * GIB);
    expect(identity).toMatchObject({
      envVars: { PATH: "/bin", A: "request" },
      defaultUser: "app",
      defaultWorkdir: "/srv",
    });
    expect(egress?.base).toBe("deny");
    expect(holds.most).toBe(1);
    // The layers are the image cache's: its collection must know of them, also while the sandbox is paused.
    expect([...orchestrator.pinnedFiles()]).toEqual([join(home, "layer")]);
    expect(events.map(({ kind, cold }) => [kind, cold])).toEqual([
      ["creating", true],
      ["created", true],
    ]);
    expect(Object.keys(orchestrator.timings(record.id).create!)).toContain("resolve_rootfs");
  });

  test("sizes and boot words of the request", async () => {
    const record = await orchestrator.createCold(
      request({
        cpuCount: 1,
        memoryMiB: 256,
        diskSizeMiB: 8192,
        extraBootArgs: " debug\taenv.x=1 root=/dev/sda ",
      }),
    );
    const { boot } = factory.of(record.id)!;
    expect(boot?.shape).toEqual({ vcpuCount: 1, memoryMiB: 256 });
    expect(boot?.rootfs.virtualSizeBytes).toBe(8 * GIB);
    expect(boot?.extraBootArgs).toEqual(["debug", "aenv.x=1"]);
  });

  test("drives are images like the root disk: resolved in their sizes, held, pinned and handed on", async () => {
    const drive = { driveId: "data", image: "data:1", readOnly: true };
    const record = await orchestrator.createCold(
      request({
        attachedDrives: [
          drive,
          { ...drive, driveId: "b", readOnly: false, mountPath: "/srv", subPath: "c", diskSizeMiB: 8192 },
        ],
      }),
    );
    expect(resolved.map(({ reference, options }) => [reference, options.virtualSizeBytes])).toEqual([
      ["debian:12", 4 * GIB],
      ["data:1", 4 * GIB],
      ["data:1", 8 * GIB],
    ]);
    const lowers = [expect.objectContaining({ digest: "sha256:00" })];
    expect(factory.of(record.id)!.boot?.drives).toEqual([
      { driveId: "data", readOnly: true, mountPath: "/mnt/data", lowers, virtualSizeBytes: 4 * GIB },
      { driveId: "b", readOnly: false, mountPath: "/srv", subPath: "c", lowers, virtualSizeBytes: 8 * GIB },
    ]);
    expect(holds.most).toBe(3);
    expect([...orchestrator.pinnedFiles()]).toEqual([join(home, "layer")]);
    for (const [wrong, code] of [
      [{ ...drive, mountPath: "/proc/x" }, "invalid_drive"],
      [{ ...drive, diskSizeMiB: 1024 }, "disk_shrink_refused"],
    ] as const) {
      const error = await failing(orchestrator.createCold(request({ attachedDrives: [wrong] })));
      expect(error).toMatchObject({ code, status: 400 });
    }
    expect(resolved).toHaveLength(3);
    ownSize = GIB;
    const fixed = request({ attachedDrives: [{ ...drive, diskSizeMiB: 8192 }] });
    expect(await failing(orchestrator.createCold(fixed))).toMatchObject({ code: "disk_size_fixed" });
  });

  test("what the VMM has no room for is said before anything is downloaded", async () => {
    const plans: BootPlan[] = [];
    factory.faults.checkBoot = (plan) => {
      plans.push(plan);
      throw new AenvError({ code: "too_many_drives", status: 400, message: "no room" });
    };
    const drive = { driveId: "data", image: "data:1", readOnly: true, subPath: "a" };
    const asked = request({ attachedDrives: [drive], extraBootArgs: "debug x" });
    expect(await failing(orchestrator.createCold(asked))).toMatchObject({
      code: "too_many_drives",
      status: 400,
      message: expect.stringContaining("no room"),
    });
    expect(plans).toMatchObject([
      { drives: [{ readOnly: true, mountPath: "/mnt/data", subPath: "a" }], extraBootArgs: ["debug"] },
    ]);
    expect(resolved).toEqual([]);
    expect(orchestrator.list()).toEqual([]);
  });

  test("what cannot be had is said before anything is started", async () => {
    expect(await failing(orchestrator.createCold(request({ diskSizeMiB: 1024 })))).toMatchObject({
      code: "disk_shrink_refused",
      status: 400,
      remediation: expect.stringContaining("allow_shrink"),
    });
    expect(await failing(orchestrator.createCold(request({ extraBootArgs: "a;b" })))).toMatchObject({
      code: "invalid_boot_args",
      status: 400,
    });
    expect(
      await failing(orchestrator.createCold(request({ network: { denyOut: ["example.org"] } }))),
    ).toMatchObject({ status: 400 });
    expect(resolved).toEqual([]);
    ownSize = GIB;
    expect(await failing(orchestrator.createCold(request({ diskSizeMiB: 8192 })))).toMatchObject({
      code: "disk_size_fixed",
      status: 400,
    });
    expect(orchestrator.list()).toEqual([]);
  });

  test("an image that cannot be had leaves nothing, and its error is the caller's", async () => {
    resolving = () =>
      Promise.reject(
        new AenvError({
          code: "image_not_found",
          status: 404,
          message: "no registry has it",
          remediation: "look",
        }),
      );
    expect(await failing(orchestrator.createCold(request()))).toMatchObject({
      code: "image_not_found",
      status: 404,
      remediation: "look",
    });
    expect(orchestrator.list()).toEqual([]);
    expect(orchestrator.pinnedFiles().size).toBe(0);
    expect(events.at(-1)).toMatchObject({ kind: "create_failed", cold: true });
  });

  test("the seat is taken before the image is fetched; a full node fetches nothing", async () => {
    await orchestrator.shutdown();
    orchestrator = open({ capacity: { sandboxes: 1 } });
    await orchestrator.start();
    const { promise, resolve } = Promise.withResolvers<void>();
    resolving = () => promise;
    const first = orchestrator.createCold(request());
    expect(await failing(orchestrator.createCold(request()))).toMatchObject({
      code: "capacity_unavailable",
      status: 429,
    });
    expect(resolved.length).toBe(1);
    resolve();
    await first;
  });

  test("a shutdown does not wait for a download", async () => {
    resolving = () => new Promise(() => undefined);
    const start = failing(orchestrator.createCold(request()));
    await Promise.resolve();
    await orchestrator.shutdown();
    expect((await start).code).toBe("shutting_down");
  });

  test("it is paused, survives a restart with its image's layers pinned, and is resumed", async () => {
    const { id } = await orchestrator.createCold(request());
    await orchestrator.pause(id);
    await orchestrator.shutdown();
    orchestrator = open();
    await orchestrator.start();
    expect(orchestrator.get(id)).toMatchObject({ state: "paused", templateId: "debian:12" });
    await orchestrator.resume(id, 60);
    expect(factory.of(id)?.identity.envVars).toEqual({ PATH: "/bin", A: "request" });
    const snapshot = await orchestrator.snapshot(id, {});
    expect(snapshot.committed).toMatchObject({
      imageReference: "docker.io/library/debian@sha256:1234",
      context: { workdir: "/srv", user: "app" },
    });
  });

  test("paused without its memory it boots again, with the words it was first booted with, also from a fork or a snapshot", async () => {
    const { id } = await orchestrator.createCold(request({ extraBootArgs: "debug root=/dev/sda" }));
    const [child] = await orchestrator.fork(id, { count: 1 });
    if (child === undefined || "error" in child) throw new Error("no child");
    const { id: template, committed } = await orchestrator.snapshot(id, {});
    expect(committed?.context.bootArgs).toEqual(["debug"]);
    const { image: _, ...wishes } = request();
    const copy = await orchestrator.create({ ...wishes, template });
    for (const one of [id, child.record.id, copy.id]) await orchestrator.pause(one, { memory: false });
    await orchestrator.shutdown();
    orchestrator = open();
    await orchestrator.start();
    for (const one of [id, child.record.id, copy.id]) {
      await orchestrator.connect(one, 60);
      expect(factory.of(one)?.boot).toMatchObject({ extraBootArgs: ["debug"] });
      const templateId = one === copy.id ? template : "debian:12";
      expect(orchestrator.get(one)).toMatchObject({ templateId, state: "running" });
    }
    expect(resolved).toHaveLength(1);
  });

  test("without an image service it is refused", async () => {
    await orchestrator.shutdown();
    const { cold: _, ...templatesOnly } = options();
    orchestrator = createOrchestrator(templatesOnly);
    await orchestrator.start();
    expect(await failing(orchestrator.createCold(request()))).toMatchObject({
      code: "cold_start_unsupported",
    });
  });
});
