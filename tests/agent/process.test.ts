import { afterAll, beforeAll, expect, test } from "bun:test";
import { chmodSync, copyFileSync, mkdtempSync, rmSync } from "node:fs";
import protobuf from "protobufjs";
import {
  type Agent,
  basic,
  call,
  collect,
  eventually,
  frame,
  frames,
  openFiles,
  openStream,
  rssKiB,
  run,
  sh,
  startAgent,
} from "./harness.ts";

let agent: Agent;
beforeAll(async () => {
  agent = await startAgent();
});
afterAll(async () => await agent[Symbol.asyncDispose]());

const P = "process.Process";

test("output, error output and exit code", async () => {
  const r = await sh(agent, "echo out; echo err >&2; exit 3");
  expect(r.pid).toBeGreaterThan(1);
  expect([r.stdout, r.stderr]).toEqual(["out\n", "err\n"]);
  expect(r.end).toEqual({ exitCode: 3, exited: true, status: "exit status 3", error: "exit status 3" });
  expect(r.error).toBeUndefined();
});

test("exit code 0 is left out, as proto3 JSON does", async () => {
  expect((await sh(agent, "true")).end).toEqual({ exited: true, status: "exit status 0" });
});

test("ends by signal", async () => {
  expect((await sh(agent, "kill -9 $$")).end).toEqual({
    exitCode: -1,
    status: "signal: killed",
    error: "signal: killed",
  });
  expect((await sh(agent, "kill -15 $$")).end?.status).toBe("signal: terminated");
  expect((await sh(agent, "ulimit -c 0; kill -SEGV $$")).end?.status).toStartWith(
    "signal: segmentation fault",
  );
});

test("a command that cannot be run ends like in a shell", async () => {
  const missing = await run(agent, { process: { cmd: "no-such-command" } });
  expect(missing.end?.exitCode).toBe(127);
  expect(missing.stderr).toBe("no-such-command: command not found\n");
  const denied = await run(agent, { process: { cmd: "/etc/passwd" } });
  expect(denied.end?.exitCode).toBe(126);
  expect(denied.stderr).toContain("Permission denied");
});

test("FR-63: images without bash, without any shell, without a program's loader", async () => {
  const from = mkdtempSync("/tmp/guest-agent-bin-");
  try {
    // All programs of this machine are hidden from the agent.
    const hidden = () => ["unshare", "--mount", "sh", "-c", `mount --bind ${from} /bin && exec "$@"`, "sh"];
    const echo = { process: { cmd: "/bin/bash", args: ["-l", "-c", 'echo "$0" "$@"', "name", "a b"] } };
    {
      await using bare = await startAgent([], hidden);
      for (const cmd of ["/bin/bash", "/bin/sh", "sh"]) {
        const none = await run(bare, { process: { ...echo.process, cmd } });
        expect(none).toMatchObject({ end: { exitCode: 127 }, stderr: `${cmd}: no shell in image\n` });
      }
      const other = await run(bare, { process: { cmd: "/bin/other" } });
      expect(other).toMatchObject({ end: { exitCode: 127 }, stderr: "/bin/other: command not found\n" });
      await Bun.write(`${from}/script`, "#!/bin/no-such-interpreter\n");
      chmodSync(`${from}/script`, 0o755);
      const script = await run(bare, { process: { cmd: "/bin/script" } });
      expect(script.end?.exitCode).toBe(127);
      expect(script.stderr).toBe("/bin/script: its interpreter or loader is not in the image\n");
      // A shell that is there and cannot run, e.g. for want of its loader, is told of as what it is.
      await Bun.write(`${from}/sh`, "#!/bin/no-such-interpreter\n");
      chmodSync(`${from}/sh`, 0o755);
      const shell = await run(bare, echo);
      expect(shell.end?.exitCode).toBe(127);
      expect(shell.stderr).toBe("/bin/sh: its interpreter or loader is not in the image\n");
      chmodSync(`${from}/sh`, 0o644);
      const denied = await run(bare, echo);
      expect(denied.end?.exitCode).toBe(126);
      expect(denied.stderr).toBe("/bin/sh: Permission denied\n");
    }
    copyFileSync(Bun.which("busybox")!, `${from}/sh`);
    await using small = await startAgent([], hidden);
    expect((await run(small, echo)).stdout).toBe("name a b\n");
    const bash = await run(small, { process: { cmd: "bash" } });
    expect(bash).toMatchObject({ end: { exitCode: 127 }, stderr: "bash: command not found\n" });
  } finally {
    rmSync(from, { recursive: true });
  }
});

