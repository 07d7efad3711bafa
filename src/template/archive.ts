import { closeSync, ftruncateSync, openSync, writeSync } from "node:fs";
import { posix } from "node:path";
import { openLayerTar, showBytes, type TarEntry, TarParser, type TarSink } from "../image/index.ts";
import { AenvError, errorChain } from "../lib/errors.ts";

/**
 * Archives of COPY steps: tars (plain, gzip, zstd) whose members are relative to the build context. Paths are
 * byte strings as in the tar parser.
 */

export interface ArchiveLimits {
  readonly maxEntries: number;
  /** Content of all members together. */
  readonly maxContentBytes: number;
  /** Names of all members together: they are kept in memory. Default 128 MiB. */
  readonly maxNameBytes?: number;
}

export interface ArchiveMember {
  /** In normal form, without leading `./` and trailing slash; empty: the context directory itself. */
  readonly path: string;
  readonly type: TarEntry["type"];
}

export function invalidArchive(message: string, cause?: unknown): AenvError {
  return new AenvError({
    code: "invalid_archive",
    status: 400,
    message: `the uploaded archive is not usable: ${message}`,
    remediation: "upload a whole tar or tar.gz whose members are relative paths within the build context",
    ...(cause === undefined ? {} : { cause }),
  });
}

/** Error `invalid_archive` for absolute names and names with a `..` component. */
export function memberPath(name: string): string {
  if (name.startsWith("/")) throw invalidArchive(`its member ${showBytes(name)} has an absolute path`);
  const parts = name.split("/");
  if (parts.includes("..")) throw invalidArchive(`its member ${showBytes(name)} leaves the build context`);
  return parts.filter((part) => part !== "" && part !== ".").join("/");
}

/** Also of what follows the end mark: a small file may unpack without end. */
const MAX_UNPACKED_BYTES = 256 * 1024 ** 3;

/** Runs the whole archive through a sink. Errors of its form are `invalid_archive`. */
export async function readArchive(
  file: string,
  sink: TarSink,
  signal: AbortSignal,
  onChunk: () => Promise<void> = async () => undefined,
): Promise<void> {
  const parser = new TarParser(sink);
  const tar = await openLayerTar(file, signal);
  let total = 0;
  try {
    for await (const chunk of tar.chunks) {
      total += chunk.length;
      if (total > MAX_UNPACKED_BYTES)
        throw invalidArchive(`it unpacks to more than ${MAX_UNPACKED_BYTES} bytes`);
      parser.push(chunk);
      await onChunk();
    }
    parser.finish();
  } catch (error) {
    signal.throwIfAborted();
    if (!(error instanceof AenvError) || !error.code.startsWith("image_")) throw error;
    throw invalidArchive(errorChain(error).join(": "), error);
  }
  if (!parser.sawEnd) throw invalidArchive("it has no end mark: the upload was cut off");
}

/** Checks every member; resolves with the members in their order. */
export async function listArchive(
  file: string,
  limits: ArchiveLimits,
  signal: AbortSignal,
): Promise<{ readonly members: readonly ArchiveMember[]; readonly contentBytes: number }> {
  const members: ArchiveMember[] = [];
  let contentBytes = 0;
  const { maxNameBytes = 128 << 20 } = limits;
  let nameBytes = 0;
  await readArchive(
    file,
    {
      entry(entry) {
        const path = memberPath(entry.path);
        if (entry.type === "hardLink") memberPath(entry.linkTarget);
        if (members.length >= limits.maxEntries)
          throw invalidArchive(`it has more than ${limits.maxEntries} members`);
        nameBytes += entry.path.length;
        if (nameBytes > maxNameBytes)
          throw invalidArchive(`its members' names take more than ${maxNameBytes} bytes`);
        contentBytes += entry.type === "file" ? entry.sizeBytes : 0;
        if (contentBytes > limits.maxContentBytes)
          throw invalidArchive(`its content is larger than ${limits.maxContentBytes} bytes`);
        members.push({ path, type: entry.type });
      },
      data: () => undefined,
    },
    signal,
  );
  return { members, contentBytes };
}

const BZIP2 = Buffer.from("BZh");
const XZ = Buffer.from([0xfd, 0x37, 0x7a, 0x58, 0x5a]);

/**
 * Puts one file of the archive at `target`. True when that file is itself a tar that an ADD unpacks (plain, gzip,
 * zstd); error `unsupported_step` for the compressions docker knows and this server does not.
 */
export async function extractIfTar(
  archive: string,
  path: string,
  target: string,
  limits: ArchiveLimits,
  signal: AbortSignal,
): Promise<boolean> {
  const fd = openSync(target, "wx", 0o600);
  try {
    let wanted = false;
    const sink: TarSink = {
      entry(entry) {
        wanted = entry.type === "file" && memberPath(entry.path) === path;
        if (wanted) ftruncateSync(fd);
      },
      data(chunk) {
        for (let at = 0; wanted && at < chunk.length; ) at += writeSync(fd, chunk, at);
      },
    };
    await readArchive(archive, sink, signal);
  } finally {
    closeSync(fd);
  }
  const head = Buffer.from(await Bun.file(target).slice(0, 5).arrayBuffer());
  if (head.subarray(0, 3).equals(BZIP2) || head.equals(XZ)) {
    throw new AenvError({
      code: "unsupported_step",
      status: 400,
      message: `ADD would unpack ${showBytes(path)}, whose compression this server cannot read`,
      remediation: "use gzip or zstd, or COPY it and unpack it in a RUN step",
    });
  }
  try {
    await listArchive(target, limits, signal);
    return true;
  } catch (error) {
    if (error instanceof AenvError && error.code === "invalid_archive") return false;
    throw error;
  }
}

export type CopySource =
  | { readonly kind: "file"; readonly path: string }
  /** The content of a directory: members below `prefix`, which is itself the directory (empty: the context). */
  | { readonly kind: "directory"; readonly prefix: string };

const GLOB = /[*?[\]{}]|[!+@]\(/;

/**
 * What a source pattern of a COPY step means for an archive made of what the pattern matched. A plain name is a
 * file, or a directory whose content is meant. With a pattern the part before the first special component is
 * cut off and the rest of each path is kept below the target; one matched file alone is that file.
 */
export function selectSource(members: readonly ArchiveMember[], source: string): CopySource {
  const bytes = Buffer.from(source, "utf8").toString("latin1");
  const normal = posix.normalize(bytes).replace(/^\/+|\/+$/g, "");
  const plain = normal === "." ? "" : normal;
  const under = (prefix: string) => (path: string) => prefix === "" || path.startsWith(`${prefix}/`);
  const exact = members.findLast((member) => member.path === plain);
  if (plain !== "" && exact !== undefined && exact.type !== "directory") return { kind: "file", path: plain };
  if (exact !== undefined || members.some(({ path }) => under(plain)(path))) {
    return { kind: "directory", prefix: plain };
  }
  const parts = plain.split("/");
  const special = parts.findIndex((part) => GLOB.test(part));
  if (special >= 0) {
    const prefix = parts.slice(0, special).join("/");
    const matched = members.filter(({ path }) => path !== prefix && under(prefix)(path));
    const [only] = matched;
    if (matched.length === 1 && only!.type !== "directory") return { kind: "file", path: only!.path };
    if (matched.length > 0) return { kind: "directory", prefix };
  }
  const some = members
    .slice(0, 5)
    .map(({ path }) => showBytes(path))
    .join(", ");
  throw invalidArchive(`it does not hold ${source}${some === "" ? "" : `; it begins with ${some}`}`);
}
