/**
 * The listener, the control plane and the proxy under load, beside nginx on the same machine. Sandboxes are
 * records whose services are on loopback: what is measured is the server, not virtual machines. Everything
 * stays on 127.0.0.1 and ends by itself.
 */
import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { cpus, tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { prepareBenchTools } from "../support/bench-tools.ts";

const ROOT = resolve(import.meta.dir, "../..");
const SANDBOXES = 10_000;
const SECONDS = Number(process.env.AENV_BENCH_SECONDS ?? 3);
const API_KEY = `e2b_${"0123456789abcdef".repeat(4)}`;
const BIG_MIB = 64;

/** The server under test, in a process of its own: the real front and API over records without machines. */
async function serve(): Promise<void> {
  const { createControlApi } = await import("../../src/api/index.ts");
  const { createLogger } = await import("../../src/lib/log.ts");
  const { newId } = await import("../../src/lib/ids.ts");
  const { createObserver } = await import("../../src/observability/index.ts");
  const { startFront } = await import("../../src/proxy/index.ts");
  type SandboxRecord = import("../../src/orchestrator/types.ts").SandboxRecord;
  const log = createLogger("bench");
  const records = new Map<string, SandboxRecord>();
  for (let i = 0; i < SANDBOXES; i++) {
    const id = newId();
    records.set(id, {
      id,
      templateId: newId(),
      state: i % 4 === 0 ? "paused" : "running",
      startedAt: new Date(1_800_000_000_000 + i * 10).toISOString(),
      endAt: new Date(1_900_000_000_000).toISOString(),
      timeoutSeconds: 300,
      onTimeout: "kill",
      autoResume: false,
      secure: true,
      metadata: { owner: `user-${i % 100}`, purpose: "bench" },
      envVars: {},
      cpuCount: 2,
      memoryMiB: 1024,
      diskSizeMiB: 65_536,
      envdVersion: "0.5.15",
    });
  }
  const gone = new AbortController().signal;
  const unused = () => Promise.reject(new Error("not part of this measurement"));
  const orchestrator = {
    create: unused,
    createCold: unused,
    kill: unused,
    pause: unused,
    resume: unused,
    connect: unused,
    setTimeout: unused,
    refresh: unused,
    autoResume: unused,
    fork: unused,
    snapshot: unused,
    listSnapshots: unused,
    getSnapshot: unused,
    updateNetwork: unused,
    networkReport: unused,
    get: (id: string) => records.get(id)!,
    list: () => [...records.values()].filter((record) => record.state !== "killing"),
    access: () => ({ secure: true, allowPublicTraffic: true }),
    accessToken: () => "token",
    trafficToken: () => "token",
    timings: () => ({}),
    route: () => ({ kind: "ready", hostAddress: "127.0.0.1", instanceId: "i", gone }) as const,
  };
  const templates = {
    create: unused,
    startBuild: unused,
    build: unused,
    list: async () => [],
    resolve: async () => undefined,
    delete: unused,
    assignTags: unused,
    removeTags: unused,
    tags: unused,
    setPublic: unused,
    cancel: unused,
    hasFiles: unused,
    putFiles: unused,
  };
  const control = createControlApi({
    orchestrator,
    templates,
    observer: createObserver({
      identity: { nodeId: "bench", clusterId: newId(), serviceInstanceId: newId() },
      version: "bench",
      commit: "bench",
      nodeVisible: true,
      consolePath: async () => undefined,
      log,
    }),
    apiKeys: [API_KEY],
    defaultTimeoutSeconds: 15,
    sandboxProxyDomains: [],
    version: "bench",
    log,
  });
  const front = startFront({
    hostname: "127.0.0.1",
    port: 0,
    domains: [],
    apiKeys: [API_KEY],
    control,
    orchestrator,
    log,
  });
  const [first] = records.keys();
  console.log(JSON.stringify({ port: front.port, id: first }));
  // Until the measuring process goes.
  for await (const _ of Bun.stdin.stream());
  process.exit(0);
}

if (process.argv[2] === "serve") await serve();

interface Load {
  readonly perSecond: number;
  /** Of the server's processor time per request: steady where requests per second depend on the neighbours. */
  readonly cpuMicros: number;
  readonly p50Ms: number;
  readonly p99Ms: number;
  readonly mibPerSecond: number;
}

const tools = await prepareBenchTools(ROOT);

function toMs(text: string): number {
  const value = Number.parseFloat(text);
  return text.endsWith("us") ? value / 1000 : text.endsWith("ms") ? value : value * 1000;
}

/** Processor time a process has used, microseconds. */
async function cpuMicros(pid: number): Promise<number> {
  const fields = (await readFile(`/proc/${pid}/stat`, "utf8")).split(") ")[1]!.split(" ");
  return (Number(fields[11]) + Number(fields[12])) * 10_000;
}

async function wrk(
  pid: number,
  url: string,
  connections: number,
  headers: Record<string, string> = {},
): Promise<Load> {
  const argv = [tools.wrk, "-t1", `-c${connections}`, `-d${SECONDS}s`, "--timeout", "20s", "--latency"];
  for (const [name, value] of Object.entries(headers)) argv.push("-H", `${name}: ${value}`);
  const before = await cpuMicros(pid);
  const child = Bun.spawn([...argv, url], {
    env: tools.env,
    stdout: "pipe",
    stderr: "pipe",
    timeout: 60_000,
  });
  const out = await new Response(child.stdout).text();
  if ((await child.exited) !== 0) throw new Error(`wrk ${url}: ${out}`);
  const used = (await cpuMicros(pid)) - before;
  const bad = /Non-2xx or 3xx responses: (\d+)|Socket errors: (.*)/.exec(out);
  if (bad !== null) throw new Error(`${url}: ${bad[0]}`);
  const transfer = /Transfer\/sec:\s+([\d.]+)(KB|MB|GB|B)/.exec(out)!;
  const scale = { B: 2 ** -20, KB: 2 ** -10, MB: 1, GB: 1024 }[transfer[2]!]!;
  return {
    cpuMicros: used / Number(/(\d+) requests in/.exec(out)![1]),
    perSecond: Number(/Requests\/sec:\s+([\d.]+)/.exec(out)![1]),
    p50Ms: toMs(/^\s+50%\s+(\S+)/m.exec(out)![1]!),
    p99Ms: toMs(/^\s+99%\s+(\S+)/m.exec(out)![1]!),
    mibPerSecond: Number(transfer[1]) * scale,
  };
}

/** Echoed messages per second over some sockets, each with one message under way. */
async function webSockets(url: string, headers: Record<string, string>, sockets: number): Promise<number> {
  let echoed = 0;
  const open = await Promise.all(
    Array.from({ length: sockets }, async () => {
      const socket = new WebSocket(url, { headers } as unknown as string[]);
      socket.binaryType = "arraybuffer";
      await new Promise((done, fail) => {
        socket.onopen = done;
        socket.onerror = () => fail(new Error(`no WebSocket at ${url}`));
      });
      return socket;
    }),
  );
  const message = new Uint8Array(64);
  for (const socket of open) {
    socket.onmessage = () => {
      echoed++;
      socket.send(message);
    };
    socket.send(message);
  }
  const began = performance.now();
  const before = echoed;
  await Bun.sleep(SECONDS * 1000);
  const rate = (echoed - before) / ((performance.now() - began) / 1000);
  for (const socket of open) {
    socket.onmessage = null;
    socket.close();
  }
  return rate;
}

async function upload(url: string, file: string, headers: Record<string, string>): Promise<number> {
  const argv = [
    "curl",
    "-sS",
    "-o",
    "/dev/null",
    "-w",
    "%{http_code} %{speed_upload}",
    "-T",
    file,
    "-X",
    "POST",
  ];
  for (const [name, value] of Object.entries({ Expect: "", ...headers }))
    argv.push("-H", `${name}: ${value}`);
  const child = Bun.spawn([...argv, url], { stdout: "pipe", stderr: "pipe", timeout: 60_000 });
  const out = await new Response(child.stdout).text();
  const [status, speed] = out.split(" ");
  if (status !== "200")
    throw new Error(`upload to ${url}: ${out} ${await new Response(child.stderr).text()}`);
  return Number(speed) / 2 ** 20;
}

function freePort(): number {
  const listener = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data: () => undefined } });
  const { port } = listener;
  listener.stop(true);
  return port;
}

