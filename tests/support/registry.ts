import { spawn } from "node:child_process";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";

export interface TestRegistry extends AsyncDisposable {
  /** e.g. `http://127.0.0.1:40123`. */
  readonly url: string;
  /** As in an image reference, e.g. `127.0.0.1:40123`. */
  readonly host: string;
  /** Where its content lies, for tests that damage it. */
  readonly storageDir: string;
}

export interface RegistryOptions {
  /** User names and passwords; absent: no login. */
  readonly users?: Readonly<Record<string, string>>;
}

const START_TIMEOUT_MS = 15_000;

/** Starts Debian's docker-registry on a free loopback port with its own storage; disposal removes both. */
export async function startRegistry(options: RegistryOptions = {}): Promise<TestRegistry> {
  const directory = await mkdtemp(join(tmpdir(), "aenv-registry-"));
  await using undo = new AsyncDisposableStack();
  undo.defer(() => rm(directory, { recursive: true, force: true }));
  const storageDir = join(directory, "storage");
  let auth = "";
  if (options.users !== undefined) {
    const lines = await Promise.all(
      Object.entries(options.users).map(
        async ([user, password]) =>
          `${user}:${await Bun.password.hash(password, { algorithm: "bcrypt", cost: 4 })}\n`,
      ),
    );
    await writeFile(join(directory, "htpasswd"), lines.join(""));
    auth = `auth:\n  htpasswd:\n    realm: test\n    path: ${join(directory, "htpasswd")}\n`;
  }
  const config = join(directory, "config.yml");
  await writeFile(
    config,
    `version: 0.1\nlog:\n  level: info\nstorage:\n  filesystem:\n    rootdirectory: ${storageDir}\n  delete:\n    enabled: true\n` +
      `http:\n  addr: 127.0.0.1:0\n${auth}`,
  );
  const child = spawn("docker-registry", ["serve", config], {
    stdio: ["ignore", "ignore", "pipe"],
    env: { PATH: process.env.PATH, OTEL_TRACES_EXPORTER: "none" },
  });
  const ended = new Promise<void>((resolve) => child.once("close", () => resolve()));
  undo.defer(async () => {
    child.kill("SIGKILL");
    await ended;
  });
  const port = await new Promise<string>((resolve, reject) => {
    let said = "";
    const timer = setTimeout(
      () => reject(new Error(`docker-registry did not start: ${said}`)),
      START_TIMEOUT_MS,
    );
    child.once("error", (cause) =>
      reject(new Error("docker-registry cannot be run; install docker-registry", { cause })),
    );
    child.stderr.setEncoding("utf8").on("data", (text: string) => {
      said = (said + text).slice(-8192);
      const match = /listening on 127\.0\.0\.1:(\d+)/.exec(said);
      if (match === null) return;
      clearTimeout(timer);
      resolve(match[1]!);
    });
    void ended.then(() => {
      clearTimeout(timer);
      reject(new Error(`docker-registry ended: ${said}`));
    });
  });
  const held = undo.move();
  return {
    url: `http://127.0.0.1:${port}`,
    host: `127.0.0.1:${port}`,
    storageDir,
    [Symbol.asyncDispose]: () => held.disposeAsync(),
  };
}
