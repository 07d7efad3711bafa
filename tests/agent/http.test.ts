import { afterAll, beforeAll, expect, test } from "bun:test";
import { connect } from "node:net";
import { type Agent, call, eventually, openFiles, raw, sh, startAgent } from "./harness.ts";

let agent: Agent;
beforeAll(async () => {
  agent = await startAgent();
});
afterAll(async () => await agent[Symbol.asyncDispose]());

const status = (text: string) => [...text.matchAll(/^HTTP\/1\.1 (\d+)/gm)].map((m) => Number(m[1]));
const close = "Host: x\r\nConnection: close\r\n\r\n";

test("health", async () => {
  const r = await fetch(`${agent.url}/health`);
  expect([r.status, r.headers.get("cache-control"), await r.text()]).toEqual([204, "no-store", ""]);
  expect((await fetch(`${agent.url}/nope`)).status).toBe(404);
  // For the host of a guest, by the interface it comes in by.
  for (const path of ["/fsfreeze", "/fsfrozen", "/fsthaw", "/halt"]) {
    expect((await fetch(`${agent.url}${path}`, { method: "POST" })).status).toBe(404);
  }
  expect((await fetch(`${agent.url}/health`, { method: "POST" })).status).toBe(405);
});

test("keep-alive, pipelining, HTTP/1.0 and HEAD", async () => {
  expect(
    status(
      await raw(
        agent,
        `GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /envs HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\n${close}`,
      ),
    ),
  ).toEqual([204, 200, 204]);
  expect(status(await raw(agent, "GET /health HTTP/1.0\r\n\r\n"))).toEqual([204]);
  const head = await raw(agent, `HEAD /envs HTTP/1.1\r\n${close}`);
  expect(head).toContain("Content-Length: ");
  expect(head.endsWith("\r\n\r\n")).toBe(true);
});

test("after a download of any size the connection takes the next request", async () => {
  for (const kib of [256, 1024, 1280, 1536, 2048, 2049, 3072, 8192]) {
    const path = `${agent.dir}/download-${kib}`;
    await Bun.write(path, new Uint8Array(kib << 10).fill(10)); // each answer begins a line
    const get = `GET /files?path=${path} HTTP/1.1\r\nHost: x\r\n\r\n`;
    for (let round = 0; round < 4; round++) {
      // What is left to read is the answer to the second request: it follows the whole first one.
      const answer = await raw(agent, `${get}GET /health HTTP/1.1\r\n${close}`);
      expect({ kib, answers: status(answer) }).toEqual({ kib, answers: [200, 204] });
      expect(answer.length).toBeGreaterThan(kib << 10);
    }
  }
});

test("a request that arrives byte by byte", async () => {
  const text = `POST /process.Process/List HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n${close}1;x=y\r\n{\r\n1\r\n}\r\n0\r\nTrailer: 1\r\n\r\n`;
  const answer = await new Promise<string>((done, failed) => {
    let out = "";
    const s = connect(agent.port, "127.0.0.1", async () => {
      s.setNoDelay();
      for (const c of text) {
        s.write(c);
        await new Promise((r) => setImmediate(r));
      }
    });
    s.on("data", (d) => {
      out += d;
    });
    s.on("close", () => done(out));
    s.on("error", failed);
  });
  expect(answer).toEndWith("\r\n\r\n{}");
});

test("malformed and oversized heads", async () => {
  const cases: [string, number][] = [
    ["BROKEN\r\n\r\n", 400],
    [`GET /health HTTP/2.0\r\n${close}`, 505],
    [`GET nopath HTTP/1.1\r\n${close}`, 400],
    ["GET /health HTTP/1.1\r\n\r\n", 400], // no Host
    [`GET /health HTTP/1.1\r\nA : b\r\n${close}`, 400],
    [`GET /health HTTP/1.1\r\nA: b\r\n folded\r\n${close}`, 400],
    [`GET /health HTTP/1.1\r\nA: b\rc\r\n${close}`, 400],
    [`POST /init HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n${close}`, 400],
    [`POST /init HTTP/1.1\r\nContent-Length: -1\r\n${close}`, 400],
    [`POST /init HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n${close}`, 400],
    [`POST /init HTTP/1.1\r\nTransfer-Encoding: gzip\r\n${close}`, 501],
    [`POST /init HTTP/1.1\r\nExpect: magic\r\n${close}`, 417],
    [`GET /health HTTP/1.1\r\nX: ${"a".repeat(70_000)}\r\n${close}`, 431],
    [`GET /health HTTP/1.1\r\nX: ${"a".repeat(200_000)}`, 431], // never finished
    [`GET /health HTTP/1.1\r\n${"A: b\r\n".repeat(201)}${close}`, 431],
    [`POST /init HTTP/1.1\r\nTransfer-Encoding: chunked\r\n${close}zz\r\n`, 400],
    [`POST /init HTTP/1.1\r\nTransfer-Encoding: chunked\r\n${close}2\r\n{}x\r\n`, 400],
  ];
  for (const [text, want] of cases)
    expect([text.slice(0, 90), status(await raw(agent, text))[0]]).toEqual([text.slice(0, 90), want]);
  expect(status(await raw(agent, `GET /health HTTP/1.1\r\nX: ${"a".repeat(60_000)}\r\n${close}`))).toEqual([
    204,
  ]);
});

