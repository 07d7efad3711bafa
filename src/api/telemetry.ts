import { isUuid } from "../lib/ids.ts";
import type { Observer, SandboxLogEntry, SandboxMetric } from "../observability/types.ts";
import { badRequest } from "./errors.ts";
import { type Route, route } from "./route.ts";
import { sandboxId } from "./sandboxes.ts";
import * as schema from "./schemas.ts";
import type { ApiOrchestrator } from "./types.ts";

export interface TelemetryRoutesOptions {
  readonly observer: Observer;
  readonly orchestrator: ApiOrchestrator;
}

const LEVELS = ["debug", "info", "warn", "error"] as const;
const MAX_IDS = 100;

function metricJson(point: SandboxMetric) {
  const { atMs, ...figures } = point;
  return {
    timestamp: new Date(atMs).toISOString(),
    timestampUnix: Math.floor(atMs / 1000),
    ...figures,
  };
}

function logJson(entry: SandboxLogEntry) {
  const { atMs, ...rest } = entry;
  return { timestamp: new Date(atMs).toISOString(), ...rest };
}

/** Resource figures and logs of sandboxes. Looking never wakes a paused one. */
export function telemetryRoutes(options: TelemetryRoutesOptions): Route[] {
  const { observer, orchestrator } = options;
  /** 404 unless it is there, running or paused. */
  const known = (params: Readonly<Record<string, string>>) => orchestrator.get(sandboxId(params)).id;

  return [
    route({
      method: "GET",
      path: "/sandboxes/metrics",
      summary: "The last figures of several sandboxes; unknown ids are left out",
      tag: "sandboxes",
      authenticated: true,
      query: schema.SandboxesMetricsQuery,
      success: [{ status: 200, schema: schema.SandboxesWithMetrics, description: "Figures by sandbox" }],
      errors: [400],
      run: async ({ query }) => {
        const ids = query.sandbox_ids.split(",").filter((id) => id !== "");
        if (ids.length > MAX_IDS) throw badRequest(`invalid query: sandbox_ids: more than ${MAX_IDS} ids`);
        const live = new Set(orchestrator.list().map((record) => record.id));
        const sandboxes: Record<string, ReturnType<typeof metricJson>> = {};
        for (const id of ids.map((text) => text.toLowerCase())) {
          const point = isUuid(id) && live.has(id) ? observer.latestMetric(id) : undefined;
          if (point !== undefined) sandboxes[id] = metricJson(point);
        }
        return { status: 200, json: { sandboxes } };
      },
    }),
    route({
      method: "GET",
      path: "/sandboxes/:id/metrics",
      summary: "Resource use over time, oldest first; a point every five seconds, kept for an hour",
      tag: "sandboxes",
      authenticated: true,
      query: schema.SandboxMetricsQuery,
      success: [{ status: 200, schema: schema.SandboxMetric.array(), description: "Points" }],
      errors: [400, 404],
      run: async ({ params, query: { start, end } }) => {
        const id = known(params);
        if (start !== undefined && end !== undefined && start > end) {
          throw badRequest(`invalid query: start ${start} is after end ${end}`);
        }
        const points = observer.metrics(id, {
          ...(start === undefined ? {} : { startMs: start * 1000 }),
          // A bound in whole seconds holds the whole second.
          ...(end === undefined ? {} : { endMs: end * 1000 + 999 }),
        });
        return { status: 200, json: points.map(metricJson) };
      },
    }),
    route({
      method: "GET",
      path: "/sandboxes/:id/logs",
      summary: "What happened to the sandbox and what its console printed, oldest first",
      tag: "sandboxes",
      authenticated: true,
      query: schema.SandboxLogsQuery,
      success: [{ status: 200, schema: schema.SandboxLogs, description: "Log lines" }],
      errors: [400, 404],
      run: async ({ params, query }) => {
        const entries = await observer.logs(known(params));
        const window = entries.filter((entry) => query.start === undefined || entry.atMs >= query.start);
        const logEntries = window.slice(0, query.limit).map(logJson);
        return {
          status: 200,
          json: {
            logs: logEntries.map(({ timestamp, message }) => ({ timestamp, line: message })),
            logEntries,
          },
        };
      },
    }),
    route({
      method: "GET",
      path: "/v2/sandboxes/:id/logs",
      summary: "The sandbox's log from a point in time on, newest first unless asked otherwise",
      tag: "sandboxes",
      authenticated: true,
      query: schema.SandboxLogsV2Query,
      success: [{ status: 200, schema: schema.SandboxLogsV2, description: "Log lines" }],
      errors: [400, 404],
      run: async ({ params, query }) => {
        const all = await observer.logs(known(params));
        const forward = query.direction === "forward";
        const minimum = LEVELS.indexOf(query.level ?? "debug");
        const wanted = all.filter(
          (entry) =>
            LEVELS.indexOf(entry.level) >= minimum &&
            (query.search === undefined || entry.message.includes(query.search)) &&
            (query.cursor === undefined ||
              (forward ? entry.atMs >= query.cursor : entry.atMs <= query.cursor)),
        );
        const ordered = forward ? wanted : wanted.toReversed();
        return { status: 200, json: { logs: ordered.slice(0, query.limit).map(logJson) } };
      },
    }),
  ];
}
