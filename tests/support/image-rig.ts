import { mkdir, mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import pino from "pino";
import { createImageService, type ImageService, type ImageServiceOptions } from "../../src/image/index.ts";
import { runCommand, tryCommand } from "../../src/lib/command.ts";
import type { Logger } from "../../src/lib/log.ts";
import { type BlockClient, superviseBlockd } from "../../src/storage/blockd/index.ts";
import type { LayerRef } from "../../src/storage/overlaybd/index.ts";
import { writeRawDisk } from "./raw-disk.ts";

const ROOT = join(import.meta.dir, "../..");
/** `AENV_TEST_EXT4` picks another build, such as the one with sanitizers. */
export const EXT4_HELPER = process.env.AENV_TEST_EXT4 ?? join(ROOT, "build/aenv-ext4");

export interface ImageRig extends AsyncDisposable {
  readonly directory: string;
  readonly blockClient: BlockClient;
  readonly log: Logger;
  /** A service over a cache directory of the rig (or another); disposed with the rig. */
  service(options?: Partial<ImageServiceOptions>): ImageService;
  /** The layers' content as a raw sparse file; its path. */
  exportRaw(lowers: readonly LayerRef[]): Promise<string>;
  /** Mounts a raw file read-only; undefined where the kernel or privileges do not allow it. */
  mount(raw: string): Promise<string | undefined>;
}

/** Options of a service without search registries and logins, with short pauses, on a 1 GiB disk. */
export function serviceOptions(cacheDir: string): ImageServiceOptions {
  return {
    cacheDir,
    defaultImage: "ubuntu:24.04",
    searchRegistries: [],
    allowLocalPaths: true,
    virtualSizeBytes: 1 << 30,
    convertStandardOci: true,
    dockerConfigPath: join(cacheDir, "no-docker-config.json"),
    retry: { baseDelayMs: 10, idleTimeoutMs: 5000 },
  };
}

/** A block daemon of its own, image services on it, and what is needed to look into the results. */
export async function startImageRig(): Promise<ImageRig> {
  const directory = await mkdtemp(join(tmpdir(), "image-rig-"));
  await using undo = new AsyncDisposableStack();
  undo.defer(() => rm(directory, { recursive: true, force: true }));
  const log = pino({ level: "error" }, pino.destination({ fd: 2, sync: true }));
  await mkdir(join(directory, "run"));
  const blockd = await superviseBlockd(
    {
      argv: [process.execPath, join(ROOT, "src/main.ts"), "blockd"],
      socketPath: join(directory, "blockd.sock"),
      runtimeDir: join(directory, "run"),
      logPath: join(directory, "blockd.log"),
    },
    log,
  );
  undo.use(blockd);
  undo.defer(() => blockd.client.shutdown());
  let count = 0;
  const held = undo.move();
  return {
    directory,
    blockClient: blockd.client,
    log,
    service(options = {}) {
      return held.use(
        createImageService(
          { ...serviceOptions(join(directory, "cache")), ...options },
          { blockClient: blockd.client, ext4Helper: EXT4_HELPER, log },
        ),
      );
    },
    async exportRaw(lowers) {
      const path = join(directory, `raw-${count++}.img`);
      writeRawDisk(lowers, path);
      return path;
    },
    async mount(raw) {
      const target = `${raw}.mnt`;
      await mkdir(target);
      const mounted = await tryCommand(["mount", "-o", "ro,loop", raw, target]);
      if (mounted.exitCode !== 0) {
        console.warn(`loop mount not possible here, part of the check is left out: ${mounted.stderr.trim()}`);
        return undefined;
      }
      held.defer(async () => {
        await runCommand(["umount", target]);
      });
      return target;
    },
    [Symbol.asyncDispose]: () => held.disposeAsync(),
  };
}
