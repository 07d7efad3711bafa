import { netRules } from "../../ffi/netns.ts";
import { Batch } from "./nft.ts";

type Change = (batch: Batch) => void;

interface Waiting {
  readonly change: Change;
  readonly resolve: () => void;
  readonly reject: (error: unknown) => void;
}

/** Changes that go to the kernel as one transaction at most. */
const MAX_CHANGES = 64;

/**
 * Changes to one table of the host, in the order they were asked for. Each is in one transaction as a whole;
 * those that wait while another is under way share the next, and are tried one by one if that is refused.
 */
export class RuleWriter {
  readonly #table: string;
  readonly #waiting: Waiting[] = [];
  #working = false;

  constructor(table: string) {
    this.#table = table;
  }

  /** Resolves when the kernel has taken the change; rejects when it refused it: then nothing has changed. */
  apply(change: Change): Promise<void> {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ change, resolve, reject });
      if (!this.#working) void this.#work();
    });
  }

  async #work(): Promise<void> {
    this.#working = true;
    while (this.#waiting.length > 0) {
      const group = this.#waiting.splice(0, MAX_CHANGES);
      try {
        await this.#commit(group);
        for (const { resolve } of group) resolve();
      } catch (error) {
        if (group.length === 1) group[0]!.reject(error);
        else for (const one of group) await this.#commit([one]).then(one.resolve, one.reject);
      }
    }
    this.#working = false;
  }

  async #commit(group: readonly Waiting[]): Promise<void> {
    const batch = new Batch(this.#table);
    for (const { change } of group) change(batch);
    if (!batch.isEmpty) await netRules(undefined, batch.finish());
  }
}
