import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync } from "node:fs";
import { mkdir, readFile, writeFile } from "node:fs/promises";
import { join, resolve } from "node:path";
import { Sandbox as CodeSandbox } from "@e2b/code-interpreter";
import {
  CommandExitError,
  FileNotFoundError,
  FileType,
  NotFoundError,
  Sandbox,
  Template,
  TimeoutError,
} from "e2b";
import sdk from "e2b/package.json" with { type: "json" };
import { type CompatRow, renderCompatibility } from "../../scripts/compat-doc.ts";
import { type LocalRegistry, startDebianRegistry } from "../support/debian.ts";
import { preparePythonSdk } from "../support/python-sdk.ts";
import { TestServer } from "../support/server.ts";

/*
 * The unmodified E2B clients against a real server with real machines. Every feature is a row of
 * docs/e2b-compatibility.md; the last test compares that page with what this run saw. Write it anew with
 * AENV_UPDATE_DOCS=1.
 */

const ROOT = resolve(import.meta.dir, "../..");
const DOCUMENT = join(ROOT, "docs/e2b-compatibility.md");
const TEMPLATE = "compat";
const JS = `JavaScript ${sdk.version}`;

let server: TestServer;
let registry: LocalRegistry;
let connection: { apiKey: string; apiUrl: string; sandboxUrl: string };
let box: Sandbox;
const rows: CompatRow[] = [];
let python: Promise<PythonOutcome>;

beforeAll(async () => {
  server = await TestServer.create({ toml: '[sandbox_proxy]\ndomains = ["box.test"]' });
  registry = await startDebianRegistry(join(server.home, "registry"));
  await server.start();
  connection = await server.connection();
  await server.run(["auth"], `${server.url}\n${connection.apiKey}\n`);
  const pull = await server.run([
    "pull",
    registry.debian,
    "--name",
    TEMPLATE,
    "--cpu",
    "1",
    "--memory",
    "384",
  ]);
  if (pull.exitCode !== 0) throw new Error(`${pull.stderr}${pull.stdout}`);
  box = await Sandbox.create(TEMPLATE, { ...connection, timeoutMs: 900_000 });
}, 300_000);

afterAll(async () => {
  await server?.[Symbol.asyncDispose]();
  await registry?.[Symbol.asyncDispose]();
}, 180_000);

type PythonOutcome =
  | { readonly missing: string }
  | { readonly version: string; readonly out: string; readonly err: string; readonly code: number };

async function runPython(): Promise<PythonOutcome> {
  const client = await preparePythonSdk(ROOT);
  if ("missing" in client) return client;
  const run = Bun.spawn([client.interpreter, join(ROOT, "tests/support/compat.py"), TEMPLATE], {
    env: {
      PATH: process.env.PATH ?? "",
      E2B_API_KEY: connection.apiKey,
      E2B_API_URL: connection.apiUrl,
      E2B_SANDBOX_URL: connection.sandboxUrl,
      NO_PROXY: "127.0.0.1",
    },
    stdout: "pipe",
    stderr: "pipe",
    timeout: 240_000,
  });
  const [out, err] = await Promise.all([new Response(run.stdout).text(), new Response(run.stderr).text()]);
  return { version: client.version, out, err, code: await run.exited };
}

/** One row of the table and one test. */
function feature(group: string, name: string, work: () => Promise<void>, timeoutMs = 60_000): void {
  test(
    `${group}: ${name}`,
    async () => {
      try {
        await work();
        rows.push({ client: JS, group, feature: name, result: "pass" });
      } catch (error) {
        rows.push({ client: JS, group, feature: name, result: "fail" });
        throw error;
      }
    },
    timeoutMs,
  );
}

const until = async (what: string, check: () => boolean | Promise<boolean>, ms = 30_000) => {
  for (const end = Date.now() + ms; Date.now() < end; await Bun.sleep(50)) if (await check()) return;
  throw new Error(`not within ${ms} ms: ${what}`);
};
const error = (work: Promise<unknown>) =>
  work.then(
    () => undefined,
    (reason: unknown) => reason,
  );
const fresh = (options: Partial<Parameters<typeof Sandbox.create>[1]> = {}) =>
  Sandbox.create(TEMPLATE, { ...connection, timeoutMs: 600_000, ...options });
