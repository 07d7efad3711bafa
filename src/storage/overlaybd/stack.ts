import { dirname } from "node:path";
import { AenvError } from "../../lib/errors.ts";
import { newId } from "../../lib/ids.ts";
import { type Disk, hostDisk } from "./disk.ts";
import { badRequest } from "./errors.ts";
import { executeRead, locateRead, tryExecuteRead } from "./execute.ts";
import { cachedIndex, type IndexCacheOptions, indexKey, type LayerIdentity } from "./index-cache.ts";
import { openPooled } from "./layer-pool.ts";
import { checkVirtualSize } from "./layer-writer.ts";
import { EMPTY_INDEX, type FlatIndex, findFlat, mergeFlat } from "./lsmt/flat-index.ts";
import { BLOCK_SECTORS, type LsmtBlock, MAX_MAPPING_SECTORS, SECTOR_BYTES } from "./lsmt/format.ts";
import { readMergedIndex } from "./lsmt/layer.ts";
import { planRead, ReadPlan, visitFlat, visitStack } from "./lsmt/plan.ts";
import { Upper, type UpperTuning } from "./lsmt/upper.ts";
import { clearBlankUpper, createUpperFiles } from "./lsmt/upper-files.ts";
import { openLayer } from "./open-layer.ts";
import {
  lowersDigest,
  noteRecords,
  placeFresh,
  type RestackRecord,
  readRecords,
  recordPath,
  recoverRestack,
  removeFresh,
  runSteps,
  stageRecords,
  waitingUpper,
  writeRecords,
} from "./restack.ts";
import type { ReadSource } from "./source.ts";
import { remapTags } from "./swap.ts";
import type {
  CompactProgress,
  ImageConfig,
  LayerRef,
  LayerStack,
  PendingFlush,
  RawRange,
  RestackSteps,
  StackStats,
  UpperRef,
} from "./types.ts";

const MAX_LOWERS = 255;
/** A sparse upper keeps data in whole blocks of the file system. */
const SPARSE_BLOCK_SECTORS = BLOCK_SECTORS;
const COPY_BYTES = 1 << 20;
/** Extents are looked up in windows of this many sectors, so that a generator needs no callback into itself. */
const EXTENT_WINDOW_SECTORS = 1 << 21;

interface Lower {
  readonly ref: LayerRef;
  readonly source: ReadSource;
  readonly uuid: string | undefined;
  /** Lets go of the source: others may use it. */
  readonly use: Disposable;
}

class Stack implements LayerStack {
  readonly #disk: Disk;
  readonly #tuning: UpperTuning | undefined;
  #virtualSizeBytes: number;
  readonly #warnings: string[];
  readonly #lowers: Lower[];
  #base: FlatIndex;
  #upper: Upper | undefined;
  #broken: AenvError | undefined;
  #open = true;
  /** Reads under way, oldest first, and layers that may be closed when those before them have ended. */
  readonly #pins = new Set<number>();
  #nextPin = 0;
  readonly #retired: { readonly before: number; readonly use: Disposable }[] = [];
  readonly #plan = new ReadPlan();

  constructor(
    options: { readonly disk: Disk; readonly tuning?: UpperTuning | undefined },
    virtualSizeBytes: number,
    lowers: Lower[],
    base: FlatIndex,
    upper: Upper | undefined,
    warnings: readonly string[],
  ) {
    this.#disk = options.disk;
    this.#tuning = options.tuning;
    this.#virtualSizeBytes = virtualSizeBytes;
    this.#lowers = lowers;
    this.#base = base;
    this.#upper = upper;
    this.#warnings = [...warnings, ...(upper?.warnings ?? [])];
  }

  get virtualSizeBytes(): number {
    return this.#virtualSizeBytes;
  }

  get readOnly(): boolean {
    return this.#upper === undefined;
  }

