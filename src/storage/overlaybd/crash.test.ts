import { afterEach, describe, expect, test } from "bun:test";
import {
  closeSync,
  copyFileSync,
  existsSync,
  lstatSync,
  openSync,
  readdirSync,
  readFileSync,
  unlinkSync,
  writeFileSync,
} from "node:fs";
import { AenvError } from "../../lib/errors.ts";
import { createLink, type Disk, type DiskFile, hostDisk, stageFile } from "./disk.ts";
import { createLayerWriter, openStack as openStackOn } from "./index.ts";
import { BLOCK_BYTES, MAPPING_BYTES } from "./lsmt/format.ts";
import { expectEqualBytes, fillPattern, scratchDirectory, seededRandom } from "./test-support.ts";
import { Crashed, SimDisk } from "./testing/sim-disk.ts";
import type { ImageConfig, LayerStack, UpperMode, UpperRef } from "./types.ts";

/**
 * Every change on disk goes through a Disk. Here the n-th change fails: alone (an I/O error) or with all that
 * follow (the process is dead, so undoing fails, too).
 */
type Failure = "once" | "dead" | "off";
let failure: Failure = "off";
let remaining = 0;
/** The first change that was refused. */
let diedAt = "";

class Injected extends Error {}

afterEach(() => {
  failure = "off";
  diedAt = "";
});

function change(name: string): void {
  if (failure === "off" || remaining-- > 0) return;
  if (failure === "once") failure = "off";
  if (diedAt === "") diedAt = name;
  throw new Injected(`injected at ${name}`);
}

function failing(file: DiskFile): DiskFile {
  const { fd } = file;
  return {
    name: file.name,
    ...(fd === undefined ? {} : { fd }),
    read: (...args) => file.read(...args),
    size: () => file.size(),
    seekData: (offset) => file.seekData(offset),
    seekHole: (offset) => file.seekHole(offset),
    lock: (mode) => file.lock(mode),
    close: () => file.close(),
    write(...args) {
      change("write");
      file.write(...args);
    },
    truncate(length) {
      change("truncate");
      file.truncate(length);
    },
    punchHole(offset, length) {
      change("punchHole");
      file.punchHole(offset, length);
    },
    datasync() {
      change("datasync");
      file.datasync();
    },
    sync() {
      change("sync");
      file.sync();
    },
  };
}

/** Whether the disk has links for the record of a restack. */
let notes = true;

const failingDisk: Disk = {
  ...hostDisk,
  open(file, mode) {
    change("open");
    return failing(hostDisk.open(file, mode));
  },
  create(file) {
    change("create");
    return failing(hostDisk.create(file));
  },
  createNote(file, text) {
    change("createNote");
    return notes && createLink(file, text);
  },
  rename(from, to) {
    change("rename");
    hostDisk.rename(from, to);
  },
  renameNoReplace(from, to) {
    change("renameNoReplace");
    hostDisk.renameNoReplace(from, to);
  },
  removeIfPresent(file) {
    change("removeIfPresent");
    hostDisk.removeIfPresent(file);
  },
  syncDirectoriesOf(...files) {
    change("syncDirectoriesOf");
    hostDisk.syncDirectoriesOf(...files);
  },
  directoriesOf(...files) {
    change("directoriesOf");
    return hostDisk.directoriesOf(...files).map((directory) => ({
      name: directory.name,
      datasync() {
        change("syncDirectoriesOf");
        directory.datasync();
      },
      [Symbol.dispose]: () => directory[Symbol.dispose](),
    }));
  },
};

const openStack = (config: ImageConfig) => openStackOn(config, { disk: failingDisk });

const SIZE = 256 * 1024;

function readAll(stack: LayerStack): Uint8Array {
  const bytes = new Uint8Array(SIZE);
  stack.read(0, bytes);
  return bytes;
}

