import { CONFIG_KEYS, type ConfigKey } from "./keys.ts";
import type { RawConfig } from "./schema.ts";
import { getAt } from "./tree.ts";
import type { Problem } from "./validate.ts";

/**
 * Parts of the contract that this version does not have. A key that would switch one on is refused where a
 * server would start with it; a key that only tunes one is accepted, and told when it is not the default.
 * Who builds a part takes its lines out of here.
 */
const SWITCHES: readonly {
  readonly key: string;
  readonly on: (value: unknown) => boolean;
  readonly part: string;
}[] = [
  { key: "virtualization_mode", on: (value) => value === "pvm", part: "the PVM mode" },
  {
    key: "observability.scheduler_report.enabled",
    on: (value) => value === true,
    part: "the report to a scheduler",
  },
  { key: "p2p.enabled", on: (value) => value === true, part: "the exchange between nodes" },
  { key: "custom_extension.url", on: (value) => value !== undefined, part: "extension hooks" },
  { key: "snapshot.repository_backend", on: (value) => value === "oss", part: "the S3 repository" },
  { key: "ublk.overlaybd.read_only", on: (value) => value === true, part: "disks without a writable layer" },
];

/** Dotted names or, with a trailing dot, whole tables. */
const WITHOUT_EFFECT: readonly string[] = [
  "firecracker.version",
  "firecracker.url",
  "firecracker.boot_args",
  "firecracker.socket_timeout_secs",
  "firecracker.socket_poll_ms",
  "firecracker.work_dir",
  "firecracker.serial_dir",
  "firecracker.log_level",
  "kernel.version",
  "kernel.url",
  "tools.",
  "overlaybd.",
  "image.cache.remote_blocks.",
  "envd.version",
  "volume.",
  "pool.block.",
  "pool.firecracker.",
  "observability.scheduler_report.",
  "cluster.",
  "p2p.",
  "custom_extension.",
  "snapshot.",
  "backend.oss.",
  "ublk.daemon_binary_path",
  "ublk.overlaybd.global_config_path",
  "ublk.overlaybd.read_only",
  "ublk.overlaybd.runtime_upper_mode",
  "ublk.overlaybd.resize_timeout_secs",
  "ublk.overlaybd.download_enable",
  "ublk.overlaybd.p2p_lookup_timeout_ms",
  "ublk.overlaybd.p2p_fetch_range_timeout_ms",
  "memory_snapshot.overlaybd_global_config_path",
  "memory_snapshot.track_dirty_pages",
  "memory_snapshot.background_download.",
  "template_build.builder_image",
  "template_build.builder_cpu_count",
  "template_build.builder_memory_mb",
  "template_build.cache_size_mb",
];

/** True: the key is read and checked, and nothing in this version acts on it. */
export function hasNoEffect(name: string): boolean {
  return WITHOUT_EFFECT.some((entry) => (entry.endsWith(".") ? name.startsWith(entry) : name === entry));
}

/** What is switched on and not there: one problem per key. */
export function unbuiltProblems(config: RawConfig): Problem[] {
  return SWITCHES.flatMap(({ key, on, part }) => {
    const value = getAt(config, key.split("."));
    return on(value) ? [{ key, value, rule: `this version does not have ${part}` }] : [];
  });
}

/** Keys without effect that have been given a value of their own. `given` tells which the file or the environment sets. */
export function withoutEffectWarnings(
  config: RawConfig,
  pristine: RawConfig,
  given: (key: ConfigKey) => boolean,
): string[] {
  return CONFIG_KEYS.filter((key) => hasNoEffect(key.name) && given(key)).flatMap((key) =>
    Bun.deepEquals(getAt(config, key.parts), getAt(pristine, key.parts))
      ? []
      : [`${key.name} has no effect in this version`],
  );
}
