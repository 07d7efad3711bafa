import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import {
  appendFileSync,
  chmodSync,
  cpSync,
  lstatSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  realpathSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

/* What make does first on a machine, from a copy of its scripts. */

const ROOT = join(import.meta.dir, "..");
/** Nobody's account here. */
const UID = 64_321;
const VERSION = /BUN_VERSION=(\S+)/.exec(readFileSync(join(ROOT, "scripts/versions.sh"), "utf8"))![1]!;

let dir: string;

beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), "aenv-bootstrap-"));
  chmodSync(dir, 0o777);
  mkdirSync(join(dir, "checkout/scripts"), { recursive: true });
  for (const name of ["bootstrap.sh", "packages.txt", "versions.sh"])
    cpSync(join(ROOT, "scripts", name), join(dir, "checkout/scripts", name));
  mkdirSync(join(dir, "tmp"));
  chmodSync(join(dir, "tmp"), 0o777);
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

function bootstrap(
  env: Readonly<Record<string, string | undefined>> = {},
  prefix: readonly string[] = [],
  args: readonly string[] = [],
) {
  const { exitCode, stdout, stderr } = Bun.spawnSync(
    [...prefix, join(dir, "checkout/scripts/bootstrap.sh"), ...args],
    {
      env: {
        PATH: "/usr/sbin:/usr/bin:/sbin:/bin",
        HOME: process.env.HOME,
        TMPDIR: join(dir, "tmp"),
        ...env,
      },
      stdin: "ignore",
    },
  );
  return { exitCode, out: stdout.toString(), err: stderr.toString() };
}

/** Every path below, with what a change of it would change. */
const everything = () =>
  readdirSync(dir, { recursive: true, encoding: "utf8" })
    .map((name) => [name, lstatSync(join(dir, name)).mtimeMs] as const)
    .toSorted(([a], [b]) => a.localeCompare(b));

/** Commands by name, in a directory to be the only one that is searched. */
function only(...names: readonly string[]): string {
  const bin = join(dir, "bin");
  mkdirSync(bin);
  for (const name of names) symlinkSync(Bun.which(name)!, join(bin, name));
  return bin;
}
const BASICS = ["bash", "dirname", "id", "ln", "mkdir", "mktemp", "rm", "uname", "env"];
const noPackages = () => writeFileSync(join(dir, "checkout/scripts/packages.txt"), "# none\nbash bash\n");

const isRoot = process.geteuid?.() === 0;
if (!isRoot) console.log("skipped: missing packages as another user: that takes root to become one");
const asUser = ["setpriv", `--reuid=${UID}`, `--regid=${UID}`, "--clear-groups", "--"];

describe("packages that are missing", () => {
  test.skipIf(!isRoot)("without root: one line with the command that installs them, nothing changed", () => {
    appendFileSync(
      join(dir, "checkout/scripts/packages.txt"),
      "aenv-no-such-command first-package\n/usr/include/aenv-no-such.h second-package\n? aenv-nor-this third\n",
    );
    Bun.spawnSync(["chown", "-R", `${UID}:${UID}`, join(dir, "checkout")]);
    const before = everything();
    expect(bootstrap({}, asUser)).toEqual({
      exitCode: 1,
      out: "",
      err:
        "error: these packages are missing: first-package second-package. " +
        "Run: sudo apt-get install -y --no-install-recommends first-package second-package\n",
    });
    expect(everything()).toEqual(before);
  });

  test("those of the tests only when asked for", () => {
    writeFileSync(
      join(dir, "checkout/scripts/packages.txt"),
      "aenv-no-1 always\nimage: aenv-no-2 of-image\ntest: aenv-no-3 of-test\n? aenv-no-4 useful\n",
    );
    const PATH = only(...BASICS);
    const missing = (...mark: string[]) =>
      /apt-get: (.*)\. Install/.exec(bootstrap({ PATH }, [], mark).err)?.[1];
    expect(missing()).toBe("always");
    expect(missing("image")).toBe("always of-image");
    expect(missing("test")).toBe("always of-image of-test");
    expect(bootstrap({ PATH }, [], ["tests"]).exitCode).toBe(1);
  });

  test("without apt: one line with their names, nothing changed", () => {
    writeFileSync(
      join(dir, "checkout/scripts/packages.txt"),
      "aenv-no-such-command first-package\nbash bash\n",
    );
    const PATH = only(...BASICS);
    const before = everything();
    expect(bootstrap({ PATH })).toEqual({
      exitCode: 1,
      out: "",
      err:
        "error: these packages are missing and there is no apt-get: first-package. " +
        "Install their equivalents, then run make again.\n",
    });
    expect(everything()).toEqual(before);
  });
});