interface Scene {
  stack: LayerStack;
  config: ImageConfig;
  model: Uint8Array;
  fresh: UpperRef;
  sealedPath: string;
}

function prepare(directory: string, mode: UpperMode, samePath: boolean): Scene {
  const model = new Uint8Array(SIZE);
  using writer = createLayerWriter(`${directory}/base`, {
    virtualSizeBytes: SIZE,
    uuid: crypto.randomUUID(),
  });
  const base = fillPattern(new Uint8Array(65536), 1);
  writer.append(0, base);
  model.set(base);
  const upper = { data: `${directory}/up.data`, index: `${directory}/up.index`, mode };
  const config: ImageConfig = { lowers: [writer.finish()], upper };
  const stack = openStack(config);
  for (let i = 0; i < 20; i++) {
    const data = fillPattern(new Uint8Array(512 * (1 + (i % 5))), 10 + i);
    const at = ((i * 7919) % 480) * 512;
    stack.write(at, data);
    model.set(data, at);
  }
  stack.discard(8192, 4096);
  model.fill(0, 8192, 12288);
  const fresh = samePath ? upper : { data: `${directory}/next.data`, index: `${directory}/next.index` };
  return { stack, config, model, fresh, sealedPath: `${directory}/sealed` };
}

function writeMore(stack: LayerStack, model: Uint8Array, salt: number): void {
  const data = fillPattern(new Uint8Array(4096), salt);
  stack.write(4096, data);
  model.set(data, 4096);
}