/** A service that answers "page"; a bare socket starts much sooner than Python's HTTP server. */
const serve = (port: number) =>
  `nohup python3 -S -E -c 'import socket
s = socket.create_server(("", ${port}))
while True:
    c, _ = s.accept()
    c.recv(9999)
    c.sendall(b"HTTP/1.0 200 OK\\r\\nContent-Length: 5\\r\\n\\r\\npage\\n")
    c.close()' >/dev/null 2>&1 &`;
/** A request into the sandbox, routed by headers. */
const ask = (id: string, port: number, path = "/", headers: Record<string, string> = {}) =>
  fetch(`${server.url}${path}`, {
    headers: { "e2b-sandbox-id": id, "e2b-sandbox-port": String(port), ...headers },
  });

describe("control plane", () => {
  const group = "Sandbox";

  feature(group, "create with metadata, environment, timeout", async () => {
    const made = await fresh({ metadata: { "k 1": "v&=%✓" }, envs: { COLOUR: "blue" } });
    expect(made.sandboxId).toMatch(/^[0-9a-f-]{36}$/);
    expect((await made.commands.run("echo $COLOUR")).stdout).toBe("blue\n");
    const info = await made.getInfo();
    expect(info).toMatchObject({
      state: "running",
      metadata: { "k 1": "v&=%✓" },
      cpuCount: 1,
      memoryMB: 384,
    });
    expect(info.endAt.getTime() - Date.now()).toBeGreaterThan(500_000);
    await made.kill();
  });

  feature(group, "create from an unknown template is refused", async () => {
    const refused = await error(Sandbox.create("no-such-template", connection));
    expect(String(refused)).toContain("404");
  });

  feature(group, "create with a wrong key is refused", async () => {
    const refused = await error(Sandbox.create(TEMPLATE, { ...connection, apiKey: `e2b_${"f".repeat(64)}` }));
    expect((refused as Error).name).toBe("AuthenticationError");
  });

  feature(group, "connect", async () => {
    const other = await Sandbox.connect(box.sandboxId, connection);
    await other.files.write("/tmp/connected", "yes");
    expect(await box.files.read("/tmp/connected")).toBe("yes");
    expect(await error(Sandbox.connect("01936f8e-72f5-7000-8000-000000000000", connection))).toBeInstanceOf(
      NotFoundError,
    );
  });

  feature(group, "list with metadata and state filters, page by page", async () => {
    const made = await Promise.all(["a", "b", "c"].map((mark) => fresh({ metadata: { run: "list", mark } })));
    const pages = Sandbox.list({ ...connection, limit: 2, query: { metadata: { run: "list" } } });
    const seen: string[] = [];
    while (pages.hasNext) seen.push(...(await pages.nextItems()).map((item) => item.sandboxId));
    expect(seen.toSorted()).toEqual(made.map((one) => one.sandboxId).toSorted());
    const paused = Sandbox.list({ ...connection, query: { metadata: { run: "list" }, state: ["paused"] } });
    expect(await paused.nextItems()).toEqual([]);
    await Promise.all(made.map((one) => one.kill()));
  });

  feature(group, "info", async () => {
    const info = await box.getInfo();
    expect(info.sandboxId).toBe(box.sandboxId);
    expect(info.startedAt.getTime()).toBeLessThan(Date.now());
  });

  feature(group, "isRunning, before and after kill", async () => {
    const made = await fresh();
    expect(await made.isRunning()).toBe(true);
    expect(await made.kill()).toBe(true);
    expect(await made.isRunning()).toBe(false);
  });

  feature(group, "kill, twice", async () => {
    const made = await fresh();
    expect(await made.kill()).toBe(true);
    expect(await made.kill()).toBe(false);
    expect(await Sandbox.kill(made.sandboxId, connection)).toBe(false);
  });

  feature(group, "kill ends a running command with the right error", async () => {
    const made = await fresh();
    let started = false;
    const outcome = error(
      made.commands.run("echo on; sleep 600", {
        timeoutMs: 0,
        onStdout: () => {
          started = true;
        },
      }),
    );
    await until("the command runs", () => started);
    // A watch and a download that is under way are told as well.
    const watch = Promise.withResolvers<Error | undefined>();
    await made.files.watchDir("/tmp", () => undefined, { timeoutMs: 0, onExit: watch.resolve });
    await made.commands.run("head -c 32M /dev/urandom >/tmp/large");
    const reading = (await made.files.read("/tmp/large", { format: "stream" })).getReader();
    await reading.read();
    await Sandbox.kill(made.sandboxId, connection);
    expect(await outcome).toBeInstanceOf(TimeoutError);
    expect(await watch.promise).toBeInstanceOf(Error);
    const rest = await error(
      (async () => {
        while (!(await reading.read()).done);
      })(),
    );
    expect(rest).toBeInstanceOf(Error);
    expect(await error(made.files.read("/tmp/large"))).toBeInstanceOf(TimeoutError);
  });

  feature(group, "setTimeout, and the deadline kills", async () => {
    const made = await fresh();
    const before = Date.now();
    await made.setTimeout(120_000);
    const { endAt } = await made.getInfo();
    expect(endAt.getTime() - 120_000).toBeWithin(before - 1000, Date.now() + 1000);
    await made.setTimeout(1000);
    await until("killed at its deadline", async () => !(await made.isRunning()));
  });

  feature(group, "pause, twice, and resume by connect", async () => {
    const made = await fresh();
    const kept = await made.commands.run("sleep 600", { background: true, timeoutMs: 0 });
    await made.files.write("/root/kept", "on disk");
    const watch = Promise.withResolvers<Error | undefined>();
    await made.files.watchDir("/root", () => undefined, { timeoutMs: 0, onExit: watch.resolve });
    expect(await made.pause()).toBe(true);
    expect(await made.pause()).toBe(false);
    expect(await watch.promise).toBeInstanceOf(Error); // told, not silent
    expect((await Sandbox.getInfo(made.sandboxId, connection)).state).toBe("paused");
    const again = await Sandbox.connect(made.sandboxId, { ...connection, timeoutMs: 600_000 });
    expect((await again.commands.list()).map((entry) => entry.pid)).toContain(kept.pid);
    expect(await again.files.read("/root/kept")).toBe("on disk");
    await again.kill();
  });

  feature(group, "pause at the deadline, resume on traffic", async () => {
    const made = await fresh({ lifecycle: { onTimeout: "pause", autoResume: true } });
    await made.commands.run(serve(8123));
    await until("service", async () => (await ask(made.sandboxId, 8123)).status === 200);
    await made.setTimeout(1000);
    await until("paused", async () => (await made.getInfo()).state === "paused");
    // Looking does not wake it.
    expect((await made.getInfo()).state).toBe("paused");
    await made.getMetrics();
    expect((await made.getInfo()).state).toBe("paused");
    expect((await ask(made.sandboxId, 8123)).status).toBe(200);
    expect((await made.getInfo()).state).toBe("running");
    await made.kill();
  });

  feature(group, "metrics", async () => {
    let points = await box.getMetrics();
    await until("a point within 30 s", async () => {
      points = await box.getMetrics();
      return points.length > 0;
    });
    const point = points.at(-1)!;
    expect(point.cpuCount).toBe(1);
    expect(point.memTotal).toBeGreaterThan(256 * 2 ** 20);
    expect(point.memUsed).toBeGreaterThan(0);
    expect(point.diskTotal).toBeGreaterThan(2 ** 30);
    expect(point.cpuUsedPct).toBeGreaterThanOrEqual(0);
    expect(await box.getMetrics({ end: new Date(Date.now() - 3_600_000) })).toEqual([]);
  });

  feature(group, "fork: children with the source's memory and files, ids of their own", async () => {
    await box.files.write("/root/forked", "before");
    const results = await box.fork({ count: 2 });
    const children = results.map((result) => {
      if (result instanceof Sandbox) return result;
      const { sandbox, error: failure } = result as { sandbox?: Sandbox; error?: unknown };
      if (sandbox === undefined) throw failure;
      return sandbox;
    });
    expect(new Set([box, ...children].map((one) => one.sandboxId)).size).toBe(3);
    for (const child of children) expect(await child.files.read("/root/forked")).toBe("before");
    await children[0]!.files.write("/root/forked", "mine");
    expect(await children[1]!.files.read("/root/forked")).toBe("before");
    expect(await box.files.read("/root/forked")).toBe("before");
    await Promise.all(children.map((child) => child.kill()));
  });

  feature(group, "snapshot: the source runs on, a new sandbox starts from it", async () => {
    await box.files.write("/root/snapped", "in it");
    const snapshot = await box.createSnapshot();
    expect((await box.commands.run("echo on")).stdout).toBe("on\n");
    const listed = await Sandbox.listSnapshots({ ...connection, sandboxId: box.sandboxId }).nextItems();
    expect(listed.map((item) => item.snapshotId)).toContain(snapshot.snapshotId);
    const clone = await Sandbox.create(snapshot.snapshotId, { ...connection, timeoutMs: 600_000 });
    expect(await clone.files.read("/root/snapped")).toBe("in it");
    await clone.kill();
    expect(await Sandbox.deleteSnapshot(snapshot.snapshotId, connection)).toBe(true);
    expect(await Sandbox.deleteSnapshot(snapshot.snapshotId, connection)).toBe(false);
  });

  feature(group, "logs (CLI: sandbox logs)", async () => {
    const reply = await fetch(`${server.url}/sandboxes/${box.sandboxId}/logs`, {
      headers: { "x-api-key": connection.apiKey },
    });
    const { logEntries } = (await reply.json()) as { logEntries: { fields: { event?: string } }[] };
    expect(logEntries.map((entry) => entry.fields.event)).toContain("created");
  });
});

