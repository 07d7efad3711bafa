import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { createHash, randomBytes } from "node:crypto";
import { createServer as createNetServer, type Server as NetServer, connect as netConnect } from "node:net";
import { gzipSync } from "node:zlib";
import { eventually } from "../../tests/support/eventually.ts";
import { AenvError } from "../lib/errors.ts";
import { createLogger } from "../lib/log.ts";
import type { RouteLookup, SandboxRecord } from "../orchestrator/types.ts";
import { type ExchangeReport, type Front, startFront } from "./index.ts";
import type { FrontOptions } from "./options.ts";

const RUNNING = "01936f8e-72f5-7000-8000-000000000001";
const MASKED = "01936f8e-72f5-7000-8000-0000000000aa";
const PAUSED = "01936f8e-72f5-7000-8000-000000000002";
const SLEEPER = "01936f8e-72f5-7000-8000-000000000003";
const PRIVATE = "01936f8e-72f5-7000-8000-000000000004";
const TRANSIT = "01936f8e-72f5-7000-8000-000000000005";
const UNKNOWN = "01936f8e-72f5-7000-8000-00000000000f";
const API_KEY = `e2b_${"a".repeat(64)}`;

let gone = new AbortController();
let resumes = 0;
let awake = false;

const orchestrator = {
  access(id: string) {
    if (id === UNKNOWN) return undefined;
    return { secure: true, allowPublicTraffic: id !== PRIVATE };
  },
  list: () => [{ id: RUNNING, state: "running", secure: true } as SandboxRecord],
  accessToken: (id: string) => `token-${id}`,
  trafficToken: (id: string) => `traffic-${id}`,
  route(id: string): RouteLookup {
    const ready: RouteLookup = {
      kind: "ready",
      hostAddress: "127.0.0.1",
      instanceId: "i",
      gone: gone.signal,
    };
    if (id === PAUSED) return { kind: "paused", autoResume: false };
    if (id === TRANSIT) return { kind: "transitional", state: "snapshotting" };
    if (id === SLEEPER) return awake ? ready : { kind: "paused", autoResume: true };
    return ready;
  },
  async autoResume() {
    resumes++;
    await Bun.sleep(20);
    awake = true;
  },
  get(id: string): SandboxRecord {
    if (id === UNKNOWN) throw new AenvError({ code: "sandbox_not_found", status: 404, message: "no" });
    const network = id === MASKED ? { maskRequestHost: "app.internal:$" + "{PORT}" } : undefined;
    return { id, autoResume: id === SLEEPER, ...(network && { network }) } as SandboxRecord;
  },
};

let front: Front;
/** The same with no patience: only for what is about that. */
let strict: Front;
let base: string;
/** Where the next event of the service's stream comes from. */
let nextEvent: () => Promise<void>;
/** What a service saw last. */
let seen: { method: string; url: string; headers: Record<string, string>; body: string };
let service: ReturnType<typeof Bun.serve>;
let raw: NetServer;
let rawPort: number;
/** What the raw service does with a connection. */
let onRaw: (socket: import("node:net").Socket) => void;

const route = (id: string, port: number): Record<string, string> => ({
  "e2b-sandbox-id": id,
  "e2b-sandbox-port": String(port),
});

