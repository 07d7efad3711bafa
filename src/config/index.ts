export { configMain } from "./command.ts";
export type { NodeIdentity } from "./identity.ts";
export {
  describeKeys,
  type Environment,
  type KeyDescription,
  type LoadConfigOptions,
  loadConfig,
  loadServerConfig,
  type NodeConfig,
  redactConfig,
} from "./load.ts";
export { checkoutHome } from "./paths.ts";
export { parseListenAddress } from "./schema.ts";
export {
  type ApiKey,
  type ApiKeyOptions,
  deriveEnvdToken,
  deriveTrafficToken,
  loadApiKey,
  loadPreviousApiKey,
  loadTokenSeed,
  managedApiKeyPath,
  managedSeedPath,
  type TokenSeed,
  type TokenSeedOptions,
} from "./secrets.ts";
