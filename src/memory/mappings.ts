import { readFileSync, realpathSync } from "node:fs";
import { AenvError } from "../lib/errors.ts";

/** A piece of the guest's memory in the VMM's address space; all numbers bytes. */
export interface MemoryMapping {
  readonly address: number;
  readonly fileOffset: number;
  readonly length: number;
}

const LINE = /^([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) \S+ \d+ +(\/.*)$/;

/**
 * Private mappings of `file` in the text of a /proc/PID/maps, by offset. A file that was removed since has
 * ` (deleted)` behind its name.
 */
export function parseMappings(maps: string, file: string): MemoryMapping[] {
  const found: MemoryMapping[] = [];
  for (const line of maps.split("\n")) {
    const match = LINE.exec(line);
    if (match === null) continue;
    // The kernel prints line feeds in names as \012.
    const path = match[5]!.replaceAll("\\012", "\n");
    if (match[3]![3] !== "p" || (path !== file && path !== `${file} (deleted)`)) continue;
    const address = Number.parseInt(match[1]!, 16);
    found.push({
      address,
      fileOffset: Number.parseInt(match[4]!, 16),
      length: Number.parseInt(match[2]!, 16) - address,
    });
  }
  return found.sort((a, b) => a.fileOffset - b.fileOffset);
}

const ANONYMOUS = /^([0-9a-f]+)-([0-9a-f]+) rw.p 0+ 00:00 0 *$/;

/**
 * The one anonymous mapping of exactly that size: guest memory that a VMM took for a first boot without a file.
 * Throws unless there is exactly one.
 */
export function parseAnonymous(maps: string, sizeBytes: number): MemoryMapping {
  const found: MemoryMapping[] = [];
  for (const line of maps.split("\n")) {
    const match = ANONYMOUS.exec(line);
    if (match === null) continue;
    const address = Number.parseInt(match[1]!, 16);
    const length = Number.parseInt(match[2]!, 16) - address;
    if (length === sizeBytes) found.push({ address, fileOffset: 0, length });
  }
  if (found.length !== 1) {
    throw new AenvError({
      code: "memory_not_mapped",
      message: `the VM has ${found.length} anonymous mappings of ${sizeBytes} bytes, its memory cannot be told`,
      remediation: "a VM of this size cannot be captured before its first resume: choose less than 3 GiB",
    });
  }
  return found[0]!;
}

/** Where a process maps its memory file. Throws unless the pieces cover exactly `sizeBytes`, each byte once. */
export function findMemory(
  pid: number,
  memoryFile: string,
  sizeBytes: number,
  anonymous = false,
): MemoryMapping[] {
  let maps: string;
  try {
    maps = readFileSync(`/proc/${pid}/maps`, "utf8");
  } catch (cause) {
    throw new AenvError({ code: "vm_gone", status: 409, message: `VM process ${pid} is gone`, cause });
  }
  if (anonymous) return [parseAnonymous(maps, sizeBytes)];
  let file = memoryFile;
  try {
    file = realpathSync(memoryFile);
  } catch {
    // Removed since it was mapped: the name it had is still in the list.
  }
  const mappings = parseMappings(maps, file);
  let next = 0;
  for (const mapping of mappings) {
    if (mapping.fileOffset !== next) break;
    next += mapping.length;
  }
  if (next !== sizeBytes || mappings.reduce((sum, mapping) => sum + mapping.length, 0) !== sizeBytes) {
    throw new AenvError({
      code: "memory_not_mapped",
      message: `process ${pid} does not map ${memoryFile} privately as ${sizeBytes} bytes of memory`,
    });
  }
  return mappings;
}
