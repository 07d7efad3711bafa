export type { GuestLedger } from "./egress/index.ts";
export {
  DEFAULT_POLICY,
  type EgressInput,
  type EgressPolicy,
  MAX_POLICY_ENTRIES,
  parseEgressPolicy,
} from "./egress-policy.ts";
export { requireRateLimits } from "./host.ts";
export { type PoolOptions, WarmPool } from "./pool.ts";
export { createNetworkService } from "./service.ts";
export { holdDevice, letDeviceGo } from "./stillness.ts";
export type {
  KeptSlot,
  NetworkService,
  NetworkServiceOptions,
  NetworkSlot,
  RuleCounter,
  SlotPolicyReport,
} from "./types.ts";