beforeAll(async () => {
  service = Bun.serve({
    port: 0,
    hostname: "127.0.0.1",
    idleTimeout: 0,
    maxRequestBodySize: 2 ** 31,
    async fetch(request, server) {
      const url = new URL(request.url);
      if (url.pathname === "/ws") {
        server.upgrade(request, { data: undefined, headers: { "sec-websocket-protocol": "chat" } });
        return undefined as unknown as Response;
      }
      if (url.pathname === "/sse") {
        return new Response(
          new ReadableStream({
            async start(controller) {
              for (let i = 0; i < 3; i++) {
                controller.enqueue(`data: ${i}\n\n`);
                await nextEvent();
              }
              controller.close();
            },
          }),
          { headers: { "content-type": "text/event-stream" } },
        );
      }
      if (url.pathname === "/gzip") {
        return new Response(gzipSync("squeezed"), { headers: { "content-encoding": "gzip" } });
      }
      if (url.pathname === "/cookies") {
        const headers = new Headers();
        for (let i = 0; i < 200; i++) headers.append("set-cookie", `c${i}=${i}`);
        return new Response("ok", { headers });
      }
      if (url.pathname === "/hash") {
        const hash = createHash("sha256");
        let length = 0;
        for await (const chunk of request.body ?? []) {
          hash.update(chunk);
          length += chunk.length;
        }
        return Response.json({ hash: hash.digest("hex"), length });
      }
      const body = await request.text();
      seen = {
        method: request.method,
        url: request.url.slice(request.url.indexOf("/", 8)),
        headers: Object.fromEntries(request.headers),
        body,
      };
      return new Response(`${request.method} ${body}`, { status: url.pathname === "/teapot" ? 418 : 200 });
    },
    websocket: {
      message(socket, message) {
        if (message === "bye") socket.close(4001, "so long");
        else socket.send(message);
      },
    },
  });
  raw = createNetServer({ allowHalfOpen: true }, (socket) => {
    socket.on("error", () => socket.destroy());
    onRaw(socket);
  });
  await new Promise<void>((resolve) => raw.listen(0, "127.0.0.1", resolve));
  rawPort = (raw.address() as { port: number }).port;
  const start = (limits: FrontOptions["limits"]): Front =>
    startFront({
      hostname: "127.0.0.1",
      port: 0,
      domains: ["box.example"],
      apiKeys: [API_KEY],
      orchestrator,
      log: createLogger("front-test"),
      ...(limits && { limits }),
      control: {
        hasPath: (path) => path.startsWith("/control"),
        async handle(request) {
          if (request.url.endsWith("/control/slow")) await Bun.sleep(100);
          return Response.json({ method: request.method, url: request.url, body: await request.text() });
        },
      },
    });
  front = start(undefined);
  strict = start({ bodyIdleMs: 400, responseHeadMs: 400, headMs: 400, lingerMs: 300 });
  base = `http://127.0.0.1:${front.port}`;
});

afterAll(async () => {
  await front.stop(100);
  await strict.stop(100);
  await service.stop(true);
  raw.close();
});

/**
 * Sends raw bytes and collects what comes back until the other side ends. Between parts: a pattern waits until
 * what came back has it, a function is called.
 */
function exchange(
  parts: readonly (string | Buffer | RegExp | (() => void))[],
  options: { readonly halfClose?: boolean; readonly at?: Front } = {},
): Promise<{ text: string; reset: boolean }> {
  return new Promise((resolve) => {
    const { port } = options.at ?? front;
    const socket = netConnect({ port, host: "127.0.0.1", allowHalfOpen: true });
    let text = "";
    let ended = false;
    let failed = false;
    let grown: () => void = () => undefined;
    socket.setTimeout(20_000, () => socket.destroy());
    socket.on("data", (chunk) => {
      text += chunk.toString("latin1");
      grown();
    });
    socket.on("end", () => {
      ended = true;
      socket.end();
    });
    socket.on("error", () => {
      failed = true;
    });
    socket.on("close", () => resolve({ text, reset: failed || !ended }));
    void (async () => {
      for (const part of parts) {
        if (part instanceof RegExp) {
          while (!part.test(text)) {
            await new Promise<void>((resolve) => {
              grown = resolve;
            });
          }
        } else if (typeof part === "function") part();
        else socket.write(part);
      }
      if (options.halfClose) socket.end();
    })();
  });
}

const head = (extra = "", target = "/", method = "GET", port = rawPort) =>
  `${method} ${target} HTTP/1.1\r\nHost: x\r\ne2b-sandbox-id: ${RUNNING}\r\ne2b-sandbox-port: ${port}\r\n${extra}\r\n`;

