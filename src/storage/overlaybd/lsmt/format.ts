import { invalidLayer } from "../errors.ts";

/**
 * LSMT blocks and mappings. All integers are little-endian; a sector is 512 bytes.
 * Header block (4096 bytes): magic 8 + 16, size 24, flags 28, index_offset 32 (bytes), index_size 40
 * (mappings), virtual_size 48 (bytes), uuid 56 (36 characters + NUL), parent uuid 93, version 132,
 * sub version 133, user tag 134 (256 bytes). The trailer of a finished file has the same form.
 */
export const SECTOR_BYTES = 512;
export const BLOCK_BYTES = 4096;
export const BLOCK_SECTORS = BLOCK_BYTES / SECTOR_BYTES;
export const MAPPING_BYTES = 16;
/** Longest range of one mapping (14 bits). */
export const MAX_MAPPING_SECTORS = 16383;
/** Offset of a mapping that is padding. */
export const INVALID_OFFSET = 2 ** 50 - 1;
/** Sectors a disk can have: offsets are 50 bits and the last value is taken. */
export const MAX_DISK_BYTES = INVALID_OFFSET * SECTOR_BYTES;
/**
 * Most mappings of one file or stack. The C++ reader stops at 1,000,000 for a finished layer, which a sealed
 * upper of a fragmented disk can exceed; refusing such a layer would lose a snapshot, so one limit serves
 * all files here, and the index must fit into its file anyway.
 */
export const MAX_MAPPINGS = 128_000_000;

export const FLAG_HEADER = 0x01;
export const FLAG_DATA = 0x02;
export const FLAG_SEALED = 0x04;
export const FLAG_SPARSE = 0x10;
export const FLAG_HYBRID = 0x20;

const MAGIC = Uint8Array.fromHex("4c534d5400010200657e63d29444084ca2d2c8ec4fcfae8a");
const USED_BYTES = 390;
const UUID_BYTES = 37;
const TAG_OFFSET = 134;
const TAG_BYTES = 256;
export const MAX_TAG_BYTES = TAG_BYTES;
const UUID_TEXT = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/;
export const NIL_UUID = "00000000-0000-0000-0000-000000000000";

export interface LsmtBlock {
  readonly flags: number;
  readonly indexOffsetBytes: number;
  readonly indexSize: number;
  readonly virtualSizeBytes: number;
  /** Lower case; absent when the field is empty, all zeros or no uuid. */
  readonly uuid?: string | undefined;
  readonly parentUuid?: string | undefined;
  /** Raw bytes without trailing NULs, empty when there are none. */
  readonly userTag?: Uint8Array | undefined;
}

/** A uuid in lower case, or undefined for text that is none (or all zeros). */
export function parseUuid(text: string): string | undefined {
  const lower = text.toLowerCase();
  return UUID_TEXT.test(lower) && lower !== NIL_UUID ? lower : undefined;
}

/** The whole 4096-byte block. `uuid` and `parentUuid` must be uuids (checked by callers at the edge). */
export function encodeBlock(block: LsmtBlock): Uint8Array {
  const bytes = new Uint8Array(BLOCK_BYTES);
  const view = new DataView(bytes.buffer);
  bytes.set(MAGIC, 0);
  view.setUint32(24, USED_BYTES, true);
  view.setUint32(28, block.flags, true);
  view.setBigUint64(32, BigInt(block.indexOffsetBytes), true);
  view.setBigUint64(40, BigInt(block.indexSize), true);
  view.setBigUint64(48, BigInt(block.virtualSizeBytes), true);
  bytes.set(Buffer.from(block.uuid ?? NIL_UUID, "latin1").subarray(0, UUID_BYTES - 1), 56);
  bytes.set(Buffer.from(block.parentUuid ?? NIL_UUID, "latin1").subarray(0, UUID_BYTES - 1), 93);
  bytes[132] = 1;
  bytes[133] = 1;
  if (block.userTag !== undefined) bytes.set(block.userTag.subarray(0, TAG_BYTES), TAG_OFFSET);
  return bytes;
}

export function hasLsmtMagic(bytes: Uint8Array): boolean {
  return bytes.byteLength >= BLOCK_BYTES && MAGIC.every((value, i) => bytes[i] === value);
}

