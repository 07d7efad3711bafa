export {
  createObserver,
  type NodeObserver,
  type ObservedSandboxes,
  type ObserverOptions,
} from "./observer.ts";
export type * from "./types.ts";
