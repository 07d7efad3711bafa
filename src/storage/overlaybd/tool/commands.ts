import { closeSync, createReadStream, existsSync, openSync } from "node:fs";
import { hostDisk, readBytes } from "../disk.ts";
import { badRequest } from "../errors.ts";
import { OutputFile } from "../layer-writer.ts";
import { isMarkedIndexHeader } from "../lsmt/epochs.ts";
import { type FlatIndex, ZEROED_TAG } from "../lsmt/flat-index.ts";
import { BLOCK_BYTES, hasLsmtMagic, SECTOR_BYTES } from "../lsmt/format.ts";
import { Upper } from "../lsmt/upper.ts";
import { commitUpper, mergeLayers } from "../merge.ts";
import { openLayer, openUnwrapped } from "../open-layer.ts";
import { openFileSource, readUpTo } from "../source.ts";
import { createUpper, openStack } from "../stack.ts";
import { encodeTarHead, findTarPayload, TAR_HEAD_BYTES, TarSource, tarTailBytes } from "../tar.ts";
import type { LayerRef, LayerStack, UpperMode } from "../types.ts";
import { decodeZFileBlock, ZFILE_BLOCK_BYTES, ZFLAG_OVERWRITTEN } from "../zfile/format.ts";
import { looksLikeZFile } from "../zfile/reader.ts";
import { IncompressibleBlock, ZFILE_SAFE_BLOCK_SIZE, ZFileWriter } from "../zfile/writer.ts";
import { bench } from "./bench.ts";
import { type Invocation, type LayerCommand, UsageError } from "./command.ts";
import {
  COMMIT_FLAGS,
  commitOptions,
  compressionOf,
  openNamed,
  openUpper,
  UPPER_FLAGS,
  upperRef,
} from "./refs.ts";

const COPY_BYTES = 1 << 20;
const UUID = /^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i;

const MODES: Readonly<Record<string, UpperMode>> = {
  log: "logStructured",
  logStructured: "logStructured",
  sparse: "sparse",
  hybrid: "hybridLogStructured",
  hybridLogStructured: "hybridLogStructured",
};

function printLayer(invocation: Invocation, what: string, ref: LayerRef): number {
  if (invocation.json) invocation.output.json(ref);
  else
    invocation.output.text(
      `${what} ${ref.file} (${ref.size} bytes${ref.uuid === undefined ? "" : `, uuid ${ref.uuid}`})`,
    );
  return 0;
}

const create: LayerCommand = {
  name: "create",
  files: "DATA",
  summary: "Make an empty writable layer",
  details: "A size of 0 is taken from the layers below when it is stacked.",
  count: [1, 1],
  flags: {
    ...UPPER_FLAGS,
    size: { value: "SIZE", help: "of the disk: bytes, or with K, M, G, T (default 64G)" },
    mode: { value: "MODE", help: "log (default), hybrid or sparse" },
  },
  examples: ["create upper.data --size 20G", "create upper.data --size 1G --mode sparse"],
  run(invocation) {
    const mode = MODES[invocation.text("mode") ?? "log"];
    if (mode === undefined) throw new UsageError("--mode: log, hybrid or sparse");
    const upper = upperRef(invocation.files[0]!, invocation.text("index"), mode);
    const size = invocation.bytes("size") ?? 64 * 2 ** 30;
    createUpper(upper, size);
    if (invocation.json) invocation.output.json({ ...upper, virtualSizeBytes: size });
    else invocation.output.text(`created ${upper.data}: ${size} bytes, ${mode}`);
    return 0;
  },
};

/** Bytes of a file or of standard input in pieces of any size. */
async function* bytesFrom(name: string): AsyncGenerator<Uint8Array> {
  if (name === "-") {
    for await (const chunk of Bun.stdin.stream()) yield chunk;
    return;
  }
  const fd = openSync(name, "r");
  closeSync(fd);
  for await (const chunk of createReadStream(name, { highWaterMark: COPY_BYTES })) yield chunk as Uint8Array;
}

