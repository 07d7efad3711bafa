import { closeSync, openSync, readFileSync, readSync } from "node:fs";
import { AenvError } from "../../lib/errors.ts";
import type { MemoryRegion } from "../types.ts";

/**
 * Where Firecracker's process has the memory of a guest that it booted. Up to 3 GiB it is one anonymous mapping; more is
 * divided in two, which leave the addresses below 4 GiB to devices. Of two that touch the kernel makes one, the second
 * before the first (seen with 1.12). Which is the first is told by what Firecracker puts there before it starts the
 * guest: the start record of PVH at 0x6000, or Linux' boot parameters at 0x7000. So this is asked as soon as the guest
 * has been started, when its kernel, which the node chose, has hardly begun; nothing of the guest's users runs yet. One
 * that put the words elsewhere, too, would have the VM's start refused.
 */

/** Size of the first region where there are two: before 1.13, and since. */
const FIRST_BYTES = [3328 * 2 ** 20, 3 * 2 ** 30];
const PVH_AT = 0x6000;
const PVH_MAGIC = 0x336ec578;
const LINUX_AT = 0x7202;
const LINUX_MAGIC = 0x53726448;
const MAPPING = /^([0-9a-f]+)-([0-9a-f]+) rw.p 0+ 00:00 0 *(?:\[anon:.*\])?$/;

/** `begins` tells whether guest memory begins at an address. Undefined unless exactly one way of reading fits. */
export function guestRegions(
  maps: string,
  totalBytes: number,
  begins: (address: number) => boolean,
): readonly MemoryRegion[] | undefined {
  const found: { start: number; length: number }[] = [];
  for (const line of maps.split("\n")) {
    const match = MAPPING.exec(line);
    if (match === null) continue;
    const start = Number.parseInt(match[1]!, 16);
    found.push({ start, length: Number.parseInt(match[2]!, 16) - start });
  }
  const starts = (length: number) => found.filter((one) => one.length === length).map(({ start }) => start);
  const whole = starts(totalBytes);
  const ways: MemoryRegion[][] = whole.map((address) => [{ address, fileOffset: 0, length: totalBytes }]);
  for (const first of FIRST_BYTES.filter((bytes) => bytes < totalBytes)) {
    const second = totalBytes - first;
    const two = (at: number, other: number): MemoryRegion[] => [
      { address: at, fileOffset: 0, length: first },
      { address: other, fileOffset: first, length: second },
    ];
    for (const start of whole) ways.push(two(start + second, start));
    for (const start of starts(first)) for (const other of starts(second)) ways.push(two(start, other));
  }
  const fitting = ways.filter(([region]) => region !== undefined && begins(region.address));
  return fitting.length === 1 ? fitting[0] : undefined;
}

/** Error `memory_not_mapped` where it cannot be told. */
export function findGuestRegions(pid: number, memoryMiB: number): readonly MemoryRegion[] {
  const maps = readFileSync(`/proc/${pid}/maps`, "utf8");
  const memory = openSync(`/proc/${pid}/mem`, "r");
  try {
    const word = new Uint32Array(1);
    const holds = (address: number, magic: number) =>
      readSync(memory, word, 0, 4, address) === 4 && word[0] === magic;
    const begins = (address: number) =>
      holds(address + PVH_AT, PVH_MAGIC) || holds(address + LINUX_AT, LINUX_MAGIC);
    const regions = guestRegions(maps, memoryMiB * 2 ** 20, begins);
    if (regions !== undefined) return regions;
  } finally {
    closeSync(memory);
  }
  throw new AenvError({
    code: "memory_not_mapped",
    message: `it cannot be told where Firecracker has the ${memoryMiB} MiB of the guest's memory`,
    remediation: "use another release of Firecracker, or set vmm to qemu",
  });
}
