import { readFileSync } from "node:fs";
import { dirname, resolve } from "node:path";
import { parse as parseToml, stringify as stringifyToml, TomlError } from "smol-toml";
import type { z } from "zod";
import packagedFile from "../../config/default.toml" with { type: "text" };
import { AenvError } from "../lib/errors.ts";
import { type Camel, toCamel } from "./camel.ts";
import { type NodeIdentity, resolveIdentity } from "./identity.ts";
import { CONFIG_KEYS, CONFIG_TABLES, type ConfigKey, KEY_ALIASES, nearestKey } from "./keys.ts";
import { resolvePaths } from "./paths.ts";
import { isRemovedKey } from "./removed.ts";
import { configSchema, type RawConfig } from "./schema.ts";
import { deleteAt, getAt, isTree, setAt, type Tree } from "./tree.ts";
import { hasNoEffect, unbuiltProblems, withoutEffectWarnings } from "./unbuilt.ts";
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

/** Keys that are not in the schema: those of earlier formats are told, all others are refused. */
function unknownKeys(tree: Tree, warnings: string[], prefix = ""): Problem[] {
  const known = new Set(CONFIG_KEYS.map((key) => key.name));
  return Object.entries(tree).flatMap(([name, value]) => {
    const full = `${prefix}${name}`;
    if (known.has(full)) return [];
    // A key where a table belongs is the schema's to refuse.
    if (CONFIG_TABLES.has(full)) return isTree(value) ? unknownKeys(value, warnings, `${full}.`) : [];
    if (isRemovedKey(full)) {
      warnings.push(`${full} belongs to an earlier format and has no effect any more: remove it`);
      return [];
    }
    const nearest = nearestKey(full);
    const hint = nearest === undefined ? "" : `: did you mean ${nearest}?`;
    return [{ key: full, rule: `is not a key${hint}` }];
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

interface Loaded {
  readonly config: RawConfig;
  readonly source: Source;
  /** The source's name in messages. */
  readonly name: string;
  /** Keys that the file sets, whatever it sets them to. */
  readonly inFile: ReadonlySet<string>;
  /** Which key came from which environment variable. */
  readonly overrides: ReadonlyMap<string, string>;
  readonly warnings: string[];
  /** A sentence per key that has been given a value and that nothing acts on. */
  readonly withoutEffect: readonly string[];
}

function load(options: LoadConfigOptions): Loaded {
  const source = readSource(options);
  const name = source.path ?? "(packaged)";
  const tree = parseSource(source, name);
  const warnings: string[] = [];
  const keyProblems = [...applyAliases(tree), ...unknownKeys(tree, warnings)];
  const inFile = new Set(
    CONFIG_KEYS.filter((key) => getAt(tree, key.parts) !== undefined).map((key) => key.name),
  );
  const overrides = applyEnvironment(tree, options.env);
  const parsed = configSchema.safeParse(tree);
  if (!parsed.success) {
    throw invalid(name, [...keyProblems, ...schemaProblems(parsed.error.issues, tree)], overrides, warnings);
  }
  const config = parsed.data;
  const given = (key: ConfigKey) => inFile.has(key.name) || overrides.has(key.name);
  // Before the paths are resolved: they are compared as they are written.
  const withoutEffect =
    source.path === undefined && overrides.size === 0
      ? []
      : withoutEffectWarnings(config, shippedValues(), given);
  const problems = [...keyProblems, ...resolvePaths(config, source.baseDir)];
  if (config.virtualization_mode === "pvm") config.memory_snapshot.track_dirty_pages = false;
  if (problems.length === 0) problems.push(...crossKeyProblems(config, warnings));
  if (problems.length > 0) throw invalid(name, problems, overrides, warnings);
  return { config, source, name, inFile, overrides, warnings, withoutEffect };
}

/** The packaged file's own values: a copy of it gives no cause to be told of. */
function shippedValues(): RawConfig {
  return configSchema.parse(parseToml(packagedFile, { integersAsBigInt: "asNeeded" }));
}

/**
 * Reads, merges, normalises and checks the node configuration. Throws `invalid_config` (every broken rule
 * in one message: key, value, rule) or `config_not_readable`.
 */
export function loadConfig(options: LoadConfigOptions): NodeConfig {
  const { config, source, warnings } = load(options);
  return nodeConfig(config, source, options.env, warnings);
}

function nodeConfig(config: RawConfig, source: Source, env: Environment, warnings: string[]): NodeConfig {
  const nodeIdentity = resolveIdentity(config.node_identity, env, warnings);
  return { ...toCamel(config), nodeIdentity, sourcePath: source.path, warnings };
}

/** `loadConfig` for a server that is to start: also refuses what would switch on a part that is not there. */
export function loadServerConfig(options: LoadConfigOptions): NodeConfig {
  const { config, source, name, overrides, warnings, withoutEffect } = load(options);
  const problems = unbuiltProblems(config);
  if (problems.length > 0) throw invalid(name, problems, overrides, warnings);
  return nodeConfig(config, source, options.env, [...warnings, ...withoutEffect]);
}

/** One key as a server would see it. */
export interface ExplainedKey {
  readonly name: string;
  /** Effective value; undefined: unset. Secrets are replaced. */
  readonly value: unknown;
  /** `built-in`, `packaged file`, the file's path, or `environment: VARIABLE`. */
  readonly origin: string;
  /** Nothing in this version acts on it. */
  readonly noEffect: boolean;
}

/** Every key with its value and where that comes from. Errors as `loadConfig`. */
export function explainConfig(options: LoadConfigOptions): {
  readonly keys: readonly ExplainedKey[];
  readonly source: string;
  readonly warnings: readonly string[];
} {
  const { config, source, inFile, overrides, warnings } = load(options);
  const file = source.path ?? "packaged file";
  const keys = CONFIG_KEYS.map((key): ExplainedKey => {
    const variable = overrides.get(key.name);
    const value = getAt(config, key.parts);
    return {
      name: key.name,
      value: value !== undefined && key.meta.secret === true ? "[redacted]" : value,
      origin: variable !== undefined ? `environment: ${variable}` : inFile.has(key.name) ? file : "built-in",
      noEffect: hasNoEffect(key.name),
    };
  });
  return { keys, source: file, warnings };
}

/** What is known of a key without any file: for documentation. Values are written as in TOML. */
export interface KeyDescription {
  readonly name: string;
  readonly env: string | undefined;
  /** Undefined: unset. */
  readonly builtIn: string | undefined;
  readonly shipped: string | undefined;
  readonly noEffect: boolean;
}

/** Every key in the order of the schema. */
export function describeKeys(): KeyDescription[] {
  const builtIn = configSchema.parse({});
  const shipped = shippedValues();
  const written = (value: unknown) =>
    value === undefined ? undefined : stringifyToml({ k: value }).trim().replace(/^k = /, "");
  return CONFIG_KEYS.map(({ name, parts, meta }) => ({
    name,
    env: meta.env,
    builtIn: written(getAt(builtIn, parts)),
    shipped: written(getAt(shipped, parts)),
    noEffect: hasNoEffect(name),
  }));
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