describe("control plane", () => {
  test("requests reach the API with their body, keep-alive and pipelined", async () => {
    const one = "POST /control/a?b=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc";
    const two =
      "POST /control/slow HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nde\r\n0\r\n\r\n";
    const three = "GET /control/c HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    const { text, reset } = await exchange([one + two + three]);
    expect(reset).toBe(false);
    expect(text.match(/HTTP\/1\.1 200 OK/g)).toHaveLength(3);
    expect(text).toContain('"body":"abc"');
    expect(text).toContain('"body":"de"');
    expect(text.indexOf('"abc"')).toBeLessThan(text.indexOf('"de"'));
  });

  test("malformed input is answered and closed", async () => {
    expect((await exchange(["NONSENSE\r\n\r\n"])).text).toStartWith("HTTP/1.1 400");
    expect((await exchange([`GET / HTTP/1.1\r\nx: ${"a".repeat(140_000)}\r\n\r\n`])).text).toStartWith(
      "HTTP/1.1 431",
    );
    const smuggled =
      "POST /control HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    expect((await exchange([smuggled])).text).toStartWith("HTTP/1.1 400");
    expect(
      (
        await exchange([
          `POST /control HTTP/1.1\r\nHost: x\r\nX-API-Key: ${API_KEY}\r\nContent-Length: 999999999\r\n\r\n`,
        ])
      ).text,
    ).toStartWith("HTTP/1.1 413");
  });

  test("RFC 9112 §3.2: HTTP/1.1 has one Host, an empty one at least; HTTP/1.0 need not have one", async () => {
    const answer = async (line: string, ...hosts: string[]): Promise<string> => {
      const head = [line, ...hosts.map((host) => `Host:${host}`), "Connection: close"].join("\r\n");
      return (await exchange([`${head}\r\n\r\n`])).text;
    };
    for (const line of ["GET /control/a HTTP/1.1", "GET / HTTP/1.1", `GET http://x/control/a HTTP/1.1`]) {
      const none = await answer(line);
      expect(none).toStartWith("HTTP/1.1 400");
      expect(none).toContain("no Host header field");
    }
    for (const version of ["HTTP/1.0", "HTTP/1.1"]) {
      const two = await answer(`GET /control/a ${version}`, " x", " x");
      expect(two).toStartWith("HTTP/1.1 400");
      expect(two).toContain("more than one Host header field");
      expect(await answer(`GET /control/a ${version}`, " x")).toMatch(/^HTTP\/1\.\d 200/);
      expect(await answer(`GET /control/a ${version}`, "")).toMatch(/^HTTP\/1\.\d 200/);
    }
    expect(await answer("GET /control/a HTTP/1.0")).toMatch(/^HTTP\/1\.\d 200/);
  });

  test("a client that never finishes its head is cut", async () => {
    // It would read for ever.
    expect((await exchange(["GET / HT"], { at: strict })).text).toBe("");
  });
});

