export { lockHome } from "./home.ts";
export { createOrchestrator, type OrchestratorOptions } from "./orchestrator.ts";
export type * from "./types.ts";