/** Writes a stream of bytes at an offset, in whole sectors; returns how many. */
async function writeStream(
  stack: LayerStack,
  offsetBytes: number,
  source: AsyncIterable<Uint8Array>,
  pad: boolean,
): Promise<number> {
  const buffer = new Uint8Array(new ArrayBuffer(COPY_BYTES));
  let filled = 0;
  let position = offsetBytes;
  const flush = (bytes: number) => {
    stack.write(position, buffer.subarray(0, bytes));
    position += bytes;
    filled = 0;
  };
  for await (const chunk of source) {
    for (let at = 0; at < chunk.byteLength; ) {
      const part = Math.min(buffer.byteLength - filled, chunk.byteLength - at);
      buffer.set(chunk.subarray(at, at + part), filled);
      filled += part;
      at += part;
      if (filled === buffer.byteLength) flush(filled);
    }
  }
  const rest = filled % SECTOR_BYTES;
  if (rest !== 0 && !pad) {
    throw badRequest(
      "invalid_range",
      `the data ends ${rest} bytes into a sector of ${SECTOR_BYTES}`,
      "with --pad the sector is filled up with zeros",
    );
  }
  if (rest !== 0) buffer.fill(0, filled, filled + SECTOR_BYTES - rest);
  if (filled > 0) flush(filled + (rest === 0 ? 0 : SECTOR_BYTES - rest));
  return position - offsetBytes;
}

const write: LayerCommand = {
  name: "write",
  files: "DATA",
  summary: "Write bytes into a writable layer, or make a range of it read as zeros",
  details: "Offsets and lengths are in whole sectors of 512 bytes. The data is on stable storage at the end.",
  count: [1, 1],
  flags: {
    ...UPPER_FLAGS,
    offset: { value: "SIZE", help: "where to write (default 0)" },
    from: { value: "FILE", help: "what to write; - is standard input (default)" },
    pad: { help: "fill up the last sector with zeros" },
    zero: { value: "SIZE", help: "instead of writing: this many bytes read as zeros" },
    lower: { value: "LAYER", help: "a layer below, bottom first", repeat: true },
  },
  examples: ["write upper.data --offset 1M --from disk.part", "write upper.data --offset 0 --zero 64K"],
  async run(invocation) {
    const upper = upperRef(invocation.files[0]!, invocation.text("index"));
    const offset = invocation.bytes("offset") ?? 0;
    const zero = invocation.bytes("zero");
    if (zero !== undefined && invocation.text("from") !== undefined) {
      throw new UsageError("--zero and --from exclude each other");
    }
    using stack = openUpper({ lowers: invocation.list("lower").map((file) => ({ file })), upper });
    let written = zero ?? 0;
    if (zero !== undefined) stack.discard(offset, zero);
    else
      written = await writeStream(
        stack,
        offset,
        bytesFrom(invocation.text("from") ?? "-"),
        invocation.has("pad"),
      );
    stack.flush();
    if (invocation.json) invocation.output.json({ offsetBytes: offset, lengthBytes: written });
    else invocation.output.text(`${zero === undefined ? "wrote" : "zeroed"} ${written} bytes at ${offset}`);
    return 0;
  },
};

const commit: LayerCommand = {
  name: "commit",
  files: "DATA TARGET",
  summary: "Make a compact read-only layer of what a writable layer holds",
  count: [2, 2],
  flags: { ...UPPER_FLAGS, ...COMMIT_FLAGS },
  examples: ["commit upper.data layer.lsmt", "commit upper.data layer.tar --compress lz4 --tar"],
  run(invocation) {
    const [data, target] = invocation.files;
    const ref = commitUpper(upperRef(data!, invocation.text("index")), target!, commitOptions(invocation));
    return printLayer(invocation, "committed", ref);
  },
};

