import { closeSync, constants, openSync } from "node:fs";
import { allocateBig, beginsAtMultiple } from "../../../ffi/bigmem.ts";
import type { IoEngine } from "../io/index.ts";
import type { LayerStack, RawRange } from "../overlaybd/types.ts";

/** Longer reads are streams, which the page cache reads ahead for. */
const SLOT_BYTES = 64 << 10;
const SLOTS = 32;
/** What O_DIRECT asks of offsets and lengths, at least; a disk that asks for more refuses and is read as ever. */
const UNIT_BYTES = 512;
/** Not among the constants of node:fs. */
const O_CLOEXEC = 0o2000000;

/** A descriptor of our own, for O_DIRECT. */
interface DirectFile {
  readonly fd: number;
  /** Under way. */
  reads: number;
  /** Closed with the last of them. */
  dropped: boolean;
}

/**
 * Reads of uncompressed lower layers around the page cache: for devices whose image nobody else on the host uses, or
 * whose guest caches all it reads. A read that lies in one piece of one such layer goes to the disk as it is; every
 * other is left to the page cache. Reads see what was there when they began, or later.
 */
export class DirectReader implements AsyncDisposable {
  readonly #stack: LayerStack;
  readonly #engine: IoEngine;
  /** By layer; undefined where O_DIRECT is not to be had. */
  readonly #files = new Map<object, DirectFile | undefined>();
  #idle: (() => void) | undefined;
  /** Aligned memory in slots; made with the first read. */
  #memory: Uint8Array | undefined;
  readonly #freeSlots = Array.from({ length: SLOTS }, (_, slot) => slot);
  /** By memory: the same few buffers come again and again. */
  readonly #alignedBuffers = new WeakMap<ArrayBufferLike, boolean>();
  #closed = false;

  constructor(stack: LayerStack, engine: IoEngine) {
    this.#stack = stack;
    this.#engine = engine;
  }

  /** The read is one that {@link read} may do. */
  wants(offsetBytes: number, lengthBytes: number): boolean {
    return this.#range(offsetBytes, lengthBytes) !== undefined;
  }

  #range(offsetBytes: number, lengthBytes: number): RawRange | undefined {
    if (lengthBytes > SLOT_BYTES || offsetBytes % UNIT_BYTES !== 0 || lengthBytes % UNIT_BYTES !== 0)
      return undefined;
    const range = this.#stack.rawRange(offsetBytes, lengthBytes);
    return range === undefined || range.offsetBytes % UNIT_BYTES !== 0 ? undefined : range;
  }

  /** Begins to fill `into`; undefined when the read is one for the page cache. Resolves to false when it turns out so. */
  read(offsetBytes: number, into: Uint8Array): Promise<boolean> | undefined {
    if (this.#freeSlots.length === 0 || this.#closed) return undefined;
    const range = this.#range(offsetBytes, into.length);
    if (range === undefined) return undefined;
    const file = this.#file(range);
    if (file === undefined) return undefined;
    return this.#fill(file, range, into);
  }

  /**
   * Layers have been taken out of the stack: lets go of every layer, which those that are still there are not the
   * worse for. Reads under way end first.
   */
  dropFiles(): void {
    const files = [...this.#files.values()];
    this.#files.clear();
    for (const file of files) if (file !== undefined) this.#drop(file);
  }

  #drop(file: DirectFile): void {
    file.dropped = true;
    if (file.reads === 0) closeSync(file.fd);
  }

  #file({ layer, fd }: RawRange): DirectFile | undefined {
    if (this.#files.has(layer)) return this.#files.get(layer);
    let opened: DirectFile | undefined;
    try {
      const flags = constants.O_RDONLY | constants.O_DIRECT | O_CLOEXEC;
      opened = { fd: openSync(`/proc/self/fd/${fd}`, flags), reads: 0, dropped: false };
    } catch (error) {
      // A file system without O_DIRECT. Anything else shows when the layer is read as ever.
      if (!(error instanceof Error)) throw error;
    }
    this.#files.set(layer, opened);
    return opened;
  }

  /** The memory begins where a direct read may put its bytes. */
  #isAligned({ buffer, byteOffset }: Uint8Array): boolean {
    if (byteOffset % UNIT_BYTES !== 0) return false;
    let aligned = this.#alignedBuffers.get(buffer);
    if (aligned === undefined) {
      aligned = beginsAtMultiple(buffer, UNIT_BYTES);
      this.#alignedBuffers.set(buffer, aligned);
    }
    return aligned;
  }

  /** The descriptor is our own, so the layer may be taken out of the stack meanwhile. */
  #fill(file: DirectFile, range: RawRange, into: Uint8Array): Promise<boolean> {
    const { length } = into;
    const inPlace = this.#isAligned(into);
    if (!inPlace) this.#memory ??= new Uint8Array(allocateBig(SLOTS * SLOT_BYTES));
    const memory = inPlace ? into : this.#memory!;
    const slot = this.#freeSlots.pop()!;
    const at = inPlace ? 0 : slot * SLOT_BYTES;
    file.reads++;
    return new Promise((resolve) => {
      this.#engine.startRead(file.fd, memory, at, length, range.offsetBytes, range.name, (got, failure) => {
        // Refused (alignment) or failed: reading as ever does better, or says what is wrong.
        if (failure !== undefined && this.#files.get(range.layer) === file) {
          this.#files.set(range.layer, undefined);
          file.dropped = true;
        }
        const whole = failure === undefined && got === length;
        if (whole && !inPlace) into.set(memory.subarray(at, at + length));
        file.reads--;
        if (file.dropped && file.reads === 0) closeSync(file.fd);
        this.#freeSlots.push(slot);
        if (this.#freeSlots.length === SLOTS) this.#idle?.();
        resolve(whole);
      });
    });
  }

  /** Waits for the reads under way. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#closed = true;
    if (this.#freeSlots.length < SLOTS) {
      await new Promise<void>((resolve) => {
        this.#idle = resolve;
      });
    }
    this.dropFiles();
  }
}
