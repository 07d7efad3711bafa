/**
 * Progress of long work. Reported upwards by whoever works, shown by whoever has a terminal.
 * `doneBytes`/`totalBytes` are absent where the amount is not known.
 */
export interface ProgressEvent {
  /** Short name of the phase, e.g. `download layer`. */
  readonly phase: string;
  /** What is worked on, e.g. a digest or file name. */
  readonly item?: string;
  readonly doneBytes?: number;
  readonly totalBytes?: number;
  readonly message?: string;
}

export type ProgressSink = (event: ProgressEvent) => void;
