import { CommanderError, Command as Node, Argument as NodeArgument, Option } from "commander";
import { commit, version } from "../version.ts";
import { type Argument, CliError, type Command, type Flag, type Invocation, type Values } from "./command.ts";

/*
 * The commands' table as a commander tree: parsing, help, suggestions, completion and the page in docs/ all
 * walk this one tree.
 */

/** Program of the same executable that is not a client of a server. */
export type ServerProgram = readonly [name: string, summary: string];

export interface ProgramOptions {
  readonly commands: readonly Command[];
  readonly serverPrograms: readonly ServerProgram[];
  /** What groups of commands such as `template` are for. */
  readonly groups: Readonly<Record<string, string>>;
  /** Told the command that the line names; absent: nothing runs. */
  readonly onCommand?: (command: Command, invocation: Invocation) => void;
}

export const SERVER_GROUP = "On the server's host (agentenv <program>):";

/** An argument that knows what a shell completes it with. */
export class TreeArgument extends NodeArgument {
  readonly complete: Argument["complete"];
  /** What is left is not ours, as the words of a command to run. */
  readonly rest: boolean;
  constructor(argument: Argument) {
    const name = `${argument.name}${argument.rest === true || argument.many === true ? "..." : ""}`;
    super(argument.optional === true ? `[${name}]` : `<${name}>`, argument.help);
    this.complete = argument.complete;
    this.rest = argument.rest === true;
    if (argument.choices !== undefined) this.choices(argument.choices);
  }
}

function optionOf(flag: Flag, name: string): Option {
  const long = `--${name}${flag.value === undefined ? "" : ` <${flag.value}>`}`;
  const own = name === flag.name;
  const help = `${flag.help}${flag.default === undefined ? "" : ` (default: ${flag.default})`}`;
  const option = new Option(own && flag.short !== undefined ? `-${flag.short}, ${long}` : long, help);
  if (!own) option.hideHelp();
  if (flag.required === true && own) option.makeOptionMandatory();
  if (flag.conflicts !== undefined) option.conflicts(flag.conflicts.map(attribute));
  const choices = flag.choices;
  if (choices !== undefined) option.choices(choices);
  if (flag.repeat === true) {
    option.argParser((value: string, before: readonly string[] | undefined) => [...(before ?? []), value]);
  }
  return option;
}

/** Commander's name for the value of a flag. */
const attribute = (flag: string) => new Option(`--${flag}`).attributeName();

/** All spellings of a flag without dashes. */
export function flagNames(flag: Flag): string[] {
  return [flag.name, ...(flag.hiddenAliases ?? [])];
}

function valuesOf(command: Command, options: Readonly<Record<string, unknown>>, usage: Usage): Values {
  const given = (name: string): unknown => {
    const flag = command.flags.find((entry) => entry.name === name);
    if (flag === undefined) throw new Error(`${command.name} has no flag ${name}`);
    const off = name.startsWith("no-");
    for (const spelling of flagNames(flag)) {
      const value = options[attribute(spelling)];
      if (off ? value === false : value !== undefined) return off ? true : value;
    }
    return undefined;
  };
  const list = (name: string): readonly string[] => {
    const value = given(name);
    return Array.isArray(value) ? value.map(String) : typeof value === "string" ? [value] : [];
  };
  return {
    text: (name) => list(name).at(-1),
    list,
    has: (name) => given(name) !== undefined,
    integer(name, min, max) {
      const value = list(name).at(-1);
      if (value === undefined) return undefined;
      const number = Number(value);
      if (!/^\d+$/.test(value) || number < min || number > max) {
        throw usage(`--${name} must be a whole number from ${min} to ${max}, not "${value}"`);
      }
      return number;
    },
  };
}

type Usage = (message: string) => CliError;

/** `aenv exec [options] <sandbox-id> <command...>` */
export function usageOf(node: Node): string {
  return `${path(node).join(" ")} ${node.usage()}`.trim();
}

/** Names from the program down to a node: what is typed to get there. */
export function path(node: Node): string[] {
  const names: string[] = [];
  for (let at: Node | null = node; at !== null; at = at.parent) names.unshift(at.name());
  return names;
}

const LONGEST_WORD = 60;
const LONGEST_MESSAGE = 180;

/** A message that quotes what was typed, on one line and of bearable length. */
function quoted(message: string): string {
  const short = message
    .replace(/\s+/g, " ")
    .replace(/(?<=^|[\s:])('[^']*'|"[^"]*")/g, (whole) =>
      whole.length <= LONGEST_WORD ? whole : `${whole.slice(0, LONGEST_WORD)}…${whole[0]}`,
    );
  return short.length <= LONGEST_MESSAGE ? short : `${short.slice(0, LONGEST_MESSAGE)}…`;
}

/** Longer than any name or path may be. */
const LONGEST_ARGUMENT = 4_096;

const usageHint = (node: Node) => `usage: ${usageOf(node)}\n${path(node).join(" ")} --help tells more`;

