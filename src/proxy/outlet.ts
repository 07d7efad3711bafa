import type { Socket } from "bun";

/** A real copy: the `slice` of a Buffer is a view of the same memory. */
const copyFrom = (bytes: Uint8Array, start: number): Uint8Array =>
  Uint8Array.prototype.slice.call(bytes, start);

/**
 * The writing side of a socket with its backpressure: what the kernel does not take now is kept (at most
 * what one read delivered, because the source is paused meanwhile) and goes out on drain.
 */
export class Outlet<Data> {
  readonly #socket: Socket<Data>;
  #pending: Uint8Array[] = [];
  #afterFlush: (() => void) | undefined;
  #closed = false;

  constructor(socket: Socket<Data>) {
    this.#socket = socket;
  }

  get blocked(): boolean {
    return this.#pending.length > 0;
  }

  /** Returns true when everything is with the kernel; false: wait for {@link drain}. */
  write(bytes: Uint8Array): boolean {
    if (this.#closed || bytes.length === 0) return true;
    if (this.#pending.length > 0) {
      this.#pending.push(copyFrom(bytes, 0));
      return false;
    }
    const taken = Math.max(0, this.#socket.write(bytes));
    if (taken >= bytes.length) return true;
    // The caller's buffer is only valid during the callback.
    this.#pending.push(copyFrom(bytes, taken));
    return false;
  }

  /** Call from the socket's drain event; returns true when nothing is left. */
  drain(): boolean {
    while (this.#pending.length > 0 && !this.#closed) {
      const next = this.#pending[0]!;
      const taken = Math.max(0, this.#socket.write(next));
      if (taken < next.length) {
        this.#pending[0] = next.subarray(taken);
        return false;
      }
      this.#pending.shift();
    }
    const then = this.#afterFlush;
    this.#afterFlush = undefined;
    then?.();
    return true;
  }

  /** Runs `then` once everything written so far is with the kernel. */
  flushed(then: () => void): void {
    if (this.#pending.length === 0) then();
    else this.#afterFlush = then;
  }

  close(): void {
    this.#closed = true;
    this.#pending = [];
    this.#afterFlush = undefined;
  }
}