describe("data plane", () => {
  test("method, path, query and body pass; our own headers do not", async () => {
    const reply = await fetch(`${base}/proxy/a%2Fb?x=%20y`, {
      method: "PUT",
      body: "hello",
      headers: {
        ...route(RUNNING, service.port!),
        "x-api-key": API_KEY,
        "x-access-token": "secret",
        "e2b-traffic-access-token": "t",
        authorization: "Basic dXNlcjo=",
      },
    });
    expect(await reply.text()).toBe("PUT hello");
    expect(seen.url).toBe("/a%2Fb?x=%20y");
    expect(seen.headers.authorization).toBe("Basic dXNlcjo=");
    expect(seen.headers["x-forwarded-method"]).toBe("PUT");
    expect(seen.headers["x-forwarded-uri"]).toBe("/a%2Fb?x=%20y");
    expect(seen.headers["x-forwarded-host"]).toBe(`127.0.0.1:${front.port}`);
    expect(seen.headers.host).toBe(`127.0.0.1:${service.port}`);
    for (const name of ["x-api-key", "x-access-token", "e2b-traffic-access-token", "e2b-sandbox-id"]) {
      expect(seen.headers[name]).toBeUndefined();
    }
  });

  test("another application's x-api-key passes", async () => {
    await fetch(`${base}/x`, { headers: { ...route(RUNNING, service.port!), "x-api-key": "theirs" } });
    expect(seen.headers["x-api-key"]).toBe("theirs");
  });

  test("maskRequestHost is the Host the service sees, with the port where wanted; the client's is told besides", async () => {
    const host = `${service.port}-${MASKED}.box.example`;
    expect((await fetch(`${base}/x`, { headers: { host } })).status).toBe(200);
    expect(seen.headers.host).toBe(`app.internal:${service.port}`);
    expect(seen.headers["x-forwarded-host"]).toBe(host);
  });

  test("routing by host name", async () => {
    const reply = await fetch(`${base}/control`, {
      headers: { host: `${service.port}-${RUNNING}.box.example` },
    });
    expect(await reply.text()).toBe("GET ");
    expect(seen.url).toBe("/control");
  });

  test("statuses, HEAD and gzip bodies are untouched", async () => {
    expect((await fetch(`${base}/teapot`, { headers: route(RUNNING, service.port!) })).status).toBe(418);
    const zipped = await fetch(`${base}/gzip`, { headers: route(RUNNING, service.port!), decompress: false });
    expect(zipped.headers.get("content-encoding")).toBe("gzip");
    expect(Buffer.from(await zipped.arrayBuffer())).toEqual(gzipSync("squeezed"));
    const headReply = await fetch(`${base}/x`, { method: "HEAD", headers: route(RUNNING, service.port!) });
    expect(headReply.status).toBe(200);
    const cookies = await fetch(`${base}/cookies`, { headers: route(RUNNING, service.port!) });
    expect(cookies.headers.getSetCookie()).toHaveLength(200);
  });

  test("trailers, early hints, reason phrases and 60 KiB of headers pass byte for byte", async () => {
    const long = "v".repeat(60_000);
    onRaw = (socket) => {
      socket.once("data", () =>
        socket.end(
          `HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 Quite Fine\r\nX-Long: ${long}\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n3\r\nabc\r\n0\r\nX-T: 1\r\n\r\n`,
        ),
      );
    };
    const { text } = await exchange([head("Connection: close\r\n")]);
    expect(text).toContain("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n");
    expect(text).toContain("HTTP/1.1 200 Quite Fine\r\n");
    expect(text).toContain(`X-Long: ${long}`);
    expect(text).toEndWith("3\r\nabc\r\n0\r\nX-T: 1\r\n\r\n");
  });

  test("the connection is kept alive over different sandboxes and the control plane", async () => {
    const get = `GET /k HTTP/1.1\r\nHost: x\r\ne2b-sandbox-id: ${RUNNING}\r\ne2b-sandbox-port: ${service.port}\r\n\r\n`;
    const last = "GET /control HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    const { text } = await exchange([get + get + last]);
    expect(text.match(/HTTP\/1\.1 200/g)).toHaveLength(3);
  });

  test("server-sent events come one by one", async () => {
    let { promise, resolve } = Promise.withResolvers<void>();
    nextEvent = () => promise;
    const reply = await fetch(`${base}/sse`, { headers: route(RUNNING, service.port!) });
    const events: string[] = [];
    for await (const event of reply.body!) {
      events.push(Buffer.from(event).toString());
      // Only now the service goes on.
      const go = resolve;
      ({ promise, resolve } = Promise.withResolvers<void>());
      go();
    }
    expect(events).toEqual(["data: 0\n\n", "data: 1\n\n", "data: 2\n\n"]);
  });

  test("a big upload arrives whole with flat memory", async () => {
    const block = randomBytes(1 << 20);
    const blocks = 128;
    const hash = createHash("sha256");
    for (let i = 0; i < blocks; i++) hash.update(block);
    let sent = 0;
    const before = process.memoryUsage.rss();
    const reply = await fetch(`${base}/hash`, {
      method: "POST",
      headers: route(RUNNING, service.port!),
      body: new ReadableStream({
        pull(controller) {
          if (sent++ < blocks) controller.enqueue(block);
          else controller.close();
        },
      }),
    });
    expect(await reply.json()).toEqual({ hash: hash.digest("hex"), length: blocks << 20 });
    expect(process.memoryUsage.rss() - before).toBeLessThan(160 << 20);
  }, 120_000);

  test("a client that does not read stops the service, not the proxy's memory", async () => {
    let written = 0;
    let blocked = false;
    onRaw = (socket) => {
      socket.once("data", () => {
        socket.write("HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n");
        const block = Buffer.alloc(1 << 20);
        const push = () => {
          while (socket.write(block)) written += block.length;
          written += block.length;
          blocked = true;
          socket.once("drain", () => {
            blocked = false;
            push();
          });
        };
        push();
      });
    };
    const socket = netConnect(front.port, "127.0.0.1");
    socket.pause();
    socket.write(head());
    await eventually("the service is held up", async () => {
      const before = written;
      await Bun.sleep(300);
      return blocked && written === before;
    });
    expect(written).toBeLessThan(64 << 20);
    socket.destroy();
  });

  test("a client's abort reaches the service, a service's abort the client", async () => {
    let closed = Promise.withResolvers<void>();
    onRaw = (socket) => {
      socket.once("data", () => socket.write("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"));
      socket.on("close", () => closed.resolve());
    };
    const socket = netConnect(front.port, "127.0.0.1");
    socket.write(head());
    await new Promise((resolve) => socket.once("data", resolve));
    socket.destroy();
    await closed.promise;

    closed = Promise.withResolvers();
    onRaw = (service_) => {
      service_.once("data", () => {
        service_.write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", () =>
          service_.destroy(),
        );
      });
    };
    const cut = await exchange([head()]);
    expect(cut.text).toContain("abc");
    expect(cut.text).not.toContain("0\r\n\r\n");
  });

  test("a body that ends with the connection ends with it", async () => {
    onRaw = (socket) => {
      socket.once("data", () => socket.end("HTTP/1.1 200 OK\r\n\r\nuntil the end"));
    };
    const { text, reset } = await exchange([head()]);
    expect(text).toEndWith("\r\n\r\nuntil the end");
    expect(text).toContain("Connection: close");
    expect(reset).toBe(false);
  });

  test("expectations are answered by the proxy", async () => {
    const request = `POST /e HTTP/1.1\r\nHost: x\r\ne2b-sandbox-id: ${RUNNING}\r\ne2b-sandbox-port: ${service.port}\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\n`;
    const { text } = await exchange([request, /100 Continue\r\n\r\n/, "ok"]);
    expect(text).toStartWith("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200");
    expect(text).toEndWith("POST ok");
  });

  test("silence has limits: request body, response head", async () => {
    onRaw = () => undefined;
    for (const request of [head("Content-Length: 10\r\n", "/", "POST"), head("Connection: close\r\n")]) {
      expect((await exchange([request], { at: strict })).text).toStartWith("HTTP/1.1 504");
    }
  });

  test("malformed answers of a service are a bad gateway", async () => {
    onRaw = (socket) => {
      socket.once("data", () => socket.end("SSH-2.0-OpenSSH\r\n\r\n"));
    };
    expect((await exchange([head("Connection: close\r\n")])).text).toStartWith("HTTP/1.1 502");
    onRaw = (socket) => socket.destroy();
    expect((await exchange([head("Connection: close\r\n")])).text).toStartWith("HTTP/1.1 502");
  });
});

