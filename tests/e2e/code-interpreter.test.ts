import { afterAll, beforeAll, expect, test } from "bun:test";
import { join, resolve } from "node:path";
import { Sandbox } from "@e2b/code-interpreter";
import { type LocalRegistry, startDebianRegistry } from "../support/debian.ts";
import { TestServer } from "../support/server.ts";

/* The recipe of deploy/templates/code-interpreter with the unmodified client: Python in a real VM. */

const RECIPE = resolve(import.meta.dir, "../../deploy/templates/code-interpreter");

let server: TestServer;
let registry: LocalRegistry;
let connection: { apiKey: string; apiUrl: string; sandboxUrl: string };

beforeAll(async () => {
  server = await TestServer.create({ toml: "[image.cache]\nvirtual_size_gib = 4\n" });
  registry = await startDebianRegistry(join(server.home, "registry"));
  await server.start();
  connection = await server.connection();
  await server.run(["auth"], `${server.url}\n${connection.apiKey}\n`);
  // The image has python3: nothing to install. The name is that of the client's default template.
  const args = ["--build-arg", `BASE=${registry.debian}`, "--build-arg", "PACKAGES="];
  const build = ["build", RECIPE, "--name", "code-interpreter-v1", "--cpu", "1", "--memory", "512", ...args];
  expect(await server.run(build)).toMatchObject({ exitCode: 0 });
}, 300_000);

afterAll(async () => {
  await server?.[Symbol.asyncDispose]();
  await registry?.[Symbol.asyncDispose]();
}, 180_000);

test("runCode: state, output, results, errors, environment, contexts, restart and a time limit", async () => {
  const sandbox = await Sandbox.create({ ...connection, timeoutMs: 300_000 });
  try {
    const heard: string[] = [];
    const first = await sandbox.runCode("x = 20\nprint('hello', x)\nx + 1", {
      onStdout: ({ line }) => void heard.push(line),
    });
    expect(first.error).toBeUndefined();
    expect(first.logs.stdout.join("")).toBe("hello 20\n");
    expect(heard.join("")).toBe("hello 20\n");
    expect(first.text).toBe("21");
    expect(first.executionCount).toBe(1);
    expect((await sandbox.runCode("x * 2")).text).toBe("40");

    const programs = "import os, sys\nos.system('id -un; pwd')\nprint(os.environ['SAID'], file=sys.stderr)";
    const told = await sandbox.runCode(programs, { envs: { SAID: "by the caller" } });
    expect(told.logs.stdout.join("")).toBe("user\n/home/user\n");
    expect(told.logs.stderr.join("")).toBe("by the caller\n");
    expect((await sandbox.runCode("os.environ.get('SAID')")).text).toBeUndefined();
    expect((await sandbox.runCode("os.environ['PIP_BREAK_SYSTEM_PACKAGES']")).text).toBe("'1'");

    const failed = await sandbox.runCode("def f():\n    return 1 / 0\nf()");
    expect(failed.error).toMatchObject({ name: "ZeroDivisionError", value: "division by zero" });
    expect(failed.error!.traceback).toContain("return 1 / 0");

    const rich = await sandbox.runCode(
      "class Table:\n    def _repr_html_(self): return '<table/>'\ndisplay(Table())\nTable()",
    );
    expect(rich.results.map(({ html, isMainResult }) => [html, isMainResult])).toEqual([
      ["<table/>", false],
      ["<table/>", true],
    ]);

    const context = await sandbox.createCodeContext({ cwd: "/tmp" });
    expect((await sandbox.runCode("import os; os.getcwd()", { context })).text).toBe("'/tmp'");
    expect((await sandbox.runCode("x", { context })).error?.name).toBe("NameError");
    expect((await sandbox.listCodeContexts()).map(({ id }) => id)).toContain(context.id);
    await sandbox.runCode("y = 1", { context });
    await sandbox.restartCodeContext(context);
    expect((await sandbox.runCode("'y' in globals()", { context })).text).toBe("False");
    await sandbox.removeCodeContext(context);
    expect((await sandbox.listCodeContexts()).map(({ id }) => id)).not.toContain(context.id);
    await expect(sandbox.runCode("1", { context })).rejects.toThrow(/not found/);

    // Given up by the client: interrupted, and the state is still there.
    await expect(sandbox.runCode("while True: pass", { timeoutMs: 1000 })).rejects.toThrow(/timed out/);
    expect((await sandbox.runCode("x")).text).toBe("20");

    const files = await sandbox.runCode("open('/home/user/made', 'w').write('by code')");
    expect(files.error).toBeUndefined();
    expect(await sandbox.files.read("/home/user/made")).toBe("by code");
  } finally {
    await sandbox.kill();
  }
}, 180_000);

test("sandboxes of one template have kernels of their own, with other random numbers", async () => {
  const sandboxes = await Promise.all(
    [1, 2].map(() => Sandbox.create({ ...connection, timeoutMs: 300_000 })),
  );
  try {
    const numbers = await Promise.all(
      sandboxes.map((sandbox) => sandbox.runCode("import random; random.random()")),
    );
    expect(numbers[0]!.text).toMatch(/^0\.\d+$/);
    expect(numbers[0]!.text).not.toBe(numbers[1]!.text);
  } finally {
    await Promise.all(sandboxes.map((sandbox) => sandbox.kill()));
  }
}, 180_000);
