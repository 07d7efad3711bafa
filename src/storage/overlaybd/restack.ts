import { AenvError } from "../../lib/errors.ts";
import { type Disk, type DiskFile, replaceFile, type StagedFile, stageFile } from "./disk.ts";
import { inspectLayer } from "./inspect.ts";
import { createUpperFiles, hasContent, readDataHeader } from "./lsmt/upper-files.ts";
import type { ImageConfig, LayerRef, RestackSteps, UpperRef } from "./types.ts";

/**
 * A restack: a record beside the upper (`<data>.restack`) says what is meant; a fresh upper is made and the upper's
 * data file gets its index and trailer; from then on writes go to the fresh upper; the data file is synced and
 * renamed to the sealed path; later the owner of the image config stores the new one. Only two moments wait for
 * the disk: the data file's content is durable before it gets the sealed name, and the names before the restack is
 * said to be done. The record is the text of a symbolic link, which is durable with its name; where it does not fit
 * into one it is a file, whose content is durable before it gets its name: a third wait. The fresh upper is durable
 * with its first flush, which comes after that. So opening the old config after a crash finds out:
 *
 * - the data file still has its place. With writes on the fresh upper that count (the process was killed, the
 *   kernel was not: nothing is lost that was in the page cache) what is missing is done; else it is the old state:
 *   a trailer is cut off again (Upper), fresh files are removed.
 * - the data file is at the sealed path: the new state. What is missing is done and the stack opens as
 *   `[...lowers, sealed]` + fresh, with every write that was acknowledged on either. A fresh upper that is not
 *   there was lost with power before its first flush: it starts empty.
 *
 * Names become durable in the order they were given, as journalling file systems have it. Fresh files that replace
 * the old ones by name wait as `<name>.fresh`.
 */
export interface RestackRecord {
  /** `lowersDigest` of the lowers before. */
  readonly lowers: string;
  readonly sealedPath: string;
  readonly sealedUuid: string;
  readonly fresh: UpperRef;
  readonly freshUuid: string;
  /** Boot that it was begun under; records of earlier versions have none. */
  readonly bootId?: string;
}

/** Carries out steps on this thread. */
export function runSteps(steps: RestackSteps): LayerRef {
  let step = steps.next();
  while (step.done !== true) {
    try {
      for (const target of step.value) target.datasync();
    } catch (error) {
      step = steps.throw(error);
      continue;
    }
    step = steps.next();
  }
  return step.value;
}

/** Tells lists of lowers apart by their files. */
export function lowersDigest(lowers: readonly LayerRef[]): string {
  const files = JSON.stringify(lowers.map((lower) => lower.file));
  return new Bun.CryptoHasher("sha256").update(files).digest("hex");
}

export function recordPath(upper: UpperRef): string {
  return `${upper.data}.restack`;
}

/** Where a fresh upper's files lie until the old ones are gone: same name, or `.fresh` behind it. */
export function waitingUpper(fresh: UpperRef, old: UpperRef): UpperRef {
  const taken = new Set([old.data, old.index].filter((file) => file !== undefined));
  const wait = (file: string) => (taken.has(file) ? `${file}.fresh` : file);
  return {
    ...fresh,
    data: wait(fresh.data),
    ...(fresh.index === undefined ? {} : { index: wait(fresh.index) }),
  };
}

function isRecord(value: unknown): value is RestackRecord {
  if (typeof value !== "object" || value === null) return false;
  const record = value as Partial<Record<keyof RestackRecord, unknown>>;
  const fresh = record.fresh as Partial<Record<keyof UpperRef, unknown>> | undefined;
  return (
    typeof record.lowers === "string" &&
    typeof record.sealedPath === "string" &&
    typeof record.sealedUuid === "string" &&
    typeof record.freshUuid === "string" &&
    (record.bootId === undefined || typeof record.bootId === "string") &&
    typeof fresh === "object" &&
    fresh !== null &&
    typeof fresh.data === "string" &&
    (fresh.index === undefined || typeof fresh.index === "string")
  );
}