describe("traffic", () => {
  const group = "Traffic";
  feature(group, "host URL of a port, routed by host name", async () => {
    await box.commands.run(serve(8000));
    const host = box.getHost(8000);
    expect(host).toBe(`8000-${box.sandboxId}.box.test`);
    const visit = () => fetch(server.url, { headers: { host } });
    await until("service", async () => (await visit()).status === 200);
    expect(await (await visit()).text()).toBe("page\n");
  });

  feature(group, "closed port: 502 that names it", async () => {
    const reply = await ask(box.sandboxId, 9);
    expect(reply.status).toBe(502);
    expect(await reply.json()).toMatchObject({ port: 9, sandboxId: box.sandboxId, code: 502 });
  });

  feature(group, "private ingress: 403, 403, 200", async () => {
    const made = await fresh({ network: { allowPublicTraffic: false } });
    await made.commands.run(serve(8000));
    const token = (made as unknown as { trafficAccessToken?: string }).trafficAccessToken;
    expect(token).toMatch(/^[0-9a-f]{64}$/);
    await until(
      "service",
      async () =>
        (await ask(made.sandboxId, 8000, "/", { "e2b-traffic-access-token": token! })).status === 200,
    );
    expect((await ask(made.sandboxId, 8000)).status).toBe(403);
    expect(
      (await ask(made.sandboxId, 8000, "/", { "e2b-traffic-access-token": "0".repeat(64) })).status,
    ).toBe(403);
    await made.kill();
  });

  feature(group, "signed download and upload URLs without headers; tampered and expired ones", async () => {
    await box.files.write("/tmp/signed.txt", "signed content");
    const url = await box.downloadUrl("/tmp/signed.txt", { useSignatureExpiration: 60 });
    expect(url).toContain("signature=");
    expect(await (await fetch(url)).text()).toBe("signed content");
    expect((await fetch(url.replace("signed.txt", "other.txt"))).status).toBe(401);
    const tampered = url.replace(/(?<=signature=v1_)./, (first) => (first === "0" ? "1" : "0"));
    expect((await fetch(tampered)).status).toBe(401);
    const upload = await box.uploadUrl("/tmp/uploaded.txt", { useSignatureExpiration: 60 });
    const form = new FormData();
    form.append("file", new Blob(["came by form"]), "uploaded.txt");
    expect((await fetch(upload, { method: "POST", body: form })).status).toBe(200);
    expect(await box.files.read("/tmp/uploaded.txt")).toBe("came by form");
    const short = await box.downloadUrl("/tmp/signed.txt", { useSignatureExpiration: 1 });
    await Bun.sleep(2100);
    expect((await fetch(short)).status).toBe(401);
  });
});