const apply: LayerCommand = {
  name: "apply",
  files: "DATA TAR",
  summary: "Unpack the tar of an OCI layer into the ext4 file system of a writable layer",
  details:
    "TAR may be compressed with gzip or zstd. Whiteouts delete what the layers below have. The layers below are named " +
    "with --lower; the first layer of an image gets its file system with --mkfs. Everything is on stable storage at " +
    "the end; a failure leaves the writable layer with a part of it.",
  count: [2, 2],
  flags: {
    ...UPPER_FLAGS,
    lower: { value: "LAYER", help: "a layer below, bottom first", repeat: true },
    mkfs: { help: "make the file system first" },
    "fs-uuid": { value: "UUID", help: "uuid of the file system that --mkfs makes (default: random)" },
  },
  examples: [
    "apply upper.data layer.tar.gz --mkfs",
    "apply upper.data layer2.tar --lower base.lsmt && agentenv layer commit upper.data layer2.lsmt",
  ],
  async run(invocation) {
    const { applyLayer } = invocation.helpers;
    if (applyLayer === undefined) throw new UsageError("apply is not part of this program");
    const [data, tar] = invocation.files;
    const mkfs = invocation.has("mkfs");
    const fsUuid = invocation.text("fs-uuid");
    if (fsUuid !== undefined && !mkfs) throw new UsageError("--fs-uuid goes with --mkfs");
    if (fsUuid !== undefined && !UUID.test(fsUuid)) throw new UsageError(`--fs-uuid: ${fsUuid} is no UUID`);
    const upper = upperRef(data!, invocation.text("index"));
    const image = { lowers: invocation.list("lower").map((file) => ({ file })), upper };
    // Says what is wrong with the layers before anything is begun.
    openUpper(image)[Symbol.dispose]();
    if (!existsSync(tar!)) throw new UsageError(`there is no file ${tar}`);
    const outcome = await applyLayer({
      image,
      tar: tar!,
      ...(mkfs ? { formatUuid: fsUuid ?? crypto.randomUUID() } : {}),
    });
    if (invocation.json) invocation.output.json(outcome);
    else {
      invocation.output.text(
        `applied ${outcome.entries} entries, ${outcome.dataBytes} bytes of file content`,
      );
      if (outcome.skippedXattrs > 0) {
        invocation.output.text(`${outcome.skippedXattrs} extended attributes have no place in ext4`);
      }
    }
    return 0;
  },
};

const seal: LayerCommand = {
  name: "seal",
  files: "DATA TARGET",
  summary: "Turn a writable layer into a read-only one in place",
  details:
    "The data file gets its index and is renamed to TARGET on the same file system; nothing is copied.",
  count: [2, 2],
  flags: { ...UPPER_FLAGS },
  examples: ["seal upper.data layer.sealed"],
  run(invocation) {
    const [data, target] = invocation.files;
    using stack = openUpper({ lowers: [], upper: upperRef(data!, invocation.text("index")) });
    return printLayer(invocation, "sealed", stack.seal(target!));
  },
};

const merge: LayerCommand = {
  name: "merge",
  files: "LAYER...",
  summary: "Flatten layers, bottom first, into one with the same content",
  count: [1, 255],
  flags: { into: { value: "FILE", help: "the layer to make" }, ...COMMIT_FLAGS },
  examples: ["merge base.lsmt change.lsmt --into all.lsmt"],
  run(invocation) {
    const target = invocation.text("into");
    if (target === undefined) throw new UsageError("--into says where the layer goes");
    const layers = invocation.files.map((file) => ({ file }));
    return printLayer(invocation, "merged into", mergeLayers(layers, target, commitOptions(invocation)));
  },
};

interface MappingLine {
  readonly offset: number;
  readonly length: number;
  readonly moffset: number;
  readonly zeroed: boolean;
}

function linesOf(index: FlatIndex): MappingLine[] {
  return Array.from({ length: index.count }, (_, i) => ({
    offset: index.offsets[i]!,
    length: index.lengths[i]!,
    moffset: index.moffsets[i]!,
    zeroed: index.tags[i]! >= ZEROED_TAG,
  }));
}

function totals(lines: readonly MappingLine[]): { dataBytes: number; zeroedBytes: number } {
  let dataBytes = 0;
  let zeroedBytes = 0;
  for (const { length, zeroed } of lines) {
    if (zeroed) zeroedBytes += length * SECTOR_BYTES;
    else dataBytes += length * SECTOR_BYTES;
  }
  return { dataBytes, zeroedBytes };
}

