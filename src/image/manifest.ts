import { z } from "zod";
import { AenvError } from "../lib/errors.ts";
import type { ImageRuntimeConfig } from "./types.ts";

/**
 * OCI image manifests, indexes and configs (image-spec v1.1) and their Docker twins (manifest v2, schema 2),
 * as far as they matter here.
 */
export const MEDIA_TYPES = {
  ociIndex: "application/vnd.oci.image.index.v1+json",
  ociManifest: "application/vnd.oci.image.manifest.v1+json",
  dockerList: "application/vnd.docker.distribution.manifest.list.v2+json",
  dockerManifest: "application/vnd.docker.distribution.manifest.v2+json",
} as const;

const STANDARD_LAYER_TYPES = new Set([
  "application/vnd.oci.image.layer.v1.tar",
  "application/vnd.oci.image.layer.v1.tar+gzip",
  "application/vnd.oci.image.layer.v1.tar+zstd",
  "application/vnd.docker.image.rootfs.diff.tar",
  "application/vnd.docker.image.rootfs.diff.tar.gzip",
]);
const OVERLAYBD = "containerd.io/snapshot/overlaybd/";
const TURBO_ARTIFACT = "application/vnd.containerd.overlaybd.turbo.v1+json";
export const MAX_INDEX_NESTING = 4;

const Digest = z.string().regex(/^sha256:[0-9a-f]{64}$/, "must be a sha256 digest");
const Annotations = z.record(z.string(), z.string()).nullish();
const DescriptorSchema = z.object({
  mediaType: z.string(),
  digest: Digest,
  size: z.int().min(0),
  annotations: Annotations,
});
const PlatformSchema = z.object({
  architecture: z.string().default(""),
  os: z.string().default(""),
  variant: z.string().optional(),
});
const IndexSchema = z.object({
  mediaType: z.string().optional(),
  manifests: z.array(
    DescriptorSchema.extend({ platform: PlatformSchema.nullish(), artifactType: z.string().optional() }),
  ),
});
const ManifestSchema = z.object({
  mediaType: z.string().optional(),
  artifactType: z.string().optional(),
  config: DescriptorSchema,
  layers: z.array(DescriptorSchema),
  annotations: Annotations,
});
const Strings = z.union([z.array(z.string()), z.string().transform((text) => [text])]).nullish();
const ConfigSchema = z.object({
  architecture: z.string().nullish(),
  os: z.string().nullish(),
  rootfs: z.object({ type: z.string(), diff_ids: z.array(Digest).nullish() }).nullish(),
  config: z
    .object({
      Env: z.array(z.string()).nullish(),
      WorkingDir: z.string().nullish(),
      User: z.string().nullish(),
      Entrypoint: Strings,
      Cmd: Strings,
      ExposedPorts: z.record(z.string(), z.unknown()).nullish(),
      Volumes: z.record(z.string(), z.unknown()).nullish(),
      Labels: z.record(z.string(), z.string().nullable()).nullish(),
      Healthcheck: z.object({ Test: z.array(z.string()).nullish() }).nullish(),
      Shell: z.array(z.string()).nullish(),
      OnBuild: z.array(z.string()).nullish(),
    })
    .nullish(),
});

export type Descriptor = z.infer<typeof DescriptorSchema>;
export type ImageIndex = z.infer<typeof IndexSchema>;
export type IndexEntry = ImageIndex["manifests"][number];
export type ImageManifest = z.infer<typeof ManifestSchema>;

export interface Platform {
  readonly os: string;
  readonly architecture: string;
}

export function hostPlatform(): Platform {
  const names: Readonly<Record<string, string>> = { x64: "amd64", arm64: "arm64" };
  return { os: "linux", architecture: names[process.arch] ?? process.arch };
}

export interface ParsedConfig {
  readonly runtime: ImageRuntimeConfig;
  readonly diffIds: readonly string[];
}

function unsupported(image: string, reason: string, remediation?: string): AenvError {
  return new AenvError({
    code: "image_unsupported",
    status: 400,
    message: `${image}: ${reason}`,
    ...(remediation === undefined ? {} : { remediation }),
  });
}

