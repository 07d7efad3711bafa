import { type ParseArgsOptionsConfig, parseArgs } from "node:util";
import { AenvError } from "../../../lib/errors.ts";
import type { ApplyJob, ApplyOutcome } from "../types.ts";

/** A mistake in the command line: exit code 2. */
export class UsageError extends Error {}

export interface Flag {
  /** What stands for the value in help; absent: a switch. */
  readonly value?: string;
  readonly help: string;
  readonly repeat?: boolean;
}

export interface Output {
  /** For people, or one JSON value with `--json`. */
  text(line: string): void;
  json(value: unknown): void;
  bytes(bytes: Uint8Array): Promise<void>;
}

export interface Invocation {
  readonly files: readonly string[];
  text(flag: string): string | undefined;
  list(flag: string): readonly string[];
  has(flag: string): boolean;
  /** A number of bytes: 4096, 64K, 10M, 20G, 1T. */
  bytes(flag: string): number | undefined;
  readonly json: boolean;
  readonly output: Output;
  readonly helpers: LayerHelpers;
}

/** What commands need of the rooms above this one. */
export interface LayerHelpers {
  readonly applyLayer?: (job: ApplyJob) => Promise<ApplyOutcome>;
}

/** One command: the only source of its parsing and its help. */
export interface LayerCommand {
  readonly name: string;
  readonly files: string;
  readonly summary: string;
  readonly details?: string;
  /** Least and most file arguments. */
  readonly count: readonly [least: number, most: number];
  readonly flags: Readonly<Record<string, Flag>>;
  readonly examples: readonly string[];
  /** Returns the exit code. */
  readonly run: (invocation: Invocation) => number | Promise<number>;
}

const COMMON_FLAGS: Readonly<Record<string, Flag>> = {
  json: { help: "print JSON" },
  help: { help: "print this help" },
};

const UNITS: Readonly<Record<string, number>> = {
  "": 1,
  K: 2 ** 10,
  M: 2 ** 20,
  G: 2 ** 30,
  T: 2 ** 40,
  P: 2 ** 50,
};

export function parseBytes(text: string, what: string): number {
  const match = /^(\d{1,18})([KMGTP]?)(?:i?B)?$/i.exec(text);
  const value = match === null ? Number.NaN : Number(match[1]) * UNITS[(match[2] ?? "").toUpperCase()]!;
  if (!Number.isFinite(value))
    throw new UsageError(`${what}: ${JSON.stringify(text)} is no size (like 4096, 64K or 10G)`);
  return value;
}

export function helpOf(command: LayerCommand): string {
  const flags = Object.entries({ ...command.flags, ...COMMON_FLAGS }).map(
    ([name, flag]): [string, string] => [
      `--${name}${flag.value === undefined ? "" : ` ${flag.value}`}`,
      flag.help + (flag.repeat === true ? " (may be repeated)" : ""),
    ],
  );
  const width = Math.max(...flags.map(([name]) => name.length)) + 2;
  return [
    `Usage: agentenv layer ${command.name} ${command.files} [options]`,
    "",
    `${command.summary}.`,
    ...(command.details === undefined ? [] : ["", command.details]),
    "",
    "Options:",
    ...flags.map(([name, help]) => `  ${name.padEnd(width)}${help}`),
    "",
    "Examples:",
    ...command.examples.map((example) => `  agentenv layer ${example}`),
  ].join("\n");
}

/** Runs one command with its arguments. */
export async function runCommand(
  command: LayerCommand,
  argv: readonly string[],
  output: Output,
  helpers: LayerHelpers,
): Promise<number> {
  const flags = { ...command.flags, ...COMMON_FLAGS };
  const options: ParseArgsOptionsConfig = { help: { type: "boolean", short: "h" } };
  for (const [name, flag] of Object.entries(flags)) {
    if (name === "help") continue;
    options[name] = { type: flag.value === undefined ? "boolean" : "string", multiple: flag.repeat === true };
  }
  let parsed: ReturnType<typeof parseArgs>;
  try {
    parsed = parseArgs({ args: [...argv], options, allowPositionals: true, strict: true });
  } catch (error) {
    throw new UsageError(error instanceof Error ? error.message : String(error));
  }
  const { values, positionals } = parsed;
  if (values.help === true) {
    output.text(helpOf(command));
    return 0;
  }
  const [least, most] = command.count;
  if (positionals.length < least || positionals.length > most) {
    throw new UsageError(`${positionals.length} file arguments, wanted: ${command.files}`);
  }
  const text = (flag: string): string | undefined => {
    const value = values[flag];
    return typeof value === "string" ? value : undefined;
  };
  return command.run({
    files: positionals,
    text,
    list: (flag) => {
      const value = values[flag];
      return Array.isArray(value) ? value.map(String) : [];
    },
    has: (flag) => values[flag] === true,
    bytes: (flag) => {
      const value = text(flag);
      return value === undefined ? undefined : parseBytes(value, `--${flag}`);
    },
    json: values.json === true,
    output,
    helpers,
  });
}

/** What a failed command says on standard error. */
export function explain(error: unknown): string {
  if (error instanceof AenvError) {
    return `Error: ${error.message}${error.remediation === undefined ? "" : `\n  ${error.remediation}`}`;
  }
  return `Error: ${error instanceof Error ? error.message : String(error)}`;
}
