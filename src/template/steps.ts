import { posix } from "node:path";
import { type EscapeCharacter, expandWord, splitWords, WordError } from "../lib/dockerfile-words.ts";
import { AenvError } from "../lib/errors.ts";
import type { StartupContext } from "../snapshot/types.ts";
import { HASH } from "./files.ts";
import type { BuildStepRequest } from "./types.ts";

/** A build step, checked. What it does to the guest is in build.ts; what it does to the context is here. */
export type Step =
  | CopyStep
  | {
      readonly type: "RUN";
      readonly command: string;
      readonly user?: string;
      readonly exec?: readonly string[];
    }
  | { readonly type: "ENV"; readonly pairs: readonly (readonly [string, string])[] }
  | { readonly type: "WORKDIR"; readonly path: string }
  | { readonly type: "USER"; readonly name: string }
  | { readonly type: "EXPOSE"; readonly ports: readonly string[] }
  | { readonly type: "VOLUME"; readonly paths: readonly string[] }
  | { readonly type: "LABEL"; readonly pairs: readonly (readonly [string, string])[] }
  | DockerfileStep;

/** Steps that only Dockerfiles have. */
export type DockerfileStep =
  | { readonly type: "ARG"; readonly name: string; readonly value: string }
  | { readonly type: "SHELL"; readonly words: readonly string[] }
  | { readonly type: "CMD" | "ENTRYPOINT"; readonly command: DockerCommand }
  | { readonly type: "HEALTHCHECK"; readonly command: DockerCommand | "none" }
  /** Where a stage that goes on from another one begins. */
  | { readonly type: "FROM"; readonly name: string };

/** A shell's text, or a program and its arguments. */
export type DockerCommand = string | readonly string[];

export interface CopyStep {
  readonly type: "COPY" | "ADD";
  /** Pattern relative to the build context. */
  readonly source: string;
  readonly target: string;
  /** `user`, `user:group` or numbers; absent: the current user. */
  readonly owner?: string;
  readonly mode?: number;
  readonly filesHash?: string;
  /** Index of the stage the files come from, in place of an upload. */
  readonly from?: number;
}

/** What the steps so far have made of a stage. */
export interface StageState {
  readonly context: StartupContext;
  /** Absent: the steps are not a Dockerfile's. */
  readonly dockerfile?: DockerfileState;
}

export interface DockerfileState {
  readonly escape: EscapeCharacter;
  /** Of ARG: known to words and to RUN, not to sandboxes. */
  readonly args: Readonly<Record<string, string>>;
  readonly shell: readonly string[];
  readonly healthcheck?: readonly string[];
  /** Whether this stage has set CMD itself. */
  readonly ownCmd: boolean;
}

export const DOCKER_SHELL: readonly string[] = ["/bin/sh", "-c"];

function bad(message: string, code = "invalid_step", remediation?: string): AenvError {
  return new AenvError({ code, status: 400, message, ...(remediation === undefined ? {} : { remediation }) });
}

function pairs(args: readonly string[], where: string): [string, string][] {
  if (args.length % 2 !== 0) throw bad(`${where}: ${args.length} arguments do not make key and value pairs`);
  const result: [string, string][] = [];
  for (let i = 0; i < args.length; i += 2) {
    if (args[i] === "") throw bad(`${where}: a key is empty`);
    result.push([args[i]!, args[i + 1]!]);
  }
  return result;
}

function labels(args: readonly string[], where: string): [string, string][] {
  if (args.every((arg) => arg.includes("="))) {
    return args.map((arg) => [arg.slice(0, arg.indexOf("=")), arg.slice(arg.indexOf("=") + 1)]);
  }
  return pairs(args, where);
}

function checkOwner(owner: string, where: string): void {
  if (owner !== "" && !/^[^:\s]+(:[^:\s]+)?$/.test(owner))
    throw bad(`${where}: the owner must be USER or USER:GROUP, not ${JSON.stringify(owner)}`);
}

function modeBits(mode: string, where: string): number | undefined {
  if (mode === "") return undefined;
  if (!/^[0-7]{1,5}$/.test(mode)) throw bad(`${where}: the mode ${mode} is not octal`);
  const bits = Number.parseInt(mode, 8);
  if (bits > 0o7777) throw bad(`${where}: the mode ${mode} is out of range`);
  return bits;
}

