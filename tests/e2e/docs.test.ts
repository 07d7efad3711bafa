import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import client from "e2b/package.json" with { type: "json" };
import { type LocalRegistry, startDebianRegistry } from "../support/debian.ts";
import { asServiceUser, TestServer } from "../support/server.ts";

setDefaultTimeout(180_000);

const ROOT = resolve(import.meta.dir, "../..");
/** What pages call their images; here they are one image from a registry of this machine. */
const IMAGES = ["python:3.12-slim", "debian:12"];

let work: string;
let registry: LocalRegistry;
let server: TestServer;

beforeAll(async () => {
  work = mkdtempSync(join(tmpdir(), "aenv-docs-"));
  registry = await startDebianRegistry(join(work, "registry"));
  server = await TestServer.create({ launch: asServiceUser });
  await server.start();
  const { exitCode, stderr } = await server.run(["auth"], `${server.url}\n${await server.apiKey()}\n`);
  if (exitCode !== 0) throw new Error(stderr);
});

afterAll(async () => {
  await server?.[Symbol.asyncDispose]();
  await registry?.[Symbol.asyncDispose]();
  rmSync(work, { recursive: true, force: true });
});

/** Blocks of a page that are marked to be run, in their order. */
function marked(page: string): { readonly language: string; readonly code: string }[] {
  const text = readFileSync(join(ROOT, page), "utf8");
  return [...text.matchAll(/^```(sh|[jt]s) run\n(.*?)^```$/gms)].map(([, language, code]) => ({
    language: language!,
    code: code!,
  }));
}

async function run(argv: readonly string[], cwd: string): Promise<string> {
  const child = Bun.spawn([...argv], {
    cwd,
    env: {
      ...server.environment,
      PATH: `${join(ROOT, "dist")}:${server.environment.PATH}`,
      E2B_API_URL: server.url,
      E2B_SANDBOX_URL: server.url,
      E2B_API_KEY: await server.apiKey(),
    },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
  });
  const [stdout, stderr, exitCode] = await Promise.all([
    new Response(child.stdout).text(),
    new Response(child.stderr).text(),
    child.exited,
  ]);
  if (exitCode !== 0) throw new Error(`ended with ${exitCode}\n${stdout}\n${stderr}`);
  return stdout;
}

/** Why the client does not run under this machine's Node.js; undefined: it does. */
const nodeIsTooOld = (() => {
  if (Bun.which("node") === null) return "there is no node";
  const version = Bun.spawnSync(["node", "--version"]).stdout.toString().trim().slice(1);
  return Bun.semver.satisfies(version, client.engines.node) ? undefined : `node is ${version}`;
})();
if (nodeIsTooOld !== undefined) console.log(`skipped: README's sample under Node.js: ${nodeIsTooOld}`);

/** A page's shell blocks are one session: variables of one are there in the next. */
async function runPage(page: string): Promise<string> {
  const blocks = marked(page);
  expect(blocks.length).toBeGreaterThan(0);
  const cwd = mkdtempSync(join(work, "page-"));
  let script = blocks
    .filter(({ language }) => language === "sh")
    .map(({ code }) => code)
    .join("\n");
  // A page speaks from the checkout's directory; its server is the one that this environment names.
  script = script.replaceAll("scripts/server.sh", join(ROOT, "scripts/server.sh"));
  for (const image of IMAGES) script = script.replaceAll(image, registry.debian);
  let output = await run(["bash", "-euxo", "pipefail", "-c", script], cwd);
  for (const { language, code } of blocks) {
    // Where the client is found.
    if (language === "ts") output += await run([process.execPath, "-e", code], ROOT);
    if (language !== "js") continue;
    // The template of `make quickstart`; here the page's own.
    const sample = code.replace('"quickstart"', '"py"');
    const engines = [[process.execPath, "-e"]];
    if (nodeIsTooOld === undefined) engines.push(["node", "--input-type=module", "-e"]);
    for (const engine of engines) output += await run([...engine, sample], ROOT);
  }
  return output;
}

test("the server runs as the service does: its own account, two capabilities, nothing of root", () => {
  const status = readFileSync(`/proc/${server.pid}/status`, "utf8");
  expect(status).not.toMatch(/^Uid:.*\t0\b/m);
  const CAP_NET_ADMIN_AND_SYS_ADMIN = "0000000000201000";
  for (const set of ["CapPrm", "CapEff", "CapBnd"]) {
    expect(new RegExp(`^${set}:\\s+(\\S+)`, "m").exec(status)?.[1]).toBe(CAP_NET_ADMIN_AND_SYS_ADMIN);
  }
});

test("README", async () => {
  const output = await runPage("README.md");
  expect(output).toContain("hello\n");
  expect(output).toContain("Directory listing for /");
  // The sample, by each that can run it here.
  const samples = nodeIsTooOld === undefined ? 2 : 1;
  expect(output.match(/^42\nkept over the pause$/gm)).toHaveLength(samples);
  expect(readFileSync(join(ROOT, "README.md"), "utf8")).toContain(
    "needs Node.js 20 (from 20.18.1) or 22 and newer",
  );
  expect(client.engines.node).toBe(">=20.18.1 <21 || >=22");
});

test("getting started", async () => {
  const output = await runPage("docs/getting-started.md");
  expect(output.match(/^42$/gm)).toHaveLength(2);
  expect(output).toContain("from a file\n");
  expect(output).toContain("kept\n");
});
