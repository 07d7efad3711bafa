import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { Sandbox } from "e2b";
import { renderApiPage } from "../../scripts/api-doc.ts";
import { fakeReport } from "../../tests/support/fake-network.ts";
import { AenvError } from "../lib/errors.ts";
import { newId } from "../lib/ids.ts";
import { createLogger } from "../lib/log.ts";
import { createObserver } from "../observability/index.ts";
import type {
  CreateColdSandboxRequest,
  CreateSandboxRequest,
  Orchestrator,
  SandboxRecord,
} from "../orchestrator/types.ts";
import { type Front, startFront } from "../proxy/index.ts";
import type { SnapshotRecord } from "../snapshot/types.ts";
import { logOf } from "../template/log-reader.ts";
import type { BuildStartRequest, TemplateCreateRequest } from "../template/types.ts";
import { errorResponse } from "./errors.ts";
import { IdempotentCalls } from "./idempotency.ts";
import { type ControlApi, createControlApi } from "./index.ts";
import { documentPath } from "./openapi.ts";
import { Ordering, paginate } from "./pagination.ts";
import * as schemas from "./schemas.ts";
import type { ApiOrchestrator, ApiTemplates } from "./types.ts";

const API_KEY = `e2b_${"0123456789abcdef".repeat(4)}`;
const log = createLogger("api-test");
log.level = "silent";

/** What the listener needs besides. */
type FrontPart = "access" | "route" | "autoResume";

/** Lifecycle rules without machines: the state machine itself is tested in its own room. */
function fakeOrchestrator() {
  const records = new Map<string, SandboxRecord>();
  const requests: CreateSandboxRequest[] = [];
  /** Of the last pause, resume or connect. */
  const asked: { memory?: boolean | undefined } = {};
  const coldRequests: Partial<CreateColdSandboxRequest>[] = [];
  const find = (id: string) => {
    const record = records.get(id);
    if (record === undefined) {
      throw new AenvError({ code: "sandbox_not_found", status: 404, message: `sandbox ${id} was not found` });
    }
    return record;
  };
  const change = (id: string, patch: Partial<SandboxRecord>) => {
    const record = { ...find(id), ...patch };
    records.set(id, record);
    return record;
  };
  const deadline = (seconds: number) => new Date(Date.now() + seconds * 1000).toISOString();
  const orchestrator: ApiOrchestrator & Pick<Orchestrator, FrontPart> = {
    async create(request) {
      if (request.template === "broken") throw new TypeError("a secret internal detail");
      if (request.template === "missing") {
        throw new AenvError({
          code: "template_not_found",
          status: 404,
          message: "template missing was not found",
        });
      }
      requests.push(request);
      const record: SandboxRecord = {
        id: newId(),
        templateId: request.template,
        state: "running",
        startedAt: new Date(Date.now() + records.size).toISOString(),
        endAt: deadline(request.timeoutSeconds),
        timeoutSeconds: request.timeoutSeconds,
        onTimeout: request.onTimeout,
        autoResume: request.autoResume,
        secure: request.secure,
        metadata: request.metadata,
        envVars: request.envVars,
        ...(request.network === undefined ? {} : { network: request.network }),
        ...(request.origin === undefined ? {} : { origin: request.origin }),
        cpuCount: 2,
        memoryMiB: 512,
        diskSizeMiB: 65536,
        envdVersion: "0.5.15",
      };
      records.set(record.id, record);
      return record;
    },
    createCold: async ({
      image,
      timeoutSeconds,
      onTimeout,
      autoResume,
      secure,
      metadata,
      envVars,
      ...more
    }) => {
      if (image === "missing") {
        throw new AenvError({ code: "image_not_found", status: 404, message: "no registry has missing" });
      }
      coldRequests.push({ image, ...more });
      return orchestrator.create({
        template: image,
        ...{ timeoutSeconds, onTimeout, autoResume, secure, metadata, envVars },
      });
    },
    get: find,
    list: () => [...records.values()],
    async kill(id) {
      find(id);
      records.delete(id);
    },
    async pause(id, options) {
      asked.memory = options?.memory;
      if (find(id).state === "paused") {
        throw new AenvError({
          code: "sandbox_state_conflict",
          status: 409,
          message: "the sandbox is paused",
        });
      }
      change(id, { state: "paused" });
    },
    resume: async (id, seconds, options) => {
      asked.memory = options?.memory;
      return change(id, { state: "running", endAt: deadline(seconds) });
    },
    async connect(id, seconds, options) {
      asked.memory = options?.memory;
      const resumed = find(id).state === "paused";
      const endAt = deadline(seconds);
      const current = find(id).endAt;
      return {
        record: change(id, { state: "running", endAt: resumed || endAt > current ? endAt : current }),
        resumed,
      };
    },
    async setTimeout(id, seconds) {
      change(id, { endAt: deadline(seconds) });
    },
    async refresh(id) {
      find(id);
    },
    updateNetwork: async (id, update) => {
      change(id, { network: { ...update } });
    },
    networkReport: async (id) => {
      find(id);
      return fakeReport();
    },
    // With the real state machine in snapshots.test.ts.
    fork: () => Promise.reject(new Error("not in this test")),
    snapshot: () => Promise.reject(new Error("not in this test")),
    listSnapshots: async () => [],
    getSnapshot: () => Promise.reject(new Error("not in this test")),
    access: (id) => (records.has(id) ? { secure: true, allowPublicTraffic: true } : undefined),
    route: () => ({ kind: "not_found" }),
    autoResume: async () => undefined,
    accessToken: (id) => `envd-${id}`,
    trafficToken: (id) => `traffic-${id}`,
    timings: () => ({}),
  };
  return { orchestrator, records, requests, coldRequests, asked };
}

