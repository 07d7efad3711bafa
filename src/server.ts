import { readFileSync, statfsSync } from "node:fs";
import { mkdir } from "node:fs/promises";
import { totalmem } from "node:os";
import { basename, join, resolve } from "node:path";
import { parseArgs } from "node:util";
import { startCollection } from "./collection.ts";
import {
  loadApiKey,
  loadPreviousApiKey,
  loadServerConfig,
  loadTokenSeed,
  type NodeConfig,
  parseListenAddress,
} from "./config/index.ts";
import { createImageService } from "./image/index.ts";
import { installAsset } from "./lib/assets.ts";
import { makeDirDurable } from "./lib/durable.ts";
import { AenvError, errorChain } from "./lib/errors.ts";
import { createLogger, type Logger } from "./lib/log.ts";
import { selfCommand } from "./lib/self.ts";
import { usageProblem } from "./lib/usage.ts";
import { createMemoryService } from "./memory/index.ts";
import { createNetworkService } from "./network/index.ts";
import { createObserver } from "./observability/index.ts";
import {
  admitted,
  createOrchestrator,
  hasTokenProtectedSandboxes,
  lockHome,
  lockRuntime,
} from "./orchestrator/index.ts";
import { requireFreeAddress, startFront } from "./proxy/index.ts";
import { consoleLogPath, createSandboxFactory, createVmPool } from "./sandbox/index.ts";
import { requireHost, resolveRuntime } from "./setup/index.ts";
import { createPosixRepository } from "./snapshot/index.ts";
import { chooseExport, probeUblk, startBlockd } from "./storage/blockd/index.ts";
import { createTemplateService } from "./template/index.ts";
import { commit, version } from "./version.ts";
import {
  createFirecrackerDriver,
  createQemuDriver,
  type FirecrackerDriverOptions,
  sweepJails,
} from "./vmm/index.ts";

const HELP = `Runs the server: the E2B-compatible API, the proxy into sandboxes, and their lifecycle.

Usage: agentenv serve [--config PATH] [--home DIR]

Options:
  --config PATH   configuration file (default: $AENV_CONFIG_PATH, else the packaged defaults)
  --home DIR      state directory instead of home_path, with the dependencies in it
  -h, --help      this text

Environment: AENV_HOME_PATH, AENV_RUNTIME_PATH, API_ADDR, AENV_API_KEY and the overrides that
the packaged configuration names (agentenv config default). SIGINT, SIGTERM or SIGHUP pauses every
sandbox, stores it and ends. SIGUSR2 ends and leaves them running, for the next server to take over.
`;

/** Linux, include/uapi/linux/magic.h. */
const TMPFS_MAGIC = 0x01021994;
const MIB = 1024 ** 2;
const GIB = 1024 ** 3;
const STOP_GRACE_MS = 5_000;
const POOL_PATIENCE_MS = 10_000;

/** What the kernel says can be given out without swapping. */
function availableMemoryMiB(): number {
  const kib = /^MemAvailable:\s+(\d+) kB$/m.exec(readFileSync("/proc/meminfo", "utf8"))?.[1];
  return kib === undefined ? Number.POSITIVE_INFINITY : Number(kib) / 1024;
}

/** Where Firecracker's jails and their control groups are. */
function jailPlace({ firecracker }: NodeConfig): { readonly workDir: string; readonly cgroup?: string } {
  const { workDir, cgroup } = firecracker;
  return { workDir, ...(cgroup === "" ? {} : { cgroup }) };
}

