import type { TCPSocketListener } from "bun";
import { AenvError } from "../lib/errors.ts";
import { type ClientData, Connection } from "./connection.ts";
import { DEFAULT_LIMITS, type FrontOptions, type Shared } from "./options.ts";
import { formatPlainError } from "./replies.ts";
import { SignedUrls } from "./signed.ts";

/*
 * The server's one listener. It reads HTTP/1.1 from raw sockets because a sandbox's traffic must pass
 * untouched: trailers, early hints, header spelling, half-closed tunnels, resets and backpressure in both
 * directions, none of which survive Request/Response objects. Control-plane requests are small JSON calls;
 * they are collected and handed to the API as ordinary Request objects.
 */

export interface Front {
  readonly hostname: string;
  readonly port: number;
  readonly connections: number;
  /** Stops accepting, lets running requests end for `graceMs`, then cuts what is left. */
  stop(graceMs: number): Promise<void>;
}

function listen(
  options: FrontOptions,
  shared: Shared,
  connections: Set<Connection>,
): TCPSocketListener<ClientData> {
  try {
    return Bun.listen<ClientData>({
      hostname: options.hostname,
      port: options.port,
      allowHalfOpen: true,
      data: {},
      socket: {
        open(socket) {
          if (connections.size >= shared.limits.maxConnections) {
            socket.end(
              formatPlainError(429, "too many connections", {
                close: true,
                head: false,
                headers: [["Retry-After", "1"]],
              }),
            );
            return;
          }
          const connection = new Connection(shared, socket, (ended) => connections.delete(ended));
          socket.data = { connection };
          connections.add(connection);
        },
        data: (socket, chunk) => socket.data.connection?.onData(chunk),
        drain: (socket) => socket.data.connection?.onDrain(),
        end: (socket) => socket.data.connection?.onEnd(),
        close: (socket) => socket.data.connection?.onClose(),
        error: (socket) => socket.data.connection?.destroy(),
      },
    });
  } catch (cause) {
    throw listenError(options.hostname, options.port, cause);
  }
}

function listenError(hostname: string, port: number, cause: unknown): AenvError {
  const inUse = (cause as { code?: string }).code === "EADDRINUSE";
  return new AenvError({
    code: inUse ? "port_in_use" : "listen_failed",
    message: inUse
      ? `${hostname}:${port} is in use by another process`
      : `cannot listen on ${hostname}:${port}`,
    remediation: inUse
      ? `stop the process that listens there (ss -ltnp 'sport = :${port}' names it) or set API_ADDR to a free address, e.g. API_ADDR=127.0.0.1:8001`
      : "set API_ADDR to an address of this machine",
    cause,
  });
}

/**
 * Throws what `startFront` would for an address that cannot be listened at (`port_in_use`, `listen_failed`).
 * Asked before anything is taken over or changed: a server that cannot be reached must not touch sandboxes.
 */
export function requireFreeAddress(hostname: string, port: number): void {
  try {
    Bun.listen({ hostname, port, socket: { data: () => undefined } }).stop(true);
  } catch (cause) {
    throw listenError(hostname, port, cause);
  }
}

/** Opens the listener; requests are answered from now on. Errors: `port_in_use`, `listen_failed`. */
export function startFront(options: FrontOptions): Front {
  const connections = new Set<Connection>();
  const shared: Shared = {
    options,
    limits: { ...DEFAULT_LIMITS, ...options.limits },
    signedUrls: new SignedUrls(options.orchestrator),
    perSandbox: new Map(),
    stopping: false,
  };
  const listener = listen(options, shared, connections);
  const sweeper = setInterval(() => {
    const now = performance.now();
    for (const connection of connections) connection.sweep(now);
  }, 250);

  return {
    hostname: listener.hostname,
    port: listener.port,
    get connections() {
      return connections.size;
    },
    async stop(graceMs) {
      shared.stopping = true;
      listener.stop(false);
      const deadline = performance.now() + graceMs;
      for (;;) {
        for (const connection of [...connections]) if (connection.idle) connection.destroy();
        if (connections.size === 0 || performance.now() >= deadline) break;
        await Bun.sleep(20);
      }
      for (const connection of [...connections]) connection.destroy();
      clearInterval(sweeper);
      listener.stop(true);
    },
  };
}
