import { afterAll, beforeAll, beforeEach, expect, test } from "bun:test";
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { newId } from "../lib/ids.ts";
import { createLogger } from "../lib/log.ts";
import type { CapturedState } from "../sandbox/types.ts";
import { createPosixRepository } from "./posix.ts";
import type { SnapshotRecord, SnapshotRepository } from "./types.ts";

const log = createLogger("test");
log.level = "silent";
let base: string;
let root: string;
let repository: SnapshotRepository;

beforeAll(() => {
  base = mkdtempSync("/tmp/orch-repo-");
});
afterAll(() => rmSync(base, { recursive: true, force: true }));
beforeEach(() => {
  root = mkdtempSync(join(base, "r-"));
  repository = createPosixRepository({ root: join(root, "repository"), log, collectGraceMs: 0 });
});

function captured(dir: string, content: string): CapturedState {
  mkdirSync(dir, { recursive: true });
  const file = (name: string, text: string): string => {
    writeFileSync(join(dir, name), text);
    return join(dir, name);
  };
  return {
    version: 1,
    vm: { vmm: "qemu", vmmVersion: "10", mode: "tcg", cpuModel: "max", kernelVersion: "6.12" },
    shape: { vcpuCount: 1, memoryMiB: 256 },
    deviceStatePath: file("device.state", `device ${content}`),
    deviceStateSum: { sizeBytes: 7 + content.length, digest: `sha256:${"0".repeat(64)}` },
    memory: {
      sizeBytes: 256 << 20,
      layers: [{ file: file("memory.lsmt", `memory ${content}`), uuid: newId() }],
    },
    rootfs: {
      virtualSizeBytes: 1 << 30,
      lowers: [
        { file: file("base.lsmt", "the same base layer") },
        { file: file("disk.lsmt", `disk ${content}`) },
      ],
    },
    envdVersion: "0.5.15",
  };
}

function recordOf(id: string, templateId = id, state?: CapturedState): SnapshotRecord {
  const now = new Date().toISOString();
  return {
    id,
    templateId,
    aliases: [],
    public: true,
    source: { kind: "template", build: { status: state === undefined ? "building" : "ready" }, names: [] },
    resources: { cpuCount: 1, memoryMiB: 256, diskSizeMiB: 1024 },
    createdAt: now,
    updatedAt: now,
    ...(state === undefined
      ? {}
      : {
          committed: { state, context: { envVars: { A: "1" }, exposedPorts: [], volumes: [], labels: {} } },
        }),
  };
}

async function publish(content: string, templateId?: string): Promise<SnapshotRecord> {
  const id = newId();
  const state = captured(join(root, "capture", id), content);
  return repository.commit(recordOf(id, templateId ?? id, state), state);
}

const layersOnDisk = (): string[] => readdirSync(join(root, "repository", "managed-layers")).sort();

test("a committed snapshot needs nothing of the capture and reads back complete", async () => {
  const made = await publish("one");
  rmSync(join(root, "capture"), { recursive: true });
  const fresh = createPosixRepository({ root: join(root, "repository"), log });
  const read = await fresh.get(made.id);
  const state = read!.committed!.state;
  expect(read).toEqual(made);
  expect(readFileSync(state.deviceStatePath, "utf8")).toBe("device one");
  expect(state.deviceStateSum).toEqual({ sizeBytes: 10, digest: `sha256:${"0".repeat(64)}` });
  expect(state.rootfs.lowers.map((layer) => readFileSync(layer.file, "utf8"))).toEqual([
    "the same base layer",
    "disk one",
  ]);
  expect(state.memory.layers[0]?.digest).toMatch(/^sha256:[0-9a-f]{64}$/);
  expect(state.memory.layers[0]?.uuid).toBeString();
  expect(read!.committed!.context.envVars).toEqual({ A: "1" });
  const stored = readFileSync(join(root, "repository/catalog/records", `${made.id}.json`), "utf8");
  expect(stored).not.toContain(root);
  expect([JSON.parse(stored).version, JSON.parse(stored).committed.state.version]).toEqual([1, 1]);
});

