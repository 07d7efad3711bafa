import { lstat } from "node:fs/promises";
import type { AgentTarget } from "./agent.ts";
import { CliError } from "./command.ts";

export const MAX_JOBS = 32;

/** What is uploaded where. `remote` is the final path of the file or of the directory itself. */
export interface UploadPlan {
  readonly target: AgentTarget;
  readonly local: string;
  readonly remote: string;
}

/** What is downloaded where. `local` is the final path of the file or of the directory itself. */
export interface DownloadPlan {
  readonly target: AgentTarget;
  /** Absolute, except for a file that is named relative to a home. */
  readonly remote: string;
  readonly local: string;
  readonly force: boolean;
}

/** What is at a local path, links not followed. */
export type Kind = "none" | "file" | "directory" | "link" | "special";

export async function kindOf(path: string): Promise<Kind> {
  try {
    const stats = await lstat(path);
    if (stats.isSymbolicLink()) return "link";
    if (stats.isDirectory()) return "directory";
    return stats.isFile() ? "file" : "special";
  } catch (cause) {
    // Below something that is no directory there is nothing either.
    if (["ENOENT", "ENOTDIR"].includes((cause as NodeJS.ErrnoException).code ?? "")) return "none";
    throw new CliError(`cannot look at ${path}`, { cause });
  }
}

/** Whether a name that came from a sandbox would be more or less than one entry of a local directory. */
export function badName(name: string): boolean {
  return name === "" || name === "." || name === ".." || /[/\0\ufffd]/.test(name);
}

/** What may not be written over: an existing file without `force`, anything that is no file with it. */
export async function checkConflict(path: string, force: boolean): Promise<void> {
  const kind = await kindOf(path);
  if (kind === "none" || (kind === "file" && force)) return;
  if (kind === "file") throw new CliError(`${path} is there already`, { hint: "replace it with --force" });
  const what = { directory: "a directory", link: "a symbolic link", special: "a special file" }[kind];
  throw new CliError(`${path} is ${what}, which is not replaced`);
}
