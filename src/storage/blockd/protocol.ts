import type { ImageConfig, LayerRef, UpperRef } from "../overlaybd/types.ts";

/**
 * The block daemon's socket protocol. One unix stream socket; every message is a 4-byte little-endian
 * length followed by that many bytes of JSON (at most 1 MiB). The client speaks first with `hello`.
 * Requests carry an id and may be answered in any order.
 */
export const BLOCKD_PROTOCOL_VERSION = 1;
/** Exit status of a daemon that finds another one for the same directory or socket, which may be starting (EX_TEMPFAIL). */
export const BLOCKD_RUNNING_STATUS = 75;
export const BLOCKD_MAX_MESSAGE_BYTES = 1 << 20;

export type ExportKind = "nbd" | "ublk";

export interface DeviceSpec {
  /** Chosen by the caller, `[A-Za-z0-9_.-]{1,128}`; creating the same id twice with the same spec is one device. */
  readonly deviceId: string;
  readonly image: ImageConfig;
  /** No upper is opened and guest writes fail. */
  readonly readOnly: boolean;
  readonly exportKind: ExportKind;
  /**
   * Uncompressed lower layers are read around the page cache: faster on a cold cache and without filling the host's
   * memory, but nothing read is there for the next device of the image. For images that no other device uses.
   */
  readonly directIo?: boolean | undefined;
}

export interface DeviceInfo {
  readonly deviceId: string;
  readonly virtualSizeBytes: number;
  readonly readOnly: boolean;
  readonly exportKind: ExportKind;
  /** NBD: unix socket path. */
  readonly socketPath?: string;
  /** NBD: export name. */
  readonly exportName?: string;
  /** ublk: block device path. */
  readonly devicePath?: string;
  /** What is under the device now: a restack changes it. */
  readonly image: ImageConfig;
  /**
   * Why the device cannot be used: it could not be opened again after the daemon was restarted, a restack
   * failed half-way, or the kernel did not let go of it when it was released. Creating it again with the same spec tries once more; release forgets it.
   */
  readonly failure?: string;
}

/** Layers `first` to `first + count - 1` (0 = bottom) have the content of `merged`, which takes their place. */
export interface LowerSwap {
  readonly first: number;
  readonly count: number;
  /** Their files, as the caller knows the device: where it has others there, nothing is replaced. */
  readonly files: readonly string[];
  readonly merged: LayerRef;
}

export type BlockdRequest =
  | { readonly op: "hello"; readonly version: number }
  | { readonly op: "create"; readonly device: DeviceSpec }
  | { readonly op: "get"; readonly deviceId: string }
  /** One page of devices in order of their ids, beginning after the id given. */
  | { readonly op: "list"; readonly after?: string }
  /**
   * Closes the export and the files; nothing on disk is removed. Unknown ids are fine. A ublk device that the
   * kernel does not let go of stays listed as failed, with its files in use: release it again.
   */
  | { readonly op: "release"; readonly deviceId: string }
  /** Everything the guest was told is written is on stable storage. */
  | { readonly op: "flush"; readonly deviceId: string }
  /**
   * Live snapshot of the device's upper, see LayerStack.restack. The sealed path may not exist, the fresh
   * upper's files neither, unless they are the present upper's own. Repeating the last successful call
   * answers with its result again.
   */
  | {
      readonly op: "restack";
      readonly deviceId: string;
      readonly sealedPath: string;
      readonly freshUpper: UpperRef;
    }
  /**
   * Puts merged layers in the place of lowers of an open device, one swap after the other, each counting in
   * what the one before left. Its client notices nothing. The files that are replaced may go when it has
   * answered. Repeating a call that succeeded changes nothing.
   */
  | { readonly op: "swapLowers"; readonly deviceId: string; readonly swaps: readonly LowerSwap[] }
  /** One page of statistics, ordered and continued like `list`. */
  | { readonly op: "stats"; readonly after?: string }
  /** Flushes and releases every device, removes the socket and exits. */
  | { readonly op: "shutdown" };