  get image(): ImageConfig {
    return {
      lowers: this.#lowers.map((lower) => lower.ref),
      ...(this.#upper === undefined ? {} : { upper: this.#upper.ref }),
      virtualSizeBytes: this.virtualSizeBytes,
    };
  }

  #check(offsetBytes: number, lengthBytes: number): void {
    if (!this.#open) throw new Error("layer stack: used after close");
    if (this.#broken !== undefined) throw this.#broken;
    if (
      !(offsetBytes >= 0 && lengthBytes >= 0) ||
      offsetBytes % SECTOR_BYTES !== 0 ||
      lengthBytes % SECTOR_BYTES !== 0
    ) {
      throw badRequest(
        "invalid_range",
        `range ${offsetBytes}+${lengthBytes} is not in whole sectors of 512 bytes`,
      );
    }
    if (offsetBytes + lengthBytes > this.virtualSizeBytes) {
      throw badRequest(
        "out_of_range",
        `range ${offsetBytes}+${lengthBytes} ends behind the disk of ${this.virtualSizeBytes} bytes`,
      );
    }
  }

  #writable(): Upper {
    if (this.#upper === undefined) throw badRequest("read_only", "the layer stack is read-only");
    return this.#upper;
  }

  read(offsetBytes: number, target: Uint8Array): void {
    this.#check(offsetBytes, target.byteLength);
    this.#readSectors(offsetBytes / SECTOR_BYTES, target, target.byteLength / SECTOR_BYTES);
  }

  #readSectors(sector: number, target: Uint8Array, sectors: number): void {
    this.#planSectors(sector, sectors);
    executeRead(this.#plan, this.#sourceOf, target);
  }

  #planSectors(sector: number, sectors: number): void {
    planRead(this.#upper?.index, this.#lowers.length, this.#base, sector, sectors, this.#plan);
  }

  tryRead(offsetBytes: number, target: Uint8Array): boolean {
    this.#check(offsetBytes, target.byteLength);
    this.#planSectors(offsetBytes / SECTOR_BYTES, target.byteLength / SECTOR_BYTES);
    return tryExecuteRead(this.#plan, this.#sourceOf, target);
  }

  locate(
    offsetBytes: number,
    lengthBytes: number,
    visit: (fd: number, offsetBytes: number, lengthBytes: number, name: string) => void,
  ): void {
    this.#check(offsetBytes, lengthBytes);
    this.#planSectors(offsetBytes / SECTOR_BYTES, lengthBytes / SECTOR_BYTES);
    locateRead(this.#plan, this.#sourceOf, visit);
  }

  rawRange(offsetBytes: number, lengthBytes: number): RawRange | undefined {
    this.#check(offsetBytes, lengthBytes);
    this.#planSectors(offsetBytes / SECTOR_BYTES, lengthBytes / SECTOR_BYTES);
    const layer = this.#plan.layers[0]!;
    if (this.#plan.count !== 1 || layer < 0 || layer >= this.#lowers.length) return undefined;
    const { source } = this.#lowers[layer]!;
    if (source.direct === undefined) return undefined;
    const { fd, baseBytes } = source.direct;
    return {
      layer: source,
      fd,
      offsetBytes: baseBytes + this.#plan.moffsets[0]! * SECTOR_BYTES,
      name: source.name,
    };
  }

  readonly #sourceOf = (layer: number): ReadSource => this.#source(layer);

  #source(layer: number): ReadSource {
    const source = layer === this.#lowers.length ? this.#upper?.source : this.#lowers[layer]?.source;
    if (source === undefined)
      throw new Error(`internal error, please report: no layer ${layer} in the stack`);
    return source;
  }

  write(offsetBytes: number, source: Uint8Array): void {
    this.#check(offsetBytes, source.byteLength);
    const upper = this.#writable();
    const sector = offsetBytes / SECTOR_BYTES;
    const sectors = source.byteLength / SECTOR_BYTES;
    if (upper.mode === "sparse") this.#writeSparse(upper, sector, source, sectors);
    else upper.write(sector, source, 0, sectors);
  }

  /**
   * A sparse upper finds its data again by what is allocated, in whole file system blocks: the rest of a
   * block that is written in part must be there, too, or it would hide the lowers with zeros later.
   */
  #writeSparse(upper: Upper, sector: number, source: Uint8Array, sectors: number): void {
    const end = sector + sectors;
    const diskEnd = this.virtualSizeBytes / SECTOR_BYTES;
    const first = sector - (sector % SPARSE_BLOCK_SECTORS);
    const last = Math.min(diskEnd, Math.ceil(end / SPARSE_BLOCK_SECTORS) * SPARSE_BLOCK_SECTORS);
    if (first === sector && last === end) {
      upper.write(sector, source, 0, sectors);
      return;
    }
    const whole = new Uint8Array(new ArrayBuffer((last - first) * SECTOR_BYTES));
    this.#readSectors(first, whole, last - first);
    whole.set(source, (sector - first) * SECTOR_BYTES);
    upper.write(first, whole, 0, last - first);
  }

  discard(offsetBytes: number, lengthBytes: number): void {
    this.#check(offsetBytes, lengthBytes);
    const upper = this.#writable();
    const sector = offsetBytes / SECTOR_BYTES;
    const sectors = lengthBytes / SECTOR_BYTES;
    if (sectors === 0) return;
    if (upper.mode === "sparse") this.#discardSparse(upper, sector, sectors);
    else if (this.#lowers.length === 0) upper.discard(sector, sectors);
    else this.#discardMapped(upper, sector, sectors);
  }

  /** Over lowers a mapping is needed only where something is mapped: discarding a blank disk costs nothing. */
  #discardMapped(upper: Upper, sector: number, sectors: number): void {
    for (let done = 0; done < sectors; ) {
      const piece = Math.min(sectors - done, MAX_MAPPING_SECTORS);
      let hasData = false;
      const from = sector + done;
      visitStack(upper.index, this.#lowers.length, this.#base, from, piece, (_o, _l, _layer, _m, zeroed) => {
        if (!zeroed) hasData = true;
      });
      if (hasData) upper.discard(from, piece);
      done += piece;
    }
  }

  /** Holes show the lowers when the file is opened again: over data of lowers real zeros are written. */
  #discardSparse(upper: Upper, sector: number, sectors: number): void {
    const covered: [offset: number, length: number][] = [];
    visitFlat(this.#base, sector, sectors, (offset, length, _layer, _moffset, zeroed) => {
      if (!zeroed) covered.push([offset, length]);
    });
    let position = sector;
    const zeros = new Uint8Array(new ArrayBuffer(covered.length > 0 ? COPY_BYTES : 0));
    for (const [offset, length] of covered) {
      if (offset > position) upper.discard(position, offset - position);
      for (let done = 0; done < length; ) {
        const piece = Math.min(length - done, COPY_BYTES / SECTOR_BYTES);
        this.#writeSparse(upper, offset + done, zeros.subarray(0, piece * SECTOR_BYTES), piece);
        done += piece;
      }
      position = offset + length;
    }
    if (position < sector + sectors) upper.discard(position, sector + sectors - position);
  }

