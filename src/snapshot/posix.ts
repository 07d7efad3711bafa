import { createHash } from "node:crypto";
import { type BigIntStats, createReadStream } from "node:fs";
import { mkdir, readdir, stat, unlink, utimes } from "node:fs/promises";
import { join } from "node:path";
import {
  errorCode,
  linkOrCopy,
  makeDirDurable,
  readJson,
  removeTree,
  syncPath,
  writeDurable,
} from "../lib/durable.ts";
import { AenvError, assert } from "../lib/errors.ts";
import { FileLock } from "../lib/file-lock.ts";
import { isUuid } from "../lib/ids.ts";
import type { Logger } from "../lib/log.ts";
import {
  type AttachedDrive,
  type CapturedState,
  isStateVersion,
  type StateVersion,
  stateLayers,
  stateVersion,
} from "../sandbox/types.ts";
import type { LayerRef } from "../storage/overlaybd/types.ts";
import { formatName, parseAlias, parseName } from "./names.ts";
import type { SnapshotLease, SnapshotRecord, SnapshotRepository } from "./types.ts";

/**
 * Repository on a POSIX file system, which may be shared between nodes:
 *
 *   catalog/records/<id>.json     one record; a record is committed when it has `committed` and the
 *                                 marker exists
 *   catalog/aliases/<alias>.json  template and build per tag
 *   catalog/current/<id>.json     newest ready build of a template (an index: rebuilt when it is wrong)
 *   catalog/locks/*.lock          flock files, never removed
 *   snapshots/<id>/               commit (marker), vm_state.bin, manifest.json
 *   staging/                      captures of running builds
 *   managed-layers/<algorithm>_<hex>.overlaybd.commit
 *
 * Stored records carry digests, never paths. Every file appears by rename or link of synced bytes, and
 * the record is written last: a reader, or a process after a crash, sees all of a snapshot or none.
 */
export interface PosixRepositoryOptions {
  readonly root: string;
  readonly log: Logger;
  /** Layers younger than this are never collected: another node may be about to publish with them. */
  readonly collectGraceMs?: number;
  /** Longest wait for a lock of the catalog. */
  readonly lockWaitMs?: number;
}

interface StoredLayer {
  readonly digest: string;
  readonly size: number;
  readonly uuid?: string;
}

type StoredDrive = Omit<AttachedDrive, "lowers"> & { readonly lowers: readonly StoredLayer[] };

type StoredState = Omit<CapturedState, "deviceStatePath" | "memory" | "rootfs" | "drives"> & {
  readonly memory: { readonly sizeBytes: number; readonly layers: readonly StoredLayer[] };
  readonly rootfs: { readonly virtualSizeBytes: number; readonly lowers: readonly StoredLayer[] };
  readonly drives?: readonly StoredDrive[];
};

type StoredRecord = Omit<SnapshotRecord, "committed"> & {
  /** That of the state in it, 1 without one: a reader knows all of a record's layers, or refuses the record. */
  readonly version: StateVersion;
  readonly committed?: Omit<NonNullable<SnapshotRecord["committed"]>, "state"> & {
    readonly state: StoredState;
  };
};

interface AliasDocument {
  readonly version: 1;
  readonly alias: string;
  readonly templateId: string;
  readonly tags: Readonly<Record<string, string>>;
}

const MAX_DIGESTS = 20_000;
const DIGEST = /^sha256:[0-9a-f]{64}$/;
const LAYER_FILE = /^sha256_[0-9a-f]{64}\.overlaybd\.commit$/;

class PosixRepository implements SnapshotRepository {
  readonly stagingDir: string;
  readonly #records: string;
  readonly #aliases: string;
  readonly #current: string;
  readonly #locks: string;
  readonly #snapshots: string;
  readonly #layers: string;
  readonly #log: Logger;
  readonly #graceMs: number;
  readonly #lockWaitMs: number;
  /** Files in use by leases and running publications, with their number of users. */
  readonly #pins = new Map<string, number>();
  readonly #publishing = new Set<string>();
  /** Digests of files by what identifies their content on this host. */
  readonly #digests = new Map<string, string>();
  #prepared: Promise<void> | undefined;

