import { readFileSync } from "node:fs";
import { dirname, resolve } from "node:path";
import { parse as parseToml, TomlError } from "smol-toml";
import type { z } from "zod";
import packagedFile from "../../config/default.toml" with { type: "text" };
import { AenvError } from "../lib/errors.ts";
import { type Camel, toCamel } from "./camel.ts";
import { type NodeIdentity, resolveIdentity } from "./identity.ts";
import { CONFIG_KEYS, CONFIG_TABLES, KEY_ALIASES, nearestKey } from "./keys.ts";
import { resolvePaths } from "./paths.ts";
import { configSchema, type RawConfig } from "./schema.ts";
import { deleteAt, getAt, isTree, setAt, type Tree } from "./tree.ts";
import { crossKeyProblems, type Problem } from "./validate.ts";

export type Environment = Readonly<Record<string, string | undefined>>;

/** The node's configuration: the TOML keys in camelCase, checked, paths absolute, environment applied. */
export type NodeConfig = Omit<Camel<RawConfig>, "nodeIdentity"> & {
  readonly nodeIdentity: NodeIdentity;
  /** File it came from; undefined: the packaged one inside the executable. */
  readonly sourcePath: string | undefined;
  /** What was accepted but has no effect, for the log. */
  readonly warnings: readonly string[];
};

export interface LoadConfigOptions {
  /** `--config PATH`; beats `AENV_CONFIG_PATH`, which beats the packaged file. */
  readonly path?: string;
  readonly env: Environment;
}

interface Source {
  readonly path: string | undefined;
  readonly text: string;
  /** Relative paths in the file start here. */
  readonly baseDir: string;
}

function invalid(
  source: string,
  problems: readonly Problem[],
  overrides: ReadonlyMap<string, string>,
  warnings: readonly string[],
): AenvError {
  const broken = problems.map(({ key, value, rule }) => {
    const origin = overrides.get(key);
    const hidden = CONFIG_KEYS.find((known) => known.name === key)?.meta.secret;
    const shown = value === undefined ? "" : ` = ${hidden ? "(hidden)" : show(value)}`;
    return `${key}${shown}${origin === undefined ? "" : ` (from ${origin})`}: ${rule}`;
  });
  const lines = [...broken, ...warnings.map((warning) => `note: ${warning}`)];
  return new AenvError({
    code: "invalid_config",
    status: 400,
    message: `configuration ${source} is not valid:\n  ${lines.join("\n  ")}`,
    remediation: "correct the named keys; config/default.toml describes every one",
  });
}

function show(value: unknown): string {
  if (typeof value === "bigint") return value.toString();
  return JSON.stringify(value, (_, inner: unknown) => (typeof inner === "bigint" ? inner.toString() : inner));
}

function readSource(options: LoadConfigOptions): Source {
  const chosen = options.path ?? (options.env.AENV_CONFIG_PATH?.trim() || undefined);
  if (chosen === undefined) return { path: undefined, text: packagedFile, baseDir: process.cwd() };
  const path = resolve(chosen);
  try {
    return { path, text: readFileSync(path, "utf8"), baseDir: dirname(path) };
  } catch (cause) {
    throw new AenvError({
      code: "config_not_readable",
      status: 400,
      message: `the configuration file ${path} cannot be read: ${cause instanceof Error ? cause.message : cause}`,
      remediation: `${options.path === undefined ? "AENV_CONFIG_PATH" : "--config"} must name a readable file`,
      cause,
    });
  }
}

function parseSource(source: Source, name: string): Tree {
  try {
    return parseToml(source.text, { integersAsBigInt: "asNeeded" }) as Tree;
  } catch (cause) {
    if (!(cause instanceof TomlError)) throw cause;
    throw new AenvError({
      code: "invalid_config",
      status: 400,
      message: `configuration ${name} is not TOML at line ${cause.line}, column ${cause.column}: ${cause.message.trim()}`,
      cause,
    });
  }
}

/** Moves values written under another name of their key; both names with different values is an error. */
function applyAliases(tree: Tree): Problem[] {
  const problems: Problem[] = [];
  for (const [alias, name] of Object.entries(KEY_ALIASES)) {
    const value = getAt(tree, alias.split("."));
    if (value === undefined) continue;
    const present = getAt(tree, name.split("."));
    if (present !== undefined && present !== value) {
      problems.push({ key: alias, value, rule: `is another name of ${name}, which has another value` });
    }
    deleteAt(tree, alias.split("."));
    setAt(tree, name.split("."), value);
  }
  if (isTree(tree.blockd) && Object.keys(tree.blockd).length === 0) delete tree.blockd;
  return problems;
}

