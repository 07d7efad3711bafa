import { describe, expect, test } from "bun:test";
import { existsSync, lstatSync, readdirSync, unlinkSync } from "node:fs";
import { AenvError } from "../../lib/errors.ts";
import { createLink, type Disk, type DiskFile, hostDisk } from "./disk.ts";
import { createLayerWriter, openStack as openStackOn } from "./index.ts";
import { expectEqualBytes, fillPattern, scratchDirectory } from "./test-support.ts";
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
  open: (file, mode) => failing(hostDisk.open(file, mode)),
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
  directoriesOf: (...files) =>
    hostDisk.directoriesOf(...files).map((directory) => ({
      name: directory.name,
      datasync() {
        change("syncDirectoriesOf");
        directory.datasync();
      },
      [Symbol.dispose]: () => directory[Symbol.dispose](),
    })),
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