function fakeTemplates() {
  const asked: TemplateCreateRequest[] = [];
  const started: { templateId: string; buildId: string; request: BuildStartRequest }[] = [];
  const template: SnapshotRecord = {
    id: newId(),
    templateId: newId(),
    aliases: ["base"],
    public: true,
    source: { kind: "template", build: { status: "error", reason: { message: "RUN failed", step: "1" } } },
    resources: { cpuCount: 2, memoryMiB: 512, diskSizeMiB: 0 },
    createdAt: "2026-01-01T00:00:00.000Z",
    updatedAt: "2026-01-01T00:00:00.000Z",
  };
  const logs = Array.from({ length: 250 }, (_, i) => ({
    timestamp: new Date(1_700_000_000_000 + i).toISOString(),
    level: i % 2 === 0 ? ("info" as const) : ("debug" as const),
    message: `line ${i}`,
  }));
  const templates: ApiTemplates = {
    async create(request) {
      asked.push(request);
      return {
        templateId: template.templateId,
        buildId: template.id,
        alias: request.name,
        tags: request.tags.length > 0 ? [...request.tags] : ["default"],
      };
    },
    cancel: async () => undefined,
    hasFiles: async () => false,
    putFiles: async () => undefined,
    async startBuild(templateId, buildId, request) {
      started.push({ templateId, buildId, request });
    },
    async build(_templateId, buildId) {
      if (buildId !== template.id) {
        throw new AenvError({ code: "build_not_found", status: 404, message: "no such build" });
      }
      return {
        record: template,
        build: { status: "error", reason: { message: "RUN failed", step: "1" } },
        logs: logOf(() => logs),
      };
    },
    list: async () => [template],
    resolve: async (name) => (name === "base" || name === template.templateId ? template : undefined),
    async delete(name) {
      if (name !== "base") {
        throw new AenvError({
          code: "template_not_found",
          status: 404,
          message: `template ${name} was not found`,
        });
      }
    },
    assignTags: async (_target, tags) => ({ buildId: template.id, tags: [...tags] }),
    removeTags: async () => undefined,
    tags: async () => [{ tag: "default", buildId: template.id, createdAt: template.createdAt }],
    setPublic: async () => ["base"],
  };
  return { templates, template, asked, started };
}

const observer = createObserver({
  identity: { nodeId: "node-1", clusterId: newId(), serviceInstanceId: newId() },
  version: "1.2.3",
  commit: "abc",
  nodeVisible: true,
  consolePath: async () => undefined,
  log,
});
let api: ControlApi;
let front: Front;
let base: string;
const fake = fakeOrchestrator();
const fakes = fakeTemplates();
const apiOptions = {
  orchestrator: fake.orchestrator,
  templates: fakes.templates,
  observer,
  apiKeys: [API_KEY],
  defaultTimeoutSeconds: 15,
  sandboxProxyDomains: [],
  version: "1.2.3",
  log,
};

beforeAll(() => {
  api = createControlApi(apiOptions);
  front = startFront({
    hostname: "127.0.0.1",
    port: 0,
    domains: [],
    apiKeys: [API_KEY],
    control: api,
    orchestrator: fake.orchestrator,
    log,
  });
  base = `http://127.0.0.1:${front.port}`;
});

afterAll(() => front.stop(100));

async function call(method: string, path: string, body?: unknown, headers: Record<string, string> = {}) {
  const response = await fetch(`${base}${path}`, {
    method,
    headers: { "x-api-key": API_KEY, ...headers },
    ...(body === undefined ? {} : { body: typeof body === "string" ? body : JSON.stringify(body) }),
  });
  const text = await response.text();
  return {
    status: response.status,
    headers: response.headers,
    json: text === "" ? undefined : JSON.parse(text),
  };
}

describe("the unmodified SDK", () => {
  const connection = () => ({ apiKey: API_KEY, apiUrl: base, sandboxUrl: base });

  test("create, list, connect, timeout, pause, kill", async () => {
    const sandbox = await Sandbox.create("base", {
      ...connection(),
      metadata: { "k 1": "v&=%" },
      envs: { A: "1" },
      timeoutMs: 60_000,
    });
    expect(fake.requests.at(-1)).toMatchObject({
      template: "base",
      secure: true,
      envVars: { A: "1" },
      timeoutSeconds: 60,
    });
    const listed = Sandbox.list({ ...connection(), query: { metadata: { "k 1": "v&=%" } } });
    expect((await listed.nextItems()).map((item) => item.sandboxId)).toEqual([sandbox.sandboxId]);
    const none = Sandbox.list({ ...connection(), query: { metadata: { "k 1": "other" } } });
    expect(await none.nextItems()).toEqual([]);
    const info = await Sandbox.getInfo(sandbox.sandboxId, connection());
    expect(info.state).toBe("running");
    const full = await Sandbox.create("base", {
      ...connection(),
      secure: true,
      allowInternetAccess: false,
      lifecycle: { onTimeout: "pause", autoResume: true },
      network: {
        allowOut: ["api.example.org"],
        denyOut: ["0.0.0.0/0"],
        allowPublicTraffic: false,
        maskRequestHost: "localhost:$" + "{PORT}",
      },
    });
    expect(fake.requests.at(-1)).toMatchObject({ autoResume: true, onTimeout: "pause" });
    await full.kill();
    await Sandbox.setTimeout(sandbox.sandboxId, 120_000, connection());
    expect(await Sandbox.pause(sandbox.sandboxId, connection())).toBe(true);
    expect(await Sandbox.pause(sandbox.sandboxId, connection())).toBe(false);
    const again = await Sandbox.connect(sandbox.sandboxId, connection());
    expect(again.sandboxId).toBe(sandbox.sandboxId);
    expect(await Sandbox.kill(sandbox.sandboxId, connection())).toBe(true);
    expect(await Sandbox.kill(sandbox.sandboxId, connection())).toBe(false);
  });

  test("a wrong key is an authentication error", async () => {
    const attempt = Sandbox.create("base", { ...connection(), apiKey: `e2b_${"f".repeat(64)}` });
    await expect(attempt).rejects.toThrow(/authentication|API key|401/i);
  });
});

describe("keys", () => {
  test("missing, wrong and repeated keys are refused with a body", async () => {
    for (const headers of [{}, { "x-api-key": "nope" }, { "x-api-key": `${API_KEY}, ${API_KEY}` }]) {
      const response = await fetch(`${base}/sandboxes`, { headers: headers as Record<string, string> });
      expect(response.status).toBe(401);
      expect(await response.json()).toMatchObject({ code: 401, error_code: "unauthorized" });
      expect(response.headers.get("access-control-allow-origin")).toBe("*");
    }
    expect((await fetch(`${base}/nowhere`)).status).toBe(401);
    expect(
      (await fetch(`${base}/sandboxes`, { headers: { authorization: `Bearer ${API_KEY}` } })).status,
    ).toBe(401);
  });

  test("while a key is changed the old one and the new one are accepted, and no third", async () => {
    const { handle } = createControlApi({ ...apiOptions, apiKeys: ["n".repeat(32), "o".repeat(32)] });
    const status = async (key: string) =>
      (await handle(new Request("http://localhost/v2/sandboxes", { headers: { "x-api-key": key } }))).status;
    expect(await Promise.all(["n", "o", "p"].map((letter) => status(letter.repeat(32))))).toEqual([
      200, 200, 401,
    ]);
  });

  test("health, metrics and the document are open", async () => {
    const health = await fetch(`${base}/health`);
    expect(health.status).toBe(204);
    expect(await (await fetch(`${base}/metrics`)).text()).toContain("process_resident_memory_bytes");
    expect((await fetch(`${base}/docs`)).headers.get("content-type")).toContain("text/html");
  });
});

