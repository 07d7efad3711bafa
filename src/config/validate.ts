import { realpathSync } from "node:fs";
import { basename, dirname, join, normalize } from "node:path";
import { cidrsOverlap, type Ipv4Cidr, parseCidr } from "../lib/ipv4.ts";
import type { RawConfig } from "./schema.ts";

/** One broken rule: the key, what it has, and what it must be. */
export interface Problem {
  readonly key: string;
  readonly value?: unknown;
  readonly rule: string;
}

const MIB = 1024 * 1024;
const VM_LINK = parseCidr("169.254.0.20/30")!;

/** Rules that look at more than one key. `warnings` gets what is accepted but has no effect. */
export function crossKeyProblems(config: RawConfig, warnings: string[]): Problem[] {
  return [
    ...gcProblems(config),
    ...toolsProblems(config),
    ...firecrackerProblems(config),
    ...networkProblems(config),
    ...rateProblems(config),
    ...poolProblems(config),
    ...reportProblems(config),
    ...downloadProblems(config),
    ...backendProblems(config, warnings),
    ...generatedFileProblems(config),
  ];
}

function gcProblems({ image: { cache } }: RawConfig): Problem[] {
  const { low_watermark_ratio: low, high_watermark_ratio: high } = cache.gc;
  if (low <= high) return [];
  return [
    {
      key: "image.cache.gc.low_watermark_ratio",
      value: low,
      rule: `must be at most image.cache.gc.high_watermark_ratio (${high})`,
    },
  ];
}

function toolsProblems({ tools }: RawConfig): Problem[] {
  if (tools.version !== undefined) return [];
  return (["url", "drive_path"] as const)
    .filter((name) => tools[name] !== undefined)
    .map((name) => ({
      key: `tools.${name}`,
      value: tools[name],
      rule: "needs tools.version to be set, too",
    }));
}

function firecrackerProblems({ firecracker }: RawConfig): Problem[] {
  const problems: Problem[] = [];
  if (firecracker.cpu_template !== undefined && firecracker.cpu_template_path !== undefined) {
    problems.push({
      key: "firecracker.cpu_template",
      value: firecracker.cpu_template,
      rule: "and firecracker.cpu_template_path exclude each other",
    });
  }
  if (firecracker.jail_uid + firecracker.jail_uid_count > 2 ** 32 - 1) {
    problems.push({
      key: "firecracker.jail_uid_count",
      value: firecracker.jail_uid_count,
      rule: "ends beyond the last user id, 4294967294",
    });
  }
  return problems;
}

function networkProblems({ network: { internal } }: RawConfig): Problem[] {
  const pools: [key: string, text: string, cidr: Ipv4Cidr, minimum: number][] = [
    [
      "network.internal.host_interaction_cidr",
      internal.host_interaction_cidr,
      parseCidr(internal.host_interaction_cidr)!,
      32768,
    ],
    ["network.internal.veth_cidr", internal.veth_cidr, parseCidr(internal.veth_cidr)!, 65536],
  ];
  const problems: Problem[] = [];
  for (const [key, value, cidr, minimum] of pools) {
    if (cidr.addressCount < minimum) {
      problems.push({ key, value, rule: `must have at least ${minimum} addresses` });
    }
    if (cidrsOverlap(cidr, VM_LINK)) {
      problems.push({ key, value, rule: "must not overlap the fixed VM link 169.254.0.20/30" });
    }
  }
  if (cidrsOverlap(pools[0]![2], pools[1]![2])) {
    problems.push({
      key: "network.internal.veth_cidr",
      value: internal.veth_cidr,
      rule: `must not overlap network.internal.host_interaction_cidr (${internal.host_interaction_cidr})`,
    });
  }
  return problems;
}

/** A burst comes on top of a rate. */
function burstProblems<
  Table extends { readonly enabled: boolean },
  Key extends Exclude<keyof Table & string, "enabled">,
>(table: string, limit: Table, pairs: readonly (readonly [burst: Key, sustained: Key])[]): Problem[] {
  if (!limit.enabled) return [];
  return pairs
    .filter(([burst, sustained]) => Number(limit[burst]) > 0 && Number(limit[sustained]) === 0)
    .map(([burst, sustained]) => ({
      key: `${table}.${burst}`,
      value: limit[burst],
      rule: `needs a ${table}.${sustained} above 0`,
    }));
}

function rateProblems({ machine }: RawConfig): Problem[] {
  return [
    ...burstProblems("machine.disk_rate_limit", machine.disk_rate_limit, [
      ["bandwidth_burst_bytes", "bandwidth_bytes_per_sec"],
      ["iops_burst", "iops"],
    ]),
    ...burstProblems("machine.network_rate_limit", machine.network_rate_limit, [
      ["receive_burst_bytes", "receive_bytes_per_sec"],
      ["send_burst_bytes", "send_bytes_per_sec"],
    ]),
  ];
}

