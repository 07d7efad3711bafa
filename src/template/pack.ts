import { closeSync, openSync, writeSync } from "node:fs";
import { posix } from "node:path";
import { AenvError } from "../lib/errors.ts";
import { Glob } from "../lib/glob.ts";
import type { AgentClient } from "../sandbox/types.ts";
import type { ArchiveMember, CopySource } from "./archive.ts";

/**
 * Files of one guest for another (COPY --from). The agent's own executable packs them there (`envd pack`,
 * c/envd/pack.c), so that the image needs no tool.
 */

const GUEST_PROGRAM = "/proc/1/exe";
const NOTHING_THERE = 3;
/** More than a virtual disk holds: whatever sends it is not the agent's program. */
const MAX_PACK_BYTES = 128 * 1024 ** 3;
const SPECIAL = /[*?[\\]/;

/** A source of COPY --from: what is packed, and what of it is meant. */
export interface StageSource {
  /** Absolute path in the stage's guest. */
  readonly path: string;
  /** Name of its members. */
  readonly name: string;
  /** Go's path patterns below `path`; absent: all of it. */
  readonly pattern?: readonly string[];
}

/** Patterns begin at the first component with a special character, as docker's do. */
export function stageSource(source: string): StageSource {
  const parts = posix.resolve("/", source).split("/").slice(1);
  const special = parts.findIndex((part) => SPECIAL.test(part));
  const plain = special < 0 ? parts : parts.slice(0, special);
  const path = `/${plain.join("/")}`;
  const name = plain.at(-1) || "root";
  return special < 0 ? { path, name } : { path, name, pattern: parts.slice(special) };
}

/** No file system has longer ones. */
const MAX_NAME_BYTES = 255;

/** A component of a pattern (`*`, `?`, `[a-z]`, `[^a]`, `\x`); error 400 for a broken one. */
function component(pattern: string): Glob {
  const glob = Glob.go(Buffer.from(pattern, "utf8").toString("latin1"));
  if (glob === undefined) throw badPattern(pattern);
  return glob;
}

function badPattern(pattern: string): AenvError {
  return new AenvError({
    code: "invalid_step",
    status: 400,
    message: `${JSON.stringify(pattern)} is not a pattern`,
  });
}

/**
 * The copies a source stands for. Each path that matches is a source of its own: a directory's content, or a file
 * by its name. Error `copy_failed` when nothing matches.
 */
export function matchSources(
  members: readonly ArchiveMember[],
  { path, name, pattern }: StageSource,
): CopySource[] {
  const bytes = Buffer.from(name, "utf8").toString("latin1");
  if (pattern === undefined) {
    const top = members.find((member) => member.path === bytes);
    if (top === undefined || top.type === "directory") return [{ kind: "directory", prefix: bytes }];
    return [{ kind: "file", path: bytes }];
  }
  const parts = pattern.map(component);
  const found = members.filter((member) => {
    if (!member.path.startsWith(`${bytes}/`)) return false;
    const own = member.path.slice(bytes.length + 1).split("/");
    return (
      own.length === parts.length &&
      own.every((name, i) => name.length <= MAX_NAME_BYTES && parts[i]!.matches(name))
    );
  });
  if (found.length === 0) {
    throw new AenvError({
      code: "copy_failed",
      status: 400,
      message: `nothing in the stage matches ${posix.join(path, ...pattern)}`,
    });
  }
  return found
    .toSorted((a, b) => (a.path < b.path ? -1 : 1))
    .map(
      (member): CopySource =>
        member.type === "directory"
          ? { kind: "directory", prefix: member.path }
          : { kind: "file", path: member.path },
    );
}

/** Writes the tar of a source to a new file. Errors: `copy_failed` when it is not there or cannot be read. */
export async function packFromGuest(
  agent: AgentClient,
  source: StageSource,
  target: string,
  options: { readonly timeoutMs: number; readonly signal: AbortSignal },
): Promise<void> {
  const fd = openSync(target, "wx", 0o600);
  let failed: unknown;
  let written = 0;
  try {
    const outcome = await agent.run({
      cmd: GUEST_PROGRAM,
      // Of a pattern only some names are taken: a link to one that is not would lead nowhere.
      args: ["pack", ...(source.pattern === undefined ? [] : ["--copies"]), "--", source.path, source.name],
      cwd: "/",
      user: "root",
      timeoutMs: options.timeoutMs,
      onStdout(chunk) {
        if (failed !== undefined) return;
        try {
          written += chunk.length;
          if (written > MAX_PACK_BYTES) throw new Error(`the stage sends more than ${MAX_PACK_BYTES} bytes`);
          for (let at = 0; at < chunk.length; ) at += writeSync(fd, chunk, at);
        } catch (error) {
          failed = error;
        }
      },
    });
    options.signal.throwIfAborted();
    if (failed !== undefined) throw failed;
    if (outcome.exitCode !== 0) {
      const said = outcome.stderr.trim().replace(/^envd pack: /, "");
      throw new AenvError({
        code: "copy_failed",
        status: 400,
        message:
          outcome.exitCode === NOTHING_THERE
            ? `the stage has nothing at ${source.path}`
            : `the stage's files cannot be read: ${said === "" ? `exit code ${outcome.exitCode}` : said}`,
      });
    }
  } finally {
    closeSync(fd);
  }
}
