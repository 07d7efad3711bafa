import { type Disk, type DiskFile, hostDisk, temporaryName } from "./disk.ts";
import { badRequest } from "./errors.ts";
import { MAX_DISK_BYTES, MAX_TAG_BYTES, parseUuid, SECTOR_BYTES } from "./lsmt/format.ts";
import { type ByteSink, CommittedWriter } from "./lsmt/writer.ts";
import { encodeTarHead, TAR_HEAD_BYTES, tarTailBytes } from "./tar.ts";
import type { CommitOptions, LayerRef, LayerWriter, LayerWriterOptions } from "./types.ts";
import { ZFileWriter } from "./zfile/writer.ts";

const BUFFER_BYTES = 1 << 20;

/** Appends to a temporary file beside the target, through a buffer; published by rename when finished. */
export class OutputFile implements ByteSink, Disposable {
  readonly #disk: Disk;
  readonly #target: string;
  readonly #temporary: string;
  readonly #buffer = new Uint8Array(new ArrayBuffer(BUFFER_BYTES));
  #opened: DiskFile | undefined;
  #buffered = 0;
  #written = 0;

  constructor(disk: Disk, target: string) {
    if (disk.exists(target)) {
      throw badRequest(
        "layer_exists",
        `${target} exists`,
        "layers are never overwritten: choose another path",
      );
    }
    this.#disk = disk;
    this.#target = target;
    this.#temporary = temporaryName(target);
    this.#opened = disk.create(this.#temporary);
  }

  get position(): number {
    return this.#written + this.#buffered;
  }

  #file(): DiskFile {
    if (this.#opened === undefined)
      throw new Error(`${this.#target}: written after it was finished or aborted`);
    return this.#opened;
  }

