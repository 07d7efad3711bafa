import type { ImageService } from "../image/types.ts";
import { AenvError } from "../lib/errors.ts";

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
export function fixedDiskSize(reference: string, sizeBytes: number): AenvError {
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
