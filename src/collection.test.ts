import { afterAll, beforeAll, expect, test } from "bun:test";
import { existsSync, mkdirSync, mkdtempSync, rmSync, utimesSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { eventually } from "../tests/support/eventually.ts";
import { startCollection } from "./collection.ts";
import { createImageService } from "./image/index.ts";
import { createLogger } from "./lib/log.ts";
import { createPosixRepository } from "./snapshot/index.ts";
import type { BlockClient } from "./storage/blockd/protocol.ts";

/* The timer of the collections with the real repository and image cache on a real file system. */

const MINUTE_MS = 60_000;
const INTERVAL_MS = 20;
const log = createLogger("test");
log.level = "silent";
let base: string;

beforeAll(() => {
  base = mkdtempSync("/tmp/collection-");
});
afterAll(() => rmSync(base, { recursive: true, force: true }));

const hex = (digit: string): string => digit.repeat(64);

test("what nothing needs goes with the timer, what is young or pinned stays; a failure ends neither; disposal does", async () => {
  const repositoryDir = join(base, "repository");
  const cacheDir = join(base, "images");
  const repository = createPosixRepository({ root: repositoryDir, log, collectGraceMs: 0 });
  // No device is exported, which is all that a collection asks it.
  const blockClient = { list: async () => [] } satisfies Partial<BlockClient> as unknown as BlockClient;
  await using images = createImageService(
    {
      cacheDir,
      defaultImage: "debian:12",
      virtualSizeBytes: 1 << 30,
      searchRegistries: [],
      allowLocalPaths: false,
      convertStandardOci: true,
      gc: { highWatermark: 0.9, lowWatermark: 0.5, minAgeMs: MINUTE_MS },
    },
    { blockClient, ext4Helper: "/nonexistent", log },
  );
  const layer = (digit: string): string => {
    const dir = join(repositoryDir, "managed-layers");
    mkdirSync(dir, { recursive: true });
    const file = join(dir, `sha256_${hex(digit)}.overlaybd.commit`);
    writeFileSync(file, "layer");
    return file;
  };
  const commit = (digit: string, ageMs: number): string => {
    const dir = join(cacheDir, "commits", `sha256-${hex(digit)}`);
    mkdirSync(dir, { recursive: true });
    const file = join(dir, "overlaybd.commit");
    writeFileSync(file, "commit");
    const at = new Date(Date.now() - ageMs);
    utimesSync(file, at, at);
    return file;
  };
  const gone = (file: string) => eventually(`${file} is collected`, () => !existsSync(file));

  const [pinnedLayer, pinnedCommit] = [layer("1"), commit("1", 2 * MINUTE_MS)];
  const youngCommit = commit("2", 0);
  const first = [layer("3"), commit("3", 2 * MINUTE_MS)];
  let [rounds, open, most] = [0, 0, 0];
  const collection = startCollection({
    intervalMs: INTERVAL_MS,
    layers: async () => {
      rounds += 1;
      open += 1;
      most = Math.max(most, open);
      // Longer than the interval: the next round waits for it.
      await Bun.sleep(2 * INTERVAL_MS);
      open -= 1;
      await repository.collect(new Set([pinnedLayer]));
    },
    images: () => images.collect(new Set([pinnedCommit])),
    log,
  });
  try {
    for (const file of first) await gone(file);
    const record = join(repositoryDir, "catalog/records", "01a22b8a-2265-7314-b31e-d5bd535f6167.json");
    // What an unreadable record refers to is not known: no layer is collected, images are.
    writeFileSync(record, "{");
    const [kept, image] = [layer("4"), commit("4", 2 * MINUTE_MS)];
    const before = rounds;
    await gone(image);
    await eventually("three rounds failed", () => rounds >= before + 3);
    expect(existsSync(kept)).toBeTrue();
    rmSync(record);
    await gone(kept);
    expect([pinnedLayer, pinnedCommit, youngCommit].map((file) => existsSync(file))).toEqual([
      true,
      true,
      true,
    ]);
    expect(most).toBe(1);
    await eventually("a round runs", () => open === 1);
  } finally {
    await collection[Symbol.asyncDispose]();
  }
  expect(open).toBe(0);
  const [late, ended] = [layer("5"), rounds];
  await Bun.sleep(4 * INTERVAL_MS);
  expect([existsSync(late), rounds]).toEqual([true, ended]);
});

test("where the image cache is not to be collected, only layers are", async () => {
  let rounds = 0;
  await using _ = startCollection({ intervalMs: 1, layers: async () => (rounds += 1), log });
  await eventually("it went on", () => rounds >= 3);
});
