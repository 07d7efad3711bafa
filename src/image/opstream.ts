import { AenvError } from "../lib/errors.ts";
import { showBytes, type TarEntry, type TarEntryType, type TarSegment, type TarSink } from "./tar.ts";

/**
 * Writer of the op stream that the ext4 helper reads: framing in c/ext4/opstream.h. Turns tar entries into
 * what they do to the file system below: normal paths, whiteouts, opaque directories, aligned segments.
 */
const MAGIC = "AENVOPS1";
const OP = { entry: 1, data: 2, whiteout: 3, opaque: 4, end: 5, target: 6 } as const;
const TYPE_CODE: Readonly<Record<TarEntryType, string>> = {
  file: "f",
  directory: "d",
  symlink: "l",
  hardLink: "h",
  character: "c",
  block: "b",
  fifo: "p",
};
const FILE_BLOCK = 4096;
const ENTRY_HEAD_BYTES = 64;
const ZEROS = Buffer.alloc(FILE_BLOCK);
/** Small records are gathered, so that a layer of many small files does not become many small writes. */
const GATHER_BYTES = 256 * 1024;

/**
 * The path below the root, in normal form: no empty, `.` or `..` component, no leading or trailing slash;
 * empty for the root itself. `..` is resolved within the name; a name that leaves the root is refused.
 */
export function normalizePath(path: string): string {
  const parts: string[] = [];
  for (const part of path.split("/")) {
    if (part === "" || part === ".") continue;
    if (part !== "..") {
      parts.push(part);
    } else if (parts.pop() === undefined) {
      throw new AenvError({
        code: "image_unsupported",
        status: 400,
        message: `the layer has an entry that leaves the root: ${showBytes(path)}`,
        remediation: "the image is broken or hostile; do not use it",
      });
    }
  }
  return parts.join("/");
}

/** Rounds a sparse file's segments out to whole blocks and joins those that touch. */
export function alignSegments(segments: readonly TarSegment[], sizeBytes: number): TarSegment[] {
  const aligned: { offsetBytes: number; lengthBytes: number }[] = [];
  for (const segment of segments) {
    const start = segment.offsetBytes - (segment.offsetBytes % FILE_BLOCK);
    const roundedEnd = Math.ceil((segment.offsetBytes + segment.lengthBytes) / FILE_BLOCK) * FILE_BLOCK;
    const end = Math.min(roundedEnd, sizeBytes);
    const last = aligned.at(-1);
    if (last !== undefined && start <= last.offsetBytes + last.lengthBytes) {
      last.lengthBytes = Math.max(end, last.offsetBytes + last.lengthBytes) - last.offsetBytes;
    } else {
      aligned.push({ offsetBytes: start, lengthBytes: end - start });
    }
  }
  return aligned;
}

/** Where the content of the file at hand goes. */
interface OpenFile {
  readonly source: readonly TarSegment[];
  readonly target: readonly TarSegment[];
  sourceIndex: number;
  sourceDone: number;
  targetIndex: number;
  /** File offset up to which content was written. */
  cursor: number;
}

/** Where a COPY step puts things; `struct op_target` of c/ext4/opstream.h. */
export interface CopyTarget {
  /** Byte string, absolute or below the root. */
  readonly path: string;
  /** Name of a single file in the target when that is a directory; absent: the source is a directory. */
  readonly fileName?: string;
  readonly mustBeDirectory: boolean;
  /** Owner of directories that have to be made. */
  readonly uid: number;
  readonly gid: number;
}

export class OpStreamWriter implements TarSink {
  #queue: Uint8Array[] = [];
  #gather = Buffer.allocUnsafe(GATHER_BYTES);
  #gathered = 0;
  #file: OpenFile | undefined;
  #skipData = false;
  entryCount = 0;

  constructor() {
    this.#put(Buffer.from(MAGIC, "latin1"));
  }