/** Records of restacks of the upper at this path, oldest first. */
export function readRecords(disk: Disk, upper: UpperRef): RestackRecord[] {
  const file = recordPath(upper);
  const text = disk.readNote(file) ?? (disk.exists(file) ? disk.readText(file) : undefined);
  if (text === undefined) return [];
  let parsed: unknown;
  try {
    parsed = JSON.parse(text);
  } catch (error) {
    throw new AenvError({
      code: "restack_record_invalid",
      message: `${file} is no JSON`,
      remediation: "the file is written atomically, so the disk is damaged: restore it from a backup",
      cause: error,
    });
  }
  if (!Array.isArray(parsed) || !parsed.every(isRecord)) {
    throw new AenvError({ code: "restack_record_invalid", message: `${file} is no restack record` });
  }
  return parsed;
}

function encodeRecords(records: readonly RestackRecord[]): (file: DiskFile) => void {
  const bytes = new TextEncoder().encode(JSON.stringify(records));
  return (file) => file.write(0, bytes, 0, bytes.byteLength);
}

/** Puts records in place that are durable with their name. False where that is not possible. */
export function noteRecords(disk: Disk, upper: UpperRef, records: readonly RestackRecord[]): boolean {
  const file = recordPath(upper);
  const temporary = `${file}.tmp`;
  disk.removeIfPresent(temporary);
  if (!disk.createNote(temporary, JSON.stringify(records))) return false;
  disk.rename(temporary, file);
  return true;
}

export function writeRecords(disk: Disk, upper: UpperRef, records: readonly RestackRecord[]): void {
  const file = recordPath(upper);
  if (records.length === 0) {
    disk.removeIfPresent(file);
    return;
  }
  if (!noteRecords(disk, upper, records)) replaceFile(disk, file, encodeRecords(records));
  disk.syncDirectoriesOf(file);
}

/** The same as a file, to be synced and put in place by the caller. */
export function stageRecords(disk: Disk, upper: UpperRef, records: readonly RestackRecord[]): StagedFile {
  return stageFile(disk, recordPath(upper), encodeRecords(records));
}

/**
 * Puts the waiting fresh files in place of the old ones and removes an old index that is not replaced. Syncing the
 * directories is the caller's.
 */
export function placeFresh(disk: Disk, fresh: UpperRef, old: UpperRef): void {
  const waiting = waitingUpper(fresh, old);
  // Data last: while it still waits, the record tells that the work is not done.
  if (fresh.index !== undefined && waiting.index !== undefined && waiting.index !== fresh.index) {
    if (disk.exists(waiting.index)) disk.rename(waiting.index, fresh.index);
  }
  if (waiting.data !== fresh.data && disk.exists(waiting.data)) disk.rename(waiting.data, fresh.data);
  if (old.index !== undefined && old.index !== fresh.index && old.index !== fresh.data)
    disk.removeIfPresent(old.index);
}

export function removeFresh(disk: Disk, fresh: UpperRef, old: UpperRef): void {
  const waiting = waitingUpper(fresh, old);
  disk.removeIfPresent(waiting.data);
  if (waiting.index !== undefined) disk.removeIfPresent(waiting.index);
}

/** Undefined as well for a file whose content was lost with power. */
function headerUuid(disk: Disk, file: string): string | undefined {
  return readDataHeader(disk, file)?.uuid;
}

function fileSizeOf(disk: Disk, file: string): number {
  const opened = disk.open(file, "read");
  try {
    return opened.size();
  } finally {
    opened.close();
  }
}

/**
 * Gives the data file, which still has its place, the sealed name when the fresh upper has been written to since.
 * Only under the boot that the restack was begun under: then all that was written is in the page cache at least.
 */
