import { MEDIA_TYPES, type Platform } from "./manifest.ts";
import { type ImageSource, sha256Digest } from "./source.ts";

const CONFIG_TYPE = "application/vnd.oci.image.config.v1+json";

/** Name that Dockerfiles have for an image without files; no registry is asked for it. */
export const SCRATCH = "scratch";

/** The image of no layers and no settings. */
export function createScratchSource(platform: Platform): ImageSource {
  const config = new TextEncoder().encode(
    JSON.stringify({ ...platform, config: {}, rootfs: { type: "layers", diff_ids: [] } }),
  );
  const manifest = new TextEncoder().encode(
    JSON.stringify({
      schemaVersion: 2,
      mediaType: MEDIA_TYPES.ociManifest,
      config: { mediaType: CONFIG_TYPE, digest: sha256Digest(config), size: config.length },
      layers: [],
    }),
  );
  const digest = sha256Digest(manifest);
  return {
    reference: SCRATCH,
    wanted: digest,
    manifest: async () => ({ bytes: manifest, digest, contentType: MEDIA_TYPES.ociManifest }),
    async blob(_descriptor, target) {
      await Bun.write(target, config);
    },
  };
}
