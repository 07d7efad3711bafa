import type { z } from "zod";
import type { SlotPolicyReport } from "../network/types.ts";
import { type Route, route } from "./route.ts";
import { sandboxId } from "./sandboxes.ts";
import { NetworkReport } from "./schemas.ts";
import type { ApiOrchestrator } from "./types.ts";

function reportJson(report: SlotPolicyReport): z.input<typeof NetworkReport> {
  const { slot, node, policy, restricted, filtered, rules, refused, proxiedConnections, byName } = report;
  return {
    slot: { ...slot },
    node: { deniedCidrs: [...node.deniedCidrs], dnsServer: node.dnsServer },
    base: policy.base,
    allowOut: [...policy.allowOut],
    denyOut: [...policy.denyOut],
    restricted,
    filtered,
    rules: rules.map((rule) => ({ ...rule })),
    refused: { ...refused },
    openConnections: proxiedConnections,
    connections: { ...byName.connections },
    names: { ...byName.names },
    recentRefusals: byName.recent.map(({ atMs, what }) => ({ at: new Date(atMs).toISOString(), what })),
  };
}

/** What is in force for a sandbox's packets, for people who ask why something does not get through. */
export function networkRoutes(orchestrator: ApiOrchestrator): Route[] {
  return [
    route({
      method: "GET",
      path: "/sandboxes/:id/network",
      summary: "What a running sandbox may reach, and what that has let through and refused",
      tag: "sandboxes",
      authenticated: true,
      success: [{ status: 200, schema: NetworkReport, description: "Policy in force and its counters" }],
      errors: [404, 409],
      run: async ({ params }) => ({
        status: 200,
        json: reportJson(await orchestrator.networkReport(sandboxId(params))),
      }),
    }),
  ];
}
