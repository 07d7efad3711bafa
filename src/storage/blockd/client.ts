import type { Socket } from "bun";
import { AenvError } from "../../lib/errors.ts";
import type { LayerRef, UpperRef } from "../overlaybd/types.ts";
import { fromBlockdError } from "./errors.ts";
import { encodeFrame, FrameDecoder, FrameWriter } from "./framing.ts";
import {
  BLOCKD_PROTOCOL_VERSION,
  type BlockClient,
  type BlockdRequest,
  type BlockdResponseMessage,
  type BlockdResults,
  type BlockdStats,
  type DeviceInfo,
  type DeviceSpec,
  type LowerSwap,
} from "./protocol.ts";

export interface BlockClientOptions {
  /** Deadline of every call. Default 30 s. */
  readonly timeoutMs?: number;
  /**
   * How long a call that finds no daemon, or loses it before the answer, keeps looking for one, within its
   * deadline. Default 0: it fails at once. Useful where a supervisor brings the daemon back. Repeating is
   * safe: every request has the same outcome when it is made again.
   */
  readonly connectPatienceMs?: number;
}

const DEFAULT_TIMEOUT_MS = 30_000;
const CONNECT_RETRY_MS = 50;

export function unavailable(socketPath: string, message: string, cause?: unknown): AenvError {
  return new AenvError({
    code: "blockd_unavailable",
    status: 503,
    message: `block daemon on ${socketPath} ${message}`,
    remediation: "try again; if it stays away, read the daemon's log file",
    cause,
  });
}

interface Waiting {
  resolve(value: unknown): void;
  reject(error: unknown): void;
  readonly timer: ReturnType<typeof setTimeout>;
}

/** One connection that was greeted. It is never repaired: a lost one is replaced. */
export class BlockdConnection {
  readonly #socketPath: string;
  readonly #waiting = new Map<number, Waiting>();
  readonly #decoder = new FrameDecoder();
  #socket!: Socket<undefined>;
  #writer!: FrameWriter;
  #nextId = 1;
  #lost: AenvError | undefined;
  #lose!: () => void;
  /** Resolves when the connection is gone, whoever ended it. */
  readonly closed: Promise<void>;

  private constructor(socketPath: string) {
    this.#socketPath = socketPath;
    this.closed = new Promise((resolve) => {
      this.#lose = resolve;
    });
  }

  get usable(): boolean {
    return this.#lost === undefined;
  }