describe("bad input", () => {
  test.each([0, -1, -3600, "60", 1e12, 1.5, null])(
    "timeout %p is refused everywhere, with the field's name",
    async (timeout) => {
      const before = fake.records.size;
      const id = newId();
      for (const [path, body] of [
        ["/sandboxes", { templateID: "base", timeout }],
        ["/v2/sandboxes", { templateID: "base", timeout }],
        [`/sandboxes/${id}/resume`, { timeout }],
        [`/sandboxes/${id}/connect`, { timeout }],
        [`/v2/sandboxes/${id}/connect`, { timeout }],
        [`/sandboxes/${id}/timeout`, { timeout }],
      ] as const) {
        const reply = await call("POST", path, body);
        expect(reply.status).toBe(400);
        expect(reply.json.message).toContain("timeout");
        expect(reply.json.code).toBe(400);
      }
      expect(fake.records.size).toBe(before);
    },
  );

  test("malformed JSON, wrong types, missing fields", async () => {
    expect((await call("POST", "/sandboxes", "{")).json).toMatchObject({
      code: 400,
      message: "the request body is not JSON",
    });
    expect((await call("POST", "/sandboxes", "[]")).status).toBe(400);
    expect((await call("POST", "/sandboxes", {})).json.message).toContain("templateID");
    expect(
      (await call("POST", "/sandboxes", { templateID: "base", metadata: { a: 1 } })).json.message,
    ).toContain("metadata.a");
  });

  test("what would get lost or break later is refused: __proto__, names and values no environment can have", async () => {
    const before = fake.records.size;
    for (const metadata of ['{"__proto__":"x"}', '{"\\u005f_proto__":"x"}']) {
      const reply = await call("POST", "/sandboxes", `{"templateID":"base","metadata":${metadata}}`);
      expect([reply.status, reply.json.message]).toEqual([400, expect.stringContaining("__proto__")]);
    }
    for (const envVars of [{ "A=B": "x" }, { "": "x" }, { "A\0": "x" }, { A: "x\0y" }]) {
      const reply = await call("POST", "/sandboxes", { templateID: "base", envVars });
      expect([reply.status, reply.json.message]).toEqual([400, expect.stringContaining("envVars")]);
    }
    const metadata = { constructor: "x", toString: "\u00e9" };
    const made = await call("POST", "/sandboxes", { templateID: "base", metadata, envVars: { "A B": "" } });
    expect(made.status).toBe(201);
    expect(fake.records.size).toBe(before + 1);
  });

  test("a path that is not percent-encoded UTF-8 is a bad request, not a failure", async () => {
    for (const path of ["/templates/%ff", "/templates/aliases/%ff", "/snapshots/%ff"]) {
      const reply = await call("GET", path);
      expect([path, reply.status, reply.json.message]).toEqual([path, 400, expect.stringContaining("UTF-8")]);
    }
  });

  test("create fields that are kept, that may be empty, and that are refused when they are not", async () => {
    const mcp = { server: { a: 1 } };
    const body = { templateID: "base", mcp, iam: { tokens: {} }, autoPauseMemory: true, volumeMounts: [] };
    const made = await call("POST", "/v2/sandboxes", { ...body, customExtensionParams: {} });
    expect(made.status).toBe(201);
    expect(fake.requests.at(-1)?.mcp).toEqual(mcp);
    expect((await call("POST", "/sandboxes", { templateID: "base", mcp: null })).status).toBe(201);
    for (const [field, name] of [
      [{ iam: { tokens: { a: { audience: "x", tokenType: "jwt" } } } }, "iam.tokens"],
      [{ volumeMounts: [{ name: "v", path: "/v" }] }, "volumeMounts"],
      [{ network: { rules: { "a.example": [] } } }, "network.rules"],
      [{ network: { egressProxy: { address: "127.0.0.1:1" } } }, "network.egressProxy"],
      [{ network: { httpsPorts: [443] } }, "network.httpsPorts"],
    ] as const) {
      const refused = await call("POST", "/v2/sandboxes", { templateID: "base", ...field });
      expect([refused.status, refused.json.error_code]).toEqual([400, "unsupported_field"]);
      expect(refused.json.message).toContain(name);
    }
  });

  test("families that are not built answer 404 with a body, as clients expect it of them", async () => {
    const id = newId();
    for (const [method, path] of [
      ["GET", "/secrets"],
      ["POST", "/secrets"],
      ["DELETE", `/secrets/${id}`],
      ["GET", "/volumes"],
      ["POST", "/volumes"],
      ["DELETE", `/volumes/${id}`],
      ["GET", `/volumecontent/${id}/path?path=/a`],
      ["PUT", `/templates/${id}/builds/${id}/builder`],
      ["POST", "/templates"],
      ["POST", "/v2/templates"],
      ["POST", `/templates/${id}`],
      ["POST", `/templates/${id}/builds/${id}`],
      ["GET", `/teams/${id}/metrics`],
      ["GET", "/api-keys"],
      ["POST", "/access-tokens"],
      ["GET", "/admin/teams"],
    ] as const) {
      const reply = await call(method, path, method === "POST" || method === "PUT" ? {} : undefined);
      expect([path, reply.status, reply.json]).toMatchObject([
        path,
        404,
        {
          code: 404,
          error_code: "route_not_found",
          message: `route not found: ${method} ${path.split("?")[0]}`,
        },
      ]);
    }
  });

  test("what is not built is refused by name", async () => {
    for (const [extra, name] of [
      [{ volumeMounts: [{ name: "v", path: "/v" }] }, "volumeMounts"],
      [{ customExtensionParams: { a: 1 } }, "customExtensionParams"],
      [{ network: { rules: { "a.b": [] } } }, "network.rules"],
      [{ network: { httpsPorts: [8443] } }, "network.httpsPorts"],
      [{ network: { egressProxy: { address: "proxy.example:1080" } } }, "network.egressProxy"],
    ] as const) {
      const reply = await call("POST", "/v2/sandboxes", { templateID: "base", ...extra });
      expect(reply.status).toBe(400);
      expect(reply.json.message).toContain(name);
      const cure = name === "volumeMounts" ? /attachedDrives.*aenv upload/ : /leave/;
      expect(reply.json.remediation).toMatch(cure);
    }
  });

  test("a wish that is not known is refused by name, not dropped", async () => {
    const before = fake.records.size;
    for (const [path, what] of [
      ["/sandboxes", { templateID: "base" }],
      ["/v2/sandboxes", { templateID: "base" }],
      ["/sandboxes-cold", { image: "debian:12" }],
    ] as const) {
      for (const [extra, name] of [
        [{ hibernate: true }, "hibernate"],
        [{ autoResume: { enabled: true, after: 3 } }, "autoResume.after"],
        [{ network: { dnsServers: ["9.9.9.9"] } }, "network.dnsServers"],
      ] as const) {
        const reply = await call("POST", path, { ...what, ...extra });
        expect(reply.json).toMatchObject({ code: 400 });
        expect(reply.json.message).toContain(name);
      }
    }
    const several = await call("POST", "/v2/sandboxes", { templateID: "base", one: 1, two: 2, "\n😀": 3 });
    expect(several.json.message).toContain("unknown field: one, two, ???");
    expect(several.json.remediation).toContain("openapi.json");
    expect(fake.records.size).toBe(before);
  });

  test("elsewhere unknown fields are ignored, and the answer names them", async () => {
    const { json } = await call("POST", "/v2/sandboxes", { templateID: "base" });
    const reply = await call("POST", `/sandboxes/${json.sandboxID}/timeout`, {
      timeout: 60,
      grace: 1,
      "a b": 2,
    });
    expect(reply.status).toBe(204);
    expect(reply.headers.get("x-agentenv-ignored-fields")).toBe("grace, a?b");
    const silent = await call("POST", `/sandboxes/${json.sandboxID}/timeout`, { timeout: 60 });
    expect(silent.headers.get("x-agentenv-ignored-fields")).toBeNull();
  });

  test("without memory or with it: every call that could mean it says so, and the default is with", async () => {
    const { json } = await call("POST", "/v2/sandboxes", { templateID: "base" });
    for (const [path, status] of [
      ["sandboxes/:/pause", 204],
      ["sandboxes/:/resume", 201],
      ["sandboxes/:/connect", 200],
      ["v2/sandboxes/:/connect", 200],
    ] as const) {
      for (const [given, memory] of [
        [{ memory: false }, false],
        [{ memory: true }, true],
        [{}, true],
      ] as const) {
        if (path.endsWith("pause")) await call("POST", `/sandboxes/${json.sandboxID}/resume`);
        const reply = await call("POST", `/${path.replace(":", json.sandboxID)}`, { timeout: 60, ...given });
        expect([path, reply.status, fake.asked.memory]).toEqual([path, status, memory]);
      }
      const wrong = await call("POST", `/${path.replace(":", json.sandboxID)}`, {
        timeout: 60,
        memory: "no",
      });
      expect(wrong.status).toBe(400);
    }
  });

  test("autoPauseMemory: false is about a pause at the deadline that traffic does not undo", async () => {
    const ask = (path: string, body: object) =>
      call("POST", path, { templateID: "base", autoPauseMemory: false, ...body });
    for (const [path, body, says] of [
      ["/v2/sandboxes", {}, "it needs autoPause: true"],
      ["/sandboxes", { autoPause: false }, "it needs autoPause: true"],
      ["/v2/sandboxes", { autoPause: true, autoResume: { enabled: true } }, "autoResume.enabled"],
      ["/sandboxes", { autoResume: { enabled: true } }, "autoResume.enabled"],
    ] as const) {
      const refused = await ask(path, body);
      expect(refused.json).toMatchObject({ code: 400, error_code: "invalid_auto_pause_memory" });
      expect(refused.json.message).toContain(says);
    }
    for (const [path, body] of [
      ["/v2/sandboxes", { autoPause: true, autoResume: { enabled: false } }],
      ["/sandboxes", {}],
    ] as const) {
      expect((await ask(path, body)).status).toBe(201);
      expect(fake.requests.at(-1)).toMatchObject({ onTimeout: "pause", autoPauseMemory: false });
    }
    await call("POST", "/sandboxes", { templateID: "base", autoPauseMemory: true });
    expect(fake.requests.at(-1)?.autoPauseMemory).toBeUndefined();
  });

  test("cold starts: fields, defaults, bounds", async () => {
    const reply = await call("POST", "/sandboxes-cold", {
      image: "debian:12",
      cpuCount: 1,
      memoryMB: 256,
      diskSizeMB: 2048,
      extraBootArgs: "quiet",
      allowInternetAccess: false,
      secure: true,
    });
    expect(reply.status).toBe(201);
    expect(reply.headers.get("x-agentenv-sandbox-id")).toBe(reply.json.sandboxID);
    expect(reply.json).toMatchObject({ templateID: "debian:12", envdAccessToken: expect.any(String) });
    expect(fake.coldRequests.at(-1)).toEqual({
      image: "debian:12",
      cpuCount: 1,
      memoryMiB: 256,
      diskSizeMiB: 2048,
      extraBootArgs: "quiet",
      allowInternetAccess: false,
    });
    expect(fake.requests.at(-1)).toMatchObject({ timeoutSeconds: 15, onTimeout: "pause", secure: true });
    expect((await call("POST", "/sandboxes-cold", { image: "missing" })).status).toBe(400);
    for (const [extra, name] of [
      [{ image: "" }, "image"],
      [{ cpuCount: 0 }, "cpuCount"],
      [{ memoryMB: 64 }, "memoryMB"],
      [{ diskSizeMB: 1500 }, "diskSizeMB"],
      [{ diskSizeMB: 0 }, "diskSizeMB"],
      [{ diskSizeMB: 16_777_216 }, "16776192"],
      [{ attachedDrives: [{ driveID: "d", source: { image: "a" }, diskSizeMB: 16_777_216 }] }, "16776192"],
      [{ attachedDrives: [{ driveID: "", source: { image: "a" } }] }, "attachedDrives"],
      [{ attachedDrives: [{ driveID: "d", source: {} }] }, "attachedDrives"],
      [{ attachedDrives: [{ driveID: "d", source: { image: "a" }, iops: 1 }] }, "iops"],
      [{ attachedDrives: [{ driveID: "d", source: { image: "a" }, diskSizeMB: 1500 }] }, "diskSizeMB"],
      [{ templateID: "base" }, "templateID"],
      [{ allow_internet_access: false }, "allow_internet_access"],
    ] as const) {
      const refused = await call("POST", "/sandboxes-cold", { image: "debian:12", ...extra });
      expect(refused.json).toMatchObject({ code: 400 });
      expect(refused.json.message).toContain(name);
    }
  });

  test("an unknown template is 400 in v1 and 404 in v2", async () => {
    expect((await call("POST", "/sandboxes", { templateID: "missing" })).status).toBe(400);
    expect((await call("POST", "/v2/sandboxes", { templateID: "missing" })).status).toBe(404);
  });

  test("an internal error shows nothing of itself", async () => {
    const reply = await call("POST", "/v2/sandboxes", { templateID: "broken" });
    expect(reply.status).toBe(500);
    expect(JSON.stringify(reply.json)).not.toContain("secret");
    expect(reply.headers.get("x-request-id")).toMatch(/^[0-9a-f-]{36}$/);
  });

  test("ids that are none are unknown", async () => {
    for (const id of ["nope", "..%2f", newId()]) {
      const reply = await call("GET", `/sandboxes/${id}`);
      expect(reply.status).toBe(404);
      expect(reply.json.code).toBe(404);
    }
    expect((await call("GET", "/nowhere")).json.message).toBe("route not found: GET /nowhere");
    expect((await call("PUT", "/sandboxes")).json.message).toBe("route not found: PUT /sandboxes");
  });

  test("a sandbox's host name below a domain that is not configured: which domain is missing", async () => {
    const host = `8080-${newId()}.boxes.example:8000`;
    for (const [key, path, status] of [
      [API_KEY, "/nowhere", 404],
      ["wrong", "/nowhere", 401],
      ["wrong", "/v2/sandboxes", 401],
    ] as const) {
      const reply = await call("GET", path, undefined, { "x-api-key": key, host });
      expect([path, reply.status]).toEqual([path, status]);
      expect(reply.json.remediation).toStartWith("boxes.example is not in sandbox_proxy.domains");
    }
    for (const other of ["boxes.example", `x-${newId()}.boxes.example`, "8080-nope.boxes.example"]) {
      const reply = await call("GET", "/nowhere", undefined, { "x-api-key": "wrong", host: other });
      expect(reply.json.remediation).toStartWith("send the server's key");
    }
  });

  test("empty bodies are empty objects; empty answers have a length", async () => {
    const created = await call("POST", "/v2/sandboxes", { templateID: "base" });
    const id = created.json.sandboxID;
    expect(created.headers.get("x-agentenv-sandbox-id")).toBe(id);
    const paused = await fetch(`${base}/sandboxes/${id}/pause`, {
      method: "POST",
      headers: { "x-api-key": API_KEY },
    });
    expect(paused.status).toBe(204);
    expect((await call("POST", `/sandboxes/${id}/resume`)).status).toBe(201);
    expect((await call("POST", `/sandboxes/${id}/refreshes`, { duration: 3601 })).status).toBe(400);
    expect((await call("DELETE", `/sandboxes/${id}`)).status).toBe(204);
    const build = await fetch(
      `${base}/v2/templates/${fakes.template.templateId}/builds/${fakes.template.id}`,
      {
        method: "POST",
        headers: { "x-api-key": API_KEY },
        body: JSON.stringify({ fromImage: "debian:12", steps: [{ type: "RUN", args: ["true"] }] }),
      },
    );
    expect(build.status).toBe(202);
    expect(build.headers.get("content-length")).toBe("0");
    expect(fakes.started.at(-1)?.request).toMatchObject({ fromImage: "debian:12" });
  });
});

