import { errorChain } from "../lib/errors.ts";
import { commit, version } from "../version.ts";
import { CliError, type Command, columns, commandHelp, nearest, parseInvocation, usage } from "./command.ts";
import { COMMANDS, SERVER_PROGRAMS } from "./commands.ts";
import { plainLines } from "./output.ts";

const VISIBLE = COMMANDS.filter((command) => command.hidden !== true);

function overview(): string {
  return [
    "AgentENV: microVM sandboxes for AI agents behind an E2B-compatible API.\n",
    "Usage: aenv <command> [options]\n",
    "Commands:",
    columns(
      VISIBLE.map((command): [string, string] => [
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

const spellings = (command: Command) => [command.name, ...(command.aliases ?? [])];

/** Commands of a group such as `template`, under either of its names. */
function groupOf(word: string | undefined): Command[] {
  return VISIBLE.filter((command) => spellings(command).some((name) => name.startsWith(`${word} `)));
}

function groupHelp(group: readonly Command[]): string {
  const name = group[0]!.name.split(" ")[0]!;
  return `Usage: aenv ${name} <command> [options]\n\nCommands:\n${columns(
    group.map((command) => [usage(command).replace("aenv ", ""), command.summary]),
  )}`;
}

/** The command a line starts with, its longest name first. */
function findCommand(words: readonly string[]): { command: Command; rest: string[] } | undefined {
  for (const length of [2, 1]) {
    const name = words.slice(0, length).join(" ");
    const command = COMMANDS.find((entry) => spellings(entry).includes(name));
    if (command !== undefined && words.length >= length) return { command, rest: words.slice(length) };
  }
  return undefined;
}

function unknownCommand([first, second]: readonly string[]): CliError {
  const group = groupOf(first);
  const fail = (message: string, meant: string | undefined, otherwise: string) =>
    new CliError(message, { exitCode: 2, hint: meant === undefined ? otherwise : `did you mean ${meant}?` });
  if (group.length > 0) {
    const names = group.map((command) => command.name.split(" ")[1]!);
    const otherwise = `its commands: ${names.join(", ")}`;
    if (second === undefined) return fail(`${first} needs a command`, undefined, otherwise);
    return fail(`${first} has no command "${second}"`, nearest(second, names), otherwise);
  }
  const names = [
    ...VISIBLE.flatMap(spellings).map((name) => name.split(" ")[0]!),
    ...SERVER_PROGRAMS.map(([name]) => name),
  ];
  const what = first!.startsWith("-") ? "option" : "command";
  return fail(
    `unknown ${what} "${first}"`,
    what === "command" ? nearest(first!, names) : undefined,
    "aenv --help lists the commands",
  );
}

const isHelp = (word: string | undefined) => word === "--help" || word === "-h";

async function run(argv: readonly string[]): Promise<number> {
  const asksHelp = argv[0] === "help" || isHelp(argv[0]);
  const words = argv[0] === "help" ? argv.slice(1) : argv;
  const [first, second] = words;
  if (asksHelp && (words.length === 0 || isHelp(first))) {
    process.stdout.write(overview());
    return 0;
  }
  if (first === undefined) {
    process.stderr.write(overview());
    return 2;
  }
  if (first === "--version" || first === "-V" || first === "version") {
    process.stdout.write(`agentenv ${version} (${commit})\n`);
    return 0;
  }
  const found = findCommand(words);
  if (found === undefined) {
    const group = groupOf(first);
    if (group.length > 0 && (isHelp(second) || (asksHelp && second === undefined))) {
      process.stdout.write(groupHelp(group));
      return 0;
    }
    throw unknownCommand(words);
  }
  const invocation = asksHelp ? "help" : parseInvocation(found.command, found.rest);
  if (invocation === "help") {
    process.stdout.write(commandHelp(found.command));
    return 0;
  }
  return found.command.run(invocation);
}

/** Tells the user what went wrong; returns the exit status for it. */
function report(error: unknown): number {
  const [message, ...causes] = errorChain(error);
  process.stderr.write(`Error: ${plainLines(message ?? "unknown")}\n`);
  for (const cause of causes) process.stderr.write(`  caused by: ${plainLines(cause)}\n`);
  if (!(error instanceof CliError)) return 1;
  if (error.hint !== undefined) process.stderr.write(`  ${plainLines(error.hint)}\n`);
  return error.exitCode;
}

/** Failures that no command waits for: a standard stream that breaks, an error in a callback. */
function installLastResorts(): void {
  process.stdout.on("error", (error: NodeJS.ErrnoException) => {
    // A reader that went away (`aenv list | head -1`) is no error; a command may know better.
    if (error.code !== "EPIPE") {
      process.exit(report(new CliError("cannot write to standard output", { cause: error })));
    }
    if (process.stdout.listenerCount("error") === 1) process.exit(0);
  });
  process.stderr.on("error", () => {
    // There is nowhere left to tell it.
    if (process.stderr.listenerCount("error") === 1) process.exit(1);
  });
  const onUncaught = (error: unknown) => process.exit(report(error));
  process.on("uncaughtException", onUncaught);
  process.on("unhandledRejection", onUncaught);
}

/** The `aenv` command line. Resolves with the exit status. */
export async function cliMain(argv: string[]): Promise<number> {
  installLastResorts();
  const shell = process.env.COMPLETE;
  if (shell !== undefined && shell !== "") {
    const { answerCompletion } = await import("./completion.ts");
    return answerCompletion(shell, argv);
  }
  try {
    return await run(argv);
  } catch (error) {
    return report(error);
  }
}