test("Expect: 100-continue", async () => {
  const head =
    "POST /process.Process/List HTTP/1.1\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: 2\r\n";
  const answer = await new Promise<string>((done, failed) => {
    let out = "";
    const s = connect(agent.port, "127.0.0.1", () => s.write(head + close));
    s.on("data", (d) => {
      out += d;
      if (out === "HTTP/1.1 100 Continue\r\n\r\n") s.write("{}");
    });
    s.on("close", () => done(out));
    s.on("error", failed);
  });
  expect(status(answer)).toEqual([100, 200]);
  // refused without asking for the body
  const refused = await raw(
    agent,
    `POST /nope HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n${close}`,
    /404/,
  );
  expect(status(refused)).toEqual([404]);
});

test("an early answer to a large upload reaches the client and the connection closes in order", async () => {
  const r = await fetch(`${agent.url}/nope`, { method: "POST", body: Buffer.alloc(24 << 20) });
  expect(r.status).toBe(404);
  const big = await fetch(`${agent.url}/process.Process/List`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: Buffer.alloc(20 << 20, " "),
  });
  expect([big.status, ((await big.json()) as { code: string }).code]).toEqual([429, "resource_exhausted"]);
});

test("CORS", async () => {
  const r = await fetch(`${agent.url}/process.Process/Start`, {
    method: "OPTIONS",
    headers: {
      origin: "https://a.example",
      "access-control-request-method": "POST",
      "access-control-request-headers": "authorization,x-access-token",
    },
  });
  expect([
    r.status,
    r.headers.get("access-control-allow-origin"),
    r.headers.get("access-control-max-age"),
  ]).toEqual([204, "*", "7200"]);
  expect(r.headers.get("access-control-allow-headers")).toBe("authorization,x-access-token");
  const get = await fetch(`${agent.url}/health`, { headers: { origin: "null" } });
  expect(get.headers.get("access-control-allow-origin")).toBe("*");
});

test("gzip body of a unary call", async () => {
  const post = async (encoding: string, body: Uint8Array<ArrayBuffer>) =>
    await fetch(`${agent.url}/process.Process/List`, {
      method: "POST",
      headers: { "content-type": "application/json", "content-encoding": encoding },
      body,
    });
  expect((await post("gzip", Bun.gzipSync("{}"))).status).toBe(200);
  expect((await post("gzip", Bun.gzipSync("{}").subarray(0, 15))).status).toBe(400);
  expect((await post("gzip", Bun.gzipSync(Buffer.alloc(17 << 20)))).status).toBe(429);
  expect((await post("br", Buffer.from("{}"))).status).toBe(501);
});

test("metrics and variables", async () => {
  type Metrics = Record<string, number>;
  await fetch(`${agent.url}/metrics`);
  const m = (await (await fetch(`${agent.url}/metrics`)).json()) as Metrics;
  expect(Object.keys(m)).toEqual([
    "ts",
    "cpu_count",
    "cpu_used_pct",
    "mem_total_mib",
    "mem_used_mib",
    "mem_total",
    "mem_used",
    "mem_cache",
    "disk_used",
    "disk_total",
  ]);
  expect(m.cpu_count).toBe(navigator.hardwareConcurrency);
  expect(m.cpu_used_pct).toBeWithin(0, 100.01);
  expect(m.mem_used).toBeWithin(1, m.mem_total!);
  expect(m.disk_used).toBeWithin(1, m.disk_total!);
});

test("connections that come and go leave nothing behind", async () => {
  const before = openFiles(agent);
  for (let i = 0; i < 200; i++) await raw(agent, `GET /health HTTP/1.1\r\n${close}`);
  for (let i = 0; i < 50; i++)
    await new Promise<void>((done) => {
      const s = connect(agent.port, "127.0.0.1", () => {
        s.write("POST /files?path=/x HTTP/1.1\r\nHost: x\r\nContent-Le");
        s.destroy();
      });
      s.on("close", () => done());
    });
  await eventually("closed", () => openFiles(agent) <= before);
});

