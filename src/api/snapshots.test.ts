import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { FakeSandboxFactory, fakeState } from "../../tests/support/fake-sandboxes.ts";
import { newId } from "../lib/ids.ts";
import { createLogger } from "../lib/log.ts";
import { createObserver } from "../observability/index.ts";
import { createOrchestrator, type NodeOrchestrator } from "../orchestrator/index.ts";
import { createPosixRepository } from "../snapshot/index.ts";
import { type ControlApi, createControlApi } from "./index.ts";

/* Fork and snapshot over HTTP: the real state machine and repository, VMs without machines. */

const API_KEY = "e2b_0123456789abcdef0123456789abcdef";
const log = createLogger("snapshots-test");
log.level = "silent";
const notHere = () => Promise.reject(new Error("not in this test"));

let home: string;
let orchestrator: NodeOrchestrator;
let api: ControlApi;

beforeAll(async () => {
  home = mkdtempSync("/tmp/life-api-");
  const repository = createPosixRepository({ root: join(home, "repository"), log });
  orchestrator = createOrchestrator({
    repository,
    sandboxes: new FakeSandboxFactory(),
    statePath: join(home, "state.db"),
    artifactsDir: join(home, "artifacts"),
    tokenSeed: "seed",
    defaultTimeoutSeconds: 15,
    autoResumeMinTimeoutSeconds: 60,
    evictIntervalMs: 1000,
    capacity: { sandboxes: 4 },
    log,
  });
  await orchestrator.start();
  const id = newId();
  const state = fakeState(join(home, "template"), 0);
  const context = { envVars: {}, exposedPorts: [], volumes: [], labels: {} };
  await repository.commit(
    {
      id,
      templateId: id,
      aliases: [],
      public: true,
      source: { kind: "template", build: { status: "ready" } },
      resources: { cpuCount: 1, memoryMiB: 128, diskSizeMiB: 1024 },
      createdAt: new Date().toISOString(),
      updatedAt: new Date().toISOString(),
      committed: { state, context },
    },
    state,
  );
  await repository.bindAlias("base", id);
  api = createControlApi({
    orchestrator,
    templates: {
      create: notHere,
      startBuild: notHere,
      cancel: notHere,
      hasFiles: notHere,
      putFiles: notHere,
      build: notHere,
      list: async () => [],
      resolve: (name) => repository.resolve(name),
      delete: notHere,
      assignTags: notHere,
      removeTags: notHere,
      tags: notHere,
      setPublic: notHere,
    },
    observer: createObserver({
      identity: { nodeId: "n", clusterId: newId(), serviceInstanceId: newId() },
      version: "1",
      commit: "c",
      nodeVisible: true,
      consolePath: async () => undefined,
      log,
    }),
    apiKeys: [API_KEY],
    defaultTimeoutSeconds: 15,
    sandboxProxyDomains: ["example.test"],
    version: "1",
    log,
  });
});
afterAll(async () => {
  await orchestrator.shutdown();
  rmSync(home, { recursive: true, force: true });
});

async function call(method: string, path: string, body?: unknown) {
  const response = await api.handle(
    new Request(`http://node${path}`, {
      method,
      headers: { "x-api-key": API_KEY },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    }),
  );
  const text = await response.text();
  return {
    status: response.status,
    headers: response.headers,
    // biome-ignore lint/suspicious/noExplicitAny: a test looks into answers of every shape.
    json: (text === "" ? undefined : JSON.parse(text)) as any,
  };
}

const start = async (): Promise<string> =>
  (await call("POST", "/v2/sandboxes", { templateID: "base", timeout: 100 })).json.sandboxID;

test("fork: results in order, each a sandbox or an error; the body is optional", async () => {
  const source = await start();
  const single = await call("POST", `/sandboxes/${source}/fork`);
  expect(single.status).toBe(201);
  expect(single.json).toHaveLength(1);
  expect(single.json[0]).toEqual({
    sandbox: {
      templateID: expect.any(String),
      sandboxID: expect.any(String),
      clientID: "",
      envdVersion: "0.5.15",
      alias: "base",
      envdAccessToken: orchestrator.accessToken(single.json[0].sandbox.sandboxID),
      trafficAccessToken: null,
      domain: "example.test",
    },
  });
  expect(single.headers.get("server-timing")).toContain("stopped;dur=");
  const many = await call("POST", `/sandboxes/${source}/fork`, { count: 3, timeout: 50 });
  expect(many.json.map((result: object) => Object.keys(result))).toEqual([
    ["sandbox"],
    ["sandbox"],
    ["error"],
  ]);
  expect(many.json[2].error).toMatchObject({
    code: 429,
    error_code: "capacity_unavailable",
    message: expect.stringContaining("limit is 4"),
    remediation: expect.any(String),
  });
  for (const body of [{ count: 0 }, { count: 101 }, { count: 1.5 }, { count: "2" }, { timeout: -1 }]) {
    expect((await call("POST", `/sandboxes/${source}/fork`, body)).status).toBe(400);
  }
  expect((await call("POST", `/sandboxes/${newId()}/fork`)).status).toBe(404);
  await orchestrator.pause(source);
  const paused = await call("POST", `/sandboxes/${source}/fork`);
  expect(paused).toMatchObject({ status: 409, json: { code: 409, error_code: "sandbox_state_conflict" } });
  for (const { id } of orchestrator.list()) await orchestrator.kill(id);
});

