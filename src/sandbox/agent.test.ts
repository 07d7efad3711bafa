import { afterAll, afterEach, beforeAll, beforeEach, expect, test } from "bun:test";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { eventually } from "../../tests/support/eventually.ts";
import { type FakeAgent, startFakeAgent } from "../../tests/support/fake-agent.ts";
import { createFrameParser, monotonicTimestamp, parseAgentAddress, waitHealthy } from "./agent.ts";
import { createAgentClient } from "./index.ts";
import type { AgentClient } from "./types.ts";

let base: string;
let agent: FakeAgent;
let client: AgentClient;

beforeAll(() => {
  base = mkdtempSync("/tmp/orch-agent-");
});
afterAll(() => rmSync(base, { recursive: true, force: true }));
beforeEach(() => {
  agent = startFakeAgent(base);
  client = createAgentClient(agent.address, "token");
});
afterEach(async () => agent[Symbol.asyncDispose]());

const bash = (script: string) => ({ cmd: "/bin/bash", args: ["-c", script] });

test("a command's output, exit code, environment, user and signal arrive", async () => {
  const seen: string[] = [];
  const outcome = await client.run({
    ...bash('echo "out $X"; echo err >&2; exit 7'),
    env: { X: "ö" },
    user: "app",
    cwd: "/srv",
    onStdout: (chunk) => seen.push(Buffer.from(chunk).toString()),
  });
  expect(outcome).toEqual({ exitCode: 7, stdout: "out ö\n", stderr: "err\n" });
  expect(seen.join("")).toBe("out ö\n");
  expect(agent.commands[0]).toMatchObject({ user: "app", cwd: "/srv", envs: { X: "ö" } });
  expect(await client.run(bash("kill -9 $$"))).toMatchObject({ exitCode: -1, signal: "killed" });
  expect(await client.run(bash("true"))).toEqual({ exitCode: 0, stdout: "", stderr: "" });
});

test("only the tail of much output is kept, all of it passes by", async () => {
  let bytes = 0;
  const outcome = await client.run({
    ...bash("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo the end"),
    onStdout: (chunk) => {
      bytes += chunk.length;
    },
  });
  expect(bytes).toBe(3_000_009);
  expect(outcome.stdout.length).toBe(256 << 10);
  expect(outcome.stdout).toEndWith("x\nthe end\n");
});

test("errors: deadline, a program that is not there, a dead agent", async () => {
  await expect(client.run({ ...bash("sleep 20"), timeoutMs: 50 })).rejects.toMatchObject({
    code: "command_timeout",
    status: 504,
  });
  await expect(client.run({ cmd: "no-such-program", args: [] })).rejects.toMatchObject({
    code: "agent_invalid_argument",
  });
  const running = client.run(bash("sleep 20"));
  await eventually("it runs", () => agent.commands.at(-1)?.args.includes("sleep 20"));
  await agent[Symbol.asyncDispose]();
  await expect(running).rejects.toMatchObject({ code: "agent_unreachable" });
  await expect(client.run(bash("true"))).rejects.toMatchObject({ code: "agent_unreachable", status: 502 });
  await expect(client.init({ sandboxId: "s", templateId: "t", envVars: {} }, "life")).rejects.toMatchObject({
    code: "agent_unreachable",
  });
});

test("a detached command is there when the call returns, and its end can be waited for", async () => {
  const { pid, exited } = await client.startDetached(bash("sleep 0.1; echo late; exit 3"));
  expect(pid).toBeGreaterThan(1);
  expect(await exited).toEqual({ exitCode: 3, stdout: "late\n", stderr: "" });
});

test("files and directories", async () => {
  mkdirSync(join(base, "etc"), { recursive: true });
  writeFileSync(join(base, "etc/passwd"), "root:x:0:0");
  expect(Buffer.from((await client.readFile("/etc/passwd"))!).toString()).toBe("root:x:0:0");
  expect(await client.readFile("/etc/shadow")).toBeUndefined();
  await expect(client.readFile("/etc/passwd", 4)).rejects.toThrow("larger than 4 bytes");
  await client.makeDir("/a/b/c");
  await client.makeDir("/a/b/c");
  expect(await client.exists("/a/b/c")).toBeTrue();
  expect(await client.exists("/a/x")).toBeFalse();
});

