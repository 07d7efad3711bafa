import { constants } from "node:os";

/** Exit status of a process that a signal ended, as shells show it. */
export function signalStatus(signal: NodeJS.Signals): number {
  return 128 + constants.signals[signal];
}

/** Takes signals over for as long as it lives; the default action returns afterwards. */
export class SignalHandler implements Disposable {
  readonly #signals: readonly NodeJS.Signals[];
  readonly #listener: (signal: NodeJS.Signals) => void;

  constructor(signals: readonly NodeJS.Signals[], listener: (signal: NodeJS.Signals) => void) {
    this.#signals = signals;
    this.#listener = listener;
    for (const signal of signals) process.on(signal, listener);
  }

  [Symbol.dispose](): void {
    for (const signal of this.#signals) process.off(signal, this.#listener);
  }
}
