/** So that none is collected as garbage. */
const listeners = new Set<Disposable>();

/**
 * Address pools (10.N and 10.N+1) apart from a server that may run on this machine, and from tests that run at
 * the same time: held by an abstract socket, until it is let go or this process ends.
 */
export function holdPool(): { readonly pool: number; readonly held: Disposable } {
  const first = Math.floor(Math.random() * 60);
  for (let tried = 0; tried < 60; tried++) {
    const pool = 64 + ((first + tried) % 60) * 2;
    try {
      const listener = Bun.listen({
        unix: `\0aenv-test-pool-${pool}`,
        socket: { data: () => undefined },
      });
      listener.unref();
      const held = {
        [Symbol.dispose]: () => {
          listener.stop(true);
          listeners.delete(held);
        },
      };
      listeners.add(held);
      return { pool, held };
    } catch (error) {
      if ((error as { code?: string }).code !== "EADDRINUSE") throw error;
    }
  }
  throw new Error("all address pools of the tests are in use");
}
