import type { Logger } from "../lib/log.ts";
import { type PoolOptions, WarmPool } from "../network/index.ts";
import type { NetworkService, NetworkSlot } from "../network/types.ts";
import type { PreparedVm, VmmDriver } from "../vmm/types.ts";

/** A VMM process that waits for its VM, in the network slot that VM will have. */
export interface WarmVm {
  readonly slot: NetworkSlot;
  readonly vm: PreparedVm;
}

/** VMM processes made ready before anybody asks for a sandbox. Disposing ends those that were not taken. */
export interface VmPool extends AsyncDisposable {
  /**
   * Begins to fill; resolves when the low watermark is reached, an attempt to fill has failed, or after `patienceMs`. At
   * once where nothing is filled at start.
   */
  start(patienceMs: number): Promise<void>;
  /** Whoever gets one has to dispose of both. Undefined: none is ready, the caller starts a process of its own. */
  take(): Promise<WarmVm | undefined>;
  readonly idle: number;
}

/** Undefined where the VMM has no processes that could wait. */
export function createVmPool(parts: {
  readonly vmm: VmmDriver;
  readonly network: NetworkService;
  readonly pool: PoolOptions;
  readonly log: Logger;
}): VmPool | undefined {
  const { vmm, network, log } = parts;
  if (vmm.prepare === undefined) return undefined;
  const prepare = vmm.prepare.bind(vmm);
  const destroy = async ({ vm, slot }: WarmVm): Promise<void> => {
    const errors: unknown[] = [];
    // The slot goes even if the process in it could not be ended: nobody else would remove it.
    for (const part of [vm, slot]) {
      try {
        await part[Symbol.asyncDispose]();
      } catch (error) {
        errors.push(error);
      }
    }
    if (errors.length > 0) throw new AggregateError(errors, "a waiting VMM process could not be removed");
  };
  const create = async (): Promise<WarmVm> => {
    const slot = await network.acquire();
    try {
      const { netnsPath, tapName, macAddress } = slot;
      return { slot, vm: await prepare({ netnsPath, tapName, macAddress }) };
    } catch (error) {
      try {
        await slot[Symbol.asyncDispose]();
      } catch (cleanup) {
        log.warn(
          { err: cleanup },
          "the network slot of a VMM process that did not start could not be removed",
        );
      }
      throw error;
    }
  };
  let pool: WarmPool<WarmVm> | undefined;
  return {
    async start(patienceMs) {
      pool ??= new WarmPool(parts.pool, create, destroy, log);
      if (parts.pool.prewarm === false || parts.pool.maintenance === false) return;
      const deadline = performance.now() + patienceMs;
      while (pool.idle < parts.pool.lowWatermark && !pool.failing && performance.now() < deadline)
        await Bun.sleep(5);
    },
    async take() {
      for (;;) {
        const entry = pool?.take();
        if (entry === undefined || entry.vm.usable) return entry;
        log.warn("a VMM process that waited for its VM has ended");
        // Not the caller's trouble: there are others, or it starts a process of its own.
        await destroy(entry).catch((error: unknown) =>
          log.error({ err: error }, "what was left of a waiting VMM process could not be removed"),
        );
      }
    },
    get idle() {
      return pool?.idle ?? 0;
    },
    async [Symbol.asyncDispose]() {
      await pool?.[Symbol.asyncDispose]();
    },
  };
}
