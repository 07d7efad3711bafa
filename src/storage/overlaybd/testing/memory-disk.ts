import { AenvError } from "../../../lib/errors.ts";
import type { DirectorySync, Disk, DiskFile } from "../disk.ts";

/** Disks so far: what is cached of a file is not another disk's. */
let disks = 0;

/** Bytes of a file in memory; `length` of them are the file. */
export interface MemoryContent {
  bytes: Uint8Array;
  length: number;
}

/**
 * A plain file system in memory, for tests that open very many files. It checks every access: a read must lie in its
 * buffer and, unless it may end with the file (`strict` false, as for a file being written), in the file.
 */
export class MemoryDisk implements Disk {
  readonly #serial = ++disks;
  readonly files = new Map<string, MemoryContent>();
  strict = false;
  reads = 0;
  #version = 0;

  put(name: string, content: MemoryContent): void {
    this.files.set(name, content);
    this.#version++;
  }

  bootId(): string {
    return "memory";
  }

  #content(file: string): MemoryContent {
    const content = this.files.get(file);
    if (content === undefined) {
      throw Object.assign(new Error(`ENOENT: no such file, ${file}`), { code: "ENOENT" });
    }
    return content;
  }

  open(file: string, mode: "read" | "write"): DiskFile {
    return this.#file(file, this.#content(file), mode === "write");
  }

  create(file: string): DiskFile {
    const content = { bytes: new Uint8Array(4096), length: 0 };
    this.put(file, content);
    return this.#file(file, content, true);
  }

  exists(file: string): boolean {
    return this.files.has(file);
  }

  readText(file: string): string {
    const { bytes, length } = this.#content(file);
    return new TextDecoder().decode(bytes.subarray(0, length));
  }

  createNote(): boolean {
    return false;
  }

  readNote(): string | undefined {
    return undefined;
  }

  rename(from: string, to: string): void {
    const content = this.#content(from);
    this.files.delete(from);
    this.put(to, content);
  }

  renameNoReplace(from: string, to: string): void {
    if (this.exists(to)) throw new AenvError({ code: "file_exists", message: `${to} exists` });
    this.rename(from, to);
  }

  removeIfPresent(file: string): void {
    this.files.delete(file);
  }

  syncDirectoriesOf(): void {
    this.#version++;
  }

  directoriesOf(): DirectorySync[] {
    return [];
  }

  sameFile(a: string, b: string): boolean {
    return this.exists(a) && this.files.get(a) === this.files.get(b);
  }

  deviceOf(): string {
    return "memory";
  }

  identityOf(file: string): string {
    return `${this.#serial}:${file}:${this.#version}`;
  }

  #file(name: string, content: MemoryContent, writable: boolean): DiskFile {
    const disk = this;
    const refuse = (what: string, offset: number, length: number): never => {
      throw new Error(`${what} outside of ${name} (${content.length} bytes): ${offset}+${length}`);
    };
    const reserve = (length: number) => {
      if (!writable) throw new Error(`${name} is open for reading`);
      if (length > content.bytes.byteLength) {
        const grown = new Uint8Array(Math.max(length, 2 * content.bytes.byteLength));
        grown.set(content.bytes.subarray(0, content.length));
        content.bytes = grown;
      }
    };
    return {
      name,
      read(offset, target, targetOffset, length) {
        disk.reads++;
        if (!(offset >= 0 && length >= 0 && targetOffset >= 0)) refuse("read", offset, length);
        if (targetOffset + length > target.byteLength) refuse("read behind the buffer", offset, length);
        if (disk.strict && offset + length > content.length) refuse("read", offset, length);
        const got = Math.max(0, Math.min(length, content.length - offset));
        if (got > 0) target.set(content.bytes.subarray(offset, offset + got), targetOffset);
        return got;
      },
      write(offset, source, sourceOffset, length) {
        if (!(offset >= 0 && length >= 0 && sourceOffset + length <= source.byteLength)) {
          refuse("write", offset, length);
        }
        reserve(offset + length);
        content.bytes.set(source.subarray(sourceOffset, sourceOffset + length), offset);
        content.length = Math.max(content.length, offset + length);
      },
      size: () => content.length,
      truncate(length) {
        reserve(length);
        if (length < content.length) content.bytes.fill(0, length, content.length);
        content.length = length;
      },
      punchHole(offset, length) {
        content.bytes.fill(0, offset, Math.min(content.length, offset + length));
      },
      seekData: (offset) => (offset < content.length ? offset : undefined),
      seekHole: () => content.length,
      datasync: () => undefined,
      sync: () => undefined,
      lock: () => true,
      close: () => undefined,
    };
  }
}
