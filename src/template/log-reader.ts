import { type FileHandle, open } from "node:fs/promises";
import { errorCode } from "../lib/durable.ts";
import { pacer } from "../lib/turn.ts";
import type { BuildLogEntry, BuildLogQuery, BuildLogs } from "./types.ts";

/** From the least to the most. */
const LEVELS = ["debug", "info", "warn", "error"] as const satisfies readonly BuildLogEntry["level"][];

/** A block ends with the line with which it has as many lines or bytes. */
const BLOCK_LINES = 64;
const BLOCK_BYTES = 64 << 10;
const PIECE_BYTES = 1 << 20;
/** Logs whose blocks are known; of the longest these take 50 KB. */
const MAX_INDEXES = 64;

/** Whole lines of a log file, and what is in them. */
interface Block {
  readonly start: number;
  end: number;
  lines: number;
  firstMs: number;
  lastMs: number;
  /** Of at least each level. */
  readonly counts: number[];
}

interface Index {
  readonly size: number;
  readonly blocks: Promise<readonly Block[]>;
}

/**
 * Reads logs of ended builds page by page. The first look at a log reads it once and keeps where what lies; from then
 * on what is read is what is asked for, and at most a block around each entry of it.
 */
export class LogReader {
  /** By path, the one used last at the end. */
  readonly #indexes = new Map<string, Index>();

  /** No file: no entries. Lines that are no entries (one that a crash cut off) are left out. */
  async select(path: string, query: BuildLogQuery): Promise<BuildLogEntry[]> {
    let opened: FileHandle;
    try {
      opened = await open(path, "r");
    } catch (error) {
      if (errorCode(error) !== "ENOENT") throw error;
      this.forget(path);
      return [];
    }
    await using file = opened;
    const blocks = await this.#blocks(path, file);
    const found: BuildLogEntry[] = [];
    let skip = query.offset ?? 0;
    const wanted = matcher(query);
    for (const block of query.backward ? blocks.toReversed() : blocks) {
      if (found.length >= query.limit) break;
      const { cursorMs } = query;
      if (cursorMs !== undefined && (query.backward ? block.firstMs > cursorMs : block.lastMs < cursorMs))
        continue;
      const count = block.counts[levelOf(query)]!;
      if (count === 0) continue;
      if (cursorMs === undefined && skip >= count) {
        skip -= count;
        continue;
      }
      const entries = (await readBlock(file, block)).filter(wanted);
      if (query.backward) entries.reverse();
      found.push(...entries.slice(skip));
      skip = Math.max(0, skip - entries.length);
    }
    return found.slice(0, query.limit);
  }

  forget(path: string): void {
    this.#indexes.delete(path);
  }

  async #blocks(path: string, file: FileHandle): Promise<readonly Block[]> {
    const { size } = await file.stat();
    let index = this.#indexes.get(path);
    if (index?.size !== size) index = { size, blocks: scan(file, size) };
    this.#indexes.delete(path);
    this.#indexes.set(path, index);
    if (this.#indexes.size > MAX_INDEXES) this.#indexes.delete(this.#indexes.keys().next().value!);
    try {
      return await index.blocks;
    } catch (error) {
      if (this.#indexes.get(path) === index) this.#indexes.delete(path);
      throw error;
    }
  }
}

/** The same of entries in memory. */
export function logOf(entries: () => readonly BuildLogEntry[]): BuildLogs {
  return {
    select: async (query) => {
      const { offset = 0, limit } = query;
      const plain = query.cursorMs === undefined && levelOf(query) === 0;
      const all = entries();
      if (plain && !query.backward) return all.slice(offset, offset + limit);
      const found = plain ? [...all] : all.filter(matcher(query));
      if (query.backward) found.reverse();
      return found.slice(offset, offset + limit);
    },
  };
}

function levelOf({ level }: BuildLogQuery): number {
  return level === undefined ? 0 : LEVELS.indexOf(level);
}

function matcher(query: BuildLogQuery): (entry: BuildLogEntry) => boolean {
  const least = levelOf(query);
  const { cursorMs, backward } = query;
  return ({ level, timestamp }) => {
    if (LEVELS.indexOf(level) < least) return false;
    if (cursorMs === undefined) return true;
    const at = Date.parse(timestamp);
    return backward ? at <= cursorMs : at >= cursorMs;
  };
}

function parse(line: string): BuildLogEntry | undefined {
  try {
    const entry = JSON.parse(line) as BuildLogEntry | null;
    return typeof entry?.timestamp === "string" ? entry : undefined;
  } catch (error) {
    if (error instanceof SyntaxError) return undefined;
    throw error;
  }
}

async function readBlock(file: FileHandle, { start, end }: Block): Promise<BuildLogEntry[]> {
  const bytes = Buffer.alloc(end - start);
  const { bytesRead } = await file.read(bytes, 0, bytes.length, start);
  const lines = bytes.toString("utf8", 0, bytesRead).split("\n");
  return lines.map(parse).filter((entry) => entry !== undefined);
}

/** Reads piece by piece, and gives way to other work in between. What follows the last line's end is no line. */
async function scan(file: FileHandle, size: number): Promise<readonly Block[]> {
  const blocks: Block[] = [];
  const breathe = pacer();
  const piece = Buffer.alloc(Math.min(PIECE_BYTES, size));
  let rest = Buffer.alloc(0);
  let block: Block | undefined;
  for (let at = 0; at < size; ) {
    const { bytesRead } = await file.read(piece, 0, piece.length, at);
    if (bytesRead === 0) break;
    const bytes = Buffer.concat([rest, piece.subarray(0, bytesRead)]);
    const base = at - rest.length;
    let from = 0;
    for (let end = bytes.indexOf(10); end >= 0; end = bytes.indexOf(10, from)) {
      const entry = parse(bytes.toString("utf8", from, end));
      block ??= {
        start: base + from,
        end: 0,
        lines: 0,
        firstMs: Infinity,
        lastMs: -Infinity,
        counts: [0, 0, 0, 0],
      };
      from = end + 1;
      block.end = base + from;
      block.lines += 1;
      if (entry !== undefined) {
        const ms = Date.parse(entry.timestamp);
        block.firstMs = Math.min(block.firstMs, ms);
        block.lastMs = Math.max(block.lastMs, ms);
        for (let level = LEVELS.indexOf(entry.level); level >= 0; level--) block.counts[level]! += 1;
      }
      if (block.lines >= BLOCK_LINES || block.end - block.start >= BLOCK_BYTES) {
        blocks.push(block);
        block = undefined;
      }
      const pause = breathe();
      if (pause !== undefined) await pause;
    }
    rest = Buffer.from(bytes.subarray(from));
    at += bytesRead;
  }
  if (block !== undefined) blocks.push(block);
  return blocks;
}
