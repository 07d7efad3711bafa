import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readlinkSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { createControlApi } from "../../src/api/index.ts";
import { AenvError } from "../../src/lib/errors.ts";
import { newId } from "../../src/lib/ids.ts";
import { createLogger } from "../../src/lib/log.ts";
import { createObserver } from "../../src/observability/index.ts";
import type { Orchestrator, SandboxRecord } from "../../src/orchestrator/types.ts";
import { type Front, startFront } from "../../src/proxy/index.ts";
import type { SnapshotRecord } from "../../src/snapshot/types.ts";
import { logOf } from "../../src/template/log-reader.ts";
import type { BuildLogEntry, BuildStartRequest, TemplateService } from "../../src/template/types.ts";
import { fakeReport } from "./fake-network.ts";

const ROOT = join(import.meta.dir, "../..");
const ENVD = join(ROOT, "build/envd");
const MAIN = join(ROOT, "src/main.ts");

/** Why tests with a guest cannot run here; undefined when they can. */
export const noGuest = existsSync(ENVD) ? undefined : "build/envd is missing: run `make native`";

export const API_KEY = `e2b_${"0123456789abcdef".repeat(4)}`;

export interface Finished {
  readonly code: number;
  readonly out: string;
  readonly err: string;
}

/** A program on a terminal of its own. */
export interface OnTerminal {
  readonly pid: number;
  /** All that the terminal has shown so far. */
  readonly screen: () => string;
  type(text: string): void;
  resize(cols: number, rows: number): void;
  /** Resolves when the screen, from `since` on, has the text; fails after `ms`. */
  shows(text: string | RegExp, ms?: number, since?: number): Promise<void>;
  readonly exited: Promise<number>;
  /** Pids of the `aenv` processes below. */
  aenvPid(): Promise<number>;
}

export interface Build {
  status: "waiting" | "building" | "ready" | "error";
  reason?: { message: string; step?: string };
  readonly logs: BuildLogEntry[];
  readonly request: BuildStartRequest;
}

/** A service of which the command line uses only these members: any other one fails loudly. */
function only<Service extends object>(members: Partial<Service>): Service {
  return new Proxy(members, {
    get(target, name) {
      if (name in target) return target[name as keyof Service];
      throw new Error(`the rig has no ${String(name)}`);
    },
  }) as Service;
}

/**
 * A server of real parts (front, proxy, API) over an orchestrator and a template service in memory. Its
 * guest is the real agent on an address of this machine; all sandboxes share it.
 */
export class CliRig implements AsyncDisposable {
  readonly dir = mkdtempSync("/tmp/cli-test-");
  readonly records = new Map<string, SandboxRecord>();
  readonly builds = new Map<string, Build>();
  /** Archives of COPY steps by their hash. */
  readonly uploads = new Map<string, Buffer>();
  readonly templates = new Map<string, SnapshotRecord>();
  readonly calls: string[] = [];
  /** What happens to a build when it is started. */
  onBuild: (build: Build) => void = (build) => {
    build.status = "ready";
  };
  #gone = new Map<string, AbortController>();
  #front: Front | undefined;
  #agent: Bun.Subprocess<"ignore", "pipe", "inherit"> | undefined;
  readonly #running = new Set<Bun.Subprocess>();
  readonly #address =
    `127.${64 + Math.floor(Math.random() * 60)}.${Math.floor(Math.random() * 256)}.${1 + Math.floor(Math.random() * 250)}`;
  #port = 0;

  static async start(): Promise<CliRig> {
    const rig = new CliRig();
    mkdirSync(join(rig.dir, "root/etc"), { recursive: true });
    mkdirSync(join(rig.dir, "home"));
    // Users of the guest: shells must not leave their history in real homes.
    writeFileSync(join(rig.dir, "root/etc/passwd"), `root:x:0:0:root:${rig.dir}/home:/bin/bash\n`);
    writeFileSync(join(rig.dir, "root/etc/group"), "root:x:0:\n");
    rig.listen();
    rig.login();
    return rig;
  }

  get url(): string {
    return `http://127.0.0.1:${this.#port}`;
  }

