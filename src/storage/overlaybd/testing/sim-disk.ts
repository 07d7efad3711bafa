import { dirname } from "node:path";
import { AenvError } from "../../../lib/errors.ts";
import type { DirectorySync, Disk, DiskFile } from "../disk.ts";

/**
 * A file system in memory that can lose power. What it promises is what POSIX and journalling file systems do:
 *
 * - Content not synced is written back in any order, by sectors of 512 bytes, or not at all: after power loss each
 *   sector of a file is as it was at the last sync or as any write, hole or truncation since left it. Sectors that
 *   were never written back read as zeros. The file's size may be any it had since the last sync.
 * - Names (creations, renames, removals) become durable in the order they were made, and only surely so when
 *   their directory is synced. Syncing a file does not make its name durable.
 * - The text of a symbolic link goes with its name, where links are used for texts.
 * - A killed process loses nothing of this: but the call it died in may be half done.
 * - A call may fail (no space, no descriptor, an I/O error) without any crash. A write may be half done then; of a sync
 *   that failed, the kernel may take pages for clean that it did not write: no later sync writes them either.
 */
const SECTOR = 512;
let disks = 0;
/** Block that a hole is looked for in. */
const BLOCK = 4096;

export type Random = (limit: number) => number;

/** Thrown by every call from the moment of the crash on. */
export class Crashed extends Error {}

class Inode {
  /** Absent: a hole. Arrays are never changed once they are in here. */
  sectors = new Map<number, Uint8Array>();
  size = 0;
  durable = new Map<number, Uint8Array>();
  durableSize = 0;
  /** What sectors became since the last sync, oldest first. */
  versions = new Map<number, (Uint8Array | undefined)[]>();
  sizes: number[] = [];
  locks: { exclusive: boolean; owner: object }[] = [];
  /** Of a link, which has no content: it is part of the name. */
  note: string | undefined;

  set(sector: number, bytes: Uint8Array | undefined): void {
    if (bytes === undefined) this.sectors.delete(sector);
    else this.sectors.set(sector, bytes);
    const versions = this.versions.get(sector);
    if (versions === undefined) this.versions.set(sector, [bytes]);
    else versions.push(bytes);
  }

  resize(size: number): void {
    this.size = size;
    this.sizes.push(size);
  }

  /** A sync that failed: some of what was to be written never will be. */
  loseSome(random: Random): void {
    for (const sector of [...this.versions.keys()]) if (random(2) === 0) this.versions.delete(sector);
  }

  sync(): void {
    for (const sector of this.versions.keys()) {
      const bytes = this.sectors.get(sector);
      if (bytes === undefined) this.durable.delete(sector);
      else this.durable.set(sector, bytes);
    }
    this.durableSize = this.size;
    this.versions.clear();
    this.sizes = [];
  }

  /** Content as it is, all of it on stable storage. */
  static fixed(sectors: Map<number, Uint8Array>, size: number): Inode {
    const inode = new Inode();
    inode.sectors = sectors;
    inode.durable = new Map(sectors);
    inode.size = size;
    inode.durableSize = size;
    return inode;
  }

  afterPowerLoss(random: Random): Inode {
    if (this.note !== undefined) return this;
    // Some files are written back whole, some not at all, most in part.
    const odds = [0, 1, 3, 5, 8, 9, 10][random(7)]!;
    const sectors = new Map(this.durable);
    for (const [sector, versions] of this.versions) {
      if (random(10) >= odds) continue;
      const bytes = odds === 10 ? versions.at(-1) : versions[random(versions.length)];
      if (bytes === undefined) sectors.delete(sector);
      else sectors.set(sector, bytes);
    }
    let size = this.durableSize;
    if (this.sizes.length > 0 && random(10) < odds) {
      size = odds === 10 ? this.size : this.sizes[random(this.sizes.length)]!;
    }
    for (const [sector, bytes] of sectors) {
      if (sector * SECTOR >= size) sectors.delete(sector);
      else if ((sector + 1) * SECTOR > size) {
        const cut = bytes.slice();
        cut.fill(0, size - sector * SECTOR);
        sectors.set(sector, cut);
      }
    }
    return Inode.fixed(sectors, size);
  }
}

interface NameChange {
  readonly directories: readonly string[];
  readonly apply: (names: Map<string, Inode>) => void;
}

function failure(code: string, message: string): Error {
  return Object.assign(new Error(`${code}: ${message}`), { code });
}

