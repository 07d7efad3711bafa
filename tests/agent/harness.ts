import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { connect, type Socket } from "node:net";
import { join, resolve } from "node:path";

export { eventually } from "../support/eventually.ts";

const BINARY = resolve(process.env.AENV_ENVD ?? join(import.meta.dir, "../../build/envd"));

/** An agent on a free loopback port with account files of its own; disposal ends it and checks its exit. */
export interface Agent extends AsyncDisposable {
  readonly url: string;
  readonly port: number;
  readonly pid: number;
  /** Directory of this test, `--root` of the agent. */
  readonly dir: string;
  /** What the agent wrote to its error output. */
  errors(): Promise<string>;
}

const PASSWD = [
  // homes of the test alone: a login shell that is killed must not meet the start-up files of this machine
  "root:x:0:0:root:ROOT:/bin/bash",
  "# no account",
  "broken",
  "user:x:54321:54321:A User:HOME:/bin/bash",
  "nogroup:x:65534:65534::/home/that-is-not-there:/usr/sbin/nologin",
  "",
].join("\n");
const GROUP = ["root:x:0:", "user:x:54321:", "extra:x:54400:other,user", "more:x:54401:user", ""].join("\n");

/** `wrapper` gives words to put in front of the command; later options win over the harness's own. */
export async function startAgent(
  args: readonly string[] = [],
  wrapper: (dir: string) => readonly string[] = () => [],
): Promise<Agent> {
  if (!existsSync(BINARY)) throw new Error(`${BINARY} is missing: run make build/envd, or set AENV_ENVD`);
  const dir = mkdtempSync("/tmp/guest-agent-");
  const home = join(dir, "home/user");
  await Bun.$`mkdir -p ${join(dir, "etc")} ${join(dir, "root")} ${home} && chown 54321:54321 ${home} && chmod 755 ${dir}`;
  writeFileSync(join(dir, "etc/passwd"), PASSWD.replace("HOME", home).replace("ROOT", join(dir, "root")));
  writeFileSync(join(dir, "etc/group"), GROUP);
  const child = Bun.spawn(
    [...wrapper(dir), BINARY, "--addr", "127.0.0.1", "--port", "0", "--root", dir, ...args],
    {
      stdin: "ignore",
      stdout: "pipe",
      stderr: Bun.file(join(dir, "stderr.log")),
      env: {
        PATH: "/usr/local/bin:/usr/bin:/bin",
        SECRET_OF_HOST: "leak",
        // for a sanitizer build: freed memory is not kept for long, so that the memory tests mean something
        ASAN_OPTIONS: "quarantine_size_mb=1:thread_local_quarantine_size_kb=64",
      },
    },
  );
  const errors = () => Bun.file(join(dir, "stderr.log")).text();
  let line = "";
  for await (const chunk of child.stdout) {
    line += Buffer.from(chunk).toString();
    if (line.includes("\n")) break;
  }
  const port = Number(/^aenv: agent listening on port (\d+), uptime /.exec(line)?.[1]);
  if (!port) {
    child.kill("SIGKILL");
    throw new Error(`the agent did not start: ${line} ${await errors()}`);
  }
  return {
    url: `http://127.0.0.1:${port}`,
    port,
    pid: child.pid,
    dir,
    errors,
    async [Symbol.asyncDispose]() {
      child.kill("SIGTERM");
      const code = await child.exited;
      const text = await errors();
      rmSync(dir, { recursive: true, force: true });
      if (code !== 0) throw new Error(`the agent ended with ${code} (${child.signalCode}): ${text}`);
    },
  };
}

export type Json = { [key: string]: Json } | Json[] | string | number | boolean | null;
type Headers = Record<string, string>;

/** Unary call in JSON. */
export async function call(agent: Agent, path: string, body: Json, headers: Headers = {}) {
  const response = await fetch(`${agent.url}/${path}`, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body: JSON.stringify(body),
  });
  const text = await response.text();
  return { status: response.status, body: text ? (JSON.parse(text) as Record<string, Json>) : {} };
}

export function frame(payload: string | Uint8Array, flags = 0): Uint8Array<ArrayBuffer> {
  const data = Buffer.from(payload);
  const out = new Uint8Array(5 + data.length);
  out[0] = flags;
  new DataView(out.buffer).setUint32(1, data.length);
  out.set(data, 5);
  return out;
}