describe("a restack that fails at any step", () => {
  for (const mode of ["logStructured", "sparse"] as const) {
    for (const samePath of mode === "sparse" ? [true] : [true, false]) {
      for (const [kind, record] of [
        ["once", "link"],
        ["dead", "link"],
        ...(mode === "sparse" || samePath
          ? []
          : ([
              ["once", "file"],
              ["dead", "file"],
            ] as const)),
      ] as const) {
        const end = kind === "once" ? "I/O error" : "killed";
        test(`${mode}, ${samePath ? "same" : "other"} paths, record in a ${record}, ${end}`, () => {
          notes = record === "link";
          const outcomes = { old: 0, completed: 0, terminal: 0 };
          let steps = 0;
          for (; steps < 200; steps++) {
            using scratch = scratchDirectory("crash");
            const { stack, config, model, fresh, sealedPath } = prepare(scratch.path, mode, samePath);
            failure = kind;
            remaining = steps;
            let error: unknown;
            try {
              stack.restack(sealedPath, fresh);
            } catch (thrown) {
              error = thrown;
            }
            const injected = remaining < 0;
            failure = "off";
            if (!injected) {
              expect(error).toBeUndefined();
              stack[Symbol.dispose]();
              break;
            }
            expect(error).toBeDefined();
            const what = `step ${steps}`;
            const terminal = error instanceof AenvError && error.code === "restack_terminal";
            if (kind === "once" && !terminal) {
              // The stack goes on as if nothing had been asked for.
              expectEqualBytes(readAll(stack), model, `${what}, still open`);
              writeMore(stack, model, 500);
              expectEqualBytes(readAll(stack), model, `${what}, written to`);
              expect(existsSync(sealedPath)).toBe(false);
            }
            if (terminal) {
              outcomes.terminal++;
              expect(() => stack.read(0, new Uint8Array(512))).toThrow(AenvError);
            }
            stack[Symbol.dispose]();
            {
              using again = openStack(config);
              expectEqualBytes(readAll(again), model, `${what}, opened again`);
              writeMore(again, model, 501);
              const sealed = again.image.lowers.length === 2;
              outcomes[sealed ? "completed" : "old"]++;
              const { image } = again;
              again[Symbol.dispose]();
              using third = openStack(image);
              expectEqualBytes(readAll(third), model, `${what}, opened with the config found`);
              // And it works now, onto the same names where the first try came to nothing.
              third.restack(sealed ? `${sealedPath}2` : sealedPath, sealed ? config.upper! : fresh);
              writeMore(third, model, 502);
              expectEqualBytes(readAll(third), model, `${what}, restacked`);
              const last = third.image;
              third[Symbol.dispose]();
              using fourth = openStack(last);
              expectEqualBytes(readAll(fourth), model, `${what}, restacked and opened`);
            }
            const litter = readdirSync(scratch.path).filter((name) => /fresh$|dropped/.test(name));
            expect(litter).toEqual([]);
          }
          // All states were met, and the last step count is the number of changes a restack makes.
          expect(steps).toBeGreaterThan(15);
          expect(steps).toBeLessThan(200);
          expect(outcomes.old).toBeGreaterThan(5);
          if (kind === "dead") expect(outcomes.completed).toBeGreaterThan(0);
        }, 120_000);
      }
    }
  }

  test("waits for the disk twice; three times where its record does not fit into a link", () => {
    for (const links of [true, false]) {
      using scratch = scratchDirectory("waits");
      const { stack, fresh, model, sealedPath } = prepare(scratch.path, "logStructured", true);
      notes = links;
      const waits: string[][] = [];
      const steps = stack.restackSteps(sealedPath, fresh);
      for (let step = steps.next(); step.done !== true; step = steps.next()) {
        for (const target of step.value) target.datasync();
        waits.push(step.value.map((target) => target.name));
      }
      const { path } = scratch;
      expect(waits).toEqual([
        ...(links ? [] : [[`${path}/up.data.restack.tmp`]]),
        [`${path}/up.data`],
        [path],
      ]);
      expect(lstatSync(`${path}/up.data.restack`).isSymbolicLink()).toBe(links);
      expectEqualBytes(readAll(stack), model, "restacked");
      stack[Symbol.dispose]();
    }
    notes = true;
  });

  test("a link holds a record only where its text is durable with its name", () => {
    using scratch = scratchDirectory("notes");
    const { path } = scratch;
    expect(createLink(`${path}/long`, "x".repeat(5000))).toBe(false);
    const mounted = Bun.spawnSync(["mount", "-t", "ramfs", "none", path]);
    if (!mounted.success) return console.log(`left out: no file system can be mounted (${mounted.stderr})`);
    try {
      expect(hostDisk.createNote(`${path}/note`, "[]")).toBe(false);
      expect(readdirSync(path)).toEqual([]);
      expect(Bun.spawnSync(["mount", "-t", "tmpfs", "none", path]).success).toBe(true);
      expect(hostDisk.createNote(`${path}/note`, "[]")).toBe(true);
      expect(hostDisk.readNote(`${path}/note`)).toBe("[]");
      // Small ones of a full disk: the reason, and not the text.
      expect(Bun.spawnSync(["mount", "-t", "tmpfs", "-o", "nr_inodes=2", "none", path]).success).toBe(true);
      expect(hostDisk.createNote(`${path}/one`, "[1]")).toBe(true);
      const full = () => hostDisk.createNote(`${path}/two`, "[2]");
      expect(full).toThrow("no space left");
      expect(full).not.toThrow("[2]");
    } finally {
      while (Bun.spawnSync(["umount", path]).success);
    }
  });

  test("an upper whose sealing was not published goes on, even without its index file", () => {
    // Die right before the rename: the data file has its trailer but still its old name.
    for (let steps = 0; ; steps++) {
      using scratch = scratchDirectory("unseal");
      const { stack, config, model, fresh, sealedPath } = prepare(scratch.path, "logStructured", true);
      failure = "dead";
      remaining = steps;
      diedAt = "";
      expect(() => stack.restack(sealedPath, fresh)).toThrow();
      failure = "off";
      stack[Symbol.dispose]();
      if (diedAt !== "renameNoReplace") continue;
      unlinkSync(config.upper!.index!);
      using again = openStack(config);
      expect(again.stats().warnings.length).toBeGreaterThan(0);
      expectEqualBytes(readAll(again), model, "without an index file");
      writeMore(again, model, 7);
      const { image } = again;
      again[Symbol.dispose]();
      using third = openStack(image);
      expect(third.stats().warnings).toEqual([]);
      expectEqualBytes(readAll(third), model, "written to and opened");
      break;
    }
  });
});

