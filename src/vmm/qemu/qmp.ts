import type { Socket } from "bun";
import { AenvError } from "../../lib/errors.ts";

/**
 * QEMU's machine protocol: JSON objects, one a line, over a unix stream socket. QEMU greets, we answer
 * `qmp_capabilities`, then commands carry an id and events may come between the answers. QEMU serves one
 * client at a time: a second one waits without a greeting until the first has gone.
 */
export interface QmpEvent {
  readonly event: string;
  readonly data: Readonly<Record<string, unknown>>;
}

export interface QmpClient extends Disposable {
  /** Resolves when the connection is gone, whoever ended it. */
  readonly closed: Promise<void>;
  readonly isClosed: boolean;
  /**
   * Runs one command and returns its `return` value. Errors: `qmp_failed` (QEMU refused, its own words in the
   * message), `qmp_timeout` (default 30 s), `qmp_closed`.
   */
  execute(command: string, args?: Readonly<Record<string, unknown>>, timeoutMs?: number): Promise<unknown>;
}

export interface QmpOptions {
  readonly socketPath: string;
  /** For connecting, the greeting and the capabilities together. */
  readonly timeoutMs: number;
  readonly onEvent?: (event: QmpEvent) => void;
}

/** Answers to the commands we use are small; anything longer is not QEMU. */
const MAX_LINE_BYTES = 1 << 20;

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function failure(code: "qmp_failed" | "qmp_timeout" | "qmp_closed", message: string): AenvError {
  return new AenvError({ code, message });
}

/** Splits a byte stream into lines; throws when one grows past the limit. */
export function lineSplitter(onLine: (line: string) => void): (chunk: Uint8Array) => void {
  let parts: Uint8Array[] = [];
  let bytes = 0;
  return (chunk) => {
    let start = 0;
    for (let end = chunk.indexOf(10); end >= 0; end = chunk.indexOf(10, start)) {
      parts.push(chunk.subarray(start, end));
      const line = Buffer.concat(parts).toString("utf8").trim();
      parts = [];
      bytes = 0;
      start = end + 1;
      if (line !== "") onLine(line);
    }
    if (start === chunk.length) return;
    // The runtime reuses its buffer: what outlives this call is copied.
    parts.push(Uint8Array.from(chunk.subarray(start)));
    bytes += chunk.length - start;
    if (bytes > MAX_LINE_BYTES) throw failure("qmp_failed", "QEMU sent a line of more than 1 MiB");
  };
}

interface Pending {
  readonly command: string;
  readonly resolve: (value: unknown) => void;
  readonly reject: (error: Error) => void;
  readonly timer: ReturnType<typeof setTimeout>;
}

/** Connects, waits for the greeting and leaves negotiation mode. */
export async function connectQmp(options: QmpOptions): Promise<QmpClient> {
  const pending = new Map<number, Pending>();
  const gone = Promise.withResolvers<void>();
  const greeting = Promise.withResolvers<void>();
  // Nobody may be waiting for it when the connection fails early.
  greeting.promise.catch(() => undefined);
  let nextId = 1;
  let closed = false;
  let outgoing: Uint8Array[] = [];

  const finish = (error: AenvError): void => {
    if (closed) return;
    closed = true;
    greeting.reject(error);
    for (const waiting of pending.values()) {
      clearTimeout(waiting.timer);
      waiting.reject(error);
    }
    pending.clear();
    gone.resolve();
  };

  const onMessage = (line: string): void => {
    const message: unknown = JSON.parse(line);
    if (!isRecord(message)) throw failure("qmp_failed", "QEMU sent something that is not an object");
    if ("QMP" in message) {
      greeting.resolve();
      return;
    }
    if (typeof message.event === "string") {
      options.onEvent?.({ event: message.event, data: isRecord(message.data) ? message.data : {} });
      return;
    }
    const waiting = typeof message.id === "number" ? pending.get(message.id) : undefined;
    // An answer to a command that timed out has no one to go to.
    if (waiting === undefined) return;
    pending.delete(Number(message.id));
    clearTimeout(waiting.timer);
    if (isRecord(message.error)) {
      waiting.reject(failure("qmp_failed", `QEMU refused ${waiting.command}: ${String(message.error.desc)}`));
    } else waiting.resolve(message.return);
  };

  const split = lineSplitter(onMessage);
  const flush = (socket: Socket): void => {
    while (outgoing.length > 0) {
      const chunk = outgoing[0]!;
      const written = socket.write(chunk);
      if (written < chunk.length) {
        if (written > 0) outgoing[0] = chunk.subarray(written);
        return;
      }
      outgoing.shift();
    }
  };

  let socket: Socket;
  try {
    socket = await Bun.connect({
      unix: options.socketPath,
      socket: {
        data(from, chunk) {
          try {
            split(chunk);
          } catch (cause) {
            finish(
              new AenvError({ code: "qmp_failed", message: "cannot read what QEMU sent over QMP", cause }),
            );
            from.end();
          }
        },
        drain: flush,
        close: () => finish(failure("qmp_closed", "QEMU closed its control socket")),
        end: () => finish(failure("qmp_closed", "QEMU closed its control socket")),
        error: (_, cause) =>
          finish(new AenvError({ code: "qmp_closed", message: "the QMP connection broke", cause })),
      },
    });
  } catch (cause) {
    throw new AenvError({
      code: "qmp_closed",
      message: `cannot connect to QEMU's control socket ${options.socketPath}`,
      cause,
    });
  }

  const client: QmpClient = {
    closed: gone.promise,
    get isClosed() {
      return closed;
    },
    execute(command, args, timeoutMs = 30_000) {
      if (closed) return Promise.reject(failure("qmp_closed", `QEMU is gone, cannot run ${command}`));
      const id = nextId++;
      const { promise, resolve, reject } = Promise.withResolvers<unknown>();
      const timer = setTimeout(() => {
        pending.delete(id);
        reject(failure("qmp_timeout", `QEMU did not answer ${command} within ${timeoutMs} ms`));
      }, timeoutMs);
      pending.set(id, { command, resolve, reject, timer });
      outgoing.push(Buffer.from(`${JSON.stringify({ execute: command, arguments: args, id })}\n`));
      flush(socket);
      return promise;
    },
    [Symbol.dispose]() {
      finish(failure("qmp_closed", "the QMP connection was closed"));
      outgoing = [];
      socket.end();
    },
  };

  const started = performance.now();
  const timer = setTimeout(
    () => greeting.reject(failure("qmp_timeout", `QEMU did not greet within ${options.timeoutMs} ms`)),
    options.timeoutMs,
  );
  try {
    await greeting.promise;
    const left = options.timeoutMs - (performance.now() - started);
    await client.execute("qmp_capabilities", undefined, Math.max(100, left));
  } catch (error) {
    client[Symbol.dispose]();
    throw error;
  } finally {
    clearTimeout(timer);
  }
  return client;
}
