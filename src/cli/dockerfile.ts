import { type Copy, DockerfileParser, type Instruction } from "dockerfile-ast";
import {
  type EscapeCharacter,
  expandWord,
  literalWord,
  splitWords,
  WordError,
} from "../lib/dockerfile-words.ts";
import { CliError } from "./command.ts";

/*
 * A Dockerfile as steps of the server's build. Its author's variables stay in the words, as the server alone knows
 * the environment of the base image; what names files of the context or images is expanded here.
 */

/** Files of the build context (or of a here-document) that a COPY or ADD takes. */
export interface ContextFiles {
  /** Patterns relative to the context, in their order. */
  readonly sources: readonly string[];
  readonly inline: readonly { readonly name: string; readonly content: string }[];
  readonly exclude: readonly string[];
}

export interface PlannedStep {
  readonly type: string;
  readonly args: readonly string[];
  readonly exec?: true;
  /** Index among the planned stages. */
  readonly from?: number;
  /** Of COPY and ADD from the context: `args` are the target, the owner and the mode. */
  readonly files?: ContextFiles;
  /** In the Dockerfile, from 1. */
  readonly line: number;
}

export interface PlannedStage {
  readonly name: string;
  readonly image: string;
  readonly steps: readonly PlannedStep[];
}

export interface BuildPlan {
  readonly escape: EscapeCharacter;
  /** Those the last one needs, in their order; the last one becomes the template. */
  readonly stages: readonly PlannedStage[];
  readonly notes: readonly string[];
}

export interface DockerfileOptions {
  /** For messages. */
  readonly file: string;
  readonly buildArgs: ReadonlyMap<string, string>;
  /** Of the machine that builds, e.g. `amd64`. */
  readonly architecture: string;
}

/** Build arguments that need no ARG. */
const PREDEFINED = /^(?:(?:HTTP|HTTPS|FTP|NO|ALL)_PROXY|(?:http|https|ftp|no|all)_proxy)$/;

interface Draft {
  readonly index: number;
  readonly name: string;
  readonly image: string;
  readonly steps: PlannedStep[];
  readonly needs: Set<number>;
  /** Values of ENV and ARG; undefined: known to the server alone. */
  readonly variables: Map<string, string | undefined>;
  readonly environment: Set<string>;
}

class Reader {
  readonly #options: DockerfileOptions;
  readonly #text: string;
  readonly #lines: readonly string[];
  readonly #escape: EscapeCharacter;
  readonly #globals = new Map<string, string>();
  readonly #platform: ReadonlyMap<string, string>;
  readonly #drafts: Draft[] = [];
  readonly #unused: Set<string>;
  readonly #notes: string[] = [];

