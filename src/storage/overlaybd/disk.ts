import {
  closeSync,
  constants,
  existsSync,
  openSync,
  readFileSync,
  readlinkSync,
  renameSync,
  statfsSync,
  statSync,
  symlinkSync,
  unlinkSync,
} from "node:fs";
import { dirname } from "node:path";
import * as io from "../../../ffi/io.ts";
import { errorCode } from "../../lib/durable.ts";
import { AenvError } from "../../lib/errors.ts";
import type { SyncTarget } from "./types.ts";

/**
 * An open file. Offsets and lengths are bytes; buffers are a view plus an offset into it. Every failure
 * throws an error that names the file.
 */
export interface DiskFile {
  /** For messages; whoever renames an open file says so here. */
  name: string;
  /** Descriptor, where the host's kernel can be asked directly (a ring); simulated files have none. */
  readonly fd?: number;
  /** Fills `target[targetOffset, +length)`; returns the bytes read, fewer only at the end of the file. */
  read(offset: number, target: Uint8Array, targetOffset: number, length: number): number;
  /**
   * The same from memory alone: -1, with arbitrary content in the buffer, where that would wait for a disk.
   * Absent: nothing ever waits.
   */
  readCached?(offset: number, target: Uint8Array, targetOffset: number, length: number): number;
  /** Writes all of `source[sourceOffset, +length)`. */
  write(offset: number, source: Uint8Array, sourceOffset: number, length: number): void;
  size(): number;
  truncate(length: number): void;
  /** The range reads as zeros and takes no space; the size stays. */
  punchHole(offset: number, length: number): void;
  /** First byte of data at or behind `offset`, undefined when only holes follow. */
  seekData(offset: number): number | undefined;
  /** First hole at or behind `offset`; the end of the file counts as one. */
  seekHole(offset: number): number;
  /** Content (and the size needed to find it) on stable storage. */
  datasync(): void;
  sync(): void;
  /** False when another open file holds a conflicting lock. */
  lock(mode: "unlock" | "shared" | "exclusive"): boolean;
  close(): void;
}

/** An open directory whose names can be made durable. */
export interface DirectorySync extends SyncTarget, Disposable {}

/**
 * The file system as this room uses it: the host's, or in tests one in memory that can lose power. What is
 * not here is not used, so a simulation of these calls is a simulation of the room.
 */
export interface Disk {
  /**
   * The same as long as nothing that was written can have been lost with the page cache: as long as the
   * kernel has not been started anew.
   */
  bootId(): string;
  open(file: string, mode: "read" | "write"): DiskFile;
  /** A new empty file, private to the owner. */
  create(file: string): DiskFile;
  exists(file: string): boolean;
  readText(file: string): string;
  /**
   * Creates a symbolic link that leads nowhere and only holds a text, where the file system keeps that with the names:
   * it is durable as soon as the link's name is, nothing else has to be synced. False, and nothing is created, where
   * it does not, the text is too long (1 to 4 KiB) or there are no such links. For `exists` and `open` a link is not
   * there.
   */
  createNote(file: string, text: string): boolean;
  /** Text of a link; undefined when there is none of this name. */
  readNote(file: string): string | undefined;
  rename(from: string, to: string): void;
  /** Never replaces: an existing `to` is an error of code `file_exists`. */
  renameNoReplace(from: string, to: string): void;
  removeIfPresent(file: string): void;
  /** Makes creations, renames and removals in the directories of these files durable. */
  syncDirectoriesOf(...files: readonly string[]): void;
  /** The same for callers that sync elsewhere than on this thread; the caller closes them. */
  directoriesOf(...files: readonly string[]): DirectorySync[];
  /** True when both names are links to one file. */
  sameFile(a: string, b: string): boolean;
  /** Names the file system that holds a directory. */
  deviceOf(directory: string): string;
  /** Changes when the content of a file may have changed. */
  identityOf(file: string): string;
}