function firecrackerOptions(
  config: NodeConfig,
  guestKernel: { readonly kernelPath: string; readonly kernelVersion: string },
  log: Logger,
): FirecrackerDriverOptions {
  const { firecracker, virtualizationMode } = config;
  return {
    binary: firecracker.binaryPath ?? "/usr/bin/firecracker",
    ...guestKernel,
    mode: virtualizationMode === "pvm" ? "pvm" : "kvm",
    ...jailPlace(config),
    jailHelper: installAsset("aenv-jail", join(config.homePath, "cache", "bin")),
    ...(firecracker.jailerPath === undefined ? {} : { jailerPath: firecracker.jailerPath }),
    users: { firstUid: firecracker.jailUid, count: firecracker.jailUidCount, gid: firecracker.jailGid },
    ...(firecracker.cpuTemplate === undefined ? {} : { cpuTemplate: firecracker.cpuTemplate }),
    ...(firecracker.cpuTemplatePath === undefined ? {} : { cpuTemplatePath: firecracker.cpuTemplatePath }),
    bootArgs: firecracker.bootArgs,
    trackDirtyPages: config.memorySnapshot.trackDirtyPages,
    socketTimeoutMs: firecracker.socketTimeoutSecs * 1000,
    socketPollMs: firecracker.socketPollMs,
    ...(firecracker.logLevel === undefined
      ? {}
      : { capture: { dir: firecracker.serialDir, level: firecracker.logLevel } }),
    log,
  };
}