test("snapshots: made, listed by page and filter, found by name, refused with reasons", async () => {
  const source = await start();
  const made = await call("POST", `/sandboxes/${source}/snapshots`, { name: "first" });
  expect(made.status).toBe(201);
  expect(made.json).toEqual({
    snapshotID: expect.any(String),
    names: ["first"],
    cpuCount: 1,
    memoryMB: 128,
    diskSizeMB: 1024,
    createdAt: expect.any(String),
    updatedAt: expect.any(String),
  });
  expect(made.headers.get("server-timing")).toMatch(/stopped;dur=.*total;dur=.*publish;dur=/);
  const unnamed = [];
  for (let i = 0; i < 4; i++) {
    unnamed.push((await call("POST", `/sandboxes/${source}/snapshots`)).json.snapshotID);
    await Bun.sleep(2);
  }
  const one = await call("GET", "/snapshots?limit=3");
  const two = await call("GET", `/snapshots?limit=3&nextToken=${one.headers.get("x-next-token")}`);
  const listed = [...one.json, ...two.json].map((info: { snapshotID: string }) => info.snapshotID);
  expect(listed).toEqual([...unnamed.toReversed(), made.json.snapshotID]);
  expect(two.headers.get("x-next-token")).toBeNull();
  expect((await call("GET", `/snapshots?sandboxID=${source}`)).json).toHaveLength(5);
  expect((await call("GET", `/snapshots?sandboxID=${newId()}`)).json).toEqual([]);
  expect((await call("GET", "/snapshots?name=first")).json).toEqual([made.json]);
  expect((await call("GET", "/snapshots/first")).json).toEqual(made.json);
  expect((await call("GET", `/snapshots/${made.json.snapshotID}`)).json).toEqual(made.json);
  expect((await call("GET", "/snapshots/ns%2Ffirst%3Adefault")).json).toEqual(made.json);
  for (const limit of ["0", "101", "abc"]) {
    expect((await call("GET", `/snapshots?limit=${limit}`)).status).toBe(400);
  }
  for (const name of ["base", "nothing", "%25zz", newId()]) {
    expect((await call("GET", `/snapshots/${name}`)).json).toMatchObject({ code: 404 });
  }
  for (const name of ["base", "a b", newId()]) {
    const refused = await call("POST", `/sandboxes/${source}/snapshots`, { name });
    expect(refused).toMatchObject({ status: 400, json: { code: 400, remediation: expect.any(String) } });
  }
  expect((await call("POST", `/sandboxes/${newId()}/snapshots`)).status).toBe(404);
  await orchestrator.pause(source);
  expect((await call("POST", `/sandboxes/${source}/snapshots`)).status).toBe(409);
  const copy = await call("POST", "/sandboxes", { templateID: `${made.json.snapshotID}:default` });
  expect(copy).toMatchObject({ status: 201, json: { templateID: made.json.snapshotID, alias: "first" } });
});

test("network: what is in force is told of a running sandbox only", async () => {
  const { json } = await call("POST", "/sandboxes", { templateID: "base", timeout: 300 });
  const path = `/sandboxes/${json.sandboxID}/network`;
  expect(await call("GET", path)).toMatchObject({ status: 200, json: { base: "default", denyOut: [] } });
  const rules = { allowOut: ["Good.example", "192.0.2.1"], denyOut: ["0.0.0.0/0"] };
  expect((await call("PUT", path, rules)).status).toBe(204);
  expect((await call("GET", path)).json).toMatchObject({
    base: "default",
    allowOut: ["192.0.2.1/32", "good.example"],
    denyOut: ["0.0.0.0/0"],
    refused: { packets: 0, bytes: 0 },
    recentRefusals: [],
  });
  expect((await call("POST", `/sandboxes/${json.sandboxID}/pause`)).status).toBe(204);
  expect((await call("GET", path)).status).toBe(409);
  expect((await call("GET", `/sandboxes/${newId()}/network`)).status).toBe(404);
  expect((await call("DELETE", `/sandboxes/${json.sandboxID}`)).status).toBe(204);
});