test("a script without #! line is run by /bin/sh", async () => {
  const path = `${agent.dir}/plain`;
  await Bun.write(path, 'echo "got $1"\n');
  await Bun.$`chmod 755 ${path}`;
  expect((await run(agent, { process: { cmd: path, args: ["x y"] } })).stdout).toBe("got x y\n");
});

test("environment is only what the protocol names; PATH of the request finds the command", async () => {
  const r = await run(agent, { process: { cmd: "env", envs: { MINE: "a=b", HOME: "/elsewhere" } } });
  const env = Object.fromEntries(
    r.stdout
      .trim()
      .split("\n")
      .map((l) => [l.slice(0, l.indexOf("=")), l.slice(l.indexOf("=") + 1)]),
  );
  expect(env).toEqual({
    PATH: "/usr/local/bin:/usr/bin:/bin",
    HOME: "/elsewhere",
    USER: "root",
    LOGNAME: "root",
    E2B_SANDBOX: "true",
    MINE: "a=b",
  });
  expect((await run(agent, { process: { cmd: "env", envs: { PATH: "/nowhere" } } })).end?.exitCode).toBe(127);
});

test("user, groups, home and out-of-memory score", async () => {
  const r = await sh(
    agent,
    "id -u; id -g; id -G; pwd; cat /proc/self/oom_score_adj; ulimit -n",
    {},
    basic("user"),
  );
  const [uid, gid, groups, cwd, oom] = r.stdout.split("\n");
  expect([uid, gid, groups, cwd, oom]).toEqual([
    "54321",
    "54321",
    "54321 54400 54401",
    `${agent.dir}/home/user`,
    "100",
  ]);
  const unknown = await sh(agent, "true", {}, basic("nobody-here"));
  expect(unknown.error).toEqual({ code: "unauthenticated", message: "invalid username: 'nobody-here'" });
  const unary = await call(agent, `${P}/List`, {}, basic("nobody-here"));
  expect([unary.status, unary.body.code]).toEqual([401, "unauthenticated"]);
});

test("working directory: relative to the home, ~ of the own user, missing", async () => {
  await Bun.$`mkdir -p ${agent.dir}/home/user/sub`;
  const at = async (cwd: string) =>
    await run(agent, { process: { cmd: "pwd", cwd }, stdin: false }, basic("user"));
  expect((await at("sub")).stdout).toBe(`${agent.dir}/home/user/sub\n`);
  expect((await at("~/sub")).stdout).toBe(`${agent.dir}/home/user/sub\n`);
  expect((await at("/tmp")).stdout).toBe("/tmp\n");
  expect((await at("/nope")).error).toEqual({
    code: "invalid_argument",
    message: "cwd '/nope' does not exist",
  });
  expect((await at("/etc/passwd")).error?.message).toContain("is not a directory");
  expect((await at("~root")).error?.code).toBe("invalid_argument");
});

test("standard input: closed, fed, ended", async () => {
  expect((await run(agent, { process: { cmd: "cat" }, stdin: false })).end?.exited).toBe(true);
  const response = await openStream(agent, `${P}/Start`, { process: { cmd: "cat" }, tag: "fed" });
  const reading = collect(response);
  await eventually("start", async () =>
    JSON.stringify((await call(agent, `${P}/List`, {})).body).includes("fed"),
  );
  const process = { tag: "fed" };
  const send = async (input: Record<string, string>) =>
    await call(agent, `${P}/SendInput`, { process, input });
  expect((await send({ stdin: btoa("one ") })).status).toBe(200);
  const big = Buffer.alloc(1 << 20, "x");
  expect((await send({ stdin: big.toString("base64") })).status).toBe(200);
  expect((await send({ pty: btoa("x") })).body.code).toBe("internal");
  expect((await send({})).body.code).toBe("unimplemented");
  expect((await call(agent, `${P}/CloseStdin`, { process })).status).toBe(200);
  const r = await reading;
  expect(r.stdout.length).toBe(4 + big.length);
  expect(r.end?.exited).toBe(true);
  expect((await send({ stdin: btoa("x") })).body.code).toBe("not_found");
});

