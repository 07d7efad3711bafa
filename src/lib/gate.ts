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

  /** Whether the next task would be refused. */
  get full(): boolean {
    return this.#running >= this.#limit && this.#waiting.length >= this.#queueLimit;
  }

  async run<T>(task: () => Promise<T>): Promise<T> {
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
      await new Promise<void>((resolve) => this.#waiting.push(resolve));
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
}