  entry(entry: TarEntry): void {
    this.#finishFile();
    this.#skipData = false;
    this.entryCount++;
    const path = normalizePath(entry.path);
    const parts = path.split("/");
    const name = parts.pop() ?? "";
    // Bookkeeping of aufs (".wh..wh.plnk" and the like) and what lies under it is not part of the image.
    const isMeta = (part: string) => part.startsWith(".wh..wh.");
    if (name === ".wh..wh..opq" && !parts.some(isMeta)) {
      this.#skipData = true;
      this.#record(OP.opaque, Buffer.from(parts.join("/"), "latin1"));
      return;
    }
    if (isMeta(name) || parts.some(isMeta)) {
      this.#skipData = true;
      return;
    }
    if (name.startsWith(".wh.")) {
      this.#skipData = true;
      const hidden = name.slice(".wh.".length);
      if (hidden === "" || hidden === "." || hidden === "..") {
        throw new AenvError({
          code: "image_unsupported",
          status: 400,
          message: `the layer has a whiteout of nothing: ${showBytes(entry.path)}`,
        });
      }
      this.#record(OP.whiteout, Buffer.from([...parts, hidden].join("/"), "latin1"));
      return;
    }
    this.#entryRecord(entry, path);
  }

  /** Begins the stream of a COPY step, which is read by c/envd/copy.c. */
  target(target: CopyTarget): void {
    const path = Buffer.from(target.path, "latin1");
    const name = Buffer.from(target.fileName ?? "", "latin1");
    const head = Buffer.alloc(20);
    head.writeUInt32LE((target.fileName === undefined ? 1 : 0) | (target.mustBeDirectory ? 2 : 0), 0);
    head.writeUInt32LE(target.uid, 4);
    head.writeUInt32LE(target.gid, 8);
    head.writeUInt32LE(path.length, 12);
    head.writeUInt32LE(name.length, 16);
    this.#record(OP.target, Buffer.concat([head, path, name]));
  }

  /** An entry at this very path (in normal form, as its hard link's target): no name means anything special. */
  plainEntry(entry: TarEntry, path: string): void {
    this.#finishFile();
    this.#skipData = false;
    this.entryCount++;
    this.#entryRecord(entry, path);
  }

  /** The content that follows belongs to nothing. */
  skipContent(): void {
    this.#finishFile();
    this.#skipData = true;
  }

