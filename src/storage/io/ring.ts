import { check } from "../../../ffi/errno.ts";
import type { Ring } from "../../../ffi/ring.ts";
import { assert } from "../../lib/errors.ts";
import type { IoEngine, IoEngineStats } from "./types.ts";

interface Waiting {
  readonly prepare: (tag: number) => void;
  readonly settle: (result: number) => void;
  readonly buffer: Uint8Array | undefined;
}

function failure(result: number, what: string): unknown {
  try {
    check(result, what);
  } catch (error) {
    return error;
  }
  return new Error(`${what}: failed`);
}

interface EventStream {
  read(): Promise<{ readonly done: boolean }>;
  cancel(): Promise<void>;
}

/**
 * Requests made in one turn of the event loop go to the kernel together, in the microtask after it. Results
 * that are not there at once come with the ring's eventfd, which the event loop watches like a socket.
 */
export class RingEngine implements IoEngine {
  readonly kind = "io_uring";
  readonly reason = undefined;
  readonly #ring: Ring;
  readonly #events: EventStream;
  /** What each tag in flight does with its result, and the memory the kernel may still touch. */
  readonly #settle: (((result: number) => void) | undefined)[];
  readonly #buffers: (Uint8Array | undefined)[];
  readonly #freeTags: number[];
  readonly #queue: Waiting[] = [];
  #queueHead = 0;
  #scheduled = false;
  #requests = 0;
  #submits = 0;
  #closed = false;
  #idle: (() => void) | undefined;

  constructor(ring: Ring) {
    this.#ring = ring;
    this.#settle = new Array(ring.entries).fill(undefined);
    this.#buffers = new Array(ring.entries).fill(undefined);
    this.#freeTags = Array.from({ length: ring.entries }, (_, i) => ring.entries - 1 - i);
    this.#events = Bun.file(ring.eventFd).stream().getReader();
    void this.#watch();
  }

  async #watch(): Promise<void> {
    for (;;) {
      const { done } = await this.#events.read();
      if (done || this.#closed) return;
      this.#submit();
    }
  }

  #inFlight(): number {
    return this.#ring.entries - this.#freeTags.length;
  }

  #start(
    buffer: Uint8Array | undefined,
    prepare: (tag: number) => void,
    settle: (result: number) => void,
  ): void {
    assert(!this.#closed, "the I/O engine is used after it was closed");
    this.#requests++;
    this.#queue.push({ prepare, settle, buffer });
    this.#schedule();
  }

  #run(buffer: Uint8Array | undefined, prepare: (tag: number) => void): Promise<number> {
    return new Promise((settle) => this.#start(buffer, prepare, settle));
  }

  #schedule(): void {
    if (this.#scheduled) return;
    this.#scheduled = true;
    queueMicrotask(() => {
      this.#scheduled = false;
      this.#submit();
    });
  }

  #submit(): void {
    if (this.#closed) return;
    do {
      while (this.#queueHead < this.#queue.length && this.#freeTags.length > 0) {
        const { prepare, settle, buffer } = this.#queue[this.#queueHead++]!;
        const tag = this.#freeTags.pop()!;
        this.#settle[tag] = settle;
        this.#buffers[tag] = buffer;
        prepare(tag);
      }
      if (this.#queueHead === this.#queue.length) {
        this.#queue.length = 0;
        this.#queueHead = 0;
      } else if (this.#queueHead > 1024) {
        this.#queue.splice(0, this.#queueHead);
        this.#queueHead = 0;
      }
      this.#submits++;
      this.#ring.submit(0, (tag, result) => {
        const settle = this.#settle[tag]!;
        this.#settle[tag] = undefined;
        this.#buffers[tag] = undefined;
        this.#freeTags.push(tag);
        settle(result);
      });
      if (this.#inFlight() === 0 && this.#queue.length === 0) {
        this.#idle?.();
        return;
      }
    } while ((this.#queue.length > 0 && this.#freeTags.length > 0) || this.#ring.arm());
  }

  read(
    fd: number,
    target: Uint8Array,
    targetOffset: number,
    length: number,
    offset: number,
    what: string,
  ): Promise<number> {
    return new Promise((resolve, reject) => {
      this.startRead(fd, target, targetOffset, length, offset, what, (bytes, failure) => {
        if (failure === undefined) resolve(bytes);
        else reject(failure);
      });
    });
  }

  startRead(
    fd: number,
    target: Uint8Array,
    targetOffset: number,
    length: number,
    offset: number,
    what: string,
    done: (bytes: number, failure: unknown) => void,
  ): void {
    let got = 0;
    const prepare = (tag: number) =>
      this.#ring.prepareRead(fd, target, targetOffset + got, length - got, offset + got, tag);
    const settle = (result: number) => {
      if (result > 0) got += result;
      if (result > 0 && got < length) this.#start(target, prepare, settle);
      else if (result >= 0) done(got, undefined);
      else done(got, failure(result, `read of ${length} bytes at ${offset} of ${what}`));
    };
    this.#start(target, prepare, settle);
  }

  async write(
    fd: number,
    source: Uint8Array,
    sourceOffset: number,
    length: number,
    offset: number,
    what: string,
  ): Promise<void> {
    for (let done = 0; done < length; ) {
      const at = done;
      const result = await this.#run(source, (tag) =>
        this.#ring.prepareWrite(fd, source, sourceOffset + at, length - at, offset + at, tag),
      );
      const got = check(result, `write of ${length} bytes at ${offset} of ${what}`);
      assert(got > 0, `write of ${length} bytes at ${offset} of ${what} does not advance`);
      done += got;
    }
  }

  async datasync(fd: number, what: string): Promise<void> {
    check(await this.#run(undefined, (tag) => this.#ring.prepareDataSync(fd, tag)), `fdatasync of ${what}`);
  }

  async sync(fd: number, what: string): Promise<void> {
    check(await this.#run(undefined, (tag) => this.#ring.prepareSync(fd, tag)), `fsync of ${what}`);
  }

  stats(): IoEngineStats {
    return {
      inFlight: this.#inFlight(),
      waiting: this.#queue.length - this.#queueHead,
      requests: this.#requests,
      submits: this.#submits,
    };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#closed) return;
    while (this.#inFlight() > 0 || this.#queue.length > 0) {
      await new Promise<void>((resolve) => {
        this.#idle = resolve;
        this.#schedule();
      });
    }
    this.#closed = true;
    await this.#events.cancel();
    this.#ring[Symbol.dispose]();
  }
}