  constructor(options: PosixRepositoryOptions) {
    this.#records = join(options.root, "catalog", "records");
    this.#aliases = join(options.root, "catalog", "aliases");
    this.#current = join(options.root, "catalog", "current");
    this.#locks = join(options.root, "catalog", "locks");
    this.#snapshots = join(options.root, "snapshots");
    this.#layers = join(options.root, "managed-layers");
    this.stagingDir = join(options.root, "staging");
    this.#log = options.log;
    this.#graceMs = options.collectGraceMs ?? 600_000;
    this.#lockWaitMs = options.lockWaitMs ?? 10_000;
  }

  #prepare(): Promise<void> {
    this.#prepared ??= (async () => {
      const dirs = [this.#records, this.#aliases, this.#current, this.#locks, this.#snapshots, this.#layers];
      for (const dir of dirs) await makeDirDurable(dir, 0o700);
    })();
    return this.#prepared;
  }

  async #lock(kind: "record" | "alias", name: string): Promise<FileLock> {
    return FileLock.acquire(join(this.#locks, `${kind}-${name}.lock`), this.#lockWaitMs);
  }

  // ---- reading ----------------------------------------------------------------------------------

  async list(): Promise<SnapshotRecord[]> {
    await this.#prepare();
    const documents = new Map<string, AliasDocument>();
    for (const name of await readdir(this.#aliases)) {
      if (!name.endsWith(".json")) continue;
      const document = await this.#aliasOrNone(name.slice(0, -".json".length));
      if (document !== undefined) documents.set(document.alias, document);
    }
    const records: SnapshotRecord[] = [];
    for (const id of await this.#recordIds()) {
      try {
        const stored = await this.#readStored(id);
        if (stored !== undefined) records.push(await this.#hydrate(stored, documents));
      } catch (error) {
        this.#log.error({ err: error, snapshotId: id }, "snapshot record is left out of the list");
      }
    }
    return records;
  }

  async #recordIds(): Promise<string[]> {
    const names = await readdir(this.#records);
    return names
      .filter((name) => name.endsWith(".json"))
      .map((name) => name.slice(0, -".json".length))
      .filter(isUuid);
  }

  async get(id: string): Promise<SnapshotRecord | undefined> {
    await this.#prepare();
    if (!isUuid(id)) return undefined;
    const stored = await this.#readStored(id.toLowerCase());
    return stored === undefined ? undefined : this.#hydrate(stored);
  }

  async resolve(text: string): Promise<SnapshotRecord | undefined> {
    await this.#prepare();
    const name = parseName(text);
    if (name === undefined) return undefined;
    if (name.isId) return this.#resolveId(name.base);
    const id = (await this.#readAlias(name.base))?.tags[name.tag];
    return id === undefined ? undefined : this.get(id);
  }

  /** Newest ready build of a template, or the record of that id. */
  async #resolveId(id: string): Promise<SnapshotRecord | undefined> {
    const record = await this.get(id);
    if (record !== undefined && record.templateId !== id) return record;
    if (record !== undefined && record.source.kind === "sandbox") return record;
    const pointer = (await readOptional(join(this.#current, `${id}.json`))) as { id?: string } | undefined;
    const current = pointer?.id === undefined ? undefined : await this.get(pointer.id);
    if (current?.committed !== undefined && current.templateId === id) return current;
    const builds = (await this.list()).filter(
      (build) => build.templateId === id && build.committed !== undefined,
    );
    builds.sort((a, b) => (a.createdAt < b.createdAt ? -1 : 1));
    return builds.at(-1) ?? record;
  }

  async lease(text: string): Promise<SnapshotLease | undefined> {
    for (let attempt = 0; attempt < 3; attempt++) {
      const record = await this.resolve(text);
      if (record === undefined) return undefined;
      const release = this.#pin(filesOf(record));
      // Pinned first, looked at again after: a deletion before the second look is seen, and the sweep
      // that follows a later one sees the pins.
      const again = await this.get(record.id);
      if (again !== undefined && (again.committed === undefined) === (record.committed === undefined)) {
        return { record, [Symbol.dispose]: release };
      }
      release();
    }
    return undefined;
  }

  #pin(files: readonly string[]): () => void {
    for (const file of files) this.#pins.set(file, (this.#pins.get(file) ?? 0) + 1);
    let open = true;
    return () => {
      if (!open) return;
      open = false;
      for (const file of files) {
        const users = (this.#pins.get(file) ?? 0) - 1;
        assert(users >= 0, `pin count of ${file} is never negative`);
        if (users === 0) this.#pins.delete(file);
        else this.#pins.set(file, users);
      }
    };
  }

  async #readStored(id: string): Promise<StoredRecord | undefined> {
    const path = join(this.#records, `${id}.json`);
    const value = await readDocument(path);
    if (value === undefined) return undefined;
    const record = value as Partial<StoredRecord>;
    if (
      !isStateVersion(record.version) ||
      record.id !== id ||
      record.source === undefined ||
      record.resources === undefined
    ) {
      throw new AenvError({
        code: "snapshot_record_invalid",
        message: `${path} is not a snapshot record of version 1 or 2`,
        remediation: "restore the file from a backup, or delete the template and build it again",
      });
    }
    return record as StoredRecord;
  }

  /** As it is for what goes on without the names: a damaged one is told, and counts as none. */
  async #aliasOrNone(alias: string): Promise<AliasDocument | undefined> {
    try {
      return await this.#readAlias(alias);
    } catch (error) {
      if (!(error instanceof AenvError && error.code === "snapshot_alias_invalid")) throw error;
      this.#log.error({ err: error, alias }, "the document of an alias is left out");
      return undefined;
    }
  }

  async #readAlias(alias: string): Promise<AliasDocument | undefined> {
    const value = (await readDocument(join(this.#aliases, `${alias}.json`))) as
      | Partial<AliasDocument>
      | undefined;
    if (value === undefined) return undefined;
    if (value.version !== 1 || value.tags === undefined || value.templateId === undefined) {
      throw new AenvError({
        code: "snapshot_alias_invalid",
        message: `${join(this.#aliases, `${alias}.json`)} is not an alias document of version 1`,
        remediation: "remove the file and build the template again under that name",
      });
    }
    return value as AliasDocument;
  }

  async #hydrate(stored: StoredRecord, documents?: Map<string, AliasDocument>): Promise<SnapshotRecord> {
    const aliases: string[] = [];
    for (const text of stored.aliases) {
      const name = parseAlias(text);
      const document =
        documents?.get(name.base) ??
        (documents === undefined ? await this.#aliasOrNone(name.base) : undefined);
      if (document?.tags[name.tag] === stored.id) aliases.push(text);
    }
    const { version: _, committed, ...rest } = stored;
    if (committed === undefined || !(await exists(this.#marker(stored.id)))) return { ...rest, aliases };
    const { state } = committed;
    const { drives, ...common } = state;
    const hydrated = (layers: readonly StoredLayer[]) => layers.map((layer) => this.#layer(layer));
    return {
      ...rest,
      aliases,
      committed: {
        ...committed,
        state: {
          ...common,
          deviceStatePath: join(this.#snapshots, stored.id, "vm_state.bin"),
          memory: {
            sizeBytes: state.memory.sizeBytes,
            layers: hydrated(state.memory.layers),
          },
          rootfs: {
            virtualSizeBytes: state.rootfs.virtualSizeBytes,
            lowers: hydrated(state.rootfs.lowers),
          },
          ...(drives === undefined
            ? {}
            : { drives: drives.map((drive) => ({ ...drive, lowers: hydrated(drive.lowers) })) }),
        },
      },
    };
  }

  #layer(layer: StoredLayer): LayerRef {
    return { file: this.#layerFile(layer.digest), ...layer };
  }

  #layerFile(digest: string): string {
    assert(DIGEST.test(digest), `layer digest ${digest} is sha256`);
    return join(this.#layers, `${digest.replace(":", "_")}.overlaybd.commit`);
  }

  #marker(id: string): string {
    return join(this.#snapshots, id, "commit");
  }

  // ---- writing ----------------------------------------------------------------------------------

  async put(record: SnapshotRecord): Promise<void> {
    await this.#prepare();
    using _ = await this.#lock("record", record.id);
    const before = await this.#readStored(record.id);
    await this.#store(record, before, before?.committed);
  }

  /** Record lock held. `before`: the record as it is stored now. */
  async #store(
    record: SnapshotRecord,
    before: StoredRecord | undefined,
    committed: StoredRecord["committed"] | undefined,
  ): Promise<void> {
    assert(isUuid(record.id), `snapshot id ${record.id} is a UUID`);
    const { committed: _, ...rest } = record;
    await this.#write({
      ...rest,
      // Candidates: the alias document decides. A name once bound stays listed until the record goes.
      aliases: [...new Set([...(before?.aliases ?? []), ...record.aliases])],
      ...(committed === undefined ? {} : { committed }),
    });
  }

  async #write(record: Omit<StoredRecord, "version">): Promise<void> {
    const stored: StoredRecord = { ...record, version: stateVersion(record.committed?.state.drives) };
    await writeDurable(join(this.#records, `${stored.id}.json`), `${JSON.stringify(stored, null, 2)}\n`);
  }

  async bindAlias(text: string, id: string): Promise<void> {
    await this.#prepare();
    const name = parseAlias(text);
    using _ = await this.#lock("alias", name.base);
    const record = await this.get(id);
    if (record === undefined) {
      throw new AenvError({
        code: "snapshot_not_found",
        status: 404,
        message: `snapshot ${id} was not found`,
      });
    }
    const document = await this.#readAlias(name.base);
    let tags: Record<string, string> = { ...document?.tags };
    if (document !== undefined && document.templateId !== record.templateId) {
      const holders = await Promise.all(Object.values(document.tags).map((holder) => this.get(holder)));
      const live = holders.filter((holder) => holder !== undefined);
      const bothSnapshots =
        record.source.kind === "sandbox" && live.every((holder) => holder.source.kind === "sandbox");
      if (live.length > 0 && !bothSnapshots) {
        throw new AenvError({
          code: "alias_conflict",
          status: 409,
          message: `the name ${name.base} belongs to template ${document.templateId}`,
          remediation: "choose another name or delete that template first",
        });
      }
      tags = {};
    }
    tags[name.tag] = record.id;
    // Candidate first, document last: a crash in between leaves a name that does not count.
    using __ = await this.#lock("record", record.id);
    const stored = await this.#readStored(record.id);
    if (stored === undefined) throw snapshotNotFound(id);
    const shown = formatName(name.base, name.tag);
    await this.#write({ ...stored, aliases: [...new Set([...stored.aliases, shown])] });
    const next: AliasDocument = { version: 1, alias: name.base, templateId: record.templateId, tags };
    await writeDurable(join(this.#aliases, `${name.base}.json`), `${JSON.stringify(next, null, 2)}\n`);
  }

  async commit(record: SnapshotRecord, state: CapturedState): Promise<SnapshotRecord> {
    await this.#prepare();
    assert(record.committed !== undefined, "a record to commit has what sandboxes are started with");
    const { state: _, ...startup } = record.committed;
    const dir = join(this.#snapshots, record.id);
    if (await exists(this.#marker(record.id))) {
      throw new AenvError({
        code: "snapshot_exists",
        status: 409,
        message: `snapshot ${record.id} was committed before and is never changed`,
      });
    }
    const pinned: (() => void)[] = [];
    this.#publishing.add(record.id);
    try {
      const take = async (layers: readonly LayerRef[]): Promise<StoredLayer[]> => {
        const stored: StoredLayer[] = [];
        for (const layer of layers)
          stored.push(await this.#takeLayer(layer, (file) => pinned.push(this.#pin([file]))));
        return stored;
      };
      const rootfsLayers = await take(state.rootfs.lowers);
      const memoryLayers = await take(state.memory.layers);
      const drives: StoredDrive[] = [];
      for (const drive of state.drives ?? []) drives.push({ ...drive, lowers: await take(drive.lowers) });
      await syncPath(this.#layers);

      await removeTree(dir);
      await mkdir(dir, { mode: 0o700 });
      await linkOrCopy(state.deviceStatePath, join(dir, "vm_state.bin"));
      const memory = { sizeBytes: state.memory.sizeBytes, layers: memoryLayers };
      const rootfs = { virtualSizeBytes: state.rootfs.virtualSizeBytes, lowers: rootfsLayers };
      const { deviceStatePath: __, drives: ___, ...rest } = state;
      const stored: StoredState = {
        ...rest,
        version: stateVersion(drives),
        ...{ memory, rootfs },
        ...(drives.length === 0 ? {} : { drives }),
      };
      const manifest = {
        version: 1,
        vmState: {},
        memory: { virtualSize: memory.sizeBytes },
        rootfs: { virtualSize: rootfs.virtualSizeBytes },
        attachedDrives: drives.map(({ lowers: _, virtualSizeBytes, ...drive }) => ({
          ...drive,
          virtualSize: virtualSizeBytes,
        })),
      };
      await writeDurable(join(dir, "manifest.json"), `${JSON.stringify(manifest)}\n`);
      await writeDurable(this.#marker(record.id), "");
      await syncPath(this.#snapshots);
      {
        using ____ = await this.#lock("record", record.id);
        await this.#store(record, await this.#readStored(record.id), { ...startup, state: stored });
      }
    } catch (error) {
      await removeTree(dir).catch((cleanup: unknown) =>
        this.#log.warn({ err: cleanup, dir }, "files of a failed publication could not be removed"),
      );
      throw error;
    } finally {
      this.#publishing.delete(record.id);
      for (const release of pinned) release();
    }
    if (record.source.kind === "template") {
      await writeDurable(
        join(this.#current, `${record.templateId}.json`),
        `${JSON.stringify({ id: record.id })}\n`,
      );
    }
    const committed = await this.get(record.id);
    assert(committed?.committed !== undefined, "a committed record can be read");
    return committed;
  }

  /** Gives the layer its content-addressed name; an existing one of the same size is taken as it. */
  async #takeLayer(layer: LayerRef, pin: (file: string) => void): Promise<StoredLayer> {
    const info = await statOr(layer.file, (cause) => {
      throw new AenvError({
        code: "layer_missing",
        message: `layer ${layer.file} of the snapshot to publish cannot be read`,
        cause,
      });
    });
    const size = Number(info.size);
    const digest = layer.digest ?? (await this.#digestOf(layer.file, info));
    const target = this.#layerFile(digest);
    pin(target);
    if (target !== layer.file && !(await linkOrCopy(layer.file, target))) {
      const present = await stat(target);
      if (present.size !== size) {
        throw new AenvError({
          code: "layer_integrity_mismatch",
          message: `${target} has ${present.size} bytes where ${size} are expected`,
          remediation:
            "the stored layer is damaged: remove the templates that use it, then the file, and build again",
        });
      }
      // Fresh again for the collector of another node, by its change time.
      await utimes(target, new Date(), present.mtime);
    }
    return { digest, size, ...(layer.uuid === undefined ? {} : { uuid: layer.uuid }) };
  }

  /**
   * Layers are never written again, and every link of one is the same inode: a sandbox that is snapshotted
   * again and again has each of its layers read once.
   */
  async #digestOf(file: string, info: BigIntStats): Promise<string> {
    const key = `${info.dev}:${info.ino}:${info.size}:${info.mtimeNs}`;
    const known = this.#digests.get(key);
    if (known !== undefined) return known;
    const digest = `sha256:${await sha256(file)}`;
    this.#digests.set(key, digest);
    if (this.#digests.size > MAX_DIGESTS) this.#digests.delete(this.#digests.keys().next().value!);
    return digest;
  }

  async delete(text: string): Promise<void> {
    await this.#prepare();
    const record = isUuid(text) ? await this.#readStored(text.toLowerCase()) : await this.#storedByName(text);
    if (record === undefined) return;
    await unlinkIfThere(this.#marker(record.id));
    for (const name of record.aliases) await this.unbindAlias(name, record.id);
    await removeTree(join(this.#snapshots, record.id));
    {
      using _ = await this.#lock("record", record.id);
      await unlinkIfThere(join(this.#records, `${record.id}.json`));
    }
    await syncPath(this.#records);
    const pointerPath = join(this.#current, `${record.templateId}.json`);
    const pointer = (await readOptional(pointerPath)) as { id?: string } | undefined;
    if (pointer?.id === record.id) await unlinkIfThere(pointerPath);
  }

  async #storedByName(text: string): Promise<StoredRecord | undefined> {
    const record = await this.resolve(text);
    return record === undefined ? undefined : this.#readStored(record.id);
  }

  async unbindAlias(text: string, id: string): Promise<void> {
    await this.#prepare();
    const name = parseAlias(text);
    using _ = await this.#lock("alias", name.base);
    const document = await this.#aliasOrNone(name.base);
    if (document?.tags[name.tag] !== id) return;
    const { [name.tag]: __, ...tags } = document.tags;
    const path = join(this.#aliases, `${name.base}.json`);
    if (Object.keys(tags).length === 0) await unlinkIfThere(path);
    else await writeDurable(path, `${JSON.stringify({ ...document, tags }, null, 2)}\n`);
    await syncPath(this.#aliases);
  }

  async collect(pinned: ReadonlySet<string>): Promise<{ removedFiles: number; removedBytes: number }> {
    await this.#prepare();
    const used = new Set<string>();
    const ids = new Set(await this.#recordIds());
    for (const id of ids) {
      // An unreadable record ends the sweep: what it refers to is not known, so nothing is garbage.
      const state = (await this.#readStored(id))?.committed?.state;
      for (const { digest } of state === undefined ? [] : stateLayers(state))
        used.add(this.#layerFile(digest));
    }
    const oldEnough = Date.now() - this.#graceMs;
    let removedFiles = 0;
    let removedBytes = 0;
    for (const name of await readdir(this.#layers)) {
      const file = join(this.#layers, name);
      if (used.has(file) || !(LAYER_FILE.test(name) || name.endsWith(".tmp"))) continue;
      const info = await stat(file);
      if (info.ctimeMs > oldEnough || pinned.has(file) || this.#pins.has(file)) continue;
      await unlink(file);
      removedFiles += 1;
      removedBytes += info.size;
    }
    for (const name of await readdir(this.#snapshots)) {
      if (ids.has(name) || this.#publishing.has(name) || (await this.#readStored(name)) !== undefined)
        continue;
      const dir = join(this.#snapshots, name);
      if ((await stat(dir)).ctimeMs > oldEnough) continue;
      await removeTree(dir);
    }
    if (removedFiles > 0) this.#log.info({ removedFiles, removedBytes }, "unused layers removed");
    return { removedFiles, removedBytes };
  }
}

function snapshotNotFound(id: string): AenvError {
  return new AenvError({ code: "snapshot_not_found", status: 404, message: `snapshot ${id} was not found` });
}

function filesOf(record: SnapshotRecord): string[] {
  const state = record.committed?.state;
  return state === undefined ? [] : stateLayers(state).map(({ file }) => file);
}

/** An empty document for one that is damaged, which is no valid one of any kind. */
async function readDocument(path: string): Promise<unknown> {
  const value = await readOptional(path).catch((error: unknown) => {
    if (error instanceof Error && error.cause instanceof SyntaxError) return {};
    throw error;
  });
  return value === undefined || (typeof value === "object" && value !== null) ? value : {};
}

async function readOptional(path: string): Promise<unknown> {
  try {
    return await readJson(path);
  } catch (error) {
    if (errorCode(error) === "ENOENT") return undefined;
    throw error;
  }
}

async function exists(path: string): Promise<boolean> {
  try {
    await stat(path);
    return true;
  } catch (error) {
    if (errorCode(error) === "ENOENT") return false;
    throw error;
  }
}

async function statOr(path: string, fail: (cause: unknown) => never): Promise<BigIntStats> {
  try {
    return await stat(path, { bigint: true });
  } catch (cause) {
    return fail(cause);
  }
}

async function unlinkIfThere(path: string): Promise<void> {
  try {
    await unlink(path);
  } catch (error) {
    if (errorCode(error) !== "ENOENT") throw error;
  }
}

async function sha256(path: string): Promise<string> {
  const hash = createHash("sha256");
  for await (const chunk of createReadStream(path, { highWaterMark: 1 << 20 })) hash.update(chunk as Buffer);
  return hash.digest("hex");
}

/** Repository on a POSIX file system; the layout is described above. */
export function createPosixRepository(options: PosixRepositoryOptions): SnapshotRepository {
  return new PosixRepository(options);
}
