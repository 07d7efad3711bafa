import { AenvError } from "../../../lib/errors.ts";
import { commitUpper, createLayerWriter, openStack, planMerge, startMerge } from "../index.ts";
import type {
  CompactProgress,
  ImageConfig,
  LayerRef,
  LayerStack,
  MergeJob,
  PendingFlush,
  UpperMode,
  UpperRef,
} from "../types.ts";
import { Crashed, type Random, SimDisk } from "./sim-disk.ts";

/**
 * One random life of a disk: writes, discards, flushes, snapshots, seals, commits, merges, compaction, growing and
 * reopening, with crashes at random changes of the disk, each followed by recovery, and with calls that fail during
 * compaction. A plain array says what may be read:
 *
 * - after a killed process: every acknowledged write, and old or new content where a call was under way;
 * - after power loss: for each sector what it had at the last acknowledged flush, or anything written to it since.
 */
const SECTOR = 512;
const DIRECTORY = "/sim";
const TUNING = { segmentSectors: 32, indexSlack: 6 };

export interface LifeResult {
  kills: number;
  powerLosses: number;
  /** States after power loss that were opened and compared (several per loss). */
  images: number;
  /** Calls that failed during compaction. */
  failures: number;
  /** How often compaction had something to do. */
  indexRewrites: number;
  movedBytes: number;
  operations: number;
}

export class SimulationFailure extends Error {}

/** Values that a sector may have; the model is one number per sector, 0 for zeros. */
class Model {
  current: Int32Array;
  /** By sector: what else it may read after power loss, beside the current value. */
  stale = new Map<number, Set<number>>();
  next = 1;

  constructor(sectors: number) {
    this.current = new Int32Array(sectors);
  }

  get sectors(): number {
    return this.current.length;
  }

  #forget(sector: number): void {
    let values = this.stale.get(sector);
    if (values === undefined) {
      values = new Set();
      this.stale.set(sector, values);
    }
    values.add(this.current[sector]!);
  }

  set(sector: number, value: number): void {
    this.#forget(sector);
    this.current[sector] = value;
  }

  /** A call that may or may not happen: both values stay possible. */
  maybe(sector: number, value: number): void {
    this.#forget(sector);
    this.stale.get(sector)?.add(value);
  }

  flushed(): void {
    this.stale.clear();
  }

  grow(sectors: number): void {
    const grown = new Int32Array(sectors);
    grown.set(this.current);
    this.current = grown;
  }
}

function fill(values: readonly number[]): Uint8Array {
  const words = new Int32Array((values.length * SECTOR) / 4);
  for (const [i, value] of values.entries()) words.fill(value, (i * SECTOR) / 4, ((i + 1) * SECTOR) / 4);
  return new Uint8Array(words.buffer);
}

class Life {
  readonly result: LifeResult = {
    kills: 0,
    powerLosses: 0,
    images: 0,
    failures: 0,
    indexRewrites: 0,
    movedBytes: 0,
    operations: 0,
  };
  readonly #random: Random;
  readonly #mode: UpperMode;
  readonly #log: string[] = [];
  #disk: SimDisk;
  #model: Model;
  #stack: LayerStack | undefined;
  /** What the owner has stored; opened after a crash. */
  #stored: ImageConfig;
  /** The store under way: either may be found. */
  #storing: ImageConfig | undefined;
  #imageLowers: number;
  #files = 0;
  #flush: { pending: PendingFlush; stage: number; stale: Map<number, Set<number>> } | undefined;
  #merge: { job: MergeJob; first: number; count: number } | undefined;
  /** Sectors of a call that was not acknowledged. */
  #inFlight: { sector: number; values: readonly number[] } | undefined;

