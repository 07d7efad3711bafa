import { z } from "zod";
import type { AenvError } from "../lib/errors.ts";
import { MAX_FORK_CHILDREN } from "../orchestrator/types.ts";
import type { SnapshotRecord } from "../snapshot/types.ts";
import { paginate } from "./pagination.ts";
import { type Route, route } from "./route.ts";
import { type SandboxRoutesOptions, sandboxId, serverTiming, startedSandbox } from "./sandboxes.ts";
import { ErrorBody, named, PageQuery, Sandbox, TimeoutSeconds } from "./schemas.ts";

const ForkRequest = z.object({
  timeout: TimeoutSeconds.optional().describe("Of the children; default: the source's own"),
  count: z.int().min(1).max(MAX_FORK_CHILDREN).default(1),
});
named.add(ForkRequest, { id: "ForkRequest" });

const ForkResult = z
  .object({ sandbox: Sandbox.optional(), error: ErrorBody.optional() })
  .describe("Exactly one of the two");
named.add(ForkResult, { id: "ForkResult" });

const SnapshotRequest = z.object({
  name: z
    .string()
    .min(1)
    .max(257)
    .optional()
    .describe("Name that shall point at it, alias or alias:tag; another snapshot's is taken over"),
});
named.add(SnapshotRequest, { id: "SnapshotRequest" });

const SnapshotInfo = z.object({
  snapshotID: z.string().describe("Usable as templateID, and in DELETE /templates/{id}"),
  names: z.array(z.string()),
  cpuCount: z.int(),
  memoryMB: z.int(),
  diskSizeMB: z.int(),
  createdAt: z.iso.datetime(),
  updatedAt: z.iso.datetime(),
});
named.add(SnapshotInfo, { id: "SnapshotInfo" });

const ListSnapshotsQuery = z.object({
  ...PageQuery,
  sandboxID: z.string().optional().describe("Made of this sandbox, which need not exist any more"),
  name: z.string().optional().describe("Id or name"),
});

function snapshotJson(record: SnapshotRecord) {
  return {
    snapshotID: record.id,
    names: record.aliases,
    cpuCount: record.resources.cpuCount,
    memoryMB: record.resources.memoryMiB,
    diskSizeMB: record.resources.diskSizeMiB,
    createdAt: record.createdAt,
    updatedAt: record.updatedAt,
  };
}

function errorJson(error: AenvError) {
  return {
    code: error.status,
    message: error.message,
    error_code: error.code,
    ...(error.remediation === undefined ? {} : { remediation: error.remediation }),
  };
}

/** Forks and snapshots of sandboxes. */
export function snapshotRoutes(options: SandboxRoutesOptions): Route[] {
  const { orchestrator } = options;
  const started = startedSandbox(options);
  return [
    route({
      method: "POST",
      path: "/sandboxes/:id/fork",
      summary: "Start copies of a running sandbox from its present state; the sandbox goes on",
      tag: "sandboxes",
      authenticated: true,
      body: ForkRequest,
      success: [
        {
          status: 201,
          schema: ForkResult.array(),
          description: "One result per child, in order; each started or failed by itself",
        },
      ],
      errors: [400, 404, 409, 507],
      run: async ({ params, body }) => {
        const id = sandboxId(params);
        const outcomes = await orchestrator.fork(id, {
          count: body.count,
          ...(body.timeout === undefined ? {} : { timeoutSeconds: body.timeout }),
        });
        return {
          status: 201,
          json: outcomes.map((outcome) =>
            "record" in outcome ? { sandbox: started(outcome.record) } : { error: errorJson(outcome.error) },
          ),
          headers: serverTiming(timingsOf(id).fork),
        };
      },
    }),
    route({
      method: "POST",
      path: "/sandboxes/:id/snapshots",
      summary: "Make a snapshot of a running sandbox, which stands still for a moment and goes on",
      tag: "sandboxes",
      authenticated: true,
      body: SnapshotRequest,
      success: [
        {
          status: 201,
          schema: SnapshotInfo,
          description: "Stored; Server-Timing tells as `stopped` how long the sandbox stood still",
        },
      ],
      errors: [400, 404, 409, 507],
      run: async ({ params, body }) => {
        const id = sandboxId(params);
        const record = await orchestrator.snapshot(id, body.name === undefined ? {} : { name: body.name });
        return { status: 201, json: snapshotJson(record), headers: serverTiming(timingsOf(id).snapshot) };
      },
    }),
    route({
      method: "GET",
      path: "/snapshots",
      summary: "List snapshots of sandboxes, page by page, newest first",
      tag: "templates",
      authenticated: true,
      query: ListSnapshotsQuery,
      success: [
        {
          status: 200,
          schema: SnapshotInfo.array(),
          description: "One page; X-Next-Token is present when there is another",
        },
      ],
      errors: [400],
      run: async ({ query }) => {
        const records = await orchestrator.listSnapshots({
          ...(query.sandboxID === undefined ? {} : { sandboxId: query.sandboxID.toLowerCase() }),
          ...(query.name === undefined ? {} : { name: query.name }),
        });
        const page = paginate(records, ({ createdAt, id }) => ({ createdAt, id }), {
          limit: query.limit,
          nextToken: query.nextToken,
        });
        return {
          status: 200,
          json: page.items.map(snapshotJson),
          ...(page.nextToken === undefined ? {} : { headers: { "x-next-token": page.nextToken } }),
        };
      },
    }),
    route({
      method: "GET",
      path: "/snapshots/:id",
      summary: "One snapshot, by id or name",
      tag: "templates",
      authenticated: true,
      success: [{ status: 200, schema: SnapshotInfo, description: "The snapshot" }],
      errors: [404],
      run: async ({ params }) => ({
        status: 200,
        json: snapshotJson(await orchestrator.getSnapshot(params.id ?? "")),
      }),
    }),
  ];

  /** The source may have been deleted since. */
  function timingsOf(id: string): ReturnType<typeof orchestrator.timings> {
    return orchestrator.list().some((record) => record.id === id) ? orchestrator.timings(id) : {};
  }
}
