import { DEFAULT_POLICY, type EgressPolicy } from "../../src/network/index.ts";
import type { SlotPolicyReport } from "../../src/network/types.ts";

/** A report as a slot without a network gives it. */
export function fakeReport(policy: EgressPolicy = DEFAULT_POLICY): SlotPolicyReport {
  return {
    slot: { index: 7, hostAddress: "10.11.0.7", hostDevice: "veth-7", netnsPath: "/run/none" },
    node: { deniedCidrs: ["10.11.0.0/16"], dnsServer: "192.0.2.53" },
    policy,
    restricted: false,
    filtered: false,
    rules: [],
    refused: { packets: 0, bytes: 0 },
    proxiedConnections: 0,
    byName: {
      connections: { relayed: 0, refused: 0 },
      names: { answered: 0, refused: 0, failed: 0 },
      recent: [],
    },
  };
}