test("attached drives are stored with the snapshot, and their layers kept as long as it", async () => {
  const id = newId();
  const state = captured(join(root, "capture", id), "driven");
  const file = join(root, "capture", id, "drive.lsmt");
  writeFileSync(file, "of the drive");
  const described = { driveId: "data", readOnly: false, mountPath: "/srv", subPath: "a/b" };
  const drive = { ...described, virtualSizeBytes: 2 << 30, lowers: [state.rootfs.lowers[0]!, { file }] };
  const made = await repository.commit(recordOf(id, id, state), { ...state, drives: [drive] });
  rmSync(join(root, "capture"), { recursive: true });
  const manifest = JSON.parse(readFileSync(join(root, "repository/snapshots", id, "manifest.json"), "utf8"));
  expect(manifest.attachedDrives).toEqual([{ ...described, virtualSize: 2 << 30 }]);
  // A program that knows of no drives would remove their layers: it must find a record it does not understand.
  const path = join(root, "repository/catalog/records", `${id}.json`);
  const record = JSON.parse(readFileSync(path, "utf8"));
  expect([record.version, record.committed.state.version]).toEqual([2, 2]);
  const fresh = createPosixRepository({ root: join(root, "repository"), log, collectGraceMs: 0 });
  const { drives, rootfs } = (await fresh.get(id))!.committed!.state;
  expect(drives).toEqual(made.committed!.state.drives!);
  expect(drives).toMatchObject([{ ...described, virtualSizeBytes: 2 << 30 }]);
  expect(drives![0]!.lowers[0]).toEqual(rootfs.lowers[0]!);
  expect(readFileSync(drives![0]!.lowers[1]!.file, "utf8")).toBe("of the drive");
  expect(await fresh.collect(new Set())).toEqual({ removedFiles: 0, removedBytes: 0 });
  // As they were written before: understood, and written anew when the record changes.
  record.version = 1;
  record.committed.state.version = 1;
  writeFileSync(path, JSON.stringify(record));
  await fresh.bindAlias("driven", id);
  expect((await fresh.get(id))!.committed!.state.drives).toEqual(drives!);
  expect(JSON.parse(readFileSync(path, "utf8")).version).toBe(2);
  writeFileSync(path, JSON.stringify({ ...record, version: 3 }));
  await expect(fresh.collect(new Set())).rejects.toMatchObject({ code: "snapshot_record_invalid" });
  writeFileSync(path, JSON.stringify(record));
  await fresh.delete(id);
  expect((await fresh.collect(new Set())).removedFiles).toBe(4);
});

test("equal layers are stored once, and publishing links instead of copying", async () => {
  await publish("one");
  const second = await publish("two");
  expect(layersOnDisk()).toHaveLength(5);
  const disk = second.committed!.state.rootfs.lowers[1]!.file;
  expect(statSync(disk).ino).toBe(statSync(join(root, "capture", second.id, "disk.lsmt")).ino);
});

test("names: alias, tag, namespace, id; unknown ones and nonsense resolve to nothing", async () => {
  const made = await publish("one");
  await repository.bindAlias("python", made.id);
  await repository.bindAlias("python:v1.2", made.id);
  for (const name of [
    "python",
    "python:default",
    "team/python",
    "team/python:v1.2",
    made.id,
    `${made.id}:default`,
  ]) {
    expect((await repository.resolve(name))?.id).toBe(made.id);
  }
  for (const name of ["pytho", "python:v2", "", "a/b/c", "../python", "python:", newId(), ".."]) {
    expect(await repository.resolve(name)).toBeUndefined();
  }
  expect((await repository.get(made.id))?.aliases).toEqual(["python", "python:v1.2"]);
  await expect(repository.bindAlias("no/../good", made.id)).rejects.toMatchObject({
    code: "invalid_alias",
    status: 400,
  });
  await expect(repository.bindAlias(newId(), made.id)).rejects.toMatchObject({ code: "invalid_alias" });
  await expect(repository.bindAlias("free", newId())).rejects.toMatchObject({ code: "snapshot_not_found" });
});

test("an alias moves between builds of one template and is refused to another, until that is gone", async () => {
  const first = await publish("one");
  await repository.bindAlias("base", first.id);
  const rebuild = await publish("two", first.templateId);
  await repository.bindAlias("base", rebuild.id);
  expect((await repository.resolve("base"))?.id).toBe(rebuild.id);
  expect((await repository.resolve(first.templateId))?.id).toBe(rebuild.id);
  expect((await repository.get(first.id))?.aliases).toEqual([]);
  const other = await publish("three");
  await expect(repository.bindAlias("base", other.id)).rejects.toMatchObject({
    code: "alias_conflict",
    status: 409,
  });
  await repository.delete(rebuild.id);
  expect(await repository.resolve("base")).toBeUndefined();
  expect((await repository.resolve(first.templateId))?.id).toBe(first.id);
  await repository.bindAlias("base", other.id);
  expect((await repository.resolve("base"))?.id).toBe(other.id);
});

