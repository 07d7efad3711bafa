import { readdirSync, readFileSync } from "node:fs";
import { Codec, crc32cRaw } from "../../../../ffi/codec.ts";
import { AenvError } from "../../../lib/errors.ts";
import { openStack } from "../index.ts";
import { bootHash, encodeCommit, encodeSession, judgeIndex } from "../lsmt/epochs.ts";
import { ZEROED_TAG } from "../lsmt/flat-index.ts";
import { decodeBlock, encodeMapping } from "../lsmt/format.ts";
import { readLayerIndex } from "../lsmt/layer.ts";
import { Upper } from "../lsmt/upper.ts";
import { openLayer } from "../open-layer.ts";
import type { ReadSource } from "../source.ts";
import { findTarPayload } from "../tar.ts";
import { decodeZFileBlock } from "../zfile/format.ts";
import { type MemoryContent, MemoryDisk } from "./memory-disk.ts";

/**
 * Fuzzing of every decoder with the reference implementation's files. Most damage is aimed: fields get values
 * that matter, and checksums, digests and tar sums are made right again, so that what lies behind them is reached.
 * An input must be read or refused with an AenvError; no access may leave its file, nothing may take long.
 */
type Random = (limit: number) => number;

/** Where the structures of a file lie. All offsets in bytes of the outermost file. */
interface Shape {
  readonly name: string;
  readonly content: MemoryContent;
  readonly full: number;
  readonly tar?: { readonly payloadAt: number };
  readonly zfile?: {
    readonly at: number;
    readonly trailerAt: number;
    readonly tableAt: number;
    readonly blocks: number;
    readonly overwritten: boolean;
    readonly verify: boolean;
    readonly starts: readonly number[];
  };
  readonly lsmt?: {
    readonly headerAt: number;
    readonly trailerAt: number;
    readonly indexAt: number;
    readonly entries: number;
  };
}

const LSMT = Buffer.from("4c534d5400010200", "hex");
const ZFILE = Buffer.from("5a46696c65000100", "hex");

function shapeOf(name: string, bytes: Buffer): Shape {
  const content: MemoryContent = { bytes: new Uint8Array(bytes), length: bytes.byteLength };
  let at = 0;
  let end = bytes.byteLength;
  let tar: Shape["tar"];
  if (bytes.subarray(257, 262).toString("latin1") === "ustar") {
    const pax = bytes[156] === "x".charCodeAt(0);
    at = pax ? 1536 : 512;
    const text = pax
      ? (/size=(\d+)/.exec(bytes.subarray(512, 1024).toString("latin1"))?.[1] ?? "0")
      : String(Number.parseInt(bytes.subarray(124, 135).toString("latin1").trim(), 8));
    end = at + Number(text);
    tar = { payloadAt: at };
  }
  const base = { name, content, full: bytes.byteLength, ...(tar === undefined ? {} : { tar }) };
  if (bytes.subarray(at, at + 8).equals(ZFILE)) {
    const overwritten = (bytes[at + 32]! & 8) !== 0;
    const trailerAt = end - 512;
    const fieldsAt = overwritten ? at : trailerAt;
    const tableAt = at + Number(bytes.readBigUint64LE(fieldsAt + 40));
    const blocks = Number(bytes.readBigUint64LE(fieldsAt + 48));
    const starts = [at + 512];
    for (let i = 0; i < blocks; i++) starts.push(starts[i]! + bytes.readUInt32LE(tableAt + 4 * i));
    const verify = bytes[fieldsAt + 88] === 1;
    return { ...base, zfile: { at, trailerAt, tableAt, blocks, overwritten, verify, starts } };
  }
  if (bytes.subarray(at, at + 8).equals(LSMT) && bytes.subarray(end - 4096, end - 4088).equals(LSMT)) {
    const trailerAt = end - 4096;
    if (trailerAt > at) {
      const indexAt = at + Number(bytes.readBigUint64LE(trailerAt + 32));
      const entries = Number(bytes.readBigUint64LE(trailerAt + 40));
      return { ...base, lsmt: { headerAt: at, trailerAt, indexAt, entries } };
    }
  }
  return base;
}

/** Changes to one file that can be taken back. */
class Damage {
  readonly shape: Shape;
  readonly view: Buffer;
  #undo: { at: number; bytes: Uint8Array }[] = [];

  constructor(shape: Shape) {
    this.shape = shape;
    this.view = Buffer.from(shape.content.bytes.buffer, 0, shape.full);
  }