describe("a layer being written", () => {
  test("fails as a whole at any step", () => {
    for (let steps = 0; ; steps++) {
      using scratch = scratchDirectory("layer");
      const target = `${scratch.path}/layer`;
      failure = "once";
      remaining = steps;
      let error: unknown;
      try {
        using writer = createLayerWriter(target, { virtualSizeBytes: SIZE }, failingDisk);
        writer.append(0, new Uint8Array(SIZE).fill(4));
        writer.finish();
      } catch (thrown) {
        error = thrown;
      }
      const injected = remaining < 0;
      failure = "off";
      if (!injected) {
        expect(steps).toBeGreaterThan(3);
        using stack = openStack({ lowers: [{ file: target }] });
        expect(readAll(stack)[SIZE - 1]).toBe(4);
        break;
      }
      expect(error).toBeInstanceOf(Injected);
      // Only a sync of the directory that failed behind the rename leaves the (whole) file.
      const left = readdirSync(scratch.path);
      expect(left.filter((name) => name !== "layer")).toEqual([]);
    }
  });
});

const TUNING = { segmentSectors: 32, indexSlack: 6 };
const SECTORS = 96;

/** A disk of which each sector is filled with one number, rewritten until compaction has all of its work to do. */
function prepareCompaction(disk: Disk, directory: string): Compacted {
  const upper = { data: `${directory}/up.data`, index: `${directory}/up.index` };
  const config: ImageConfig = { lowers: [], upper, virtualSizeBytes: SECTORS * 512 };
  const stack = openStackOn(config, { disk, tuning: TUNING });
  const model = new Uint8Array(SECTORS);
  const compacted = { disk, config, stack, model };
  for (let round = 1; round <= 5; round++) {
    for (let at = 0; at < SECTORS; at += 1 + (at % 3 === 0 ? round % 2 : 0)) put(compacted, at, round);
  }
  stack.flush();
  return compacted;
}

interface Compacted {
  readonly disk: Disk;
  readonly config: ImageConfig;
  stack: LayerStack;
  readonly model: Uint8Array;
}

function put({ stack, model }: Compacted, sector: number, value: number): void {
  stack.write(sector * 512, new Uint8Array(512).fill(value));
  model[sector] = value;
}

function expectSectors(stack: LayerStack, model: Uint8Array, what: string): void {
  const expected = new Uint8Array(SECTORS * 512);
  for (const [sector, value] of model.entries()) expected.fill(value, sector * 512, (sector + 1) * 512);
  const got = new Uint8Array(SECTORS * 512);
  stack.read(0, got);
  expectEqualBytes(got, expected, what);
}

/** Steps with writes of the guest between them; `step` carries one out. Returns how many there were. */
function compactAll(
  compacted: Compacted,
  step: (stack: LayerStack) => { done: boolean; flushNeeded: boolean },
): number {
  for (let steps = 1; steps < 500; steps++) {
    const { done, flushNeeded } = step(compacted.stack);
    if (done) return steps;
    if (steps < 12) put(compacted, (steps * 7) % SECTORS, 100 + steps);
    if (flushNeeded && steps % 3 > 0) compacted.stack.flush();
    // Written again before the step that asked for the flush: it has to flush itself.
    if (flushNeeded && steps < 40) put(compacted, (steps * 11) % SECTORS, 150 + steps);
  }
  throw new Error("compaction does not end");
}

