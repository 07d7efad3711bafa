import { spawn } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

/**
 * A guest agent in a few lines, for faults and for what a test wants to see of the host's side. Commands
 * really run, on this machine; files are looked up under `root`.
 */
export interface FakeAgent extends AsyncDisposable {
  readonly address: string;
  readonly inits: Record<string, unknown>[];
  readonly commands: {
    cmd: string;
    args: string[];
    user: string;
    envs: Record<string, string>;
    cwd?: string;
  }[];
  /** Calls of `/fsfreeze`, `/fsfrozen`, `/fsthaw` and `/halt`. */
  readonly holds: string[];
  /** Answers to those, by path: a status, or what is done before 204. */
  readonly onHold: Map<string, number | (() => void)>;
  /** Answers of `/health` before this many probes are refused with 503. */
  refuseHealth: number;
}

/** Other programs "do not exist": a test must not change this machine's accounts. */
const RUNNABLE: ReadonlySet<string> = new Set(["/bin/bash", "/bin/sh"]);

function frame(flags: number, message: unknown): Buffer {
  const payload = Buffer.from(JSON.stringify(message));
  const header = Buffer.alloc(5);
  header[0] = flags;
  header.writeUInt32BE(payload.length, 1);
  return Buffer.concat([header, payload]);
}

function userOf(request: Request): string {
  const header = request.headers.get("authorization") ?? "";
  return Buffer.from(header.replace(/^Basic /, ""), "base64")
    .toString()
    .replace(/:$/, "");
}

export function startFakeAgent(root: string): FakeAgent {
  const state = { refuseHealth: 0 };
  const inits: FakeAgent["inits"] = [];
  const holds: string[] = [];
  const onHold: FakeAgent["onHold"] = new Map();
  const commands: FakeAgent["commands"] = [];
  const children = new Set<ReturnType<typeof spawn>>();
  const connectError = (status: number, code: string, message: string): Response =>
    Response.json({ code, message }, { status });

  const start = async (request: Request): Promise<Response> => {
    const body = Buffer.from(await request.arrayBuffer());
    const message = JSON.parse(body.subarray(5).toString()) as {
      process: { cmd: string; args: string[]; envs: Record<string, string>; cwd?: string };
    };
    const { envs, cwd } = message.process;
    let { cmd, args } = message.process;
    commands.push({ cmd, args, user: userOf(request), envs, ...(cwd === undefined ? {} : { cwd }) });
    if (cmd === "/proc/1/exe" && args[0] === "copy") {
      // The agent's own program, for the files of COPY steps: below the root of this guest.
      cmd = join(import.meta.dir, "../../build/envd");
      args = [...args, "--root", root, "--address", "127.0.0.1"];
    } else if (cmd === "/proc/1/exe" && args[0] === "pack") {
      cmd = join(import.meta.dir, "../../build/envd");
      args = ["pack", "--root", root, ...args.slice(1)];
    } else if (!RUNNABLE.has(cmd)) {
      const error = { error: { code: "invalid_argument", message: `exec: ${cmd}: not found` } };
      return new Response(frame(2, error), { headers: { "content-type": "application/connect+json" } });
    }
    const limit = Number(request.headers.get("connect-timeout-ms") ?? 0);
    let gone = false;
    const stream = new ReadableStream<Uint8Array>({
      cancel() {
        gone = true;
      },
      start(controller) {
        const child = spawn(cmd, args, {
          // No profile of this machine's user; a group of its own, so that all of it can be ended.
          env: { PATH: process.env.PATH, HOME: "/nonexistent", ...envs },
          stdio: ["ignore", "pipe", "pipe"],
          detached: true,
        });
        children.add(child);
        let ended = false;
        const end = (...frames: Buffer[]): void => {
          children.delete(child);
          if (ended || gone) return;
          ended = true;
          for (const part of frames) controller.enqueue(part);
          controller.close();
        };
        const timer =
          limit === 0
            ? undefined
            : setTimeout(() => {
                process.kill(-child.pid!, "SIGKILL");
                end(frame(2, { error: { code: "deadline_exceeded", message: "timeout" } }));
              }, limit);
        child.on("spawn", () => {
          if (!gone) controller.enqueue(frame(0, { event: { start: { pid: child.pid } } }));
        });
        child.on("error", (error) =>
          end(frame(2, { error: { code: "invalid_argument", message: error.message } })),
        );
        child.stdout.on("data", (data: Buffer) => {
          if (!ended && !gone)
            controller.enqueue(frame(0, { event: { data: { stdout: data.toString("base64") } } }));
        });
        child.stderr.on("data", (data: Buffer) => {
          if (!ended && !gone)
            controller.enqueue(frame(0, { event: { data: { stderr: data.toString("base64") } } }));
        });
        child.on("close", (code, signal) => {
          clearTimeout(timer);
          const event =
            signal === null
              ? { ...(code === 0 ? {} : { exitCode: code }), exited: true, status: `exit status ${code}` }
              : { exitCode: -1, status: `signal: ${signal === "SIGKILL" ? "killed" : signal}` };
          end(frame(0, { event: { end: event } }), frame(2, {}));
        });
      },
    });
    return new Response(stream, { headers: { "content-type": "application/connect+json" } });
  };

  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    idleTimeout: 0,
    async fetch(request) {
      const url = new URL(request.url);
      switch (url.pathname) {
        case "/health":
          if (state.refuseHealth > 0) {
            state.refuseHealth -= 1;
            return new Response(null, { status: 503 });
          }
          return new Response(null, { status: 204 });
        case "/init":
          inits.push((await request.json()) as Record<string, unknown>);
          return new Response(null, { status: 204, headers: { "x-envd-version": "0.5.15" } });
        case "/fsfreeze":
        case "/fsfrozen":
        case "/fsthaw":
        case "/halt": {
          holds.push(url.pathname);
          const answer = onHold.get(url.pathname);
          if (typeof answer === "number") return connectError(answer, "refused", "as the test wants it");
          answer?.();
          return new Response(null, { status: 204 });
        }
        case "/files": {
          const path = join(root, url.searchParams.get("path") ?? "");
          if (request.method === "POST") {
            writeFileSync(path, new Uint8Array(await request.arrayBuffer()));
            return Response.json([]);
          }
          return existsSync(path)
            ? new Response(readFileSync(path))
            : connectError(404, "not_found", "no such file");
        }
        case "/process.Process/Start":
          return start(request);
        case "/filesystem.Filesystem/Stat": {
          const { path } = (await request.json()) as { path: string };
          return existsSync(join(root, path)) ? Response.json({}) : connectError(404, "not_found", path);
        }
        case "/filesystem.Filesystem/MakeDir": {
          const { path } = (await request.json()) as { path: string };
          if (existsSync(join(root, path))) return connectError(409, "already_exists", path);
          mkdirSync(join(root, path), { recursive: true });
          return Response.json({});
        }
        default:
          return connectError(404, "unimplemented", url.pathname);
      }
    },
  });

  return {
    address: `127.0.0.1:${server.port}`,
    inits,
    commands,
    holds,
    onHold,
    get refuseHealth() {
      return state.refuseHealth;
    },
    set refuseHealth(count: number) {
      state.refuseHealth = count;
    },
    async [Symbol.asyncDispose]() {
      for (const child of children) process.kill(-child.pid!, "SIGKILL");
      await server.stop(true);
    },
  };
}
