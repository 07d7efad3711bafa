import { closeSync, fstatSync, mkdirSync, openSync, readSync } from "node:fs";
import { dirname } from "node:path";
import { AenvError } from "../../lib/errors.ts";
import type { Logger } from "../../lib/log.ts";
import { BlockdConnection, connectBlockd, unavailable } from "./client.ts";
import { BLOCKD_RUNNING_STATUS, type BlockClient, type BlockdSupervisorOptions } from "./protocol.ts";

/** A daemon that lives is given this long: on a host that swaps or is emulated its first answer takes many seconds. */
const START_TIMEOUT_MS = 60_000;
const SLOW_START_MS = 5_000;
/** Calls wait this long for one that is being started again. */
const CALL_PATIENCE_MS = 10_000;
const HELLO_TIMEOUT_MS = 5_000;
const POLL_MS = 20;
const FIRST_BACKOFF_MS = 100;
const LONGEST_BACKOFF_MS = 2_000;
/** A daemon that lived this long was healthy: the next restart is immediate again. */
const HEALTHY_MS = 5_000;
const LOG_TAIL_BYTES = 2000;

export interface SupervisedBlockd extends AsyncDisposable {
  readonly client: BlockClient;
}

/** A daemon that may still be starting: calls of the client wait for it. */
export interface StartingBlockd extends SupervisedBlockd {
  /** Resolved when the daemon answers; rejects when it cannot be started, and so do the client's calls. */
  readonly ready: Promise<void>;
}

/** What the daemon needs of our environment, and nothing that would change how the runtime behaves. */
function daemonEnvironment(): Record<string, string> {
  const kept = ["PATH", "HOME", "LANG", "TZ", "TMPDIR"];
  return Object.fromEntries(
    Object.entries(process.env).filter(
      (entry): entry is [string, string] =>
        entry[1] !== undefined && (kept.includes(entry[0]) || entry[0].startsWith("AENV_")),
    ),
  );
}

function logTail(logPath: string, fromBytes: number): string {
  const fd = openSync(logPath, "r");
  try {
    const { size } = fstatSync(fd);
    const start = Math.max(fromBytes, size - LOG_TAIL_BYTES);
    const tail = Buffer.alloc(Math.max(0, size - start));
    readSync(fd, tail, 0, tail.length, start);
    return tail.toString("utf8").trim() || `nothing is written in ${logPath}`;
  } finally {
    closeSync(fd);
  }
}

/** Starts a daemon that outlives us and waits until it answers. */
async function startDaemon(
  options: BlockdSupervisorOptions,
  log: Logger,
  stopped: AbortSignal,
): Promise<BlockdConnection> {
  const { argv, socketPath, runtimeDir, logPath } = options;
  mkdirSync(dirname(logPath), { recursive: true });
  const logFd = openSync(logPath, "a", 0o600);
  const logStart = fstatSync(logFd).size;
  let child: Bun.Subprocess<"ignore", number, number>;
  try {
    // detached is setsid: our terminal's and our group's signals do not reach it.
    child = Bun.spawn([...argv, "--socket", socketPath, "--runtime-dir", runtimeDir], {
      cwd: "/",
      env: daemonEnvironment(),
      stdio: ["ignore", logFd, logFd],
      detached: true,
    });
  } catch (cause) {
    throw unavailable(socketPath, `could not be started with ${argv.join(" ")}`, cause);
  } finally {
    closeSync(logFd);
  }
  child.unref();
  const startedMs = performance.now();
  let told = false;
  for (;;) {
    // Asked before the attempt: of two daemons started at once one ends, and the other answers, maybe a moment later.
    const ended = child.exitCode ?? child.signalCode;
    try {
      return await BlockdConnection.open(socketPath, HELLO_TIMEOUT_MS);
    } catch (error) {
      if (!(error instanceof AenvError && error.code === "blockd_unavailable")) throw error;
      const waitedMs = performance.now() - startedMs;
      if (ended !== null && !(ended === BLOCKD_RUNNING_STATUS && waitedMs < CALL_PATIENCE_MS)) {
        throw unavailable(socketPath, `ended at once (${ended}): ${logTail(logPath, logStart)}`, error);
      }
      if (stopped.aborted) throw unavailable(socketPath, "is not waited for any more", error);
      if (waitedMs > SLOW_START_MS && !told) {
        told = true;
        log.warn(
          { socketPath, logPath, waitAtMostMs: START_TIMEOUT_MS },
          "the block daemon takes long to start",
        );
      }
      if (waitedMs > START_TIMEOUT_MS) {
        child.kill("SIGKILL");
        throw unavailable(
          socketPath,
          `did not answer within ${START_TIMEOUT_MS / 1000} s: ${logTail(logPath, logStart)}`,
          error,
        );
      }
    }
    await Bun.sleep(POLL_MS);
  }
}

