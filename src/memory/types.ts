import type { LayerRef } from "../storage/overlaybd/types.ts";
import type { VmReference } from "../vmm/types.ts";

/**
 * Guest memory is a privately mapped file. Its truth is a chain of overlaybd layers; the flat sparse
 * file a VM maps is derived from the chain, shared by all clones and may be thrown away at any time.
 */
export interface MemoryImage {
  readonly sizeBytes: number;
  /** Bottom to top; empty: all zeros (first boot). */
  readonly layers: readonly LayerRef[];
}

export interface CaptureResult {
  /** The image the VM's memory now equals: the given layers and one new on top (absent if nothing changed). */
  readonly image: MemoryImage;
  readonly newLayer?: LayerRef;
  /** Pages the guest wrote since the memory file was mapped. */
  readonly dirtyBytes: number;
  /** Of these: what differs from the base and is in the new layer, as data and as zeros. */
  readonly storedBytes: number;
  readonly zeroedBytes: number;
  readonly scanMs: number;
  readonly writeMs: number;
}

export interface MemoryLease extends AsyncDisposable {
  /** Flat sparse file of `sizeBytes`, shared and never written. */
  readonly file: string;
}

export interface MemoryService {
  /**
   * Flat file for an image, made once per chain and shared (its page cache, too) while any lease is
   * open; unleased files are kept up to a size limit.
   */
  materialize(image: MemoryImage): Promise<MemoryLease>;
  /** VM must be paused. Writes the changed pages as one durable layer at `layerPath`. */
  capture(vm: VmReference, base: MemoryImage, layerPath: string): Promise<CaptureResult>;
}
