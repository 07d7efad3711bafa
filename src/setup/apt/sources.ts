import { AenvError } from "../../lib/errors.ts";

/**
 * apt's source lists, both formats (sources.list(5)): one-line `.list` files and deb822 `.sources` files.
 * Read so that the backports suite can be derived from what the machine's administrator configured:
 * same mirror, same keys, same options.
 */
export interface AptSource {
  readonly types: readonly string[];
  readonly uris: readonly string[];
  readonly suites: readonly string[];
  readonly components: readonly string[];
  /** Other fields under their deb822 names, values as written (continuation lines included). */
  readonly options: ReadonlyMap<string, string>;
  /** File and line it came from, for messages. */
  readonly origin: string;
}

/** Names one-line options have as deb822 fields. Options not named here do not matter for fetching. */
const ONE_LINE_OPTIONS: Readonly<Record<string, string>> = {
  "signed-by": "Signed-By",
  trusted: "Trusted",
  "allow-insecure": "Allow-Insecure",
  "allow-weak": "Allow-Weak",
  "allow-downgrade-to-insecure": "Allow-Downgrade-To-Insecure",
  "check-valid-until": "Check-Valid-Until",
  "valid-until-min": "Valid-Until-Min",
  "valid-until-max": "Valid-Until-Max",
  "check-date": "Check-Date",
  "date-max-future": "Date-Max-Future",
  "inrelease-path": "InRelease-Path",
  "by-hash": "By-Hash",
  pdiffs: "PDiffs",
  snapshot: "Snapshot",
};
const KEPT_FIELDS = new Map(Object.values(ONE_LINE_OPTIONS).map((name) => [name.toLowerCase(), name]));

const words = (text: string): string[] => text.split(/\s+/).filter((word) => word !== "");

/** Parses one file; the format follows from its name. Errors name file and line. */
export function parseSources(file: string, text: string): AptSource[] {
  return file.endsWith(".sources") ? parseDeb822(file, text) : parseOneLine(file, text);
}

function malformed(origin: string, what: string): AenvError {
  return new AenvError({
    code: "apt_sources_malformed",
    message: `${origin}: ${what}`,
    remediation: "correct the apt source list (apt-get update reports it, too) and run agentenv setup again",
  });
}

function parseOneLine(file: string, text: string): AptSource[] {
  const sources: AptSource[] = [];
  for (const [index, raw] of text.split("\n").entries()) {
    const line = raw.replace(/(^|\s)#.*$/, "").trim();
    if (line === "") continue;
    const origin = `${file}:${index + 1}`;
    const match = /^(deb|deb-src)\s+(?:\[([^\]]*)\]\s*)?(\S.*)$/.exec(line);
    if (match === null) throw malformed(origin, "is neither a `deb` nor a `deb-src` line");
    const [, type, optionText, rest] = match;
    // `cdrom:[name with blanks]/` is one word.
    const uri = /^[a-z+]+:\[[^\]]*\]\S*|^\S+/.exec(rest!)![0];
    const [suite, ...components] = words(rest!.slice(uri.length));
    if (suite === undefined) throw malformed(origin, "names no suite");
    const options = new Map<string, string>();
    for (const option of words(optionText ?? "")) {
      const [, name, value] = /^([^=+-]+(?:-[^=+-]+)*)[+-]?=(.*)$/.exec(option) ?? [];
      if (name === undefined || value === undefined) throw malformed(origin, `option ${option} has no value`);
      const field = ONE_LINE_OPTIONS[name.toLowerCase()];
      if (field !== undefined) options.set(field, value.replaceAll(",", " "));
    }
    sources.push({ types: [type!], uris: [uri], suites: [suite], components, options, origin });
  }
  return sources;
}

