import { type ChildProcess, spawn } from "node:child_process";
import { randomBytes } from "node:crypto";
import { once } from "node:events";
import { lstat, mkdtemp, readdir, rename, rm } from "node:fs/promises";
import { basename, dirname, join, resolve } from "node:path";
import { AgentError, type AgentTarget, exitStatus, processEvents, unary } from "./agent.ts";
import { CliError } from "./command.ts";
import { plainLines, plainText, writeAll } from "./output.ts";
import type { Transfer } from "./progress.ts";
import { encodeSignal, encodeStart, type RemoteEntry } from "./protocol.ts";
import { put, remove } from "./remote-files.ts";
import { badName, checkConflict, type DownloadPlan, type UploadPlan } from "./transfers.ts";

/*
 * Transfers that keep modes, times and links: by the tar of either side. An archive is unpacked beside its
 * place and renamed into it, so that what is interrupted leaves nothing under the final name.
 */

const MAX_NOTE = 4_096;

function needTar(): string {
  const path = Bun.which("tar");
  if (path === null) throw new CliError("--preserve needs tar, which is not here", { hint: "install tar" });
  return path;
}

/** Long names, no attributes that the other tar might not know; times to the second. */
function createFlags(tar: string): string[] {
  const { stdout } = Bun.spawnSync([tar, "--version"], { stdout: "pipe", stderr: "ignore" });
  const bsd = /bsdtar|libarchive/.test(stdout.toString());
  return bsd ? ["--format", "gnutar", "--no-xattrs"] : ["--format=gnu"];
}

const SLASH = Buffer.from("/");

/** Joins as bytes: names need not be text. */
const below = (path: string | Buffer, name: Buffer): Buffer =>
  Buffer.concat([Buffer.from(path), SLASH, name]);

/** Bytes of all files below. What cannot be looked at counts for nothing: tar is the one to tell. */
export async function treeBytes(path: string | Buffer): Promise<number> {
  const stats = await lstat(path);
  if (!stats.isDirectory()) return stats.isFile() ? stats.size : 0;
  let sum = 0;
  for (const name of await readdir(path, { encoding: "buffer" })) {
    sum += await treeBytes(below(path, name)).catch((error: NodeJS.ErrnoException) => {
      if (error.code === "ENOENT" || error.code === "EACCES") return 0;
      throw error;
    });
  }
  return sum;
}

/**
 * Refuses to merge where a file would be written through a link that is there already, such as one of an earlier
 * download: where it leads was the sandbox's choice.
 */
async function checkMerge(from: Buffer, to: Buffer): Promise<void> {
  for (const name of await readdir(from, { encoding: "buffer" })) {
    const source = await lstat(below(from, name));
    if (source.isSymbolicLink()) continue; // Replaces a link itself.
    const there = await lstat(below(to, name)).catch((error: NodeJS.ErrnoException) => {
      if (error.code === "ENOENT") return undefined;
      throw error;
    });
    if (there?.isSymbolicLink() === true) {
      throw new CliError(
        `${plainText(below(to, name).toString())} is a symbolic link, which is not replaced`,
        {
          hint: "nothing was merged; remove the link, or download to another place",
        },
      );
    }
    if (source.isDirectory() && there?.isDirectory() === true) {
      await checkMerge(below(from, name), below(to, name));
    }
  }
}

/** The last of what a process says on its error output. */
function noteOf(child: ChildProcess): () => string {
  let note = "";
  child.stderr?.on("data", (chunk: Buffer) => {
    note = (note + chunk.toString()).slice(-MAX_NOTE);
  });
  return () => plainLines(note);
}

async function ended(child: ChildProcess, what: string, note: () => string): Promise<void> {
  const [code] = (await (child.exitCode !== null ? [child.exitCode] : once(child, "close"))) as [
    number | null,
  ];
  if (code !== 0) {
    const said = note();
    throw new CliError(`${what} failed`, { cause: new Error(said === "" ? `status ${code}` : said) });
  }
}