describe("Bun", () => {
  test("without npm and Bun: one line with what to install", () => {
    noPackages();
    expect(bootstrap({ PATH: only(...BASICS) })).toEqual({
      exitCode: 1,
      out: "",
      err: `error: neither Bun ${VERSION} nor npm is installed. Install Node.js with npm (or Bun ${VERSION}), then run make again.\n`,
    });
  });

  test("one of the pinned version is used as it is; another is not", () => {
    noPackages();
    const PATH = only(...BASICS);
    symlinkSync(process.execPath, join(PATH, "bun"));
    const version = Bun.spawnSync([process.execPath, "--version"]).stdout.toString().trim();
    expect(version).toBe(VERSION);
    expect(bootstrap({ PATH })).toEqual({ exitCode: 0, out: "", err: "" });
    expect(realpathSync(join(dir, "checkout/.tools/bin/bun"))).toBe(realpathSync(process.execPath));
    writeFileSync(join(dir, "checkout/scripts/versions.sh"), "BUN_VERSION=0.0.1\n");
    expect(bootstrap({ PATH }).err).toContain("neither Bun 0.0.1 nor npm is installed");
  });

  const asked = Bun.spawnSync(
    ["npm", "view", `bun@${VERSION}`, "version", "--fetch-retries=0", "--fetch-timeout=10000"],
    { stdin: "ignore" },
  );
  const absent =
    Bun.which("npm") === null
      ? "npm is not installed"
      : asked.exitCode !== 0 && `no registry answers npm: ${asked.stderr.toString().trim().split("\n")[0]}`;
  if (absent) console.log(`skipped: Bun from npm: ${absent}`);

  test.skipIf(absent !== false).each(["true", "false"])(
    "from npm, with ignore-scripts=%s: it runs, and the next run has nothing to do",
    (ignore) => {
      noPackages();
      const PATH = only(...BASICS, "node", "npm");
      const env = { PATH, npm_config_ignore_scripts: ignore, npm_config_prefer_offline: "true" };
      const first = bootstrap(env);
      expect(first).toEqual({ exitCode: 0, out: `  NPM     bun ${VERSION}\n`, err: "" });
      const bun = join(dir, "checkout/.tools/bin/bun");
      expect(Bun.spawnSync([bun, "--version"]).stdout.toString()).toBe(`${VERSION}\n`);
      // In the checkout, not the user's.
      expect(realpathSync(bun)).toStartWith(realpathSync(join(dir, "checkout/.tools")));
      const before = everything();
      expect(bootstrap(env)).toEqual({ exitCode: 0, out: "", err: "" });
      expect(everything()).toEqual(before);
    },
    120_000,
  );

  test.skipIf(absent !== false)(
    "a version that npm does not have: its name is told, no Bun is left",
    () => {
      noPackages();
      writeFileSync(join(dir, "checkout/scripts/versions.sh"), "BUN_VERSION=0.0.0-none\n");
      const { exitCode, err } = bootstrap({
        PATH: only(...BASICS, "node", "npm"),
        npm_config_fetch_retries: "0",
      });
      expect(exitCode).not.toBe(0);
      expect(err).toContain("0.0.0-none");
      expect(readdirSync(join(dir, "checkout/.tools/bin"))).toEqual([]);
    },
    120_000,
  );
});