  constructor(random: Random) {
    this.#random = random;
    // Some have no links, or a record in one but not two.
    this.#disk = new SimDisk(random, 1, [0, 700, 4000, 4000][random(4)]!);
    const modes: readonly UpperMode[] = ["logStructured", "logStructured", "hybridLogStructured", "sparse"];
    this.#mode = modes[random(modes.length)]!;
    this.#model = new Model(random(3) === 0 ? 16 + random(16) : 16 + random(112));
    const lowers: LayerRef[] = [];
    for (let n = random(3); n > 0; n--) lowers.push(this.#makeLower());
    this.#model.flushed();
    this.#imageLowers = lowers.length;
    this.#stored = {
      lowers,
      upper: this.#newUpper(),
      ...(random(2) === 0 && lowers.length > 0 ? {} : { virtualSizeBytes: this.#model.sectors * SECTOR }),
    };
  }

  #path(name: string): string {
    return `${DIRECTORY}/${name}${this.#files++}`;
  }

  #newUpper(): UpperRef {
    const data = this.#path("up");
    return { data, index: `${data}.index`, mode: this.#mode };
  }

  #makeLower(): LayerRef {
    const size = this.#model.sectors * SECTOR;
    const uuid = crypto.randomUUID();
    using writer = createLayerWriter(this.#path("base"), { virtualSizeBytes: size, uuid }, this.#disk);
    for (let sector = this.#random(8); sector < this.#model.sectors; sector += 1 + this.#random(12)) {
      const value = this.#random(5) === 0 ? 0 : this.#model.next++;
      if (value === 0) writer.zero(sector * SECTOR, SECTOR);
      else writer.append(sector * SECTOR, fill([value]));
      this.#model.set(sector, value);
    }
    return writer.finish();
  }

  #note(what: string): void {
    this.#log.push(what);
  }

  fail(what: string): never {
    throw new SimulationFailure(
      `${what}\n  mode ${this.#mode}, last steps:\n    ${this.#log.slice(-60).join("\n    ")}`,
    );
  }

