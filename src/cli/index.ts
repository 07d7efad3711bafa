import { errorChain } from "../lib/errors.ts";
import { commit, version } from "../version.ts";
import { CliError, type Command, columns, commandHelp, parseInvocation } from "./command.ts";
import { COMMANDS } from "./commands.ts";

/** Programs of the same executable that are not clients of a server. */
const SERVER_PROGRAMS: readonly (readonly [string, string])[] = [
  ["serve", "Run the server"],
  ["setup", "Fetch the guest kernel and the virtual machine monitor"],
  ["doctor", "Check this host: what is there, what is missing, how to get it"],
];

function overview(): string {
  return [
    "AgentENV: microVM sandboxes for AI agents behind an E2B-compatible API.\n",
    "Usage: aenv <command> [options]\n",
    "Commands:",
    columns(
      COMMANDS.map((command): [string, string] => [
        command.aliases?.[0] !== undefined && !command.name.includes(" ")
          ? `${command.name}, ${command.aliases[0]}`
          : command.name,
        command.summary,
      ]),
    ),
    "On the server's host (agentenv <program>):",
    columns(SERVER_PROGRAMS),
    "Options:",
    columns([
      ["-h, --help", "this text; aenv <command> --help tells about one command"],
      ["-V, --version", "version of this executable"],
    ]),
  ].join("\n");
}

/** The command a line starts with, its longest name first. */
function findCommand(words: readonly string[]): { command: Command; rest: string[] } | undefined {
  for (const length of [2, 1]) {
    const name = words.slice(0, length).join(" ");
    const command = COMMANDS.find((entry) => entry.name === name || entry.aliases?.includes(name));
    if (command !== undefined && words.length >= length) return { command, rest: words.slice(length) };
  }
  return undefined;
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

function unknownCommand(words: readonly string[]): CliError {
  const group = COMMANDS.filter((command) => command.name.startsWith(`${words[0]} `)).map(
    (command) => command.name,
  );
  if (group.length > 0) {
    return new CliError(`${words[0]} needs one of its commands`, { exitCode: 2, hint: group.join(", ") });
  }
  const names = [
    ...COMMANDS.map((command) => command.name.split(" ")[0]!),
    ...SERVER_PROGRAMS.map(([name]) => name),
  ];
  const nearest = names.toSorted((a, b) => distance(a, words[0]!) - distance(b, words[0]!))[0]!;
  return new CliError(`unknown command "${words[0]}"`, {
    exitCode: 2,
    hint: distance(nearest, words[0]!) <= 2 ? `did you mean ${nearest}?` : "aenv --help lists the commands",
  });
}

/** The `aenv` command line. Resolves with the exit status. */
export async function cliMain(argv: string[]): Promise<number> {
  // A reader that went away (`aenv list | head -1`) is no error.
  process.stdout.on("error", (error: NodeJS.ErrnoException) => {
    if (error.code === "EPIPE") process.exit(0);
    throw error;
  });
  try {
    const [first] = argv;
    if (
      first === undefined ||
      first === "--help" ||
      first === "-h" ||
      (first === "help" && argv.length === 1)
    ) {
      (first === undefined ? process.stderr : process.stdout).write(overview());
      return first === undefined ? 2 : 0;
    }
    if (first === "--version" || first === "-V" || first === "version") {
      process.stdout.write(`agentenv ${version} (${commit})\n`);
      return 0;
    }
    const found = findCommand(first === "help" ? argv.slice(1) : argv);
    if (found === undefined) throw unknownCommand(argv);
    const invocation = first === "help" ? "help" : parseInvocation(found.command, found.rest);
    if (invocation === "help") {
      process.stdout.write(commandHelp(found.command));
      return 0;
    }
    return await found.command.run(invocation);
  } catch (error) {
    const [message, ...causes] = errorChain(error);
    process.stderr.write(`Error: ${message}\n`);
    for (const cause of causes) process.stderr.write(`  caused by: ${cause}\n`);
    if (error instanceof CliError) {
      if (error.hint !== undefined) process.stderr.write(`  ${error.hint}\n`);
      return error.exitCode;
    }
    return 1;
  }
}
