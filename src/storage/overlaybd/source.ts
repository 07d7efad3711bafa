import { closeSync, constants } from "node:fs";
import { fileSize, pread } from "../../../ffi/io.ts";
import { badRequest, invalidLayer } from "./errors.ts";
import { openFile } from "./files.ts";

/**
 * Bytes that can be read at any offset: a file, the payload of a tar, the inside of a ZFile. A read behind
 * the end is an error, never zeros.
 */
export interface ReadSource extends Disposable {
  /** For messages: the file, with what was peeled off. */
  readonly name: string;
  readonly sizeBytes: number;
  read(offsetBytes: number, target: Uint8Array, targetOffset: number, lengthBytes: number): void;
  /** The bytes lie as they are in this open file, so that a ring may read them directly. */
  readonly direct?: { readonly fd: number; readonly baseBytes: number };
}

/** Bytes [base, base + size) of an open file, which is closed with the source. */
export class FileSource implements ReadSource {
  readonly name: string;
  readonly sizeBytes: number;
  readonly direct: { readonly fd: number; readonly baseBytes: number };
  #open = true;

  constructor(name: string, fd: number, baseBytes: number, sizeBytes: number) {
    this.name = name;
    this.sizeBytes = sizeBytes;
    this.direct = { fd, baseBytes };
  }

  read(offsetBytes: number, target: Uint8Array, targetOffset: number, lengthBytes: number): void {
    if (!this.#open) throw new Error(`${this.name}: read after close`);
    if (offsetBytes < 0 || offsetBytes + lengthBytes > this.sizeBytes) {
      throw invalidLayer(
        this.name,
        offsetBytes,
        `${lengthBytes} bytes wanted, the data ends at ${this.sizeBytes}`,
      );
    }
    const { fd, baseBytes } = this.direct;
    const got = pread(fd, target, targetOffset, lengthBytes, baseBytes + offsetBytes, this.name);
    if (got !== lengthBytes) {
      throw invalidLayer(
        this.name,
        offsetBytes,
        `${lengthBytes} bytes wanted, ${got} read: the file became shorter`,
      );
    }
  }

  [Symbol.dispose](): void {
    if (!this.#open) return;
    this.#open = false;
    closeSync(this.direct.fd);
  }
}

export function openFileSource(file: string): FileSource {
  let fd: number;
  try {
    fd = openFile(file, constants.O_RDONLY);
  } catch (error) {
    throw badRequest(
      "layer_not_found",
      `cannot open layer ${file}: ${error instanceof Error ? error.message : String(error)}`,
      "check that the layer is there and readable",
    );
  }
  try {
    return new FileSource(file, fd, 0, fileSize(fd, file));
  } catch (error) {
    closeSync(fd);
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