  constructor(text: string, options: DockerfileOptions) {
    this.#text = text.replace(/^\uFEFF/, "").replaceAll("\r\n", "\n");
    this.#lines = this.#text.split("\n");
    this.#options = options;
    this.#unused = new Set(options.buildArgs.keys());
    this.#escape = DockerfileParser.parse(this.#text).getEscapeCharacter() === "`" ? "`" : "\\";
    const { architecture } = options;
    const platform = `linux/${architecture}`;
    this.#platform = new Map(
      ["TARGET", "BUILD"].flatMap((side): [string, string][] => [
        [`${side}PLATFORM`, platform],
        [`${side}OS`, "linux"],
        [`${side}ARCH`, architecture],
        [`${side}VARIANT`, ""],
      ]),
    );
  }

  fail(line: number, message: string, hint?: string): CliError {
    return new CliError(`${this.#options.file}:${line}: ${message}`, hint === undefined ? {} : { hint });
  }

  read(): BuildPlan {
    const dockerfile = DockerfileParser.parse(this.#text);
    for (const instruction of dockerfile.getInstructions()) this.#instruction(instruction);
    const last = this.#drafts.at(-1);
    if (last === undefined) throw new CliError(`${this.#options.file}: there is no FROM in it`);
    const needed = new Set<number>();
    const need = (draft: Draft): void => {
      if (needed.has(draft.index)) return;
      needed.add(draft.index);
      for (const index of draft.needs) need(this.#drafts[index]!);
    };
    need(last);
    const kept = this.#drafts.filter(({ index }) => needed.has(index));
    const places = new Map(kept.map(({ index }, place) => [index, place]));
    for (const name of this.#unused) this.#notes.push(`no ARG takes the build argument ${name}`);
    return {
      escape: this.#escape,
      stages: kept.map(({ name, image, steps }) => ({
        name,
        image,
        steps: steps.map((step) =>
          step.from === undefined ? step : { ...step, from: places.get(step.from) ?? step.from },
        ),
      })),
      notes: this.#notes,
    };
  }

  // ---- text ---------------------------------------------------------------------------------------

  /** What follows the keyword on the instruction's lines: continued lines are one, comments between them are gone. */
  #header(from: number, to: number): string {
    let text = "";
    const continued = this.#escape === "`" ? /`[ \t]*$/ : /\\[ \t]*$/;
    for (let i = from; i <= to; i++) {
      const line = this.#lines[i]!;
      if (i > from && (/^\s*#/.test(line) || line.trim() === "")) continue;
      text += line.replace(continued, "");
    }
    return text
      .trimStart()
      .replace(/^\S+\s*/, "")
      .trimEnd();
  }

  #flags(header: string): { flags: Map<string, string[]>; rest: string } {
    const flags = new Map<string, string[]>();
    let rest = header;
    for (;;) {
      const match = /^--([a-z][a-z-]*)(?:=(\S*))?(?:\s+|$)/.exec(rest);
      if (match === null) return { flags, rest };
      flags.set(match[1]!, [...(flags.get(match[1]!) ?? []), match[2] ?? ""]);
      rest = rest.slice(match[0].length);
    }
  }

  #json(text: string): string[] | undefined {
    if (!text.startsWith("[")) return undefined;
    try {
      const parsed: unknown = JSON.parse(text);
      return Array.isArray(parsed) && parsed.every((word) => typeof word === "string") ? parsed : undefined;
    } catch {
      return undefined; // docker takes it as a shell's text
    }
  }

  #expand(line: number, what: string, word: string, known: (name: string) => string | undefined): string {
    try {
      return expandWord(word, known, { escape: this.#escape });
    } catch (error) {
      if (error instanceof WordError) throw this.fail(line, `${what}: ${error.message}`);
      throw error;
    }
  }

  // ---- instructions -------------------------------------------------------------------------------

  #instruction(instruction: Instruction): void {
    const range = instruction.getRange();
    const line = range.start.line + 1;
    const keyword = instruction.getKeyword();
    const documents =
      keyword === "RUN" || keyword === "COPY" || keyword === "ADD" ? (instruction as Copy).getHeredocs() : [];
    const firstBody = documents[0]?.getContentRange() ?? documents[0]?.getDelimiterRange();
    const lastHeader = firstBody ? firstBody.start.line - 1 : range.end.line;
    const { flags, rest } = this.#flags(this.#header(range.start.line, lastHeader));
    if (keyword === "FROM") {
      this.#from(line, flags, rest);
      return;
    }
    const draft = this.#drafts.at(-1);
    if (draft === undefined) {
      if (keyword !== "ARG") throw this.fail(line, `${keyword} comes before the first FROM`);
      this.#globalArg(line, rest);
      return;
    }
    const allowed = ALLOWED_FLAGS[keyword] ?? [];
    for (const flag of flags.keys()) {
      if (!allowed.includes(flag)) throw this.fail(line, `${keyword} --${flag} is not supported`);
    }
    const step = (args: readonly string[], exec = false): void => {
      draft.steps.push({ type: keyword, args, line, ...(exec ? { exec: true as const } : {}) });
    };
    const words = this.#json(rest);
    if (rest === "" && keyword !== "CMD" && keyword !== "ENTRYPOINT" && documents.length === 0)
      throw this.fail(line, `${keyword} needs an argument`);
    switch (keyword) {
      case "RUN":
        this.#runFlags(line, flags);
        if (documents.length === 0) step(words ?? [rest], words !== undefined);
        else step([this.#script(rest, documents, lastHeader + 1, range.end.line)]);
        return;
      case "CMD":
      case "ENTRYPOINT":
        step(words ?? [rest], words !== undefined && words.length > 0);
        return;
      case "SHELL":
        if (words === undefined || words.length === 0)
          throw this.fail(line, 'SHELL takes a list: ["program", "argument"]');
        step(words);
        return;
      case "HEALTHCHECK":
        this.#healthcheck(line, draft, rest);
        return;
      case "ENV":
      case "LABEL":
        this.#pairs(line, draft, keyword, rest);
        return;
      case "MAINTAINER":
        draft.steps.push({ type: "LABEL", args: ["maintainer", literalWord(rest)], line });
        return;
      case "ARG":
        for (const word of splitWords(rest, this.#escape)) this.#arg(line, draft, word);
        return;
      case "WORKDIR":
      case "USER":
        step([rest]);
        return;
      case "EXPOSE":
        step(splitWords(rest, this.#escape));
        return;
      case "VOLUME":
        step(words ?? splitWords(rest, this.#escape));
        return;
      case "STOPSIGNAL":
        this.#notes.push(`line ${line}: STOPSIGNAL has no meaning for a sandbox`);
        return;
      case "COPY":
      case "ADD":
        this.#copy(line, draft, keyword, flags, words ?? splitWords(rest, this.#escape), documents);
        return;
      case "ONBUILD":
        throw this.fail(line, "ONBUILD is not supported: a template has no later builds to trigger");
      default:
        throw this.fail(line, `unknown instruction ${keyword}`);
    }
  }

  #from(line: number, flags: ReadonlyMap<string, string[]>, rest: string): void {
    const known = (name: string) => this.#globals.get(name) ?? this.#platform.get(name);
    const [word = "", as, name, ...more] = rest.split(/\s+/);
    const isNamed = as !== undefined;
    if (word === "" || (isNamed && (as.toUpperCase() !== "AS" || name === undefined)) || more.length > 0)
      throw this.fail(line, "FROM is written as: FROM image [AS name]");
    if (name !== undefined && !/^[a-z][a-z0-9_.-]*$/i.test(name))
      throw this.fail(line, `${name} is not a name for a stage`);
    for (const flag of flags.keys())
      if (flag !== "platform") throw this.fail(line, `FROM --${flag} is not supported`);
    const wanted = flags.get("platform")?.at(-1);
    if (wanted !== undefined) {
      const platform = this.#expand(line, "--platform", wanted, known);
      const own = `linux/${this.#options.architecture}`;
      if (platform !== own && platform !== this.#options.architecture)
        throw this.fail(line, `the platform ${platform} cannot be built here: this is ${own}`);
    }
    const image = this.#expand(line, "FROM", word, known);
    if (image === "")
      throw this.fail(
        line,
        `the image ${word} is empty`,
        "give the variable a value: ARG before FROM, or --build-arg",
      );
    const parent = this.#drafts.find((draft) => draft.name.toLowerCase() === image.toLowerCase());
    const index = this.#drafts.length;
    const draft: Draft = {
      index,
      name: name ?? `stage ${index}`,
      image: parent?.image ?? image,
      // A stage that goes on from another one has the other's steps: the step cache makes them one.
      steps: parent === undefined ? [] : [...parent.steps, { type: "FROM", args: [image], line }],
      needs: new Set(parent?.needs),
      variables: new Map(parent?.variables),
      environment: new Set(parent?.environment),
    };
    this.#drafts.push(draft);
    if (parent !== undefined) return;
    for (const [key, value] of this.#options.buildArgs) {
      if (!PREDEFINED.test(key)) continue;
      this.#unused.delete(key);
      draft.steps.push({ type: "ARG", args: [key, literalWord(value)], line });
      draft.variables.set(key, value);
    }
  }

  #globalArg(line: number, rest: string): void {
    for (const word of splitWords(rest, this.#escape)) {
      const { name, value } = this.#argParts(line, word);
      const given = this.#options.buildArgs.get(name);
      this.#unused.delete(name);
      const known = (other: string) => this.#globals.get(other) ?? this.#platform.get(other);
      if (given !== undefined) this.#globals.set(name, given);
      else if (value !== undefined) this.#globals.set(name, this.#expand(line, `ARG ${name}`, value, known));
    }
  }

  #argParts(line: number, word: string): { name: string; value: string | undefined } {
    const equals = word.indexOf("=");
    const name = equals < 0 ? word : word.slice(0, equals);
    if (!/^[A-Za-z_][A-Za-z0-9_]*$/.test(name)) throw this.fail(line, `${name} is not a name of a variable`);
    return { name, value: equals < 0 ? undefined : word.slice(equals + 1) };
  }

  #arg(line: number, draft: Draft, word: string): void {
    const { name, value } = this.#argParts(line, word);
    this.#unused.delete(name);
    const fixed =
      this.#options.buildArgs.get(name) ?? (value === undefined ? this.#globals.get(name) : undefined);
    const raw =
      fixed !== undefined
        ? literalWord(fixed)
        : (value ?? (this.#platform.has(name) ? literalWord(this.#platform.get(name)!) : undefined));
    if (raw === undefined) return; // declared without a value: unset
    draft.steps.push({ type: "ARG", args: [name, raw], line });
    if (!draft.environment.has(name)) draft.variables.set(name, this.#evaluated(draft, raw));
  }

  /** Undefined when the value hangs on the image's environment. */
  #evaluated(draft: Draft, word: string): string | undefined {
    let open = false;
    const lookup = (name: string): string | undefined => {
      open ||= draft.variables.get(name) === undefined;
      return draft.variables.get(name);
    };
    try {
      const value = expandWord(word, lookup, { escape: this.#escape });
      return open ? undefined : value;
    } catch (error) {
      if (error instanceof WordError) return undefined; // the server tells it with the step
      throw error;
    }
  }

  #pairs(line: number, draft: Draft, type: string, rest: string): void {
    const words = splitWords(rest, this.#escape);
    const pairs: [string, string][] = [];
    if (words[0]?.includes("=") === true) {
      for (const word of words) {
        const equals = word.indexOf("=");
        if (equals <= 0) throw this.fail(line, `${type}: ${word} is not written as key=value`);
        pairs.push([word.slice(0, equals), word.slice(equals + 1)]);
      }
    } else {
      const match = /^(\S+)\s+(.+)$/s.exec(rest);
      if (match === null) throw this.fail(line, `${type} needs a key and a value`);
      pairs.push([match[1]!, match[2]!]);
    }
    draft.steps.push({ type, args: pairs.flat(), line });
    if (type !== "ENV") return;
    const values = pairs.map(([key, word]) => [key, this.#evaluated(draft, word)] as const);
    for (const [key, value] of values) {
      draft.variables.set(key, value);
      draft.environment.add(key);
    }
  }

  #healthcheck(line: number, draft: Draft, rest: string): void {
    const type = "HEALTHCHECK";
    if (/^NONE$/i.test(rest)) {
      draft.steps.push({ type, args: ["NONE"], line });
      return;
    }
    const match = /^CMD(?:\s+(.*))?$/is.exec(rest);
    if (match === null || (match[1] ?? "") === "")
      throw this.fail(
        line,
        "HEALTHCHECK is written as: HEALTHCHECK [options] CMD command, or HEALTHCHECK NONE",
      );
    const words = this.#json(match[1]!);
    draft.steps.push({
      type,
      args: words ?? [match[1]!],
      line,
      ...(words === undefined ? {} : { exec: true as const }),
    });
  }

  #runFlags(line: number, flags: ReadonlyMap<string, string[]>): void {
    for (const mount of flags.get("mount") ?? []) {
      const type = /(?:^|,)type=([a-z]+)/.exec(mount)?.[1] ?? "bind";
      if (type !== "cache")
        throw this.fail(
          line,
          `RUN --mount of type ${type} is not supported`,
          "copy what is needed with COPY",
        );
      this.#notes.push(
        `line ${line}: RUN --mount=type=cache has no effect; what the command leaves there stays`,
      );
    }
    const network = flags.get("network")?.at(-1);
    if (network !== undefined && network !== "default")
      throw this.fail(line, `RUN --network=${network} is not supported`);
  }

  /** The shell's text of a RUN with here-documents. */
  #script(rest: string, documents: ReturnType<Copy["getHeredocs"]>, from: number, to: number): string {
    const body = this.#lines.slice(from, to + 1).join("\n");
    const [only] = documents;
    const operator = /^<<(-?)(["']?)([^\s"']+)\2$/.exec(rest);
    if (operator === null || documents.length !== 1 || only === undefined) return `${rest}\n${body}\n`;
    // The document is the script itself.
    const content = this.#document(only, operator[1] === "-");
    if (!content.startsWith("#!")) return content;
    let end = "AENV_SCRIPT";
    while (content.includes(end)) end += "_";
    return [
      `script=$(mktemp) && cat > "$script" <<'${end}'`,
      `${content}${end}`,
      'chmod 700 "$script" && "$script"; status=$?; rm -f "$script"; exit $status',
    ].join("\n");
  }

  #document(document: ReturnType<Copy["getHeredocs"]>[number], stripTabs: boolean): string {
    const range = document.getContentRange();
    const delimiter = document.getDelimiterRange();
    if (range === null || delimiter === null) return "";
    const lines = this.#lines.slice(range.start.line, delimiter.start.line);
    return lines.map((text) => `${stripTabs ? text.replace(/^\t+/, "") : text}\n`).join("");
  }

  #copy(
    line: number,
    draft: Draft,
    type: "COPY" | "ADD",
    flags: ReadonlyMap<string, string[]>,
    words: readonly string[],
    documents: ReturnType<Copy["getHeredocs"]>,
  ): void {
    const target = words.at(-1);
    const raw = words.slice(0, -1);
    if (target === undefined || raw.length === 0)
      throw this.fail(line, `${type} needs a source and a target`);
    const owner = flags.get("chown")?.at(-1) ?? "";
    const modeWord = flags.get("chmod")?.at(-1) ?? "";
    const mode = modeWord === "" ? "" : this.#known(line, draft, `${type} --chmod`, modeWord);
    if (mode !== "" && !/^[0-7]{3,5}$/.test(mode))
      throw this.fail(line, `--chmod=${mode} is not supported: the mode must be octal, e.g. 755`);
    const fromFlag = flags.get("from")?.at(-1);
    if (fromFlag !== undefined) {
      if (type !== "COPY") throw this.fail(line, "ADD --from is not supported: use COPY --from");
      if (documents.length > 0) throw this.fail(line, "here-documents cannot be copied from a stage");
      if (flags.has("exclude")) throw this.fail(line, "--exclude with --from is not supported");
      const from = this.#stageOf(line, draft, fromFlag);
      if (raw.length > 1 && !/\/["']?$|^\.{1,2}$/.test(target))
        throw this.fail(
          line,
          `with several sources the target must be a directory and end with /, not ${target}`,
        );
      for (const source of raw) draft.steps.push({ type, args: [source, target, owner, mode], from, line });
      return;
    }
    const sources: string[] = [];
    const inline: { name: string; content: string }[] = [];
    for (const word of raw) {
      const operator = /^<<(-?)(["']?)([^\s"']+)\2$/.exec(word);
      const document = operator === null ? undefined : documents[inline.length];
      if (operator === null || document === undefined) {
        const source = this.#known(line, draft, `${type} ${word}`, word);
        if (/^(?:https?:\/\/|git@|git:\/\/)/.test(source))
          throw this.fail(
            line,
            `${type} of ${source}: remote sources are not supported`,
            "fetch it in a RUN step",
          );
        sources.push(source);
        continue;
      }
      const text = this.#document(document, operator[1] === "-");
      const content = operator[2] === "" ? this.#known(line, draft, "the here-document", text, true) : text;
      inline.push({ name: operator[3]!, content });
    }
    const exclude = (flags.get("exclude") ?? []).map((word) => this.#known(line, draft, "--exclude", word));
    draft.steps.push({ type, args: [target, owner, mode], files: { sources, inline, exclude }, line });
  }

  /** A word expanded with what the Dockerfile itself sets. */
  #known(line: number, draft: Draft, what: string, word: string, keepQuotes = false): string {
    const lookup = (name: string): string | undefined => {
      const value = draft.variables.get(name);
      if (value !== undefined || !/^[A-Za-z_]/.test(name)) return value;
      throw this.fail(
        line,
        `${what} uses $${name}, which ${draft.variables.has(name) ? "depends on the image's environment" : "this Dockerfile does not set"}`,
        keepQuotes
          ? 'quote the delimiter (<<"EOF") to keep the text as it is'
          : `set it with ARG ${name}=...`,
      );
    };
    try {
      return expandWord(word, lookup, { escape: this.#escape, keepQuotes });
    } catch (error) {
      if (error instanceof WordError) throw this.fail(line, `${what}: ${error.message}`);
      throw error;
    }
  }

  /** Index of the stage behind `--from`; an image that is no stage becomes one. */
  #stageOf(line: number, draft: Draft, word: string): number {
    const known = (name: string) => this.#globals.get(name) ?? this.#platform.get(name);
    const wanted = this.#expand(line, "--from", word, known);
    if (wanted === "") throw this.fail(line, "--from is empty");
    const named = this.#drafts.find(
      ({ index, name }) => index !== draft.index && name.toLowerCase() === wanted.toLowerCase(),
    );
    const isNumber = /^\d+$/.test(wanted);
    if (isNumber && Number(wanted) >= draft.index)
      throw this.fail(line, `there is no stage ${wanted} before this one`);
    const found = named ?? (isNumber ? this.#drafts[Number(wanted)] : undefined);
    if (found !== undefined) {
      draft.needs.add(found.index);
      return found.index;
    }
    if (wanted.toLowerCase() === draft.name.toLowerCase())
      throw this.fail(line, `the stage ${wanted} cannot copy from itself`);
    const index = this.#images.get(wanted) ?? this.#imageStages.length;
    if (!this.#images.has(wanted)) {
      this.#images.set(wanted, index);
      this.#imageStages.push(wanted);
    }
    return IMAGE_STAGE + index;
  }

  readonly #images = new Map<string, number>();
  readonly #imageStages: string[] = [];

  /** Images that COPY --from names, which are stages without steps. */
  get images(): readonly string[] {
    return this.#imageStages;
  }
}

const IMAGE_STAGE = 1_000_000;
const ALLOWED_FLAGS: Readonly<Record<string, readonly string[]>> = {
  RUN: ["mount", "network"],
  COPY: ["from", "chown", "chmod", "link", "exclude"],
  ADD: ["chown", "chmod", "link", "exclude"],
  HEALTHCHECK: ["interval", "timeout", "start-period", "start-interval", "retries"],
};

/** Errors: CliError with file, line and what is wrong there. */
export function parseDockerfile(text: string, options: DockerfileOptions): BuildPlan {
  const reader = new Reader(text, options);
  const plan = reader.read();
  // Image stages come first: they need nothing.
  const used = new Set(
    plan.stages.flatMap(({ steps }) => steps.flatMap(({ from = 0 }) => (from >= IMAGE_STAGE ? [from] : []))),
  );
  const images = [...used].sort((a, b) => a - b);
  const place = (from: number): number => (from >= IMAGE_STAGE ? images.indexOf(from) : from + images.length);
  return {
    ...plan,
    stages: [
      ...images.map((id) => {
        const image = reader.images[id - IMAGE_STAGE]!;
        return { name: image, image, steps: [] };
      }),
      ...plan.stages.map((stage) => ({
        ...stage,
        steps: stage.steps.map((step) =>
          step.from === undefined ? step : { ...step, from: place(step.from) },
        ),
      })),
    ],
  };
}
