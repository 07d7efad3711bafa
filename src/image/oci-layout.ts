import { copyFile, readFile, stat } from "node:fs/promises";
import { join } from "node:path";
import { AenvError } from "../lib/errors.ts";
import { digestMismatch, diskFault, truncated } from "./faults.ts";
import { hashFile } from "./hash.ts";
import { type IndexEntry, parseManifest } from "./manifest.ts";
import { formatLayout, type LayoutReference } from "./reference.ts";
import { type FetchedManifest, type ImageSource, MAX_MANIFEST_BYTES, sha256Digest } from "./source.ts";

/**
 * Reads an OCI image layout directory (image-spec v1.1 "image-layout": `oci-layout`, `index.json`,
 * `blobs/<algorithm>/<hex>`). Blobs are copied before use, so that what was verified is what is converted.
 */
const REF_NAME = "org.opencontainers.image.ref.name";

function blobPath(layoutPath: string, digest: string): string {
  return join(layoutPath, "blobs", ...digest.split(":"));
}

function notFound(reference: string, reason: string, cause?: unknown): AenvError {
  return new AenvError({
    code: "image_not_found",
    status: 404,
    message: `${reference}: ${reason}`,
    ...(cause === undefined ? {} : { cause }),
  });
}

async function readBounded(reference: string, path: string): Promise<Uint8Array> {
  try {
    const { size } = await stat(path);
    if (size > MAX_MANIFEST_BYTES) {
      throw new AenvError({
        code: "image_unsupported",
        status: 400,
        message: `${reference}: ${path} is larger than ${MAX_MANIFEST_BYTES} bytes`,
      });
    }
    return await readFile(path);
  } catch (error) {
    if (error instanceof AenvError) throw error;
    throw notFound(reference, `cannot read ${path}`, error);
  }
}

function pick(reference: string, layout: LayoutReference, entries: readonly IndexEntry[]): IndexEntry {
  const name = (entry: IndexEntry) => entry.annotations?.[REF_NAME];
  const wanted = layout.tag ?? (entries.length === 1 ? undefined : "latest");
  const found = wanted === undefined ? entries[0] : entries.find((entry) => name(entry) === wanted);
  if (found !== undefined) return found;
  const names = entries.map((entry) => name(entry) ?? entry.digest).join(", ");
  throw notFound(
    reference,
    `the layout has no image ${wanted ?? ""}; it has: ${names === "" ? "none" : names}`,
  );
}

/** The image source for one layout reference. The directory's layout marker is checked on first use. */
export function createLayoutSource(layout: LayoutReference): ImageSource {
  const reference = formatLayout(layout);

  async function manifestByDigest(digest: string): Promise<FetchedManifest> {
    const bytes = await readBounded(reference, blobPath(layout.layoutPath, digest));
    const found = sha256Digest(bytes);
    if (found !== digest) throw digestMismatch(reference, `manifest ${digest}`, digest, found);
    return { bytes, digest };
  }

  return {
    reference,
    wanted: layout.digest,
    async manifest(wanted) {
      if (wanted !== undefined) return manifestByDigest(wanted);
      await readBounded(reference, join(layout.layoutPath, "oci-layout"));
      const bytes = await readBounded(reference, join(layout.layoutPath, "index.json"));
      const parsed = parseManifest(reference, bytes, undefined);
      if (!("index" in parsed)) throw notFound(reference, "index.json is not an image index");
      return manifestByDigest(pick(reference, layout, parsed.index.manifests).digest);
    },
    async blob(descriptor, target, signal, onProgress) {
      signal.throwIfAborted();
      const source = blobPath(layout.layoutPath, descriptor.digest);
      const info = await stat(source).catch((error: unknown) => {
        throw notFound(reference, `blob ${descriptor.digest} is missing`, error);
      });
      if (info.size !== descriptor.size) {
        throw truncated(reference, `blob ${descriptor.digest}`, info.size, descriptor.size);
      }
      await copyFile(source, target).catch((error: unknown) => {
        throw diskFault(error, `copying ${descriptor.digest}`);
      });
      const found = await hashFile(target, signal, onProgress);
      if (found !== descriptor.digest)
        throw digestMismatch(reference, `blob ${descriptor.digest}`, descriptor.digest, found);
    },
  };
}