/** Not among the constants of node:fs. */
const O_CLOEXEC = 0o2000000;

function openFd(file: string, flags: number): number {
  return openSync(file, flags | O_CLOEXEC, 0o600);
}

/**
 * `f_type` (linux/magic.h) of ext4, XFS and tmpfs: the text of a link is journaled with its name, or nothing is durable.
 * Not Btrfs, whose links may be empty after a power loss before Linux 5.18 (its commit d0e64a981fd8).
 */
const NOTE_SYSTEMS: ReadonlySet<number> = new Set([0xef53, 0x58465342, 0x01021994]);

/** False where the text is too long or there are no symbolic links. */
export function createLink(file: string, text: string): boolean {
  try {
    symlinkSync(text, file);
    return true;
  } catch (error) {
    const code = errorCode(error) ?? "";
    if (["ENAMETOOLONG", "EPERM", "ENOTSUP", "EOPNOTSUPP", "ENOSYS"].includes(code)) return false;
    // The runtime's own words have the whole text in them.
    if (code !== "ENOSPC" && code !== "EDQUOT") throw error;
    throw new AenvError({
      code: "disk_full",
      status: 507,
      message: `${file} cannot be made: no space left (${code})`,
      remediation: "free space on that file system, and try again",
    });
  }
}

class HostFile implements DiskFile {
  name: string;
  readonly fd: number;

  constructor(name: string, fd: number) {
    this.name = name;
    this.fd = fd;
  }

  read(offset: number, target: Uint8Array, targetOffset: number, length: number): number {
    return io.pread(this.fd, target, targetOffset, length, offset, this.name);
  }

  readCached(offset: number, target: Uint8Array, targetOffset: number, length: number): number {
    return io.preadCached(this.fd, target, targetOffset, length, offset, this.name);
  }

  write(offset: number, source: Uint8Array, sourceOffset: number, length: number): void {
    io.pwrite(this.fd, source, sourceOffset, length, offset, this.name);
  }

  size(): number {
    return io.fileSize(this.fd, this.name);
  }

  truncate(length: number): void {
    io.truncate(this.fd, length, this.name);
  }

  punchHole(offset: number, length: number): void {
    io.punchHole(this.fd, offset, length, this.name);
  }

  seekData(offset: number): number | undefined {
    return io.seekData(this.fd, offset, this.name);
  }

  seekHole(offset: number): number {
    return io.seekHole(this.fd, offset, this.name);
  }

  datasync(): void {
    io.fdatasync(this.fd, this.name);
  }

  sync(): void {
    io.fsync(this.fd, this.name);
  }

  lock(mode: "unlock" | "shared" | "exclusive"): boolean {
    return io.lockFile(this.fd, mode, this.name);
  }

  close(): void {
    closeSync(this.fd);
  }
}

let bootId: string | undefined;