export class SimDisk implements Disk {
  #names = new Map<string, Inode>();
  #durableNames = new Map<string, Inode>();
  #journal: NameChange[] = [];
  #bootId: string;
  #boots: number;
  #crashed = false;
  /** Changes and syncs that are still carried out before the crash. */
  #left = Number.POSITIVE_INFINITY;
  /** Calls that still succeed before one fails. */
  #untilFailure = Number.POSITIVE_INFINITY;
  /** The call that failed last, as told to `failAfter`: what it was and of which file. */
  failed: { readonly call: string; readonly file: string } | undefined;
  #random: Random;
  readonly #noteLimit: number;
  readonly #serial = ++disks;
  /** Changes and syncs so far. */
  operations = 0;

  /** `noteLimit`: longest text that a link holds. */
  constructor(random: Random, boots = 1, noteLimit = 1023) {
    this.#noteLimit = noteLimit;
    this.#random = random;
    this.#boots = boots;
    this.#bootId = `boot-${boots}`;
  }

  /** The n-th change or sync from now on is the last and perhaps not whole. */
  crashAfter(operations: number): void {
    this.#left = operations;
  }

  get crashed(): boolean {
    return this.#crashed;
  }

  /** The n-th call from now on that can fail does so, once. Infinity: none. */
  failAfter(calls: number): void {
    this.#untilFailure = calls;
    this.failed = undefined;
  }

  /** Called before each call that can fail; `halfDone` is what it leaves. */
  #mayFail(call: string, file: string, halfDone?: () => void): void {
    if (this.#crashed || this.#untilFailure-- > 0) return;
    this.#untilFailure = Number.POSITIVE_INFINITY;
    this.failed = { call, file };
    halfDone?.();
    throw failure(call === "write" ? "ENOSPC" : call === "open" ? "EMFILE" : "EIO", `${call} of ${file}`);
  }

