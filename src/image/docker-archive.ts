import { createReadStream, createWriteStream } from "node:fs";
import { stat } from "node:fs/promises";
import { posix } from "node:path";
import { pipeline } from "node:stream/promises";
import { z } from "zod";
import { AenvError } from "../lib/errors.ts";
import { detectCompression } from "./decompress.ts";
import { digestMismatch, diskFault } from "./faults.ts";
import { hashFile } from "./hash.ts";
import { MEDIA_TYPES } from "./manifest.ts";
import { type ArchiveReference, formatArchive } from "./reference.ts";
import { type FetchedManifest, type ImageSource, MAX_MANIFEST_BYTES, sha256Digest } from "./source.ts";
import { showBytes, type TarEntry, TarParser } from "./tar.ts";

/**
 * Reads what `docker save` and `skopeo copy … docker-archive:` write: a tar with `manifest.json`, which names the
 * config and the layers by member. Layers have no digests there, so they are hashed once, and a manifest is made
 * from that; it is the same for the same archive. Format: moby's "Docker Image Specification v1.2", combined
 * image JSON + filesystem changeset format.
 */
const ManifestFile = z.array(
  z.object({
    Config: z.string(),
    RepoTags: z.array(z.string()).nullish(),
    Layers: z.array(z.string()),
  }),
);

const CONFIG_TYPE = "application/vnd.docker.container.image.v1+json";
const LAYER_TYPE = "application/vnd.docker.image.rootfs.diff.tar";
const BLOCK = 512;
const CHUNK_BYTES = 1 << 20;

interface Member {
  readonly offsetBytes: number;
  readonly sizeBytes: number;
}

interface Opened {
  readonly manifest: FetchedManifest;
  /** Where the bytes of each digest lie in the archive. */
  readonly blobs: ReadonlyMap<string, Member>;
}

function notFound(reference: string, reason: string, cause?: unknown): AenvError {
  return new AenvError({
    code: "image_not_found",
    status: 404,
    message: `${reference}: ${reason}`,
    ...(cause === undefined ? {} : { cause }),
  });
}

function unsupported(reference: string, reason: string, remediation?: string): AenvError {
  return new AenvError({
    code: "image_unsupported",
    status: 400,
    message: `${reference}: ${reason}`,
    ...(remediation === undefined ? {} : { remediation }),
  });
}

function memberName(path: string): string {
  return posix.normalize(path).replace(/^\.?\/+/, "");
}

/** Every member's place; links are followed within the archive, as old versions made them between layers. */
async function readMembers(
  reference: string,
  path: string,
  signal: AbortSignal,
): Promise<Map<string, Member>> {
  const head = new Uint8Array(await Bun.file(path).slice(0, 4).arrayBuffer());
  if (detectCompression(head) !== "none")
    throw unsupported(reference, "the archive is compressed", "unpack it first, e.g. with gunzip");
  const members = new Map<string, Member>();
  const links = new Map<string, string>();
  const parser: TarParser = new TarParser({
    entry(entry: TarEntry) {
      const name = memberName(entry.path);
      // Called with the header's last byte: the content begins at the next block.
      const offsetBytes = (Math.floor(parser.offsetBytes / BLOCK) + 1) * BLOCK;
      if (entry.type === "file" && entry.segments === undefined)
        members.set(name, { offsetBytes, sizeBytes: entry.sizeBytes });
      else if (entry.type === "symlink")
        links.set(name, memberName(posix.join(posix.dirname(name), entry.linkTarget)));
      else if (entry.type === "hardLink") links.set(name, memberName(entry.linkTarget));
    },
    data: () => undefined,
  });
  for await (const chunk of createReadStream(path, { highWaterMark: CHUNK_BYTES, signal }))
    parser.push(chunk as Buffer);
  parser.finish();
  for (const [name, first] of links) {
    let target: string | undefined = first;
    for (let hops = 0; hops < 16 && target !== undefined && !members.has(target); hops++)
      target = links.get(target);
    const member = target === undefined ? undefined : members.get(target);
    if (member !== undefined) members.set(name, member);
  }
  return members;
}

async function readMember(
  reference: string,
  path: string,
  name: string,
  member: Member,
): Promise<Uint8Array> {
  if (member.sizeBytes > MAX_MANIFEST_BYTES)
    throw unsupported(reference, `${name} is larger than ${MAX_MANIFEST_BYTES} bytes`);
  const { offsetBytes, sizeBytes } = member;
  return new Uint8Array(
    await Bun.file(path)
      .slice(offsetBytes, offsetBytes + sizeBytes)
      .arrayBuffer(),
  );
}

