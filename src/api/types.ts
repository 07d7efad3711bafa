import type { Orchestrator } from "../orchestrator/types.ts";
import type { TemplateService } from "../template/types.ts";

/** What the API asks of the rooms below it. */
export type ApiOrchestrator = Pick<
  Orchestrator,
  | "create"
  | "createCold"
  | "get"
  | "list"
  | "kill"
  | "pause"
  | "resume"
  | "connect"
  | "setTimeout"
  | "refresh"
  | "updateNetwork"
  | "networkReport"
  | "fork"
  | "snapshot"
  | "listSnapshots"
  | "getSnapshot"
  | "accessToken"
  | "trafficToken"
  | "timings"
>;

export type ApiTemplates = Pick<
  TemplateService,
  | "create"
  | "startBuild"
  | "cancel"
  | "hasFiles"
  | "putFiles"
  | "build"
  | "list"
  | "resolve"
  | "delete"
  | "assignTags"
  | "removeTags"
  | "tags"
  | "setPublic"
>;
