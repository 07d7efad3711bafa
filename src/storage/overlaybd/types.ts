/**
 * Public face of the overlaybd room. Offsets and sizes are bytes (multiples of 512) unless a name says
 * `lbaSectors`. All calls are synchronous and belong to one thread: one device, one owner.
 */

/** One read-only layer of an image or memory chain, bottom to top order in lists. */
export interface LayerRef {
  /** Absolute path of a local layer file: LSMT, ZFile or either wrapped in tar. */
  readonly file: string;
  /** `sha256:<hex>` of the file where it is known (content-addressed layers). */
  readonly digest?: string;
  /** Size of the file in bytes where it is known. */
  readonly size?: number;
  /** UUID in the layer's trailer, lower case, where it has one. */
  readonly uuid?: string;
}

export type UpperMode = "logStructured" | "sparse" | "hybridLogStructured";

/** The writable layer: created when `data` does not exist, else opened and replayed. */
export interface UpperRef {
  readonly data: string;
  /** Absent only for `sparse`. */
  readonly index?: string;
  readonly mode?: UpperMode;
}

/** What lies under one block device or memory image. JSON form is kept on disk as `image.json`. */
export interface ImageConfig {
  readonly lowers: readonly LayerRef[];
  readonly upper?: UpperRef;
  /**
   * Size of the virtual disk in bytes. Absent: inherited from the topmost lower that has one.
   * Required when there is no lower. Bigger than an existing upper's: the upper is grown.
   */
  readonly virtualSizeBytes?: number;
}

/** A stack of layers opened for I/O. Reads and writes past `virtualSizeBytes` are errors. */
export interface LayerStack extends Disposable {
  readonly virtualSizeBytes: number;
  readonly readOnly: boolean;
  /**
   * What is open now. Differs from the config given to `openStack` after a restack or seal, and when opening
   * completed a restack that the process before died in: keep this one.
   */
  readonly image: ImageConfig;
  /** Fills `target` from `offsetBytes`. Holes and zeroed ranges read as zeros. */
  read(offsetBytes: number, target: Uint8Array): void;
  /**
   * Like `read`, but does not wait for a disk: false when it would, with arbitrary content in `target`. The exception
   * are bytes of compressed layers that the kernel dropped within seconds of their last use, see c/shim/mapped.h.
   */
  tryRead(offsetBytes: number, target: Uint8Array): boolean;
  /**
   * Tells which parts of which open files the bytes lie in (compressed layers: are made from). With these in
   * the page cache, `tryRead` succeeds. Descriptors are valid until the next call that changes the stack.
   */
  locate(
    offsetBytes: number,
    lengthBytes: number,
    visit: (fd: number, offsetBytes: number, lengthBytes: number, name: string) => void,
  ): void;
  /**
   * Where the bytes lie as they are in one uncompressed lower layer; undefined when they do not lie in one piece of
   * one. Layers are never written to: the range stays what it is as long as the file is open.
   */
  rawRange(offsetBytes: number, lengthBytes: number): RawRange | undefined;
  write(offsetBytes: number, source: Uint8Array): void;
  /** The range reads as zeros afterwards, also over data of lower layers. */
  discard(offsetBytes: number, lengthBytes: number): void;
  /** Everything written before is on stable storage when this returns. */
  flush(): void;
  /**
   * Ranges that hold data or explicit zeros in the layers given by `layers` ("all", or the upper alone), in order;
   * of the whole disk or of a part of it, cut off at its ends.
   */
  mappedExtents(
    layers: "all" | "upper",
    fromBytes?: number,
    toBytes?: number,
  ): Generator<{ offsetBytes: number; lengthBytes: number; zeroed: boolean }>;
  /**
   * Live snapshot: seals the upper in place (its data file becomes a read-only layer, renamed to
   * `sealedPath`), makes it the topmost lower and continues on `freshUpper`. Durable when it returns;
   * the work does not depend on the amount of data. On error the stack is unchanged and still usable
   * unless the error's code is `restack_terminal`.
   */
  restack(sealedPath: string, freshUpper: UpperRef): LayerRef;
  /**
   * `restack` in steps, for callers that sync elsewhere than on this thread: sync all of what each step yields
   * and go on, or throw the failure into it. In between everything but flush, seal, grow, swapLowers and another
   * restack may be called; to be driven to its end. What is written meanwhile goes to the fresh upper; it is
   * durable with the next flush, as ever.
   */
  restackSteps(sealedPath: string, freshUpper: UpperRef): RestackSteps;
  /** Seals the upper in place, without a fresh one: the stack is read-only afterwards. */
  seal(sealedPath: string): LayerRef;
  /**
   * One bounded step of taking back space that the upper holds without need; to be called between requests,
   * again and again until `done`, e.g. whenever `stats().compactionDue`. Costs at most about `budgetBytes` of
   * copying. Every state in between is an ordinary one, for crashes as for other readers. After `done` the
   * upper's files take at most twice what is mapped in them, plus 4 MiB. A hybrid upper's pieces that are
   * written in place (see Upper.reserve) must not be in flight.
   */
  compactStep(budgetBytes: number): CompactProgress;
  /**
   * A flush in steps, for callers that sync elsewhere than on this thread; undefined when there is nothing to
   * do. Other calls may come in between, but no second flush, seal or restack.
   */
  beginFlush(): PendingFlush | undefined;
  /**
   * A read under way while other calls are made (a ring): what it was planned to read stays there until the
   * returned function is called.
   */
  pin(): () => void;
  /**
   * Makes the disk bigger: upper and stack, durable when it returns. Shrinking is refused. Store the image config
   * with the new size first: opening it completes what a crash interrupted.
   */
  grow(virtualSizeBytes: number): void;
  /**
   * Puts `merged`, made of the `count` lowers from `first` on (0 = bottom) by `mergeLayers` or a `MergeJob`, in
   * their place, between two requests. Returns the layers it stands for. Their files must stay until the
   * new `image` has been stored; until then the old one still opens. It must be stored before the next restack
   * or seal. Callers that do not go by this stack's present `image` name the files that they mean: where others
   * are (`layers_differ`, 409), nothing is changed.
   */
  swapLowers(swap: {
    readonly first: number;
    readonly count: number;
    readonly files?: readonly string[];
    readonly merged: LayerRef;
  }): LayerRef[];
  stats(): StackStats;
}