  /** A Buffer's own `slice` would share the memory. */
  copy(from: number, to: number): Uint8Array {
    return new Uint8Array(this.view.subarray(from, to));
  }

  /** Bytes outside of the file are left out. */
  put(at: number, bytes: Uint8Array): void {
    const from = Math.max(0, at);
    const to = Math.min(this.shape.full, at + bytes.byteLength);
    if (to <= from) return;
    this.#undo.push({ at: from, bytes: this.copy(from, to) });
    this.view.set(bytes.subarray(from - at, to - at), from);
  }

  u32(at: number, value: number): void {
    const bytes = Buffer.alloc(4);
    bytes.writeUInt32LE(value >>> 0);
    this.put(at, bytes);
  }

  u64(at: number, value: bigint): void {
    const bytes = Buffer.alloc(8);
    bytes.writeBigUInt64LE(BigInt.asUintN(64, value));
    this.put(at, bytes);
  }

  cut(length: number): void {
    this.shape.content.length = Math.max(0, Math.min(this.shape.full, length));
  }

  /** Undoes everything. */
  restore(): void {
    for (const { at, bytes } of this.#undo.reverse()) this.view.set(bytes, at);
    this.#undo = [];
    this.shape.content.length = this.shape.full;
  }
}

const NUMBERS: readonly bigint[] = [
  0n,
  1n,
  7n,
  8n,
  255n,
  256n,
  511n,
  512n,
  4095n,
  4096n,
  16383n,
  16384n,
  65535n,
  65536n,
  0x7fff_ffffn,
  0xffff_ffffn,
  1n << 32n,
  (1n << 50n) - 1n,
  1n << 50n,
  (1n << 53n) - 1n,
  1n << 53n,
  (1n << 55n) - 1n,
  (1n << 63n) - 1n,
  1n << 63n,
  (1n << 64n) - 1n,
];

function number(random: Random, near: bigint): bigint {
  const kind = random(4);
  if (kind === 0) return NUMBERS[random(NUMBERS.length)]!;
  if (kind === 1) return near + BigInt(random(9) - 4);
  if (kind === 2) return near ^ (1n << BigInt(random(64)));
  return BigInt(random(200_000));
}

function anywhere(damage: Damage, random: Random): void {
  const { shape } = damage;
  const at = random(4) === 0 ? random(shape.full) : shape.full - 1 - random(Math.min(shape.full, 5000));
  if (random(2) === 0) damage.put(at, Uint8Array.of(random(256)));
  else damage.put(at, Uint8Array.of((damage.view[at] ?? 0) ^ (1 << random(8))));
}

function cutFile(damage: Damage, random: Random): void {
  const { lsmt, zfile, tar } = damage.shape;
  const marks = [
    0,
    damage.shape.full,
    lsmt?.trailerAt,
    lsmt?.indexAt,
    zfile?.trailerAt,
    zfile?.tableAt,
    tar?.payloadAt,
  ];
  const mark = marks.filter((at) => at !== undefined)[random(3)] ?? damage.shape.full;
  damage.cut(random(3) === 0 ? random(damage.shape.full + 1) : mark + random(1025) - 512);
}

const LSMT_FIELDS: readonly (readonly [at: number, bytes: 4 | 8])[] = [
  [0, 8],
  [8, 8],
  [16, 8],
  [24, 4],
  [28, 4],
  [32, 8],
  [40, 8],
  [48, 8],
  [56, 8],
  [93, 8],
  [132, 4],
];

function lsmtField(damage: Damage, random: Random, block: number): void {
  const [field, size] = LSMT_FIELDS[random(4) === 0 ? random(LSMT_FIELDS.length) : 4 + random(4)]!;
  const at = block + field;
  if (at < 0 || at + 8 > damage.shape.full) return;
  if (field === 28)
    damage.u32(at, random(2) === 0 ? 1 << random(8) : damage.view.readUInt32LE(at) ^ (1 << random(8)));
  else if (size === 4)
    damage.u32(at, Number(number(random, BigInt(damage.view.readUInt32LE(at))) & 0xffff_ffffn));
  else damage.u64(at, number(random, damage.view.readBigUInt64LE(at)));
}

/** One entry, rebuilt with a field changed, exchanged with another, or doubled. */
function mappingEntry(damage: Damage, random: Random, indexAt: number, entries: number): void {
  if (entries === 0) return;
  const at = indexAt + 16 * random(entries);
  if (at + 16 > damage.shape.full) return;
  const low = damage.view.readBigUInt64LE(at);
  const high = damage.view.readBigUInt64LE(at + 8);
  const offsetMask = (1n << 50n) - 1n;
  const targetMask = (1n << 55n) - 1n;
  switch (random(8)) {
    case 0:
      damage.u64(at, (number(random, low & offsetMask) & offsetMask) | (low & ~offsetMask));
      break;
    case 1:
      damage.u64(at, (low & offsetMask) | (number(random, low >> 50n) << 50n));
      break;
    case 2:
      damage.u64(at + 8, (number(random, high & targetMask) & targetMask) | (high & ~targetMask));
      break;
    case 3:
      damage.u64(at + 8, high ^ (1n << 55n));
      break;
    case 4:
      damage.u64(at + 8, (high & ((1n << 56n) - 1n)) | (BigInt(random(256)) << 56n));
      break;
    case 5: {
      const other = indexAt + 16 * random(entries);
      if (other + 16 > damage.shape.full) return;
      const bytes = damage.copy(at, at + 16);
      damage.put(at, damage.copy(other, other + 16));
      if (random(2) === 0) damage.put(other, bytes);
      break;
    }
    case 6:
      damage.put(at, Buffer.from("ffffffffffff03000000000000000000", "hex"));
      break;
    default: {
      const words = new Uint32Array(4);
      encodeMapping(words, 0, random(4096), 1 + random(64), 8 + random(256), random(4) === 0);
      damage.put(at, new Uint8Array(words.buffer));
    }
  }
}

function record(damage: Damage, random: Random, at: number): void {
  const words = new Uint32Array(4);
  if (random(3) === 0) encodeSession(words, 0, bootHash(random(2) === 0 ? "memory" : "other"));
  else {
    const kind = random(3) === 0 ? "close" : "commit";
    const covered = Math.max(0, (at - 4096) / 16 - random(3));
    const bytes = damage.view.subarray(4096, 4096 + covered * 16);
    encodeCommit(words, 0, kind, random(2) === 0 ? crc32cRaw(0, bytes) : random(2 ** 31), random(4));
  }
  damage.put(at, new Uint8Array(words.buffer));
}

/** Digests and the checksum of the jump table, as a writer would have made them. */
function fixZFile(damage: Damage): void {
  const { zfile } = damage.shape;
  if (zfile === undefined) return;
  const blocks = zfile.overwritten ? [zfile.at, zfile.trailerAt] : [zfile.at, zfile.trailerAt];
  const table = damage.view.subarray(zfile.tableAt, zfile.tableAt + 4 * zfile.blocks);
  const crc = crc32cRaw(0, table);
  for (const at of blocks) {
    if ((damage.view[at + 32]! & 0x10) === 0) continue;
    if (at !== zfile.at || zfile.overwritten) damage.u32(at + 64, crc);
    const copy = damage.copy(at, at + 512);
    copy.fill(0, 28, 32);
    damage.u32(at + 28, crc32cRaw(0, copy));
  }
}

const ZFILE_FIELDS: readonly (readonly [at: number, bytes: 1 | 4 | 8])[] = [
  [24, 4],
  [32, 8],
  [40, 8],
  [48, 8],
  [56, 8],
  [64, 4],
  [72, 4],
  [76, 1],
  [77, 1],
  [78, 1],
  [84, 4],
  [88, 1],
];

function zfileField(damage: Damage, random: Random): void {
  const zfile = damage.shape.zfile!;
  const [field, size] = ZFILE_FIELDS[random(ZFILE_FIELDS.length)]!;
  const both = random(3) > 0;
  for (const block of both ? [zfile.at, zfile.trailerAt] : [random(2) === 0 ? zfile.at : zfile.trailerAt]) {
    const at = block + field;
    if (size === 1) damage.put(at, Uint8Array.of(random(4)));
    else if (field === 72) damage.u32(at, random(2) === 0 ? 1 << random(20) : random(200_000));
    else if (size === 4)
      damage.u32(at, Number(number(random, BigInt(damage.view.readUInt32LE(at))) & 0xffff_ffffn));
    else damage.u64(at, number(random, damage.view.readBigUInt64LE(at)));
  }
}

function zfileTable(damage: Damage, random: Random): void {
  const { tableAt, blocks } = damage.shape.zfile!;
  if (blocks === 0) return;
  const at = tableAt + 4 * random(blocks);
  damage.u32(at, Number(number(random, BigInt(damage.view.readUInt32LE(at))) & 0xffff_ffffn));
}

/** Compressed bytes under a right checksum: what reaches the decompressor. */
function zfileBlock(damage: Damage, random: Random): void {
  const { starts, blocks, verify } = damage.shape.zfile!;
  if (blocks === 0) return;
  const block = random(Math.min(blocks, 3));
  const from = starts[block]!;
  const to = starts[block + 1]! - (verify ? 4 : 0);
  if (to <= from) return;
  for (let n = 1 + random(4); n > 0; n--) {
    damage.put(
      from + random(Math.min(to - from, random(2) === 0 ? 16 : to - from)),
      Uint8Array.of(random(256)),
    );
  }
  if (verify && random(8) > 0) damage.u32(to, crc32cRaw(0, damage.view.subarray(from, to)));
}

function tarField(damage: Damage, random: Random): void {
  const pax = damage.shape.tar!.payloadAt === 1536;
  const header = pax && random(2) === 0 ? 1024 : 0;
  if (pax && random(2) === 0) {
    const at = 512 + random(40);
    damage.put(at, Uint8Array.of(random(3) === 0 ? random(256) : 48 + random(10)));
  } else {
    const fields = [124, 124, 100, 156, 257, 263, 148];
    const at = header + fields[random(fields.length)]! + random(11);
    damage.put(at, Uint8Array.of(random(3) === 0 ? random(256) : 48 + random(8)));
  }
  if (random(6) === 0) return;
  let sum = 0;
  for (let i = 0; i < 512; i++) sum += i >= 148 && i < 156 ? 32 : damage.view[header + i]!;
  damage.put(header + 148, Buffer.from(`${sum.toString(8).padStart(6, "0")}\0 `, "latin1"));
}

function damageLayer(damage: Damage, random: Random): void {
  const { shape } = damage;
  for (let rounds = 1 + (random(3) === 0 ? random(4) : 0); rounds > 0; rounds--) {
    const what = random(20);
    if (what === 0) cutFile(damage, random);
    else if (what <= 2) anywhere(damage, random);
    else if (shape.tar !== undefined && what <= 6) tarField(damage, random);
    else if (shape.zfile !== undefined) {
      if (what <= 11) zfileField(damage, random);
      else if (what <= 14) zfileTable(damage, random);
      else zfileBlock(damage, random);
    } else if (shape.lsmt !== undefined) {
      const { headerAt, trailerAt, indexAt, entries } = shape.lsmt;
      if (what <= 8) lsmtField(damage, random, headerAt);
      else if (what <= 13) lsmtField(damage, random, trailerAt);
      else mappingEntry(damage, random, indexAt, entries);
    } else anywhere(damage, random);
  }
  if (random(10) > 0) fixZFile(damage);
}

function damageIndex(damage: Damage, random: Random): void {
  const entries = Math.floor((damage.shape.full - 4096) / 16);
  for (let rounds = 1 + random(4); rounds > 0; rounds--) {
    const what = random(12);
    if (what === 0) damage.cut(4096 + random(damage.shape.full - 4095));
    else if (what === 1) anywhere(damage, random);
    else if (what <= 3) lsmtField(damage, random, 0);
    else if (what <= 6 && entries > 0) record(damage, random, 4096 + 16 * random(entries));
    else if (what === 7) damage.put(400, Buffer.from("AENVEP01", "latin1"));
    else mappingEntry(damage, random, 4096, entries);
  }
}

export interface FuzzResult {
  inputs: number;
  refused: number;
  read: number;
  slowestMs: number;
}

class Fuzzer {
  readonly #random: Random;
  readonly #disk = new MemoryDisk();
  readonly #target = new Uint8Array(new ArrayBuffer(1 << 16));
  readonly result: FuzzResult = { inputs: 0, refused: 0, read: 0, slowestMs: 0 };
  readonly #layers: Damage[];
  readonly #fitting = new Map<string, Damage[]>();
  readonly #codec = new Codec();
  readonly #boot = bootHash("memory");
  readonly #pairs: { name: string; data: Damage; index: Damage }[];