describe("lists", () => {
  test("pages are stable while items come and go", async () => {
    fake.records.clear();
    const ids: string[] = [];
    for (let i = 0; i < 7; i++)
      ids.push((await call("POST", "/v2/sandboxes", { templateID: "base" })).json.sandboxID);
    const seen: string[] = [];
    let token = "";
    for (let page = 0; page < 5; page++) {
      const reply = await call("GET", `/v2/sandboxes?limit=2${token === "" ? "" : `&nextToken=${token}`}`);
      expect(reply.headers.get("x-total-running")).not.toBeNull();
      seen.push(...reply.json.map((item: { sandboxID: string }) => item.sandboxID));
      // The item the token was made from vanishes, another one appears in front.
      if (page === 0) {
        fake.records.delete(seen[1]!);
        await call("POST", "/v2/sandboxes", { templateID: "base" });
      }
      token = reply.headers.get("x-next-token") ?? "";
      if (token === "") break;
    }
    expect(seen).toEqual(ids.toReversed());
  });

  test("filters by template, time and state, before pages are cut; oldest first", async () => {
    fake.records.clear();
    const ids: string[] = [];
    for (let i = 0; i < 4; i++) {
      const made = await call("POST", "/v2/sandboxes", { templateID: i % 2 === 0 ? "even" : "odd" });
      ids.push(made.json.sandboxID);
    }
    const [first, second, third, fourth] = ids as [string, string, string, string];
    await call("POST", `/sandboxes/${second}/pause`);
    fake.records.set(third, { ...fake.records.get(third)!, alias: "named" });
    const list = async (query: string) => {
      const reply = await call("GET", `/v2/sandboxes?${query}`);
      return reply.json.map((item: { sandboxID: string }) => item.sandboxID);
    };
    expect(await list("template=even&order=asc")).toEqual([first, third]);
    expect(await list("template=named")).toEqual([third]);
    expect(await list("template=none")).toEqual([]);
    const from = encodeURIComponent(fake.records.get(third)!.startedAt);
    expect(await list(`startedAfter=${from}&order=asc`)).toEqual([third, fourth]);
    expect(await list("state=paused")).toEqual([second]);
    expect(await list("state=running&order=asc")).toEqual([first, third, fourth]);
    // A list in one value or in several; none is all.
    for (const all of [
      "state=running&state=paused&order=asc",
      "state=paused,running&order=asc",
      "order=asc",
    ]) {
      expect(await list(all)).toEqual(ids);
    }
    const page = await call("GET", "/v2/sandboxes?template=odd&limit=1&order=asc");
    expect(page.json.map((item: { sandboxID: string }) => item.sandboxID)).toEqual([second]);
    expect(page.headers.get("x-total-running")).toBe("1");
    const next = page.headers.get("x-next-token");
    expect(await list(`template=odd&limit=1&order=asc&nextToken=${next}`)).toEqual([fourth]);
    // v1 knows the running ones alone and has no pages.
    expect((await call("GET", "/sandboxes")).json).toHaveLength(3);
  });

  test("limits, tokens and filters are checked", async () => {
    for (const query of [
      "limit=0",
      "limit=101",
      "limit=abc",
      "nextToken=x",
      "state=gone",
      "order=up",
      "startedAfter=x",
      "metadata=novalue",
    ]) {
      expect((await call("GET", `/v2/sandboxes?${query}`)).status).toBe(400);
    }
    const first = await call("GET", "/v2/sandboxes?limit=1");
    const token = first.headers.get("x-next-token");
    expect((await call("GET", `/v2/sandboxes?limit=1&order=asc&nextToken=${token}`)).status).toBe(400);
    expect((await call("GET", "/v2/sandboxes?state=running%2Cpaused")).status).toBe(200);
    expect((await call("GET", "/sandboxes?metadata=a%3D1%26b%3D%E2%9C%93")).json).toEqual([]);
  });
});