  data(chunk: Uint8Array): void {
    if (this.#skipData) return;
    const file = this.#file;
    if (file === undefined) throw new Error("internal error, please report: content without a file");
    for (let at = 0; at < chunk.length; ) {
      const segment = file.source[file.sourceIndex]!;
      const taken = Math.min(chunk.length - at, segment.lengthBytes - file.sourceDone);
      this.#padTo(file, segment.offsetBytes + file.sourceDone);
      this.#dataRecord(chunk.subarray(at, at + taken));
      file.cursor += taken;
      file.sourceDone += taken;
      at += taken;
      if (file.sourceDone === segment.lengthBytes) {
        file.sourceIndex++;
        file.sourceDone = 0;
      }
    }
  }

  end(): void {
    this.#finishFile();
    this.#record(OP.end, new Uint8Array(0));
  }

  /** What has been written since the last call, in order; the caller owns the pieces. */
  take(): Uint8Array[] {
    this.#seal();
    const queue = this.#queue;
    this.#queue = [];
    return queue;
  }

  #entryRecord(entry: TarEntry, path: string): void {
    const pathBytes = Buffer.from(path, "latin1");
    const link = entry.type === "hardLink" ? normalizePath(entry.linkTarget) : entry.linkTarget;
    const linkBytes = Buffer.from(link, "latin1");
    const whole: TarSegment[] = entry.sizeBytes > 0 ? [{ offsetBytes: 0, lengthBytes: entry.sizeBytes }] : [];
    const source = entry.type === "file" ? (entry.segments ?? whole) : [];
    const target = entry.segments === undefined ? source : alignSegments(source, entry.sizeBytes);

    const head = Buffer.alloc(ENTRY_HEAD_BYTES);
    head.write(TYPE_CODE[entry.type], 0, "latin1");
    head.writeUInt32LE(entry.mode, 4);
    head.writeUInt32LE(entry.uid, 8);
    head.writeUInt32LE(entry.gid, 12);
    head.writeBigInt64LE(BigInt(entry.mtimeSeconds), 16);
    head.writeUInt32LE(entry.mtimeNanoseconds, 24);
    head.writeUInt32LE(entry.major, 28);
    head.writeUInt32LE(entry.minor, 32);
    head.writeUInt32LE(target.length, 36);
    head.writeBigUInt64LE(BigInt(entry.sizeBytes), 40);
    head.writeUInt32LE(pathBytes.length, 48);
    head.writeUInt32LE(linkBytes.length, 52);
    head.writeUInt32LE(entry.xattrs.length, 56);

    const pieces: Uint8Array[] = [head, pathBytes, linkBytes];
    const segmentBytes = Buffer.alloc(16 * target.length);
    target.forEach((segment, index) => {
      segmentBytes.writeBigUInt64LE(BigInt(segment.offsetBytes), 16 * index);
      segmentBytes.writeBigUInt64LE(BigInt(segment.lengthBytes), 16 * index + 8);
    });
    pieces.push(segmentBytes);
    for (const { name, value } of entry.xattrs) {
      const nameBytes = Buffer.from(name, "latin1");
      const lengths = Buffer.alloc(8);
      lengths.writeUInt32LE(nameBytes.length, 0);
      lengths.writeUInt32LE(value.length, 4);
      pieces.push(lengths, nameBytes, value);
    }
    this.#record(
      OP.entry,
      pieces.length === 4 && linkBytes.length + segmentBytes.length === 0
        ? Buffer.concat([head, pathBytes])
        : Buffer.concat(pieces),
    );
    if (target.length > 0) {
      this.#file = {
        source,
        target,
        sourceIndex: 0,
        sourceDone: 0,
        targetIndex: 0,
        cursor: target[0]!.offsetBytes,
      };
    } else {
      this.#file = undefined;
    }
  }

  /** Zeros between a segment's rounded-out start and its data, and between joined segments. */
  #padTo(file: OpenFile, offset: number): void {
    while (file.cursor < offset) {
      const target = file.target[file.targetIndex]!;
      const end = target.offsetBytes + target.lengthBytes;
      if (file.cursor === end) {
        file.targetIndex++;
        file.cursor = file.target[file.targetIndex]!.offsetBytes;
        continue;
      }
      const length = Math.min(offset, end) - file.cursor;
      for (let left = length; left > 0; left -= Math.min(left, FILE_BLOCK)) {
        this.#dataRecord(ZEROS.subarray(0, Math.min(left, FILE_BLOCK)));
      }
      file.cursor += length;
    }
  }

  #finishFile(): void {
    const file = this.#file;
    if (file === undefined) return;
    const last = file.target.at(-1)!;
    // Content that is missing is the tar parser's fault to report; what is left here is rounding.
    if (file.sourceIndex === file.source.length) this.#padTo(file, last.offsetBytes + last.lengthBytes);
    this.#file = undefined;
  }

  #record(op: number, payload: Uint8Array): void {
    this.#head(op, payload.length);
    this.#put(payload);
  }

  #dataRecord(chunk: Uint8Array): void {
    this.#head(OP.data, chunk.length);
    // Big pieces go as they are, without a copy.
    if (chunk.length < 32 * 1024) {
      this.#put(chunk);
      return;
    }
    this.#seal();
    this.#queue.push(chunk);
  }

  #head(op: number, length: number): void {
    const head = Buffer.allocUnsafe(8);
    head.writeUInt32LE(op, 0);
    head.writeUInt32LE(length, 4);
    this.#put(head);
  }

  #put(bytes: Uint8Array): void {
    if (bytes.length > GATHER_BYTES - this.#gathered) this.#seal();
    if (bytes.length > GATHER_BYTES) {
      this.#queue.push(bytes);
      return;
    }
    this.#gather.set(bytes, this.#gathered);
    this.#gathered += bytes.length;
  }

  #seal(): void {
    if (this.#gathered === 0) return;
    this.#queue.push(this.#gather.subarray(0, this.#gathered));
    this.#gather = Buffer.allocUnsafe(GATHER_BYTES);
    this.#gathered = 0;
  }
}
