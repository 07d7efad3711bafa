/** The command line's tree as a page of Markdown, for docs/cli.md. */
import type { Command } from "commander";
import { COMMANDS, GROUPS, SERVER_PROGRAMS } from "../src/cli/commands.ts";
import { buildProgram, path, SERVER_GROUP, usageOf } from "../src/cli/program.ts";

const cell = (text: string) =>
  text.replaceAll("|", "\\|").replaceAll("\n", " ").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const anchor = (name: string) => name.toLowerCase().replaceAll(" ", "-");

const INTRODUCTION = `# Command line

\`aenv\` talks to a server, or to a gateway in front of several, over HTTP: it needs nothing of the machine it
runs on, and runs on Linux and macOS. Made from the commands' own definitions, as \`aenv COMMAND --help\` is.

| | |
|---|---|
| Address and key | \`E2B_API_URL\` and \`E2B_API_KEY\` when both are set; else those of \`aenv auth\`, which stores them in \`~/.config/aenv/credentials\` (below \`$XDG_CONFIG_HOME\` when that is set), mode 0600; else, for \`dist/aenv\` of a checkout, those of its \`make start\` |
| Exit status | 0 done, 1 failed, 2 wrong usage, 130 interrupted or the session's sandbox was paused, deleted or lost; \`exec\`, \`start\` and \`connect\` end with the remote command's own status, \`exec --timeout\` with 124 |
| Output | tables on a terminal, JSON for programs; \`--output table\` or \`--output json\` says which. Progress and notices go to standard error; control sequences only ever to a terminal |
| Errors | \`Error: …\` on standard error, with its causes and what to do about it |
| Times | in tables: this machine's local time (\`$TZ\`) with its offset from UTC, \`2026-01-02 04:04:05+01:00\`, or \`Z\` where that is none; in JSON: UTC, as the API has it. A paused sandbox has no end |
| Sizes | binary units, \`1.4 MiB\`; options that take a number of MB or MiB mean MiB |
| Templates | a template is named by its id or by any of its names |
| Proxies | those of the environment are used, except for this machine |
| Detach keys | Ctrl-] twice within half a second leaves a session and what runs in it as it is; \`--detach-keys\` or \`$AENV_DETACH_KEYS\` names others |

`;

function leaves(node: Command): Command[] {
  const children = node.createHelp().visibleCommands(node);
  return children.flatMap((child) => (child.commands.length > 0 ? leaves(child) : [child]));
}

function section(node: Command): string {
  const name = path(node).slice(1).join(" ");
  let text = `### ${name}\n\n${node.description()}\n\n\`\`\`\n${usageOf(node)}\n\`\`\`\n`;
  const parent = node.parent!;
  const before =
    parent.parent === null ? [""] : [parent.name(), ...parent.aliases()].map((word) => `${word} `);
  const aliases = before
    .flatMap((word) => [node.name(), ...node.aliases()].map((own) => `${word}${own}`))
    .filter((other) => other !== name);
  if (aliases.length > 0) text += `\nAlso: ${aliases.map((alias) => `\`aenv ${alias}\``).join(", ")}\n`;
  const rows = [
    ...node.registeredArguments.map((argument) => [
      `\`${argument.name()}${argument.variadic ? "…" : ""}\``,
      `${argument.description}${argument.argChoices === undefined ? "" : ` (${argument.argChoices.join(", ")})`}`,
    ]),
    ...node.options
      .filter((option) => !option.hidden)
      .map((option) => [
        `\`${option.flags}\``,
        `${option.description}${option.argChoices === undefined ? "" : ` (${option.argChoices.join(", ")})`}`,
      ]),
  ];
  if (rows.length > 0) {
    text += `\n| Argument or option | |\n|---|---|\n`;
    text += rows.map(([left, right]) => `| ${left!.replaceAll("|", "\\|")} | ${cell(right!)} |\n`).join("");
  }
  const examples = COMMANDS.find((command) => command.name === name)?.examples ?? [];
  if (examples.length > 0) text += `\n\`\`\`sh\n${examples.join("\n")}\n\`\`\`\n`;
  return text;
}

/** The whole page. */
export function renderCliPage(): string {
  const program = buildProgram({ commands: COMMANDS, groups: GROUPS, serverPrograms: SERVER_PROGRAMS });
  const all = leaves(program);
  const client = all.filter((node) => node.helpGroup() !== SERVER_GROUP);
  const server = all.filter((node) => node.helpGroup() === SERVER_GROUP);
  const completion = program.commands.filter((node) => node.name() === "completion");
  const groups = Map.groupBy(client, (node) => node.helpGroup() || "Other commands:");
  let text = INTRODUCTION;
  text += "| Command | |\n|---|---|\n";
  for (const node of client) {
    const name = path(node).slice(1).join(" ");
    text += `| [\`aenv ${name}\`](#${anchor(name)}) | ${cell(node.summary())} |\n`;
  }
  for (const [heading, nodes] of groups) {
    text += `\n## ${heading.replace(/:$/, "")}\n\n${nodes.map(section).join("\n")}`;
  }
  text += `\n## Completion\n\n${completion.map(section).join("\n")}
The scripts ask the executable at each key, so they stay right when it is replaced, and complete sandboxes,
templates and snapshots that are there now.\n`;
  text += `\n## On the server's host\n\nOf the same executable, called \`agentenv\`:\n\n| Program | |\n|---|---|\n`;
  for (const node of server) text += `| \`agentenv ${node.name()}\` | ${cell(node.summary())} |\n`;
  text += "| `agentenv doctor` | Check this host: what is there, what is missing, how to get it |\n";
  return text;
}