/** Runs a script in the sandbox; its output goes to `sink`. Anything but status 0 is an error with what it said. */
async function remoteScript(
  target: AgentTarget,
  script: string,
  args: readonly string[],
  signal: AbortSignal,
  sink: (bytes: Uint8Array) => Promise<void> = async () => undefined,
): Promise<void> {
  let pid: number | undefined;
  let note = "";
  try {
    const start = encodeStart({ cmd: "/bin/sh", args: ["-c", script, "aenv", ...args], stdin: false });
    for await (const event of processEvents(target, "process.Process/Start", start, signal)) {
      if (event.kind === "start") pid = event.pid;
      else if (event.kind === "stdout") await sink(event.bytes);
      else if (event.kind === "stderr") note = (note + Buffer.from(event.bytes).toString()).slice(-MAX_NOTE);
      else if (event.kind === "end") {
        const status = exitStatus(event.end);
        if (status === 0) return;
        const hint =
          status === 127 ? { hint: "is tar in the sandbox? without --preserve none is needed" } : {};
        throw new CliError("the sandbox's part of the transfer failed", {
          cause: new Error(note === "" ? `status ${status}` : plainLines(note)),
          ...hint,
        });
      }
    }
  } catch (error) {
    if (pid !== undefined && signal.aborted) await stopRemote(target, pid);
    throw signal.aborted ? signal.reason : error;
  }
  throw new AgentError("cut", "the connection to the sandbox was cut");
}

async function stopRemote(target: AgentTarget, pid: number): Promise<void> {
  try {
    await unary(target, "process.Process/SendSignal", encodeSignal(pid, "SIGTERM"), 2_000);
  } catch (error) {
    // Gone already, or out of reach: what it leaves is a hidden directory.
    if (!(error instanceof AgentError)) throw error;
  }
}

// $1 the archive, $2 the name in it, $3 where it goes.
const UNPACK = `set -e
d="$1.d"
trap 'rm -rf "$d" "$1"' EXIT
trap 'exit 143' TERM INT HUP
mkdir "$d"
tar -xpof "$1" -C "$d"
if [ -d "$d/$2" ] && [ ! -L "$d/$2" ] && [ -d "$3" ]; then cp -a "$d/$2/." "$3/"
else mv -f "$d/$2" "$3"; fi`;

/** `aenv upload --preserve`. */
export async function uploadArchive(plan: UploadPlan, transfer: Transfer): Promise<void> {
  const tar = needTar();
  const source = resolve(plan.local);
  const name = basename(source);
  transfer.total = await treeBytes(source);
  transfer.name(name);
  const parent = dirname(plan.remote);
  const archive = `${parent === "/" ? "" : parent}/.aenv-upload-${randomBytes(8).toString("hex")}`;
  const child = spawn(
    tar,
    [...createFlags(tar), "--numeric-owner", "-cf", "-", "-C", dirname(source), `./${name}`],
    {
      stdio: ["ignore", "pipe", "pipe"],
      env: { ...process.env, COPYFILE_DISABLE: "1" },
    },
  );
  const note = noteOf(child);
  const finished = ended(child, "tar", note);
  // Awaited below, after the stream that it ends.
  finished.catch(() => undefined);
  async function* packed(): AsyncGenerator<Buffer, void> {
    for await (const chunk of child.stdout!) {
      transfer.moved((chunk as Buffer).length);
      yield chunk as Buffer;
    }
    // An archive that is not whole must not look as if it were.
    await finished;
  }
  // Reading begins before anything else: when a process ends, output that nobody has begun to read is thrown
  // away, and a small archive would arrive empty.
  const chunks = packed();
  let first: Promise<IteratorResult<Buffer, void>> | undefined = chunks.next();
  first.catch(() => undefined);
  try {
    const stream = new ReadableStream<Uint8Array>(
      {
        async pull(controller) {
          const { value, done } = await (first ?? chunks.next());
          first = undefined;
          if (done === true) controller.close();
          else controller.enqueue(value);
        },
      },
      { highWaterMark: 0 },
    );
    const type = "application/octet-stream";
    await put(plan.target, archive, { stream, length: undefined, contentType: type }, transfer.signal);
    await finished;
    await remoteScript(plan.target, UNPACK, [archive, name, plan.remote], transfer.signal);
  } catch (error) {
    // When tar broke the stream, its own words are the reason. It is not over before its output is.
    child.stdout!.destroy();
    const own = child.exitCode === null ? undefined : await finished.catch((failed: unknown) => failed);
    child.kill("SIGKILL");
    await remove(plan.target, archive).catch((left: unknown) => {
      if (!(left instanceof AgentError)) throw left;
    });
    throw transfer.signal.aborted ? error : (own ?? error);
  }
}