describe("templates", () => {
  test("create, status with log windows, list, alias, delete", async () => {
    const created = await call("POST", "/v3/templates", { name: "base", tags: ["v1"] });
    expect(created.status).toBe(202);
    expect(created.json).toMatchObject({ names: ["base"], aliases: ["base"], tags: ["v1"], public: true });
    expect((await call("POST", "/v3/templates", {})).status).toBe(400);
    const rest = { teamID: "t", minFreeDiskMb: 100, cpuCount: 1, memoryMB: 128 };
    expect((await call("POST", "/v3/templates", { alias: "base", ...rest })).json.tags).toEqual(["default"]);
    expect(fakes.asked.at(-1)).toEqual({
      ...{ name: "base", tags: [], cpuCount: 1, memoryMiB: 128, minFreeDiskMiB: 100 },
    });
    for (const wrong of [
      { cpuCount: 0 },
      { memoryMB: 127 },
      { minFreeDiskMb: -1 },
      { name: "a".repeat(129) },
    ]) {
      expect((await call("POST", "/v3/templates", { name: "base", ...wrong })).status).toBe(400);
    }
    for (const query of ["/templates?teamID=t", "/v2/templates?teamID=t&limit=1"]) {
      expect((await call("GET", query)).json).toMatchObject([
        { names: ["base"], createdBy: null, lastSpawnedAt: null, spawnCount: 0, buildCount: 1 },
      ]);
    }
    const start = (body: object) =>
      call("POST", `/v2/templates/${fakes.template.templateId}/builds/${fakes.template.id}`, {
        fromImage: "debian:12",
        ...body,
      });
    const login = { type: "registry", username: "u", password: "p" };
    expect((await start({ fromImageRegistry: login })).status).toBe(202);
    expect(fakes.started.at(-1)?.request.credentials).toEqual({ username: "u", password: "p" });
    expect((await start({ fromImageRegistry: { type: "registry", username: "u" } })).status).toBe(400);
    for (const type of ["aws", "gcp"]) {
      const refused = await start({ fromImageRegistry: { type } });
      expect([refused.status, refused.json.error_code]).toEqual([400, "unsupported_field"]);
    }
    const path = `/templates/${fakes.template.templateId}/builds/${fakes.template.id}/status`;
    const seen: string[] = [];
    for (;;) {
      const reply = await call("GET", `${path}?logsOffset=${seen.length}`);
      if (reply.json.logEntries.length === 0) break;
      expect(reply.json.logEntries.length).toBeLessThanOrEqual(100);
      seen.push(...reply.json.logs);
    }
    expect(seen).toHaveLength(250);
    expect(seen[249]).toBe("line 249");
    expect((await call("GET", `${path}?level=info&limit=5`)).json.logs).toEqual(
      [0, 2, 4, 6, 8].map((i) => `line ${i}`),
    );
    expect((await call("GET", path)).json.reason).toMatchObject({ message: "RUN failed", step: "1" });
    expect((await call("GET", `/templates/x/builds/${newId()}/status`)).status).toBe(404);
    const backward = await call("GET", `${path.replace("status", "logs")}?direction=backward&limit=2`);
    expect(backward.json.logs.map((entry: { message: string }) => entry.message)).toEqual([
      "line 249",
      "line 248",
    ]);
    expect((await call("GET", "/templates")).json[0]).toMatchObject({
      aliases: ["base"],
      createdBy: null,
      buildStatus: "error",
    });
    expect((await call("GET", "/v2/templates")).json).toHaveLength(1);
    expect((await call("GET", "/templates/base")).json.builds).toHaveLength(1);
    expect((await call("GET", "/templates/aliases/base")).json.templateID).toBe(fakes.template.templateId);
    expect((await call("GET", "/templates/aliases/free")).status).toBe(404);
    expect((await call("DELETE", "/templates/base")).status).toBe(204);
    expect((await call("DELETE", "/templates/gone")).json.code).toBe(404);
  });
});

