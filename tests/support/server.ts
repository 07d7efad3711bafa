import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { holdPool } from "./pool.ts";
import { processes } from "./proc.ts";

const ROOT = resolve(import.meta.dir, "../..");
/** In the rig everything is emulated. */
const START_TIMEOUT_MS = process.env.RIG === undefined ? 30_000 : 120_000;

export interface TestServerOptions {
  /** Extra TOML, e.g. `[image.resolver]\nallow_local_paths = true`. */
  readonly toml?: string;
  readonly env?: Readonly<Record<string, string>>;
  /** Starts it another way, e.g. as another user: gets the command line and what has to be that user's. */
  readonly launch?: (argv: readonly string[], paths: { home: string; runtime: string }) => readonly string[];
}

/** The real executable as a server of its own: home, runtime directory, ports and address pools. */
export class TestServer implements AsyncDisposable {
  readonly home: string;
  readonly runtime: string;
  readonly url: string;
  readonly #pool: Disposable;
  readonly #env: Record<string, string>;
  readonly #launch: TestServerOptions["launch"];
  #child: Bun.Subprocess<"ignore", "ignore", Bun.BunFile> | undefined;

  private constructor(
    home: string,
    runtime: string,
    url: string,
    env: Record<string, string>,
    launch: TestServerOptions["launch"],
    pool: Disposable,
  ) {
    this.#pool = pool;
    this.home = home;
    this.runtime = runtime;
    this.url = url;
    this.#env = env;
    this.#launch = launch;
  }

  static async create(options: TestServerOptions = {}): Promise<TestServer> {
    const home = await mkdtemp(join(tmpdir(), "aenv-e2e-"));
    const runtime = await mkdtemp("/run/aenv-t-");
    const port = freePort();
    const { pool, held } = holdPool();
    const config = join(home, "config.toml");
    await writeFile(
      config,
      `[network.internal]\nhost_interaction_cidr = "10.${pool}.0.0/16"\nveth_cidr = "10.${pool + 1}.0.0/16"\n${options.toml ?? ""}\n`,
    );
    const env = {
      PATH: process.env.PATH ?? "/usr/bin:/bin:/usr/sbin:/sbin",
      HOME: home,
      AENV_HOME_PATH: home,
      AENV_RUNTIME_PATH: runtime,
      AENV_DEPS_PATH: join(testHome(), "deps"),
      AENV_CONFIG_PATH: config,
      API_ADDR: `127.0.0.1:${port}`,
      XDG_CONFIG_HOME: join(home, "client"),
      ...options.env,
    };
    return new TestServer(home, runtime, `http://127.0.0.1:${port}`, env, options.launch, held);
  }

  get environment(): Readonly<Record<string, string>> {
    return this.#env;
  }

  get logPath(): string {
    return join(this.home, "server.log");
  }

  get pid(): number {
    if (this.#child === undefined) throw new Error("the server does not run");
    return this.#child.pid;
  }

  /** Starts it and waits for /health; resolves with the milliseconds that took. */
  async start(): Promise<number> {
    const began = performance.now();
    const argv = [join(ROOT, "dist/agentenv"), "serve"];
    this.#child = Bun.spawn([...(this.#launch?.(argv, this) ?? argv)], {
      cwd: this.home,
      env: this.#env,
      stdin: "ignore",
      stdout: "ignore",
      stderr: Bun.file(this.logPath),
    });
    for (;;) {
      if (this.#child.exitCode !== null) throw new Error(`the server ended:\n${await this.log()}`);
      try {
        const { status } = await fetch(`${this.url}/health`);
        if (status === 204) return performance.now() - began;
      } catch (error) {
        if (performance.now() - began > START_TIMEOUT_MS) throw error;
      }
      await Bun.sleep(5);
    }
  }

  async apiKey(): Promise<string> {
    return (await readFile(join(this.home, "secrets/api-key"), "utf8")).trim();
  }

  /** Options for the e2b client. */
  async connection(): Promise<{ apiKey: string; apiUrl: string; sandboxUrl: string }> {
    return { apiKey: await this.apiKey(), apiUrl: this.url, sandboxUrl: this.url };
  }

  async log(): Promise<string> {
    return Bun.file(this.logPath).text();
  }

