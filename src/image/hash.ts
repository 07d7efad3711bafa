import { open } from "node:fs/promises";

const PIECE_BYTES = 1 << 20;

/**
 * `sha256:<hex>` of a file. Reads piece by piece through the thread pool: a ready-made file stream would
 * deliver from the page cache without ever letting the event loop turn.
 */
export async function hashFile(
  path: string,
  signal: AbortSignal,
  onProgress: (doneBytes: number) => void = () => undefined,
): Promise<string> {
  const hasher = new Bun.CryptoHasher("sha256");
  const buffer = new Uint8Array(new ArrayBuffer(PIECE_BYTES));
  await using file = await open(path, "r");
  for (let done = 0; ; ) {
    const { bytesRead } = await file.read(buffer, 0, PIECE_BYTES, done);
    signal.throwIfAborted();
    if (bytesRead === 0) return `sha256:${hasher.digest("hex")}`;
    hasher.update(buffer.subarray(0, bytesRead));
    done += bytesRead;
    onProgress(done);
  }
}
