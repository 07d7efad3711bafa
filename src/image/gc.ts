/** Bounds of the image cache. */
export interface ImageGcPolicy {
  /** Of all converted layers together; absent: unbounded, only unused layers go. */
  readonly capacityBytes?: number;
  /** Parts of the capacity: filled above `high`, images are dropped until `low`. */
  readonly highWatermark: number;
  readonly lowWatermark: number;
  /** What was used or made within this time stays. */
  readonly minAgeMs: number;
}

export interface CachedImageUse {
  /** Digest of the image's manifest. */
  readonly key: string;
  readonly lastUsedMs: number;
  /** Digests of its layers. */
  readonly layers: readonly string[];
}

export interface CachedCommit {
  readonly digest: string;
  readonly sizeBytes: number;
  readonly modifiedMs: number;
  /** A sandbox, a paused one, a build or a cached build step needs it. */
  readonly pinned: boolean;
}

export interface ImageGcPlan {
  readonly images: readonly string[];
  readonly commits: readonly string[];
  readonly freedBytes: number;
}

/**
 * What to remove. Layers stay while an image that stays, or a pin, needs them; a layer that images share counts
 * only when the last of them goes. Images go by age of their last use, and never before `minAgeMs`; so the
 * cache may be above its capacity as long as everything in it is in use.
 */
export function planImageGc(
  images: readonly CachedImageUse[],
  commits: readonly CachedCommit[],
  policy: ImageGcPolicy,
  nowMs: number,
): ImageGcPlan {
  const users = new Map<string, number>();
  for (const { layers } of images)
    for (const layer of new Set(layers)) users.set(layer, (users.get(layer) ?? 0) + 1);
  const byDigest = new Map(commits.map((commit) => [commit.digest, commit]));
  const isOld = (ms: number): boolean => nowMs - ms >= policy.minAgeMs;
  const removable = (commit: CachedCommit | undefined): commit is CachedCommit =>
    commit !== undefined && !commit.pinned && isOld(commit.modifiedMs);

  let total = commits.reduce((sum, { sizeBytes }) => sum + sizeBytes, 0);
  const doomed = new Map<string, CachedCommit>();
  const doom = (commit: CachedCommit): void => {
    if (doomed.has(commit.digest)) return;
    doomed.set(commit.digest, commit);
    total -= commit.sizeBytes;
  };
  for (const commit of commits) if (!users.has(commit.digest) && removable(commit)) doom(commit);

  const dropped: string[] = [];
  const capacity = policy.capacityBytes ?? Number.POSITIVE_INFINITY;
  if (total > capacity * policy.highWatermark) {
    for (const image of [...images].sort((a, b) => a.lastUsedMs - b.lastUsedMs)) {
      if (total <= capacity * policy.lowWatermark) break;
      if (!isOld(image.lastUsedMs)) break;
      dropped.push(image.key);
      for (const layer of new Set(image.layers)) {
        const left = users.get(layer)! - 1;
        users.set(layer, left);
        const commit = byDigest.get(layer);
        if (left === 0 && removable(commit)) doom(commit);
      }
    }
  }
  const freedBytes = [...doomed.values()].reduce((sum, { sizeBytes }) => sum + sizeBytes, 0);
  return { images: dropped, commits: [...doomed.keys()], freedBytes };
}
