import { afterAll, beforeAll, expect, test } from "bun:test";
import {
  chmodSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  utimesSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { COMMANDS } from "../../src/cli/commands.ts";
import { type LocalRegistry, startDebianRegistry } from "../support/debian.ts";
import { eventually } from "../support/eventually.ts";
import { TestServer } from "../support/server.ts";
import { Tmux } from "../support/tmux.ts";

/*
 * Every command as a person has it: typed at a real terminal, against a real server with real microVMs. The
 * tests build on each other and run in this order.
 */

const TEMPLATE = "cli";
const UUID = /[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}/;

let server: TestServer;
let registry: LocalRegistry;
let work: string;
let tmux: Tmux;
let id: string;

/** Commands that were typed, as `aenv` was called in the end. */
const typed = new Set<string>();

const run = async (command: string, ms?: number) => {
  note(command);
  return tmux.run(command, ms);
};
const begin = async (command: string) => {
  note(command);
  await tmux.begin(command);
};
function note(line: string): void {
  const aliases: Record<string, string> = { cn: "connect", ls: "list", rm: "delete", snap: "snapshot" };
  for (const [, first, second] of line.matchAll(/\baenv ([a-z]+)(?: ([a-z]+))?/g)) {
    const name = aliases[first!] ?? first!;
    typed.add(["template", "snapshot"].includes(name) ? `${name} ${aliases[second!] ?? second}` : name);
  }
}

beforeAll(async () => {
  work = mkdtempSync(join(tmpdir(), "aenv-cli-"));
  server = await TestServer.create();
  registry = await startDebianRegistry(join(server.home, "registry"));
  await server.start();
  const env = {
    ...server.environment,
    HOME: work,
    XDG_CONFIG_HOME: join(work, "config"),
    PATH: `${resolve(import.meta.dir, "../../dist")}:${server.environment.PATH}`,
  };
  tmux = await Tmux.start(env, { cols: 110, rows: 34 });
  await run(`cd ${work}`);
}, 300_000);

afterAll(async () => {
  await tmux?.[Symbol.asyncDispose]();
  await server?.[Symbol.asyncDispose]();
  await registry?.[Symbol.asyncDispose]();
  rmSync(work, { recursive: true, force: true });
}, 180_000);

test("auth: the key is typed and not seen", async () => {
  await begin("aenv auth");
  await tmux.shows("AENV server URL [http://localhost:8000]: ");
  await tmux.type(server.url);
  await tmux.press("Enter");
  await tmux.shows("API key: ");
  await tmux.type(await server.apiKey());
  await tmux.press("Enter");
  expect(await tmux.status()).toBe(0);
  expect(await tmux.screen()).not.toContain(await server.apiKey());
  expect(statSync(join(work, "config/aenv/credentials")).mode & 0o777).toBe(0o600);
});

test("doctor finds the way to the server", async () => {
  const { status, screen } = await run("aenv doctor");
  expect(status).toBe(0);
  expect(screen).toMatch(/^ok +server +http:\/\/127\.0\.0\.1:\d+ answers in \d+ ms$/m);
  expect(screen).toMatch(/^ok +API key +accepted; 0 sandboxes run$/m);
});

test("pull shows its progress; template list and watch know the outcome", async () => {
  const pulled = await run(`aenv pull ${registry.debian} --name ${TEMPLATE} --cpu 1 --memory 384`, 280_000);
  expect(pulled.screen).toMatch(/Template \S+ is ready\./);
  expect(pulled.status).toBe(0);
  const list = await run("aenv template list");
  expect(list.screen).toMatch(/^NAME +TEMPLATE ID +STATUS/m);
  expect(list.screen).toMatch(new RegExp(`^${TEMPLATE} +${UUID.source} +ready`, "m"));
  expect((await run(`aenv template watch ${TEMPLATE}`)).screen).toContain("is ready.");
}, 300_000);

test("start: a shell with the terminal's size, which Ctrl-C does not end", async () => {
  await begin(`aenv start ${TEMPLATE} --timeout 3000 --env COLOUR=blue --metadata purpose=test`);
  id = (await tmux.shows(/Started sandbox ([0-9a-f-]{36})/, 60_000))[1]!;
  await tmux.shows(/[#$] $/m, 60_000);
  await tmux.type("stty size; echo $COLOUR");
  await tmux.press("Enter");
  await tmux.shows(/^34 110\nblue$/m);
  await tmux.resize(90, 30);
  await eventually("the new size is there", async () => {
    await tmux.type("stty size");
    await tmux.press("Enter");
    await Bun.sleep(300);
    return /^30 90$/m.test(await tmux.screen());
  });
  // A program that says itself that it runs: what is pressed before would be the shell's.
  await tmux.type("sh -c 'echo on-$((1+1));exec sleep 99'");
  await tmux.press("Enter");
  await tmux.shows(/^on-2$/m);
  await tmux.press("C-c");
  await tmux.shows(/^\^C\n+.*[#$] $/m);
  await tmux.type("echo after=$?");
  await tmux.press("Enter");
  await tmux.shows(/^after=130$/m);
  await tmux.type("kept=still-$((40 + 2))");
  await tmux.press("Enter");
}, 180_000);

test("detach and come back", async () => {
  await tmux.press("C-]");
  await tmux.press("C-]");
  expect(await tmux.status()).toBe(0);
  const pid = (await tmux.shows(/aenv cn [0-9a-f-]{36} --pid (\d+)/))[1];
  await tmux.resize(110, 34);
  await begin(`aenv cn ${id} --pid ${pid}`);
  await tmux.shows(/[#$] $/m);
  await tmux.type("echo $kept; stty size");
  await tmux.press("Enter");
  await tmux.shows(/^still-42\n34 110$/m);
  await tmux.type("exit 7");
  await tmux.press("Enter");
  expect(await tmux.status()).toBe(7);
  expect(await tmux.screen()).toContain(`Come back with: aenv cn ${id}`);
}, 180_000);

test("exec: streams, status, input from a pipe, a terminal, a limit of time", async () => {
  expect((await run(`aenv exec ${id} sh -c 'echo out; echo err >&2; exit 5' 2>err >out`)).status).toBe(5);
  expect([readFileSync(join(work, "out"), "utf8"), readFileSync(join(work, "err"), "utf8")]).toEqual([
    "out\n",
    "err\n",
  ]);
  const sum = await run(`seq 1 300000 | aenv exec ${id} sha256sum; seq 1 300000 | sha256sum`);
  const [far, near] = sum.screen.match(/^[0-9a-f]{64}/gm) ?? [];
  expect(far).toBe(near!);
  const piped = await run(`(set -o pipefail; aenv exec ${id} seq 1 1000000 | head -2)`);
  expect(piped.screen).toMatch(/^1\n2\n\[status \d+ 141\]$/m);
  await begin(`aenv exec -it -w /tmp -e NAME=värde ${id} sh -c 'tty; pwd; echo $NAME; read x; echo "<$x>"'`);
  await tmux.shows(/^\/dev\/pts\/\d+\n\/tmp\nvärde$/m);
  await tmux.type("日本");
  await tmux.press("Enter");
  await tmux.shows("<日本>");
  expect(await tmux.status()).toBe(0);
  expect((await run(`aenv exec --timeout 1 ${id} sleep 60`)).status).toBe(124);
  await begin(`aenv exec ${id} sh -c 'echo on; sleep 61.5'`);
  await tmux.shows(/^on$/m);
  await tmux.press("C-c");
  expect(await tmux.status()).toBe(130);
  expect((await run(`aenv exec ${id} pgrep -f 'sleep 61.5'`)).status).not.toBe(0);
}, 180_000);

test("upload and download: a tree, there and back", async () => {
  const tree = join(work, "tree");
  mkdirSync(join(tree, "deep/er"), { recursive: true });
  for (let i = 0; i < 20; i++) writeFileSync(join(tree, `deep/file ${i} ü`), `${i}`.repeat(i * 100));
  writeFileSync(join(tree, "deep/er/.hidden"), Buffer.alloc(3_000_000, 5));
  const up = await run(`aenv upload -j 8 ${id} tree /srv/tree`);
  expect(up.screen).toContain(`Uploaded directory tree to ${id}:/srv/tree`);
  expect(up.status).toBe(0);
  expect((await run(`aenv download ${id} /srv/tree back && diff -r tree back`)).status).toBe(0);
  chmodSync(join(tree, "deep/file 3 ü"), 0o741);
  utimesSync(join(tree, "deep/file 3 ü"), 1_234_567_890, 1_234_567_890);
  symlinkSync("../elsewhere", join(tree, "deep/link"));
  expect((await run(`aenv upload -p ${id} tree /srv/kept && aenv download -p ${id} /srv/kept`)).status).toBe(
    0,
  );
  const listed = await run(
    `(cd tree; find . -printf '%p %m %T@ %l\\n' | cut -d. -f1,2 | sort) >a; (cd kept; find . -printf '%p %m %T@ %l\\n' | cut -d. -f1,2 | sort) >b; diff a b`,
  );
  expect(listed.status).toBe(0);
  expect(statSync(join(work, "kept/deep/file 3 ü")).mtimeMs).toBe(1_234_567_890_000);
}, 180_000);

test("Ctrl-C in the middle of an upload leaves nothing under its name", async () => {
  await run("truncate -s 2G big");
  await begin(`aenv upload ${id} big /srv/never`);
  await tmux.shows(/Uploading {2}\[#*-+\] {2}[\d.]+ [KMG]iB\/2\.0 GiB {2}.*ETA/);
  await tmux.resize(40, 34);
  await tmux.shows(/Uploading {2}\d+% {2}[\d.]+ [KMG]iB\/2\.0 GiB|Uploading {2}\d+%/);
  await tmux.press("C-c");
  expect(await tmux.status()).toBe(130);
  await tmux.resize(110, 34);
  const left = await run(`aenv exec ${id} sh -c 'ls -A /srv; df -m / | tail -1'`);
  expect(left.screen).toMatch(/^kept\ntree$/m);
  await begin(`aenv download ${id} /dev/zero never`);
  expect(await tmux.status()).toBe(1);
  expect(await tmux.screen()).toContain("neither a file nor a directory");
}, 180_000);

test("list, info, logs, metrics and top tell of it", async () => {
  expect((await run("aenv ls")).screen).toMatch(new RegExp(`^${id} +${TEMPLATE} +running +1 +384`, "m"));
  expect((await run("aenv list --output json | tr -d ' \\n'")).screen).toContain(`"sandboxID":"${id}"`);
  const info = await run(`aenv info ${id}`);
  expect(info.screen).toMatch(/^METADATA +purpose=test$/m);
  expect((await run(`aenv info ${id} -o json | grep -c oken`)).screen).toMatch(/^0$/m);
  const log = await run(`aenv logs ${id}`);
  expect(log.status).toBe(0);
  expect(log.screen).toMatch(
    /^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:Z|[+-]\d\d:\d\d) {2}(info|debug|warn|error) /m,
  );
  await begin(`aenv logs -f ${id}`);
  await tmux.shows(/^\d{4}-\d\d-\d\d /m);
  await tmux.press("C-c");
  expect(await tmux.status()).toBe(130);
  const metrics = await run(`aenv metrics ${id} --last 600`);
  expect(metrics.screen).toMatch(/^TIME +CPU % +CPU +MEM/m);
  expect(metrics.screen).toMatch(
    /^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:Z|[+-]\d\d:\d\d) +[\d.]+ +1 +[\d.]+ MiB/m,
  );
  expect((await run("aenv top --once")).screen).toMatch(new RegExp(`^${id} +${TEMPLATE} +[\\d.]+ +1 `, "m"));
  await begin("aenv top --interval 1");
  await tmux.shows(new RegExp(`^1 running at .*; q ends\\n\\nSANDBOX ID.*\\n${id}`, "m"));
  await tmux.resize(60, 10);
  await tmux.shows(/^SANDBOX ID.*…$/m);
  await tmux.press("q");
  expect(await tmux.status()).toBe(0);
  await tmux.resize(110, 34);
  await begin("aenv top");
  await tmux.shows("q ends");
  await tmux.press("C-c");
  expect(await tmux.status()).toBe(130);
  expect(await tmux.screen({ visible: true })).not.toContain("q ends");
}, 180_000);

test("snapshot and fork", async () => {
  const made = await run(`aenv snapshot create ${id} --name checkpoint`);
  const snapshot = /Created snapshot (\S+)/.exec(made.screen)?.[1];
  expect(snapshot).toMatch(UUID);
  expect((await run(`aenv snapshot list --sandbox-id ${id} -o table`)).screen).toMatch(
    new RegExp(`^${snapshot} +checkpoint +-$`, "m"),
  );
  const forked = await run(`aenv fork ${id} --timeout 600 | tee ids; aenv exec $(cat ids) ls /srv`, 120_000);
  expect(forked.screen).toMatch(new RegExp(`^${UUID.source}\nkept\ntree$`, "m"));
  expect((await run("aenv rm $(cat ids)")).screen).toMatch(/^Deleted sandbox /m);
  expect((await run("aenv snap rm checkpoint")).screen).toContain(`Deleted snapshot ${snapshot}`);
}, 240_000);

test("a shell completes commands and the ids of sandboxes that are there", async () => {
  await begin(`source <(aenv completion bash)`);
  expect(await tmux.status()).toBe(0);
  await tmux.type("clear; aenv exec ");
  await tmux.press("Tab");
  await tmux.shows(`aenv exec ${id}`);
  await tmux.type(" echo completed-$((1 + 1))");
  await tmux.press("Enter");
  await tmux.shows(/^completed-2$/m);
  await tmux.type(`clear; aenv upload ${id} tre`);
  await tmux.press("Tab");
  await tmux.shows(`aenv upload ${id} tree/`);
  await tmux.press("C-u");
}, 180_000);

test("through a gateway in front, under a path, all is as before", async () => {
  const seen: string[] = [];
  await using gateway = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    idleTimeout: 0,
    maxRequestBodySize: 1e10,
    fetch(request) {
      const url = new URL(request.url);
      seen.push(url.pathname);
      const to = `${server.url}${url.pathname.replace(/^\/fleet/, "")}${url.search}`;
      const headers = new Headers(request.headers);
      headers.delete("host");
      return fetch(to, {
        method: request.method,
        headers,
        body: request.body,
        redirect: "manual",
        signal: request.signal,
      });
    },
  });
  writeFileSync(
    join(work, "config-of-gateway"),
    `url = "http://127.0.0.1:${gateway.port}/fleet/"\napi_key = "${await server.apiKey()}"\n`,
  );
  await run(
    "export XDG_CONFIG_HOME=$PWD/by; mkdir -p by/aenv; install -m 600 config-of-gateway by/aenv/credentials",
  );
  expect((await run("aenv list")).screen).toContain(id);
  expect((await run("aenv doctor")).screen).toMatch(/^ok +way inside +the agent of \S+ answers$/m);
  const through = await run(
    `echo piped | aenv exec ${id} cat; aenv upload ${id} back /srv/by && aenv download ${id} /srv/by by-tree && diff -r by-tree back`,
  );
  expect(through.screen).toMatch(/^piped$/m);
  expect(through.status).toBe(0);
  await begin(`aenv connect ${id}`);
  await tmux.shows(/[#$] $/m);
  await tmux.type("echo in-$((1 + 1)); exit 4");
  await tmux.press("Enter");
  expect(await tmux.status()).toBe(4);
  expect(await tmux.screen()).toContain("in-2");
  expect(seen.every((path) => path.startsWith("/fleet/"))).toBe(true);
  await run("export XDG_CONFIG_HOME=$PWD/config");
}, 180_000);

test("timeout, pause under an open shell, resume", async () => {
  expect((await run(`aenv timeout ${id} 900`)).screen).toContain(`Timeout for ${id} set to 900s`);
  await begin(`aenv connect ${id}`);
  await tmux.shows(/[#$] $/m);
  await using second = await Tmux.start(
    {
      ...server.environment,
      XDG_CONFIG_HOME: join(work, "config"),
      HOME: work,
      PATH: `${resolve(import.meta.dir, "../../dist")}:${server.environment.PATH}`,
    },
    { cols: 80, rows: 24 },
  );
  note("aenv pause");
  expect((await second.run(`aenv pause ${id}`, 120_000)).screen).toContain(`Paused ${id}`);
  expect(await tmux.status()).toBe(130);
  expect(await tmux.screen()).toContain(`The sandbox was paused. Resume it with: aenv resume ${id}`);
  const refused = await run(`aenv exec ${id} true`);
  expect(refused.status).toBe(1);
  expect(refused.screen).toContain(`resume it with: aenv resume ${id}`);
  expect((await run(`aenv resume ${id} --timeout 900`)).screen).toContain(`Resumed ${id}`);
  expect((await run(`aenv exec ${id} cat '/srv/tree/deep/file 1 ü' | wc -c`)).screen).toMatch(/^100$/m);
}, 240_000);

test("the server ends in the middle of a command and of an upload", async () => {
  await begin(
    `(aenv upload ${id} big /srv/cut 2>upload.err; echo "upload $?") & aenv exec ${id} sh -c 'echo on; sleep 100'; wait`,
  );
  await tmux.shows(/^on$/m);
  await server.kill9();
  await tmux.shows(/^upload 1$/m);
  expect(await tmux.status()).toBe(0); // Of the wait.
  expect(await tmux.screen()).toContain("Error: the connection to the sandbox was cut");
  expect(readFileSync(join(work, "upload.err"), "utf8")).toStartWith("Error: ");
  const refused = await run("aenv list");
  expect(refused.status).toBe(1);
  expect(refused.screen).toContain("cannot reach the server at");
  expect(refused.screen).toContain("make start");
  await server.start();
  expect((await run(`aenv exec ${id} ls /srv`)).screen).toMatch(/^by\nkept\ntree$/m);
}, 180_000);

test("template cancel ends a build that a pull, interrupted, left running", async () => {
  await begin(`aenv pull ${registry.debian} --name half-made --cpu 1 --memory 384`);
  await tmux.shows(/booting /, 60_000);
  await tmux.press("C-c");
  expect(await tmux.status()).toBe(130);
  expect((await run("aenv template cancel half-made")).status).toBe(0);
  const ended = await run("aenv template watch half-made");
  expect(ended.status).toBe(1);
  expect(ended.screen).toContain("cancelled");
}, 180_000);

test("delete, of the sandbox and of the template", async () => {
  expect((await run(`aenv delete ${id}`)).screen).toContain(`Deleted sandbox ${id}`);
  expect((await run(`aenv template delete ${TEMPLATE}`)).screen).toContain("Deleted template");
  const gone = await run(`aenv start ${TEMPLATE}`);
  expect(gone.status).toBe(1);
}, 180_000);

test("no command was left out", () => {
  // Images are built from Dockerfiles in a file of their own.
  const elsewhere = new Set(["build", "completion", "network show"]);
  const missed = COMMANDS.map(({ name }) => name).filter((name) => !typed.has(name) && !elsewhere.has(name));
  expect(missed).toEqual([]);
});
