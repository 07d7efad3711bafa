import { posix } from "node:path";
import { AenvError } from "../lib/errors.ts";
import type { StartupContext } from "../snapshot/types.ts";
import type { BuildStartRequest } from "./types.ts";

/** A build step, checked. What it does to the guest is in build.ts; what it does to the context is here. */
export type Step =
  | { readonly type: "RUN"; readonly command: string; readonly user?: string }
  | { readonly type: "ENV"; readonly pairs: readonly (readonly [string, string])[] }
  | { readonly type: "WORKDIR"; readonly path: string }
  | { readonly type: "USER"; readonly name: string }
  | { readonly type: "EXPOSE"; readonly ports: readonly string[] }
  | { readonly type: "VOLUME"; readonly paths: readonly string[] }
  | { readonly type: "LABEL"; readonly pairs: readonly (readonly [string, string])[] };

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

/** Checks the steps of a request before anything is started; error 400 names the step. */
export function parseSteps(steps: BuildStartRequest["steps"]): Step[] {
  return steps.map((step, index): Step => {
    const type = step.type.toUpperCase();
    const where = `step ${index + 1} (${type})`;
    if (type === "COPY" || type === "ADD" || step.filesHash !== undefined) {
      throw bad(
        `${where}: uploading files into a build is not supported yet`,
        "unsupported_step",
        "put the files into the base image, or fetch them in a RUN step",
      );
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
      default:
        throw bad(
          `${where}: unknown step type`,
          "unsupported_step",
          "known: RUN ENV ARG WORKDIR USER EXPOSE VOLUME LABEL",
        );
    }
  });
}

/** Context after a step. `WORKDIR` with a relative path is resolved against the present one. */
export function applyStep(context: StartupContext, step: Step): StartupContext {
  switch (step.type) {
    case "RUN":
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
