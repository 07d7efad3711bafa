export { createAgentClient } from "./agent.ts";
export { consoleLogPath } from "./console.ts";
export { assertSameVmm, createSandboxFactory, type SandboxFactoryOptions } from "./factory.ts";
export type * from "./types.ts";
export { createVmPool, type VmPool } from "./vm-pool.ts";

/** The program `merge-layers`, see createLayerMerger. */
export async function mergeLayersMain(): Promise<number> {
  const { runMerge } = await import("./merge-program.ts");
  return runMerge();
}
