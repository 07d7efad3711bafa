import { parseArgs } from "node:util";
import { stringify } from "smol-toml";
import packagedFile from "../../config/default.toml" with { type: "text" };
import { AenvError } from "../lib/errors.ts";
import { usageProblem } from "../lib/usage.ts";
import { type ExplainedKey, explainConfig, loadConfig, loadServerConfig } from "./load.ts";
import { checkoutHome } from "./paths.ts";

const USAGE = `Usage: agentenv config check [--config PATH]
       agentenv config show  [--config PATH] [--changed] [--json] [KEY...]
       agentenv config default

check says whether a server would start with this configuration; exit code 1 when it would not.
show prints every key with its value and where that comes from; secrets are hidden.
default prints the packaged file: every key, explained.

Options:
  --config PATH   configuration file (default: $AENV_CONFIG_PATH, else the packaged defaults)
  --changed       show: only what the file or the environment sets
  --json          show: JSON
  -h, --help      this text

A KEY is a dotted name (machine.vcpu_count) or a table (machine).
`;

function parseFlags(argv: string[]) {
  return parseArgs({
    args: argv,
    allowPositionals: true,
    options: {
      config: { type: "string" },
      changed: { type: "boolean" },
      json: { type: "boolean" },
      help: { type: "boolean", short: "h" },
    },
  });
}

/** A value as TOML writes it, on one line. */
function toml(value: unknown): string {
  if (value === undefined) return "(unset)";
  return stringify({ k: value }).trim().replace(/^k = /, "");
}

function lines(keys: readonly ExplainedKey[]): string {
  const left = keys.map((key) => `${key.name} = ${toml(key.value)}`);
  const width = Math.min(64, Math.max(...left.map((text) => text.length)));
  return keys
    .map(
      (key, i) =>
        `${left[i]!.padEnd(width)}  # ${key.origin}${key.noEffect ? "; without effect in this version" : ""}\n`,
    )
    .join("");
}

/** The environment, with the home of the executable's own checkout where no other is named or there. */
function environment(path: { readonly path?: string }, executable: string): NodeJS.ProcessEnv {
  const { env } = process;
  const { homePath } = loadConfig({ ...path, env });
  const beside = checkoutHome(homePath, env.AENV_HOME_PATH, executable);
  return beside === undefined ? env : { ...env, AENV_HOME_PATH: beside };
}

function fail(text: string, exitCode: number): number {
  process.stderr.write(`Error: ${text}\n`);
  return exitCode;
}

/** `agentenv config`. Exit codes: 0 fine, 1 the configuration is not, 2 wrong usage. */
export function configMain(argv: string[]): number {
  let flags: ReturnType<typeof parseFlags>;
  try {
    flags = parseFlags(argv);
  } catch (error) {
    return fail(`${usageProblem(error)}\n\n${USAGE}`, 2);
  }
  const { values, positionals } = flags;
  if (values.help) {
    process.stdout.write(USAGE);
    return 0;
  }
  const [action, ...names] = positionals;
  if (action === "default" && names.length === 0) {
    process.stdout.write(packagedFile);
    return 0;
  }
  if (action !== "check" && action !== "show") {
    return fail(
      `${action === undefined ? "config needs" : `config has no command "${action}":`} check or show\n\n${USAGE}`,
      2,
    );
  }
  const path = values.config === undefined ? {} : { path: values.config };
  try {
    const options = { env: environment(path, process.execPath), ...path };
    if (action === "check") {
      if (names.length > 0) return fail(`config check takes no arguments\n\n${USAGE}`, 2);
      const { warnings, sourcePath } = loadServerConfig(options);
      for (const warning of warnings) process.stderr.write(`Warning: ${warning}\n`);
      process.stdout.write(`configuration ${sourcePath ?? "(packaged)"} is valid\n`);
      return 0;
    }
    const { keys, warnings } = explainConfig(options);
    for (const warning of warnings) process.stderr.write(`Warning: ${warning}\n`);
    for (const name of names) {
      if (!keys.some((key) => key.name === name || key.name.startsWith(`${name}.`))) {
        return fail(`there is no key or table ${name}`, 2);
      }
    }
    const chosen = keys.filter(
      (key) =>
        (names.length === 0 || names.some((name) => key.name === name || key.name.startsWith(`${name}.`))) &&
        (values.changed !== true || (key.origin !== "built-in" && key.origin !== "packaged file")),
    );
    if (values.json) process.stdout.write(`${JSON.stringify({ keys: chosen }, null, 2)}\n`);
    else if (chosen.length > 0) process.stdout.write(lines(chosen));
    else process.stderr.write("nothing is changed\n");
    return 0;
  } catch (error) {
    if (!(error instanceof AenvError)) throw error;
    return fail(`${error.message}${error.remediation === undefined ? "" : `\n  ${error.remediation}`}`, 1);
  }
}
