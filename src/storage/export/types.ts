/**
 * What an export serves. One thread owns it. Any alignment inside the device is legal. Calls that return at
 * once never wait for a disk longer than a write into the page cache does; what may take longer is a promise.
 */
export interface ExportTarget {
  readonly exportName: string;
  readonly sizeBytes: number;
  readonly readOnly: boolean;
  /** Fills `into`, if that takes no waiting. False: the content of `into` is arbitrary, use {@link read}. */
  tryRead(offsetBytes: number, into: Uint8Array): boolean;
  /** Fills `into`, which stays the target's until the promise settles. */
  read(offsetBytes: number, into: Uint8Array): Promise<void>;
  write(offsetBytes: number, source: Uint8Array): void;
  /** The client no longer needs the content. */
  trim(offsetBytes: number, lengthBytes: number): void;
  /** The range reads as zeros afterwards. */
  writeZeroes(offsetBytes: number, lengthBytes: number): void;
  /** Everything acknowledged before the call is on stable storage when the promise resolves. */
  flush(): Promise<void>;
  /**
   * What the range is made of, from its start, in order and without gaps: at most `limit` pieces, which may
   * end before the range does.
   */
  extents(offsetBytes: number, lengthBytes: number, limit: number): ExportExtent[];
}

export interface ExportExtent {
  readonly lengthBytes: number;
  /** `hole`: nothing stored, reads as zeros. */
  readonly kind: "data" | "hole";
}

/** What happened on an export that its owner may want to log. */
export type ExportEvent =
  | { readonly kind: "protocol_error"; readonly message: string }
  | { readonly kind: "refused"; readonly message: string }
  | {
      readonly kind: "io_error";
      readonly operation: string;
      readonly offsetBytes: number;
      readonly error: unknown;
    };