describe("a compaction that fails at any change", () => {
  test("I/O error, and the next step goes on: nothing is lost", () => {
    const calls = new Set<string>();
    let reopened = 0;
    for (let changes = 0; ; changes++) {
      using scratch = scratchDirectory("compact-error");
      const compacted = prepareCompaction(failingDisk, scratch.path);
      const { config, model } = compacted;
      const what = () => `change ${changes}, ${diedAt}`;
      let flushFailed = false;
      remaining = changes;
      diedAt = "";
      compactAll(compacted, (stack) => {
        if (flushFailed) {
          // Nothing but opening it again helps.
          expect(() => stack.flush()).toThrow("an earlier flush failed");
          stack[Symbol.dispose]();
          compacted.stack = openStackOn(config, { disk: failingDisk, tuning: TUNING });
          expectSectors(compacted.stack, model, `${what()}, opened after a failed flush`);
          flushFailed = false;
          reopened++;
          return { done: false, flushNeeded: false };
        }
        failure = remaining < 0 ? "off" : "once";
        try {
          return stack.compactStep(2048);
        } catch (error) {
          expect(error).toBeInstanceOf(Injected);
          expectSectors(stack, model, `${what()}, right after`);
          try {
            stack.flush();
          } catch (flushError) {
            if (!(flushError instanceof AenvError) || flushError.code !== "upper_flush_failed")
              throw flushError;
            flushFailed = true;
          }
          return { done: false, flushNeeded: false };
        } finally {
          failure = "off";
        }
      });
      const { stack } = compacted;
      const { upperDataBytes, upperLiveBytes, upperIndexBytes, upperMappings } = stack.stats();
      expect(upperDataBytes).toBeLessThanOrEqual(2 * upperLiveBytes + 512 * TUNING.segmentSectors);
      expect(upperIndexBytes).toBeLessThanOrEqual(
        BLOCK_BYTES + (2 * upperMappings + TUNING.indexSlack) * MAPPING_BYTES,
      );
      for (let at = 0; at < SECTORS; at += 5) put(compacted, at, 200);
      stack.flush();
      expectSectors(stack, model, `${what()}, compacted`);
      expect(readdirSync(scratch.path).sort()).toEqual(["up.data", "up.index"]);
      stack[Symbol.dispose]();
      using again = openStack(config);
      expect(again.stats().warnings).toEqual([]);
      expectSectors(again, model, `${what()}, opened again`);
      if (remaining >= 0) break;
      calls.add(diedAt);
    }
    // It was all of it: what compaction does to a disk.
    expect([...calls].sort()).toEqual([
      "create",
      "datasync",
      "directoriesOf",
      "punchHole",
      "removeIfPresent",
      "rename",
      "sync",
      "syncDirectoriesOf",
      "write",
    ]);
    expect(reopened).toBeGreaterThan(0);
  }, 120_000);

  test("killed: everything written is there", () => {
    for (let changes = 0; ; changes++) {
      using scratch = scratchDirectory("compact-kill");
      const compacted = prepareCompaction(failingDisk, scratch.path);
      const { config, model } = compacted;
      remaining = changes;
      diedAt = "";
      let died = false;
      try {
        compactAll(compacted, (stack) => {
          failure = "dead";
          const progress = stack.compactStep(2048);
          failure = "off";
          return progress;
        });
      } catch (error) {
        expect(error).toBeInstanceOf(Injected);
        died = true;
        // A dead process tidies nothing up: its descriptors are closed, no more.
        try {
          compacted.stack[Symbol.dispose]();
        } catch (disposal) {
          expect(disposal).toBeInstanceOf(Injected);
        }
      }
      failure = "off";
      compacted.stack[Symbol.dispose]();
      using again = openStack(config);
      expectSectors(again, model, `killed at change ${changes}, ${diedAt}`);
      expect(readdirSync(scratch.path).sort()).toEqual(["up.data", "up.index"]);
      if (!died) break;
      expect(changes).toBeLessThan(1000);
    }
  }, 120_000);

  test("power loss: each sector is as at the last flush or as written since", () => {
    const random = seededRandom(7);
    for (let changes = 0; ; changes++) {
      const disk = new SimDisk(random);
      const compacted = prepareCompaction(disk, "/sim");
      let flushed = compacted.model.slice();
      const { stack, model } = compacted;
      const flushIt = stack.flush.bind(stack);
      stack.flush = () => {
        flushIt();
        flushed = model.slice();
      };
      let left = changes;
      let died = false;
      try {
        compactAll(compacted, () => {
          disk.crashAfter(left);
          const before = disk.operations;
          const progress = stack.compactStep(2048);
          left -= disk.operations - before;
          disk.crashAfter(Number.POSITIVE_INFINITY);
          return progress;
        });
      } catch (error) {
        expect(error).toBeInstanceOf(Crashed);
        died = true;
      }
      for (let image = 0; image < 8; image++) {
        using again = openStackOn(compacted.config, { disk: disk.afterPowerLoss(random) });
        const got = new Uint8Array(SECTORS * 512);
        again.read(0, got);
        for (const [sector, value] of model.entries()) {
          const found = got.subarray(sector * 512, (sector + 1) * 512);
          expect(found.every((byte) => byte === found[0])).toBe(true);
          expect([value, flushed[sector]!]).toContain(found[0]!);
        }
      }
      if (!died) break;
      expect(changes).toBeLessThan(1000);
    }
  }, 120_000);

  test("where the new index has its name, flushes go into it, and make the name durable that could not be", () => {
    const random = seededRandom(3);
    for (let images = 0; images < 20; images++) {
      const disk = new SimDisk(random);
      const compacted = prepareCompaction(disk, "/sim");
      const { stack, model, config } = compacted;
      // The last that it does is to sync the directory.
      const rename = disk.rename.bind(disk);
      disk.rename = (from, to) => {
        rename(from, to);
        disk.failAfter(0);
      };
      expect(() => {
        for (let steps = 0; steps < 500; steps++) if (stack.compactStep(1 << 20).flushNeeded) stack.flush();
      }).toThrow("EIO: sync of /sim");
      expect(disk.failed).toEqual({ call: "sync", file: "/sim" });
      for (let at = 0; at < SECTORS; at += 2) put(compacted, at, 222);
      stack.flush();
      using again = openStackOn(config, { disk: disk.afterPowerLoss(random) });
      expectSectors(again, model, "after power loss");
    }
  });

  test("a file system without holes: space is used again, and nothing else stops", () => {
    using scratch = scratchDirectory("no-holes");
    let punches = 0;
    let refusal = Object.assign(new Error("injected"), { code: "os_eio" });
    const disk: Disk = {
      ...hostDisk,
      open(name, mode) {
        const file = hostDisk.open(name, mode);
        file.punchHole = () => {
          punches++;
          throw refusal;
        };
        return file;
      },
    };
    const compacted = prepareCompaction(disk, scratch.path);
    const { stack, model } = compacted;
    const before = stack.stats().upperDataBytes;
    // What was not punched counts, however often it is tried.
    for (let tries = 0; tries < 3; tries++) expect(() => stack.compactStep(1 << 20)).toThrow("injected");
    expect(stack.stats().upperDataBytes).toBe(before);
    punches = 0;
    refusal = Object.assign(new Error("refused"), { code: "os_eopnotsupp" });
    compactAll(compacted, () => stack.compactStep(1 << 20));
    expect(punches).toBe(1);
    expect(stack.stats().compactionDue).toBe(false);
    expect(stack.stats().upperIndexBytes).toBeLessThan(
      BLOCK_BYTES + MAPPING_BYTES * (2 * SECTORS + TUNING.indexSlack),
    );
    expectSectors(stack, model, "compacted");
    stack[Symbol.dispose]();
    using again = openStackOn(compacted.config);
    expectSectors(again, model, "opened again");
  });
});

