/**
 * What the guest agent costs and how fast it is, on the host: the binary that runs in every guest, without a machine
 * around it. `make bench-envd`.
 */
import { mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { type Agent, call, eventually, frame, frames, openStream, startAgent } from "../agent/harness.ts";

const BINARY = resolve(process.env.AENV_ENVD ?? join(import.meta.dir, "../../build/envd"));
const MIB = 1 << 20;
const P = "process.Process";

function row(name: string, value: string, note = ""): void {
  console.log(`| ${name.padEnd(40)} | ${value.padStart(20)} | ${note}`);
}
const seconds = (from: number) => (performance.now() - from) / 1000;
const rate = (bytes: number, from: number) => `${(bytes / MIB / seconds(from)).toFixed(0)} MiB/s`;
function quantiles(values: readonly number[]): string {
  const sorted = values.toSorted((a, b) => a - b);
  const pick = (q: number) => (sorted[Math.floor((sorted.length - 1) * q)] ?? Number.NaN).toFixed(2);
  return `${pick(0.5)} / ${pick(0.99)} ms`;
}
function statusKiB(agent: Agent, field: string): number {
  return Number(
    new RegExp(`${field}:\\s+(\\d+)`).exec(readFileSync(`/proc/${agent.pid}/status`, "utf8"))?.[1],
  );
}

/** Processor time of the agent so far, in microseconds: does not depend on what else the machine does. */
function cpuUs(agent: Agent): number {
  return Number(readFileSync(`/proc/${agent.pid}/schedstat`, "utf8").split(" ")[0]) / 1000;
}
const perMiB = (us: number, bytes: number) => `${(us / (bytes / MIB)).toFixed(0)} µs/MiB`;

/** Connections that send the next request when the answer to the last one is there. */
async function requestsPerSecond(agent: Agent, connections: number, ms: number): Promise<[string, string]> {
  const request = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
  let answers = 0;
  const sockets = await Promise.all(
    Array.from({ length: connections }, () =>
      Bun.connect({
        hostname: "127.0.0.1",
        port: agent.port,
        socket: {
          open: (s) => void s.write(request),
          data: (s) => {
            answers++;
            s.write(request);
          },
        },
      }),
    ),
  );
  const before = performance.now();
  const cpu = cpuUs(agent);
  answers = 0;
  await Bun.sleep(ms);
  const result = answers / seconds(before);
  const each = (cpuUs(agent) - cpu) / answers;
  for (const s of sockets) s.terminate();
  return [`${result.toFixed(0)} /s`, `${each.toFixed(1)} µs each`];
}

async function echoes(agent: Agent, rounds: number): Promise<{ first: number[]; whole: number[] }> {
  const first: number[] = [];
  const whole: number[] = [];
  for (let i = 0; i < rounds; i++) {
    const from = performance.now();
    let seen = 0;
    const body = { process: { cmd: "/bin/echo", args: ["hello"] }, stdin: false };
    for await (const f of frames(await openStream(agent, `${P}/Start`, body)))
      if (f.event?.data && !seen) seen = performance.now() - from;
    first.push(seen);
    whole.push(performance.now() - from);
  }
  return { first, whole };
}

/** Bytes of the answer as they come over the wire, unread. */
async function drain(response: Response): Promise<number> {
  let bytes = 0;
  if (!response.body) throw new Error("the answer has no body");
  for await (const chunk of response.body) bytes += chunk.length;
  return bytes;
}

// StartRequest { process { cmd, args… } stdin false } and friends, in protobuf: no base64 in the way.
const field = (number: number, data: Uint8Array | string) => {
  const bytes = Buffer.from(data);
  const length: number[] = [];
  for (let n = bytes.length; ; n >>>= 7) {
    length.push(n > 127 ? (n & 127) | 128 : n);
    if (n <= 127) break;
  }
  return Buffer.concat([Buffer.from([(number << 3) | 2, ...length]), bytes]);
};

async function main(): Promise<void> {
  const dir = mkdtempSync("/dev/shm/envd-bench-");
  // As init starts it in a guest.
  await using agent = await startAgent([], () => ["nice", "-n", "-10"]);
  try {
    console.log("\n## Guest agent\n");
    row("figure", "here", "agent's processor time, or the limit");
    row("---", "---:", "---");
    row("binary", `${(statSync(BINARY).size / 1024).toFixed(0)} KiB`, "1536 KiB");
    await Bun.sleep(300);
    row("RSS, idle", `${statusKiB(agent, "VmRSS")} KiB`, "2048 KiB");
    row("of it anonymous", `${statusKiB(agent, "RssAnon")} KiB`);
    row("GET /health, 1 connection", ...(await requestsPerSecond(agent, 1, 1500)));
    row("GET /health, 32 connections", ...(await requestsPerSecond(agent, 32, 1500)));
    let cpu = cpuUs(agent);
    const { first, whole } = await echoes(agent, 200);
    const each = `${((cpuUs(agent) - cpu) / 200).toFixed(0)} µs each`;
    row("exec echo: to its first byte (p50/p99)", quantiles(first));
    row("exec echo: to the end (p50/p99)", quantiles(whole), each);

    const cores = navigator.hardwareConcurrency;
    const spin = `for i in $(seq ${4 * cores}); do (while :; do :; done) & done; wait`;
    const spinning = openStream(agent, `${P}/Start`, {
      process: { cmd: "/bin/sh", args: ["-c", spin] },
      tag: "spin",
    }).then(drain);
    await Bun.sleep(500);
    const loaded = (await echoes(agent, 30)).whole;
    await call(agent, `${P}/SendSignal`, { process: { tag: "spin" }, signal: "SIGNAL_SIGKILL" });
    await spinning;
    row(`exec echo beside ${4 * cores} spinning processes`, quantiles(loaded), "limit 2000 ms; p50/p99");

    const size = 256 * MIB;
    const out = { process: { cmd: "head", args: ["-c", String(size), "/dev/zero"] }, stdin: false };
    let from = performance.now();
    cpu = cpuUs(agent);
    await drain(await openStream(agent, `${P}/Start`, out));
    row("output of a process, JSON", rate(size, from), perMiB(cpuUs(agent) - cpu, size));
    const proto = { "content-type": "application/connect+proto" };
    const config = Buffer.concat([
      field(1, "head"),
      ...["-c", String(size), "/dev/zero"].map((a) => field(2, a)),
    ]);
    from = performance.now();
    cpu = cpuUs(agent);
    await drain(
      await fetch(`${agent.url}/${P}/Start`, {
        method: "POST",
        headers: proto,
        body: frame(Buffer.concat([field(1, config), Buffer.from([4 << 3, 0])])),
      }),
    );
    row("output of a process, protobuf", rate(size, from), perMiB(cpuUs(agent) - cpu, size));

    const sink = { process: { cmd: "sh", args: ["-c", "cat >/dev/null"] }, tag: "sink", stdin: true };
    const sinking = openStream(agent, `${P}/Start`, sink).then(drain);
    await eventually("sink", async () =>
      JSON.stringify((await call(agent, `${P}/List`, {})).body).includes("sink"),
    );
    const piece = frame(field(2, field(2, field(1, Buffer.alloc(MIB, "x")))));
    let left = 128;
    const body = new ReadableStream({
      type: "bytes",
      start(c) {
        c.enqueue(frame(field(1, field(1, field(2, "sink")))));
      },
      pull(c) {
        if (left-- > 0) c.enqueue(piece.slice());
        else c.close();
      },
    });
    from = performance.now();
    cpu = cpuUs(agent);
    await drain(await fetch(`${agent.url}/${P}/StreamInput`, { method: "POST", headers: proto, body }));
    row("input of a process, protobuf", rate(128 * MIB, from), perMiB(cpuUs(agent) - cpu, 128 * MIB));
    await call(agent, `${P}/CloseStdin`, { process: { tag: "sink" } });
    await sinking;

    writeFileSync(join(dir, "source"), Buffer.alloc(size, "some text, "));
    const to = `${agent.url}/files?path=${join(dir, "target")}`;
    const type = "Content-Type: application/octet-stream";
    from = performance.now();
    cpu = cpuUs(agent);
    await Bun.$`curl -sS -f -X POST -T ${join(dir, "source")} -H ${type} -H Expect: -o /dev/null ${to}`;
    row("upload, raw (to memory)", rate(size, from), perMiB(cpuUs(agent) - cpu, size));
    from = performance.now();
    cpu = cpuUs(agent);
    await Bun.$`curl -sS -f -F file=@${join(dir, "source")} -H Expect: -o /dev/null ${to}`;
    row("upload, multipart (to memory)", rate(size, from), perMiB(cpuUs(agent) - cpu, size));
    from = performance.now();
    cpu = cpuUs(agent);
    await Bun.$`curl -sS -f -o /dev/null ${to}`;
    row("download", rate(size, from), perMiB(cpuUs(agent) - cpu, size));
    row("RSS after all of that", `${statusKiB(agent, "VmRSS")} KiB`);
    row("peak RSS", `${statusKiB(agent, "VmHWM")} KiB`);
  } finally {
    rmSync(dir, { recursive: true, force: true });
  }
}

await main();
