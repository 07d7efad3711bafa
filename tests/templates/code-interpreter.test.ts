import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, rmdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

/* The server of deploy/templates/code-interpreter on this machine, without a VM (with one: tests/e2e). */

const PROGRAM = resolve(import.meta.dir, "../../deploy/templates/code-interpreter/server.py");
const missing = Bun.which("python3") === null;
if (missing)
  console.log("SKIPPED: tests of the code interpreter's server: there is no python3 on this machine");

interface Line {
  readonly type: string;
  readonly text?: string;
  readonly name?: string;
  readonly value?: string;
}

let dir: string;
let server: Bun.Subprocess<"ignore", "pipe", "inherit">;
let base: string;

beforeAll(async () => {
  if (missing) return;
  dir = mkdtempSync(join(tmpdir(), "aenv-interpreter-"));
  server = Bun.spawn(["python3", PROGRAM, "--address", "127.0.0.1", "--port", "0", "--cwd", dir], {
    stdin: "ignore",
    stdout: "pipe",
    stderr: "inherit",
  });
  // Read on: a server whose output is closed ends with its next word.
  const port = Promise.withResolvers<string>();
  (async () => {
    let said = "";
    for await (const chunk of server.stdout) {
      said += Buffer.from(chunk).toString();
      const told = /port (\d+)\n/.exec(said)?.[1];
      if (told !== undefined) port.resolve(told);
    }
    port.reject(new Error(`the server ended: ${said}`));
  })().catch(port.reject);
  base = `http://127.0.0.1:${await port.promise}`;
});

afterAll(async () => {
  if (missing) return;
  for (const pid of kernels()) process.kill(pid, "SIGKILL");
  server.kill();
  await server.exited;
  rmSync(dir, { recursive: true, force: true });
});

/** Processes the server has started and not taken leave of. */
function kernels(): number[] {
  const threads = `/proc/${server.pid}/task`;
  return readdirSync(threads).flatMap((thread) =>
    readFileSync(join(threads, thread, "children"), "utf8")
      .split(" ")
      .filter(Boolean)
      .map(Number),
  );
}

async function context(cwd: string): Promise<string> {
  const response = await fetch(`${base}/contexts`, { method: "POST", body: JSON.stringify({ cwd }) });
  expect(response.status).toBe(200);
  return ((await response.json()) as { id: string }).id;
}

/** The lines of an execution; nothing else may be in its answer. */
async function* execute(id: string, code: string): AsyncGenerator<Line> {
  const body = JSON.stringify({ code, context_id: id });
  const response = await fetch(`${base}/execute`, { method: "POST", body });
  expect(response.status).toBe(200);
  let held = "";
  for await (const chunk of response.body!) {
    const lines = (held + Buffer.from(chunk).toString()).split("\n");
    held = lines.pop()!;
    for (const line of lines) yield JSON.parse(line) as Line;
  }
  expect(held).toBe("");
}

test.skipIf(missing)(
  "a context that is removed while it runs ends for all callers, and no kernel follows",
  async () => {
    const before = kernels();
    const id = await context(dir);
    expect(kernels()).toHaveLength(before.length + 1);
    const running = execute(id, "import time\nprint('runs')\ntime.sleep(600)");
    expect((await running.next()).value).toEqual({ type: "stdout", text: "runs\n" });
    const waiting = Array.fromAsync(execute(id, "1"));
    expect((await fetch(`${base}/contexts/${id}`, { method: "DELETE" })).status).toBe(204);
    const end = [
      { type: "error", name: "KernelDied", value: `context ${id} was removed` },
      { type: "end_of_execution" },
    ];
    expect(await Array.fromAsync(running)).toMatchObject(end);
    // Whether it had begun to wait or not, the second one has no kernel to run in.
    const second = await waiting.catch((error: Error) => error);
    if (Array.isArray(second)) expect(second).toMatchObject(end);
    else expect(second.message).toContain("404");
    expect(kernels()).toEqual(before);
  },
);

test.skipIf(missing)("a kernel that cannot be started is told within the answer", async () => {
  const cwd = mkdtempSync(join(dir, "cwd-"));
  const id = await context(cwd);
  rmdirSync(cwd);
  const died = (value: string) => [
    { type: "error", name: "KernelDied", value: expect.stringContaining(value) },
    { type: "end_of_execution" },
  ];
  expect(await Array.fromAsync(execute(id, "import os; os._exit(3)"))).toMatchObject(died("status 3"));
  expect(await Array.fromAsync(execute(id, "1"))).toMatchObject(died("cannot be started"));
  expect((await fetch(`${base}/contexts/${id}`, { method: "DELETE" })).status).toBe(204);
  expect((await fetch(`${base}/health`)).status).toBe(200);
});