export interface CompactProgress {
  /** Nothing is left to do now. */
  readonly done: boolean;
  /** Bytes of data that were copied. */
  readonly movedBytes: number;
  /** The next step needs a flush before it: by `flush`, `beginFlush`, or the guest's own. */
  readonly flushNeeded: boolean;
}

/**
 * A flush in steps: fdatasync all of `first`, call `afterFirst` and fdatasync what it returns, then `done`. If any
 * of it fails, `failed` instead: then there is no flush until the stack is opened again, because the kernel may
 * have dropped what it could not write.
 */
export interface PendingFlush {
  readonly first: readonly SyncTarget[];
  afterFirst(): readonly SyncTarget[];
  done(): void;
  failed(error: unknown): void;
}

export interface RawRange {
  /** The same object for the same open layer. */
  readonly layer: object;
  readonly fd: number;
  readonly offsetBytes: number;
  readonly name: string;
}

export type RestackSteps = Generator<readonly SyncTarget[], LayerRef, void>;

export interface SyncTarget {
  readonly name: string;
  /** Absent for files that are not the host's. */
  readonly fd?: number;
  /** A directory: an fdatasync is not enough, it takes an fsync. */
  readonly names?: true;
  /** What is to be done, on this thread. */
  datasync(): void;
}

export interface StackStats {
  /** Space that the upper's data takes, garbage included, and what of it is mapped. */
  readonly upperDataBytes: number;
  readonly upperLiveBytes: number;
  readonly upperIndexBytes: number;
  /** `compactStep` would find something to do. */
  readonly compactionDue: boolean;
  readonly lowerCount: number;
  /** Mappings in memory: of the upper, and of all lowers merged. */
  readonly upperMappings: number;
  readonly lowerMappings: number;
  /** What opening noticed and repaired (an index tail without data, an interrupted restack …). */
  readonly warnings: readonly string[];
}

export interface CommitOptions {
  /** Written to header and trailer; absent: no uuid. */
  readonly uuid?: string;
  readonly parentUuid?: string;
  /**
   * ZFile compression of the committed layer (blocks of 4, 8, 16, 32 or 64 KiB); absent: plain LSMT. A layer
   * with a 64 KiB block that does not shrink is written with 32 KiB blocks: other readers cannot read such.
   */
  readonly compression?: { readonly algorithm: "lz4" | "zstd"; readonly blockSizeBytes: number };
  /** Text kept in header and trailer, at most 256 bytes of UTF-8. */
  readonly userTag?: string;
  /** Wraps the file in tar, the form that registries hold. */
  readonly tar?: boolean;
}

export interface LayerWriterOptions {
  readonly virtualSizeBytes: number;
  readonly uuid?: string;
  readonly parentUuid?: string;
}

/**
 * Streams one layer in committed form into a file that appears, whole and synced, at `finish`. Offsets are
 * bytes in whole sectors and must ascend. Disposing (or `abort`) drops an unfinished file.
 */
export interface LayerWriter extends Disposable {
  readonly mappingCount: number;
  append(offsetBytes: number, data: Uint8Array): void;
  /** The range reads as zeros, also over lower layers. */
  zero(offsetBytes: number, lengthBytes: number): void;
  finish(): LayerRef;
  abort(): void;
}

/** A merge of layers in steps of about `budgetBytes` of copying. */
export interface MergeJob extends Disposable {
  step(budgetBytes: number): { readonly done: boolean; readonly movedBytes: number };
  /** After the last step: the layer, synced and in place. */
  finish(): LayerRef;
}

/** What `agentenv layer apply` asks the image room for. */
export interface ApplyJob {
  /** With an upper that exists. */
  readonly image: ImageConfig;
  /** Path of the layer's tar: plain, gzip or zstd. */
  readonly tar: string;
  /** Make the ext4 file system first, with this UUID. */
  readonly formatUuid?: string;
}

export interface ApplyOutcome {
  readonly entries: number;
  readonly dataBytes: number;
  /** Extended attributes that ext4 has no place for. */
  readonly skippedXattrs: number;
  readonly tarBytes: number;
}

export interface OverlaybdRoom {
  openStack(config: ImageConfig): LayerStack;
  /** Creates an empty upper (log-structured pair or sparse file) of the given size; 0 inherits. */
  createUpper(upper: UpperRef, virtualSizeBytes: number): void;
  /** `target` must not exist; its directory must. */
  createLayerWriter(target: string, options: LayerWriterOptions): LayerWriter;
  /** Compacts the upper of a stack (its own mappings alone) into a committed layer at `target`. */
  commitUpper(upper: UpperRef, target: string, options: CommitOptions): LayerRef;
  /** Flattens consecutive layers (bottom to top) into one committed layer with the same content. */
  mergeLayers(layers: readonly LayerRef[], target: string, options: CommitOptions): LayerRef;
  /** Header, trailer and mapping count of a layer; throws with offset and reason when it is not valid. */
  inspectLayer(file: string): {
    readonly virtualSizeBytes: number;
    readonly mappingCount: number;
    readonly uuid?: string;
    readonly parentUuid?: string;
    readonly container: readonly ("tar" | "zfile" | "lsmt")[];
  };
}
