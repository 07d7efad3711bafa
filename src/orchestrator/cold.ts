import type { ImageService, ResolvedImage } from "../image/types.ts";
import { AenvError } from "../lib/errors.ts";
import type { AttachedDrive } from "../sandbox/types.ts";
import type { PlannedDrive } from "./drives.ts";

/** What sandboxes that boot from an image, without a template, are made with. */
export interface ColdStartOptions {
  readonly images: Pick<ImageService, "resolve" | "hold">;
  /** Of requests that name none. */
  readonly cpuCount: number;
  readonly memoryMiB: number;
  readonly diskSizeMiB: number;
  /** Whether a request may ask for a smaller disk than that. */
  readonly allowShrink: boolean;
  /** Kernel command line words that requests may add, by their beginning. */
  readonly allowedBootArgsPrefixes: readonly string[];
}

const MIB = 1024 * 1024;
const BOOT_WORD = /^[0-9A-Za-z_\-./+=]+$/;

/**
 * Words of `extraBootArgs` that the node lets through; the others are left out. Error `invalid_boot_args` 400
 * for characters that no word may have.
 */
export function allowedBootWords(text: string, prefixes: readonly string[]): string[] {
  const words = text.split(/\s+/).filter((word) => word !== "");
  const wrong = words.find((word) => !BOOT_WORD.test(word));
  if (wrong !== undefined) {
    throw new AenvError({
      code: "invalid_boot_args",
      status: 400,
      message: `extraBootArgs: ${JSON.stringify(wrong)} has characters other than 0-9 A-Z a-z _ - . / + =`,
    });
  }
  return words.filter((word) => prefixes.some((prefix) => word.startsWith(prefix)));
}

/** Size of a new disk in MiB. Error `disk_shrink_refused` 400 for less than the node gives by itself. */
export function coldDiskSize(wanted: number | undefined, options: ColdStartOptions): number {
  if (wanted === undefined) return options.diskSizeMiB;
  if (wanted < options.diskSizeMiB && !options.allowShrink) {
    throw new AenvError({
      code: "disk_shrink_refused",
      status: 400,
      message: `diskSizeMB: ${wanted} is smaller than this node's disks of ${options.diskSizeMiB} MiB`,
      remediation: "ask for at least that, leave it out, or set ublk.overlaybd.allow_shrink = true",
    });
  }
  return wanted;
}

/** An image whose disk cannot be made in the size that was asked for. */
function fixedDiskSize(reference: string, sizeBytes: number): AenvError {
  return new AenvError({
    code: "disk_size_fixed",
    status: 400,
    message: `diskSizeMB: the disk of ${reference} was made with ${sizeBytes / 1048576} MiB and keeps its size`,
    remediation: "leave diskSizeMB out",
  });
}

export function coldStartOff(): AenvError {
  return new AenvError({
    code: "cold_start_unsupported",
    status: 400,
    message: "this server starts sandboxes from templates only",
  });
}

/** The disks of a sandbox without a template, found and held until this is disposed. */
export interface ColdDisks extends Disposable {
  readonly root: ResolvedImage;
  readonly drives: readonly AttachedDrive[];
  /** Content-addressed files of all of them. */
  readonly files: readonly string[];
}

/**
 * Finds the images of a root disk and attached drives, downloading what is missing. Error `disk_size_fixed` 400 for a
 * disk that cannot have the size asked for.
 */
export async function coldDisks(
  request: {
    readonly image: string;
    readonly diskSizeMiB: number | undefined;
    readonly drives: readonly PlannedDrive[];
  },
  options: ColdStartOptions,
  signal: AbortSignal,
): Promise<ColdDisks> {
  using held = new DisposableStack();
  const files: string[] = [];
  const disk = async (reference: string, wanted: number | undefined): Promise<ResolvedImage> => {
    const virtualSizeBytes = coldDiskSize(wanted, options) * MIB;
    const found = await options.images.resolve(reference, { virtualSizeBytes, signal });
    const own = found.lowers.map(({ file }) => file);
    held.use(options.images.hold(own));
    files.push(...own);
    if (wanted === undefined || found.virtualSizeBytes === virtualSizeBytes) return found;
    throw fixedDiskSize(reference, found.virtualSizeBytes);
  };
  const root = await disk(request.image, request.diskSizeMiB);
  const drives: AttachedDrive[] = [];
  for (const { image, diskSizeMiB, ...drive } of request.drives) {
    const { lowers, virtualSizeBytes } = await disk(image, diskSizeMiB);
    drives.push({ ...drive, lowers, virtualSizeBytes });
  }
  const kept = held.move();
  return { root, drives, files, [Symbol.dispose]: () => kept[Symbol.dispose]() };
}
