/** docs/agentenv.md from the help of the programs on a server's host: prints it, or with --write puts it in place. */
import { join } from "node:path";

const ROOT = join(import.meta.dir, "..");
/** In the order of a reader: what is run first comes first. */
const PROGRAMS = ["setup", "doctor", "config", "serve", "layer"];

function help(words: readonly string[]): string {
  const { exitCode, stdout, stderr } = Bun.spawnSync(
    [process.execPath, join(ROOT, "src/main.ts"), ...words, "--help"],
    { env: { PATH: process.env.PATH, HOME: "/nonexistent", COLUMNS: "110" } },
  );
  if (exitCode !== 0) throw new Error(`agentenv ${words.join(" ")} --help ended with ${exitCode}: ${stderr}`);
  return stdout.toString().trim();
}

/** Names in a help's list of commands. */
function commandsOf(text: string): string[] {
  const section = /^Commands:\n((?: {2}.*\n?)+)/m.exec(text)?.[1] ?? "";
  return [...section.matchAll(/^ {2}([a-z][a-z-]*)/gm)].map((match) => match[1]!);
}

export function programsPage(): string {
  let page = `# Programs on a server's host

\`agentenv\` is one executable: the server, what prepares a host for it, tools for its files, and, under its other name
\`aenv\`, the [command line](cli.md). This page is made from the programs' own help by \`scripts/programs-doc.ts --write\`.
`;
  const section = (words: readonly string[]) => {
    const text = help(words);
    page += `\n##${"#".repeat(words.length - 1)} agentenv ${words.join(" ")}\n\n\`\`\`text\n${text}\n\`\`\`\n`;
    for (const name of commandsOf(text)) section([...words, name]);
  };
  for (const name of PROGRAMS) section([name]);
  return page;
}

if (import.meta.main) {
  const page = programsPage();
  if (process.argv[2] === "--write") await Bun.write(join(ROOT, "docs/agentenv.md"), page);
  else process.stdout.write(page);
}
