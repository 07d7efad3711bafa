import { Api, type SandboxJson, type TemplateJson } from "./api.ts";
import { type Argument, CliError, type Command, type Dynamic, flagNames, flagOf } from "./command.ts";
import { COMMANDS, SERVER_PROGRAMS } from "./commands.ts";
import { SHELLS } from "./completion-scripts.ts";
import { loadCredentials } from "./credentials.ts";
import { plainText } from "./output.ts";

const CONNECT_MS = 500;
const TOTAL_MS = 1_000;

interface Candidate {
  readonly value: string;
  readonly description: string;
}

/**
 * Answers the callback of a script. Best effort: whatever fails leaves fewer candidates, never a message
 * or a bad status.
 */
export async function answerCompletion(shell: string, argv: readonly string[]): Promise<number> {
  if (!(SHELLS as readonly string[]).includes(shell)) return 0;
  const words = argv[0] === "--" ? argv.slice(1) : argv;
  const lines = (await candidatesFor(words)).map(({ value, description }) =>
    shell === "bash" ? `${value}\n` : `${value}\t${plainText(description)}\n`,
  );
  process.stdout.write(lines.join(""));
  return 0;
}

/** Candidates for the last word of a command line whose first word is the program. */
export async function candidatesFor(words: readonly string[]): Promise<Candidate[]> {
  const current = words.at(-1) ?? "";
  const typed = words.slice(1, -1);
  const found = (await possible(typed[0] === "help" ? typed.slice(1) : typed, current)).filter(({ value }) =>
    value.startsWith(current),
  );
  return found.filter(({ value }, i) => found.findIndex((other) => other.value === value) === i);
}

async function possible(typed: readonly string[], current: string): Promise<Candidate[]> {
  const visible = COMMANDS.filter((command) => command.hidden !== true);
  const named = (commands: readonly Command[], words: readonly string[]): Candidate[] =>
    commands.flatMap((command) =>
      [command.name, ...(command.aliases ?? [])].flatMap((name) => {
        const parts = name.split(" ");
        if (words.some((word, i) => parts[i] !== word)) return [];
        const next = parts[words.length];
        if (next === undefined) return [];
        const group = parts.length > words.length + 1;
        return [
          {
            value: next,
            description: group ? `Commands for ${command.name.split(" ")[0]}s` : command.summary,
          },
        ];
      }),
    );
  if (typed.length === 0) {
    if (current.startsWith("-")) {
      return [
        { value: "--help", description: "Show help" },
        { value: "--version", description: "Show the version" },
      ];
    }
    const programs = SERVER_PROGRAMS.map(([value, description]) => ({ value, description }));
    return [...named(visible, []), ...programs];
  }
  for (const length of [2, 1]) {
    const name = typed.slice(0, length).join(" ");
    const command = COMMANDS.find((entry) => entry.name === name || entry.aliases?.includes(name));
    if (command !== undefined && typed.length >= length)
      return inCommand(command, typed.slice(length), current);
  }
  return typed.length === 1 ? named(visible, typed) : [];
}

/** What may come behind a command and the words that follow it. */
async function inCommand(command: Command, typed: readonly string[], current: string): Promise<Candidate[]> {
  const fixed = command.arguments.filter((argument) => argument.rest !== true).length;
  const takesRest = fixed < command.arguments.length;
  const used = new Set<string>();
  let position = 0;
  let literal = false;
  for (let i = 0; i < typed.length; i++) {
    const word = typed[i]!;
    if (literal || !word.startsWith("-") || word === "-") {
      position++;
      // The rest is the command line of another program.
      if (takesRest && position > fixed) return [];
    } else if (word === "--") {
      literal = true;
    } else {
      const flag = flagOf(command, word);
      if (flag === undefined) continue;
      used.add(flag.name);
      if (flag.value === undefined || word.includes("=")) continue;
      if (i === typed.length - 1) return choices(flag.choices, "", flag.help);
      i++;
    }
  }
  if (!literal && current.startsWith("-") && !(takesRest && position >= fixed)) {
    const flag = flagOf(command, current);
    if (current.includes("=")) {
      return flag === undefined ? [] : choices(flag.choices, `${current.split("=", 1)[0]}=`, flag.help);
    }
    return [
      ...command.flags
        .filter(({ name }) => !used.has(name))
        .map((entry) => ({ value: `--${flagNames(entry)[0]}`, description: entry.help })),
      { value: "--help", description: "Show help" },
    ];
  }
  const argument = command.arguments[position];
  return argument === undefined ? [] : argumentCandidates(argument);
}

function choices(values: readonly string[] | undefined, prefix: string, description: string): Candidate[] {
  return (values ?? []).map((value) => ({ value: prefix + value, description }));
}

async function argumentCandidates(argument: Argument): Promise<Candidate[]> {
  if (argument.choices !== undefined) return choices(argument.choices, "", argument.help);
  if (argument.complete === undefined) return [];
  try {
    const found = await fromServer(argument.complete);
    // A name goes into a command line: none that a shell would read as anything but a word.
    return found
      .filter(({ value }) => /^[\w.:/@+-]+$/.test(value))
      .sort((a, b) => (a.value < b.value ? -1 : 1));
  } catch (error) {
    // No credentials, no server, no time.
    if (error instanceof CliError) return [];
    throw error;
  }
}

async function fromServer(what: Dynamic): Promise<Candidate[]> {
  const signal = AbortSignal.timeout(TOTAL_MS);
  const api = new Api(await loadCredentials());
  const options = { signal, timeoutMs: TOTAL_MS, connectTimeoutMs: CONNECT_MS };
  if (what === "template") {
    const templates = await api.list<TemplateJson>("/v2/templates", options);
    return templates.flatMap((template) => {
      const names = template.names ?? template.aliases ?? [];
      const description = `${template.buildStatus ?? "template"}, ${template.templateID}`;
      return names.length > 0
        ? names.map((value) => ({ value, description }))
        : [{ value: template.templateID, description: template.buildStatus ?? "template" }];
    });
  }
  const state = { sandbox: "", "running-sandbox": "?state=running", "paused-sandbox": "?state=paused" }[what];
  const sandboxes = await api.list<SandboxJson>(`/v2/sandboxes${state}`, options);
  return sandboxes.map((sandbox) => ({
    value: sandbox.sandboxID,
    description: `${sandbox.alias ?? sandbox.templateID} (${sandbox.state ?? "unknown"})`,
  }));
}
