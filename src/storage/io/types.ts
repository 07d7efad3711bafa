/**
 * Waiting for disks without holding the thread. An engine belongs to one thread and serves all its devices.
 * Every failure rejects with an error that names `what`; a buffer stays the engine's until its promise settles.
 */
export interface IoEngine extends AsyncDisposable {
  readonly kind: "io_uring" | "threads";
  /** Why it is not io_uring. */
  readonly reason: string | undefined;
  /** Fills `target[targetOffset, +length)` from `offset`; resolves to the bytes read, fewer only at the end of the file. */
  read(
    fd: number,
    target: Uint8Array,
    targetOffset: number,
    length: number,
    offset: number,
    what: string,
  ): Promise<number>;
  /**
   * The same for callers that have a promise of their own: `done` is called once, with the bytes read or a failure.
   */
  startRead(
    fd: number,
    target: Uint8Array,
    targetOffset: number,
    length: number,
    offset: number,
    what: string,
    done: (bytes: number, failure: unknown) => void,
  ): void;
  /** Writes the whole of `source[sourceOffset, +length)`. */
  write(
    fd: number,
    source: Uint8Array,
    sourceOffset: number,
    length: number,
    offset: number,
    what: string,
  ): Promise<void>;
  /** The file's data, and the size needed to find it, on stable storage. */
  datasync(fd: number, what: string): Promise<void>;
  /** The same with all that is known about the file; of a directory: the names in it. */
  sync(fd: number, what: string): Promise<void>;
  stats(): IoEngineStats;
  /** Waits for what is in flight, then gives everything back. */
  [Symbol.asyncDispose](): Promise<void>;
}

export interface IoEngineStats {
  /** Requests handed to the kernel and not finished. */
  readonly inFlight: number;
  /** Requests that wait for room in the ring. */
  readonly waiting: number;
  readonly requests: number;
  /** Calls that handed requests to the kernel; requests / submits is the batch size. */
  readonly submits: number;
}