  /** Starts serving, again on the same port after `silence`. */
  listen(): void {
    const log = createLogger("cli-test");
    log.level = "silent";
    const orchestrator = this.#orchestrator();
    const control = createControlApi({
      orchestrator,
      templates: this.#templateService(),
      observer: createObserver({
        identity: { nodeId: "cli-test", clusterId: newId(), serviceInstanceId: newId() },
        version: "1.2.3",
        commit: "test",
        nodeVisible: true,
        consolePath: async () => undefined,
        log,
      }),
      apiKeys: [API_KEY],
      defaultTimeoutSeconds: 15,
      sandboxProxyDomains: [],
      version: "1.2.3",
      log,
    });
    this.#front = startFront({
      hostname: "127.0.0.1",
      port: this.#port,
      domains: [],
      apiKeys: [API_KEY],
      control: {
        hasPath: control.hasPath,
        handle: (request) => {
          this.calls.push(`${request.method} ${new URL(request.url).pathname}`);
          return control.handle(request);
        },
      },
      orchestrator,
      log,
    });
    this.#port = this.#front.port;
  }

  /** Stops serving: whoever asks is refused. */
  async silence(): Promise<void> {
    await this.#front?.stop(0);
    this.#front = undefined;
  }

  login(url = this.url, apiKey = API_KEY): void {
    mkdirSync(join(this.dir, "config/aenv"), { recursive: true });
    writeFileSync(join(this.dir, "config/aenv/credentials"), `url = "${url}"\napi_key = "${apiKey}"\n`);
  }

  /** Starts the guest's agent. */
  async guest(): Promise<void> {
    this.#agent = Bun.spawn(
      [ENVD, "--addr", this.#address, "--port", "49983", "--root", join(this.dir, "root"), "--no-cgroup"],
      { stdin: "ignore", stdout: "pipe", stderr: "inherit", cwd: this.dir },
    );
    const { value } = await this.#agent.stdout.getReader().read();
    if (
      !Buffer.from(value ?? [])
        .toString()
        .includes("listening")
    )
      throw new Error("the agent did not start");
  }

  /** Files that the guest's agent is writing and that have no name yet. */
  unnamedFiles(): number {
    const fds = `/proc/${this.#agent!.pid}/fd`;
    return readdirSync(fds).filter((fd) => {
      try {
        return readlinkSync(join(fds, fd)).endsWith(" (deleted)");
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code === "ENOENT") return false; // closed meanwhile
        throw error;
      }
    }).length;
  }

  sandbox(patch: Partial<SandboxRecord> = {}): string {
    const id = newId();
    this.records.set(id, {
      id,
      templateId: newId(),
      alias: "debian",
      state: "running",
      startedAt: "2026-01-02T03:04:05.678Z",
      endAt: new Date(Date.now() + 600_000).toISOString(),
      timeoutSeconds: 600,
      onTimeout: "kill",
      autoResume: false,
      secure: true,
      metadata: {},
      envVars: {},
      cpuCount: 2,
      memoryMiB: 512,
      diskSizeMiB: 10_240,
      envdVersion: "0.5.15",
      ...patch,
    });
    return id;
  }

  template(name: string | undefined, status: Build["status"] = "ready"): SnapshotRecord {
    const id = newId();
    const record: SnapshotRecord = {
      id,
      templateId: id,
      aliases: name === undefined ? [] : [name],
      public: true,
      source: { kind: "template", build: { status } },
      resources: { cpuCount: 1, memoryMiB: 256, diskSizeMiB: 1024 },
      createdAt: "2026-01-02T03:04:05.000Z",
      updatedAt: "2026-01-02T03:04:05.000Z",
    };
    this.templates.set(id, record);
    this.builds.set(id, { status, logs: [], request: { steps: [] } });
    return record;
  }

  /** Of sandboxes; what is listed of them. */
  readonly snapshots: SnapshotRecord[] = [];

  /** What every running sandbox is told of its network. */
  networkReport = fakeReport();
  /** What the last pause asked for. */
  pausedWithMemory: boolean | undefined;

  /** Cuts all connections into a sandbox, as when it goes away. */
  cut(id: string): void {
    this.#gone.get(id)?.abort();
    this.#gone.delete(id);
  }

  env(extra: Record<string, string> = {}): Record<string, string> {
    return {
      PATH: `${this.dir}/bin:${process.env.PATH}`,
      HOME: join(this.dir, "home"),
      XDG_CONFIG_HOME: join(this.dir, "config"),
      TERM: "xterm-256color",
      LANG: "C.UTF-8",
      TZ: "UTC",
      ...extra,
    };
  }

  /** Puts an `aenv` on the PATH that `env` gives. */
  installCommand(): void {
    mkdirSync(join(this.dir, "bin"), { recursive: true });
    writeFileSync(
      join(this.dir, "bin/aenv"),
      `#!/bin/bash\nexec -a aenv "${process.execPath}" "${MAIN}" "$@"\n`,
      {
        mode: 0o755,
      },
    );
  }

  /** Program and arguments that run `aenv`. */
  command(args: readonly string[]): string[] {
    return [process.execPath, MAIN, ...args];
  }

  spawn(args: readonly string[], options: { env?: Record<string, string>; stdin?: string } = {}) {
    const child = Bun.spawn(this.command(args), {
      argv0: "aenv",
      env: this.env(options.env),
      cwd: this.dir,
      stdin: options.stdin === undefined ? "ignore" : Buffer.from(options.stdin),
      stdout: "pipe",
      stderr: "pipe",
    });
    this.#track(child);
    return child;
  }

  async aenv(
    args: readonly string[],
    options: { env?: Record<string, string>; stdin?: string } = {},
  ): Promise<Finished> {
    const child = this.spawn(args, options);
    const [out, err, code] = await Promise.all([
      new Response(child.stdout).text(),
      new Response(child.stderr).text(),
      child.exited,
    ]);
    return { code, out, err };
  }

  /** Runs a shell script on a new terminal; `aenv` in it is this project's. */
  terminal(script: string, env: Record<string, string> = {}): OnTerminal {
    this.installCommand();
    let shown = "";
    const decoder = new TextDecoder();
    let changed: () => void = () => undefined;
    const child = Bun.spawn(["bash", "--norc", "-c", script], {
      env: this.env(env),
      cwd: this.dir,
      terminal: {
        cols: 80,
        rows: 24,
        data: (_terminal, bytes) => {
          shown += decoder.decode(bytes, { stream: true });
          changed();
        },
      },
    });
    this.#track(child);
    const terminal = child.terminal!;
    return {
      pid: child.pid,
      screen: () => shown,
      type: (text) => {
        terminal.write(text);
      },
      resize: (cols, rows) => terminal.resize(cols, rows),
      exited: child.exited,
      async shows(text, ms = 30_000, since = 0) {
        const deadline = performance.now() + ms;
        const there = () =>
          typeof text === "string" ? shown.slice(since).includes(text) : text.test(shown.slice(since));
        while (!there()) {
          const left = deadline - performance.now();
          if (left <= 0)
            throw new Error(
              `the terminal does not show ${text} but:\n${JSON.stringify(shown.slice(-2_000))}`,
            );
          const { promise, resolve } = Promise.withResolvers<void>();
          changed = resolve;
          const timer = setTimeout(resolve, Math.min(left, 200));
          await promise;
          clearTimeout(timer);
        }
      },
      async aenvPid() {
        const children = await Bun.file(`/proc/${child.pid}/task/${child.pid}/children`).text();
        for (const pid of children.trim().split(" ")) {
          if (pid !== "" && (await Bun.file(`/proc/${pid}/cmdline`).text()).includes("main.ts"))
            return Number(pid);
        }
        throw new Error("aenv does not run below this shell");
      },
    };
  }

  #track(child: Bun.Subprocess): void {
    this.#running.add(child);
    child.exited.then(
      () => this.#running.delete(child),
      () => this.#running.delete(child),
    );
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const child of this.#running) child.kill("SIGKILL");
    await Promise.all([...this.#running].map((child) => child.exited));
    await this.silence();
    if (this.#agent !== undefined) {
      this.#agent.kill("SIGTERM");
      await this.#agent.exited;
    }
    rmSync(this.dir, { recursive: true, force: true });
  }

  // ---- the server's inside ----

  #find(id: string): SandboxRecord {
    const record = this.records.get(id);
    if (record !== undefined) return record;
    throw new AenvError({
      code: "sandbox_not_found",
      status: 404,
      message: `sandbox ${id} was not found`,
      remediation: "list the sandboxes there are with GET /v2/sandboxes or `aenv list`",
    });
  }

  #orchestrator(): Orchestrator {
    const change = (id: string, patch: Partial<SandboxRecord>) => {
      const record = { ...this.#find(id), ...patch };
      this.records.set(id, record);
      return record;
    };
    const deadline = (seconds: number) => new Date(Date.now() + seconds * 1000).toISOString();
    return only<Orchestrator>({
      create: async (request) => {
        if (request.template === "missing") {
          throw new AenvError({
            code: "template_not_found",
            status: 404,
            message: "template missing was not found",
            remediation: "list the templates there are with `aenv template list`",
            cause: new Error("no such alias"),
          });
        }
        const id = this.sandbox({ alias: request.template, timeoutSeconds: request.timeoutSeconds });
        return this.#find(id);
      },
      get: (id) => this.#find(id),
      networkReport: async (id) => {
        if (this.#find(id).state !== "running") {
          throw new AenvError({
            code: "sandbox_state_conflict",
            status: 409,
            message: "the sandbox is paused",
          });
        }
        return this.networkReport;
      },
      list: () => [...this.records.values()],
      listSnapshots: async () => [...this.snapshots],
      kill: async (id) => {
        this.#find(id);
        this.records.delete(id);
        this.cut(id);
      },
      pause: async (id, options) => {
        this.pausedWithMemory = options?.memory;
        if (this.#find(id).state === "paused") {
          throw new AenvError({
            code: "sandbox_state_conflict",
            status: 409,
            message: "the sandbox is paused",
          });
        }
        change(id, { state: "paused" });
        this.cut(id);
      },
      resume: async (id, seconds) => change(id, { state: "running", endAt: deadline(seconds) }),
      connect: async (id, seconds) => {
        const resumed = this.#find(id).state === "paused";
        return { record: change(id, { state: "running", endAt: deadline(seconds) }), resumed };
      },
      setTimeout: async (id, seconds) => {
        change(id, { endAt: deadline(seconds) });
      },
      refresh: async (id) => {
        this.#find(id);
      },
      access: (id) => (this.records.has(id) ? { secure: true, allowPublicTraffic: true } : undefined),
      route: (id) => {
        const record = this.records.get(id);
        if (record === undefined) return { kind: "not_found" };
        if (record.state !== "running") return { kind: "paused", autoResume: false };
        let gone = this.#gone.get(id);
        if (gone === undefined) {
          gone = new AbortController();
          this.#gone.set(id, gone);
        }
        return { kind: "ready", hostAddress: this.#address, instanceId: id, gone: gone.signal };
      },
      accessToken: (id) => `envd-${id}`,
      trafficToken: (id) => `traffic-${id}`,
      timings: () => ({}),
    });
  }

  #templateService(): TemplateService {
    const current = (id: string): SnapshotRecord => {
      const record = this.templates.get(id)!;
      const build = this.builds.get(id)!;
      return {
        ...record,
        source: {
          kind: "template",
          build: { status: build.status, ...(build.reason === undefined ? {} : { reason: build.reason }) },
        },
      };
    };
    // A name is that of the last build it was given to.
    const resolve = (name: string) =>
      [...this.templates.values()].findLast((record) => record.id === name || record.aliases.includes(name));
    return only<TemplateService>({
      create: async (request) => {
        const record = this.template(request.name, "waiting");
        return { templateId: record.id, buildId: record.id, alias: request.name, tags: ["default"] };
      },
      startBuild: async (_templateId, buildId, request) => {
        const build: Build = { status: "building", logs: [], request };
        this.builds.set(buildId, build);
        this.onBuild(build);
      },
      build: async (_templateId, buildId) => {
        const record = this.templates.get(buildId);
        if (record === undefined) {
          throw new AenvError({ code: "build_not_found", status: 404, message: "no such build" });
        }
        const { source } = current(buildId);
        if (source.kind !== "template") throw new Error("not a build");
        return { record, build: source.build, logs: logOf(() => this.builds.get(buildId)!.logs) };
      },
      hasFiles: async (_templateId, hash) => this.uploads.has(hash),
      putFiles: async (_templateId, hash, body) => {
        const chunks: Uint8Array[] = [];
        for await (const chunk of body) chunks.push(Uint8Array.from(chunk));
        this.uploads.set(hash, Buffer.concat(chunks));
      },
      cancel: async (_templateId, buildId) => {
        const build = this.builds.get(buildId)!;
        build.status = "error";
        build.reason = { message: "the build was cancelled" };
      },
      list: async () => [...this.templates.keys()].map(current),
      resolve: async (name) => resolve(name),
      delete: async (name) => {
        const record = resolve(name);
        if (record === undefined) {
          throw new AenvError({
            code: "template_not_found",
            status: 404,
            message: `template ${name} was not found`,
          });
        }
        this.templates.delete(record.id);
      },
    });
  }
}
