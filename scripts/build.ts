/** Compiles src/main.ts and everything it embeds into dist/agentenv, and links dist/aenv to it. */
import { existsSync } from "node:fs";
import { mkdir, rename, rm, symlink } from "node:fs/promises";
import pkg from "../package.json" with { type: "json" };

const started = performance.now();
await mkdir("dist", { recursive: true });
const commit =
  Bun.spawnSync(["git", "rev-parse", "--short=12", "HEAD"]).stdout.toString().trim() || "unknown";

const flags = [
  "--compile",
  "--minify",
  "--bytecode",
  "--format=esm",
  "--sourcemap",
  "--no-compile-autoload-dotenv",
  "--no-compile-autoload-bunfig",
  "--compile-exec-argv=--max-http-header-size=131072",
  "--define",
  `BUILD_VERSION=${JSON.stringify(JSON.stringify(pkg.version)).slice(1, -1).replaceAll('\\"', '"')}`,
  "--define",
  `BUILD_COMMIT="${commit}"`,
  "--outfile=build/agentenv",
];
const build = Bun.spawnSync([process.execPath, "build", ...flags, "src/main.ts"], {
  stdout: "pipe",
  stderr: "inherit",
});
if (build.exitCode !== 0) {
  process.stderr.write(build.stdout);
  process.exit(1);
}
await rename("build/agentenv", "dist/agentenv");
if (!existsSync("dist/aenv")) {
  await rm("dist/aenv", { force: true });
  await symlink("agentenv", "dist/aenv");
}
console.log(`  BUN     dist/agentenv (${((performance.now() - started) / 1000).toFixed(1)} s)`);
