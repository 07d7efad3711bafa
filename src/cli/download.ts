import { randomBytes } from "node:crypto";
import { constants } from "node:fs";
import { link, mkdir, open, rename, rm, stat as statLocal, unlink } from "node:fs/promises";
import { basename, dirname, join, sep } from "node:path";
import { AgentError, type AgentTarget } from "./agent.ts";
import { Api } from "./api.ts";
import { CliError, type Invocation } from "./command.ts";
import { plainText, print, writeAll } from "./output.ts";
import { inParallel, Transfer } from "./progress.ts";
import { get, listDirectory, stat } from "./remote-files.ts";
import { runningTarget } from "./target.ts";
import { badName, checkConflict, type DownloadPlan, kindOf, MAX_JOBS } from "./transfers.ts";

interface RemoteFile {
  readonly remote: string;
  readonly local: string;
  readonly size: number;
}

/** `aenv download`. */
export async function download({ args, flags, usageError }: Invocation): Promise<number> {
  const [id, remote, local = "."] = args as [string, string, string | undefined];
  const jobs = flags.integer("jobs", 1, MAX_JOBS) ?? 4;
  const preserve = flags.has("preserve");
  const force = flags.has("force");
  const user = flags.text("user");
  const api = await Api.open();
  const target = await runningTarget(api, id, user);
  const entry = await stat(target, remote);
  if (entry === undefined) throw new CliError(`${remote} is not in sandbox ${id}`);
  const directory = entry.type === "directory";
  const whole = directory || preserve;
  if (!directory && entry.type !== "file" && !(preserve && entry.symlinkTarget !== undefined)) {
    throw new CliError(`${remote} is neither a file nor a directory`);
  }
  if (whole && user !== undefined) throw usageError("--user is for a single file, without --preserve");
  if (whole && !remote.startsWith("/")) throw usageError(`the remote path "${remote}" must be absolute`);
  if (whole && remote.split("/").includes(".."))
    throw usageError(`the remote path "${remote}" must not have ..`);
  if (local === "-") {
    if (whole) {
      throw usageError(
        `${preserve ? "--preserve writes" : "a directory makes"} files: - is for the bytes of a single one`,
      );
    }
    using transfer = new Transfer("Downloading", {
      bar: !flags.has("no-progress") && process.stdout.isTTY !== true,
    });
    await transfer.run((running) => toStandardOutput(target, { remote, size: entry.size }, running));
    return 0;
  }
  const path = await finalPath(local, entry.name);
  const plan: DownloadPlan = { target, remote, local: path, force };
  using transfer = new Transfer("Downloading", { bar: !flags.has("no-progress") });
  if (preserve) {
    const { downloadArchive } = await import("./archive.ts");
    await transfer.run((running) => downloadArchive(plan, entry, running));
  } else if (directory) {
    await transfer.run((running) => downloadDirectory(plan, jobs, running));
  } else {
    await transfer.run(async (running) => {
      running.total = entry.size;
      await checkConflict(path, force);
      await downloadFile(plan, { remote, local: path, size: entry.size }, running, running.signal);
    });
  }
  print(`Downloaded ${directory ? "directory " : ""}${id}:${plainText(remote)} to ${plainText(path)}`);
  return 0;
}

/** Writes the bytes of a file to standard output, no faster than they are read. */
async function toStandardOutput(
  target: AgentTarget,
  file: { readonly remote: string; readonly size: number },
  transfer: Transfer,
): Promise<void> {
  transfer.total = file.size;
  transfer.name(basename(file.remote));
  const { body, headers } = await get(target, file.remote, transfer.signal);
  const expected = Number(headers.get("content-length") ?? "NaN");
  let written = 0;
  try {
    for await (const chunk of body ?? []) {
      await writeAll(process.stdout, chunk);
      written += chunk.length;
      transfer.moved(chunk.length);
    }
  } catch (error) {
    transfer.signal.throwIfAborted();
    throw new AgentError("cut", "the connection to the sandbox was cut", error);
  }
  transfer.signal.throwIfAborted();
  if (Number.isFinite(expected) && written !== expected) {
    throw new AgentError("cut", `${file.remote} ended after ${written} of ${expected} bytes`);
  }
}

/**
 * Where it goes; a directory that is named as one, by a / at its end, is made when only it is missing. No part of the
 * given path may be a link: what is written must not end up elsewhere.
 */
