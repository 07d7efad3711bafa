import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { symlink } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { processes } from "../support/proc.ts";
import { hostObjects, TestServer, testHome } from "../support/server.ts";

/* `make quickstart` as it is typed, with a home, an address and pools of its own. The tests run in this order. */

setDefaultTimeout(180_000);

const ROOT = resolve(import.meta.dir, "../..");

/** Not started by itself: its home and settings are those the scripts are given. */
let server: TestServer;

/** The targets, with what built the executable that all tests run: nothing is built meanwhile. */
async function make(target: string): Promise<string> {
  const child = Bun.spawn(["make", "-o", "dist/agentenv", target], {
    cwd: ROOT,
    env: { ...server.environment, AENV_QUICKSTART_IMAGE: "local" },
    stdio: ["ignore", "pipe", "pipe"],
  });
  const [out, err, code] = await Promise.all([
    new Response(child.stdout).text(),
    new Response(child.stderr).text(),
    child.exited,
  ]);
  expect(code, `make ${target}\n${out}\n${err}`).toBe(0);
  return out;
}

/** The part of the checkout's own state that its server and quickstart write. */
const ownState = () =>
  ["home/server.pid", "home/server.addr", "home/client", "home/registry", "registry"].map((name) => {
    const path = join(ROOT, ".aenv", name);
    return [name, existsSync(path) ? statSync(path).mtimeMs : "absent"];
  });

/** What the phases printed of the Python programs in the microVM. */
function toldBy(output: string) {
  const counts = /a Python process \(pid (\d+)\) counts: (\d+)/.exec(output);
  const goesOn = /resumed: the same process \(pid (\d+)\) goes on counting: (\d+) -> (\d+)/.exec(output);
  expect(counts, output).not.toBeNull();
  expect(goesOn, output).not.toBeNull();
  return {
    program: [...output.matchAll(/^ +\| (.*)$/gm)].map(([, line]) => line!),
    pids: [counts![1], goesOn![1]],
    counted: [counts![2], goesOn![2], goesOn![3]].map(Number),
  };
}

function expectMainJob(output: string): void {
  const { program, pids, counted } = toldBy(output);
  expect(program).toEqual([
    expect.stringMatching(/^Hello from Python 3\.\d+\.\d+ in a microVM of its own$/),
    expect.stringMatching(/^kernel \d+\.\d+.* \| cpus 1 \| user \d+$/),
    "sum of squares below 1000: 332833500",
  ]);
  // A kernel of its own, not the host's.
  const host = readFileSync("/proc/sys/kernel/osrelease", "utf8").trim();
  expect(program[1]).not.toContain(`kernel ${host} `);
  expect(pids[1]).toBe(pids[0]);
  expect(counted[1]).toBe(counted[0]!);
  expect(counted[2]).toBeGreaterThan(counted[1]!);
  expect(output).toMatch(
    /^ +[\d.]+ s {2}paused: .*\n +[\d.]+ s {2}resumed: .*\n +[\d.]+ s {2}sandbox deleted$/m,
  );
}

const api = async (path: string) => {
  const response = await fetch(`${server.url}${path}`, { headers: { "x-api-key": await server.apiKey() } });
  expect(response.status).toBe(200);
  return (await response.json()) as { templateID: string; names: string[]; createdAt: string }[];
};

beforeAll(async () => {
  server = await TestServer.create();
  // Kernel and QEMU as they are after a first run.
  await symlink(join(testHome(), "deps"), join(server.home, "deps"));
});

afterAll(async () => {
  if (server === undefined) return;
  // Where a test failed there may be a server.
  Bun.spawnSync([join(ROOT, "scripts/server.sh"), "stop"], { env: { ...server.environment } });
  await server[Symbol.asyncDispose]();
});