describe("commands", () => {
  const group = "Commands";
  let silent: Promise<string>;
  // Beside the others: longer than the idle limits that servers come with.
  beforeAll(() => {
    silent = box.commands
      .run("sleep 15; echo done", { timeoutMs: 0 })
      .then((result) => result.stdout, String);
  });

  feature(group, "foreground: output, errors, exit code, directory, environment, user", async () => {
    const result = await box.commands.run("echo out; echo err >&2");
    expect(result).toMatchObject({ exitCode: 0, stdout: "out\n", stderr: "err\n" });
    const failed = (await error(box.commands.run("echo partial; exit 7"))) as CommandExitError;
    expect(failed).toBeInstanceOf(CommandExitError);
    expect(failed).toMatchObject({ exitCode: 7, stdout: "partial\n" });
    const placed = await box.commands.run("pwd; echo $V; id -un", {
      cwd: "/tmp",
      envs: { V: "v" },
      user: "user",
    });
    expect(placed.stdout).toBe("/tmp\nv\nuser\n");
  });

  feature(group, "streaming callbacks", async () => {
    // Each line is written when the one before has been seen.
    const seen: string[] = [];
    await box.commands.run(
      "for i in 1 2 3; do echo $i; until [ -e /tmp/seen-$i ]; do sleep 0.05; done; done",
      {
        onStdout: async (text) => {
          seen.push(text);
          await box.files.write(`/tmp/seen-${text.trim()}`, "");
        },
      },
    );
    expect(seen).toEqual(["1\n", "2\n", "3\n"]);
  });

  feature(group, "background, connect, kill", async () => {
    const sleep = await box.commands.run("sleep 600", { background: true, timeoutMs: 0 });
    expect((await box.commands.list()).map((entry) => entry.pid)).toContain(sleep.pid);
    const joined = await box.commands.connect(sleep.pid);
    const outcome = error(joined.wait());
    expect(await sleep.kill()).toBe(true);
    expect(await outcome).toBeInstanceOf(CommandExitError);
    expect(await box.commands.kill(sleep.pid)).toBe(false);
    await error(sleep.wait());
  });

  feature(group, "standard input, and its end", async () => {
    const cat = await box.commands.run("cat", { background: true, stdin: true });
    await box.commands.sendStdin(cat.pid, "to cat\n");
    await box.commands.closeStdin(cat.pid);
    expect((await cat.wait()).stdout).toBe("to cat\n");
  });

  feature(group, "timeout", async () => {
    expect(await error(box.commands.run("sleep 30", { timeoutMs: 500 }))).toBeInstanceOf(TimeoutError);
  });

  feature(group, "terminal: input, size, resize, exit code", async () => {
    let text = "";
    const pty = await box.pty.create({
      cols: 100,
      rows: 30,
      timeoutMs: 60_000,
      onData: (data) => {
        text += Buffer.from(data).toString();
      },
    });
    await box.pty.sendInput(pty.pid, Buffer.from("stty size\n"));
    await until("size", () => text.includes("30 100"));
    await box.pty.resize(pty.pid, { cols: 90, rows: 20 });
    await box.pty.sendInput(pty.pid, Buffer.from("stty size; exit 0\n"));
    expect((await pty.wait()).exitCode).toBe(0);
    expect(text).toContain("20 90");
  });

  feature(group, "terminal: a second client, kill", async () => {
    let text = "";
    const pty = await box.pty.create({ cols: 80, rows: 24, timeoutMs: 60_000, onData: () => undefined });
    const joined = await box.pty.connect(pty.pid, {
      onData: (data) => {
        text += Buffer.from(data).toString();
      },
    });
    await box.pty.sendInput(pty.pid, Buffer.from("echo seen-$((40 + 2))\n"));
    await until("output", () => text.includes("seen-42"));
    expect(await box.pty.kill(pty.pid)).toBe(true);
    expect(await error(pty.wait())).toBeInstanceOf(CommandExitError);
    await error(joined.wait());
    expect(await box.pty.kill(pty.pid)).toBe(false);
  });

  feature(group, "output of 5 MB, all bytes in order", async () => {
    const result = await box.commands.run("seq 1 700000 | tee /tmp/numbers | md5sum; cat /tmp/numbers", {
      timeoutMs: 0,
    });
    const cut = result.stdout.indexOf("\n") + 1;
    const sum = new Bun.CryptoHasher("md5").update(result.stdout.slice(cut)).digest("hex");
    expect(result.stdout.slice(0, 32)).toBe(sum);
    await box.files.remove("/tmp/numbers");
  });

  feature(group, "silent for long without a cut", async () => {
    expect(await silent).toBe("done\n");
  });
});