  append(source: Uint8Array, sourceOffset: number, lengthBytes: number): void {
    const file = this.#file();
    let from = sourceOffset;
    let left = lengthBytes;
    if (left >= BUFFER_BYTES) {
      this.#flush();
      file.write(this.#written, source, from, left);
      this.#written += left;
      return;
    }
    while (left > 0) {
      const part = Math.min(left, BUFFER_BYTES - this.#buffered);
      this.#buffer.set(source.subarray(from, from + part), this.#buffered);
      this.#buffered += part;
      from += part;
      left -= part;
      if (this.#buffered === BUFFER_BYTES) this.#flush();
    }
  }

  #flush(): void {
    if (this.#buffered === 0) return;
    this.#file().write(this.#written, this.#buffer, 0, this.#buffered);
    this.#written += this.#buffered;
    this.#buffered = 0;
  }

  /** Overwrites bytes written before. */
  rewrite(offsetBytes: number, bytes: Uint8Array): void {
    this.#flush();
    this.#file().write(offsetBytes, bytes, 0, bytes.byteLength);
  }

  /** Flushes, syncs and renames into place; the file is there whole or not at all. Returns its size. */
  publish(): number {
    this.#flush();
    const file = this.#file();
    file.sync();
    this.#disk.renameNoReplace(this.#temporary, this.#target);
    this.#opened = undefined;
    file.close();
    this.#disk.syncDirectoriesOf(this.#target);
    return this.#written;
  }

  /** Drops what was written, unless it has been published. */
  [Symbol.dispose](): void {
    if (this.#opened === undefined) return;
    this.#opened.close();
    this.#opened = undefined;
    this.#disk.removeIfPresent(this.#temporary);
  }
}

function checkedUuid(text: string | undefined, name: string): string | undefined {
  if (text === undefined) return undefined;
  const uuid = parseUuid(text);
  if (uuid === undefined) throw badRequest("invalid_uuid", `${name} ${JSON.stringify(text)} is no uuid`);
  return uuid;
}

function checkedTag(text: string | undefined): Uint8Array | undefined {
  if (text === undefined) return undefined;
  const bytes = new TextEncoder().encode(text);
  if (bytes.byteLength > MAX_TAG_BYTES) {
    throw badRequest(
      "invalid_tag",
      `user tag of ${bytes.byteLength} bytes, at most ${MAX_TAG_BYTES} are kept`,
    );
  }
  return bytes;
}

export function checkVirtualSize(virtualSizeBytes: number, minimum: number): void {
  if (
    !Number.isInteger(virtualSizeBytes) ||
    virtualSizeBytes < minimum ||
    virtualSizeBytes > MAX_DISK_BYTES ||
    virtualSizeBytes % SECTOR_BYTES !== 0
  ) {
    throw badRequest(
      "invalid_virtual_size",
      `virtual size ${virtualSizeBytes}: must be a multiple of ${SECTOR_BYTES} bytes from ${minimum} to ${MAX_DISK_BYTES}`,
    );
  }
}

/**
 * `copy`: what is written comes from other layers, whose mappings may lie behind the virtual size (a smaller layer
 * over a bigger one, or a size of 0, which inherits) and are kept.
 */
export type LayerFileOptions = LayerWriterOptions &
  Pick<CommitOptions, "compression" | "tar" | "userTag"> & { readonly copy?: boolean };

/** A layer in committed form being written, compressed or not. */
export class LayerFileWriter implements LayerWriter {
  readonly #target: string;
  readonly #uuid: string | undefined;
  readonly #limitBytes: number;
  /** Where the layer begins in the file: behind the tar headers, if any. */
  readonly #payloadOffset: number;
  readonly #output: OutputFile;
  readonly #zfile: ZFileWriter | undefined;
  readonly #writer: CommittedWriter;

  constructor(disk: Disk, target: string, options: LayerFileOptions) {
    checkVirtualSize(options.virtualSizeBytes, 0);
    const identity = {
      virtualSizeBytes: options.virtualSizeBytes,
      uuid: checkedUuid(options.uuid, "uuid"),
      parentUuid: checkedUuid(options.parentUuid, "parent uuid"),
      userTag: checkedTag(options.userTag),
    };
    this.#target = target;
    this.#uuid = identity.uuid;
    this.#limitBytes = options.copy === true ? MAX_DISK_BYTES : options.virtualSizeBytes;
    using cleanup = new DisposableStack();
    this.#output = cleanup.use(new OutputFile(disk, target));
    this.#payloadOffset = options.tar === true ? TAR_HEAD_BYTES : 0;
    if (options.tar === true) this.#output.append(encodeTarHead(0), 0, TAR_HEAD_BYTES);
    this.#zfile =
      options.compression === undefined
        ? undefined
        : cleanup.use(new ZFileWriter(this.#output, options.compression));
    this.#writer = new CommittedWriter(this.#zfile ?? this.#output, identity);
    cleanup.move();
  }

  #range(offsetBytes: number, lengthBytes: number): void {
    if (
      !(offsetBytes >= 0 && lengthBytes >= 0) ||
      offsetBytes % SECTOR_BYTES !== 0 ||
      lengthBytes % SECTOR_BYTES !== 0
    ) {
      throw badRequest("invalid_range", `range ${offsetBytes}+${lengthBytes} is not in whole sectors`);
    }
    if (offsetBytes + lengthBytes > this.#limitBytes) {
      throw badRequest(
        "invalid_range",
        `range ${offsetBytes}+${lengthBytes} ends behind the virtual size ${this.#limitBytes}`,
      );
    }
    if (offsetBytes < this.#writer.nextSector * SECTOR_BYTES) {
      throw badRequest(
        "invalid_range",
        `range ${offsetBytes}+${lengthBytes} begins before the end of the previous one: offsets must ascend`,
      );
    }
  }

  get mappingCount(): number {
    return this.#writer.mappingCount;
  }

  append(offsetBytes: number, data: Uint8Array): void {
    this.#range(offsetBytes, data.byteLength);
    if (data.byteLength === 0) return;
    this.#writer.data(offsetBytes / SECTOR_BYTES, data, 0, data.byteLength / SECTOR_BYTES);
  }

  zero(offsetBytes: number, lengthBytes: number): void {
    this.#range(offsetBytes, lengthBytes);
    if (lengthBytes === 0) return;
    this.#writer.zero(offsetBytes / SECTOR_BYTES, lengthBytes / SECTOR_BYTES);
  }

  finish(): LayerRef {
    this.#writer.finish();
    this.#zfile?.finish((header) => this.#output.rewrite(this.#payloadOffset, header));
    if (this.#payloadOffset > 0) {
      const payloadBytes = this.#output.position - this.#payloadOffset;
      const tail = new Uint8Array(tarTailBytes(payloadBytes));
      this.#output.append(tail, 0, tail.byteLength);
      this.#output.rewrite(0, encodeTarHead(payloadBytes));
    }
    const size = this.#output.publish();
    this.#zfile?.[Symbol.dispose]();
    return { file: this.#target, size, ...(this.#uuid === undefined ? {} : { uuid: this.#uuid }) };
  }

  abort(): void {
    this.#zfile?.[Symbol.dispose]();
    this.#output[Symbol.dispose]();
  }

  [Symbol.dispose](): void {
    this.abort();
  }
}

export function createLayerWriter(
  target: string,
  options: LayerWriterOptions,
  disk: Disk = hostDisk,
): LayerWriter {
  return new LayerFileWriter(disk, target, options);
}
