import {
  closeSync,
  mkdirSync,
  openSync,
  readdirSync,
  renameSync,
  statSync,
  unlinkSync,
  utimesSync,
} from "node:fs";
import { allocateBig, mapLocked } from "../../../ffi/bigmem.ts";
import { crc32cLanes } from "../../../ffi/codec.ts";
import { fileSize, pread, pwrite } from "../../../ffi/io.ts";
import { isWide } from "../../../ffi/lsmt.ts";
import { columnsIn, type FlatIndex, mappingBytes, newColumns } from "./lsmt/flat-index.ts";
import { MAX_MAPPINGS } from "./lsmt/format.ts";

/**
 * Merged indexes of lists of layers, so that an image of many layers opens without reading and merging the
 * index of each: shared between the stacks of a thread while one of them is open, and kept in files for the next
 * process. An entry is named by what it was made of (`indexKey`); nothing depends on it being there, so whatever
 * is wrong with a file is a miss, and files are not synced.
 *
 * File `<key>.aidx`: a block of 4096 bytes: "AENVIDX1", u32 version 3, u32 number of layers, f64 number of mappings,
 * four u32 checksums of the body (crc32cLanes), u32 1 when sectors are wide, 20 zeros, 32 bytes of key, zeros; body:
 * the arrays of FlatIndex one after the other, offsets and moffsets (u32, wide: f64), lengths (u16), tags (u16).
 * Little-endian, as the arrays lie in memory: a file is checked and then used in place, from the page cache, whatever
 * the number of threads. Files are never written to once they have their name.
 */
export interface IndexCacheOptions {
  readonly directory: string;
  /** All files together; the least recently used go first. Default 512 MiB. */
  readonly limitBytes?: number;
}

const MAGIC = Uint8Array.fromHex("41454e5649445831");
const HEADER_BYTES = 4096;
const SUMS_OFFSET = 24;
const WIDE_OFFSET = 40;
const KEY_OFFSET = 64;
const VERSION = 3;
const SUFFIX = ".aidx";
const DEFAULT_LIMIT_BYTES = 512 * 1024 * 1024;
/** Smaller ones are made again as fast as they are read. */
const LEAST_MAPPINGS = 2048;

/** What tells one layer's index from any other. */
export interface LayerIdentity {
  /** Device, inode, size and time of change of the file, see Disk. */
  readonly file: string;
  readonly uuid: string | undefined;
  readonly sizeBytes: number;
  readonly virtualSizeBytes: number;
  readonly indexOffsetBytes: number;
  readonly indexSize: number;
}

/** Name of the merged index of these layers, bottom to top. */
export function indexKey(layers: readonly LayerIdentity[]): string {
  const hash = new Bun.CryptoHasher("sha256").update(`agentenv merged index ${VERSION}\n`);
  for (const layer of layers) {
    const { file, uuid = "", sizeBytes, virtualSizeBytes, indexOffsetBytes, indexSize } = layer;
    hash.update(JSON.stringify([file, uuid, sizeBytes, virtualSizeBytes, indexOffsetBytes, indexSize]));
  }
  return hash.digest("hex");
}

/** Indexes of stacks that are open on this thread; they are never changed. */
const open = new Map<string, WeakRef<FlatIndex>>();

let sweepAt = 64;

function remember(key: string, index: FlatIndex): void {
  open.set(key, new WeakRef(index));
  if (open.size < sweepAt) return;
  for (const [known, ref] of open) if (ref.deref() === undefined) open.delete(known);
  sweepAt = Math.max(64, 2 * open.size);
}

/** Lets go of what is shared in memory, so that the next open has to look for a file; for tests. */
export function forgetSharedIndexes(): void {
  open.clear();
}

/** The columns one behind the other. */
function bodyOf(index: FlatIndex): Uint8Array {
  const columns = newColumns(index.count, isWide(index));
  columns.offsets.set(index.offsets);
  columns.moffsets.set(index.moffsets);
  columns.lengths.set(index.lengths);
  columns.tags.set(index.tags);
  return new Uint8Array(columns.offsets.buffer);
}

/** The whole file: mapped where the kernel lets us keep it in memory, else read. */
function fileContent(fd: number, file: string, sizeBytes: number): ArrayBuffer | undefined {
  const mapped = mapLocked(fd, sizeBytes);
  if (mapped !== undefined) return mapped;
  const buffer = allocateBig(sizeBytes);
  return pread(fd, new Uint8Array(buffer), 0, sizeBytes, 0, file) === sizeBytes ? buffer : undefined;
}