test("input that was never open, or is closed already", async () => {
  for (const [tag, stdin] of [
    ["shut", false],
    ["open", true],
  ] as const) {
    const body = { process: { cmd: "sleep", args: ["20"] }, tag, stdin };
    const reading = collect(await openStream(agent, `${P}/Start`, body));
    const process = { tag };
    await eventually("start", async () =>
      JSON.stringify((await call(agent, `${P}/List`, {})).body).includes(tag),
    );
    for (let i = 0; i < 2; i++) expect((await call(agent, `${P}/CloseStdin`, { process })).status).toBe(200);
    const late = await call(agent, `${P}/SendInput`, { process, input: { stdin: btoa("x") } });
    expect([late.status, late.body.code]).toEqual([500, "internal"]);
    expect(
      (await call(agent, `${P}/Update`, { process, pty: { size: { cols: 80, rows: 24 } } })).body.code,
    ).toBe("internal");
    await call(agent, `${P}/SendSignal`, { process, signal: "SIGNAL_SIGKILL" });
    expect((await reading).end?.status).toBe("signal: killed");
  }
});

test("StreamInput: frames over any chunks, then half-close", async () => {
  const reading = collect(
    await openStream(agent, `${P}/Start`, { process: { cmd: "cat" }, tag: "streamed" }),
  );
  await eventually("start", async () =>
    JSON.stringify((await call(agent, `${P}/List`, {})).body).includes("streamed"),
  );
  const text = (n: number) => Buffer.alloc(300_000, 97 + n).toString("base64");
  const all = Buffer.concat([
    frame(JSON.stringify({ start: { process: { tag: "streamed" } } })),
    frame(JSON.stringify({ keepalive: {} })),
    ...[0, 1, 2, 3].map((n) => frame(JSON.stringify({ data: { input: { stdin: text(n) } } }))),
  ]);
  const body = new ReadableStream({
    start(controller) {
      for (let at = 0; at < all.length; at += 70_001) controller.enqueue(all.subarray(at, at + 70_001));
      controller.close();
    },
  });
  const response = await fetch(`${agent.url}/${P}/StreamInput`, {
    method: "POST",
    headers: { "content-type": "application/connect+json" },
    body,
  });
  const got = [];
  for await (const f of frames(response)) got.push(f);
  expect(got).toEqual([{}, { end: true }]);
  await call(agent, `${P}/CloseStdin`, { process: { tag: "streamed" } });
  expect((await reading).stdout.length).toBe(1_200_000);

  const bad = await fetch(`${agent.url}/${P}/StreamInput`, {
    method: "POST",
    headers: { "content-type": "application/connect+json" },
    body: frame(JSON.stringify({ data: { input: { stdin: "" } } })),
  });
  for await (const f of frames(bad)) expect(f.error?.code).toBe("invalid_argument");
});

test("a process that stops reading does not let SendInput finish, and its end answers it", async () => {
  const reading = collect(
    await openStream(agent, `${P}/Start`, { process: { cmd: "sleep", args: ["60"] }, tag: "deaf" }),
  );
  await eventually("start", async () =>
    JSON.stringify((await call(agent, `${P}/List`, {})).body).includes("deaf"),
  );
  const process = { tag: "deaf" };
  const pending = call(agent, `${P}/SendInput`, {
    process,
    input: { stdin: Buffer.alloc(1 << 20).toString("base64") },
  });
  expect(await Promise.race([pending, Bun.sleep(150)])).toBeUndefined();
  await call(agent, `${P}/SendSignal`, { process, signal: "SIGNAL_SIGKILL" });
  expect((await pending).body.code).toBe("internal");
  expect((await reading).end?.status).toBe("signal: killed");
});

test("terminal: size, resize, input, end of file", async () => {
  const response = await openStream(agent, `${P}/Start`, {
    process: { cmd: "/bin/sh", args: ["-c", "stty size; tty; read x; stty size; echo got $x; cat"] },
    pty: { size: { cols: 132, rows: 43 } },
    tag: "term",
  });
  let seen = "";
  const reading = collect(response, (f) => {
    seen += Buffer.from(f.event?.data?.pty ?? "", "base64").toString();
  });
  await eventually("first output", () => seen.includes("/dev/pts/"));
  const process = { tag: "term" };
  expect((await call(agent, `${P}/Update`, { process, pty: { size: { cols: 200, rows: 50 } } })).status).toBe(
    200,
  );
  expect((await call(agent, `${P}/Update`, { process, pty: { size: { cols: 0, rows: 0 } } })).status).toBe(
    400,
  );
  expect(
    (await call(agent, `${P}/Update`, { process, pty: { size: { cols: 70000, rows: 1 } } })).status,
  ).toBe(400);
  expect((await call(agent, `${P}/CloseStdin`, { process })).body.code).toBe("unknown");
  await call(agent, `${P}/SendInput`, { process, input: { pty: btoa("hello\n") } });
  await call(agent, `${P}/SendInput`, { process, input: { pty: btoa("\x04") } });
  const r = await reading;
  expect(r.pty).toContain("43 132\r\n");
  expect(r.pty).toContain("/dev/pts/");
  expect(r.pty).toContain("50 200\r\ngot hello\r\n");
  expect(r.stdout).toBe("");
  expect(r.end?.exited).toBe(true);
});

