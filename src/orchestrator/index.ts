export { lockHome } from "./home.ts";
export { createOrchestrator, type OrchestratorOptions } from "./orchestrator.ts";
export { hasTokenProtectedSandboxes } from "./store.ts";
export type * from "./types.ts";
