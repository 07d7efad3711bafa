import { randomUUID } from "node:crypto";
import { stat } from "node:fs/promises";
import { join } from "node:path";
import { AenvError } from "../lib/errors.ts";
import type { Logger } from "../lib/log.ts";
import type { ProgressSink } from "../lib/progress.ts";
import type { BlockClient } from "../storage/blockd/protocol.ts";
import { throttled } from "./blobs.ts";
import type { CachedLayer, ImageCache } from "./cache.ts";
import { commitInSlices } from "./commit.ts";
import { openLayerTar } from "./decompress.ts";
import { applyTar } from "./ext4-helper.ts";
import { digestMismatch, diskFault } from "./faults.ts";
import { hashFile } from "./hash.ts";

/**
 * Named in every cache key. Raise the number whenever the same input would give other bytes: a change of
 * c/ext4, of the op stream, of what a tar entry means, or of the committed form.
 */
export const CONVERTER = "agentenv-ext4/1";

export interface LayerConversion {
  /** For messages. */
  readonly image: string;
  readonly layerDigest: string;
  readonly layerBytes: number;
  /** Digest of the uncompressed tar, from the image config. */
  readonly diffId: string;
  /** The verified blob. */
  readonly blobPath: string;
  /** Converted layers below, bottom to top. */
  readonly parents: readonly CachedLayer[];
  readonly virtualSizeBytes: number;
}

export interface ConversionDeps {
  readonly cache: ImageCache;
  readonly blockClient: BlockClient;
  /** Block devices made here begin with it. */
  readonly devicePrefix: string;
  readonly ext4Helper: string;
  readonly log: Logger;
}

/** A version 8 UUID from a digest's text: the first 16 bytes of its sha256. */
export function uuidFromText(text: string): string {
  const bytes = Buffer.from(new Bun.CryptoHasher("sha256").update(text).digest()).subarray(0, 16);
  bytes[6] = (bytes[6]! & 0x0f) | 0x80;
  bytes[8] = (bytes[8]! & 0x3f) | 0x80;
  const hex = bytes.toString("hex");
  return [hex.slice(0, 8), hex.slice(8, 12), hex.slice(12, 16), hex.slice(16, 20), hex.slice(20)].join("-");
}

const GIB = 1024 ** 3;

/** Passes the tar through and checks it against the diff id at its end. */
async function* verified(
  tar: AsyncIterable<Uint8Array>,
  conversion: LayerConversion,
): AsyncGenerator<Uint8Array> {
  const hasher = new Bun.CryptoHasher("sha256");
  // Headers and padding may add to what the disk can hold; a small blob that unpacks without end may not.
  const limit = 2 * conversion.virtualSizeBytes + GIB;
  let total = 0;
  for await (const chunk of tar) {
    total += chunk.length;
    if (total > limit) {
      throw new AenvError({
        code: "image_unsupported",
        status: 400,
        message: `${conversion.image}: layer ${conversion.layerDigest} unpacks to more than ${limit} bytes, its disk holds ${conversion.virtualSizeBytes}`,
        remediation: "set a larger image.cache.virtual_size_gib if the layer is what it should be",
      });
    }
    hasher.update(chunk);
    yield chunk;
  }
  const found = `sha256:${hasher.digest("hex")}`;
  if (found !== conversion.diffId) {
    const what = `layer ${conversion.layerDigest} (uncompressed)`;
    throw digestMismatch(conversion.image, what, conversion.diffId, found);
  }
}

/**
 * Turns one OCI layer into one committed overlaybd layer on the chain below: a fresh upper over the parents,
 * exported by the block daemon, written by the ext4 helper, committed and published under its own digest.
 * On any error nothing stays behind.
 */
export async function convertLayer(
  conversion: LayerConversion,
  deps: ConversionDeps,
  signal: AbortSignal,
  progress: ProgressSink,
): Promise<CachedLayer> {
  const { parents, layerDigest } = conversion;
  const mkfs = parents.length === 0;
  await using stack = new AsyncDisposableStack();
  const stage = stack.use(await deps.cache.stage());
  const upper = {
    data: join(stage.path, "upper.data"),
    index: join(stage.path, "upper.index"),
    mode: "logStructured",
  } as const;
  const deviceId = `${deps.devicePrefix}${randomUUID()}`;
  const report = throttled(progress, {
    phase: "convert layer",
    item: layerDigest,
    totalBytes: conversion.layerBytes,
  });

  {
    await using device = new AsyncDisposableStack();
    device.defer(() => deps.blockClient.release(deviceId));
    const info = await deps.blockClient.create({
      deviceId,
      image: {
        lowers: parents.map(({ file, digest, size, uuid }) => ({
          file,
          digest,
          size,
          ...(uuid ? { uuid } : {}),
        })),
        upper,
        virtualSizeBytes: conversion.virtualSizeBytes,
      },
      readOnly: false,
      exportKind: "nbd",
    });
    if (info.socketPath === undefined || info.exportName === undefined) {
      throw new AenvError({
        code: "image_conversion_failed",
        message: "the block daemon gave no NBD export",
      });
    }
    const tar = await openLayerTar(conversion.blobPath, signal);
    const applied = await applyTar({
      helper: deps.ext4Helper,
      socketPath: info.socketPath,
      exportName: info.exportName,
      ...(mkfs ? { formatUuid: uuidFromText(`file system of ${layerDigest}`) } : {}),
      tar: verified(tar.chunks, conversion),
      signal,
      onProgress: () => report(tar.consumedBytes()),
    });
    if (applied.skippedXattrs > 0) {
      deps.log.warn(
        { image: conversion.image, layer: layerDigest, count: applied.skippedXattrs },
        "extended attributes that ext4 cannot hold were left out",
      );
    }
    await deps.blockClient.flush(deviceId);
  }

  signal.throwIfAborted();
  const parentUuid = parents.at(-1)?.uuid;
  const uuid = uuidFromText(layerDigest);
  try {
    const committed = await commitInSlices({
      upper,
      directory: join(stage.path, "commit"),
      virtualSizeBytes: conversion.virtualSizeBytes,
      uuid,
      ...(parentUuid === undefined ? {} : { parentUuid }),
      signal,
    });
    const target = committed.file;
    const digest = await hashFile(target, signal);
    const { size } = await stat(target);
    const layer = await deps.cache.publishCommit(target, digest, size);
    report(conversion.layerBytes);
    return { ...layer, uuid };
  } catch (error) {
    throw diskFault(error, `converting layer ${layerDigest}`);
  }
}