  /** The process is dead, the kernel is not. */
  afterKill(): SimDisk {
    const disk = new SimDisk(this.#random, this.#boots, this.#noteLimit);
    disk.#names = this.#names;
    disk.#durableNames = this.#durableNames;
    disk.#journal = this.#journal;
    for (const inode of this.#names.values()) inode.locks = [];
    this.#crashed = true;
    return disk;
  }

  /** One of the states power loss may leave. May be asked for again and again. */
  afterPowerLoss(random: Random): SimDisk {
    const names = new Map(this.#durableNames);
    const kept = random(3) === 0 ? this.#journal.length : random(this.#journal.length + 1);
    for (const change of this.#journal.slice(0, kept)) change.apply(names);
    const disk = new SimDisk(this.#random, this.#boots + 1, this.#noteLimit);
    const copies = new Map<Inode, Inode>();
    for (const [name, inode] of names) {
      let copy = copies.get(inode);
      if (copy === undefined) {
        copy = inode.afterPowerLoss(random);
        copies.set(inode, copy);
      }
      disk.#names.set(name, copy);
    }
    disk.#durableNames = new Map(disk.#names);
    return disk;
  }

  /** Names of files, for messages and to look for litter. */
  list(): string[] {
    return [...this.#names.keys()].sort();
  }

  /** Space that a file takes, in bytes. */
  hostBytes(file: string): number {
    const blocks = new Set<number>();
    for (const sector of this.#names.get(file)?.sectors.keys() ?? []) {
      blocks.add(Math.floor((sector * SECTOR) / BLOCK));
    }
    return blocks.size * BLOCK;
  }

  /** Called before each change or sync; true when it is the one the process dies in. */
  #tick(): boolean {
    if (this.#crashed) throw new Crashed("the process is dead");
    this.operations++;
    if (this.#left-- > 0) return false;
    this.#crashed = true;
    return true;
  }

  /** What a killed process leaves of a write: whole pages of the cache, which the kernel fills in one go each. */
  #beginning(offset: number, length: number): number {
    const end = offset + this.#random(length + 1);
    return this.#random(3) === 0 ? length : Math.max(0, end - (end % BLOCK) - offset);
  }

  #change(apply: () => void): void {
    const last = this.#tick();
    if (!last || this.#random(2) === 0) apply();
    if (last) throw new Crashed("the process died");
  }

  #alive(): void {
    if (this.#crashed) throw new Crashed("the process is dead");
  }

  #rename(change: NameChange): void {
    change.apply(this.#names);
    this.#journal.push(change);
  }

  bootId(): string {
    return this.#bootId;
  }

  #inode(file: string): Inode {
    const inode = this.#names.get(file);
    if (inode === undefined) throw failure("ENOENT", `no such file, ${file}`);
    return inode;
  }

  #content(file: string): Inode {
    const inode = this.#inode(file);
    if (inode.note !== undefined) throw failure("ENOENT", `${file} leads nowhere`);
    return inode;
  }

  createNote(file: string, text: string): boolean {
    if (this.#names.has(file)) throw failure("EEXIST", `file exists, ${file}`);
    if (text.length > this.#noteLimit) return false;
    const inode = new Inode();
    inode.note = text;
    this.#change(() =>
      this.#rename({ directories: [dirname(file)], apply: (names) => names.set(file, inode) }),
    );
    return true;
  }

  readNote(file: string): string | undefined {
    this.#alive();
    return this.#names.get(file)?.note;
  }

  open(file: string, mode: "read" | "write"): DiskFile {
    this.#alive();
    this.#mayFail("open", file);
    return this.#file(file, this.#content(file), mode === "write");
  }

  create(file: string): DiskFile {
    if (this.#names.has(file)) throw failure("EEXIST", `file exists, ${file}`);
    this.#mayFail("create", file);
    const inode = new Inode();
    this.#change(() =>
      this.#rename({ directories: [dirname(file)], apply: (names) => names.set(file, inode) }),
    );
    return this.#file(file, inode, true);
  }

  exists(file: string): boolean {
    this.#alive();
    const inode = this.#names.get(file);
    if (inode !== undefined) return inode.note === undefined;
    return [...this.#names.keys()].some((name) => dirname(name) === file);
  }

  readText(file: string): string {
    const opened = this.open(file, "read");
    const bytes = new Uint8Array(opened.size());
    opened.read(0, bytes, 0, bytes.byteLength);
    return new TextDecoder().decode(bytes);
  }

  rename(from: string, to: string): void {
    const inode = this.#inode(from);
    this.#mayFail("rename", from);
    this.#change(() =>
      this.#rename({
        directories: [dirname(from), dirname(to)],
        apply: (names) => {
          names.delete(from);
          names.set(to, inode);
        },
      }),
    );
  }

  renameNoReplace(from: string, to: string): void {
    if (this.#names.has(to)) {
      throw new AenvError({ code: "file_exists", status: 409, message: `rename of ${from}: ${to} exists` });
    }
    this.rename(from, to);
  }

  removeIfPresent(file: string): void {
    this.#alive();
    if (!this.#names.has(file)) return;
    this.#mayFail("remove", file);
    this.#change(() => this.#rename({ directories: [dirname(file)], apply: (names) => names.delete(file) }));
  }

  syncDirectoriesOf(...files: readonly string[]): void {
    for (const directory of this.directoriesOf(...files)) directory.datasync();
  }

  #syncDirectories(files: readonly string[]): void {
    this.#mayFail("sync", dirname(files[0]!));
    this.#change(() => {
      const directories = new Set(files.map((file) => dirname(file)));
      const last = this.#journal.findLastIndex((change) =>
        change.directories.some((name) => directories.has(name)),
      );
      // One journal: what was logged before goes with it.
      for (const change of this.#journal.splice(0, last + 1)) change.apply(this.#durableNames);
    });
  }

  directoriesOf(...files: readonly string[]): DirectorySync[] {
    this.#mayFail("open", dirname(files[0]!));
    const datasync = () => this.#syncDirectories(files);
    return [{ name: dirname(files[0]!), names: true, datasync, [Symbol.dispose]: () => undefined }];
  }

  sameFile(a: string, b: string): boolean {
    this.#alive();
    return this.#names.has(a) && this.#names.get(a) === this.#names.get(b);
  }

  deviceOf(): string {
    return "1";
  }

  identityOf(file: string): string {
    // Blocks of files are cached by this, also while another disk of another seed is simulated.
    return `${this.#serial}:${file}:${this.#inode(file).size}:${this.operations}`;
  }

  #file(name: string, inode: Inode, writable: boolean): DiskFile {
    const owner = {};
    let open = true;
    const usable = () => {
      this.#alive();
      if (!open) throw failure("EBADF", `${name} is closed`);
    };
    const change = (call: string, apply: () => void, halfDone?: () => void) => {
      usable();
      if (!writable) throw failure("EBADF", `${name} is open for reading`);
      this.#mayFail(call, name, halfDone);
      this.#change(apply);
    };
    const sync = () =>
      change(
        "sync",
        () => inode.sync(),
        () => {
          // Of files that are opened again nobody could know what is missing, so nothing is.
          if (name.endsWith(".compact")) inode.loseSome(this.#random);
        },
      );
    /** Whole blocks become holes; the rest of the range zeros, where anything is. */
    const erase = (from: number, to: number) => {
      const holesFrom = Math.ceil(from / BLOCK) * BLOCK;
      const holesTo = to - (to % BLOCK);
      for (let at = from; at < to; ) {
        const sector = Math.floor(at / SECTOR);
        const start = at - sector * SECTOR;
        const end = Math.min(SECTOR, to - sector * SECTOR);
        const old = inode.sectors.get(sector);
        at = sector * SECTOR + end;
        if (old === undefined) continue;
        const inHole = sector * SECTOR >= holesFrom && (sector + 1) * SECTOR <= holesTo;
        if (inHole) inode.set(sector, undefined);
        else inode.set(sector, old.slice().fill(0, start, end));
      }
    };
    return {
      name,
      read(offset, target, targetOffset, length) {
        usable();
        const end = Math.min(offset + length, inode.size);
        for (let at = offset; at < end; ) {
          const sector = Math.floor(at / SECTOR);
          const start = at - sector * SECTOR;
          const part = Math.min(SECTOR - start, end - at);
          const to = targetOffset + (at - offset);
          const bytes = inode.sectors.get(sector);
          if (bytes === undefined) target.fill(0, to, to + part);
          else if (part === SECTOR) target.set(bytes, to);
          else target.set(bytes.subarray(start, start + part), to);
          at += part;
        }
        return Math.max(0, end - offset);
      },
      write: (offset, source, sourceOffset, length) => {
        usable();
        if (!writable) throw failure("EBADF", `${name} is open for reading`);
        let failed: unknown;
        try {
          this.#mayFail("write", name);
        } catch (error) {
          failed = error;
        }
        const last = failed === undefined && this.#tick();
        const whole = last || failed !== undefined ? this.#beginning(offset, length) : length;
        for (let at = offset; at < offset + whole; ) {
          const sector = Math.floor(at / SECTOR);
          const start = at - sector * SECTOR;
          const part = Math.min(SECTOR - start, offset + whole - at);
          const bytes = inode.sectors.get(sector)?.slice() ?? new Uint8Array(SECTOR);
          const from = sourceOffset + (at - offset);
          bytes.set(source.subarray(from, from + part), start);
          inode.set(sector, bytes);
          at += part;
        }
        if (offset + whole > inode.size && whole > 0) inode.resize(offset + whole);
        if (last) throw new Crashed("the process died");
        if (failed !== undefined) throw failed;
      },
      size() {
        usable();
        return inode.size;
      },
      truncate(length) {
        change("truncate", () => {
          if (length < inode.size) erase(length, Math.ceil(inode.size / BLOCK) * BLOCK);
          inode.resize(length);
        });
      },
      punchHole: (offset, length) =>
        change("punch", () => erase(offset, Math.min(offset + length, inode.size))),
      seekData(offset) {
        usable();
        let found: number | undefined;
        for (const sector of inode.sectors.keys()) {
          const block = sector * SECTOR - ((sector * SECTOR) % BLOCK);
          if (block + BLOCK <= offset) continue;
          const at = Math.max(offset, block);
          if (found === undefined || at < found) found = at;
        }
        return found !== undefined && found < inode.size ? found : undefined;
      },
      seekHole(offset) {
        usable();
        const blocks = new Set(
          [...inode.sectors.keys()].map((sector) => Math.floor((sector * SECTOR) / BLOCK)),
        );
        let block = Math.floor(offset / BLOCK);
        if (!blocks.has(block)) return Math.min(offset, inode.size);
        while (blocks.has(block)) block++;
        return Math.min(block * BLOCK, inode.size);
      },
      datasync: sync,
      sync,
      lock(mode) {
        usable();
        inode.locks = inode.locks.filter((lock) => lock.owner !== owner);
        if (mode === "unlock") return true;
        const exclusive = mode === "exclusive";
        if (inode.locks.some((lock) => exclusive || lock.exclusive)) return false;
        inode.locks.push({ exclusive, owner });
        return true;
      },
      close() {
        open = false;
        inode.locks = inode.locks.filter((lock) => lock.owner !== owner);
      },
    };
  }
}