describe("tunnels", () => {
  test("WebSocket: text, binary, subprotocol, close code", async () => {
    const socket = new WebSocket(`ws://127.0.0.1:${front.port}/ws`, {
      headers: route(RUNNING, service.port!),
      protocols: ["chat"],
    } as unknown as string[]);
    socket.binaryType = "arraybuffer";
    const messages: unknown[] = [];
    const closed = new Promise<CloseEvent>((resolve) => {
      socket.onclose = resolve;
    });
    socket.onmessage = (event) => messages.push(event.data);
    await new Promise((resolve) => {
      socket.onopen = resolve;
    });
    expect(socket.protocol).toBe("chat");
    socket.send("text");
    socket.send(new Uint8Array([1, 2, 255]));
    socket.send("x".repeat(300_000));
    while (messages.length < 3) await Bun.sleep(5);
    expect(messages[0]).toBe("text");
    expect(new Uint8Array(messages[1] as ArrayBuffer)).toEqual(new Uint8Array([1, 2, 255]));
    expect((messages[2] as string).length).toBe(300_000);
    socket.send("bye");
    const event = await closed;
    expect(event.code).toBe(4001);
    expect(event.reason).toBe("so long");
  });

  test("any protocol, with half-close in both directions", async () => {
    onRaw = (socket) => {
      let text = "";
      socket.once("data", () => {
        socket.write("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n");
        socket.on("data", (chunk) => {
          text += chunk.toString();
        });
        socket.on("end", () => socket.end(`got ${text}`));
      });
    };
    const { text, reset } = await exchange(
      [head("Connection: Upgrade\r\nUpgrade: echo\r\n"), /101 .*\r\n\r\n/s, "one ", "two"],
      {
        halfClose: true,
      },
    );
    expect(text).toContain("HTTP/1.1 101");
    expect(text).toEndWith("got one two");
    expect(reset).toBe(false);
  });

  test("a refused upgrade is an ordinary answer; a malformed one is refused", async () => {
    onRaw = (socket) => {
      socket.once("data", () => socket.end("HTTP/1.1 426 Upgrade Required\r\nContent-Length: 2\r\n\r\nno"));
    };
    expect((await exchange([head("Connection: Upgrade\r\nUpgrade: echo\r\n")])).text).toEndWith("no");
    expect((await exchange([head("Connection: Upgrade\r\nUpgrade: websocket\r\n")])).text).toStartWith(
      "HTTP/1.1 400",
    );
  });
});

