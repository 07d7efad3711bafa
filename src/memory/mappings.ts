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
  // Larger memory has two parts, of which the kernel makes one mapping whose order does not show.
  if (found.length !== 1 || sizeBytes > DIVISIONS[0]!) {
    throw new AenvError({
      code: "memory_not_mapped",
      message: `the VM has ${found.length} anonymous mappings of ${sizeBytes} bytes, its memory cannot be told`,
      remediation: "a VM of this size cannot be captured before its first resume: choose less than 3 GiB",
    });
  }
  return found[0]!;
}

interface AddressRange {
  readonly start: number;
  readonly end: number;
}

const WRITABLE_ANONYMOUS = /^([0-9a-f]+)-([0-9a-f]+) rw.p 0+ 00:00 0 *(?:\[anon:.*\])?$/;

/** Private anonymous memory, in the order of addresses; what touches is one range. */
function anonymousRanges(maps: string): AddressRange[] {
  const found: { start: number; end: number }[] = [];
  for (const line of maps.split("\n")) {
    const match = WRITABLE_ANONYMOUS.exec(line);
    if (match === null) continue;
    const start = Number.parseInt(match[1]!, 16);
    const end = Number.parseInt(match[2]!, 16);
    const last = found.at(-1);
    if (last?.end === start) last.end = end;
    else found.push({ start, end });
  }
  return found;
}

/**
 * Where Firecracker divides larger memories in two mappings, to leave addresses below 4 GiB to devices: since 1.13,
 * and before it (`MMIO32_MEM_START`).
 */
const DIVISIONS = [3 * 2 ** 30, 3328 * 2 ** 20];

/**
 * All of the guest's memory, in the order of its file. A VMM gives memory back (balloon, reported free pages) by
 * mapping anonymous memory over pieces of the file's mapping. What lies between two pieces of the file then belongs to
 * the guest where the addresses say so: they go on as the file's do. Undefined unless the pieces cover `sizeBytes`,
 * each byte once, and where it cannot be told which anonymous memory is the guest's.
 */
export function coverMemory(maps: string, file: string, sizeBytes: number): MemoryMapping[] | undefined {
  const anonymous = anonymousRanges(maps);
  /** The file's bytes from `from` up to `to`, in anonymous memory that lies `distance` above them. */
  const replaced = (from: number, to: number, distance: number): MemoryMapping[] | undefined => {
    if (from === to) return [];
    const piece = { address: from + distance, fileOffset: from, length: to - from };
    const isThere = anonymous.some(({ start, end }) => start <= piece.address && end >= to + distance);
    return isThere ? [piece] : undefined;
  };
  const gap = (from: number, to: number, below: number | undefined, above: number | undefined) => {
    if (from === to) return [];
    const inside = DIVISIONS.filter((border) => border >= from && border <= to);
    if (below !== undefined && above !== undefined && below !== above) {
      const ways = inside.flatMap((border) => {
        const [first, second] = [replaced(from, border, below), replaced(border, to, above)];
        return first === undefined || second === undefined ? [] : [[...first, ...second]];
      });
      return ways.length === 1 ? ways[0] : undefined;
    }
    // At an end of the memory it must not go past a border: what is behind that lies elsewhere.
    const isOneSided = below === undefined || above === undefined;
    if (isOneSided && inside.some((border) => border > from && border < to)) return undefined;
    return replaced(from, to, (below ?? above)!);
  };
  const covered: MemoryMapping[] = [];
  let next = 0;
  let below: number | undefined;
  for (const piece of parseMappings(maps, file)) {
    if (piece.fileOffset < next) return undefined;
    const above = piece.address - piece.fileOffset;
    const between = gap(next, piece.fileOffset, below, above);
    if (between === undefined) return undefined;
    covered.push(...between, piece);
    next = piece.fileOffset + piece.length;
    below = above;
  }
  if (below === undefined || next > sizeBytes) return undefined;
  const rest = gap(next, sizeBytes, below, undefined);
  return rest === undefined ? undefined : [...covered, ...rest];
}

/** Where a process has the memory of its guest. Throws unless the pieces cover exactly `sizeBytes`, each byte once. */
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
  const mappings = coverMemory(maps, file, sizeBytes);
  if (mappings !== undefined) return mappings;
  throw new AenvError({
    code: "memory_not_mapped",
    message: `process ${pid} does not map ${memoryFile} privately as ${sizeBytes} bytes of memory`,
  });
}
