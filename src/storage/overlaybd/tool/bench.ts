import { mkdtempSync, rmSync } from "node:fs";
import { join, resolve } from "node:path";
import { openStack } from "../stack.ts";
import type { ImageConfig, LayerStack } from "../types.ts";
import { type LayerCommand, UsageError } from "./command.ts";

const SECTOR_BYTES = 512;
const MIB = 1 << 20;
/** The clock is looked at after so many operations. */
const STRIDE = 16;

interface Figure {
  readonly what: string;
  readonly operations: number;
  readonly seconds: number;
  readonly operationsPerSecond: number;
  readonly mibPerSecond: number;
}

/** Runs `work(i)`, of `bytes` each, until the time is up. */
function measure(what: string, bytes: number, seconds: number, work: (i: number) => void): Figure {
  const started = performance.now();
  let operations = 0;
  let spent = 0;
  while (spent < seconds * 1000) {
    for (let n = 0; n < STRIDE; n++) work(operations++);
    spent = performance.now() - started;
  }
  const perSecond = operations / (spent / 1000);
  return {
    what,
    operations,
    seconds: spent / 1000,
    operationsPerSecond: perSecond,
    mibPerSecond: (perSecond * bytes) / MIB,
  };
}

/** Blocks of the disk in an order without a pattern, each about equally often. */
function scattered(blocks: number): () => number {
  let state = 0x2545f491;
  return () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return Math.floor(((state >>> 0) / 2 ** 32) * blocks);
  };
}

function readers(stack: LayerStack, blockBytes: number, seconds: number): Figure[] {
  const size = stack.virtualSizeBytes;
  const block = new Uint8Array(new ArrayBuffer(Math.min(blockBytes, size)));
  const chunk = new Uint8Array(new ArrayBuffer(Math.min(MIB, size)));
  const places = Math.max(1, Math.floor(size / block.byteLength));
  const chunks = Math.max(1, Math.floor(size / chunk.byteLength));
  const place = scattered(places);
  return [
    measure(`sequential read, ${chunk.byteLength} bytes`, chunk.byteLength, seconds, (i) =>
      stack.read((i % chunks) * chunk.byteLength, chunk),
    ),
    measure(`random read, ${block.byteLength} bytes`, block.byteLength, seconds, () =>
      stack.read(place() * block.byteLength, block),
    ),
  ];
}

function writers(image: ImageConfig, scratch: string, blockBytes: number, seconds: number): Figure[] {
  const directory = mkdtempSync(join(resolve(scratch), "aenv-bench-"));
  try {
    const upper = { data: join(directory, "upper.data"), index: join(directory, "upper.index") };
    using stack = openStack({ ...image, upper });
    const size = stack.virtualSizeBytes;
    const block = new Uint8Array(new ArrayBuffer(Math.min(blockBytes, size))).fill(1);
    const places = Math.max(1, Math.floor(size / block.byteLength));
    const place = scattered(places);
    const write = () => stack.write(place() * block.byteLength, block);
    return [
      measure(`random write, ${block.byteLength} bytes`, block.byteLength, seconds, write),
      measure(`random write with flush, ${block.byteLength} bytes`, block.byteLength, seconds, () => {
        write();
        stack.flush();
      }),
    ];
  } finally {
    rmSync(directory, { recursive: true, force: true });
  }
}

export const bench: LayerCommand = {
  name: "bench",
  files: "LAYER...",
  summary: "Measure reading from layers, bottom first, and writing into a fresh writable layer over them",
  details:
    "One request at a time, on this thread. What is read more than once comes from the page cache, and from the " +
    "cache of decompressed blocks. The layers are not changed.",
  count: [1, 255],
  flags: {
    block: { value: "SIZE", help: "of random requests, in whole sectors (default 4K)" },
    seconds: { value: "N", help: "for each figure (default 1)" },
    scratch: { value: "DIR", help: "measure writes, too: into an upper that is made there and removed" },
  },
  examples: ["bench base.lsmt change.lsmt", "bench layer.tar --block 64K --scratch /var/tmp"],
  run(invocation) {
    const blockBytes = invocation.bytes("block") ?? 4096;
    const seconds = Number(invocation.text("seconds") ?? 1);
    if (!(blockBytes > 0 && blockBytes <= 64 * MIB && blockBytes % SECTOR_BYTES === 0))
      throw new UsageError("--block: a multiple of 512 up to 64M");
    if (!(seconds > 0 && seconds <= 3600)) throw new UsageError("--seconds: a number above 0, at most 3600");
    const image: ImageConfig = { lowers: invocation.files.map((file) => ({ file })) };
    const started = performance.now();
    using stack = openStack(image);
    const openMs = performance.now() - started;
    const scratch = invocation.text("scratch");
    const figures = [
      ...readers(stack, blockBytes, seconds),
      ...(scratch === undefined ? [] : writers(image, scratch, blockBytes, seconds)),
    ];
    const { lowerCount, lowerMappings } = stack.stats();
    if (invocation.json) {
      invocation.output.json({ openMs, layers: lowerCount, mappings: lowerMappings, figures });
      return 0;
    }
    invocation.output.text(
      `opened ${lowerCount} layers, ${lowerMappings} mappings, in ${openMs.toFixed(1)} ms`,
    );
    for (const { what, operationsPerSecond, mibPerSecond } of figures) {
      invocation.output.text(
        `${what.padEnd(36)} ${operationsPerSecond.toFixed(0).padStart(9)} /s ${mibPerSecond.toFixed(1).padStart(9)} MiB/s`,
      );
    }
    return 0;
  },
};
