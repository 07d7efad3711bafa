import { AenvError } from "../lib/errors.ts";

const ANSWER_TIMEOUT_MS = 500;

/**
 * Address pools, device names and rules belong to the network namespace the server runs in, so the lock
 * does, too: an abstract unix socket, which the kernel scopes to the namespace and drops with its holder.
 * Whoever connects is told the holder's pid.
 */
export async function lockPool(poolBase: string): Promise<Disposable> {
  const name = `\0agentenv-network-${poolBase}`;
  let listener: ReturnType<typeof Bun.listen>;
  try {
    listener = Bun.listen({
      unix: name,
      socket: {
        open(socket) {
          socket.end(`${process.pid}\n`);
        },
        // Nobody has anything to say here.
        data(socket) {
          socket.terminate();
        },
      },
    });
  } catch (cause) {
    if (!(cause instanceof Error && "code" in cause && cause.code === "EADDRINUSE")) throw cause;
    const holder = await askHolder(name);
    throw new AenvError({
      code: "network_pool_in_use",
      status: 409,
      message: `the network pool at ${poolBase} is in use by another server${holder === "" ? "" : ` (pid ${holder})`}`,
      remediation: "stop that server, or give this one other pools in [network.internal]",
      cause,
    });
  }
  listener.unref();
  return { [Symbol.dispose]: () => listener.stop(true) };
}

async function askHolder(name: string): Promise<string> {
  const { promise, resolve } = Promise.withResolvers<string>();
  let said = "";
  const timer = setTimeout(() => resolve(said), ANSWER_TIMEOUT_MS);
  try {
    const socket = await Bun.connect({
      unix: name,
      socket: {
        data(_socket, bytes) {
          said += bytes.toString();
        },
        close: () => resolve(said),
        error: () => resolve(said),
      },
    });
    const answer = await promise;
    socket.terminate();
    return answer.trim();
  } catch (error) {
    // The holder went away between our two attempts; the caller reports the first.
    if (error instanceof Error) return "";
    throw error;
  } finally {
    clearTimeout(timer);
  }
}
