/**
 * Compiles src/main.ts and everything it embeds into dist/agentenv, and links dist/aenv to it.
 *   build.ts [--out FILE] [--version TEXT] [--cli-for TARGET]
 * --cli-for  only the command line (src/aenv.ts), for linux-arm64, darwin-arm64 or darwin-x64; the Bun of that
 *            platform comes from its npm package
 */
import { existsSync } from "node:fs";
import { mkdir, mkdtemp, rename, rm, symlink } from "node:fs/promises";
import { tmpdir } from "node:os";
import { basename, join, resolve } from "node:path";
import { parseArgs } from "node:util";
import pkg from "../package.json" with { type: "json" };

/** npm's packages with the Bun of each platform the command line is built for. */
const BUN_PACKAGES: Readonly<Record<string, { readonly target: string; readonly npm: string }>> = {
  "linux-arm64": { target: "bun-linux-arm64", npm: "@oven/bun-linux-aarch64" },
  "darwin-arm64": { target: "bun-darwin-arm64", npm: "@oven/bun-darwin-aarch64" },
  "darwin-x64": { target: "bun-darwin-x64", npm: "@oven/bun-darwin-x64" },
};

function run(argv: string[], cwd?: string): string {
  const { exitCode, stdout, stderr } = Bun.spawnSync(argv, {
    stdout: "pipe",
    stderr: "pipe",
    ...(cwd ? { cwd } : {}),
  });
  if (exitCode !== 0)
    throw new Error(`${argv.slice(0, 3).join(" ")} failed (${exitCode})\n${stdout}${stderr}`);
  return stdout.toString().trim();
}

/** The Bun executable of another platform, kept in .tools/. */
async function foreignBun(name: string): Promise<string> {
  const found = BUN_PACKAGES[name];
  if (found === undefined)
    throw new Error(`--cli-for must be one of ${Object.keys(BUN_PACKAGES).join(", ")}`);
  const path = resolve(`.tools/bun-${Bun.version}-${name}`);
  if (existsSync(path)) return path;
  const work = await mkdtemp(join(tmpdir(), "bun-"));
  try {
    const archive = run(["npm", "pack", "--silent", `${found.npm}@${Bun.version}`], work)
      .split("\n")
      .at(-1)!;
    run(["tar", "-xzf", archive, "package/bin/bun"], work);
    await mkdir(".tools", { recursive: true });
    run(["cp", join(work, "package/bin/bun"), `${path}.tmp`]);
    await rename(`${path}.tmp`, path);
    return path;
  } finally {
    await rm(work, { recursive: true, force: true });
  }
}

const { values: flags } = parseArgs({
  options: { out: { type: "string" }, version: { type: "string" }, "cli-for": { type: "string" } },
});
const started = performance.now();
const platform = flags["cli-for"];
const out = resolve(flags.out ?? (platform === undefined ? "dist/agentenv" : `dist/aenv-${platform}`));
const commit =
  Bun.spawnSync(["git", "rev-parse", "--short=12", "HEAD"]).stdout.toString().trim() || "unknown";

// The name is embedded: the same sources give the same bytes under the same name only.
await mkdir("build", { recursive: true });
const staging = await mkdtemp(resolve("build/compile-"));
try {
  const staged = join(staging, basename(out));
  run([
    ...[process.execPath, "build", "--compile", "--minify", "--format=esm", "--sourcemap"],
    ...["--no-compile-autoload-dotenv", "--no-compile-autoload-bunfig"],
    "--compile-exec-argv=--max-http-header-size=131072",
    ...["--define", `BUILD_VERSION=${JSON.stringify(flags.version ?? pkg.version)}`],
    ...["--define", `BUILD_COMMIT=${JSON.stringify(commit)}`],
    ...(platform === undefined
      ? ["--bytecode"]
      : [
          `--target=${BUN_PACKAGES[platform]?.target}`,
          `--compile-executable-path=${await foreignBun(platform)}`,
        ]),
    ...[`--outfile=${staged}`, platform === undefined ? "src/main.ts" : "src/aenv.ts"],
  ]);
  await mkdir(resolve(out, ".."), { recursive: true });
  await rename(staged, out);
} finally {
  await rm(staging, { recursive: true, force: true });
}
if (out === resolve("dist/agentenv") && !existsSync("dist/aenv")) {
  await rm("dist/aenv", { force: true });
  await symlink("agentenv", "dist/aenv");
}
console.log(
  `  BUN     ${flags.out ?? out.replace(`${process.cwd()}/`, "")} (${((performance.now() - started) / 1000).toFixed(1)} s)`,
);
