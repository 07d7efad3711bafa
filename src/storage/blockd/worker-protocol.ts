import type { ImageConfig, LayerRef, UpperRef } from "../overlaybd/types.ts";
import type { BlockdError, BlockdStats, ExportKind, LowerSwap, WorkerStats } from "./protocol.ts";

/** What a worker is started with. */
export interface WorkerOptions {
  /** Memory for decompressed blocks. */
  readonly blockCacheBytes: number;
  /** Layers kept open that no device uses, see LayerPool. */
  readonly warmLayers: number;
  /** Where merged indexes of images are kept between opens. */
  readonly indexCacheDirectory: string;
  /** Marks our ublk devices among all of the host. */
  readonly ublkStamp: number;
}

/** Messages between the daemon's main thread and the workers that own the devices. */
export interface OpenRequest {
  readonly op: "open";
  readonly deviceId: string;
  readonly image: ImageConfig;
  readonly readOnly: boolean;
  readonly exportKind: ExportKind;
  readonly directIo?: boolean | undefined;
  readonly socketPath: string;
  /** ublk: the kernel's number of the device while an earlier daemon served it. */
  readonly ublkId: number | undefined;
  /** The upper has to be there: a missing one must not be replaced by an empty one. */
  readonly upperMustExist: boolean;
}

export type WorkerRequest =
  | OpenRequest
  /**
   * `keep`: the next daemon goes on with it; a ublk device stays and its I/O waits. After an error it is open still
   * and to be closed again.
   */
  | { readonly op: "close"; readonly deviceId: string; readonly flush: boolean; readonly keep: boolean }
  | { readonly op: "flush"; readonly deviceId: string }
  | {
      readonly op: "restack";
      readonly deviceId: string;
      readonly sealedPath: string;
      readonly freshUpper: UpperRef;
    }
  | { readonly op: "swapLowers"; readonly deviceId: string; readonly swaps: readonly LowerSwap[] }
  | { readonly op: "stats" }
  /** Removes ublk devices of ours other than these. */
  | { readonly op: "ublkOrphans"; readonly keep: readonly number[] }
  /** Removes a ublk device of ours that nobody serves. */
  | { readonly op: "ublkRemove"; readonly ublkId: number }
  | { readonly op: "exit" };

export interface WorkerResults {
  readonly open: {
    readonly virtualSizeBytes: number;
    readonly image: ImageConfig;
    readonly ublk:
      | { readonly id: number; readonly devicePath: string; readonly recovered: boolean }
      | undefined;
  };
  /** It is closed, and so much did the flush before that say. */
  readonly close: { readonly flushFailure: BlockdError | undefined };
  readonly flush: null;
  readonly restack: LayerRef;
  /** What is under the device now, and why that is not all that was asked for. */
  readonly swapLowers: { readonly image: ImageConfig; readonly failure: BlockdError | undefined };
  readonly stats: { readonly devices: BlockdStats["devices"]; readonly worker: WorkerStats };
  readonly ublkOrphans: { readonly removed: readonly number[] };
  readonly ublkRemove: null;
  readonly exit: null;
}

export interface WorkerRequestMessage {
  readonly id: number;
  readonly request: WorkerRequest;
}

export type WorkerResponseMessage =
  | { readonly id: number; readonly ok: true; readonly result: WorkerResults[keyof WorkerResults] }
  | { readonly id: number; readonly ok: false; readonly error: BlockdError };
