import { createWriteStream } from "node:fs";
import { mkdir, readdir, rename, stat, utimes } from "node:fs/promises";
import { join } from "node:path";
import { finished } from "node:stream/promises";
import { z } from "zod";
import { errorCode, makeDirDurable, readJson, removeTree, syncPath, writeDurable } from "../lib/durable.ts";
import { AenvError } from "../lib/errors.ts";
import type { Logger } from "../lib/log.ts";
import { type ArchiveLimits, invalidArchive, listArchive } from "./archive.ts";

/*
 * Uploaded archives of COPY steps:
 *
 *   <root>/<template id>/<hash>.tar    the archive as it was uploaded
 *   <root>/<template id>/<hash>.json   written last: the archive is whole and was read to its end
 *   <root>/staging/                    uploads in progress, emptied at start
 *
 * The hash is the client's name for the files; it cannot be computed from the archive. So an archive counts only
 * for the template it was uploaded for.
 */

const Meta = z.object({
  version: z.literal(1),
  sha256: z.string(),
  size: z.int().min(0),
  members: z.int().min(0),
  contentBytes: z.int().min(0),
});

export interface StoredArchive extends Disposable {
  readonly file: string;
  readonly size: number;
}

export interface FileStoreOptions {
  readonly root: string;
  /** Of one archive. */
  readonly maxUploadBytes: number;
  /** Of all archives: beyond it those unused for longest go. */
  readonly maxTotalBytes: number;
  readonly archive: ArchiveLimits;
  readonly log: Logger;
}

export const HASH = /^[0-9a-f]{64}$/;

function tooLarge(limit: number): AenvError {
  return new AenvError({
    code: "upload_too_large",
    status: 413,
    message: `the archive is larger than ${limit} bytes`,
    remediation: "leave files out with .dockerignore, or fetch them in a RUN step",
  });
}

function diskFault(error: unknown): unknown {
  if (errorCode(error) !== "ENOSPC" && errorCode(error) !== "EDQUOT") return error;
  return new AenvError({
    code: "disk_full",
    status: 507,
    message: "the archive could not be stored: no space left on the server's disk",
    remediation: "free space on the file system of the server's home",
    cause: error,
  });
}

export class FileStore {
  readonly #options: FileStoreOptions;
  readonly #inUse = new Map<string, number>();
  #uploads = 0;

  constructor(options: FileStoreOptions) {
    this.#options = options;
  }

