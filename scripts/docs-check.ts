/**
 * Holds the documentation to the product: every command, option, configuration key, variable, script and make target
 * named in it exists, every existing one is named, every link leads somewhere, made pages are current.
 *   docs-check.ts        prints what is wrong, exit 1; else one line
 */
import { existsSync, readFileSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { describeKeys } from "../src/config/index.ts";
import { configurationPage } from "./config-doc.ts";
import { programsPage } from "./programs-doc.ts";

const ROOT = resolve(import.meta.dir, "..");
const problems: string[] = [];
const counts: Record<string, number> = {};
const count = (what: string) => {
  counts[what] = (counts[what] ?? 0) + 1;
};

interface Block {
  /** First word of the info string. */
  readonly language: string;
  readonly lines: { readonly text: string; readonly at: string }[];
}

interface Page {
  readonly name: string;
  readonly text: string;
  readonly blocks: Block[];
  /** Text outside of code blocks. */
  readonly prose: string;
}

function readPage(name: string): Page {
  const text = readFileSync(join(ROOT, name), "utf8");
  const blocks: Block[] = [];
  const prose: string[] = [];
  let block: Block | undefined;
  text.split("\n").forEach((line, i) => {
    const fence = /^\s*```(.*)$/.exec(line);
    if (fence !== null) {
      if (block !== undefined) {
        blocks.push(block);
        block = undefined;
      } else block = { language: fence[1]!.trim().split(" ")[0]!, lines: [] };
      prose.push("");
    } else if (block !== undefined) block.lines.push({ text: line, at: `${name}:${i + 1}` });
    else prose.push(line);
  });
  if (block !== undefined) problems.push(`${name}: a code block is not closed`);
  return { name, text, blocks, prose: prose.join("\n") };
}

const pages = [
  "README.md",
  "CONTRIBUTING.md",
  "CHANGELOG.md",
  ...[...new Bun.Glob("docs/**/*.md").scanSync({ cwd: ROOT })].sort(),
].map(readPage);
const everything = pages.map((page) => page.text).join("\n");

// ---- commands and options -----------------------------------------------------------------------

interface Help {
  readonly options: ReadonlySet<string>;
  readonly text: string;
}

const helps = new Map<string, Help | undefined>();

/** What `--help` of these words says; undefined: there is no such command. */
function help(words: readonly string[]): Help | undefined {
  const name = words.join(" ");
  if (!helps.has(name)) {
    const { exitCode, stdout } = Bun.spawnSync(
      [process.execPath, join(ROOT, "src/main.ts"), ...words, "--help"],
      { env: { PATH: process.env.PATH, HOME: "/nonexistent", COLUMNS: "200" } },
    );
    const text = stdout.toString();
    helps.set(
      name,
      exitCode === 0
        ? {
            text,
            options: new Set([...text.matchAll(/(?<![\w-])(--?[a-zA-Z][\w-]*)/g)].map((match) => match[1]!)),
          }
        : undefined,
    );
  }
  return helps.get(name);
}

/** Commands a help lists, each with its other names: `list, ls  List sandboxes`. */
function listed(text: string): string[][] {
  return [...text.matchAll(/^ {2}([a-z][a-z-]*(?:, [a-z-]+)*)(?: {2,}|$| <| \[)/gm)].map((match) =>
    match[1]!.split(", "),
  );
}

/** The part of a group's help that lists its commands: under "Commands:", or under the group's own heading. */
function sectionOfCommands(text: string): string {
  return /^(?:Commands|[A-Z][a-z]+ and [a-z]+|Sandboxes):\n((?: {2}.*\n?)+)/m.exec(text)?.[1] ?? "";
}

const commandsIn = (text: string) => listed(text).map(([name]) => name!);

/** Words of a shell line's commands, comments and quotes taken care of as far as documentation needs it. */
export function shellCommands(line: string): string[][] {
  const commands: string[][] = [];
  let words: string[] = [];
  let word: string | undefined;
  let quote = "";
  const endWord = () => {
    if (word !== undefined) words.push(word);
    word = undefined;
  };
  const endCommand = () => {
    endWord();
    if (words.length > 0) commands.push(words);
    words = [];
  };
  for (let i = 0; i < line.length; i++) {
    const c = line[i]!;
    if (quote !== "") {
      if (quote === '"' && c === "$" && line[i + 1] === "(") {
        // A substitution inside of quotes is a command, too.
        const end = line.indexOf(")", i);
        commands.push(...shellCommands(line.slice(i + 2, end === -1 ? undefined : end)));
        i = end === -1 ? line.length : end;
      } else if (c === quote) quote = "";
      else word = (word ?? "") + c;
    } else if (c === "'" || c === '"') {
      quote = c;
      word ??= "";
    } else if (c === "#" && word === undefined) break;
    else if (c === "$" && line[i + 1] === "(") {
      const end = line.indexOf(")", i);
      commands.push(...shellCommands(line.slice(i + 2, end === -1 ? undefined : end)));
      i = end === -1 ? line.length : end;
      word = `${word ?? ""}$()`;
    } else if (/\s/.test(c)) endWord();
    else if (c === ";" || c === "|" || c === "&" || c === "(" || c === ")") endCommand();
    else word = (word ?? "") + c;
  }
  endCommand();
  return commands;
}

const PREFIXES = new Set(["sudo", "exec", "env", "then", "do", "else", "!", "time"]);
/** Options of the prefixes themselves that take the next word. */
const PREFIX_VALUE = new Set(["-u"]);
const NAMES = new Set(["aenv", "agentenv"]);

const documented = new Set<string>();

function checkInvocation(name: string, words: readonly string[], at: string): void {
  // Everything behind a lone `--` is somebody else's command.
  const lone = words.indexOf("--");
  const own = lone === -1 ? words : words.slice(0, lone);
  let command: string[] = [];
  for (const length of [2, 1]) {
    const head = own.slice(0, length);
    if (
      head.length === length &&
      head.every((word) => /^[a-z][a-z-]*$/.test(word)) &&
      help(head) !== undefined
    ) {
      // A word after a command that has none below it is its argument.
      if (
        length === 2 &&
        !listed(help(head.slice(0, 1))?.text ?? "")
          .flat()
          .includes(head[1]!)
      )
        continue;
      command = head;
      break;
    }
  }
  if (command.length === 0) {
    const first = own[0];
    if (first === undefined || /^[A-Z<[…]/.test(first)) return;
    if (first.startsWith("-") ? help([])?.options.has(first) : false) return;
    if (first === "version" || first === "help" || first === "merge-layers" || first === "blockd") return;
    problems.push(`${at}: ${name} has no command "${first}"`);
    return;
  }
  count("commands");
  documented.add(command.join(" "));
  const known = help(command)!;
  // What follows the first argument of exec-like commands may be another program's.
  const foreign = /^(exec|start|connect)$/.test(command.join(" "));
  let args = 0;
  for (const word of own.slice(command.length)) {
    if (!word.startsWith("-") || word === "-") {
      if (++args > 1 && foreign) break;
      continue;
    }
    const option = word.split("=")[0]!;
    const isNumber = /^-\d/.test(option);
    if (!isNumber && !known.options.has(option))
      problems.push(`${at}: ${name} ${command.join(" ")} has no option ${option}`);
    else count("options");
  }
}

function checkScript(path: string, words: readonly string[], at: string): void {
  const file = join(ROOT, path);
  if (!existsSync(file)) {
    problems.push(`${at}: there is no ${path}`);
    return;
  }
  count("scripts");
  const text = readFileSync(file, "utf8");
  for (const word of words) {
    if (/^--[a-z]/.test(word) && !text.includes(word.split("=")[0]!))
      problems.push(`${at}: ${path} has no option ${word}`);
  }
}

const makefile = readFileSync(join(ROOT, "Makefile"), "utf8");
const targets = new Set([...makefile.matchAll(/^([a-z][a-z-]*)(?:-%)?:/gm)].map((match) => match[1]!));
const patterns = [...makefile.matchAll(/^([a-z-]+-)%:/gm)].map((match) => match[1]!);
const documentedTargets = new Set<string>();

function checkMake(words: readonly string[], at: string): void {
  for (const word of words) {
    if (word.includes("=") || word.startsWith("-")) continue;
    if (!/^[a-z]/.test(word)) break;
    count("make targets");
    documentedTargets.add(word);
    if (!targets.has(word) && !patterns.some((prefix) => word.startsWith(prefix))) {
      problems.push(`${at}: make has no target ${word}`);
    }
  }
}

function checkLine(line: string, at: string): void {
  for (let words of shellCommands(line.replace(/^\$ /, ""))) {
    while (words.length > 0 && (PREFIXES.has(words[0]!) || /^[A-Za-z_][A-Za-z0-9_]*=/.test(words[0]!))) {
      words = words.slice(1);
      while (words[0]?.startsWith("-") && !NAMES.has(words[0]))
        words = words.slice(PREFIX_VALUE.has(words[0]) ? 2 : 1);
    }
    // setpriv, runuser and their like: the program they start is what counts.
    const inner = words.findIndex(
      (word, i) => i > 0 && NAMES.has(word) && /^(setpriv|runuser|nsenter)$/.test(words[0]!),
    );
    if (inner !== -1) words = words.slice(inner);
    const [first, ...rest] = words;
    if (first === undefined) continue;
    const base = first.slice(first.lastIndexOf("/") + 1);
    if (NAMES.has(base) && (first === base || /^(dist|\.)\//.test(first))) checkInvocation(base, rest, at);
    else if (first === "make") checkMake(rest, at);
    else if (/^(\.\/)?(scripts|tests)\/.*\.(sh|ts)$/.test(first))
      checkScript(first.replace(/^\.\//, ""), rest, at);
    else if (first === "./install.sh") checkScript("scripts/install.sh", rest, at);
    else if (base === "bun" && rest[0]?.startsWith("scripts/")) checkScript(rest[0], rest.slice(1), at);
  }
}

for (const page of pages) {
  for (const block of page.blocks) {
    if (!["sh", "bash", "console"].includes(block.language)) continue;
    // A line that ends with a backslash goes on.
    let open: { text: string; at: string } | undefined;
    for (const { text, at } of block.lines) {
      const whole: string = open === undefined ? text : `${open.text} ${text.trim()}`;
      if (/\\$/.test(whole)) open = { text: whole.slice(0, -1), at: open?.at ?? at };
      else {
        checkLine(whole, open?.at ?? at);
        open = undefined;
      }
    }
  }
  page.prose.split("\n").forEach((line, i) => {
    for (const [, code] of line.matchAll(/`([^`]+)`/g)) {
      if (/^(sudo )?(aenv|agentenv|make) /.test(code!))
        checkLine(code!.replace(/…/g, ""), `${page.name}:${i + 1}`);
      const script = /^(scripts|deploy|src|c|ffi|tests|config|docs)\/[\w./-]+$/.exec(code!);
      // Tests and modules may be named without their ending.
      if (script !== null && !["", ".ts", ".test.ts"].some((end) => existsSync(join(ROOT, `${code}${end}`))))
        problems.push(`${page.name}:${i + 1}: there is no ${code}`);
    }
  });
}

// A heading of its own documents a command, too.
for (const { prose } of pages) {
  for (const [, name] of prose.matchAll(/^#+ (?:aenv|agentenv) ([a-z][a-z -]*)$/gm)) documented.add(name!);
}

// The other way: what exists is documented.
const mainHelp = help([]);
if (mainHelp === undefined) throw new Error("agentenv --help failed");
const existing = commandsIn(mainHelp.text).flatMap((name) => {
  const section = sectionOfCommands(help([name])?.text ?? "");
  const nested = commandsIn(section).filter((inner) => help([name, inner]) !== undefined);
  return nested.length > 0 ? nested.map((inner) => `${name} ${inner}`) : [name];
});
for (const name of existing) {
  if (!documented.has(name)) problems.push(`the command "${name}" is in no page`);
}
for (const line of makefile.matchAll(/^([a-z][a-z-]*):.*## /gm)) {
  if (!documentedTargets.has(line[1]!)) problems.push(`the make target ${line[1]} is in no page`);
}

// ---- configuration keys and variables -----------------------------------------------------------

const keys = new Set(describeKeys().map((key) => key.name));
const tables = new Set(
  [...keys].flatMap((key) =>
    key
      .split(".")
      .slice(0, -1)
      .map((_, i, parts) => parts.slice(0, i + 1).join(".")),
  ),
);
/** Settings of the host's kernel and fields of requests that look like keys of ours. */
const OTHERS = /^(kernel\.(io_uring_disabled|pid_max)|network\.rules)$/;
for (const page of pages) {
  page.prose.split("\n").forEach((line, i) => {
    for (const [, code] of line.matchAll(/`([^`]+)`/g)) {
      const name = code!.replace(/^\[(.*)\]$/, "$1").split(" ")[0]!;
      if (!/^[a-z0-9_]+(\.[a-z0-9_]+)+$/.test(name)) continue;
      const top = name.split(".")[0]!;
      // A file name, or a field of something else.
      if (
        !tables.has(top) ||
        OTHERS.test(name) ||
        /\.(ts|py|md|sh|toml|json|db|sock|log|service)$/.test(name)
      )
        continue;
      count("configuration keys");
      if (!keys.has(name) && !tables.has(name))
        problems.push(`${page.name}:${i + 1}: there is no configuration key ${name}`);
    }
  });
  for (const block of page.blocks.filter((each) => each.language === "toml")) {
    let table = "";
    for (const { text, at } of block.lines) {
      table = /^\[([\w.]+)\]/.exec(text)?.[1] ?? table;
      const key = /^([\w]+)\s*=/.exec(text)?.[1];
      if (key === undefined) continue;
      const name = table === "" ? key : `${table}.${key}`;
      count("configuration keys");
      if (!keys.has(name)) problems.push(`${at}: there is no configuration key ${name}`);
    }
  }
}
const page = pages.find(({ name }) => name === "docs/configuration.md");
if (page?.text !== configurationPage())
  problems.push("docs/configuration.md is not current: scripts/config-doc.ts --write");
const programs = pages.find(({ name }) => name === "docs/agentenv.md");
if (programs?.text !== programsPage()) {
  problems.push("docs/agentenv.md is not current: scripts/programs-doc.ts --write");
}
for (const name of keys)
  if (!page?.text.includes(`\`${name}\``)) problems.push(`the key ${name} is in no page`);

const sources = [
  ...new Bun.Glob("{src,ffi,tests,scripts,deploy}/**/*").scanSync({ cwd: ROOT, onlyFiles: true }),
  "Makefile",
].map((file) => ({ file, text: readFileSync(join(ROOT, file), "utf8") }));
const VARIABLE = /\b(?:AENV|AGENTENV)_[A-Z0-9_]+\b/g;
const read = new Set(
  sources.flatMap(({ file, text }) => (file === "scripts/docs-check.ts" ? [] : (text.match(VARIABLE) ?? []))),
);
for (const each of pages) {
  each.text.split("\n").forEach((line, i) => {
    for (const name of line.match(VARIABLE) ?? []) {
      count("variables");
      if (!read.has(name) && name !== "AENV_HOME" && name !== "AENV_RUNTIME") {
        problems.push(`${each.name}:${i + 1}: nothing reads the variable ${name}`);
      }
    }
  });
}
/** Read by the server, the command line or the installer: a user's. Those of tests and scripts are in their own files. */
const users = new Set(
  sources.flatMap(({ file, text }) => {
    if (file === "scripts/install.sh" || file === "src/config/schema.ts") return text.match(VARIABLE) ?? [];
    if (!/^src\/.*\.ts$/.test(file) || /\.(test|netns)\.ts$|test-?support|testing/.test(file)) return [];
    return [...text.matchAll(/env(?:ironment)?\??\.(AENV_\w+|AGENTENV_\w+)/g)].map((match) => match[1]!);
  }),
);
for (const name of users) {
  if (!everything.includes(name)) problems.push(`the variable ${name} is in no page`);
}

// ---- links --------------------------------------------------------------------------------------

/** A heading's anchor, as GitHub makes it. */
function anchor(heading: string): string {
  return heading
    .replace(/\[([^\]]*)\]\([^)]*\)/g, "$1")
    .toLowerCase()
    .replace(/[^\p{L}\p{N}\s_-]/gu, "")
    .trim()
    .replaceAll(" ", "-");
}

const anchors = new Map(
  pages.map(({ name, prose }) => [
    name,
    new Set([...prose.matchAll(/^#+ (.*)$/gm)].map((match) => anchor(match[1]!))),
  ]),
);
for (const { name, prose } of pages) {
  for (const [, target] of prose.matchAll(/\]\(([^)\s]+)\)/g)) {
    if (/^[a-z]+:/.test(target!)) continue;
    count("links");
    const [path, fragment] = target!.split("#");
    const file = path === "" ? name : relative(ROOT, resolve(ROOT, dirname(name), path!));
    if (!existsSync(join(ROOT, file))) problems.push(`${name}: the link ${target} leads nowhere`);
    else if (fragment !== undefined && anchors.get(file)?.has(fragment) === false) {
      problems.push(`${name}: ${file} has no heading #${fragment}`);
    }
  }
}
const linked = pages.find(({ name }) => name === "docs/README.md")?.text ?? "";
for (const { name } of pages) {
  if (name.startsWith("docs/") && name !== "docs/README.md" && !linked.includes(`(${name.slice(5)})`)) {
    problems.push(`docs/README.md does not name ${name}`);
  }
}

if (import.meta.main) {
  if (problems.length > 0) {
    process.stderr.write(`${problems.join("\n")}\n${problems.length} problems in the documentation\n`);
    process.exit(1);
  }
  const seen = Object.entries(counts).map(([what, n]) => `${n} ${what}`);
  console.log(
    `documentation: ${pages.length} pages, ${seen.join(", ")}, ${existing.length} commands and ${keys.size} keys all named`,
  );
}