describe("files", () => {
  const group = "Files";
  // Most of its time is waiting: it runs beside the tests that follow.
  beforeAll(() => {
    python = runPython();
  });

  feature(group, "write and read: text, bytes, blob, stream, several, empty", async () => {
    const bytes = Uint8Array.from({ length: 300_000 }, (_, i) => (i * 7) & 255);
    const info = await box.files.write("/tmp/f/a.txt", "text");
    expect(info).toMatchObject({ name: "a.txt", path: "/tmp/f/a.txt", type: FileType.FILE });
    await box.files.write([
      { path: "/tmp/f/b.bin", data: bytes.buffer },
      { path: "/tmp/f/empty", data: "" },
      { path: '/tmp/f/odd " # % ü', data: new Blob(["odd"]) },
    ]);
    await box.files.write("/tmp/f/stream", new Blob([bytes]).stream());
    expect(await box.files.read("/tmp/f/a.txt")).toBe("text");
    const back = await box.files.read("/tmp/f/b.bin", { format: "bytes" });
    expect(Buffer.from(back).equals(Buffer.from(bytes))).toBe(true);
    const blob = await box.files.read("/tmp/f/stream", { format: "blob" });
    expect(blob.size).toBe(bytes.length);
    const stream = await box.files.read("/tmp/f/stream", { format: "stream" });
    expect((await new Response(stream).bytes()).length).toBe(bytes.length);
    expect(await box.files.read('/tmp/f/odd " # % ü')).toBe("odd");
    expect(await box.files.read("/tmp/f/empty")).toBe("");
  });

  feature(group, "list, exists, info", async () => {
    expect((await box.files.list("/tmp/f")).map((entry) => entry.name)).toContain("b.bin");
    expect(await box.files.exists("/tmp/f/a.txt")).toBe(true);
    expect(await box.files.exists("/tmp/f/none")).toBe(false);
    expect(await box.files.getInfo("/tmp/f/b.bin")).toMatchObject({
      size: 300_000,
      permissions: "-rw-r--r--",
    });
  });

  feature(group, "make directory, rename, remove", async () => {
    expect(await box.files.makeDir("/tmp/f/sub/deep")).toBe(true);
    expect(await box.files.makeDir("/tmp/f/sub/deep")).toBe(false);
    expect((await box.files.rename("/tmp/f/a.txt", "/tmp/f/c.txt")).path).toBe("/tmp/f/c.txt");
    await box.files.remove("/tmp/f/c.txt");
    expect(await error(box.files.read("/tmp/f/c.txt"))).toBeInstanceOf(FileNotFoundError);
  });

  feature(group, "watch", async () => {
    const seen: string[] = [];
    const handle = await box.files.watchDir(
      "/tmp/f",
      (event) => void seen.push(`${event.type} ${event.name}`),
      {
        recursive: true,
      },
    );
    await box.files.write("/tmp/f/sub/new", "x");
    await until("event", () => seen.includes("create sub/new"));
    await handle.stop();
  });

  feature(group, "metadata, gzip and octet-stream uploads, downloads in gzip", async () => {
    const text = "the same again, ".repeat(5000);
    const written = await box.files.write("/tmp/f/zipped", text, { gzip: true, metadata: { Owner: "me" } });
    expect(written.metadata).toEqual({ owner: "me" });
    expect(await box.files.read("/tmp/f/zipped", { gzip: true })).toBe(text);
    expect((await box.files.getInfo("/tmp/f/zipped")).metadata).toEqual({ owner: "me" });
    await box.files.write("/tmp/f/zipped", "raw", { useOctetStream: true });
    expect(await box.files.read("/tmp/f/zipped")).toBe("raw");
    expect((await box.files.getInfo("/tmp/f/zipped")).metadata ?? {}).toEqual({});
  });

  feature(group, "watch with entries, in directories made later, on network mounts if asked", async () => {
    const seen: string[] = [];
    const handle = await box.files.watchDir(
      "/tmp/f",
      (event) => void seen.push(`${event.type} ${event.name} ${event.entry?.size ?? "-"}`),
      { recursive: true, includeEntry: true, allowNetworkMounts: true },
    );
    await box.files.write("/tmp/f/later/deep/file", "12345");
    await until("event with an entry", () =>
      seen.some((line) => /^(create|write) later\/deep\/file 5$/.test(line)),
    );
    await box.files.remove("/tmp/f/later");
    await until("removal", () => seen.includes("remove later -"));
    await handle.stop();
  });

  feature(
    group,
    "a stream of 32 MB",
    async () => {
      const chunk = new Uint8Array(1 << 20).fill(7);
      let left = 32;
      const stream = new ReadableStream({
        pull(controller) {
          if (left-- > 0) controller.enqueue(chunk);
          else controller.close();
        },
      });
      await box.files.write("/tmp/big", stream);
      expect((await box.files.getInfo("/tmp/big")).size).toBe(32 << 20);
      await box.files.remove("/tmp/big");
    },
    180_000,
  );
});