function parseJson<Schema extends z.ZodType>(
  image: string,
  what: string,
  bytes: Uint8Array,
  schema: Schema,
): z.output<Schema> {
  let value: unknown;
  try {
    value = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch (cause) {
    throw new AenvError({
      code: "image_unsupported",
      status: 400,
      message: `${image}: the ${what} is not JSON`,
      cause,
    });
  }
  const result = schema.safeParse(value);
  if (!result.success) {
    const issue = result.error.issues[0];
    throw unsupported(
      image,
      `the ${what} is malformed: ${issue?.path.join(".") ?? ""}: ${issue?.message ?? "invalid"}`,
    );
  }
  return result.data;
}

/** Index or manifest, told apart by its media type and, where that is missing, by its shape. */
export function parseManifest(
  image: string,
  bytes: Uint8Array,
  contentType: string | undefined,
): { readonly index: ImageIndex } | { readonly manifest: ImageManifest } {
  const Probe = z.looseObject({ mediaType: z.string().optional(), schemaVersion: z.number().optional() });
  const probe = parseJson(image, "manifest", bytes, Probe);
  if (probe.schemaVersion === 1) {
    throw unsupported(
      image,
      "it has an old Docker manifest (schema 1)",
      "push it again with a current docker or buildah",
    );
  }
  const mediaType = probe.mediaType ?? contentType?.split(";")[0]?.trim();
  const isIndex =
    mediaType === MEDIA_TYPES.ociIndex ||
    mediaType === MEDIA_TYPES.dockerList ||
    ("manifests" in probe && !("layers" in probe));
  if (isIndex) return { index: parseJson(image, "index", bytes, IndexSchema) };
  return { manifest: parseJson(image, "manifest", bytes, ManifestSchema) };
}

function isAttestation(entry: IndexEntry): boolean {
  return (
    entry.annotations?.["vnd.docker.reference.type"] === "attestation-manifest" ||
    (entry.platform?.os === "unknown" && entry.platform.architecture === "unknown")
  );
}

export function isIndexType(mediaType: string): boolean {
  return mediaType === MEDIA_TYPES.ociIndex || mediaType === MEDIA_TYPES.dockerList;
}

function showPlatform(platform: z.infer<typeof PlatformSchema>): string {
  return [platform.os, platform.architecture, platform.variant].filter(Boolean).join("/");
}

/**
 * The entries of an index worth following, best first: the platform's own, then nested indexes and entries
 * that do not say their platform (their config decides).
 */
export function selectFromIndex(
  index: ImageIndex,
  wanted: Platform,
): { entries: IndexEntry[]; found: string[] } {
  const usable = index.manifests.filter((entry) => !isAttestation(entry));
  const stated = (entry: IndexEntry) =>
    entry.platform && entry.platform.os !== "" ? entry.platform : undefined;
  const matches = usable.filter((entry) => {
    const platform = stated(entry);
    return platform?.os === wanted.os && platform.architecture === wanted.architecture;
  });
  const open = usable.filter((entry) => stated(entry) === undefined);
  const found = usable.flatMap((entry) => {
    const platform = stated(entry);
    return platform === undefined ? [] : [showPlatform(platform)];
  });
  return { entries: [...matches, ...open], found };
}

export function noPlatform(image: string, wanted: Platform, found: readonly string[]): AenvError {
  const list = [...new Set(found)].join(", ");
  return new AenvError({
    code: "image_no_platform",
    status: 400,
    message: `${image}: no ${wanted.os}/${wanted.architecture} in the image; found: ${list === "" ? "nothing" : list}`,
    remediation: `push the image for ${wanted.os}/${wanted.architecture}, or pick a tag that has it`,
  });
}

function layerKind(
  layer: Descriptor,
  artifactType: string | undefined,
): "standard" | "native" | "turbo" | "wrapped" | "unknown" {
  const annotations = layer.annotations ?? {};
  const keys = Object.keys(annotations);
  if (artifactType === TURBO_ARTIFACT || keys.some((key) => key.startsWith(`${OVERLAYBD}turbo-oci/`)))
    return "turbo";
  if (annotations[`${OVERLAYBD}version`]?.includes("turbo")) return "turbo";
  if (/[./+](?:overlaybd|zfile)/.test(layer.mediaType)) return "native";
  if (!STANDARD_LAYER_TYPES.has(layer.mediaType)) return "unknown";
  const blobDigest = annotations[`${OVERLAYBD}blob-digest`];
  if (blobDigest === undefined) return "standard";
  return blobDigest === layer.digest ? "native" : "wrapped";
}

/** All layers must be of one kind. Kinds that cannot be served are `image_unsupported`. */
export function classifyLayers(image: string, manifest: ImageManifest): "standard" | "native" {
  const kinds = new Map(
    manifest.layers.map((layer) => [layerKind(layer, manifest.artifactType), layer] as const),
  );
  for (const kind of ["turbo", "wrapped", "unknown"] as const) {
    const layer = kinds.get(kind);
    if (layer === undefined) continue;
    const what = {
      turbo: "turboOCI layers are not supported",
      wrapped: "an overlaybd layer inside another blob is not supported",
      unknown: `layers of media type ${JSON.stringify(layer.mediaType)} are not supported`,
    }[kind];
    throw unsupported(image, `${what} (layer ${layer.digest})`);
  }
  if (kinds.size > 1) throw unsupported(image, "it mixes overlaybd layers with ordinary ones");
  return kinds.has("native") ? "native" : "standard";
}

function environment(entries: readonly string[]): Record<string, string> {
  const env: Record<string, string> = {};
  for (const entry of entries) {
    const equals = entry.indexOf("=");
    if (equals > 0) env[entry.slice(0, equals)] = entry.slice(equals + 1);
  }
  return env;
}

/**
 * Checks the platform as well: a manifest without an index says it only here. `layerCount` is absent for
 * overlaybd images, whose configs need no diff ids.
 */
export function parseConfig(
  image: string,
  bytes: Uint8Array,
  wanted: Platform,
  layerCount: number | undefined,
): ParsedConfig {
  const parsed = parseJson(image, "image config", bytes, ConfigSchema);
  const os = parsed.os || wanted.os;
  const architecture = parsed.architecture || wanted.architecture;
  if (os !== wanted.os || architecture !== wanted.architecture) {
    throw noPlatform(image, wanted, [`${os}/${architecture}`]);
  }
  const diffIds = parsed.rootfs?.diff_ids ?? [];
  if (layerCount !== undefined && diffIds.length !== layerCount) {
    throw unsupported(image, `the manifest has ${layerCount} layers, the config ${diffIds.length} diff ids`);
  }
  const config = parsed.config ?? {};
  const nonEmpty = (list: readonly string[] | null | undefined) =>
    list && list.length > 0 ? list : undefined;
  const entrypoint = nonEmpty(config.Entrypoint);
  const cmd = nonEmpty(config.Cmd);
  const healthcheck = nonEmpty(config.Healthcheck?.Test);
  const shell = nonEmpty(config.Shell);
  const onBuild = nonEmpty(config.OnBuild);
  return {
    diffIds,
    runtime: {
      env: environment(config.Env ?? []),
      ...(config.WorkingDir ? { workingDir: config.WorkingDir } : {}),
      ...(config.User ? { user: config.User } : {}),
      ...(entrypoint === undefined ? {} : { entrypoint }),
      ...(cmd === undefined ? {} : { cmd }),
      ...(healthcheck === undefined ? {} : { healthcheck }),
      ...(shell === undefined ? {} : { shell }),
      ...(onBuild === undefined ? {} : { onBuild }),
      exposedPorts: Object.keys(config.ExposedPorts ?? {}),
      volumes: Object.keys(config.Volumes ?? {}),
      labels: Object.fromEntries(
        Object.entries(config.Labels ?? {}).map(([key, value]) => [key, value ?? ""]),
      ),
    },
  };
}
