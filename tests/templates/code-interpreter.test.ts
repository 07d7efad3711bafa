import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdtempSync, readdirSync, readFileSync, rmdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { preparePackage } from "../support/python-sdk.ts";

/* The server of deploy/templates/code-interpreter on this machine, without a VM (with one: tests/e2e). */

const ROOT = resolve(import.meta.dir, "../..");
const PROGRAM = resolve(ROOT, "deploy/templates/code-interpreter/server.py");
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
  [server, base] = await startServer("python3");
});

/** The server's process and its address. */
async function startServer(interpreter: string): Promise<[typeof server, string]> {
  const server = Bun.spawn([interpreter, PROGRAM, "--address", "127.0.0.1", "--port", "0", "--cwd", dir], {
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
  return [server, `http://127.0.0.1:${await port.promise}`];
}

async function endServer(): Promise<void> {
  for (const pid of kernels()) process.kill(pid, "SIGKILL");
  server.kill();
  await server.exited;
}

afterAll(async () => {
  if (missing) return;
  await endServer();
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

const PICKLED = `import pickle, sys
class Made: pass
type(pickle.loads(pickle.dumps(Made()))).__name__, vars(sys.modules["__main__"]) is globals()`;

test.skipIf(missing)("code is the program's main module: what it defines can be pickled", async () => {
  const id = await context(dir);
  expect(await outcome(id, PICKLED)).toMatchObject([{ type: "result", text: "('Made', True)" }]);
});

/** Without what comes and goes: counts, the end. */
async function outcome(id: string, code: string): Promise<Line[]> {
  const lines = await Array.fromAsync(execute(id, code));
  expect(lines.at(-1)).toEqual({ type: "end_of_execution" });
  return lines.filter(({ type }) => type !== "end_of_execution" && type !== "number_of_executions");
}

test.skipIf(missing)(
  "with IPython in the image the kernel is one of its shells: magics, programs, await, rich results, errors",
  async () => {
    const ipython = await preparePackage(ROOT, "ipython", "ipython", "8.37.0");
    if ("missing" in ipython) {
      console.log(`SKIPPED: the code interpreter with IPython: ${ipython.missing}`);
      return;
    }
    await endServer();
    [server, base] = await startServer(ipython.interpreter);
    const id = await context(dir);
    const main = (text: string) => ({ type: "result", is_main_result: true, text });
    expect(await outcome(id, "import IPython; IPython.__version__")).toEqual([main("'8.37.0'")]);
    expect(await outcome(id, "_ * 2, In[1], Out[1]")).toEqual([
      main("('8.37.08.37.0', 'import IPython; IPython.__version__', '8.37.0')"),
    ]);
    expect(await outcome(id, "%time 6 * 7")).toMatchObject([{ type: "stdout" }, main("42")]);
    expect(await outcome(id, "%%bash\necho in $PWD")).toEqual([{ type: "stdout", text: `in ${dir}\n` }]);
    expect((await outcome(id, "!echo $((40 + 2))"))[0]?.text?.trim()).toBe("42");
    expect(await outcome(id, "import asyncio; await asyncio.sleep(0, result='awaited')")).toEqual([
      main("'awaited'"),
    ]);
    const shown =
      "from IPython.display import HTML, JSON\ndisplay(HTML('<b>x</b>'))\nprint('then')\nJSON({'a': [1]})";
    expect(await outcome(id, shown)).toMatchObject([
      { type: "result", is_main_result: false, html: "<b>x</b>" },
      { type: "stdout", text: "then\n" },
      { type: "result", is_main_result: true, json: { a: [1] } },
    ]);
    const failed = await outcome(id, "def f():\n    return 1 / 0\nf()");
    expect(failed).toMatchObject([{ type: "error", name: "ZeroDivisionError", value: "division by zero" }]);
    expect((failed[0] as { traceback?: string }).traceback).toContain("return 1 / 0");
    expect((failed[0] as { traceback?: string }).traceback).not.toContain("server.py");
    const cutOff = await outcome(id, "f(");
    expect(cutOff).toMatchObject([{ type: "error", name: "SyntaxError" }]);
    expect((cutOff[0] as { traceback?: string }).traceback).toMatch(/^SyntaxError: /m);
    expect((await outcome(id, "raise SystemExit(3)")).at(-1)).toMatchObject({
      type: "error",
      name: "SystemExit",
    });
    expect(await outcome(id, PICKLED)).toEqual([main("('Made', True)")]);
    expect(await outcome(id, "IPython.__version__[0]")).toEqual([main("'8'")]);
  },
  240_000,
);