function zfileFields(file: string): Record<string, unknown> | undefined {
  const outer = openFileSource(hostDisk, file);
  using _ = outer;
  const payload = findTarPayload(outer);
  const source = payload === undefined ? outer : new TarSource(outer, payload);
  if (!looksLikeZFile(source)) return undefined;
  const header = decodeZFileBlock(readUpTo(source, 0, ZFILE_BLOCK_BYTES), file, 0, true);
  const headerIsFinal = (header.flags & ZFLAG_OVERWRITTEN) !== 0;
  const at = source.sizeBytes - ZFILE_BLOCK_BYTES;
  const fields = headerIsFinal
    ? header
    : decodeZFileBlock(readUpTo(source, at, ZFILE_BLOCK_BYTES), file, at, false);
  return {
    algorithm: fields.algorithm === 1 ? "lz4" : "zstd",
    blockSizeBytes: fields.blockSizeBytes,
    blocks: fields.indexSize,
    originalSizeBytes: fields.originalSizeBytes,
    checksums: fields.verify,
    headerIsFinal,
  };
}

/** A data file that is being written has its header, but no trailer. */
function isUpper(file: string): boolean {
  const opened = openFileSource(hostDisk, file);
  try {
    const size = opened.sizeBytes;
    const header = readUpTo(opened, 0, BLOCK_BYTES);
    if (!hasLsmtMagic(header) || (header[28]! & 4) !== 0) return false;
    return size < 2 * BLOCK_BYTES || !hasLsmtMagic(readUpTo(opened, size - BLOCK_BYTES, BLOCK_BYTES));
  } finally {
    opened[Symbol.dispose]();
  }
}

interface Report {
  readonly file: string;
  readonly fields: Record<string, unknown>;
  readonly mappings: readonly MappingLine[];
}

function inspectUpper(file: string, indexFile: string | undefined): Report {
  const header = hostDisk.open(file, "read");
  const sparse = (readBytes(header, 28, 1)[0]! & 0x10) !== 0;
  header.close();
  const ref = upperRef(file, indexFile, sparse ? "sparse" : undefined);
  using upper = new Upper(hostDisk, ref, { readOnly: true });
  const mappings: MappingLine[] = [];
  for (let at: number | undefined = 0; at !== undefined; ) {
    at = upper.index.scan(at, 4096, (offset, length, moffset, zeroed) =>
      mappings.push({ offset, length, moffset, zeroed }),
    );
  }
  let epochs: boolean | undefined;
  if (ref.index !== undefined) {
    const index = hostDisk.open(ref.index, "read");
    epochs = isMarkedIndexHeader(readBytes(index, 0, BLOCK_BYTES));
    index.close();
  }
  return {
    file,
    fields: {
      kind: "writable layer",
      mode: upper.mode,
      virtualSizeBytes: upper.virtualSizeBytes,
      uuid: upper.uuid,
      parentUuid: upper.parentUuid,
      mappings: mappings.length,
      ...totals(mappings),
      dataFileBytes: upper.fileSizeBytes(),
      indexFileBytes: upper.indexBytes,
      flushEpochs: epochs,
      warnings: upper.warnings,
    },
    mappings,
  };
}

function inspectFinished(file: string): Report {
  using layer = openLayer(hostDisk, file, 0);
  const { header, trailer } = layer.blocks;
  const mappings = linesOf(layer.index);
  const tag = trailer.userTag ?? new Uint8Array(0);
  return {
    file,
    fields: {
      kind: "layer",
      container: layer.container,
      virtualSizeBytes: trailer.virtualSizeBytes,
      uuid: trailer.uuid ?? header.uuid,
      parentUuid: trailer.parentUuid ?? header.parentUuid,
      userTag: tag.byteLength === 0 ? undefined : Buffer.from(tag).toString("utf8"),
      headerFlags: header.flags,
      trailerFlags: trailer.flags,
      indexOffsetBytes: trailer.indexOffsetBytes,
      indexSize: trailer.indexSize,
      mappings: mappings.length,
      ...totals(mappings),
      layerBytes: layer.source.sizeBytes,
      zfile: layer.container.includes("zfile") ? zfileFields(file) : undefined,
    },
    mappings,
  };
}

