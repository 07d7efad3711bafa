import { newId } from "../../../lib/ids.ts";
import { type Disk, type DiskFile, readBytes, replaceFile } from "../disk.ts";
import { badRequest } from "../errors.ts";
import type { UpperMode, UpperRef } from "../types.ts";
import { isMarkedIndexHeader } from "./epochs.ts";
import {
  BLOCK_BYTES,
  decodeBlock,
  encodeBlock,
  FLAG_DATA,
  FLAG_HEADER,
  FLAG_HYBRID,
  FLAG_SPARSE,
  type LsmtBlock,
  MAPPING_BYTES,
} from "./format.ts";
import { IndexLog, indexHeaderBlock } from "./index-log.ts";

const MODE_FLAGS: Readonly<Record<UpperMode, number>> = {
  logStructured: 0,
  sparse: FLAG_SPARSE,
  hybridLogStructured: FLAG_HYBRID,
};

export interface CreateUpperOptions {
  /** 0: inherit when stacked. */
  readonly virtualSizeBytes: number;
  readonly parentUuid?: string | undefined;
  /** Absent: a new one. */
  readonly uuid?: string | undefined;
  /**
   * `unsynced`: the files are there for every process, but not yet for the next boot; the first `flush` of the
   * Upper sees to that. Saves the fresh upper of a starting sandbox several syncs.
   */
  readonly durability?: "synced" | "unsynced";
}

export function indexPathOf(upper: UpperRef): string {
  if (upper.index === undefined) {
    throw badRequest(
      "invalid_upper",
      `upper ${upper.data}: an index path is needed unless the mode is sparse`,
    );
  }
  return upper.index;
}

/** What the index of an upper is being written to anew; left behind by a crash it is of no use. */
export function compactionPath(index: string): string {
  return `${index}.compact`;
}

/**
 * Creates an empty upper. A crash leaves nothing, or an index file without a data file, which the next
 * creation replaces.
 */
export function createUpperFiles(disk: Disk, upper: UpperRef, options: CreateUpperOptions): void {
  const mode = upper.mode ?? "logStructured";
  if (disk.exists(upper.data)) {
    throw badRequest("upper_exists", `upper ${upper.data} exists`, "open it, or choose another path");
  }
  const header: LsmtBlock = {
    flags: FLAG_HEADER | FLAG_DATA | MODE_FLAGS[mode],
    uuid: options.uuid ?? newId(),
    parentUuid: options.parentUuid,
    virtualSizeBytes: options.virtualSizeBytes,
    indexOffsetBytes: 0,
    indexSize: 0,
  };
  const publish = (target: string, block: Uint8Array, sizeBytes: number) => {
    replaceFile(
      disk,
      target,
      (file) => {
        if (sizeBytes > 0) file.truncate(sizeBytes);
        file.write(0, block, 0, block.byteLength);
        if (mode === "sparse" && sizeBytes > BLOCK_BYTES && file.seekData(BLOCK_BYTES) !== undefined) {
          throw badRequest(
            "no_sparse_files",
            `upper ${target}: this file system does not keep holes, which the sparse mode needs`,
            "use the mode logStructured",
          );
        }
      },
      options.durability,
    );
  };
  if (mode !== "sparse") {
    const index = indexPathOf(upper);
    if (disk.exists(index) && hasMappings(disk, index)) {
      throw badRequest(
        "upper_data_missing",
        `upper ${upper.data} is missing but its index ${index} has mappings`,
        "use the layer it was sealed as, restore the data file, or remove the index to start empty",
      );
    }
    publish(index, indexHeaderBlock(header), 0);
  }
  publish(upper.data, encodeBlock(header), mode === "sparse" ? BLOCK_BYTES + options.virtualSizeBytes : 0);
  if (options.durability !== "unsynced") {
    disk.syncDirectoriesOf(upper.data, ...(mode === "sparse" ? [] : [indexPathOf(upper)]));
  }
}

function withFile<Result>(disk: Disk, name: string, use: (file: DiskFile) => Result): Result {
  const file = disk.open(name, "read");
  try {
    return use(file);
  } finally {
    file.close();
  }
}

/** True when an index file has mappings that count: for a marked one those that were flushed or are of this boot. */
function hasMappings(disk: Disk, index: string): boolean {
  return withFile(disk, index, (file) => {
    if (file.size() < BLOCK_BYTES + MAPPING_BYTES) return false;
    const header = readBytes(file, 0, BLOCK_BYTES);
    if (isBlank(header)) return false;
    const { log } = IndexLog.open(disk, file, { marked: isMarkedIndexHeader(header), readOnly: true });
    return log.entries > 0;
  });
}

/** True when anything was written to an upper that counts; for a sparse one under this boot. */
export function hasContent(disk: Disk, upper: UpperRef): boolean {
  if (upper.mode !== "sparse")
    return disk.exists(indexPathOf(upper)) && hasMappings(disk, indexPathOf(upper));
  return withFile(disk, upper.data, (file) => file.seekData(BLOCK_BYTES) !== undefined);
}

/**
 * Header of a data file, without opening it as an upper; undefined when there is no file, or one of which nothing
 * was ever written back before power was lost.
 */
export function readDataHeader(disk: Disk, file: string): LsmtBlock | undefined {
  if (!disk.exists(file)) return undefined;
  return withFile(disk, file, (opened) => {
    const block = readBytes(opened, 0, BLOCK_BYTES);
    return isBlank(block) ? undefined : decodeBlock(block, file, 0, "header");
  });
}

/** A header block of which nothing was ever written back: shorter than the used part, or nothing but zeros. */
export function isBlank(header: Uint8Array): boolean {
  return header.byteLength < 512 || header.every((byte) => byte === 0);
}

/**
 * Clears away what power loss left of an upper that was created unsynced and never flushed: its data file has
 * no header, or its name came through without it. The files are set aside as `<name>.dropped`. Returns what
 * was done; undefined when the upper is an upper, or nothing at all.
 */
export function clearBlankUpper(disk: Disk, upper: UpperRef): string | undefined {
  if (!disk.exists(upper.data)) return undefined;
  if (!isBlank(withFile(disk, upper.data, (file) => readBytes(file, 0, BLOCK_BYTES)))) return undefined;
  if (upper.index !== undefined && disk.exists(upper.index)) {
    // A flush makes both headers durable before it makes any mapping so.
    if (hasMappings(disk, upper.index)) return undefined;
    disk.rename(upper.index, `${upper.index}.dropped`);
  }
  disk.rename(upper.data, `${upper.data}.dropped`);
  return `upper ${upper.data} was lost with power before its first flush: it starts empty`;
}