async function hashMember(
  path: string,
  { offsetBytes, sizeBytes }: Member,
  signal: AbortSignal,
): Promise<string> {
  const hasher = new Bun.CryptoHasher("sha256");
  if (sizeBytes > 0) {
    const range = {
      start: offsetBytes,
      end: offsetBytes + sizeBytes - 1,
      highWaterMark: CHUNK_BYTES,
      signal,
    };
    for await (const chunk of createReadStream(path, range)) hasher.update(chunk as Buffer);
  }
  return `sha256:${hasher.digest("hex")}`;
}

/** `name` and `docker.io/library/name:latest` are one image; writers of archives differ in how much they write. */
function canonical(tag: string): string {
  const short = tag.replace(/^(?:index\.)?docker\.io\//, "").replace(/^library\//, "");
  return short.lastIndexOf(":") > short.lastIndexOf("/") ? short : `${short}:latest`;
}

function pick(reference: string, archive: ArchiveReference, entries: z.infer<typeof ManifestFile>) {
  const tags = (entry: (typeof entries)[number]) => entry.RepoTags ?? [];
  if (archive.image === undefined) {
    if (entries.length === 1) return entries[0]!;
    const all = entries.flatMap(tags).join(", ");
    throw notFound(reference, `the archive has ${entries.length} images: name one of ${all}`);
  }
  const wanted = canonical(archive.image);
  const found = entries.find((entry) => tags(entry).some((tag) => canonical(tag) === wanted));
  if (found !== undefined) return found;
  throw notFound(
    reference,
    `the archive has no image ${archive.image}; it has: ${entries.flatMap(tags).join(", ") || "none"}`,
  );
}

async function open(reference: string, archive: ArchiveReference, signal: AbortSignal): Promise<Opened> {
  const path = archive.archivePath;
  await stat(path).catch((error: unknown) => {
    throw notFound(reference, `cannot read ${path}`, error);
  });
  const members = await readMembers(reference, path, signal);
  const member = (name: string): Member => {
    const found = members.get(memberName(name));
    if (found === undefined) throw notFound(reference, `the archive has no member ${showBytes(name)}`);
    return found;
  };
  const text = await readMember(reference, path, "manifest.json", member("manifest.json"));
  let entries: z.infer<typeof ManifestFile>;
  try {
    entries = ManifestFile.parse(JSON.parse(new TextDecoder().decode(text)));
  } catch (cause) {
    throw new AenvError({
      code: "image_unsupported",
      status: 400,
      message: `${reference}: its manifest.json is not that of a docker archive`,
      cause,
    });
  }
  const entry = pick(reference, archive, entries);
  const blobs = new Map<string, Member>();
  const descriptor = async (name: string, mediaType: string) => {
    const found = member(name);
    const digest = await hashMember(path, found, signal);
    blobs.set(digest, found);
    return { mediaType, digest, size: found.sizeBytes };
  };
  const config = await descriptor(entry.Config, CONFIG_TYPE);
  const layers = [];
  for (const name of entry.Layers) layers.push(await descriptor(name, LAYER_TYPE));
  const bytes = Buffer.from(
    JSON.stringify({ schemaVersion: 2, mediaType: MEDIA_TYPES.dockerManifest, config, layers }),
  );
  return {
    manifest: { bytes, digest: sha256Digest(bytes), contentType: MEDIA_TYPES.dockerManifest },
    blobs,
  };
}

/** The image source for one archive. It is read when the manifest is first asked for. */
export function createArchiveSource(archive: ArchiveReference): ImageSource {
  const reference = formatArchive(archive);
  let opened: Opened | undefined;
  const opening = async (signal: AbortSignal): Promise<Opened> => {
    opened ??= await open(reference, archive, signal);
    return opened;
  };
  return {
    reference,
    wanted: archive.digest,
    async manifest(wanted, signal) {
      const { manifest } = await opening(signal);
      if (wanted === undefined || wanted === manifest.digest) return manifest;
      throw notFound(reference, `the archive's image is now ${manifest.digest}, not ${wanted}`);
    },
    async blob({ digest, size }, target, signal, onProgress) {
      const member = (await opening(signal)).blobs.get(digest);
      if (member === undefined) throw notFound(reference, `blob ${digest} is missing`);
      const end = member.offsetBytes + member.sizeBytes - 1;
      try {
        if (size === 0) await Bun.write(target, new Uint8Array(0));
        else
          await pipeline(
            createReadStream(archive.archivePath, {
              start: member.offsetBytes,
              end,
              highWaterMark: CHUNK_BYTES,
            }),
            createWriteStream(target, { flags: "wx" }),
            { signal },
          );
      } catch (error) {
        signal.throwIfAborted();
        throw diskFault(error, `copying ${digest}`);
      }
      // Again: the archive may have been replaced since it was hashed.
      const found = await hashFile(target, signal, onProgress);
      if (found !== digest) throw digestMismatch(reference, `blob ${digest}`, digest, found);
    },
  };
}