async function finalPath(local: string, remoteName: string): Promise<string> {
  const into = local.endsWith(sep) || (await kindOf(local)) === "directory";
  if (into && badName(remoteName)) {
    throw new CliError(`"${remoteName}" is no name for a local file: give one`);
  }
  const path = into ? join(local, remoteName) : local;
  const parent = dirname(path);
  let missing = false;
  for (let at = parent; ; at = dirname(at)) {
    const kind = await kindOf(at);
    if (kind === "none" && at === parent && local.endsWith(sep)) {
      missing = true;
      continue;
    }
    if (kind === "none") {
      throw new CliError(`there is no directory ${at}`, { hint: `make it with: mkdir -p ${parent}` });
    }
    if (kind === "link") {
      throw new CliError(`${at} is a symbolic link`, { hint: "give the path that it leads to" });
    }
    if (kind !== "directory") throw new CliError(`${at} is not a directory`);
    if (dirname(at) === at) break;
  }
  if (missing) await mkdir(parent);
  return path;
}

/** All of a remote directory, or an error: nothing is written before it is known that all can be. */
async function walk(
  plan: DownloadPlan,
  remote: string,
  local: string,
  transfer: Transfer,
): Promise<{ directories: string[]; files: RemoteFile[] }> {
  transfer.signal.throwIfAborted();
  transfer.moved(0);
  const kind = await kindOf(local);
  if (kind !== "none" && kind !== "directory") throw new CliError(`${local} is there and not a directory`);
  const directories = [local];
  const files: RemoteFile[] = [];
  for (const entry of await listDirectory(plan.target, remote)) {
    const path = `${remote.replace(/\/+$/, "")}/${entry.name}`;
    if (badName(entry.name)) throw new CliError(`${remote} has an entry that cannot be a local file's name`);
    const wrong = entry.symlinkTarget !== undefined ? "a symbolic link" : "a special file";
    if (entry.symlinkTarget !== undefined || (entry.type !== "file" && entry.type !== "directory")) {
      throw new CliError(`${path} is ${wrong}`, { hint: "nothing was downloaded; --preserve keeps links" });
    }
    if (entry.type === "directory") {
      const below = await walk(plan, path, join(local, entry.name), transfer);
      directories.push(...below.directories);
      files.push(...below.files);
    } else {
      files.push({ remote: path, local: join(local, entry.name), size: entry.size });
    }
  }
  return { directories, files };
}

async function downloadDirectory(plan: DownloadPlan, jobs: number, transfer: Transfer): Promise<void> {
  const { directories, files } = await walk(plan, plan.remote, plan.local, transfer);
  // Names that differ here may be one name there (a file system that ignores case).
  for (const file of files) await checkConflict(file.local, plan.force);
  transfer.total = files.reduce((sum, file) => sum + file.size, 0);
  for (const path of directories) await mkdir(path, { recursive: true });
  await inParallel(files, jobs, transfer.signal, (file, signal) =>
    downloadFile(plan, file, transfer, signal),
  );
}

/** Gives a finished file its name, in place of another one only when that is wanted. */
export async function publish(temporary: string, path: string, force: boolean): Promise<void> {
  if (force) {
    await rename(temporary, path);
    return;
  }
  try {
    await link(temporary, path);
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code === "EEXIST") throw new CliError(`${path} has appeared meanwhile`, { cause: error });
    // File systems without hard links: the look and the renaming are two steps there.
    if (code !== "EPERM" && code !== "ENOTSUP" && code !== "EOPNOTSUPP") throw error;
    await checkConflict(path, false);
    await rename(temporary, path);
    return;
  }
  await unlink(temporary);
}

async function downloadFile(
  plan: DownloadPlan,
  file: RemoteFile,
  transfer: Transfer,
  signal: AbortSignal,
): Promise<void> {
  transfer.name(basename(file.local));
  const response = await get(plan.target, file.remote, signal);
  const temporary = join(dirname(file.local), `.aenv-download-${randomBytes(8).toString("hex")}`);
  const expected = Number(response.headers.get("content-length") ?? "NaN");
  try {
    {
      await using handle = await open(
        temporary,
        constants.O_WRONLY | constants.O_CREAT | constants.O_EXCL,
        0o666,
      );
      let written = 0;
      for await (const chunk of response.body ?? []) {
        await handle.writeFile(chunk);
        written += chunk.length;
        transfer.moved(chunk.length);
      }
      signal.throwIfAborted();
      if (Number.isFinite(expected) && written !== expected) {
        throw new AgentError("cut", `${file.remote} ended after ${written} of ${expected} bytes`);
      }
    }
    await publish(temporary, file.local, plan.force);
  } catch (error) {
    await rm(temporary, { force: true });
    if (signal.aborted) throw signal.reason;
    if (error instanceof CliError) throw error;
    const { code } = error as NodeJS.ErrnoException;
    const local = code !== undefined && (await statLocal(dirname(file.local))).isDirectory();
    throw local && /^E[A-Z]+$/.test(code) && !["ECONNRESET", "EPIPE"].includes(code)
      ? new CliError(`cannot write ${file.local}`, { cause: error })
      : new AgentError("cut", "the connection to the sandbox was cut", error);
  }
}
