import { AenvError } from "../lib/errors.ts";

/**
 * Push parser for tar streams: ustar, pax (POSIX.1-2001), GNU and old V7 headers. It does no I/O and keeps no
 * content: headers become entries, content is handed through in the pieces it came in.
 *
 * Names and link targets are byte strings: JavaScript strings whose char codes are the bytes (latin1), since
 * a tar's names need not be UTF-8. {@link showBytes} makes them readable.
 */
export type TarEntryType = "file" | "directory" | "symlink" | "hardLink" | "character" | "block" | "fifo";

export interface TarSegment {
  readonly offsetBytes: number;
  readonly lengthBytes: number;
}

export interface TarEntry {
  readonly type: TarEntryType;
  /** Byte string as found, not normalised. */
  readonly path: string;
  /** Byte string; empty unless symlink or hard link. */
  readonly linkTarget: string;
  /** Permission bits, 0o7777. */
  readonly mode: number;
  readonly uid: number;
  readonly gid: number;
  readonly mtimeSeconds: number;
  readonly mtimeNanoseconds: number;
  readonly major: number;
  readonly minor: number;
  /** Size of the file, holes included. */
  readonly sizeBytes: number;
  /** The parts of a sparse file that hold data, ascending; absent: all of it. */
  readonly segments?: readonly TarSegment[];
  /** Names are byte strings without NUL, values are bytes. */
  readonly xattrs: readonly { readonly name: string; readonly value: Uint8Array }[];
}

export interface TarSink {
  /** A header; the file's content follows by `data` calls (sparse: its segments' bytes, in order). */
  entry(entry: TarEntry): void;
  data(chunk: Uint8Array): void;
}

const BLOCK = 512;
/** Extended headers and long names kept in memory: far more than 64 KiB of attributes and a path need. */
const MAX_META_BYTES = 4 << 20;
const MAX_SPARSE_SEGMENTS = 1 << 18;
/** Of all global headers of an archive that hold together: writers put a comment there, or a commit's id. */
const MAX_GLOBAL_BYTES = 1 << 20;
/** Linux's PATH_MAX: no longer name can be given to a system call. */
const MAX_PATH_BYTES = 4096;
/** More digits than any safe integer has. */
const MAX_DIGITS = 20;

export function showBytes(bytes: string): string {
  const text = Buffer.from(bytes, "latin1").toString("utf8");
  return text.length > 300 ? `${text.slice(0, 300)}…` : text;
}

function malformed(offset: number, reason: string): AenvError {
  return new AenvError({
    code: "image_unsupported",
    status: 400,
    message: `the layer is not a valid tar stream: ${reason} (at byte ${offset})`,
    remediation: "rebuild or re-push the image; tar -tvf on the layer shows the same fault",
  });
}

type PaxRecords = Map<string, Uint8Array>;

interface PendingMeta {
  readonly kind: "pax" | "globalPax" | "longName" | "longLink";
  readonly bytes: Buffer;
  filled: number;
}

interface SparseMap {
  segments: TarSegment[];
  realSize: number;
}

/** Header with what precedes it applied, waiting for its sparse map. */
interface HeldEntry {
  readonly entry: Omit<TarEntry, "segments" | "sizeBytes">;
  readonly map: SparseMap;
  /** Bytes of the archive member that are left. */
  memberBytes: number;
}

/** A map of format 1.0 as far as it was read: decimal lines, first their number of pairs. */
interface NewSparse {
  readonly held: HeldEntry;
  mapBytes: number;
  /** Of the line that is not whole yet. */
  digits: string;
  /** Pairs; absent until the first line. */
  count?: number;
  /** The first of a pair. */
  offset?: number;
}

type State =
  | { readonly at: "header" }
  | { readonly at: "meta"; readonly meta: PendingMeta; padding: number }
  | { readonly at: "oldSparse"; readonly held: HeldEntry }
  | ({ readonly at: "newSparse" } & NewSparse)
  | { readonly at: "data"; left: number; padding: number; readonly emit: boolean }
  | { readonly at: "padding"; left: number }
  | { readonly at: "end" };