/** Source and target are looked at when their variables are known. */
function stageCopy(type: CopyStep["type"], step: BuildStepRequest, from: number, where: string): CopyStep {
  const [source = "", target = "", owner = "", mode = ""] = step.args;
  if (type !== "COPY") throw bad(`${where}: only COPY takes files from another stage`);
  if (source.trim() === "") throw bad(`${where}: the source is missing`);
  if (target.trim() === "") throw bad(`${where}: the target is missing`);
  const bits = modeBits(mode, where);
  return {
    type,
    source,
    target,
    from,
    ...(owner === "" ? {} : { owner }),
    ...(bits === undefined ? {} : { mode: bits }),
  };
}

function copyStep(type: CopyStep["type"], step: BuildStepRequest, where: string): CopyStep {
  if (step.from !== undefined) return stageCopy(type, step, step.from, where);
  const [source = "", target = "", owner = "", mode = ""] = step.args;
  if (/^https?:\/\//.test(source)) {
    throw bad(
      `${where}: a remote source is not supported`,
      "unsupported_step",
      "fetch it in a RUN step, or copy it from the build context",
    );
  }
  if (source.trim() === "") throw bad(`${where}: the source is missing`);
  if (source.startsWith("/") || posix.normalize(source).split("/").includes(".."))
    throw bad(`${where}: the source ${source} is not a path within the build context`);
  if (target.trim() === "") throw bad(`${where}: the target is missing`);
  if (target.includes("\0") || source.includes("\0")) throw bad(`${where}: a path holds a NUL character`);
  checkOwner(owner, where);
  const bits = modeBits(mode, where);
  if (step.filesHash === undefined || !HASH.test(step.filesHash)) {
    throw bad(
      `${where}: filesHash is missing or not 64 lower-case hexadecimal digits`,
      "invalid_step",
      "upload the files first: GET /templates/{id}/files/{hash} tells where",
    );
  }
  return {
    type,
    source,
    target,
    filesHash: step.filesHash,
    ...(owner === "" ? {} : { owner }),
    ...(bits === undefined ? {} : { mode: bits }),
  };
}

/** A step that Dockerfiles have and others have not, or mean otherwise; undefined for all others. */
function dockerfileStep(type: string, step: BuildStepRequest, where: string): Step | undefined {
  const { args } = step;
  const command = (): DockerCommand => {
    if (step.exec === true) {
      if (args[0] === undefined || args[0] === "") throw bad(`${where}: the program is missing`);
      return args;
    }
    return args[0] ?? "";
  };
  switch (type) {
    case "RUN": {
      const given = command();
      if (typeof given !== "string") return { type, command: quoteWords(given), exec: given };
      if (given.trim() === "") throw bad(`${where}: the command is missing`);
      return { type, command: given };
    }
    case "ARG": {
      const [name = "", value = ""] = args;
      if (!/^[A-Za-z_][A-Za-z0-9_]*$/.test(name))
        throw bad(`${where}: ${JSON.stringify(name)} is not a name of a variable`);
      return { type, name, value };
    }
    case "SHELL":
      if (args[0] === undefined || args[0] === "") throw bad(`${where}: the program is missing`);
      return { type, words: args };
    case "CMD":
    case "ENTRYPOINT":
      // `CMD []` and an empty text take away what the image has.
      return { type, command: args.length === 0 || (args.length === 1 && args[0] === "") ? [] : command() };
    case "HEALTHCHECK":
      if (step.exec !== true && args[0]?.trim().toUpperCase() === "NONE") return { type, command: "none" };
      if (step.exec !== true && (args[0] ?? "").trim() === "") throw bad(`${where}: the command is missing`);
      return { type, command: command() };
    case "FROM":
      return { type, name: args[0] ?? "" };
    default:
      return undefined;
  }
}

