import { z } from "zod";
import { parseCidr, parseIpv4 } from "../lib/ipv4.ts";

/**
 * Every key of the node configuration, under its TOML name. Defaults are the built-in ones; the packaged
 * file (config/default.toml) may ship others. Rules that look at one value are here, those that look at
 * several are in validate.ts.
 */

export interface KeyMeta {
  /** Environment variable that overrides the key, and how its text is read. */
  readonly env?: string;
  readonly envKind?: "text" | "flag" | "integer" | "list";
  /** A blank variable is a value, too (elsewhere it counts as unset). */
  readonly blankEnvCounts?: boolean;
  /** Takes placeholders and is joined to the configuration file's directory; see paths.ts. */
  readonly path?: "state" | "home" | "socket" | "any";
  /** Never shown in messages or logs. */
  readonly secret?: boolean;
}

const metas = new WeakMap<object, KeyMeta>();

export function keyMeta(schema: object): KeyMeta {
  return metas.get(schema) ?? {};
}

/** Attaches facts to the schema of one key. Must be the last call: zod schemas are copied by every method. */
function key<Schema extends z.ZodType>(schema: Schema, meta: KeyMeta): Schema {
  metas.set(schema, meta);
  return schema;
}

/** A table that may be absent: all of its keys then have their defaults. */
function table<Shape extends z.ZodRawShape>(shape: Shape) {
  return z.object(shape).prefault({} as z.input<z.ZodObject<Shape>>);
}

const MAX_SAFE = Number.MAX_SAFE_INTEGER;
const U32 = 2 ** 32 - 1;

const text = (fallback: string) => z.string().trim().default(fallback);
const optionalText = () =>
  z
    .string()
    .transform((value) => (value.trim() === "" ? undefined : value.trim()))
    .optional();
const flag = (fallback: boolean) => z.boolean().default(fallback);
const integer = (fallback: number, min = 0, max = MAX_SAFE) =>
  z.int().min(min, `must be at least ${min}`).max(max, `must be at most ${max}`).default(fallback);
/** Longer ones, of timers, would be none at all: they count milliseconds in 31 bits. */
const MAX_TIMER_MS = 2 ** 31 - 1;
const MAX_TIMER_SECS = Math.floor(MAX_TIMER_MS / 1000);
const seconds = (fallback: number, min = 0) => integer(fallback, min, MAX_TIMER_SECS);
const milliseconds = (fallback: number, min = 0) => integer(fallback, min, MAX_TIMER_MS);
const ratio = (fallback: number) =>
  z
    .number()
    .refine((value) => Number.isFinite(value) && value > 0 && value <= 1, "must be above 0 and at most 1")
    .default(fallback);
const path = (fallback: string, env?: string) =>
  key(z.string().trim().min(1, "must not be empty").default(fallback), { path: "state", env });
const optionalPath = () => key(optionalText(), { path: "any" });
const cidr = () => z.string().trim().refine(isCidr, "must be an IPv4 CIDR such as 10.0.0.0/8");

function isCidr(value: string): boolean {
  return parseCidr(value) !== undefined;
}

/** u64 up to 2^63-1; TOML integers past 2^53 come as bigint and lose their last bits, which no rate needs. */
const rate = () =>
  z
    .union([z.int(), z.bigint()])
    .refine((value) => value >= 0 && value <= 2n ** 63n - 1n, "must be between 0 and 2^63-1")
    .transform(Number)
    .default(0);

/** One of some words, whatever the case they are written in. */
function word<const Words extends readonly [string, ...string[]]>(words: Words) {
  return z.string().transform((value, context): Words[number] => {
    const found = words.find((candidate) => candidate.toLowerCase() === value.trim().toLowerCase());
    if (found !== undefined) return found;
    context.issues.push({ code: "custom", input: value, message: `must be one of ${words.join(", ")}` });
    return z.NEVER;
  });
}

const DNS_LABEL = /^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$/;

