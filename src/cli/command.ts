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

/** Things whose names only the server knows. */
export type Dynamic = "sandbox" | "running-sandbox" | "paused-sandbox" | "template";

export interface Argument {
  readonly name: string;
  readonly help: string;
  readonly optional?: boolean;
  /** Takes all that is left, word by word. */
  readonly rest?: boolean;
  readonly choices?: readonly string[];
  /** What the server is asked for when a shell completes this argument. */
  readonly complete?: Dynamic;
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
  /** Works, but is shown neither in help nor among completions. */
  readonly hidden?: boolean;
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

/** Smallest number of edits between two words (insert, delete, replace). */
function distance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, i) => i);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      next[j] = Math.min(row[j]! + 1, next[j - 1]! + 1, row[j - 1]! + (a[i - 1] === b[j - 1] ? 0 : 1));
    }
    row = next;
  }
  return row[b.length]!;
}

/** The word that was probably meant. */
export function nearest(word: string, known: readonly string[]): string | undefined {
  const ranked = known
    .map((name) => [distance(word, name), name] as const)
    .sort(([a], [b]) => a - b)
    .find(([edits, name]) => edits <= Math.min(2, name.length - 1));
  return ranked?.[1];
}

/** All spellings of a flag without dashes. */
export function flagNames(flag: Flag): string[] {
  return [flag.name, ...(flag.hiddenAliases ?? [])];
}

/** The flag a word such as `--name`, `--name=value` or `-n` stands for. */
export function flagOf(command: Command, word: string): Flag | undefined {
  const name = word.split("=", 1)[0]!;
  return command.flags.find(
    (flag) => flagNames(flag).some((own) => name === `--${own}`) || name === `-${flag.short}`,
  );
}

/** What `parseArgs` found wrong, in one sentence; the rest of its texts is advice for programmers. */
function parseProblem(error: unknown, command: Command): string {
  const text = error instanceof Error ? error.message : String(error);
  const unknown = /^Unknown option '(-*)([^']*)'/.exec(text);
  if (unknown !== null) {
    const [, dashes, name] = unknown;
    const option = `${dashes === "" ? "-" : dashes}${name}`;
    const meant =
      dashes === "--" ? nearest(name!, [...command.flags.map((flag) => flag.name), "help"]) : undefined;
    return `unknown option "${option}"${meant === undefined ? "" : `, did you mean --${meant}?`}`;
  }
  const option = /^Option '(?:-\w, )?(--?[\w-]+)/.exec(text)?.[1];
  if (option !== undefined && /argument (missing|is ambiguous)/.test(text))
    return `option ${option} needs a value`;
  if (option !== undefined && text.includes("does not take an argument"))
    return `option ${option} takes no value`;
  return text.split(/\n|(?<=\.) /, 1)[0]!;
}

/** Splits off what belongs to a last argument that takes all words, flags and all. */
function splitRest(command: Command, argv: readonly string[]): { own: string[]; rest: string[] } {
  if (!command.arguments.at(-1)?.rest) return { own: [...argv], rest: [] };
  const fixed = command.arguments.length - 1;
  let seen = 0;
  let literal = false;
  for (let i = 0; i < argv.length; i++) {
    const word = argv[i]!;
    if (seen >= fixed)
      return { own: argv.slice(0, i), rest: argv.slice(word === "--" && !literal ? i + 1 : i) };
    if (!literal && word === "--") literal = true;
    else if (literal || !word.startsWith("-") || word === "-") seen++;
    else if (flagOf(command, word)?.value !== undefined && !word.includes("=")) i++;
  }
  return { own: [...argv], rest: [] };
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
    for (const name of flagNames(flag)) {
      canonical.set(name, flag.name);
      options[name] = {
        type: flag.value === undefined ? "boolean" : "string",
        ...(flag.short === undefined || name !== flag.name ? {} : { short: flag.short }),
      };
    }
  }
  const { own, rest } = splitRest(command, argv);
  const values = new Map<string, string>();
  const switches = new Set<string>();
  let positionals: string[];
  try {
    const parsed = parseArgs({ args: own, options, allowPositionals: true, strict: true });
    positionals = [...parsed.positionals, ...rest];
    if (parsed.values.help === true) return "help";
    for (const [name, value] of Object.entries(parsed.values)) {
      const flag = canonical.get(name);
      if (flag === undefined || value === undefined) continue;
      if (typeof value === "string") values.set(flag, value);
      else if (value === true) switches.add(flag);
    }
  } catch (error) {
    return fail(parseProblem(error, command));
  }
  for (const flag of command.flags) {
    const value = values.get(flag.name);
    if (value !== undefined && flag.choices !== undefined && !flag.choices.includes(value)) {
      fail(`--${flag.name} must be one of ${flag.choices.join(", ")}, not "${value}"`);
    }
  }
  const required = command.arguments.filter((argument) => !argument.optional).length;
  if (positionals.length < required)
    fail(`missing argument <${command.arguments[positionals.length]!.name}>`);
  if (positionals.length > command.arguments.length && !command.arguments.at(-1)?.rest) {
    fail(`unexpected argument "${positionals[command.arguments.length]}"`);
  }
  for (const [i, argument] of command.arguments.entries()) {
    const given = positionals[i];
    if (given === "") fail(`<${argument.name}> must not be empty`);
    if (given !== undefined && argument.choices !== undefined && !argument.choices.includes(given)) {
      fail(`<${argument.name}> must be one of ${argument.choices.join(", ")}, not "${given}"`);
    }
    // An id becomes part of a URL's path: what would change the path is none.
    if (given !== undefined && argument.complete?.endsWith("sandbox") && !/^[\w-]+$/.test(given)) {
      fail(`"${given}" is no sandbox id`);
    }
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