test("settings by /init", async () => {
  await using a = await startAgent();
  const init = async (body: object | string, headers: Record<string, string> = {}) => {
    const r = await fetch(`${a.url}/init`, {
      method: "POST",
      headers,
      body: typeof body === "string" ? body : JSON.stringify(body),
    });
    return {
      status: r.status,
      text: await r.text(),
      version: r.headers.get("x-envd-version"),
      cache: r.headers.get("cache-control"),
    };
  };
  const envs = async (token?: string) => {
    const r = await fetch(`${a.url}/envs`, { headers: token ? { "x-access-token": token } : {} });
    return { status: r.status, body: (await r.json()) as Record<string, string> };
  };
  expect(await init("")).toEqual({ status: 204, text: "", version: "0.6.13", cache: "no-store" });
  for (const bad of [
    "{",
    "[]",
    { accessToken: "" },
    { accessToken: 'a"b' },
    { accessToken: 5 },
    { timestamp: "yesterday" },
    { envVars: { A: 1 } },
    { envVars: { "A=": "" } },
    { entropy: "!" },
  ])
    expect([bad, (await init(bad)).status]).toEqual([bad, 400]);
  await init({
    envVars: { A: "1", E2B_SANDBOX: "no" },
    sandboxID: "sbx-1",
    templateID: "tpl-1",
    defaultUser: "user",
    defaultWorkdir: "/tmp",
    timestamp: "2026-01-02T03:04:05.5Z",
  });
  expect((await envs()).body).toEqual({
    A: "1",
    E2B_SANDBOX: "true",
    E2B_SANDBOX_ID: "sbx-1",
    E2B_TEMPLATE_ID: "tpl-1",
  });
  expect(await Bun.file(`${a.dir}/run/e2b/.E2B_SANDBOX_ID`).text()).toBe("sbx-1");
  expect(await Bun.file(`${a.dir}/run/e2b/.E2B_SANDBOX`).text()).toBe("true");
  expect((await sh(a, "id -u; pwd; echo $A $E2B_SANDBOX_ID")).stdout).toBe("54321\n/tmp\n1 sbx-1\n");
  // an older or repeated time changes nothing
  for (const timestamp of ["2026-01-02T03:04:05.5Z", "2026-01-02T04:04:05.4+01:00"])
    expect((await init({ timestamp, envVars: { B: "2" }, accessToken: "t" })).status).toBe(204);
  expect((await envs()).body.A).toBe("1");
  // variables are replaced as a whole, users kept when absent
  await init({
    timestamp: "2026-01-02T03:04:06Z",
    envVars: { B: "2" },
    accessToken: "secret",
    sandboxID: "sbx-2",
  });
  expect((await envs()).status).toBe(401);
  expect((await envs("secre")).status).toBe(401);
  expect((await envs("secret")).body).toEqual({
    B: "2",
    E2B_SANDBOX: "true",
    E2B_SANDBOX_ID: "sbx-2",
    E2B_TEMPLATE_ID: "tpl-1",
  });
  expect((await call(a, "process.Process/List", {})).status).toBe(401);
  expect((await fetch(`${a.url}/health`)).status).toBe(204);
  // a local caller needs the token
  expect((await init({ accessToken: "other" })).status).toBe(401);
  expect((await init({})).status).toBe(401);
  expect((await init({ accessToken: "secret" })).status).toBe(204);
  expect((await init({ accessToken: "other" }, { "x-access-token": "secret" })).status).toBe(204);
  expect((await envs("other")).status).toBe(200);
  expect((await init({}, { "x-access-token": "other" })).status).toBe(204); // cleared
  expect((await envs()).status).toBe(200);
  expect((await init({ volumeMounts: [{ nfs_target: "a", path: "/b" }] })).text).toContain("not supported");
});

test("a new lifecycle drops the connections of the old one, the same does not", async () => {
  await using a = await startAgent();
  const init = async (lifecycleID: string) =>
    (await fetch(`${a.url}/init`, { method: "POST", body: JSON.stringify({ lifecycleID }) })).status;
  const open = () => {
    const state = { answered: false, closed: false };
    const s = connect(a.port, "127.0.0.1", () => s.write("GET /health HTTP/1.1\r\nHost: x\r\n\r\n"));
    s.once("data", () => {
      state.answered = true;
    });
    s.on("close", () => {
      state.closed = true;
    });
    s.on("error", () => {
      state.closed = true;
    });
    return state;
  };
  await init("one");
  const kept = open();
  await eventually("answered", () => kept.answered);
  await init("one");
  await Bun.sleep(50);
  expect(kept.closed).toBe(false);
  expect(await init("two")).toBe(204);
  await eventually("dropped", () => kept.closed);
});