test("what is suggested where no registry answers needs none; where one does, an image of it", async () => {
  const home = mkdtempSync(join(tmpdir(), "aenv-offline-"));
  // A server that runs, as far as the script can tell: nothing is built or started for this.
  const stand = Bun.spawn(["bash", "-c", "exec -a agentenv-stand-in sleep 60"]);
  try {
    mkdirSync(join(home, "secrets"));
    writeFileSync(join(home, "secrets/api-key"), `e2b_${"0".repeat(64)}\n`, { mode: 0o600 });
    writeFileSync(join(home, "server.pid"), `${stand.pid}\n`);
    writeFileSync(join(home, "server.addr"), "127.0.0.1:9");
    const bin = join(home, "bin");
    mkdirSync(bin);
    writeFileSync(join(bin, "curl"), "#!/bin/sh\nprintf 401\n", { mode: 0o755 });
    const started = (...before: string[]): string => {
      const env = { ...server.environment, AENV_HOME_PATH: home };
      const { stdout, stderr, exitCode } = Bun.spawnSync([...before, "scripts/server.sh", "start"], {
        cwd: ROOT,
        env,
      });
      expect(exitCode, stderr.toString()).toBe(0);
      const said = stdout.toString();
      expect(said).toStartWith(`server already runs (pid ${stand.pid}), http://127.0.0.1:9\n`);
      return said;
    };
    // A network namespace of its own: no route, no name server, not even a loopback that is up.
    const offline = started("unshare", "--net");
    expect(offline).toMatch(
      /^ {2}aenv pull HOST:PORT\/IMAGE --name NAME +from a registry of yours: Docker Hub does not answer$/m,
    );
    expect(offline).toMatch(/^ {2}make quickstart +without a registry: a Debian image made here$/m);
    expect(offline).not.toContain("python:3.12-slim");
    const online = started("env", `PATH=${bin}:${server.environment.PATH}`);
    expect(online).toMatch(/^ {2}aenv pull python:3\.12-slim --name py /m);
    expect(online).not.toContain("does not answer");
  } finally {
    stand.kill();
    await stand.exited;
    rmSync(home, { recursive: true });
  }
});

test("make quickstart: Python in a microVM, paused and resumed, and what to do next", async () => {
  const own = ownState();
  const first = await make("quickstart");
  for (const phase of ["1/4", "2/4", "3/4", "4/4"]) expect(first).toContain(`\n[${phase}] `);
  expect(first.match(/^ {6}done in \d+ s$/gm)).toHaveLength(4);
  expectMainJob(first);
  // Where the server is, where its key is, how it stops: true, not only said.
  const key = /^ +key +(\S+)$/m.exec(first)?.[1];
  expect(key).toBe(join(server.home, "secrets/api-key"));
  const address = /^ +server +(\S+)/m.exec(first)?.[1];
  expect(address).toBe(server.url);
  const answer = await fetch(`${address}/v2/sandboxes`, {
    headers: { "x-api-key": readFileSync(key!, "utf8").trim() },
  });
  expect([answer.status, await answer.json()]).toEqual([200, []]);
  expect(existsSync(/^ +log +(\S+)$/m.exec(first)![1]!)).toBe(true);
  expect(first).toMatch(/^Stop: {2}make stop\b/m);
  // The registry that the image came from was for this run; the checkout's own state was none of its business.
  expect(first).toMatch(/registry it was pulled from, \S+, was temporary and is stopped/);
  expect(processes().filter(({ command }) => command.includes(join(server.home, "registry")))).toEqual([]);
  expect(existsSync(join(server.home, "registry"))).toBe(false);
  expect(ownState()).toEqual(own);
});

test("again: the same server and template, nothing is made, and it works as before", async () => {
  const pid = readFileSync(join(server.home, "server.pid"), "utf8");
  const before = await api("/templates");
  expect(before.flatMap(({ names }) => names)).toEqual(["quickstart"]);
  const output = await make("quickstart");
  expect(output).toContain(`server already runs (pid ${pid.trim()})`);
  expect(output).toContain("template quickstart is there");
  expect(output).toContain("nothing to do");
  expect(output.slice(0, output.indexOf("[4/4]"))).not.toMatch(/build|created|registry|making|fetch/i);
  expectMainJob(output);
  const used = { spawnCount: expect.any(Number), lastSpawnedAt: expect.any(String) };
  expect(await api("/templates")).toEqual(before.map((template) => ({ ...template, ...used })));
  expect(readFileSync(join(server.home, "server.pid"), "utf8")).toBe(pid);
});

test("make stop: the server is gone with all it had on the host; again it says that none runs", async () => {
  expect(await make("stop")).toBe("server stopped\n");
  expect(await hostObjects(server)).toEqual([]);
  expect(readdirSync(server.home).filter((name) => /^server\.(pid|addr)$/.test(name))).toEqual([]);
  expect(await fetch(`${server.url}/health`).then(String, () => "nobody there")).toBe("nobody there");
  expect(await make("stop")).toBe("no server runs\n");
});
