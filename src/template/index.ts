export { type BuildLimits, createTemplateService, type TemplateServiceOptions } from "./service.ts";
export type * from "./types.ts";
