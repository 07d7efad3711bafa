import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { installAsset } from "../lib/assets.ts";
import { exportLocally } from "../storage/blockd/index.ts";
import type { ApplyJob, ApplyOutcome } from "../storage/overlaybd/types.ts";
import { openLayerTar } from "./decompress.ts";
import { applyTar } from "./ext4-helper.ts";

/** Unpacks a layer's tar (plain, gzip or zstd) into the file system of a writable layer; for `agentenv layer`. */
export async function applyLayer(job: ApplyJob): Promise<ApplyOutcome> {
  const directory = mkdtempSync(join(tmpdir(), "aenv-apply-"));
  const abort = new AbortController();
  try {
    await using exported = await exportLocally(job.image, join(directory, "nbd.sock"));
    const tar = await openLayerTar(job.tar, abort.signal);
    const report = await applyTar({
      helper: installAsset("aenv-ext4", directory),
      socketPath: exported.socketPath,
      exportName: exported.exportName,
      ...(job.formatUuid === undefined ? {} : { formatUuid: job.formatUuid }),
      tar: tar.chunks,
      signal: abort.signal,
    });
    await exported.flush();
    return { ...report, tarBytes: tar.consumedBytes() };
  } finally {
    abort.abort();
    rmSync(directory, { recursive: true, force: true });
  }
}