  flush(): void {
    this.#check(0, 0);
    this.#upper?.flush();
  }

  beginFlush(): PendingFlush | undefined {
    this.#check(0, 0);
    return this.#upper?.beginFlush();
  }

  compactStep(budgetBytes: number): CompactProgress {
    this.#check(0, 0);
    if (!(budgetBytes > 0)) throw badRequest("invalid_budget", `compaction budget of ${budgetBytes} bytes`);
    return this.#upper?.compactStep(budgetBytes) ?? { done: true, movedBytes: 0, flushNeeded: false };
  }

  pin(): () => void {
    const upper = this.#upper?.pin();
    const pin = this.#nextPin++;
    this.#pins.add(pin);
    return () => {
      upper?.();
      this.#pins.delete(pin);
      this.#closeRetired();
    };
  }

  /** Closes layers that were swapped out, once the reads that may use them have ended. */
  #closeRetired(): void {
    const oldest = this.#pins.values().next().value ?? Number.POSITIVE_INFINITY;
    while (this.#retired.length > 0 && this.#retired[0]!.before <= oldest) {
      this.#retired.shift()?.use[Symbol.dispose]();
    }
  }

  grow(virtualSizeBytes: number): void {
    this.#check(0, 0);
    const upper = this.#writable();
    checkVirtualSize(virtualSizeBytes, SECTOR_BYTES);
    if (virtualSizeBytes < this.#virtualSizeBytes) {
      throw badRequest(
        "invalid_virtual_size",
        `the disk has ${this.#virtualSizeBytes} bytes and cannot shrink to ${virtualSizeBytes}`,
      );
    }
    if (virtualSizeBytes === this.#virtualSizeBytes) return;
    upper.grow(virtualSizeBytes);
    this.#virtualSizeBytes = virtualSizeBytes;
  }

  swapLowers(swap: {
    readonly first: number;
    readonly count: number;
    readonly files?: readonly string[];
    readonly merged: LayerRef;
  }): LayerRef[] {
    this.#check(0, 0);
    const { first, count, files, merged } = swap;
    if (!(first >= 0 && count >= 1 && first + count <= this.#lowers.length)) {
      throw badRequest(
        "invalid_range",
        `layers ${first}..${first + count - 1} of a stack of ${this.#lowers.length}`,
      );
    }
    const present = this.#lowers.slice(first, first + count).map(({ ref }) => ref.file);
    if (files !== undefined && !Bun.deepEquals(files, present)) {
      throw new AenvError({
        code: "layers_differ",
        status: 409,
        message: `layers ${first}..${first + count - 1} of the stack are ${present.join(", ")}, not ${files.join(", ")}`,
        remediation: "ask for the stack's present layers and plan the replacement anew",
      });
    }
    const opened = openLayer(this.#disk, merged.file, first);
    try {
      const base = remapTags(this.#base, first, count, opened.index);
      const uuid = opened.blocks.trailer.uuid ?? opened.blocks.header.uuid;
      if (first + count === this.#lowers.length) this.#upper?.setParent(uuid);
      const out = this.#lowers.splice(first, count, {
        ref: merged,
        source: opened.source,
        uuid,
        use: opened,
      });
      this.#base = base;
      this.#retired.push(...out.map((lower) => ({ before: this.#nextPin, use: lower.use })));
      this.#closeRetired();
      return out.map((lower) => lower.ref);
    } catch (error) {
      opened[Symbol.dispose]();
      throw error;
    }
  }

  *mappedExtents(
    layers: "all" | "upper",
    fromBytes = 0,
    toBytes = this.virtualSizeBytes,
  ): Generator<{ offsetBytes: number; lengthBytes: number; zeroed: boolean }> {
    this.#check(0, 0);
    type Extent = { offset: number; length: number; zeroed: boolean };
    const upper = this.#upper?.index;
    const base = layers === "all" ? this.#base : EMPTY_INDEX;
    const total = Math.ceil(Math.min(toBytes, this.virtualSizeBytes) / SECTOR_BYTES);
    const out = (extent: Extent) => ({
      offsetBytes: extent.offset * SECTOR_BYTES,
      lengthBytes: extent.length * SECTOR_BYTES,
      zeroed: extent.zeroed,
    });
    let pending: Extent | undefined;
    let start = Math.floor(fromBytes / SECTOR_BYTES);
    while (start < total) {
      // Straight to the next mapping, then window by window: the disk may be far bigger than its content.
      const inBase = findFlat(base, start);
      const next = Math.min(
        inBase < base.count ? base.offsets[inBase]! : total,
        upper?.nextMapped(start) ?? total,
      );
      if (next >= total) break;
      start = Math.max(start, next);
      const sectors = Math.min(EXTENT_WINDOW_SECTORS, total - start);
      const found: Extent[] = [];
      visitStack(
        upper,
        this.#lowers.length,
        base,
        start,
        sectors,
        (offset, length, _layer, _moffset, zeroed) => {
          const last = found.at(-1) ?? pending;
          if (last !== undefined && last.offset + last.length === offset && last.zeroed === zeroed) {
            last.length += length;
          } else {
            found.push({ offset, length, zeroed });
          }
        },
      );
      for (const extent of found) {
        if (pending !== undefined) yield out(pending);
        pending = extent;
      }
      start += sectors;
    }
    if (pending !== undefined) yield out(pending);
  }

  restack(sealedPath: string, freshUpper: UpperRef): LayerRef {
    return runSteps(this.restackSteps(sealedPath, freshUpper));
  }

  *restackSteps(sealedPath: string, freshUpper: UpperRef): RestackSteps {
    const { upper, uuid } = this.#checkSealable(sealedPath);
    const fresh: UpperRef = { ...freshUpper, mode: freshUpper.mode ?? upper.mode };
    try {
      return yield* this.#restackOnto(upper, uuid, sealedPath, fresh);
    } catch (error) {
      // A way back that failed, too: what is on disk is for recovery to sort out, not for more writes.
      throw error instanceof SuppressedError ? this.#terminal(sealedPath, error) : error;
    }
  }

  seal(sealedPath: string): LayerRef {
    const { upper, uuid } = this.#checkSealable(sealedPath);
    try {
      return this.#sealOnly(upper, uuid, sealedPath);
    } catch (error) {
      throw error instanceof SuppressedError ? this.#terminal(sealedPath, error) : error;
    }
  }

  #checkSealable(sealedPath: string): { upper: Upper; uuid: string } {
    this.#check(0, 0);
    const upper = this.#writable();
    const old = upper.ref;
    if (this.#lowers.length + 1 > MAX_LOWERS) {
      throw badRequest(
        "too_many_layers",
        `a stack has at most ${MAX_LOWERS} lowers`,
        "merge some of its layers into one first",
      );
    }
    if (this.#disk.exists(sealedPath)) {
      throw badRequest(
        "layer_exists",
        `${sealedPath} exists`,
        "layers are never overwritten: choose another path",
      );
    }
    const directory = dirname(sealedPath);
    if (!this.#disk.exists(directory)) throw badRequest("directory_missing", `${directory} does not exist`);
    if (this.#disk.deviceOf(directory) !== this.#disk.deviceOf(dirname(old.data))) {
      throw badRequest(
        "cross_device",
        `${sealedPath} is on another file system than ${old.data}`,
        "sealing renames the data file: choose a path on its file system",
      );
    }
    const uuid = upper.uuid;
    if (uuid === undefined) {
      throw badRequest(
        "upper_without_uuid",
        `upper ${old.data} has no uuid, so an interrupted sealing could not be told apart`,
        "commit it into a new layer instead",
      );
    }
    return { upper, uuid };
  }

  /** See restack.ts for the order of things, and for what opening makes of each state that a crash leaves. */
  *#restackOnto(upper: Upper, uuid: string, sealedPath: string, fresh: UpperRef): RestackSteps {
    const old = upper.ref;
    const waiting = waitingUpper(fresh, old);
    for (const [file, final] of [
      [waiting.data, fresh.data],
      [waiting.index, fresh.index],
    ]) {
      if (file === undefined) continue;
      // A `.fresh` file is what an earlier attempt left; anything else is somebody's.
      if (file !== final) this.#disk.removeIfPresent(file);
      else if (this.#disk.exists(file)) {
        throw badRequest("upper_exists", `fresh upper ${file} exists`, "choose paths that are free");
      }
    }
    const records = readRecords(this.#disk, old);
    const record: RestackRecord = {
      lowers: lowersDigest(this.#lowers.map((lower) => lower.ref)),
      sealedPath,
      sealedUuid: uuid,
      fresh,
      freshUuid: newId(),
      bootId: this.#disk.bootId(),
    };
    using undo = new DisposableStack();
    undo.defer(() => writeRecords(this.#disk, old, records));
    if (!noteRecords(this.#disk, old, [...records, record])) {
      const staged = stageRecords(this.#disk, old, [...records, record]);
      try {
        yield [staged.file];
        staged.place();
      } catch (error) {
        staged.discard();
        throw error;
      }
    }
    undo.defer(() => removeFresh(this.#disk, fresh, old));
    createUpperFiles(this.#disk, waiting, {
      virtualSizeBytes: this.virtualSizeBytes,
      parentUuid: uuid,
      uuid: record.freshUuid,
      durability: "unsynced",
    });
    const sealed = upper.sealInPlace();
    undo.defer(sealed.undo);
    const next = new Upper(this.#disk, waiting, { readOnly: false, tuning: this.#tuning });
    const ref: LayerRef = { file: sealedPath, size: upper.fileSizeBytes(), uuid };
    const base = this.#base;
    this.#base = mergeFlat(sealed.index(this.#lowers.length), base);
    this.#lowers.push({ ref, source: upper.source, uuid, use: upper.source });
    this.#upper = next;
    // From here on writes go to the fresh upper: there is a way back as long as none has come.
    undo.defer(() => {
      this.#upper = upper;
      this.#lowers.pop();
      this.#base = base;
      next[Symbol.dispose]();
    });
    let placing = false;
    try {
      try {
        yield [sealed.file];
      } catch (error) {
        upper.syncFailed(error);
        throw error;
      }
      this.#disk.renameNoReplace(old.data, sealedPath);
      undo.defer(() => this.#disk.renameNoReplace(sealedPath, old.data));
      placing = true;
      placeFresh(this.#disk, fresh, old);
      next.moved(fresh);
      using names = new DisposableStack();
      const directories = this.#disk.directoriesOf(
        ...[sealedPath, old.data, fresh.data, fresh.index].filter((file) => file !== undefined),
      );
      for (const directory of directories) names.use(directory);
      yield directories;
    } catch (error) {
      if (!placing && next.untouched) throw error;
      undo.move();
      upper.handOverData();
      throw this.#terminal(sealedPath, error);
    }
    undo.move();
    upper.handOverData();
    return ref;
  }

  #sealOnly(upper: Upper, uuid: string, sealedPath: string): LayerRef {
    const old = upper.ref;
    using undo = new DisposableStack();
    const sealed = upper.sealInPlace();
    undo.defer(sealed.undo);
    try {
      sealed.file.datasync();
    } catch (error) {
      upper.syncFailed(error);
      throw error;
    }
    const size = upper.fileSizeBytes();
    // The way back is a rename, too.
    undo.defer(() => upper.moved(old));
    this.#disk.renameNoReplace(old.data, sealedPath);
    undo.defer(() => this.#disk.renameNoReplace(sealedPath, old.data));
    this.#disk.syncDirectoriesOf(sealedPath, old.data);
    undo.move();
    const ref: LayerRef = { file: sealedPath, size, uuid };
    this.#base = mergeFlat(sealed.index(this.#lowers.length), this.#base);
    upper.handOverData();
    this.#lowers.push({ ref, source: upper.source, uuid, use: upper.source });
    this.#upper = undefined;
    if (old.index !== undefined) this.#disk.removeIfPresent(old.index);
    this.#disk.removeIfPresent(recordPath(old));
    return ref;
  }

  #terminal(sealedPath: string, cause: unknown): AenvError {
    this.#broken = new AenvError({
      code: "restack_terminal",
      message: `restack: the layer was sealed as ${sealedPath} but the fresh upper could not take its place`,
      remediation: "open the image again: that completes the restack",
      cause,
    });
    return this.#broken;
  }

  stats(): StackStats {
    return {
      upperDataBytes: this.#upper?.dataBytes ?? 0,
      upperLiveBytes: (this.#upper?.index.dataSectors ?? 0) * SECTOR_BYTES,
      lowerCount: this.#lowers.length,
      upperIndexBytes: this.#upper?.indexBytes ?? 0,
      compactionDue: this.#upper?.compactionDue ?? false,
      upperMappings: this.#upper?.index.count ?? 0,
      lowerMappings: this.#base.count,
      warnings: this.#warnings,
    };
  }

  [Symbol.dispose](): void {
    if (!this.#open) return;
    this.#open = false;
    for (const { use } of [...this.#retired, ...this.#lowers]) use[Symbol.dispose]();
    this.#upper?.[Symbol.dispose]();
  }
}

/** Opens the lowers: sources, sizes and one merged index whose tags are positions in the list. */
export function openLowers(
  disk: Disk,
  refs: readonly LayerRef[],
  cache?: IndexCacheOptions,
): {
  lowers: Lower[];
  base: FlatIndex;
  /** Of the index cache. */
  warnings: string[];
  inheritedSizeBytes: number;
  topUuid: string | undefined;
  bottomParentUuid: string | undefined;
} & Disposable {
  if (refs.length > MAX_LOWERS) {
    throw badRequest(
      "too_many_layers",
      `${refs.length} lowers, at most ${MAX_LOWERS} are possible`,
      "merge some",
    );
  }
  using cleanup = new DisposableStack();
  const lowers: Lower[] = [];
  const trailers: LsmtBlock[] = [];
  const identities: LayerIdentity[] = [];
  let inheritedSizeBytes = 0;
  let topUuid: string | undefined;
  let bottomParentUuid: string | undefined;
  for (const [number, ref] of refs.entries()) {
    const layer = cleanup.use(openPooled(disk, ref.file));
    const { header, trailer } = layer.blocks;
    const uuid = trailer.uuid ?? header.uuid;
    if (trailer.virtualSizeBytes !== 0) inheritedSizeBytes = trailer.virtualSizeBytes;
    if (number === 0) bottomParentUuid = header.parentUuid ?? trailer.parentUuid;
    topUuid = uuid;
    lowers.push({ ref, source: layer.source, uuid, use: layer });
    trailers.push(trailer);
    identities.push({
      file: layer.identity,
      uuid,
      sizeBytes: layer.source.sizeBytes,
      virtualSizeBytes: trailer.virtualSizeBytes,
      indexOffsetBytes: trailer.indexOffsetBytes,
      indexSize: trailer.indexSize,
    });
  }
  const readAll = () =>
    readMergedIndex(lowers.map(({ source }, number) => ({ source, trailer: trailers[number]! })));
  const warnings: string[] = [];
  const warn = (message: string) => warnings.push(message);
  const base =
    lowers.length === 0
      ? EMPTY_INDEX
      : cachedIndex(cache, indexKey(identities), lowers.length, readAll, warn);
  const owned = cleanup.move();
  return {
    lowers,
    base,
    warnings,
    inheritedSizeBytes,
    topUuid,
    bottomParentUuid,
    [Symbol.dispose]: () => owned[Symbol.dispose](),
  };
}

export interface StackOptions {
  /** Absent: the host's file system. */
  readonly disk?: Disk;
  readonly tuning?: UpperTuning;
  /** Absent: merged indexes are shared within the thread, but kept nowhere. */
  readonly indexCache?: IndexCacheOptions;
}

/** See OverlaybdRoom.openStack. */
export function openStack(given: ImageConfig, options: StackOptions = {}): LayerStack {
  const { disk = hostDisk, tuning } = options;
  if (given.virtualSizeBytes !== undefined) checkVirtualSize(given.virtualSizeBytes, SECTOR_BYTES);
  const blank = given.upper === undefined ? undefined : clearBlankUpper(disk, given.upper);
  const { config, warnings } = recoverRestack(disk, given);
  if (blank !== undefined) warnings.push(blank);
  using cleanup = new DisposableStack();
  const opened = cleanup.use(openLowers(disk, config.lowers, options.indexCache));
  warnings.push(...opened.warnings);
  const wanted = config.virtualSizeBytes ?? opened.inheritedSizeBytes;
  const noSize = () =>
    badRequest(
      "virtual_size_missing",
      "no layer has a size and the image config gives none",
      "set virtualSizeBytes in the image config",
    );
  let upper: Upper | undefined;
  if (config.upper !== undefined) {
    if (!disk.exists(config.upper.data)) {
      if (wanted === 0) throw noSize();
      createUpperFiles(disk, config.upper, {
        virtualSizeBytes: wanted,
        parentUuid: opened.topUuid,
        durability: "unsynced",
      });
    }
    upper = cleanup.use(
      new Upper(disk, config.upper, { readOnly: false, inheritedSizeBytes: wanted, tuning }),
    );
  }
  // Asked to be bigger than it is: what `grow` does, or had begun.
  if (upper !== undefined && config.virtualSizeBytes !== undefined) {
    if (upper.virtualSizeBytes < config.virtualSizeBytes) upper.grow(config.virtualSizeBytes);
  }
  const size = upper === undefined || upper.virtualSizeBytes === 0 ? wanted : upper.virtualSizeBytes;
  if (size === 0) throw noSize();
  if (config.virtualSizeBytes !== undefined && config.virtualSizeBytes !== size) {
    throw badRequest(
      "virtual_size_mismatch",
      `the image config wants a disk of ${config.virtualSizeBytes} bytes, the upper ${config.upper?.data} has ${size}`,
    );
  }
  if (
    upper?.parentUuid !== undefined &&
    opened.topUuid !== undefined &&
    upper.parentUuid !== opened.topUuid
  ) {
    warnings.push(
      `upper ${upper.ref.data} was made over layer ${upper.parentUuid}, the topmost lower is ${opened.topUuid}`,
    );
  }
  const stack = new Stack({ disk, tuning }, size, opened.lowers, opened.base, upper, warnings);
  cleanup.move();
  return stack;
}

/** See OverlaybdRoom.createUpper. */
export function createUpper(upper: UpperRef, virtualSizeBytes: number, disk: Disk = hostDisk): void {
  checkVirtualSize(virtualSizeBytes, 0);
  if (upper.mode === "sparse" && virtualSizeBytes === 0) {
    throw badRequest("invalid_virtual_size", "a sparse upper needs its size when it is created");
  }
  createUpperFiles(disk, upper, { virtualSizeBytes });
  disk.removeIfPresent(recordPath(upper));
}
