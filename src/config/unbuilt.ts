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
  "kernel.version",
  "kernel.url",
  "tools.",
  "overlaybd.",
  "image.cache.remote_blocks.",
  "envd.version",
  "volume.",
  "pool.block.startup_prewarm",
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

/** Keys that mean something to Firecracker alone. */
function isFirecrackers(name: string): boolean {
  if (["firecracker.allowed_extra_boot_args_prefixes", "firecracker.boot_args"].includes(name)) return false;
  return (
    name.startsWith("firecracker.") ||
    name.startsWith("pool.firecracker.") ||
    name === "memory_snapshot.track_dirty_pages"
  );
}

/** The VMM that each virtualization mode needs, where it is one alone. */
const MODE_VMM: Readonly<Record<string, RawConfig["vmm"]>> = { pvm: "firecracker", tcg: "qemu" };

/** What is switched on and not there, or not together: one problem per key. */
export function unbuiltProblems(config: RawConfig): Problem[] {
  const { virtualization_mode: mode } = config;
  const vmm = MODE_VMM[mode] ?? config.vmm;
  const together: Problem[] =
    vmm === config.vmm ? [] : [{ key: "virtualization_mode", value: mode, rule: `needs vmm = "${vmm}"` }];
  const unbuilt = SWITCHES.flatMap(({ key, on, part }) => {
    const value = getAt(config, key.split("."));
    return on(value) ? [{ key, value, rule: `this version does not have ${part}` }] : [];
  });
  return [...together, ...unbuilt];
}

/** Keys without effect that have been given a value of their own. `given` tells which the file or the environment sets. */
export function withoutEffectWarnings(
  config: RawConfig,
  pristine: RawConfig,
  given: (key: ConfigKey) => boolean,
): string[] {
  return CONFIG_KEYS.filter((key) => given(key)).flatMap((key) => {
    const idle = config.vmm === "qemu" && isFirecrackers(key.name);
    if (!hasNoEffect(key.name) && !idle) return [];
    if (Bun.deepEquals(getAt(config, key.parts), getAt(pristine, key.parts))) return [];
    return [`${key.name} has no effect ${hasNoEffect(key.name) ? "in this version" : 'with vmm = "qemu"'}`];
  });
}
