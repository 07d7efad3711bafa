import { randomBytes } from "node:crypto";
import { constants, type Stats } from "node:fs";
import { lstat, mkdtemp, open, readdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { basename, join, resolve } from "node:path";
import type { AgentTarget } from "./agent.ts";
import { Api } from "./api.ts";
import { CliError, type Invocation } from "./command.ts";
import { plainText, print } from "./output.ts";
import { inParallel, Transfer } from "./progress.ts";
import type { RemoteEntry } from "./protocol.ts";
import { makeDirectory, put, stat } from "./remote-files.ts";
import { runningTarget } from "./target.ts";
import { MAX_JOBS, type UploadPlan } from "./transfers.ts";

const CHUNK_BYTES = 256 * 1024;

interface LocalFile {
  readonly local: string;
  readonly remote: string;
  readonly size: number;
}

/** The last part of a local path, also of `.` and `a/..`. */
function localName(path: string): string {
  const name = basename(resolve(path));
  if (name === "") throw new CliError(`${path} has no name of its own: give the remote one in full`);
  return name;
}

async function localStats(path: string): Promise<Stats> {
  try {
    return await lstat(path);
  } catch (cause) {
    if ((cause as NodeJS.ErrnoException).code === "ENOENT") throw new CliError(`there is no ${path}`);
    throw new CliError(`cannot read ${path}`, { cause });
  }
}

/** `aenv upload`. */
export async function upload({ args, flags, usageError }: Invocation): Promise<number> {
  const [id, local, remote] = args as [string, string, string];
  const jobs = flags.integer("jobs", 1, MAX_JOBS) ?? 4;
  const preserve = flags.has("preserve");
  const user = flags.text("user");
  if (local === "-") {
    if (preserve) throw usageError("--preserve is for files: standard input has no modes or times");
    if (remote.endsWith("/")) throw usageError(`standard input has no name: give one behind "${remote}"`);
    const api = await Api.open();
    const target = await runningTarget(api, id, user);
    await fromStandardInput(target, remote, !flags.has("no-progress"));
    print(`Uploaded standard input to ${id}:${plainText(remote)}`);
    return 0;
  }
  const stats = await localStats(local);
  if (stats.isSymbolicLink() && !preserve) {
    throw new CliError(`${local} is a symbolic link`, {
      hint: "name the file it leads to, or keep the link as one with --preserve",
    });
  }
  const directory = stats.isDirectory();
  if (!directory && !stats.isFile() && !(preserve && stats.isSymbolicLink())) {
    throw new CliError(`${local} is neither a file nor a directory`);
  }
  const whole = directory || preserve;
  if (whole && user !== undefined) throw usageError("--user is for a single file, without --preserve");
  if (whole && !remote.startsWith("/")) throw usageError(`the remote path "${remote}" must be absolute`);
  if (whole && remote.split("/").includes(".."))
    throw usageError(`the remote path "${remote}" must not have ..`);
  const api = await Api.open();
  const target = await runningTarget(api, id, user);
  const plan: UploadPlan = { target, local, remote: await finalPath(target, local, remote, directory) };
  const told = `${plainText(local)} to ${id}:${plainText(plan.remote)}`;
  const bar = !flags.has("no-progress");
  using transfer = new Transfer("Uploading", { bar });
  if (preserve) {
    const { uploadArchive } = await import("./archive.ts");
    await transfer.run((running) => uploadArchive(plan, running));
  } else if (directory) {
    await transfer.run((running) => uploadDirectory(plan, jobs, running));
  } else {
    await transfer.run(async (running) => {
      running.total = stats.size;
      await uploadFile(target, { local, remote: plan.remote, size: stats.size }, running, running.signal);
    });
  }
  print(`Uploaded ${directory ? "directory " : ""}${told}`);
  return 0;
}

/** Sends standard input as one file: kept in a private file first, as the length is told before the bytes. */
async function fromStandardInput(target: AgentTarget, remote: string, bar: boolean): Promise<void> {
  const directory = await mkdtemp(join(tmpdir(), "aenv-upload-"));
  const kept = join(directory, "standard input");
  using transfer = new Transfer("Uploading", { bar });
  try {
    await transfer.run(async (running) => {
      let size = 0;
      {
        await using handle = await open(kept, "wx", 0o600);
        const stop = () => void process.stdin.destroy();
        running.signal.addEventListener("abort", stop, { once: true });
        // Whoever writes it may take its time: that is no stall of the transfer.
        const patience = setInterval(() => running.moved(0), 1_000);
        try {
          for await (const chunk of process.stdin as AsyncIterable<Buffer>) {
            await handle.writeFile(chunk);
            size += chunk.length;
          }
        } finally {
          clearInterval(patience);
          running.signal.removeEventListener("abort", stop);
        }
        running.signal.throwIfAborted();
      }
      running.total = size;
      await uploadFile(target, { local: kept, remote, size }, running, running.signal);
    });
  } finally {
    await rm(directory, { recursive: true, force: true });
  }
}

/** Where it goes: into a directory that is there or that a trailing slash names, else to just that path. */
async function finalPath(
  target: AgentTarget,
  local: string,
  remote: string,
  directory: boolean,
): Promise<string> {
  if (remote.endsWith("/")) return `${remote.replace(/\/+$/, "")}/${localName(local)}`;
  if (!directory) return remote;
  const there = await stat(target, remote);
  if (there === undefined) return remote;
  if (there.type === "directory") return `${remote}/${localName(local)}`;
  throw new CliError(`${remote} is in the sandbox and not a directory`);
}

const utf8 = new TextDecoder("utf-8", { fatal: true });

function utf8Name(name: Buffer, directory: string): string {
  try {
    return utf8.decode(name);
  } catch (cause) {
    throw new CliError(`${directory} has a name that is not UTF-8: ${name.toString("latin1")}`, {
      hint: "rename it, or keep all names as they are with --preserve",
      cause,
    });
  }
}

/** All of a directory, or an error: nothing is sent before it is known that all can be. */
async function walk(local: string, remote: string): Promise<{ directories: string[]; files: LocalFile[] }> {
  const directories = [remote];
  const files: LocalFile[] = [];
  const names = (await readdir(local, { encoding: "buffer" })).sort(Buffer.compare);
  for (const bytes of names) {
    const name = utf8Name(bytes as Buffer, local);
    const path = join(local, name);
    const stats = await localStats(path);
    if (stats.isDirectory()) {
      const below = await walk(path, `${remote}/${name}`);
      directories.push(...below.directories);
      files.push(...below.files);
    } else if (stats.isFile()) {
      files.push({ local: path, remote: `${remote}/${name}`, size: stats.size });
    } else {
      throw new CliError(`${path} is ${stats.isSymbolicLink() ? "a symbolic link" : "a special file"}`, {
        hint: "nothing was uploaded; --preserve keeps links",
      });
    }
  }
  return { directories, files };
}

async function uploadDirectory(plan: UploadPlan, jobs: number, transfer: Transfer): Promise<void> {
  const { directories, files } = await walk(plan.local, plan.remote);
  transfer.total = files.reduce((sum, file) => sum + file.size, 0);
  for (const path of directories) {
    transfer.signal.throwIfAborted();
    const there: RemoteEntry | undefined = await stat(plan.target, path);
    if (there === undefined) await makeDirectory(plan.target, path);
    else if (there.type !== "directory") throw new CliError(`${path} is in the sandbox and not a directory`);
    transfer.moved(0);
  }
  await inParallel(files, jobs, transfer.signal, (file, signal) =>
    uploadFile(plan.target, file, transfer, signal),
  );
}

/** Sends one file, of which just so many bytes as it had when it was looked at. */
async function uploadFile(
  target: AgentTarget,
  file: LocalFile,
  transfer: Transfer,
  signal: AbortSignal,
): Promise<void> {
  transfer.name(basename(file.local));
  // Whatever came in its place since it was looked at, a link or a pipe, is not opened.
  const flags = constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK;
  let opened: Awaited<ReturnType<typeof open>>;
  try {
    opened = await open(file.local, flags);
  } catch (cause) {
    throw new CliError(`cannot read ${file.local}`, { cause });
  }
  await using handle = opened;
  // Files that the kernel makes up as they are read have no size.
  const unsized = file.size === 0 ? await handle.readFile() : undefined;
  const size = unsized?.length ?? file.size;
  const boundary = `aenv-${randomBytes(16).toString("hex")}`;
  const name = basename(file.remote).replace(/["\r\n%]/g, (sign) => encodeURIComponent(sign));
  const head = Buffer.from(
    `--${boundary}\r\nContent-Disposition: form-data; name="file"; filename="${name}"\r\nContent-Type: application/octet-stream\r\n\r\n`,
  );
  const tail = Buffer.from(`\r\n--${boundary}--\r\n`);
  let at = -1;
  let failed: CliError | undefined;
  const stream = new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        if (at < 0) {
          at = 0;
          controller.enqueue(head);
          return;
        }
        if (at >= size) {
          controller.enqueue(tail);
          controller.close();
          return;
        }
        const chunk = Buffer.allocUnsafe(Math.min(CHUNK_BYTES, size - at));
        const bytesRead =
          unsized?.copy(chunk, 0, at) ?? (await handle.read(chunk, 0, chunk.length, at)).bytesRead;
        if (bytesRead === 0) {
          failed = new CliError(`${file.local} has become shorter while it was read`);
          controller.error(failed);
          return;
        }
        at += bytesRead;
        transfer.moved(bytesRead);
        controller.enqueue(chunk.subarray(0, bytesRead));
      },
    },
    { highWaterMark: 0 },
  );
  try {
    await put(
      target,
      file.remote,
      {
        stream,
        length: head.length + size + tail.length,
        contentType: `multipart/form-data; boundary=${boundary}`,
      },
      signal,
    );
  } catch (error) {
    throw failed ?? error;
  }
}