function parseDeb822(file: string, text: string): AptSource[] {
  const sources: AptSource[] = [];
  let fields = new Map<string, string>();
  let last: string | undefined;
  let startLine = 0;
  const finish = () => {
    const list = (name: string) => words(fields.get(name) ?? "");
    if (
      fields.size > 0 &&
      !/^(no|false|without|off|disable|0)$/i.test((fields.get("enabled") ?? "yes").trim())
    ) {
      const origin = `${file}:${startLine}`;
      const [types, uris, suites] = [list("types"), list("uris"), list("suites")];
      for (const [name, value] of [
        ["Types", types],
        ["URIs", uris],
        ["Suites", suites],
      ] as const) {
        if (value.length === 0) throw malformed(origin, `the entry has no ${name} field`);
      }
      const options = new Map<string, string>();
      for (const [key, value] of fields) {
        const name = KEPT_FIELDS.get(key);
        if (name !== undefined) options.set(name, value);
      }
      sources.push({ types, uris, suites, components: list("components"), options, origin });
    }
    fields = new Map();
    last = undefined;
  };
  for (const [index, line] of text.split("\n").entries()) {
    if (line.startsWith("#")) continue;
    if (line.trim() === "") {
      finish();
      continue;
    }
    if (/^\s/.test(line)) {
      if (last === undefined)
        throw malformed(`${file}:${index + 1}`, "continuation line without a field before it");
      fields.set(last, `${fields.get(last)}\n${line.trimEnd()}`);
      continue;
    }
    const match = /^([!-9;-~]+):(.*)$/.exec(line);
    if (match === null) throw malformed(`${file}:${index + 1}`, "is not a `Field: value` line");
    if (fields.size === 0) startLine = index + 1;
    last = match[1]!.toLowerCase();
    fields.set(last, match[2]!.trim());
  }
  finish();
  return sources;
}

const ALIASES = ["stable", "oldstable", "oldoldstable", "testing"];

/**
 * The machine's own release (main component, with updates, security and backports where configured) plus
 * its backports suite where none is configured. Empty when no entry is of this release.
 */
export function deriveSources(sources: readonly AptSource[], codename: string): AptSource[] {
  const releases = new Set([codename, ...ALIASES]);
  const releaseOf = (suite: string) =>
    /^([^-/]+)(?:$|-updates$|-security$|\/updates$|-backports$)/.exec(suite)?.[1];
  const kept: AptSource[] = [];
  for (const source of sources) {
    if (!source.types.includes("deb") || !source.components.includes("main")) continue;
    if (source.uris.every((uri) => uri.startsWith("cdrom:"))) continue;
    const suites = source.suites.filter((suite) => releases.has(releaseOf(suite) ?? ""));
    if (suites.length > 0) kept.push({ ...source, types: ["deb"], suites, components: ["main"] });
  }
  const configured = kept.some((source) => source.suites.some((suite) => suite.endsWith("-backports")));
  const derived = new Map<string, AptSource>();
  if (!configured) {
    for (const source of kept) {
      for (const suite of source.suites) {
        if (!releases.has(suite) || suite === "testing") continue;
        const key = [...source.uris, suite].join(" ");
        if (!derived.has(key)) {
          derived.set(key, {
            ...source,
            suites: [`${suite}-backports`],
            origin: `derived from ${source.origin}`,
          });
        }
      }
    }
  }
  return [...kept, ...derived.values()];
}

/** Without the backports suite, configured or derived: what a system of this release is made of. */
export function withoutBackports(sources: readonly AptSource[]): AptSource[] {
  return sources
    .map((source) => ({ ...source, suites: source.suites.filter((suite) => !suite.endsWith("-backports")) }))
    .filter((source) => source.suites.length > 0);
}

/** As a deb822 file that fetches package indexes of one architecture and nothing else. */
export function renderSources(sources: readonly AptSource[], architecture: string): string {
  const seen = new Set<string>();
  const stanzas: string[] = [];
  for (const source of sources) {
    const suites = source.suites.filter((suite) => !seen.has([...source.uris, suite].join(" ")));
    if (suites.length === 0) continue;
    for (const suite of suites) seen.add([...source.uris, suite].join(" "));
    stanzas.push(
      [
        `# ${source.origin}`,
        `Types: deb`,
        `URIs: ${source.uris.join(" ")}`,
        `Suites: ${suites.join(" ")}`,
        `Components: ${source.components.join(" ")}`,
        `Architectures: ${architecture}`,
        `Targets: Packages`,
        ...[...source.options].map(([name, value]) => `${name}: ${value}`),
        "",
      ].join("\n"),
    );
  }
  return stanzas.join("\n");
}