describe("an upper of a tool that knows no records", () => {
  const VECTORS = `${import.meta.dir}/../../../tests/vectors/overlaybd`;

  /** Its mappings several times over, which says the same. */
  function foreign(directory: string, times: number): ImageConfig {
    const upper = { data: `${directory}/up.data`, index: `${directory}/up.index` };
    copyFileSync(`${VECTORS}/rw-basic.data`, upper.data);
    const index = readFileSync(`${VECTORS}/rw-basic.index`);
    const entries = new Array<Buffer>(times).fill(index.subarray(BLOCK_BYTES));
    writeFileSync(upper.index, Buffer.concat([index.subarray(0, BLOCK_BYTES), ...entries]));
    return { lowers: [], upper };
  }

  function wholeDisk(stack: LayerStack): Uint8Array {
    const bytes = new Uint8Array(stack.virtualSizeBytes);
    stack.read(0, bytes);
    return bytes;
  }

  test("gets its new index while a flush waits for the old one", () => {
    using scratch = scratchDirectory("adopt");
    const config = foreign(scratch.path, 1);
    const stack = openStack(config);
    const pending = stack.beginFlush()!;
    expect(pending.first.map(({ name }) => name)).toContain(config.upper!.index!);
    stack.write(0, new Uint8Array(512).fill(77));
    for (const target of pending.first) target.datasync();
    for (const target of pending.afterFirst()) target.datasync();
    pending.done();
    stack.write(512, new Uint8Array(512).fill(78));
    stack.flush();
    const model = wholeDisk(stack);
    expect([model[0], model[512]]).toEqual([77, 78]);
    stack[Symbol.dispose]();
    using again = openStack(config);
    expectEqualBytes(wholeDisk(again), model, "opened again");
  });

  test("is written to while its index is being compacted", () => {
    using scratch = scratchDirectory("adopt-compact");
    const config = foreign(scratch.path, 12);
    let stack = openStackOn(config, { tuning: TUNING });
    expect(stack.stats().compactionDue).toBe(true);
    const pending = stack.beginFlush()!;
    expect(stack.compactStep(1 << 20)).toMatchObject({ done: false, flushNeeded: false });
    for (let at = 0; at < 64; at++) stack.write(at * 512, new Uint8Array(512).fill(at + 1));
    const model = wholeDisk(stack);
    for (const target of pending.first) target.datasync();
    for (const target of pending.afterFirst()) target.datasync();
    pending.done();
    for (let steps = 0; steps < 500; steps++) {
      const { done, flushNeeded } = stack.compactStep(1 << 20);
      if (flushNeeded) stack.flush();
      if (done) break;
    }
    stack.flush();
    stack[Symbol.dispose]();
    stack = openStack(config);
    expectEqualBytes(wholeDisk(stack), model, "opened again");
    stack[Symbol.dispose]();
  });

  test("fails at any change of its first write: the write fails, alone", () => {
    for (let changes = 0; ; changes++) {
      using scratch = scratchDirectory("adopt-error");
      const config = foreign(scratch.path, 1);
      const stack = openStack(config);
      const model = wholeDisk(stack);
      failure = "once";
      remaining = changes;
      diedAt = "";
      let failed = false;
      try {
        stack.write(0, new Uint8Array(512).fill(77));
        model.fill(77, 0, 512);
      } catch (error) {
        expect(error).toBeInstanceOf(Injected);
        failed = true;
      }
      failure = "off";
      expectEqualBytes(wholeDisk(stack), model, `change ${changes}, ${diedAt}`);
      stack.write(1024, new Uint8Array(512).fill(79));
      model.fill(79, 1024, 1536);
      if (diedAt === "datasync") {
        // What the kernel could not write it may have dropped.
        expect(() => stack.flush()).toThrow("an earlier flush failed");
      } else {
        stack.flush();
      }
      stack.grow(stack.virtualSizeBytes + 4096);
      stack[Symbol.dispose]();
      expect(readdirSync(scratch.path).sort()).toEqual(["up.data", "up.index"]);
      using again = openStack(config);
      expectEqualBytes(wholeDisk(again).subarray(0, model.byteLength), model, `${diedAt}, opened again`);
      expect(again.virtualSizeBytes).toBe(model.byteLength + 4096);
      if (!failed) break;
    }
  });
});

