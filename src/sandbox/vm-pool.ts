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
  /** Begins to fill; resolves when the low watermark is reached, or after `patienceMs`. */
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
    await vm[Symbol.asyncDispose]();
    await slot[Symbol.asyncDispose]();
  };
  const create = async (): Promise<WarmVm> => {
    const slot = await network.acquire();
    try {
      const { netnsPath, tapName, macAddress } = slot;
      return { slot, vm: await prepare({ netnsPath, tapName, macAddress }) };
    } catch (error) {
      await slot[Symbol.asyncDispose]();
      throw error;
    }
  };
  let pool: WarmPool<WarmVm> | undefined;
  return {
    async start(patienceMs) {
      pool ??= new WarmPool(parts.pool, create, destroy, log);
      if (parts.pool.prewarm === false) return;
      const deadline = performance.now() + patienceMs;
      while (pool.idle < parts.pool.lowWatermark && performance.now() < deadline) await Bun.sleep(5);
    },
    async take() {
      for (;;) {
        const entry = pool?.take();
        if (entry === undefined || entry.vm.usable) return entry;
        log.warn("a VMM process that waited for its VM has ended");
        await destroy(entry);
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
