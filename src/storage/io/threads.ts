import {
  fdatasync as fsDataSync,
  read as fsRead,
  fsync as fsSync,
  write as fsWrite,
  type NoParamCallback,
} from "node:fs";
import type { IoEngine, IoEngineStats } from "./types.ts";

/** The runtime's thread pool, for hosts where io_uring is missing or switched off. */
export class ThreadEngine implements IoEngine {
  readonly kind = "threads";
  readonly reason: string;
  #requests = 0;
  readonly #running = new Set<Promise<unknown>>();

  constructor(reason: string) {
    this.reason = reason;
  }

  async #run<T>(what: string, start: (done: (error: Error | null, value?: T) => void) => void): Promise<T> {
    this.#requests++;
    const { promise, resolve, reject } = Promise.withResolvers<T>();
    this.#running.add(promise);
    start((error, value) => {
      if (error !== null) reject(new Error(`${what}: ${error.message}`, { cause: error }));
      else resolve(value as T);
    });
    try {
      return await promise;
    } finally {
      this.#running.delete(promise);
    }
  }

  async read(
    fd: number,
    target: Uint8Array,
    targetOffset: number,
    length: number,
    offset: number,
    what: string,
  ): Promise<number> {
    let done = 0;
    while (done < length) {
      const got = await this.#run<number>(`read of ${length} bytes at ${offset} of ${what}`, (callback) =>
        fsRead(fd, target, targetOffset + done, length - done, offset + done, callback),
      );
      if (got === 0) break;
      done += got;
    }
    return done;
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
    this.read(fd, target, targetOffset, length, offset, what).then(
      (bytes) => done(bytes, undefined),
      (failure: unknown) => done(0, failure),
    );
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
      done += await this.#run<number>(`write of ${length} bytes at ${offset} of ${what}`, (callback) =>
        fsWrite(fd, source, sourceOffset + done, length - done, offset + done, callback),
      );
    }
  }

  async datasync(fd: number, what: string): Promise<void> {
    await this.#run<void>(`fdatasync of ${what}`, (callback: NoParamCallback) => fsDataSync(fd, callback));
  }

  async sync(fd: number, what: string): Promise<void> {
    await this.#run<void>(`fsync of ${what}`, (callback: NoParamCallback) => fsSync(fd, callback));
  }

  stats(): IoEngineStats {
    return {
      inFlight: this.#running.size,
      waiting: 0,
      requests: this.#requests,
      submits: this.#requests,
    };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    while (this.#running.size > 0) await Promise.allSettled(this.#running);
  }
}
