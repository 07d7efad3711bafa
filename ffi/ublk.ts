import { type Pointer, toArrayBuffer } from "bun:ffi";
import { check, errnoName } from "./errno.ts";
import { bindShim } from "./lib.ts";

/** Device commands of the kernel's ublk driver on a ring of one thread, see c/shim/ublk.h and ring.h. */
const shim = bindShim({
  aenv_ring_new_commands: { args: ["u32", "u32", "ptr"], returns: "ptr" },
  aenv_ring_free: { args: ["ptr"], returns: "void" },
  aenv_ring_event_fd: { args: ["ptr"], returns: "i32" },
  aenv_ring_submit: { args: ["ptr", "u32", "ptr", "u32"], returns: "i32" },
  aenv_ring_arm: { args: ["ptr"], returns: "i32" },
  aenv_ublk_control: {
    args: ["ptr", "i32", "u32", "u32", "u32", "ptr", "u32", "f64", "u32"],
    returns: "i32",
  },
  aenv_ublk_io: { args: ["ptr", "i32", "u32", "u32", "u32", "i32", "ptr", "f64", "u32"], returns: "i32" },
  aenv_ublk_map: { args: ["i32", "u32", "u32", "ptr"], returns: "ptr" },
  aenv_ublk_unmap: { args: ["ptr", "u32"], returns: "i32" },
  aenv_ublk_copy_from: { args: ["i32", "u32", "u32", "ptr", "f64", "u32"], returns: "i32" },
  aenv_ublk_copy_to: { args: ["i32", "u32", "u32", "ptr", "f64", "u32"], returns: "i32" },
});

const EBUSY = -16;
/** What one submit takes out of the ring at most. */
const RESULTS_AT_ONCE = 1024;
const NO_QUEUE = 0xffff;
/** Every device is served through its first queue: one thread serves all queues of a device anyway. */
const QUEUE = 0;

export const UBLK_FETCH = 0xc0107520;
export const UBLK_COMMIT_AND_FETCH = 0xc0107521;

/**
 * The ring of one thread that serves ublk devices. Commands are prepared and handed to the kernel by
 * {@link submit}, which also delivers results: the command's tag, and what the kernel answered (`-errno` on
 * failure). The ring makes room by itself when it is full of prepared commands.
 */
export class UblkRing implements Disposable {
  readonly #results = new Int32Array(new ArrayBuffer(RESULTS_AT_ONCE * 8));
  #handle: Pointer | null;

  private constructor(handle: Pointer) {
    this.#handle = handle;
  }

  /** A ring, or the name of the error that says why this host gives none (`EINVAL`: no 128-byte entries). */
  static open(entries: number, results: number): UblkRing | string {
    const error = new Int32Array(new ArrayBuffer(4));
    const handle = shim.aenv_ring_new_commands(entries, results, error);
    if (typeof handle === "bigint") throw new Error("ublk ring: pointer out of range");
    return handle === null ? errnoName(-error[0]!) : new UblkRing(handle);
  }

  #open(): Pointer {
    if (this.#handle === null) throw new Error("ublk ring: used after dispose");
    return this.#handle;
  }

  /** Readable when a result arrived while the ring was armed; closed with the ring. */
  get eventFd(): number {
    return shim.aenv_ring_event_fd(this.#open());
  }

  /** `payload` stays the kernel's until the result came. */
  control(
    controlFd: number,
    opcode: number,
    device: number,
    payload: Uint8Array | null,
    data: number,
    tag: number,
  ): void {
    const prepare = () =>
      shim.aenv_ublk_control(
        this.#open(),
        controlFd,
        opcode,
        device,
        NO_QUEUE,
        payload,
        payload?.length ?? 0,
        data,
        tag,
      );
    this.#withRoom(prepare, "ublk: control command");
  }

  /** Fetches the first request of a tag, or answers one and fetches the next. No `buffer`: user copy. */
  io(
    charFd: number,
    opcode: number,
    ioTag: number,
    result: number,
    buffer: Uint8Array | null,
    bufferOffset: number,
    tag: number,
  ): void {
    const ring = this.#open();
    // Written out: this runs once per request of a guest.
    let answer = shim.aenv_ublk_io(ring, charFd, opcode, QUEUE, ioTag, result, buffer, bufferOffset, tag);
    if (answer === EBUSY) {
      this.#flush();
      answer = shim.aenv_ublk_io(ring, charFd, opcode, QUEUE, ioTag, result, buffer, bufferOffset, tag);
    }
    if (answer < 0) check(answer, "ublk: I/O command");
  }

  #withRoom(prepare: () => number, what: string): void {
    let answer = prepare();
    if (answer === EBUSY) {
      this.#flush();
      answer = prepare();
    }
    check(answer, what);
  }

  /** Hands over what was prepared and leaves the results in the ring. */
  #flush(): void {
    check(shim.aenv_ring_submit(this.#open(), 0, this.#results, 0), "ublk: submit");
  }

  /** Submits, waits (blocking the thread) for at least `wait` results and delivers those there are, up to 1024. */
  submit(wait: number, each: (tag: number, result: number) => void): number {
    const results = this.#results;
    const taken = check(shim.aenv_ring_submit(this.#open(), wait, results, RESULTS_AT_ONCE), "ublk: submit");
    for (let i = 0; i < taken; i++) each(results[2 * i]!, results[2 * i + 1]!);
    return taken;
  }

  /** From now until the next submit results make `eventFd` readable. True: some are there, submit first. */
  arm(): boolean {
    return shim.aenv_ring_arm(this.#open()) !== 0;
  }

  /** Commands under way are given up: devices they serve lose their server. */
  [Symbol.dispose](): void {
    if (this.#handle !== null) shim.aenv_ring_free(this.#handle);
    this.#handle = null;
  }
}

/** The request descriptors of a device, six 32-bit words a tag: flags and operation, sectors, start, address. */
export class UblkDescriptors implements Disposable {
  readonly words: Uint32Array;
  readonly #depth: number;
  #mapped: Pointer | null;

  constructor(charFd: number, depth: number) {
    const error = new Int32Array(new ArrayBuffer(4));
    const mapped = shim.aenv_ublk_map(charFd, QUEUE, depth, error);
    if (mapped === null || typeof mapped === "bigint") {
      check(error[0]!, "ublk: mapping the request descriptors");
      throw new Error("ublk: request descriptors could not be mapped");
    }
    this.#mapped = mapped;
    this.#depth = depth;
    this.words = new Uint32Array(toArrayBuffer(mapped, 0, depth * 24));
  }

  /** Nobody may look at `words` afterwards. */
  [Symbol.dispose](): void {
    if (this.#mapped !== null) check(shim.aenv_ublk_unmap(this.#mapped, this.#depth), "ublk: unmap");
    this.#mapped = null;
  }
}

/** The data of a write request, into `target[offset, +length)`. */
export function ublkCopyFrom(
  charFd: number,
  ioTag: number,
  target: Uint8Array,
  offset: number,
  length: number,
): void {
  check(shim.aenv_ublk_copy_from(charFd, QUEUE, ioTag, target, offset, length), "ublk: data of a write");
}

/** The answer to a read request, from `source[offset, +length)`. */
export function ublkCopyTo(
  charFd: number,
  ioTag: number,
  source: Uint8Array,
  offset: number,
  length: number,
): void {
  check(shim.aenv_ublk_copy_to(charFd, QUEUE, ioTag, source, offset, length), "ublk: answer to a read");
}
