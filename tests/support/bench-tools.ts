import { existsSync } from "node:fs";
import { mkdir, readdir, rename, rm } from "node:fs/promises";
import { join } from "node:path";

export interface BenchTools {
  readonly wrk: string;
  readonly nginx: string;
  /** Where their libraries are. */
  readonly env: Record<string, string>;
}

async function run(argv: string[], cwd: string): Promise<void> {
  const child = Bun.spawn(argv, { cwd, stdin: "ignore", stdout: "ignore", stderr: "pipe", timeout: 60_000 });
  const err = await new Response(child.stderr).text();
  if ((await child.exited) !== 0)
    throw new Error(`${argv.slice(0, 2).join(" ")} failed: ${err.trim().slice(-300)}`);
}

/**
 * Debian's nginx and wrk, unpacked under .tools and not installed: an installed nginx would start serving
 * on this machine. Rejects when the packages cannot be had.
 */
export async function prepareBenchTools(root: string): Promise<BenchTools> {
  const dir = join(root, ".tools/bench");
  if (!existsSync(dir)) {
    const work = `${dir}.tmp`;
    await rm(work, { recursive: true, force: true });
    await mkdir(work, { recursive: true });
    await run(["apt-get", "download", "nginx", "wrk", "libluajit-5.1-2"], work);
    for (const name of await readdir(work)) await run(["dpkg", "-x", name, work], work);
    await rename(work, dir);
  }
  const libraries = [...new Bun.Glob("usr/lib/*-linux-gnu").scanSync({ cwd: dir, onlyFiles: false })];
  return {
    wrk: join(dir, "usr/bin/wrk"),
    nginx: join(dir, "usr/sbin/nginx"),
    env: {
      PATH: process.env.PATH ?? "",
      LD_LIBRARY_PATH: libraries.map((path) => join(dir, path)).join(":"),
    },
  };
}
