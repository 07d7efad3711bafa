/**
 * Small OCI image tool for the image scripts:
 *
 *   oci-image.ts sources                 deb822 sources of this machine's Debian release
 *   oci-image.ts pack ROOTFS.tar DIR     an image layout with the tar as its one layer
 *   oci-image.ts push DIR REFERENCE      to a plain HTTP registry, REFERENCE = http://HOST:PORT/NAME:TAG
 *
 * Formats: OCI image-spec 1.1 (layout, manifest, config), distribution-spec 1.1 (push).
 */
import { createHash } from "node:crypto";
import { createReadStream, createWriteStream } from "node:fs";
import { mkdir, readdir, readFile, rename, rm, stat, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { Transform } from "node:stream";
import { pipeline } from "node:stream/promises";
import { createGzip } from "node:zlib";
import { hostReleaseSources } from "../src/setup/index.ts";

interface Descriptor {
  mediaType: string;
  digest: string;
  size: number;
  platform?: { architecture: string; os: string };
  annotations?: Record<string, string>;
}

const MANIFEST = "application/vnd.oci.image.manifest.v1+json";
const CONFIG = "application/vnd.oci.image.config.v1+json";
const LAYER = "application/vnd.oci.image.layer.v1.tar+gzip";

function hashing(): { readonly through: Transform; digest(): string } {
  const hash = createHash("sha256");
  const through = new Transform({
    transform(chunk: Buffer, _encoding, done) {
      hash.update(chunk);
      done(null, chunk);
    },
  });
  return { through, digest: () => `sha256:${hash.digest("hex")}` };
}

function blobPath(dir: string, digest: string): string {
  return join(dir, "blobs", ...digest.split(":"));
}

async function addBlob(dir: string, mediaType: string, value: unknown): Promise<Descriptor> {
  const bytes = Buffer.from(JSON.stringify(value));
  const digest = `sha256:${createHash("sha256").update(bytes).digest("hex")}`;
  await writeFile(blobPath(dir, digest), bytes);
  return { mediaType, digest, size: bytes.length };
}

async function pack(tar: string, dir: string): Promise<void> {
  const blobs = join(dir, "blobs", "sha256");
  await mkdir(blobs, { recursive: true });
  const plain = hashing();
  const packed = hashing();
  const temporary = join(blobs, ".layer.tmp");
  const gzip = createGzip({ level: 1, chunkSize: 1 << 20 });
  await pipeline(
    createReadStream(tar, { highWaterMark: 1 << 20 }),
    plain.through,
    gzip,
    packed.through,
    createWriteStream(temporary),
  );
  const layer: Descriptor = { mediaType: LAYER, digest: packed.digest(), size: (await stat(temporary)).size };
  await rename(temporary, blobPath(dir, layer.digest));
  const epoch = Number(process.env.SOURCE_DATE_EPOCH ?? 0) * 1000;
  const platform = { architecture: "amd64", os: "linux" };
  const config = await addBlob(dir, CONFIG, {
    ...platform,
    created: new Date(epoch).toISOString(),
    config: {
      Env: ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"],
      Cmd: ["bash"],
    },
    rootfs: { type: "layers", diff_ids: [plain.digest()] },
    history: [{ created: new Date(epoch).toISOString(), created_by: "mmdebstrap" }],
  });
  const manifest = await addBlob(dir, MANIFEST, {
    schemaVersion: 2,
    mediaType: MANIFEST,
    config,
    layers: [layer],
  });
  await writeFile(join(dir, "oci-layout"), JSON.stringify({ imageLayoutVersion: "1.0.0" }));
  const index = {
    schemaVersion: 2,
    mediaType: "application/vnd.oci.image.index.v1+json",
    manifests: [{ ...manifest, platform, annotations: { "org.opencontainers.image.ref.name": "latest" } }],
  };
  await writeFile(join(dir, "index.json.tmp"), JSON.stringify(index));
  await rename(join(dir, "index.json.tmp"), join(dir, "index.json"));
  const used = new Set(
    [layer, config, manifest].map((descriptor) => descriptor.digest.slice("sha256:".length)),
  );
  for (const name of await readdir(blobs)) if (!used.has(name)) await rm(join(blobs, name));
  console.log(
    `  image                  ${(layer.size / 1e6).toFixed(1)} MB layer, manifest ${manifest.digest}`,
  );
}

async function expectStatus(response: Response, wanted: number, what: string): Promise<Response> {
  if (response.status === wanted) return response;
  throw new Error(`${what}: registry answered ${response.status} ${(await response.text()).slice(0, 500)}`);
}

async function pushBlob(base: string, dir: string, blob: Descriptor): Promise<boolean> {
  const head = await fetch(`${base}/blobs/${blob.digest}`, { method: "HEAD" });
  if (head.ok) return false;
  const start = await expectStatus(
    await fetch(`${base}/blobs/uploads/`, { method: "POST" }),
    202,
    "starting an upload",
  );
  const location = new URL(start.headers.get("location") ?? "", `${base}/`);
  location.searchParams.set("digest", blob.digest);
  const body = Bun.file(blobPath(dir, blob.digest));
  const headers = { "content-type": "application/octet-stream" };
  await expectStatus(
    await fetch(location, { method: "PUT", body, headers }),
    201,
    `uploading ${blob.digest}`,
  );
  return true;
}

async function push(dir: string, reference: string): Promise<void> {
  const match = /^(http:\/\/[^/]+)\/([a-z0-9][a-z0-9._/-]*):([A-Za-z0-9_][A-Za-z0-9._-]*)$/.exec(reference);
  if (match === null) throw new Error(`${reference} is not http://HOST:PORT/NAME:TAG`);
  const base = `${match[1]}/v2/${match[2]}`;
  const index = JSON.parse(await readFile(join(dir, "index.json"), "utf8")) as { manifests: Descriptor[] };
  const top = index.manifests[0];
  if (top === undefined) throw new Error(`${dir}/index.json names no manifest`);
  const bytes = await readFile(blobPath(dir, top.digest));
  const manifest = JSON.parse(bytes.toString()) as { config: Descriptor; layers: Descriptor[] };
  let sent = 0;
  for (const blob of [...manifest.layers, manifest.config]) {
    if (await pushBlob(base, dir, blob)) sent += blob.size;
  }
  const put = await fetch(`${base}/manifests/${match[3]}`, {
    method: "PUT",
    body: bytes,
    headers: { "content-type": MANIFEST },
  });
  await expectStatus(put, 201, "putting the manifest");
  console.log(`  image                  pushed to ${reference} (${(sent / 1e6).toFixed(1)} MB sent)`);
}

const [command, ...args] = process.argv.slice(2);
try {
  if (command === "sources" && args.length === 0) process.stdout.write((await hostReleaseSources()).text);
  else if (command === "pack" && args.length === 2) await pack(args[0]!, args[1]!);
  else if (command === "push" && args.length === 2) await push(args[0]!, args[1]!);
  else {
    console.error("usage: oci-image.ts sources | pack ROOTFS.tar DIR | push DIR REFERENCE");
    process.exitCode = 2;
  }
} catch (error) {
  console.error(`error: ${error instanceof Error ? error.message : error}`);
  process.exitCode = 1;
}
