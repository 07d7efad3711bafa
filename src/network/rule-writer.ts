import { NetfilterSocket } from "../../ffi/netns.ts";
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
export class RuleWriter implements Disposable {
  readonly #table: string;
  readonly #waiting: Waiting[] = [];
  readonly #socket = new NetfilterSocket();
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

  /** No change may be under way. */
  [Symbol.dispose](): void {
    this.#socket[Symbol.dispose]();
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
    if (!batch.isEmpty) await this.#socket.apply(batch.finish());
  }
}

/** The host's table of tracked connections. */
export class FlowTable implements Disposable {
  #sockets: { reader: NetfilterSocket; writer: NetfilterSocket } | undefined;
  #last: Promise<unknown> = Promise.resolve();

  /**
   * What an address (host byte order), or all of a block, has opened is no connection any more. One after the
   * other. The kernel looks through its whole table: some milliseconds of processor time.
   */
  forget(source: number, mask?: number): Promise<number> {
    const work = this.#last.then(() => this.#forget(source, mask));
    this.#last = work.catch(() => undefined);
    return work;
  }

  [Symbol.dispose](): void {
    this.#sockets?.reader[Symbol.dispose]();
    this.#sockets?.writer[Symbol.dispose]();
    this.#sockets = undefined;
  }

  async #forget(source: number, mask?: number): Promise<number> {
    this.#sockets ??= { reader: new NetfilterSocket(), writer: new NetfilterSocket() };
    try {
      return await this.#sockets.writer.forget(this.#sockets.reader, source, mask);
    } catch (error) {
      // Answers of the failed call may still come: not to the next one.
      this[Symbol.dispose]();
      throw error;
    }
  }
}
