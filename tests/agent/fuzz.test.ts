import { expect, test } from "bun:test";
import { connect } from "node:net";
import { type Agent, frame, startAgent } from "./harness.ts";

const notRoot = process.getuid?.() !== 0;
if (notRoot) console.warn("skipped, needs root: mutated requests to the agent");

/** Deterministic: a failure names its seed. */
function random(seed: number): (below: number) => number {
  let s = seed >>> 0 || 1;
  return (below) => {
    s ^= s << 13;
    s ^= s >>> 17;
    s ^= s << 5;
    return (s >>> 0) % below;
  };
}

function mutate(data: Uint8Array, next: (below: number) => number): Uint8Array {
  let out = Buffer.from(data);
  for (let i = next(6); i >= 0; i--) {
    const at = next(out.length + 1);
    const kind = next(5);
    if (kind === 0 && out.length) out[Math.min(at, out.length - 1)] = next(256);
    else if (kind === 1)
      out = Buffer.concat([out.subarray(0, at), Buffer.from([next(256)]), out.subarray(at)]);
    else if (kind === 2)
      out = Buffer.concat([out.subarray(0, at), out.subarray(Math.min(out.length, at + 1 + next(8)))]);
    else if (kind === 3) out = Buffer.concat([out.subarray(0, at), out.subarray(Math.max(0, at - next(40)))]);
    else out = out.subarray(0, at);
  }
  return out;
}

async function throwAt(agent: Agent, data: Uint8Array): Promise<void> {
  await new Promise<void>((done) => {
    const s = connect(agent.port, "127.0.0.1", () => s.end(data));
    s.on("data", () => undefined);
    s.on("error", () => done());
    s.on("close", () => done());
    s.setTimeout(2000, () => s.destroy());
  });
}

function request(
  path: string,
  type: string,
  body: string | Uint8Array,
  more = "",
  mangled?: (b: Uint8Array) => Uint8Array,
) {
  const data = mangled ? mangled(Buffer.from(body)) : Buffer.from(body);
  const head = `POST ${path} HTTP/1.1\r\nHost: x\r\nContent-Type: ${type}\r\n${more}Connection: close\r\nContent-Length: ${data.length}\r\n\r\n`;
  return Buffer.concat([Buffer.from(head), data]);
}

// A mutated path may lead anywhere: everything but the test's own directory is read-only for this agent. Mounts of other
// tests may go meanwhile.
const READ_ONLY = `mount --bind "$0" "$0"
  while read -r _ target _; do
    case $target in /proc*|/sys*|/dev*|"$0") continue ;; esac
    said=$(mount -o remount,bind,ro "$target" 2>&1) ||
      if grep -qF " $target " /proc/self/mounts; then echo "$said" >&2; exit 1; fi
  done </proc/self/mounts
  exec "$@"`;

test.skipIf(notRoot)(
  "mutated requests of every kind: the agent stays up and answers",
  async () => {
    await using agent = await startAgent([], (dir) => ["unshare", "-m", "sh", "-ec", READ_ONLY, dir]);
    const dir = `${agent.dir}/fuzz`;
    const form = `--b\r\nContent-Disposition: form-data; name="file"; filename="${dir}/a"\r\n\r\nsome\r\n--b\r\nContent-Disposition: form-data; name="file"; filename*=UTF-8''${dir}/%62\r\n\r\nmore\r\n--b--\r\n`;
    const start = JSON.stringify({
      process: { cmd: "true", args: ["a", "é"], envs: { A: "\u0001b" }, cwd: "/" },
      pty: { size: { cols: 3 } },
      tag: "t",
    });
    const list = JSON.stringify({ path: dir, depth: 2 });
    // StatRequest { path }, StartRequest { process { cmd "true" args "x" envs {"k":"v"} } }
    const pbStat = Buffer.concat([Buffer.from([10, dir.length]), Buffer.from(dir)]);
    const pbStart = Buffer.from([
      10, 17, 10, 4, 116, 114, 117, 101, 18, 1, 120, 26, 6, 10, 1, 107, 18, 1, 118,
    ]);
    const zipped = Bun.gzipSync(`some text to compress ${"again and ".repeat(50)}${list}`);
    const kinds: ((m?: (b: Uint8Array) => Uint8Array) => Uint8Array)[] = [
      (m) => request("/filesystem.Filesystem/ListDir", "application/json", list, "", m),
      (m) => request("/filesystem.Filesystem/Stat", "application/proto", pbStat, "", m),
      (m) =>
        request(
          "/process.Process/Start",
          "application/connect+json",
          frame(start),
          "Connect-Timeout-Ms: 2000\r\n",
          m,
        ),
      (m) =>
        request(
          "/process.Process/Start",
          "application/connect+proto",
          frame(pbStart),
          "Connect-Timeout-Ms: 2000\r\n",
          m,
        ),
      (m) =>
        request(`/files?path=${dir}/x`, "application/octet-stream", zipped, "Content-Encoding: gzip\r\n", m),
      (m) => request("/files", "multipart/form-data; boundary=b", form, "", m),
      (m) =>
        request(
          "/files",
          "multipart/form-data; boundary=b",
          Bun.gzipSync(form),
          "Content-Encoding: gzip\r\n",
          m,
        ),
      (m) =>
        request(
          "/init",
          "application/json",
          JSON.stringify({
            envVars: { A: "1" },
            timestamp: "2026-01-01T00:00:00.123+01:00",
            entropy: "AAAA",
          }),
          "",
          m,
        ),
      (m) =>
        request(
          "/files/compose",
          "application/json",
          JSON.stringify({ source_paths: [`${dir}/x`], destination: `${dir}/y` }),
          "",
          m,
        ),
    ];
    const seed0 = Number(process.env.AENV_FUZZ_SEED ?? 1);
    const rounds = Number(process.env.AENV_FUZZ_ROUNDS ?? 60);
    const batch: Promise<void>[] = [];
    for (let round = 0; round < rounds; round++) {
      for (const [k, kind] of kinds.entries()) {
        const next = random((seed0 + round) * 1000 + k + 1);
        // bodies mostly, whole requests (head included) sometimes; never a path outside of our directory
        const data = next(4) ? kind((b) => mutate(b, next)) : mutate(kind(), next);
        batch.push(throwAt(agent, data));
      }
      if (batch.length >= 30) await Promise.all(batch.splice(0));
    }
    await Promise.all(batch);
    const health = await fetch(`${agent.url}/health`);
    expect([health.status, await agent.errors()]).toEqual([204, ""]);
  },
  120_000,
);