/** Checks the steps of a request before anything is started; error 400 names the step. */
export function parseSteps(
  steps: readonly BuildStepRequest[],
  options: { readonly dockerfile?: boolean; readonly stage?: string; readonly stages?: number } = {},
): Step[] {
  const { dockerfile = false, stage, stages = 0 } = options;
  return steps.map((step, index): Step => {
    const type = step.type.toUpperCase();
    const where = `step ${stage === undefined ? "" : `${stage} `}${index + 1} (${type})`;
    if (step.from !== undefined && (!dockerfile || step.from >= stages))
      throw bad(`${where}: there is no stage ${step.from} before it`);
    if (dockerfile) {
      const own = dockerfileStep(type, step, where);
      if (own !== undefined) return own;
    }
    const first = (what: string): string => {
      const value = step.args[0];
      if (value === undefined || value.trim() === "") throw bad(`${where}: ${what} is missing`);
      return value;
    };
    switch (type) {
      case "RUN": {
        const user = step.args[1];
        return {
          type,
          command: first("the command"),
          ...(user === undefined || user === "" ? {} : { user }),
        };
      }
      case "ENV":
      case "ARG":
        return { type: "ENV", pairs: pairs(step.args, where) };
      case "WORKDIR":
        return { type, path: first("the directory") };
      case "USER":
        return { type, name: first("the user") };
      case "EXPOSE":
        return { type, ports: step.args };
      case "VOLUME":
        return { type, paths: step.args };
      case "LABEL":
        return { type, pairs: labels(step.args, where) };
      case "COPY":
      case "ADD":
        return copyStep(type, step, where);
      default:
        throw bad(
          `${where}: unknown step type`,
          "unsupported_step",
          "known: RUN COPY ADD ENV ARG WORKDIR USER EXPOSE VOLUME LABEL",
        );
    }
  });
}

/** Variables of words: those of ENV win over those of ARG. */
export function variables({ context, dockerfile }: StageState): Readonly<Record<string, string>> {
  return { ...dockerfile?.args, ...context.envVars };
}

/** What Linux gives a program at its start is not more. */
const MAX_TOTAL_CHARACTERS = 2 * 1024 * 1024;

function checkTotal(
  before: Readonly<Record<string, string>>,
  added: readonly (readonly [string, string])[],
): void {
  let total = 0;
  for (const [key, value] of [...Object.entries(before), ...added]) total += key.length + value.length;
  if (total > MAX_TOTAL_CHARACTERS)
    throw bad(
      `variables or labels become longer than ${MAX_TOTAL_CHARACTERS} characters together: keep texts of that size in files`,
    );
}

/** The step with the variables in its words replaced, as far as Docker replaces them. */
export function expandStep(step: Step, state: StageState): Step {
  const { dockerfile } = state;
  if (dockerfile === undefined) return step;
  const known = variables(state);
  const expand = (word: string): string => {
    try {
      const lookup = (name: string) => (Object.hasOwn(known, name) ? known[name] : undefined);
      return expandWord(word, lookup, { escape: dockerfile.escape });
    } catch (error) {
      if (error instanceof WordError) throw bad(error.message);
      throw error;
    }
  };
  const words = (list: readonly string[]) =>
    list.flatMap((word) => splitWords(expand(word), dockerfile.escape)).filter((word) => word !== "");
  switch (step.type) {
    case "ENV":
    case "LABEL": {
      // All of one instruction see the values from before it.
      const pairs = step.pairs.map(([key, value]) => [expand(key), expand(value)] as const);
      checkTotal(step.type === "ENV" ? known : state.context.labels, pairs);
      return { ...step, pairs };
    }
    case "ARG": {
      const value = expand(step.value);
      checkTotal(known, [[step.name, value]]);
      return { ...step, value };
    }
    case "WORKDIR":
      return { ...step, path: expand(step.path) };
    case "USER":
      return { ...step, name: expand(step.name) };
    case "EXPOSE":
      return { ...step, ports: words(step.ports) };
    case "VOLUME":
      return { ...step, paths: step.paths.map(expand) };
    case "COPY":
    case "ADD": {
      const owner = step.owner === undefined ? undefined : expand(step.owner);
      const target = expand(step.target);
      if (target === "") throw bad("the target is empty");
      checkOwner(owner ?? "", step.type);
      return {
        ...step,
        target,
        // Sources of an upload are the client's matter.
        source: step.from === undefined ? step.source : expand(step.source),
        ...(owner === undefined || owner === "" ? {} : { owner }),
      };
    }
    default:
      return step;
  }
}

