import { afterEach, expect, test } from "bun:test";
import { connect, createServer, type Server, type Socket } from "node:net";
import { createLogger } from "../lib/log.ts";
import type { SandboxRecord } from "../orchestrator/types.ts";
import { type Front, type FrontLimits, startFront } from "./index.ts";

/*
 * FR-89: an open stream may be silent for as long as it likes. Three ways to see it: with every limit of the proxy
 * far below the silence, with the limits as they are beyond the ten seconds of silence that servers of this kind
 * are known to cut at, and for ten minutes.
 */

const SANDBOX = "01936f8e-72f5-7000-8000-000000000001";
const LONG = process.env.AENV_TEST_LONG === "1";
if (!LONG) console.warn("skipped, ten minutes of an event that comes every 100 s: set AENV_TEST_LONG=1");

const log = createLogger("test");
log.level = "silent";
const open: { fronts: Front[]; servers: Server[]; sockets: Socket[] } = {
  fronts: [],
  servers: [],
  sockets: [],
};

afterEach(async () => {
  for (const socket of open.sockets.splice(0)) socket.destroy();
  for (const server of open.servers.splice(0)) server.close();
  for (const front of open.fronts.splice(0)) await front.stop(0);
});

function startProxy(limits: Partial<FrontLimits>): number {
  const front = startFront({
    hostname: "127.0.0.1",
    port: 0,
    domains: [],
    apiKeys: [],
    control: { handle: async () => new Response(null, { status: 404 }), hasPath: () => false },
    orchestrator: {
      access: () => ({ secure: false, allowPublicTraffic: true }),
      accessToken: () => "",
      trafficToken: () => "",
      route: () => ({
        kind: "ready",
        hostAddress: "127.0.0.1",
        instanceId: "i",
        gone: new AbortController().signal,
      }),
      autoResume: async () => undefined,
      get: (id) => ({ id }) as SandboxRecord,
      list: () => [],
    },
    limits,
    log,
  });
  open.fronts.push(front);
  return front.port;
}

/** A service that answers the head of a request with `answer` and keeps the connection. */
async function startService(answer: string): Promise<{ port: number; client: Promise<Socket> }> {
  const { promise, resolve } = Promise.withResolvers<Socket>();
  const server = createServer((socket) => {
    open.sockets.push(socket);
    socket.once("data", () => {
      socket.write(answer);
      resolve(socket);
    });
  });
  open.servers.push(server);
  await new Promise<void>((done) => server.listen(0, "127.0.0.1", done));
  return { port: (server.address() as { port: number }).port, client: promise };
}

interface Peer {
  readonly socket: Socket;
  /** Everything it was sent. */
  readonly text: () => string;
  /** Resolves when it has been sent that. */
  readonly saw: (what: string) => Promise<void>;
  readonly closed: () => boolean;
}

function peer(socket: Socket): Peer {
  let text = "";
  let closed = false;
  let wake = Promise.withResolvers<void>();
  const again = () => {
    wake.resolve();
    wake = Promise.withResolvers<void>();
  };
  socket.on("data", (chunk) => {
    text += chunk.toString("latin1");
    again();
  });
  socket.on("error", () => undefined);
  socket.on("close", () => {
    closed = true;
    again();
  });
  const saw = async (what: string): Promise<void> => {
    while (!text.includes(what)) {
      if (closed) throw new Error(`the stream was cut before ${JSON.stringify(what)}`);
      await wake.promise;
    }
  };
  return { socket, text: () => text, saw, closed: () => closed };
}

async function request(proxy: number, service: number, more = ""): Promise<Peer> {
  const socket = connect(proxy, "127.0.0.1");
  open.sockets.push(socket);
  const one = peer(socket);
  socket.write(
    `GET /events HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: ${SANDBOX}\r\nE2b-Sandbox-Port: ${service}\r\n${more}\r\n`,
  );
  return one;
}

const EVENT_STREAM =
  "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
const event = (n: number): string => {
  const text = `data: ${n}\n\n`;
  return `${text.length.toString(16)}\r\n${text}\r\n`;
};

/** An event stream and a tunnel, silent between `rounds` words; both must get every one. */
async function silentStreams(proxy: number, silenceMs: number, rounds: number): Promise<void> {
  const events = await startService(EVENT_STREAM);
  const tunnel = await startService(
    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: talk\r\n\r\n",
  );
  const reader = await request(proxy, events.port);
  const talker = await request(proxy, tunnel.port, "Connection: Upgrade\r\nUpgrade: talk\r\n");
  const [speaker, other] = [await events.client, peer(await tunnel.client)];
  await Promise.all([reader.saw("200 OK"), talker.saw("101 Switching")]);
  for (let round = 0; round < rounds; round++) {
    await Bun.sleep(silenceMs);
    speaker.write(event(round));
    talker.socket.write(`ask ${round};`);
    await Promise.all([reader.saw(`data: ${round}\n`), other.saw(`ask ${round};`)]);
    other.socket.write(`answer ${round};`);
    await talker.saw(`answer ${round};`);
  }
  speaker.end("0\r\n\r\n");
  await reader.saw("\r\n0\r\n\r\n");
  expect([reader.closed(), talker.closed()]).toEqual([false, false]);
}

test("FR-89: no limit of the proxy is in force on an open stream", async () => {
  // Proxy, service and client are one process: what it does in between must not look like silence.
  const ms = 1000;
  const proxy = startProxy({
    headMs: ms,
    idleMs: ms,
    lingerMs: ms,
    connectMs: ms,
    bodyIdleMs: ms,
    responseHeadMs: ms * 10,
    autoResumeMs: ms,
  });
  // They are in force elsewhere: one that asks nothing is cut long before the streams have said their first word.
  const mute = connect(proxy, "127.0.0.1");
  open.sockets.push(mute);
  const cut = peer(mute);
  await silentStreams(proxy, 3000, 1);
  expect(cut.closed()).toBeTrue();
}, 120_000);

test("FR-89: an event every twelve seconds", async () => {
  await silentStreams(startProxy({}), 12_000, 1);
}, 120_000);

test.skipIf(!LONG)(
  "FR-89: an event every hundred seconds for ten minutes",
  async () => {
    await silentStreams(startProxy({}), 100_000, 6);
  },
  900_000,
);
