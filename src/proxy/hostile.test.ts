import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer, connect as netConnect, type Server, type Socket } from "node:net";
import { eventually } from "../../tests/support/eventually.ts";
import { FakeSandboxFactory } from "../../tests/support/fake-sandboxes.ts";
import { addTemplate, createRequest, silent, testOptions } from "../../tests/support/orchestrator.ts";
import { createOrchestrator, type NodeOrchestrator } from "../orchestrator/index.ts";
import { createPosixRepository } from "../snapshot/index.ts";
import { type Front, startFront } from "./index.ts";
import type { FrontLimits } from "./options.ts";

/* Services and clients that mean no good, and many at once, before a real orchestrator. */

let home: string;
let factory: FakeSandboxFactory;
let orchestrator: NodeOrchestrator;
let front: Front;
let service: Server;
let onService: (socket: Socket) => void;
let sandboxId: string;
const open = new Set<Socket>();

function startIt(limits: Partial<FrontLimits> = {}): Front {
  const control = {
    handle: async () => new Response("control"),
    hasPath: (path: string) => path === "/health",
  };
  return startFront({
    hostname: "127.0.0.1",
    port: 0,
    domains: [],
    apiKeys: [],
    control,
    orchestrator,
    log: silent,
    limits: { stallMs: 300, ...limits },
  });
}

beforeEach(async () => {
  home = mkdtempSync("/tmp/front-hostile-");
  const repository = createPosixRepository({ root: `${home}/repository`, log: silent });
  await addTemplate(repository, home, "base");
  factory = new FakeSandboxFactory();
  orchestrator = createOrchestrator(testOptions(home, { repository, sandboxes: factory }));
  await orchestrator.start();
  ({ id: sandboxId } = await orchestrator.create(createRequest({ autoResume: true, secure: false })));
  service = createServer({ allowHalfOpen: true }, (socket) => {
    open.add(socket);
    socket.on("error", () => undefined);
    onService(socket);
  });
  await new Promise<void>((resolve) => service.listen(0, "127.0.0.1", resolve));
  front = startIt();
});

afterEach(async () => {
  for (const socket of open) socket.destroy();
  open.clear();
  await front.stop(0);
  service.close();
  await orchestrator.shutdown();
  rmSync(home, { recursive: true, force: true });
});

const port = (): number => (service.address() as { port: number }).port;
const routing = (): string => `E2b-Sandbox-Id: ${sandboxId}\r\nE2b-Sandbox-Port: ${port()}\r\n`;

function client(text: string): {
  readonly socket: Socket;
  received(): string;
  readonly ended: Promise<void>;
} {
  const socket = netConnect({ port: front.port, host: "127.0.0.1", allowHalfOpen: true });
  open.add(socket);
  let got = "";
  const ended = Promise.withResolvers<void>();
  socket.on("data", (bytes) => {
    got += bytes.toString("latin1");
  });
  socket.on("error", () => ended.resolve());
  for (const event of ["end", "close"]) socket.on(event, () => ended.resolve());
  socket.write(text);
  return { socket, received: () => got, ended: ended.promise };
}

/** What the service gets, up to the end of the head or more. */
function answering(answer: string): { readonly seen: () => string } {
  let seen = "";
  onService = (socket) => {
    socket.on("data", (bytes) => {
      const first = !seen.includes("\r\n\r\n");
      seen += bytes.toString("latin1");
      if (first && seen.includes("\r\n\r\n")) socket.write(answer);
    });
  };
  return { seen: () => seen };
}

test("requests at once to a paused sandbox share one resume, whatever it is doing when they come", async () => {
  onService = (socket) =>
    void socket.once("data", () => socket.end("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"));
  factory.delayMs = 60;
  await orchestrator.pause(sandboxId);
  const starts = factory.starts;
  const ask = (): Promise<number> =>
    fetch(`http://127.0.0.1:${front.port}/`, {
      headers: { "e2b-sandbox-id": sandboxId, "e2b-sandbox-port": String(port()) },
    }).then(({ status }) => status);
  const first = Array.from({ length: 4 }, ask);
  await eventually("it is on its way up", () => orchestrator.route(sandboxId).kind === "transitional");
  const statuses = await Promise.all([...first, ask(), ask()]);
  expect(statuses).toEqual([200, 200, 200, 200, 200, 200]);
  expect(factory.starts).toBe(starts + 1);
});

