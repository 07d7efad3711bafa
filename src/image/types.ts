import type { ProgressSink } from "../lib/progress.ts";
import type { LayerRef } from "../storage/overlaybd/types.ts";
import type { ImageGcPolicy } from "./gc.ts";
import type { ReachRules } from "./reach.ts";

/** The part of an OCI image config that a sandbox is started with. */
export interface ImageRuntimeConfig {
  readonly env: Readonly<Record<string, string>>;
  readonly workingDir?: string;
  readonly user?: string;
  readonly entrypoint?: readonly string[];
  readonly cmd?: readonly string[];
  readonly exposedPorts: readonly string[];
  readonly volumes: readonly string[];
  readonly labels: Readonly<Record<string, string>>;
  /** As docker stores it: `["NONE"]`, `["CMD", ...]`, `["CMD-SHELL", text]`. */
  readonly healthcheck?: readonly string[];
  /** Of RUN and of commands in shell form, when the image's Dockerfile set one. */
  readonly shell?: readonly string[];
  /** Instructions that a build on this image would run first. */
  readonly onBuild?: readonly string[];
}

export interface ResolvedImage {
  /** The reference as completed, e.g. `docker.io/library/debian:12`. */
  readonly reference: string;
  /** Digest of the platform manifest the reference stood for: what is stored pins this. */
  readonly manifestDigest: string;
  readonly lowers: readonly LayerRef[];
  readonly virtualSizeBytes: number;
  readonly config: ImageRuntimeConfig;
}

export interface RegistryCredentials {
  readonly username: string;
  readonly password: string;
}

export interface ResolveOptions {
  readonly credentials?: RegistryCredentials;
  readonly progress?: ProgressSink;
  readonly signal?: AbortSignal;
  /** Size of the disk a converted image gets; each size is a conversion of its own. Default: the service's. */
  readonly virtualSizeBytes?: number;
}

export interface ImageService extends AsyncDisposable {
  /**
   * Resolves a reference (registry reference, `scratch` for no files at all, or `oci-layout:/path[:tag]` where the configuration allows
   * local paths), downloads what is missing, converts each layer once and returns local layers.
   * Errors: `image_invalid_reference` 400, `image_not_found` 404, `image_no_platform` 400,
   * `image_digest_mismatch` 502, `image_truncated` 502, `image_unauthorized` 401→400,
   * `image_registry_unreachable` 502, `image_unsupported` 400, `disk_full` 507.
   */
  resolve(reference: string, options?: ResolveOptions): Promise<ResolvedImage>;
  /** While it is open, none of these layer files is removed by garbage collection. */
  hold(files: readonly string[]): Disposable;
  /**
   * Removes what nobody needs, and the images unused for longest while the cache is above its watermark. Layers
   * of images that stay, of open holds, of the block daemon's devices and of `pinned` (absolute files) stay.
   */
  collect(
    pinned: ReadonlySet<string>,
  ): Promise<{ readonly images: number; readonly layers: number; readonly bytes: number }>;
}

export interface ImageServiceOptions {
  /** Bounds for `collect`; default: no capacity, ten minutes. */
  readonly gc?: ImageGcPolicy;
  readonly cacheDir: string;
  readonly defaultImage: string;
  readonly searchRegistries: readonly string[];
  readonly allowedRegistries?: readonly string[];
  readonly allowLocalPaths: boolean;
  /** Where a registry may send this server beside itself and the public internet. Default: nowhere. */
  readonly reach?: ReachRules;
  /** Images whose completed reference begins with one of these are looked up for an overlaybd referrer. */
  readonly referrerPrefixes?: readonly string[];
  /** Size of the virtual disk made for converted images. */
  readonly virtualSizeBytes: number;
  readonly convertStandardOci: boolean;
  /** Docker credential file; absent: `$DOCKER_CONFIG/config.json`, else `~/.docker/config.json`. */
  readonly dockerConfigPath?: string;
  /** Of registry requests; absent keys: 5 attempts, 500 ms doubling up to 60 s, 45 s without a byte. */
  readonly retry?: {
    readonly attempts?: number;
    readonly baseDelayMs?: number;
    readonly maxDelayMs?: number;
    readonly idleTimeoutMs?: number;
  };
}