describe("who may and where to", () => {
  const call = (id: string, port: number, headers: Record<string, string> = {}, path = "/") =>
    fetch(`${base}${path}`, { headers: { ...route(id, port), ...headers } });
  const own = (id: string, port: number) =>
    fetch(`${base}/proxy/`, {
      headers: { "x-agentenv-sandbox-id": id, "x-agentenv-target-port": String(port) },
    });

  test("unknown, paused, transitional and closed port in both styles", async () => {
    expect((await call(UNKNOWN, 80)).status).toBe(502);
    expect(await (await call(UNKNOWN, 80)).json()).toEqual({
      sandboxId: UNKNOWN,
      message: "The sandbox was not found",
      code: 502,
    });
    expect((await own(UNKNOWN, 80)).status).toBe(404);
    expect(await (await own(UNKNOWN, 80)).text()).toBe("sandbox not found");
    expect((await call(PAUSED, 80)).status).toBe(502);
    expect((await own(PAUSED, 80)).status).toBe(410);
    expect((await call(TRANSIT, 80)).status).toBe(409);
    expect((await own(TRANSIT, 80)).status).toBe(410);
    const closed = await call(RUNNING, 1);
    expect(closed.status).toBe(502);
    expect(await closed.json()).toEqual({
      sandboxId: RUNNING,
      message: "The sandbox is running but port is not open",
      port: 1,
      code: 502,
    });
    expect((await own(RUNNING, 1)).status).toBe(502);
  });

  test("the agent's port needs the sandbox's token", async () => {
    expect((await call(RUNNING, 49_983)).status).toBe(401);
    expect((await call(RUNNING, 49_983, { "x-access-token": "wrong" })).status).toBe(401);
    // Authorised: nothing listens there.
    expect((await call(RUNNING, 49_983, { "x-access-token": `token-${RUNNING}` })).status).toBe(502);
    expect((await call(RUNNING, 49_983, {}, "/files?signature=v1_x")).status).toBe(502);
    expect((await call(RUNNING, 49_983, {}, "/health?signature=v1_x")).status).toBe(401);
  });

  test("host-only paths of the agent are not there", async () => {
    for (const path of ["/init", "/proxy//init", "/%69nit", "/freeze", "/init/"]) {
      const reply = await call(RUNNING, 49_983, { "x-access-token": `token-${RUNNING}` }, path);
      expect(reply.status).toBe(404);
    }
  });

  test("private ingress needs the traffic token", async () => {
    expect((await call(PRIVATE, service.port!)).status).toBe(403);
    expect((await call(PRIVATE, service.port!, { "e2b-traffic-access-token": "no" })).status).toBe(403);
    const reply = await call(PRIVATE, service.port!, { "e2b-traffic-access-token": `traffic-${PRIVATE}` });
    expect(reply.status).toBe(200);
    expect(seen.headers["e2b-traffic-access-token"]).toBeUndefined();
  });

  test("traffic wakes a paused sandbox; an unauthorised request does not", async () => {
    expect((await call(SLEEPER, 49_983)).status).toBe(401);
    expect(resumes).toBe(0);
    const reply = await fetch(`${base}/x`, {
      method: "POST",
      body: "kept",
      headers: route(SLEEPER, service.port!),
    });
    expect(await reply.text()).toBe("POST kept");
    expect(resumes).toBe(1);
  });

  test("a sandbox that goes cuts its streams and refuses its requests", async () => {
    onRaw = (socket) => {
      socket.once("data", () => socket.write("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"));
    };
    const { text } = await exchange([head(), /abc$/, () => gone.abort()]);
    expect(text).toEndWith("abc");
    gone = new AbortController();
    const asked = Promise.withResolvers<void>();
    onRaw = (socket) => void socket.once("data", () => asked.resolve());
    const waiting = exchange([head("Connection: close\r\n")]);
    await asked.promise;
    gone.abort();
    expect((await waiting).text).toStartWith("HTTP/1.1 502");
    gone = new AbortController();
  });
});

