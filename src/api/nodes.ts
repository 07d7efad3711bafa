import { AenvError } from "../lib/errors.ts";
import type { Observer } from "../observability/types.ts";
import { type Route, route } from "./route.ts";
import { listedSandbox } from "./sandboxes.ts";
import * as schema from "./schemas.ts";
import type { ApiOrchestrator } from "./types.ts";

export interface NodeRoutesOptions {
  readonly observer: Observer;
  readonly orchestrator: ApiOrchestrator;
  /** Builds whose layers are on this node. */
  readonly cachedBuilds: () => Promise<readonly string[]>;
}

/** A node answers for itself alone; a gateway asks all of them. */
export function nodeRoutes(options: NodeRoutesOptions): Route[] {
  const { observer, orchestrator } = options;
  const sameCluster = (wanted: string | undefined, own: string) =>
    wanted === undefined || wanted === "" || wanted.toLowerCase() === own;
  return [
    route({
      method: "GET",
      path: "/nodes",
      summary: "This node, as a list; empty when it does not show itself",
      tag: "node",
      authenticated: true,
      query: schema.NodesQuery,
      success: [{ status: 200, schema: schema.Node.array(), description: "The node" }],
      errors: [],
      run: async ({ query }) => {
        const node = await observer.node();
        const shown = node !== undefined && sameCluster(query.clusterID, node.clusterID);
        return { status: 200, json: shown ? [node] : [] };
      },
    }),
    route({
      method: "GET",
      path: "/nodes/:id",
      summary: "This node with its running sandboxes",
      tag: "node",
      authenticated: true,
      query: schema.NodesQuery,
      success: [{ status: 200, schema: schema.NodeDetail, description: "The node" }],
      errors: [404],
      run: async ({ params, query }) => {
        const node = await observer.node();
        if (node === undefined || node.id !== params.id || !sameCluster(query.clusterID, node.clusterID)) {
          throw new AenvError({
            code: "node_not_found",
            status: 404,
            message: `node ${params.id} was not found`,
            remediation: "this server knows itself alone: GET /nodes shows its id",
          });
        }
        const { sandboxStartingCount: _, ...detail } = node;
        const running = orchestrator.list().filter((record) => record.state === "running");
        return {
          status: 200,
          json: {
            ...detail,
            cachedBuilds: await options.cachedBuilds(),
            sandboxes: running.map(listedSandbox),
          },
        };
      },
    }),
  ];
}

/** One deployment has one team: everybody with the key. */
export function teamRoutes(observer: Observer): Route[] {
  return [
    route({
      method: "GET",
      path: "/teams",
      summary: "The one team there is; clients check their key with it",
      tag: "node",
      authenticated: true,
      success: [{ status: 200, schema: schema.Team.array(), description: "The team" }],
      errors: [],
      run: async () => {
        const clusterID = (await observer.node())?.clusterID ?? schema.NIL_UUID;
        // The caller has the key; no answer ever holds it.
        return { status: 200, json: [{ teamID: clusterID, name: "default", apiKey: "", isDefault: true }] };
      },
    }),
  ];
}