function poolProblems({ pool }: RawConfig): Problem[] {
  const watermarksUsed =
    (pool.network.enabled && pool.network.maintenance_enabled) ||
    pool.block.enabled ||
    pool.firecracker.enabled;
  const problems: Problem[] = [];
  if (watermarksUsed && pool.low_watermark > pool.high_watermark) {
    problems.push({
      key: "pool.low_watermark",
      value: pool.low_watermark,
      rule: `must be at most pool.high_watermark (${pool.high_watermark})`,
    });
  }
  if (pool.firecracker.enabled && pool.firecracker.fill_concurrency === 0) {
    problems.push({ key: "pool.firecracker.fill_concurrency", value: 0, rule: "must be above 0" });
  }
  return problems;
}

function reportProblems({ observability, cluster }: RawConfig): Problem[] {
  if (!observability.scheduler_report.enabled || cluster.scheduler_endpoint !== undefined) return [];
  return [
    {
      key: "observability.scheduler_report.enabled",
      value: true,
      rule: "needs cluster.scheduler_endpoint (or AENV_OBSERVABILITY_SCHEDULER_ENDPOINT)",
    },
  ];
}

function downloadProblems({ memory_snapshot: { background_download: download } }: RawConfig): Problem[] {
  const limits = [
    ["concurrency", 256 * MIB],
    ["max_inflight_blocks", 2048 * MIB],
  ] as const;
  return limits
    .filter(([name, limit]) => download.block_size * download[name] > limit)
    .map(([name, limit]) => ({
      key: `memory_snapshot.background_download.${name}`,
      value: download[name],
      rule: `times block_size (${download.block_size}) must be at most ${limit / MIB} MiB`,
    }));
}

function backendProblems(config: RawConfig, warnings: string[]): Problem[] {
  const { snapshot, backend } = config;
  if (snapshot.repository_backend !== "oss") {
    return snapshot.image_publish.enabled
      ? [
          {
            key: "snapshot.image_publish.enabled",
            value: true,
            rule: 'works only with snapshot.repository_backend = "oss"',
          },
        ]
      : [];
  }
  const { oss } = backend;
  if (oss === undefined) {
    return [{ key: "backend.oss", rule: 'is required when snapshot.repository_backend = "oss"' }];
  }
  const given = (["access_key_id", "access_key_secret", "security_token"] as const).filter(
    (name) => oss[name] !== undefined,
  );
  if (oss.credential_process !== undefined) {
    if (given.length > 0) {
      warnings.push(
        `backend.oss.credential_process is set: ${given.map((name) => `backend.oss.${name}`).join(", ")} ignored`,
      );
    }
    return [];
  }
  const problems: Problem[] = (["access_key_id", "access_key_secret"] as const)
    .filter((name) => oss[name] === undefined)
    .map((name) => ({
      key: `backend.oss.${name}`,
      rule: "is required: anonymous access is refused (or set backend.oss.credential_process)",
    }));
  return problems;
}

/** The path with its directory as the file system names it, as far as that exists. */
function canonical(path: string): string {
  let dir = dirname(path);
  let rest = basename(path);
  for (;;) {
    try {
      return join(realpathSync(dir), rest);
    } catch (error) {
      if (!(error instanceof Error && "code" in error && error.code === "ENOENT") || dir === dirname(dir)) {
        return normalize(path);
      }
      rest = join(basename(dir), rest);
      dir = dirname(dir);
    }
  }
}

function generatedFileProblems(config: RawConfig): Problem[] {
  const rootfs = config.ublk.overlaybd.global_config_path;
  const files: [key: string, path: string][] = [
    ["ublk.overlaybd.global_config_path", rootfs],
    ["memory_snapshot.overlaybd_global_config_path", config.memory_snapshot.overlaybd_global_config_path],
    [
      "the conversion file beside ublk.overlaybd.global_config_path",
      join(dirname(rootfs), "convert-overlaybd-global.json"),
    ],
    [
      "the resize file beside ublk.overlaybd.global_config_path",
      join(dirname(rootfs), "resize-overlaybd-global.json"),
    ],
  ];
  const problems: Problem[] = [];
  files.forEach(([key, path], i) => {
    for (const [otherKey, otherPath] of files.slice(0, i)) {
      const same = normalize(path) === normalize(otherPath) || canonical(path) === canonical(otherPath);
      if (same) problems.push({ key, value: path, rule: `must not be the same file as ${otherKey}` });
    }
  });
  return problems;
}
