import { afterAll, beforeAll, expect, test } from "bun:test";
import { connect, type Socket } from "node:net";
import { createLogger } from "../lib/log.ts";
import { type Front, type FrontOptions, startFront } from "./index.ts";

/* Control requests whose body is read as it arrives. */

const log = createLogger("test");
log.level = "silent";
const MIB = 1 << 20;

let front: Front;
/** The same with little patience: only for what is about that. */
let strict: Front;
/** What the handler does with the next request. */
let handle: (request: Request) => Promise<Response>;

beforeAll(() => {
  const nothing = () => {
    throw new Error("no sandboxes here");
  };
  const options: FrontOptions = {
    hostname: "127.0.0.1",
    port: 0,
    domains: [],
    apiKeys: ["key"],
    control: {
      handle: (request) => handle(request),
      hasPath: (path) => path.startsWith("/up") || path === "/small",
      streamsBody: (method, path) => method === "PUT" && path === "/up",
    },
    orchestrator: {
      access: nothing,
      accessToken: nothing,
      trafficToken: nothing,
      route: nothing,
      autoResume: nothing,
      get: nothing,
      list: () => [],
    },
    log,
  };
  front = startFront(options);
  strict = startFront({ ...options, limits: { bodyIdleMs: 1000, lingerMs: 300 } });
});
afterAll(() => Promise.all([front.stop(100), strict.stop(100)]));

const url = (path: string): string => `http://127.0.0.1:${front.port}${path}`;

async function digest(request: Request): Promise<Response> {
  const hasher = new Bun.CryptoHasher("sha256");
  let size = 0;
  for await (const chunk of request.body ?? []) {
    hasher.update(chunk);
    size += chunk.length;
  }
  return Response.json({ size, sha256: hasher.digest("hex") });
}

function open(at = front): Promise<Socket> {
  return new Promise((resolve, reject) => {
    const socket = connect(at.port, "127.0.0.1", () => resolve(socket));
    socket.on("error", reject);
  });
}

async function readAll(socket: Socket): Promise<string> {
  let text = "";
  for await (const chunk of socket) text += (chunk as Buffer).toString();
  return text;
}

test("bodies beyond the limit of collected ones arrive whole, with a length and in chunks; connections go on", async () => {
  handle = digest;
  const body = crypto.getRandomValues(new Uint8Array(65536));
  const large = Buffer.concat(Array.from({ length: 320 }, () => body));
  const sha256 = new Bun.CryptoHasher("sha256").update(large).digest("hex");
  const put = await fetch(url("/up"), { method: "PUT", body: large });
  expect(await put.json()).toEqual({ size: large.length, sha256 });
  const chunked = new ReadableStream<Uint8Array>({
    start(controller) {
      for (let at = 0; at < large.length; at += 100_001) controller.enqueue(large.subarray(at, at + 100_001));
      controller.close();
    },
  });
  const reply = await fetch(url("/up"), { method: "PUT", body: chunked });
  expect(await reply.json()).toEqual({ size: large.length, sha256 });
  expect((await fetch(url("/up?x=1"), { method: "PUT", body: "" })).status).toBe(200);
  // Other methods and paths keep their limit.
  const headers = { "x-api-key": "key" };
  expect((await fetch(url("/small"), { method: "PUT", body: large, headers })).status).toBe(413);
  // Who has no key is not even listened to that long.
  expect((await fetch(url("/small"), { method: "PUT", body: large })).status).toBe(401);
  const socket = await open();
  socket.write(
    "PUT /up HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabcPUT /up HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\nde",
  );
  const answers = await readAll(socket);
  expect(answers.match(/"size":\d/g)).toEqual(['"size":3', '"size":2']);
});

test("a reader that does not read stops the client, and a client that waits for it is not cut", async () => {
  const go = Promise.withResolvers<void>();
  handle = async (request) => {
    await go.promise;
    return digest(request);
  };
  const socket = await open(strict);
  const total = 64 * MIB;
  socket.write(`PUT /up HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: ${total}\r\n\r\n`);
  let sent = 0;
  const piece = Buffer.alloc(256 * 1024);
  const pump = (): void => {
    while (sent < total && socket.write(piece)) sent += piece.length;
    if (sent < total) sent += piece.length;
  };
  socket.on("drain", pump);
  pump();
  // Longer than a client may be silent.
  await Bun.sleep(1600);
  expect(sent).toBeLessThan(24 * MIB);
  go.resolve();
  expect(await readAll(socket)).toContain(`"size":${total}`);
});

test("an answer before the end of the body reaches the client, which is not believed to send a next request", async () => {
  handle = async () => new Response("no", { status: 403 });
  const socket = await open();
  socket.write("PUT /up HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nPUT /up HTTP/1.1\r\n\r\n");
  const text = await readAll(socket);
  expect(text).toStartWith("HTTP/1.1 403");
  expect(text.match(/HTTP\/1\.1/g)).toHaveLength(1);
  expect(text.toLowerCase()).toContain("connection: close");
});

test.each([
  ["leaves", (socket: Socket) => socket.destroy()],
  ["ends its side", (socket: Socket) => socket.end()],
  ["falls silent", () => undefined],
])("a client that %s within the body: the handler is told", async (_, act) => {
  const begun = Promise.withResolvers<void>();
  const told = Promise.withResolvers<string>();
  handle = async (request) => {
    begun.resolve();
    try {
      return await digest(request);
    } catch (error) {
      told.resolve(String(error));
      throw error;
    }
  };
  const socket = await open(strict);
  socket.on("error", () => undefined);
  socket.write("PUT /up HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nbegin");
  await begun.promise;
  act(socket);
  expect(await told.promise).toContain("within the request body");
  socket.destroy();
});

test("a malformed chunk is refused once", async () => {
  handle = digest;
  const socket = await open();
  socket.write("PUT /up HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n");
  const text = await readAll(socket);
  expect(text).toStartWith("HTTP/1.1 400");
  expect(text.match(/HTTP\/1\.1 /g)).toHaveLength(1);
});

test("100-continue is answered before the body is sent", async () => {
  handle = digest;
  const socket = await open();
  const interim = new Promise<string>((resolve) => {
    socket.once("data", (chunk) => resolve(chunk.toString()));
  });
  socket.write(
    "PUT /up HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n",
  );
  expect(await interim).toBe("HTTP/1.1 100 Continue\r\n\r\n");
  const answer = readAll(socket);
  socket.write("ok");
  expect(await answer).toStartWith("HTTP/1.1 200");
});
