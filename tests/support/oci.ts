import { mkdir, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { gzipSync, zstdCompressSync } from "node:zlib";

/** Builds small OCI images for tests: tar layers from entry lists, manifests, indexes; pushes and layouts. */
export interface TarInput {
  /** Text (UTF-8) or bytes. */
  readonly path: string | Uint8Array;
  readonly type?: "file" | "directory" | "symlink" | "hardLink" | "character" | "block" | "fifo";
  readonly content?: string | Uint8Array;
  readonly link?: string | Uint8Array;
  readonly mode?: number;
  readonly uid?: number;
  readonly gid?: number;
  /** Seconds, may have a fraction or be negative. */
  readonly mtime?: number;
  readonly major?: number;
  readonly minor?: number;
  readonly xattrs?: Readonly<Record<string, string | Uint8Array>>;
  /** How long names and big numbers are written. Default pax. */
  readonly dialect?: "pax" | "gnu";
}

export interface BlobDescriptor {
  readonly mediaType: string;
  readonly digest: string;
  readonly size: number;
  readonly annotations?: Readonly<Record<string, string>>;
  readonly platform?: { readonly os: string; readonly architecture: string; readonly variant?: string };
}

export interface BuiltImage {
  readonly descriptor: BlobDescriptor;
  readonly layers: readonly BlobDescriptor[];
  /** Every blob, manifests included, by digest. */
  readonly blobs: ReadonlyMap<string, Uint8Array>;
}

const TYPE_FLAGS = {
  file: "0",
  hardLink: "1",
  symlink: "2",
  character: "3",
  block: "4",
  directory: "5",
  fifo: "6",
} as const;

export const OCI_TYPES = {
  index: "application/vnd.oci.image.index.v1+json",
  manifest: "application/vnd.oci.image.manifest.v1+json",
  config: "application/vnd.oci.image.config.v1+json",
  layer: "application/vnd.oci.image.layer.v1.tar",
} as const;

export function sha256(bytes: Uint8Array): string {
  return `sha256:${new Bun.CryptoHasher("sha256").update(bytes).digest("hex")}`;
}

export function hostArchitecture(): string {
  return process.arch === "x64" ? "amd64" : process.arch;
}

function toBytes(value: string | Uint8Array): Buffer {
  return typeof value === "string" ? Buffer.from(value, "utf8") : Buffer.from(value);
}

function padded(content: Uint8Array): Buffer {
  return Buffer.concat([content, Buffer.alloc((512 - (content.length % 512)) % 512)]);
}

function octal(block: Buffer, offset: number, length: number, value: number): void {
  const text = value.toString(8);
  if (value < 0 || text.length > length - 1) {
    // GNU base 256.
    let rest = BigInt.asUintN(length * 8, BigInt(value));
    for (let index = length - 1; index >= 0; index--) {
      block[offset + index] = Number(rest & 0xffn);
      rest >>= 8n;
    }
    block[offset] = (block[offset]! & 0x7f) | 0x80 | (value < 0 ? 0x40 : 0);
    return;
  }
  block.write(`${text.padStart(length - 1, "0")}\0`, offset, "latin1");
}

export interface RawHeader {
  readonly name: Uint8Array;
  readonly typeFlag: string;
  readonly size: number;
  readonly link?: Uint8Array;
  readonly mode?: number;
  readonly uid?: number;
  readonly gid?: number;
  readonly mtime?: number;
  readonly major?: number;
  readonly minor?: number;
  readonly gnu?: boolean;
  /** Changes the block before the checksum is taken. */
  readonly patch?: (block: Buffer) => void;
}

/** One 512-byte tar header with a right checksum. Names beyond 100 bytes are cut. */
export function tarHeader(header: RawHeader): Buffer {
  const block = Buffer.alloc(512);
  block.set(header.name.subarray(0, 100), 0);
  octal(block, 100, 8, header.mode ?? 0o644);
  octal(block, 108, 8, header.uid ?? 0);
  octal(block, 116, 8, header.gid ?? 0);
  octal(block, 124, 12, header.size);
  octal(block, 136, 12, header.mtime ?? 0);
  block.write(header.typeFlag, 156, "latin1");
  block.set((header.link ?? new Uint8Array(0)).subarray(0, 100), 157);
  block.write(header.gnu ? "ustar  \0" : "ustar\x0000", 257, "latin1");
  octal(block, 329, 8, header.major ?? 0);
  octal(block, 337, 8, header.minor ?? 0);
  header.patch?.(block);
  block.write("        ", 148, "latin1");
  const sum = block.reduce((total, byte) => total + byte, 0);
  block.write(`${sum.toString(8).padStart(6, "0")}\0 `, 148, "latin1");
  return block;
}

export function paxRecord(key: string, value: Uint8Array): Buffer {
  const rest = Buffer.concat([Buffer.from(` ${key}=`, "latin1"), value, Buffer.from("\n")]);
  let length = rest.length + 1;
  while (String(length).length + rest.length !== length) length = String(length).length + rest.length;
  return Buffer.concat([Buffer.from(String(length)), rest]);
}

export function paxHeader(records: readonly (readonly [string, string | Uint8Array])[]): Buffer {
  const body = Buffer.concat(records.map(([key, value]) => paxRecord(key, toBytes(value))));
  return Buffer.concat([
    tarHeader({ name: Buffer.from("PaxHeader"), typeFlag: "x", size: body.length }),
    padded(body),
  ]);
}

function gnuLong(typeFlag: "L" | "K", value: Buffer): Buffer {
  const body = Buffer.concat([value, Buffer.alloc(1)]);
  const name = Buffer.from("././@LongLink");
  return Buffer.concat([tarHeader({ name, typeFlag, size: body.length, gnu: true }), padded(body)]);
}

function tarEntry(input: TarInput): Buffer {
  const type = input.type ?? "file";
  const content = type === "file" ? toBytes(input.content ?? "") : Buffer.alloc(0);
  const name = toBytes(input.path);
  const link = toBytes(input.link ?? "");
  const gnu = input.dialect === "gnu";
  const mtime = input.mtime ?? 1_700_000_000;
  const pieces: Buffer[] = [];
  const records: [string, string | Uint8Array][] = [];
  if (gnu) {
    if (name.length > 100) pieces.push(gnuLong("L", name));
    if (link.length > 100) pieces.push(gnuLong("K", link));
  } else {
    if (name.length > 100 || name.some((byte) => byte > 127)) records.push(["path", name]);
    if (link.length > 100) records.push(["linkpath", link]);
    if ((input.uid ?? 0) > 0o7777777) records.push(["uid", String(input.uid)]);
    if ((input.gid ?? 0) > 0o7777777) records.push(["gid", String(input.gid)]);
    if (!Number.isInteger(mtime) || mtime < 0) records.push(["mtime", String(mtime)]);
  }
  for (const [key, value] of Object.entries(input.xattrs ?? {}))
    records.push([`SCHILY.xattr.${key}`, toBytes(value)]);
  if (records.length > 0) pieces.push(paxHeader(records));
  const small = (id: number | undefined) => (gnu || (id ?? 0) <= 0o7777777 ? (id ?? 0) : 0);
  pieces.push(
    tarHeader({
      name,
      typeFlag: TYPE_FLAGS[type],
      size: content.length,
      link,
      mode: input.mode ?? (type === "directory" ? 0o755 : 0o644),
      uid: small(input.uid),
      gid: small(input.gid),
      mtime: gnu ? Math.floor(mtime) : Math.max(0, Math.floor(mtime)),
      major: input.major ?? 0,
      minor: input.minor ?? 0,
      gnu,
    }),
    padded(content),
  );
  return Buffer.concat(pieces);
}

/** A whole tar archive. */
export function makeTar(entries: readonly TarInput[]): Buffer {
  return Buffer.concat([...entries.map(tarEntry), Buffer.alloc(1024)]);
}

export type Compression = "none" | "gzip" | "gzip-members" | "zstd" | "zstd-frames" | "zstd-chunked";

export function compress(tar: Uint8Array, compression: Compression): Uint8Array {
  const half = Math.floor(tar.length / 2);
  const parts = [tar.subarray(0, half), tar.subarray(half)];
  switch (compression) {
    case "none":
      return tar;
    case "gzip":
      return gzipSync(tar, { level: 1 });
    case "gzip-members":
      return Buffer.concat(parts.map((part) => gzipSync(part, { level: 1 })));
    case "zstd":
      return zstdCompressSync(tar);
    case "zstd-frames":
      return Buffer.concat(parts.map((part) => zstdCompressSync(part)));
    case "zstd-chunked":
      // Frames that a decoder skips, as zstd:chunked has them for its table of contents.
      return Buffer.concat([
        ...parts.flatMap((part, i) => [skippable(i, Buffer.from("between")), zstdCompressSync(part)]),
        skippable(15, Buffer.alloc(70_000, "table of contents")),
      ]);
  }
}

/** A skippable frame (RFC 8878, 3.1.2): magic number 0x184D2A50 to …5F, length, any bytes. */
function skippable(kind: number, content: Uint8Array): Buffer {
  const head = Buffer.alloc(8);
  head.writeUInt32LE(0x184d2a50 + kind, 0);
  head.writeUInt32LE(content.length, 4);
  return Buffer.concat([head, content]);
}

export interface LayerInput {
  readonly entries?: readonly TarInput[];
  /** Instead of entries: the tar's bytes. */
  readonly tar?: Uint8Array;
  readonly compression?: Compression;
  readonly mediaType?: string;
  readonly annotations?: Readonly<Record<string, string>>;
  /** Put into the config instead of the true diff id. */
  readonly diffId?: string;
}

export interface ImageInput {
  readonly layers: readonly LayerInput[];
  /** The `config` object of the image config; null is written as null. */
  readonly config?: Readonly<Record<string, unknown>> | null;
  readonly architecture?: string;
  readonly os?: string;
}

const LAYER_SUFFIX: Readonly<Record<Compression, string>> = {
  none: "",
  gzip: "+gzip",
  "gzip-members": "+gzip",
  zstd: "+zstd",
  "zstd-frames": "+zstd",
  "zstd-chunked": "+zstd",
};

export function jsonBlob(value: unknown): Buffer {
  return Buffer.from(JSON.stringify(value));
}

export function buildImage(input: ImageInput): BuiltImage {
  const blobs = new Map<string, Uint8Array>();
  const add = (mediaType: string, bytes: Uint8Array): BlobDescriptor => {
    const digest = sha256(bytes);
    blobs.set(digest, bytes);
    return { mediaType, digest, size: bytes.length };
  };
  const diffIds: string[] = [];
  const layers = input.layers.map((layer) => {
    const tar = layer.tar ?? makeTar(layer.entries ?? []);
    const compression = layer.compression ?? "gzip";
    diffIds.push(layer.diffId ?? sha256(tar));
    const mediaType = layer.mediaType ?? `${OCI_TYPES.layer}${LAYER_SUFFIX[compression]}`;
    const descriptor = add(mediaType, compress(tar, compression));
    return layer.annotations === undefined ? descriptor : { ...descriptor, annotations: layer.annotations };
  });
  const architecture = input.architecture ?? hostArchitecture();
  const os = input.os ?? "linux";
  const config = add(
    OCI_TYPES.config,
    jsonBlob({
      architecture,
      os,
      config: input.config === undefined ? {} : input.config,
      rootfs: { type: "layers", diff_ids: diffIds },
    }),
  );
  const manifest = add(
    OCI_TYPES.manifest,
    jsonBlob({ schemaVersion: 2, mediaType: OCI_TYPES.manifest, config, layers }),
  );
  return { descriptor: { ...manifest, platform: { os, architecture } }, layers, blobs };
}

/** An index over images (or further indexes); `descriptors` may be changed entries of those. */
export function buildIndex(
  children: readonly BuiltImage[],
  descriptors?: readonly BlobDescriptor[],
): BuiltImage {
  const blobs = new Map<string, Uint8Array>(children.flatMap((child) => [...child.blobs]));
  const manifests = descriptors ?? children.map((child) => child.descriptor);
  const bytes = jsonBlob({ schemaVersion: 2, mediaType: OCI_TYPES.index, manifests });
  const digest = sha256(bytes);
  blobs.set(digest, bytes);
  return { descriptor: { mediaType: OCI_TYPES.index, digest, size: bytes.length }, layers: [], blobs };
}

async function expectOk(response: Response, what: string): Promise<Response> {
  if (!response.ok) throw new Error(`${what}: HTTP ${response.status} ${await response.text()}`);
  return response;
}

function isManifest(bytes: Uint8Array): { mediaType: string } | undefined {
  if (bytes[0] !== 0x7b) return undefined;
  const parsed: unknown = JSON.parse(Buffer.from(bytes).toString("utf8"));
  if (typeof parsed !== "object" || parsed === null || !("schemaVersion" in parsed)) return undefined;
  return "mediaType" in parsed ? { mediaType: String(parsed.mediaType) } : undefined;
}

/** Pushes an image or index under a tag. `url` is the registry's, `headers` may carry a login. */
export async function pushImage(
  url: string,
  repository: string,
  tag: string,
  image: BuiltImage,
  headers: Readonly<Record<string, string>> = {},
): Promise<void> {
  const base = `${url}/v2/${repository}`;
  const manifests: { digest: string; bytes: Uint8Array; mediaType: string }[] = [];
  for (const [digest, bytes] of image.blobs) {
    const manifest = isManifest(bytes);
    if (manifest !== undefined) {
      manifests.push({ digest, bytes, mediaType: manifest.mediaType });
      continue;
    }
    const started = await expectOk(
      await fetch(`${base}/blobs/uploads/`, { method: "POST", headers }),
      "upload",
    );
    const location = new URL(started.headers.get("location") ?? "", url);
    location.searchParams.set("digest", digest);
    const put = {
      method: "PUT",
      body: Buffer.from(bytes),
      headers: { ...headers, "content-type": "application/octet-stream" },
    };
    await expectOk(await fetch(location, put), `blob ${digest}`);
  }
  // Children before parents: blobs are in the order they were made.
  for (const { digest, bytes, mediaType } of manifests) {
    const name = digest === image.descriptor.digest ? tag : digest;
    const put = {
      method: "PUT",
      body: Buffer.from(bytes),
      headers: { ...headers, "content-type": mediaType },
    };
    await expectOk(await fetch(`${base}/manifests/${name}`, put), `manifest ${name}`);
  }
}

/** Writes an OCI image layout with the images under their tags. */
export async function writeLayout(
  directory: string,
  images: Readonly<Record<string, BuiltImage>>,
): Promise<void> {
  await mkdir(join(directory, "blobs", "sha256"), { recursive: true });
  await writeFile(join(directory, "oci-layout"), '{"imageLayoutVersion":"1.0.0"}');
  const manifests = Object.entries(images).map(([tag, image]) => ({
    ...image.descriptor,
    annotations: { "org.opencontainers.image.ref.name": tag },
  }));
  await writeFile(
    join(directory, "index.json"),
    JSON.stringify({ schemaVersion: 2, mediaType: OCI_TYPES.index, manifests }),
  );
  for (const image of Object.values(images)) {
    for (const [digest, bytes] of image.blobs) {
      await writeFile(join(directory, "blobs", "sha256", digest.slice("sha256:".length)), bytes);
    }
  }
}