describe("git", () => {
  const group = "Git";

  feature(group, "init, configure, add, commit, status, branches", async () => {
    // The image has no git. The host's does where both are of one Debian release.
    await box.files.write("/usr/local/bin/git", (await readFile(Bun.which("git")!)).buffer as ArrayBuffer);
    await box.commands.run("chmod 755 /usr/local/bin/git && git --version");
    await box.git.init("/tmp/repo", { initialBranch: "main" });
    await box.git.configureUser("Tester", "tester@example.com", { scope: "local", path: "/tmp/repo" });
    await box.files.write("/tmp/repo/file", "content");
    expect((await box.git.status("/tmp/repo")).hasUntracked).toBe(true);
    await box.git.add("/tmp/repo");
    await box.git.commit("/tmp/repo", "first");
    await box.git.createBranch("/tmp/repo", "next");
    const branches = await box.git.branches("/tmp/repo");
    expect(branches.branches.toSorted()).toEqual(["main", "next"]);
    expect((await box.git.status("/tmp/repo")).isClean).toBe(true);
  });
});

describe("code interpreter", () => {
  const group = "Code interpreter";

  feature(group, "its client: commands and files; runCode reaches port 49999", async () => {
    const made = await CodeSandbox.create(TEMPLATE, { ...connection, timeoutMs: 600_000 });
    await made.files.write("/tmp/by-interpreter", "file");
    expect((await made.commands.run("cat /tmp/by-interpreter")).stdout).toBe("file");
    // Stands in for the service of the image, which is tried with the template of its own.
    await made.files.write(
      "/tmp/service.py",
      String.raw`import json, socket
s = socket.create_server(("", 49999))
while True:
    c, _ = s.accept()
    got = c.recv(9999)
    while got.startswith(b"POST") and b"1 + 1" not in got:
        got += c.recv(9999)
    said = [{"type": "stdout", "text": "said it", "timestamp": 0}, {"type": "result", "is_main_result": True, "text": "2"}]
    body = "".join(json.dumps(line) + "\n" for line in said).encode()
    c.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    c.close()
`,
    );
    await made.commands.run("nohup python3 /tmp/service.py >/dev/null 2>&1 &");
    await until("service", async () => (await ask(made.sandboxId, 49_999)).status === 200);
    const run = await made.runCode("1 + 1");
    expect([run.logs.stdout, run.text]).toEqual([["said it"], "2"]);
    await made.kill();
  });
});