function commandWords(command: DockerCommand, shell: readonly string[]): readonly string[] {
  return typeof command === "string" ? [...shell, command] : command;
}

/** State after a step whose words are expanded. `WORKDIR` with a relative path is resolved against the present one. */
export function applyStep(state: StageState, step: Step): StageState {
  const { context, dockerfile } = state;
  const changed = (change: Partial<StartupContext>): StageState => ({
    ...state,
    context: { ...context, ...change },
  });
  const noted = (change: Partial<DockerfileState>, of: StageState = state): StageState =>
    dockerfile === undefined ? of : { ...of, dockerfile: { ...dockerfile, ...change } };
  switch (step.type) {
    case "RUN":
    case "COPY":
    case "ADD":
      return state;
    case "ENV":
      return changed({ envVars: { ...context.envVars, ...Object.fromEntries(step.pairs) } });
    case "WORKDIR":
      return changed({ workdir: posix.resolve("/", context.workdir ?? "/", step.path) });
    case "USER":
      return changed({ user: step.name });
    case "EXPOSE":
      return changed({ exposedPorts: [...new Set([...context.exposedPorts, ...step.ports])] });
    case "VOLUME":
      return changed({ volumes: [...new Set([...context.volumes, ...step.paths])] });
    case "LABEL":
      return changed({ labels: { ...context.labels, ...Object.fromEntries(step.pairs) } });
    case "ARG":
      return noted({ args: { ...dockerfile?.args, [step.name]: step.value } });
    case "SHELL":
      return noted({ shell: step.words });
    case "CMD":
      return noted(
        { ownCmd: true },
        changed({ cmd: commandWords(step.command, dockerfile?.shell ?? DOCKER_SHELL) }),
      );
    case "ENTRYPOINT": {
      const entrypoint = commandWords(step.command, dockerfile?.shell ?? DOCKER_SHELL);
      if (dockerfile?.ownCmd === true) return changed({ entrypoint });
      // The image's CMD was meant for the image's ENTRYPOINT.
      return changed({ entrypoint, cmd: [] });
    }
    case "HEALTHCHECK": {
      if (dockerfile === undefined) return state;
      const { healthcheck: _before, ...rest } = dockerfile;
      const { command } = step;
      return {
        ...state,
        dockerfile:
          command === "none" ? rest : { ...rest, healthcheck: commandWords(command, dockerfile.shell) },
      };
    }
    case "FROM":
      return noted({ ownCmd: false });
  }
}

/** Words as a shell reads them back. */
export function quoteWords(words: readonly string[]): string {
  return words
    .map((word) => (/^[A-Za-z0-9_@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`))
    .join(" ");
}

function showCommand(command: DockerCommand): string {
  return typeof command === "string" ? command : JSON.stringify(command);
}

/** One line that names a step in logs and errors. */
export function describeStep(step: Step): string {
  switch (step.type) {
    case "RUN":
      return `RUN ${step.exec === undefined ? step.command : JSON.stringify(step.exec)}`;
    case "COPY":
    case "ADD":
      return `${step.type} ${step.from === undefined ? "" : `--from=${step.from} `}${step.source} ${step.target}`;
    case "ENV":
    case "LABEL":
      return `${step.type} ${step.pairs.map(([key]) => key).join(" ")}`;
    case "WORKDIR":
      return `WORKDIR ${step.path}`;
    case "USER":
      return `USER ${step.name}`;
    case "EXPOSE":
      return `EXPOSE ${step.ports.join(" ")}`;
    case "VOLUME":
      return `VOLUME ${step.paths.join(" ")}`;
    case "ARG":
      return `ARG ${step.name}`;
    case "SHELL":
      return `SHELL ${JSON.stringify(step.words)}`;
    case "CMD":
    case "ENTRYPOINT":
    case "HEALTHCHECK":
      return `${step.type} ${showCommand(step.command)}`;
    case "FROM":
      return `FROM ${step.name}`;
  }
}
