import { afterAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parse } from "smol-toml";
import packagedFile from "../../config/default.toml" with { type: "text" };
import { AenvError } from "../lib/errors.ts";
import {
  checkoutHome,
  loadConfig,
  loadServerConfig,
  type NodeConfig,
  parseListenAddress,
  redactConfig,
} from "./index.ts";
import { CONFIG_KEYS, CONFIG_TABLES, nearestKey } from "./keys.ts";
import { configSchema } from "./schema.ts";
import { getAt, isTree, type Tree } from "./tree.ts";
import { hasNoEffect } from "./unbuilt.ts";

setDefaultTimeout(30_000);

const root = mkdtempSync(join(tmpdir(), "network-config-"));
afterAll(() => rmSync(root, { recursive: true, force: true }));

let files = 0;
function load(toml: string, env: Record<string, string> = {}): NodeConfig {
  const path = join(root, `${files++}.toml`);
  writeFileSync(path, toml);
  return loadConfig({ path, env });
}

function failure(toml: string, env: Record<string, string> = {}): AenvError {
  try {
    load(toml, env);
  } catch (error) {
    if (error instanceof AenvError) return error;
    throw error;
  }
  throw new Error("loadConfig accepted it");
}

function leafNames(tree: Tree, prefix = ""): string[] {
  return Object.entries(tree).flatMap(([name, value]) =>
    isTree(value) ? leafNames(value, `${prefix}${name}.`) : [`${prefix}${name}`],
  );
}

