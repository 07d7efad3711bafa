import { randomUUID } from "node:crypto";
import { mkdirSync, readdirSync, rmSync, type Stats } from "node:fs";
import { link, mkdir, readdir, readFile, rename, rm, stat, utimes } from "node:fs/promises";
import { dirname, join } from "node:path";
import { z } from "zod";
import { syncPath, writeDurable } from "../lib/durable.ts";
import type { Logger } from "../lib/log.ts";
import type { LayerRef } from "../storage/overlaybd/types.ts";
import { diskFault } from "./faults.ts";
import type { CachedCommit, CachedImageUse } from "./gc.ts";
import { hashFile } from "./hash.ts";
import type { ImageRuntimeConfig } from "./types.ts";

/**
 * The image cache on disk:
 *
 *   commits/sha256-<hex>/overlaybd.commit            a layer, named by its own digest
 *   indexes/sha256-<layer hex>/sha256-<context>.json which commit a source layer became, in which context
 *   configs/sha256-<manifest hex>-image.json         the lowers of an image (an overlaybd image config)
 *   configs/sha256-<manifest hex>-image.meta.json    its runtime config and how it was made
 *   staging/                                         work in progress, emptied at start
 *
 * Everything outside staging is whole and durable before it gets its name. A commit whose size is not the
 * recorded one, or whose bytes are not those of its digest when a process first uses it, is not served and is
 * made again. The time of an image's record is that of its last use.
 */
const FRACTION = 2 ** 30;
/** As the umask has it: what is in images is no secret. */
const RECORD_MODE = 0o666;

const IndexRecord = z.object({
  schema: z.literal(1),
  sourceKind: z.literal("oci-layer"),
  sourceDigest: z.string(),
  commitDigest: z.string(),
  size: z.int().min(0),
  converter: z.string(),
  virtualSizeGib: z.number(),
  mkfs: z.boolean(),
  parentCommitDigest: z.string().optional(),
});

const ImageRecord = z.object({
  lowers: z.array(
    z.object({ file: z.string(), digest: z.string(), size: z.int().min(0), uuid: z.string().optional() }),
  ),
  virtualSizeBytes: z.int().min(1),
});

const MetaRecord = z.object({
  schema: z.literal(2),
  reference: z.string(),
  manifestDigest: z.string(),
  converter: z.string(),
  /** Digests of the image's layers as in its manifest. */
  layers: z.array(z.string()),
  config: z.object({
    env: z.record(z.string(), z.string()),
    workingDir: z.string().optional(),
    user: z.string().optional(),
    entrypoint: z.array(z.string()).optional(),
    cmd: z.array(z.string()).optional(),
    exposedPorts: z.array(z.string()),
    volumes: z.array(z.string()),
    labels: z.record(z.string(), z.string()),
    healthcheck: z.array(z.string()).optional(),
    shell: z.array(z.string()).optional(),
    onBuild: z.array(z.string()).optional(),
  }),
});

/** What besides its bytes decides what a layer becomes. */
export interface ConversionContext {
  readonly sourceDigest: string;
  readonly converter: string;
  readonly virtualSizeBytes: number;
  readonly mkfs: boolean;
  readonly parentCommitDigest?: string;
}

/** A layer of the cache: everything about it is known. */
export interface CachedLayer extends LayerRef {
  readonly digest: string;
  readonly size: number;
}

export interface CachedImage {
  readonly lowers: readonly CachedLayer[];
  readonly virtualSizeBytes: number;
  readonly config: ImageRuntimeConfig;
}

export interface ImageRecordInput extends CachedImage {
  readonly reference: string;
  readonly manifestDigest: string;
  readonly converter: string;
  readonly layerDigests: readonly string[];
}

function slug(digest: string): string {
  return digest.replace(":", "-");
}

/** A record of the cache. Error `disk_full` 507. */
async function writeRecord(path: string, content: string): Promise<void> {
  try {
    await mkdir(dirname(path), { recursive: true });
    await writeDurable(path, content, RECORD_MODE);
  } catch (error) {
    throw diskFault(error, `writing ${path}`);
  }
}

async function readRecord<Schema extends z.ZodType>(
  path: string,
  schema: Schema,
  log: Logger,
): Promise<z.output<Schema> | undefined> {
  let text: string;
  try {
    text = await readFile(path, "utf8");
  } catch (error) {
    if (error instanceof Error && "code" in error && error.code === "ENOENT") return undefined;
    throw error;
  }
  try {
    return schema.parse(JSON.parse(text));
  } catch (error) {
    // A record is only a memory of work that can be done again.
    log.warn({ path, err: error }, "image cache record not valid, ignored");
    return undefined;
  }
}

/** Changes when the file is written to or replaced. */
function identityOf(info: Stats): string {
  return `${info.ino} ${info.mtimeMs} ${info.size}`;
}

async function sizeOf(path: string): Promise<number | undefined> {
  return (await infoOf(path))?.size;
}