async function startNginx(dir: string, name: string, servers: string) {
  const home = join(dir, name);
  await mkdir(home);
  const user = process.getuid?.() === 0 ? "user root;" : "";
  const temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
  const config = `
daemon off; ${user} worker_processes 1; error_log stderr crit; pid ${home}/pid;
events { worker_connections 4096; }
http {
  access_log off; sendfile on; tcp_nodelay on; client_max_body_size 0; keepalive_requests 1000000;
  ${temporary.map((kind) => `${kind}_temp_path ${home}/${kind};`).join(" ")}
  ${servers}
}`;
  await writeFile(join(home, "nginx.conf"), config);
  const child = Bun.spawn([tools.nginx, "-p", home, "-c", join(home, "nginx.conf")], {
    env: tools.env,
    stdout: "ignore",
    stderr: Bun.file(join(home, "log")),
  });
  for (let i = 0; i < 100; i++) {
    const workers = (await readFile(`/proc/${child.pid}/task/${child.pid}/children`, "utf8")).trim();
    if (workers !== "") return { child, worker: Number(workers.split(" ")[0]) };
    await Bun.sleep(50);
  }
  throw new Error(`nginx did not start: ${await readFile(join(home, "log"), "utf8")}`);
}

const dir = await mkdtemp(join(tmpdir(), "aenv-bench-api-"));
const echo = Bun.serve({
  hostname: "127.0.0.1",
  port: 0,
  idleTimeout: 0,
  maxRequestBodySize: 2 ** 40,
  async fetch(request, server) {
    if (server.upgrade(request, { data: undefined })) return undefined as unknown as Response;
    let bytes = 0;
    for await (const chunk of request.body ?? []) bytes += chunk.length;
    return new Response(String(bytes));
  },
  websocket: { message: (socket, message) => void socket.send(message) },
});
await writeFile(join(dir, "big"), new Uint8Array(BIG_MIB << 20));
const [servicePort, proxyPort] = [freePort(), freePort()];
const service = await startNginx(
  dir,
  "service",
  `server { listen 127.0.0.1:${servicePort} backlog=4096; root ${dir};
    location = /small { default_type text/plain; return 200 "hello from a service\\n"; } }`,
);
const nginx = await startNginx(
  dir,
  "proxy",
  `server { listen 127.0.0.1:${proxyPort} backlog=4096; proxy_http_version 1.1; proxy_request_buffering off;
    location = /ws { proxy_pass http://127.0.0.1:${echo.port};
      proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection upgrade; }
    location = /up { proxy_pass http://127.0.0.1:${echo.port}; }
    location / { proxy_pass http://127.0.0.1:${servicePort}; proxy_set_header Connection close; } }`,
);
const child = Bun.spawn([process.execPath, import.meta.path, "serve"], {
  env: { PATH: process.env.PATH ?? "", AENV_LOG_LEVEL: "info" },
  stdin: "pipe",
  stdout: "pipe",
  stderr: Bun.file(join(dir, "server.log")),
});
try {
  const reader = child.stdout.getReader();
  const { value } = await reader.read();
  reader.releaseLock();
  const { port, id } = JSON.parse(new TextDecoder().decode(value)) as { port: number; id: string };
  const base = `http://127.0.0.1:${port}`;
  const key = { "X-API-Key": API_KEY };
  const into = (target: number) => ({ "E2b-Sandbox-Id": id, "E2b-Sandbox-Port": String(target) });
  const rss = async () => {
    const status = await readFile(`/proc/${child.pid}/status`, "utf8");
    return Math.round(Number(/VmRSS:\s+(\d+)/.exec(status)![1]) / 1024);
  };
  const number = (amount: number) => (amount >= 100 ? amount.toFixed(0) : amount.toFixed(2));
  const row = (...cells: (string | number)[]) =>
    console.log(`| ${cells.map((cell) => (typeof cell === "number" ? number(cell) : cell)).join(" | ")} |`);

  console.log(
    `\n## API and proxy (${cpus().length} x ${cpus()[0]?.model ?? "?"}; clients on the same processors)\n`,
  );
  row("control plane, 16 connections", "requests/s", "p50 ms", "p99 ms", "CPU µs/request");
  row("---", "---", "---", "---", "---");
  const list = await fetch(`${base}/v2/sandboxes?limit=100`, { headers: key });
  let middle = list.headers.get("x-next-token")!;
  for (let i = 0; i < 50; i++) {
    const page = await fetch(`${base}/v2/sandboxes?limit=100&nextToken=${middle}`, { headers: key });
    middle = page.headers.get("x-next-token")!;
    await page.text();
  }
  await list.text();
  for (const [name, path] of [
    ["GET /health", "/health"],
    ["GET /sandboxes/{id}", `/sandboxes/${id}`],
    [`GET /v2/sandboxes, page of 100 of ${SANDBOXES}`, "/v2/sandboxes?limit=100"],
    ["  the same, from the middle by cursor", `/v2/sandboxes?limit=100&nextToken=${middle}`],
    ["  the same, one owner in a hundred by metadata", "/v2/sandboxes?limit=100&metadata=owner%3Duser-7"],
  ] as const) {
    const load = await wrk(child.pid, `${base}${path}`, 16, key);
    row(name, load.perSecond, load.p50Ms, load.p99Ms, load.cpuMicros);
  }

  console.log();
  row("proxy, one upstream connection per request", "ours", "nginx", "ratio");
  row("---", "---", "---", "---");
  const nginxBase = `http://127.0.0.1:${proxyPort}`;
  // A server that has been running for some seconds: its code is compiled.
  await wrk(child.pid, `${base}/small`, 16, into(servicePort));
  const small = await wrk(child.pid, `${base}/small`, 16, into(servicePort));
  const smallNginx = await wrk(nginx.worker, `${nginxBase}/small`, 16);
  row(
    "small answers, 16 connections, requests/s",
    small.perSecond,
    smallNginx.perSecond,
    small.perSecond / smallNginx.perSecond,
  );
  row("  CPU µs/request", small.cpuMicros, smallNginx.cpuMicros, small.cpuMicros / smallNginx.cpuMicros);
  row("  p99 ms", small.p99Ms, smallNginx.p99Ms, small.p99Ms / smallNginx.p99Ms);
  const big = await wrk(child.pid, `${base}/big`, 2, into(servicePort));
  const bigNginx = await wrk(nginx.worker, `${nginxBase}/big`, 2);
  row(
    `${BIG_MIB} MiB downloads, MiB/s`,
    big.mibPerSecond,
    bigNginx.mibPerSecond,
    big.mibPerSecond / bigNginx.mibPerSecond,
  );
  const sent = await upload(`${base}/up`, join(dir, "big"), into(echo.port!));
  const sentNginx = await upload(`${nginxBase}/up`, join(dir, "big"), {});
  row(`${BIG_MIB} MiB upload, MiB/s`, sent, sentNginx, sent / sentNginx);
  const messages = await webSockets(`ws://127.0.0.1:${port}/ws`, into(echo.port!), 16);
  const messagesNginx = await webSockets(`ws://127.0.0.1:${proxyPort}/ws`, {}, 16);
  row(
    "WebSocket echoes of 64 bytes, 16 sockets, messages/s",
    messages,
    messagesNginx,
    messages / messagesNginx,
  );
  console.log(`\nRSS of the server after it all: ${await rss()} MiB`);
} finally {
  child.kill();
  nginx.child.kill();
  service.child.kill();
  await Promise.all([child.exited, nginx.child.exited, service.child.exited]);
  await echo.stop(true);
  await rm(dir, { recursive: true, force: true });
}