  constructor(random: Random, vectors: string) {
    this.#random = random;
    const load = (name: string) => shapeOf(name, readFileSync(`${vectors}/${name}`));
    const names = readdirSync(vectors).sort();
    this.#layers = names
      .filter((name) => /\.(lsmt|zfile|tar)$/.test(name))
      .map(load)
      .filter((shape) => shape.full < 150_000 && (shape.lsmt !== undefined || shape.zfile !== undefined))
      .sort((a, b) => a.full - b.full)
      .map((shape) => new Damage(shape));
    this.#pairs = ["tiny", "rw-basic", "rw-group", "hybrid", "stack-upper"].map((name) => ({
      name,
      data: new Damage(load(`${name}.data`)),
      index: new Damage(load(`${name}.index`)),
    }));
  }

  #readSome(layer: ReturnType<typeof openLayer>): void {
    const { index, source } = layer;
    for (let n = 0, at = 0; n < 2 && at < index.count; n++, at += 1 + this.#random(index.count)) {
      if (index.tags[at]! >= ZEROED_TAG) continue;
      const length = Math.min(index.lengths[at]! * 512, 16_384);
      source.read(index.moffsets[at]! * 512, this.#target, 0, length);
    }
  }

  #layer(): void {
    // The small ones (first) have all that the big ones have, and cost less.
    const { length } = this.#layers;
    const damage =
      this.#layers[this.#random(8) > 0 ? this.#random(Math.ceil(length / 3)) : this.#random(length)]!;
    this.#disk.put("/f", damage.shape.content);
    this.#disk.strict = true;
    try {
      damageLayer(damage, this.#random);
      if (this.#random(16) === 0) {
        using stack = openStack({ lowers: [{ file: "/f" }, { file: "/f" }] }, { disk: this.#disk });
        const length = Math.min(stack.virtualSizeBytes, 65536);
        stack.read(0, this.#target.subarray(0, length));
        return;
      }
      using layer = openLayer(this.#disk, "/f", 0);
      this.#readSome(layer);
    } finally {
      damage.restore();
    }
  }

  /**
   * One decoder alone, on the bytes it gets when a file is opened: most of the inputs, because opening a file takes ten
   * times as long as any of its parts.
   */
  #part(): void {
    const random = this.#random;
    switch (random(5)) {
      case 0: {
        const { index } = this.#pairs[random(this.#pairs.length)]!;
        const damage = index;
        try {
          damageIndex(damage, random);
          const entries = Math.max(0, Math.floor((damage.shape.content.length - 4096) / 16));
          const verdict = judgeIndex("/i", entries, this.#boot, (from, count, into) => {
            if (from < 0 || from + count > entries) throw new Error(`entries ${from}+${count} of ${entries}`);
            const at = 4096 + from * 16;
            into.set(damage.view.subarray(at, at + count * 16));
          });
          if (
            !(verdict.committed <= verdict.kept && verdict.kept <= entries) &&
            verdict.moveCommit === undefined
          ) {
            throw new Error(`judged ${verdict.committed} and ${verdict.kept} of ${entries}`);
          }
        } finally {
          damage.restore();
        }
        return;
      }
      case 1: {
        const damage = this.#small(({ lsmt }) => lsmt !== undefined);
        const { headerAt, trailerAt, indexAt, entries } = damage.shape.lsmt!;
        try {
          if (random(2) === 0) lsmtField(damage, random, trailerAt);
          else mappingEntry(damage, random, indexAt, entries);
          const trailer = decodeBlock(
            damage.view.subarray(trailerAt, trailerAt + 4096),
            "/f",
            trailerAt,
            "trailer",
          );
          const source = this.#source(damage, headerAt);
          const room = trailerAt - headerAt - trailer.indexOffsetBytes;
          // What readLayerBlocks has made sure of.
          if (trailer.indexOffsetBytes % 512 !== 0 || trailer.indexSize * 16 > room) return;
          readLayerIndex(source, trailer, 0);
        } finally {
          damage.restore();
        }
        return;
      }
      case 2: {
        const damage = this.#small(({ zfile }) => zfile !== undefined);
        try {
          const { at } = damage.shape.zfile!;
          zfileField(damage, random);
          if (random(3) > 0) fixZFile(damage);
          decodeZFileBlock(damage.view.subarray(at, at + 512), "/f", at, true);
        } finally {
          damage.restore();
        }
        return;
      }
      case 3: {
        const damage = this.#small(({ tar }) => tar !== undefined);
        try {
          tarField(damage, random);
          const payload = findTarPayload(this.#source(damage, 0));
          if (payload !== undefined && payload.offsetBytes + payload.sizeBytes > damage.shape.full) {
            throw new Error("the payload of a tar does not end in it");
          }
        } finally {
          damage.restore();
        }
        return;
      }
      default: {
        const damage = this.#small(({ zfile }) => zfile !== undefined);
        const { starts, blocks, verify } = damage.shape.zfile!;
        if (blocks === 0) return;
        try {
          zfileBlock(damage, random);
          const block = random(Math.min(blocks, 3));
          const stored = damage.view.subarray(starts[block]!, starts[block + 1]!);
          const algorithm = random(2) === 0 ? "lz4" : "zstd";
          // A byte behind the room for the block says whether it was written past.
          const length = 1 + random(4096);
          this.#target[length] = 0xa5;
          this.#codec.decode(algorithm, verify, stored, 0, stored.byteLength, this.#target, 0, length);
          if (this.#target[length] !== 0xa5) throw new Error(`${algorithm} wrote behind ${length} bytes`);
        } finally {
          damage.restore();
        }
      }
    }
  }

  #small(which: (shape: Shape) => boolean): Damage {
    const fitting = this.#fitting.get(which.toString()) ?? this.#layers.filter(({ shape }) => which(shape));
    this.#fitting.set(which.toString(), fitting);
    return fitting[this.#random(Math.ceil(fitting.length / 2))]!;
  }

  /** The bytes of a damaged file from `base` on, read under watch. */
  #source(damage: Damage, base: number): ReadSource {
    const sizeBytes = damage.shape.content.length - base;
    const read: ReadSource["read"] = (offset, target, targetOffset, length) => {
      if (!(offset >= 0 && length >= 0 && offset + length <= sizeBytes)) {
        throw new Error(`read outside of the file: ${offset}+${length} of ${sizeBytes}`);
      }
      target.set(damage.view.subarray(base + offset, base + offset + length), targetOffset);
    };
    return {
      name: "/f",
      sizeBytes,
      read,
      tryRead: (...args) => {
        read(...args);
        return true;
      },
      locate: () => undefined,
      [Symbol.dispose]: () => undefined,
    };
  }

  #upper(): void {
    const { data, index } = this.#pairs[this.#random(this.#pairs.length)]!;
    this.#disk.strict = false;
    const copy = ({ bytes, length }: MemoryContent): MemoryContent => ({
      bytes: bytes.slice(0, length),
      length,
    });
    try {
      if (this.#random(4) === 0) {
        if (this.#random(3) === 0) data.cut(this.#random(data.shape.full + 1));
        else lsmtField(data, this.#random, 0);
      }
      damageIndex(index, this.#random);
      const ref = { data: "/d", index: "/i" };
      if (this.#random(16) > 0) {
        this.#disk.put("/d", data.shape.content);
        this.#disk.put("/i", index.shape.content);
        using upper = new Upper(this.#disk, ref, { readOnly: true });
        upper.checkInvariants();
        return;
      }
      this.#disk.put("/d", copy(data.shape.content));
      this.#disk.put("/i", copy(index.shape.content));
      for (let n = 0; n < 2; n++) {
        using stack = openStack({ lowers: [], upper: ref }, { disk: this.#disk });
        const length = Math.min(stack.virtualSizeBytes, 8192);
        stack.read(0, this.#target.subarray(0, length));
        stack.write(0, this.#target.subarray(0, length));
        stack.discard(0, Math.min(stack.virtualSizeBytes, 512));
        if (this.#random(2) === 0) stack.flush();
        stack.compactStep(1 << 20);
      }
    } finally {
      data.restore();
      index.restore();
      for (const name of this.#disk.files.keys()) this.#disk.files.delete(name);
    }
  }

  run(inputs: number): FuzzResult {
    using _ = this.#codec;
    for (let n = 0; n < inputs; n++) {
      const start = performance.now();
      this.#disk.reads = 0;
      try {
        const what = this.#random(16);
        if (what < 11) this.#part();
        else if (what < 15) this.#layer();
        else this.#upper();
        this.result.read++;
      } catch (error) {
        if (!(error instanceof AenvError)) throw new Error(`input ${n}: ${String(error)}`, { cause: error });
        if (error.message.length < 10) throw new Error(`input ${n}: refused without a reason`);
        this.result.refused++;
      }
      if (this.#disk.reads > 5000) throw new Error(`input ${n}: ${this.#disk.reads} reads`);
      this.result.inputs++;
      this.result.slowestMs = Math.max(this.result.slowestMs, performance.now() - start);
    }
    return this.result;
  }
}

/** Opens `inputs` damaged files; throws when one is neither read nor refused. */
export function fuzzDecoders(random: Random, vectors: string, inputs: number): FuzzResult {
  return new Fuzzer(random, vectors).run(inputs);
}
