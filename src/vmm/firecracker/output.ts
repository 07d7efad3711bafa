import {
  closeSync,
  constants,
  existsSync,
  fstatSync,
  openSync,
  readSync,
  renameSync,
  writeSync,
} from "node:fs";
import { makeFifo } from "../../../ffi/process.ts";
import { errorCode } from "../../lib/durable.ts";
import { AenvError } from "../../lib/errors.ts";

/**
 * What a VMM writes, the guest's console first of all, goes through named pipes that both sides hold open for reading
 * and writing: a full pipe loses what is written and never holds up or ends the VM, whoever reads; a server that takes
 * over finds the last of it. What is read goes to files that are bounded.
 */

/** How often the pipes are emptied, milliseconds: while little comes, and while much does. They hold 256 KiB. */
const CALM_MS = 200;
const BUSY_MS = 10;
const CHUNK_BYTES = 64 << 10;
/** Of one pipe at a time, so that a guest that never stops writing holds up nobody else. */
const CHUNKS = 16;

/** Takes what comes through a pipe. */
export interface Sink extends Disposable {
  append(bytes: Uint8Array): void;
}

/** A file of at most `maxBytes`; when it would grow over it, it becomes `PATH.1` and another is begun. */
export class RotatingFile implements Sink {
  readonly #path: string;
  readonly #maxBytes: number;
  #fd: number;
  #size: number;
  #closed = false;

  constructor(path: string, maxBytes: number) {
    this.#path = path;
    this.#maxBytes = maxBytes;
    this.#fd = openSync(path, "a", 0o600);
    this.#size = fstatSync(this.#fd).size;
  }

  /** An error of a new file's making leaves the old one in use: it takes `bytes` nevertheless, unless it is twice as big. */
  append(bytes: Uint8Array): void {
    if (this.#closed) return;
    let failure: unknown;
    if (this.#size > 0 && this.#size + bytes.length > this.#maxBytes) {
      try {
        this.#rotate();
      } catch (error) {
        if (this.#size + bytes.length > 2 * this.#maxBytes) throw error;
        failure = error;
      }
    }
    this.#size += writeSync(this.#fd, bytes);
    if (failure !== undefined) throw failure;
  }

  /** The descriptor in use is closed only when there is another: its number would soon be somebody else's. */
  #rotate(): void {
    const old = `${this.#path}.1`;
    if (existsSync(this.#path)) renameSync(this.#path, old);
    const fd = openSync(this.#path, "a", 0o600);
    const before = this.#fd;
    this.#fd = fd;
    this.#size = fstatSync(fd).size;
    closeSync(before);
  }

  [Symbol.dispose](): void {
    if (this.#closed) return;
    this.#closed = true;
    closeSync(this.#fd);
  }
}

/** Opens a named pipe for both, and makes it where there is none. Throws where the name is anything else. */
export function openPipe(path: string): number {
  makeFifo(path);
  const fd = openSync(path, constants.O_RDWR | constants.O_NONBLOCK | constants.O_NOFOLLOW);
  if (fstatSync(fd).isFIFO()) return fd;
  closeSync(fd);
  throw new AenvError({ code: "pipe_invalid", message: `${path} is no named pipe` });
}

const pumps = new Set<Pump>();
let timer: ReturnType<typeof setTimeout> | undefined;
const chunk = new Uint8Array(CHUNK_BYTES);

function runSoon(waitMs: number): void {
  timer = setTimeout(() => {
    timer = undefined;
    let busy = false;
    for (const pump of pumps) busy = pump.run() || busy;
    if (pumps.size > 0) runSoon(busy ? BUSY_MS : CALM_MS);
  }, waitMs);
  timer.unref();
}

/** Moves what comes through a pipe into files, or whatever takes it, until it is disposed; then the rest, at most a mebibyte. */
export class Pump implements Disposable {
  readonly #fd: number;
  readonly #sinks: readonly Sink[];
  readonly #onError: (error: unknown) => void;
  #done = false;
  #failing = false;

  /** Takes the descriptor and the sinks over. `onError` is told of the first error after something could be kept. */
  constructor(fd: number, sinks: readonly Sink[], onError: (error: unknown) => void) {
    this.#fd = fd;
    this.#sinks = sinks;
    this.#onError = onError;
    pumps.add(this);
    if (timer === undefined) runSoon(CALM_MS);
  }

  /** True when there was much. */
  run(): boolean {
    let chunks = 0;
    try {
      while (chunks < CHUNKS && this.#some()) {
        chunks++;
        this.#failing = false;
      }
    } catch (error) {
      // A full disk is no reason to end anything: the console has a hole then.
      if (!this.#failing) this.#onError(error);
      this.#failing = true;
    }
    return chunks > 1;
  }

  #some(): boolean {
    let count: number;
    try {
      count = readSync(this.#fd, chunk, 0, CHUNK_BYTES, null);
    } catch (error) {
      if (errorCode(error) === "EAGAIN") return false;
      throw error;
    }
    if (count <= 0) return false;
    let failure: unknown;
    for (const sink of this.#sinks) {
      try {
        sink.append(chunk.subarray(0, count));
      } catch (error) {
        failure ??= error;
      }
    }
    if (failure !== undefined) throw failure;
    return true;
  }

  [Symbol.dispose](): void {
    if (this.#done) return;
    this.#done = true;
    pumps.delete(this);
    if (pumps.size === 0) {
      clearTimeout(timer);
      timer = undefined;
    }
    this.run();
    closeSync(this.#fd);
    for (const sink of this.#sinks) sink[Symbol.dispose]();
  }
}
