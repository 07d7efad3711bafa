import { chmodSync, lstatSync, mkdirSync, readdirSync, rmSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { parseArgs } from "node:util";
import type { Socket } from "bun";
import { AenvError, errorChain } from "../../lib/errors.ts";
import { FileLock, lockHolder } from "../../lib/file-lock.ts";
import { createLogger, type Logger } from "../../lib/log.ts";
import { ublkStamp } from "../export/ublk/index.ts";
import { Devices } from "./devices.ts";
import { toBlockdError } from "./errors.ts";
import { encodeFrame, FrameDecoder, FrameWriter } from "./framing.ts";
import { serveMetrics } from "./metrics.ts";
import {
  BLOCKD_MAX_MESSAGE_BYTES,
  BLOCKD_PROTOCOL_VERSION,
  BLOCKD_RUNNING_STATUS,
  type BlockdError,
  type BlockdRequestMessage,
  type BlockdResponseMessage,
  type BlockdResults,
  type BlockdStats,
} from "./protocol.ts";
import { describeIssues, requestSchema } from "./schema.ts";
import { DeviceTable, fileStem } from "./table.ts";
import { shareOf, WorkerHandle } from "./worker-pool.ts";

const DEFAULT_WORKERS = 2;
const MAX_WORKERS = 64;
const DEFAULT_BLOCK_CACHE_MIB = 128;
const MAX_BLOCK_CACHE_MIB = 1 << 20;
const DEFAULT_WARM_LAYERS = 256;
const MAX_WARM_LAYERS = 1 << 16;
/** The kernel has numbers for about a million; each costs it some 100 KiB. */
const DEFAULT_MAX_UBLK_DEVICES = 4096;
const MAX_UBLK_DEVICES = 1 << 16;
const MAX_CLIENTS = 64;
const MAX_REQUESTS_PER_CLIENT = 256;
/** A page of a list stays below this, so that it fits into a message with room to spare. */
const PAGE_BYTES = BLOCKD_MAX_MESSAGE_BYTES / 2;
/** What `sun_path` holds besides its final zero. */
const MAX_SOCKET_PATH_BYTES = 107;
const DRAIN_TIMEOUT_MS = 20_000;

interface DaemonOptions {
  readonly socketPath: string;
  readonly runtimeDir: string;
  readonly workers: number;
  readonly blockCacheMiB: number;
  readonly warmLayers: number;
  readonly maxUblkDevices: number;
  /** Where to serve metrics: a unix socket's path, or host and port. */
  readonly metrics:
    | { readonly unix: string }
    | { readonly hostname: string; readonly port: number }
    | undefined;
}

const USAGE = `usage: agentenv blockd --socket PATH --runtime-dir DIR [options]
       agentenv blockd --probe-ublk

  --socket PATH            control socket
  --runtime-dir DIR        device table and export sockets
  --workers N              threads that serve devices, 1 to ${MAX_WORKERS} (default ${DEFAULT_WORKERS})
  --block-cache-mib N      memory for decompressed blocks, all workers together (default ${DEFAULT_BLOCK_CACHE_MIB})
  --warm-layers N          layer files kept open for the next device, all workers together; 0: none (default ${DEFAULT_WARM_LAYERS})
  --max-ublk-devices N     block devices of the kernel at once (default ${DEFAULT_MAX_UBLK_DEVICES})
  --metrics ADDRESS        serve Prometheus metrics at HOST:PORT or the unix socket /PATH`;

function parseOptions(argv: string[]): DaemonOptions {
  const { values } = parseArgs({
    args: argv,
    options: {
      socket: { type: "string" },
      "runtime-dir": { type: "string" },
      workers: { type: "string" },
      "block-cache-mib": { type: "string" },
      "warm-layers": { type: "string" },
      "max-ublk-devices": { type: "string" },
      metrics: { type: "string" },
    },
  });
  const { socket, "runtime-dir": runtimeDir, metrics } = values;
  if (socket === undefined || runtimeDir === undefined)
    throw new TypeError("--socket and --runtime-dir are needed");
  const whole = (
    name: "workers" | "block-cache-mib" | "warm-layers" | "max-ublk-devices",
    absent: number,
    max: number,
    min = 1,
  ) => {
    const text = values[name] ?? String(absent);
    const value = /^\d+$/.test(text) ? Number(text) : -1;
    if (value < min || value > max) throw new TypeError(`--${name} must be ${min} to ${max}`);
    return value;
  };
  return {
    socketPath: resolve(socket),
    runtimeDir: resolve(runtimeDir),
    workers: whole("workers", DEFAULT_WORKERS, MAX_WORKERS),
    blockCacheMiB: whole("block-cache-mib", DEFAULT_BLOCK_CACHE_MIB, MAX_BLOCK_CACHE_MIB),
    warmLayers: whole("warm-layers", DEFAULT_WARM_LAYERS, MAX_WARM_LAYERS, 0),
    maxUblkDevices: whole("max-ublk-devices", DEFAULT_MAX_UBLK_DEVICES, MAX_UBLK_DEVICES),
    metrics: metrics === undefined ? undefined : parseMetricsAddress(metrics),
  };
}

function parseMetricsAddress(text: string): DaemonOptions["metrics"] {
  if (text.startsWith("/")) return { unix: text };
  const [, v6, host, port] = /^(?:\[([0-9A-Fa-f:.]+)\]|([^\s[\]]+)):(\d{1,5})$/.exec(text) ?? [];
  const hostname = v6 ?? host;
  if (hostname === undefined || Number(port) > 65535)
    throw new TypeError(`--metrics must be HOST:PORT or an absolute path, not ${text}`);
  return { hostname, port: Number(port) };
}

function checkSocketPath(path: string): void {
  const bytes = Buffer.byteLength(path);
  if (bytes <= MAX_SOCKET_PATH_BYTES) return;
  throw new AenvError({
    code: "socket_path_too_long",
    message: `socket path ${path} has ${bytes} bytes, the kernel takes ${MAX_SOCKET_PATH_BYTES}`,
    remediation: "choose a shorter home or runtime directory",
  });
}

/** Held for the life of the process: one daemon per runtime directory, whatever its socket is called. */
function lockRuntimeDir(runtimeDir: string): FileLock {
  const path = join(runtimeDir, "lock");
  const lock = FileLock.tryAcquire(path, "blockd");
  if (lock !== undefined) return lock;
  throw new AenvError({
    code: "blockd_running",
    message: `a block daemon (pid ${lockHolder(path) ?? "unknown"}) already serves ${runtimeDir}`,
    remediation: "use that one, or stop it first",
  });
}

/** Removes a socket file nobody listens on; a live one or a file of another kind is an error. */
async function clearStaleSocket(path: string): Promise<void> {
  const present = lstatSync(path, { throwIfNoEntry: false });
  if (present === undefined) return;
  if (!present.isSocket()) {
    throw new AenvError({
      code: "socket_path_taken",
      message: `${path} exists and is not a socket`,
      remediation: "move it away or choose another socket path",
    });
  }
  let probe: Socket;
  try {
    probe = await Bun.connect({ unix: path, socket: { data: () => undefined } });
  } catch {
    // Refused: the process that bound it is gone.
    rmSync(path, { force: true });
    return;
  }
  probe.terminate();
  throw new AenvError({
    code: "blockd_running",
    message: `a process already listens on ${path}`,
    remediation: "use that daemon, or stop it first",
  });
}

/** Socket files in the export directory that belong to no device. */
function removeStrayExports(exportDir: string, deviceIds: readonly string[]): void {
  const wanted = new Set(deviceIds.map((id) => `${fileStem(id)}.sock`));
  for (const name of readdirSync(exportDir))
    if (!wanted.has(name)) rmSync(join(exportDir, name), { force: true });
}

/** As many of `items` as one message holds. */
function page<T>(items: readonly T[]): { items: T[]; more: boolean } {
  let bytes = 0;
  const taken: T[] = [];
  for (const item of items) {
    bytes += Buffer.byteLength(JSON.stringify(item)) + 1;
    if (taken.length > 0 && bytes > PAGE_BYTES) return { items: taken, more: true };
    taken.push(item);
  }
  return { items: taken, more: false };
}

interface Client {
  readonly decoder: FrameDecoder;
  readonly writer: FrameWriter;
  greeted: boolean;
  running: number;
  /** Ends as soon as what was written has been sent. */
  ending: boolean;
}

class Daemon {
  readonly #startedAt = new Date().toISOString();
  readonly #devices: Devices;
  readonly #ready: Promise<void>;
  readonly #log: Logger;
  readonly #clients = new Map<Socket<undefined>, Client>();
  readonly #onShutdown: (failed: boolean) => void;

  constructor(devices: Devices, ready: Promise<void>, log: Logger, onShutdown: (failed: boolean) => void) {
    this.#devices = devices;
    this.#ready = ready;
    this.#log = log;
    this.#onShutdown = onShutdown;
  }

  listen(socketPath: string): Disposable {
    const listener = Bun.listen<undefined>({
      unix: socketPath,
      socket: {
        open: (socket) => {
          if (this.#clients.size >= MAX_CLIENTS) {
            this.#log.warn(`more than ${MAX_CLIENTS} clients, one was turned away`);
            socket.terminate();
            return;
          }
          const client = { decoder: new FrameDecoder(), writer: new FrameWriter(socket) };
          this.#clients.set(socket, { ...client, greeted: false, running: 0, ending: false });
        },
        data: (socket, chunk) => this.#onData(socket, chunk),
        drain: (socket) => {
          const client = this.#clients.get(socket);
          client?.writer.drain();
          if (client?.ending && client.writer.idle) socket.end();
        },
        close: (socket) => {
          this.#clients.delete(socket);
        },
        error: (socket, error) => {
          this.#log.warn({ err: error }, "control connection failed");
          this.#clients.delete(socket);
          socket.terminate();
        },
      },
    });
    chmodSync(socketPath, 0o600);
    return { [Symbol.dispose]: () => listener.stop(true) };
  }

  #onData(socket: Socket<undefined>, chunk: Uint8Array): void {
    const client = this.#clients.get(socket);
    if (client === undefined || client.ending) return;
    try {
      for (const message of client.decoder.feed(chunk)) {
        if (!this.#accept(socket, client, message)) return;
      }
    } catch (error) {
      this.#reject(socket, client, null, "bad_message", errorChain(error).join(": "));
    }
  }

  /** False when the connection has to end. */
  #accept(socket: Socket<undefined>, client: Client, message: unknown): boolean {
    const parsed = requestSchema.safeParse(message);
    if (!parsed.success) {
      const id = (message as { id?: unknown } | null)?.id;
      const readable = typeof id === "number" && Number.isSafeInteger(id);
      const text = describeIssues(parsed.error);
      if (readable && client.greeted) {
        this.#send(socket, client, {
          id,
          ok: false,
          error: { kind: "invalid_request", code: "bad_request", message: text, status: 400 },
        });
        return true;
      }
      this.#reject(socket, client, readable ? id : null, "bad_message", text);
      return false;
    }
    const request = parsed.data;
    if (!client.greeted && request.op !== "hello") {
      this.#reject(socket, client, request.id, "hello_expected", "the first message must be hello");
      return false;
    }
    if (request.op === "hello" && request.version !== BLOCKD_PROTOCOL_VERSION) {
      const text = `this daemon speaks protocol version ${BLOCKD_PROTOCOL_VERSION}, not ${request.version}`;
      this.#reject(socket, client, request.id, "blockd_version_mismatch", text);
      return false;
    }
    if (client.running >= MAX_REQUESTS_PER_CLIENT) {
      this.#reject(socket, client, request.id, "too_many_requests", "too many requests at once");
      return false;
    }
    client.greeted = true;
    client.running++;
    void this.#answer(socket, client, request);
    return true;
  }

  #reject(socket: Socket<undefined>, client: Client, id: number | null, code: string, message: string): void {
    this.#log.warn({ code }, `control connection ended: ${message}`);
    client.ending = true;
    this.#send(socket, client, {
      id,
      ok: false,
      error: { kind: "invalid_request", code, message, status: 400 },
    });
    if (client.writer.idle) socket.end();
  }

  #send(socket: Socket<undefined>, client: Client, message: BlockdResponseMessage): void {
    if (this.#clients.get(socket) !== client) return;
    client.writer.send(encodeFrame(message));
  }

  async #answer(socket: Socket<undefined>, client: Client, request: BlockdRequestMessage): Promise<void> {
    const { id, op } = request;
    try {
      const result = await this.#perform(request);
      this.#send(socket, client, { id, ok: true, result });
    } catch (error) {
      const described: BlockdError = toBlockdError(error);
      if (described.kind !== "invalid_request") this.#log.error({ op, err: error }, `${op} failed`);
      this.#send(socket, client, { id, ok: false, error: described });
    } finally {
      client.running--;
    }
  }

  async #perform(request: BlockdRequestMessage): Promise<BlockdResults[keyof BlockdResults]> {
    if (request.op === "hello") return { version: BLOCKD_PROTOCOL_VERSION, pid: process.pid };
    await this.#ready;
    const devices = this.#devices;
    switch (request.op) {
      case "create":
        return devices.create(request.device);
      case "get":
        return devices.get(request.deviceId);
      case "list": {
        const { items, more } = page(devices.list(request.after));
        return { devices: items, more };
      }
      case "release":
        await devices.release(request.deviceId);
        return null;
      case "flush":
        await devices.flush(request.deviceId);
        return null;
      case "restack": {
        const { deviceId, sealedPath, freshUpper } = request;
        return devices.restack(deviceId, { sealedPath, freshUpper });
      }
      case "swapLowers":
        await devices.swapLowers(request.deviceId, request.swaps);
        return null;
      case "stats": {
        const { after = "" } = request;
        const stats = await this.stats();
        const { items, more } = page(stats.devices.filter((device) => device.deviceId > after));
        return { ...stats, devices: items, more };
      }
      case "shutdown":
        return this.#shutdown();
    }
  }

  async stats(): Promise<BlockdStats> {
    const { devices, workers } = await this.#devices.stats();
    const { rss } = process.memoryUsage();
    const operations = this.#devices.operations();
    return { pid: process.pid, startedAt: this.#startedAt, rssBytes: rss, workers, operations, devices };
  }

  async #shutdown(): Promise<null> {
    this.#log.info("shutdown was asked for");
    const failures = await this.#devices.closeAll(true);
    // The answer has to leave before the process does.
    setTimeout(() => this.#onShutdown(failures.size > 0), 20);
    if (failures.size === 0) return null;
    const text = [...failures].map(([id, error]) => `${id}: ${errorChain(error).join(": ")}`).join("; ");
    throw new AenvError({
      code: "blockd_flush_failed",
      message: `devices that could not be flushed: ${text}`,
    });
  }
}