/**
 * Decodes a block that starts at `blockOffset` of `file`. Checks the magics and that the numbers can be
 * represented; size, version, padding and uuid text are not checked (readers in the field do not either).
 * `sizes: "ignored"` is for the header of a finished layer, whose trailer decides: its sizes come out as 0.
 */
export function decodeBlock(
  bytes: Uint8Array,
  file: string,
  blockOffset: number,
  what: string,
  sizes: "checked" | "ignored" = "checked",
): LsmtBlock {
  if (bytes.byteLength < BLOCK_BYTES) {
    throw invalidLayer(
      file,
      blockOffset,
      `${what} needs ${BLOCK_BYTES} bytes, file has ${bytes.byteLength} there`,
    );
  }
  if (!hasLsmtMagic(bytes)) throw invalidLayer(file, blockOffset, `${what} has no LSMT magic`);
  const view = new DataView(bytes.buffer, bytes.byteOffset, BLOCK_BYTES);
  const number = (at: number, name: string, limit: number): number => {
    const value = sizes === "ignored" ? 0n : view.getBigUint64(at, true);
    if (value > BigInt(limit))
      throw invalidLayer(file, blockOffset + at, `${what} ${name} ${value} is too big`);
    return Number(value);
  };
  const virtualSizeBytes = number(48, "virtual size", MAX_DISK_BYTES);
  if (virtualSizeBytes % SECTOR_BYTES !== 0) {
    throw invalidLayer(
      file,
      blockOffset + 48,
      `${what} virtual size ${virtualSizeBytes} is no multiple of ${SECTOR_BYTES}`,
    );
  }
  const tag = bytes.subarray(TAG_OFFSET, TAG_OFFSET + TAG_BYTES);
  let tagLength = TAG_BYTES;
  while (tagLength > 0 && tag[tagLength - 1] === 0) tagLength--;
  const text = (at: number) =>
    Buffer.from(bytes.buffer, bytes.byteOffset + at, UUID_BYTES - 1).toString("latin1");
  return {
    flags: view.getUint32(28, true),
    indexOffsetBytes: number(32, "index offset", Number.MAX_SAFE_INTEGER),
    indexSize: number(40, "index size", Number.MAX_SAFE_INTEGER),
    virtualSizeBytes,
    uuid: parseUuid(text(56)),
    parentUuid: parseUuid(text(93)),
    userTag: tag.slice(0, tagLength),
  };
}

const HALF = 2 ** 32;

/**
 * Mapping as two 64-bit words: offset (50 bits) | length << 50, then moffset (55 bits) | zeroed << 55 | tag << 56.
 * `words` are 32-bit words, `at` a multiple of 4. The tag is left 0: it means nothing on disk.
 */
export function encodeMapping(
  words: Uint32Array,
  at: number,
  offset: number,
  length: number,
  moffset: number,
  zeroed: boolean,
): void {
  words[at] = offset % HALF;
  words[at + 1] = (Math.floor(offset / HALF) | (length << 18)) >>> 0;
  words[at + 2] = moffset % HALF;
  words[at + 3] = (Math.floor(moffset / HALF) | (zeroed ? 1 << 23 : 0)) >>> 0;
}

/** One padding mapping. */
export function encodeInvalidMapping(words: Uint32Array, at: number): void {
  words[at] = 0xffff_ffff;
  words[at + 1] = 0x3_ffff;
  words[at + 2] = 0;
  words[at + 3] = 0;
}

export function mappingOffset(words: Uint32Array, at: number): number {
  return words[at]! + (words[at + 1]! & 0x3_ffff) * HALF;
}

export function mappingLength(words: Uint32Array, at: number): number {
  return words[at + 1]! >>> 18;
}

export function mappingTarget(words: Uint32Array, at: number): number {
  return words[at + 2]! + (words[at + 3]! & 0x7f_ffff) * HALF;
}

export function mappingZeroed(words: Uint32Array, at: number): boolean {
  return (words[at + 3]! & (1 << 23)) !== 0;
}

/** Padding: the reserved offset (C++) or no length (Rust). */
export function mappingIsPadding(words: Uint32Array, at: number): boolean {
  return mappingLength(words, at) === 0 || mappingOffset(words, at) === INVALID_OFFSET;
}
