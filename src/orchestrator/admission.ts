import type { RunningSandbox, SandboxFactory } from "../sandbox/types.ts";
import type { Seat } from "./capacity.ts";

/** What of a factory starts VMs. */
export type VmStarter = Pick<SandboxFactory, "boot" | "resume">;

/**
 * Starts VMs that are nobody's sandbox, those of builds, in seats of the node like any other: error
 * `capacity_unavailable` 429 when there is none. A seat is taken until its VM has ended.
 */
export function admitted(sandboxes: VmStarter, reserve: (memoryMiB: number) => Seat): VmStarter {
  const start = async (memoryMiB: number, work: () => Promise<RunningSandbox>): Promise<RunningSandbox> => {
    const seat = reserve(memoryMiB);
    try {
      const running = await work();
      seat.started();
      void running.exited.then(() => seat[Symbol.dispose]());
      return running;
    } catch (error) {
      seat[Symbol.dispose]();
      throw error;
    }
  };
  return {
    boot: (spec) => start(spec.shape.memoryMiB, () => sandboxes.boot(spec)),
    resume: (spec) => start(spec.state.shape.memoryMiB, () => sandboxes.resume(spec)),
  };
}
