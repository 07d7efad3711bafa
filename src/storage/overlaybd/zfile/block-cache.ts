/**
 * Decompressed blocks of the thread's compressed layers. Stacks over the same layer file share them, so that
 * many sandboxes of one image decompress its blocks once. Bounded by bytes; what was not used since it came
 * goes first.
 */
interface Entry {
  readonly file: File;
  readonly block: number;
  readonly bytes: Uint8Array;
  used: boolean;
}

interface File {
  readonly key: string;
  readonly blocks: Map<number, Entry>;
  /** Open handles. */
  users: number;
}

export interface BlockCacheStats {
  readonly bytes: number;
  readonly limitBytes: number;
  readonly hits: number;
  readonly misses: number;
}

const MIN_LIMIT_BYTES = 1 << 20;

export class BlockCache {
  readonly #files = new Map<string, File>();
  /** In order of arrival. */
  readonly #entries = new Set<Entry>();
  #limitBytes: number;
  #bytes = 0;
  #hits = 0;
  #misses = 0;

  constructor(limitBytes: number) {
    this.#limitBytes = Math.max(MIN_LIMIT_BYTES, limitBytes);
  }

  /** Takes effect at once when it becomes smaller. At least 1 MiB. */
  setLimit(limitBytes: number): void {
    this.#limitBytes = Math.max(MIN_LIMIT_BYTES, limitBytes);
    this.#makeRoom(0);
  }

  stats(): BlockCacheStats {
    return {
      bytes: this.#bytes,
      limitBytes: this.#limitBytes,
      hits: this.#hits,
      misses: this.#misses,
    };
  }

  /** Blocks of the file whose content `key` stands for. */
  open(key: string): CachedBlocks {
    let file = this.#files.get(key);
    if (file === undefined) {
      file = { key, blocks: new Map(), users: 0 };
      this.#files.set(key, file);
    }
    file.users++;
    const opened = file;
    let open = true;
    return {
      get: (block) => {
        const entry = opened.blocks.get(block);
        if (entry === undefined) {
          this.#misses++;
          return undefined;
        }
        this.#hits++;
        entry.used = true;
        return entry.bytes;
      },
      has: (block) => opened.blocks.has(block),
      room: (lengthBytes) => this.#makeRoom(lengthBytes) ?? new Uint8Array(new ArrayBuffer(lengthBytes)),
      add: (block, bytes) => this.#add(opened, block, bytes),
      [Symbol.dispose]: () => {
        if (!open) return;
        open = false;
        opened.users--;
        this.#forgetIfUnused(opened);
      },
    };
  }

  #add(file: File, block: number, bytes: Uint8Array): void {
    const old = file.blocks.get(block);
    if (old !== undefined) this.#remove(old);
    const entry: Entry = { file, block, bytes, used: false };
    file.blocks.set(block, entry);
    this.#entries.add(entry);
    this.#bytes += bytes.byteLength;
  }

  #remove(entry: Entry): void {
    this.#entries.delete(entry);
    entry.file.blocks.delete(entry.block);
    this.#bytes -= entry.bytes.byteLength;
    this.#forgetIfUnused(entry.file);
  }

  #forgetIfUnused(file: File): void {
    if (file.users === 0 && file.blocks.size === 0 && this.#files.get(file.key) === file) {
      this.#files.delete(file.key);
    }
  }

  /** Drops blocks until `lengthBytes` more fit; returns the memory of one of that very size, if there was one. */
  #makeRoom(lengthBytes: number): Uint8Array | undefined {
    let reusable: Uint8Array | undefined;
    for (const entry of this.#entries) {
      if (this.#bytes + lengthBytes <= this.#limitBytes) break;
      if (entry.used) {
        // A second round.
        entry.used = false;
        this.#entries.delete(entry);
        this.#entries.add(entry);
        continue;
      }
      this.#remove(entry);
      if (entry.bytes.byteLength === lengthBytes) reusable = entry.bytes;
    }
    return reusable;
  }
}

export interface CachedBlocks extends Disposable {
  /** The block's content, not to be changed; valid until the next call of `room`. */
  get(block: number): Uint8Array | undefined;
  has(block: number): boolean;
  /** Memory for one more block, to be filled and given to `add` (or dropped). */
  room(lengthBytes: number): Uint8Array;
  add(block: number, bytes: Uint8Array): void;
}

const DEFAULT_LIMIT_BYTES = 64 << 20;

/** The calling thread's cache: stacks belong to one thread, and so do the blocks they share. */
export const threadBlockCache = new BlockCache(DEFAULT_LIMIT_BYTES);