describe("who is asking", () => {
  const visit = (headers: Record<string, string>, method = "GET") =>
    fetch(`${base}/`, { method, headers: { ...route(UNKNOWN, 80), ...headers } });

  test("an error is a page for a navigation and JSON for everything else", async () => {
    const kind = async (headers: Record<string, string>, method?: string) =>
      (await visit(headers, method)).headers.get("content-type")?.split(";")[0];
    const browser = { "user-agent": "Mozilla/5.0", accept: "text/html,application/xhtml+xml,*/*;q=0.8" };
    expect(await kind({ ...browser, "sec-fetch-mode": "navigate" })).toBe("text/html");
    expect(await kind(browser)).toBe("text/html");
    expect(await kind({ ...browser, "sec-fetch-mode": "cors" })).toBe("application/json");
    expect(await kind({ "user-agent": "Mozilla/5.0", accept: "*/*" })).toBe("application/json");
    expect(await kind({ accept: "application/json, text/html" })).toBe("application/json");
    expect(await kind({})).toBe("application/json");
    expect(await kind(browser, "POST")).toBe("application/json");
    const page = await visit(browser);
    expect(page.status).toBe(502);
    expect(page.headers.get("access-control-allow-origin")).toBe("*");
    expect(await page.text()).toContain("The sandbox was not found");
  });

  test("addresses of any kind as Host: headers decide; a sandbox host name decides over them", async () => {
    const hosts = ["192.168.1.5:8000", "[::1]:8000", "[fe80::1]", "10.0.0.1", "localhost", "box.example"];
    for (const host of hosts) {
      const reply = await fetch(`${base}/x`, { headers: { ...route(RUNNING, service.port!), host } });
      expect({ host, status: reply.status }).toEqual({ host, status: 200 });
      expect(seen.headers["x-forwarded-host"]).toBe(host);
    }
    const byName = await fetch(`${base}/x`, {
      headers: { ...route(UNKNOWN, 1), host: `${service.port}-${RUNNING}.box.example` },
    });
    expect(byName.status).toBe(200);
  });

  test("the listener itself may be an IPv6 address", async () => {
    const six = startFront({
      hostname: "::1",
      port: 0,
      domains: [],
      apiKeys: [],
      orchestrator,
      log: createLogger("front-test"),
      control: { hasPath: () => false, handle: async () => new Response() },
    });
    try {
      const reply = await fetch(`http://[::1]:${six.port}/x`, { headers: route(RUNNING, service.port!) });
      expect(reply.status).toBe(200);
    } finally {
      await six.stop(0);
    }
  });
});

describe("bounds", () => {
  test("too many at one sandbox, too many at all: 429 with Retry-After", async () => {
    const reports: ExchangeReport[] = [];
    const small = startFront({
      hostname: "127.0.0.1",
      port: 0,
      domains: [],
      apiKeys: [],
      orchestrator,
      onExchange: (report) => reports.push(report),
      log: createLogger("front-test"),
      limits: { maxPerSandbox: 1, maxConnections: 3 },
      control: { hasPath: () => false, handle: async () => new Response() },
    });
    const asked = Promise.withResolvers<void>();
    onRaw = (socket) => void socket.once("data", () => asked.resolve());
    const url = `http://127.0.0.1:${small.port}`;
    const waiting = netConnect({ port: small.port, host: "127.0.0.1" });
    waiting.write(head());
    try {
      await asked.promise;
      const refused = await fetch(url, { headers: route(RUNNING, rawPort) });
      expect([refused.status, refused.headers.get("retry-after")]).toEqual([429, "1"]);
      expect(await refused.json()).toMatchObject({ code: 429, sandboxId: RUNNING });
      const spare = [1, 2, 3].map(() => netConnect({ port: small.port, host: "127.0.0.1" }));
      let full = "";
      for (const socket of spare) {
        socket.on("data", (chunk) => {
          full += chunk.toString();
        });
      }
      await eventually("one of them is refused", () => full.includes("\r\n\r\n"));
      expect(full).toStartWith("HTTP/1.1 429");
      expect(full).toContain("Retry-After: 1");
      for (const socket of spare) socket.destroy();
      waiting.destroy();
      await eventually("both are reported", () => reports.length >= 2);
      expect(reports.map(({ source, status }) => [source, status])).toEqual([
        ["proxy_header", 429],
        ["proxy_header", 499],
      ]);
      // Its place is free again.
      const again = await fetch(url, { headers: route(RUNNING, service.port!) });
      expect(again.status).toBe(200);
    } finally {
      waiting.destroy();
      await small.stop(0);
    }
  });
});