export const hostDisk: Disk = {
  bootId() {
    bootId ??= readFileSync("/proc/sys/kernel/random/boot_id", "latin1").trim();
    return bootId;
  },
  open: (file, mode) =>
    new HostFile(file, openFd(file, mode === "read" ? constants.O_RDONLY : constants.O_RDWR)),
  create: (file) => new HostFile(file, openFd(file, constants.O_RDWR | constants.O_CREAT | constants.O_EXCL)),
  exists: (file) => existsSync(file),
  readText: (file) => readFileSync(file, "utf8"),
  createNote: (file, text) => NOTE_SYSTEMS.has(statfsSync(dirname(file)).type) && createLink(file, text),
  readNote(file) {
    try {
      return readlinkSync(file);
    } catch (error) {
      const code = errorCode(error);
      if (code === "ENOENT" || code === "EINVAL") return undefined;
      throw error;
    }
  },
  rename: (from, to) => renameSync(from, to),
  renameNoReplace: (from, to) => io.renameNoReplace(from, to),
  removeIfPresent(file) {
    try {
      unlinkSync(file);
    } catch (error) {
      if (errorCode(error) !== "ENOENT") throw error;
    }
  },
  syncDirectoriesOf(...files) {
    for (const directory of this.directoriesOf(...files)) {
      using opened = directory;
      opened.datasync();
    }
  },
  directoriesOf(...files) {
    const opened: DirectorySync[] = [];
    try {
      for (const directory of new Set(files.map((file) => dirname(file)))) {
        const fd = openFd(directory, constants.O_RDONLY | constants.O_DIRECTORY);
        opened.push({
          name: directory,
          fd,
          names: true,
          datasync: () => io.fsync(fd, directory),
          [Symbol.dispose]: () => closeSync(fd),
        });
      }
    } catch (error) {
      for (const directory of opened) directory[Symbol.dispose]();
      throw error;
    }
    return opened;
  },
  sameFile(a, b) {
    if (!existsSync(a) || !existsSync(b)) return false;
    const left = statSync(a, { bigint: true });
    const right = statSync(b, { bigint: true });
    return left.dev === right.dev && left.ino === right.ino;
  },
  deviceOf: (directory) => String(statSync(directory).dev),
  identityOf(file) {
    const stat = statSync(file, { bigint: true });
    return `${stat.dev}:${stat.ino}:${stat.size}:${stat.mtimeNs}`;
  },
};

/** A name beside `target` for the file while it is being written. */
export function temporaryName(target: string): string {
  return `${target}.tmp-${process.pid}-${crypto.randomUUID().slice(0, 8)}`;
}

/** A file that waits under a temporary name to take the place of another. */
export interface StagedFile {
  /** To be synced before {@link place}. */
  readonly file: DiskFile;
  /** Renames it over the target. The directory is the caller's to sync. */
  place(): void;
  /** Instead: removes it. */
  discard(): void;
}

/** `replaceFile` in steps, for callers that sync elsewhere than on this thread. */
export function stageFile(disk: Disk, target: string, write: (file: DiskFile) => void): StagedFile {
  const temporary = `${target}.tmp`;
  disk.removeIfPresent(temporary);
  const file = disk.create(temporary);
  let open = true;
  // A descriptor that close complains about is gone all the same: closing it again could hit another file.
  const close = () => {
    if (!open) return;
    open = false;
    file.close();
  };
  const discard = () => {
    try {
      close();
    } finally {
      disk.removeIfPresent(temporary);
    }
  };
  try {
    write(file);
  } catch (error) {
    discard();
    throw error;
  }
  return {
    file,
    place() {
      disk.rename(temporary, target);
      close();
    },
    discard,
  };
}

/**
 * Writes a whole file under a temporary name, syncs it and renames it over `target`, so that a crash leaves
 * the old or the new one. The directory is the caller's to sync. For files of one owner: the temporary name
 * is always the same, so that what a crash left goes away with the next try.
 */
export function replaceFile(
  disk: Disk,
  target: string,
  write: (file: DiskFile) => void,
  durability: "synced" | "unsynced" = "synced",
): void {
  const staged = stageFile(disk, target, write);
  try {
    if (durability === "synced") staged.file.sync();
    staged.place();
  } catch (error) {
    staged.discard();
    throw error;
  }
}

/** Reads up to `length` bytes into a fresh buffer; shorter at the end of the file. */
export function readBytes(file: DiskFile, offset: number, length: number): Uint8Array {
  const bytes = new Uint8Array(new ArrayBuffer(length));
  return bytes.subarray(0, file.read(offset, bytes, 0, length));
}

/** `DiskFile.readCached`, or a plain read where there is nothing to wait for. */
export function readCached(
  file: DiskFile,
  offset: number,
  target: Uint8Array,
  targetOffset: number,
  length: number,
): number {
  return file.readCached === undefined
    ? file.read(offset, target, targetOffset, length)
    : file.readCached(offset, target, targetOffset, length);
}
