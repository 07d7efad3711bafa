import { readFile, rm } from "node:fs/promises";
import { join, resolve } from "node:path";

const ROOT = resolve(import.meta.dir, "../..");

export interface LocalRegistry extends AsyncDisposable {
  /** `127.0.0.1:PORT` */
  readonly host: string;
  /** Reference of a real Debian image with python3 in it. */
  readonly debian: string;
}

async function script(...argv: string[]): Promise<string> {
  const child = Bun.spawn(argv, { cwd: ROOT, stdin: "ignore", stdout: "pipe", stderr: "pipe" });
  const [stdout, stderr, code] = await Promise.all([
    new Response(child.stdout).text(),
    new Response(child.stderr).text(),
    child.exited,
  ]);
  if (code !== 0) throw new Error(`${argv.join(" ")} failed (${code}): ${stderr || stdout}`);
  return stdout.trim();
}

/** Debian's docker-registry on loopback with the quickstart's Debian image in it. */
export async function startDebianRegistry(dir: string): Promise<LocalRegistry> {
  const url = await script("scripts/registry.sh", "start", dir);
  try {
    await script("scripts/make-debian-image.sh", ".aenv/image", `${url}/agentenv/debian-python:latest`);
  } catch (error) {
    await script("scripts/registry.sh", "stop", dir);
    throw error;
  }
  const host = url.replace("http://", "");
  // Kept: by the time of disposal the directory may be gone with the server's home that it lies in.
  const pid = Number(await readFile(join(dir, "registry.pid"), "utf8"));
  return {
    host,
    debian: `${host}/agentenv/debian-python:latest`,
    [Symbol.asyncDispose]: async () => {
      const command = await readFile(`/proc/${pid}/cmdline`, "utf8").catch(() => "");
      if (command.includes(dir)) process.kill(pid, "SIGKILL");
      await rm(dir, { recursive: true, force: true });
    },
  };
}
