import { rename } from "node:fs/promises";
import { join } from "node:path";
import { AenvError } from "../lib/errors.ts";
import type { Logger } from "../lib/log.ts";
import type { ProgressSink } from "../lib/progress.ts";
import type { BlockClient } from "../storage/blockd/protocol.ts";
import { inspectLayer } from "../storage/overlaybd/index.ts";
import { BlobPrefetch, createDownloadLimiter, type DownloadLimiter } from "./blobs.ts";
import { type CachedLayer, type ConversionContext, ImageCache, NATIVE_CONVERTER } from "./cache.ts";
import { CONVERTER, convertLayer, uuidFromText } from "./convert.ts";
import { defaultDockerConfigPath, loginFromDockerConfig, type RegistryLogin } from "./credentials.ts";
import { createArchiveSource } from "./docker-archive.ts";
import { type ImageGcPolicy, planImageGc } from "./gc.ts";
import {
  classifyLayers,
  type Descriptor,
  hostPlatform,
  type ImageManifest,
  isIndexType,
  MAX_INDEX_NESTING,
  noPlatform,
  type ParsedConfig,
  parseConfig,
  parseManifest,
  selectFromIndex,
} from "./manifest.ts";
import { createLayoutSource } from "./oci-layout.ts";
import { Reach } from "./reach.ts";
import { formatReference, parseReference, type RegistryReference } from "./reference.ts";
import { createRegistrySource, DEFAULT_RETRY, RegistryUnreached } from "./registry.ts";
import { createScratchSource, SCRATCH } from "./scratch.ts";
import { SharedWork } from "./shared-work.ts";
import { type FetchedManifest, type ImageSource, MAX_CONFIG_BYTES } from "./source.ts";
import type { ImageService, ImageServiceOptions, ResolvedImage, ResolveOptions } from "./types.ts";

export interface ImageServiceDeps {
  readonly blockClient: BlockClient;
  /** Path of the aenv-ext4 executable. */
  readonly ext4Helper: string;
  readonly log: Logger;
}

interface PlatformManifest {
  readonly manifest: ImageManifest;
  readonly digest: string;
}

/** A layer of no entries, for images without layers: an empty tar is two empty blocks or nothing at all. */
const EMPTY_LAYER: Descriptor = {
  mediaType: "application/vnd.oci.image.layer.v1.tar",
  digest: `sha256:${new Bun.CryptoHasher("sha256").digest("hex")}`,
  size: 0,
};

const EMPTY_SOURCE: Pick<ImageSource, "blob"> = {
  async blob(_descriptor, target) {
    await Bun.write(target, new Uint8Array(0));
  },
};

/** Artifact types under which overlaybd images are attached to ordinary ones, the better first. */
const NATIVE_ARTIFACTS = [
  "application/vnd.containerd.overlaybd.native.v1+json",
  "application/vnd.azure.artifact.streaming.v1",
];

const DEFAULT_GC: ImageGcPolicy = { highWatermark: 0.95, lowWatermark: 0.7, minAgeMs: 600_000 };

/** Failures that belong to the source or login one caller used, or to its leaving; not to the image. */
const SOURCE_FAILURES = ["image_not_found", "image_unauthorized", "image_registry_unreachable"];

function isCallersReason(error: unknown): boolean {
  return !(error instanceof AenvError) || SOURCE_FAILURES.includes(error.code);
}

/** One resolution: who waits for it, and the disk it is for. */
interface Job {
  readonly signal: AbortSignal;
  readonly progress: ProgressSink;
  /** Of converted images; native ones have their own. */
  readonly virtualSizeBytes: number;
}

class LocalImageService implements ImageService {
  readonly #options: ImageServiceOptions;
  readonly #deps: ImageServiceDeps;
  readonly #cache: ImageCache;
  readonly #images = new SharedWork<ResolvedImage>();
  readonly #layers = new SharedWork<CachedLayer>();
  readonly #limiter: DownloadLimiter = createDownloadLimiter();
  readonly #reach: Reach;
  readonly #platform = hostPlatform();
  readonly #devicePrefix: string;
  readonly #swept: Promise<void>;
  readonly #held = new Map<string, number>();
  #collecting: Promise<unknown> = Promise.resolve();