test("a disk that grew while its index was being compacted stays grown", () => {
  using scratch = scratchDirectory("compact-grow");
  const compacted = prepareCompaction(hostDisk, scratch.path);
  const { stack, model, config } = compacted;
  put(compacted, 0, 99);
  let progress = stack.compactStep(1 << 20);
  while (!progress.flushNeeded) progress = stack.compactStep(1 << 20);
  stack.grow(2 * SECTORS * 512);
  for (; !progress.done; progress = stack.compactStep(1 << 20)) stack.flush();
  stack[Symbol.dispose]();
  using again = openStackOn({ lowers: [], upper: config.upper! });
  expect(again.virtualSizeBytes).toBe(2 * SECTORS * 512);
  expectSectors(again, model, "opened again");
});

test("a seal that fails at any call: what is flushed afterwards survives power loss", () => {
  const random = seededRandom(11);
  let goneOn = 0;
  for (let calls = 0, sealed = false; !sealed; calls++) {
    for (let image = 0; image < 8; image++) {
      const disk = new SimDisk(random);
      const compacted = prepareCompaction(disk, "/sim");
      const { stack, model, config } = compacted;
      disk.failAfter(calls);
      try {
        stack.seal("/sim/sealed");
        sealed = true;
        break;
      } catch (error) {
        if (stack.readOnly || (error instanceof AenvError && error.code === "restack_terminal")) continue;
      }
      put(compacted, 5, 123);
      try {
        stack.flush();
      } catch (error) {
        expect(error).toMatchObject({ code: "upper_flush_failed" });
        continue;
      }
      using again = openStackOn(config, { disk: disk.afterPowerLoss(random) });
      expectSectors(again, model, `call ${calls}: ${disk.failed?.call} of ${disk.failed?.file}`);
      goneOn++;
    }
  }
  expect(goneOn).toBeGreaterThan(10);
});

