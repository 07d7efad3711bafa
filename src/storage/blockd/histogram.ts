/** Upper bounds in seconds, from the page cache's speed to a disk in trouble. */
export const DURATION_BOUNDS_SECONDS = [
  0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5,
] as const;

export interface DurationSnapshot {
  /** Per bound of DURATION_BOUNDS_SECONDS, not cumulative, and one more for what was longer. */
  readonly counts: readonly number[];
  readonly sumSeconds: number;
}

/** How long something took, counted by size. */
export class DurationHistogram {
  readonly #counts: number[] = new Array(DURATION_BOUNDS_SECONDS.length + 1).fill(0);
  #sumSeconds = 0;

  add(milliseconds: number): void {
    const seconds = milliseconds / 1000;
    const bucket = DURATION_BOUNDS_SECONDS.findIndex((bound) => seconds <= bound);
    const at = bucket < 0 ? DURATION_BOUNDS_SECONDS.length : bucket;
    this.#counts[at] = this.#counts[at]! + 1;
    this.#sumSeconds += seconds;
  }

  snapshot(): DurationSnapshot {
    return { counts: [...this.#counts], sumSeconds: this.#sumSeconds };
  }
}

/** Of several devices. */
export function mergeDurations(all: readonly DurationSnapshot[]): DurationSnapshot {
  const counts: number[] = new Array(DURATION_BOUNDS_SECONDS.length + 1).fill(0);
  let sumSeconds = 0;
  for (const one of all) {
    for (const [i, count] of one.counts.entries()) counts[i] = counts[i]! + count;
    sumSeconds += one.sumSeconds;
  }
  return { counts, sumSeconds };
}