function publishLate(disk: Disk, upper: UpperRef, record: RestackRecord, waiting: UpperRef): boolean {
  const { freshUuid, sealedPath, bootId } = record;
  if (bootId !== disk.bootId() || headerUuid(disk, waiting.data) !== freshUuid) return false;
  if (!hasContent(disk, waiting)) return false;
  const file = disk.open(upper.data, "write");
  try {
    file.sync();
  } finally {
    file.close();
  }
  disk.renameNoReplace(upper.data, sealedPath);
  return true;
}

/** Carries out what `record` says for an upper that is still configured as `upper`; undefined: old state. */
function rollForward(disk: Disk, upper: UpperRef, record: RestackRecord): LayerRef | undefined {
  const { fresh, freshUuid, sealedPath, sealedUuid } = record;
  const waiting = waitingUpper(fresh, upper);
  // Where rename cannot refuse to replace, link and unlink stand for it and both names may be left.
  const linkedTwice = disk.sameFile(upper.data, sealedPath);
  if (!linkedTwice && headerUuid(disk, upper.data) === sealedUuid) {
    if (!publishLate(disk, upper, record, waiting)) {
      const half = headerUuid(disk, waiting.data);
      if (half === undefined || half === freshUuid) removeFresh(disk, fresh, upper);
      return undefined;
    }
  }
  if (!disk.exists(sealedPath)) return undefined;
  const sealed = inspectLayer(sealedPath, disk);
  if (sealed.uuid !== sealedUuid) return undefined;
  if (headerUuid(disk, waiting.data) === freshUuid) {
    if (linkedTwice && waiting.data === fresh.data) disk.removeIfPresent(upper.data);
    placeFresh(disk, fresh, upper);
  } else if (
    headerUuid(disk, fresh.data) !== freshUuid &&
    // The fresh upper was sealed itself since: its own record comes next.
    !readRecords(disk, fresh).some((later) => later.sealedUuid === freshUuid && disk.exists(later.sealedPath))
  ) {
    if (linkedTwice) disk.removeIfPresent(upper.data);
    if (headerUuid(disk, fresh.data) !== undefined) return undefined;
    removeFresh(disk, fresh, upper);
    disk.removeIfPresent(fresh.data);
    // What has the name of its index belongs to the layer that is sealed.
    if (fresh.index !== undefined && fresh.index === upper.index) disk.removeIfPresent(fresh.index);
    createUpperFiles(disk, fresh, {
      virtualSizeBytes: sealed.virtualSizeBytes,
      parentUuid: sealedUuid,
      uuid: freshUuid,
    });
  }
  // The process may have died between a rename and its sync.
  disk.syncDirectoriesOf(sealedPath, upper.data, fresh.data);
  return { file: sealedPath, uuid: sealedUuid, size: fileSizeOf(disk, sealedPath) };
}

/**
 * Completes or drops restacks that were under way when the process before died. Returns the config to open
 * (the given one when there is nothing to do) and what was done.
 */
export function recoverRestack(disk: Disk, config: ImageConfig): { config: ImageConfig; warnings: string[] } {
  const warnings: string[] = [];
  let current = config;
  for (let round = 0; round < 256; round++) {
    const { upper } = current;
    if (upper === undefined) break;
    const records = readRecords(disk, upper);
    if (records.length === 0) break;
    const digest = lowersDigest(current.lowers);
    const next = records.find((record) => record.lowers === digest);
    if (next === undefined) {
      // The stored config is past some of these records: those have served.
      const files = new Set(current.lowers.map((lower) => lower.file));
      const open = records.filter((record) => !files.has(record.sealedPath));
      if (open.length < records.length) writeRecords(disk, upper, open);
      break;
    }
    const sealed = rollForward(disk, upper, next);
    if (sealed === undefined) {
      writeRecords(disk, upper, records.slice(0, records.indexOf(next)));
      break;
    }
    warnings.push(`an interrupted restack of ${upper.data} was completed: ${sealed.file} is a lower now`);
    current = { ...current, lowers: [...current.lowers, sealed], upper: next.fresh };
  }
  return { config: current, warnings };
}