describe("idempotency keys", () => {
  const create = (key: string, body: object, path = "/v2/sandboxes") =>
    call("POST", path, body, { "idempotency-key": key });

  test("one key, one sandbox: repeated, concurrent, and told apart from others", async () => {
    const replies = await Promise.all([1, 2, 3].map(() => create("k1", { templateID: "base" })));
    const later = await create("k1", { templateID: "base" });
    expect(new Set([...replies, later].map((reply) => reply.json.sandboxID)).size).toBe(1);
    expect([...replies, later].map((reply) => reply.status)).toEqual([201, 201, 201, 201]);
    expect(later.headers.get("idempotency-replayed")).toBe("true");
    expect((await create("k2", { templateID: "base" })).json.sandboxID).not.toBe(later.json.sandboxID);
    // The same key on another endpoint is another request.
    expect((await create("k1", { templateID: "base" }, "/sandboxes")).json.sandboxID).not.toBe(
      later.json.sandboxID,
    );
  });

  test("another body is refused, a failure is not remembered, a bad key is told", async () => {
    await create("k3", { templateID: "base" });
    expect(await create("k3", { templateID: "base", timeout: 5 })).toMatchObject({
      status: 422,
      json: { code: 422, error_code: "idempotency_key_reused" },
    });
    expect((await create("k4", { templateID: "missing" })).status).toBe(404);
    expect((await create("k4", { templateID: "base" })).status).toBe(201);
    expect((await create("x".repeat(256), { templateID: "base" })).status).toBe(400);
  });

  test("what was made is found again by the next server, which never heard of the call", async () => {
    const headers = { "idempotency-key": "before-the-crash", "x-api-key": API_KEY };
    const first = await call("POST", "/v2/sandboxes", { templateID: "base", metadata: { a: "1" } }, headers);
    const { handle } = createControlApi(apiOptions);
    const post = (path: string, body: object) =>
      handle(new Request(`http://localhost${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
    const again = await post("/v2/sandboxes", { templateID: "base", metadata: { a: "1" } });
    expect([again.status, again.headers.get("idempotency-replayed")]).toEqual([201, "true"]);
    expect(await again.json()).toEqual(first.json);
    expect((await post("/v2/sandboxes", { templateID: "base" })).status).toBe(422);
    const other = await post("/sandboxes", { templateID: "base" });
    expect(((await other.json()) as { sandboxID: string }).sandboxID).not.toBe(first.json.sandboxID);
    // Nobody is shown the key.
    expect(JSON.stringify((await call("GET", `/sandboxes/${first.json.sandboxID}`)).json)).not.toContain(
      "crash",
    );
    expect(JSON.stringify((await call("GET", "/v2/sandboxes")).json)).not.toContain("before-the-crash");
  });

  test("kept for a time and in number", async () => {
    let now = 0;
    let made = 0;
    const calls = new IdempotentCalls(1000, 3, () => now);
    const run = async (key: string) => {
      const request = new Request("http://x/", { headers: { "idempotency-key": key } });
      return (await calls.run("s", request, {}, async () => ({ status: 201, json: ++made }))).json;
    };
    expect([await run("a"), await run("a")]).toEqual([1, 1]);
    now = 1001;
    expect(await run("a")).toBe(2);
    for (const key of ["b", "c", "d"]) await run(key);
    expect(await run("d")).toBe(5);
    expect(await run("a")).toBe(6);
  });
});

describe("figures, logs, nodes, teams", () => {
  test("metrics: none yet is an empty list, bounds are checked, unknown is 404", async () => {
    const { sandboxID } = (await call("POST", "/v2/sandboxes", { templateID: "base" })).json;
    expect((await call("GET", `/sandboxes/${sandboxID}/metrics`)).json).toEqual([]);
    expect((await call("GET", `/sandboxes/${sandboxID}/metrics?start=2&end=1`)).status).toBe(400);
    expect((await call("GET", `/sandboxes/${sandboxID}/metrics?start=x`)).status).toBe(400);
    expect((await call("GET", `/sandboxes/${newId()}/metrics`)).json.code).toBe(404);
    expect((await call("GET", `/sandboxes/metrics?sandbox_ids=${sandboxID},${newId()},x`)).json).toEqual({
      sandboxes: {},
    });
    const many = Array.from({ length: 101 }, newId).join(",");
    expect((await call("GET", `/sandboxes/metrics?sandbox_ids=${many}`)).status).toBe(400);
  });

  test("logs: windows, order, level and text", async () => {
    const { sandboxID } = (await call("POST", "/v2/sandboxes", { templateID: "base" })).json;
    const at = 1_800_000_000_000;
    observer.onEvent({
      kind: "created",
      sandboxId: sandboxID,
      atMs: at,
      durationMs: 12.34,
      phases: { vmm: 9 },
    });
    observer.onEvent({ kind: "pause_failed", sandboxId: sandboxID, atMs: at + 1000, reason: "disk full" });
    const first = (await call("GET", `/sandboxes/${sandboxID}/logs`)).json;
    expect(first.logs.map((entry: { line: string }) => entry.line)).toEqual([
      "sandbox runs",
      "pause failed: disk full",
    ]);
    expect(first.logEntries[0]).toEqual({
      timestamp: new Date(at).toISOString(),
      message: "sandbox runs",
      level: "info",
      fields: { source: "lifecycle", event: "created", durationMs: "12.3", "phase.vmm": "9" },
    });
    expect((await call("GET", `/sandboxes/${sandboxID}/logs?start=${at + 1}`)).json.logs).toHaveLength(1);
    const v2 = async (query: string) =>
      (await call("GET", `/v2/sandboxes/${sandboxID}/logs?${query}`)).json.logs.map(
        (entry: { message: string }) => entry.message.split(" ")[0],
      );
    expect(await v2("")).toEqual(["pause", "sandbox"]);
    expect(await v2("direction=forward")).toEqual(["sandbox", "pause"]);
    expect(await v2("level=error")).toEqual(["pause"]);
    expect(await v2("search=runs")).toEqual(["sandbox"]);
    expect(await v2(`cursor=${at}`)).toEqual(["sandbox"]);
    expect(await v2(`direction=forward&cursor=${at + 1}&limit=1`)).toEqual(["pause"]);
    expect((await call("GET", `/v2/sandboxes/${sandboxID}/logs?limit=1001`)).status).toBe(400);
    expect((await call("GET", `/sandboxes/${newId()}/logs`)).status).toBe(404);
  });

  test("nodes: this one, by id and cluster", async () => {
    const [node] = (await call("GET", "/nodes")).json;
    expect(node).toMatchObject({ id: "node-1", status: "ready", version: "1.2.3", commit: "abc" });
    expect(node.metrics.memoryTotalBytes).toBeGreaterThan(2 ** 28);
    expect(node.metrics.disks.some((disk: { mountPoint: string }) => disk.mountPoint === "/")).toBe(true);
    expect((await call("GET", `/nodes?clusterID=${node.clusterID}`)).json).toHaveLength(1);
    expect((await call("GET", `/nodes?clusterID=${newId()}`)).json).toEqual([]);
    const detail = (await call("GET", "/nodes/node-1")).json;
    expect(detail.sandboxes.length).toBeGreaterThan(0);
    expect(detail.cachedBuilds).toEqual([]);
    expect(detail).not.toHaveProperty("sandboxStartingCount");
    expect((await call("GET", "/nodes/node-2")).json).toMatchObject({ code: 404 });
    expect((await fetch(`${base}/nodes`)).status).toBe(401);
    // What is answered is what the document says.
    expect(schemas.Node.safeParse(node).error).toBeUndefined();
    expect(schemas.NodeDetail.safeParse(detail).error).toBeUndefined();
  });

  test("teams never show a key", async () => {
    expect((await call("GET", "/teams")).json).toMatchObject([
      { name: "default", apiKey: "", isDefault: true },
    ]);
  });

  test("custom extension parameters without an extension", async () => {
    const { sandboxID } = (await call("POST", "/v2/sandboxes", { templateID: "base" })).json;
    const path = `/sandboxes/${sandboxID}/custom-extension-params`;
    expect((await call("GET", path)).json).toEqual({});
    expect((await call("PATCH", path, { a: 1 })).json.error_code).toBe("custom_extension_not_configured");
    expect((await call("PATCH", path, [1])).status).toBe(400);
    expect((await call("PATCH", `/sandboxes/${newId()}/custom-extension-params`, {})).status).toBe(404);
    await call("POST", `/sandboxes/${sandboxID}/pause`);
    expect((await call("PATCH", path, { a: 1 })).status).toBe(409);
  });
});

test("template tags and publication", async () => {
  expect((await call("POST", "/templates/tags", { target: "base:v1", tags: ["v2"] })).json).toEqual({
    buildID: fakes.template.id,
    tags: ["v2"],
  });
  expect((await call("POST", "/templates/tags", { target: "base" })).json.message).toContain("tags");
  expect((await call("DELETE", "/templates/tags", { name: "base", tags: ["v2"] })).status).toBe(204);
  expect((await call("GET", "/templates/base/tags")).json[0]).toMatchObject({ tag: "default" });
  expect((await call("PATCH", "/v2/templates/base", { public: false })).json).toEqual({ names: ["base"] });
  expect((await call("PATCH", "/templates/base", { public: true })).json).toEqual({});
  expect((await call("PATCH", "/v2/templates/base", {})).status).toBe(400);
});

test("what a client says of its body does not matter; what a path takes is told", async () => {
  for (const type of [
    "text/plain",
    "application/x-www-form-urlencoded",
    "application/json; charset=utf-8",
    "nonsense",
  ]) {
    const reply = await call("POST", "/v2/sandboxes", { templateID: "base" }, { "content-type": type });
    expect(reply.status).toBe(201);
  }
  const wrong = await call("PUT", "/sandboxes");
  expect(wrong.status).toBe(404);
  expect(wrong.headers.get("allow")).toBe("POST, GET");
  expect(wrong.json.remediation).toContain("GET");
  expect((await fetch(`${base}/health`, { method: "HEAD" })).status).toBe(204);
});

test("429 always says when to come back", async () => {
  const retry = async (headers?: Record<string, string>) => {
    const reply = errorResponse(
      new AenvError({
        code: "busy",
        status: 429,
        message: "busy",
        ...(headers === undefined ? {} : { headers }),
      }),
    );
    return [reply.status, reply.headers.get("retry-after")];
  };
  expect(await retry()).toEqual([429, "5"]);
  expect(await retry({ "Retry-After": "30" })).toEqual([429, "30"]);
});

test("10,000 sandboxes: pages in order, cheap, in whatever order they come", () => {
  const records = Array.from({ length: 10_000 }, (_, i) => ({
    createdAt: new Date(1_800_000_000_000 + Math.floor(i / 3)).toISOString(),
    id: `id-${String(i).padStart(6, "0")}`,
  }));
  const expected = records.toSorted((a, b) =>
    a.createdAt === b.createdAt ? (a.id < b.id ? -1 : 1) : a.createdAt < b.createdAt ? 1 : -1,
  );
  const shuffled = records.toSorted((a, b) => (Bun.hash(a.id) < Bun.hash(b.id) ? -1 : 1));
  for (const source of [records, records.toReversed(), shuffled]) {
    const seen: typeof records = [];
    for (let nextToken: string | undefined; ; ) {
      const page = paginate(source, (item) => item, { limit: 2500, nextToken });
      seen.push(...page.items);
      nextToken = page.nextToken;
      if (nextToken === undefined) break;
    }
    expect(seen).toEqual(expected);
  }
  let looks = 0;
  const ordering = new Ordering((item: (typeof records)[number]) => {
    looks += 1;
    return item;
  });
  ordering.of(records, false);
  // A sort of all of them looks ten times as often.
  expect(looks).toBeLessThan(records.length * 6);
  looks = 0;
  for (let i = 0; i < 20; i++) ordering.of(records.slice(), false);
  expect(looks).toBe(0);
});

test("preflight and exposed headers", async () => {
  const preflight = await fetch(`${base}/v2/sandboxes`, {
    method: "OPTIONS",
    headers: { origin: "http://x", "access-control-request-headers": "x-api-key,lang" },
  });
  expect(preflight.status).toBe(204);
  expect(preflight.headers.get("access-control-allow-headers")).toBe("x-api-key,lang");
  const reply = await call("GET", "/nowhere");
  expect(reply.headers.get("access-control-expose-headers")).toContain("X-Next-Token");
});

test("the OpenAPI document describes exactly the routes that are served", async () => {
  const document = (await call("GET", "/openapi.json")).json;
  const documented = Object.entries(document.paths as Record<string, object>).flatMap(([path, methods]) =>
    Object.keys(methods).map((method) => `${method.toUpperCase()} ${path}`),
  );
  expect(documented.sort()).toEqual(
    api.routes.map((route) => `${route.method} ${documentPath(route.path)}`).sort(),
  );
  // Every reference points at something.
  const references = [...JSON.stringify(document).matchAll(/"\$ref":"#\/components\/schemas\/([^"]+)"/g)];
  expect(references.length).toBeGreaterThan(10);
  for (const [, name] of references) expect(document.components.schemas[name!]).toBeDefined();
  for (const operation of Object.values(document.paths).flatMap((path) => Object.values(path as object))) {
    expect(Object.keys((operation as { responses: object }).responses).length).toBeGreaterThan(0);
  }
});

test("docs/api.md is the document that is served", async () => {
  const path = join(import.meta.dir, "../../docs/api.md");
  const page = renderApiPage((await call("GET", "/openapi.json")).json);
  if (process.env.AENV_UPDATE_DOCS === "1") await Bun.write(path, page);
  // Not a diff of thousands of lines: what to do about it.
  const current = (await Bun.file(path).text()) === page;
  expect(current ? "current" : "run AENV_UPDATE_DOCS=1 bun test src/api").toBe("current");
});