function showFields(fields: Record<string, unknown>, indent = "  "): string[] {
  return Object.entries(fields).flatMap(([name, value]) => {
    if (value === undefined || (Array.isArray(value) && value.length === 0)) return [];
    if (typeof value === "object" && value !== null && !Array.isArray(value)) {
      return [`${indent}${name}:`, ...showFields(value as Record<string, unknown>, `${indent}  `)];
    }
    const shown = Array.isArray(value) ? value.join(" > ") : String(value);
    const hex = name.endsWith("Flags") && typeof value === "number" ? `0x${value.toString(16)}` : shown;
    return [`${indent}${name.padEnd(18)} ${hex}`];
  });
}

const inspect: LayerCommand = {
  name: "inspect",
  files: "FILE...",
  summary: "Say what a layer is: form, sizes, identity, mappings",
  count: [1, 255],
  flags: { ...UPPER_FLAGS, mappings: { help: "list every mapping (in sectors)" } },
  examples: ["inspect layer.tar", "inspect upper.data --mappings --json"],
  run(invocation) {
    const reports = invocation.files.map((file) =>
      isUpper(file) ? inspectUpper(file, invocation.text("index")) : inspectFinished(file),
    );
    if (invocation.json) {
      invocation.output.json(
        reports.map(({ file, fields, mappings }) => ({
          file,
          ...fields,
          ...(invocation.has("mappings") ? { index: mappings } : {}),
        })),
      );
      return 0;
    }
    for (const { file, fields, mappings } of reports) {
      invocation.output.text(`${file}:`);
      for (const line of showFields(fields)) invocation.output.text(line);
      if (!invocation.has("mappings")) continue;
      for (const { offset, length, moffset, zeroed } of mappings) {
        invocation.output.text(`  ${offset}+${length} ${zeroed ? "zeros" : `at ${moffset}`}`);
      }
    }
    return 0;
  },
};

/** Reads all of a layer: every block of a ZFile, every mapped sector. Returns the digest of the file. */
function verifyFile(file: string): { digest: string; dataBytes: number; container: readonly string[] } {
  const buffer = new Uint8Array(new ArrayBuffer(COPY_BYTES));
  const hash = new Bun.CryptoHasher("sha256");
  using raw = openFileSource(hostDisk, file);
  for (let at = 0; at < raw.sizeBytes; at += COPY_BYTES) {
    const length = Math.min(COPY_BYTES, raw.sizeBytes - at);
    raw.read(at, buffer, 0, length);
    hash.update(buffer.subarray(0, length));
  }
  using layer = openLayer(hostDisk, file, 0);
  const { source, container } = layer;
  for (let at = 0; at < source.sizeBytes; at += COPY_BYTES) {
    source.read(at, buffer, 0, Math.min(COPY_BYTES, source.sizeBytes - at));
  }
  return { digest: `sha256:${hash.digest("hex")}`, container, ...totals(linesOf(layer.index)) };
}

const verify: LayerCommand = {
  name: "verify",
  files: "FILE...",
  summary: "Read layers whole and check everything that can be checked",
  details: "Exit code 1 when one is not valid; the message says where in the file and why.",
  count: [1, 255],
  flags: {
    digest: { value: "DIGEST", help: "what the file's digest must be (sha256:...), for a single file" },
  },
  examples: ["verify layer.tar", "verify layer.tar --digest sha256:015c93872f35..."],
  run(invocation) {
    const wanted = invocation.text("digest");
    if (wanted !== undefined && invocation.files.length > 1)
      throw new UsageError("--digest goes with one file");
    const results = invocation.files.map((file) => {
      try {
        const { digest, container, dataBytes } = verifyFile(file);
        if (wanted !== undefined && digest !== wanted) {
          return { file, valid: false, digest, reason: `${file}: digest is ${digest}, not ${wanted}` };
        }
        return { file, valid: true, digest, container, dataBytes };
      } catch (error) {
        return { file, valid: false, reason: error instanceof Error ? error.message : String(error) };
      }
    });
    if (invocation.json) invocation.output.json(results);
    else {
      for (const result of results) {
        invocation.output.text(
          result.valid ? `${result.file}: ok, ${result.digest}` : `NOT VALID: ${result.reason}`,
        );
      }
    }
    return results.every((result) => result.valid) ? 0 : 1;
  },
};

