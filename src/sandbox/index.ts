export { createAgentClient } from "./agent.ts";
export { assertSameVmm, createSandboxFactory, type SandboxFactoryOptions } from "./factory.ts";
export type * from "./types.ts";