test("concurrent binds of one free alias by 20 templates: exactly one gets it", async () => {
  const ids = await Promise.all(Array.from({ length: 20 }, (_, i) => publish(`content ${i}`)));
  const outcomes = await Promise.allSettled(ids.map((record) => repository.bindAlias("wanted", record.id)));
  expect(outcomes.filter((outcome) => outcome.status === "fulfilled")).toHaveLength(1);
  const winner = ids[outcomes.findIndex((outcome) => outcome.status === "fulfilled")]!;
  expect((await repository.resolve("wanted"))?.id).toBe(winner.id);
  const named = (await repository.list()).filter((record) => record.aliases.length > 0);
  expect(named.map((record) => record.id)).toEqual([winner.id]);
});

test("two processes bind the same aliases at once: each alias has one owner and every loser was told", async () => {
  const ids = [(await publish("one")).id, (await publish("two")).id];
  const script = (id: string): string => `
    import { createPosixRepository } from ${JSON.stringify(join(import.meta.dir, "posix.ts"))};
    import { createLogger } from ${JSON.stringify(join(import.meta.dir, "../lib/log.ts"))};
    const repository = createPosixRepository({ root: ${JSON.stringify(join(root, "repository"))}, log: createLogger("t") });
    const won = [];
    for (let i = 0; i < 15; i++) await repository.bindAlias("name-" + i, ${JSON.stringify(id)}).then(
      () => won.push(i), (error) => { if (error.code !== "alias_conflict") throw error; });
    console.log(JSON.stringify(won));
  `;
  const children = ids.map((id) => Bun.spawn([process.execPath, "-e", script(id)], { stdout: "pipe" }));
  const won = await Promise.all(
    children.map(async (child) => JSON.parse(await new Response(child.stdout).text()) as number[]),
  );
  expect([...won[0]!, ...won[1]!].sort((a, b) => a - b)).toEqual(Array.from({ length: 15 }, (_, i) => i));
  for (let i = 0; i < 15; i++) {
    expect((await repository.resolve(`name-${i}`))?.id).toBe(won[0]!.includes(i) ? ids[0]! : ids[1]!);
  }
});

test("deletion leaves shared layers, collection removes what nobody uses or pins", async () => {
  const first = await publish("one");
  const second = await publish("two");
  await repository.bindAlias("gone", first.id);
  await repository.delete(first.id);
  await repository.delete(first.id);
  expect(await repository.get(first.id)).toBeUndefined();
  expect(await repository.resolve("gone")).toBeUndefined();
  expect(layersOnDisk()).toHaveLength(5);
  const kept = first.committed!.state.rootfs.lowers[1]!.file;
  expect((await repository.collect(new Set([kept]))).removedFiles).toBe(1);
  expect(existsSync(kept)).toBeTrue();
  const result = await repository.collect(new Set());
  expect(result).toEqual({ removedFiles: 1, removedBytes: "disk one".length });
  const layers = second.committed!.state.rootfs.lowers;
  expect(layers.every((layer) => existsSync(layer.file))).toBeTrue();
});

test("a lease keeps a deleted snapshot's layers until it is disposed", async () => {
  const made = await publish("one");
  const lease = await repository.lease(made.id);
  await repository.delete(made.id);
  expect((await repository.collect(new Set())).removedFiles).toBe(0);
  lease?.[Symbol.dispose]();
  lease?.[Symbol.dispose]();
  expect((await repository.collect(new Set())).removedFiles).toBe(3);
  expect(await repository.lease(made.id)).toBeUndefined();
});

test("young layers are not collected: another node may be publishing with them", async () => {
  const made = await publish("one");
  await repository.delete(made.id);
  const careful = createPosixRepository({ root: join(root, "repository"), log, collectGraceMs: 60_000 });
  expect((await careful.collect(new Set())).removedFiles).toBe(0);
});

test("a damaged stored layer fails the publication and leaves nothing behind", async () => {
  const made = await publish("one");
  writeFileSync(made.committed!.state.rootfs.lowers[0]!.file, "short");
  const id = newId();
  // A capture of its own inode: the damage must be noticed by the size.
  const state = captured(join(root, "capture", id), "two");
  await expect(repository.commit(recordOf(id, id, state), state)).rejects.toMatchObject({
    code: "layer_integrity_mismatch",
  });
  expect(existsSync(join(root, "repository/snapshots", id))).toBeFalse();
  expect(await repository.get(id)).toBeUndefined();
});

test("one damaged record: the others are listed, its own get names the file, nothing is collected", async () => {
  const good = await publish("one");
  const bad = await publish("two");
  writeFileSync(join(root, "repository/catalog/records", `${bad.id}.json`), "{");
  expect((await repository.list()).map((record) => record.id)).toEqual([good.id]);
  await expect(repository.get(bad.id)).rejects.toThrow(bad.id);
  await expect(repository.collect(new Set())).rejects.toThrow(bad.id);
  expect(layersOnDisk()).toHaveLength(5);
});

