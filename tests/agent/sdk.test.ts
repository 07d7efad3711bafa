import { afterAll, beforeAll, expect, test } from "bun:test";
import {
  CommandExitError,
  FileNotFoundError,
  FileType,
  InvalidArgumentError,
  Sandbox,
  TimeoutError,
} from "e2b";
import { type Agent, eventually, startAgent } from "./harness.ts";

// The unmodified client library against the agent, without a machine around it.
let agent: Agent;
let sandbox: Sandbox;
beforeAll(async () => {
  agent = await startAgent();
  sandbox = await Sandbox.create({ debug: true, sandboxUrl: agent.url, apiKey: "e2b_0" });
});
afterAll(async () => await agent[Symbol.asyncDispose]());

test("commands: result, failure, callbacks, environment, directory, user", async () => {
  const r = await sandbox.commands.run("echo hello; echo oops >&2");
  expect([r.stdout, r.stderr, r.exitCode]).toEqual(["hello\n", "oops\n", 0]);
  const failure = await sandbox.commands.run("echo partial; exit 7").catch((e: unknown) => e);
  expect(failure).toBeInstanceOf(CommandExitError);
  expect([(failure as CommandExitError).exitCode, (failure as CommandExitError).stdout]).toEqual([
    7,
    "partial\n",
  ]);
  const lines: string[] = [];
  await sandbox.commands.run("echo $V; pwd; id -u", {
    envs: { V: "v" },
    cwd: "/tmp",
    user: "user",
    onStdout: (s) => {
      lines.push(s);
    },
  });
  expect(lines.join("")).toBe("v\n/tmp\n54321\n");
});

test("commands: timeout, background, stdin, list, kill, connect", async () => {
  expect(await sandbox.commands.run("sleep 20", { timeoutMs: 300 }).catch((e: unknown) => e)).toBeInstanceOf(
    TimeoutError,
  );
  const cat = await sandbox.commands.run("cat", { background: true, stdin: true });
  expect((await sandbox.commands.list()).map((p) => p.pid)).toContain(cat.pid);
  await sandbox.commands.sendStdin(cat.pid, "to cat\n");
  await sandbox.commands.closeStdin(cat.pid);
  expect((await cat.wait()).stdout).toBe("to cat\n");
  const sleep = await sandbox.commands.run("sleep 20", { background: true });
  const joined = await sandbox.commands.connect(sleep.pid);
  const outcome = joined.wait().catch((e: unknown) => e);
  expect(await sleep.kill()).toBe(true);
  expect(await outcome).toBeInstanceOf(CommandExitError);
  expect(await sandbox.commands.kill(sleep.pid)).toBe(false);
  await sleep.wait().catch((e: unknown) => expect(e).toBeInstanceOf(CommandExitError));
  expect(await sandbox.commands.run("true", { cwd: "/nope" }).catch((e: unknown) => e)).toBeInstanceOf(
    InvalidArgumentError,
  );
});

test("terminal", async () => {
  let text = "";
  const pty = await sandbox.pty.create({
    cols: 100,
    rows: 30,
    onData: (d) => {
      text += Buffer.from(d).toString();
    },
  });
  await sandbox.pty.sendInput(pty.pid, Buffer.from("stty size; echo $TERM\n"));
  await eventually("size", () => text.includes("30 100") && text.includes("xterm-256color"));
  await sandbox.pty.resize(pty.pid, { cols: 90, rows: 20 });
  await sandbox.pty.sendInput(pty.pid, Buffer.from("stty size; exit 0\n"));
  expect((await pty.wait()).exitCode).toBe(0);
  expect(text).toContain("20 90");
});

test("files: write, read, list, info, rename, remove", async () => {
  const dir = `${agent.dir}/sdk`;
  expect(await sandbox.files.makeDir(`${dir}/sub`)).toBe(true);
  expect(await sandbox.files.makeDir(`${dir}/sub`)).toBe(false);
  const info = await sandbox.files.write(`${dir}/a.txt`, "text");
  expect(info).toMatchObject({ name: "a.txt", path: `${dir}/a.txt`, type: FileType.FILE });
  const bytes = Uint8Array.from({ length: 100_000 }, (_, i) => i & 255);
  await sandbox.files.write([
    { path: `${dir}/b.bin`, data: bytes.buffer },
    { path: `${dir}/empty`, data: "" },
    { path: `${dir}/odd " # % ü`, data: "odd" },
  ]);
  expect(
    Buffer.from(await sandbox.files.read(`${dir}/b.bin`, { format: "bytes" })).equals(Buffer.from(bytes)),
  ).toBe(true);
  expect(await sandbox.files.read(`${dir}/odd " # % ü`)).toBe("odd");
  expect(await sandbox.files.read(`${dir}/empty`)).toBe("");
  expect(await sandbox.files.read(`${dir}/a.txt`, { gzip: true })).toBe("text");
  await sandbox.files.write(`${dir}/gz`, "zipped ".repeat(1000), { gzip: true });
  expect(await sandbox.files.read(`${dir}/gz`)).toBe("zipped ".repeat(1000));
  await sandbox.files.write(`${dir}/octet`, "raw", { useOctetStream: true });
  expect(await sandbox.files.read(`${dir}/octet`)).toBe("raw");
  expect((await sandbox.files.list(dir)).map((e) => e.name)).toEqual([
    "a.txt",
    "b.bin",
    "empty",
    "gz",
    "octet",
    'odd " # % ü',
    "sub",
  ]);
  expect(await sandbox.files.exists(`${dir}/none`)).toBe(false);
  expect(await sandbox.files.getInfo(`${dir}/b.bin`)).toMatchObject({
    size: 100_000,
    owner: "root",
    permissions: "-rw-r--r--",
  });
  expect((await sandbox.files.rename(`${dir}/a.txt`, `${dir}/c.txt`)).path).toBe(`${dir}/c.txt`);
  await sandbox.files.remove(`${dir}/c.txt`);
  expect(await sandbox.files.read(`${dir}/c.txt`).catch((e: unknown) => e)).toBeInstanceOf(FileNotFoundError);
  const meta = await sandbox.files.write(`${dir}/m`, "x", { metadata: { kind: "test" } });
  expect(meta.metadata).toEqual({ kind: "test" });
});

test("files: watch", async () => {
  const dir = `${agent.dir}/watched`;
  await sandbox.files.makeDir(dir);
  const seen: string[] = [];
  const handle = await sandbox.files.watchDir(
    dir,
    (e) => {
      seen.push(`${e.type} ${e.name}`);
    },
    { recursive: true },
  );
  await sandbox.files.write(`${dir}/deep/er/f`, "x");
  await eventually("event", () => seen.includes("create deep/er/f"));
  await handle.stop();
});

test("isRunning asks the agent", async () => {
  expect(await sandbox.isRunning()).toBe(true);
});
