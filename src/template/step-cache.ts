import { mkdir, readdir, stat, utimes } from "node:fs/promises";
import { join } from "node:path";
import { z } from "zod";
import { errorCode, readJson, removeTree, writeDurable } from "../lib/durable.ts";
import type { Logger } from "../lib/log.ts";
import { type CapturedState, stateLayers } from "../sandbox/types.ts";

/*
 * States of build sandboxes after their steps:
 *
 *   <root>/<key>.<n>/            what the capture made
 *   <root>/<key>.<n>/entry.json  written last: the state is whole
 *
 * The key is a hash over the base and every step so far. A state is a running machine, memory included, as the
 * next step would have found it: processes that a step left behind and what lies in memory file systems are
 * there, too, so that a build from the cache is the same build.
 */

const Entry = z.object({
  version: z.literal(1),
  key: z.string(),
  bytes: z.int().min(0),
  state: z.custom<CapturedState>((value) => typeof value === "object" && value !== null && "rootfs" in value),
});

export interface StepCacheOptions {
  readonly root: string;
  /** Beyond it the entries unused for longest go. 0: nothing is kept. */
  readonly maxBytes: number;
  readonly log: Logger;
}

interface Known {
  readonly dir: string;
  readonly bytes: number;
  usedAt: number;
}

function filesOf(state: CapturedState): { readonly file: string; readonly size?: number }[] {
  return [{ file: state.deviceStatePath }, ...stateLayers(state)];
}

/** Chained key: the key before, and what is added. */
export function chainKey(parent: string, addition: unknown): string {
  return new Bun.CryptoHasher("sha256").update(JSON.stringify([parent, addition])).digest("hex");
}

export class StepCache {
  readonly #options: StepCacheOptions;
  readonly #known = new Map<string, Known>();
  #count = 0;

  constructor(options: StepCacheOptions) {
    this.#options = options;
  }

  get enabled(): boolean {
    return this.#options.maxBytes > 0;
  }

  /** Files that the entries need and do not hold themselves or share. */
  async files(): Promise<Set<string>> {
    const files = new Set<string>();
    for (const { dir } of this.#known.values()) {
      const entry = await this.#read(dir);
      for (const { file } of entry === undefined ? [] : filesOf(entry.state)) files.add(file);
    }
    return files;
  }

  async start(): Promise<void> {
    await mkdir(this.#options.root, { recursive: true, mode: 0o700 });
    for (const name of await readdir(this.#options.root)) {
      const dir = join(this.#options.root, name);
      const entry = this.enabled ? await this.#read(dir) : undefined;
      if (entry === undefined || this.#known.has(entry.key)) {
        await removeTree(dir);
        continue;
      }
      const { mtimeMs } = await stat(join(dir, "entry.json"));
      this.#known.set(entry.key, { dir, bytes: entry.bytes, usedAt: mtimeMs });
    }
  }

  async #read(dir: string): Promise<z.infer<typeof Entry> | undefined> {
    try {
      const parsed = Entry.safeParse(await readJson(join(dir, "entry.json")));
      return parsed.success ? parsed.data : undefined;
    } catch (error) {
      if (errorCode(error) === "ENOENT" || errorCode(error) === "ENOTDIR") return undefined;
      this.#options.log.warn({ err: error, dir }, "step cache entry not readable");
      return undefined;
    }
  }

  has(key: string): boolean {
    return this.#known.has(key);
  }

  /** The state, all of whose files are there; else undefined, and the entry is gone. */
  async find(key: string): Promise<CapturedState | undefined> {
    const known = this.#known.get(key);
    if (known === undefined) return undefined;
    const entry = await this.#read(known.dir);
    if (entry !== undefined && (await this.#isWhole(entry.state))) {
      known.usedAt = Date.now();
      const now = new Date();
      await utimes(join(known.dir, "entry.json"), now, now);
      return entry.state;
    }
    await this.drop(key);
    return undefined;
  }

  async #isWhole(state: CapturedState): Promise<boolean> {
    for (const { file, size } of filesOf(state)) {
      try {
        const found = await stat(file);
        if (size !== undefined && found.size !== size) return false;
      } catch (error) {
        if (errorCode(error) === "ENOENT") return false;
        throw error;
      }
    }
    return true;
  }

  async drop(key: string): Promise<void> {
    const known = this.#known.get(key);
    if (known === undefined) return;
    this.#known.delete(key);
    await removeTree(known.dir);
  }

  /** A directory to capture into; hand it to `complete` or remove it. */
  newDirectory(key: string): string {
    return join(this.#options.root, `${key}.${process.pid}-${this.#count++}`);
  }

  async complete(key: string, dir: string, state: CapturedState): Promise<void> {
    // What this capture added; the layers below it are links that an earlier one paid for.
    const disks = [state.rootfs, ...(state.drives ?? []).filter(({ readOnly }) => !readOnly)];
    const added = [
      state.deviceStatePath,
      state.memory.layers.at(-1)?.file,
      ...disks.map(({ lowers }) => lowers.at(-1)?.file),
    ];
    let bytes = 0;
    for (const file of added) bytes += file === undefined ? 0 : (await stat(file)).blocks * 512;
    await writeDurable(join(dir, "entry.json"), `${JSON.stringify({ version: 1, key, bytes, state })}\n`);
    const before = this.#known.get(key);
    this.#known.set(key, { dir, bytes, usedAt: Date.now() });
    if (before !== undefined) await removeTree(before.dir);
    await this.#evict(key);
  }

  async #evict(keep: string): Promise<void> {
    let total = [...this.#known.values()].reduce((sum, { bytes }) => sum + bytes, 0);
    const oldest = [...this.#known].sort(([, a], [, b]) => a.usedAt - b.usedAt);
    for (const [key, { bytes }] of oldest) {
      if (total <= this.#options.maxBytes) return;
      if (key === keep) continue;
      total -= bytes;
      await this.drop(key);
    }
  }
}