async function findOrStart(
  options: BlockdSupervisorOptions,
  log: Logger,
  stopped: AbortSignal,
): Promise<{ link: BlockdConnection; started: boolean }> {
  try {
    return { link: await BlockdConnection.open(options.socketPath, HELLO_TIMEOUT_MS), started: false };
  } catch (error) {
    // One that answers with another version, or hangs, serves running guests: it is not ours to replace.
    if (!(error instanceof AenvError && error.code === "blockd_unavailable")) throw error;
  }
  return { link: await startDaemon(options, log, stopped), started: true };
}

/** The client to be, with a shutdown that the supervisor knows to be meant. */
function futureClient(connected: Promise<BlockClient>, onShutdown: () => void): BlockClient {
  return {
    create: async (device) => (await connected).create(device),
    get: async (deviceId) => (await connected).get(deviceId),
    list: async () => (await connected).list(),
    release: async (deviceId) => (await connected).release(deviceId),
    flush: async (deviceId) => (await connected).flush(deviceId),
    restack: async (deviceId, sealedPath, freshUpper) =>
      (await connected).restack(deviceId, sealedPath, freshUpper),
    swapLowers: async (deviceId, swaps) => (await connected).swapLowers(deviceId, swaps),
    stats: async () => (await connected).stats(),
    shutdown: async () => {
      const client = await connected;
      onShutdown();
      await client.shutdown();
    },
    [Symbol.asyncDispose]: async () => (await connected)[Symbol.asyncDispose](),
  };
}

async function findOrStartClient(options: BlockdSupervisorOptions, log: Logger, stopped: AbortSignal) {
  const { socketPath } = options;
  const { link, started } = await findOrStart(options, log, stopped);
  log.info({ socketPath, started }, started ? "block daemon started" : "block daemon found");
  try {
    return { link, client: await connectBlockd(socketPath, { connectPatienceMs: CALL_PATIENCE_MS }) };
  } catch (error) {
    link.close();
    throw error;
  }
}

/**
 * Finds the daemon on the socket or starts it, and keeps it running: one that dies is started again and
 * exports its devices at the same sockets. Calls of the client made meanwhile wait for it (up to 10 s).
 * Disposing stops watching and leaves the daemon alone; `client.shutdown()` ends it for good.
 * Errors: `blockd_unavailable` (503) with the log's last lines, `blockd_version_mismatch`.
 */
export async function superviseBlockd(
  options: BlockdSupervisorOptions,
  log: Logger,
): Promise<SupervisedBlockd> {
  const blockd = startBlockd(options, log);
  await blockd.ready;
  return blockd;
}

/** As `superviseBlockd`, for a caller with other work to do while the daemon starts. */
export function startBlockd(options: BlockdSupervisorOptions, log: Logger): StartingBlockd {
  const { socketPath } = options;
  const stop = new AbortController();
  const first = findOrStartClient(options, log, stop.signal);
  const connected = first.then(({ client }) => client);
  const ready = connected.then(() => undefined);
  // The failure is told by `ready` and by every call, whenever somebody asks.
  ready.catch(() => undefined);
  let link: BlockdConnection | undefined;
  const stopped = new Promise<void>((resolve) => stop.signal.addEventListener("abort", () => resolve()));

  const watch = async (firstLink: BlockdConnection) => {
    link = firstLink;
    if (stop.signal.aborted) link.close();
    let failures = 0;
    while (!stop.signal.aborted) {
      const since = performance.now();
      await link.closed;
      if (stop.signal.aborted) return;
      if (performance.now() - since > HEALTHY_MS) failures = 0;
      log.error({ socketPath }, "block daemon is gone, its devices stand still until it is back");
      while (!stop.signal.aborted) {
        if (failures > 0) {
          const waitMs = Math.min(LONGEST_BACKOFF_MS, FIRST_BACKOFF_MS * 2 ** (failures - 1));
          await Promise.race([Bun.sleep(waitMs), stopped]);
          if (stop.signal.aborted) return;
        }
        failures++;
        try {
          const next = await findOrStart(options, log, stop.signal);
          link = next.link;
          if (stop.signal.aborted) link.close();
          log.warn({ socketPath }, "block daemon is back");
          break;
        } catch (error) {
          log.error({ err: error, failures }, "block daemon could not be started");
        }
      }
    }
  };
  const watching = first.then(
    ({ link: firstLink }) => watch(firstLink),
    () => undefined,
  );

  return {
    ready,
    client: futureClient(connected, () => stop.abort()),
    async [Symbol.asyncDispose]() {
      stop.abort();
      link?.close();
      await watching;
      await connected.then(
        (client) => client[Symbol.asyncDispose](),
        // It never started: there is nothing to let go of, and `ready` has told why.
        () => undefined,
      );
    },
  };
}
