import type { IoEngine } from "../io/index.ts";
import type { AlignedAccess } from "./aligned.ts";

/** What one request to the engine brings into memory. */
const PIECE_BYTES = 256 << 10;
/** Of one read, at once. */
const PIECES_AT_ONCE = 4;
/** How far a stream that reads on is kept ahead. */
const READ_AHEAD_BYTES = 1 << 20;
/** A fetched page may be gone again before it is read; after that many rounds the thread waits for the disk. */
const MAX_ROUNDS = 3;

interface Range {
  readonly fd: number;
  readonly offsetBytes: number;
  readonly lengthBytes: number;
  readonly name: string;
}

/**
 * Reads what is not in memory, without holding the thread: the file ranges a read needs are brought into the
 * page cache by the engine, then the read is tried again. So every byte is copied under the mapping of the
 * moment in which it is delivered, and neither writes nor compaction nor restacks have to wait for reads under
 * way. What the engine reads goes to memory that nobody looks at.
 */
export class Fetcher {
  readonly #access: AlignedAccess;
  readonly #engine: IoEngine;
  readonly #nowhere: Uint8Array;
  readonly #sizeBytes: number;
  /** Where a stream that reads on would go on, and how far it is fetched already. */
  #next = -1;
  #aheadTo = 0;
  #reachingAhead = false;

  /** `nowhere`: at least 256 KiB that all fetches of the thread may share. */
  constructor(access: AlignedAccess, sizeBytes: number, engine: IoEngine, nowhere: Uint8Array) {
    this.#access = access;
    this.#sizeBytes = sizeBytes;
    this.#engine = engine;
    this.#nowhere = nowhere;
  }

  /** Fills `into`; `check` throws when the device cannot be used any more. */
  async read(offsetBytes: number, into: Uint8Array, check: () => void): Promise<void> {
    const end = offsetBytes + into.length;
    this.#readAhead(offsetBytes, end);
    for (let round = 0; round < MAX_ROUNDS; round++) {
      await this.#fetch(this.#ranges(offsetBytes, into.length));
      check();
      if (this.#access.tryRead(offsetBytes, into)) return;
    }
    this.#access.read(offsetBytes, into);
  }

  /** Tells of a read that needed no fetching, so that a stream which does is known as one. */
  noteRead(offsetBytes: number, lengthBytes: number): void {
    this.#next = offsetBytes + lengthBytes;
  }

  #ranges(offsetBytes: number, lengthBytes: number): Range[] {
    const ranges: Range[] = [];
    this.#access.locate(offsetBytes, lengthBytes, (fd, offset, length, name) => {
      for (let done = 0; done < length; done += PIECE_BYTES) {
        const piece = Math.min(PIECE_BYTES, length - done);
        ranges.push({ fd, offsetBytes: offset + done, lengthBytes: piece, name });
      }
    });
    return ranges;
  }

  async #fetch(ranges: readonly Range[]): Promise<void> {
    // By far the most common case, without the machinery of the other.
    if (ranges.length === 1) {
      await this.#fetchOne(ranges[0]!);
      return;
    }
    for (let i = 0; i < ranges.length; i += PIECES_AT_ONCE) {
      const batch = ranges.slice(i, i + PIECES_AT_ONCE);
      await Promise.all(batch.map((range) => this.#fetchOne(range)));
    }
  }

  #fetchOne({ fd, offsetBytes, lengthBytes, name }: Range): Promise<unknown> {
    // A failure shows again, and with its reason, when the bytes are read in earnest.
    return new Promise((resolve) => {
      this.#engine.startRead(fd, this.#nowhere, 0, lengthBytes, offsetBytes, name, resolve);
    });
  }

  /** Compressed and fragmented layers are no streams to the kernel, though the guest reads on and on. */
  #readAhead(offsetBytes: number, end: number): void {
    const streaming = offsetBytes === this.#next;
    this.#next = end;
    if (!streaming || this.#reachingAhead) return;
    const from = Math.max(end, this.#aheadTo > end + READ_AHEAD_BYTES ? end : this.#aheadTo);
    const to = Math.min(this.#sizeBytes, end + READ_AHEAD_BYTES);
    if (to - from < READ_AHEAD_BYTES / 2) return;
    this.#aheadTo = to;
    this.#reachingAhead = true;
    void this.#fetch(this.#ranges(from, to - from)).then(() => {
      this.#reachingAhead = false;
    });
  }
}
