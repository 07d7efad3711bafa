export { hostReleaseSources } from "./apt/apt.ts";
export { doctorMain, requireHost } from "./doctor.ts";
export { type ResolveRuntimeOptions, resolveRuntime } from "./resolve.ts";
export { setupMain } from "./setup.ts";
export type { QemuDeps, RuntimeDeps } from "./types.ts";
