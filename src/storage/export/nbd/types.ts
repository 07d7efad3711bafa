/** What an export serves. One thread owns it; every call is synchronous. Any alignment inside the device is legal. */
export interface NbdTarget {
  readonly exportName: string;
  readonly sizeBytes: number;
  readonly readOnly: boolean;
  read(offsetBytes: number, target: Uint8Array): void;
  write(offsetBytes: number, source: Uint8Array): void;
  /** The client no longer needs the content. */
  trim(offsetBytes: number, lengthBytes: number): void;
  /** The range reads as zeros afterwards. */
  writeZeroes(offsetBytes: number, lengthBytes: number): void;
  /** Everything acknowledged before is on stable storage when this returns. */
  flush(): void;
}

/** What happened on an export that its owner may want to log. */
export type NbdEvent =
  | { readonly kind: "protocol_error"; readonly message: string }
  | { readonly kind: "refused"; readonly message: string }
  | {
      readonly kind: "io_error";
      readonly operation: string;
      readonly offsetBytes: number;
      readonly error: unknown;
    };
