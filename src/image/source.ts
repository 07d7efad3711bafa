import type { Descriptor, IndexEntry } from "./manifest.ts";

/** Where an image comes from: a registry repository or a layout directory. */
export interface ImageSource {
  /** The reference as completed, for messages and records. */
  readonly reference: string;
  /** Digest or tag the reference stands for; undefined: the source's only image. */
  readonly wanted: string | undefined;
  /**
   * A manifest or index by tag or digest; its bytes are verified against a digest where one is given.
   * Errors: `image_not_found`, `image_unauthorized`, `image_registry_unreachable`, `image_digest_mismatch`.
   */
  manifest(wanted: string | undefined, signal: AbortSignal): Promise<FetchedManifest>;
  /**
   * What the source has to say about a manifest: artifacts whose subject it is (OCI distribution-spec 1.1,
   * "Listing Referrers", and its tag schema where a registry lacks that). None where there is no such thing.
   */
  referrers?(digest: string, signal: AbortSignal): Promise<readonly IndexEntry[]>;
  /**
   * Puts a blob's bytes into a new file at `target`, verified against digest and size when it resolves.
   * Errors: `image_truncated`, `image_digest_mismatch`, `disk_full` and those of `manifest`.
   */
  blob(
    descriptor: Pick<Descriptor, "digest" | "size">,
    target: string,
    signal: AbortSignal,
    onProgress: (doneBytes: number) => void,
  ): Promise<void>;
}

export interface FetchedManifest {
  readonly bytes: Uint8Array;
  /** `sha256:<hex>` of the bytes. */
  readonly digest: string;
  readonly contentType?: string;
}

export const MAX_MANIFEST_BYTES = 4 << 20;
export const MAX_CONFIG_BYTES = 8 << 20;

export function sha256Digest(bytes: Uint8Array): string {
  return `sha256:${new Bun.CryptoHasher("sha256").update(bytes).digest("hex")}`;
}
