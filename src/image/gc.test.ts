import { describe, expect, test } from "bun:test";
import { type CachedCommit, type CachedImageUse, type ImageGcPolicy, planImageGc } from "./gc.ts";

const NOW = 1_000_000;
const policy = (capacityBytes?: number): ImageGcPolicy => ({
  ...(capacityBytes === undefined ? {} : { capacityBytes }),
  highWatermark: 0.9,
  lowWatermark: 0.5,
  minAgeMs: 100,
});
const image = (key: string, ageMs: number, ...layers: string[]): CachedImageUse => ({
  key,
  lastUsedMs: NOW - ageMs,
  layers,
});
const commit = (digest: string, sizeBytes: number, more: Partial<CachedCommit> = {}): CachedCommit => ({
  digest,
  sizeBytes,
  modifiedMs: NOW - 1000,
  pinned: false,
  ...more,
});

describe("what is collected", () => {
  test("without pressure only layers that nobody names, and neither young nor pinned ones", () => {
    const commits = [
      commit("used", 50),
      commit("left", 7),
      commit("young", 5, { modifiedMs: NOW - 99 }),
      commit("pinned", 5, { pinned: true }),
    ];
    const plan = planImageGc([image("i", 5000, "used")], commits, policy(), NOW);
    expect(plan).toEqual({ images: [], commits: ["left"], freedBytes: 7 });
  });

  test("above the high watermark images go by their last use until the low one; shared layers go with the last", () => {
    const images = [
      image("new", 50, "base", "n"),
      image("old", 4000, "base", "o"),
      image("older", 5000, "base", "p"),
    ];
    const commits = [commit("base", 40), commit("n", 10), commit("o", 30), commit("p", 20)];
    // 100 bytes: just above 90 % of 110, to be at most 55.
    expect(planImageGc(images, commits, policy(110), NOW)).toEqual({
      images: ["older", "old"],
      commits: ["p", "o"],
      freedBytes: 50,
    });
    expect(planImageGc(images, commits, policy(112), NOW).images).toEqual([]);
    // Everything that is left is in use: the cache stays above its capacity.
    expect(planImageGc(images, commits, policy(20), NOW)).toEqual({
      images: ["older", "old"],
      commits: ["p", "o"],
      freedBytes: 50,
    });
  });

  test("a pinned layer stays when its image goes", () => {
    const commits = [commit("a", 60, { pinned: true }), commit("b", 40)];
    const plan = planImageGc([image("i", 9000, "a", "b")], commits, policy(50), NOW);
    expect(plan).toEqual({ images: ["i"], commits: ["b"], freedBytes: 40 });
  });
});
