export { admitted } from "./admission.ts";
export { lockHome, lockRuntime } from "./home.ts";
export { createOrchestrator, type OrchestratorOptions } from "./orchestrator.ts";
export { hasTokenProtectedSandboxes } from "./protected.ts";
export type * from "./types.ts";
