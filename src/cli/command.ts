import { type ParseArgsOptionsConfig, parseArgs } from "node:util";

/** A failure the user is told in plain words. Usage errors end with 2, everything else with 1. */
export class CliError extends Error {
  readonly exitCode: number;
  readonly hint: string | undefined;
  constructor(
    message: string,
    options: { readonly exitCode?: number; readonly hint?: string; readonly cause?: unknown } = {},
  ) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.name = "CliError";
    this.exitCode = options.exitCode ?? 1;
    this.hint = options.hint;
  }
}

export interface Flag {
  readonly name: string;
  readonly short?: string;
  /** Other spellings that are accepted and not shown. */
  readonly hiddenAliases?: readonly string[];
  /** Name of the value in help; absent: a switch. */
  readonly value?: string;
  readonly help: string;
  readonly default?: string;
  readonly choices?: readonly string[];
}

export interface Argument {
  readonly name: string;
  readonly help: string;
  readonly optional?: boolean;
  /** Takes all that is left, word by word. */
  readonly rest?: boolean;
}

export interface Values {
  text(flag: string): string | undefined;
  has(flag: string): boolean;
  /** A whole number in a range; a usage error otherwise. */
  integer(flag: string, min: number, max: number): number | undefined;
}

export interface Invocation {
  readonly args: readonly string[];
  readonly flags: Values;
}

/** One command: the only source of its parsing, its help and its completion. */
export interface Command {
  /** Words as typed, e.g. `template list`. */
  readonly name: string;
  readonly aliases?: readonly string[];
  readonly summary: string;
  readonly details?: string;
  readonly arguments: readonly Argument[];
  readonly flags: readonly Flag[];
  readonly examples: readonly string[];
  readonly run: (invocation: Invocation) => Promise<number>;
}

export const OUTPUT_FLAG: Flag = {
  name: "output",
  value: "FORMAT",
  choices: ["table", "json"],
  help: "table or json (default: table on a terminal, else json)",
};

export function usage(command: Command): string {
  const words = command.arguments.map((argument) => {
    const name = `${argument.name}${argument.rest ? "..." : ""}`;
    return argument.optional ? `[${name}]` : `<${name}>`;
  });
  return [`aenv ${command.name}`, ...(command.flags.length > 0 ? ["[options]"] : []), ...words].join(" ");
}

/** Two columns, the second one aligned. */
export function columns(rows: readonly (readonly [string, string])[]): string {
  const width = Math.max(...rows.map(([left]) => left.length));
  return rows.map(([left, right]) => `  ${left.padEnd(width)}  ${right}\n`).join("");
}

export function commandHelp(command: Command): string {
  let text = `${command.summary}\n\nUsage: ${usage(command)}\n`;
  if (command.aliases !== undefined) text += `Alias: ${command.aliases.join(", ")}\n`;
  if (command.details !== undefined) text += `\n${command.details}\n`;
  if (command.arguments.length > 0) {
    text += `\nArguments:\n${columns(command.arguments.map((argument) => [argument.name, argument.help]))}`;
  }
  const flags = command.flags.map((flag): [string, string] => [
    `${flag.short === undefined ? "    " : `-${flag.short}, `}--${flag.name}${flag.value === undefined ? "" : ` ${flag.value}`}`,
    `${flag.help}${flag.default === undefined ? "" : ` (default ${flag.default})`}`,
  ]);
  text += `\nOptions:\n${columns([...flags, ["-h, --help", "this text"]])}`;
  if (command.examples.length > 0) {
    text += `\nExamples:\n${command.examples.map((example) => `  ${example}\n`).join("")}`;
  }
  return text;
}

/** Splits a command's words into arguments and flags; usage errors name the command's help. */
export function parseInvocation(command: Command, argv: readonly string[]): Invocation | "help" {
  const fail = (message: string): never => {
    throw new CliError(message, {
      exitCode: 2,
      hint: `usage: ${usage(command)}; aenv ${command.name} --help tells more`,
    });
  };
  const options: ParseArgsOptionsConfig = { help: { type: "boolean", short: "h" } };
  const canonical = new Map<string, string>();
  for (const flag of command.flags) {
    for (const name of [flag.name, ...(flag.hiddenAliases ?? [])]) {
      canonical.set(name, flag.name);
      options[name] = {
        type: flag.value === undefined ? "boolean" : "string",
        ...(flag.short === undefined || name !== flag.name ? {} : { short: flag.short }),
      };
    }
  }
  // What follows the fixed arguments of a command with a rest belongs to the rest, flags and all.
  let own = [...argv];
  let rest: string[] = [];
  if (command.arguments.at(-1)?.rest) {
    const fixed = command.arguments.length - 1;
    let seen = 0;
    for (let i = 0; i < own.length; i++) {
      const word = own[i]!;
      if (seen >= fixed) {
        rest = own.slice(word === "--" ? i + 1 : i);
        own = own.slice(0, i);
        break;
      }
      if (word === "--") continue;
      if (!word.startsWith("-")) seen++;
      else {
        const flag = command.flags.find(
          (candidate) => word === `--${candidate.name}` || word === `-${candidate.short}`,
        );
        if (flag?.value !== undefined) i++;
      }
    }
  }
  const values = new Map<string, string>();
  const switches = new Set<string>();
  let positionals: string[];
  try {
    const parsed = parseArgs({ args: own, options, allowPositionals: true, strict: true, tokens: false });
    positionals = [...parsed.positionals, ...rest];
    if (parsed.values.help === true) return "help";
    for (const [name, value] of Object.entries(parsed.values)) {
      const flag = canonical.get(name);
      if (flag === undefined || value === undefined) continue;
      if (typeof value === "string") values.set(flag, value);
      else if (value === true) switches.add(flag);
    }
  } catch (error) {
    return fail(error instanceof Error ? error.message.split("\n")[0]! : String(error));
  }
  for (const flag of command.flags) {
    const value = values.get(flag.name);
    if (value !== undefined && flag.choices !== undefined && !flag.choices.includes(value)) {
      fail(`--${flag.name} must be one of ${flag.choices.join(", ")}, not "${value}"`);
    }
  }
  const required = command.arguments.filter((argument) => !argument.optional).length;
  const missing = command.arguments[positionals.length];
  if (positionals.length < required) fail(`missing argument <${missing!.name}>`);
  if (positionals.length > command.arguments.length && !command.arguments.at(-1)?.rest) {
    fail(`unexpected argument "${positionals[command.arguments.length]}"`);
  }
  return {
    args: positionals,
    flags: {
      text: (flag) => values.get(flag),
      has: (flag) => switches.has(flag) || values.has(flag),
      integer(flag, min, max) {
        const value = values.get(flag);
        if (value === undefined) return undefined;
        const number = Number(value);
        if (!/^\d+$/.test(value) || number < min || number > max) {
          return fail(`--${flag} must be a whole number from ${min} to ${max}, not "${value}"`);
        }
        return number;
      },
    },
  };
}
