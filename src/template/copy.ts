import { once } from "node:events";
import { connect, type Socket } from "node:net";
import { posix } from "node:path";
import { OpStreamWriter, type TarEntry } from "../image/index.ts";
import { AenvError, assert } from "../lib/errors.ts";
import type { AgentClient } from "../sandbox/types.ts";
import { type CopySource, memberPath, readArchive } from "./archive.ts";

/**
 * Sends the files of a COPY step into the guest. The agent's own executable unpacks them there (`envd copy`,
 * c/envd/copy.c), so the image needs no tool; it is PID 1's, which is there under any root file system.
 */
export interface CopyRequest {
  readonly archive: string;
  readonly source: CopySource;
  /** Absolute. */
  readonly target: string;
  readonly mustBeDirectory: boolean;
  readonly uid: number;
  readonly gid: number;
  /** Entries keep the owners of the archive; the above is for directories made on the way. */
  readonly keepOwners?: boolean;
  /** Permission bits for all files and directories; absent: as in the archive. */
  readonly mode?: number;
}

export interface CopyReport {
  readonly entries: number;
  readonly bytes: number;
}

const GUEST_PROGRAM = "/proc/1/exe";
const MAX_ANSWER_BYTES = 4096;

function byteString(text: string): string {
  return Buffer.from(text, "utf8").toString("latin1");
}

/** Path of a member below the source; undefined when it is not part of it. */
function relativeTo(source: CopySource, path: string): string | undefined {
  if (source.kind === "file") return path === source.path ? "" : undefined;
  if (path === source.prefix) return "";
  if (source.prefix === "") return path;
  return path.startsWith(`${source.prefix}/`) ? path.slice(source.prefix.length + 1) : undefined;
}

function owned(entry: TarEntry, request: CopyRequest): TarEntry {
  const mode = request.mode !== undefined && entry.type !== "symlink" ? request.mode : entry.mode;
  if (request.keepOwners === true) return { ...entry, mode };
  return { ...entry, mode, uid: request.uid, gid: request.gid };
}

/** Feeds the archive's members that belong to the source to the writer, with their paths below the target. */
function feeder(request: CopyRequest, writer: OpStreamWriter) {
  return {
    entry(entry: TarEntry): void {
      const path = relativeTo(request.source, memberPath(entry.path));
      // The context directory itself has no metadata that Docker would copy.
      if (
        path === undefined ||
        (path === "" && request.source.kind === "directory" && request.source.prefix === "")
      ) {
        writer.skipContent();
        return;
      }
      if (entry.type !== "hardLink") {
        writer.plainEntry(owned(entry, request), path);
        return;
      }
      const goal = relativeTo(request.source, memberPath(entry.linkTarget));
      if (goal === undefined || goal === "") {
        throw new AenvError({
          code: "invalid_archive",
          status: 400,
          message: `${path}: a hard link to a file that is not copied with it`,
        });
      }
      writer.plainEntry({ ...owned(entry, request), linkTarget: goal }, path);
    },
    data: (chunk: Uint8Array) => writer.data(chunk),
  };
}

/** One line of the guest program: `ok ENTRIES BYTES` or `error MESSAGE`. */
function parseAnswer(line: string): CopyReport {
  const done = /^ok (\d+) (\d+)$/.exec(line);
  if (done !== null) return { entries: Number(done[1]), bytes: Number(done[2]) };
  if (line.startsWith("error ")) {
    throw new AenvError({ code: "copy_failed", status: 400, message: line.slice("error ".length) });
  }
  throw new AenvError({
    code: "copy_failed",
    status: 502,
    message: "the guest ended the copy without an answer",
  });
}

async function readAnswer(socket: Socket): Promise<string> {
  let text = "";
  for await (const chunk of socket) {
    text += (chunk as Buffer).toString("utf8");
    if (text.includes("\n") || text.length > MAX_ANSWER_BYTES) break;
  }
  return text.split("\n")[0]!;
}

