import { expect, test } from "bun:test";
import { connect, createServer, type Server, type Socket } from "node:net";
import { eventually, startAgent } from "./harness.ts";

const notRoot = process.getuid?.() !== 0;
if (notRoot) console.warn("skipped, needs root: who may call /init without a token");

// 127.0.0.5 stands for the address of the machine, 127.0.0.1 for its loopback.
const OUTER = "127.0.0.5";

async function listen(server: Server, host: string): Promise<number> {
  await new Promise<void>((done, failed) => {
    server.once("error", failed);
    server.listen(0, host, done);
  });
  return (server.address() as { port: number }).port;
}

const reach = async (port: number, path = "/") =>
  await fetch(`http://${OUTER}:${port}${path}`, { headers: { connection: "close" } }).then(
    async (r) => await r.text(),
    () => undefined,
  );

test("services on loopback become reachable under the outer address, and stop being so", async () => {
  await using agent = await startAgent(["--expose", OUTER]);
  const payload = Buffer.alloc(4 << 20, "ab");
  for (const [host, name] of [
    ["127.0.0.1", "four"],
    ["::1", "six"],
  ] as const) {
    using server = Bun.serve({
      hostname: host,
      port: 0,
      fetch: async (r) => (r.method === "POST" ? new Response(await r.arrayBuffer()) : new Response(name)),
    });
    const port = server.port ?? 0;
    expect(await reach(port)).toBeUndefined();
    await eventually(`${name} reachable`, async () => (await reach(port)) === name);
    const echo = await fetch(`http://${OUTER}:${port}/`, { method: "POST", body: payload });
    expect(Buffer.from(await echo.arrayBuffer()).equals(payload)).toBe(true);
    await server.stop(true);
    await eventually(`${name} gone`, async () => (await reach(port)) === undefined);
  }
  expect(await agent.errors()).toBe("");
});

test("half-close passes through, and a service that listens everywhere is left alone", async () => {
  await using agent = await startAgent(["--expose", OUTER]);
  const sockets: Socket[] = [];
  const server = createServer({ allowHalfOpen: true }, (s) => {
    sockets.push(s);
    let text = "";
    s.on("data", (d) => {
      text += d;
    });
    s.on("end", () => s.end(`got ${text.length}`));
  });
  const everywhere = createServer((s) => s.end("direct"));
  try {
    const port = await listen(server, "127.0.0.1");
    const open = await listen(everywhere, "0.0.0.0");
    await eventually("exposed", async () =>
      (await Bun.$`ss -Hltn src ${OUTER}:${port}`.text()).includes(OUTER),
    );
    expect(await Bun.$`ss -Hltn src ${OUTER}:${open}`.text()).not.toContain(`${OUTER}:${open}`);
    const answer = await new Promise<string>((done, failed) => {
      let text = "";
      const s = connect({ port, host: OUTER, allowHalfOpen: true }, () => s.end("hello"));
      s.on("data", (d) => {
        text += d;
      });
      s.on("close", () => done(text));
      s.on("error", failed);
    });
    expect(answer).toBe("got 5");
  } finally {
    for (const s of sockets) s.destroy();
    server.close();
    everywhere.close();
  }
  expect(await agent.errors()).toBe("");
});

test.skipIf(notRoot)(
  "/init: the outside needs no token, the inside does",
  async () => {
    const ns = `guest-${process.pid}`;
    const net = `198.18.${process.pid % 250}`; // apart from what a run that was killed may have left
    const [host, guest] = [`gh${process.pid % 100000}`, `gg${process.pid % 100000}`];
    const setup = [
      `netns add ${ns}`,
      `link add ${host} type veth peer name ${guest} netns ${ns}`,
      `addr add ${net}.1/30 dev ${host}`,
      `link set ${host} up`,
      `-n ${ns} addr add ${net}.2/30 dev ${guest}`,
      `-n ${ns} link set ${guest} up`,
      `-n ${ns} link set lo up`,
    ];
    for (const words of setup) await Bun.$`ip ${words.split(" ")}`.quiet();
    try {
      await using agent = await startAgent(["--addr", "0.0.0.0", "--trust-if", guest], () => [
        "ip",
        "netns",
        "exec",
        ns,
      ]);
      const url = `http://${net}.2:${agent.port}/init`;
      const outside = async (body: object) =>
        (await fetch(url, { method: "POST", body: JSON.stringify(body) })).status;
      const inside = async (address: string, source: string, body: object) =>
        Number(
          await Bun.$`ip netns exec ${ns} curl -s -o /dev/null -w %{http_code} --interface ${source} -d ${JSON.stringify(body)} http://${address}:${agent.port}/init`.text(),
        );
      await eventually("reachable", async () => await outside({ accessToken: "one" }).catch(() => 0));
      expect(await outside({ accessToken: "two" })).toBe(204);
      expect(await outside({ accessToken: "three" })).toBe(204);
      expect(await inside("127.0.0.1", "127.0.0.1", { accessToken: "x" })).toBe(401);
      expect(await inside(`${net}.2`, `${net}.2`, { accessToken: "x" })).toBe(401);
      expect(await inside(`${net}.2`, "127.0.0.1", { accessToken: "x" })).toBe(401);
      expect(await inside("127.0.0.1", "127.0.0.1", { accessToken: "three" })).toBe(204);
    } finally {
      await Bun.$`ip link del ${host}`.quiet().nothrow();
      await Bun.$`ip netns del ${ns}`.quiet().nothrow();
    }
  },
  120_000,
);