/** Trimmed, lower-cased, without trailing dots and repeats; blanks dropped, order kept. */
const domains = z
  .array(z.string())
  .transform((entries, context) => {
    const names = new Set<string>();
    for (const entry of entries) {
      const name = entry.trim().replace(/\.+$/, "").toLowerCase();
      if (name === "") continue;
      if (name.length > 253 || !name.split(".").every((label) => DNS_LABEL.test(label))) {
        context.issues.push({ code: "custom", input: entry, message: `"${entry}" is not a DNS name` });
        continue;
      }
      names.add(name);
    }
    return [...names];
  })
  .default([]);

const cutSlashes = (value: string) => value.trim().replace(/\/+$/, "");
const registryList = z
  .array(z.string())
  .transform((list) => list.map(cutSlashes).filter((name) => name !== ""));
const searchRegistry = z
  .string()
  .refine(
    (value) => !value.includes("://") && !value.includes("@"),
    "must have neither a scheme nor a digest",
  );

const listenAddress = () =>
  z
    .string()
    .trim()
    .refine((value) => parseListenAddress(value) !== undefined, "must be HOST:PORT, e.g. 127.0.0.1:8000");

/** `host:port`, `[v6]:port`; undefined when malformed. */
export function parseListenAddress(value: string): { hostname: string; port: number } | undefined {
  const match = /^(?:\[([0-9a-fA-F:.]+)\]|([^:[\]\s]+)):(\d{1,5})$/.exec(value);
  const port = Number(match?.[3]);
  if (match === null || port > 65535) return undefined;
  return { hostname: match[1] ?? match[2] ?? "", port };
}

/** SemVer 2.0 without build metadata. */
const SEMVER = /^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?$/;

/** Schemes a URL of ours may have. */
const httpUrl = () =>
  z
    .string()
    .transform((value, context) => {
      const url = cutSlashes(value);
      if (url === "") return undefined;
      if (URL.canParse(url) && url.includes("://")) return url;
      context.issues.push({ code: "custom", input: value, message: "must be a URL with a scheme" });
      return z.NEVER;
    })
    .optional();

export const DEFAULT_BOOT_ARGS = [
  "console=ttyS0 reboot=k panic=1 pci=off",
  ...[
    "enabled=Y",
    "min_age=60000000",
    "quota_ms=100",
    "quota_sz=1073741824",
    "quota_reset_interval_ms=1000",
    "wmarks_high=900",
    "wmarks_mid=700",
    "wmarks_low=200",
    "skip_anon=Y",
    "wmarks_interval=5000000",
  ].map((parameter) => `damon_reclaim.${parameter}`),
].join(" ");

export const DEFAULT_ALWAYS_DENIED_CIDRS = [
  "10.0.0.0/8",
  "100.64.0.0/10",
  "127.0.0.0/8",
  "169.254.0.0/16",
  "172.16.0.0/12",
  "192.168.0.0/16",
];

const oss = z.object({
  endpoint: z.string().trim().min(1, "must not be empty"),
  bucket: z.string().trim().min(1, "must not be empty"),
  region: z.string().trim().min(1, "must not be empty"),
  prefix: text(""),
  access_key_id: key(optionalText(), { secret: true }),
  access_key_secret: key(optionalText(), { secret: true }),
  security_token: key(optionalText(), { secret: true }),
  credential_process: optionalText(),
  addressing_style: word(["path", "virtual"]).optional(),
  cache_max_size_gb: integer(10),
});