/** Arguments beyond what the parser knows of them: emptiness, ids, the `--` in front of a command. */
function checkedArguments(command: Command, words: readonly string[], usage: Usage): string[] {
  const args = [...words];
  const rest = command.arguments.findIndex((argument) => argument.rest === true);
  // `exec ID -- CMD`: the dashes only say that what follows is not ours.
  if (rest >= 0 && args[rest] === "--") args.splice(rest, 1);
  for (const [i, argument] of command.arguments.entries()) {
    const given = args[i];
    if (given === undefined) {
      if (argument.optional !== true) throw usage(`missing argument <${argument.name}>`);
      continue;
    }
    if (given === "") throw usage(`<${argument.name}> must not be empty`);
    if (argument.rest === true) continue;
    if (given.length > LONGEST_ARGUMENT) {
      throw usage(`<${argument.name}> is too long: ${given.length} characters`);
    }
    if (!argument.complete?.endsWith("sandbox")) continue;
    // An id becomes part of a URL's path: what would change the path is none.
    for (const id of argument.many === true ? args.slice(i) : [given]) {
      if (!/^[\w-]{1,128}$/.test(id)) throw usage(`"${id}" is no sandbox id`);
    }
  }
  return args;
}

function describe(node: Node, command: Command): void {
  node.summary(command.summary);
  node.description(
    command.details === undefined ? command.summary : `${command.summary}\n\n${command.details}`,
  );
  node.helpOption("-h, --help", "this text");
  if (command.group !== undefined) node.helpGroup(command.group);
  for (const argument of command.arguments) node.addArgument(new TreeArgument(argument));
  for (const flag of command.flags) for (const name of flagNames(flag)) node.addOption(optionOf(flag, name));
  if (command.arguments.at(-1)?.rest === true) node.passThroughOptions();
  if (command.examples.length > 0) {
    node.addHelpText("after", `\nExamples:\n${command.examples.map((example) => `  ${example}`).join("\n")}`);
  }
}

/** Where a node's children are made in the same way as the program's own. */
function child(parent: Node, name: string, hidden: boolean): Node {
  const node = new Node(name);
  node.copyInheritedSettings(parent);
  node.enablePositionalOptions().helpCommand(false);
  parent.addCommand(node, { hidden });
  return node;
}

function add(program: Node, command: Command, words: readonly string[], options: ProgramOptions): void {
  const hidden = command.hidden === true || words.join(" ") !== command.name;
  let parent = program;
  for (const word of words.slice(0, -1)) {
    let group = parent.commands.find((node) => node.name() === word);
    if (group === undefined) {
      group = child(parent, word, hidden && options.groups[word] === undefined);
      group.description(options.groups[word] ?? `Commands for ${word}s`);
      group.helpOption("-h, --help", "this text");
      if (command.group !== undefined) group.helpGroup(command.group);
    }
    parent = group;
  }
  const node = child(parent, words.at(-1)!, hidden);
  describe(node, command);
  for (const alias of command.aliases ?? []) {
    const other = alias.split(" ");
    if (other.length !== words.length) continue;
    // `templates ls` names the group and the command anew.
    for (let at: Node = node, i = other.length - 1; i >= 0; at = at.parent!, i--) {
      const name = other[i]!;
      if (name !== at.name() && !at.aliases().includes(name)) at.alias(name);
    }
  }
  node.action(() => {
    const usage: Usage = (message) =>
      new CliError(quoted(message), {
        exitCode: 2,
        hint: usageHint(node),
      });
    const invocation: Invocation = {
      args: checkedArguments(command, node.args, usage),
      flags: valuesOf(command, node.opts(), usage),
      usageError: usage,
    };
    options.onCommand?.(command, invocation);
  });
}

/** The tree of all commands, named `aenv`. Parsing throws `CommanderError` instead of ending the process. */
export function buildProgram(options: ProgramOptions): Node {
  const program = new Node("aenv");
  program
    .exitOverride()
    .enablePositionalOptions()
    .helpCommand(false)
    .configureOutput({ outputError: () => undefined })
    .configureHelp({ subcommandTerm: (node) => [node.name(), ...node.aliases().slice(0, 1)].join(", ") })
    .description(
      "AgentENV: microVM sandboxes for AI agents behind an E2B-compatible API.\n\nThe server's address and key: E2B_API_URL and E2B_API_KEY when both are set, else what `aenv auth` stored.",
    )
    .usage("<command> [options]")
    .helpOption("-h, --help", "this text; aenv <command> --help tells about one command")
    .version(`agentenv ${version} (${commit})`, "-V, --version", "version of this executable");
  for (const command of options.commands) {
    const words = command.name.split(" ");
    add(program, command, words, options);
    for (const alias of command.aliases ?? []) {
      // `sandbox info` for `info`: another place in the tree.
      const other = alias.split(" ");
      if (other.length !== words.length) add(program, { ...command, aliases: [] }, other, options);
    }
  }
  for (const [name, summary] of options.serverPrograms) {
    const node = child(program, name, false);
    node
      .summary(summary)
      .description(`${summary}\n\nRun it as: agentenv ${name} (with --help for its options)`);
    node
      .helpGroup(SERVER_GROUP)
      .helpOption("-h, --help", "this text")
      .allowUnknownOption()
      .allowExcessArguments();
  }
  // Its name is a command's, too, so that it is no node of its own.
  program.addHelpText(
    "after",
    `  ${"doctor".padEnd(20)} Check the host itself: what is there, what is missing`,
  );
  return program;
}

