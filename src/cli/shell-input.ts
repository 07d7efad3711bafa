import { AgentError, type AgentTarget, sendStream, unary } from "./agent.ts";
import { encodeInput, encodeInputData, encodeInputKeepalive, encodeInputStart } from "./protocol.ts";

/** The proxy ends a request body that is idle for 30 s. */
const KEEPALIVE_MS = 10_000;
const REOPEN_DELAY_MS = 100;
const SINGLE_CALL_MS = 500;
/** More than this unsent, and the terminal is not read further. */
const MAX_QUEUED_BYTES = 256 * 1024;

/**
 * Keys on their way to the remote terminal: over an open stream that is made again when it breaks, by
 * single calls while there is none. Keys wait here until the connection takes them, in order; what a
 * connection had taken when it broke may be lost, but nothing is ever typed twice.
 */
export class ShellInput {
  readonly #target: AgentTarget;
  readonly #pid: number;
  readonly #closed = new AbortController();
  readonly #flow: { readonly pause: () => void; readonly resume: () => void };
  readonly #queue: Uint8Array[] = [];
  #queuedBytes = 0;
  /** The terminal is not read for now. */
  #full = false;
  #held = false;
  /** What is queued is still sent, then the stream is ended. */
  #ending = false;
  readonly #running: Promise<void>;
  #wake: () => void = () => undefined;

  constructor(
    target: AgentTarget,
    pid: number,
    flow: { readonly pause: () => void; readonly resume: () => void },
  ) {
    this.#target = target;
    this.#pid = pid;
    this.#flow = flow;
    this.#running = this.#run();
  }

  send(bytes: Uint8Array): void {
    this.#queue.push(bytes);
    this.#queuedBytes += bytes.length;
    if (this.#queuedBytes > MAX_QUEUED_BYTES && !this.#full) {
      this.#full = true;
      this.#flow.pause();
    }
    this.#wake();
  }

  /** Keys wait: what they would bring about could not be seen. */
  hold(): void {
    this.#held = true;
  }

  release(): void {
    this.#held = false;
    this.#wake();
  }

  /** Sends what is queued and closes. Resolves when the sandbox has taken it, or when the time is over. */
  async finish(ms: number): Promise<void> {
    this.#ending = true;
    this.#wake();
    const late = Promise.withResolvers<void>();
    const timer = setTimeout(late.resolve, ms);
    await Promise.race([this.#running, late.promise]);
    clearTimeout(timer);
    this.close();
  }

  close(): void {
    this.#closed.abort();
    this.#wake();
  }

  get #isClosed(): boolean {
    return this.#closed.signal.aborted;
  }

  #taken(count: number): Uint8Array {
    const bytes = Buffer.concat(this.#queue.splice(0, count));
    this.#queuedBytes -= bytes.length;
    if (this.#queuedBytes <= MAX_QUEUED_BYTES && this.#full) {
      this.#full = false;
      this.#flow.resume();
    }
    return bytes;
  }

  async #run(): Promise<void> {
    while (!this.#isClosed) {
      try {
        await this.#stream();
      } catch (error) {
        // The session notices a dead sandbox by its own means; keys are kept for the next stream.
        if (!(error instanceof AgentError)) throw error;
      }
      if (this.#isClosed || (this.#ending && this.#queue.length === 0)) return;
      await Bun.sleep(REOPEN_DELAY_MS);
      if (this.#queue.length > 0 && !this.#held && !this.#isClosed) await this.#singleCall();
    }
  }

  async #stream(): Promise<void> {
    let begun = false;
    const broken = new AbortController();
    const next = async (): Promise<Uint8Array | undefined> => {
      if (!begun) {
        begun = true;
        return encodeInputStart(this.#pid);
      }
      const until = performance.now() + KEEPALIVE_MS;
      while (this.#queue.length === 0 || this.#held) {
        if (this.#ending) return undefined;
        const left = until - performance.now();
        if (left <= 0) return encodeInputKeepalive();
        if (!(await this.#keys(left, broken.signal))) return undefined;
      }
      // A pull that outlived its stream must not take what the next one is to send.
      return broken.signal.aborted || this.#isClosed
        ? undefined
        : encodeInputData(this.#taken(this.#queue.length));
    };
    try {
      await sendStream(this.#target, "process.Process/StreamInput", next, this.#closed.signal);
    } finally {
      broken.abort();
      this.#wake();
    }
  }

  /** Waits for keys or for the time to pass; false when the stream is no more. */
  async #keys(ms: number, broken: AbortSignal): Promise<boolean> {
    const { promise, resolve } = Promise.withResolvers<void>();
    const timer = setTimeout(resolve, ms);
    this.#wake = resolve;
    await promise;
    clearTimeout(timer);
    this.#wake = () => undefined;
    return !broken.aborted && !this.#isClosed;
  }

  async #singleCall(): Promise<void> {
    const count = this.#queue.length;
    const bytes = Buffer.concat(this.#queue);
    try {
      await unary(this.#target, "process.Process/SendInput", encodeInput(this.#pid, bytes), SINGLE_CALL_MS);
      this.#taken(count);
    } catch (error) {
      // An error answer says that the keys did not arrive. Silence does not, and typing them twice could
      // do more harm than not typing them.
      if (!(error instanceof AgentError)) throw error;
      if (error.code === "deadline_exceeded" || error.code === "cut") this.#taken(count);
    }
  }
}
