import type { ImageConfig, LayerRef, UpperRef } from "../overlaybd/types.ts";
import type { BlockdError, BlockdStats, WorkerStats } from "./protocol.ts";

/** What a worker is started with. */
export interface WorkerOptions {
  /** Memory for decompressed blocks. */
  readonly blockCacheBytes: number;
  /** Where merged indexes of images are kept between opens. */
  readonly indexCacheDirectory: string;
}

/** Messages between the daemon's main thread and the workers that own the devices. */
export interface OpenRequest {
  readonly op: "open";
  readonly deviceId: string;
  readonly image: ImageConfig;
  readonly readOnly: boolean;
  readonly socketPath: string;
  /** The upper has to be there: a missing one must not be replaced by an empty one. */
  readonly upperMustExist: boolean;
}

export type WorkerRequest =
  | OpenRequest
  | { readonly op: "close"; readonly deviceId: string; readonly flush: boolean }
  | { readonly op: "flush"; readonly deviceId: string }
  | {
      readonly op: "restack";
      readonly deviceId: string;
      readonly sealedPath: string;
      readonly freshUpper: UpperRef;
    }
  | { readonly op: "stats" }
  | { readonly op: "exit" };

export interface WorkerResults {
  readonly open: { readonly virtualSizeBytes: number; readonly image: ImageConfig };
  readonly close: null;
  readonly flush: null;
  readonly restack: LayerRef;
  readonly stats: { readonly devices: BlockdStats["devices"]; readonly worker: WorkerStats };
  readonly exit: null;
}

export interface WorkerRequestMessage {
  readonly id: number;
  readonly request: WorkerRequest;
}

export type WorkerResponseMessage =
  | { readonly id: number; readonly ok: true; readonly result: WorkerResults[keyof WorkerResults] }
  | { readonly id: number; readonly ok: false; readonly error: BlockdError };