/** Wraps the unwrapped bytes of a layer anew. */
function rewrap(
  source: string,
  target: string,
  options: {
    readonly compression: ReturnType<typeof compressionOf>;
    readonly tar: boolean;
    readonly checksums: boolean;
    readonly finalHeader: boolean;
  },
): number {
  const opened = openUnwrapped(hostDisk, source);
  using inner = opened.source;
  using output = new OutputFile(hostDisk, target);
  const payloadAt = options.tar ? TAR_HEAD_BYTES : 0;
  if (options.tar) output.append(encodeTarHead(0), 0, TAR_HEAD_BYTES);
  using zfile =
    options.compression === undefined
      ? undefined
      : new ZFileWriter(output, { ...options.compression, verify: options.checksums });
  const sink = zfile ?? output;
  const buffer = new Uint8Array(new ArrayBuffer(COPY_BYTES));
  for (let at = 0; at < inner.sizeBytes; at += COPY_BYTES) {
    const length = Math.min(COPY_BYTES, inner.sizeBytes - at);
    inner.read(at, buffer, 0, length);
    sink.append(buffer, 0, length);
  }
  zfile?.finish(options.finalHeader ? (header) => output.rewrite(payloadAt, header) : undefined);
  if (options.tar) {
    const payloadBytes = output.position - payloadAt;
    const tail = new Uint8Array(tarTailBytes(payloadBytes));
    output.append(tail, 0, tail.byteLength);
    output.rewrite(0, encodeTarHead(payloadBytes));
  }
  return output.publish();
}

const convert: LayerCommand = {
  name: "convert",
  files: "SOURCE TARGET",
  summary: "Change how a layer is wrapped: compression, block size, tar",
  details: "The layer inside stays the same to the byte; use merge to make it compact.",
  count: [2, 2],
  flags: {
    to: { value: "FORM", help: "lsmt (not compressed), lz4 or zstd" },
    "block-size": { value: "SIZE", help: "of compressed blocks: 4K (default), 8K, 16K, 32K or 64K" },
    tar: { help: "wrap it in tar, as registries hold it" },
    "no-checksums": { help: "compressed blocks without checksums" },
    "header-at-end": { help: "leave the ZFile header as a streaming writer does: readers use the trailer" },
  },
  examples: ["convert layer.lsmt layer.tar --to lz4 --tar", "convert layer.tar layer.lsmt --to lsmt"],
  run(invocation) {
    const [source, target] = invocation.files;
    const form = invocation.text("to");
    if (form === undefined) throw new UsageError("--to says into what: lsmt, lz4 or zstd");
    const options = {
      compression: compressionOf(form === "lsmt" ? undefined : form, invocation.bytes("block-size")),
      tar: invocation.has("tar"),
      checksums: !invocation.has("no-checksums"),
      finalHeader: !invocation.has("header-at-end"),
    };
    let size: number;
    try {
      size = rewrap(source!, target!, options);
    } catch (error) {
      if (!(error instanceof IncompressibleBlock) || options.compression === undefined) throw error;
      const compression = { ...options.compression, blockSizeBytes: ZFILE_SAFE_BLOCK_SIZE };
      size = rewrap(source!, target!, { ...options, compression });
    }
    return printLayer(invocation, "converted into", { file: target!, size });
  },
};