/** The node a failing line leads to, for its usage. */
function nodeOf(program: Node, words: readonly string[]): Node {
  let node = program;
  for (const word of words) {
    const next = node.commands.find((entry) => entry.name() === word || entry.aliases().includes(word));
    if (next === undefined) break;
    node = next;
  }
  return node;
}

/** Keystrokes between two words: letters put in, left out, mistaken, or two of them swapped. */
function distance(a: string, b: string): number {
  const rows = [Array.from({ length: b.length + 1 }, (_, j) => j)];
  for (let i = 1; i <= a.length; i++) {
    const row = [i];
    for (let j = 1; j <= b.length; j++) {
      const wrong = a[i - 1] === b[j - 1] ? 0 : 1;
      row[j] = Math.min(rows[i - 1]![j]! + 1, row[j - 1]! + 1, rows[i - 1]![j - 1]! + wrong);
      if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]) {
        row[j] = Math.min(row[j]!, rows[i - 2]![j - 2]! + 1);
      }
    }
    rows.push(row);
  }
  return rows[a.length]![b.length]!;
}

/** The parser's suggestions for a word, of which only those stay that are a slip of the fingers away from it. */
function nearMisses(first: string, suggested: string): string {
  const typed = /'([^']*)'$/.exec(first)?.[1]?.replace(/^-+/, "") ?? "";
  const words = /^\(Did you mean (?:one of )?(.+)\?\)$/.exec(suggested)?.[1]?.split(", ") ?? [];
  // Else every word would be one or two slips from some short command.
  const most = Math.max(1, Math.floor(typed.length / 4));
  const near = words.filter((word) => distance(typed, word.replace(/^-+/, "")) <= most);
  if (near.length === 0) return "";
  return ` (Did you mean ${near.length > 1 ? "one of " : ""}${near.join(", ")}?)`;
}

/** Where a line leaves the tree: the index of a word that should name a command and does not. */
function unknownAt(program: Node, words: readonly string[]): number | undefined {
  let node = program;
  for (const [i, word] of words.entries()) {
    if (node.commands.length === 0 || word.startsWith("-")) return undefined;
    const next = node.commands.find((entry) => entry.name() === word || entry.aliases().includes(word));
    if (next === undefined) return i;
    node = next;
  }
  return undefined;
}

/** What commander found wrong, as an error of ours. */
function usageProblem(program: Node, error: CommanderError, words: readonly string[]): CliError {
  const node = nodeOf(program, words);
  // What was typed may have line ends of its own.
  const said = error.message.replace(/^error: /, "");
  const meant = /\n(\(Did you mean [^\n]*\))$/.exec(said)?.[1] ?? "";
  const first = meant === "" ? said : said.slice(0, -meant.length - 1);
  const names = node.commands.map((entry) => entry.name()).join(", ");
  const hint =
    node === program
      ? "aenv --help lists the commands"
      : node.commands.length > 0
        ? `its commands: ${names}`
        : usageHint(node);
  return new CliError(`${quoted(first)}${nearMisses(first, meant)}`, { exitCode: 2, hint });
}

/**
 * Finds the command of a line. Help and version are printed here: the status of that is returned. A line
 * that means nothing is a CliError with status 2.
 */
export function parseLine(
  options: Omit<ProgramOptions, "onCommand">,
  argv: readonly string[],
): { readonly command: Command; readonly invocation: Invocation } | number {
  let found: { readonly command: Command; readonly invocation: Invocation } | undefined;
  const program = buildProgram({
    ...options,
    onCommand: (command, invocation) => {
      found = { command, invocation };
    },
  });
  // `aenv help exec` is `aenv exec --help`, at any depth.
  let words = argv[0] === "help" ? [...argv.slice(1), "--help"] : argv[0] === "version" ? ["-V"] : argv;
  // There is no help on a command that is none: without what follows the parser says so.
  const unknown = unknownAt(program, words);
  if (unknown !== undefined) words = words.slice(0, unknown + 1);
  try {
    program.parse(words, { from: "user" });
  } catch (error) {
    if (!(error instanceof CommanderError)) throw error;
    if (error.code === "commander.helpDisplayed" || error.code === "commander.version") return 0;
    if (error.code === "commander.help") return 2; // Nothing was asked for: the help went to standard error.
    throw usageProblem(program, error, words);
  }
  if (found === undefined) throw new CliError(`run it as: agentenv ${argv.join(" ")}`, { exitCode: 2 });
  return found;
}
