import { afterAll, beforeAll, beforeEach, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readdirSync, rmSync, truncateSync, utimesSync } from "node:fs";
import { join } from "node:path";
import { compress, makeTar } from "../../tests/support/oci.ts";
import { createLogger } from "../lib/log.ts";
import { listArchive } from "./archive.ts";
import { FileStore } from "./files.ts";

const log = createLogger("test");
log.level = "silent";
const never = new AbortController().signal;
const T1 = "11111111-1111-4111-8111-111111111111";
const T2 = "22222222-2222-4222-8222-222222222222";
const hash = (digit: string): string => digit.repeat(64);

let base: string;
let root: string;
beforeAll(() => {
  base = mkdtempSync("/tmp/image6-files-");
});
afterAll(() => rmSync(base, { recursive: true, force: true }));
beforeEach(() => {
  root = mkdtempSync(join(base, "f-"));
});

async function open(limits: { maxUploadBytes?: number; maxTotalBytes?: number } = {}): Promise<FileStore> {
  const store = new FileStore({
    root,
    maxUploadBytes: 1 << 20,
    maxTotalBytes: 1 << 24,
    archive: { maxEntries: 100, maxContentBytes: 1 << 24 },
    log,
    ...limits,
  });
  await store.start();
  return store;
}

const archive = (content = "x"): Uint8Array => makeTar([{ path: "a", content }]);

async function* pieces(bytes: Uint8Array, then?: () => void): AsyncGenerator<Uint8Array> {
  for (let at = 0; at < bytes.length; at += 700) yield bytes.subarray(at, at + 700);
  then?.();
}

const staged = (): string[] => readdirSync(join(root, "staging"));

test("an archive is there once it is whole and checked, for its template alone, also after a restart", async () => {
  const store = await open();
  expect(await store.has(T1, hash("a"))).toBe(false);
  await store.put(T1, hash("a"), pieces(compress(archive(), "gzip")), { signal: never });
  expect(await store.has(T1, hash("a"))).toBe(true);
  expect(await store.has(T2, hash("a"))).toBe(false);
  expect(await store.has(T1, hash("b"))).toBe(false);
  const again = await open();
  using lease = await again.lease(T1, hash("a"));
  expect(lease?.size).toBe(compress(archive(), "gzip").length);
  await again.remove(T1);
  expect(await again.has(T1, hash("a"))).toBe(false);
  expect(staged()).toEqual([]);
});

test("what is cut off, too large, not an archive or given up leaves nothing, and what was there stays", async () => {
  const store = await open({ maxUploadBytes: 4096 });
  await store.put(T1, hash("a"), pieces(archive("first")), { signal: never });
  const before = (await store.lease(T1, hash("a")))!.size;
  const put = (bytes: Uint8Array, declared?: number) =>
    store.put(T1, hash("a"), pieces(bytes), { signal: never, declaredBytes: declared });
  await expect(put(archive().subarray(0, 1000))).rejects.toMatchObject({
    code: "invalid_archive",
    status: 400,
  });
  await expect(put(archive(), 5000)).rejects.toMatchObject({ code: "upload_too_large", status: 413 });
  await expect(put(archive(), archive().length + 1)).rejects.toMatchObject({ code: "invalid_archive" });
  await expect(put(archive("y".repeat(9000)))).rejects.toMatchObject({ code: "upload_too_large" });
  await expect(put(Buffer.from("hello"))).rejects.toMatchObject({ code: "invalid_archive" });
  await expect(put(makeTar([{ path: "../x", content: "x" }]))).rejects.toMatchObject({
    code: "invalid_archive",
  });
  const gone = pieces(archive(), () => {
    throw new Error("the client is gone");
  });
  await expect(store.put(T1, hash("a"), gone, { signal: never })).rejects.toThrow("the client is gone");
  expect((await store.lease(T1, hash("a")))?.size).toBe(before);
  expect(staged()).toEqual([]);
});

test("a full disk is told as such and frees what was written", async () => {
  if (process.getuid?.() !== 0) return console.warn("skipped: needs root for a small tmpfs");
  expect(Bun.spawnSync(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", root]).exitCode).toBe(0);
  try {
    const store = await open();
    const large = store.put(T1, hash("a"), pieces(archive("z".repeat(600_000))), { signal: never });
    await expect(large).rejects.toMatchObject({ code: "disk_full", status: 507 });
    expect(staged()).toEqual([]);
    await store.put(T1, hash("a"), pieces(archive()), { signal: never });
    expect(await store.has(T1, hash("a"))).toBe(true);
  } finally {
    Bun.spawnSync(["umount", root]);
  }
});

test("a short file is not served; the oldest go first when all of them are too much, leased ones stay", async () => {
  const store = await open({ maxTotalBytes: 25_000 });
  const put = (digit: string) =>
    store.put(T1, hash(digit), pieces(archive("w".repeat(9000))), { signal: never });
  await put("a");
  await put("b");
  const old = new Date(Date.now() - 60_000);
  utimesSync(join(root, T1, `${hash("b")}.json`), old, old);
  using lease = await store.lease(T1, hash("a"));
  expect(lease).toBeDefined();
  const older = new Date(Date.now() - 90_000);
  utimesSync(join(root, T1, `${hash("a")}.json`), older, older);
  await put("c");
  expect(["a", "b", "c"].map((digit) => existsSync(join(root, T1, `${hash(digit)}.tar`)))).toEqual([
    true,
    false,
    true,
  ]);
  truncateSync(join(root, T1, `${hash("c")}.tar`), 100);
  expect(await store.has(T1, hash("c"))).toBe(false);
  await store.sweep(new Set());
  expect(readdirSync(root)).toEqual(["staging"]);
});

test("the names of an archive are bounded together", async () => {
  const path = join(root, "names.tar");
  await Bun.write(path, makeTar(["aaaa", "bbbb", "cccc"].map((name) => ({ path: name, content: "" }))));
  const limits = { maxEntries: 10, maxContentBytes: 10 };
  expect((await listArchive(path, { ...limits, maxNameBytes: 12 }, never)).members).toHaveLength(3);
  await expect(listArchive(path, { ...limits, maxNameBytes: 11 }, never)).rejects.toMatchObject({
    code: "invalid_archive",
    status: 400,
  });
});