async function infoOf(path: string): Promise<Stats | undefined> {
  try {
    const info = await stat(path);
    return info.isFile() ? info : undefined;
  } catch (error) {
    if (error instanceof Error && "code" in error && (error.code === "ENOENT" || error.code === "ENOTDIR"))
      return undefined;
    throw error;
  }
}

export class ImageCache {
  readonly #root: string;
  readonly #log: Logger;
  /** Commits whose bytes this process has checked, as they were then. */
  readonly #checked = new Map<string, string>();

  /** Makes the directories and empties staging: what a killed process left there is of no use. */
  constructor(root: string, log: Logger) {
    this.#root = root;
    this.#log = log;
    for (const name of ["commits", "indexes", "configs", "staging"])
      mkdirSync(join(root, name), { recursive: true });
    for (const name of readdirSync(join(root, "staging"))) {
      rmSync(join(root, "staging", name), { recursive: true, force: true });
    }
  }

  /** A new, empty directory below staging; removed with all it holds on disposal. */
  async stage(): Promise<AsyncDisposable & { readonly path: string }> {
    const path = join(this.#root, "staging", randomUUID());
    await mkdir(path).catch((error: unknown) => {
      throw diskFault(error, "preparing the image cache");
    });
    return { path, [Symbol.asyncDispose]: () => rm(path, { recursive: true, force: true }) };
  }

  commitPath(digest: string): string {
    return join(this.#root, "commits", slug(digest), "overlaybd.commit");
  }

  /** Identifies a conversion; also the name of its index record. */
  contextKey(context: ConversionContext): string {
    const canonical = JSON.stringify([
      context.sourceDigest,
      context.converter,
      context.virtualSizeBytes,
      context.mkfs,
      context.parentCommitDigest ?? null,
    ]);
    return `sha256-${new Bun.CryptoHasher("sha256").update(canonical).digest("hex")}`;
  }

  #indexPath(context: ConversionContext): string {
    return join(this.#root, "indexes", slug(context.sourceDigest), `${this.contextKey(context)}.json`);
  }

  /** The commit of that digest, unless it is missing or damaged. */
  async findCommit(digest: string, size: number): Promise<CachedLayer | undefined> {
    const file = this.commitPath(digest);
    const found = await infoOf(file);
    if (found === undefined) return undefined;
    if (found.size !== size) {
      this.#log.warn(
        { file, found: found.size, size },
        "cached image layer has the wrong size, it is made again",
      );
      return undefined;
    }
    const identity = identityOf(found);
    if (this.#checked.get(digest) !== identity) {
      const actual = await hashFile(file, new AbortController().signal);
      if (actual !== digest) {
        this.#log.warn({ file, actual }, "cached image layer is damaged, it is made again");
        // Away with it: what is made again must not meet it.
        await rm(dirname(file), { recursive: true, force: true });
        return undefined;
      }
      this.#checked.set(digest, identity);
    }
    return { file, digest, size };
  }

  async findLayer(context: ConversionContext): Promise<CachedLayer | undefined> {
    const record = await readRecord(this.#indexPath(context), IndexRecord, this.#log);
    return record === undefined ? undefined : this.findCommit(record.commitDigest, record.size);
  }

  /** Moves a staged file to its content's name. An equal commit that is there stays. */
  async publishCommit(staged: string, digest: string, size: number): Promise<CachedLayer> {
    const file = this.commitPath(digest);
    const directory = dirname(file);
    let ours = false;
    try {
      await syncPath(staged);
      await mkdir(directory, { recursive: true });
      try {
        await link(staged, file);
        await rm(staged);
        // Its bytes were hashed just now, for its name.
        ours = true;
      } catch (error) {
        if (!(error instanceof Error && "code" in error && error.code === "EEXIST")) throw error;
        if ((await sizeOf(file)) === size) {
          await rm(staged);
        } else {
          this.#log.warn({ file, size }, "replacing a damaged image layer");
          await rename(staged, file);
          ours = true;
        }
      }
      await syncPath(directory);
      await syncPath(dirname(directory));
    } catch (error) {
      throw diskFault(error, "publishing an image layer");
    }
    const published = await infoOf(file);
    if (ours && published !== undefined) this.#checked.set(digest, identityOf(published));
    return { file, digest, size };
  }

  async recordLayer(context: ConversionContext, layer: CachedLayer): Promise<void> {
    const record: z.infer<typeof IndexRecord> = {
      schema: 1,
      sourceKind: "oci-layer",
      sourceDigest: context.sourceDigest,
      commitDigest: layer.digest,
      size: layer.size,
      converter: context.converter,
      virtualSizeGib: context.virtualSizeBytes / FRACTION,
      mkfs: context.mkfs,
      ...(context.parentCommitDigest === undefined ? {} : { parentCommitDigest: context.parentCommitDigest }),
    };
    await writeRecord(this.#indexPath(context), `${JSON.stringify(record)}\n`);
  }

  #configPath(manifestDigest: string, suffix: string): string {
    return join(this.#root, "configs", `${slug(manifestDigest)}-image${suffix}.json`);
  }

  /** An image all of whose layers are there, made by this converter with this disk size (native: any). */
  async findImage(
    manifestDigest: string,
    wanted: { readonly converters: readonly string[]; readonly virtualSizeBytes: number },
  ): Promise<CachedImage | undefined> {
    const meta = await readRecord(this.#configPath(manifestDigest, ".meta"), MetaRecord, this.#log);
    const image = await readRecord(this.#configPath(manifestDigest, ""), ImageRecord, this.#log);
    if (meta === undefined || image === undefined || !wanted.converters.includes(meta.converter))
      return undefined;
    const native = meta.converter === NATIVE_CONVERTER;
    if (!native && image.virtualSizeBytes !== wanted.virtualSizeBytes) return undefined;
    const lowers: CachedLayer[] = [];
    for (const { digest, size, uuid } of image.lowers) {
      const commit = await this.findCommit(digest, size);
      if (commit === undefined) return undefined;
      lowers.push(uuid === undefined ? commit : { ...commit, uuid });
    }
    const now = new Date();
    await utimes(this.#configPath(manifestDigest, ""), now, now);
    return { lowers, virtualSizeBytes: image.virtualSizeBytes, config: meta.config };
  }

  /** What is here, for garbage collection. `isPinned` is asked with the files of commits. */
  async inventory(
    isPinned: (file: string) => boolean,
  ): Promise<{ readonly images: CachedImageUse[]; readonly commits: CachedCommit[] }> {
    const images: CachedImageUse[] = [];
    for (const name of await readdir(join(this.#root, "configs"))) {
      const match = /^(sha256-[0-9a-f]{64})-image\.json$/.exec(name);
      if (match === null) continue;
      const path = join(this.#root, "configs", name);
      const image = await readRecord(path, ImageRecord, this.#log);
      const info = await infoOf(path);
      if (image === undefined || info === undefined) continue;
      images.push({
        key: match[1]!.replace("-", ":"),
        lastUsedMs: info.mtimeMs,
        layers: image.lowers.map(({ digest }) => digest),
      });
    }
    const commits: CachedCommit[] = [];
    for (const name of await readdir(join(this.#root, "commits"))) {
      if (!/^sha256-[0-9a-f]{64}$/.test(name)) continue;
      const digest = name.replace("-", ":");
      const file = this.commitPath(digest);
      const info = await infoOf(file);
      if (info === undefined) continue;
      const pinned = isPinned(file);
      commits.push({ digest, sizeBytes: info.blocks * 512, modifiedMs: info.mtimeMs, pinned });
    }
    return { images, commits };
  }

  /** Forgets an image; its layers stay until they are removed, too. */
  async removeImage(manifestDigest: string): Promise<void> {
    // The record of the lowers first: it is what makes the image known.
    await rm(this.#configPath(manifestDigest, ""), { force: true });
    await rm(this.#configPath(manifestDigest, ".meta"), { force: true });
  }

  async removeCommit(digest: string): Promise<void> {
    this.#checked.delete(digest);
    await rm(dirname(this.commitPath(digest)), { recursive: true, force: true });
  }

  /** Removes index records of commits that are gone. */
  async sweepIndexes(): Promise<void> {
    const root = join(this.#root, "indexes");
    for (const source of await readdir(root)) {
      const directory = join(root, source);
      let left = 0;
      for (const name of await readdir(directory)) {
        const path = join(directory, name);
        const record = await readRecord(path, IndexRecord, this.#log);
        if (record !== undefined && (await infoOf(this.commitPath(record.commitDigest))) !== undefined)
          left++;
        else await rm(path, { force: true });
      }
      if (left === 0) await rm(directory, { recursive: true, force: true });
    }
  }

  async recordImage(input: ImageRecordInput): Promise<void> {
    const { entrypoint, cmd, healthcheck, shell, onBuild } = input.config;
    const meta: z.infer<typeof MetaRecord> = {
      schema: 2,
      reference: input.reference,
      manifestDigest: input.manifestDigest,
      converter: input.converter,
      layers: [...input.layerDigests],
      config: {
        ...input.config,
        entrypoint: entrypoint && [...entrypoint],
        cmd: cmd && [...cmd],
        healthcheck: healthcheck && [...healthcheck],
        shell: shell && [...shell],
        onBuild: onBuild && [...onBuild],
        env: { ...input.config.env },
        labels: { ...input.config.labels },
        exposedPorts: [...input.config.exposedPorts],
        volumes: [...input.config.volumes],
      },
    };
    const image: z.infer<typeof ImageRecord> = {
      lowers: input.lowers.map(({ file, digest, size, uuid }) => ({ file, digest, size, uuid })),
      virtualSizeBytes: input.virtualSizeBytes,
    };
    // The lowers last: their record is what makes the image known.
    await writeRecord(this.#configPath(input.manifestDigest, ".meta"), `${JSON.stringify(meta)}\n`);
    await writeRecord(this.#configPath(input.manifestDigest, ""), `${JSON.stringify(image)}\n`);
  }
}

/** Converter name of images whose layers are overlaybd already. */
export const NATIVE_CONVERTER = "overlaybd-native/1";
