import { AenvError } from "./errors.ts";

/**
 * Lets at most `limit` tasks run at once; the others wait in order. The queue is bounded, too: past
 * `queueLimit` waiting tasks a new one is refused with 429.
 */
export class Gate {
  #running = 0;
  readonly #waiting: (() => void)[] = [];
  readonly #limit: number;
  readonly #what: string;
  readonly #queueLimit: number;

  /** `what` names the work in the refusal, e.g. `starting sandboxes`. */
  constructor(limit: number, what: string, queueLimit = 1000) {
    this.#limit = limit;
    this.#what = what;
    this.#queueLimit = queueLimit;
  }

  get running(): number {
    return this.#running;
  }

  /** A task whose signal aborts while it waits leaves the queue and rejects with the signal's reason. */
  async run<T>(task: () => Promise<T>, signal?: AbortSignal): Promise<T> {
    signal?.throwIfAborted();
    if (this.#running >= this.#limit) {
      if (this.#waiting.length >= this.#queueLimit) {
        throw new AenvError({
          code: "capacity_unavailable",
          status: 429,
          message: `${this.#what}: ${this.#running} are in progress and ${this.#waiting.length} wait already`,
          remediation: "retry later",
          headers: { "Retry-After": "5" },
        });
      }
      await this.#turn(signal);
    } else {
      this.#running += 1;
    }
    try {
      return await task();
    } finally {
      // A waiting task inherits the place: the count does not change.
      const next = this.#waiting.shift();
      if (next === undefined) this.#running -= 1;
      else next();
    }
  }

  #turn(signal: AbortSignal | undefined): Promise<void> {
    const { promise, resolve, reject } = Promise.withResolvers<void>();
    const leave = (): void => {
      this.#waiting.splice(this.#waiting.indexOf(begin), 1);
      reject(signal?.reason);
    };
    const begin = (): void => {
      signal?.removeEventListener("abort", leave);
      resolve();
    };
    this.#waiting.push(begin);
    signal?.addEventListener("abort", leave, { once: true });
    return promise;
  }
}