/** Resolves with the exit code, once a signal or a request ended the daemon and everything is closed. */
async function serve(options: DaemonOptions, log: Logger): Promise<number> {
  const { socketPath, runtimeDir } = options;
  await using scope = new AsyncDisposableStack();
  // Sockets are born with the umask's mode, before any chmod could come.
  process.umask(0o077);
  mkdirSync(runtimeDir, { recursive: true, mode: 0o700 });
  mkdirSync(dirname(socketPath), { recursive: true, mode: 0o700 });
  const exportDir = join(runtimeDir, "nbd");
  mkdirSync(exportDir, { recursive: true, mode: 0o700 });
  checkSocketPath(socketPath);
  checkSocketPath(join(exportDir, `${fileStem("")}.sock`));
  scope.use(lockRuntimeDir(runtimeDir));
  await clearStaleSocket(socketPath);

  const { promise: ended, resolve: end } = Promise.withResolvers<{ code: number; drain: boolean }>();
  let stopping = false;
  const workerOptions = {
    blockCacheBytes: Math.floor((options.blockCacheMiB * 2 ** 20) / options.workers),
    indexCacheDirectory: join(runtimeDir, "index-cache"),
    ublkStamp: ublkStamp(runtimeDir),
  };
  const { warmLayers, workers: workerCount } = options;
  const workers = Array.from(
    { length: workerCount },
    (_, index) =>
      new WorkerHandle({ ...workerOptions, warmLayers: shareOf(warmLayers, workerCount, index) }, (error) => {
        if (stopping) return;
        // Its files and sockets are in an unknown state: a new process has none of them.
        log.fatal({ err: error }, "a worker died, the daemon ends");
        end({ code: 70, drain: false });
      }),
  );
  const table = new DeviceTable(runtimeDir);
  const devices = new Devices(table, workers, exportDir, log, options.maxUblkDevices);
  const ready = devices.restore().then(() =>
    removeStrayExports(
      exportDir,
      devices.list().map((d) => d.deviceId),
    ),
  );
  ready.catch((error: unknown) => {
    log.fatal({ err: error }, "the device table could not be restored");
    end({ code: 1, drain: false });
  });
  const daemon = new Daemon(devices, ready, log, (failed) => end({ code: failed ? 1 : 0, drain: false }));
  scope.use(daemon.listen(socketPath));
  if (options.metrics !== undefined) scope.use(serveMetrics(options.metrics, () => daemon.stats(), log));

  for (const signal of ["SIGTERM", "SIGINT"] as const) {
    process.once(signal, () => {
      log.info(`${signal}: flushing and closing`);
      end({ code: 0, drain: true });
    });
  }
  log.info({ socketPath, runtimeDir, workers: workers.length }, "block daemon listens");

  let { code, drain } = await ended;
  stopping = true;
  const deadline = Bun.sleep(DRAIN_TIMEOUT_MS).then(() => "late" as const);
  const closed = (async () => {
    if (drain) {
      await ready;
      for (const [deviceId, error] of await devices.closeAll(false)) {
        log.error({ deviceId, err: error }, "device could not be flushed");
        code = 1;
      }
    }
    await Promise.all(workers.map((worker) => worker.call<"exit">({ op: "exit" })));
    await Promise.all(workers.map((worker) => worker.exited));
    return "closed" as const;
  })().catch((error: unknown) => {
    log.error({ err: error }, "closing failed");
    code ||= 1;
    return "failed" as const;
  });
  if ((await Promise.race([closed, deadline])) === "late") {
    log.fatal(`devices were not closed within ${DRAIN_TIMEOUT_MS / 1000} s`);
    code ||= 1;
  }
  log.info({ code }, "block daemon ends");
  return code;
}

