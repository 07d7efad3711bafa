import { createReadStream, type ReadStream } from "node:fs";
import { pipeline } from "node:stream";
import { createGunzip, createZstdDecompress } from "node:zlib";
import { AenvError } from "../lib/errors.ts";

const CHUNK_BYTES = 1 << 20;

export type LayerCompression = "gzip" | "zstd" | "none";

/** By the first bytes, since media types of real images are sometimes wrong. RFC 1952; RFC 8878. */
export function detectCompression(head: Uint8Array): LayerCompression {
  const view = Buffer.from(head);
  if (view.length >= 2 && view[0] === 0x1f && view[1] === 0x8b) return "gzip";
  if (view.length >= 4) {
    const magic = view.readUInt32LE(0);
    if (magic === 0xfd2fb528 || (magic >= 0x184d2a50 && magic <= 0x184d2a5f)) return "zstd";
  }
  return "none";
}

export interface LayerTar {
  /** The tar's bytes; damaged compression is `image_truncated` (cut off) or `image_unsupported`. */
  readonly chunks: AsyncIterable<Uint8Array>;
  /** Bytes of the (compressed) file read so far. */
  consumedBytes(): number;
}

/** Opens a layer blob: gzip of any number of members, zstd of any number of frames, or plain. */
export async function openLayerTar(path: string, signal: AbortSignal): Promise<LayerTar> {
  const head = new Uint8Array(await Bun.file(path).slice(0, 4).arrayBuffer());
  const file = createReadStream(path, { highWaterMark: CHUNK_BYTES, signal });
  const compression = detectCompression(head);
  return {
    chunks:
      compression === "none" ? (file as AsyncIterable<Uint8Array>) : decompress(file, compression, signal),
    consumedBytes: () => file.bytesRead,
  };
}

async function* decompress(
  file: ReadStream,
  compression: "gzip" | "zstd",
  signal: AbortSignal,
): AsyncGenerator<Uint8Array> {
  const options = { chunkSize: CHUNK_BYTES };
  const transform = compression === "gzip" ? createGunzip(options) : createZstdDecompress(options);
  let failure: Error | undefined;
  // pipeline tears both ends down; the error reaches us through the transform's iterator as well.
  pipeline(file, transform, (error) => {
    if (error) failure = error;
  });
  try {
    yield* transform as AsyncIterable<Uint8Array>;
  } catch (cause) {
    signal.throwIfAborted();
    const error = failure ?? cause;
    const code = error instanceof Error && "code" in error ? String(error.code) : "";
    const truncated = code === "Z_BUF_ERROR";
    if (code === "ZSTD_error_frameParameter_windowTooLarge") {
      throw new AenvError({
        code: "image_unsupported",
        status: 400,
        message: "the layer's zstd stream needs a window of more than 128 MiB",
        remediation: "compress it without --long or --ultra",
        cause: error,
      });
    }
    throw new AenvError({
      code: truncated ? "image_truncated" : "image_unsupported",
      status: truncated ? 502 : 400,
      message: `the layer's ${compression} stream is ${truncated ? "cut off" : "damaged"}`,
      remediation: "the image was pushed like that; rebuild or re-push it",
      cause: error,
    });
  }
}
