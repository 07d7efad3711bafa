import { explain, helpOf, type LayerHelpers, type Output, runCommand, UsageError } from "./command.ts";
import { LAYER_COMMANDS } from "./commands.ts";

const OVERVIEW = [
  "Usage: agentenv layer COMMAND [arguments]",
  "",
  "Make, look into, check and change overlaybd layers: LSMT files, ZFiles, either wrapped in tar, and writable layers.",
  "",
  "Commands:",
  ...LAYER_COMMANDS.map((command) => `  ${command.name.padEnd(9)} ${command.summary}`),
  "",
  'Each command has its own help: "agentenv layer COMMAND --help".',
].join("\n");

const STANDARD: Output = {
  text: (line) => process.stdout.write(`${line}\n`),
  json: (value) => process.stdout.write(`${JSON.stringify(value, null, 2)}\n`),
  bytes: async (bytes) => {
    await Bun.write(Bun.stdout, bytes);
  },
};

/**
 * `agentenv layer`. Returns the exit code: 0, 1 for failures (and for layers that are not valid or differ, where
 * that was the question), 2 for mistakes in the command line.
 */
export async function layerMain(
  argv: readonly string[],
  output: Output = STANDARD,
  complain: (text: string) => void = (text) => process.stderr.write(`${text}\n`),
  helpers: LayerHelpers = {},
): Promise<number> {
  const [name, ...rest] = argv;
  if (name === undefined || name === "--help" || name === "-h" || name === "help") {
    const topic = LAYER_COMMANDS.find((command) => command.name === rest[0]);
    output.text(topic === undefined ? OVERVIEW : helpOf(topic));
    return name === undefined ? 2 : 0;
  }
  const command = LAYER_COMMANDS.find((candidate) => candidate.name === name);
  if (command === undefined) {
    complain(`Error: there is no command ${JSON.stringify(name)}\n\n${OVERVIEW}`);
    return 2;
  }
  try {
    return await runCommand(command, rest, output, helpers);
  } catch (error) {
    complain(explain(error));
    if (!(error instanceof UsageError)) return 1;
    complain(`  see "agentenv layer ${name} --help"`);
    return 2;
  }
}