/**
 * `aenv download --preserve`. Names and bytes are the sandbox's: tar, which keeps to its directory (no absolute
 * names, no `..`, nothing through links), unpacks into a new one, and out of it comes what was asked for alone.
 */
export async function downloadArchive(
  plan: DownloadPlan,
  entry: RemoteEntry,
  transfer: Transfer,
): Promise<void> {
  if (badName(entry.name)) {
    throw new CliError(
      `the sandbox names ${plainText(plan.remote)} "${plainText(entry.name)}", which is no file's name`,
    );
  }
  const tar = needTar();
  const there = await lstat(plan.local).catch((error: NodeJS.ErrnoException) => {
    if (error.code === "ENOENT") return undefined;
    throw error;
  });
  const merge =
    there?.isDirectory() === true && entry.type === "directory" && entry.symlinkTarget === undefined;
  if (merge && !plan.force) {
    throw new CliError(`${plan.local} is there already`, { hint: "merge into it with --force" });
  }
  if (!merge) await checkConflict(plan.local, plan.force);
  transfer.total = entry.type === "directory" ? 0 : entry.size;
  transfer.name(entry.name);
  const temporary = await mkdtemp(join(dirname(plan.local), ".aenv-download-"));
  try {
    const child = spawn(tar, ["-xpof", "-", "-C", temporary], { stdio: ["pipe", "ignore", "pipe"] });
    const note = noteOf(child);
    const finished = ended(child, "tar", note);
    finished.catch(() => undefined);
    const input = child.stdin!;
    input.on("error", () => undefined); // Its end tells why.
    try {
      await remoteScript(
        plan.target,
        'cd "$1" && exec tar -cf - "./$2"',
        [dirname(entry.path), entry.name],
        transfer.signal,
        async (bytes) => {
          transfer.moved(bytes.length);
          if (child.exitCode !== null || child.signalCode !== null) await finished;
          await writeAll(input, bytes);
        },
      );
      input.end();
      await finished;
    } catch (error) {
      child.kill("SIGKILL");
      throw error;
    }
    const unpacked = join(temporary, entry.name);
    const got = await lstat(unpacked).catch((error: NodeJS.ErrnoException) => {
      if (error.code === "ENOENT") return undefined;
      throw error;
    });
    if (got === undefined) throw new CliError(`the sandbox sent no ${plainText(entry.name)}`);
    const isLink = entry.symlinkTarget !== undefined;
    if (got.isSymbolicLink() !== isLink || (!isLink && got.isDirectory() !== (entry.type === "directory"))) {
      throw new CliError(`the sandbox sent something else than the ${entry.type} it told of`);
    }
    if (merge) {
      await checkMerge(Buffer.from(unpacked), Buffer.from(plan.local));
      const copy = spawn("cp", ["-a", `${unpacked}/.`, `${plan.local}/`], {
        stdio: ["ignore", "ignore", "pipe"],
      });
      await ended(copy, "merging", noteOf(copy));
    } else {
      await rename(unpacked, plan.local);
    }
  } finally {
    await rm(temporary, { recursive: true, force: true });
  }
}
