/**
 * docs/configuration.md from the packaged file and the schema: prints it, or with --write puts it in place.
 * `configurationPage()` is what the check of the documentation compares with.
 */
import { join } from "node:path";
import packagedFile from "../config/default.toml" with { type: "text" };
import { describeKeys, type KeyDescription } from "../src/config/index.ts";

interface Section {
  readonly table: string;
  readonly about: string;
  readonly group: string | undefined;
  readonly keys: { readonly name: string; readonly about: string }[];
}

/** Tables and keys of the packaged file in its order, each with the comment above it. Error: a key without one. */
export function sections(text: string): Section[] {
  const found: Section[] = [];
  let group: string | undefined;
  let comment: string[] = [];
  let section: Section = { table: "", about: "", group: undefined, keys: [] };
  let started = false;
  const flush = () => {
    if (section.keys.length > 0) found.push(section);
  };
  for (const line of text.split("\n")) {
    const heading = /^# ---- (.+?) -+$/.exec(line);
    if (heading !== null) {
      group = heading[1];
      comment = [];
      started = true;
      continue;
    }
    if (!started) continue;
    const table = /^(?:# )?\[([a-z0-9_.]+)\]$/.exec(line);
    if (table !== null) {
      flush();
      section = { table: table[1]!, about: comment.join(" "), group, keys: [] };
      group = undefined;
      comment = [];
      continue;
    }
    const key = /^(?:# )?([a-z_0-9]+) = /.exec(line);
    if (key !== null) {
      const about = comment.join(" ");
      const name = section.table === "" ? key[1]! : `${section.table}.${key[1]!}`;
      if (about === "")
        throw new Error(`config/default.toml says nothing about ${name}: put a comment above it`);
      if (section.table === "" && section.keys.length === 0) {
        section = { ...section, group };
        group = undefined;
      }
      section.keys.push({ name, about });
      comment = [];
    } else if (line.startsWith("# ")) comment.push(line.slice(2));
    else if (line === "") comment = [];
  }
  flush();
  return found;
}

const cell = (text: string) => text.replaceAll("|", "\\|").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

function value(key: KeyDescription): string {
  const shorten = (text: string) => (text.length > 70 ? `${text.slice(0, 67)}…` : text);
  const builtIn = key.builtIn === undefined ? "unset" : `\`${shorten(key.builtIn)}\``;
  return key.shipped === key.builtIn || key.shipped === undefined
    ? builtIn
    : `${builtIn}; shipped \`${shorten(key.shipped)}\``;
}

export function configurationPage(): string {
  const described = new Map(describeKeys().map((key) => [key.name, key]));
  let page = `# Configuration

Made from \`config/default.toml\`, which \`agentenv config default\` prints, by \`scripts/config-doc.ts --write\`.

A server reads one TOML file, once, when it starts: \`agentenv serve --config PATH\`, else the path in
\`AENV_CONFIG_PATH\`, else the packaged file inside the executable. The service's is \`/etc/aenv/config.toml\`.
Per key an environment variable, where the table names one, comes before the file, and the file before the
built-in default. A blank variable counts as unset (except where it says otherwise). Lists in variables are
separated by commas. A file need not hold every key.

Unknown keys are refused by name, with the nearest known one; keys of earlier formats are accepted with a
warning. A key that would switch on a part this version does not have is refused; one that only tunes such a
part (marked **¹**) is checked and told when it is set.

\`\`\`sh
agentenv config check                     # would a server start with this? 0 or 1
agentenv config show                      # every key, its value, where that comes from; secrets hidden
agentenv config show --changed network    # only what is set, only one table
agentenv config default                   # the packaged file
\`\`\`

Relative paths start at the directory of the file. In paths \`$AENV_HOME\` stands for \`home_path\`; in
\`ublk.daemon_socket_path\`, \`$AENV_RUNTIME\` stands for \`runtime_path\`. Neither is a shell variable.

## Environment variables that are no key

| Variable | |
| --- | --- |
| \`AENV_CONFIG_PATH\` | the configuration file |
| \`AENV_API_KEY\` | the API key: 32 to 256 of \`A-Za-z0-9._~-\`. Else \`/run/secrets/api-key\`, else a file made under \`$AENV_HOME/secrets\` |
| \`AENV_API_KEY_PREVIOUS\` | a second key that is accepted while clients change to the new one |
| \`AENV_KVM_PROBE_PATIENCE\` | 1 to 30: how many times longer the probe of KVM may take, on hosts that are emulated themselves |
| \`AENV_FORCE_SYSCTL_TUNING\` | \`1\`: \`agentenv setup --host\` sets the kernel's settings from inside a container, too |
| \`AENV_LOG_FORMAT\`, \`AENV_LOG_LEVEL\`, \`RUST_LOG\` | how the server's log looks and what is in it: see [operations](operations.md#logs) |
| \`DOCKER_CONFIG\`, \`HOME\` | where registry credentials are looked for |
| \`HOSTNAME\` | the node's name when \`node_identity.node_id\` is unset |
`;
  for (const { table, about, group, keys } of sections(packagedFile)) {
    if (group !== undefined) page += `\n## ${group[0]!.toUpperCase()}${group.slice(1)}\n`;
    if (table !== "") page += `\n### [${table}]\n`;
    if (about !== "") page += `\n${cell(about)}\n`;
    page += "\n| Key | Default | |\n| --- | --- | --- |\n";
    for (const { name, about: text } of keys) {
      const key = described.get(name);
      if (key === undefined) throw new Error(`config/default.toml has ${name}, which is no key`);
      described.delete(name);
      const variable = key.env === undefined ? "" : ` Env \`${key.env}\`.`;
      const plain = text.replace(
        / ?Env: [A-Z0-9_]+( \(blank disables, too\))?(, separated by commas)?\./,
        "$1$2",
      );
      page += `| \`${name}\`${key.noEffect ? " **¹**" : ""} | ${cell(value(key))} | ${cell(plain)}${variable} |\n`;
    }
  }
  if (described.size > 0) throw new Error(`not in config/default.toml: ${[...described.keys()].join(", ")}`);
  return page;
}

if (import.meta.main) {
  const page = configurationPage();
  if (process.argv[2] === "--write") await Bun.write(join(import.meta.dir, "../docs/configuration.md"), page);
  else process.stdout.write(page);
}