/** Ranges in which two disks differ, ascending and joined. Only what either maps is read. */
function* differences(a: LayerStack, b: LayerStack): Generator<{ offsetBytes: number; lengthBytes: number }> {
  const size = Math.min(a.virtualSizeBytes, b.virtualSizeBytes);
  const extents = [...a.mappedExtents("all"), ...b.mappedExtents("all")].sort(
    (x, y) => x.offsetBytes - y.offsetBytes,
  );
  const [left, right] = [new Uint8Array(COPY_BYTES), new Uint8Array(COPY_BYTES)];
  let pending: { offsetBytes: number; lengthBytes: number } | undefined;
  let done = 0;
  for (const extent of extents) {
    const end = Math.min(size, extent.offsetBytes + extent.lengthBytes);
    for (let at = Math.max(done, extent.offsetBytes); at < end; ) {
      const length = Math.min(COPY_BYTES, end - at);
      a.read(at, left.subarray(0, length));
      b.read(at, right.subarray(0, length));
      for (let sector = 0; sector < length; sector += SECTOR_BYTES) {
        const to = sector + SECTOR_BYTES;
        if (Buffer.compare(left.subarray(sector, to), right.subarray(sector, to)) === 0) continue;
        if (pending !== undefined && pending.offsetBytes + pending.lengthBytes === at + sector) {
          pending.lengthBytes += SECTOR_BYTES;
        } else {
          if (pending !== undefined) yield pending;
          pending = { offsetBytes: at + sector, lengthBytes: SECTOR_BYTES };
        }
      }
      at += length;
    }
    done = Math.max(done, end);
  }
  if (pending !== undefined) yield pending;
}

const diff: LayerCommand = {
  name: "diff",
  files: "A B",
  summary: "Compare what two layers, or stacks of layers, read",
  details:
    "A stack is its layers, bottom first, divided by commas. Exit code 1 when they differ. What tells data of zeros from nothing at all makes no difference.",
  count: [2, 2],
  flags: {},
  examples: ["diff layer.lsmt layer.tar", "diff base.lsmt,change.lsmt merged.lsmt"],
  run(invocation) {
    const [a, b] = invocation.files;
    using left = openNamed(a!);
    using right = openNamed(b!);
    const sizes = [left.virtualSizeBytes, right.virtualSizeBytes];
    const ranges = [...differences(left, right)];
    const equal = ranges.length === 0 && sizes[0] === sizes[1];
    if (invocation.json) invocation.output.json({ equal, virtualSizeBytes: sizes, differences: ranges });
    else {
      if (sizes[0] !== sizes[1]) invocation.output.text(`sizes differ: ${sizes[0]} and ${sizes[1]} bytes`);
      for (const range of ranges) invocation.output.text(`${range.offsetBytes}+${range.lengthBytes} differ`);
      if (equal) invocation.output.text("the same");
    }
    return equal ? 0 : 1;
  },
};

const cat: LayerCommand = {
  name: "cat",
  files: "LAYER...",
  summary: "Write the content of layers, bottom first, to standard output",
  count: [1, 255],
  flags: {
    offset: { value: "SIZE", help: "where to begin (default 0)" },
    length: { value: "SIZE", help: "how much (default: to the end of the disk)" },
  },
  examples: ["cat base.lsmt change.lsmt --offset 1M --length 4K | xxd", "cat layer.tar > disk.img"],
  async run(invocation) {
    if (invocation.json) throw new UsageError("cat writes bytes, not JSON");
    using stack = openStack({ lowers: invocation.files.map((file) => ({ file })) });
    const start = invocation.bytes("offset") ?? 0;
    const end = start + (invocation.bytes("length") ?? Math.max(0, stack.virtualSizeBytes - start));
    if (end > stack.virtualSizeBytes) {
      throw badRequest(
        "out_of_range",
        `range ${start}+${end - start} ends behind the disk of ${stack.virtualSizeBytes} bytes`,
      );
    }
    const buffer = new Uint8Array(new ArrayBuffer(COPY_BYTES + 2 * SECTOR_BYTES));
    for (let at = start; at < end; ) {
      // The stack reads whole sectors, people ask for any range.
      const from = at - (at % SECTOR_BYTES);
      const to = Math.min(end, at + COPY_BYTES);
      const until = Math.ceil(to / SECTOR_BYTES) * SECTOR_BYTES;
      stack.read(from, buffer.subarray(0, until - from));
      await invocation.output.bytes(buffer.subarray(at - from, to - from));
      at = to;
    }
    return 0;
  },
};

export const LAYER_COMMANDS: readonly LayerCommand[] = [
  create,
  write,
  commit,
  seal,
  apply,
  merge,
  inspect,
  verify,
  convert,
  diff,
  cat,
  bench,
];