  /** Runs a program of the executable (the command line, doctor …) against this server. */
  async run(
    args: readonly string[],
    stdin = "",
  ): Promise<{ readonly exitCode: number; readonly stdout: string; readonly stderr: string }> {
    const child = Bun.spawn([join(ROOT, "dist/agentenv"), ...args], {
      cwd: this.home,
      env: this.#env,
      stdin: new Blob([stdin]),
      stdout: "pipe",
      stderr: "pipe",
    });
    const [stdout, stderr, exitCode] = await Promise.all([
      new Response(child.stdout).text(),
      new Response(child.stderr).text(),
      child.exited,
    ]);
    return { exitCode, stdout, stderr };
  }

  async kill9(): Promise<void> {
    this.#child?.kill("SIGKILL");
    await this.#child?.exited;
    this.#child = undefined;
  }

  /** Orderly stop; resolves with the exit status. */
  async stop(): Promise<number> {
    const child = this.#child;
    if (child === undefined) return 0;
    child.kill("SIGTERM");
    await child.exited;
    this.#child = undefined;
    return child.exitCode ?? -1;
  }

  /** Stops it and removes its directories. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
    await rm(this.home, { recursive: true, force: true });
    await rm(this.runtime, { recursive: true, force: true });
    this.#pool[Symbol.dispose]();
  }
}

/** Home whose `deps` hold the guest kernel and the VMM. */
export function testHome(): string {
  return process.env.AENV_TEST_HOME ?? join(ROOT, ".aenv/home");
}

function freePort(): number {
  const listener = Bun.listen({
    hostname: "127.0.0.1",
    port: 0,
    socket: { data: () => undefined },
  });
  const { port } = listener;
  listener.stop(true);
  return port;
}

/** Host objects that belong to a server with this runtime directory and home. */
export async function hostObjects(server: TestServer): Promise<string[]> {
  const found: string[] = [];
  for (const pid of pidsMentioning([server.home, server.runtime])) {
    const command = (await readFile(`/proc/${pid}/cmdline`, "utf8").catch(() => "")).replaceAll("\0", " ");
    // The tests' own registry keeps its files in the server's home.
    if (command.startsWith("docker-registry ")) continue;
    found.push(`process ${pid}: ${command.slice(0, 120)}`);
  }
  const mounts = await readFile("/proc/self/mounts", "utf8");
  for (const line of mounts.split("\n")) {
    if (line.includes(server.runtime)) found.push(`mount ${line.split(" ")[1]}`);
  }
  const prefix = /host_interaction_cidr = "(10\.\d+)\./.exec(
    await readFile(join(server.home, "config.toml"), "utf8"),
  )?.[1];
  const routes = Bun.spawnSync(["ip", "-4", "route"]).stdout.toString();
  for (const line of routes.split("\n")) {
    if (prefix !== undefined && line.startsWith(`${prefix}.`)) found.push(`route ${line.trim()}`);
  }
  return found;
}

const SERVICE_USER = 64_242;

/**
 * As the service runs: an account of its own and two capabilities, nothing of root. What a machine's set-up gives
 * such an account is given in a mount namespace that lasts as long as the server: `/dev/net/tun`, and the executable
 * and the dependencies where it may read them, wherever the checkout is.
 */
export const asServiceUser: NonNullable<TestServerOptions["launch"]> = (
  [executable, ...args],
  { home, runtime },
) => {
  const script = `
    set -e
    mount --make-rprivate /
    mkdir -p "$home/dev" "$home/deps"
    [ -e "$home/dev/tun" ] || mknod -m 666 "$home/dev/tun" c 10 200
    mount --bind "$home/dev/tun" /dev/net/tun
    mount --bind "$AENV_DEPS_PATH" "$home/deps"
    cp "$executable" "$home/agentenv"
    for path in "$home"/* "$runtime"; do [ "$path" = "$home/deps" ] || chown -R ${SERVICE_USER}:${SERVICE_USER} "$path"; done
    chown ${SERVICE_USER}:${SERVICE_USER} "$home"
    caps=-all,+net_admin,+sys_admin
    AENV_DEPS_PATH=$home/deps exec setpriv --reuid=${SERVICE_USER} --regid=${SERVICE_USER} --clear-groups \
      --inh-caps=$caps --ambient-caps=$caps --bounding-set=$caps --no-new-privs "$home/agentenv" "$@"`;
  const variables = `home='${home}' runtime='${runtime}' executable='${executable}'`;
  return ["unshare", "--mount", "/bin/sh", "-c", `${variables}\n${script}`, "sh", ...args];
};

function pidsMentioning(texts: readonly string[]): number[] {
  return processes()
    .filter(({ pid, command }) => pid !== process.pid && texts.some((text) => command.includes(text)))
    .map(({ pid }) => pid);
}