export class TarParser {
  readonly #sink: TarSink;
  #state: State = { at: "header" };
  readonly #block = Buffer.alloc(BLOCK);
  #blockFilled = 0;
  #offset = 0;
  #sawZeroBlock = false;
  readonly #globals: PaxRecords = new Map();
  #globalBytes = 0;
  #pax: PaxRecords | undefined;
  #sparsePairs: TarSegment[] = [];
  #longName: string | undefined;
  #longLink: string | undefined;

  constructor(sink: TarSink) {
    this.#sink = sink;
  }

  /** Bytes taken so far. */
  get offsetBytes(): number {
    return this.#offset;
  }

  /** An empty block was read: the archive was written to its end. */
  get sawEnd(): boolean {
    return this.#sawZeroBlock;
  }

  /** Takes the next piece of the stream. `chunk` may be handed to the sink: do not reuse it. */
  push(chunk: Uint8Array): void {
    let position = 0;
    while (position < chunk.length) {
      const taken = this.#step(chunk, position);
      position += taken;
      this.#offset += taken;
    }
  }

  /** The stream is over. Throws when it ends within an entry. */
  finish(): void {
    const state = this.#state;
    const between = state.at === "header" && this.#blockFilled === 0;
    // Some writers leave out the last padding.
    const onlyPadding = state.at === "padding" || (state.at === "data" && state.left === 0);
    const dangling = this.#pax !== undefined || this.#longName !== undefined || this.#longLink !== undefined;
    if (state.at !== "end" && ((!between && !onlyPadding) || dangling)) {
      throw new AenvError({
        code: "image_truncated",
        status: 502,
        message: `the layer's tar stream ends within an entry (at byte ${this.#offset})`,
        remediation: "pull again; when it stays, the image was pushed incomplete",
      });
    }
  }

  #step(chunk: Uint8Array, position: number): number {
    const state = this.#state;
    const available = chunk.length - position;
    switch (state.at) {
      case "end":
        return available;
      case "padding": {
        const taken = Math.min(available, state.left);
        state.left -= taken;
        if (state.left === 0) this.#state = { at: "header" };
        return taken;
      }
      case "data": {
        const taken = Math.min(available, state.left);
        if (state.emit && taken > 0) this.#sink.data(chunk.subarray(position, position + taken));
        state.left -= taken;
        if (state.left === 0) this.#enterPadding(state.padding);
        return taken;
      }
      case "meta": {
        const { meta } = state;
        const taken = Math.min(available, meta.bytes.length - meta.filled);
        meta.bytes.set(chunk.subarray(position, position + taken), meta.filled);
        meta.filled += taken;
        if (meta.filled === meta.bytes.length) {
          this.#applyMeta(meta);
          this.#enterPadding(state.padding);
        }
        return taken;
      }
      default: {
        const taken = Math.min(available, BLOCK - this.#blockFilled);
        this.#block.set(chunk.subarray(position, position + taken), this.#blockFilled);
        this.#blockFilled += taken;
        if (this.#blockFilled === BLOCK) {
          this.#blockFilled = 0;
          if (state.at === "header") this.#header();
          else if (state.at === "oldSparse") this.#oldSparseBlock(state.held);
          else this.#newSparseBlock(state);
        }
        return taken;
      }
    }
  }