test("a signed URL that names no sandbox reaches the one that made it", async () => {
  const signature = (path: string) =>
    `v1_${createHash("sha256").update(`${path}:read::token-${RUNNING}`).digest("base64").replaceAll("=", "")}`;
  const get = (path: string, signed = path) =>
    fetch(`${base}/files?${new URLSearchParams({ path, signature: signature(signed) })}`);
  // Nothing listens on the agent's port here: it was found, and is not open.
  expect(await (await get("/tmp/x")).json()).toMatchObject({ sandboxId: RUNNING, port: 49_983, code: 502 });
  const tampered = await get("/tmp/x", "/tmp/y");
  expect(tampered.status).toBe(401);
  expect(await tampered.json()).toMatchObject({ code: 401, message: "invalid signature" });
  expect(tampered.headers.get("access-control-allow-origin")).toBe("*");
});

test("a port in use says so", () => {
  expect(() =>
    startFront({
      hostname: "127.0.0.1",
      port: front.port,
      domains: [],
      apiKeys: [],
      orchestrator,
      log: createLogger("front-test"),
      control: { hasPath: () => false, handle: async () => new Response() },
    }),
  ).toThrow(/in use by another process/);
});

test("no connection is left behind", async () => {
  await eventually("they are closed", () => front.connections <= 2);
});

describe("what a hostile client tries", () => {
  test("an upgrade with a body does not smuggle a second request", async () => {
    let connections = 0;
    let text = "";
    onRaw = (socket) => {
      connections++;
      socket.on("data", (chunk) => {
        text += chunk.toString("latin1");
        if (text.includes("\r\n\r\n") && text.includes("GET /control")) {
          socket.end("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
      });
    };
    const hidden = "GET /control/x HTTP/1.1\r\nHost: x\r\n\r\n";
    const request = head(
      `Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: ${hidden.length}\r\n`,
      "/",
      "POST",
    );
    const reply = await exchange([request + hidden, /\r\n\r\n/], { halfClose: true });
    expect(connections).toBe(1);
    // The body is the service's: nothing of it was answered by the control plane.
    expect(reply.text).not.toContain('"method"');
    const both = head(
      "Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n",
    );
    expect((await exchange([both])).text).toStartWith("HTTP/1.1 400");
  });

  test("answers do not pile up for a client that reads none", async () => {
    const socket = netConnect(front.port, "127.0.0.1");
    socket.pause();
    const one = `POST /control HTTP/1.1\r\nHost: x\r\nX-API-Key: ${API_KEY}\r\nContent-Length: 200000\r\n\r\n${"a".repeat(200_000)}`;
    const before = process.memoryUsage.rss();
    let sent = 0;
    let full = false;
    socket.on("error", () => undefined);
    while (sent < 400 && !full) {
      sent++;
      if (!socket.write(one)) {
        full = await Promise.race([
          new Promise<boolean>((resolve) => socket.once("drain", () => resolve(false))),
          Bun.sleep(500).then(() => true),
        ]);
      }
    }
    // The proxy stopped reading long before all of it.
    expect(full).toBe(true);
    expect(process.memoryUsage.rss() - before).toBeLessThan(120 << 20);
    socket.destroy();
  });

  test("a large body of a caller without a key is not collected", async () => {
    const declared = "POST /control HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n";
    expect((await exchange([declared])).text).toStartWith("HTTP/1.1 401");
    const chunks = `POST /control HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n${`4000\r\n${"a".repeat(0x4000)}\r\n`}`;
    expect((await exchange([chunks, `4000\r\n${"a".repeat(0x4000)}\r\n`.repeat(6)])).text).toStartWith(
      "HTTP/1.1 401",
    );
  });
});