/** Everything a node is made of, from the configuration. Disposing stops it in the right order. */
async function startNode(config: NodeConfig, log: Logger) {
  await using stack = new AsyncDisposableStack();
  const home = config.homePath;
  // Looked at before anything is made: a start that is refused leaves no trace.
  requireHost({ home, runtimePath: config.runtimePath });
  await makeDirDurable(home);
  await mkdir(config.runtimePath, { recursive: true });
  stack.use(lockHome(home));
  if (statfsSync(home).type === TMPFS_MAGIC) {
    log.warn(
      { home },
      "home_path is on a tmpfs: what is paused ends with the host's memory, and running sandboxes end when it is full; use a disk",
    );
  }
  stack.use(lockRuntime(config.runtimePath));
  const listen = parseListenAddress(config.server.listen)!;
  requireFreeAddress(listen.hostname, listen.port);

  const runtime = await resolveRuntime({
    depsDir: config.depsPath,
    ...(config.kernel.imagePath === undefined ? {} : { kernelImagePath: config.kernel.imagePath }),
    ...(config.qemu.binaryPath === undefined ? {} : { qemuBinaryPath: config.qemu.binaryPath }),
    log,
    progress: ({ phase, item, message }) => log.info({ phase, item, message }, "preparing"),
  });
  const apiKey = loadApiKey({ homePath: home, env: process.env, generate: true });
  if (apiKey === undefined) throw new Error("a key is generated when there is none");
  if (apiKey.generated) log.info({ path: apiKey.path }, "made an API key");
  const previousKey = loadPreviousApiKey({ homePath: home, env: process.env });
  const apiKeys = previousKey === undefined ? [apiKey.value] : [apiKey.value, previousKey.value];
  if (previousKey !== undefined) {
    log.warn({ source: previousKey.source, path: previousKey.path }, "the previous API key is accepted, too");
  }
  const guestKernel = { kernelPath: runtime.kernelPath, kernelVersion: runtime.kernelVersion };
  const vmmLog = log.child({ room: "vmm" });
  const vmm =
    config.vmm === "firecracker"
      ? stack.use(createFirecrackerDriver(firecrackerOptions(config, guestKernel, vmmLog)))
      : createQemuDriver({
          binary: runtime.qemu.binary,
          dataDirs: runtime.qemu.dataDirs,
          ...(runtime.qemu.moduleDir === undefined ? {} : { moduleDir: runtime.qemu.moduleDir }),
          ...(runtime.qemu.libraryPath === undefined ? {} : { libraryPath: runtime.qemu.libraryPath }),
          mode: config.virtualizationMode === "pvm" ? "kvm" : config.virtualizationMode,
          ...guestKernel,
          shieldPath: installAsset("memshield", join(home, "cache", "bin")),
          bootArgs: config.firecracker.bootArgs,
          probeCacheDir: join(home, "cache"),
          log: vmmLog,
        });
  // Nothing half-starts: without these no sandbox could ever run.
  if (config.vmm === "firecracker") await vmm.probe();
  else await sweepJails({ ...jailPlace(config), log: vmmLog });

  const diskExport = chooseExport(config.ublk.export, () => probeUblk(selfCommand("blockd")));
  diskExport.then(
    ({ kind, reason }) => log.info({ kind, reason }, "how disks reach VMs"),
    // Told where it is awaited.
    () => undefined,
  );
  // Starts while the rest is put together.
  const blockd = stack.use(
    startBlockd(
      {
        argv: selfCommand(
          "blockd",
          ...["--max-ublk-devices", String(config.ublk.maxDevices)],
          ...["--warm-layers", String(config.pool.block.enabled ? config.pool.block.warmLayers : 0)],
          ...(config.ublk.daemonMetricsListenAddr === ""
            ? []
            : ["--metrics", config.ublk.daemonMetricsListenAddr]),
        ),
        socketPath: config.ublk.daemonSocketPath,
        runtimeDir: join(config.runtimePath, "blockd"),
        logPath: config.ublk.daemonLogPath,
      },
      log.child({ room: "blockd" }),
    ),
  );
  let serving = false;
  stack.defer(async () => {
    if (serving) return;
    // A start that failed leaves no daemon behind; one with devices serves sandboxes of an earlier server.
    try {
      if ((await blockd.client.list()).length === 0) await blockd.client.shutdown();
    } catch (error) {
      log.debug({ err: error }, "the block daemon was not there to be ended");
    }
  });
  const network = stack.use(
    createNetworkService(
      {
        runtimeDir: config.runtimePath,
        hostInteractionCidr: config.network.internal.hostInteractionCidr,
        vethCidr: config.network.internal.vethCidr,
        alwaysDeniedCidrs: config.network.egress.alwaysDeniedCidrs,
        ...(config.network.dnsServer === undefined ? {} : { dnsServer: config.network.dnsServer }),
        ...(config.pool.network.enabled
          ? {
              pool: {
                lowWatermark: config.pool.lowWatermark,
                highWatermark: config.pool.highWatermark,
                maintenance: config.pool.network.maintenanceEnabled,
                prewarm: config.pool.network.startupPrewarm,
              },
            }
          : {}),
        ...(config.machine.networkRateLimit.enabled ? { rates: config.machine.networkRateLimit } : {}),
      },
      log.child({ room: "network" }),
    ),
  );
  const memory = createMemoryService({
    cacheDir: join(home, "cache", "memory"),
    maxCacheBytes: config.memorySnapshot.resumeCacheMaxSizeGb * GIB,
    log: log.child({ room: "memory" }),
  });
  const { lowWatermark, highWatermark, firecracker: vmPool } = config.pool;
  const warm = vmPool.enabled
    ? createVmPool({
        vmm,
        network,
        pool: {
          lowWatermark,
          highWatermark,
          maintenance: vmPool.maintenanceEnabled,
          prewarm: vmPool.startupPrewarm,
          concurrency: vmPool.fillConcurrency,
        },
        log: log.child({ room: "vmm" }),
      })
    : undefined;
  if (warm !== undefined) stack.use(warm);
  const sandboxes = createSandboxFactory({
    vmm,
    ...(warm === undefined ? {} : { warm }),
    ...(config.vmm === "firecracker" ? { killGraceMs: config.firecracker.socketTimeoutSecs * 1000 } : {}),
    memory,
    network,
    blockClient: blockd.client,
    exportKind: async () => (await diskExport).kind,
    kernelPath: runtime.kernelPath,
    initrdPath: runtime.initrdPath,
    rootDir: join(home, "sandboxes"),
    runtimeDir: config.runtimePath,
    initTimeoutMs: config.envd.initTimeoutSecs * 1000,
    pollMs: config.envd.pollMs,
    mergeCommand: selfCommand("merge-layers"),
    ...(config.machine.diskRateLimit.enabled ? { diskRateLimit: config.machine.diskRateLimit } : {}),
    log: log.child({ room: "sandbox" }),
  });
  const repository = createPosixRepository({
    root: join(config.backend.posixFs.snapshotStore, "repository"),
    log: log.child({ room: "snapshot" }),
  });
  const images = stack.use(
    createImageService(
      {
        cacheDir: config.image.cache.rootDir,
        defaultImage: config.image.resolver.defaultImage,
        searchRegistries: config.image.resolver.searchRegistries,
        ...(config.image.resolver.allowedRegistries === undefined
          ? {}
          : { allowedRegistries: config.image.resolver.allowedRegistries }),
        allowLocalPaths: config.image.resolver.allowLocalPaths,
        reach: {
          internalHosts: config.image.resolver.internalHosts,
          deniedCidrs: config.network.egress.alwaysDeniedCidrs,
        },
        referrerPrefixes: config.image.resolver.tryReferrersOverlaybdPrefixes,
        virtualSizeBytes: config.image.cache.virtualSizeGib * GIB,
        convertStandardOci: config.image.resolver.convertStandardOci,
        gc: {
          ...(config.image.cache.capacityGb === undefined
            ? {}
            : { capacityBytes: config.image.cache.capacityGb * GIB }),
          highWatermark: config.image.cache.gc.highWatermarkRatio,
          lowWatermark: config.image.cache.gc.lowWatermarkRatio,
          minAgeMs: config.image.cache.gc.minAgeSecs * 1000,
        },
      },
      {
        blockClient: blockd.client,
        ext4Helper: installAsset("aenv-ext4", join(home, "cache", "bin")),
        log: log.child({ room: "image" }),
      },
    ),
  );
  const artifactsDir = join(config.orchestrator.persistedSandboxStorePath, "artifacts");
  const statePath = join(config.orchestrator.persistedSandboxStorePath, "records.db");
  const seed = loadTokenSeed({
    homePath: home,
    configured: config.sandbox.accessTokenHashSeed,
    neededByPersisted: hasTokenProtectedSandboxes(statePath),
  });
  for (const warning of seed.warnings) log.warn(warning);
  const observerLog = log.child({ room: "observability" });
  const observer = stack.use(
    createObserver({
      identity: config.nodeIdentity,
      version,
      commit,
      nodeVisible: config.observability.enabled,
      consolePath: (sandboxId) => consoleLogPath(join(home, "sandboxes"), sandboxId, observerLog),
      blockUse: async () => {
        const { devices } = await blockd.client.stats();
        return {
          devices: devices.length,
          upperBytes: devices.reduce((sum, device) => sum + device.upperDataBytes, 0),
        };
      },
      log: observerLog,
    }),
  );
  const limits = config.orchestrator;
  const orchestrator = stack.use(
    createOrchestrator({
      onEvent: (event) => observer.onEvent(event),
      repository,
      sandboxes,
      cold: {
        images,
        cpuCount: config.machine.vcpuCount,
        memoryMiB: config.machine.memSizeMib,
        diskSizeMiB: config.image.cache.virtualSizeGib * 1024,
        allowShrink: config.ublk.overlaybd.allowShrink,
        allowedBootArgsPrefixes: config.firecracker.allowedExtraBootArgsPrefixes,
      },
      statePath,
      artifactsDir,
      tokenSeed: seed.value,
      defaultTimeoutSeconds: config.orchestrator.defaultSandboxTimeoutSecs,
      autoResumeMinTimeoutSeconds: config.orchestrator.autoResumeMinSandboxTimeoutSecs,
      evictIntervalMs: config.orchestrator.autoEvictIntervalMs,
      maxConcurrentStarts: limits.maxConcurrentStarts,
      maxQueuedStarts: limits.maxQueuedStarts,
      capacity: {
        ...(limits.maxSandboxes === undefined ? {} : { sandboxes: limits.maxSandboxes }),
        memoryMiB: Math.floor((totalmem() / MIB) * limits.memoryOvercommitRatio),
        minAvailableMiB: limits.minAvailableMemoryMb,
        availableMiB: availableMemoryMiB,
      },
      ...(limits.healthProbe.enabled ? { health: limits.healthProbe } : {}),
      log: log.child({ room: "orchestrator" }),
    }),
  );
  const collectLayers = (): void => {
    orchestrator
      .collectGarbage()
      .catch((error: unknown) => log.error({ err: error }, "collecting unused layers failed"));
  };
  const templates = stack.use(
    createTemplateService({
      repository,
      images,
      sandboxes: admitted(sandboxes, (memoryMiB) => orchestrator.reserve(memoryMiB)),
      defaults: {
        cpuCount: config.machine.vcpuCount,
        memoryMiB: config.machine.memSizeMib,
        diskSizeMiB: config.image.cache.virtualSizeGib * 1024,
        defaultImage: config.image.resolver.defaultImage,
      },
      maxConcurrentBuilds: config.templateBuild.maxConcurrentBuilds,
      limits: {
        buildMs: config.templateBuild.timeoutSecs * 1000,
        readyMs: config.templateBuild.readyTimeoutSecs * 1000,
      },
      maxStepCacheBytes: config.templateBuild.stepCacheSizeMb * MIB,
      maxUploadCacheBytes: config.templateBuild.uploadCacheSizeMb * MIB,
      maxUploadBytes: config.templateBuild.maxUploadSizeMb * MIB,
      workDir: join(config.backend.posixFs.snapshotStore, "builds"),
      // Named after what is in it: the guest agent and the kernel's modules.
      cacheEpoch: basename(runtime.initrdPath),
      onDeleted: collectLayers,
      log: log.child({ room: "template" }),
    }),
  );

  const figures = vmm.figures?.bind(vmm);
  if (figures !== undefined) {
    const help = "What Firecracker's processes have counted, by its own names.";
    observer.counters("agentenv_firecracker_total", help, ["group", "name"], () =>
      figures().map(({ group, name, total }) => ({ labels: { group, name }, total })),
    );
  }
  observer.start(orchestrator);
  // Sandboxes outlive the server: what one before this left running is taken over, slot by slot.
  const networkStarted = network.start(await sandboxes.survivors());
  // Told where it is awaited.
  networkStarted.catch(() => undefined);
  // Loaded here, while the daemon and the network start: making its schemas is a fifth of the start.
  const { createControlApi } = await import("./api/index.ts");
  const api = createControlApi({
    orchestrator,
    templates,
    observer,
    apiKeys,
    defaultTimeoutSeconds: config.orchestrator.defaultSandboxTimeoutSecs,
    sandboxProxyDomains: config.sandboxProxy.domains,
    version,
    log: log.child({ room: "api" }),
  });
  // Both to their end: what a failed start undoes must not be half made.
  // A host that cannot do what is configured is told now, not at the first sandbox.
  const exportChosen = config.ublk.export === "ublk" ? diskExport : undefined;
  for (const start of await Promise.allSettled([networkStarted, blockd.ready, exportChosen])) {
    if (start.status === "rejected") throw start.reason;
  }
  await orchestrator.start();
  await templates.start();
  // Before the first request, for a while; what is missing then comes later.
  await warm?.start(POOL_PATIENCE_MS);
  const collectImages = async () =>
    images.collect(new Set([...(await templates.pinnedFiles()), ...orchestrator.pinnedFiles()]));
  stack.use(
    startCollection({
      intervalMs: config.image.cache.gc.intervalSecs * 1000,
      layers: () => orchestrator.collectGarbage(),
      ...(config.image.cache.gc.enabled ? { images: collectImages } : {}),
      log,
    }),
  );

  const front = startFront({
    hostname: listen.hostname,
    port: listen.port,
    domains: config.sandboxProxy.domains,
    apiKeys,
    control: api,
    orchestrator,
    onExchange: ({ source, method, status, seconds }) =>
      observer.request(source, method, "/*", status, seconds),
    log: log.child({ room: "proxy" }),
  });
  observer.gauge("agentenv_proxy_connections", "Open client connections.", () => front.connections);
  stack.defer(() => front.stop(STOP_GRACE_MS));
  // The probe of a new host takes seconds: the first start that needs its verdict waits, not the listener.
  vmm.probe().then(
    (probe) => log.info(probe, "virtual machine monitor"),
    (error: unknown) => log.error({ err: error }, "no usable virtual machine monitor"),
  );

  // What a deletion left because it was young still, or in use, when the last server ended.
  collectLayers();
  serving = true;
  const owned = stack.move();
  return {
    url: `http://${front.hostname}:${front.port}`,
    apiKeyPath: apiKey.path,
    /** Ends what answers callers and leaves every sandbox running, for the next server to take over. */
    async leave() {
      await front.stop(STOP_GRACE_MS);
      await templates[Symbol.asyncDispose]();
      // Processes without a VM are nobody's.
      await warm?.[Symbol.asyncDispose]();
    },
    async stop() {
      await front.stop(STOP_GRACE_MS);
      // Builds first: they hold sandboxes and devices of their own.
      await templates[Symbol.asyncDispose]();
      await orchestrator.shutdown();
      await blockd.client.shutdown();
      await owned.disposeAsync();
    },
  };
}