  #open(disk: SimDisk, config: ImageConfig): LayerStack {
    try {
      return openStack(config, { disk, tuning: TUNING });
    } catch (error) {
      if (error instanceof Crashed) throw error;
      return this.fail(
        `cannot open: ${error instanceof Error ? (error.stack ?? error.message) : String(error)}`,
      );
    }
  }

  #range(): { sector: number; count: number } {
    const { sectors } = this.#model;
    const count = 1 + this.#random(this.#random(4) === 0 ? Math.min(sectors, 40) : 6);
    const unit = this.#mode === "sparse" && this.#random(3) > 0 ? 8 : 1;
    const sector = this.#random(Math.max(1, sectors - count + 1));
    const start = sector - (sector % unit);
    return { sector: start, count: Math.min(count, sectors - start) };
  }

  #readAll(stack: LayerStack): Int32Array {
    const bytes = new Uint8Array(new ArrayBuffer(stack.virtualSizeBytes));
    stack.read(0, bytes);
    const words = new Int32Array(bytes.buffer);
    const values = new Int32Array(stack.virtualSizeBytes / SECTOR);
    for (let sector = 0; sector < values.length; sector++) {
      const from = (sector * SECTOR) / 4;
      const value = words[from]!;
      for (let i = 1; i < SECTOR / 4; i++) {
        if (words[from + i] !== value) this.fail(`sector ${sector} is torn: ${value} and ${words[from + i]}`);
      }
      values[sector] = value;
    }
    return values;
  }

  /** One call that must be acknowledged or not at all. */
  #call(sector: number, values: readonly number[], call: () => void): void {
    this.#inFlight = { sector, values };
    call();
    for (const [i, value] of values.entries()) this.#model.set(sector + i, value);
    this.#inFlight = undefined;
  }

  #store(image: ImageConfig): void {
    this.#stored = image;
    this.#storing = undefined;
  }

  /** A flush under way covers what was written before it began. */
  #beginFlush(stack: LayerStack): void {
    const pending = stack.beginFlush();
    if (pending === undefined) {
      this.#model.flushed();
      return;
    }
    this.#flush = { pending, stage: 0, stale: this.#model.stale };
    // What is written from now on may be lost; what was before, only if the flush does not end.
    this.#model.stale = new Map([...this.#model.stale].map(([sector, values]) => [sector, new Set(values)]));
    this.#sinceFlush = new Map();
  }

  #sinceFlush: Map<number, Set<number>> | undefined;

  #stepFlush(): void {
    const flush = this.#flush!;
    const stages = [
      () => {
        for (const file of flush.pending.first) file.datasync();
      },
      () => {
        for (const file of flush.pending.afterFirst()) file.datasync();
      },
    ];
    stages[flush.stage]!();
    if (++flush.stage < stages.length) return;
    flush.pending.done();
    this.#flush = undefined;
    // Values from before the flush are possible no more, except where something was written since.
    const since = this.#sinceFlush ?? new Map<number, Set<number>>();
    this.#model.stale = since;
    this.#sinceFlush = undefined;
  }

  /** Ends what may not be under way during a restack. */
  #settle(): void {
    while (this.#flush !== undefined) this.#stepFlush();
  }

  #write(stack: LayerStack): void {
    const { sector, count } = this.#range();
    const values = Array.from({ length: count }, () => this.#model.next++);
    this.#note(`write ${sector}+${count} = ${values[0]}..`);
    this.#trackSince(sector, count);
    this.#call(sector, values, () => stack.write(sector * SECTOR, fill(values)));
    this.#trackAfter(sector, values);
  }

  #discard(stack: LayerStack): void {
    const { sector, count } = this.#range();
    const values = new Array<number>(count).fill(0);
    this.#note(`discard ${sector}+${count}`);
    this.#trackSince(sector, count);
    this.#call(sector, values, () => stack.discard(sector * SECTOR, count * SECTOR));
    this.#trackAfter(sector, values);
  }

  /** While a flush is under way: the value it covers stays possible until the next one. */
  #trackSince(sector: number, count: number): void {
    const since = this.#sinceFlush;
    if (since === undefined) return;
    for (let at = sector; at < sector + count; at++) {
      let values = since.get(at);
      if (values === undefined) {
        values = new Set();
        since.set(at, values);
      }
      values.add(this.#model.current[at]!);
    }
  }

  #trackAfter(sector: number, values: readonly number[]): void {
    for (const [i, value] of values.entries()) this.#sinceFlush?.get(sector + i)?.add(value);
  }

  #verify(stack: LayerStack, what: string): void {
    const got = this.#readAll(stack);
    for (const [sector, value] of got.entries()) {
      const expected = this.#model.current[sector]!;
      if (value !== expected) this.fail(`${what}: sector ${sector} is ${value}, expected ${expected}`);
    }
  }

  #restack(stack: LayerStack): void {
    this.#settle();
    const old = stack.image.upper!;
    const fresh = this.#random(2) === 0 ? old : this.#newUpper();
    const sealed = this.#path("sealed");
    this.#note(`restack to ${sealed}, fresh ${fresh.data}`);
    if (this.#random(2) === 0) {
      stack.restack(sealed, fresh);
      this.#model.flushed();
    } else {
      this.#restackSlowly(stack, sealed, fresh);
    }
    this.#note("restacked");
    // Sometimes the owner dies before it has stored what it got.
    if (this.#random(4) > 0) this.#store(stack.image);
    else this.#storing = stack.image;
  }

  /** With requests of the guest while the restack waits for the disk: the fresh upper gets them. */
  #restackSlowly(stack: LayerStack, sealed: string, fresh: UpperRef): void {
    const steps = stack.restackSteps(sealed, fresh);
    let step = steps.next();
    for (let waits = 1; step.done !== true; waits++) {
      // Sealed is what was there when the old upper got its trailer: before all waits but that for a record's file.
      if (!step.value[0]!.name.endsWith(".restack.tmp")) this.#sinceFlush ??= new Map();
      for (let n = this.#random(4); n > 0; n--) {
        const what = this.#random(8);
        if (what < 4) this.#write(stack);
        else if (what < 6) this.#discard(stack);
        else if (what < 7) stack.compactStep(1 + this.#random(20_000));
        else this.#verify(stack, "read during a restack");
      }
      for (const target of step.value) target.datasync();
      this.#note(`restack waited ${waits} times`);
      step = steps.next();
    }
    this.#model.stale = this.#sinceFlush ?? new Map();
    this.#sinceFlush = undefined;
    this.#verify(stack, "after a restack");
  }

  #seal(stack: LayerStack): LayerStack {
    this.#settle();
    this.#dropMerge();
    const sealed = this.#path("sealed");
    this.#note(`seal as ${sealed}`);
    stack.flush();
    this.#model.flushed();
    const upper = this.#newUpper();
    // The owner says what is to be before it changes anything, and tries again after a crash.
    const before = stack.image;
    this.#sealing = { sealed, upper, before };
    stack.seal(sealed);
    const image = { ...stack.image, upper };
    stack[Symbol.dispose]();
    this.#store(image);
    this.#sealing = undefined;
    return this.#open(this.#disk, image);
  }

  #sealing: { sealed: string; upper: UpperRef; before: ImageConfig } | undefined;

  #reopen(stack: LayerStack): LayerStack {
    this.#settle();
    this.#dropMerge();
    this.#note("reopen");
    const { image } = stack;
    stack[Symbol.dispose]();
    this.#store(image);
    if (this.#mode !== "sparse" && this.#random(3) === 0 && image.upper !== undefined) {
      const target = this.#path("commit");
      this.#note(`commit as ${target}`);
      const ref = commitUpper(image.upper, target, {}, this.#disk);
      const { upper: _, ...rest } = image;
      using committed = this.#open(this.#disk, { ...rest, lowers: [...image.lowers, ref] });
      this.#verify(committed, "committed upper over its lowers");
    }
    return this.#open(this.#disk, image);
  }

  #dropMerge(): void {
    this.#merge?.job[Symbol.dispose]();
    this.#merge = undefined;
  }

  #stepMerge(stack: LayerStack): void {
    if (this.#merge === undefined) {
      const { lowers } = stack.image;
      const plan = planMerge(lowers, { first: this.#imageLowers, fanout: 2 });
      const any = lowers.length >= 2 && this.#random(3) === 0 ? { first: 0, count: lowers.length } : plan;
      if (any === undefined) return;
      const target = this.#path("merged");
      this.#note(`merge ${any.count} from ${any.first} into ${target}`);
      const layers = lowers.slice(any.first, any.first + any.count);
      const uuid = crypto.randomUUID();
      this.#merge = { ...any, job: startMerge(layers, target, { uuid }, this.#disk) };
    }
    const { job, first, count } = this.#merge;
    if (!job.step(1 + this.#random(8192)).done) return;
    const merged = job.finish();
    this.#merge = undefined;
    this.#note(`swap ${count} lowers from ${first}`);
    stack.swapLowers({ first, count, merged });
    if (first === 0) this.#imageLowers = 1;
    this.#verify(stack, "after the swap");
    this.#store(stack.image);
  }

  #compact(stack: LayerStack): LayerStack {
    const before = stack.stats().upperIndexBytes;
    const disk = this.#disk;
    disk.failAfter(this.#random(3) === 0 ? this.#random(14) : Number.POSITIVE_INFINITY);
    let progress: CompactProgress;
    try {
      progress = stack.compactStep(1 + this.#random(20_000));
    } catch (error) {
      if (disk.crashed || disk.failed === undefined) throw error;
      return this.#afterFailure(stack, disk.failed);
    } finally {
      disk.failAfter(Number.POSITIVE_INFINITY);
    }
    if (stack.stats().upperIndexBytes < before) this.result.indexRewrites++;
    this.result.movedBytes += progress.movedBytes;
    this.#note(`compact: moved ${progress.movedBytes}, done ${progress.done}, flush ${progress.flushNeeded}`);
    if (progress.flushNeeded && this.#flush === undefined && this.#random(3) > 0) {
      stack.flush();
      this.#model.flushed();
    }
    return stack;
  }

  /** Of what failed in a step of compaction nobody may see anything, unless it was a flush. */
  #afterFailure(stack: LayerStack, failed: { readonly call: string; readonly file: string }): LayerStack {
    this.result.failures++;
    this.#note(`compact: ${failed.call} of ${failed.file} failed`);
    this.#verify(stack, "after a failure in compaction");
    // What compaction writes and syncs of the upper itself, but for what it moves, is a flush.
    if (this.#flush === undefined && (failed.call === "sync" || failed.call === "write")) {
      try {
        stack.flush();
        this.#note("flush");
        this.#model.flushed();
      } catch (error) {
        if (!(error instanceof AenvError) || error.code !== "upper_flush_failed") throw error;
        this.#note("the flush failed: reopen");
        this.#dropMerge();
        const { image } = stack;
        stack[Symbol.dispose]();
        this.#store(image);
        const again = this.#open(this.#disk, image);
        this.#verify(again, "opened again after a flush that failed");
        return again;
      }
    }
    if (this.#random(3) > 0) return stack;
    const again = this.#reopen(stack);
    this.#verify(again, "opened again after a failure in compaction");
    return again;
  }

  #step(stack: LayerStack): LayerStack {
    const what = this.#random(100);
    if (this.#flush !== undefined && this.#random(3) === 0) {
      this.#note("flush goes on");
      this.#stepFlush();
    } else if (what < 45) this.#write(stack);
    else if (what < 57) this.#discard(stack);
    else if (what < 67) {
      if (this.#flush === undefined) {
        this.#note("flush");
        stack.flush();
        this.#model.flushed();
      }
    } else if (what < 72) {
      if (this.#flush === undefined) {
        this.#note("flush begins");
        this.#beginFlush(stack);
      }
    } else if (what < 84) return this.#compact(stack);
    else if (what < 88) {
      if (stack.image.lowers.length < 20) this.#restack(stack);
    } else if (what < 93) this.#stepMerge(stack);
    else if (what < 95) return this.#reopen(stack);
    else if (what < 96) return this.#seal(stack);
    else if (what < 97) {
      this.#settle();
      const sectors = this.#model.sectors + 1 + this.#random(16);
      this.#note(`grow to ${sectors}`);
      this.#growing = sectors;
      this.#store({ ...stack.image, virtualSizeBytes: sectors * SECTOR });
      stack.grow(sectors * SECTOR);
      this.#model.grow(sectors);
      this.#growing = undefined;
      this.#store(stack.image);
    } else this.#verify(stack, "read");
    return stack;
  }

  #growing: number | undefined;

  /** Configs that the owner may find after a crash. */
  #configs(): ImageConfig[] {
    return this.#storing === undefined ? [this.#stored] : [this.#stored, this.#storing];
  }

  /** An owner that died while sealing looks whether the layer is there, before it makes use of it. */
  #resolve(disk: SimDisk, config: ImageConfig): ImageConfig {
    const sealing = this.#sealing;
    if (sealing === undefined || !disk.exists(sealing.sealed)) return config;
    // After a kill the layer may have its name in memory only.
    disk.syncDirectoriesOf(sealing.sealed);
    return {
      ...sealing.before,
      lowers: [...sealing.before.lowers, { file: sealing.sealed }],
      upper: sealing.upper,
    };
  }

  #recover(disk: SimDisk, allowed: (sector: number, value: number) => boolean, what: string): LayerStack {
    const configs = this.#configs();
    const config = configs[this.#random(configs.length)]!;
    const stack = this.#open(disk, this.#resolve(disk, config));
    const got = this.#readAll(stack);
    if (got.length !== this.#model.sectors && got.length !== this.#growing) {
      this.fail(`${what}: disk of ${got.length} sectors, expected ${this.#model.sectors}`);
    }
    for (const [sector, value] of got.entries()) {
      if (!allowed(sector, value)) {
        const stale = [...(this.#model.stale.get(sector) ?? [])];
        this.fail(
          `${what}: sector ${sector} is ${value}, may be ${this.#model.current[sector]} or ${stale.join(", ")}` +
            `; warnings: ${stack.stats().warnings.join("; ")}`,
        );
      }
    }
    return stack;
  }

  #crash(): void {
    this.#note(this.#inFlight === undefined ? "CRASH" : `CRASH in a call at sector ${this.#inFlight.sector}`);
    this.#merge = undefined;
    const { current, stale } = this.#model;
    const inFlight = this.#inFlight;
    const inFlightValue = (sector: number) => inFlight?.values[sector - inFlight.sector];
    const old = this.#disk;
    if (this.#random(3) === 0) {
      this.result.kills++;
      this.#disk = old.afterKill();
      this.#note("the process was killed");
      const stack = this.#recover(
        this.#disk,
        (sector, value) => value === (current[sector] ?? 0) || value === inFlightValue(sector),
        "after a kill",
      );
      this.#settleModel(stack, "kill");
      return;
    }
    this.result.powerLosses++;
    this.#note("power was lost");
    const allowed = (sector: number, value: number) => {
      if (value === (current[sector] ?? 0) || value === inFlightValue(sector)) return true;
      if (stale.get(sector)?.has(value) === true) return true;
      return this.#mode === "sparse" && this.#touchedBlock(sector);
    };
    const images = 1 + this.#random(4);
    for (let n = 0; n < images; n++) {
      this.result.images++;
      this.#disk = old.afterPowerLoss(this.#random);
      const stack = this.#recover(this.#disk, allowed, "after power loss");
      if (n + 1 < images) stack[Symbol.dispose]();
      else this.#settleModel(stack, "power");
    }
  }

  /**
   * A sparse file keeps no order between allocating a block and filling it: what was written to since the last
   * flush may read as zeros, whole file system blocks of it.
   */
  #touchedBlock(sector: number): boolean {
    const block = sector - (sector % 8);
    const inFlight = this.#inFlight;
    for (let at = block; at < block + 8; at++) {
      if (this.#model.stale.has(at)) return true;
      if (inFlight !== undefined && at >= inFlight.sector && at < inFlight.sector + inFlight.values.length) {
        return true;
      }
    }
    return false;
  }

  /** What was found is what counts from now on. */
  #settleModel(stack: LayerStack, kind: "kill" | "power"): void {
    const got = this.#readAll(stack);
    this.#growing = undefined;
    this.#sealing = undefined;
    this.#flush = undefined;
    this.#sinceFlush = undefined;
    const before = this.#model.current;
    this.#model.grow(got.length);
    if (kind === "power") {
      this.#model.current = got;
      this.#model.flushed();
    } else {
      const inFlight = this.#inFlight;
      for (const [i, value] of (inFlight?.values ?? []).entries()) {
        this.#model.maybe((inFlight?.sector ?? 0) + i, value);
      }
      for (let sector = 0; sector < before.length; sector++) this.#model.maybe(sector, before[sector]!);
      this.#model.current = got;
    }
    this.#inFlight = undefined;
    this.#stack = stack;
    this.#imageLowers = Math.min(this.#imageLowers, stack.image.lowers.length);
    this.#store(stack.image);
  }

  run(): LifeResult {
    const crashes = 1 + this.#random(5);
    this.#stack = this.#open(this.#disk, this.#stored);
    this.#store(this.#stack.image);
    for (let crash = 0; crash < crashes; crash++) {
      this.#disk.crashAfter(this.#random(this.#random(2) === 0 ? 30 : 250));
      try {
        for (let step = 0; step < 200; step++) this.#stack = this.#step(this.#stack!);
        this.#disk.crashAfter(0);
        const stack = this.#stack;
        const value = this.#model.current[0]!;
        this.#call(0, [value], () => stack.write(0, fill([value])));
        this.fail("the crash did not come");
      } catch (error) {
        if (error instanceof SimulationFailure) throw error;
        if (!this.#disk.crashed) {
          this.fail(
            error instanceof AenvError || error instanceof Error
              ? (error.stack ?? error.message)
              : String(error),
          );
        }
      }
      this.result.operations += this.#disk.operations;
      this.#recoverCrash();
    }
    this.#verify(this.#stack!, "at the end");
    return this.result;
  }

  /** Recovery may be hit by the next crash itself. */
  #recoverCrash(): void {
    this.#crash();
  }
}

/** Lives one life; throws a SimulationFailure that says what went wrong. */
export function simulateLife(random: Random): LifeResult {
  return new Life(random).run();
}
