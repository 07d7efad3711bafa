import type { AenvError } from "../../lib/errors.ts";
import { type Disk, type DiskFile, readCached } from "./disk.ts";
import { badRequest, invalidLayer } from "./errors.ts";

/**
 * Bytes that can be read at any offset: a file, the payload of a tar, the inside of a ZFile. A read behind
 * the end is an error, never zeros.
 */
export interface ReadSource extends Disposable {
  /** For messages: the file, with what was peeled off. */
  readonly name: string;
  readonly sizeBytes: number;
  read(offsetBytes: number, target: Uint8Array, targetOffset: number, lengthBytes: number): void;
  /**
   * Like `read`, but does not wait for a disk: false when bytes are not in memory, with arbitrary content in the
   * target. Compressed bytes that the kernel dropped within seconds of their last use are the exception, see
   * c/shim/mapped.h.
   */
  tryRead(offsetBytes: number, target: Uint8Array, targetOffset: number, lengthBytes: number): boolean;
  /** Calls `visit` for what of which open files `read` would take the bytes from. */
  locate(offsetBytes: number, lengthBytes: number, visit: FileRangeVisitor): void;
  /** The bytes lie as they are in this open file, so that a ring may read them directly. */
  readonly direct?: { readonly fd: number; readonly baseBytes: number };
}

export type FileRangeVisitor = (fd: number, offsetBytes: number, lengthBytes: number, name: string) => void;

/** An open file, which is closed with the source. */
export class FileSource implements ReadSource {
  readonly name: string;
  readonly sizeBytes: number;
  readonly direct?: { readonly fd: number; readonly baseBytes: number };
  readonly #file: DiskFile;
  #open = true;

  constructor(file: DiskFile) {
    this.name = file.name;
    this.#file = file;
    this.sizeBytes = file.size();
    if (file.fd !== undefined) this.direct = { fd: file.fd, baseBytes: 0 };
  }

  #check(offsetBytes: number, lengthBytes: number): void {
    if (!this.#open) throw new Error(`${this.name}: read after close`);
    if (offsetBytes < 0 || offsetBytes + lengthBytes > this.sizeBytes) {
      throw invalidLayer(
        this.name,
        offsetBytes,
        `${lengthBytes} bytes wanted, the data ends at ${this.sizeBytes}`,
      );
    }
  }

  #shorter(offsetBytes: number, lengthBytes: number, got: number): AenvError {
    return invalidLayer(
      this.name,
      offsetBytes,
      `${lengthBytes} bytes wanted, ${got} read: the file became shorter`,
    );
  }

  read(offsetBytes: number, target: Uint8Array, targetOffset: number, lengthBytes: number): void {
    this.#check(offsetBytes, lengthBytes);
    const got = this.#file.read(offsetBytes, target, targetOffset, lengthBytes);
    if (got !== lengthBytes) throw this.#shorter(offsetBytes, lengthBytes, got);
  }

  tryRead(offsetBytes: number, target: Uint8Array, targetOffset: number, lengthBytes: number): boolean {
    this.#check(offsetBytes, lengthBytes);
    const got = readCached(this.#file, offsetBytes, target, targetOffset, lengthBytes);
    if (got < 0) return false;
    if (got !== lengthBytes) throw this.#shorter(offsetBytes, lengthBytes, got);
    return true;
  }

  locate(offsetBytes: number, lengthBytes: number, visit: FileRangeVisitor): void {
    if (this.#file.fd !== undefined) visit(this.#file.fd, offsetBytes, lengthBytes, this.name);
  }

  [Symbol.dispose](): void {
    if (!this.#open) return;
    this.#open = false;
    this.#file.close();
  }
}

export function openFileSource(disk: Disk, file: string): FileSource {
  let opened: DiskFile;
  try {
    opened = disk.open(file, "read");
  } catch (error) {
    throw badRequest(
      "layer_not_found",
      `cannot open layer ${file}: ${error instanceof Error ? error.message : String(error)}`,
      "check that the layer is there and readable",
    );
  }
  try {
    return new FileSource(opened);
  } catch (error) {
    opened.close();
    throw error;
  }
}

/** Reads a small range into a fresh buffer; shorter at the end of the source. */
export function readUpTo(source: ReadSource, offsetBytes: number, lengthBytes: number): Uint8Array {
  const length = Math.max(0, Math.min(lengthBytes, source.sizeBytes - offsetBytes));
  const bytes = new Uint8Array(new ArrayBuffer(length));
  if (length > 0) source.read(offsetBytes, bytes, 0, length);
  return bytes;
}