  async start(): Promise<void> {
    await removeTree(this.#staging);
    await mkdir(this.#staging, { recursive: true, mode: 0o700 });
  }

  get #staging(): string {
    return join(this.#options.root, "staging");
  }

  #path(templateId: string, hash: string, suffix: string): string {
    return join(this.#options.root, templateId, `${hash}.${suffix}`);
  }

  /** The archive, complete and verified, kept until the lease is disposed; undefined when it is not here. */
  async lease(templateId: string, hash: string): Promise<StoredArchive | undefined> {
    const file = this.#path(templateId, hash, "tar");
    // Counted first: an eviction between the look and the count would take it away.
    this.#inUse.set(file, (this.#inUse.get(file) ?? 0) + 1);
    const release = () => {
      const left = (this.#inUse.get(file) ?? 1) - 1;
      if (left === 0) this.#inUse.delete(file);
      else this.#inUse.set(file, left);
    };
    let size: number | undefined;
    try {
      size = await this.#size(templateId, hash);
    } finally {
      if (size === undefined) release();
    }
    if (size === undefined) return undefined;
    let open = true;
    return {
      file,
      size,
      [Symbol.dispose]() {
        if (open) release();
        open = false;
      },
    };
  }

  async #size(templateId: string, hash: string): Promise<number | undefined> {
    const metaPath = this.#path(templateId, hash, "json");
    try {
      const meta = Meta.safeParse(await readJson(metaPath));
      if (!meta.success) return undefined;
      const { size } = await stat(this.#path(templateId, hash, "tar"));
      if (size !== meta.data.size) {
        this.#options.log.warn(
          { templateId, hash, size },
          "an uploaded archive has the wrong size: not used",
        );
        return undefined;
      }
      const now = new Date();
      await utimes(metaPath, now, now);
      return size;
    } catch (error) {
      if (errorCode(error) === "ENOENT") return undefined;
      throw error;
    }
  }

  async has(templateId: string, hash: string): Promise<boolean> {
    return (await this.#size(templateId, hash)) !== undefined;
  }

  /**
   * Stores an upload: all of it read, checked member by member and synced before it counts. On any error
   * nothing of it stays and what was there before is untouched. `admit` is given the step that makes it count, to run
   * it once or to throw. Errors: `invalid_archive` 400, `upload_too_large` 413, `disk_full` 507.
   */
  async put(
    templateId: string,
    hash: string,
    body: AsyncIterable<Uint8Array>,
    options: {
      readonly signal: AbortSignal;
      readonly declaredBytes?: number;
      readonly admit?: (publish: () => Promise<void>) => Promise<void>;
    },
  ): Promise<void> {
    const { maxUploadBytes, archive, root } = this.#options;
    const { signal, declaredBytes, admit = (publish) => publish() } = options;
    if (declaredBytes !== undefined && declaredBytes > maxUploadBytes) throw tooLarge(maxUploadBytes);
    const staged = join(this.#staging, `${process.pid}-${this.#uploads++}.tar`);
    const hasher = new Bun.CryptoHasher("sha256");
    let size = 0;
    try {
      const sink = createWriteStream(staged, { flags: "wx", mode: 0o600 });
      const ended = finished(sink);
      ended.catch(() => undefined);
      try {
        for await (const chunk of body) {
          signal.throwIfAborted();
          size += chunk.length;
          if (size > maxUploadBytes) throw tooLarge(maxUploadBytes);
          hasher.update(chunk);
          // A copy: the chunk may lie in a buffer that is used again.
          if (!sink.write(Buffer.from(chunk))) {
            await Promise.race([new Promise((resolve) => sink.once("drain", resolve)), ended]);
          }
        }
        sink.end();
        await ended;
      } catch (error) {
        // Its file may be made only now: it must not appear after it was removed.
        const closed = new Promise((resolve) => sink.once("close", resolve));
        sink.destroy();
        if (!sink.closed) await closed;
        throw error;
      }
      if (declaredBytes !== undefined && size !== declaredBytes)
        throw invalidArchive(`${size} of ${declaredBytes} bytes arrived`);
      const { members, contentBytes } = await listArchive(staged, archive, signal);
      await syncPath(staged);
      const meta: z.infer<typeof Meta> = {
        version: 1,
        sha256: hasher.digest("hex"),
        size,
        members: members.length,
        contentBytes,
      };
      await admit(async () => {
        signal.throwIfAborted();
        await makeDirDurable(join(root, templateId));
        // Between the two the sizes may differ: then it is "not here" and is uploaded again.
        await rename(staged, this.#path(templateId, hash, "tar"));
        await writeDurable(this.#path(templateId, hash, "json"), `${JSON.stringify(meta)}\n`);
      });
    } catch (error) {
      throw diskFault(error);
    } finally {
      await removeTree(staged);
    }
    await this.#evict();
  }

  /** Name for a temporary file of a build; the caller removes it. */
  scratchPath(): string {
    return join(this.#staging, `${process.pid}-${this.#uploads++}.part`);
  }

  async remove(templateId: string): Promise<void> {
    await removeTree(join(this.#options.root, templateId));
  }

  /** Removes archives of templates that are not among the given ones. */
  async sweep(templateIds: ReadonlySet<string>): Promise<void> {
    for (const name of await readdir(this.#options.root)) {
      if (name !== "staging" && !templateIds.has(name)) await removeTree(join(this.#options.root, name));
    }
  }

  async #evict(): Promise<void> {
    const { root, maxTotalBytes, log } = this.#options;
    const found: { base: string; size: number; usedAt: number }[] = [];
    for (const templateId of await readdir(root)) {
      if (templateId === "staging") continue;
      for (const name of (await orUndefined(readdir(join(root, templateId)))) ?? []) {
        if (!name.endsWith(".json")) continue;
        const base = join(root, templateId, name.slice(0, -".json".length));
        const [meta, tar] = await Promise.all([stat(`${base}.json`), stat(`${base}.tar`)].map(orUndefined));
        if (meta !== undefined && tar !== undefined)
          found.push({ base, size: tar.size, usedAt: meta.mtimeMs });
      }
    }
    let total = found.reduce((sum, { size }) => sum + size, 0);
    found.sort((a, b) => a.usedAt - b.usedAt);
    for (const { base, size } of found) {
      if (total <= maxTotalBytes) return;
      if (this.#inUse.has(`${base}.tar`)) continue;
      await removeTree(`${base}.json`);
      await removeTree(`${base}.tar`);
      total -= size;
      log.info(
        { file: `${base}.tar`, size },
        "uploaded archive removed: the limit for all of them is reached",
      );
    }
  }
}

async function orUndefined<T>(work: Promise<T>): Promise<T | undefined> {
  try {
    return await work;
  } catch (error) {
    // Another upload or a deletion was faster.
    if (errorCode(error) === "ENOENT") return undefined;
    throw error;
  }
}