test("init tells the guest who it is, with fresh entropy, its life and a newer time", async () => {
  const identity = {
    sandboxId: "s1",
    templateId: "t1",
    accessToken: "secret",
    envVars: { A: "1" },
    defaultUser: "app",
    defaultWorkdir: "/srv",
  };
  expect(await client.init(identity, "life")).toBe("0.5.15");
  await client.init(identity, "life");
  const [first, second] = agent.inits as [Record<string, string>, Record<string, string>];
  expect(first).toMatchObject({
    sandboxID: "s1",
    templateID: "t1",
    accessToken: "secret",
    envVars: { A: "1" },
    defaultUser: "app",
    defaultWorkdir: "/srv",
  });
  expect(Buffer.from(first.entropy!, "base64")).toHaveLength(64);
  expect(first.entropy).not.toBe(second.entropy!);
  expect([first.lifecycleID, second.lifecycleID]).toEqual(["life", "life"]);
  expect(first.timestamp! < second.timestamp!).toBeTrue();
  expect(Math.abs(Date.parse(first.timestamp!) - Date.now())).toBeLessThan(60_000);
});

test("times grow strictly, however fast they are asked for", () => {
  const times = Array.from({ length: 1000 }, monotonicTimestamp);
  expect(times.every((time, i) => i === 0 || times[i - 1]! < time)).toBeTrue();
  expect(times[0]).toMatch(/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$/);
});

test("readiness: waits through refusals, gives up in time, ends at once when the VM dies", async () => {
  agent.refuseHealth = 5;
  await client.waitHealthy(20_000);
  expect(agent.refuseHealth).toBe(0);
  const nobody = { host: "127.0.0.1", port: 1 };
  await expect(waitHealthy(nobody, 100, 5)).rejects.toMatchObject({ code: "agent_not_ready", status: 504 });
  // Longer than a test may take.
  await expect(waitHealthy(nobody, 600_000, 5, AbortSignal.timeout(50))).rejects.toThrow();
});

test("a guest that accepts and says nothing does not hold up the answer of a later probe", async () => {
  let connections = 0;
  const listener = Bun.listen({
    hostname: "127.0.0.1",
    port: 0,
    socket: {
      open: () => {
        connections += 1;
      },
      data: (socket) => {
        if (connections > 2) socket.end("HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n");
      },
    },
  });
  await waitHealthy({ host: "127.0.0.1", port: listener.port }, 20_000, 3);
  // The first ones are still open: nobody waited for them.
  expect(connections).toBeGreaterThan(2);
  listener.stop(true);
});

test("envelopes are read however the stream is cut; an absurd length is refused", () => {
  const one = Buffer.from([0, 0, 0, 0, 2, 123, 125]);
  const stream = Buffer.concat([one, Buffer.from([2, 0, 0, 0, 0]), one]);
  for (let size = 1; size <= stream.length; size++) {
    const parse = createFrameParser();
    const frames = [];
    for (let at = 0; at < stream.length; at += size) frames.push(...parse(stream.subarray(at, at + size)));
    expect(frames.map((frame) => [frame.flags, frame.payload.toString()])).toEqual([
      [0, "{}"],
      [2, ""],
      [0, "{}"],
    ]);
  }
  expect(() => createFrameParser()(Buffer.from([0, 255, 255, 255, 255]))).toThrow("over the limit");
});

test("addresses with and without a port", () => {
  expect(parseAgentAddress("10.1.2.3")).toEqual({ host: "10.1.2.3", port: 49983 });
  expect(parseAgentAddress("10.1.2.3:80")).toEqual({ host: "10.1.2.3", port: 80 });
});
