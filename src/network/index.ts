export { createNetworkService } from "./service.ts";
export type { NetworkService, NetworkServiceOptions, NetworkSlot } from "./types.ts";