test("a sync of what is sealed that failed is a flush that failed", () => {
  for (const seal of ["restack", "seal"] as const) {
    using scratch = scratchDirectory("seal-sync");
    notes = true;
    const { stack, model, fresh, sealedPath } = prepare(scratch.path, "logStructured", true);
    const call = () => (seal === "seal" ? stack.seal(sealedPath) : stack.restack(sealedPath, fresh));
    for (let changes = 0; diedAt !== "datasync"; changes++) {
      failure = "once";
      remaining = changes;
      diedAt = "";
      expect(call).toThrow("injected");
      failure = "off";
    }
    diedAt = "";
    expectEqualBytes(readAll(stack), model, "still there");
    expect(() => stack.flush()).toThrow("an earlier flush failed");
    stack[Symbol.dispose]();
  }
});

test("a file that was put in place is closed once, whatever close says", () => {
  using scratch = scratchDirectory("stage");
  let closes = 0;
  const disk: Disk = {
    ...hostDisk,
    create(name) {
      const file = hostDisk.create(name);
      const close = file.close.bind(file);
      file.close = () => {
        closes++;
        close();
        throw new Injected("injected at close");
      };
      return file;
    },
  };
  const staged = stageFile(disk, `${scratch.path}/file`, (file) => file.write(0, new Uint8Array(8), 0, 8));
  expect(() => staged.place()).toThrow("injected at close");
  // The number is another's by now.
  const other = openSync(`${scratch.path}/file`, "r");
  staged.discard();
  expect(closes).toBe(1);
  closeSync(other);
  expect(readdirSync(scratch.path)).toEqual(["file"]);
});