  constructor(options: ImageServiceOptions, deps: ImageServiceDeps) {
    this.#options = options;
    this.#reach = new Reach(options.reach);
    this.#deps = deps;
    this.#cache = new ImageCache(options.cacheDir, deps.log);
    // Per cache directory, so that services on one block daemon leave each other's devices alone.
    const owner = new Bun.CryptoHasher("sha256").update(options.cacheDir).digest("hex").slice(0, 12);
    this.#devicePrefix = `image-${owner}-`;
    this.#swept = this.#releaseLeftDevices();
  }

  /** The block daemon outlives us: a killed conversion's device is still there. */
  async #releaseLeftDevices(): Promise<void> {
    const { blockClient, log } = this.#deps;
    try {
      for (const { deviceId } of await blockClient.list()) {
        if (!deviceId.startsWith(this.#devicePrefix)) continue;
        await blockClient.release(deviceId);
        log.info({ deviceId }, "released the block device of an interrupted conversion");
      }
    } catch (error) {
      // The next start tries again; a conversion reports the daemon's failure by itself.
      log.warn({ err: error }, "block devices of interrupted conversions not released");
    }
  }

  async resolve(reference: string, options: ResolveOptions = {}): Promise<ResolvedImage> {
    const job: Job = {
      signal: options.signal ?? new AbortController().signal,
      progress: options.progress ?? (() => undefined),
      virtualSizeBytes: options.virtualSizeBytes ?? this.#options.virtualSizeBytes,
    };
    const { signal, progress } = job;
    if (reference.trim() === SCRATCH) return this.#resolveFrom(createScratchSource(this.#platform), job);
    const parsed = parseReference(
      reference.trim() === "" ? this.#options.defaultImage : reference,
      this.#options,
    );
    if (parsed.kind === "layout") {
      return this.#resolveFrom(createLayoutSource(parsed.layout), job);
    }
    if (parsed.kind === "archive") {
      return this.#resolveFrom(createArchiveSource(parsed.archive), job);
    }
    const failures: AenvError[] = [];
    for (const [index, candidate] of parsed.candidates.entries()) {
      // A password given with a short name belongs to the first registry it may mean, not to all of them.
      const given = parsed.qualified || index === 0 ? options.credentials : undefined;
      try {
        const known = await this.#knownByDigest(candidate, job);
        if (known !== undefined) return known;
        const login = await this.#login(candidate.registry, given);
        const source = createRegistrySource({
          reference: candidate,
          ...(login === undefined ? {} : { login }),
          reach: this.#reach,
          retry: { ...DEFAULT_RETRY, ...this.#options.retry },
        });
        progress({ phase: "resolve image", item: formatReference(candidate) });
        return await this.#resolveFrom(source, job);
      } catch (error) {
        signal.throwIfAborted();
        // Only what says nothing about the image itself lets the next registry be tried.
        const mayBeElsewhere = error instanceof AenvError && SOURCE_FAILURES.includes(error.code);
        if (!mayBeElsewhere || parsed.candidates.length === 1) throw error;
        failures.push(error);
      }
    }
    throw this.#noCandidate(reference, failures);
  }

  #noCandidate(reference: string, failures: readonly AenvError[]): AenvError {
    const told = failures.map((failure) => failure.message).join("; ");
    if (!failures.some((failure) => !(failure instanceof RegistryUnreached))) {
      return new RegistryUnreached({
        code: "image_registry_unreachable",
        status: 502,
        message: `${reference}: its registries cannot be reached: ${told}`,
        remediation:
          "check the DNS and network of the server's host and the server's proxy variables (HTTPS_PROXY, NO_PROXY), then try again",
        cause: failures[0],
      });
    }
    const worst = failures.find(({ code }) => code !== "image_not_found") ?? failures[0];
    return new AenvError({
      code: worst?.code ?? "image_not_found",
      status: worst?.status ?? 404,
      message: `${reference}: no registry has it: ${told}`,
      remediation: "write the reference with its registry, e.g. docker.io/library/debian:12",
      cause: worst,
    });
  }

  async #login(registry: string, given: ResolveOptions["credentials"]): Promise<RegistryLogin | undefined> {
    if (given !== undefined) return { kind: "basic", ...given };
    const path = this.#options.dockerConfigPath ?? defaultDockerConfigPath(process.env);
    return loginFromDockerConfig(path, registry, this.#deps.log);
  }

  /** An image asked for by digest that is here already needs no registry at all. */
  async #knownByDigest(candidate: RegistryReference, job: Job): Promise<ResolvedImage | undefined> {
    if (candidate.digest === undefined) return undefined;
    return this.#cached(formatReference(candidate), candidate.digest, job);
  }

