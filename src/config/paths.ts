import { existsSync } from "node:fs";
import { dirname, join, normalize, resolve } from "node:path";
import { CONFIG_KEYS, type ConfigKey } from "./keys.ts";
import type { RawConfig } from "./schema.ts";
import { getAt, setAt } from "./tree.ts";

const HOME = "$AENV_HOME";
const RUNTIME = "$AENV_RUNTIME";
/** Resolved first, in this order: the others refer to them. */
const BASE_KEYS = ["home_path", "runtime_path", "deps_path"];
/** Lexically normalised, too: cache keys and pins compare its paths as text. */
const NORMALIZED_KEY = "image.cache.root_dir";

/**
 * The home beside an executable that was built in a checkout, which `make start` and `make quickstart` use:
 * undefined when another one is named by `named`, is at `home`, or there is none beside it.
 */
export function checkoutHome(
  home: string,
  named: string | undefined,
  executable: string,
): string | undefined {
  const beside = resolve(dirname(executable), "../.aenv/home");
  if ((named !== undefined && named !== "") || existsSync(home) || !existsSync(beside)) return undefined;
  process.stderr.write(
    `$AENV_HOME_PATH is not set: looking at ${beside}, where this checkout keeps its state\n`,
  );
  return beside;
}

export interface PathProblem {
  readonly key: string;
  readonly value: string;
  readonly rule: string;
}

/**
 * Puts in the placeholders and joins relative paths to `baseDir`, in place. `$AENV_HOME` is accepted in
 * every state path (not in home_path itself), `$AENV_RUNTIME` in the block daemon's socket path only.
 * They are literal substrings, not shell variables.
 */
export function resolvePaths(config: RawConfig, baseDir: string): PathProblem[] {
  const problems: PathProblem[] = [];
  const pathKeys = CONFIG_KEYS.filter((key) => key.meta.path !== undefined);
  const ordered = [
    ...BASE_KEYS.map((name) => pathKeys.find((key) => key.name === name)!),
    ...pathKeys.filter((key) => !BASE_KEYS.includes(key.name)),
  ];
  for (const key of ordered) {
    const value = getAt(config, key.parts);
    if (typeof value !== "string" || value === "") continue;
    const refused = refusedPlaceholder(key, value);
    if (refused !== undefined) {
      problems.push({ key: key.name, value, rule: `the placeholder ${refused} has no meaning here` });
      continue;
    }
    // A function as replacement: `$` in the home's own path is no pattern.
    const filled = value
      .replaceAll(HOME, () => config.home_path)
      .replaceAll(RUNTIME, () => config.runtime_path);
    const absolute = filled.startsWith("/") ? filled : join(baseDir, filled);
    setAt(config, key.parts, key.name === NORMALIZED_KEY ? normalize(absolute) : absolute);
  }
  return problems;
}

function refusedPlaceholder(key: ConfigKey, value: string): string | undefined {
  if (value.includes(RUNTIME) && key.meta.path !== "socket") return RUNTIME;
  if (value.includes(HOME) && key.meta.path === "home") return HOME;
  return undefined;
}