describe("templates", () => {
  const group = "Template";

  feature(
    group,
    "build from an image with steps, wait for it, start from it",
    async () => {
      const built = await Template.build(
        Template()
          .fromImage(registry.debian)
          .runCmd("echo built > /built", { user: "root" })
          .setEnvs({ FLAVOUR: "sweet" })
          .setWorkdir("/opt"),
        "compat-built",
        { ...connection, cpuCount: 1, memoryMB: 384 },
      );
      expect(built.templateId).toMatch(/^[0-9a-f-]{36}$/);
      const made = await Sandbox.create("compat-built", { ...connection, timeoutMs: 600_000 });
      expect((await made.commands.run("cat /built; echo $FLAVOUR; pwd")).stdout).toBe("built\nsweet\n/opt\n");
      await made.kill();
    },
    180_000,
  );

  feature(group, "exists, tags: assign, list, remove", async () => {
    expect(await Template.exists("compat-built", connection)).toBe(true);
    expect(await Template.exists("compat-free", connection)).toBe(false);
    const assigned = await Template.assignTags("compat-built", ["v1", "stable"], connection);
    expect(assigned.tags.toSorted()).toEqual(["stable", "v1"]);
    const tags = (await Template.getTags("compat-built", connection)).map((entry) => entry.tag);
    expect(tags.toSorted()).toEqual(["default", "stable", "v1"]);
    const made = await Sandbox.create("compat-built:v1", { ...connection, timeoutMs: 600_000 });
    await made.kill();
    await Template.removeTags("compat-built", ["v1"], connection);
    expect((await Template.getTags("compat-built", connection)).map((entry) => entry.tag)).not.toContain(
      "v1",
    );
  });
});