/** The program `agentenv blockd`. Exit codes: 0 ended as told, 1 failed or already running, 2 bad usage. */
export async function runDaemon(argv: string[]): Promise<number> {
  if (argv[0] === "--probe-ublk") {
    const { probeUblkHere } = await import("../export/ublk/index.ts");
    process.stdout.write(`${JSON.stringify(await probeUblkHere())}\n`);
    return 0;
  }
  let options: DaemonOptions;
  try {
    options = parseOptions(argv);
  } catch (error) {
    process.stderr.write(`agentenv blockd: ${errorChain(error).join(": ")}\n${USAGE}\n`);
    return 2;
  }
  const log = createLogger("blockd");
  process.on("uncaughtException", (error) => {
    log.fatal({ err: error }, "uncaught exception");
    process.exit(70);
  });
  process.on("unhandledRejection", (error) => {
    log.fatal({ err: error }, "unhandled rejection");
    process.exit(70);
  });
  let code = 1;
  try {
    code = await serve(options, log);
  } catch (error) {
    const remediation =
      error instanceof AenvError && error.remediation !== undefined ? `; ${error.remediation}` : "";
    log.fatal({ err: error }, `block daemon cannot run: ${errorChain(error).join(": ")}${remediation}`);
    if (error instanceof AenvError && error.code === "blockd_running") code = BLOCKD_RUNNING_STATUS;
  }
  // Nothing is left to wait for: timers and half-dead workers must not keep the process.
  process.exit(code);
}