async function stream(
  socket: Socket,
  token: string,
  request: CopyRequest,
  signal: AbortSignal,
): Promise<CopyReport> {
  const abort = () => socket.destroy(signal.reason instanceof Error ? signal.reason : new Error("aborted"));
  signal.addEventListener("abort", abort, { once: true });
  // An early answer means the guest refused: the rest need not be sent.
  const answer = readAnswer(socket);
  answer.catch(() => undefined);
  let answered = false;
  void answer.then(
    () => {
      answered = true;
    },
    () => {
      answered = true;
    },
  );
  try {
    const writer = new OpStreamWriter();
    const send = async (): Promise<void> => {
      for (const piece of writer.take()) {
        if (answered) throw new Refused();
        if (!socket.write(piece)) await Promise.race([once(socket, "drain"), answer]);
      }
    };
    socket.write(`${token}\n`);
    const { source } = request;
    writer.target({
      path: byteString(request.target),
      mustBeDirectory: request.mustBeDirectory,
      uid: request.uid,
      gid: request.gid,
      ...(source.kind === "file" ? { fileName: posix.basename(source.path) } : {}),
    });
    try {
      await readArchive(request.archive, feeder(request, writer), signal, send);
      writer.end();
      await send();
      socket.end();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
    }
    return parseAnswer(await answer);
  } catch (error) {
    signal.throwIfAborted();
    throw error;
  } finally {
    signal.removeEventListener("abort", abort);
    socket.destroy();
  }
}

class Refused extends Error {}

/** Error `copy_failed` with the guest's reason (a full disk, a target of another kind …). */
export async function copyIntoGuest(
  agent: AgentClient,
  hostAddress: string,
  request: CopyRequest,
  options: { readonly timeoutMs: number; readonly signal: AbortSignal },
): Promise<CopyReport> {
  const { signal, timeoutMs } = options;
  const token = Buffer.from(crypto.getRandomValues(new Uint8Array(24))).toString("hex");
  const port = Promise.withResolvers<number>();
  port.promise.catch(() => undefined);
  let said = "";
  const running = agent.run({
    cmd: GUEST_PROGRAM,
    args: ["copy"],
    env: { AENV_COPY_TOKEN: token },
    cwd: "/",
    user: "root",
    timeoutMs,
    onStdout(chunk) {
      // One short line is all that is waited for; the guest may say whatever it likes after it.
      if (said.length > MAX_ANSWER_BYTES) return;
      said += Buffer.from(chunk.subarray(0, MAX_ANSWER_BYTES)).toString("utf8");
      const match = /^port (\d+)\n/.exec(said);
      if (match !== null) port.resolve(Number(match[1]));
    },
  });
  running.then(
    (outcome) =>
      port.reject(
        new AenvError({
          code: "copy_failed",
          message: `the agent in the guest cannot copy files: exit code ${outcome.exitCode}: ${outcome.stderr.trim()}`,
          remediation:
            "a template of an older version must be built again before files can be copied into it",
        }),
      ),
    (error: unknown) => port.reject(error),
  );
  const number = await port.promise;
  const host = hostAddress.split(":")[0];
  assert(host !== undefined && host !== "", "a sandbox has an address");
  const socket = connect({ host, port: number });
  socket.on("error", () => undefined); // seen by whoever reads or writes
  try {
    await once(socket, "connect", { signal });
  } catch (error) {
    socket.destroy();
    signal.throwIfAborted();
    throw new AenvError({
      code: "agent_unreachable",
      status: 502,
      message: `the guest's port ${number} cannot be reached`,
      cause: error,
    });
  }
  try {
    return await stream(socket, token, request, signal);
  } finally {
    // The program ends with its connection; its failure is what was told there.
    await Promise.race([running.catch(() => undefined), Bun.sleep(2000)]);
  }
}