  async #cached(
    reference: string,
    manifestDigest: string,
    { virtualSizeBytes }: Job,
  ): Promise<ResolvedImage | undefined> {
    const image = await this.#cache.findImage(manifestDigest, {
      converters: this.#options.convertStandardOci ? [CONVERTER, NATIVE_CONVERTER] : [NATIVE_CONVERTER],
      virtualSizeBytes,
    });
    return image === undefined ? undefined : { reference, manifestDigest, ...image };
  }

  async #resolveFrom(source: ImageSource, job: Job): Promise<ResolvedImage> {
    const { signal, progress, virtualSizeBytes } = job;
    const plain = await this.#platformManifest(source, await source.manifest(source.wanted, signal), signal);
    const found = (await this.#nativeReferrer(source, plain, signal)) ?? plain;
    const cached = await this.#cached(source.reference, found.digest, job);
    if (cached !== undefined) return cached;
    const image = await this.#images.run(
      `${found.digest} ${virtualSizeBytes}`,
      { signal, progress },
      (shared, report) => this.#build(source, found, { signal: shared, progress: report, virtualSizeBytes }),
      isCallersReason,
    );
    return { ...image, reference: source.reference };
  }

  /** The image as overlaybd layers where somebody has attached them to it; whatever is wrong there is passed over. */
  async #nativeReferrer(
    source: ImageSource,
    plain: PlatformManifest,
    signal: AbortSignal,
  ): Promise<PlatformManifest | undefined> {
    const { referrerPrefixes = [] } = this.#options;
    if (source.referrers === undefined) return undefined;
    if (!referrerPrefixes.some((prefix) => source.reference.startsWith(prefix))) return undefined;
    try {
      if (classifyLayers(source.reference, plain.manifest) === "native") return undefined;
      const entries = await source.referrers(plain.digest, signal);
      for (const type of NATIVE_ARTIFACTS) {
        for (const { digest } of entries.filter(({ artifactType }) => artifactType === type)) {
          const fetched = await source.manifest(digest, signal);
          const parsed = parseManifest(source.reference, fetched.bytes, fetched.contentType);
          if (!("manifest" in parsed)) continue;
          if (classifyLayers(source.reference, parsed.manifest) === "native")
            return { manifest: parsed.manifest, digest: fetched.digest };
        }
      }
    } catch (error) {
      signal.throwIfAborted();
      this.#deps.log.warn({ err: error, image: source.reference }, "referrers of the image not usable");
    }
    return undefined;
  }

  /** Follows indexes down to the manifest of the host's platform. */
  async #platformManifest(
    source: ImageSource,
    fetched: FetchedManifest,
    signal: AbortSignal,
    nesting = 0,
    found: string[] = [],
  ): Promise<PlatformManifest> {
    const parsed = parseManifest(source.reference, fetched.bytes, fetched.contentType);
    if ("manifest" in parsed) return { manifest: parsed.manifest, digest: fetched.digest };
    if (nesting >= MAX_INDEX_NESTING) {
      throw new AenvError({
        code: "image_unsupported",
        status: 400,
        message: `${source.reference}: indexes are nested more than ${MAX_INDEX_NESTING} deep`,
      });
    }
    const selected = selectFromIndex(parsed.index, this.#platform);
    found.push(...selected.found);
    for (const entry of selected.entries) {
      const next = await source.manifest(entry.digest, signal);
      if (!isIndexType(entry.mediaType))
        return this.#platformManifest(source, next, signal, nesting + 1, found);
      try {
        return await this.#platformManifest(source, next, signal, nesting + 1, found);
      } catch (error) {
        // This branch has other platforms only: its sisters may have ours.
        if (!(error instanceof AenvError) || error.code !== "image_no_platform") throw error;
      }
    }
    throw noPlatform(source.reference, this.#platform, found);
  }

  async #build(
    source: ImageSource,
    { manifest, digest }: PlatformManifest,
    job: Job,
  ): Promise<ResolvedImage> {
    const { signal, progress, virtualSizeBytes } = job;
    const kind = classifyLayers(source.reference, manifest);
    if (kind === "standard" && !this.#options.convertStandardOci) {
      throw new AenvError({
        code: "image_invalid_reference",
        status: 400,
        message: `${source.reference} is an ordinary OCI image and this server does not convert those`,
        remediation: "set image.resolver.convert_standard_oci = true, or push an overlaybd image",
      });
    }
    await using stack = new AsyncDisposableStack();
    const stage = stack.use(await this.#cache.stage());
    const config = await this.#config(source, manifest, stage.path, kind, signal);
    const layers = manifest.layers.length > 0 ? manifest.layers : [EMPTY_LAYER];
    const prefetch = stack.use(
      new BlobPrefetch({
        source: manifest.layers.length > 0 ? source : { ...source, ...EMPTY_SOURCE },
        directory: stage.path,
        limiter: this.#limiter,
        progress,
        signal,
      }),
    );
    const lowers =
      kind === "native"
        ? await this.#nativeLayers(layers, prefetch, signal)
        : await this.#convertedLayers(source.reference, layers, config, prefetch, job);
    const top = lowers.at(-1)!;
    const image: ResolvedImage = {
      reference: source.reference,
      manifestDigest: digest,
      lowers,
      virtualSizeBytes: kind === "native" ? inspectLayer(top.file).virtualSizeBytes : virtualSizeBytes,
      config: config.runtime,
    };
    await this.#cache.recordImage({
      ...image,
      lowers,
      converter: kind === "native" ? NATIVE_CONVERTER : CONVERTER,
      layerDigests: manifest.layers.map((layer) => layer.digest),
    });
    return image;
  }

  async #config(
    source: ImageSource,
    manifest: ImageManifest,
    directory: string,
    kind: "standard" | "native",
    signal: AbortSignal,
  ): Promise<ParsedConfig> {
    if (manifest.config.size > MAX_CONFIG_BYTES) {
      throw new AenvError({
        code: "image_unsupported",
        status: 400,
        message: `${source.reference}: its config is larger than ${MAX_CONFIG_BYTES} bytes`,
      });
    }
    const path = join(directory, "config.json");
    await source.blob(manifest.config, path, signal, () => undefined);
    const bytes = new Uint8Array(await Bun.file(path).arrayBuffer());
    return parseConfig(
      source.reference,
      bytes,
      this.#platform,
      kind === "standard" ? manifest.layers.length : undefined,
    );
  }

  async #convertedLayers(
    image: string,
    layers: readonly Descriptor[],
    config: ParsedConfig,
    prefetch: BlobPrefetch,
    { signal, progress, virtualSizeBytes }: Job,
  ): Promise<CachedLayer[]> {
    const lowers: CachedLayer[] = [];
    // Layers that no image record names yet.
    using holds = new DisposableStack();
    const keep = (layer: CachedLayer): void => {
      holds.use(this.hold([layer.file]));
      lowers.push(layer);
    };
    for (const [index, layer] of layers.entries()) {
      const context: ConversionContext = {
        sourceDigest: layer.digest,
        converter: CONVERTER,
        virtualSizeBytes,
        mkfs: index === 0,
        ...(index === 0 ? {} : { parentCommitDigest: lowers.at(-1)!.digest }),
      };
      const cached = await this.#cache.findLayer(context);
      if (cached !== undefined) {
        keep({ ...cached, uuid: uuidFromText(layer.digest) });
        continue;
      }
      // From the first missing layer on nothing is known to be here: fetch ahead.
      for (const next of layers.slice(index)) void prefetch.get(next);
      const converted = await this.#layers.run(
        this.#cache.contextKey(context),
        { signal, progress },
        async (shared, report) => {
          const blobPath = await prefetch.get(layer);
          await this.#swept;
          const made = await convertLayer(
            {
              image,
              layerDigest: layer.digest,
              layerBytes: layer.size,
              diffId: config.diffIds[index] ?? EMPTY_LAYER.digest,
              blobPath,
              parents: [...lowers],
              virtualSizeBytes,
            },
            { cache: this.#cache, devicePrefix: this.#devicePrefix, ...this.#deps },
            shared,
            report,
          );
          await this.#cache.recordLayer(context, made);
          return made;
        },
        isCallersReason,
      );
      keep(converted);
      if (!layers.slice(index + 1).some(({ digest }) => digest === layer.digest)) await prefetch.drop(layer);
    }
    return lowers;
  }

  /** Layers that are overlaybd already are used as they are. */
  async #nativeLayers(
    layers: readonly Descriptor[],
    prefetch: BlobPrefetch,
    signal: AbortSignal,
  ): Promise<CachedLayer[]> {
    const lowers: CachedLayer[] = [];
    for (const layer of layers) {
      let commit = await this.#cache.findCommit(layer.digest, layer.size);
      if (commit === undefined) {
        for (const next of layers) void prefetch.get(next);
        const blobPath = await prefetch.get(layer);
        signal.throwIfAborted();
        const staged = `${blobPath}.commit`;
        await rename(blobPath, staged);
        commit = await this.#cache.publishCommit(staged, layer.digest, layer.size);
      }
      const { uuid } = inspectLayer(commit.file);
      lowers.push(uuid === undefined ? commit : { ...commit, uuid });
    }
    return lowers;
  }

  hold(files: readonly string[]): Disposable {
    for (const file of files) this.#held.set(file, (this.#held.get(file) ?? 0) + 1);
    let open = true;
    return {
      [Symbol.dispose]: () => {
        if (!open) return;
        open = false;
        for (const file of files) {
          const left = this.#held.get(file)! - 1;
          if (left === 0) this.#held.delete(file);
          else this.#held.set(file, left);
        }
      },
    };
  }

  collect(pinned: ReadonlySet<string>): Promise<{ images: number; layers: number; bytes: number }> {
    const run = this.#collecting.then(() => this.#collect(pinned));
    this.#collecting = run.catch(() => undefined);
    return run;
  }

  async #collect(pinned: ReadonlySet<string>): Promise<{ images: number; layers: number; bytes: number }> {
    const used = new Set(pinned);
    // Running sandboxes and conversions. Without an answer nothing is known to be unused.
    for (const { image } of await this.#deps.blockClient.list())
      for (const { file } of image.lowers) used.add(file);
    const isPinned = (file: string): boolean => used.has(file) || this.#held.has(file);
    const { images, commits } = await this.#cache.inventory(isPinned);
    const policy = this.#options.gc ?? DEFAULT_GC;
    const plan = planImageGc(images, commits, policy, Date.now());
    for (const key of plan.images) await this.#cache.removeImage(key);
    let layers = 0;
    let bytes = 0;
    const sizes = new Map(commits.map(({ digest, sizeBytes }) => [digest, sizeBytes]));
    for (const digest of plan.commits) {
      // Somebody may have come for it meanwhile.
      if (this.#held.has(this.#cache.commitPath(digest))) continue;
      await this.#cache.removeCommit(digest);
      layers++;
      bytes += sizes.get(digest)!;
    }
    if (layers > 0) {
      await this.#cache.sweepIndexes();
      this.#deps.log.info({ images: plan.images.length, layers, bytes }, "image cache collected");
    }
    return { images: plan.images.length, layers, bytes };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#collecting;
    await this.#images[Symbol.asyncDispose]();
    await this.#layers[Symbol.asyncDispose]();
    await this.#swept;
  }
}

/**
 * The image room: resolves references into local overlaybd layers. One service owns a cache directory.
 * Disposal aborts what is running and waits for its clean-up; the block client is the caller's.
 */
export function createImageService(options: ImageServiceOptions, deps: ImageServiceDeps): ImageService {
  return new LocalImageService(options, deps);
}