test("terminal belongs to the user and is the controlling one", async () => {
  const r = await run(
    agent,
    {
      process: {
        cmd: "/bin/sh",
        args: ["-c", "echo to-tty >/dev/tty; stat -c %u:%g:%a $(tty); echo x >$(tty)"],
      },
      pty: {},
    },
    basic("user"),
  );
  expect(r.pty).toBe("to-tty\r\n54321:5:620\r\nx\r\n");
});

test("SendSignal: only TERM and KILL; the end follows the process, not a pipe a grandchild holds", async () => {
  let holder = 0;
  const reading = collect(
    await openStream(agent, `${P}/Start`, {
      process: { cmd: "/bin/sh", args: ["-c", "sleep 300 & echo $!; wait"] },
      tag: "sig",
    }),
    (f) => {
      holder ||= Number(Buffer.from(f.event?.data?.stdout ?? "", "base64").toString());
    },
  );
  await eventually("start", () => holder > 0);
  const process = { tag: "sig" };
  expect((await call(agent, `${P}/SendSignal`, { process, signal: "SIGNAL_UNSPECIFIED" })).status).toBe(501);
  expect((await call(agent, `${P}/SendSignal`, { process, signal: 15 })).status).toBe(200);
  const r = await reading;
  expect(r.end).toEqual({ exitCode: -1, status: "signal: terminated", error: "signal: terminated" });
  globalThis.process.kill(holder, "SIGKILL"); // still there
  expect((await call(agent, `${P}/SendSignal`, { process, signal: "SIGNAL_SIGTERM" })).status).toBe(404);
});

test("without a signal the end waits for the last holder of the output", async () => {
  const started = Date.now();
  const r = await sh(agent, "(sleep 0.4; echo late) & echo early");
  expect(r.stdout).toBe("early\nlate\n");
  expect(Date.now() - started).toBeGreaterThan(350);
});

test("Connect-Timeout-Ms limits the life of the process", async () => {
  const r = await sh(agent, "echo on; exec sleep 300", { tag: "limited" }, { "connect-timeout-ms": "1500" });
  expect(r.stdout).toBe("on\n");
  expect(r.error?.code).toBe("deadline_exceeded");
  expect(r.end).toBeUndefined();
  await eventually(
    "killed",
    async () => !JSON.stringify((await call(agent, `${P}/List`, {})).body).includes("limited"),
  );
  for (const bad of ["12345678901", "-1", "1s", ""])
    expect((await sh(agent, "true", {}, { "connect-timeout-ms": bad })).error?.code ?? "ok").toBe(
      "invalid_argument",
    );
});

test("the limit holds when the client has gone", async () => {
  const stop = new AbortController();
  const body = { process: { cmd: "sleep", args: ["30"] }, tag: "left" };
  const response = await openStream(agent, `${P}/Start`, body, { "connect-timeout-ms": "3000" }, stop.signal);
  for await (const f of frames(response)) if (f.event?.start) break;
  stop.abort();
  await Bun.sleep(100);
  expect(JSON.stringify((await call(agent, `${P}/List`, {})).body)).toContain("left");
  await eventually(
    "killed",
    async () => !JSON.stringify((await call(agent, `${P}/List`, {})).body).includes("left"),
  );
});

test("Connect: live output, late comers, unknown", async () => {
  const stop = new AbortController();
  const script = "echo one; read x; echo two; read x; exit 5";
  const body = { process: { cmd: "/bin/sh", args: ["-c", script] }, tag: "joined" };
  const first = await openStream(agent, `${P}/Start`, body, {}, stop.signal);
  for await (const f of frames(first)) if (f.event?.data) break;
  stop.abort(); // leaves the process alone
  const second = collect(await openStream(agent, `${P}/Connect`, { process: { tag: "joined" } }));
  const brief = await collect(
    await openStream(agent, `${P}/Connect`, { process: { tag: "joined" } }, { "connect-timeout-ms": "100" }),
  );
  expect(brief.error?.code).toBe("deadline_exceeded");
  const process = { tag: "joined" };
  await call(agent, `${P}/SendInput`, { process, input: { stdin: btoa("a\n") } });
  await call(agent, `${P}/SendInput`, { process, input: { stdin: btoa("b\n") } });
  const r = await second;
  expect([r.stdout, r.end?.exitCode]).toEqual(["two\n", 5]);
  const late = await collect(await openStream(agent, `${P}/Connect`, { process: { pid: r.pid } }));
  expect([late.pid, late.stdout, late.end?.exitCode]).toEqual([r.pid, "", 5]);
  const none = await collect(await openStream(agent, `${P}/Connect`, { process: { pid: 4_000_000 } }));
  expect(none.error?.code).toBe("not_found");
});