describe("what a service may say before its answer", () => {
  test("another protocol that nobody asked for is no answer", async () => {
    for (const extra of ["", "Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: 3\r\n"]) {
      const method = extra === "" ? "GET" : "POST";
      answering("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nGET /health HTTP/1.1\r\n\r\n");
      const { received, ended } = client(
        `${method} / HTTP/1.1\r\nHost: x\r\n${routing()}${extra}Connection: close\r\n\r\n${extra && "abc"}`,
      );
      await ended;
      expect(received()).toStartWith("HTTP/1.1 502 ");
      expect(received()).not.toContain("101");
    }
  });

  test("hints pass, without end they do not", async () => {
    answering(
      "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    );
    const good = client(`GET / HTTP/1.1\r\nHost: x\r\n${routing()}Connection: close\r\n\r\n`);
    await good.ended;
    expect(good.received()).toMatch(/^HTTP\/1.1 103 .*HTTP\/1.1 102 .*HTTP\/1.1 200 OK.*\r\n\r\nok$/s);

    let cut = false;
    const piece = Buffer.from("HTTP/1.1 102 Processing\r\n\r\n".repeat(1000));
    onService = (socket) => {
      const more = (): void => {
        if (socket.destroyed) return;
        if (socket.write(piece)) setImmediate(more);
        else socket.once("drain", more);
      };
      socket.once("data", more);
      socket.on("close", () => {
        cut = true;
      });
    };
    const flooded = client(`GET / HTTP/1.1\r\nHost: x\r\n${routing()}Connection: close\r\n\r\n`);
    await flooded.ended;
    expect(flooded.received()).toContain("HTTP/1.1 502 ");
    expect(flooded.received().length).toBeLessThan(256 * 1024);
    await eventually("the service was cut", () => cut);
  });
});

describe("fields that say where a message ends", () => {
  const NAMED = "Connection: content-length, transfer-encoding, host, x-private\r\nX-Private: 1\r\n";

  test("of a request reach the service", async () => {
    const { seen } = answering("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    const body = "GET /health HTTP/1.1\r\n\r\n";
    const one = client(
      `POST / HTTP/1.1\r\nHost: x\r\n${routing()}Content-Length: ${body.length}\r\n${NAMED}\r\n${body}`,
    );
    await eventually("the service has all", () => seen().endsWith(body));
    expect(seen()).toContain(`Content-Length: ${body.length}\r\n`);
    expect(seen()).toContain("Host: ");
    expect(seen()).not.toContain("X-Private");
    one.socket.destroy();
  });

  test("of an answer reach the client, which goes on", async () => {
    answering(`HTTP/1.1 200 OK\r\nContent-Length: 2\r\n${NAMED}\r\nok`);
    const one = client(`GET / HTTP/1.1\r\nHost: x\r\n${routing()}\r\n`);
    await eventually("the answer", () => one.received().endsWith("ok"));
    expect(one.received()).toContain("Content-Length: 2\r\n");
    expect(one.received()).not.toContain("X-Private");
    answering(
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: transfer-encoding\r\n\r\n0\r\n\r\n",
    );
    one.socket.write(`GET / HTTP/1.1\r\nHost: x\r\n${routing()}\r\n`);
    await eventually("the second answer", () => one.received().endsWith("0\r\n\r\n"));
    expect(one.received()).toContain("Transfer-Encoding: chunked\r\n");
  });
});

test("a service that takes the body slowly has time for it, one that takes nothing more has not for ever", async () => {
  await front.stop(0);
  front = startIt({ bodyIdleMs: 100, stallMs: 1500 });
  const body = 24 << 20;
  const head = `POST / HTTP/1.1\r\nHost: x\r\n${routing()}Content-Length: ${body}\r\nConnection: close\r\n\r\n`;
  const send = (): ReturnType<typeof client> => {
    const one = client(head);
    one.socket.write(Buffer.alloc(body));
    return one;
  };
  onService = (socket) => {
    let got = -1;
    socket.once("data", () => {
      // Longer than a client has that says nothing.
      socket.pause();
      setTimeout(() => socket.resume(), 700);
    });
    socket.on("data", (bytes) => {
      if (got < 0) got = bytes.length - bytes.indexOf("\r\n\r\n") - 4;
      else got += bytes.length;
      if (got >= body) socket.end("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    });
  };
  const slow = send();
  await slow.ended;
  expect(slow.received()).toStartWith("HTTP/1.1 200 ");
  onService = (socket) => void socket.pause();
  const stuck = send();
  await stuck.ended;
  expect(stuck.received()).toStartWith("HTTP/1.1 504 ");
}, 120_000);

test("a tunnel whose service has ended and takes nothing does not outlive its client for long", async () => {
  onService = (socket) => {
    socket.once("data", () => {
      socket.pause();
      socket.end("HTTP/1.1 101 Switching Protocols\r\nUpgrade: raw\r\nConnection: Upgrade\r\n\r\n");
    });
  };
  const one = client(`GET / HTTP/1.1\r\nHost: x\r\n${routing()}Connection: Upgrade\r\nUpgrade: raw\r\n\r\n`);
  await eventually("the tunnel", () => one.received().includes("101 Switching"));
  one.socket.write(Buffer.alloc(16 << 20));
  one.socket.end();
  await Bun.sleep(50);
  one.socket.destroy();
  await eventually("nothing is held", () => front.connections === 0);
});

test("a method without end and two hosts are refused", async () => {
  for (const [text, status] of [
    [`${"M".repeat(33)} /health HTTP/1.1\r\nHost: x\r\n\r\n`, 501],
    ["GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400],
    [`${"M".repeat(32)} /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n`, 200],
  ] as const) {
    const { received, ended } = client(text);
    await ended;
    expect(received()).toStartWith(`HTTP/1.1 ${status} `);
  }
});