/** One worker thread of the daemon. */
export interface WorkerStats {
  readonly engine: "io_uring" | "threads";
  /** Requests at the kernel, and waiting for room there. */
  readonly inFlight: number;
  readonly waiting: number;
  /** Since the start: requests, and the calls that handed them to the kernel. */
  readonly requests: number;
  readonly submits: number;
  readonly blockCache: {
    readonly bytes: number;
    readonly limitBytes: number;
    readonly hits: number;
    readonly misses: number;
  };
  /** Layer files that devices use, those kept open for the next device, and how often one was found open. */
  readonly layers: {
    readonly used: number;
    readonly idle: number;
    readonly hits: number;
    readonly misses: number;
  };
  /** Decompression, by codec. */
  readonly zfile: Readonly<Record<"lz4" | "zstd", ZFileStats>>;
}

export interface ZFileStats {
  readonly blocks: number;
  /** Reads of compressed bytes. */
  readonly readBatches: number;
  readonly encodedBytes: number;
  readonly outputBytes: number;
}

/** How often something took how long, see histogram.ts for the bounds. */
export interface DurationStats {
  readonly counts: readonly number[];
  readonly sumSeconds: number;
}

/** Operations of one kind and outcome since the daemon started. */
export interface OperationStats {
  readonly operation: "create_raw_overlaybd" | "create_runtime_overlaybd" | "release" | "restack_snapshot";
  readonly status: "success" | "error";
  readonly seconds: DurationStats;
}

export interface BlockdStats {
  readonly pid: number;
  readonly startedAt: string;
  readonly rssBytes: number;
  readonly workers: readonly WorkerStats[];
  readonly operations: readonly OperationStats[];
  readonly devices: readonly {
    readonly deviceId: string;
    readonly readOps: number;
    readonly readBytes: number;
    /** Reads that had to wait for a disk. */
    readonly lateReadOps: number;
    readonly writeOps: number;
    readonly writeBytes: number;
    /** Trims and writes of zeros. */
    readonly trimOps: number;
    readonly flushOps: number;
    /** Requests that the guest was told have failed. */
    readonly errorOps: number;
    readonly connections: number;
    /** Data moved by compaction. */
    readonly compactedBytes: number;
    readonly flushSeconds: DurationStats;
    readonly lateReadSeconds: DurationStats;
    readonly upperDataBytes: number;
    readonly upperLiveBytes: number;
    readonly lowerCount: number;
  }[];
}

export type BlockdError = {
  /** `invalid_request`: the caller's fault; `terminal`: the device's state changed and it is unusable. */
  readonly kind: "invalid_request" | "error" | "terminal";
  readonly code: string;
  readonly message: string;
  /** HTTP status the error was born with. */
  readonly status?: number;
  readonly remediation?: string;
};

/** What a request is sent as. */
export type BlockdRequestMessage = { readonly id: number } & BlockdRequest;

/** `id` is null where the request's own could not be read; the connection ends then. */
export type BlockdResponseMessage =
  | { readonly id: number; readonly ok: true; readonly result: unknown }
  | { readonly id: number | null; readonly ok: false; readonly error: BlockdError };

export interface BlockdResults {
  readonly hello: { readonly version: number; readonly pid: number };
  readonly create: DeviceInfo;
  readonly get: DeviceInfo | null;
  readonly list: { readonly devices: readonly DeviceInfo[]; readonly more: boolean };
  readonly release: null;
  readonly flush: null;
  readonly restack: LayerRef;
  readonly swapLowers: null;
  readonly stats: BlockdStats & { readonly more: boolean };
  readonly shutdown: null;
}

/** The daemon as the rest of the server sees it. Every call has a deadline (default 30 s). */
export interface BlockClient extends AsyncDisposable {
  create(device: DeviceSpec): Promise<DeviceInfo>;
  get(deviceId: string): Promise<DeviceInfo | undefined>;
  list(): Promise<DeviceInfo[]>;
  release(deviceId: string): Promise<void>;
  flush(deviceId: string): Promise<void>;
  restack(deviceId: string, sealedPath: string, freshUpper: UpperRef): Promise<LayerRef>;
  swapLowers(deviceId: string, swaps: readonly LowerSwap[]): Promise<void>;
  stats(): Promise<BlockdStats>;
  shutdown(): Promise<void>;
}

/** How the server starts, finds and watches the daemon. */
export interface BlockdSupervisorOptions {
  /** Command line that starts the daemon, e.g. `[process.execPath, "blockd"]`. */
  readonly argv: readonly string[];
  readonly socketPath: string;
  /** Device table and export sockets live here (must survive the daemon, not the host). */
  readonly runtimeDir: string;
  readonly logPath: string;
}