test("the Python client", async () => {
  const outcome = await python;
  if ("missing" in outcome) {
    console.log(`skipped: Python client: ${outcome.missing}`);
    rows.push({ client: "Python", group: "", feature: "", result: "skip", reason: outcome.missing });
    return;
  }
  const client = `Python ${outcome.version}`;
  const results = outcome.out
    .split("\n")
    .filter((line) => line.startsWith("{"))
    .map((line) => JSON.parse(line) as { group: string; feature: string; error?: string });
  for (const { group, feature: name, error: failure } of results) {
    rows.push({ client, group, feature: name, result: failure === undefined ? "pass" : "fail" });
  }
  const failures = results.filter((result) => result.error !== undefined);
  expect({ failures, code: outcome.code, err: outcome.err.slice(-2000) }).toMatchObject({
    failures: [],
    code: 0,
  });
  expect(results.length).toBeGreaterThan(10);
}, 240_000);

test("no secret in any log", async () => {
  const token = (await Sandbox.getInfo(box.sandboxId, connection)) as { envdAccessToken?: string };
  const detail = (await (
    await fetch(`${server.url}/sandboxes/${box.sandboxId}`, { headers: { "x-api-key": connection.apiKey } })
  ).json()) as { envdAccessToken: string };
  expect(token).toBeDefined();
  expect(detail.envdAccessToken).toMatch(/^[0-9a-f]{64}$/);
  const seed = (await readFile(join(server.home, "secrets/sandbox-access-token-hash-seed"), "utf8")).trim();
  const secrets = [connection.apiKey, detail.envdAccessToken, seed, "signature=v1_"];
  const logs = [server.logPath, join(server.home, "logs/ublk-daemon.log")].filter((path) => existsSync(path));
  expect(logs.length).toBeGreaterThan(0);
  for (const path of logs) {
    const text = await readFile(path, "utf8");
    for (const secret of secrets)
      expect({ path, found: text.includes(secret) }).toEqual({ path, found: false });
  }
  // The log was not empty of what happened.
  expect(await server.log()).toContain(box.sandboxId);
});

test("the published table says what this run saw", async () => {
  await mkdir(join(ROOT, "build"), { recursive: true });
  await writeFile(join(ROOT, "build/compatibility.json"), `${JSON.stringify(rows, null, 2)}\n`);
  if (process.env.AENV_UPDATE_DOCS === "1") await writeFile(DOCUMENT, renderCompatibility(rows));
  const published = await readFile(DOCUMENT, "utf8");
  for (const row of rows) {
    if (row.result === "skip") continue;
    const line = published.split("\n").find((text) => text.startsWith(`| ${row.group} | ${row.feature} |`));
    expect({ ...row, line }).toMatchObject({ line: expect.stringContaining(row.result) });
  }
});