function parseFlags(argv: string[]) {
  return parseArgs({
    args: argv,
    options: {
      config: { type: "string" },
      home: { type: "string" },
      help: { type: "boolean", short: "h" },
    },
  }).values;
}

/** Where the setting is that somebody looked for among the flags. */
function settingHint(argv: readonly string[]): string {
  const flags = argv.map((word) => word.replace(/=.*/s, ""));
  const asked = (...names: string[]) => names.some((name) => flags.includes(name));
  if (asked("--port", "-p", "--host", "--listen", "--addr", "--address", "--bind")) {
    return 'the address is API_ADDR=HOST:PORT in the environment, or listen = "HOST:PORT" under [server] in the file of --config';
  }
  if (asked("--key", "--api-key", "-k")) {
    return "the key is AENV_API_KEY in the environment, else HOME/secrets/api-key";
  }
  return "other settings are in the file of --config and in the environment: agentenv config default prints and explains them";
}

/** Whether this process was started with SIGHUP ignored: `SigIgn` is a mask of signals, from 1 on (proc_pid_status(5)). */
function ignoresHangup(): boolean {
  const mask = /^SigIgn:\s*([0-9a-f]+)$/m.exec(readFileSync("/proc/self/status", "utf8"))?.[1] ?? "0";
  return (BigInt(`0x${mask}`) & 1n) === 1n;
}

