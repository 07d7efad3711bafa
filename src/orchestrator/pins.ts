import { type PausedState, stateLayers } from "../sandbox/types.ts";

/** Content-addressed files of a state: those that others share and a sweep might remove. */
export function digestFiles(state: PausedState): string[] {
  return stateLayers(state)
    .filter((layer) => layer.digest !== undefined)
    .map((layer) => layer.file);
}

/** Files that must not be collected, each with its number of users. */
export class Pins {
  readonly #counts = new Map<string, number>();

  /** All files that somebody pins. */
  get files(): ReadonlySet<string> {
    return new Set(this.#counts.keys());
  }

  add(files: readonly string[]): void {
    for (const file of files) this.#counts.set(file, (this.#counts.get(file) ?? 0) + 1);
  }

  remove(files: readonly string[]): void {
    for (const file of files) {
      const users = (this.#counts.get(file) ?? 0) - 1;
      if (users > 0) this.#counts.set(file, users);
      else this.#counts.delete(file);
    }
  }

  /** Pinned until disposed. */
  hold(files: readonly string[]): Disposable {
    this.add(files);
    return { [Symbol.dispose]: () => this.remove(files) };
  }
}