const shipped = parse(packagedFile) as Tree;
/** The packaged file with its commented-out keys and tables put in. */
const complete = parse(packagedFile.replace(/^# (\[[a-z_.]+\]|[a-z_]+ = .*)$/gm, "$1")) as Tree;

describe("packaged file", () => {
  test("has every key of the schema, and the schema every key of the file", () => {
    expect(leafNames(complete).sort()).toEqual(CONFIG_KEYS.map((key) => key.name).sort());
  });

  test("holds the built-in defaults, but for what it says it ships", () => {
    const defaults = configSchema.parse({});
    const different = leafNames(shipped).filter(
      (name) => !Bun.deepEquals(getAt(shipped, name.split(".")), getAt(defaults, name.split("."))),
    );
    expect(different.sort()).toEqual(
      [
        "server.listen",
        "ublk.daemon_metrics_listen_addr",
        "image.cache.capacity_gb",
        "image.cache.remote_blocks.max_size_gb",
      ].sort(),
    );
    const unshipped = CONFIG_KEYS.filter(
      (key) => getAt(defaults, key.parts) !== undefined && getAt(shipped, key.parts) === undefined,
    );
    expect(unshipped.map((key) => key.name)).toEqual([]);
  });

  test("leaves the node's identity unset and loads without a warning", () => {
    expect(getAt(shipped, ["node_identity"])).toEqual({});
    const config = loadConfig({ env: {} });
    expect(config.warnings).toEqual([]);
    expect(config.sourcePath).toBeUndefined();
    expect(config.server.listen).toBe("127.0.0.1:8000");
  });

  test("names each environment variable beside its key", () => {
    for (const key of CONFIG_KEYS) if (key.meta.env) expect(packagedFile).toContain(key.meta.env);
  });
});

describe("sources", () => {
  test("an empty file has the built-in defaults", () => {
    const config = load("");
    expect(config.server.listen).toBe("0.0.0.0:8000");
    expect(config.virtualizationMode).toBe("auto");
    expect(config.image.cache.capacityGb).toBeUndefined();
    expect(config.image.cache.remoteBlocks.maxSizeGb).toBe(10);
    expect(config.network.egress.alwaysDeniedCidrs).toHaveLength(6);
  });

  test("--config beats AENV_CONFIG_PATH, blank counts as unset", () => {
    writeFileSync(join(root, "a.toml"), "[machine]\nvcpu_count = 3\n");
    writeFileSync(join(root, "b.toml"), "[machine]\nvcpu_count = 4\n");
    const env = { AENV_CONFIG_PATH: ` ${join(root, "b.toml")} ` };
    expect(loadConfig({ path: join(root, "a.toml"), env }).machine.vcpuCount).toBe(3);
    expect(loadConfig({ env }).machine.vcpuCount).toBe(4);
    expect(loadConfig({ env: { AENV_CONFIG_PATH: "  " } }).machine.vcpuCount).toBe(2);
  });

  test("a missing file is named, bad TOML has its line", () => {
    expect(() => loadConfig({ path: join(root, "none.toml"), env: {} })).toThrow(join(root, "none.toml"));
    expect(failure("a = 1\nb = \n").message).toContain("line 2");
  });

  test("every variable overrides its key, blank ones do not", () => {
    const values: Record<string, { text: string; value: unknown }> = {
      AENV_VIRTUALIZATION_MODE: { text: "KVM", value: "kvm" },
      API_ADDR: { text: " [::1]:9 ", value: "[::1]:9" },
      AENV_SANDBOX_PROXY_DOMAINS: {
        text: "A.example., b.example,,a.example",
        value: ["a.example", "b.example"],
      },
      AENV_OBSERVABILITY_SCHEDULER_REPORT_ENABLED: { text: "yes", value: true },
      AENV_OBSERVABILITY_REPORT_INTERVAL_SECS: { text: "7", value: 7 },
      AENV_OBSERVABILITY_SCHEDULER_ENDPOINT: { text: "http://s:1/", value: "http://s:1" },
      AENV_CUSTOM_EXTENSION_URL: { text: "http://e:1", value: "http://e:1" },
      AENV_VMM: { text: "Firecracker", value: "firecracker" },
      AENV_DISK_EXPORT: { text: "nbd", value: "nbd" },
      AENV_UBLK_DAEMON_METRICS_LISTEN_ADDR: { text: "", value: "" },
      AGENTENV_MEMORY_SNAPSHOT_TRACK_DIRTY_PAGES: { text: "false", value: false },
      AENV_CLUSTER_ID: {
        text: "01936F8E-72F5-7000-8000-000000000001",
        value: "01936f8e-72f5-7000-8000-000000000001",
      },
    };
    const endpoint = { AENV_OBSERVABILITY_SCHEDULER_ENDPOINT: "http://s:1" };
    for (const { name, parts, meta } of CONFIG_KEYS) {
      if (meta.env === undefined) continue;
      const sample = values[meta.env] ?? { text: ` /x/${name} `, value: `/x/${name}` };
      const camel = parts.map((part) => part.replace(/_(.)/g, (_, letter: string) => letter.toUpperCase()));
      expect(getAt(load("", { ...endpoint, [meta.env]: sample.text }), camel)).toEqual(sample.value);
      if (meta.blankEnvCounts) continue;
      expect(load("", { [meta.env]: " ", HOSTNAME: "h" }).warnings).toEqual([]);
    }
  });

  test("an override that does not fit names its variable", () => {
    const { message } = failure("", { AENV_OBSERVABILITY_REPORT_INTERVAL_SECS: "soon" });
    expect(message).toContain("observability.scheduler_report.interval_secs");
    expect(message).toContain("AENV_OBSERVABILITY_REPORT_INTERVAL_SECS");
  });
});

describe("paths", () => {
  test("placeholders and relative paths", () => {
    const config = load(
      'home_path = "state"\nruntime_path = "$AENV_HOME/run"\n[image.cache]\nroot_dir = "$AENV_HOME/x/../cache/."\n' +
        '[kernel]\nimage_path = "k/vmlinux"\n',
    );
    expect(config.homePath).toBe(join(root, "state"));
    expect(config.runtimePath).toBe(join(root, "state/run"));
    expect(config.depsPath).toBe(join(root, "state/deps"));
    expect(config.ublk.daemonSocketPath).toBe(join(root, "state/run/ublk-daemon.sock"));
    expect(config.image.cache.rootDir.replace(/\/$/, "")).toBe(join(root, "state/cache"));
    expect(config.kernel.imagePath).toBe(join(root, "k/vmlinux"));
  });

  test("AENV_HOME_PATH moves what is built on it; a $ in it is no pattern", () => {
    const config = load("", { AENV_HOME_PATH: "/srv/$&/home" });
    expect(config.depsPath).toBe("/srv/$&/home/deps");
  });

  test("placeholders where they have no meaning are refused", () => {
    expect(failure('deps_path = "$AENV_RUNTIME/deps"').message).toContain("$AENV_RUNTIME");
    expect(failure('home_path = "$AENV_HOME/x"').message).toContain("home_path");
  });
});

describe("unknown keys", () => {
  test("are refused with the nearest known name", () => {
    const { code, message } = failure("[machine]\nvcpu_cout = 9\n[networc]\nx = 1\n[zzzzzzzz]\n");
    expect(code).toBe("invalid_config");
    expect(message).toContain("\n  machine.vcpu_cout: is not a key: did you mean machine.vcpu_count?\n");
    expect(message).toContain("\n  networc: is not a key: did you mean network?\n");
    expect(message).toContain("\n  zzzzzzzz: is not a key");
    expect(message).not.toContain("zzzzzzzz: is not a key:");
  });

  test("those of earlier formats keep loading, and are told", () => {
    const { warnings } = load(
      "[ublk]\nenabled = true\n[ublk.overlaybd]\ndevice_type = 1\n[memory_snapshot]\ncompression_level = 3\n" +
        "[template_build]\ncompression = true\n",
    );
    expect(warnings).toHaveLength(4);
    expect(warnings[0]).toContain("ublk.enabled belongs to an earlier format");
  });

  test("are named when the file is refused, too", () => {
    expect(failure('machin = 1\n[machine]\nvcpu_count = "x"\n').message).toContain("did you mean machine?");
  });

  test("the right key in the wrong table is found", () => {
    expect(nearestKey("network.host_interaction_cidr")).toBe("network.internal.host_interaction_cidr");
    expect(nearestKey("zzzzzzzzzzzzzzzzzz")).toBeUndefined();
    expect(CONFIG_TABLES.has("network.internal")).toBe(true);
  });
});

describe("aliases", () => {
  test("[blockd] is another name for the daemon's keys", () => {
    const config = load('[blockd]\nsocket_path = "/s"\nlog_path = "$AENV_HOME/l"\n');
    expect(config.ublk.daemonSocketPath).toBe("/s");
    expect(config.ublk.daemonLogPath).toBe("/var/lib/aenv/l");
    expect(config.warnings).toEqual([]);
    expect(failure('[blockd]\nlog_path = "/a"\n[ublk]\ndaemon_log_path = "/b"\n').message).toContain(
      "another name",
    );
  });
});

describe("parts that are not there", () => {
  const server = (toml: string, env: Record<string, string> = {}) => {
    const path = join(root, `${files++}.toml`);
    writeFileSync(path, toml);
    return loadServerConfig({ path, env });
  };

  test("a server refuses what switches one on, by key and origin", () => {
    expect(() => server("", { AENV_CUSTOM_EXTENSION_URL: "http://e:1" })).toThrow(
      /custom_extension\.url = "http:\/\/e:1" \(from AENV_CUSTOM_EXTENSION_URL\): this version does not have/,
    );
    expect(() => server('virtualization_mode = "PVM"')).toThrow('needs vmm = "firecracker"');
    expect(() => server('virtualization_mode = "tcg"\nvmm = "firecracker"')).toThrow('needs vmm = "qemu"');
    // What only reads the configuration, as setup does, is not in the way.
    expect(load('virtualization_mode = "pvm"').virtualizationMode).toBe("pvm");
  });

  test("keys nothing acts on are told when they are given a value, not when they repeat the default", () => {
    expect(server("[volume]\nmax_size_mb = 5\ndefault_size_mb = 65536\n").warnings).toEqual([
      "volume.max_size_mb has no effect in this version",
    ]);
    expect(server(packagedFile).warnings).toEqual([]);
  });

  test("every key is acted upon somewhere, or is known to be without effect", () => {
    const sources = [...new Bun.Glob("src/**/*.ts").scanSync({ cwd: join(import.meta.dir, "../..") })]
      .filter((file) => !file.startsWith("src/config/") && !file.endsWith(".test.ts"))
      .map((file) => readFileSync(join(import.meta.dir, "../..", file), "utf8"))
      .join("\n");
    const camel = (part: string) => part.replace(/_(.)/g, (_, letter: string) => letter.toUpperCase());
    // As `config.a.b`, or as `.b` of a table that is handed on.
    const unread = CONFIG_KEYS.filter(
      ({ name, parts }) => !hasNoEffect(name) && !new RegExp(`\\.${camel(parts.at(-1)!)}\\b`).test(sources),
    );
    expect(unread.map((key) => key.name)).toEqual([]);
  });
});

describe("agentenv config", () => {
  const runIn = (env: Record<string, string>, ...args: string[]) => {
    const { exitCode, stdout, stderr } = Bun.spawnSync(
      [process.execPath, join(import.meta.dir, "../main.ts"), "config", ...args],
      { env: { PATH: process.env.PATH, ...env } },
    );
    return { exitCode, stdout: stdout.toString(), stderr: stderr.toString() };
  };

  const run = (...args: string[]) =>
    runIn({ AENV_HOME_PATH: "/srv/h", AENV_SANDBOX_ACCESS_TOKEN_HASH_SEED: "s3cret" }, ...args);

  test("show --changed says so when nothing is", () => {
    expect(runIn({}, "show", "--changed")).toEqual({
      exitCode: 0,
      stdout: "",
      stderr: "nothing is changed\n",
    });
  });

  test("the home of the executable's own checkout, where no other is named or there", () => {
    const executable = join(root, "checkout/dist/agentenv");
    const missing = join(root, "no-home");
    expect(checkoutHome(missing, undefined, executable)).toBeUndefined();
    const beside = join(root, "checkout/.aenv/home");
    mkdirSync(beside, { recursive: true });
    expect(checkoutHome(missing, undefined, executable)).toBe(beside);
    expect(checkoutHome(missing, "/named", executable)).toBeUndefined();
    expect(checkoutHome(root, undefined, executable)).toBeUndefined();
  });

  test("show: values, origins, no secrets", () => {
    const path = join(root, "show.toml");
    writeFileSync(path, "[machine]\nvcpu_count = 3\n");
    const { exitCode, stdout } = run("show", "--config", path, "--changed");
    expect(exitCode).toBe(0);
    expect(stdout.split("\n").map((line) => line.replace(/ +/g, " "))).toEqual([
      'home_path = "/srv/h" # environment: AENV_HOME_PATH',
      `machine.vcpu_count = 3 # ${path}`,
      'sandbox.access_token_hash_seed = "[redacted]" # environment: AENV_SANDBOX_ACCESS_TOKEN_HASH_SEED',
      "",
    ]);
    expect(JSON.parse(run("show", "--json", "machine.vcpu_count").stdout)).toEqual({
      keys: [{ name: "machine.vcpu_count", value: 2, origin: "packaged file", noEffect: false }],
    });
    expect(run("show", "machin")).toMatchObject({ exitCode: 2, stdout: "" });
  });

  test("check: 0 and 1", () => {
    expect(run("check")).toMatchObject({ exitCode: 0, stdout: "configuration (packaged) is valid\n" });
    const path = join(root, "check.toml");
    writeFileSync(path, "[p2p]\nenabled = true\n");
    const { exitCode, stderr } = run("check", "--config", path);
    expect(exitCode).toBe(1);
    expect(stderr).toContain("p2p.enabled = true: this version does not have");
  });
});

const OSS =
  '[snapshot]\nrepository_backend = "oss"\n[backend.oss]\nendpoint = "e"\nbucket = "b"\nregion = "r"\n';

describe("rules", () => {
  const refused: [key: string, toml: string][] = [
    ["virtualization_mode", 'virtualization_mode = "xen"'],
    ["server.listen", '[server]\nlisten = "8000"'],
    ["firecracker.log_level", '[firecracker]\nlog_level = "loud"'],
    ["tools.version", '[tools]\nversion = "1.0.0+x"'],
    ["tools.version", '[tools]\nversion = "../1"'],
    ["tools.url", '[tools]\nurl = "x"'],
    ["tools.drive_path", '[tools]\ndrive_path = "/x"'],
    ["tools.control_plane_port", "[tools]\ncontrol_plane_port = 70000"],
    ["image.resolver.search_registries[0]", '[image.resolver]\nsearch_registries = ["https://x"]'],
    ["image.cache.gc.high_watermark_ratio", "[image.cache.gc]\nhigh_watermark_ratio = nan"],
    ["image.cache.gc.high_watermark_ratio", "[image.cache.gc]\nhigh_watermark_ratio = 1.01"],
    ["image.cache.gc.low_watermark_ratio", "[image.cache.gc]\nlow_watermark_ratio = 0.99"],
    ["sandbox_proxy.domains", '[sandbox_proxy]\ndomains = ["a_b.c"]'],
    ["network.dns_server", '[network]\ndns_server = "::1"'],
    ["network.egress.always_denied_cidrs[0]", '[network.egress]\nalways_denied_cidrs = ["10.0.0.0/33"]'],
    ["network.internal.veth_cidr", '[network.internal]\nveth_cidr = "10.11.128.0/16"'],
    ["network.internal.veth_cidr", '[network.internal]\nveth_cidr = "10.12.0.0/17"'],
    [
      "network.internal.host_interaction_cidr",
      '[network.internal]\nhost_interaction_cidr = "169.254.0.0/16"',
    ],
    ["network.internal.host_interaction_cidr", '[network.internal]\nhost_interaction_cidr = "10.13.0.0/18"'],
    ["machine.vcpu_count", "[machine]\nvcpu_count = 1.5"],
    [
      "machine.disk_rate_limit.iops_burst",
      "[machine.disk_rate_limit]\nenabled = true\niops_burst = 5\nbandwidth_bytes_per_sec = 1",
    ],
    [
      "machine.network_rate_limit.send_burst_bytes",
      "[machine.network_rate_limit]\nenabled = true\nsend_burst_bytes = 5\nreceive_bytes_per_sec = 1",
    ],
    ["sandbox.access_token_hash_seed", '[sandbox]\naccess_token_hash_seed = "  "'],
    ["pool.low_watermark", "[pool]\nlow_watermark = 100"],
    ["pool.firecracker.fill_concurrency", "[pool.firecracker]\nfill_concurrency = 0"],
    ["observability.scheduler_report.enabled", "[observability.scheduler_report]\nenabled = true"],
    ["cluster.scheduler_endpoint", '[cluster]\nscheduler_endpoint = "host:1"'],
    ["image.cache.gc.interval_secs", "[image.cache.gc]\ninterval_secs = 2147484"],
    ["orchestrator.auto_evict_interval_ms", "[orchestrator]\nauto_evict_interval_ms = 2147483648"],
    ["p2p.peer_discovery_refresh_interval_secs", "[p2p]\npeer_discovery_refresh_interval_secs = 0"],
    ["snapshot.image_publish.enabled", "[snapshot.image_publish]\nenabled = true"],
    ["snapshot.publish_compression.algorithm", '[snapshot.publish_compression]\nalgorithm = "gzip"'],
    ["backend.oss", '[snapshot]\nrepository_backend = "oss"'],
    ["backend.oss.access_key_id", OSS],
    ["backend.oss.access_key_secret", `${OSS}access_key_id = "a"\n`],
    ["backend.oss.region", OSS.replace('region = "r"', 'region = " "')],
    ["ublk.overlaybd.runtime_upper_mode", '[ublk.overlaybd]\nruntime_upper_mode = "x"'],
    ["ublk.overlaybd.resize_timeout_secs", "[ublk.overlaybd]\nresize_timeout_secs = 0"],
    [
      "memory_snapshot.background_download.block_size",
      "[memory_snapshot.background_download]\nblock_size = 67108865",
    ],
    [
      "memory_snapshot.background_download.concurrency",
      "[memory_snapshot.background_download]\nblock_size = 67108864\nconcurrency = 5",
    ],
    [
      "memory_snapshot.overlaybd_global_config_path",
      '[memory_snapshot]\noverlaybd_global_config_path = "$AENV_HOME/overlaybd/x/../overlaybd-global.json"',
    ],
    [
      "the conversion file",
      '[memory_snapshot]\noverlaybd_global_config_path = "$AENV_HOME/overlaybd/convert-overlaybd-global.json"',
    ],
    ["image", "image = 3"],
  ];
  test.each(refused)("%s refuses %j", (key, toml) => {
    const error = failure(toml);
    expect(error.code).toBe("invalid_config");
    expect(error.message).toContain(`\n  ${key}`);
  });

  test("two names of one generated file through a symbolic link", () => {
    const dir = mkdtempSync(join(root, "canon-"));
    symlinkSync(dir, `${dir}-link`);
    const { message } = failure(
      `[ublk.overlaybd]\nglobal_config_path = "${dir}/g.json"\n[memory_snapshot]\noverlaybd_global_config_path = "${dir}-link/g.json"`,
    );
    expect(message).toContain("must not be the same file as ublk.overlaybd.global_config_path");
  });

  test("all broken rules are told at once, secrets are not shown", () => {
    const { message } = failure(
      '[sandbox]\naccess_token_hash_seed = 5\n[machine]\nvcpu_count = "2"\nmem_size_mib = 0\n',
    );
    expect(message.split("\n")).toHaveLength(4);
    expect(message).toContain("sandbox.access_token_hash_seed = (hidden)");
  });

  test("rules of what is switched off are not checked", () => {
    expect(load("[machine.disk_rate_limit]\niops_burst = 5\n").machine.diskRateLimit.iopsBurst).toBe(5);
    const pools = "[pool.network]\nmaintenance_enabled = false\n[pool.block]\nenabled = false\n";
    const off = load(
      `[pool]\nlow_watermark = 100\n${pools}[pool.firecracker]\nenabled = false\nfill_concurrency = 0\n`,
    );
    expect(off.pool.lowWatermark).toBe(100);
  });
});

describe("normalisation", () => {
  test("words, lists, blanks", () => {
    const config = load(
      'virtualization_mode = "PVM"\n[firecracker]\nlog_level = " "\n[image.resolver]\ndefault_image = " "\n' +
        'search_registries = [" ghcr.io/team/ ", ""]\nallowed_registries = ["a/", " "]\n[custom_extension]\nurl = ""\n' +
        "[image.cache.gc]\ninterval_secs = 0\n",
    );
    expect(config.virtualizationMode).toBe("pvm");
    expect(config.memorySnapshot.trackDirtyPages).toBe(false);
    expect(config.firecracker.logLevel).toBeUndefined();
    expect(config.image.resolver.defaultImage).toBe("ubuntu:24.04");
    expect(config.image.resolver.searchRegistries).toEqual(["ghcr.io/team"]);
    expect(config.image.resolver.allowedRegistries).toEqual(["a"]);
    expect(config.customExtension.url).toBeUndefined();
    expect(config.image.cache.gc.intervalSecs).toBe(1800);
    expect(load('[firecracker]\nlog_level = "debug"').firecracker.logLevel).toBe("Debug");
  });

  test("rates up to 2^63-1", () => {
    const toml = (value: string) => `[machine.disk_rate_limit]\nenabled = true\niops = ${value}\n`;
    expect(load(toml("9223372036854775807")).machine.diskRateLimit.iops).toBe(2 ** 63);
    expect(failure(toml("-1")).message).toContain("machine.disk_rate_limit.iops");
  });

  test("object store: credential process takes precedence, with a warning; other spellings", () => {
    const config = load(
      `${OSS}access_key_id = "a"\ncredentialProcess = "/bin/x --y"\naddressing-style = "Path"\n`,
    );
    expect(config.backend.oss?.credentialProcess).toBe("/bin/x --y");
    expect(config.backend.oss?.addressingStyle).toBe("path");
    expect(config.warnings).toEqual([expect.stringContaining("backend.oss.access_key_id ignored")]);
  });

  test("identity", () => {
    const config = load('[node_identity]\nnode_id = " "\ncluster_id = "x"\n', { HOSTNAME: "host-1" });
    expect(config.nodeIdentity.nodeId).toBe("host-1");
    expect(config.nodeIdentity.clusterId).toBe("00000000-0000-0000-0000-000000000000");
    expect(config.warnings).toEqual([expect.stringContaining("not a UUID")]);
    expect(load("").nodeIdentity.serviceInstanceId).not.toBe(load("").nodeIdentity.serviceInstanceId);
    expect(load('[node_identity]\nnode_id = "n"', { AENV_NODE_ID: "e" }).nodeIdentity.nodeId).toBe("e");
  });

  test("listen addresses", () => {
    expect(parseListenAddress("[::1]:80")).toEqual({ hostname: "::1", port: 80 });
    expect(parseListenAddress("host:0")).toEqual({ hostname: "host", port: 0 });
    for (const bad of ["::1:80", "host", "host:", ":80", "host:65536", "a b:1"]) {
      expect(parseListenAddress(bad)).toBeUndefined();
    }
  });

  test("secrets are redacted", () => {
    const config = load(
      `[sandbox]\naccess_token_hash_seed = "s3cret"\n${OSS}access_key_id = "s3cret"\naccess_key_secret = "s3cret"\nsecurity_token = "s3cret"\n`,
    );
    expect(config.sandbox.accessTokenHashSeed).toBe("s3cret");
    expect(JSON.stringify(redactConfig(config))).not.toContain("s3cret");
  });
});
