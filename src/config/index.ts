export type { NodeIdentity } from "./identity.ts";
export {
  type Environment,
  type LoadConfigOptions,
  loadConfig,
  type NodeConfig,
  redactConfig,
} from "./load.ts";
export { parseListenAddress } from "./schema.ts";