export interface ProcessEvent {
  start?: { pid: number };
  data?: { stdout?: string; stderr?: string; pty?: string };
  end?: { exitCode?: number; exited?: boolean; status?: string; error?: string };
  keepalive?: object;
}
export interface Frame {
  event?: ProcessEvent;
  filesystem?: { name: string; type: string; entry?: Record<string, Json> };
  start?: object;
  /** Of the end frame. */
  end?: boolean;
  error?: { code: string; message: string };
}

/** Frames of a JSON stream as they come. */
export async function* frames(response: Response): AsyncGenerator<Frame> {
  let held = new Uint8Array(0);
  if (!response.body) throw new Error("the answer has no body");
  for await (const chunk of response.body) {
    held = Buffer.concat([held, chunk]);
    while (held.length >= 5) {
      const length = new DataView(held.buffer, held.byteOffset).getUint32(1);
      if (held.length < 5 + length) break;
      const value = JSON.parse(Buffer.from(held.subarray(5, 5 + length)).toString()) as Frame;
      yield held[0] === 2 ? { ...value, end: true } : value;
      held = held.slice(5 + length);
    }
  }
}

export async function openStream(
  agent: Agent,
  path: string,
  body: Json,
  headers: Headers = {},
  signal?: AbortSignal,
) {
  return await fetch(`${agent.url}/${path}`, {
    method: "POST",
    headers: { "content-type": "application/connect+json", ...headers },
    body: frame(JSON.stringify(body)),
    signal: signal ?? null,
  });
}

export interface Run {
  pid: number;
  stdout: string;
  stderr: string;
  pty: string;
  end: ProcessEvent["end"];
  error: Frame["error"];
}

/** Reads a process stream to its end; `onEvent` sees every frame as it comes. */
export async function collect(response: Response, onEvent?: (frame: Frame) => void): Promise<Run> {
  const out: Record<"stdout" | "stderr" | "pty", Buffer[]> = { stdout: [], stderr: [], pty: [] };
  const run: Run = { pid: 0, stdout: "", stderr: "", pty: "", end: undefined, error: undefined };
  let ended = false;
  for await (const got of frames(response)) {
    const { event, end, error } = got;
    onEvent?.(got);
    if (end) {
      ended = true;
      run.error = error;
    }
    if (event?.start) run.pid = event.start.pid;
    for (const key of ["stdout", "stderr", "pty"] as const) {
      const text = event?.data?.[key];
      if (text !== undefined) out[key].push(Buffer.from(text, "base64"));
    }
    if (event?.end) run.end = event.end;
  }
  if (!ended) throw new Error("the stream has no end frame");
  for (const key of ["stdout", "stderr", "pty"] as const) run[key] = Buffer.concat(out[key]).toString();
  return run;
}

export async function run(agent: Agent, request: Json, headers: Headers = {}): Promise<Run> {
  return await collect(await openStream(agent, "process.Process/Start", request, headers));
}

/** `/bin/sh -c script`. */
export async function sh(
  agent: Agent,
  script: string,
  extra: Record<string, Json> = {},
  headers: Headers = {},
) {
  return await run(
    agent,
    { process: { cmd: "/bin/sh", args: ["-c", script] }, stdin: false, ...extra },
    headers,
  );
}

export function basic(user: string): Headers {
  return { authorization: `Basic ${Buffer.from(`${user}:`).toString("base64")}` };
}

/** Sends bytes as they are and returns all that comes back until the peer closes (or `until` matches). */
export async function raw(agent: Agent, data: string | Uint8Array, until?: RegExp): Promise<string> {
  return await new Promise((done, failed) => {
    let text = "";
    const socket: Socket = connect(agent.port, "127.0.0.1", () => socket.write(data));
    socket.on("data", (chunk) => {
      text += chunk.toString("latin1");
      if (until?.test(text)) socket.destroy();
    });
    socket.on("close", () => done(text));
    socket.on("error", (error: NodeJS.ErrnoException) =>
      error.code === "ECONNRESET" ? done(text) : failed(error),
    );
    socket.setTimeout(20_000, () => socket.destroy(new Error(`no answer; so far: ${text}`)));
  });
}

export function openFiles(agent: Agent): number {
  return readdirSync(`/proc/${agent.pid}/fd`).length;
}

/** Resident memory in KiB. */
export function rssKiB(agent: Agent): number {
  return Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${agent.pid}/status`, "utf8"))?.[1]);
}
