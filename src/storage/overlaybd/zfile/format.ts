import { crc32cRaw } from "../../../../ffi/codec.ts";
import { invalidLayer } from "../errors.ts";

/**
 * ZFile: header 512 | blocks, each followed by a 4-byte checksum when `verify` | jump table (u32 stored
 * lengths) | trailer 512. Header fields: magic 8 + 16, size 24, digest 28, flags 32, index_offset 40,
 * index_size 48 (blocks), original_file_size 56, index_crc 64, block_size 72, algorithm 76, dict_size 84,
 * verify 88. Checksums are raw CRC-32C registers; the digest covers all 512 bytes with itself as 0.
 */
export const ZFILE_BLOCK_BYTES = 512;
export const ZFILE_MAX_BLOCK_SIZE = 65536;
export const ZFILE_MIN_BLOCK_SIZE = 512;
/** Peers keep one running sum of 16 bits for this many original bytes. */
export const ZFILE_GROUP_BYTES = 65536;
export const ZFILE_CHECKSUM_BYTES = 4;

const MAGIC = Uint8Array.fromHex("5a46696c6500010074756a692e79796640416c6962616261");
const USED_BYTES = 96;

export const ZFLAG_HEADER = 0x01;
export const ZFLAG_DATA = 0x02;
export const ZFLAG_SEALED = 0x04;
export const ZFLAG_OVERWRITTEN = 0x08;
export const ZFLAG_DIGEST = 0x10;

export interface ZFileBlock {
  readonly flags: number;
  readonly indexOffsetBytes: number;
  readonly indexSize: number;
  readonly originalSizeBytes: number;
  readonly indexCrc: number;
  readonly blockSizeBytes: number;
  /** Number in the file: 1 lz4, 2 zstd. */
  readonly algorithm: number;
  readonly dictSizeBytes: number;
  readonly verify: boolean;
}

export function hasZFileMagic(bytes: Uint8Array): boolean {
  return bytes.byteLength >= ZFILE_BLOCK_BYTES && MAGIC.every((value, i) => bytes[i] === value);
}

function digestOf(bytes: Uint8Array): number {
  const copy = bytes.slice(0, ZFILE_BLOCK_BYTES);
  copy.fill(0, 28, 32);
  return crc32cRaw(0, copy);
}

export function encodeZFileBlock(block: ZFileBlock): Uint8Array {
  const bytes = new Uint8Array(new ArrayBuffer(ZFILE_BLOCK_BYTES));
  const view = new DataView(bytes.buffer);
  bytes.set(MAGIC, 0);
  view.setUint32(24, USED_BYTES, true);
  view.setBigUint64(32, BigInt(block.flags), true);
  view.setBigUint64(40, BigInt(block.indexOffsetBytes), true);
  view.setBigUint64(48, BigInt(block.indexSize), true);
  view.setBigUint64(56, BigInt(block.originalSizeBytes), true);
  view.setUint32(64, block.indexCrc, true);
  view.setUint32(72, block.blockSizeBytes, true);
  bytes[76] = block.algorithm;
  view.setUint32(84, block.dictSizeBytes, true);
  bytes[88] = block.verify ? 1 : 0;
  view.setUint32(28, digestOf(bytes), true);
  return bytes;
}

/** Decodes a block with the magic already seen; checks its digest when it has one. */
export function decodeZFileBlock(
  bytes: Uint8Array,
  file: string,
  at: number,
  checkDigest: boolean,
): ZFileBlock {
  const view = new DataView(bytes.buffer, bytes.byteOffset, ZFILE_BLOCK_BYTES);
  const number = (offset: number, name: string): number => {
    const value = view.getBigUint64(offset, true);
    if (value > BigInt(Number.MAX_SAFE_INTEGER)) {
      throw invalidLayer(file, at + offset, `ZFile ${name} ${value} is too big`);
    }
    return Number(value);
  };
  const flags = view.getUint32(32, true);
  if (checkDigest && (flags & ZFLAG_DIGEST) !== 0 && view.getUint32(28, true) !== digestOf(bytes)) {
    throw invalidLayer(file, at + 28, "ZFile header digest does not match");
  }
  return {
    flags,
    indexOffsetBytes: number(40, "index offset"),
    indexSize: number(48, "index size"),
    originalSizeBytes: number(56, "original size"),
    indexCrc: view.getUint32(64, true),
    blockSizeBytes: view.getUint32(72, true),
    algorithm: bytes[76]!,
    dictSizeBytes: view.getUint32(84, true),
    verify: bytes[88] !== 0,
  };
}
