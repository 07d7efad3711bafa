import { posix } from "node:path";
import { AenvError } from "../lib/errors.ts";
import type { StartupContext } from "../snapshot/types.ts";
import { HASH } from "./files.ts";
import type { BuildStartRequest } from "./types.ts";

/** A build step, checked. What it does to the guest is in build.ts; what it does to the context is here. */
export type Step =
  | CopyStep
  | { readonly type: "RUN"; readonly command: string; readonly user?: string }
  | { readonly type: "ENV"; readonly pairs: readonly (readonly [string, string])[] }
  | { readonly type: "WORKDIR"; readonly path: string }
  | { readonly type: "USER"; readonly name: string }
  | { readonly type: "EXPOSE"; readonly ports: readonly string[] }
  | { readonly type: "VOLUME"; readonly paths: readonly string[] }
  | { readonly type: "LABEL"; readonly pairs: readonly (readonly [string, string])[] };

export interface CopyStep {
  readonly type: "COPY" | "ADD";
  /** Pattern relative to the build context. */
  readonly source: string;
  readonly target: string;
  /** `user`, `user:group` or numbers; absent: the current user. */
  readonly owner?: string;
  readonly mode?: number;
  readonly filesHash: string;
}

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

function copyStep(type: CopyStep["type"], step: BuildStartRequest["steps"][number], where: string): CopyStep {
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
  if (owner !== "" && !/^[^:\s]+(:[^:\s]+)?$/.test(owner))
    throw bad(`${where}: the owner must be USER or USER:GROUP, not ${JSON.stringify(owner)}`);
  if (mode !== "" && !/^[0-7]{1,5}$/.test(mode)) throw bad(`${where}: the mode ${mode} is not octal`);
  const bits = mode === "" ? undefined : Number.parseInt(mode, 8);
  if (bits !== undefined && bits > 0o7777) throw bad(`${where}: the mode ${mode} is out of range`);
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

/** Checks the steps of a request before anything is started; error 400 names the step. */
export function parseSteps(steps: BuildStartRequest["steps"]): Step[] {
  return steps.map((step, index): Step => {
    const type = step.type.toUpperCase();
    const where = `step ${index + 1} (${type})`;
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

/** Context after a step. `WORKDIR` with a relative path is resolved against the present one. */
export function applyStep(context: StartupContext, step: Step): StartupContext {
  switch (step.type) {
    case "RUN":
    case "COPY":
    case "ADD":
      return context;
    case "ENV":
      return { ...context, envVars: { ...context.envVars, ...Object.fromEntries(step.pairs) } };
    case "WORKDIR":
      return { ...context, workdir: posix.resolve("/", context.workdir ?? "/", step.path) };
    case "USER":
      return { ...context, user: step.name };
    case "EXPOSE":
      return { ...context, exposedPorts: [...new Set([...context.exposedPorts, ...step.ports])] };
    case "VOLUME":
      return { ...context, volumes: [...new Set([...context.volumes, ...step.paths])] };
    case "LABEL":
      return { ...context, labels: { ...context.labels, ...Object.fromEntries(step.pairs) } };
  }
}

/** One line that names a step in logs and errors. */
export function describeStep(step: Step): string {
  switch (step.type) {
    case "RUN":
      return `RUN ${step.command}`;
    case "COPY":
    case "ADD":
      return `${step.type} ${step.source} ${step.target}`;
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
  }
}
