import type { CliError } from "./command.ts";

const DEFAULT = "ctrl-],ctrl-]";
/** Keys that may begin the sequence wait so long for the next one. */
const HOLD_MS = 600;

/** The bytes of the keys that leave a session, e.g. of `ctrl-p,ctrl-q`; empty when there are none. */
export function detachKeys(text: string | undefined, fail: (message: string) => CliError): Buffer {
  const keys = text ?? process.env.AENV_DETACH_KEYS ?? DEFAULT;
  if (keys === "none" || keys === "") return Buffer.alloc(0);
  return Buffer.from(
    keys.split(",").map((key) => {
      const control = /^ctrl-([a-z@[\\\]^_])$/.exec(key)?.[1];
      if (control !== undefined) return control.toUpperCase().charCodeAt(0) & 0x1f;
      if (/^[\x20-\x7e]$/.test(key)) return key.charCodeAt(0);
      throw fail(`"${keys}" are no detach keys: give e.g. ctrl-p,ctrl-q or none`);
    }),
  );
}

/**
 * Looks for a sequence of keys in what is typed. Keys that may be its beginning are held back until the next
 * one tells, or a moment has passed: then they are keys as others are.
 */
export class DetachDetector implements Disposable {
  readonly #sequence: Buffer;
  readonly #pass: (bytes: Buffer) => void;
  readonly #detach: () => void;
  #matched = 0;
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor(sequence: Buffer, pass: (bytes: Buffer) => void, detach: () => void) {
    this.#sequence = sequence;
    this.#pass = pass;
    this.#detach = detach;
  }

  /** Bytes as the terminal sent them. */
  typed(bytes: Buffer): void {
    clearTimeout(this.#timer);
    const sequence = this.#sequence;
    if (sequence.length === 0) {
      this.#pass(bytes);
      return;
    }
    const out: number[] = [];
    for (const byte of bytes) {
      while (this.#matched > 0 && byte !== sequence[this.#matched]) {
        // Not the sequence; its end might be another one's beginning, as long as the keys are the same.
        const keep = this.#overlap();
        out.push(...sequence.subarray(0, this.#matched - keep));
        this.#matched = keep;
      }
      if (byte === sequence[this.#matched]) this.#matched++;
      else out.push(byte);
      if (this.#matched === sequence.length) {
        if (out.length > 0) this.#pass(Buffer.from(out));
        this.#matched = 0;
        this.#detach();
        return;
      }
    }
    if (out.length > 0) this.#pass(Buffer.from(out));
    if (this.#matched > 0) this.#timer = setTimeout(() => this.#release(), HOLD_MS);
  }

  /** Longest proper end of the matched keys that is a beginning of the sequence. */
  #overlap(): number {
    const seen = this.#sequence.subarray(0, this.#matched);
    for (let length = this.#matched - 1; length > 0; length--) {
      if (seen.subarray(this.#matched - length).equals(this.#sequence.subarray(0, length))) return length;
    }
    return 0;
  }

  #release(): void {
    const held = this.#sequence.subarray(0, this.#matched);
    this.#matched = 0;
    if (held.length > 0) this.#pass(Buffer.from(held));
  }

  [Symbol.dispose](): void {
    clearTimeout(this.#timer);
  }
}