/** `agentenv serve`. Exit codes: 0 stopped or left, 1 failed, 2 wrong usage. */
export async function serveMain(argv: string[]): Promise<number> {
  let values: ReturnType<typeof parseFlags>;
  try {
    values = parseFlags(argv);
  } catch (error) {
    process.stderr.write(`Error: ${usageProblem(error)}\n  ${settingHint(argv)}\n\n${HELP}`);
    return 2;
  }
  if (values.help) {
    process.stdout.write(HELP);
    return 0;
  }
  const started = performance.now();
  const log = createLogger("agentenv");
  // From the first moment on: a server that is ended while it starts takes away what it has made so far, too.
  const stop = Promise.withResolvers<"stop" | "leave">();
  // A closed terminal ends the server in order, unless it was started to outlive it (nohup).
  const hangup = ignoresHangup() ? [] : (["SIGHUP"] as const);
  for (const signal of ["SIGINT", "SIGTERM", ...hangup] as const) {
    process.on(signal, () => {
      log.info({ signal }, "stopping: running sandboxes are paused and stored");
      stop.resolve("stop");
    });
  }
  process.on("SIGUSR2", () => {
    log.info({ signal: "SIGUSR2" }, "leaving: running sandboxes go on, the next server takes them over");
    stop.resolve("leave");
  });
  let node: Awaited<ReturnType<typeof startNode>>;
  try {
    const config = loadServerConfig({
      // As setup and doctor have it: the dependencies move with the home.
      env:
        values.home === undefined
          ? process.env
          : { ...process.env, AENV_HOME_PATH: resolve(values.home), AENV_DEPS_PATH: undefined },
      ...(values.config === undefined ? {} : { path: values.config }),
    });
    for (const warning of config.warnings) log.warn(warning);
    node = await startNode(config, log);
  } catch (error) {
    const chain = errorChain(error).join(": ");
    const cure = error instanceof AenvError ? error.remediation : undefined;
    if (!(error instanceof AenvError)) log.error({ err: error }, "start failed");
    process.stderr.write(`Error: ${chain}\n${cure === undefined ? "" : `  ${cure}\n`}`);
    return 1;
  }
  log.info(
    { url: node.url, version, startMs: Math.round(performance.now() - started), apiKeyPath: node.apiKeyPath },
    "serving",
  );

  process.on("uncaughtException", (error) => log.error({ err: error }, "uncaught exception"));
  process.on("unhandledRejection", (error) => log.error({ err: error }, "unhandled rejection"));
  const ending = await stop.promise;
  try {
    await (ending === "stop" ? node.stop() : node.leave());
  } catch (error) {
    log.error({ err: error }, "the stop was not complete");
    process.exit(1);
  }
  log.info(ending === "stop" ? "stopped" : "left");
  // Everything is stored and released; a timer that nobody waits for must not hold the process.
  process.exit(0);
}