test("List shows the configuration as requested", async () => {
  const config = { cmd: "sleep", args: ["20"], envs: { A: "1" }, cwd: "/tmp" };
  const stop = new AbortController();
  const response = await openStream(agent, `${P}/Start`, { process: config, tag: "listed" }, {}, stop.signal);
  for await (const f of frames(response)) if (f.event?.start) break;
  const { body } = await call(agent, `${P}/List`, {});
  const list = body.processes as { tag?: string; pid: number; config: object }[];
  const mine = list.find((p) => p.tag === "listed");
  expect(mine?.config).toEqual(config);
  await call(agent, `${P}/SendSignal`, { process: { pid: mine?.pid ?? 0 }, signal: "SIGNAL_SIGKILL" });
  stop.abort();
});

test("keepalive in a silent stream", async () => {
  const headers = { "keepalive-ping-interval": "1" };
  const response = await openStream(
    agent,
    `${P}/Start`,
    { process: { cmd: "sleep", args: ["1.4"] } },
    headers,
  );
  const kinds = [];
  for await (const f of frames(response)) kinds.push(Object.keys(f.event ?? f)[0]);
  expect(kinds).toEqual(["start", "keepalive", "end", "end"]);
});

test("binary protobuf", async () => {
  const { root } = protobuf.parse(
    `syntax = "proto3"; message Config { string cmd = 1; repeated string args = 2; map<string,string> envs = 3; optional string cwd = 4; }
     message StartRequest { Config process = 1; optional string tag = 3; optional bool stdin = 4; }
     message Start { uint32 pid = 1; } message Data { oneof o { bytes stdout = 1; bytes stderr = 2; bytes pty = 3; } }
     message End { sint32 exit_code = 1; bool exited = 2; string status = 3; optional string error = 4; } message Keep {}
     message Event { oneof e { Start start = 1; Data data = 2; End end = 3; Keep keepalive = 4; } }
     message StartResponse { Event event = 1; } message Info { Config config = 1; uint32 pid = 2; optional string tag = 3; }
     message ListResponse { repeated Info processes = 1; }`,
    { keepCase: true },
  );
  const request = root.lookupType("StartRequest");
  const body = request.encode(
    request.create({
      process: { cmd: "/bin/sh", args: ["-c", 'printf "$V"; kill -9 $$'], envs: { V: "äöü" } },
      stdin: false,
      tag: "pb",
    }),
  );
  const response = await fetch(`${agent.url}/${P}/Start`, {
    method: "POST",
    headers: { "content-type": "application/connect+proto" },
    body: frame(body.finish()),
  });
  expect(response.headers.get("content-type")).toBe("application/connect+proto");
  const bytes = new Uint8Array(await response.arrayBuffer());
  const events: Record<string, unknown>[] = [];
  for (let at = 0; at < bytes.length; ) {
    const length = new DataView(bytes.buffer).getUint32(at + 1);
    const part = bytes.subarray(at + 5, at + 5 + length);
    if (bytes[at] === 2) expect(Buffer.from(part).toString()).toBe("{}");
    else events.push(root.lookupType("StartResponse").decode(part).toJSON().event as Record<string, unknown>);
    at += 5 + length;
  }
  expect(events[1]).toEqual({ data: { stdout: Buffer.from("äöü").toString("base64") } });
  expect(events[2]).toEqual({ end: { exit_code: -1, status: "signal: killed", error: "signal: killed" } });
  const list = await fetch(`${agent.url}/${P}/List`, {
    method: "POST",
    headers: { "content-type": "application/proto" },
    body: new Uint8Array(0),
  });
  expect(
    root
      .lookupType("ListResponse")
      .decode(new Uint8Array(await list.arrayBuffer()))
      .toJSON(),
  ).toBeDefined();
});

