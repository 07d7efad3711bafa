/**
 * Decompressed blocks of the thread's compressed layers. Stacks over the same layer file share them, so that
 * many sandboxes of one image decompress its blocks once. Bounded by bytes; what was not used since it came
 * goes first.
 */
interface File {
  readonly key: string;
  /** Slot of each cached block plus 1, in pages that are made when they are needed. */
  readonly pages: (Uint32Array | undefined)[];
  cached: number;
  /** Open handles. */
  users: number;
}

const PAGE_BITS = 10;
const PAGE_BLOCKS = 1 << PAGE_BITS;

export interface BlockCacheStats {
  readonly bytes: number;
  readonly limitBytes: number;
  readonly hits: number;
  readonly misses: number;
}

const MIN_LIMIT_BYTES = 1 << 20;

export class BlockCache {
  readonly #files = new Map<string, File>();
  /**
   * Blocks in slots that a hand goes around: one that was used since the hand came by stays for another round. Arrays
   * instead of objects, since a block comes and goes with every read that misses.
   */
  readonly #owners: (File | undefined)[] = [];
  readonly #blocks: number[] = [];
  readonly #contents: (Uint8Array | undefined)[] = [];
  readonly #used: boolean[] = [];
  readonly #freeSlots: number[] = [];
  #hand = 0;
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
      file = { key, pages: [], cached: 0, users: 0 };
      this.#files.set(key, file);
    }
    file.users++;
    const opened = file;
    let open = true;
    return {
      get: (block) => {
        const slot = this.#slotOf(opened, block);
        if (slot < 0) {
          this.#misses++;
          return undefined;
        }
        this.#hits++;
        this.#used[slot] = true;
        return this.#contents[slot];
      },
      has: (block) => this.#slotOf(opened, block) >= 0,
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

  /** -1: it has none. */
  #slotOf(file: File, block: number): number {
    const page = file.pages[Math.floor(block / PAGE_BLOCKS)];
    return page === undefined ? -1 : page[block % PAGE_BLOCKS]! - 1;
  }

  #add(file: File, block: number, bytes: Uint8Array): void {
    const old = this.#slotOf(file, block);
    if (old >= 0) this.#remove(old);
    const slot = this.#freeSlots.pop() ?? this.#owners.length;
    this.#owners[slot] = file;
    this.#blocks[slot] = block;
    this.#contents[slot] = bytes;
    this.#used[slot] = false;
    const number = Math.floor(block / PAGE_BLOCKS);
    let page = file.pages[number];
    if (page === undefined) {
      while (file.pages.length < number) file.pages.push(undefined);
      page = new Uint32Array(PAGE_BLOCKS);
      file.pages[number] = page;
    }
    page[block % PAGE_BLOCKS] = slot + 1;
    file.cached++;
    this.#bytes += bytes.byteLength;
  }

  #remove(slot: number): Uint8Array {
    const file = this.#owners[slot]!;
    const block = this.#blocks[slot]!;
    const bytes = this.#contents[slot]!;
    file.pages[Math.floor(block / PAGE_BLOCKS)]![block % PAGE_BLOCKS] = 0;
    file.cached--;
    this.#owners[slot] = undefined;
    this.#contents[slot] = undefined;
    this.#freeSlots.push(slot);
    this.#bytes -= bytes.byteLength;
    this.#forgetIfUnused(file);
    return bytes;
  }

  #forgetIfUnused(file: File): void {
    if (file.users === 0 && file.cached === 0 && this.#files.get(file.key) === file) {
      this.#files.delete(file.key);
    }
  }

  /** Drops blocks until `lengthBytes` more fit; returns the memory of one of that very size, if there was one. */
  #makeRoom(lengthBytes: number): Uint8Array | undefined {
    let reusable: Uint8Array | undefined;
    // Twice around, no block is left that was used since.
    let rest = 2 * this.#owners.length;
    while (this.#bytes + lengthBytes > this.#limitBytes && rest-- > 0) {
      const slot = this.#hand;
      this.#hand = slot + 1 < this.#owners.length ? slot + 1 : 0;
      if (this.#owners[slot] === undefined) continue;
      if (this.#used[slot]) {
        this.#used[slot] = false;
        continue;
      }
      const bytes = this.#remove(slot);
      if (bytes.byteLength === lengthBytes) reusable = bytes;
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
