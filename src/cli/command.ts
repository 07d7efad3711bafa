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
  /** Without dashes. `no-x` is a switch that turns x off. */
  readonly name: string;
  readonly short?: string;
  /** Other spellings that are accepted and not shown. */
  readonly hiddenAliases?: readonly string[];
  /** Name of the value in help; absent: a switch. */
  readonly value?: string;
  readonly help: string;
  readonly default?: string;
  readonly choices?: readonly string[];
  /** May be given more than once; all values count. */
  readonly repeat?: boolean;
  /** Names of flags that make no sense together with this one. */
  readonly conflicts?: readonly string[];
  readonly required?: boolean;
}

/** Things whose names only the server knows. */
export type Dynamic =
  | "sandbox"
  | "running-sandbox"
  | "paused-sandbox"
  | "template"
  | "startable"
  | "snapshot";

export interface Argument {
  readonly name: string;
  readonly help: string;
  readonly optional?: boolean;
  /** Takes all that is left, word by word. */
  readonly rest?: boolean;
  /** May be given several times; the last argument only. */
  readonly many?: boolean;
  readonly choices?: readonly string[];
  /** What a shell completes this argument with: `path` is a name in the local file system. */
  readonly complete?: Dynamic | "path";
}

export interface Values {
  text(flag: string): string | undefined;
  /** All values of a flag that may be repeated, in order. */
  list(flag: string): readonly string[];
  has(flag: string): boolean;
  /** A whole number in a range; a usage error otherwise. */
  integer(flag: string, min: number, max: number): number | undefined;
}

export interface Invocation {
  readonly args: readonly string[];
  readonly flags: Values;
  /** A usage error (status 2) of this command. */
  readonly usageError: (message: string) => CliError;
}

/** One command: the only source of its parsing, its help, its completion and its page. */
export interface Command {
  /** Words as typed, e.g. `template list`. */
  readonly name: string;
  readonly aliases?: readonly string[];
  /** Heading of the overview it stands under. */
  readonly group?: string;
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
  short: "o",
  value: "FORMAT",
  choices: ["table", "json"],
  help: "table or json (default: table on a terminal, else json)",
};