test("malformed requests", async () => {
  const post = async (path: string, type: string, body: Uint8Array<ArrayBuffer> | string) => {
    const r = await fetch(`${agent.url}/${path}`, {
      method: "POST",
      headers: { "content-type": type },
      body,
    });
    return { status: r.status, text: await r.text() };
  };
  const unary = `${P}/List`;
  expect((await post(unary, "application/json", "{")).status).toBe(400);
  expect((await post(unary, "application/json", "[]")).text).toContain("invalid_argument");
  expect(
    (await post(`${P}/SendSignal`, "application/json", '{"process":{"pid":1,"tag":"x"}}')).text,
  ).toContain("oneof");
  expect((await post(`${P}/SendSignal`, "application/json", '{"process":{"pid":-1}}')).status).toBe(400);
  expect((await post(unary, "application/proto", new Uint8Array([0xff]))).status).toBe(400);
  expect((await post(unary, "text/plain", "{}")).status).toBe(415);
  expect((await post(`${P}/Start`, "application/json", "{}")).status).toBe(415);
  expect((await fetch(`${agent.url}/${unary}`)).status).toBe(405);
  expect((await post(`${P}/Nope`, "application/json", "{}")).status).toBe(404);
  expect((await post(unary, "application/json", "[".repeat(100_000))).status).toBe(400);
  const stream = async (body: Uint8Array<ArrayBuffer>) =>
    (await post(`${P}/Start`, "application/connect+json", body)).text;
  const start = frame('{"process":{"cmd":"true"}}');
  expect(await stream(new Uint8Array(0))).toContain("invalid_argument");
  expect(await stream(start.subarray(0, 9))).toContain("unfinished frame");
  expect(await stream(Buffer.concat([start, start]))).toContain("unimplemented");
  expect(await stream(frame("{}", 1))).toContain("compressed");
  expect(await stream(frame("{}", 2))).toContain("invalid_argument");
  expect(await stream(frame("{}", 64))).toContain("invalid_argument");
  expect(await stream(new Uint8Array([0, 0xff, 0xff, 0xff, 0xff]))).toContain("resource_exhausted");
  expect(await stream(frame('{"process":{"cmd":"a\\u0000b"}}'))).toContain("NUL");
  expect(await stream(frame('{"process":{}}'))).toContain("invalid_argument");
  expect(await stream(frame('{"process":{"cmd":"env","envs":{"A=B":"1"}}}'))).toContain("invalid_argument");
  // snake_case, unknown fields and null are fine
  expect(await stream(frame('{"process":{"cmd":"true","new":[1]},"tag":null}'))).toContain("exit status 0");
});

test("a slow reader holds the process back and costs no memory", async () => {
  const before = rssKiB(agent);
  const total = 64 << 20;
  const response = await openStream(agent, `${P}/Start`, {
    process: { cmd: "/bin/sh", args: ["-c", `head -c ${total} /dev/zero; echo done >&2`] },
    tag: "slow",
  });
  if (!response.body) throw new Error("no body");
  const reader = response.body.getReader();
  await reader.read();
  await Bun.sleep(400);
  expect(JSON.stringify((await call(agent, `${P}/List`, {})).body)).toContain("slow"); // still writing
  expect(rssKiB(agent) - before).toBeLessThan(16 * 1024);
  await reader.cancel(); // dropped: the rest is read and discarded
  await eventually(
    "ended",
    async () => !JSON.stringify((await call(agent, `${P}/List`, {})).body).includes("slow"),
  );
  expect(rssKiB(agent) - before).toBeLessThan(16 * 1024);
});

test("nothing is lost on the way to a subscriber", async () => {
  const r = await sh(agent, "seq 1 400000");
  expect(r.stdout.length).toBe(2_688_895);
  expect(r.stdout.endsWith("399999\n400000\n")).toBe(true);
});

test("fifty processes at once, and no descriptor stays", async () => {
  const before = await eventually("quiet", () => openFiles(agent));
  const results = await Promise.all(
    Array.from({ length: 50 }, (_, i) => sh(agent, `sleep 0.2; echo ${i}; exit ${i}`)),
  );
  results.forEach((r, i) => {
    expect([r.stdout, r.end?.exitCode ?? 0]).toEqual([`${i}\n`, i]);
  });
  // kept client connections count; pipes of processes must not
  const pipes = async () => (await Bun.$`ls -l /proc/${agent.pid}/fd`.text()).split("pipe:").length - 1;
  await eventually("pipes closed", async () => (await pipes()) <= 4);
  expect(before).toBeGreaterThan(0);
});