function readEntry(fd: number, file: string, key: string, layers: number): FlatIndex | undefined {
  const header = new Uint8Array(new ArrayBuffer(HEADER_BYTES));
  if (pread(fd, header, 0, HEADER_BYTES, 0, file) !== HEADER_BYTES) return undefined;
  const view = new DataView(header.buffer);
  const count = view.getFloat64(16, true);
  const wide = view.getUint32(WIDE_OFFSET, true);
  const sizeBytes = HEADER_BYTES + count * mappingBytes(wide === 1);
  if (
    !MAGIC.every((value, i) => header[i] === value) ||
    view.getUint32(8, true) !== VERSION ||
    view.getUint32(12, true) !== layers ||
    wide > 1 ||
    !(Number.isInteger(count) && count >= 0 && count <= MAX_MAPPINGS) ||
    header.subarray(KEY_OFFSET, KEY_OFFSET + 32).toHex() !== key ||
    fileSize(fd, file) !== sizeBytes
  ) {
    return undefined;
  }
  const content = fileContent(fd, file, sizeBytes);
  if (content === undefined) return undefined;
  const sums = crc32cLanes(new Uint8Array(content, HEADER_BYTES));
  if (sums.some((sum, i) => sum !== view.getUint32(SUMS_OFFSET + 4 * i, true))) return undefined;
  return { count, ...columnsIn(content, HEADER_BYTES, count, wide === 1) };
}

function load(cache: IndexCacheOptions, key: string, layers: number): FlatIndex | undefined {
  const file = `${cache.directory}/${key}${SUFFIX}`;
  let fd: number;
  try {
    fd = openSync(file, "r");
  } catch (error) {
    if (error instanceof Error && "code" in error && error.code === "ENOENT") return undefined;
    throw error;
  }
  try {
    const index = readEntry(fd, file, key, layers);
    const now = new Date();
    // The time of last use, for `prune`.
    if (index !== undefined) utimesSync(file, now, now);
    return index;
  } finally {
    closeSync(fd);
  }
}

function store(cache: IndexCacheOptions, key: string, layers: number, index: FlatIndex): void {
  mkdirSync(cache.directory, { recursive: true, mode: 0o700 });
  const file = `${cache.directory}/${key}${SUFFIX}`;
  const temporary = `${file}.${process.pid}.${crypto.randomUUID().slice(0, 8)}`;
  const body = bodyOf(index);
  const header = new Uint8Array(new ArrayBuffer(HEADER_BYTES));
  const view = new DataView(header.buffer);
  header.set(MAGIC);
  view.setUint32(8, VERSION, true);
  view.setUint32(12, layers, true);
  view.setFloat64(16, index.count, true);
  for (const [i, sum] of crc32cLanes(body).entries()) view.setUint32(SUMS_OFFSET + 4 * i, sum, true);
  view.setUint32(WIDE_OFFSET, isWide(index) ? 1 : 0, true);
  header.set(Uint8Array.fromHex(key), KEY_OFFSET);
  const fd = openSync(temporary, "wx", 0o600);
  try {
    let position = 0;
    for (const part of [header, body]) {
      pwrite(fd, part, 0, part.byteLength, position, temporary);
      position += part.byteLength;
    }
    renameSync(temporary, file);
  } catch (error) {
    unlinkSync(temporary);
    throw error;
  } finally {
    closeSync(fd);
  }
  prune(cache, file);
}

/** Removes the least recently used files above the limit, and what a killed process left half written. */
function prune(cache: IndexCacheOptions, keep: string): void {
  const entries: { file: string; size: number; usedMs: number }[] = [];
  for (const name of readdirSync(cache.directory)) {
    if (!name.includes(SUFFIX)) continue;
    const file = `${cache.directory}/${name}`;
    const stat = statSync(file, { throwIfNoEntry: false });
    if (stat === undefined) continue;
    const stale = !name.endsWith(SUFFIX) && Date.now() - stat.mtimeMs > 600_000;
    entries.push({ file, size: stat.size, usedMs: stale ? 0 : stat.mtimeMs });
  }
  entries.sort((a, b) => b.usedMs - a.usedMs);
  let total = 0;
  for (const { file, size, usedMs } of entries) {
    total += size;
    if (file === keep || (usedMs > 0 && total <= (cache.limitBytes ?? DEFAULT_LIMIT_BYTES))) continue;
    try {
      unlinkSync(file);
    } catch (error) {
      // Another process was faster.
      if (!(error instanceof Error && "code" in error && error.code === "ENOENT")) throw error;
    }
  }
}

/**
 * The merged index named `key`, from memory or a file, else made by `make`. A cache that cannot be read or written
 * (permissions, a full disk) is reported to `warn` and does not matter otherwise.
 */
export function cachedIndex(
  cache: IndexCacheOptions | undefined,
  key: string,
  layers: number,
  make: () => FlatIndex,
  warn: (message: string) => void,
): FlatIndex {
  const known = open.get(key)?.deref();
  if (known !== undefined) return known;
  const attempt = <Result>(what: string, action: () => Result): Result | undefined => {
    try {
      return action();
    } catch (error) {
      warn(`index cache: cannot ${what}: ${error instanceof Error ? error.message : String(error)}`);
      return undefined;
    }
  };
  let index = cache === undefined ? undefined : attempt("read", () => load(cache, key, layers));
  if (index === undefined) {
    const made = make();
    index = made;
    if (cache !== undefined && made.count >= LEAST_MAPPINGS) {
      attempt("write", () => store(cache, key, layers, made));
    }
  }
  remember(key, index);
  return index;
}
