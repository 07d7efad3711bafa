import { errorChain } from "../lib/errors.ts";
import { CliError } from "./command.ts";
import { COMMANDS, GROUPS, SERVER_PROGRAMS } from "./commands.ts";
import { plainLines } from "./output.ts";
import { parseLine } from "./program.ts";

async function run(argv: readonly string[]): Promise<number> {
  const line = parseLine({ commands: COMMANDS, groups: GROUPS, serverPrograms: SERVER_PROGRAMS }, argv);
  return typeof line === "number" ? line : line.command.run(line.invocation);
}

/** Tells the user what went wrong; returns the exit status for it. */
function report(error: unknown): number {
  // Should standard error be closed, this is all there is left to tell.
  process.exitCode = error instanceof CliError ? error.exitCode : 1;
  const [message, ...causes] = errorChain(error);
  process.stderr.write(`Error: ${plainLines(message ?? "unknown")}\n`);
  for (const cause of causes) process.stderr.write(`  caused by: ${plainLines(cause)}\n`);
  if (!(error instanceof CliError)) return 1;
  if (error.hint !== undefined) process.stderr.write(`${plainLines(error.hint).replace(/^(?=.)/gm, "  ")}\n`);
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
    if (process.stderr.listenerCount("error") === 1) process.exit(process.exitCode ?? 1);
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
