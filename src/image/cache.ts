import { randomUUID } from "node:crypto";
import { mkdirSync, readdirSync, rmSync } from "node:fs";
import { link, mkdir, open, readFile, rename, rm, stat } from "node:fs/promises";
import { dirname, join } from "node:path";
import { z } from "zod";
import type { Logger } from "../lib/log.ts";
import type { LayerRef } from "../storage/overlaybd/types.ts";
import { diskFault } from "./faults.ts";
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
 * recorded one is not served and is made again.
 */
const FRACTION = 2 ** 30;

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
  schema: z.literal(1),
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

async function syncPath(path: string): Promise<void> {
  await using handle = await open(path, "r");
  await handle.sync();
}

/** Removes what is there already: this call decides. */
async function writeDurably(path: string, content: string): Promise<void> {
  const temporary = `${path}.${randomUUID()}.tmp`;
  try {
    await mkdir(dirname(path), { recursive: true });
    await using handle = await open(temporary, "wx");
    await handle.writeFile(content);
    await handle.sync();
  } catch (error) {
    await rm(temporary, { force: true });
    throw diskFault(error, `writing ${path}`);
  }
  await rename(temporary, path);
  await syncPath(dirname(path));
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

async function sizeOf(path: string): Promise<number | undefined> {
  try {
    const info = await stat(path);
    return info.isFile() ? info.size : undefined;
  } catch (error) {
    if (error instanceof Error && "code" in error && (error.code === "ENOENT" || error.code === "ENOTDIR"))
      return undefined;
    throw error;
  }
}

export class ImageCache {
  readonly #root: string;
  readonly #log: Logger;

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

  /** The commit of that digest, unless it is missing or has another size. */
  async findCommit(digest: string, size: number): Promise<CachedLayer | undefined> {
    const file = this.commitPath(digest);
    const found = await sizeOf(file);
    if (found === undefined) return undefined;
    if (found !== size) {
      this.#log.warn({ file, found, size }, "cached image layer has the wrong size, it is made again");
      return undefined;
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
    try {
      await syncPath(staged);
      await mkdir(directory, { recursive: true });
      try {
        await link(staged, file);
        await rm(staged);
      } catch (error) {
        if (!(error instanceof Error && "code" in error && error.code === "EEXIST")) throw error;
        if ((await sizeOf(file)) === size) {
          await rm(staged);
        } else {
          this.#log.warn({ file, size }, "replacing a damaged image layer");
          await rename(staged, file);
        }
      }
      await syncPath(directory);
      await syncPath(dirname(directory));
    } catch (error) {
      throw diskFault(error, "publishing an image layer");
    }
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
    await writeDurably(this.#indexPath(context), `${JSON.stringify(record)}\n`);
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
    return { lowers, virtualSizeBytes: image.virtualSizeBytes, config: meta.config };
  }

  async recordImage(input: ImageRecordInput): Promise<void> {
    const meta: z.infer<typeof MetaRecord> = {
      schema: 1,
      reference: input.reference,
      manifestDigest: input.manifestDigest,
      converter: input.converter,
      layers: [...input.layerDigests],
      config: {
        ...input.config,
        entrypoint: input.config.entrypoint && [...input.config.entrypoint],
        cmd: input.config.cmd && [...input.config.cmd],
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
    await writeDurably(this.#configPath(input.manifestDigest, ".meta"), `${JSON.stringify(meta)}\n`);
    await writeDurably(this.#configPath(input.manifestDigest, ""), `${JSON.stringify(image)}\n`);
  }
}

/** Converter name of images whose layers are overlaybd already. */
export const NATIVE_CONVERTER = "overlaybd-native/1";