  /** Connects and greets. Errors: `blockd_unavailable`, `blockd_version_mismatch`, `blockd_timeout`. */
  static async open(socketPath: string, timeoutMs: number): Promise<BlockdConnection> {
    const connection = new BlockdConnection(socketPath);
    try {
      connection.#socket = await Bun.connect<undefined>({
        unix: socketPath,
        socket: {
          open: (socket) => {
            connection.#writer = new FrameWriter(socket);
          },
          data: (_, chunk) => connection.#onData(chunk),
          drain: () => connection.#writer.drain(),
          end: () => connection.#fail("closed the connection"),
          close: () => connection.#fail("closed the connection"),
          error: (_, error) => connection.#fail("failed", error),
        },
      });
    } catch (cause) {
      connection.#fail("does not answer", cause);
      throw unavailable(socketPath, "does not answer", cause);
    }
    try {
      await connection.call({ op: "hello", version: BLOCKD_PROTOCOL_VERSION }, timeoutMs);
    } catch (error) {
      connection.close();
      throw error;
    }
    return connection;
  }

  #onData(chunk: Uint8Array): void {
    try {
      for (const message of this.#decoder.feed(chunk)) this.#onResponse(message as BlockdResponseMessage);
    } catch (error) {
      this.#fail("sent something unreadable", error);
    }
  }

  #onResponse(message: BlockdResponseMessage): void {
    if (message.id === null) {
      const reason = message.ok ? "no reason" : message.error.message;
      this.#fail(`refused a message: ${reason}`);
      return;
    }
    const waiting = this.#waiting.get(message.id);
    // None: its deadline passed.
    if (waiting === undefined) return;
    this.#waiting.delete(message.id);
    clearTimeout(waiting.timer);
    if (message.ok) waiting.resolve(message.result);
    else waiting.reject(fromBlockdError(message.error));
  }

  #fail(what: string, cause?: unknown): void {
    if (this.#lost !== undefined) return;
    this.#lost = unavailable(this.#socketPath, what, cause);
    for (const waiting of this.#waiting.values()) {
      clearTimeout(waiting.timer);
      waiting.reject(this.#lost);
    }
    this.#waiting.clear();
    this.#socket?.terminate();
    this.#lose();
  }

  call<Op extends BlockdRequest["op"]>(
    request: Extract<BlockdRequest, { op: Op }>,
    timeoutMs: number,
  ): Promise<BlockdResults[Op]> {
    if (this.#lost !== undefined) return Promise.reject(this.#lost);
    const id = this.#nextId++;
    return new Promise<unknown>((resolve, reject) => {
      const timer = setTimeout(() => {
        this.#waiting.delete(id);
        reject(
          new AenvError({
            code: "blockd_timeout",
            status: 504,
            message: `block daemon did not answer ${request.op} within ${timeoutMs} ms`,
            remediation: "the request may still be carried out: ask for the device before trying again",
          }),
        );
      }, timeoutMs);
      this.#waiting.set(id, { resolve, reject, timer });
      try {
        this.#writer.send(encodeFrame({ id, ...request }));
      } catch (error) {
        clearTimeout(timer);
        this.#waiting.delete(id);
        reject(error);
      }
    }) as Promise<BlockdResults[Op]>;
  }

  close(): void {
    this.#fail("connection was closed by this side");
  }
}

class Client implements BlockClient {
  readonly #socketPath: string;
  readonly #timeoutMs: number;
  readonly #patienceMs: number;
  #connection: BlockdConnection | undefined;
  #connecting: Promise<BlockdConnection> | undefined;
  #disposed = false;

  constructor(socketPath: string, options: BlockClientOptions) {
    this.#socketPath = socketPath;
    this.#timeoutMs = options.timeoutMs ?? DEFAULT_TIMEOUT_MS;
    this.#patienceMs = options.connectPatienceMs ?? 0;
  }

  /** The connection there is, or a new one. Callers at the same time share the attempt. */
  connect(): Promise<BlockdConnection> {
    if (this.#disposed) return Promise.reject(unavailable(this.#socketPath, "client was disposed"));
    if (this.#connection?.usable) return Promise.resolve(this.#connection);
    this.#connecting ??= this.#dial().finally(() => {
      this.#connecting = undefined;
    });
    return this.#connecting;
  }

  async #dial(): Promise<BlockdConnection> {
    const giveUpAt = performance.now() + Math.min(this.#patienceMs, this.#timeoutMs);
    for (;;) {
      try {
        const connection = await BlockdConnection.open(this.#socketPath, this.#timeoutMs);
        if (this.#disposed) {
          connection.close();
          throw unavailable(this.#socketPath, "client was disposed");
        }
        this.#connection = connection;
        return connection;
      } catch (error) {
        const retry = error instanceof AenvError && error.code === "blockd_unavailable" && !this.#disposed;
        if (!retry || performance.now() + CONNECT_RETRY_MS > giveUpAt) throw error;
        await Bun.sleep(CONNECT_RETRY_MS);
      }
    }
  }

  async #call<Op extends BlockdRequest["op"]>(
    request: Extract<BlockdRequest, { op: Op }>,
  ): Promise<BlockdResults[Op]> {
    const startedAt = performance.now();
    for (;;) {
      const connection = await this.connect();
      const leftMs = this.#timeoutMs - (performance.now() - startedAt);
      try {
        return await connection.call<Op>(request, Math.max(1, leftMs));
      } catch (error) {
        const lost = error instanceof AenvError && error.code === "blockd_unavailable";
        const patient = performance.now() - startedAt < this.#patienceMs;
        if (!lost || !patient || this.#disposed) throw error;
        // One that accepts and then drops calls would be asked without end.
        await Bun.sleep(CONNECT_RETRY_MS);
      }
    }
  }

  create(device: DeviceSpec): Promise<DeviceInfo> {
    return this.#call<"create">({ op: "create", device });
  }

  async get(deviceId: string): Promise<DeviceInfo | undefined> {
    return (await this.#call<"get">({ op: "get", deviceId })) ?? undefined;
  }

  async list(): Promise<DeviceInfo[]> {
    const all: DeviceInfo[] = [];
    for (;;) {
      const { devices, more } = await this.#call<"list">({ op: "list", after: all.at(-1)?.deviceId });
      all.push(...devices);
      if (!more) return all;
    }
  }

  async release(deviceId: string): Promise<void> {
    await this.#call<"release">({ op: "release", deviceId });
  }

  async flush(deviceId: string): Promise<void> {
    await this.#call<"flush">({ op: "flush", deviceId });
  }

  restack(deviceId: string, sealedPath: string, freshUpper: UpperRef): Promise<LayerRef> {
    return this.#call<"restack">({ op: "restack", deviceId, sealedPath, freshUpper });
  }

  async swapLowers(deviceId: string, swaps: readonly LowerSwap[]): Promise<void> {
    await this.#call<"swapLowers">({ op: "swapLowers", deviceId, swaps });
  }

  async stats(): Promise<BlockdStats> {
    const all: BlockdStats["devices"][number][] = [];
    for (;;) {
      const { more, ...part } = await this.#call<"stats">({ op: "stats", after: all.at(-1)?.deviceId });
      all.push(...part.devices);
      if (!more) return { ...part, devices: all };
    }
  }

  /** Resolves when the daemon has answered and its process has let go of the socket. */
  async shutdown(): Promise<void> {
    const connection = await this.connect();
    const startedAt = performance.now();
    await connection.call<"shutdown">({ op: "shutdown" }, this.#timeoutMs);
    const leftMs = Math.max(1, this.#timeoutMs - (performance.now() - startedAt));
    const late = Promise.withResolvers<void>();
    const timer = setTimeout(late.resolve, leftMs);
    try {
      await Promise.race([connection.closed, late.promise]);
    } finally {
      clearTimeout(timer);
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#disposed = true;
    this.#connection?.close();
  }
}

/**
 * Connects to a running daemon. A connection that is lost later is replaced at the next call; calls under
 * way then fail with `blockd_unavailable` (503), unless `connectPatienceMs` says otherwise. Disposing closes the connection and nothing else.
 */
export async function connectBlockd(
  socketPath: string,
  options: BlockClientOptions = {},
): Promise<BlockClient> {
  const client = new Client(socketPath, options);
  await client.connect();
  return client;
}
