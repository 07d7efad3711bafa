import type { Pointer } from "bun:ffi";
import { check, errnoName } from "./errno.ts";
import { bindShim } from "./lib.ts";

/** An io_uring of one thread, see c/shim/ring.h. */
const shim = bindShim({
  aenv_ring_new: { args: ["u32", "ptr"], returns: "ptr" },
  aenv_ring_free: { args: ["ptr"], returns: "void" },
  aenv_ring_event_fd: { args: ["ptr"], returns: "i32" },
  aenv_ring_read: { args: ["ptr", "i32", "ptr", "f64", "u32", "f64", "u32"], returns: "i32" },
  aenv_ring_write: { args: ["ptr", "i32", "ptr", "f64", "u32", "f64", "u32"], returns: "i32" },
  aenv_ring_fdatasync: { args: ["ptr", "i32", "u32"], returns: "i32" },
  aenv_ring_fsync: { args: ["ptr", "i32", "u32"], returns: "i32" },
  aenv_ring_submit: { args: ["ptr", "u32", "ptr", "u32"], returns: "i32" },
  aenv_ring_arm: { args: ["ptr"], returns: "i32" },
});

/** Longest single request. */
const MAX_REQUEST_BYTES = 1 << 30;

/** Called once per finished request: the tag it was prepared with, and a byte count (or 0) or `-errno`. */
export type RingResult = (tag: number, result: number) => void;

/**
 * Requests are prepared one by one and handed to the kernel together by {@link submit}, which also delivers
 * results. The caller keeps every buffer alive and in place until its result came, and has at most `entries`
 * requests in flight. All calls belong to the thread that made the ring.
 */
export class Ring implements Disposable {
  readonly entries: number;
  readonly #results: Int32Array;
  #handle: Pointer | null;

  private constructor(entries: number, handle: Pointer) {
    this.entries = entries;
    this.#handle = handle;
    this.#results = new Int32Array(new ArrayBuffer(entries * 8));
  }

  /** A ring, or the name of the error (`EPERM`, `ENOSYS` …) that says why this host gives none. */
  static open(entries: number): Ring | string {
    const error = new Int32Array(new ArrayBuffer(4));
    const handle = shim.aenv_ring_new(entries, error);
    if (typeof handle === "bigint") throw new Error("ring: pointer out of range");
    return handle === null ? errnoName(-error[0]!) : new Ring(entries, handle);
  }

  #open(): Pointer {
    if (this.#handle === null) throw new Error("ring: used after dispose");
    return this.#handle;
  }

  /** Readable when a result arrived while the ring was armed; closed with the ring. */
  get eventFd(): number {
    return shim.aenv_ring_event_fd(this.#open());
  }

  prepareRead(
    fd: number,
    target: Uint8Array,
    targetOffset: number,
    length: number,
    offset: number,
    tag: number,
  ): void {
    this.#checkRange(target, targetOffset, length, offset);
    check(shim.aenv_ring_read(this.#open(), fd, target, targetOffset, length, offset, tag), "ring: read");
  }

  prepareWrite(
    fd: number,
    source: Uint8Array,
    sourceOffset: number,
    length: number,
    offset: number,
    tag: number,
  ): void {
    this.#checkRange(source, sourceOffset, length, offset);
    check(shim.aenv_ring_write(this.#open(), fd, source, sourceOffset, length, offset, tag), "ring: write");
  }

  prepareDataSync(fd: number, tag: number): void {
    check(shim.aenv_ring_fdatasync(this.#open(), fd, tag), "ring: fdatasync");
  }

  prepareSync(fd: number, tag: number): void {
    check(shim.aenv_ring_fsync(this.#open(), fd, tag), "ring: fsync");
  }

  #checkRange(view: Uint8Array, viewOffset: number, length: number, offset: number): void {
    const inside = viewOffset >= 0 && length >= 0 && viewOffset + length <= view.byteLength;
    if (inside && length <= MAX_REQUEST_BYTES && offset >= 0) return;
    throw new RangeError(
      `ring: buffer of ${view.byteLength} bytes, range ${viewOffset}+${length}, offset ${offset}`,
    );
  }

  /**
   * Submits what was prepared, waits (blocking the thread) for at least `wait` results, and hands every
   * result that is there to `each`. Returns their number.
   */
  submit(wait: number, each: RingResult): number {
    const taken = check(
      shim.aenv_ring_submit(this.#open(), wait, this.#results, this.entries),
      "ring: submit",
    );
    for (let i = 0; i < taken; i++) each(this.#results[2 * i]!, this.#results[2 * i + 1]!);
    return taken;
  }

  /** From now until the next submit results make `eventFd` readable. True: some are there, submit first. */
  arm(): boolean {
    return shim.aenv_ring_arm(this.#open()) !== 0;
  }

  [Symbol.dispose](): void {
    if (this.#handle !== null) shim.aenv_ring_free(this.#handle);
    this.#handle = null;
  }
}