export const configSchema = z.object({
  home_path: key(z.string().trim().min(1, "must not be empty").default("/var/lib/aenv"), {
    path: "home",
    env: "AENV_HOME_PATH",
  }),
  runtime_path: path("/run/aenv", "AENV_RUNTIME_PATH"),
  deps_path: path("$AENV_HOME/deps", "AENV_DEPS_PATH"),
  virtualization_mode: key(word(["auto", "kvm", "pvm", "tcg"]).default("auto"), {
    env: "AENV_VIRTUALIZATION_MODE",
  }),
  vmm: key(word(["qemu", "firecracker"]).default("qemu"), { env: "AENV_VMM" }),
  server: table({ listen: key(listenAddress().default("0.0.0.0:8000"), { env: "API_ADDR" }) }),
  firecracker: table({
    version: optionalText(),
    url: optionalText(),
    binary_path: optionalPath(),
    boot_args: text(DEFAULT_BOOT_ARGS),
    allowed_extra_boot_args_prefixes: z.array(z.string()).default([]),
    socket_timeout_secs: seconds(3, 1),
    socket_poll_ms: milliseconds(1, 1),
    work_dir: path("$AENV_HOME/firecracker-work", "AENV_FIRECRACKER_WORK_DIR"),
    serial_dir: path("$AENV_HOME/logs/serial", "AENV_FIRECRACKER_SERIAL_DIR"),
    log_level: z
      .union([
        z
          .string()
          .regex(/^\s*$/)
          .transform(() => undefined),
        word(["Error", "Warning", "Info", "Debug", "Trace"]),
      ])
      .optional(),
    cpu_template: word(["T2", "T2S", "T2CL", "T2A", "C3", "V1N1"]).optional(),
    cpu_template_path: optionalPath(),
    jailer_path: optionalPath(),
    jail_uid: integer(1_879_048_192, 1, U32 - 1),
    jail_uid_count: integer(65_536, 1, 1 << 20),
    jail_gid: integer(1_879_048_192, 1, U32 - 1),
    cgroup: z
      .string()
      .trim()
      .regex(/^([A-Za-z0-9_.@:-]+(\/[A-Za-z0-9_.@:-]+)*)?$/, "must be names separated by /, or empty")
      .refine((value) => !value.split("/").includes(".."), "must not contain ..")
      .default("agentenv"),
  }),
  qemu: table({ binary_path: optionalPath() }),
  kernel: table({ version: optionalText(), url: optionalText(), image_path: optionalPath() }),
  tools: table({
    version: z
      .string()
      .trim()
      .regex(SEMVER, "must be a SemVer version without build metadata, e.g. 0.1.0")
      .optional(),
    url: optionalText(),
    drive_path: optionalPath(),
    control_plane_port: integer(49983, 1, 65535),
  }),
  overlaybd: table({ version: optionalText(), package_url: optionalText(), url: optionalText() }),
  image: table({
    resolver: table({
      default_image: z
        .string()
        .transform((value) => value.trim() || "ubuntu:24.04")
        .default("ubuntu:24.04"),
      search_registries: z
        .array(searchRegistry)
        .transform((list) => list.map(cutSlashes).filter((name) => name !== ""))
        .default(["docker.io", "ghcr.io"]),
      convert_standard_oci: flag(true),
      allowed_registries: registryList.optional(),
      internal_hosts: registryList.default([]),
      try_referrers_overlaybd_prefixes: z
        .array(z.string())
        .transform((list) => list.map((prefix) => prefix.trim()).filter((prefix) => prefix !== ""))
        .default([]),
      allow_local_paths: flag(false),
    }),
    cache: table({
      root_dir: path("$AENV_HOME/image-cache"),
      capacity_gb: z.int().min(0, "must be at least 0").optional(),
      virtual_size_gib: integer(64, 1, 16383),
      remote_blocks: table({ max_size_gb: integer(10, 0, U32) }),
      gc: table({
        enabled: flag(true),
        interval_secs: z
          .int()
          .min(0, "must be at least 0")
          .max(MAX_TIMER_SECS, `must be at most ${MAX_TIMER_SECS}`)
          .transform((value) => (value === 0 ? 1800 : value))
          .default(1800),
        min_age_secs: integer(600),
        high_watermark_ratio: ratio(0.95),
        low_watermark_ratio: ratio(0.7),
      }),
    }),
  }),
  sandbox_proxy: table({ domains: key(domains, { env: "AENV_SANDBOX_PROXY_DOMAINS", envKind: "list" }) }),
  network: table({
    dns_server: z
      .string()
      .trim()
      .refine((value) => parseIpv4(value) !== undefined, "must be an IPv4 address")
      .optional(),
    egress: table({ always_denied_cidrs: z.array(cidr()).default(DEFAULT_ALWAYS_DENIED_CIDRS) }),
    internal: table({
      host_interaction_cidr: cidr().default("10.11.0.0/16"),
      veth_cidr: cidr().default("10.12.0.0/16"),
    }),
  }),
  machine: table({
    vcpu_count: integer(2, 1, U32),
    mem_size_mib: integer(1024, 1, U32),
    disk_rate_limit: table({
      enabled: flag(false),
      bandwidth_bytes_per_sec: rate(),
      bandwidth_burst_bytes: rate(),
      iops: rate(),
      iops_burst: rate(),
    }),
    network_rate_limit: table({
      enabled: flag(false),
      receive_bytes_per_sec: rate(),
      receive_burst_bytes: rate(),
      send_bytes_per_sec: rate(),
      send_burst_bytes: rate(),
    }),
  }),
  envd: table({ version: text("0.6.13"), init_timeout_secs: seconds(60, 1), poll_ms: milliseconds(3, 1) }),
  sandbox: table({
    access_token_hash_seed: key(z.string().trim().min(1, "must not be blank when set").optional(), {
      env: "AENV_SANDBOX_ACCESS_TOKEN_HASH_SEED",
      secret: true,
    }),
  }),
  volume: table({
    max_size_mb: integer(262144, 1),
    max_volumes_per_sandbox: integer(4),
    default_size_mb: integer(65536, 1),
  }),
  orchestrator: table({
    auto_evict_interval_ms: milliseconds(1000, 1),
    default_sandbox_timeout_secs: integer(15),
    auto_resume_min_sandbox_timeout_secs: integer(300),
    persisted_sandbox_store_path: path("$AENV_HOME/persisted-sandboxes", "AENV_PERSISTED_SANDBOX_STORE_PATH"),
    max_concurrent_starts: integer(16, 1),
    max_queued_starts: integer(256),
    max_sandboxes: z.int().min(1, "must be at least 1").optional(),
    memory_overcommit_ratio: z.number().positive("must be above 0").max(1000).default(2),
    min_available_memory_mb: integer(512),
    health_probe: table({
      enabled: flag(true),
      interval_ms: milliseconds(10_000, 100),
      timeout_ms: milliseconds(5000, 1),
      failures: integer(3, 1),
    }),
  }),
  pool: table({
    low_watermark: integer(2),
    high_watermark: integer(64),
    network: table({ enabled: flag(true), maintenance_enabled: flag(true), startup_prewarm: flag(true) }),
    block: table({
      enabled: flag(true),
      startup_prewarm: flag(true),
      warm_layers: integer(256, 0, 65_536),
    }),
    firecracker: table({
      enabled: flag(true),
      maintenance_enabled: flag(true),
      startup_prewarm: flag(true),
      fill_concurrency: integer(4),
    }),
  }),
  node_identity: table({
    node_id: key(optionalText(), { env: "AENV_NODE_ID" }),
    cluster_id: key(optionalText(), { env: "AENV_CLUSTER_ID" }),
    service_instance_id: key(optionalText(), { env: "AENV_SERVICE_INSTANCE_ID" }),
  }),
  observability: table({
    enabled: flag(true),
    scheduler_report: table({
      enabled: key(flag(false), { env: "AENV_OBSERVABILITY_SCHEDULER_REPORT_ENABLED", envKind: "flag" }),
      interval_secs: key(seconds(5, 1), {
        env: "AENV_OBSERVABILITY_REPORT_INTERVAL_SECS",
        envKind: "integer",
      }),
    }),
  }),
  cluster: table({ scheduler_endpoint: key(httpUrl(), { env: "AENV_OBSERVABILITY_SCHEDULER_ENDPOINT" }) }),
  p2p: table({
    enabled: flag(false),
    transport: text("iroh"),
    store_dir: path("$AENV_HOME/p2p/store"),
    listen_addr: listenAddress().default("0.0.0.0:0"),
    lookup_timeout_ms: milliseconds(5000, 1),
    fetch_timeout_ms: milliseconds(30000, 1),
    peer_discovery_refresh_interval_secs: seconds(5, 1),
  }),
  custom_extension: table({
    url: key(httpUrl(), { env: "AENV_CUSTOM_EXTENSION_URL" }),
    timeout_ms: milliseconds(5000, 1),
  }),
  snapshot: table({
    local_cache_path: path("$AENV_HOME/snapshot-local-cache", "AENV_SNAPSHOT_LOCAL_CACHE_PATH"),
    repository_backend: word(["posix_fs", "oss"]).default("posix_fs"),
    p2p_enabled: flag(true),
    image_publish: table({ enabled: flag(false) }),
    publish_compression: table({
      enabled: flag(true),
      algorithm: word(["lz4", "zstd"]).default("lz4"),
      workers: integer(1, 1),
    }),
  }),
  backend: table({
    posix_fs: table({ snapshot_store: path("$AENV_HOME/snapshot-store", "AENV_SNAPSHOT_STORE") }),
    oss: oss.optional(),
  }),
  ublk: table({
    daemon_binary_path: path("$AENV_HOME/ublk/uvm-ublk-daemon", "AENV_UBLK_DAEMON_BINARY_PATH"),
    daemon_socket_path: key(
      z.string().trim().min(1, "must not be empty").default("$AENV_RUNTIME/ublk-daemon.sock"),
      {
        path: "socket",
      },
    ),
    daemon_log_path: path("$AENV_HOME/logs/ublk-daemon.log"),
    daemon_metrics_listen_addr: key(
      z
        .union([z.literal(""), listenAddress()], { error: 'must be HOST:PORT, or "" to disable' })
        .default("0.0.0.0:9103"),
      { env: "AENV_UBLK_DAEMON_METRICS_LISTEN_ADDR", blankEnvCounts: true },
    ),
    export: key(word(["auto", "nbd", "ublk"]).default("auto"), { env: "AENV_DISK_EXPORT" }),
    max_devices: integer(4096, 1, 65_536),
    overlaybd: table({
      global_config_path: path("$AENV_HOME/overlaybd/overlaybd-global.json"),
      read_only: flag(false),
      runtime_upper_mode: word(["logStructured", "hybridLogStructured", "sparse"]).default(
        "hybridLogStructured",
      ),
      allow_shrink: flag(false),
      resize_timeout_secs: seconds(120, 1),
      download_enable: flag(false),
      p2p_lookup_timeout_ms: milliseconds(300),
      p2p_fetch_range_timeout_ms: milliseconds(2000),
    }),
  }),
  memory_snapshot: table({
    overlaybd_global_config_path: path("$AENV_HOME/overlaybd/mem-overlaybd-global.json"),
    track_dirty_pages: key(flag(true), {
      env: "AGENTENV_MEMORY_SNAPSHOT_TRACK_DIRTY_PAGES",
      envKind: "flag",
    }),
    resume_cache_max_size_gb: integer(16),
    background_download: table({
      enable: flag(true),
      delay: integer(0),
      delay_extra: integer(1),
      try_cnt: integer(5, 1),
      block_size: integer(16777216, 1, 64 * 1024 * 1024),
      concurrency: integer(4, 1, 16),
      max_inflight_blocks: integer(16, 1, 128),
    }),
  }),
  template_build: table({
    max_concurrent_builds: integer(4, 1),
    timeout_secs: seconds(3600, 1),
    ready_timeout_secs: seconds(600, 1),
    step_cache_size_mb: integer(20_480),
    upload_cache_size_mb: integer(20_480, 1),
    max_upload_size_mb: integer(5120, 1),
    builder_image: text("docker.io/moby/buildkit:v0.33.0"),
    builder_cpu_count: integer(16, 1),
    builder_memory_mb: integer(32768, 1),
    cache_size_mb: integer(65536, 1),
  }),
});

/** A parsed file, still under the TOML names. */
export type RawConfig = z.output<typeof configSchema>;
