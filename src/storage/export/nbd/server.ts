import { chmodSync, rmSync } from "node:fs";
import type { Socket } from "bun";
import type { BufferPool } from "./pool.ts";
import { NbdSession } from "./session.ts";
import type { NbdEvent, NbdTarget } from "./types.ts";

export interface NbdExportOptions {
  /** A file of this name from an earlier process is removed: the caller owns the directory. */
  readonly socketPath: string;
  readonly target: NbdTarget;
  readonly pool: BufferPool;
  readonly onEvent: (event: NbdEvent) => void;
  /** Further connections are closed at once. Default 16. */
  readonly maxConnections?: number;
  /** A client that has not picked the export by then is disconnected. Default 10 s. */
  readonly handshakeTimeoutMs?: number;
}

export interface NbdExport extends Disposable {
  readonly connections: number;
  /** Ends all connections, stops listening and removes the socket file. Idempotent. */
  [Symbol.dispose](): void;
}

interface Connection {
  session: NbdSession;
  deadline: ReturnType<typeof setTimeout>;
}

/** Serves one target on a unix socket (mode 0600) of the calling thread. */
export function serveNbd(options: NbdExportOptions): NbdExport {
  const { target, pool, onEvent, socketPath } = options;
  const maxConnections = options.maxConnections ?? 16;
  const handshakeTimeoutMs = options.handshakeTimeoutMs ?? 10_000;
  const open = new Set<Socket<Connection | undefined>>();

  const forget = (socket: Socket<Connection | undefined>) => {
    open.delete(socket);
    const connection = socket.data;
    if (connection === undefined) return;
    clearTimeout(connection.deadline);
    connection.session.onClosed();
    socket.data = undefined;
  };

  rmSync(socketPath, { force: true });
  const listener = Bun.listen<Connection | undefined>({
    unix: socketPath,
    socket: {
      open(socket) {
        if (open.size >= maxConnections) {
          onEvent({ kind: "refused", message: `more than ${maxConnections} connections` });
          socket.terminate();
          return;
        }
        open.add(socket);
        const session = new NbdSession({
          target,
          pool,
          onEvent,
          transport: {
            write: (bytes, offset, length) => Math.max(0, socket.write(bytes, offset, length)),
            pause: () => socket.pause(),
            resume: () => socket.resume(),
            close: () => socket.end(),
            defer: (step) => setImmediate(step),
          },
        });
        const deadline = setTimeout(() => {
          if (session.negotiated) return;
          onEvent({ kind: "protocol_error", message: "client did not finish the handshake in time" });
          socket.terminate();
        }, handshakeTimeoutMs);
        socket.data = { session, deadline };
        session.start();
      },
      data(socket, chunk) {
        socket.data?.session.onData(chunk);
      },
      drain(socket) {
        socket.data?.session.onDrain();
      },
      close: forget,
      error(socket, error) {
        onEvent({ kind: "protocol_error", message: error.message });
        forget(socket);
        socket.terminate();
      },
    },
  });
  chmodSync(socketPath, 0o600);

  let stopped = false;
  return {
    get connections() {
      return open.size;
    },
    [Symbol.dispose]() {
      if (stopped) return;
      stopped = true;
      for (const socket of [...open]) {
        forget(socket);
        socket.terminate();
      }
      listener.stop(true);
      rmSync(socketPath, { force: true });
    },
  };
}
