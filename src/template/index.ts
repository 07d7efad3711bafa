export type { BuildLimits } from "./build.ts";
export { createTemplateService, type TemplateServiceOptions } from "./service.ts";
export type * from "./types.ts";
