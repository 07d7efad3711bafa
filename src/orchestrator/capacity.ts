import { AenvError } from "../lib/errors.ts";

export interface CapacityLimits {
  /** Sum of the memory of all sandboxes that are not paused, in MiB. */
  readonly memoryMiB?: number;
  readonly sandboxes?: number;
  /** What the host must have left, in MiB, beside what starting guests are expected to touch. */
  readonly minAvailableMiB?: number;
  /** Memory the host has available now, in MiB. Absent: not looked at. */
  readonly availableMiB?: () => number;
}

/** Part of its memory a guest is expected to touch soon after its start: the rest is mapped, not used. */
const TOUCHED_AT_START = 0.25;
const RETRY_AFTER_SECONDS = "5";

/**
 * Decides whether one more sandbox may run. A refusal comes before anything is taken, so that a rush costs
 * the node nothing: `capacity_unavailable`, 429 with Retry-After.
 */
export class Capacity {
  readonly #limits: CapacityLimits;
  #memoryMiB = 0;
  #sandboxes = 0;
  #starting = 0;

  constructor(limits: CapacityLimits) {
    this.#limits = limits;
  }

  get usedMemoryMiB(): number {
    return this.#memoryMiB;
  }

  /** A place for a sandbox until it is disposed. `started` ends the allowance for memory it has yet to touch. */
  take(memoryMiB: number, mode: "check" | "force" = "check"): Seat {
    if (mode === "check") this.#check(memoryMiB);
    const touches = memoryMiB * TOUCHED_AT_START;
    this.#memoryMiB += memoryMiB;
    this.#sandboxes += 1;
    this.#starting += touches;
    let starting = true;
    let open = true;
    const started = (): void => {
      if (!starting) return;
      starting = false;
      this.#starting -= touches;
    };
    return {
      started,
      [Symbol.dispose]: () => {
        started();
        if (!open) return;
        open = false;
        this.#memoryMiB -= memoryMiB;
        this.#sandboxes -= 1;
      },
    };
  }

  #check(memoryMiB: number): void {
    const { memoryMiB: limit, sandboxes, minAvailableMiB = 0, availableMiB } = this.#limits;
    if (sandboxes !== undefined && this.#sandboxes >= sandboxes) {
      throw refused(`${this.#sandboxes} sandboxes run or start, the node's limit is ${sandboxes}`);
    }
    if (limit !== undefined && this.#memoryMiB + memoryMiB > limit) {
      throw refused(
        `${this.#memoryMiB} MiB of guest memory are given out and the node's limit is ${limit} MiB: ${memoryMiB} MiB more do not fit`,
      );
    }
    if (availableMiB === undefined) return;
    const left = Math.floor(availableMiB() - this.#starting - memoryMiB * TOUCHED_AT_START);
    if (left < minAvailableMiB) {
      throw refused(
        `the host would have ${left} MiB of memory left with one more sandbox of ${memoryMiB} MiB, it keeps ${minAvailableMiB} MiB`,
      );
    }
  }
}

export interface Seat extends Disposable {
  started(): void;
}

function refused(why: string): AenvError {
  return new AenvError({
    code: "capacity_unavailable",
    status: 429,
    message: `this node cannot run another sandbox now: ${why}`,
    remediation: "try again later, or pause or delete sandboxes that are not needed",
    headers: { "Retry-After": RETRY_AFTER_SECONDS },
  });
}
