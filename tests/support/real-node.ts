import {
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { join, resolve } from "node:path";
import type { ImageService } from "../../src/image/types.ts";
import { runCommand } from "../../src/lib/command.ts";
import { createLogger, type Logger } from "../../src/lib/log.ts";
import { createMemoryService } from "../../src/memory/index.ts";
import {
  createNetworkService,
  type NetworkService,
  type NetworkServiceOptions,
} from "../../src/network/index.ts";
import {
  createOrchestrator,
  type NodeOrchestrator,
  type OrchestratorOptions,
  type StartReport,
} from "../../src/orchestrator/index.ts";
import { createAgentClient, createSandboxFactory, type SandboxFactory } from "../../src/sandbox/index.ts";
import { resolveRuntime } from "../../src/setup/index.ts";
import { createPosixRepository, type SnapshotRepository } from "../../src/snapshot/index.ts";
import { type SupervisedBlockd, superviseBlockd } from "../../src/storage/blockd/index.ts";
import { createLayerWriter } from "../../src/storage/overlaybd/index.ts";
import { createTemplateService, type TemplateService } from "../../src/template/index.ts";
import { createQemuDriver } from "../../src/vmm/index.ts";
import type { DriveRateLimit, VmmDriver } from "../../src/vmm/types.ts";
import { processes } from "./proc.ts";

/*
 * The rooms below the API with real VMs, put together as the server does, without its HTTP side and with
 * an image made of busybox: for faults that are hard to reach from outside.
 */

const ROOT = resolve(import.meta.dir, "../..");
const MIB = 1 << 20;
const IMAGE_MIB = 128;
const APPLETS = "sh sleep echo cat date mkdir ls sha256sum dd sync id true false mv head test touch wc".split(
  " ",
);

/** Where kernel and QEMU are; undefined, with the reason printed, when this machine cannot run VMs. */
export function testDeps(): string | undefined {
  const deps =
    process.env.AENV_TEST_DEPS ?? join(process.env.AENV_TEST_HOME ?? join(ROOT, ".aenv/home"), "deps");
  const missing =
    process.getuid?.() !== 0
      ? "not root"
      : !existsSync(join(deps, "manifest.json"))
        ? `no kernel and QEMU under ${deps} (run \`agentenv setup\`, or set AENV_TEST_DEPS)`
        : Bun.which("busybox") === null || Bun.which("mke2fs") === null
          ? "busybox or mke2fs is not installed"
          : undefined;
  if (missing === undefined) return deps;
  console.warn(`skipped, no real VMs: ${missing}`);
  return undefined;
}

async function busyboxImage(dir: string, programs: Readonly<Record<string, string>>): Promise<ImageService> {
  const root = join(dir, "root");
  for (const name of ["bin", "etc", "root"]) mkdirSync(join(root, name), { recursive: true });
  copyFileSync(Bun.which("busybox")!, join(root, "bin/busybox"));
  for (const name of APPLETS) symlinkSync("busybox", join(root, "bin", name));
  for (const [name, file] of Object.entries(programs)) copyFileSync(file, join(root, "bin", name));
  writeFileSync(join(root, "etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n");
  writeFileSync(join(root, "etc/group"), "root:x:0:\n");
  const raw = join(dir, "root.ext4");
  await runCommand(["truncate", "-s", `${IMAGE_MIB}M`, raw]);
  await runCommand(["mke2fs", "-q", "-t", "ext4", "-d", root, raw]);
  const file = join(dir, "base.lsmt");
  const writer = createLayerWriter(file, { virtualSizeBytes: IMAGE_MIB * MIB, uuid: crypto.randomUUID() });
  const bytes = readFileSync(raw);
  const zeros = Buffer.alloc(65536);
  for (let at = 0; at < bytes.length; at += zeros.length) {
    const block = bytes.subarray(at, at + zeros.length);
    if (!block.equals(zeros)) writer.append(at, new Uint8Array(block));
  }
  writer.finish();
  const digest = `sha256:${new Bun.CryptoHasher("sha256").update(readFileSync(file)).digest("hex")}`;
  return {
    resolve: async (reference) => ({
      reference,
      manifestDigest: digest,
      lowers: [{ file, digest }],
      virtualSizeBytes: IMAGE_MIB * MIB,
      config: { env: { PATH: "/bin" }, workingDir: "/", exposedPorts: [], volumes: [], labels: {} },
    }),
    hold: () => ({ [Symbol.dispose]: () => undefined }),
    collect: async () => ({ images: 0, layers: 0, bytes: 0 }),
    [Symbol.asyncDispose]: async () => undefined,
  };
}

export interface RealNode extends AsyncDisposable {
  readonly home: string;
  readonly runtimeDir: string;
  readonly network: NetworkService;
  readonly sandboxes: SandboxFactory;
  readonly repository: SnapshotRepository;
  readonly templates: TemplateService;
  readonly orchestrator: NodeOrchestrator;
  /** What it found of the node before it. */
  readonly report: StartReport;
  readonly blockd: SupervisedBlockd;
  /** Runs a shell command in a running sandbox as root. */
  sh(sandboxId: string, script: string): Promise<string>;
}

/** `home` and `runtimeDir` of an earlier node: takes over after it, as a restarted server does. */
export async function startRealNode(options: {
  readonly deps: string;
  readonly home?: string;
  readonly runtimeDir?: string;
  /** Where paused sandboxes are stored. Default: in the home. */
  readonly stateDir?: string;
  readonly pool: number;
  readonly log?: Logger;
  readonly orchestrator?: Partial<OrchestratorOptions>;
  readonly maxLiveLowers?: number;
  readonly network?: Partial<NetworkServiceOptions>;
  readonly diskRateLimit?: DriveRateLimit;
  /** Static programs for the image's /bin: name to file. */
  readonly programs?: Readonly<Record<string, string>>;
  /** Stands between the node and its VMM. */
  readonly vmm?: (driver: VmmDriver) => VmmDriver;
}): Promise<RealNode> {
  const log = options.log ?? createLogger("test");
  if (options.log === undefined) log.level = process.env.AENV_TEST_LOG ?? "silent";
  const home = options.home ?? mkdtempSync("/tmp/orch-node-");
  const runtimeDir = options.runtimeDir ?? mkdtempSync("/run/orch-");
  const stateDir = options.stateDir ?? join(home, "state");
  await using stack = new AsyncDisposableStack();
  const runtime = await resolveRuntime({ depsDir: options.deps, log, progress: () => undefined });
  const qemu = createQemuDriver({
    ...runtime.qemu,
    mode: "tcg",
    kernelPath: runtime.kernelPath,
    kernelVersion: runtime.kernelVersion,
    probeCacheDir: join(home, "cache"),
    log,
  });
  const vmm = options.vmm?.(qemu) ?? qemu;
  const blockd = stack.use(
    await superviseBlockd(
      {
        argv: [process.execPath, join(ROOT, "src/main.ts"), "blockd"],
        socketPath: join(runtimeDir, "blockd.sock"),
        runtimeDir: join(runtimeDir, "blockd"),
        logPath: join(home, "blockd.log"),
      },
      log,
    ),
  );
  const network = stack.use(
    createNetworkService(
      {
        runtimeDir,
        hostInteractionCidr: `10.${options.pool}.0.0/16`,
        vethCidr: `10.${options.pool + 1}.0.0/16`,
        alwaysDeniedCidrs: [],
        ...options.network,
      },
      log,
    ),
  );
  const sandboxes = createSandboxFactory({
    vmm,
    memory: createMemoryService({ cacheDir: join(home, "memory"), maxCacheBytes: 2 ** 32, log }),
    network,
    blockClient: blockd.client,
    kernelPath: runtime.kernelPath,
    initrdPath: runtime.initrdPath,
    rootDir: join(home, "sandboxes"),
    runtimeDir,
    initTimeoutMs: 60_000,
    pollMs: 3,
    mergeCommand: [process.execPath, join(ROOT, "src/main.ts"), "merge-layers"],
    ...(options.diskRateLimit === undefined ? {} : { diskRateLimit: options.diskRateLimit }),
    ...(options.maxLiveLowers === undefined ? {} : { maxLiveLowers: options.maxLiveLowers }),
    log,
  });
  await network.start(await sandboxes.survivors());
  const repository = createPosixRepository({ root: join(home, "repository"), log });
  const orchestrator = createOrchestrator({
    repository,
    sandboxes,
    statePath: join(home, "records.db"),
    artifactsDir: join(stateDir, "artifacts"),
    tokenSeed: "seed",
    defaultTimeoutSeconds: 15,
    autoResumeMinTimeoutSeconds: 60,
    evictIntervalMs: 1000,
    log,
    ...options.orchestrator,
  });
  const report = await orchestrator.start();
  const imageDir = join(home, "image");
  rmSync(imageDir, { recursive: true, force: true });
  mkdirSync(imageDir, { recursive: true });
  const templates = createTemplateService({
    repository,
    images: await busyboxImage(imageDir, options.programs ?? {}),
    sandboxes,
    defaults: { cpuCount: 1, memoryMiB: 192, diskSizeMiB: 1024, defaultImage: "busybox" },
    maxConcurrentBuilds: 1,
    log,
  });
  await templates.start();
  const owned = stack.move();
  return {
    home,
    runtimeDir,
    network,
    sandboxes,
    repository,
    templates,
    orchestrator,
    report,
    blockd,
    async sh(sandboxId, script) {
      const route = orchestrator.route(sandboxId);
      if (route.kind !== "ready") throw new Error(`sandbox is ${route.kind}`);
      const agent = createAgentClient(route.hostAddress, orchestrator.accessToken(sandboxId));
      const outcome = await agent.run({
        cmd: "/bin/sh",
        args: ["-c", script],
        user: "root",
        timeoutMs: 120_000,
      });
      if (outcome.exitCode !== 0) throw new Error(`exit code ${outcome.exitCode}: ${outcome.stderr}`);
      return outcome.stdout.trim();
    },
    async [Symbol.asyncDispose]() {
      await using end = owned;
      end.defer(() => blockd.client.shutdown());
      end.defer(() => orchestrator.shutdown());
      end.defer(() => templates[Symbol.asyncDispose]());
    },
  };
}

/** The template of the image made of busybox, which it builds when it is not there. */
export async function busyboxTemplate(node: RealNode): Promise<string> {
  const name = "busybox";
  if ((await node.templates.resolve(name)) !== undefined) return name;
  const made = await node.templates.create({ name, tags: [] });
  await node.templates.startBuild(made.templateId, made.buildId, { steps: [] });
  for (;;) {
    const { build, logs } = await node.templates.build(made.templateId, made.buildId);
    if (build.status === "ready") return name;
    if (build.status === "error")
      throw new Error(JSON.stringify([build, await logs.select({ backward: true, limit: 5 })]));
    await Bun.sleep(50);
  }
}

/** What of a node is to be found on the host: VMMs, namespaces, work directories. */
export async function leftovers(node: {
  readonly home: string;
  readonly runtimeDir: string;
}): Promise<string[]> {
  const found: string[] = [];
  for (const { command } of processes()) {
    const ours = command.includes(`${node.home}/`) || command.includes(`${node.runtimeDir}/`);
    if (ours && command.includes("qemu-system")) found.push(command.slice(0, 60));
  }
  for (const dir of [
    join(node.home, "sandboxes"),
    join(node.runtimeDir, "vm"),
    join(node.runtimeDir, "netns"),
  ]) {
    if (!existsSync(dir)) continue;
    found.push(
      ...[...new Bun.Glob("*").scanSync({ cwd: dir, onlyFiles: false })].map((name) => join(dir, name)),
    );
  }
  return found;
}