  #enterPadding(bytes: number): void {
    this.#state = bytes > 0 ? { at: "padding", left: bytes } : { at: "header" };
  }

  #header(): void {
    const block = this.#block;
    if (block.every((byte) => byte === 0)) {
      if (this.#sawZeroBlock) this.#state = { at: "end" };
      this.#sawZeroBlock = true;
      return;
    }
    if (this.#sawZeroBlock) throw malformed(this.#offset, "an entry after an empty block");
    this.#checkSum(block);
    const typeFlag = String.fromCharCode(block[156]!);
    const size = this.#number(block, 124, 12, "size");
    switch (typeFlag) {
      case "x":
      case "X":
        this.#startMeta("pax", size);
        return;
      case "g":
        this.#startMeta("globalPax", size);
        return;
      case "L":
        this.#startMeta("longName", size);
        return;
      case "K":
        this.#startMeta("longLink", size);
        return;
      case "V":
        // A volume label of GNU tar: not a file.
        this.#state = { at: "data", left: size, padding: paddingOf(size), emit: false };
        if (size === 0) this.#state = { at: "header" };
        this.#clearPending();
        return;
    }
    this.#member(typeFlag, size);
  }

  #startMeta(kind: PendingMeta["kind"], size: number): void {
    if (size > MAX_META_BYTES) {
      throw malformed(this.#offset, `an extended header of ${size} bytes, the limit is ${MAX_META_BYTES}`);
    }
    const meta: PendingMeta = { kind, bytes: Buffer.alloc(size), filled: 0 };
    if (size === 0) this.#applyMeta(meta);
    else this.#state = { at: "meta", meta, padding: paddingOf(size) };
  }

  #applyMeta(meta: PendingMeta): void {
    switch (meta.kind) {
      case "longName":
        this.#longName = cString(meta.bytes, 0, meta.bytes.length);
        return;
      case "longLink":
        this.#longLink = cString(meta.bytes, 0, meta.bytes.length);
        return;
      case "globalPax":
        for (const [key, value] of this.#paxRecords(meta.bytes)) {
          this.#globalBytes -= sizeOfRecord(key, this.#globals.get(key));
          this.#globals.delete(key);
          if (value.length === 0) continue;
          this.#globalBytes += sizeOfRecord(key, value);
          if (this.#globalBytes > MAX_GLOBAL_BYTES)
            throw malformed(this.#offset, `global headers of more than ${MAX_GLOBAL_BYTES} bytes`);
          // A copy: the header it is a part of may be much larger.
          this.#globals.set(key, Buffer.from(value));
        }
        return;
      case "pax":
        this.#pax = this.#paxRecords(meta.bytes);
    }
  }

  /** `LENGTH KEY=VALUE\n`, where LENGTH counts the whole record. */
  #paxRecords(bytes: Buffer): PaxRecords {
    const records: PaxRecords = new Map();
    this.#sparsePairs = [];
    let pendingOffset: number | undefined;
    for (let at = 0; at < bytes.length; ) {
      const space = bytes.indexOf(0x20, at);
      const lengthText = space < 0 ? "" : bytes.toString("latin1", at, space);
      const length = Number(lengthText);
      const end = at + length;
      if (
        !/^\d{1,10}$/.test(lengthText) ||
        end > bytes.length ||
        end <= space + 1 ||
        bytes[end - 1] !== 0x0a
      ) {
        // Zero fill after the last record is harmless.
        if (bytes.subarray(at).every((byte) => byte === 0)) break;
        throw malformed(this.#offset, "an extended header record is malformed");
      }
      const equals = bytes.indexOf(0x3d, space + 1);
      if (equals < 0 || equals >= end) throw malformed(this.#offset, "an extended header record without =");
      const key = bytes.toString("latin1", space + 1, equals);
      const value = bytes.subarray(equals + 1, end - 1);
      // Sparse format 0.0 repeats these two keys.
      if (key === "GNU.sparse.offset") {
        pendingOffset = this.#decimal(value, key);
      } else if (key === "GNU.sparse.numbytes" && pendingOffset !== undefined) {
        this.#pushSegment(this.#sparsePairs, pendingOffset, this.#decimal(value, key));
        pendingOffset = undefined;
      } else {
        records.set(key, value);
      }
      at = end;
    }
    return records;
  }

  #pushSegment(segments: TarSegment[], offsetBytes: number, lengthBytes: number): void {
    if (segments.length >= MAX_SPARSE_SEGMENTS) throw malformed(this.#offset, "too many sparse segments");
    segments.push({ offsetBytes, lengthBytes });
  }

  #clearPending(): void {
    this.#pax = undefined;
    this.#longName = undefined;
    this.#longLink = undefined;
    this.#sparsePairs = [];
  }

  #paxValue(key: string): Uint8Array | undefined {
    const own = this.#pax?.get(key);
    // An empty value in the entry's own header takes a global one back.
    if (own !== undefined) return own.length === 0 ? undefined : own;
    return this.#globals.get(key);
  }

  #paxText(key: string): string | undefined {
    const value = this.#paxValue(key);
    return value === undefined ? undefined : Buffer.from(value).toString("latin1");
  }

  #paxNumber(key: string): number | undefined {
    const value = this.#paxValue(key);
    return value === undefined ? undefined : this.#decimal(value, key);
  }

  #decimal(value: Uint8Array, key: string): number {
    const text = Buffer.from(value).toString("latin1");
    const number = Number(text);
    if (!/^\d+$/.test(text) || !Number.isSafeInteger(number)) {
      throw malformed(this.#offset, `${key} is not a number: ${text.slice(0, 40)}`);
    }
    return number;
  }

  #member(typeFlag: string, headerSize: number): void {
    const block = this.#block;
    const magic = block.toString("latin1", 257, 265);
    const posix = magic === "ustar\x0000";
    const gnu = magic === "ustar  \0";
    let path = cString(block, 0, 100);
    if (posix) {
      const star = block.toString("latin1", 508, 512) === "tar\0";
      const prefix = cString(block, 345, star ? 131 : 155);
      if (prefix !== "") path = `${prefix}/${path}`;
    }
    path = this.#paxText("GNU.sparse.name") ?? this.#paxText("path") ?? this.#longName ?? path;
    const linkTarget = this.#paxText("linkpath") ?? this.#longLink ?? cString(block, 157, 100);
    if (path.includes("\0") || linkTarget.includes("\0"))
      throw malformed(this.#offset, "a name holds a NUL byte");
    if (path.length > MAX_PATH_BYTES || linkTarget.length > MAX_PATH_BYTES) {
      throw new AenvError({
        code: "image_unsupported",
        status: 400,
        message: `${showBytes(path)}: a name or link of more than ${MAX_PATH_BYTES} bytes`,
      });
    }
    const type = this.#type(typeFlag, path);
    // Content of anything but a file is ignored, as the archive readers of container runtimes do.
    const memberBytes = type === "file" ? (this.#paxNumber("size") ?? headerSize) : 0;
    const time = this.#time(this.#paxText("mtime"), () => this.#number(block, 136, 12, "mtime"));
    const device = (type === "character" || type === "block") && (posix || gnu);
    const held: HeldEntry = {
      entry: {
        type,
        path,
        linkTarget: type === "symlink" || type === "hardLink" ? linkTarget : "",
        mode: this.#number(block, 100, 8, "mode") & 0o7777,
        uid: this.#owner(this.#paxNumber("uid") ?? this.#number(block, 108, 8, "uid"), path),
        gid: this.#owner(this.#paxNumber("gid") ?? this.#number(block, 116, 8, "gid"), path),
        mtimeSeconds: time.seconds,
        mtimeNanoseconds: time.nanoseconds,
        major: device ? this.#number(block, 329, 8, "device number") : 0,
        minor: device ? this.#number(block, 337, 8, "device number") : 0,
        xattrs: this.#xattrs(),
      },
      map: { segments: [], realSize: memberBytes },
      memberBytes,
    };
    if (typeFlag === "S" && gnu) {
      this.#startOldSparse(held);
    } else if (type !== "file" || !this.#startPaxSparse(held)) {
      this.#clearPending();
      this.#begin(held, false);
    }
  }

  #type(typeFlag: string, path: string): TarEntryType {
    switch (typeFlag) {
      case "0":
      case "7":
      case "S":
        return "file";
      case "\0":
        return path.endsWith("/") ? "directory" : "file";
      case "1":
        return "hardLink";
      case "2":
        return "symlink";
      case "3":
        return "character";
      case "4":
        return "block";
      case "5":
        return "directory";
      case "6":
        return "fifo";
      default:
        throw new AenvError({
          code: "image_unsupported",
          status: 400,
          message: `${showBytes(path)}: tar entry type ${JSON.stringify(typeFlag)} is not supported`,
        });
    }
  }

  #owner(id: number, path: string): number {
    // 2^32-1 means "unchanged" to the kernel and cannot own a file.
    if (id < 0 || id > 0xfffffffe) {
      throw new AenvError({
        code: "image_unsupported",
        status: 400,
        message: `${showBytes(path)}: owner ${id} is out of range (0 to 4294967294)`,
      });
    }
    return id;
  }

  #time(pax: string | undefined, header: () => number): { seconds: number; nanoseconds: number } {
    if (pax === undefined) return { seconds: header(), nanoseconds: 0 };
    const match = /^(-?)(\d{1,15})(?:\.(\d*))?$/.exec(pax);
    if (match === null) throw malformed(this.#offset, `a time is not a number: ${pax.slice(0, 40)}`);
    const whole = Number(match[2]);
    const nanoseconds = Number((match[3] ?? "").slice(0, 9).padEnd(9, "0"));
    if (match[1] !== "-") return { seconds: whole, nanoseconds };
    return nanoseconds === 0
      ? { seconds: 0 - whole, nanoseconds: 0 }
      : { seconds: -whole - 1, nanoseconds: 1_000_000_000 - nanoseconds };
  }

  #xattrs(): { name: string; value: Uint8Array }[] {
    const prefix = "SCHILY.xattr.";
    const xattrs: { name: string; value: Uint8Array }[] = [];
    for (const [key, value] of this.#pax ?? []) {
      if (!key.startsWith(prefix)) continue;
      const name = key.slice(prefix.length);
      if (name === "" || name.includes("\0"))
        throw malformed(this.#offset, "an attribute without a valid name");
      xattrs.push({ name, value: Buffer.from(value) });
    }
    return xattrs;
  }

  #checkSum(block: Buffer): void {
    const expected = this.#number(block, 148, 8, "checksum");
    let unsigned = 0;
    let signed = 0;
    for (let index = 0; index < BLOCK; index++) {
      const byte = index >= 148 && index < 156 ? 0x20 : block[index]!;
      unsigned += byte;
      signed += byte > 127 ? byte - 256 : byte;
    }
    if (expected !== unsigned && expected !== signed)
      throw malformed(this.#offset, "a header's checksum is wrong");
  }

  /** Octal text, or base 256 when the first bit is set (GNU). */
  #number(block: Buffer, start: number, length: number, what: string): number {
    const first = block[start]!;
    if (first & 0x80) {
      let value = first & 0x40 ? -1n : 0n;
      value = (value << 6n) | BigInt(first & 0x3f);
      for (let index = start + 1; index < start + length; index++)
        value = (value << 8n) | BigInt(block[index]!);
      const number = Number(value);
      if (!Number.isSafeInteger(number)) throw malformed(this.#offset, `${what} is out of range`);
      if (number < 0 && what !== "mtime") throw malformed(this.#offset, `${what} is negative`);
      return number;
    }
    const text = block
      .toString("latin1", start, start + length)
      .replace(/[\0 ]+$/, "")
      .replace(/^[\0 ]+/, "");
    if (text === "") return 0;
    if (!/^[0-7]+$/.test(text)) throw malformed(this.#offset, `${what} is not an octal number`);
    return Number.parseInt(text, 8);
  }

  // ---- sparse files ---------------------------------------------------------------------------------

  /** Old GNU format: four pairs in the header, 21 in each block that follows. */
  #startOldSparse(held: HeldEntry): void {
    this.#clearPending();
    held.map.realSize = this.#number(this.#block, 483, 12, "real size");
    this.#oldPairs(held, 386, 4);
    if (this.#block[482] !== 0) this.#state = { at: "oldSparse", held };
    else this.#begin(held, true);
  }

  #oldSparseBlock(held: HeldEntry): void {
    this.#oldPairs(held, 0, 21);
    if (this.#block[504] === 0) this.#begin(held, true);
  }

  #oldPairs(held: HeldEntry, start: number, count: number): void {
    for (let index = 0; index < count; index++) {
      const at = start + index * 24;
      if (this.#block[at] === 0) return;
      const offset = this.#number(this.#block, at, 12, "sparse offset");
      this.#pushSegment(held.map.segments, offset, this.#number(this.#block, at + 12, 12, "sparse length"));
    }
  }

  /** Formats 0.0, 0.1 (map in the extended header) and 1.0 (map before the content). */
  #startPaxSparse(held: HeldEntry): boolean {
    const realSize = this.#paxNumber("GNU.sparse.realsize") ?? this.#paxNumber("GNU.sparse.size");
    if (realSize === undefined) return false;
    held.map.realSize = realSize;
    if (this.#paxText("GNU.sparse.major") === "1" && this.#paxText("GNU.sparse.minor") === "0") {
      this.#clearPending();
      this.#state = { at: "newSparse", held, mapBytes: 0, digits: "" };
      return true;
    }
    const map = this.#paxText("GNU.sparse.map");
    if (map !== undefined) {
      const numbers = map
        .split(",")
        .map((text) => this.#decimal(Buffer.from(text, "latin1"), "GNU.sparse.map"));
      if (numbers.length % 2 !== 0) throw malformed(this.#offset, "an odd number of sparse map values");
      for (let index = 0; index < numbers.length; index += 2) {
        this.#pushSegment(held.map.segments, numbers[index]!, numbers[index + 1]!);
      }
    } else {
      held.map.segments = this.#sparsePairs;
    }
    this.#clearPending();
    this.#begin(held, true);
    return true;
  }

  #newSparseBlock(state: NewSparse): void {
    const { held } = state;
    held.memberBytes -= BLOCK;
    state.mapBytes += BLOCK;
    if (held.memberBytes < 0 || state.mapBytes > MAX_META_BYTES) {
      throw malformed(this.#offset, "a sparse map is longer than its file");
    }
    for (const byte of this.#block) {
      if (byte !== 0x0a) {
        state.digits += String.fromCharCode(byte);
        if (state.digits.length > MAX_DIGITS) {
          throw malformed(this.#offset, `a sparse map's line is not a number: ${state.digits}`);
        }
        continue;
      }
      const number = this.#decimal(Buffer.from(state.digits, "latin1"), "a sparse map's line");
      state.digits = "";
      if (state.count === undefined) {
        if (number > MAX_SPARSE_SEGMENTS) throw malformed(this.#offset, "too many sparse segments");
        state.count = number;
      } else if (state.offset === undefined) {
        state.offset = number;
      } else {
        this.#pushSegment(held.map.segments, state.offset, number);
        delete state.offset;
      }
      // What follows in the block is padding.
      if (held.map.segments.length === state.count) {
        this.#begin(held, true);
        return;
      }
    }
  }

  #begin(held: HeldEntry, sparse: boolean): void {
    const { map, memberBytes } = held;
    if (sparse) {
      let end = 0;
      let total = 0;
      for (const segment of map.segments) {
        if (segment.offsetBytes < end || segment.offsetBytes + segment.lengthBytes > map.realSize) {
          throw malformed(this.#offset, "a sparse map is out of order or beyond its file");
        }
        end = segment.offsetBytes + segment.lengthBytes;
        total += segment.lengthBytes;
      }
      if (total !== memberBytes) throw malformed(this.#offset, "a sparse map does not fit its content");
    }
    const segments = sparse ? map.segments.filter((segment) => segment.lengthBytes > 0) : undefined;
    this.#sink.entry({
      ...held.entry,
      sizeBytes: map.realSize,
      ...(segments === undefined ? {} : { segments }),
    });
    const padding = paddingOf(memberBytes);
    this.#state = memberBytes > 0 ? { at: "data", left: memberBytes, padding, emit: true } : { at: "header" };
  }
}

function sizeOfRecord(key: string, value: Uint8Array | undefined): number {
  return value === undefined ? 0 : key.length + value.length;
}

function paddingOf(size: number): number {
  return (BLOCK - (size % BLOCK)) % BLOCK;
}

/** Bytes up to the first NUL, as a byte string. */
function cString(block: Buffer, start: number, length: number): string {
  const nul = block.indexOf(0, start);
  const end = nul < 0 || nul > start + length ? start + length : nul;
  return block.toString("latin1", start, end);
}
