/**
 * Many resumes at once, again and again, with real VMs: is there a tail, a stall, a sandbox that is forgotten? How
 * long one takes is a matter of the machine: all share its processors, and under emulation a resume costs a quarter of
 * a second of one.
 */
import { cpus } from "node:os";
import { join } from "node:path";
import { startDebianRegistry } from "../support/debian.ts";
import { TestServer } from "../support/server.ts";

const BURST = Number(process.env.AENV_BENCH_BURST ?? 50);
const ROUNDS = Number(process.env.AENV_BENCH_ROUNDS ?? 20);
/** No round begins later than this after the start. */
const SECONDS = Number(process.env.AENV_BENCH_SECONDS ?? 3600);

function quantile(values: readonly number[], q: number): number {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * q))] ?? Number.NaN;
}
const ms = (value: number) => value.toFixed(0);

await using server = await TestServer.create();
await using registry = await startDebianRegistry(join(server.home, "registry"));
await server.start();
const { apiKey } = await server.connection();
/** Body and milliseconds; throws on anything but success. */
const call = async (method: string, path: string, body?: unknown) => {
  const began = performance.now();
  const reply = await fetch(`${server.url}${path}`, {
    method,
    headers: { "x-api-key": apiKey },
    ...(body === undefined ? {} : { body: JSON.stringify(body) }),
  });
  const text = await reply.text();
  if (!reply.ok) throw new Error(`${method} ${path}: ${reply.status} ${text}`);
  return { text, ms: performance.now() - began };
};
await server.run(["auth"], `${server.url}\n${apiKey}\n`);
const pull = await server.run(["pull", registry.debian, "--name", "burst", "--cpu", "1", "--memory", "256"]);
if (pull.exitCode !== 0) throw new Error(pull.stderr);

const ids: string[] = [];
const make = async (): Promise<void> => {
  const { text } = await call("POST", "/v2/sandboxes", { templateID: "burst", timeout: 3600 });
  const { sandboxID } = JSON.parse(text) as { sandboxID: string };
  ids.push(sandboxID);
  await call("POST", `/sandboxes/${sandboxID}/pause`);
};
while (ids.length < BURST) {
  await Promise.all(Array.from({ length: Math.min(5, BURST - ids.length) }, make));
}

console.log(
  `\n## ${BURST} resumes at once, up to ${ROUNDS} times (${cpus().length} x ${cpus()[0]?.model ?? "?"})\n`,
);
console.log(
  "| round | p50 ms | p99 ms | max ms | p99 / p50 | all within, s |\n| --- | --- | --- | --- | --- | --- |",
);
const row = (name: string, values: readonly number[], wallMs: number) => {
  const [p50, p99] = [quantile(values, 0.5), quantile(values, 0.99)];
  const cells = [name, ms(p50), ms(p99), ms(Math.max(...values)), (p99 / p50).toFixed(2)];
  console.log(`| ${[...cells, (wallMs / 1000).toFixed(1)].join(" | ")} |`);
};
const all: number[] = [];
let longest = 0;
for (let round = 1; round <= ROUNDS && performance.now() < SECONDS * 1000; round++) {
  const began = performance.now();
  const times = await Promise.all(
    ids.map(async (id) => (await call("POST", `/sandboxes/${id}/resume`, { timeout: 3600 })).ms),
  );
  const wall = performance.now() - began;
  longest = Math.max(longest, wall);
  all.push(...times);
  row(String(round), times, wall);
  await Promise.all(ids.map((id) => call("POST", `/sandboxes/${id}/pause`)));
}
row("all", all, longest);
for (const id of ids) await call("DELETE", `/sandboxes/${id}`);
const left = JSON.parse((await call("GET", "/v2/sandboxes")).text) as unknown[];
if (left.length > 0) throw new Error(`${left.length} sandboxes are left`);
