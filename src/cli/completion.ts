import type { Command as Node, Option } from "commander";
import { Api, type SandboxJson, type SnapshotJson, type TemplateJson } from "./api.ts";
import { CliError, type Dynamic } from "./command.ts";
import { COMMANDS, GROUPS, SERVER_PROGRAMS } from "./commands.ts";
import { LOCAL_PATHS, SHELLS } from "./completion-scripts.ts";
import { loadCredentials } from "./credentials.ts";
import { plainText } from "./output.ts";
import { buildProgram, TreeArgument } from "./program.ts";

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
    shell === "bash" || value === LOCAL_PATHS ? `${value}\n` : `${value}\t${plainText(description)}\n`,
  );
  process.stdout.write(lines.join(""));
  return 0;
}

/** Candidates for the last word of a command line whose first word is the program. */
export async function candidatesFor(words: readonly string[]): Promise<Candidate[]> {
  const current = words.at(-1) ?? "";
  const typed = words.slice(1, -1);
  const found = (await possible(typed[0] === "help" ? typed.slice(1) : typed, current)).filter(
    ({ value }) => value === LOCAL_PATHS || value.startsWith(current),
  );
  return found.filter(({ value }, i) => found.findIndex((other) => other.value === value) === i);
}

const HELP: Candidate = { value: "--help", description: "Show help" };

async function possible(typed: readonly string[], current: string): Promise<Candidate[]> {
  let node = buildProgram({ commands: COMMANDS, groups: GROUPS, serverPrograms: SERVER_PROGRAMS });
  let depth = 0;
  while (node.commands.length > 0 && depth < typed.length) {
    const word = typed[depth]!;
    const next = node.commands.find((entry) => entry.name() === word || entry.aliases().includes(word));
    if (next === undefined) return [];
    node = next;
    depth++;
  }
  if (node.commands.length === 0) return inCommand(node, typed.slice(depth), current);
  if (current.startsWith("-")) {
    return depth === 0 ? [HELP, { value: "--version", description: "Show the version" }] : [HELP];
  }
  return node
    .createHelp()
    .visibleCommands(node)
    .flatMap((entry) =>
      [entry.name(), ...entry.aliases()].map((value) => ({
        value,
        description: entry.summary() || entry.description(),
      })),
    );
}

const takesValue = (option: Option) => option.required || option.optional;

/** What may come behind a command and the words that follow it. */
async function inCommand(node: Node, typed: readonly string[], current: string): Promise<Candidate[]> {
  const args = node.registeredArguments;
  const fixed = args.filter((argument) => !(argument instanceof TreeArgument && argument.rest)).length;
  const takesRest = fixed < args.length;
  const optionOf = (word: string) =>
    node.options.find((option) => [option.long, option.short].includes(word.split("=", 1)[0]!));
  const used = new Set<Option>();
  let position = 0;
  let literal = false;
  for (let i = 0; i < typed.length; i++) {
    const word = typed[i]!;
    // Behind the first word of a command that runs another one nothing is ours any more.
    if (literal || !word.startsWith("-") || word === "-" || (takesRest && position > 0)) {
      position++;
      // The rest is the command line of another program.
      if (takesRest && position > fixed) return [];
    } else if (word === "--") {
      literal = true;
    } else {
      const option = optionOf(word);
      if (option === undefined) continue;
      used.add(option);
      if (!takesValue(option) || word.includes("=")) continue;
      if (i === typed.length - 1) return choices(option.argChoices, "", option.description);
      i++;
    }
  }
  if (!literal && current.startsWith("-") && !(takesRest && position >= fixed)) {
    if (current.includes("=")) {
      const option = optionOf(current);
      return option === undefined
        ? []
        : choices(option.argChoices, `${current.split("=", 1)[0]}=`, option.description);
    }
    const repeatable = (option: Option) => option.parseArg !== undefined && option.argChoices === undefined;
    return [
      ...node.options
        .filter((option) => !option.hidden && option.long != null)
        .filter((option) => !used.has(option) || repeatable(option))
        .map((option) => ({ value: option.long!, description: option.description })),
      HELP,
    ];
  }
  const argument = args[position] ?? (args.at(-1)?.variadic === true ? args.at(-1) : undefined);
  return argument instanceof TreeArgument ? argumentCandidates(argument) : [];
}

function choices(values: readonly string[] | undefined, prefix: string, description: string): Candidate[] {
  return (values ?? []).map((value) => ({ value: prefix + value, description }));
}

async function argumentCandidates(argument: TreeArgument): Promise<Candidate[]> {
  if (argument.argChoices !== undefined) return choices(argument.argChoices, "", argument.description);
  if (argument.complete === undefined) return [];
  if (argument.complete === "path") return [{ value: LOCAL_PATHS, description: "" }];
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

/** `ready`: only those that a sandbox can be started from. */
function templateCandidates(templates: readonly TemplateJson[], ready: boolean): Candidate[] {
  return templates.flatMap(({ templateID, names, aliases, buildStatus = "template" }) => {
    if (ready && buildStatus !== "ready" && buildStatus !== "template") return [];
    const all = names ?? aliases ?? [];
    return all.length > 0
      ? all.map((value) => ({ value, description: `${buildStatus}, ${templateID}` }))
      : [{ value: templateID, description: buildStatus }];
  });
}

function snapshotCandidates(snapshots: readonly SnapshotJson[]): Candidate[] {
  return snapshots.flatMap(({ snapshotID, names = [] }) =>
    [...names, snapshotID].map((value) => ({
      value,
      description: value === snapshotID ? names.join(", ") || "snapshot" : snapshotID,
    })),
  );
}

async function fromServer(what: Dynamic): Promise<Candidate[]> {
  const signal = AbortSignal.timeout(TOTAL_MS);
  const api = new Api(await loadCredentials());
  const options = { signal, timeoutMs: TOTAL_MS, connectTimeoutMs: CONNECT_MS };
  const templates = async () =>
    templateCandidates(await api.list<TemplateJson>("/v2/templates", options), what === "startable");
  const snapshots = async () => snapshotCandidates(await api.list<SnapshotJson>("/snapshots", options));
  if (what === "template") return templates();
  if (what === "snapshot") return snapshots();
  if (what === "startable") {
    // Whichever of the two fails leaves the other.
    const found = await Promise.allSettled([templates(), snapshots()]);
    return found.flatMap((list) => (list.status === "fulfilled" ? list.value : []));
  }
  const state = { sandbox: "", "running-sandbox": "?state=running", "paused-sandbox": "?state=paused" }[what];
  const sandboxes = await api.list<SandboxJson>(`/v2/sandboxes${state}`, options);
  return sandboxes.map((sandbox) => ({
    value: sandbox.sandboxID,
    description: `${sandbox.alias ?? sandbox.templateID} (${sandbox.state ?? "unknown"})`,
  }));
}