test.each(["{", "", "[]", "null", "7", '{"version":1}'])(
  "one damaged alias (%p): the others are listed with theirs, it is told by name, its snapshot can be deleted",
  async (damage) => {
    const good = await publish("one");
    const bad = await publish("two");
    await repository.bindAlias("good", good.id);
    await repository.bindAlias("bad", bad.id);
    writeFileSync(join(root, "repository/catalog/aliases/bad.json"), damage);
    const names = (await repository.list()).map(({ id, aliases }) => [id, aliases]);
    expect(Object.fromEntries(names)).toEqual({ [good.id]: ["good"], [bad.id]: [] });
    await expect(repository.resolve("bad")).rejects.toMatchObject({
      code: "snapshot_alias_invalid",
      message: expect.stringContaining("aliases/bad.json"),
    });
    expect((await repository.get(bad.id))?.aliases).toEqual([]);
    await repository.delete(bad.id);
    expect(await repository.get(bad.id)).toBeUndefined();
  },
);

test("status updates keep what was committed, and never the other way round", async () => {
  const made = await publish("one");
  await repository.put(recordOf(made.id));
  expect((await repository.get(made.id))?.committed).toEqual(made.committed);
  const id = newId();
  await repository.put(recordOf(id));
  expect((await repository.get(id))?.committed).toBeUndefined();
  const state = captured(join(root, "again"), "three");
  await expect(repository.commit(recordOf(made.id, made.id, state), state)).rejects.toMatchObject({
    code: "snapshot_exists",
  });
});

test("kill -9 in the middle of publications: every snapshot is there completely or not at all", async () => {
  const script = `
    import { createPosixRepository } from ${JSON.stringify(join(import.meta.dir, "posix.ts"))};
    import { createLogger } from ${JSON.stringify(join(import.meta.dir, "../lib/log.ts"))};
    import { mkdirSync, writeFileSync, writeSync } from "node:fs";
    const base = ${JSON.stringify(root)};
    const repository = createPosixRepository({ root: base + "/repository", log: createLogger("t") });
    for (let i = 0; ; i++) {
      const id = Bun.randomUUIDv7();
      const dir = base + "/child/" + id;
      mkdirSync(dir, { recursive: true });
      const file = (name, text) => (writeFileSync(dir + "/" + name, text), dir + "/" + name);
      const state = { version: 1, vm: {}, shape: { vcpuCount: 1, memoryMiB: 1 }, deviceStatePath: file("d", "device"),
        memory: { sizeBytes: 1 << 20, layers: [{ file: file("m", "memory " + id) }] },
        rootfs: { virtualSizeBytes: 1 << 20, lowers: [{ file: file("r", "disk " + id) }] }, envdVersion: "0.5.15" };
      const record = { id, templateId: id, aliases: [], public: true, createdAt: "x", updatedAt: "x",
        source: { kind: "template", build: { status: "ready" }, names: [] }, resources: { cpuCount: 1, memoryMiB: 1, diskSizeMiB: 1 },
        committed: { state, context: { envVars: {}, exposedPorts: [], volumes: [], labels: {} } } };
      await repository.commit(record, state);
      await repository.bindAlias("n-" + i, id);
      writeSync(1, id + "\\n");
    }
  `;
  const told: string[] = [];
  for (let round = 0; round < 6; round++) {
    const child = Bun.spawn([process.execPath, "-e", script], { stdout: "pipe", stderr: "inherit" });
    let output = "";
    const decoder = new TextDecoder();
    for await (const chunk of child.stdout) {
      // From its first word on, at a moment of its own.
      if (output === "") setTimeout(() => child.kill("SIGKILL"), 3 + round * 17);
      output += decoder.decode(chunk);
    }
    await child.exited;
    told.push(...output.split("\n").filter((line) => line.length === 36));
    rmSync(join(root, "repository/catalog/aliases"), { recursive: true, force: true });
    mkdirSync(join(root, "repository/catalog/aliases"), { recursive: true });
  }
  const records = await repository.list();
  expect(told.length).toBeGreaterThan(0);
  for (const id of told) expect(records.find((record) => record.id === id)?.committed).toBeDefined();
  for (const record of records) {
    const state = record.committed!.state;
    expect(readFileSync(state.deviceStatePath, "utf8")).toBe("device");
    expect(readFileSync(state.memory.layers[0]!.file, "utf8")).toBe(`memory ${record.id}`);
    expect(readFileSync(state.rootfs.lowers[0]!.file, "utf8")).toBe(`disk ${record.id}`);
  }
  await repository.collect(new Set());
  expect(layersOnDisk()).toHaveLength(records.length * 2);
  expect(readdirSync(join(root, "repository/snapshots"))).toHaveLength(records.length);
});