const TRUE_WORDS = ["1", "true", "yes", "on"];
const FALSE_WORDS = ["0", "false", "no", "off"];

/** Text of an environment variable as the key's kind; text that does not fit is left for the schema to refuse. */
function readOverride(value: string, kind: "text" | "flag" | "integer" | "list"): unknown {
  const trimmed = value.trim();
  switch (kind) {
    case "text":
      return trimmed;
    case "list":
      return trimmed.split(",");
    case "integer":
      return /^-?\d+$/.test(trimmed) ? Number(trimmed) : trimmed;
    case "flag": {
      const word = trimmed.toLowerCase();
      if (TRUE_WORDS.includes(word)) return true;
      return FALSE_WORDS.includes(word) ? false : trimmed;
    }
  }
}

/** Puts in what the environment sets; returns which key came from which variable. */
function applyEnvironment(tree: Tree, env: Environment): Map<string, string> {
  const overrides = new Map<string, string>();
  for (const { name, parts, meta } of CONFIG_KEYS) {
    const value = meta.env === undefined ? undefined : env[meta.env];
    if (meta.env === undefined || value === undefined) continue;
    if (value.trim() === "" && meta.blankEnvCounts !== true) continue;
    setAt(tree, parts, readOverride(value, meta.envKind ?? "text"));
    overrides.set(name, meta.env);
  }
  return overrides;
}

function unknownKeyWarnings(tree: Tree, prefix = ""): string[] {
  const known = new Set(CONFIG_KEYS.map((key) => key.name));
  return Object.entries(tree).flatMap(([name, value]) => {
    const full = `${prefix}${name}`;
    if (known.has(full)) return [];
    if (CONFIG_TABLES.has(full)) return isTree(value) ? unknownKeyWarnings(value, `${full}.`) : [];
    const nearest = nearestKey(full);
    return [`unknown key ${full} is ignored${nearest === undefined ? "" : ` (did you mean ${nearest}?)`}`];
  });
}

function schemaProblems(issues: readonly z.core.$ZodIssue[], tree: Tree): Problem[] {
  return issues.map((issue) => {
    const parts = issue.path.map(String);
    const key = parts
      .map((part, depth) => (/^\d+$/.test(part) ? `[${part}]` : `${depth === 0 ? "" : "."}${part}`))
      .join("");
    const value = issue.path.reduce<unknown>(
      (current, part) =>
        typeof current === "object" && current !== null
          ? (current as Record<PropertyKey, unknown>)[part]
          : undefined,
      tree,
    );
    // Entries of a list: the rule for the whole key, the value of the entry.
    return {
      key,
      value: isTree(value) ? undefined : value,
      rule: issue.message.replace(/^Invalid input: /, ""),
    };
  });
}

/**
 * Reads, merges, normalises and checks the node configuration. Throws `invalid_config` (every broken rule
 * in one message: key, value, rule) or `config_not_readable`.
 */
export function loadConfig(options: LoadConfigOptions): NodeConfig {
  const source = readSource(options);
  const name = source.path ?? "(packaged)";
  const tree = parseSource(source, name);
  const warnings: string[] = [];
  const aliasProblems = applyAliases(tree);
  warnings.push(...unknownKeyWarnings(tree));
  const overrides = applyEnvironment(tree, options.env);
  const parsed = configSchema.safeParse(tree);
  if (!parsed.success) {
    throw invalid(
      name,
      [...aliasProblems, ...schemaProblems(parsed.error.issues, tree)],
      overrides,
      warnings,
    );
  }
  const config = parsed.data;
  const problems = [...aliasProblems, ...resolvePaths(config, source.baseDir)];
  if (config.virtualization_mode === "pvm") config.memory_snapshot.track_dirty_pages = false;
  if (problems.length === 0) problems.push(...crossKeyProblems(config, warnings));
  if (problems.length > 0) throw invalid(name, problems, overrides, warnings);
  const nodeIdentity = resolveIdentity(config.node_identity, options.env, warnings);
  return { ...toCamel(config), nodeIdentity, sourcePath: source.path, warnings };
}

/** For logs and `--print-config`-like output: secrets are replaced. */
export function redactConfig(config: NodeConfig): Record<string, unknown> {
  const copy = structuredClone(config) as unknown as Tree;
  for (const { parts, meta } of CONFIG_KEYS) {
    if (meta.secret !== true) continue;
    const names = parts.map((part) =>
      part.replace(/_([a-z0-9])/g, (_, letter: string) => letter.toUpperCase()),
    );
    if (getAt(copy, names) !== undefined) setAt(copy, names, "[redacted]");
  }
  return copy;
}
