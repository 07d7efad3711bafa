// biome-ignore-all lint/suspicious/noTemplateCurlyInString: words of Dockerfiles.
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "bun:test";
import {
  chownSync,
  existsSync,
  linkSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { eventually } from "../../tests/support/eventually.ts";
import { type FakeAgent, startFakeAgent } from "../../tests/support/fake-agent.ts";
import { FakeSandboxFactory } from "../../tests/support/fake-sandboxes.ts";
import { compress, makeTar } from "../../tests/support/oci.ts";
import type { ImageRuntimeConfig, ImageService, ResolveOptions } from "../image/types.ts";
import { AenvError } from "../lib/errors.ts";
import { newId } from "../lib/ids.ts";
import { createLogger } from "../lib/log.ts";
import { createPosixRepository } from "../snapshot/index.ts";
import type { BuildRecord, SnapshotRecord, SnapshotRepository } from "../snapshot/types.ts";
import type { ArchiveMember } from "./archive.ts";
import { createTemplateService } from "./index.ts";
import { matchSources, stageSource } from "./pack.ts";
import type { BuildLogEntry, BuildStartRequest, TemplateService } from "./types.ts";

const log = createLogger("test");
log.level = "silent";

let base: string;
let home: string;
let guestRoot: string;
let agent: FakeAgent;
let factory: FakeSandboxFactory;
let repository: SnapshotRepository;
let templates: TemplateService;
let resolveImage: (reference: string, options?: ResolveOptions) => Promise<void>;
let deletions: number;

const CONFIG: ImageRuntimeConfig = {
  env: { PATH: process.env.PATH!, FROM_IMAGE: "yes" },
  workingDir: "/",
  exposedPorts: ["80/tcp"],
  volumes: [],
  labels: {},
  cmd: ["bash"],
};

let config = CONFIG;

const images: ImageService = {
  async resolve(reference, options) {
    await resolveImage(reference, options);
    return {
      reference: `docker.io/library/${reference}`,
      manifestDigest: `sha256:${"0".repeat(64)}`,
      lowers: [],
      virtualSizeBytes: 1 << 30,
      config,
    };
  },
  hold: () => ({ [Symbol.dispose]: () => undefined }),
  collect: async () => ({ images: 0, layers: 0, bytes: 0 }),
  [Symbol.asyncDispose]: async () => undefined,
};

function open(limits: { buildMs?: number; readyMs?: number } = {}): TemplateService {
  return createTemplateService({
    repository,
    images,
    sandboxes: factory,
    defaults: { cpuCount: 2, memoryMiB: 512, diskSizeMiB: 1024, defaultImage: "debian:12" },
    maxConcurrentBuilds: 2,
    log,
    onDeleted: () => {
      deletions += 1;
    },
    limits: { readyPollMs: 10, startDelayMs: 30, readyMs: 20_000, ...limits },
  });
}

beforeAll(() => {
  base = mkdtempSync("/tmp/orch-template-");
});
afterAll(() => rmSync(base, { recursive: true, force: true }));

beforeEach(async () => {
  home = mkdtempSync(join(base, "h-"));
  guestRoot = join(home, "guest");
  mkdirSync(join(guestRoot, "bin"), { recursive: true });
  mkdirSync(join(guestRoot, "etc"));
  writeFileSync(join(guestRoot, "bin/bash"), "");
  writeFileSync(
    join(guestRoot, "etc/passwd"),
    "root:x:0:0::/root:/bin/bash\napp:x:1000:1000::/home/app:/bin/sh\n",
  );
  agent = startFakeAgent(guestRoot);
  factory = new FakeSandboxFactory();
  factory.hostAddress = agent.address;
  repository = createPosixRepository({ root: join(home, "repository"), log });
  resolveImage = async () => undefined;
  config = CONFIG;
  deletions = 0;
  templates = open();
  await templates.start();
});

afterEach(async () => {
  await templates[Symbol.asyncDispose]();
  await agent[Symbol.asyncDispose]();
  expect([...factory.live]).toEqual([]);
  expect(readdirSync(join(repository.stagingDir, "captures"))).toEqual([]);
});

interface Ended {
  readonly record: SnapshotRecord;
  readonly build: BuildRecord;
  readonly logs: readonly BuildLogEntry[];
}

async function build(
  name: string,
  request: Partial<BuildStartRequest> = {},
  cpuCount?: number,
): Promise<Ended> {
  const made = await templates.create({ name, tags: [], ...(cpuCount === undefined ? {} : { cpuCount }) });
  await templates.startBuild(made.templateId, made.buildId, { steps: [], ...request });
  return ended(made.templateId, made.buildId);
}

async function ended(templateId: string, buildId: string): Promise<Ended> {
  await eventually("the build ends", async () =>
    /^(ready|error)$/.test((await templates.build(templateId, buildId)).build.status),
  );
  // The build leaves the service a moment after its record says so.
  await Bun.sleep(20);
  return stateOf(templateId, buildId);
}

async function stateOf(templateId: string, buildId: string): Promise<Ended> {
  const { logs, ...state } = await templates.build(templateId, buildId);
  return { ...state, logs: await logs.select({ limit: Number.MAX_SAFE_INTEGER }) };
}

/** Until that command runs in a guest. */
const runs = (script: string) =>
  eventually(`${script} runs`, () => agent.commands.some(({ args }) => args.join(" ").includes(script)));

/** A step that lasts until the file is there. */
const untilThere = (path: string) => ({ type: "RUN", args: [`until [ -e ${path} ]; do sleep 0.02; done`] });

const messages = (state: Ended): string[] => state.logs.map((entry) => entry.message);

test("an image becomes a committed template with the image's settings and nothing is run in it", async () => {
  const state = await build("python", { fromImage: "python:3" }, 4);
  expect(state.build).toMatchObject({
    status: "ready",
    startedAt: expect.any(String),
    finishedAt: expect.any(String),
  });
  expect(state.record).toMatchObject({
    aliases: ["python"],
    public: true,
    resources: { cpuCount: 4, memoryMiB: 512, diskSizeMiB: 1024 },
    committed: {
      context: { envVars: CONFIG.env, workdir: "/", exposedPorts: ["80/tcp"], cmd: ["bash"] },
      imageReference: `docker.io/library/python@sha256:${"0".repeat(64)}`,
    },
  });
  expect(state.record.id).toBe(state.record.templateId);
  expect(state.record.committed?.startCmd).toBeUndefined();
  expect(agent.commands).toEqual([]);
  expect((await templates.resolve("python"))?.id).toBe(state.record.id);
  expect(messages(state)).toContain("booting docker.io/library/python:3");
});

test("steps change the guest and the context in their order; output is logged per step", async () => {
  const state = await build("steps", {
    steps: [
      { type: "env", args: ["A", "1", "B", "two words"] },
      { type: "WORKDIR", args: ["/srv"] },
      { type: "WORKDIR", args: ["app"] },
      { type: "RUN", args: ['echo "$A $B $FROM_IMAGE"; echo problem >&2'] },
      { type: "USER", args: ["app"] },
      { type: "RUN", args: ["true"] },
      { type: "RUN", args: ["true", "root"] },
      { type: "EXPOSE", args: ["8080"] },
      { type: "LABEL", args: ["k=v"] },
      { type: "VOLUME", args: ["/data"] },
    ],
  });
  expect(state.build.reason).toBeUndefined();
  expect(state.record.committed?.context).toEqual({
    ...{ envVars: { ...CONFIG.env, A: "1", B: "two words" }, workdir: "/srv/app", user: "app" },
    ...{ exposedPorts: ["80/tcp", "8080"], volumes: ["/data"], labels: { k: "v" }, cmd: ["bash"] },
  });
  expect(existsSync(join(guestRoot, "srv/app"))).toBeTrue();
  expect(agent.commands.map(({ cmd, args, user, cwd }) => [cmd, args[1], user, cwd])).toEqual([
    ["/bin/bash", "-c", "root", "/srv/app"],
    ["/bin/bash", "-c", "app", "/srv/app"],
    ["/bin/bash", "-c", "root", "/srv/app"],
  ]);
  expect(state.logs).toContainEqual(
    expect.objectContaining({ message: "1 two words yes", step: "4", level: "info" }),
  );
  expect(state.logs).toContainEqual(
    expect.objectContaining({ message: "problem", step: "4", level: "warn" }),
  );
});

test("a failing step ends the build with its number, exit status, output and last log lines", async () => {
  const state = await build("broken", {
    steps: [
      { type: "RUN", args: ["true"] },
      {
        type: "RUN",
        args: ["for i in $(seq 1 200); do echo line $i; done; echo no such package >&2; exit 3"],
      },
    ],
  });
  expect(state.build).toMatchObject({
    status: "error",
    reason: { step: "2", message: expect.stringContaining("exit status 3: no such package") },
  });
  expect(messages(state)).toContain("line 200");
  expect(messages(state).at(-1)).toContain("exit status 3");
  expect(state.record.committed).toBeUndefined();
});

test("each kind of failure says what failed in which step", async () => {
  resolveImage = async () => {
    throw new AenvError({ code: "image_not_found", status: 404, message: "image nope:1 was not found" });
  };
  expect((await build("a")).build.reason).toEqual({ message: "image nope:1 was not found", step: "base" });
  resolveImage = async () => {
    const remediation = "this host cannot resolve registry.example (DNS or proxy)";
    throw new AenvError({ code: "image_registry_unreachable", status: 502, message: "no way", remediation });
  };
  expect((await build("a")).build.reason?.message).toBe(
    "no way; this host cannot resolve registry.example (DNS or proxy)",
  );
  resolveImage = async () => undefined;
  expect((await build("known")).build.status).toBe("ready");
  resolveImage = async () => {
    throw new AenvError({ code: "image_not_found", status: 404, message: "not there" });
  };
  expect((await build("other", { fromImage: "known" })).build.reason?.message).toBe(
    "known is a template of this server, not an image; FROM takes image references (as an image: not there)",
  );
  expect((await build("known", { fromImage: "known" })).build.reason?.message).toBe("not there");
  resolveImage = async () => undefined;
  factory.faults.capture = () => {
    throw new Error("no space left");
  };
  expect((await build("b")).build.reason).toEqual({ message: "no space left", step: "finalize" });
  delete factory.faults.capture;
  factory.faults.resume = () => {
    throw new Error("no network slot");
  };
  expect((await build("c")).build.reason).toEqual({ message: "no network slot", step: "base" });
  delete factory.faults.resume;
  rmSync(join(guestRoot, "bin/bash"));
  expect((await build("d", { steps: [{ type: "RUN", args: ["x"] }] })).build.reason).toEqual({
    message: "there is no shell in the image (neither /bin/bash nor /bin/sh)",
    step: "1",
  });
  const bare = await build("e", {
    steps: [
      { type: "USER", args: ["65532"] },
      { type: "WORKDIR", args: ["/x/y"] },
    ],
  });
  expect(bare.build.status).toBe("ready");
  expect((await build("f", { fromTemplate: "unknown" })).build.reason?.message).toContain("unknown");
});

test("start and ready commands: ready is polled, an early failure or no readiness ends the build", async () => {
  const flag = join(home, "flag");
  const fine = await build("web", {
    startCmd: `sleep 0.2; touch ${flag}; sleep 30`,
    readyCmd: `test -e ${flag}`,
  });
  expect(fine.build.reason).toBeUndefined();
  expect(fine.record.committed).toMatchObject({
    readyCmd: `test -e ${flag}`,
    startCmd: expect.stringContaining("touch"),
  });
  const dies = await build("dies", { startCmd: "echo cannot bind >&2; exit 4", readyCmd: "false" });
  expect(dies.build.reason).toEqual({
    message: "start command: exit status 4: cannot bind",
    step: "finalize",
  });
  await templates[Symbol.asyncDispose]();
  templates = open({ readyMs: 2000 });
  await templates.start();
  const never = await build("never", { startCmd: "sleep 30", readyCmd: "echo not yet >&2; false" });
  expect(never.build.reason?.message).toContain(
    "did not succeed within 2 s: ready command: exit status 1: not yet",
  );
  expect(messages(never).filter((text) => text.includes("not ready yet"))).toEqual([
    "not ready yet: ready command: exit status 1: not yet",
  ]);
  const ends = await build("ends", { startCmd: "true" });
  expect(ends.build.status).toBe("ready");
  const told =
    "no readiness check: the start command gets 0.03 s (HEALTHCHECK or --ready-cmd ends the wait sooner)";
  expect(messages(ends)).toContain(told);
  expect(messages(fine)).not.toContain(told);
});

test("FR-64: a named user that the image lacks is created: by its tools, else by adding to its account files", async () => {
  writeFileSync(join(guestRoot, "etc/group"), "root:x:0:\nstaff:x:1001:");
  const state = await build("users", { steps: [{ type: "USER", args: ["someone"] }] });
  expect(state.build.status).toBe("ready");
  const tried = agent.commands.filter((command) => command.args.includes("someone"));
  expect(tried.map(({ cmd, args, user }) => [cmd, args.join(" "), user])).toEqual([
    ["useradd", "-m -s /bin/bash someone", "root"],
    ["adduser", "-D someone", "root"],
  ]);
  expect(messages(state)).toContain("created user someone");
  const read = (name: string): string => readFileSync(join(guestRoot, name), "utf8");
  expect(read("etc/passwd")).toEndWith(
    "app:x:1000:1000::/home/app:/bin/sh\nsomeone:x:1002:1002::/home/someone:/bin/bash\n",
  );
  expect(read("etc/group")).toBe("root:x:0:\nstaff:x:1001:\nsomeone:x:1002:\n");
  expect(existsSync(join(guestRoot, "home/someone"))).toBeTrue();
  rmSync(join(guestRoot, "etc"), { recursive: true });
  mkdirSync(join(guestRoot, "etc"));
  expect((await build("bare", { steps: [{ type: "USER", args: ["me:us"] }] })).build.status).toBe("ready");
  expect(read("etc/passwd")).toBe("root:x:0:0:root:/root:/bin/sh\nme:x:1001:1001::/home/me:/bin/bash\n");
  expect(read("etc/group")).toBe("us:x:1000:\nme:x:1001:\n");
});

test("FR-60: bounded: a step that hangs, a VM that dies, a registry that stalls", async () => {
  await templates[Symbol.asyncDispose]();
  templates = open({ buildMs: 2500 });
  await templates.start();
  const hangs = await build("hangs", { steps: [{ type: "RUN", args: ["sleep 60"] }] });
  expect(hangs.build).toMatchObject({ status: "error", reason: { step: "1" } });
  await templates[Symbol.asyncDispose]();
  templates = open({ buildMs: 300 });
  await templates.start();
  resolveImage = () => Promise.withResolvers<void>().promise;
  const stalls = await build("stalls");
  expect(stalls.build.reason).toEqual({ message: "the build did not end within 0.3 s", step: "base" });
  resolveImage = async () => undefined;
  await templates[Symbol.asyncDispose]();
  templates = open();
  await templates.start();
  const made = await templates.create({ name: "dies", tags: [] });
  await templates.startBuild(made.templateId, made.buildId, { steps: [{ type: "RUN", args: ["sleep 61"] }] });
  await runs("sleep 61");
  for (const sandbox of factory.live) sandbox.die();
  const died = await ended(made.templateId, made.buildId);
  expect(died.build.reason).toMatchObject({
    step: "1",
    message: expect.stringContaining("VM of the build ended"),
  });
});

test("a rebuild under the same name: the old build serves until the new one is ready, also when that fails", async () => {
  const first = await build("app", { steps: [{ type: "ENV", args: ["V", "1"] }] });
  const failed = await build("app", { steps: [{ type: "RUN", args: ["exit 1"] }] });
  expect(failed.record.templateId).toBe(first.record.templateId);
  expect((await templates.resolve("app"))?.id).toBe(first.record.id);
  const made = await templates.create({ name: "app", tags: [] });
  expect((await templates.resolve("app"))?.id).toBe(first.record.id);
  const go = join(home, "go");
  await templates.startBuild(made.templateId, made.buildId, { steps: [untilThere(go)] });
  expect((await templates.resolve("app"))?.id).toBe(first.record.id);
  writeFileSync(go, "");
  const second = await ended(made.templateId, made.buildId);
  expect(second.record.aliases).toEqual(["app"]);
  expect((await templates.resolve("app"))?.id).toBe(second.record.id);
  expect((await templates.resolve(first.record.templateId))?.id).toBe(second.record.id);
  expect(await templates.list()).toHaveLength(3);
});

test("tags: each names its build, and a build without one is the default", async () => {
  const one = await templates.create({ name: "tool:v1", tags: ["stable"] });
  expect(one).toMatchObject({ alias: "tool", tags: ["v1", "stable"] });
  const two = await templates.create({ name: "tool", tags: [] });
  expect(two).toMatchObject({ templateId: one.templateId, tags: ["default"] });
  await templates.startBuild(one.templateId, two.buildId, { steps: [] });
  await ended(one.templateId, two.buildId);
  expect((await templates.resolve("tool:stable"))?.id).toBe(one.buildId);
  expect((await templates.resolve("tool"))?.id).toBe(two.buildId);
  expect(await templates.resolve("tool:v2")).toBeUndefined();
});

test("tags are assigned to the build a name names, moved, listed and removed; publication is per template", async () => {
  const first = await build("tagged");
  const second = await build("tagged");
  const [one, two] = [first.record.id, second.record.id];
  expect(await templates.assignTags("tagged", ["v2", "stable", "v2"])).toEqual({
    buildId: two,
    tags: ["v2", "stable"],
  });
  await repository.bindAlias("tagged:v1", one);
  // A tag that exists moves; the target may be a tag itself.
  expect((await templates.assignTags("tagged:v1", ["stable"])).buildId).toBe(one);
  const listed = (await templates.tags("tagged")).map(({ tag, buildId }) => `${tag} ${buildId}`);
  expect(listed.toSorted()).toEqual([`default ${two}`, `stable ${one}`, `v1 ${one}`, `v2 ${two}`].toSorted());
  await templates.removeTags("tagged", ["stable", "never-there"]);
  expect(await templates.resolve("tagged:stable")).toBeUndefined();
  expect((await templates.resolve("tagged:v1"))?.id).toBe(one);
  const refused: readonly [() => Promise<unknown>, number][] = [
    [() => templates.removeTags("tagged", ["v1", "default"]), 400],
    [() => templates.removeTags("unknown", ["v1"]), 404],
    [() => templates.assignTags("unknown", ["v1"]), 404],
    [() => templates.assignTags("tagged", ["not/a/tag"]), 400],
    [() => templates.tags("unknown"), 404],
    [() => templates.setPublic("unknown", true), 404],
  ];
  for (const [attempt, status] of refused) await expect(attempt()).rejects.toMatchObject({ status });
  expect((await templates.resolve("tagged:v1"))?.id).toBe(one);
  expect((await templates.setPublic("tagged", false)).toSorted()).toEqual([
    "tagged",
    "tagged:v1",
    "tagged:v2",
  ]);
  for (const id of [one, two]) expect((await repository.get(id))?.public).toBe(false);
  expect((await repository.get(one))?.committed).toBeDefined();
});

test("10 creations of one new name at once: one template with 10 builds", async () => {
  const made = await Promise.all(
    Array.from({ length: 10 }, () => templates.create({ name: "same", tags: [] })),
  );
  expect(new Set(made.map((build) => build.templateId)).size).toBe(1);
  expect(new Set(made.map((build) => build.buildId)).size).toBe(10);
});

test("a template from a template keeps its resources and adds to its context", async () => {
  await build("parent", { steps: [{ type: "ENV", args: ["P", "1"] }] }, 3);
  const child = await build(
    "child",
    { fromTemplate: "parent", steps: [{ type: "ENV", args: ["C", "2"] }] },
    8,
  );
  expect(child.build.reason).toBeUndefined();
  expect(child.record.resources.cpuCount).toBe(3);
  expect(child.record.committed?.context.envVars).toMatchObject({ P: "1", C: "2", FROM_IMAGE: "yes" });
  expect(factory.starts).toBe(2);
});

test("bad requests are refused before anything starts", async () => {
  const made = await templates.create({ name: "x", tags: [] });
  const start = (request: Partial<BuildStartRequest>): Promise<void> =>
    templates.startBuild(made.templateId, made.buildId, { steps: [], ...request });
  await expect(start({ fromImage: "a", fromTemplate: "b" })).rejects.toMatchObject({ status: 400 });
  for (const step of [
    { type: "COPY", args: ["a", "b"] },
    { type: "ENV", args: ["odd"] },
    { type: "FROM", args: ["x"] },
    { type: "RUN", args: [] },
    { type: "WORKDIR", args: [" "] },
  ]) {
    await expect(start({ steps: [step] })).rejects.toMatchObject({
      status: 400,
      message: expect.stringContaining("step 1"),
    });
  }
  await expect(templates.startBuild(made.templateId, newId(), { steps: [] })).rejects.toMatchObject({
    status: 404,
  });
  await expect(templates.startBuild("other", made.buildId, { steps: [] })).rejects.toMatchObject({
    status: 404,
  });
  await expect(templates.build(made.templateId, "nonsense")).rejects.toMatchObject({
    code: "build_not_found",
  });
  await expect(templates.create({ name: "a b", tags: [] })).rejects.toMatchObject({ code: "invalid_alias" });
  await expect(templates.create({ name: "ok", tags: ["no/good"] })).rejects.toMatchObject({
    code: "invalid_alias",
  });
  await expect(templates.create({ name: "ok", tags: [], cpuCount: 0 })).rejects.toMatchObject({
    status: 400,
  });
  await expect(templates.create({ name: "ok", tags: [], memoryMiB: 64 })).rejects.toMatchObject({
    status: 400,
  });
  await expect(templates.create({ name: "ok", tags: [], minFreeDiskMiB: 1024 })).rejects.toMatchObject({
    status: 400,
    message: expect.stringContaining("disks of 1024 MiB"),
  });
  await templates.create({ name: "ok", tags: [], minFreeDiskMiB: 1023 });
  expect(factory.starts).toBe(0);
  await start({});
  await expect(start({})).rejects.toMatchObject({ code: "build_state_conflict", status: 409 });
  await ended(made.templateId, made.buildId);
});

test("deletion: refused while a build runs, complete afterwards, 404 for what is not there", async () => {
  await build("app");
  const made = await templates.create({ name: "app", tags: [] });
  const go = join(home, "go");
  await templates.startBuild(made.templateId, made.buildId, { steps: [untilThere(go)] });
  await expect(templates.delete("app")).rejects.toMatchObject({ code: "template_busy", status: 409 });
  writeFileSync(go, "");
  await ended(made.templateId, made.buildId);
  await templates.delete("app");
  expect(await templates.list()).toEqual([]);
  expect(await templates.resolve("app")).toBeUndefined();
  expect(readdirSync(join(repository.stagingDir, "logs"))).toEqual([]);
  expect(deletions).toBe(1);
  await expect(templates.delete("app")).rejects.toMatchObject({ code: "template_not_found", status: 404 });
});

/** Stops the next call of a repository's method, before it or with its result, until it is let go. */
class Standstill {
  readonly #stops = new Map<string, { before: boolean; reached: () => void; go: Promise<void> }>();

  constructor(private readonly real: SnapshotRepository) {}

  at(method: keyof SnapshotRepository, when: "before" | "after") {
    const reached = Promise.withResolvers<void>();
    const go = Promise.withResolvers<void>();
    this.#stops.set(method, { before: when === "before", reached: reached.resolve, go: go.promise });
    return { reached: reached.promise, letGo: go.resolve };
  }

  repository(): SnapshotRepository {
    return new Proxy(this.real, {
      get: (real, name) => {
        const value: unknown = Reflect.get(real, name, real);
        if (typeof value !== "function") return value;
        return async (...args: unknown[]) => {
          const stop = this.#stops.get(String(name));
          this.#stops.delete(String(name));
          const wait = (): Promise<void> => {
            stop?.reached();
            return stop?.go ?? Promise.resolve();
          };
          if (stop?.before) await wait();
          const result: unknown = await value.apply(real, args);
          if (stop?.before === false) await wait();
          return result;
        };
      },
    });
  }
}

describe("a template that is deleted meanwhile", () => {
  let stand: Standstill;

  beforeEach(async () => {
    await templates[Symbol.asyncDispose]();
    stand = new Standstill(repository);
    repository = stand.repository();
    templates = open();
    await templates.start();
  });

  /** Nothing of it: neither records nor names, logs or uploaded files. */
  async function expectNothing(): Promise<void> {
    expect(await repository.list()).toEqual([]);
    const root = join(home, "repository");
    expect(readdirSync(join(root, "catalog/records"))).toEqual([]);
    expect(readdirSync(join(root, "catalog/aliases"))).toEqual([]);
    expect(readdirSync(join(repository.stagingDir, "logs"))).toEqual([]);
    expect(readdirSync(join(repository.stagingDir, "files"))).toEqual(["staging"]);
    expect(readdirSync(join(repository.stagingDir, "files/staging"))).toEqual([]);
  }

  const start = ({ templateId, buildId }: { templateId: string; buildId: string }) =>
    templates.startBuild(templateId, buildId, { fromImage: "x", steps: [] });

  /** Of work that is under way: `done`, or code and status of its error. */
  const outcome = (work: Promise<unknown>): Promise<string> =>
    work.then(
      () => "done",
      (error: unknown) => (error instanceof AenvError ? `${error.code} ${error.status}` : String(error)),
    );

  test("a build that was looked up before and starts after it is refused", async () => {
    const made = await templates.create({ name: "app", tags: [] });
    const look = stand.at("get", "after");
    const started = outcome(start(made));
    await look.reached;
    await templates.delete("app");
    look.letGo();
    expect(await started).toBe("build_not_found 404");
    await expectNothing();
    expect(factory.starts).toBe(0);
  });

  test("what comes while it is being deleted waits, and finds nothing: builds, files, tags, publication", async () => {
    const made = await templates.create({ name: "app", tags: [] });
    const removal = stand.at("delete", "before");
    const deleted = templates.delete("app");
    await removal.reached;
    const late = [
      start(made),
      upload(made.templateId, HASH_OF("a"), [{ path: "f", content: "f" }]),
      templates.assignTags("app", ["v2"]),
      templates.setPublic("app", false),
    ].map(outcome);
    const again = templates.create({ name: "app", tags: [] });
    const twice = outcome(templates.delete("app"));
    await Bun.sleep(20);
    removal.letGo();
    expect([await outcome(deleted), await twice]).toEqual(["done", "done"]);
    expect(await Promise.all(late)).toEqual([
      "build_not_found 404",
      ...Array.from({ length: 3 }, () => "template_not_found 404"),
    ]);
    // A new one of that name, as if it had been asked for after.
    const { templateId, buildId } = await again;
    expect(templateId).toBe(buildId);
    expect(templateId).not.toBe(made.templateId);
    expect((await repository.list()).map(({ id }) => id)).toEqual([buildId]);
    await start({ templateId, buildId });
    expect((await ended(templateId, buildId)).build.status).toBe("ready");
    await templates.delete("app");
    await expectNothing();
    expect(deletions).toBe(2);
  });

  test("a deletion that comes while a build is being accepted waits, and is refused", async () => {
    const made = await templates.create({ name: "app", tags: [] });
    const go = join(home, "go");
    const mark = stand.at("put", "before");
    const started = templates.startBuild(made.templateId, made.buildId, { steps: [untilThere(go)] });
    await mark.reached;
    const deleted = outcome(templates.delete("app"));
    await Bun.sleep(20);
    mark.letGo();
    await started;
    expect(await deleted).toBe("template_busy 409");
    writeFileSync(go, "");
    expect((await ended(made.templateId, made.buildId)).build.status).toBe("ready");
    await templates.delete("app");
    await expectNothing();
  });

  test("a stop that begins while a build is being accepted ends that build, too", async () => {
    const made = await templates.create({ name: "app", tags: [] });
    const mark = stand.at("put", "before");
    const started = templates.startBuild(made.templateId, made.buildId, { steps: [untilThere("/never")] });
    await mark.reached;
    const stopped = templates[Symbol.asyncDispose]();
    mark.letGo();
    await Promise.all([started, stopped]);
    expect((await repository.get(made.buildId))?.source).toMatchObject({
      build: { status: "error", reason: { message: expect.stringContaining("shutting down") } },
    });
  });

  test("starts and deletions at any distance: the one or the other, and nothing is left", async () => {
    for (let round = 0; round < 12; round++) {
      const made = await templates.create({ name: "app", tags: [] });
      const later = async (ms: number, work: () => Promise<void>) => {
        await Bun.sleep(ms);
        return outcome(work());
      };
      const { templateId, buildId } = made;
      const steps = [untilThere("/never")];
      const [began, gone] = await Promise.all([
        later(round % 4, () => templates.startBuild(templateId, buildId, { steps })),
        later(round / 4, () => templates.delete("app")),
      ]);
      expect(["done/template_busy 409", "build_not_found 404/done"]).toContain(`${began}/${gone}`);
      if (began === "done") {
        await templates.cancel(made.templateId, made.buildId);
        await templates.delete("app");
      }
      await expectNothing();
    }
  });
});

test("a restart fails builds that were under way, keeps waiting ones, and logs of ended ones stay readable", async () => {
  const done = await build("done");
  const waiting = await templates.create({ name: "waiting", tags: [] });
  const torn = (await repository.get(waiting.buildId))!;
  const id = newId();
  const building: SnapshotRecord = {
    ...torn,
    id,
    templateId: id,
    source: { kind: "template", build: { status: "building", startedAt: "x" }, names: ["torn"] },
  };
  await repository.put(building);
  await templates[Symbol.asyncDispose]();
  templates = open();
  await templates.start();
  expect((await templates.build(id, id)).build).toMatchObject({
    status: "error",
    reason: { message: expect.stringContaining("restarted") },
  });
  expect(messages(await stateOf(done.record.templateId, done.record.id))).toEqual(messages(done));
  await templates.startBuild(waiting.templateId, waiting.buildId, { steps: [] });
  expect((await ended(waiting.templateId, waiting.buildId)).build.status).toBe("ready");
});

test("closing the service ends running builds as failed and refuses new ones", async () => {
  const made = await templates.create({ name: "app", tags: [] });
  await templates.startBuild(made.templateId, made.buildId, { steps: [{ type: "RUN", args: ["sleep 60"] }] });
  await runs("sleep 60");
  await templates[Symbol.asyncDispose]();
  expect((await templates.build(made.templateId, made.buildId)).build).toMatchObject({
    status: "error",
    reason: { message: "the server is shutting down" },
  });
  await expect(templates.create({ name: "b", tags: [] })).rejects.toMatchObject({ code: "shutting_down" });
});

test("builds beyond the limit wait for their turn", async () => {
  factory.delayMs = 30;
  const made = await Promise.all(
    Array.from({ length: 6 }, (_, i) => templates.create({ name: `n${i}`, tags: [] })),
  );
  await Promise.all(
    made.map((build) => templates.startBuild(build.templateId, build.buildId, { steps: [] })),
  );
  const states = await Promise.all(made.map((build) => ended(build.templateId, build.buildId)));
  expect(states.map((state) => state.build.status)).toEqual(Array.from({ length: 6 }, () => "ready"));
  expect(factory.maxConcurrentStarts).toBeLessThanOrEqual(2);
});

test("builds at once past what may wait are refused at the door, and every other one has its end", async () => {
  const made = await Promise.all(
    Array.from({ length: 110 }, (_, i) => templates.create({ name: `many${i}`, tags: [] })),
  );
  const refused: unknown[] = [];
  const accepted = (
    await Promise.all(
      made.map(async (build) => {
        try {
          await templates.startBuild(build.templateId, build.buildId, { steps: [] });
          return [build];
        } catch (error) {
          refused.push(error);
          return [];
        }
      }),
    )
  ).flat();
  expect(accepted).toHaveLength(102);
  expect(refused).toHaveLength(8);
  for (const error of refused)
    expect(error).toMatchObject({ status: 429, code: "build_capacity_unavailable" });
  const states = await Promise.all(accepted.map((build) => ended(build.templateId, build.buildId)));
  expect(new Set(states.map(({ build }) => build.status))).toEqual(new Set(["ready"]));
}, 120_000);

// ---- files and cached steps ----------------------------------------------------------------------

const HASH_OF = (digit: string): string => digit.repeat(64);

async function upload(
  templateId: string,
  hash: string,
  entries: Parameters<typeof makeTar>[0],
): Promise<void> {
  const body = new Blob([new Uint8Array(makeTar(entries))]).stream();
  await templates.putFiles(templateId, hash, body, { signal: new AbortController().signal });
}

test("COPY: archives are asked for, uploaded and copied; a missing one fails the build at its step", async () => {
  const made = await templates.create({ name: "copy", tags: [] });
  const hash = HASH_OF("a");
  expect(await templates.hasFiles(made.templateId, hash)).toBe(false);
  expect(await templates.hasFiles("copy", hash)).toBe(false);
  await expect(templates.hasFiles(made.templateId, "zz")).rejects.toMatchObject({ status: 400 });
  await expect(templates.hasFiles("nobody", hash)).rejects.toMatchObject({ status: 404 });
  await upload(made.templateId, hash, [
    { path: "app", type: "directory" },
    { path: "app/main", content: "main" },
  ]);
  expect(await templates.hasFiles("copy", hash)).toBe(true);
  await templates.startBuild(made.templateId, made.buildId, {
    fromImage: "x",
    steps: [
      { type: "WORKDIR", args: ["/srv"] },
      { type: "COPY", args: ["app", "here/", "", "0750"], filesHash: hash },
    ],
  });
  const state = await ended(made.templateId, made.buildId);
  expect(state.build).toMatchObject({ status: "ready" });
  expect(readFileSync(join(guestRoot, "srv/here/main"), "utf8")).toBe("main");
  expect(messages(state)).toContain("copied 2 entries, 0.0 MiB");
  await upload(made.templateId, HASH_OF("c"), [
    { path: "inner.tgz", content: compress(makeTar([{ path: "deep/file", content: "inner" }]), "gzip") },
    { path: "plain.txt", content: "plain" },
    { path: "inner.tar.xz", content: new Uint8Array([0xfd, 0x37, 0x7a, 0x58, 0x5a, 0, 0]) },
  ]);
  const add = (source: string) => ({ type: "ADD", args: [source, "/added/"], filesHash: HASH_OF("c") });
  const added = await build("copy", { fromImage: "x", steps: [add("inner.tgz"), add("plain.txt")] });
  expect(added.build).toMatchObject({ status: "ready" });
  expect(readFileSync(join(guestRoot, "added/deep/file"), "utf8")).toBe("inner");
  expect(readFileSync(join(guestRoot, "added/plain.txt"), "utf8")).toBe("plain");
  const xz = await build("copy", { fromImage: "x", steps: [add("inner.tar.xz")] });
  expect(xz.build.reason?.message).toContain("compression this server cannot read");
  const missing = await build("copy", {
    fromImage: "x",
    steps: [{ type: "COPY", args: ["app", "/x"], filesHash: HASH_OF("b") }],
  });
  expect(missing.build.reason).toMatchObject({ step: "1", message: expect.stringContaining("not uploaded") });
  const unknown = await build("copy", {
    fromImage: "x",
    steps: [{ type: "COPY", args: ["app", "/x", "nobody"], filesHash: hash }],
  });
  expect(unknown.build.reason).toMatchObject({
    step: "1",
    message: expect.stringContaining("no user nobody"),
  });
});

test("FR-66: cached steps: what changed and what follows is run again; force and lost files run all", async () => {
  const log_ = join(home, "ran");
  const run = (name: string, force = false) => ({
    type: "RUN",
    args: [`echo ${name} >> ${log_}`],
    ...(force ? { force } : {}),
  });
  const ran = (): string => readFileSync(log_, "utf8").trim().split("\n").join(" ");
  const cached = (state: Ended) => messages(state).filter((line) => line.startsWith("CACHED")).length;
  const go = async (steps: BuildStartRequest["steps"], more: Partial<BuildStartRequest> = {}) => {
    writeFileSync(log_, "");
    const state = await build("cache", { fromImage: "x", steps, ...more });
    expect(state.build.status).toBe("ready");
    return cached(state);
  };
  const env = { type: "ENV", args: ["A", "1"] };
  expect(await go([run("1"), env, run("2"), run("3")])).toBe(0);
  expect(ran()).toBe("1 2 3");
  expect(await go([run("1"), env, run("2"), run("4")])).toBe(3);
  expect(ran()).toBe("4");
  // Another environment: nothing after it is the same.
  expect(await go([run("1"), { type: "ENV", args: ["A", "2"] }, run("2"), run("4")])).toBe(1);
  expect(ran()).toBe("2 4");
  expect(await go([run("1"), env, run("2", true), run("3")])).toBe(1);
  expect(ran()).toBe("2 3");
  expect(await go([run("1"), env, run("2"), run("3")], { force: true })).toBe(0);
  // Another shape is another machine.
  const other = await templates.create({ name: "cache", tags: [], memoryMiB: 1024 });
  await templates.startBuild(other.templateId, other.buildId, { fromImage: "x", steps: [run("1")] });
  expect(cached(await ended(other.templateId, other.buildId))).toBe(0);
  // After a restart, and with a file of the newest entry lost.
  await templates[Symbol.asyncDispose]();
  const stepsDir = join(repository.stagingDir, "steps");
  templates = open();
  await templates.start();
  expect(await go([run("1"), env, run("2"), run("3")])).toBe(4);
  for (const name of readdirSync(stepsDir)) rmSync(join(stepsDir, name, "device.state"), { force: true });
  expect(await go([run("1"), env, run("2"), run("3")])).toBe(0);
  expect(ran()).toBe("1 2 3");
});

test("cancel ends a build with its reason, frees its sandbox, and is refused when none runs", async () => {
  const made = await templates.create({ name: "cancel", tags: [] });
  await expect(templates.cancel(made.templateId, made.buildId)).rejects.toMatchObject({ status: 409 });
  await templates.startBuild(made.templateId, made.buildId, {
    fromImage: "x",
    steps: [{ type: "RUN", args: ["sleep 30"] }],
  });
  await runs("sleep 30");
  await templates.cancel(made.templateId, made.buildId);
  expect(factory.live.size).toBe(0);
  const { build: record } = await templates.build(made.templateId, made.buildId);
  expect(record).toMatchObject({ status: "error", reason: { message: "the build was cancelled" } });
});

test("cancel takes a queued build out of the queue at once, and it says so", async () => {
  const hold = Promise.withResolvers<void>();
  resolveImage = () => hold.promise;
  const made = [];
  for (const name of ["one", "two", "queued"]) {
    const one = await templates.create({ name, tags: [] });
    await templates.startBuild(one.templateId, one.buildId, { fromImage: "x", steps: [] });
    made.push(one);
  }
  const [one, two, queued] = made;
  // The two before it go on: they end only when they are let.
  await templates.cancel(queued!.templateId, queued!.buildId);
  const { build: record } = await templates.build(queued!.templateId, queued!.buildId);
  expect(record).toMatchObject({ status: "error", reason: { message: "the build was cancelled" } });
  hold.resolve();
  for (const { templateId, buildId } of [one!, two!]) {
    expect((await ended(templateId, buildId)).build.status).toBe("ready");
  }
});

test("a build whose start was looked up while the server began to stop is refused, and is not lost", async () => {
  const made = await templates.create({ name: "late", tags: [] });
  const start = templates.startBuild(made.templateId, made.buildId, { fromImage: "x", steps: [] });
  start.catch(() => undefined);
  await templates[Symbol.asyncDispose]();
  await expect(start).rejects.toMatchObject({ code: "shutting_down", status: 503 });
  expect((await repository.get(made.buildId))?.source).toMatchObject({ build: { status: "waiting" } });
});

const DOCKERFILE = { dockerfile: { escape: "\\" as const } };
const step = (type: string, ...args: string[]) => ({ type, args });

test("a Dockerfile's words: variables of ENV and ARG, the image's environment, quotes; ARG is gone afterwards", async () => {
  writeFileSync(join(guestRoot, "bin/sh"), "");
  const state = await build("app", {
    ...DOCKERFILE,
    startCmd: "",
    steps: [
      step("ARG", "V", "'1 2'"),
      step("ENV", "A", '"$FROM_IMAGE-$V"', "B", "${A:-unset} \\$V"),
      step("ENV", "C", "${A%-*}"),
      step("ENV", "D", "<$constructor${__proto__:-none}${toString}>"),
      step("ARG", "C", "of ARG"),
      step("RUN", 'echo "<$V|$A|$B|$C>"'),
      { ...step("RUN", "/bin/sh", "-c", "echo exec $V"), exec: true },
      step("SHELL", "/bin/bash", "-uc"),
      step("RUN", "echo $- $0"),
      step("LABEL", "$A", "'$A'"),
      step("EXPOSE", "$V", "80"),
      step("WORKDIR", "/w"),
      step("WORKDIR", "$C"),
      step("USER", "ap${NONE:-p}"),
    ],
  });
  expect(state.build).toMatchObject({ status: "ready" });
  // No login shell, the root directory, ENV before ARG.
  expect(messages(state)).toContain("<1 2|yes-1 2|unset $V|yes>");
  expect(messages(state)).toContain("exec 1 2");
  expect(messages(state).find((line) => /^\S+ \/bin\/bash$/.test(line))).toContain("u");
  const commands = agent.commands.map(({ cmd, args }) => [cmd, ...args.slice(0, 1)]);
  expect(commands).toEqual([
    ["/bin/sh", "-c"],
    ["/bin/sh", "-c"],
    ["/bin/bash", "-uc"],
  ]);
  expect(agent.commands[0]).toMatchObject({ cwd: "/", envs: { V: "1 2", C: "yes" } });
  expect(state.record.committed!.context).toMatchObject({
    envVars: { FROM_IMAGE: "yes", A: "yes-1 2", B: "unset $V", C: "yes", D: "<none>" },
    labels: { "yes-1 2": "$A" },
    exposedPorts: ["80/tcp", "1", "2", "80"],
    workdir: "/w/yes",
    user: "app",
  });
  expect(state.record.committed!.context.envVars).not.toHaveProperty("V");
});

test("a Dockerfile's values and all of them together do not grow without end", async () => {
  const doubled = Array.from({ length: 20 }, () => step("ENV", "A", "$A$A"));
  const one = await build("one", { ...DOCKERFILE, startCmd: "", steps: [step("ENV", "A", "x"), ...doubled] });
  expect(one.build.status).toBe("error");
  expect(one.build.reason).toMatchObject({ step: "19", message: expect.stringContaining("131072 bytes") });
  const many = Array.from({ length: 30 }, (_, i) => step("ENV", `A${i}`, "$A"));
  const all = await build("all", {
    ...DOCKERFILE,
    startCmd: "",
    steps: [step("ENV", "A", "x".repeat(1 << 17)), ...many],
  });
  expect(all.build.status).toBe("error");
  expect(all.build.reason).toMatchObject({ step: "16", message: expect.stringContaining("together") });
});

test("a pattern of COPY --from with many stars takes no time", () => {
  const members: ArchiveMember[] = ["d", `d/${"a".repeat(255)}`, `d/${"a".repeat(254)}b`].map((path, i) => ({
    path,
    type: i === 0 ? "directory" : "file",
  }));
  const source = stageSource(`/d/${"*a".repeat(100)}b`);
  expect(matchSources(members, source)).toEqual([{ kind: "file", path: members[2]!.path }]);
  for (const broken of ["/d/[a", "/d/[]", "/d/[b-]"])
    expect(() => matchSources(members, stageSource(broken))).toThrow(/is not a pattern/);
});

test("a Dockerfile's commands: ENTRYPOINT with CMD starts, HEALTHCHECK is readiness, the request's win", async () => {
  writeFileSync(join(guestRoot, "bin/sh"), "");
  config = {
    ...CONFIG,
    entrypoint: ["/bin/sh", "-c"],
    cmd: ["exit 0"],
    healthcheck: ["CMD-SHELL", "test -e ok"],
    shell: ["/bin/bash", "-c"],
  };
  const started = (state: Ended) => [state.record.committed?.startCmd, state.record.committed?.readyCmd];
  const marker = join(home, "ready");
  const own = await build("own", {
    ...DOCKERFILE,
    steps: [
      { ...step("CMD", `sleep 0.05; touch ${marker}; sleep 1 # a`), exec: true },
      { ...step("HEALTHCHECK", "/bin/sh", "-c", `test -e ${marker}`), exec: true },
    ],
  });
  expect(started(own)).toEqual([
    `/bin/sh -c 'sleep 0.05; touch ${marker}; sleep 1 # a'`,
    `/bin/sh -c 'test -e ${marker}'`,
  ]);
  expect(existsSync(marker)).toBe(true);

  // An ENTRYPOINT of its own is not given the image's CMD; texts are for the image's SHELL.
  const entry = await build("entry", {
    ...DOCKERFILE,
    steps: [step("ENTRYPOINT", "exit 0 # x"), step("HEALTHCHECK", "NONE")],
  });
  expect(started(entry)).toEqual(["/bin/bash -c 'exit 0 # x'", undefined]);
  const both = await build("both", {
    ...DOCKERFILE,
    steps: [
      step("CMD", "cmd"),
      { ...step("ENTRYPOINT", "/bin/sh", "-c", "exit 0"), exec: true },
      step("HEALTHCHECK", "true"),
    ],
  });
  expect(started(both)).toEqual(["/bin/sh -c 'exit 0' /bin/bash -c cmd", "/bin/bash -c true"]);
  const given = await build("given", { ...DOCKERFILE, steps: [], startCmd: "exit 0", readyCmd: "true" });
  expect(started(given)).toEqual(["exit 0", "true"]);
  const none = await build("none", { ...DOCKERFILE, steps: [], startCmd: "" });
  expect(started(none)).toEqual([undefined, undefined]);
  expect(none.build.status).toBe("ready");
  // Others do not run what the image would.
  expect(started(await build("plain"))).toEqual([undefined, undefined]);

  config = { ...CONFIG, onBuild: ["RUN x"] };
  const refused = await build("onbuild", { ...DOCKERFILE, steps: [] });
  expect(refused.build.reason!.message).toContain("has ONBUILD instructions, which are not run: RUN x");
});

test("stages: COPY takes files of another one with owners and links, only those needed run, cached ones do not", async () => {
  writeFileSync(join(guestRoot, "bin/sh"), "");
  mkdirSync(join(guestRoot, "out/lib"), { recursive: true });
  for (const name of ["a.so", "b.so", "c.txt"]) writeFileSync(join(guestRoot, "out/lib", name), name);
  linkSync(join(guestRoot, "out/lib/a.so"), join(guestRoot, "out/again"));
  symlinkSync("/out/lib", join(guestRoot, "out/link"));
  chownSync(join(guestRoot, "out/lib/a.so"), 1234, 1235);
  const request = (last = "echo last"): Partial<BuildStartRequest> => ({
    ...DOCKERFILE,
    startCmd: "",
    stages: [
      { name: "build", fromImage: "golang", steps: [step("RUN", "echo built")] },
      { name: "unused", fromImage: "node", steps: [step("RUN", "exit 9")] },
    ],
    steps: [
      step("ENV", "TO", "/got"),
      { ...step("COPY", "out", "$TO/all", "", ""), from: 0 },
      { ...step("COPY", "/out/link/*.so", "$TO/so/", "app", "600"), from: 0 },
      { ...step("COPY", "/out/lib/[c-d].txt", "$TO/name", "", ""), from: 0 },
      step("RUN", last),
    ],
  });
  const state = await build("app", request());
  expect(state.build).toMatchObject({ status: "ready" });
  expect(messages(state)).toContain("[build 1/1] RUN echo built");
  expect(messages(state).join()).not.toContain("exit 9");
  const got = join(guestRoot, "got");
  expect(readdirSync(join(got, "all")).sort()).toEqual(["again", "lib", "link"]);
  expect(readlinkSync(join(got, "all/link"))).toBe("/out/lib");
  const [name, other] = [statSync(join(got, "all/lib/a.so")), statSync(join(got, "all/again"))];
  expect([name.uid, name.gid, name.nlink, other.ino === name.ino]).toEqual([1234, 1235, 2, true]);
  expect(readdirSync(join(got, "so")).sort()).toEqual(["a.so", "b.so"]);
  const picked = statSync(join(got, "so/a.so"));
  expect([picked.uid, picked.mode & 0o777]).toEqual([1000, 0o600]);
  expect(readFileSync(join(got, "name"), "utf8")).toBe("c.txt");

  factory.starts = 0;
  const changed = await build("app", request("echo other"));
  expect(changed.build).toMatchObject({ status: "ready" });
  expect(messages(changed)).toContain("CACHED [4/5] COPY --from=0 /out/lib/[c-d].txt /got/name");
  expect(messages(changed).join()).not.toContain("echo built");
  expect(factory.starts).toBe(1);

  const missing = await build("missing", {
    ...request(),
    steps: [{ ...step("COPY", "/out/*.zip", "/x", "", ""), from: 0 }],
  });
  expect(missing.build.reason).toEqual({ message: "nothing in the stage matches /out/*.zip", step: "1" });
  const nothing = await build("nothing", {
    ...request(),
    steps: [{ ...step("COPY", "/none", "/x", "", ""), from: 0 }],
  });
  expect(nothing.build.reason).toEqual({ message: "the stage has nothing at /none", step: "1" });
  const failed = await build("failed", { ...request(), steps: [{ ...step("COPY", "/x", "/x"), from: 1 }] });
  expect(failed.build.reason).toMatchObject({ step: "unused 1" });
});

test("a Dockerfile's requests that cannot be are refused before anything starts", async () => {
  const refused = async (request: Partial<BuildStartRequest>) => {
    const made = await templates.create({ name: "app", tags: [] });
    try {
      await templates.startBuild(made.templateId, made.buildId, { steps: [], ...request });
    } catch (error) {
      return (error as AenvError).message;
    }
    throw new Error("it was started");
  };
  expect(await refused({ stages: [{ steps: [] }] })).toBe("stages are for the steps of a Dockerfile");
  const copy = { ...step("COPY", "/a", "/b"), from: 1 };
  expect(await refused({ ...DOCKERFILE, stages: [{ steps: [] }], steps: [copy] })).toBe(
    "step 1 (COPY): there is no stage 1 before it",
  );
  const self = { ...DOCKERFILE, stages: [{ name: "s", steps: [{ ...copy, from: 0 }] }] };
  expect(await refused(self)).toBe("step s 1 (COPY): there is no stage 0 before it");
  expect(await refused({ steps: [{ ...copy, from: 0 }] })).toContain("there is no stage 0");
  expect(await refused({ ...DOCKERFILE, steps: [step("ARG", "1x", "y")] })).toContain('"1x" is not a name');
  expect(await refused({ ...DOCKERFILE, steps: [step("SHELL")] })).toContain("the program is missing");
  expect(await refused({ steps: [step("SHELL", "x")] })).toContain("unknown step type");
  expect(
    await refused({
      ...DOCKERFILE,
      steps: [{ ...step("ADD", "/a", "/b"), from: 0 }],
      stages: [{ steps: [] }],
    }),
  ).toContain("only COPY takes files from another stage");
});
